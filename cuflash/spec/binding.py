"""A binding describes a call: it has the problem, the operands as kernels read them, the results, and the copies.

A binding depends only on shape, strides, dtype and address of each array, so NumPy arrays, CuPy arrays and arrays that
do not exist yet (`Contiguous`) bind alike. Calls, plans, tuning, the command line and the emulator all start from
`bind`, so the plan for some arrays is the plan that runs on them.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict

import numpy as np

from cuflash.arrays.array_info import (
    FLOAT8,
    ITEMSIZE,
    Operand,
    Shaped,
    as_it_is,
    check_array,
    layout_of,
    numpy_dtype,
    rows_of,
)
from cuflash.arrays.checks import value_error
from cuflash.arrays.dlpack import check_distinct
from cuflash.spec.inputs import FP8_SCALES, INPUTS, NAMES, NUMBERS, OPTIONAL_INPUTS, WITH_KEYS
from cuflash.spec.options import Options, window_of
from cuflash.spec.outputs import BY_NAME as OUTPUT_ROWS
from cuflash.spec.outputs import (
    MOVABLE,
    MOVABLE_OVER_HEAD_DIM,
    MOVABLE_OVER_ROWS,
    NUMBER_GRADIENTS,
    OVER_HEAD_DIM,
    ROW_REDUCTIONS,
    TOP_KEYS_ROWS,
    UPSTREAM,
    WEIGHT_REDUCTION_ROWS,
    Output,
)
from cuflash.spec.passes import BACKWARD, Pass
from cuflash.spec.problem import Problem, gradient_operand, make_problem

_INPUT_OF_GRADIENT = {row.gradient: row for row in OPTIONAL_INPUTS if row.gradient_via}
_REDUCED = {row.name: len(row.axes or ()) for row in WEIGHT_REDUCTION_ROWS}  # with their axes


class _Named(NamedTuple):
    """A dtype of which only name and size are known, because NumPy does not know bfloat16 by its name."""

    name: str
    itemsize: int


class Contiguous:
    """Shape, strides and dtype of a C-contiguous array that does not exist yet."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.strides = tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))


class Layout(TypedDict, total=False):
    """The keyword arguments of `cuflash.plan.choose_plan` that describe the arrays of a pass."""

    load_bytes: int
    store_bytes: int
    operands: Mapping[str, Operand]
    need: Collection[str]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One pass of one problem, and how its arrays lie in memory."""

    pass_: Pass
    problem: Problem
    operands: Mapping[str, Operand]  # arrays of the pass that are not in the problem
    results: tuple[str, ...]  # names of what the pass returns
    allocated: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]  # results for which the caller gives no array
    copied: tuple[str, ...]  # arrays over head dimensions whose rows are not contiguous: kernels get contiguous copies
    load_bytes: int  # widest access that is aligned at every row of all arrays that the pass reads
    store_bytes: int  # the same for arrays that the pass writes

    @property
    def layout(self) -> Layout:
        """Keyword arguments of `cuflash.plan.choose_plan`."""
        return Layout(
            load_bytes=self.load_bytes, store_bytes=self.store_bytes, operands=self.operands, need=self.results
        )


def bind(
    pass_: Pass,
    options: Options,
    arrays: Mapping[str, Shaped | None],
    *,
    need: Collection[str] | None = None,
    address_of: Callable[[Any], int] | None = None,
) -> Binding:
    """Validate the arrays of one pass against each other, and find how they lie in memory.

    `arrays` are q, k, v, optional inputs, what else the pass takes, and results, by name; None stands for an absent
    one. If results are absent, or dout, out and lse of a backward pass that is only planned, they are assumed to be
    C-contiguous and aligned. `need` are results that the pass returns, by default `Pass.default`; those with an array
    are returned too. `address_of` gives the address of the first element of an array; without it, all are taken as
    aligned to 16 bytes.

    Raises what `make_problem` does; also if the shape or dtype of an array does not follow from the problem, if
    elements of a result share memory, or if the elements of an array are not aligned to their size.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    problem, results = _problem_of(pass_, options, given, need)
    for name, array in given.items():
        if name not in (*INPUTS, *NAMES, *options.score_args):
            shape, dtype = expected(name, problem, given)
            check_array(name, array, shape, dtype, is_read=name not in results)
        if name in results:
            check_distinct(name, array)

    allocated = {name: _contiguous(name, problem, given) for name in results if name not in given}
    read = {name: _contiguous(name, problem, given) for name in (*pass_.read, "lse") if name not in given | allocated}
    memory = _memory_of(problem, given, read | allocated, address_of)
    operands = _operands(problem, memory)
    problem = _with_inputs(problem, operands, memory)
    load_bytes, store_bytes = widest_accesses(problem, pass_, operands, results)
    return Binding(
        pass_=pass_,
        problem=problem,
        operands={name: operand for name, operand in operands.items() if name not in INPUTS},
        results=results,
        allocated=tuple((name, array.shape, array.dtype) for name, array in allocated.items()),
        copied=memory.copied,
        load_bytes=load_bytes,
        store_bytes=store_bytes,
    )


class _Memory(NamedTuple):
    """Where and how the arrays of a pass lie, with a contiguous one for each that is not given, or copied."""

    arrays: dict[str, Any]
    addresses: dict[str, int]  # 0 for these, and for all if no addresses are known
    copied: tuple[str, ...]
    has_addresses: bool


def _problem_of(
    pass_: Pass, options: Options, given: Mapping[str, Shaped], need: Collection[str] | None
) -> tuple[Problem, tuple[str, ...]]:
    """The problem of a pass, and the names of the results that the pass returns."""
    q, k, v = (given[name] for name in INPUTS)
    score_args = {name: given[name] for name in options.score_args}
    problem = make_problem(options, q, k, v, score_args=score_args, **{name: given.get(name) for name in NAMES})
    pass_.check(problem)
    if pass_.has_tangents:
        problem = replace(problem, moved=_moved(problem, given))
    need = pass_.default if need is None else need
    results = tuple(name for name in pass_.results_in(problem) if name in need or name in given)
    problem = replace(problem, row_reductions=pass_.row_reductions_of((*results, *given)))
    _check_row_reductions(pass_, problem, given)
    _check_score_arg_gradients(problem, (*need, *given))
    return problem, results


def _memory_of(
    problem: Problem,
    given: Mapping[str, Shaped],
    stand_ins: Mapping[str, Contiguous],
    address_of: Callable[[Any], int] | None,
) -> _Memory:
    """How the arrays that are given and those that stand in for others lie. Arrays with scattered rows are copied."""
    addresses = {} if address_of is None else {name: address_of(array) for name, array in given.items()}
    for name, address in addresses.items():
        _check_aligned(name, given[name], address)
    scattered = (name for name in _over_head_dim(problem) if name in given and _is_scattered(given[name]))
    copies = {name: Contiguous(tuple(given[name].shape), given[name].dtype) for name in scattered}
    arrays = {**stand_ins, **given, **copies}
    return _Memory(
        arrays=arrays,
        addresses=dict.fromkeys(arrays, 0) | addresses | dict.fromkeys(copies, 0),
        copied=tuple(copies),
        has_addresses=address_of is not None,
    )


def _over_head_dim(problem: Problem) -> Collection[str]:
    """The arrays of a pass over head dimensions."""
    return OVER_HEAD_DIM if problem.moved is None else MOVABLE_OVER_HEAD_DIM


def _with_inputs(problem: Problem, operands: Mapping[str, Operand], memory: _Memory) -> Problem:
    """The problem with q, k and v as they lie, and with the alignment of the bias."""
    q, k, v = (operands[name] for name in INPUTS)
    if memory.has_addresses and not {"k", "v"} & set(memory.copied):
        arrays, addresses = memory.arrays, memory.addresses
        v = replace(v, in_k=is_in_k(arrays["k"], arrays["v"], addresses["k"], addresses["v"]))
    bias = problem.bias
    if bias is not None:
        bias = replace(bias, alignment=math.gcd(16, memory.addresses["bias"]))
    return replace(problem, q=q, k=k, v=v, bias=bias)


def _check_row_reductions(pass_: Pass, problem: Problem, given: Collection[str]) -> None:
    """Refuse gradients with respect to reductions that are not given, and reductions without a gradient."""
    for name in problem.row_reductions:
        if pass_ is BACKWARD and UPSTREAM[f"d{name}"].upstream == "optional" and name not in given:
            raise value_error(name, "None", f"the {name} that forward returned, which the gradient d{name} needs")
    if unread := [name for name in ROW_REDUCTIONS if name in given and name not in problem.row_reductions]:
        raise value_error(unread[0], "an array", f"None, or d{unread[0]}, the gradient with respect to it")


def _operands(problem: Problem, memory: _Memory) -> dict[str, Operand]:
    """How the arrays of a pass lie, but for optional inputs; those that TMA may read or write with their alignment."""
    numbers = (*NUMBER_GRADIENTS, *(f"t{name}" for name in (*NUMBERS, *NUMBER_GRADIENTS)))
    no_operands = (*NAMES, *numbers, *dict(problem.score_args))
    operands = {name: _operand(name, x, problem) for name, x in memory.arrays.items() if name not in no_operands}
    for name in operands.keys() & {*_over_head_dim(problem), "dbias"}:
        operands[name] = replace(operands[name], alignment=math.gcd(16, memory.addresses[name]))
    return operands


def _moved(problem: Problem, given: Mapping[str, Shaped]) -> tuple[str, ...]:
    """What has tangents in a call, in order. Raises ValueError for tangents of what the call does not have."""
    names = tuple(name for name in MOVABLE if f"t{name}" in given)
    for name in names:
        if name not in INPUTS and getattr(problem, name) is None:
            remedy = f"FlashAttention({name}=...)" if name in NUMBERS else f"{name} together with it"
            raise value_error(f"t{name}", "an array", f"None, or {remedy}")
    return (*names, *(tangent[1:] for tangent in problem.score_arg_tangents if tangent in given))


def assumed(problem: Problem, pass_: Pass, given: Mapping[str, Operand]) -> dict[str, Operand]:
    """The operands of a pass: those that are `given`, and assumed ones, for which only the problem is known.

    Assumed operands are contiguous, except gradients of optional inputs and tangents: these have the layout of inputs.
    """
    operands = dict(given)
    for name in (*pass_.read, *pass_.written):
        if name not in INPUTS and name not in operands:
            dtype = problem.dtype_of(name)
            array = Contiguous(problem.shape_of(_row_of(name)), _Named(dtype, ITEMSIZE[dtype]))
            operands[name] = layout_of(array, problem.layout)
    operands = {f"t{name}": getattr(problem, name) for name in INPUTS if name in (problem.moved or ())} | operands
    for gradient, row in _INPUT_OF_GRADIENT.items():
        name = f"t{gradient}" if pass_.has_tangents else gradient
        if name not in operands:
            operand = getattr(problem, row.name)
            if operand is not None:
                operands[name] = operand
    return operands


def widest_accesses(
    problem: Problem, pass_: Pass, operands: Mapping[str, Operand], need: Collection[str]
) -> tuple[int, int]:
    """The widest accesses that are aligned for all arrays that a pass reads, and for all that it writes."""
    written = [name for name in pass_.written if name in need]
    both = (_found(names, problem, operands) for names in (read_rows(pass_, operands), written))
    load, store = (access_bytes(found, *(operand.alignment for operand in found)) for found in both)
    return load, store


def read_rows(pass_: Pass, operands: Collection[str]) -> tuple[str, ...]:
    """The arrays over a head dimension that a pass reads, with those of its tangents that there are."""
    tangents = (name for name in pass_.takes if name in operands and name in MOVABLE_OVER_HEAD_DIM)
    return tuple(dict.fromkeys((*pass_.read, *tangents)))


def is_in_k(k: Shaped, v: Shaped, of_k: int, of_v: int) -> bool:
    """Whether v is a view of the first columns of k; `of_k` and `of_v` are their addresses."""
    return of_k == of_v and k.strides == v.strides and 0 < v.shape[-1] <= k.shape[-1]


def of_pass(pass_: Pass, arrays: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Those of the arrays of all passes that are arguments of one pass."""
    names = (*pass_.takes, *pass_.results_of(options))
    if pass_.has_tangents:
        names += tuple(f"t{name[1:]}" for name in options.score_gradients)
    return {name: array for name, array in arrays.items() if name in (*INPUTS, *NAMES, *options.score_args, *names)}


@functools.lru_cache(maxsize=256)
def planned_length(seqlen_k: int) -> int:
    """The number of keys for which a forward pass of `seqlen_k` keys is planned: up to an eighth (or 127) more.

    So a cache that grows by one key per call is planned anew once in 128 calls, or less often if it is long.
    """
    step = max(128, 1 << max(seqlen_k.bit_length() - 4, 0))
    return -(-seqlen_k // step) * step


# The arrays of a forward pass whose axis of keys may be longer in the next call, that axis, the number of keys, and
# those properties of the number that a plan depends on.
Growing = tuple[tuple[str, ...], int, int, tuple[Any, ...]]
FIXED: Growing = ((), 0, 0, ())
_K_AND_V, _TABLE = ("k", "v"), ("block_table",)


def growing_keys(options: Options, arrays: Mapping[str, Any]) -> Growing:
    """What may grow in a forward pass. This takes a tenth of the time of a call, so it leaves all checks to `bind`.

    The answer is `FIXED` if an array besides k, v and the block table has an axis of keys, if shapes do not fit, or if
    the axis of keys has length 1, because the stride of such an axis says nothing about longer ones.
    """
    if options.score or options.mask_function:
        return FIXED
    for name in WITH_KEYS:
        if arrays.get(name) is not None:
            return FIXED
    for name in FP8_SCALES:
        scale = arrays.get(name)
        if scale is not None and scale.shape[-1:] not in ((), (1,)):
            return FIXED
    q, k, v, table = arrays["q"].shape, arrays["k"].shape, arrays["v"].shape, arrays.get("block_table")
    axis = len(k) - (3 if len(k) > 2 and options.layout == "bshd" else 2)
    if not 2 <= len(q) == len(k) == len(v) or k[axis] != v[axis]:
        return FIXED
    names: tuple[str, ...] = _K_AND_V
    seqlen_q, seqlen_k = q[axis], k[axis]
    if table is not None:
        table = table.shape
        if len(table) != 2 or table[1] < 2:
            return FIXED
        names, axis, seqlen_k = _TABLE, 1, table[1] * seqlen_k
    elif seqlen_k < 2:
        return FIXED
    return names, axis, seqlen_k, _planned_for(options, seqlen_q, seqlen_k)


def _planned_for(options: Options, seqlen_q: int, seqlen_k: int) -> tuple[Any, ...]:
    """The properties of a number of keys that the plan of a forward pass depends on."""
    if options.window is None and options.causal != "top_left" and options.diagonal is None:
        return (planned_length(seqlen_k),)
    # The number of keys may decide whether a bound hides anything.
    return (planned_length(seqlen_k), *window_of(options, seqlen_q, seqlen_k))


def same_plan(options: Options, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """The smallest and the largest number of keys, from 2 on, that one plan serves together with `seqlen_k`.

    All numbers between them have that plan: planned lengths, and what bounds hide, only ever grow or shrink.
    """
    planned_for = _planned_for(options, seqlen_q, seqlen_k)
    fewer, more = range(2, seqlen_k), range(seqlen_k, planned_for[0] + 1)
    first = 2 + bisect.bisect_left(fewer, True, key=lambda n: _planned_for(options, seqlen_q, n) == planned_for)
    num_more = bisect.bisect_left(more, True, key=lambda n: _planned_for(options, seqlen_q, n) != planned_for)
    return first, seqlen_k + num_more - 1


def access_bytes(operands: tuple[Operand, ...], *addresses: int) -> int:
    """Widest access of 16, 8, 4 or 2 bytes that is aligned at every row of every operand, at these addresses.

    If k and v are fp8, an access of equally many of them is aligned; 16 bytes mean 16 for these, too.
    """
    of_float8 = [operand.dtype in FLOAT8 for operand in operands]
    if any(of_float8):
        size = max(2, *(ITEMSIZE[operand.dtype] for operand in operands))  # out has 2 bytes at least
        widths: list[int] = []
        for is_narrow in (True, False):
            some = tuple(x for x, is_of_it in zip(operands, of_float8, strict=True) if is_of_it == is_narrow)
            at = [x for x, is_of_it in zip(addresses, of_float8, strict=False) if is_of_it == is_narrow]
            widths.append(_aligned_bytes(some, at))
        narrow, wide = widths
        return min(wide, narrow if narrow == 16 else min(8, narrow * size))
    return _aligned_bytes(operands, addresses)


def _aligned_bytes(operands: tuple[Operand, ...], addresses: Iterable[int]) -> int:
    alignment = math.gcd(16, *addresses)
    for operand in operands:
        if 0 in operand.shape:
            continue
        for size, stride in zip(operand.shape[:3], operand.strides[:3], strict=True):
            if size > 1:
                alignment = math.gcd(alignment, abs(stride) * ITEMSIZE[operand.dtype])
    return alignment


def _found(names: Iterable[str], problem: Problem, operands: Mapping[str, Operand]) -> tuple[Operand, ...]:
    """The operands of these names, from the pass or from the problem."""
    return tuple(operands.get(name) or getattr(problem, name) for name in names)


def _row_of(name: str) -> Output:
    """The row of a result, or of the result whose gradient the backward pass takes."""
    return UPSTREAM.get(name) or OUTPUT_ROWS[name]


def expected(name: str, problem: Problem, given: Mapping[str, Shaped]) -> tuple[tuple[int, ...], str]:
    """The shape and dtype that a result, or what the backward pass takes, must have in this problem."""
    if name in problem.score_arg_tangents:
        return tuple(given[name[1:]].shape), given[name[1:]].dtype.name
    if name.startswith("t"):  # a tangent is like what moves
        if (moved := name[1:]) in NUMBERS:
            return (), problem.softmax_dtype
        if moved in MOVABLE:
            return tuple(given[moved].shape), given[moved].dtype.name
        return expected(moved, problem, given)
    if name in _INPUT_OF_GRADIENT or name in problem.score_arg_gradients:
        model = given[name[1:]]
        return tuple(model.shape), model.dtype.name
    row = _row_of(name)
    if row in TOP_KEYS_ROWS:  # of which only the array says how many there are of each row
        dtype = "int32" if row.dtype == "index" else problem.softmax_dtype
        return (*problem.lse_shape, given[name].shape[-1] if name in given else 1), dtype
    dtype = problem.dtype_of(name) if row.dtype == "input" else problem.softmax_dtype
    return problem.shape_of(row), dtype


def _check_score_arg_gradients(problem: Problem, names: Iterable[str]) -> None:
    """Refuse gradients of arrays that the score reads if they do not hold real numbers."""
    arrays = {} if problem.score is None else {f"d{name}": name for name in problem.score.arrays}
    for name in names:
        if name in arrays and name not in problem.score_arg_gradients:
            dtype = dict(problem.score_args)[arrays[name]].dtype
            raise value_error("need", f"{name} of an array of {dtype}", "gradients of real numbers")


def _contiguous(name: str, problem: Problem, given: Mapping[str, Shaped]) -> Contiguous:
    """A stand-in for an array that is not given. NumPy does not know the name bfloat16, so q gives this dtype."""
    shape, dtype = expected(name, problem, given)
    q = given["q"]
    return Contiguous(shape, q.dtype if dtype == q.dtype.name else numpy_dtype(dtype))


def _steps(array: Shaped) -> list[int]:
    """Bytes between neighbours, for each axis with more than one element."""
    return [abs(stride) for n, stride in zip(array.shape, array.strides, strict=True) if n > 1]


def _is_scattered(array: Shaped) -> bool:
    """Whether neighbours along the last axis are not neighbours in memory."""
    return math.prod(array.shape) > 0 and array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize


def _check_aligned(name: str, array: Shaped, address: int) -> None:
    """Refuse an array whose elements are not at multiples of their size, because no GPU can read it."""
    size = array.dtype.itemsize
    if math.prod(array.shape) and math.gcd(address, *_steps(array)) % size:
        got = f"address {address:#x} and strides {tuple(array.strides)} in bytes"
        raise value_error(name, got, f"multiples of the {size} bytes of a {array.dtype.name}")


def _operand(name: str, array: Shaped, problem: Problem) -> Operand:
    """An array of the pass as kernels read it."""
    moved = name[1:] if name.startswith("t") else name
    if name in problem.score_arg_tangents or moved in problem.score_arg_gradients:
        return as_it_is(array)
    if moved in _INPUT_OF_GRADIENT:
        return gradient_operand(_INPUT_OF_GRADIENT[moved], problem, array)
    if moved in NAMES:
        return gradient_operand(_INPUT_OF_GRADIENT[f"d{moved}"], problem, array)
    if name in _REDUCED:  # which lie as lse does, in every layout
        return rows_of(array) if _REDUCED[name] == 3 else _with_all_strides(array)
    return rows_of(array) if name in MOVABLE_OVER_ROWS else layout_of(array, problem.layout)


def _with_all_strides(array: Shaped) -> Operand:
    """An array of four axes as it lies, with the strides of axes of length 1, too: one says how long rows are."""
    missing = 4 - len(array.shape)
    strides = tuple(stride // array.dtype.itemsize for stride in array.strides)
    return Operand(shape=(1,) * missing + tuple(array.shape), strides=(0,) * missing + strides, dtype=array.dtype.name)
