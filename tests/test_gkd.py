"""The distillation scripts: one computation in all variants and layouts, with every loss and mix of data."""

import json
import os
import shutil
import signal

import pytest
import torch
from conftest import SCRIPTS, assert_equal_weights, build_model, build_tokenizer, comparable, read_lines
from test_parity import assert_close
from test_resume import SLOW_REWARD, assert_same
from test_scripts import NEVER_ENDS, failed, first_weights, metrics_explained

from common import offpolicy

MIXED = dict(lmbda=0.5, loss="jsd", beta=0.3, loss_temperature=0.7, aggregation="seq_mean", truncated="mask", steps=6)
OPD = dict(loss="opd", num_minibatches=2, steps=4)
SEQ_KD = dict(lmbda=0.4, seq_kd=True, loss="forward_kl", steps=6)
SEPARATE = {"\nROLLOUT_GPU_IDS = None": "\nROLLOUT_GPU_IDS = (2,)"}  # on the CPU: a copy of the student that samples
PLAIN = dict(steps=4)


# ---- one computation ----


def test_when_all_are_cut_off_and_masked_nothing_moves(launcher, tmp_path):
    copy = launcher.copy("gkd", edits=NEVER_ENDS)
    run = launcher.run(copy, tmp_path, truncated="mask", steps=2, eval_data="").succeeded()
    for line in run.steps:
        assert line["truncated"] == 1.0 and line["skipped_updates"] == 1.0 and line["completion_length"] == 8.0
        assert not line.get("loss") and not line.get("grad_norm") and line["learning_rate"] > 0
    assert run.output.count("every completion was cut off") == 1
    assert run.output.count("nothing in this step could be trained on") == 1
    assert_equal_weights(run.weights(), first_weights(launcher))


@pytest.mark.parametrize("script", ["gkd_multigpu", "gkd_ddp"])
@pytest.mark.parametrize("options", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_in_one_process_all_variants_are_equal(launcher, script, options):
    one, other = launcher.trained("gkd", **options), launcher.trained(script, **options)
    lines = [{k: v for k, v in line.items() if k != "staleness"} for line in comparable(other.lines)]
    assert lines == comparable(one.lines) and other.samples == one.samples
    assert_equal_weights(other.weights(), one.weights())


def test_the_comparison_is_of_runs_that_learn(launcher):
    run = launcher.trained("gkd", **PLAIN)
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4]
    assert all(0.1 < line["divergence"] < 20 and 0 < line["grad_norm"] < 100 for line in run.steps)
    assert all(line["divergence"] == line["reverse_kl"] == pytest.approx(line["loss"], rel=1e-5) for line in run.steps)
    assert run.lines[-2]["eval_reverse_kl"] < run.lines[0]["eval_reverse_kl"]
    forward = launcher.trained("gkd", **SEQ_KD)
    assert all(line["divergence"] == line["forward_kl"] != line["reverse_kl"] for line in forward.steps)
    mixed = launcher.trained("gkd", **MIXED)
    drawn = [offpolicy.draw(0, step, 0.5) for step in range(1, 7)]
    assert {0, 1} == set(drawn) and [line["on_policy"] for line in mixed.steps] == drawn
    # what was not sampled has no reward, and is not truncated
    assert [("reward" in line) for line in mixed.steps] == drawn


@pytest.mark.parametrize("options", [PLAIN, MIXED, OPD, SEQ_KD], ids=["plain", "mixed", "opd", "seq_kd"])
def test_two_ranks_are_one_process(launcher, options):
    one, two = launcher.trained("gkd", **options), launcher.trained("gkd_ddp", 2, **options)
    assert_close(two, one, metrics=1e-4, weights=2e-6)


@pytest.mark.parametrize("options", [PLAIN, MIXED, OPD], ids=["plain", "mixed", "opd"])
def test_the_cut_into_micro_batches_changes_nothing(launcher, options):
    one, other = (launcher.trained("gkd", **options, **cut) for cut in ({}, {"micro_batch_tokens": 1}))
    assert other.samples == one.samples
    assert_close(other, one, metrics=1e-4, weights=2e-6)


def test_the_answers_of_the_data_have_no_part_in_on_policy_steps(launcher, sums_file, tmp_path):
    rows = [{**row, "answer": row["answer"] + " ." * (7 * i % 5)} for i, row in enumerate(read_lines(sums_file))]
    (tmp_path / "longer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = launcher.run(launcher.copy("gkd"), tmp_path / "run", train_data=tmp_path / "longer.jsonl", **PLAIN)
    assert_equal_weights(run.succeeded().weights(), launcher.trained("gkd", **PLAIN).weights())
    (tmp_path / "none.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    files = dict(train_data=tmp_path / "none.jsonl", eval_data=tmp_path / "none.jsonl")
    without = launcher.run(launcher.copy("gkd"), tmp_path / "without", **files, **PLAIN).succeeded()
    assert_equal_weights(without.weights(), run.weights())
    assert not any("reward" in line or "eval_reward" in line for line in without.lines)
    # where they are needed they are asked for
    needed = launcher.run(launcher.copy("gkd"), tmp_path / "needed", **files, lmbda=0.5)
    failed(needed, "row 0: `answer` is missing")
    launcher.run(launcher.copy("gkd"), tmp_path / "own", **files, lmbda=0.5, seq_kd=True, steps=2).succeeded()


def test_offloading_changes_nothing(launcher):
    options = dict(param_offload=True, optimizer_offload="rollout")
    one, other = launcher.trained("gkd", **SEQ_KD), launcher.trained("gkd", **SEQ_KD, **options)
    reported = {"offloaded_gib_student", "offloaded_gib_teacher", "offloaded_gib_optimizer"}
    lines = [{k: v for k, v in line.items() if k not in reported} for line in comparable(other.lines)]
    assert lines == comparable(one.lines)
    assert_equal_weights(other.weights(), one.weights())
    size = sum(p.numel() for p in build_model("qwen2").parameters()) * 4 / 2**30
    head = build_model("qwen2").get_output_embeddings().weight.numel() * 4 / 2**30
    for line in other.steps:
        assert line["offloaded_gib_student"] == pytest.approx(size)
        assert line["offloaded_gib_teacher"] == pytest.approx(size - head)
        # made in CPU memory, it first leaves the GPU in the second step
        assert line["offloaded_gib_optimizer"] == pytest.approx(2 * size * (line["step"] > 1))
        assert line["seconds_offload"] > 0


def test_every_replica_of_the_student_leaves_for_the_teacher(launcher, tmp_path):
    home = "    home = gpus.student[0]\n"
    two = {home: home + "    gpus = devices.DistillationLayout((home, home), None, gpus.teacher)\n"}
    one = launcher.trained("gkd", **SEQ_KD)
    script = launcher.copy("gkd_multigpu", edits=two)
    other = launcher.run(script, tmp_path / "run", param_offload=True, **SEQ_KD).succeeded()
    size = sum(p.numel() for p in build_model("qwen2").parameters()) * 4 / 2**30
    assert [line["offloaded_gib_student"] for line in other.steps] == pytest.approx([2 * size] * len(one.steps))
    for line, expected in zip(other.steps, one.steps, strict=True):  # sums are rounded elsewhere
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    for name, weight in other.weights().items():
        torch.testing.assert_close(weight, one.weights()[name], rtol=0, atol=1e-4)


def test_a_copy_that_samples_is_as_good_as_the_student(launcher, tmp_path):
    one = launcher.trained("gkd", **MIXED)
    other = launcher.run(launcher.copy("gkd_multigpu", edits=SEPARATE), tmp_path / "run", **MIXED).succeeded()
    assert_equal_weights(other.weights(), one.weights())
    assert {line["staleness"] for line in other.steps if line["on_policy"]} == {0.0}


def test_sampling_ahead_is_one_update_behind(launcher, tmp_path):
    one = launcher.trained("gkd", **PLAIN)
    script = launcher.copy("gkd_multigpu", edits=SEPARATE)
    other = launcher.run(script, tmp_path / "run", overlap=True, param_offload=True, **PLAIN).succeeded()
    assert [line["staleness"] for line in other.steps] == [0.0, 1.0, 1.0, 1.0]
    first, second = comparable(other.steps)[:2]
    own = {name: value for name, value in first.items() if not name.startswith(("staleness", "offloaded"))}
    assert own == comparable(one.steps)[0]
    assert second["teacher_logps"] != comparable(one.steps)[1]["teacher_logps"]
    # evaluations are of the newest weights, and every row is seen once
    assert other.lines[-2]["step"] == 4 and other.lines[-2].keys() == one.lines[-2].keys()
    state = json.loads((other.out_dir / "checkpoint-000002" / "state.json").read_text())
    assert state["position"] == 8
    hybrid = launcher.run(launcher.copy("gkd_multigpu"), tmp_path / "hybrid", overlap=True)
    failed(hybrid, "overlap = True: needs GPUs that sample while others train; set ROLLOUT_GPU_IDS")


# ---- data ----


def test_the_teachers_own_answers_are_generated_once_and_kept(launcher, tmp_path):
    straight = launcher.trained("gkd", **SEQ_KD)
    (cache,) = straight.out_dir.glob("teacher_answers*")
    recipe, *rows = read_lines(cache)
    assert recipe["teacher"] == str(launcher.models["distillation"]["teacher_model"]) and recipe["seed"] == 0
    off_policy = sum(not line["on_policy"] for line in straight.steps)
    assert 0 < len(rows) <= 4 * off_policy and len({row["index"] for row in rows}) == len(rows)
    # another run with them asks for none: its teacher cannot generate
    edits = {"from common.config import require\n": "from common.config import require\n\n"
             "teachers.LocalTeacher.generate = None\n"}  # fmt: skip
    again = launcher.run(launcher.copy("gkd", edits=edits), tmp_path / "run", seq_kd_cache=straight.out_dir, **SEQ_KD)
    assert_equal_weights(again.succeeded().weights(), straight.weights())
    # on-policy, nothing is generated by the teacher
    run = launcher.run(launcher.copy("gkd", edits=edits), tmp_path / "on", **{**SEQ_KD, "lmbda": 1.0}).succeeded()
    assert not list(run.out_dir.glob("teacher_answers*"))
    other = launcher.run(launcher.copy("gkd"), tmp_path / "other", seq_kd_cache=straight.out_dir, **SEQ_KD, seed=1)
    failed(other, "was generated otherwise (seed 0 -> 1)")


def test_the_on_policy_share_can_grow(launcher):
    run = launcher.trained("gkd", lmbda=0.9, lmbda_ramp=8, steps=8, eval_every=0)
    drawn = [offpolicy.draw(0, step, 0.9 * step / 8) for step in range(1, 9)]
    assert [line["on_policy"] for line in run.steps] == drawn and 0 < sum(drawn) < 8


# ---- resuming ----


@pytest.mark.parametrize("options", [MIXED, SEQ_KD], ids=["mixed", "seq_kd"])
def test_three_steps_and_three_are_six(launcher, tmp_path, options):
    for steps in (3, 6):
        run = launcher.run(launcher.copy("gkd"), tmp_path, **{**options, "steps": steps}).succeeded()
    assert_same(run, launcher.trained("gkd", **options), after=3)


def test_the_scripts_go_on_from_each_other(launcher, tmp_path):
    for script, steps in (("gkd", 2), ("gkd_multigpu", 4), ("gkd_ddp", 6)):
        run = launcher.run(launcher.copy(script), tmp_path, **{**MIXED, "steps": steps}).succeeded()
        assert len(json.loads((run.out_dir / run.checkpoints[-1] / "state.json").read_text())["notes"]["teacher"]) == 64
    assert_equal_weights(run.weights(), launcher.trained("gkd", **MIXED).weights())


def test_a_signal_saves_first(launcher, tmp_path):
    run = launcher.start(launcher.copy("gkd", SLOW_REWARD), tmp_path, **MIXED, save_every=100)
    run.wait_for(lambda: len(run.steps) >= 2)
    os.kill(run.processes[0].pid, signal.SIGTERM)
    assert run.wait().codes == [0], run.output
    assert run.steps[-1]["step"] < 6 and run.checkpoints
    assert_same(launcher.run(launcher.copy("gkd"), tmp_path, **MIXED).succeeded(), launcher.trained("gkd", **MIXED))


# ---- refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(loss="jsd", beta=1.0), "beta = 1.0: must be between 0 and 1; the loss jumps at the ends"),
        (dict(beta=-0.1), "beta = -0.1"),
        (dict(lmbda=1.5), "lmbda = 1.5: is a share, at most 1"),
        (dict(loss="kl"), "loss = 'kl': must be one of"),
        (dict(loss="opd", lmbda=0.5), "its tokens must be the student's own"),
        (dict(loss="opd", loss_temperature=2.0), "must be that of the samples, temperature = 1.0"),
        (dict(loss_temperature=0.0), "loss_temperature = 0.0: must be above 0"),
        (dict(n_server_workers=0), "n_server_workers = 0"),
        (dict(lmbda=0.5, num_minibatches=8), "must be at most the 4 answers of an off-policy step"),
        (dict(student_model="/no/such/model"), "no such folder"),
        (dict(teacher_model="/no/such/model"), "no such folder"),
    ],
)
def test_what_cannot_be_is_refused(launcher, tmp_path, options, message):
    failed(launcher.run(SCRIPTS["gkd"], tmp_path / "run", **options), message)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_teacher_with_another_tokenizer_is_refused(launcher, model_folders, tmp_path):
    shutil.copytree(model_folders["teacher"], tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    words["+"], words["-"] = words["-"], words["+"]  # as many tokens, two of them exchanged
    path.write_text(json.dumps(tokenizer))
    first = min(words["+"], words["-"])
    own = {id_: token for token, id_ in build_tokenizer().get_vocab().items()}[first]
    run = failed(launcher.run(SCRIPTS["gkd"], tmp_path / "run", teacher_model=tmp_path / "other"))
    assert f"id {first} is {own!r} for the student" in run.output and "2 ids differ" in run.output


@torch.no_grad()
def test_a_larger_vocabulary_of_the_teacher_is_cut_to_the_shared_ids(launcher, model_folders, tmp_path):
    shutil.copytree(model_folders["teacher"], tmp_path / "padded")
    model = build_model("teacher")
    model.resize_token_embeddings(80, mean_resizing=False)
    model.get_input_embeddings().weight[64:] = 5.0  # likely ids, which no token has
    model.save_pretrained(tmp_path / "padded")
    run = launcher.run(launcher.copy("gkd"), tmp_path / "run", teacher_model=tmp_path / "padded", **PLAIN).succeeded()
    assert run.output.count("the student has 64 token ids, the teacher 80: the first 64 count, on both sides") == 1
    assert_equal_weights(run.weights(), launcher.trained("gkd", **PLAIN).weights())


# ---- the page ----


def test_every_metric_is_explained_and_none_is_missing(launcher):
    options = dict(param_offload=True, optimizer_offload="rollout")
    runs = [
        launcher.trained("gkd", **SEQ_KD, **options),
        launcher.trained("gkd", **OPD),
        launcher.trained("gkd", **PLAIN),
    ]
    runs.append(launcher.trained("gkd_multigpu", **PLAIN))
    written = {name for run in runs for line in run.lines for name in line}
    assert written == metrics_explained("gkd")
