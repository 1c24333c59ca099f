"""The variants of one algorithm are the same computation: in one process, in several, in any cut of the batch."""

import sys
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from bounds import rounding
from comparing import MEASURED, TERMS, assert_close, comparable
from conftest import SCRIPTS, assert_equal_weights, reward

from common.generation import batches
from common.maths import losses
from common.model import logprobs, passes
from common.planning import layouts

# One optimizer step per pass over a rollout, and four; micro-batches of several sequences
ONE, FOUR = ({"num_minibatches": n, "epochs": 2, "micro_batch_tokens": 100} for n in (1, 4))
MIXED = dict(ONE, truncated="mask", advantage_scale="batch", max_new_tokens=24, kl_estimator="k2", num_minibatches=2)
RANKS = dict(micro_batch_tokens=35)  # two ranks take unequal numbers of forward passes, and neither waits
parity = partial(pytest.param, marks=pytest.mark.parity)


@pytest.mark.parametrize("script", ["gspo_multigpu", "gspo_ddp"])
def test_in_one_process_all_variants_are_equal(launcher, script):
    one, other = launcher.trained("gspo", **FOUR), launcher.trained(script, **FOUR)
    assert comparable(other.lines) == comparable(one.lines)
    assert other.samples == one.samples
    assert_equal_weights(other.weights(), one.weights())


def test_the_comparison_is_of_runs_that_learn(launcher):
    run = launcher.trained("gspo", **FOUR)
    assert [line["step"] for line in run.lines] == [0, 1, 2, 2, 2, 3, 3, 3]  # evaluated, then saved
    assert all(0 < line["grad_norm"] < 100 for line in run.steps)
    # in fp32 the distribution sampled from is the one trained on, up to rounding
    assert all(0 < line["rollout_mismatch"] < rounding(TERMS) for line in run.steps)
    assert any(line["unscored"] > 0 for line in run.steps) and any(line["clip_fraction"] > 0 for line in run.steps)
    assert any((a != b).any() for a, b in zip(run.weights(2).values(), run.weights(3).values(), strict=True))


@pytest.mark.parametrize(("family", "options"), [
    ("qwen2", FOUR), parity("qwen2", ONE), parity("qwen2", MIXED), parity("gpt2", FOUR),
])  # fmt: skip
def test_two_ranks_are_one_process(launcher, model_folders, family, options):
    options = options | ({"policy_model": model_folders[family]} if family != "qwen2" else {})
    one, two = launcher.trained("gspo", **options), launcher.trained("gspo_ddp", 2, **options | RANKS)
    # the ranks see the prompts in turn; rank 0 shows its own, those with even numbers
    assert two.samples == [line for step in range(3) for line in one.samples[4 * step : 4 * step + 4 : 2]]
    assert_close(two, one)


@pytest.mark.parametrize("options", [
    dict(micro_batch_tokens=1), parity(dict(gradient_checkpointing=True)), parity(dict(rollout_batch=5)),
], ids=str)  # fmt: skip
def test_what_is_for_memory_only_changes_nothing(launcher, tmp_path, options):
    one, other = launcher.trained("gspo", **FOUR), launcher.run("gspo", tmp_path, **FOUR | options).succeeded()
    assert other.samples == one.samples
    assert_close(other, one)


@pytest.mark.parametrize(("script", "options"), [
    ("gspo", FOUR), ("gspo_multigpu", FOUR), ("gspo_ddp", FOUR), parity("gspo", ONE),
])  # fmt: skip
def test_the_first_minibatch_finds_its_old_log_probs_in_its_own_forward_pass(
    launcher, monkeypatch, tmp_path, script, options
):
    cut, filled, computed, ratios = [], {}, {"policy": [], "reference": [], "update": []}, []
    minibatches, fill, forward = batches.RolloutBatch.minibatches, passes.fill, logprobs.LogProbs.forward
    sequence_ratio = losses.sequence_ratio

    def watched_minibatches(*args, **options):
        cut.extend(minibatches(*args, **options))
        return list(cut)

    def watched_fill(micros, field, *args):
        filled[field] = list(micros)
        fill(filled[field], field, *args)

    def watched_forward(self, *args):
        policy = any(p.requires_grad for p in self.parameters())
        computed["reference" if not policy else "update" if torch.is_grad_enabled() else "policy"].append(len(args[0]))
        return forward(self, *args)

    def watched_ratio(logps, old_logps, mask):
        ratio = sequence_ratio(logps, old_logps, mask)
        ratios.append((torch.equal(logps, old_logps), ratio.tolist()))
        return ratio

    monkeypatch.setattr(batches.RolloutBatch, "minibatches", watched_minibatches)
    monkeypatch.setattr(passes, "fill", watched_fill)
    monkeypatch.setattr(logprobs.LogProbs, "forward", watched_forward)
    monkeypatch.setattr(losses, "sequence_ratio", watched_ratio)
    given = launcher.options(SCRIPTS[script], tmp_path, steps=1, eval_data="", **options)
    module, cfg = layouts.load(SCRIPTS[script], given)
    module.main(cfg, rewards=[(reward, 1.0)])

    micros, first = list(chain(*cut)), len(cut[0])
    rows = [micro.rows.tolist() for micro in micros]
    found = {name: [micro.rows.tolist() for micro in part] for name, part in filled.items()}
    assert found == {"old_logps": rows[first:], "ref_logps": rows}
    # before the update each sequence is computed once, by each model that has to; then once per epoch
    sizes = list(map(len, rows))
    assert sum(computed["policy"]) == sum(sizes[first:]) and sum(computed["reference"]) == sum(sizes)
    assert computed["update"] == sizes * 2 == [len(ratio) for _, ratio in ratios]
    assert all(own and set(ratio) == {1.0} for own, ratio in ratios[:first])
    # all others are computed after an optimizer step, with the old log-probs of before
    assert not any(own for own, _ in ratios[first:])
    later = list(chain(*(ratio for _, ratio in ratios[first:])))
    assert set(later) != {1.0} and all(0.9 < ratio < 1.1 for ratio in later)


@pytest.mark.parity
def test_another_seed_is_another_run(launcher, tmp_path):
    one = launcher.trained("gspo", **FOUR)
    other = launcher.run("gspo", tmp_path, steps=1, seed=1, eval_data="").succeeded()
    for name in ("prompt", "completion"):
        assert {line[name] for line in one.samples[:4]} != {line[name] for line in other.samples}


@pytest.mark.parity
def test_accelerate_launch_runs_two_ranks(launcher, tmp_path):
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--cpu", "--num_processes", "2"]
    run = launcher.command(command, launcher.copy("gspo_ddp"), tmp_path / "run", **FOUR | RANKS)
    # accelerate picks the number of threads, so sums are rounded elsewhere
    assert_close(run.wait().succeeded(), launcher.trained("gspo_ddp", 2, **FOUR | RANKS))


@pytest.mark.parametrize("script, ranks", [("gspo", 1), ("gspo_ddp", 2)])
def test_measured_values_are_there(launcher, script, ranks):
    run = launcher.trained(script, ranks, **FOUR | (RANKS if ranks == 2 else {}))
    phases = {f"seconds_{phase}" for phase in ("rollout", "score", "logprobs", "update")}
    others = {"seconds", "tokens_per_second", "memory_gib", "host_memory_gib"}
    for line in run.steps:
        assert {name for name in line if name.startswith(MEASURED)} == phases | others
        assert line["tokens_per_second"] > 0 and line["memory_gib"] == [] and len(line["host_memory_gib"]) == ranks
        assert all(line[phase] >= 0 for phase in phases)
        assert line["seconds"] == pytest.approx(sum(line[phase] for phase in phases))
    saved = [line for line in run.lines if "seconds_save" in line]
    assert [line["step"] for line in saved] == [2, 3] and all(line["seconds_save"] > 0 for line in saved)
