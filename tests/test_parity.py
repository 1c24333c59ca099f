"""The variants of one algorithm are the same computation: in one process, in several, in any cut of the batch."""

import json
import os
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bounds import rounding
from comparing import MEASURED, TERMS, assert_close, comparable
from conftest import Run, assert_equal_weights, read_lines

from common import logprobs, losses, rollout

# One optimizer step per pass over a rollout, and four
ONE, FOUR = ({"num_minibatches": n, "gspo_epochs": 2} for n in (1, 4))
MIXED = dict(truncated="mask", advantage_scale="batch", gspo_epochs=2, max_new_tokens=24, kl_estimator="k2")
TOKENS = {1: 100, 2: 35}  # in a micro-batch, by number of ranks
parity = partial(pytest.param, marks=pytest.mark.parity)


def spy(folder: Path, module: ModuleType) -> None:
    """`prepare`: notes in a file what becomes of the sequences of a rollout, each named by its place in it."""
    minibatches, fill, forward = rollout.RolloutBatch.minibatches, logprobs.fill, logprobs.LogProbs.forward
    sequence_ratio, path = losses.sequence_ratio, folder / f"{os.environ.get('RANK', 0)}.jsonl"

    def note(**what):
        with path.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def noted_minibatches(*args, **options):
        found = minibatches(*args, **options)
        note(cut=[[micro.rows.tolist() for micro in minibatch] for minibatch in found])
        return found

    def noted_fill(micros, field, *args):
        micros = list(micros)
        note(fill=field, rows=[micro.rows.tolist() for micro in micros])
        fill(micros, field, *args)

    def noted_forward(self, *args):
        policy = any(p.requires_grad for p in self.parameters())
        note(forward=len(args[0]), of="reference" if not policy else "update" if torch.is_grad_enabled() else "policy")
        return forward(self, *args)

    def noted_ratio(logps, old_logps, mask):
        ratio = sequence_ratio(logps, old_logps, mask)
        note(ratio=ratio.tolist(), own=torch.equal(logps, old_logps))
        return ratio

    rollout.RolloutBatch.minibatches, logprobs.fill = noted_minibatches, noted_fill
    logprobs.LogProbs.forward, losses.sequence_ratio = noted_forward, noted_ratio


def cuts(run: Run) -> list[list]:
    """Rank, step, minibatch, micro-batch, rows."""
    return [[notes[0]["cut"] for notes in steps] for steps in run.notes]


@pytest.fixture(scope="module")
def spied(launcher, tmp_path_factory):
    """Runs that are watched; tests that ask for the same one share it."""
    runs = {}

    def get(script: str, ranks: int = 1, **options) -> Run:
        key = (script, ranks, *sorted(options.items()))
        if key not in runs:
            folder = tmp_path_factory.mktemp("notes")
            options = dict(prepare=partial(spy, folder), micro_batch_tokens=TOKENS[ranks], **options)
            run = runs[key] = launcher.run(script, folder / "run", ranks, **options).succeeded()
            run.notes = [[] for _ in range(ranks)]  # rank, step, notes in order
            for steps, file in zip(run.notes, sorted(folder.glob("*.jsonl")), strict=True):
                for note in read_lines(file):
                    if "cut" in note:  # the first thing that is done to a rollout
                        steps.append([])
                    steps[-1].append(note)
        return runs[key]

    return get


@pytest.mark.parametrize("script", ["gspo_multigpu", "gspo_ddp"])
def test_in_one_process_all_variants_are_equal(spied, script):
    one, other = spied("gspo", **FOUR), spied(script, **FOUR)
    assert comparable(other.lines) == comparable(one.lines)
    assert other.samples == one.samples
    assert_equal_weights(other.weights(), one.weights())


def test_the_comparison_is_of_runs_that_learn(spied):
    run = spied("gspo", **FOUR)
    assert [line["step"] for line in run.lines] == [0, 1, 2, 2, 2, 3, 3, 3]  # evaluated, then saved
    assert all(0 < line["grad_norm"] < 100 for line in run.steps)
    # in fp32 the distribution sampled from is the one trained on, up to rounding
    assert all(0 < line["rollout_mismatch"] < rounding(TERMS) for line in run.steps)
    assert any(line["unscored"] > 0 for line in run.steps) and any(line["clip_fraction"] > 0 for line in run.steps)
    assert any((a != b).any() for a, b in zip(run.weights(2).values(), run.weights(3).values(), strict=True))


@pytest.mark.parametrize(("family", "options"), [
    ("qwen2", FOUR), parity("qwen2", ONE), parity("qwen2", MIXED), parity("gpt2", FOUR),
])  # fmt: skip
def test_two_ranks_are_one_process(spied, model_folders, family, options):
    options = options | ({"policy_model": model_folders[family]} if family != "qwen2" else {})
    one, two = spied("gspo", **options), spied("gspo_ddp", 2, **options)
    (alone,), (first, second) = cuts(one), cuts(two)
    assert len(alone) == len(first) == len(second) == 3
    for step in range(3):
        # the ranks see the prompts in turn, here numbered as they lie in the rollout of one process
        parts = [[sorted(chain(*micros)) for micros in cut[step]] for cut in (alone, first, second)]
        own = [[8 * (row // 4) + 4 * rank + row % 4 for row in rows] for rank in range(2) for rows in parts[1 + rank]]
        assert [sorted(own[k] + own[k + len(parts[0])]) for k in range(len(parts[0]))] == parts[0]
        assert sorted(chain(*parts[0])) == list(range(16))
    if family == "qwen2":  # ranks take unequal numbers of forward passes, and none waits for the other
        counts = [[len(micros) for minibatches in cut for micros in minibatches] for cut in (first, second)]
        assert counts[0] != counts[1] and max(map(max, counts)) > 1
    assert any(len(rows) > 1 for cut in alone for rows in chain(*cut))
    # rank 0 shows its own prompts, those with even numbers
    assert two.samples == [line for step in range(3) for line in one.samples[4 * step : 4 * step + 4 : 2]]
    assert_close(two, one)


@pytest.mark.parametrize("options", [
    dict(micro_batch_tokens=1), parity(dict(micro_batch_tokens=400)), parity(dict(gradient_checkpointing=True)),
    parity(dict(rollout_batch=5)),
], ids=str)  # fmt: skip
def test_what_is_for_memory_only_changes_nothing(spied, launcher, tmp_path, options):
    one, other = spied("gspo", **FOUR), launcher.run("gspo", tmp_path, **FOUR, **options).succeeded()
    assert other.samples == one.samples
    assert_close(other, one)


@pytest.mark.parametrize(("script", "ranks", "options"), [
    ("gspo", 1, FOUR), ("gspo_multigpu", 1, FOUR), ("gspo_ddp", 2, FOUR), parity("gspo", 1, ONE),
    parity("gspo_ddp", 2, ONE),
])  # fmt: skip
def test_the_first_minibatch_finds_its_old_log_probs_in_its_own_forward_pass(spied, script, ranks, options):
    run = spied(script, ranks, **options)
    for steps in run.notes:
        for cut, *notes in steps:
            micros, first = list(chain(*cut["cut"])), len(cut["cut"][0])
            fills = {note["fill"]: note["rows"] for note in notes if "fill" in note}
            assert fills == {"old_logps": micros[first:], "ref_logps": micros}
            # before the update each sequence is computed once, by each model that has to; then once per epoch
            sizes = list(map(len, micros))
            rows = {of: [n["forward"] for n in notes if n.get("of") == of] for of in ("policy", "reference", "update")}
            assert sum(rows["policy"]) == sum(sizes[first:]) and sum(rows["reference"]) == sum(sizes)
            assert rows["update"] == sizes * 2
            ratios = [note for note in notes if "ratio" in note]
            assert [len(note["ratio"]) for note in ratios] == sizes * 2
            assert all(note["own"] and set(note["ratio"]) == {1.0} for note in ratios[:first])
            # all others are computed after an optimizer step, with the old log-probs of before
            assert not any(note["own"] for note in ratios[first:])
            later = list(chain(*(note["ratio"] for note in ratios[first:])))
            assert set(later) != {1.0} and all(0.9 < ratio < 1.1 for ratio in later)


@pytest.mark.parity
def test_another_seed_is_another_run(spied, launcher, tmp_path):
    one, other = spied("gspo", **FOUR), launcher.run("gspo", tmp_path, steps=1, seed=1, eval_data="").succeeded()
    assert not {line["completion"] for line in one.samples[:4]} & {line["completion"] for line in other.samples}
    assert {line["prompt"] for line in one.samples[:4]} != {line["prompt"] for line in other.samples}


@pytest.mark.parity
def test_accelerate_launch_runs_two_ranks(spied, launcher, tmp_path):
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--cpu", "--num_processes", "2"]
    run = launcher.command(command, launcher.copy("gspo_ddp"), tmp_path / "run", **FOUR, micro_batch_tokens=TOKENS[2])
    # accelerate picks the number of threads, so sums are rounded elsewhere
    assert_close(run.wait().succeeded(), spied("gspo_ddp", 2, **FOUR))


@pytest.mark.parametrize("script, ranks", [("gspo", 1), ("gspo_multigpu", 1), ("gspo_ddp", 2)])
def test_measured_values_are_there(spied, script, ranks):
    run = spied(script, ranks, **FOUR)
    phases = {f"seconds_{phase}" for phase in ("rollout", "score", "logprobs", "update")}
    others = {"seconds", "tokens_per_second", "memory_gib", "host_memory_gib"}
    for line in run.steps:
        assert {name for name in line if name.startswith(MEASURED)} == phases | others
        assert line["tokens_per_second"] > 0 and line["memory_gib"] == [] and len(line["host_memory_gib"]) == ranks
        assert all(line[phase] >= 0 for phase in phases)
        assert line["seconds"] == pytest.approx(sum(line[phase] for phase in phases))
    saved = [line for line in run.lines if "seconds_save" in line]
    assert [line["step"] for line in saved] == [2, 3]
    assert all(line.keys() == {"step", "seconds_save"} and line["seconds_save"] > 0 for line in saved)
