"""What a run wants from a disk: a folder that no other run uses, and files that are what was written."""

import errno
import fcntl
import os
import shutil
import socket
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

LOCK = ".lock"  # in the folder of a run; the kernel holds it for the process, so that a kill leaves none behind
READ_AT_ONCE = 2**24  # bytes
NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)  # of file systems that have none

_claimed: dict[Path, IO] = {}  # open as long as the process lives


def claim(out_dir: str | Path) -> None:
    """Makes the folder of a run, and keeps it for this process.

    Args:
        out_dir: of the run.

    Raises:
        ValueError: another run uses it, or it cannot be written.
    """
    folder = Path(out_dir).resolve()
    if folder in _claimed:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115, closed by the end of the process
    except OSError as error:
        raise ValueError(
            f"out_dir = {str(out_dir)!r}: it cannot be written ({error.strerror}); mend that, or give another out_dir"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            print(f"warning: {folder} cannot be locked ({error.strerror}): take care that no two runs share it")
            return
        file.seek(0)
        raise ValueError(
            f"out_dir = {str(out_dir)!r}: another run uses it ({file.read().strip() or 'it has just begun'}); give "
            "another out_dir, or end that run first"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _claimed[folder] = file


def fingerprints(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
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
