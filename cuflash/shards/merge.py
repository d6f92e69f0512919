"""Attention over keys that were split anywhere, from partial results: what users call.

It checks the arrays and brings them to one order of axes. The formulas are in `cuflash.shards.partial_results`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.array_info import DTYPES, check_array
from cuflash.arrays.checks import check_choice, type_error, value_error
from cuflash.gpu.merging import Tangents
from cuflash.shards.partial_results import merge_backward_into, merge_backward_tangents_into, merge_into
from cuflash.shards.reductions import RunningReductions, entropy_backward, max_backward
from cuflash.spec import array_imports
from cuflash.spec.options import LAYOUTS
from cuflash.spec.outputs import OUTPUTS, NamedForwardResult, NamedMergeGradients
from cuflash.spec.results import (
    ForwardResult,
    JvpResult,
    MergeGradients,
    MergeGradientTangents,
    MergeResult,
    named_tuple,
)
from cuflash.spec.type_variables import ArrayT, LseT

Array = Any  # a NumPy or CuPy array, or another library's with __dlpack__; one library per call


# fmt: off
@overload
def merge(
    outs: Sequence[ArrayT], lses: Sequence[LseT], *, touts: None = None, tlses: None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
) -> MergeResult[ArrayT, LseT]: ...
@overload
def merge(
    outs: Sequence[ArrayT], lses: Sequence[LseT], *, touts: Sequence[Array], tlses: Sequence[Array],
    layout: Literal["bhsd", "bshd"] = "bhsd",
) -> JvpResult[ArrayT, LseT]: ...
@overload
def merge(
    outs: Sequence[ArrayT], lses: Sequence[LseT], *, maxes: Sequence[Array] | None = None,
    entropies: Sequence[Array] | None = None, layout: Literal["bhsd", "bshd"] = "bhsd",
) -> NamedForwardResult[ArrayT, LseT]: ...
# fmt: on


def merge(
    outs: Sequence[Array],
    lses: Sequence[Array],
    *,
    touts: Sequence[Array] | None = None,
    tlses: Sequence[Array] | None = None,
    maxes: Sequence[Array] | None = None,
    entropies: Sequence[Array] | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
) -> MergeResult | JvpResult | NamedForwardResult:
    """Attention over all keys from attention over splits of them: ``out = sum_i exp(lse_i - lse) * out_i``.

    The result is exact for splits of any lengths: over devices, calls or pages, or into keys
    that many queries share and keys that they do not share.

    Parameters
    ----------
    outs : sequence of array
        The outs that `FlashAttention.forward` returned for the splits: of one shape, dtype and library.
    lses : sequence of array
        One for each out: (..., num_heads, seqlen_q), float32 (float64 for float64). Splits without values have None as
        outs and touts, and so has the result. If the lse of a row is -inf,
        because the row attends to no key of the split, the split has no weight in this row, whatever its out is.
    touts, tlses : sequence of array, optional
        The tangents that `FlashAttention.jvp` returned for the splits with outs and lses: like these, both or neither.
    maxes, entropies : sequence of array, optional
        The maxima and the entropies of rows that `FlashAttention.forward` returned for the splits, with
        ``want=("max", "entropy")``: of the shape and dtype of lses. They do not go with tangents.
    layout : {"bhsd", "bshd"}, default "bhsd"
        The layout of the outs.

    Returns
    -------
    MergeResult, JvpResult or ForwardResult
        ``out`` and ``lse``, arrays of the same shapes, dtypes and library, and with tangents ``tout`` and ``tlse``, or
        with row reductions those of ``max`` and ``entropy`` that are given. A row that attends to no key of any split
        has out = 0, lse = -inf and max = -inf, and tangents and an entropy of 0. Sums are in the dtype of
        lse, over the splits in order, so they are bitwise repeatable.

    Raises
    ------
    TypeError, ValueError, ImportError
        As `FlashAttention.forward` does; messages call the second out ``outs[1]``.

    See Also
    --------
    merge_backward : Its gradients.
    FlashAttention.forward : Gives out and lse of a split.
    streamed, cuflash.distributed.ContextParallel : Attention over splits that merges by itself.

    Notes
    -----
    Give a learnable sink, and its tangent, to one of the splits only.

    With w_i = exp(lse_i - lse), the entropy of all keys is ``sum_i w_i * (entropy_i - log(w_i))``. `backward` of each
    split with the merged out, lse and entropy takes its gradient, too.

    The weights of splits follow from lse alone, which is rounded: in rows of large lse these weights have the
    error of half a unit in its last place: 2^-10 at an lse of 3e4 in float32. At -1e9, as where a finite mask hides all
    keys, each of n splits has the weight 1. `ContextParallel` and streamed keys have the keys, so that their weights
    are exact.

    References
    ----------
    - Milakov, Gimelshein: Online normalizer calculation for softmax (2018), https://arxiv.org/abs/1805.02867.
    - Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference (2023),
      https://pytorch.org/blog/flash-decoding/.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64))
    >>> attn = cuflash.FlashAttention()
    >>> splits = [attn.forward(q, k[:, keys], v[:, keys]) for keys in (slice(0, 30), slice(30, 100))]
    >>> out, lse = cuflash.merge(*zip(*splits))
    >>> np.allclose(out, cuflash.attention(q, k, v))
    True
    """
    has_values = _has_values(outs, touts=touts)
    touts = touts if has_values or tlses is None else tuple(outs)
    of_reductions = {name: x for name, x in (("maxes", maxes), ("entropies", entropies)) if x is not None}
    groups = {"outs": outs, "lses": lses, **_together(touts=touts, tlses=tlses), **of_reductions}
    _check_apart(of_reductions, groups)
    names, given = _by_name(groups)
    call = _Call.of(given, {}, names[0][0], layout, has_values)
    arrays, rows = call.arrays, call.rows
    ordered = rows.all_in_order(arrays)
    with _device_of(arrays) as xp, np.errstate(all="ignore"):
        results = {
            of_splits[0]: xp.empty(arrays[of_splits[0]].shape, arrays[of_splits[0]].dtype) for of_splits in names
        }
        out, lse, *others = rows.all_in_order(results).values()
        partials = [[ordered[name] for name in of_splits] for of_splits in names]
        tangents = Tangents(*others, *partials[2:]) if others and not of_reductions else None
        merge_into(partials[0], partials[1], out, lse, tangents=tangents)
        if of_reductions:
            by_name = dict(zip((_REDUCTIONS[name] for name in of_reductions), names[2:], strict=True))
            splits = {name: [arrays[x] for x in of_splits] for name, of_splits in by_name.items()}
            totals = {name: results[of_splits[0]] for name, of_splits in by_name.items()}
            _merge_reductions([arrays[x] for x in names[1]], splits, totals)
    exported = [call.export(name, x) for name, x in results.items()]
    if of_reductions:
        return named_tuple(ForwardResult, (*OUTPUTS, *by_name))(*exported)  # type: ignore[no-any-return]
    return MergeResult(*exported) if tangents is None else JvpResult(*exported)


_REDUCTIONS = {"maxes": "max", "entropies": "entropy"}  # what their partial results are called
_OF_SPLITS = ("touts", "tlses", *_REDUCTIONS)


def _merge_reductions(
    lses: Sequence[Array], splits: Mapping[str, Sequence[Array]], totals: Mapping[str, Array]
) -> None:
    """Fill the row reductions of all splits by name, which are new arrays, from those of splits."""

    def as_rows(x: Array) -> Array:
        return x.reshape(1, 1, -1)

    running = RunningReductions({name: as_rows(x) for name, x in totals.items()})
    for number, lse in enumerate(lses):
        running.add({"lse": as_rows(lse)} | {name: as_rows(x[number]) for name, x in splits.items()})
    running.finish()


# fmt: off
@overload
def merge_backward(
    dout: Array, outs: Sequence[ArrayT], lses: Sequence[LseT], out: Array, lse: Array, *, dlse: Array | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
) -> MergeGradients[ArrayT, LseT]: ...
@overload
def merge_backward(
    dout: Array, outs: Sequence[ArrayT], lses: Sequence[LseT], out: Array, lse: Array, *, dlse: Array | None = None,
    touts: Sequence[Array], tlses: Sequence[Array], tout: Array, tlse: Array, tdout: Array | None = None,
    tdlse: Array | None = None, layout: Literal["bhsd", "bshd"] = "bhsd",
) -> MergeGradientTangents[ArrayT, LseT]: ...
@overload
def merge_backward(
    dout: Array, outs: Sequence[ArrayT], lses: Sequence[LseT], out: Array, lse: Array, *, dlse: Array | None = None,
    maxes: Sequence[Array] | None = None, entropies: Sequence[Array] | None = None, entropy: Array | None = None,
    dmax: Array | None = None, dentropy: Array | None = None, layout: Literal["bhsd", "bshd"] = "bhsd",
) -> NamedMergeGradients[ArrayT, LseT]: ...
# fmt: on


def merge_backward(
    dout: Array,
    outs: Sequence[Array],
    lses: Sequence[Array],
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    touts: Sequence[Array] | None = None,
    tlses: Sequence[Array] | None = None,
    tout: Array | None = None,
    tlse: Array | None = None,
    tdout: Array | None = None,
    tdlse: Array | None = None,
    maxes: Sequence[Array] | None = None,
    entropies: Sequence[Array] | None = None,
    entropy: Array | None = None,
    dmax: Array | None = None,
    dentropy: Array | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
) -> MergeGradients | MergeGradientTangents | NamedMergeGradients:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` with respect to the arguments of `merge`.

    They are what `FlashAttention.backward` of each split takes as dout and dlse::

        douts[i] = w[i] * dout
        dlses[i] = w[i] * (rowsum(dout * (outs[i] - out)) + dlse)       with w[i] = exp(lses[i] - lse)

    The entropy adds to them, and what `FlashAttention.backward` of each split takes as dentropy is::

        dlses[i] += w[i] * (entropies[i] - log(w[i]) - entropy) * dentropy
        dentropies[i] = w[i] * dentropy

    Of the maximum, the first split that has it gets the gradient.

    Parameters
    ----------
    dout : array
        Gradient with respect to out, of its shape and dtype.
    outs, lses : sequence of array
        As `merge` took them.
    out, lse : array
        As `merge` returned them.
    dlse : array, optional
        Gradient with respect to lse, of its shape and dtype, if anything was computed from lse.
    touts, tlses : sequence of array, optional
        The tangents that `merge` took; with them, the tangents of the gradients are computed, too.
    tout, tlse : array, optional
        The tangents that `merge` returned, with touts and tlses.
    tdout, tdlse : array, optional
        Tangents of dout and dlse, zero if not given.
    maxes, entropies : sequence of array, optional
        The maxima and entropies of rows that `merge` took.
    entropy : array, optional
        The entropy that `merge` returned, with entropies.
    dmax, dentropy : array, optional
        Gradients with respect to the maximum, with maxes, and to the entropy, with entropies and entropy: of the shape
        and dtype of lse. They do not go with tangents.
    layout : {"bhsd", "bshd"}, default "bhsd"
        The layout of dout, the outs and out.

    Returns
    -------
    MergeGradients, MergeGradientTangents or a named tuple like MergeGradients
        ``douts`` and ``dlses``, tuples of arrays like outs and lses. They are 0 where the lse of a split is -inf. With
        tangents also ``tdouts`` and ``tdlses``, their derivatives in the direction of the tangents, which
        `FlashAttention.backward_jvp` of each split takes. With dmax also ``dmaxes``, with dentropy ``dentropies``,
        tuples of arrays like lses.

    Raises
    ------
    TypeError, ValueError, ImportError
        As `merge` does.

    See Also
    --------
    merge : The sum whose gradients these are.
    FlashAttention.backward, FlashAttention.backward_jvp : Take what this returns.

    Notes
    -----
    In rows of large lse, weights of splits have the error that `merge` has.

    If the splits are just the keys of one problem, there is a shorter way: `FlashAttention.backward` of each one with
    the merged out and lse, and the unchanged dout, gives dk and dv of that split, and its partial dq. So does
    `FlashAttention.backward_jvp` with the merged out, lse, tout and tlse.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 8, 100, 64))
    >>> attn = cuflash.FlashAttention()
    >>> halves = [(k[:, :30], v[:, :30]), (k[:, 30:], v[:, 30:])]
    >>> outs, lses = zip(*(attn.forward(q, *half) for half in halves))
    >>> out, lse = cuflash.merge(outs, lses)
    >>> gradients = cuflash.merge_backward(dout, outs, lses, out, lse)
    >>> dqs = [
    ...     attn.backward(dout, q, *half, out, lse, dlse=dlse).dq
    ...     for half, out, lse, dout, dlse in zip(halves, outs, lses, *gradients)
    ... ]
    >>> np.allclose(sum(dqs), attn.backward(dout, q, k, v, *attn.forward(q, k, v)).dq)
    True
    """
    has_values = _has_values(outs, dout=dout, out=out, touts=touts, tout=tout, tdout=tdout)
    if not has_values and tlses is not None:
        touts, tout = tuple(outs), lse  # of which none is read
    of_tangents = _together(touts=touts, tlses=tlses, tout=tout, tlse=tlse)
    if not of_tangents:
        _check_no_tangents(tdout=tdout, tdlse=tdlse)
    of_reductions = _together(maxes=maxes, dmax=dmax)
    of_reductions |= _together(entropies=entropies, entropy=entropy, dentropy=dentropy)
    _check_apart(of_reductions, of_tangents)
    more = of_tangents | of_reductions
    groups = {"outs": outs, "lses": lses} | {name: x for name, x in more.items() if name in _OF_SPLITS}
    merged = {"out": out, "lse": lse} | {name: x for name, x in more.items() if name not in groups}
    optional = {"dlse": dlse, "tdout": tdout, "tdlse": tdlse}
    names, of_splits = _by_name(groups)
    call = _Call.of({"dout": dout, **of_splits, **merged}, optional, "out", layout, has_values)
    arrays, rows = call.arrays, call.rows
    ordered = rows.all_in_order(arrays)
    splits = [dict(zip(groups, of_split, strict=True)) for of_split in zip(*names, strict=True)]
    gradients_of_splits = []
    with _device_of(arrays) as xp, np.errstate(all="ignore"):
        for split in splits:
            gradients = {group: xp.empty(arrays[name].shape, arrays[name].dtype) for group, name in split.items()}
            gradients_of_splits.append(gradients)
            targets, partials = list(rows.all_in_order(gradients).values()), [ordered[name] for name in split.values()]
            reads = ordered["dout"], partials[0], ordered["out"], partials[1], ordered["lse"], ordered.get("dlse")
            merge_backward_into(targets[0], targets[1], *reads)
            if of_tangents:
                merge_backward_tangents_into(targets, partials, ordered)
        if of_reductions:
            by_group = [{group: arrays[name] for group, name in split.items()} for split in splits]
            _merge_reductions_backward(gradients_of_splits, by_group, arrays)
    exported = (tuple(call.export(group, gradients[group]) for gradients in gradients_of_splits) for group in groups)
    if of_tangents:
        return MergeGradientTangents(*exported)
    named = named_tuple(MergeGradients, tuple(f"d{name}" for name in groups))
    return named(*exported)  # type: ignore[no-any-return]


def _merge_reductions_backward(
    gradients: Sequence[Mapping[str, Array]], splits: Sequence[Mapping[str, Array]], merged: Mapping[str, Array]
) -> None:
    """Fill the gradients of the row reductions of splits, and add to those of their lses."""
    if "dentropy" in merged:
        of_all = [merged[name] for name in ("entropy", "lse", "dentropy")]
        for target, split in zip(gradients, splits, strict=True):
            entropy_backward(target["entropies"], target["lses"], split["entropies"], split["lses"], *of_all)
    if "dmax" in merged:
        xp, maxes = dlpack.module_of(merged["dmax"]), [split["maxes"] for split in splits]
        left, largest = merged["dmax"].copy(), functools.reduce(xp.maximum, maxes)
        for target, split_max in zip(gradients, maxes, strict=True):
            max_backward(target["maxes"], left, split_max, largest)


class _Call(NamedTuple):
    """The arrays of a call by name, imported and checked. Without values, those over their columns have none."""

    arrays: dict[str, Array]
    rows: _Rows
    imported: dlpack.Imported
    has_values: bool

    @classmethod
    def of(
        cls, given: Mapping[str, Any], optional: Mapping[str, Any], like: str, layout: str, has_values: bool
    ) -> _Call:
        """Import what is given, and what is optional if it is there; shapes follow from the out named `like`."""
        required = [name for name in given if has_values or _is_of_rows(name)]
        taken = {**{name: given[name] for name in required}, **optional}
        imported = array_imports.import_arguments(taken, required=required)
        arrays = {name: x for name, x in imported.arrays.items() if x is not None}
        if not has_values:
            arrays = _with_no_columns(arrays, (*given, *arrays))
        return cls(arrays, _check_partials(arrays, like, layout if has_values else "bhsd"), imported, has_values)

    def export(self, name: str, result: Array) -> Any:
        """A result in the caller's library; None for one over columns of values that there are not."""
        return self.imported.export(result, None) if self.has_values or _is_of_rows(name) else None


class _Rows(NamedTuple):
    """Arrays over rows, as lse, in the order of axes of arrays over rows and columns, as out."""

    swapped: bool  # out is (..., seqlen, heads, dim), lse (..., heads, seqlen)

    def in_order(self, rows: Array) -> Array:
        """A view whose axes are those of out but for the last one."""
        return rows.swapaxes(-1, -2) if self.swapped else rows

    def all_in_order(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays by name, those over rows as such views."""
        return {name: self.in_order(x) if _is_of_rows(name) else x for name, x in arrays.items()}


def _is_of_rows(name: str) -> bool:
    """Whether partial results, or merged ones, of a name have a number for each row."""
    return any(x in name for x in ("lse", "max", "entrop"))


def _has_values(outs: Sequence[Array | None], **of_values: Any) -> bool:
    """Whether partial results have outs. Refuses arrays that go with outs where there are none."""
    if not isinstance(outs, (list, tuple)):
        raise type_error(
            "outs", type(outs).__name__, "a list or tuple of arrays, or of None for each lse without values"
        )
    if not outs or any(x is not None for x in outs):
        return True
    for name, x in of_values.items():
        if isinstance(x, (list, tuple)):
            name, x = next(((f"{name}[{i}]", part) for i, part in enumerate(x) if part is not None), (name, None))
        if x is not None:
            raise value_error(name, "an array", "None as each of outs is: without values there are lses alone")
    return False


def _check_no_tangents(**given: Any) -> None:
    """Refuse tangents of gradients without those of partial results."""
    for name, x in given.items():
        if x is not None:
            raise type_error(name, "an array without other tangents", "touts, tlses, tout and tlse, too")


def _check_apart(of_reductions: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse row reductions together with tangents."""
    if of_reductions and "tlses" in others:
        name = next(iter(of_reductions))
        raise type_error(name, "arrays together with tlses", "None: row reductions have no tangents")


def _together(**given: Any) -> dict[str, Any]:
    """Arrays by name, of which a call has all or none."""
    if all(x is None for x in given.values()):
        return {}
    for name, x in given.items():
        if x is None:
            others = ", ".join(other for other in given if other != name)
            raise type_error(name, "None", f"that of the call that gave {others}")
    return given


def _by_name(groups: Mapping[str, Sequence[Array]]) -> tuple[list[list[str]], dict[str, Array]]:
    """What error messages call the partial results, ``outs[0]`` and so on, by group; and all of them by name."""
    for name, arrays in groups.items():
        if not isinstance(arrays, (list, tuple)):
            raise type_error(name, type(arrays).__name__, "a list or tuple of arrays")
    count = len(groups["outs"])
    if not count:
        raise value_error("outs", "no array", "at least one")
    for name, arrays in groups.items():
        if len(arrays) != count:
            raise value_error(name, f"{len(arrays)} arrays", f"{count}, one for each of outs")
    names = [[f"{name}[{i}]" for i in range(count)] for name in groups]
    return names, {f"{name}[{i}]": x for name, arrays in groups.items() for i, x in enumerate(arrays)}


def _with_no_columns(arrays: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Arrays by name, of which those over the columns of values have none."""
    lse = next(iter(arrays.values()))
    empty = dlpack.module_of(lse).empty((*lse.shape, 0), lse.dtype)
    return {name: arrays.get(name, empty) for name in names}


def _check_partials(arrays: dict[str, Any], like: str, layout: str) -> _Rows:
    """Check arrays by name against the one named `like`, an out, from which all shapes follow."""
    check_choice("layout", layout, LAYOUTS)
    dtype, shape = arrays[like].dtype.name, tuple(arrays[like].shape)
    if dtype not in DTYPES:
        raise type_error(like, f"dtype {dtype}", "float16, bfloat16, float32 or float64")
    if len(shape) < 2:
        raise value_error(like, f"{len(shape)}-D shape {shape}", "an array of two axes or more")
    rows = _Rows(swapped=layout == "bshd" and len(shape) >= 3)
    lse_shape = (*shape[:-3], shape[-2], shape[-3]) if rows.swapped else shape[:-1]
    lse_dtype = "float64" if dtype == "float64" else "float32"
    for name, x in arrays.items():
        check_array(name, x, *((lse_shape, lse_dtype) if _is_of_rows(name) else (shape, dtype)))
    return rows


@contextlib.contextmanager
def _device_of(arrays: dict[str, Any]) -> Any:
    """A context on the device of the arrays, which gives the module that computes on them, NumPy or CuPy."""
    first = next(iter(arrays.values()))
    if isinstance(first, np.ndarray):
        yield np
        return
    for name, x in arrays.items():
        if x.device != first.device:
            raise value_error(name, f"an array on device {x.device.id}", f"device {first.device.id}")
    with first.device:
        yield importlib.import_module("cupy")
