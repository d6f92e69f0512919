"""Reductions of the attention weights of streamed keys, with the functions of `cuflash.cpu.reductions`.

The weights of a chunk are those of its keys among all keys, because lse is that of all keys: so the sums and maxima of
its columns are whole, and are copied to host memory as gradients of keys are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash.arrays import dlpack
from cuflash.cpu import reductions as on_numpy
from cuflash.spec.options import Options
from cuflash.spec.passes import COLUMN_MAX, COLUMN_SUMS, TOP_KEYS, Pass
from cuflash.streaming import calls, memory
from cuflash.streaming.chunks import StreamPlan

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


def plan(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int) -> StreamPlan:
    """The plan of a reduction; `count` is that of `top_keys`."""
    call = calls.checked(pass_, options, arrays, ())
    with dlpack.on_device(arrays["q"]):
        note = call.problem.program.describe() if call.problem.has_functions else ""
        return memory.plan_of(call.length, {pass_: call.run(pass_)}, pass_.default, call.given, *count).noted(note)


def compile(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int) -> None:
    """Compile what a reduction needs, by running it once; of arrays in host memory only check them."""
    if set(plan(pass_, options, arrays, *count).ways.values()) != {"views"}:
        globals()[pass_.name](options, arrays, *count)


def tune(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int, **how: bool) -> Any:
    """Tune the reduction of the longest chunk, on a copy of it on the device."""
    call = calls.checked(pass_, options, arrays, ())
    if calls.device_of(call.backend) is None:
        return on_numpy.tune(pass_, options, {**call.given, **call.hosts}, *count, **how)
    with dlpack.on_device(arrays["q"]):
        run = call.run(pass_)
        chunk, keys = calls.longest_chunk(run)
        own_options, own = memory.call_on(run, chunk, pass_.default, keys)
        given = {name: x for name, x in own.items() if x is not None}
        return run.slices.reductions.tune(pass_, own_options, given, *count, **how)


def plan_gradients(
    options: Options, arrays: Mapping[str, Any], need: tuple[str, ...], passes: tuple[Pass, ...]
) -> StreamPlan:
    """The plan of the gradients of column sums, by passes over values (`cuflash.spec.reductions`)."""
    return calls.plan(options, arrays, need, passes).noted("column_sums_backward, by passes over values")


def tune_gradients(options: Options, arrays: Mapping[str, Any], **how: Any) -> Any:
    """Tune these passes, or forget what tuning found."""
    found = calls.tune(options, arrays, **how)
    return None if found is None else type(found)(column_sums_backward=found)


@np.errstate(all="ignore")
def _columns(pass_: Pass, options: Options, arrays: Mapping[str, Any]) -> Array:
    call = calls.checked(pass_, options, arrays, ())
    problem, lse = call.problem, arrays["lse"]
    with dlpack.on_device(arrays["q"]):
        run = call.run(pass_)
        result = call.new_host("k", (problem.array_batch, problem.num_heads, problem.seqlen_k), lse.dtype, run.device)
        run.columns(result)
    return result.reshape(*lse.shape[:-1], problem.seqlen_k)
