"""Row 16 of the claims: what rounding logits to bf16 does to the ratio of a policy that has not changed.

Dims:  B completions, C completion tokens, N tokens of all completions, n of them in one chunk, H hidden size,
       V vocabulary
"""

import math
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
from claims_base import Row, spread

from common.generation.rollout import Sampler
from common.maths import losses
from common.model import head
from common.model.logprobs import LogProbs

FP32 = "fp32 logits, added in two orders"
BF16 = "bf16 logits on one side"
BOTH = "bf16 logits on both, added in two orders"
STORED = "old log-probabilities stored in bf16"
ENGINE = "fp32 logits, old ones from the decode engine"


def random_llama(logit_std: float, V: int, H: int = 128) -> LlamaForCausalLM:
    """A tiny Llama in bf16 with random weights, whose logits have this standard deviation.

    Args:
        logit_std: the larger, the surer the policy. Language models in use are as sure as 3 to 5 makes this one: an
            entropy of 4 to 2 nats, and largest logits of 11 to 18.
        V: vocabulary.
        H: hidden size.
    """
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, hidden_size=H, intermediate_size=3 * H, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, initializer_range=H**-0.5)  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(0, logit_std / H**0.5)  # the last norm leaves hidden states of length sqrt(H)
    return model.to(torch.bfloat16)


def rounding_variance(logits_nV: torch.Tensor, logps_nV: torch.Tensor, ids_n: torch.Tensor) -> torch.Tensor:
    """Variance [n] that rounding all logits to bf16 gives a log-probability, derived to first order, not measured.

    Rounding errors are uniform over the spacing of bf16, which is 2^-7 of the power of two below the logit. With
    respect to a logit, the log-probability has the derivative 1 - p for the token itself and -p for any other.
    """
    spacing_nV = (logits_nV.view(torch.int32) & 0x7F800000).view(torch.float32) * 2**-7  # fp32 without its mantissa
    slope_nV = logps_nV.exp().neg_()
    slope_nV.scatter_add_(1, ids_n[:, None], torch.ones(len(ids_n), 1))
    return (slope_nV * spacing_nV).square_().sum(-1) / 12


@torch.no_grad()
def same_policy_twice(
    logit_std: float, sequences: int, tokens: int, V: int
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], torch.Tensor, float]:
    """Log-probabilities of the same completions under the same weights, computed in two ways.

    Returns:
        Both log-probabilities [B, C] for each pair of ways; the variance [B, C] predicted for bf16 logits; and the
        mean entropy in nats.
    """
    model = random_llama(logit_std, V)
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(V, (sequences, 8), generator=rng).tolist()
    sampler = Sampler([model], end_ids=[], pad_id=0, max_new_tokens=tokens)
    batch = sampler.generate(prompts, group_size=1, temperature=1.0)
    hidden_NH, places = LogProbs(model, 1.0).states(*batch.tokens)
    plain = hidden_NH, model.lm_head.weight, batch.completion_ids[places]
    # another kernel adds in another order: over the hidden state, and over the vocabulary
    order_H, order_V = torch.randperm(hidden_NH.shape[1], generator=rng), torch.randperm(V, generator=rng)
    shuffled = hidden_NH[:, order_H], plain[1][order_V][:, order_H], order_V.argsort()[plain[2]]

    def wide(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return head.logps_from_weight(hidden_NH, weight_VH, None, ids_N, 1.0, None, False)  # and the entropy

    def narrow(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts, weight_VH = [], head.operand(weight_VH)
        for hidden_nH, ids_n in head.chunks(hidden_NH, ids_N):
            logits_nV = head.project(hidden_nH, weight_VH, None, None)
            logps_nV = logits_nV.bfloat16().float().log_softmax(-1)
            parts.append((logps_nV.gather(1, ids_n[:, None])[:, 0], rounding_variance(logits_nV, logps_nV, ids_n)))
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    (wide_N, entropy_N), (narrow_N, variance_N) = wide(*plain), narrow(*plain)
    pairs = {
        FP32: (wide_N, wide(*shuffled)[0]),
        BF16: (narrow_N, wide_N),
        BOTH: (narrow_N, narrow(*shuffled)[0]),
        STORED: (wide_N, wide_N.bfloat16().float()),
        ENGINE: (wide_N, batch.rollout_logps[places]),
    }
    shape = batch.completion_ids.shape
    pairs = {name: (new_N.view(shape), old_N.view(shape)) for name, (new_N, old_N) in pairs.items()}
    return pairs, variance_N.view(shape), entropy_N.mean().item()


def bf16_logits(
    logit_stds: tuple[float, ...] = (3.0, 4.0, 5.0),
    sequences: int = 64,
    lengths: tuple[int, ...] = (20, 100, 400),
    V: int = 4096,
) -> list[Row]:
    """Row 16: the sequence ratio of an unchanged policy, over the first tokens of completions."""
    sizes, largest, outside = {}, {}, {}  # of log s; of abs(s - 1); shares of sequences; a number per policy
    predicted, entropies = {}, []
    for logit_std in logit_stds:
        pairs, variance_BC, entropy = same_policy_twice(logit_std, sequences, max(lengths), V)
        entropies.append(entropy)
        for length in lengths:
            variance = variance_BC[:, :length].sum(1).mean() / length**2
            predicted.setdefault(length, []).append(variance.sqrt().item())
            mask_BC = torch.arange(max(lengths)).expand(sequences, -1) < length
            for name, logps in pairs.items():
                ratio_B = losses.sequence_ratio(*logps, mask_BC)
                sizes.setdefault((name, length), []).append(ratio_B.log().square().mean().sqrt().item())
                largest.setdefault(name, []).append((ratio_B - 1).abs().max().item())
                for preset, clip_range in losses.CLIP_PRESETS.items():
                    stats = losses.clip_stats(
                        ratio_B, torch.ones(sequences), losses.outside(ratio_B, *clip_range), mask_BC[:, 0]
                    )
                    outside.setdefault((name, length, preset), []).append(stats["out_of_range"].item())

    def column(name: str) -> str:
        size = ", ".join(f"{sum(sizes[name, length]) / len(logit_stds):.1e}" for length in lengths)
        shares = (
            f"outside {clip_range} {', '.join(spread(outside[name, length, preset]) for length in lengths)}"
            for preset, clip_range in (("paper", "3e-4/4e-4"), ("dense", "3e-3/4e-3"))
        )
        return f"{name} {size}, {', '.join(shares)}"

    ratios = [a / b for length in lengths for a, b in zip(sizes[BF16, length], predicted[length], strict=True)]
    tolerance = 5 / math.sqrt(2 * sequences)  # five standard errors of a standard deviation
    in_most = all(sum(outside[BF16, length, "paper"]) > len(logit_stds) / 2 for length in lengths)
    return [
        Row(
            16,
            "GSPO needs logits in fp32 (arXiv 2510.13786, section 3.2, recommends them; the ratio s is arXiv "
            "2507.18071, Eq. 7), here of a policy that has not changed",
            f"root mean square of log s, and share of the sequences outside a clip range, after "
            f"{', '.join(map(str, lengths))} tokens: {'; '.join(column(name) for name in (BF16, STORED, ENGINE))}. "
            f"Largest abs(s - 1): {'; '.join(f'{name} {max(largest[name]):.0e}' for name in (FP32, BOTH))}. {BF16}, "
            f"log s is {spread(ratios)} of what the spacing of bf16 predicts. {len(logit_stds)} policies with "
            f"entropies of {', '.join(f'{entropy:.1f}' for entropy in entropies)} nats, {sequences} sequences each",
            f"{FP32}: abs(s - 1) at most 1e-5 in every sequence; {BF16}: more than half of all sequences outside "
            f"3e-4/4e-4 at each length, and log s within {tolerance:.0%} of the prediction with each policy",
            max(largest[FP32]) <= 1e-5 and in_most and max(abs(ratio - 1) for ratio in ratios) <= tolerance,
        )
    ]
