"""HTTP server of a teacher with GPUs of its own: top-k log-probabilities and completions for GKD.

Run:   bash scripts/start_teacher.sh --gpus 2,3 -- --teacher_model Qwen/Qwen2.5-7B-Instruct
       python gkd/teacher_server.py      on all visible GPUs, or the CPU (--help lists all options)
Wire:  POST /topk_logprobs and /generate, safetensors both ways (Content-Type: application/octet-stream); the
       format is documented at `read` in common/distill/teacher_worker.py.  GET /health /info /vocabulary /metrics
"""

import asyncio
import hmac
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.requests import ClientDisconnect

sys.path.insert(0, str(next(p for p in Path(__file__).resolve().parents if (p / "common/maths/losses.py").is_file())))
from common.base import checks, config
from common.base.checks import require

config.answer_early(globals())  # answers --help and wrong options before the slow imports
from common.base import service, serving
from common.distill import teacher_client, teacher_worker
from common.distill.teacher_worker import Refused, Teacher
from common.model import sources

MAX_BODY = 2**26  # bytes of a request: 16 M tokens
WORK_PATHS = ("/topk_logprobs", "/generate")


@dataclass(frozen=True)
class Config:
    """HTTP server of a teacher. Editing a line and passing --name value are the same."""

    teacher_model: str = "toy-teacher"  # built-in; or a hub id or folder: "Qwen/Qwen2.5-7B-Instruct"
    device: str = "auto"  # "cuda": spread over all visible GPUs; "cpu"; "auto": the GPUs if there are any, else the CPU
    dtype: str = "auto"  # "bf16", "fp16", "fp32"; "auto": bf16 on GPUs, fp32 on the CPU
    compile: bool = True  # torch.compile on GPUs
    host: str = "127.0.0.1"  # "0.0.0.0": also for other machines, which needs a token
    port: int = 15555  # 0: any free port
    token: str = ""  # sent by clients as "Authorization: Bearer"; better in the environment, RL_HAND_TEACHER_TOKEN
    max_top_k: int = 256  # maximum number of log-probabilities per token; 0: the whole vocabulary
    max_tokens: int = 32768  # maximum length of a sequence; no more than the model has positions
    max_batch_tokens: int = 16384  # per forward pass: smaller requests are batched, larger ones split
    max_queue: int = 64  # requests in the queue; above, requests are refused with 429
    deadline_seconds: float = 600.0  # a request that waits longer is dropped, unless it sets its own deadline

    def __post_init__(self):
        checks.at_least(self, 0, "max_top_k", "port")
        checks.at_least(self, 1, "max_batch_tokens", "max_queue")
        checks.at_least(self, 2, "max_tokens")
        checks.above_zero(self, "deadline_seconds")
        checks.one_of(self, dtype=("auto", *sources.DTYPES), device=("auto", "cuda", "cpu"))
        closed = bool(self.secret) or service.is_loopback(self.host)
        require(closed, f"host = {self.host!r} without a token", "whoever reaches the port could use the teacher",
                "set RL_HAND_TEACHER_TOKEN on both sides")  # fmt: skip

    @property
    def secret(self) -> str:
        """The token in force."""
        return self.token.strip() or os.environ.get("RL_HAND_TEACHER_TOKEN", "").strip()


def create_app(teacher: Teacher) -> FastAPI:
    """The web application of a teacher, whose `load` and `work` run in another thread."""
    app = FastAPI(openapi_url=None)
    expected = f"Bearer {teacher.cfg.secret}".encode()

    @app.middleware("http")
    async def watch(request: Request, call_next: Callable) -> Response:
        path, given = request.url.path, request.headers.get("Authorization", "").encode()
        host = serving.host_of(request.headers.get("Host", "")) or ""
        bad = serving.check_request(request.method, request.scope["headers"], "application/octet-stream")
        # without a token, a web page could reach this server under a domain of its own (DNS rebinding)
        if bad is not None:
            status, _, text = bad
            answer = JSONResponse({"error": text}, status, {"Connection": "close"})  # what follows may be no request
        elif not (teacher.cfg.secret or checks.is_loopback(host)):
            text = f"this machine is not called {host!r:.80}: say 127.0.0.1, or set a token"
            answer = JSONResponse({"error": text}, 403)
        elif teacher.cfg.secret and path != "/health" and not hmac.compare_digest(given, expected):
            answer = JSONResponse({"error": "the token is missing or wrong: set RL_HAND_TEACHER_TOKEN"}, 401)
        else:
            answer = await call_next(request)
        known = path in {route.path for route in app.routes}
        teacher.counts[path if known else "other", answer.status_code] += 1
        return answer

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        return JSONResponse({"error": str(error)}, error.status, headers)

    @app.exception_handler(ValueError)
    async def wrong(_: Request, error: ValueError) -> Response:
        return JSONResponse({"error": str(error)}, 422)

    @app.get("/health")
    async def health() -> Response:
        if teacher.late > 0:
            return JSONResponse({"status": "stuck: the model is at work for longer than anybody waits"}, 503)
        return JSONResponse({"status": teacher.state}, 200 if teacher.state == "ready" else 503)

    @app.get("/info")
    async def info() -> Response:
        _require_ready(teacher)
        return JSONResponse(teacher.info)

    @app.get("/vocabulary")
    async def vocabulary() -> Response:
        _require_ready(teacher)
        return JSONResponse(teacher.tokens)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(_metrics(teacher), media_type="text/plain; version=0.0.4")

    async def work(request: Request) -> Response:
        seconds = teacher.cfg.deadline_seconds
        try:
            async with asyncio.timeout(seconds):
                body = await serving.read_body(request.stream(), MAX_BODY)
        except ClientDisconnect as error:
            raise Refused(400, "the body has no end") from error
        except TimeoutError as error:
            raise Refused(504, f"the body was not complete after {seconds:g} s") from error
        if body is None:
            raise Refused(413, f"a body of more than {MAX_BODY} bytes: send fewer sequences at a time")
        _require_ready(teacher)
        job = await run_in_threadpool(teacher_worker.read, request.url.path, body, teacher)
        tensors = await asyncio.wrap_future(teacher.submit(job))
        metadata = {"identity": teacher_client.identity(teacher.info)}
        answer = await run_in_threadpool(service.pack, tensors, metadata)
        return Response(answer, media_type="application/octet-stream")

    for path in WORK_PATHS:
        app.post(path)(work)
    return app


def _require_ready(teacher: Teacher) -> None:
    """Refuses a request with 503 unless the model is loaded."""
    if teacher.state != "ready":
        raise Refused(503, teacher.state)


def _metrics(teacher: Teacher) -> str:
    """The counters in the text format of Prometheus."""
    lines, counts = ["# TYPE teacher_requests_total counter"], dict(teacher.counts)
    for key, count in counts.items():
        if isinstance(key, tuple):
            lines.append(f'teacher_requests_total{{endpoint="{key[0]}",status="{key[1]}"}} {count}')
    for name in ("rejected", "expired", "batches", "sequences", "tokens", "model_seconds"):
        lines += [f"# TYPE teacher_{name}_total counter", f"teacher_{name}_total {counts.get(name, 0)}"]
    gauges = {"waiting": len(teacher.waiting), "busy": teacher.busy, "ready": teacher.state == "ready"}
    for name, value in gauges.items():
        lines += [f"# TYPE teacher_{name} gauge", f"teacher_{name} {int(value)}"]
    return "\n".join(lines) + "\n"


def main(cfg: Config) -> None:
    """Opens the port, then loads and runs the model in this thread; /health says when it is up."""
    teacher = Teacher(cfg)
    family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
    try:
        listener = socket.create_server((cfg.host, cfg.port), family=family)
    except OSError as error:
        sys.exit(f"error: {cfg.host}:{cfg.port} cannot be opened ({error}): give another --port or --host")
    # or Nagle's algorithm delays the body of an answer by 40 ms, until its header is acknowledged
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    address = f"http://{cfg.host}:{listener.getsockname()[1]}"
    print(f"teacher {cfg.teacher_model}: loading, {address}/health says when it is ready", flush=True)
    options = dict(lifespan="off", ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=60)
    strict = dict(http=serving.StrictHTTP, timeout_keep_alive=75)
    server = uvicorn.Server(uvicorn.Config(create_app(teacher), **strict, **options))
    web = threading.Thread(target=server.run, args=([listener],), daemon=True)  # signals go to the main thread
    web.start()

    def stop(number: int, _: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # a second signal ends the process at once
        print(f"{signal.Signals(number).name}: answering what is waiting, then ending", flush=True)
        if teacher.state == "loading":
            sys.exit(0)
        teacher.drain()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    serving.end_when_stuck(lambda: teacher.late, cfg.deadline_seconds)
    try:
        teacher.load()
        print(f"teacher {cfg.teacher_model}: ready, {address}, {', '.join(map(str, teacher.devices))}", flush=True)
        teacher.work()
    except Exception as error:  # report it to clients, too
        teacher.state = f"failed: {error}"
        raise
    finally:
        server.should_exit = True
        web.join()


if __name__ == "__main__":
    main(config.parse(Config))
