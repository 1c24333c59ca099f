"""Tests of common/maths/divergences.py: numbers by hand, limits, and gradients against double precision."""

import math

import pytest
import torch
from bounds import rounding

from common.maths import divergences
from common.maths.divergences import generalized_jsd, topk_divergence

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
TEACHER, STUDENT = (torch.tensor(p).log() for p in ([0.9, 0.1], [0.4, 0.6]))
FORWARD, REVERSE = 0.5507, 0.7507  # 0.9 ln(0.9 / 0.4) + 0.1 ln(0.1 / 0.6); 0.4 ln(0.4 / 0.9) + 0.6 ln(0.6 / 0.1)


def logits(*shape, seed=0, size=2.0) -> torch.Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def between(logp, logq, beta) -> torch.Tensor:
    """The definition, from log-probabilities in double precision, where 0 log 0 is 0."""

    def kl(a, b):
        return torch.where(a > -math.inf, a.exp() * (a - b), 0.0).sum(-1)

    if beta in (0.0, 1.0):
        return kl(logp, logq) if beta == 0.0 else kl(logq, logp)
    logm = (beta * logp.exp() + (1 - beta) * logq.exp()).log()
    return beta * kl(logp, logm) + (1 - beta) * kl(logq, logm)


def exact(student, teacher, beta, temperature=1.0) -> torch.Tensor:
    """Over the whole vocabulary, in double precision."""
    return between(*((x.double() / temperature).log_softmax(-1) for x in (teacher, student)), beta)


def top(teacher, k, temperature=1.0) -> tuple[torch.Tensor, ...]:
    """What a server says of its logits: ids, log-probabilities, log of the mass outside."""
    logp = (teacher.double() / temperature).log_softmax(-1)
    logps, ids = logp.topk(k, dim=-1)
    outside = logp.scatter(-1, ids, -math.inf).logsumexp(-1)
    return ids, logps.float(), outside.float()


def exact_top(student, ids, logps, tail, beta, temperature=1.0) -> torch.Tensor:
    """Over the top k and a tail, in double precision."""
    logq = (student.double() / temperature).log_softmax(-1)
    outside = logq.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    logq_A = torch.cat([logq.gather(-1, ids), outside], -1)
    return between(torch.cat([logps, tail[..., None]], -1).double(), logq_A, beta)


def error_of(vocabulary=64, lowest=32.0) -> float:
    """How far rounding moves a divergence: softmax and tail sum V probabilities each, with the relative error of a sum
    as absolute error of its logarithm; a logarithm, its differences and `logaddexp` are rounded at its own size."""
    return rounding(2 * vocabulary + 8) + rounding(16, lowest)


def assert_close(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=error_of())


@pytest.mark.parametrize(("student", "teacher", "values"), [
    (STUDENT, TEACHER, (FORWARD, 0.0499, 0.1484, 0.0628, REVERSE)),
    (TEACHER, STUDENT, (REVERSE, 0.0628, 0.1484, 0.0499, FORWARD)),
])  # fmt: skip
def test_numbers_by_hand(student, teacher, values):
    for beta, expected in zip(BETAS, values, strict=True):  # to four digits; and with one token and a tail
        assert generalized_jsd(student, teacher, beta).item() == pytest.approx(expected, abs=5e-5)
        assert topk_divergence(student, *top(teacher, 1), beta).item() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("beta", "temperature", "message"), [
    (-0.1, 1.0, "beta = -0.1: must be in"), (math.nan, 1.0, "beta = nan"), ("0.5", 1.0, "beta = '0.5'"),
    (1.5, 1.0, "beta = 1.5"), (0.5, math.inf, "temperature = inf: must be above 0, finite"),
    (0.5, math.nan, "temperature = nan"), (0.5, 1e-40, "at least 1e-06"), (0.5, None, "temperature = None"),
])  # fmt: skip
def test_what_is_not_defined_is_refused(beta, temperature, message):
    with pytest.raises(ValueError, match=message):
        generalized_jsd(STUDENT, TEACHER, beta, temperature)
    with pytest.raises(ValueError, match=message):
        topk_divergence(STUDENT, *top(TEACHER, 1), beta, temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
def test_of_equal_logits_it_is_0_also_in_a_large_vocabulary(beta, dtype):
    V = 20_000
    same = logits(4, V, size=3.0).to(dtype)  # computed with in fp32, whatever their own dtype is
    lowest = -same.double().log_softmax(-1).min().item()
    whole = generalized_jsd(same, same, beta), *divergences.full(same, same, torch.zeros(4).long(), beta, 1.0)[0][:3]
    # both sides are rounded alike: a KL is 0 exactly, and between the ends there is the rounding of log M
    assert max(value.abs().max() for value in whole) <= (0.0 if beta in (0.0, 1.0) else rounding(16, lowest))
    # the teacher's numbers come from elsewhere: what the student's sums over V err by stays
    assert topk_divergence(same, *top(same, 64), beta).abs().max() <= error_of(V, lowest)


@pytest.mark.parametrize("beta", BETAS)
def test_of_different_sizes_the_shared_ids_count(beta):
    wide, narrow = logits(6, 50), logits(6, 40, seed=1)
    assert_close(generalized_jsd(wide, narrow, beta), exact(wide[:, :40], narrow, beta))
    assert_close(generalized_jsd(narrow, wide, beta), exact(narrow, wide[:, :40], beta))
    wide.requires_grad_()
    generalized_jsd(wide, narrow, beta).sum().backward()
    assert wide.grad[:, :40].any() and not wide.grad[:, 40:].any()


@pytest.mark.parametrize("side", ["teacher", "student", "both"])
@pytest.mark.parametrize("beta", BETAS)
def test_tokens_without_probability_give_finite_values_and_gradients(beta, side):
    student, teacher, ids = logits(6, 30), logits(6, 30, seed=1), torch.full((6,), 4)
    for x in {"teacher": [teacher], "student": [student], "both": [student, teacher]}[side]:
        x[:, 3:9] = -math.inf
    said = top(teacher, 26)  # two of those without probability among them
    for found in (divergences.full(student, teacher, ids, beta, 1.0),
                  divergences.topk(student, *said, torch.zeros(6), ids, beta, 1.0)):  # fmt: skip
        assert all(x.isfinite().all() for x in found)
    student.requires_grad_()
    for value in (generalized_jsd(student, teacher, beta), topk_divergence(student, *said, beta)):
        (grad,) = torch.autograd.grad(value.sum(), student)
        assert value.isfinite().all() and grad.isfinite().all()
        if side == "both" or 0 < beta < 1 or (side, beta) in (("teacher", 0.0), ("student", 1.0)):
            assert (value.double() <= exact(student, teacher, beta) + error_of()).all()
        else:  # infinite by definition: large
            assert value.min() > 10 and value.max() <= 1e4
    assert_close(generalized_jsd(student, teacher, 0.5), exact(student, teacher, 0.5))


def test_a_tail_without_mass_is_a_small_one():
    student, teacher = logits(6, 30), logits(6, 30, seed=1)
    ids, logps, tail = top(teacher, 30)
    assert (tail == -math.inf).all()
    for beta in BETAS:
        value = topk_divergence(student, ids, logps, tail, beta)
        assert torch.equal(value, topk_divergence(student, ids, logps, tail.clamp(min=math.log(1e-9)), beta))
        assert_close(value, generalized_jsd(student, teacher, beta))  # with all tokens it is the full one
        # of the student the tail holds a part, of the teacher nothing
        part = topk_divergence(student, ids[:, :5], logps[:, :5].log_softmax(-1), tail, beta)
        assert part.isfinite().all() and part.min() > 0


def test_a_small_tail_is_summed_and_not_what_rounding_leaves_of_1():
    student = logits(50, 30, size=1.0)
    ids = student.topk(10).indices
    student = student.scatter_add(-1, ids, torch.full((50, 10), 11.0))
    expected = student.double().log_softmax(-1).scatter(-1, ids, -math.inf).logsumexp(-1)
    assert expected.max() < math.log(1e-4) and expected.min() > math.log(1e-6)  # 1 minus the rest: off by 6e-4 to 0.06
    assert_close(divergences.tail_logp(divergences.log_softmax(student, 1.0), ids), expected)


def test_gradients_reach_the_student_only():
    student, teacher = logits(3, 20).requires_grad_(), logits(3, 20, seed=1).requires_grad_()
    generalized_jsd(student, teacher, 0.5).sum().backward()
    assert student.grad.any() and teacher.grad is None
    ids, logps, tail = top(teacher.detach(), 4)
    topk_divergence(student, ids, logps.requires_grad_(), tail.requires_grad_(), 0.5).sum().backward()
    assert logps.grad is None and tail.grad is None


def check(values, grad, student, definition, beta, temperature, token_logps, ids, plain):
    """Values and gradient against those of a definition in double precision, and against the plain function."""
    leaf = student.double().requires_grad_()
    kls = [definition(leaf, b) for b in (beta, 0.0, 1.0)]
    (expected,) = torch.autograd.grad(kls[0].sum(), leaf)
    logq = (student.double() / temperature).log_softmax(-1)
    entropy = -(logq.exp() * logq).sum(-1)
    assert_close(values, torch.stack([*kls, logq[range(7), ids], token_logps, entropy]).detach())
    assert_close(grad, expected)
    found = plain(student.requires_grad_())
    assert found.dtype == torch.float32
    assert_close(found, kls[0])
    assert_close(torch.autograd.grad(found.sum(), student)[0], expected)  # what autograd makes of it


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("beta", BETAS)
def test_gradient_over_the_vocabulary(beta, temperature):
    student, teacher, ids = logits(7, 30), logits(7, 30, seed=1), torch.arange(7) * 3
    values, grad = divergences.full(student, teacher, ids, beta, temperature)
    logp = (teacher.double() / temperature).log_softmax(-1)
    check(values, grad, student, lambda x, b: exact(x, teacher, b, temperature), beta, temperature,
          logp[range(7), ids], ids, lambda x: generalized_jsd(x, teacher, beta, temperature))  # fmt: skip
    many = generalized_jsd(student.expand(2, 7, 30), teacher.expand(2, 7, 30), beta, temperature)
    assert_close(many, values[0].expand(2, 7))  # any number of dimensions


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("k", [1, 5, 29])
@pytest.mark.parametrize("beta", BETAS)
def test_gradient_over_the_top_k(beta, k, temperature):
    student, teacher, ids = logits(7, 30), logits(7, 30, seed=1), torch.arange(7) * 3
    said, token_logps = top(teacher, k, temperature), -torch.arange(7.0)
    values, grad = divergences.topk(student, *said, token_logps, ids, beta, temperature)
    check(values, grad, student, lambda x, b: exact_top(x, *said, b, temperature), beta, temperature, token_logps, ids,
          lambda x: topk_divergence(x, *said, beta, temperature))  # fmt: skip


@pytest.mark.parametrize("k", [1, 4, 16, 60])
@pytest.mark.parametrize("beta", BETAS)
def test_it_is_never_above_the_full_one(beta, k):
    sizes = torch.linspace(0.01, 12.0, 100)[:, None]
    student, teacher = logits(100, 64) * sizes, logits(100, 64, seed=1) * sizes.flip(0)
    said = top(teacher, k)
    sure = student.scatter_add(-1, said[0], torch.full((100, k), 40.0))  # next to nothing outside the top k
    for one in (student, sure):
        value, whole = topk_divergence(one, *said, beta), generalized_jsd(one, teacher, beta)
        lowest = -torch.minimum(one.log_softmax(-1), teacher.log_softmax(-1)).amin(1)
        error = torch.tensor([error_of(64, size) for size in lowest.tolist()])
        assert (value <= whole + error).all() and (value >= -error).all()
    assert k == 60 or (topk_divergence(student, *said, beta) < 0.99 * generalized_jsd(student, teacher, beta)).any()
