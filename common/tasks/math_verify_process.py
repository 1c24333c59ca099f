"""Math-Verify in a separate process, which is killed if an evaluation takes too long (POSIX)."""

import functools
import importlib.util
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading


def _main_loop() -> None:
    """Main loop of the process: reads JSON lines [gold, found, seconds], writes true or false.

    The process runs the source of this function and nothing else. SIGALRM keeps its default action,
    so the kernel ends the process in the middle of any computation, even without its parent; an
    idle process ends when its input closes.
    """
    import sys

    sys.path[:] = [folder for folder in sys.path if folder]  # no file in the working folder may pose as a package
    import contextlib
    import json
    import resource
    import signal

    from math_verify import LatexExtractionConfig, parse, verify

    def expression(text: str) -> list:
        # First match and no fallback: otherwise a part of the text could be parsed, and earn a
        # reward.
        options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
        return parse(f"${text}$", [LatexExtractionConfig()], **options)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # where the system forbids it
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # bytes; a power tower would fill the host's memory
    replies, sys.stdout = sys.stdout, sys.stderr  # what a parser prints must not be read as a reply
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        gold, found, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            parsed = expression(gold)
            reply = bool(parsed) and (found is None or bool(verify(parsed, expression(found), timeout_seconds=None)))
        except (MemoryError, RecursionError):  # wrong, as after the time limit: unscored, it would cost nothing
            reply = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


class Grader:
    """A Math-Verify process, started by the first question, and again after it has ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: subprocess.Popen | None = None

    def _start(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("comparing expressions needs the package math-verify: pip install math-verify")
        # A fresh interpreter, because multiprocessing would run the user's script again; in its own
        # session, so that Ctrl-C reaches the trainer only.
        code = f"{inspect.getsource(_main_loop)}\n{_main_loop.__name__}()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)
        if not self.child.stdout.readline():
            status = self.child.wait()
            raise RuntimeError(f"Math-Verify process ended at its start, status {status}: try `import math_verify`")

    def ask(self, gold: str, found: str | None, limit: float) -> bool:
        """Whether `found` equals `gold`; with `found` None, whether `gold` can be parsed.

        Raises:
            ChildProcessError: the process died, and not of its time limit.
        """
        if not 0 < limit < math.inf:
            raise ValueError(f"limit = {limit} seconds: must be positive and finite; 5.0 suits most answers")
        with self.lock:
            if self.child is None or self.child.poll() is not None:
                self._start()
            reply = ""
            try:
                print(json.dumps([gold, found, limit]), file=self.child.stdin, flush=True)
                reply = self.child.stdout.readline()
            except BrokenPipeError:
                pass  # it ended after poll(); the status below says why
            finally:
                if not reply:  # after Ctrl-C too, or a late reply would answer the next question
                    self.child.kill()
                    self.child.wait()
            if not reply and self.child.returncode != -signal.SIGALRM:
                raise ChildProcessError(f"Math-Verify process ended with status {self.child.returncode}")
        return reply == "true\n"


_grader = Grader()
os.register_at_fork(after_in_child=_grader.__init__)  # processes sharing a pipe would read each other's replies


@functools.lru_cache(maxsize=4096)  # a gold answer is asked again for every completion of its group
def ask_math_verify(gold: str, found: str | None, limit: float) -> bool:
    """`Grader.ask` of the one grader of this process, cached."""
    return _grader.ask(gold, found, limit)
