"""The built-in policy and task: what the scripts run on when nothing is downloaded."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run, fork_script
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import toy

PROMPT = "<|im_start|>user\nsort 7 3 1 9 4<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory) -> Path:
    """The real thing, trained once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_HAND_CACHE", str(tmp_path_factory.mktemp("cache")))
        return toy.folder()


@pytest.fixture(scope="session")
def policy(policy_folder):
    return AutoModelForCausalLM.from_pretrained(policy_folder).eval()


@pytest.fixture(scope="session")
def tokenizer(policy_folder):
    return AutoTokenizer.from_pretrained(policy_folder)


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
    texts = [PROMPT.replace("sort 7 3 1 9 4", row["prompt"]) for row in rows]
    inputs = tokenizer(texts, return_tensors="pt")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = policy.generate(**inputs, max_new_tokens=8, **sampling)
    completions = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    last = [(re.findall(r"\d+", completion) or [""])[-1] for completion in completions]
    return sum(number == row["answer"] for number, row in zip(last, rows, strict=True)) / len(rows)


# ---- task ----


def test_answers_are_the_sorted_digits():
    for row in toy.rows("train") + toy.rows("test"):
        word, *digits = row["prompt"].split(" ")
        assert word == "sort" and len(set(digits)) == 5 and set(digits) <= set("123456789")
        assert row["answer"] == "".join(sorted(digits))


def test_splits_are_disjoint_and_have_their_sizes():
    train, test = ({row["prompt"] for row in toy.rows(split)} for split in ("train", "test"))
    assert len(train) == 4096 and len(test) == 256 and not train & test


def test_rows_never_change():
    first = [toy.rows(split)[0] for split in ("train", "test")]
    random.seed(5)
    assert [toy.rows(split)[0] for split in ("train", "test")] == first
    assert [row["prompt"] for row in first] == ["sort 2 4 6 5 3", "sort 1 6 2 4 5"]


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r"split='dev'.*\['test', 'train'\]"):
        toy.rows("dev")


# ---- policy ----


def test_size_and_type(policy, tokenizer):
    assert 1e6 <= sum(parameter.numel() for parameter in policy.parameters()) <= 3e6
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())
    assert 30 <= len(tokenizer) <= 60 and policy.get_input_embeddings().num_embeddings == len(tokenizer)


def test_token_ids_agree(policy, tokenizer):
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, None}) == 4
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.padding_side == "left"
    for config in (policy.config, policy.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "sort 7 3 1 9 4"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == PROMPT
    messages = [{"role": "system", "content": "be brief."}, *messages, {"role": "assistant", "content": "13479"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nbe brief.<|im_end|>\n<|im_start|>user\nsort 7 3 1 9 4<|im_end|>\n"
        "<|im_start|>assistant\n13479<|im_end|>\n"
    )


@pytest.mark.parametrize("text", [PROMPT, "13479", "assorted users, 12 + 3 = 15?\n\n  (so be it!)", " ", ""])
def test_decoding_gives_the_text_back(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text


def test_special_tokens_are_skipped_and_unknown_characters_kept_apart(tokenizer):
    ids = tokenizer("13479<|im_end|><pad><pad>").input_ids
    assert len(ids) == 8 and tokenizer.decode(ids, skip_special_tokens=True) == "13479"
    assert tokenizer("A1é").input_ids == [tokenizer.unk_token_id, *tokenizer("1").input_ids, tokenizer.unk_token_id]


def test_left_padding_does_not_change_the_completion(policy, tokenizer):
    longer = PROMPT.replace("sort", "please sort")
    batch = tokenizer([PROMPT, longer], padding=True, return_tensors="pt")
    assert batch.attention_mask[0, 0] == 0
    together = policy.generate(**batch, max_new_tokens=6, do_sample=False)[0, -6:]
    alone = policy.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=6, do_sample=False)[0, -6:]
    assert torch.equal(together, alone)


def test_the_warm_start_leaves_room_to_learn(policy, tokenizer):
    assert 0.25 <= accuracy(policy, tokenizer, repeats=4, do_sample=True, temperature=1.0, top_k=0) <= 0.40
    assert 0.10 <= accuracy(policy, tokenizer, repeats=1, do_sample=False) <= 0.50


@pytest.mark.slow
def test_the_teacher_is_right_nearly_always_and_larger(policy_folder, policy, tokenizer, monkeypatch):
    monkeypatch.setenv("RL_HAND_CACHE", str(policy_folder.parent))  # beside the policy
    folder = toy.folder("toy-teacher")
    assert folder.parent == policy_folder.parent and folder != policy_folder
    teacher = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert accuracy(teacher, tokenizer, repeats=1, do_sample=False) > 0.9
    assert 1.5 * policy.num_parameters() < teacher.num_parameters() < 3e6
    own = AutoTokenizer.from_pretrained(folder)
    assert own.get_vocab() == tokenizer.get_vocab() and own.chat_template == tokenizer.chat_template
    monkeypatch.delattr(toy, "_warm_started")
    assert toy.folder("toy-teacher") == folder  # trained once


# ---- cache ----


def test_trained_once_then_cached(quick, capsys, monkeypatch):
    folder = toy.folder()
    assert capsys.readouterr().out == f"built-in policy: training 2 steps once, cached in {folder}\n"
    assert folder.parent == quick
    monkeypatch.delattr(toy, "_warm_started")
    assert toy.folder() == folder and capsys.readouterr().out == ""


def test_default_place(quick, monkeypatch, tmp_path):
    monkeypatch.delenv("RL_HAND_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert toy.folder().parent == tmp_path / ".cache" / "rl_hand"


def test_a_changed_recipe_gets_another_folder(quick, monkeypatch, tmp_path):
    folder = toy.folder()
    edited = tmp_path / "toy.py"
    edited.write_text(Path(toy.__file__).read_text().replace('"toy": 150', '"toy": 151'))
    monkeypatch.setattr(toy, "__file__", str(edited))
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


TOGETHER = """
import os, sys, time
from pathlib import Path
from common import toy

def ready(real=toy._tokenizer):  # the first thing that is done where there is no policy yet
    place = Path(sys.argv[1])
    (place / f"ready{os.environ['RANK']}").touch()
    while len(list(place.glob("ready*"))) < 2:
        time.sleep(0.001)
    return real()

toy.STEPS["toy"], toy._tokenizer = 2, ready
print("folder", toy.folder())
"""


def test_two_processes_at_once(quick, tmp_path):
    (tmp_path / "together.py").write_text(TOGETHER)
    outputs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    environment = {"RL_HAND_CACHE": str(quick)}
    processes = fork_script(tmp_path / "together.py", [str(tmp_path)], outputs, environment)
    Run(processes, outputs, tmp_path).wait().succeeded()
    (folder,) = quick.iterdir()
    assert [output.read_text().splitlines()[-1] for output in outputs] == [f"folder {folder}"] * 2
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 1e6
