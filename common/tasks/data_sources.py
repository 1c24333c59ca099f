"""Reads the rows of a data source as dicts.

Sources: "toy" (built in) | rows.jsonl | a folder written by `datasets.save_to_disk` | a hub id
         "owner/name[:config]"
"""

import json
import re
from pathlib import Path
from typing import Any

_HUB_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(:(?P<config>[\w.-]+))?")
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zst", ".zip")


def read_rows(source: str, split: str = "train") -> list[dict]:
    """Reads all rows of a source as dicts.

    Args:
        source: "toy", a .jsonl file, a saved dataset folder, or a hub id with an optional config
            after a colon.
        split: Split of the toy task, of a saved `DatasetDict` or of a hub data set; a file has
            none.

    Raises:
        FileNotFoundError: Nothing of that name exists.
        ValueError: A line or the whole source is unusable; no row is ever skipped.
    """
    path = Path(source).expanduser()
    if source == "toy":
        from common.tasks import toy  # here, because it imports a model class

        rows = toy.rows(split)
    elif path.is_dir():
        rows = _read_saved(path, split)
    elif path.is_file():
        rows = read_json_lines(path)
    elif _is_hub_id(source):
        rows = _read_hub(source, split)
    else:
        raise FileNotFoundError(
            f"no data at {source!r}: there is no such file or folder (looked for {path.absolute()}), and it is no hub "
            'id of the form "owner/name" or "owner/name:config"; correct the path, or use "toy" for the built-in task'
        )
    if not rows:
        raise ValueError(f"{source}: no rows; training needs at least one batch")
    return rows


def _is_hub_id(source: str) -> bool:
    """Whether a source may be a hub id: a mistyped path must not be sent to the hub."""
    is_path = source.lower().endswith(_FILE_SUFFIXES) or Path(source).parent.is_dir()
    return _HUB_ID.fullmatch(source) is not None and not is_path


def read_json_lines(path: Path) -> list[dict]:
    """Reads a UTF-8 file of one JSON object per line; BOMs, CRLF and blank lines are allowed."""
    rows, position = [], 0
    with open(path, "rb") as file:  # binary: lines end at line feeds only, U+2028 may be inside a string
        for number, raw in enumerate(file, start=1):
            bad, text = raw.find(b"\0"), ""  # valid UTF-8, but in practice a sign of UTF-16
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = error.start
            if bad >= 0:
                raise ValueError(
                    f"{path}: byte {position + bad} is not UTF-8 text (line {number}); save the file as UTF-8, "
                    "uncompressed, with one JSON object per line"
                )
            if line := text.strip().lstrip("\ufeff").strip():  # joined files have a mark in the middle
                rows.append(_parse_line(line, f"{path}, line {number}"))
            position += len(raw)
    return rows


def _parse_line(line: str, where: str) -> dict:
    wanted = f"{where}: expected one JSON object per line, got {line[:40]!r}"
    remedy = "write a JSON array or an indented file as one object per line, and complete a line that was cut off"
    try:  # not strict: a raw tab inside a string is accepted
        row = json.loads(line, strict=False, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"{wanted} ({error.msg} at column {error.colno}); {remedy}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: lists and objects lie too deep inside one another; write them flatter") from error
    except ValueError as error:  # a key twice, or a number of too many digits
        raise ValueError(f"{where}: {error}; correct the line") from error
    if isinstance(row, dict):
        return row
    raise ValueError(f"{wanted}; {remedy}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    """Refuses duplicate keys, of which the `json` module would silently keep the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return row


def _read_saved(path: Path, split: str) -> list[dict]:
    """Reads a folder from `save_to_disk` of a `Dataset`, or of a `DatasetDict`, which has splits."""
    datasets = _import_datasets(str(path))
    try:
        saved = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is a folder, but none that datasets.save_to_disk wrote; name a file in it") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ValueError(f"{path} has no split {split!r}; use one of: {', '.join(saved)}")
        saved = saved[split]
    return list(saved)


def _read_hub(source: str, split: str) -> list[dict]:
    """Reads "owner/name" or "owner/name:config" from the hub, or from its local cache."""
    datasets = _import_datasets(source)
    parts = _HUB_ID.fullmatch(source)
    try:
        return list(datasets.load_dataset(parts["name"], parts["config"], split=split))  # runs no code from the hub
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"cannot load {source!r} (data set {parts['name']!r}, config {parts['config']!r}, split {split!r}) from "
            f"the hub, and there is no such file or folder here; check name, config, split and network: {error}"
        ) from error


def _import_datasets(source: str):
    """Imports `datasets`, an optional package."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{source!r} needs the package `datasets`: pip install datasets; or use a .jsonl") from error
    return datasets
