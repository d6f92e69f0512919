"""Attention over keys that were split anywhere, from partial results, weighted according to their lse.

Split i of the keys has out_i and lse_i; its fraction of the row sum of all keys is ``exp(lse_i - lse)``. So

    lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i

which is the step of online softmax (Milakov and Gimelshein 2018) for any number of splits, in any order. Arrays of
NumPy are merged by these formulas, arrays of CuPy by kernels/helpers/merge.cu.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.array_info import DTYPES, check_array
from cuflash.arrays.checks import check_choice, type_error, value_error
from cuflash.gpu import merging
from cuflash.spec import array_imports, row_sums
from cuflash.spec.options import LAYOUTS

Array = Any  # a NumPy or CuPy array, or another library's with __dlpack__; one library per call


class MergeResult(NamedTuple):
    """The result of `merge`."""

    out: Array
    lse: Array


class MergeGradients(NamedTuple):
    """The result of `merge_backward`: gradients for every split."""

    douts: tuple[Array, ...]
    dlses: tuple[Array, ...]


def merge(outs: Sequence[Array], lses: Sequence[Array], *, layout: Literal["bhsd", "bshd"] = "bhsd") -> MergeResult:
    """Attention over all keys from attention over splits of them: ``out = sum_i exp(lse_i - lse) * out_i``.

    The result is exact for splits of any lengths: over devices, calls or pages, or into keys
    that many queries share and keys that they do not share.

    Parameters
    ----------
    outs : sequence of array
        The outs that `FlashAttention.forward` returned for the splits: of one shape, dtype and library.
    lses : sequence of array
        One for each out: (..., num_heads, seqlen_q), float32 (float64 for float64). If the lse of a row is -inf,
        because the row attends to no key of the split, the split has no weight in this row, whatever its out is.
    layout : {"bhsd", "bshd"}, default "bhsd"
        The layout of the outs.

    Returns
    -------
    MergeResult
        ``out`` and ``lse``, arrays of the same shapes, dtypes and library. A row that attends to no key of any split
        has out = 0 and lse = -inf. Sums are in the dtype of lse, over the splits in order, so they are bitwise
        repeatable.

    Raises
    ------
    TypeError, ValueError, ImportError
        As `FlashAttention.forward` does; messages call the second out ``outs[1]``.

    Notes
    -----
    Give a learnable sink to `FlashAttention.forward` for one of the splits only.

    lse is all that says what a split weighs, and it is rounded: in rows of large lse the weights of splits have the
    error of half a unit in its last place, 2^-10 at an lse of 3e4 in float32, and at -1e9, as where a finite mask hides
    all keys, n splits weigh 1 each. `ContextParallel` and streamed keys, which have the keys, weigh their splits
    exactly.

    References
    ----------
    Milakov, Gimelshein: Online normalizer calculation for softmax (2018), https://arxiv.org/abs/1805.02867, section 3.
    Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference (2023),
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
    names = _names_of(outs, lses)
    given = dict(zip(names, (*outs, *lses), strict=True))
    imported = array_imports.import_arguments(given, required=names)
    arrays = imported.arrays
    partials, partial_lses = ([arrays[name] for name in names[i : i + len(outs)]] for i in (0, len(outs)))
    rows = _check_partials(arrays, names[0], layout)
    with _device_of(arrays) as xp, np.errstate(all="ignore"):
        out, lse = (xp.empty(x.shape, x.dtype) for x in (partials[0], partial_lses[0]))
        merge_into(partials, [rows.in_order(x) for x in partial_lses], out, rows.in_order(lse))
    return MergeResult(*(imported.export(x, None) for x in (out, lse)))


def _merged(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """out and lse of all splits, in the dtype of lse."""
    largest = functools.reduce(np.maximum, lses)
    largest = np.where(largest == -np.inf, np.zeros_like(largest), largest)
    weights = [np.exp(partial_lse - largest) for partial_lse in lses]
    total = sum(weights)
    lse = largest + np.log(total)
    total = np.where(total == 0, 1, total)
    out = sum(
        np.where(weight[..., None] == 0, 0, (weight / total)[..., None] * x.astype(lse.dtype))
        for x, weight in zip(outs, weights, strict=True)
    )
    return out, lse


def merge_into(
    outs: Sequence[Array],
    lses: Sequence[Array],
    out: Array,
    lse: Array,
    sums: Sequence[Array | None] = (),
) -> None:
    """Merge partial results in the dtype of lse and layout "bhsd", on a device in one pass over memory; out may have
    any dtype.

    `sums` are the row sums of splits in which lse of some row is large (`cuflash.spec.row_sums`). `lses` may be pairs
    of lse and what its rounding leaves, on a last axis, as kernels store them.
    """
    has_pairs = lses[0].ndim > lse.ndim
    if has_pairs and isinstance(out, np.ndarray):  # in tests
        lses, sums = [x[..., 0] for x in lses], [row_sums.of_pairs(x) for x in lses]
    if isinstance(out, np.ndarray):
        with np.errstate(all="ignore"):
            out[...], lse[...] = _merged(outs, lses)
            if any(x is not None for x in sums):
                _merge_large(outs, lses, out, lse, sums)
        return
    merging.merge(out, lse, outs, lses)


def _merge_large(
    outs: Sequence[Array], lses: Sequence[Array], out: Array, lse: Array, sums: Sequence[Array | None]
) -> None:
    """Merge the rows again in which the lse of some split is large."""
    rows = np.logical_or.reduce([row_sums.is_large(x) for x in lses])
    rows &= np.logical_and.reduce([x < np.inf for x in lses])  # other ones are infinite, or NaN
    partials = [
        row_sums.of_partial(None if own is None else own[rows], x[rows]) for own, x in zip(sums, lses, strict=True)
    ]
    found, weights = row_sums.merged(partials)
    out[rows] = sum(_weighted(weight, x[rows]) for weight, x in zip(weights, outs, strict=True))
    lse[rows] = row_sums.lse_of(found)


def _weighted(weights: Array, out: Array) -> Array:
    """A weighted partial output, in float64; one without weight counts for nothing, whatever it is."""
    return np.where(weights[..., None] == 0, 0, weights[..., None] * out)


def merge_backward(
    dout: Array,
    outs: Sequence[Array],
    lses: Sequence[Array],
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
) -> MergeGradients:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` with respect to the arguments of `merge`.

    They are what `FlashAttention.backward` of each split takes as dout and dlse::

        douts[i] = w[i] * dout
        dlses[i] = w[i] * (rowsum(dout * (outs[i] - out)) + dlse)       with w[i] = exp(lses[i] - lse)

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
    layout : {"bhsd", "bshd"}, default "bhsd"
        The layout of dout, the outs and out.

    Returns
    -------
    MergeGradients
        ``douts`` and ``dlses``, tuples of arrays like outs and lses. They are 0 where the lse of a split is -inf.

    Raises
    ------
    TypeError, ValueError, ImportError
        As `merge` does.

    Notes
    -----
    In rows of large lse, weights of splits have the error that `merge` has.

    If the splits are just the keys of one problem, there is a shorter way: `FlashAttention.backward` of each one with
    the merged out and lse, and the unchanged dout, gives dk and dv of that split, and its partial dq.

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
    names = _names_of(outs, lses)
    given = {"dout": dout, **dict(zip(names, (*outs, *lses), strict=True)), "out": out, "lse": lse, "dlse": dlse}
    imported = array_imports.import_arguments(given, required=[name for name in given if name != "dlse"])
    arrays = {name: x for name, x in imported.arrays.items() if x is not None}
    rows = _check_partials(arrays, "out", layout)
    partials, partial_lses = ([arrays[name] for name in names[i : i + len(outs)]] for i in (0, len(outs)))
    douts, dlses = [], []
    with _device_of(arrays) as xp, np.errstate(all="ignore"):
        dout, out, lse = arrays["dout"], arrays["out"], arrays["lse"]
        dlse = arrays.get("dlse")
        for x, partial_lse in zip(partials, partial_lses, strict=True):
            own = xp.empty(x.shape, x.dtype), xp.empty(lse.shape, lse.dtype)
            of_rows = [None if row is None else rows.in_order(row) for row in (own[1], partial_lse, lse, dlse)]
            _merge_backward(own[0], of_rows[0], dout, x, out, *of_rows[1:])
            douts.append(own[0])
            dlses.append(own[1])
    return MergeGradients(*(tuple(imported.export(x, None) for x in of_splits) for of_splits in (douts, dlses)))


def _merge_backward(
    own_dout: Array, own_dlse: Array, dout: Array, own_out: Array, out: Array, own_lse: Array, lse: Array, dlse: Any
) -> None:
    """Fill the gradients of one split, whose lse and gradient have the order of axes of out."""
    if not isinstance(out, np.ndarray):
        merging.merge_backward(own_dout, own_dlse, dout, own_out, out, own_lse, lse, dlse)
        return
    weight = np.where(own_lse == -np.inf, 0, np.exp(own_lse - lse))
    wide = [x.astype(lse.dtype) for x in (dout, out, own_out)]
    delta = (wide[0] * wide[1]).sum(axis=-1)
    own_dout[...] = np.where(weight[..., None] == 0, 0, weight[..., None] * wide[0])
    # The sum takes the rounded gradient, so that delta of the split, which is the same number, cancels it.
    found = (own_dout.astype(lse.dtype) * wide[2]).sum(axis=-1) - weight * delta
    own_dlse[...] = np.where(weight == 0, 0, found if dlse is None else found + weight * dlse)


class RunningMerge:
    """Merges partial results one after the other, as they come: the same sums as in `merge`, in their order.

    Parameters
    ----------
    total : array
        (batch, num_heads, seqlen_q, head_dim_v), dtype of lse, any content: the array in which partial outputs are
        added.
    scores : sequence of array, optional
        (num_heads,) each, dtype of lse: scores of additional keys that every row attends to, and whose values are zero.
    """

    def __init__(self, total: Array, scores: Sequence[Array] = ()) -> None:
        self.total = total
        self.xp = dlpack.module_of(total)
        self.largest = self.xp.full(total.shape[:3], -np.inf, total.dtype)  # of all lse up to here
        self.weight = self.xp.zeros(total.shape[:3], total.dtype)  # the sum of exp(lse - largest)
        total[...] = 0
        for of_heads in scores:
            lse = self.xp.empty_like(self.largest)
            lse[...] = of_heads[:, None]
            self._weigh(slice(None), lse)

    def add(self, out: Array, lse: Array, rows: slice) -> None:
        """Add a partial result of some rows, in the dtype of lse."""
        total = self.total[:, :, rows]
        factor, own_factor = (x[..., None] for x in self._weigh(rows, lse))
        if self.xp is not np:
            merging.rescale_and_add(total, out, factor[..., 0], own_factor[..., 0])
            return
        with np.errstate(all="ignore"):
            total *= factor
            total += np.where(own_factor == 0, 0, own_factor * out)

    def _weigh(self, rows: slice, lse: Array) -> tuple[Array, Array]:
        """Take a partial lse into account; returns the factors of the sum so far, and of the partial output."""
        largest, weight = self.largest[:, :, rows], self.weight[:, :, rows]
        if self.xp is not np:
            factor, own_factor = self.xp.empty_like(lse), self.xp.empty_like(lse)
            merging.softmax_step(largest, weight, factor, own_factor, lse)
            return factor, own_factor
        with np.errstate(all="ignore"):
            top = np.maximum(largest, lse)
            offset = np.where(top == -np.inf, 0, top)
            factor, own_factor = np.exp(largest - offset), np.exp(lse - offset)
            largest[...], weight[...] = top, weight * factor + own_factor
        return factor, own_factor

    def finish(self, out: Array, lse: Array) -> None:
        """Write the merged results: out has the shape of total and any dtype, lse lacks the last axis."""
        if self.xp is not np:
            merging.normalize(out, lse, self.total, self.largest, self.weight)
            return
        with np.errstate(all="ignore"):
            lse[...] = self.largest + np.log(self.weight)
            self.weight[self.weight == 0] = 1
            np.divide(self.total, self.weight[..., None], out=self.total)
        if out is not self.total:
            out[...] = self.total


class LargeRows:
    """Merges partial results once more, in the rows whose merged lse is large, as they come.

    Parameters
    ----------
    lse : array
        (batch, num_heads, seqlen_q): that of all splits.
    bound : float
        From which |lse| on rows are large.
    head_dim_v : int
    scores : sequence of array, optional
        As `RunningMerge` takes them.

    Such rows are rare, so that all of this is in host memory.
    """

    def __init__(self, lse: Array, bound: float, head_dim_v: int, scores: Sequence[Array] = ()) -> None:
        lse = dlpack.on_host(lse)
        self.is_large = row_sums.is_large(lse, bound)
        self.total = np.zeros((*lse.shape, head_dim_v))
        self.sums = row_sums.to_fill(lse, bound)
        for of_heads in scores:
            self.sums = row_sums.with_score(self.sums, dlpack.on_host(of_heads))

    def add(self, sums: Array, rows: slice, out: Array | None = None) -> None:
        """Add a partial result of some rows: the row sums that it has of large rows, and its out."""
        large = self.is_large[:, :, rows]
        so_far, total = self.sums[:, :, rows], self.total[:, :, rows]
        found, (factor, weight) = row_sums.merged([so_far[large], sums[large]])
        so_far[large] = found
        if out is not None:
            total[large] = _weighted(factor, total[large]) + _weighted(weight, dlpack.on_host(out)[large])

    def finish(self, out: Array, lse: Array) -> None:
        """Write these rows to the merged results."""
        for target, found in ((out, self.total), (lse, row_sums.lse_of(self.sums))):
            wide = dlpack.on_host(target.astype(lse.dtype))
            wide[self.is_large] = found[self.is_large]
            target[...] = dlpack.module_of(target).asarray(wide)


class _Rows(NamedTuple):
    """Arrays over rows, as lse, in the order of axes of arrays over rows and columns, as out."""

    swapped: bool  # out is (..., seqlen, heads, dim), lse (..., heads, seqlen)

    def in_order(self, rows: Array) -> Array:
        """A view whose axes are those of out but for the last one."""
        return rows.swapaxes(-1, -2) if self.swapped else rows


def _names_of(outs: Sequence[Array], lses: Sequence[Array]) -> list[str]:
    """What error messages call the partial results: ``outs[0]``, ..., ``lses[0]``, ..."""
    for name, arrays in (("outs", outs), ("lses", lses)):
        if not isinstance(arrays, (list, tuple)):
            raise type_error(name, type(arrays).__name__, "a list or tuple of arrays")
    if not outs:
        raise value_error("outs", "no array", "at least one")
    if len(lses) != len(outs):
        raise value_error("lses", f"{len(lses)} arrays", f"{len(outs)}, one for each of outs")
    return [f"{name}[{i}]" for name in ("outs", "lses") for i in range(len(outs))]


def _check_partials(arrays: dict[str, Any], like: str, layout: str) -> _Rows:
    """Check arrays by name against the one named `like`, an out, from which all shapes follow."""
    check_choice("layout", layout, LAYOUTS)
    dtype, shape = arrays[like].dtype.name, tuple(arrays[like].shape)
    if dtype not in DTYPES:
        raise type_error(like, f"dtype {dtype}", "float16, bfloat16, float32 or float64")
    if len(shape) < 2:
        raise value_error(like, f"{len(shape)}-D shape {shape}", "an array of two axes or more")
    if not shape[-1]:
        raise value_error(like, "last axis of length 0", "a head dimension of at least 1")
    rows = _Rows(swapped=layout == "bshd" and len(shape) >= 3)
    lse_shape = (*shape[:-3], shape[-2], shape[-3]) if rows.swapped else shape[:-1]
    lse_dtype = "float64" if dtype == "float64" else "float32"
    for name, x in arrays.items():
        check_array(name, x, *((lse_shape, lse_dtype) if "lse" in name else (shape, dtype)))
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
