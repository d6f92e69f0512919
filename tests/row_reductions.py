"""Row reductions as the tests of all tiers call for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays.array_info import view_rows
from cuflash.spec.options import Options
from cuflash.spec.problem import Problem, make_problem
from cuflash.testing import reference
from tests.judging import assert_within


class Found(NamedTuple):
    """The results of both passes by name; no gradients of a case that has none."""

    forward: Mapping[str, Any]
    gradients: Mapping[str, Any]


def results_of(
    case: ct.Case,
    convert: Callable[[Any], Any] = np.asarray,
    keys_of: Callable[[Any, Any], tuple[Any, Any]] = lambda k, v: (k, v),
    **options: Any,
) -> Found:
    """What `cuflash.FlashAttention` gives for a case with reductions; out and dv are None of a case without values.

    `keys_of` makes what a call takes of k and v.
    """
    attn: Any = cuflash.FlashAttention(**case.keywords, **options)
    arrays = case.arrays(convert)
    q, k, v = ct.qkv(arrays) if case.has_values else (arrays["q"], arrays["k"], None)
    k, v = keys_of(k, v)
    optional = ct.optional(arrays) | case.random
    if not case.has_values:
        optional.pop("v_scale", None)
    found = attn.forward(q, k, v, want=case.row_reductions, **optional)._asdict()
    gradients: dict[str, Any] = {}
    if "dout" in arrays:
        dout = arrays["dout"] if case.has_values else None
        of_rows = {name: x for name, x in ct.optional_backward(arrays).items() if name not in optional}
        if "dentropy" in of_rows:
            of_rows["entropy"] = found["entropy"]
        need = ct.gradients_of(case.problem)
        gradients = attn.backward(dout, q, k, v, found["out"], found["lse"], need=need, **of_rows, **optional)._asdict()
    if not case.has_values:
        # It has no columns, and the shape of dout, whose batch axes may be fewer or more than those of a problem.
        nothing = np.empty(case.problem.out_shape, case.arrays()["q"].dtype)
        found["out"] = arrays.get("dout", convert(nothing))
    return Found(found, {name: x for name, x in gradients.items() if x is not None})


def gap_is_clear(case: ct.Case, least: float = 0.0) -> bool:
    """Whether the largest score of each row is so far from the next one that rounding does not change which it is."""
    arrays, problem = case.arrays(), case.problem
    if case.axes is not None:
        spread = case.spread
        assert spread is not None
        arrays = spread.arrays
    return maxima_are_clear(problem, arrays, least, **case.random)


def maxima_are_clear(problem: Problem, arrays: Mapping[str, Any], least: float = 0.0, **random: int) -> bool:
    """The same of arrays by name, for rows whose maximum has a gradient."""
    units = {"float64": 2.0**-44}.get(problem.dtype, 2.0**-15)
    read = {**ct.optional(arrays), **{name: arrays[name] for name, _ in problem.score_args}}
    has_gradient = view_rows(arrays["dmax"]) != 0 if "dmax" in arrays else None
    each_head: Any = reference.each_head
    for head in each_head(problem, *ct.qkv(arrays), np.float64, **random, **read):
        if head.S.shape[1] < 2:
            continue
        first, second = np.partition(head.S, -2, axis=1)[:, [-1, -2]].T
        with np.errstate(invalid="ignore"):
            size = np.abs(problem.scale) * (np.abs(head.Q) @ np.abs(np.nan_to_num(head.K)).T).max(initial=0)
            is_close = first - second <= least + units * (1 + size + np.abs(first))
        if np.any(is_close if has_gradient is None else is_close & has_gradient[head.index]):
            return False
    return True


def bent(s: Any, i: Any, j: Any) -> Any:
    return cuflash.log(1.0 + cuflash.exp(s))


def rooted(s: Any, i: Any, j: Any, *, bar: Any) -> Any:
    """Its derivative is infinite where a product is 0, and its value is low where there is a bar."""
    return cuflash.sqrt(s) - bar[j]


@dataclass(frozen=True)
class BehindSink:
    """A problem whose sinks leave the maxima of rows much, little or none of the weight."""

    seed: int
    sizes: tuple[int, int]
    sink: float
    score: Callable[..., Any] | None
    softcap: float | None
    has_bias: bool
    causal: bool
    deterministic: bool
    shown: float  # part of the pairs

    @property
    def keywords(self) -> dict[str, Any]:
        softcap = None if self.score else self.softcap
        return {"scale": 0.5, "score": self.score, "softcap": softcap, "causal": self.causal}

    @property
    def options(self) -> Options:
        return cuflash.FlashAttention(**self.keywords, deterministic=self.deterministic).options

    def arrays(self, dtype: str) -> dict[str, Any]:
        rng, (rows, keys) = np.random.default_rng(self.seed), self.sizes
        q, v, dout = (rng.standard_normal((1, h, n, 16)) for h, n in ((2, rows), (1, keys), (2, rows)))
        k, dmax = rng.standard_normal((1, 1, keys, 16)), rng.standard_normal((1, 2, rows))
        dmax[rng.random(dmax.shape) < 0.2] = 0
        mask, bars = rng.random(self.sizes) < self.shown, rng.random(keys)
        if self.score is rooted:
            q, k = np.abs(q), np.abs(k)
            k[:, :, ::4] = 0
            mask[:, ::8] = False  # some are hidden, others have no weight: neither has a derivative
            bars[4::8] = 1e5
            visible = mask & np.tri(rows, keys, keys - rows if self.causal else keys, dtype=bool)
            dmax[:, :, ~visible[:, bars < 1e5].any(axis=1)] = 0  # else it is times an infinite derivative
            if self.sink == 5e4:  # nor has a maximum without weight and without a gradient
                q[:, :, ::3], dmax[:, :, ::3] = 0, 0
        real = np.float64 if dtype == "float64" else np.float32
        own = {name: x.astype(ct.numpy_dtype(dtype)) for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items()}
        of_rows = {"sinks": np.full(2, self.sink), "dmax": dmax}
        of_rows |= {"bar": bars} if self.score is rooted else {}
        of_rows |= {"bias": rng.standard_normal(self.sizes)} if self.has_bias and self.score is None else {}
        return own | {"mask": mask} | {name: x.astype(real) for name, x in of_rows.items()}

    def problem(self, dtype: str) -> Problem:
        arrays = self.arrays(dtype)
        read = {name: x for name, x in arrays.items() if name == "bar"}
        given = {name: x for name, x in arrays.items() if name in ("mask", "sinks", "bias")}
        problem = make_problem(self.options, *ct.qkv(arrays), score_args=read, **given)
        return replace(problem, row_reductions=("max",))

    def judge(self, dtype: str, run: Callable[..., tuple[Any, Any, Mapping[str, Any]]]) -> None:
        """Hold out, lse and the gradients that `run` makes of options, arrays and names to the oracle rule."""
        arrays, problem = self.arrays(dtype), self.problem(dtype)
        # Emulated passes that have functions give no gradient of sinks. As for that of a cap, with one key for each row
        # luck decides how exact it is, and how exact the plain formula's.
        need = tuple(name for name in ct.gradients_of(problem) if name not in ("dsinks", "dsoftcap"))
        out, lse, gradients = run(self.options, arrays, need)
        assert_within({"out": out, "lse": lse, **gradients}, ct.yardsticks(problem, arrays))


BEHIND_SINKS = st.builds(
    BehindSink,
    seed=st.integers(0, 2**16),
    sizes=st.sampled_from([(40, 40), (70, 133), (20, 300)]),
    sink=st.sampled_from([-3.0, 60.0, 5e4]),
    score=st.sampled_from([None, bent, rooted]),
    softcap=st.sampled_from([None, 2.0]),
    has_bias=st.booleans(),
    causal=st.booleans(),
    deterministic=st.booleans(),
    shown=st.sampled_from([0.7, 1.0]),
)
