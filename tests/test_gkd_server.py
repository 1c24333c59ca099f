"""Distillation from a teacher behind HTTP: the run of a local teacher, also when the server is killed in the middle."""

import itertools
import json
import os
import re
import shutil
import time
from functools import partial

import pytest
import requests
import torch
from bounds import rounding
from comparing import assert_close, comparable
from conftest import Slow, assert_equal_weights, build_tokenizer, fault
from servers import HTTPService
from test_logprobs import PROMPTS
from test_teacher_server import Process, Server, free_port, wait_for

from common.base.distributed import OUTAGE_EXIT_CODE
from common.base.service import Service
from common.distill import distillation, offpolicy, teacher_client, teachers
from common.model import models

pytestmark = pytest.mark.services
STEPS = 4
ALL = dict(steps=STEPS, teacher_top_k=0, n_server_workers=1, teacher_patience=60)  # the whole vocabulary
MIXED = dict(lmbda=0.5, loss="jsd", beta=0.3, loss_temperature=0.7)


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


def without_rewards(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith("reward")} for line in comparable(lines)]


OWN = dict(lmbda=0.4, seq_kd=True, loss="forward_kl")  # trained on the teacher's own answers


@pytest.mark.parametrize("options", [{}, MIXED, dict(loss="opd"), OWN], ids=["reverse_kl", "mixed", "opd", "own"])
def test_the_loss_is_that_of_a_local_teacher(launcher, server, tmp_path, options):
    local = launcher.trained("gkd", steps=STEPS, **options)
    run = launcher.run("gkd", tmp_path / "run", teacher_url=server.url, **ALL, **options).succeeded()
    assert_close(run, local)
    if options == MIXED:
        two = dict(ALL, n_server_workers=3)
        ranks = launcher.run("gkd_ddp", tmp_path / "two", 2, teacher_url=server.url, **two, **options)
        assert_close(ranks.succeeded(), local)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(server, model_folders):
    model = models.load_frozen(str(model_folders["teacher"]), torch.device("cpu"), "fp32")
    for top_k, workers, cut in ((0, 1, 1000), (5, 2, 14)):  # all rows in one request, and about one row in each
        client = server.client(top_k=top_k, workers=workers)
        batch = offpolicy.batch(PROMPTS[:3], [[5, 6], [7, 8, 9, 10, 11], [12]], 0, [3], torch.device("cpu"))
        (micros,) = batch.minibatches(1, cut, True)
        client.fill(micros, cut)
        for micro, beta in itertools.product(micros, (0.0, 0.5, 1.0)):
            student = distillation.Divergences(model, 0.7, False, beta, 64, None)
            values = student(*micro.tokens[:4], micro.completion_mask.float(), *micro.teacher.tensors)[1]
            # three sums of 64 terms of at most 1, of log-probs of at most 10
            assert values[..., :3].abs().max() <= rounding(3 * 64, 10.0) and values[..., 5].max() > 0.5


@pytest.mark.parametrize(("body", "message"), [
    (b"<html>", "/info begins b'<html>', protocol None: must be 1; give the address of gkd/teacher_server.py"),
    (b"[1]", "protocol None"), (b"[" * 100_000, "protocol None"), (b'{"protocol": 9}', "protocol 9"),
    (b'{"protocol": 1, "vocabulary_size": "64"}', "/info says vocabulary_size = '64': must be of type int"),
])  # fmt: skip
def test_what_is_no_teacher_is_refused(body, message, server, monkeypatch):
    monkeypatch.setattr(Service, "get", lambda self, path: body)
    with pytest.raises(ValueError, match=re.escape(message)):
        server.client()


def test_a_part_of_a_vocabulary_does_not_pass_for_all_of_it(server, monkeypatch):
    client = server.client()
    part = json.dumps(dict(list(client.vocabulary().items())[:5])).encode()
    for body, count in ((part, 5), (b"[" * 100_000, 0), (b"<html>", 0), (b"[]", 0), (b'{"a": 1, "b": "1"}', 2)):
        monkeypatch.setattr(Service, "get", lambda self, path, body=body: body)
        with pytest.raises(ValueError, match=f"{server.url}: a vocabulary of {count} tokens, .*not that of /info"):
            client.vocabulary()


def test_a_server_with_another_tokenizer_is_refused(server, model_folders, tmp_path, capsys):
    own = build_tokenizer()
    assert teachers.agree(server.client(), own, 64) == 64 and capsys.readouterr().out == ""
    shutil.copytree(model_folders["teacher"], tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    saved = json.loads(path.read_text())
    words = saved["model"]["vocab"]
    words["+"], words["-"] = words["-"], words["+"]
    path.write_text(json.dumps(saved))
    other = Server(tmp_path / "other")
    try:
        with pytest.raises(ValueError, match=r"student and teacher have different tokenizers: id 7 .*\(2 ids differ\)"):
            teachers.agree(other.client(), own, 64)
    finally:
        other.stop()


def test_the_top_k_and_a_tail_are_never_above_the_whole(launcher, server, tmp_path):
    local = launcher.trained("gkd", steps=STEPS)
    run = launcher.run("gkd", tmp_path / "run", teacher_url=server.url, **{**ALL, "teacher_top_k": 8})
    first, whole = run.succeeded().steps[0], local.steps[0]  # of the same student
    assert 0.1 * whole["divergence"] < first["divergence"] < whole["divergence"]
    assert first["teacher_logps"] == pytest.approx(whole["teacher_logps"], rel=1e-5)
    assert run.lines[-2]["eval_reverse_kl"] < run.lines[0]["eval_reverse_kl"]


def test_a_teacher_that_is_killed_and_started_again_changes_nothing(launcher, start, tmp_path):
    options = dict(ALL, **MIXED, save_every=100)
    first = start()
    straight = launcher.run("gkd", tmp_path / "straight", teacher_url=first.url, **options).succeeded()
    run = launcher.start("gkd", tmp_path / "run", rewards=[Slow(0.25)], teacher_url=first.url, **options)
    run.wait_for(lambda: len(run.steps) >= 1)
    with fault("teacher server killed, and started again"):
        first.kill()
        run.wait_for(lambda: "waiting for it" in run.output)
        start()
        run.wait().succeeded()
        assert "going on" in run.output
        assert without_rewards(run.steps) == without_rewards(straight.steps)
        assert_equal_weights(run.weights(), straight.weights())


class Relay(HTTPService):
    """Hands requests on to a teacher; once a run has a checkpoint, in its own way those that ask for log-probs."""

    def __init__(self, teacher: str, how: str, out_dir):
        self.teacher, self.how, self.out_dir = teacher, how, out_dir
        super().__init__()

    def respond(self, request, body):
        odd = self.how if request.command == "POST" and any(self.out_dir.glob("checkpoint-*")) else ""
        time.sleep({"slow": 0.3, "hung": 2.0}.get(odd, 0.0))
        headers = {"Content-Type": request.headers.get("Content-Type", "")}
        answer = requests.request(request.command, self.teacher + request.path, data=body, timeout=30, headers=headers)
        content = answer.content
        if odd == "answering garbage":
            content = content[: len(content) // 2] + bytes(len(content) - len(content) // 2)
        return 500 if odd == "failing" else answer.status_code, content


def impatient(module) -> None:
    """A second for an answer."""
    teacher_client.RemoteTeacher = partial(teacher_client.RemoteTeacher, timeout_s=1.0)


HOW = ("slow", "hung", "failing", "answering garbage") if "RL_HAND_KILLS" in os.environ else ("answering garbage",)


@pytest.mark.faults
@pytest.mark.parametrize("how", HOW)
def test_a_teacher_that_fails_stops_the_run_which_goes_on_with_a_good_one(launcher, server, tmp_path, how):
    options = dict(ALL, teacher_patience=1.5, save_every=1, eval_every=0, prepare=impatient)
    straight = launcher.run("gkd", tmp_path / "straight", teacher_url=server.url, **options).succeeded()
    with Relay(server.url, how, tmp_path / "run") as relay, fault(f"teacher server {how}"):
        run = launcher.run("gkd", tmp_path / "run", teacher_url=relay.url, **options)
        if how == "slow":
            run.succeeded()
        else:
            assert run.codes[0] not in (0, None) and run.checkpoints, run.output
            run = launcher.run("gkd", tmp_path / "run", teacher_url=server.url, **options).succeeded()
        assert without_rewards(run.steps) == without_rewards(straight.steps)
        assert_equal_weights(run.weights(), straight.weights())


@pytest.mark.faults
def test_after_a_long_outage_the_run_is_saved_and_goes_on(launcher, start, tmp_path):
    options = {**ALL, **MIXED, "teacher_patience": 1.0, "save_every": 100}
    first = start()
    run = launcher.start("gkd_ddp", tmp_path / "run", 2, rewards=[Slow(0.25)], teacher_url=first.url, **options)
    run.wait_for(lambda: len(run.steps) >= 2)
    first.kill()
    run.wait(30)
    assert run.codes == [OUTAGE_EXIT_CODE] * 2, run.output
    assert "stayed away for 1 s" in run.output and "the same command goes on from here" in run.output
    (saved,) = run.checkpoints
    done = len(run.steps)
    assert saved == f"checkpoint-{done:06d}" and done < STEPS
    assert json.loads((run.out_dir / saved / "state.json").read_text())["position"] == 4 * done
    start()
    run = launcher.run("gkd_ddp", tmp_path / "run", 2, teacher_url=first.url, **options).succeeded()
    assert_close(run, launcher.trained("gkd", steps=STEPS, **MIXED), evaluations=False)


def test_a_teacher_that_is_not_there_at_the_start_is_an_outage_too(launcher, tmp_path):
    options = {**ALL, "teacher_patience": 0.5, "teacher_url": f"http://127.0.0.1:{free_port()}"}
    run = launcher.run("gkd_ddp", tmp_path / "run", 2, **options)
    assert run.codes == [OUTAGE_EXIT_CODE] * 2 and "stayed away for 0.5 s" in run.output
    assert not run.checkpoints and "saved" not in run.output
