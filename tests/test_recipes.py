"""scripts/recipe_gsm8k.sh and scripts/speedrun.sh, for a few steps on tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.tools

PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then echo 2 && exit; fi  # as many GPUs
if [ "$1" = grpo/grpo.py ] && [ -n "$BROKEN" ]; then echo "the disk is full" && exit 1; fi
if [ "$1" != scripts/dev/recipe_trl.py ]; then exec {python} "$@"; fi
while [ $# -gt 0 ]; do
    case $1 in --model | --student) model=$2 ;; --out) out=$2 ;; esac
    shift
done
cp -rL "$model" "$out" && echo '{{"samples": 1024, "seconds": 7.1}}'
"""


def run(command: list[str], sums_file: Path, out: Path, **environment) -> subprocess.CompletedProcess:
    """A script with the model and data of the tests."""
    own = {
        **os.environ,
        "TRAIN": str(sums_file),
        "TEST": str(sums_file),
        "OUT": str(out),
        "PYTHON": sys.executable,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **{name: str(x) for name, x in environment.items()},
    }
    return subprocess.run(["bash", *command], cwd=ROOT, env=own, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def ten_times(sums_file, tmp_path_factory) -> Path:
    """Four hundred rows: a step of the recipe takes 128."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(10 * sums_file.read_text())
    return path


def test_the_recipe_measures_every_stage_and_goes_on_where_it_stopped(model_folders, ten_times, tmp_path):
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    sizes = dict(MODEL=model_folders["qwen2"], SFT_STEPS=2, RL_STEPS=1, GKD_STEPS=1, KEEP=2, TOKENS=4, SAMPLES=2)
    sizes |= dict(PYTHON=python, STEPS=1)
    early = run(["scripts/dev/recipe_peers.sh"], ten_times, tmp_path / "out", STAGES="grpo", **sizes)
    assert early.returncode == 1 and "sft has no checkpoint: run scripts/recipe_gsm8k.sh first" in early.stderr
    broken = run(["scripts/recipe_gsm8k.sh"], ten_times, tmp_path / "out", BROKEN=1, **sizes)
    assert broken.returncode == 1 and "the disk is full" in broken.stderr, broken.stdout + broken.stderr
    done = run(["scripts/recipe_gsm8k.sh"], ten_times, tmp_path / "out", **sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ")[0] for line in (tmp_path / "out" / "greedy.md").read_text().splitlines()]
    assert rows[2:] == ["| start", "| sft", "| gspo", "| grpo", "| student", "| gkd"]
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"sft.png", "reinforcement.png", "gkd.png"}
    assert len((tmp_path / "out" / "sampled.md").read_text().splitlines()) == 8
    assert [(tmp_path / "out" / f"{name}-sampled.jsonl").is_file() for name in ("start", "grpo", "gkd")] == 3 * [True]
    (tmp_path / "out" / "gkd.jsonl").unlink()
    again = run(["scripts/recipe_gsm8k.sh"], ten_times, tmp_path / "out", **sizes)
    assert again.returncode == 0 and "--- " not in again.stdout, again.stdout + again.stderr
    assert (tmp_path / "out" / "gkd.jsonl").is_file()  # only that was measured again
    assert again.stdout.count('"accuracy"') == 1

    # TRL beside it: here its models are copies of those that it begins with
    beside = run(["scripts/dev/recipe_peers.sh"], ten_times, tmp_path / "out", **sizes)
    assert beside.returncode == 0, beside.stdout + beside.stderr
    rows = [line.strip("| ").split(" | ") for line in beside.stdout.splitlines() if line.startswith("| ")][1:]
    assert [(stage, samples, taken) for stage, samples, *_, taken in rows] == [
        (stage, "1,024", "7") for stage in ("sft", "gspo", "grpo", "gkd")
    ]
    accuracy = json.loads((tmp_path / "out" / "trl-grpo.json").read_text())
    assert rows[2][4].startswith(f"{accuracy['accuracy']:.3f} [")
    assert accuracy["model"] == str(tmp_path / "out" / "trl-grpo")
    once_more = run(["scripts/dev/recipe_peers.sh"], ten_times, tmp_path / "out", **sizes)
    assert once_more.returncode == 0 and "--- " not in once_more.stdout and rows[2][4] in once_more.stdout


def test_a_speedrun_prints_its_row_and_says_whether_the_target_was_reached(model_folders, ten_times, tmp_path):
    sizes = dict(MODEL=model_folders["qwen2"], STEPS=1, RL_STEPS=1)
    small = ["--max_new_tokens", "4", "--device", "cpu"]
    missed = run(["scripts/speedrun.sh", "smollm2", *small], ten_times, tmp_path / "a", TARGET=1.1, **sizes)
    assert missed.returncode == 1 and "missed 1.1" in missed.stdout, missed.stdout + missed.stderr
    cells = next(line for line in missed.stdout.splitlines() if "| smollm2 |" in line).split(" | ")
    assert cells[5:7] == ["64", "512"]  # demonstrations and samples
    reached = run(["scripts/speedrun.sh", "qwen", *small], ten_times, tmp_path / "b", TARGET=0, **sizes)
    assert reached.returncode == 0 and "reached 0" in reached.stdout, reached.stdout + reached.stderr
    again = run(["scripts/speedrun.sh", "qwen"], ten_times, tmp_path / "b", **sizes)
    assert again.returncode == 2 and "exists: a speedrun starts anew" in again.stderr
    unknown = run(["scripts/speedrun.sh", "gpt"], ten_times, tmp_path / "c")
    assert unknown.returncode == 2 and "scripts/speedrun.sh qwen" in unknown.stdout
