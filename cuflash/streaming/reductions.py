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
from cuflash.spec.passes import Pass
from cuflash.streaming import calls, memory
from cuflash.streaming.chunks import StreamPlan

Array = Any


@np.errstate(all="ignore")
def compute(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int) -> tuple[Array, ...]:
    """The results of a reduction; `count` is how many keys `TOP_KEYS` finds of a row."""
    call = calls.checked(pass_, options, arrays, ())
    problem, lse, xp = call.problem, arrays["lse"], dlpack.module_of(arrays["q"])
    with dlpack.on_device(arrays["q"]):
        run = call.run(pass_)
        if count:
            results = tuple(xp.empty((*lse.shape, *count), dtype) for dtype in (np.dtype(np.int32), lse.dtype))
            run.top_keys(*(x[(None,) * (4 - x.ndim)] for x in results))
            return results
        shape = (problem.array_batch, problem.num_heads, problem.seqlen_k)
        columns = call.new_host("k", shape, lse.dtype, run.device)
        run.columns(columns)
    return (columns.reshape(*lse.shape[:-1], problem.seqlen_k),)


def plan(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int) -> StreamPlan:
    """The plan of a reduction; `count` is that of `TOP_KEYS`."""
    call = calls.checked(pass_, options, arrays, ())
    with dlpack.on_device(arrays["q"]):
        note = call.problem.program.describe() if call.problem.has_functions else ""
        return memory.plan_of(call.length, {pass_: call.run(pass_)}, pass_.default, call.given, *count).noted(note)


def compile(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int) -> None:
    """Compile what a reduction needs, by running it once; of arrays in host memory only check them."""
    if set(plan(pass_, options, arrays, *count).ways.values()) != {"views"}:
        compute(pass_, options, arrays, *count)


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
