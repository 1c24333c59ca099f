"""The training scripts: one text per algorithm below the GPU constants, a loss of its own, short, and easy to copy."""

import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FAMILIES, ROOT, SCRIPTS

POSTER, SUPERVISED = (ROOT / "grpo" / "poster" / f"{name}.py" for name in ("poster_grpo", "supervised"))
ALONE = ("gspo", "similarity_grpo", "gkd", "sft")  # of an algorithm each; the texts of variants are equal, as tested
COMMON = sorted((ROOT / "common").rglob("*.py"))
# lines of the first script of an algorithm; its two variants have longer docstrings
MOST_LINES = {"gspo": 180, "grpo": 195, "gkd": 205, "sft": 139, "similarity_grpo": 247, "poster_grpo": 230,
              "supervised": 159}  # fmt: skip
MOST_LINES_TOGETHER = 2707


def below_constants(path: Path) -> str:
    """The text of a script from TIMEOUT_MINUTES on."""
    return re.search(r"^TIMEOUT_MINUTES.*", path.read_text(), re.M | re.S)[0]


def imports(path: Path) -> str:
    """The text between docstring and constants."""
    return re.search(r"^import os$.*?(?=^\w+_GPU_IDS? = )", path.read_text(), re.M | re.S)[0]


def function(path: Path, name: str) -> list[str]:
    (node,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == name]
    return path.read_text().splitlines()[node.lineno - 1 : node.end_lineno]


def options(path: Path) -> list[ast.AnnAssign]:
    """The Config fields that a script names itself."""
    (config,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "Config"]
    return [node for node in config.body if isinstance(node, ast.AnnAssign)]


def differing(one: list[str], other: list[str]) -> int:
    return sum(line.startswith(("- ", "+ ")) for line in difflib.ndiff(one, other))


@pytest.mark.parametrize(("first", "name"), [(names[0], name) for names in FAMILIES.values() for name in names[1:3]])
def test_the_files_of_an_algorithm_are_equal_but_for_docstring_and_gpu_constants(first, name):
    one, other = SCRIPTS[first], SCRIPTS[name]
    assert below_constants(other) == below_constants(one), f"copy what stands below TIMEOUT_MINUTES from {one}"
    assert imports(other) == imports(one), f"copy the imports from {one}"


def test_grpo_is_gspo_with_another_loss():
    one, other = (function(SCRIPTS[name], "main") for name in ("gspo", "grpo"))
    assert 0 < differing(one, other) <= 6
    one, other = function(SCRIPTS["gspo"], "gspo_loss"), function(SCRIPTS["grpo"], "grpo_loss")
    assert 0 < differing(one, other) <= 25
    one, other = (function(SCRIPTS[name], "reward") for name in ("gspo", "grpo"))
    assert one == other
    assert function(SCRIPTS["similarity_grpo"], "grpo_loss") == function(SCRIPTS["grpo"], "grpo_loss")
    assert differing(function(SCRIPTS["similarity_grpo"], "main"), function(SCRIPTS["grpo"], "main")) <= 12


def test_scripts_stay_short():
    lines = {path.stem: len(path.read_text().splitlines()) for path in [*SCRIPTS.values(), POSTER, SUPERVISED]}
    for first, most in MOST_LINES.items():
        assert lines[first] <= most
    for family in FAMILIES.values():
        assert max(lines[name] for name in family[1:3]) <= lines[family[0]] + 5
    assert sum(lines.values()) <= MOST_LINES_TOGETHER


@pytest.mark.parametrize("path", [
    *SCRIPTS.values(), POSTER, ROOT / "gkd" / "teacher_server.py", ROOT / "common" / "base" / "settings.py",
    *(ROOT / "grpo" / "poster" / f"{name}.py" for name in ("reward_server", "supervised", "convert")),
], ids=lambda path: path.stem)  # fmt: skip
def test_every_option_has_a_comment_on_its_line(path):
    # it is the text of --help; a line too long for the formatter would be broken up, and lose it
    text = path.read_text()
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    found = [node for each in classes if each.name.endswith(("Config", "Settings")) for node in each.body]
    found = [node for node in found if isinstance(node, ast.AnnAssign)]
    lines = text.splitlines()
    assert found and not [node.target.id for node in found if "  # " not in lines[node.end_lineno - 1]]


def imported(path: Path) -> set[str]:
    """Every name of a module that a file imports, in all its parts."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."), *(alias.name.split(".") for alias in node.names))
    return names


def test_neither_scripts_nor_common_import_a_script_and_no_module_hides_one_of_the_standard_library():
    names = SCRIPTS.keys() | FAMILIES.keys()
    assert not {path.name: found for path in [*SCRIPTS.values(), *COMMON] if (found := imported(path) & names)}
    # python gspo/x.py puts gspo/ on sys.path, so a gspo/queue.py, say, would be what torch imports as queue
    files = [*SCRIPTS.values(), *(ROOT / "grpo" / "poster").glob("*.py")]
    files += [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("tests/*.py")]
    assert not {path.stem for path in files} & sys.stdlib_module_names


def run_copy(path: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess:
    """A copied script with these options, `--help` by default."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RL_HAND")} | environment
    command = [sys.executable, path, *(argv or ["--help"])]
    return subprocess.run(command, cwd=path.parent, env=own, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("path", [
    *(SCRIPTS[name] for name in ALONE), POSTER,
    *(pytest.param(path, marks=pytest.mark.parity) for name, path in SCRIPTS.items() if name not in ALONE),
    pytest.param(SUPERVISED, marks=pytest.mark.parity),
], ids=lambda path: path.stem)  # fmt: skip
def test_a_copy_outside_the_clone_finds_it_and_answers_options_before_torch_is_imported(path, tmp_path):
    copy = tmp_path / "my_task.py"
    shutil.copy(path, copy)
    lost = run_copy(copy)
    assert lost.returncode == 1 and "set RL_HAND to the folder of the clone, or pip install -e" in lost.stderr
    assert "Traceback" not in lost.stderr
    (tmp_path / "torch.py").write_text("raise ImportError('no option needs torch')")  # found first
    helped = run_copy(copy, PYTHONPATH=str(ROOT))  # as if it was installed
    assert helped.returncode == 0 and "--learning_rate" in helped.stdout and not helped.stderr
    for option, value in (("num_generations", "4"), ("batch_size", "0"), ("steps", "many"), ("top_p", "2"),
                          ("lora_targets", " "), ("device", "tpu")):  # fmt: skip
        refused = run_copy(copy, f"--{option}", value, "--lora_rank", "4", RL_HAND=str(ROOT))
        assert refused.returncode == 2 and option in refused.stderr and refused.stderr.count("\n") == 1


def test_fine_tuning_on_posters_is_fine_tuning_with_images():
    one, other = function(SCRIPTS["sft"], "main"), function(SUPERVISED, "main")
    loop = next(i for i, line in enumerate(one) if "run.interruptible()" in line)
    other_loop = next(i for i, line in enumerate(other) if "run.interruptible()" in line)
    assert 0 < differing(one[loop:], other[other_loop:]) <= 20
    assert differing(function(SCRIPTS["sft"], "sft_loss"), function(SUPERVISED, "sft_loss")) <= 2


@pytest.mark.tools
@pytest.mark.parametrize("path", [SCRIPTS["gspo"], SCRIPTS["gkd"], SCRIPTS["sft"], POSTER], ids=lambda path: path.stem)
def test_a_copy_outside_the_clone_imports_all_that_it_needs(path, tmp_path):
    copy = tmp_path / "my_task.py"
    shutil.copy(path, copy)
    model = "student_model" if path.stem == "gkd" else "policy_model"
    for found in ({"RL_HAND": str(ROOT)}, {"PYTHONPATH": str(ROOT)}):
        started = run_copy(copy, f"--{model}", "/no/such/model", "--device", "cpu", **found)
        assert "no such folder" in started.stderr


def test_a_copy_from_before_there_were_rooms_is_told_what_to_do(tmp_path):
    (ROOT / "common" / "losses.py").resolve(strict=True)  # by which it finds the clone
    copy = tmp_path / "old_copy.py"
    copy.write_text("from common import advantages, background\n")
    old = run_copy(copy, PYTHONPATH=str(ROOT))
    assert old.returncode == 1 and "common.advantages is now common.maths.advantages" in old.stderr
