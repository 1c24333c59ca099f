"""Faults of a machine, done to real runs: each must be survived, so that the run ends as if nothing had happened.

Survived means: the weights and every number in metrics.jsonl are those of a run that was left alone, bit for bit; where
the run has to end first, it says what to do, and the same command then goes on. scripts/soak.sh does all of this with
more kills, and prints the table in docs/faults.md.
"""

import json
import os
import random
import re
import shutil
import signal
import time

import pytest
from conftest import REWARD, assert_equal_weights, comparable, fault
from test_reward_client import Fake, good
from test_teacher_server import free_port

from common.distributed import OUTAGE_EXIT_CODE

KILLS = int(os.environ.get("RL_HAND_KILLS", 4))  # SIGKILLs at random moments
STEPS = 6
MOMENTS = ["resume", "rollout", "score", "logprobs", "update", "save", "evaluate"]
IMPORT = "from common.config import require\n"
# Writes down what the run is at, and how often it has begun with each: the kernel keeps it when the process is killed
PHASES = """
_seen, _file = {{}}, __import__("os").open({path!r}, __import__("os").O_RDWR | __import__("os").O_CREAT)


def _say(now):
    _seen[now] = _seen.get(now, 0) + 1
    __import__("os").pwrite(_file, __import__("json").dumps([now, _seen]).ljust(400).encode(), 0)


def _said(enter):
    def wrapped(*arguments):
        class Block:
            def __enter__(self):
                _say(arguments[-1 if isinstance(arguments[-1], str) else 0])
                self.inner = enter(*arguments)
                return self.inner.__enter__()

            def __exit__(self, *error):
                _say("none of these")
                return self.inner.__exit__(*error)

        return Block()

    return wrapped


metrics.Log.time, distributed.together = _said(metrics.Log.time), _said(distributed.together)
"""


def assert_same(run, straight) -> None:
    """As if nothing had happened."""
    assert comparable(run.steps) == comparable(straight.steps)
    evaluations = [[line for line in comparable(one.lines) if "learning_rate" not in line] for one in (run, straight)]
    assert evaluations[0] == evaluations[1]
    assert_equal_weights(run.weights(STEPS), straight.weights(STEPS))
    assert not list(run.out_dir.glob(".writing-*"))


# ---- killed at any moment ----


def phase(path) -> tuple[str, dict[str, int]]:
    """What the run is at, and how often it has begun with each phase."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # not begun, or half read
        return "start and loading", {}


CHAINS = [("gspo", 1, {}), ("grpo", 1, dict(dynamic_sampling=2)), ("gkd", 1, dict(lmbda=0.5, seq_kd=True)),
          ("similarity_grpo", 1, dict(similarity_model="ngrams")), ("gspo_ddp", 2, {})]  # fmt: skip


@pytest.mark.parametrize("script, ranks, options", CHAINS if "RL_HAND_KILLS" in os.environ else CHAINS[:1],
                         ids=lambda value: str(value) if isinstance(value, (str, int)) else "")  # fmt: skip
def test_killed_at_random_moments_it_ends_as_if_left_alone(launcher, tmp_path, script, ranks, options):
    options = dict(options, steps=STEPS, save_every=1)
    straight = launcher.trained(script, ranks, **options)
    seen, draw = tmp_path / "phase", random.Random(f"{script} {ranks}")
    copy = launcher.copy(script, edits={IMPORT: IMPORT + PHASES.format(path=str(seen))})
    out_dir, left, killed_at = tmp_path / "0", KILLS // (len(CHAINS) if "RL_HAND_KILLS" in os.environ else 1), []
    while True:
        moment, times = draw.choice(["any", *MOMENTS]), draw.randint(1, 4)
        until = time.monotonic() + draw.uniform(0.0, 2.0)  # of "any"
        seen.unlink(missing_ok=True)
        run = launcher.start(copy, out_dir, ranks, **options)
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


# ---- disks ----

# Files of more than this many bytes cannot be written any more, by any code: the system refuses
FULL = (
    "    if len(list(__import__('pathlib').Path(CFG.out_dir).glob('checkpoint-*'))) == 1:\n"
    "        import resource\n"
    "        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))\n"
)
MAIN = "    gpus = devices."
KNOWN_CFG = "    globals()['CFG'] = cfg\n"


@pytest.mark.parametrize("script, ranks", [("gspo", 1), ("gspo_ddp", 2)])
def test_a_full_disk_leaves_the_last_checkpoint_and_says_what_to_do(launcher, tmp_path, script, ranks):
    straight = launcher.trained(script, ranks, steps=STEPS)
    full = launcher.copy(script, FULL + REWARD, {MAIN: KNOWN_CFG + MAIN})
    with fault("disk full while saving"):
        run = launcher.run(full, tmp_path, ranks, steps=STEPS)
        assert 0 not in run.codes and run.checkpoints == ["checkpoint-000002"], run.output
        said = (
            r"OSError: the checkpoint of step 4 could not be written to .*Make room \(keep_checkpoints = 9 and one more"
        )
        assert re.search(said, run.output) and f"it goes on from {tmp_path}/checkpoint-000002" in run.output
        if ranks == 2:
            assert "rank 0 failed in phase 'save'" in run.output
        assert not list(tmp_path.glob(".writing-*"))
        after = launcher.run(launcher.copy(script), tmp_path, ranks, steps=STEPS).succeeded()
        assert f"resuming from {tmp_path}/checkpoint-000002" in after.output
        assert_same(after, straight)


def test_a_folder_that_cannot_be_written_is_refused_before_a_model_is_loaded(launcher, tmp_path):
    (tmp_path / "file").write_text("no folder")
    for out_dir in (tmp_path / "file" / "run", "/proc/run"):  # the second also for root
        with fault("read-only disk at the start"):
            run = launcher.run(launcher.copy(), out_dir, policy_model="/no/such/model")
            assert run.codes[0] not in (0, None)
            assert f"out_dir = '{out_dir}': it cannot be written" in run.output and "/such" not in run.output


def test_a_disk_that_goes_away_ends_the_run_with_its_last_checkpoint(launcher, tmp_path):
    # the folder is gone in the middle, with a file in its place; it comes back as it was
    straight = launcher.trained("gspo", steps=STEPS)
    out_dir, away = tmp_path / "run", tmp_path / "away"
    gone = (
        f"    if __import__('os').path.exists({str(out_dir / 'checkpoint-000002')!r}):\n"
        f"        __import__('os').rename({str(out_dir)!r}, {str(away)!r})\n"
        f"        open({str(out_dir)!r}, 'w').close()\n"
    )
    with fault("disk gone, or read-only, in the middle"):
        run = launcher.run(launcher.copy(reward=gone + REWARD), out_dir, steps=STEPS)
        assert run.codes == [1] and "NotADirectoryError" in run.output
        out_dir.unlink()
        away.rename(out_dir)
        assert_same(launcher.run(launcher.copy(), out_dir, steps=STEPS).succeeded(), straight)


def test_a_slow_disk_takes_longer_and_a_signal_waits_for_it(launcher, tmp_path):
    straight = launcher.trained("gspo", steps=STEPS)
    slow = "_save_file = checkpoint.save_file\n\n\ndef _slow(*arguments):\n    print('saving', flush=True)\n"
    slow += "    __import__('time').sleep(0.5)\n    _save_file(*arguments)\n\n\ncheckpoint.save_file = _slow\n"
    with fault("slow disk, and SIGTERM while it writes"):
        run = launcher.start(launcher.copy(edits={IMPORT: IMPORT + slow}), tmp_path, steps=STEPS)
        run.wait_for(lambda: "saving" in run.output)
        os.kill(run.processes[0].pid, signal.SIGTERM)
        run.wait().succeeded()
        done = run.steps[-1]["step"]
        assert done < STEPS and run.checkpoints[-1] == f"checkpoint-{done:06d}"
        assert_same(launcher.run(launcher.copy(), tmp_path, steps=STEPS).succeeded(), straight)


@pytest.mark.parametrize("file, how", [("model.safetensors", "edited"), ("optimizer.safetensors", "swapped"),
                                       ("rng.safetensors", "cut off"), ("state.json", "edited")])  # fmt: skip
def test_a_checkpoint_that_is_not_what_was_saved_is_not_gone_on_from(launcher, tmp_path, file, how):
    straight = launcher.trained("gspo", steps=STEPS)
    shutil.copytree(straight.out_dir, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint-000006" / file
    content = path.read_bytes()
    changed = {"edited": content.replace(b"6", b"7", 1) if file == "state.json" else content[:-1] + b"\x01",
               "cut off": content[:-1],
               "swapped": (tmp_path / "run" / "checkpoint-000004" / file).read_bytes()}[how]  # fmt: skip
    assert changed != content
    path.write_bytes(changed)
    with fault(f"checkpoint file {how}"):
        run = launcher.run(launcher.copy(), tmp_path / "run", steps=STEPS).succeeded()
        assert f"warning: {tmp_path}/run/checkpoint-000006 is passed over: {file} " in run.output
        assert f"resuming from {tmp_path}/run/checkpoint-000004" in run.output
        assert_same(run, straight)


def test_two_runs_in_one_folder(launcher, tmp_path):
    straight = launcher.trained("gspo", steps=STEPS)
    slow = launcher.copy(reward="    __import__('time').sleep(0.3)\n" + REWARD)
    with fault("two runs in one out_dir"):
        first = launcher.start(slow, tmp_path, steps=STEPS)
        first.wait_for(lambda: first.steps)
        second = launcher.run(launcher.copy("gspo_multigpu"), tmp_path, steps=STEPS)
        assert second.codes[0] not in (0, None)
        pid = first.processes[0].pid
        assert re.search(
            rf"out_dir = .*: another run uses it \(process {pid} on .*\); give another out_dir", second.output
        )
        assert_same(first.wait().succeeded(), straight)


# ---- ranks ----

DIES, HANGS = (
    f"__import__('os').kill(__import__('os').getpid(), {number})" for number in (signal.SIGKILL, signal.SIGSTOP)
)
SCORES = (  # in the third step, by the thread that scores
    "    reward.calls = getattr(reward, 'calls', 0) + 1\n"
    "    if distributed.rank() == 1 and reward.calls == 3:\n"
    "        {what}\n"
)
SUMS = "                    distributed.sum_gradients(optimizer.params)\n"
SAVES = "        with log.time_save(done):\n"
DEATHS = {  # what is edited, who dies, and what the others are at
    "score": (SCORES.format(what=DIES), {}, 1, "(logprobs|score)"),
    "update": (
        "",
        {SUMS: f"                    if rank == 1 and step == 3:\n                        {DIES}\n{SUMS}"},
        1,
        "update",
    ),
    "save": ("", {SAVES: f"        if rank == 0 and done == 4:\n            {DIES}\n{SAVES}"}, 0, ".*"),
}


@pytest.mark.parametrize("where", DEATHS)
def test_a_killed_rank_is_named_by_the_other_which_ends(launcher, tmp_path, where):
    reward, edits, dead, phase = DEATHS[where]
    with fault("one of 2 ranks killed"):
        run = launcher.run(launcher.copy("gspo_ddp", reward + REWARD, edits), tmp_path, 2, steps=STEPS)
        assert run.codes[dead] == -signal.SIGKILL and run.codes[1 - dead] == 1, run.output
        pid, said = run.processes[dead].pid, run.output_files[1 - dead].read_text()
        named = rf"waited in phase '{phase}' for the others: rank {dead} (\(process {pid}\) )?is gone"
        assert re.search(f"RuntimeError: rank {1 - dead} {named}", said), said
        after = launcher.run(launcher.copy("gspo_ddp"), tmp_path, 2, steps=STEPS).succeeded()
        assert_same(after, launcher.trained("gspo_ddp", 2, steps=STEPS))


def test_a_rank_that_hangs_is_named_when_the_time_is_up(launcher, tmp_path):
    edits = {"TIMEOUT_MINUTES = 60": "TIMEOUT_MINUTES = 0.05"}
    hanging = launcher.copy("gspo_ddp", SCORES.format(what=HANGS) + REWARD, edits)
    with fault("one of 2 ranks hangs"):
        run = launcher.start(hanging, tmp_path, 2, steps=STEPS, reward_patience=1)
        run.processes[0].join(60)
        code, pid, said = run.codes[0], run.processes[1].pid, run.output_files[0].read_text()
        run.kill()
        named = rf"waited in phase '(logprobs|score)' for the others: rank 1 \(process {pid} on \S+\) did not come"
        assert code == 1 and re.search(f"RuntimeError: rank 0 {named}", said), said
        after = launcher.run(launcher.copy("gspo_ddp"), tmp_path, 2, steps=STEPS).succeeded()
        assert_same(after, launcher.trained("gspo_ddp", 2, steps=STEPS))


# ---- services and clocks ----

SERVICES = {  # what the service does from its third request on; None: it is stopped
    "killed": None,
    "hung": lambda items, number: time.sleep(3) or 503,
    "failing": lambda items, number: 500,
    "answering garbage": lambda items, number: {"results": "\x00" * 100},
    "answering NaN": lambda items, number: [good(item, score=float("nan")) for item in items],
    "answering too little": lambda items, number: [good(item) for item in items[1:]],
}
SCORED = dict(steps=STEPS, eval_every=0, save_every=100, reward_patience=1.0)


@pytest.fixture(scope="module")
def scored(launcher, tmp_path_factory):
    """A script whose rewards come from a service, with little time for an answer, and its run left alone."""
    quick = {"patience_s=cfg.reward_patience,": "patience_s=cfg.reward_patience, timeout_s=0.5,"}
    script, service = launcher.copy("gspo", "    raise AssertionError\n", quick), Fake()
    run = launcher.run(script, tmp_path_factory.mktemp("scored"), reward_url=service.url, **SCORED).succeeded()
    service.stop()
    return script, run


def serving(*names) -> list:
    """Some of these are for the soak only."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in SERVICES]


@pytest.mark.parametrize("what", serving("killed", "answering garbage"))
def test_a_reward_service_that_fails_ends_the_run_which_goes_on_with_a_good_one(launcher, scored, tmp_path, what):
    script, straight = scored
    service = Fake(port := free_port())
    url = dict(reward_url=service.url)
    with fault(f"reward service {what}"):
        service.delay = 0.1
        run = launcher.start(script, tmp_path / "run", **url, **SCORED)
        run.wait_for(lambda: len(service.requests) >= 3)
        if SERVICES[what] is None:
            service.stop()
        else:
            service.reply = SERVICES[what]
        run.wait()
        if SERVICES[what] is not None:
            service.stop()
        assert run.codes == [OUTAGE_EXIT_CODE] and "the same command goes on from here" in run.output, run.output
        service = Fake(port)
        assert_same(launcher.run(script, tmp_path / "run", **url, **SCORED).succeeded(), straight)
        service.stop()


def test_an_evaluation_that_the_service_cut_off_is_made_after_the_resume(launcher, scored, tmp_path):
    script, service = scored[0], Fake()
    options = {**SCORED, "steps": 3, "eval_every": 2, "reward_url": service.url}
    straight = launcher.run(script, tmp_path / "straight", **options).succeeded()
    with fault("reward service fails in an evaluation"):
        reply, asked = service.reply, []

        def fails(items, number):
            if len(items) == 8:  # an evaluation; a step has 16
                asked.append(number)
            return 500 if len(items) == 8 and len(asked) > 1 else reply(items, number)

        service.reply = fails
        run = launcher.run(script, tmp_path / "run", **options)
        assert run.codes == [OUTAGE_EXIT_CODE] and run.checkpoints == ["checkpoint-000002"], run.output
        service.reply = reply
        run = launcher.run(script, tmp_path / "run", **options).succeeded()
        evaluations = [[line["step"] for line in one.lines if "eval_reward" in line] for one in (run, straight)]
        assert evaluations == [[0, 2, 3], [0, 2, 3]]
        assert comparable(run.lines) == comparable(straight.lines)
        assert_equal_weights(run.weights(), straight.weights())
    service.stop()


@pytest.mark.slow
def test_a_slow_reward_service_changes_nothing(launcher, scored, tmp_path):
    script, straight = scored
    service = Fake()
    with fault("reward service slow"):
        service.delay = 0.4
        assert_same(launcher.run(script, tmp_path, reward_url=service.url, **SCORED).succeeded(), straight)
    service.stop()


def test_a_clock_that_jumps_changes_nothing(launcher, tmp_path):
    # an hour forth and two back with every look at it; what lasts is measured by a clock that only goes on
    jumps = "import itertools, time\n\n_now, _turns = time.time, itertools.count()\n"
    jumps += "time.time = lambda: _now() + (3600, -7200)[next(_turns) % 2]\n"
    with fault("clock jumps"):
        run = launcher.run(launcher.copy(edits={IMPORT: IMPORT + jumps}), tmp_path, steps=STEPS).succeeded()
        assert_same(run, launcher.trained("gspo", steps=STEPS))
        assert all(0 < line["seconds"] < 60 for line in run.steps)
