"""Partial results of splits of the keys: the formulas that merge them, all at once or as they come, and gradients.

Split i of the keys has out_i and lse_i; its fraction of the row sum of all keys is ``exp(lse_i - lse)``. So

    lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i

which is the step of online softmax (Milakov and Gimelshein 2018) for any number of splits, in any order. Tangents of
the results of splits are merged by the derivative of this, with w_i = exp(lse_i - lse):

    tlse = sum_i w_i tlse_i,    tout = sum_i w_i (tout_i + (tlse_i - tlse) out_i)

Arrays of NumPy are merged by these formulas, arrays of CuPy by kernels/helpers/merge.cu.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cuflash.arrays import dlpack
from cuflash.gpu import merging
from cuflash.gpu.merging import Tangents
from cuflash.shards.reductions import entropy_of
from cuflash.spec import row_sums

Array = Any  # of NumPy or CuPy


def _fractions(lses: Sequence[Array]) -> tuple[list[Array], Array]:
    """The fraction of the row sum that each split has, and lse of all splits, in the dtype of lse."""
    largest = functools.reduce(np.maximum, lses)
    largest = np.where(largest == -np.inf, np.zeros_like(largest), largest)
    weights = [np.exp(partial_lse - largest) for partial_lse in lses]
    total = sum(weights)
    lse = largest + np.log(total)
    total = np.where(total == 0, 1, total)
    return [weight / total for weight in weights], lse


def _weighted_sum(fractions: Sequence[Array], partials: Iterable[Array]) -> Array:
    """The sum of partial results by their fractions."""
    return sum(_weighted(fraction, x) for fraction, x in zip(fractions, partials, strict=True))


def _weighted(fraction: Array, partial: Array) -> Array:
    """A weighted partial result; one without weight counts for nothing, whatever it is."""
    fraction = fraction if fraction.ndim == partial.ndim else fraction[..., None]
    return np.where(fraction == 0, 0, fraction * partial)


def _tangents_of(
    fractions: Sequence[Array], outs: Sequence[Array], tangents: Tangents, dtype: Any
) -> tuple[Array, ...]:
    """tout and tlse of all splits, in a dtype of sums."""
    tlses = [x.astype(dtype, copy=False) for x in tangents.tlses]
    tlse = _weighted_sum(fractions, tlses)
    moved_outs = (
        tout.astype(dtype) + (split_tlse - tlse)[..., None] * out.astype(dtype)
        for tout, split_tlse, out in zip(tangents.touts, tlses, outs, strict=True)
    )
    return _weighted_sum(fractions, moved_outs), tlse


def merge_into(
    outs: Sequence[Array],
    lses: Sequence[Array],
    out: Array,
    lse: Array,
    sums: Sequence[Array | None] = (),
    tangents: Tangents | None = None,
) -> None:
    """Merge partial results in the dtype of lse and layout "bhsd"; out may have any dtype.

    On a device this is one pass over memory. `sums` are the row sums of splits in which lse of some row is large
    (`cuflash.spec.row_sums`). `lses` may be pairs of lse and what its rounding leaves, on a last axis, as kernels store
    them.
    """
    has_pairs = lses[0].ndim > lse.ndim
    if has_pairs and isinstance(out, np.ndarray):  # in tests
        lses, sums = [x[..., 0] for x in lses], [row_sums.of_pairs(x) for x in lses]
    if isinstance(out, np.ndarray):
        with np.errstate(all="ignore"):
            fractions, lse[...] = _fractions(lses)
            out[...] = _weighted_sum(fractions, (x.astype(lse.dtype) for x in outs))
            if tangents is not None:
                tangents.tout[...], tangents.tlse[...] = _tangents_of(fractions, outs, tangents, lse.dtype)
            if any(x is not None for x in sums):
                _merge_large(outs, lses, out, lse, sums, tangents)
        return
    merging.merge(out, lse, outs, lses, tangents)


def _merge_large(
    outs: Sequence[Array],
    lses: Sequence[Array],
    out: Array,
    lse: Array,
    sums: Sequence[Array | None],
    tangents: Tangents | None,
) -> None:
    """Merge the rows again in which the lse of some split is large."""
    rows, merged_sums, weights = _large_rows(lses, sums)
    outs = [x[rows] for x in outs]
    out[rows] = _weighted_sum(weights, outs)
    lse[rows] = row_sums.lse_of(merged_sums)
    if tangents is not None:
        of_rows = Tangents(*tangents[:2], *([x[rows] for x in splits] for splits in tangents[2:]))
        tangents.tout[rows], tangents.tlse[rows] = _tangents_of(weights, outs, of_rows, np.float64)


def merge_large_entropies(
    entropies: Sequence[Array], lses: Sequence[Array], sums: Sequence[Array | None], entropy: Array
) -> None:
    """Merge entropies in the rows in which the lse of some split is large, by the row sums of splits."""
    with np.errstate(all="ignore"):
        rows, _, fractions = _large_rows(lses, sums)
        entropy[rows] = entropy_of(fractions, [x[rows] for x in entropies])


def _large_rows(lses: Sequence[Array], sums: Sequence[Array | None]) -> tuple[Array, Array, list[Array]]:
    """The rows in which the lse of some split is large, their row sums, and the fractions of splits."""
    rows = np.logical_or.reduce([row_sums.is_large(x) for x in lses])
    rows &= np.logical_and.reduce([x < np.inf for x in lses])  # other ones are infinite, or NaN
    partials = [
        row_sums.of_partial(None if split_sums is None else split_sums[rows], x[rows])
        for split_sums, x in zip(sums, lses, strict=True)
    ]
    return rows, *row_sums.merged(partials)


def merge_backward_into(
    split_dout: Array,
    split_dlse: Array,
    dout: Array,
    split_out: Array,
    out: Array,
    split_lse: Array,
    lse: Array,
    dlse: Array | None,
) -> None:
    """Fill the gradients of one split, whose lse and gradient have the order of axes of out."""
    if not isinstance(out, np.ndarray):
        merging.merge_backward(split_dout, split_dlse, dout, split_out, out, split_lse, lse, dlse)
        return
    weight = np.where(split_lse == -np.inf, 0, np.exp(split_lse - lse))
    dout, out, split_out = (x.astype(lse.dtype) for x in (dout, out, split_out))
    delta = (dout * out).sum(axis=-1)
    split_dout[...] = np.where(weight[..., None] == 0, 0, weight[..., None] * dout)
    # The sum takes the rounded gradient, so that delta of the split, which is the same number, cancels it.
    by_lse = (split_dout.astype(lse.dtype) * split_out).sum(axis=-1) - weight * delta
    split_dlse[...] = np.where(weight == 0, 0, by_lse if dlse is None else by_lse + weight * dlse)


def merge_backward_tangents_into(
    targets: Sequence[Array], partials: Sequence[Array], merged: Mapping[str, Array]
) -> None:
    """Fill the tangents of what `merge_backward_into` filled: the last two of `targets`, whose first one is read.

    `partials` are out, lse, tout and tlse of a split, `merged` arrays of all splits by name.
    """
    split_dout, _, split_tdout, split_tdlse = targets
    split_out, split_lse, split_tout, split_tlse = partials
    lse, tlse, optional = merged["lse"], merged["tlse"], [merged.get(name) for name in ("dlse", "tdlse", "tdout")]
    if not isinstance(lse, np.ndarray):
        outs = (merged["dout"], split_out, merged["out"], split_tout, merged["tout"])
        merging.merge_backward_tangents(split_tdout, split_tdlse, (*outs, split_lse, lse, split_tlse, tlse), *optional)
        return
    dlse, tdlse, tdout = (np.zeros(1, lse.dtype) if x is None else x.astype(lse.dtype) for x in optional)
    dout, out, tout = (merged[name].astype(lse.dtype) for name in ("dout", "out", "tout"))
    split_out, split_tout, rounded_dout = (x.astype(lse.dtype) for x in (split_out, split_tout, split_dout))
    weight = np.where(split_lse == -np.inf, 0, np.exp(split_lse - lse))
    moved = np.where(weight == 0, 0, weight * (split_tlse - tlse))  # the tangent of the weight
    split_tdout[...] = np.where(weight[..., None] == 0, 0, moved[..., None] * dout + weight[..., None] * tdout)
    delta = (dout * out).sum(axis=-1) - dlse
    tdelta = (dout * tout + tdout * out).sum(axis=-1) - tdlse
    by_lse = (rounded_dout * split_tout + split_tdout.astype(lse.dtype) * split_out).sum(axis=-1)
    split_tdlse[...] = np.where(weight == 0, 0, by_lse - moved * delta - weight * tdelta)


class RunningMerge:
    """Merges partial results one after the other, as they come: the same sums as in `merge`, in their order.

    Partial outputs are added in `total`, (batch, num_heads, seqlen_q, head_dim_v) of the dtype of lse, and their
    tangents, if results come with some, in `tangent`: sums about the tangent of lse so far, which moves with each
    partial result. `scores` are those, (num_heads,) each, of additional keys that every row attends to, and whose
    values are zero; and their tangents.
    """

    def __init__(
        self, total: Array, scores: Sequence[tuple[Array, Array | None]] = (), tangent: Array | None = None
    ) -> None:
        self.total, self.tangent = total, tangent
        self.xp = dlpack.module_of(total)
        self.largest = self.xp.full(total.shape[:3], -np.inf, total.dtype)  # of all lse up to here
        self.weight = self.xp.zeros(total.shape[:3], total.dtype)  # the sum of exp(lse - largest)
        self.mean = None if tangent is None else self.xp.zeros(total.shape[:3], total.dtype)  # the tangent of lse
        total[...] = 0
        if tangent is not None:
            tangent[...] = 0
        for of_heads, of_tangent in scores:
            rows = [self.xp.zeros(total.shape[:3], total.dtype) for _ in ("lse", "tlse")]
            rows[0][...] = of_heads[:, None]
            if of_tangent is not None:
                rows[1][...] = of_tangent[:, None]
            self._weigh(slice(None), *rows[: 1 if tangent is None else 2])

    def add(self, out: Array, lse: Array, rows: slice, tout: Array | None = None, tlse: Array | None = None) -> None:
        """Add a partial result of some rows, in the dtype of lse."""
        total = self.total[:, :, rows]
        factor, split_factor, *shifts = self._weigh(rows, lse, *([] if tlse is None else [tlse]))
        tangent = None if self.tangent is None else self.tangent[:, :, rows]
        if self.xp is not np:
            merging.rescale_and_add(total, out, factor, split_factor, (tangent, tout, *shifts) if shifts else ())
            return
        factor, split_factor, *shifts = (x[..., None] for x in (factor, split_factor, *shifts))
        with np.errstate(all="ignore"):
            if tangent is not None:
                tangent += shifts[0] * total
                tangent *= factor
                tangent += np.where(split_factor == 0, 0, split_factor * (tout + shifts[1] * out))
            total *= factor
            total += np.where(split_factor == 0, 0, split_factor * out)

    def _weigh(self, rows: slice, lse: Array, *tlse: Array) -> tuple[Array, ...]:
        """Take a partial lse into account; returns the factors of the sum so far, and of the partial output.

        With its tangent, returns how far the tangents of lse so far, and of the partial one, lie above the new one.
        """
        largest, weight = self.largest[:, :, rows], self.weight[:, :, rows]
        mean = None if self.mean is None else self.mean[:, :, rows]
        if self.xp is not np:
            filled = tuple(self.xp.empty_like(lse) for _ in range(2 + 2 * len(tlse)))
            of_tangents = (mean, *filled[2:], *tlse) if tlse else ()
            merging.softmax_step(largest, weight, filled[0], filled[1], lse, of_tangents)
            return filled
        with np.errstate(all="ignore"):
            new_largest = np.maximum(largest, lse)
            offset = np.where(new_largest == -np.inf, 0, new_largest)
            factor, split_factor = np.exp(largest - offset), np.exp(lse - offset)
            largest[...], weight[...] = new_largest, weight * factor + split_factor
            if mean is None:
                return factor, split_factor
            new_mean = mean + np.where(split_factor == 0, 0, split_factor / weight * (tlse[0] - mean))
            shifts = mean - new_mean, tlse[0] - new_mean
            mean[...] = new_mean
        return factor, split_factor, *shifts

    def finish(self, out: Array, lse: Array, tout: Array | None = None, tlse: Array | None = None) -> None:
        """Write the merged results: out has the shape of total and any dtype, lse lacks the last axis."""
        pairs = [(out, self.total)] if self.tangent is None else [(out, self.total), (tout, self.tangent)]
        if tlse is not None:
            tlse[...] = self.mean
        if self.xp is not np:
            for result, total in pairs:
                merging.normalize(result, lse, total, self.largest, self.weight)
            return
        with np.errstate(all="ignore"):
            lse[...] = self.largest + np.log(self.weight)
            self.weight[self.weight == 0] = 1
            for result, total in pairs:
                np.divide(total, self.weight[..., None], out=total)
                if result is not total:
                    result[...] = total


class LargeRows:
    """Merges partial results once more, in the rows whose merged lse is large, as they come.

    `lse` is that of all splits, `bound` that from which |lse| on rows are large; `scores` are as `RunningMerge` takes
    them. Such rows are rare, so that all of this is in host memory.
    """

    def __init__(
        self, lse: Array, bound: float, head_dim_v: int, scores: Sequence[tuple[Array, Array | None]] = ()
    ) -> None:
        lse = dlpack.on_host(lse)
        self.is_large = row_sums.is_large(lse, bound)
        self.total, self.tangent = np.zeros((*lse.shape, head_dim_v)), np.zeros((*lse.shape, head_dim_v))
        self.mean = np.zeros(lse.shape)  # the tangent of lse
        self.entropy = np.zeros(lse.shape)
        self.sums = row_sums.to_fill(lse, bound)
        for of_heads, tangent in scores:
            self.sums = row_sums.with_score(self.sums, dlpack.on_host(of_heads))
            if tangent is not None:
                self.mean[...] = dlpack.on_host(tangent)[:, None]

    def add(
        self,
        sums: Array,
        rows: slice,
        out: Array | None = None,
        tout: Array | None = None,
        tlse: Array | None = None,
        entropy: Array | None = None,
    ) -> None:
        """Add a partial result of some rows: the row sums that it has of large rows, and its results."""
        large = self.is_large[:, :, rows]
        so_far = self.sums[:, :, rows]
        merged, fractions = row_sums.merged([so_far[large], sums[large]])
        so_far[large] = merged
        if out is None:
            return
        if entropy is not None:
            entropies = self.entropy[:, :, rows][large], dlpack.on_host(entropy)[large]
            self.entropy[:, :, rows][large] = entropy_of(fractions, entropies)
        outs = self.total[:, :, rows][large], dlpack.on_host(out)[large].astype(np.float64)
        if tout is not None:
            tlses = self.mean[:, :, rows][large], dlpack.on_host(tlse)[large]
            touts = self.tangent[:, :, rows][large], dlpack.on_host(tout)[large]
            tangents = Tangents(self.tangent[:, :, rows], self.mean[:, :, rows], touts, tlses)
            tangents.tout[large], tangents.tlse[large] = _tangents_of(fractions, outs, tangents, np.float64)
        self.total[:, :, rows][large] = _weighted_sum(fractions, outs)

    def finish(self, **results: Array) -> None:
        """Write these rows to the merged results: out, lse, and the others that there are."""
        lse = results["lse"]
        large = {"out": self.total, "lse": row_sums.lse_of(self.sums), "tout": self.tangent, "tlse": self.mean}
        large["entropy"] = self.entropy
        for name, target in results.items():
            values = large[name]
            wide = dlpack.on_host(target.astype(lse.dtype))
            wide[self.is_large] = values[self.is_large]
            target[...] = dlpack.module_of(target).asarray(wide)
