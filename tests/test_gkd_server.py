"""Distillation from a teacher behind HTTP: the run of a local teacher, also when the server is killed in the middle."""

import json
import time

import pytest
from conftest import assert_equal_weights, comparable
from test_parity import assert_close
from test_teacher_server import Process, Server, free_port, wait_for

from common.distributed import OUTAGE_EXIT_CODE

STEPS = 4
ALL = dict(steps=STEPS, teacher_top_k=0, n_server_workers=1, teacher_patience=60)  # the whole vocabulary
MIXED = dict(lmbda=0.5, loss="jsd", beta=0.3, loss_temperature=0.7)
SLOW_REWARD = "    __import__('time').sleep(0.25)\n    return [0.0] * len(completions)\n"


@pytest.fixture(scope="module")
def server(model_folders):
    """The teacher of the other tests, in this process."""
    server = Server(model_folders["teacher"])
    yield server
    server.stop()


@pytest.fixture
def start(model_folders, tmp_path):
    """Starts the teacher in a process of its own, on one port, and again after it was killed."""
    started, port = [], free_port()

    def start() -> Process:
        output = tmp_path / f"{len(started)}.txt"
        started.append(Process(output, model_folders["teacher"], port))
        wait_for(lambda: ": ready, " in output.read_text(), 60)  # the patience of the tests is short
        return started[-1]

    yield start
    for server in started:
        server.kill()


def without_times(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith("reward")} for line in comparable(lines)]


@pytest.mark.parametrize("options", [{}, MIXED, dict(loss="opd")], ids=["reverse_kl", "mixed", "opd"])
def test_the_loss_is_that_of_a_local_teacher(launcher, server, tmp_path, options):
    local = launcher.trained("gkd", steps=STEPS, **options)
    run = launcher.run(launcher.copy("gkd"), tmp_path / "run", teacher_url=server.url, **ALL, **options).succeeded()
    assert_close(run, local, metrics=1e-4, weights=2e-6)
    if options == MIXED:
        two = dict(ALL, n_server_workers=3)
        ranks = launcher.run(launcher.copy("gkd_ddp"), tmp_path / "two", 2, teacher_url=server.url, **two, **options)
        assert_close(ranks.succeeded(), local, metrics=1e-4, weights=2e-6)


def test_the_top_k_and_a_tail_are_never_above_the_whole(launcher, server, tmp_path):
    local = launcher.trained("gkd", steps=STEPS)
    run = launcher.run(launcher.copy("gkd"), tmp_path / "run", teacher_url=server.url, **{**ALL, "teacher_top_k": 8})
    first, whole = run.succeeded().steps[0], local.steps[0]  # of the same student
    assert 0.1 * whole["divergence"] < first["divergence"] < whole["divergence"]
    assert first["teacher_logps"] == pytest.approx(whole["teacher_logps"], rel=1e-5)
    assert run.lines[-2]["eval_reverse_kl"] < run.lines[0]["eval_reverse_kl"]


def test_the_teachers_own_answers_are_those_of_a_local_one(launcher, server, tmp_path):
    options = dict(lmbda=0.4, seq_kd=True, loss="forward_kl")
    run = launcher.run(launcher.copy("gkd"), tmp_path / "run", teacher_url=server.url, **ALL, **options).succeeded()
    assert_close(run, launcher.trained("gkd", steps=STEPS, **options), metrics=1e-4, weights=2e-6)


def test_a_teacher_that_is_killed_and_started_again_changes_nothing(launcher, start, tmp_path):
    options = dict(ALL, **MIXED, save_every=100)
    first = start()
    straight = launcher.run(launcher.copy("gkd"), tmp_path / "straight", teacher_url=first.url, **options).succeeded()
    run = launcher.start(launcher.copy("gkd", SLOW_REWARD), tmp_path / "run", teacher_url=first.url, **options)
    run.wait_for(lambda: len(run.steps) >= 1)
    first.kill()
    run.wait_for(lambda: "waiting for it" in run.output)
    start()
    run.wait().succeeded()
    assert "going on" in run.output
    assert without_times(run.steps) == without_times(straight.steps)
    assert_equal_weights(run.weights(), straight.weights())


@pytest.mark.parametrize(("script", "ranks"), [pytest.param("gkd", 1, marks=pytest.mark.slow), ("gkd_ddp", 2)])
def test_after_a_long_outage_the_run_is_saved_and_goes_on(launcher, start, tmp_path, script, ranks):
    options = {**ALL, **MIXED, "teacher_patience": 1.0, "save_every": 100}
    first = start()
    slow = launcher.copy(script, SLOW_REWARD)
    run = launcher.start(slow, tmp_path / "run", ranks, teacher_url=first.url, **options)
    run.wait_for(lambda: len(run.steps) >= 2)
    first.kill()
    began = time.monotonic()
    run.wait()
    assert run.codes == [OUTAGE_EXIT_CODE] * ranks, run.output
    assert "stayed away for 1 s" in run.output and "the same command goes on from here" in run.output
    assert time.monotonic() - began < 30
    (saved,) = run.checkpoints
    done = len(run.steps)
    assert saved == f"checkpoint-{done:06d}" and done < STEPS
    assert json.loads((run.out_dir / saved / "state.json").read_text())["position"] == 4 * done
    start()
    run = launcher.run(slow, tmp_path / "run", ranks, teacher_url=first.url, **options).succeeded()
    local = launcher.trained("gkd", steps=STEPS, **MIXED)
    assert [line["step"] for line in run.steps] == list(range(1, STEPS + 1))
    for own, theirs in zip(run.steps, local.steps, strict=True):
        assert own["divergence"] == pytest.approx(theirs["divergence"], rel=1e-4)
    for name, weight in local.weights().items():
        assert (run.weights()[name] - weight).abs().mean() < 2e-7, name


def test_a_teacher_that_is_not_there_at_the_start_is_an_outage_too(launcher, tmp_path):
    options = {**ALL, "teacher_patience": 0.5, "teacher_url": f"http://127.0.0.1:{free_port()}"}
    run = launcher.run(launcher.copy("gkd_ddp"), tmp_path / "run", 2, **options)
    assert run.codes == [OUTAGE_EXIT_CODE] * 2 and "stayed away for 0.5 s" in run.output
    assert not run.checkpoints and "saved" not in run.output
