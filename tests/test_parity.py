"""The variants of one algorithm are the same computation: in one process, in several, in any cut of the batch."""

import math
import sys
from itertools import chain
from pathlib import Path

import pytest
from conftest import MEASURED, Run, assert_equal_weights, comparable, read_lines

MIXED = dict(truncated="mask", advantage_scale="batch", gspo_epochs=2, max_new_tokens=24, kl_estimator="k2")
# One optimizer step per pass over a rollout, and four
ONE, FOUR = ({"num_minibatches": n, "gspo_epochs": 2, "eval_every": 0} for n in (1, 4))
VARIANTS = pytest.mark.parametrize("script, ranks", [("gspo", 1), ("gspo_multigpu", 1), ("gspo_ddp", 2)])
TOKENS = {1: 100, 2: 35}  # in a micro-batch, by number of ranks
IMPORT = "from common.config import require\n"
# Notes in a file what becomes of the sequences of a rollout, each named by its place in it
SPY = (
    IMPORT
    + """
_notes = open({folder!r} + f"/{{distributed.rank()}}.jsonl", "a", buffering=1)


def _note(**what):
    _notes.write(__import__("json").dumps(what) + "\\n")


def _cut(*args, real=rollout.RolloutBatch.minibatches, **options):
    minibatches = real(*args, **options)
    _note(cut=[[micro.rows.tolist() for micro in minibatch] for minibatch in minibatches])
    return minibatches


def _fill(micros, field, *args, real=logprobs.fill):
    micros = list(micros)
    _note(fill=field, rows=[micro.rows.tolist() for micro in micros])
    real(micros, field, *args)


def _forward(self, *args, real=logprobs.LogProbs.forward):
    policy = any(p.requires_grad for p in self.parameters())
    _note(forward=len(args[0]), of="reference" if not policy else "update" if torch.is_grad_enabled() else "policy")
    return real(self, *args)


def _ratio(logps, old_logps, mask, real=losses.sequence_ratio):
    ratio = real(logps, old_logps, mask)
    _note(ratio=ratio.tolist(), own=torch.equal(logps, old_logps))
    return ratio


rollout.RolloutBatch.minibatches, logprobs.fill = _cut, _fill
logprobs.LogProbs.forward, losses.sequence_ratio = _forward, _ratio
"""
)


class SpiedRun(Run):
    """A run with what was noted about each step, by rank."""

    def __init__(self, run: Run, folder: Path):
        self.__dict__.update(run.__dict__)
        self.notes = []  # rank, step, notes in order
        for rank in range(len(run.processes)):
            steps = []
            for note in read_lines(folder / f"{rank}.jsonl"):
                if "cut" in note:  # the first thing that is done to a rollout
                    steps.append([])
                steps[-1].append(note)
            self.notes.append(steps)

    def cuts(self) -> list[list]:
        """Rank, step, minibatch, micro-batch, rows."""
        return [[notes[0]["cut"] for notes in steps] for steps in self.notes]


@pytest.fixture(scope="module")
def spied(launcher, tmp_path_factory):
    """Runs that are watched; tests that ask for the same one share it."""
    runs = {}

    def get(script: str, ranks: int, **options) -> SpiedRun:
        key = (script, ranks, *sorted(options.items()))
        if key not in runs:
            folder = tmp_path_factory.mktemp("notes")
            copy = launcher.copy(script, edits={IMPORT: SPY.format(folder=str(folder))})
            run = launcher.run(copy, folder / "run", ranks, micro_batch_tokens=TOKENS[ranks], **options)
            runs[key] = SpiedRun(run.succeeded(), folder)
        return runs[key]

    return get


def assert_close(run, other, metrics: float, weights: float) -> None:
    """Relative difference of metrics, absolute difference of nearly all weights."""
    assert len(run.lines) == len(other.lines) > 0
    for line, other_line in zip(comparable(run.lines), comparable(other.lines), strict=True):
        assert line.keys() == other_line.keys()
        for name, value in line.items():
            # the KL to the old policy is a difference of almost equal numbers: of the order of fp32 rounding
            same = value == other_line[name] or math.isclose(value, other_line[name], rel_tol=metrics, abs_tol=1e-6)
            assert same, f"step {line['step']}: {name} {value} {other_line[name]}"
    one, two = run.weights(), other.weights()
    assert one.keys() == two.keys()
    for name in one:
        difference = (one[name] - two[name]).abs()
        if name.endswith("c_attn.bias"):  # a bias of all keys has no gradient but rounding, which Adam makes large
            difference = difference.view(3, -1)[[0, 2]]
        # of few weights, Adam makes a good part of a step out of the rounding of a gradient close to 0
        assert difference.max() <= 10 * weights and difference.mean() <= weights / 10, f"{name}: {difference.max()}"


@pytest.mark.parametrize("script", ["gspo_multigpu", "gspo_ddp"])
def test_in_one_process_all_variants_are_equal(launcher, script):
    one, other = launcher.trained("gspo", steps=6), launcher.trained(script, steps=6)
    assert comparable(other.lines) == comparable(one.lines)
    assert other.samples == one.samples
    assert_equal_weights(other.weights(), one.weights())


def test_the_comparison_is_of_runs_that_learn(launcher):
    run = launcher.trained("gspo", steps=6)
    assert [line["step"] for line in run.lines] == [0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6]  # evaluated, then saved
    assert all(0 < line["grad_norm"] < 100 for line in run.steps)
    # in fp32 the distribution sampled from is the one trained on, up to rounding
    assert all(0 < line["rollout_mismatch"] < 1e-5 for line in run.steps)
    assert any(line["unscored"] > 0 for line in run.steps) and any(line["clip_fraction"] > 0 for line in run.steps)
    assert any((a != b).any() for a, b in zip(run.weights(2).values(), run.weights(6).values(), strict=True))


@pytest.mark.parametrize("family, options", [("qwen2", {}), ("qwen2", MIXED), ("gpt2", {})])
def test_two_ranks_are_one_process(launcher, model_folders, family, options):
    options = {"steps": 6, **options} | ({"policy_model": model_folders[family]} if family != "qwen2" else {})
    one, two = launcher.trained("gspo", **options), launcher.trained("gspo_ddp", 2, **options)
    # rank 0 shows its own prompts, those with even numbers
    shown = [line for step in range(6) for line in one.samples[4 * step : 4 * step + 4 : 2]]
    assert two.samples == shown
    assert_close(two, one, metrics=1e-4, weights=1e-6)


@pytest.mark.parametrize("tokens", [1, 400], ids=["each alone", "all together"])
def test_the_cut_into_micro_batches_changes_nothing(launcher, tokens):
    one, other = launcher.trained("gspo", steps=6), launcher.trained("gspo", steps=6, micro_batch_tokens=tokens)
    assert other.samples == one.samples
    assert_close(other, one, metrics=1e-4, weights=1e-6)


@pytest.mark.parametrize("options", [ONE, FOUR], ids=["one minibatch", "four"])
def test_two_ranks_with_other_micro_batches_are_one_process(spied, options):
    one, two = spied("gspo", 1, **options), spied("gspo_ddp", 2, **options)
    (alone,), (first, second) = one.cuts(), two.cuts()
    assert len(alone) == len(first) == len(second) == 3
    for step in range(3):
        # the ranks see the prompts in turn, here numbered as they lie in the rollout of one process
        parts = [[sorted(chain(*micros)) for micros in cut[step]] for cut in (alone, first, second)]
        own = [[8 * (row // 4) + 4 * rank + row % 4 for row in rows] for rank in range(2) for rows in parts[1 + rank]]
        assert [sorted(own[k] + own[k + len(parts[0])]) for k in range(len(parts[0]))] == parts[0]
        assert sorted(chain(*parts[0])) == list(range(16))
    counts = [[len(micros) for minibatches in cut for micros in minibatches] for cut in (first, second)]
    # ranks take unequal numbers of forward passes, and none waits for the other
    assert counts[0] != counts[1] and max(map(max, counts)) > 1
    assert any(len(rows) > 1 for cut in alone for rows in chain(*cut))
    assert_close(two, one, metrics=1e-4, weights=1e-6)


@VARIANTS
def test_the_first_minibatch_finds_its_old_log_probs_in_its_own_forward_pass(spied, script, ranks):
    run = spied(script, ranks, **FOUR)
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


@pytest.mark.parametrize("script, ranks", [("gspo", 1), ("gspo_ddp", 2)])
def test_with_one_minibatch_no_log_probs_are_computed_before_the_update(spied, script, ranks):
    run = spied(script, ranks, **ONE)
    for steps in run.notes:
        for cut, *notes in steps:
            (micros,) = cut["cut"]
            assert [note["rows"] for note in notes if note.get("fill") == "old_logps"] == [[]]
            forwards = [note["of"] for note in notes if "forward" in note]
            assert set(forwards) == {"reference", "update"} and forwards.count("update") == 2 * len(micros)
            ratios = [note for note in notes if "ratio" in note]
            assert all(note["own"] and set(note["ratio"]) == {1.0} for note in ratios[: len(micros)])
            assert not any(note["own"] for note in ratios[len(micros) :])
    # of both epochs
    assert all(line["ratio_max"] > 1.0 and line["kl_old"] > 0 for line in run.steps)


def test_gradient_checkpointing_changes_nothing(launcher):
    one, other = launcher.trained("gspo", steps=6), launcher.trained("gspo", steps=6, gradient_checkpointing=True)
    assert_close(other, one, metrics=1e-5, weights=1e-7)


@pytest.mark.parametrize("script", ["grpo", "gkd"])
def test_dropout_has_no_part_in_any_loss(launcher, model_folders, script):
    # GPT-2 has 0.1 in its config: a policy in train mode would differ from its own rollout, reference and teacher
    folder, options = model_folders["gpt2"], dict(steps=1, learning_rate=0, eval_every=0)
    if script == "gkd":
        (line,) = launcher.trained("gkd", student_model=folder, teacher_model=folder, **options).steps
        assert abs(line["loss"]) < 1e-6 and line["grad_norm"] < 1e-5
        return
    (line,) = launcher.trained("grpo", policy_model=folder, kl_coef=0.1, **options).steps
    assert line["ratio_max"] == 1.0 and line["clip_fraction"] == line["out_of_range"] == 0.0
    assert abs(line["kl_ref"]) < 1e-9 and line["rollout_mismatch"] < 1e-5 and line["grad_norm"] > 0


def test_another_seed_is_another_run(launcher):
    one, other = launcher.trained("gspo", steps=6), launcher.trained("gspo", steps=6, seed=1)
    assert not {line["completion"] for line in one.samples} & {line["completion"] for line in other.samples}
    assert {line["prompt"] for line in one.samples[:4]} != {line["prompt"] for line in other.samples[:4]}


@pytest.mark.slow
def test_accelerate_launch_runs_two_ranks(launcher, tmp_path):
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--cpu", "--num_processes", "2"]
    run = launcher.command(command, launcher.copy("gspo_ddp"), tmp_path / "run", steps=6).wait().succeeded()
    # accelerate picks the number of threads, so sums are rounded elsewhere
    assert_close(run, launcher.trained("gspo_ddp", 2, steps=6), metrics=1e-4, weights=1e-6)


@VARIANTS
def test_measured_values_are_there(launcher, script, ranks):
    run = launcher.trained(script, ranks, steps=6)
    phases = {f"seconds_{phase}" for phase in ("rollout", "score", "logprobs", "update")}
    for line in run.steps:
        assert {name for name in line if name.startswith(MEASURED)} == phases | {
            "seconds", "tokens_per_second", "memory_gib", "host_memory_gib",
        }  # fmt: skip
        assert line["tokens_per_second"] > 0 and line["memory_gib"] == [] and len(line["host_memory_gib"]) == ranks
        assert all(line[phase] >= 0 for phase in phases)
        assert line["seconds"] == pytest.approx(sum(line[phase] for phase in phases))
    saved = [line for line in run.lines if "seconds_save" in line]
    assert [line["step"] for line in saved] == [2, 4, 6]
    assert all(line.keys() == {"step", "seconds_save"} and line["seconds_save"] > 0 for line in saved)
