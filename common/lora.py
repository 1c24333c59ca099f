"""LoRA: small trained matrices beside frozen weights; without them the same model is the reference.

An adapted layer computes W x + (alpha / rank) B A x, with W frozen and B zero at first (Hu et al. 2021, arXiv
2106.09685, Section 4.1). Rollouts take the sum W + (alpha / rank) B A in place of W, and run as fast as without
adapters; afterwards W comes back bit for bit.

Dims: r rank, I inputs and O outputs of a layer.
"""

import dataclasses
import importlib.util
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.peft_utils import find_adapter_config_file

from common import images
from common.config import require
from common.devices import free_bytes
from common.optim import host_memory

ALL = "all-linear"
SEED = 0  # of new adapters: ranks have seeds of their own, and must begin with the same ones
ROOM = 0.25  # of the free GPU memory: up to here, weights that are merged into are kept there and not in CPU memory


@dataclasses.dataclass(frozen=True)
class Options:
    """What adapters a policy is given.

    Attributes:
        rank: r, of each of them.
        alpha: what they add is multiplied by alpha / rank.
        targets: "all-linear", or endings of layer names, "q_proj,v_proj".
        bits: 8 or 4: the frozen weights are held in so many; 0: in the dtype of the model.
    """

    rank: int
    alpha: float
    targets: str = ALL
    bits: int = 0


def options(cfg: Any) -> Options | None:
    """The adapters that a configuration asks for.

    Args:
        cfg: a Config with `lora_rank`, `lora_alpha`, `lora_targets` and `load_bits`.

    Returns:
        None if it asks for none, and all weights are trained.
    """
    if not cfg.lora_rank:
        return None
    return Options(cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.load_bits)


def check(cfg: Any) -> None:
    """Requires what must hold for the fields about adapters.

    Args:
        cfg: a Config; a field that it lacks is as if it had its default.

    Raises:
        ValueError: a rule is broken.
    """
    rank, alpha, bits = getattr(cfg, "lora_rank", 0), getattr(cfg, "lora_alpha", 1.0), getattr(cfg, "load_bits", 0)
    require(rank >= 0, f"lora_rank = {rank}", "must be at least 0", "0 trains all weights, 16 is usual for adapters")
    require(alpha > 0, f"lora_alpha = {alpha}", "must be above 0", "twice lora_rank is usual")
    require(bits in (0, 4, 8), f"load_bits = {bits}", "must be 0, 4 or 8", "choose one of these")
    require(
        rank > 0 or not bits,
        f"load_bits = {bits}, lora_rank = 0",
        "weights in few bits cannot be trained",
        "set lora_rank, or leave load_bits at 0",
    )
    require(
        not bits or not getattr(cfg, "param_offload", False),
        f"load_bits = {bits}, param_offload = True",
        "weights in few bits stay on the GPU",
        "leave one of them off",
    )
    if not rank:
        return
    names = getattr(cfg, "lora_targets", ALL)
    require(any(_split(names)), f"lora_targets = {names!r}", "must name layers", f"give {ALL!r}, or names")
    refresh = getattr(cfg, "reference_refresh", 0)
    require(
        not refresh,
        f"reference_refresh = {refresh}, lora_rank = {rank}",
        "the reference is the policy without adapters",
        "leave one of them at 0",
    )
    require(
        not getattr(cfg, "fsdp", False),
        f"fsdp = True, lora_rank = {rank}",
        "fsdp shards what is trained, and with LoRA that is little",
        "leave one off; load_bits makes the frozen weights smaller",
    )


# ---- which layers ----


def targets(model: PreTrainedModel, names: str) -> list[str]:
    """The layers that get adapters: linear ones of the decoder; never the output head, nor a vision tower.

    Args:
        model: not wrapped yet.
        names: "all-linear", or endings of layer names with commas between.

    Returns:
        Full names.

    Raises:
        ValueError: a name is that of no such layer, or of the head.
    """
    head, excluded = model.get_output_embeddings(), set()
    if images.is_vlm(model.config):
        excluded = set(images.tower(model).modules())
    inside = set(model.get_decoder().modules()) - excluded - {head}
    # those of bitsandbytes are nn.Linear too
    linear = [name for name, m in model.named_modules() if m in inside and isinstance(m, (nn.Linear, Conv1D))]
    if names == ALL:
        return linear
    there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    chosen: dict[str, None] = {}
    head_name = next(name for name, m in model.named_modules() if m is head)
    for ending in _split(names):
        require(
            not _ends(head_name, ending),
            f"lora_targets = {names!r}",
            f"{ending!r} is the output head, whose plain weight log-probabilities are computed from",
            "leave it out",
        )
        found = [name for name in linear if _ends(name, ending)]
        require(
            bool(found),
            f"lora_targets = {names!r}",
            f"no linear layer of the decoder is named {ending!r}",
            f"there are {there}; {ALL!r} takes them all",
        )
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith("." + ending)


# ---- making, loading and saving adapters ----


def add(model: PreTrainedModel, options: Options) -> nn.Module:
    """Wraps a model with new adapters, which are all that is trained; what it computes stays the same at first.

    Args:
        model: on its device, dropout off; its layers are replaced in place.
        options: see `Options`.

    Returns:
        A PeftModel; adapters in the dtype of the model.

    Raises:
        ValueError: as `targets`.
    """
    import peft

    chosen = targets(model, options.targets)
    endings = sorted({name.rpartition(".")[2] for name in chosen})
    hit = [name for name, _ in model.named_modules() if any(_ends(name, ending) for ending in endings)]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=endings if set(hit) == set(chosen) else chosen,  # short names where they say the same
    )
    return _wrap(model, config)


def resume(model: PreTrainedModel, source: str, options: Options) -> nn.Module:
    """Wraps a model with adapters that were saved, to train them further.

    Args:
        model: as in `add`: the one that they belong to.
        source: folder or hub id of the adapters.
        options: what they have to be like.

    Returns:
        A PeftModel.

    Raises:
        ValueError: they are of another rank, alpha, or on other layers; or not all there.
    """
    wanted = set(targets(model, options.targets))
    model = wrap_saved(model, source)
    config = model.peft_config["default"]
    adapted = {name.removeprefix("base_model.model.") for name, _ in _named_layers(model)}
    rule = "must be that of the adapters trained further"
    remedy = "set it to that, or merge them first (scripts/merge_adapters.py) and begin with new ones"
    for name, own, saved in (("lora_rank", options.rank, config.r), ("lora_alpha", options.alpha, config.lora_alpha)):
        require(own == saved, f"{name} = {own}", f"{rule} in {source}, {saved}", remedy)
    odd = sorted({name.rpartition(".")[2] for name in wanted ^ adapted})
    require(not odd, f"lora_targets = {options.targets!r}", f"{rule} in {source}: {', '.join(odd)} differ", remedy)
    return model


def wrap_saved(model: PreTrainedModel, source: str) -> nn.Module:
    """Wraps a model with saved adapters.

    Args:
        model: the one that they belong to, on its device, dropout off.
        source: folder or hub id of the adapters.

    Returns:
        A PeftModel whose adapters are all that is trained.

    Raises:
        ValueError: they do not fit the model.
    """
    import peft
    from peft.utils.save_and_load import load_peft_weights

    config = peft.LoraConfig.from_pretrained(source)
    config.inference_mode, config.base_model_name_or_path, config.lora_dropout = False, None, 0.0
    model = _wrap(model, config)
    result = peft.set_peft_model_state_dict(model, load_peft_weights(source, device="cpu"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    odd = sorted(trained & set(result.missing_keys)) + sorted(result.unexpected_keys)
    require(
        not odd,
        f"adapters in {source}",
        f"must fit their model, but {len(odd)} weights have no counterpart ({', '.join(odd[:2])})",
        "name the model they were trained on as base_model_name_or_path in adapter_config.json",
    )
    return model


def base_of(source: str) -> str | None:
    """The model that saved adapters belong to.

    Args:
        source: a folder, or a hub id.

    Returns:
        Its name as saved with them; None if these are no adapters.

    Raises:
        ValueError: they do not name one, or are not LoRA.
    """
    file = find_adapter_config_file(source)
    if file is None:
        return None
    saved = json.loads(Path(file).read_text(encoding="utf-8"))
    kind, base = saved.get("peft_type"), saved.get("base_model_name_or_path")
    require(kind == "LORA", f"{source}: adapters of type {kind}", "must be LORA", "merge them with the peft library")
    require(bool(base), f"{source}: adapters", "must name their model", f"fill in base_model_name_or_path in {file}")
    return base


def save(model: nn.Module, folder: Path | str) -> None:
    """Saves a model; of one with adapters, the adapters alone and the name of their model.

    Args:
        model: wrapped by peft or not.
        folder: where to.
    """
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder)
        return
    # "auto" would ask the hub how large the vocabulary of the base model is
    model.save_pretrained(folder, save_embedding_layers=False)
    (Path(folder) / "README.md").unlink(missing_ok=True)  # a form that nobody has filled in


def quantization(bits: int, dtype: torch.dtype) -> BitsAndBytesConfig:
    """How from_pretrained is to hold linear layers in few bits; output head and embeddings it leaves as they are.

    Args:
        bits: 8, or 4: NF4 with quantized scales (Dettmers et al. 2023, arXiv 2305.14314).
        dtype: of the products.

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
    every = range(torch.cuda.device_count()) if device.type == "cuda" else []  # manual_seed seeds them all
    with torch.random.fork_rng(every), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for an attribute that transformers renamed
        torch.manual_seed(SEED)
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for p in model.parameters():
        if p.requires_grad:  # beside weights of few bits they would be fp32
            p.data = p.data.to(dtype)
    model.tracking = model.get_input_embeddings().register_forward_hook(_track)
    return model


def _track(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
    """Lets the first layer see an input with a gradient, as the others do: they then share what is compiled."""
    if torch.is_grad_enabled():
        output.requires_grad_(True)


def _named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with adapters, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, m) for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)]


# ---- without adapters, and with adapters in the weights ----

_on_host: WeakKeyDictionary[nn.Module, "_Copies"] = WeakKeyDictionary()
_switched: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
_merged: WeakSet[nn.Module] = WeakSet()  # models whose weights hold their adapters at the moment


def _switches(model: nn.Module) -> list[nn.Module]:
    """The modules that can leave their adapters out; to look for them takes 6 ms in 28 layers, so it is done once."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if model not in _switched:
        kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
        _switched[model] = [m for m in model.modules() if isinstance(m, kinds)]
    return _switched[model]


@contextmanager
def off(model: nn.Module) -> Iterator[None]:
    """Takes the adapters out of what a model computes; meanwhile it is the model that training began with.

    Args:
        model: wrapped by peft, or not: then nothing happens.

    Raises:
        RuntimeError: the adapters are in the weights at the moment, so that they cannot be taken out.
    """
    if not hasattr(model, "peft_config"):
        yield
        return
    if model in _merged:
        raise RuntimeError("adapters are merged into the weights for a rollout: wait for its end")
    # what peft has for this would switch requires_grad off and on too, and with it what is compiled
    layers = [m for m in _switches(model) if not m.disable_adapters]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Adds adapters to the weights they belong to, and afterwards puts those weights back bit for bit.

    Unmerging would subtract what was added, and in bf16 a good part of the weights would not come back. Weights keep
    their places in memory, where CUDA graphs read them. Weights of few bits are left alone, with their adapters active.

    Args:
        model: wrapped by peft, or not: then nothing happens.
    """
    layers = _mergeable(model) if hasattr(model, "peft_config") else []
    if not layers:
        yield
        return
    weights = [p for layer in layers for p in layer.get_base_layer().parameters(recurse=False)]
    places = [p.data for p in weights]
    before = _copies(model, weights)
    _merged.add(model)
    try:
        for layer in layers:
            _merge(layer)
        for weight, place in zip(weights, places, strict=True):
            if weight.data_ptr() != place.data_ptr():  # some kinds of adapter make a new tensor
                place.copy_(weight.data)
                weight.data = place
        yield
    finally:
        for weight, place, value in zip(weights, places, before, strict=True):
            weight.data = place.copy_(value, non_blocking=True)
        for layer in layers:
            layer.merged_adapters.clear()
            layer._disable_adapters = False
        _merged.discard(model)


def merge(model: nn.Module) -> PreTrainedModel:
    """Adds adapters to the weights for good.

    Args:
        model: a PeftModel.

    Returns:
        The model itself, without any wrapper, all of its weights trainable.

    Raises:
        ValueError: weights in 8 or 4 bits cannot take them up.
    """
    layers = _mergeable(model)
    require(len(layers) == len(_named_layers(model)), "adapters on weights of few bits", "cannot be merged",
            "load the model without load_bits")  # fmt: skip
    for layer in layers:
        _merge(layer)
    model.tracking.remove()
    return model.unload().requires_grad_(True)


def _mergeable(model: nn.Module) -> list[nn.Module]:
    layers = [m for _, m in _named_layers(model) if not m.merged and not m.disable_adapters]
    return [m for m in layers if m.get_base_layer().weight.is_floating_point()]


@torch.no_grad()
def _merge(layer: nn.Module) -> None:
    """Adds the adapters of one layer, in fp32 and rounded once; other kinds than plain LoRA in peft's own way."""
    from peft.tuners.lora import Linear

    if not isinstance(layer, Linear) or layer.lora_variant or any(layer.lora_bias.values()):
        layer.merge()
        return
    weight = layer.get_base_layer().weight.data
    wide = weight.float()
    wide_OI = wide.t() if layer.fan_in_fan_out else wide
    for name in layer.active_adapters:
        if name in layer.lora_A:
            a_rI, b_Or = layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float()
            wide_OI.addmm_(b_Or, a_rI, alpha=layer.scaling[name])
    weight.copy_(wide)
    layer._disable_adapters = True  # or they would count twice


class _Copies:
    """Copies of weights in pinned CPU memory, made anew only when the weights have changed."""

    def __init__(self, weights: list[torch.Tensor]):
        device, kinds = weights[0].device, dict.fromkeys(w.dtype for w in weights)
        # one block for each dtype: memory is pinned by the page
        sizes = {dtype: sum(w.numel() for w in weights if w.dtype == dtype) for dtype in kinds}
        self.blocks = {dtype: host_memory(size, device, dtype) for dtype, size in sizes.items()}
        self.versions: list[int] = []

    def of(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The copies; of frozen weights the first ones serve for the whole run."""
        rest, copies = dict(self.blocks), []
        for w in weights:
            copies.append(rest[w.dtype][: w.numel()].view(w.shape))
            rest[w.dtype] = rest[w.dtype][w.numel() :]
        versions = [w._version for w in weights]  # counts changes, but not those through .data, as merging does them
        if versions != self.versions:
            for copy, w in zip(copies, weights, strict=True):
                copy.copy_(w.detach(), non_blocking=True)
            self.versions = versions
        return copies


def _copies(model: nn.Module, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of weights: on the GPU for the moment, if it has room for them; else in CPU memory, to stay there."""
    if model not in _on_host:
        device = weights[0].device
        if device.type == "cuda" and sum(w.nbytes for w in weights) <= ROOM * free_bytes(device):
            return [w.detach().clone() for w in weights]
        _on_host[model] = _Copies(weights)
    return _on_host[model].of(weights)
