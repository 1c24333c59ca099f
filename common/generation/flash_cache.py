"""The cache of flash kernels (GPU, half precision), which stores a prompt once per group.

Where a row stands in it is data on the device, so one CUDA graph serves every arrangement of rows.

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


def _flash(q, k, v, offsets, starts, longest, capacity, scaling, used):
    """The flash kernel of torch: queries q [n, Hq, D] of segments `offsets` against `used` keys from `starts` on."""
    args = (q, k, v, offsets, starts, longest, capacity, 0.0, False, False)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*args, scale=scaling, seqused_k=used)
    return out, lse


@torch.library.custom_op("rl_hand::flash_decode", mutates_args=())
def flash_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, starts: torch.Tensor, longest: int,
    capacity: int, scaling: float, used: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of segments of queries to segments of a pool of keys, as one operation that torch.compile leaves alone.

    Args:
        q: [n, Hq, D].
        k: [pool, Hkv, D].
        v: [pool, Hkv, D].
        offsets: [s + 1] int32, where each segment of queries begins.
        starts: [s + 1] int32, where the keys of each segment begin in the pool.
        longest: upper bound of the queries of a segment.
        capacity: upper bound of its keys.
        scaling: factor of the scores.
        used: [s] int32, keys of each segment.

    Returns:
        Output [n, Hq, D] and log-sum-exp of the scores [Hq, n] fp32.
    """
    out, lse = _flash(q, k, v, offsets, starts, longest, capacity, scaling, used)
    return out.contiguous(), lse.contiguous()


@flash_decode.register_fake
def _(q, k, v, offsets, starts, longest, capacity, scaling, used):
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@dataclasses.dataclass
class Segments:
    """Which queries attend to which part of the pool; see `flash_decode`."""

    offsets: torch.Tensor
    starts: torch.Tensor
    used: torch.Tensor
    longest: int
    capacity: int

    def attend(self, q: torch.Tensor, module: nn.Module, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of `flash_decode` over the pool of a layer."""
        bounds = self.offsets, self.starts, self.longest, self.capacity
        return flash_decode(q, module.rl_keys, module.rl_values, *bounds, scaling, self.used)


@dataclasses.dataclass
class FlashDecode:
    """One new token per row: attention to the prompt of the group and to the row's own completion, merged.

    Attributes:
        write: [b] int64, where the new key and value go in the pool.
        prompt: one segment per group of rows.
        own: one segment per row.
    """

    write: torch.Tensor
    prompt: Segments
    own: Segments

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """The attention path of a decode step: m = b, T = 1."""
        b, Hq, _, D = query.shape
        Hkv = key.shape[1]
        module.rl_keys.index_copy_(0, self.write, key[:, :, 0])
        module.rl_values.index_copy_(0, self.write, value[:, :, 0])
        # the query heads of one key-value head become queries of their own, so that the kernel reads the cache once
        q = query.view(b, Hkv, Hq // Hkv, D).transpose(1, 2).reshape(-1, Hkv, D)
        out_p, lse_p = self.prompt.attend(q, module, scaling)
        out_o, lse_o = self.own.attend(q, module, scaling)
        weight = torch.sigmoid(lse_p - lse_o).transpose(0, 1).unsqueeze(-1)
        out = (out_p.float() * weight + out_o.float() * (1 - weight)).to(query.dtype)
        return out.view(b, Hq // Hkv, Hkv, D).transpose(1, 2).reshape(b, 1, Hq, D)


class FlashPrefill(Packed):
    """Packed prompts whose keys and values are also written to the pool."""

    write: torch.Tensor  # [N] int64, where they go

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """The attention path of a prefill: m = 1, T = N."""
        module.rl_keys.index_copy_(0, self.write, key[0].transpose(0, 1))
        module.rl_values.index_copy_(0, self.write, value[0].transpose(0, 1))
        return super().attend(module, query, key, value, scaling)


class FlashCache:
    """One pool of token slots per layer: prompts, once per group; completions, one stretch per row; a slot for padding.

    Padding rows fill a batch up to the size that a graph was captured for; they write to the last slot and read it.

    Attributes:
        padding: the last slot.
        segments: [3, segments + 1] int32: offsets of the queries, starts and lengths of the prompts they attend to.
    """

    kind = "flash"
    row_tensors = ()  # rows move in the batch, but stay where they are in the pool

    def __init__(self, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device):
        """An empty cache.

        Args:
            layers: the attention modules.
            dtype: of keys and values.
            device: of the model.
        """
        self.layers, self.dtype, self.device = layers, dtype, device
        self.queries_per_key = layers[0].queries_per_key
        self.pools: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.padding = 0
        self.segments = torch.empty(0)

    def bytes(self, space: Space) -> int:
        """See `Cache.bytes`."""
        return bytes_per_token(self.layers, self.dtype) * (space.prompts * space.longest + space.rows * space.tokens)

    def reserve(self, space: Space) -> bool:
        """See `Cache.reserve`."""
        self.space = space
        self.first_row = space.prompts * space.longest
        slots, segments = self.first_row + space.rows * space.tokens, self.num_segments(space.batch)
        if self.pools and slots <= self.padding and segments < self.segments.shape[1]:
            return False
        self.release()
        self.padding = slots
        self.segments = torch.zeros(3, segments + 1, dtype=torch.int32, device=self.device)
        for layer in self.layers:
            shape = (slots + 1, layer.num_heads, layer.head_size)
            keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
            keys[-1], values[-1] = 0, 0
            self.pools.append((keys, values))
        return True

    def release(self) -> None:
        """See `Cache.release`."""
        self.pools, self.segments = [], torch.empty(0)

    def num_segments(self, b: int) -> int:
        """Groups that a batch of b rows may hold: one per prompt, and those of padding rows."""
        return self.space.prompts + -(-b // self.space.group_size)

    def graph_key(self, b: int) -> tuple[int, ...]:
        """What a CUDA graph for b rows depends on besides the addresses of tensors."""
        return b, self.num_segments(b), self.space.group_size, self.space.tokens, _power_of_two(self.space.longest)

    def starts(self, group: Group) -> list[int]:
        """First slot of each completion in the pool."""
        return [self.first_row + row.slot * self.space.tokens for row in group.rows]

    def prompt_start(self, group: Group) -> int:
        """First slot of the prompt in the pool."""
        return group.slot * self.space.longest

    def prefill(self, groups: list[Group]) -> FlashPrefill:
        """See `Cache.prefill`."""
        path = FlashPrefill.of([group.length for group in groups], self.device)
        write = torch.cat([torch.arange(group.length) + group.slot * self.space.longest for group in groups])
        path.write = write.to(self.device, non_blocking=True)
        return path

    def extend(self, drafts: list[Draft]) -> Extension:
        """See `Cache.extend`."""
        write, read = [], []
        for draft in drafts:
            prompt = draft.group.slot * self.space.longest
            start = self.first_row + draft.group.rows[draft.member].slot * self.space.tokens
            end = start + len(draft.tokens) - 1
            write.append(torch.arange(start + draft.count - 1, end))
            read += [torch.arange(prompt, prompt + draft.group.length), torch.arange(start, end)]
        return Extension.reading(drafts, (torch.cat(write),), (torch.cat(read),), self.device)

    def arrange(self, groups: list[Group], b: int) -> None:
        """Writes down which rows attend to which prompt."""
        left = b - sum(len(group.rows) for group in groups)
        padding = [min(self.space.group_size, left - i) for i in range(0, left, self.space.group_size)]
        counts = [len(group.rows) for group in groups] + padding
        empty = [0] * (self.segments.shape[1] - 1 - len(counts))
        starts = [group.slot * self.space.longest for group in groups] + [self.padding] * len(padding) + empty
        used = [group.length for group in groups] + [1] * (len(padding) + len(empty))
        offsets = F.pad(torch.tensor(counts + empty).cumsum(0), (1, 0)) * self.queries_per_key
        table = torch.stack([offsets, torch.tensor([*starts, 0]), torch.tensor([*used, 1])])
        self.segments.copy_(table.to(torch.int32), non_blocking=True)

    def decode(self, start: torch.Tensor, count: torch.Tensor, longest: int) -> FlashDecode:
        """See `Cache.decode`: bounds of a whole rollout take the place of `longest`, so that a graph may hold them."""
        b, queries = len(start), self.queries_per_key
        offsets, starts, used = self.segments[:, : self.num_segments(b) + 1]
        most_queries = self.space.group_size * queries
        prompt = Segments(offsets, starts, used[:-1], most_queries, _power_of_two(self.space.longest))
        own_offsets = torch.arange(b + 1, dtype=torch.int32, device=self.device) * queries
        own_starts = F.pad(start, (0, 1)).to(torch.int32)
        own = Segments(own_offsets, own_starts, count.to(torch.int32), queries, self.space.tokens)
        return FlashDecode(start + count - 1, prompt, own)


def _power_of_two(n: int) -> int:
    """The next power of two: bounds in a graph should not change with every batch."""
    return 1 << (n - 1).bit_length()
