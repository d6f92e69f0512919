"""The backend of NumPy arrays, the CPU path: what `cuflash.gpu.backend` is for CuPy arrays."""

from __future__ import annotations

import functools
import operator
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
from cuflash.spec.batch_axes import BatchCalls, FirstCall, axes_of, first_call
from cuflash.spec.binding import Binding, Contiguous, bind, of_pass
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED, OUTPUTS
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS, Pass
from cuflash.spec.problem import Problem, check_pages

INDICES = ("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "block_table")  # the core reads rows where these say
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
    if not has_row_sums:
        results = repeated(pass_, options, arrays, need, random)
        if results is None and (call := remembered(pass_, options, arrays, need)) is not None:
            results = call.results((*arrays.values(),), arrays, need, random)
        if results is not None:
            return results
    if any(arrays.get(name) is not None for name in INDICES):  # results are compared with the caller's, not with copies
        check_no_overlap(arrays, need)
        arrays = with_own_indices(arrays)
    own = {name: x for name, x in arrays.items() if name != "row_sums"}
    if not has_row_sums and (axes := axes_of(options, own, need)):
        calls = BatchCalls(axes, options, own, need, np, gives_partials=False)
        return calls.run(lambda options, found: compute(pass_, options, _given(found), need, random))
    problem = bound(pass_, options, own, need).problem
    return cpu.run(pass_, problem, need=need, **arrays, seed=random[0], offset=random[1])


def repeated(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...], random: tuple[int, int]
) -> tuple[Any, ...] | None:
    """What `compute` gives for arrays that lie as those of a remembered call; None if there is none.

    Arrays that are None are absent. The others may be of any library: the core compares their types, too. A small call
    takes half the time this way.
    """
    known = _known.get((pass_, options, need, *arrays))
    if known is None:
        return None
    every = (*arrays.values(),)
    number = core.find(known.table, every)
    return None if number < 0 else known.calls[number].results(every, arrays, need, random)


def row_sums(options: Options, given: dict[str, Any]) -> Any:
    """Row max and row sum of rows whose lse is large, over the keys that are given (`cuflash.spec.row_sums`).

    lse is that of these keys, or of all keys of which these are some. There is one batch axis, and the layout "bhsd".
    """
    given = with_own_indices(given)
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
    binding = bind_signature(pass_, options, _signature_of(given), need)
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


def with_own_indices(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, of which those that say where rows lie are copies, which no other thread changes after the checks."""
    return {name: x.copy() if name in INDICES and x is not None else x for name, x in arrays.items()}


def _given(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays that are not None."""
    return {name: x for name, x in arrays.items() if x is not None}


def _signature_of(arrays: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """What a binding depends on, for each array that is not None."""
    return tuple([(name, x.shape, x.strides, x.dtype) for name, x in arrays.items() if x is not None])


class _ArraySignature(NamedTuple):
    """The properties of a NumPy array that a binding depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


class _Repeatable(NamedTuple):
    """Calls that differ only in addresses, in numbers in arrays, and in the seed and the offset of dropout."""

    compute: Callable[..., int]  # `core.compute`, or that of functions, of what was prepared
    are_disjoint: bool  # no result has an array of the caller
    allocated: tuple[tuple[tuple[int, ...], Any], ...]  # shapes and dtypes of results without an array of the caller
    result_indices: tuple[int, ...]  # indices of the results among the given arrays, followed by the allocated ones


class Remembered(NamedTuple):
    """A call that may be repeated on arrays of given names, some of which are None in each of these calls."""

    call: _Repeatable
    signatures: bytes  # of all arrays, as the core compares them: with the addresses of their dtypes
    dtypes: tuple[Any, ...]  # which nothing else may keep alive: equal ones need not be one object
    given_of: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # those of all arrays that are given

    def results(
        self, every: tuple[Any, ...], arrays: Mapping[str, Any], need: tuple[str, ...], random: tuple[int, int]
    ) -> tuple[Any, ...] | None:
        """The results `need` of a call, whose arrays are `arrays` by name and `every` in order.

        It is None if elements of an array are not aligned to their size, or a result is read-only.
        """
        compute, are_disjoint, allocated, result_indices = self.call
        given = self.given_of(every)
        if not are_disjoint:
            results = [arrays[name] for name in need if arrays.get(name) is not None]
            if not all([x.flags.writeable for x in results]):
                return None
        if allocated:
            given += tuple([np.empty(shape, dtype) for shape, dtype in allocated])
        status = compute(given, random, are_disjoint=are_disjoint)
        if status == core.OVERLAPPING:
            check_no_overlap({name: x for name, x in arrays.items() if x is not None}, need)
            status = compute(given, random, are_disjoint=True)
        return tuple([given[index] for index in result_indices]) if status == core.DONE else None


class _Known(NamedTuple):
    """Calls with the same options on arrays of the same names, the latest one first."""

    table: bytes
    calls: tuple[Remembered, ...]


_known: dict[tuple[Any, ...], _Known] = {}


def remembered(pass_: Pass, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...]) -> Remembered | None:
    """Remember a call on NumPy arrays, so that it may be `repeated`; None if the core does not compute it as it is."""
    call = _remembered(pass_, options, arrays, need)
    if call is None:
        return None
    key = (pass_, options, need, *arrays)
    known = _known.get(key)
    calls = known.calls if known else ()
    if not any(call.signatures == one.signatures for one in calls):
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        calls = (call, *calls[: MOST_SIGNATURES - 1])
        _known[key] = _Known(core.table_of([one.signatures for one in calls]), calls)
    return call


def _remembered(pass_: Pass, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...]) -> Remembered | None:
    if pass_.has_tangents or core.why_not() is not None:
        return None
    signature = _signature_of(arrays)
    call = _repeatable(pass_, options, signature, need)
    if call is None:
        return None
    dtypes = tuple([dtype for *_, dtype in signature])
    given_of = operator.itemgetter(*[index for index, x in enumerate(arrays.values()) if x is not None])
    return Remembered(call, core.signatures_of(arrays.values()), dtypes, given_of)


class BoundCall:
    """The forward pass of the core on arrays of one form: a call compares its arrays with that form, and computes.

    `arrays` are those of the call by name, in the order in which later calls give them.
    """

    __slots__ = ("_bound", "_need", "_options")

    def __init__(self, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...]) -> None:
        self._options, self._need = options, need
        self._bound: tuple[Remembered, bytes] | None = None
        self.bind(arrays)

    @property
    def is_bound(self) -> bool:
        """Whether the core computes calls as they are, without batch axes and without a check of values in arrays."""
        return self._bound is not None

    def bind(self, arrays: Mapping[str, Any]) -> None:
        """Bind such arrays in place of those before; raises what `compute` does for their shapes and dtypes."""
        call = _remembered(FORWARD, self._options, arrays, self._need)
        self._bound = None if call is None else (call, core.table_of([call.signatures]))
        if call is None:
            first = first_call(self._options, arrays, self._need, np, gives_partials=False)
            bind_signature(FORWARD, first.options, _signature_of(first.arrays), self._need)

    def __call__(self, arrays: Mapping[str, Any], random: tuple[int, int]) -> tuple[Any, ...] | None:
        """The results of a call, or None if its arrays are not of the form. `arrays` are those that are given."""
        if self._bound is None:
            return None
        call, table = self._bound
        every = (*arrays.values(),)
        return None if core.find(table, every) < 0 else call.results(every, arrays, self._need, random)


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
    return _Repeatable(compute, are_disjoint, allocated, result_indices)


@functools.lru_cache(maxsize=256)
def bind_signature(pass_: Pass, options: Options, signature: tuple[Any, ...], need: tuple[str, ...]) -> Binding:
    """The binding of arrays by (name, shape, strides, dtype), cached: a look-up takes a tenth of the time to bind."""
    arrays = {name: _ArraySignature(*facts) for name, *facts in signature}
    for name, (_, _, dtype) in arrays.items():
        check_byte_order(name, dtype)
    binding = bind(pass_, options, arrays, need=need)
    binding.problem.program.on_numpy()  # refuses a score that only a GPU computes
    return binding
