"""Bounds of rounding, derived from dtype, number of terms and magnitude; none is tuned on one machine.

How an error bound is found: count the roundings on the longest path from input to result (a sum or dot product of n
terms has n, in whatever order the processor adds; exp, log and the like count as 4, for vector libraries promise 1 to
3.5 units in the last place), and take the largest magnitude that a partial result may have. Two results that were each
rounded differ by at most `terms * eps * magnitude`, where eps is twice the unit roundoff u: each side errs by
`terms * u * magnitude`. Of many roundings most cancel: the error exceeds `8 * sqrt(terms) * u * magnitude` with a
probability below 1e-13 (Higham and Mary 2019, A New Approach to Probabilistic Rounding Error Analysis, Theorem 2.4).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def rounding(terms: float, magnitude: float = 1.0, dtype: torch.dtype | None = None) -> float:
    """Largest difference of two results that differ in their rounding only.

    Args:
        terms: roundings on the longest path from input to result.
        magnitude: the largest absolute value of a partial result.
        dtype: what is rounded to; default fp32.
    """
    import torch

    return min(terms, 8 * math.sqrt(terms)) * torch.finfo(dtype or torch.float32).eps * magnitude


def assert_rounded(actual, expected, terms: float, magnitude: float | None = None, dtype=None) -> None:
    """Asserts that two tensors, or numbers, differ by no more than `terms` roundings explain.

    `magnitude` is by default the largest absolute value that is expected, so give it where larger values cancel.
    `dtype` is by default the coarser of the two dtypes. NaN and infinities must be in the same places.
    """
    import torch

    actual, expected = torch.as_tensor(actual).detach(), torch.as_tensor(expected).detach()
    floating = [t.dtype for t in (actual, expected) if t.is_floating_point()]
    dtype = dtype or max(floating or [torch.float32], key=lambda kind: torch.finfo(kind).eps)
    finite = expected[expected.isfinite()] if expected.is_floating_point() else expected
    if magnitude is None:
        magnitude = finite.abs().max().item() if finite.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=0, atol=rounding(terms, magnitude, dtype), equal_nan=True
    )
