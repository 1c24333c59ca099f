"""Policy-gradient losses as pure functions of tensors: ratios, clipping, KL estimates, aggregation.

Dims: B sequences, C completion tokens. Log-probabilities are in nats. Surrogates are maximised, losses minimised.
"""

import torch

CLIP_PRESETS = {
    "dense": (3e-3, 4e-3),  # dense models, answers up to about 2k tokens
    "paper": (3e-4, 4e-4),  # arXiv 2507.18071, section 5.1: a 30B MoE with very long answers
}
MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far outside every clip range, and still finite in fp32 after squaring


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of each row over its masked-in positions; 0 for a row without any.

    Args:
        values: [B, C], any float dtype; what stands at masked-out positions is never read, NaN included.
        mask: [B, C], bool or 0/1.

    Returns:
        [B] fp32.
    """
    mask = mask.bool()
    total = torch.where(mask, values.float(), 0.0).sum(-1)
    return total / mask.sum(-1).clamp(min=1)


def token_ratio(logps: torch.Tensor, old_logps: torch.Tensor) -> torch.Tensor:
    """Importance ratio of every token, pi / pi_old.

    Args:
        logps: [B, C] fp32, log-probabilities under the policy being trained.
        old_logps: [B, C] fp32, under the policy at the time of the rollout.

    Returns:
        [B, C] fp32.

    Source: arXiv 2402.03300, Eq. 3. The log-ratio is held within +-20 so that no ratio overflows.
    """
    return (logps.float() - old_logps.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """GSPO's length-normalised importance ratio: the geometric mean of a sequence's token ratios.

    Args:
        logps: [B, C] fp32, log-probabilities under the policy being trained.
        old_logps: [B, C] fp32, under the policy at the time of the rollout.
        mask: [B, C], completion tokens, the end token included.

    Returns:
        [B] fp32; 1 for a sequence without tokens.

    Source: arXiv 2507.18071, Eq. 7. log s is capped at +10, so that a sequence that ran away stays finite.
    """
    # the mask goes in before the mean, never as a factor after: -inf * 0 would be NaN
    return masked_mean(logps - old_logps, mask).clamp(max=10.0).exp()


def gspo_token_ratio(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """GSPO-token's ratio: the value of the sequence ratio on every token, the gradient of that token alone.

    Args:
        logps: [B, C] fp32, log-probabilities under the policy being trained.
        old_logps: [B, C] fp32, under the policy at the time of the rollout.
        mask: [B, C], completion tokens, the end token included.

    Returns:
        [B, C] fp32.

    Source: arXiv 2507.18071, Eq. 14. It differs from Eq. 7 only where advantages differ within a sequence.
    """
    logps = torch.where(mask.bool(), logps, 0.0)  # what stands at masked-out positions must not become NaN
    own_gradient = torch.exp(logps - logps.detach())  # 1, with the gradient of logps
    return sequence_ratio(logps, old_logps, mask).detach()[:, None] * own_gradient


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, epsilon_low: float, epsilon_high: float
) -> torch.Tensor:
    """The pessimistic of the plain and the clipped policy-gradient objective; to be maximised.

    Args:
        ratio: [B] or [B, C] fp32.
        advantages: [B], or of the shape of `ratio`.
        epsilon_low: the ratio counts down to 1 - epsilon_low.
        epsilon_high: and up to 1 + epsilon_high.

    Returns:
        fp32, shape of `ratio`. Its gradient is 0 where A > 0 and ratio > 1 + epsilon_high, and where A < 0 and
        ratio < 1 - epsilon_low.

    Source: arXiv 2507.18071, Eq. 5 for sequences; arXiv 2402.03300, Eq. 3 for tokens.
    """
    advantages = _align(advantages, ratio)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)


def dual_clip(surrogate: torch.Tensor, advantages: torch.Tensor, cap: float) -> torch.Tensor:
    """A floor under the surrogate where the advantage is negative: there a ratio counts up to `cap` at most.

    Without it a token that has become much likelier, and should not have, pushes without bound.

    Args:
        surrogate: [B] or [B, C] fp32, from `clipped_surrogate`.
        advantages: [B], or of the shape of `surrogate`.
        cap: largest ratio that counts, above 1; 3 is usual.

    Returns:
        fp32, shape of `surrogate`; its gradient is 0 where A < 0 and ratio > cap.

    Source: arXiv 1912.09729 (dual-clip PPO).
    """
    advantages = _align(advantages, surrogate)
    return torch.where(advantages < 0, torch.maximum(surrogate, cap * advantages), surrogate)


def cispo_surrogate(logps: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, cap: float) -> torch.Tensor:
    """Policy gradient with a capped importance weight, which is a constant; to be maximised.

    No token loses its gradient, however far its ratio has moved. The value means nothing, only the gradient does.

    Args:
        logps: [B, C] fp32, log-probabilities under the policy being trained.
        ratio: [B, C] fp32, from `token_ratio`.
        advantages: [B] or [B, C].
        cap: largest weight.

    Returns:
        [B, C] fp32; its gradient with respect to logps is min(ratio, cap) * A.

    Source: arXiv 2506.13585, Eqs. 4-5, where the cap is written 1 + epsilon_high; arXiv 2510.13786 finds 4 to 8 alike.
    """
    return ratio.detach().clamp(max=cap) * _align(advantages, ratio) * logps.float()


def clip_stats(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    mask: torch.Tensor,
    dual_clip: float = 0.0,
) -> dict[str, torch.Tensor]:
    """How much of a batch the clip holds back.

    Args:
        ratio: [B] or [B, C] fp32.
        advantages: [B], or of the shape of `ratio`.
        epsilon_low: as in `clipped_surrogate`.
        epsilon_high: as in `clipped_surrogate`.
        mask: shape of `ratio`, the entries that count.
        dual_clip: cap of `dual_clip`; 0: not in use.

    Returns:
        0-d fp32 tensors: `clip_fraction` (the clip is active: no gradient), `out_of_range` (outside the clip range,
        whatever the sign of the advantage), `ratio_max` (largest ratio).
    """
    ratio, mask = ratio.detach(), mask.bool()
    advantages = _align(advantages, ratio)
    above, below = ratio > 1 + epsilon_high, ratio < 1 - epsilon_low
    beyond = ratio > (dual_clip or torch.inf)
    held_back = (above & (advantages > 0)) | ((below | beyond) & (advantages < 0))
    count = mask.sum().clamp(min=1)
    return {
        "clip_fraction": (held_back & mask).sum() / count,
        "out_of_range": ((above | below) & mask).sum() / count,
        "ratio_max": torch.where(mask, ratio, 0.0).max(),
    }


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token estimate of KL(pi || ref) from tokens sampled from pi.

    With d = logps - ref_logps: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. k1 and k3 are unbiased as *values*. As a
    *loss* term, in expectation over on-policy tokens, k1 has no gradient at all, k2 has the gradient of KL(pi || ref),
    and k3 that of KL(ref || pi). Multiplied by the token ratio, with its gradient, k3 has the gradient of
    KL(pi || ref), also for tokens of an older policy.

    Args:
        logps: [B, C] fp32, log-probabilities under pi.
        ref_logps: [B, C] fp32, under the reference.
        kind: "k1", "k2" or "k3".

    Returns:
        [B, C] fp32, nats.

    Raises:
        ValueError: another kind.

    Source: arXiv 2402.03300, Eq. 4 is k3. d is held within +-20 before the exponential: value and gradient stay finite.
    """
    d = (logps.float() - ref_logps.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return torch.exp(-d) + d - 1
    raise ValueError(f"kl estimator {kind!r}: must be one of k1, k2, k3")


def aggregate(values: torch.Tensor, mask: torch.Tensor, mode: str, denominator: float) -> torch.Tensor:
    """Sum of per-token values over a micro-batch, as its exact share of the minibatch mean.

    The denominator belongs to the whole minibatch, over all micro-batches and ranks: then the shares add up to the same
    loss however the minibatch is cut.

    Args:
        values: [B, C], one value per token.
        mask: [B, C], the tokens that count.
        mode: "seq_mean" (mean over each sequence first; denominator = sequences), "token_mean" (denominator = tokens)
            or "constant" (denominator = sequences x a fixed length, as in Dr. GRPO).
        denominator: see `mode`.

    Returns:
        0-d fp32.

    Raises:
        ValueError: another mode.
    """
    if mode == "seq_mean":
        return masked_mean(values, mask).sum() / denominator
    if mode in ("token_mean", "constant"):
        return torch.where(mask.bool(), values.float(), 0.0).sum() / denominator
    raise ValueError(f"aggregation mode {mode!r}: must be one of seq_mean, token_mean, constant")


def weights(mask: torch.Tensor, mode: str, denominator: float) -> torch.Tensor:
    """What every token's value counts in `aggregate`, for a loss that has to know it beforehand.

    Args:
        mask: [B, C], the tokens that count.
        mode: "seq_mean" or "token_mean".
        denominator: as in `aggregate`.

    Returns:
        [B, C] fp32.

    Raises:
        ValueError: another mode.
    """
    if mode not in ("seq_mean", "token_mean"):
        raise ValueError(f"aggregation mode {mode!r}: must be one of seq_mean, token_mean")
    lengths = mask.sum(1, keepdim=True).clamp(min=1) if mode == "seq_mean" else 1.0
    return mask.float() / (lengths * denominator)


def _align(advantages: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """Advantages [B] as [B, 1] beside token ratios [B, C]."""
    return advantages[:, None] if advantages.dim() < ratio.dim() else advantages
