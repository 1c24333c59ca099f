"""LoRA: small trained matrices beside frozen weights.

An adapted layer computes W x + (alpha / rank) B A x, with W frozen and B zero at first (Hu et al.
2021, arXiv 2106.09685, Section 4.1). The reference needs no second model: it is W alone, or W with
the adapters that the run started from. common/model/merging.py switches to it, and merges adapters
into W for rollouts; common/model/experts.py adapts the experts of a mixture.

Dims: r rank, I inputs and O outputs of a layer.
"""

import dataclasses
import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.base.checks import require
from common.model import experts, merging, sources
from common.model.lora_targets import ALL, report, shorten, targets

SEED = 0  # of new adapters: ranks have different seeds, but must start with equal adapters


@dataclasses.dataclass(frozen=True)
class Options:
    """The adapters of a policy.

    Attributes:
        rank: r.
        alpha: the output of an adapter is multiplied by alpha / rank.
        targets: "all-linear", or suffixes of names, such as "q_proj,v_proj,experts".
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
    if options.targets == ALL:
        report(model, chosen)
    layers, parameters = (dict(every) for every in (model.named_modules(), model.named_parameters()))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=shorten([name for name in chosen if name in layers], layers, 1),
        target_parameters=shorten([name for name in chosen if name not in layers], parameters, 2) or None,
    )
    with _targets_as_they_are():
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
    wanted = targets(model, options.targets)
    if options.targets == ALL:
        report(model, wanted)
    model = wrap_saved(model, source)
    config = model.peft_config["default"]
    adapted = {experts.adapted_name(name, layer) for name, layer in merging.named_layers(model)}
    rule = "must be that of the adapters trained further"
    remedy = "set it to that, or merge them first (scripts/merge_adapters.py) and begin with new ones"
    for name, own, saved in (("lora_rank", options.rank, config.r), ("lora_alpha", options.alpha, config.lora_alpha)):
        require(own == saved, f"{name} = {own}", f"{rule} in {source}, {saved}", remedy)
    mismatched = sorted({name.rpartition(".")[2] for name in adapted.symmetric_difference(wanted)})
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

    config, weights = peft.LoraConfig.from_pretrained(source), _read(source)
    config.inference_mode, config.base_model_name_or_path, config.lora_dropout = False, None, 0.0
    old = any(re.search(r"\.experts\.\d+\.", name) for name in weights)  # from when experts were layers
    with nullcontext() if old else _targets_as_they_are():
        model = _wrap(model, config)
    _load(model, source, weights)
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
    _load(replicas[0], source, _read(source))  # as they were loaded when the run started
    for replica in replicas:
        merging.keep_reference(replica, weights)
    for weight, value in zip(weights, present, strict=True):
        weight.copy_(value)


def _read(source: str) -> dict[str, torch.Tensor]:
    """The weights of saved adapters; raises the errors of `wrap_saved`."""
    from peft.utils.save_and_load import load_peft_weights

    folder = Path(source)
    require(
        not folder.is_dir() or any(folder.glob("adapter_model.*")),
        f"adapters in {source}",
        "adapter_model.safetensors is missing beside adapter_config.json",
        "copy the whole folder",
    )
    return load_peft_weights(source, device="cpu")


def _load(model: nn.Module, source: str, weights: dict[str, torch.Tensor]) -> None:
    """Loads saved adapters into those of a model; raises the errors of `wrap_saved`."""
    import peft

    result = peft.set_peft_model_state_dict(model, weights)
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


@contextmanager
def _targets_as_they_are() -> Iterator[None]:
    """Makes peft take names literally: it would take layers like `shared_experts.down_proj` for experts, by their name.

    It does so for adapters of transformers 4, where the experts were such layers.
    """
    from peft.utils import transformers_weight_conversion as conversion

    usual = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = usual


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
    experts.prepare(model)
    for p in model.parameters():
        if p.requires_grad:  # they would be fp32 beside quantized weights
            p.data = p.data.to(dtype)
    model.tracking = model.get_input_embeddings().register_forward_hook(_require_input_grad)
    return model


def _require_input_grad(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
    """Gives the first layer an input with a gradient, so that all layers share a compiled graph."""
    if torch.is_grad_enabled():
        output.requires_grad_(True)
