"""What a run wants from a disk: a folder that no other run uses, and files that are what was written."""

import fcntl
import os
import shutil
import socket
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from common.base.checks import require

LOCK = ".lock"  # in the folder of a run; the kernel holds it for the process, so that a kill leaves none behind
READ_AT_ONCE = 2**24  # bytes

_claimed: dict[Path, IO] = {}  # open as long as the process lives
# a forked process would hold the lock, too, and may outlive a run that is killed; this process keeps it all the same
os.register_at_fork(after_in_child=lambda: [file.close() for file in _claimed.values()])


def claim(out_dir: str | Path) -> None:
    """Makes the folder of a run, and keeps it for this process.

    Args:
        out_dir: of the run.

    Raises:
        ValueError: another run uses it, or it cannot be written, or it is no name.
    """
    require(
        str(out_dir).strip() != "" and not str(out_dir).startswith("~"),
        f"out_dir = {str(out_dir)!r}",
        "must name a folder, and only a shell knows what ~ is",
        "write its whole path, or one from here, such as 'runs/a'",
    )
    folder = Path(out_dir).resolve()
    if folder in _claimed:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(handle, "r+", encoding="utf-8")  # closed by the end of the process
    except OSError as error:
        raise ValueError(
            f"out_dir = {str(out_dir)!r}: it cannot be written ({error.strerror}); mend that, or give another out_dir"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if not isinstance(error, BlockingIOError):  # a file system without locks
            print(f"warning: {folder} cannot be locked ({error.strerror}): take care that no two runs share it")
            _claimed[folder] = file
            return
        raise ValueError(
            f"out_dir = {str(out_dir)!r}: another run uses it ({file.read().strip() or 'it has just begun'}); give "
            "another out_dir, or end that run first"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
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
    """Deletes a folder with all that is in it; of a symbolic link the link alone.

    Args:
        path: of the folder.
    """
    path.unlink() if path.is_symlink() else shutil.rmtree(path)


def append(path: Path, text: str) -> None:
    """Adds text to the end of a file of a run.

    Args:
        path: of the file; made if it is absent.
        text: half characters in it are written as their codes.

    Raises:
        OSError: it could not be written; the message names the file, and says what to do.
    """
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:  # what a write raises names no file
        raise OSError(
            f"{path} could not be written, on which {free(path.parent)} is free: {error.strerror}; mend that, then run "
            "the same command: it goes on from its last checkpoint"
        ) from error


def free(folder: str | Path) -> str:
    """Room on the disk of a folder, in words.

    Args:
        folder: on it.
    """
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"
    except OSError as error:
        return f"? GiB ({error.strerror})"


def sync(path: Path) -> None:
    """Makes a file, or the entries of a folder, survive a power cut.

    Args:
        path: of it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
