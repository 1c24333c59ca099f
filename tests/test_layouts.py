"""Tests of common/planning/layouts.py: what the scripts say about GPUs, by their constants and options."""

import contextlib
import dataclasses
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS

from common.planning import layouts

ALL = [*SCRIPTS.values(), ROOT / "grpo" / "poster" / "poster_grpo.py"]
RL = dict(policy_model="toy", reward_model="", reward_url="", kl_coef=0.0, device="cuda")
GKD = dict(student_model="toy", teacher_model="toy-teacher", teacher_url="", device="cuda")


def roles(constants, fields, **ranks):
    return layouts.roles(SimpleNamespace(**constants), SimpleNamespace(**fields), **ranks)


@pytest.fixture
def visible(monkeypatch):
    """Sets the number of GPUs that the process sees."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return lambda number: monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


def test_roles_of_one_process_are_its_constants():
    constants = dict(POLICY_GPU_IDS=(0, 1), REFERENCE_GPU_ID=2, REWARD_GPU_ID=3)
    assert roles(constants, RL) == {"policy": (0, 1), "rollout": (0, 1)}
    everything = {**RL, "kl_coef": 0.1, "reward_model": "judge"}
    assert roles(constants, everything) == {"policy": (0, 1), "rollout": (0, 1), "reference": (2,), "reward": (3,)}
    assert "reference" not in roles(constants, {**everything, "lora_rank": 8})  # the weights without adapters
    assert "reference" in roles(constants, {**everything, "lora_rank": 0})
    assert "reward" not in roles(constants, {**everything, "reward_url": "http://127.0.0.1:8899"})
    # the policy samples unless GPUs are named for it
    constants |= dict(POLICY_GPU_IDS=(1, 0), REWARD_GPU_ID=2, ROLLOUT_GPU_IDS=None)
    assert roles(constants, RL)["rollout"] == (1, 0)
    assert roles({**constants, "ROLLOUT_GPU_IDS": (0, 3)}, RL)["rollout"] == (0, 3)


def test_roles_of_a_distillation():
    constants = dict(STUDENT_GPU_IDS=(2, 3), ROLLOUT_GPU_IDS=None, TEACHER_GPU_IDS=(4, 5, 6, 7))
    assert roles(constants, GKD) == {"student": (2, 3), "rollout": (2, 3), "teacher": (4, 5, 6, 7)}
    separate = roles({**constants, "ROLLOUT_GPU_IDS": (0, 1)}, {**GKD, "teacher_url": "http://127.0.0.1:15555"})
    assert separate == {"student": (2, 3), "rollout": (0, 1)}
    del constants["TEACHER_GPU_IDS"]
    assert roles(constants, GKD)["teacher"] == (2,)  # beside the first of the student's


def test_every_rank_has_its_own_gpu_where_a_constant_is_none():
    module = SimpleNamespace(POLICY_GPU_IDS=None, REFERENCE_GPU_ID=None, REWARD_GPU_ID=7, SIMILARITY_GPU_IDS=None)
    cfg = SimpleNamespace(**{**RL, "kl_coef": 0.1, "reward_model": "judge", "embedding_model": "toy"})
    for rank, found in enumerate(layouts.all_ranks(module, cfg, 2)):
        own = (rank,)
        assert found == {"policy": own, "rollout": own, "reference": own, "reward": (7,), "embedder": own}
    module.SIMILARITY_GPU_IDS = [0, 1]
    assert layouts.roles(module, cfg, 2, 1)["embedder"] == (0, 1)
    for teacher, expected in ((None, (3,)), ((5,), (5,))):
        constants = dict(STUDENT_GPU_IDS=None, ROLLOUT_GPU_IDS=None, TEACHER_GPU_IDS=teacher)
        assert roles(constants, GKD, ranks=4, local_rank=3)["teacher"] == expected
    assert roles(dict(REFERENCE_GPU_ID=None), RL, ranks=2, local_rank=1)["policy"] == (1,)  # a script without the line
    with pytest.raises(ValueError, match=r"POLICY_GPU_IDS = \(0, 1\), 2 processes: every process"):
        roles(dict(POLICY_GPU_IDS=(0, 1)), RL, ranks=2)


@pytest.mark.parametrize(("name", "value"), [("POLICY_GPU_IDS", 0), ("REFERENCE_GPU_ID", (1,))])
def test_a_constant_that_is_no_gpu_number_is_named(name, value):
    constants = {"POLICY_GPU_IDS": (0,), "REFERENCE_GPU_ID": 0, name: value}
    with pytest.raises(ValueError, match=re.escape(f"{name} = {value!r}") + ".*must be GPU numbers"):
        roles(constants, {**RL, "kl_coef": 0.1})


@pytest.fixture(scope="module")
def loaded():
    return {path: layouts.load(path, ["--device", "cuda"]) for path in ALL}


def test_scripts_are_found_and_read(loaded):
    assert {(ROOT / name).name for name in layouts.scripts()} >= {path.name for path in ALL}
    assert "gkd/teacher_server.py" not in layouts.scripts() and "grpo/poster/reward_server.py" not in layouts.scripts()
    for path, (module, cfg) in loaded.items():
        by_torchrun = path.stem.endswith("_ddp") or path.stem in ("poster_grpo", "similarity_grpo")
        assert layouts.is_per_rank(module) == by_torchrun
        trained = "student" if path.stem.startswith("gkd") else "policy"
        found = layouts.roles(module, cfg)
        expected = (0, 1) if path.stem in ("gspo_multigpu", "grpo_multigpu") else (0,)
        assert found[trained] == expected and set(found["rollout"]) >= set(expected)
        assert ("teacher" in found) == (trained == "student") and ("embedder" in found) == ("similarity" in path.stem)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_check_says_what_the_script_says(loaded, visible, path):
    visible(0)
    module, cfg = loaded[path]
    with pytest.raises(ValueError, match="0 visible") as said:
        module.main(cfg)
    with pytest.raises(ValueError, match=re.escape(str(said.value))):
        layouts.check(module, cfg)
    layouts.check(module, dataclasses.replace(cfg, device="cpu"))
    visible(8)
    layouts.check(module, cfg)


@pytest.mark.parametrize(("script", "constants", "said"), [
    ("gkd_multigpu", dict(ROLLOUT_GPU_IDS=(0, 3)), r"STUDENT_GPU_IDS = \(0,\), ROLLOUT_GPU_IDS = \(0, 3\).*both train"),
    ("gkd_multigpu", dict(ROLLOUT_GPU_IDS=(3,), TEACHER_GPU_IDS=(0, 3)), ""),
    ("similarity_grpo", dict(SIMILARITY_GPU_IDS=(0, 9)), r"need 10 GPUs, 8 visible.*SIMILARITY_GPU_IDS to None"),
])  # fmt: skip
def test_exclusive_roles_may_not_share_a_gpu_and_frozen_ones_may(loaded, visible, monkeypatch, script, constants, said):
    visible(8)
    module, cfg = loaded[SCRIPTS[script]]
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        layouts.check(module, cfg)


def test_a_copy_under_another_name_is_read_with_what_was_edited(launcher):
    copy = launcher.copy("gspo_multigpu", POLICY_GPU_IDS=(4, 5, 6))
    (copy.parent / "beside_the_copy.py").write_text("")
    copy.write_text(copy.read_text() + "\nimport beside_the_copy\n")
    before = sys.argv[:], sys.path[:]
    module, cfg = layouts.load(copy, ["--kl-coef", "0.5", "--group_size=6"])
    assert (sys.argv, sys.path) == before
    found = layouts.roles(module, cfg)
    assert found["policy"] == (4, 5, 6) and found["reference"] == (2,) and cfg.group_size == 6
    again, _ = layouts.load(copy)
    assert again is not module and again.__name__ != module.__name__


def test_errors_of_flags_are_those_of_the_script(capsys):
    with pytest.raises(SystemExit) as left:
        layouts.load(SCRIPTS["gspo"], ["--lerning_rate", "1"])
    assert left.value.code == 2 and "gspo.py: error: unknown option --lerning_rate; did you" in capsys.readouterr().err


CONSTANT, CLASS, MAIN = "POLICY_GPU_IDS = (0,)\n", "class Config: pass\n", "def main(cfg): pass\n"


@pytest.mark.parametrize(
    "text", ["", "1 / 0\n" + CLASS + MAIN, "1 / 0\n" + CONSTANT + MAIN, "1 / 0\n" + CONSTANT + CLASS, "no Python", "\0"]
)
def test_what_is_no_training_script_is_not_executed(tmp_path, text):
    path = tmp_path / "other.py"
    path.write_text(text)
    for wrong in (path, tmp_path):
        with pytest.raises(ValueError, match=r"must be a training script.*gspo/gspo\.py.*gkd/gkd_ddp\.py"):
            layouts.load(wrong)


def test_a_copy_outside_the_clone_is_read(launcher, tmp_path):
    path = shutil.copy(launcher.copy("gspo", POLICY_GPU_IDS=(3,)), tmp_path / "my_task.py")
    module, cfg = layouts.load(path)
    assert layouts.roles(module, cfg)["policy"] == (3,)
