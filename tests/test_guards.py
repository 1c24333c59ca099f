"""Tests of common/run/guards.py: when a run has collapsed, what is said, and that it ends."""

import json
import re
from types import SimpleNamespace

import pytest
from comparing import comparable
from conftest import ROOT, SCRIPTS

from common.run import guards


def constant(completions, answers, **columns):
    return [0.5] * len(completions)


STOPS = dict(rewards=[constant], on_collapse="stop", collapse_steps=3, steps=9, save_every=5, eval_data="",
             num_minibatches=1)  # fmt: skip
LEARNS = {"learning_rate": 1e-4, "memory_gib": [1.0], "loss": 0.1, "skipped_updates": 0.0}


class Printed(list):
    """In place of a log: the lines that it was told to print."""

    print_above_bar = list.append


def watch(tmp_path, ranges=None, start=0, **options) -> guards.Watch:
    cfg = SimpleNamespace(**dict(on_collapse="warn", collapse_steps=3, out_dir=str(tmp_path)) | options)
    return guards.Watch({"entropy": (0.1, 5.0)} if ranges is None else ranges, cfg, Printed(), start)


def see(watch: guards.Watch, values: list, first: int = 1) -> list[tuple[int, bool]]:
    """The steps at which something was said or the run was to end."""
    found = []
    for step, value in enumerate(values, first):
        said = len(watch._log)
        ends = watch.check({"step": step, "entropy": value, **LEARNS})
        if ends or len(watch._log) > said:
            found.append((step, ends))
    return found


def test_a_warning_comes_at_the_last_of_so_many_steps_once_and_again_after_a_recovery(tmp_path):
    one = watch(tmp_path)
    values = [1.0, 0.09, 0.08, 1.0, 0.07, 0.06, 0.05, 0.04, 0.1, 6.0, 7.0, 8.0, 9.0]
    assert see(one, values) == [(7, False), (12, False)]
    said = "warning: step 7: entropy has been outside 0.1 to 5 since step 5, lastly 0.07, 0.06, 0.05: "
    assert one._log[0].startswith(said) and "raise kl_coef, lower learning_rate" in one._log[0]
    assert one._log[1].startswith("warning: step 12: entropy has been outside 0.1 to 5 since step 10, lastly 6, 7, 8:")
    one.exit_if_collapsed()  # nothing
    off = watch(tmp_path, {"entrpy": (0.1, 5.0)}, on_collapse="off")  # looks at nothing, not even at names
    assert see(off, [0.0] * 9) == []


@pytest.mark.parametrize("unknown", [None, float("inf"), float("nan")])
def test_steps_in_which_a_metric_is_not_known_do_not_count(tmp_path, unknown):
    assert see(watch(tmp_path), [0.0, unknown, 0.0, unknown, unknown, 0.0, 0.0]) == [(6, False)]


def test_the_limits_belong_to_the_range_and_either_may_be_missing(tmp_path):
    assert see(watch(tmp_path, collapse_steps=1), [0.1, 5.0, 0.0999, 5.001]) == [(3, False)]  # from 4 on it goes on
    assert see(watch(tmp_path, {"entropy": (None, 5.0)}, collapse_steps=1), [-1e9, 6.0]) == [(2, False)]
    assert see(watch(tmp_path, {"entropy": (0.1, None)}, collapse_steps=1), [1e9, 0.0]) == [(2, False)]


@pytest.mark.parametrize(
    "limits", [None, 0.1, "ab", ("1", "2"), (0.1,), (0.1, None, 5.0), (float("nan"), None), (5.0, 0.1)]
)
def test_a_range_is_two_numbers(tmp_path, limits):
    with pytest.raises(ValueError, match=re.escape(f"GUARDS has 'entropy': {limits!r}: must be (least, most)")):
        watch(tmp_path, {"entropy": limits})


def test_metrics_are_counted_each_for_itself_and_named_together(tmp_path):
    ranges = {"entropy": (0.1, None), "reward_std": (1e-4, None)}
    one = watch(tmp_path, ranges)
    for step, (entropy, std) in enumerate([(0.0, 0.1), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)], 1):
        one.check({"step": step, "entropy": entropy, "reward_std": std, **LEARNS})
    assert [line.split(" has")[0] for line in one._log] == ["warning: step 3: entropy", "warning: step 4: reward_std"]
    assert "or the reward function blind?" in one._log[1]
    one = watch(tmp_path, ranges, on_collapse="stop", collapse_steps=1)
    assert one.check({"step": 1, "entropy": 0.0, "reward_std": 0.0, **LEARNS})
    assert "step 1: entropy has been outside" in one.collapsed and "; step 1: reward_std has been" in one.collapsed


def test_stop_ends_the_run_with_its_own_code(tmp_path, capsys):
    one = watch(tmp_path, on_collapse="stop")
    assert see(one, [0.0, 0.01, 0.02]) == [(3, True)] and not one._log
    with pytest.raises(SystemExit) as ended:
        one.exit_if_collapsed()
    assert ended.value.code == guards.EXIT_CODE == 3
    said = capsys.readouterr().err
    assert said.startswith("stopped at step 3: entropy has been outside 0.1 to 5 since step 1, lastly 0, 0.01, 0.02:")
    assert "saved" in said and "on_collapse to 'warn'" in said


@pytest.mark.parametrize("name", ["entrpy", "memory_gib"])  # a list has no range
def test_a_name_that_does_not_exist_is_an_error_with_those_that_do(tmp_path, name):
    one = watch(tmp_path, {name: (0.1, 5.0)})
    # nothing was trained on: the metrics of updates are absent
    assert not one.check({"step": 1, "skipped_updates": 1.0, "reward": 0.0})
    known = "step, entropy, learning_rate, loss, skipped_updates; correct"
    with pytest.raises(ValueError, match=rf"GUARDS has \['{name}'\].*: {known}"):
        see(one, [1.0])


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_resumed_run_judges_as_one_that_went_straight_on(tmp_path, cut):
    values = [0.0, 1.0, 0.0, None, 0.0, 0.0, 0.0, 1.0, 0.0]
    lines = [{"step": step, "entropy": value, **LEARNS} for step, value in enumerate(values, 1)]
    lines += [{"step": 2, "eval_reward": 0.5}, {"step": 4, "seconds_save": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    straight, resumed = watch(tmp_path), watch(tmp_path, start=cut)  # a new run forgets what stood there
    expected = see(straight, values)
    assert expected == [(6, False)]
    assert see(resumed, values[cut:], cut + 1) == [event for event in expected if event[0] > cut]
    assert resumed._log == [text for text in straight._log if expected[0][0] > cut]
    assert see(watch(tmp_path / "elsewhere", start=5), [0.0, 0.0, 0.0], 6) == [(8, False)]


def test_a_reward_that_never_differs_stops_all_ranks(launcher, tmp_path):
    run = launcher.run("grpo_ddp", tmp_path, 2, timeout=60, **STOPS)
    assert run.codes == [3, 3], run.output
    assert run.output.count("stopped at step 3: reward_std has been outside 0.0001 to inf since step 1, lastly") == 1
    assert [line["step"] for line in run.steps] == [1, 2, 3] and run.checkpoints == ["checkpoint-000003"]


@pytest.mark.parity
def test_a_resumed_run_remembers_and_can_go_on(launcher, tmp_path):
    # two steps, then a resume: the third in a row is the last one
    launcher.run("gspo", tmp_path, **STOPS | {"steps": 2}).succeeded()
    run = launcher.run("gspo", tmp_path, **STOPS)
    before = comparable(run.steps)
    assert run.codes == [3] and [line["step"] for line in before] == [1, 2, 3]
    went_on = launcher.run("gspo", tmp_path, **STOPS | {"on_collapse": "warn", "steps": 4}).succeeded()
    assert "has the run collapsed" not in went_on.output  # it was said at step 3
    assert comparable(went_on.steps)[:3] == before


def test_a_misspelt_guard_stops_the_run_after_its_first_step(launcher, tmp_path):
    guards = {"entrpy": (5e-3, 8.0)}
    run = launcher.run("gkd", tmp_path, constants={"GUARDS": guards}, steps=2, eval_data="")
    assert run.codes == [1] and re.search(r"GUARDS has \['entrpy'\]: must be metrics of a step: .*entropy", run.output)


@pytest.mark.parametrize("script", [*SCRIPTS, "poster_grpo"])
def test_every_script_has_guards_and_obeys_them(script):
    text = SCRIPTS.get(script, ROOT / "grpo" / "poster" / f"{script}.py").read_text()
    calls = (
        "\nGUARDS = ",
        "Run(cfg, gpus, GUARDS, TIMEOUT_MINUTES)",
        "run.interruptible()",
        "run.end_step(step",
        "run.stop_requested()",
    )
    places = [text.find(call) for call in calls]
    assert -1 not in places and places == sorted(places)
