"""Attention and its gradients on NumPy arrays: by the compiled core where it is, by NumPy where it is not."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import core, numpy_path
from cuflash.cpu.jobs import cpu_threads
from cuflash.cpu.packed import clear_rows_of_no_sequence
from cuflash.problem import Problem
from cuflash.terms import DEFAULT_NEED, GRADIENTS

__all__ = ["backward", "cpu_threads", "describe", "forward"]

Array = NDArray[Any]


def describe(problem: Problem | None = None) -> str:
    """Which way computes a problem, or any, and why."""
    reason = core.why_not(problem)
    if reason is None:
        return f"compiled core, {core.processor()}"
    return f"NumPy, and not the compiled core: {reason}"


def forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    seed: int | None = None,
    offset: int | None = None,
    **terms: Any,
) -> tuple[Array, Array]:
    """out and lse: `numpy_path.forward` has the parameters. Bitwise repeatable, on any number of threads."""
    if core.why_not(problem) is not None:
        return numpy_path.forward(problem, q, k, v, out=out, lse=lse, seed=seed, offset=offset, **terms)
    out = np.empty(problem.out_shape, q.dtype) if out is None else out
    lse = np.empty(problem.lse_shape, problem.softmax_dtype) if lse is None else lse
    if problem.is_packed:
        clear_rows_of_no_sequence(problem, out, lse, terms["cu_seqlens_q"])
    core.run(problem, {"q": q, "k": k, "v": v, "out": out, "lse": lse, **terms}, False, seed, offset)
    return out, lse


def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    need: Collection[str] = DEFAULT_NEED,
    seed: int | None = None,
    offset: int | None = None,
    **others: Any,
) -> tuple[Array, ...]:
    """Gradients, those of `need`: `cuflash.cpu.numpy_path.backward` has the parameters, results included."""
    if core.why_not(problem) is not None:
        return numpy_path.backward(problem, dout, q, k, v, out, lse, need=need, seed=seed, offset=offset, **others)
    results = numpy_path.gradients_for(problem, need, {"q": q, "k": k, "v": v, **others}, others)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    arrays |= {name: x for name, x in others.items() if name not in GRADIENTS}
    core.run(problem, arrays | results, True, seed, offset)
    return tuple(results.values())
