"""Log-probabilities of a whole batch without gradients, in as few forward passes as memory allows.

Dims: m sequences of a micro-batch, C completion tokens.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from common.base import memory
from common.model.images import Images, join
from common.model.packing import Sizes

FORWARD_FACTOR = 4  # a forward pass without gradients takes this many times the tokens of a micro-batch


def fill(
    micros: Iterable[Any],
    field: str,
    policy: nn.Module | Sequence[nn.Module],
    device: torch.device | Sequence[torch.device],
    micro_batch_tokens: int = 0,
    images: Images | None = None,
) -> None:
    """Fills in the old or the reference's log-probabilities of micro-batches, without gradients.

    If memory runs out, fewer rows are computed at once, now and later; the results are the same.

    Args:
        micros: micro-batches (`batches.RolloutBatch`), cut as for the update.
        field: "old_logps" or "ref_logps".
        policy: a `LogProbs`; or one for each `replica` of the micro-batches.
        device: of the inputs; or that of each replica.
        micro_batch_tokens: size of the micro-batches; FORWARD_FACTOR times as many tokens go into
            one forward pass, where all sequences of a group share a prompt, which is faster. 0: each
            micro-batch alone, as in the update, so that before the first update the ratio is
            exactly 1; larger passes may round differently in half precision.
        images: of the same prompts, computed by the vision tower of this model; for a reference
            whose policy trains its tower.

    Raises:
        FatalOutOfMemoryError: memory does not suffice for a single sequence.
    """
    policies, devices = ([policy], [device]) if isinstance(policy, nn.Module) else (policy, device)
    micros = list(micros)
    sharded = any(isinstance(p, DTensor) for p in policies[0].parameters())  # ranks must run equally many passes
    limit = 0 if sharded else FORWARD_FACTOR * micro_batch_tokens
    if not policies[0].packs(max((micro.longest for micro in micros), default=0) if limit else 0):
        limit = 0
    exact = field == "old_logps" and not limit and not sharded
    queues: list[list[_ForwardPass]] = []
    for number, (model, where) in enumerate(zip(policies, devices, strict=True)):
        own = [micro for micro in micros if len(policies) == 1 or micro.replica == number]
        pools = [own] if limit and own else [[micro] for micro in own]
        # inputs are copied before any pass is queued, and results after all of them, because a copy
        # between GPUs waits for everything that is queued on either
        queues.append([])
        for pool in pools:
            inputs = _inputs(pool, where, images)
            parts = _parts(pool, limit) if limit else [list(range(len(inputs[0])))]
            queues[-1] += [_ForwardPass(pool, inputs, part, model, exact, not sharded) for part in parts]
    passes = [queue[k] for k in range(max(map(len, queues))) for queue in queues if k < len(queue)]
    found, filled = [], {}
    for forward in passes:
        found += forward.values()
        if found[-1][1].dim() > 2:  # hidden states of a teacher are too large to be held back
            _write(found, filled)
            found = []
    _write(found, filled)
    for micro in micros:
        setattr(micro, field, filled[id(micro)])


def _inputs(micros: list[Any], device: torch.device, images: Images | None) -> list[torch.Tensor | Images | None]:
    """Arguments of a policy for the rows of micro-batches, on its device; lengths and groups stay on the CPU."""
    batches = []
    for micro in micros:
        tokens = micro.tokens if images is None else (*micro.tokens[:4], images.like(micro.images), *micro.tokens[5:])
        kept = [x is None or (isinstance(x, torch.Tensor) and x.dim() == 1) for x in tokens]
        batches.append([x if stays else x.to(device) for x, stays in zip(tokens, kept, strict=True)])
    return batches[0] if len(batches) == 1 else _join(batches)


def _parts(micros: list[Any], limit: int) -> list[list[int]]:
    """Cuts the rows of micro-batches into forward passes in which the rows of a group are together."""
    columns = ([x for micro in micros for x in getattr(micro, name).tolist()]
               for name in ("prompt_lengths", "lengths", "group"))  # fmt: skip
    sizes = Sizes(*columns)
    return sizes.parts(range(len(sizes.groups)), limit)


@dataclasses.dataclass
class _ForwardPass:
    """Rows of micro-batches in one forward pass of `fill`."""

    micros: list[Any]
    inputs: list[torch.Tensor | Images | None]  # of all rows of the micro-batches
    rows: list[int]
    policy: nn.Module
    exact: bool  # compute as the update does, to the last bit
    can_split: bool  # retry in smaller parts if memory runs out

    def values(self) -> list[tuple["_ForwardPass", torch.Tensor]]:
        """Output of the policy, [m, C, ...]; that of parts if memory runs out."""
        rows = len(self.rows)
        if rows <= getattr(self.policy, "most_rows", math.inf):  # set after a failure
            with memory.catch_out_of_memory() as failure:
                return [(self, self._forward())]
            memory.empty_cache()
            if rows == 1 or not self.can_split:
                tokens = sum(int(self.inputs[i][self.rows].sum()) for i in (1, 3))
                what = f"a forward pass of {rows} sequences, {tokens} tokens ({failure.message})"
                fewer = "" if rows == 1 else "lower micro_batch_tokens; or "
                raise memory.FatalOutOfMemoryError(what, fewer + memory.REMEDIES)
            self.policy.most_rows = rows // 2
            memory.print_with_rank(f"out of memory in a forward pass of {rows} sequences: now {rows // 2} at once")
        halves = self.rows[: rows // 2], self.rows[rows // 2 :]
        return [x for half in halves for x in dataclasses.replace(self, rows=half).values()]

    def _forward(self) -> torch.Tensor:
        # Gradients are on where a micro-batch must be computed by the same compiled graph as in the
        # update: the one without gradients may round differently. Its activations are freed before
        # the next.
        with torch.set_grad_enabled(self.exact and self.policy.compiled):
            return self.policy(*_select(self.inputs, self.rows))[0].detach()


def _write(found: list[tuple[_ForwardPass, torch.Tensor]], filled: dict[int, torch.Tensor]) -> None:
    """Copies values [m, C, ...] to tensors for their micro-batches, by `id`, where those lie."""
    for forward, values in found:
        nth, start = {row: n for n, row in enumerate(forward.rows)}, 0
        for micro in forward.micros:
            (m, C), there = micro.completion_ids.shape, micro.prompt_ids.device
            own = [row for row in range(start, start + m) if row in nth]
            if own:
                part = values[torch.tensor([nth[row] for row in own])][:, :C].to(there)
                if id(micro) not in filled:
                    filled[id(micro)] = part.new_zeros(m, C, *part.shape[2:])
                filled[id(micro)][torch.tensor(own) - start, : part.shape[1]] = part
            start += m


def _select(inputs: list[torch.Tensor | Images | None], rows: list[int]) -> list[torch.Tensor | Images | None]:
    """Some rows of the arguments of a policy; completions are as wide as the longest of them."""
    if rows == list(range(len(inputs[0]))):
        return inputs
    index = torch.tensor(rows)
    selected = [x if x is None else x.select(index) if isinstance(x, Images)
                else x.index_select(0, index.to(x.device, non_blocking=True)) for x in inputs]  # fmt: skip
    if selected[3].dim() == 1:
        selected[2] = selected[2][:, : int(selected[3].max())]
    return selected


def _join(batches: list[list[torch.Tensor | Images | None]]) -> list[torch.Tensor | Images | None]:
    """Concatenates the rows of batches; prompts are padded on the left, completions on the right."""
    joined = []
    for i, tensors in enumerate(zip(*batches, strict=True)):
        if tensors[0] is None:
            joined.append(None)
        elif isinstance(tensors[0], Images):
            joined.append(join(tensors))
        elif tensors[0].dim() == 1:
            joined.append(torch.cat(tensors))
        else:
            width = max(x.shape[1] for x in tensors)
            missing = [width - x.shape[1] for x in tensors]
            padded = [F.pad(x, (n, 0) if i < 2 else (0, n)) for x, n in zip(tensors, missing, strict=True)]
            joined.append(torch.cat(padded))
    return joined
