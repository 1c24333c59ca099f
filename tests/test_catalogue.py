"""The catalogue of failures in tests/README.md: what it names exists, and every case has its tests."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
CASE = re.compile(r"\| ([FS]?\d+) \| (.+) \| (.*) \| (.+) \|")


def cases() -> dict[str, list[tuple[str, str]]]:
    """(file, test) by number of the case."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (FOLDER / "README.md").read_text().splitlines():
        if case := CASE.fullmatch(line):
            assert case[1] not in found, f"case {case[1]} stands there twice"
            parts = [part.split(": ", 1) for part in case[4].split("; ")]
            named = [(file, name) for file, names in parts for name in re.findall(r"`(\w+)`", names)]
            found[case[1]] = [(file.strip("`"), name) for file, name in named]
    return found


def test_every_case_has_tests_and_these_exist():
    known = {}
    for path in FOLDER.glob("test_*.py"):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        known[path.name] = {function.name for function in functions}
    found = cases()
    assert len([number for number in found if number.isdecimal()]) == 120
    assert len([number for number in found if number[0] == "S"]) == 34
    for number, tests in found.items():
        assert tests, f"case {number} has no tests"
        for file, name in tests:
            assert name.startswith("test_") and name in known.get(file, ()), f"case {number}: no {name} in {file}"
