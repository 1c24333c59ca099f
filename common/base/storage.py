"""Files of a run: a lock on its folder, checksums, durable writes, and what happens when one fails."""

import contextlib
import errno
import fcntl
import io
import itertools
import os
import shutil
import socket
import sys
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from common.base.checks import require

LOCK = ".lock"  # in the folder of a run; the kernel releases the lock when the process ends, however that happens
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of file systems without locks
READ_AT_ONCE = 2**24  # bytes

_claimed: dict[Path, io.FileIO] = {}  # lock files, open until the process ends
_failing: dict[str, set[int | None]] = {}  # errors of `optional` since its last success
# a forked process would inherit the lock and may outlive a killed run; closing its copy does not release ours
os.register_at_fork(after_in_child=lambda: [file.close() for file in _claimed.values()])


def keep_compiled_code() -> None:
    """Lets torch.compile keep its code in the user's cache folder; in /tmp, torch's choice, it is lost with a restart.

    A folder that TORCHINDUCTOR_CACHE_DIR names already stays as it is.
    """
    with contextlib.suppress(OSError, RuntimeError):  # a home that cannot be written, or none: torch's choice will do
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rl_hand" / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def claim(out_dir: str | Path) -> None:
    """Creates the folder of a run and locks it for this process.

    Args:
        out_dir: of the run.

    Raises:
        ValueError: another run uses it, it cannot be written, or it is not the name of a folder.
    """
    require(
        str(out_dir).strip() != "" and not str(out_dir).startswith("~"),
        f"out_dir = {str(out_dir)!r}",
        "must name a folder, and only a shell knows what ~ is",
        "write its whole path, or one from here, such as 'runs/a'",
    )
    require(
        str(out_dir).encode(errors="replace").decode() == str(out_dir),
        f"out_dir = {str(out_dir)!r}",
        f"holds bytes that are no characters in this locale ({sys.getfilesystemencoding()})",
        "set PYTHONUTF8=1, or give another out_dir",
    )
    folder = Path(out_dir).resolve()
    if folder in _claimed:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = io.FileIO(handle, "r+")  # stays open until the process ends
    except OSError as error:
        raise ValueError(
            f"out_dir = {str(out_dir)!r}: it cannot be written ({error.strerror}); mend that, or give another out_dir"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = file.readall().decode(errors="replace").strip() or "it has just begun"
        raise ValueError(
            f"out_dir = {str(out_dir)!r}: another run uses it ({owner}); give another out_dir, or end that run first"
        ) from error
    except OSError as error:
        print(f"warning: {folder} cannot be locked ({error.strerror}): take care that no two runs share it")
    else:
        with contextlib.suppress(OSError):  # who holds the lock is only for the message above
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _claimed[folder] = file


def checksums(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    """Size and CRC-32 of files.

    Args:
        folder: that holds them.
        names: of the files, relative to it.

    Returns:
        {"bytes": .., "crc32": eight hexadecimal digits} by name.
    """
    names = sorted(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        sums = list(threads.map(lambda name: _crc32(folder / name), names))
    return {name: {"bytes": (folder / name).stat().st_size, "crc32": found}
            for name, found in zip(names, sums, strict=True)}  # fmt: skip


def _crc32(path: Path) -> str:
    found = 0
    with open(path, "rb") as file:
        while part := file.read(READ_AT_ONCE):
            found = zlib.crc32(part, found)
    return f"{found:08x}"


def remove(path: Path) -> None:
    """Deletes a file, or a folder with its content; a symbolic link is deleted, not followed."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def publish(unfinished: Path, folder: Path) -> None:
    """Moves a finished folder to its place, unless another process has put one there first.

    Args:
        unfinished: on the same file system; stays where it is if it is not needed.
        folder: its place.

    Raises:
        OSError: it cannot be moved, and there is none.
    """
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def append(path: Path, text: str) -> None:
    """Appends text to a file, which is created if it is absent: all of it, or none if an error is raised.

    Args:
        path: of the file.
        text: lone surrogates are written as escapes.
    """
    data = text.encode("utf-8", "backslashreplace")
    with open(path, "ab", buffering=0) as file:  # a buffer would be written again on closing
        end = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise


@contextlib.contextmanager
def required(path: Path) -> Iterator[None]:
    """Surrounds work on a file that a run cannot do without; its error gets file, free space and remedy.

    Args:
        path: of the file or folder.

    Raises:
        OSError: one was raised in the block.
    """
    try:
        yield
    except OSError as error:
        room = free(path if os.path.isdir(path) else path.parent)
        raise OSError(
            f"{path} could not be read or written, on which {room} is free: {error.strerror or error}; "
            "mend that, then run the same command: it goes on from its last checkpoint, if that is still there"
        ) from error


@contextlib.contextmanager
def optional(failure: str, remedy: str) -> Iterator[None]:
    """Surrounds work that a run can do without: an OSError becomes a warning.

    The warning is printed once per reason, and again after the work has succeeded in between.

    Args:
        failure: such as "runs/a/samples.jsonl could not be written"; also tells different work apart.
        remedy: what to do, and what the run does meanwhile.
    """
    try:
        yield
    except OSError as error:
        reasons = _failing.setdefault(failure, set())
        if error.errno not in reasons:
            reasons.add(error.errno)
            tqdm.write(f"warning: {failure}: {error}; {remedy}", file=sys.stderr)
    else:
        _failing.pop(failure, None)


def free(folder: str | Path) -> str:
    """Free space on the disk of a folder, as text."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"
    except OSError as error:
        return f"? GiB ({error.strerror})"


def size(*folders: Path) -> str:
    """Size of all files in folders, as text; those that cannot be read do not count."""
    total = 0
    for folder, _, names in itertools.chain.from_iterable(map(os.walk, folders)):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return f"{total / 2**30:.1f} GiB"


def read_lines(path: Path, errors: str = "strict") -> list[str]:
    """The lines of a UTF-8 text file, which only a line feed ends.

    `str.splitlines` also cuts at U+2028, U+0085 and six others, which JSON may hold inside a text.

    Args:
        path: of the file.
        errors: what to do with bytes that are not UTF-8, as in `open`.
    """
    text = path.read_text(encoding="utf-8", errors=errors)
    return text.removesuffix("\n").split("\n") if text else []


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
