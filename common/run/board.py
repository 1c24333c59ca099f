"""TensorBoard's copy of metrics.jsonl."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from common.base import storage


class Board:
    """TensorBoard's copy of metrics.jsonl, which a run can do without: a failure is a warning.

    SummaryWriter writes in a thread, which ends at its first error; later calls raise that error again. So the writer
    is given up then, and another one opened after a checkpoint has been saved, which shows that the disk takes files.
    """

    def __init__(self, folder: Path, first_step: int):
        """Opens a file of events.

        Args:
            folder: of the files.
            first_step: of this run; TensorBoard drops events of an earlier run from this step on.
        """
        self._folder, self._writer = folder, None
        with self._optional():
            self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def add(self, line: dict[str, Any], reopen: bool) -> None:
        """Adds the floats of a line of metrics.jsonl.

        Args:
            line: with its step.
            reopen: also if an earlier line could not be written.
        """
        if self._writer is None and not reopen:
            return
        with self._optional():
            self._writer = self._writer or SummaryWriter(str(self._folder))
            for name, value in line.items():
                if isinstance(value, float):
                    self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            with self._optional():
                self._writer.close()

    @contextmanager
    def _optional(self) -> Iterator[None]:
        with storage.optional(
            f"{self._folder} could not be written",
            "metrics.jsonl has the same numbers, and TensorBoard's go on after a checkpoint is saved; mend that",
        ):
            try:
                yield
            except OSError:
                self._writer = None
                raise
