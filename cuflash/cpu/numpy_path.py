"""Attention and its gradients by NumPy, where there is no compiled core: small heads in stacks, others by tiles.

Online softmax of FlashAttention-2, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import stacked, stacks, tiled_backward, tiled_forward, tiled_terms, tiles
from cuflash.cpu.calls import Call
from cuflash.cpu.packed import Sequence, clear_gradients_of_no_sequence, for_each, sequences
from cuflash.problem import Problem
from cuflash.terms import DEFAULT_NEED, GRADIENTS, NAMES, OF_SCORES

Array = NDArray[Any]


def run(
    problem: Problem,
    arrays: Mapping[str, Array | None],
    is_backward: bool,
    seed: int | None,
    offset: int | None,
    sequence: int | None = None,
) -> None:
    """Compute a pass, as `cuflash.cpu.core.run` does.

    `sequence` is the number of a packed sequence, which dropout counts. It may be computed beside others.
    """
    if problem.is_packed:
        _run_sequences(problem, arrays, is_backward, seed, offset)
        return
    plan = stacks.plan_of(problem, is_backward, sequence is None)
    if plan is not None:
        stacked.run(Call(problem, arrays, seed, offset, sequence), plan, is_backward)
        return
    call = tiles.Call(problem, arrays, seed, offset, sequence)
    if not is_backward:
        tiled_forward.write(call)
        return
    threads = tiles.count_threads(problem.backward_flops)
    if call.wanted.keys() & set(DEFAULT_NEED):
        tiled_backward.write(call, threads, **call.gradients_of_operands)
    if call.wanted.keys() & set(OF_SCORES):
        tiled_terms.write(call, threads)
    tiled_terms.write_of_softmax(call)


# ---- packed sequences ------------------------------------------------------------------------------------------------


def _run_sequences(
    problem: Problem, arrays: Mapping[str, Array | None], is_backward: bool, seed: int | None, offset: int | None
) -> None:
    """Compute a pass over packed sequences. Gradients of terms are sums over them, made in their order."""
    given = {name: x for name, x in arrays.items() if x is not None}
    terms = {name: given.pop(name) for name in NAMES if name in given}
    of_terms = {name: given.pop(name) for name in GRADIENTS if name in given and name not in DEFAULT_NEED}
    heads = (problem.batch, problem.num_heads)
    parts = {name: np.zeros(heads if x.ndim else heads[:1], problem.softmax_dtype) for name, x in of_terms.items()}

    def run_one(one: Sequence) -> None:
        own = one.of_call(given | terms)
        own |= {name: part[one.index, ...] for name, part in parts.items()}
        run(one.problem, own, is_backward, seed, offset, one.index)

    if is_backward:
        clear_gradients_of_no_sequence(problem, given | terms)
    num_products, flops = (5, _backward_flops) if is_backward else (2, _forward_flops)

    def is_short(own: Problem) -> bool:
        return stacks.is_short(own, num_products) if stacks.serves(own) else flops(own) < tiles.SERIAL_FLOPS

    every = list(sequences(problem, terms["cu_seqlens_q"], terms["cu_seqlens_k"]))
    for_each(every, run_one, is_short, tiles.count_threads(flops(problem)))
    with np.errstate(all="ignore"):
        for name, part in parts.items():
            result = of_terms[name]
            result[...] = part if result.shape == part.shape == heads else part.sum(axis=0)


def _forward_flops(problem: Problem) -> int:
    return problem.forward_flops


def _backward_flops(problem: Problem) -> int:
    return problem.backward_flops
