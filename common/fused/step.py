"""One decode step as a sequence of the kernels in kernels.py: which tiles, which buffers, which order.

Dims: b rows, H hidden size, D head size, HQ query and HKV key-value heads, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from common.fused import blocks
from common.fused.tiles import SOME, Tile, is_large, tile
from common.maths.sampling_options import Sampling
from common.model import attention
from common.model.head import mm

try:
    import triton

    from common.fused import kernels
except ImportError:  # `blocks.reason_against` says so
    triton = None

ROWS = 128  # buffers hold a multiple of this, at least the largest tile: kernels need not mask rows
PROGRAMS = 264  # two for each multiprocessor of a large GPU
PART_TOKENS = 128  # attention is split into parts of at least this many tokens
BLOCK = 128  # tokens of a block of the vocabulary, as in kernels.py
KEYS = 64  # that attention reads at once
LONG_PROMPT = 512  # tokens from which rows of a group read their prompt together
MAX_PARTS = 8
SUM_ROWS = 16  # rows of a program that sums blocks of logits
ADD_TILE = 16, 64  # rows and columns of a program that adds a product of cuBLAS to the stream


class Buffers(NamedTuple):
    """What the kernels write, for as many rows as kernels with the largest tile may touch.

    Attributes:
        x: [rows, H], the residual stream.
        scaled: [rows, H], the stream times the weight of the next norm.
        squares: [tiles, rows] fp32, sums of the stream's squares over each tile of its columns.
        normed: [rows, H], the normalised stream, or the result of a product, where cuBLAS multiplies.
        qkv: [rows, (HQ + 2 HKV) D], queries, keys and values.
        attended: [rows, HQ D].
        gate: [rows, I], where cuBLAS multiplies.
        up: [rows, I], likewise.
        gated: [rows, I].
        products: [parts * rows, H] fp32, parts of a product.
        tiles_arrived: int32, how many parts of each tile are there.
        parts: [parts, rows, HQ, D] fp32, parts of the attention.
        lse: [parts, rows, HQ] fp32, log-sum-exp of their scores, to base 2.
        heads_arrived: [rows, HQ] int32, how many parts of each head are there.
        logits: [SOME, V] fp32, for few rows; with more, cuBLAS allocates them.
        tops: [rows, blocks] fp32, the largest logit of each block of the vocabulary.
        sums: [rows, blocks] fp32, sums of exponentials relative to it.
    """

    x: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    gated: torch.Tensor
    products: torch.Tensor
    tiles_arrived: torch.Tensor
    parts: torch.Tensor
    lse: torch.Tensor
    heads_arrived: torch.Tensor
    logits: torch.Tensor
    tops: torch.Tensor
    sums: torch.Tensor


class Step:
    """The decode step of one model; what it writes it allocates once, for the largest batch of a rollout.

    Attributes:
        rows: of the largest batch that there is room for.
        positions: of the longest sequence.
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
        self.model, self.support, self.device, layer = model, support, model.device, support.layers[0]
        self.read()
        self.HKV, self.queries, self.D = layer.num_heads, layer.queries_per_key, layer.head_size
        self.HQ, (self.V, self.H) = self.HKV * self.queries, self.weights.head.shape
        self.kinds = torch.zeros(self.V, dtype=torch.int8, device=self.device)
        for ids, kind in ((end_ids, 2), (suppressed_ids, 1)):  # a tokenizer may have tokens that the model lacks
            self.kinds[[i for i in ids if 0 <= i < self.V]] = kind
        self.compiled: set[tuple] = set()
        self.release()
        self.overlap, self.shared = False, 2**30  # in Triton's interpreter
        if self.device.type == "cuda":
            # kernels may begin before the one before them has ended
            self.overlap = torch.cuda.get_device_capability(self.device)[0] >= 9
            self.shared = blocks.shared_memory(self.device)

    def read(self) -> None:
        """Finds the weights again, if parameters have been replaced or moved."""
        self.weights = blocks.read(self.model, self.support)

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
        if rows > self.rows:
            self.rows, self.buffers = rows, self._allocate(triton.cdiv(rows, ROWS) * ROWS)
        if positions > self.positions:
            self.positions = triton.next_power_of_2(positions)
            places = torch.arange(self.positions, device=self.device)[None]
            tables = self.model.get_decoder().rotary_emb(self.weights.norm[None, None], position_ids=places)
            self.cos, self.sin = (table.reshape(self.positions, self.D).contiguous() for table in tables)
        return True

    def release(self) -> None:
        """Frees what `reserve` allocated."""
        self.rows, self.positions, self.buffers, self.cos, self.sin, self.found = 0, 0, None, None, None, None

    def _allocate(self, padded: int) -> Buffers:
        half, blocks_of_V = self.weights.head.dtype, triton.cdiv(self.V, BLOCK)
        I, width = self.weights.blocks[0].gate.shape[0], self.HQ * self.D  # noqa: E741

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return Buffers(
            x=empty(padded, self.H, dtype=half), scaled=empty(padded, self.H, dtype=half),
            squares=empty(triton.cdiv(self.H, 16), padded), normed=empty(padded, self.H, dtype=half),
            qkv=empty(padded, width + 2 * self.HKV * self.D, dtype=half), attended=empty(padded, width, dtype=half),
            gate=empty(padded, I, dtype=half), up=empty(padded, I, dtype=half), gated=empty(padded, I, dtype=half),
            products=empty(max(MAX_PARTS * SOME, 2 * padded), self.H),
            tiles_arrived=empty(triton.cdiv(self.H, 16) * triton.cdiv(padded, 16), dtype=torch.int32),
            parts=empty(2 * MAX_PARTS, padded, self.HQ, self.D), lse=empty(2 * MAX_PARTS, padded, self.HQ),
            heads_arrived=empty(padded, self.HQ, dtype=torch.int32), logits=empty(SOME, self.V),
            tops=empty(padded, blocks_of_V), sums=empty(padded, blocks_of_V),
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        """Memory of the buffers as allocated."""
        return sum(buffer.nbytes for buffer in self.buffers or ())

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
            cache: a `flash_cache.FlashCache` with keys and values of the rows.
            sampling: of a draw that follows.
        """
        if self.device.type == "cuda" and (b, cache.space) not in self.compiled:
            self._compile(b, table, cache, sampling)
            self.compiled.add((b, cache.space))
        self._step(b, table, cache, sampling)
        return self.found[:b]

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
        tops, sums = self.buffers.tops, self.buffers.sums
        self._launch(
            kernels.draw, (b,), self.found, tops, sums, self.kinds, table, table.shape[1], uniforms, out_tokens,
            out_logps, healthy, T, len(out_tokens) - 1, sampling.temperature or 1.0, sampling.min_new_tokens, self.V,
            tops.shape[1], sampling.temperature == 0, triton.next_power_of_2(tops.shape[1]),
        )  # fmt: skip

    # ---- the kernels, in the order of a step ----

    def _step(self, b: int, table: torch.Tensor, cache: Any, sampling: Sampling) -> None:
        w, width = self.weights, triton.next_power_of_2(self.H)
        norms = [*(block.attention_norm for block in w.blocks), w.norm]
        self._launch(kernels.embed, (b,), table, table.shape[1], w.embedding, norms[0], *self._stream, self.H, width)
        self.num_squares = 1  # tiles of the stream, of which each has its sum of squares
        for i, (block, pool) in enumerate(zip(w.blocks, cache.pools, strict=True)):
            self._qkv(b, block)
            self._attend(b, table, cache, block, pool)
            self._linear_add("o", b, self.buffers.attended, block.o, block.mlp_norm)
            self._gate_up(b, block)
            self._linear_add("down", b, self.buffers.gated, block.down, norms[i + 1])
        self._head(b, table, sampling)

    @property
    def _stream(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.buffers.x, self.buffers.scaled, self.buffers.squares

    @property
    def _input(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """The stream as a product after a norm reads it."""
        return self.buffers.scaled, self.buffers.squares, self.num_squares, len(self.buffers.x)

    def _most_squares(self, b: int) -> int:
        return triton.next_power_of_2(triton.cdiv(self.H, min(self._tile(name, b).BN for name in ("o", "down"))))

    def _qkv(self, b: int, block: blocks.Block) -> None:
        NQ, NKV, t, out = self.HQ * self.D, self.HKV * self.D, self._tile("qkv", b), self.buffers.qkv
        if is_large(b, block.q.numel()):
            self._normalize(b)
            products = zip((0, NQ, NQ + NKV), (block.q, block.k, block.v), block.biases or 3 * (None,), strict=True)
            for first, weight, bias in products:
                out[:b, first : first + len(weight)] = F.linear(self.buffers.normed[:b], weight, bias)
            return
        N, BN, biased = NQ + 2 * NKV, math.gcd(t.BN, NQ, NKV), block.biases is not None
        self._launch(
            kernels.qkv, (N // BN, triton.cdiv(b, t.BM)), *self._input, block.q, block.k, block.v,
            *(block.biases or 3 * (block.q,)), out, self.weights.eps, NQ, NKV, self.H, self._most_squares(b), biased,
            t.BM, BN, t.BK, warps=t.warps, stages=t.stages,
        )  # fmt: skip

    def _attend(self, b: int, table: torch.Tensor, cache: Any, block: blocks.Block, pool: tuple) -> None:
        space, buffers, D = cache.space, self.buffers, self.D
        M_own = max(16, triton.next_power_of_2(self.queries))
        M_prompt = max(M_own, min(64, triton.next_power_of_2(space.group_size * self.queries)))
        tiles_of_group, prompt_parts, prompt_programs = triton.cdiv(space.group_size, M_prompt // self.queries), 0, 0
        if space.group_size > 1 and space.longest >= LONG_PROMPT:
            prompt_parts = _parts(triton.cdiv(b, space.group_size) * self.HKV * tiles_of_group, space.longest)
            prompt_programs = cache.num_segments(b) * tiles_of_group * self.HKV * prompt_parts
        own_parts = _parts(b * self.HKV, space.tokens + (0 if prompt_parts else space.longest))
        norms = block.head_norms or 2 * (block.q,)
        self._launch(
            kernels.attention, (prompt_programs + b * self.HKV * own_parts,), buffers.qkv, self.cos, self.sin, *norms,
            *pool, table, table.shape[1], cache.segments, cache.segments.shape[1], buffers.attended, buffers.parts,
            buffers.lse, buffers.heads_arrived, self.weights.eps, self.weights.scaling, b, prompt_programs, self.HQ,
            self.HKV, D, block.head_norms is not None, M_prompt, M_own, KEYS, tiles_of_group, prompt_parts, own_parts,
        )  # fmt: skip

    def _linear_add(self, name: str, b: int, a: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> None:
        (N, K), t, padded = weight.shape, self._tile(name, b), len(self.buffers.x)
        if is_large(b, N * K):
            product = torch.mm(a[:b], weight.t(), out=self.buffers.normed[:b])
            BM, BN = ADD_TILE
            self.num_squares = triton.cdiv(N, BN)
            grid = self.num_squares, triton.cdiv(b, BM)
            self._launch(kernels.add, grid, product, *self._stream, norm, N, padded, BM, BN)
            return
        parts = max(1, min(t.parts, K // (2 * t.BK)))
        self.num_squares = triton.cdiv(N, t.BN)
        self._launch(
            kernels.linear_add, (self.num_squares, triton.cdiv(b, t.BM), parts), a, weight, *self._stream, norm,
            self.buffers.products, self.buffers.tiles_arrived, N, padded, K, parts, t.BM, t.BN, t.BK,
            warps=t.warps, stages=t.stages,
        )  # fmt: skip

    def _gate_up(self, b: int, block: blocks.Block) -> None:
        (N, K), t, buffers = block.gate.shape, self._tile("gate_up", b), self.buffers
        if is_large(b, N * K):
            self._normalize(b)
            torch.mm(buffers.normed[:b], block.gate.t(), out=buffers.gate[:b])
            torch.mm(buffers.normed[:b], block.up.t(), out=buffers.up[:b])
            self._launch(kernels.silu_mul, (triton.cdiv(N, 1024), b), buffers.gate, buffers.up, buffers.gated, N, 1024)
            return
        self._launch(
            kernels.gate_up, (triton.cdiv(N, t.BN), triton.cdiv(b, t.BM)), *self._input, block.gate, block.up,
            buffers.gated, self.weights.eps, N, K, self._most_squares(b), t.BM, t.BN, t.BK,
            warps=t.warps, stages=t.stages,
        )  # fmt: skip

    def _head(self, b: int, table: torch.Tensor, sampling: Sampling) -> None:
        t, w, buffers, temperature = self._tile("head", b), self.weights, self.buffers, sampling.temperature or 1.0
        of_draw = buffers.tops, buffers.sums, self.kinds, table, table.shape[1]
        if b > SOME:
            self._normalize(b, w.logit_scale)
            grid = triton.cdiv(b, SUM_ROWS), buffers.tops.shape[1]
            self.found = mm(buffers.normed[: grid[0] * SUM_ROWS], w.head.t())
            rest = temperature, sampling.min_new_tokens, self.V, SUM_ROWS
            self._launch(kernels.sum_blocks, grid, self.found, *of_draw, *rest)
            return
        self.found = buffers.logits
        self._launch(
            kernels.head, (triton.cdiv(b, t.BM), buffers.tops.shape[1]), *self._input, w.head, self.found, *of_draw,
            w.eps, w.logit_scale, temperature, sampling.min_new_tokens, self.V, self.H, self._most_squares(b), t.BM,
            t.BK, warps=t.warps, stages=t.stages,
        )  # fmt: skip

    def _normalize(self, b: int, factor: float = 1.0) -> None:
        width = triton.next_power_of_2(self.H)
        out, eps = self.buffers.normed, self.weights.eps
        self._launch(kernels.normalize, (b,), *self._input, out, eps, factor, self.H, width, self._most_squares(b))

    def _tile(self, name: str, b: int) -> Tile:
        return tile(name, b, self.H, self.shared)

    # ---- launches ----

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 2) -> None:
        options = {"launch_pdl": True} if self.overlap else {}
        self._start(kernel, grid, *args, self.overlap, num_warps=warps, num_stages=stages, **options)

    def _start(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: int) -> None:
        kernel[grid](*args, **options)

    def _compile(self, *args: Any) -> None:
        """Compiles the kernels of a step side by side; launches would compile them one after another."""
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
            list(pool.map(lambda job: job().run, jobs.values()))  # `run` compiles the kernel's launcher, too


def _parts(programs: int, tokens: int) -> int:
    """Into how many parts attention over so many tokens is split, a power of two."""
    parts = 1
    while 2 * parts <= MAX_PARTS and 2 * parts * programs <= PROGRAMS and tokens >= 2 * parts * PART_TOKENS:
        parts *= 2
    return parts
