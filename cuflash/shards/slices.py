"""Calls on some queries and some keys of a longer problem, by the functions that compute whole calls.

The visible pairs, the dropped weights, the distance of a key from a query, and the results of a caller's functions
follow from the positions of the rows in the whole problem. All arrays here are views as (batch, heads, rows, ...).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cuflash.arrays.array_info import FLOAT8, numpy_dtype
from cuflash.arrays.cached import cached_property
from cuflash.arrays.dlpack import module_of
from cuflash.arrays.fp8 import Float8Array
from cuflash.arrays.memory_ranges import Band, Span
from cuflash.cpu import backend as cpu_backend
from cuflash.cpu import reductions as on_cpu
from cuflash.gpu.elementwise import WIDE, assign, lengths_in, wide_layout
from cuflash.score_mod import COUNTED, ORIGIN
from cuflash.spec import row_sums
from cuflash.spec.backends import PartBackend, ReductionBackend
from cuflash.spec.inputs import FP8_SCALES, INPUTS, MOVABLE_BROADCAST, NAMES, NUMBERS, PER_HEAD_INPUTS
from cuflash.spec.options import ORIGIN_STEP, Options, Origin
from cuflash.spec.outputs import MOVABLE_OF_KEYS, MOVABLE_OVER_HEAD_DIM, MOVABLE_OVER_ROWS, OF_QUERIES, gradient_of
from cuflash.spec.passes import BACKWARD, FORWARD, Pass
from cuflash.spec.problem import Problem

Array = Any
# Arrays with an axis of the batch, and of rows.
_OF_BATCH = (*MOVABLE_OVER_HEAD_DIM, *MOVABLE_OVER_ROWS, "row_sums")


def steps_of(options: Options, has_block_mask: bool) -> tuple[int, int]:
    """Calls on slices begin at multiples of these numbers of queries and of keys."""
    if options.causal == "lengths":  # slices have one diagonal for all entries
        raise NotImplementedError(
            "causal: got 'lengths', which goes neither with ranks nor with streamed keys; expected True, 'top_left' or "
            "a mask function such as lambda i, j, *, batch, n: j <= i + n[batch] - seqlen_q, with n = kv_lengths"
        )
    blocks = options.block_size if isinstance(options.block_size, tuple) else (options.block_size,) * 2
    random = ORIGIN_STEP if options.dropout else 1
    rows, keys = (math.lcm(random, block) if has_block_mask else random for block in blocks)
    return rows, keys


@dataclass(frozen=True, kw_only=True)
class Slices:
    """A problem that is computed slice by slice."""

    options: Options  # of the whole problem
    band: Band  # which keys a query of the whole problem attends to
    problem: Problem  # it has the dtypes and heads of the whole problem
    random: tuple[int, int]  # seed and offset of dropout
    arrays: Mapping[str, Array]  # by name; None for absent ones
    is_fixed: bool = False  # calls get arrays of one memory layout, or of one that gives the same bits
    starts: tuple[Array, Array] | None = None  # cu_seqlens_q and cu_seqlens_k of whole packed sequences
    zeros: tuple[int, int] = (0, 0)  # the query and the key counted as 0: the start of a packed sequence
    first_head: int = 0  # the first head of calls, among all heads
    first_entry: int = 0  # the first batch entry, or packed sequence, of calls
    # See `wide_score_args`: arrays that were widened once; copies made by `dataclasses.replace` share them.
    _widened: dict[str, Array] = field(default_factory=dict, repr=False)

    @cached_property
    def xp(self) -> Any:
        return module_of(self.arrays["q"])

    @property
    def is_on_cpu(self) -> bool:
        """Whether calls run on the CPU, where results are as precise as the arrays of a call."""
        return self.xp is np

    @property
    def large_lse(self) -> float:
        """From which |lse| on rows need row sums."""
        return row_sums.bound_of(self.arrays["q"].dtype, on_device=not self.is_on_cpu)

    @cached_property
    def backend(self) -> PartBackend:
        """The module that runs passes."""
        if self.is_on_cpu:
            return cpu_backend
        from cuflash.gpu import backend

        return backend

    @cached_property
    def reductions(self) -> ReductionBackend:
        """The module that reduces attention weights."""
        if self.is_on_cpu:
            return on_cpu
        from cuflash.gpu import reductions

        return reductions

    def options_of(self, queries: Span, keys: Span, wide: tuple[str, ...] = ()) -> Options:
        """The options of a call on a slice, with the diagonal and the indices of dropout of the whole problem."""
        diagonal = None if self.starts is not None else queries[0] + self.band.diagonal - keys[0]
        bounds = (self.band.left, self.band.right)
        return _options_of(self.options, bounds, diagonal, self._origin(queries, keys), wide or self.options.wide)

    def _origin(self, queries: Span, keys: Span) -> Origin:
        """The indices at which a call begins, as dropout counts them."""
        if not self.options.dropout:
            return Origin()
        query, key, head, entry = self._first_indices(queries, keys)
        return Origin(query, key, entry * self.problem.num_heads + head, self.problem.num_heads)

    def _first_indices(self, queries: Span, keys: Span) -> tuple[int, int, int, int]:
        """Indices of the first query, key, head and batch entry of a call; rows count from their packed sequence."""
        first = (0, 0) if self.starts is not None else (queries[0] - self.zeros[0], keys[0] - self.zeros[1])
        return (*first, self.first_head, self.first_entry)

    def forward(
        self,
        queries: Span,
        keys: Span,
        arrays: dict[str, Array],
        pass_: Pass = FORWARD,
        reductions: Collection[str] = (),
    ) -> dict[str, Array]:
        """out and lse of a slice, and `reductions` of its rows.

        out has the dtype of the softmax if `arrays` has an out of this dtype. The pass `jvp` gives their tangents, too;
        tout has the dtype of out. On a device, `arrays` may have memory for the pairs of lse and what its rounding
        leaves, in place of lse.
        """
        arrays = arrays | {name: self._as_float8(name, arrays[name]) for name in INPUTS}
        wide, pairs = self._wide(("out",), arrays), arrays.pop("lse_pairs", None)
        if pairs is not None:
            arrays["lse"], wide = pairs[..., 0], (*wide, "lse")
        options = self.options_of(queries, keys, wide)
        names = (*pass_.default, *pass_.row_reductions_of(reductions))
        of_call = dict.fromkeys((*NAMES, *names)) | self.of_all(options, queries, keys, arrays["q"], pass_)
        found = self.backend.compute(pass_, options, self._packed(of_call | arrays), names, self.random)
        return self._unpacked(dict(zip(names, found, strict=True)))

    def backward(
        self, queries: Span, keys: Span, need: tuple[str, ...], arrays: dict[str, Array], pass_: Pass = BACKWARD
    ) -> dict[str, Array]:
        """The gradients `need` of a slice; dq, dk and dv have the dtype of the softmax if `arrays` has them so.

        The pass `backward_jvp` gives their tangents.
        """
        options = self.options_of(queries, keys, self._wide(pass_.default, arrays))
        absent: dict[str, Any] = dict.fromkeys((*NAMES, "dlse"))
        del absent["block_table"]
        ordered = tuple(name for name in pass_.results_of(self.options) if name in need)
        of_call = absent | self.of_all(options, queries, keys, arrays["q"], pass_) | arrays
        results = {name: arrays.get(name) for name in ordered}
        found = self.backend.compute(pass_, options, self._packed(of_call | results), ordered, self.random)
        return self._unpacked(dict(zip(ordered, found, strict=True)))

    def row_sums(self, queries: Span, keys: Span, arrays: dict[str, Array]) -> dict[str, Array]:
        """Row max and row sum, over the keys of a slice, of rows whose given lse is large (`cuflash.spec.row_sums`)."""
        arrays = arrays | {name: self._as_float8(name, arrays[name]) for name in INPUTS}
        options = self.options_of(queries, keys)
        of_call = dict.fromkeys(NAMES) | self.score_args(options, queries, keys, arrays["q"]) | arrays
        del of_call["block_table"]
        return self._unpacked({"row_sums": self.backend.row_sums(options, self._packed(of_call))})

    def reduce(
        self, queries: Span, keys: Span, arrays: dict[str, Array], pass_: Pass, count: tuple[int, ...] = ()
    ) -> dict[str, Array]:
        """The results of a reduction of the weights of a slice; `count` is how many keys `TOP_KEYS` finds of a row.

        The weights are those among all keys, whose lse is given. `arrays` may have arrays for results.
        """
        arrays = arrays | {name: self._as_float8(name, arrays[name]) for name in INPUTS}
        options = self.options_of(queries, keys)
        into = {name: arrays.pop(name) for name in pass_.default if name in arrays}
        of_call = self.score_args(options, queries, keys, arrays["q"]) | arrays
        given = {name: x for name, x in self._packed(of_call).items() if x is not None}
        results = self.reductions.compute(pass_, options, given, *count)
        found = dict(zip(pass_.default, results, strict=True))
        found = found if self.starts is None else {name: x[None] for name, x in found.items()}
        for name, x in into.items():
            assign(x, found[name])
        return found

    def of_all(self, options: Options, queries: Span, keys: Span, q: Array, pass_: Pass) -> dict[str, Array]:
        """What every call of a pass gets whole: what functions read, and the tangents of this and of numbers."""
        found = self.score_args(options, queries, keys, q)
        if not pass_.has_tangents:
            return found
        names = [f"t{name}" for name in (*NUMBERS, *self.options.score_args)]
        tangents = {name: self.arrays[name] for name in names if self.arrays.get(name) is not None}
        return found | {name: self.widened(x) if self._is_widened(q) else x for name, x in tangents.items()}

    def _is_widened(self, q: Array) -> bool:
        """Whether the arrays of a call were converted to the dtype of the softmax."""
        return q.dtype.name not in (self.problem.dtype, *FLOAT8)

    def score_args(self, options: Options, queries: Span, keys: Span, q: Array) -> dict[str, Array]:
        """What the functions of a call read: whole arrays, as wide as q is, and where the call begins."""
        arrays = self.wide_score_args if self._is_widened(q) else self.arrays
        found = {name: arrays[name] for name in options.score_args if name != ORIGIN}
        if ORIGIN in options.score_args:
            found[ORIGIN] = self.xp.empty(len(COUNTED), np.int32)
            # One number at a time: a captured graph keeps each as an argument, and nothing is copied from the host.
            for axis, first in enumerate(self._first_indices(queries, keys)):
                found[ORIGIN][axis] = first
        return found

    @property
    def wide_score_args(self) -> dict[str, Array]:
        """The arrays that functions read; those of the dtype of the inputs are converted to that of the softmax.

        Then their gradients have this dtype, too, and can be added up.
        """
        for name in self.options.score_args:
            if name not in self._widened:
                self._widened[name] = self.widened(self.arrays[name])
        return self._widened

    def summed_score_args(self, need: Collection[str]) -> dict[str, Array]:
        """Those whose gradients, or tangents of gradients, are among the results `need`, and their own tangents."""
        gradients = set(map(gradient_of, need))
        found = {name: x for name, x in self.wide_score_args.items() if f"d{name}" in gradients}
        tangents = {f"t{name}" for name in found}
        return found | {name: self.widened(x) for name, x in self.arrays.items() if name in tangents and x is not None}

    def _packed(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The arrays of a call as the backend takes them: with packed sequences, without the axis of the batch."""
        if self.is_on_cpu:
            arrays = {name: x for name, x in arrays.items() if x is not None}
        if self.starts is None:
            return arrays
        of_batch = {name: x[0] for name, x in arrays.items() if name in _OF_BATCH and x is not None}
        return arrays | of_batch | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.starts, strict=True))

    def _unpacked(self, results: dict[str, Array]) -> dict[str, Array]:
        """The results of a call as a slice has them: with packed sequences, with an axis of the batch again."""
        if self.starts is None:
            return results
        return {name: x[None] if name in _OF_BATCH else x for name, x in results.items()}

    def _wide(self, names: Collection[str], arrays: Mapping[str, Array]) -> tuple[str, ...]:
        """The option `wide` of a call: the given results whose dtype is not that of q, or of what q of float8 gives."""
        dtype = self.problem.dtype if arrays["q"].dtype.name in FLOAT8 else arrays["q"].dtype.name
        given = (name for name in names if arrays.get(name) is not None and arrays[name].dtype.name != dtype)
        return tuple(map(gradient_of, given))

    def _as_float8(self, name: str, array: Array) -> Array:
        """An array as a call takes it: CuPy's arrays of float8 are bytes here, but not there."""
        dtype = getattr(self.problem, name).dtype
        return Float8Array(array, numpy_dtype(dtype)) if dtype in FLOAT8 and array.dtype == np.uint8 else array

    def with_queries_before(
        self, arrays: dict[str, Array], front: int, shared: Collection[str] = ()
    ) -> dict[str, Array]:
        """The arrays of a call that begins `front` queries earlier, with rows that have no weight.

        Bias or mask named in `shared` are the same for all queries and stay as they are.
        """
        if not front:
            return arrays
        names = {*OF_QUERIES, *MOVABLE_BROADCAST} - {*shared, *(f"t{name}" for name in shared)}
        longer = {name: self._with_zeros_before(x, front, 2) for name, x in arrays.items() if name in names}
        if "lse" in longer:
            # Weights are exp(score - inf) = 0. A function may make a score NaN there: -inf says that a row attends to
            # no key.
            longer["lse"][:, :, :front] = -np.inf if self.problem.has_functions else np.inf
        if "row_sums" in longer:
            longer["row_sums"][:, :, :front, 1] = -1  # none
        return arrays | longer

    def with_keys_before(self, arrays: dict[str, Array], front: int) -> dict[str, Array]:
        """The arrays of a call that begins `front` keys earlier, with keys that a mask hides."""
        if not front:
            return arrays
        of_pairs = {name: x for name, x in arrays.items() if name in MOVABLE_BROADCAST and x.shape[3] != 1}
        visible = self.xp.ones((1, 1, 1, arrays["k"].shape[2]), bool)
        of_pairs["mask"] = of_pairs.get("mask", visible if "mask" not in arrays else visible & arrays["mask"])
        longer = {name: self._with_zeros_before(x, front, 3) for name, x in of_pairs.items()}
        of_keys = [name for name in MOVABLE_OF_KEYS if name in arrays]
        return arrays | longer | {name: self._with_zeros_before(arrays[name], front, 2) for name in of_keys}

    def _with_zeros_before(self, array: Array, front: int, axis: int) -> Array:
        """An array with `front` zeros put before it, along an axis."""
        shape = list(array.shape)
        shape[axis] = front
        return self.xp.concatenate([self.xp.zeros(shape, array.dtype), array], axis=axis)

    def into(
        self,
        results: dict[str, Array],
        arrays: dict[str, Array],
        call: Callable[[dict[str, Array]], dict[str, Array]],
        *,
        front: int = 0,
        is_wide: bool = False,
    ) -> dict[str, Array]:
        """Let a call fill `results`: directly, or through a copy if it computes on copies or on rows in front, too.

        Copies have one memory layout or, if the call `is_wide`, the dtype of the softmax. An array that gives the same
        bits as a copy is not copied. Calls on float8 round out, whatever dtype it has here.
        """
        is_wide = is_wide and self.problem.dtype != self.problem.softmax_dtype
        fitting = {name: x for name, x in results.items() if name != "out" or not self._is_rounded(x)}
        if self.is_fixed or is_wide or front:
            if is_wide:
                arrays = {name: self.widened(x) for name, x in arrays.items()}
            arrays = {name: x if self._is_like_copy(name, x) else self._copy_of(x) for name, x in arrays.items()}
            is_direct = not front and not is_wide and not self.is_on_cpu
            fitting = {name: x for name, x in fitting.items() if is_direct and self._is_like_copy(name, x)}
        got = call(arrays | fitting)
        for name, into in results.items():
            if name not in fitting:
                assign(into, got[name][:, :, front:])
        return got

    def _is_rounded(self, out: Array) -> bool:
        return self.problem.has_float8 and out.dtype.name != self.problem.dtype

    def _copy_of(self, array: Array) -> Array:
        copy = self.xp.empty(array.shape, array.dtype)
        assign(copy, array)
        return copy

    def _is_like_copy(self, name: str, array: Array) -> bool:
        """Whether a call gives the same bits with an array as with a contiguous copy of it.

        Plans of a device depend on how wide accesses may be, and on the axes along which an array is the same; kernels
        find rows by strides.
        """
        if self.is_on_cpu or name not in _OF_BATCH:
            return bool(array.flags.c_contiguous)
        address = self._address_of(array) % WIDE
        if array.flags.c_contiguous:
            return address == 0
        if any(step == 0 and n > 1 for step, n in zip(array.strides, array.shape, strict=True)):
            return False
        return wide_layout(array.shape, array.strides, array.itemsize, address) is not None

    def _address_of(self, array: Array) -> int:
        return int(array.data.ptr)

    @property
    def softmax_dtype(self) -> np.dtype[Any]:
        """The dtype of the softmax, in which partial results are added up."""
        return numpy_dtype(self.problem.softmax_dtype)

    def widened(self, array: Array) -> Array:
        """An array of the dtype of the inputs, converted to that of the softmax; any other array as it is."""
        return array.astype(self.softmax_dtype) if array.dtype.name == self.problem.dtype else array

    def of_heads(self, q_heads: slice, *, of_softmax: bool) -> dict[str, Array]:
        """The optional inputs with a value for each query head; those of the softmax only if `of_softmax`."""
        rows = [row.name for row in PER_HEAD_INPUTS if of_softmax or row.gradient_via != "softmax"]
        names = (*rows, *(f"t{name}" for name in rows))
        return {name: self.arrays[name][..., q_heads] for name in names if self.arrays.get(name) is not None}

    def scales(self, q_heads: slice, heads: slice) -> dict[str, Array]:
        """The factors of q, k and v of float8, which are those of all rows, for some query and key/value heads."""
        found = {name: self.arrays[name] for name in FP8_SCALES if self.arrays.get(name) is not None}
        own = {name: q_heads if name == "q_scale" else heads for name in found}
        return {name: x if x.ndim < 2 or x.shape[-2] == 1 else x[..., own[name], :] for name, x in found.items()}

    def of_blocks(self, queries: Span, keys: Span) -> dict[str, Array]:
        """The block mask of some queries and keys, which have to begin where blocks begin."""
        if self.arrays.get("block_mask") is None:
            return {}
        rows, columns = (
            slice(start // side, -(-stop // side))
            for (start, stop), side in zip((queries, keys), self.problem.block_size, strict=True)
        )
        return {"block_mask": self.arrays["block_mask"][..., rows, columns]}

    def lengths(self, keys: Span) -> dict[str, Array]:
        """How many keys of a span each batch entry has."""
        lengths = self.arrays.get("kv_lengths")
        return {} if lengths is None else {"kv_lengths": lengths_in(keys, lengths)}


@functools.lru_cache(maxsize=1024)
def _options_of(
    whole: Options,
    bounds: tuple[int | None, int | None],
    diagonal: int | None,
    origin: Origin,
    wide: tuple[str, ...],
) -> Options:
    """The options of a slice, which are cached, because to make and check them takes as long as a launch."""
    score = None if whole.score is None else whole.score.of_slice()
    mask = None if whole.mask_function is None else whole.mask_function.of_slice()
    options = replace(whole, layout="bhsd", score=score, mask_function=mask, origin=origin, wide=wide)
    if diagonal is None:  # packed sequences have a diagonal each
        return options
    return replace(options, causal=False, window=None if bounds == (None, None) else bounds, diagonal=diagonal)
