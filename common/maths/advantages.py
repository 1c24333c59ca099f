"""Advantages of groups of completions that answer the same prompt.

Dims: P prompts, G completions per prompt.
"""

import torch


def group_advantages(rewards: torch.Tensor, scale: str, eps: float = 1e-4) -> torch.Tensor:
    """Rewards relative to the mean of their own group.

    Args:
        rewards: [P, G], row p holds the rewards of prompt p; NaN (or infinity) marks a completion that was not scored.
        scale: what the centred rewards are divided by: "group" (std of the group, as in the papers), "batch" (std of
            all centred rewards, groups with equal rewards left out) or "none". Standard deviations have ddof 1.
        eps: added to the standard deviation.

    Returns:
        [P, G] fp32. Exactly 0 where a group's scored rewards are all equal, and for unscored completions.

    Raises:
        ValueError: `rewards` is not [P, G], or another scale.

    Source: arXiv 2507.18071, Eq. 6 (and arXiv 2402.03300, section 4.1); "none" is arXiv 2503.20783; "batch" follows
    arXiv 2510.13786. The papers do not state ddof and eps.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards of shape {list(rewards.shape)}: must be [prompts, completions per prompt]")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"advantage scale {scale!r}: must be one of group, batch, none")
    rewards = rewards.double()  # in fp32 the square of 1e20 is infinite, and a mean near 1e6 is off by 0.06
    scored = rewards.isfinite()
    count = scored.sum(-1, keepdim=True)
    filled = torch.where(scored, rewards, 0.0)
    centred = torch.where(scored, filled - filled.sum(-1, keepdim=True) / count.clamp(min=1), 0.0)

    # a mean of equal numbers is off by a rounding error, and dividing that by its own standard deviation would make an
    # advantage of 1 out of nothing
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
    """Which groups teach nothing, because all of their scored rewards are equal.

    Args:
        rewards: [P, G], NaN (or infinity) marks a completion that was not scored.

    Returns:
        [P] bool, also true for a group with one scored reward or none; compared, not computed from a spread.
    """
    scored = rewards.isfinite()
    highest = torch.where(scored, rewards, -torch.inf).amax(-1)
    return highest <= torch.where(scored, rewards, torch.inf).amin(-1)
