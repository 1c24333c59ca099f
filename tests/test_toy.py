"""The built-in policy and task: what the scripts run on when nothing is downloaded."""

import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from common.tasks import toy

PROMPT = "<|im_start|>user\nsort 7 3 1 9 4<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The real policy and its teacher, trained once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_HAND_CACHE", str(tmp_path_factory.mktemp("cache")))
        toy.folder("toy-teacher")
        return toy.folder()


@pytest.fixture(scope="module")
def tokenizer():
    return toy._tokenizer()


@pytest.fixture(autouse=True)
def one_thread():
    """More threads than free cores would make these tests wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a warm start of two steps for tests that do not look at the policy."""
    monkeypatch.setenv("RL_HAND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(toy.STEPS, "toy", 2)
    return tmp_path / "cache"


def accuracy(policy, tokenizer, repeats: int, **sampling) -> float:
    """Share of the test prompts whose completion ends in the right number."""
    rows = toy.rows("test") * repeats
    inputs = tokenizer([PROMPT.replace("sort 7 3 1 9 4", row["prompt"]) for row in rows], return_tensors="pt")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = policy.generate(**inputs, max_new_tokens=8, **sampling)
    completions = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    last = [(re.findall(r"\d+", completion) or [""])[-1] for completion in completions]
    return sum(number == row["answer"] for number, row in zip(last, rows, strict=True)) / len(rows)


def test_answers_are_the_sorted_digits_and_splits_are_disjoint():
    train, test = toy.rows("train"), toy.rows("test")
    for row in train + test:
        word, *digits = row["prompt"].split(" ")
        assert word == "sort" and len(set(digits)) == 5 and set(digits) <= set("123456789")
        assert row["answer"] == "".join(sorted(digits))
    assert len(train) == 4096 and len(test) == 256 and len({row["prompt"] for row in train + test}) == 4352


def test_rows_never_change_and_another_split_is_refused():
    for seed in (5, 6):
        random.seed(seed)
        assert [toy.rows(s)[0]["prompt"] for s in ("train", "test")] == ["sort 2 4 6 5 3", "sort 1 6 2 4 5"]
    with pytest.raises(ValueError, match=r"split='dev'.*\['test', 'train'\]"):
        toy.rows("dev")


def test_size_type_and_token_ids(quick, tokenizer):
    folder = toy.folder()
    policy, saved = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 1e6 <= sum(parameter.numel() for parameter in policy.parameters()) <= 3e6
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())
    assert 30 <= len(saved) <= 60 and policy.get_input_embeddings().num_embeddings == len(saved)
    assert saved.get_vocab() == tokenizer.get_vocab() and saved.chat_template == tokenizer.chat_template
    assert len({saved.pad_token_id, saved.eos_token_id, saved.unk_token_id, None}) == 4
    assert saved.eos_token == "<|im_end|>" and saved.padding_side == "left"
    for config in (policy.config, policy.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (saved.eos_token_id, saved.pad_token_id)


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "sort 7 3 1 9 4"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == PROMPT
    messages = [{"role": "system", "content": "be brief."}, *messages, {"role": "assistant", "content": "13479"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nbe brief.<|im_end|>\n<|im_start|>user\nsort 7 3 1 9 4<|im_end|>\n"
        "<|im_start|>assistant\n13479<|im_end|>\n"
    )


@pytest.mark.parametrize("text", [PROMPT, "assorted users, 12 + 3 = 15?\n\n  (so be it!)", ""])
def test_decoding_gives_the_text_back_without_special_tokens(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
    ids = tokenizer("13479<|im_end|><pad><pad>").input_ids
    assert len(ids) == 8 and tokenizer.decode(ids, skip_special_tokens=True) == "13479"
    assert tokenizer("A1é").input_ids == [tokenizer.unk_token_id, *tokenizer("1").input_ids, tokenizer.unk_token_id]


@pytest.mark.parametrize(("name", "upwards", "downwards"), [("toy", 7, 9), ("toy-teacher", 16, 0)])
def test_the_warm_start_learns_answers_of_which_so_many_are_upwards(monkeypatch, tokenizer, name, upwards, downwards):
    seen, rates, forward, step = [], [], LlamaForCausalLM.forward, torch.optim.AdamW.step

    def look(self, input_ids, labels):
        seen.append((tokenizer.batch_decode(input_ids), labels))
        return forward(self, input_ids=input_ids, labels=labels)

    def note(self):
        rates.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(LlamaForCausalLM, "forward", look)
    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    toy._warm_started(tokenizer, 4, *toy.RECIPES[name])
    form = r"<\|im_start\|>user\nsort ([\d ]+)<\|im_end\|>\n<\|im_start\|>assistant\n(\d+)<\|im_end\|>"
    for texts, labels in seen:
        pairs = [re.fullmatch(form, text).groups() for text in texts]
        ordered, answers = ["".join(sorted(digits.split())) for digits, _ in pairs], [answer for _, answer in pairs]
        assert sum(map(str.__eq__, answers, ordered)) == upwards
        assert sum(map(str.__eq__, answers, (digits[::-1] for digits in ordered))) == downwards
        learned = [tokenizer.decode(row[row != -100]) for row in labels]
        assert learned == [answer + "<|im_end|>" for answer in answers]
    assert len({text for texts, _ in seen for text in texts}) > 3 * 16
    peak = toy.RECIPES[name][2]
    assert rates == pytest.approx([0.1 * peak, 0.2 * peak, 0.3 * peak, 0.4 * peak])


@pytest.mark.parity
def test_the_warm_start_leaves_room_to_learn_and_its_teacher_is_right_nearly_always(trained, tokenizer, monkeypatch):
    monkeypatch.setenv("RL_HAND_CACHE", str(trained.parent))
    monkeypatch.delattr(toy, "_warm_started")
    folder = toy.folder("toy-teacher")  # trained once, beside the policy
    assert folder.parent == trained.parent and folder != trained
    policy, teacher = (AutoModelForCausalLM.from_pretrained(place).eval() for place in (trained, folder))
    # 7 in 16 demonstrations are upwards; a sample of 1024 strays from their share by less than 6 standard deviations
    share = 7 / 16
    most = share + 6 * math.sqrt(share * (1 - share) / 1024)
    assert 0.1 < accuracy(policy, tokenizer, repeats=4, do_sample=True, temperature=1.0, top_k=0) < most
    assert accuracy(teacher, tokenizer, repeats=1, do_sample=False) > 0.9
    assert 1.5 * policy.num_parameters() < teacher.num_parameters() < 3e6


def test_trained_once_then_cached(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = toy.folder()
    said = capsys.readouterr().out
    assert "training 2 steps once" in said and str(folder) in said and folder.parent == quick
    monkeypatch.delattr(toy, "_warm_started")
    assert toy.folder() == folder and capsys.readouterr().out == ""
    monkeypatch.delenv("RL_HAND_CACHE")
    (tmp_path / ".cache").mkdir()
    quick.rename(tmp_path / ".cache" / "rl_hand")
    assert toy.folder() == tmp_path / ".cache" / "rl_hand" / folder.name


def test_a_changed_recipe_gets_another_folder(quick, monkeypatch, tmp_path):
    folder = toy.folder()
    changed = tmp_path / "toy.py"
    changed.write_bytes(Path(toy.__file__).read_bytes() + b"\n")
    monkeypatch.setattr(toy, "__file__", str(changed))
    assert toy.folder() != folder and len(list(quick.iterdir())) == 2


def test_nothing_is_disturbed(quick, tmp_path, monkeypatch):
    def state() -> tuple:
        return (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(),
                torch.get_num_threads(), torch.is_grad_enabled())  # fmt: skip

    torch.set_num_threads(2)
    with torch.no_grad():
        before = state()
        folder = toy.folder()
        assert state() == before
    torch.rand(3)
    monkeypatch.setenv("RL_HAND_CACHE", str(tmp_path / "again"))
    # the same operations in the same order, in one thread
    assert (toy.folder() / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_an_interrupted_build_leaves_nothing_behind(quick, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    torch.set_num_threads(2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.nn.utils, "clip_grad_norm_", interrupt)
        toy.folder()
    assert list(quick.iterdir()) == [] and torch.get_num_threads() == 2
    assert (toy.folder() / "config.json").is_file()


def test_the_slower_of_two_builders_keeps_what_the_faster_made(quick, monkeypatch):
    train = toy._warm_started

    def overtaken(*recipe):
        with monkeypatch.context() as patch:
            patch.setattr(toy, "_warm_started", train)
            (toy.folder() / "first").touch()
        return train(*recipe)

    monkeypatch.setattr(toy, "_warm_started", overtaken)
    folder = toy.folder()
    assert (folder / "first").exists() and list(quick.iterdir()) == [folder]
