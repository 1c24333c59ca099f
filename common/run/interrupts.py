"""What may end a run early: Ctrl-C or SIGTERM, a service that stays away, numbers that are not finite."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from common.base import distributed
from common.generation.batches import RolloutBatch

REPEAT_SECONDS = 2.0  # a terminal and torchrun both send the same signal, one shortly after the other


@contextmanager
def stop_on_signal() -> Iterator[list[str]]:
    """Records the first Ctrl-C or SIGTERM, so that the loop can finish the step and save; a second one stops at once.

    Yields:
        A list that stays empty until a signal arrives; then it holds the signal's name.

    Raises:
        KeyboardInterrupt: a second signal arrived.
    """
    received: list[str] = []
    first = 0.0

    def record(number: int, frame: Any) -> None:
        nonlocal first
        if received and time.monotonic() - first > REPEAT_SECONDS:
            raise KeyboardInterrupt
        if received:
            return
        first = time.monotonic()
        received.append(signal.Signals(number).name)
        if distributed.rank() == 0:  # not print: the signal may have interrupted one
            with suppress(OSError):  # the terminal may be gone
                os.write(2, f"\n{received[0]}: finishing this step, then saving; once more stops at once\n".encode())

    before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def save_on_outage(save: Callable[[], None] | None = None) -> Iterator[None]:
    """Saves and ends the run when a service that it needs stays away; every rank gets the OutageError.

    Args:
        save: saves the last complete step; None: there is nothing to save yet.

    Raises:
        SystemExit: after an outage, with OUTAGE_EXIT_CODE.
    """
    try:
        yield
    except distributed.OutageError as outage:
        distributed.print_main(outage, file=sys.stderr)
        if save is not None:
            save()
            distributed.print_main("saved; the same command goes on from here", file=sys.stderr)
        distributed.shutdown(distributed.OUTAGE_EXIT_CODE)
        raise SystemExit(distributed.OUTAGE_EXIT_CODE) from outage


@contextmanager
def keep_batch(out_dir: str, step: int, micros: list[RolloutBatch]) -> Iterator[None]:
    """Saves the micro-batches of a step that fails with a FloatingPointError, for debugging.

    Args:
        out_dir: of the run.
        step: from 1.
        micros: of all minibatches, since it is not known which optimizer step failed.

    Raises:
        FloatingPointError: the one from the block, with the path of the saved batch.
    """
    try:
        yield
    except FloatingPointError as error:
        path = Path(out_dir) / f"not_finite-step{step:06d}-rank{distributed.rank()}.safetensors"
        where = f"is in {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # a rank on another machine
            named = {f"micro{i}/{k}": v for i, micro in enumerate(micros) for k, v in micro.state_dict().items()}
            save_file(named, path)
        except (OSError, SafetensorError) as failure:  # the error of the run must stay the last one printed
            where = f"could not be kept ({failure})"
        raise FloatingPointError(f"step {step}: {error}; the batch {where}") from error
