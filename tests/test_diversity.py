"""Tests of common/tasks/diversity.py: each rule by hand, and what all of them promise.

The four oldest rules are tested in test_similarity.py.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from bounds import assert_rounded
from conftest import SCRIPTS, load_script

from common.loop import similar
from common.maths import losses
from common.maths.advantages import group_advantages
from common.tasks import diversity, similarity
from common.tasks.diversity import balanced, darling, mmr, uarl, unlikeliness

NAN, INF = math.nan, math.inf
script = load_script(SCRIPTS["similarity_grpo"])
METHODS = ("discount", "advantage", "dra", "within", "darling", "uarl", "balanced", "mmr", "unlikeliness")
NEUTRAL = {  # options that make a method plain GRPO
    "discount": dict(similarity_alpha=0.0), "advantage": dict(similarity_alpha=0.0),
    "within": dict(similarity_kappa=INF), "uarl": dict(similarity_alpha=0.0), "balanced": dict(similarity_alpha=0.0),
    "mmr": dict(similarity_lambda=1.0), "unlikeliness": dict(similarity_rarity=0.0),
    "darling": dict(similarity_threshold="1.01"),  # every response is a cluster
}  # fmt: skip


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def row(*values, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def labels_of(*values) -> torch.Tensor:
    return row(*values, dtype=torch.int64)


def alike(n: int, pairs: dict[tuple[int, int], float]) -> torch.Tensor:
    """[1, n, n] cosines, 0 but for these pairs."""
    found = torch.eye(n)
    for (i, j), value in pairs.items():
        found[i, j] = found[j, i] = value
    return found[None]


def found_of(method: str, rewards: torch.Tensor, vectors: torch.Tensor, logps: torch.Tensor, **options):
    """Advantages as the script computes them."""
    cfg = script.Config(similarity_method=method, **{"similarity_threshold": "0.5", **options})
    if method == "unlikeliness":
        clusters = similar.Likeness(rewards, logps=logps)
    else:
        threshold = similarity.Threshold(cfg.similarity_threshold)
        clusters = similar.cluster(cfg, rewards, vectors, threshold)
    return script.similarity_advantages(*clusters, cfg), cfg


def batch(seed: int = 0, prompts: int = 12, group: int = 8) -> tuple[torch.Tensor, ...]:
    """Rewards from -1 to 1 with some unscored, vectors of which some are equal, and log-probabilities."""
    generator = seeded(seed)
    rewards = torch.randint(-2, 3, (prompts, group), generator=generator) / 2
    rewards[0], rewards[1], rewards[2, 1:] = 1.0, -1.0, 0.0  # all right, all wrong, one positive
    rewards[2, 0], rewards[3, :3], rewards[4, 1:] = 1.0, NAN, NAN
    vectors = torch.randint(-1, 2, (prompts, group, 3), generator=generator).float()
    return rewards, vectors, torch.randint(-9, 0, (prompts, group), generator=generator).double()


@pytest.mark.parametrize(("beta", "expected"), [
    # of the five scored, none is likelier than the first, 2.5 (two, and half of an equal one) than the second and last
    (0.25, (0.75, 0.875, 0, -1, NAN, 1.75)), (1.0, (0, 0.5, 0, -1, NAN, 1.0)), (0.0, (1, 1, 0, -1, NAN, 2)),
])  # fmt: skip
def test_unlikeliness_by_hand(beta, expected):
    rewards, logps = row(1, 1, 0, -1, NAN, 2), row(-1, -3, -2, -5, -0.5, -3)
    torch.testing.assert_close(unlikeliness(rewards, logps, beta), row(*expected), equal_nan=True)
    # the rarest of four still loses a quarter of beta
    torch.testing.assert_close(unlikeliness(row(0, 0, 0, 1), row(-1, -2, -3, -4), 0.4), row(0, 0, 0, 0.9))


@pytest.mark.parametrize(("rewards", "labels", "expected"), [
    # of five that are scored, four are others, two of them in another cluster; then all four
    ((1, 0, 3, 1, -1, NAN), (0, 0, 0, 1, 2, -1), (0.5, 0, 1.5, 1, -1, NAN)),
    ((1, 2, 1, 0), (0, 0, 0, 0), (0.1, 0.2, 0.1, 0)),  # the floor
    ((1,) * 16, (0,) * 15 + (1,), (0.1,) * 15 + (1.0,)),  # 1 / 15 is below it
    ((2, NAN, NAN), (0, -1, -1), (2, NAN, NAN)), ((1, 1, 1), (0, 1, 2), (1, 1, 1)),
])  # fmt: skip
def test_darling_by_hand(rewards, labels, expected):
    found = darling(row(*rewards), labels_of(*labels))
    torch.testing.assert_close(found, row(*expected), equal_nan=True)


def test_uarl_by_hand():
    advantages, labels = row(1, -1, 2, -3, 0), labels_of(0, 0, 0, 1, -1)
    torch.testing.assert_close(uarl(advantages, labels, 0.5), row(3**-0.5, -(3**-0.5), 2 * 3**-0.5, -3, 0))
    torch.testing.assert_close(uarl(advantages, labels, 1.0), row(1 / 3, -1 / 3, 2 / 3, -3, 0))


def test_balanced_by_hand():
    # clusters count 1, their means are 1, 0 and 0. In responses: shares 2/3 2/3 4/3 4/3, squares 4/9 4/9 1/9 1/9
    rewards, labels, std = row(1, 1, 0, 0), labels_of(0, 0, 1, 2), math.sqrt(8 / 27)
    expected = row(1 / 3, 1 / 3, -1 / 3, -1 / 3) / (std + 1e-4)
    torch.testing.assert_close(balanced(rewards, labels, 1.0), expected)
    # one cluster of right and wrong answers, and an unscored one: plain, a third each
    rewards, labels = row(1, 0, 0, NAN), labels_of(0, 0, 0, -1)
    torch.testing.assert_close(balanced(rewards, labels, 1.0), group_advantages(rewards, "group") / 3)
    # halfway: weights 1 / sqrt(2), so the mean of 1 1 0 is sqrt(2) / (sqrt(2) + 1)
    found, mean = balanced(row(1, 1, 0), labels_of(0, 0, 1), 0.5), 2**0.5 / (2**0.5 + 1)
    torch.testing.assert_close(found[0, 0] / found[0, 2], torch.tensor(-(2**-0.5) * (1 - mean) / mean))


def test_mmr_by_hand():
    cosines = alike(5, {(0, 1): 0.9, (0, 2): 0.3, (0, 3): -0.4, (1, 2): 0.1, (1, 3): 0.5, (2, 3): 0.6,
                        **{(i, 4): 1.0 for i in range(4)}})  # fmt: skip
    # ranked 0, then 1 (0.56 - 0.27), 2 (0.35 - 0.09) and 3 (-0.35 - 0.18, for it is closest to 2); 4 is unscored
    found = mmr(row(1, 0.8, 0.5, -0.5, NAN), cosines, 0.7)
    torch.testing.assert_close(found, row(1, 0.29, 0.26, -0.53, NAN), equal_nan=True)
    share = 1 / (1 + math.exp(-0.5))  # the std of 1 and 0
    torch.testing.assert_close(mmr(row(1, 0), alike(2, {(0, 1): 0.4})), row(1, -0.4 * (1 - share)))
    # prompts are ranked apart
    both = mmr(torch.cat([row(1, 0), row(0, 5)]), alike(2, {(0, 1): 0.4}).repeat(2, 1, 1))
    torch.testing.assert_close(both[0], row(1, -0.4 * (1 - share))[0])
    # all right: that without a double comes first; the two equal texts get 0.5 - 0.25 and 0.5 - 0.5, shared
    pairs = {(0, 1): 1.0, (0, 2): 0.5, (1, 2): 0.5}
    torch.testing.assert_close(mmr(row(1, 1, 1), alike(3, pairs)), row(0.125, 0.125, 1.0))
    torch.testing.assert_close(mmr(row(-2, -2), alike(2, {}), 0.5), row(-1, -1))


@pytest.mark.parametrize("method", NEUTRAL)
def test_a_neutral_option_is_plain_grpo_bit_for_bit(method):
    rewards, vectors, logps = batch()
    for values in (rewards, torch.where(rewards.isnan(), rewards, torch.rand(12, 8, generator=seeded(1)))):
        found, cfg = found_of(method, values, vectors, logps, **NEUTRAL[method])
        assert torch.equal(found, group_advantages(values, cfg.scale))
        found, _ = found_of(method, values, vectors, logps)
        assert not torch.equal(found, group_advantages(values, cfg.scale))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_responses_may_stand_in_any_order(method, seed):
    rewards, vectors, logps = batch(seed)
    order = torch.randperm(8, generator=seeded(seed))
    found, _ = found_of(method, rewards, vectors, logps)
    permuted, _ = found_of(method, rewards[:, order], vectors[:, order], logps[:, order])
    # sums of 8 in another order, in fp64, then rounded; those of "advantage" are in fp32
    assert_rounded(permuted, found[:, order], terms=3 * 8 + 8)
    assert found.isfinite().all() and not found[rewards.isnan()].any()
    assert not found[4].any()  # of one scored response nothing is learned


def test_rewards_may_stand_in_any_order_bit_for_bit():
    for seed in range(20):
        rewards, vectors, logps = batch(seed)
        order = torch.randperm(8, generator=seeded(seed))
        labels, cosines = similarity.cluster_groups(vectors, rewards, 0.8, False), similarity.cosines(vectors)
        for found, permuted in (
            (mmr(rewards, cosines), mmr(rewards[:, order], cosines[:, order][:, :, order])),
            (darling(rewards, labels), darling(rewards[:, order], labels[:, order])),
            (unlikeliness(rewards, logps, 0.3), unlikeliness(rewards[:, order], logps[:, order], 0.3)),
        ):
            torch.testing.assert_close(permuted, found[:, order], rtol=0, atol=0, equal_nan=True)
            assert torch.equal(found.isnan(), rewards.isnan())


@pytest.mark.parametrize("reward", [-5.0, -1.0, -0.5, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("others", [(1.0, 0.0, -1.0), (-5.0, -5.0, -5.0), (1.0, 1.0, 1.0), (-0.5, 0.5, NAN)])
def test_a_response_is_never_worth_more_for_repeating_others(reward, others):
    """The last one is unlike all, then like the first, then like the first two."""
    rewards = row(*others, reward)
    for repeated in ((0,), (0, 1)):
        pairs = {(i, 3): 1.0 for i in repeated} | ({(0, 1): 1.0} if len(repeated) == 2 else {})
        one, same = alike(4, {pair: 1.0 for pair in pairs if 3 not in pair}), alike(4, pairs)
        labels = torch.where(rewards.isnan(), -1, labels_of(0, 0 if len(repeated) == 2 else 1, 2, 3))
        joined = torch.where(labels == 3, 0, labels)
        for rule in (
            lambda labels, cosines: mmr(rewards, cosines), lambda labels, cosines: mmr(rewards, cosines, 0.7),
            lambda labels, cosines: darling(rewards, labels), lambda labels, cosines: diversity.dra(rewards, cosines),
            lambda labels, cosines: diversity.group_rewards(rewards, labels, 0.5),
        ):  # fmt: skip
            assert rule(joined, same)[0, 3] <= rule(labels, one)[0, 3]
    assert reward > 0 or unlikeliness(rewards, row(-3, -2, -1, -4), 1.0)[0, 3] == reward


def test_where_all_are_right_the_rare_answer_gains_or_nothing_is_learned():
    rewards, logps = torch.ones(1, 4), row(-1, -1, -1, -4, dtype=torch.float64)
    vectors = torch.tensor([[[1.0, 0.0]] * 3 + [[0.0, 1.0]]])
    for method in METHODS:
        found, _ = found_of(method, rewards, vectors, logps)
        if method in ("advantage", "uarl", "balanced", "within"):
            assert not found.any()
        else:
            assert found[0, 3] > 0 > found[0, 0] == found[0, 1] == found[0, 2]


def gradients(found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the loss of GRPO in the log-probability of each cluster's text."""
    logps = torch.full((int(labels.max()) + 1,), -1.0, requires_grad=True)
    ratio = losses.token_ratio(logps[labels[0]][:, None], torch.full((labels.shape[1], 1), -1.0))
    (-losses.clipped_surrogate(ratio, found[0], 0.2, 0.28)).sum().backward()
    return logps.grad


def test_balanced_clusters_have_equal_gradients_whatever_their_size():
    rewards, labels = row(1, 1, 1, 0, 1), labels_of(0, 0, 0, 1, 2)
    plain = gradients(group_advantages(rewards, "group"), labels)
    assert_rounded(plain / plain[2], torch.tensor([3.0, -4.0, 1.0]), terms=32)  # 3 x 0.2, -0.8, 0.2
    one = gradients(balanced(rewards, labels, 1.0), labels)
    assert_rounded(one / one[2], torch.tensor([1.0, -2.0, 1.0]), terms=32)  # means 1 0 1, their mean 2/3
    assert one[2] < 0 < one[1]  # the loss falls with a right answer's log-probability


def test_darling_moves_towards_the_rarer_of_right_answers():
    labels = labels_of(0, 0, 0, 1)
    found = group_advantages(darling(torch.ones(1, 4), labels), "none")  # rewards 1/3 1/3 1/3 1, their mean 1/2
    assert_rounded(gradients(found, labels), torch.tensor([0.5, -0.5]), terms=16)
    assert not gradients(group_advantages(torch.ones(1, 4), "none"), labels).any()


def test_log_probabilities_are_those_of_all_sampled_tokens():
    logps = torch.tensor([[-1.0, -2.0, NAN], [-0.5, NAN, NAN], [-1.0, -1.0, -1.0], [NAN, NAN, NAN]])
    rollout = SimpleNamespace(rollout_logps=logps, lengths=torch.tensor([2, 1, 3, 0]))
    found = similar.sequence_logps(rollout, 2)
    assert found.dtype == torch.float64 and found.tolist() == [[-3.0, -0.5], [-3.0, 0.0]]


def test_labels_of_another_shape_are_refused():
    for rule in (darling, lambda rewards, labels: uarl(rewards, labels, 1.0), lambda r, labels: balanced(r, labels, 1)):
        with pytest.raises(ValueError, match=r"\[4\].*\[2, 4\].*one label each"):
            rule(torch.ones(2, 4), torch.zeros(4).long())
