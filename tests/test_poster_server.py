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
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import requests
import uvicorn
from conftest import ROOT, Command
from PIL import Image
from test_poster_launcher import alive
from test_teacher_server import free_port, wait_for

from common.base import serving
from common.tasks import reward_client
from grpo.poster import assessors, items, reward, reward_server, synthetic, tricks, web, worker
from grpo.poster.reward_server import Config
from grpo.poster.worker import Rewards

SCRIPT = ROOT / "grpo" / "poster" / "reward_server.py"
ONE, MANY = "/compute_reward", "/compute_reward_batch"
RECORD = synthetic.record(13, 1)  # with an image
GOLD = synthetic.gold(RECORD)
SOON = 20  # seconds, for what is answered at once, on however busy a machine
SCORER = """
import time
from pathlib import Path
from grpo.poster.errors import ScorerError

def score(images, metas):
    values = []
    for image, meta in zip(images, metas, strict=True):
        assert image.mode == "RGB" and 0 <= meta["cpu"] <= 1 and meta["solution"]
        do, file = (meta["extra_info"].get(name) for name in ("do", "file"))
        if do == "wait":
            Path(file).touch()
            while Path(file).exists():
                time.sleep(0.01)
        if do == "raise":
            raise KeyError("secret")
        if do == "ask":  # a score of what was asked for, and when
            assert meta["prompt"][0]["content"] == "A poster", meta["prompt"]
            meta["extra_info"]["value"], do = meta["step"] / 100, "value"
        meta["visual_quality"] = 0.75
        values.append({"nan": float("nan"), "above": 1.01, "text": "0.5", "value": meta["extra_info"].get("value"),
                       "refuse": ScorerError("scorer_unparsable", "no rating", retryable=False)}.get(do, 0.25))
    if do == "count":
        return []
    return values
"""


class Client:
    """Whoever asks the server at `url`."""

    def get(self, path: str, **headers: str) -> requests.Response:
        return requests.get(self.url + path, headers=headers, timeout=SOON)

    def post(self, path: str, body, **options) -> requests.Response:
        body = json.dumps(body) if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return requests.post(self.url + path, body, headers=headers, **{"timeout": 5 * SOON, **options})

    def scored(self, items: list[dict]) -> list[dict]:
        answer = self.post(MANY, {"items": items})
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    def metric(self, sample: str) -> float:
        found = re.search(rf"^poster_{re.escape(sample)} (.*)$", self.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    @contextlib.contextmanager
    def held(self, folder, *others: dict):
        """The scorer at work on one item until the end of the block, and others behind it; yields their results."""
        going = folder / "going"
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.scored, [item(extra_info={"do": "wait", "file": str(going)}), *others])
            wait_for(going.exists)
            try:
                yield asked
            finally:
                going.unlink()


class Server(Client):
    """A server in threads of this process; its processes are real."""

    def __init__(self, work: bool = True, **options):
        self.rewards, self.error = Rewards(Config(**{"workers": 1, "batch_wait_ms": 1.0, **options})), None
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = dict(http=serving.StrictHTTP, lifespan="off", log_level="warning")
        app = uvicorn.Config(web.create_app(self.rewards), **options)
        self.web, self.threads = uvicorn.Server(app), []
        self.start(lambda: self.web.run([listener]))
        if work:
            self.rewards.load()
            self.start(self.work)

    def start(self, function) -> None:
        self.threads.append(threading.Thread(target=function, daemon=True))
        self.threads[-1].start()

    def work(self) -> None:
        try:
            self.rewards.work()
        except Exception as error:
            self.error = error
            self.rewards.fail(error)

    def stop(self) -> None:
        self.rewards.drain()
        self.web.should_exit = True
        for thread in reversed(self.threads):
            thread.join(SOON)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("scorer") / "scorer.py"
    path.write_text(SCORER)
    return f"{path}:score"


def serve(request, **options) -> Server:
    """Is stopped with the scope of the request."""
    server = Server(**options)
    request.addfinalizer(server.stop)
    return server


@pytest.fixture(scope="module")
def server(request):
    return serve(request)


@pytest.fixture(scope="module")
def custom(request, scorer):
    return serve(request, scorer=scorer)


@pytest.fixture
def own(request):
    return partial(serve, request)


def item(solution: str = GOLD, **changes) -> dict:
    return {"id": "a", "solution_str": solution, "ground_truth": RECORD["ground_truth"], **changes}


def assert_refused(answer: requests.Response, status: int, code: str, retryable: bool | None = None) -> None:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert isinstance(answer.json()["error"], str) and "score" not in answer.json()
    assert answer.json()["retryable"] is (status in (429, *range(500, 600)) if retryable is None else retryable)
    assert ("Retry-After" in answer.headers) == (status in (429, 503))


def test_one_and_many_and_no_service_at_all_give_the_same(server):
    """Bit for bit: the process that scores for the service runs the same code."""
    rng = random.Random(1)
    solutions = [trick(RECORD, rng) for trick in tricks.TRICKS.values()]
    own = [reward.score(text, RECORD["ground_truth"]) for text in solutions]
    assert len({result["score"] for result in own}) > 10 and any(not result["parse_ok"] for result in own)
    many = server.scored([item(text, id=i) for i, text in enumerate(solutions)])
    assert [result["id"] for result in many] == list(range(len(solutions)))
    assert all(result == {**result, **expected, "ok": True} for result, expected in zip(many, own, strict=True))
    for text, expected in list(zip(solutions, own, strict=True))[::9]:
        answer = server.post(ONE, item(text, ground_truth=json.dumps(RECORD["ground_truth"]))).json()
        assert answer == {**answer, **expected, "id": "a"} and answer["ms"] > 0
        assert answer["fingerprint"] == server.rewards.info["fingerprint"]


def test_a_malformed_poster_is_an_answer_and_a_bad_truth_an_error_of_its_item(server):
    before = server.metric('malformed_total{reason="no_json"}')
    half = "\ud800"  # of a surrogate pair, which UTF-8 cannot hold
    given = [item("nothing", id=1), item(ground_truth={"canvas": 1}, id=2), item(half + GOLD, id=half),
             item(ground_truth=None, id="b")]  # fmt: skip
    malformed, bad, good, none = results = server.scored(given)
    assert malformed["ok"] and malformed["score"] == 0 and malformed["reason"] == "no_json"
    assert good["score"] > 0.78 and good["format"] == 0.8 and [result["id"] for result in results] == [1, 2, half, "b"]
    for result in (bad, none):
        assert result["ok"] is False and "score" not in result and result["error"]["code"] == "bad_ground_truth"
    assert server.metric('malformed_total{reason="no_json"}') == before + 1
    assert_refused(server.post(ONE, given[1]), 422, "bad_ground_truth")
    assert server.post(ONE, item("x" * 100_000)).json()["reason"] == "too_long"


@pytest.mark.parametrize(("path", "body", "status", "code"), [
    *((ONE, body, 400, "bad_json") for body in (b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"id":' + b"1" * 5000)),
    *((ONE, item(**changes), 422, "bad_request") for changes in (
        {"id": [1]}, {"id": "x" * 300}, {"id": 1.5}, {"extra_info": "x"}, {"extra_info": {"x": "y" * 2**16}},
        *({"step": step} for step in (-1, 1.0, "1", True, 2**63)),
        *({"prompt": prompt} for prompt in (1, {}, ["x"], [{"content": "x"}], [{"role": 1}], "x" * 2**20)),
        *({"extra_info": {"images": images}} for images in ({"image_1": 3}, False, ["synthetic:0:1:1"] * 17)))),
    *((ONE, body, 422, "bad_request") for body in (b"[]", {"solution_str": "x"}, {"ground_truth": {}})),
    *((MANY, {"items": given}, 422, "bad_request") for given in ([], [item()] * 257, None, [item(), 3])),
    ("/other", {}, 404, "not_found"), ("/health", {}, 405, "bad_method"), ("/docs", {}, 404, "not_found"),
])  # fmt: skip
def test_what_is_not_a_request_is_refused_with_its_code(server, path, body, status, code):
    assert_refused(server.post(path, body), status, code)


def test_a_number_that_is_none_is_refused_by_the_name_of_its_field(server):
    def body(extra: str = "{}", truth: str = "{}") -> bytes:  # that the `json` module would not write
        return f'{{"id": 7, "solution_str": "x", "ground_truth": {truth}, "extra_info": {extra}}}'.encode()

    for sent, status, said in (
        (body('{"a": [1, {"b": NaN}]}'), 422, "extra_info.a[1].b of the item: NaN or infinite"),
        (body('{"a":' * 33 + "1" + "}" * 33), 422, "33 levels: at most 32"),
        (body('{"a": 1, "b": 2, "a": 1}'), 400, "'a' stands twice"),
        (body(truth='{"layers": [{"x": 0, "y": -1e400}]}'), 422, "ground_truth.layers[0].y is NaN"),
    ):
        answer = server.post(ONE, sent)
        assert answer.status_code == status and said in answer.json()["error"], answer.text
    # and costs no other item its score
    both = f'{{"items": [{body(truth="[NaN]").decode()}, {json.dumps(item())}]}}'.encode()
    bad, fine = server.post(MANY, both).json()["results"]
    assert bad["error"]["code"] == "bad_ground_truth" and fine["score"] > 0.98


def test_a_body_is_counted_whether_or_not_it_says_its_length_and_a_large_one_read_elsewhere(server, monkeypatch):
    read, submitted = server.rewards.processes.submit, []
    monkeypatch.setattr(web, "MAX_BODY", 50_000)
    monkeypatch.setattr(web, "LARGE", 10_000)
    monkeypatch.setattr(server.rewards.processes, "submit", lambda f, *a: submitted.append(f) or read(f, *a))
    body = json.dumps({"items": [item()] * 40}).encode()
    for sent in (body, iter([body[:25_000], body[25_000:]])):
        assert_refused(server.post(MANY, sent), 413, "too_large")
    assert len(server.scored([item()] * 10)) == 10 and server.scored([item()])[0]["ok"]
    assert submitted.count(items.read) == 1


def test_with_a_token_only_health_is_open(own, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    server = own(work=False, token_file=str(tmp_path / "token"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        assert_refused(server.get("/metrics", **headers), 401, "bad_token")
        assert_refused(server.post(ONE, item(), headers=headers), 401, "bad_token")
    assert server.get("/health").json() == {"status": "loading"} and server.get("/livez").status_code == 200
    assert_refused(server.post(ONE, item(), headers={"Authorization": "Bearer secret"}), 503, "loading")


def test_only_known_names_of_this_machine_are_answered(server, monkeypatch):
    for host in ("evil.example:80", ""):
        assert_refused(server.get("/info", Host=host), 403, "bad_host")
    for host in ("localhost", "[::1]:8899", "LOCALHOST"):
        assert server.get("/info", Host=host).status_code == 200
    monkeypatch.setenv("RL_HAND_REWARD_TOKEN", "secret")
    assert Config(host="0.0.0.0").hosts is None
    assert "node7" in Config(host="0.0.0.0", allowed_hosts="node7, node8").hosts


@pytest.mark.parametrize(("options", "message"), [
    (dict(host="0.0.0.0"), "without a token"), (dict(structure_weight=-0.1), "structure_weight"),
    (dict(structure_weight=0, accuracy_weight=0, visual_weight=0), "sum 0"), (dict(coord_space="cm"), "coord_space"),
    (dict(visual_weight=math.inf), "must be finite"), (dict(visual_alpha=2), "visual_alpha"),
    (dict(max_queue=10), "max_queue"), (dict(token_file="/nowhere"), "token_file"),
    (dict(scorer_options="[1]"), "JSON object"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(options, message, monkeypatch):
    monkeypatch.setenv("RL_HAND_REWARD_TOKEN", " \n")  # is none
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_options_become_those_of_weights_and_scorers():
    given = dict(structure_weight=1, accuracy_weight=2, visual_weight=1, font_paths=" a.ttf, b.otf ", workers=3)
    cfg = Config(**given, scorer="visualquality_r1", visual_alpha=0.25, scorer_options='{"expected": true}')
    assert cfg.weights == dict(structure=0.25, accuracy=0.5, visual=0.25)
    assert cfg.fonts == ("a.ttf", "b.otf") and cfg.processes == 3 and 1 <= Config().processes <= 4
    own = dict(model="TianheWu/VisualQuality-R1-7B", alpha=0.25, device="auto", dtype="auto", expected=True)
    assert cfg.options == own and Config().options == {}


def encoded(image: Image.Image) -> str:
    image.save(content := io.BytesIO(), "PNG")
    return base64.b64encode(content.getvalue()).decode()


@pytest.mark.services
def test_images_are_sent_or_named_and_the_picture_is_made_of_them(own, tmp_path):
    dark = Image.new("RGB", (64, 64), "#202020")  # without an image there is grey below the letters
    letters = {"text": "Hello", "x": 10, "y": 40, "width": 80, "height": 20, "font_size": 14, "color": "#FFFFFF"}
    truth = {"canvas": {"width": 100, "height": 100}, "layers": [
        {"type": "image", "src": "image_1", "x": 0, "y": 0, "width": 100, "height": 100},
        {"type": "text", **letters}]}  # fmt: skip
    dark.save(tmp_path / "dark.png")
    server = own(asset_root=str(tmp_path))
    text, picture = json.dumps(truth), synthetic.image(*RECORD["images"])
    scores = set()
    for images, seen in (({"image_1": encoded(dark)}, dark), (["dark.png"], dark), (RECORD["images"], picture)):
        answer = server.post(ONE, item(text, extra_info={"images": images}, ground_truth=truth)).json()
        assert answer == {**answer, **reward.score(text, truth, images={"image_1": seen})}
        scores.add(answer["score"])
    assert reward.score(text, truth)["score"] not in scores
    bad, good = server.scored([item(extra_info={"images": {"image_1": "not base64!"}}), item()])
    assert bad["error"]["code"] == "bad_image" and good["ok"]


@pytest.mark.parametrize(("image", "message"), [
    *((name, "no file below") for name in ("http://127.0.0.1/x.png", "../outside.png", "/etc/x.png", "link.png")),
    ("not base64!", "neither base64"), (base64.b64encode(b"GIF89a" + bytes(50)).decode(), "cannot identify"),
    (base64.b64encode(bytes(2**22 + 1)).decode(), "must be at most"), ("large.png", "must be at most"),
    ("broken.png", "cannot be used"), ("bomb", "pixels: must be at most"),
])  # fmt: skip
def test_an_image_that_cannot_be_used_is_an_error_and_nothing_is_fetched(tmp_path, image, message):
    root = tmp_path / "root"
    root.mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "outside.png")
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    (root / "large.png").write_bytes(bytes(2**22 + 1))
    (root / "broken.png").write_bytes((tmp_path / "outside.png").read_bytes()[:40])
    with pytest.raises(items.Refused, match="--asset_root"):
        assessors.image("broken.png", "")
    image = encoded(Image.new("L", (5000, 5000))) if image == "bomb" else image  # a small file
    with pytest.raises(items.Refused, match=message) as refused:
        assessors.image(image, str(root))
    assert (refused.value.status, refused.value.code, refused.value.retryable) == (422, "bad_image", False)


def test_a_scorer_of_ones_own_counts_with_its_weight(custom):
    answer = custom.post(ONE, item()).json()
    assert answer["visual"] == pytest.approx(0.25) and answer["visual_quality"] == 0.75
    assert answer["score"] == pytest.approx(0.4 * answer["structure"] + 0.4 * answer["accuracy"] + 0.2 * 0.25)
    assert custom.post(ONE, item("{", extra_info={"do": "raise"})).json()["score"] == 0  # has no look to score


def test_ids_come_back_as_they_are_and_a_scorer_gets_prompt_and_step(server, custom):
    ids = ["12.7.3fa9c2", "", " a ", "é\u0000\n", 0, -7, 10**200, "0", None]
    # the same poster under other ids, and another poster under the same: nothing is remembered by id
    results = server.scored([item(id=i, prompt="A poster", step=3) for i in ids] + [item("x", id=i) for i in ids])
    assert [result["id"] for result in results] == ids * 2 and [type(r["id"]) for r in results[:9]] == [*map(type, ids)]
    assert [result["score"] > 0.9 for result in results] == [True] * 9 + [False] * 9
    chat = [{"role": "user", "content": "A poster"}, {"role": "user", "content": [{"type": "text", "text": "or two"}]}]
    asked = item(extra_info={"do": "ask"}, prompt=chat, step=25)
    assert custom.scored([asked])[0]["visual"] == pytest.approx(0.25)
    assert "prompt" in items.__doc__ and "step" in items.__doc__


def chinese(text: str = "夏日 Jazz") -> dict:
    truth = {"canvas": {"width": 200, "height": 200}, "layers": [
        {"type": "text", "text": text, "x": 20, "y": 20, "width": 160, "height": 40}]}  # fmt: skip
    return item(json.dumps(truth), ground_truth=truth)


@pytest.mark.services
def test_characters_without_glyphs_are_counted_and_refused_if_a_picture_is_judged(own, scorer, capsys):
    server, custom = own(), own(scorer=scorer)
    assert server.get("/info").json()["missing_glyphs"] == {"items": 0, "characters": ""}
    shares = [result["missing_glyphs"] for result in server.scored([chinese(), chinese("Jazz"), chinese("夏日")])]
    assert shares == [pytest.approx(2 / 6), 0, 1]
    assert server.get("/info").json()["missing_glyphs"] == {"items": 2, "characters": "夏日"}
    assert server.metric("missing_glyphs_total") == 2
    assert server.get("/info").json()["fingerprint"] == server.rewards.info["fingerprint"]
    assert_refused(custom.post(ONE, chinese()), 422, "missing_glyphs")
    bad, good, malformed = custom.scored([chinese(), item(), {**chinese(), "solution_str": "x"}])
    assert good["ok"] and {x["error"]["code"] for x in (bad, malformed)} == {"missing_glyphs"}
    assert custom.get("/info").json()["missing_glyphs"] == {"items": 3, "characters": "夏日"}
    said = capsys.readouterr().out
    assert said.count("fonts-noto-cjk") == 2 and said.count("--font_paths") == 2  # once for each server


@pytest.mark.parametrize(("do", "code", "retryable"), [
    *((do, "scorer_invalid", True) for do in ("nan", "above", "text")), ("refuse", "scorer_unparsable", False),
])  # fmt: skip
def test_what_a_scorer_gives_in_place_of_a_score_is_an_error_of_its_item(custom, do, code, retryable):
    bad, good = custom.scored([item(extra_info={"do": do}), item()])
    assert bad["error"]["code"] == code and bad["error"]["retryable"] is retryable and "score" not in bad
    assert good["visual"] == pytest.approx(0.25)
    assert_refused(custom.post(ONE, item(extra_info={"do": do})), 503, code, retryable)


def test_a_scorer_that_fails_is_an_error_of_the_batch_and_tried_out_again(custom, capsys, monkeypatch):
    assert custom.scored([item(extra_info={"do": "count"})])[0]["error"]["code"] == "scorer_invalid"
    for _ in range(worker.FAILURES):
        error = custom.scored([item(extra_info={"do": "raise"})])[0]["error"]
        assert error["code"] == "scorer_failed" and error["retryable"] is True
        assert "KeyError" in error["message"] and "secret" not in error["message"]
    wait_for(lambda: custom.rewards.failures == 0 and custom.rewards.state == "ready")  # tried out, not yet degraded
    assert custom.scored([item()])[0]["ok"] and custom.rewards.failures == 0
    assert capsys.readouterr().err.count("KeyError: 'secret'") == worker.FAILURES
    assert custom.metric('item_errors_total{code="scorer_failed"}') == worker.FAILURES
    # a service that scores good posters low does not start
    monkeypatch.setattr(synthetic, "gold", lambda record: '{"layers": []}')
    with pytest.raises(RuntimeError, match="self-test failed"):
        custom.rewards._self_test()


@pytest.mark.services
def test_a_scorer_that_does_not_recover_ends_the_server(own, scorer):
    server = own(scorer=scorer)
    server.rewards.scorer.score_batch = lambda images, metas: 1 / 0
    for _ in range(worker.FAILURES - 1):
        assert server.scored([item()])[0]["error"]["code"] == "scorer_failed"
    codes = {result["error"]["code"] for result in server.scored([item()] * 100)}  # none is left without an answer
    assert codes == {"scorer_failed", "failed"}
    server.threads[1].join(SOON)
    assert "self-test failed" in str(server.error)
    assert_refused(server.post(ONE, item()), 503, "failed")
    assert server.get("/health").status_code == 503
    server.rewards.processes.close()


@pytest.mark.services
def test_a_burst_of_requests_loses_and_swaps_nothing(scorer, own, monkeypatch, tmp_path):
    """100 requests at once, of which the queue holds 64: the others come again."""
    monkeypatch.setattr(reward_client, "BATCH_ITEMS", 1)
    monkeypatch.setattr(reward_server, "MAX_ITEMS", 64)
    layer = {"type": "shape", "x": 8, "y": 8, "width": 40, "height": 40, "fill": "#000000"}
    truth = json.dumps({"canvas": {"width": 64, "height": 64}, "layers": [layer]})
    server = own(scorer=scorer, max_batch=8, max_queue=64)
    client, count = reward_client.RewardService(server.url, workers=100), 100
    values = [i / count for i in range(count)]
    columns = {"extra_info": [{"do": "value", "value": value} for value in values]}
    with ThreadPoolExecutor(1) as pool, server.held(tmp_path):
        asked = pool.submit(client.scores, {"completions": [truth] * count, "answers": [truth] * count, **columns}, 4)
        wait_for(lambda: server.metric(f'requests_total{{endpoint="{MANY}",status="429"}}') > 0)
        assert server.get("/health").json() == {"status": "ok"}
    named = asked.result()
    assert named["visual"][0] == pytest.approx(values) and named["service"][0] == sorted(named["service"][0])
    assert not any(map(math.isnan, named["service"][0]))
    assert server.metric("items_total") == 2 + count  # with those of the self-test and of `held`: none scored twice


def test_a_full_queue_a_deadline_and_health_before_and_while_it_works(own):
    server = own(work=False, max_queue=256)
    assert server.get("/health").status_code == 503
    for answer in (server.post(ONE, item()), server.get("/info")):
        assert_refused(answer, 503, "loading")
    server.rewards.load()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.post, MANY, {"items": [item("x")] * 254})]
        wait_for(lambda: server.metric("waiting") == 254)
        waiting.append(pool.submit(server.post, ONE, item(), headers={"X-Timeout-Ms": "30"}))
        wait_for(lambda: server.metric("waiting") == 255)
        assert_refused(server.post(MANY, {"items": [item()] * 2}), 429, "queue_full")
        assert server.get("/health").json() == {"status": "ok"}
        assert_refused(waiting[1].result(), 504, "deadline")
        server.start(server.work)
        assert all(result["reason"] == "no_json" for result in waiting[0].result().json()["results"])
    wait_for(lambda: server.metric('item_errors_total{code="deadline"}') == 1)  # and it was not scored
    assert server.metric("items_total") == 1 + 254
    for header in ("soon", "0", "inf"):
        assert_refused(server.post(ONE, item(), headers={"X-Timeout-Ms": header}), 422, "bad_request")


def test_health_answers_while_the_scorer_is_at_work(custom, tmp_path, monkeypatch):
    with custom.held(tmp_path) as asked:
        assert_refused(custom.post(ONE, item(), headers={"X-Timeout-Ms": "50"}), 504, "deadline")
        assert custom.get("/health").json() == {"status": "ok"}
        assert custom.metric("waiting") == 1 and not asked.done()
    assert asked.result()[0]["ok"]
    wait_for(lambda: custom.metric('item_errors_total{code="deadline"}') == 1)
    assert custom.scored([item(id="b")])[0]["id"] == "b"  # a queue with nothing but what came too late is no end
    # unless it hangs
    monkeypatch.setattr(custom.rewards, "cfg", dataclasses.replace(custom.rewards.cfg, deadline_seconds=0.05))
    assert custom.rewards.late == -math.inf
    with custom.held(tmp_path) as asked:
        wait_for(lambda: custom.rewards.late > 0)
        assert custom.get("/health").status_code == 503
    assert asked.result()[0]["ok"]  # its own client still waits: the deadline of the web side is as before
    wait_for(lambda: custom.rewards.late == -math.inf)


@pytest.mark.services
def test_a_process_that_dies_or_hangs_costs_the_item_it_had(own):
    server = own(item_seconds=2.0)
    processes = server.rewards.processes
    first = processes.submit(os.getpid).result(30)
    os.kill(first, signal.SIGSTOP)
    hung, after = server.scored([item(id=1), item(id=2)])
    assert hung["error"]["code"] == "scorer_timeout" and hung["error"]["retryable"] is True
    assert after["score"] > 0.98 and after["id"] == 2
    second = processes.submit(os.getpid).result(30)
    assert second != first and not alive(first)
    os.kill(second, signal.SIGKILL)
    died, after = server.scored([item(), item()])
    assert died["error"]["code"] == "worker_died" and after["score"] > 0.98
    # nor does a call that fails, or whose result cannot be pickled or unpickled, leave them without work
    unpickled = "type('X', (), {'__reduce__': lambda self: (int, ('x',))})()"  # int('x') is called here, not there
    for text, code in ((unpickled, "internal"), ("1 / 0", "internal"), ("lambda: 0", "worker_died")):
        with pytest.raises(items.Refused) as refused:
            processes.submit(eval, text).result(30)
        assert refused.value.code == code
    assert server.scored([item()])[0]["ok"]


def test_a_bug_is_an_error_and_not_a_score(server, monkeypatch):
    result = reward.result
    with monkeypatch.context() as patch:
        patch.setattr(reward, "result", lambda *_: 1 / 0)
        assert_refused(server.post(ONE, item()), 500, "internal")
        # nor can a part that is not finite be sent
        patch.setattr(reward, "result", lambda x, *args: {**result(x, *args), "cer": math.nan if x.parse_ok else 0.0})
        bad, good = server.scored([item(), item("x")])
        assert bad["error"]["code"] == "internal" and good["score"] == 0
    monkeypatch.setattr(server.rewards, "submit", lambda *_: 1 / 0)
    assert_refused(server.post(ONE, item()), 500, "internal")


@pytest.mark.services
def test_metrics_and_info_say_what_happened(own, monkeypatch):
    server = own(structure_weight=1, accuracy_weight=1, visual_weight=0)
    server.scored([item(), item("x"), item(ground_truth={})])
    for sample, value in {
        "items_total": 3,  # with that of the self-test
        'item_errors_total{code="bad_ground_truth"}': 1, f'requests_total{{endpoint="{MANY}",status="200"}}': 1,
        **{f'part_bucket{{part="score",le="{x}"}}': n for x, n in {"0.0": 1, "0.9": 1, "1.0": 3, "+Inf": 3}.items()},
        'part_count{part="structure"}': 3, "ready": 1,
    }.items():  # fmt: skip
        assert server.metric(sample) == value, sample
    info = server.get("/info").json()
    assert info["limits"] == dict(body_bytes=2**23, items=256, image_bytes=2**22, queue=1024, batch=32)
    assert info["weights"] == dict(structure=0.5, accuracy=0.5, visual=0.0) and info["version"] == reward.VERSION


def test_the_fingerprint_is_of_all_that_scores_depend_on(server, monkeypatch):
    same = (info := server.rewards.info)["fingerprint"]
    assert worker.fingerprint(dict(info, workers=9, limits={})) == same
    for name in ("weights", "scorer", "scorer_identity", "fonts", "coord_space", "version"):
        assert worker.fingerprint({**info, name: "other"}) != same, name
    monkeypatch.setattr(worker, "SOURCES", worker.SOURCES[1:])
    assert worker.fingerprint(info) != same


class Process(Command, Client):
    """The script in a process of its own, which is killed at the end of the test."""

    def __init__(self, request, output, **options):
        port = options.setdefault("port", free_port())
        self.output, self.url = output, f"http://127.0.0.1:{port}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RL_HAND_INSTANCE_ID": "this one"}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        super().__init__([sys.executable, SCRIPT, *arguments], output, environment)
        request.addfinalizer(self.kill)

    def ready(self) -> "Process":
        wait_for(lambda: "ready, " in self.output.read_text() or self.exitcode is not None, 60)
        return self

    def ended(self, code: int) -> str:
        self.join(60)
        assert self.exitcode == code, self.output.read_text()
        return self.output.read_text()


@pytest.mark.services
def test_sigterm_answers_what_is_waiting_and_refuses_what_is_new(request, scorer, tmp_path):
    server = Process(request, tmp_path / "out.txt", scorer=scorer, workers=1, max_batch=1).ready()
    assert server.get("/info").json()["instance_id"] == "this one"
    with server.held(tmp_path, *[item()] * 3) as asked:
        assert server.metric("waiting") == 2  # the processes work on the next batch while the scorer is at work
        os.killpg(server.pid, signal.SIGTERM)  # its processes too: they leave it to the server
        wait_for(lambda: server.get("/health").json() == {"status": "draining"})
        assert_refused(server.post(ONE, item()), 503, "draining")
        assert server.get("/livez").status_code == 200
    assert [result["ok"] for result in asked.result()] == [True] * 4
    said = server.ended(0)
    assert "SIGTERM: answering what is waiting" in said and "Night" not in said and "solution" not in said


@pytest.mark.services
def test_a_server_that_cannot_start_or_whose_scorer_hangs_says_why_and_ends(request, scorer, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = Process(request, tmp_path / "taken.txt", port=other.getsockname()[1])
        failed = Process(request, tmp_path / "failed.txt", scorer="nothing.py:score")
        assert "give another --port" in taken.ended(1)
        assert "there is no file 'nothing.py'" in failed.ended(1)
    server = Process(request, tmp_path / "out.txt", scorer=scorer, workers=1, deadline_seconds=0.3).ready()
    child = int(subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, check=True).stdout)
    hang = item(extra_info={"do": "wait", "file": str(tmp_path / "going")})
    assert_refused(server.post(ONE, hang), 504, "deadline")
    assert "the model hangs" in server.ended(1)
    wait_for(lambda: not alive(child))  # the processes end with the server, however it ends
