"""HTTP endpoints of the reward service, with its token and body limits; worker.py computes the scores."""

import asyncio
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from common.base import serving
from grpo.poster import counts, items
from grpo.poster.items import MAX_BODY, Refused
from grpo.poster.worker import Rewards

LARGE = 2**18  # bytes; larger bodies are parsed in another process, so that /health need not wait
OPEN = ("/health", "/livez")  # need no token


def create_app(rewards: Rewards) -> Callable:
    """Creates the ASGI application, for HTTP only.

    Args:
        rewards: scores the requests; its `load` and `work` run in another thread.
    """
    cfg = rewards.cfg
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    expected = f"Bearer {cfg.secret}".encode()
    instance_id = os.environ.get("RL_HAND_INSTANCE_ID") or secrets.token_hex(8)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return _error(error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        code = "not_found" if error.status_code == 404 else "bad_method"
        return _error(Refused(code, f"{request.method} {request.url.path:.80}: there is no such thing"))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:  # uvicorn logs it
        return _error(Refused("internal", f"{type(error).__name__}: see the log of the server"))

    @app.get("/health")
    async def health() -> Response:
        if rewards.late > 0:
            return _answer({"status": "stuck: the scorer is at work for longer than anybody waits"}, 503)
        ready = rewards.state == "ready"
        return _answer({"status": "ok" if ready else rewards.state}, 200 if ready else 503)

    @app.get("/livez")
    async def livez() -> Response:
        return _answer({"status": "alive"})

    @app.get("/info")
    async def info() -> Response:
        rewards.require_ready()
        missing = {"items": rewards.missing_items, "characters": "".join(sorted(rewards.missing))}
        return _answer(rewards.info | {"missing_glyphs": missing, "instance_id": instance_id})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(rewards.counts.text(rewards.gauges()), media_type="text/plain; version=0.0.4")

    async def score(request: Request, many: bool) -> list[tuple[items.Item, dict[str, Any] | Refused]]:
        seconds = items.timeout_seconds(request.headers.get("X-Timeout-Ms"), cfg.deadline_seconds)
        body = await _body(request, seconds)
        rewards.require_ready()
        # before parsing, which takes longer than refusing; inside a string the quotes would be escaped
        rewards.require_room(body.count(b'"solution_str"'))
        if len(body) > LARGE:
            asked = await asyncio.wrap_future(rewards.processes.submit(items.read, body, many))
        else:
            asked = items.read(body, many)
        future = asyncio.wrap_future(rewards.submit(asked, seconds))
        try:
            results = await asyncio.wait_for(future, seconds)
        except TimeoutError:
            raise Refused("deadline", f"not scored within {seconds:g} s") from None
        return list(zip(asked, results, strict=True))

    def common(start: float) -> dict[str, Any]:
        return {"fingerprint": rewards.info["fingerprint"], "ms": round(1000 * (time.monotonic() - start), 3)}

    @app.post("/compute_reward")
    async def compute_reward(request: Request) -> Response:
        start = time.monotonic()
        ((item, result),) = await score(request, many=False)
        if isinstance(result, Refused):
            raise result
        return _answer({"id": item.id, **result, **common(start)})

    @app.post("/compute_reward_batch")
    async def compute_reward_batch(request: Request) -> Response:
        start = time.monotonic()
        results = [
            {"id": item.id, **(result.result if isinstance(result, Refused) else result)}
            for item, result in await score(request, many=True)
        ]
        return _answer({"results": results, **common(start)})

    paths, hosts = {route.path for route in app.routes}, cfg.hosts

    # not a FastAPI middleware, whose tasks and queues cost as much as the rest of a request
    async def watch(scope: dict[str, Any], receive: Callable, send: Callable) -> None:
        path, given, start, status = scope["path"], Headers(scope=scope), time.monotonic(), 500

        async def send_and_note(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        token, host = given.get("Authorization", "").encode(), serving.host_of(given.get("Host", ""))
        answer: Callable = app
        if bad := serving.check_request(scope["method"], scope["headers"], "application/json"):
            answer = _error(Refused(*bad[1:]))
            answer.headers["Connection"] = "close"  # what follows may be no request
        elif (
            hosts is not None and host not in hosts
        ):  # DNS rebinding: a web page under a name that resolves to this machine
            answer = _error(Refused("bad_host", f"this machine is not called {host!r:.80}: see --allowed_hosts"))
        elif cfg.secret and path not in OPEN and not hmac.compare_digest(token, expected):
            answer = _error(Refused("bad_token", "the token is missing or wrong: set RL_HAND_REWARD_TOKEN"))
        try:
            await answer(scope, receive, send_and_note)
        finally:
            known = path if path in paths else "other"
            rewards.counts.add("requests_total", endpoint=known, status=status)
            if scope["method"] == "POST":
                rewards.counts.observe("seconds", time.monotonic() - start, counts.SECONDS, endpoint=known)

    return watch


async def _body(request: Request, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            body = await serving.read_body(request.stream(), MAX_BODY)
    except ClientDisconnect as error:
        raise Refused("bad_json", "the body has no end") from error
    except TimeoutError as error:
        raise Refused("deadline", f"the body was not complete after {seconds:g} s") from error
    if body is None:
        raise Refused("too_large", f"a body of more than {MAX_BODY} bytes: send fewer items at a time")
    return body


def _answer(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps(value, allow_nan=False)  # ASCII: ids may hold lone surrogates
    return Response(body, status, headers, media_type="application/json")


def _error(refused: Refused) -> Response:
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else {}
    body = {"error": refused.text, "code": refused.code, "retryable": refused.retryable}
    return _answer(body, refused.status, headers)
