"""When a GPU's memory does not suffice, forward and backward passes and rollouts are done again in smaller pieces.

A step that is computed again gives what it would have given in smaller pieces from the beginning: gradients and numbers
of the failed attempt are thrown away, and log-probabilities that it had found are found again.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from common import distributed
from common.devices import GIB

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
        micros: micro-batches (`rollout.RolloutBatch`).
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


class Budget:
    """How many tokens a micro-batch may have; halved when they turn out to be too many.

    Attributes:
        tokens: prompt and completion tokens of a micro-batch, at most.
    """

    def __init__(self, tokens: int, plan: str = "", redo: bool = True, release: Callable[[], None] | None = None):
        """Begins with what was configured.

        Args:
            tokens: `micro_batch_tokens`.
            plan: what the run was expected to take, for the message when nothing helps.
            redo: compute a minibatch again after a failure; False where all ranks compute every micro-batch together,
                and one alone cannot do it again.
            release: called after a failure, to free what will be made again when it is needed: the cache of a sampler.
        """
        self.tokens, self.plan, self.redo, self.release = tokens, plan, redo, release
        self._first, self._failure, self._alone = tokens, "", False

    def passes(
        self, minibatch: list[Any], optimizer: Any, log: Any, replicas: Sequence[nn.Module] = ()
    ) -> Iterator[Any]:
        """The micro-batches of a minibatch, for a forward and backward pass each; all again if memory runs out.

        Then gradients are cleared, the log goes back to where the minibatch began, and micro-batches above the new
        size are cut in halves. Where the first attempt found `old_logps`, they are found again: their ratio is 1.

        Args:
            minibatch: micro-batches (`rollout.RolloutBatch`); changed in place, so that later epochs see the halves.
            optimizer: an `optim.AdamW`, whose gradients these are.
            log: a `metrics.Log`, added to inside `room` only.
            replicas: other models that gather gradients.

        Yields:
            A micro-batch; what is done with it stands in a `room`.

        Raises:
            HopelessError: a single sequence does not fit.
        """
        params = [*optimizer.params, *(p for replica in replicas for p in replica.parameters())]
        mark, fresh = log.mark(), all(micro.old_logps is None for micro in minibatch)
        while True:
            if self.tokens < self._first:  # halved, maybe after this minibatch was cut
                minibatch[:] = [part for micro in minibatch for part in self._cut(micro)]
            for micro in minibatch:
                yield micro
                if self._failure:
                    break
            else:
                self._alone = False
                return
            self._shrink(micro)
            for param in params:
                param.grad = None
            for micro in minibatch:
                if fresh:
                    micro.old_logps = None
                for features in micro.images.features if micro.images else ():  # of a vision tower that is trained
                    features.grad = None
            log.back(mark)
            if self.release:
                self.release()
            free()

    @contextmanager
    def room(self) -> Iterator[None]:
        """Notes that memory ran out in the block, for `passes` to act on; every other error goes on.

        Raises:
            HopelessError: memory ran out, and nothing can be done again.
        """
        with noticed() as said:
            yield
        if said:
            self._failure = said[0]
            if not self.redo:
                raise HopelessError(f"with micro-batches of {self.tokens} tokens ({self._failure})",
                                    f"set micro_batch_tokens to {max(1, self.tokens // 2)}; or {REMEDIES}",
                                    self.plan)  # fmt: skip

    def _cut(self, micro: Any) -> list[Any]:
        """A micro-batch in halves, and those in halves, until they are small enough or single sequences."""
        if len(micro) == 1 or micro.size <= self.tokens:
            return [micro]
        return [part for half in micro.halves() for part in self._cut(half)]

    def _shrink(self, micro: Any) -> None:
        """After a failure with a micro-batch; a single sequence gets one more attempt, with what was freed."""
        failure, self._failure = self._failure, ""
        if len(micro) > 1:
            size = min(self.tokens, micro.size)
            self.tokens = size // 2
            say(f"out of memory with micro-batches of {size} tokens: now {self.tokens}; set micro_batch_tokens to "
                f"{self.tokens} to begin with that")  # fmt: skip
        elif self._alone:
            what = f"a single sequence of {micro.size} tokens does not fit ({failure})"
            raise HopelessError(what, REMEDIES, self.plan)
        else:
            self._alone = True


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
