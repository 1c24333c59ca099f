"""Per-token log-probabilities of completions: the one place that shifts, masks and projects to the vocabulary.

Dims: m sequences, Q prompt tokens, C completion tokens, T = Q + C, M tokens of all sequences
together, H hidden size, V vocabulary, N completion tokens of a batch, n of them in one chunk.
"""

import contextlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from common.model import agreement, attention, merging, positions
from common.model.head import scale_of, token_logps
from common.model.images import Images
from common.model.modes import eval_mode
from common.model.packing import pack


def _rows(lengths_m: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and position in the row of each of `total` tokens of m sequences, [total] int64 both."""
    device = lengths_m.device
    row_N = torch.arange(len(lengths_m), device=device).repeat_interleave(lengths_m, output_size=total)
    start_m = lengths_m.cumsum(0) - lengths_m
    return row_N, torch.arange(total, device=device) - start_m[row_N]


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
        self.window, self.limit = support.window, positions.longest_sequence(model)
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
            with contextlib.suppress(ImportError):  # not a public name, and without it only the first pass waits
                from torch._inductor.async_compile import maybe_warm_pool

                maybe_warm_pool()  # the compiler's processes take seconds to start, and are ready by the first pass

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
        rows = [agreement.token_ids(model, numbers) for numbers in agreement.ROWS]
        parts = [(row[:n], row[n:]) for row, n in zip(rows, prompts.tolist(), strict=True)]
        prompt_ids, completion_ids = (
            pad_sequence([torch.tensor(part) for part in side], True, 0, padding_side=padding).to(model.device)
            for side, padding in zip(zip(*parts, strict=True), ("left", "right"), strict=True)
        )

        def states() -> torch.Tensor:
            return self.states(prompt_ids, prompts, completion_ids, lengths - prompts, None, group)[0]

        with eval_mode(model), nullcontext() if self.adapters else merging.as_reference(model):
            plain = agreement.plain_states(model, rows)
        agreement.require_repeatable(model, states)
        expected = torch.cat([x[n - 1 : -1] for x, n in zip(plain, prompts.tolist(), strict=True)])
        if not expected.isfinite().all():
            return  # broken weights: the first batch of a run stops it, and says so
        split = (lengths - prompts).tolist()

        def agrees(packed: bool, alone: bool) -> bool:
            self.packed, self.alone = packed, alone
            self.error = agreement.largest_error(states().split(split), expected.split(split))
            return self.error <= agreement.allowed(self.error, model, rows)

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
