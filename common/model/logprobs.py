"""Per-token log-probabilities of completions: the one place that shifts, masks and projects to the vocabulary.

Dims: m sequences, Q prompt tokens, C completion tokens, T = Q + C, M tokens of all sequences
together, H hidden size, V vocabulary, N completion tokens of a batch, n of them in one chunk.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from common.base import memory
from common.model import agreement, attention, merging
from common.model.head import scale_of, token_logps, vocabulary_logits
from common.model.images import Images, join
from common.model.modes import eval_mode
from common.model.packing import Sizes, pack

FORWARD_FACTOR = 4  # a forward pass without gradients takes this many times the tokens of a micro-batch


def _rows(lengths_m: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and position in the row of each of `total` tokens of m sequences, [total] int64 both."""
    device = lengths_m.device
    row_N = torch.arange(len(lengths_m), device=device).repeat_interleave(lengths_m, output_size=total)
    start_m = lengths_m.cumsum(0) - lengths_m
    return row_N, torch.arange(total, device=device) - start_m[row_N]


def position_limit(model: nn.Module) -> tuple[int | None, str]:
    """The longest sequence whose log-probabilities depend on nothing but its own tokens, and why.

    Learned positions end there. Dynamic and LongRoPE positions change beyond it: for all tokens of
    all rows that are computed together, and in the middle of a rollout.

    Args:
        model: a transformers causal language model, wrapped by peft or not.

    Returns:
        Tokens, None without a limit; and a clause for messages.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]  # one per type of layer
    places, limits = getattr(config, "max_position_embeddings", None), []
    for kind in kinds:
        if (name := kind.get("rope_type")) in ("longrope", "dynamic"):
            limit = kind.get("original_max_position_embeddings", places) if name == "longrope" else places
            reason = f"beyond {limit} tokens its rotary positions ({name}) depend on the other rows of a batch"
            limits.append((limit, reason))
    if isinstance(top := getattr(config, "index_topk", None), int):
        reason = f"beyond {top} tokens its sparse attention (index_topk) depends on the other rows of a batch"
        limits.append((top, reason))
    if not limits and places is not None and places > 0 and _has_table(model, places):
        limits.append((places, f"the model has {places} positions"))
    return min(limits, default=(None, ""))


def _has_table(model: nn.Module, positions: int) -> bool:
    """Whether a model without rotary positions holds a tensor with a row for each position, and up to two for padding.

    State spaces, alibi, and attention without positions hold none.
    """
    if any("rotary" in type(module).__name__.lower() for module in model.modules()):
        return False
    own = (x for module in model.modules() for x in vars(module).values() if isinstance(x, torch.Tensor))
    tensors = [*model.parameters(), *model.buffers(), *own]
    return any(positions <= size <= positions + 2 for x in tensors for size in x.shape)


class LogProbs(nn.Module):
    """A policy as the losses see it: tokens in, log-probabilities [m, C] out.

    Attributes:
        packed: whether sequences are concatenated in a single row, without padding.
        alone: whether each row is computed alone, because others would change its values.
        compiled: whether transformer blocks and head are compiled.
        error: relative difference of hidden states from the plain forward pass, as probed.
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        compile: bool = False,
        train_entropy: bool = False,
        suppressed_ids: Sequence[int] = (),
        adapters: bool = True,
    ):
        """Wraps a model, and installs the attention of common/model/attention.py if possible.

        Args:
            model: a transformers causal language model, without dropout; wrapped by peft or not.
            temperature: the sampling temperature, so that these are the log-probabilities of the
                sampled distribution.
            compile: compile transformer blocks and head, on a GPU.
            train_entropy: make the entropy differentiable, for an entropy bonus.
            suppressed_ids: tokens that are never sampled, the same as in `rollout.Sampler`.
            adapters: False computes the reference that a model with adapters holds itself; see
                `merging.as_reference`. Nothing else may use the model at the same time.

        Raises:
            TypeError: the output head is not a plain linear layer, for instance because it has an
                adapter.
            ValueError: log-probabilities would be random, or not those of the model.
        """
        super().__init__()
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise TypeError(
                f"the output head is a {type(head).__name__}: log-probabilities are computed from the weight of a "
                "plain nn.Linear; leave the head out of target_modules and modules_to_save, and do not quantize it"
            )
        self.model = model
        self.temperature, self.train_entropy, self.adapters = temperature, train_entropy, adapters
        self.suppressed_ids = torch.tensor(list(suppressed_ids), device=head.weight.device) if suppressed_ids else None
        support = attention.install(model)
        self.packed, self.alone, self.error = not support.not_packed, False, math.nan
        self.window, self.limit = support.window, position_limit(model)
        with torch.compiler.set_stance("force_eager"):  # a replica's layers may be compiled already
            self._probe()
        scale_of(model)  # measured before weights are sharded
        # on a CPU, compiling takes a C++ compiler and a minute, and gains little
        self.compiled = compile and head.weight.is_cuda
        if self.compiled:
            from torch._dynamo import config

            # variants with and without gradients, adapters and a cache, for several lengths, exceed
            # the default of 8
            config.recompile_limit = max(32, config.recompile_limit)
            for block in attention.decoder_layers(model, support):
                if block._compiled_call_impl is None:  # or the reference would discard the policy's compiled code
                    block.compile(dynamic=True)  # blocks of one type share compiled code

    @property
    def layout(self) -> str:
        """How rows are computed, for logging."""
        name = "packed rows" if self.packed else "rows alone" if self.alone else "padded rows"
        return f"{name}, not finite" if math.isnan(self.error) else f"{name}, repeatable, {self.error:.1g} from it"

    def packs(self, longest: int) -> bool:
        """Whether rows are packed, if the longest has so many tokens: rows beyond a sliding window are padded.

        Args:
            longest: prompt and completion tokens of a row.
        """
        return self.packed and longest <= self.window

    def forward(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        images: Images | None = None,
        group: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of every completion token.

        Args:
            prompt_ids: [m, Q] int64, padded on the left.
            prompt_mask: [m, Q] bool; or [m] int64 on the CPU, the lengths, which avoids a host
                sync.
            completion_ids: [m, C] int64, padded on the right.
            completion_mask: [m, C] bool, the tokens of each completion, end token included; or [m],
                the lengths, as above. A completion may be empty.
            images: of the m prompts, if the policy reads images.
            group: [m] int64 on the CPU: rows with equal numbers have the same prompt, which packed rows compute once.
                None: each is computed.

        Returns:
            Log-probabilities [m, C] and entropies [m, C], fp32, nats, 0 where masked.
        """
        hidden_NH, index = self.states(prompt_ids, prompt_mask, completion_ids, completion_mask, images, group)
        device = completion_ids.device
        head_device = self.model.get_output_embeddings().weight.device  # another one if the model is spread over GPUs
        suppressed = None if self.suppressed_ids is None else self.suppressed_ids.to(head_device)
        options = self.temperature, self.compiled, self.train_entropy, suppressed
        values = token_logps(self.model, hidden_NH.to(head_device), completion_ids[index].to(head_device), *options)
        zeros_mC = torch.zeros(completion_ids.shape, device=device)
        logps_mC, entropy_mC = (zeros_mC.index_put(index, values_N.to(device)) for values_N in values)
        return logps_mC, entropy_mC

    def states(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        images: Images | None = None,
        group: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The hidden states that predict the completion tokens, from the last decoder layer.

        Args:
            prompt_ids: as in `forward`.
            prompt_mask: as in `forward`.
            completion_ids: as in `forward`.
            completion_mask: as in `forward`.
            images: as in `forward`.
            group: as in `forward`.

        Returns:
            [N, H], and the row and column of each of the N tokens, both [N] int64.

        Raises:
            ValueError: the images belong to other prompts, rows of one group have prompts of several lengths, or a
                sequence is longer than the learned positions.
        """
        (m, Q), device = prompt_ids.shape, prompt_ids.device
        prompt_m, completion_m = (x if x.dim() == 1 else x.sum(1) for x in (prompt_mask, completion_mask))  # lengths
        prompts, completions = torch.stack([prompt_m, completion_m]).tolist()
        lengths = [p + c for p, c in zip(prompts, completions, strict=True)]
        limit, reason = self.limit
        if limit is not None and (longest := max(lengths)) > limit:
            # reading an embedding out of bounds raises IndexError on a CPU, and ends the process on
            # a GPU
            raise ValueError(
                f"row {lengths.index(longest)} of a batch has {longest} tokens, prompt and completion, but {reason}; "
                "lower max_prompt_tokens or max_new_tokens"
            )
        if self.alone and m > 1:
            return self._rows_alone(prompt_ids, prompt_m, completion_ids, completion_m, images)
        prompt_m, completion_m = (x.to(device, non_blocking=True) for x in (prompt_m, completion_m))
        padding_m = Q - prompt_m
        ids_mT = torch.cat([prompt_ids, completion_ids], dim=1)
        T = ids_mT.shape[1]
        if images is not None:
            images.check(prompts)
        if self.packs(max(lengths)):
            rows, heads, left, own = packed = pack(prompts, completions, range(m) if group is None else group.tolist())
            row_m, head_m, left_m, own_m = torch.tensor(packed).to(device, non_blocking=True)
            nth_M, position_M = _rows(own_m, sum(own))
            row_M, position_M = row_m[nth_M], position_M + left_m[nth_M]
            ids_1M = ids_mT[row_M, padding_m[row_M] + position_M][None]
            if images is None:
                kwargs = {"input_ids": ids_1M, "position_ids": position_M[None]}
            else:
                seen = [i for i, k in zip(rows, left, strict=True) if k == 0]
                kwargs = images.inputs(self.model, ids_1M, row_M[None], position_M[None], seen)
            path = attention.Shared.of(own, device, heads, left) if any(left) else attention.Packed.of(own, device)
            hidden = self._hidden(**kwargs, **attention.inputs(device, path))
            nth_m = row_m.argsort()
            last_m = head_m[nth_m] + prompt_m - 1
            first_m = (own_m.cumsum(0) - own_m - left_m)[nth_m] + prompt_m
        else:
            # Each row is shifted to the left, so that all padding is at its end, which causal
            # attention never sees: no mask is needed, fast kernels apply, and every position has
            # something to attend to.
            position_T = torch.arange(max(lengths), device=device)
            source_mT = position_T + padding_m[:, None]
            ids_mT = ids_mT.gather(1, source_mT.clamp(max=T - 1))
            first_m = torch.arange(m, device=device) * max(lengths) + prompt_m
            last_m = first_m - 1
            if images is None:
                kwargs = {"input_ids": ids_mT}
            else:
                kwargs = images.inputs(self.model, ids_mT, torch.arange(m, device=device)[:, None], position_T)
            hidden = self._hidden(**kwargs, use_cache=False)

        # the state before a token predicts it, for the first ones that of the prompt's last token; prompt
        # and padding are never projected to the vocabulary
        row_N, position_N = _rows(completion_m, sum(completions))
        before_N = torch.where(position_N > 0, first_m[row_N] + position_N - 1, last_m[row_N])
        return hidden.flatten(0, 1).index_select(0, before_N.to(hidden.device)), (row_N, position_N)

    def _rows_alone(self, prompt_ids, prompt_m, completion_ids, completion_m, images):
        """`states` row by row."""
        hidden, rows, columns = [], [], []
        for i in range(len(prompt_ids)):
            row = slice(i, i + 1)
            tokens = prompt_ids[row], prompt_m[row], completion_ids[row], completion_m[row]
            hidden_nH, (_, column_n) = self.states(*tokens, images and images.select(torch.tensor([i])))
            hidden.append(hidden_nH)
            rows.append(torch.full_like(column_n, i))
            columns.append(column_n)
        return torch.cat(hidden), (torch.cat(rows), torch.cat(columns))

    def _hidden(self, **kwargs: Any) -> torch.Tensor:
        """Output of the last decoder layer."""
        with nullcontext() if self.adapters else merging.as_reference(self.model):
            return self.model.get_decoder()(**kwargs).last_hidden_state

    @torch.no_grad()
    def _probe(self) -> None:
        """Compares rows computed together with the plain forward pass, and chooses how to compute rows.

        Raises:
            ValueError: two passes over the same rows differ, or no way agrees with the plain pass.
        """
        model, prompts = self.model, torch.tensor(agreement.PROMPT_LENGTHS)
        lengths, group = torch.tensor([len(row) for row in agreement.ROWS]), torch.tensor(agreement.GROUPS)
        parts = [(row[:n], row[n:]) for row, n in zip(agreement.ROWS, prompts.tolist(), strict=True)]
        prompt_ids, completion_ids = (
            pad_sequence([torch.tensor(part) for part in side], True, 0, padding_side=padding).to(model.device)
            for side, padding in zip(zip(*parts, strict=True), ("left", "right"), strict=True)
        )

        def states() -> torch.Tensor:
            return self.states(prompt_ids, prompts, completion_ids, lengths - prompts, None, group)[0]

        with eval_mode(model), nullcontext() if self.adapters else merging.as_reference(model):
            plain = agreement.plain_states(model, agreement.ROWS)
        agreement.require_repeatable(model, states)
        expected = torch.cat([x[n - 1 : -1] for x, n in zip(plain, prompts.tolist(), strict=True)])
        if not expected.isfinite().all():
            return  # broken weights: the first batch of a run stops it, and says so
        split = (lengths - prompts).tolist()

        def agrees(packed: bool, alone: bool) -> bool:
            self.packed, self.alone = packed, alone
            self.error = agreement.largest_error(states().split(split), expected.split(split))
            return self.error <= agreement.rounding(model)

        # packed models need both: rows longer than a sliding window are padded
        packed = self.packed and agrees(True, False)
        if not agrees(False, False) and not agrees(False, True):
            raise ValueError(
                f"{type(model).__name__}: hidden states of a row differ from those of the plain forward pass by "
                f"{self.error:.3g} of their size, so that log-probabilities would be wrong; use another model"
            )
        self.packed = packed and not self.alone
        if self.adapters:  # a reference has no gradient
            agreement.require_gradient(model, states)


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
            queues[-1] += [_ForwardPass(pool, inputs, part, model, not limit, not sharded) for part in parts]
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
    exact: bool  # compute as the update does
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
        trained = any(p.requires_grad for p in self.policy.parameters())
        with torch.set_grad_enabled(trained and self.policy.compiled and self.exact and self.can_split):
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


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compares `vocabulary_logits` with the model's own logits on four tokens.

    Args:
        model: a transformers causal language model.

    Raises:
        ValueError: the model does more than a linear head between hidden states and logits, such as
            scaling, so that log-probabilities computed here would be wrong.
    """
    ids = torch.arange(4, device=model.device)[None] + 1
    with eval_mode(model):
        own = model(input_ids=ids, use_cache=False).logits[0].float()
        (hidden,) = agreement.plain_states(model, ids.tolist())
    weight = model.get_output_embeddings().weight
    ours = vocabulary_logits(model, hidden.to(weight.device)).to(own.device)
    if own.shape != ours.shape:
        raise ValueError(
            f"{type(model).__name__}: it gives {own.shape[-1]} logits, but its head has {ours.shape[-1]} outputs, so "
            "that log-probabilities would be wrong; use another model"
        )
    error, size = (own - ours).abs().max().item(), own.abs().max().item()
    tolerance = 0.02 if weight.dtype.itemsize < 4 else 1e-3  # a soft cap of 30 moves a logit of 3 by 1e-2
    if not error <= tolerance * size + 1e-4:  # true for NaN
        raise ValueError(
            f"{type(model).__name__}: its logits differ by {error:.3g} (of {size:.3g}) from a linear head over its "
            "last hidden states, which is what the log-probabilities are computed from; use another model, or teach "
            "common/model/head.py what this head does"
        )
