"""The command line of a script, built from its Config dataclass: one option per field.

The trailing comment of a field is the help text of its option.
"""

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
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from common.base import console
from common.base.checks import require_numbers

T = TypeVar("T")


def comments(cls: type) -> dict[str, str]:
    """Trailing comment of every field of a dataclass, without the "#"; "" if there is none."""
    texts = {}
    for base in _dataclasses(cls):
        source = textwrap.dedent(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        by_line = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
        fields = [node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)]
        own = {node.target.id: by_line.get(node.end_lineno, "") for node in fields}
        texts = {**own, **texts}  # a subclass may redefine an inherited field
    return texts


def _dataclasses(cls: type) -> list[type]:
    """A dataclass, then the dataclasses that it inherits from."""
    return [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]


def parse(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Reads a Config from the command line: `--name value` is the same as editing the field's line.

    From then on, no print ends the process (`console.protect`).

    `--help` shows the fields of `cls` first. Inherited fields follow, grouped by class under the
    first line of the class's docstring.

    Args:
        cls: a dataclass with fields of type str, int, float, bool or Literal of strings.
        argv: default: the arguments of the process.

    Raises:
        SystemExit: code 2, for an invalid value or an unknown option; suggests the closest name.
    """
    console.protect()
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
            elif get_origin(kind) is Literal:
                words = "{" + ",".join(get_args(kind)) + "}"
                group.add_argument(f"--{name}", metavar=words, default=field.default, help=text)
            else:
                group.add_argument(f"--{name}", type=kind, default=field.default, help=text)
    argv = [_with_underscores(arg) for arg in (sys.argv[1:] if argv is None else argv)]
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
    """Writes a Config to `config.json` in `out_dir`; called by one rank."""
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    (Path(out_dir) / "config.json").write_text(json.dumps(dataclasses.asdict(cfg), indent=1) + "\n", encoding="utf-8")


def changed(old: dict[str, Any], cfg: Any) -> list[str]:
    """Differences between saved fields and a Config: one line "name: old -> new" per field."""
    new = dataclasses.asdict(cfg)
    names = [name for name in new if name in old and old[name] != new[name]]
    return [f"{name}: {old[name]!r} -> {new[name]!r}" for name in names]


def _bool(text: str) -> bool:
    """Parses a truth value."""
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is not a truth value: use true or false")


def _with_underscores(arg: str) -> str:
    """Replaces hyphens: --learning-rate=1e-6 becomes --learning_rate=1e-6."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value
