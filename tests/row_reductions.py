"""Row reductions as the tests of all tiers call for them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import cuflash
import cuflash.testing as ct
from cuflash.testing import reference


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
    units = {"float64": 2.0**-44}.get(case.dtype, 2.0**-15)
    each_head: Any = reference.each_head
    for head in each_head(problem, *ct.qkv(arrays), np.float64, **case.random, **ct.optional(arrays)):
        if head.S.shape[1] < 2:
            continue
        first, second = np.partition(head.S, -2, axis=1)[:, [-1, -2]].T
        with np.errstate(invalid="ignore"):
            size = np.abs(problem.scale) * (np.abs(head.Q) @ np.abs(np.nan_to_num(head.K)).T).max(initial=0)
            if np.any(first - second <= least + units * (1 + size + np.abs(first))):
                return False
    return True
