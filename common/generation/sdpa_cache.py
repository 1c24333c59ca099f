"""The cache of PyTorch's attention, for any device and dtype, which stores prompt and completion once per row.

Dims: as in cache.py.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from common.generation.cache import Extension, bytes_per_token
from common.generation.scheduler import Draft, Group, Space
from common.model.attention import Layer, Packed


@dataclasses.dataclass
class SdpaDecode:
    """One new token per row, whose cache row holds its prompt and its completion.

    Attributes:
        rows: [b] int64, 0..b-1.
        write: [b] int64, where the new key and value go in the cache row.
        mask: [b, 1, 1, L] bool, the first L places of the cache that a row may see.
    """

    rows: torch.Tensor
    write: torch.Tensor
    mask: torch.Tensor

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """The attention path of a decode step: m = b, T = 1."""
        (b, Hq, _, D), Hkv, L = query.shape, key.shape[1], self.mask.shape[-1]
        module.rl_keys[self.rows, :, self.write] = key[:, :, 0]
        module.rl_values[self.rows, :, self.write] = value[:, :, 0]
        q = query.view(b, Hkv, Hq // Hkv, D)  # heads that share keys as so many queries: no key is repeated
        keys, values = module.rl_keys[:b, :, :L], module.rl_values[:b, :, :L]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask, scale=scaling)
        return out.reshape(b, 1, Hq, D)


class SdpaPrefill(Packed):
    """Packed prompts whose keys and values are also written to the cache rows of their groups."""

    rows: list[slice]  # of each prompt's group

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """The attention path of a prefill: m = 1, T = N."""
        for rows, k, v in zip(self.rows, *(x[0].split(self.lengths, dim=1) for x in (key, value)), strict=True):
            module.rl_keys[rows, :, : k.shape[1]] = k
            module.rl_values[rows, :, : v.shape[1]] = v
        return super().attend(module, query, key, value, scaling)


class SdpaCache:
    """One cache row per row of the batch, prompt and completion side by side, read by PyTorch's own attention.

    A step reads as much of the cache as the longest row needs, which the host has to know: it cannot be a CUDA graph.

    Attributes:
        filled: places of a cache row, from the first on, that any row has written to in this rollout.
    """

    kind = "sdpa"

    def __init__(self, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device):
        """An empty cache; see `FlashCache`."""
        self.layers, self.dtype, self.device = layers, dtype, device
        self.pools: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def row_tensors(self) -> list[torch.Tensor]:
        """Keys and values of all layers, as far as they are filled."""
        return [tensor[:, :, : self.filled] for pool in self.pools for tensor in pool]

    def bytes(self, space: Space) -> int:
        """See `Cache.bytes`."""
        return bytes_per_token(self.layers, self.dtype) * space.rows * (space.longest + space.tokens)

    def reserve(self, space: Space) -> bool:
        """See `Cache.reserve`."""
        self.space, self.filled = space, 0
        rows, length = space.rows, space.longest + space.tokens
        if self.pools and self.pools[0][0].shape[0] >= rows and self.pools[0][0].shape[2] >= length:
            return False
        self.release()
        for layer in self.layers:  # zeros, since what is masked is still multiplied by 0
            shape = (rows, layer.num_heads, length, layer.head_size)
            self.pools.append(tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)))
        return True

    def release(self) -> None:
        """See `Cache.release`."""
        self.pools = []

    def starts(self, group: Group) -> list[int]:
        """Behind the prompt, in every row."""
        return [group.length] * len(group.rows)

    def prompt_start(self, group: Group) -> int:
        """At the beginning of every row."""
        return 0

    def prefill(self, groups: list[Group]) -> SdpaPrefill:
        """See `Cache.prefill`."""
        self.filled = max(self.filled, *(group.length for group in groups))
        path = SdpaPrefill.of([group.length for group in groups], self.device)
        path.rows = [group.places for group in groups]
        return path

    def extend(self, drafts: list[Draft]) -> Extension:
        """See `Cache.extend`."""
        ends = torch.tensor([draft.group.length + len(draft.tokens) - 1 for draft in drafts])
        self.filled = max(self.filled, int(ends.max()))
        new, rows = torch.tensor([draft.new for draft in drafts]), torch.tensor([draft.place for draft in drafts])
        write, read = (
            (rows.repeat_interleave(counts), slice(None), torch.cat([torch.arange(end - n, end) for end, n in spans]))
            for counts, spans in ((new, zip(ends, new, strict=True)), (ends, zip(ends, ends, strict=True)))
        )
        return Extension.reading(drafts, write, read, self.device)

    def arrange(self, groups: list[Group], b: int) -> None:
        """See `Cache.arrange`."""
        self.rows = torch.arange(b, device=self.device)

    def decode(self, start: torch.Tensor, count: torch.Tensor, longest: int) -> SdpaDecode:
        """See `Cache.decode`."""
        write = start + count - 1
        length = min(longest + 1, self.pools[0][0].shape[2])  # a row that has ended stays where it is
        self.filled = max(self.filled, length)
        seen = torch.arange(length, device=self.device) <= write[:, None]
        return SdpaDecode(self.rows, write, seen[:, None, None])
