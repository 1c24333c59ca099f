"""Tests of common/profiling.py: which steps are traced, what is written, and that tracing changes nothing."""

import gzip
import json

import pytest
import torch
from conftest import assert_equal_weights, comparable

from common import profiling
from common.profiling import trace

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


def events(out_dir) -> list[dict]:
    with gzip.open(out_dir / "profile" / "trace.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def traced(out_dir) -> list[int]:
    """The steps in the trace."""
    names = [event["name"] for event in events(out_dir) if event["ph"] == "X"]
    return sorted(int(name.split()[1]) for name in names if name.startswith("step "))


def written(out_dir) -> set[str]:
    return {path.name for path in (out_dir / "profile").iterdir()}


@pytest.mark.parametrize("profile", [1, 2])
def test_steps_from_the_third_on_are_traced(tmp_path, profile):
    take_steps(tmp_path, profile)
    assert traced(tmp_path) == [3, 4][:profile]
    assert written(tmp_path) == FILES
    table = (tmp_path / "profile" / "table.txt").read_text()
    assert "Self CPU" in table and "aten::mm" in table
    rows = [row for row in table.splitlines() if row.strip().startswith(("aten::", "step "))]
    assert 2 <= len(rows) <= profiling.SHOWN


def test_without_the_option_nothing_is_written_or_slowed_down(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "profile", None)  # would fail if it were called
    take_steps(tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_other_ranks_trace_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "profile", None)
    monkeypatch.setattr(profiling.distributed, "rank", lambda: 1)
    take_steps(tmp_path, 2)
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_before_the_last_traced_step_leaves_what_there_is(tmp_path):
    take_steps(tmp_path, 5, steps=4)
    assert traced(tmp_path) == [3, 4] and written(tmp_path) == FILES


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_ends_before_the_first_is_no_error(tmp_path, steps):
    take_steps(tmp_path, 2, steps=steps)
    assert not list(tmp_path.glob("profile/*")) or (steps == 2 and traced(tmp_path) == [])


def test_an_error_of_the_run_is_raised(tmp_path):
    with pytest.raises(ZeroDivisionError):
        take_steps(tmp_path, 5, fail_at=4)
    assert 3 in traced(tmp_path)


def test_a_second_trace_replaces_the_first(tmp_path):
    take_steps(tmp_path, 1)
    take_steps(tmp_path, 2)  # a resumed run
    assert traced(tmp_path) == [3, 4] and written(tmp_path) == FILES


def test_a_script_is_traced_and_changes_nothing(launcher, tmp_path):
    # few and small micro-batches, so that little is to be written
    options = dict(steps=4, batch_size=2, group_size=2, max_new_tokens=4, micro_batch_tokens=400)
    plain = launcher.trained("gspo", **options)
    run = launcher.run(launcher.copy(), tmp_path, **options, profile=2).succeeded()
    assert comparable(run.lines) == comparable(plain.lines) and run.samples == plain.samples
    assert_equal_weights(run.weights(), plain.weights())
    assert written(tmp_path) == FILES
    names = {event["name"] for event in events(tmp_path)}
    # rollout and update
    assert any("scaled_dot_product" in name for name in names)
    assert any("fused_adamw" in name for name in names) and any("Backward" in name for name in names)
    assert not list(plain.out_dir.glob("profile"))
