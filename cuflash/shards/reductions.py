"""Reductions over splits of the keys: maxima and entropies of rows, and the strongest keys, merged as they come.

With the weights u_i = exp(lse_i - largest) of splits, whose sum is W, the entropy of all keys is by the chain rule

    H = sum_i u_i / W (H_i - log(u_i / W)) = E / W + log W,    E = sum_i u_i (H_i - log u_i)

where no term is below 0, so that nothing cancels. A sink is a split of one key, whose entropy is 0.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.memory_ranges import Span
from cuflash.gpu.elementwise import apply, assign
from cuflash.spec.outputs import BY_NAME, ROW_REDUCTIONS

Array = Any


class RunningReductions:
    """Merges the row reductions of splits, one after the other.

    Of the `results` of a call by name, "max" and "entropy", (batch, num_heads, seqlen_q), are filled. `sinks` are
    scores, (num_heads,) each, of additional keys that every row attends to, which count for entropies alone.
    """

    def __init__(self, results: Mapping[str, Array], sinks: Iterable[Array] = ()) -> None:
        self.results = {name: x for name, x in results.items() if name in ROW_REDUCTIONS}
        for name, x in self.results.items():
            assign(x, BY_NAME[name].of_no_keys)
        if "entropy" not in self.results:
            return
        moment = self.results["entropy"]  # E, until `finish`
        xp = dlpack.module_of(moment)
        # The largest lse of splits so far, what its rounding leaves, W, and E.
        self.sums = (*(xp.empty(moment.shape, moment.dtype) for _ in range(3)), moment)
        for x, number in zip(self.sums[:3], (-np.inf, 0, 0), strict=True):
            assign(x, number)
        for of_heads in sinks:
            rows, zeros = (xp.empty(moment.shape, moment.dtype) for _ in range(2))
            assign(rows, xp.broadcast_to(of_heads[:, None], moment.shape))
            assign(zeros, 0)
            self._add_entropy(rows, zeros, zeros, self.sums)

    def add(self, split: Mapping[str, Array], rows: slice = slice(None)) -> None:
        """Take a split of the keys into account, for some rows.

        Its results are in the dtype of the softmax: lse, or "lse_pairs" of it and what its rounding leaves, and those
        reductions that are wanted.
        """
        add = {"max": self._add_max, "entropy": self._add_entropy_of}
        for name in self.results:
            add[name](split, rows)

    def finish(self) -> None:
        """Write the reductions of all splits to the results."""
        if "entropy" not in self.results:
            return
        *_, weight, moment = self.sums
        if dlpack.module_of(moment) is np:
            with np.errstate(all="ignore"):
                moment[...] = np.where(weight == 0, 0, moment / weight + np.log(weight))
        else:
            apply(_kernel("finish", moment.dtype.name), (weight,), (moment,))

    def _add_max(self, split: Mapping[str, Array], rows: slice) -> None:
        split_max, total = split["max"], self.results["max"][:, :, rows]
        if dlpack.module_of(total) is np:
            np.maximum(total, split_max, out=total)
        else:
            apply(_kernel("max", total.dtype.name), (split_max,), (total,))

    def _add_entropy_of(self, split: Mapping[str, Array], rows: slice) -> None:
        pairs = split.get("lse_pairs")
        lse = split["lse"] if pairs is None else pairs[..., 0]
        if pairs is None:
            rest = dlpack.module_of(lse).empty(lse.shape, lse.dtype)
            assign(rest, 0)
        else:
            rest = pairs[..., 1]
        self._add_entropy(lse, rest, split["entropy"], [x[:, :, rows] for x in self.sums])

    def _add_entropy(self, lse: Array, rest: Array, split_entropy: Array, sums: Sequence[Array]) -> None:
        largest, largest_rest, weight, moment = sums
        if dlpack.module_of(moment) is not np:
            apply(_kernel("entropy", moment.dtype.name), (lse, rest, split_entropy), sums)
            return
        with np.errstate(all="ignore"):
            distance = np.where(largest == -np.inf, np.inf, (lse - largest) + (rest - largest_rest))
            is_empty, is_above = lse == -np.inf, distance > 0
            factor = np.where(is_above, np.exp(-distance), 1)
            moved = np.where(factor == 0, 0, factor * (moment + np.where(is_above, distance, 0) * weight))
            split_factor = np.where(is_above, 1, np.exp(distance))
            split_moment = np.where(
                split_factor == 0, 0, split_factor * (split_entropy - np.where(is_above, 0, distance))
            )
            np.copyto(moment, moved + split_moment, where=~is_empty)
            np.copyto(weight, factor * weight + split_factor, where=~is_empty)
            np.copyto(largest, lse, where=is_above & ~is_empty)
            np.copyto(largest_rest, rest, where=is_above & ~is_empty)


def entropy_of(fractions: Sequence[Array], entropies: Sequence[Array]) -> Array:
    """The entropy of all keys from those of splits, and their fractions of the row sum."""
    return sum(
        np.where(fraction == 0, 0, fraction * (entropy - np.log(np.where(fraction == 0, 1, fraction))))
        for fraction, entropy in zip(fractions, entropies, strict=True)
    )


def max_backward(split_dmax: Array, left: Array, split_max: Array, largest: Array) -> None:
    """Fill the gradient of the maxima of a split with what earlier splits left of that of the `largest` ones."""
    if dlpack.module_of(left) is not np:
        apply(_kernel("max_backward", left.dtype.name), (split_max, largest), (left, split_dmax))
        return
    has_it = (split_max == largest) & (largest != -np.inf)
    split_dmax[...] = np.where(has_it, left, 0)
    left[has_it] = 0


def entropy_backward(
    split_dentropy: Array,
    split_dlse: Array,
    split_entropy: Array,
    split_lse: Array,
    entropy: Array,
    lse: Array,
    dentropy: Array,
) -> None:
    """Fill the gradient of the entropies of a split, and add to that of its lse, by that of all entropies.

    With the weight w_i of a split, these are w_i dentropy and w_i dentropy (H_i - log w_i - H).
    """
    if dlpack.module_of(lse) is not np:
        reads = (split_entropy, split_lse, entropy, lse, dentropy)
        apply(_kernel("entropy_backward", lse.dtype.name), reads, (split_dentropy, split_dlse))
        return
    weight = np.where(split_lse == -np.inf, 0, np.exp(split_lse - lse))
    split_dentropy[...] = np.where(weight == 0, 0, weight * dentropy)
    split_dlse += np.where(weight == 0, 0, split_dentropy * (split_entropy - (split_lse - lse) - entropy))


# Arguments and code of kernels: what they read, and what they read and write. LOWEST is the least finite number.
_KERNELS = {
    "max": ("T split", "T total", "if (split > total || split != split) total = split;"),
    "sum": ("T split", "T total", "total += split;"),
    "entropy": (
        "T lse, T rest, T split",
        "T largest, T largest_rest, T weight, T moment",
        """if (!(lse < LOWEST)) {
          const T distance = (lse - largest) + (rest - largest_rest);
          if (largest < LOWEST) {
            largest = lse, largest_rest = rest, weight = 1, moment = split;
          } else if (distance > 0) {
            const T factor = exp(-distance);
            moment = factor * (moment + distance * weight) + split, weight = factor * weight + 1;
            largest = lse, largest_rest = rest;
          } else {
            const T factor = exp(distance);
            if (!(factor == 0)) moment += factor * (split - distance);
            weight += factor;
          }
        }""",
    ),
    "max_backward": (
        "T split, T largest",
        "T left, T result",
        """const bool has_it = split == largest && !(largest < LOWEST);
        result = has_it ? left : (T)0;
        if (has_it) left = 0;""",
    ),
    "entropy_backward": (
        "T split, T split_lse, T entropy, T lse, T upstream",
        "T result, T dlse",
        """const T log_weight = split_lse < LOWEST ? split_lse : split_lse - lse, weight = exp(log_weight);
        result = weight == 0 ? (T)0 : weight * upstream;
        if (!(weight == 0)) dlse += result * (split - log_weight - entropy);""",
    ),
    "finish": ("T weight", "T moment", "moment = weight == 0 ? (T)0 : moment / weight + log(weight);"),
}


@functools.lru_cache(maxsize=16)
def _kernel(name: str, dtype: str) -> Any:
    lowest = repr(float(np.finfo(dtype).min))
    reads, writes, code = (x.replace("LOWEST", lowest) for x in _KERNELS[name])
    return importlib.import_module("cupy").ElementwiseKernel(reads, writes, code, f"cuflash_reduce_{name}")


def merge_top_keys(indices: Array, weights: Array, split_indices: Array, split_weights: Array) -> None:
    """Take the strongest keys of a split into account, in place; indices are those of all keys.

    Of equal weights the lower index comes first.
    """
    xp, count = dlpack.module_of(weights), weights.shape[-1]
    every = xp.concatenate([indices, split_indices], axis=-1)
    both = xp.concatenate([weights, split_weights], axis=-1)
    by_index = xp.argsort(every, axis=-1)
    every, both = (xp.take_along_axis(x, by_index, axis=-1) for x in (every, both))
    order = xp.argsort(xp.where(every < 0, 1, -both), axis=-1, kind="stable")[..., :count]
    indices[...] = xp.take_along_axis(every, order, axis=-1)
    weights[...] = xp.take_along_axis(both, order, axis=-1)


def indices_in(indices: Array, spans: Sequence[Span], xp: Any) -> Array:
    """The indices among all keys of those of a call, which has the keys of some spans, one after the other."""
    of_all, before = xp.where(indices < 0, -1, indices + spans[0][0]), 0
    for (start, stop), (after, _) in itertools.pairwise(spans):
        before += stop - start
        of_all = xp.where(indices >= before, indices - before + after, of_all)
    return of_all


def reduce_columns(target: Array, partials: Sequence[Array], *, is_max: bool) -> None:
    """Write the sums, or the maxima, of the columns of calls on other queries; in their order."""
    assign(target, partials[0])
    for partial in partials[1:]:
        if dlpack.module_of(target) is np:
            (np.maximum if is_max else np.add)(target, partial, out=target)
        else:
            apply(_kernel("max" if is_max else "sum", target.dtype.name), (partial,), (target,))
