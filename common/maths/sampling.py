"""Sampling tokens: the distribution, the random numbers, and the log-probabilities of the samples.

Dims: b sequences, V vocabulary, C new tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from common.maths.sampling_options import COLDEST, Sampling

__all__ = ["COLDEST", "Sampling", "distribution", "draw", "uniforms"]
BLOCK = 128  # tokens of a block; probabilities are summed by block, and a draw searches one block only
LOWEST = -1e30  # in place of minus infinity, where that would give inf - inf


def distribution(
    logits: torch.Tensor,
    sampling: Sampling,
    count: torch.Tensor | int,
    end_ids: torch.Tensor,
    suppressed_ids: torch.Tensor,
) -> torch.Tensor:
    """Logits of the sampling distribution, minus infinity for tokens that cannot be drawn.

    Args:
        logits: [b, V] fp32.
        sampling: the distribution.
        count: [b] int64 or one number, new tokens so far.
        end_ids: int64, tokens that end a completion.
        suppressed_ids: int64, tokens that are never drawn; may be empty.

    Returns:
        [b, V] fp32, divided by the temperature.
    """
    if len(suppressed_ids):
        logits = logits.index_fill(-1, suppressed_ids, -torch.inf)
    if sampling.min_new_tokens:
        is_end = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device).index_fill(0, end_ids, True)
        early = torch.as_tensor(count, device=logits.device) < sampling.min_new_tokens
        logits = logits.masked_fill(early.view(-1, 1) & is_end, -torch.inf)
    if sampling.temperature == 0:
        return logits
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered = logits.sort(descending=True).values
        probabilities = ordered.softmax(-1)
        kept = probabilities.cumsum(-1) - probabilities < sampling.top_p  # the token that crosses top_p is kept
        logits = logits.masked_fill(logits < ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True), -torch.inf)
    if sampling.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p), -torch.inf)
    return logits


def draw(logits: torch.Tensor, uniforms: torch.Tensor, greedy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row by inverting the cumulative distribution, and returns its log-probability.

    One random number selects first a block of `BLOCK` tokens, then a token in it. Sums over blocks
    are fp64: an fp32 sum over 150,000 tokens would lose the rare ones.

    Args:
        logits: [b, V] fp32, minus infinity for tokens that cannot be drawn.
        uniforms: [b] fp64, random numbers in [0, 1).
        greedy: take the most likely token instead.

    Returns:
        Tokens [b] int64, and their log-probabilities [b] fp32 under the softmax of `logits`.
    """
    blocks = F.pad(logits, (0, -logits.shape[-1] % BLOCK), value=-torch.inf).view(len(logits), -1, BLOCK)
    # relative to the maximum of each block, so that the vocabulary is read only once; a block
    # without tokens sums to 0
    tops = blocks.amax(-1)
    sums = (blocks - tops.clamp(min=LOWEST)[..., None]).exp().sum(-1)
    top = tops.amax(-1, keepdim=True)
    ends = (sums.double() * (tops - top).double().exp()).cumsum(-1)  # cumulative distribution at the end of each block
    if greedy:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        threshold = uniforms[:, None] * ends[:, -1:]
        block = torch.searchsorted(ends, threshold, right=True).clamp(max=ends.shape[-1] - 1)
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
        inside = (inside - top).double().exp().cumsum(-1)
        before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
        # two orders of summation differ in the last bits: the result must stay within the block
        threshold = torch.minimum(threshold - before, inside[:, -1:] * (1 - 2.0**-50))
        tokens = block * BLOCK + torch.searchsorted(inside, threshold, right=True)
        # NaN would index past the vocabulary, which on a GPU ends the process
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    logps = logits.gather(-1, tokens) - top - ends[:, -1:].log().float()
    return tokens.squeeze(-1), logps.squeeze(-1)


def uniforms(seed: int, step: int, prompt_numbers: Sequence[int], group_size: int, length: int) -> torch.Tensor:
    """Random numbers for every token of a rollout, one stream per prompt.

    They are drawn on the CPU, so that all machines get the same, and depend on the position of a
    token, not on the order of computation.

    Args:
        seed: of the run.
        step: of the run.
        prompt_numbers: number of each prompt in the batch of the whole step.
        group_size: completions per prompt.
        length: maximum tokens per completion.

    Returns:
        [P * group_size, length] fp64, in [0, 1).
    """
    streams = []
    for number in prompt_numbers:
        generator = torch.Generator().manual_seed(((seed * 1_000_003 + step) * 1_000_003 + number) % 2**63)
        streams.append(torch.rand(group_size, length, generator=generator, dtype=torch.float64))
    return torch.cat(streams)
