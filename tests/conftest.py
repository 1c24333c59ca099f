"""Tiny tokenizers and models, built from configs: nothing is downloaded."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = [
    "<pad>",
    "<unk>",
    "<im_start>",
    "<im_end>",
    "user",
    "assistant",
    "\n",
    "+",
    "-",
    "=",
    "?",
    "####",
    ".",
    "what",
    "is",
]
WORDS += [str(n) for n in range(40)]
TEMPLATE = (
    "{% for m in messages %}<im_start> {{ m['role'] }} {{ m['content'] }} <im_end> {% endfor %}"
    "{% if add_generation_prompt %}<im_start> assistant {% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<im_end>",
        additional_special_tokens=["<im_start>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast


def build_model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if family == "qwen2":
        return Qwen2ForCausalLM(
            Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512, eos_token_id=3,
                        pad_token_id=0, bos_token_id=None, initializer_range=0.2)
        )  # fmt: skip
    # default dropout of 0.1, learned absolute positions
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=3, bos_token_id=None,
                   pad_token_id=0, initializer_range=0.2)
    )  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory) -> dict[str, Path]:
    """Saved folders of the tiny models: {"qwen2": path, "gpt2": path}."""
    folders = {}
    for family in ("qwen2", "gpt2"):
        folders[family] = tmp_path_factory.mktemp(family)
        build_model(family).save_pretrained(folders[family])
        build_tokenizer().save_pretrained(folders[family])
    return folders


@pytest.fixture(scope="session")
def sums_file(tmp_path_factory) -> Path:
    """Forty rows of one-digit sums."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"prompt": f"{a} + {b} = ?" + " ." * (a % 3), "answer": str(a + b)} for a in range(8) for b in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
