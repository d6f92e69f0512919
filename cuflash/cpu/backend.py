"""The backend of NumPy arrays, the CPU path: what `cuflash.gpu.backend` is for CuPy arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cuflash import cpu
from cuflash.arrays.array_info import check_byte_order
from cuflash.arrays.checks import value_error
from cuflash.arrays.dlpack import check_no_overlap
from cuflash.arrays.units import WIDTH, in_bytes, in_seconds, wrapped
from cuflash.cpu import core, score_mod_as_bias
from cuflash.cpu.packed import check_starts
from cuflash.spec.batch_axes import Calls, FirstCall, axes_of, first_call
from cuflash.spec.binding import Binding, Contiguous, bind, of_pass
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED, OUTPUTS
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS, Pass
from cuflash.spec.problem import Problem, check_pages

MOST_KNOWN = 256  # passes, options and array names of which calls are kept
MOST_SIGNATURES = 16  # and calls of each, which have other shapes, strides or dtypes


def compute(
    pass_: Pass, options: Options, arrays: dict[str, Any], need: tuple[str, ...], random: tuple[int, int] = (0, 0)
) -> tuple[Any, ...]:
    """The results `need` of a pass over NumPy arrays by name: its inputs, and the results that are given.

    `random` is the seed and the offset of dropout. `arrays` of a backward pass may have row sums
    (`cuflash.spec.row_sums`) where q, k and v are a slice of a problem.
    """
    has_row_sums = "row_sums" in arrays
    if not has_row_sums and not pass_.has_tangents and core.why_not() is None:
        # If the core computes it without a check of the values in arrays, a small call takes half the time this way.
        key, every = (pass_, options, need, *arrays), tuple(arrays.values())
        known = _known.get(key)
        number = core.find(known.table, every) if known is not None else -1
        call = known.calls[number] if known is not None and number >= 0 else _remembered(key, arrays)
        if call is not None:
            if call.allocated:
                every += tuple([np.empty(shape, dtype) for shape, dtype in call.allocated])
            status = call.compute(every, random, are_disjoint=call.are_disjoint)
            if status == core.OVERLAPPING:
                check_no_overlap(arrays, need)
                status = call.compute(every, random, are_disjoint=True)
            if status == core.DONE:
                return tuple([every[index] for index in call.result_indices])
    own = {name: x for name, x in arrays.items() if name != "row_sums"}
    if not has_row_sums and (axes := axes_of(options, own, need)):
        calls = Calls(axes, options, own, need, np, gives_partials=False)
        return calls.run(lambda options, found: compute(pass_, options, _given(found), need, random))
    problem = bound(pass_, options, own, need).problem
    return cpu.run(pass_, problem, need=need, **arrays, seed=random[0], offset=random[1])


def row_sums(options: Options, given: dict[str, Any]) -> Any:
    """Row max and row sum of rows whose lse is large, over the keys that are given (`cuflash.spec.row_sums`).

    lse is that of these keys, or of all keys of which these are some. There is one batch axis, and the layout "bhsd".
    """
    problem = bound(FORWARD, options, {name: x for name, x in given.items() if name != "lse"}, OUTPUTS).problem
    return cpu.row_sums(problem, **given)


def plan(
    options: Options,
    arrays: dict[str, Any],
    need: tuple[str, ...] = DEFAULT_NEED,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
) -> CpuPlan:
    """The plan of what these passes would compute."""
    problem = compile(options, arrays, need, passes)
    axes = _first(FORWARD, options, arrays).axes
    if axes:
        axes = _first(BACKWARD, options, arrays, need).axes
    return CpuPlan(problem=problem, need=need, passes=passes, axes=axes)


def compile(
    options: Options,
    arrays: dict[str, Any],
    need: tuple[str, ...] = DEFAULT_NEED,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
) -> Problem:
    """Check the arguments only, because there is nothing to compile; this returns the problem, with its tangents."""
    for pass_ in (FORWARD, *(x for x in passes if x.has_tangents)):
        first = _first(pass_, options, arrays, need)
        problem = bound(pass_, first.options, _given(first.arrays), pass_.results_for(need)).problem
    return problem


def tune(
    options: Options,
    arrays: dict[str, Any],
    random: tuple[int, int] = (0, 0),
    *,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
    remember: bool = True,
    forget: bool = False,
) -> None:
    """Check the arguments, and raise NotImplementedError: there are no tiles to choose from."""
    compile(options, {name: x for name, x in arrays.items() if name != "dout"}, passes=passes)
    raise nothing_to_tune()


def nothing_to_tune() -> NotImplementedError:
    return NotImplementedError(
        "q: got an array in host memory, expected one on a GPU: the CPU path has no tiles to tune"
    )


def _first(pass_: Pass, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...] = DEFAULT_NEED) -> FirstCall:
    """The first of the passes without batch axes that make up one with these."""
    own = of_pass(pass_, arrays, options)
    return first_call(options, own, pass_.results_for(need), np, gives_partials=False)


@dataclass(frozen=True, kw_only=True)
class CpuPlan:
    """The result of `FlashAttention.plan` for NumPy arrays."""

    problem: Problem
    need: tuple[str, ...] = DEFAULT_NEED  # the gradients that are wanted
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS
    axes: str = ""  # how the call goes through batch axes; empty if there are none
    note: str = ""  # further remarks on the call
    seconds: tuple[float, ...] = ()  # about how long each pass takes; empty where nobody has measured
    others: tuple[CpuPlan, ...] = ()  # of further passes: reductions of the attention weights have no values

    def noted(self, note: str) -> CpuPlan:
        """The plan with a note."""
        return replace(self, note=note)

    def joined(self, other: CpuPlan) -> CpuPlan:
        """The plans of both."""
        if not self.others and replace(other, passes=self.passes) == self:
            return replace(self, passes=(*self.passes, *other.passes))
        return replace(self, others=(*self.others, other))

    def describe(self, verbose: bool = False, width: int = WIDTH) -> str:
        """The plan in words, wrapped at `width` columns (0: not at all): first the work, or how long it takes.

        `verbose` is for plans of kernels; on the CPU there is nothing to choose from.
        """
        p = self.problem
        heads = f"{p.num_heads} heads" + (f" over {p.num_heads_kv} key/value heads" if p.group_size > 1 else "")
        sizes = f"seqlen {p.seqlen_q} x {p.seqlen_k}, head_dim {p.head_dim}, head_dim_v {p.head_dim_v}"
        sizes += " (packed: seqlen of all, work as of equal lengths)" if p.is_packed else ""
        work = [
            f"{pass_.flops(p) / 1e9:.3g} GFLOP {pass_}"
            if not pass_.gives_gradients or p.why_no_gradients is None
            else f"no {pass_} pass with {p.why_no_gradients}"
            for pass_ in self.passes
        ]
        about = [
            f"{pass_} about {in_seconds(float(f'{x:.2g}'))}"
            for pass_, x in zip(self.passes, self.seconds, strict=False)
        ]
        sizes += f", tangents of {', '.join(p.moved)}" if p.moved else ""
        dtypes = f"{p.dtype} in and out" + (f", {p.k.dtype} in k and v" if p.has_float8 else "")
        if p.multiplies_float8:
            dtypes = f"{p.q.dtype} in q, k and v, {p.dtype} out"
        own = wrapped(
            (
                f"CPU: {', '.join(about or work)}, extra memory linear in seqlen",
                f"  path      {cpu.describe(p, self.need, self.passes)}; the arrays are in host memory",
                *((f"  work      {', '.join(work)}",) if about else ()),
                f"  problem   batch {p.batch}, {heads}, {sizes}, layout {p.layout}",
                *((f"  axes      {self.axes}",) if self.axes else ()),
                f"  precision {dtypes}, {p.softmax_dtype} inside",
                *(("  bits      those of a sequence in any other call",) if p.batch_invariant else ()),
                f"  memory    the plain formula's scores would take {in_bytes(p.naive_bytes)}",
                *(f"  {line}" for line in (p.program.on_numpy().describe().splitlines() if p.has_functions else ())),
                *(f"  {line}" for line in self.note.splitlines()),
            ),
            width,
        )
        return "\n".join([own, *(other.describe(verbose, width) for other in self.others)])


def bound(pass_: Pass, options: Options, given: Mapping[str, Any], need: tuple[str, ...]) -> Binding:
    """The binding of a call on NumPy arrays; this also checks values, which only arrays in host memory allow."""
    shapes = tuple((name, x.shape, x.strides, x.dtype) for name, x in given.items())
    binding = bind_signature(pass_, options, shapes, need)
    problem = binding.problem
    if problem.is_packed:
        check_starts(problem, given["cu_seqlens_q"], given["cu_seqlens_k"])
    if problem.kv_lengths is not None:
        lengths = given["kv_lengths"]
        outside = lengths[(lengths < 0) | (lengths > problem.seqlen_k)]
        if outside.size:
            raise value_error("kv_lengths", f"an entry {outside[0]}", f"0 to seqlen_k = {problem.seqlen_k}")
    if problem.block_table is not None:
        check_pages(problem, given["block_table"], given["kv_lengths"])
    if len(binding.allocated) < len(binding.results):
        check_no_overlap(given, binding.results)
    return binding


def _given(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays that are not None."""
    return {name: x for name, x in arrays.items() if x is not None}


class _ArraySignature(NamedTuple):
    """The properties of a NumPy array that a binding depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


class _Repeatable(NamedTuple):
    """Calls that differ only in addresses, in numbers in arrays, and in the seed and the offset of dropout."""

    compute: Callable[..., int]  # `core.compute`, or that of functions, of what was prepared
    are_disjoint: bool  # no result has an array of the caller
    arrays: tuple[_ArraySignature, ...]  # those that are given
    allocated: tuple[tuple[tuple[int, ...], Any], ...]  # shapes and dtypes of results without an array of the caller
    result_indices: tuple[int, ...]  # indices of the results among the given arrays, followed by the allocated ones


class _Known(NamedTuple):
    """Calls with the same options on arrays of the same names, the latest one first."""

    table: bytes
    calls: tuple[_Repeatable, ...]


_known: dict[tuple[Any, ...], _Known] = {}


def _remembered(key: tuple[Any, ...], given: Mapping[str, Any]) -> _Repeatable | None:
    """Prepare a call that was not found, and store it, so that it is found next time. `key` is that of `_known`."""
    pass_, options, need, *_ = key
    signature = tuple([(name, x.shape, x.strides, x.dtype) for name, x in given.items()])
    call = _repeatable(pass_, options, signature, need)
    known = _known.get(key)
    calls = known.calls if known else ()
    if call is not None and not any(call is one for one in calls):
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        calls = (call, *calls[: MOST_SIGNATURES - 1])
        _known[key] = _Known(core.table_of([one.arrays for one in calls]), calls)
    return call


@functools.lru_cache(maxsize=256)
def _repeatable(pass_: Pass, options: Options, signature: tuple[Any, ...], need: tuple[str, ...]) -> _Repeatable | None:
    """What calls on arrays of this signature have in common, if the core computes them as they are; else None.

    It is None with batch axes, and if numbers in arrays have to be checked or scaled first.
    """
    arrays = {name: _ArraySignature(*facts) for name, *facts in signature}
    if axes_of(options, arrays, need):
        return None
    binding = bind_signature(pass_, options, signature, need)
    problem = binding.problem
    looks_at_numbers = problem.is_packed or problem.kv_lengths is not None or problem.block_table is not None
    if looks_at_numbers or problem.has_float8 or binding.results != need or core.why_not(problem) is not None:
        return None
    every: dict[str, Any] = {**arrays, **{name: Contiguous(shape, dtype) for name, shape, dtype in binding.allocated}}
    compute: Callable[..., int]
    if problem.has_functions:
        of_functions = score_mod_as_bias.prepare(problem, every, pass_)
        if of_functions is None:
            return None
        compute = of_functions.compute
    else:
        prepared = core.prepare(problem, every, pass_)
        if prepared is None:
            return None
        compute = functools.partial(core.compute, prepared)
    allocated = tuple((shape, dtype) for _, shape, dtype in binding.allocated)
    result_indices = tuple(map(list(every).index, binding.results))
    are_disjoint = len(allocated) == len(binding.results)
    return _Repeatable(compute, are_disjoint, tuple(arrays.values()), allocated, result_indices)


@functools.lru_cache(maxsize=256)
def bind_signature(pass_: Pass, options: Options, signature: tuple[Any, ...], need: tuple[str, ...]) -> Binding:
    """The binding of arrays by (name, shape, strides, dtype), cached: a look-up takes a tenth of the time to bind."""
    arrays = {name: _ArraySignature(*facts) for name, *facts in signature}
    for name, (_, _, dtype) in arrays.items():
        check_byte_order(name, dtype)
    binding = bind(pass_, options, arrays, need=need)
    binding.problem.program.on_numpy()  # refuses a score that only a GPU computes
    return binding
