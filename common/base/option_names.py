"""What an unknown option of the command line may mean: a name of another toolkit or script, or a typing error.

option_names.csv lists the names of other toolkits; docs/coming_from.md is written from it.
"""

import ast
import csv
import dataclasses
import difflib
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from common.base import settings

TABLE = Path(__file__).with_name("option_names.csv")
PAGE = "docs/coming_from.md"
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("gspo/gspo.py", "grpo/grpo.py", "grpo/similarity_grpo.py", "gkd/gkd.py", "gkd/sft.py",
           "grpo/poster/poster_grpo.py", "gkd/teacher_server.py", "grpo/poster/reward_server.py")  # fmt: skip
CLOSE = 0.8  # similarity from which a name counts as mistyped; num_generations and num_minibatches have 0.53


class Name(NamedTuple):
    """A row of the table.

    Attributes:
        group: heading of the page under which it stands.
        toolkits: that have these names.
        names: of the option there, with dots where the toolkit has them.
        here: options or constants of our scripts that do the same; empty if there are none.
        note: what differs; or why there are none, and what to use.
    """

    group: str
    toolkits: tuple[str, ...]
    names: tuple[str, ...]
    here: tuple[str, ...]
    note: str


def table() -> list[Name]:
    """All rows of the table."""
    with open(TABLE, encoding="utf-8", newline="") as file:
        return [Name(row["group"], tuple(row["toolkits"].split("/")), tuple(row["names"].split()),
                     tuple(row["here"].split()), row["note"]) for row in csv.DictReader(file)]  # fmt: skip


def scripts() -> dict[str, set[str]]:
    """Options and constants of the scripts and servers of the clone, by path; they are read, not run."""
    found = {}
    for path in filter(Path.is_file, (ROOT / script for script in SCRIPTS)):
        try:
            body = ast.parse(path.read_bytes()).body
        except SyntaxError:  # somebody is editing it
            continue
        names = {ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)}
        for config in [node for node in body if isinstance(node, ast.ClassDef) and node.name == "Config"]:
            names |= {ast.unparse(node.target) for node in config.body if isinstance(node, ast.AnnAssign)}
            bases = [getattr(settings, ast.unparse(base), None) for base in config.bases]
            names |= {field.name for base in filter(None, bases) for field in dataclasses.fields(base)}
        found[path.relative_to(ROOT).as_posix()] = names
    return found


def unknown(argument: str, known: Collection[str]) -> str:
    """The error for an argument that the command line of a script does not know.

    Args:
        argument: such as "--num_generations", "--lr=1e-6", "data.train_batch_size=8", "-n" or "4".
        known: names of the options of this script.
    """
    dashes, name, equals = re.fullmatch(r"([-+~\u2010-\u2015\u2212]*)([^=]*)(=?).*", argument, re.DOTALL).groups()
    if not dashes and not equals and name.endswith((".yaml", ".yml", ".json")):
        dashes, name = "--", "config"
    meant = hint(name.replace("-", "_"), known, guess=bool(dashes or equals)) if name else ""
    if dashes != "--" and not meant:
        return f"{argument!r} belongs to no option: options have the form --name value; --help lists them"
    return f"unknown option {argument}{meant or '; --help lists the options'}"


def hint(name: str, known: Collection[str], guess: bool = True) -> str:
    """What a name means here, to be appended to an error; empty if nothing is like it.

    Args:
        name: of an unknown option, with underscores and without dashes.
        known: names of the options of this script.
        guess: also look for names that are only similar.
    """
    small = name.lower()
    if small in known:  # without its two dashes, or in capitals
        return f"; did you mean --{small}?"
    if small.removeprefix("no_") in known:
        return f"; did you mean --{small.removeprefix('no_')} false?"
    rows = [row for row in table() if name in row.names]
    rows = [row for row in rows if set(row.here) & set(known)] or rows  # those of this kind of training
    if rows:
        return f": {'; '.join(_row(row, known) for row in rows)} ({PAGE})"
    for script, names in scripts().items():
        if name in names:
            return f": an option of {script}"
        if name.upper() in names:
            return f": a constant, {name.upper()} at the top of {script}"
    ends = {each: row for row in table() for each in row.names if each.endswith(f".{name}")}
    if guess and len(name) > 2 and len({(row.here, row.note) for row in ends.values()}) == 1:  # not `n`, not `path`
        each = next(iter(ends))
        return f"; did you mean {each},{hint(each, known)[1:]}"
    if guess and "." in name:
        return f": names with dots are those of other toolkits; {PAGE} lists what they are here"
    longer = [each for each in known if each.startswith(f"{small}_")]
    close = longer if len(longer) == 1 else difflib.get_close_matches(small, known, n=1, cutoff=CLOSE)
    if guess and close:
        return f"; did you mean --{close[0]}?"
    close = difflib.get_close_matches(small, [each for row in table() for each in row.names], n=1, cutoff=CLOSE)
    if guess and close:
        return f"; did you mean {close[0]},{hint(close[0], known)[1:]}"
    return ""


def _row(row: Name, known: Collection[str]) -> str:
    """A row as part of a sentence."""
    *first, last = row.toolkits
    source = f"a name of {', '.join(first)}{' and ' if first else ''}{last}"
    if not row.here:
        return f"{source}, not here: {row.note}"
    places = []
    for name in [each for each in row.here if each in known or each.isupper()] or row.here:
        elsewhere = [] if name in known or name.isupper() else [s for s, names in scripts().items() if name in names]
        place = f"{name} at the top of the script" if name.isupper() else f"--{name}"
        places.append(place + (f" of {elsewhere[0]}" if elsewhere else ""))
    return f"{source}, here {' and '.join(places)}" + (f"; {row.note}" if row.note else "")
