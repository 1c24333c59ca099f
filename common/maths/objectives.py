"""Objectives of the GRPO family: what a token contributes to the policy gradient. One function per paper.

All functions take the same arguments, so one line swaps one for another:

    logps       [B, C] fp32, log-probabilities under the policy being trained
    old_logps   [B, C] fp32, under the policy that sampled
    advantages  [B], or [B, C] where every token has its own
    mask        [B, C], completion tokens, the end token included; other positions have no effect, even NaN
    two numbers in most of them the clip range; FAMILY has the papers' values

and return an `Objective`, whose surrogate is averaged by `losses.aggregate` in the mode of FAMILY and maximised.

Dims: B sequences, C completion tokens. Log-probabilities are in nats.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.maths import losses

LARGEST_WEIGHT = 20.0  # of a token in `dppo`; a smaller one biases the gradient against rare tokens
NEARLY_OFF = 0.5  # a soft gate below this counts as clipped in the metrics


class Objective(NamedTuple):
    """What an objective makes of a micro-batch.

    Attributes:
        surrogate: [B, C] fp32, one value per token; its gradient is that of the paper.
        ratio: [B] of sequences or [B, C] of tokens, fp32; what the range is about, for metrics.
        outside: above and below the range, two bool tensors of the shape of `ratio`.
    """

    surrogate: Tensor
    ratio: Tensor
    outside: tuple[Tensor, Tensor]


def clipped_tokens(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor,
    epsilon_low: float, epsilon_high: float,
) -> Objective:  # fmt: skip
    """GRPO, DAPO and Dr. GRPO: a clipped ratio for every token; they differ in how tokens are averaged.

    Source: arXiv 2402.03300, Eq. 3; arXiv 2503.14476, Eq. 8; arXiv 2503.20783, section 3.2.
    """
    ratio = losses.token_ratio(_inside(logps, mask), _inside(old_logps, mask))
    surrogate = losses.clipped_surrogate(ratio, advantages, epsilon_low, epsilon_high)
    return Objective(surrogate, ratio, losses.outside(ratio, epsilon_low, epsilon_high))


def clipped_sequences(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor,
    epsilon_low: float, epsilon_high: float,
) -> Objective:  # fmt: skip
    """GSPO and LUSPO: one clipped ratio for the whole sequence, the geometric mean of its token ratios.

    GSPO averages over the tokens of a sequence, LUSPO sums over them: a sequence then weighs as much as it is long.

    Source: arXiv 2507.18071, Eqs. 5 and 7; arXiv 2602.05261 (LUSPO).
    """
    advantages = _of_sequences(advantages)
    ratio = losses.sequence_ratio(logps, old_logps, mask)
    surrogate = losses.clipped_surrogate(ratio, advantages, epsilon_low, epsilon_high)
    return Objective(_to_tokens(surrogate, mask), ratio, losses.outside(ratio, epsilon_low, epsilon_high))


def gspo_token(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor,
    epsilon_low: float, epsilon_high: float,
) -> Objective:  # fmt: skip
    """GSPO-token: the ratio of the sequence, with an advantage for every token; GSPO if these are equal.

    Source: arXiv 2507.18071, Eqs. 13 and 14.
    """
    ratio = losses.gspo_token_ratio(logps, old_logps, mask)
    surrogate = losses.clipped_surrogate(ratio, advantages, epsilon_low, epsilon_high)
    return Objective(surrogate, ratio, losses.outside(ratio, epsilon_low, epsilon_high))


def cispo(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor,
    epsilon_low: float, epsilon_high: float,
) -> Objective:  # fmt: skip
    """CISPO: REINFORCE with the token ratio, held between 1 - epsilon_low and 1 + epsilon_high, as a constant weight.

    Every token keeps a gradient. Only that has a meaning, not the value of the surrogate.

    Source: arXiv 2506.13585, Eqs. 4 and 5, which has no lower bound in practice: epsilon_low = 1.
    """
    logps, old_logps = _inside(logps, mask), _inside(old_logps, mask)
    ratio = losses.token_ratio(logps, old_logps)
    surrogate = losses.cispo_surrogate(logps, ratio.clamp(min=1 - epsilon_low), advantages, 1 + epsilon_high)
    return Objective(surrogate, ratio, losses.outside(ratio, epsilon_low, epsilon_high))


def dppo(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor,
    delta_low: float, delta_high: float,
) -> Objective:  # fmt: skip
    """DPPO: drops a token once its *probability* has moved by delta in the direction of its advantage.

    A ratio of 3 is harmless where the probability goes from 0.001 to 0.003, and a ratio of 1.2 is not where it goes
    from 0.5 to 0.6: the change of the probability is the total variation of "this token or another". `old_logps` are
    those of the sampler itself, not recomputed.

    Source: arXiv 2602.04879, variant Binary-TV. As in its code, the weight of a token is at most 20.
    """
    logps, old_logps = _inside(logps, mask), _inside(old_logps, mask)
    ratio = losses.token_ratio(logps, old_logps)
    moved = logps.detach().exp() - old_logps.exp()
    above, below = moved > delta_high, moved < -delta_low
    advantages = losses.align(advantages, ratio)
    dropped = torch.where(advantages > 0, above, below)
    weight = ratio * (LARGEST_WEIGHT / ratio.detach()).clamp(max=1)  # at the cap, it keeps the gradient of logps
    return Objective(torch.where(dropped, 0.0, weight * advantages), ratio, (above, below))


def sapo(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor,
    tau_negative: float, tau_positive: float,
) -> Objective:  # fmt: skip
    """SAPO: a sigmoid of the token ratio in place of the clip, so that gradients fade out and never jump to 0.

    The gate (4 / tau) sigmoid(tau (r - 1)) has slope 1 at r = 1. The gradient of a token is A r times the slope.

    Source: arXiv 2511.20347; tau is larger for negative advantages, whose gradients are less stable.
    """
    ratio = losses.token_ratio(_inside(logps, mask), _inside(old_logps, mask))
    advantages = losses.align(advantages, ratio)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (ratio - 1))
    faded = 4 * gate.detach() * (1 - gate.detach()) < NEARLY_OFF
    return Objective(4 / tau * gate * advantages, ratio, (faded & (ratio > 1), faded & (ratio < 1)))


def gmpo(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor,
    epsilon_low: float, epsilon_high: float,
) -> Objective:  # fmt: skip
    """GMPO: the geometric mean over a sequence of token ratios that are clipped first, in log space.

    A token is clipped on the side of the advantage only, and then has no gradient; the others of its sequence keep
    theirs. The range is of log-ratios: 0.4 stands for ratios from 0.67 to 1.49.

    Source: arXiv 2507.20673.
    """
    advantages = _of_sequences(advantages)
    log_ratio = _inside(logps, mask) - _inside(old_logps, mask)
    upward = advantages[:, None] > 0
    held = torch.where(upward, log_ratio.clamp(max=epsilon_high), log_ratio.clamp(min=-epsilon_low))
    mean = losses.masked_mean(held, mask).clamp(max=10.0).exp()
    ratio = losses.token_ratio(_inside(logps, mask), _inside(old_logps, mask))
    outside = log_ratio.detach() > epsilon_high, log_ratio.detach() < -epsilon_low
    return Objective(_to_tokens(mean * advantages, mask), ratio, outside)


def vespo(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor,
    lambda_negative: float, lambda_positive: float, k_negative: float = 3.0, k_positive: float = 2.0,
) -> Objective:  # fmt: skip
    """VESPO: REINFORCE with the weight W^k exp(lambda (1 - W)), where W is the ratio of the whole sequence.

    W is the product of the token ratios, not their mean: nothing is normalised by length. The weight is 1 at W = 1 and
    fades on both sides. Only the gradient has a meaning, not the value of the surrogate.

    Source: arXiv 2602.10693. As in its code, log W is held between log(1e-8) and 20.
    """
    advantages = _of_sequences(advantages)
    logps, old_logps = _inside(logps, mask), _inside(old_logps, mask)
    log_ratio = (logps.detach() - old_logps).clamp(-losses.MAX_LOG_RATIO, losses.MAX_LOG_RATIO)
    log_w = log_ratio.sum(-1).clamp(math.log(1e-8), losses.MAX_LOG_RATIO)
    w = log_w.exp()
    positive = advantages >= 0
    k = torch.where(positive, k_positive, k_negative)
    rate = torch.where(positive, lambda_positive, lambda_negative)
    weight = (rate * (1 - w) + k * log_w).exp()
    faded = weight < NEARLY_OFF
    return Objective((weight * advantages)[:, None] * logps, w, (faded & (w > 1), faded & (w < 1)))


class Member(NamedTuple):
    """An objective as its paper has it.

    Attributes:
        function: of this file.
        numbers: the last two arguments of the function.
        aggregation: mode of `losses.aggregate`.
    """

    function: Callable[..., Objective]
    numbers: tuple[float, float]
    aggregation: str


FAMILY = {
    "grpo": Member(clipped_tokens, (0.2, 0.28), "seq_mean"),  # the paper does not state its range
    "dapo": Member(clipped_tokens, (0.2, 0.28), "token_mean"),
    "dr_grpo": Member(clipped_tokens, (0.2, 0.28), "constant"),
    "cispo": Member(cispo, (1.0, 4.0), "token_mean"),  # arXiv 2510.13786 finds caps of 4 to 8 equally good
    "dppo": Member(dppo, (0.2, 0.2), "token_mean"),
    "sapo": Member(sapo, (1.05, 1.0), "seq_mean"),
    "gspo": Member(clipped_sequences, losses.CLIP_PRESETS["dense"], "seq_mean"),
    "gspo_token": Member(gspo_token, losses.CLIP_PRESETS["dense"], "seq_mean"),
    "luspo": Member(clipped_sequences, (2e-3, 2.5e-3), "seq_sum"),
    "gmpo": Member(gmpo, (0.4, 0.4), "seq_mean"),
    "vespo": Member(vespo, (2.0, 3.0), "token_mean"),
}


def _inside(values: Tensor, mask: Tensor) -> Tensor:
    """Values in fp32, 0 where masked out, so that NaN or infinity there cannot spread."""
    return torch.where(mask.bool(), values.float(), 0.0)


def _to_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """[B] as [B, C]: each token has the value of its sequence, whose mean over tokens it thus is."""
    return values[:, None].expand(mask.shape)


def _of_sequences(advantages: Tensor) -> Tensor:
    """Advantages, if there is one per sequence."""
    if advantages.dim() != 1:
        raise ValueError(
            f"advantages of shape {list(advantages.shape)}: this objective has one ratio per sequence, so they must be "
            "[sequences]; gspo_token takes one per token"
        )
    return advantages
