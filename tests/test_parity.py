"""The variants of one algorithm are the same computation: in one process, in several, in any cut of the batch."""

import math
import sys
from pathlib import Path

import pytest
from conftest import MEASURED, assert_equal_weights, comparable

MIXED = dict(truncated="mask", advantage_scale="batch", gspo_epochs=2, max_new_tokens=24, kl_estimator="k2")


def assert_close(run, other, metrics: float, weights: float) -> None:
    """Relative difference of metrics, absolute difference of weights."""
    assert len(run.lines) == len(other.lines) > 0
    for line, other_line in zip(comparable(run.lines), comparable(other.lines), strict=True):
        assert line.keys() == other_line.keys()
        for name, value in line.items():
            # the KL to the old policy is a difference of almost equal numbers: of the order of fp32 rounding
            same = value == other_line[name] or math.isclose(value, other_line[name], rel_tol=metrics, abs_tol=1e-6)
            assert same, f"step {line['step']}: {name} {value} {other_line[name]}"
    one, two = run.weights(), other.weights()
    assert one.keys() == two.keys()
    for name in one:
        difference = (one[name] - two[name]).abs()
        if name.endswith("c_attn.bias"):  # a bias of all keys has no gradient but rounding, which Adam makes large
            difference = difference.view(3, -1)[[0, 2]]
        assert difference.max() <= weights, f"{name}: {difference.max()}"


@pytest.mark.parametrize("script", ["gspo_multigpu", "gspo_ddp"])
def test_in_one_process_all_variants_are_equal(launcher, script):
    one, other = launcher.trained("gspo", steps=6), launcher.trained(script, steps=6)
    assert comparable(other.lines) == comparable(one.lines)
    assert other.samples == one.samples
    assert_equal_weights(other.weights(), one.weights())


def test_the_comparison_is_of_runs_that_learn(launcher):
    run = launcher.trained("gspo", steps=6)
    assert [line["step"] for line in run.lines] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]  # with evaluations
    assert all(0 < line["grad_norm"] < 100 for line in run.steps)
    assert any(line["unscored"] > 0 for line in run.steps) and any(line["clip_fraction"] > 0 for line in run.steps)
    assert any((a != b).any() for a, b in zip(run.weights(2).values(), run.weights(6).values(), strict=True))


@pytest.mark.parametrize("family, options", [("qwen2", {}), ("qwen2", MIXED), ("gpt2", {})])
def test_two_ranks_are_one_process(launcher, model_folders, family, options):
    options = {"steps": 6, **options} | ({"policy_model": model_folders[family]} if family != "qwen2" else {})
    one, two = launcher.trained("gspo", **options), launcher.trained("gspo_ddp", 2, **options)
    # rank 0 shows its own prompts, those with even numbers
    shown = [line for step in range(6) for line in one.samples[4 * step : 4 * step + 4 : 2]]
    assert two.samples == shown
    assert_close(two, one, metrics=1e-4, weights=1e-6)


def test_the_cut_into_micro_batches_changes_nothing(launcher):
    one, other = launcher.trained("gspo", steps=6), launcher.trained("gspo", steps=6, micro_batch_size=16)
    assert other.samples == one.samples
    assert_close(other, one, metrics=1e-4, weights=1e-6)


def test_gradient_checkpointing_changes_nothing(launcher):
    one, other = launcher.trained("gspo", steps=6), launcher.trained("gspo", steps=6, gradient_checkpointing=True)
    assert_close(other, one, metrics=1e-5, weights=1e-7)


def test_another_seed_is_another_run(launcher):
    one, other = launcher.trained("gspo", steps=6), launcher.trained("gspo", steps=6, seed=1)
    assert not {line["completion"] for line in one.samples} & {line["completion"] for line in other.samples}
    assert {line["prompt"] for line in one.samples[:4]} != {line["prompt"] for line in other.samples[:4]}


def test_accelerate_launch_runs_two_ranks(launcher, tmp_path):
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--cpu", "--num_processes", "2"]
    run = launcher.command(command, launcher.copy("gspo_ddp"), tmp_path / "run", steps=6).wait().succeeded()
    # accelerate picks the number of threads, so sums are rounded elsewhere
    assert_close(run, launcher.trained("gspo_ddp", 2, steps=6), metrics=1e-4, weights=1e-6)


def test_measured_values_are_there(launcher):
    for line in launcher.trained("gspo_ddp", 2, steps=6).steps:
        assert {name for name in line if name.startswith(MEASURED)} == {
            "seconds", "seconds_rollout", "seconds_score", "seconds_update", "tokens_per_second", "memory_gib",
            "host_memory_gib",
        }  # fmt: skip
        assert line["tokens_per_second"] > 0 and line["memory_gib"] == [] and len(line["host_memory_gib"]) == 2
        parts = line["seconds_rollout"] + line["seconds_score"] + line["seconds_update"]
        assert line["seconds"] == pytest.approx(parts)
