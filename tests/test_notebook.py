"""The README's ten lines for a notebook: policy, sampler and loss without a run."""

import ast
import re

import torch
from conftest import ROOT


def test_the_ten_lines_of_the_readme_take_one_step(monkeypatch, capsys):
    section = (ROOT / "README.md").read_text().split("\n## In a notebook\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    statements = [node for node in ast.parse(code).body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    assert len(statements) <= 10
    monkeypatch.chdir(ROOT)
    names = {}
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "entropy" in printed and names["loss"].isfinite() and names["stats"].means["entropy"] > 0
    # the step was taken, and the next completions come from other weights
    batch = names["batch"]
    logps, _ = names["policy"](batch)
    assert not torch.equal(logps.detach(), batch.old_logps)
