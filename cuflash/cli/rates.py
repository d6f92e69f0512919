"""About how long a pass takes on this CPU: by the rate of a small problem, which is measured."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

from cuflash import FlashAttention
from cuflash.arrays.array_info import numpy_dtype
from cuflash.cpu.jobs import count_cores
from cuflash.spec.inputs import INPUTS
from cuflash.spec.passes import (
    BACKWARD,
    BACKWARD_JVP,
    COLUMN_MAX,
    COLUMN_SUMS,
    COLUMN_SUMS_BACKWARD,
    FORWARD,
    JVP,
    REDUCTIONS,
    TOP_KEYS,
    Pass,
)
from cuflash.spec.problem import Problem

LONGEST = 512  # queries and keys of the small problem
ENOUGH_S = 0.1  # a mean of so long shares the cores with what else runs, as the pass would


def about_seconds(problem: Problem, pass_: Pass, count: int = 16) -> float:
    """By matrix products alone: masks, biases and functions take their time in addition."""
    small = (problem.dtype, problem.head_dim, problem.head_dim_v, problem.seqlen_q, problem.seqlen_k)
    return pass_.flops(problem) / flops_per_s(pass_, *small, problem.moved or (), count)


@functools.lru_cache(maxsize=64)
def flops_per_s(
    pass_: Pass,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    seqlen_q: int,
    seqlen_k: int,
    moved: tuple[str, ...],
    count: int,
) -> float:
    """The rate of a pass without options, the heads of which keep all threads busy."""
    rng, heads = np.random.default_rng(0), count_cores()
    lengths = {"q": min(seqlen_q, LONGEST), "k": min(seqlen_k, LONGEST)}

    def drawn(length: int, dim: int) -> Any:
        return rng.standard_normal((heads, length, dim), np.float32).astype(numpy_dtype(dtype))

    q, k, v = (drawn(lengths["q"], head_dim), drawn(lengths["k"], head_dim), drawn(lengths["k"], head_dim_v))
    attn = FlashAttention()
    v = None if pass_ in REDUCTIONS else v
    out, lse = attn.forward(q, k, v)
    dsums = np.ones((heads, lengths["k"]), lse.dtype)
    tangents: dict[str, Any] = {f"t{name}": x for name, x in zip(INPUTS, (q, k, v), strict=True) if name in moved}
    tangents = tangents or {"tq": q}
    calls = {
        FORWARD: lambda: attn.forward(q, k, v),
        BACKWARD: lambda: attn.backward(out, q, k, v, out, lse),
        JVP: lambda: attn.jvp(q, k, v, **tangents),
        BACKWARD_JVP: lambda: attn.backward_jvp(out, q, k, v, out, lse, out, lse, **tangents),
        COLUMN_SUMS: lambda: attn.column_sums(q, k, lse),
        COLUMN_MAX: lambda: attn.column_max(q, k, lse),
        TOP_KEYS: lambda: attn.top_keys(q, k, lse, count),
        COLUMN_SUMS_BACKWARD: lambda: attn.column_sums_backward(dsums, q, k, lse),
    }
    given = tangents if pass_.has_tangents else {"count": count} if pass_ is TOP_KEYS else {}
    plan: Any = attn.plan(q, k, v, **given, passes=[pass_.name])
    calls[pass_]()  # which prepares what later ones reuse
    runs, start = 0, time.perf_counter()
    while runs == 0 or time.perf_counter() - start < ENOUGH_S:
        calls[pass_]()
        runs += 1
    return runs * pass_.flops(plan.problem) / (time.perf_counter() - start)
