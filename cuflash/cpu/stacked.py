"""Both passes over stacks of heads."""

from __future__ import annotations

import math
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import cap, sink, stacks
from cuflash.cpu.calls import Call
from cuflash.cpu.exponentials import LOWEST_WEIGHT
from cuflash.cpu.stacked_scores import (
    compute_scores,
    distances,
    hide,
    kept_scores,
    part_of,
    weigh,
)
from cuflash.cpu.stacks import Plan, Stack
from cuflash.terms import DEFAULT_NEED

Array = NDArray[Any]

LOWEST = {dtype: np.array(np.finfo(dtype).min, dtype) for dtype in LOWEST_WEIGHT}  # a number, unlike -inf


@np.errstate(all="ignore")
def run(call: Call, plan: Plan, is_backward: bool) -> None:
    """Compute a pass and write its results."""
    if not is_backward:
        stacks.for_each_stack(call, plan, _forward_stack)
        return
    operands = call.gradients_of_operands
    sums = None if len(operands) == len(call.wanted) else _Sums(call)
    stacks.for_each_stack(call, plan, lambda call, stack: _backward_stack(call, stack, sums, **operands))
    if sums is not None:
        sums.write()


# ---- forward ---------------------------------------------------------------------------------------------------------


def _forward_stack(call: Call, stack: Stack) -> None:
    """out and lse of a stack."""
    plan = stack.plan
    q = stack.queries("q", call.q)
    k, v = (stack.keys(name, operand, call.kv_lengths) for name, operand in (("k", call.k), ("v", call.v)))
    scores, _ = compute_scores(call, stack, "scores", q, k, False)
    if plan.hides:
        hide(call, stack, scores, -math.inf)
    m = np.maximum.reduce(scores, 0)
    if plan.hides:
        np.maximum(m, LOWEST[m.dtype], out=m)  # for rows that see no key
    if call.sink:
        call.sink.raise_maxima(stack.of_queries[1], plan.unit, m.reshape(stack.rows_shape))
    small = weigh(stack, scores, m, plan.hides)
    l = np.add.reduce(scores, 0)  # noqa: E741 (the paper's letter)
    if call.sink:
        m_of_rows, l_of_rows = (x.reshape(stack.rows_shape) for x in (m, l))
        call.sink.add_weights(stack.of_queries[1], plan.unit, m_of_rows, l_of_rows)
    row_lse = np.log(l)
    if plan.unit != 1:
        np.divide(m, plan.units, m)
    np.add(row_lse, m, row_lse)
    call.lse[stack.of_queries] = row_lse.reshape(stack.rows_shape)
    if not small:
        np.maximum(l, 1, out=l)  # the largest weight of a row is 1: sums are no smaller, or zero
    np.divide(scores, l, scores)
    if call.problem.dropout:
        scores *= kept_scores(call, stack)
    stack.write_product(call.out[stack.of_queries], stack.product("scores").swapaxes(2, 3), v)


# ---- backward --------------------------------------------------------------------------------------------------------


class _Sums:
    """Gradients that are sums over pairs or rows, those that are wanted, in the dtype of the computation.

    Attributes
    ----------
    dbias : (batch, heads of q, seqlen_q, seqlen_k), 1 where bias is broadcast
    of_heads : dict
        The others by name, (batch, heads of q): their sums over batch entries or over all heads remain to be made.
    """

    def __init__(self, call: Call) -> None:
        self._wanted = {name: x for name, x in call.wanted.items() if name not in DEFAULT_NEED}
        heads = (call.problem.batch, call.problem.num_heads)
        self.of_heads = {name: np.zeros(heads, call.dtype) for name in self._wanted if name != "dbias"}
        dbias = self._wanted.get("dbias")
        self.dbias = None if dbias is None else np.zeros((1,) * (4 - dbias.ndim) + dbias.shape, call.dtype)
        self._lock = Lock()
        self._next = 0
        self._waiting: dict[int, tuple[Array, Array]] = {}

    def add_to_dbias(self, number: int, total: Array, part: Array) -> None:
        """Add a part of stack `number`, after those of the stacks before: it waits here until they are done."""
        with self._lock:
            self._waiting[number] = (total, part)
            while self._next in self._waiting:
                total, part = self._waiting.pop(self._next)
                total += part
                self._next += 1

    def write(self) -> None:
        """Put the sums where they are wanted."""
        for name, result in self._wanted.items():
            if name in self.of_heads:
                result[...] = self.of_heads[name].sum(axis=tuple(range(2 - result.ndim)))
            elif self.dbias is not None:
                result[...] = self.dbias.reshape(result.shape)


def _backward_stack(
    call: Call,
    stack: Stack,
    sums: _Sums | None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
) -> None:
    """Write dq, dk and dv of a stack, and add what the stack contributes to the sums."""
    plan, problem, lengths = stack.plan, call.problem, call.kv_lengths
    q, k, v = stack.queries("q", call.q), stack.keys("k", call.k, lengths), stack.keys("v", call.v, lengths)
    dout, out, row_lse = stack.queries("dout", call.dout), stack.queries("out", call.out), call.lse[stack.of_queries]
    p, tanh = compute_scores(call, stack, "p", q, k, True)
    weigh(stack, p, np.multiply(row_lse, plan.units).reshape(-1), False)
    if plan.hides:
        hide(call, stack, p, 0)
    ds, kept = stack.scores("ds"), kept_scores(call, stack) if problem.dropout else None
    if dv is not None:
        if kept is not None:
            np.multiply(p, kept, out=ds)
        stack.write_product(dv[stack.of_keys], stack.product("p" if kept is None else "ds"), dout)
    if dq is not None or dk is not None or sums is not None:
        delta = np.vecdot(dout, out) if p.shape[1] < stacks.EINSUM_ROWS else np.einsum("...d,...d->...", dout, out)
        if call.dlse is not None:
            delta = delta.reshape(stack.rows_shape) - np.where(row_lse == -math.inf, 0, call.dlse[stack.of_queries])
        stack.multiply_rows(v, dout, stack.product("ds"))
        if kept is not None:
            ds *= kept
        np.subtract(ds, delta.reshape(-1), ds)
        np.multiply(ds, p, ds)
        if sums is not None:
            _add_sums(call, stack, sums, q, k, tanh, row_lse, delta.reshape(stack.rows_shape))
        if tanh is not None:
            ds *= cap.slope_of(tanh)
        np.multiply(ds, plan.scale, ds)
        if dq is not None:
            stack.write_product(dq[stack.of_queries], stack.product("ds").swapaxes(2, 3), k)
        if dk is not None:
            stack.write_product(dk[stack.of_keys], stack.product("ds"), q)
    if lengths is not None:
        gone = ~stack.existing_keys(lengths)[:, None, :, None]
        for of_keys in (dk, dv):
            if of_keys is not None:
                np.copyto(of_keys[stack.of_keys], 0, where=gone)


def _add_sums(
    call: Call, stack: Stack, sums: _Sums, q: Array, k: Array, tanh: Array | None, row_lse: Array, delta: Array
) -> None:
    """Add what a stack contributes to gradients of the other operands of scores, beside q and k, and of the sink."""
    of_heads, ds = sums.of_heads, stack.scores("ds")
    if sums.dbias is not None:
        pairs = stack.as_terms(ds).transpose(1, 2, 3, 0)
        summed = tuple(axis for axis, n in enumerate(sums.dbias.shape) if n == 1)
        sums.add_to_dbias(stack.number, part_of(sums.dbias, stack), pairs.sum(axis=summed, keepdims=True))
    if "dalibi_slopes" in of_heads:
        of_heads["dalibi_slopes"][stack.of_queries] = -(stack.as_terms(ds) * distances(call)).sum(axis=(0, 3))
    if sink.GRADIENT in of_heads and call.sink:
        of_heads[sink.GRADIENT][stack.of_queries] = call.sink.gradient(stack.of_queries[1], row_lse, delta)
    if cap.GRADIENT in of_heads and tanh is not None:
        x = stack.scores("x")
        stack.multiply_rows(k, q, stack.product("x"))
        x *= stack.plan.factor
        parts = stack.as_terms(ds * cap.derivative_by_softcap(x, tanh))
        of_heads[cap.GRADIENT][stack.of_queries] = parts.sum(axis=(0, 3))
    if "dscale" in of_heads:
        of_products = ds if tanh is None else ds * cap.slope_of(tanh)
        dq = stack.take("dq", *q.shape)
        stack.multiply(stack.as_product(of_products).swapaxes(2, 3), k, dq)
        parts = np.einsum("...d,...d->...", dq, q).reshape(stack.rows_shape)
        of_heads["dscale"][stack.of_queries] = parts.sum(axis=2)
