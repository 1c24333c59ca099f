"""Rooms of common/ and grpo/poster/: each imports only what lies below it, and no files import one another in a circle.

Read from the imports as they stand in the text, those inside functions included: nothing is imported here.
"""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# The floors, from the ground up; a room imports from itself and from lower floors, not from its neighbours
FLOORS = (
    # what stands under everything: checks, command line, devices, ranks, HTTP | formulas on plain tensors
    ("common.base", "common.maths"),
    # what is asked, and what an answer is worth: data, the built-in task, answers, rewards, similarity
    ("common.tasks",),
    # a language model from its folder to log-probabilities: loading, LoRA, images, attention, reward models
    ("common.model",),
    # decode steps of Llama-like models as Triton kernels
    ("common.fused",),
    # completions from a policy | what an update takes: AdamW, micro-batches, sharding, offloading
    ("common.generation", "common.training"),
    # checkpoints, metrics, guards, rules | teachers and the divergences from them | whether a run fits, beforehand
    ("common.run", "common.distill", "common.planning"),
    # the nouns of a training script: policy, sampler, scorer, trainer, run
    ("common.loop",),
    # posters: layouts, rewards for them, a reward server, data, and training scripts
    ("grpo.poster",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for folder in ("common", "grpo/poster") for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    """common/maths/losses.py as common.maths.losses, and common/maths/__init__.py as common.maths."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name(path): path for path in FILES}


def room(module: str) -> str:
    """The room of a module: its first two names."""
    return ".".join(module.split(".")[:2])


def imports(module: str) -> dict[str, int]:
    """Modules of ours that a module imports, anywhere in its text, and the line of each."""
    path, found = MODULES[module], {}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from a.b import c` is of the module a.b.c if there is one, else of a.b
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        else:
            continue
        found |= {found_name: node.lineno for found_name in names if found_name in MODULES}
    return found


def test_every_file_has_a_room():
    stray = {module for module in MODULES if room(module) not in FLOOR} - {"common", "common.losses"}
    assert not stray, f"put into a room of tests/test_rooms.py, or give that room a floor: {sorted(stray)}"
    assert FLOOR.keys() <= {room(module) for module in MODULES}  # and no room is empty


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_rooms_below_it(module):
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {other}"
        for other, line in imports(module).items()
        if room(other) != room(module) and not FLOOR.get(room(other), 99) < FLOOR.get(room(module), -1)
    ]
    assert not wrong, f"{room(module)} may import what lies below it: {wrong}"


# Imports of ours inside a function: none dodges a circle, these spare a process what it does not need
LAZY = {("common.tasks.data_sources", "common.tasks"), ("grpo.poster.scorers", "grpo.poster")}


def test_imports_of_ours_stand_at_the_top_of_a_file():
    inside = {
        (module, node.module)
        for module, path in MODULES.items()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.level or node.module.split(".")[0] in ("common", "grpo"))
    }
    assert inside == LAZY


def test_no_circles():
    try:
        graphlib.TopologicalSorter({module: imports(module).keys() for module in MODULES}).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import one another: " + " <- ".join(error.args[1]))


def test_every_room_says_what_lives_in_it():
    for rooms in FLOORS[:-1]:
        for each in rooms:
            source = (ROOT / each.replace(".", "/") / "__init__.py").read_text()
            text = " ".join(ast.get_docstring(ast.parse(source)).split())
            below = [other.removeprefix("common.") for other in FLOOR if FLOOR[other] < FLOOR[each]]
            allowed = ", ".join(below) if below else "nothing of this project"
            assert f"May import: {allowed}. Start with " in text, each
