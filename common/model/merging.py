"""Adapters out of what a model computes, and in its weights: for the reference, for rollouts, and for good.

Rollouts take the sum W + (alpha / rank) B A in place of W, and run as fast as without adapters; afterwards W comes back
bit for bit. Dims as in common/model/lora.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

from common.base.checks import require
from common.base.devices import free_bytes, host_memory

ROOM = 0.25  # of the free GPU memory: up to here, weights that are merged into are kept there and not in CPU memory

_on_host: WeakKeyDictionary[nn.Module, "_Copies"] = WeakKeyDictionary()
_switched: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
_merged: WeakSet[nn.Module] = WeakSet()  # models whose weights hold their adapters at the moment


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with adapters, by name.

    Args:
        model: wrapped by peft.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, m) for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)]


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
    require(len(layers) == len(named_layers(model)), "adapters on weights of few bits", "cannot be merged",
            "load the model without load_bits")  # fmt: skip
    for layer in layers:
        _merge(layer)
    model.tracking.remove()
    return model.unload().requires_grad_(True)


def _mergeable(model: nn.Module) -> list[nn.Module]:
    layers = [m for _, m in named_layers(model) if not m.merged and not m.disable_adapters]
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
