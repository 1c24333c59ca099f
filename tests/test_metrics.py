"""Tests of common/run/metrics.py: what stands in metrics.jsonl and samples.jsonl, and what is said on the console."""

import json
import math
import re
import resource
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from bounds import rounding
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from common.base import storage
from common.generation.batches import RolloutBatch
from common.run import measures, metrics
from common.run.metrics import Log, keep_lines
from common.tasks.data import Example
from common.tasks.scoring import Scored

CPU = torch.device("cpu")
NAN = float("nan")


def rollout(lengths, truncated=None) -> RolloutBatch:
    B, C = len(lengths), max(lengths)
    lengths = torch.tensor(lengths)
    ids = torch.ones(B, C, dtype=torch.long)
    mask = torch.arange(C) < lengths[:, None]
    return RolloutBatch(
        prompt_ids=ids, completion_ids=ids, completion_mask=mask, rollout_logps=torch.zeros(B, C),
        prompt_lengths=torch.full((B,), C), lengths=lengths,
        truncated=torch.tensor(truncated or [False] * B), trained=torch.ones(B).bool(), rows=torch.arange(B),
        group=torch.arange(B),
    )  # fmt: skip


@pytest.fixture
def log(tmp_path):
    log = Log(str(tmp_path / "run"), 0, 10, [CPU])
    yield log
    log.close()


def lines(log, name="metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (log.out_dir / name).read_text().split("\n") if line]


def end_step(log, step=1, rewards=((1.0, 0.0),), by_function=None, lengths=None, truncated=None, **values) -> dict:
    """A step with this rollout; the line written."""
    rewards = torch.tensor(rewards)
    by_function = {"reward": rewards.flatten()} if by_function is None else by_function
    log.add_rollout(rollout(lengths or [4] * rewards.numel(), truncated), rewards, by_function)
    with log.time("rollout"):
        pass
    log.end_step(step, **values)
    return lines(log)[-1]


def test_averages_are_weighted_names_that_end_in_max_are_maxima_and_a_step_begins_with_nothing(log):
    log.add(3, loss=1.0, clip_fraction=torch.tensor(0.5), ratio_max=torch.tensor(1.5))
    log.add(1, loss=torch.tensor(5.0), clip_fraction=0.0)
    log.add(0, ratio_max=1.75, entropy=0.0)
    log.add(grad_norm=2.0, ratio_max=0.5)
    log.add(grad_norm=4.0)
    line = end_step(log, 3, learning_rate=1e-6)
    assert (line["step"], line["learning_rate"]) == (3, 1e-6)  # written as they were given
    assert line["loss"] == 2.0 and line["clip_fraction"] == 0.375  # (3 * 1 + 1 * 5) / 4 and (3 * 0.5 + 1 * 0) / 4
    assert line["grad_norm"] == 3.0 and line["ratio_max"] == 1.75
    assert line["entropy"] is None  # the average of nothing
    log.add(loss=3.0)
    for value in (0, 1, 1, 1):
        log.add(half=torch.tensor(value, dtype=torch.bfloat16, requires_grad=True), truth=torch.tensor(value > 0))
    line = end_step(log, 4)
    assert line["loss"] == 3.0 and line["half"] == line["truth"] == 0.75 and "ratio_max" not in line


def test_what_will_be_computed_again_can_be_forgotten(log):
    log.add(2, loss=1.0, length_max=3.0)
    mark = log.mark()
    log.add(5, loss=torch.tensor(9.0), length_max=9.0, new=9.0)
    log.rollback(mark)
    log.add(2, loss=torch.tensor(5.0))
    line = end_step(log)
    assert line["loss"] == 3.0 and line["length_max"] == 3.0 and "new" not in line


def test_numbers_of_several_devices_are_averaged_on_the_host(log):
    for weight, value in ((1, 2.0), (3, torch.tensor(6.0)), (4, torch.tensor(1.0))):
        log.add(weight, loss=value)
    # a sum per device: to add up across GPUs would make one wait for the other
    assert {key: float(value) for key, value in log._sums.items()} == {("loss", None): 2.0, ("loss", CPU): 22.0}
    assert end_step(log)["loss"] == 3.0


@pytest.mark.parametrize("value", [-math.inf, torch.tensor(NAN)])
def test_what_json_cannot_hold_is_null(log, value):
    log.add(loss=value, ratio_max=value, entropy=1.0)
    line = end_step(log, learning_rate=float(value))
    assert line["loss"] is line["ratio_max"] is line["learning_rate"] is None and line["entropy"] == 1.0
    log.eval(1, 0.5, eval_reward=float(value))
    text = (log.out_dir / "metrics.jsonl").read_text()
    assert (
        "NaN" not in text
        and "Infinity" not in text
        and lines(log)[-1] == {"step": 1, "eval_reward": None, "seconds_eval": 0.5}
    )


def test_phases_are_timed_and_saving_in_a_line_of_its_own(log, monkeypatch):
    times = iter([10.0, 12.0, 20.0, 23.0, 40.0, 40.25, 30.0, 30.5, 10.0, 12.5, 60.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(times))
    for phase in ("score", "update", "update"):
        with log.time(phase):
            pass
    line = end_step(log, 3, lengths=[4, 7])  # its rollout takes 0.5 s
    assert (line["seconds_rollout"], line["seconds_score"], line["seconds_update"]) == (0.5, 2.0, 3.25)
    assert line["seconds"] == 5.75 and line["tokens_per_second"] == 11 / 5.75
    with log.time_save(3):
        pass
    with pytest.raises(ZeroDivisionError), log.time_save(4):  # what could not be written has no time
        raise ZeroDivisionError
    assert lines(log) == [line, {"step": 3, "seconds_save": 2.5}]  # the step was written before it was saved


def test_numbers_leave_the_device_once_per_step(log, monkeypatch):
    # each transfer by itself would make the host wait for the GPU; here every way out of a tensor is counted
    read = []

    def counted(name):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *args, **kwargs: read.append(name) or real(*args, **kwargs))

    log.add_rollout(rollout([4, 4]), torch.tensor([[1.0, 0.0]]), {"reward": torch.tensor([1.0, 0.0])})
    with log.time("update"):
        for name in ("item", "tolist", "numpy", "cpu", "to", "__float__", "__int__", "__bool__", "__array__"):
            counted(name)
        for i in range(1, 4):
            values = torch.arange(3.0) * i
            log.add(i, loss=values[0], clip_fraction=values[1], ratio_max=values[2], out_of_range=values[0] > 1)
            log.add(torch.tensor(2.0), entropy=values[1])
            log.add(grad_norm=values[2], skipped_updates=float(i == 2))
        assert read == []
    log.end_step(1, learning_rate=1e-6)
    assert read == ["tolist"]
    monkeypatch.undo()
    (line,) = lines(log)
    assert line["clip_fraction"] == pytest.approx((1 + 4 + 9) / 6) and line["ratio_max"] == 6.0
    assert line["entropy"] == 2.0 and line["grad_norm"] == 4.0 and line["skipped_updates"] == pytest.approx(1 / 3)


def test_rewards_by_hand(log):
    # first group: mean 1, standard deviation sqrt((1 + 0 + 1) / 2) = 1, one unscored; second: all equal
    rewards = ((0.0, 1.0, 2.0, NAN), (3.0, 3.0, 3.0, 3.0))
    by_function = {"format": torch.tensor([NAN, 0.5, NAN, 1.0, NAN, NAN, NAN, NAN]), "other": torch.full((8,), NAN)}
    line = end_step(log, 1, rewards, by_function, [1, 2, 3, 4, 5, 6, 7, 8], [False] * 6 + [True, True])
    assert (line["reward_format"], line["reward_other"]) == (0.75, None)  # each over what it scored
    assert line["reward"] == pytest.approx(15 / 7)
    assert (line["reward_std"], line["zero_std"], line["unscored"], line["truncated"]) == (0.5, 0.5, 0.125, 0.25)
    assert line["completion_length"] == 4.5 and line["completion_length_max"] == 8
    # of the rewards 2 and 0
    assert line["completion_length_above"] == 3.0 and line["completion_length_below"] == 1.0
    assert line["memory_gib"] == [] and 0.01 < line["host_memory_gib"][0] < 100  # of no GPU, and of one process


@pytest.mark.parametrize(("rewards", "expected"), [  # reward, reward_std, zero_std, unscored
    (((NAN, 1.0, NAN, NAN),), (1.0, 0.0, 1.0, 0.75)),  # one score: no spread
    (((NAN, NAN), (1.0, 0.0)), (0.5, pytest.approx(0.5**0.5 / 2), 0.5, 0.5)),  # a group without a score: no signal
    (((0.1,) * 7,), (pytest.approx(0.1), pytest.approx(0, abs=rounding(7, 0.1)), 1.0, 0.0)),  # equal
])  # fmt: skip
def test_groups_without_a_signal(log, rewards, expected):
    line = end_step(log, rewards=rewards)
    assert tuple(line[name] for name in ("reward", "reward_std", "zero_std", "unscored")) == expected
    if len(rewards) == 1:  # no completion is better or worse than its group
        assert line["completion_length_above"] is None and line["completion_length_below"] is None
    with pytest.raises(ValueError, match="step 4: the reward is NaN for every completion"):
        end_step(log, 4, rewards=((NAN, NAN), (NAN, NAN)))
    assert lines(log)[-1]["unscored"] == 1.0 and lines(log)[-1]["reward"] is None


def test_warnings_are_said_once(log, capsys):
    # a step that can be learned from is no reason
    log.add(skipped_updates=0.0)
    log.add(skipped_updates=1.0)
    end_step(log, rewards=((1.0, 0.0), (1.0, 1.0)), truncated=[True, True, True, False])
    assert "warning" not in capsys.readouterr().out
    for step in (2, 3, 4):
        log.add(skipped_updates=1.0)
        end_step(log, step, rewards=((1.0, 1.0),), truncated=[True, True])
    said = capsys.readouterr().out
    for cause in ("cut off: raise max_new_tokens", "rewards of every group are equal", "could be trained on"):
        assert said.count(cause) == 1
    assert said.count("warning: step 2:") == 3 and "step 3" not in said


def test_an_evaluation_is_due_before_a_new_run_or_where_one_was_cut_off(tmp_path):
    def due(start, every=2, data="rows") -> bool:
        log = Log(str(tmp_path), start, 5, [CPU])
        log.close()
        return log.evaluation_due(SimpleNamespace(eval_data=data, eval_every=every, steps=5))

    text = '{"step": 2, "reward": 1}\n{"step": 4, "eval_reward": 0.5}\n{"step": 5, "reward": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [due(start) for start in (5, 4, 3, 2, 0)] == [True, False, False, True, True]  # the end counts, too
    assert not due(0, every=0) and not due(0, data="")


def test_an_evaluation_is_a_line_of_its_own_and_says_what_it_leaves_out(log, capsys):
    log.eval(0, 0.5, eval_reward=0.25)
    assert lines(log) == [{"step": 0, "eval_reward": 0.25, "seconds_eval": 0.5}]
    assert "step 0: eval_reward 0.250" in capsys.readouterr().out
    found = measures.mean_rewards([scored([1.0, 0.0]), scored([2.0])])
    ends = {"eval_reward_low": 1 - 1.96 / 3**0.5, "eval_reward_high": 1 + 1.96 / 3**0.5}
    assert found == pytest.approx({"eval_reward": 1.0} | ends) and capsys.readouterr().out == ""
    log.eval(1, 0.5, **found, **{"eval_reward[level=1]": 0.5})
    assert lines(log)[-1] == {"step": 1, "eval_reward[level=1]": 0.5, "seconds_eval": 0.5} | found
    assert "step 1: eval_reward 1.000 [-0.132, 2.132]\n" in capsys.readouterr().out
    assert measures.mean_rewards([scored([1.0, NAN]), scored([NAN])])["eval_reward"] == 1.0
    assert "2 of 3 rewards are NaN" in capsys.readouterr().out
    assert math.isnan(measures.mean_rewards([])["eval_reward"])
    assert math.isnan(measures.mean_rewards([scored([NAN])])["eval_reward"])
    several = [scored([1.2, 0.0], task=[1.0, 0.0], form=[0.2, NAN]), scored([NAN], task=[NAN], form=[1.0])]
    found = measures.mean_rewards([*several, scored([0.0], task=[0.0], late=[3.0])])
    found = {name: value for name, value in found.items() if not name.endswith(("_low", "_high"))}
    expected = {"eval_reward": 0.4, "eval_reward_task": 1 / 3, "eval_reward_form": 0.6, "eval_reward_late": 3}
    assert found == pytest.approx(expected)


def scored(rewards, texts=None, **by_function) -> Scored:
    parts = {name: torch.tensor(values) for name, values in by_function.items()}
    return Scored(texts or ["x"] * len(rewards), torch.tensor(rewards), parts)


def examples(count) -> list[Example]:
    return [Example(i, f"what is {i} + {i}?", [1], str(2 * i), {}) for i in range(count)]


def test_samples_are_the_first_of_each_prompt_whatever_they_hold(log, capsys):
    texts = [f"prompt {i} completion {g}" for i in range(6) for g in range(2)]
    log.samples(5, examples(6), scored([float(i) for i in range(12)], texts), show=False)
    assert lines(log, "samples.jsonl") == [
        {"step": 5, "prompt": f"what is {i} + {i}?", "completion": f"prompt {i} completion 0", "answer": str(2 * i),
         "reward": 2.0 * i} for i in range(4)
    ]  # fmt: skip
    assert capsys.readouterr().out == ""
    log.samples(5, examples(1), scored([1.0, 0.0], ["right\n\x1b[2J", "wrong"]), show=True)
    said = capsys.readouterr().out
    assert r"step 5, reward 1, answer '0': 'right\n\x1b[2J'" in said and "wrong" not in said
    # half a character, a line separator, an unscored completion, a chat, an id
    chat = Example(0, [{"role": "user", "content": "?"}], [1], None, {"id": "seven"})
    log.samples(
        6, [chat, *examples(1)], scored([NAN, 1.0], ["\ud83d", 'a\u2028b " \\'], a=[NAN, 0.0], b=[0.0, 1.0]), show=False
    )
    first, second = [line for line in lines(log, "samples.jsonl") if line["step"] == 6]
    assert (first["rewards"], second["rewards"]) == ({"a": None, "b": 0}, {"a": 0, "b": 1})
    assert second["completion"] == 'a\u2028b " \\' and "id" not in second
    assert (first["reward"], first["prompt"], first["id"]) == (None, [{"role": "user", "content": "?"}], "seven")


def test_lines_of_later_steps_and_one_cut_off_are_removed_and_counted(tmp_path, capsys):
    kept = '{"step": 0, "eval_reward": 0.1}\n{"step": 1}\n{"step": 2}\n{"step": 2, "text": "äöü \u2028 中文"}\n'
    path = tmp_path / "metrics.jsonl"
    keep_lines(path, 3)
    assert not list(tmp_path.iterdir())  # an absent file stays absent
    path.write_text(kept + '{"step": 3}\n{"step": 3, "seconds_save": 0.1}\n{"step": 4, "los')
    keep_lines(path, 2)
    assert path.read_text() == kept and [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert f"{path}: removed 2 lines" in capsys.readouterr().out
    for end in (b"", b"{", b'{"step": 2', b"\x00\x00\x00", b"\n\n", b'{"step": 1, "answer": "\xc3'):
        path.write_bytes(kept.encode() + end)
        keep_lines(path, 2)
        assert path.read_bytes() == kept.encode() and (end or capsys.readouterr().out == "")


def test_a_full_disk_names_file_and_remedy_and_ends_the_run_only_for_metrics(log, capsys):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (log.out_dir / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"metrics.jsonl.* free: No space left on device; .* from its last checkpoint"):
        log.eval(1, 0.5, eval_reward=0.5)
    for step in (1, 2):
        log.samples(step, examples(1), scored([1.0]), show=False)
    said = rf"warning: {log.out_dir}/samples.jsonl could not be written: .*No space left on device; the run goes on"
    assert len(re.findall(said, capsys.readouterr().err)) == 1  # once
    (log.out_dir / "samples.jsonl").unlink()
    log.samples(3, examples(1), scored([1.0]), show=False)
    assert [line["step"] for line in lines(log, "samples.jsonl")] == [3]
    (log.out_dir / "samples.jsonl").unlink()
    (log.out_dir / "samples.jsonl").symlink_to("/dev/full")
    log.samples(4, examples(1), scored([1.0]), show=False)
    assert re.search(said, capsys.readouterr().err)  # again after it has worked


def test_what_is_written_in_part_is_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    storage.append(path, "whole\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError):
            storage.append(path, "does not fit\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "whole\n"


def test_tensorboard_on_a_full_disk_is_given_up_until_a_checkpoint_is_saved(log, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # its thread ends
    monkeypatch.setattr(RecordWriter, "write", full)
    for step in (1, 2, 3):
        end_step(log, step)
        time.sleep(0.05)  # what the thread could not write is raised by a later call
    assert capsys.readouterr().err.count("tensorboard could not be written: [Errno 28] No space left on device; ") == 1
    monkeypatch.undo()
    folder = log.out_dir / "tensorboard"
    (folder / ".writing-events").symlink_to("/dev/full")
    before = list(folder.glob("events*"))
    for room in (False, True):
        with log.time_save(3):
            pass
        assert (list(folder.glob("events*")) != before) == room
    assert not (folder / ".writing-events").exists()
    end_step(log, 4)
    log.close()
    assert [event.step for event in events(log).Scalars("reward")] == [4]
    assert len(lines(log)) == 6  # metrics.jsonl has all


def events(log) -> EventAccumulator:
    read = EventAccumulator(str(log.out_dir / "tensorboard"))
    read.Reload()
    return read


def test_a_resumed_log_goes_on_after_the_checkpoint(tmp_path):
    first = Log(str(tmp_path), 0, 10, [CPU])
    first.eval(0, 0.5, eval_reward=0.0)
    for step in (1, 2, 3):
        end_step(first, step)
        first.samples(step, examples(1), scored([1.0, 0.0]), show=False)
        if step >= 2:
            with first.time_save(step):
                pass
    first.close()
    second = Log(str(tmp_path), 2, 10, [CPU])
    end_step(second, 3)
    second.close()
    assert [line["step"] for line in lines(second)] == [0, 1, 2, 2, 3]
    assert [line["step"] for line in lines(second) if "seconds_save" in line] == [2]
    assert [line["step"] for line in lines(second, "samples.jsonl")] == [1, 2]
    third = Log(str(tmp_path), 0, 10, [CPU])  # from nothing: also the evaluation before the first step is taken again
    third.eval(0, 0.5, eval_reward=0.25)
    third.close()
    assert lines(third) == [{"step": 0, "eval_reward": 0.25, "seconds_eval": 0.5}]


def test_tensorboard_gets_the_same_numbers(log):
    log.add(loss=0.5)
    log.add(0, entropy=0.0)
    line = end_step(log, 1, learning_rate=1e-3)
    log.eval(1, 0.5, eval_reward=0.75)
    with log.time_save(1):
        pass
    log.close()
    read = events(log)
    written = set(read.Tags()["scalars"])
    numbers = {name for name, value in line.items() if isinstance(value, float)}
    assert written == numbers | {"eval_reward", "seconds_eval", "seconds_save"} and "entropy" not in written
    for name, value in (("loss", 0.5), ("eval_reward", 0.75)):
        assert [(e.step, e.value) for e in read.Scalars(name)] == [(1, value)]


def test_the_console_shows_a_few_numbers(tmp_path, capsys):
    log = Log(str(tmp_path), 0, 10, [CPU])
    log.add(clip_fraction=0.25)
    time.sleep(0.15)  # the bar is drawn ten times a second at most
    end_step(log, lengths=[8, 4])
    log.print_above_bar("hello")
    captured = capsys.readouterr()
    assert "reward=0.5" in captured.err and "len=6" in captured.err and "clip=0.25" in captured.err
    assert captured.out == "hello\n"


def test_a_rank_may_lack_a_metric_that_others_have(log, monkeypatch):
    other = {"sums": {"reward": 3.0, "late": 4.0}, "weights": {"reward": 1.0, "late": 2.0}, "max": {"late_max": 9.0},
             "memory": [], "host": 1.0}  # fmt: skip
    monkeypatch.setattr(metrics.distributed, "gather_objects", lambda own: [own, other])
    log.add(1, reward=1.0, own_max=2.0, own=5.0)
    log._tokens = 1
    with log.time("update"):
        pass
    line = log.end_step(1)
    expected = {"reward": 2.0, "own": 5.0, "late": 2.0, "late_max": 9.0, "own_max": 2.0}
    assert {name: line[name] for name in expected} == expected


def test_other_ranks_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(metrics.distributed, "rank", lambda: 1)
    log = Log(str(tmp_path / "run"), 0, 10, [CPU])
    log.add_rollout(rollout([4, 4]), torch.tensor([[1.0, 1.0]]), {"reward": torch.ones(2)})
    with log.time("rollout"), log.time_save(1):
        pass
    log.end_step(1)
    log.eval(1, 0.5, eval_reward=1.0)
    log.samples(1, examples(1), scored([1.0, 0.0]), show=True)
    log.print_above_bar("hello")
    log.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_a_name_with_half_a_character_reaches_tensorboard(log):
    log.eval(1, 0.5, **{"eval_reward[level=\ud800]": 0.5})
    log.close()
    assert json.loads((log.out_dir / "metrics.jsonl").read_text())["eval_reward[level=\ud800]"] == 0.5
    read = EventAccumulator(str(log.out_dir / "tensorboard"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"eval_reward[level=\\ud800]", "seconds_eval"}
