"""Tests of common/divergences.py: numbers by hand, limits, and gradients against double precision."""

import math

import pytest
import torch

from common import divergences
from common.divergences import generalized_jsd, topk_divergence

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


def assert_close(found, expected, atol=1e-6, rtol=1e-5):
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=rtol)


# --- values ---


@pytest.mark.parametrize(("beta", "expected"), [
    (0.0, FORWARD), (0.1, 0.0499), (0.5, 0.1484), (0.9, 0.0628), (1.0, REVERSE),
])  # fmt: skip
def test_numbers_by_hand(beta, expected):
    assert generalized_jsd(STUDENT, TEACHER, beta).item() == pytest.approx(expected, abs=5e-5)
    assert topk_divergence(STUDENT, *top(TEACHER, 1), beta).item() == pytest.approx(expected, abs=5e-5)  # 1 and a tail


def test_the_student_comes_first_and_beta_0_is_the_forward_kl():
    assert generalized_jsd(TEACHER, STUDENT, 0.0).item() == pytest.approx(REVERSE, abs=5e-5)
    assert generalized_jsd(TEACHER, STUDENT, 1.0).item() == pytest.approx(FORWARD, abs=5e-5)


@pytest.mark.parametrize(("beta", "temperature", "message"), [
    (-0.1, 1.0, "beta = -0.1: must be in"), (1.5, 1.0, "beta = 1.5"), (math.nan, 1.0, "beta = nan"),
    (None, 1.0, "beta = None: must be in"), ("0.5", 1.0, "beta = '0.5'"),
    (0.5, 0.0, "temperature = 0.0: must be above 0"), (0.5, -1.0, "temperature = -1.0"), (0.5, math.nan, "= nan"),
    (0.5, math.inf, "temperature = inf: must be above 0, finite"), (0.5, 1e-40, "at least 1e-06"),
    (0.5, None, "temperature = None"),
])  # fmt: skip
def test_what_is_not_defined_is_refused(beta, temperature, message):
    for call in (
        lambda: generalized_jsd(STUDENT, TEACHER, beta, temperature),
        lambda: topk_divergence(STUDENT, *top(TEACHER, 1), beta, temperature),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("beta", BETAS)
def test_the_definition_with_a_temperature_on_both_sides(beta, temperature):
    student, teacher = logits(5, 3, 40), logits(5, 3, 40, seed=1)
    found = generalized_jsd(student, teacher, beta, temperature)
    assert found.shape == (5, 3) and found.dtype == torch.float32
    assert_close(found, exact(student, teacher, beta, temperature))
    assert_close(found, generalized_jsd(student / temperature, teacher / temperature, beta))
    assert temperature == 1.0 or not torch.allclose(found, generalized_jsd(student, teacher, beta), rtol=0.05)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_at_the_ends_it_is_a_kl_and_not_0(beta):
    student, teacher = logits(50, 10), logits(50, 10, seed=1)
    assert generalized_jsd(student, teacher, beta).min() > 0.1
    assert topk_divergence(student, *top(teacher, 3), beta).min() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
def test_of_equal_logits_it_is_0_also_in_a_large_vocabulary(beta, dtype):
    same = logits(4, 20_000, size=3.0).to(dtype)
    assert generalized_jsd(same, same, beta).abs().max() <= 1e-6
    assert divergences.full(same, same, torch.zeros(4, dtype=torch.int64), beta, 1.0)[0][:3].abs().max() <= 1e-6
    assert topk_divergence(same, *top(same, 64), beta).abs().max() <= 1e-6
    near = (same.float() + 1e-3 * logits(4, 20_000, seed=1)).to(dtype)
    for value in (generalized_jsd(same, near, beta), topk_divergence(same, *top(near, 64), beta)):
        assert value.min() >= -1e-6 and value.max() < 1e-3


@pytest.mark.parametrize("beta", BETAS)
def test_with_beta_turned_round_the_sides_can_be_exchanged(beta):
    one, other = logits(20, 30), logits(20, 30, seed=1)
    assert_close(generalized_jsd(one, other, beta), generalized_jsd(other, one, 1 - beta))


def test_near_the_ends_it_is_the_kl_times_the_weight():
    student, teacher = logits(20, 30, size=1.0), logits(20, 30, seed=1, size=1.0)
    for weight in (1e-2, 1e-3):
        for beta, end in ((weight, 0.0), (1 - weight, 1.0)):
            ratio = generalized_jsd(student, teacher, beta) / weight / generalized_jsd(student, teacher, end)
            assert (ratio - 1).abs().max() < 20 * weight


@pytest.mark.parametrize("beta", BETAS)
def test_of_different_sizes_the_shared_ids_count(beta):
    wide, narrow = logits(6, 50), logits(6, 40, seed=1)
    assert_close(generalized_jsd(wide, narrow, beta), exact(wide[:, :40], narrow, beta))
    assert_close(generalized_jsd(narrow, wide, beta), exact(narrow, wide[:, :40], beta))
    wide.requires_grad_()
    generalized_jsd(wide, narrow, beta).sum().backward()
    assert wide.grad[:, :40].any() and not wide.grad[:, 40:].any()


# --- what has no probability ---


@pytest.mark.parametrize("side", ["teacher", "student", "both"])
@pytest.mark.parametrize("beta", BETAS)
def test_tokens_without_probability_give_finite_values_and_gradients(beta, side):
    student, teacher = logits(6, 30), logits(6, 30, seed=1)
    for x in {"teacher": [teacher], "student": [student], "both": [student, teacher]}[side]:
        x[:, 3:9] = -math.inf
    ids = torch.full((6,), 4)
    values, grad = divergences.full(student, teacher, ids, beta, 1.0)
    assert values.isfinite().all() and grad.isfinite().all()
    top_ids, logps, tail = top(teacher, 26)  # two of those without probability among them
    said = top_ids, logps, tail
    values, grad = divergences.topk(student, *said, torch.zeros(6), ids, beta, 1.0)
    assert values.isfinite().all() and grad.isfinite().all()
    student.requires_grad_()
    for value in (generalized_jsd(student, teacher, beta), topk_divergence(student, *said, beta)):
        student.grad = None
        value.sum().backward()
        assert value.isfinite().all() and student.grad.isfinite().all()
        if side == "both" or 0 < beta < 1 or (side, beta) in (("teacher", 0.0), ("student", 1.0)):
            assert (value.double() <= exact(student, teacher, beta) + 1e-5).all()
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
        # of the student the tail holds a part, of the teacher nothing
        part = topk_divergence(student, ids[:, :5], logps[:, :5].log_softmax(-1), tail, beta)
        assert part.isfinite().all() and part.min() > 0


def test_a_small_tail_is_summed_and_not_what_rounding_leaves_of_1():
    student = logits(50, 30, size=1.0)
    ids = student.topk(10).indices
    student = student.scatter_add(-1, ids, torch.full((50, 10), 11.0))
    logp = student.double().log_softmax(-1)
    expected = logp.scatter(-1, ids, -math.inf).logsumexp(-1)
    assert expected.max() < math.log(1e-4) and expected.min() > math.log(1e-6)
    assert_close(divergences.tail_logp(divergences.log_softmax(student, 1.0), ids), expected)


# --- gradients ---


def test_gradients_reach_the_student_only():
    student, teacher = logits(3, 20).requires_grad_(), logits(3, 20, seed=1).requires_grad_()
    generalized_jsd(student, teacher, 0.5).sum().backward()
    assert student.grad.any() and teacher.grad is None
    ids, logps, tail = top(teacher.detach(), 4)
    logps.requires_grad_()
    tail.requires_grad_()
    topk_divergence(student, ids, logps, tail, 0.5).sum().backward()
    assert logps.grad is None and tail.grad is None


def check_gradient(student, function, grad):
    """Against autograd of a definition in double precision, and against finite differences of it."""
    leaf = student.double().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf).sum(), leaf)
    assert_close(grad, expected, atol=1e-6 * expected.abs().max().item())
    direction = logits(*student.shape, seed=7).double()
    ahead, behind = (function(student.double() + h * direction) for h in (1e-4, -1e-4))
    assert_close((grad * direction).sum(-1), (ahead - behind) / 2e-4, atol=5e-6)
    assert grad.sum(-1).abs().max() <= 5e-6  # a constant added to all logits changes nothing


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", BETAS)
def test_gradient_over_the_vocabulary(beta, temperature):
    student, teacher = logits(7, 30), logits(7, 30, seed=1)
    ids = torch.arange(7) * 3
    values, grad = divergences.full(student, teacher, ids, beta, temperature)
    check_gradient(student, lambda x: exact(x, teacher, beta, temperature), grad)
    logq, logp = ((x.double() / temperature).log_softmax(-1) for x in (student, teacher))
    kls = [exact(student, teacher, b, temperature) for b in (beta, 0.0, 1.0)]
    tokens = [x[range(7), ids] for x in (logq, logp)]
    assert_close(values, torch.stack([*kls, *tokens, -(logq.exp() * logq).sum(-1)]))
    student.requires_grad_()  # what autograd makes of the plain function
    generalized_jsd(student, teacher, beta, temperature).sum().backward()
    assert_close(student.grad, grad)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("k", [1, 5, 29])
@pytest.mark.parametrize("beta", BETAS)
def test_gradient_over_the_top_k(beta, k, temperature):
    student, teacher = logits(7, 30), logits(7, 30, seed=1)
    said, ids, token_logps = top(teacher, k, temperature), torch.arange(7) * 3, -torch.arange(7.0)
    values, grad = divergences.topk(student, *said, token_logps, ids, beta, temperature)
    check_gradient(student, lambda x: exact_top(x, *said, beta, temperature), grad)
    logq = (student.double() / temperature).log_softmax(-1)
    kls = [exact_top(student, *said, b, temperature) for b in (beta, 0.0, 1.0)]
    assert_close(values, torch.stack([*kls, logq[range(7), ids], token_logps, -(logq.exp() * logq).sum(-1)]))
    assert_close(topk_divergence(student, *said, beta, temperature), kls[0])
    student.requires_grad_()
    topk_divergence(student, *said, beta, temperature).sum().backward()
    assert_close(student.grad, grad)


# --- top k ---


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", BETAS)
def test_with_all_tokens_it_is_the_full_one(beta, temperature):
    student, teacher = logits(9, 40), logits(9, 40, seed=1)
    said, ids = top(teacher, 40, temperature), torch.arange(9)
    whole = generalized_jsd(student, teacher, beta, temperature)
    assert_close(topk_divergence(student, *said, beta, temperature), whole)
    values, grad = divergences.topk(student, *said, torch.zeros(9), ids, beta, temperature)
    full_values, full_grad = divergences.full(student, teacher, ids, beta, temperature)
    assert_close(values[[0, 1, 2, 3, 5]], full_values[[0, 1, 2, 3, 5]])
    assert_close(grad, full_grad)


@pytest.mark.parametrize("k", [1, 4, 16, 60])
@pytest.mark.parametrize("beta", BETAS)
def test_it_is_never_above_the_full_one(beta, k):
    sizes = torch.linspace(0.01, 12.0, 100)[:, None]
    student, teacher = logits(100, 64) * sizes, logits(100, 64, seed=1) * sizes.flip(0)
    said = top(teacher, k)
    sure = student.scatter_add(-1, said[0], torch.full((100, k), 40.0))  # next to nothing outside the top k
    for one in (student, sure, sure / 2):
        value, whole = topk_divergence(one, *said, beta), generalized_jsd(one, teacher, beta)
        assert (value <= whole + 2e-6 * whole.clamp(min=1.0)).all() and value.min() >= -1e-6
    assert k == 60 or (topk_divergence(student, *said, beta) < 0.99 * generalized_jsd(student, teacher, beta)).any()


@pytest.mark.parametrize("beta", BETAS)
def test_the_order_of_the_top_k_changes_nothing(beta):
    student, (ids, logps, tail) = logits(5, 30), top(logits(5, 30, seed=1), 8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    results = [
        divergences.topk(student, ids[:, o], logps[:, o], tail, torch.zeros(5), ids[:, 2], beta, 0.7)
        for o in (torch.arange(8), order)
    ]
    for one, other in zip(*results, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("beta", BETAS)
def test_a_single_token_that_the_teacher_holds_likelier_is_pushed_up(beta):
    teacher = torch.tensor([[3.0, 0.0, 0.0, 0.0]])
    for student in (torch.zeros(1, 4), torch.tensor([[-2.0, 1.0, 0.0, 2.0]]), torch.tensor([[5.0, 0.0, 0.0, 0.0]])):
        _, grad = divergences.topk(student, *top(teacher, 1), torch.zeros(1), torch.zeros(1).long(), beta, 1.0)
        up = student.softmax(-1)[0, 0] < teacher.softmax(-1)[0, 0]
        assert (grad[0, 0] < 0) == up and ((grad[0, 1:] > 0) == up).all()  # a gradient below 0 makes the logit grow
