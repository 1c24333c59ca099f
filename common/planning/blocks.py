"""Memory of decoder blocks that no closed formula describes: they run on the meta device, which counts their tensors.

Layers of linear attention, state-space layers and mixtures of experts make many copies, often in
fp32, which differ between families and versions of transformers. On the meta device a block makes
the same tensors without memory, in milliseconds, whatever its size. Blocks of one kind are measured
once.

Dims: m sequences, T tokens of one, H hidden size.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from common.model import lora_targets, states

NAME = "rl_hand_plan"
STEP_ROWS, STEP_TOKENS = 16, 64  # sequences and tokens before the decode step that is measured


class _Flash(torch.autograd.Function):
    """The tensors of a flash kernel: it keeps its inputs, its output and one number per query; no scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        m, heads, T, _ = query.shape
        out = query.new_empty(m, T, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(m, heads, T, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def _attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any):
    """Attention on the meta device, where torch's own would materialize the scores."""
    return _Flash.apply(query, key, value), None


AttentionInterface.register(NAME, _attention)  # without a mask function: transformers builds no masks


class _Grouped(TorchDispatchMode):
    """Grouped matrix products in any dtype, as a GPU has them; those of torch on the meta device are for bf16 alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **kwargs)
        left, right = args[:2]
        experts = [] if left.dim() != right.dim() else [len(args[2] if len(args) > 2 else kwargs["offs"])]
        return left.new_empty(*experts, left.shape[-2], right.shape[-1])


class Allocated(TorchDispatchMode):
    """Counts the bytes of storages that are made inside and still referenced.

    Attributes:
        now: bytes allocated.
        peak: the most so far; may be set.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):  # made before: not counted
            if isinstance(x, torch.Tensor):
                self._known.add(x.untyped_storage())
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, size: int) -> None:
        self.now -= size


@dataclasses.dataclass(frozen=True)
class Pass:
    """Bytes of a forward pass of all blocks, and of its backward pass.

    Attributes:
        kept: tensors of all blocks that wait for the backward pass.
        layer: the largest share of one block in `kept`.
        at_work: temporaries of the block that needs most, in its forward or backward pass.
        inference: of a block in a pass without gradients, its input included.
    """

    kept: int
    layer: int
    at_work: int
    inference: int


@dataclasses.dataclass(frozen=True)
class Cache:
    """Bytes that decoding holds.

    Attributes:
        token: keys and values of one token.
        row: states of one sequence, whatever its length.
        step: temporaries of one sequence in a decode step.
    """

    token: int
    row: int
    step: int


class Blocks:
    """Decoder blocks that are measured, see above.

    Raises:
        ValueError: a method ran code of transformers that does not work on the meta device.
    """

    def __init__(self, name: str, make: Callable[[], PreTrainedModel]):
        """Nothing runs yet.

        Args:
            name: of the model, for errors.
            make: builds it on the meta device.
        """
        self.name, self.make = name, make
        self.cache, self.measure = functools.cache(self._cache), functools.cache(self._measure)

    def _measure(self, rows: int, length: int, dtype: torch.dtype, adapters: bool = False) -> Pass:
        """The memory of passes over padded sequences.

        Args:
            rows: m.
            length: T.
            dtype: of the model.
            adapters: whether only LoRA adapters are trained, on all linear layers.
        """
        with _on_meta(self.name):
            model = self._model(dtype)
            if adapters:
                _adapt(model)
            found, counts = _inputs(model.get_decoder(), rows, length)
            if not found:
                raise ValueError("it has no decoder blocks that transformers could recompute")
            sizes = [(_run(block, *inputs), count) for (block, *inputs), count in zip(found, counts, strict=True)]
        return Pass(
            kept=sum(size.kept * count for size, count in sizes),
            layer=max(size.layer for size, _ in sizes),
            at_work=max(size.at_work for size, _ in sizes),
            inference=max(size.inference for size, _ in sizes),
        )

    def _cache(self, dtype: torch.dtype) -> Cache:
        """What a sequence takes while it is decoded.

        Args:
            dtype: of the model.
        """
        with _on_meta(self.name), torch.no_grad():
            decoder = self._model(dtype).get_decoder()
            cache, given = _cached(decoder)
            decoder(input_ids=torch.zeros(STEP_ROWS, STEP_TOKENS, dtype=torch.long), **given)
            token, row = 0, 0
            for layer in cache.layers:
                for part, value in vars(layer).items():
                    for x in (x for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.dim() > 1):
                        if part in ("keys", "values"):
                            token += x.shape[1] * x.shape[-1] * x.itemsize  # a window may hold fewer tokens
                        else:
                            row += x.nbytes // STEP_ROWS
            if not token + row:
                raise ValueError("it decodes without keys, values and states that the cache of transformers knows")
            with Allocated() as allocated:
                for _ in range(2):  # the first step replaces tensors that were made before, which are not counted
                    before = allocated.peak = allocated.now
                    decoder(input_ids=torch.zeros(STEP_ROWS, 1, dtype=torch.long), **given)
        return Cache(token, row, (allocated.peak - before) // STEP_ROWS)

    def _model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model in a dtype, with attention and experts as they run on a GPU."""
        model = self.make().to(dtype).eval()  # dropout is off in training, too
        decoder = model.get_decoder()
        if decoder.config._attn_implementation != "eager":  # eager attention has no kernel: it keeps its scores
            decoder.set_attn_implementation(NAME)
        return model


@contextlib.contextmanager
def _on_meta(name: str) -> Iterator[None]:
    """Runs code of a model on the meta device; its errors become one line."""
    try:
        with torch.device("meta"), _Grouped():
            yield
    except Exception as error:  # code of any family
        text = (str(error).splitlines() or [""])[0][:200]
        raise ValueError(
            f"model {name!r}: {type(error).__name__}: {text}; its layers cannot be measured without weights, so its "
            "memory cannot be planned; measure a short run instead"
        ) from error


def decoder_blocks(decoder: nn.Module) -> list[nn.Module]:
    """The blocks of a decoder, in order."""
    return [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]


def _inputs(decoder: nn.Module, rows: int, length: int) -> tuple[list[tuple[nn.Module, tuple, dict]], list[int]]:
    """One block of each kind with its arguments in a forward pass, and how many blocks there are of the kind."""
    found: dict[Any, tuple] = {}
    counts: Counter = Counter()

    def take(block: nn.Module, args: tuple, kwargs: dict) -> None:
        kind = type(block), tuple((name, p.shape, p.requires_grad) for name, p in block.named_parameters())
        found.setdefault(kind, (block, args, kwargs))
        counts[kind] += 1

    hooks = [block.register_forward_pre_hook(take, with_kwargs=True) for block in decoder_blocks(decoder)]
    cache, given = _cached(decoder)
    with torch.no_grad():  # without a cache, transformers would look for packed sequences in values of positions
        decoder(input_ids=torch.zeros(rows, length, dtype=torch.long), **given)
    for hook in hooks:
        hook.remove()

    def without(value: Any) -> Any:
        return None if value is cache else value

    inputs = []
    for block, args, kwargs in found.values():
        kwargs = {name: without(value) for name, value in kwargs.items()}
        kwargs |= {"use_cache": False} if "use_cache" in kwargs else {}
        inputs.append((block, tuple(map(without, args)), kwargs))
    return inputs, [counts[kind] for kind in found]


def _cached(decoder: nn.Module) -> tuple[DynamicCache, dict[str, Any]]:
    """An empty cache, and the arguments with which a decoder fills it."""
    cache = DynamicCache(config=decoder.config)
    return cache, {states.argument(decoder): cache, "use_cache": True}


def _adapt(model: PreTrainedModel) -> None:
    """Adapters of rank 1 on all linear layers of the decoder, the only trained weights; all are on the meta device."""
    model.requires_grad_(False)
    chosen = set(lora_targets.targets(model, lora_targets.ALL))
    for name, layer in model.named_modules():
        if name in chosen:
            outputs, inputs = layer.weight.T.shape if isinstance(layer, Conv1D) else layer.weight.shape
            layer.register_parameter("rl_down", nn.Parameter(layer.weight.new_empty(1, inputs)))
            layer.register_parameter("rl_up", nn.Parameter(layer.weight.new_empty(outputs, 1)))
            layer.register_forward_hook(lambda m, args, out: out + F.linear(F.linear(args[0], m.rl_down), m.rl_up))


def _run(block: nn.Module, args: tuple, kwargs: dict) -> Pass:
    """The memory of one block.

    Args:
        block: on the meta device.
        args: the hidden states [m, T, H], and others.
        kwargs: others.
    """
    first, *rest = args
    with torch.no_grad(), Allocated() as inference:
        block(first, *rest, **kwargs)
    for p in block.parameters():
        p.grad = torch.empty_like(p) if p.requires_grad else None  # gradients are accumulated
    first.requires_grad_()
    with torch.enable_grad(), Allocated() as allocated:
        hidden = first * 1  # counted, and freed like the output of another block if this one does not keep it
        out = block(hidden, *rest, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        end, gradient = get_gradient_edge(out), torch.empty_like(out)
        del hidden, out
        kept = allocated.now - gradient.nbytes
        torch.autograd.backward(end, gradient)
    return Pass(kept, kept, allocated.peak - kept, inference.peak + first.nbytes)
