"""LoRA on the experts of a mixture, which are slices of one parameter rather than layers.

peft adapts such a parameter (its `target_parameters`) with rank r for each expert: W_e + (alpha /
rank) B_e A_e. Its modules and files are used as they are, its forward is not: torch's
parametrizations change the order of a module's parameters. Here the sum stands in for W while the
experts compute. It has the dtype of W, as in a rollout, and is kept for the backward pass: without
gradient checkpointing as much memory as all adapted experts take, with it one layer.

Dims: E experts; M and N rows and columns of the matrix of one, whichever of them is its input; r
rank.
"""

import types
from typing import Any

import torch
from torch import nn

from common.base.checks import require


def is_fused(owner: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a parameter is the matrices of all experts, [E, M, N], which its module multiplies by itself.

    Args:
        owner: the module that has the parameter.
        parameter: one of its own.
    """
    # other stacks of matrices, as in recurrent blocks, are read by modules that do more: they stay
    # frozen
    return "Experts" in type(owner).__name__ and parameter.ndim == 3 and parameter.is_floating_point()


def is_adapter(layer: nn.Module) -> bool:
    """Whether a module is a peft adapter of a parameter, not of a layer."""
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(layer, ParamWrapper)


def of_experts(layer: nn.Module) -> bool:
    """Whether a module is a peft adapter of experts, [E, M, N], and not of another parameter, such as a router's."""
    return is_adapter(layer) and weight(layer).ndim == 3


def adapted_name(name: str, layer: nn.Module) -> str:
    """The name, before peft wrapped the model, of what a layer of peft adapts.

    Args:
        name: of the layer, in the wrapped model.
        layer: a peft layer; those of several parameters of one module are nested.
    """
    plain = name.removeprefix("base_model.model.")
    if not is_adapter(layer):
        return plain
    return f"{plain.replace('.base_layer', '')}.{layer.parameter_name}"


def weight(layer: nn.Module) -> torch.Tensor:
    """The frozen weight that a layer of peft adapts."""
    return getattr(layer.get_base_layer(), layer.parameter_name if is_adapter(layer) else "weight")


def prepare(model: nn.Module) -> None:
    """Gives the adapters of experts the forward of this file.

    Args:
        model: just wrapped by peft.

    Raises:
        ValueError: peft is too old.
    """
    for layer in model.modules():
        if of_experts(layer):
            transposed = getattr(layer.get_base_layer(), "is_transposed", False)
            require(layer._did_swap_in_out_features != transposed, f"adapters of {layer.parameter_name}",
                    "peft before 0.20 shapes those of experts differently", "install peft 0.20 or later, or name other "
                    "layers in lora_targets")  # fmt: skip
            layer.forward = types.MethodType(_forward, layer)


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if layer.disable_adapters or layer.merged:
        return layer.base_layer(*args, **kwargs)
    return _with_adapters(layer, *args, **kwargs)


@torch.compiler.disable
def _with_adapters(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    owner, name = layer.get_base_layer(), layer.parameter_name
    w_EMN = getattr(owner, name)
    for lhs_EMr, rhs_ErN, scale in _factors(layer):
        w_EMN = torch.baddbmm(w_EMN, lhs_EMr.to(w_EMN.dtype), rhs_ErN.to(w_EMN.dtype), alpha=scale)
    vars(owner)[name] = w_EMN  # found before the parameter of this name, which stays where it is
    try:
        return layer.base_layer(*args, **kwargs)
    finally:
        del vars(owner)[name]


@torch.no_grad()
def merge(layer: nn.Module) -> None:
    """Merges the adapters of a layer into its experts, in fp32, expert by expert.

    Args:
        layer: of peft, as `prepare` left it.
    """
    factors, w_EMN = _factors(layer), weight(layer).data
    for e, w_MN in enumerate(w_EMN):  # a copy of all in fp32 would be large
        wide = w_MN.float()
        for lhs_EMr, rhs_ErN, scale in factors:
            wide.addmm_(lhs_EMr[e].float(), rhs_ErN[e].float(), alpha=scale)
        w_MN.copy_(wide)


def _factors(layer: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """Of each active adapter L [E, M, r], R [E, r, N] and s: it adds s L R; laid out as peft's `get_delta_weight`."""
    found = []
    for name in layer.active_adapters:
        if name in layer.lora_A:
            a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
            a_ErI = a.reshape(layer.num_experts, -1, a.shape[-1])
            b_EOr = b.reshape(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)
            if layer._did_swap_in_out_features:  # W is [E, O, I]
                found.append((b_EOr, a_ErI, layer.scaling[name]))
            else:
                found.append((a_ErI.mT, b_EOr.mT, layer.scaling[name]))
    return found
