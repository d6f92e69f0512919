"""Arrays of a case, and what is computed of them in cuflash's words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuflash import FlashAttention
from cuflash.arrays.array_info import numpy_dtype
from cuflash.arrays.dlpack import on_host
from cuflash.spec.problem import Problem, make_problem

from .cases import BLOCK, SECOND, VISIBLE, Case
from .functions import DOCUMENTS, FUNCTIONS

RANDOM = {"seed": 1, "offset": 2}  # of dropout


@dataclass(frozen=True)
class Inputs:
    """Operands of one case, NumPy or CuPy arrays; `xp` is the module they belong to.

    `terms` are those of `Case.terms`, `tangents` tq, tk and tv where a pass takes some.
    """

    xp: Any
    q: Any
    k: Any
    v: Any
    dout: Any
    terms: Mapping[str, Any] = field(default_factory=dict)
    tangents: Mapping[str, Any] = field(default_factory=dict)

    def on_host(self) -> Inputs:
        """The same inputs as NumPy arrays."""
        q, k, v, dout = (on_host(x) for x in (self.q, self.k, self.v, self.dout))
        terms, tangents = ({name: on_host(x) for name, x in own.items()} for own in (self.terms, self.tangents))
        return Inputs(np, q, k, v, dout, terms, tangents)


def make_inputs(xp: Any, case: Case, seed: int = 0, *, passes: Iterable[str] = ()) -> Inputs:
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
    shapes = {"tq": case.q_shape, "tk": case.k_shape, "tv": case.v_shape} if set(passes) & set(SECOND) else {}
    tangents = {name: normal(shape) for name, shape in shapes.items()}
    return Inputs(xp, q, k, v, dout, {name: make[name](*term) for name, term in case.terms.items()}, tangents)


def keywords_of(case: Case) -> dict[str, Any]:
    """What `cuflash.FlashAttention` is made with for a case."""
    function = FUNCTIONS[case.function] if case.function else None
    return {
        "causal": case.causal,
        "block_size": BLOCK,
        "softcap": case.softcap or None,
        "window": (case.window - 1, 0) if case.window else None,
        "dropout": case.dropout,
        "score": function.traced if function and not function.is_mask else None,
        "mask": function.traced if function and function.is_mask else None,
    }


def problem_of(case: Case, q: Any, k: Any, v: Any, terms: Mapping[str, Any]) -> Problem:
    """The problem of a case, of whose terms its function reads some."""
    read = FUNCTIONS[case.function].shapes if case.function else ()
    others = {name: x for name, x in terms.items() if name not in read}
    options = FlashAttention(**keywords_of(case)).options
    return make_problem(options, q, k, v, score_args={name: terms[name] for name in read}, **others)
