"""Reductions of the attention weights of NumPy arrays: column sums, the column maximum, and the strongest keys.

The compiled core computes them, but with score_mod and mask_mod, for which the tiles of `cuflash.cpu.fallback` do; of
column sums, the backward pass does then (`cuflash.spec.reductions` says how), in float32 where q and k are of 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import backend, core, fallback, jobs
from cuflash.cpu.packed import sequences
from cuflash.spec.options import Options
from cuflash.spec.passes import BACKWARD, COLUMN_MAX, COLUMN_SUMS, COLUMN_SUMS_BACKWARD, TOP_KEYS, Pass
from cuflash.spec.problem import Problem
from cuflash.spec.reductions import dout_from_factors, sums_from_dv, widened
from cuflash.spec.row_sums import in_units

Array = NDArray[Any]


def compute(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int) -> tuple[Array, ...]:
    """The results of a reduction; `count` is how many keys `TOP_KEYS` finds of a row."""
    if pass_ is TOP_KEYS:
        return _top_keys(*_bound(TOP_KEYS, options, arrays), *count)
    if pass_ is COLUMN_MAX:
        return (_of_columns(*_bound(COLUMN_MAX, options, arrays), COLUMN_MAX, ReductionJob.largest, np.maximum),)
    return (_column_sums(options, arrays),)


def _column_sums(options: Options, arrays: Mapping[str, Any]) -> Array:
    problem, arrays = _bound(COLUMN_SUMS, options, arrays)
    if not problem.has_functions or core.why_not(problem) is not None or not problem.num_heads:
        return _of_columns(problem, arrays, COLUMN_SUMS, ReductionJob.sums, np.add)
    given = widened(options, arrays)
    dtype = given["q"].dtype
    factors = given.pop("dlse", None)
    factors = np.ones(given["lse"].shape, dtype) if factors is None else factors
    group, layout = problem.group_size, options.layout
    dout = dout_from_factors(factors, group, group, layout, dtype)
    given |= {"v": np.zeros((*given["k"].shape[:-1], group), dtype), "dout": dout, "out": np.zeros_like(dout)}
    (dv,) = backend.compute(BACKWARD, options, given, ("dv",))
    return sums_from_dv(dv, group, layout)


def _top_keys(problem: Problem, arrays: dict[str, Any], count: int) -> tuple[Array, Array]:
    shape = (*problem.lse_shape, count)
    found = (np.full(shape, -1, np.int32), np.zeros(shape, problem.softmax_dtype))
    if _is_run_by_core(TOP_KEYS, problem, arrays, found):
        return found
    split = (problem.array_batch, problem.num_heads_kv, problem.group_size, problem.seqlen_q, count)
    indices, weights = (x.reshape(split) for x in found)
    calls = fallback.calls(problem, _in_units(problem, arrays))
    for call, (batches, rows, keys) in zip(calls, _result_slices(problem, arrays), strict=True):
        into = (indices[batches, :, :, rows], weights[batches, :, :, rows])
        pick = functools.partial(ReductionJob.pick, first_key=keys.start or 0, into=into)
        _run(problem, pick, call.jobs(ReductionJob))
    return found


def plan(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int) -> backend.CpuPlan:
    """The plan of a reduction; `count` is that of `TOP_KEYS`."""
    return backend.CpuPlan(problem=_bound(pass_, options, arrays)[0], passes=(pass_,))


compile = plan  # the arguments are checked, and there is nothing to compile


def tune(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int, **how: bool) -> None:
    """Check the arguments, and raise NotImplementedError: there are no tiles to choose from."""
    _bound(pass_, options, arrays)
    raise backend.nothing_to_tune()


def plan_gradients(
    options: Options, arrays: dict[str, Any], need: tuple[str, ...], passes: tuple[Pass, ...]
) -> backend.CpuPlan:
    """The plan of the gradients of column sums, by passes over values (`cuflash.spec.reductions`)."""
    found = backend.plan(options, arrays, need, passes)
    return replace(found, problem=found.problem.with_values(0), passes=(COLUMN_SUMS_BACKWARD,))


tune_gradients = backend.tune


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _bound(pass_: Pass, options: Options, arrays: Mapping[str, Any]) -> tuple[Problem, dict[str, Any]]:
    """The problem of a reduction, checked, without fp8; and its arrays.

    They may have row sums (`cuflash.spec.row_sums`) where q and k are a slice of a problem.
    """
    given = backend.with_own_indices(arrays)
    sums = given.pop("row_sums", None)
    problem = backend.bound(pass_, options, given, ()).problem
    if problem.has_float8:
        given = widened(options, given)
        problem = backend.bound(pass_, options, given, ()).problem
    return problem, given if sums is None else {**given, "row_sums": sums}


def _in_units(problem: Problem, arrays: Mapping[str, Any], unit: float = 1.0) -> dict[str, Any]:
    """The arrays, with row sums in this unit of row maxima, by default as tiles of `fallback` read them."""
    sums = arrays.get("row_sums")
    return {**arrays} if sums is None else {**arrays, "row_sums": in_units(sums, unit, problem.softmax_dtype)}


def _is_run_by_core(pass_: Pass, problem: Problem, arrays: Mapping[str, Any], results: tuple[Array, ...]) -> bool:
    """Compute the results of a reduction, and say whether the core does."""
    if problem.has_functions or core.why_not(problem) is not None or not problem.num_heads:
        return False
    given = _in_units(problem, arrays, core.unit_of(problem)) | dict(zip(pass_.default, results, strict=True))
    core.run(problem, given, pass_, None, None)
    return True


# ---- tiles -----------------------------------------------------------------------------------------------------------


class _ResultSlice(NamedTuple):
    """Where the results of a call are: its batch entries, rows and keys."""

    batches: slice
    rows: slice
    keys: slice


def _result_slices(problem: Problem, arrays: Mapping[str, Any]) -> Iterator[_ResultSlice]:
    """The slice of each call of `fallback.calls`."""
    every = slice(None)
    if problem.is_packed:
        for one in sequences(problem, arrays["cu_seqlens_q"], arrays["cu_seqlens_k"]):
            yield _ResultSlice(every, one.rows, one.keys)
    elif problem.kv_lengths is None:
        yield _ResultSlice(every, every, every)
    else:
        yield from (_ResultSlice(slice(entry, entry + 1), every, every) for entry in range(problem.batch))


def _run(problem: Problem, work: Callable[..., Any], own: Iterator[ReductionJob], take: Any = lambda x: None) -> None:
    threads = 1 if problem.forward_flops < fallback.SERIAL_FLOPS else jobs.count_cores()
    jobs.run(work, own, threads, take)


def _of_columns(
    problem: Problem, arrays: Mapping[str, Any], pass_: Pass, work: Callable[..., Any], ufunc: np.ufunc
) -> Array:
    """A reduction over rows, which no order of threads changes."""
    shape = (problem.array_batch, problem.num_heads, problem.seqlen_k)[4 - problem.ndim :]
    result = np.zeros(shape, problem.softmax_dtype)
    if _is_run_by_core(pass_, problem, arrays, (result,)):
        return result
    found = result.reshape(problem.array_batch, problem.num_heads_kv, problem.group_size, problem.seqlen_k)
    calls = fallback.calls(problem, _in_units(problem, arrays))
    for call, (batches, _, keys) in zip(calls, _result_slices(problem, arrays), strict=True):
        own = found[batches, :, :, keys]

        def take(result: Any, own: Array = own) -> None:
            heads, tiles = result
            for columns, x in tiles:
                into = own[heads][..., columns]
                ufunc(into, x, out=into)

        _run(problem, work, call.jobs(ReductionJob), take)
    return result


class ReductionJob(fallback.Job):
    """Some rows of some heads, whose weights are reduced."""

    def sums(self) -> tuple[tuple[slice, slice], list[tuple[slice, Array]]]:
        """The sums over rows of the weights of each tile, times dlse."""
        factors = self.of_rows("dlse") if "dlse" in self.call.arrays else None
        return self._over_rows(lambda p: self._by_heads(p if factors is None else p * factors).sum(axis=3))

    def largest(self) -> tuple[tuple[slice, slice], list[tuple[slice, Array]]]:
        """The largest weight of each column of each tile."""
        return self._over_rows(lambda p: self._by_heads(p).max(axis=3))

    def _by_heads(self, p: Array) -> Array:
        return p.reshape(*self.shape, p.shape[-1])

    def _over_rows(self, reduce: Callable[[Array], Array]) -> tuple[tuple[slice, slice], list[tuple[slice, Array]]]:
        weights = self.weights_of(self.of_rows("lse"))
        return self.at_heads, [
            (tile.columns, reduce(weights(self.folded(self.scores(tile)[1])))) for tile in self.tiles()
        ]

    def pick(self, first_key: int, into: tuple[Array, Array]) -> None:
        """Write indices and weights of the keys with the largest scores."""
        weights, count = self.weights_of(self.of_rows("lse")), into[0].shape[-1]
        shape = (*self.shape[:2], self.shape[2] * self.shape[3], count)
        best, indices = np.full(shape, -np.inf, self.dtype), np.full(shape, -1, np.int32)
        for tile in self.tiles():
            scores = self.folded(self.scores(tile)[1])
            keys = np.arange(tile.keys.start + first_key, tile.keys.stop + first_key, dtype=np.int32)
            both = np.concatenate([best, scores], axis=-1)
            every = np.concatenate([indices, np.broadcast_to(keys, scores.shape)], axis=-1)
            best, indices = largest_of(both, every, count)
        is_none, of_best = best == -np.inf, weights(best)
        indices[is_none], of_best[is_none] = -1, 0  # NaN, if lse is
        for result, x in zip(into, (indices, of_best), strict=True):
            own = result[self.at_rows]
            own[...] = x.reshape(own.shape)


def largest_of(scores: Array, indices: Array, count: int) -> tuple[Array, Array]:
    """The `count` largest of each row with their indices, which ascend where scores are equal; largest first.

    NaN counts as -inf, and becomes that.
    """
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    least = np.partition(ranked, -count, axis=-1)[..., -count, None]
    above, equal = ranked > least, ranked == least
    is_one = above | (equal & (np.cumsum(equal, axis=-1) <= count - above.sum(axis=-1, keepdims=True)))
    shape = (*scores.shape[:-1], count)
    ranked, indices = (x[is_one].reshape(shape) for x in (ranked, indices))
    order = np.argsort(-ranked, axis=-1, kind="stable")
    return np.take_along_axis(ranked, order, axis=-1), np.take_along_axis(indices, order, axis=-1)
