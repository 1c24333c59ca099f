"""Runs a function that foreign input may make endless, in a child process with limits (POSIX)."""

import contextlib
import json
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SECONDS = 10.0  # wall-clock time of one call
MEMORY = 1 << 30  # bytes, beyond those that the process has already
RESULTS_PER_LINE = 256


class Exceeded(ValueError):
    """A call took more time or memory than it may."""


def results(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Yields `function(item)` for every item, computed in a forked process.

    The child inherits the function and the items, and changes no state of this process. It is
    killed as soon as one call takes too long.

    Args:
        function: returns a JSON value. It must not use CUDA, tokenizers or other threads: none of
            them survives a fork.
        items: its arguments.

    Raises:
        Exceeded: a call took too much time or memory.
        ValueError: the function raised an error; it has its text.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, none of which it needs
        child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            _work(writing, function, items)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    try:
        with open(reading, encoding="ascii") as lines:
            for line in lines:
                if not line.endswith("\n"):  # killed while it wrote
                    break
                values, error, is_exceeded = json.loads(line)
                yield from values
                if error is not None:
                    raise (Exceeded if is_exceeded else ValueError)(error)
        _, status = os.waitpid(child, 0)
        child, code = 0, os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            raise Exceeded(f"takes more than {SECONDS:g} seconds")
        if code:
            raise Exceeded(f"ends its process with status {code}")
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _work(writing: int, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    """The child: writes lines of JSON [results, error or null, whether a limit was exceeded]."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, whatever it computes
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    _limit_memory()
    values, error, is_exceeded = [], None, False
    with open(writing, "w", encoding="ascii") as lines:
        for number, item in enumerate(items, start=1):
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                values.append(function(item))
            except MemoryError:
                error, is_exceeded = f"takes more than {MEMORY >> 30} GiB of memory", True
            except Exception as found:
                error, is_exceeded = str(found), isinstance(found, Exceeded)
            signal.setitimer(signal.ITIMER_REAL, 0)  # writing may wait for the parent
            if error is not None or number % RESULTS_PER_LINE == 0 or number == len(items):
                print(json.dumps([values, error, is_exceeded]), file=lines, flush=True)
                values = []
            if error is not None:
                return


def _limit_memory() -> None:
    """Limits the address space to what is in use and MEMORY."""
    with contextlib.suppress(OSError, ValueError):  # no /proc, or the system forbids it
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
