"""What happens when a GPU runs out of memory: the work is repeated in smaller pieces.

A repeated step gives the results that smaller pieces would have given from the start: gradients and metrics of the
failed attempt are discarded, and its log-probabilities are computed again.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from common.base import distributed
from common.base.devices import GIB

# The error must begin with one of these: another rank's error may quote them
MESSAGES = ("CUDA out of memory", "CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
REMEDIES = (
    "set gradient_checkpointing to True, optimizer_offload to 'always', lora_rank to 16 or load_bits to 4 (with LoRA), "
    "lower max_new_tokens or max_prompt_tokens, or take a smaller model"
)


class FatalOutOfMemoryError(RuntimeError):
    """Even the smallest piece of work does not fit, so only other settings can help."""

    def __init__(self, what: str, remedy: str, plan: str = ""):
        """Composes the message, with the peak memory of each GPU that this process uses.

        Args:
            what: the work that did not fit.
            remedy: what to change.
            plan: the memory plan of the run.
        """
        lines = [f"{_rank()}out of memory: {what}; {remedy}", *_peaks(), *([plan] if plan else [])]
        super().__init__("\n".join(lines))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of this process means that a GPU is out of memory, so that a smaller piece may fit."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(MESSAGES)


@dataclass
class OutOfMemory:
    """What `catch_out_of_memory` caught.

    Attributes:
        message: first line of the error; "" if the block succeeded.
    """

    message: str = ""


@contextmanager
def catch_out_of_memory() -> Iterator[OutOfMemory]:
    """Suppresses out-of-memory errors of the block and no others; call `empty_cache` after one.

    Yields:
        An object whose `message` is set once the block has failed.
    """
    caught = OutOfMemory()
    try:
        yield caught
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        caught.message = str(error).split("\n")[0]


def empty_cache() -> None:
    """Returns unused memory to the GPU; not inside `catch_out_of_memory`, where the error keeps tensors alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_with_rank(line: str) -> None:
    """Prints a line on every rank, with the rank in front if there are several: each has its own GPU."""
    print(f"{_rank()}{line}", flush=True)


def map_with_halving(micros: Sequence[Any], function: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Applies a function to micro-batches; one that does not fit into memory is halved.

    Args:
        micros: micro-batches (`batches.RolloutBatch`).
        function: of one micro-batch, without gradients.

    Yields:
        Each micro-batch, or part of one, and its result.

    Raises:
        FatalOutOfMemoryError: a single sequence does not fit.
    """
    waiting = list(micros)[::-1]
    while waiting:
        micro = waiting.pop()
        with catch_out_of_memory() as failure:
            result = function(micro)
        if not failure.message:
            yield micro, result
            continue
        empty_cache()
        if len(micro) == 1:
            what = f"a single sequence of {micro.size} tokens does not fit ({failure.message})"
            raise FatalOutOfMemoryError(what, REMEDIES)
        waiting += micro.halves()[::-1]


def _rank() -> str:
    return f"rank {distributed.rank()}: " if distributed.num_ranks() > 1 else ""


def _peaks() -> list[str]:
    """A line for each GPU that this process uses: peak and current memory of its tensors, and free memory."""
    lines = []
    for i in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(i):
            left, total = (number / GIB for number in torch.cuda.mem_get_info(i))
            peak, now = (f(i) / GIB for f in (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated))
            lines.append(f"  GPU {i}: peak {peak:.1f} GiB, now {now:.1f}; {left:.1f} of {total:.1f} GiB free")
    return lines
