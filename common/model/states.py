"""States of hybrid models: what layers without attention remember of a sequence.

Linear attention, state-space and convolution layers read a sequence into a state of fixed size,
whatever its length. transformers keeps such states in the layers of its cache. Here they are
described, given memory of our own, and read and written row by row.

Dims: b rows decoded together.
"""

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

# of configs: layers that keep a state, or nothing at all; "hybrid" ones attend too
LAYER_TYPES = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "moe", "mlp")


@dataclasses.dataclass(frozen=True)
class State:
    """One tensor that a layer keeps of every row.

    Attributes:
        layer: its number.
        kind: "conv" or "recurrent".
        index: a layer may keep several of a kind.
        shape: for one row.
        dtype: of the tensor.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_row(self) -> int:
        """Memory for one row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def argument(decoder: nn.Module) -> str:
    """Name of the decoder's argument for a cache."""
    # transformers 5.24 renamed it for all families, and 5.40 will drop the old names
    given = inspect.signature(decoder.forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in given), "past_key_values")


def num_attention_layers(decoder: nn.Module) -> int:
    """Number of layers with keys and values."""
    return sum(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=decoder.config).layers)


@torch.no_grad()
def kept_by(decoder: nn.Module) -> tuple[State, ...]:
    """The states that a decoder keeps, found by reading a few tokens; empty if all layers attend.

    Args:
        decoder: of a transformers causal language model, in eval mode.
    """
    cache = DynamicCache(config=decoder.config)
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        return ()
    ids = torch.tensor([[1, 2, 3, 4, 5]], device=decoder.device)
    positions = torch.arange(5, device=decoder.device)[None]
    decoder(input_ids=ids, position_ids=positions, use_cache=True, **{argument(decoder): cache})
    found = []
    for number, layer in enumerate(cache.layers):
        for kind, tensors in _tensors(layer).items():
            for index, x in tensors.items():
                if x is not None:
                    found.append(State(number, kind, index, tuple(x.shape[1:]), x.dtype))
    return tuple(found)


def _tensors(layer: Any) -> dict[str, dict[int, torch.Tensor | None]]:
    """The states in a layer of a cache, by kind and index."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return {}
    return {"conv": layer.conv_states, "recurrent": layer.recurrent_states}


@contextmanager
def replaced(model: nn.Module, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Puts another function in the place of one in transformers' modeling files, and takes it out again.

    Args:
        model: whose layers' files are meant.
        name: of the function; files without it stay as they are.
        make: gives the new function for the old one.
    """
    before = [(file, getattr(file, name)) for file in _files(model) if hasattr(file, name)]
    for file, function in before:
        setattr(file, name, make(function))
    try:
        yield
    finally:
        for file, function in before:
            setattr(file, name, function)


def has_function(model: nn.Module, name: str) -> bool:
    """Whether a modeling file of a model's layers has a function of this name."""
    return any(hasattr(file, name) for file in _files(model))


def _files(model: nn.Module) -> list[Any]:
    return [sys.modules[name] for name in sorted({type(module).__module__ for module in model.modules()})]


def limited_steps(model: nn.Module) -> AbstractContextManager:
    """Gives Mamba 2's step of one token the limits of its time step, which transformers applies to sequences only.

    Without them rollouts of Nemotron-H and Zamba 2 differ from the forward pass by 5e-4 nats.

    Args:
        model: decodes meanwhile.
    """
    limits = {tuple(m.time_step_limit) for m in model.modules() if hasattr(m, "time_step_limit")} - {(0.0, math.inf)}
    if len(limits) != 1:
        return nullcontext()
    low, high = limits.pop()

    def limited(step: Callable) -> Callable:
        def wrapped(state, hidden, dt, *args, dt_bias=None, dt_softplus=False, **kwargs):
            dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            dt = (F.softplus(dt) if dt_softplus else dt).clamp(low, high)
            return step(state, hidden, dt, *args, **kwargs)

        return wrapped

    return replaced(model, "mamba2_selective_state_update", limited)


def stateless_parts(decoder: nn.Module) -> list[nn.Module]:
    """Norms and feed-forward networks of a decoder: what can be compiled once for all layers of a hybrid model.

    A layer that updates a state is no such part: its number is compiled into it.

    Args:
        decoder: of a transformers causal language model.
    """
    single = nn.Linear, nn.Embedding, nn.Conv1d, nn.ModuleList

    def is_part(module: nn.Module) -> bool:
        if isinstance(module, single) or hasattr(module, "layer_idx") or next(module.parameters(), None) is None:
            return False
        return module is not decoder and not any(list(child.children()) for child in module.children())

    parts = list(filter(is_part, decoder.modules()))
    inner = {child for part in parts for child in part.modules() if child is not part}
    return [part for part in parts if part not in inner]


def cache_for(decoder: nn.Module) -> DynamicCache:
    """An empty cache for states alone: keys and values pass through it, to be stored by an attention path."""
    cache = DynamicCache(config=decoder.config)
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.update = _pass_through
    return cache


def _pass_through(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return keys, values


class Pool:
    """States of the rows of a batch, in memory that keeps its address from one rollout to the next."""

    def __init__(self, decoder: nn.Module, kept: tuple[State, ...]):
        """An empty pool.

        Args:
            decoder: of the model.
            kept: from `kept_by`.
        """
        self.decoder, self.kept, self.argument = decoder, kept, argument(decoder)
        self.tensors: list[torch.Tensor] = []

    @property
    def bytes_per_row(self) -> int:
        """Memory for one row."""
        return sum(state.bytes_per_row for state in self.kept)

    def reserve(self, rows: int) -> bool:
        """Makes room.

        Args:
            rows: of the largest batch.

        Returns:
            Whether memory was allocated anew.
        """
        if not self.kept or (self.tensors and len(self.tensors[0]) >= rows):
            return False
        self.release()
        device = self.decoder.device
        self.tensors = [torch.zeros(rows, *state.shape, dtype=state.dtype, device=device) for state in self.kept]
        return True

    def release(self) -> None:
        """Frees the memory."""
        self.tensors = []

    def read(self, b: int) -> dict[str, Any]:
        """Decoder arguments for one more token in each of the first b rows; their states are updated in place."""
        if not self.kept:
            return {}
        cache = cache_for(self.decoder)
        for state, tensor in zip(self.kept, self.tensors, strict=True):
            layer = cache.layers[state.layer]
            _tensors(layer)[state.kind][state.index] = tensor[:b]
            layer.has_previous_state[state.index] = True
            if state.kind == "conv":
                layer.is_conv_states_initialized[state.index] = True
                layer.conv_kernel_size[state.index] = state.shape[-1]
                layer.dtype, layer.device = tensor.dtype, tensor.device
            else:
                layer.is_recurrent_states_initialized[state.index] = True
        return {self.argument: cache, "use_cache": True}

    def write(self, cache: DynamicCache, repeats: int, rows: torch.Tensor) -> None:
        """Stores the states after a prefill.

        Args:
            cache: from `cache_for`, after the decoder has read one row per prompt.
            repeats: rows per prompt in the batch.
            rows: int64, their places in the batch, prompt by prompt.
        """
        for state, tensor in zip(self.kept, self.tensors, strict=True):
            value = _tensors(cache.layers[state.layer])[state.kind][state.index]
            tensor[rows] = value.repeat_interleave(repeats, 0)
