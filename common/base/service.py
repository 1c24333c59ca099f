"""HTTP client for the services of a run, such as a teacher: serialization, retries, waiting during an outage.

Requests are retried until they are answered or the patience ends, so they must be idempotent. During an outage one
thread polls /health and the others wait, so that a restarted server is not flooded.
"""

import json
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import requests
import safetensors.torch
import torch
import urllib3

from common.base import background
from common.base.checks import is_loopback, require_url
from common.base.distributed import OutageError, print_main

CONNECT_SECONDS = 5.0
HEALTH_SECONDS = 10.0  # timeout of /health
PAUSES = (0.1, 5.0)  # seconds between retries: the first one, and the limit of doubling
REPORT_SECONDS = 15.0  # between messages that the run is still waiting
MAX_ERRORS = 2  # retries after an internal error of the server, which is likely to repeat itself
MAX_ANSWER = 2**26  # bytes of an answer, unless a service needs more: an endless one must not fill the memory
MAX_HEADER = 2**16  # bytes of a safetensors header; one with a million names takes a minute and a gigabyte
MAX_ERROR_TEXT = 500  # characters of a server's error that are passed on


class Unavailable(Exception):
    """A request failed, but a retry may succeed."""

    def __init__(self, text: str, busy: bool = False, retry_after: float = 0.0):
        super().__init__(text)
        self.busy, self.retry_after = busy, retry_after  # busy: the server is up, but overloaded


def pack(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> bytes:
    """Serializes tensors and metadata in the safetensors format.

    Args:
        tensors: by name.
        metadata: values become strings.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(contiguous, {key: str(value) for key, value in metadata.items()})


def unpack(body: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Deserializes the result of `pack` to tensors and metadata.

    Args:
        body: of a request or an answer.

    Raises:
        ValueError: it is not in the safetensors format.
    """
    size = int.from_bytes(body[:8], "little")
    try:
        if size > MAX_HEADER:
            raise ValueError(f"a header of {size} bytes: must be at most {MAX_HEADER}")
        tensors = safetensors.torch.load(body)
        header = json.loads(body[8 : 8 + size])
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"a body of {len(body)} bytes is not in the safetensors format ({error})") from error
    return tensors, header.get("__metadata__") or {}


class Service:
    """A server that a run depends on.

    Attributes:
        on_recovery: called when the service is back after an outage, before any other request; it may call `once`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float,
        patience_s: float,
        workers: int = 1,
        content_type: str = "application/octet-stream",
        max_answer: int = MAX_ANSWER,
    ):
        """Checks the settings; nothing is sent yet.

        Args:
            url: such as "http://127.0.0.1:15555".
            token: sent as "Authorization: Bearer ..." if not empty.
            timeout_s: seconds for one request, until the last byte of its answer.
            patience_s: seconds that an outage may last before the run gives up.
            workers: concurrent requests of `for_each`.
            content_type: of the request bodies.
            max_answer: bytes of an answer; a longer one is an error.

        Raises:
            ValueError: not an address, a number out of range, or a token that is not printable ASCII.
        """
        require_url("url", url)
        try:
            requests.Request("GET", url).prepare()
        except requests.RequestException as error:  # a host that requests would refuse at every call
            raise ValueError(f"url = {url!r}: {error}; give an address such as http://127.0.0.1:8899") from error
        for name, value in (("timeout_s", timeout_s), ("patience_s", patience_s), ("workers", workers)):
            if not value > 0:
                raise ValueError(f"{name} = {value}: must be above 0; raise it")
        if not timeout_s < float("inf"):
            raise ValueError(f"timeout_s = {timeout_s}: must be finite, or an answer that never comes is waited for")
        token = token.strip()  # files and variables often end with a newline
        if not (token.isascii() and token.isprintable()):  # the error of requests would show it
            raise ValueError(f"token of {len(token)} characters: must be printable ASCII; choose another on both sides")
        self.url, self.token, self.timeout_s, self.patience_s = url.rstrip("/"), token, timeout_s, patience_s
        self.workers, self.content_type, self.on_recovery = workers, content_type, lambda: None
        self.max_answer = max_answer
        self._local = is_loopback(urlsplit(url).hostname)
        self._idle: list[requests.Session] = []  # connections that stay open; a request in flight takes one out
        self._outage: Future | None = None  # done when the service is back, or the patience has ended
        self._lock = threading.Lock()
        self._random = random.Random()  # does not change the random state of the run

    def get(self, path: str) -> bytes:
        """Sends a GET request and returns the body of the answer.

        Args:
            path: such as "/info".

        Raises:
            OutageError: an outage lasted longer than the patience.
            RuntimeError: the server failed; with its error text.
            ValueError: the server refused the request; with its error text.
        """
        return self._request("GET", path, None)

    def post(self, path: str, body: bytes) -> bytes:
        """Sends a POST request and returns the body of the answer; raises the errors of `get`.

        Args:
            path: such as "/topk_logprobs".
            body: from `pack`, or JSON.
        """
        return self._request("POST", path, body)

    def for_each(self, function: Callable[[Any], None], items: Iterable[Any]) -> None:
        """Calls a function for every item, in `workers` threads.

        Args:
            function: sends requests; the first error stops all threads and is raised.
            items: processed in order.
        """
        todo = deque(items)

        def work() -> None:
            while todo:
                try:
                    item = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    function(item)
                except BaseException:
                    todo.clear()
                    raise

        for future in [background.start(work) for _ in range(min(self.workers, len(todo)))]:
            future.result()

    def wait_until_ready(self, seconds: float) -> None:
        """Waits until /health answers.

        Args:
            seconds: to wait at most.

        Raises:
            OutageError: it did not.
        """
        self._probe(seconds)

    def once(self, method: str, path: str, body: bytes | None = None, seconds: float | None = None) -> bytes:
        """Sends a request without retries.

        Args:
            method: "GET" or "POST".
            path: such as "/info".
            body: from `pack`.
            seconds: timeout; timeout_s by default.

        Raises:
            Unavailable: no answer, or one that asks for a retry.
            RuntimeError: the server failed, or the answer is too long.
            ValueError: the server refused the request.
        """
        try:
            session = self._idle.pop()
        except IndexError:
            session = requests.Session()
            # no proxy of the environment for loopback; the auth callback keeps .netrc from replacing the token
            session.trust_env, session.auth = not self._local, self._authorize
        seconds = seconds or self.timeout_s
        # in a thread: the timeout of requests starts anew with every byte, so a slow header would never time out
        exchange = background.start(self._exchange, session, method, path, body, seconds)
        try:
            answer, content = exchange.result(CONNECT_SECONDS + seconds)
        except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
            self._idle.append(session)
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:  # the session is still in use by its thread
            raise Unavailable(f"no answer within {seconds:g} s") from error
        self._idle.append(session)
        status = answer.status_code
        if len(content) > self.max_answer:
            raise RuntimeError(f"{method} {self.url}{path}: an answer of more than {self.max_answer} bytes")
        if status == 200:
            return bytes(content)
        text = f"{method} {self.url}{path}: status {status}, {_error_text(content)}"
        if status in (429, 502, 503, 504):
            wait = answer.headers.get("Retry-After", "")
            raise Unavailable(text, busy=status in (429, 504), retry_after=float(wait) if wait.isdecimal() else 0.0)
        raise (RuntimeError if status >= 500 else ValueError)(text)

    def _exchange(
        self, session: requests.Session, method: str, path: str, body: bytes | None, seconds: float
    ) -> tuple[requests.Response, bytearray]:
        """Sends a request and reads its answer, until it exceeds `max_answer`."""
        # X-Timeout-Ms: the server need not compute what nobody waits for. identity: compressed, a short answer could
        # unpack to a thousand times its length
        headers = {"X-Timeout-Ms": str(int(1000 * seconds)), "Accept-Encoding": "identity"}
        headers |= {"Content-Type": self.content_type} if body is not None else {}
        end = time.monotonic() + seconds
        answer = session.request(method, self.url + path, data=body, headers=headers, allow_redirects=False,
                                 stream=True, timeout=(CONNECT_SECONDS, seconds))  # fmt: skip
        content = bytearray()
        while part := answer.raw.read1(2**20, decode_content=False):
            content += part
            if len(content) > self.max_answer:
                answer.close()
                break
            if time.monotonic() > end:
                answer.close()
                raise requests.Timeout(f"the answer was not complete after {seconds:g} s")
        return answer, content

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.token:
            request.headers["Authorization"] = f"Bearer {self.token}"
        return request

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        since, pause, errors = 0.0, PAUSES[0], 0
        while True:
            if (outage := self._outage) is not None:
                outage.result()
            try:
                return self.once(method, path, body)
            except Unavailable as error:
                since = since or time.monotonic()
                left = since + self.patience_s - time.monotonic()
                if left <= 0:
                    raise self._given_up(self.patience_s, error) from error
                if not error.busy:
                    self._wait()
                self._sleep(min(left, max(pause, error.retry_after)))
            except RuntimeError:
                errors += 1
                if errors > MAX_ERRORS:
                    raise
                self._sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    def _wait(self) -> None:
        """Waits until the service is back: the first thread polls, the others wait for it."""
        with self._lock:
            first = self._outage is None
            outage = self._outage = Future() if first else self._outage
        if not first:
            return outage.result()
        try:
            self._probe(self.patience_s, self.on_recovery)
        except BaseException as error:
            self._outage = None
            outage.set_exception(error)
            raise
        self._outage = None
        outage.set_result(None)

    def _probe(self, patience_s: float, then: Callable[[], None] = lambda: None) -> None:
        start, pause, reported = time.monotonic(), PAUSES[0], None
        while True:
            try:
                self.once("GET", "/health", seconds=min(HEALTH_SECONDS, self.timeout_s))
                then()
                break
            except Unavailable as error:
                now = time.monotonic()
                left = start + patience_s - now
                if left <= 0:
                    raise self._given_up(patience_s, error) from error
                if reported is None or now - reported > REPORT_SECONDS:
                    how_long = f"up to {patience_s:g} s" if reported is None else f"{left:.0f} s more at most"
                    print_main(f"{self.url} is not ready: waiting for it, {how_long} ({error})", file=sys.stderr)
                    reported = now
                self._sleep(min(left, pause))
                pause = min(2 * pause, PAUSES[1])
        if reported is not None:
            print_main(f"{self.url} is ready after {time.monotonic() - start:.0f} s: going on", file=sys.stderr)

    def _sleep(self, seconds: float) -> None:
        """Sleeps with jitter: threads and ranks fail together, but should not retry together."""
        time.sleep(seconds * self._random.uniform(1.0, 1.3))

    def _given_up(self, seconds: float, error: Unavailable) -> OutageError:
        return OutageError(
            f"{self.url} stayed away for {seconds:g} s, last with: {error}. Start the server again, then run the same "
            "command: the run goes on from its checkpoint. A longer patience would wait for it"
        )


def _error_text(content: bytes | bytearray) -> str:
    """The error text in the answer of a server."""
    try:
        return str(json.loads(content)["error"])[:MAX_ERROR_TEXT]
    except (ValueError, KeyError, TypeError, RecursionError):  # not from our servers
        return content[:MAX_ERROR_TEXT].decode(errors="replace")
