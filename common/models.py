"""Loading: the policy with its tokenizer, frozen models, and what must be true of both before training."""

import copy
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging

from common import images, logprobs
from common.distributed import print_main

logging.disable_progress_bar()  # bars of loading and saving would tear the one of the training
SMALL = 5_000_000  # parameters; below, a second thread gains little, and on busy cores threads wait for one another
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def find(name: str) -> str:
    """Where a model comes from: "toy" and "toy-teacher" are built here, a folder is itself, anything else is a hub id.

    Args:
        name: "toy", "toy-teacher", a folder, or a hub id such as "Qwen/Qwen2.5-0.5B-Instruct".

    Returns:
        What transformers' from_pretrained takes.

    Raises:
        ValueError: it looks like a path, and nothing is there.
    """
    if name in ("toy", "toy-teacher"):
        from common import toy

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
        device: where the model will live.

    Raises:
        ValueError: another value.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: must be auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load_policy(
    name: str, device: torch.device, dtype: str, gradient_checkpointing: bool = False
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Loads the model to be trained, dropout off, and its tokenizer, with padding repaired.

    Args:
        name: see `find`.
        device: where the weights go.
        dtype: see `pick_dtype`.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.

    Returns:
        The tokenizer (padding on the left, pad token not the end token) and the model in train mode.

    Raises:
        ValueError: the model cannot be found, or is of a kind the log-probabilities would be wrong for.
    """
    tokenizer = load_tokenizer(name)
    model = _load(name, device, dtype)
    repair_padding(tokenizer, model)
    if gradient_checkpointing:
        # renamed in transformers 5.24; the old name goes in 6
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return tokenizer, model.train()


def load_frozen(name: str, device: torch.device, dtype: str) -> PreTrainedModel:
    """Loads a model that is never trained: eval mode, no gradients.

    Args:
        name: see `find`.
        device: where the weights go.
        dtype: see `pick_dtype`.
    """
    return _load(name, device, dtype).eval().requires_grad_(False)


def load_spread(name: str, devices: list[torch.device], dtype: str) -> PreTrainedModel:
    """Loads a frozen model over several GPUs, some of its layers on each, one GPU at work at a time.

    Args:
        name: see `find`.
        devices: GPUs, which share the weights about equally; one device: as `load_frozen`.
        dtype: see `pick_dtype`.

    Raises:
        ValueError: as `load_policy`.
    """
    if len(devices) == 1:
        return load_frozen(name, devices[0], dtype)
    room = {device.index: torch.cuda.mem_get_info(device)[0] for device in devices}
    model = _read(name, pick_dtype(dtype, devices[0]), device_map="balanced", max_memory=room)
    logprobs.check_head(model)
    return model.eval().requires_grad_(False)


def fingerprint(model: nn.Module) -> str:
    """A name for weights: a checkpoint that was replaced under the same name has another one.

    Args:
        model: of which the first few numbers of every parameter are looked at.

    Returns:
        SHA-256 in hexadecimal digits.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer that pads on the left.

    Args:
        name: see `find`.

    Raises:
        ValueError: there is none.
    """
    source = find(name)
    try:
        declared = get_tokenizer_config(source).get("tokenizer_class")
        # AutoTokenizer would take the usual class of the model type, and lose a tokenizer of one's own
        loader = (
            PreTrainedTokenizerFast if declared in ("PreTrainedTokenizerFast", "TokenizersBackend") else AutoTokenizer
        )
        tokenizer = loader.from_pretrained(source, padding_side="left", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{_not_found(name)} ({error})") from error
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):  # made up for lack of a vocabulary
        raise ValueError(_not_found(name))
    return tokenizer


def end_token_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[int]:
    """Every token that ends a completion: the tokenizer's, the config's and those of the generation config.

    Chat models often have two; a completion that goes on after the second would be trained on its own tail.

    Args:
        tokenizer: the policy's tokenizer.
        model: the policy.

    Returns:
        Sorted token ids, at least one.

    Raises:
        ValueError: there is none.
    """
    ids = set()
    config = model.config.get_text_config()  # of a model that reads images; otherwise the config itself
    for value in (tokenizer.eos_token_id, config.eos_token_id, model.generation_config.eos_token_id):
        ids.update(value if isinstance(value, (list, tuple)) else [value])
    ids.discard(None)
    if not ids:
        raise ValueError("tokenizer and model name no end token: set tokenizer.eos_token, or no completion ever ends")
    return sorted(ids)


def repair_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Gives the tokenizer a pad token that is not its end token, and says so.

    With pad = eos, whoever trains on the saved model later may mask its end tokens as padding, and it never stops.

    Args:
        tokenizer: changed in place where needed.
        model: its pad id follows the tokenizer's; embeddings grow only if no token of the vocabulary can serve.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        vocabulary = tokenizer.get_vocab()
        usual = ["<|endoftext|>", "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<unk>", "[UNK]"]
        free = [token for token in usual if token in vocabulary and token != tokenizer.eos_token]
        before = tokenizer.pad_token
        tokenizer.add_special_tokens({"pad_token": free[0] if free else "<|pad|>"})
        print_main(f"pad token was {before!r}, the end token {tokenizer.eos_token!r}: now {tokenizer.pad_token!r}")
    if tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    model.config.get_text_config().pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id


def replicate(model: PreTrainedModel, devices: tuple[torch.device, ...]) -> list[PreTrainedModel]:
    """The model itself on the first device and a frozen copy on each of the others, to roll out on all of them.

    Args:
        model: the policy, on devices[0].
        devices: one per replica.

    Returns:
        One model per device; `refresh` copies the weights again after an update.
    """
    return [model, *(copy.deepcopy(model).requires_grad_(False).to(device) for device in devices[1:])]


@torch.no_grad()
def refresh(replicas: list[PreTrainedModel]) -> None:
    """Copies the weights of the first replica to the others."""
    source = list(replicas[0].parameters())
    for replica in replicas[1:]:
        for target, weight in zip(replica.parameters(), source, strict=True):
            target.copy_(weight, non_blocking=True)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode, and afterwards the mode the model was in, also after an error.

    Args:
        model: in train mode, gradient checkpointing would switch its cache off.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def merged_adapters(model: nn.Module) -> Iterator[None]:
    """Adds LoRA adapters to the weights they belong to, and afterwards puts those weights back bit for bit.

    Unmerging would subtract what was added, and in bf16 a good part of the weights would not come back.

    Args:
        model: wrapped by peft, or not: then nothing happens.
    """
    if not hasattr(model, "peft_config"):
        yield
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer) and not m.merged and not m.disable_adapters]
    weights = [p for layer in layers for p in layer.get_base_layer().parameters(recurse=False)]
    places, before = [p.data for p in weights], [p.detach().clone() for p in weights]
    try:
        for layer in layers:
            layer.merge()
        for weight, place in zip(weights, places, strict=True):
            if weight.data_ptr() != place.data_ptr():  # some kinds of adapter make a new tensor
                place.copy_(weight.data)
                weight.data = place
        yield
    finally:
        with torch.no_grad():
            for weight, place, value in zip(weights, places, before, strict=True):
                weight.data = place.copy_(value)
        for layer in layers:
            layer.merged_adapters.clear()


def warn_learning_rate(
    learning_rate: float, model: nn.Module, most: float = 2e-5, usual: str = "by RL: 5e-6 (up to 0.5 B) to 1e-6 (7 B)"
) -> None:
    """Says so when the learning rate is far above what a policy of this size bears; the built-in one bears more.

    Args:
        learning_rate: as configured.
        model: the policy.
        most: what is still possible.
        usual: what is usual, for the message.
    """
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    if millions > 50 and learning_rate > most:
        print_main(
            f"warning: learning_rate = {learning_rate:g} for a policy of {millions:.0f} M parameters; usual for full "
            f"fine-tuning {usual}"
        )


def _load(name: str, device: torch.device, dtype: str) -> PreTrainedModel:
    model = _read(name, pick_dtype(dtype, device)).to(device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ and model.num_parameters() < SMALL:
        torch.set_num_threads(1)
    logprobs.check_head(model)
    return model


def _read(name: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """The model, dropout off; in CPU memory, or where the options of from_pretrained say."""
    source = find(name)
    # rotary positions are an fp32 product, of which TF32 would keep 11 bits: positions above 2,048 would be rounded
    torch.set_float32_matmul_precision("highest")
    try:
        kind = AutoModelForImageTextToText if images.is_vlm(source) else AutoModelForCausalLM
        model = kind.from_pretrained(source, dtype=dtype, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{_not_found(name)} ({error})") from error
    _switch_dropout_off(model)
    return model


def _switch_dropout_off(model: nn.Module) -> None:
    """Two forward passes must agree, or the first ratio is not 1. The config, which is saved, keeps its values."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _not_found(name: str) -> str:
    return (
        f"model {name!r} is neither 'toy' or 'toy-teacher', nor a folder with config.json, weights and tokenizer, nor "
        "a model that could be downloaded: check the name and the network, or download it elsewhere and give the folder"
    )
