"""Tests of common/advantages.py: hand-computed advantages, unscored completions, groups without any difference."""

import math

import pytest
import torch

from common.advantages import equal_groups, group_advantages

NAN = math.nan
SCALES = ["group", "batch", "none"]


def advantages_of(rows, scale="group", **kwargs) -> torch.Tensor:
    return group_advantages(torch.tensor(rows, dtype=torch.float32), scale, **kwargs)


def test_group_scale_by_hand():
    # mean 0.5, std with ddof 1 = sqrt(4 * 0.25 / 3) = 0.577350; 0.5 / (0.577350 + 0.0001) = 0.865876
    a = 0.865876
    torch.testing.assert_close(advantages_of([[1, 0, 0, 1]]), torch.tensor([[a, -a, -a, a]]), rtol=0, atol=1e-6)


def test_batch_scale_by_hand():
    # centred: +-0.5 and +-1.5; std = sqrt((2 * 0.25 + 2 * 2.25) / 3) = 1.290994; plus 0.0001
    expected = torch.tensor([[0.5, -0.5], [1.5, -1.5]]) / 1.291094
    torch.testing.assert_close(advantages_of([[1, 0], [3, 0]], "batch"), expected, rtol=0, atol=1e-6)


def test_no_scale_by_hand():
    assert torch.equal(advantages_of([[4, 0, 2, 2], [1, 1, 1, 5]], "none"),
                       torch.tensor([[2.0, -2.0, 0.0, 0.0], [-1.0, -1.0, -1.0, 3.0]]))  # fmt: skip


def test_eps_is_added_to_the_standard_deviation():
    # std of (1, 0) is 0.707107: 0.5 / (0.707107 + 1)
    torch.testing.assert_close(advantages_of([[1, 0]], eps=1.0), torch.tensor([[0.292893, -0.292893]]))


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_a_group_of_two_gives_one_over_root_two(scale):
    # ddof 1; the population form would give 1
    torch.testing.assert_close(advantages_of([[1, 0]], scale), torch.tensor([[0.7071, -0.7071]]), rtol=0, atol=2e-4)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -2.6, 1e4, 1e-8])
@pytest.mark.parametrize("group", [2, 3, 7, 8, 64])
def test_equal_rewards_give_exactly_zero(reward, group, scale):
    rewards = torch.full((2, group), reward, dtype=torch.float32)
    assert torch.equal(group_advantages(rewards, scale), torch.zeros(2, group))


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_exactly_zero_without_eps(scale):
    assert torch.equal(advantages_of([[0.5, 0.5, 0.5]], scale, eps=0.0), torch.zeros(1, 3))


def test_one_outlier_is_bounded_by_the_root_of_the_group_size():
    rewards = [0.35] * 7 + [-0.25]
    # mean 0.275; deviations 0.075 and -0.525; std = sqrt((7 * 0.075^2 + 0.525^2) / 7) = 0.212132
    result = advantages_of([rewards])
    assert result.abs().max() <= math.sqrt(8)
    expected = torch.tensor([[0.075] * 7 + [-0.525]]) / 0.212232
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_no_advantage_exceeds_the_root_of_the_group_size(seed):
    # rewards that differ by rounding errors only, on top of a large common part
    generator = torch.Generator().manual_seed(seed)
    rewards = 0.35 + 1e-7 * torch.randint(0, 2, (8, 8), generator=generator)
    assert group_advantages(rewards, "group").abs().max() <= math.sqrt(8)


@pytest.mark.parametrize("scale", SCALES)
def test_groups_are_the_rows(scale):
    # every completion of the first prompt got 1, of the second 10: nothing to learn
    assert torch.equal(advantages_of([[1] * 4, [10] * 4], scale), torch.zeros(2, 4))


@pytest.mark.parametrize("scale", ["group", "none"])
def test_groups_do_not_influence_each_other(scale):
    alone = advantages_of([[1, 0, 0, 2]], scale)
    together = advantages_of([[1, 0, 0, 2], [100, -100, 3, 7]], scale)
    assert torch.equal(together[0], alone[0])


@pytest.mark.parametrize("scale", SCALES)
def test_an_unscored_completion_is_left_out(scale):
    with_gap = advantages_of([[1, NAN, 0, 1], [2, 0, 1, NAN]], scale)
    assert with_gap[0, 1] == 0.0 and with_gap[1, 3] == 0.0
    without = torch.cat([with_gap[:1, [0, 2, 3]], with_gap[1:, :3]])
    torch.testing.assert_close(without, advantages_of([[1, 0, 1], [2, 0, 1]], scale), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_reward_that_is_no_number_leaves_other_groups_alone(bad, scale):
    clean = advantages_of([[0, 1, 1, 0]], scale)
    mixed = advantages_of([[1, bad, 0, 1], [0, 1, 1, 0]], scale)
    assert torch.equal(mixed[1], clean[0])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_an_infinite_reward_counts_as_unscored(bad, scale):
    with_inf = advantages_of([[1, bad, 0, 1], [0, 1, 1, 0]], scale)
    assert torch.equal(with_inf, advantages_of([[1, NAN, 0, 1], [0, 1, 1, 0]], scale))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [NAN, 3.0, NAN], [NAN, 0.1, 0.1]], ids=str)
def test_a_group_with_nothing_to_compare_gets_zeros(row, scale):
    result = advantages_of([row, [1, 0, 0]], scale)
    assert torch.equal(result[0], torch.zeros(3))
    torch.testing.assert_close(result[1], advantages_of([[1, 0, 0]], scale)[0])


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_of_one_gets_zero(scale):
    assert torch.equal(advantages_of([[1.0], [5.0]], scale), torch.zeros(2, 1))


def test_batch_scale_leaves_groups_without_variance_out():
    # with them in, the std of (0.5, -0.5, 0, 0) would be 0.408 and the advantage 1.22 instead of 0.707
    result = advantages_of([[1, 0], [1, 1]], "batch")
    torch.testing.assert_close(result, torch.tensor([[0.7070, -0.7070], [0.0, 0.0]]), rtol=0, atol=1e-4)
    assert torch.equal(result[0], advantages_of([[1, 0]], "batch")[0])


@pytest.mark.parametrize("scale", SCALES)
def test_order_of_completions_and_prompts_does_not_matter(scale):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.rand(5, 6, generator=generator)
    rewards[2, 3] = NAN
    rows, columns = torch.randperm(5, generator=generator), torch.randperm(6, generator=generator)
    permuted = group_advantages(rewards[rows][:, columns], scale)
    torch.testing.assert_close(permuted, group_advantages(rewards, scale)[rows][:, columns], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("unit", [1e30, 3e38, 1.0])
def test_rewards_of_any_size_are_compared(unit, scale):
    # mean 0.75 units, deviations 0.25 and -0.75, std 0.5: the squares of the first two are beyond fp32
    expected = torch.tensor([[0.5, 0.5, 0.5, -1.5]])
    torch.testing.assert_close(advantages_of([[unit, unit, unit, 0.0]], scale, eps=0.0), expected)


@pytest.mark.parametrize("scale", SCALES)
def test_a_large_common_part_does_not_tilt_the_advantages(scale):
    # 1e6 + n / 16 is exact in fp32, but the sum of eight is rounded to a multiple of 0.5
    rewards = torch.tensor([[0.0, 2, 3, 5, 6, 8, 10, 11]]) / 16
    torch.testing.assert_close(group_advantages(1e6 + rewards, scale), group_advantages(rewards, scale))


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_unit_and_zero_of_the_rewards_do_not_matter(scale):
    rewards = torch.rand(4, 8, generator=torch.Generator().manual_seed(2))
    moved = group_advantages(100 * rewards + 3, scale, eps=0.0)
    torch.testing.assert_close(moved, group_advantages(rewards, scale, eps=0.0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_of_a_group_add_up_to_zero(scale):
    rewards = torch.rand(4, 8, generator=torch.Generator().manual_seed(3))
    result = group_advantages(rewards, scale)
    assert result.abs().min(1).values.max() > 0
    torch.testing.assert_close(result.sum(1), torch.zeros(4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_advantages_are_fp32(dtype):
    result = group_advantages(torch.tensor([[1, 0]], dtype=dtype), "group")
    assert result.dtype == torch.float32
    assert torch.equal(result, advantages_of([[1, 0]]))


def test_rewards_are_not_changed():
    rewards = torch.tensor([[1.0, NAN, 0.0]])
    group_advantages(rewards, "group")
    assert torch.equal(rewards.nan_to_num(nan=7.0), torch.tensor([[1.0, 7.0, 0.0]]))


def test_a_flat_list_of_rewards_is_refused():
    with pytest.raises(ValueError, match=r"\[8\].*prompts, completions per prompt"):
        group_advantages(torch.zeros(8), "group")


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match=r"'std'.*group, batch, none"):
        group_advantages(torch.zeros(1, 2), "std")


# --- equal groups ---


@pytest.mark.parametrize(
    "row, equal",
    [([1, 1, 1], True), ([0.1] * 8, True), ([1, 1, 0], False), ([NAN, 1, 1], True), ([NAN, 1, 2], False),
     ([NAN, NAN, 3], True), ([NAN] * 3, True), ([math.inf, 1, 1], True), ([0, -0.0, 0], True)],
)  # fmt: skip
def test_a_group_is_equal_when_its_scored_rewards_are(row, equal):
    assert equal_groups(torch.tensor([row, [0.0, 1.0, *row[2:]]])).tolist() == [equal, False]
    # exactly the groups that have no advantage
    assert bool(advantages_of([row]).any()) != equal
