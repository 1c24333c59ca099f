"""Tests of common/maths/advantages.py: hand-computed advantages, unscored completions, groups without any difference.

Advantages are computed in fp64 and rounded to fp32 once: where no bound is given, that of `assert_close` is far more.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from common.maths.advantages import decoupled_advantages, equal_groups, group_advantages, token_returns

NAN, INF = math.nan, math.inf
SCALES = ["group", "batch", "none", "rloo", "maxrl", "lite_ppo"]


def advantages_of(rows, scale="group", **kwargs) -> torch.Tensor:
    return group_advantages(torch.tensor(rows, dtype=torch.float32), scale, **kwargs)


@pytest.mark.parametrize(("rows", "scale", "eps", "expected"), [
    # mean 0.5, std with ddof 1 = sqrt(4 * 0.25 / 3)
    ([[1, 0, 0, 1]], "group", 1e-4, torch.tensor([[0.5, -0.5, -0.5, 0.5]]) / (math.sqrt(1 / 3) + 1e-4)),
    # centred: +-0.5 and +-1.5; std = sqrt((2 * 0.25 + 2 * 2.25) / 3)
    ([[1, 0], [3, 0]], "batch", 1e-4, torch.tensor([[0.5, -0.5], [1.5, -1.5]]) / (math.sqrt(5 / 3) + 1e-4)),
    ([[4, 0, 2, 2], [1, 1, 1, 5]], "none", 1e-4, torch.tensor([[2.0, -2.0, 0.0, 0.0], [-1.0, -1.0, -1.0, 3.0]])),
    # ddof 1: 0.5 / sqrt(0.5); the population form would give 1
    ([[1, 0]], "group", 0.0, torch.tensor([[0.5, -0.5]]) / math.sqrt(0.5)),
    ([[1, 0]], "batch", 1.0, torch.tensor([[0.5, -0.5]]) / (math.sqrt(0.5) + 1)),
    # a group without variance is left out: with it in, the std of the batch would be 0.408
    ([[1, 0], [1, 1]], "batch", 0.0, torch.tensor([[0.5, -0.5], [0.0, 0.0]]) / math.sqrt(0.5)),
    # the reward less the mean of the three others: 4 - 4/3, 0 - 8/3, 2 - 2
    ([[4, 0, 2, 2]], "rloo", 1e-4, torch.tensor([[8 / 3, -8 / 3, 0.0, 0.0]])),
    # means 1/4 and 2: what is rare counts more
    ([[1, 0, 0, 0], [4, 0, 2, 2]], "maxrl", 1e-4, torch.tensor([[3.0, -1.0, -1.0, -1.0], [1.0, -1.0, 0.0, 0.0]])),
    # std of 1, 0, 1, 1 with ddof 1, that of the rewards as they are, the equal group included
    ([[1, 0], [1, 1]], "lite_ppo", 0.0, torch.tensor([[0.5, -0.5], [0.0, 0.0]]) / 0.5),
    # less the mean of all rewards, 0.75; an equal group has an advantage, too
    ([[1, 0], [1, 1]], "reinforce_pp", 1e-4, torch.tensor([[0.25, -0.75], [0.25, 0.25]])),
])  # fmt: skip
def test_advantages_by_hand(rows, scale, eps, expected):
    assert_close(advantages_of(rows, scale, eps=eps), expected)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -2.6, 1e4, 1e-8])
def test_equal_rewards_give_exactly_zero(reward, scale):
    reward = abs(reward) if scale == "maxrl" else reward
    for group in (1, 2, 3, 7, 8, 64):  # also of one, and where other groups have other rewards
        rewards = torch.tensor([reward, 10.0, reward])[:, None].expand(3, group)
        for eps in (1e-4, 0.0):
            assert torch.equal(group_advantages(rewards, scale, eps), torch.zeros(3, group))


def test_one_outlier_is_bounded_by_the_root_of_the_group_size():
    # mean 0.275; deviations 0.075 and -0.525; std = sqrt((7 * 0.075^2 + 0.525^2) / 7) = 0.075 sqrt(8)
    result = advantages_of([[0.35] * 7 + [-0.25]])
    assert result.abs().max() <= math.sqrt(8)
    assert_close(result, torch.tensor([[0.075] * 7 + [-0.525]]) / (0.075 * math.sqrt(8) + 1e-4))


def test_no_advantage_exceeds_the_root_of_the_group_size():
    # rewards that differ by rounding errors only, on top of a large common part
    rewards = 0.35 + 1e-7 * torch.randint(0, 2, (160, 8), generator=torch.Generator().manual_seed(0))
    assert group_advantages(rewards, "group").abs().max() <= math.sqrt(8)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("others", [[100, -100, 3, 7], [1, NAN, 0, 1], [1, INF, 0, 1], [NAN] * 4], ids=str)
def test_groups_do_not_influence_each_other(others, scale):
    together = advantages_of([[1, 0, 0, 2], others], scale)
    assert torch.equal(together[:1], advantages_of([[1, 0, 0, 2]], scale))  # the same operations


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_an_unscored_completion_is_left_out(bad, scale):
    with_gap = advantages_of([[1, bad, 0, 1], [2, 0, 1, bad]], scale)
    assert with_gap[0, 1] == 0.0 and with_gap[1, 3] == 0.0
    without = torch.cat([with_gap[:1, [0, 2, 3]], with_gap[1:, :3]])
    assert_close(without, advantages_of([[1, 0, 1], [2, 0, 1]], scale))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [NAN, 3.0, NAN], [NAN, 0.1, 0.1]], ids=str)
def test_a_group_with_nothing_to_compare_gets_zeros(row, scale):
    result = advantages_of([row, [1, 0, 0]], scale)
    assert torch.equal(result[0], torch.zeros(3))
    if scale != "lite_ppo":  # there it counts in the standard deviation, as every reward does
        assert_close(result[1], advantages_of([[1, 0, 0]], scale)[0])


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("unit", [1e30, 3e38, 1.0])
def test_rewards_of_any_size_are_compared(unit, scale):
    # mean 0.75 units, deviations 0.25 and -0.75, std 0.5: the squares of the first two are beyond fp32
    assert_close(advantages_of([[unit, unit, unit, 0.0]], scale, eps=0.0), torch.tensor([[0.5, 0.5, 0.5, -1.5]]))


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale != "maxrl"])  # which divides by it
def test_a_large_common_part_does_not_tilt_the_advantages(scale):
    # 1e6 + n / 16 is exact in fp32, but the sum of eight is rounded to a multiple of 0.5
    rewards = torch.tensor([[0.0, 2, 3, 5, 6, 8, 10, 11]]) / 16
    result = group_advantages(1e6 + rewards, scale)
    assert_close(result, group_advantages(rewards, scale))
    assert_close(result.sum(1), torch.zeros(1))  # of eight numbers of size 1
    if scale not in ("none", "rloo"):  # nor does their unit
        unit = group_advantages(64 * rewards, scale, eps=0.0)
        assert_close(unit, group_advantages(rewards, scale, eps=0.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_advantages_are_fp32_and_rewards_are_not_changed(dtype):
    rewards = torch.tensor([[1, 0]], dtype=dtype)
    assert torch.equal(group_advantages(rewards, "group"), advantages_of([[1, 0]]))
    assert group_advantages(rewards, "group").dtype == torch.float32 and rewards.tolist() == [[1, 0]]


@pytest.mark.parametrize(("shape", "scale", "wrong"), [
    ((8,), "group", r"\[8\].*prompts, completions per prompt"), ((1, 2), "std", "'std'.*group, batch, none"),
])  # fmt: skip
def test_a_flat_list_of_rewards_or_an_unknown_scale_is_refused(shape, scale, wrong):
    with pytest.raises(ValueError, match=wrong):
        group_advantages(torch.zeros(shape), scale)


@pytest.mark.parametrize(("row", "equal"), [
    ([1, 1, 1], True), ([0.1] * 8, True), ([1, 1, 0], False), ([NAN, 1, 1], True), ([NAN, 1, 2], False),
    ([NAN, NAN, 3], True), ([NAN] * 3, True), ([INF, 1, 1], True), ([0, -0.0, 0], True),
])  # fmt: skip
def test_a_group_is_equal_when_its_scored_rewards_are(row, equal):
    assert equal_groups(torch.tensor([row, [0.0, 1.0, *row[2:]]])).tolist() == [equal, False]
    # exactly the groups that have no advantage
    assert bool(advantages_of([row]).any()) != equal


def test_maxrl_is_zero_where_all_fail_and_refuses_negative_rewards():
    assert advantages_of([[0, 0], [NAN, 0.5], [0, 1]], "maxrl").tolist() == [[0, 0], [0, 0], [-1, 1]]
    with pytest.raises(ValueError, match=r"reward -0\.5: must be at least 0.*'maxrl'"):
        advantages_of([[1, -0.5]], "maxrl")


def test_maxrl_is_the_gradient_of_the_log_of_the_success_rate():
    # with n correct of G, the mean of (r - mean) / mean x score is (mean score of the correct) - (mean score of all)
    scores = torch.tensor([[0.3, -0.2, 0.7, 0.1]])
    rewards = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    found = (group_advantages(rewards, "maxrl") * scores).mean()
    assert_close(found, scores[rewards > 0].mean() - scores.mean())


# two functions on two groups of three: centred and divided by their std, then added up with their weights
#   correct: 1 0 0 -> (2, -1, -1) / sqrt(3); 1 1 1 -> 0
#   length:  0 30 60 -> (-1, 0, 1); 10 10 40 -> (-1, -1, 2) / sqrt(3)
ROOT = math.sqrt(3)
BY_FUNCTION = [[[1.0, 0, 0], [1, 1, 1]], [[0.0, 30, 60], [10, 10, 40]]]
NORMAL = torch.tensor([[[2 / ROOT, -1 / ROOT, -1 / ROOT], [0, 0, 0]], [[-1, 0, 1], [-1 / ROOT, -1 / ROOT, 2 / ROOT]]])


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.5), (1.0, 0.0), (2.0, -0.1)])
def test_gdpo_normalises_every_reward_function_first(weights):
    total = weights[0] * NORMAL[0] + weights[1] * NORMAL[1]
    expected = total / total.square().sum().div(5).sqrt()  # ddof 1 over six completions, whose mean is 0
    found = decoupled_advantages(torch.tensor(BY_FUNCTION), torch.tensor(weights), eps=0.0)
    assert_close(found, expected)
    if not weights[1]:
        assert torch.equal(found[1], torch.zeros(3))
    # the unit of a function does not matter, which it does for the sum of the rewards
    scaled = torch.tensor(BY_FUNCTION) * torch.tensor([1.0, 1000.0])[:, None, None]
    assert_close(decoupled_advantages(scaled, torch.tensor(weights), eps=0.0), expected)


def test_gdpo_leaves_out_what_is_unscored_or_does_not_apply():
    rewards = torch.tensor(BY_FUNCTION)
    rewards[:, 0, 2], rewards[1, 1] = NAN, NAN  # an unscored completion; a function that does not apply to a prompt
    found = decoupled_advantages(rewards, torch.tensor([1.0, 1.0]), eps=0.0)
    # correct: (1, -1) / sqrt(2) and 0; length: (-1, 1) / sqrt(2) and nothing
    assert torch.equal(found, torch.zeros(2, 3))
    found = decoupled_advantages(rewards, torch.tensor([1.0, 0.5]), eps=0.0)
    assert found[0, 0] == -found[0, 1] > 0 and found[0, 2] == 0 and not found[1].any()


def test_kl_in_the_reward_charges_a_token_for_what_comes_after_it():
    kl = torch.tensor([[0.1, 0.2, 0.4, NAN], [0.5, INF, 7.0, 7.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    found = token_returns(torch.tensor([1.0, -1.0]), kl, mask, 0.5)
    assert_close(found, torch.tensor([[0.65, 0.7, 0.8, 0.0], [-1.25, 0.0, 0.0, 0.0]]))
