"""docs/models.md and scripts/dev/sweep_models.py, which writes its table."""

import re
import runpy

import pytest
import torch
import transformers
from conftest import ROOT

from common.generation import contract
from scripts.dev import benchmark_models, families

sweep_models = runpy.run_path(str(ROOT / "scripts" / "dev" / "sweep_models.py"))
PAGE = (ROOT / "docs" / "models.md").read_text()
VERSION = re.search(r"transformers (\S+)\. Rollouts", PAGE)[1]
same_version = pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the page is of transformers {VERSION}")


def lines_of(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


GUIDE, TABLE = PAGE.split("\n## ", 1)[0], PAGE.split(sweep_models["START"])[1]
ROWS = {cells[0]: cells for cells in lines_of(TABLE)}


# Attention, experts, latent attention with experts, a hybrid, a state space; refused; without a cache
@pytest.mark.parametrize("name", [
    "qwen3", "lfm2",
    *(pytest.param(name, marks=pytest.mark.families) for name in ("mixtral", "deepseek_v3", "mamba2", "bert", "rwkv")),
])  # fmt: skip
@same_version
def test_the_page_says_what_a_model_does_now(name):
    row = sweep_models["sweep"](name, speed=False)
    assert not row.faults
    stable = list(row.cells().values())
    assert ROWS[name][: len(stable)] == stable, "python scripts/dev/sweep_models.py --write"


@same_version
def test_every_family_and_variant_has_a_line():
    assert set(ROWS) - {"model", "---"} == {*families.names(), *families.VARIANTS}


def test_the_guide_says_what_the_table_says():
    guide = lines_of(GUIDE)[2:]
    assert len(guide) > 25
    assert {f: rollout for _, f, rollout, _ in guide} == {f: ROWS[f.strip("`")][4] for _, f, *_ in guide}


def test_what_the_probes_at_load_miss_is_found(monkeypatch):
    monkeypatch.setattr(contract, "differ", lambda *args: (0.0, 1.0))  # its cache disagrees with left padding
    row = sweep_models["sweep"]("bart", speed=False)
    assert row.rollout == "cache" and any(fault.startswith("sampled") for fault in row.faults)


def test_a_model_that_crashes_is_a_line(monkeypatch):
    monkeypatch.setattr(families, "build", lambda name: 1 / 0)
    row = sweep_models["sweep"]("llama", speed=False)
    assert row.refused == "division by zero" and row.line().count("|") == len(ROWS["llama"]) + 1


def test_only_the_part_between_the_markers_is_written():
    rows = [sweep_models["Row"]("a", cls="A", refused="A: its logits differ by 10 (of 7) from a head; use another")]
    start, end = sweep_models["START"], sweep_models["END"]
    page = sweep_models["page"](rows, f"before\n{start}\nold\n{end}\nafter\n")
    assert page.startswith(f"before\n{start}\n") and page.endswith(f"{end}\nafter\n") and "old" not in page
    assert "- its logits differ by N (of N) from a head: `a`" in page


def test_the_speed_of_a_shape_is_measured_beside_generate():
    row = benchmark_models.measure("tiny", torch.device("cpu"), rows=8, new_tokens=4, plain=True)
    shape, _, rows, ours, theirs, ratio, mismatch = (cell.strip() for cell in row.strip("|").split("|"))
    assert (shape, rows) == ("tiny", "8") and float(mismatch) < 1e-4
    expected = float(ours.replace(",", "")) / float(theirs.replace(",", ""))
    assert float(ratio.removesuffix(" x")) == pytest.approx(expected, abs=0.2)
