"""Compares formulas with Math-Verify, in processes that no formula can hold up (POSIX)."""

import importlib.util
import json
import math
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

Question = tuple[str, str | None]  # gold, found; found None asks whether gold can be read
Verdicts = dict[Question, bool | None]

_SERVER = Path(__file__).with_name("math_verify_server.py")
_MAX_WORKERS = 8
_MAX_CACHED = 65536
_COSTLY = re.compile(r"\^|!|\\(?:sum|prod|int|binom|frac|sqrt|sin|cos)|\d{7}")
_GRACE = 30.0  # seconds after which a server that does not reply is dead


class Grader:
    """A Math-Verify server, started by the first question, and again after it has ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: subprocess.Popen | None = None
        self.cache: Verdicts = {}

    def _start(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("comparing expressions needs the package math-verify: pip install math-verify")
        # A fresh interpreter, because multiprocessing would run the user's script again; in its own
        # session, so that Ctrl-C reaches the trainer only; -P, so that no file beside it is imported.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.child = subprocess.Popen([sys.executable, "-P", str(_SERVER)], start_new_session=True, **pipes)
        if not self.child.stdout.readline():
            status = self.child.wait()
            raise RuntimeError(f"Math-Verify process ended at its start, status {status}: try `import math_verify`")

    def ask(self, questions: Sequence[Question], seconds: float) -> list[bool | str | None]:
        """Replies to a batch: True, False, "cut", "died" or None (its turn did not come)."""
        if self.child is None or self.child.poll() is not None:
            self._start()
        reply = ""
        try:
            print(json.dumps([questions, seconds, _num_workers()]), file=self.child.stdin, flush=True)
            if select.select([self.child.stdout], [], [], seconds + _GRACE)[0]:
                reply = self.child.stdout.readline()
        except BrokenPipeError:
            pass  # it ended after poll()
        finally:
            if not reply:  # after Ctrl-C too, or a late reply would answer the next batch
                self.child.kill()
                self.child.wait()
        return json.loads(reply) if reply else ["died"] * len(questions)

    def evaluate(self, questions: Sequence[Question], seconds: float) -> Verdicts:
        """The function `evaluate`, on this server."""
        if not 0 < seconds < math.inf:
            raise ValueError(f"limit = {seconds} seconds: must be positive and finite; 5.0 suits most answers")
        with self.lock:
            asked = sorted(dict.fromkeys(q for q in questions if q not in self.cache), key=_cost)
            replies = dict(zip(asked, self.ask(asked, seconds) if asked else [], strict=True))
            decided = {q: reply is True for q, reply in replies.items() if reply in (True, False, "cut")}
            while self.cache and len(self.cache) + len(decided) > _MAX_CACHED:
                del self.cache[next(iter(self.cache))]
            self.cache |= {q: verdict or (q[1] is None and replies[q] == "cut") for q, verdict in decided.items()}
            known = {q: self.cache[q] for q in questions if q in self.cache}
        is_read = {"died": None, None: True}  # a gold answer whose turn did not come counts as gradable
        open_questions = {q: is_read[replies[q]] if q[1] is None else None for q in questions if q not in known}
        return known | open_questions


def _cost(question: Question) -> int:
    """Rank of a pair: plain formulas have their turn before those with towers, factorials and the like."""
    text = question[1] or question[0]
    return len(_COSTLY.findall(text)) + len(text) // 100


def _num_workers() -> int:
    return max(
        2, min(_MAX_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    )


_grader = Grader()
os.register_at_fork(after_in_child=_grader.__init__)  # processes sharing a pipe would read each other's replies


def evaluate(questions: Sequence[Question], seconds: float) -> Verdicts:
    """Compares pairs of formulas, all together in at most `seconds`.

    2 to 8 processes (one per core) work in rounds: every distinct pair gets 0.05 s of CPU time,
    then those that were cut off get 0.2 s, and so on until the time is up; plain formulas come
    first in each round. So a formula that never ends costs one process 0.05 s before every other
    pair has had its turn: with P processes and 2 s, up to 30 P hostile pairs leave time for several
    hundred others, in any order.

    Args:
        questions: pairs (gold, found); found None asks whether gold can be parsed.
        seconds: for all of them; starting Math-Verify (once, 1 to 3 s) is not counted.

    Returns:
        True or False for each pair, False for a pair that is cut off or needs more than 4 GiB; True
        for a gold answer that is not parsed in time. None for a pair whose turn does not come, or
        if a process died of anything but its limits.

    Raises:
        ImportError: math-verify is not installed.
        RuntimeError: the process cannot start.
        ValueError: `seconds` is not positive and finite.
    """
    return _grader.evaluate(questions, seconds)
