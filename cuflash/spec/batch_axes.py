"""Batch axes: how any number of axes before the heads becomes the one batch axis of a pass.

The batch axes of q, k and v broadcast as those of `numpy.matmul` do, and those of all other arrays broadcast to the
result. Axes that every array steps through by one stride become one batch axis, a view. If some array cannot do so,
because it broadcasts along one of two axes or because its strides do not fit together, the longest run of axes that do
merge is the batch of a call, and there is a call for each index of the other axes. Each call works on views. If a
result is a sum over several calls, their partial sums are added in the order of the calls, in the dtype of the softmax.

Dropout and score_mod and mask_mod count batch entries, so one call has to have all entries, and arrays whose axes do
not merge are copied for it. Small optional inputs are copied, too, instead of making more calls.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuflash.arrays.array_info import (
    FLOAT8,
    broadcasts,
    check_array,
    check_shape,
    how_to_give_keys,
    numpy_dtype,
    softmax_dtype_of,
)
from cuflash.arrays.checks import counted, value_error
from cuflash.arrays.dlpack import check_distinct, check_no_overlap, module_of
from cuflash.arrays.fp8 import on_bits
from cuflash.spec.inputs import INPUTS, MOVABLE_BROADCAST, NUMBERS, OPTIONAL_INPUTS
from cuflash.spec.options import Options
from cuflash.spec.outputs import BY_NAME as OUTPUT_ROWS
from cuflash.spec.outputs import (
    DEFAULT_NEED,
    DEFAULT_NEED_TANGENTS,
    FORWARD_ROWS,
    MOVABLE,
    MOVABLE_OVER_HEAD_DIM,
    MOVABLE_OVER_ROWS,
    model_of,
)

Array = Any  # of NumPy or CuPy

# Optional inputs with at most a sixteenth of the elements of q, such as masks of keys, are copied to save calls.
SMALL = 16
# Numbers of axes that are not batch axes; arrays over head dimensions may lack the first of these.
_INPUT_AXES = {row.name: row.own_axes for row in OPTIONAL_INPUTS if row.own_axes is not None}
_BROADCAST = tuple(name for name, num_axes in _INPUT_AXES.items() if num_axes > 1)
_SHARED = tuple(row.name for row in OPTIONAL_INPUTS if row.lacks_batch)
# Optional inputs that have only a few numbers for each batch entry.
_SMALL = tuple(name for name, num_axes in _INPUT_AXES.items() if num_axes < 2 and name not in _SHARED)
_OWN_AXES = {
    **dict.fromkeys(MOVABLE_OVER_HEAD_DIM, 3),
    **dict.fromkeys(MOVABLE_OVER_ROWS, 2),
    **_INPUT_AXES,
    **{
        name: _INPUT_AXES[row.name]
        for row in OPTIONAL_INPUTS
        if row.gradient_via
        for name in (row.gradient, f"t{row.name}", f"t{row.gradient}")
    },
}
_SUMMED_BY_PASS = tuple(row.name for row in OPTIONAL_INPUTS if row.may_lack_batch)
_FULL = {
    name: _OWN_AXES[name]
    for row in FORWARD_ROWS
    for moved in (row.name, row.gradient)
    if moved
    for name in (moved, f"t{moved}")
}
# Arrays that `is_plain` looks at besides q, k and v; those with None exclude batch axes.
_OF_ENTRIES = {**_FULL, **{row.name: row.own_axes for row in OPTIONAL_INPUTS if row.name not in _BROADCAST}}


@dataclass(frozen=True, kw_only=True)
class Axes:
    """How a call goes through its batch axes; axes are numbered from the first batch axis of the scores."""

    lengths: tuple[int, ...]
    inner: tuple[int, ...]  # axes that are the batch of each call
    outer: tuple[int, ...]  # axes with a call for each of their indices
    blocking: tuple[str, ...]  # arrays because of which there are outer axes
    copied: tuple[str, ...]  # arrays of which calls get copies
    sums: tuple[str, ...]  # gradients that are added up over calls or entries, outside of the passes
    indirect: tuple[str, ...]  # results that calls do not write in place: `sums`, and others without one batch stride
    shapes: Mapping[str, tuple[int, ...]]  # of out and lse

    @property
    def batch(self) -> int:
        """How many batch entries a call has."""
        return math.prod(self.lengths[axis] for axis in self.inner)

    @property
    def calls(self) -> int:
        """How many calls there are."""
        return math.prod(self.lengths[axis] for axis in self.outer)

    def describe(self) -> str:
        """The text of a plan on these axes."""
        text = f"batch axes {self.lengths}: {counted(self.calls, 'call')} with a batch of {self.batch}"
        if self.calls != 1:
            text += f", because {', '.join(self.blocking)} cannot step through all of them by one stride"
        if self.copied:
            text += f"; {', '.join(self.copied)} copied with all entries of the batch"
        if self.sums:
            text += f"; {', '.join(self.sums)} added up over what broadcasts, in the dtype of lse"
        return text


def axes_of(options: Options, arrays: Mapping[str, Any], results: tuple[str, ...]) -> Axes | None:
    """How the batch axes of a call become a batch; None if one pass takes the arrays as they are.

    `arrays` are those of a pass by name, where None stands for an absent one; `results` are the names of its results.

    Raises ValueError if batch axes do not broadcast, or if the shape of an array does not follow from the others.
    """
    if is_plain(arrays):
        return None
    signature = tuple((name, tuple(x.shape), tuple(x.strides)) for name, x in arrays.items() if x is not None)
    counts_entries = bool(options.dropout or options.score or options.mask_function)
    return _axes_of(options.layout, counts_entries, signature, results)


def is_plain(arrays: Mapping[str, Any]) -> bool:
    """Whether one pass takes all arrays with a batch axis as they are. This check takes 1 us of each call."""
    of_entries = [(name, x.shape) for name, x in arrays.items() if x is not None and name in _OF_ENTRIES]
    q, k, v = arrays["q"].shape, arrays["k"].shape, arrays["v"].shape
    batch = q[0] if len(q) == 4 else 1
    is_plain = len(q) == len(k) == len(v) <= 4 and (len(q) < 4 or batch == k[0] == v[0])
    for name, shape in of_entries:
        own_axes = _OF_ENTRIES[name]
        if own_axes is None:
            return True
        if name in _FULL:
            is_plain = is_plain and (len(q) < 4 or (len(shape) == 1 + own_axes and shape[0] == batch))
        elif len(shape) == 1 + own_axes and shape[0] == 1:  # one pass takes an axis of length 1 if that is the batch
            is_plain = is_plain and batch == 1 and name not in _SHARED
        elif name == "kv_lengths":
            is_plain = is_plain and len(shape) > 0
    return is_plain


@functools.lru_cache(maxsize=256)
def _axes_of(
    layout: str,
    counts_entries: bool,
    signature: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...],
    results: tuple[str, ...],
) -> Axes:
    shapes = {name: shape for name, shape, _ in signature}
    lengths = _broadcast(shapes)
    full = _full_shapes(shapes, layout, lengths)
    _check(shapes, layout, lengths, full, results)
    all_steps = {name: _steps(name, shape, strides, len(lengths)) for name, shape, strides in signature}
    steps = {name: x for name, x in all_steps.items() if name in _OWN_AXES and name not in results}
    given_results = {name: x for name, x in all_steps.items() if name in results}
    small = _small_inputs(shapes, steps)
    iterated = {name: x for name, x in (steps | given_results).items() if name not in small}
    split = _Split.of(lengths, iterated.values(), is_whole=counts_entries or 0 in lengths)
    copied = _not_merging(steps, lengths, split.merged)
    scattered = _not_merging(given_results, lengths, split.merged)
    lacks = {model: _axes_that_it_lacks(model, shapes, len(lengths)) for model in (*NUMBERS, *steps)}
    sums = tuple(name for name in results if name not in full and _is_sum(model_of(name), lacks, split, copied))
    return Axes(
        lengths=lengths,
        inner=split.inner,
        outer=split.outer,
        blocking=_not_merging(iterated, lengths, split.separated),
        copied=copied,
        sums=sums,
        indirect=tuple(name for name in results if name in sums or name in scattered or model_of(name) in copied),
        shapes=full,
    )


class _Split(NamedTuple):
    """The batch axes that are longer than 1."""

    inner: tuple[int, ...]  # those that are the batch of each call
    outer: tuple[int, ...]  # those with a call for each of their indices

    @classmethod
    def of(cls, lengths: tuple[int, ...], steps: Collection[tuple[int, ...]], *, is_whole: bool) -> _Split:
        """All axes as the batch, if it has to be whole; otherwise the longest run that these strides allow."""
        long = [axis for axis, n in enumerate(lengths) if n != 1]
        inner = tuple(long if is_whole else _longest_run(long, lengths, steps))
        return cls(inner, tuple(axis for axis in long if axis not in inner))

    @property
    def merged(self) -> tuple[tuple[int, int], ...]:
        """Neighbouring axes that are both in the batch."""
        return tuple(itertools.pairwise(self.inner))

    @property
    def separated(self) -> tuple[tuple[int, int], ...]:
        """The other neighbouring axes."""
        pairs = itertools.pairwise(sorted((*self.inner, *self.outer)))
        return tuple((a, b) for a, b in pairs if a in self.outer or b in self.outer)


def _is_sum(model: str, lacks: Mapping[str, set[int]], split: _Split, copied: Collection[str]) -> bool:
    """Whether the gradient of an array is a sum over calls, or over entries for which a pass gives one each.

    `lacks` has the batch axes that arrays and numbers do not have. A pass adds the gradient of an optional input up if
    that has no axis of the batch. If it has only some of them, of stride 0, a pass takes it as an array of all entries.
    """
    lacked = lacks.get(model, set())
    has_some = 0 < len(lacked.intersection(split.inner)) < len(split.inner)
    over = {*split.outer, *split.inner} if model in INPUTS or model in copied or has_some else set(split.outer)
    return not over.isdisjoint(lacked)


def _merges(strides: tuple[int, ...], lengths: tuple[int, ...], pairs: Iterable[tuple[int, int]]) -> bool:
    """Whether an array with these strides steps through the two axes of each pair by one stride."""
    return all(strides[a] == strides[b] * lengths[b] for a, b in pairs)


def _not_merging(
    steps: Mapping[str, tuple[int, ...]], lengths: tuple[int, ...], pairs: Collection[tuple[int, int]]
) -> tuple[str, ...]:
    """The arrays that do not step through the two axes of each pair by one stride."""
    return tuple(name for name, strides in steps.items() if not _merges(strides, lengths, pairs))


def _longest_run(
    long: Collection[int], lengths: tuple[int, ...], steps: Collection[tuple[int, ...]]
) -> Collection[int]:
    """Of the axes that are longer than 1, the longest run that all arrays step through by one stride; the last one."""
    runs = [list(long)[:1]]
    for a, b in itertools.pairwise(long):
        if all(_merges(strides, lengths, [(a, b)]) for strides in steps):
            runs[-1].append(b)
        else:
            runs.append([b])
    return max(reversed(runs), key=lambda run: math.prod(lengths[axis] for axis in run))


def _small_inputs(shapes: Mapping[str, tuple[int, ...]], names: Collection[str]) -> set[str]:
    """Optional inputs that are copied rather than make more calls."""
    of_q = math.prod(shapes["q"][-3:])
    broadcast = {name for name in names if name in _BROADCAST and _size(name, shapes[name]) * SMALL <= of_q}
    return broadcast | {name for name in names if name in _SMALL}


def _axes_that_it_lacks(name: str, shapes: Mapping[str, tuple[int, ...]], count: int) -> set[int]:
    """The batch axes, of so many, that an array does not have, or that have length 1 in it."""
    batch_axes = len(shapes[name]) - _OWN_AXES[name] if name in shapes else 0
    aligned = _aligned(shapes[name][:batch_axes] if batch_axes > 0 else (), count)
    return {axis for axis, n in enumerate(aligned) if n == 1}


def _broadcast(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The lengths of the batch axes of q, k and v after broadcasting."""
    lengths: tuple[int, ...] = ()
    for name in INPUTS:
        if len(shapes[name]) < 2:
            expected = "an array of two axes or more, (..., heads, seqlen, head_dim)"
            raise value_error(name, f"{len(shapes[name])}-D shape {shapes[name]}", expected)
        batch_axes = shapes[name][:-3]
        count = max(len(batch_axes), len(lengths))
        pairs = list(zip(_aligned(batch_axes, count), _aligned(lengths, count), strict=True))
        if any(a != b and 1 not in (a, b) for a, b in pairs):
            expected = f"batch axes that broadcast with {lengths}, which those before it have"
            raise value_error(name, f"batch axes {batch_axes} in shape {shapes[name]}", expected)
        lengths = tuple(b if a == 1 else a for a, b in pairs)
    return lengths


def _aligned(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (1,) * (count - len(shape)) + shape


def _axis_of_rows(shape: tuple[int, ...], layout: str) -> int:
    return -3 if layout == "bshd" and len(shape) > 2 else -2


def _full_shapes(
    shapes: Mapping[str, tuple[int, ...]], layout: str, lengths: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Shapes of out and lse, and of their gradients."""
    q, has_heads = shapes["q"], max(len(shapes[name]) for name in INPUTS) > 2
    heads = (q[-2 if layout == "bshd" else -3] if len(q) > 2 else 1,) if has_heads else ()
    seqlen = q[_axis_of_rows(q, layout)]
    order = (seqlen, *heads) if layout == "bshd" else (*heads, seqlen)
    out, lse = (*lengths, *order, shapes["v"][-1]), (*lengths, *heads, seqlen)
    return {name: out if name.endswith("out") else lse for name in _FULL}


def shape_of_lse(layout: str, arrays: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of lse of a call on such q, k and v."""
    shapes = {name: tuple(arrays[name].shape) for name in INPUTS}
    return _full_shapes(shapes, layout, _broadcast(shapes))["lse"]


def _check(
    shapes: Mapping[str, tuple[int, ...]],
    layout: str,
    lengths: tuple[int, ...],
    full: Mapping[str, tuple[int, ...]],
    results: tuple[str, ...],
) -> None:
    """Check the shapes that the calls cannot check, because each gets only some of the axes."""
    heads = full["lse"][len(lengths) : -1] or (1,)
    seqlen_k = shapes["k"][_axis_of_rows(shapes["k"], layout)]
    for name, shape in shapes.items():
        if name in results or name in INPUTS or name not in _OWN_AXES:
            continue
        if name in full:
            check_shape(name, shape, full[name])
            continue
        if name[1:] in MOVABLE and name[1:] in shapes:  # a tangent
            check_shape(name, shape, shapes[name[1:]])
            continue
        own_axes = _OWN_AXES[name]
        lead = shape[: max(len(shape) - own_axes, 0)]
        if name in _BROADCAST:
            of_scores = name in ("bias", "mask")
            target = (*heads, full["lse"][-1], seqlen_k) if of_scores else shape[len(lead) :]
            is_right = broadcasts(shape[len(lead) :], target)
            whole = (*lengths, *target)
            hint = how_to_give_keys(name, shape, whole) if of_scores else ""
            expected = f"a shape that broadcasts to {whole}{hint}"
        else:
            is_right = shape[len(shape) - own_axes :] == heads[:own_axes] and len(shape) >= own_axes
            expected = f"{(*lengths, *heads[:own_axes])}, of which batch axes may be 1 or missing"
        fits = broadcasts(lead, lengths)
        if name in _SHARED and fits and any(n != 1 for n in lead):
            fits, expected = False, f"{heads}, and batch axes of size 1: a head has one {name.removesuffix('s')}"
        if not (is_right and fits):
            raise value_error(name, f"shape {shape}", expected)


def _size(name: str, shape: tuple[int, ...]) -> int:
    """Elements of an array for one index of the batch axes."""
    return math.prod(shape[max(len(shape) - _OWN_AXES[name], 0) :])


def _steps(name: str, shape: tuple[int, ...], strides: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Strides along the batch axes; 0 along axes that the array does not have, or that have length 1 in it."""
    batch_axes = max(len(shape) - _OWN_AXES.get(name, len(shape)), 0)
    steps = tuple(0 if n == 1 else stride for n, stride in zip(shape[:batch_axes], strides, strict=False))
    return (0,) * (count - batch_axes) + steps


# ---- Calls -----------------------------------------------------------------------------------------------------------


class BatchCalls:
    """The calls that make up one call on arrays with batch axes.

    `arrays` are those of the pass, including results to write to. `gives_partials` says whether passes can give dq, dk
    and dv in the dtype of the softmax (`Options.wide`). If they cannot, half-precision arrays are converted to this
    dtype before such gradients are summed.
    """

    def __init__(
        self,
        axes: Axes,
        options: Options,
        arrays: Mapping[str, Array],
        results: tuple[str, ...],
        xp: ModuleType,
        *,
        gives_partials: bool,
    ) -> None:
        self.axes = axes
        self.options = options
        self.results = results
        self._xp = xp
        self._arrays = {name: x for name, x in arrays.items() if name not in results}
        self._given = {name: arrays.get(name) for name in results}
        q, bias = self._arrays["q"], self._arrays.get("bias")
        self._wide = numpy_dtype(softmax_dtype_of(q.dtype.name))
        self._widened: tuple[str, ...] = ()
        self._indirect = axes.indirect
        if q.dtype.itemsize == 2:
            score_args = tuple(name for name in self._arrays if name not in _OWN_AXES)
            sums = tuple(name for name in (*DEFAULT_NEED, *DEFAULT_NEED_TANGENTS) if name in axes.sums)
            if sums and gives_partials and self._may_be_wide(sums):
                self.options = replace(options, wide=sums)
            elif sums:
                self._widened = (*MOVABLE_OVER_HEAD_DIM, "bias", "tbias", *score_args)
                self._indirect = tuple(x for x in results if x in axes.indirect or model_of(x) in self._widened)
            if {"dbias", "tdbias"} & set(axes.sums) and bias is not None and bias.dtype.itemsize == 2:
                self._widened = (*self._widened, "bias", "tbias")

    def _may_be_wide(self, sums: Collection[str]) -> bool:
        """Whether passes that give partial results give these in the dtype of the softmax."""
        return not set(sums) & set(DEFAULT_NEED_TANGENTS) and ("dq" not in sums or self._dq_is_added_up())

    def _dq_is_added_up(self) -> bool:
        """Whether kernels add dq up in the dtype of the softmax, instead of computing it from rounded weights."""
        return not self.options.deterministic and any(name in self.results for name in ("dk", "dv"))

    def describe(self) -> str:
        """The text of a plan on these calls."""
        names = tuple(dict.fromkeys(name for name in self._widened if self._arrays.get(name) is not None))
        return self.axes.describe() + (f"; {', '.join(names)} converted to it" if names else "")

    def indices(self) -> Iterator[tuple[int, ...]]:
        """For each call, an index for every batch axis; it is 0 for the axes of the batch."""
        lengths = (n if axis in self.axes.outer else 1 for axis, n in enumerate(self.axes.lengths))
        return itertools.product(*map(range, lengths))

    def inputs(self, index: tuple[int, ...]) -> dict[str, Array]:
        """The arrays of one call by name, without results."""
        arrays = {}
        for name, array in self._arrays.items():
            if array is not None:
                take = self._copy if name in self.axes.copied else self._view
                array = on_bits(functools.partial(take, name, index=index), array)
                if name in self._widened and array.dtype.itemsize == 2:
                    array = array.astype(self._wide)
            arrays[name] = array
        return arrays

    def run(self, call: Callable[[Options, dict[str, Array]], tuple[Array, ...]]) -> tuple[Array, ...]:
        """Make all calls in order, each by `call`, and return their results together."""
        return self.collect(lambda index, results: call(self.options, self.inputs(index) | results))

    @np.errstate(all="ignore")  # sums over calls and their rounding
    def collect(self, call: Callable[[tuple[int, ...], dict[str, Array]], tuple[Array, ...]]) -> tuple[Array, ...]:
        """The results of all calls together: each gets its index, and arrays for those results that it can fill."""
        results = {name: self._result(name) for name in self.results}
        check_no_overlap({**self._arrays, **self._given}, self.results)
        totals = {
            name: self._module(x).zeros(x.shape, self._wide) if name in self.axes.sums else x
            for name, x in results.items()
        }
        for index in self.indices():
            targets = {
                name: None if name in self._indirect or x.size == 0 else self._view(name, x, index)
                for name, x in totals.items()
            }
            for name, partial in zip(self.results, call(index, targets), strict=True):
                if name in self._indirect:
                    self._add(name, totals[name], partial, index)
        for name in self.axes.sums:
            results[name][...] = totals[name]
        return tuple(results.values())

    def _add(self, name: str, total: Array, partial: Array, index: tuple[int, ...]) -> None:
        """Write what one call gave to its slice of the result, or add it to the sum."""
        target = self._at(name, total, index, slice(None))
        if partial.size != target.size:
            lengths = [self.axes.lengths[axis] for axis in self.axes.inner]
            first = len(self.axes.lengths) - self._batch_axes(name, total)
            in_total = [total.shape[axis - first] if axis >= first else 1 for axis in self.axes.inner]
            short = tuple(i for i, n in enumerate(in_total) if n == 1)
            partial = partial.reshape(*lengths, *partial.shape[1:]).sum(axis=short)
        if name in self.axes.sums:
            target += partial.reshape(target.shape)
        else:
            target[...] = partial.reshape(target.shape)

    # ---- arrays

    def _module(self, array: Array) -> ModuleType:
        """NumPy for arrays in host memory, as streamed keys are with queries on a device."""
        return module_of(array) if type(array).__module__ == "numpy" else self._xp

    def _result(self, name: str) -> Array:
        """The array of a result, checked, or a new one."""
        model = self._arrays.get(model_of(name))
        q = self._arrays["q"]
        if name in _FULL:
            is_wide = OUTPUT_ROWS[name].dtype == "softmax"
            dtype = self._wide if is_wide else numpy_dtype("bfloat16") if q.dtype.name in FLOAT8 else q.dtype
            shape = self.axes.shapes[name]
        else:
            shape, dtype = ((), self._wide) if model is None else (tuple(model.shape), model.dtype)
        given = self._given[name]
        if given is None:
            return self._module(q if model is None else model).empty(shape, dtype)
        check_array(name, given, shape, dtype.name, is_read=False)
        check_distinct(name, given)
        return given

    def _with_heads(self, name: str, array: Array) -> Array:
        """The array; one over head dimensions or rows gets an axis of heads if it has none."""
        if name in MOVABLE_OVER_HEAD_DIM and array.ndim == 2:
            return array[:, None] if self.options.layout == "bshd" else array[None]
        return array[None] if name in MOVABLE_OVER_ROWS and array.ndim == 1 else array

    def _batch_axes(self, name: str, array: Array) -> int:
        """How many batch axes an array has."""
        return max(array.ndim - _OWN_AXES.get(name, array.ndim), 0)

    def _at(self, name: str, array: Array, index: tuple[int, ...], inner: Any) -> Array:
        """A view at an index of the outer axes; `inner` indexes the inner ones: 0, or a slice of all."""
        array = self._with_heads(name, array)
        batch_axes = self._batch_axes(name, array)
        axes = range(len(self.axes.lengths) - batch_axes, len(self.axes.lengths))
        indices = [
            inner if axis in self.axes.inner else index[axis] if n > 1 else 0
            for axis, n in zip(axes, array.shape[:batch_axes], strict=True)
        ]
        return array[tuple([*indices, ...])]

    def _view(self, name: str, array: Array, index: tuple[int, ...]) -> Array:
        """The slice of an array that one call gets, with the batch of the call before its own axes."""
        if name not in _OWN_AXES:
            return array
        array = self._with_heads(name, array)
        batch_axes = self._batch_axes(name, array)
        if 0 in array.shape[:batch_axes]:
            return self._module(array).empty((0, *array.shape[batch_axes:]), array.dtype)
        first = len(self.axes.lengths) - batch_axes
        walked = [axis - first for axis in self.axes.inner if axis >= first and array.shape[axis - first] > 1]
        view = self._at(name, array, index, 0)
        if not walked and name.removeprefix("t").removeprefix("d") in _SUMMED_BY_PASS:
            return view
        stride = array.strides[walked[-1]] if walked else 0
        as_strided = self._module(array).lib.stride_tricks.as_strided
        return as_strided(view, (self.axes.batch, *view.shape), (stride, *view.strides))

    def _copy(self, name: str, array: Array, index: tuple[int, ...]) -> Array:
        """As `_view`, but a copy with all entries of the batch."""
        view = self._at(name, array, index, slice(None))
        own_shape = view.shape[view.ndim - _OWN_AXES[name] :]
        lengths = tuple(self.axes.lengths[axis] for axis in self.axes.inner)
        xp = self._module(array)
        whole = xp.broadcast_to(view, (*lengths, *own_shape))
        return xp.ascontiguousarray(whole).reshape(self.axes.batch, *own_shape)


def as_one_call(
    options: Options, arrays: Mapping[str, Array], results: Collection[str], xp: ModuleType
) -> BatchCalls | None:
    """A single call with all batch axes as its batch, which gives all results as new arrays; None without such axes.

    So all ranks make the same call, however their arrays lie in memory. Those that do not merge are copied. Axes of
    queries and keys may have any lengths: a rank has a shard of them.
    """
    if is_plain(arrays):
        return None
    signature = tuple(
        (
            name,
            (*x.shape[:-2], *(1,) * min(x.ndim, 2)) if name in MOVABLE_BROADCAST else tuple(x.shape),
            tuple(x.strides),
        )
        for name, x in arrays.items()
        if x is not None
    )
    axes = _axes_of(options.layout, True, signature, tuple(results))
    return BatchCalls(replace(axes, indirect=tuple(results)), options, arrays, tuple(results), xp, gives_partials=False)


class FirstCall(NamedTuple):
    """Options and arrays of one call, and the text of a plan on its axes; empty if there are no batch axes."""

    options: Options
    arrays: dict[str, Array]
    axes: str


def first_call(
    options: Options,
    arrays: Mapping[str, Array],
    results: Collection[str],
    xp: ModuleType,
    *,
    gives_partials: bool,
) -> FirstCall:
    """The first of the calls that make up a call, or the call itself."""
    names = tuple(results)
    axes = axes_of(options, arrays, names)
    if axes is None:
        return FirstCall(options, dict(arrays), "")
    calls = BatchCalls(axes, options, arrays, names, xp, gives_partials=gives_partials)
    return FirstCall(calls.options, calls.inputs((0,) * len(axes.lengths)), calls.describe())
