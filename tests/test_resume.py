"""A run that was stopped, killed or moved goes on as if nothing had happened: bit for bit on the CPU."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import REWARD, assert_equal_weights, comparable, read_lines
from test_parity import assert_close

STEPS = 6  # of the run that nothing interrupts
SLOW_REWARD = "    import time\n\n    time.sleep(0.3)\n" + REWARD
TORCHRUN = [Path(sys.executable).with_name("torchrun"), "--nproc_per_node=2"]
# Stops in the middle of the checkpoint of step 4, when half of the optimizer's file is written
STUCK_SAVE = """from common.config import require

_save_file = checkpoint.save_file


def _stuck(tensors, path):
    _save_file(tensors, path)
    if "000004" in str(path):
        path.write_bytes(path.read_bytes()[:1000])
        print("half written", flush=True)
        __import__("time").sleep(600)


checkpoint.save_file = _stuck
"""


@pytest.fixture(scope="module")
def straight(launcher):
    """Six steps in one go."""
    return launcher.trained("gspo", steps=STEPS)


def assert_same(run, straight, after: int = -1) -> None:
    """The same lines after this step, and the same policy; they may have saved at other steps."""

    def later(lines):
        return [line for line in lines if line["step"] > after and "seconds_save" not in line]

    assert comparable(later(run.lines)) == comparable(later(straight.lines))
    assert later(run.samples) == later(straight.samples)
    assert_equal_weights(run.weights(STEPS), straight.weights(STEPS))
    assert not list(run.out_dir.glob(".writing-*"))


# ---- on purpose ----


def test_three_steps_and_three_are_six(launcher, straight, tmp_path):
    script = launcher.copy()
    first = launcher.run(script, tmp_path, steps=3).succeeded()
    assert f"no checkpoint in {tmp_path}: starting anew" in first.output
    second = launcher.run(script, tmp_path, steps=STEPS).succeeded()
    assert f"resuming from {tmp_path}/checkpoint-000003" in second.output
    assert "changed since the checkpoint: steps: 3 -> 6" in second.output
    assert second.output.count("changed since") == 1
    assert_same(second, straight, after=3)
    assert [line["step"] for line in second.steps] == list(range(1, STEPS + 1))
    assert [line["step"] for line in second.lines if "seconds_save" in line] == [2, 3, 4, 6]


def test_the_scripts_go_on_from_each_other(launcher, straight, tmp_path):
    for script, steps in (("gspo", 2), ("gspo_multigpu", 4), ("gspo_ddp", 6)):
        run = launcher.run(launcher.copy(script), tmp_path, steps=steps).succeeded()
    assert_same(run, straight)


def test_two_ranks_go_on_bit_for_bit(launcher, tmp_path):
    script = launcher.copy("gspo_ddp")
    for steps in (2, STEPS):
        run = launcher.run(script, tmp_path, 2, steps=steps).succeeded()
    assert_same(run, launcher.trained("gspo_ddp", 2, steps=STEPS))


def test_ranks_can_come_and_go(launcher, straight, tmp_path):
    # twelve rows, so that an epoch takes three steps; the reward notes which rows it sees
    rows = read_lines(launcher.defaults["train_data"])[:12]
    data, seen = tmp_path / "rows.jsonl", tmp_path / "seen"
    data.write_text("".join(f'{{"prompt": "{r["prompt"]}", "answer": "1", "row": {i}}}\n' for i, r in enumerate(rows)))
    reward = (
        f"    with open({str(seen)!r}, 'a') as file:\n"
        "        file.write(''.join(f'{row}\\n' for row in columns['row'][::4]))\n" + REWARD
    )
    out_dir, options = tmp_path / "run", dict(train_data=data, eval_every=0)
    for script, ranks, steps in (("gspo_ddp", 2, 2), ("gspo", 1, 4), ("gspo_ddp", 2, STEPS)):
        run = launcher.run(launcher.copy(script, reward), out_dir, ranks, steps=steps, **options).succeeded()
        if steps > 2:
            assert f"resumed by {ranks}" in run.output
    order = [int(line) for line in seen.read_text().split()]
    epochs = order[:12], order[12:]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12)) and epochs[0] != epochs[1]
    once = launcher.run(launcher.copy(reward=reward), tmp_path / "once", steps=STEPS, **options).succeeded()
    assert_close(run, once, metrics=1e-4, weights=1e-6)


def test_a_run_with_all_its_steps_says_so_and_changes_nothing(launcher, straight, tmp_path):
    shutil.copytree(straight.out_dir, tmp_path / "run")
    run = launcher.run(launcher.copy(), tmp_path / "run", steps=STEPS).succeeded()
    assert f"has all {STEPS} steps" in run.output
    assert run.lines == straight.lines and run.checkpoints == straight.checkpoints
    assert_equal_weights(run.weights(), straight.weights())


def test_a_named_checkpoint_starts_a_new_branch(launcher, straight, tmp_path):
    resume = straight.out_dir / "checkpoint-000002"
    run = launcher.run(launcher.copy(), tmp_path / "branch", steps=STEPS, resume=resume).succeeded()
    assert_same(run, straight, after=2)
    assert run.steps[0]["step"] == 3


def test_going_back_leaves_one_branch(launcher, straight, tmp_path):
    # from step 2 again, with another learning rate: refused, or what comes of it is what the next start takes
    shutil.copytree(straight.out_dir, tmp_path / "run")
    options = dict(resume=tmp_path / "run" / "checkpoint-000002", steps=3, learning_rate=1e-5, keep_checkpoints=2)
    run = launcher.run(launcher.copy(), tmp_path / "run", **options)
    if run.codes == [0]:
        assert run.steps[-1]["step"] == 3
        after = launcher.run(launcher.copy(), tmp_path / "run", steps=4, learning_rate=1e-5).succeeded()
        assert f"resuming from {tmp_path}/run/checkpoint-000003" in after.output
    else:
        assert "ValueError" in run.output and run.lines == straight.lines


def test_data_that_changed_under_their_name_are_pointed_out(launcher, tmp_path):
    data = tmp_path / "rows.jsonl"
    lines = launcher.defaults["train_data"].read_text().splitlines(keepends=True)
    data.write_text("".join(lines[:12]))
    options = dict(train_data=data, eval_every=0, save_every=1)
    launcher.run(launcher.copy(), tmp_path / "run", steps=1, **options).succeeded()
    same = launcher.run(launcher.copy(), tmp_path / "run", steps=2, **options).succeeded()
    assert "have changed" not in same.output
    data.write_text("".join(lines[:8]))
    run = launcher.run(launcher.copy(), tmp_path / "run", steps=3, **options).succeeded()
    assert "warning: the training data have changed since the checkpoint (12 rows, CRC-32 " in run.output
    assert "; now 8 rows, CRC-32 " in run.output
    once = launcher.run(launcher.copy(), tmp_path / "run", steps=4, **options).succeeded()
    assert "have changed" not in once.output


# ---- refused ----


def test_none_refuses_a_folder_in_use(launcher, straight, tmp_path):
    shutil.copytree(straight.out_dir, tmp_path / "run")
    run = launcher.run(launcher.copy(), tmp_path / "run", resume="none")
    assert run.codes[0] not in (0, None) and "already holds a run" in run.output
    assert run.lines == straight.lines


def test_a_checkpoint_that_does_not_exist_is_refused_before_anything_is_loaded(launcher, tmp_path):
    run = launcher.run(launcher.copy(), tmp_path / "run", resume=tmp_path / "typo", policy_model="/no/such/model")
    assert run.codes[0] not in (0, None)
    assert "not a complete checkpoint" in run.output and "/no/such/model" not in run.output
    assert not run.out_dir.exists()


# ---- killed ----


def test_killed_before_its_first_checkpoint_it_starts_anew(launcher, straight, tmp_path):
    run = launcher.start(launcher.copy(reward=SLOW_REWARD), tmp_path, steps=STEPS)
    run.wait_for(lambda: run.steps)
    run.kill()
    assert not run.checkpoints
    assert_same(launcher.run(launcher.copy(), tmp_path, steps=STEPS).succeeded(), straight)


def test_killed_while_saving_it_goes_on_from_the_checkpoint_before(launcher, straight, tmp_path):
    stuck = launcher.copy(edits={"from common.config import require\n": STUCK_SAVE})
    run = launcher.start(stuck, tmp_path, steps=STEPS)
    run.wait_for(lambda: "half written" in run.output)
    run.kill()
    assert run.checkpoints == ["checkpoint-000002"] and list(tmp_path.glob(".writing-*"))
    after = launcher.run(launcher.copy(), tmp_path, steps=STEPS).succeeded()
    assert f"resuming from {tmp_path}/checkpoint-000002" in after.output
    assert_same(after, straight)


def test_a_damaged_newest_checkpoint_is_passed_over(launcher, straight, tmp_path):
    shutil.copytree(straight.out_dir, tmp_path / "run")
    weights = tmp_path / "run" / "checkpoint-000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "run" / "checkpoint-000004" / "optimizer.safetensors").unlink()
    run = launcher.run(launcher.copy(), tmp_path / "run", steps=STEPS).succeeded()
    assert f"resuming from {tmp_path}/run/checkpoint-000002" in run.output
    assert_same(run, straight)


# ---- stopped ----


def stop(run, send) -> int:
    """Sends a signal after the second step; the step of the checkpoint that comes of it."""
    run.wait_for(lambda: len(run.steps) >= 2)
    send()
    run.wait()
    done = run.steps[-1]["step"]
    assert done < STEPS, "it was done before the signal came"
    assert run.checkpoints[-1] == f"checkpoint-{done:06d}", run.output
    return done


@pytest.mark.parametrize("script, number", [("gspo", signal.SIGTERM), ("gspo_multigpu", signal.SIGINT)])
def test_a_signal_saves_first(launcher, straight, tmp_path, script, number):
    slow = launcher.copy(script, SLOW_REWARD)
    run = launcher.start(slow, tmp_path, steps=STEPS, save_every=100)
    stop(run, lambda: os.kill(run.processes[0].pid, number))
    assert run.codes == [0], run.output
    assert f"{number.name}: finishing this step, then saving" in run.output
    assert "policy saved in" in run.output
    assert_same(launcher.run(launcher.copy(script), tmp_path, steps=STEPS).succeeded(), straight)


def test_a_second_signal_stops_at_once(launcher, tmp_path):
    # also while a reward is at work that takes longer than anyone waits
    slow = launcher.copy(reward="    print('scoring', flush=True)\n" + SLOW_REWARD.replace("0.3", "60"))
    run = launcher.start(slow, tmp_path, steps=STEPS, eval_data="")
    run.wait_for(lambda: "scoring" in run.output)
    os.kill(run.processes[0].pid, signal.SIGINT)
    run.wait_for(lambda: "once more stops at once" in run.output)
    time.sleep(2.1)  # sooner it may be the same one, passed on by torchrun
    os.kill(run.processes[0].pid, signal.SIGINT)
    run.wait(20)
    assert run.codes[0] not in (0, None) and "KeyboardInterrupt" in run.output
    assert not run.steps and not run.checkpoints


def test_a_signal_to_one_rank_stops_both(launcher, tmp_path):
    run = launcher.start(launcher.copy("gspo_ddp", SLOW_REWARD), tmp_path, 2, steps=STEPS, save_every=100)
    stop(run, lambda: os.kill(run.processes[1].pid, signal.SIGTERM))
    assert run.codes == [0, 0], run.output
    after = launcher.run(launcher.copy("gspo_ddp"), tmp_path, 2, steps=STEPS).succeeded()
    assert_same(after, launcher.trained("gspo_ddp", 2, steps=STEPS))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_to_torchrun_saves_first(launcher, tmp_path, number):
    slow = launcher.copy("gspo_ddp", SLOW_REWARD)
    run = launcher.command(TORCHRUN, slow, tmp_path, steps=STEPS, save_every=100)
    pid = run.processes[0].pid
    # Ctrl-C in a terminal reaches torchrun and both of its processes, and torchrun passes on what it gets
    stop(run, lambda: os.killpg(pid, number) if number == signal.SIGINT else os.kill(pid, number))
    assert run.output.count("finishing this step, then saving") == 1
    assert "policy saved in" in run.output
    if number == signal.SIGINT:
        return
    after = launcher.run(launcher.copy("gspo_ddp"), tmp_path, 2, steps=STEPS).succeeded()
    assert_close(after, launcher.trained("gspo_ddp", 2, steps=STEPS), metrics=1e-4, weights=1e-6)
