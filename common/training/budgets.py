"""How many tokens a micro-batch may have, and what happens to a minibatch when they turn out to be too many."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from common.base.memory import (
    REMEDIES,
    FatalOutOfMemoryError,
    catch_out_of_memory,
    empty_cache,
    print_with_rank,
)


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
            minibatch: micro-batches (`batches.RolloutBatch`); changed in place, so that later epochs see the halves.
            optimizer: an `optim.AdamW`, whose gradients these are.
            log: a `metrics.Log`, added to inside `room` only.
            replicas: other models that gather gradients.

        Yields:
            A micro-batch; what is done with it stands in a `room`.

        Raises:
            FatalOutOfMemoryError: a single sequence does not fit.
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
            empty_cache()

    @contextmanager
    def room(self) -> Iterator[None]:
        """Notes that memory ran out in the block, for `passes` to act on; every other error goes on.

        Raises:
            FatalOutOfMemoryError: memory ran out, and nothing can be done again.
        """
        with catch_out_of_memory() as caught:
            yield
        if caught.message:
            self._failure = caught.message
            if not self.redo:
                what = f"with micro-batches of {self.tokens} tokens ({self._failure})"
                remedy = f"set micro_batch_tokens to {max(1, self.tokens // 2)}; or {REMEDIES}"
                raise FatalOutOfMemoryError(what, remedy, self.plan)

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
            print_with_rank(f"out of memory with micro-batches of {size} tokens: now {self.tokens}; set "
                            f"micro_batch_tokens to {self.tokens} to begin with that")  # fmt: skip
        elif self._alone:
            what = f"a single sequence of {micro.size} tokens does not fit ({failure})"
            raise FatalOutOfMemoryError(what, REMEDIES, self.plan)
        else:
            self._alone = True
