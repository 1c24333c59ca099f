"""Faults of a machine, done to real runs: each must be survived, so that the run ends as if nothing had happened.

Survived means: the weights and every number in metrics.jsonl are those of a run that was left alone, bit for bit; where
the run has to end first, it says what to do, and the same command then goes on. scripts/dev/soak.sh does all of this
with more kills, and prints the table in docs/faults.md.
"""

import contextlib
import errno
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from comparing import comparable
from conftest import SCRIPTS, Slow, assert_equal_weights, fault, reward
from test_console import ASCII
from test_reward_client import Fake, good, never
from test_teacher_server import free_port

from common.base import distributed
from common.base.distributed import OUTAGE_EXIT_CODE
from common.run import checkpoint, metrics
from common.tasks import reward_client

pytestmark = pytest.mark.faults
SOAK = "RL_HAND_KILLS" in os.environ
KILLS = int(os.environ.get("RL_HAND_KILLS", 4))  # SIGKILLs at random moments
STEPS = 6
MOMENTS = ["resume", "rollout", "score", "logprobs", "update", "save", "evaluate"]


@pytest.fixture(scope="module")
def straight(launcher):
    return launcher.trained("gspo", steps=STEPS)


def assert_same(run, straight) -> None:
    assert comparable(run.steps) == comparable(straight.steps)
    evaluations = [[line for line in comparable(one.lines) if "learning_rate" not in line] for one in (run, straight)]
    assert evaluations[0] == evaluations[1]
    assert_equal_weights(run.weights(STEPS), straight.weights(STEPS))
    assert not list(run.out_dir.glob(".writing-*"))


def notes_phases(path: Path, module) -> None:
    """Writes down what the run is at, and how often it has begun with each phase: the kernel keeps it after a kill."""
    seen, file = {}, os.open(path, os.O_RDWR | os.O_CREAT)

    def note(now: str) -> None:
        seen[now] = seen.get(now, 0) + 1
        os.pwrite(file, json.dumps([now, seen]).ljust(400).encode(), 0)

    @contextlib.contextmanager
    def noted(name: str, inner):
        note(name)
        try:
            with inner as value:
                yield value
        finally:
            note("none of these")

    timed, share_errors = metrics.Log.time, distributed.share_errors
    metrics.Log.time = lambda log, name: noted(name, timed(log, name))
    distributed.share_errors = lambda name, *rest: noted(name, share_errors(name, *rest))


def phase(path: Path) -> tuple[str, dict[str, int]]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # not begun, or half read
        return "start and loading", {}


CHAINS = [("gspo", 1, {}), ("grpo", 1, dict(dynamic_sampling=2)), ("gkd", 1, dict(lmbda=0.5, seq_kd=True)),
          ("similarity_grpo", 1, dict(similarity_model="ngrams")), ("gspo_ddp", 2, {})]  # fmt: skip


@pytest.mark.parametrize("script, ranks, options", CHAINS if SOAK else CHAINS[:1], ids=lambda value: str(value)[:20])
def test_killed_at_random_moments_it_ends_as_if_left_alone(launcher, tmp_path, script, ranks, options):
    options = dict(options, steps=STEPS, save_every=1)
    straight = launcher.trained(script, ranks, **options)
    seen, draw = tmp_path / "phase", random.Random(f"{script} {ranks}")
    out_dir, left, killed_at = tmp_path / "0", KILLS // (len(CHAINS) if SOAK else 1), []
    while True:
        moment, times = draw.choice(["any", *MOMENTS]), draw.randint(1, 4)
        until = time.monotonic() + draw.uniform(0.0, 2.0)  # of "any"
        seen.unlink(missing_ok=True)
        run = launcher.start(script, out_dir, ranks, prepare=partial(notes_phases, seen), **options)
        while left and None in run.codes and phase(seen)[1].get(moment, 0) < times:
            time.sleep(0.001)
            if moment == "any" and time.monotonic() > until:
                break
        time.sleep(draw.uniform(0.0, 0.03))
        if left and None in run.codes:
            killed_at.append(phase(seen)[0])
            run.kill()
            left -= 1
            continue
        with fault(*(f"SIGKILL: {at}" for at in killed_at)):
            assert_same(run.wait().succeeded(), straight)
        if not left:
            break
        out_dir, killed_at = tmp_path / str(left), []  # done before a moment came: another run


class After:
    """The reward of the tests, after something that is done to the process first."""

    __name__ = "reward"

    def __init__(self, act: Callable, *arguments):
        self.act, self.arguments = act, arguments

    def __call__(self, completions, answers, **columns):
        self.act(*self.arguments)
        return reward(completions, answers)


def fill_disk(out_dir: Path) -> None:
    """After the first checkpoint no file may grow beyond 30 kB: the system refuses, whoever writes."""
    if len(list(out_dir.glob("checkpoint-*"))) == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))


@pytest.mark.parametrize("script, ranks", [("gspo", 1), ("gspo_ddp", 2)])
def test_a_full_disk_leaves_the_last_checkpoint_and_says_what_to_do(launcher, tmp_path, script, ranks):
    straight = launcher.trained(script, ranks, steps=STEPS)
    with fault("disk full while saving"):
        run = launcher.run(script, tmp_path, ranks, rewards=[After(fill_disk, tmp_path)], steps=STEPS)
        assert 0 not in run.codes and run.checkpoints == ["checkpoint-000002"], run.output
        for words in ("OSError", "step 4", "Make room", "keep_checkpoints = 9", f"{tmp_path}/checkpoint-000002"):
            assert words in run.output
        if ranks == 2:
            assert "rank 0 failed in phase 'save'" in run.output
        assert not list(tmp_path.glob(".writing-*"))
        after = launcher.run(script, tmp_path, ranks, steps=STEPS).succeeded()
        assert f"resuming from {tmp_path}/checkpoint-000002" in after.output
        assert_same(after, straight)


def test_a_folder_that_cannot_be_written_is_refused_before_a_model_is_loaded(launcher, tmp_path):
    (tmp_path / "file").write_text("no folder")
    for out_dir in (tmp_path / "file" / "run", "/proc/run"):  # the second also for root
        with fault("read-only disk at the start"):
            run = launcher.run("gspo", out_dir, policy_model="/no/such/model")
            assert run.codes[0] not in (0, None)
            assert f"out_dir = '{out_dir}'" in run.output and "/such" not in run.output


def take_disk_away(out_dir: Path, away: Path) -> None:
    """Once there is a checkpoint, a file stands in place of the folder."""
    if (out_dir / "checkpoint-000002").exists():
        out_dir.rename(away)
        out_dir.touch()


def test_a_disk_that_goes_away_ends_the_run_with_its_last_checkpoint(launcher, straight, tmp_path):
    out_dir, away = tmp_path / "run", tmp_path / "away"
    with fault("disk gone, or read-only, in the middle"):
        run = launcher.run("gspo", out_dir, rewards=[After(take_disk_away, out_dir, away)], steps=STEPS)
        assert run.codes == [1] and "NotADirectoryError" in run.output
        out_dir.unlink()
        away.rename(out_dir)
        assert_same(launcher.run("gspo", out_dir, steps=STEPS).succeeded(), straight)


def test_killed_after_it_went_back_it_goes_on_with_the_new_branch(launcher, straight, tmp_path):
    branch, run_dir = (Path(shutil.copytree(straight.out_dir, tmp_path / name)) for name in ("branch", "run"))
    options = dict(steps=STEPS + 2, learning_rate=1e-3)
    alone = launcher.run("gspo", branch, resume=branch / "checkpoint-000002", **options).succeeded()
    with fault("SIGKILL after going back"):
        resume, unsaved = run_dir / "checkpoint-000002", options | {"save_every": 100, "best_by": ""}
        run = launcher.start("gspo", run_dir, rewards=[Slow(0.1)], resume=resume, **unsaved)
        run.wait_for(lambda: run.steps[-1]["step"] >= 5 and run.steps[-1]["learning_rate"] > 2e-4)
        run.kill()
        assert run.checkpoints == ["checkpoint-000002"]
        again = launcher.run("gspo", run_dir, **options).succeeded()
        assert f"resuming from {run_dir}/checkpoint-000002" in again.output
        assert comparable(again.lines) == comparable(alone.lines) and again.samples == alone.samples
        assert_equal_weights(again.weights(), alone.weights())
        left = {f"abandoned-checkpoint-{step:06d}" for step in (4, 6)}
        assert {path.name for path in run_dir.glob("abandoned-*")} == left


def without_luxuries(module) -> None:
    """Old checkpoints cannot be deleted, and TensorBoard and samples.jsonl not be written."""

    def failing(real, word: str, number: int):
        def call(*arguments, **options):
            if any(word in str(argument) for argument in arguments):
                raise OSError(number, os.strerror(number))
            return real(*arguments, **options)

        return call

    shutil.rmtree = failing(shutil.rmtree, checkpoint.branches.REPLACED, errno.EBUSY)
    checkpoint.storage.append = failing(checkpoint.storage.append, "samples.jsonl", errno.EDQUOT)
    metrics.SummaryWriter.add_scalar = failing(metrics.SummaryWriter.add_scalar, "", errno.ENOSPC)


def test_a_run_goes_on_without_what_it_can_do_without(launcher, straight, tmp_path):
    with fault("old checkpoints, TensorBoard and samples.jsonl on a broken disk"):
        run = launcher.run("gspo", tmp_path, prepare=without_luxuries, steps=STEPS, keep_checkpoints=1).succeeded()
        for what, why in (
            ("an old checkpoint could not be deleted", "Device or resource busy; 0.0 GiB remain in"),
            ("tensorboard could not be written", "No space left"),
            ("samples.jsonl could", "quota exc"),
        ):
            assert len(re.findall(f"warning: .*{what}.*{why}.*the run goes on", run.output)) == 1, run.output
        assert run.checkpoints == ["checkpoint-000006"] and comparable(run.lines) == comparable(straight.lines)
        launcher.run("gspo", tmp_path, steps=STEPS + 1, keep_checkpoints=1).succeeded()
        assert not list(tmp_path.glob(".writing-*"))


def test_a_locale_of_ascii_and_a_full_disk_behind_the_output_do_not_end_a_run(launcher, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "what is \u00fc ?", "answer": "\u4e2d"}\n' * 8, encoding="utf-8")
    with fault("standard output that cannot be written"):
        for name, stream, locale in (("ascii", tmp_path / "output", ASCII), ("full", "/dev/full", {})):
            options = dict(steps=1, print_samples=True, train_data=data, eval_data="")
            command = [sys.executable, SCRIPTS["gspo"], *launcher.options(SCRIPTS["gspo"], tmp_path / name, **options)]
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | locale
            with open(stream, "wb") as file:
                code = subprocess.run(command, env=environment, stdout=file, stderr=file, check=False).returncode
            assert code == 0 and (tmp_path / name / "checkpoint-000001").exists()
        assert r"answer '\u4e2d'" in (tmp_path / "output").read_text()


def slow_disk(module) -> None:
    save_file = checkpoint.save_file
    checkpoint.save_file = lambda *given: (print("saving", flush=True), time.sleep(0.5), save_file(*given))


def test_a_slow_disk_takes_longer_and_a_signal_waits_for_it(launcher, straight, tmp_path):
    with fault("slow disk, and SIGTERM while it writes"):
        run = launcher.start("gspo", tmp_path, prepare=slow_disk, steps=STEPS)
        run.wait_for(lambda: "saving" in run.output)
        os.kill(run.processes[0].pid, signal.SIGTERM)
        run.wait().succeeded()
        done = run.steps[-1]["step"]
        assert done < STEPS and run.checkpoints[-1] == f"checkpoint-{done:06d}"
        assert_same(launcher.run("gspo", tmp_path, steps=STEPS).succeeded(), straight)


@pytest.mark.parametrize("file, how", [("model.safetensors", "edited"), ("optimizer.safetensors", "swapped"),
                                       ("rng.safetensors", "cut off"), ("state.json", "edited")])  # fmt: skip
def test_a_checkpoint_that_is_not_what_was_saved_is_not_gone_on_from(launcher, straight, tmp_path, file, how):
    shutil.copytree(straight.out_dir, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint-000006" / file
    content = path.read_bytes()
    changed = {"edited": content.replace(b"6", b"7", 1) if file == "state.json" else content[:-1] + b"\x01",
               "cut off": content[:-1],
               "swapped": (tmp_path / "run" / "checkpoint-000004" / file).read_bytes()}[how]  # fmt: skip
    assert changed != content
    path.write_bytes(changed)
    with fault(f"checkpoint file {how}"):
        run = launcher.run("gspo", tmp_path / "run", steps=STEPS).succeeded()
        assert f"{tmp_path}/run/checkpoint-000006 is passed over: {file} " in run.output
        assert f"resuming from {tmp_path}/run/checkpoint-000004" in run.output
        assert_same(run, straight)


def test_two_runs_in_one_folder(launcher, straight, tmp_path):
    with fault("two runs in one out_dir"):
        first = launcher.start("gspo", tmp_path, rewards=[Slow()], steps=STEPS)
        first.wait_for(lambda: first.steps)
        second = launcher.run("gspo_multigpu", tmp_path, steps=STEPS)
        assert second.codes[0] not in (0, None)
        for words in ("out_dir = ", "another run uses it", f"process {first.processes[0].pid} ", "give another"):
            assert words in second.output
        assert_same(first.wait().succeeded(), straight)


def signalled_in(owner: str, name: str, rank: int, call: int, number: int, module) -> None:
    """A rank gets a signal when a function of a module of common/ is called for this time."""
    real, count = getattr(sys.modules[owner], name), itertools.count(1)

    def wrapped(*arguments, **options):
        if next(count) == call and distributed.rank() == rank:
            os.kill(os.getpid(), number)
        return real(*arguments, **options)

    setattr(sys.modules[owner], name, wrapped)


@pytest.mark.parametrize(("owner", "name", "dead", "call", "phase"), [
    ("tasks.scoring", "score", 1, 3, "(logprobs|score)"), ("base.distributed", "sum_gradients", 1, 5, "update"),
    ("run.checkpoint", "save", 0, 2, ".*"),
])  # fmt: skip
def test_a_killed_rank_is_named_by_the_other_which_ends(launcher, tmp_path, owner, name, dead, call, phase):
    dies = partial(signalled_in, f"common.{owner}", name, dead, call, signal.SIGKILL)
    with fault("one of 2 ranks killed"):
        run = launcher.run("gspo_ddp", tmp_path, 2, steps=STEPS, prepare=dies)
        assert run.codes[dead] == -signal.SIGKILL and run.codes[1 - dead] == 1, run.output
        pid, said = run.processes[dead].pid, run.output_files[1 - dead].read_text()
        named = rf"waited in phase '{phase}' for the others: rank {dead} (\(process {pid}\) )?is gone"
        assert re.search(f"RuntimeError: rank {1 - dead} {named}", said), said
        after = launcher.run("gspo_ddp", tmp_path, 2, steps=STEPS).succeeded()
        assert_same(after, launcher.trained("gspo_ddp", 2, steps=STEPS))


def test_a_rank_that_hangs_is_named_when_the_time_is_up(launcher, tmp_path):
    # in the main thread, so that no collective is cut in the middle: those ranks have come
    hangs = partial(signalled_in, "common.base.distributed", "sum_gradients", 1, 5, signal.SIGSTOP)
    options = dict(steps=STEPS, constants={"TIMEOUT_MINUTES": 0.05}, reward_patience=1)
    with fault("one of 2 ranks hangs"):
        run = launcher.start("gspo_ddp", tmp_path, 2, prepare=hangs, **options)
        run.processes[0].join(60)
        code, pid, said = run.codes[0], run.processes[1].pid, run.output_files[0].read_text()
        run.kill()
        named = rf"waited in phase 'update' for the others: rank 1 \(process {pid} on \S+\) did not come"
        assert code == 1 and re.search(f"RuntimeError: rank 0 {named}", said), said
        after = launcher.run("gspo_ddp", tmp_path, 2, steps=STEPS).succeeded()
        assert_same(after, launcher.trained("gspo_ddp", 2, steps=STEPS))


SERVICES = {  # what the service does from its third request on; None: it is stopped
    "killed": None,
    "hung": lambda items, number: time.sleep(3) or 503,
    "failing": lambda items, number: 500,
    "answering garbage": lambda items, number: {"results": "\x00" * 100},
    "answering NaN": lambda items, number: [good(item, score=float("nan")) for item in items],
    "answering too little": lambda items, number: [good(item) for item in items[1:]],
}


def impatient(module) -> None:
    reward_client.RewardService = partial(reward_client.RewardService, timeout_s=0.5)


SCORED = dict(steps=STEPS, eval_every=0, save_every=100, reward_patience=1.0, rewards=[never], prepare=impatient)


@pytest.fixture(scope="module")
def scored(launcher, tmp_path_factory):
    """A run whose rewards come from a service, left alone."""
    with Fake() as service:
        return launcher.run("gspo", tmp_path_factory.mktemp("scored"), reward_url=service.url, **SCORED).succeeded()


@pytest.mark.parametrize("what", SERVICES if SOAK else ("killed", "answering garbage"))
def test_a_reward_service_that_fails_ends_the_run_which_goes_on_with_a_good_one(launcher, scored, tmp_path, what):
    service = Fake(port := free_port())
    options = dict(SCORED, reward_url=service.url)
    with fault(f"reward service {what}"):
        service.delay = 0.1
        run = launcher.start("gspo", tmp_path / "run", **options)
        run.wait_for(lambda: len(service.requests) >= 3)
        if SERVICES[what]:
            service.reply = SERVICES[what]
            run.wait()
        service.stop()
        run.wait()
        assert run.codes == [OUTAGE_EXIT_CODE] and "the same command goes on from here" in run.output, run.output
        with Fake(port):
            assert_same(launcher.run("gspo", tmp_path / "run", **options).succeeded(), scored)


def test_an_evaluation_that_the_service_cut_off_is_made_after_the_resume(launcher, tmp_path):
    with Fake() as fake, fault("reward service fails in an evaluation"):
        options = SCORED | dict(steps=3, eval_every=2, reward_url=fake.url)
        straight = launcher.run("gspo", tmp_path / "straight", **options).succeeded()
        reply, asked = fake.reply, []

        def fails(items, number):
            if len(items) == 8:  # an evaluation; a step has 16
                asked.append(number)
            return 500 if len(items) == 8 and len(asked) > 1 else reply(items, number)

        fake.reply = fails
        run = launcher.run("gspo", tmp_path / "run", **options)
        assert run.codes == [OUTAGE_EXIT_CODE] and run.checkpoints == ["checkpoint-000002"], run.output
        fake.reply = reply
        run = launcher.run("gspo", tmp_path / "run", **options).succeeded()
        assert [line["step"] for line in run.lines if "eval_reward" in line] == [0, 2, 3]
        assert comparable(run.lines) == comparable(straight.lines)
        assert_equal_weights(run.weights(), straight.weights())


@pytest.mark.skipif(not SOAK, reason="scripts/dev/soak.sh: a slow service only takes longer")
def test_a_slow_reward_service_changes_nothing(launcher, scored, tmp_path):
    with Fake() as fake, fault("reward service slow"):
        fake.delay = 0.4
        assert_same(launcher.run("gspo", tmp_path, **SCORED | {"reward_url": fake.url}).succeeded(), scored)


def jumping_clock(module) -> None:
    """An hour forth and two back with every look at the time of day."""
    now, turns = time.time, itertools.count()
    time.time = lambda: now() + (3600, -7200)[next(turns) % 2]


def test_a_clock_that_jumps_changes_nothing(launcher, straight, tmp_path):
    with fault("clock jumps"):
        run = launcher.run("gspo", tmp_path, prepare=jumping_clock, steps=STEPS).succeeded()
        assert_same(run, straight)
        # what lasts is measured by a clock that only goes on
        assert all(0 < line["seconds"] < 60 for line in run.steps)
