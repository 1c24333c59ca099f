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
import threading
import time
from types import SimpleNamespace

import pytest
import requests
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_poster_server import ONE, Server
from test_poster_server import item as poster_item
from test_teacher_server import GENERATE, TOP_K, request, teacher_server
from test_teacher_server import Server as TeacherServer

from common import service, teacher_worker
from common.distributed import OutageError
from common.reward_client import RewardService
from common.service import Service, Unavailable
from grpo.poster import items, layout, reward, web
from grpo.poster.fonts import Fonts
from grpo.poster.layout import Malformed

FUZZ = settings(derandomize=True, deadline=None, max_examples=60, database=None)
TRUTH = {"canvas": {"width": 100, "height": 100}, "layers": [
    {"type": "text", "text": "Night Market", "x": 10, "y": 10, "width": 80, "height": 20, "font_size": 12},
    {"type": "shape", "x": 10, "y": 50, "width": 80, "height": 40, "fill": "#204060"}]}  # fmt: skip
GOLD, FONTS = json.dumps(TRUTH), Fonts()
NUMBERS = st.one_of(
    st.integers(-(10**6), 10**6), st.floats(), st.sampled_from([0, -0.0, 1e-300, 1e308, 10**400, -(10**30), 2**63])
)
NAMES = ["layers", "canvas", "type", "x", "y", "width", "height", "text", "font_size", "color", "opacity", "z", "src",
         "fill", "align", "background"]  # fmt: skip
ODD = ["image", "#FFF", "Night Market", "\ud800", "\x00", "```json", "{", '"', "</think>", ""]
WORDS = st.sampled_from([*NAMES, *ODD])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), WORDS),
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


# ---- the parser and the score of a poster ----


@FUZZ
@given(st.one_of(st.text(), VALUES.map(json.dumps), POSTERS, broken(GOLD), broken(f"```json\n{GOLD}\n```")))
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
    assert 0 < value["score"] <= 1 and all(math.isfinite(side) for layer in poster.layers for side in layer.box)
    # nothing comes from nothing: a text counts only if the truth has one like it, and a layer only where it is seen
    texts = [layer.text for layer in poster.layers if layer.kind == "text"]
    if not any(reward.similarity(text, "Night Market") for text in texts):
        assert value["accuracy"] == 0
    if all(layer.x >= 1 or layer.y >= 1 or layer.box[2] <= 0 or layer.box[3] <= 0 for layer in poster.layers):
        assert (value["structure"], value["accuracy"], value["visual"]) == (0, 0, 0) and value["score"] <= 0.01


def test_the_good_poster_itself_has_the_whole_score():
    assert reward.score(GOLD, TRUTH, fonts=FONTS)["score"] > 0.9  # or the properties above would say little


# ---- requests ----


@FUZZ
@given(
    st.one_of(
        st.binary(max_size=200),
        VALUES.map(lambda x: json.dumps(x).encode()),
        st.builds(lambda x: json.dumps({"items": x}).encode(), st.lists(VALUES, max_size=3) | VALUES),
        st.builds(
            lambda changes, many: json.dumps({"items": [poster_item(), poster_item(**changes)]} if many
                                             else poster_item(**changes)).encode(),
            st.dictionaries(st.sampled_from(["id", "solution_str", "ground_truth", "extra_info"]),
                            VALUES | st.builds(lambda x: {"images": x}, VALUES), max_size=2), st.booleans(),
        ),
        broken(json.dumps(poster_item())).map(lambda text: text.encode(errors="surrogatepass")),
    ),
    st.booleans(),
)  # fmt: skip
def test_a_body_holds_items_or_is_refused(body, many):
    try:
        for item in items.read(body, many):
            assert isinstance(item.solution, str) and isinstance(item.truth, str)
            extra = json.loads(item.extra_info, parse_constant=pytest.fail)
            assert isinstance(extra, dict) and all(isinstance(x, str) for x in item.images.values())
    except items.Refused as refused:
        assert refused.code in ("bad_json", "bad_request") and len(refused.text) > 20


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def teacher():
    server = TeacherServer("toy-teacher")
    yield server
    server.stop()


def healthy(server) -> bool:
    answer = requests.get(f"{server.url}/health", timeout=2)
    return answer.status_code == 200


def raw(server, data: bytes, half_closed: bool) -> int:
    """The status that the server answers to some bytes, after which it hears no more; 0 for none."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 5) as connection:
        answer = b""
        with contextlib.suppress(OSError):  # the server may hang up before it has heard all
            connection.sendall(data)
            if half_closed:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
    return int(answer.split()[1]) if answer else 0


GOOD = json.dumps(poster_item()).encode()
PACKED = gzip.compress(GOOD)
POST = b"POST /compute_reward HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"\x00\xff" * 50, {400}),
        (POST + b"Content-Length: -5\r\n\r\n", {400}),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", {400}),
        (POST + b"Content-Length: 99999\r\n\r\nhalf", {0, 400}),  # whoever has gone hears nothing
        (POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", {400}),
        (POST + b"X: " + b"a" * 200_000 + b"\r\n\r\n", {0, 400, 431}),
        (POST + b"\r\n", {400}),
        (POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED) + PACKED, {400}),
        (POST + b"Content-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD, {200}),
        (POST + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD + b"rubbish", {200}),  # of a next request
    ],
    ids=range(10),
)  # fmt: skip
def test_what_is_no_request_of_http_leaves_the_server_at_work(server, data, statuses):
    assert raw(server, data, half_closed=0 in statuses) in statuses and healthy(server)


def test_a_body_above_the_limit_is_refused_although_it_is_still_being_sent(server, teacher, monkeypatch):
    monkeypatch.setattr(web, "MAX_BODY", 2**22)
    monkeypatch.setattr(teacher_server, "MAX_BODY", 2**22)
    for path, own in ((ONE, server), (TOP_K, teacher)):
        chunks = (b"x" * 2**20 for _ in range(12))
        for body in (b"[" * 2**23, chunks):
            answer = requests.post(own.url + path, data=body, timeout=20)
            assert answer.status_code == 413 and f"more than {2**22} bytes" in answer.json()["error"]
        assert healthy(own)


def test_a_client_that_sends_a_byte_a_second_stands_in_nobodys_way(server, teacher):
    for own in (server, teacher):
        with contextlib.ExitStack() as stack:
            for head in (b"POST", POST, POST + b"Content-Length: 100\r\n\r\n{"):
                for _ in range(5):
                    slow = socket.create_connection(("127.0.0.1", int(own.url.rpartition(":")[2])), 5)
                    stack.enter_context(slow).sendall(head)
            assert healthy(own)
    assert server.post(ONE, poster_item()).json()["score"] > 0.98


def test_a_body_that_does_not_come_is_not_waited_for_longer_than_its_deadline(server, teacher, monkeypatch):
    cfg = dataclasses.replace(teacher.teacher.cfg, deadline_seconds=0.2)
    monkeypatch.setattr(teacher.teacher, "cfg", cfg)

    def body():
        yield b"{"
        time.sleep(0.4)
        yield b"}"

    for own, path in ((server, ONE), (teacher, TOP_K)):
        answer = requests.post(own.url + path, data=body(), headers={"X-Timeout-Ms": "200"}, timeout=5)
        assert answer.status_code == 504 and "the body was not complete after 0.2 s" in answer.json()["error"]


def test_paths_methods_and_names_that_are_not_known(server, teacher):
    for own in (server, teacher):
        for path in ("/nope", "//health", "/%2e%2e/info", "/health%00", "/" + "a" * 30_000):
            assert requests.get(own.url + path, timeout=5).status_code == 404
        for method in ("PUT", "DELETE", "PATCH", "TRACE", "FOO"):
            assert requests.request(method, f"{own.url}/health", timeout=5).status_code == 405
        for host in ("evil.example", "[", ""):
            assert requests.get(f"{own.url}/info", headers={"Host": host}, timeout=5).status_code == 403
        assert requests.get(f"{own.url}/info", headers={"Host": "LOCALHOST:1"}, timeout=5).status_code == 200


# ---- requests to a teacher ----


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
    "negative shape": tensor_file({"tokens": entry(0, 4, -1)}, b"1234"),
    "empty": tensor_file({"tokens": entry(0, 0, 0)}),
    "length above all": tensor_file(b"{}", size=2**63),
    "length beyond the body": tensor_file(b"{}", size=3),
    "long header": tensor_file(b"{" + b" " * 2**17 + b"}"),
    "brackets": tensor_file(b'{"a":' + b"[" * 60_000),
    "names": tensor_file({f"a{i}": entry(0, 0, 0) for i in range(900)}),
    "metadata that are a list": tensor_file({"__metadata__": [1], **WHOLE}, DATA),
    "metadata with a number": tensor_file({"__metadata__": {"top_k": 1}, **WHOLE}, DATA),
    "metadata twice": tensor_file(b'{"__metadata__":{},"__metadata__":{},' + json.dumps(WHOLE).encode()[1:], DATA),
    "metadata that are nothing": tensor_file({"__metadata__": None, **WHOLE}, DATA),  # all options as they are
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused(teacher, name):
    answer = requests.post(teacher.url + TOP_K, data=LIES[name], timeout=10)
    if name == "metadata that are nothing":
        assert answer.status_code == 200
    else:
        assert answer.status_code == 422 and len(answer.json()["error"]) > 20, answer.text
    assert healthy(teacher)


STUB = SimpleNamespace(
    info={"vocabulary_size": 64, "max_tokens": 512, "max_top_k": 64}, cfg=SimpleNamespace(deadline_seconds=1.0)
)
OPTIONS = ["top_k", "temperature", "shared", "seed", "max_new_tokens", "deadline_seconds", "other"]


@FUZZ
@given(
    st.sampled_from([TOP_K, GENERATE]),
    st.dictionaries(st.sampled_from(["tokens", "prompt_lengths", "completion_lengths", "numbers"]),
                    st.builds(lambda x, kind: torch.tensor(x).to(kind), st.lists(st.integers(-2, 70), max_size=12),
                              st.sampled_from([torch.int32, torch.int64, torch.float32])), max_size=2),
    st.dictionaries(st.sampled_from(OPTIONS), st.one_of(st.text(max_size=5), NUMBERS.map(str)), max_size=2),
)  # fmt: skip
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
    with pytest.raises(ValueError, match="2 sequences: must be at most 1; send fewer at a time"):
        teacher_worker.read(TOP_K, service.pack(*request()), STUB)


# ---- answers ----


@contextlib.contextmanager
def talking(*parts: bytes, pause: float = 0.0, again: int = 1):
    """A server that says this to whoever connects, whatever is asked; the last part `again` times."""
    listener, stop = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def talk(connection):
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            for part in (*parts, *[parts[-1]] * (again - 1)):
                connection.sendall(part)
                if stop.wait(pause):
                    return

    def accept():
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=talk, args=listener.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ([OK + b"Content-Length: 100\r\n\r\n{"], Unavailable, "IncompleteRead"),
        ([b"rubbish\r\n\r\n"], Unavailable, "BadStatusLine"),
        ([b""], Unavailable, "Connection"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], ValueError, "status 204"),
        ([b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"], ValueError, "status 302"),
        ([b"HTTP/1.1 503 No\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n"], Unavailable, "status 503"),
        ([b"HTTP/1.1 500 No\r\nContent-Length: 60000\r\n\r\n" + b"[" * 60_000], RuntimeError, "status 500"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n"], Unavailable, "InvalidChunkLength|IncompleteRead"),
    ],
    ids=range(8),
)  # fmt: skip
def test_an_answer_that_is_none_is_an_error_of_the_right_kind(said, error, message):
    with talking(*said) as url, pytest.raises(error, match=message):
        Service(url, timeout_s=2, patience_s=1).once("GET", "/info")


@pytest.mark.parametrize(
    "said",
    [[OK, b"X: y\r\n"], [b"HTTP/1.1 200 O", b"K"], [b"HTTP/1.1 100 Continue\r\n\r\n"],
     [OK + b"Content-Length: 100000\r\n\r\n", b"x"]],
    ids=["header", "status", "continue", "body"],
)  # fmt: skip
def test_an_answer_that_drips_is_given_up(monkeypatch, said):
    """Each byte comes in time; the whole would take two seconds, and then be none."""
    monkeypatch.setattr(service, "CONNECT_SECONDS", 0.1)
    late = "no answer within 0.1 s|not complete after 0.1 s|Read timed out"
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


@pytest.fixture
def client(monkeypatch):
    """A client whose service answers `client.said`."""
    monkeypatch.setattr(Service, "wait_until_ready", lambda *_: None)
    monkeypatch.setattr(Service, "get", lambda *_: b'{"fingerprint": "one"}')
    client = RewardService("http://localhost:1")
    monkeypatch.setattr(Service, "post", lambda *_: client.said)
    return client


GOOD_RESULTS = [{"id": "0", "ok": True, "score": 0.25, "structure": 0.5}, {"id": "1", "ok": True, "score": 0.75}]


def answer(results, **more) -> bytes:
    return json.dumps({"results": results, "fingerprint": "one", **more}).encode(errors="surrogatepass")


def ask(client) -> dict:
    return client.scores(["a", "b"], [None, None], {}, 2)


@settings(FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture])  # it holds nothing but the last answer
@given(
    st.one_of(
        st.binary(max_size=60),
        VALUES.map(lambda x: json.dumps(x).encode()),
        VALUES.map(answer),
        st.lists(VALUES, min_size=2, max_size=2).map(answer),
        st.builds(lambda changes: answer([{**GOOD_RESULTS[0], **changes}, GOOD_RESULTS[1]]),
                  st.dictionaries(st.sampled_from(["id", "ok", "score", "error", "structure", "service", "ms"]), VALUES,
                                  min_size=1, max_size=3)),
        broken(answer(GOOD_RESULTS).decode()).map(lambda text: text.encode(errors="surrogatepass")),
    )
)  # fmt: skip
def test_no_answer_becomes_a_score_that_it_does_not_hold(client, said):
    client.said = said
    try:
        named = ask(client)
    except OutageError as error:
        assert "http://localhost:1" in str(error) or "fingerprint" in str(error)
        return
    results = json.loads(said)["results"]
    values, weight = named.pop("service")
    assert weight == 1.0 and [result["id"] for result in results] == ["0", "1"]
    for result, value in zip(results, values, strict=True):
        assert result["ok"] is True and value == result["score"] and 0 <= value <= 1
    assert all(weight == 0.0 for _, weight in named.values())


@pytest.mark.parametrize(
    "said",
    [
        b"<html>200</html>", b"[" * 100_000, answer(GOOD_RESULTS)[:-9], answer(GOOD_RESULTS[:1]),
        answer(GOOD_RESULTS * 2), answer(GOOD_RESULTS[::-1]), answer([GOOD_RESULTS[0]] * 2),
        answer([{"id": "0", "ok": True}, GOOD_RESULTS[1]]), answer([{**GOOD_RESULTS[0], "ok": 1}, GOOD_RESULTS[1]]),
        answer([{**GOOD_RESULTS[0], "ok": "false"}, GOOD_RESULTS[1]]),
        answer([{**GOOD_RESULTS[0], "score": "1.0"}, GOOD_RESULTS[1]]),
        answer([{**GOOD_RESULTS[0], "score": 10**400}, GOOD_RESULTS[1]]),
        answer([{**GOOD_RESULTS[0], "score": math.inf}, GOOD_RESULTS[1]]),
    ],
    ids=range(13),
)  # fmt: skip
def test_an_answer_that_is_no_score_is_an_outage(client, said):
    client.said = said
    with pytest.raises(OutageError, match="Mend the service"):
        ask(client)


def test_a_number_of_a_result_never_takes_the_place_of_the_score(client):
    client.said = answer([{**result, "service": 0.0, "huge": 10**400, "odd": math.nan} for result in GOOD_RESULTS])
    assert ask(client)["service"] == ([0.25, 0.75], 1.0)
