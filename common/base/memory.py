"""When a GPU's memory does not suffice, forward and backward passes and rollouts are done again in smaller pieces.

A step that is computed again gives what it would have given in smaller pieces from the beginning: gradients and numbers
of the failed attempt are thrown away, and log-probabilities that it had found are found again.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from common.base import distributed
from common.base.devices import GIB

# Beginnings of the messages: an error of another rank that quotes one of them is not this process's own
MESSAGES = ("CUDA out of memory", "CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
REMEDIES = (
    "set gradient_checkpointing to True, optimizer_offload to 'always', lora_rank to 16 or load_bits to 4 (with LoRA), "
    "lower max_new_tokens or max_prompt_tokens, or take a smaller model"
)


class HopelessError(RuntimeError):
    """Memory does not suffice for the smallest piece of work, and only other settings can help."""

    def __init__(self, what: str, remedy: str, plan: str = ""):
        """Puts the message together, with the peaks that the GPUs of this process have seen.

        Args:
            what: did not fit.
            remedy: what to change.
            plan: what the run was expected to take.
        """
        lines = [f"{_rank()}out of memory: {what}; {remedy}", *_peaks(), *([plan] if plan else [])]
        super().__init__("\n".join(lines))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a GPU has no memory left, and so whether less at once may go well.

    Args:
        error: from a computation of this process.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(MESSAGES)


@contextmanager
def noticed() -> Iterator[list[str]]:
    """Catches that memory ran out in the block, and nothing else; `free` is to be called afterwards.

    Yields:
        A list that is empty if the block went well, and has the message of the error otherwise.
    """
    said: list[str] = []
    try:
        yield said
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        said.append(str(error).split("\n")[0])


def free() -> None:
    """Gives back what no tensor uses any more; not inside `noticed`, where the error still holds the failed calls."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def say(text: str) -> None:
    """Prints what was changed, with the rank where there are several: each has its own GPU.

    Args:
        text: one line.
    """
    print(f"{_rank()}{text}", flush=True)


def each(micros: Sequence[Any], function: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Micro-batches, and what a function says of each; one that memory does not suffice for is cut in halves.

    Args:
        micros: micro-batches (`batches.RolloutBatch`).
        function: of one of them, without gradients.

    Yields:
        A micro-batch, or half of one, and the result.

    Raises:
        HopelessError: memory does not suffice for a single sequence.
    """
    waiting = list(micros)[::-1]
    while waiting:
        micro = waiting.pop()
        with noticed() as failure:
            result = function(micro)
        if not failure:
            yield micro, result
            continue
        free()
        if len(micro) == 1:
            raise HopelessError(f"a single sequence of {micro.size} tokens does not fit ({failure[0]})", REMEDIES)
        waiting += micro.halves()[::-1]


def _rank() -> str:
    return f"rank {distributed.rank()}: " if distributed.num_ranks() > 1 else ""


def _peaks() -> list[str]:
    """Per GPU that this process uses: what its tensors took at most, and what there is."""
    lines = []
    for i in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(i):
            left, total = (number / GIB for number in torch.cuda.mem_get_info(i))
            peak, now = (f(i) / GIB for f in (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated))
            lines.append(f"  GPU {i}: peak {peak:.1f} GiB, now {now:.1f}; {left:.1f} of {total:.1f} GiB free")
    return lines
