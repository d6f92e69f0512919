"""The tiled algorithm on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import reference
from cuflash.problem import Problem


def forward(problem: Problem, q: Any, k: Any, v: Any, *, out: Any = None, lse: Any = None, **terms: Any) -> Any:
    o, x = reference.forward(problem, q, k, v, dtype=q.dtype, **terms)
    out = np.empty_like(o) if out is None else out
    lse = np.empty_like(x) if lse is None else lse
    out[...], lse[...] = o, x
    return out, lse


def backward(
    problem: Problem, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dq: Any = None, dk: Any = None,
    dv: Any = None, **terms: Any
) -> Any:
    results = []
    for x, y in zip((dq, dk, dv), reference.backward(problem, dout, q, k, v, dtype=q.dtype, **terms), strict=True):
        z = np.empty_like(y) if x is None else x
        z[...] = y
        results.append(z)
    return tuple(results)
