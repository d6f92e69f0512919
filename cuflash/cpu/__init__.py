"""Attention and its gradients on NumPy arrays: by the compiled core where there is one, else by NumPy."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import layout_of, numpy_dtype, view_4d
from cuflash.arrays.checks import callers_frame
from cuflash.cpu import core, fallback, fallback_tangents, score_mod_as_bias
from cuflash.cpu.jobs import cpu_threads
from cuflash.cpu.packed import clear_rows_of_no_sequence
from cuflash.spec import row_sums as spec_row_sums
from cuflash.spec.binding import expected
from cuflash.spec.inputs import FP8_SCALES, INPUTS
from cuflash.spec.passes import (
    BACKWARD,
    BACKWARD_JVP,
    COLUMN_MAX,
    COLUMN_SUMS,
    FORWARD,
    JVP,
    PASSES_WITHOUT_TANGENTS,
    TOP_KEYS,
    Pass,
)
from cuflash.spec.problem import Problem, scales_of_rows

__all__ = ["backward", "cpu_threads", "describe", "forward", "row_sums", "run"]

Array = NDArray[Any]


def describe(
    problem: Problem | None = None, need: Collection[str] = (), passes: Collection[Pass] = PASSES_WITHOUT_TANGENTS
) -> str:
    """Which path computes these passes of a problem, with the gradients `need`, or any problem, and why."""
    others = [pass_ for pass_ in passes if pass_ in PASSES_WITHOUT_TANGENTS]
    if len(others) < len(passes):
        own = [_describe_one(problem, need, pass_) for pass_ in passes if pass_ not in others]
        return "; ".join([describe(problem, need, others)] * bool(others) + own)
    if problem is None or not problem.has_functions:
        reason = core.why_not(problem)
        return f"compiled core, {core.processor()}" if reason is None else _by_numpy(reason)
    reason, of_gradients = (score_mod_as_bias.why_not(problem, wanted) for wanted in ((), need))
    if reason is not None:
        return _by_numpy(reason)
    way = f"compiled core, {core.processor()}, and NumPy for functions"
    return way if of_gradients is None else f"{way}; backward by {_by_numpy(of_gradients)}"


def _describe_one(problem: Problem | None, need: Collection[str], pass_: Pass) -> str:
    if pass_ in (COLUMN_MAX, TOP_KEYS):
        reason = core.why_not(problem)
        if problem is not None and problem.has_functions:
            reason = reason or "score and mask functions"
    else:
        # Column sums of functions are the gradients of values (`cuflash.spec.reductions`).
        wanted = [f"t{name}" for name in need] if pass_ is BACKWARD_JVP else ("dv",) if pass_ is COLUMN_SUMS else need
        wanted = JVP.default if pass_ is JVP else wanted
        reason = core.why_not() if problem is None else _way_of(problem, wanted, pass_)[2]
    return f"{pass_.name} by {'the compiled core' if reason is None else _by_numpy(reason)}"


def _by_numpy(reason: str) -> str:
    return f"NumPy, and not the compiled core: {reason}"


def run(
    pass_: Pass,
    problem: Problem,
    /,
    *given: Array,
    need: Collection[str] | None = None,
    seed: int | None = None,
    offset: int | None = None,
    **others: Any,
) -> tuple[Array, ...]:
    """The results of a pass; bitwise repeatable, on any number of threads.

    `given` are the first arrays that the pass takes: dout in a backward pass; q, k, v; then out and lse. `others` are
    all other arrays by name, validated, of any strides: the optional inputs, where `kv_lengths` is clamped to
    0..seqlen_k; what else the pass takes; row_sums, if q, k and v are a slice of a problem (`cuflash.spec.row_sums`);
    and arrays for results, which are written to and returned if wanted.

    Results are in the order of the pass. In a row that attends to no key, those of the forward pass have the value
    `Output.of_no_keys` of their rows, and lse is the sink if there is one; tout is 0, and tlse is 0 or the tangent of
    the sink. In dk and dv, keys that no query attends to, those past `kv_lengths` and those of no sequence among them,
    get 0.
    """
    is_backward = bool(pass_.required)
    arrays = dict(zip((*("dout",) * is_backward, *INPUTS, "out", "lse"), given, strict=False)) | others
    wanted = pass_.default if need is None else need
    results = _results_for(pass_, problem, pass_.default if pass_ is JVP else wanted, arrays)
    if problem.is_packed and not is_backward:
        clear_rows_of_no_sequence(problem, results, others["cu_seqlens_q"])
    own = pass_.results_in(problem)
    _run(problem, {name: x for name, x in arrays.items() if name not in own} | results, pass_, seed, offset)
    return tuple(x for name, x in results.items() if name in wanted)


forward: Callable[..., tuple[Array, ...]] = functools.partial(run, FORWARD)
backward: Callable[..., tuple[Array, ...]] = functools.partial(run, BACKWARD)


def row_sums(problem: Problem, /, q: Array, k: Array, v: Array, lse: Array, **optional_inputs: Any) -> Array:
    """Row max and row sum, over the keys of a slice, of rows whose lse is large (`cuflash.spec.row_sums`).

    The layout is "bhsd".
    """
    found = spec_row_sums.to_fill(lse)
    if problem.has_float8:  # which have no backward pass
        return _row_sums_of_float8(problem, q, k, v, lse, found, optional_inputs)
    way, unit, _ = _way_of(problem, (), BACKWARD)
    way(
        problem,
        {"q": q, "k": k, "v": v, "lse": lse, "row_sums": found[..., :2], **optional_inputs},
        BACKWARD,
        None,
        None,
    )
    found[..., 2] = unit
    return found


def _run(
    problem: Problem, arrays: Mapping[str, Array | None], pass_: Pass, seed: int | None, offset: int | None
) -> None:
    if problem.multiplies_float8:
        _run_with_wide_queries(problem, arrays, seed, offset)
        return
    if problem.has_float8:
        scales = {name: scales_of_rows(problem, name, arrays.get(name)) for name in FP8_SCALES}
        arrays = {**arrays, **scales}
    wanted = [name for name in pass_.results_in(problem) if arrays.get(name) is not None]
    way, unit, reason = _way_of(problem, wanted, pass_)
    if reason is not None and reason == core.why_not():  # and not one of this problem
        _warn_once(reason)
    if (sums := arrays.get("row_sums")) is not None:
        arrays = {**arrays, "row_sums": spec_row_sums.in_units(sums, unit, problem.softmax_dtype)}
    way(problem, arrays, pass_, seed, offset)


def _way_of(problem: Problem, wanted: Collection[str], pass_: Pass) -> tuple[Callable[..., None], float, str | None]:
    """The function that computes a pass, its unit of row maxima, and why the core does not compute it."""
    way, reason = core.run, core.why_not(problem)
    if problem.has_functions and pass_.has_tangents:
        way, reason = score_mod_as_bias.run, reason or score_mod_as_bias.why_not_tangents(problem, wanted)
    elif problem.has_functions:
        gradients = [name for name in wanted if name in problem.gradients]
        way, reason = score_mod_as_bias.run, reason or score_mod_as_bias.why_not(problem, gradients)
    by_numpy = fallback_tangents.run if pass_.has_tangents else fallback.run
    return (way, core.unit_of(problem), None) if reason is None else (by_numpy, 1.0, reason)


@functools.cache
def _warn_once(reason: str) -> None:
    """Say that there is no core, at the first call that would take it."""
    if os.environ.get("CUFLASH_NO_CORE_WARNING", "0") in ("", "0"):
        warnings.warn(
            f"NumPy computes attention in place of the compiled core, several times slower: {reason}. Set "
            "CUFLASH_NO_CORE_WARNING=1 if that is wanted.",
            RuntimeWarning,
            stacklevel=callers_frame()[1],
        )


@np.errstate(all="ignore")
def _run_with_wide_queries(
    problem: Problem, arrays: Mapping[str, Array | None], seed: int | None, offset: int | None
) -> None:
    """Compute the forward pass where q, k and v are fp8: q in float32, and out rounded at the end."""
    q, out = arrays["q"], arrays["out"]
    assert q is not None and out is not None
    of_float32, wide = _with_wide_queries(problem, q, arrays.get("q_scale"))
    sums = out.astype(np.float32)  # rows of no sequence are not written to
    _run(of_float32, {**arrays, "q": wide, "q_scale": None, "out": sums}, FORWARD, seed, offset)
    out[...] = sums


def _with_wide_queries(problem: Problem, q: Array, scale: Array | None) -> tuple[Problem, Array]:
    """The problem with q in float32, and that q."""
    scale = scales_of_rows(problem, "q_scale", scale)
    wide = view_4d(q, problem.layout).astype(np.float32) * (np.float32(1) if scale is None else scale[..., None])
    wide = (wide.swapaxes(1, 2) if problem.layout == "bshd" else wide).reshape(q.shape)
    return replace(problem, dtype="float32", q=layout_of(wide, problem.layout), q_scale=None), wide


@np.errstate(all="ignore")
def _row_sums_of_float8(
    problem: Problem, q: Array, k: Array, v: Array, lse: Array, found: Array, optional_inputs: dict[str, Any]
) -> Array:
    if problem.multiplies_float8:
        problem, q = _with_wide_queries(problem, q, optional_inputs.pop("q_scale", None))
    optional_inputs |= {name: scales_of_rows(problem, name, optional_inputs.get(name)) for name in FP8_SCALES}
    arrays = {"q": q, "k": k, "v": v, "lse": lse, "row_sums": found[..., :2], **optional_inputs}
    fallback.run(problem, arrays, BACKWARD, None, None)
    return found


def _results_for(
    pass_: Pass, problem: Problem, need: Collection[str], given: Mapping[str, Array | None]
) -> dict[str, Array]:
    """Arrays for the results that are wanted, in order: given ones, or new ones."""
    operands = {name: x for name, x in given.items() if x is not None}
    wanted: dict[str, Array] = {}
    for name in pass_.results_in(problem):
        if name in need:
            result = operands.get(name)
            if result is None:
                shape, dtype = expected(name, problem, operands)
                result = np.empty(shape, numpy_dtype(dtype))
            wanted[name] = result
    return wanted
