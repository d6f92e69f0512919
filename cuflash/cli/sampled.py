"""Results of a long causal problem at a few rows and keys, held against the formula in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuflash.arrays.dlpack import on_host
from cuflash.gpu.progress import Bar
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED, OUTPUTS
from cuflash.spec.problem import make_problem
from cuflash.testing import reference
from cuflash.testing.reference import error_fractions
from cuflash.testing.scales import ulp

Array = NDArray[Any]

NUM_SAMPLES = 6  # rows, and keys, whose results are checked


@dataclass
class Sampled:
    """Errors of one result at the sampled positions, those of the plain formula, and what each one allows.

    The formula in float64 being the judge, its own error is that in float32 times the ratio of the rounding units.
    """

    name: str
    dtype: np.dtype[Any]
    samples: list[tuple[float, float, float, float]] = field(default_factory=list)  # error, plain error, scale, noise

    def add(self, got: Array, exact: Array, plain: Array, scale: float, noise: float) -> None:
        """Add a position; `noise` is what rounding lse, and scores of its size, does to the result there."""
        plain_unit = ulp(self.dtype) / ulp(plain.dtype) if self.dtype == np.float64 else 1
        errors = largest(got - exact), plain_unit * largest(plain - exact)
        self.samples.append((*errors, max(scale, largest(exact)), noise))

    @property
    def worst(self) -> tuple[float, float, float]:
        """Error, error of the plain formula, and what is allowed, of the position where the error is most of that.

        As `cuflash.testing.Yardstick` has it, with the larger one of its factors.
        """
        errors, plain, scale, noise = np.array(self.samples).T
        unit = ulp(self.dtype) * scale
        of_unit, of_noise = error_fractions(plain, unit, noise)
        plain = of_unit * unit + of_noise * noise
        allowed = 2 * plain + unit + noise
        at = int(np.argmax(np.where(errors > 0, errors / np.maximum(allowed, np.finfo(np.float64).tiny), 0)))
        return float(errors[at]), float(plain[at]), float(allowed[at])

    @property
    def is_allowed(self) -> bool:
        error, _, allowed = self.worst
        return error <= allowed


def largest(x: Array) -> float:
    """Largest absolute value; infinite where there is a NaN, so that no comparison overlooks it."""
    value = float(np.abs(x.astype(np.float64)).max(initial=0))
    return math.inf if math.isnan(value) else value


def sample_errors(options: Options, arrays: dict[str, Any], bar: Bar) -> dict[str, Sampled]:
    """Errors of out, lse and dq at some rows, and of dk and dv at some keys, the first and the last among them."""
    num_heads, seqlen, _ = arrays["q"].shape
    sampled = {name: Sampled(name, np.dtype(arrays[name].dtype)) for name in (*OUTPUTS, *DEFAULT_NEED)}
    dtype = np.dtype(arrays["out"].dtype)
    plain_dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
    rng = np.random.default_rng(1)
    for position in (0, seqlen - 1, *map(int, rng.integers(seqlen, size=NUM_SAMPLES - 2))):
        index = int(rng.integers(num_heads))
        head = {name: on_host(x[index]) for name, x in arrays.items()}
        units = ulp(sampled["lse"].dtype) * (1 + np.abs(head["lse"].astype(np.float64)))  # of each row's weights
        rows = row_results(options, head, position, np.float64), row_results(options, head, position, plain_dtype)
        keys = key_results(head, position, np.float64), key_results(head, position, plain_dtype)
        scales = scales_of(head, position, np.ones(seqlen)), scales_of(head, position, units)
        for exact, plain in (rows, keys):
            for name in exact:
                scale, noise = (own[name] for own in scales)
                sampled[name].add(head[name][position], exact[name], plain[name], scale, noise)
            bar.advance()
    return sampled


def row_results(options: Options, head: dict[str, Array], row: int, dtype: DTypeLike) -> dict[str, Array]:
    """out, lse and dq of one row of a causal problem, by the plain formula in `dtype` on its visible keys."""
    q, dout = head["q"][row : row + 1], head["dout"][row : row + 1]
    k, v = head["k"][: row + 1], head["v"][: row + 1]
    problem = make_problem(options, q, k, v)
    out, lse = reference.forward(problem, q, k, v, dtype=dtype)
    dq, _, _ = reference.backward(problem, dout, q, k, v, dtype=dtype)
    return {"out": out[0], "lse": lse[0], "dq": dq[0]}


def key_results(head: dict[str, Array], key: int, dtype: DTypeLike) -> dict[str, Array]:
    """dk and dv of one key of a causal problem, by the plain formula in `dtype` over the rows that attend to it.

    What the weights of those rows add up to is taken from lse (which is rounded) and from out.
    """
    rows = slice(key, None)
    P, dP, delta = weights_of(head, rows, slice(key, key + 1), np.float64 if dtype == np.float64 else np.float32)
    P, dS = (x.astype(dtype).astype(x.dtype) for x in (P, P * (dP - delta)))
    q, dout = (head[name][rows].astype(P.dtype) for name in ("q", "dout"))
    return {"dk": (q.shape[1] ** -0.5 * (dS.T @ q))[0].astype(dtype), "dv": (P.T @ dout)[0].astype(dtype)}


def scales_of(head: dict[str, Array], position: int, units: Array) -> dict[str, float]:
    """Sizes of the results at a position before anything cancels, each row's weights times its unit.

    Roots of the sums of squares of what is summed; of out and lse, which are no sums of rows, the unit of the row.
    """

    def scale(rows: slice, keys: slice, name: str) -> float:
        P, dP, delta = weights_of(head, rows, keys, np.float64)
        factors = dP**2 + delta**2 if name in "kq" else np.ones(P.shape)
        squares = ((units[rows, None] * P) ** 2 * factors).reshape(-1)
        others = head[name][keys if name == "k" else rows].astype(np.float64)
        return math.sqrt(largest(squares @ others**2) / (others.shape[1] if name in "kq" else 1))

    before, after, here = slice(0, position + 1), slice(position, None), slice(position, position + 1)
    unit = float(units[position])
    return {
        "out": unit * largest(head["out"][position]),
        "lse": unit,
        "dq": scale(here, before, "k"),
        "dk": scale(after, here, "q"),
        "dv": scale(after, here, "dout"),
    }


def weights_of(head: dict[str, Array], rows: slice, keys: slice, dtype: DTypeLike) -> tuple[Array, Array, Array]:
    """P, dP and delta of some rows and the keys they attend to, from lse and out."""
    dout, q, out, lse = (head[name][rows] for name in ("dout", "q", "out", "lse"))
    k, v = (head[name][keys] for name in ("k", "v"))
    return reference.weights_from_lse(make_problem(Options(), q, k, v), dout, q, k, v, out, lse, dtype)
