"""The files of a checkpoint, and how a complete and undamaged one is told from any other folder.

A checkpoint is a transformers folder (model.safetensors, config, tokenizer) with these additions:
    optimizer.safetensors   fp32 master weights and Adam state by parameter name
    rng.safetensors         random number generators of every rank and device
    state.json              step, data position, Config, notes of the script, size and CRC-32 of every file,
                            fingerprint of metrics.jsonl (branches.py)
    reference/              the frozen model, if it was refreshed during the run
    curriculum.safetensors  what the choice of prompts depends on, with the option curriculum
    rollout.safetensors     completions of the next step, if a service went away before they were scored
Nothing is pickled.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from common.base import storage

STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
RNG = "rng.safetensors"
REFERENCE = "reference"
ROLLOUT = "rollout.safetensors"
BEST = "best"  # a link in the folder of a run, beside its checkpoints
CURRICULUM = "curriculum.safetensors"


def name(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"checkpoint-{step:06d}"


def number(folder: Path) -> int:
    """Steps of a folder that is named checkpoint-NNNNNN; -1 if it is not."""
    digits = folder.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() and folder.name == name(int(digits)) else -1


def misnamed(folder: Path) -> str:
    """Why a folder is not the checkpoint that its name says, as text; "" if it is."""
    try:
        step = read_state(folder)["step"]
    except OSError as error:
        return f"its {STATE} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"its {STATE} cannot be read"
    return "" if step == number(folder) else f"its {STATE} is of step {step}"


def linked(out_dir: str | Path) -> Path | None:
    """The checkpoint that out_dir/best leads to, which may be gone; None if there is no such link.

    Args:
        out_dir: of the run.
    """
    try:
        folder = Path(out_dir) / os.readlink(Path(out_dir) / BEST)
    except OSError:  # absent, or no link: the user's
        return None
    return folder if folder.parent == Path(out_dir) and number(folder) >= 0 else None


def entries(out_dir: str | Path, prefix: str) -> list[Path]:
    """What stands in the folder of a run under names with this prefix; nothing if there is no such folder.

    Raises:
        OSError: the folder cannot be read; `Path.glob` would hide that.
    """
    try:
        return [Path(out_dir) / found for found in sorted(os.listdir(out_dir)) if found.startswith(prefix)]
    except FileNotFoundError:
        return []


def named(out_dir: str | Path) -> list[Path]:
    """Folders that are named checkpoint-NNNNNN, the one with the fewest steps first.

    Args:
        out_dir: of the run.
    """
    found = [path for path in entries(out_dir, "checkpoint-") if number(path) >= 0 and path.is_dir()]
    return sorted(found, key=number)


def own(out_dir: str | Path) -> list[Path]:
    """Checkpoints of a run, the one with the fewest steps first, damaged ones included.

    Nothing else is renamed or deleted: a folder with another name than that of its step is the user's.

    Args:
        out_dir: of the run.
    """
    return [folder for folder in named(out_dir) if not misnamed(folder)]


def newest(out_dir: str | Path) -> Path | None:
    """The complete checkpoint with the most steps, or None.

    Args:
        out_dir: of the run.
    """
    return next(reversed(complete(out_dir)), None)


def complete(out_dir: str | Path) -> list[Path]:
    """All complete checkpoints of a run, the one with the fewest steps first.

    Args:
        out_dir: of the run.
    """
    return list(filter(is_complete, own(out_dir)))


def is_complete(folder: str | Path) -> bool:
    """Whether every file is there in its full size; fast, since no file but state.json is read."""
    return not damage(Path(folder), thorough=False)


def damage(folder: Path, thorough: bool = True) -> str:
    """What is wrong with a checkpoint, as text for an error; "" if nothing is.

    Args:
        folder: of the checkpoint.
        thorough: also compare checksums, which reads every file.
    """
    try:
        state = read_state(folder)
        # checkpoints of earlier versions hold sizes alone
        files = {name: {"bytes": was} if isinstance(was, int) else was for name, was in state["files"].items()}
        sizes = {name: was["bytes"] for name, was in files.items()}
    except FileNotFoundError:
        return f"{STATE} is missing"
    except OSError as error:
        return f"{STATE} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # truncated, or written by something else
        return f"{STATE} cannot be read"
    try:
        return _wrong_size(folder, sizes) or (_wrong_content(folder, state, files) if thorough else "")
    except OSError as error:
        return f"{Path(error.filename or STATE).name} cannot be read ({error.strerror})"


def _wrong_size(folder: Path, sizes: dict[str, int]) -> str:
    """The first file that is missing or has another size, as text."""
    for name, size in sizes.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or not (folder / name).is_file():
            return f"{name} is missing"
        if (found := (folder / name).stat().st_size) != size:
            return f"{name} has {found} bytes of {size}"
    return ""


def _wrong_content(folder: Path, state: dict[str, Any], files: dict[str, dict[str, int | str]]) -> str:
    """The first file that has another checksum, as text."""
    if "crc32" in state and state["crc32"] != _crc32(state):
        return f"{STATE} was edited"
    known = [name for name, was in files.items() if "crc32" in was]
    for name, found in storage.checksums(folder, known).items():
        if found != files[name]:
            return f"{name} is not the file that was saved (CRC-32 {found['crc32']}, not {files[name]['crc32']})"
    return ""


def read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json."""
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes state.json with its own checksum.

    Args:
        folder: of the checkpoint.
        state: JSON values.
    """
    state = json.loads(json.dumps(state))  # as it will be read: keys of notes become strings
    text = json.dumps({**state, "crc32": _crc32(state)}, indent=1)
    (folder / STATE).write_text(text, encoding="utf-8")


def _crc32(state: dict[str, Any]) -> str:
    """Checksum of state.json without the checksum in it."""
    text = json.dumps({name: value for name, value in state.items() if name != "crc32"}, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"
