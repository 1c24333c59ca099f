"""Per-token log-probabilities of completions: the one place that shifts, masks and projects to the vocabulary.

Dims: m sequences, Q prompt tokens, C completion tokens, H hidden size, V vocabulary, N completion tokens of a batch.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 2048  # tokens projected to the vocabulary at once: 1.2 GiB of fp32 logits at V = 151,936


def position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions that count real tokens only, so that left padding does not move a prompt.

    Args:
        attention_mask: [m, T], 1 for a token, 0 for padding.

    Returns:
        [m, T] int64.
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def vocabulary_logits(model: nn.Module, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Next-token logits in fp32, whatever the dtype of the model.

    Rounding the logits to bf16 alone would move a sequence's ratio by more than GSPO's clip range.

    Args:
        model: a transformers causal language model.
        hidden: [..., H], last hidden states.
        weight: [V, H] fp32, the head's weight if it was cast before.

    Returns:
        [..., V] fp32.
    """
    head = model.get_output_embeddings()
    weight = head.weight.float() if weight is None else weight
    bias = getattr(head, "bias", None)
    logits = F.linear(hidden.float(), weight, None if bias is None else bias.float())
    softcap = getattr(model.config, "final_logit_softcapping", None)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _token_stats(
    model: nn.Module, weight: torch.Tensor, hidden_NH: torch.Tensor, ids_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every token, [N] and [N] fp32."""
    logps_NV = (vocabulary_logits(model, hidden_NH, weight) / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(logps_NV.exp() * logps_NV).nan_to_num().sum(-1)
    return logps_NV.gather(-1, ids_N[:, None]).squeeze(-1), entropy_N


class LogProbs(nn.Module):
    """A policy as the losses see it: tokens in, log-probabilities [m, C] out.

    This is the module that DistributedDataParallel and DataParallel wrap, so that between GPUs travels one number per
    completion token and never the logits.
    """

    def __init__(self, model: nn.Module, temperature: float):
        """Wraps a model.

        Args:
            model: a transformers causal language model, with dropout off.
            temperature: the sampling temperature; the log-probabilities are those of the distribution sampled from.
        """
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of every completion token.

        Args:
            prompt_ids: [m, Q] int64, padded on the left.
            prompt_mask: [m, Q] bool.
            completion_ids: [m, C] int64, padded on the right.
            completion_mask: [m, C] bool, the end token included.

        Returns:
            Log-probabilities [m, C] and entropies [m, C], fp32, nats, 0 where masked; no gradient through the entropy.
        """
        # Each row is moved to the left, so that all padding is at its end, where causal attention never sees it: no
        # mask is needed, the fast kernels apply, and no position is left without anything to attend to.
        padding_m1 = (~prompt_mask).sum(1, keepdim=True)
        ids_mT = torch.cat([prompt_ids, completion_ids], dim=1)
        moved_mT = torch.arange(ids_mT.shape[1], device=ids_mT.device) + padding_m1
        ids_mT = ids_mT.gather(1, moved_mT.clamp(max=ids_mT.shape[1] - 1))
        hidden_mTH = self.model.get_decoder()(input_ids=ids_mT, use_cache=False).last_hidden_state

        # the state before a token predicts it; prompt and padding never reach the vocabulary
        row_N, column_N = completion_mask.nonzero(as_tuple=True)
        before_N = column_N + (prompt_ids.shape[1] - 1) - padding_m1[row_N, 0]
        hidden_NH = hidden_mTH[row_N, before_N]
        ids_N = completion_ids[completion_mask]
        weight = self.model.get_output_embeddings().weight.float()  # once: its gradient adds up in fp32 over the chunks
        chunked = len(ids_N) > CHUNK_TOKENS
        logps, entropy = [], []
        for hidden_nH, ids_n in zip(hidden_NH.split(CHUNK_TOKENS), ids_N.split(CHUNK_TOKENS), strict=True):
            args = (self.model, weight, hidden_nH, ids_n, self.temperature)
            # a second chunk would double the logits kept for the backward pass: compute them again there instead
            stats = checkpoint(_token_stats, *args, use_reentrant=False) if chunked else _token_stats(*args)
            logps.append(stats[0])
            entropy.append(stats[1])
        zeros_mC = torch.zeros(completion_ids.shape, device=completion_ids.device)
        return (
            zeros_mC.masked_scatter(completion_mask, torch.cat(logps)),
            zeros_mC.masked_scatter(completion_mask, torch.cat(entropy)),
        )


@torch.no_grad()
def fill(micros: Iterable, field: str, policy: nn.Module, device: torch.device) -> None:
    """Writes log-probabilities under weights that are not trained here into micro-batches: old ones, the reference's.

    Args:
        micros: micro-batches cut as the update will see them: then the first ratio is exactly 1.
        field: "old_logps" or "ref_logps".
        policy: a `LogProbs`, wrapped or not.
        device: where it takes its input.
    """
    for micro in micros:
        logps_mC, _ = policy(*(tokens.to(device) for tokens in micro.tokens))
        setattr(micro, field, logps_mC.to(micro.prompt_ids.device))


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
    own = model(input_ids=ids, use_cache=False).logits.float()
    ours = vocabulary_logits(model, model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
    model.train(was_training)
    error, size = (own - ours).abs().max().item(), own.abs().max().item()
    if not error <= 0.02 * size + 1e-4:  # the own logits may be bf16; NaN fails
        raise ValueError(
            f"{type(model).__name__}: its logits differ by {error:.3g} (of {size:.3g}) from a linear head over its "
            "last hidden states, which is what the log-probabilities are computed from; use another model, or teach "
            "common/logprobs.py what this head does"
        )
