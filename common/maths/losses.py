"""Policy-gradient losses as pure functions of tensors: ratios, clipping, KL estimates, aggregation.

Dims: B sequences, C completion tokens. Log-probabilities are in nats. Surrogates are maximised, losses minimised.
"""

import torch

CLIP_PRESETS = {
    "dense": (3e-3, 4e-3),  # dense models, answers up to about 2k tokens
    "paper": (3e-4, 4e-4),  # arXiv 2507.18071, section 5.1: a 30B MoE with very long answers
}
MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far outside every clip range, and finite in fp32 when squared


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of each row over its masked-in positions; 0 for a row without any.

    Args:
        values: [B, C], any float dtype; values at masked-out positions have no effect, even NaN.
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

    Source: arXiv 2402.03300, Eq. 3. The log-ratio is clamped to +-20, so that no ratio overflows.
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

    Source: arXiv 2507.18071, Eq. 7. The log-ratio is capped at +10, so that no ratio overflows.
    """
    # masked before the mean, not multiplied by the mask, because -inf * 0 is NaN
    return masked_mean(logps - old_logps, mask).clamp(max=10.0).exp()


def gspo_token_ratio(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """GSPO-token's ratio: the value of the sequence ratio, the gradient of each token.

    Args:
        logps: [B, C] fp32, log-probabilities under the policy being trained.
        old_logps: [B, C] fp32, under the policy at the time of the rollout.
        mask: [B, C], completion tokens, the end token included.

    Returns:
        [B, C] fp32.

    Source: arXiv 2507.18071, Eq. 14. It differs from Eq. 7 only where advantages differ within a sequence.
    """
    logps = torch.where(mask.bool(), logps, 0.0)  # NaN or infinity at masked-out positions must not spread
    own_gradient = torch.exp(logps - logps.detach())  # 1, with the gradient of logps
    return sequence_ratio(logps, old_logps, mask).detach()[:, None] * own_gradient


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, epsilon_low: float, epsilon_high: float
) -> torch.Tensor:
    """The smaller of the plain and the clipped policy-gradient objective; to be maximised.

    Args:
        ratio: [B] or [B, C] fp32.
        advantages: [B], or of the shape of `ratio`.
        epsilon_low: the ratio is clipped below 1 - epsilon_low.
        epsilon_high: the ratio is clipped above 1 + epsilon_high.

    Returns:
        fp32, shape of `ratio`. Its gradient is 0 where A > 0 and ratio > 1 + epsilon_high, and where A < 0 and
        ratio < 1 - epsilon_low.

    Source: arXiv 2507.18071, Eq. 5 for sequences; arXiv 2402.03300, Eq. 3 for tokens.
    """
    advantages = align(advantages, ratio)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)


def dual_clip(surrogate: torch.Tensor, advantages: torch.Tensor, cap: float) -> torch.Tensor:
    """Caps the ratio in the surrogate where the advantage is negative.

    Without the cap, a token with a negative advantage that has become much likelier has an
    unbounded gradient.

    Args:
        surrogate: [B] or [B, C] fp32, from `clipped_surrogate`.
        advantages: [B], or of the shape of `surrogate`.
        cap: of the ratio, above 1; 3 is usual.

    Returns:
        fp32, shape of `surrogate`; its gradient is 0 where A < 0 and ratio > cap.

    Source: arXiv 1912.09729 (dual-clip PPO).
    """
    advantages = align(advantages, surrogate)
    return torch.where(advantages < 0, torch.maximum(surrogate, cap * advantages), surrogate)


def cispo_surrogate(logps: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, cap: float) -> torch.Tensor:
    """Policy gradient with a capped importance weight, treated as a constant; to be maximised.

    Every token keeps a gradient, however far its ratio has moved. Only the gradient has a meaning,
    not the value.

    Args:
        logps: [B, C] fp32, log-probabilities under the policy being trained.
        ratio: [B, C] fp32, from `token_ratio`.
        advantages: [B] or [B, C].
        cap: of the weight.

    Returns:
        [B, C] fp32; its gradient with respect to logps is min(ratio, cap) * A.

    Source: arXiv 2506.13585, Eqs. 4-5, where the cap is 1 + epsilon_high; arXiv 2510.13786 finds 4
    to 8 equally good.
    """
    return ratio.detach().clamp(max=cap) * align(advantages, ratio) * logps.float()


def outside(ratio: torch.Tensor, epsilon_low: float, epsilon_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ratios are above and below the clip range.

    Args:
        ratio: [B] or [B, C] fp32.
        epsilon_low: as in `clipped_surrogate`.
        epsilon_high: as in `clipped_surrogate`.

    Returns:
        Two bool tensors of the shape of `ratio`.
    """
    ratio = ratio.detach()
    return ratio > 1 + epsilon_high, ratio < 1 - epsilon_low


def clip_stats(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    outside: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    dual_clip: float = 0.0,
) -> dict[str, torch.Tensor]:
    """How much of a batch is clipped.

    Args:
        ratio: [B] or [B, C] fp32.
        advantages: [B], or of the shape of `ratio`.
        outside: which are above and below the range, of the shape of `ratio`; see `outside`.
        mask: shape of `ratio`, the entries that count.
        dual_clip: cap of `dual_clip`; 0: unused.

    Returns:
        0-d fp32 tensors: `clip_fraction` (clipped, without gradient), `out_of_range` (outside the
        clip range, whatever the sign of the advantage), `ratio_max` (largest ratio).
    """
    (above, below), ratio, mask = outside, ratio.detach(), mask.bool()
    advantages = align(advantages, ratio)
    beyond = ratio > (dual_clip or torch.inf)
    clipped = (above & (advantages > 0)) | ((below | beyond) & (advantages < 0))
    count = mask.sum().clamp(min=1)
    return {
        "clip_fraction": (clipped & mask).sum() / count,
        "out_of_range": ((above | below) & mask).sum() / count,
        "ratio_max": torch.where(mask, ratio, 0.0).max(),
    }


def sampler_weight(
    old_logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor, kind: str, cap: float
) -> torch.Tensor:
    """Weight that corrects for a sampler whose probabilities are not those of the policy that the ratio starts from.

    With w = pi_old / pi_sampler, a token or (`seq_...`) the product over its sequence, `tis` weighs
    by min(w, cap), and `mis` by w, or 0 outside of 1 / cap to cap. Weights of tokens vary little but
    are biased; products are unbiased before the cap, and vary more the longer the sequence.

    Args:
        old_logps: [B, C] fp32, recomputed by the model that is trained.
        sampler_logps: [B, C] fp32, as sampled.
        mask: [B, C], completion tokens.
        kind: "tis", "mis", "seq_tis" or "seq_mis".
        cap: above 1; 2 is usual for tokens.

    Returns:
        [B, C] fp32, a constant to multiply the surrogate by.

    Raises:
        ValueError: another kind.

    Source: truncated importance sampling, arXiv 2510.26788, section 2, and masking as in IcePop; neither was read in
    the original, but in public implementations.
    """
    if kind not in ("tis", "mis", "seq_tis", "seq_mis"):
        raise ValueError(f"sampler correction {kind!r}: must be one of tis, mis, seq_tis, seq_mis")
    log_weight = torch.where(mask.bool(), old_logps.float() - sampler_logps.float(), 0.0).detach()
    if kind.startswith("seq_"):
        log_weight = log_weight.sum(-1, keepdim=True).expand(mask.shape)
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind.endswith("tis"):
        return weight.clamp(max=cap)
    return torch.where((weight >= 1 / cap) & (weight <= cap), weight, 0.0)


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token estimate of KL(pi || ref) from tokens sampled from pi.

    With d = logps - ref_logps: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. k1 and k3 are unbiased
    as *values*. As a *loss* term, in expectation over on-policy tokens, k1 has gradient 0, k2 that
    of KL(pi || ref), and k3 that of KL(ref || pi). Multiplied by the differentiable token ratio, k3
    has the gradient of KL(pi || ref), also for tokens of an older policy.

    Args:
        logps: [B, C] fp32, log-probabilities under pi.
        ref_logps: [B, C] fp32, under the reference.
        kind: "k1", "k2" or "k3".

    Returns:
        [B, C] fp32, nats.

    Raises:
        ValueError: another kind.

    Source: arXiv 2402.03300, Eq. 4 is k3. d is clamped to +-20, so that value and gradient stay
    finite.
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

    The denominator is that of the whole minibatch, over all micro-batches and ranks, so that the
    shares add up to the same loss however the minibatch is split.

    Args:
        values: [B, C], one value per token.
        mask: [B, C], the tokens that count.
        mode: "seq_mean" (mean over each sequence first; denominator = sequences), "seq_sum" (sum over each sequence;
            denominator = sequences), "token_mean" (denominator = tokens) or "constant" (denominator = sequences x a
            fixed length, as in Dr. GRPO).
        denominator: see `mode`.

    Returns:
        0-d fp32.

    Raises:
        ValueError: another mode.
    """
    if mode == "seq_mean":
        return masked_mean(values, mask).sum() / denominator
    if mode in ("token_mean", "constant", "seq_sum"):
        return torch.where(mask.bool(), values.float(), 0.0).sum() / denominator
    raise ValueError(f"aggregation mode {mode!r}: must be one of seq_mean, seq_sum, token_mean, constant")


def weights(mask: torch.Tensor, mode: str, denominator: float) -> torch.Tensor:
    """Weight of every token in `aggregate`, for losses that need it in advance.

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


def align(advantages: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """Advantages [B] as [B, 1] where ratios are those of tokens, [B, C]."""
    return advantages[:, None] if advantages.dim() < ratio.dim() else advantages
