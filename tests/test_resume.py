"""A run that was stopped, killed or moved goes on as if nothing had happened: bit for bit on the CPU.

That is a promise of docs/faults.md: everything a step depends on is saved, and one thread does the same operations in
the same order.
"""

import os
import shutil
import signal
import sys
import time
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from comparing import assert_close, comparable, config_of
from conftest import SCRIPTS, TEMPLATE, Slow, assert_equal_weights, read_lines, reward

from common.loop import run as loop_run
from common.run import checkpoint
from common.training import budgets

STEPS = 6  # of the run that nothing interrupts
TORCHRUN = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc_per_node=2"]


@pytest.fixture(scope="module")
def straight(launcher):
    return launcher.trained("gspo", steps=STEPS)


@pytest.fixture
def copied(straight, tmp_path):
    """The folder of that run, to do something to."""
    return Path(shutil.copytree(straight.out_dir, tmp_path / "run"))


def assert_same(run, straight, after: int = -1) -> None:
    """The same lines after this step, and the same policy; they may have saved at other steps."""

    def later(lines):
        return [line for line in lines if line["step"] > after]

    assert comparable(later(run.lines)) == comparable(later(straight.lines))
    assert later(run.samples) == later(straight.samples)
    assert_equal_weights(run.weights(STEPS), straight.weights(STEPS))
    assert not list(run.out_dir.glob(".writing-*"))


def test_three_steps_and_three_are_six(launcher, straight, tmp_path):
    first = launcher.run("gspo", tmp_path, steps=3).succeeded()
    assert f"no checkpoint in {tmp_path}" in first.output
    second = launcher.run("gspo", tmp_path, steps=STEPS).succeeded()
    assert f"resuming from {tmp_path}/checkpoint-000003" in second.output
    assert "steps: 3 -> 6" in second.output and second.output.count("changed since") == 1
    assert_same(second, straight, after=3)
    assert [line["step"] for line in second.steps] == list(range(1, STEPS + 1))
    assert [line["step"] for line in second.lines if "seconds_save" in line] == [2, 3, 4, 6]


class NotesRows:
    """A reward that notes which rows of the data it sees."""

    __name__ = "reward"

    def __init__(self, path: Path):
        self.path = path

    def __call__(self, completions, answers, row, **columns):
        with open(self.path, "a") as file:
            file.write("".join(f"{number}\n" for number in row[::4]))
        return reward(completions, answers)


@pytest.mark.parity
def test_ranks_can_come_and_go(launcher, tmp_path):
    # twelve rows, so that an epoch takes three steps
    rows = read_lines(launcher.defaults["train_data"])[:12]
    data, seen = tmp_path / "rows.jsonl", tmp_path / "seen"
    data.write_text("".join(f'{{"prompt": "{r["prompt"]}", "answer": "1", "row": {i}}}\n' for i, r in enumerate(rows)))
    out_dir, options = tmp_path / "run", dict(train_data=data, eval_every=0, rewards=[NotesRows(seen)])
    for script, ranks, steps in (("gspo_ddp", 2, 2), ("gspo_multigpu", 1, 4), ("gspo_ddp", 2, STEPS)):
        run = launcher.run(script, out_dir, ranks, steps=steps, **options).succeeded()
        if steps > 2:
            assert f"resumed by {ranks}" in run.output
    order = [int(line) for line in seen.read_text().split()]
    epochs = order[:12], order[12:]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12)) and epochs[0] != epochs[1]
    once = launcher.run("gspo", tmp_path / "once", steps=STEPS, **options).succeeded()
    assert_close(run, once)


def test_a_run_with_all_its_steps_says_so_and_changes_nothing(launcher, straight, copied):
    run = launcher.run("gspo", copied, steps=STEPS).succeeded()
    assert f"has all {STEPS} steps" in run.output
    assert run.lines == straight.lines and run.checkpoints == straight.checkpoints
    assert_equal_weights(run.weights(), straight.weights())


def test_a_named_checkpoint_starts_a_new_branch_and_going_back_leaves_one(launcher, straight, copied, tmp_path):
    resume = straight.out_dir / "checkpoint-000002"
    run = launcher.run("gspo", tmp_path / "branch", steps=STEPS, resume=resume).succeeded()
    assert_same(run, straight, after=2)
    assert run.steps[0]["step"] == 3
    # from step 2 again, with another learning rate: what comes of it is what the next start takes
    options = dict(resume=copied / "checkpoint-000002", steps=3, learning_rate=1e-5, keep_checkpoints=2)
    launcher.run("gspo", copied, **options).succeeded()
    after = launcher.run("gspo", copied, steps=4, learning_rate=1e-5).succeeded()
    assert f"resuming from {copied}/checkpoint-000003" in after.output


def on_day(day: date, module) -> None:
    """Starts a run on another day."""
    loop_run.date = SimpleNamespace(today=lambda: day)


def test_data_that_changed_under_their_name_are_pointed_out_and_another_day_is_no_change(
    launcher, model_folders, tmp_path
):
    data, model = tmp_path / "rows.jsonl", tmp_path / "dated"
    lines = launcher.defaults["train_data"].read_text().splitlines(keepends=True)
    shutil.copytree(model_folders["qwen2"], model)
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d') | int }} " + TEMPLATE)
    options = dict(train_data=data, eval_every=0, save_every=1, policy_model=model)
    for steps, rows, changed in ((1, 12, False), (2, 12, False), (3, 8, True), (4, 8, False)):
        data.write_text("".join(lines[:rows]))
        day = partial(on_day, date(2024, 1, steps))
        run = launcher.run("gspo", tmp_path / "run", steps=steps, prepare=day, **options).succeeded()
        assert checkpoint.notes(run.out_dir / run.checkpoints[-1])["date"] == "2024-01-01"
        assert ("data have changed" in run.output) == changed
        if changed:
            assert "(12 rows, CRC-32 " in run.output and "now 8 rows, CRC-32 " in run.output


def test_only_micro_batches_that_a_run_has_chosen_are_those_of_a_resumed_one(launcher, tmp_path):
    for steps, option, noted in ((1, 64, 0), (2, 0, budgets.TOKENS)):
        run = launcher.run("gspo", tmp_path, steps=steps, micro_batch_tokens=option, eval_every=0).succeeded()
        assert checkpoint.notes(run.out_dir / run.checkpoints[-1])["micro_batch_tokens"] == noted
        assert config_of(run)["micro_batch_tokens"] == (option or noted)


def test_a_folder_in_use_and_a_checkpoint_that_does_not_exist_are_refused(launcher, straight, copied, tmp_path):
    run = launcher.run("gspo", copied, resume="none")
    assert run.codes[0] not in (0, None) and "already holds a run" in run.output
    assert run.lines == straight.lines
    run = launcher.run("gspo", tmp_path / "other", resume=tmp_path / "typo", policy_model="/no/such/model")
    assert run.codes[0] not in (0, None) and not run.out_dir.exists()
    assert "not a complete checkpoint" in run.output and "/no/such/model" not in run.output  # before it is loaded


def stuck_at(step: int, module) -> None:
    """Stops in the middle of the checkpoint of a step, when half of a file is written."""
    save_file = checkpoint.save_file

    def stuck(tensors, path):
        save_file(tensors, path)
        if f"{step:06d}" in str(path):
            path.write_bytes(path.read_bytes()[:1000])
            print("half written", flush=True)
            time.sleep(600)

    checkpoint.save_file = stuck


@pytest.mark.faults
@pytest.mark.parametrize("step", [2, 4])
def test_killed_while_saving_it_goes_on_from_the_checkpoint_before(launcher, straight, tmp_path, step):
    run = launcher.start("gspo", tmp_path, prepare=partial(stuck_at, step), steps=STEPS)
    run.wait_for(lambda: "half written" in run.output)
    run.kill()
    before = ["checkpoint-000002"] * (step > 2)
    assert run.checkpoints == before and list(tmp_path.glob(".writing-*"))
    after = launcher.run("gspo", tmp_path, steps=STEPS).succeeded()
    assert (f"resuming from {tmp_path}/checkpoint-000002" if before else f"no checkpoint in {tmp_path}") in after.output
    assert_same(after, straight)


def stop(run, send) -> None:
    """Sends a signal after the second step, which is saved before the run ends."""
    run.wait_for(lambda: len(run.steps) >= 2)
    send()
    run.wait()
    done = run.steps[-1]["step"]
    assert done < STEPS, "it was done before the signal came"
    assert run.checkpoints[-1] == f"checkpoint-{done:06d}", run.output


@pytest.mark.parametrize("script, number", [
    ("gspo", signal.SIGTERM), pytest.param("gspo_multigpu", signal.SIGINT, marks=pytest.mark.parity),
])  # fmt: skip
def test_a_signal_saves_first(launcher, straight, tmp_path, script, number):
    run = launcher.start(script, tmp_path, rewards=[Slow()], steps=STEPS, save_every=100)
    stop(run, partial(os.kill, run.processes[0].pid, number))
    assert run.codes == [0] and number.name in run.output, run.output
    assert_same(launcher.run(script, tmp_path, steps=STEPS).succeeded(), straight)


def test_a_second_signal_stops_at_once(launcher, tmp_path):
    # also while a reward is at work that takes longer than anyone waits
    run = launcher.start("gspo", tmp_path, rewards=[Slow(60)], steps=STEPS, eval_data="")
    run.wait_for(lambda: "scoring" in run.output)
    os.kill(run.processes[0].pid, signal.SIGINT)
    run.wait_for(lambda: "once more stops at once" in run.output)
    time.sleep(2.1)  # sooner it may be the same one, passed on by torchrun
    os.kill(run.processes[0].pid, signal.SIGINT)
    run.wait(20)
    assert run.codes[0] not in (0, None) and "KeyboardInterrupt" in run.output
    assert not run.steps and not run.checkpoints


@pytest.mark.faults
def test_a_signal_to_one_rank_stops_both(launcher, tmp_path):
    run = launcher.start("gspo_ddp", tmp_path, 2, rewards=[Slow()], steps=STEPS, save_every=100)
    stop(run, lambda: os.kill(run.processes[1].pid, signal.SIGTERM))
    assert run.codes == [0, 0], run.output
    after = launcher.run("gspo_ddp", tmp_path, 2, steps=STEPS).succeeded()
    assert_same(after, launcher.trained("gspo_ddp", 2, steps=STEPS))


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_saves_first(launcher, tmp_path, number):
    run = launcher.command(TORCHRUN, launcher.copy("gspo_ddp"), tmp_path, steps=200, save_every=1000, eval_every=0)
    run.wait_for(lambda: len(run.steps) >= 2)
    pid = run.processes[0].pid
    # Ctrl-C in a terminal reaches torchrun and both of its processes, and torchrun passes on what it gets
    (os.killpg if number == signal.SIGINT else os.kill)(pid, number)
    run.wait()
    done = run.steps[-1]["step"]
    assert done < 200 and run.checkpoints == [f"checkpoint-{done:06d}"], run.output
    assert run.output.count("finishing this step, then saving") == 1 and "policy saved in" in run.output
    after = launcher.run("gspo_ddp", tmp_path, 2, steps=done + 1, eval_every=0).succeeded()
    assert after.steps[-1]["step"] == done + 1


def test_a_copy_that_a_user_made_goes_on_from_the_script(launcher, straight, tmp_path):
    launcher.run("gspo", tmp_path, steps=4).succeeded()
    copy = launcher.copy("gspo")
    assert copy.parent != SCRIPTS["gspo"].parent
    assert_same(launcher.run(copy, tmp_path, steps=STEPS).succeeded(), straight)
