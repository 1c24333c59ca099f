"""The reward server killed in the middle of a request, and while it starts again: nothing of the training changes."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from test_poster_launcher import alive
from test_teacher_server import wait_for

sys.path.insert(0, str(ROOT / "scripts"))
import soak_rewards

pytestmark = pytest.mark.tools


def test_the_comparison_sees_any_difference(tmp_path):
    lines = [{"step": 0, "eval_reward": 0.5}]
    lines += [{"step": k, "loss": 0.1 * k, "unscored": 0.0, "learning_rate": 1e-4, "seconds": k} for k in (1, 2, 3)]
    lines.append({"step": 3, "seconds_save": 0.1})
    killed, weights = (tmp_path / "killed" / name for name in ("metrics.jsonl", "checkpoint-000003/model.safetensors"))

    def differences(lines: list[dict], path=killed) -> list[str]:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return soak_rewards.differences(tmp_path)

    for name in ("killed", "straight"):
        (tmp_path / name / "checkpoint-000003").mkdir(parents=True)
        (tmp_path / name / "checkpoint-000003" / "model.safetensors").write_bytes(b"weights")
    differences(lines, tmp_path / "straight" / "metrics.jsonl")
    assert differences([{**line, "seconds": 9.0} if "seconds" in line else line for line in lines]) == []
    for change, seen in (
        ({"loss": lines[3]["loss"] + 1e-12}, "step 3: loss "), ({"unscored": 0.125}, "step 3: 12% unscored"),
        ({"reward_more": 1.0}, "step 3: reward_more 1.0 and None"),
    ):  # fmt: skip
        assert differences([*lines[:3], lines[3] | change, lines[4]])[0].startswith(seen)
    assert differences([*lines[:3], lines[4]])[0] == "2 and 3 steps"
    weights.write_bytes(b"weightz")
    (found,) = differences(lines)
    assert str(weights) in found
    (tmp_path / "straight" / "checkpoint-000003" / "model.safetensors").unlink()
    assert len(differences(lines)) == 1


def test_what_a_soak_has_started_ends_with_it():
    code = (
        "import sys, time; sys.path[:0] = ['.', 'scripts']; import subprocess, soak_rewards\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=soak_rewards._end_with_parent)\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    soak = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = int(soak.stdout.readline())
    assert alive(child)
    os.kill(soak.pid, signal.SIGKILL)
    soak.wait()
    wait_for(lambda: not alive(child))


def test_a_training_whose_server_is_killed_is_the_straight_one(tmp_path, capsys):
    folder = tmp_path / "soak"
    tiny = dict(minutes=0.02, kills=2, away=0.2, delay=0.3, batch_size=4)
    soak_rewards.main(soak_rewards.Config(**tiny, folder=str(folder)))  # or it exits with code 1
    said = capsys.readouterr().out
    assert "2 kills" in said and "metrics and weights are equal" in said
    assert int(re.search(r"(\d+) outages noticed", said)[1]) >= 1
    with pytest.raises(FileExistsError):  # its runs would be resumed
        soak_rewards.main(soak_rewards.Config(**tiny, folder=str(folder)))
