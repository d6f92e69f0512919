"""The plain formula of attention and its gradients, for NumPy and CuPy arrays: the check and a contender.

With P = softmax(scale Q K^T) row by row: O = P V, dV = P^T dO, dP = dO V^T,
dS = P * (dP - rowsum(P * dP)), dQ = scale dS K, dK = scale dS^T Q.
With dropout, P in the products O and dV, and dP, are multiplied by Z, which is 0 or 1 / (1 - rate); with a soft cap, dS
is multiplied by its derivative.

`cuflash.testing.reference` is the oracle, on the CPU. What is timed is checked on the device, where whole heads take
seconds; the tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.arrays.array_info import numpy_dtype
from cuflash.spec.dropout import kept_weights
from cuflash.spec.options import rounded_rate
from cuflash.testing.reference import product

from .cases import BLOCK, VISIBLE, Case
from .functions import DOCUMENTS, FUNCTIONS

ROWS_AT_ONCE = 2048  # of one head in the check: float64 scores of 16384 keys take 256 MB
RESULTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
RANDOM = {"seed": 1, "offset": 2}  # of dropout

Act = Callable[[Any, Any, Any], Any]
# What is added to the score of row i and key j, and whether it is hidden, where there is a term or an option x: i is a
# column of rows, j a row of keys.
ADDED: dict[str, Act] = {
    "alibi_slopes": lambda x, i, j: -x * abs(i - j).astype(x.dtype),
    "bias": lambda x, i, j: x,
}
HIDDEN: dict[str, Act] = {
    "causal": lambda x, i, j: j > i,
    "window": lambda x, i, j: j <= i - x,
    "mask": lambda x, i, j: ~x,
    "block_mask": lambda x, i, j: ~x[:, j // BLOCK],
    "kv_lengths": lambda x, i, j: j >= x,
    "hidden": lambda x, i, j: x(i, j),
}


@dataclass(frozen=True)
class Inputs:
    """Operands of one case, NumPy or CuPy arrays; `xp` is the module they belong to.

    `terms` are those of `Case.terms`.
    """

    xp: Any
    q: Any
    k: Any
    v: Any
    dout: Any
    terms: Mapping[str, Any] = field(default_factory=dict)

    def on_host(self) -> Inputs:
        """The same inputs as NumPy arrays."""
        q, k, v, dout = (on_host(x) for x in (self.q, self.k, self.v, self.dout))
        return Inputs(np, q, k, v, dout, {name: on_host(x) for name, x in self.terms.items()})


def on_host(array: Any) -> Any:
    """A NumPy array of a NumPy or CuPy array."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def make_inputs(xp: Any, case: Case, seed: int = 0) -> Inputs:
    """Normally distributed operands (zeros would run faster than data does), and the terms of the case."""
    random = xp.random.default_rng(seed)

    def normal(shape: tuple[int, ...], dtype: str = case.dtype) -> Any:
        return random.standard_normal(shape, dtype=case.softmax_dtype).astype(numpy_dtype(dtype))

    def mask(shape: tuple[int, ...], dtype: str) -> Any:
        made = random.random(shape) < VISIBLE
        if 1 not in shape[2:]:  # then every row sees a key
            made |= xp.eye(*shape[2:], dtype=bool)
        return made

    make: dict[str, Callable[[tuple[int, ...], str], Any]] = {
        "bias": normal,
        "sinks": normal,
        "mask": mask,
        "alibi_slopes": lambda shape, dtype: (2.0 ** (-8 * xp.arange(1, shape[0] + 1) / shape[0])).astype(dtype),
        "kv_lengths": lambda shape, dtype: xp.full(shape, case.seqlen_k, dtype),
        "pos": normal,
        "place": normal,
        "table": normal,
        "slopes": lambda shape, dtype: random.random(shape).astype(dtype) / 5,
        "document": lambda shape, dtype: (xp.arange(shape[0]) * DOCUMENTS // shape[0]).astype(dtype),
    }
    q, k, v, dout = (normal(shape) for shape in (case.q_shape, case.k_shape, case.v_shape, case.out_shape))
    if case.v_in_k:
        v = k[..., : case.head_dim_v]
    return Inputs(xp, q, k, v, dout, {name: make[name](*term) for name, term in case.terms.items()})


def widen(array: Any, dtype: str) -> Any:
    """Cast to `dtype` over float32, since not every array library casts bfloat16 to float64 directly."""
    if array.dtype.itemsize == 2 and dtype != "float16":
        array = array.astype("float32")
    return array.astype(dtype, copy=False)


def times(x: Any, factor: Any) -> Any:
    """x times a factor that may be missing."""
    return x if factor is None else x * factor


def softmax_rows(xp: Any, q: Any, k: Any, *, scale: float, first_row: int = 0, **given: Any) -> tuple[Any, Any]:
    """Rows of P, the first of which stands at key `first_row`, and the derivative of the soft cap in them, None without
    one. q has axes (..., rows, head_dim), k (..., seqlen_k, head_dim). `given` are terms of these rows and options,
    those alone that there are.
    """
    s = product(q, k.swapaxes(-1, -2))
    s *= scale
    slope = None
    if "softcap" in given:
        s /= given["softcap"]
        xp.tanh(s, out=s)
        slope = 1 - s * s
        s *= given["softcap"]

    def places() -> tuple[Any, Any]:
        return first_row + xp.arange(q.shape[-2])[:, None], xp.arange(k.shape[-2])

    for name, added in ADDED.items():
        if name in given:
            s += added(widen(given[name], s.dtype.name), *places())
    if "score" in given:
        s += given["score"](*places(), s.dtype.name)
    for name, hidden in HIDDEN.items():
        if name in given:
            s = xp.where(hidden(given[name], *places()), s.dtype.type(-np.inf), s)
    largest = s.max(axis=-1, keepdims=True)
    if "sinks" in given:
        sink = widen(given["sinks"], s.dtype.name)
        largest = xp.maximum(largest, sink)
    s -= largest
    xp.exp(s, out=s)
    total = s.sum(axis=-1, keepdims=True)
    if "sinks" in given:
        total += xp.exp(sink - largest)
    s /= total
    return s, slope


def gradient_rows(
    p: Any,
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    *,
    scale: float,
    rounded: Callable[[Any], Any],
    slope: Any = None,
    kept: Any = None,
) -> tuple[Any, Any, Any]:
    """dq of the rows of `p`, and what these rows add to dk and dv; `slope` is the soft cap's, `kept` is Z."""
    dp = times(product(dout, v.swapaxes(-1, -2)), kept)
    dp -= (p * dp).sum(axis=-1, keepdims=True)
    dp *= p
    dp = times(dp, slope)
    dp *= scale
    ds = rounded(dp)
    return product(ds, k), product(ds.swapaxes(-1, -2), q), product(rounded(times(p, kept)).swapaxes(-1, -2), dout)


def of_rows(case: Case, inputs: Inputs, batch: int, head: int, rows: slice) -> dict[str, Any]:
    """The terms and options of some rows of one head, by the names that `softmax_rows` knows."""
    given = {name: x for name in ("causal", "window", "softcap") if (x := getattr(case, name))}
    function = FUNCTIONS[case.function] if case.function else None
    if function is not None:
        read = function.of_head(inputs.terms, head)

        def applied(i: Any, j: Any, dtype: str | None = None) -> Any:
            arrays = {name: x if dtype is None else widen(x, dtype) for name, x in read.items()}
            return function.formula(inputs.xp, arrays, i, j)

        given["hidden" if function.is_mask else "score"] = applied
    for name, x in inputs.terms.items():
        if function is not None and name in function.shapes:
            continue
        if x.ndim == 4:
            own = x[batch % x.shape[0], head % x.shape[1]]
            given[name] = own[rows] if own.shape[0] > 1 else own
        else:
            given[name] = x[batch if name == "kv_lengths" else head]
    if case.blocks_kept:
        blocks = np.arange(case.seqlen_q)[rows] // BLOCK
        given["block_mask"] = inputs.xp.asarray(case.block_mask()[blocks])
    return given


def kept_of_rows(case: Case, xp: Any, batch: int, head: int, rows: range, dtype: Any) -> Any:
    """Z of some rows of one head; None without dropout."""
    if not case.dropout:
        return None
    rate = rounded_rate(case.dropout)
    kept = kept_weights(rate, **RANDOM, head=batch * case.num_heads + head, rows=rows, columns=range(case.seqlen_k))
    return xp.asarray(kept).astype(dtype) / dtype.type(1 - rate)


def one_group(case: Case, inputs: Inputs, batch: int, head_kv: int, *, compute: str, store: str) -> dict[str, Any]:
    """out, dq (group_size, seqlen, dim) and dk, dv (seqlen, dim) of the query heads that share one key/value head.

    Products and softmax run in `compute`; P, dS and the results are rounded to `store` where they would be stored.
    """
    xp = inputs.xp
    scale = case.head_dim**-0.5

    def rounded(x: Any) -> Any:
        return x if store == compute else widen(x.astype(numpy_dtype(store)), compute)

    heads = slice(head_kv * case.group_size, (head_kv + 1) * case.group_size)
    seqlen = case.lengths[batch] if case.lengths else None
    q, dout = (widen(x[batch, heads, :seqlen], compute) for x in (inputs.q, inputs.dout))
    k, v = (widen(x[batch, head_kv, :seqlen], compute) for x in (inputs.k, inputs.v))
    out, dq, dk, dv = xp.empty_like(dout), xp.empty_like(q), xp.zeros_like(k), xp.zeros_like(v)
    for g in range(case.group_size):
        for first in range(0, seqlen or case.seqlen_q, ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            q_rows, dout_rows, head = q[g, rows], dout[g, rows], heads.start + g
            given = of_rows(case, inputs, batch, head, rows)
            p, slope = softmax_rows(xp, q_rows, k, scale=scale, first_row=first + case.diagonal, **given)
            kept = kept_of_rows(case, xp, batch, head, range(first, first + len(q_rows)), p.dtype)
            out[g, rows] = product(rounded(times(p, kept)), v)
            dq[g, rows], dk_part, dv_part = gradient_rows(
                p, q_rows, k, v, dout_rows, scale=scale, rounded=rounded, slope=slope, kept=kept
            )
            dk += dk_part
            dv += dv_part
    return {name: rounded(x) for name, x in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}


@dataclass(frozen=True)
class Errors:
    """Largest absolute error of a result, the plain formula's in the same dtype, a unit in the last place of both."""

    error: float
    formula_error: float
    ulp: float

    @property
    def within_rule(self) -> bool:
        """At most twice the formula's error plus one unit in the last place of the largest entry."""
        return self.error <= 2 * self.formula_error + self.ulp

    @property
    def wrong(self) -> bool:
        """Not rounding any more (also where there is a NaN): too wrong to be worth timing."""
        return not self.error <= 10 * self.formula_error + 4 * self.ulp


class Reference:
    """Results of sampled heads, in float64 (float64's own in long double, on the host) and by the plain formula in the
    case's dtype."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.case = case
        self.groups = sorted({(0, 0), (case.batch - 1, case.num_heads_kv - 1)})  # the last has the largest offsets
        inputs, precise = (inputs.on_host(), "longdouble") if case.dtype == "float64" else (inputs, "float64")

        def groups(compute: str, store: str) -> list[dict[str, Any]]:
            return [one_group(case, inputs, b, h, compute=compute, store=store) for b, h in self.groups]

        self.exact, plain = groups(precise, precise), groups(case.softmax_dtype, case.dtype)
        finfo: Any = ml_dtypes.finfo  # knows bfloat16 and NumPy's own
        epsilon = float(finfo(numpy_dtype(case.dtype)).eps)
        self.formula_errors, self.ulps = {}, {}
        for name in plain[0]:
            distances = (self._distance(g[name], e[name]) for g, e in zip(plain, self.exact, strict=True))
            self.formula_errors[name] = max(distances)
            self.ulps[name] = epsilon * max(float(abs(group[name]).max()) for group in self.exact)

    def _distance(self, got: Any, exact: Any) -> float:
        """Largest absolute difference; NaN where `got` has one."""
        if exact.dtype == np.longdouble:
            return float(abs(on_host(got) - exact).max())
        return float(abs(widen(got, "float64") - exact).max())

    def errors(self, pass_: str, results: tuple[Any, ...], coarser: float = 1.0) -> dict[str, Errors]:
        """Errors of whole results (batch, heads, seqlen, dim) on the sampled heads, by name.

        What the formula's errors and the units in the last place are multiplied by is `coarser`.
        """
        errors = {}
        for name, result in zip(RESULTS[pass_], results, strict=True):
            distances = []
            for (b, h), group in zip(self.groups, self.exact, strict=True):
                per_query_head = name in ("out", "dq")
                heads = slice(h * self.case.group_size, (h + 1) * self.case.group_size) if per_query_head else h
                seqlen = self.case.lengths[b] if self.case.lengths else None
                distances.append(self._distance(result[b, heads][..., :seqlen, :], group[name]))
            worst = float(np.max(distances))  # unlike max(), keeps a NaN
            errors[name] = Errors(worst, coarser * self.formula_errors[name], coarser * self.ulps[name])
        return errors
