"""The built-in poster policies, and the supervised start that makes others like them."""

import json
import random
from pathlib import Path

import pytest
import torch
from bounds import assert_rounded
from comparing import assert_close, comparable, share
from conftest import ROOT, assert_equal_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.model import images, models, sources
from common.tasks.data import PromptStream
from grpo.poster import records, supervised, synthetic, toys
from grpo.poster.examples import load_demonstrations

SUPERVISED = ROOT / "grpo" / "poster" / "supervised.py"
NAMES = ("toy-poster", "toy-poster-vlm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The real things, but for training of two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_HAND_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(toys, "STEPS", dict.fromkeys(NAMES, 2))
        return {name: toys.folder(name) for name in NAMES}


@pytest.fixture
def few(tmp_path) -> str:
    """A file with a few records: to read and tokenise the 10,000 synthetic ones takes seconds."""
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in synthetic.records(0, "train", 16)))
    return str(path)


@pytest.fixture
def quick(tmp_path, monkeypatch) -> Path:
    """An empty cache, and warm starts of one step for tests that do not look at the policy."""
    monkeypatch.setenv("RL_HAND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(toys, "STEPS", dict.fromkeys(NAMES, 1))
    return tmp_path / "cache"


def test_the_text_model_is_an_ordinary_folder(folders):
    model = AutoModelForCausalLM.from_pretrained(folders["toy-poster"])
    tokenizer = AutoTokenizer.from_pretrained(folders["toy-poster"])
    assert 4e5 < model.num_parameters() < 2e6 and model.get_input_embeddings().num_embeddings == len(tokenizer) == 512
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.padding_side == "left"
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_the_tokenizer_gives_texts_back_and_is_short(folders):
    tokenizer = sources.load_tokenizer(str(folders["toy-poster"]))
    for text in ("Nacht é 夏日 🎉\n\t", synthetic.gold(synthetic.record(3, 2)), synthetic.SCHEMA, ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for row in synthetic.records(0, "test", 50):
        chat = tokenizer.apply_chat_template(records.messages(row, False), tokenize=False, add_generation_prompt=True)
        texts = (chat, synthetic.gold(row), chat + synthetic.gold(row))
        prompt, gold, both = (tokenizer(text)["input_ids"] for text in texts)
        assert prompt + gold == both and len(gold) <= 80
    pieces = [tokenizer.decode([i]) for i in tokenizer('"x":128,"fill":"#3D0C45"')["input_ids"]]
    assert pieces[-2:] == ["#3D0C45", '"'] and [p for p in pieces if p.isdigit()] == ["1", "2", "8"]


def test_the_chat_template_has_places_for_images(folders, tmp_path):
    processor, row = images.load_processor(folders["toy-poster-vlm"]), synthetic.record(0, 0)
    for with_images, before in ((True, "<|vision_start|><|image_pad|><|vision_end|>"), (False, "")):
        chat = records.messages(row, with_images)
        expected = f"<|im_start|>user\n{before}{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        for reader in (processor, processor.tokenizer):
            assert reader.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected
    (tmp_path / "row.jsonl").write_text(json.dumps(row))
    cfg = supervised.Config(train_data=str(tmp_path / "row.jsonl"), batch_size=1)
    (example,) = load_demonstrations(cfg, processor.tokenizer, processor)
    assert example.prompt_ids.count(processor.image_token_id) == 4  # 56 x 56 pixels
    assert processor.tokenizer.decode(list(example.completion_ids)) == synthetic.gold(row) + "<|im_end|>"
    assert all(example.learned)


@pytest.mark.poster
def test_built_once_then_cached_until_the_recipe_changes(quick, capsys, monkeypatch, tmp_path):
    for name in NAMES:
        folder = toys.folder(name)
        assert capsys.readouterr().out == f"built-in {name}: training 1 steps once, cached in {folder}\n"
        assert folder.parent == quick and toys.find(name) == str(folder)
    monkeypatch.setattr(toys, "_warm_start", pytest.fail)
    assert toys.folder(name) == folder and capsys.readouterr().out == ""
    assert toys.find("some/model") == "some/model"
    with pytest.raises(ValueError, match=r"use one of \['toy-poster', 'toy-poster-vlm'\]"):
        toys.folder("toy")
    monkeypatch.setattr(toys, "_warm_start", lambda *arguments: None)
    for place, path in enumerate(toys.SOURCES):
        changed = tmp_path / f"{place}.py"
        changed.write_bytes(path.read_bytes() + b"\n")
        with monkeypatch.context() as patch:
            patch.setattr(toys, "SOURCES", [*toys.SOURCES[:place], changed, *toys.SOURCES[place + 1 :]])
            assert toys.folder(name) != folder


def test_the_same_recipe_gives_the_same_model_and_disturbs_nothing(quick, tmp_path, monkeypatch):
    """Bit for bit: the same operations in the same order, in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.no_grad():
        before = torch.get_rng_state(), random.getstate()
        folder = toys.folder()
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
        assert torch.get_num_threads() == 2 and not torch.is_grad_enabled()
    torch.set_num_threads(threads)
    torch.rand(3)
    monkeypatch.setenv("RL_HAND_CACHE", str(tmp_path / "again"))
    again = toys.folder()
    for name in ("model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.poster
def test_of_an_interrupted_build_and_of_the_slower_of_two_builders_nothing_is_left(quick, monkeypatch):
    train = toys._warm_start

    def interrupt(*recipe):
        raise KeyboardInterrupt

    def overtaken(*recipe):
        monkeypatch.setattr(toys, "_warm_start", train)
        (toys.folder() / "first").touch()
        return train(*recipe)

    monkeypatch.setattr(toys, "_warm_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        toys.folder()
    assert list(quick.iterdir()) == []
    monkeypatch.setattr(toys, "_warm_start", overtaken)
    folder = toys.folder()
    assert (folder / "first").exists() and list(quick.iterdir()) == [folder]


@pytest.fixture
def posters(folders, few):
    """Options of a short run on a few records."""
    usual = dict(train_data=few, eval_data=few, micro_batch_tokens=400, eval_examples=4, max_new_tokens=100,
                 batch_size=4, warmup_steps=0, learning_rate=3e-3)  # fmt: skip
    return {name: dict(policy_model=folders[name], **usual) for name in NAMES}


@pytest.mark.parametrize("name", ["toy-poster", pytest.param("toy-poster-vlm", marks=pytest.mark.poster)])
def test_supervised_training_lowers_the_loss_is_judged_and_goes_on(launcher, folders, posters, tmp_path, name):
    options = posters[name] | dict(eval_every=4, save_every=4, lr_schedule="constant")
    run = launcher.run(SUPERVISED, tmp_path / "run", **options, steps=8).succeeded()
    assert [line["step"] for line in run.steps] == list(range(1, 9))
    assert run.steps[-1]["loss"] < run.steps[0]["loss"] - 0.5 and run.steps[-1]["nll"] < run.steps[0]["nll"] - 0.5
    judged = [line for line in run.lines if "eval_reward" in line]
    assert [line["step"] for line in judged] == [0, 4, 8] and all(0 <= line["eval_reward"] <= 1 for line in judged)
    assert run.checkpoints == ["checkpoint-000004", "checkpoint-000008"]
    folder = tmp_path / "run" / run.checkpoints[-1]
    before, after = (models.load_policy(str(place), torch.device("cpu"), "fp32")[1].state_dict()
                     for place in (folders[name], folder))  # fmt: skip
    frozen = {key for key in before if "visual" in key}
    assert all(torch.equal(before[key], after[key]) for key in frozen)  # the vision tower stays
    if name == "toy-poster-vlm":
        assert frozen and images.load_processor(folder).image_token_id is not None
    for steps in (4, 8):
        parts = launcher.run(SUPERVISED, tmp_path / "parts", **options, steps=steps).succeeded()
    later, expected = ([line for line in comparable(one.lines) if line["step"] > 4] for one in (parts, run))
    assert later == expected
    last = [models.load_policy(str(one.out_dir / "checkpoint-000008"), torch.device("cpu"), "fp32")[1].state_dict()
            for one in (parts, run)]  # fmt: skip
    assert_equal_weights(*last)
    changed = {key for key in before if not torch.equal(before[key], last[0][key])}
    assert changed == before.keys() - frozen


@pytest.mark.poster
@pytest.mark.parametrize("options", [{}, dict(fsdp=True), dict(lora_rank=2)], ids=str)
def test_two_ranks_train_as_one_process(launcher, posters, tmp_path, options):
    usual, own = posters["toy-poster"] | dict(steps=2, eval_every=0), {k: v for k, v in options.items() if k != "fsdp"}
    one = launcher.run(SUPERVISED, tmp_path / "one", **usual | own).succeeded()
    two = launcher.run(SUPERVISED, tmp_path / "two", 2, **usual | options).succeeded()
    if "lora_rank" in options:
        for line, other in zip(two.steps, one.steps, strict=True):
            assert line["nll"] == pytest.approx(other["nll"], rel=4 * share())
    else:
        assert_close(two, one)


def test_the_loss_is_the_mean_over_the_tokens_of_the_posters(launcher, folders, posters, few, tmp_path):
    """Against PyTorch's own cross-entropy, and the same however the batch is cut."""
    folder = folders["toy-poster"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), sources.load_tokenizer(str(folder))
    losses = []
    for size in (8192, 100):
        options = posters["toy-poster"] | dict(batch_size=3, steps=1, eval_every=0, micro_batch_tokens=size)
        losses.append(launcher.run(SUPERVISED, tmp_path / str(size), **options).succeeded().steps[0]["loss"])
    cfg, total, count = supervised.Config(train_data=few, batch_size=3), 0.0, 0
    for row in PromptStream(load_demonstrations(cfg, tokenizer, None), 3, 0).next():
        prompt, gold = list(row.prompt_ids), list(row.completion_ids)
        assert gold[-1] == tokenizer.eos_token_id and all(row.learned)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + gold])).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(gold), reduction="sum").item()
        count += len(gold)
    # the longest sums: 7 products of up to 512 terms in each of 2 layers, the head, the softmax, the mean over tokens
    terms = 2 * 7 * 512 + 2 * len(tokenizer) + count
    assert_rounded(losses, [total / count] * 2, terms=terms, magnitude=logits.abs().max().item() + total / count,
                   dtype=torch.float32)  # fmt: skip


def test_supervised_refuses_data_it_cannot_use_and_settings_that_break_a_rule(folders, few, tmp_path):
    usual = dict(policy_model=str(folders["toy-poster"]), train_data=few, device="cpu", out_dir=str(tmp_path / "run"))
    for changes, message in (
        ({"max_tokens": 50}, "0 of 16 records fit into max_tokens = 50: must be at least batch_size = 16"),
        ({"train_data": "nothing.jsonl"}, "no records at 'nothing.jsonl'"), ({"steps": 0}, "steps = 0"),
        ({"dtype": "int8"}, "dtype = 'int8'"), ({"max_grad_norm": 0.0}, "max_grad_norm = 0"),
        ({"max_tokens": 1}, "max_tokens = 1"), ({"max_images": 0}, "max_images = 0"),
    ):  # fmt: skip
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            supervised.main(supervised.Config(**(usual | changes)))
