"""The plain formula of attention and its gradients, for NumPy and CuPy arrays: the check and a contender.

With P = softmax(scale Q K^T) row by row: O = P V, dV = P^T dO, dP = dO V^T,
dS = P * (dP - rowsum(P * dP)), dQ = scale dS K, dK = scale dS^T Q.

`cuflash.reference` is the oracle, on the CPU. What is timed is checked on the device, where whole heads take seconds;
the tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.operands import numpy_dtype
from cuflash.reference import product

from .cases import BLOCK, Case

ROWS_AT_ONCE = 2048  # of one head in the check: float64 scores of 16384 keys take 256 MB
RESULTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


@dataclass(frozen=True)
class Inputs:
    """Operands of one case, NumPy or CuPy arrays; `xp` is the module they belong to."""

    xp: Any
    q: Any
    k: Any
    v: Any
    dout: Any
    bias: Any = None

    def on_host(self) -> Inputs:
        """The same inputs as NumPy arrays."""
        bias = None if self.bias is None else on_host(self.bias)
        q, k, v, dout = (on_host(x) for x in (self.q, self.k, self.v, self.dout))
        return Inputs(np, q, k, v, dout, bias)


def on_host(array: Any) -> Any:
    """A NumPy array of a NumPy or CuPy array."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def make_inputs(xp: Any, case: Case, seed: int = 0) -> Inputs:
    """Normally distributed operands (zeros would run faster than data does)."""
    random = xp.random.default_rng(seed)
    arrays = [
        random.standard_normal(shape, dtype=case.softmax_dtype).astype(numpy_dtype(case.dtype))
        for shape in (
            case.q_shape,
            case.k_shape,
            case.v_shape,
            case.out_shape,
            *((case.bias_shape,) if case.bias else ()),
        )
    ]
    return Inputs(xp, *arrays)


def widen(array: Any, dtype: str) -> Any:
    """Cast to `dtype` over float32, since not every array library casts bfloat16 to float64 directly."""
    if array.dtype.itemsize == 2 and dtype != "float16":
        array = array.astype("float32")
    return array.astype(dtype, copy=False)


def softmax_rows(
    xp: Any,
    q: Any,
    k: Any,
    *,
    scale: float,
    causal: bool,
    first_row: int = 0,
    bias: Any = None,
    block_mask: Any = None,
) -> Any:
    """Rows of P from `first_row` on, for q (..., rows, head_dim), k (..., seqlen_k, head_dim); causal is square."""
    s = product(q, k.swapaxes(-1, -2))
    s *= scale
    if bias is not None:
        s += widen(bias, s.dtype.name)
    if causal:
        rows = first_row + xp.arange(q.shape[-2])
        s = xp.where(xp.arange(k.shape[-2]) <= rows[:, None], s, s.dtype.type(-np.inf))
    if block_mask is not None:
        rows, keys = (first_row + xp.arange(q.shape[-2])) // BLOCK, xp.arange(k.shape[-2]) // BLOCK
        s = xp.where(block_mask[rows[:, None], keys], s, s.dtype.type(-np.inf))
    s -= s.max(axis=-1, keepdims=True)
    xp.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return s


def gradient_rows(
    p: Any, q: Any, k: Any, v: Any, dout: Any, *, scale: float, rounded: Callable[[Any], Any]
) -> tuple[Any, Any, Any]:
    """dq of the rows of `p`, and what these rows add to dk and dv."""
    dp = product(dout, v.swapaxes(-1, -2))
    dp -= (p * dp).sum(axis=-1, keepdims=True)
    dp *= p
    dp *= scale
    ds = rounded(dp)
    return product(ds, k), product(ds.swapaxes(-1, -2), q), product(rounded(p).swapaxes(-1, -2), dout)


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
    block_mask = xp.asarray(case.block_mask()) if case.blocks_kept else None
    out, dq, dk, dv = xp.empty_like(dout), xp.empty_like(q), xp.zeros_like(k), xp.zeros_like(v)
    for g in range(case.group_size):
        for first in range(0, seqlen or case.seqlen_q, ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            q_rows, dout_rows = q[g, rows], dout[g, rows]
            bias = None
            if inputs.bias is not None:
                head = head_kv * case.group_size + g
                bias = inputs.bias[batch % inputs.bias.shape[0], head % inputs.bias.shape[1]]
                bias = bias[rows] if bias.shape[0] > 1 else bias
            terms = {"bias": bias, "block_mask": block_mask}
            p = softmax_rows(xp, q_rows, k, scale=scale, causal=case.causal, first_row=first, **terms)
            out[g, rows] = product(rounded(p), v)
            dq[g, rows], dk_part, dv_part = gradient_rows(p, q_rows, k, v, dout_rows, scale=scale, rounded=rounded)
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
