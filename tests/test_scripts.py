"""The scripts as people run them: what they write, what they refuse, and how they fail."""

import json
import re
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
from conftest import REWARD, ROOT, SCRIPTS, Run, assert_equal_weights, build_tokenizer, comparable
from safetensors.torch import load_file
from test_parity import assert_close
from transformers import LlamaConfig, LlamaForSequenceClassification

from common import checkpoint

ALONE_AND_TOGETHER = pytest.mark.parametrize("script, ranks", [("gspo", 1), ("gspo_ddp", 2)])
ALL = pytest.mark.parametrize("script, ranks", [("gspo", 1), ("gspo_multigpu", 1), ("gspo_ddp", 2)])
GRADED = "    return [float(len(c) % 5) for c in completions]\n"  # all completions can be scored
NEVER_ENDS = {"end_ids=models.end_token_ids(tokenizer, model)": "end_ids=[999]"}  # so every completion is cut off


def raising_at(call: int, otherwise: str = REWARD) -> str:
    """A reward that raises when it is called for this time."""
    return (
        "    reward.calls = getattr(reward, 'calls', 0) + 1\n"
        f"    if reward.calls >= {call}:\n"
        "        raise ZeroDivisionError('the grader is down')\n" + otherwise
    )


def failed(run: Run, *messages: str) -> Run:
    """All processes ended with an error that says this."""
    assert all(code not in (0, None) for code in run.codes), run.output
    for message in messages:
        assert message in run.output, run.output
    return run


def first_weights(launcher) -> dict[str, torch.Tensor]:
    return load_file(Path(launcher.models["rl"]["policy_model"]) / "model.safetensors")


def finite(values) -> bool:
    return all(torch.as_tensor(value).isfinite().all() for value in values)


SAMPLING = dict(min_new_tokens=2, top_p=0.875, top_k=11, min_p=0.0625, rollout_batch=8)
# The reward and the log-probabilities of a step each wait until the other has begun; the sampler says what it is given
WATCH = """from common.config import require

_begun = {name: __import__("threading").Event() for name in ("reward", "logprobs")}


def _meet(own, other):
    _begun[own].set()
    met = _begun[other].wait(30)
    print(f"{own} on rank {distributed.rank()} in {__import__('threading').current_thread().name}: {met}", flush=True)


def _fill(*args, real=logprobs.fill):
    if args[1] == "old_logps":
        _meet("logprobs", "reward")
    real(*args)


def _sampler(self, replicas, *, real=rollout.Sampler.__init__, **options):
    print("sampler", sorted(options.items()), flush=True)
    real(self, replicas, **options)


logprobs.fill, rollout.Sampler.__init__ = _fill, _sampler
"""


@pytest.fixture(scope="module")
def watched(launcher, tmp_path_factory):
    """Runs of two steps that print what happens in them; tests that ask for the same one share it."""
    runs = {}

    def get(script: str, ranks: int) -> Run:
        if script not in runs:
            edits = {"from common.config import require\n": WATCH}
            copy = launcher.copy(script, "    _meet('reward', 'logprobs')\n" + REWARD, edits)
            out_dir = tmp_path_factory.mktemp("watched") / "run"
            runs[script] = launcher.run(copy, out_dir, ranks, steps=2, eval_data="", compile=False, **SAMPLING)
        return runs[script].succeeded()

    return get


# ---- a run from the command line ----

# A new process in another folder: it finds what is beside the script, and nothing else of the clone
ANYWHERE = """import os, runpy, sys

os.chdir({folder!r})
sys.path[:] = [os.path.dirname({script!r}), *(path for path in sys.path if path not in {clone!r})]
for name in [name for name in sys.modules if name.split(".")[0] == "common"]:
    del sys.modules[name]
runpy.run_path({script!r}, run_name="__main__")
"""


def test_a_script_runs_from_any_folder_as_it_is(launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = tmp_path / "start.py"
    clone = [str(ROOT), str(ROOT / "tests")]
    start.write_text(ANYWHERE.format(folder=str(tmp_path), script=str(SCRIPTS["gspo"]), clone=clone))
    run = launcher.run(start, "new/folder", steps=1).succeeded()
    assert "policy saved in new/folder/checkpoint-000001" in run.output
    assert {path.name for path in run.out_dir.iterdir()} == {
        ".lock", "checkpoint-000001", "config.json", "metrics.jsonl", "samples.jsonl", "tensorboard",
    }  # fmt: skip
    state = json.loads((run.out_dir / "checkpoint-000001" / "state.json").read_text())
    assert state["config"]["group_size"] == 4 and state["config"]["out_dir"] == "new/folder"


def test_help_has_every_option_with_its_comment(launcher, tmp_path):
    text = launcher.run(SCRIPTS["gspo"], tmp_path, help="").succeeded().output
    assert "--group_size" in text and "the group mean is the baseline" in " ".join(text.split())


def metrics_explained(family: str) -> set[str]:
    """Names in the table of metrics of an algorithm's page."""
    rows = (ROOT / family / "README.md").read_text().split("### Metrics\n")[1].split("\n## ")[0].splitlines()
    return {name for row in rows for name in re.findall(r"`([\w<>]+)`", row.split("|")[1] if "|" in row else "")}


def test_every_metric_is_explained_and_none_is_missing(launcher):
    lines = launcher.trained("gspo", dynamic_sampling=1).lines
    written = {name for line in lines for name in line} - {"reward_reward"}
    assert written == metrics_explained("gspo") - {"reward_<function>"}


@ALL
def test_how_completions_are_sampled_is_said_once(watched, script, ranks):
    lines = [line for line in watched(script, ranks).output.splitlines() if line.startswith("rollout: ")]
    assert lines == ["rollout: PyTorch's attention over a static cache (cpu, float32: no flash kernel)"]


def test_the_settings_in_force_are_saved_and_their_files_can_be_read(launcher):
    run = launcher.trained("gspo", steps=6)
    assert run.checkpoints == ["checkpoint-000002", "checkpoint-000004", "checkpoint-000006"]
    assert all(checkpoint.is_complete(run.out_dir / name) for name in run.checkpoints)
    assert {line["step"] for line in run.samples} == set(range(1, 7))
    assert set(run.samples[0]) == {"step", "prompt", "completion", "answer", "reward"}


def test_samples_can_be_printed(launcher, tmp_path):
    run = launcher.run(launcher.copy(), tmp_path, steps=1, print_samples=True).succeeded()
    assert run.output.count("step 1, reward ") == 4


# ---- what must hold while nothing moves ----


@pytest.mark.parametrize("family, dtype", [("qwen2", "fp32"), ("gpt2", "fp32"), ("qwen2", "bf16")])
def test_at_learning_rate_0_nothing_moves(launcher, model_folders, family, dtype):
    # every ratio is 1 exactly, or else the update sees other numbers than the rollout
    options = dict(learning_rate=0, gspo_epochs=2, kl_coef=0, dtype=dtype, policy_model=model_folders[family])
    run = launcher.trained("gspo", **options)
    for line in run.steps:
        assert line["ratio_max"] == 1.0 and line["clip_fraction"] == line["out_of_range"] == line["kl_old"] == 0.0
        assert line["learning_rate"] == 0.0 and line["grad_norm"] > 0 and "kl_ref" not in line
    evaluations = {line["eval_reward"] for line in run.lines if "eval_reward" in line}
    assert len(evaluations) == 1
    before = load_file(model_folders[family] / "model.safetensors")
    assert_equal_weights(run.weights(), {k: v.to(run.weights()[k].dtype) for k, v in before.items()})


def test_one_update_per_rollout_is_warned_of(launcher, tmp_path):
    run = launcher.run(launcher.copy(), tmp_path, steps=2, num_minibatches=1).succeeded()
    assert "warning: one optimizer step per rollout" in run.output
    assert {(line["ratio_max"], line["clip_fraction"]) for line in run.steps} == {(1.0, 0.0)}
    assert "one optimizer step" not in launcher.trained("gspo", steps=6).output


# ---- rewards ----


@ALONE_AND_TOGETHER
def test_unscored_completions_are_counted_and_left_out(launcher, script, ranks):
    run = launcher.trained(script, ranks, steps=6)
    assert 0 < sum(line["unscored"] for line in run.steps) / 6 < 1
    assert finite(run.weights().values())
    assert finite(value for line in run.steps for value in line.values() if isinstance(value, float))


@ALONE_AND_TOGETHER
def test_a_reward_that_is_nan_everywhere_stops_the_run(launcher, tmp_path, script, ranks):
    copy = launcher.copy(script, "    return [float('nan')] * len(completions)\n")
    run = failed(launcher.run(copy, tmp_path, ranks), "step 1: the reward is NaN for every completion")
    assert not run.checkpoints and len(run.steps) == 1


@ALL
def test_a_reward_that_raises_stops_the_run_and_leaves_the_checkpoint(launcher, tmp_path, script, ranks):
    copy = launcher.copy(script, raising_at(2))
    run = launcher.run(copy, tmp_path, ranks, timeout=60, eval_data="", save_every=1)
    failed(run, "reward reward raised ZeroDivisionError on rows 0 to", "the grader is down")
    assert run.checkpoints == ["checkpoint-000001"] and checkpoint.newest(tmp_path)
    assert [line["step"] for line in run.lines] == [1, 1] and "seconds_save" in run.lines[1]


def test_a_reward_that_raises_in_the_evaluation_stops_the_run_too(launcher, tmp_path):
    run = launcher.run(launcher.copy("gspo_ddp", raising_at(1)), tmp_path, 2, timeout=60)
    failed(run, "reward reward raised ZeroDivisionError")
    assert not run.lines


@pytest.mark.parametrize("rank", [0, 1])
def test_a_reward_that_raises_on_one_rank_stops_both(launcher, tmp_path, rank):
    on_rank = f"    import os\n\n    if os.environ['LOCAL_RANK'] != '{rank}':\n    " + REWARD
    copy = launcher.copy("gspo_ddp", on_rank + raising_at(2, "    return [1.0] * len(completions)\n"))
    run = launcher.run(copy, tmp_path, 2, timeout=60, eval_data="")
    failed(run, "reward reward raised ZeroDivisionError", f"rank {rank} failed in phase 'score'")
    assert [line["step"] for line in run.lines] == [1]


@pytest.mark.parametrize(
    "script, ranks, returned, message",
    [
        ("gspo", 1, "[1.0]", "reward reward returned 1 values, expected 16"),
        *((script, ranks, "[1.0] * 6 + [float('inf')] + completions[7:]", "reward reward is inf in row 6")
          for script, ranks in ALL.args[1]),
    ],
)  # fmt: skip
def test_a_wrong_return_value_is_named(launcher, tmp_path, script, ranks, returned, message):
    run = launcher.run(launcher.copy(script, f"    return {returned}\n"), tmp_path, ranks, timeout=60, eval_data="")
    failed(run, message)
    assert run.output.count("ValueError: " + message) == ranks and not run.lines


@ALL
def test_rewards_are_computed_in_a_thread_while_log_probs_are(watched, script, ranks):
    run = watched(script, ranks)
    for rank in range(ranks):
        assert run.output.count(f"logprobs on rank {rank} in MainThread: True") == 2
        threads = re.findall(rf"reward on rank {rank} in (.+): True", run.output)
        assert len(threads) == 2 and "MainThread" not in threads
    assert all(line["seconds_logprobs"] > 0 and line["seconds_score"] > 0 for line in run.steps)


def test_a_reward_model_joins_the_reward_function(launcher, tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "reward_model"
    LlamaForSequenceClassification(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                    max_position_embeddings=256, num_labels=1, pad_token_id=0, bos_token_id=None, eos_token_id=3,
                    initializer_range=1.0)
    ).save_pretrained(folder)  # fmt: skip
    build_tokenizer().save_pretrained(folder)
    run = launcher.run(launcher.copy(reward="    return [float(len(c) % 5) for c in completions]\n"), tmp_path / "run",
                       steps=2, reward_model=folder, reward_model_weight=0.5).succeeded()  # fmt: skip
    for line in run.steps:
        assert line["reward"] == pytest.approx(line["reward_reward"] + 0.5 * line["reward_reward_model"], rel=1e-4)
        assert line["reward_reward_model"] not in (0.0, None)


# ---- sampling ----

# Notes texts and lengths of every training rollout
NOTING = (
    "    with open({path!r}, 'a') as file:\n"
    "        file.write(__import__('json').dumps([completions, columns['completion_tokens']]) + '\\n')\n" + REWARD
)


def groups(launcher, folder, **options) -> tuple[Run, list[list[str]], list[int]]:
    """A run of one step, the completions of its four groups, and all their lengths."""
    copy = launcher.copy(reward=NOTING.format(path=str(folder) + ".jsonl"))
    run = launcher.run(copy, folder, eval_data="", steps=1, **options).succeeded()
    completions, lengths = json.loads(folder.with_suffix(".jsonl").read_text())
    return run, [completions[i : i + 4] for i in range(0, 16, 4)], lengths


@ALL
def test_every_option_of_sampling_reaches_the_sampler(watched, script, ranks):
    run = watched(script, ranks)
    expected = sorted({**SAMPLING, "max_new_tokens": 8, "compile": False, "end_ids": [3], "pad_id": 0}.items())
    assert run.output.count(f"sampler {expected}") == ranks


def test_with_top_k_1_completions_of_a_group_are_equal_and_none_is_too_short(launcher, tmp_path):
    _, free, lengths = groups(launcher, tmp_path / "free")
    assert all(len(set(group)) > 1 for group in free) and min(lengths) < 6
    run, equal, lengths = groups(launcher, tmp_path / "cut", top_k=1, min_new_tokens=6)
    assert all(len(set(group)) == 1 for group in equal) and len({group[0] for group in equal}) > 1
    assert min(lengths) >= 6
    # sampled with probability 1, which is not the probability that is trained
    (line,) = run.steps
    assert line["zero_std"] == 1.0 and line["rollout_mismatch"] > 0.01


def test_how_many_completions_are_sampled_at_once_changes_nothing(launcher, tmp_path):
    plain = launcher.trained("gspo", steps=6)
    run = launcher.run(launcher.copy(), tmp_path, steps=6, rollout_batch=5).succeeded()
    assert run.samples == plain.samples
    assert_close(run, plain, metrics=1e-4, weights=1e-6)


# ---- nothing to train on, and numbers that are not finite ----


@ALONE_AND_TOGETHER
def test_when_all_are_cut_off_and_masked_nothing_moves(launcher, tmp_path, script, ranks):
    copy = launcher.copy(script, edits=NEVER_ENDS)
    run = launcher.run(copy, tmp_path, ranks, truncated="mask", steps=2).succeeded()
    for line in run.steps:
        assert line["truncated"] == 1.0 and line["skipped_updates"] == 1.0
        assert not line.get("loss") and not line.get("grad_norm")
        assert line["completion_length"] == 8.0 and line["reward"] is not None
    assert run.output.count("every completion was cut off") == 1
    assert run.output.count("nothing in this step could be trained on") == 1
    assert_equal_weights(run.weights(), first_weights(launcher))


def test_cut_off_completions_are_trained_on_if_kept(launcher, tmp_path):
    run = launcher.run(launcher.copy(edits=NEVER_ENDS), tmp_path, truncated="keep", steps=2).succeeded()
    assert {(line["truncated"], line["skipped_updates"]) for line in run.steps} == {(1.0, 0.0)}
    assert all(line["grad_norm"] > 0 for line in run.steps)


@ALONE_AND_TOGETHER
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_batch(launcher, tmp_path, script, ranks):
    # from the second step on
    loss = "optimizer.scale(loss)"
    copy = launcher.copy(script, edits={loss: loss[:-1] + " * (float('nan') if step > 1 else 1.0))"})
    run = failed(launcher.run(copy, tmp_path, ranks, timeout=60, save_every=1), "FloatingPointError: step 2")
    assert run.checkpoints == ["checkpoint-000001"] and finite(run.weights().values())
    assert [line["step"] for line in run.steps] == [1]
    kept = sorted(tmp_path.glob("not_finite*"))
    assert len(kept) == ranks and all(str(path) in run.output for path in kept)
    for path in kept:
        batch = load_file(path)
        # all micro-batches of the step: the loop asks once per rollout, and any of them may have been at fault
        rows = [batch[f"micro{i}/rows"].tolist() for i in range(sum(name.endswith("/rows") for name in batch))]
        assert sorted(chain(*rows)) == list(range(16 // ranks)) and len(rows) > 2
        fields = ("completion_ids", "completion_mask", "advantages", "rollout_logps", "old_logps", "ref_logps")
        assert {f"micro{i}/{field}" for i in range(len(rows)) for field in fields} <= batch.keys()


def test_broken_weights_are_named(launcher, tmp_path):
    edit = "    models.warn_learning_rate(cfg.learning_rate, model)\n"
    copy = launcher.copy(edits={edit: edit + "    next(model.parameters()).data.fill_(float('nan'))\n"})
    failed(launcher.run(copy, tmp_path), "FloatingPointError: hidden states of the policy are not finite")


# ---- refused before training ----


def test_too_few_rows_are_refused(launcher, tmp_path):
    data = tmp_path / "three.jsonl"
    data.write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n' * 3)
    run = launcher.run(launcher.copy(), tmp_path / "run", train_data=data)
    failed(run, "3 rows, batch_size 4")
    assert not run.lines and not run.checkpoints


def test_a_batch_that_the_ranks_cannot_share_is_refused(launcher, tmp_path):
    run = launcher.run(launcher.copy("gspo_ddp"), tmp_path / "run", 2, batch_size=5, timeout=60)
    failed(run, "batch_size = 5", "must be a multiple of the 2 ranks")
    assert not run.lines


def test_groups_and_batches_that_do_not_divide_evenly_are_trained_on(launcher, tmp_path):
    # each of two ranks has three groups of three: nine completions in four minibatches
    sizes = dict(batch_size=6, group_size=3, num_minibatches=4, steps=2, eval_data="")
    run = launcher.run(launcher.copy("gspo_ddp", GRADED), tmp_path, 2, timeout=60, **sizes).succeeded()
    assert all(line["skipped_updates"] == 0.0 and line["grad_norm"] > 0 for line in run.steps) and len(run.steps) == 2


def test_more_minibatches_than_a_rank_has_rows_are_refused(launcher, tmp_path):
    run = launcher.run(launcher.copy("gspo_ddp"), tmp_path / "run", 2, num_minibatches=9, timeout=60)
    failed(run, "num_minibatches = 9", "at most the 8 completions of a rank")


@pytest.mark.skipif(torch.cuda.device_count() > 2, reason="this machine has the GPUs")
@pytest.mark.parametrize("options", [{}, {"device": "cuda"}])
def test_a_layout_of_more_gpus_than_there_are_is_refused_at_once(launcher, tmp_path, options):
    launcher.trained("gspo", steps=6)  # the server runs by now
    script, began = SCRIPTS["gspo_multigpu"], time.monotonic()
    default = {name: value for name, value in launcher.defaults.items() if name != "device"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "defaults", {**default, "policy_model": "/no/such/model"})
        run = launcher.run(script, tmp_path / "run", **options)
    failed(run, "this layout needs 3 GPUs (ids [0, 1, 2])", f"{torch.cuda.device_count()} visible",
           "POLICY_GPU_IDS = (0,)", "--device cpu")  # fmt: skip
    assert "/no/such/model" not in run.output and not run.out_dir.exists()
    assert time.monotonic() - began < 30


def test_without_a_gpu_auto_takes_the_cpu_and_says_so(launcher, tmp_path):
    if torch.cuda.device_count():
        pytest.skip("there is a GPU")
    run = launcher.run(launcher.copy(), tmp_path, steps=1, device="auto").succeeded()
    assert "no GPU visible: running on the CPU" in run.output
    told = launcher.trained("gspo", steps=6)
    assert comparable(run.steps)[0]["reward"] == comparable(told.steps)[0]["reward"]


@pytest.mark.parametrize(
    "options, messages",
    [
        ({"learning_rat": 1}, ["unknown option --learning_rat", "did you mean --learning_rate?"]),
        ({"group_size": 1}, ["group_size = 1: must be at least 2"]),
        ({"batch_size": 0}, ["batch_size = 0: must be at least 1"]),
        ({"num_minibatches": 17}, ["num_minibatches = 17: must be at most the 16 completions of a step"]),
        ({"temperature": 0}, ["temperature = 0.0: must be above 0"]),
        ({"truncated": "drop"}, ["truncated = 'drop': must be one of ('keep', 'mask')"]),
        ({"micro_batch_tokens": 0}, ["micro_batch_tokens = 0: must be at least 1"]),
        ({"micro_batch_size": 4}, ["unknown option --micro_batch_size"]),
        ({"steps": "many"}, ["argument --steps: invalid int value: 'many'"]),
    ],
)
def test_wrong_options_are_named(launcher, tmp_path, options, messages):
    run = failed(launcher.run(SCRIPTS["gspo"], tmp_path / "run", **options), *messages)
    assert run.codes == [2] and "Traceback" not in run.output and not run.out_dir.exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy_model": "/no/such/model"}, "no such folder"),
        ({"train_data": "/no/such/rows.jsonl"}, "no data at '/no/such/rows.jsonl'"),
        ({"max_prompt_tokens": 3}, "raise it to"),
    ],
)
def test_what_cannot_be_loaded_is_named(launcher, tmp_path, options, message):
    run = failed(launcher.run(SCRIPTS["gspo"], tmp_path / "run", **options), message)
    assert not run.lines and not run.checkpoints


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_p": 0}, "top_p = 0.0: must be in (0, 1]"),
        ({"min_new_tokens": -1}, "min_new_tokens = -1: must"),
        ({"min_new_tokens": 9}, "min_new_tokens = 9: must be at most"),  # above max_new_tokens: none would ever end
        ({"rollout_batch": -1}, "rollout_batch = -1: must"),
        ({"profile": -1}, "profile = -1: must"),
    ],
    ids=str,
)
def test_values_that_cannot_be_are_refused_before_training(launcher, tmp_path, options, message):
    run = failed(launcher.run(SCRIPTS["gspo"], tmp_path / "run", **options, steps=1), message)
    assert not run.out_dir.exists()


def test_a_value_that_cannot_be_ends_all_ranks(launcher, tmp_path):
    run = failed(launcher.run(SCRIPTS["gspo_ddp"], tmp_path / "run", 2, timeout=60, top_p=0), "top_p = 0.0")
    assert run.output.count("top_p = 0.0: must be in (0, 1]") == 2 and not run.out_dir.exists()


@pytest.mark.parametrize(("options", "message"), [
    (dict(epsilon_low=1e-3, epsilon_high=1e-3), "clip_preset = 'dense': epsilon_low and epsilon_high would be ignored"),
    (dict(max_grad_norm=0), "max_grad_norm = 0.0: must be above 0; inf: no clipping"),
    (dict(kl_estimator="k1"), "kl_estimator = 'k1': must be one of ('k2', 'k3')"),
    (dict(eval_data="toy"), "eval_data = 'toy': one is the built-in task, one is not"),
], ids=["clip", "gradient norm", "k1", "eval_data"])  # fmt: skip
def test_an_option_without_effect_is_refused(launcher, tmp_path, options, message):
    run = launcher.run(SCRIPTS["gspo"], tmp_path / "run", **options)
    assert run.codes == [2] and message in " ".join(run.output.split())
    assert not (tmp_path / "run").exists()
