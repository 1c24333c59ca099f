"""Code of README.md and CONTRIBUTING.md: ten lines for a notebook, and an algorithm added to a copy."""

import ast
import re
import textwrap

import torch
from conftest import ROOT, SCRIPTS, load_script, reward
from test_rollout import make_batch

from common.loop import Counts, group_advantages


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


def test_rloo_as_contributing_adds_it_has_the_gradient_of_leave_one_out(launcher, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    text = SCRIPTS["grpo"].read_text()
    (line,) = re.findall(r"^    objective = .*\n", text, re.M)
    text = text.replace("def grpo_loss", blocks[0] + "\n\ndef grpo_loss")
    text = text.replace(line, textwrap.indent(blocks[1], " " * 4))
    path = launcher.copies / "rloo.py"
    path.write_text(text)
    options = dict(loss="grpo", advantage_scale="rloo", num_minibatches=1, kl_coef=0.0)
    run = launcher.run(path, tmp_path, rewards=[reward], **options).succeeded()
    assert len(run.steps) == 3 and all(line["grad_norm"] > 0 for line in run.steps)

    script, batch = load_script(path), make_batch([3, 1, 2, 3])
    logps = torch.randn(batch.completion_mask.shape, requires_grad=True)
    batch.old_logps, batch.rollout_logps = logps.detach(), logps.detach()
    rewards = torch.tensor([[1.0, 0.0, 3.0, 2.0]])
    batch.advantages = group_advantages(rewards, "rloo").flatten()
    torch.testing.assert_close(batch.advantages, (rewards - (rewards.sum() - rewards) / 3)[0])
    cfg = script.Config(loss="grpo", advantage_scale="rloo")
    loss, _ = script.grpo_loss(lambda micro: (logps, torch.zeros_like(logps)), batch, cfg, Counts(4, 9))
    loss.backward()
    torch.testing.assert_close(logps.grad, -batch.advantages[:, None] * batch.completion_mask / 4)
