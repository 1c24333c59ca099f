"""Finds the weights of a Llama-like model: blocks of attention and a gated SiLU, with RMS norms and rotary positions.

Families are not told by name: a model is served if its modules have these parts, and it stays
served only if `paths.choose` finds that its fused steps agree with its plain forward pass.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from common.fused import tiles
from common.model import attention
from common.model.head import scale_of, softcap_of

try:
    import triton
except ImportError:  # torch for CPUs comes without it
    triton = None

PRODUCTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
OTHERS = ("self_attn", "mlp", "mlp.act_fn")
SILU = {"SiLU", "SiLUActivation"}


class Block(NamedTuple):
    """Weights of one block; biases of queries, keys and values, and norms of heads, may be None."""

    attention_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Weights(NamedTuple):
    """All that a decode step reads.

    Attributes:
        embedding: [V, H].
        blocks: in order.
        norm: [H], the last one.
        head: [V, H].
        eps: of all norms.
        scaling: factor of attention scores.
        logit_scale: factor of logits.
    """

    embedding: torch.Tensor
    blocks: list[Block]
    norm: torch.Tensor
    head: torch.Tensor
    eps: float
    scaling: float
    logit_scale: float


def reason_against(model: PreTrainedModel, support: attention.Support) -> str:
    """Why the kernels do not serve a model; "" if they may.

    Args:
        model: a transformers causal language model.
        support: from `attention.install`.
    """
    if triton is None:
        return "the package triton is missing"
    if model.device.type != "cuda" or torch.cuda.get_device_capability(model.device)[0] < 8:
        return "they need an NVIDIA GPU of compute capability 8"
    if shared_memory(model.device) < tiles.SHARED_BYTES:
        return f"they need a GPU with {tiles.SHARED_BYTES // 2**10} KiB of shared memory for a block of threads"
    return reason_of_parts(model, support)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may have.

    Args:
        device: a GPU.
    """
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]


def reason_of_parts(model: PreTrainedModel, support: attention.Support) -> str:
    """As `reason_against`, by the parts of the model alone."""
    if model.dtype != torch.bfloat16:
        return f"weights are {str(model.dtype).removeprefix('torch.')}, not bfloat16"
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if head.bias is not None or softcap_of(model) is not None:
        return "its head has a bias or a soft cap"
    blocks = attention.decoder_layers(model, support)
    if not blocks or {"norm", "rotary_emb"} - vars(decoder)["_modules"].keys():
        return "its decoder has other parts"
    norms = [decoder.norm]
    for block in blocks:
        names = dict(block.named_modules())
        if any(type(names.get(f"{name}.base_layer", names.get(name))) is not nn.Linear for name in PRODUCTS):
            return "its blocks have other linear layers"
        known = {*PRODUCTS, *NORMS, *HEAD_NORMS, *OTHERS, ""}
        adapters = tuple(f"{name}." for name in PRODUCTS)
        if odd := [name for name in names if name not in known and not name.startswith(adapters)]:
            return f"its blocks have a module {odd[0]}"
        if lacking := [name for name in (*NORMS, *OTHERS) if name not in names]:
            return f"its blocks have no {lacking[0]}"
        if type(names["mlp.act_fn"]).__name__ not in SILU:
            return f"its activation is {type(names['mlp.act_fn']).__name__}"
        if any(_bias(names, name) is not None for name in PRODUCTS[3:]):
            return "its linear layers have biases"
        if len({_bias(names, name) is None for name in PRODUCTS[:3]} | {None}) > 2:
            return "some of its queries, keys and values have biases"
        norms += [names[name] for name in (*NORMS, *HEAD_NORMS) if name in names]
    if len({_eps(norm) for norm in norms}) > 1 or _eps(decoder.norm) is None:
        return "its norms differ"
    layer = support.layers[0]
    if layer.head_size & (layer.head_size - 1) or not 16 <= layer.head_size <= 128:
        return f"its heads have {layer.head_size} dimensions"
    if layer.queries_per_key > 64:
        return f"{layer.queries_per_key} of its query heads share a key"
    return ""


def read(model: PreTrainedModel, support: attention.Support) -> Weights:
    """The weights of a model that `reason_against` has nothing against, where they are.

    Args:
        model: a transformers causal language model.
        support: from `attention.install`.
    """
    decoder, blocks = model.get_decoder(), []
    for block in attention.decoder_layers(model, support):
        names = dict(block.named_modules())
        q, k, v, o, gate, up, down = (_layer(names, name).weight for name in PRODUCTS)
        biases = tuple(_bias(names, name) for name in PRODUCTS[:3])
        head_norms = tuple(names[name].weight for name in HEAD_NORMS if name in names)
        attention_norm, mlp_norm = (names[name].weight for name in NORMS)
        blocks.append(Block(attention_norm, q, k, v, None if biases[0] is None else biases, head_norms or None, o,
                            mlp_norm, gate, up, down))  # fmt: skip
    scaling = getattr(support.layers[0].module, "scaling", support.layers[0].head_size ** -0.5)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Weights(embedding, blocks, decoder.norm.weight, head, _eps(decoder.norm), scaling, scale_of(model))


def _layer(names: dict[str, nn.Module], name: str) -> nn.Module:
    """A linear layer without its adapters, which are merged into its weight during a rollout."""
    return names.get(f"{name}.base_layer", names[name])


def _bias(names: dict[str, nn.Module], name: str) -> torch.Tensor | None:
    return _layer(names, name).bias


def _eps(norm: nn.Module) -> float | None:
    return getattr(norm, "variance_epsilon", None)
