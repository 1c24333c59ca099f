"""Advantages within groups of completions of the same prompt.

Dims: P prompts, G completions per prompt.
"""

import torch

SCALES = ("group", "batch", "none", "rloo", "maxrl", "lite_ppo", "reinforce_pp")


def group_advantages(rewards: torch.Tensor, scale: str, eps: float = 1e-4) -> torch.Tensor:
    """Rewards relative to the mean of their group, scaled.

    With n scored rewards in a group, r their mean and c = reward - r:

    - "group": c / (std of the group). arXiv 2507.18071, Eq. 6; arXiv 2402.03300, section 4.1.
    - "batch": c / (std of all c, without groups of equal rewards). arXiv 2510.13786.
    - "lite_ppo": c / (std of all rewards, as they are). arXiv 2508.08221.
    - "none": c. arXiv 2503.20783.
    - "rloo": c n / (n - 1), the reward less the mean of the others. arXiv 2402.14740.
    - "maxrl": c / r, for rewards of at least 0; 0 where r = 0. arXiv 2602.02710.
    - "reinforce_pp": the reward less the mean of *all* rewards; `normalise_tokens` scales it. arXiv 2501.03262.

    Args:
        rewards: [P, G], one row per prompt; NaN (or infinity) = unscored.
        scale: one of these.
        eps: added to a standard deviation. These have ddof 1; the papers do not state ddof and eps.

    Returns:
        [P, G] fp32. Exactly 0 for unscored completions, and in groups whose scored rewards are all equal, but with
        "reinforce_pp".

    Raises:
        ValueError: `rewards` is not [P, G]; another scale; a negative reward with "maxrl".
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards of shape {list(rewards.shape)}: must be [prompts, completions per prompt]")
    if scale not in SCALES:
        raise ValueError(f"advantage scale {scale!r}: must be one of {', '.join(SCALES)}")
    rewards = rewards.double()  # in fp32, the square of 1e20 is infinite, and a mean near 1e6 is off by 0.06
    scored = rewards.isfinite()
    count = scored.sum(-1, keepdim=True)
    filled = torch.where(scored, rewards, 0.0)
    mean = filled.sum(-1, keepdim=True) / count.clamp(min=1)
    if scale == "reinforce_pp":
        return torch.where(scored, filled - filled.sum() / scored.sum().clamp(min=1), 0.0).float()

    # equal rewards differ from their mean by a rounding error, which the standard deviation would
    # scale to 1
    varied = scored & ~equal_groups(rewards)[:, None]
    centred = torch.where(varied, filled - mean, 0.0)
    if scale == "none":
        return centred.float()
    if scale == "rloo":
        return (centred * count / (count - 1).clamp(min=1)).float()
    if scale == "maxrl":
        if (filled < 0).any():
            raise ValueError(
                f"reward {filled.min().item():.4g}: must be at least 0, because advantages of the kind 'maxrl' are "
                "divided by the mean reward of a group; shift the rewards, or take 'group'"
            )
        return torch.where(varied, centred / mean, 0.0).float()
    if scale == "group":
        std = (centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    elif scale == "batch":
        std = (centred.square().sum() / (varied.sum() - 1).clamp(min=1)).sqrt()
    else:
        std = rewards[scored].std() if scored.sum() > 1 else torch.zeros(())
    return torch.where(varied, centred / (std + eps), 0.0).float()


def decoupled_advantages(rewards: torch.Tensor, weights: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    """GDPO: every reward function is normalised within its groups, before they are added up.

    Normalising the sum instead gives rollouts the same advantage that have different rewards, and lets a function with
    a large spread drown the others.

    Args:
        rewards: [F, P, G], of F reward functions; NaN where a function does not apply, or a completion is unscored.
        weights: [F], of the functions.
        eps: added to each standard deviation.

    Returns:
        [P, G] fp32: the weighted sum, divided by its standard deviation over the batch. The paper also subtracts its
        mean, which is 0 by construction.

    Source: arXiv 2601.05242.
    """
    by_function = torch.stack([group_advantages(part, "group", eps) for part in rewards]).double()
    total = (weights.double()[:, None, None] * by_function).sum(0)
    counted = rewards.isfinite().any(0)
    std = (total.square().sum() / (counted.sum() - 1).clamp(min=1)).sqrt()
    return torch.where(total != 0, total / (std + eps), 0.0).float()


def token_returns(advantages: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """KL inside the reward: every token is charged for the KL of itself and of all tokens after it.

    Args:
        advantages: [B] fp32, of the completions.
        kl: [B, C] fp32, log pi - log ref of the sampled tokens (k1).
        mask: [B, C], completion tokens.
        kl_coef: weight of the KL.

    Returns:
        [B, C] fp32: A - kl_coef x (sum of the KL from this token on); 0 where masked.

    Source: arXiv 2501.03262 (REINFORCE++).
    """
    kl = torch.where(mask.bool(), kl.float(), 0.0)
    ahead = kl.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask.bool(), advantages[:, None] - kl_coef * ahead, 0.0)


def equal_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Groups without a learning signal, because all of their scored rewards are equal.

    Args:
        rewards: [P, G]; NaN (or infinity) = unscored.

    Returns:
        [P] bool, also true for groups with at most one scored reward.
    """
    scored = rewards.isfinite()
    highest = torch.where(scored, rewards, -torch.inf).amax(-1)
    return highest <= torch.where(scored, rewards, torch.inf).amin(-1)
