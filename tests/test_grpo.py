"""The GRPO scripts as they run: each loss, dynamic sampling, a reference that follows, and similarity groups."""

import json
import math
from pathlib import Path

import pytest
from conftest import SCRIPTS, Run, assert_equal_weights, comparable
from test_parity import assert_close
from test_resume import assert_same
from test_scripts import NEVER_ENDS, failed, first_weights, metrics_explained

# Prompts with an even answer teach nothing
HALF = "    return [float(len(c) % 5) if int(a) % 2 else 1.0 for c, a in zip(completions, answers)]\n"
CLUSTERS = ("clusters", "singletons", "effective_clusters", "cosine", "similarity_share", "embedding_seconds")
# between them, every option of the loss
LOSSES = {
    "grpo": dict(loss="grpo", kl_estimator="rho_k3", entropy_coef=0.05, dual_clip=1.05, epsilon_low=0.01),
    "dapo": dict(loss="dapo", advantage_scale="batch", overlong_cache=4, grpo_epochs=2),
    "dr_grpo": dict(loss="dr_grpo", kl_estimator="k2", truncated="mask", max_new_tokens=16),
    "cispo": dict(loss="cispo", kl_coef=0.0, cispo_cap=1.01, advantage_scale="none"),
}


def without_clusters(lines: list[dict]) -> list[dict]:
    return [{name: value for name, value in line.items() if name not in CLUSTERS} for line in comparable(lines)]


def position(run: Run) -> int:
    """Prompts taken from the data until the last checkpoint."""
    return json.loads((run.out_dir / run.checkpoints[-1] / "state.json").read_text())["position"]


# ---- one computation in several scripts ----


@pytest.mark.parametrize("script", ["grpo_multigpu", "grpo_ddp"])
def test_in_one_process_all_variants_are_equal(launcher, script):
    one, other = launcher.trained("grpo", **LOSSES["grpo"]), launcher.trained(script, **LOSSES["grpo"])
    assert comparable(other.lines) == comparable(one.lines)
    assert_equal_weights(other.weights(), one.weights())


@pytest.mark.parametrize("loss", LOSSES)
def test_two_ranks_with_other_micro_batches_are_one_process(launcher, loss):
    one = launcher.trained("grpo", **LOSSES[loss])
    two = launcher.trained("grpo_ddp", 2, **LOSSES[loss], micro_batch_tokens=35)
    # where a ratio is at a limit within rounding, the gradient of a token comes and goes
    assert_close(two, one, metrics=1e-4, weights=5e-6)
    assert all(0 < line["grad_norm"] < 100 for line in one.steps)
    assert any(line["ratio_max"] > 1.0 for line in one.steps)


def test_the_losses_are_different_ones(launcher):
    plain = dict(kl_coef=0.0, epsilon_low=0.002, epsilon_high=0.002, advantage_scale="none")
    runs = {loss: launcher.trained("grpo", loss=loss, **plain) for loss in LOSSES}
    # the same rollout, and another gradient from it
    assert len({run.steps[0]["reward"] for run in runs.values()}) == 1
    norms = {loss: run.steps[0]["grad_norm"] for loss, run in runs.items()}
    assert len({round(norm, 6) for norm in norms.values()}) == 4, norms
    # Dr. GRPO divides by a length that no completion may reach
    assert norms["dr_grpo"] < norms["dapo"]
    assert runs["dapo"].steps[-1]["clip_fraction"] > 0 == runs["cispo"].steps[-1]["clip_fraction"]


def test_at_learning_rate_0_nothing_moves(launcher):
    # one temperature for sampling, policy and reference, or ratio and KL would show it
    run = launcher.trained("grpo", learning_rate=0, grpo_epochs=2, entropy_coef=0.1, temperature=0.6)
    for line in run.steps:
        assert line["rollout_mismatch"] < 1e-5
        assert line["ratio_max"] == 1.0 and line["clip_fraction"] == line["out_of_range"] == line["kl_old"] == 0.0
        assert line["grad_norm"] > 0 and line["kl_ref"] == pytest.approx(0, abs=1e-6)
    assert_equal_weights(run.weights(), first_weights(launcher))


def test_an_entropy_bonus_raises_the_entropy(launcher):
    options = dict(steps=6, kl_coef=0.0, learning_rate=1e-3)
    plain, bonus = (launcher.trained("grpo", **options, entropy_coef=coefficient) for coefficient in (0.0, 1.0))
    assert bonus.steps[0]["entropy"] == pytest.approx(plain.steps[0]["entropy"], rel=0.05)
    assert bonus.steps[-1]["entropy"] > plain.steps[-1]["entropy"] + 0.05


def test_when_all_are_cut_off_and_masked_nothing_moves(launcher, tmp_path):
    copy = launcher.copy("grpo", edits=NEVER_ENDS)
    run = launcher.run(copy, tmp_path, truncated="mask", steps=2, entropy_coef=0.1).succeeded()
    assert all(line["skipped_updates"] == 1.0 and not line.get("loss") for line in run.steps)
    assert_equal_weights(run.weights(), first_weights(launcher))


def test_every_metric_is_explained_and_none_is_missing(launcher):
    run = launcher.trained("similarity_grpo", dynamic_sampling=1, overlong_cache=4, similarity_model="ngrams")
    written = {name for line in run.lines for name in line} - {"reward_reward"}
    assert written == metrics_explained("grpo") - {"reward_<function>"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss": "ppo"}, "loss = 'ppo': must be one of ('grpo', 'dapo', 'dr_grpo', 'cispo')"),
        ({"dual_clip": 0.5}, "dual_clip = 0.5: must be above 1"),
        ({"dual_clip": 3, "loss": "cispo"}, "dual_clip = 3.0: the loss 'cispo' holds all tokens with cispo_cap"),
        ({"entropy_coef": -1}, "entropy_coef = -1.0: must be at least 0"),
        ({"kl_coef": 0, "reference_refresh": 2}, "reference_refresh = 2: there is no reference while kl_coef is 0"),
        ({"overlong_cache": 9}, "overlong_cache = 9: must be at most max_new_tokens = 8"),
        ({"gspo_epochs": 2}, "unknown option --gspo_epochs; did you mean --grpo_epochs?"),
    ],
    ids=str,
)
def test_wrong_options_are_named(launcher, tmp_path, options, message):
    run = failed(launcher.run(SCRIPTS["grpo"], tmp_path / "run", **options))
    assert run.codes == [2] and message in " ".join(run.output.split()) and not run.out_dir.exists()


# ---- rewards and prompts ----


def test_completions_near_the_limit_are_penalised(launcher, tmp_path):
    # all of one task reward and all cut off: what is left is the penalty
    copy = launcher.copy("grpo", "    return [1.0] * len(completions)\n", NEVER_ENDS)
    run = launcher.run(copy, tmp_path, steps=1, overlong_cache=4).succeeded()
    (line,) = run.steps
    assert line["reward"] == 0.0 and line["reward_reward"] == 1.0 and line["reward_overlong"] == -1.0
    # it is no part of the task, so no part of the evaluation
    assert {line["eval_reward"] for line in run.lines if "eval_reward" in line} == {1.0}


@pytest.fixture(scope="module")
def resampled(launcher, tmp_path_factory):
    """Runs of six steps on prompts of which half teach nothing, by script and number of ranks."""
    runs = {}

    def get(script: str, ranks: int = 1, rounds: int = 2) -> Run:
        if (script, ranks, rounds) not in runs:
            out_dir = tmp_path_factory.mktemp("resampled") / "run"
            run = launcher.run(launcher.copy(script, HALF), out_dir, ranks, steps=6, dynamic_sampling=rounds)
            runs[script, ranks, rounds] = run.succeeded()
        return runs[script, ranks, rounds]

    return get


@pytest.mark.parametrize("script", ["grpo", "gspo"])
def test_groups_with_equal_rewards_make_room_for_others(resampled, script):
    plain, one, two = (resampled(script, rounds=rounds) for rounds in (0, 1, 2))
    left = [sum(line["zero_std"] for line in run.steps) / 6 for run in (plain, one, two)]
    assert left[0] > 0.3 and left[1] < left[0] and left[2] < 0.2
    # every replaced prompt was taken from the data, and counted
    assert [position(run) for run in (plain, one, two)] == [
        24 + round(sum(4 * line.get("resampled", 0.0) for line in run.steps)) for run in (plain, one, two)
    ]
    assert position(two) > position(one) > 24 and "resampled" not in plain.steps[0]
    # what is kept of the first rollout is what it was
    first = [[s for s in run.samples if s["step"] == 1] for run in (plain, two)]
    kept = [(a, b) for a, b in zip(*first, strict=True) if int(a["answer"]) % 2]
    assert kept and all(a == b for a, b in kept)
    odd = [int(s["answer"]) % 2 for s in first[1]]
    assert sum(odd) > sum(int(s["answer"]) % 2 for s in first[0])


@pytest.mark.parametrize("family", ["grpo", "gspo"])
def test_two_ranks_replace_the_same_prompts_as_one_process(resampled, family):
    one, two = resampled(family), resampled(f"{family}_ddp", 2)
    assert position(two) == position(one)
    assert [line["resampled"] for line in two.steps] == [line["resampled"] for line in one.steps]
    assert two.samples == [line for step in range(6) for line in one.samples[4 * step : 4 * step + 4 : 2]]
    assert_close(two, one, metrics=1e-4, weights=1e-6)


def test_when_no_prompt_teaches_anything_sampling_ends(launcher, tmp_path):
    copy = launcher.copy("grpo_ddp", "    return [1.0] * len(completions)\n")
    run = launcher.run(copy, tmp_path, 2, steps=2, dynamic_sampling=3, eval_data="").succeeded()
    assert [line["resampled"] for line in run.steps] == [3.0, 3.0] and position(run) == 2 * 4 * 4
    assert all(line["zero_std"] == 1.0 for line in run.steps)
    assert run.output.count("the rewards of every group are equal") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_reward_that_raises_while_prompts_are_replaced_stops_both_ranks(launcher, tmp_path, rank):
    raising = (
        "    import os\n\n    reward.calls = getattr(reward, 'calls', 0) + 1\n"
        f"    if os.environ['LOCAL_RANK'] == '{rank}' and reward.calls == 2:\n"
        "        raise ZeroDivisionError('the grader is down')\n    return [1.0] * len(completions)\n"
    )
    copy = launcher.copy("grpo_ddp", raising)
    run = launcher.run(copy, tmp_path, 2, timeout=60, dynamic_sampling=2, eval_data="")
    failed(run, "the grader is down", f"rank {rank} failed in phase 'resample'")
    assert not run.lines


def test_replaced_prompts_and_a_refreshed_reference_survive_a_stop(launcher, tmp_path):
    options = dict(dynamic_sampling=2, reference_refresh=2, kl_estimator="k2", eval_data="")
    script = launcher.copy("grpo", HALF)
    straight = launcher.run(script, tmp_path / "straight", steps=6, **options).succeeded()
    for steps in (3, 6):
        stopped = launcher.run(script, tmp_path / "stopped", steps=steps, **options).succeeded()
    assert_same(stopped, straight, after=3)
    assert position(stopped) == position(straight)
    # the checkpoint of step 3 holds the policy of step 2 as its reference
    saved = (stopped.out_dir / f"checkpoint-00000{step}" / name for step, name in ((3, "reference"), (2, ".")))
    files = [next(Path(folder).glob("model.safetensors")).read_bytes() for folder in saved]
    assert files[0] == files[1]


def test_the_reference_follows_the_policy(launcher):
    # one update per rollout: right after a refresh, reference and policy are the same
    run = launcher.trained("grpo", steps=6, reference_refresh=2, num_minibatches=1)
    gaps = [line["kl_ref"] for line in run.steps]
    assert all(gap == pytest.approx(0, abs=1e-7) for gap in (gaps[0], gaps[2], gaps[4]))
    assert all(gap > 1e-7 for gap in (gaps[1], gaps[3], gaps[5]))
    fixed = launcher.trained("grpo", steps=6, num_minibatches=1)
    assert fixed.steps[4]["kl_ref"] > 1e-6
    assert not (fixed.out_dir / "checkpoint-000006" / "reference").exists()


# ---- similarity groups ----

METHODS = {
    "discount": {},
    "advantage": dict(similarity_alpha=1.0, similarity_threshold=0.5),
    "dra": dict(loss="dr_grpo"),
    "within": dict(similarity_kappa=2.0, similarity_singletons="zero"),
}


@pytest.mark.parametrize("method", METHODS)
def test_similarity_runs_on_two_ranks_as_in_one_process(launcher, method):
    options = dict(similarity_method=method, similarity_model="ngrams", **METHODS[method])
    one = launcher.trained("similarity_grpo", **options)
    if method in ("discount", "within"):  # one whose scale is that of all ranks, and one that each rank does alone
        two = launcher.trained("similarity_grpo", 2, **options)
        assert_close(*(drop(run, ("similarity_share",)) for run in (two, one)), metrics=1e-4, weights=1e-6)
    plain = launcher.trained("grpo_ddp", loss=options.get("loss", "dapo"))
    assert plain.steps[0]["reward"] == one.steps[0]["reward"]
    assert plain.steps[0]["grad_norm"] != pytest.approx(one.steps[0]["grad_norm"], rel=1e-3)
    for line in one.steps:
        assert 0 <= line["clusters"] <= 4 and 0 < line["similarity_share"] < 1 and 0 < line["cosine"] < 1
        assert 1 <= line["effective_clusters"] <= line["clusters"] + 1 and 0 <= line["singletons"] <= 1


def test_numbers_of_clusters_are_those_of_all_ranks(launcher, tmp_path):
    # prompts with an even answer have no response in a cluster, and the ranks have unequal numbers of them
    reward = "    return [float(len(c) % 5) * (int(a) % 2) for c, a in zip(completions, answers)]\n"
    copy = launcher.copy("similarity_grpo", reward)
    options = dict(similarity_model="ngrams", eval_data="", steps=4)
    one, two = (launcher.run(copy, tmp_path / str(ranks), ranks, **options).succeeded() for ranks in (1, 2))
    assert_close(*(drop(run, ("similarity_share",)) for run in (two, one)), metrics=1e-4, weights=1e-6)
    assert any(line["zero_std"] > 0 for line in one.steps)
    assert all(line["embedding_seconds"] > 0 for line in two.steps)


def drop(run: Run, names: tuple[str, ...]) -> Run:
    """The run without some metrics."""
    lines = [{name: value for name, value in line.items() if name not in names} for line in run.lines]
    shown = type("Shown", (), {"lines": lines, "weights": run.weights})
    return shown


@pytest.mark.parametrize(
    "method, neutral, plain",
    [
        ("discount", dict(similarity_alpha=0.0), dict(advantage_scale="batch")),
        ("discount", dict(similarity_threshold=2.0), dict(advantage_scale="batch")),  # every response is a cluster
        ("advantage", dict(similarity_alpha=0.0), {}),
        ("within", dict(similarity_kappa=math.inf), {}),
    ],
    ids=["alpha 0", "singletons", "advantage", "kappa inf"],
)
def test_without_effect_it_is_grpo_bit_for_bit(launcher, method, neutral, plain):
    run = launcher.trained("similarity_grpo", similarity_method=method, similarity_model="ngrams", **neutral)
    expected = launcher.trained("grpo_ddp", **plain)
    assert without_clusters(run.lines) == comparable(expected.lines)
    assert_equal_weights(run.weights(), expected.weights())


def test_only_the_final_answer_is_compared_when_asked(launcher, tmp_path):
    # all right, and all different texts with one final answer
    reward = "    return [1.0] * len(completions)\n"
    texts = "completions_B = batch.texts(tokenizer)"
    edits = {texts: "completions_B = [f'{i} words, then #### 7' for i in range(len(batch))]"}
    for text, clusters in (("response", 4.0), ("answer", 1.0)):
        copy = launcher.copy("similarity_grpo", reward, edits)
        options = dict(
            steps=1, eval_data="", similarity_model="ngrams", similarity_text=text, similarity_threshold=0.999
        )
        run = launcher.run(copy, tmp_path / text, **options).succeeded()
        assert run.steps[0]["clusters"] == clusters


def test_an_automatic_threshold_survives_a_stop(launcher, tmp_path):
    script = launcher.copy("similarity_grpo")
    options = dict(similarity_model="ngrams", eval_data="")
    straight = launcher.run(script, tmp_path / "straight", steps=6, **options).succeeded()
    for steps in (3, 6):
        stopped = launcher.run(script, tmp_path / "stopped", steps=steps, **options).succeeded()
    one, two = (drop(run, ("similarity_share",)) for run in (stopped, straight))
    assert comparable(one.lines)[3:] == comparable(two.lines)[3:]
    assert_equal_weights(stopped.weights(), straight.weights())
    notes = [
        json.loads((run.out_dir / "checkpoint-000006" / "state.json").read_text())["notes"]
        for run in (straight, stopped)
    ]
    assert notes[0] == notes[1] and len(notes[0]["cosine_quantiles"]) == 5


def test_the_embedder_is_created_after_the_first_rollout_and_once(launcher):
    output = launcher.trained("similarity_grpo", similarity_method="discount", similarity_model="ngrams").output
    assert output.count("similarity: ngrams created on cpu") == 1
    assert output.index("rollout: ") < output.index("similarity: ngrams created on cpu")
    assert "16 texts embedded in" in output


def test_a_model_that_cannot_be_had_is_an_error_before_anything_is_loaded(launcher, tmp_path):
    # runs are offline: see conftest.py
    run = launcher.run(SCRIPTS["similarity_grpo"], tmp_path / "run", policy_model="/no/such/policy")
    failed(run, "similarity_model 'BAAI/bge-m3' cannot be downloaded", "hf download BAAI/bge-m3", "'ngrams'")
    assert "/no/such/policy" not in run.output and not run.lines


def test_an_embedding_that_is_no_number_stops_all_ranks(launcher, tmp_path):
    broken = "from common.config import require\n"
    edit = broken + (
        "\n\ndef _nan(self, features, real=embedder.Ngrams.forward):\n"
        "    features = real(self, features)\n"
        "    if distributed.rank() == 1:\n        features['sentence_embedding'][0] = float('nan')\n"
        "    return features\n\n\nembedder.Ngrams.forward = _nan\n"
    )
    copy = launcher.copy("similarity_grpo", edits={broken: edit})
    run = launcher.run(copy, tmp_path, 2, timeout=60, similarity_model="ngrams", eval_data="")
    failed(run, "similarity embedding is not finite in row", "rank 1 failed in phase 'similarity'")
    assert not run.lines and not run.checkpoints


@pytest.mark.parametrize(
    "options, message",
    [
        ({"similarity_method": "cluster"}, "similarity_method = 'cluster': must be one of"),
        ({"similarity_threshold": "high"}, "similarity_threshold = 'high': must be a cosine"),
        ({"similarity_alpha": -1}, "similarity_alpha = -1.0: must be at least 0"),
        ({"similarity_method": "within", "advantage_scale": "batch"}, "advantage_scale = 'batch': 'within' divides by"),
    ],
    ids=str,
)
def test_wrong_options_of_similarity_are_named(launcher, tmp_path, options, message):
    run = failed(launcher.run(SCRIPTS["similarity_grpo"], tmp_path / "run", **options))
    assert run.codes == [2] and message in " ".join(run.output.split()) and not run.out_dir.exists()
