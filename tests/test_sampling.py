"""Tests of common/maths/sampling.py: the distribution drawn from, the draw, and its random numbers."""

import math

import pytest
import torch
from bounds import assert_rounded, rounding

from common.maths.sampling import BLOCK, Sampling, distribution, draw, uniforms

NONE = torch.tensor([], dtype=torch.long)
LAST = 1 - 2**-53  # the largest random number
SIZES = [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 200, 2 * BLOCK, 1000]


def reference(logits, count, end_ids, suppressed_ids, sampling) -> list[float]:
    """Probabilities of one row, token by token and in double precision, 0 for those that cannot be drawn."""
    early = count < sampling.min_new_tokens
    allowed = [t for t in range(len(logits)) if t not in suppressed_ids and not (early and t in end_ids)]
    if sampling.temperature == 0:
        allowed = [max(allowed, key=lambda t: logits[t])]
    scale = sampling.temperature or 1.0
    top = max(logits[t] for t in allowed)
    weights = {t: math.exp((logits[t] - top) / scale) for t in allowed}
    best = sorted(allowed, key=lambda t: -logits[t])
    if sampling.top_k:
        best = best[: sampling.top_k]
    total, kept, before = sum(weights[t] for t in best), [], 0.0
    for t in best:
        if before < sampling.top_p and weights[t] >= sampling.min_p:  # the best one weighs 1
            kept.append(t)
        before += weights[t] / total
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(logits))]


def random_logits(rows, vocabulary, scale=2.0, seed=0) -> torch.Tensor:
    return scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def grid(number) -> torch.Tensor:
    return (torch.arange(number, dtype=torch.float64) + 0.5) / number


@pytest.mark.parametrize("options", [
    dict(temperature=0.5), dict(top_k=1), dict(top_k=7), dict(top_k=200), dict(top_k=999), dict(top_p=0.5),
    dict(top_p=1e-6), dict(min_p=0.1), dict(min_p=1.0), dict(min_new_tokens=3),
    dict(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, min_new_tokens=2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("suppressed", [[], [2, 150]], ids=str)
def test_distribution_is_its_definition(options, suppressed):
    sampling, end_ids, counts = Sampling(**options), [4, 190], [0, 1, 2, 3, 9]
    ids = torch.tensor(end_ids), torch.tensor(suppressed, dtype=torch.long)
    logits = random_logits(5, 200).double()  # in fp64, so that a token at the border of a cut stays on its side
    logits[:, [2, 4, 150, 190]] += 4  # what may be forbidden would be likely
    before = logits.clone()
    actual = distribution(logits, sampling, torch.tensor(counts), *ids)
    rows = zip(logits.tolist(), counts, strict=True)
    expected = torch.tensor([reference(*row, end_ids, suppressed, sampling) for row in rows], dtype=torch.float64)
    assert torch.equal(actual > -torch.inf, expected > 0)
    largest = logits.abs().max().item() / sampling.temperature
    assert_rounded(actual.log_softmax(-1), expected.log(), terms=logits.shape[1] + 16, magnitude=largest)
    assert torch.equal(logits, before)  # the caller's
    for i, count in enumerate(counts):  # one number for all rows
        assert torch.equal(distribution(logits[i : i + 1], sampling, count, *ids), actual[i : i + 1])


@pytest.mark.parametrize(("options", "kept"), [
    (dict(top_p=0.39), 1), (dict(top_p=0.41), 2), (dict(top_p=0.69), 2), (dict(top_p=1.0), 4),
    (dict(top_k=2, top_p=0.55), 1), (dict(top_k=2, top_p=0.6), 2),  # of the two that are left, the first has 4/7
], ids=str)  # fmt: skip
def test_top_p_keeps_the_token_that_crosses_the_line_of_what_is_left(options, kept):
    probabilities = torch.tensor([[0.3, 0.4, 0.1, 0.2]])
    left = distribution(probabilities.log(), Sampling(**options), 0, NONE, NONE).isfinite()
    assert torch.equal(left, probabilities > 0.45 - 0.1 * kept)


@pytest.mark.parametrize("forbidden", ["suppressed", "early end"])
def test_greedy_takes_the_best_of_the_tokens_allowed(forbidden):
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    sampling = Sampling(temperature=0, min_new_tokens=2 if forbidden == "early end" else 0, top_k=1)
    ids = (torch.tensor([1]), NONE) if forbidden == "early end" else (NONE, torch.tensor([1]))
    left = distribution(logits, sampling, 1, *ids)
    tokens, logps = draw(left, torch.zeros(1, dtype=torch.float64), greedy=True)
    assert tokens.item() == 2
    # under the softmax over all tokens allowed, at temperature 1
    assert_rounded(logps.item(), 2 - math.log(1 + math.e + math.e**2), terms=3 + 8, magnitude=3.0, dtype=torch.float32)
    if forbidden == "early end":
        assert draw(distribution(logits, sampling, 2, *ids), torch.zeros(1).double(), greedy=True)[0].item() == 1


@pytest.mark.parametrize("options", [
    dict(temperature=-0.1), dict(temperature=1e-40), dict(top_p=0.0), dict(top_p=1.1), dict(top_k=-1),
    dict(min_p=-0.1), dict(min_p=1.1), dict(min_new_tokens=-1),
], ids=str)  # fmt: skip
def test_values_without_meaning_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} = {value}: must be"):
        Sampling(**options)


SUMS = rounding(BLOCK + 8)  # of probabilities: those of a block are added up in fp32


def assert_inverts(logits, randoms, tokens, logps):
    """Tokens against the cumulative distribution in double precision; at the very borders either neighbour is right."""
    probabilities = logits.double().softmax(-1)
    own, high = (x.gather(1, tokens[:, None]).squeeze(1) for x in (probabilities, probabilities.cumsum(-1)))
    assert ((high - own - SUMS <= randoms) & (randoms <= high + SUMS)).all() and (own > 0).all()
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    largest = logits[logits.isfinite()].abs().max().item()
    torch.testing.assert_close(logps.double(), expected, rtol=0, atol=SUMS + rounding(4, 2 * largest))


@pytest.mark.parametrize("scale", [0.0, 2.0, 20.0])
@pytest.mark.parametrize("vocabulary", SIZES)
def test_draw_inverts_the_cumulative_distribution(vocabulary, scale):
    logits = random_logits(1, vocabulary, scale).expand(1000, -1)
    tokens, logps = draw(logits, grid(1000))
    assert tokens.dtype == torch.int64 and logps.dtype == torch.float32
    assert_inverts(logits, grid(1000), tokens, logps)
    shares = tokens.bincount(minlength=vocabulary) / 1000
    torch.testing.assert_close(shares, logits[0].softmax(-1), rtol=0, atol=1 / 1000 + 2 * SUMS)
    if scale < 20:  # no probability vanishes: the first and the last random number give the first and the last token
        ends, _ = draw(logits[:2], torch.tensor([0.0, LAST], dtype=torch.float64))
        assert ends.tolist() == [0, vocabulary - 1]


def test_every_row_uses_its_own_random_number_and_distribution():
    logits = random_logits(500, 300).double()  # rounded to fp32, the order of rows might decide at a border
    randoms = torch.rand(500, generator=torch.Generator().manual_seed(1)).double()
    tokens, logps = draw(logits, randoms)
    assert_inverts(logits, randoms, tokens, logps)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(2))
    assert torch.equal(draw(logits[order], randoms[order])[0], tokens[order])


EMPTY = {  # tokens that can be drawn, of 4 blocks
    "outer blocks are empty": range(BLOCK, 3 * BLOCK),
    "a block in the middle is empty": [*range(BLOCK), *range(2 * BLOCK, 4 * BLOCK)],
    "the last block, which is not full": range(4 * BLOCK, 4 * BLOCK + 5),
    "one token at the end of its block": [2 * BLOCK - 1],
    "one token at the beginning of its block": [2 * BLOCK],
    "first and last token": [0, 4 * BLOCK + 4],
}


@pytest.mark.parametrize("allowed", EMPTY.values(), ids=EMPTY)
def test_tokens_of_probability_zero_are_never_drawn(allowed):
    allowed = torch.tensor(allowed)
    logits = random_logits(1, 4 * BLOCK + 5)
    forbidden = torch.ones(logits.shape[1], dtype=torch.bool).index_fill(0, allowed, False)
    logits = logits.masked_fill(forbidden, -torch.inf).expand(2002, -1)
    randoms = torch.cat([torch.tensor([0.0, LAST], dtype=torch.float64), grid(2000)])
    tokens, logps = draw(logits, randoms)
    assert not forbidden[tokens].any()
    assert_inverts(logits, randoms, tokens, logps)
    assert tokens[0] == allowed[0] and tokens[1] == allowed[-1]


@pytest.mark.parametrize("uniform", [0.0, 0.3, LAST])
def test_probabilities_that_vanish_are_zero(uniform):
    # e^-800 is 0 in double precision, e^-200 in single precision only: nothing is as small as the last random number
    logits = torch.full((1, 300), -800.0)
    logits[0, 7], logits[0, 200], logits[0, 290] = -200.0, 0.0, -1.0
    token = draw(logits, torch.tensor([uniform], dtype=torch.float64))[0].item()
    assert token == {0.0: 7, 0.3: 200, LAST: 290}[uniform]


def test_rare_tokens_are_drawn_in_their_turn():
    # one token has all but 3.5e-5 of the probability: sums in single precision would lose the 150,000 others
    logits = torch.zeros(1, 150_000)
    logits[0, 0] = 32 * math.log(2)
    common = logits.double().softmax(-1)[0, 0].item()
    randoms = common + (1 - common) * grid(40)
    tokens, _ = draw(logits.expand(40, -1), randoms)
    expected = 150_000 * grid(40)
    assert (tokens - expected).abs().max() <= 2 * BLOCK


@pytest.mark.parametrize("vocabulary", SIZES)
def test_greedy_takes_the_likeliest_token(vocabulary):
    logits = random_logits(50, vocabulary)
    tokens, logps = draw(logits, torch.full((50,), LAST, dtype=torch.float64), greedy=True)
    assert torch.equal(tokens, logits.argmax(-1))
    assert_rounded(logps, logits.double().log_softmax(-1).amax(-1), terms=BLOCK + 8, magnitude=8.0)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("vocabulary", SIZES)
def test_broken_logits_give_ids_of_the_vocabulary(vocabulary, greedy):
    # the decode engine finds out some steps later; until then a GPU must not read outside of the embedding
    logits = random_logits(5, vocabulary)
    logits[1], logits[2, -1], logits[3], logits[4, 0] = torch.nan, torch.nan, -torch.inf, torch.inf
    for uniform in (0.0, 0.5, LAST):
        tokens, logps = draw(logits, torch.full((5,), uniform, dtype=torch.float64), greedy)
        assert (tokens >= 0).all() and (tokens < vocabulary).all()
        assert not logps[1:4].isfinite().any()  # and nothing that looks like a log-probability
        assert torch.equal(tokens[:1], draw(logits[:1], torch.full((1,), uniform, dtype=torch.float64), greedy)[0])


def test_random_numbers_belong_to_seed_step_prompt_and_completion():
    numbers = uniforms(3, 7, [0, 1, 5], 4, 6)
    assert numbers.shape == (12, 6) and numbers.dtype == torch.float64
    assert (numbers >= 0).all() and (numbers < 1).all() and numbers.unique().numel() == 72
    assert torch.equal(numbers, uniforms(3, 7, [0, 1, 5], 4, 6))
    assert torch.equal(numbers[8:], uniforms(3, 7, [5], 4, 6))  # whatever else is in the batch
    for group_size in (1, 2, 64):
        n = min(4, group_size)
        assert torch.equal(uniforms(3, 7, [5], group_size, 6)[:n], numbers[8 : 8 + n])
    others = [(3, 8), (4, 7), (7, 3), (0, 0), (-1, 7), (2**40, 7)]
    assert len({tuple(uniforms(*which, [5], 1, 6).flatten().tolist()) for which in [(3, 7), *others]}) == 7
    first = torch.cat([uniforms(seed, step, range(40), 1, 1) for seed in range(5) for step in range(40)])
    assert first.unique().numel() == 8000


def test_random_numbers_are_uniform_and_leave_the_global_state_alone():
    before = torch.get_rng_state()
    numbers = uniforms(0, 0, range(50), 20, 20).flatten()
    assert torch.equal(torch.get_rng_state(), before)
    counts = torch.histc(numbers.float(), 20, 0, 1)
    assert (counts - 1000).abs().max() < 6 * math.sqrt(20_000 * 0.05 * 0.95)
    pairs = numbers.view(-1, 20)
    correlation = torch.corrcoef(torch.stack([pairs[:, :-1].flatten(), pairs[:, 1:].flatten()]))[0, 1]
    assert abs(correlation) < 6 / math.sqrt(19_000)  # of as many pairs
