"""Rewards from a service: what is sent, what is refused, what is lost, and runs whose service goes away."""

import contextlib
import dataclasses
import gzip
import json
import math
import socketserver
import threading
import time

import pytest
import torch
from comparing import comparable
from conftest import SCRIPTS, assert_equal_weights
from servers import HTTPService
from test_teacher_server import free_port

from common.base import distributed, service
from common.base.distributed import OUTAGE_EXIT_CODE, OutageError
from common.base.service import Service, Unavailable
from common.generation import batches, rollout
from common.run import checkpoint
from common.tasks import reward_client
from common.tasks.reward_client import RewardService


class Fake(HTTPService):
    """A service of rewards; `reply` may be replaced: it gets the items and the number of the request."""

    def __init__(self, port: int = 0, fingerprint: str = "one"):
        self.fingerprint, self.requests, self.delay = fingerprint, [], 0.0
        self.lock, self.at_work, self.most_at_work = threading.Lock(), 0, 0
        self.reply = lambda items, number: [good(item) for item in items]
        super().__init__(port)

    def respond(self, request, body):
        results = self.scored(request, json.loads(body)["items"]) if request.command == "POST" else []
        status, results = (results, []) if isinstance(results, int) else (200, results)
        return status, json.dumps({"results": results, "fingerprint": self.fingerprint}).encode()

    def scored(self, request, items: list[dict]) -> list | int:
        with self.lock:
            self.requests.append((request.path, dict(request.headers), items, request.client_address))
            number = len(self.requests)
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
        time.sleep(self.delay)
        reply = self.reply(items, number)
        with self.lock:
            self.at_work -= 1
        return reply

    @property
    def items(self) -> list[dict]:
        return [item for _, _, items, _ in self.requests for item in items]

    def client(self, **options) -> RewardService:
        return RewardService(self.url, **{**dict(patience_s=5.0), **options})


def good(item: dict, **more) -> dict:
    """A score that depends on the completion alone."""
    text = item["solution_str"]
    return {"id": item["id"], "ok": True, "score": len(text) % 7 / 7, "structure": 0.5, "parse_ok": "1" in text, **more}


def bad(item: dict, retryable: bool) -> dict:
    return {"id": item["id"], "ok": False, "error": {"code": "scorer", "message": "hm", "retryable": retryable}}


def row(item: dict) -> str:
    return item["id"].split(".")[1]


@pytest.fixture
def fake():
    with Fake() as fake:
        yield fake


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module in (reward_client, service):
        monkeypatch.setattr(module, "PAUSES", (0.01, 0.02))


def scores(client: RewardService, texts: list[str], group_size: int = 4, **columns) -> dict:
    prompts, truths = [[f"{kind} {i}" for i in range(len(texts))] for kind in ("prompt", "truth")]
    arguments = {"prompts": prompts, "completions": texts, "answers": truths, "step": 12, **columns}
    return client.scores(arguments, group_size)


TEXTS = [f"{'x' * i}{i % 2}" for i in range(100)]
SCORES = [len(text) % 7 / 7 for text in TEXTS]


def test_scores_come_back_in_order_from_batches_over_few_connections(fake):
    reply, three = fake.reply, threading.Barrier(3)  # requests that are in flight before any is answered
    fake.reply = lambda items, number: (number > 3 or three.wait(30) >= 0) and reply(items, number)
    named, fake.reply = scores(fake.client(workers=3), TEXTS, kind=list(range(100))), reply
    assert named == {"service": (SCORES, 1.0), "structure": ([0.5] * 100, 0.0), "parse_ok": ([0, 1] * 50, 0.0)}
    assert sorted(len(items) for _, _, items, _ in fake.requests) == [4, 32, 32, 32] and fake.most_at_work == 3
    (item,) = [item for item in fake.items if item["id"].startswith("12.41.")]
    assert item == {"id": item["id"], "solution_str": TEXTS[41], "ground_truth": "truth 41", "prompt": "prompt 41",
                    "step": 12, "extra_info": {"kind": 41}}  # fmt: skip
    path, headers, *_ = fake.requests[0]
    assert path == "/compute_reward_batch" and headers["Content-Type"] == "application/json"
    assert headers["X-Timeout-Ms"] == "120000" and "Authorization" not in headers
    client, before = fake.client(workers=1), len(fake.requests)
    for _ in range(3):
        scores(client, TEXTS)
    assert len({address for *_, address in fake.requests[before:]}) == 1  # one connection, kept
    fake.requests.clear()
    scores(client, ["x" * 1_500_000] * 5)  # requests are limited in size
    assert sorted(len(items) for _, _, items, _ in fake.requests) == [1, 2, 2]


def test_a_column_extra_info_is_sent_as_it_is_and_a_token_is_a_header(fake):
    client = fake.client(token="secret")
    scores(client, ["a", "b"], 2, extra_info=[{"seed": 1}, None], other=[1, 2])
    assert [item["extra_info"] for item in fake.items] == [{"seed": 1}, {}]
    assert fake.requests[0][1]["Authorization"] == "Bearer secret"
    for value in (math.nan, object()):
        with pytest.raises(ValueError, match="row 0: its columns cannot be sent as JSON"):
            scores(client, ["a", "b"], 2, other=[value, 1])


def test_only_what_may_succeed_is_asked_again(fake):
    fake.reply = lambda items, number: [bad(i, True) if number < 2 and row(i) in "35" else good(i) for i in items]
    assert scores(fake.client(), TEXTS[:8])["service"][0] == SCORES[:8]
    assert [[row(item) for item in items] for _, _, items, _ in fake.requests] == [list("01234567"), ["3", "5"]]


def test_what_is_not_scored_is_nan_and_a_group_needs_three_quarters(fake, capsys):
    lost = {"1": False, "9": True, "10": True, "17": False}
    fake.reply = lambda items, _: [bad(i, lost[row(i)]) if row(i) in lost else good(i) for i in items]
    values = scores(fake.client(), TEXTS[:24])["service"][0]
    unknown = {i for i, value in enumerate(values) if math.isnan(value)}
    assert unknown == {1, 8, 9, 10, 11, 17}  # of the group 8 to 11 half is missing
    assert [len(items) for _, _, items, _ in fake.requests] == [24, 2, 2]
    assert "4 of 24 completions were not scored, such as: {'code': 'scorer'" in capsys.readouterr().out


def test_too_many_lost_items_are_an_outage(fake):
    fake.reply = lambda items, _: [bad(i, False) if int(row(i)) % 4 == 0 else good(i) for i in items]
    with pytest.raises(OutageError, match=r"6 of 24 .*not scored.*Mend the service"):
        scores(fake.client(), TEXTS[:24])
    assert len(fake.requests) == 1


def test_a_service_that_repeats_earlier_answers_is_found_out(fake):
    client, first = fake.client(workers=1), []
    fake.reply = lambda items, number: first or first.extend(good(i) for i in items) or first
    assert scores(client, TEXTS[:4])["service"][0] == SCORES[:4]
    with pytest.raises(OutageError, match=r"must be the result with the id '12\.0\."):  # the same step, scored again
        scores(client, TEXTS[4:8])
    assert len({item["id"] for item in fake.items}) == 8


IDS = ["12.0.nonce", "12.1.nonce"]  # of `stub_client`
GOOD_RESULTS = [{"id": IDS[0], "ok": True, "score": 0.25, "structure": 0.5}, {"id": IDS[1], "ok": True, "score": 0.75}]


def stub_client(monkeypatch, said: bytes) -> RewardService:
    """A client whose service answers this."""
    monkeypatch.setattr(Service, "wait_until_ready", lambda *_: None)
    monkeypatch.setattr(Service, "get", lambda *_: b'{"fingerprint": "one"}')
    monkeypatch.setattr(Service, "post", lambda *_: said)
    monkeypatch.setattr(reward_client.secrets, "token_hex", lambda size: "nonce")
    return RewardService("http://localhost:1")


def answer(results, **more) -> bytes:
    return json.dumps({"results": results, "fingerprint": "one", **more}).encode(errors="surrogatepass")


def first(**more) -> bytes:
    """An answer whose first result is as good as the second but for this."""
    return answer([{**GOOD_RESULTS[0], **more}, GOOD_RESULTS[1]])


@pytest.mark.parametrize("said", [
    b"<html>200</html>", b"[" * 100_000, answer(5), answer([0.5, 0.5]), answer(GOOD_RESULTS[:1]),
    answer(GOOD_RESULTS[::-1]), answer([GOOD_RESULTS[0]] * 2), answer(GOOD_RESULTS, fingerprint="two"),
    answer([{"id": IDS[0], "score": 0.5}, GOOD_RESULTS[1]]), answer([{"id": IDS[0], "ok": True}, GOOD_RESULTS[1]]),
    first(ok="false"), first(ok=False, error={"code": "scorer"}), first(score=True), first(score=math.nan),
    first(score=10**400), first(score=1.01), first(score=-0.1), first(score="0.5"), first(score=None),
], ids=range(19))  # fmt: skip
def test_an_answer_that_is_no_score_ends_as_an_outage(monkeypatch, said):
    with pytest.raises(OutageError, match="Mend the service"):
        scores(stub_client(monkeypatch, said), ["a", "b"], 2)


def test_a_number_of_a_result_never_takes_the_place_of_the_score(monkeypatch):
    said = answer([{**result, "service": 0.0, "huge": 10**400, "odd": math.nan} for result in GOOD_RESULTS])
    assert scores(stub_client(monkeypatch, said), ["a", "b"], 2)["service"] == ([0.25, 0.75], 1.0)


@pytest.mark.parametrize("status", [500, 422])
def test_busy_and_broken_answers_are_repeated_and_a_service_that_fails_or_refuses_is_an_outage(fake, status):
    fake.reply = lambda items, number: {1: 503, 2: 429, 3: 500, 4: 502}.get(number) or [good(i) for i in items]
    assert scores(fake.client(), TEXTS[:4])["service"][0] == SCORES[:4]
    assert len(fake.requests) == 5
    fake.reply = lambda items, _: status
    with pytest.raises(OutageError, match=f"status {status}.*Mend the service"):
        scores(fake.client(), TEXTS[:4])


def test_the_run_is_tied_to_one_way_of_scoring(fake):
    client = fake.client()
    assert client.fingerprint == "one" and fake.client(fingerprint="one")
    with pytest.raises(ValueError, match=r"is 'one': must be that of the run, 'zero'.*allow_reward_change"):
        fake.client(fingerprint="zero")
    fake.fingerprint = None
    with pytest.raises(ValueError, match=r"fingerprint of .*: None: must be text"):
        fake.client()
    fake.stop()
    with Fake(fake.server.server_port, "two"), pytest.raises(OutageError, match="of the run, 'one'"):  # same port
        scores(client, TEXTS[:4])


@pytest.mark.parametrize(("usual", "odd", "said"), [
    (dict(), dict(score=0.25), "5 times in a row all scores were 0.25"),
    (dict(parse_ok=True), dict(parse_ok=False), "fewer than 10 % of completions parsed"),
])  # fmt: skip
def test_what_teaches_nothing_is_pointed_out_once(fake, capsys, usual, odd, said):
    client = fake.client()
    for more, times in ((odd, 4), (usual, 1), (odd, 4)):  # never five in a row
        fake.reply = lambda items, _, more=more: [good(i, **more) for i in items]
        for _ in range(times):
            scores(client, TEXTS[:4])
    assert said not in capsys.readouterr().out
    for _ in range(4):
        scores(client, TEXTS[:4])
    assert capsys.readouterr().out.count(said) == 1


@contextlib.contextmanager
def talking(*parts: bytes, pause: float = 0.0, again: int = 1):
    """A server that says this to whoever connects, whatever is asked; the last part `again` times."""
    stop = threading.Event()

    class Talk(socketserver.BaseRequestHandler):
        def handle(self):
            with contextlib.suppress(OSError):
                self.request.recv(65536)
                for part in (*parts, *[parts[-1]] * (again - 1)):
                    self.request.sendall(part)
                    if stop.wait(pause):
                        return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            stop.set()
            server.shutdown()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(("said", "error", "message"), [
    (OK + b"Content-Length: 100\r\n\r\n{", Unavailable, "IncompleteRead"), (b"", Unavailable, "Connection"),
    (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", ValueError, "status 302"),
    (b"HTTP/1.1 503 No\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n", Unavailable, "status 503"),
    (b"HTTP/1.1 500 No\r\nContent-Length: 60000\r\n\r\n" + b"[" * 60_000, RuntimeError, "status 500"),
    (OK + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", Unavailable, "InvalidChunkLength|IncompleteRead"),
], ids=range(6))  # fmt: skip
def test_an_answer_that_is_none_is_an_error_of_the_right_kind(said, error, message):
    with talking(said) as url, pytest.raises(error, match=message):
        Service(url, timeout_s=10, patience_s=1).once("GET", "/info")


@pytest.mark.parametrize("host", ["\uff41", "\u0661", "[v1.x]"])
def test_a_host_that_no_request_can_name_is_refused_at_the_start(host):
    with pytest.raises(ValueError, match="give an address such as"):
        Service(f"http://{host}:80", timeout_s=1, patience_s=1)


@pytest.mark.parametrize(("said", "connect", "late"), [
    ([OK, b"X: y\r\n"], 0.1, "no answer within 0.1 s|Read timed out"),
    ([OK + b"Content-Length: 100000\r\n\r\n", b"x"], 60, "not complete after 0.1 s"),
], ids=["header", "body"])  # fmt: skip
def test_an_answer_that_drips_is_given_up(monkeypatch, said, connect, late):
    # each byte comes in time; the whole would take two seconds, and then be none
    monkeypatch.setattr(service, "CONNECT_SECONDS", connect)
    with talking(*said, pause=0.02, again=100) as url, pytest.raises(Unavailable, match=late):
        Service(url, timeout_s=0.1, patience_s=1).once("GET", "/info")


def test_a_service_that_takes_requests_and_never_answers_is_an_outage():
    with talking(b"", pause=60, again=2) as url:
        client = Service(url, timeout_s=0.2, patience_s=0.5)
        with pytest.raises(OutageError, match=r"stayed away for 0.5 s, last with: .*Read timed out"):
            client.post("/compute_reward_batch", b"{}")


def test_an_answer_without_an_end_is_cut():
    head = OK + b"Transfer-Encoding: chunked\r\n\r\n"
    with talking(head, b"100000\r\n" + b"x" * 2**20 + b"\r\n", again=10**4) as url:  # 10 GiB
        client = Service(url, timeout_s=10, patience_s=1, max_answer=2**22)
        with pytest.raises(RuntimeError, match="an answer of more than 4194304 bytes"):
            client.once("GET", "/info")
    packed = gzip.compress(b"x" * 10**7)
    with talking(OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed) as url:
        assert Service(url, timeout_s=10, patience_s=1).once("GET", "/info") == packed  # which is no answer of ours


def test_a_token_that_no_header_can_hold_is_not_shown():
    assert Service("http://localhost:1", token=" secret\n", timeout_s=1, patience_s=1).token == "secret"
    for token in ("sec\nret", "s\u00e9cret", "sec\x00ret"):
        with pytest.raises(ValueError, match="printable ASCII") as caught:
            Service("http://localhost:1", token=token, timeout_s=1, patience_s=1)
        assert "ret" not in str(caught.value).replace("printable", "")


# of a Config, what completions depend on, and what they do not
OPTIONS = dict(batch_size=2, group_size=2, seed=0, steps=5, reward_url="http://127.0.0.1:1", micro_batch_tokens=8192)
Sampled = dataclasses.make_dataclass("Sampled", [(name, type(value), value) for name, value in OPTIONS.items()])


def test_an_unscored_rollout_comes_back_as_it_was_if_it_is_still_wanted(tmp_path, capsys):
    batch = batches.assemble([[5, 6], [7]], 2, torch.tensor([[4, 3, -1], [9, 9, 9], [3, -1, -1], [8, 3, -1]]),
                             torch.rand(4, 3), 0, [3])  # fmt: skip

    def unscored(folder, **changes):
        return checkpoint.pending_rollout(folder, torch.device("cpu"), Sampled(**changes))

    (tmp_path / "state.json").write_text(json.dumps({"num_ranks": 1, "config": OPTIONS}))
    assert unscored(None) is None and unscored(tmp_path) is None
    saved = batch.state_dict() | {"sampled_mask": torch.ones(4, 3)}  # a field of earlier versions
    checkpoint.save_file({f"rank0/{k}": v for k, v in saved.items()}, tmp_path / "rollout.safetensors")
    changes = dict(steps=9, reward_url="http://127.0.0.1:2", micro_batch_tokens=0)
    for back in (unscored(tmp_path), unscored(tmp_path, **changes)):
        for name, value in vars(batch).items():
            assert (value is None and getattr(back, name) is None) or torch.equal(getattr(back, name), value), name
    capsys.readouterr()
    for other in ("batch_size", "group_size", "seed"):  # of other prompts, or other groups
        assert unscored(tmp_path, **{other: 8}) is None
    assert capsys.readouterr().out.count("sampled with other settings or ranks: sampled again") == 3
    (tmp_path / "state.json").write_text(json.dumps({"num_ranks": 2, "config": OPTIONS}))
    assert unscored(tmp_path) is None


def never(completions, answers, **columns):
    raise AssertionError("the service scores")


def samples_no_batch(module) -> None:
    """A sampler that refuses to sample for all prompts of a step, which are there already."""
    generate = rollout.Sampler.generate

    def generate_few(self, prompts, **options):
        assert options["group_size"] == 1 or len(prompts) < 4 // distributed.num_ranks()
        return generate(self, prompts, **options)

    rollout.Sampler.generate = generate_few


@pytest.mark.parametrize("script", [
    pytest.param(name, marks=[] if name in ("gspo", "similarity_grpo") else pytest.mark.parity)
    for name in SCRIPTS if not name.startswith(("gkd", "sft")) and "multi" not in name
])  # fmt: skip
def test_a_service_scores_in_place_of_the_reward_of_the_script(launcher, fake, tmp_path, script):
    own = dict(similarity_model="ngrams") if script == "similarity_grpo" else {}
    run = launcher.run(script, tmp_path / "run", rewards=[never], steps=2, reward_url=fake.url, **own).succeeded()
    assert {"reward_service", "reward_structure", "reward_parse_ok"} <= run.steps[0].keys()
    assert run.steps[0]["reward"] == run.steps[0]["reward_service"] > 0
    state = json.loads((run.out_dir / run.checkpoints[-1] / "state.json").read_text())
    assert state["notes"]["reward_service"] == "one"
    assert not (run.out_dir / run.checkpoints[-1] / "rollout.safetensors").exists()


@pytest.mark.parametrize(("script", "ranks"), [("grpo", 1), pytest.param("gspo_ddp", 2, marks=pytest.mark.parity)])
def test_after_an_outage_the_rollout_is_scored_first_and_nothing_differs(launcher, tmp_path, script, ranks):
    port, steps = free_port(), 4
    options = dict(rewards=[never], steps=steps, reward_url=f"http://127.0.0.1:{port}", reward_patience=1.0,
                   save_every=100, eval_every=0, dynamic_sampling=int(script == "grpo"), curriculum="row")  # fmt: skip
    service = Fake(port)
    straight = launcher.run(script, tmp_path / "straight", ranks, **options).succeeded()
    asked = {item["solution_str"] for item in service.items}
    service.requests.clear()
    service.delay = 0.3
    run = launcher.start(script, tmp_path / "run", ranks, **options)
    run.wait_for(lambda: len(run.steps) >= 2)
    service.stop()
    service.reply = lambda items, number: 503
    run.wait()
    assert run.codes == [OUTAGE_EXIT_CODE] * ranks, run.output
    assert "the same command goes on from here" in run.output
    (saved,) = run.checkpoints
    assert (run.out_dir / saved / "rollout.safetensors").exists()
    with Fake(port) as service:  # the step whose completions are there already needs no sampler
        one_more = options | dict(steps=int(saved[-6:]) + 1, prepare=samples_no_batch)
        once = launcher.run(script, tmp_path / "run", ranks, **one_more).succeeded()
        assert "were not scored: they come first" in once.output
        run = launcher.run(script, tmp_path / "run", ranks, **options).succeeded()
    assert {item["solution_str"] for item in service.items} <= asked
    assert comparable(run.steps) == comparable(straight.steps)
    assert_equal_weights(run.weights(), straight.weights())


def test_a_run_does_not_go_on_with_another_service(launcher, fake, tmp_path):
    options = dict(rewards=[never], steps=2, reward_url=fake.url, eval_every=0, save_every=1)
    launcher.run("gspo", tmp_path / "run", **options).succeeded()
    fake.fingerprint = "two"
    run = launcher.run("gspo", tmp_path / "run", **{**options, "steps": 3})
    assert run.codes == [1] and "must be that of the run, 'one'" in run.output
    run = launcher.run("gspo", tmp_path / "run", **{**options, "steps": 3}, allow_reward_change=True).succeeded()
    state = json.loads((run.out_dir / "checkpoint-000003" / "state.json").read_text())
    assert state["notes"]["reward_service"] == "two"
    run = launcher.run("gspo", tmp_path / "other", **options, reward_model="x")
    assert run.codes == [2] and "the service scores alone" in run.output
