"""The teacher behind HTTP: its numbers, what it refuses, and what a client does while it is away."""

import contextlib
import dataclasses
import fcntl
import math
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pytest
import requests
import torch
import uvicorn
from bounds import rounding
from comparing import FORWARD
from conftest import ROOT, build_tokenizer, fork_script
from servers import HTTPService

sys.path.insert(0, str(ROOT / "gkd"))
import teacher_server
from teacher_server import Config, Teacher

from common.base import config, service, serving
from common.base.distributed import OutageError
from common.base.service import Service, Unavailable
from common.distill import teacher_client, teacher_worker, teachers
from common.distill.teacher_client import RemoteTeacher
from common.generation import batches, rollout
from common.model import models

CPU, V, SCRIPT = torch.device("cpu"), 64, ROOT / "gkd" / "teacher_server.py"
TOP_K, GENERATE = "/topk_logprobs", "/generate"
BINARY = {"Content-Type": "application/octet-stream"}
# log-probs, at most 10 in size, computed in two ways
assert_near = partial(torch.testing.assert_close, atol=rounding(FORWARD, 10.0), rtol=0)


class Server:
    """A server in threads of this process."""

    def __init__(self, folder, port: int = 0, work: bool = True, **options):
        defaults = dict(teacher_model=str(folder), device="cpu", max_top_k=0)
        self.teacher = Teacher(Config(**{**defaults, **options}))
        self.listener = socket.create_server(("127.0.0.1", port))
        self.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = teacher_server.create_app(self.teacher)
        options = dict(http=serving.StrictHTTP, lifespan="off", log_level="warning")
        self.web = uvicorn.Server(uvicorn.Config(app, **options))
        self.threads = [threading.Thread(target=self.web.run, args=([self.listener],), daemon=True)]
        self.threads[0].start()
        if work:
            self.work()
            wait_for(lambda: self.teacher.state == "ready")

    def work(self) -> None:
        def run():
            if self.teacher.state == "loading":
                self.teacher.load()
            self.teacher.work()

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def stop(self) -> None:
        self.teacher.drain()
        self.web.should_exit = True
        for thread in reversed(self.threads):
            thread.join(10)
        assert not any(thread.is_alive() for thread in self.threads)

    def client(self, **options) -> RemoteTeacher:
        defaults = dict(top_k=5, temperature=0.7, workers=1, patience_s=20)
        return RemoteTeacher(self.url, **{**defaults, **options})


@pytest.fixture(scope="module")
def folder(model_folders):
    return model_folders["qwen2"]


@pytest.fixture(scope="module")
def model(folder):
    return models.load_frozen(str(folder), CPU, "fp32")


@pytest.fixture(scope="module")
def server(folder):
    server = Server(folder)
    yield server
    server.stop()


@pytest.fixture
def own(folder):
    """Makes servers that are stopped at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(source=folder, **options) -> Server:
            server = Server(source, **options)
            stack.callback(lambda: server.teacher.state == "draining" or server.stop())
            return server

        yield make


def micro_batches(rows: int = 7, below: int = V, cut: int = 60) -> list[batches.RolloutBatch]:
    """Rows of very different lengths, cut as an update would."""
    generator = torch.Generator().manual_seed(1)
    prompt_lengths = torch.randint(1, 9, (rows,), generator=generator).tolist()
    lengths = torch.randint(1, 12, (rows, 1), generator=generator)
    prompts = [torch.randint(4, below, (n,), generator=generator).tolist() for n in prompt_lengths]
    completions = torch.randint(4, below, (rows, 11), generator=generator).where(torch.arange(11) < lengths, -1)
    batch = batches.assemble(prompts, 1, completions, torch.zeros(rows, 11), 0, [3])
    return [micro for minibatch in batch.minibatches(2, cut, True) for micro in minibatch]


def request(**changes) -> tuple[dict, dict]:
    """Tensors and options of a request that is answered; `changes` replace some."""
    tensors = dict(tokens=int32(*range(4, 14)), prompt_lengths=int32(3, 2), completion_lengths=int32(1, 4))
    options = dict(top_k=5, temperature=1.0)
    for name, value in changes.items():
        place = tensors if name in tensors or isinstance(value, torch.Tensor) else options
        place[name] = value
    return {k: v for k, v in tensors.items() if v is not None}, options


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def connection(url: str, **options) -> Service:
    return Service(url, **{**dict(timeout_s=10, patience_s=10), **options})


@pytest.mark.parametrize(("top_k", "shared", "packed"), [(5, V, True), (0, 50, True), (5, 50, False), (100, V, True)])
def test_top_k_is_that_of_the_models_own_logits(server, model, monkeypatch, top_k, shared, packed):
    monkeypatch.setattr(server.teacher.states, "packed", packed)
    monkeypatch.setattr(server.teacher, "cfg", dataclasses.replace(server.teacher.cfg, max_batch_tokens=40))
    client, micros = server.client(top_k=top_k), micro_batches(below=50)
    client.shared = shared
    client.fill(micros)
    K = min(top_k or shared, shared)
    for micro in micros:
        for i, (prompt, completion) in enumerate(zip(micro.prompts, micro.completions, strict=True)):
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1, :shared]
            expected = (logits / 0.7).log_softmax(-1)
            got, n = [x[i] for x in micro.teacher.tensors], len(completion)
            ids, logps, tail_logp, token_logps = (x[:n] for x in got)
            assert_near(logps, expected.topk(K).values)
            assert_near(expected.gather(1, ids.long()), logps)
            assert_near(token_logps, expected.gather(1, completion[:, None])[:, 0])
            tail = 1 - expected.topk(K).values.double().exp().sum(-1)
            assert_near(tail_logp.double().exp(), tail)  # errors of logarithms, times at most 1
            assert ids.dtype == torch.int32 and all(x[n:].count_nonzero() == 0 for x in got)


def test_numbers_do_not_depend_on_how_requests_are_cut(server):
    filled = []
    for workers, micro_batch_tokens, cut in ((1, 0, 60), (1, 12, 60), (3, 30, 60), (3, 0, 1)):
        micros = micro_batches(cut=cut)
        server.client(workers=workers).fill(micros, micro_batch_tokens)
        logps = {int(row): micro.teacher.token_logps[i, : micro.lengths[i]] for micro in micros
                 for i, row in enumerate(micro.rows)}  # fmt: skip
        filled.append(torch.cat([logps[row] for row in sorted(logps)]))
    for other in filled[1:]:
        assert_near(other, filled[0])


def test_requests_that_wait_are_computed_together(own):
    server = own(work=False)
    server.teacher.load()
    before = server.teacher.counts["batches"]
    with ThreadPoolExecutor(4) as pool:
        bodies = [service.pack(*request(top_k=k, temperature=0.5 * k)) for k in (1, 2, 3, 4)]
        answers = [pool.submit(connection(server.url).post, TOP_K, body) for body in bodies]
        wait_for(lambda: len(server.teacher.waiting) == 4)
        server.work()
        answers = [service.unpack(answer.result())[0] for answer in answers]
    assert server.teacher.counts["batches"] == before + 1
    assert [answer["logps"].shape for answer in answers] == [(5, k) for k in (1, 2, 3, 4)]
    for answer, body in zip(answers, bodies, strict=True):  # each with its own k and temperature
        alone = service.unpack(connection(server.url).post(TOP_K, body))[0]
        assert_near(answer["logps"], alone["logps"])


@pytest.mark.parametrize("shared", [V, 40])
def test_completions_are_those_of_a_local_sampler(server, model, shared):
    prompts, numbers = [[5, 6, 7], [8, 9], [4] * 7, [20, 21]], [11, 3, 4, 8]
    sampler = rollout.Sampler([model], end_ids=[3], pad_id=0, max_new_tokens=9, suppressed_ids=range(shared, V))
    batch = sampler.generate(prompts, group_size=1, temperature=0.9, seed=5, prompt_numbers=numbers)
    expected = [ids[:n] for ids, n in zip(batch.completion_ids.tolist(), batch.lengths.tolist(), strict=True)]
    client = server.client()
    client.shared = shared
    options = dict(seed=5, temperature=0.9, max_new_tokens=9)
    assert client.generate(prompts, numbers, **options) == expected
    assert client.generate(prompts[1:], numbers[1:], **options) == expected[1:]
    assert max(token for ids in expected for token in ids) < shared


def test_what_the_server_says_of_itself(server, tokenizer):
    client = server.client()
    assert client.vocabulary() == tokenizer.get_vocab()
    assert client.tokenizer_hash == teacher_client.vocabulary_hash(tokenizer.get_vocab())
    assert client.tokenizer_traits.items() >= teachers.tokenizer_traits(tokenizer).items()
    assert (client.vocabulary_size, client.max_top_k, client.shared, client.head) == (V, V, V, None)
    client.fill(micro_batches(1))
    lines = requests.get(f"{server.url}/metrics").text.splitlines()
    samples = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert samples['teacher_requests_total{endpoint="/info",status="200"}'] >= 1
    assert samples["teacher_tokens_total"] > 0 and samples["teacher_ready"] == 1


GENERATED = dict(numbers=torch.tensor([1, 2]), prompt_lengths=int32(8, 2), max_new_tokens=4)


@pytest.mark.parametrize(("changes", "message"), [
    (dict(tokens=None), "tokens: nothing"), (dict(tokens=torch.arange(10)), "tokens: torch.int64"),
    (dict(prompt_lengths=int32(3, 2)[None]), r"prompt_lengths: torch.int32 \[1, 2\]"),
    (dict(completion_lengths=int32(5)), "2 prompts, 1 of the others"),
    (dict(completion_lengths=int32(1, 3)), "lengths add up to 9: must be the 10"),
    (dict(completion_lengths=int32(0, 5)), "of 0 tokens"),
    (dict(prompt_lengths=int32(), completion_lengths=int32()), "0 sequences"),
    (dict(tokens=int32(*range(55, 65))), "token ids from 55 to 64: must be from 0 to 63"),
    (dict(tokens=int32(*range(-1, 9))), "token ids from -1"), (dict(top_k=V + 1), "top_k = 65: must be from 1 to 64"),
    (dict(top_k=20, shared=16), "top_k = 20: must be at most shared = 16"), (dict(shared=V + 1), "shared = 65"),
    (dict(top_k=5, shared=9), "a completion token 13: must be below shared = 9"),
    (dict(temperature=math.nan), "temperature = nan"), (dict(temperature="warm"), "temperature = 'warm'"),
    (dict(temprature=0.5), "option 'temprature': must be one of "), (dict(deadline_seconds=-1), "deadline_seconds"),
    (dict(tokens=int32(*[5] * 600), prompt_lengths=int32(1), completion_lengths=int32(599)),
     "a sequence of 600 tokens: must be at most 512"),
    (GENERATED | dict(max_new_tokens=600), "a sequence of 608 tokens"),
    (GENERATED | dict(max_new_tokens=0), "max_new_tokens"), (GENERATED | dict(temperature=1e-40), "temperature"),
    (GENERATED | dict(numbers=int32(1, 2)), "numbers: torch.int32"),
])  # fmt: skip
def test_a_request_that_cannot_be_answered_is_refused(server, changes, message):
    path = GENERATE if "numbers" in changes else TOP_K
    with pytest.raises(ValueError, match=rf"status 422, .*{message}"):
        connection(server.url).post(path, service.pack(*request(**changes)))


def test_a_body_that_is_not_safetensors_or_too_long_and_an_answer_that_is_too_long_are_refused(server, monkeypatch):
    post, body = partial(connection(server.url).post, TOP_K), service.pack(*request())
    for bad in (b"", b"\xff" * 100, body[:-1]):
        with pytest.raises(ValueError, match=r"status 422, a body of \d+ bytes is not in the safetensors format"):
            post(bad)
    monkeypatch.setattr(teacher_worker, "MAX_ANSWER", 100)
    with pytest.raises(ValueError, match="status 422, an answer of 200 bytes: must be at most 100"):
        post(body)
    monkeypatch.setattr(teacher_server, "MAX_BODY", 100)
    with pytest.raises(ValueError, match="status 413, a body of more than 100 bytes"):
        post(body)


def test_top_k_above_the_limit_of_the_server_is_refused_at_the_start(own):
    with pytest.raises(ValueError, match=r"top_k = 0, which is 64 of 64 ids: .* at most 8"):
        own(max_top_k=8).client(top_k=0)


def test_a_port_for_other_machines_needs_a_token(monkeypatch):
    monkeypatch.delenv("RL_HAND_TEACHER_TOKEN", raising=False)
    with pytest.raises(ValueError, match="without a token"):
        Config(host="0.0.0.0")
    assert Config().host == "127.0.0.1"
    monkeypatch.setenv("RL_HAND_TEACHER_TOKEN", "secret\n")
    assert Config(host="0.0.0.0").secret == "secret"


@pytest.mark.services
def test_with_a_token_only_health_is_open(own, monkeypatch, tmp_path):
    server = own(token="secret")
    url = server.url
    connection(url).wait_until_ready(10)
    for token in ("", "wrong"):
        for path in ("/info", "/vocabulary", "/metrics"):
            with pytest.raises(ValueError, match="status 401, the token is missing or wrong"):
                connection(url, token=token).get(path)
        with pytest.raises(ValueError, match="status 401"):
            connection(url, token=token).post(TOP_K, service.pack(*request()))
    # no proxy is asked for loopback, and netrc does not replace the token
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login someone password else\n")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    client = server.client(token="secret")
    client.fill(micro_batches())
    client.service._local = False  # as for another machine: the environment counts, but not this file
    client.service._idle.clear()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert client.vocabulary()


@pytest.mark.services
def test_a_full_queue_a_deadline_and_health_before_and_while_it_works(own):
    server = own(work=False, max_queue=2)
    health = f"{server.url}/health"
    assert (requests.get(health).status_code, requests.get(health).json()) == (503, {"status": "loading"})
    with pytest.raises(Unavailable, match="status 503, loading"):
        connection(server.url).once("POST", TOP_K, service.pack(*request()))
    server.teacher.load()
    late, patient = (service.pack(*request(deadline_seconds=seconds)) for seconds in (0.05, 60))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(connection(server.url).once, "POST", TOP_K, body) for body in (late, patient)]
        wait_for(lambda: len(server.teacher.waiting) == 2)
        answer = requests.post(server.url + TOP_K, data=patient, headers=BINARY)
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) > 0
        with pytest.raises(OutageError, match="status 429"):  # patience ends there too
            connection(server.url, patience_s=0.3).post(TOP_K, patient)
        assert requests.get(health).json() == {"status": "ready"}
        time.sleep(0.05)
        server.work()
        with pytest.raises(Unavailable, match="status 504, its deadline passed"):
            waiting[0].result()
        assert service.unpack(waiting[1].result())[0]["logps"].shape == (5, 5)
    assert server.teacher.counts["expired"] == 1 and server.teacher.counts["rejected"] >= 2


@pytest.mark.services
def test_a_model_that_hangs_is_not_healthy(server, monkeypatch):
    go, answer = threading.Event(), server.teacher.answer
    monkeypatch.setattr(server.teacher, "answer", lambda jobs: go.wait(10) and answer(jobs))
    monkeypatch.setattr(server.teacher, "cfg", dataclasses.replace(server.teacher.cfg, deadline_seconds=0.05))
    with ThreadPoolExecutor(1) as pool:
        # another client may wait longer than the server's own limit: only when that has passed, too, nobody waits
        asked = pool.submit(connection(server.url).post, TOP_K, service.pack(*request(deadline_seconds=0.5)))
        wait_for(lambda: server.teacher.busy)
        assert -0.5 <= server.teacher.late < 0 and not asked.done()
        assert requests.get(f"{server.url}/health", timeout=2).json() == {"status": "ready"}  # it is at work
        assert "teacher_busy 1" in requests.get(f"{server.url}/metrics", timeout=2).text
        wait_for(lambda: server.teacher.late > 0)
        health = requests.get(f"{server.url}/health", timeout=2)
        assert health.status_code == 503 and health.json()["status"].startswith("stuck: ")
        go.set()
        assert asked.result()
    wait_for(lambda: server.teacher.late == -math.inf)
    assert requests.get(f"{server.url}/health", timeout=2).json() == {"status": "ready"}


@pytest.mark.services
def test_a_server_ends_when_its_model_hangs(capsys):
    ended, late = queue.SimpleQueue(), iter([-math.inf, -1.0, 0.0, 0.09, 0.1])
    serving.end_when_stuck(lambda: next(late), 0.1, ended.put)
    assert ended.get(timeout=10) == 1 and next(late, None) is None  # not before the last
    assert "the model hangs: nobody has waited for what it computes for 0.1 s" in capsys.readouterr().err


def test_an_error_of_the_model_is_said_after_three_tries_and_the_server_goes_on(server, monkeypatch):
    for error, message in ((RuntimeError("shape of things"), "status 500, RuntimeError: shape of things"),
                           (torch.OutOfMemoryError("CUDA"), "status 507, .* lower --max_batch_tokens")):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(server.teacher, "answer", fails := mock.Mock(side_effect=error))
            with pytest.raises(RuntimeError, match=message):
                server.client().fill(micro_batches())
            assert fails.call_count == 3
    server.client().fill(micro_batches())
    monkeypatch.setattr(server.teacher, "bias", torch.full((V,), torch.nan))
    with pytest.raises(RuntimeError, match=r"status 500, .*not finite"):  # such numbers are never sent
        server.client().fill(micro_batches())


@pytest.mark.services
def test_a_gpu_in_error_ends_the_server(own):
    server = own(work=False)
    server.teacher.load()
    server.teacher.answer = mock.Mock(side_effect=torch.AcceleratorError("illegal memory access"))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(connection(server.url).once, "POST", TOP_K, service.pack(*request()))
        with pytest.raises(torch.AcceleratorError):
            server.teacher.work()
        with pytest.raises(Unavailable, match="status 503, failed: illegal memory"):
            asked.result()
    assert requests.get(f"{server.url}/health").json() == {"status": "failed: illegal memory access"}
    server.threads.pop(0)
    server.web.should_exit = True


def changed(name, change):
    return lambda tensors: {**tensors, name: change(tensors[name])}


def tamper_with_answers(monkeypatch, tamper) -> None:
    pack = service.pack
    monkeypatch.setattr(service, "pack", lambda tensors, metadata: pack(tamper(tensors), metadata))


@pytest.mark.parametrize(("tamper", "message"), [
    (lambda tensors: tensors | {k: tensors[k][:, :20] for k in ("ids", "logps")}, r"\[\d+, 20\].* in place of .*64\]"),
    (lambda tensors: {k: v for k, v in tensors.items() if k != "logps"}, r"got \{ids: [^}]*\], tail: "),
    (lambda tensors: {k: v[:-1] for k, v in tensors.items()}, r"asked for 64 of 64 .* at \d+ tokens"),
    (changed("token_logps", lambda x: x[1:]), "asked for 64 of 64"),
    (changed("ids", torch.Tensor.long), r"ids: int64 .* in place of \{ids: int32"),
    (changed("ids", lambda x: x + 1), "ids from 1 to 64, must be from 0 to 63"),
    (changed("tail", lambda x: x * torch.nan), "tail are not finite"),
    (changed("logps", lambda x: x - 0.1), "add up to 1 only within 0.095"),
    (changed("ids", lambda x: x[:, [0, *range(63)]]), "an id stands twice among the top 64 of a token"),
    (changed("token_logps", lambda x: x + 5), r"of token \d+ does not agree with the top 64 .* must be -"),
])  # fmt: skip
def test_an_answer_that_is_not_what_was_asked_for_is_an_error(server, monkeypatch, tamper, message):
    client = server.client(top_k=64)
    tamper_with_answers(monkeypatch, tamper)
    with pytest.raises(ValueError, match=message):
        client.fill(micro_batches())


@pytest.mark.parametrize("tamper", [
    changed("tokens", lambda x: x[1:]), changed("tokens", lambda x: x + V), changed("tokens", torch.Tensor.float),
    changed("completion_lengths", lambda x: x[None]), changed("completion_lengths", lambda x: x[1:]), lambda _: {},
])  # fmt: skip
def test_nor_are_completions_that_are_not_what_was_asked_for(server, monkeypatch, tamper):
    client = server.client()
    tamper_with_answers(monkeypatch, tamper)
    with pytest.raises(ValueError, match=r"asked for 2 completions of 1 to 4 tokens below 64, got"):
        client.generate([[5], [6]], [0, 1], seed=0, temperature=1.0, max_new_tokens=4)


class Flaky(HTTPService):
    """A service that is away until `back` is set; what was asked of it is counted."""

    def __init__(self):
        self.counts, self.back = Counter(), threading.Event()
        super().__init__()

    def respond(self, request, body):
        self.counts[request.path, self.back.is_set()] += 1
        return (200 if self.back.is_set() else 503), b""


@pytest.mark.services
def test_one_thread_looks_out_for_a_service_that_is_away(capsys):
    with Flaky() as flaky:
        client, recovered = connection(flaky.url, workers=8), []
        client.on_recovery = lambda: recovered.append(client.once("GET", "/info"))
        threading.Timer(0.8, flaky.back.set).start()
        client.for_each(lambda item: client.post("/work", item), [b"x"] * 20)
        assert flaky.counts["/work", False] <= 8 and flaky.counts["/work", True] == 20
        assert 2 <= flaky.counts["/health", False] <= 5  # doubling pauses, not one for each thread
        assert len(recovered) == 1
    said = capsys.readouterr().err
    assert said.count("is not ready: waiting for it, up to 10 s") == said.count("going on") == 1


def test_patience_ends_and_says_what_to_do():
    with Flaky() as flaky:
        client, start = connection(flaky.url, patience_s=0.4, workers=3), time.monotonic()
        with pytest.raises(OutageError, match=rf"{flaky.url} stayed away for 0.4 s, .*status 503.*same command"):
            client.for_each(lambda item: client.post("/work", item), [b"x"] * 9)
        assert time.monotonic() - start < 5
        assert flaky.counts["/work", False] <= 3  # the others were not sent into the outage
        with pytest.raises(OutageError):
            client.wait_until_ready(0.1)
    with pytest.raises(OutageError, match="ConnectionError"):
        connection(flaky.url, patience_s=0.2).get("/info")


@pytest.mark.services
def test_what_recovery_finds_out_reaches_every_thread():
    def post(item):
        with pytest.raises(ValueError, match="another model"):
            client.post("/work", item)

    with Flaky() as flaky:
        client = connection(flaky.url, workers=4)
        client.on_recovery = mock.Mock(side_effect=ValueError("another model"))
        threading.Timer(0.4, flaky.back.set).start()
        client.for_each(post, [b"x"] * 4)


def test_another_teacher_after_a_restart_is_refused(own, folder, tmp_path):
    models.load_frozen(str(folder), CPU, "fp32").save_pretrained(tmp_path)
    other = build_tokenizer()
    other.add_tokens(["another"])
    other.save_pretrained(tmp_path)
    first = own()
    client = first.client(patience_s=10)
    first.stop()
    with ThreadPoolExecutor(1) as pool:
        filling = pool.submit(client.fill, micro_batches())  # into the outage
        time.sleep(0.2)
        second = own(tmp_path, port=first.port)
        with pytest.raises(ValueError, match=r"another teacher than before .*tokenizer_hash: .* -> "):
            filling.result()
    with pytest.raises(ValueError, match="another teacher than before"):  # and when the restart goes unseen
        client.fill(micro_batches())
    second.stop()


def test_options_addresses_and_times_that_cannot_be_are_refused():
    assert config.parse(Config, ["--port", "0", "--max-queue", "3"]).max_queue == 3
    with pytest.raises(SystemExit):
        config.parse(Config, ["--max_tokens", "1"])
    for options in (dict(url="localhost:15555"), dict(timeout_s=0), dict(patience_s=-1)):
        with pytest.raises(ValueError, match=" = "):
            Service(**{**dict(url="http://localhost:1", timeout_s=1, patience_s=1), **options})


def wait_for(happened, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.005)


class Process:
    """The script in a process of its own, forked from one that has imported everything."""

    def __init__(self, output, folder, port: int, **options):
        values = dict(teacher_model=folder, device="cpu", port=port, max_top_k=0) | options
        arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        self.output, self.url = output, f"http://127.0.0.1:{port}"
        (self.process,) = fork_script(SCRIPT, arguments, [output])

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def metric(self, name: str) -> float:
        text = requests.get(f"{self.url}/metrics", timeout=5).text
        return float(re.search(rf"^teacher_{name} (.*)$", text, re.MULTILINE)[1])


@pytest.fixture
def start(folder, tmp_path):
    with contextlib.ExitStack() as stack:

        def start(port: int | None = None, source=folder, **options) -> Process:
            port = port or free_port()
            server = Process(tmp_path / f"{port}.txt", source, port, **options)
            stack.callback(server.kill)
            return server

        yield start


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.services
def test_sigterm_answers_what_is_waiting_and_refuses_what_is_new(start):
    server = start(max_batch_tokens=64)
    client, body = connection(server.url), service.pack(*request())
    client.wait_until_ready(30)
    lengths = dict(prompt_lengths=int32(*[10] * 400), completion_lengths=int32(*[40] * 400))
    long = service.pack(*request(tokens=int32(*[5] * 20_000), **lengths))
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(client.once, "POST", TOP_K, long)]
        wait_for(lambda: server.metric("busy"))
        asked.append(pool.submit(client.once, "POST", TOP_K, body))
        wait_for(lambda: server.metric("waiting"))
        os.kill(server.process.pid, signal.SIGTERM)
        wait_for(lambda: requests.get(f"{server.url}/health").json() == {"status": "draining"})
        with pytest.raises(Unavailable, match="status 503, draining"):
            client.once("POST", TOP_K, body)
        sizes = [len(service.unpack(answer.result())[0]["logps"]) for answer in asked]
    server.process.join(20)
    assert sizes == [16_000, 5]
    assert server.process.exitcode == 0, server.output.read_text()
    assert "SIGTERM: answering what is waiting" in server.output.read_text()


@pytest.mark.services
def test_a_server_that_cannot_start_says_why_and_ends(start, tmp_path):
    failed = start(source=tmp_path / "nothing")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = start(other.getsockname()[1])
        for server in (failed, taken):
            server.process.join(30)
    assert failed.process.exitcode == 1 and "no such folder" in failed.output.read_text()
    assert taken.process.exitcode == 1 and "give another --port" in taken.output.read_text()


@pytest.mark.services
def test_start_teacher_returns_when_it_is_ready_and_stops_it_again(folder, tmp_path):
    port, log = free_port(), tmp_path / "log.txt"

    def run(*arguments, **environment) -> subprocess.CompletedProcess:
        command = ["bash", str(ROOT / "scripts" / "start_teacher.sh"), "--port", str(port), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, env=os.environ | environment)

    started = run("--log", log, "--", "--teacher_model", folder)
    try:
        assert started.returncode == 0 and f"teacher: http://127.0.0.1:{port}" in started.stdout, started.stderr
        assert requests.get(f"http://127.0.0.1:{port}/health").json() == {"status": "ready"}
        again = run()
        assert again.returncode == 1 and "runs on port" in again.stderr
    finally:
        stopped = run("--stop")
    assert stopped.returncode == 0 and "SIGTERM: answering" in log.read_text()
    with open(ROOT / "runs" / f"teacher-{port}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the server that ran did not hold it
        second = run()
    assert second.returncode == 1 and f"another start of a teacher on port {port} is under way" in second.stderr
    assert not (ROOT / "runs" / f"teacher-{port}.pid").exists()
    # ends early, before the seconds of importing; what the server says of a wrong model is tested above
    (tmp_path / "uvicorn.py").write_text("raise ImportError('no server today')\n")
    failed = run("--log", log, "--", "--teacher_model", folder, PYTHONPATH=str(tmp_path))
    assert failed.returncode == 1 and "the teacher ended before it was ready" in failed.stderr
    assert "ImportError: no server today" in failed.stderr and not (ROOT / "runs" / f"teacher-{port}.pid").exists()
