"""Command line of a script from its Config dataclass: one option per field, the trailing comment is its help."""

import argparse
import ast
import dataclasses
import difflib
import inspect
import io
import json
import sys
import textwrap
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from common.base.checks import require_numbers

T = TypeVar("T")


def comments(cls: type) -> dict[str, str]:
    """The trailing comment of every field of a dataclass.

    Args:
        cls: a dataclass whose source can be read.

    Returns:
        Field name -> comment without the "#"; "" for a field without one.
    """
    found = {}
    for base in _dataclasses(cls):
        source = textwrap.dedent(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        by_line = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
        fields = [node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)]
        own = {node.target.id: by_line.get(node.end_lineno, "") for node in fields}
        found = {**own, **found}  # a class may name an inherited field again
    return found


def _dataclasses(cls: type) -> list[type]:
    """A dataclass and the dataclasses that it inherits from, itself first."""
    return [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]


def parse(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Reads a Config from the command line: `--name value` is the same as editing the field's line.

    `--help` shows the fields of `cls` first, then inherited ones under the first line of their class's docstring.

    Args:
        cls: a dataclass with fields of type str, int, float, bool or Literal of texts.
        argv: the arguments; those of the process by default.

    Returns:
        An instance of `cls`.

    Raises:
        SystemExit: an unknown option (the closest name is suggested), or a value that breaks a rule; code 2.
    """
    parser = argparse.ArgumentParser(description=cls.__doc__, allow_abbrev=False)
    helps, types = comments(cls), get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for base in _dataclasses(cls):
        group = parser if base is cls else parser.add_argument_group(base.__doc__.splitlines()[0].rstrip("."))
        for name in [name for name in inspect.get_annotations(base) if name in fields]:
            field, kind = fields.pop(name), types[name]
            text = f"{helps[name]} (default: {field.default!r})".replace("%", "%%").strip()
            if kind is bool:
                group.add_argument(f"--{name}", type=_bool, nargs="?", const=True, default=field.default, help=text)
            else:
                kind = str if get_origin(kind) is Literal else kind
                group.add_argument(f"--{name}", type=kind, default=field.default, help=text)
    argv = [_underscored(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        close = difflib.get_close_matches(unknown[0].split("=")[0].lstrip("-"), helps, n=1)
        parser.error(f"unknown option {unknown[0]}" + (f"; did you mean --{close[0]}?" if close else ""))
    try:
        require_numbers(vars(values))
        return cls(**vars(values))
    except ValueError as error:
        parser.error(str(error))


def save(cfg: Any, out_dir: str) -> None:
    """Writes the configuration of a run to `config.json` in its folder; rank 0 does, the others do nothing.

    Args:
        cfg: a dataclass instance.
        out_dir: of the run.
    """
    from common.base import distributed  # imports torch, which a server without a model does not need

    if distributed.rank() > 0:
        return
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    (Path(out_dir) / "config.json").write_text(json.dumps(dataclasses.asdict(cfg), indent=1) + "\n", encoding="utf-8")


def changed(old: dict[str, Any], cfg: Any) -> list[str]:
    """What differs between a saved configuration and the present one.

    Args:
        old: the saved fields.
        cfg: a dataclass instance.

    Returns:
        One line "name: old -> new" per field that differs.
    """
    new = dataclasses.asdict(cfg)
    names = [name for name in new if name in old and old[name] != new[name]]
    return [f"{name}: {old[name]!r} -> {new[name]!r}" for name in names]


def _bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is not a truth value: use true or false")


def _underscored(arg: str) -> str:
    """--learning-rate=1e-6 as --learning_rate=1e-6."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value
