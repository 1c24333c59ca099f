"""The table of claims: the exact ones hold, the stochastic ones run, and a claim that fails is reported."""

import importlib
import math
import re
import runpy
import sys

import pytest
import torch
from bounds import assert_rounded
from conftest import ROOT
from test_tools import load_script

from common.maths import divergences, losses
from common.model import head
from common.tasks import diversity

pytestmark = pytest.mark.tools
EXACT = {"on_policy": "4", "closed_form": "6", "kl": "7", "degenerate": "11", "tail_bucket": "15"}  # rows
claims = load_script("claims")
base, distill, logits = (importlib.import_module(f"claims_{part}") for part in ("base", "distill", "logits"))


def test_the_exact_claims_hold_and_the_table_is_written(tmp_path, capsys):
    # an experiment named twice runs once
    assert claims.main([*reversed(EXACT), "degenerate", "--out", str(tmp_path / "new/claims.md")]) == 0
    table = (tmp_path / "new/claims.md").read_text()
    assert capsys.readouterr().out == table
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert [(row[0], row[-1]) for row in rows[2:]] == [(number, "holds") for number in EXACT.values()]


def swapped_kl(logps, ref_logps, kind):
    d = logps - ref_logps
    return {"k1": d, "k2": d.square() / 2, "k3": d.exp() - d - 1}[kind]  # k3 with the sign of d lost


def sum_over_tokens(values, mask, mode, denominator):
    return torch.where(mask, values, 0.0).sum() / denominator


@pytest.mark.parametrize(("module", "name", "broken", "experiment"), [
    (losses, "kl_estimate", swapped_kl, "kl"), (losses, "aggregate", sum_over_tokens, "on_policy"),
    (losses, "aggregate", sum_over_tokens, "closed_form"),
    (diversity, "group_rewards", lambda rewards, labels, alpha: rewards + 1e-3 * labels, "degenerate"),
    (divergences, "with_tail", lambda logps, tail: logps.log_softmax(-1), "tail_bucket"),
])  # fmt: skip
def test_a_broken_formula_fails_its_claim_and_the_run(monkeypatch, capsys, module, name, broken, experiment):
    monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr(sys, "argv", ["claims.py", experiment])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "scripts" / "dev" / "claims.py"), run_name="__main__")
    assert stopped.value.code == 1 and "| does not hold |" in capsys.readouterr().out


def test_what_is_reported_only_does_not_fail_the_run_and_an_unknown_experiment_does(monkeypatch, capsys):
    monkeypatch.setitem(claims.EXPERIMENTS, "clip", lambda: [claims.Row(3, "claim", "measured", "none", None)])
    assert claims.main(["clip"]) == 0
    assert "| 3 | claim | measured | none | reported only |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        claims.main(["lenght"])
    assert "unknown experiment lenght: choose from clip" in capsys.readouterr().err


@pytest.mark.parametrize(("experiment", "numbers"), [
    ("clip", [1, 3]), ("stale", [2]), ("length", [5]), ("clip_higher", [8]), ("diversity", [9, 10]),
    ("distillation", [12, 13, 14]), ("steps_to_teacher", [17]),
])  # fmt: skip
def test_stochastic_claims_give_finite_numbers(experiment, numbers):
    # few steps: whether they hold takes minutes
    rows = claims.EXPERIMENTS[experiment](runs=2, steps=2)
    assert [row.number for row in rows] == numbers
    for row in rows:
        assert "nan" not in row.measured and re.search(r"\d\.\d+ \(\d+\.\d+-\d+\.\d+\)", row.measured)
        assert row.holds is None if row.number in (3, 8, 12, 17) else row.holds in (True, False)


def test_digits_are_copied_masked_and_scored_and_every_run_is_reported_by_itself():
    """Row 2 of the table asks for digit 2 and ends after about twenty copies; row 12 is digit 2 of a second run."""
    table = torch.full((20, 12, 11), -1e9)
    table[2, :, 2] = table[12, :, 2] = 0.0
    table[2, 2, base.END] = math.log(1 / 20)  # row 12 never ends
    prompts = torch.tensor([2] * 50 + [12])
    tokens, before, mask, rewards = base.write_digits(table, prompts, torch.Generator().manual_seed(0))
    copies, ended = ((tokens == 2) & mask).sum(1), ((tokens == base.END) & mask).any(1)
    assert rewards.bool().tolist() == ((copies >= 3) & ended).tolist() and 0 < rewards.sum() < 50
    assert (rewards[50], mask[50].sum()) == (0, base.MAX_TOKENS) and (before[:, 0] == base.BEGIN).all()
    assert torch.equal(before[:, 1:][mask[:, 1:]], tokens[:, :-1][mask[:, 1:]])
    found = claims.train_digits("gspo", (3e-4, 4e-4), steps=2, lr=0.3, minibatches=4, epochs=2, runs=3, P=8)
    assert len(found["end"]) == 3 and found["end"] == found["mean"]  # over all steps, which are fewer than ten
    assert len(set(found["clipped"])) == 3


def test_modes_and_lengths_start_where_they_should():
    modes, correct = claims.bandit("grpo", 0.0, runs=2, steps=0)
    start = torch.cat([torch.linspace(1.5, 0, 6), torch.full((6,), 0.5)]).softmax(0)
    shares = start[:6] / start[:6].sum()
    # sums of six or twelve, a softmax, a logarithm and two exponentials
    assert_rounded(modes, [(-(shares * shares.log()).sum()).exp().item()] * 2, terms=2 * 12 + 4 * 4)
    assert_rounded(correct, [start[:6].sum().item()] * 2, terms=12 + 4)
    assert claims.mean_lengths("GRPO", seed=0, steps=0) == pytest.approx((10, 10), rel=1e-5)
    # averages agree where all lengths are equal
    values = torch.randn(8, claims.START_LENGTH, generator=torch.Generator().manual_seed(0))
    for how in ("GRPO", "DAPO per prompt", "token-mean of the batch", "Dr. GRPO"):
        found = claims.average(values, torch.ones_like(values, dtype=torch.bool), how, 4)
        assert_rounded(found, values.mean(), terms=values.numel(), magnitude=values.abs().mean().item())


def test_chains_are_counted_and_expected():
    """A chain that counts, 0 0 1 2 .. 7 0 1 .., takes 20 steps: 3 of them are 0 1 2, 1 is 0 0 1, and none 1 0 0."""
    counting = torch.eye(8).roll(1, dims=1).expand(1, 8, 8, 8)
    random = (2 * torch.randn(1, 8, 8, 8, generator=torch.Generator().manual_seed(0))).softmax(-1)
    probs = torch.cat([counting, random])
    counted = distill.write_chains(probs, 4000, torch.Generator().manual_seed(0))
    expected = distill.expect_chains(probs)
    for chains in (counted, expected):
        sums = [chains.sum((1, 2, 3)), chains[0, (0, 0, 1), (1, 0, 0), (2, 1, 0)]]
        assert_rounded(torch.cat(sums), [1, 1, 3 / 20, 1 / 20, 0], terms=8**3 + 20)
    parts = distill.write_chains(probs[1:].expand(40, 8, 8, 8), 100, torch.Generator().manual_seed(0))
    error = (parts.mean(0) - expected[1]).abs()
    assert (error <= 6 * parts.std(0) / 40**0.5 + 6 / (40 * 100 * 20)).all()  # a triple may have come six times, or not


def test_gradients_of_distillation_by_hand():
    """With respect to the logits after `last`: Q - y of SFT, Q - P of the forward KL, Q (l - E l) of the reverse."""
    rng = torch.Generator().manual_seed(0)
    table, teachers = torch.randn(2, 8, 8, generator=rng), distill.trigrams(2)
    chains = distill.write_chains(teachers.exp(), 32, rng)
    states, q = chains.sum(-1, keepdim=True), distill.as_trigrams(table).softmax(-1)
    log_ratio = q.log() - teachers
    by_hand = {
        "sft": states * q - chains,
        0.0: states * (q - teachers.exp()),
        1.0: states * q * (log_ratio - (q * log_ratio).sum(-1, keepdim=True)),
        "sampled": chains * log_ratio - (chains * log_ratio).sum(-1, keepdim=True) * q,
    }
    for loss, gradient in by_hand.items():
        found = distill.distillation_gradient(table, teachers, chains, loss)
        # two softmaxes over 8 tokens, and sums over the 8 states before and the 8 tokens
        assert_rounded(found, gradient.sum(1), terms=4 * 8 + 16, magnitude=log_ratio.abs().max().item() * states.max())


def test_who_writes_the_batches():
    """One step of SFT on a teacher that counts moves the logits after 1, 3/20 of the tokens, by 2 * 3/20 (y - 1/8)."""
    teachers = (1e4 * torch.eye(8).roll(1, dims=1)).expand(1, 8, 8, 8).log_softmax(-1)
    taught, own = (distill.distil(on_policy, "sft", teachers, steps=1)[0, 1] for on_policy in (0.0, 1.0))
    assert taught.tolist() == pytest.approx([0.2625 if y == 2 else -0.0375 for y in range(8)])
    # from uniform it writes all tokens alike, each after 1 in 1/64 of 640 tokens
    assert own.abs().max() < 6 * 2 * (1 / 64 / 640) ** 0.5


SMALL = dict(logit_stds=(4.0,), lengths=(5, 20), V=512)  # of row 16


def test_logits_in_fp32_keep_the_ratio_and_in_bf16_do_not():
    (row,) = logits.bf16_logits(**SMALL)
    assert (row.number, row.holds) == (16, True) and "nan" not in row.measured


def rounded_project(hidden, weight, bias, softcap):
    return (hidden.float() @ weight.float().t()).bfloat16().float()


def dependent_on_order(hidden, *args):
    logps, entropy = unbroken(hidden, *args)
    return logps + 1e-3 * hidden[:, 0].float(), entropy


unbroken = head.logps_from_weight


@pytest.mark.parametrize(("module", "name", "broken"), [
    (head, "logps_from_weight", dependent_on_order), (head, "project", rounded_project),  # fp32 is bf16 now
    (losses, "sequence_ratio", lambda new, old, mask: (new - old).mean(1).exp()),  # not of the prefix
    (logits, "rounding_variance", lambda logits, logps, ids: torch.full(ids.shape, 1e-6)),
])  # fmt: skip
def test_row_16_fails_if_anything_that_it_rests_on_is_broken(monkeypatch, module, name, broken):
    monkeypatch.setattr(module, name, broken)
    assert logits.bf16_logits(**SMALL)[0].holds is False


def test_the_variance_of_rounding_is_that_of_uniform_errors():
    # by hand: two tokens with logit 8, where bf16 has a spacing of 1/16, and slopes of 1/2
    eight = torch.full((1, 2), 8.0)
    found = logits.rounding_variance(eight, eight.log_softmax(-1), torch.tensor([1]))
    assert_rounded(found, [2 * (1 / 2 / 16) ** 2 / 12], terms=20)
    # and measured: errors are uniform only in the mean over many logits
    rng = torch.Generator().manual_seed(0)
    values, ids = 4 * torch.randn(20_000, 16, generator=rng), torch.randint(16, (20_000,), generator=rng)
    exact, narrow = (x.log_softmax(-1).gather(1, ids[:, None])[:, 0] for x in (values, values.bfloat16().float()))
    share = (narrow - exact).square().mean() / logits.rounding_variance(values, values.log_softmax(-1), ids).mean()
    assert share == pytest.approx(1, abs=0.1)  # a standard error is 1.2 %


def test_expected_rewards_of_a_table_are_those_of_its_samples():
    # digit 3 until the end, which comes after each with probability 1/4: at least 3 copies, at most 23
    table = torch.full((20, 12, 11), -1e9)
    table[3, :, 3], table[3, 3, base.END] = math.log(3 / 4), math.log(1 / 4)
    table[7] = 0.0  # uniform: at least 3 of n tokens are the digit, and then comes the end
    table[10:] = torch.randn(10, 12, 11, generator=torch.Generator().manual_seed(0))
    expected = distill.expected_rewards(table)
    hits = [1 - sum(math.comb(n, k) * 0.1**k * 0.9 ** (n - k) for k in range(3)) for n in range(24)]
    uniform = sum((10 / 11) ** n / 11 * hit for n, hit in enumerate(hits))
    assert_rounded(expected[[3, 7]], [0.75**2 - 0.75**23, uniform], terms=24 * 16)
    prompts = torch.arange(10, 20).repeat_interleave(2000)
    rewards = base.write_digits(table, prompts, torch.Generator().manual_seed(1))[-1].view(10, -1)
    assert ((rewards.mean(1) - expected[10:]).abs() <= 6 * (expected[10:] / 2000).sqrt()).all()


def test_steps_count_at_the_best_learning_rate_that_keeps_what_it_reached():
    slow = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]] + 10 * [[1, 0, 1, 1]]).float()[:, :2]
    passing = torch.tensor([[0, 0], [1, 1]] + 10 * [[0, 0]]).float()
    target = torch.tensor([0.5, 0.5])
    lr, steps = distill.fewest_steps({0.1: slow, 0.8: passing}, target)
    assert (lr, steps.tolist()) == (0.1, [2, 11])  # the second run never reaches it


def test_students_follow_the_teacher_and_grpo_the_reward():
    """The teacher ends at once, which is never rewarded."""
    teacher = torch.zeros(20, 12, 11)
    teacher[:, :, base.END] = 5.0
    end = {}
    for kind in ("GRPO", "full reverse KL", "sampled token"):
        curve = distill.train_on_digits(kind, 0.2, teacher, steps=10, runs=2, seed=0)[1]
        assert curve.shape == (11, 2) and (curve[0] - 0.06).abs().max() < 0.01  # uniform, see above
        end[kind] = curve[-1]
    assert (end["GRPO"] > 0.1).all() and (end["full reverse KL"] < 0.01).all() and (end["sampled token"] < 0.02).all()
