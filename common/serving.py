"""What both servers, of rewards and of a teacher, do with a request before they look at it."""

from collections.abc import AsyncIterator
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
