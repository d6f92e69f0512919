"""Reductions of the attention weights of streamed keys, with the functions of `cuflash.cpu.reductions`.

The weights of a chunk are those of its keys among all keys, because lse is that of all keys: so the sums and maxima of
its columns are whole, and are copied to host memory as gradients of keys are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash.arrays import dlpack
from cuflash.spec.options import Options
from cuflash.spec.passes import COLUMN_MAX, COLUMN_SUMS, TOP_KEYS, Pass
from cuflash.streaming import calls

Array = Any


def column_sums(options: Options, arrays: Mapping[str, Any]) -> Array:
    """The sum of the weights of each column, each times dlse of its row if that is given; per query head."""
    return _columns(COLUMN_SUMS, options, arrays)


def column_max(options: Options, arrays: Mapping[str, Any]) -> Array:
    """The largest weight of each column, 0 of a key that no query attends to; per query head."""
    return _columns(COLUMN_MAX, options, arrays)


@np.errstate(all="ignore")
def top_keys(options: Options, arrays: Mapping[str, Any], count: int) -> tuple[Array, Array]:
    """Indices and weights of the keys with the largest weights of each row, the largest first; else -1 and 0."""
    call = calls.checked(TOP_KEYS, options, arrays, ())
    lse, xp = arrays["lse"], dlpack.module_of(arrays["q"])
    with dlpack.on_device(arrays["q"]):
        results = [xp.empty((*lse.shape, count), dtype) for dtype in (np.dtype(np.int32), lse.dtype)]
        call.run(TOP_KEYS).top_keys(*(x[(None,) * (4 - x.ndim)] for x in results))
    return results[0], results[1]


@np.errstate(all="ignore")
def _columns(pass_: Pass, options: Options, arrays: Mapping[str, Any]) -> Array:
    call = calls.checked(pass_, options, arrays, ())
    problem, lse = call.problem, arrays["lse"]
    with dlpack.on_device(arrays["q"]):
        run = call.run(pass_)
        result = call.new_host("k", (problem.array_batch, problem.num_heads, problem.seqlen_k), lse.dtype, run.device)
        run.columns(result)
    return result.reshape(*lse.shape[:-1], problem.seqlen_k)
