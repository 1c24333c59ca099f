"""How the products of a decode step are cut into programs.

Dims: b rows, H hidden size, N outputs and K inputs of a product.
"""

import bisect
from typing import NamedTuple

FEW, SOME = 16, 64  # rows: the sizes at which tiles change
SIZES = (1536, 3072)  # hidden sizes, likewise
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
SHARED_BYTES = 96 * 2**10  # shared memory of a block of threads that all kernels need; consumer cards have 99 KiB


def tile(name: str, b: int, H: int, shared: int) -> Tile:
    """The tile of a kernel, with as many stages as fit.

    Args:
        name: key of TILES.
        b: rows.
        H: of the model.
        shared: memory of a block of threads, bytes; SHARED_BYTES at least.
    """
    few, some, many = TILES[name]
    found = few if b <= FEW else some[bisect.bisect_right(SIZES, H)] if b <= SOME else many
    weights = 2 if name == "gate_up" else 1
    stage = 2 * (found.BM + weights * found.BN) * found.BK
    return found._replace(stages=min(found.stages, shared // stage))


def is_large(b: int, NK: int) -> bool:
    """Whether cuBLAS computes a product.

    Args:
        b: rows.
        NK: size of the weight.
    """
    return b > SOME and b * NK >= LARGE
