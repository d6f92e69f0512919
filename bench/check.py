"""The check of what is timed: results of sampled heads against the oracle, on the device of the case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.arrays.array_info import numpy_dtype
from cuflash.arrays.dlpack import on_host
from cuflash.testing import reference, reference_tangents

from .cases import PASSES, Case
from .inputs import RANDOM, Inputs, problem_of

_GIVEN_TOGETHER = {"double_backward": ("jvp", "backward_jvp")}  # passes whose results another one gives together
ROWS_AT_ONCE = 2048  # of one head: float64 scores of 16384 keys take 256 MB
RESULTS = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv"),
    "jvp": ("tout",),
    "backward_jvp": ("tdq", "tdk", "tdv"),
    "double_backward": ("tout", "tdq", "tdk", "tdv"),  # tout is the gradient by dout
}


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


class Check:
    """Errors of sampled heads, against the oracle: float64, for float64 itself long double on the host."""

    def __init__(self, case: Case, inputs: Inputs, passes: Iterable[str] = PASSES) -> None:
        self.case = case
        self.groups = sorted({(0, 0), (case.batch - 1, case.num_heads_kv - 1)})  # the last has the largest offsets
        inputs, precise = (inputs.on_host(), "longdouble") if case.dtype == "float64" else (inputs, "float64")
        finfo: Any = ml_dtypes.finfo  # knows bfloat16 and NumPy's own
        epsilon = float(finfo(numpy_dtype(case.dtype)).eps)
        self.exact: dict[str, list[Any]] = {}  # by name of the result, of each group
        self.allowed: dict[str, tuple[float, float]] = {}  # likewise, the formula's error and a unit in the last place
        for pass_ in dict.fromkeys(one for x in passes for one in _GIVEN_TOGETHER.get(x, (x,))):
            plain = self._by_formula(pass_, inputs, case.dtype)
            for name, exact in self._by_formula(pass_, inputs, precise).items():
                self.exact[name] = exact
                self.allowed[name] = _distance(plain[name], exact), epsilon * max(float(abs(x).max()) for x in exact)

    def _by_formula(self, pass_: str, inputs: Inputs, dtype: str) -> dict[str, list[Any]]:
        """Results of the sampled heads."""
        case, terms, dout = self.case, dict(inputs.terms), inputs.dout
        if case.blocks_kept:
            terms["block_mask"] = inputs.xp.asarray(case.block_mask())
        if case.lengths:  # rows past them have no part in gradients
            terms["kv_lengths"] = inputs.xp.asarray(case.lengths, dtype="int32")
            dout = dout.copy()
            for entry, length in zip(dout, case.lengths, strict=True):
                entry[:, length:] = 0
        operands = (inputs.q, inputs.k, inputs.v)
        group = range(case.group_size)
        given: dict[str, Any] = {
            **terms,
            **RANDOM,
            "dtype": numpy_dtype(dtype),
            "heads": [(b, h * case.group_size + g) for b, h in self.groups for g in group],
            "rows_at_once": ROWS_AT_ONCE,
        }
        problem = problem_of(case, *operands, terms)
        if pass_ == "forward":
            results: tuple[Any, ...] = reference.forward(problem, *operands, **given)[:1]
        elif pass_ != "backward":
            given |= {"q": inputs.q, "k": inputs.k, "v": inputs.v}
            given["tangents"] = {name[1:]: x for name, x in inputs.tangents.items()}
            results = (
                reference_tangents.jvp(problem, **given)[:1]
                if pass_ == "jvp"
                else reference_tangents.backward_jvp(problem, dout, **given)
            )
        else:
            results = reference.backward(problem, dout, *operands, **given)
        named = zip(RESULTS[pass_], results, strict=True)
        return {name: [x.copy() for x in self._sampled(name, result)] for name, result in named}

    def _sampled(self, name: str, result: Any) -> list[Any]:
        """The groups of heads out of a whole result (batch, heads, seqlen, dim)."""
        found = []
        for b, h in self.groups:
            per_query_head = name in ("out", "dq", "tout", "tdq")
            heads = slice(h * self.case.group_size, (h + 1) * self.case.group_size) if per_query_head else h
            found.append(result[b, heads][..., : self.case.lengths[b] if self.case.lengths else None, :])
        return found

    def errors(self, pass_: str, results: tuple[Any, ...], coarser: float = 1.0) -> dict[str, Errors]:
        """Errors of whole results on the sampled heads, by name.

        What the formula's errors and the units in the last place are multiplied by is `coarser`.
        """
        errors = {}
        for name, result in zip(RESULTS[pass_], results, strict=True):
            formula_error, ulp = self.allowed[name]
            error = _distance(self._sampled(name, result), self.exact[name])
            errors[name] = Errors(error, coarser * formula_error, coarser * ulp)
        return errors


def _distance(got: Iterable[Any], exact: Iterable[Any]) -> float:
    """Largest absolute difference; NaN where `got` has one."""
    distances = []
    for mine, right in zip(got, exact, strict=True):
        x = on_host(mine) if isinstance(right, np.ndarray) else mine
        distances.append(float(abs(reference.cast(x, right.dtype) - right).max()))
    return float(np.max(distances))  # unlike max(), keeps a NaN
