"""scripts/dev/recipe_trl.py without TRL: what its options become, how rows are asked and scored, what is counted."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from test_tools import load_script

from common.maths import losses
from common.tasks import data

pytestmark = pytest.mark.tools
SHARED = ["--train_data", "rows.jsonl", "--out", "out", "--device", "cpu"]


@pytest.fixture(scope="module")
def recipe():
    had = sys.modules.get("trl")
    sys.modules["trl"] = SimpleNamespace(__version__="0")  # the script reads its classes when it trains
    yield load_script("recipe_trl")
    del sys.modules["trl"]
    if had:
        sys.modules["trl"] = had


def options(recipe, stage, *others):
    models = ["--student", "a", "--teacher", "b"] if stage == "gkd" else ["--model", "a"]
    return recipe.option_parser().parse_args([stage, *models, *SHARED, *others])


def test_a_packed_step_has_the_rows_that_hold_its_conversations(recipe):
    args = options(recipe, "sft", "--batch_size", "64", "--max_length", "1024")
    fields = recipe.sft_fields(args, [100, 200, 300])  # 64 of 200 tokens fill 12.5 rows
    assert (fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]) == (4, 3)
    cut = recipe.sft_fields(options(recipe, "sft", "--batch_size", "4", "--max_length", "128"), [5000])
    assert cut["per_device_train_batch_size"] == 4  # what is cut fills no row
    odd = recipe.sft_fields(options(recipe, "sft", "--batch_size", "7", "--max_length", "128"), [5000])
    assert (odd["per_device_train_batch_size"], odd["gradient_accumulation_steps"]) == (1, 7)
    few = recipe.sft_fields(options(recipe, "sft", "--batch_size", "1"), [10])
    assert few["gradient_accumulation_steps"] == 1
    padded = recipe.sft_fields(options(recipe, "sft", "--packing", "false", "--sequences", "16"), [10])
    assert (padded["per_device_train_batch_size"], padded["gradient_accumulation_steps"]) == (16, 4)
    assert padded["max_length"] == 1024 and not padded["padding_free"]
    free = recipe.sft_fields(options(recipe, "sft", "--packing", "false", "--padding_free", "true"), [10])
    assert free["padding_free"] and free["max_length"] is None  # TRL refuses both
    with pytest.raises(ValueError, match=r"sequences = 5.*64 rows"):
        recipe.sft_fields(options(recipe, "sft", "--packing", "false", "--sequences", "5"), [10])


def test_a_rollout_is_cut_into_equal_minibatches_and_passes(recipe):
    sizes = ["--batch_size", "8", "--group_size", "4", "--num_minibatches", "2", "--steps", "5", "--warmup_steps", "3"]
    fields = recipe.grpo_fields(options(recipe, "gspo", *sizes, "--sequences", "4"))
    assert (fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]) == (4, 4)
    assert (fields["steps_per_generation"], fields["max_steps"], fields["warmup_steps"]) == (8, 10, 6)
    # the completions of one generation are those of a rollout
    assert fields["per_device_train_batch_size"] * fields["steps_per_generation"] == 8 * 4
    assert (fields["epsilon"], fields["epsilon_high"]) == losses.CLIP_PRESETS["dense"]
    assert fields["importance_sampling_level"] == "sequence"
    token = recipe.grpo_fields(options(recipe, "grpo", *sizes))
    assert (token["importance_sampling_level"], token["epsilon"], token["epsilon_high"]) == ("token", 0.2, 0.28)
    for wrong in (["--num_minibatches", "3"], ["--sequences", "5"]):
        with pytest.raises(ValueError, match="equal size"):
            recipe.grpo_fields(options(recipe, "grpo", "--batch_size", "2", "--group_size", "4", *wrong))
    distilled = recipe.gkd_fields(options(recipe, "gkd", "--batch_size", "6", "--sequences", "3", "--steps", "7"))
    assert (distilled["per_device_train_batch_size"], distilled["gradient_accumulation_steps"]) == (3, 2)
    assert (distilled["max_steps"], distilled["beta"]) == (7, 1.0)  # 1: the reverse KL


def test_completions_are_scored_as_texts_or_messages_and_none_is_no_score(recipe):
    seen = []
    reward = recipe.math_reward(seen)
    said = [[{"role": "assistant", "content": "The answer is 8."}], "It is 9.", "8"]
    assert reward(said, answer=["#### 8", "#### 8", ""], prompts=[""] * 3) == [1.0, 0.0, None]
    assert reward(["9"], answer=["8"], accepted=[["8", "9"]]) == [1.0]
    assert seen == [0.5, 1.0]


def test_prompts_are_chats_with_the_system_prompt_first(recipe):
    text, chat = data.Example(0, "2+2?", [1], "4", {}), [{"role": "user", "content": "2+2?"}]
    assert recipe.messages_of(text, "") == chat
    system = {"role": "system", "content": "Be short."}
    assert recipe.messages_of(data.Example(0, chat, [1], "4", {}), "Be short.") == [system, *chat]


def test_tokens_and_samples_are_counted(recipe):
    rows = [{"labels": [-100, 5, 6], "seq_lengths": [2, 1]}, {"labels": [-100, -100, 7], "seq_lengths": [3]}]
    assert recipe.count_rows(rows, 99, 2) == Counter(samples=6, tokens=6, prompt_tokens=6)
    plain = [{"labels": row["labels"]} for row in rows]
    assert recipe.count_rows(plain, 2, 3) == Counter(samples=6, tokens=9, prompt_tokens=9)
    for sampled in (([[1, 2], [3]], "log-probabilities"), [[1, 2], [3]]):
        tally, trainer = Counter(), SimpleNamespace(_generate_single_turn=lambda ids, images, sampled=sampled: sampled)
        recipe.count_samples(trainer, tally)
        assert trainer._generate_single_turn([[7, 7], [8, 8]], None) == sampled
        assert tally == Counter(samples=2, tokens=3, prompt_tokens=4)


@pytest.mark.parametrize("wrong", [["sft", "--packing", "maybe"], ["gspo", "--clip_preset", "custom"], ["dpo"], []])
def test_options_that_do_not_exist_are_refused(recipe, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        recipe.main([*wrong[:1], "--model", "a", *SHARED, *wrong[1:]])
    assert stopped.value.code == 2 and "usage:" in capsys.readouterr().err


def test_a_folder_that_holds_something_is_not_written_over(recipe, tmp_path, capsys):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SystemExit):
        recipe.main(["sft", "--model", "a", *SHARED, "--out", str(tmp_path)])
    assert "choose another" in capsys.readouterr().err
