"""Where a run starts, and what it leaves behind if it goes back to an earlier checkpoint.

The lines of metrics.jsonl say which branch a run is on, since no two steps take equally long: each checkpoint holds a
fingerprint of the lines of its steps. A run that goes back first cuts the file, in one rename, and then sets the later
checkpoints aside. If it is killed in between, the cut file tells that they are of the branch that was left.
"""

import errno
import os
import re
import sys
import zlib
from pathlib import Path
from typing import Any

from common.base import distributed, storage
from common.base.checks import require
from common.run import checkpoint_files as files

METRICS = "metrics.jsonl"
LINE = re.compile(rb'\{"step": (\d+), .*"learning_rate": .*\}')  # of a step, as run.py writes it
ABANDONED = "abandoned-"
WRITING = ".writing-"  # what is half written, or about to be deleted; saves delete what has this prefix
REPLACED = f"{WRITING}old-"


def find(out_dir: str, resume: str) -> Path | None:
    """The checkpoint that a run starts from; also locks `out_dir` for this run. Called by every rank.

    Args:
        out_dir: of the run.
        resume: "auto" (the newest usable checkpoint in out_dir, if any), "none" (start anew), or a checkpoint folder.
            "auto" skips checkpoints that are damaged or of another branch than metrics.jsonl, with a warning.

    Returns:
        The folder, or None to start anew.

    Raises:
        ValueError: the folder named is incomplete or damaged, or of another branch or run than out_dir; with "auto",
            all checkpoints are; with "none", out_dir already holds a run; another run uses out_dir, or it cannot be
            read or written; the ranks see different checkpoints.
    """
    folder = None
    with distributed.share_errors("resume"):
        if distributed.rank() == 0:
            try:
                if Path(out_dir).is_dir():
                    storage.claim(out_dir)
                folder = _choose(out_dir, resume)
                storage.claim(out_dir)
            except OSError as error:
                raise ValueError(
                    f"out_dir = {out_dir!r}: its checkpoints cannot be read ({error}); mend that, then run the same "
                    "command, or give another out_dir"
                ) from error
    folder = distributed.gather_objects(folder)[0]
    with distributed.share_errors("resume"):
        if folder is not None and (found := files.damage(folder, thorough=False)):
            raise ValueError(
                f"out_dir = {out_dir!r}: rank {distributed.rank()} does not see {folder}, from which rank 0 goes on "
                f"({found}); mend that: to resume on several machines, all must share out_dir"
            )
    if resume == "auto":
        distributed.print_main(f"resuming from {folder}" if folder else f"no checkpoint in {out_dir}: starting anew")
    return folder


def _choose(out_dir: str, resume: str) -> Path | None:
    for aside in files.entries(out_dir, REPLACED):  # the run was killed while it replaced a checkpoint
        if not files.is_complete(aside):
            continue
        final = aside.with_name(files.name(files.read_state(aside)["step"]))
        if not os.path.lexists(final):
            os.rename(aside, final)
            print(f"{final} was about to be replaced when a run ended: it is back in its place", flush=True)
    if resume == "auto":
        return _newest_usable(out_dir)
    if resume == "none":
        if files.newest(out_dir) or (Path(out_dir) / METRICS).exists():
            raise ValueError(f"out_dir = {out_dir!r} already holds a run: give another out_dir, or resume = 'auto'")
        return None
    folder = Path(resume)
    if folder.name == files.BEST:  # a run goes back to a step, whatever has led to it
        folder = files.linked(folder.parent) or folder
    if found := files.damage(folder):
        raise ValueError(
            f"resume = {resume!r}: not a complete checkpoint, {found}; give a folder checkpoint-NNNNNN with all its "
            "files, 'auto', or 'none'"
        )
    _require_own_branch(folder, Path(out_dir))
    return folder


def _require_own_branch(folder: Path, out_dir: Path) -> None:
    """Refuses a named checkpoint whose weights would be mixed with lines and checkpoints of other weights."""
    values, step = f"resume = {str(folder)!r}, out_dir = {str(out_dir)!r}", files.read_state(folder)["step"]
    if folder.parent.resolve() == out_dir.resolve():  # the folder itself may be a link
        require(files.number(folder) == step, values, f"a run goes back to folders checkpoint-NNNNNN only, and this "
                f"one holds step {step}", f"rename it to {files.name(step)}, or give another out_dir")  # fmt: skip
        require(not (found := departure(folder, out_dir)), values, found,
                "give another out_dir: it starts a branch of its own there")  # fmt: skip
    elif folder.resolve().parent != out_dir.resolve():
        own = files.newest(out_dir)
        earlier = own is None and len(_lines(out_dir, step)) > 0
        require(own is None and not earlier, values,
                f"out_dir holds {own.name if own else METRICS} of a run of its own, whose lines and checkpoints would "
                "be mixed with new ones", "give another out_dir, or resume = 'auto' to go on from it")  # fmt: skip


def _newest_usable(out_dir: str) -> Path | None:
    """The newest checkpoint that is undamaged and of the branch of metrics.jsonl; None if there is none at all."""
    folders = files.named(out_dir)
    for folder in reversed(folders):
        if not (found := files.damage(folder) or files.misnamed(folder) or departure(folder, out_dir)):
            return folder
        print(f"warning: {folder} is passed over: {found}", file=sys.stderr, flush=True)
    require(not folders, f"out_dir = {out_dir!r}", "no checkpoint in it can be used, see above",
            "put back what is missing, or move them away to start anew")  # fmt: skip
    return None


def fingerprint(out_dir: str | Path, step: int) -> dict[str, Any]:
    """What a checkpoint keeps of metrics.jsonl: number and CRC-32 of the lines of its steps.

    Args:
        out_dir: of the run.
        step: of the checkpoint.
    """
    lines = _lines(out_dir, step)
    return {"steps": len(lines), "crc32": f"{zlib.crc32(b''.join(lines)):08x}"}


def departure(folder: Path, out_dir: str | Path) -> str:
    """How metrics.jsonl tells that a checkpoint is of another branch or run, as text; "" if it does not.

    Args:
        folder: of the checkpoint; those of earlier versions have no fingerprint.
        out_dir: of the run. If metrics.jsonl is missing, or holds later steps only, nothing can be mixed.
    """
    state, path = files.read_state(folder), Path(out_dir) / METRICS
    saved = state.get("metrics", {"steps": 0})
    if saved["steps"] == 0:
        return ""
    now = fingerprint(out_dir, state["step"])
    if now["steps"] == 0 or now == saved:
        return ""
    return f"{path} does not hold the {saved['steps']} steps that led to it, but those of another branch or run"


def leave(out_dir: str | Path, step: int) -> None:
    """Sets aside the checkpoints after a step that a run has gone back to; metrics.jsonl has been cut before.

    Args:
        out_dir: of the run.
        step: that the run goes on from.

    Raises:
        OSError: one could not be renamed.
    """
    with storage.required(Path(out_dir)):
        later = [folder for folder in files.named(out_dir) if files.number(folder) > step]
        for folder in later:
            if found := files.misnamed(folder):
                print(
                    f"warning: {folder} is of steps that are taken again, but {found}; mend that, or move it away: the "
                    "run goes on, and sets it aside at that step",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            else:
                set_aside(folder)
        if later and (left := abandoned(out_dir)):
            print(left, flush=True)


def link_best(out_dir: str | Path, step: int | None) -> None:
    """Makes out_dir/best lead to the checkpoint of a step, in one rename; a failure is a warning.

    Args:
        out_dir: of the run.
        step: of the best evaluation. If None, or if this branch has no such checkpoint, a link of an earlier best is
            removed; nothing but a link to a checkpoint is replaced or removed.
    """
    link, before = Path(out_dir) / files.BEST, files.linked(out_dir)
    final = None if step is None else Path(out_dir) / files.name(step)
    with storage.optional(
        f"{link} could not be set to {final.name if final else 'nothing'}",
        "the run goes on, and the next save tries again; mend that",
    ):
        if final is not None and _is_of_branch(final, out_dir):
            if before == final:
                return
            if os.path.lexists(link) and before is None:
                raise FileExistsError(errno.EEXIST, "it is no link to a checkpoint, and stays as it is")
            temporary = unused(link.with_name(f"{WRITING}{link.name}"))
            os.symlink(final.name, temporary)  # relative, so that the folder of the run can be moved
            os.replace(temporary, link)
            storage.sync(Path(out_dir))
        elif before is not None:
            link.unlink()
            if step is not None:
                print(f"{link} is removed: the checkpoint of the best step, {step}, is gone", flush=True)


def _is_of_branch(folder: Path, out_dir: str | Path) -> bool:
    """Whether a checkpoint exists, and is of the branch of metrics.jsonl; an OSError if that cannot be found out."""
    try:
        files.read_state(folder)
    except FileNotFoundError:
        return False
    except (ValueError, RecursionError):
        pass
    if found := files.misnamed(folder):
        raise OSError(errno.EIO, f"{folder.name}: {found}")
    return not departure(folder, out_dir)


def set_aside(folder: Path) -> None:
    """Renames a checkpoint of another branch, so that "auto" passes it by; nothing deletes it."""
    aside = unused(folder.with_name(f"{ABANDONED}{folder.name}"))
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {folder} cannot be renamed to {aside.name}") from error
    print(f"{folder} is not of the branch that the run is on: now {aside}", flush=True)


def abandoned(out_dir: str | Path) -> str:
    """The checkpoints of branches that were left, as text; "" if there are none."""
    folders = files.entries(out_dir, f"{ABANDONED}checkpoint-")
    sizes = f"{len(folders)} checkpoints of branches that were left take {storage.size(*folders)}"
    return f"{sizes}: delete those that you do not need, {Path(out_dir) / ABANDONED}checkpoint-*" if folders else ""


def unused(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... at which nothing stands."""
    number = 1
    while os.path.lexists(free := path if number == 1 else path.with_name(f"{path.name}-{number}")):
        number += 1
    return free


def _lines(out_dir: str | Path, last_step: int) -> list[bytes]:
    """The lines of steps up to this one in metrics.jsonl; a line cut off by a kill is none."""
    path = Path(out_dir) / METRICS
    found = filter(None, map(LINE.fullmatch, path.read_bytes().split(b"\n"))) if path.exists() else ()
    return [match[0] for match in found if int(match[1]) <= last_step]
