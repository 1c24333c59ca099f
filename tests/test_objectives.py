"""Tests of common/maths/objectives.py: each objective against its formula, token by token in plain Python.

The formulas below take one token or sequence at a time and know nothing of tensors, masks or broadcasting; gradients
are those of the papers, not of autograd. A handful of fp32 operations of size 1 are compared: 1e-5 is 84 roundings.
"""

import math
from typing import get_args

import pytest
import torch

from common.base import settings
from common.maths import losses, objectives

close = torch.testing.assert_close
NAN, INF = math.nan, math.inf
TOKENS = ("grpo", "dapo", "dr_grpo", "cispo", "dppo", "sapo")
SEQUENCES = ("gspo", "gspo_token", "luspo", "gmpo", "vespo")
ALL = (*TOKENS, *SEQUENCES)
# log-probabilities now and before, of sequences of 3, 1, 4 and 2 tokens: ratios from 0.4 to 30, probabilities that
# move by up to 0.6
NOW = [[-0.1, -2.0, -0.9], [-0.7], [-3.0, -0.2, -0.5, -1.0], [-0.60, -1.1]]
OLD = [[-0.55, -2.1, -0.4], [-0.7], [-6.4, -0.65, -3.5, -0.15], [-0.61, -1.1]]
ADVANTAGES = [1.5, -0.5, -1.0, 0.7]


def batch(fill: float = NAN, sign: float = 1.0):
    """The sequences above as tensors; `fill` stands at masked-out positions."""
    logps, old_logps = (torch.full((4, 5), fill) for _ in range(2))
    mask = torch.zeros(4, 5, dtype=torch.bool)
    for i, (now, old) in enumerate(zip(NOW, OLD, strict=True)):
        logps[i, : len(now)], old_logps[i, : len(old)], mask[i, : len(now)] = torch.tensor(now), torch.tensor(old), True
    return logps.requires_grad_(), old_logps, sign * torch.tensor(ADVANTAGES), mask


def clip(x, low, high):
    return min(max(x, low), high)


def sequence_ratio(now, old):
    return math.exp(sum(a - b for a, b in zip(now, old, strict=True)) / len(now))


def expected(name, now, old, A, t, low, high):
    """Surrogate of token t, and the gradient of the sum over tokens with respect to its log-probability."""
    r, s, n = math.exp(now[t] - old[t]), sequence_ratio(now, old), len(now)
    if name in ("grpo", "dapo", "dr_grpo"):
        off = (A > 0 and r > 1 + high) or (A < 0 and r < 1 - low)
        return min(r * A, clip(r, 1 - low, 1 + high) * A), 0.0 if off else r * A
    if name in ("gspo", "gspo_token", "luspo"):  # every token pushes the mean log-ratio by 1 / n, at all n tokens
        off = (A > 0 and s > 1 + high) or (A < 0 and s < 1 - low)
        return min(s * A, clip(s, 1 - low, 1 + high) * A), 0.0 if off else s * A
    if name == "cispo":
        weight = clip(r, 1 - low, 1 + high)
        return weight * A * now[t], weight * A
    if name == "dppo":
        moved = math.exp(now[t]) - math.exp(old[t])
        off = moved > high if A > 0 else moved < -low
        return (0.0, 0.0) if off else (min(r, 20) * A, min(r, 20) * A)
    if name == "sapo":
        tau = high if A > 0 else low
        sigma = 1 / (1 + math.exp(-tau * (r - 1)))
        return 4 / tau * sigma * A, 4 * sigma * (1 - sigma) * r * A
    if name == "gmpo":
        gaps = [a - b for a, b in zip(now, old, strict=True)]
        held = [min(d, high) if A > 0 else max(d, -low) for d in gaps]
        mean = math.exp(sum(held) / n)
        return mean * A, mean * A if held[t] == gaps[t] else 0.0
    if name == "vespo":
        w = math.exp(sum(a - b for a, b in zip(now, old, strict=True)))
        k, rate = (2.0, high) if A >= 0 else (3.0, low)
        weight = w**k * math.exp(rate * (1 - w))
        return weight * A * now[t], weight * A
    raise AssertionError(name)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("fill", [0.0, NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_value_and_gradient_of_every_token_are_those_of_the_paper(name, fill, sign):
    member = objectives.FAMILY[name]
    logps, old_logps, advantages, mask = batch(fill, sign)
    surrogate, ratio, outside = member.function(logps, old_logps, advantages, mask, *member.numbers)
    (gradient,) = torch.autograd.grad(torch.where(mask, surrogate, 0.0).sum(), logps)
    for i, (now, old, A) in enumerate(zip(NOW, OLD, advantages.tolist(), strict=True)):
        for t in range(len(now)):
            value, slope = expected(name, now, old, A, t, *member.numbers)
            assert surrogate[i, t].item() == pytest.approx(value, rel=1e-5, abs=1e-6), (i, t)
            assert gradient[i, t].item() == pytest.approx(slope, rel=1e-5, abs=1e-6), (i, t)
    assert not gradient[~mask].any() and all(part.shape == ratio.shape for part in outside)


@pytest.mark.parametrize(("names", "mode"), [
    (("grpo", "gspo", "gspo_token", "gmpo", "sapo"), "seq_mean"), (("dapo", "cispo", "dppo", "vespo"), "token_mean"),
])  # fmt: skip
def test_where_nothing_has_moved_they_are_the_same_policy_gradient(names, mode):
    gradients = []
    for name in names:
        member = objectives.FAMILY[name]
        logps, _, advantages, mask = batch(0.0)
        surrogate, ratio, outside = member.function(logps, logps.detach(), advantages, mask, *member.numbers)
        loss = losses.aggregate(-surrogate, mask, member.aggregation, 4 if mode == "seq_mean" else 10)
        gradients.append(torch.autograd.grad(loss, logps)[0])
        assert member.aggregation == mode and (ratio == 1).all() and not any(part.any() for part in outside)
    lengths = mask.sum(1, keepdim=True) if mode == "seq_mean" else 1
    plain = -torch.tensor(ADVANTAGES)[:, None] * mask / (lengths * (4 if mode == "seq_mean" else 10))
    for gradient in gradients:
        close(gradient, plain)


def test_luspo_weighs_the_gradient_of_gspo_by_length():
    found = []
    for name in ("gspo", "luspo"):
        logps, old_logps, advantages, mask = batch(0.0)
        surrogate, _, _ = objectives.FAMILY[name].function(logps, old_logps, advantages, mask, 9.0, 9.0)
        loss = losses.aggregate(-surrogate, mask, objectives.FAMILY[name].aggregation, 4)
        found.append((loss.item(), torch.autograd.grad(loss, logps)[0]))
    close(found[1][1], found[0][1] * mask.sum(1, keepdim=True))
    of_sequences = [-A * sequence_ratio(now, old) for now, old, A in zip(NOW, OLD, ADVANTAGES, strict=True)]
    assert found[0][0] == pytest.approx(sum(of_sequences) / 4)
    lengths = [len(now) for now in NOW]
    assert found[1][0] == pytest.approx(sum(x * n for x, n in zip(of_sequences, lengths, strict=True)) / 4)


@pytest.mark.parametrize("name", ["grpo", "cispo", "dppo", "sapo", "gspo_token"])
def test_a_token_may_have_an_advantage_of_its_own(name):
    member = objectives.FAMILY[name]
    logps, old_logps, _, mask = batch(0.0)
    own = torch.linspace(-1, 1, 20).view(4, 5)
    surrogate, _, _ = member.function(logps, old_logps, own, mask, *member.numbers)
    for i, (now, old) in enumerate(zip(NOW, OLD, strict=True)):
        for t in range(len(now)):
            value, _ = expected(name, now, old, own[i, t].item(), t, *member.numbers)
            assert surrogate[i, t].item() == pytest.approx(value, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["gspo", "luspo", "gmpo", "vespo"])
def test_a_loss_with_one_ratio_per_sequence_refuses_advantages_of_tokens(name):
    logps, old_logps, _, mask = batch()
    with pytest.raises(ValueError, match=r"advantages of shape \[4, 5\].*gspo_token"):
        objectives.FAMILY[name].function(logps, old_logps, torch.zeros(4, 5), mask, 0.2, 0.2)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("gap", [300.0, -300.0, INF, -INF])
def test_a_runaway_token_leaves_value_and_gradient_finite(name, gap):
    member = objectives.FAMILY[name]
    for sign in (1.0, -1.0):
        logps = torch.tensor([[-1.0, -300.0 if gap < 0 else -1.0]], requires_grad=True)
        old_logps = torch.tensor([[-1.0, -1.0 - max(gap, 0.0)]]) if math.isfinite(gap) else torch.tensor([[-1.0, -gap]])
        surrogate, _, _ = member.function(logps, old_logps, torch.tensor([sign]), torch.ones(1, 2), *member.numbers)
        (gradient,) = torch.autograd.grad(surrogate.sum(), logps)
        assert gradient.isfinite().all() and surrogate.isfinite().all()


# what counts as clipped: above and below the range, of the tokens or sequences of the batch, for A as above
NONE, FALLEN = [0] * 5, [[0, 0, 1, 0, 0], [0] * 5, [0, 0, 0, 1, 0], [0] * 5]
OUTSIDE = {
    "grpo": ([[1, 0, 0, 0, 0], NONE, [1, 1, 1, 0, 0], NONE], FALLEN),
    "dppo": ([[1, 0, 0, 0, 0], NONE, [0, 1, 1, 0, 0], NONE], FALLEN),
    "gmpo": ([[1, 0, 0, 0, 0], NONE, [1, 1, 1, 0, 0], NONE], FALLEN),
    "sapo": ([NONE, NONE, [1, 0, 1, 0, 0], NONE], [NONE] * 4),
    "gspo": ([1, 0, 1, 1], [0, 0, 0, 0]),
    "vespo": ([0, 0, 1, 0], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_counts_as_outside_of_the_range(name):
    member = objectives.FAMILY[name]
    logps, old_logps, advantages, mask = batch(0.0)
    _, ratio, outside = member.function(logps, old_logps, advantages, mask, *member.numbers)
    assert [part.int().tolist() for part in outside] == list(map(list, OUTSIDE[name]))
    trained = mask if ratio.dim() == 2 else mask.any(1)
    (above, below), A = outside, losses.align(advantages, ratio)
    clipped = ((above & (A > 0)) | (below & (A < 0))) & trained
    stats = losses.clip_stats(ratio, advantages, outside, trained)
    assert stats["clip_fraction"].item() == pytest.approx(clipped.sum().item() / trained.sum().item())


def test_the_options_are_the_family():
    assert set(get_args(settings.Loss)) == set(objectives.FAMILY) == set(ALL)


# log of pi_old / pi_sampler 0.5, -1, 0.2 -> 1.649, 0.368, 1.221; the sequence: e^-0.3 = 0.741
@pytest.mark.parametrize(("kind", "cap", "weights"), [
    ("tis", 1.5, [1.5, 0.367879, 1.221403]), ("mis", 1.5, [0.0, 0.0, 1.221403]),
    ("mis", 3.0, [1.648721, 0.367879, 1.221403]),
    ("seq_tis", 2.0, [0.740818] * 3), ("seq_mis", 2.0, [0.740818] * 3), ("seq_mis", 1.3, [0.0] * 3),
])  # fmt: skip
def test_sampler_weights_by_hand(kind, cap, weights):
    sampler = torch.tensor([[-1.0, -2.0, -0.5, NAN], [-1.0, -1.0, -1.0, -1.0]])
    old = (sampler + torch.tensor([0.5, -1.0, 0.2, 7.0])).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])
    found = losses.sampler_weight(old, sampler, mask, kind, cap)
    assert found[0, :3].tolist() == pytest.approx(weights, rel=1e-5)
    assert not found.requires_grad and found.isfinite().all()


def test_a_sampler_that_agrees_changes_nothing_and_another_kind_is_refused():
    logps, _, _, mask = batch(0.0)
    for kind in ("tis", "mis", "seq_tis", "seq_mis"):
        assert torch.equal(losses.sampler_weight(logps, logps.detach(), mask, kind, 2.0), torch.ones(4, 5))
    with pytest.raises(ValueError, match="'icepop': must be one of tis, mis"):
        losses.sampler_weight(logps, logps, mask, "icepop", 2.0)
