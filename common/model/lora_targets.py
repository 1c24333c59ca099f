"""Which parts of a model get LoRA adapters: linear layers, and experts of a mixture.

Routers that are no plain linear layer stay frozen, as is usual: if they moved, tokens of a rollout
would be computed by other experts in training.
"""

import functools
import inspect
import math
import re
import sys
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.base.checks import require
from common.base.distributed import print_main
from common.model import experts, images

ALL = "all-linear"


def targets(model: PreTrainedModel, names: str) -> list[str]:
    """Names of what gets adapters: linear layers and experts of the decoder; no head, no vision tower.

    Args:
        model: without adapters.
        names: "all-linear", or suffixes of the names of layers, of experts or of the parameters of
            fused experts, separated by commas.

    Returns:
        Names of layers, and of parameters if experts are fused (see experts.py).

    Raises:
        ValueError: a suffix matches nothing that can have an adapter, or matches the head.
    """
    head, inside = model.get_output_embeddings(), _inside(model)
    bypassed = {f"{name}.{child}" for name, m in inside.items() for child in _read_directly(type(m))}
    linear = [name for name, m in inside.items() if _is_linear(m) and name not in bypassed]
    fused = [f"{name}.{key}" for name, m in inside.items() for key, p in m.named_parameters(recurse=False)
             if experts.is_fused(m, p)]  # fmt: skip
    if names == ALL:
        return linear + fused
    there = ", ".join(sorted({name.removesuffix(".weight").rpartition(".")[2] for name in linear + fused}))
    chosen: dict[str, None] = {}
    head_name = next(name for name, m in model.named_modules() if m is head)
    for suffix in _split(names):
        require(
            not _has_suffix(head_name, suffix),
            f"lora_targets = {names!r}",
            f"{suffix!r} is the output head, whose plain weight log-probabilities are computed from",
            "leave it out",
        )
        found = [name for name in linear + fused if _has_suffix(name, suffix)]
        found += [name for name in fused if _has_suffix(name.rpartition(".")[0], suffix)]
        found += [name for name in linear if re.search(rf"(^|\.){re.escape(suffix)}\.\d+\.", name)]  # a list of experts
        require(
            bool(found),
            f"lora_targets = {names!r}",
            f"no linear layer or expert of the decoder that can have an adapter is named {suffix!r}",
            f"there are {there}; {ALL!r} takes them all",
        )
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _inside(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of the decoder by name; no head, no vision tower."""
    excluded = {model.get_output_embeddings()}
    if images.is_vlm(model.config):
        excluded |= set(images.tower(model).modules())
    inside = set(model.get_decoder().modules()) - excluded
    return {name: m for name, m in model.named_modules() if m in inside}


def _is_linear(module: nn.Module) -> bool:
    """Whether a module computes W x + b. Routers do not, though some inherit from nn.Linear: they choose, too."""
    kind = type(module)
    own = kind.forward not in (nn.Linear.forward, Conv1D.forward) and kind.__name__ != "FalconLinear"
    return isinstance(module, (nn.Linear, Conv1D)) and (not own or kind.__module__.startswith("bitsandbytes"))


@functools.cache
def _read_directly(kind: type) -> frozenset[str]:
    """Names of layers whose weights a module reads itself, as Mamba does for its kernels: adapters would not count."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("transformers.")]
    # all of it, perhaps cast or transposed; not its dtype or a slice, which only rare paths of old
    # models read
    reads = re.compile(r"\bself\.([\w.]+)\.weight\b(?!\[|\.(?:data|device|dtype|numel|shape|size)\b)")
    return frozenset(name for base in bases for name in reads.findall(_source(base)))


def _source(kind: type) -> str:
    """The lines of a class at the top of its module; `inspect.getsource` would parse all of the module."""
    module = inspect.getsource(sys.modules[kind.__module__])
    found = re.search(rf"^class {kind.__name__}\b.*\n(?:(?:[ \t)].*)?\n)*", module, re.MULTILINE)
    return found[0] if found else inspect.getsource(kind)


def report(model: PreTrainedModel, chosen: Sequence[str]) -> None:
    """Prints which matrices of the decoder are left without adapters, if any; embeddings and convolutions always are.

    Args:
        model: without adapters.
        chosen: by `targets`.
    """
    adapted, total, rest, names = 0, 0, set(), set(chosen)
    others = re.compile("embedding|norm|conv", re.IGNORECASE)  # no linear maps, or usually frozen
    for name, module in _inside(model).items():
        for key, p in module.named_parameters(recurse=False):
            shape = getattr(getattr(p, "quant_state", None), "shape", p.shape)  # 4-bit weights are packed
            total += math.prod(shape)
            is_matrix = sum(size > 1 for size in shape) > 1 and not key.endswith("bias")
            if (name in names and key == "weight") or f"{name}.{key}" in names:
                adapted += math.prod(shape)
            elif is_matrix and not others.search(type(module).__name__):
                rest.add(f"{name.rpartition('.')[2]}.{key}")
    if rest:
        print_main(f"LoRA: adapters on {adapted / 1e6:,.2f} of {total / 1e6:,.2f} M parameters; without: "
                   f"{', '.join(sorted(rest))}")  # fmt: skip


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _has_suffix(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith("." + suffix)


def shorten(chosen: list[str], among: list[str], parts: int) -> list[str]:
    """Names as in an adapter_config.json: only their last parts, if those select the same.

    Args:
        chosen: full names.
        among: all names that could be selected.
        parts: how many parts, separated by dots, to keep.
    """
    suffixes = sorted({".".join(name.split(".")[-parts:]) for name in chosen})
    selected = {name for name in among if any(_has_suffix(name, suffix) for suffix in suffixes)}
    return suffixes if selected == set(chosen) else chosen
