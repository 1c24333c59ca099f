"""Math-Verify as a server: compares many pairs in parallel and in bounded time (POSIX).

math_verify_process.py runs this file as a program of its own. It reads JSON lines [[[gold, found],
...], seconds, workers] and replies with a list of true, false, "cut" (its time ran out), "died" or
null (the time of the batch was up before its first turn ended). Each worker is a fork that the
kernel ends in the middle of any computation; another one takes its place within milliseconds,
because the imports are done.
"""

# ruff: noqa: E402
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

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Relational

FIRST_LIMIT = 0.05  # seconds of CPU time for the first attempt; each further attempt gets four times as long
MEMORY = 4 << 30  # bytes; a power tower would fill the host's memory
POINTS = (("7/5", "11/3", "13/7", "17/11", "19/13"), ("-5/3", "-9/7", "23/17", "-2/11", "29/19"))  # of variables
WHOLE_POINTS = (("7", "3", "5", "4", "6"), ("12", "9", "10", "8", "11"))  # where sums and factorials have values
WHOLE = (sympy.Sum, sympy.Product, sympy.factorial, sympy.binomial, sympy.floor, sympy.ceiling, sympy.Mod)
WARM_UP = (
    (r"\frac{x + 1}{\sqrt{2}} - 3\pi y^{2}", r"y = 2 x_1 + \sin(x)"), ("(2, 5]", r"2 < x \le 5"),
    (r"[-1, \infty) \cup \{3\}", r"e^{-x}(a - b) \cdot \ln 2"),
)  # fmt: skip


@functools.lru_cache(maxsize=512)
def expression(text: str) -> list:
    """What Math-Verify reads in a formula, all of it: a part of it could earn a reward."""
    options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
    return parse(f"${text}$", [LatexExtractionConfig()], **options)


def is_right(gold: str, found: str | None) -> bool:
    """Whether found equals gold; with found None, whether gold can be read."""
    parsed = expression(gold)
    if not parsed or found is None:
        return bool(parsed)
    other = expression(found)
    if not other:
        return False
    if (is_equal := have_equal_values(parsed[0], other[0])) is not None:
        return is_equal
    return bool(verify(parsed, other, timeout_seconds=None)) and has_equal_ends(parsed[0], other[0])


def have_equal_values(left: object, right: object) -> bool | None:
    """Whether expressions or relations are equal at two points, to 100 digits; None without values."""
    if isinstance(left, Relational) and isinstance(right, Relational):
        return are_multiples(left, right)
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)) or left.is_Symbol or right.is_Symbol:
        return None
    if left == right:
        return True
    (difference, left, right), names = exact(left - right, left, right)
    is_zero = []
    for point in points(left, right, names):
        value = abs(difference.subs(point).evalf(20, maxn=300))
        size = sum(abs(side.subs(point).evalf(20)) for side in (left, right))
        if not (value.is_number and size.is_number and size.is_finite):
            return None
        is_zero.append(bool(value <= size * sympy.Rational(1, 10**100)))
    return all(is_zero)


def are_multiples(left: Relational, right: Relational) -> bool:
    """Whether relations say the same because one is a multiple of the other: 2x > 6 and 3 < x."""
    (left_side, right_side), names = exact(left.lhs - left.rhs, right.lhs - right.rhs)
    point = points(left_side, right_side, names)[0]
    ratio = sympy.nsimplify((left_side / right_side).subs(point), rational=True)
    is_same_way = left.rel_op == right.rel_op and (ratio > 0 or left.rel_op in ("==", "!="))
    is_turned = left.rel_op == right.reversed.rel_op and ratio < 0
    return bool(is_same_way or is_turned) and have_equal_values(left_side, ratio * right_side) is True


def exact(*expressions: sympy.Expr) -> tuple[list, list]:
    """Expressions with exact decimals, and the variables in them."""
    values = [
        value.doit().replace(lambda part: isinstance(part, sympy.Float), lambda part: sympy.Rational(str(part)))
        for value in expressions
    ]
    return values, sorted(set().union(*(value.free_symbols for value in values)), key=str)


def points(left: sympy.Expr, right: sympy.Expr, names: list) -> list[dict]:
    """Two points at which expressions are compared."""
    is_whole = any(side.has(*WHOLE) for side in (left, right))
    return [
        {name: sympy.Rational(point[i % len(point)]) for i, name in enumerate(names)}
        for point in (WHOLE_POINTS if is_whole else POINTS)
    ]


def has_equal_ends(left: object, right: object) -> bool:
    """False if ends that Math-Verify calls equal differ: it rounds 2^-98 to 0."""
    sides = [
        side.rhs if isinstance(side, sympy.Eq) and isinstance(side.rhs, sympy.Set) else side for side in (left, right)
    ]
    sides = [side.as_set() if isinstance(side, Relational) else side for side in sides]
    if not all(isinstance(side, sympy.Interval) for side in sides):
        return True
    ends = [have_equal_values(getattr(sides[0], end), getattr(sides[1], end)) for end in ("start", "end")]
    return False not in ends


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
        self.input, self.output, self.question = os.fdopen(questions[1], "w"), replies[0], None

    def pipes(self) -> tuple[int, int]:
        """Descriptors to this worker."""
        return self.input.fileno(), self.output

    def serve(self, questions: int, replies: int) -> None:
        """Main loop of the worker; never returns."""
        try:
            for line in os.fdopen(questions):
                gold, found, limit = json.loads(line)
                # CPU time, so that other work on the machine makes no answer wrong; SIGPROF kills by default
                signal.setitimer(signal.ITIMER_PROF, limit)
                try:
                    reply = is_right(gold, found)
                except (MemoryError, RecursionError):  # wrong, as after the time limit: unscored, it would cost nothing
                    reply = False
                signal.setitimer(signal.ITIMER_PROF, 0)
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
            os.kill(self.pid, signal.SIGPROF)
        status = os.waitpid(self.pid, 0)[1]
        return "cut" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF else "died"


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
                        worker.ask(i, *questions[i], limits[i])
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
            replies[worker.question] = "cut" if limits[worker.question] > FIRST_LIMIT else None
        return replies


def main() -> None:
    """Reads batches until the input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # where the system forbids it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    replies, sys.stdout = sys.stdout, sys.stderr  # what a parser prints must not be read as a reply
    for gold, found in WARM_UP:  # fills the parser's tables before the workers are forked
        is_right(gold, found)
    print("ready", file=replies, flush=True)
    server = Server()
    for line in sys.stdin:
        print(json.dumps(server.evaluate(*json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
