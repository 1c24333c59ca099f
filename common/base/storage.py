"""Files of a run: a lock on its folder, checksums, durable and readable writes."""

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

LOCK = ".lock"  # in the folder of a run; the kernel releases the lock when the process ends, however that happens
READ_AT_ONCE = 2**24  # bytes

_claimed: dict[Path, IO] = {}  # lock files, open until the process ends
# a forked process would inherit the lock and may outlive a killed run; closing its copy does not release ours
os.register_at_fork(after_in_child=lambda: [file.close() for file in _claimed.values()])


def claim(out_dir: str | Path) -> None:
    """Creates the folder of a run and locks it for this process.

    Args:
        out_dir: of the run.

    Raises:
        ValueError: another run uses it, it cannot be written, or it is empty or begins with ~.
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
        file = os.fdopen(handle, "r+", encoding="utf-8")  # stays open until the process ends
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
    """Deletes a folder with its content; a symbolic link is deleted, not followed."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path)


def append(path: Path, text: str) -> None:
    """Appends text to a file of a run, which is created if it is absent.

    Args:
        path: of the file.
        text: lone surrogates are written as escapes.

    Raises:
        OSError: it could not be written; the message names the file and the remedy.
    """
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:  # a failed write does not name the file
        raise OSError(
            f"{path} could not be written, on which {free(path.parent)} is free: {error.strerror}; mend that, then run "
            "the same command: it goes on from its last checkpoint"
        ) from error


def free(folder: str | Path) -> str:
    """Free space on the disk of a folder, as text."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"
    except OSError as error:
        return f"? GiB ({error.strerror})"


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
