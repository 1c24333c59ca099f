"""What the reward server and the teacher server share: size limits of bodies, host names, a watchdog."""

import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

DRAINED = 4  # times the limit: so much of a body is read and dropped, since most clients first send, then read


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
