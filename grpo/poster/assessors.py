"""Processes that do the CPU part of the reward service: parsing, rendering, comparing, reading images.

Python computes in one thread of a process at a time, so the server itself would answer nobody meanwhile. Each process
has one thread of the server that gives it one call at a time: when the process dies or hangs, it is that call's fault
alone, and the next one gets a new process.
"""

import base64
import binascii
import functools
import io
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from PIL import Image

from grpo.poster import layout, pictures, reward, synthetic
from grpo.poster.fonts import Fonts
from grpo.poster.items import Item, Refused

MAX_IMAGE_BYTES = 2**22  # of a PNG or JPEG
MAX_IMAGE_PIXELS = 2**24
START_SECONDS = 120  # for a process to import everything, on a busy machine
ROOT = Path(__file__).resolve().parents[2]
CODE = "import sys; from grpo.poster.assessors import serve; serve(int(sys.argv[1]))"


@dataclass(frozen=True)
class Options:
    """What all calls have in common."""

    font_paths: tuple[str, ...] = ()
    coord_space: str = "px"
    asset_root: str = ""
    with_image: bool = False


class Assessors:
    """The processes; each starts with its first call."""

    def __init__(self, count: int, options: Options, seconds: float):
        """Starts nothing yet.

        Args:
            count: of processes.
            options: for `assess`.
            seconds: a call may take; then its process is killed.
        """
        self._options, self._seconds = options, seconds
        self._calls: queue.SimpleQueue[tuple[Future, Callable, tuple] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable, *args: Any) -> Future:
        """Calls a function in one of the processes.

        Args:
            function: of a module, not a lambda.
            *args: its arguments.

        Returns:
            Its value; or the Refused that it raised, or that stands for a process that hung, died or failed.
        """
        future: Future = Future()
        future.set_running_or_notify_cancel()  # whoever gives up waiting cannot cancel it: `_work` sets a result
        self._calls.put((future, function, args))
        return future

    def close(self) -> None:
        """Ends the processes when all calls are answered."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        process = None
        while (call := self._calls.get()) is not None:
            future, function, args = call
            try:
                process = process or _Process(self._options, self._seconds)
                value, refused = process.call(function, args, self._seconds)
            except TimeoutError:
                text = f"not done after {self._seconds:g} s: the machine is busy, or raise --item_seconds"
                refused, process = Refused("scorer_timeout", text), process and process.kill()
            except (EOFError, OSError):
                text = "the process that scored it has died; without enough memory, lower --workers"
                refused, process = Refused("worker_died", text), process and process.kill()
            except Exception as error:  # an answer that cannot be unpickled; without this thread, calls would wait
                traceback.print_exc()
                text = f"{type(error).__name__}: see the log of the server"
                refused, process = Refused("internal", text), process and process.kill()
            if refused:
                future.set_exception(refused)
            else:
                future.set_result(value)
        if process:
            process.kill()


class _Process:
    def __init__(self, options: Options, seconds: float):
        # -P and this path: nothing in the present folder, nor grpo/poster/, whose names are short, hides a module
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-P", "-c", CODE, str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()  # or the end of the process would not be the end of the pipe
        try:
            _, refused = self.call(_prepare, (options, seconds), START_SECONDS)
            if refused:
                raise OSError(str(refused))
        except OSError:
            self.kill()
            raise

    def call(self, function: Callable, args: tuple, seconds: float) -> tuple[Any, Refused | None]:
        self.pipe.send((function, args))
        if not self.pipe.poll(seconds):
            raise TimeoutError
        return self.pipe.recv()

    def kill(self) -> None:
        self.pipe.close()
        self.popen.kill()
        self.popen.wait()


# ---- what runs in the processes ----

_own: dict[str, Any] = {}  # options, fonts and seconds of this process


def serve(handle: int) -> None:
    """Answers calls until the server closes the pipe, or ends in whatever way.

    Args:
        handle: file descriptor of the pipe.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the server decides when this ends
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)  # the server answers /health although all cores score posters
    pipe = Connection(handle)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        if "seconds" in _own:  # ends this process, should the server not be there to do it
            signal.alarm(int(_own["seconds"]) + 10)
        try:
            answer = function(*args), None
        except Refused as refused:
            answer = None, refused
        except Exception as error:
            traceback.print_exc()
            answer = None, Refused("internal", f"{type(error).__name__}: see the log of the server")
        signal.alarm(0)
        try:
            pipe.send(answer)
        except BrokenPipeError:  # the server was killed meanwhile
            return


def _prepare(options: Options, seconds: float) -> None:
    Image.MAX_IMAGE_PIXELS = MAX_IMAGE_PIXELS
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    _own.update(options=options, fonts=Fonts(options.font_paths), seconds=seconds)


def assess(item: Item) -> reward.Assessed:
    """The CPU part of a score.

    Args:
        item: what to score.

    Raises:
        Refused: its ground truth or an image is not usable.
    """
    options = _own["options"]
    try:
        truth = _ground_truth(item.truth)
    except ValueError as error:
        raise Refused("bad_ground_truth", str(error)) from error
    images = {name: image(reference, options.asset_root) for name, reference in item.images.items()}
    space, picture = options.coord_space, options.with_image
    return reward.assess(item.solution, truth, fonts=_own["fonts"], images=images or None, coord_space=space,
                         with_image=picture)  # fmt: skip


@functools.lru_cache(64)  # the completions of a group come together
def _ground_truth(text: str) -> layout.Poster:
    return layout.ground_truth(text)


@functools.lru_cache(8)
def image(reference: str, asset_root: str) -> Image.Image:
    """An input image; nothing is ever fetched.

    Args:
        reference: base64, or a path below the asset root, or "synthetic:...".
        asset_root: a folder, or "" for none.

    Returns:
        RGB.

    Raises:
        Refused: there is no such image, or it is too large, or of another format.
    """
    try:
        if reference.startswith("synthetic:"):
            return synthetic.image(reference)
        if reference.lower().endswith((".png", ".jpg", ".jpeg")):
            content = _asset(reference, asset_root)
        else:
            content = base64.b64decode(reference, validate=True)
        if len(content) > MAX_IMAGE_BYTES:
            raise ValueError(f"{len(content)} bytes: must be at most {MAX_IMAGE_BYTES}; make it smaller")
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as opened:
            if opened.width * opened.height > MAX_IMAGE_PIXELS:  # known before anything is decoded
                raise ValueError(f"{opened.size} pixels: must be at most {MAX_IMAGE_PIXELS}; make it smaller")
            return pictures.rgb(opened)
    except binascii.Error as error:
        raise Refused("bad_image", f"an image is neither base64 nor a path of a .png or .jpg ({error})") from error
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refused("bad_image", f"an image cannot be used: {error}") from error


def _asset(reference: str, asset_root: str) -> bytes:
    if not asset_root:
        raise ValueError("it is a path, and the server has no --asset_root")
    root = Path(asset_root).resolve()
    path = (root / reference).resolve()  # also through links
    if not path.is_relative_to(root) or not path.is_file():
        raise ValueError(f"{reference!r:.200} is no file below the asset root")
    with path.open("rb") as file:
        return file.read(MAX_IMAGE_BYTES + 1)
