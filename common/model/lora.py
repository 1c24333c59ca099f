"""LoRA: small trained matrices beside frozen weights.

An adapted layer computes W x + (alpha / rank) B A x, with W frozen and B zero at first (Hu et al.
2021, arXiv 2106.09685, Section 4.1). The reference needs no second model: it is W alone, or W with
the adapters that the run started from. common/model/merging.py switches to it, and merges adapters
into W for rollouts.

Dims: r rank, I inputs and O outputs of a layer.
"""

import dataclasses
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.base.checks import require
from common.model import images, merging, sources

ALL = "all-linear"
SEED = 0  # of new adapters: ranks have different seeds, but must start with equal adapters


@dataclasses.dataclass(frozen=True)
class Options:
    """The adapters of a policy.

    Attributes:
        rank: r.
        alpha: the output of an adapter is multiplied by alpha / rank.
        targets: "all-linear", or suffixes of layer names, such as "q_proj,v_proj".
        bits: 8 or 4 quantizes the frozen weights; 0 keeps them in the dtype of the model.
    """

    rank: int
    alpha: float
    targets: str = ALL
    bits: int = 0


def options(cfg: Any) -> Options | None:
    """The adapters in a configuration; None if all weights are trained.

    Args:
        cfg: a Config with `lora_rank`, `lora_alpha`, `lora_targets` and `load_bits`.
    """
    if not cfg.lora_rank:
        return None
    return Options(cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.load_bits)


def targets(model: PreTrainedModel, names: str) -> list[str]:
    """Names of the layers that get adapters: linear, in the decoder; no head, no vision tower.

    Args:
        model: without adapters.
        names: "all-linear", or suffixes of layer names, separated by commas.

    Raises:
        ValueError: a suffix matches no such layer, or matches the head.
    """
    head, excluded = model.get_output_embeddings(), set()
    if images.is_vlm(model.config):
        excluded = set(images.tower(model).modules())
    inside = set(model.get_decoder().modules()) - excluded - {head}
    # bitsandbytes layers are nn.Linear too
    linear = [name for name, m in model.named_modules() if m in inside and isinstance(m, (nn.Linear, Conv1D))]
    if names == ALL:
        return linear
    there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    chosen: dict[str, None] = {}
    head_name = next(name for name, m in model.named_modules() if m is head)
    for suffix in _split(names):
        require(
            not _has_suffix(head_name, suffix),
            f"lora_targets = {names!r}",
            f"{suffix!r} is the output head, whose plain weight log-probabilities are computed from",
            "leave it out",
        )
        found = [name for name in linear if _has_suffix(name, suffix)]
        require(
            bool(found),
            f"lora_targets = {names!r}",
            f"no linear layer of the decoder is named {suffix!r}",
            f"there are {there}; {ALL!r} takes them all",
        )
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _has_suffix(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith("." + suffix)


def add(model: PreTrainedModel, options: Options) -> nn.Module:
    """Wraps a model with new adapters, the only trained weights; its outputs do not change yet.

    Args:
        model: on its device, without dropout; its layers are replaced in place.
        options: see `Options`.

    Returns:
        A PeftModel; adapters in the dtype of the model.

    Raises:
        ValueError: as in `targets`.
    """
    import peft

    chosen = targets(model, options.targets)
    suffixes = sorted({name.rpartition(".")[2] for name in chosen})
    selected = [name for name, _ in model.named_modules() if any(_has_suffix(name, suffix) for suffix in suffixes)]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=suffixes if set(selected) == set(chosen) else chosen,  # short names if they select the same
    )
    return _wrap(model, config)


def resume(model: PreTrainedModel, source: str, options: Options) -> nn.Module:
    """Wraps a model with saved adapters, to train them further.

    Args:
        model: the base model of the adapters, as in `add`.
        source: folder or hub id of the adapters.
        options: must agree with the saved ones.

    Returns:
        A PeftModel.

    Raises:
        ValueError: rank, alpha or layers differ, or weights are missing.
    """
    wanted = set(targets(model, options.targets))
    model = wrap_saved(model, source)
    config = model.peft_config["default"]
    adapted = {name.removeprefix("base_model.model.") for name, _ in merging.named_layers(model)}
    rule = "must be that of the adapters trained further"
    remedy = "set it to that, or merge them first (scripts/merge_adapters.py) and begin with new ones"
    for name, own, saved in (("lora_rank", options.rank, config.r), ("lora_alpha", options.alpha, config.lora_alpha)):
        require(own == saved, f"{name} = {own}", f"{rule} in {source}, {saved}", remedy)
    mismatched = sorted({name.rpartition(".")[2] for name in wanted ^ adapted})
    require(
        not mismatched,
        f"lora_targets = {options.targets!r}",
        f"{rule} in {source}: {', '.join(mismatched)} differ",
        remedy,
    )
    return model


def wrap_saved(model: PreTrainedModel, source: str) -> nn.Module:
    """Wraps a model with saved adapters.

    Args:
        model: the base model of the adapters, as in `add`.
        source: folder or hub id of the adapters.

    Returns:
        A PeftModel; only the adapters are trainable.

    Raises:
        ValueError: the adapters do not fit the model.
    """
    import peft

    config = peft.LoraConfig.from_pretrained(source)
    config.inference_mode, config.base_model_name_or_path, config.lora_dropout = False, None, 0.0
    model = _wrap(model, config)
    _load(model, source)
    return model


@torch.no_grad()
def keep_start(replicas: Sequence[nn.Module], start_model: str) -> None:
    """Keeps the adapters that a run starts from as those of its reference; new adapters need none.

    Args:
        replicas: of the policy, wrapped by peft; after a resume with the weights of the checkpoint.
        start_model: that the run started from, as in `sources.find`.

    Raises:
        ValueError: its adapters are not those of the policy.
    """
    source = sources.find(start_model)
    if not sources.base_of(source):
        return
    weights = merging.trained_weights(replicas[0])
    present = [p.detach().clone() for p in weights]
    _load(replicas[0], source)  # as they were loaded when the run started
    for replica in replicas:
        merging.keep_reference(replica, weights)
    for weight, value in zip(weights, present, strict=True):
        weight.copy_(value)


def _load(model: nn.Module, source: str) -> None:
    """Loads saved adapters into those of a model; raises the errors of `wrap_saved`."""
    import peft
    from peft.utils.save_and_load import load_peft_weights

    folder = Path(source)
    require(
        not folder.is_dir() or any(folder.glob("adapter_model.*")),
        f"adapters in {source}",
        "adapter_model.safetensors is missing beside adapter_config.json",
        "copy the whole folder",
    )
    result = peft.set_peft_model_state_dict(model, load_peft_weights(source, device="cpu"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    mismatched = sorted(trained & set(result.missing_keys)) + sorted(result.unexpected_keys)
    require(
        not mismatched,
        f"adapters in {source}",
        f"must fit their model, but {len(mismatched)} weights have no counterpart ({', '.join(mismatched[:2])})",
        "name the model they were trained on as base_model_name_or_path in adapter_config.json",
    )


def save(model: nn.Module, folder: Path | str) -> None:
    """Saves a model; with adapters, only those and the name of their base model.

    Args:
        model: wrapped by peft or not.
        folder: destination.
    """
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder)
        return
    # the default "auto" would ask the hub for the vocabulary size of the base model
    model.save_pretrained(folder, save_embedding_layers=False)
    (Path(folder) / "README.md").unlink(missing_ok=True)  # an empty template


def quantization(bits: int, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Quantization for from_pretrained: of linear layers, but not of output head and embeddings.

    Args:
        bits: 8, or 4: NF4 with quantized scales (Dettmers et al. 2023, arXiv 2305.14314).
        dtype: of the matrix products.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    require(
        importlib.util.find_spec("bitsandbytes") is not None,
        f"load_bits = {bits}",
        "needs the package bitsandbytes",
        "pip install bitsandbytes, or set load_bits to 0",
    )
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    four = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    return BitsAndBytesConfig(load_in_4bit=True, **four)


def _wrap(model: PreTrainedModel, config: Any) -> nn.Module:
    import peft

    dtype = model.get_output_embeddings().weight.dtype
    config.fan_in_fan_out = any(isinstance(m, Conv1D) for m in model.get_decoder().modules())
    device = model.device
    every = range(torch.cuda.device_count()) if device.type == "cuda" else []  # manual_seed seeds all GPUs
    with torch.random.fork_rng(every), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute that transformers renamed
        torch.manual_seed(SEED)
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for p in model.parameters():
        if p.requires_grad:  # they would be fp32 beside quantized weights
            p.data = p.data.to(dtype)
    model.tracking = model.get_input_embeddings().register_forward_hook(_require_input_grad)
    return model


def _require_input_grad(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
    """Gives the first layer an input with a gradient, so that all layers share a compiled graph."""
    if torch.is_grad_enabled():
        output.requires_grad_(True)
