"""Triton kernels of a decode step; docs/decoding.md draws how they follow one another.

A step computes one token for each of b rows. Its matrices are thin, so weights, and the number of
kernels, decide how long it takes. Norms, rotary positions, activations and sums of parts are
therefore computed inside the kernels of the products beside them. Products accumulate in fp32.
Whatever is summed in parts is summed in a fixed order, so that the same step gives the same bits.

Dims: b rows, H hidden size, N outputs and K inputs of a product, D head size, V vocabulary.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
VOCABULARY_BLOCK = tl.constexpr(128)  # as in common/maths/sampling.py
TOKEN, COUNT, SEQUENCE, START, PROMPT, DONE, SHIFT, SLOT = map(tl.constexpr, range(8))  # lines of `RowState.table`
# Triton compiles a kernel anew if such an integer is 1 or a multiple of 16; these change with the batch
COUNTS = ("rows", "num_segments", "b", "prompt_programs", "T", "last_place", "min_new_tokens", "num_squares")
kernel = triton.jit(do_not_specialize=COUNTS)


@triton.jit
def _wait(OVERLAP: tl.constexpr):
    """Waits until the kernel before this one has ended; what stands above overlaps with it."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _go_on(OVERLAP: tl.constexpr):
    """Lets the next kernel start, up to its `_wait`; called late, so that it takes no room from this one."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@kernel
def embed(table, rows, weight, norm, x, scaled, squares, H: tl.constexpr, BLOCK: tl.constexpr,
          OVERLAP: tl.constexpr):  # fmt: skip
    """x[i] = weight[token of row i], and what `_keep` keeps of it; one program per row."""
    i, at = tl.program_id(0), tl.arange(0, BLOCK)
    _wait(OVERLAP)
    y = tl.load(weight + tl.load(table + TOKEN * rows + i) * H + at, at < H, 0.0)
    wide = y.to(tl.float32)
    tl.store(x + i * H + at, y, at < H)
    tl.store(scaled + i * H + at, (wide * tl.load(norm + at, at < H, 0.0).to(tl.float32)).to(y.dtype), at < H)
    tl.store(squares + i, tl.sum(wide * wide, 0))


@triton.jit
def _keep(y, x, scaled, squares, norm, place, m, n, in_n, padded):
    """Stores a tile of the residual stream, and what the norm after it needs: y times its weight, and sums of y * y.

    A norm scales whole rows, so the product after it scales its result instead: nothing waits for a row to be complete.
    """
    y = y.to(x.dtype.element_ty)
    wide = y.to(tl.float32)
    tl.store(x + place, y, in_n[None, :])
    weight = tl.load(norm + n, in_n, 0.0).to(tl.float32)
    tl.store(scaled + place, (wide * weight[None, :]).to(y.dtype), in_n[None, :])
    tl.store(squares + tl.program_id(0) * padded + m, tl.sum(wide * wide, 1))


@triton.jit
def _squares(squares, m, num_squares, padded, SQUARES: tl.constexpr):
    t = tl.arange(0, SQUARES)
    return tl.load(squares + t[None, :] * padded + m[:, None], (t < num_squares)[None, :], 0.0)


@triton.jit
def _product(a, w, m, n, in_n, first, last, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """a[m] @ w[n].T over the inputs first to last, in fp32."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(first, last, BK):
        k = k0 + tl.arange(0, BK)
        in_k = k < K
        a_mk = tl.load(a + m[:, None] * K + k[None, :], in_k[None, :], 0.0)
        w_nk = tl.load(w + n[:, None] * K + k[None, :], in_n[:, None] & in_k[None, :], 0.0)
        acc = tl.dot(a_mk, tl.trans(w_nk), acc)
    return acc


@kernel
def qkv(scaled, squares, num_squares, padded, wq, wk, wv, bq, bk, bv, out, eps, NQ, NKV, K: tl.constexpr,
        SQUARES: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
        OVERLAP: tl.constexpr):  # fmt: skip
    """out[b, NQ + 2 NKV] = rms_norm(x) times the weights of queries, keys and values; BN divides NQ and NKV."""
    m, n0 = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN
    w, bias, first = wq, bq, 0
    if n0 >= NQ + NKV:
        w, bias, first = wv, bv, NQ + NKV
    elif n0 >= NQ:
        w, bias, first = wk, bk, NQ
    n = n0 - first + tl.arange(0, BN)
    _wait(OVERLAP)
    sums = _squares(squares, m, num_squares, padded, SQUARES)
    y = _product(scaled, w, m, n, n >= 0, 0, K, K, BM, BN, BK) * tl.rsqrt(tl.sum(sums, 1) / K + eps)[:, None]
    _go_on(OVERLAP)
    if BIAS:
        y += tl.load(bias + n).to(tl.float32)[None, :]
    tl.store(out + m[:, None] * (NQ + 2 * NKV) + (n + first)[None, :], y.to(out.dtype.element_ty))


@kernel
def gate_up(scaled, squares, num_squares, padded, w_gate, w_up, out, eps, N, K: tl.constexpr, SQUARES: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """out[b, N] = silu(rms_norm(x) @ w_gate.T) * (rms_norm(x) @ w_up.T)."""
    m, n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < N
    _wait(OVERLAP)
    sums = _squares(squares, m, num_squares, padded, SQUARES)
    gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        in_k = k < K
        inside = in_n[:, None] & in_k[None, :]
        x_mk = tl.load(scaled + m[:, None] * K + k[None, :], in_k[None, :], 0.0)
        gate = tl.dot(x_mk, tl.trans(tl.load(w_gate + n[:, None] * K + k[None, :], inside, 0.0)), gate)
        up = tl.dot(x_mk, tl.trans(tl.load(w_up + n[:, None] * K + k[None, :], inside, 0.0)), up)
    _go_on(OVERLAP)
    scale = tl.rsqrt(tl.sum(sums, 1) / K + eps)[:, None]
    gate *= scale
    y = gate * tl.sigmoid(gate) * (up * scale)
    tl.store(out + m[:, None] * N + n[None, :], y.to(out.dtype.element_ty), in_n[None, :])


@kernel
def linear_add(a, w, x, scaled, squares, norm, parts, arrived, N, padded, K: tl.constexpr, PARTS: tl.constexpr,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """x[b, N] += a[b, K] @ w[N, K].T, in PARTS of the inputs; the last program of a tile to arrive adds them up.

    `norm` is the one after it; see `_keep`. `parts` is [PARTS, rows of all tiles, N] fp32, `arrived` one
    int32 per tile, zero before and after.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m, part = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(2)
    in_n, LENGTH = n < N, tl.constexpr(triton.cdiv(triton.cdiv(K, BK), PARTS) * BK)
    first = part * LENGTH
    _wait(OVERLAP)
    acc = _product(a, w, m, n, in_n, first, tl.minimum(first + LENGTH, K), K, BM, BN, BK)
    _go_on(OVERLAP)
    place, inside = m[:, None] * N + n[None, :], in_n[None, :]
    if PARTS == 1:
        _keep(tl.load(x + place, inside, 0.0).to(tl.float32) + acc, x, scaled, squares, norm, place, m, n, in_n, padded)
    else:
        rows_of_part = tl.num_programs(1) * BM
        tl.store(parts + part * rows_of_part * N + place, acc, inside)
        tl.debug_barrier()  # all threads have stored before one of them counts
        counter = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1) == PARTS - 1:
            tl.debug_barrier()
            y = tl.load(x + place, inside, 0.0).to(tl.float32)
            for i in tl.static_range(PARTS):
                y += tl.load(parts + i * rows_of_part * N + place, inside, 0.0, cache_modifier=".cg")
            _keep(y, x, scaled, squares, norm, place, m, n, in_n, padded)
            tl.store(counter, 0)


@triton.jit
def _rotated(base, inside, position, cos, sin, norm, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads at the addresses `base`, [M, D], with norm and rotary positions, rounded as transformers rounds them."""
    d = tl.arange(0, D)
    other = (d + D // 2) % D
    dtype: tl.constexpr = base.dtype.element_ty
    x = tl.load(base[:, None] + d[None, :], inside[:, None], 0.0).to(tl.float32)
    y = tl.load(base[:, None] + other[None, :], inside[:, None], 0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = (x * scale).to(dtype).to(tl.float32) * tl.load(norm + d).to(tl.float32)[None, :]
        y = (y * scale).to(dtype).to(tl.float32) * tl.load(norm + other).to(tl.float32)[None, :]
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    y = tl.where((d < D // 2)[None, :], -y, y)
    at = position[:, None] * D + d[None, :]
    c = tl.load(cos + at, inside[:, None], 0.0).to(tl.float32)
    s = tl.load(sin + at, inside[:, None], 0.0).to(tl.float32)
    return (x * c + y * s).to(dtype)


@triton.jit
def _attend(q, keys, values, first, last, top, total, acc, scale, slot, D: tl.constexpr, BN: tl.constexpr):
    """Continues the softmax of a head over the tokens first to last; `slot` is their distance in elements."""
    d = tl.arange(0, D)
    for j in range(first, last, BN):
        at = j + tl.arange(0, BN)
        inside = (at < last)[:, None]
        place = at.to(tl.int64)[:, None] * slot + d[None, :]
        scores = tl.dot(q, tl.trans(tl.load(keys + place, inside, 0.0))) * scale
        scores = tl.where((at < last)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights, fade = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        v = tl.load(values + place, inside, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None])
        total = total * fade + tl.sum(weights, 1)
        top = higher
    return top, total, acc


@triton.jit
def _merge(top, total, acc, part, row, head, inside, out, parts, lse, arrived, b, HQ, D: tl.constexpr,
           PARTS: tl.constexpr):  # fmt: skip
    """Stores one part of the attention of some heads; the last part of a head to arrive merges all of them."""
    d, head = tl.arange(0, D), row * HQ + head
    some = total > 0
    result = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(parts + ((part * b * HQ + head) * D)[:, None] + d[None, :], result, inside[:, None])
    sum_of_part = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + part * b * HQ + head, sum_of_part, inside)
    tl.debug_barrier()
    last = (tl.atomic_add(arrived + head, 1, inside) == PARTS - 1) & inside
    tl.debug_barrier()
    top = tl.load(lse + head, last, 0.0, cache_modifier=".cg")
    for i in tl.static_range(1, PARTS):
        top = tl.maximum(top, tl.load(lse + i * b * HQ + head, last, 0.0, cache_modifier=".cg"))
    total, acc = tl.zeros_like(top), tl.zeros_like(acc)
    for i in tl.static_range(PARTS):
        weight = tl.exp2(tl.load(lse + i * b * HQ + head, last, 0.0, cache_modifier=".cg") - top)
        place = ((i * b * HQ + head) * D)[:, None] + d[None, :]
        acc += weight[:, None] * tl.load(parts + place, last[:, None], 0.0, cache_modifier=".cg")
        total += weight
    tl.store(out + (head * D)[:, None] + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), last[:, None])
    tl.store(arrived + head, 0, last)


@triton.jit
def _attend_to_prompt(program, qkv, cos, sin, q_norm, keys, values, table, rows, segments, num_segments, out, parts,
                      lse, arrived, eps, scale, b, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
                      NORM: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
                      PROMPT_PARTS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Rows of one group attend to a part of their prompt, M // QPK rows at a time."""
    QPK: tl.constexpr = HQ // HKV
    WIDTH: tl.constexpr = (HQ + 2 * HKV) * D
    ROWS: tl.constexpr = M // QPK
    part, rest = program % PROMPT_PARTS, program // PROMPT_PARTS
    kv, tile, segment = rest % HKV, rest // HKV % TILES, rest // HKV // TILES
    place = tl.arange(0, M)
    head = kv * QPK + place % QPK
    row = tl.load(segments + segment) // QPK + tile * ROWS + place // QPK
    inside = (row < tl.load(segments + segment + 1) // QPK) & (place < ROWS * QPK)
    if tl.max(inside.to(tl.int32), 0) > 0:
        start = tl.load(segments + num_segments + segment).to(tl.int64)
        used = tl.load(segments + 2 * num_segments + segment)
        position = tl.load(table + PROMPT * rows + row, inside, 0) + tl.load(table + COUNT * rows + row, inside, 1)
        position += tl.load(table + SHIFT * rows + row, inside, 0) - 1
        q = _rotated(qkv + row * WIDTH + head * D, inside, position, cos, sin, q_norm, eps, D, NORM)
        top = tl.full((M,), float("-inf"), tl.float32)
        total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, D), tl.float32)
        length = tl.cdiv(tl.cdiv(used, BN), PROMPT_PARTS) * BN
        first = part * length
        last = tl.minimum(first + length, used)
        keys, values = keys + start * HKV * D + kv * D, values + start * HKV * D + kv * D
        top, total, acc = _attend(q, keys, values, first, last, top, total, acc, scale, HKV * D, D, BN)
        _merge(top, total, acc, part, row, head, inside, out, parts, lse, arrived, b, HQ, D, PARTS)


@triton.jit
def _attend_to_own(program, qkv, cos, sin, q_norm, k_norm, keys, values, table, rows, out, parts, lse, arrived, eps,
                   scale, b, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
                   M: tl.constexpr, BN: tl.constexpr, OWN_PARTS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """One row attends to a part of its own tokens; part 0 writes the new key and value, and begins with them.

    If no programs attend to prompts, the row attends to a part of its prompt, too.
    """
    QPK: tl.constexpr = HQ // HKV
    WIDTH: tl.constexpr = (HQ + 2 * HKV) * D
    part, kv, row = program % OWN_PARTS, program // OWN_PARTS % HKV, program // OWN_PARTS // HKV
    place, one, d = tl.arange(0, M), tl.arange(0, 1), tl.arange(0, D)
    head, inside = kv * QPK + place, place < QPK
    start, old = tl.load(table + START * rows + row), tl.load(table + COUNT * rows + row).to(tl.int32) - 1
    prompt = tl.load(table + PROMPT * rows + row).to(tl.int32)
    position = tl.load(table + SHIFT * rows + row) + prompt + old
    qkv += row * WIDTH
    q = _rotated(qkv + head * D, inside, position + place * 0, cos, sin, q_norm, eps, D, NORM)
    new_k = _rotated(qkv + (HQ + kv) * D + one, one == 0, position + one, cos, sin, k_norm, eps, D, NORM)
    new_v = tl.load(qkv + (HQ + HKV + kv) * D + one[:, None] + d[None, :])
    own_keys, own_values = keys + start * HKV * D + kv * D, values + start * HKV * D + kv * D
    tl.store(own_keys + old * HKV * D + one[:, None] + d[None, :], new_k, one[:, None] == part)
    tl.store(own_values + old * HKV * D + one[:, None] + d[None, :], new_v, one[:, None] == part)
    score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    top = tl.where(part == 0, score, float("-inf"))
    total = tl.zeros((M,), tl.float32) + tl.where(part == 0, 1.0, 0.0)
    acc = total[:, None] * new_v.to(tl.float32)
    if PARTS == OWN_PARTS:
        slot = tl.load(table + SLOT * rows + row)
        keys, values = keys + slot * HKV * D + kv * D, values + slot * HKV * D + kv * D
        length = tl.cdiv(tl.cdiv(prompt, BN), OWN_PARTS) * BN
        first, last = part * length, tl.minimum(part * length + length, prompt)
        top, total, acc = _attend(q, keys, values, first, last, top, total, acc, scale, HKV * D, D, BN)
    length = tl.cdiv(tl.cdiv(old, BN), OWN_PARTS) * BN
    first, last = part * length, tl.minimum(part * length + length, old)
    top, total, acc = _attend(q, own_keys, own_values, first, last, top, total, acc, scale, HKV * D, D, BN)
    if PARTS == 1:
        place = (row * HQ + head)[:, None] * D + d[None, :]
        tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), inside[:, None])
    else:
        number = PARTS - OWN_PARTS + part
        _merge(top, total, acc, number, row + head * 0, head, inside, out, parts, lse, arrived, b, HQ, D, PARTS)


@kernel
def attention(qkv, cos, sin, q_norm, k_norm, keys, values, table, rows, segments, num_segments, out, parts, lse,
              arrived, eps, scale, b, prompt_programs, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
              NORM: tl.constexpr, MP: tl.constexpr, MO: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
              PROMPT_PARTS: tl.constexpr, OWN_PARTS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Rotary positions, cache write, and attention of each row to its prompt and to its own tokens.

    With PROMPT_PARTS > 0, the first programs attend to prompts, for all rows of a group together, so
    that keys of a prompt are read once; the others attend to the own tokens of one row. With 0, which
    is faster for short prompts, a row attends to both. `parts` is [PROMPT_PARTS + OWN_PARTS, b, HQ,
    D] fp32; `arrived` [b, HQ] int32, zero before and after. `segments` and `table` are those of
    `flash_cache.FlashCache` and `runner.RowState`.
    """
    PARTS: tl.constexpr = PROMPT_PARTS + OWN_PARTS
    _wait(OVERLAP)
    scale *= LOG2E  # powers of two are cheaper
    if PROMPT_PARTS == 0:
        _attend_to_own(tl.program_id(0), qkv, cos, sin, q_norm, k_norm, keys, values, table, rows, out, parts, lse,
                       arrived, eps, scale, b, HQ, HKV, D, NORM, MO, BN, OWN_PARTS, PARTS)  # fmt: skip
    elif tl.program_id(0) < prompt_programs:
        _attend_to_prompt(tl.program_id(0), qkv, cos, sin, q_norm, keys, values, table, rows, segments, num_segments,
                          out, parts, lse, arrived, eps, scale, b, HQ, HKV, D, NORM, MP, BN, TILES, PROMPT_PARTS,
                          PARTS)  # fmt: skip
    else:
        _attend_to_own(tl.program_id(0) - prompt_programs, qkv, cos, sin, q_norm, k_norm, keys, values, table, rows,
                       out, parts, lse, arrived, eps, scale, b, HQ, HKV, D, NORM, MO, BN, OWN_PARTS, PARTS)  # fmt: skip
    _go_on(OVERLAP)


@kernel
def head(scaled, squares, num_squares, padded, w, logits, tops, sums, kinds, table, rows, eps, logit_scale,
         temperature, min_new_tokens, V, K: tl.constexpr, SQUARES: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
         OVERLAP: tl.constexpr):  # fmt: skip
    """Logits [b, V] fp32 of rms_norm(x), and of each block of the vocabulary its maximum and its sum for a draw.

    `kinds` [V] int8 says which tokens are suppressed (1), and which end a completion (2).
    """
    m, block = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    n = block * VOCABULARY_BLOCK + tl.arange(0, VOCABULARY_BLOCK)
    in_n = n < V
    _wait(OVERLAP)
    squares_mt = _squares(squares, m, num_squares, padded, SQUARES)
    y = _product(scaled, w, m, n, in_n, 0, K, K, BM, VOCABULARY_BLOCK, BK)
    _go_on(OVERLAP)
    y *= (tl.rsqrt(tl.sum(squares_mt, 1) / K + eps) * logit_scale)[:, None]
    tl.store(logits + m.to(tl.int64)[:, None] * V + n[None, :], y, in_n[None, :])
    _sum_block(y, m, n, in_n, block, tl.num_programs(1), tops, sums, kinds, table, rows, temperature, min_new_tokens)


@triton.jit
def _sum_block(y, m, n, in_n, block, blocks, tops, sums, kinds, table, rows, temperature, min_new_tokens):
    """Maximum, and sum of exponentials relative to it, of the logits of a block that may be drawn."""
    kind = tl.load(kinds + n, in_n, 1)
    early = tl.load(table + COUNT * rows + m, m < rows, 0) < min_new_tokens
    barred = (kind == 1)[None, :] | ((kind == 2)[None, :] & early[:, None])
    y = tl.where(barred, float("-inf"), y / temperature)
    top = tl.max(y, 1)
    tl.store(tops + m * blocks + block, top)
    tl.store(sums + m * blocks + block, tl.sum(tl.exp(y - tl.maximum(top, -1e30)[:, None]), 1))


# ---- with products of cuBLAS, which are faster for large matrices ----


@kernel
def normalize(scaled, squares, num_squares, padded, out, eps, factor, H: tl.constexpr, BLOCK: tl.constexpr,
              SQUARES: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """out[i] = rms_norm(x[i]) * factor; one program per row."""
    i, at, t = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, SQUARES)
    _wait(OVERLAP)
    total = tl.sum(tl.load(squares + t * padded + i, t < num_squares, 0.0), 0)
    y = tl.load(scaled + i * H + at, at < H, 0.0).to(tl.float32) * (tl.rsqrt(total / H + eps) * factor)
    tl.store(out + i * H + at, y.to(out.dtype.element_ty), at < H)


@kernel
def silu_mul(gate, up, out, N, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """out[b, N] = silu(gate) * up."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, inside = tl.program_id(1).to(tl.int64) * N + n, n < N
    _wait(OVERLAP)
    y = tl.load(gate + place, inside, 0.0).to(tl.float32)
    y = y * tl.sigmoid(y) * tl.load(up + place, inside, 0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), inside)


@kernel
def add(y, x, scaled, squares, norm, N, padded, BM: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr):
    """x[b, N] += y, and what `_keep` keeps of it."""
    n, m = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    in_n = n < N
    place = m[:, None] * N + n[None, :]
    _wait(OVERLAP)
    total = tl.load(x + place, in_n[None, :], 0.0).to(tl.float32) + tl.load(y + place, in_n[None, :], 0.0)
    _keep(total, x, scaled, squares, norm, place, m, n, in_n, padded)


@kernel
def sum_blocks(logits, tops, sums, kinds, table, rows, temperature, min_new_tokens, V, BM: tl.constexpr,
               OVERLAP: tl.constexpr):  # fmt: skip
    """As `head`, from logits."""
    m, block = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    n = block * VOCABULARY_BLOCK + tl.arange(0, VOCABULARY_BLOCK)
    in_n = n < V
    _wait(OVERLAP)
    y = tl.load(logits + m.to(tl.int64)[:, None] * V + n[None, :], in_n[None, :], 0.0)
    _sum_block(y, m, n, in_n, block, tl.num_programs(1), tops, sums, kinds, table, rows, temperature, min_new_tokens)


@kernel
def draw(logits, tops, sums, kinds, table, rows, uniforms, out_tokens, out_logps, healthy, T, last_place, temperature,
         min_new_tokens, V, blocks, GREEDY: tl.constexpr, BLOCKS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Draws the next token of one row as `sampling.draw` does, and records it as `runner.Runner` does."""
    i = tl.program_id(0)
    row = table + i
    _wait(OVERLAP)
    count, done = tl.load(row + COUNT * rows), tl.load(row + DONE * rows)
    place = tl.load(row + SEQUENCE * rows) * T + tl.minimum(count, T - 1)
    at = tl.arange(0, BLOCKS)
    top_of = tl.load(tops + i * blocks + at, at < blocks, float("-inf"))
    top = tl.max(top_of, 0)
    weights = tl.load(sums + i * blocks + at, at < blocks, 0.0).to(tl.float64) * tl.exp((top_of - top).to(tl.float64))
    ends_of = tl.cumsum(weights, 0)
    whole = tl.max(ends_of, 0)  # the last block's, since they ascend
    sound = tl.sum(weights, 0)  # a maximum may pass over NaN
    if GREEDY:
        block = tl.argmax(top_of, 0)
    else:
        threshold = tl.load(uniforms + place) * whole
        block = tl.minimum(tl.sum((ends_of <= threshold).to(tl.int32), 0), blocks - 1)
    n = block * VOCABULARY_BLOCK + tl.arange(0, VOCABULARY_BLOCK)
    kind = tl.load(kinds + n, n < V, 1)
    barred = (kind == 1) | ((kind == 2) & (count < min_new_tokens))
    y = tl.where(barred, float("-inf"), tl.load(logits + i.to(tl.int64) * V + n, n < V, 0.0) / temperature)
    if GREEDY:
        token = block * VOCABULARY_BLOCK + tl.argmax(y, 0)
    else:
        inside = tl.cumsum(tl.exp((y - top).to(tl.float64)), 0)
        before = tl.max(tl.where(at < block, ends_of, 0.0), 0)
        # two orders of summation differ in the last bits: the result must stay within the block
        threshold = tl.minimum(threshold - before, tl.max(inside, 0) * (1 - 2.0**-50))
        token = block * VOCABULARY_BLOCK + tl.sum((inside <= threshold).to(tl.int32), 0)
    token = tl.minimum(token, V - 1).to(tl.int64)
    chosen = tl.max(tl.where(n == token, y, float("-inf")), 0)
    logp = chosen - top - tl.log(whole).to(tl.float32)
    tl.store(healthy, False, ((sound > 0) & (sound < float("inf"))) == 0)
    going = done == 0
    tl.store(out_tokens + tl.where(going, place, last_place), token)
    tl.store(out_logps + tl.where(going, place, last_place), logp)
    is_end = tl.load(kinds + token) == 2
    tl.store(row + TOKEN * rows, token, going)
    tl.store(row + COUNT * rows, count + 1, going)
    tl.store(row + DONE * rows, 1, going & (is_end | (count + 1 >= T)))
