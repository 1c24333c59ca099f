"""The reward server killed in the middle of a request, and while it starts again: nothing of the training changes."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from test_poster_launcher import alive
from test_teacher_server import wait_for

sys.path.insert(0, str(ROOT / "scripts" / "dev"))
import soak_rewards

pytestmark = pytest.mark.tools


def test_the_comparison_sees_any_difference(tmp_path):
    lines = [{"step": 0, "eval_reward": 0.5}]
    lines += [{"step": k, "loss": 0.1 * k, "unscored": 0.0, "learning_rate": 1e-4, "seconds": k} for k in (1, 2)]
    for name in ("killed", "straight"):
        (tmp_path / name / "checkpoint-000002").mkdir(parents=True)
        (tmp_path / name / "checkpoint-000002" / "model.safetensors").write_bytes(b"weights")

    def differences(*lines: dict, name: str = "killed") -> list[str]:
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return soak_rewards.differences(tmp_path)

    differences(*lines, name="straight")
    assert differences(*lines[:2], {"seconds_save": 0.1}, {**lines[2], "seconds": 9.0}) == []
    for change, seen in (({"loss": lines[2]["loss"] + 1e-12}, "step 2: loss "), ({"unscored": 0.125}, "step 2: 12% "),
                         ({"reward_more": 1.0}, "step 2: reward_more 1.0 and None")):  # fmt: skip
        assert differences(*lines[:2], lines[2] | change)[0].startswith(seen)
    assert differences(*lines[:2])[0] == "1 and 2 steps"
    weights = tmp_path / "killed" / "checkpoint-000002" / "model.safetensors"
    weights.write_bytes(b"weightz")
    (found,) = differences(*lines)
    assert str(weights) in found
    (tmp_path / "straight" / "checkpoint-000002" / "model.safetensors").unlink()
    assert len(differences(*lines)) == 1


def test_what_a_soak_has_started_ends_with_it():
    code = """import subprocess, sys, time; sys.path[:0] = ['.', 'scripts/dev']; import soak_rewards
print(subprocess.Popen(['sleep', '60'], preexec_fn=soak_rewards._end_with_parent).pid, flush=True); time.sleep(60)"""
    soak = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = int(soak.stdout.readline())
    assert alive(child)
    soak.kill()
    soak.wait()
    wait_for(lambda: not alive(child))


def test_a_training_whose_server_is_killed_is_the_straight_one(tmp_path, capsys):
    cfg = soak_rewards.Config(minutes=0.02, kills=2, away=0.2, delay=0.3, batch_size=4, folder=str(tmp_path / "soak"))
    soak_rewards.main(cfg)  # or it exits with code 1
    said = capsys.readouterr().out
    assert "2 kills" in said and "metrics and weights are equal" in said
    assert int(re.search(r"(\d+) outages noticed", said)[1]) >= 1
    with pytest.raises(FileExistsError):  # its runs would be resumed
        soak_rewards.main(cfg)
