"""Tests of common/run/profiling.py: which steps are traced, what is written, and that tracing changes nothing."""

import gzip
import json

import pytest
import torch
from comparing import comparable
from conftest import assert_equal_weights

from common.run import profiling
from common.run.profiling import trace

FILES = {"trace.json.gz", "table.txt"}


def take_steps(out_dir, profile: int, steps: int = 6, fail_at: int = 0) -> None:
    """A run whose steps multiply matrices, each under its own label."""
    with trace(str(out_dir), profile) as profiled:
        for step in range(1, steps + 1):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(64, 64) @ torch.ones(64, 64)
                if step == fail_at:
                    raise ZeroDivisionError
            profiled()


def names(out_dir) -> list[str]:
    """Of what is in the trace."""
    with gzip.open(out_dir / "profile" / "trace.json.gz", "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"]


def traced(out_dir) -> list[int]:
    """The steps in the trace, which stands beside its table."""
    assert {path.name for path in (out_dir / "profile").iterdir()} == FILES
    return sorted(int(name.split()[1]) for name in names(out_dir) if name.startswith("step "))


def test_steps_from_the_third_on_are_traced_and_a_resumed_run_replaces_the_trace(tmp_path):
    for profile in (1, 2):
        take_steps(tmp_path, profile)
        assert traced(tmp_path) == [3, 4][:profile]
        table = (tmp_path / "profile" / "table.txt").read_text()
        assert "Self CPU" in table and "aten::mm" in table
        rows = [row for row in table.splitlines() if row.strip().startswith(("aten::", "step "))]
        assert 2 <= len(rows) <= profiling.TABLE_ROWS


@pytest.mark.parametrize(("rank", "profile"), [(0, 0), (1, 2)])
def test_without_the_option_and_on_other_ranks_nothing_is_written_or_slowed_down(tmp_path, monkeypatch, rank, profile):
    monkeypatch.setattr(profiling, "profile", None)  # would fail if it were called
    monkeypatch.setattr(profiling.distributed, "rank", lambda: rank)
    take_steps(tmp_path, profile)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_run_that_ends_before_the_last_traced_step_leaves_what_there_is(tmp_path, steps):
    take_steps(tmp_path, 5, steps=steps)
    if steps == 4:
        assert traced(tmp_path) == [3, 4]
    else:
        assert not list(tmp_path.glob("profile/*")) or (steps == 2 and traced(tmp_path) == [])


def test_an_error_of_the_run_is_raised(tmp_path):
    with pytest.raises(ZeroDivisionError):
        take_steps(tmp_path, 5, fail_at=4)
    assert 3 in traced(tmp_path)


@pytest.mark.parametrize("name", ["profile", "profile/trace.json.gz"])
def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, capsys, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/full")
    take_steps(tmp_path, 1)
    assert f"warning: {tmp_path}/profile could not be written: " in capsys.readouterr().err


@pytest.mark.parity
def test_a_script_is_traced_and_changes_nothing(launcher, tmp_path):
    # few and small micro-batches, so that little is to be written
    options = dict(steps=4, batch_size=2, group_size=2, max_new_tokens=4, micro_batch_tokens=400)
    plain = launcher.trained("gspo", **options)
    run = launcher.run("gspo", tmp_path, **options, profile=2).succeeded()
    assert comparable(run.lines) == comparable(plain.lines) and run.samples == plain.samples
    assert_equal_weights(run.weights(), plain.weights())
    found = " ".join(names(tmp_path))  # rollout and update
    assert all(kernel in found for kernel in ("scaled_dot_product", "fused_adamw", "Backward"))
    assert not list(plain.out_dir.glob("profile"))
