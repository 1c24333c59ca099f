"""What the reward server and the teacher server share: strict HTTP, limits of bodies, host names, a watchdog.

A web page open in a browser on the same machine can also send requests to 127.0.0.1. `check_request` refuses them:
browsers name the page in Origin, Referer or Sec-Fetch-Site, and send a body as application/json or
application/octet-stream only after a preflight, which these servers never grant.
"""

import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from urllib.parse import urlsplit

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

DRAINED = 4  # times the limit: so much of a body is read and dropped, since most clients first send, then read
LENGTHS = (b"content-length", b"transfer-encoding")  # headers that say where a body ends
PAGES = "web pages must not use this server; send the request from a program, without this header"
_LENGTH = re.compile(rb"^content-length[ \t]*:[^,\n]*(,?)", re.IGNORECASE | re.MULTILINE)


class _Connection(h11.Connection):
    """Refuses a request with two equal lengths, which h11 joins to one before an application sees them."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            lengths = _LENGTH.findall(before[: len(before) - len(self.trailing_data[0])])
            if lengths not in ([], [b""]):
                raise h11.RemoteProtocolError("more than one Content-Length")
        return event


class StrictHTTP(H11Protocol):
    """The HTTP of both servers, for the option `http` of uvicorn: a request has at most one Content-Length."""

    def __init__(self, *args, **kwargs):
        """Takes the arguments of uvicorn's own protocols."""
        super().__init__(*args, **kwargs)
        self.conn = _Connection(h11.SERVER)


def check_request(
    method: str, headers: Iterable[tuple[bytes, bytes]], content_type: str
) -> tuple[int, str, str] | None:
    """Checks that a request has one length and one content type, and that no web page of another site sent it.

    Args:
        method: of the request.
        headers: with names in lower case, as ASGI has them.
        content_type: required of a POST, without parameters.

    Returns:
        None for a request to answer; else HTTP status, code and error text.
    """
    given: dict[bytes, list[str]] = {}
    for name, value in headers:
        given.setdefault(name, []).append(value.decode("latin-1").strip())
    if sum(len(given.get(name, ())) for name in LENGTHS) > 1:
        text = "Content-Length and Transfer-Encoding are given together, or twice: must be one; send one of them"
        return 400, "bad_length", text
    # another site, another port of this machine, or a page that hides where it is from ("null")
    own = {value.lower() for value in given.get(b"host", ())}
    foreign = [(name, value) for name in ("origin", "referer") for value in given.get(name.encode(), ())
               if _netloc(value) not in own]  # fmt: skip
    foreign += [("sec-fetch-site", value) for value in given.get(b"sec-fetch-site", ())
                if value.lower() not in ("same-origin", "none")]  # fmt: skip
    if foreign:
        name, value = foreign[0]
        return 403, "bad_origin", f"{name} {value!r:.80}: {PAGES}"
    if method == "POST":
        kinds = given.get(b"content-type", [])
        if [kind.partition(";")[0].strip().lower() for kind in kinds] != [content_type]:
            shown = ", ".join(kinds) or "none"
            text = f"content type {shown!r:.80}: must be {content_type}; send it as the header Content-Type"
            return 415, "bad_content_type", text
    return None


def _netloc(address: str) -> str | None:
    """Host and port of an address, in lower case."""
    try:
        return urlsplit(address).netloc.lower()
    except ValueError:
        return None


async def read_body(parts: AsyncIterator[bytes], limit: int) -> bytes | None:
    """Reads a body of limited size; a chunked one does not announce its length.

    Args:
        parts: of the body.
        limit: bytes.

    Returns:
        The body, or None if it is longer than the limit.
    """
    body, length = bytearray(), 0
    async for part in parts:
        length += len(part)
        if length <= limit:
            body += part
        elif length > DRAINED * limit:
            break
    return bytes(body) if length <= limit else None


def host_of(header: str) -> str | None:
    """The host name in a Host header, in lower case and without port and brackets; None if there is none."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:  # unbalanced brackets
        return None


def end_when_stuck(late: Callable[[], float], seconds: float, end: Callable[[int], None] = os._exit) -> None:
    """Starts a watchdog that ends this process, with exit code 1, when its model hangs.

    A hanging thread cannot be stopped, and all later answers would be too late. A supervisor restarts the process, and
    clients retry.

    Args:
        late: seconds since the last client stopped waiting for the current batch; below 0 while one waits.
        seconds: limit of `late`.
        end: ends the process with an exit code.
    """

    def watch() -> None:
        while late() < seconds:
            time.sleep(min(1.0, seconds / 10))
        print(f"error: the model hangs: nobody has waited for what it computes for {seconds:g} s. If it is only slow, "
              "raise --deadline_seconds", file=sys.stderr, flush=True)  # fmt: skip
        end(1)

    threading.Thread(target=watch, daemon=True).start()
