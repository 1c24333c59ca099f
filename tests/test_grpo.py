"""The GRPO scripts as they run: each loss, dynamic sampling, a reference that follows, and similarity groups."""

import json
import math
import statistics
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bounds import rounding
from comparing import TERMS, assert_close, comparable
from conftest import Run, assert_equal_weights
from safetensors.torch import load_file
from test_rollout import make_batch
from test_scripts import NEVER_ENDING, Raising, failed, first_weights, metrics_explained, refused

from common.base import distributed
from common.loop import Scorer, assign_advantages, group_advantages, similar
from common.maths.advantages import decoupled_advantages
from common.tasks import embedder
from common.tasks.scoring import Scored

parity = partial(pytest.param, marks=pytest.mark.parity)
CLUSTERS = ("clusters", "singletons", "effective_clusters", "cosine")
# between them, every option of the loss
LOSSES = {
    "grpo": dict(loss="grpo", kl_estimator="rho_k3", entropy_coef=0.05, dual_clip=1.05, epsilon_low=0.01),
    "dapo": dict(loss="dapo", advantage_scale="batch", overlong_cache=4, epochs=2),
    "dr_grpo": dict(loss="dr_grpo", kl_estimator="k2", truncated="mask", max_new_tokens=16),
    "cispo": dict(loss="cispo", kl_coef=0.0, epsilon_high=0.01, advantage_scale="none"),
    "dppo": dict(loss="dppo", kl_coef=0.0, epsilon_low=0.001, epsilon_high=0.001),
    "sapo": dict(loss="sapo", advantage_scale="rloo", sampler_correction="tis"),
    "gspo": dict(loss="gspo", advantage_scale="maxrl", sampler_correction="seq_mis", epsilon_low=1e-4, dual_clip=1.05),
    "gspo_token": dict(loss="gspo_token", advantage_scale="reinforce_pp", kl_estimator="in_reward", epochs=2),
    "luspo": dict(loss="luspo", advantage_scale="lite_ppo", old_logps="sampler"),
    "gmpo": dict(loss="gmpo", epsilon_low=0.01, epsilon_high=0.01, epochs=2),
    "vespo": dict(loss="vespo", advantage_scale="gdpo"),
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
    parity("similarity_grpo", "group", dict(similarity_method="mmr", similarity_lambda=1.0, **NGRAMS)),
    parity("similarity_grpo", "group", dict(similarity_method="unlikeliness", similarity_rarity=0.0)),
    *(parity("similarity_grpo", "group", dict(similarity_method=method, similarity_threshold=2.0, **NGRAMS))
      for method in ("darling", "uarl", "balanced")),
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
    ("similarity_grpo", "similarity_grpo", dict(similarity_method="balanced", similarity_alpha=1.0, **NGRAMS)),
    ("similarity_grpo", "similarity_grpo", dict(similarity_method="unlikeliness")),
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
    ("grpo", dict(dual_clip=3, loss="cispo"), "dual_clip = 3.0, loss = 'cispo': only"),
    ("grpo", dict(loss="vespo", dual_clip=3), "dual_clip = 3.0, loss = 'vespo': only grpo, dapo,"),
    ("grpo", dict(sampler_cap=1), "sampler_cap = 1.0: must be above 1"),
    ("grpo", dict(loss="dppo", sampler_correction="tis"), "'dppo', old_logps = 'auto': ratios start from the sampler"),
    ("grpo", dict(loss="gspo", advantage_scale="reinforce_pp"), "'reinforce_pp', loss = 'gspo': it gives every token"),
    ("grpo", dict(kl_estimator="in_reward"), "kl_estimator = 'in_reward', advantage_scale = 'auto': the KL becomes"),
    ("grpo", dict(advantage_scale="maxrl", overlong_cache=4), "'maxrl', overlong_cache = 4: it divides by the mean"),
    ("gspo", dict(advantage_scale="maxrl", overlong_cache=4), "'maxrl', overlong_cache = 4: it divides by the mean"),
    ("grpo", dict(advantage_scale="gdpo", reward_url="http://127.0.0.1:1"), "'gdpo', reward_url ="),
    ("similarity_grpo", dict(advantage_scale="gdpo"), "advantage_scale = 'gdpo': similarity enters a single reward"),
    ("grpo", dict(kl_coef=0, reference_refresh=2), "reference_refresh = 2: there is no reference while kl_coef is 0"),
    ("grpo", dict(overlong_cache=9, max_new_tokens=8), "overlong_cache = 9: must be at most max_new_tokens = 8"),
    ("grpo", dict(grpo_epochs=2), "unknown option --grpo_epochs"),
    ("similarity_grpo", dict(similarity_threshold="high"), "similarity_threshold = 'high': must be a cosine"),
    ("similarity_grpo", dict(similarity_method="within", advantage_scale="batch"), "advantage_scale = 'batch'"),
    ("similarity_grpo", dict(similarity_method="balanced", loss="dr_grpo"), "advantage_scale = 'none': 'balanced' has"),
    ("similarity_grpo", dict(similarity_rarity=1.5), "similarity_rarity = 1.5: is a share, at most 1"),
    ("similarity_grpo", dict(similarity_lambda=1.5), "similarity_lambda = 1.5: is a share, at most 1"),
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


@pytest.mark.parametrize("method", [parity("darling"), parity("uarl"), parity("balanced"), "mmr", "unlikeliness"])
def test_every_method_trains(launcher, tmp_path, method):
    options = dict(NGRAMS)
    if method == "unlikeliness":  # no embedding model is looked for, let alone loaded
        options = dict(similarity_model="/no/such/model")
    run = launcher.run("similarity_grpo", tmp_path, rewards=[half], steps=2, similarity_method=method, **options)
    run.succeeded()
    assert all(0 < line["grad_norm"] < 100 and 0 < line["similarity_share"] < 1 for line in run.steps)
    assert all((name in line) == (method != "unlikeliness") for line in run.steps for name in CLUSTERS)
    assert ("similarity: ngrams created" in run.output) == (method != "unlikeliness")


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


def scores(**by_function) -> Scored:
    """Completions of two prompts, three each, with values by function; the reward is their sum."""
    values = {name: torch.tensor(rows) for name, rows in by_function.items()}
    return Scored(["text"] * 6, sum(values.values()), values)


def test_gdpo_weighs_the_functions_by_name_whatever_their_order():
    right, length = [1.0, 0, 0, 1, 1, 1], [0.0, 30, 60, 10, 10, 40]
    weights = {"length": 0.1, "right": 2.0}
    one = scores(right=right, length=length)
    expected = decoupled_advantages(torch.tensor([right, length]).view(2, 2, 3), torch.tensor([2.0, 0.1]))
    for scored in (one, scores(length=length, right=right)):
        assert torch.equal(group_advantages(one.rewards.view(2, 3), "gdpo", scored, weights), expected)
    # a penalty without a weight counts once
    alone = group_advantages(one.rewards.view(2, 3), "gdpo", scores(overlong=length), {})
    assert torch.equal(alone, decoupled_advantages(torch.tensor([length]).view(1, 2, 3), torch.ones(1)))


def test_the_scorer_knows_the_weights_of_its_functions():
    cfg = SimpleNamespace(reward_url="", reward_model="", reward_model_weight=0.25, device="cpu")
    scorer = Scorer(cfg, None, [(half, 1.0), (ones, -0.5), (ones, 0)])
    assert scorer.weights == {"half": 1.0, "ones": -0.5, "ones_2": 0}
    scorer.model = object()
    assert scorer.weights["reward_model"] == 0.25


@pytest.mark.parametrize("cut", [1000, 9, 4])
@pytest.mark.parametrize("estimator", ["in_reward", "k2"])
def test_advantages_of_tokens_are_normalised_over_the_trained_tokens_of_the_step(cut, estimator):
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([3, 1, 2, 3])
    batch.rollout_logps, batch.ref_logps = (torch.randn(batch.completion_ids.shape, generator=generator) for _ in "ab")
    minibatches = batch.minibatches(2, cut, packed=False)
    advantages = torch.tensor([[1.0, -1.0, 0.5, 2.0]])
    cfg = SimpleNamespace(kl_coef=0.3, kl_estimator=estimator, advantage_scale="reinforce_pp", truncated="keep")
    rewards = torch.tensor([0.0, 1.0, 2.0, math.nan])  # the last one is not trained on
    assign_advantages(cfg, advantages, Scored([""] * 4, rewards, {}), batch, minibatches)
    found, raw = {}, {}
    for micro in (micro for minibatch in minibatches for micro in minibatch):
        for row, number, values in zip(micro.rows.tolist(), micro.lengths.tolist(), micro.advantages, strict=True):
            kl = (batch.rollout_logps - batch.ref_logps)[row, :number] * (estimator == "in_reward") * 0.3
            raw[row] = [advantages[0, row].item() - kl[t:].sum().item() for t in range(number)]
            found[row] = values[:number].tolist()
    assert found.pop(3) == [0.0] * 3
    raw.pop(3)
    tokens = [value for row in sorted(raw) for value in raw[row]]
    mean, deviation = statistics.mean(tokens), statistics.stdev(tokens) + 1e-4
    normal = [(value - mean) / deviation for value in tokens]
    assert [value for row in sorted(found) for value in found[row]] == pytest.approx(normal, abs=1e-5)


def test_ratios_may_start_from_the_sampler(launcher):
    for options in (dict(loss="dppo"), dict(loss="dapo", old_logps="sampler")):
        run = launcher.trained("grpo", **options, learning_rate=0)
        # nothing was recomputed: the ratio shows the difference of sampler and trainer, and no metric does twice
        assert all(line["rollout_mismatch"] == 0.0 for line in run.steps)
        assert any(line["ratio_max"] != 1.0 for line in run.steps)
        assert all(abs(line["ratio_max"] - 1) < rounding(TERMS) for line in run.steps)
    run = launcher.trained("grpo", loss="dppo", old_logps="trainer", learning_rate=0)
    assert all(line["ratio_max"] == 1.0 and line["rollout_mismatch"] > 0 for line in run.steps)
