"""Tests of common/maths/losses.py: values and gradients against numbers worked out by hand.

Where no bound is given, results of a handful of fp32 operations of size 1 are compared: 1e-5 is 84 roundings.
"""

import math

import pytest
import torch

from common.maths import losses

LOW, HIGH = 0.2, 0.3  # different, so that a swap shows
NAN, INF = math.nan, math.inf
MODES = ["seq_mean", "token_mean", "constant"]
KINDS = ["k1", "k2", "k3"]

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
close = torch.testing.assert_close


def leaf(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def off_policy_batch():
    """Four sequences of 1 to 5 tokens, old log-probs a little off, and advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    logps = -torch.rand(4, 5, generator=generator) * 3
    old_logps = logps + 0.4 * torch.randn(4, 5, generator=generator)
    mask = torch.arange(5) < torch.tensor([3, 5, 1, 4])[:, None]
    return logps.requires_grad_(), old_logps, mask, torch.tensor([1.5, -0.5, 0.7, -1.0])


def loss_of(kind, logps, old_logps, mask, advantages, epsilon, denominator):
    """GSPO's, GSPO-token's, CISPO's, or GRPO's in one of its modes."""
    if kind == "gspo":
        ratio = losses.sequence_ratio(logps, old_logps, mask)
        surrogate = losses.clipped_surrogate(ratio, advantages, epsilon, epsilon)
        return -torch.where(mask.bool().any(1), surrogate, 0.0).sum() / denominator
    ratio = (losses.gspo_token_ratio(logps, old_logps, mask) if kind == "gspo_token"
             else losses.token_ratio(logps, old_logps))  # fmt: skip
    surrogate = (losses.cispo_surrogate(logps, ratio, advantages, 5.0) if kind == "cispo"
                 else losses.clipped_surrogate(ratio, advantages, epsilon, epsilon))  # fmt: skip
    return -losses.aggregate(surrogate, mask, kind if kind in MODES else "seq_mean", denominator)


def gradient_of(kind, epsilon=10.0, on_policy=False, sign=1) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, and its gradient with respect to the log-probabilities."""
    logps, old_logps, mask, advantages = off_policy_batch()
    loss = loss_of(kind, logps, logps.detach() if on_policy else old_logps, mask, sign * advantages, epsilon, 4)
    loss.backward()
    return loss.detach(), logps.grad


@pytest.mark.parametrize(("gap", "held"), [
    (math.log(0.2 / 0.4), None), (math.log(0.9 / 0.3), None), (200.0, 20), (-200.0, -20), (INF, 20), (-INF, -20),
])  # fmt: skip
def test_token_ratio_is_the_quotient_of_the_probabilities_and_of_a_runaway_token_stays_finite(gap, held):
    logps = leaf([[gap]])
    ratio = losses.token_ratio(logps, torch.zeros(1, 1))
    (gradient,) = torch.autograd.grad(ratio.square().sum(), logps)
    assert ratio.item() == pytest.approx(math.exp(gap if held is None else held)) and gradient.isfinite().all()
    if held is None:
        close(gradient, 2 * ratio.detach() ** 2)  # d exp(x) = exp(x)


def test_sequence_ratios_are_geometric_means_over_masked_in_tokens_and_have_gradients_of_all_or_of_their_own():
    logps = leaf([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
    old_logps = torch.tensor([[-1.2, -1.6, -12.0], [-1.3, -1.0, -1.3]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    # differences 0.2, -0.4 (and 9, masked out): mean -0.1.   0.3, 0.0, 0.3: mean 0.2
    ratio = losses.sequence_ratio(logps, old_logps, mask)
    close(ratio, torch.tensor([math.exp(-0.1), math.exp(0.2)]))
    ratio.sum().backward()
    a, b = math.exp(-0.1) / 2, math.exp(0.2) / 3  # s_i / |y_i| for every token
    close(logps.grad, torch.tensor([[a, a, 0.0], [b, b, b]]))
    of_tokens = losses.gspo_token_ratio(logps, old_logps, mask)
    close(of_tokens.detach(), ratio.detach()[:, None].expand(2, 3))
    (gradient,) = torch.autograd.grad(of_tokens[0, 1], logps)  # d s_01 / d logp_01 = s_0; nothing for other tokens
    close(gradient, torch.tensor([[0.0, math.exp(-0.1), 0.0], [0.0, 0.0, 0.0]]))


def test_sequence_ratio_of_a_runaway_sequence_stays_finite():
    logps = leaf([[50.0, 70.0], [-300.0, -300.0]])
    ratio = losses.sequence_ratio(logps, torch.zeros(2, 2), torch.ones(2, 2))
    ratio.sum().backward()
    close(ratio.detach(), torch.tensor([math.exp(10.0), 0.0]))
    assert logps.grad.isfinite().all()


def test_equal_log_probs_give_ratios_of_exactly_one_no_clipping_and_no_kl():
    logps, _, mask, advantages = off_policy_batch()
    logps = logps.detach()
    ratio = losses.sequence_ratio(logps, logps.clone(), mask)
    assert torch.equal(ratio, torch.ones(4))
    assert torch.equal(losses.token_ratio(logps, logps.clone()), torch.ones(4, 5))
    assert torch.equal(losses.gspo_token_ratio(logps, logps.clone(), mask), torch.ones(4, 5))
    stats = losses.clip_stats(ratio, advantages, losses.outside(ratio, 3e-4, 4e-4), mask.any(1))
    assert stats["clip_fraction"] == 0 and stats["out_of_range"] == 0 and stats["ratio_max"] == 1
    assert not any(losses.kl_estimate(logps, logps.clone(), kind).any() for kind in KINDS)


@pytest.mark.parametrize("of", ["sequences", "tokens", "tokens with advantages of their own"])
def test_clipped_surrogate_by_hand(of):
    ratio, advantages, value, slope = torch.tensor(CLIP_CASES).T
    if of != "sequences":
        # as many as sequences: a broadcast along the wrong axis would pass but for the values
        ratio, value, slope = (x[:, None].expand(8, 8) for x in (ratio, value, slope))
    if of == "tokens with advantages of their own":
        advantages = advantages[:, None].expand(8, 8)
    ratio = ratio.clone().requires_grad_()
    surrogate = losses.clipped_surrogate(ratio, advantages, LOW, HIGH)
    surrogate.sum().backward()
    close(surrogate.detach(), value)
    close(ratio.grad, slope)


def stats_of(ratio, advantages, low, high, mask, **kwargs) -> list[float]:
    stats = losses.clip_stats(ratio, advantages, losses.outside(ratio, low, high), mask, **kwargs)
    assert not any(value.requires_grad for value in stats.values())
    return [stats[name].item() for name in ("clip_fraction", "out_of_range", "ratio_max")]


@pytest.mark.parametrize("masked", [9.0, NAN, INF])
def test_clip_stats_count_sequences_or_tokens_and_never_read_masked_ones(masked):
    ratio = torch.tensor([1.5, 1.4, 1.5, 1.5, 0.5, 0.5, 0.5, 1.1, 0.9, 1.0, masked])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    mask = torch.tensor([1] * 10 + [0])
    # active: 3 (above, A > 0) and 2 (below, A < 0) of 10; outside: the first 7
    assert stats_of(ratio, advantages, LOW, HIGH, mask) == pytest.approx([0.5, 0.7, 1.5])
    ratio = leaf([[1.5, 1.0, 0.5], [0.5, 1.5, masked]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    # active: (0, 0) and (1, 0) of 5; outside: these and (0, 2), (1, 1)
    assert stats_of(ratio, torch.tensor([1.0, -1.0]), LOW, HIGH, mask) == pytest.approx([0.4, 0.8, 1.5])
    nothing = torch.tensor([False])
    assert stats_of(torch.tensor([masked]), torch.tensor([1.0]), LOW, HIGH, nothing) == [0.0, 0.0, 0.0]


# ratio, advantage, plain clipped value, value with a dual clip of 3, slope of the latter
DUAL_CASES = [(5.0, -1.0, -5.0, -3.0, 0.0), (2.0, -1.0, -2.0, -2.0, -1.0), (5.0, 1.0, 1.2, 1.2, 0.0),
              (0.5, -2.0, -1.6, -1.6, 0.0), (5.0, 0.0, 0.0, 0.0, 0.0), (1.0, -2.0, -2.0, -2.0, -2.0)]  # fmt: skip


def test_dual_clip_holds_large_ratios_of_bad_tokens():
    ratio, advantages, plain, value, slope = torch.tensor(DUAL_CASES).T
    ratio = ratio.clone().requires_grad_()
    for shape in ((6,), (6, 1)):
        surrogate = losses.clipped_surrogate(ratio.view(shape), advantages, 0.2, 0.2)
        clipped = losses.dual_clip(surrogate, advantages, 3.0)
        close(surrogate.detach(), plain.view(shape))
        close(clipped.detach(), value.view(shape))
        close(torch.autograd.grad(clipped.sum(), ratio)[0], slope)
    assert stats_of(ratio, advantages, 0.2, 0.2, torch.ones(6))[0] == pytest.approx(2 / 6)
    assert stats_of(ratio, advantages, 0.2, 0.2, torch.ones(6), dual_clip=3.0)[0] == pytest.approx(3 / 6)


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.0, 1.0), (4.9, 4.9), (7.0, 5.0)])
@pytest.mark.parametrize("advantage", [-2.0, 0.5])
def test_cispo_weighs_the_gradient_of_every_token_by_its_capped_ratio(ratio, weight, advantage):
    logps = leaf([[-1.0, -2.0]])
    ratios = losses.token_ratio(logps, logps.detach() - math.log(ratio))
    losses.cispo_surrogate(logps, ratios, torch.tensor([advantage]), 5.0).sum().backward()
    close(logps.grad, torch.tensor([[weight * advantage] * 2]))


@pytest.mark.parametrize(("epsilon", "num_clipped"), [(10.0, 0), (0.05, 4)])
def test_gspo_gradient_of_a_token_is_ratio_times_advantage_over_group_and_length(epsilon, num_clipped):
    logps, old_logps, mask, advantages = off_policy_batch()
    ratio, clipped = (((logps.detach() - old_logps) * mask).sum(1) / mask.sum(1)).exp(), []
    for sign in (1, -1):  # what is clipped with one sign is not with the other
        A = sign * advantages
        clipped.append(((A > 0) & (ratio > 1 + epsilon)) | ((A < 0) & (ratio < 1 - epsilon)))
        weights = torch.where(clipped[-1], 0.0, ratio * A) / (4 * mask.sum(1))
        close(gradient_of("gspo", epsilon, sign=sign)[1], -weights[:, None] * mask)
    assert sum(clipped).tolist() == [num_clipped / 4] * 4


def test_on_policy_gspo_grpo_and_cispo_have_the_same_gradient():
    gradients = [gradient_of(kind, 0.2, on_policy=True)[1] for kind in ("gspo", "seq_mean", "cispo")]
    close(gradients[1], gradients[0])
    close(gradients[2], gradients[0])
    # -A_i / (G |y_i|): the first token of the second row has 0.5 / (4 * 5)
    assert gradients[0][1, 0].item() == pytest.approx(0.025)
    assert (gradient_of("gspo")[1] - gradient_of("seq_mean")[1]).abs().max() > 1e-2  # off-policy they differ


@pytest.mark.parametrize("epsilon", [10.0, 0.05, 3e-4], ids=["no clip", "some clipped", "paper"])
def test_gspo_token_equals_gspo_when_a_sequence_has_one_advantage(epsilon):
    close(gradient_of("gspo_token", epsilon), gradient_of("gspo", epsilon))
    # but it takes one per token
    logps, old_logps, advantages = leaf([[-1.0, -2.0]]), torch.tensor([[-1.2, -1.6]]), torch.tensor([[1.0, -3.0]])
    loss_of("gspo_token", logps, old_logps, torch.ones(1, 2), advantages, 10.0, 1).backward()
    s = math.exp(-0.1)  # mean of 0.2 and -0.4; gradient -s A_t / |y|
    close(logps.grad, torch.tensor([[-s / 2, 3 * s / 2]]))


@pytest.mark.parametrize("fill", [(NAN, 0.0), (0.0, NAN), (-INF, 0.0), (0.0, -INF), (-INF, -INF)], ids=str)
@pytest.mark.parametrize("kind", ["gspo", "gspo_token"])
def test_what_stands_at_masked_positions_does_not_matter(kind, fill):
    logps, old_logps, mask, advantages = off_policy_batch()
    logps = logps.detach().masked_fill(~mask, fill[0]).requires_grad_()
    loss = loss_of(kind, logps, old_logps.masked_fill(~mask, fill[1]), mask, advantages, 10.0, 4)
    loss.backward()
    expected, gradient = gradient_of(kind)
    assert torch.equal(loss, expected) and torch.equal(logps.grad, gradient)  # never read; NaN is equal to nothing


def test_a_sequence_without_tokens_has_ratio_one_and_no_gradient():
    logps, old_logps = leaf([[-1.0, -2.0], [NAN, -INF]]), torch.tensor([[-1.2, -1.6], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [0, 0]])
    assert losses.sequence_ratio(logps, old_logps, mask)[1] == 1.0
    loss = loss_of("gspo", logps, old_logps, mask, torch.tensor([1.0, 5.0]), LOW, 1)
    loss.backward()
    close(loss.detach(), torch.tensor(-math.exp(-0.1)))
    close(logps.grad, torch.tensor([[-math.exp(-0.1) / 2] * 2, [0.0, 0.0]]))
    for kind in ("gspo", *MODES):  # nor has a batch without any a loss
        logps = leaf([[-1.0, -2.0], [-1.0, -3.0]])
        loss = loss_of(kind, logps, torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2), LOW, 1)
        loss.backward()
        assert loss.item() == 0.0 and torch.equal(logps.grad, torch.zeros(2, 2))


def test_masked_mean_counts_masked_in_positions_only():
    mean = losses.masked_mean(torch.tensor([[1.0, 2.0, 9.0], [4.0, NAN, INF], [7.0, 7.0, 7.0]]),
                              torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]))  # fmt: skip
    assert torch.equal(mean, torch.tensor([1.5, 4.0, 0.0]))
    # added up in fp32, exactly: bf16 has steps of 4 there, and the sum 750.75 would be 752
    mean = losses.masked_mean(torch.full((1, 1001), 0.75, dtype=torch.bfloat16), torch.ones(1, 1001))
    assert mean.dtype == torch.float32 and mean.item() == 0.75


@pytest.mark.parametrize(("difference", "values", "slopes"), [
    (-1.0, (-1.0, 0.5, math.e - 2), (1.0, -1.0, 1 - math.e)),
    (0.0, (0.0, 0.0, 0.0), (1.0, 0.0, 0.0)),
    (1.0, (1.0, 0.5, 1 / math.e), (1.0, 1.0, 1 - 1 / math.e)),
])  # fmt: skip
def test_kl_estimates_by_hand(difference, values, slopes):
    for kind, value, slope in zip(KINDS, values, slopes, strict=True):
        logps = leaf([[-2.0 + difference]])
        estimate = losses.kl_estimate(logps, torch.tensor([[-2.0]]), kind)
        estimate.sum().backward()
        close(estimate.detach(), torch.tensor([[value]]))
        close(logps.grad, torch.tensor([[slope]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [-200.0, -20.0, 20.0, 200.0, -INF])
@pytest.mark.parametrize("kind", KINDS)
def test_kl_of_log_probs_far_apart_is_finite_with_finite_gradient(kind, gap, dtype):
    logps = torch.tensor([[gap]], dtype=dtype, requires_grad=True)
    kl = losses.kl_estimate(logps, torch.zeros(1, 1, dtype=dtype), kind)
    kl.sum().backward()
    d = math.copysign(20.0, gap)  # held within +-20
    expected = {"k1": d, "k2": 200.0, "k3": math.exp(-d) + d - 1}[kind]
    close(kl.detach(), torch.tensor([[expected]]))  # its dtype is fp32
    assert logps.grad.isfinite().all()


def test_expected_kl_gradients_and_values_by_enumeration():
    theta, reference = leaf([0.3, -0.8, 1.1]), torch.tensor([-0.5, 0.4, 0.6]).log_softmax(0)
    logps = theta.log_softmax(0)

    def gradient(loss):
        return torch.autograd.grad(loss, theta, retain_graph=True)[0]

    kl = (logps.exp() * (logps - reference)).sum()
    reverse, forward = gradient(kl), gradient((reference.exp() * (reference - logps)).sum())
    assert (reverse - forward).abs().max() > 1e-2  # or no test could tell them apart
    # as a loss on tokens drawn from pi: sum over tokens of pi(a), held fixed, times the gradient of the estimate
    for kind, expected in zip(KINDS, (torch.zeros(3), reverse, forward), strict=True):
        estimate = losses.kl_estimate(logps[None], reference[None], kind)[0]
        close(gradient((logps.exp().detach() * estimate).sum()), expected)
        if kind != "k2":  # the values of the others are unbiased
            close((logps.exp() * estimate).sum(), kl)
    # where tokens come from `old`, the ratio times k3 has the gradient wanted, that of KL(pi || ref)
    for moved in (torch.zeros(3), torch.tensor([0.7, -0.2, 0.1])):
        old = (theta.detach() + moved).log_softmax(0)
        term = losses.token_ratio(logps, old) * losses.kl_estimate(logps, reference, "k3")
        close(gradient((old.exp() * term).sum()), reverse)


@pytest.mark.parametrize(("mode", "lengths", "denominator", "expected"), [
    ("seq_mean", [2, 8], 2, 2.0),  # (1 + 3) / 2
    ("token_mean", [2, 8], 10, 2.6),  # (2 * 1 + 8 * 3) / 10
    ("constant", [2, 8], 2 * 16, 26 / 32),  # two sequences, length constant 16
    ("token_mean", [0, 4], 4, 3.0),  # masked-out completions do not dilute it
])  # fmt: skip
def test_aggregate_by_hand_and_cut_in_two(mode, lengths, denominator, expected):
    # a sequence of tokens of value 1 and one of tokens of value 3; what is masked out is never read
    lengths = torch.tensor(lengths)[:, None]
    mask = torch.arange(8) < lengths
    for masked in (9.0, NAN, INF, -INF):
        values = torch.tensor([1.0, 3.0])[:, None].expand(2, 8).masked_fill(~mask, masked).requires_grad_()
        total = losses.aggregate(values, mask, mode, denominator)
        assert total.item() == pytest.approx(expected)
        total.backward()
        close(values.grad, mask / (denominator * (lengths if mode == "seq_mean" else 1.0)))
        parts = [losses.aggregate(values[i : i + 1], mask[i : i + 1], mode, denominator) for i in range(2)]
        assert sum(parts).item() == pytest.approx(expected)


@pytest.mark.parametrize("cut", [(1, 1, 1, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("kind", ["gspo", *MODES])
def test_loss_and_gradient_do_not_depend_on_micro_batches(kind, cut):
    results = []
    for sizes in ((4,), cut):
        logps, *batch = off_policy_batch()
        denominator = {"token_mean": int(batch[1].sum()), "constant": 4 * 5}.get(kind, 4)
        parts = zip(*(x.split(sizes) for x in (logps, *batch)), strict=True)
        total = sum(loss_of(kind, *part, LOW, denominator) for part in parts)
        total.backward()
        results.append((total.detach(), logps.grad))
    close(results[1], results[0])


@pytest.mark.parametrize(("call", "refused"), [
    (lambda x: losses.kl_estimate(x, x, "k4"), "'k4'.*k1, k2, k3"),
    (lambda x: losses.aggregate(x, x, "mean", 1), "'mean'.*seq_mean, seq_sum, token_mean, constant"),
    (lambda x: losses.weights(x, "constant", 1), "'constant'.*seq_mean, token_mean"),
])  # fmt: skip
def test_an_unknown_kl_estimator_or_aggregation_mode_is_refused(call, refused):
    with pytest.raises(ValueError, match=refused):
        call(torch.zeros(1, 1))
