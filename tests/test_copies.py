"""The scripts of one algorithm are variants: what they share stands in each of them, word for word."""

import ast
import difflib
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS

MARK = "# [copy]"
FIRST, *OTHERS = SCRIPTS.values()
COMMON = sorted((ROOT / "common").glob("*.py"))
MOST_LINES = 315
# A default that may differ: on several GPUs of one process, the CPU is used only when asked for
OWN_DEFAULT = {"gspo_multigpu": "device"}


def items(path: Path) -> dict[str, str]:
    """Source of every function and class at the top level, decorators included, by name."""
    lines, found = path.read_text().splitlines(), {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
            if first > 1 and lines[first - 2] == MARK:
                found[node.name] = MARK + "\n" + found[node.name]
    return found


def marked(path: Path, own: str | None = None) -> dict[str, str]:
    """The items under a mark; the default of the field `own` is left out."""
    found = {name: text for name, text in items(path).items() if text.startswith(MARK)}
    if own:
        found["Config"], count = re.subn(rf"( {own}: \w+ = )[^ ]+", r"\1...", found["Config"])
        assert count == 1
    return found


def fields(path: Path) -> list[str]:
    """Name, type and default of every Config field, in order."""
    (config,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "Config"]
    found = []
    for node in config.body:
        if isinstance(node, ast.AnnAssign):
            value = "..." if node.target.id in OWN_DEFAULT.values() else ast.unparse(node.value)
            found.append(f"{node.target.id}: {ast.unparse(node.annotation)} = {value}")
    return found


def imported(path: Path) -> set[str]:
    """Every name of a module that a file imports, in all its parts."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."))
            names.update(alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_marked_items_are_equal_word_for_word(path):
    own = OWN_DEFAULT.get(path.stem)
    one, other = marked(FIRST, own), marked(path, own)
    assert one.keys() == other.keys()
    for name in one:
        diff = difflib.unified_diff(
            one[name].splitlines(), other[name].splitlines(), FIRST.name, path.name, n=1, lineterm=""
        )
        assert one[name] == other[name], f"{name} is marked as a copy and differs:\n" + "\n".join(diff)


@pytest.mark.parametrize("path", SCRIPTS.values(), ids=lambda path: path.stem)
def test_every_mark_belongs_to_an_item(path):
    assert path.read_text().splitlines().count(MARK) == len(marked(path)) > 0
    # what people replace, and what must not drift apart
    assert {"Config", "reward", "score", "evaluate"} < marked(path).keys()


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_configs_have_the_same_fields_in_the_same_order(path):
    assert fields(path) == fields(FIRST)


def test_a_difference_would_be_seen(tmp_path):
    changed = tmp_path / "changed.py"
    changed.write_text(FIRST.read_text().replace("# Eq. 7", "# Eq. 8"))
    assert {name for name, text in marked(FIRST).items() if text != marked(changed)[name]} == {"gspo_loss"}


@pytest.mark.parametrize("path", SCRIPTS.values(), ids=lambda path: path.stem)
def test_no_script_imports_another(path):
    assert not imported(path) & (SCRIPTS.keys() | {FIRST.parent.name})


@pytest.mark.parametrize("path", COMMON, ids=lambda path: path.stem)
def test_common_imports_no_script(path):
    assert not imported(path) & (SCRIPTS.keys() | {FIRST.parent.name})


@pytest.mark.parametrize("path", SCRIPTS.values(), ids=lambda path: path.stem)
def test_scripts_stay_short(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_no_module_hides_one_of_the_standard_library():
    # python gspo/x.py puts gspo/ on sys.path, so a gspo/queue.py would be what torch imports as queue
    files = [*COMMON, *ROOT.glob("gspo/*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("tests/*.py")]
    assert not {path.stem for path in files} & sys.stdlib_module_names
