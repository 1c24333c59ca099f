"""The command line of a script, built from its Config dataclass: one option per field.

The trailing comment of a field is the help text of its option.
"""

import argparse
import ast
import atexit
import contextlib
import dataclasses
import functools
import gc
import inspect
import io
import json
import os
import sys
import textwrap
import time
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from common.base import console, option_names, settings
from common.base.checks import require_numbers

T = TypeVar("T")
HELP = ("-h", "-help", "help")  # other spellings of --help
TEXTS = ("system_prompt", "stop_strings", "chat_template_kwargs")  # other texts may be paths, whose bytes must stay
SPEAK_FIRST = 1.0  # seconds that other ranks leave rank 0: torchrun ends all ranks when one ends


def comments(cls: type) -> dict[str, str]:
    """Trailing comment of every field of a dataclass, without the "#"; "" if there is none."""
    texts = {}
    for base in _dataclasses(cls):
        texts = {**_own_comments(base), **texts}  # a subclass may redefine an inherited field
    return texts


@functools.cache  # the classes of settings.py are inherited by every Config
def _own_comments(cls: type) -> dict[str, str]:
    """As `comments`, of the fields that stand in the class itself."""
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    fields = [node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: by_line.get(node.end_lineno, "") for node in fields}


def _dataclasses(cls: type) -> list[type]:
    """A dataclass, then the dataclasses that it inherits from."""
    return [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]


class _Parser(argparse.ArgumentParser):
    """Answers on rank 0 only, and names an error in one line, without the usage text."""

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        message = message.replace("expected one argument", "needs a value; --name=-1 gives one that begins with a dash")
        if os.environ.get("RANK", "0") == "0":
            self.exit(2, f"{self.prog}: error: {message}\n")
        time.sleep(SPEAK_FIRST)
        self.exit(2)


def parse(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Reads a Config from the command line: `--name value` is the same as editing the field's line.

    From then on, no print ends the process (`console.protect`).

    `--help` shows the fields of `cls` first. Inherited fields follow, grouped by class under the
    first line of the class's docstring.

    Args:
        cls: a dataclass with fields of type str, int, float, bool or Literal of strings.
        argv: default: the arguments of the process.

    Raises:
        SystemExit: code 2, for an invalid value or an unknown option; says what its name is here.
    """
    console.protect()
    collect_garbage()
    parser = _parser(cls)
    return _checked(parser, cls, _values(parser, argv))


def collect_garbage() -> None:
    """Ends the pause of garbage collection that `answer_early` begins."""
    if not gc.isenabled():
        gc.freeze()  # what has been imported stays
        gc.enable()
        atexit.register(gc.unfreeze)  # or extension modules report their types as leaked


def answer_early(script: dict[str, Any]) -> None:
    """Answers `--help` and wrong options of a training script before its slow imports.

    Defines the script's Config from its text, with what the script has imported so far and the
    classes of settings.py, and parses the command line. `parse` does it again at the end of the
    script. If Config needs more than that, only `parse` answers. Garbage collection pauses until
    `collect_garbage`, which `parse` calls, and `Run` for a script that has a Config of its own.

    Args:
        script: `globals()` of the script; nothing happens unless it runs as `__main__`.

    Raises:
        SystemExit: as `parse`.
    """
    if script["__name__"] != "__main__":
        return
    console.protect()
    names = {**vars(settings), **script}
    try:
        body = ast.parse(Path(script["__file__"]).read_bytes()).body
        config = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "Config"]
        exec(compile(ast.Module(config, []), script["__file__"], "exec"), names)
        parser = _parser(names["Config"])
        values = _values(parser)
        with contextlib.redirect_stdout(io.StringIO()):  # warnings are for `parse` to print
            _checked(parser, names["Config"], values)
    except Exception:  # Config needs what is imported later, or has a bug, which `parse` shows
        pass
    gc.disable()  # imports make a million objects and no garbage: looking for it takes a seventh of their time


def _values(parser: _Parser, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The value of each option in `argv`, by default the arguments of the process."""
    argv = [_with_underscores(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        if unknown[0] in HELP:
            parser.print_help()
            parser.exit()
        parser.error(option_names.unknown(unknown[0], vars(known)))
    return vars(known)


def _checked(parser: _Parser, cls: type[T], values: dict[str, Any]) -> T:
    """The Config; a broken rule is an error of the parser."""
    try:
        require_numbers(values)
        return cls(**values)
    except ValueError as error:
        parser.error(str(error))


def _parser(cls: type) -> _Parser:
    """An option for each field, in groups as in `parse`."""
    parser = _Parser(description=cls.__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--help", action="help", help="show this text")
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
                read = console.text if name in TEXTS else _number(kind)
                group.add_argument(f"--{name}", type=read, default=field.default, help=text)
    return parser


def save(cfg: Any, out_dir: str, **chosen: Any) -> None:
    """Writes a Config to `config.json` in `out_dir`; called by one rank.

    Args:
        cfg: a dataclass.
        out_dir: folder, made if it is not there.
        **chosen: fields whose value the run derived, written in place of the Config's.
    """
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    text = json.dumps({**dataclasses.asdict(cfg), **chosen}, indent=1) + "\n"
    (Path(out_dir) / "config.json").write_text(text, encoding="utf-8")


def changed(old: dict[str, Any], cfg: Any) -> list[str]:
    """Differences between saved fields and a Config: one line "name: old -> new" per field."""
    new = dataclasses.asdict(cfg)
    names = [name for name in new if name in old and old[name] != new[name]]
    return [f"{name}: {old[name]!r} -> {new[name]!r}" for name in names]


def _number(kind: type) -> Callable[[str], Any]:
    """Parses a value of this type; text is taken as it is."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError as error:
            rule = "a whole number, such as 60" if kind is int else "a number, such as 0.1"
            raise argparse.ArgumentTypeError(f"{text!r} is not {rule}") from error

    return read


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
