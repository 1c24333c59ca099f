"""What nobody would send on purpose: to the poster parser, to both servers, and from a server to its client.

A text that holds no poster scores 0, a request that is none is refused with a reason, an answer that is none is an
error: nothing raises anything else, waits for ever, takes memory without end, or becomes a score.
"""

import contextlib
import dataclasses
import gzip
import json
import math
import re
import socket
import struct
import time
from types import SimpleNamespace

import pytest
import requests
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_poster_server import ONE, Server
from test_poster_server import item as poster_item
from test_reward_client import GOOD_RESULTS, IDS, answer, first, scores, stub_client
from test_teacher_server import BINARY, GENERATE, TOP_K, request, teacher_server
from test_teacher_server import Server as TeacherServer

from common.base import service
from common.base.distributed import OutageError
from common.distill import teacher_worker
from grpo.poster import items, layout, reward, web
from grpo.poster.fonts import Fonts
from grpo.poster.layout import Malformed

pytestmark = pytest.mark.fuzz
FUZZ = settings(derandomize=True, deadline=None, max_examples=60, database=None)
TRUTH = {"canvas": {"width": 100, "height": 100}, "layers": [
    {"type": "text", "text": "Night Market", "x": 10, "y": 10, "width": 80, "height": 20, "font_size": 12},
    {"type": "shape", "x": 10, "y": 50, "width": 80, "height": 40, "fill": "#204060"}]}  # fmt: skip
GOLD, FONTS = json.dumps(TRUTH), Fonts()
NUMBERS = st.integers(-(10**6), 10**6) | st.floats() | st.sampled_from([1e-300, 1e308, 10**400, 2**63])
NAMES = ["layers", "canvas", "type", "x", "y", "width", "height", "text", "font_size", "color", "opacity", "z", "src",
         "fill", "align", "background"]  # fmt: skip
ODD = ["image", "#FFF", "Night Market", "\ud800", "\x00", "```json", "{", '"', "</think>", ""]
WORDS = st.sampled_from([*NAMES, *ODD])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=5),
    max_leaves=12,
)
LAYERS = st.fixed_dictionaries(
    {"type": st.sampled_from([*layout.KINDS, "title", "video"]), **dict.fromkeys(NAMES[3:7], NUMBERS)},
    optional={"text": st.text(max_size=30), **dict.fromkeys(NAMES[8:], VALUES)},
)
POSTERS = st.fixed_dictionaries({"canvas": VALUES, "layers": st.lists(LAYERS | VALUES, max_size=6)}).map(json.dumps)


@st.composite
def broken(draw, text: str) -> str:
    """A text with some pieces cut out, put in or doubled."""
    for _ in range(draw(st.integers(1, 3))):
        start, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        end = min(end, start + draw(st.sampled_from([0, 1, 5, 1000])))
        text = text[:start] + draw(st.sampled_from(["", '"', "{", "}", "]", ",", "//x\n", "1e999", "\ud800", "```"])) \
            + text[end:]  # fmt: skip
    return text


@FUZZ
@given(
    st.one_of(st.just(GOLD), st.text(), VALUES.map(json.dumps), POSTERS, broken(GOLD), broken(f"```json\n{GOLD}\n```"))
)
def test_any_text_is_a_poster_or_malformed_and_has_its_score(text):
    try:
        poster = layout.parse(text, layout.ground_truth(TRUTH))
    except Malformed as error:
        assert re.fullmatch("[a-z_]+", error.reason)
        poster = None
    value = reward.score(text, TRUTH, fonts=FONTS)
    json.dumps(value, allow_nan=False)
    if poster is None:
        assert value["score"] == 0 and not value["parse_ok"] and value["reason"]
        return
    assert (0.9 if text == GOLD else 0) < value["score"] <= 1
    assert all(math.isfinite(side) for layer in poster.layers for side in layer.box)
    # nothing comes from nothing: a text counts only if the truth has one like it, and a layer only where it is seen
    texts = [layer.text for layer in poster.layers if layer.kind == "text"]
    if not any(reward.similarity(text, "Night Market") for text in texts):
        assert value["accuracy"] == 0
    if all(layer.x >= 1 or layer.y >= 1 or layer.box[2] <= 0 or layer.box[3] <= 0 for layer in poster.layers):
        assert (value["structure"], value["accuracy"], value["visual"]) == (0, 0, 0) and value["score"] <= 0.01


def as_json(value) -> bytes:
    return json.dumps(value).encode(errors="surrogatepass")


CHANGES = st.dictionaries(st.sampled_from(["id", "solution_str", "ground_truth", "extra_info", "prompt", "step"]),
                          VALUES | st.builds(lambda x: {"images": x}, VALUES), max_size=2)  # fmt: skip
ITEMS = CHANGES.map(lambda changes: poster_item(**changes))
BODIES = st.binary(max_size=200) | VALUES.map(as_json) | ITEMS.map(as_json)
LISTS = VALUES | st.lists(VALUES, max_size=3) | ITEMS.map(lambda item: [poster_item(), item])
BODIES |= LISTS.map(lambda items: as_json({"items": items}))
BODIES |= broken(json.dumps(poster_item())).map(lambda text: text.encode(errors="surrogatepass"))


@FUZZ
@given(BODIES, st.booleans())
def test_a_body_holds_items_or_is_refused(body, many):
    try:
        for item in items.read(body, many):
            assert isinstance(item.solution, str) and isinstance(item.truth, str)
            extra, _ = (json.loads(x, parse_constant=pytest.fail) for x in (item.extra_info, item.prompt))
            assert isinstance(extra, dict) and all(isinstance(x, str) for x in item.images.values())
    except items.Refused as refused:
        assert refused.code in ("bad_json", "bad_request") and len(refused.text) > 20


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def teacher(model_folders):
    teacher = TeacherServer(model_folders["teacher"])
    yield teacher
    teacher.stop()


def healthy(server) -> bool:
    return requests.get(f"{server.url}/health", timeout=2).status_code == 200


def connected(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 5)


def body(content: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([*headers, b"Content-Length: %d" % len(content), b"", content])


def exchange(server, data: bytes, hang_up: bool = False) -> bytes:
    """What a server answers to bytes, until it closes the connection or says nothing for a second."""
    answer = b""
    with connected(server) as connection, contextlib.suppress(OSError):  # the server may hang up before it heard all
        connection.sendall(data)
        if hang_up:
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            answer += part
            connection.settimeout(1)
    return answer


GOOD = json.dumps(poster_item()).encode()
JSON = {"Content-Type": "application/json"}
POST = b"POST /compute_reward HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(("data", "statuses"), [
    (b"\x00\xff" * 50, {400}), (POST + b"Content-Length: -5\r\n\r\n", {400}),
    (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", {400}),
    (POST + b"Content-Length: 99999\r\n\r\nhalf", {0, 400}),  # whoever has gone hears nothing
    (POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", {400}),
    (POST + b"X: " + b"a" * 200_000 + b"\r\n\r\n", {0, 400, 431}), (POST + b"\r\n", {400}),
    (POST + body(gzip.compress(GOOD), b"Content-Encoding: gzip"), {400}),
    (POST + body(GOOD) + b"rubbish", {200}),  # of a next request
], ids=range(9))  # fmt: skip
def test_what_is_no_request_of_http_leaves_the_server_at_work(server, data, statuses):
    answer = exchange(server, data, hang_up=0 in statuses)
    assert int((answer or b"_ 0").split()[1]) in statuses and healthy(server)


@pytest.mark.parametrize(("headers", "status"), [
    ([], 200), ([b"Origin: http://localhost:%d"], 200), ([b"Sec-Fetch-Site: none"], 200),
    ([b"Referer: http://LOCALHOST:%d/x"], 200),
    *(([line], 403) for line in (
        b"Origin: http://evil.example", b"Origin: null", b"Origin: ", b"Origin: http://localhost", b"Origin: http://[",
        b"Origin: http://localhost:1", b"Origin: http://localhost:%d.evil.example", b"origin: http://127.0.0.1:%d",
        b"Origin: http://localhost:%d@evil.example", b"Referer: https://evil.example/localhost:%d",
        b"Sec-Fetch-Site: cross-site", b"Sec-Fetch-Site: same-site")),
    ([b"Origin: http://localhost:%d", b"Origin: http://evil.example"], 403),
])  # fmt: skip
def test_a_web_page_of_another_site_is_not_answered(server, teacher, headers, status):
    for own, path, sent in ((server, ONE, GOOD), (teacher, TOP_K, service.pack(*request()))):
        port = int(own.url.rpartition(":")[2])
        head = [line % port if b"%d" in line else line for line in [b"Host: localhost:%d", *headers]]
        kind = b"application/json" if own is server else b"application/octet-stream"
        for verb, ending in (
            (b"POST %s" % path.encode(), body(sent, b"Content-Type: " + kind)),
            (b"GET /info", b"\r\n"),
        ):
            answer = exchange(own, b"\r\n".join([verb + b" HTTP/1.1", b"Connection: close", *head, ending]))
            assert int(answer.split()[1]) == status, answer
            assert status == 200 or (b"web pages" in answer and b"score" not in answer)
            assert b"access-control" not in answer.lower()


@pytest.mark.parametrize("kind", [
    None, "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "application/jsonp", "",
    "multipart/form-data; boundary=x", "text/plain, application/json", "text/plain; application/octet-stream",
])  # fmt: skip
def test_a_body_that_a_page_can_send_without_asking_is_refused(server, teacher, kind):
    good, tensors = [(server, ONE, GOOD, JSON)], [(teacher, TOP_K, service.pack(*request()), BINARY)]
    for own, path, sent, right in good + tensors:
        headers = {} if kind is None else {"Content-Type": kind}
        answer = requests.post(own.url + path, data=sent, headers=headers, timeout=10)
        assert answer.status_code == 415 and right["Content-Type"] in answer.json()["error"]
        assert answer.headers["Connection"] == "close"
        exact = {"Content-Type": right["Content-Type"].upper() + " ; charset=utf-8"}
        assert requests.post(own.url + path, data=sent, headers=exact, timeout=20).status_code == 200
        assert requests.options(own.url + path, timeout=5).status_code == 405  # a preflight
    assert requests.post(server.url + ONE, data=tensors[0][2], headers=BINARY, timeout=5).status_code == 415


LENGTH, CHUNKED = b"Content-Length: %d\r\n", b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize("lines", [
    LENGTH + LENGTH, LENGTH + b"Content-Length: 4\r\n", b"content-length: 4\r\n" + LENGTH, LENGTH + CHUNKED,
    CHUNKED + LENGTH, CHUNKED + CHUNKED, b"Content-Length: %d, %d\r\n", b"Content-Length: +%d\r\n",
    LENGTH + b"Transfer-Encoding:\r\n chunked\r\n", LENGTH + b"Transfer-Encoding : chunked\r\n",
    LENGTH + b"Transfer-Encoding: identity\r\n", LENGTH + b"X: y\nContent-Length: %d\r\n",
])  # fmt: skip
def test_a_request_with_two_lengths_is_refused_and_nothing_after_it_is_read(server, teacher, lines):
    for own, path, sent in ((server, ONE, GOOD), (teacher, TOP_K, service.pack(*request()))):
        kind = b"application/json" if own is server else b"application/octet-stream"
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\n" % (path.encode(), kind)
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(sent), sent)
        lengths = lines % ((len(sent),) * lines.count(b"%d"))
        hidden = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for content in (sent, chunks):
            answer = exchange(own, head + lengths + b"\r\n" + content + hidden)
            assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1, answer
        if lines == LENGTH + CHUNKED:  # each alone is fine, and so is a request behind it
            for ending in (lengths.partition(CHUNKED)[0] + b"\r\n" + sent, CHUNKED + b"\r\n" + chunks):
                assert exchange(own, head + ending + hidden).count(b"HTTP/1.1 200") == 2


def test_a_body_above_the_limit_is_refused_although_it_is_still_being_sent(server, teacher, monkeypatch):
    monkeypatch.setattr(web, "MAX_BODY", 2**22)
    monkeypatch.setattr(teacher_server, "MAX_BODY", 2**22)
    for path, own, kind in ((ONE, server, JSON), (TOP_K, teacher, BINARY)):
        chunks = (b"x" * 2**20 for _ in range(12))
        for body in (b"[" * 2**23, chunks):
            answer = requests.post(own.url + path, data=body, headers=kind, timeout=20)
            assert answer.status_code == 413 and f"more than {2**22} bytes" in answer.json()["error"]
        assert healthy(own)


def test_a_client_that_sends_a_byte_a_second_stands_in_nobodys_way(server, teacher):
    for own in (server, teacher):
        with contextlib.ExitStack() as stack:
            for head in 5 * (b"POST", POST, POST + b"Content-Length: 100\r\n\r\n{"):
                stack.enter_context(connected(own)).sendall(head)
            assert healthy(own)


def test_a_body_that_does_not_come_is_not_waited_for_longer_than_its_deadline(server, teacher, monkeypatch):
    cfg = dataclasses.replace(teacher.teacher.cfg, deadline_seconds=0.2)
    monkeypatch.setattr(teacher.teacher, "cfg", cfg)

    def body():
        yield b"{"
        time.sleep(0.4)
        yield b"}"

    for own, path, kind in ((server, ONE, JSON), (teacher, TOP_K, BINARY)):
        answer = requests.post(own.url + path, data=body(), headers={"X-Timeout-Ms": "200", **kind}, timeout=5)
        assert answer.status_code == 504 and "the body was not complete after 0.2 s" in answer.json()["error"]


def test_paths_methods_and_names_that_are_not_known(server, teacher):
    for own in (server, teacher):
        for path in ("/nope", "//health", "/%2e%2e/info", "/health%00", "/" + "a" * 30_000):
            assert requests.get(own.url + path, timeout=5).status_code == 404
        for method in ("PUT", "TRACE", "FOO"):
            assert requests.request(method, f"{own.url}/health", timeout=5).status_code == 405
        for host, status in (("evil.example", 403), ("[", 403), ("", 403), ("LOCALHOST:1", 200)):
            assert requests.get(f"{own.url}/info", headers={"Host": host}, timeout=5).status_code == status


def tensor_file(header: bytes | dict, data: bytes = b"", size: int | None = None) -> bytes:
    """The safetensors format, with whatever header."""
    header = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(header) if size is None else size) + header + data


def entry(start: int, end: int, *shape: int, dtype: str = "I32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


WHOLE = {"tokens": entry(0, 8, 2), "prompt_lengths": entry(8, 12, 1), "completion_lengths": entry(12, 16, 1)}
DATA = struct.pack("<4i", 5, 6, 1, 1)
LIES = {
    "beyond the body": tensor_file({"tokens": entry(0, 400, 100)}, b"1234"),
    "negative offset": tensor_file({"tokens": entry(-4, 0, 1)}, b"1234"),
    "overlap": tensor_file({"tokens": entry(0, 4, 1), "prompt_lengths": entry(0, 4, 1)}, b"1234"),
    "unknown type": tensor_file({"tokens": entry(0, 4, 1, dtype="I33")}, b"1234"),
    "type that torch has not": tensor_file({"tokens": entry(0, 1, 2, dtype="F4")}, b"1"),
    "shape above all": tensor_file({"tokens": entry(0, 4, 2**62, 4)}, b"1234"),
    "empty": tensor_file({"tokens": entry(0, 0, 0)}),
    "length above all": tensor_file(b"{}", size=2**63),
    "long header": tensor_file(b"{" + b" " * 2**17 + b"}"),
    "brackets": tensor_file(b'{"a":' + b"[" * 60_000),
    "metadata that are a list": tensor_file({"__metadata__": [1], **WHOLE}, DATA),
    "metadata twice": tensor_file(b'{"__metadata__":{},"__metadata__":{},' + json.dumps(WHOLE).encode()[1:], DATA),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused(teacher, name):
    answer = requests.post(teacher.url + TOP_K, data=LIES[name], headers=BINARY, timeout=10)
    assert answer.status_code == 422 and len(answer.json()["error"]) > 20, answer.text
    whole = tensor_file({"__metadata__": None, **WHOLE}, DATA)  # all options stay what they are
    assert requests.post(teacher.url + TOP_K, data=whole, headers=BINARY, timeout=10).status_code == 200


STUB = SimpleNamespace(info={"vocabulary_size": 64, "max_tokens": 512, "max_top_k": 64},
                       cfg=SimpleNamespace(deadline_seconds=1.0))  # fmt: skip
OPTIONS = ["top_k", "temperature", "shared", "seed", "max_new_tokens", "deadline_seconds", "other"]
TENSORS = st.builds(lambda x, kind: torch.tensor(x).to(kind), st.lists(st.integers(-2, 70), max_size=12),
                    st.sampled_from([torch.int32, torch.int64, torch.float32]))  # fmt: skip
PARTS = st.sampled_from(["tokens", "prompt_lengths", "completion_lengths", "numbers"])


CHOSEN = st.dictionaries(st.sampled_from(OPTIONS), st.text(max_size=5) | NUMBERS.map(str), max_size=2)


@FUZZ
@given(st.sampled_from([TOP_K, GENERATE]), st.dictionaries(PARTS, TENSORS, max_size=2), CHOSEN)
def test_a_request_to_a_teacher_is_a_job_or_refused(path, tensors, options):
    own, said = request(**({"max_new_tokens": 4} | options))
    own["numbers"] = torch.tensor([1, 2])
    try:
        job = teacher_worker.read(path, service.pack(own | tensors, said), STUB)
    except ValueError as error:
        assert len(str(error)) > 20
        return
    assert all(int(ids.min()) >= 0 and int(ids.max()) < 64 for ids in job.prompts + job.completions)
    assert 0 <= job.temperature < math.inf and 0 < job.shared <= 64 and job.deadline > 0
    assert (1 <= job.top_k <= job.shared) if path == TOP_K else (1 <= job.max_new_tokens <= 512)


def test_sequences_of_a_request_have_a_limit(monkeypatch):
    monkeypatch.setattr(teacher_worker, "MAX_SEQUENCES", 1)
    with pytest.raises(ValueError, match=r"2 sequences: .*at most 1"):
        teacher_worker.read(TOP_K, service.pack(*request()), STUB)


ANSWERS = st.binary(max_size=60) | VALUES.map(as_json) | st.lists(VALUES, max_size=2).map(answer)
ANSWERS |= broken(answer(GOOD_RESULTS).decode()).map(lambda text: text.encode(errors="surrogatepass"))
KEYS = st.sampled_from(["id", "ok", "score", "error", "structure", "service", "ms"])
ANSWERS |= st.dictionaries(KEYS, VALUES, min_size=1, max_size=3).map(lambda changes: first(**changes))


@settings(FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example patches the same
@given(ANSWERS)
def test_no_answer_becomes_a_score_that_it_does_not_hold(monkeypatch, said):
    try:
        named = scores(stub_client(monkeypatch, said), ["a", "b"], 2)
    except OutageError as error:
        assert "http://localhost:1" in str(error) or "fingerprint" in str(error)
        return
    results = json.loads(said)["results"]
    values, weight = named.pop("service")
    assert weight == 1.0 and [result["id"] for result in results] == IDS
    for result, value in zip(results, values, strict=True):
        assert result["ok"] is True and value == result["score"] and 0 <= value <= 1
    assert all(weight == 0.0 for _, weight in named.values())
