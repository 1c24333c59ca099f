"""Tests of the measures of a run: schedule of the rate, intervals, reward by column, best checkpoint, early stop."""

import json
import math
import os
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import binomtest
from test_branches import step as step_of_log
from test_checkpoint import names, trained
from test_disk import save

from common.base import distributed, storage
from common.loop import sampler as sampling
from common.run import branches, checkpoint, checkpoint_files, measures, metrics, rules
from common.run.best import Best
from common.tasks import accuracy
from common.tasks.data import Example
from common.tasks.scoring import Scored
from common.training import optim

NAN = float("nan")


def options(**changes) -> SimpleNamespace:
    usual = dict(lr_schedule="constant", lr_end=0.0, eval_data="rows", eval_every=2, eval_columns=(), eval_by="",
                 early_stop=0, best_by="eval_reward")  # fmt: skip
    return SimpleNamespace(**{**usual, **changes})


# -- the schedule of the learning rate


def test_the_rate_warms_up_and_falls_to_its_end():
    def rates(kind, end):
        return [optim.schedule(step, 10, 2, kind, end) for step in range(1, 11)]

    assert rates("constant", 0.0) == [0.5] + 9 * [1.0]
    assert rates("linear", 0.0) == pytest.approx([0.5, 1.0] + [1 - i / 8 for i in range(1, 9)])
    cosine = rates("cosine", 0.1)
    assert cosine[:2] == [0.5, 1.0] and cosine[5] == pytest.approx(0.55) and cosine[9] == pytest.approx(0.1)
    assert cosine[1:] == sorted(cosine[1:], reverse=True)
    assert optim.schedule(9, 9, 0, "linear") == 0.0 and optim.schedule(1, 1, 0, "cosine", 0.3) == 0.3
    assert optim.schedule(3, 3, 9, "cosine") == 1 / 3  # it never gets beyond the warm-up
    with pytest.raises(ValueError, match=r"kind = 'step'.*constant.*linear"):
        optim.schedule(1, 9, 0, "step")


@pytest.mark.parametrize(("changes", "said"), [
    (dict(lr_end=1.5, lr_schedule="linear"), r"lr_end = 1.5: .*0 to 1"), (dict(lr_end=0.1), "lr_end = 0.1.*'cosine'"),
    (dict(early_stop=2, eval_data=""), "early_stop = 2, eval_data = ''.*set both"),
    (dict(early_stop=2, best_by=""), "early_stop = 2, best_by = ''"), (dict(best_by="-"), "best_by = '-'"),
    (dict(eval_by="level", eval_columns=("level",), eval_every=0), "eval_by = 'level'.*no evaluation"),
])  # fmt: skip
def test_options_that_would_do_nothing_are_refused(changes, said):
    rules.check_measures(options())
    with pytest.raises(ValueError, match=said):
        rules.check_measures(options(**changes))


# -- intervals, and rewards by column


def test_the_interval_of_shares_is_wilsons_and_of_other_values_that_of_the_mean():
    for right, n in ((0, 1), (1, 1), (0, 20), (3, 7), (128, 256), (256, 256)):
        expected = binomtest(right, n).proportion_ci(method="wilson")
        found = accuracy.interval([1.0] * right + [0.0] * (n - right))
        assert found == pytest.approx((expected.low, expected.high), abs=1e-5)  # 1.96 has three digits
        assert 0 <= found[0] <= right / n <= found[1] <= 1
    values = [0.5, 2.0, -1.0, 0.0]
    half = 1.96 * statistics.stdev(values) / 2
    assert accuracy.interval(values) == pytest.approx((0.375 - half, 0.375 + half))
    assert all(map(math.isnan, accuracy.interval([0.5]) + accuracy.interval([])))


def examples(rows: list[dict]) -> list[Example]:
    return [Example(i, "what", [1], "1", row) for i, row in enumerate(rows)]


def scored(rewards, **by_function) -> Scored:
    parts = {name: torch.tensor(values) for name, values in by_function.items()}
    return Scored(["x"] * len(rewards), torch.tensor(rewards), parts)


LEVELS = [{"level": 3, "topic": "a b"}, {"level": 3, "topic": None}, {"level": 5, "topic": "a\nb" + "c" * 90},
          {"level": 5, "topic": "a b"}]  # fmt: skip


def test_rewards_are_averaged_over_rows_with_the_same_value():
    parts = [scored([1.0, 0.0]), scored([NAN, 0.5])]
    found = measures.mean_rewards(parts, examples(LEVELS), ("topic", "level"))
    assert {name: value for name, value in found.items() if "[" in name} == {
        "eval_reward[level=3]": 0.5, "eval_reward[level=5]": 0.5, "eval_reward[topic=a b]": 0.75,
    }  # fmt: skip
    # the only row with the long topic has no reward; its label would be this
    assert accuracy.labels(LEVELS[2], ["topic"]) == [f"[topic=a b{'c' * 37}]"]
    assert accuracy.labels({"info": {"a": {"b": 0}}, "c.d": 1}, ["info.a.b", "c.d", "info.x.y"]) == [
        "[info.a.b=0]", "[c.d=1]",
    ]  # fmt: skip


def test_a_column_that_tells_no_rows_apart_is_refused():
    accuracy.require_columns(LEVELS, ("level", "topic"))
    many = [{"levle": i} for i in range(51)]
    for rows, said in (
        (LEVELS, r"'levle'.*\['level', 'topic'\]"), ([{}], "'levle'.*leave it empty"),
        (many, "'levle'.*51 different values, and at most 50"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"eval_by = {said}"):
            accuracy.require_columns(rows, ["levle"])


def means_of_two_ranks(rank: int, ranks: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    rows = examples(LEVELS)[rank::ranks]
    sampled = sampling.accuracies_of(scored(4 * [1.0], reward=[1.0, rank, 0.0, 0.0]), 2)
    greedy = scored([[1.0, 0.0, 1.0, 0.0][e.index] for e in rows])
    found = measures.mean_rewards([greedy], rows, ["level"], sampled)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()


def test_intervals_and_columns_are_over_all_ranks(launcher, tmp_path):
    launcher.run_function(means_of_two_ranks, 2, (str(tmp_path),))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    together = measures.mean_rewards([scored([1.0, 0.0, 1.0, 0.0])], examples(LEVELS), ["level"])
    assert found[0] == found[1] and together.items() <= found[0].items()
    assert found[0]["eval_pass_at_2"] == 0.5 and found[0]["eval_pass_at_1"] == 0.375
    ends = accuracy.interval([1.0, 0.0, 1.0, 0.0])
    assert (found[0]["eval_pass_at_2_low"], found[0]["eval_pass_at_2_high"]) == ends


# -- the best evaluation


def replayed(by: str, values: list, early_stop: int = 0) -> Best:
    best = Best(by, early_stop)
    for step, value in enumerate(values):
        best.add(2 * step, {best.name: value, "eval_other": 1.0})
    return best


@pytest.mark.parametrize(("by", "values", "step", "since"), [
    ("eval_reward", [0.5, 0.7, 0.6], 2, 1), ("-eval_nll", [0.5, 0.7, 0.6], 0, 2), ("eval_reward", [0.5, 0.5], 0, 1),
    ("eval_reward", [NAN, NAN], None, 2), ("eval_reward", [NAN, -1.0, math.inf], 2, 1),
])  # fmt: skip
def test_the_best_is_the_first_that_none_exceeds(by, values, step, since):
    best = replayed(by, values)
    assert (best.step, best.since) == (step, since) and not best.exhausted
    assert replayed(by, values, early_stop=since).exhausted and not replayed(by, values, early_stop=since + 1).exhausted
    # from a checkpoint, and from metrics.jsonl; NaN is null there
    again = Best(by, 0, json.loads(json.dumps(best.notes)))
    assert again.notes == best.notes
    null = [None if not math.isfinite(value) else value for value in values]
    lines = [{"step": 2 * i, best.name: value} for i, value in enumerate(null)]
    assert Best(by, 0, None, lines).notes == best.notes == Best(by, 0, best.notes, lines).notes
    half = replayed(by, values[:1])
    assert Best(by, 0, half.notes, lines).notes == best.notes


def test_a_measure_that_does_not_exist_is_an_error_with_those_that_do():
    with pytest.raises(ValueError, match=r"best_by = '-eval_nl'.*\['eval_nll', 'eval_reward'\]; name one"):
        Best("-eval_nl").add(0, {"eval_reward": 1.0, "eval_nll": 2.0})
    best = Best("eval_pass_at_4")
    best.add(0, {"eval_pass_at_4": 0.5})
    best.add(2, {"eval_reward": NAN})  # nothing could be scored this time
    assert (best.step, best.since) == (0, 1)
    # where no row has an answer there is no reward: there is no best, but nothing may wait for one
    Best("eval_reward").add(0, {"eval_nll": 1.0})
    with pytest.raises(ValueError, match=r"best_by = 'eval_reward'.*'eval_nll'"):
        Best("eval_reward", early_stop=2).add(0, {"eval_nll": 1.0})
    Best("").add(0, {})
    assert Best("eval_reward", 0, replayed("-eval_reward", [1.0]).notes).step is None  # of another measure


# -- out_dir/best


@pytest.fixture(scope="module")
def model():
    return trained(steps=1)


def linked(out_dir: Path) -> str:
    return os.readlink(out_dir / "best")


def train(out_dir: Path, model, numbers, best: int, keep: int = 2) -> None:
    log = metrics.Log(str(out_dir), numbers[0] - 1, 9, [])
    for number in numbers:
        step_of_log(log, number)
        save(out_dir, number, model, keep, min(best, number))
    log.close()


def test_the_best_is_linked_and_kept_beside_the_newest(tmp_path, model):
    train(tmp_path, model, range(1, 6), best=2)
    assert linked(tmp_path) == "checkpoint-000002" and checkpoint.is_complete(tmp_path / "best")
    found = [name for name in names(tmp_path) if name.startswith("checkpoint")]
    assert found == [f"checkpoint-{number:06d}" for number in (2, 4, 5)]
    save(tmp_path, 6, model, best=6)
    assert linked(tmp_path) == "checkpoint-000006" and not (tmp_path / "checkpoint-000002").exists()
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert checkpoint.is_complete(moved / "best")
    assert checkpoint.find(str(moved), str(moved / "best")) == moved / "checkpoint-000006"
    storage._claimed.clear()


def test_the_best_of_a_branch_that_was_left_is_not_that_of_the_new_one(tmp_path, model, capsys):
    train(tmp_path, model, range(1, 5), best=4)
    metrics.Log(str(tmp_path), 3, 9, []).close()  # a run that goes back to step 3
    checkpoint.leave(str(tmp_path), 3)
    checkpoint.link_best(str(tmp_path), 3)
    assert linked(tmp_path) == "checkpoint-000003"
    checkpoint.link_best(str(tmp_path), 1)  # its checkpoint has been deleted
    assert not os.path.lexists(tmp_path / "best") and "best step, 1, is gone" in capsys.readouterr().out
    train(tmp_path, model, [4], best=3)
    assert linked(tmp_path) == "checkpoint-000003"
    # the branch that was left stands under another name, and even under its own it would not be taken
    (tmp_path / "checkpoint-000004").rename(tmp_path / "new")
    (tmp_path / "abandoned-checkpoint-000004").rename(tmp_path / "checkpoint-000004")
    assert branches.departure(tmp_path / "checkpoint-000004", tmp_path)
    checkpoint.link_best(str(tmp_path), 4)
    assert not os.path.lexists(tmp_path / "best")


def test_a_best_that_cannot_be_linked_is_a_warning_and_kept(tmp_path, model, capsys, monkeypatch):
    def refuse(*paths):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(branches.os, "symlink", refuse)  # a file system without links
    storage._failing.clear()
    train(tmp_path, model, range(1, 5), best=1)
    said = capsys.readouterr().err
    assert said.count("best could not be set to checkpoint-000001: ") == 1 and "the run goes on" in said
    assert checkpoint_files.is_complete(tmp_path / "checkpoint-000001") and not os.path.lexists(tmp_path / "best")
    monkeypatch.undo()
    (tmp_path / "best").mkdir()  # the user's
    checkpoint.link_best(str(tmp_path), 1)
    assert (tmp_path / "best").is_dir() and "stays as it is" in capsys.readouterr().err
    checkpoint.link_best(str(tmp_path), None)
    assert (tmp_path / "best").is_dir()


# -- runs


class Rising:
    """Rewards of evaluations that are given by step; those of training differ."""

    __name__ = "rising"

    def __init__(self, **by_step: float):
        self.by_step = by_step

    def __call__(self, completions: list[str], answers: list[str], step: int, **columns: list) -> list[float]:
        value = self.by_step.get(f"s{step}", 0.0)
        return [value + 0.1 * (len(text) % 2) * (len(completions) == 16) for text in completions]


EVERY = dict(save_every=9, eval_every=1, eval_examples=8, keep_checkpoints=1)
UP_AND_DOWN = Rising(s0=0.2, s1=0.1, s2=0.6, s3=0.6, s4=0.5, s5=0.9)


def evaluations(run) -> list[tuple[int, float]]:
    return [(line["step"], pytest.approx(line["eval_reward"])) for line in run.lines if "eval_reward" in line]


def test_a_run_keeps_its_best_and_stops_early(launcher, tmp_path):
    run = launcher.run("gspo", tmp_path, rewards=[UP_AND_DOWN], steps=9, early_stop=2, **EVERY).succeeded()
    assert evaluations(run) == [(0, 0.2), (1, 0.1), (2, 0.6), (3, 0.6), (4, 0.5)]  # a tie is no new best
    assert run.checkpoints == ["checkpoint-000002", "checkpoint-000004"] and linked(tmp_path) == run.checkpoints[0]
    assert "early stop: 2 evaluations without a new best eval_reward (the best: 0.6 after step 2)" in run.output
    assert "step 2: eval_reward 0.600 [0.600, 0.600]" in run.output
    assert [line["step"] for line in run.lines if "seconds_save" in line] == [2, 4]
    # the same command again does not train on; with more patience it does
    again = launcher.run("gspo", tmp_path, rewards=[UP_AND_DOWN], steps=9, early_stop=2, **EVERY).succeeded()
    assert len(again.steps) == 4 and "raise early_stop" in again.output
    more = launcher.run("gspo", tmp_path, rewards=[UP_AND_DOWN], steps=5, early_stop=3, **EVERY).succeeded()
    assert evaluations(more)[-1] == (5, 0.9) and linked(tmp_path) == "checkpoint-000005"
    assert more.checkpoints == ["checkpoint-000005"]
    # a run may begin with it
    best = launcher.run("gspo", tmp_path / "next", policy_model=tmp_path / "best", steps=1).succeeded()
    assert best.checkpoints == ["checkpoint-000001"]


def test_a_run_without_a_best_says_why(launcher, tmp_path):
    options = dict(steps=1, **EVERY | dict(eval_every=1))
    run = launcher.run("gspo", tmp_path / "before", rewards=[Rising(s0=0.5)], **options).succeeded()
    assert "/best: eval_reward was best after step 0, 0.5, which has no checkpoint" in run.output
    run = launcher.run("gspo", tmp_path / "sft", rewards=[Rising(s1=0.5)], **options, best_by="").succeeded()
    assert "/best" not in run.output


@pytest.mark.parametrize("kind", ["gspo", pytest.param("gkd", marks=pytest.mark.parity)])
def test_a_run_killed_between_evaluation_and_save_goes_on_as_if_nothing_had_happened(launcher, tmp_path, kind):
    options = dict(rewards=[UP_AND_DOWN], **EVERY | dict(save_every=1, keep_checkpoints=9))
    straight = launcher.run(kind, tmp_path / "straight", steps=5, **options).succeeded()
    killed = launcher.run(kind, tmp_path / "killed", steps=5, prepare=dies_before_it_saves, **options)
    assert killed.codes == [9] and killed.checkpoints == ["checkpoint-000001"]
    run = launcher.run(kind, tmp_path / "killed", steps=5, **options).succeeded()
    assert evaluations(run) == evaluations(straight) == [(0, 0.2), (1, 0.1), (2, 0.6), (3, 0.6), (4, 0.5), (5, 0.9)]
    notes = [[checkpoint.notes(each.out_dir / name)["best"] for name in each.checkpoints] for each in (run, straight)]
    assert notes[0] == notes[1] and [each["step"] for each in notes[0]] == [0, 2, 2, 2, 5]
    assert linked(run.out_dir) == "checkpoint-000005"
    # back to step 3: the best is that of step 2 again
    options["resume"] = run.out_dir / "checkpoint-000003"
    back = launcher.run(kind, run.out_dir, steps=4, **options).succeeded()
    assert linked(back.out_dir) == "checkpoint-000002" and "abandoned" in back.output


def dies_before_it_saves(module) -> None:
    real = module.Run.record_eval

    def record_eval(run, step, values):
        real(run, step, values)
        if step == 2:
            os._exit(9)

    module.Run.record_eval = record_eval


def test_after_an_outage_in_an_evaluation_the_best_is_known_and_stays_known(launcher, tmp_path):
    options = dict(rewards=[UP_AND_DOWN], steps=3, **EVERY)
    cut = launcher.run("gspo", tmp_path, prepare=loses_its_service, **options)
    assert cut.codes == [75] and cut.checkpoints == ["checkpoint-000002"]
    assert evaluations(cut) == [(0, 0.2), (1, 0.1)] and not os.path.lexists(tmp_path / "best")
    killed = launcher.run("gspo", tmp_path, prepare=dies_before_it_saves, **options)
    assert killed.codes == [9] and evaluations(killed)[2:] == [(2, 0.6)]
    run = launcher.run("gspo", tmp_path, **options).succeeded()
    assert evaluations(run) == [(0, 0.2), (1, 0.1), (2, 0.6), (3, 0.6)] and linked(tmp_path) == "checkpoint-000002"
    assert run.checkpoints == ["checkpoint-000002", "checkpoint-000003"]


def loses_its_service(module) -> None:
    real = module.evaluate

    def evaluate(cfg, *arguments):
        if arguments[-1] == 2:
            raise distributed.OutageError("away")
        return real(cfg, *arguments)

    module.evaluate = evaluate


def test_gkd_reports_accuracies_and_columns_of_rows_with_answers(launcher, tmp_path):
    rows = [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1), "level": n % 2} for n in range(6)]
    rows += [{"prompt": "what is", "level": 7}]
    (data := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = dict(eval_data=data, eval_samples=2, eval_by="level", steps=1, best_by="eval_pass_at_2", rewards=[right])
    run = launcher.run("gkd", tmp_path / "run", **options).succeeded()
    line = next(line for line in run.lines if "eval_reward" in line)
    assert 0 <= line["eval_pass_at_1"] <= line["eval_pass_at_2"] <= 1 and "eval_majority_of_2_high" in line
    assert line["eval_pass_at_2_low"] <= line["eval_pass_at_2"] <= line["eval_pass_at_2_high"]
    assert [name for name in line if "[" in name] == ["eval_reward[level=0]", "eval_reward[level=1]"]
    assert line["eval_reward[level=0]"] + line["eval_reward[level=1]"] == pytest.approx(2 * line["eval_reward"])
    assert "reward_right" not in run.steps[0]
    assert checkpoint.notes(run.out_dir / "checkpoint-000001")["best"]["by"] == "eval_pass_at_2"
    wrong = launcher.run("gkd", tmp_path / "wrong", **options | {"eval_by": "levle"})
    assert wrong.codes == [1] and "eval_by = 'levle'" in wrong.output and not wrong.lines


def right(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    return [float(len(text) % 2) for text in completions]


def test_without_a_best_nothing_is_kept(launcher, tmp_path):
    run = launcher.run("gspo", tmp_path, rewards=[UP_AND_DOWN], best_by="", steps=3, **EVERY).succeeded()
    assert run.checkpoints == ["checkpoint-000003"] and not os.path.lexists(tmp_path / "best")
    wrong = launcher.run("gspo", tmp_path / "wrong", best_by="eval_rewrad", steps=1)
    assert wrong.codes == [1] and "best_by = 'eval_rewrad'" in wrong.output and "'eval_reward'" in wrong.output


def test_the_rate_of_a_run_follows_its_schedule(launcher, tmp_path):
    options = dict(steps=4, eval_data="", learning_rate=1e-3, warmup_steps=1, lr_schedule="cosine", lr_end=0.5)
    run = launcher.run("grpo", tmp_path, **options).succeeded()
    expected = [1e-3 * optim.schedule(step, 4, 1, "cosine", 0.5) for step in range(1, 5)]
    assert [line["learning_rate"] for line in run.steps] == expected and expected[-1] == 5e-4


def test_a_wrong_name_on_a_resume_stops_the_run_only_after_its_steps_are_saved(launcher, tmp_path):
    launcher.run("gspo", tmp_path, steps=2, kl_coef=0.0).succeeded()
    options = dict(steps=5, kl_coef=0.0, eval_every=4, save_every=100, best_by="eval_pass_at_9")
    run = launcher.run("gspo", tmp_path, **options)
    assert run.codes == [1] and "best_by = 'eval_pass_at_9'" in run.output and "eval_reward" in run.output
    assert run.checkpoints[-1] == "checkpoint-000004"
    assert run.lines[-1] == {"step": 4, "seconds_save": run.lines[-1]["seconds_save"]}
