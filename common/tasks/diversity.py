"""Rules by which repetition costs reward or advantage: each method of grpo/similarity_grpo.py is one function here.

All are functions of tensors, and permuting the responses to a prompt only permutes the result. Rules for rewards leave
unscored responses (NaN) unscored, and a response is never worth more for repeating others, right or wrong.

Dims: P prompts, G completions per prompt, n completions of one prompt.
"""

import math

import torch

from common.maths.advantages import equal_groups, group_advantages

LEAST_DIVERSITY = 0.1  # that a reward is multiplied by, as in the code of DARLING: 0 would make right answers wrong


def group_rewards(rewards: torch.Tensor, labels: torch.Tensor, alpha: float) -> torch.Tensor:
    """Divides positive rewards by a power of the size of their cluster.

    Args:
        rewards: [n] or [P, G]; NaN = unscored.
        labels: same shape; -1 for rows that are in no cluster.
        alpha: r becomes r x size^-alpha, where size counts the cluster's members with a positive reward; 0 changes
            nothing.

    Returns:
        Same shape and dtype; rewards that are not positive are unchanged, NaN included.

    Source: none; similar to arXiv 2509.02534 (DARLING) and arXiv 2601.08763 (UARL).
    """
    positive = rewards > 0
    return torch.where(positive, rewards * cluster_sizes(labels, positive).to(rewards.dtype).pow(-alpha), rewards)


def darling(rewards: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Multiplies positive rewards by the share of the other responses that are in another cluster.

    Args:
        rewards: [P, G]; NaN = unscored.
        labels: [P, G] of all scored responses, right or wrong; -1 for those that are in no cluster.

    Returns:
        [P, G]: r x max(0.1, (n - size) / (n - 1)) for n scored responses in a group and size of them
        in the cluster; unchanged if n = 1. Other rewards are unchanged, or repetition would improve
        negative ones.

    Source: arXiv 2509.02534 (DARLING), Eqs. 4 to 6, from a summary, and the authors' code, which has
    the floor of 0.1 and this divisor as the only normalisation. Their classes come from a trained
    classifier joined by union-find, ours from clusters of embeddings; their advantages are not
    divided by a standard deviation.
    """
    scored = rewards.isfinite()
    count = scored.sum(-1, keepdim=True)
    others = (count - cluster_sizes(labels, scored)).to(rewards.dtype)
    diversity = torch.where(count > 1, others / (count - 1).clamp(min=1), 1.0).clamp(min=LEAST_DIVERSITY)
    return torch.where((rewards > 0) & scored, rewards * diversity, rewards)


def dra(rewards: torch.Tensor, cosines: torch.Tensor) -> torch.Tensor:
    """Divides positive rewards by the redundancy of the response in its group.

    Args:
        rewards: [P, G]; NaN = unscored.
        cosines: [P, G, G], see `cosines`; negative ones count as 0.

    Returns:
        [P, G]: r_i / (1 + sum of the cosines with the others). Other rewards are unchanged, or
        repetition would improve negative ones.

    Source: arXiv 2505.09655 (DRA-GRPO). Its code sums the cosines over the batch of a device, not
    over the group.
    """
    others = cosines.clamp(min=0) * (1 - torch.eye(cosines.shape[-1]))
    return torch.where(rewards > 0, rewards / (1 + others.sum(-1)), rewards)


def mmr(rewards: torch.Tensor, cosines: torch.Tensor, weight: float = 0.0) -> torch.Tensor:
    """Ranks the responses to a prompt greedily, and takes off each reward the similarity to those ranked before.

    Args:
        rewards: [P, G]; NaN = unscored, and neither ranked nor compared with.
        cosines: [P, G, G], see `similarity.cosines`; negative ones count as 0.
        weight: lambda, of the reward against the similarity; 1 changes nothing. 0: for each group
            sigmoid(std of its rewards), at least 0.5.

    Returns:
        [P, G]: the highest reward r of a group stays as it is; then, one by one, the response with
        the highest lambda r - (1 - lambda) max(cosine to one ranked before) is ranked and gets that
        value, right or wrong.

    Source: arXiv 2601.09085 (MMR-GRPO), Eqs. 3 and 4 and Algorithm 1. Its code ranks all prompts of a
    batch together, and has the floor of 0 and the std with ddof 0. The paper does not order equal
    scores: here the response whose nearest others are farther comes first, and responses that
    nothing tells apart, such as equal texts, share the mean of their values. If the highest reward
    is negative it is multiplied by lambda too, or it would be the lowest.
    """
    shaped = rewards.clone()
    for values, alike, out in zip(rewards, cosines.clamp(min=0), shaped, strict=True):
        scored = values.isfinite()
        if scored.any():
            ranked = _mmr_of_group(values[scored].tolist(), alike[scored][:, scored].tolist(), weight)
            out[scored] = torch.tensor(ranked, dtype=torch.float64).to(rewards)
    return shaped


def unlikeliness(rewards: torch.Tensor, logps: torch.Tensor, beta: float) -> torch.Tensor:
    """Lowers positive rewards, the more so the likelier the response is among those to its prompt.

    Args:
        rewards: [P, G]; NaN = unscored.
        logps: [P, G] log-probabilities of whole responses under the policy that sampled them, nats.
        beta: the likeliest of n scored responses loses this share of its reward, the others
            proportionally less, down to beta / n; 0 changes nothing.

    Returns:
        [P, G]: r (1 - beta (n - rank) / n), where rank counts the scored responses, right or wrong,
        that are likelier, and half of those that are equally likely. Other rewards are unchanged.

    Source: arXiv 2506.02355 (unlikeliness reward), from a summary: 0 and 1 as rewards, beta 0.25. The
    authors' code ranks by the mean over tokens, and leaves the rarest response its whole reward.
    """
    scored = rewards.isfinite()
    count = scored.sum(-1, keepdim=True).clamp(min=1)
    theirs, own = logps[..., None, :], logps[..., :, None]
    likelier = ((theirs > own) & scored[..., None, :]).sum(-1)
    equal = ((theirs == own) & scored[..., None, :]).sum(-1) - 1  # without the response itself
    factor = 1 - beta * (count - likelier - equal / 2) / count
    return torch.where((rewards > 0) & scored, rewards * factor.to(rewards.dtype), rewards)


def reweight(advantages: torch.Tensor, labels: torch.Tensor, alpha: float) -> torch.Tensor:
    """Shifts positive advantages from large clusters to small ones; their sum in each row is kept.

    Args:
        advantages: [P, G] fp32.
        labels: [P, G]; -1 for rows that are in no cluster.
        alpha: A becomes Z x size^-alpha x A, where size counts the cluster's members with a positive advantage, and Z
            keeps the sum; 0 changes nothing.

    Returns:
        [P, G] fp32; advantages that are not positive are unchanged.

    Source: arXiv 2608.03467 (Cue-GRPO), not checked against the paper.
    """
    positive = advantages > 0
    kept = torch.where(positive, advantages, 0.0)
    weighted = kept * cluster_sizes(labels, positive).to(kept.dtype).pow(-alpha)
    z = kept.sum(-1, keepdim=True) / weighted.sum(-1, keepdim=True)  # NaN, but unused, in rows without positive ones
    return torch.where(positive, z * weighted, advantages)


def uarl(advantages: torch.Tensor, labels: torch.Tensor, alpha: float) -> torch.Tensor:
    """Divides all advantages, positive or not, by a power of the size of their cluster.

    Args:
        advantages: [P, G] fp32.
        labels: [P, G] of all scored responses, right or wrong; -1 for those that are in no cluster.
        alpha: A becomes size^-alpha x A; 0 changes nothing.

    Returns:
        [P, G] fp32. The sum of a row is not kept, and repeating a wrong answer weakens what each of
        the repetitions is penalised by: `reweight` and rules for rewards do not do that.

    Source: arXiv 2601.08763 (UARL), Eqs. 1 to 6, from a summary; alpha is between 0 and 1 there. A
    language model judges which strategies are the same; here embeddings do.
    """
    return advantages * cluster_sizes(labels, advantages.isfinite()).to(advantages.dtype).pow(-alpha)


def within(rewards: torch.Tensor, labels: torch.Tensor, kappa: float, singletons: str) -> torch.Tensor:
    """Advantages within the cluster of a response, shrunk towards those within its group.

    Args:
        rewards: [P, G]; NaN = unscored.
        labels: [P, G]; -1 for rows that are in no cluster, which get the advantage within the
            group.
        kappa: the advantage within a cluster of m scored members has weight m / (m + kappa); inf is
            plain GRPO.
        singletons: advantage within a cluster of one scored member: "zero", or "group" (plain
            GRPO).

    Returns:
        [P, G] fp32; 0 for unscored completions.

    Raises:
        ValueError: another value of `singletons`, or kappa below 0.

    Source: none. Both advantages come from `common.maths.advantages.group_advantages`.
    """
    if singletons not in ("zero", "group") or not kappa >= 0:
        raise ValueError(f"kappa = {kappa}, singletons = {singletons!r}: must be at least 0, and one of zero, group")
    plain = group_advantages(rewards, "group")
    scored = rewards.isfinite()
    sizes = cluster_sizes(labels, scored).to(plain.dtype)
    inside = plain.clone()
    for label in labels[labels >= 0].unique():
        member = scored & (labels == label)
        inside = torch.where(member, group_advantages(torch.where(member, rewards, torch.nan), "group"), inside)
    if singletons == "group":
        inside = torch.where(sizes == 1, plain, inside)
    return torch.lerp(plain, inside, sizes / (sizes + kappa))


def balanced(rewards: torch.Tensor, labels: torch.Tensor, alpha: float, eps: float = 1e-4) -> torch.Tensor:
    """Advantages for which every cluster of a group counts as one response, however large it is.

    Args:
        rewards: [P, G]; NaN = unscored.
        labels: [P, G] of all scored responses, right or wrong; -1 for those that are in no cluster.
        alpha: responses have weight size^-alpha in mean and standard deviation of their group, and
            their advantage is multiplied by it. 1: clusters count equally; 0: plain GRPO.
        eps: added to the standard deviation, as in `group_advantages`.

    Returns:
        [P, G] fp32, with sum 0 in each row; 0 for unscored completions, and where all rewards of a
        group are equal. As with `uarl`, each repetition of a wrong answer is penalised less; the
        cluster as a whole is penalised as one response.

    Source: none. The standard deviation has ddof 1 in responses, so that a single cluster has one.
    """
    values = rewards.double()
    scored = values.isfinite()
    count = scored.sum(-1, keepdim=True)
    weights = torch.where(scored, cluster_sizes(labels, scored).double().pow(-alpha), 0.0)
    shares = weights * (count / weights.sum(-1, keepdim=True).clamp(min=1e-300))  # 1 on average
    filled = torch.where(scored, values, 0.0)
    mean = (shares * filled).sum(-1, keepdim=True) / count.clamp(min=1)
    varied = scored & ~equal_groups(values)[:, None]
    centred = torch.where(varied, filled - mean, 0.0)
    std = ((shares * centred.square()).sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(varied, weights * (centred / (std + eps)), 0.0).float()


def cluster_sizes(labels: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Number of counted responses in the cluster of each response, at least 1.

    Args:
        labels: [n] or [P, G]; -1 for responses in no cluster, which count as alone.
        counted: same shape, bool.

    Returns:
        Same shape, int64.

    Raises:
        ValueError: the shapes differ.
    """
    if labels.shape != counted.shape:
        raise ValueError(f"labels of shape {list(labels.shape)} for {list(counted.shape)} responses: one label each")
    same = (labels[..., :, None] == labels[..., None, :]) & (labels >= 0)[..., None, :]
    return (same & counted[..., None, :]).sum(-1).clamp(min=1)


def _mmr_of_group(rewards: list[float], alike: list[list[float]], weight: float) -> list[float]:
    """`mmr` of the n scored responses to one prompt; `alike` are their cosines, at least 0."""
    n = len(rewards)
    mean = math.fsum(rewards) / n
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / n)
    share = weight or 1 / (1 + math.exp(-std))
    # what a response is, whatever its place: its reward, then its likeness to the others, nearest first
    keys = [
        (-rewards[i], sorted(((alike[i][j], rewards[j]) for j in range(n) if j != i), reverse=True)) for i in range(n)
    ]
    left = sorted(range(n), key=keys.__getitem__)
    latest, nearest = left.pop(0), [0.0] * n
    values = [max(r, share * r) for r in rewards]  # final for the first one only
    while left:
        nearest = [max(near, alike[i][latest]) for i, near in enumerate(nearest)]
        score = {i: share * rewards[i] - (1 - share) * nearest[i] for i in left}
        latest = max(left, key=score.__getitem__)  # the first of several
        values[latest] = score[latest]
        left.remove(latest)
    same = [[j for j in range(n) if keys[j] == keys[i]] for i in range(n)]
    # without these, the first of two equal texts would be better than the second
    return [math.fsum(values[j] for j in twins) / len(twins) if len(twins) > 1 else values[twins[0]] for twins in same]
