"""Advantages within groups of completions of the same prompt.

Dims: P prompts, G completions per prompt.
"""

import torch


def group_advantages(rewards: torch.Tensor, scale: str, eps: float = 1e-4) -> torch.Tensor:
    """Rewards relative to the mean of their group.

    Args:
        rewards: [P, G], one row per prompt; NaN (or infinity) = unscored.
        scale: divisor of the centred rewards: "group" (std of the group, as in the papers), "batch"
            (std of all centred rewards, without groups of equal rewards) or "none". Standard
            deviations have ddof 1.
        eps: added to the standard deviation.

    Returns:
        [P, G] fp32. Exactly 0 in groups whose scored rewards are all equal, and for unscored
        completions.

    Raises:
        ValueError: `rewards` is not [P, G], or another scale.

    Source: arXiv 2507.18071, Eq. 6 (and arXiv 2402.03300, section 4.1); "none" is arXiv 2503.20783; "batch" follows
    arXiv 2510.13786. The papers do not state ddof and eps.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards of shape {list(rewards.shape)}: must be [prompts, completions per prompt]")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"advantage scale {scale!r}: must be one of group, batch, none")
    rewards = rewards.double()  # in fp32, the square of 1e20 is infinite, and a mean near 1e6 is off by 0.06
    scored = rewards.isfinite()
    count = scored.sum(-1, keepdim=True)
    filled = torch.where(scored, rewards, 0.0)
    centred = torch.where(scored, filled - filled.sum(-1, keepdim=True) / count.clamp(min=1), 0.0)

    # equal rewards differ from their mean by a rounding error, which the standard deviation would
    # scale to 1
    varied = scored & ~equal_groups(rewards)[:, None]
    centred = torch.where(varied, centred, 0.0)
    if scale == "none":
        return centred.float()
    if scale == "group":
        std = (centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    else:
        std = (centred.square().sum() / (varied.sum() - 1).clamp(min=1)).sqrt()
    return torch.where(varied, centred / (std + eps), 0.0).float()


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
