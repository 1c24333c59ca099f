"""The GRPO scripts as they run: each loss, dynamic sampling, a reference that follows, and similarity groups."""

import json
import math
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
from bounds import rounding
from comparing import TERMS, assert_close, comparable
from conftest import Run, assert_equal_weights
from safetensors.torch import load_file
from test_scripts import NEVER_ENDING, Raising, failed, first_weights, metrics_explained, refused

from common.base import distributed
from common.loop import similar
from common.tasks import embedder

parity = partial(pytest.param, marks=pytest.mark.parity)
CLUSTERS = ("clusters", "singletons", "effective_clusters", "cosine")
# between them, every option of the loss
LOSSES = {
    "grpo": dict(loss="grpo", kl_estimator="rho_k3", entropy_coef=0.05, dual_clip=1.05, epsilon_low=0.01),
    "dapo": dict(loss="dapo", advantage_scale="batch", overlong_cache=4, epochs=2),
    "dr_grpo": dict(loss="dr_grpo", kl_estimator="k2", truncated="mask", max_new_tokens=16),
    "cispo": dict(loss="cispo", kl_coef=0.0, cispo_cap=1.01, advantage_scale="none"),
}
FULL = dict(**LOSSES["grpo"], dynamic_sampling=2, overlong_cache=4)
NGRAMS = dict(similarity_model="ngrams")


def half(completions, answers, **columns):
    """Prompts with an even answer teach nothing; the completions of others may be equally good."""
    return [float(len(c) % 5) * (int(a) % 2) for c, a in zip(completions, answers, strict=True)]


def ones(completions, answers, **columns):
    return [1.0] * len(completions)


def spoil_embeddings(module: ModuleType) -> None:
    """`prepare`: the embeddings of rank 1 are NaN."""
    forward = embedder.Ngrams.forward

    def spoiled(self, features):
        found = forward(self, features)["sentence_embedding"]
        return {"sentence_embedding": found * (float("nan") if distributed.rank() else 1.0)}

    embedder.Ngrams.forward = spoiled


def state(run: Run) -> dict:
    return json.loads((run.out_dir / run.checkpoints[-1] / "state.json").read_text())


@pytest.fixture(scope="module")
def halved(launcher, tmp_path_factory):
    """Runs on prompts of which half teach nothing; tests that ask for the same one share it."""
    runs = {}

    def get(script: str, ranks: int = 1, **options) -> Run:
        key = (script, ranks, *sorted(options.items()))
        if key not in runs:
            out_dir = tmp_path_factory.mktemp("halved") / "run"
            runs[key] = launcher.run(script, out_dir, ranks, rewards=[half], **options).succeeded()
        return runs[key]

    return get


@pytest.mark.parametrize(("script", "scale", "neutral"), [
    ("grpo_multigpu", "batch", {}), parity("grpo_ddp", "batch", {}),
    ("similarity_grpo", "batch", dict(similarity_method="discount", similarity_alpha=0.0, **NGRAMS)),
    parity("similarity_grpo", "batch", dict(similarity_threshold=2.0, **NGRAMS)),  # every response is a cluster
    parity("similarity_grpo", "group", dict(similarity_method="within", similarity_kappa=math.inf, **NGRAMS)),
])  # fmt: skip
def test_in_one_process_all_variants_are_equal(halved, script, scale, neutral):
    one = halved("grpo", **FULL, advantage_scale=scale)
    other = halved(script, **FULL, advantage_scale=scale, **neutral)
    lines = [{name: line[name] for name in line if name not in CLUSTERS} for line in comparable(other.lines)]
    assert lines == comparable(one.lines)
    assert other.samples == one.samples
    assert_equal_weights(other.weights(), one.weights())


@pytest.mark.parity
@pytest.mark.parametrize(("one", "two", "options"), [
    *(("grpo", "grpo_ddp", options) for options in LOSSES.values()),
    *((name, f"{name}_ddp", dict(dynamic_sampling=2)) for name in ("grpo", "gspo")),
    # numbers of clusters are those of all ranks, which have unequal numbers of them
    ("similarity_grpo", "similarity_grpo", dict(similarity_method="discount", **NGRAMS)),
    ("similarity_grpo", "similarity_grpo", dict(similarity_method="within", similarity_kappa=2.0, **NGRAMS)),
])  # fmt: skip
def test_two_ranks_with_other_micro_batches_are_one_process(halved, one, two, options):
    one, two = halved(one, **options), halved(two, 2, **options, micro_batch_tokens=35)
    assert state(two)["position"] == state(one)["position"]
    assert two.samples == [line for step in range(3) for line in one.samples[4 * step : 4 * step + 4 : 2]]
    assert_close(two, one)
    assert all(0 < line["grad_norm"] < 100 for line in one.steps)
    assert any(line["ratio_max"] > 1.0 for line in one.steps) and any(line["zero_std"] > 0 for line in one.steps)


def test_at_learning_rate_0_nothing_moves(launcher, model_folders):
    # one temperature for sampling, policy and reference, and no dropout, or ratio and KL would show it
    options = dict(learning_rate=0, epochs=2, entropy_coef=0.1, temperature=0.6)
    run = launcher.trained("grpo", policy_model=model_folders["gpt2"], **options)
    for line in run.steps:
        assert line["rollout_mismatch"] < rounding(TERMS, magnitude=1 / 0.6)
        assert line["ratio_max"] == 1.0 and line["clip_fraction"] == line["out_of_range"] == line["kl_old"] == 0.0
        assert line["grad_norm"] > 0 and line["kl_ref"] == pytest.approx(0, abs=rounding(8))
    assert_equal_weights(run.weights(), load_file(model_folders["gpt2"] / "model.safetensors"))


def test_when_all_are_cut_off_and_masked_nothing_moves(launcher, tmp_path):
    options = dict(truncated="mask", steps=2, entropy_coef=0.1, overlong_cache=4, **NEVER_ENDING)
    run = launcher.run("grpo", tmp_path, rewards=[ones], **options).succeeded()
    for line in run.steps:
        assert line["skipped_updates"] == 1.0 and not line.get("loss")
        # completions near the limit are penalised, which is no part of the task and so not of the evaluation
        assert (line["reward"], line["reward_ones"], line["reward_overlong"]) == (0.0, 1.0, -1.0)
    assert {line["eval_reward"] for line in run.lines if "eval_reward" in line} == {1.0}
    assert_equal_weights(run.weights(), first_weights(launcher))


def test_every_metric_is_explained_and_none_is_missing(halved):
    run = halved("similarity_grpo", **FULL, advantage_scale="batch", similarity_method="discount",
                 similarity_alpha=0.0, **NGRAMS)  # fmt: skip
    drawn, skipped = halved("grpo", curriculum="row"), halved("grpo", curriculum="greso")
    written = {name for line in [*run.lines, *drawn.lines, *skipped.lines] for name in line} - {"reward_half"}
    assert written == metrics_explained("grpo") - {"reward_<function>"}
    for line in run.steps:
        assert 0 <= line["clusters"] <= 4 and 0 < line["similarity_share"] < 1 and 0 < line["cosine"] < 1
        assert 1 <= line["effective_clusters"] <= line["clusters"] + 1 and 0 <= line["singletons"] <= 1
    # the embedder is created once, after the first rollout
    assert run.output.count("similarity: ngrams created on cpu") == 1 == run.output.count("rollout: ")
    assert run.output.index("rollout: ") < run.output.index("similarity: ngrams")


@pytest.mark.parametrize(("script", "options", "message"), [
    ("grpo", dict(loss="ppo"), "loss = 'ppo': must be"), ("grpo", dict(dual_clip=0.5), "dual_clip = 0.5: must be"),
    ("grpo", dict(dual_clip=3, loss="cispo"), "dual_clip = 3.0: the loss 'cispo'"),
    ("grpo", dict(kl_coef=0, reference_refresh=2), "reference_refresh = 2: there is no reference while kl_coef is 0"),
    ("grpo", dict(overlong_cache=9, max_new_tokens=8), "overlong_cache = 9: must be at most max_new_tokens = 8"),
    ("grpo", dict(grpo_epochs=2), "unknown option --grpo_epochs"),
    ("similarity_grpo", dict(similarity_threshold="high"), "similarity_threshold = 'high': must be a cosine"),
    ("similarity_grpo", dict(similarity_method="within", advantage_scale="batch"), "advantage_scale = 'batch'"),
], ids=str)  # fmt: skip
def test_wrong_options_are_named(capsys, script, options, message):
    assert message in refused(capsys, script, **options)


def test_groups_with_equal_rewards_make_room_for_others(halved):
    run = halved("grpo", **FULL, advantage_scale="batch")
    # every replaced prompt was taken from the data, and counted
    assert state(run)["position"] == 12 + round(sum(4 * line["resampled"] for line in run.steps)) > 12
    assert sum(line["zero_std"] for line in run.steps) / 3 < 0.3  # of the prompts of the data, half
    assert sum(int(sample["answer"]) % 2 for sample in run.samples) > 9  # of twelve


@pytest.mark.parity
def test_a_reward_that_raises_while_prompts_are_replaced_stops_both_ranks(launcher, tmp_path):
    options = dict(timeout=60, dynamic_sampling=2, eval_data="")
    run = launcher.run("grpo_ddp", tmp_path, 2, rewards=[Raising(2, 1, ones)], **options)
    failed(run, "the grader is down", "rank 1 failed in phase 'resample'")
    assert not run.lines


@pytest.mark.parity
@pytest.mark.parametrize(("script", "options"), [
    ("grpo", dict(dynamic_sampling=2, reference_refresh=2, kl_estimator="k2")), ("similarity_grpo", NGRAMS),
])  # fmt: skip
def test_what_follows_the_run_survives_a_stop(launcher, tmp_path, script, options):
    for folder, parts in (("straight", [6]), ("stopped", [3, 6])):
        for steps in parts:
            launcher.run(script, tmp_path / folder, rewards=[half], steps=steps, eval_data="", **options).succeeded()
    straight, stopped = (Run([], [], tmp_path / folder) for folder in ("straight", "stopped"))
    assert comparable(stopped.steps) == comparable(straight.steps)
    assert_equal_weights(stopped.weights(), straight.weights())
    one, two = state(straight), state(stopped)
    assert (two["position"], two["notes"]) == (one["position"], one["notes"])  # prompts replaced, the threshold
    if script == "grpo":  # the checkpoint of step 3 holds the policy of step 2 as its reference
        policy, reference = (tmp_path / "stopped" / f"checkpoint-00000{part}" for part in ("2", "3/reference"))
        assert (policy / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
    else:
        assert len(one["notes"]["cosine_quantiles"]) == 5


def test_only_the_final_answer_is_compared_when_asked():
    texts = [f"{i} words, then #### 7" for i in range(4)]
    scoring = SimpleNamespace(result=lambda: SimpleNamespace(completions=texts))
    for text, expected in (("response", texts), ("answer", ["7"] * 4)):
        cfg = SimpleNamespace(similarity_text=text, group_size=2)
        assert similar.embed_responses(scoring, lambda *given: given, cfg) == (expected, 2)


def test_a_model_that_cannot_be_had_is_an_error_before_anything_is_loaded(launcher, tmp_path):
    # runs are offline: see conftest.py
    run = launcher.run("similarity_grpo", tmp_path / "run", policy_model="/no/such/policy")
    failed(run, "similarity_model 'BAAI/bge-m3' cannot be downloaded", "hf download BAAI/bge-m3", "'ngrams'")
    assert "/no/such/policy" not in run.output and not run.lines


@pytest.mark.parity
def test_an_embedding_that_is_no_number_stops_all_ranks(launcher, tmp_path):
    options = dict(timeout=60, similarity_model="ngrams", eval_data="")
    run = launcher.run("similarity_grpo", tmp_path, 2, prepare=spoil_embeddings, **options)
    failed(run, "similarity embedding is not finite in row", "rank 1 failed in phase 'similarity'")
    assert not run.lines and not run.checkpoints
