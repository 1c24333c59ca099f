"""What a key-value cache of the decode engine does: prompts enter it, and new tokens attend to it.

There are two: flash_cache.py (GPU, half precision) and sdpa_cache.py (anything else).

Dims: b rows decoded together, N tokens of all prompts together, Hq query and Hkv key-value heads of size D.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from common.generation.scheduler import Draft, Group, Space
from common.model.attention import GQA, AttentionPath, Layer, Packed, on_flash


class Cache(Protocol):
    """Keys and values of prompts and completions.

    Attributes:
        space: what the present rollout needs room for.
        pools: keys and values of each layer, as allocated.
        row_tensors: those with one entry per row of the batch, in its order: closing gaps moves the entries.
    """

    space: Space
    pools: list[tuple[torch.Tensor, torch.Tensor]]
    row_tensors: Sequence[torch.Tensor]

    def bytes(self, space: Space) -> int:
        """Memory that a rollout takes."""

    def reserve(self, space: Space) -> bool:
        """Makes room for a rollout.

        Args:
            space: what has to fit.

        Returns:
            Whether memory was allocated anew, so that graphs captured before are void.
        """

    def release(self) -> None:
        """Frees the memory."""

    def starts(self, group: Group) -> list[int]:
        """Where the completion of each row begins, as `decode` takes it."""

    def prompt_start(self, group: Group) -> int:
        """Where the prompt begins."""

    def prefill(self, groups: list[Group]) -> Packed:
        """The attention path of prompts that enter the cache."""

    def extend(self, drafts: list[Draft]) -> "Extension":
        """The attention path of several new tokens per row."""

    def arrange(self, groups: list[Group], b: int) -> None:
        """Prepares `decode` for a batch that has changed: groups, then padding up to b rows."""

    def decode(self, start: torch.Tensor, count: torch.Tensor, longest: int) -> AttentionPath:
        """The attention path of one new token per row.

        Args:
            start: [b] int64, from `starts`.
            count: [b] int64, tokens of the completion, the new one included.
            longest: tokens of the longest row. A CUDA graph cannot know it: what changes between replays must be on the
                device.
        """


class Extension(Packed):
    """Several new tokens of some rows, packed: keys and values enter the cache, queries see all of their row so far.

    The new tokens of a row are its last ones, and each sees those before it.
    """

    write: tuple  # index of the N new tokens into keys or values as allocated
    read: tuple  # index of all tokens of the rows
    seen: Packed  # where each row stands in what is read

    @classmethod
    def reading(cls, drafts: list[Draft], write: tuple, read: tuple, device: torch.device) -> "Extension":
        """The path for drafts; `write` and `read` are its attributes, on the CPU."""
        path = cls.of([draft.new for draft in drafts], device)
        path.seen = Packed.of([draft.group.length + len(draft.tokens) - 1 for draft in drafts], device)
        path.write, path.read = (
            tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in index) for index in (write, read)
        )
        return path

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """The attention path of drafts: m = 1, T = N."""
        module.rl_keys[self.write], module.rl_values[self.write] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        q, k, v = query[0].transpose(0, 1).contiguous(), module.rl_keys[self.read], module.rl_values[self.read]
        if on_flash(query):
            ends = self.offsets, self.seen.offsets, self.longest, self.seen.longest
            return varlen_attn(q, k, v, *ends, scale=scaling, window_size=(-1, 0), **GQA).unsqueeze(0)
        parts = zip(q.split(self.lengths), k.split(self.seen.lengths), v.split(self.seen.lengths), strict=True)
        out = []
        for qkv in parts:
            q, k, v = (x.transpose(0, 1) for x in qkv)
            earlier = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
            mask = earlier.tril(k.shape[1] - q.shape[1])  # the last query sees every key
            out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True))
        return torch.cat(out, dim=1).transpose(0, 1)[None]


def bytes_per_token(layers: Sequence[Layer], dtype: torch.dtype) -> int:
    """Bytes of the keys and values of a token in all layers.

    Args:
        layers: of attention.
        dtype: of the cache.
    """
    return sum(2 * layer.num_heads * layer.head_size for layer in layers) * dtype.itemsize
