"""Per-token log-probabilities of completions: the one place that shifts, masks and projects to the vocabulary.

Dims: m sequences, Q prompt tokens, C completion tokens, T = Q + C, M tokens of all sequences together, H hidden size,
V vocabulary, N completion tokens of a batch, n of them in one chunk.
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

from common.base import memory
from common.model import attention, merging
from common.model.head import token_logps, vocabulary_logits
from common.model.images import Images, join

FORWARD_FACTOR = 4  # without gradients, this many times the tokens of a micro-batch fit into memory


def _rows(lengths_m: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `total` tokens of m sequences: its row, and its place in the row."""
    device = lengths_m.device
    row_N = torch.arange(len(lengths_m), device=device).repeat_interleave(lengths_m, output_size=total)
    begin_m = lengths_m.cumsum(0) - lengths_m
    return row_N, torch.arange(total, device=device) - begin_m[row_N]


def learned_places(model: nn.Module) -> int | None:
    """How many tokens a sequence may have, where positions are learned; rotary ones go on, less well: None.

    Args:
        model: a transformers causal language model, wrapped by peft or not.
    """
    places = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if any("rotary" in type(module).__name__.lower() for module in model.modules()) else places


class LogProbs(nn.Module):
    """A policy as the losses see it: tokens in, log-probabilities [m, C] out.

    Attributes:
        packed: whether sequences are computed one behind the other in a single row, without padding.
        compiled: whether transformer blocks and head are compiled.
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
        """Wraps a model, whose attention becomes that of common/model/attention.py if it is of the plain causal kind.

        Args:
            model: a transformers causal language model, with dropout off; wrapped by peft or not.
            temperature: the sampling temperature; the log-probabilities are those of the distribution sampled from.
            compile: compile what is worth it, on a GPU.
            train_entropy: let gradients through the entropy too, for an entropy bonus.
            suppressed_ids: tokens that are never sampled, as `rollout.Sampler` was told.
            adapters: False: without those of the model, which then is its own reference. Nothing else may compute with
                the model at the same time.

        Raises:
            TypeError: the output head is more than a linear layer, such as one with an adapter.
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
        self.packed = not support.reason
        self.window, self.places = support.window, learned_places(model)
        # on a CPU it would take a C++ compiler and a minute, and gain little
        self.compiled = compile and head.weight.is_cuda
        if self.compiled:
            from torch._dynamo import config

            # with and without gradients, adapters and a cache, for several lengths: more than the 8 that are compiled
            config.recompile_limit = max(32, config.recompile_limit)
            for block in attention.decoder_layers(model, support):
                if block._compiled_call_impl is None:  # else the reference would throw the policy's away
                    block.compile(dynamic=True)  # all of one kind share what is compiled

    def forward(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        images: Images | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of every completion token.

        Args:
            prompt_ids: [m, Q] int64, padded on the left.
            prompt_mask: [m, Q] bool; or [m] int64 on the CPU, tokens of each: then the host never waits for the GPU.
            completion_ids: [m, C] int64, padded on the right.
            completion_mask: [m, C] bool, the tokens of a completion, the end token included: its first ones, or none;
                or [m], as above.
            images: of the m prompts, if the policy is given any.

        Returns:
            Log-probabilities [m, C] and entropies [m, C], fp32, nats, 0 where masked.
        """
        hidden_NH, place = self.states(prompt_ids, prompt_mask, completion_ids, completion_mask, images)
        device, there = completion_ids.device, self.model.get_output_embeddings().weight.device  # a model may be spread
        suppressed = None if self.suppressed_ids is None else self.suppressed_ids.to(there)
        how = self.temperature, self.compiled, self.train_entropy, suppressed
        values = token_logps(self.model, hidden_NH.to(there), completion_ids[place].to(there), *how)
        zeros_mC = torch.zeros(completion_ids.shape, device=device)
        logps_mC, entropy_mC = (zeros_mC.index_put(place, values_N.to(device)) for values_N in values)
        return logps_mC, entropy_mC

    def states(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        images: Images | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The last hidden states that predict the completion tokens.

        Args:
            prompt_ids: as in `forward`, likewise the others.
            prompt_mask: the same.
            completion_ids: the same.
            completion_mask: the same.
            images: the same.

        Returns:
            [N, H], and the row and column of each of the N tokens, [N] int64 both.

        Raises:
            ValueError: the images are of other prompts, or a sequence has more tokens than there are learned positions.
        """
        (m, Q), device = prompt_ids.shape, prompt_ids.device
        prompt_m, completion_m = (x if x.dim() == 1 else x.sum(1) for x in (prompt_mask, completion_mask))
        lengths, completions = torch.stack([prompt_m + completion_m, completion_m]).tolist()
        if self.places is not None and (longest := max(lengths)) > self.places:
            # an embedding read behind its end would be an IndexError, and on a GPU the end of the process
            raise ValueError(
                f"row {lengths.index(longest)} of a batch has {longest} tokens, prompt and completion, but the model "
                f"has {self.places} positions; lower max_prompt_tokens or max_new_tokens"
            )
        prompt_m, completion_m = (x.to(device, non_blocking=True) for x in (prompt_m, completion_m))
        length_m, padding_m = prompt_m + completion_m, Q - prompt_m
        ids_mT = torch.cat([prompt_ids, completion_ids], dim=1)
        T = ids_mT.shape[1]
        if images is not None:
            images.check([n - c for n, c in zip(lengths, completions, strict=True)])
        if self.packed and max(lengths) <= self.window:
            row_M, place_M = _rows(length_m, sum(lengths))
            ids_1M = ids_mT[row_M, padding_m[row_M] + place_M][None]
            begin_m = length_m.cumsum(0) - length_m
            if images is None:
                given = {"input_ids": ids_1M, "position_ids": place_M[None]}
            else:
                given = images.inputs(self.model, ids_1M, row_M[None], place_M[None])
            packed = attention.inputs(device, attention.Packed.of(lengths, device))
            hidden = self._hidden(**given, **packed)
        else:
            # Each row is moved to the left, so that all padding is at its end, where causal attention never sees it: no
            # mask is needed, the fast kernels apply, and no position is left without anything to attend to.
            place_T = torch.arange(max(lengths), device=device)
            moved_mT = place_T + padding_m[:, None]
            ids_mT = ids_mT.gather(1, moved_mT.clamp(max=T - 1))
            begin_m = torch.arange(m, device=device) * max(lengths)
            if images is None:
                given = {"input_ids": ids_mT}
            else:
                given = images.inputs(self.model, ids_mT, torch.arange(m, device=device)[:, None], place_T)
            hidden = self._hidden(**given, use_cache=False)

        # the state before a token predicts it; prompt and padding never reach the vocabulary
        row_N, place_N = _rows(completion_m, sum(completions))
        before_N = begin_m[row_N] + prompt_m[row_N] + place_N - 1
        return hidden.flatten(0, 1).index_select(0, before_N.to(hidden.device)), (row_N, place_N)

    def _hidden(self, **given: Any) -> torch.Tensor:
        """What the last layer of the decoder gives."""
        with nullcontext() if self.adapters else merging.off(self.model):
            return self.model.get_decoder()(**given).last_hidden_state


def fill(
    micros: Iterable[Any],
    field: str,
    policy: nn.Module | Sequence[nn.Module],
    device: torch.device | Sequence[torch.device],
    micro_batch_tokens: int = 0,
    images: Images | None = None,
) -> None:
    """Writes log-probabilities under weights that are not trained here into micro-batches: old ones, the reference's.

    Where memory does not suffice, fewer rows are computed at once, then and later; what is written is the same.

    Args:
        micros: micro-batches (`batches.RolloutBatch`) cut as the update will see them.
        field: "old_logps" or "ref_logps".
        policy: a `LogProbs`; or one for each `replica` that micro-batches were dealt to.
        device: where it takes its input; or that of each.
        micro_batch_tokens: what the micro-batches were cut to: without gradients FORWARD_FACTOR times as many tokens go
            into one forward pass, which is faster. 0: each alone, as the update computes it, so that without an update
            between them the ratio is exactly 1; more at once may round differently in half precision.
        images: of the same prompts as the batch's own, by this model's vision tower, where that is another one: for a
            reference whose policy trains its tower.

    Raises:
        FatalOutOfMemoryError: memory does not suffice for a single sequence.
    """
    policies, devices = ([policy], [device]) if isinstance(policy, nn.Module) else (policy, device)
    sharded = any(isinstance(p, DTensor) for p in policies[0].parameters())  # ranks must compute the same number
    limit = FORWARD_FACTOR * micro_batch_tokens if policies[0].packed and not sharded else 0
    queues: list[list[_Part]] = [[] for _ in policies]
    for micro in micros:
        number = 0 if len(policies) == 1 else micro.replica
        queue = queues[number]
        if limit and queue and sum(each.size for each in queue[-1].micros) + micro.size <= limit:
            queue[-1].micros.append(micro)
        else:
            queue.append(_Part([micro], policies[number], devices[number], images, not limit, not sharded))
    parts = [queue[k] for k in range(max(map(len, queues))) for queue in queues if k < len(queue)]
    # What a GPU needs from another is copied before there is work in its queue, and what it found afterwards: a copy
    # waits for all that either of them was given before.
    given = [part.tokens() for part in parts]
    found = []
    for k, part in enumerate(parts):
        values, given[k] = part.values(given[k]), None
        found += zip(part.micros, values, strict=True)
        if values[0].dim() > 2:  # hidden states of a teacher take too much memory to wait
            _write(found, field)
            found = []
    _write(found, field)


def _write(found: list[tuple[Any, torch.Tensor]], field: str) -> None:
    for micro, values in found:
        setattr(micro, field, values[:, : micro.completion_ids.shape[1]].to(micro.prompt_ids.device))


@dataclasses.dataclass
class _Part:
    """Micro-batches in one forward pass of `fill`."""

    micros: list[Any]
    policy: nn.Module
    device: torch.device
    images: Images | None
    exact: bool  # as the update computes them
    redo: bool  # in smaller parts if memory runs out

    def tokens(self) -> list[torch.Tensor | Images]:
        """The arguments of the policy, on its device; lengths stay on the CPU."""
        given = []
        for micro in self.micros:
            tokens = micro.tokens if self.images is None else (*micro.tokens[:4], self.images.like(micro.images))
            given.append([x if isinstance(x, torch.Tensor) and x.dim() == 1 else x.to(self.device) for x in tokens])
        return given[0] if len(given) == 1 else _join(given)

    def values(self, tokens: list[torch.Tensor | Images]) -> list[torch.Tensor]:
        """What the policy says of each micro-batch, [m, C, ...]; in smaller parts if need be."""
        rows = [len(micro.prompt_ids) for micro in self.micros]
        if sum(rows) <= getattr(self.policy, "most_rows", math.inf):  # which went well after a failure
            with memory.catch_out_of_memory() as failure:
                return list(self._forward(tokens).split(rows))
            memory.empty_cache()
            if sum(rows) == 1 or not self.redo:
                what = f"a forward pass of {sum(rows)} sequences, {self.micros[0].size} tokens ({failure.message})"
                fewer = "" if sum(rows) == 1 else "lower micro_batch_tokens; or "
                raise memory.FatalOutOfMemoryError(what, fewer + memory.REMEDIES)
            self.policy.most_rows = sum(rows) // 2
            text = f"out of memory in a forward pass of {sum(rows)} sequences: now {sum(rows) // 2} at once"
            memory.print_with_rank(text)
        if len(rows) > 1:
            middle = len(rows) // 2
            halves = [dataclasses.replace(self, micros=part) for part in (self.micros[:middle], self.micros[middle:])]
            return [x for half in halves for x in half.values(half.tokens())]
        found = []
        for half in self.micros[0].halves():
            part = dataclasses.replace(self, micros=[half])
            (values,) = part.values(part.tokens())
            missing = self.micros[0].completion_ids.shape[1] - values.shape[1]
            found.append(F.pad(values, (0, 0) * (values.dim() - 2) + (0, missing)))
        return [torch.cat(found)]

    def _forward(self, tokens: list[torch.Tensor | Images]) -> torch.Tensor:
        # With gradients another graph is compiled, which may round differently: alone, a micro-batch takes the one of
        # the update. Its activations are freed before the next.
        trained = any(p.requires_grad for p in self.policy.parameters())
        with torch.set_grad_enabled(trained and self.policy.compiled and self.exact and self.redo):
            return self.policy(*tokens)[0].detach()


def _join(batches: list[list[torch.Tensor | Images]]) -> list[torch.Tensor | Images]:
    """Rows of several batches under one another: prompts padded on the left, completions on the right."""
    joined = []
    for i, tensors in enumerate(zip(*batches, strict=True)):
        if isinstance(tensors[0], Images):
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
        ValueError: the model does more between hidden states and logits than a linear head (scaling, say), so that
            log-probabilities computed here would be wrong.
    """
    ids = torch.arange(4, device=model.device)[None] + 1
    was_training = model.training
    model.eval()
    own = model(input_ids=ids, use_cache=False).logits[0].float()
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
    ours = vocabulary_logits(model, hidden.to(model.get_output_embeddings().weight.device)).to(own.device)
    model.train(was_training)
    error, size = (own - ours).abs().max().item(), own.abs().max().item()
    if not error <= 0.02 * size + 1e-4:  # the own logits may be bf16; NaN fails
        raise ValueError(
            f"{type(model).__name__}: its logits differ by {error:.3g} (of {size:.3g}) from a linear head over its "
            "last hidden states, which is what the log-probabilities are computed from; use another model, or teach "
            "common/model/logprobs.py what this head does"
        )
