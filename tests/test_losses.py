"""Tests of common/losses.py: values and gradients against numbers worked out by hand."""

import math

import pytest
import torch

from common import losses

LOW, HIGH = 0.2, 0.3  # different, so that a swap shows

# ratio, advantage -> surrogate, its derivative with respect to the ratio
CLIP_CASES = [
    (0.5, 2.0, 1.0, 2.0),  # below, A > 0: min(0.5 * 2, 0.8 * 2) is the plain one, nothing holds the gradient back
    (1.1, 2.0, 2.2, 2.0),  # inside
    (1.5, 2.0, 2.6, 0.0),  # above, A > 0: min(3.0, 1.3 * 2): clipped
    (0.5, -2.0, -1.6, 0.0),  # below, A < 0: min(-1.0, 0.8 * -2): clipped
    (1.1, -2.0, -2.2, -2.0),  # inside
    (1.5, -2.0, -3.0, -2.0),  # above, A < 0: min(-3.0, -2.6) is the plain one
    (1.0, 2.0, 2.0, 2.0),  # nothing moved
    (1.5, 0.0, 0.0, 0.0),
]


def leaf(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def off_policy_batch():
    """Four sequences of 1 to 5 tokens, old log-probs a little off, and advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    logps = -torch.rand(4, 5, generator=generator) * 3
    old_logps = logps + 0.4 * torch.randn(4, 5, generator=generator)
    mask = torch.arange(5) < torch.tensor([3, 5, 1, 4])[:, None]
    return logps.requires_grad_(), old_logps, mask, torch.tensor([1.5, -0.5, 0.7, -1.0])


def gspo_loss(logps, old_logps, mask, advantages, low, high, num_sequences):
    surrogate = losses.clipped_surrogate(losses.sequence_ratio(logps, old_logps, mask), advantages, low, high)
    return -torch.where(mask.bool().any(1), surrogate, 0.0).sum() / num_sequences


def token_loss(ratio, mask, advantages, low, high, mode, denominator):
    return -losses.aggregate(losses.clipped_surrogate(ratio, advantages, low, high), mask, mode, denominator)


# --- ratios ---


def test_token_ratio_is_the_quotient_of_the_probabilities():
    logps = leaf([[math.log(0.2), math.log(0.9)]])
    ratio = losses.token_ratio(logps, torch.tensor([[math.log(0.4), math.log(0.3)]]))
    ratio.sum().backward()
    torch.testing.assert_close(ratio, torch.tensor([[0.5, 3.0]]))
    torch.testing.assert_close(logps.grad, torch.tensor([[0.5, 3.0]]))  # d exp(x) = exp(x)


@pytest.mark.parametrize("gap", [200.0, -200.0, math.inf, -math.inf])
def test_token_ratio_of_a_runaway_token_stays_finite(gap):
    logps = leaf([[gap]])
    ratio = losses.token_ratio(logps, torch.zeros(1, 1))
    ratio.square().sum().backward()
    torch.testing.assert_close(ratio.detach(), torch.tensor([[math.exp(math.copysign(20, gap))]]))
    assert logps.grad.isfinite().all()


def test_sequence_ratio_is_the_geometric_mean_over_the_masked_in_tokens():
    logps = leaf([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
    old_logps = torch.tensor([[-1.2, -1.6, -12.0], [-1.3, -1.0, -1.3]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    # differences 0.2, -0.4 (and 9, masked out): mean -0.1.   0.3, 0.0, 0.3: mean 0.2
    ratio = losses.sequence_ratio(logps, old_logps, mask)
    torch.testing.assert_close(ratio, torch.tensor([math.exp(-0.1), math.exp(0.2)]))
    ratio.sum().backward()
    a, b = math.exp(-0.1) / 2, math.exp(0.2) / 3  # s_i / |y_i| for every token
    torch.testing.assert_close(logps.grad, torch.tensor([[a, a, 0.0], [b, b, b]]))


def test_sequence_ratio_does_not_grow_with_length():
    # every token 1% likelier: the ratio is 1.01 for 1 token and for 500; a product would give 145
    gap = torch.full((2, 500), math.log(1.01))
    mask = torch.arange(500) < torch.tensor([1, 500])[:, None]
    torch.testing.assert_close(losses.sequence_ratio(gap, torch.zeros(2, 500), mask), torch.tensor([1.01, 1.01]))


def test_sequence_ratio_of_a_runaway_sequence_stays_finite():
    logps = leaf([[50.0, 70.0], [-300.0, -300.0]])
    ratio = losses.sequence_ratio(logps, torch.zeros(2, 2), torch.ones(2, 2))
    ratio.sum().backward()
    torch.testing.assert_close(ratio.detach(), torch.tensor([math.exp(10.0), 0.0]))
    assert logps.grad.isfinite().all()


def test_gspo_token_ratio_has_the_sequence_ratio_as_value_and_its_own_token_as_gradient():
    logps = leaf([[-1.0, -2.0], [-1.0, -1.0]])
    old_logps = torch.tensor([[-1.2, -1.6], [-1.3, -1.1]])
    ratio = losses.gspo_token_ratio(logps, old_logps, torch.ones(2, 2))
    s = torch.tensor([math.exp(-0.1), math.exp(0.2)])  # means of (0.2, -0.4) and (0.3, 0.1)
    torch.testing.assert_close(ratio.detach(), s[:, None].expand(2, 2))
    ratio[0, 1].backward()
    # d s_01 / d logp_01 = s_0, and nothing reaches the other tokens
    torch.testing.assert_close(logps.grad, torch.tensor([[0.0, s[0]], [0.0, 0.0]]))


def test_equal_log_probs_give_ratios_of_exactly_one_no_clipping_and_no_kl():
    logps, _, mask, advantages = off_policy_batch()
    logps = logps.detach()
    ratio = losses.sequence_ratio(logps, logps.clone(), mask)
    assert torch.equal(ratio, torch.ones(4))
    assert torch.equal(losses.token_ratio(logps, logps.clone()), torch.ones(4, 5))
    assert torch.equal(losses.gspo_token_ratio(logps, logps.clone(), mask), torch.ones(4, 5))
    stats = losses.clip_stats(ratio, advantages, 3e-4, 4e-4, mask.any(1))
    assert stats["clip_fraction"] == 0 and stats["out_of_range"] == 0 and stats["ratio_max"] == 1
    for kind in ("k1", "k2", "k3"):
        assert torch.equal(losses.kl_estimate(logps, logps.clone(), kind), torch.zeros(4, 5))


# --- clipping ---


@pytest.mark.parametrize(("ratio", "advantage", "value", "slope"), CLIP_CASES)
def test_clipped_surrogate_of_a_sequence(ratio, advantage, value, slope):
    ratio_B = leaf([ratio])
    surrogate = losses.clipped_surrogate(ratio_B, torch.tensor([advantage]), LOW, HIGH)
    surrogate.sum().backward()
    torch.testing.assert_close(surrogate.detach(), torch.tensor([value]))
    torch.testing.assert_close(ratio_B.grad, torch.tensor([slope]))


@pytest.mark.parametrize("per_token", [False, True], ids=["advantages [B]", "advantages [B, C]"])
def test_clipped_surrogate_of_tokens(per_token):
    # one row per advantage, one column per ratio
    rows = [[case for case in CLIP_CASES[:6] if case[1] == a] for a in (2.0, -2.0)]
    ratio_BC = leaf([[case[0] for case in row] for row in rows])
    advantages = torch.tensor([2.0, -2.0])
    if per_token:
        advantages = advantages[:, None].expand(2, 3)
    surrogate = losses.clipped_surrogate(ratio_BC, advantages, LOW, HIGH)
    surrogate.sum().backward()
    torch.testing.assert_close(surrogate.detach(), torch.tensor([[case[2] for case in row] for row in rows]))
    torch.testing.assert_close(ratio_BC.grad, torch.tensor([[case[3] for case in row] for row in rows]))


def test_advantages_of_a_square_batch_go_with_the_rows():
    # with B = C a broadcast along the wrong axis would pass unnoticed
    surrogate = losses.clipped_surrogate(torch.ones(2, 2), torch.tensor([1.0, -3.0]), LOW, HIGH)
    assert torch.equal(surrogate, torch.tensor([[1.0, 1.0], [-3.0, -3.0]]))


def test_clip_stats_of_sequences():
    ratio = torch.tensor([1.5, 1.4, 1.5, 1.5, 0.5, 0.5, 0.5, 1.1, 0.9, 1.0, 9.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    mask = torch.tensor([1] * 10 + [0])
    stats = losses.clip_stats(ratio, advantages, LOW, HIGH, mask)
    # active: 3 (above, A > 0) and 2 (below, A < 0) of 10; outside: the first 7; the 9.0 does not count
    torch.testing.assert_close(stats["clip_fraction"], torch.tensor(0.5))
    torch.testing.assert_close(stats["out_of_range"], torch.tensor(0.7))
    torch.testing.assert_close(stats["ratio_max"], torch.tensor(1.5))


def test_clip_stats_of_tokens_count_tokens():
    ratio = leaf([[1.5, 1.0, 0.5], [0.5, 1.5, 7.0]])
    stats = losses.clip_stats(ratio, torch.tensor([1.0, -1.0]), LOW, HIGH, torch.tensor([[1, 1, 1], [1, 1, 0]]))
    # active: (0, 0) and (1, 0) of 5; outside: these and (0, 2), (1, 1)
    torch.testing.assert_close(stats["clip_fraction"], torch.tensor(0.4))
    torch.testing.assert_close(stats["out_of_range"], torch.tensor(0.8))
    torch.testing.assert_close(stats["ratio_max"], torch.tensor(1.5))
    assert not any(value.requires_grad for value in stats.values())


def test_clip_stats_of_nothing_are_finite():
    stats = losses.clip_stats(torch.tensor([2.0]), torch.tensor([1.0]), LOW, HIGH, torch.tensor([False]))
    assert {name: value.item() for name, value in stats.items()} == {
        "clip_fraction": 0.0, "out_of_range": 0.0, "ratio_max": 0.0,
    }  # fmt: skip


# --- GSPO ---


# ratio, advantage, plain clipped value, value with a dual clip of 3, slope of the latter
DUAL_CASES = [(5.0, -1.0, -5.0, -3.0, 0.0), (2.0, -1.0, -2.0, -2.0, -1.0), (5.0, 1.0, 1.2, 1.2, 0.0),
              (0.5, -2.0, -1.6, -1.6, 0.0), (5.0, 0.0, 0.0, 0.0, 0.0)]  # fmt: skip


@pytest.mark.parametrize(("ratio", "advantage", "plain", "value", "slope"), DUAL_CASES)
def test_dual_clip_holds_large_ratios_of_bad_tokens(ratio, advantage, plain, value, slope):
    ratio, advantage = leaf([[ratio, 1.0]]), torch.tensor([advantage])
    surrogate = losses.clipped_surrogate(ratio, advantage, 0.2, 0.2)
    clipped = losses.dual_clip(surrogate, advantage, 3.0)
    assert surrogate[0, 0].item() == pytest.approx(plain) and clipped[0, 0].item() == pytest.approx(value)
    assert clipped[0, 1] == advantage
    clipped[0, 0].backward()
    assert ratio.grad[0, 0].item() == pytest.approx(slope)


def test_clip_stats_count_what_a_dual_clip_holds_back():
    ratio, advantages = torch.tensor([5.0, 5.0, 2.0, 1.0]), torch.tensor([-1.0, 1.0, -1.0, 1.0])
    everything = torch.ones(4)
    assert losses.clip_stats(ratio, advantages, 0.2, 0.2, everything)["clip_fraction"] == 0.25
    assert losses.clip_stats(ratio, advantages, 0.2, 0.2, everything, dual_clip=3.0)["clip_fraction"] == 0.5


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.0, 1.0), (4.9, 4.9), (7.0, 5.0)])
@pytest.mark.parametrize("advantage", [-2.0, 0.5])
def test_cispo_weighs_the_gradient_of_every_token_by_its_capped_ratio(ratio, weight, advantage):
    logps = leaf([[-1.0, -2.0]])
    ratios = losses.token_ratio(logps, logps.detach() - math.log(ratio))
    losses.cispo_surrogate(logps, ratios, torch.tensor([advantage]), 5.0).sum().backward()
    assert logps.grad[0].tolist() == pytest.approx([weight * advantage] * 2, rel=1e-5)


def test_on_policy_cispo_has_the_gradient_of_the_clipped_surrogate():
    logps, _, mask, advantages = off_policy_batch()
    gradients = []
    for cispo in (False, True):
        own = logps.detach().clone().requires_grad_()
        ratio = losses.token_ratio(own, own.detach())
        values = (
            losses.cispo_surrogate(own, ratio, advantages, 5.0)
            if cispo
            else losses.clipped_surrogate(ratio, advantages, 0.2, 0.28)
        )
        losses.aggregate(values, mask, "token_mean", mask.sum()).backward()
        gradients.append(own.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-7)
    assert gradients[0].any()


def test_gspo_gradient_of_a_token_is_ratio_times_advantage_over_group_and_length():
    logps, old_logps, mask, advantages = off_policy_batch()
    gspo_loss(logps, old_logps, mask, advantages, 10, 10, 4).backward()
    difference = ((logps.detach() - old_logps) * mask).sum(1) / mask.sum(1)
    expected = -(difference.exp() * advantages / (4 * mask.sum(1)))[:, None] * mask
    torch.testing.assert_close(logps.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("epsilon", [10.0, 0.05], ids=["no clip", "some clipped"])
def test_gspo_gradient_agrees_with_finite_differences(epsilon):
    logps, old_logps, mask, advantages = off_policy_batch()
    gspo_loss(logps, old_logps, mask, advantages, epsilon, epsilon, 4).backward()
    step, numeric = 1e-2, torch.zeros(4, 5)
    with torch.no_grad():
        for i, t in mask.nonzero().tolist():
            up, down = logps.clone(), logps.clone()
            up[i, t] += step
            down[i, t] -= step
            rise = [gspo_loss(x, old_logps, mask, advantages, epsilon, epsilon, 4) for x in (up, down)]
            numeric[i, t] = (rise[0] - rise[1]) / (2 * step)
    torch.testing.assert_close(logps.grad, numeric, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(("advantage", "gap", "clipped"), [
    (1.0, 0.5, True), (1.0, -0.5, False), (-1.0, 0.5, False), (-1.0, -0.5, True), (1.0, 0.0, False), (-1.0, 0.0, False),
])  # fmt: skip
def test_a_clipped_sequence_gets_no_gradient_and_another_gets_all_of_it(advantage, gap, clipped):
    logps = leaf([[-1.0 + gap, -2.0 + gap]])
    old_logps = torch.tensor([[-1.0, -2.0]])
    gspo_loss(logps, old_logps, torch.ones(1, 2), torch.tensor([advantage]), LOW, HIGH, 1).backward()
    slope = 0.0 if clipped else -math.exp(gap) * advantage / 2
    torch.testing.assert_close(logps.grad, torch.full((1, 2), slope))


def test_on_policy_gspo_and_grpo_have_the_same_gradient():
    gradients = []
    for sequence_level in (True, False):
        logps, _, mask, advantages = off_policy_batch()
        old_logps = logps.detach().clone()
        if sequence_level:
            loss = gspo_loss(logps, old_logps, mask, advantages, 3e-4, 4e-4, 4)
        else:
            loss = token_loss(losses.token_ratio(logps, old_logps), mask, advantages, 0.2, 0.28, "seq_mean", 4)
        loss.backward()
        gradients.append(logps.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-6)
    # -A_i / (G |y_i|): the first token of the second row has 0.5 / (4 * 5)
    assert gradients[0][1, 0].item() == pytest.approx(0.025)


def test_off_policy_gspo_and_grpo_differ():
    gradients = []
    for sequence_level in (True, False):
        logps, old_logps, mask, advantages = off_policy_batch()
        if sequence_level:
            loss = gspo_loss(logps, old_logps, mask, advantages, 10, 10, 4)
        else:
            loss = token_loss(losses.token_ratio(logps, old_logps), mask, advantages, 10, 10, "seq_mean", 4)
        loss.backward()
        gradients.append(logps.grad)
    assert (gradients[0] - gradients[1]).abs().max() > 1e-2


@pytest.mark.parametrize("epsilon", [10.0, 0.05, 3e-4], ids=["no clip", "some clipped", "paper"])
def test_gspo_token_equals_gspo_when_a_sequence_has_one_advantage(epsilon):
    values, gradients = [], []
    for token_level in (False, True):
        logps, old_logps, mask, advantages = off_policy_batch()
        if token_level:
            ratio = losses.gspo_token_ratio(logps, old_logps, mask)
            loss = token_loss(ratio, mask, advantages, epsilon, epsilon, "seq_mean", 4)
        else:
            loss = gspo_loss(logps, old_logps, mask, advantages, epsilon, epsilon, 4)
        loss.backward()
        values.append(loss.detach())
        gradients.append(logps.grad)
    torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


def test_gspo_token_takes_advantages_per_token():
    logps = leaf([[-1.0, -2.0]])
    ratio = losses.gspo_token_ratio(logps, torch.tensor([[-1.2, -1.6]]), torch.ones(1, 2))
    token_loss(ratio, torch.ones(1, 2), torch.tensor([[1.0, -3.0]]), 10, 10, "seq_mean", 1).backward()
    s = math.exp(-0.1)  # mean of 0.2 and -0.4; gradient -s A_t / |y|
    torch.testing.assert_close(logps.grad, torch.tensor([[-s / 2, 3 * s / 2]]))


def test_long_and_short_sequences_weigh_the_same():
    mask = torch.arange(100) < torch.tensor([1, 100])[:, None]
    logps = torch.full((2, 100), -1.0, requires_grad=True)
    loss = gspo_loss(logps, logps.detach().clone(), mask, torch.tensor([1.0, -1.0]), LOW, HIGH, 2)
    loss.backward()
    assert loss.item() == 0.0
    # each row's gradient adds up to -A_i / 2
    torch.testing.assert_close(logps.grad.sum(1), torch.tensor([-0.5, 0.5]))


# --- what must not matter: masked positions, empty rows ---

FILLINGS = [(math.nan, 0.0), (0.0, math.nan), (-math.inf, 0.0), (0.0, -math.inf), (math.inf, 0.0),
            (-math.inf, -math.inf), (math.nan, math.nan)]  # fmt: skip


@pytest.mark.parametrize("fill", FILLINGS, ids=str)
@pytest.mark.parametrize("name", ["sequence_ratio", "gspo_token_ratio"])
def test_what_stands_at_masked_positions_does_not_matter(name, fill):
    results = []
    for filling in (None, fill):
        logps, old_logps, mask, advantages = off_policy_batch()
        if filling is not None:
            logps = logps.detach().masked_fill(~mask, filling[0]).requires_grad_()
            old_logps = old_logps.masked_fill(~mask, filling[1])
        if name == "sequence_ratio":
            loss = gspo_loss(logps, old_logps, mask, advantages, 10, 10, 4)
        else:
            ratio = losses.gspo_token_ratio(logps, old_logps, mask)
            loss = token_loss(ratio, mask, advantages, 10, 10, "seq_mean", 4)
        loss.backward()
        results.append((loss.detach(), logps.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])  # NaN is equal to nothing


@pytest.mark.parametrize("filling", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["seq_mean", "token_mean", "constant"])
def test_aggregate_never_reads_masked_positions(mode, filling):
    values = leaf([[1.0, filling], [2.0, 4.0]])
    total = losses.aggregate(values, torch.tensor([[1, 0], [1, 1]]), mode, 2)
    total.backward()
    # seq_mean: (1 + 3) / 2; the others: (1 + 2 + 4) / 2
    assert total.item() == (2.0 if mode == "seq_mean" else 3.5)
    w = 0.25 if mode == "seq_mean" else 0.5
    assert torch.equal(values.grad, torch.tensor([[0.5, 0.0], [w, w]]))


@pytest.mark.parametrize("filling", [math.nan, math.inf, -math.inf])
def test_clip_stats_never_read_masked_positions(filling):
    ratio, mask = torch.tensor([[1.5, filling], [1.0, 0.9]]), torch.tensor([[1, 0], [1, 1]])
    stats = losses.clip_stats(ratio, torch.tensor([1.0, 1.0]), LOW, HIGH, mask)
    torch.testing.assert_close(stats["clip_fraction"], torch.tensor(1 / 3))
    torch.testing.assert_close(stats["out_of_range"], torch.tensor(1 / 3))
    assert stats["ratio_max"] == 1.5


def test_a_sequence_without_tokens_has_ratio_one_and_no_gradient():
    logps = leaf([[-1.0, -2.0], [math.nan, -math.inf]])
    old_logps = torch.tensor([[-1.2, -1.6], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [0, 0]])
    ratio = losses.sequence_ratio(logps, old_logps, mask)
    assert ratio[1] == 1.0
    loss = gspo_loss(logps, old_logps, mask, torch.tensor([1.0, 5.0]), LOW, HIGH, 1)
    loss.backward()
    torch.testing.assert_close(loss.detach(), torch.tensor(-math.exp(-0.1)))
    torch.testing.assert_close(logps.grad, torch.tensor([[-math.exp(-0.1) / 2] * 2, [0.0, 0.0]]))


@pytest.mark.parametrize("mode", ["seq_mean", "token_mean", "constant"])
def test_a_batch_without_tokens_has_loss_zero_and_zero_gradients(mode):
    logps = leaf([[-1.0, -2.0], [-1.0, -3.0]])
    mask = torch.zeros(2, 2, dtype=torch.bool)
    loss = token_loss(losses.token_ratio(logps, torch.zeros(2, 2)), mask, torch.ones(2), LOW, HIGH, mode, 1)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logps.grad, torch.zeros(2, 2))


def test_masked_mean_counts_masked_in_positions_only():
    mean = losses.masked_mean(torch.tensor([[1.0, 2.0, 9.0], [4.0, math.nan, math.inf], [7.0, 7.0, 7.0]]),
                              torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]))  # fmt: skip
    assert torch.equal(mean, torch.tensor([1.5, 4.0, 0.0]))


def test_masked_mean_adds_up_in_fp32():
    # bf16 has steps of 4 there: the sum 750.75 would be 752
    mean = losses.masked_mean(torch.full((1, 1001), 0.75, dtype=torch.bfloat16), torch.ones(1, 1001))
    assert mean.dtype == torch.float32 and mean.item() == 0.75


# --- KL ---


@pytest.mark.parametrize(("difference", "k1", "k2", "k3"), [
    (-1.0, -1.0, 0.5, 0.7182818),  # e - 1 - 1
    (0.0, 0.0, 0.0, 0.0),
    (1.0, 1.0, 0.5, 0.3678794),  # 1/e + 1 - 1
])  # fmt: skip
def test_kl_estimates_by_hand(difference, k1, k2, k3):
    logps, ref_logps = torch.tensor([[-2.0 + difference]]), torch.tensor([[-2.0]])
    for kind, value in {"k1": k1, "k2": k2, "k3": k3}.items():
        torch.testing.assert_close(losses.kl_estimate(logps, ref_logps, kind), torch.tensor([[value]]))


@pytest.mark.parametrize(("difference", "slopes"), [
    (-1.0, (1.0, -1.0, 1 - math.e)), (0.0, (1.0, 0.0, 0.0)), (1.0, (1.0, 1.0, 1 - 1 / math.e)),
])  # fmt: skip
def test_kl_slopes_by_hand(difference, slopes):
    # with respect to logps: 1, d, 1 - exp(-d)
    for kind, slope in zip(("k1", "k2", "k3"), slopes, strict=True):
        logps = leaf([[difference]])
        losses.kl_estimate(logps, torch.zeros(1, 1), kind).sum().backward()
        torch.testing.assert_close(logps.grad, torch.tensor([[slope]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [-200.0, -20.0, 20.0, 200.0, -math.inf])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_of_log_probs_far_apart_is_finite_with_finite_gradient(kind, gap, dtype):
    logps = torch.tensor([[gap]], dtype=dtype, requires_grad=True)
    kl = losses.kl_estimate(logps, torch.zeros(1, 1, dtype=dtype), kind)
    kl.sum().backward()
    assert kl.dtype == torch.float32
    d = math.copysign(20.0, gap)  # held within +-20
    expected = {"k1": d, "k2": 200.0, "k3": math.exp(-d) + d - 1}[kind]
    torch.testing.assert_close(kl.detach(), torch.tensor([[expected]]))
    assert logps.grad.isfinite().all()


def three_token_distributions():
    theta = leaf([0.3, -0.8, 1.1])
    reference = torch.tensor([-0.5, 0.4, 0.6]).log_softmax(0)
    return theta, theta.log_softmax(0), reference


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_expected_kl_gradient_by_enumeration(kind):
    # as a loss on tokens drawn from pi: sum over tokens of pi(a), held fixed, times the gradient of the estimate
    theta, logps, reference = three_token_distributions()
    estimate = losses.kl_estimate(logps[None], reference[None], kind)[0]
    (gradient,) = torch.autograd.grad((logps.exp().detach() * estimate).sum(), theta)

    theta, logps, reference = three_token_distributions()
    reverse = (logps.exp() * (logps - reference)).sum()  # KL(pi || ref)
    forward = (reference.exp() * (reference - logps)).sum()  # KL(ref || pi)
    (towards_reverse,) = torch.autograd.grad(reverse, theta, retain_graph=True)
    (towards_forward,) = torch.autograd.grad(forward, theta)
    expected = {"k1": torch.zeros(3), "k2": towards_reverse, "k3": towards_forward}[kind]
    assert (towards_reverse - towards_forward).abs().max() > 1e-2  # or the test could not tell them apart
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("off_policy", [False, True])
def test_expected_gradient_of_the_ratio_times_k3_by_enumeration(off_policy):
    # tokens come from `old`; the gradient wanted is that of KL(pi || ref)
    logits, logps, ref = three_token_distributions()
    old = (logits.detach() + (torch.tensor([0.7, -0.2, 0.1]) if off_policy else 0.0)).log_softmax(0)
    term = losses.token_ratio(logps, old) * losses.kl_estimate(logps, ref, "k3")
    (found,) = torch.autograd.grad((old.exp() * term).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logps.exp() * (logps - ref)).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expected_kl_value_by_enumeration(kind):
    _, logps, reference = three_token_distributions()
    expected = (logps.exp() * (logps - reference)).sum()
    estimate = losses.kl_estimate(logps[None], reference[None], kind)[0]
    torch.testing.assert_close((logps.exp() * estimate).sum(), expected, rtol=0, atol=1e-6)


def test_an_unknown_kl_estimator_is_refused():
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3"):
        losses.kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


# --- aggregation ---


def two_and_eight_tokens():
    """A sequence of 2 tokens of value 1 and one of 8 tokens of value 3."""
    values = torch.stack([torch.full((8,), 1.0), torch.full((8,), 3.0)])
    return values, torch.arange(8) < torch.tensor([2, 8])[:, None]


@pytest.mark.parametrize(("mode", "denominator", "expected"), [
    ("seq_mean", 2, 2.0),  # (1 + 3) / 2
    ("token_mean", 10, 2.6),  # (2 * 1 + 8 * 3) / 10
    ("constant", 2 * 16, 26 / 32),  # two sequences, length constant 16
])  # fmt: skip
def test_aggregate_by_hand_and_cut_in_two(mode, denominator, expected):
    values, mask = two_and_eight_tokens()
    assert losses.aggregate(values, mask, mode, denominator).item() == pytest.approx(expected)
    parts = [losses.aggregate(values[i : i + 1], mask[i : i + 1], mode, denominator) for i in range(2)]
    assert sum(parts).item() == pytest.approx(expected)


def test_masked_out_completions_do_not_dilute_the_token_mean():
    # 4 tokens of value 2 count, 8 tokens of another completion do not: 8 / 4
    mask = torch.arange(8) < torch.tensor([4, 0])[:, None]
    assert losses.aggregate(torch.full((2, 8), 2.0), mask, "token_mean", int(mask.sum())).item() == 2.0


@pytest.mark.parametrize("cut", [(1, 1, 1, 1), (2, 2), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("mode", ["gspo", "seq_mean", "token_mean", "constant"])
def test_loss_and_gradient_do_not_depend_on_micro_batches(mode, cut):
    results = []
    for sizes in ((4,), cut):
        logps, old_logps, mask, advantages = off_policy_batch()
        denominator = {"gspo": 4, "seq_mean": 4, "token_mean": int(mask.sum()), "constant": 4 * 5}[mode]
        total = 0.0
        for rows in torch.arange(4).split(sizes):
            part = logps[rows], old_logps[rows], mask[rows]
            if mode == "gspo":
                loss = gspo_loss(*part, advantages[rows], LOW, HIGH, denominator)
            else:
                ratio = losses.token_ratio(*part[:2])
                loss = token_loss(ratio, part[2], advantages[rows], LOW, HIGH, mode, denominator)
            loss.backward()
            total += loss.item()
        results.append((total, logps.grad))
    assert results[1][0] == pytest.approx(results[0][0], abs=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=0, atol=1e-7)


def test_an_unknown_aggregation_mode_is_refused():
    with pytest.raises(ValueError, match=r"'mean'.*seq_mean, token_mean, constant"):
        losses.aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean", 1)
