"""The scripts as people run them: what they write, what they refuse, and how they fail."""

import functools
import json
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bounds import rounding
from conftest import ROOT, SCRIPTS, Run, assert_equal_weights, reward
from safetensors.torch import load_file
from test_rewards import save_reward_model

from common.base import distributed
from common.generation import rollout
from common.model import passes
from common.planning import layouts
from common.run import checkpoint
from common.tasks import scoring
from common.training import optim

parity = partial(pytest.param, marks=pytest.mark.parity)
ALONE_AND_TOGETHER = pytest.mark.parametrize("script, ranks", [("gspo", 1), parity("gspo_ddp", 2)])
NEVER_ENDING = dict(min_new_tokens=8)  # as many as max_new_tokens, so every completion is cut off
SAMPLING = dict(min_new_tokens=2, top_p=0.875, top_k=11, min_p=0.0625, rollout_batch=8)


def failed(run: Run, *messages: str) -> Run:
    """All processes ended with an error that says this."""
    assert all(code not in (0, None) for code in run.codes), run.output
    for message in messages:
        assert message in run.output, run.output
    return run


def refused(capsys, script: str, **options) -> str:
    """What a script says to options that it does not take; nothing is loaded or written by then."""
    with pytest.raises(SystemExit) as ended:
        layouts.load(SCRIPTS[script], [text for name, value in options.items() for text in (f"--{name}", str(value))])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def stopped(launcher, script: str, out_dir: Path, **options) -> str:
    """The error with which a script ends before its first step, in this process."""
    module, cfg = layouts.load(SCRIPTS[script], launcher.options(SCRIPTS[script], out_dir, **options))
    with pytest.raises((ValueError, OSError)) as raised:
        module.main(cfg)
    assert not (out_dir / "metrics.jsonl").exists() and not list(out_dir.glob("checkpoint-*"))
    return str(raised.value)


def first_weights(launcher) -> dict[str, torch.Tensor]:
    return load_file(Path(launcher.models["rl"]["policy_model"]) / "model.safetensors")


def finite(values) -> bool:
    return all(torch.as_tensor(value).isfinite().all() for value in values)


def metrics_explained(family: str) -> set[str]:
    """Names in the table of metrics of an algorithm's page."""
    rows = (ROOT / family / "README.md").read_text().split("### Metrics\n")[1].split("\n## ")[0].splitlines()
    return {name for row in rows for name in re.findall(r"`([\w<>]+)`", row.split("|")[1] if "|" in row else "")}


def graded(completions, answers, **columns):
    return [float(len(c) % 5) for c in completions]


class Raising:
    """A reward that raises when it is called for this time, on one rank or on all."""

    __name__ = "reward"

    def __init__(self, call: int, rank: int | None = None, otherwise: Callable = reward):
        self.call, self.rank, self.otherwise, self.calls = call, rank, otherwise, 0

    def __call__(self, completions, answers, **columns):
        self.calls += 1
        if self.calls >= self.call and self.rank in (None, distributed.rank()):
            raise ZeroDivisionError("the grader is down")
        return self.otherwise(completions, answers, **columns)


def watch(module: ModuleType) -> None:
    """Prints what the sampler and the rewards are given; rewards and log-probabilities wait until the other begins."""
    fill, init, score = passes.fill, rollout.Sampler.__init__, scoring.score
    begun = {name: threading.Event() for name in ("reward", "logprobs")}

    def meet(own, other):
        begun[own].set()
        met = begun[other].wait(30)
        print(f"{own} on rank {distributed.rank()} in {threading.current_thread().name}: {met}", flush=True)

    def watched_fill(*args):
        if args[1] == "old_logps":
            meet("logprobs", "reward")
        fill(*args)

    def watched_score(functions, arguments, *extra):
        meet("reward", "logprobs")
        print("tokens", arguments["completion_tokens"], flush=True)
        return score(functions, arguments, *extra)

    def watched_init(self, replicas, **options):
        print("sampler", sorted((name, value) for name, value in options.items() if name != "trained"), flush=True)
        init(self, replicas, **options)

    passes.fill, rollout.Sampler.__init__, scoring.score = watched_fill, watched_init, watched_score


def spoil(module: ModuleType) -> None:
    """Makes every loss NaN from the second step on."""
    scale, check, checked = optim.AdamW.scale, optim.AdamW.check, []
    optim.AdamW.scale = lambda self, loss: scale(self, loss * (float("nan") if checked else 1.0))
    optim.AdamW.check = lambda self: checked.append(True) or check(self)


def test_a_reward_that_cannot_be_called_is_refused_before_the_first_rollout(launcher, tmp_path):
    def judge(completions, gold_answer):
        return [0.0] * len(completions)

    for script in ("gspo", "gkd"):
        module, cfg = layouts.load(SCRIPTS[script], launcher.options(SCRIPTS[script], tmp_path / script))
        with pytest.raises(ValueError, match=r"reward judge has an argument 'gold_answer'.*answers"):
            module.main(cfg, rewards=((judge, 1.0),))
        assert not (tmp_path / script / "metrics.jsonl").exists()


def test_a_script_runs_from_any_folder_as_it_is(launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = dict(steps=1, print_samples=True, device="auto")
    run = launcher.command([sys.executable], SCRIPTS["gspo"], "new/folder", **options).wait().succeeded()
    assert "policy saved in new/folder/checkpoint-000001" in run.output and run.output.count("step 1, reward ") == 4
    assert torch.cuda.device_count() or "no GPU visible: running on the CPU" in run.output
    assert {path.name for path in run.out_dir.iterdir()} - {"best"} == {  # if the first step was an improvement
        ".lock", "checkpoint-000001", "config.json", "metrics.jsonl", "samples.jsonl", "tensorboard",
    }  # fmt: skip
    state = json.loads((run.out_dir / "checkpoint-000001" / "state.json").read_text())
    assert state["config"]["group_size"] == 4 and state["config"]["out_dir"] == "new/folder"


def test_a_run_leaves_complete_checkpoints_and_finite_numbers(launcher):
    run = launcher.trained("gspo")
    assert run.checkpoints == ["checkpoint-000002", "checkpoint-000003"]
    assert all(checkpoint.is_complete(run.out_dir / name) for name in run.checkpoints)
    assert {line["step"] for line in run.samples} == {1, 2, 3}
    assert set(run.samples[0]) == {"step", "prompt", "completion", "answer", "reward"}
    # completions that could not be scored are counted, and left out
    assert 0 < sum(line["unscored"] for line in run.steps) / 3 < 1
    assert finite(run.weights().values())
    assert finite(value for line in run.steps for value in line.values() if isinstance(value, float))


def test_a_reward_model_joins_the_reward_function_and_every_metric_is_explained(launcher, tmp_path):
    save_reward_model(tmp_path / "model", unk_token="<unk>")
    options = dict(
        steps=1,
        dynamic_sampling=1,
        curriculum="row",
        reward_model=tmp_path / "model",
        reward_model_weight=0.5,
        eval_samples=4,
        drafts=True,
    )
    run = launcher.run("gspo", tmp_path / "run", rewards=[graded], **options).succeeded()
    written = {name.replace("_4", "_k") for line in run.lines for name in line}
    written |= {"skipped_prompts", "p_easy", "p_hard"}  # of another curriculum: test_greso.py
    functions = {f"{start}_{name}" for start in ("reward", "eval_reward") for name in ("graded", "reward_model")}
    assert written == metrics_explained("gspo") - {"reward_<function>", "eval_reward_<function>"} | functions
    evaluated = next(line for line in run.lines if "eval_reward" in line)
    assert 0 <= evaluated["eval_pass_at_1"] <= evaluated["eval_pass_at_4"] <= 1
    both = evaluated["eval_reward_graded"] + 0.5 * evaluated["eval_reward_reward_model"]
    assert evaluated["eval_reward"] == pytest.approx(both, abs=rounding(16, magnitude=16))
    sample = run.samples[0]
    assert sample["reward"] == pytest.approx(sample["rewards"]["graded"] + 0.5 * sample["rewards"]["reward_model"])
    (line,) = run.steps
    both = line["reward_graded"] + 0.5 * line["reward_reward_model"]
    assert line["reward"] == pytest.approx(both, abs=rounding(16, magnitude=16))  # means of 16 rewards
    assert line["reward_reward_model"] not in (0.0, None)


@ALONE_AND_TOGETHER
def test_sampling_and_scoring_are_done_as_asked_and_said(launcher, tmp_path, script, ranks):
    options = dict(steps=2, eval_data="", compile=False, prepare=watch, **SAMPLING)
    run = launcher.run(script, tmp_path, ranks, rewards=[functools.partial(graded)], **options).succeeded()
    assert all(line["reward_graded"] == line["reward"] for line in run.steps)  # one name on every rank
    said = [line for line in run.output.splitlines() if line.startswith("rollout: ")]
    (found,) = re.findall(
        r"^rollout: PyTorch's attention over a static cache \(cpu, float32: no flash kernel\); (\S+) nats from "
        r"the plain forward pass; training: packed rows, repeatable, .* from it$",
        *said,
    )
    assert float(found) < 1e-4
    expected = sorted(
        {**SAMPLING, "max_new_tokens": 8, "compile": False, "end_ids": [3], "pad_id": 0, "suppressed_ids": (),
         "stopping": None}.items()
    )  # fmt: skip
    assert run.output.count(f"sampler {expected}") == ranks
    # rewards are computed in a thread while the log-probabilities are
    for rank in range(ranks):
        assert run.output.count(f"logprobs on rank {rank} in MainThread: True") == 2
        threads = re.findall(rf"reward on rank {rank} in (.+): True", run.output)
        assert len(threads) == 2 and "MainThread" not in threads
    # reward functions get the number of tokens
    lengths = [json.loads(found) for found in re.findall(r"tokens (\[.+\])", run.output)]
    assert min(chain(*lengths)) >= 2 and all(len(part) == 16 // ranks for part in lengths)
    mean = sum(line["completion_length"] for line in run.steps) / 2
    assert sum(chain(*lengths)) / 32 == pytest.approx(mean)
    assert all(line["seconds_logprobs"] > 0 and line["seconds_score"] > 0 for line in run.steps)


@pytest.mark.parametrize("family, dtype", [("gpt2", "bf16"), parity("gpt2", "fp32"), parity("qwen2", "bf16")])
def test_at_learning_rate_0_nothing_moves(launcher, model_folders, family, dtype):
    # every ratio is 1 exactly, or else the update sees other numbers than the rollout: GPT-2 has dropout in its config
    options = dict(learning_rate=0, epochs=2, kl_coef=0, dtype=dtype, policy_model=model_folders[family])
    run = launcher.trained("gspo", truncated="keep", **options, **NEVER_ENDING)
    for line in run.steps:
        assert line["ratio_max"] == 1.0 and line["clip_fraction"] == line["out_of_range"] == line["kl_old"] == 0.0
        assert line["learning_rate"] == 0.0 and "kl_ref" not in line
        assert line["truncated"] == 1.0 and line["grad_norm"] > 0  # cut off, and trained on
    assert len({line["eval_reward"] for line in run.lines if "eval_reward" in line}) == 1
    before, after = load_file(model_folders[family] / "model.safetensors"), run.weights()
    assert_equal_weights(after, {name: weight.to(after[name].dtype) for name, weight in before.items()})


def test_one_update_per_rollout_is_warned_of(capsys):
    for minibatches in (1, 2):
        layouts.load(SCRIPTS["gspo"], ["--num_minibatches", str(minibatches)])
        assert ("warning: one optimizer step per rollout" in capsys.readouterr().out) == (minibatches == 1)


@ALONE_AND_TOGETHER
def test_when_all_are_cut_off_and_masked_nothing_moves(launcher, tmp_path, script, ranks):
    run = launcher.run(script, tmp_path, ranks, truncated="mask", steps=2, **NEVER_ENDING).succeeded()
    for line in run.steps:
        assert line["truncated"] == 1.0 and line["skipped_updates"] == 1.0
        assert not line.get("loss") and not line.get("grad_norm")
        assert line["completion_length"] == 8.0 and line["reward"] is not None
    assert run.output.count("every completion was cut off") == 1
    assert run.output.count("nothing in this step could be trained on") == 1
    assert_equal_weights(run.weights(), first_weights(launcher))


@pytest.mark.parametrize("rank", [parity(0), 1])
def test_a_reward_that_raises_on_one_rank_stops_both(launcher, tmp_path, rank):
    run = launcher.run("gspo_ddp", tmp_path / "run", 2, timeout=60, rewards=[Raising(2, rank)], eval_data="")
    failed(run, "reward reward raised ZeroDivisionError", f"rank {rank} failed in phase 'score'")
    assert [line["step"] for line in run.lines] == [1]
    if rank == 0:  # in the evaluation, too
        run = launcher.run("gspo_ddp", tmp_path / "evaluated", 2, timeout=60, rewards=[Raising(1)])
        failed(run, "reward raised ZeroDivisionError")


@ALONE_AND_TOGETHER
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_batch(launcher, tmp_path, script, ranks):
    run = launcher.run(script, tmp_path, ranks, timeout=60, prepare=spoil, save_every=1, eval_data="")
    failed(run, "FloatingPointError: step 2")
    assert run.checkpoints == ["checkpoint-000001"] and finite(run.weights().values())
    assert [line["step"] for line in run.steps] == [1]
    kept = sorted(tmp_path.glob("not_finite*"))
    assert len(kept) == ranks and all(str(path) in run.output for path in kept)
    for path in kept:
        batch = load_file(path)
        # all micro-batches of the step: the loop asks once per rollout, and any of them may have been at fault
        rows = [batch[f"micro{i}/rows"].tolist() for i in range(sum(name.endswith("/rows") for name in batch))]
        assert sorted(chain(*rows)) == list(range(16 // ranks)) and len(rows) >= 2
        assert {f"micro{i}/ref_logps" for i in range(len(rows))} < batch.keys()


@pytest.mark.parametrize(("options", "message"), [
    (dict(learning_rat=1), "unknown option --learning_rat; did you mean --learning_rate?"),
    (dict(steps="many"), "'many' is not a whole number"), (dict(group_size=1), "group_size = 1: must be at least 2"),
    (dict(temperature=0), "temperature = 0.0: must be above 0"),
    (dict(num_minibatches=17, batch_size=4, group_size=4), "num_minibatches = 17: must be at most the 16 completions"),
    (dict(truncated="drop"), "truncated = 'drop': must be one of ('keep', 'mask')"),
    (dict(top_p=0), "top_p = 0.0: must be in (0, 1]"), (dict(rollout_batch=-1), "rollout_batch = -1: must"),
    (dict(min_new_tokens=9, max_new_tokens=8), "min_new_tokens = 9: must be at most"),  # none would ever end
    (dict(micro_batch_tokens=-1), "micro_batch_tokens = -1: must be at least 0"),
    (dict(profile=-1), "profile = -1: must"),
    (dict(chat_template_kwargs="[]"), "chat_template_kwargs = '[]': must be a JSON object"),
    (dict(stop_strings="['END']"), 'must be a JSON list of texts, none of them empty; such as ["END"]'),
    # without effect
    (dict(epsilon_low=1e-3, epsilon_high=1e-3), "clip_preset = 'dense': epsilon_low and epsilon_high would be ignored"),
    (dict(max_grad_norm=0), "max_grad_norm = 0.0: must be above 0; inf: no clipping"),
    (dict(train_data="sums.jsonl"), "eval_data = 'toy': one is the built-in task, one is not"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_wrong_options_are_named(capsys, options, message):
    assert message in refused(capsys, "gspo", **options)


def test_too_few_rows_and_what_cannot_be_loaded_are_refused(launcher, tmp_path):
    data = tmp_path / "three.jsonl"
    data.write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n' * 3)
    for options, message in (
        (dict(train_data=data), "3 rows, batch_size 4"), (dict(max_prompt_tokens=3), "raise it to"),
        (dict(train_data="/no/such/rows.jsonl"), "no data at '/no/such/rows.jsonl'"),
        (dict(policy_model="/no/such/model"), "no such folder"),
    ):  # fmt: skip
        assert message in stopped(launcher, "gspo", tmp_path, **options)


@pytest.mark.parametrize("script", ["gspo_ddp", "grpo_ddp", "similarity_grpo", "gkd_ddp"])
@pytest.mark.parametrize(("options", "message"), [
    (dict(batch_size=5), "batch_size = 5: must be a multiple of the 2 ranks"),
    (dict(num_minibatches=9), "num_minibatches = 9: must be at most the 8 completions of a rank"),
])  # fmt: skip
def test_a_batch_that_the_ranks_cannot_share_is_refused(launcher, tmp_path, monkeypatch, script, options, message):
    monkeypatch.setattr(distributed, "start", lambda *_: (0, 2))
    assert message in stopped(launcher, script, tmp_path, **options)


@pytest.mark.parity
def test_groups_and_batches_that_do_not_divide_evenly_are_trained_on(launcher, tmp_path):
    # each of two ranks has three groups of three: nine completions in four minibatches
    sizes = dict(batch_size=6, group_size=3, num_minibatches=4, steps=2, eval_data="")
    run = launcher.run("gspo_ddp", tmp_path, 2, timeout=60, rewards=[graded], **sizes).succeeded()
    assert all(line["skipped_updates"] == 0.0 and line["grad_norm"] > 0 for line in run.steps) and len(run.steps) == 2


def test_a_layout_of_more_gpus_than_there_are_is_refused_at_once(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = dict(device="cuda", policy_model="/no/such/model")  # which nobody asks for
    said = stopped(launcher, "gspo_multigpu", tmp_path / "run", **options)
    for part in ("this layout needs 3 GPUs (ids [0, 1, 2])", "2 visible", "POLICY_GPU_IDS = (0,)",
                 "ROLLOUT_GPU_IDS = (0, 1)", "--device cpu"):  # fmt: skip
        assert part in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("options", "message"), [
    ("--timeout 0", "--timeout 0: must be"), ("--timeout nan", "--timeout nan: must be"), ("--bandwith", "--bandwith"),
    ("gspo/gspo.py --bandwidth", "stand before the script"), ("gspo/gspo.py --lr 1", "here --learning_rate"),
])  # fmt: skip
def test_wrong_options_of_check_gpus_are_named(options, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "scripts" / "check_gpus.py"))["main"](options.split())
    assert stopped.value.code == 2 and message in capsys.readouterr().err


GKD, TEACHER, POSTER = "run_gkd", "start_teacher", "start_poster_training_with_reward_server"


@pytest.mark.parametrize(("script", "options", "message"), [
    *((script, "--port", "--port has no value") for script in (GKD, TEACHER, POSTER)),
    *((script, "--port --stop", "--port has no value") for script in (GKD, TEACHER, POSTER)),
    *((script, "--port=80x", "--port 80x: must be a whole number from 1 to") for script in (GKD, TEACHER, POSTER)),
    *((script, "train", "unknown option train: options of the") for script in (GKD, TEACHER, POSTER)),
    *((GKD, option, f"{option} has no value") for option in
      ("--teacher_gpus", "--student_gpus", "--restarts", "--teacher_model", "--teacher_dtype", "--max_top_k")),
    *((TEACHER, option, f"{option} has no value") for option in ("--gpus", "--log", "--wait")),
    *((POSTER, option, f"{option} has no value") for option in
      ("--reward_gpu", "--train_gpus", "--wait", "--trainer", "--scorer", "--coord_space")),
    (GKD, "--restarts -1", "--restarts -1: must be"), (TEACHER, "--wait soon", "--wait soon: must be"),
    (POSTER, "--wait 0", "--wait 0: must be"), (GKD, "--gpus 0", "unknown option --gpus"),
    (TEACHER, "--steps 3", "unknown option --steps"), ("quickstart", "--steps 3 --out-dir", "--out-dir has no value"),
    (GKD, "--teacher-gpus", "--teacher_gpus has no value"), (POSTER, "--train-gpus", "--train_gpus has no value"),
    (TEACHER, "--log-file x", "unknown option --log_file"), (POSTER, "--wait=0 --x=1", "--wait 0: must be"),
    ("dev/soak", "many", "number of kills many: must be"), ("dev/audit", "--fix", "unknown option --fix"),
])  # fmt: skip
def test_a_shell_script_names_a_wrong_option_before_anything_starts(script, options, message, tmp_path):
    command = ["bash", ROOT / "scripts" / f"{script}.sh", *options.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"error: {message}" in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout
