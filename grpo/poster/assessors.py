"""Worker processes for the CPU part of the reward service: parsing, rendering, comparing, reading images.

They keep Python's global lock of the server free to answer requests. Each process is driven by its own thread of the
server, one call at a time: if the process dies or hangs, only that call fails, and the next one gets a new process.
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
from grpo.poster.errors import ScorerError
from grpo.poster.fonts import Fonts
from grpo.poster.items import Item, Refused

MAX_IMAGE_BYTES = 2**22  # of a PNG or JPEG
MAX_IMAGE_PIXELS = 2**24
START_SECONDS = 120  # for a process to import everything, on a busy machine
ROOT = Path(__file__).resolve().parents[2]
CODE = "import sys; from grpo.poster.assessors import serve; serve(int(sys.argv[1]))"


@dataclass(frozen=True)
class Options:
    """Settings of all calls."""

    font_paths: tuple[str, ...] = ()
    coord_space: str = "px"
    asset_root: str = ""
    with_image: bool = False


class Assessors:
    """A pool of worker processes; each starts with its first call."""

    def __init__(self, count: int, options: Options, seconds: float):
        """Starts the threads, but no process yet.

        Args:
            count: number of processes.
            options: for `assess`.
            seconds: timeout of a call, after which its process is killed.
        """
        self._options, self._seconds = options, seconds
        self._calls: queue.SimpleQueue[tuple[Future, Callable, tuple] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable, *args: Any) -> Future:
        """Calls a function in one of the processes.

        Args:
            function: of a module, since it is pickled.
            *args: its arguments.

        Returns:
            A future for its value, or for a Refused: raised by the function, or because the process hung, died or
            failed.
        """
        future: Future = Future()
        future.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it: `_work` sets a result
        self._calls.put((future, function, args))
        return future

    def close(self) -> None:
        """Stops the processes after the calls in the queue."""
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
            except (
                Exception
            ) as error:  # an answer that cannot be unpickled; this thread must go on, or calls would wait forever
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
        # -P and this path: neither the current folder nor grpo/poster/, with its short names, may shadow a module
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-P", "-c", CODE, str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()  # or the pipe would not close when the process ends
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


# Inside the processes

_state: dict[str, Any] = {}  # options, fonts and seconds of this process


def serve(handle: int) -> None:
    """Answers calls until the pipe closes, because the server says so or has died.

    Args:
        handle: file descriptor of the pipe.
    """
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # sent to the whole process group, but the server decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)  # the server must answer /health while all cores score posters
    pipe = Connection(handle)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        if "seconds" in _state:  # ends this process if the server is no longer there to do it
            signal.alarm(int(_state["seconds"]) + 10)
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
        except BrokenPipeError:  # the server was killed
            return


def _prepare(options: Options, seconds: float) -> None:
    Image.MAX_IMAGE_PIXELS = MAX_IMAGE_PIXELS
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    _state.update(options=options, fonts=Fonts(options.font_paths), seconds=seconds)


def assess(item: Item) -> reward.Assessed:
    """Computes the CPU part of a score.

    Args:
        item: to score.

    Raises:
        Refused: its ground truth or an image is invalid, or a picture is wanted and no font has its characters.
    """
    options = _state["options"]
    try:
        truth = _ground_truth(item.truth)
    except ValueError as error:
        raise Refused("bad_ground_truth", str(error)) from error
    images = {name: image(reference, options.asset_root) for name, reference in item.images.items()}
    space, picture = options.coord_space, options.with_image
    try:
        return reward.assess(item.solution, truth, fonts=_state["fonts"], images=images or None, coord_space=space,
                             with_image=picture)  # fmt: skip
    except ScorerError as error:
        raise Refused(error.code, str(error)) from error


@functools.lru_cache(64)  # the completions of a group arrive together
def _ground_truth(text: str) -> layout.Poster:
    return layout.ground_truth(text)


@functools.lru_cache(8)
def image(reference: str, asset_root: str) -> Image.Image:
    """Opens an input image, as RGB; never from the network.

    Args:
        reference: base64, a path below the asset root, or "synthetic:...".
        asset_root: a folder, or "" for none.

    Raises:
        Refused: the image is absent, too large, or of another format.
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
            if opened.width * opened.height > MAX_IMAGE_PIXELS:  # checked before decoding
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
    path = (root / reference).resolve()  # follows links
    if not path.is_relative_to(root) or not path.is_file():
        raise ValueError(f"{reference!r:.200} is no file below the asset root")
    with path.open("rb") as file:
        return file.read(MAX_IMAGE_BYTES + 1)
