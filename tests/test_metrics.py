"""Tests of common/metrics.py: what stands in metrics.jsonl and samples.jsonl, and what is said on the console."""

import json
import math
import time

import pytest
import torch

from common import metrics
from common.data import Example
from common.metrics import Log, keep_lines
from common.rollout import RolloutBatch

CPU = torch.device("cpu")
NAN = float("nan")


def rollout(lengths, truncated=None) -> RolloutBatch:
    B, C = len(lengths), max(lengths)
    lengths = torch.tensor(lengths)
    ids = torch.ones(B, C, dtype=torch.long)
    mask = torch.arange(C) < lengths[:, None]
    return RolloutBatch(
        prompt_ids=ids, prompt_mask=ids > 0, completion_ids=ids, sampled_mask=mask, completion_mask=mask,
        rollout_logps=torch.zeros(B, C), prompt_lengths=torch.full((B,), C), lengths=lengths,
        truncated=torch.tensor(truncated or [False] * B), trained=torch.ones(B).bool(), rows=torch.arange(B),
    )  # fmt: skip


@pytest.fixture
def log(tmp_path):
    log = Log(str(tmp_path / "run"), 0, 10, [CPU])
    yield log
    log.close()


def lines(log, name="metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (log.out_dir / name).read_text().splitlines()]


def end_step(log, step=1, rewards=((1.0, 0.0),), by_function=None, lengths=None, truncated=None, **values) -> dict:
    """A step with this rollout; the line written."""
    rewards = torch.tensor(rewards)
    by_function = {"reward": rewards.flatten()} if by_function is None else by_function
    log.add_rollout(rollout(lengths or [4] * rewards.numel(), truncated), rewards, by_function)
    with log.time("rollout"):
        pass
    log.end_step(step, **values)
    return lines(log)[-1]


# ---- averages ----


def test_averages_are_weighted(log):
    log.add(3, loss=1.0, clip_fraction=torch.tensor(0.5))
    log.add(1, loss=torch.tensor(5.0), clip_fraction=0.0)
    log.add(grad_norm=2.0)
    log.add(grad_norm=4.0)
    line = end_step(log)
    assert line["loss"] == 2.0  # (3 * 1 + 1 * 5) / 4
    assert line["clip_fraction"] == 0.375
    assert line["grad_norm"] == 3.0


def test_names_that_end_in_max_are_maxima(log):
    log.add(100, ratio_max=torch.tensor(1.5))
    log.add(0, ratio_max=1.75)
    log.add(1, ratio_max=0.5)
    assert end_step(log)["ratio_max"] == 1.75


def test_a_step_begins_with_nothing(log):
    log.add(loss=1.0, ratio_max=9.0)
    end_step(log, 1)
    log.add(loss=3.0)
    line = end_step(log, 2)
    assert line["loss"] == 3.0 and "ratio_max" not in line


def test_what_will_be_computed_again_can_be_forgotten(log):
    log.add(2, loss=1.0, length_max=3.0)
    mark = log.mark()
    for attempt in (7.0, 9.0):
        log.add(5, loss=torch.tensor(attempt), length_max=attempt)
        log.add(new=attempt)
        log.back(mark)
    log.add(2, loss=torch.tensor(5.0))
    line = end_step(log)
    assert line["loss"] == 3.0 and line["length_max"] == 3.0 and "new" not in line


def test_numbers_of_several_devices_are_averaged_on_the_host(log):
    for weight, value in ((1, 2.0), (3, torch.tensor(6.0)), (4, torch.tensor(1.0))):
        log.add(weight, loss=value)
    # a sum per device: to add up across GPUs would make one wait for the other
    assert {key: float(value) for key, value in log._sums.items()} == {("loss", None): 2.0, ("loss", CPU): 22.0}
    assert end_step(log)["loss"] == 3.0


def test_the_average_of_nothing_is_null(log):
    log.add(0, loss=0.0)
    assert end_step(log)["loss"] is None


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, torch.tensor(NAN)])
def test_what_json_cannot_hold_is_null(log, value):
    log.add(loss=value, ratio_max=value)
    line = end_step(log, learning_rate=float(value))
    assert line["loss"] is line["ratio_max"] is line["learning_rate"] is None
    log.eval(1, eval_reward=float(value))
    text = (log.out_dir / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text and lines(log)[-1] == {"step": 1, "eval_reward": None}


def test_values_given_at_the_end_are_written_as_they_are(log):
    line = end_step(log, 3, learning_rate=1e-6)
    assert line["step"] == 3 and line["learning_rate"] == 1e-6


def test_phases_are_timed(log, monkeypatch):
    now = iter([10.0, 12.0, 20.0, 23.0, 30.0, 30.5])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    with log.time("score"):
        pass
    with log.time("update"):
        pass
    line = end_step(log, lengths=[4, 7])  # its rollout takes 0.5 s
    assert (line["seconds_rollout"], line["seconds_score"], line["seconds_update"]) == (0.5, 2.0, 3.0)
    assert line["seconds"] == 5.5
    assert line["tokens_per_second"] == 2.0  # 11 tokens


def test_saving_is_timed_in_a_line_of_its_own(log, monkeypatch):
    with log.time("rollout"), log.time("update"):
        pass
    line = end_step(log, 3)
    now = iter([10.0, 12.5])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    with log.time_save(3):
        pass
    assert lines(log) == [line, {"step": 3, "seconds_save": 2.5}]  # the step was written before it was saved


def test_a_checkpoint_that_could_not_be_written_has_no_time(log):
    with pytest.raises(OSError, match="disk full"), log.time_save(3):
        raise OSError("disk full")
    assert not (log.out_dir / "metrics.jsonl").exists()


def test_numbers_leave_the_device_once_per_step(log, monkeypatch):
    # each transfer by itself would make the host wait for the GPU; here every way out of a tensor is counted
    read = []

    def counted(name):
        real = getattr(torch.Tensor, name)

        def way_out(tensor, *args, **kwargs):
            read.append(name)
            return real(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, way_out)

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_tensors_of_any_kind_are_averaged(log, dtype):
    for value in (0, 1, 1, 1):
        log.add(value=torch.tensor(value, dtype=dtype, requires_grad=dtype.is_floating_point))
    assert end_step(log)["value"] == 0.75


def test_memory_is_that_of_each_device_and_process(log):
    line = end_step(log)
    assert line["memory_gib"] == []  # no GPU
    assert len(line["host_memory_gib"]) == 1 and 0.01 < line["host_memory_gib"][0] < 100


# ---- the rollout, by hand ----


def test_rewards_by_hand(log):
    # first group: mean 1, standard deviation sqrt((1 + 0 + 1) / 2) = 1, one unscored; second: all equal
    rewards = ((0.0, 1.0, 2.0, NAN), (3.0, 3.0, 3.0, 3.0))
    line = end_step(log, rewards=rewards, lengths=[1, 2, 3, 4, 5, 6, 7, 8], truncated=[False] * 6 + [True, True])
    assert line["reward"] == pytest.approx(15 / 7)
    assert line["reward_std"] == 0.5
    assert line["zero_std"] == 0.5
    assert line["unscored"] == 0.125
    assert line["truncated"] == 0.25
    assert line["completion_length"] == 4.5 and line["completion_length_max"] == 8
    assert line["completion_length_above"] == 3.0  # the reward of 2
    assert line["completion_length_below"] == 1.0  # the reward of 0


def test_every_function_has_its_own_mean(log):
    by_function = {"reward": torch.tensor([1.0, 0.0, 1.0, 1.0]), "format": torch.tensor([NAN, 0.5, NAN, 1.0])}
    line = end_step(log, rewards=((1.0, 0.0, 1.0, 1.0),), by_function=by_function)
    assert line["reward_reward"] == 0.75 and line["reward_format"] == 0.75


def test_a_function_that_scored_nothing_is_null(log):
    by_function = {"format": torch.tensor([NAN, NAN])}
    assert end_step(log, rewards=((1.0, 0.0),), by_function=by_function)["reward_format"] is None


@pytest.mark.parametrize("rewards", [((NAN, 1.0),), ((NAN, 1.0, NAN, NAN),)])
def test_a_group_with_one_score_has_no_spread(log, rewards):
    line = end_step(log, rewards=rewards)
    assert line["reward"] == 1.0 and line["reward_std"] == 0.0 and line["zero_std"] == 1.0


def test_a_group_without_a_score_counts_as_one_without_signal(log):
    line = end_step(log, rewards=((NAN, NAN), (1.0, 0.0)))
    assert line["reward"] == 0.5 and line["zero_std"] == 0.5 and line["unscored"] == 0.5


def test_equal_rewards_are_found_though_their_mean_is_rounded(log):
    line = end_step(log, rewards=((0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1),))
    assert line["zero_std"] == 1.0
    # no completion is better or worse than its group
    assert line["completion_length_above"] is None and line["completion_length_below"] is None


def test_a_step_without_any_score_stops_the_run(log):
    with pytest.raises(ValueError, match="step 4: the reward is NaN for every completion"):
        end_step(log, 4, rewards=((NAN, NAN), (NAN, NAN)))
    assert lines(log)[-1]["unscored"] == 1.0 and lines(log)[-1]["reward"] is None


# ---- warnings ----


def test_warnings_are_said_once(log, capsys):
    for step in (1, 2, 3):
        log.add(skipped_updates=1.0)
        end_step(log, step, rewards=((1.0, 1.0),), truncated=[True, True])
    said = capsys.readouterr().out
    for cause in ("every completion was cut off", "the rewards of every group are equal", "could be trained on"):
        assert said.count(cause) == 1
    assert said.count("warning: step 1:") == 3 and "warning: step 2" not in said


def test_a_step_that_can_be_learned_from_is_no_reason_to_warn(log, capsys):
    log.add(skipped_updates=0.0)
    log.add(skipped_updates=1.0)
    end_step(log, rewards=((1.0, 0.0), (1.0, 1.0)), truncated=[True, True, True, False])
    assert "warning" not in capsys.readouterr().out


# ---- evaluation and samples ----


def test_an_evaluation_is_a_line_of_its_own(log, capsys):
    log.eval(0, eval_reward=0.25)
    assert lines(log) == [{"step": 0, "eval_reward": 0.25}]
    assert "step 0: eval_reward 0.250" in capsys.readouterr().out


def examples(count) -> list[Example]:
    return [Example(i, f"what is {i} + {i}?", [1], str(2 * i), {}) for i in range(count)]


def test_samples_are_the_first_of_each_prompt(log, capsys):
    texts = [f"prompt {i} completion {g}" for i in range(6) for g in range(2)]
    log.samples(5, examples(6), texts, [float(i) for i in range(12)], show=False)
    assert lines(log, "samples.jsonl") == [
        {"step": 5, "prompt": f"what is {i} + {i}?", "completion": f"prompt {i} completion 0", "answer": str(2 * i),
         "reward": 2.0 * i}
        for i in range(4)
    ]  # fmt: skip
    assert capsys.readouterr().out == ""


def test_samples_can_be_shown(log, capsys):
    log.samples(5, examples(1), ["right\n\x1b[2J", "wrong"], [1.0, 0.0], show=True)
    said = capsys.readouterr().out
    assert r"step 5, reward 1, answer '0': 'right\n\x1b[2J'" in said and "wrong" not in said


def test_samples_of_any_content_are_written(log):
    # half a character, a line separator, an unscored completion, a chat
    texts = ["\ud83d", "a\u2028b", 'quote " and \\', ""]
    chat = Example(0, [{"role": "user", "content": "?"}], [1], None, {})
    log.samples(1, [chat, *examples(3)], texts, [NAN, 1.0, 0.0, 0.0], show=False)
    written = [json.loads(line) for line in (log.out_dir / "samples.jsonl").read_text().split("\n") if line]
    assert [line["completion"] for line in written][1:] == texts[1:]
    assert written[0]["reward"] is None and written[0]["prompt"] == [{"role": "user", "content": "?"}]


# ---- a run that goes on ----


def write(path, *texts):
    path.write_text("".join(texts))
    return path


def test_lines_of_later_steps_and_one_cut_off_are_removed(tmp_path):
    path = write(
        tmp_path / "metrics.jsonl",
        '{"step": 0, "eval_reward": 0.1}\n', '{"step": 1}\n', '{"step": 2}\n', '{"step": 2, "eval_reward": 0.5}\n',
        '{"step": 2, "seconds_save": 0.1}\n', '{"step": 3}\n', '{"step": 3, "seconds_save": 0.1}\n', '{"step": 4, "los',
    )  # fmt: skip
    keep_lines(path, 2)
    assert path.read_text() == (
        '{"step": 0, "eval_reward": 0.1}\n{"step": 1}\n{"step": 2}\n{"step": 2, "eval_reward": 0.5}\n'
        '{"step": 2, "seconds_save": 0.1}\n'
    )
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("end", ["{", '{"step": 2', '{"step": 2, "loss": -', "\x00\x00\x00", "\n\n"])
def test_a_last_line_that_a_kill_cut_off_is_removed(tmp_path, end):
    path = write(tmp_path / "metrics.jsonl", '{"step": 1}\n', end)
    keep_lines(path, 5)
    assert path.read_text() == '{"step": 1}\n'


def test_text_of_other_languages_stays(tmp_path):
    line = json.dumps({"step": 1, "completion": "äöü \u2028 中文"}, ensure_ascii=False) + "\n"
    path = tmp_path / "samples.jsonl"
    path.write_text(line, encoding="utf-8")
    keep_lines(path, 1)
    assert path.read_text(encoding="utf-8") == line


def test_a_character_cut_off_by_a_kill_is_no_obstacle(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes('{"step": 1}\n{"step": 1, "completion": "ä'.encode()[:-1])
    keep_lines(path, 1)
    assert path.read_text() == '{"step": 1}\n'


def test_the_lines_that_are_removed_are_counted(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(5)))
    keep_lines(path, 2)
    assert capsys.readouterr().out == f"{path}: removed 2 lines of steps that are taken again\n"
    keep_lines(path, 2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_full_disk_names_the_file_and_what_to_do(log, name):
    (log.out_dir / name).symlink_to("/dev/full")
    said = rf"{name} could not be written, on which .* is free: No space left on device; .* from its last checkpoint"
    with pytest.raises(OSError, match=said):
        if name == "metrics.jsonl":
            log.eval(1, eval_reward=0.5)
        else:
            log.samples(1, [Example(0, "?", [1], "1", {})], ["1"], [1.0], show=False)


def test_an_evaluation_says_what_it_leaves_out(capsys):
    assert metrics.mean_scored([torch.tensor([1.0, 0.0]), torch.tensor([2.0])]) == 1.0
    assert capsys.readouterr().out == ""
    assert metrics.mean_scored([torch.tensor([1.0, NAN]), torch.tensor([NAN])]) == 1.0
    assert capsys.readouterr().out == "warning: evaluation: 2 of 3 rewards are NaN and left out\n"
    assert math.isnan(metrics.mean_scored([])) and math.isnan(metrics.mean_scored([torch.tensor([NAN])]))


def test_an_absent_file_stays_absent(tmp_path):
    keep_lines(tmp_path / "metrics.jsonl", 3)
    assert not list(tmp_path.iterdir())


def test_a_resumed_log_goes_on_after_the_checkpoint(tmp_path):
    first = Log(str(tmp_path), 0, 10, [CPU])
    first.eval(0, eval_reward=0.0)
    for step in (1, 2, 3):
        end_step(first, step)
        first.samples(step, examples(1), ["x", "y"], [1.0, 0.0], show=False)
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


def test_a_run_that_starts_again_from_nothing_keeps_no_lines(tmp_path):
    # killed before its first checkpoint: also the evaluation before the first step will be taken again
    first = Log(str(tmp_path), 0, 10, [CPU])
    first.eval(0, eval_reward=0.0)
    end_step(first, 1)
    first.close()
    second = Log(str(tmp_path), 0, 10, [CPU])
    second.eval(0, eval_reward=0.0)
    second.close()
    assert lines(second) == [{"step": 0, "eval_reward": 0.0}]


# ---- elsewhere ----


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(str(tmp_path), 0, 10, [CPU])
    log.add(loss=0.5)
    log.add(0, entropy=0.0)
    line = end_step(log, 1, learning_rate=1e-3)
    log.eval(1, eval_reward=0.75)
    with log.time_save(1):
        pass
    log.close()
    assert [path.name.split(".")[0] for path in (tmp_path / "tensorboard").iterdir()] == ["events"]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    written = set(events.Tags()["scalars"])
    numbers = {name for name, value in line.items() if isinstance(value, float)}
    assert written == numbers | {"eval_reward", "seconds_save"} and "entropy" not in written
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("eval_reward")] == [(1, 0.75)]


def test_the_console_shows_a_few_numbers(tmp_path, capsys):
    log = Log(str(tmp_path), 0, 10, [CPU])
    log.add(clip_fraction=0.25)
    time.sleep(0.15)  # the bar is drawn ten times a second at most
    end_step(log, rewards=((1.0, 0.0),), lengths=[8, 4])
    log.say("hello")
    captured = capsys.readouterr()
    assert "reward=0.5" in captured.err and "len=6" in captured.err and "clip=0.25" in captured.err
    assert captured.out == "hello\n"


def test_other_ranks_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(metrics.distributed, "rank", lambda: 1)
    log = Log(str(tmp_path / "run"), 0, 10, [CPU])
    log.add_rollout(rollout([4, 4]), torch.tensor([[1.0, 1.0]]), {"reward": torch.ones(2)})
    with log.time("rollout"):
        pass
    log.end_step(1)
    log.eval(1, eval_reward=1.0)
    with log.time_save(1):
        pass
    log.samples(1, examples(1), ["x", "y"], [1.0, 0.0], show=True)
    log.say("hello")
    log.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""
