"""What the servers of rewards and of a teacher do with a request before they look at it, and if the model hangs."""

import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

DRAINED = 4  # times the limit of a body that are read and dropped: most clients read no answer while they send


async def whole(parts: AsyncIterator[bytes], limit: int) -> bytes | None:
    """All of a body, counted as it comes: one in chunks does not say its length.

    Args:
        parts: of the body.
        limit: bytes.

    Returns:
        None if it is longer.
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
    """The name that a client called this machine by.

    Args:
        header: Host, with or without a port.

    Returns:
        In lower case, without brackets; None if there is none.
    """
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:  # brackets that do not match
        return None


def end_when_stuck(late: Callable[[], float], seconds: float, end: Callable[[int], None] = os._exit) -> None:
    """Ends this process, with exit code 1, when its model has been at work for much too long; returns at once.

    A thread that hangs cannot be stopped, and every answer would come too late for ever. Whoever watches the process
    starts another one, and clients send again what was lost.

    Args:
        late: seconds for which nobody waits any more for what the model works at; below 0 while somebody does.
        seconds: that are too many.
        end: the process.
    """

    def watch() -> None:
        while late() < seconds:
            time.sleep(min(1.0, seconds / 10))
        print(f"error: the model hangs: nobody has waited for what it computes for {seconds:g} s. If it is only slow, "
              "raise --deadline_seconds", file=sys.stderr, flush=True)  # fmt: skip
        end(1)

    threading.Thread(target=watch, daemon=True).start()
