"""Per-token log-probabilities of completions: the one place that shifts, masks and projects to the vocabulary.

Dims: m sequences, Q prompt tokens, C completion tokens, T = Q + C, M tokens of all sequences together, H hidden size,
V vocabulary, N completion tokens of a batch, n of them in one chunk.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from common import attention
from common.head import token_logps, vocabulary_logits
from common.images import Images, join

FORWARD_FACTOR = 4  # without gradients, this many times the tokens of a micro-batch fit into memory


def _rows(lengths_m: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `total` tokens of m sequences: its row, and its place in the row."""
    device = lengths_m.device
    row_N = torch.arange(len(lengths_m), device=device).repeat_interleave(lengths_m, output_size=total)
    begin_m = lengths_m.cumsum(0) - lengths_m
    return row_N, torch.arange(total, device=device) - begin_m[row_N]


class LogProbs(nn.Module):
    """A policy as the losses see it: tokens in, log-probabilities [m, C] out.

    This is the module that DistributedDataParallel and DataParallel wrap, so that between GPUs travels one number per
    completion token and never the logits.

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
    ):
        """Wraps a model, whose attention becomes that of common/attention.py if it is of the plain causal kind.

        Args:
            model: a transformers causal language model, with dropout off; wrapped by peft or not.
            temperature: the sampling temperature; the log-probabilities are those of the distribution sampled from.
            compile: compile what is worth it, on a GPU; not under DataParallel, whose copies and threads would have
                every GPU compile for itself, at the same time.
            train_entropy: let gradients through the entropy too, for an entropy bonus.
            suppressed_ids: tokens that are never sampled, as `rollout.Sampler` was told.

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
        self.temperature, self.train_entropy = temperature, train_entropy
        self.suppressed_ids = torch.tensor(list(suppressed_ids), device=head.weight.device) if suppressed_ids else None
        support = attention.install(model)
        self.packed = not support.reason
        self.window = support.window
        # on a CPU it would take a C++ compiler and a minute, and gain little
        self.compiled = compile and head.weight.is_cuda
        if self.compiled:
            for block in attention.decoder_layers(model, support):
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
            prompt_mask: [m, Q] bool.
            completion_ids: [m, C] int64, padded on the right.
            completion_mask: [m, C] bool, the tokens of a completion, the end token included: its first ones, or none.
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
            ValueError: the images are of other prompts.
        """
        (m, Q), device = prompt_ids.shape, prompt_ids.device
        prompt_m, completion_m = prompt_mask.sum(1), completion_mask.sum(1)
        length_m, padding_m = prompt_m + completion_m, Q - prompt_m
        # the one time that the host waits for the GPU
        lengths, completions = torch.stack([length_m, completion_m]).tolist()
        ids_mT = torch.cat([prompt_ids, completion_ids], dim=1)
        decoder, T = self.model.get_decoder(), ids_mT.shape[1]
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
            hidden = decoder(**given, **packed).last_hidden_state
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
            hidden = decoder(**given, use_cache=False).last_hidden_state

        # the state before a token predicts it; prompt and padding never reach the vocabulary
        row_N, place_N = _rows(completion_m, sum(completions))
        before_N = begin_m[row_N] + prompt_m[row_N] + place_N - 1
        return hidden.flatten(0, 1).index_select(0, before_N.to(hidden.device)), (row_N, place_N)


def fill(
    micros: Iterable[Any],
    field: str,
    policy: nn.Module,
    device: torch.device,
    micro_batch_tokens: int = 0,
    images: Images | None = None,
) -> None:
    """Writes log-probabilities under weights that are not trained here into micro-batches: old ones, the reference's.

    Args:
        micros: micro-batches (`rollout.RolloutBatch`) cut as the update will see them.
        field: "old_logps" or "ref_logps".
        policy: a `LogProbs`, wrapped or not.
        device: where it takes its input.
        micro_batch_tokens: what the micro-batches were cut to: without gradients FORWARD_FACTOR times as many tokens go
            into one forward pass, which is faster. 0: each alone, as the update computes it, so that without an update
            between them the ratio is exactly 1; more at once may round differently in half precision.
        images: of the same prompts as the batch's own, by this model's vision tower, where that is another one: for a
            reference whose policy trains its tower.
    """
    if isinstance(policy, DistributedDataParallel):
        policy = policy.module  # there is nothing to reduce, and no backward pass as it would expect
    inner = policy.module if isinstance(policy, nn.DataParallel) else policy
    limit = FORWARD_FACTOR * micro_batch_tokens if inner.packed else 0
    parts: list[list[Any]] = []
    size = 0
    for micro in micros:
        num_tokens = int((micro.prompt_lengths + micro.lengths).sum()) if limit else 1
        if not parts or size + num_tokens > limit:
            parts.append([])
            size = 0
        parts[-1].append(micro)
        size += num_tokens
    # With gradients another graph is compiled, which may round differently: alone, a micro-batch takes the one of the
    # update. Its activations are freed before the next.
    trained = any(p.requires_grad for p in policy.parameters())
    with torch.set_grad_enabled(trained and inner.compiled and not limit):
        for part in parts:
            given = [
                micro.tokens if images is None else (*micro.tokens[:4], images.like(micro.images)) for micro in part
            ]
            tokens = given[0] if len(part) == 1 else _join(given)
            logps = policy(*(x.to(device) for x in tokens))[0].detach().split([len(micro.prompt_ids) for micro in part])
            for micro, logps_mC in zip(part, logps, strict=True):
                width = micro.completion_ids.shape[1]
                setattr(micro, field, logps_mC[:, :width].to(micro.prompt_ids.device))


def _join(batches: list[tuple[torch.Tensor | Images, ...]]) -> list[torch.Tensor | Images]:
    """Rows of several batches under one another: prompts padded on the left, completions on the right."""
    joined = []
    for i, tensors in enumerate(zip(*batches, strict=True)):
        if isinstance(tensors[0], Images):
            joined.append(join(tensors))
            continue
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
            "common/logprobs.py what this head does"
        )
