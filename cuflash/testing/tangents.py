"""The oracle rule for tangents: cases with tangents, and what their results are judged by.

`cuflash.testing.Yardstick` has the definitions; letters are those of `cuflash.testing.reference_tangents`. Terms and
noise of results follow their formulas pair by pair. Rounding the scores moves a weight as it does in the first order;
and the tangent of a score is moved by a unit in the last place of the terms that it is a sum of, and of tL, which is
passed on rounded. Operands of the second products (Z o P, Z o P o U, dX and tdX), O and tO are rounded to the dtype of
the inputs, as P, dS and O of the first order are: where they are subnormal, their unit is that of the smallest normal
number, which therefore is their size as terms. Of a score that is a function, the tangent is a sum of its derivative
times that of the scaled product, and of what the tangent of each array adds; what its own arithmetic rounds is measured
by the plain formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import numpy_dtype, view_4d, view_rows
from cuflash.spec.inputs import INPUTS, NUMBERS
from cuflash.spec.outputs import MOVABLE, OVER_HEAD_DIM
from cuflash.spec.problem import Problem
from cuflash.testing import reference, reference_tangents
from cuflash.testing.arrays import lay_out
from cuflash.testing.case import Case, optional
from cuflash.testing.reference import BroadcastSum, Head
from cuflash.testing.reference_tangents import HeadTangents
from cuflash.testing.rule import (
    Report,
    Yardstick,
    factor_of,
    gradients_of,
    measure,
    of_fixed_point,
    yardstick_of,
)
from cuflash.testing.scales import Collector, Squares, finite, ulp

Array = NDArray[Any]

COTANGENTS = ("tdout", "tdlse")  # tangents of what `backward` takes, which `jvp` does not


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Which inputs of a case have tangents, and what goes with them: the same one makes the same arrays everywhere.

    Parameters
    ----------
    names : tuple of str
        Arrays and numbers of the case that have tangents.
    cotangents : tuple of str
        Those of "tdout" and "tdlse" that there are; the latter goes with dlse of the case.
    common : float
        What all keys of tk have in common, in units of its own spread: no result but tlse and tdq depends on it.
    seed : int
    """

    names: tuple[str, ...] = ("q", "k", "v")
    cotangents: tuple[str, ...] = ()
    common: float = 0.0
    seed: int = 0

    def arrays(self, case: Case, convert: Callable[[Array], Any] = np.asarray) -> dict[str, Any]:
        """The tangents of a case by name, laid out in memory as the case says; NaN where the array is."""
        random, arrays = np.random.default_rng(self.seed), case.arrays()
        softmax = numpy_dtype(case.problem.softmax_dtype)
        tangents = {}
        for name in self.names:
            model = arrays.get(name)
            values = random.standard_normal(() if model is None else model.shape)
            if name == "k" and self.common:
                values = values + self.common * random.standard_normal(values.shape[-1])
            if model is not None:
                values = np.where(np.isnan(model.astype(np.float64)), np.nan, values)
            tangents[f"t{name}"] = values.astype(softmax if model is None else model.dtype)
        for name in self.cotangents:
            model = arrays[name[1:]]
            values = np.where(np.isnan(model.astype(np.float64)), np.nan, random.standard_normal(model.shape))
            tangents[name] = values.astype(model.dtype)
        return {name: lay_out(x, case.strides, convert) for name, x in tangents.items()}


def movable(case: Case) -> list[str]:
    """All that may have a tangent in a case."""
    arrays = case.arrays()
    return [name for name in MOVABLE if name in arrays or (name in NUMBERS and getattr(case.problem, name) is not None)]


def everything(case: Case) -> Moved:
    """Tangents of all that a case has."""
    return Moved(names=tuple(movable(case)), cotangents=("tdout", "tdlse") if case.dlse else ("tdout",))


def tangents_by(
    attn: Any,
    case: Case,
    moved: Moved,
    *,
    convert: Callable[[Array], Any] = np.asarray,
) -> dict[str, Any]:
    """What `jvp` and `backward_jvp` of a `cuflash.FlashAttention` give for a case: what `assert_tangents` judges."""
    arrays, tangents = case.arrays(convert), moved.arrays(case, convert)
    need = tuple(f"td{name}" for name in movable(case))
    inputs = {name: arrays[name] for name in INPUTS} | optional(arrays) | case.random
    results = attn.jvp(**inputs, **{name: x for name, x in tangents.items() if name not in COTANGENTS})
    dlse = {"dlse": arrays["dlse"]} if "dlse" in arrays else {}
    gradients = attn.backward_jvp(arrays["dout"], **inputs, **dlse, **results._asdict(), need=need, **tangents)
    return {"tout": results.tout, "tlse": results.tlse} | gradients._asdict()


@lru_cache(maxsize=8)
def yardsticks_of(case: Case, moved: Moved) -> dict[str, Yardstick]:
    """The yardsticks of tout, tlse and of the tangents of all gradients."""
    return tangent_yardsticks(case.problem, case.arrays(), moved.arrays(case), **case.random)


def tangent_yardsticks(
    problem: Problem, arrays: Mapping[str, Array], tangents: Mapping[str, Array], **random: Any
) -> dict[str, Yardstick]:
    """The same of any problem on NumPy arrays, with what its functions read; `random` as `yardsticks` has it.

    Tangents have the names of their arrays after a t, as `tdout` and `tdlse` do.
    """
    exact = np.dtype(np.longdouble if problem.dtype == "float64" else np.float64)
    with np.errstate(all="ignore"):
        expected = _compute(problem, arrays, tangents, random, exact)
        plain = _compute(problem, arrays, tangents, random, arrays["q"].dtype)
        squares, zeros = _TangentCollector(problem, arrays, tangents, random, expected).collect()
        return {
            name: _yardstick(problem, name, x, plain[name], squares[name], zeros.get(name))
            for name, x in expected.items()
            if name in squares
        }


def _inputs(problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """q, k, v, the optional inputs, and what functions read."""
    return {name: arrays[name] for name in (*INPUTS, *(name for name, _ in problem.score_args))} | optional(arrays)


def _compute(
    problem: Problem, arrays: Mapping[str, Array], tangents: Mapping[str, Array], random: Mapping[str, Any], dtype: Any
) -> dict[str, Array]:
    """out, lse and results by the plain formula."""
    inputs = _inputs(problem, arrays) | {"dtype": dtype, **random}
    of_inputs = {name[1:]: x for name, x in tangents.items() if name not in COTANGENTS}
    results = dict(zip(("out", "lse"), reference.forward(problem, **inputs), strict=True))
    results |= zip(("tout", "tlse"), reference_tangents.jvp(problem, tangents=of_inputs, **inputs), strict=True)
    cotangents: dict[str, Any] = {name: x for name, x in tangents.items() if name in COTANGENTS}
    if "dlse" in arrays:
        cotangents["dlse"] = arrays["dlse"]
    need = gradients_of(problem)
    gradients = reference_tangents.backward_jvp(
        problem, arrays["dout"], tangents=of_inputs, need=need, **inputs, **cotangents
    )
    return results | {f"t{name}": x for name, x in zip(need, gradients, strict=True)}


def _yardstick(
    problem: Problem, name: str, expected: Array, plain: Array, squares: Squares, zero: Array | None
) -> Yardstick:
    """As `cuflash.testing.rule` makes those of the first order."""
    dtype = numpy_dtype(problem.dtype)
    terms, noise = (np.sqrt(x).astype(np.float64) for x in (squares.terms, squares.noise))
    largest = np.where(np.isfinite(expected), np.abs(expected), 0)
    if name[1:] in OVER_HEAD_DIM:
        largest = largest.max(axis=-1, keepdims=True, initial=0)
    scale = np.maximum(np.maximum(terms, largest), float(ml_dtypes.finfo(dtype).smallest_normal))
    unit, extra = ulp(problem.softmax_dtype if name == "tlse" else dtype), of_fixed_point(problem, name[2:], scale)
    zero = np.zeros(expected.shape, bool) if zero is None else zero
    factor = factor_of(problem)
    yardstick, _ = yardstick_of(name, expected, plain, zero, factor, unit, scale, noise, extra=extra)
    return yardstick


class _TangentCollector(Collector):
    """Adds up what contributes to the tangents of results, head by head: squares of terms, and of their noise."""

    def __init__(
        self,
        problem: Problem,
        arrays: Mapping[str, Array],
        tangents: Mapping[str, Array],
        random: Mapping[str, Any],
        expected: Mapping[str, Array],
    ) -> None:
        results = {name: expected[name] for name in ("out", "lse")}
        results |= {name: expected[f"t{name}"] for name in ("dq", "dk", "dv")}
        super().__init__(problem, arrays, results)
        self.tangents, self.random = tangents, random
        self.tout = finite(view_4d(expected["tout"].astype(np.float64), problem.layout))
        self.squares["out"], self.squares["lse"] = (Squares.zeros(*self.squares[x].terms.shape) for x in ("out", "lse"))

        tdout = tangents.get("tdout", np.zeros(arrays["dout"].shape))
        self.tdout = finite(view_4d(tdout, problem.layout).astype(np.float64))
        self.tdlse = finite(view_rows(tangents.get("tdlse", np.zeros(problem.lse_shape))).astype(np.float64))
        sizes = {"dscale": (), "dsoftcap": (), "dalibi_slopes": (problem.batch, problem.num_heads)}
        sizes["dbias"] = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
        self.sums = {
            name: tuple(BroadcastSum(arrays.get(name[1:]), shape, np.dtype(np.float64), np) for _ in range(3))
            for name, shape in sizes.items()
        }

    def collect(self) -> tuple[dict[str, Squares], dict[str, Array]]:
        """Squares by result, and where results are zero."""
        problem, inputs = self.problem, _inputs(self.problem, self.arrays)
        of_inputs = {name[1:]: x for name, x in self.tangents.items() if name not in COTANGENTS}
        for head in reference.each_head(problem, compute=np.float64, **inputs, **self.random):
            t = reference_tangents.head_tangents(problem, head, of_inputs, inputs, np.dtype(np.float64))
            self.add_tangents(head, t)
        squares, zeros = {}, {}
        is_zero = {"out": ~self.attends, "dq": ~self.attends, "dk": ~self.is_attended_to, "dv": ~self.is_attended_to}
        for name, of_rows in is_zero.items():
            terms_and_noise = vars(self.squares[name]).values()
            squares[f"t{name}"] = Squares(
                *(self._as_result(name, x.max(axis=-1, keepdims=True, initial=0)) for x in terms_and_noise)
            )
            zeros[f"t{name}"] = self._as_result(name, of_rows[..., None])
        squares["tlse"] = Squares(*(x.reshape(problem.lse_shape) for x in vars(self.squares["lse"]).values()))
        squares["tdsinks"] = self.squares["dsinks"]
        squares |= {f"td{name}": self.squares[f"d{name}"] for name, _ in problem.score_args}
        for name, (terms, noise, count) in self.sums.items():
            squares[f"t{name}"] = Squares(terms.value, noise.value)
            if name == "dbias":
                zeros["tdbias"] = count.value == 0
        return squares, zeros

    def add_tangents(self, head: Head, t: HeadTangents) -> None:
        """Add what one head contributes."""
        visible = head.P != 0
        self.attends[head.index] = visible.any(axis=1)
        self.is_attended_to[head.index_kv] |= visible.any(axis=0)
        of_head = _HeadSquares(self, head, t)
        self.squares["out"].add(head.index, of_head.tO2, of_head.tO_moved)
        self.squares["lse"].add(head.index, (of_head.P2 * of_head.tS2).sum(axis=1, keepdims=True), of_head.tL_moved)
        self.squares["dv"].add(head.index_kv, *of_head.of_values())
        dS, tdS = of_head.score_gradients()
        dX, tdX, least = of_head.product_gradients(dS, tdS)
        scale2, tscale2 = self.problem.scale**2, t.scale**2
        K2, tK2, Q2, tQ2 = (x**2 for x in (of_head.K, of_head.tK, of_head.Q, of_head.tQ))
        of_q = [scale2 * (tx @ K2 + x @ tK2) + tscale2 * (x @ K2) for tx, x in zip(tdX, dX, strict=True)]
        of_k = [scale2 * (tx.T @ Q2 + x.T @ tQ2) + tscale2 * (x.T @ Q2) for tx, x in zip(tdX, dX, strict=True)]
        self.squares["dq"].add(head.index, *of_q)
        self.squares["dk"].add(head.index_kv, *of_k)
        self.squares["dsinks"].add(head.index[1], *of_head.of_sink())
        QK2 = np.maximum(np.where(visible, head.QK, 0) ** 2, Q2 @ K2.T)
        tQK2 = (abs(of_head.tQ) @ abs(of_head.K).T + abs(of_head.Q) @ abs(of_head.tK).T) ** 2
        self._put("dscale", head, *(tx * QK2 + x * tQK2 for tx, x in zip(tdX, dX, strict=True)))
        for name, derivative in self._counted(head, np.where(visible, head.QK, 0)).items():
            d2, td2 = derivative**2, np.asarray(t.derivatives.get(name, 0.0)) ** 2
            if name == "dsoftcap":
                td2 = np.maximum(td2, least**2)
            self._put(name, head, *(tx * d2 + x * td2 for tx, x in zip(tdS, dS, strict=True)))
        for (name, entry, derivative), moved in zip(head.reads, t.reads, strict=True):
            total = self.squares[f"d{name}"]
            for sums, tx, x in zip((total.terms, total.noise), tdS, dS, strict=True):
                np.add.at(sums.reshape(-1), entry, tx * derivative**2 + x * moved**2)

    def _put(self, name: str, head: Head, terms: Array, noise: Array) -> None:
        if name not in self.sums:
            return
        visible = head.P != 0
        for total, x in zip(self.sums[name], (terms, noise, visible.astype(np.float64)), strict=True):
            total.add(head.index_scores[: len(total.shape)], np.broadcast_to(x, visible.shape), head.first_row)


class _HeadSquares:
    """Squares of the terms that the results of a head are sums of, and of their noise (`..._moved`), by pair or by row.

    `kept2` and `kept_U2` are those of Z o P and Z o P o U; `O2` and `tO2` the terms of O and tO, or these if larger.
    """

    def __init__(self, collector: _TangentCollector, head: Head, t: HeadTangents) -> None:
        self.head, self.t, self.problem, self.unit = head, t, collector.problem, collector.unit
        self.dtype, self.rounded, scale = collector.dtype, collector.rounded, abs(collector.problem.scale)
        visible = head.P != 0
        is_hidden = ~visible.any(axis=0)[:, None]
        self.Q, self.tQ = finite(head.Q), finite(t.Q)
        self.K, self.tK, V, tV = (np.where(is_hidden, 0, finite(x)) for x in (head.K, t.K, head.V, t.V))
        self.V2, self.tV2 = V**2, tV**2
        self.dO2, self.tdO2 = collector.dout[head.index] ** 2, collector.tdout[head.index] ** 2
        self.dL2, self.tdL2 = (
            x[head.index].astype(np.float64)[:, None] ** 2 for x in (collector.dlse, collector.tdlse)
        )
        sizes = collector.sizes_of(self.Q, self.K)
        self.noise = collector.noise_of(head, visible, sizes, np.where(visible, head.QK, 0))
        self.products_moved = self.unit * scale * sizes
        self.product_size = scale * (collector.sizes_of(self.tQ, self.K) + collector.sizes_of(self.Q, self.tK))
        self.product_size = self.product_size + abs(t.scale) * sizes
        P = np.where(visible, np.maximum(head.P, collector.smallest), 0)
        self.P2, self.P_moved, self.Z2 = P**2, self.noise.weights**2, head.Z**2
        U_unit2, tL_unit2 = self._units_of_scores(P, visible)
        self._set_scores(U_unit2, tL_unit2, visible)
        self._set_rows(collector, U_unit2)

    def _units_of_scores(self, P: Array, visible: Array) -> tuple[Array, Array]:
        """Squares of a unit in the last place of the terms of U and tL, and what rounding the products moves in U."""
        # A unit in the last place of the tanh of a soft cap moves its derivative, 1 - tanh^2, by two.
        slope_size = np.abs(self.head.cap_slope) + (0 if self.problem.softcap is None else 2)
        tS_size = np.where(visible, slope_size * self.product_size + self.t.added_size, 0)
        # The mean over the keys, without the sink, from which tL is told: next to a large sink it is the larger one.
        sum_of_keys = P.sum(axis=1, keepdims=True)
        mean_size = (P * tS_size).sum(axis=1, keepdims=True) / np.where(sum_of_keys == 0, 1, sum_of_keys)
        tL_unit2 = (self.unit * (mean_size + self.head.P_sink * abs(self.t.sink + self.t.L))) ** 2
        U_unit2 = (self.unit * tS_size) ** 2 + tL_unit2 + (self.t.slope * self.products_moved) ** 2
        return np.where(visible, U_unit2, 0), tL_unit2

    def _set_scores(self, U_unit2: Array, tL_unit2: Array, visible: Array) -> None:
        t = self.t
        self.U2, self.tS2 = (np.where(visible, x, 0) ** 2 for x in (t.U, t.U + t.L))
        by_weights = (self.P_moved * self.U2).sum(axis=1, keepdims=True) + (self.noise.of_sink * t.sink) ** 2
        self.tL_moved = tL_unit2 + by_weights
        self.U_moved = np.where(visible, U_unit2 + by_weights, 0)  # in the backward pass tL is one rounded number

    def _set_rows(self, collector: _TangentCollector, U_unit2: Array) -> None:
        P2, Z2, rows2 = self.P2, self.Z2, self.noise.rows**2
        self.kept2, self.kept_U2 = (self.rounded(x) for x in (P2 * Z2, P2 * Z2 * self.U2))
        out2, tout2 = (self.rounded(x[self.head.index] ** 2) for x in (collector.out, collector.tout))
        self.O2 = np.maximum(out2, self.kept2 @ self.V2)
        self.tO2 = np.maximum(tout2, self.kept_U2 @ self.V2 + self.kept2 @ self.tV2)
        self.O_moved = (self.P_moved * Z2) @ self.V2 + rows2 * self.O2
        self.tO_moved = ((self.P_moved * self.U2 + P2 * U_unit2) * Z2) @ self.V2 + (self.P_moved * Z2) @ self.tV2
        self.tO_moved = self.tO_moved + rows2 * self.tO2 + self.tL_moved * self.O2
        self.D2 = (self.dO2 * self.O2).sum(axis=-1, keepdims=True)
        self.tD2 = (self.dO2 * self.tO2 + self.tdO2 * self.O2).sum(axis=-1, keepdims=True)
        self.D_moved = (self.dO2 * self.O_moved).sum(axis=-1, keepdims=True)
        self.tD_moved = (self.dO2 * self.tO_moved + self.tdO2 * self.O_moved).sum(axis=-1, keepdims=True)

    def of_values(self) -> tuple[Array, Array]:
        """Terms and noise of tdV."""
        moved = (self.P_moved * self.U2 + self.P2 * self.U_moved) * self.Z2
        terms = self.kept_U2.T @ self.dO2 + self.kept2.T @ self.tdO2
        return terms, moved.T @ self.dO2 + (self.P_moved * self.Z2).T @ self.tdO2

    def score_gradients(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Terms and noise of dS, and of tdS."""
        dU = (self.dO2 @ self.V2.T) * self.Z2 + self.D2 + self.dL2
        tdU = (self.dO2 @ self.tV2.T + self.tdO2 @ self.V2.T) * self.Z2 + self.tD2 + self.tdL2
        D_moved = self.D_moved + self.unit**2 * (dU + self.D2)
        tD_moved = self.tD_moved + self.unit**2 * (tdU + self.tD2)
        tdS = self.U2 * dU + tdU
        tdS_moved = self.U_moved * dU + self.U2 * D_moved + tD_moved
        return (
            (self.P2 * dU, self.P_moved * dU + self.P2 * D_moved),
            (self.P2 * tdS, self.P_moved * tdS + self.P2 * tdS_moved),
        )

    def product_gradients(
        self, dS: tuple[Array, Array], tdS: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array], Array]:
        """Terms and noise of dX and tdX; and the least size of the tangent of a derivative by the cap.

        A unit in the last place of tanh(x) moves 1 - tanh(x)^2 by two.
        """
        cap = self.problem.softcap
        least_slope, per_cap = (0.0, 0.0) if cap is None else (2 * self.unit / ulp(self.dtype), 1 / cap)
        least_tslope = least_slope * per_cap * self.product_size
        slope2 = np.maximum(np.abs(self.head.cap_slope), least_slope) ** 2
        tslope2 = np.maximum(np.abs(self.t.slope), least_tslope) ** 2
        tslope_moved = (self.unit + self.products_moved * per_cap) ** 2 * tslope2
        moved = tdS[1] * slope2 + dS[1] * tslope2 + dS[0] * tslope_moved
        dX, tdX = (self.rounded(x) for x in (dS[0] * slope2, tdS[0] * slope2 + dS[0] * tslope2))
        return (dX, dS[1] * slope2), (tdX, moved), least_tslope

    def of_sink(self) -> tuple[Array, Array]:
        """Terms and noise of the tangent of the gradient of the sink."""
        P2, sink2 = self.head.P_sink**2, self.t.sink**2
        terms = sink2 * (self.D2 + self.dL2) + self.tD2 + self.tdL2
        moved = self.tL_moved * (self.D2 + self.dL2) + sink2 * self.D_moved + self.tD_moved
        return (P2 * terms).sum(), (self.noise.of_sink**2 * terms + P2 * moved).sum()


def assert_tangents(case: Case, moved: Moved, results: Mapping[str, Any]) -> Report:
    """Judge tout, tlse, tdq and so on, those given by name, as `assert_forward` judges the output."""
    judges = yardsticks_of(case, moved)
    report = Report(measure(name, x, judges[name]) for name, x in results.items())
    if not report.passed:
        raise AssertionError(f"outside the oracle rule\n{report}\n{case}\n{moved}")
    return report
