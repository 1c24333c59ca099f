"""Tests of common/run/branches.py: a run that goes back leaves a branch, and no start mixes two of them."""

import json
import shutil
from pathlib import Path

import pytest
from test_checkpoint import names, trained
from test_disk import save, start, step

from common.base import storage
from common.run import branches, checkpoint, checkpoint_files
from common.run.metrics import Log


@pytest.fixture(scope="module")
def model():
    return trained(steps=1)


def train(out_dir: Path, model, resume: str = "auto", steps: int = 6, saves: bool = True) -> Path | None:
    """A run that saves every two steps; the checkpoint that it has started from."""
    storage._claimed.clear()
    folder = checkpoint.find(str(out_dir), resume)
    done = checkpoint_files.read_state(folder)["step"] if folder else 0
    log = Log(str(out_dir), done, steps, [])
    checkpoint.leave(str(out_dir), done)
    for number in range(done + 1, steps + 1):
        step(log, number)
        if saves and number % 2 == 0:
            save(out_dir, number, model, keep=9)
    log.close()
    return folder


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("straight") / "a"
    train(out_dir, model)
    return out_dir


@pytest.fixture
def run_dir(straight, tmp_path) -> Path:
    return Path(shutil.copytree(straight, tmp_path / "a"))


def steps(out_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def checkpoints(out_dir: Path) -> list[str]:
    return [name for name in names(out_dir) if "checkpoint-" in name]


def test_a_run_that_goes_back_is_gone_on_with_and_leaves_its_branch_for_ever(run_dir, model, capsys):
    back = str(run_dir / "checkpoint-000002")
    for again in ("", "-2"):  # going back once, and once more
        train(run_dir, model, back, saves=False)  # killed before it has saved
        left = [f"abandoned-checkpoint-{number:06d}{again}" for number in (4, 6)]
        assert set(left) <= set(checkpoints(run_dir)) and "delete those that you do not need" in capsys.readouterr().out
        assert train(run_dir, model) == run_dir / "checkpoint-000002"
    assert checkpoints(run_dir)[-3:] == ["checkpoint-000002", "checkpoint-000004", "checkpoint-000006"]
    assert len(checkpoints(run_dir)) == 7 and steps(run_dir) == [1, 2, 3, 4, 5, 6]
    assert train(run_dir, model, str(run_dir / "checkpoint-000006"), 8).name == "checkpoint-000006"  # leaves nothing
    assert len(checkpoints(run_dir)) == 8


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", range(1, 5))
def test_a_kill_while_it_goes_back_leaves_one_branch(run_dir, model, monkeypatch, call):
    # metrics.jsonl, samples.jsonl, and two checkpoints are renamed
    train(run_dir, model, steps=8)
    done = []

    def counted(real):
        def rename(*paths):
            done.append(paths)
            if len(done) == call:
                raise Killed
            real(*paths)

        return rename

    for name in ("rename", "replace"):
        monkeypatch.setattr(branches.os, name, counted(getattr(branches.os, name)))
    with pytest.raises(Killed):
        start(run_dir)
    monkeypatch.undo()
    folder = train(run_dir, model, steps=9)
    assert folder.name == ("checkpoint-000008" if call == 1 else "checkpoint-000004")
    assert steps(run_dir) == list(range(1, 10))
    assert not any(branches.departure(path, run_dir) for path in checkpoint_files.complete(run_dir))


def other_run(run_dir: Path, model) -> Path:
    other = run_dir.with_name("other")
    train(other, model)
    return other


def test_a_checkpoint_of_another_run_is_neither_resumed_nor_deleted(run_dir, model, capsys):
    other = other_run(run_dir, model)
    shutil.copytree(other / "checkpoint-000006", run_dir / "checkpoint-000008")
    for number in (4, 6):
        shutil.copytree(other / f"checkpoint-{number:06d}", run_dir / f"checkpoint-{number:06d}", dirs_exist_ok=True)
    assert train(run_dir, model, steps=4).name == "checkpoint-000002"
    said = capsys.readouterr().err
    for name in ("checkpoint-000004", "checkpoint-000006"):
        assert f"{run_dir / name} is passed over: {run_dir}/metrics.jsonl does not hold the" in said
    assert f"{run_dir}/checkpoint-000008 is passed over: its state.json is of step 6" in said
    assert not branches.departure(run_dir / "checkpoint-000004", run_dir)
    train(run_dir, model, steps=8)
    kept = [f"abandoned-checkpoint-{number:06d}" for number in (4, 6, 8)]
    assert [name for name in checkpoints(run_dir) if "abandoned" in name] == kept
    assert all(checkpoint.is_complete(run_dir / name) for name in kept)


def test_only_own_checkpoints_are_pruned(run_dir, model):
    users = ("checkpoint-best", "checkpoint-000002.bak", "checkpoint-2", "abandoned-checkpoint-000002")
    for name in users:
        shutil.copytree(run_dir / "checkpoint-000002", run_dir / name)
    foreign = other_run(run_dir, model) / "checkpoint-000004"
    shutil.rmtree(run_dir / "checkpoint-000004")
    shutil.copytree(foreign, run_dir / "checkpoint-000004")
    save(run_dir, 8, model, keep=1)
    assert checkpoints(run_dir) == sorted([*users, "checkpoint-000004", "checkpoint-000008"])
    assert checkpoint.newest(run_dir).name == "checkpoint-000008"
    # none but those are taken by "auto"
    for name in ("checkpoint-000004", "checkpoint-000008"):
        shutil.rmtree(run_dir / name)
    assert checkpoint.find(str(run_dir), "auto") is None


def test_lines_of_another_run_are_not_gone_on_with(run_dir, model):
    other = other_run(run_dir, model)
    shutil.copy(other / "metrics.jsonl", run_dir)
    for resume in ("auto", str(run_dir / "checkpoint-000004")):
        with pytest.raises(ValueError, match=r"put back|another out_dir"):
            checkpoint.find(str(run_dir), resume)
    (run_dir / "metrics.jsonl").unlink()  # nothing that could be mixed
    assert train(run_dir, model, steps=8, saves=False).name == "checkpoint-000006"
    assert train(run_dir, model, steps=8).name == "checkpoint-000006" and steps(run_dir) == [7, 8]
    # nor are those of a run without a checkpoint, from one elsewhere
    fresh = run_dir.with_name("fresh")
    train(fresh, model, steps=1)
    with pytest.raises(ValueError, match=r"metrics.jsonl of a run of its own.*another out_dir"):
        checkpoint.find(str(fresh), str(other / "checkpoint-000002"))


@pytest.mark.parametrize("name", ["checkpoint-best", "abandoned-checkpoint-000004"])
def test_a_folder_of_another_name_is_resumed_elsewhere_only(run_dir, model, name):
    (run_dir / "checkpoint-000004").rename(run_dir / name)
    with pytest.raises(ValueError, match=r"checkpoint-NNNNNN.*step 4; rename it to checkpoint-000004.*another out_dir"):
        checkpoint.find(str(run_dir), str(run_dir / name))
    elsewhere = run_dir.with_name("elsewhere")
    train(elsewhere, model, str(run_dir / name))
    assert steps(elsewhere) == [5, 6] and checkpoints(elsewhere) == ["checkpoint-000006"]


def test_a_checkpoint_that_is_a_link_is_of_the_run_and_what_it_leads_to_stays(run_dir, model, tmp_path):
    real = (run_dir / "checkpoint-000004").rename(tmp_path / "moved")
    (run_dir / "checkpoint-000004").symlink_to(real)
    assert train(run_dir, model, str(run_dir / "checkpoint-000004"), 5).name == "checkpoint-000004"
    assert train(run_dir, model, steps=6).name == "checkpoint-000004"
    save(run_dir, 8, model, keep=1)
    assert checkpoints(run_dir)[-1] == "checkpoint-000008" and not (run_dir / "checkpoint-000004").exists()
    assert checkpoint.is_complete(real)
