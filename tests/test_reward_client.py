"""Rewards from a service: what is sent, what is refused, what is lost, and runs whose service goes away."""

import contextlib
import dataclasses
import http.server
import json
import math
import socket
import threading
import time

import pytest
import torch
from conftest import SCRIPTS, assert_equal_weights, comparable
from test_teacher_server import free_port

from common import checkpoint, reward_client, rollout
from common.distributed import OUTAGE_EXIT_CODE, OutageError
from common.reward_client import RewardService


class Fake:
    """A service in a thread; `reply` may be replaced: it gets the items and the number of the request."""

    def __init__(self, port: int = 0, fingerprint: str = "one"):
        self.fingerprint, self.requests, self.ready, self.delay = fingerprint, [], True, 0.0
        self.lock, self.at_work, self.most_at_work, self.connections = threading.Lock(), 0, 0, []
        self.reply = lambda items, number: [good(item) for item in items]
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                fake.connections.append(self.request)
                super().setup()

            def do_GET(self):
                self.answer(200 if fake.ready else 503, {"fingerprint": fake.fingerprint, "error": "loading"})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.requests.append((self.path, dict(self.headers), body["items"], self.client_address))
                    number = len(fake.requests)
                    fake.at_work += 1
                    fake.most_at_work = max(fake.most_at_work, fake.at_work)
                time.sleep(fake.delay)
                reply = fake.reply(body["items"], number)
                with fake.lock:
                    fake.at_work -= 1
                if isinstance(reply, int):
                    return self.answer(reply, {"error": "not this time"})
                if isinstance(reply, list):
                    reply = {"results": reply, "fingerprint": fake.fingerprint}
                self.answer(200, reply)

            def answer(self, status, value):
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:  # those that are kept open too
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

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


@pytest.fixture
def fake():
    fake = Fake()
    yield fake
    fake.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(reward_client, "PAUSES", (0.01, 0.02))


def scores(client: RewardService, texts: list[str], group_size: int = 4, **columns) -> dict:
    return client.scores(texts, [f"truth {i}" for i in range(len(texts))], columns, group_size)


TEXTS = [f"{'x' * i}{i % 2}" for i in range(100)]


def test_scores_come_back_in_order_from_batches_over_few_connections(fake):
    fake.delay = 0.02
    named = scores(fake.client(workers=3), TEXTS, kind=list(range(100)))
    assert named["service"] == ([len(text) % 7 / 7 for text in TEXTS], 1.0)
    assert named["structure"] == ([0.5] * 100, 0.0)
    assert named["parse_ok"] == ([i % 2 for i in range(100)], 0.0) and len(named) == 3
    assert sorted(len(items) for _, _, items, _ in fake.requests) == [4, 32, 32, 32] and fake.most_at_work == 3
    item = next(item for item in fake.items if item["id"] == "41")
    assert item == {"id": "41", "solution_str": TEXTS[41], "ground_truth": "truth 41", "extra_info": {"kind": 41}}
    path, headers, _, _ = fake.requests[0]
    assert path == "/compute_reward_batch" and headers["Content-Type"] == "application/json"
    assert headers["X-Timeout-Ms"] == "120000" and "Authorization" not in headers
    scores(fake.client(workers=3), TEXTS[:40])
    client, before = fake.client(workers=1), len(fake.requests)
    for _ in range(3):
        scores(client, TEXTS)
    assert len({address for *_, address in fake.requests[before:]}) == 1  # one connection, kept


def test_a_column_extra_info_is_sent_as_it_is_and_a_token_is_a_header(fake):
    client = fake.client(token="secret")
    scores(client, ["a", "b"], 2, extra_info=[{"seed": 1}, None], other=[1, 2])
    assert [item["extra_info"] for item in fake.items] == [{"seed": 1}, {}]
    assert fake.requests[0][1]["Authorization"] == "Bearer secret"
    for value in (math.nan, object()):
        with pytest.raises(ValueError, match="row 0: its columns cannot be sent as JSON"):
            scores(client, ["a", "b"], 2, other=[value, 1])


def test_large_items_travel_in_requests_of_limited_size(fake):
    scores(fake.client(), ["x" * 1_500_000] * 5)
    assert sorted(len(items) for _, _, items, _ in fake.requests) == [1, 2, 2]


def test_only_what_may_succeed_is_asked_again(fake):
    def reply(items, number):
        return [bad(i, True) if number == 1 and i["id"] in "35" else good(i) for i in items]

    fake.reply = reply
    named = scores(fake.client(), TEXTS[:8])
    assert named["service"][0] == [len(text) % 7 / 7 for text in TEXTS[:8]]
    assert [[item["id"] for item in items] for _, _, items, _ in fake.requests] == [list("01234567"), ["3", "5"]]


def test_what_is_not_scored_is_nan_and_a_group_needs_three_quarters(fake, capsys):
    lost = {"1": False, "9": True, "10": True, "17": False}
    fake.reply = lambda items, _: [bad(i, lost[i["id"]]) if i["id"] in lost else good(i) for i in items]
    values = scores(fake.client(), TEXTS[:24])["service"][0]
    unknown = {i for i, value in enumerate(values) if math.isnan(value)}
    assert unknown == {1, 8, 9, 10, 11, 17}  # of the group 8 to 11 half is missing
    assert [len(items) for _, _, items, _ in fake.requests] == [24, 2, 2]
    assert "4 of 24 completions were not scored, such as: {'code': 'scorer'" in capsys.readouterr().out


def test_too_many_lost_items_are_an_outage(fake):
    fake.reply = lambda items, _: [bad(i, False) if int(i["id"]) % 4 == 0 else good(i) for i in items]
    with pytest.raises(OutageError, match=r"6 of 24 completions were not scored.*Mend the service"):
        scores(fake.client(), TEXTS[:24])
    assert len(fake.requests) == 1


WRONG = {
    "too few": lambda items: [good(i) for i in items[1:]],
    "no list": lambda items: {"results": 5, "fingerprint": "one"},
    "other order": lambda items: [good(i) for i in items[::-1]],
    "nan": lambda items: [good(i, score=math.nan) for i in items],
    "above one": lambda items: [good(i, score=1.01) for i in items],
    "negative": lambda items: [good(i, score=-0.1) for i in items],
    "text": lambda items: [good(i, score="0.5") for i in items],
    "truth value": lambda items: [good(i, score=True) for i in items],
    "none": lambda items: [good(i, score=None) for i in items],
    "error with a score": lambda items: [{**bad(i, True), "score": 0.0} for i in items],
    "neither": lambda items: [{"id": i["id"], "score": 0.5} for i in items],
    "no object": lambda items: [0.5 for _ in items],
    "other service": lambda items: {"results": [good(i) for i in items], "fingerprint": "two"},
    "500": lambda items: 500,
    "422": lambda items: 422,
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_answer_that_is_no_score_ends_as_an_outage(fake, kind):
    fake.reply = lambda items, _: WRONG[kind](items)
    with pytest.raises(OutageError, match="Mend the service"):
        scores(fake.client(), TEXTS[:4])


def test_busy_and_broken_answers_are_repeated(fake):
    fake.reply = lambda items, number: {1: 503, 2: 429, 3: 500, 4: 502}.get(number) or [good(i) for i in items]
    assert scores(fake.client(), TEXTS[:4])["service"][0] == [len(text) % 7 / 7 for text in TEXTS[:4]]
    assert len(fake.requests) == 5


def test_the_run_is_tied_to_one_way_of_scoring(fake):
    assert fake.client().fingerprint == "one" and fake.client(fingerprint="one")
    with pytest.raises(ValueError, match=r"is 'one': must be that of the run, 'zero'.*allow_reward_change"):
        fake.client(fingerprint="zero")
    fake.fingerprint = None
    with pytest.raises(ValueError, match=r"fingerprint of .*: None: must be text"):
        fake.client()


def test_another_service_on_the_same_port_is_noticed(fake):
    client = fake.client()
    port = fake.server.server_address[1]
    fake.stop()
    other = Fake(port, "two")
    try:
        with pytest.raises(OutageError, match="must be that of the run, 'one'"):
            scores(client, TEXTS[:4])
    finally:
        other.stop()


def test_equal_scores_are_pointed_out_once(fake, capsys):
    fake.reply = lambda items, _: [good(i, score=0.25) for i in items]
    client = fake.client()
    for _ in range(8):
        scores(client, TEXTS[:4])
    assert capsys.readouterr().out.count("5 times in a row all scores were 0.25") == 1
    fake.reply = lambda items, _: [good(i) for i in items]
    scores(client, TEXTS[:4])
    assert client._flat == 0


def test_completions_that_never_parse_are_pointed_out_once(fake, capsys):
    client = fake.client()
    for parsed in (1, 0, 0, 0, 0, 0, 0):
        fake.reply = lambda items, _, n=parsed: [good(i, parse_ok=int(i["id"]) < n) for i in items]
        scores(client, TEXTS[:10])
    assert capsys.readouterr().out.count("fewer than 10 % of completions parsed") == 1


def test_an_answer_that_drips_is_given_up():
    """Each byte comes in time, the whole does not."""
    listener = socket.create_server(("127.0.0.1", 0))

    def drip():
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            try:
                for _ in range(200):
                    connection.sendall(b"x")
                    time.sleep(0.02)
            except OSError:  # the other side has hung up, as it should
                return

    threading.Thread(target=drip, daemon=True).start()
    service = reward_client.Service(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3, patience_s=1)
    began = time.monotonic()
    with pytest.raises(Exception, match=r"not complete after 0.3 s") as caught:
        service.once("GET", "/")
    assert type(caught.value).__name__ == "Unavailable" and time.monotonic() - began < 3
    listener.close()


# ---- rollouts that wait for their rewards ----


@dataclasses.dataclass
class Sampled:
    """Of a Config, what completions depend on, and what they do not."""

    batch_size: int = 2
    group_size: int = 2
    seed: int = 0
    steps: int = 5
    reward_url: str = "http://127.0.0.1:1"


def test_an_unscored_rollout_comes_back_as_it_was_if_it_is_still_wanted(tmp_path, capsys):
    batch = rollout.assemble([[5, 6], [7]], 2, torch.tensor([[4, 3, -1], [9, 9, 9], [3, -1, -1], [8, 3, -1]]),
                             torch.rand(4, 3), 0, [3])  # fmt: skip
    cfg = Sampled()

    def unscored(folder, cfg=cfg):
        return checkpoint.unscored(folder, torch.device("cpu"), cfg)

    (tmp_path / "state.json").write_text(json.dumps({"num_ranks": 1, "config": dataclasses.asdict(cfg)}))
    assert unscored(None) is None and unscored(tmp_path) is None
    named = {f"rank0/{name}": value for name, value in checkpoint._tensors(batch).items()}
    checkpoint.save_file(named, tmp_path / "rollout.safetensors")
    for back in (unscored(tmp_path), unscored(tmp_path, Sampled(steps=9, reward_url="http://127.0.0.1:2"))):
        for name, value in vars(batch).items():
            assert (value is None and getattr(back, name) is None) or torch.equal(getattr(back, name), value), name
    capsys.readouterr()
    for other in (Sampled(batch_size=8), Sampled(group_size=4), Sampled(seed=1)):  # of other prompts, or other groups
        assert unscored(tmp_path, other) is None
    assert capsys.readouterr().out.count("sampled with other settings or ranks: sampled again") == 3
    (tmp_path / "state.json").write_text(json.dumps({"num_ranks": 2, "config": dataclasses.asdict(cfg)}))
    assert unscored(tmp_path) is None


RL = [name for name in SCRIPTS if not name.startswith("gkd")]
NO_REWARD = "    raise AssertionError\n"
SAMPLED = "batch = unscored or "


@pytest.mark.parametrize("script", [name for name in RL if name not in ("gspo_multigpu", "grpo_multigpu")])
def test_a_service_scores_in_place_of_the_reward_of_the_script(launcher, fake, tmp_path, script):
    path = launcher.copy(script, NO_REWARD)
    own = dict(similarity_model="ngrams") if script == "similarity_grpo" else {}
    run = launcher.run(path, tmp_path / "run", steps=2, reward_url=fake.url, **own).succeeded()
    assert {"reward_service", "reward_structure", "reward_parse_ok"} <= run.steps[0].keys()
    assert run.steps[0]["reward"] == run.steps[0]["reward_service"] > 0
    state = json.loads((run.out_dir / run.checkpoints[-1] / "state.json").read_text())
    assert state["notes"]["reward_service"] == "one"
    assert not (run.out_dir / run.checkpoints[-1] / "rollout.safetensors").exists()


@pytest.mark.parametrize(("script", "ranks"), [("grpo", 1), ("gspo_ddp", 2)])
def test_after_an_outage_the_rollout_is_scored_first_and_nothing_differs(launcher, tmp_path, script, ranks):
    port, steps = free_port(), 4
    options = dict(steps=steps, reward_url=f"http://127.0.0.1:{port}", reward_patience=1.0, save_every=100,
                   eval_every=0, dynamic_sampling=int(script == "grpo"))  # fmt: skip
    path = launcher.copy(script, NO_REWARD)
    service = Fake(port)
    straight = launcher.run(path, tmp_path / "straight", ranks, **options).succeeded()
    asked = {item["solution_str"] for item in service.items}
    service.requests.clear()
    service.delay = 0.3
    run = launcher.start(path, tmp_path / "run", ranks, **options)
    run.wait_for(lambda: len(run.steps) >= 2)
    service.stop()
    service.reply = lambda items, number: 503
    run.wait()
    assert run.codes == [OUTAGE_EXIT_CODE] * ranks, run.output
    assert "the same command goes on from here" in run.output
    (saved,) = run.checkpoints
    assert (run.out_dir / saved / "rollout.safetensors").exists()
    service = Fake(port)
    # a sampler that fails at the step whose completions are there already
    edited = path.read_text().replace(SAMPLED, SAMPLED + "[][step] or ")
    assert edited != path.read_text()
    broken = path.with_name(f"broken_{path.name}")
    broken.write_text(edited)
    done = int(saved[-6:])
    once = launcher.run(broken, tmp_path / "run", ranks, **{**options, "steps": done + 1})
    assert set(once.codes) == {0}, once.output
    assert "were not scored: they come first" in once.output
    run = launcher.run(path, tmp_path / "run", ranks, **options).succeeded()
    service.stop()
    assert {item["solution_str"] for item in service.items} <= asked
    assert comparable(run.steps) == comparable(straight.steps)
    assert_equal_weights(run.weights(), straight.weights())


def test_a_run_does_not_go_on_with_another_service(launcher, fake, tmp_path):
    options = dict(steps=2, reward_url=fake.url, eval_every=0, save_every=1)
    path = launcher.copy("gspo", NO_REWARD)
    launcher.run(path, tmp_path / "run", **options).succeeded()
    fake.fingerprint = "two"
    run = launcher.run(path, tmp_path / "run", **{**options, "steps": 3})
    assert run.codes == [1] and "must be that of the run, 'one'" in run.output
    run = launcher.run(path, tmp_path / "run", **{**options, "steps": 3}, allow_reward_change=True).succeeded()
    state = json.loads((run.out_dir / "checkpoint-000003" / "state.json").read_text())
    assert state["notes"]["reward_service"] == "two"
    run = launcher.run(path, tmp_path / "other", **options, reward_model="x")
    assert run.codes == [2] and "the service scores alone" in run.output
