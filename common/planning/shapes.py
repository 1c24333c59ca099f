"""Sizes of a model from its config: nothing else is downloaded, and no weights are allocated."""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from common.base.checks import require
from common.model import images, lora, sources
from common.planning.blocks import Blocks, decoder_blocks


@dataclass(frozen=True)
class Shape:
    """Numbers of parameters, and widths in elements; tied embeddings are counted once.

    Attributes:
        params: all parameters.
        vision: parameters of the vision tower (included in `params`, like all that follow).
        head: of the output head, which may be the embedding.
        embedding: of the input embedding.
        tied: whether head and embedding are one.
        layer: of the largest decoder layer.
        linear: of all linear layers that can be quantized.
        adapted: of the layers that get LoRA adapters.
        experts: of those, fused experts, whose sum with the adapters is computed.
        per_rank: parameters of all adapters per unit of LoRA rank (not included in `params`).
        layers: number of decoder layers.
        hidden: width of the hidden states.
        queries: width of all query heads.
        keys: width of all keys and values.
        inner: intermediate size of the MLP; of a mixture of experts, of all active experts of a token.
        vocabulary: rows of the output head.
        levels: feature tensors per image in the decoder (1, more with deepstack); 0 for a text model.
        plain: whether these widths describe all decoder blocks: attention and an MLP, no mixture of experts, linear
            or latent attention, or state-space layer.
        blocks: measures the decoder blocks; None unless this is a causal language model.
    """

    params: int
    vision: int
    head: int
    embedding: int
    tied: bool
    layer: int
    linear: int
    adapted: int
    experts: int
    per_rank: int
    layers: int
    hidden: int
    queries: int
    keys: int
    inner: int
    vocabulary: int
    levels: int
    plain: bool = True
    blocks: Blocks | None = field(default=None, compare=False, repr=False)


@functools.cache
def of(name: str, kind: str = "policy", targets: str = lora.ALL) -> Shape:
    """Builds a model without memory from its config, and counts.

    Args:
        name: as in `sources.find`, or the path of a config.json.
        kind: "policy" (a causal language model), "reward" (a classifier with one output) or "embedder".
        targets: layers that get adapters, as in `lora.targets`.

    Raises:
        ValueError: there is no such model, its config cannot be read, or the scripts cannot load it.
    """
    source = name if Path(name).is_file() else sources.find(name)
    if kind == "embedder" and Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        source = str(next(Path(source).glob("*/config.json"), source))  # sentence-transformers: a folder per module
    elif Path(source).is_dir():
        source = base(source)
    with _named(name, kind):
        try:  # the local cache first: without a network, asking the hub takes long
            config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
        except OSError:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        model = _empty(config, kind)
        text = config.get_text_config()
        heads, layers = getattr(text, "num_attention_heads", 0), text.num_hidden_layers  # 0: state-space layers only
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
        embedding = model.get_input_embeddings().weight
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    sizes = {id(p): p.numel() for p in model.parameters()}
    head, adapted, is_vlm = None, [], images.is_vlm(config)
    if kind == "policy":
        causal = [m.is_causal for m in model.modules() if hasattr(m, "is_causal")]
        require(not causal or any(causal), f"model {name!r}: {type(model).__name__}", "an encoder, whose tokens see "
                "those after them, cannot write", "give a causal language model")  # fmt: skip
        head = model.get_output_embeddings().weight
        every = dict(model.named_parameters(remove_duplicate=False))
        chosen = lora.targets(model, targets)
        adapted = [every.get(f"{name}.weight", every.get(name)) for name in chosen]  # of layers, and experts
    tower = images.tower(model) if is_vlm else nn.Module()
    decoder = model.get_decoder() if kind == "policy" else model
    layer_modules = decoder_blocks(decoder)
    linear = [m.weight for m in decoder.modules() if _linear_weights(m)]
    queries, keys, inner = heads * head_dim, 2 * kv_heads * head_dim, _inner(text)
    plain = [text.hidden_size * (2 * queries + keys + n * inner) for n in (2, 3)]  # projections in the MLP
    return Shape(
        params=sum(sizes.values()),
        vision=sum(p.numel() for p in tower.parameters()),
        head=0 if head is None else head.numel(),
        embedding=embedding.numel(),
        tied=head is embedding,
        layer=max((sum(p.numel() for p in block.parameters()) for block in layer_modules), default=0),
        linear=sum(weight.numel() for weight in linear if weight is not head),
        adapted=sum(weight.numel() for weight in adapted),
        experts=sum(weight.numel() for weight in adapted if weight.ndim == 3),
        per_rank=sum(math.prod(weight.shape[:-2]) * sum(weight.shape[-2:]) for weight in adapted),
        layers=layers,
        hidden=text.hidden_size,
        queries=queries,
        keys=keys,
        inner=inner,
        vocabulary=embedding.shape[0] if head is None else head.shape[0],
        levels=1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ()) if is_vlm else 0,
        plain=bool(layer_modules)
        and all(sum(map(_linear_weights, layer.modules())) in plain for layer in layer_modules),
        blocks=Blocks(name, functools.partial(_empty, config, kind)) if kind == "policy" else None,
    )


def base(source: str) -> str:
    """The model that a source belongs to: for LoRA adapters their base model, else the source itself.

    Args:
        source: folder or hub id.

    Raises:
        ValueError: the adapters do not name their base model.
    """
    name = sources.base_of(source)
    return source if name is None else base(sources.find(name))


@contextlib.contextmanager
def _named(name: str, kind: str) -> Iterator[None]:
    """Turns errors about a config into one line with the name of the model."""
    try:
        yield
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:  # as transformers raises them
        text = (str(error).splitlines() or [""])[0].strip().rstrip(".")
        text = text if len(text) <= 200 else f"{text[:200]} ..."
        wanted = {"policy": "causal language model", "reward": "sequence classifier", "embedder": "text encoder"}[kind]
        remedy = f"give a {wanted}: a hub id, a folder with config.json, or the path of that file"
        raise ValueError(f"model {name!r}: {text}; {remedy}") from error


def _linear_weights(module: nn.Module) -> int:
    """Elements of the weight of a linear layer; 0 for other modules."""
    return module.weight.numel() if isinstance(module, (nn.Linear, Conv1D)) else 0


def _inner(text: PretrainedConfig) -> int:
    """Intermediate size of the MLP, the largest of all layers, over all active experts of a token."""
    plain = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    plain = plain if isinstance(plain, int) else max(plain)
    experts = getattr(text, "num_experts_per_tok", None)
    if not experts:
        return plain
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return experts * (getattr(text, "moe_intermediate_size", None) or plain) + shared


def _empty(config: PretrainedConfig, kind: str) -> PreTrainedModel:
    """The model on the meta device."""
    loaders = {"policy": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification, "embedder": AutoModel}
    loader = loaders[kind]
    if kind == "policy" and images.is_vlm(config):
        loader = AutoModelForImageTextToText
    if kind == "reward":
        config.num_labels = 1
    with torch.device("meta"):
        return loader.from_config(config, trust_remote_code=False)
