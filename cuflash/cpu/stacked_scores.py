"""Scores of a stack of heads, what hides them, their exponentials, and what dropout makes of these."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu.calls import Call
from cuflash.cpu.cap import apply_cap, has_cap
from cuflash.cpu.exponentials import exponential
from cuflash.cpu.stacks import Stack
from cuflash.dropout import kept_weights
from cuflash.problem import Problem

Array = NDArray[Any]


def compute_scores(
    call: Call, stack: Stack, name: str, q: Array, k: Array, keep_tanh: bool
) -> tuple[Array, Array | None]:
    """Scores times `Plan.unit`, hidden ones included, under this name; with a cap their tanh, if it is wanted."""
    plan, scores = stack.plan, stack.scores(name)
    tanh = stack.scores("tanh") if keep_tanh and has_cap(call.problem) else None
    stack.multiply_rows(k, q, stack.product(name))
    np.multiply(scores, plan.factor, scores)
    apply_cap(call.problem, scores, plan.unit, tanh)
    if call.slopes is not None:
        slopes = np.broadcast_to(call.slopes, (call.problem.batch, call.problem.num_heads))[stack.of_queries]
        term = stack.scores("term")
        np.multiply(distances(call), slopes[:, :, None], out=stack.as_terms(term))
        scores -= term
    if call.bias is not None:
        terms = stack.as_terms(scores)
        terms += part_of(call.bias, stack).transpose(3, 0, 1, 2)
    return scores, tanh


def part_of(term: Array, stack: Stack) -> Array:
    """The part of a bias, of its gradient or of a mask for a stack: four axes, of length 1 where it is broadcast."""
    term = term[(None,) * (4 - term.ndim)]
    return term[tuple(x if n > 1 else slice(None) for x, n in zip(stack.of_queries, term.shape, strict=False))]


def _by_diagonal(values: Array, num_keys: int, num_queries: int) -> Array:
    """Values of i - j, from ``1 - num_keys`` on, as a view (keys, 1, 1, queries)."""
    stride = values.itemsize
    shape, strides = (num_keys, 1, 1, num_queries), (-stride, 0, 0, stride)
    return np.ndarray(shape, values.dtype, values, (num_keys - 1) * stride, strides)


def distances(call: Call) -> Array:
    """``abs(i + d - j)`` as (keys, 1, 1, queries)."""
    n, m = call.problem.seqlen_k, call.problem.seqlen_q
    return _by_diagonal(np.abs(np.arange(1 - n, m) + call.problem.diagonal).astype(call.dtype), n, m)


def hide(call: Call, stack: Stack, scores: Array, value: float) -> None:
    """Put `value` in the place of hidden scores, whatever they are."""
    # np.fmin takes the number of a number and NaN, and NaN of two NaN: NaN leaves alone the scores that are visible.
    if stack.plan.has_window:
        window = stack.windows.get(value)
        if window is None:
            window = stack.windows[value] = _window_of(call.problem, stack, scores, value)
        x = scores if window.ndim == 2 else stack.as_terms(scores)
        np.fmin(x, window, x)
    masks = []
    if call.kv_lengths is not None:
        masks.append(stack.existing_keys(call.kv_lengths).T[:, :, None, None])
    if call.mask is not None:
        masks.append(part_of(call.mask, stack).transpose(3, 0, 1, 2))
    for visible in masks:
        terms = stack.as_terms(scores)
        np.fmin(terms, np.where(visible, call.dtype.type(math.nan), call.dtype.type(value)), out=terms)


def _window_of(problem: Problem, stack: Stack, scores: Array, value: float) -> Array:
    """NaN where the window lets a row see a key, else `value`.

    It is (keys, columns) for a stack that is kept, since NumPy takes longer to broadcast where a head has few rows;
    else it is (keys, 1, 1, queries).
    """
    left, right, here = problem.window_left, problem.window_right, problem.seqlen_k - 1 - problem.diagonal
    first = 0 if right is None else max(here - right, 0)
    stop = problem.seqlen_k + problem.seqlen_q if left is None else max(here + left + 1, 0)
    window = _window(problem.seqlen_k, problem.seqlen_q, first, stop, value, scores.dtype)
    if not stack.plan.keeps_stacks:
        return window
    whole = np.empty_like(scores)
    stack.as_terms(whole)[...] = window
    return whole


@lru_cache(maxsize=16)
def _window(num_keys: int, num_queries: int, first: int, stop: int, value: float, dtype: np.dtype[Any]) -> Array:
    """NaN where ``num_keys - 1 + i - j`` is in ``range(first, stop)``, else `value`: (keys, 1, 1, queries).

    It is a view of few numbers, kept for later calls, and read-only.
    """
    values = np.full(num_keys + num_queries - 1, value, dtype)
    values[first:stop] = math.nan
    values.flags.writeable = False
    return _by_diagonal(values, num_keys, num_queries)


def kept_scores(call: Call, stack: Stack) -> Array:
    """The factors by which dropout multiplies weights, (keys, columns)."""
    problem = call.problem
    entries, heads = (np.arange(x.start, x.stop) for x in stack.of_queries)
    numbers = call.first_head + entries[:, None] * problem.origin.num_heads + heads
    (i, j), m, n = problem.origin[:2], problem.seqlen_q, problem.seqlen_k
    rows, columns = range(i, i + m), range(j, j + n)
    kept = kept_weights(problem.dropout, call.seed, call.offset, numbers, rows, columns)
    factor = stack.scores("kept")
    np.multiply(kept.transpose(3, 0, 1, 2), call.dtype.type(problem.kept_scale), out=stack.as_terms(factor))
    return factor


def weigh(stack: Stack, scores: Array, shift: Array, hidden: bool) -> bool:
    """Replace scores by exponentials of scores less `shift`, a number for each column; return whether none is zero.

    With `hidden`, some scores are -inf, and no shift is.
    """
    plan = stack.plan
    np.subtract(scores, shift, scores)
    small = not hidden and bool(np.minimum.reduce(scores, None) >= plan.least)
    if not (small or hidden):
        empty = shift == -math.inf  # a row that sees no key: all of its scores are -inf
        np.copyto(scores, -math.inf, where=empty)
        np.copyto(shift, 0, where=empty)
    exponential(scores, plan.unit, small=small)
    return small
