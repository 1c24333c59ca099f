"""The reward service for posters: its scores, what it refuses, and what it does in trouble. No trouble is a score."""

import base64
import contextlib
import dataclasses
import io
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import uvicorn
from conftest import ROOT, Command
from PIL import Image
from test_teacher_server import free_port, wait_for

sys.path.insert(0, str(ROOT / "scripts"))
import benchmark_rewards

from common import reward_client
from common.config import parse
from grpo.poster import assessors, items, reward, reward_server, synthetic, tricks, web, worker
from grpo.poster.reward_server import Config
from grpo.poster.worker import Rewards

SCRIPT = ROOT / "grpo" / "poster" / "reward_server.py"
ONE, MANY = "/compute_reward", "/compute_reward_batch"
RECORD = synthetic.record(13, 1)  # with an image
GOLD = synthetic.gold(RECORD)
PARTS = ("score", "structure", "accuracy", "visual", "format", "hygiene", "parse_ok", "reason", "warnings", "details")
SCORER = """
import time
from pathlib import Path
from grpo.poster.scorers import ScorerError

def score(images, metas):
    values = []
    for image, meta in zip(images, metas, strict=True):
        assert image.mode == "RGB" and 0 <= meta["cpu"] <= 1 and meta["solution"]
        do = meta["extra_info"].get("do")
        if do == "wait":
            Path(meta["extra_info"]["file"]).touch()
            while Path(meta["extra_info"]["file"]).exists():
                time.sleep(0.01)
        if do == "slow":
            time.sleep(0.002)
            values.append(meta["extra_info"]["value"])
            continue
        if do == "raise":
            raise KeyError("secret")
        if do == "count":
            return []
        meta["visual_quality"] = 0.75
        values.append({"nan": float("nan"), "above": 1.01, "text": "0.5", "none": None,
                       "refuse": ScorerError("scorer_unparsable", "no rating", retryable=False),
                       "busy": ScorerError("scorer_out_of_memory", "no memory", retryable=True)}.get(do, 0.25))
    return values
"""


class Server:
    """A server in threads of this process; its processes are real."""

    def __init__(self, work: bool = True, **options):
        self.rewards = Rewards(Config(**{"workers": 1, "batch_wait_ms": 1.0, **options}))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        app = web.create_app(self.rewards)
        self.web = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        self.error, self.threads = None, []
        self._start(lambda: self.web.run([self.listener]))
        if work:
            self.rewards.load()
            self.work()

    def _start(self, function) -> None:
        self.threads.append(threading.Thread(target=function, daemon=True))
        self.threads[-1].start()

    def work(self) -> None:
        def run():
            try:
                self.rewards.work()
            except Exception as error:
                self.error = error
                self.rewards.fail(error)

        self._start(run)

    def stop(self) -> None:
        self.rewards.drain()
        self.web.should_exit = True
        for thread in reversed(self.threads):
            thread.join(20)
        assert not any(thread.is_alive() for thread in self.threads)

    def post(self, path: str, body, **options) -> requests.Response:
        return requests.post(self.url + path, **{"json" if isinstance(body, dict) else "data": body}, **options)

    def scored(self, items: list[dict], **options) -> list[dict]:
        answer = self.post(MANY, {"items": items}, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    def metric(self, sample: str) -> float:
        text = requests.get(f"{self.url}/metrics", timeout=5).text
        found = re.search(rf"^poster_{re.escape(sample)} (.*)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("scorer") / "scorer.py"
    path.write_text(SCORER)
    return f"{path}:score"


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def custom(scorer):
    """A server with the scorer above."""
    server = Server(scorer=scorer)
    yield server
    server.stop()


@pytest.fixture
def own():
    """Makes servers that are stopped at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(**options) -> Server:
            server = Server(**options)
            stack.callback(server.stop)
            return server

        yield make


def item(solution: str = GOLD, **changes) -> dict:
    return {"id": "a", "solution_str": solution, "ground_truth": RECORD["ground_truth"], **changes}


def only(result: dict, names: tuple[str, ...] = PARTS) -> dict:
    return {name: result[name] for name in names}


def assert_refused(answer: requests.Response, status: int, code: str) -> None:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert isinstance(answer.json()["error"], str) and "score" not in answer.json()
    assert answer.json()["retryable"] == (status >= 500 or status == 429)
    assert ("Retry-After" in answer.headers) == (status in (429, 503))


# ---- scores ----


def test_one_and_many_and_no_service_at_all_give_the_same(server):
    rng = random.Random(1)
    solutions = [trick(RECORD, rng) for trick in tricks.TRICKS.values()]
    own = [json.loads(json.dumps(reward.score(text, RECORD["ground_truth"]))) for text in solutions]
    assert len({result["score"] for result in own}) > 10 and any(not result["parse_ok"] for result in own)
    many = server.scored([item(text, id=i) for i, text in enumerate(solutions)])
    assert [result["id"] for result in many] == list(range(len(solutions)))
    assert all(result["ok"] is True for result in many)
    assert [only(result) for result in many] == own
    for text, expected in list(zip(solutions, own, strict=True))[::7]:
        answer = server.post(ONE, item(text, ground_truth=json.dumps(RECORD["ground_truth"]))).json()
        assert only(answer) == expected and answer["id"] == "a" and answer["ms"] > 0
        assert answer["fingerprint"] == server.rewards.info["fingerprint"]


def test_a_malformed_poster_is_an_answer_and_a_bad_truth_an_error_of_its_item(server):
    before = server.metric('malformed_total{reason="no_json"}')
    given = [item("nothing", id=1), item(ground_truth={"canvas": 1}, id=2), item(id=3), item(ground_truth=None, id="b")]
    malformed, bad, good, none = server.scored([*given])
    assert malformed["ok"] and malformed["score"] == 0 and malformed["reason"] == "no_json"
    assert good["score"] > 0.98 and (malformed["id"], bad["id"], good["id"], none["id"]) == (1, 2, 3, "b")
    for result in (bad, none):
        assert result["ok"] is False and "score" not in result
        assert result["error"]["code"] == "bad_ground_truth" and result["error"]["retryable"] is False
    assert server.metric('malformed_total{reason="no_json"}') == before + 1
    assert_refused(server.post(ONE, given[1]), 422, "bad_ground_truth")
    assert server.post(ONE, item("x" * 100_000)).json()["reason"] == "too_long"


def test_concurrent_clients_get_their_own_answers(server):
    posters = [synthetic.record(seed, 0) for seed in range(24)]
    expected = [reward.score(GOLD, record["ground_truth"])["score"] for record in posters]

    def ask(start: int) -> list[float]:
        rows = range(start, len(posters), 6)
        got = server.scored([item(ground_truth=posters[i]["ground_truth"], id=i) for i in rows])
        assert [result["id"] for result in got] == list(rows)
        return [result["score"] for result in got]

    with ThreadPoolExecutor(6) as pool:
        for start, scores in enumerate(pool.map(ask, range(6))):
            assert scores == expected[start::6]
    assert server.metric('batch_size_bucket{le="+Inf"}') < server.metric("items_total")  # some went together


# ---- requests that are refused ----


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (ONE, b"{", 400, "bad_json"), (ONE, b"\xff\xfe\x00", 400, "bad_json"), (ONE, b"", 400, "bad_json"),
        (ONE, b'{"solution_str": NaN}', 422, "bad_request"), (ONE, b"[" * 100_000, 400, "bad_json"),
        (ONE, b'{"id": ' + b"1" * 5000 + b"}", 400, "bad_json"),
        (ONE, b'{"solution_str": "", "ground_truth": ' + b"[" * 990 + b"]" * 990 + b"}", (400, 422), None),
        (ONE, b"[]", 422, "bad_request"), (ONE, {"solution_str": "x"}, 422, "bad_request"),
        (ONE, {"ground_truth": {}}, 422, "bad_request"), (ONE, item(id=[1]), 422, "bad_request"),
        (ONE, item(id="x" * 300), 422, "bad_request"), (ONE, item(extra_info="x"), 422, "bad_request"),
        (ONE, item(extra_info={"x": "y" * 2**16}), 422, "bad_request"),
        (ONE, item(extra_info={"images": {"image_1": 3}}), 422, "bad_request"),
        (ONE, item(extra_info={"images": 3}), 422, "bad_request"),
        (ONE, item(extra_info={"images": True}), 422, "bad_request"),
        (ONE, item(extra_info={"images": False}), 422, "bad_request"),
        (ONE, item(extra_info={"images": ""}), 422, "bad_request"),
        (ONE, item(extra_info={"images": ["synthetic:0:1:1"] * 17}), 422, "bad_request"),
        (MANY, {"items": []}, 422, "bad_request"), (MANY, {"items": [item()] * 257}, 422, "bad_request"),
        (MANY, item(), 422, "bad_request"), (MANY, {"items": [item(), 3]}, 422, "bad_request"),
        ("/other", {}, 404, "not_found"), ("/health", {}, 405, "bad_method"), ("/docs", {}, 404, "not_found"),
    ],
)  # fmt: skip
def test_what_is_not_a_request_is_refused_with_its_code(server, path, body, status, code):
    answer = server.post(path, body)
    if code is None:  # one of two parsers gives up first
        assert answer.status_code in status and "score" not in answer.json()
    else:
        assert_refused(answer, status, code)


def with_extra(extra: str, truth: str = "{}") -> bytes:
    """A request with JSON that the `json` module would not write."""
    return f'{{"id": 7, "solution_str": "x", "ground_truth": {truth}, "extra_info": {extra}}}'.encode()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (with_extra('{"a": [1, {"b": NaN}]}'), 422, "extra_info.a[1].b of the item: NaN or infinite: must be"),
        (with_extra('{"a": 1e400}'), 422, "extra_info.a of the item: NaN or infinite"),
        (with_extra('{"a":' * 33 + "1" + "}" * 33), 422, "extra_info of the item: 33 levels: at most 32"),
        (with_extra('{"a": 1, "b": 2, "a": 1}'), 400, "'a' stands twice in an object"),
        (with_extra("{}", '{"layers": [{"x": NaN}]}'), 422, "ground_truth.layers[0].x is NaN, infinite or too long"),
        (with_extra("{}", '{"layers": [{"x": 0, "y": -1e400}]}'), 422, "ground_truth.layers[0].y is NaN"),
        (with_extra("{}", '{"layers": [1' + "0" * 400 + "]}"), 422, "ground_truth.layers[0] is NaN"),
    ],
    ids=range(7),
)
def test_a_number_that_is_none_is_refused_by_the_name_of_its_field(server, body, status, message):
    answer = server.post(ONE, body)
    assert answer.status_code == status and message in answer.json()["error"], answer.text


def test_a_number_that_is_none_costs_no_other_item(server):
    good = json.dumps(item())
    bad, fine = server.post(MANY, f'{{"items": [{with_extra("{}", "[NaN]").decode()}, {good}]}}'.encode()).json()[
        "results"
    ]
    assert bad["error"]["code"] == "bad_ground_truth" and "ground_truth[0] is NaN" in bad["error"]["message"]
    assert fine["score"] > 0.98


def test_half_of_a_surrogate_pair_is_echoed(server):
    answer = server.post(ONE, b'{"id": "\\ud800", "solution_str": "\\ud800", "ground_truth": {}}')
    assert_refused(answer, 422, "bad_ground_truth")
    (result,) = server.scored([item("\ud800 " + GOLD, id="\ud800")])
    assert result["id"] == "\ud800" and result["format"] == 0.8


def test_a_body_is_counted_whether_or_not_it_says_its_length(server, monkeypatch):
    monkeypatch.setattr(web, "MAX_BODY", 50_000)
    body = json.dumps({"items": [item()] * 40}).encode()
    chunks = (body[start : start + 1000] for start in range(0, len(body), 1000))
    for sent in (body, chunks):
        assert_refused(server.post(MANY, sent), 413, "too_large")
    assert len(server.scored([item()] * 5)) == 5


def test_a_large_body_is_read_in_another_process(server, monkeypatch):
    read = server.rewards.processes.submit
    monkeypatch.setattr(web, "LARGE", 0)
    submitted = []
    monkeypatch.setattr(server.rewards.processes, "submit", lambda f, *a: submitted.append(f) or read(f, *a))
    assert server.scored([item(id=7)])[0]["score"] > 0.98
    assert_refused(server.post(MANY, b"{"), 400, "bad_json")
    assert submitted.count(items.read) == 2


def test_with_a_token_only_health_is_open(own, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    server = own(token_file=str(tmp_path / "token"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        for path in ("/info", "/metrics"):
            assert_refused(requests.get(server.url + path, headers=headers), 401, "bad_token")
        assert_refused(server.post(ONE, item(), headers=headers), 401, "bad_token")
    assert requests.get(f"{server.url}/health").json() == {"status": "ok"}
    assert requests.get(f"{server.url}/livez").status_code == 200
    assert server.post(ONE, item(), headers={"Authorization": "Bearer secret"}).json()["score"] > 0.98


def test_only_known_names_of_this_machine_are_answered(server, monkeypatch):
    for host in ("evil.example", "evil.example:80", "[", ""):
        assert_refused(requests.get(f"{server.url}/info", headers={"Host": host}), 403, "bad_host")
    for host in ("localhost", "localhost:8899", "[::1]:8899", "LOCALHOST"):
        assert requests.get(f"{server.url}/info", headers={"Host": host}).status_code == 200
    monkeypatch.setenv("RL_HAND_REWARD_TOKEN", "secret")
    assert Config(host="0.0.0.0").hosts is None
    assert "node7" in Config(host="0.0.0.0", allowed_hosts="node7, node8").hosts
    monkeypatch.setenv("RL_HAND_REWARD_TOKEN", " \n")  # is none
    assert Config().host == "127.0.0.1" and not Config().secret
    with pytest.raises(ValueError, match="without a token"):
        Config(host="0.0.0.0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(host="0.0.0.0"), "without a token"), (dict(structure_weight=-0.1), "structure_weight"),
        (dict(structure_weight=0, accuracy_weight=0, visual_weight=0), "sum 0"),
        (dict(coord_space="cm"), "coord_space"),
        (dict(visual_weight=math.inf), "must be finite"), (dict(visual_alpha=2), "visual_alpha"),
        (dict(scorer_options="[1]"), "JSON object"), (dict(max_queue=10), "max_queue"),
        (dict(asset_root="/nowhere"), "asset_root"), (dict(token_file="/nowhere"), "token_file"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(options, message, monkeypatch):
    monkeypatch.delenv("RL_HAND_REWARD_TOKEN", raising=False)
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_options_become_those_of_weights_and_scorers():
    assert Config(structure_weight=1, accuracy_weight=2, visual_weight=1).weights == dict(
        structure=0.25, accuracy=0.5, visual=0.25
    )
    assert Config().options == {} and Config(font_paths=" a.ttf, b.otf ").fonts == ("a.ttf", "b.otf")
    cfg = parse(
        Config, ["--scorer", "visualquality_r1", "--visual-alpha", "0.25", "--scorer_options", '{"expected": true}']
    )
    assert cfg.options == dict(model="TianheWu/VisualQuality-R1-7B", alpha=0.25, device="auto", dtype="auto",
                               expected=True)  # fmt: skip
    assert Config(workers=3).processes == 3 and 1 <= Config().processes <= 4


# ---- images ----


def encoded(image: Image.Image, kind: str = "PNG") -> str:
    content = io.BytesIO()
    image.save(content, kind)
    return base64.b64encode(content.getvalue()).decode()


def test_images_are_sent_or_named_and_the_picture_is_made_of_them(own, tmp_path):
    noise = Image.frombytes("RGB", (64, 64), bytes(x // 4 for x in random.Random(0).randbytes(3 * 64 * 64)))
    truth = {"canvas": {"width": 100, "height": 100, "background": "#FFFFFF"}, "layers": [
        {"type": "image", "src": "image_1", "x": 0, "y": 0, "width": 100, "height": 100},
        {"type": "text", "text": "Hello", "x": 10, "y": 40, "width": 80, "height": 20, "font_size": 14,
         "color": "#FFFFFF"}]}  # fmt: skip
    (tmp_path / "a").mkdir()
    noise.save(tmp_path / "a" / "noise.png")
    server = own(asset_root=str(tmp_path))
    given = dict(ground_truth=truth)
    without = server.post(ONE, item(json.dumps(truth), **given)).json()
    expected = json.loads(json.dumps(reward.score(json.dumps(truth), truth, images={"image_1": noise})))
    assert expected["score"] != without["score"]
    for images in ({"image_1": encoded(noise)}, [encoded(noise)], ["a/noise.png"]):
        answer = server.post(ONE, item(json.dumps(truth), extra_info={"images": images}, **given)).json()
        assert only(answer) == expected
    answer = server.post(ONE, item(extra_info={"images": RECORD["images"]})).json()
    images = {f"image_{i}": synthetic.image(name) for i, name in enumerate(RECORD["images"], 1)}
    assert only(answer) == json.loads(json.dumps(reward.score(GOLD, RECORD["ground_truth"], images=images)))
    assert len(images) == 1


def bomb() -> str:
    """A small file of a large image."""
    return encoded(Image.new("L", (5000, 5000)))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("http://127.0.0.1/x.png", "no file below"), ("../outside.png", "no file below"),
        ("/etc/x.png", "no file below"),
        ("link.png", "no file below"), ("folder.png", "no file below"), ("none.png", "no file below"),
        ("not base64!", "neither base64"), (base64.b64encode(b"GIF89a" + bytes(50)).decode(), "cannot identify"),
        (base64.b64encode(bytes(2**22 + 1)).decode(), "must be at most"), ("large.png", "must be at most"),
        ("broken.png", "cannot be used"), ("synthetic:9:9", "cannot be used"), (bomb, "pixels: must be at most"),
    ],
)  # fmt: skip
def test_an_image_that_cannot_be_used_is_an_error_and_nothing_is_fetched(tmp_path, image, message):
    root = tmp_path / "root"
    (root / "folder.png").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "outside.png")
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    (root / "large.png").write_bytes(bytes(2**22 + 1))
    (root / "broken.png").write_bytes((tmp_path / "outside.png").read_bytes()[:40])
    with pytest.raises(items.Refused, match=message) as refused:
        assessors.image(image() if callable(image) else image, str(root))
    assert (refused.value.status, refused.value.code, refused.value.retryable) == (422, "bad_image", False)


def test_images_of_a_request_are_checked_in_the_process(server):
    image = {"images": {"image_1": bomb()}}
    assert_refused(server.post(ONE, item(extra_info=image)), 422, "bad_image")
    bad, good = server.scored([item(extra_info={"images": ["a.png"]}), item()])
    assert bad["error"]["code"] == "bad_image" and "--asset_root" in bad["error"]["message"] and good["ok"]


# ---- the scorer ----


def test_a_scorer_of_ones_own_counts_with_its_weight(custom):
    answer = custom.post(ONE, item()).json()
    gold = reward.assess(GOLD, assessors.layout.ground_truth(RECORD["ground_truth"]), fonts=assessors.Fonts())
    assert answer["visual"] == pytest.approx(0.25 * gold.gate) and answer["visual_quality"] == 0.75
    assert answer["score"] == pytest.approx(0.4 * gold.structure + 0.4 * gold.accuracy + 0.2 * answer["visual"])
    assert custom.post(ONE, item("{", extra_info={"do": "raise"})).json()["score"] == 0  # has no look to score


@pytest.mark.parametrize(
    ("do", "code", "retryable"),
    [("nan", "scorer_invalid", True), ("above", "scorer_invalid", True), ("text", "scorer_invalid", True),
     ("none", "scorer_invalid", True), ("refuse", "scorer_unparsable", False), ("busy", "scorer_out_of_memory", True)],
)  # fmt: skip
def test_what_a_scorer_gives_in_place_of_a_score_is_an_error_of_its_item(custom, do, code, retryable):
    bad, good = custom.scored([item(extra_info={"do": do}), item()])
    assert bad["error"]["code"] == code and bad["error"]["retryable"] is retryable and "score" not in bad
    assert good["visual"] == pytest.approx(0.25)
    answer = custom.post(ONE, item(extra_info={"do": do}))
    assert answer.status_code == 503 and answer.json()["code"] == code and answer.json()["retryable"] is retryable


def test_a_scorer_that_fails_is_an_error_of_the_batch_and_tried_out_again(custom, capsys):
    assert custom.scored([item(extra_info={"do": "count"})])[0]["error"]["code"] == "scorer_invalid"
    for _ in range(worker.FAILURES):
        (bad,) = custom.scored([item(extra_info={"do": "raise"})])
        assert bad["error"] == dict(code="scorer_failed", retryable=True,
                                    message="the scorer failed: KeyError; see the log of the server")  # fmt: skip
    wait_for(lambda: custom.rewards.state == "ready")
    assert custom.scored([item()])[0]["ok"] and custom.rewards.failures == 0
    assert capsys.readouterr().err.count("KeyError: 'secret'") == worker.FAILURES
    assert custom.metric('item_errors_total{code="scorer_failed"}') == worker.FAILURES


def test_a_scorer_that_does_not_recover_ends_the_server(scorer, capsys):
    server = Server(scorer=scorer)
    server.rewards.scorer.score_batch = lambda images, metas: 1 / 0
    for _ in range(worker.FAILURES - 1):
        assert server.scored([item()])[0]["error"]["code"] == "scorer_failed"
    codes = {result["error"]["code"] for result in server.scored([item()] * 100)}  # none is left without an answer
    assert codes == {"scorer_failed", "failed"}
    server.threads[1].join(10)
    assert "self-test failed" in str(server.error)
    assert_refused(server.post(ONE, item()), 503, "failed")
    assert requests.get(f"{server.url}/health").status_code == 503
    server.web.should_exit = True
    server.threads[0].join(10)
    server.rewards.processes.close()


def test_a_service_that_scores_good_posters_low_does_not_start(monkeypatch):
    monkeypatch.setattr(synthetic, "gold", lambda record: '{"layers": []}')
    rewards = Rewards(Config(workers=1))
    with pytest.raises(RuntimeError, match="self-test failed"):
        rewards.load()
    assert rewards.state == "loading"
    rewards.processes.close()


# ---- much to do, and trouble ----


def test_a_burst_of_requests_loses_and_swaps_nothing(scorer, own, monkeypatch):
    """100 requests at once, of which the queue holds 64: the others come again."""
    monkeypatch.setattr(reward_client, "BATCH_ITEMS", 1)
    monkeypatch.setattr(reward_server, "MAX_ITEMS", 64)
    truth = {"canvas": {"width": 64, "height": 64}, "layers": [
        {"type": "shape", "x": 8, "y": 8, "width": 40, "height": 40, "fill": "#000000"}]}  # fmt: skip
    server = own(scorer=scorer, max_batch=8, max_queue=64)
    client, count = reward_client.RewardService(server.url, workers=100), 100
    columns = {"extra_info": [{"do": "slow", "value": i / count} for i in range(count)]}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.scores, [json.dumps(truth)] * count, [json.dumps(truth)] * count, columns, 4)
        wait_for(lambda: server.metric("items_total") > 8)
        assert requests.get(f"{server.url}/health", timeout=2).json() == {"status": "ok"} and not asked.done()
        named = asked.result()
    assert named["visual"][0] == pytest.approx([i / count for i in range(count)])
    assert not any(map(math.isnan, named["service"][0])) and named["service"][0] == sorted(named["service"][0])
    assert server.metric("items_total") == 1 + count  # with that of the self-test: none was scored twice
    assert server.metric(f'requests_total{{endpoint="{MANY}",status="429"}}') > 0


def test_a_full_queue_a_deadline_and_health_before_and_while_it_works(own):
    server = own(work=False, max_queue=256)
    assert (requests.get(f"{server.url}/health").status_code, server.rewards.state) == (503, "loading")
    assert_refused(server.post(ONE, item()), 503, "loading")
    assert_refused(requests.get(f"{server.url}/info"), 503, "loading")
    server.rewards.load()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.post, MANY, {"items": [item("x")] * 254})]
        wait_for(lambda: server.metric("waiting") == 254)
        waiting.append(pool.submit(server.post, ONE, item(), headers={"X-Timeout-Ms": "30"}))
        wait_for(lambda: server.metric("waiting") == 255)
        assert_refused(server.post(MANY, {"items": [item()] * 2}), 429, "queue_full")
        assert requests.get(f"{server.url}/health", timeout=5).json() == {"status": "ok"}
        assert_refused(waiting[1].result(), 504, "deadline")
        server.work()
        assert all(result["reason"] == "no_json" for result in waiting[0].result().json()["results"])
    wait_for(lambda: server.metric('item_errors_total{code="deadline"}') == 1)  # and it was not scored
    assert server.metric("items_total") == 1 + 254
    for header in ("soon", "0", "-5", "nan", "inf"):
        assert_refused(server.post(ONE, item(), headers={"X-Timeout-Ms": header}), 422, "bad_request")


def test_health_answers_while_the_scorer_is_at_work(custom, tmp_path):
    slow = item(extra_info={"do": "wait", "file": str(tmp_path / "go")})
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(custom.scored, [slow])
        wait_for((tmp_path / "go").exists)
        assert_refused(custom.post(ONE, item(), headers={"X-Timeout-Ms": "50"}), 504, "deadline")
        assert requests.get(f"{custom.url}/health", timeout=2).json() == {"status": "ok"}
        assert custom.metric("waiting") == 1 and not asked.done()
        (tmp_path / "go").unlink()
        assert asked.result()[0]["ok"]
    wait_for(lambda: custom.metric('item_errors_total{code="deadline"}') == 1)
    assert custom.scored([item(id="b")])[0]["id"] == "b"  # a queue with nothing but what came too late is no end


def test_a_scorer_that_hangs_is_not_healthy(custom, tmp_path, monkeypatch):
    monkeypatch.setattr(custom.rewards, "cfg", dataclasses.replace(custom.rewards.cfg, deadline_seconds=0.05))
    assert custom.rewards.late == -math.inf
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(custom.scored, [item(extra_info={"do": "wait", "file": str(tmp_path / "go")})])
        wait_for(lambda: custom.rewards.late > 0)
        answer = requests.get(f"{custom.url}/health", timeout=2)
        assert answer.status_code == 503 and answer.json()["status"].startswith("stuck: ")
        (tmp_path / "go").unlink()
        assert asked.result()[0]["ok"]  # its own client still waits: the deadline of the web side is as before
    wait_for(lambda: custom.rewards.late == -math.inf)
    assert requests.get(f"{custom.url}/health", timeout=2).json() == {"status": "ok"}


def test_the_processes_work_on_the_next_batch_while_the_scorer_is_at_work(scorer, own, tmp_path):
    server = own(scorer=scorer, max_batch=1)
    slow = item(extra_info={"do": "wait", "file": str(tmp_path / "go")})
    assessed = []
    submit = server.rewards.processes.submit
    server.rewards.processes.submit = lambda f, x: assessed.append(submit(f, x)) or assessed[-1]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.scored, [slow, item(), item()])
        wait_for((tmp_path / "go").exists)
        assert len(assessed) == 2 and assessed[1].result(20).structure > 0.98
        (tmp_path / "go").unlink()
        assert [result["ok"] for result in asked.result()] == [True] * 3


def child(server: Server) -> int:
    """The process that assesses."""
    return server.rewards.processes.submit(os.getpid).result(30)


def test_a_process_that_dies_or_hangs_costs_the_item_it_had(own):
    server = own(item_seconds=1.0)
    first = child(server)
    os.kill(first, signal.SIGSTOP)
    hung, after = server.scored([item(id=1), item(id=2)])
    assert hung["error"]["code"] == "scorer_timeout" and hung["error"]["retryable"] is True
    assert after["score"] > 0.98 and after["id"] == 2
    second = child(server)
    assert second != first and not alive(first)
    os.kill(second, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.scored, [item(), item()])
        wait_for(lambda: server.metric("waiting") == 0 and server.rewards.processes._calls.qsize() == 1)
        os.kill(second, signal.SIGKILL)
        died, after = asked.result()
    assert died["error"]["code"] in ("worker_died", "scorer_timeout") and after["score"] > 0.98
    os.kill(child(server), signal.SIGKILL)
    assert_refused(server.post(ONE, item()), 503, "worker_died")


def test_a_call_that_fails_leaves_the_processes_at_work(server, capsys):
    unpickled = "type('X', (), {'__reduce__': lambda self: (int, ('x',))})()"  # int('x') is called here, not there
    for text, code in ((unpickled, "internal"), ("1 / 0", "internal"), ("lambda: 0", "worker_died")):
        with pytest.raises(items.Refused) as refused:
            server.rewards.processes.submit(eval, text).result(30)
        assert refused.value.code == code
    assert "invalid literal for int" in capsys.readouterr().err
    assert server.scored([item()])[0]["ok"]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_processes_end_with_the_server_however_it_ends(tmp_path):
    code = (
        "import os, time; from grpo.poster.assessors import Assessors, Options\n"
        "print(Assessors(1, Options(), 5.0).submit(os.getpid).result(), flush=True); time.sleep(60)"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pid = int(server.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGINT):  # meant for the server: it decides
        os.kill(pid, number)
    assert alive(pid)
    server.kill()
    server.wait()
    wait_for(lambda: not alive(pid))


def test_a_bug_is_an_error_and_not_a_score(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(reward, "result", lambda *_: 1 / 0)
        assert_refused(server.post(ONE, item()), 500, "internal")
        assert server.scored([item()])[0]["error"]["code"] == "internal"
    with monkeypatch.context() as patch:  # a part that is not finite cannot be sent
        result = reward.result
        patch.setattr(reward, "result", lambda x, *args: {**result(x, *args), "cer": math.nan if x.parse_ok else 0.0})
        bad, good = server.scored([item(), item("x")])
        assert bad["error"]["code"] == "internal" and good["score"] == 0
    monkeypatch.setattr(server.rewards, "submit", lambda *_: 1 / 0)
    assert_refused(server.post(ONE, item()), 500, "internal")


def test_metrics_and_info_say_what_happened(own):
    server = own(structure_weight=1, accuracy_weight=1, visual_weight=0)
    server.scored([item(), item("x"), item(ground_truth={})])
    text = requests.get(f"{server.url}/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert text.count("# TYPE") == len(set(re.findall(r"# TYPE (\S+)", text)))
    assert float(lines["poster_items_total"]) == 3  # with that of the self-test
    assert float(lines['poster_item_errors_total{code="bad_ground_truth"}']) == 1
    assert float(lines[f'poster_requests_total{{endpoint="{MANY}",status="200"}}']) == 1
    buckets = [
        float(lines[f'poster_part_bucket{{part="score",le="{bound}"}}']) for bound in ("0.0", "0.9", "1.0", "+Inf")
    ]
    assert buckets == [1, 1, 3, 3] == sorted(buckets)
    assert float(lines['poster_part_count{part="structure"}']) == 3 and float(lines["poster_ready"]) == 1
    info = requests.get(f"{server.url}/info").json()
    assert info["limits"] == dict(body_bytes=2**23, items=256, image_bytes=2**22, queue=1024, batch=32)
    assert info["weights"] == dict(structure=0.5, accuracy=0.5, visual=0.0) and info["version"] == reward.VERSION
    assert re.fullmatch("[0-9a-f]{64}", info["fingerprint"]) and info["instance_id"]


def test_the_fingerprint_is_of_all_that_scores_depend_on(server, own, monkeypatch):
    info = server.rewards.info
    same = worker.fingerprint(dict(info, workers=9, limits={}))
    assert same == info["fingerprint"]
    changes = [dict(weights={"structure": 1}), dict(scorer="x"), dict(scorer_identity="x"), dict(fonts="x"),
               dict(coord_space="rel1000"), dict(version=99)]  # fmt: skip
    assert len({worker.fingerprint({**info, **change}) for change in changes} | {same}) == len(changes) + 1
    monkeypatch.setattr(worker, "SOURCES", worker.SOURCES[1:])
    assert worker.fingerprint(info) != same


def test_the_benchmark_counts_what_was_scored(server, capsys):
    before = server.metric("items_total")
    benchmark_rewards.main(benchmark_rewards.Config(url=server.url, clients=2, seconds=0.5, batch=4, level=0))
    numbers = json.loads(capsys.readouterr().out)
    scored = server.metric("items_total") - before
    assert 0 < 0.5 * numbers["posters_per_second"] <= scored <= 0.5 * numbers["posters_per_second"] + 2 * 4
    assert 0 < numbers["health_p50_ms"] <= numbers["health_p99_ms"] and numbers["refused"] == 0


# ---- processes ----


class Process(Command):
    """The script in a process of its own."""

    def __init__(self, output, **options):
        self.port = options.setdefault("port", free_port())
        self.output, self.url = output, f"http://127.0.0.1:{self.port}"
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RL_HAND_INSTANCE_ID": "this one"}
        super().__init__([sys.executable, SCRIPT, *arguments], output, environment)

    def ready(self) -> "Process":
        wait_for(lambda: "ready, " in self.output.read_text() or self.exitcode is not None, 60)
        assert self.exitcode is None, self.output.read_text()
        return self


def test_sigterm_answers_what_is_waiting_and_refuses_what_is_new(scorer, tmp_path):
    server = Process(tmp_path / "out.txt", scorer=scorer, workers=1, max_batch=1).ready()
    try:
        assert requests.get(f"{server.url}/info").json()["instance_id"] == "this one"
        slow = item(extra_info={"do": "wait", "file": str(tmp_path / "go")})
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(requests.post, server.url + MANY, json={"items": [slow, *[item()] * 3]})
            wait_for((tmp_path / "go").exists)
            os.kill(server.pid, signal.SIGTERM)
            wait_for(lambda: requests.get(f"{server.url}/health").json() == {"status": "draining"})
            assert_refused(requests.post(server.url + ONE, json=item()), 503, "draining")
            assert requests.get(f"{server.url}/livez").status_code == 200
            (tmp_path / "go").unlink()
            answer = asked.result()
        assert [result["ok"] for result in answer.json()["results"]] == [True] * 4
        server.join(20)
        assert server.exitcode == 0, server.output.read_text()
        assert "SIGTERM: answering what is waiting" in server.output.read_text()
        assert "Night" not in server.output.read_text() and "solution" not in server.output.read_text()
    finally:
        server.kill()


def test_a_server_whose_scorer_hangs_ends(scorer, tmp_path):
    server = Process(tmp_path / "out.txt", scorer=scorer, workers=1, deadline_seconds=0.3).ready()
    try:
        hang = {"do": "wait", "file": str(tmp_path / "go")}
        assert_refused(requests.post(server.url + ONE, json=item(extra_info=hang)), 504, "deadline")
        server.join(20)
        assert server.exitcode == 1
        assert "the model hangs: nobody has waited for what it computes for 0.3 s" in server.output.read_text()
    finally:
        server.kill()


def test_a_server_that_cannot_start_says_why_and_ends(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = Process(tmp_path / "taken.txt", port=other.getsockname()[1])
        failed = Process(tmp_path / "failed.txt", scorer="nothing.py:score")
        for server in (taken, failed):
            server.join(60)
    assert taken.exitcode == 1 and "give another --port" in taken.output.read_text()
    assert failed.exitcode == 1 and "there is no file 'nothing.py'" in failed.output.read_text()


def test_time_and_memory_for_nasty_bodies_are_bounded(server):
    start = time.monotonic()
    for body in (b"{" * 2**16, b'{"a":' * 2**14, b'[{"a":[]},' * 2**14, b'"\\u0000' * 2**14, b"9" * 2**16):
        assert_refused(server.post(ONE, body), 400, "bad_json")
        answer = server.post(ONE, item(body.decode()))
        assert answer.json()["score"] == 0 and not answer.json()["parse_ok"]
    assert time.monotonic() - start < 10
