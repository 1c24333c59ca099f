"""Standard output and error that never end a process: a run's results are in its files."""

import codecs
import contextlib
import io
import os
import sys

NAMES = {1: "stdout", 2: "stderr"}


def protect() -> None:
    """Makes every print succeed, and reads UTF-8 from standard input in a locale of ASCII; call it once, at the start.

    A character that the encoding lacks is printed as an escape. What cannot be written, since the reader of a pipe or
    the terminal is gone or the disk is full, is dropped, and the other stream says so once. Streams that a notebook or
    a test has put in place are left alone.
    """
    if type(sys.stdin) is io.TextIOWrapper and codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    with contextlib.suppress(OSError):
        for number in NAMES:
            if not _is_open(number):  # a file of ours would get this number, and all that is printed
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
    for number, name in NAMES.items():
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__") and type(stream) is io.TextIOWrapper and not stream.closed:
            with contextlib.suppress(OSError):
                stream.flush()
            how = dict(line_buffering=stream.line_buffering, write_through=stream.write_through)
            buffer = io.BufferedWriter(_Lasting(number))
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", **how))


def text(argument: str) -> str:
    """An argument of the command line as text: a locale of ASCII leaves the bytes of other characters as surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return os.fsencode(argument).decode(errors="replace")
    return argument


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


class _Lasting(io.FileIO):
    """A standard stream that drops what it cannot write."""

    def __init__(self, number: int):
        super().__init__(number, "wb", closefd=False)
        self._failed = False

    def write(self, data: bytes) -> int | None:
        """Writes the bytes, or drops them; the first loss is told on the other stream."""
        try:
            written = super().write(data)
        except OSError as error:
            if not self._failed:
                self._failed = True
                text = f"warning: {NAMES[self.fileno()]} cannot be written ({error.strerror}): its output is dropped\n"
                with contextlib.suppress(OSError):
                    os.write(3 - self.fileno(), text.encode())
            return len(data)
        self._failed = False
        return written
