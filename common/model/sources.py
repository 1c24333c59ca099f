"""Resolves model names; tokenizer, dtype, and the tokens that end a completion."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.peft_utils import find_adapter_config_file

from common.base import bounded
from common.base.checks import require
from common.base.distributed import print_main
from common.tasks import chat_templates, toy

BUILT_IN = ("toy", "toy-teacher")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def find(name: str) -> str:
    """The folder or hub id of a model, for from_pretrained.

    Args:
        name: "toy" or "toy-teacher", which are built in; a folder; or a hub id,
            "Qwen/Qwen2.5-0.5B-Instruct".

    Raises:
        ValueError: the name looks like a path, and no folder exists there.
    """
    if name in BUILT_IN:
        return str(toy.folder(name))
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    folder = Path(name).expanduser()
    if looks_like_path and not folder.is_dir():
        raise ValueError(f"model {name!r}: no such folder; give an existing folder, a hub id, or 'toy'")
    return str(folder) if folder.is_dir() else name


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype of a configuration value.

    Args:
        dtype: "fp32", "bf16", "fp16", or "auto": bf16 on a GPU, fp32 on the CPU.
        device: of the model.

    Raises:
        ValueError: another value.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: must be auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer that pads on the left.

    Args:
        name: see `find`; adapters without a tokenizer have that of their base model.

    Raises:
        ValueError: there is none.
    """
    source = find(name)
    base = base_of(source)
    if base and Path(source).is_dir() and not (Path(source) / "tokenizer_config.json").is_file():
        return load_tokenizer(base)
    try:
        declared = get_tokenizer_config(source).get("tokenizer_class")
        # AutoTokenizer would take the usual class of the model type instead of a custom tokenizer
        loader = (
            PreTrainedTokenizerFast if declared in ("PreTrainedTokenizerFast", "TokenizersBackend") else AutoTokenizer
        )
        tokenizer = loader.from_pretrained(source, padding_side="left", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{not_found(name)} ({error})") from error
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):  # made up, without a vocabulary
        raise ValueError(not_found(name))
    return tokenizer


def end_token_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[int]:
    """All tokens that end a completion, from tokenizer, config and generation config.

    Chat models often have two; with one of them missing, the policy would be trained on text after
    its end.

    Args:
        tokenizer: the policy's tokenizer.
        model: the policy.

    Returns:
        Sorted token ids, at least one; ids without logits are left out, with a warning.

    Raises:
        ValueError: there is none, or one is not an integer.
    """
    ids: set[Any] = set()
    config = model.config.get_text_config()  # the text part of the config of a vision-language model
    for value in (tokenizer.eos_token_id, config.eos_token_id, model.generation_config.eos_token_id):
        given = [v for v in (value if isinstance(value, (list, tuple)) else [value]) if v is not None]
        odd = [v for v in given if not isinstance(v, int)]
        require(not odd, f"eos_token_id = {value!r}", "must be token ids, whole numbers",
                "correct it in config.json and generation_config.json of the model")  # fmt: skip
        ids.update(given)
    size = model.get_output_embeddings().weight.shape[0]
    if beyond := sorted(i for i in ids if not 0 <= i < size):
        print_main(f"warning: end tokens {beyond} are left out: the policy has logits for tokens 0 to {size - 1}")
        ids -= set(beyond)
    if not ids:
        raise ValueError("tokenizer and model name no end token: set tokenizer.eos_token, or no completion ever ends")
    turn_end = _turn_end(tokenizer)
    if turn_end is not None and turn_end not in ids:
        print_main(
            f"warning: the chat template ends a reply with {tokenizer.convert_ids_to_tokens(turn_end)!r}, which ends "
            "no completion here; if the policy writes it, set it as tokenizer.eos_token"
        )
    return sorted(ids)


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after a reply, if any."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "PROBE"}]
    try:
        [text] = chat_templates.render(tokenizer, [chat_templates.Chat(turns)], {}, header=False)
    except bounded.Exceeded:
        raise
    except ValueError:  # the template refuses this chat; prompts are checked later
        return None
    after = text.rpartition("PROBE")[2].strip()
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((i for token, i in special.items() if token and after.startswith(token)), None)


def not_found(name: str) -> str:
    """Error message for a name under which nothing can be loaded."""
    return (
        f"model {name!r} is neither 'toy' or 'toy-teacher', nor a folder with config.json, weights and tokenizer, nor "
        "a model that could be downloaded: check the name and the network, or download it and give the folder."
        " Code that comes with a model is never run: it must be of a kind that transformers knows"
    )


def base_of(source: str) -> str | None:
    """The base model of saved adapters; None if `source` holds none.

    Args:
        source: a folder, or a hub id.

    Raises:
        ValueError: the adapters name no base model, or are not LoRA.
    """
    file = find_adapter_config_file(source)
    if file is None:
        return None
    saved = json.loads(Path(file).read_text(encoding="utf-8"))
    kind, base = saved.get("peft_type"), saved.get("base_model_name_or_path")
    require(kind == "LORA", f"{source}: adapters of type {kind}", "must be LORA", "merge them with the peft library")
    require(bool(base), f"{source}: adapters", "must name their model", f"fill in base_model_name_or_path in {file}")
    return base
