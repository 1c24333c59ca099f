"""Divergences between the next-token distributions of teacher, P, and student, Q, with gradients.

With M = beta P + (1 - beta) Q, the generalized Jensen-Shannon divergence is

    JSD(beta) = beta KL(P, M) + (1 - beta) KL(Q, M)        0 < beta < 1
    beta = 0:   KL(P, Q), the forward KL                   beta = 1:  KL(Q, P), the reverse KL

The formula gives 0 at both ends, where the KLs replace it. The value therefore *jumps* there, and a
learning rate for beta = 0.1 does not suit beta = 0. Source: GKD, arXiv 2306.13649, Eq. 1.

Top-k: a remote teacher sends its k most likely tokens and the mass of all others, the tail. Both
distributions then have k + 1 atoms; their divergence is at most the full one, which it equals if
k = V.

Another vocabulary: `uld` compares sorted probabilities; `span_divergence` and `span` compare the
tokens that both sides know, and the probabilities of whole spans of text.

Dims: V vocabulary, W that of a teacher with another one, S tokens that both know, K the k tokens of
the teacher, n tokens of a completion, A atoms: V, or K + 1.
"""

import math

import torch
from torch.nn.functional import pad

from common.maths.sampling import COLDEST

LOWEST = -1e4  # nats, in place of -inf, which times a probability of 0 would be NaN
SMALLEST_TAIL = 1e-7  # minimum mass outside the top k, the resolution of fp32 near 1
# places of a token in a span of text: alone, and both sides know it; first of a span; further in it. 0: in none;
# -START, -INSIDE: of a span that the teacher cannot read
MATCH, START, INSIDE = 1, 2, 3


def generalized_jsd(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, beta: float, temperature: float = 1.0
) -> torch.Tensor:
    """Generalized Jensen-Shannon divergence per position, over the whole vocabulary.

    Args:
        student_logits: [..., V].
        teacher_logits: [..., V]; if one side has more ids, such as padding of its embedding, both
            are renormalised over the ids that they share, the first ones.
        beta: in [0, 1]; 0 is KL(teacher, student), 1 is KL(student, teacher).
        temperature: divides the logits of both sides.

    Returns:
        [...] fp32, nats; differentiable with respect to the student only.

    Raises:
        ValueError: beta or temperature out of range.
    """
    check(beta, temperature)
    shared = min(student_logits.shape[-1], teacher_logits.shape[-1])
    logp, logq = (log_softmax(x[..., :shared], temperature) for x in (teacher_logits.detach(), student_logits))
    return terms(logp, logq, beta)[0]


def topk_divergence(
    student_logits: torch.Tensor,
    teacher_ids: torch.Tensor,
    teacher_logps: torch.Tensor,
    teacher_tail_logp: torch.Tensor,
    beta: float,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Generalized Jensen-Shannon divergence per position, over the teacher's top k and a tail.

    The student is normalised over its whole vocabulary; renormalised over the top k, the mass that
    it puts elsewhere would not be penalised.

    Args:
        student_logits: [..., V].
        teacher_ids: [..., K] int64, all different.
        teacher_logps: [..., K] log-probabilities at `temperature`.
        teacher_tail_logp: [...] log of the mass outside the top k; less than 1e-7, even -inf,
            counts as 1e-7.
        beta: as in `generalized_jsd`.
        temperature: divides the student's logits.

    Returns:
        [...] fp32, nats; differentiable with respect to the student only.

    Raises:
        ValueError: beta or temperature out of range.
    """
    check(beta, temperature)
    logq = log_softmax(student_logits, temperature)
    logp_A = with_tail(teacher_logps, teacher_tail_logp)
    logq_A = with_tail(logq.gather(-1, teacher_ids), tail_logp(logq, teacher_ids))
    return terms(logp_A.detach(), logq_A, beta)[0]


def uld(student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Universal logit distillation: the L1 distance of the sorted probabilities of two vocabularies.

    It is the Wasserstein-1 distance if moving probability costs 1 between any two places of the
    sorted order. It sees how sure both are, not of which token.

    Args:
        student_logits: [..., V].
        teacher_logits: [..., W]; the shorter side is padded with probabilities of 0.
        temperature: divides the logits of both sides.

    Returns:
        [...] fp32, from 0 to 2; differentiable with respect to the student only, but where two
        probabilities are equal.

    Raises:
        ValueError: temperature out of range.

    Source: arXiv 2402.12030.
    """
    check(0.5, temperature)
    p, q = (log_softmax(x, temperature).exp() for x in (teacher_logits.detach(), student_logits))
    return _sorted_difference(p, q)[0].abs().sum(-1)


def span_divergence(
    student_span_logp: torch.Tensor, teacher_span_logp: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized Jensen-Shannon divergence between "this span" and "any other text".

    A divergence between two outcomes is at most that between all continuations.

    Args:
        student_span_logp: [...] log-probability of the span: the sum over its tokens.
        teacher_span_logp: [...] the same under the teacher, whose tokens may be others.
        beta: as in `generalized_jsd`.

    Returns:
        The divergence [...] and its derivative with respect to `student_span_logp`.

    Source: arXiv 2503.20083 (ALM), there for several f-divergences.
    """
    logp_A, logq_A = (with_tail(x[..., None], _other_logp(x)) for x in (teacher_span_logp, student_span_logp))
    divergence, f_A = terms(logp_A, logq_A, beta)
    return divergence, f_A[..., 0] - f_A[..., 1] * (logq_A[..., 0] - logq_A[..., 1]).exp()


def span_sums(values: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """The sum over each span, for every token of it.

    Args:
        values: [..., C] or [N], of tokens in order; a span does not cross the end of a row.
        spans: of the same shape, int32: MATCH, START, INSIDE, or 0.

    Returns:
        Of the same shape; 0 for tokens in no span.
    """
    place = (spans.abs() != INSIDE).flatten().cumsum(0) - 1
    sums = values.new_zeros(spans.numel()).index_add(0, place, values.flatten())
    return torch.where(spans != 0, sums[place].view_as(values), 0.0)


def _other_logp(logp: torch.Tensor) -> torch.Tensor:
    """log(1 - p), at least log(SMALLEST_TAIL)."""
    return (-torch.expm1(logp.float())).clamp(min=SMALLEST_TAIL).log()


def _sorted_difference(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Differences q - p of sorted probabilities, [..., max(V, W)], and the order of q, [..., V]."""
    largest_p, (largest_q, order) = p.sort(-1, descending=True).values, q.sort(-1, descending=True)
    missing = q.shape[-1] - p.shape[-1]
    return pad(largest_q, (0, max(0, -missing))) - pad(largest_p, (0, max(0, missing))), order


def check(beta: float, temperature: float) -> None:
    """Checks the parameters of a divergence.

    Args:
        beta: in [0, 1].
        temperature: finite, because at infinity all distributions are uniform; and at least
            COLDEST.

    Raises:
        ValueError: one of them is out of range, or not a number.
    """
    number = (int, float)
    if not isinstance(beta, number) or not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta = {beta!r}: must be in [0, 1]; 0 is the forward KL, 1 the reverse KL")
    if not isinstance(temperature, number) or not COLDEST <= temperature < math.inf:
        rule = f"must be above 0, finite, and at least {COLDEST}: logits divided by less overflow"
        raise ValueError(f"temperature = {temperature!r}: {rule}; 1 leaves them as they are")


def log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities [..., V] in fp32, clamped to LOWEST."""
    return (logits.float() / temperature).log_softmax(-1).clamp(min=LOWEST)


def tail_logp(logps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log of the mass outside some tokens.

    It is summed, because 1 minus the mass of the tokens would be rounding when it is small.

    Args:
        logps: [..., V].
        ids: [..., K] int64, the tokens that are left out.

    Returns:
        [...] at least log(SMALLEST_TAIL).
    """
    return logps.scatter(-1, ids, -math.inf).exp().sum(-1).clamp(min=SMALLEST_TAIL).log()


def with_tail(logps: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Top k and tail as one distribution.

    Args:
        logps: [..., K].
        tail: [...].

    Returns:
        [..., K + 1] fp32.
    """
    tail = tail.float().clamp(min=math.log(SMALLEST_TAIL))
    return torch.cat([logps.float().clamp(min=LOWEST), tail.unsqueeze(-1)], dim=-1)


def terms(logp: torch.Tensor, logq: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence D, and f_a = q_a dD/dq_a up to a multiple of q_a, for its gradient.

    With respect to the logits whose softmax is q, the gradient is f - q * sum(f), where the
    multiple cancels.

    Args:
        logp: [..., A] of the teacher.
        logq: [..., A] of the student.
        beta: in [0, 1].

    Returns:
        D [...] and f [..., A].
    """
    if beta == 0.0:
        p = logp.exp()
        return (p * (logp - logq)).sum(-1), -p
    q = logq.exp()
    if beta == 1.0:
        f = q * (logq - logp)
        return f.sum(-1), f
    logm = torch.logaddexp(logp + math.log(beta), logq + math.log1p(-beta))
    f = (1 - beta) * q * (logq - logm)
    return beta * (logp.exp() * (logp - logm)).sum(-1) + f.sum(-1), f


# `full`, `cross_entropy`, `topk`, `sorted_probabilities` and `spans` run on the chunks of
# common/distill/distillation.py, compiled on a GPU: each then reads the logits a few times and
# writes little of their size but the gradient. That is with respect to the student's logits before
# the temperature.


def full(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, ids: torch.Tensor, beta: float, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and the gradient of the divergence over the whole vocabulary.

    Args:
        student_logits: [n, V].
        teacher_logits: [n, V].
        ids: [n] int64, the tokens of the completion.
        beta: in [0, 1].
        temperature: divides the logits of both sides.

    Returns:
        [6, n]: divergence, forward KL, reverse KL, log-probabilities of `ids` under student and
        teacher, and entropy of the student; and the gradient [n, V] of the divergence with respect
        to the student's logits.
    """
    logp_nV, logq_nV = log_softmax(teacher_logits, temperature), log_softmax(student_logits, temperature)
    divergence_n, f_nV = terms(logp_nV, logq_nV, beta)
    p_nV, q_nV = logp_nV.exp(), logq_nV.exp()
    forward_n, reverse_n = (p_nV * (logp_nV - logq_nV)).sum(-1), (q_nV * (logq_nV - logp_nV)).sum(-1)
    tokens = (x.gather(-1, ids[:, None]).squeeze(-1) for x in (logq_nV, logp_nV))
    values_6n = torch.stack([divergence_n, forward_n, reverse_n, *tokens, -(q_nV * logq_nV).sum(-1)])
    return values_6n, (f_nV - q_nV * f_nV.sum(-1, keepdim=True)) / temperature


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and the gradient of the negative log-likelihood of tokens.

    It is the forward KL from a teacher that is sure of these tokens.

    Args:
        logits: [n, V].
        ids: [n] int64.

    Returns:
        [3, n]: negative log-likelihood, entropy, and 1 where the token is the likeliest one, else
        0; and the gradient [n, V] of the negative log-likelihood with respect to the logits.
    """
    logq_nV = log_softmax(logits, 1.0)
    q_nV, logq_n = logq_nV.exp(), logq_nV.gather(-1, ids[:, None]).squeeze(-1)
    likeliest_n = logq_n >= logq_nV.amax(-1)
    values_3n = torch.stack([-logq_n, -(q_nV * logq_nV).sum(-1), likeliest_n.float()])
    # the one is subtracted in fp32, where 1 - q does not vanish for likely tokens
    is_token_nV = torch.arange(logits.shape[-1], device=ids.device) == ids[:, None]
    return values_3n, q_nV - is_token_nV.float()


def topk(
    student_logits: torch.Tensor,
    teacher_ids: torch.Tensor,
    teacher_logps: torch.Tensor,
    teacher_tail_logp: torch.Tensor,
    teacher_token_logps: torch.Tensor,
    ids: torch.Tensor,
    beta: float,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and the gradient of the divergence over the teacher's top k and a tail.

    Args:
        student_logits: [n, V].
        teacher_ids: [n, K] int64.
        teacher_logps: [n, K].
        teacher_tail_logp: [n].
        teacher_token_logps: [n], of `ids`.
        ids: [n] int64, the tokens of the completion.
        beta: in [0, 1].
        temperature: divides the student's logits; the teacher's log-probabilities already include
            it.

    Returns:
        As in `full`; divergence and KLs are over k + 1 atoms, the other values over the whole
        vocabulary.
    """
    logq_nV = log_softmax(student_logits, temperature)
    logq_nK = logq_nV.gather(-1, teacher_ids)
    logp_nA, logq_nA = with_tail(teacher_logps, teacher_tail_logp), with_tail(logq_nK, tail_logp(logq_nV, teacher_ids))
    divergence_n, f_nA = terms(logp_nA, logq_nA, beta)
    kls = terms(logp_nA, logq_nA, 0.0)[0], terms(logp_nA, logq_nA, 1.0)[0]
    q_nV = logq_nV.exp()
    values_6n = torch.stack([divergence_n, *kls, logq_nV.gather(-1, ids[:, None]).squeeze(-1), teacher_token_logps,
                             -(q_nV * logq_nV).sum(-1)])  # fmt: skip
    # a token of the tail gets its share of the tail's f
    total_n1 = f_nA.sum(-1, keepdim=True)
    in_tail_n1 = f_nA[:, -1:] * (-logq_nA[:, -1:]).exp()
    grad_nV = q_nV * (in_tail_n1 - total_n1)
    grad_nV = grad_nV.scatter(-1, teacher_ids, f_nA[:, :-1] - logq_nK.exp() * total_n1)
    return values_6n, grad_nV / temperature


def sorted_probabilities(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    spans: torch.Tensor,
    given: torch.Tensor,
    teacher_token_logps: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and the gradient of `uld` where spans begin, and of the cross-entropy of given tokens.

    Args:
        student_logits: [n, V].
        teacher_logits: [n, W], after the same text; anything where no span begins.
        spans: [n] int32, as in `batches.TeacherOutput`.
        given: [n] bool, tokens that the student did not sample: their cross-entropy is added, as in
            the paper, at temperature 1.
        teacher_token_logps: [n], to be reported.
        ids: [n] int64, the tokens of the completion.
        temperature: divides the logits of both sides.

    Returns:
        [5, n]: the loss, log-probabilities of `ids` under the student and as given for the teacher,
        entropy of the student, and whether the token is aligned; and the gradient [n, V].

    Source: arXiv 2402.12030: cross-entropy plus the distance of sorted probabilities.
    """
    p_nW, logq_nV = log_softmax(teacher_logits, temperature).exp(), log_softmax(student_logits, temperature)
    q_nV = logq_nV.exp()
    starts_n, aligned_n = ((spans == MATCH) | (spans == START)).float(), (spans > 0).float()
    difference_nA, order_nV = _sorted_difference(p_nW, q_nV)
    slope_nV = torch.zeros_like(q_nV).scatter(-1, order_nV, difference_nA.sign()[:, : q_nV.shape[-1]])
    grad_nV = q_nV * (slope_nV - (q_nV * slope_nV).sum(-1, keepdim=True)) * (starts_n / temperature)[:, None]
    (nll_n, *_), nll_grad_nV = cross_entropy(student_logits, ids)
    values_5n = torch.stack([starts_n * difference_nA.abs().sum(-1) + given * nll_n,
                             logq_nV.gather(-1, ids[:, None]).squeeze(-1), teacher_token_logps,
                             -(q_nV * logq_nV).sum(-1), aligned_n])  # fmt: skip
    return values_5n, grad_nV + given.float()[:, None] * nll_grad_nV


def spans(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    spans: torch.Tensor,
    teacher_token_logps: torch.Tensor,
    student_span_logps: torch.Tensor,
    teacher_span_logps: torch.Tensor,
    ids: torch.Tensor,
    own: torch.Tensor,
    other: torch.Tensor,
    beta: float,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and the gradient of the divergence over spans of text.

    Where a span is one token that both sides know, the divergence is over all tokens that both
    know, renormalised: with equal vocabularies it is the ordinary one. Any other span is compared
    as a whole, by `span_divergence`, whose value stands at its first token.

    Args:
        student_logits: [n, V].
        teacher_logits: [n, W], after the same text; anything where `spans` is not MATCH.
        spans: [n] int32, as in `batches.TeacherOutput`.
        teacher_token_logps: [n], to be reported.
        student_span_logps: [n], log-probability of the span that the token belongs to.
        teacher_span_logps: [n], the same under the teacher.
        ids: [n] int64, the tokens of the completion.
        own: [S] int64, the tokens that both know, ids of the student.
        other: [S] int64, those of the teacher.
        beta: in [0, 1].
        temperature: divides the logits of both sides; the log-probabilities already include it.

    Returns:
        [7, n]: divergence, forward KL, reverse KL, log-probabilities of `ids` under the student and
        as given for the teacher, entropy of the student, and whether the token is aligned; and the
        gradient [n, V].
    """
    logq_nV = log_softmax(student_logits, temperature)
    logp_nS, logq_nS = (log_softmax(x, temperature)
                        for x in (teacher_logits[:, other], student_logits[:, own]))  # fmt: skip
    divergence_n, f_nS = terms(logp_nS, logq_nS, beta)
    of_span_n, slope_n = span_divergence(student_span_logps, teacher_span_logps, beta)
    is_match_n, begins_n, within_n = spans == MATCH, spans.abs() == START, spans.abs() >= START

    def value(at_match_n: torch.Tensor, of_span_n: torch.Tensor) -> torch.Tensor:
        return torch.where(is_match_n, at_match_n, torch.where(begins_n, of_span_n, 0.0))

    kls = (value(terms(logp_nS, logq_nS, end)[0],
                 span_divergence(student_span_logps, teacher_span_logps, end)[0]) for end in (0.0, 1.0))  # fmt: skip
    q_nV = logq_nV.exp()
    values_7n = torch.stack([value(divergence_n, of_span_n), *kls, logq_nV.gather(-1, ids[:, None]).squeeze(-1),
                             teacher_token_logps, -(q_nV * logq_nV).sum(-1), (spans > 0).float()])  # fmt: skip
    # every token of a span has the span's slope: log q(span) is the sum over them
    slope_n1 = torch.where(within_n, slope_n, 0.0)[:, None]
    is_token_nV = torch.arange(q_nV.shape[-1], device=ids.device) == ids[:, None]
    grad_nV = slope_n1 * (is_token_nV.float() - q_nV)
    shared_nS = (f_nS - logq_nS.exp() * f_nS.sum(-1, keepdim=True)) * is_match_n[:, None]
    return values_7n, grad_nV.index_add(-1, own, shared_nS) / temperature
