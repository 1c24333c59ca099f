"""Math-Verify as a server: compares many pairs in parallel and in bounded time (POSIX).

math_verify_process.py runs this file as a program of its own. It reads JSON lines [[[gold, found], ...],
seconds, workers] and replies with a list of true, false, "cut" (its time ran out), "died" or null (its
turn did not come). Each worker is a fork that the kernel ends in the middle of any computation; another
one takes its place within milliseconds, because the imports are done.
"""

import sys

sys.path[:] = [folder for folder in sys.path if folder]  # no file in the working folder may pose as a package

import contextlib
import functools
import json
import os
import resource
import selectors
import signal
import time
from collections import deque

from math_verify import LatexExtractionConfig, parse, verify

FIRST_LIMIT = 0.1  # seconds of the first attempt; each further attempt gets four times as long
MEMORY = 4 << 30  # bytes; a power tower would fill the host's memory
PROBES = ("7/5", "11/3", "13/7", "17/11", "19/13", "23/17")  # values of variables


@functools.lru_cache(maxsize=512)
def expression(text: str) -> list:
    """What Math-Verify reads in a formula, all of it or nothing; a part of it could earn a reward."""
    options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
    return parse(f"${text}$", [LatexExtractionConfig()], **options)


def is_right(gold: str, found: str | None) -> bool:
    """Whether found equals gold; with found None, whether gold can be read."""
    parsed = expression(gold)
    if not parsed or found is None:
        return bool(parsed)
    other = expression(found)
    return bool(verify(parsed, other, timeout_seconds=None)) and is_exact(parsed[0], other[0])


def is_exact(left: object, right: object) -> bool:
    """False if two values that Math-Verify calls equal differ after all: it rounds to 6 places, 2^-98 to 0."""
    import sympy

    if left == right or not isinstance(left, sympy.Basic) or not isinstance(right, sympy.Basic):
        return True
    pair = [value.rhs if isinstance(value, sympy.Eq) and not isinstance(value.rhs, sympy.Expr) else value for value in (left, right)]
    if any(isinstance(value, sympy.Set) for value in pair):
        pair = [value.as_set() if hasattr(value, "as_set") else value for value in pair]
    left, right = pair
    if isinstance(left, sympy.Interval) and isinstance(right, sympy.Interval):
        return is_exact(left.start, right.start) and is_exact(left.end, right.end)
    if isinstance(left, sympy.core.relational.Relational) and isinstance(right, sympy.core.relational.Relational):
        return are_multiples(left.lhs - left.rhs, right.lhs - right.rhs)
    if isinstance(left, sympy.core.relational.Relational):
        left = left.rhs
    if isinstance(right, sympy.core.relational.Relational):
        right = right.rhs
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return True
    return all(is_close(value, other) for value, other in zip(probed(left, right), probed(right, left), strict=True))


def are_multiples(left: object, right: object) -> bool:
    """Whether one side is a constant times the other, as of x > 1 and 2x > 2."""
    ratios = [value / other for value, other in zip(probed(left, right), probed(right, left), strict=True) if other]
    return all(is_close(ratio, ratios[0]) for ratio in ratios[1:])


def probed(value: object, other: object) -> list:
    """An expression at two points, to 40 digits; decimals in it are exact."""
    import sympy

    exact = value.doit().replace(lambda part: isinstance(part, sympy.Float), lambda part: sympy.Rational(str(part)))
    symbols = sorted(value.free_symbols | other.free_symbols, key=str)
    points = [{symbol: sympy.Rational(PROBES[(i + shift) % len(PROBES)]) for i, symbol in enumerate(symbols)} for shift in (0, 1)]
    return [exact.subs(point).evalf(40, maxn=500) for point in points]


def is_close(value: object, other: object) -> bool:
    """Equality to 30 digits; True for what has no numerical value."""
    difference, size = abs(value - other), abs(value) + abs(other)
    if not (difference.is_number and size.is_number and size.is_finite):
        return True
    return bool(difference <= size * 10**-30)


class Worker:
    """A forked process that answers one question at a time."""

    def __init__(self, others: list["Worker"]) -> None:
        questions, replies = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor in (0, questions[1], replies[0], *(fd for other in others for fd in other.pipes())):
                os.close(descriptor)  # or a worker would hold open the input of another
            self.serve(questions[0], replies[1])
        os.close(questions[0])
        os.close(replies[1])
        self.input, self.output, self.question = open(questions[1], "w"), replies[0], None

    def pipes(self) -> tuple[int, int]:
        """Descriptors to this worker."""
        return self.input.fileno(), self.output

    def serve(self, questions: int, replies: int) -> None:
        """Main loop of the worker; never returns."""
        try:
            for line in open(questions):
                gold, found, limit = json.loads(line)
                signal.setitimer(signal.ITIMER_REAL, limit)  # SIGALRM keeps its default action: it kills
                try:
                    reply = is_right(gold, found)
                except (MemoryError, RecursionError):  # wrong, as after the time limit: unscored, it would cost nothing
                    reply = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                os.write(replies, b"1" if reply else b"0")
        finally:
            os._exit(1)

    def ask(self, question: int, gold: str, found: str | None, limit: float) -> None:
        """Sends a question; a worker that has died shows at its output."""
        self.question = question
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([gold, found, limit]), file=self.input, flush=True)

    def end(self) -> str:
        """Why the process ended, "cut" or "died"; kills it if it has not."""
        for close in (self.input.close, lambda: os.close(self.output)):
            with contextlib.suppress(OSError):
                close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGALRM)
        status = os.waitpid(self.pid, 0)[1]
        return "cut" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else "died"


class Server:
    """The workers, and the evaluation of a batch."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    def evaluate(self, questions: list, seconds: float, size: int) -> list:
        """Replies to a batch, `seconds` after the call at the latest."""
        deadline = time.monotonic() + seconds
        replies = [None] * len(questions)
        waiting = deque((i, FIRST_LIMIT) for i in range(len(questions)))
        limits = {}
        with selectors.DefaultSelector() as selector:
            while (left := deadline - time.monotonic()) > 0:
                while len(self.workers) < min(size, len(waiting)):
                    self.workers.append(Worker(self.workers))
                for worker in self.workers:
                    if worker.question is None and waiting:
                        i, limits[i] = waiting.popleft()
                        worker.ask(i, *questions[i], min(limits[i], left))
                        selector.register(worker.output, selectors.EVENT_READ, worker)
                if not selector.get_map():
                    return replies
                for key, _ in selector.select(left):
                    worker, i = key.data, key.data.question
                    selector.unregister(worker.output)
                    if reply := os.read(worker.output, 1):
                        replies[i], worker.question = reply == b"1", None
                        continue
                    self.workers.remove(worker)
                    replies[i] = worker.end()
                    if replies[i] == "cut":
                        waiting.append((i, 4 * limits[i]))  # after those that have not had a turn
        for worker in [worker for worker in self.workers if worker.question is not None]:
            self.workers.remove(worker)
            worker.end()
            replies[worker.question] = "cut"
        return replies


def main() -> None:
    """Reads batches until the input ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # where the system forbids it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    replies, sys.stdout = sys.stdout, sys.stderr  # what a parser prints must not be read as a reply
    is_right("x + 1", "1 + x")  # fills the parser's tables before the workers are forked
    print("ready", file=replies, flush=True)
    server = Server()
    for line in sys.stdin:
        print(json.dumps(server.evaluate(*json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
