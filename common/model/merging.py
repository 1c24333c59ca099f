"""Replaces adapters by those of the reference, or merges them into the weights: for a rollout, or permanently.

A rollout with W + (alpha / rank) B A in place of W runs as fast as without adapters; afterwards W
is restored bit for bit. Dims as in common/model/lora.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

from common.base.checks import require
from common.base.devices import free_bytes, host_memory
from common.model import experts

GPU_COPY_SHARE = 0.25  # of the free GPU memory; copies of the weights that are larger than this go to CPU memory

_on_host: WeakKeyDictionary[nn.Module, "_Copies"] = WeakKeyDictionary()
_adapter_modules_of: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
_merged: WeakSet[nn.Module] = WeakSet()  # models whose adapters are in their weights now
# adapters, each with its value in the reference
_references: WeakKeyDictionary[nn.Module, list[tuple[nn.Parameter, torch.Tensor]]] = WeakKeyDictionary()


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with adapters, by name.

    Args:
        model: wrapped by peft.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, m) for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)]


def _adapter_modules(model: nn.Module) -> list[nn.Module]:
    """The modules with adapters; cached, because finding them takes 6 ms in 28 layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if model not in _adapter_modules_of:
        kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
        _adapter_modules_of[model] = [m for m in model.modules() if isinstance(m, kinds)]
    return _adapter_modules_of[model]


def trained_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of the adapters: all that is trained."""
    return [p for p in model.parameters() if p.requires_grad]


def keep_reference(model: nn.Module, weights: list[torch.Tensor]) -> None:
    """Sets the adapters that `as_reference` uses; without a call it uses none.

    Args:
        model: wrapped by peft.
        weights: in the order of `trained_weights`; copied.
    """
    pairs = zip(trained_weights(model), weights, strict=True)
    _references[model] = [(weight, value.detach().to(weight.device, copy=True)) for weight, value in pairs]


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Turns a model into its own reference: with the adapters of `keep_reference`, or without any.

    Args:
        model: wrapped by peft or not; without adapters this is a no-op.

    Raises:
        RuntimeError: the adapters are merged into the weights.
    """
    if model not in _references:
        with adapters_disabled(model):
            yield
        return
    _require_unmerged(model)
    pairs = _references[model]
    present = [weight.data for weight, _ in pairs]
    try:
        for weight, value in pairs:
            weight.data = value
        yield
    finally:
        for (weight, _), value in zip(pairs, present, strict=True):
            weight.data = value


def _require_unmerged(model: nn.Module) -> None:
    if model in _merged:
        raise RuntimeError("adapters are merged into the weights for a rollout: wait for its end")


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disables the adapters of a model; a no-op without adapters.

    Args:
        model: wrapped by peft or not.

    Raises:
        RuntimeError: the adapters are merged into the weights.
    """
    if not hasattr(model, "peft_config"):
        yield
        return
    _require_unmerged(model)
    # peft's own disable_adapter also toggles requires_grad, which invalidates compiled code
    layers = [m for m in _adapter_modules(model) if not m.disable_adapters]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Merges the adapters into the weights, and restores the weights afterwards, bit for bit.

    A no-op without adapters. Copies are restored, because subtracting what was added would not give
    the same weights in bf16. Weights keep their addresses, which CUDA graphs hold. Quantized
    weights are not merged: their adapters stay active.

    Args:
        model: wrapped by peft or not.
    """
    layers = _mergeable(model) if hasattr(model, "peft_config") else []
    if not layers:
        yield
        return
    weights = [p for layer in layers for p in layer.get_base_layer().parameters(recurse=False)]
    weights = list(dict.fromkeys(weights))  # several adapters of experts share a module
    places = [p.data for p in weights]
    before = _copies(model, weights)
    _merged.add(model)
    try:
        for layer in layers:
            _merge(layer)
        for weight, place in zip(weights, places, strict=True):
            if weight.data_ptr() != place.data_ptr():  # some kinds of adapters make a new tensor
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
    """Merges adapters into the weights permanently.

    Args:
        model: a PeftModel.

    Returns:
        The model without its wrapper, all weights trainable.

    Raises:
        ValueError: the weights are in 8 or 4 bits.
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
    return [m for m in layers if experts.weight(m).is_floating_point()]


@torch.no_grad()
def _merge(layer: nn.Module) -> None:
    """Merges the adapters of one layer, in fp32; peft merges those that are not plain LoRA."""
    from peft.tuners.lora import Linear

    if experts.of_experts(layer):
        experts.merge(layer)
    elif not isinstance(layer, Linear) or layer.lora_variant or any(layer.lora_bias.values()):
        layer.merge()
        return
    else:
        weight = layer.get_base_layer().weight.data
        wide = weight.float()
        wide_OI = wide.t() if layer.fan_in_fan_out else wide
        for name in layer.active_adapters:
            if name in layer.lora_A:
                a_rI, b_Or = layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float()
                wide_OI.addmm_(b_Or, a_rI, alpha=layer.scaling[name])
        weight.copy_(wide)
    layer._disable_adapters = True  # or they would be added twice


class _Copies:
    """Copies of weights in pinned CPU memory, renewed only when the weights have changed."""

    def __init__(self, weights: list[torch.Tensor]):
        device, kinds = weights[0].device, dict.fromkeys(w.dtype for w in weights)
        # one block per dtype, because memory is pinned in pages
        sizes = {dtype: sum(w.numel() for w in weights if w.dtype == dtype) for dtype in kinds}
        self.blocks = {dtype: host_memory(size, device, dtype) for dtype, size in sizes.items()}
        self.versions: list[int] = []

    def of(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The copies, up to date; frozen weights are copied once per run."""
        rest, copies = dict(self.blocks), []
        for w in weights:
            copies.append(rest[w.dtype][: w.numel()].view(w.shape))
            rest[w.dtype] = rest[w.dtype][w.numel() :]
        versions = [w._version for w in weights]  # not counted: changes through .data, such as merging
        if versions != self.versions:
            for copy, w in zip(copies, weights, strict=True):
                copy.copy_(w.detach(), non_blocking=True)
            self.versions = versions
        return copies


def _copies(model: nn.Module, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of weights: temporary ones on the GPU, or if they do not fit, kept in CPU memory."""
    if model not in _on_host:
        device = weights[0].device
        if device.type == "cuda" and sum(w.nbytes for w in weights) <= GPU_COPY_SHARE * free_bytes(device):
            return [w.detach().clone() for w in weights]
        _on_host[model] = _Copies(weights)
    return _on_host[model].of(weights)
