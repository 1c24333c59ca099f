"""How many tokens a micro-batch may have, and what happens to a minibatch when memory runs out."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from common.base.memory import (
    REMEDIES,
    FatalOutOfMemoryError,
    catch_out_of_memory,
    empty_cache,
    print_with_rank,
)

TOKENS = 8192  # of a micro-batch, if no plan of a GPU's memory says how many fit
MOST_TOKENS = 32768  # of one that a plan chooses; passes of FORWARD_FACTOR as many have 2**31 numbers in 16,384 columns


class Budget:
    """Tokens that a micro-batch may have; halved when memory runs out.

    Attributes:
        tokens: prompt and completion tokens of a micro-batch, at most.
    """

    def __init__(
        self,
        tokens: int,
        plan: str = "",
        redo: bool = True,
        release: Callable[[], None] | None = None,
        packs: Callable[[Any], bool] = lambda micro: True,
    ):
        """Starts with the configured size.

        Args:
            tokens: `micro_batch_tokens`.
            plan: expected memory of the run, for the message when nothing helps.
            redo: compute a minibatch again after a failure; False where all ranks compute every micro-batch together.
            release: called after a failure, to free what can be made again: the cache of a sampler.
            packs: whether a micro-batch is computed without padding, and the prompt of each group once.
        """
        self.tokens, self.plan, self.redo, self.release = tokens, plan, redo, release
        self.packs = packs
        self._first, self._retried_alone = tokens, False

    def run(
        self,
        minibatch: list[Any],
        forward_backward: Callable[[Any], None],
        optimizer: Any,
        log: Any,
        replicas: Sequence[nn.Module] = (),
    ) -> None:
        """Computes the gradients of a minibatch; all of them again in smaller pieces, if memory runs out.

        Before another attempt gradients are cleared, the log goes back to where the minibatch began, and micro-batches
        above the new size are cut in halves. If the first attempt found `old_logps`, they are found again: their
        ratio is 1.

        Args:
            minibatch: micro-batches (`batches.RolloutBatch`); changed in place, so that later epochs see the halves.
            forward_backward: adds the gradients of one micro-batch, and its metrics to the log.
            optimizer: an `optim.AdamW`, whose gradients these are.
            log: a `metrics.StepMetrics`.
            replicas: other models that gather gradients.

        Raises:
            FatalOutOfMemoryError: a single sequence does not fit; or memory ran out, and nothing can be computed again.
        """
        mark, fresh = log.mark(), all(micro.old_logps is None for micro in minibatch)
        while True:
            if self.tokens < self._first:  # halved, maybe after this minibatch was cut
                minibatch[:] = [part for micro in minibatch for part in self._cut(micro)]
            for micro in minibatch:
                with catch_out_of_memory() as failure:
                    forward_backward(micro)
                if failure.message:
                    break
            else:
                self._retried_alone = False
                return
            if not self.redo:
                what = f"with micro-batches of {self.tokens} tokens ({failure.message})"
                remedy = f"set micro_batch_tokens to {max(1, self.tokens // 2)}; or {REMEDIES}"
                raise FatalOutOfMemoryError(what, remedy, self.plan)
            self._shrink(micro, failure.message)
            for model_params in (optimizer.params, *(replica.parameters() for replica in replicas)):
                for param in model_params:
                    param.grad = None
            for micro in minibatch:
                if fresh:
                    micro.old_logps = None
                for features in micro.images.features if micro.images else ():  # of a vision tower that is trained
                    features.grad = None
            log.rollback(mark)
            if self.release:
                self.release()
            empty_cache()

    def _size(self, micro: Any) -> int:
        """Tokens of the forward pass of a micro-batch."""
        return micro.size if self.packs(micro) else len(micro) * micro.longest

    def _cut(self, micro: Any) -> list[Any]:
        """A micro-batch in halves, and those in halves, until they are small enough or single sequences."""
        if len(micro) == 1 or self._size(micro) <= self.tokens:
            return [micro]
        return [part for half in micro.halves() for part in self._cut(half)]

    def _shrink(self, micro: Any, failure: str) -> None:
        """Lowers `tokens` after a failure; a single sequence gets one more attempt, with what `release` freed."""
        if len(micro) > 1:
            size = min(self.tokens, self._size(micro))
            self.tokens = size // 2
            print_with_rank(f"out of memory with micro-batches of {size} tokens: now {self.tokens}; set "
                            f"micro_batch_tokens to {self.tokens} to begin with that")  # fmt: skip
        elif self._retried_alone:
            what = f"a single sequence of {micro.size} tokens does not fit ({failure})"
            raise FatalOutOfMemoryError(what, REMEDIES, self.plan)
        else:
            self._retried_alone = True
