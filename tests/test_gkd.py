"""The distillation scripts: one computation in all variants and layouts, with every loss and mix of data."""

import json
import os
import signal
from functools import partial
from types import ModuleType

import pytest
from bounds import rounding
from comparing import TERMS, assert_close, comparable, config_of, weight_differences
from conftest import Run, assert_equal_weights, build_model, read_lines, reward, two_replicas
from test_scripts import NEVER_ENDING, first_weights, metrics_explained, refused, stopped

from common.distill import offpolicy, teachers

parity = partial(pytest.param, marks=pytest.mark.parity)
RAMP = dict(lmbda=0.9, lmbda_ramp=4)
MIXED = dict(**RAMP, loss="jsd", beta=0.3, loss_temperature=0.7, aggregation="seq_mean", truncated="mask", steps=4)
OPD = dict(loss="opd", num_minibatches=2, steps=4)
SEQ_KD = dict(lmbda=0.4, seq_kd=True, loss="forward_kl", steps=6)
PLAIN = dict(steps=4)
SEPARATE = dict(ROLLOUT_GPU_IDS=(2,))  # on the CPU: a copy of the student that samples
OFFLOAD = dict(param_offload=True, optimizer_offload="rollout")


class Ending:
    """A reward that ends the run as a scheduler does, in its second step: it scores evaluations, too."""

    __name__ = "reward"
    calls = 0

    def __call__(self, completions, answers, **columns):
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return reward(completions, answers, **columns)


def mute_teacher(module: ModuleType) -> None:
    """`prepare`: the teacher cannot generate."""
    teachers.LocalTeacher.generate = None


def shared_lines(run: Run, *others: str) -> list[dict]:
    """What all variants log."""
    left_out = ("staleness", "offloaded", *others)
    return [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in comparable(run.lines)]


def test_when_all_are_cut_off_and_masked_nothing_moves(launcher, tmp_path):
    run = launcher.run("gkd", tmp_path, truncated="mask", steps=2, eval_data="", **NEVER_ENDING).succeeded()
    for line in run.steps:
        assert line["truncated"] == 1.0 and line["skipped_updates"] == 1.0 and line["completion_length"] == 8.0
        assert not line.get("loss") and not line.get("grad_norm") and line["learning_rate"] > 0
    assert run.output.count("every completion was cut off") == 1
    assert run.output.count("nothing in this step could be trained on") == 1
    assert_equal_weights(run.weights(), first_weights(launcher))


def test_a_student_that_is_its_teacher_has_nothing_to_learn(launcher, model_folders):
    # GPT-2 has dropout in its config: a student in train mode would differ from its teacher
    folders = dict(student_model=model_folders["gpt2"], teacher_model=model_folders["gpt2"])
    (line,) = launcher.trained("gkd", **folders, steps=1, learning_rate=0, eval_every=0).steps
    assert abs(line["loss"]) < rounding(TERMS) and line["grad_norm"] < rounding(TERMS, magnitude=8)  # of the logits


@pytest.mark.parametrize(("script", "options"), [
    ("gkd_multigpu", MIXED), parity("gkd_ddp", MIXED), parity("gkd_multigpu", PLAIN), parity("gkd_ddp", PLAIN),
])  # fmt: skip
def test_in_one_process_all_variants_are_equal(launcher, script, options):
    one, other = launcher.trained("gkd", **options), launcher.trained(script, **options)
    assert comparable(other.lines) == comparable(one.lines) and other.samples == one.samples
    assert_equal_weights(other.weights(), one.weights())


def test_steps_are_on_policy_as_drawn(launcher):
    run = launcher.trained("gkd", **MIXED)
    drawn = [offpolicy.draw(0, step, 0.9 * step / 4) for step in range(1, 5)]
    assert {0, 1} == set(drawn) and [line["on_policy"] for line in run.steps] == drawn
    # what was not sampled has no reward, and is not truncated
    assert [("reward" in line) for line in run.steps] == drawn


@pytest.mark.parity
def test_the_comparison_is_of_runs_that_learn(launcher):
    run, forward = launcher.trained("gkd", **PLAIN), launcher.trained("gkd", **SEQ_KD)
    assert all(0.1 < line["divergence"] < 20 and 0 < line["grad_norm"] < 100 for line in run.steps)
    assert all(line["divergence"] == line["reverse_kl"] == pytest.approx(line["loss"], rel=1e-5) for line in run.steps)
    assert run.lines[-2]["eval_reverse_kl"] < run.lines[0]["eval_reverse_kl"]
    assert all(line["divergence"] == line["forward_kl"] != line["reverse_kl"] for line in forward.steps)


@pytest.mark.parity
@pytest.mark.parametrize("options", [PLAIN, MIXED, OPD, SEQ_KD], ids=["plain", "mixed", "opd", "seq_kd"])
def test_two_ranks_are_one_process_in_any_cut_into_micro_batches(launcher, options):
    one, cut = (launcher.trained("gkd", **options, **cut) for cut in ({}, {"micro_batch_tokens": 1}))
    assert cut.samples == one.samples
    assert_close(cut, one)
    assert_close(launcher.trained("gkd_ddp", 2, **options), one)


@pytest.mark.parity
def test_the_answers_of_the_data_have_no_part_in_on_policy_steps(launcher, sums_file, tmp_path):
    rows = [{"prompt": row["prompt"]} for row in read_lines(sums_file)]
    (tmp_path / "none.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = dict(train_data=tmp_path / "none.jsonl", eval_data=tmp_path / "none.jsonl")
    without = launcher.run("gkd", tmp_path / "without", **files, **PLAIN).succeeded()
    assert_equal_weights(without.weights(), launcher.trained("gkd", **PLAIN).weights())
    assert not any("reward" in line or "eval_reward" in line for line in without.lines)
    # where they are needed they are asked for
    assert "row 0: `answer` is missing" in stopped(launcher, "gkd", tmp_path / "needed", **files, lmbda=0.5)
    launcher.run("gkd", tmp_path / "own", **files, lmbda=0.5, seq_kd=True, steps=2).succeeded()


@pytest.mark.parity
def test_every_replica_of_the_student_leaves_for_the_teacher(launcher, tmp_path):
    one = launcher.trained("gkd", **SEQ_KD)
    other = launcher.run("gkd_multigpu", tmp_path, prepare=two_replicas, **SEQ_KD, **OFFLOAD).succeeded()
    assert not weight_differences(other.weights(), one.weights(), config_of(one))  # sums are rounded elsewhere
    model = build_model("qwen2")
    size, head = (4 * sum(p.numel() for p in m.parameters()) / 2**30 for m in (model, model.get_output_embeddings()))
    for line in other.steps:
        assert line["offloaded_gib_student"] == pytest.approx(2 * size)
        assert line["offloaded_gib_teacher"] == pytest.approx(size - head)
        # made in CPU memory, it first leaves the GPU in the second step
        assert line["offloaded_gib_optimizer"] == pytest.approx(2 * size * (line["step"] > 1))
        assert line["seconds_offload"] > 0


@pytest.mark.parity
def test_a_copy_that_samples_is_as_good_as_the_student_and_may_be_one_update_behind(launcher, tmp_path):
    one = launcher.trained("gkd", **MIXED)
    other = launcher.run("gkd_multigpu", tmp_path / "copy", constants=SEPARATE, **MIXED).succeeded()
    assert_equal_weights(other.weights(), one.weights())
    assert {line["staleness"] for line in other.steps if line["on_policy"]} == {0.0}
    one, ahead = launcher.trained("gkd", **PLAIN), dict(overlap=True, param_offload=True, **PLAIN)
    other = launcher.run("gkd_multigpu", tmp_path / "ahead", constants=SEPARATE, **ahead).succeeded()
    assert [line["staleness"] for line in other.steps] == [0.0, 1.0, 1.0, 1.0]
    assert shared_lines(other)[1] == shared_lines(one)[1]  # the first step, after an evaluation
    assert other.steps[1]["teacher_logps"] != one.steps[1]["teacher_logps"]
    # evaluations are of the newest weights, and every row is seen once
    assert other.lines[-2]["step"] == 4 and other.lines[-2].keys() == one.lines[-2].keys()
    assert json.loads((other.out_dir / "checkpoint-000002" / "state.json").read_text())["position"] == 8


@pytest.mark.parity
def test_the_teachers_own_answers_are_generated_once_and_kept(launcher, tmp_path):
    straight = launcher.trained("gkd", **SEQ_KD)
    (cache,) = straight.out_dir.glob("teacher_answers*")
    recipe, *rows = read_lines(cache)
    assert recipe["teacher"] == str(launcher.models["distillation"]["teacher_model"]) and recipe["seed"] == 0
    off_policy = sum(not line["on_policy"] for line in straight.steps)
    assert 0 < len(rows) <= 4 * off_policy and len({row["index"] for row in rows}) == len(rows)
    # another run with them asks for none
    kept = dict(seq_kd_cache=straight.out_dir, **SEQ_KD)
    again = launcher.run("gkd", tmp_path / "run", prepare=mute_teacher, **kept).succeeded()
    assert_equal_weights(again.weights(), straight.weights())
    assert "was generated otherwise (seed 0 -> 1)" in stopped(launcher, "gkd", tmp_path / "other", **kept, seed=1)


@pytest.mark.parity
@pytest.mark.parametrize("options", [{**MIXED, "steps": 6}, SEQ_KD], ids=["mixed", "seq_kd"])
def test_the_scripts_go_on_from_each_other_and_from_a_signal(launcher, tmp_path, options):
    # the first saves because it is asked to end
    run = launcher.run("gkd", tmp_path, rewards=[Ending()], **options, save_every=100).succeeded()
    assert run.checkpoints == ["checkpoint-000002"]
    for script, steps in (("gkd_multigpu", 4), ("gkd_ddp", 6)):
        run = launcher.run(script, tmp_path, **{**options, "steps": steps}).succeeded()
        assert len(json.loads((run.out_dir / run.checkpoints[-1] / "state.json").read_text())["notes"]["teacher"]) == 64
    straight = launcher.trained("gkd", **options)
    assert shared_lines(run, "eval") == shared_lines(straight, "eval")
    assert_equal_weights(run.weights(), straight.weights())


@pytest.mark.parametrize(("options", "message"), [
    (dict(loss="jsd", beta=1.0), "beta = 1.0: must be between 0 and 1"), (dict(loss="kl"), "loss = 'kl': must be"),
    (dict(lmbda=1.5), "lmbda = 1.5: is a share, at most 1"),
    (dict(loss="opd", lmbda=0.5), "its tokens must be the student's own"),
    (dict(loss="opd", loss_temperature=2.0), "must be that of the samples, temperature = 1.0"),
    (dict(loss_temperature=0.0), "loss_temperature = 0.0: must be"), (dict(n_server_workers=0), "n_server_workers = 0"),
    (dict(lmbda=0.5, num_minibatches=8, batch_size=4), "must be at most the 4 answers of an off-policy step"),
], ids=str)  # fmt: skip
def test_what_cannot_be_is_refused(capsys, options, message):
    assert message in refused(capsys, "gkd", **options)


def test_models_that_are_not_there_and_sampling_ahead_without_gpus_that_sample_are_refused(launcher, tmp_path):
    for option in ("student_model", "teacher_model"):
        assert "no such folder" in stopped(launcher, "gkd", tmp_path, **{option: "/no/such/model"})
    said = stopped(launcher, "gkd_multigpu", tmp_path, overlap=True)
    assert "overlap = True: needs GPUs that sample" in said and "set ROLLOUT_GPU_IDS" in said


@pytest.mark.parity
def test_every_metric_is_explained_and_none_is_missing(launcher):
    runs = [launcher.trained("gkd", **options) for options in (dict(**SEQ_KD, **OFFLOAD), OPD, PLAIN)]
    runs.append(launcher.trained("gkd_multigpu", **PLAIN))
    found = {name for run in runs for line in run.lines for name in line}
    assert found | {"aligned"} == metrics_explained("gkd")  # which runs of test_cross_tokenizer.py have
