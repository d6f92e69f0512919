"""How far fp8 products may be from the oracle of what the numbers stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import view_4d, view_rows
from cuflash.testing import reference
from cuflash.testing.arrays import to_numpy
from cuflash.testing.case import Case, optional, qkv

Array = NDArray[Any]

ROUNDING = 2.0**-4  # of a weight: float8_e4m3 has 3 bits after the first
ROUNDING_BY_LINE = 1 / 12  # where half of them lie on a line between powers of two: head dimensions up to 128
SMALLEST = 2.0**-16  # half the distance of the smallest numbers, 2**-10, where the largest weight is 2**6
SUMS = 2.0**-13  # what tensor cores may cut off a sum of 32 products
DEVIATIONS = 5.0  # standard deviations that the largest of many random errors may have


def bounds(case: Case, arrays: Mapping[str, Array]) -> tuple[Array, Array, Array, Array]:
    """out and lse in float64 of a case whose q, k and v are fp8, and how far from them results may be.

    A weight w becomes w (1 + e). Rounding makes e at most ``ROUNDING``, or ``ROUNDING_BY_LINE``, and a score whose sum
    was cut off moves the weight, too; small weights lose at most ``SMALLEST`` of the largest. Since out is divided by
    the sum of the rounded weights, it is a mean of the values v, and moves by the sum of ``w e (v - out)``, over 1 +
    the sum of ``w e``. Where values are random, as in cases, such sums have standard deviations of at most the root of
    the sum of squares over the square root of 3, as uniform errors have. The sums of products with v are cut off, too,
    once in 32 keys, and out is rounded to bfloat16.
    """
    problem = case.problem
    q, k, v = qkv(arrays)
    given = optional(arrays)
    shape = (problem.batch, problem.num_heads, problem.seqlen_q)
    out, lse = np.zeros((*shape, problem.head_dim_v)), np.full(shape, -np.inf)
    far, far_lse = np.zeros_like(out), np.zeros(shape)
    steps = math.ceil(problem.head_dim / 32)
    rounding = ROUNDING_BY_LINE if max(problem.head_dim, problem.head_dim_v) <= 128 else ROUNDING
    for head in reference.each_head(problem, q, k, v, np.float64, **given):
        b, h, rows = head.index
        weights, values = head.P, head.V
        moved = abs(problem.scale) * (abs(head.Q) @ abs(head.K).T) * SUMS * steps
        lost = weights * ((1 + rounding) * np.exp(np.minimum(moved, 1)) - 1)
        lost += np.minimum(weights, SMALLEST * weights.max(axis=1, keepdims=True, initial=0))
        whole = lost.sum(axis=1)
        mean = weights @ values
        for i in range(len(mean)):
            distances = abs(values - mean[i])
            worst = lost[i] @ distances
            usual = DEVIATIONS * np.sqrt((lost[i] ** 2 / 3) @ distances**2)
            far[b, h, i] = np.minimum(worst, usual) / max(1 - whole[i], 0.1)
        far[b, h, rows] += 8 * SUMS * (weights @ abs(values)) + 2.0**-8 * abs(mean)
        out[b, h, rows], lse[b, h, rows] = mean, head.L
        farthest = moved.max(axis=1, initial=0)  # where a score moves so far, weights say nothing of lse
        far_lse[b, h, rows] = np.where(farthest > 1, farthest, -np.log(np.maximum(1 - whole, 0.1))) + 8 * SUMS
        far_lse[b, h, rows] += 2.0**-22 * np.where(np.isfinite(head.L), abs(head.L), 0)
    return out, lse, far, far_lse


def assert_float8(case: Case, got_out: Any, got_lse: Any) -> float:
    """Results of fp8 products are as near to the oracle as `bounds` says; the largest error over its bound."""
    arrays = case.arrays()
    out, lse, far, far_lse = bounds(case, arrays)
    got = view_4d(to_numpy(got_out), case.layout).astype(np.float64)
    got_rows = view_rows(to_numpy(got_lse)).astype(np.float64)
    assert got.shape == out.shape, f"out: got shape {got.shape}, expected {out.shape}"
    np.testing.assert_array_equal(np.isfinite(got_rows), np.isfinite(lse), "lse: rows that attend to a key")
    finite = np.isfinite(lse)
    errors = {
        "out": (abs(got - out), far + 1e-30),
        "lse": (abs(got_rows - np.where(finite, lse, 0))[finite], far_lse[finite]),
    }
    worst = 0.0
    for name, (error, bound) in errors.items():
        ratio = float((error / bound).max(initial=0))
        assert ratio <= 1, f"{name}: {ratio:.2f} times as far from the oracle as it may be, in {case}"
        worst = max(worst, ratio)
    return worst
