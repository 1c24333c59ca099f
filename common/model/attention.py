"""Attention for packed sequences, plugged into transformers through its attention interface.

`install` makes it the attention of a model. Ordinary calls still run transformers' own SDPA
attention with its masks. A call with `rl=...` takes another `AttentionPath`: `Packed`, for training
on sequences without padding, `Shared`, if some begin with the same prompt, or a key-value cache of
common/generation/flash_cache.py and sdpa_cache.py, for decoding.

Hybrid models mix attention with layers that keep a state per sequence: linear attention, state
spaces, convolutions. Such layers read padded rows (`Padded`), and carry their states in a cache of
transformers (common/model/states.py).

Dims: N tokens of all sequences together, m sequences, T tokens of one, Hq query and Hkv key-value
heads of size D.
"""

import dataclasses
import itertools
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from common.model import agreement, states
from common.model.modes import eval_mode

NAME = "rl_hand"
FULL = 2**31  # tokens; longer than any sequence
GQA = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__kwdefaults__ else {}  # torch 2.11 does GQA without it
UNSUPPORTED = {"softcap": "soft-capped attention", "s_aux": "attention sinks", "position_bias": "a position bias"}


class AttentionPath(Protocol):
    """An attention implementation for one forward pass, passed to the model as `rl`."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            module: the attention module.
            query: [m, Hq, T, D].
            key: [m, Hkv, T, D].
            value: [m, Hkv, T, D].
            scaling: multiplies the scores.

        Returns:
            [m, T, Hq, D].
        """


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    rl: AttentionPath | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; see `AttentionPath.attend` for shapes."""
    if rl is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    probe = rl.path if isinstance(rl, Padded) else rl
    if isinstance(probe, Probe):
        probe.record(module, query, key, value, kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    width = value.shape[-1]
    if width < key.shape[-1]:  # as in latent attention; kernels want one size
        value = F.pad(value, (0, key.shape[-1] - width))
    return rl.attend(module, query, key, value, scaling)[..., :width].contiguous(), None


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask of ordinary calls; notes the sliding window, which some families tell the mask alone."""
    if kwargs.get("local_size") is not None:
        _windows_of_masks.add(kwargs["local_size"])
    return sdpa_mask(*args, **kwargs)


_windows_of_masks: set[int] = set()
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


def inputs(device: torch.device, path: AttentionPath) -> dict[str, Any]:
    """Keyword arguments for a decoder call on an attention path, without padding.

    Args:
        device: of the model.
        path: computes the attention.
    """
    # transformers passes a mask with four dimensions on unchanged; otherwise it builds a dense one
    # for packed positions
    return {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device), "use_cache": False, "rl": path}


def on_flash(x: torch.Tensor) -> bool:
    """Whether torch's flash kernels support this tensor [..., D]."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] <= 256 and x.shape[-1] % 8 == 0


@dataclasses.dataclass
class Packed:
    """Causal attention within each of m sequences, concatenated in one row of N tokens.

    Attributes:
        lengths: of the sequences, on the host.
        offsets: [m + 1] int32, the start of each, on the device of the model.
        longest: upper bound of the lengths.
    """

    lengths: list[int]
    offsets: torch.Tensor
    longest: int

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Packed":
        """Packed attention for sequences of these lengths.

        Args:
            lengths: tokens of each sequence.
            device: of the model.
        """
        offsets = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
        # rounded up to a power of two, because a new value recompiles a compiled layer
        return cls(lengths, offsets.to(device, non_blocking=True), 1 << (max(lengths) - 1).bit_length())

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See `AttentionPath.attend`; m = 1 and T = N."""
        if on_flash(query):
            q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
            ends = self.offsets, self.offsets, self.longest, self.longest
            return varlen_attn(q, k, v, *ends, scale=scaling, window_size=(-1, 0), **GQA).unsqueeze(0)
        parts = zip(*(x.split(self.lengths, dim=2) for x in (query, key, value)), strict=True)
        out = [F.scaled_dot_product_attention(*qkv, is_causal=True, scale=scaling, enable_gqa=True) for qkv in parts]
        return torch.cat(out, dim=2).transpose(1, 2)


@dataclasses.dataclass
class Shared(Packed):
    """Packed attention in which sequences share keys: a prompt stands in the first sequence of its group alone.

    `lengths` and `offsets` are those of the queries, K keys are read. Sequences without queries are left out.

    Attributes:
        places: [K] int64, where each key of each sequence stands in the row, on the device of the model.
        key_lengths: keys of each sequence, on the host.
        key_offsets: [m + 1] int32, as `offsets`.

    Source: Prefix Grouper, arXiv 2506.05433.
    """

    places: torch.Tensor
    key_lengths: list[int]
    key_offsets: torch.Tensor

    @classmethod
    def of(cls, lengths: list[int], device: torch.device, heads: list[int], shared: list[int]) -> "Shared":
        """Attention for sequences that begin with tokens of others.

        Args:
            lengths: tokens of each sequence that stand in the row.
            device: of the model.
            heads: where the row has the first token of each sequence.
            shared: tokens of each sequence that stand there, before its own; 0: all are its own.
        """
        starts = itertools.accumulate(lengths, initial=0)
        parts = [x for x in zip(lengths, starts, heads, shared, strict=False) if x[0]]
        places = [range_ for n, start, head, k in parts for range_ in ((head, head + k), (start, start + n))]
        places = torch.cat([torch.arange(*x) for x in places])
        own, keys = (Packed.of([x[0] + read * x[3] for x in parts], device) for read in (False, True))
        longest = keys.longest  # of queries too: an upper bound that changes seldom
        return cls(own.lengths, own.offsets, longest, places.to(device, non_blocking=True), keys.lengths, keys.offsets)

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See `AttentionPath.attend`; m = 1 and T = N."""
        wide = torch.promote_types(query.dtype, torch.float32)  # in which the gradients of a shared key are summed
        key, value = (x[0].transpose(0, 1).to(wide).index_select(0, self.places).to(x.dtype) for x in (key, value))
        if on_flash(query):  # its causal mask ends at the last key, however many queries there are
            q = query[0].transpose(0, 1).contiguous()
            ends = self.offsets, self.key_offsets, self.longest, self.longest
            return varlen_attn(q, key, value, *ends, scale=scaling, window_size=(-1, 0), **GQA).unsqueeze(0)
        keys, values = (x.transpose(0, 1)[None].split(self.key_lengths, dim=2) for x in (key, value))
        out = []
        for q, k, v in zip(query.split(self.lengths, dim=2), keys, values, strict=True):
            own, read = q.shape[2], k.shape[2]
            mask = None if own == read else torch.ones(own, read, dtype=torch.bool, device=q.device).tril(read - own)
            how = dict(attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
            out.append(F.scaled_dot_product_attention(q, k, v, **how))
        return torch.cat(out, dim=2).transpose(1, 2)


class Padded:
    """Another attention path for m rows that are padded on the left, or not at all; padding gives zeros."""

    def __init__(self, path: AttentionPath, mask_mT: torch.Tensor):
        """Wraps a path for packed sequences.

        Args:
            path: takes the N tokens of all rows, in order.
            mask_mT: bool, False where there is padding.
        """
        self.path = path
        self.tokens_N = mask_mT.flatten().nonzero().squeeze(1)

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See `AttentionPath.attend`."""
        m, T, tokens_N = query.shape[0], query.shape[2], self.tokens_N
        packed = (x.transpose(1, 2).flatten(0, 1)[tokens_N].transpose(0, 1)[None] for x in (query, key, value))
        out = self.path.attend(module, *packed, scaling)[0]
        return out.new_zeros(m * T, *out.shape[1:]).index_copy_(0, tokens_N, out).view(m, T, *out.shape[1:])


class Probe(Packed):
    """Packed attention that records which modules attend, and how."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.seen: list[Layer] = []
        self.unsupported: list[str] = []
        self.window = FULL

    def record(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict):
        """Records one call; `attention` calls it before `attend`."""
        self.seen.append(Layer(module, key.shape[1], key.shape[-1], query.shape[1] // key.shape[1]))
        self.unsupported += [kind for name, kind in UNSUPPORTED.items() if kwargs.get(name) is not None]
        if key.shape[:-1] != value.shape[:-1] or not value.shape[-1] <= key.shape[-1] == query.shape[-1]:
            self.unsupported.append("values wider than keys")
        window = kwargs.get("sliding_window")
        self.window = min(self.window, FULL if window is None else window)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One attention module, with Hkv key-value heads of size D."""

    module: nn.Module
    num_heads: int
    head_size: int
    queries_per_key: int


@dataclasses.dataclass(frozen=True)
class Support:
    """What a model's layers support.

    Attributes:
        not_packed: why sequences cannot be packed; "" if they can.
        not_cached: why the caches of common/generation/ cannot hold what its layers remember; "" if
            they can.
        layers: its attention modules.
        window: up to this many tokens, sliding windows are full attention too.
        kept: states that its other layers keep of each sequence.
    """

    not_packed: str
    not_cached: str
    layers: tuple[Layer, ...] = ()
    window: int = FULL
    kept: tuple[states.State, ...] = ()


def _neither(reason: str) -> Support:
    return Support(reason, reason)


@torch.no_grad()
def install(model: nn.Module) -> Support:
    """Makes this the attention of a model, if its attention layers are plain causal attention.

    That is tested, not assumed from the model's name: two short sequences are computed on a path of
    this module and alone.

    Args:
        model: a transformers causal language model, wrapped by peft or not.

    Returns:
        What the model supports.
    """
    decoder = model.get_decoder()
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return _neither("its layers are spread over several devices")
    if not isinstance(decoder, PreTrainedModel) or not decoder._can_set_attn_implementation():
        return _neither("its attention does not go through the attention interface of transformers")
    kinds = set(getattr(decoder.config, "layer_types", None) or ())
    if odd := kinds - {"full_attention", "sliding_attention", *states.LAYER_TYPES}:
        return _neither(f"it has layers of another kind ({', '.join(sorted(odd))})")
    before = decoder.config._attn_implementation
    try:
        # compiled layers run eagerly here, because the compiler keeps few variants of each
        with eval_mode(model), torch.compiler.set_stance("force_eager"):
            support = _examine(model, decoder)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the model's own code, which was not made for this
        support = _neither(f"its code does not take packed rows ({type(error).__name__}: {error})")
    if support.not_packed and support.not_cached and before != NAME:
        decoder.set_attn_implementation(before)
    return support


def window_of(model: nn.Module) -> int:
    """The smallest sliding window by which transformers' cache forgets keys; FULL if it forgets none.

    Args:
        model: a transformers causal language model, wrapped by peft or not.
    """
    try:
        layers = DynamicCache(config=model.config).layers
    except AttributeError:  # a config without layers: such models have caches of their own
        return FULL
    return min((layer.sliding_window for layer in layers if getattr(layer, "sliding_window", None)), default=FULL)


def _examine(model: nn.Module, decoder: nn.Module) -> Support:
    """Compares hidden states on a path of this module with those from the model's own attention."""
    if not (expected := states.num_attention_layers(decoder)):
        return _neither("it has no attention layers")
    kept = states.kept_by(decoder)
    rows = [agreement.token_ids(model, numbers) for numbers in ([1, 2, 3, 4], [5, 3, 1, 2] if kept else [5, 3, 1])]
    ids, lengths = torch.tensor([[*rows[0], *rows[1]]], device=model.device), [len(row) for row in rows]
    alone = agreement.plain_states(model, rows)
    decoder.set_attn_implementation(NAME)
    probe = Probe.of(lengths, model.device)
    if kept:  # rows of one length
        ids = ids.view(2, -1)
        path: AttentionPath = Padded(probe, torch.ones_like(ids, dtype=torch.bool))
        positions = torch.arange(lengths[0], device=model.device).expand(2, -1)
    else:
        path, positions = probe, torch.cat([torch.arange(n, device=model.device) for n in lengths])[None]
    hidden = decoder(input_ids=ids, position_ids=positions, **inputs(model.device, path)).last_hidden_state
    hidden = hidden.flatten(0, 1).split(lengths)
    modules = {layer.module for layer in probe.seen}
    if len(modules) > expected:
        return _neither("some of its layers read the keys and values of others")
    if len(modules) < expected:
        return _neither(f"{len(modules)} of its {expected} attention layers are plain attention")
    if len(probe.seen) > len(modules):
        return _neither("some of its attention modules attend more than once per token")
    if len({layer.queries_per_key for layer in probe.seen}) > 1:
        return _neither("its layers differ in their number of heads")
    if probe.unsupported:
        return _neither(f"it has {probe.unsupported[0]}")
    error = agreement.largest_error(hidden, alone)
    if not error <= agreement.allowed(error, model, rows):  # true for NaN
        return _neither(f"sequences computed together give hidden states that differ by {error:.3g} of their size")
    _windows_of_masks.clear()  # filled by an ordinary call; one with `rl` builds no mask
    decoder(input_ids=ids, use_cache=False)
    window_of_mask = min(_windows_of_masks, default=FULL)
    reason = f"some of its layers keep a state ({', '.join(sorted({state.kind for state in kept}))})" if kept else ""
    return Support(reason, "", tuple(probe.seen), min(probe.window, window_of_mask), kept)


def decoder_layers(model: nn.Module, support: Support) -> list[nn.Module]:
    """The transformer blocks of a model that hold an attention module.

    Args:
        model: a transformers causal language model.
        support: from `install`.
    """
    attends = {layer.module for layer in support.layers}
    blocks = [m for m in model.get_decoder().modules() if isinstance(m, GradientCheckpointingLayer)]
    return [block for block in blocks if any(module in attends for module in block.modules())]
