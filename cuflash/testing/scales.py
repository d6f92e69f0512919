"""Of every entry of a result: its scale, the noise that rounding the scores makes of it, and whether it is zero.

Both are sums over what contributes to the entry, in the letters of `cuflash.testing.reference`: to out, lse and dq of a
row the keys that the row attends to; to dk and dv of a key the rows that attend to it; to dbias and gradients of what
functions read the pairs of a query and a key that read the entry. So a row says nothing of entries that it does not
contribute to. `cuflash.testing.Yardstick` says what is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import view_4d, view_rows
from cuflash.spec.inputs import CAPS, PER_HEAD_INPUTS
from cuflash.spec.outputs import ROW_REDUCTIONS, SOFTMAX_GRADIENTS
from cuflash.spec.problem import Problem
from cuflash.testing import reference
from cuflash.testing.case import optional, qkv

Array = NDArray[Any]

SMALLEST_WEIGHT = {"float32": 2.0**-100, "float64": 2.0**-960}  # by the dtype of the softmax
SMALLEST_SQUARED = 2.0**-500  # whose square is a normal number of float64
# Where lse of a row is at least so large, the backward pass finds the sum of its weights again and does not take it
# from lse, whose unit in the last place changes all of them. By the dtype of the inputs.
LARGE_LSE = {"float16": 1024.0, "bfloat16": 1024.0, "float32": 128.0, "float64": 128.0}
# The backward pass finds the sum again where it explains lse to so many units in the last place of lse.
EXPLAINED_UNITS = 4
# How far the offset of a row's exponents may stay below its largest score on GPUs (kMaxSum of kernels/sm90/forward.cu).
# Exponents are of that size then, and so is what rounding them moves in lse.
OFFSET_LAG = {"float16": 14 * math.log(2), "bfloat16": 32 * math.log(2), "float32": 0.0, "float64": 0.0}
# Tensor cores cut off sums of products of 16-bit numbers every so many columns. Where head dimensions are larger than
# the limit, that is more than a unit in the last place of the sum of sizes.
COLUMNS_OF_PRODUCT, CUT_OFF_DIM = 16, 256
# Units in the last place that tensor cores lose in a product of two factors of float32: each factor is two TF32 terms,
# which hold 23 of its 24 bits, and the sum of their products is cut off. Where rounding moves weights, it moves more.
LOST_IN_PRODUCTS = 3
ROUNDINGS = 4  # of two scores that are equal but for the order in which the oracle adds up their products


def ulp(dtype: Any) -> float:
    """One unit in the last place of 1."""
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


@dataclass
class Squares:
    """Sums of squares, entry by entry of a result: of the terms that it is a sum of, and of their noise."""

    terms: Array
    noise: Array

    @classmethod
    def zeros(cls, *shape: int) -> Squares:
        return cls(np.zeros(shape), np.zeros(shape))

    def add(self, at: Any, terms: Array, noise: Array) -> None:
        self.terms[at] += terms
        self.noise[at] += noise


@dataclass(frozen=True)
class Scales:
    """Of all results by name; entries of one row of head_dim columns have the same numbers, or the largest of them."""

    squares: dict[str, Squares]
    zeros: dict[str, Array]
    dv_sums: Squares | None  # of dv summed over keys: (batch, heads of k and v, 1, columns)


def scales_of(
    problem: Problem, arrays: Mapping[str, Array], expected: Mapping[str, Array], random: Mapping[str, Any]
) -> Scales:
    """The scales of results that are `expected` of NumPy `arrays`; with dropout, `random` says what is dropped."""
    collector = Collector(problem, arrays, expected)
    read = {**optional(arrays), **{name: arrays[name] for name, _ in problem.score_args}}
    if "dmax" in arrays:
        read["dmax"] = arrays["dmax"]
    q, k, v = qkv(arrays)
    for head in reference.each_head(problem, q, k, v, np.float64, **random, **read):
        with np.errstate(all="ignore"):
            collector.add(head)
    return collector.scales()


@dataclass(frozen=True)
class Noise:
    """How much rounding the scores of one head may change its weights."""

    rows: Array  # (rows, 1): of a weight, relative to it, where the weight counts in its row
    weights: Array  # (rows, keys): of each weight
    of_sink: Array  # (rows, 1): of the weight of the sink
    sums: Array  # (rows, 1): of the sum of the weights
    lse: Array  # (rows, 1)
    max: Array  # (rows, 1): a unit of itself and of the terms of scores
    entropy: Array  # (rows, 1): of itself and of the lag of row maxima, and what the noise of its weights changes in it


class Collector:
    """Adds up what contributes to every result, head by head."""

    def __init__(self, problem: Problem, arrays: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
        self.problem, self.arrays, self.expected, self.dtype = problem, arrays, expected, arrays["q"].dtype
        self.unit = ulp(problem.softmax_dtype)
        self.smallest = max(SMALLEST_WEIGHT[problem.softmax_dtype] / self.unit, SMALLEST_SQUARED)
        self.tiny = float(ml_dtypes.finfo(self.dtype).smallest_normal)  # type: ignore[no-untyped-call]
        self.out = finite(view_4d(expected["out"].astype(np.float64), problem.layout))
        of_rows = (problem.array_batch, problem.num_heads, problem.seqlen_q)
        of_keys = (problem.array_batch, problem.num_heads_kv, problem.seqlen_k)
        self.squares = {"out": Squares.zeros(*of_rows, problem.head_dim_v)}
        self.row_reductions = tuple(name for name in ROW_REDUCTIONS if name in expected)
        for name in ("lse", *self.row_reductions):  # long doubles, in which squares of all lse fit
            self.squares[name] = Squares(np.zeros((*of_rows, 1)), np.zeros((*of_rows, 1), np.longdouble))
        self.attends, self.is_attended_to = np.zeros(of_rows, bool), np.zeros(of_keys, bool)
        self.has_gradients = "dout" in arrays
        if self.has_gradients:
            self.squares["dq"] = Squares.zeros(*of_rows, problem.head_dim)
            self.squares["dk"] = Squares.zeros(*of_keys, problem.head_dim)
            self.squares["dv"] = Squares.zeros(*of_keys, problem.head_dim_v)
            self.squares |= {name: Squares.zeros(problem.num_heads) for name in SOFTMAX_GRADIENTS}
            self.rows_of_heads, self.rows_of_keys = np.zeros(problem.num_heads), np.zeros((*of_keys, 1))
            self.squares |= {f"d{name}": Squares.zeros(*operand.shape) for name, operand in problem.score_args}
            self.dv_sums = Squares.zeros(*of_keys[:2], 1, problem.head_dim_v)
            self.of_scores, self.noise_of_scores, self.enters = (
                reference.ScoreSums(problem, arrays, np.dtype(np.float64)) for _ in range(3)
            )
            self.dout = finite(view_4d(arrays["dout"], problem.layout).astype(np.float64))
            self.dlse, self.dmax, self.dentropy = (
                finite(view_rows(arrays[name] if name in arrays else np.zeros(problem.lse_shape)))
                for name in ("dlse", "dmax", "dentropy")
            )

    def scales(self) -> Scales:
        """What came together."""
        squares = dict(self.squares)
        if self.has_gradients:
            of_heads = [(name, self.rows_of_heads) for name in SOFTMAX_GRADIENTS]
            for name, count in (("dk", self.rows_of_keys), ("dv", self.rows_of_keys), *of_heads):
                of_order = self._of_order(count, squares[name].terms)
                squares[name] = Squares(squares[name].terms, np.maximum(squares[name].noise, of_order))
                if name == "dv":
                    self.dv_sums.noise += of_order.sum(axis=2, keepdims=True)
        with_columns = {"out": self.attends, "dq": self.attends, "dk": self.is_attended_to, "dv": self.is_attended_to}
        zeros = {name: np.zeros(x.shape, bool) for name, x in self.expected.items()}
        for name in with_columns.keys() & zeros.keys():
            own = squares[name]
            noise = own.noise if name == "out" else _largest(own.noise)  # each column of out has a span of its own
            squares[name] = Squares(self._as_result(name, _largest(own.terms)), self._as_result(name, noise))
            zeros[name] = self._as_result(name, ~with_columns[name][..., None])
        for name in ("lse", *self.row_reductions):
            squares[name] = Squares(*(x.reshape(self.problem.lse_shape) for x in vars(squares[name]).values()))
        if not self.has_gradients:
            return Scales(squares, zeros, None)
        for name, total in self.of_scores.totals.items():
            squares[name] = Squares(total.value, self.noise_of_scores.totals[name].value)
        if "dbias" in zeros:
            zeros["dbias"] = self.enters.totals["dbias"].value == 0
        return Scales(squares, zeros, self.dv_sums)

    def _of_order(self, count: Array | int, terms: Array) -> Array:
        """Squares of the noise that sums of so many rows have at least, where weights have none: those of single keys.

        Half a unit in the last place of each sum on the way, which grows as the square root of the rows that it has.
        """
        return (self.unit / 2) ** 2 * count / 2 * terms

    def _as_result(self, name: str, x: Array) -> Array:
        """Numbers of entries, or of rows, in the shape of the result."""
        columns = view_4d(self.expected[name], self.problem.layout).shape[-1]
        return reference.as_caller(self.problem, np.broadcast_to(x, (*x.shape[:-1], columns)))

    def add(self, head: reference.Head) -> None:
        """Add what one head contributes."""
        visible = self._counts(head)
        self.attends[head.index] = visible.any(axis=1)
        self.is_attended_to[head.index_kv] |= visible.any(axis=0)
        Q, K, V = map(finite, (head.Q, head.K, head.V))  # hidden keys add nothing
        QK, K = np.where(visible, head.QK, 0), np.where(visible.any(axis=0)[:, None], K, 0)
        noise = self.noise_of(head, visible, self.sizes_of(Q, K), QK)
        P = np.where(visible, np.maximum(head.P, self.smallest), 0)
        self._add_forward(head, P, V, noise)
        if self.has_gradients:
            self._add_backward(head, P, Q, K, V, QK, noise)

    def _counts(self, head: reference.Head) -> Any:
        """Pairs that have weight, and maxima that have gradients, whatever a sink leaves of their weight."""
        has_weight = head.P != 0
        if not self.has_gradients or "max" not in self.row_reductions:
            return has_weight
        return has_weight | ((head.is_first_max != 0) & (self.dmax[head.index][:, None] != 0))

    # ---- Noise -------------------------------------------------------------------------------------------------------

    def noise_of(self, head: reference.Head, visible: Array, sizes: Array, QK: Array) -> Noise:
        """A unit in the last place of each: the exponential, lse or the scores, the terms that scores are sums of."""
        problem, unit, P, P_sink = self.problem, self.unit, head.P, head.P_sink
        slope = np.maximum(1, np.abs(head.cap_slope)) if problem.score is not None else 1.0
        sizes = np.where(visible, abs(problem.scale) * slope * sizes, 0)
        products = sizes.max(axis=1, keepdims=True, initial=0) / min(1.0, problem.softcap or 1.0)
        distances = np.where(visible, self._distances(head), 0)  # times slopes
        lse, of_keys = finite(head.L)[:, None], P.sum(axis=1, keepdims=True)

        def mean(x: Array) -> Array:
            """Of the keys, by their weights: a sink has as much of the weight as it likes, and nothing of out."""
            return (P * x).sum(axis=1, keepdims=True) / np.where(of_keys > 0, of_keys, 1)

        terms = products + mean(distances)

        def score(weight: Array) -> Array:
            return np.abs(lse + np.log(np.where(weight > 0, weight, 1)))

        size, large = np.maximum(abs(lse), mean(score(P))), LARGE_LSE[problem.dtype]
        equal = self._are_equal(np.hstack([P, P_sink]), np.where(visible, problem.scale * QK, np.nan), size, terms)
        reach = np.where(equal, np.minimum(size, large), size)

        def moved(weight: Array, terms: Array) -> Array:
            own = np.where(equal, 0, score(weight))
            relative = np.expm1(unit * (1 + np.maximum(reach, own) + terms))
            return np.where(weight > 0, np.fmin(relative * np.maximum(weight, self.smallest), 1), 0)

        rows = np.expm1(unit * (1 + reach + terms))
        kept, of_sink = P * head.Z, moved(P_sink, terms)
        separate = rows * np.sqrt((kept**2).sum(axis=1, keepdims=True))
        if problem.dropout:
            separate = np.fmin(separate, problem.kept_scale)
        else:  # the sum is found again, where a unit in the last place of lse, at least unit / 2 * lse, explains it
            separate = np.where((abs(lse) >= large) & (terms <= EXPLAINED_UNITS / 2 * abs(lse)), 0, separate)
        together = unit * (1 + np.minimum(abs(lse), large)) * kept.sum(axis=1, keepdims=True)
        lag = np.minimum(_spread(np.log(np.where(P > 0, P, np.nan))), OFFSET_LAG[problem.dtype])
        of_lse = unit * (1 + abs(lse) + of_keys * (np.maximum(size - abs(lse), 0) + terms + lag))
        weights = moved(P, products + distances)
        of_max = of_entropy = np.zeros_like(of_lse)
        if self.row_reductions:
            terms = products + distances.max(axis=1, keepdims=True, initial=0)
            of_max = unit * (1 + abs(finite(head.max)) + terms)
            of_entropy = unit * (1 + head.entropy + lag) + (abs(head.of_log()) * weights).sum(axis=1, keepdims=True)
        return Noise(
            max=of_max.astype(np.longdouble),
            entropy=of_entropy.astype(np.longdouble),
            rows=rows,
            weights=weights,
            of_sink=of_sink,
            sums=np.sqrt(together**2 + separate**2 + of_sink**2),
            lse=of_lse.astype(np.longdouble),
        )

    def sizes_of(self, Q: Array, K: Array) -> Array:
        """What products are sums of; a unit in its last place is what their order, or cutting off, changes in them."""
        sizes = abs(Q) @ abs(K).T
        if self.problem.softmax_dtype == self.problem.dtype or Q.shape[1] <= CUT_OFF_DIM:
            return sizes
        sums, cut_off = np.zeros_like(sizes), np.zeros_like(sizes)
        for first in range(0, Q.shape[1], COLUMNS_OF_PRODUCT):
            columns = slice(first, first + COLUMNS_OF_PRODUCT)
            sums += Q[:, columns] @ K[:, columns].T
            cut_off += np.abs(sums)
        return np.maximum(sizes, cut_off)

    def _distances(self, head: reference.Head) -> Array:
        """What slopes take off the scores: a number of each head times the derivatives by it."""
        total, of_heads = np.zeros((1, 1)), (self.problem.batch, self.problem.num_heads)
        for row in PER_HEAD_INPUTS:
            if row.gradient in head.derivatives:
                slope = float(np.broadcast_to(self.arrays[row.name], of_heads)[head.index_scores])
                total = total + np.abs(slope * head.derivatives[row.gradient])
        return total

    def _are_equal(self, weights: Array, products: Array, size: Array, terms: Array) -> Array:
        """Whether the scores of a row are one number to the last digit of the oracle, so that rounding is no matter."""
        oracle = ulp(np.longdouble if self.problem.dtype == "float64" else np.float64)
        here = ulp(np.float64)
        spread = _spread(np.log(np.where(weights > 0, weights, np.nan)))
        of_products = _spread(products)
        return (spread <= ROUNDINGS * here * (size + terms)) & (
            of_products <= ROUNDINGS * (oracle * size + here * terms)
        )

    def rounded(self, squares: Array) -> Array:
        """Of numbers that are rounded to the dtype of the inputs: subnormal ones have the unit of its smallest one."""
        return np.where(squares > 0, np.maximum(squares, self.tiny**2), 0)

    def _counted(self, head: reference.Head, QK: Array) -> dict[str, Array]:
        """The derivatives of scores: that by a cap is a difference of numbers of the size of the score in its units."""
        found = dict(head.derivatives)
        for name in CAPS:
            if f"d{name}" in found:
                least = self.unit / ulp(self.dtype) * np.abs(self.problem.scale * QK / getattr(self.problem, name))
                found[f"d{name}"] = np.maximum(np.abs(found[f"d{name}"]), least)
        return found

    # ---- What contributes --------------------------------------------------------------------------------------------

    def _add_forward(self, head: reference.Head, P: Array, V: Array, noise: Noise) -> None:
        terms = (self.rounded(P**2) * head.Z**2) @ V**2
        self.squares["out"].add(head.index, terms, self._moved_out(head, terms, V, noise))
        for name in ("lse", *self.row_reductions):
            self.squares[name].add(head.index, np.zeros(()), getattr(noise, name) ** 2)

    def _moved_out(self, head: reference.Head, terms: Array, V: Array, noise: Noise) -> Array:
        """Squares of how much out changes with its weights: a mean stays between the smallest and the largest value."""
        scale = np.sqrt(np.maximum(terms, self.out[head.index] ** 2).max(axis=1, keepdims=True, initial=0))
        values = V[(head.P != 0).any(axis=0)]
        if self.problem.dropout or head.P_sink.any():
            values = np.vstack([values * self.problem.kept_scale, np.zeros((1, V.shape[1]))])
        span = values.max(axis=0) - values.min(axis=0) if len(values) else 0.0
        # The keys that dropout keeps may be those of the lowest scores, which are larger than those that count in lse.
        moved = np.maximum((noise.rows * scale) ** 2, (noise.weights**2 * head.Z**2) @ V**2)
        return np.fmin(moved, span**2)

    def _add_backward(
        self, head: reference.Head, P: Array, Q: Array, K: Array, V: Array, QK: Array, noise: Noise
    ) -> None:
        problem, visible, scale2, rounded = self.problem, P != 0, self.problem.scale**2, self.rounded
        dO2 = self.dout[head.index] ** 2
        dL2 = self.dlse[head.index].astype(np.float64)[:, None] ** 2
        V2, Z2 = V**2, head.Z**2
        out, P2 = self.out[head.index], rounded(P**2)
        of_out = (P2 * Z2) @ V2  # where values cancel, out has the digits of its terms
        O2 = np.maximum(np.where(out != 0, np.maximum(np.abs(out), self.tiny), 0) ** 2, of_out)
        lost2 = np.where(visible & (self.smallest > head.P), self.smallest, 0) ** 2  # of weights that out may lack
        D2 = (dO2 * (O2 + (lost2 * Z2) @ V2)).sum(axis=-1, keepdims=True)  # one number for all keys of a row
        dH2 = of_max = of_log = of_sink = np.zeros(())
        if self.row_reductions:
            dH2, dm2 = (x[head.index].astype(np.float64)[:, None] ** 2 for x in (self.dentropy, self.dmax))
            D2 = D2 + dH2 * head.entropy**2  # which is one number with D
            of_log, of_max = dH2 * head.of_log() ** 2, dm2 * head.is_first_max
            of_sink = dH2 * reference.log_of(head.P_sink, head.entropy) ** 2
        each = (dO2 @ V2.T) * Z2 + D2 + dL2 + of_log
        # A unit in the last place of tanh(x) moves 1 - tanh(x)^2 by two.
        least_slope = 2 * self.unit / ulp(self.dtype) if problem.given(CAPS) else 0.0
        slope2 = np.maximum(np.abs(head.cap_slope), least_slope) ** 2
        moved2 = noise.weights**2
        D_moved2 = (dO2 * self._moved_out(head, of_out, V, noise)).sum(axis=-1, keepdims=True)
        D_moved2 = D_moved2 + dH2 * noise.entropy.astype(np.float64) ** 2
        # The logarithm of a weight moves by as much as the weight does, relative to it.
        dS_bias, dS_bias_noise = rounded(P2 * each + of_max), moved2 * (each + D_moved2 + dH2) + P2 * D_moved2
        dS, dS_noise = rounded((P2 * each + of_max) * slope2), dS_bias_noise * slope2
        if problem.dtype == "float32":
            dS_noise = dS_noise + (LOST_IN_PRODUCTS * self.unit) ** 2 * of_max * slope2
        of_D = D2 * ((P * head.cap_slope) @ K) ** 2
        self.squares["dq"].add(
            head.index, scale2 * (dS @ K**2 + of_D), scale2 * (dS_noise @ K**2 + noise.rows**2 * of_D)
        )
        self.squares["dk"].add(head.index_kv, scale2 * (dS.T @ Q**2), scale2 * (dS_noise.T @ Q**2))
        self.squares["dv"].add(head.index_kv, (P2 * Z2).T @ dO2, (moved2 * Z2).T @ dO2)
        self.rows_of_keys[head.index_kv] += np.count_nonzero(visible, axis=0)[:, None]
        whole2 = (P * head.Z).sum(axis=1) ** 2
        self.dv_sums.add((*head.index_kv[:2], 0), whole2 @ dO2, noise.sums[:, 0] ** 2 @ dO2)
        P_sink = np.where(head.P_sink != 0, np.maximum(head.P_sink, self.smallest), 0)
        for name in SOFTMAX_GRADIENTS:
            terms, moved = ((weights**2 * (D2 + dL2 + of_sink)).sum() for weights in (P_sink, noise.of_sink))
            moved += (dH2 * (noise.of_sink**2 + (P_sink * noise.entropy) ** 2)).sum()
            self.squares[name].add(head.index[1], terms, moved)
        self.rows_of_heads[head.index[1]] += np.count_nonzero(P_sink)
        head = replace(head, derivatives=self._counted(head, QK))
        QK2 = np.maximum(QK**2, np.where(visible, Q**2 @ K.T**2, 0))  # where products cancel, QK has their digits
        if (
            problem.bias is not None and problem.bias.strides[3] == 0
        ):  # D and lse are rounded once for all keys of a row
            of_row = P.sum(axis=1, keepdims=True) ** 2
            dS_bias = _added_to_largest(dS_bias, D2 * of_row)
            dS_bias_noise = _added_to_largest(dS_bias_noise, (D_moved2 + noise.rows**2 * (D2 + dL2)) * of_row)
        self.of_scores.add(head, dS_bias, dS * QK2, power=2)
        # Of maxima, dscale is a sum of one exact term for each row: all of its noise may be that of sums on the way.
        of_order = self._of_order(problem.array_batch * problem.num_heads * problem.seqlen_q, of_max * slope2)
        self.noise_of_scores.add(head, dS_bias_noise, (dS_noise + of_order) * QK2, power=2)
        self.enters.add(head, visible.astype(np.float64), np.ones(()), power=0)
        for name, entry, derivative in head.reads:
            of_read = self.squares[f"d{name}"]
            for total, squares in ((of_read.terms, dS_bias), (of_read.noise, dS_bias_noise)):
                np.add.at(total.reshape(-1), entry, squares * derivative**2)


def finite(x: Array) -> Array:
    """What is not finite has no scale."""
    return np.where(np.isfinite(x), x, 0)


def _largest(x: Array) -> Array:
    """The largest number of all columns."""
    return x.max(axis=-1, keepdims=True, initial=0)


def _added_to_largest(x: Array, of_rows: Array) -> Array:
    """A copy of x with a number added to the largest one of each row."""
    if not x.size:
        return x
    found, at = x.copy(), x.argmax(axis=1)[:, None]
    np.put_along_axis(found, at, np.take_along_axis(x, at, axis=1) + of_rows, axis=1)
    return found


def _spread(x: Array) -> Array:
    """The largest less the smallest number of each row, without NaN; 0 of none."""
    seen = ~np.isnan(x)
    most = np.where(seen, x, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
    least = np.where(seen, x, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    return np.where(most >= least, most - least, 0)
