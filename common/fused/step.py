"""One decode step as a sequence of the kernels in kernels.py: which tiles, which buffers, which order.

Dims: b rows, H hidden size, D head size, HQ query and HKV key-value heads, V vocabulary.
"""

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from common.fused import blocks
from common.maths.sampling_options import Sampling
from common.model import attention
from common.model.head import mm

try:
    import triton

    from common.fused import kernels
except ImportError:  # `blocks.reason_against` says so
    triton = None

FEW, SOME = 16, 64  # rows: the sizes at which tiles change
ROWS = 128  # buffers hold a multiple of this, at least the largest tile: kernels need not mask rows
PROGRAMS = 264  # two for each multiprocessor of a large GPU
PART_TOKENS = 128  # attention is split into parts of at least this many tokens
LONG_PROMPT = 512  # tokens from which rows of a group read their prompt together
MAX_PARTS = 8
SUM_ROWS = 16  # rows of a program that sums blocks of logits
LARGE = 2**31  # multiplications from which a product of cuBLAS and small kernels around it are faster


class Tile(NamedTuple):
    """How a kernel is cut into programs: rows, outputs and inputs of each, parts of the inputs, warps, stages."""

    BM: int
    BN: int
    BK: int
    parts: int
    warps: int
    stages: int


# by rows: up to FEW; up to SOME, by hidden size: below 1,536, below 3,072, above; more. The fastest
# of those measured with the shapes of Qwen2.5-0.5B, 1.5B and 7B on an H200: docs/decoding.md
SIZES = (1536, 3072)
TILES = {
    "qkv": (
        Tile(16, 32, 128, 1, 4, 5),
        (Tile(64, 16, 128, 1, 4, 5), Tile(64, 16, 128, 1, 4, 5), Tile(64, 32, 128, 1, 4, 4)),
        Tile(64, 64, 128, 1, 4, 5),
    ),
    "o": (
        Tile(16, 32, 128, 4, 4, 4),
        (Tile(64, 16, 128, 1, 4, 4), Tile(64, 16, 128, 1, 4, 4), Tile(64, 32, 128, 2, 4, 4)),
        Tile(64, 32, 128, 1, 4, 4),
    ),
    "gate_up": (
        Tile(16, 32, 64, 1, 4, 4),
        (Tile(64, 32, 128, 1, 4, 3), Tile(64, 64, 64, 1, 4, 4), Tile(64, 32, 128, 1, 4, 3)),
        Tile(64, 64, 64, 1, 4, 3),
    ),
    "down": (
        Tile(16, 32, 128, 8, 4, 4),
        (Tile(64, 32, 128, 4, 4, 4), Tile(64, 32, 128, 4, 4, 4), Tile(64, 64, 128, 4, 4, 3)),
        Tile(64, 64, 128, 2, 4, 4),
    ),
    "head": (Tile(16, 128, 128, 1, 4, 3), 3 * (Tile(64, 128, 64, 1, 4, 4),), Tile(64, 128, 64, 1, 4, 4)),
}


class Step:
    """The decode step of one model; what it writes it allocates once, for the largest batch of a rollout.

    Attributes:
        rows: of the largest batch that there is room for.
        positions: of the longest sequence.
        padded: rows of the buffers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        support: attention.Support,
        end_ids: Sequence[int],
        suppressed_ids: Sequence[int],
    ):
        """Reads the model; no memory is allocated yet.

        Args:
            model: one that `blocks.reason_against` has nothing against.
            support: from `attention.install`.
            end_ids: every token that ends a completion.
            suppressed_ids: tokens that are never drawn.
        """
        self.model, self.device, self.weights = model, model.device, blocks.read(model, support)
        layer = support.layers[0]
        self.HKV, self.queries, self.D = layer.num_heads, layer.queries_per_key, layer.head_size
        self.HQ, (self.V, self.H) = self.HKV * self.queries, self.weights.head.shape
        self.kinds = torch.zeros(self.V, dtype=torch.int8, device=self.device)
        self.kinds[list(end_ids)] = 2
        self.kinds[list(suppressed_ids)] = 1
        self.rows, self.positions, self.compiled = 0, 0, set()
        # kernels may begin before the one before them has ended
        self.overlap = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] >= 9

    def reserve(self, rows: int, positions: int) -> bool:
        """Makes room for a rollout.

        Args:
            rows: of the largest batch.
            positions: of the longest sequence.

        Returns:
            Whether memory was allocated anew, so that graphs captured before are void.
        """
        if rows <= self.rows and positions <= self.positions:
            return False
        self.rows, half = max(rows, self.rows), self.weights.head.dtype
        padded = self.padded = triton.cdiv(self.rows, ROWS) * ROWS
        intermediate, blocks_of_V = self.weights.blocks[0].gate.shape[0], triton.cdiv(self.V, 128)

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        # the residual stream, the stream times the weight of the next norm, and its sums of squares
        self.x, self.scaled = (buffer(padded, self.H, dtype=half) for _ in range(2))
        self.squares, self.normed = buffer(triton.cdiv(self.H, 16), padded), buffer(padded, self.H, dtype=half)
        self.qkv = buffer(padded, (self.HQ + 2 * self.HKV) * self.D, dtype=half)
        self.attended = buffer(padded, self.HQ * self.D, dtype=half)
        self.gate, self.up, self.gated = (buffer(padded, intermediate, dtype=half) for _ in range(3))
        self.products = buffer(max(MAX_PARTS * SOME, 2 * padded), self.H)
        self.tiles_arrived = buffer(triton.cdiv(self.H, 16) * triton.cdiv(padded, 16), dtype=torch.int32)
        self.parts, self.lse = buffer(2 * MAX_PARTS, padded, self.HQ, self.D), buffer(2 * MAX_PARTS, padded, self.HQ)
        self.heads_arrived = buffer(padded, self.HQ, dtype=torch.int32)
        self.few_logits = buffer(SOME, self.V)
        self.tops, self.sums = (buffer(padded, blocks_of_V) for _ in range(2))
        if positions > self.positions:
            positions = self.positions = triton.next_power_of_2(positions)
            place = torch.arange(positions, device=self.device)[None]
            cos, sin = self.model.get_decoder().rotary_emb(self.x[None], position_ids=place)
            self.cos, self.sin = (table.reshape(positions, self.D).contiguous() for table in (cos, sin))
        return True

    @property
    def bytes_per_row(self) -> int:
        """Memory of a row of the batch, logits excluded."""
        half = 4 * self.H + (2 * self.HQ + 2 * self.HKV) * self.D + 3 * self.weights.blocks[0].gate.shape[0]
        return 2 * half + 4 * MAX_PARTS * (self.H + 2 * self.HQ * (self.D + 1))

    @torch.no_grad()
    def logits(self, b: int, table: torch.Tensor, cache: Any, sampling: Sampling) -> torch.Tensor:
        """Logits [b, V] fp32 of the next token of the first b rows; keeps for `draw` what it needs.

        Args:
            b: rows.
            table: of `runner.RowState`.
            cache: a `cache.FlashCache` with keys and values of the rows.
            sampling: of a draw that follows.
        """
        if self.device.type == "cuda" and (b, cache.space) not in self.compiled:
            self._compile(b, table, cache, sampling)
            self.compiled.add((b, cache.space))
        self._step(b, table, cache, sampling)
        return self.found[:b]

    def _step(self, b: int, table: torch.Tensor, cache: Any, sampling: Sampling) -> None:
        w, stream = self.weights, (self.x, self.scaled, self.squares)
        norms = [*(block.attention_norm for block in w.blocks), w.norm]
        width = triton.next_power_of_2(self.H)
        self._launch(kernels.embed, (b,), table, table.shape[1], w.embedding, norms[0], *stream, self.H, width)
        self.tiles = 1  # of the stream, of which each has its sums of squares
        for i, (block, pool) in enumerate(zip(w.blocks, cache.pools, strict=True)):
            self._qkv(b, block)
            self._attend(b, table, cache, block, pool)
            self._linear_add("o", b, self.attended, block.o, block.mlp_norm)
            self._gate_up(b, block)
            self._linear_add("down", b, self.gated, block.down, norms[i + 1])
        self._head(b, table, sampling)

    def draws(self, sampling: Sampling) -> bool:
        """Whether `draw` draws from this distribution: the softmax over all tokens, at a temperature."""
        return sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0

    def draw(
        self,
        b: int,
        table: torch.Tensor,
        uniforms: torch.Tensor,
        out_tokens: torch.Tensor,
        out_logps: torch.Tensor,
        healthy: torch.Tensor,
        T: int,
        sampling: Sampling,
    ) -> None:
        """Draws a token for each of the first b rows from the logits of `logits`, and records it.

        Args:
            b: rows.
            table: of `runner.RowState`; tokens, counts and ends are renewed.
            uniforms: [B * T] fp64, random numbers in [0, 1) of all sequences of the rollout.
            out_tokens: [B * T + 1] int64; the last place takes what ended rows draw.
            out_logps: [B * T + 1] fp32.
            healthy: bool; set to False if a probability is not finite.
            T: tokens of a completion, at most.
            sampling: as in `logits`.
        """
        blocks_of_V, temperature = self.tops.shape[1], sampling.temperature or 1.0
        self._launch(
            kernels.draw, (b,), self.found, self.tops, self.sums, self.kinds, table, table.shape[1], uniforms,
            out_tokens, out_logps, healthy, T, len(out_tokens) - 1, temperature, sampling.min_new_tokens, self.V,
            blocks_of_V, sampling.temperature == 0, triton.next_power_of_2(blocks_of_V),
        )  # fmt: skip

    def _compile(self, *args: Any) -> None:
        """Compiles the kernels of a step side by side; a launch would compile them one after another."""
        jobs: dict[tuple, Callable] = {}

        def note(kernel: Any, grid: tuple[int, ...], *args: Any, **options: int) -> None:
            values = tuple(x for x in (*args, *options.values()) if not isinstance(x, torch.Tensor))
            jobs[kernel, values] = functools.partial(kernel.warmup, *args, grid=grid, **options)

        self._start = note
        try:
            self._step(*args)
        finally:
            del self._start  # the method again
        with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(self.device,)) as pool:
            list(pool.map(lambda job: job(), jobs.values()))

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 2) -> None:
        options = {"launch_pdl": True} if self.overlap else {}
        self._start(kernel, grid, *args, self.overlap, num_warps=warps, num_stages=stages, **options)

    def _start(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: int) -> None:
        kernel[grid](*args, **options)

    def _squares(self) -> tuple[torch.Tensor, int, int]:
        return self.squares, self.tiles, self.padded

    def _qkv(self, b: int, block: blocks.Block) -> None:
        NQ, NKV, t = self.HQ * self.D, self.HKV * self.D, _tile("qkv", b, self.H)
        N, BN = NQ + 2 * NKV, math.gcd(t.BN, NQ, NKV)
        if _is_large(b, block.q):
            self._normalize(b)
            products = zip((0, NQ, NQ + NKV), (block.q, block.k, block.v), block.biases or 3 * (None,), strict=True)
            for first, weight, bias in products:
                self.qkv[:b, first : first + len(weight)] = F.linear(self.normed[:b], weight, bias)
            return
        self._launch(
            kernels.qkv, (N // BN, triton.cdiv(b, t.BM)), self.scaled, *self._squares(), block.q, block.k, block.v,
            *(block.biases or 3 * (block.q,)), self.qkv, self.weights.eps, NQ, NKV, self.H, self._most(b),
            block.biases is not None, t.BM, BN, t.BK, warps=t.warps, stages=t.stages,
        )  # fmt: skip

    def _attend(self, b: int, table: torch.Tensor, cache: Any, block: blocks.Block, pool: tuple) -> None:
        G, longest, own_tokens = cache.space.group_size, cache.space.longest, cache.space.tokens
        M_own = max(16, triton.next_power_of_2(self.queries))
        M_prompt = max(M_own, min(64, triton.next_power_of_2(G * self.queries)))
        tiles, prompt_parts, prompt_programs = triton.cdiv(G, M_prompt // self.queries), 0, 0
        if G > 1 and longest >= LONG_PROMPT:
            prompt_parts = _parts(triton.cdiv(b, G) * self.HKV * tiles, longest)
            prompt_programs = cache.num_segments(b) * tiles * self.HKV * prompt_parts
        own_parts = _parts(b * self.HKV, own_tokens if prompt_parts else own_tokens + longest)
        norms = block.head_norms or 2 * (block.q,)
        self._launch(
            kernels.attention, (prompt_programs + b * self.HKV * own_parts,), self.qkv, self.cos, self.sin, *norms,
            *pool, table, table.shape[1], cache.segments, cache.segments.shape[1], self.attended, self.parts, self.lse,
            self.heads_arrived, self.weights.eps, self.weights.scaling, b, prompt_programs, self.HQ, self.HKV, self.D,
            block.head_norms is not None, M_prompt, M_own, 64, tiles, prompt_parts, own_parts,
        )  # fmt: skip

    def _linear_add(self, name: str, b: int, a: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> None:
        (N, K), t, stream = weight.shape, _tile(name, b, self.H), (self.x, self.scaled, self.squares)
        if _is_large(b, weight):
            product = torch.mm(a[:b], weight.t(), out=self.normed[:b])
            BM, BN = 16, 64
            self.tiles = triton.cdiv(N, BN)
            grid = self.tiles, triton.cdiv(b, BM)
            self._launch(kernels.add, grid, product, *stream, norm, N, self.padded, BM, BN)
            return
        parts = max(1, min(t.parts, K // (2 * t.BK)))
        self.tiles = triton.cdiv(N, t.BN)
        self._launch(
            kernels.linear_add, (self.tiles, triton.cdiv(b, t.BM), parts), a, weight, *stream, norm, self.products,
            self.tiles_arrived, N, self.padded, K, parts, t.BM, t.BN, t.BK, warps=t.warps,
            stages=t.stages,
        )  # fmt: skip

    def _gate_up(self, b: int, block: blocks.Block) -> None:
        (N, K), t = block.gate.shape, _tile("gate_up", b, self.H)
        if _is_large(b, block.gate):
            self._normalize(b)
            gate, up = (
                torch.mm(self.normed[:b], weight.t(), out=out[:b])
                for weight, out in ((block.gate, self.gate), (block.up, self.up))
            )
            self._launch(kernels.silu_mul, (triton.cdiv(N, 1024), b), gate, up, self.gated, N, 1024)
            return
        self._launch(
            kernels.gate_up, (triton.cdiv(N, t.BN), triton.cdiv(b, t.BM)), self.scaled, *self._squares(), block.gate,
            block.up, self.gated, self.weights.eps, N, K, self._most(b), t.BM, t.BN, t.BK,
            warps=t.warps, stages=t.stages,
        )  # fmt: skip

    def _head(self, b: int, table: torch.Tensor, sampling: Sampling) -> None:
        t, w, temperature = _tile("head", b, self.H), self.weights, sampling.temperature or 1.0
        grid = triton.cdiv(b, t.BM), self.tops.shape[1]
        options = self.tops, self.sums, self.kinds, table, table.shape[1]
        if b > SOME:
            self._normalize(b, w.logit_scale)
            rows = triton.cdiv(b, SUM_ROWS)
            self.found = mm(self.normed[: rows * SUM_ROWS], w.head.t())
            rest = temperature, sampling.min_new_tokens, self.V, SUM_ROWS
            self._launch(kernels.sum_blocks, (rows, grid[1]), self.found, *options, *rest)
            return
        self.found = self.few_logits
        self._launch(
            kernels.head, grid, self.scaled, *self._squares(), w.head, self.found, *options, w.eps, w.logit_scale,
            temperature, sampling.min_new_tokens, self.V, self.H, self._most(b), t.BM, t.BK, warps=t.warps,
            stages=t.stages,
        )  # fmt: skip

    def _normalize(self, b: int, factor: float = 1.0) -> None:
        self._launch(
            kernels.normalize, (b,), self.scaled, *self._squares(), self.normed, self.weights.eps, factor, self.H,
            triton.next_power_of_2(self.H), self._most(b),
        )  # fmt: skip

    def _most(self, b: int) -> int:
        """Tiles of the stream, at most, as a power of two."""
        return triton.next_power_of_2(triton.cdiv(self.H, min(_tile(name, b, self.H).BN for name in ("o", "down"))))


def _is_large(b: int, weight: torch.Tensor) -> bool:
    return b > SOME and b * weight.numel() >= LARGE


def _tile(name: str, b: int, H: int) -> Tile:
    few, some, many = TILES[name]
    return few if b <= FEW else some[bisect.bisect_right(SIZES, H)] if b <= SOME else many


def _parts(programs: int, tokens: int) -> int:
    """Into how many parts attention over so many tokens is split, a power of two."""
    parts = 1
    while 2 * parts <= MAX_PARTS and 2 * parts * programs <= PROGRAMS and tokens >= 2 * parts * PART_TOKENS:
        parts *= 2
    return parts
