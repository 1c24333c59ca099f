"""Reads the rows of a data source as dicts.

Sources: "toy" (built in) | a file (FORMATS) | a folder of such files, as on a hub, with an optional
         config: "folder:config" | a folder written by `datasets.save_to_disk` | a hub id
         "owner/name[:config]"

No source runs code, and a folder is read by itself: files that lead out of it are refused.
"""

import csv
import dataclasses
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HUB_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(:(?P<config>[\w.-]+))?")
FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".jsonl.gz", ".json.gz")
_OTHER_SUFFIXES = (".txt", ".gz", ".zst", ".zip")


def read_rows(source: str, split: str = "train") -> list[dict]:
    """Reads all rows of a source as dicts.

    Args:
        source: as at the top of this file.
        split: split of the toy task, of a folder or of a hub data set; a file has none.

    Raises:
        FileNotFoundError: Nothing of that name exists.
        ValueError: A line or the whole source is unusable; no row is ever skipped.
    """
    path, (folder, _, config) = Path(source).expanduser(), source.rpartition(":")
    if source == "toy":
        from common.tasks import toy  # here, because it imports a model class

        rows = toy.rows(split)
    elif path.is_dir():
        rows = _read_folder(path, None, split)
    elif path.is_file():
        rows = _read_file(path)
    elif folder and Path(folder).expanduser().is_dir():
        rows = _read_folder(Path(folder).expanduser(), config, split)
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
    is_path = source.lower().endswith((*FORMATS, *_OTHER_SUFFIXES)) or Path(source).parent.is_dir()
    return _HUB_ID.fullmatch(source) is not None and not is_path


def _read_file(path: Path) -> list[dict]:
    """Reads a file; its first bytes and its suffix tell the format."""
    with open(path, "rb") as file:
        start = file.read(8)
    suffix = path.suffix.lower()
    if start.startswith(b"PAR1") or suffix in (".parquet", ".arrow"):
        return _read_table(path, is_parquet=start.startswith(b"PAR1"))
    if suffix in (".csv", ".tsv"):
        return _read_csv(path)
    if start.startswith((b"PK\3\4", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"SQLite")):
        raise ValueError(
            f"{path}: an archive, database or compressed file that is not read here; give a file of one of these "
            f"formats: {', '.join(FORMATS)}"
        )
    is_array = suffix == ".json" and start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    return _read_json_array(path) if is_array else read_json_lines(path)


def _read_table(path: Path, is_parquet: bool) -> list[dict]:
    """Reads a Parquet file, or an Arrow file or stream."""
    _, pyarrow, _ = _import_datasets(str(path))
    try:
        if is_parquet:
            file = pyarrow.parquet.ParquetFile(path)
            return [row for batch in file.iter_batches() for row in batch.to_pylist()]
        with pyarrow.memory_map(str(path)) as file:
            try:
                table = pyarrow.ipc.open_stream(file).read_all()  # as `datasets` writes it
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(file).read_all()
            return table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot be read as a table, it may be damaged or no {path.suffix[1:]} file: {error}; write or "
            "download it again"
        ) from error


def _read_csv(path: Path) -> list[dict]:
    """Reads a UTF-8 file with names in its first line; all values are text, since 007 is no 7."""
    rows: list[dict] = []
    csv.field_size_limit(2**31 - 1)  # by default 131,072 characters, which a prompt may exceed
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(f"other than {len(reader.fieldnames or [])} fields, as its first line has")
                rows.append(row)
            if len(set(reader.fieldnames or [])) < len(reader.fieldnames or []):
                raise ValueError("a column name stands twice in its first line")
        except (csv.Error, ValueError) as error:  # a UnicodeDecodeError is a ValueError
            raise ValueError(
                f"{path}, line {reader.line_num}: {error}; save the file as UTF-8, with quotes around fields that "
                "hold a delimiter"
            ) from error
    return rows


def _read_json_array(path: Path) -> list[dict]:
    """Reads a UTF-8 file of one JSON array of objects."""
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"), strict=False, object_pairs_hook=_unique_keys)
    except RecursionError as error:
        raise ValueError(f"{path}: lists and objects lie too deep inside one another; write them flatter") from error
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON array of objects in UTF-8: {error}; correct the file") from error
    odd = next((i for i, row in enumerate(rows) if not isinstance(row, dict)), None)
    if odd is not None:
        raise ValueError(f"{path}, row {odd}: expected a JSON object, got {rows[odd]!r:.40}; correct the file")
    return rows


def read_json_lines(path: Path) -> list[dict]:
    """Reads a UTF-8 file of one JSON object per line; BOMs, CRLF, blank lines and .gz are allowed."""
    rows, position = [], 0
    with open(path, "rb") as file:
        lines = _unpacked(file, path) if path.suffix.lower() == ".gz" else file
        # binary: lines end at line feeds only, U+2028 may be inside a string
        for number, raw in enumerate(lines, start=1):
            bad, text = raw.find(b"\0"), ""  # valid UTF-8, but in practice a sign of UTF-16
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = error.start
            if bad >= 0:
                raise ValueError(
                    f"{path}: byte {position + bad} is not UTF-8 text (line {number}); save the file as UTF-8, "
                    "uncompressed or as .jsonl.gz, with one JSON object per line"
                )
            if line := text.strip().lstrip("\ufeff").strip():  # joined files have a mark in the middle
                rows.append(_parse_line(line, f"{path}, line {number}"))
            position += len(raw)
    return rows


def _unpacked(file: Any, path: Path) -> Iterator[bytes]:
    """Lines of a gzip file."""
    try:
        yield from gzip.GzipFile(fileobj=file)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged gzip data ({error}); write or download the file again") from error


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


def _read_folder(path: Path, config: str | None, split: str) -> list[dict]:
    """Reads a folder from `save_to_disk`, or one of data files, as `datasets` finds them."""
    datasets, _, _ = _import_datasets(str(path))
    _require_inside(path)
    saved = next((name for name in ("dataset_dict.json", "state.json") if (path / name).is_file()), None)
    if saved:
        return _read_saved(datasets, path, split)
    if nested := next(path.rglob("state.json"), None):
        raise ValueError(
            f"{path} is a folder, but none that datasets.save_to_disk wrote; there is one in it: give {nested.parent}"
        )
    if not any(file.name.lower().endswith(FORMATS) for file in path.rglob("*")):
        raise ValueError(
            f"{path} is a folder, but none that datasets.save_to_disk wrote, and it has no files of these formats: "
            f"{', '.join(FORMATS)}; give a file, or another folder"
        )
    try:
        _require_files_inside(datasets.load_dataset_builder(str(path), config).config.data_files, path)
        return _rows_of(datasets.load_dataset(str(path), config, split=split))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"cannot load the data files of {path} (config {config!r}, split {split!r}): {error}; check the names of "
            "splits and configs (give one as folder:config), or give a single file"
        ) from error


def _read_saved(datasets: Any, path: Path, split: str) -> list[dict]:
    """Reads a folder from `save_to_disk` of a `Dataset`, or of a `DatasetDict`, which has splits."""
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:  # of a damaged folder
        raise ValueError(
            f"{path}: the data set in this folder cannot be read: {error!r:.300}; write it again with "
            "datasets.save_to_disk"
        ) from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ValueError(f"{path} has no split {split!r}; use one of: {', '.join(saved)}")
        saved = saved[split]
    return _rows_of(saved)


def _read_hub(source: str, split: str) -> list[dict]:
    """Reads "owner/name" or "owner/name:config" from the hub, or from its local cache."""
    datasets, _, _ = _import_datasets(source)
    parts = _HUB_ID.fullmatch(source)
    try:
        return _rows_of(datasets.load_dataset(parts["name"], parts["config"], split=split))  # runs no code from the hub
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"cannot load {source!r} (data set {parts['name']!r}, config {parts['config']!r}, split {split!r}) from "
            f"the hub, and there is no such file or folder here; check name, config, split and network: {error}"
        ) from error


def _rows_of(dataset: Any) -> list[dict]:
    """Rows of a data set, with images and sounds as they are stored: decoding takes other packages."""
    for name, feature in (getattr(dataset, "features", None) or {}).items():
        if getattr(feature, "decode", False):
            dataset = dataset.cast_column(name, dataclasses.replace(feature, decode=False))
    return list(dataset)


def _require_inside(folder: Path) -> None:
    """Refuses a folder with files that lead out of it: links, and names in its descriptions."""
    root = _root(folder)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise _outside(path, path.readlink())
            if name == "state.json":
                _require_names(path, [entry for entries in _json_object(path).values() if isinstance(entries, list)
                                      for entry in entries], path.parent.resolve())  # fmt: skip
            elif name == "dataset_dict.json":
                _require_names(path, _json_object(path).get("splits", []), path.parent.resolve())
    for name in ("README.md", ".huggingface.yaml"):
        if (folder / name).is_file():
            _require_names(folder / name, _named_files(folder / name), root)


def _require_names(path: Path, names: Any, root: Path) -> None:
    """Refuses names in a description that lead out of a folder; entries may be {"filename": name}."""
    for entry in names if isinstance(names, list) else [names]:
        name = entry.get("filename") if isinstance(entry, dict) else entry
        if isinstance(name, str) and ("://" in name or not (root / name).resolve().is_relative_to(root)):
            raise _outside(path, name)


def _require_files_inside(files_by_split: Any, folder: Path) -> None:
    """Refuses data files outside of a folder, as `datasets` found them."""
    for name in [name for names in (files_by_split or {}).values() for name in names]:
        if "://" in name or not Path(name).resolve().is_relative_to(_root(folder)):
            raise _outside(folder, name)


def _root(folder: Path) -> Path:
    """The folder that files must be in: itself, or all of its repository in the cache of the hub."""
    path = folder.resolve()
    return path.parents[1] if path.parent.name == "snapshots" else path


def _outside(path: Path, name: Any) -> ValueError:
    return ValueError(
        f"{path}: it points to {str(name)!r}, outside of the data set's folder; copy the file into the folder, or "
        "remove the entry"
    )


def _json_object(path: Path) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON object ({error}); write the data set again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object; write the data set again")
    return value


def _named_files(path: Path) -> list[str]:
    """The patterns of `data_files` and `data_dir` in the YAML of a data set's card."""
    _, _, yaml = _import_datasets(str(path))
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".md":
        head = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---", text, re.DOTALL)
        text = head[1] if head else ""
    try:
        card = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}: its YAML cannot be read ({error}); correct or remove it") from error
    configs = card.get("configs") if isinstance(card, dict) else None
    found, seen = [], set()
    configs = configs if isinstance(configs, list) else []
    left = [config.get(key) for config in configs if isinstance(config, dict) for key in ("data_files", "data_dir")]
    while left:
        value = left.pop()
        if isinstance(value, str):
            found.append(value)
        elif id(value) not in seen and isinstance(value, (list, dict)):  # aliases may repeat a value without end
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return found


def _import_datasets(source: str) -> tuple[Any, Any, Any]:
    """Imports `datasets`, an optional package, and two that come with it."""
    try:
        import datasets
        import pyarrow.parquet
        import yaml
    except ImportError as error:
        raise ImportError(f"{source!r} needs the package `datasets`: pip install datasets; or use a .jsonl") from error
    return datasets, pyarrow, yaml
