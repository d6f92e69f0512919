"""Attention and its gradients on NumPy arrays where heads are small: whole heads, a stack of them at a time.

Letters as in `cuflash.reference`. A call of NumPy takes a microsecond, and `tiles` needs hundreds of them for a tile:
too many where a head has few scores. Here a stack of heads takes about as many calls as the formula does. What is
computed for a head depends neither on the numbers of other heads nor on how many threads there are.

Scores of a stack lie in memory as (keys, heads, queries). Maxima and sums over keys, and all that is done to a row of
scores, go along runs of neighbours as long as the stack has queries: with 16 keys to a row, NumPy takes 0.1 ns a score
for a maximum in this order, and 3.1 ns where the keys of a row are neighbours. A stack is as large as suits the cache,
and its arrays are computed in place.

Operands are multiplied where they lie, if BLAS can read them there: the matrices of a stack need not be neighbours. But
q and dout are copied where heads are not tiny. OpenBLAS takes up to three times as long for a product of rows with rows
as it does for one of rows with columns, and the copy has columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import exponentials
from cuflash.cpu.exponentials import LOWEST_WEIGHT, exponential
from cuflash.cpu.jobs import PRODUCT_LIMIT, Workspace, count_cores, kept_workspace, run
from cuflash.dropout import kept_weights
from cuflash.operands import view_4d, view_rows
from cuflash.problem import Problem
from cuflash.terms import DEFAULT_NEED

Array = NDArray[Any]

STACK = 2**18  # scores in a stack: one MiB in float32, as in a tile of `cuflash.cpu.tiles`
STACK_ROWS = 2**21  # numbers in the rows of its operands
HEAD_PRODUCT = 2**21  # multiplications in a product of a head: tiles are faster beyond
TINY = 2**16  # scores and such numbers: surely too little work for threads
STACK_NS = 1_000_000  # the work of a stack, where there are threads to share stacks
# Work too small to be worth a second thread, and what it takes to start one, to wait for it and for the interpreter's
# lock: where operations are short, and where products are large enough for BLAS to share them among its own threads.
SERIAL_NS = (8_000_000, 5_000_000)
THREAD_NS = (250_000, 100_000)
MANY = 2**12  # numbers of rows that are worth looking at copying them
COLUMNS = 40  # rows of a head that are worth a copy as columns; less if they are shorter
SMALL_PRODUCT = 10**6  # multiplications: larger products are fast without that
EINSUM_ROWS = 128  # of a stack, that are worth the longer call of np.einsum
FLOAT32 = np.dtype(np.float32)
LOWEST = {dtype: float(np.finfo(dtype).min) for dtype in LOWEST_WEIGHT}  # a number, unlike -inf
# Exponentials of scores above this have the same bits with `small` and without.
LEAST = {dtype: math.log(weight) / 2 for dtype, weight in LOWEST_WEIGHT.items()}


def serves(problem: Problem) -> bool:
    """Whether stacks are for this problem: small heads, all of their keys in one piece, and something to compute.

    Small are heads whose products have at most HEAD_PRODUCT multiplications, and where those that share keys fit into a
    stack. Tiles leave out what a block mask hides, and follow a block table.
    """
    scores, num_rows = problem.seqlen_q * problem.seqlen_k, problem.group_size * problem.seqlen_q
    dims = (problem.head_dim, problem.head_dim_v)
    return (
        0 < scores * max(dims) <= HEAD_PRODUCT
        and num_rows * problem.seqlen_k <= STACK
        and (num_rows + problem.seqlen_k) * sum(dims) <= STACK_ROWS
        and problem.batch * problem.num_heads > 0
        and problem.block_mask is None
        and problem.block_table is None
    )


def is_short(problem: Problem, num_products: int) -> bool:
    """Whether a pass of so many products over all heads is too little work for a second thread."""
    return _nanoseconds(problem, num_products) <= SERIAL_NS[_has_large_products(problem)]


def _nanoseconds(problem: Problem, num_products: int) -> float:
    """About how long a pass takes on one core: calls of BLAS, passes over scores and their products, and over rows."""
    num_rows, dims = problem.group_size * problem.seqlen_q, problem.head_dim + problem.head_dim_v
    scores, numbers = num_rows * problem.seqlen_k, (num_rows + problem.seqlen_k) * dims
    of_head = 2 * scores + num_products * (min(100, 25 * scores) + scores * dims / 120 + numbers / 5)
    return problem.batch * problem.num_heads_kv * of_head * (2 if problem.dtype == "float64" else 1)


def _has_large_products(problem: Problem) -> bool:
    """Whether BLAS would share products of a head among threads."""
    scores = problem.group_size * problem.seqlen_q * problem.seqlen_k
    return scores * max(problem.head_dim, problem.head_dim_v) > PRODUCT_LIMIT


class Call:
    """The operands of one call as (batch, heads, seqlen, dim), and its terms by name, None for absent ones."""

    def __init__(
        self,
        problem: Problem,
        q: Array,
        k: Array,
        v: Array,
        terms: Mapping[str, Array | None],
        seed: int | None,
        offset: int | None,
        sequence: int | None,
    ) -> None:
        layout = problem.layout
        self.problem = problem
        self.q, self.k, self.v = view_4d(q, layout), view_4d(k, layout), view_4d(v, layout)
        self.dtype = q.dtype if q.dtype.itemsize > 2 else FLOAT32
        self.group_size = problem.group_size
        self.bias, self.mask, self.kv_lengths = terms["bias"], terms["mask"], terms["kv_lengths"]
        self.slopes, self.sinks = terms["alibi_slopes"], terms["sinks"]
        self.seed, self.offset = seed, offset
        self.first_head = 0 if sequence is None else sequence * problem.num_heads  # for dropout
        self.has_window = problem.window_left is not None or problem.window_right is not None
        self.hides = self.has_window or self.mask is not None or self.kv_lengths is not None
        # Added terms may be large and nearly cancel: they come before a multiplication by UNIT, as in `tiles`.
        self.unit = exponentials.UNIT if self.bias is None and self.slopes is None else 1.0
        # Multiplications in one product, where others are computed at the same time: too few for BLAS to start threads.
        self.product_limit = None if sequence is None else PRODUCT_LIMIT


def forward(call: Call, out: Array, lse: Array) -> None:
    """Write out and lse, as `cuflash.cpu.forward` does."""
    out, lse = view_4d(out, call.problem.layout), view_rows(lse)
    _run(call, 2, lambda *part: _forward_stack(_Stack(call, *part), out, lse))


def backward(call: Call, dout: Array, out: Array, lse: Array, dlse: Array | None, wanted: Mapping[str, Array]) -> None:
    """Write the gradients that are wanted, as `cuflash.cpu.backward` does."""
    layout = call.problem.layout
    rows = (view_4d(dout, layout), view_4d(out, layout), view_rows(lse), None if dlse is None else view_rows(dlse))
    operands = {name: view_4d(wanted[name], layout) for name in DEFAULT_NEED if name in wanted}
    sums = None if len(operands) == len(wanted) else _Sums(call, wanted)
    _run(call, 5, lambda *part: _backward_stack(_Stack(call, *part), *rows, sums, **operands))
    if sums is not None:
        sums.write()


# ---- stacks ----------------------------------------------------------------------------------------------------------


def _run(call: Call, num_products: int, work: Callable[..., None]) -> None:
    """Call ``work(workspace, number, entries, heads)`` for slices of the batch and of the heads of k and v.

    What is in a stack, and whether products are cut, follows from the problem, and not from the machine. Where there is
    work for several threads, products are too small for BLAS to start threads of its own. Otherwise they are whole, as
    in the formula, and BLAS may.
    """
    problem = call.problem
    batch, num_heads, num_rows = problem.batch, problem.num_heads_kv, call.group_size * problem.seqlen_q
    scores = num_rows * problem.seqlen_k
    numbers = (num_rows + problem.seqlen_k) * (problem.head_dim + problem.head_dim_v)
    at_most, threads = min(STACK // scores, STACK_ROWS // numbers), 1
    if batch * num_heads * (scores + numbers) > TINY:
        nanoseconds, are_large = _nanoseconds(problem, num_products), _has_large_products(problem)
        if nanoseconds > SERIAL_NS[are_large]:
            call.product_limit = PRODUCT_LIMIT
            at_most = min(at_most, int(batch * num_heads * STACK_NS / nanoseconds))
            threads = _count_threads(nanoseconds / THREAD_NS[are_large])
    if batch * num_heads <= at_most:
        with kept_workspace(call.dtype) as workspace:
            work(workspace, 0, slice(0, batch), slice(0, num_heads))
        return
    parts = [(b, h) for b in _slices(batch, at_most // num_heads) for h in _slices(num_heads, at_most)]
    run(work, [(number, *part) for number, part in enumerate(parts)], threads, call.dtype)


def _count_threads(work: float) -> int:
    """So many that starting them takes about as long as the work of each, or as many as there are cores."""
    return min(math.isqrt(int(work)), count_cores())


def _slices(length: int, at_most: int) -> list[slice]:
    """Slices of an axis, about equally long."""
    count = -(-length // max(at_most, 1))
    return [slice(i * length // count, (i + 1) * length // count) for i in range(count)]


class _Stack:
    """Some heads of k and v of some batch entries, with the heads of q that share them.

    Their scores are an array of two axes, (keys, columns), a column for every row of q. It is looked at in two other
    ways: as terms and masks are, and as products are made.
    """

    def __init__(self, call: Call, workspace: Workspace, number: int, entries: slice, heads: slice) -> None:
        problem, group = call.problem, call.group_size
        num_entries, num_heads = entries.stop - entries.start, heads.stop - heads.start
        self.call = call
        self.number = number
        self.take = workspace.take
        self.of_keys = self.of_queries = (entries, heads)
        if group > 1:
            self.of_queries = (entries, slice(group * heads.start, group * heads.stop))
        self.rows_shape = (num_entries, group * num_heads, problem.seqlen_q)
        self.product_shape = (problem.seqlen_k, num_entries, num_heads, group * problem.seqlen_q)
        self.num_columns = num_entries * num_heads * group * problem.seqlen_q
        is_plain = call.product_limit is None and problem.seqlen_k > 1 < group * problem.seqlen_q
        self.multiply = np.matmul if is_plain else self._multiply

    def take_scores(self, name: str) -> Array:
        """Memory for scores, (keys, columns). Neighbours are those along the longer axis."""
        num_keys, num_columns = self.product_shape[0], self.num_columns
        if num_keys > num_columns:
            return self.take(name, num_columns, num_keys).T
        return self.take(name, num_keys, num_columns)

    def as_terms(self, scores: Array) -> Array:
        """Scores as (keys, batch entries, heads of q, queries)."""
        return scores.reshape(len(scores), *self.rows_shape)

    def as_product(self, scores: Array) -> Array:
        """Scores as (batch entries, heads of k and v, keys, columns of a head)."""
        return scores.reshape(self.product_shape).transpose(1, 2, 0, 3)

    def keys(self, name: str, operand: Array) -> Array:
        """The part of k or v, zero where `kv_lengths` say that there are no keys."""
        part, lengths = operand[self.of_keys], self.call.kv_lengths
        if lengths is None:
            return part if self._suits_blas(part) else self._staged(name, part)
        staged = self.take(name, *part.shape)
        staged[...] = 0
        np.copyto(staged, part, where=self.existing_keys(lengths)[:, None, :, None], casting="unsafe")
        return staged

    def existing_keys(self, lengths: Array) -> Array:
        """Whether keys are within `kv_lengths`: (batch entries, keys)."""
        return np.arange(self.call.problem.seqlen_k) < lengths[self.of_keys[0], None]

    def queries(self, name: str, operand: Array) -> Array:
        """The part of q, out or dout as (batch entries, heads of k and v, rows, dim)."""
        part = operand[self.of_queries]
        if not self._suits_blas(part):
            part = self._staged(name, part)
        return part if self.call.group_size == 1 else part.reshape(*self.product_shape[1:], part.shape[3])

    def _suits_blas(self, matrices: Array) -> bool:
        return matrices.dtype == self.call.dtype and (matrices.flags.c_contiguous or _rows_are_apart(matrices))

    def _staged(self, name: str, part: Array) -> Array:
        staged = self.take(name, *part.shape)
        staged[...] = part
        return staged

    def _multiply(self, a: Array, b: Array, out: Array) -> None:
        """The matrix product of stacks, a few rows at a time where there is a limit."""
        if a.shape[3] == 1:  # BLAS takes five times as long
            np.multiply(a, b, out)
            return
        limit, num_rows = self.call.product_limit, a.shape[2]
        step = num_rows if limit is None else max(1, limit // (a.shape[3] * b.shape[3]))
        for i in range(0, num_rows, step):
            np.matmul(a[:, :, i : i + step], b, out[:, :, i : i + step])

    def multiply_rows(self, a: Array, b: Array, out: Array) -> None:
        """The product of rows with rows: of k with q, or of v with dout."""
        columns = b.swapaxes(2, 3)
        if b.size >= MANY and self._copies_columns(a, b):
            columns = self._staged("columns", columns)
        self.multiply(a, columns, out)

    def _copies_columns(self, a: Array, b: Array) -> bool:
        """Whether a copy of the rows of `b` as columns pays."""
        num_rows, dim = b.shape[2:]
        is_small = self.call.product_limit is not None or a.shape[2] * num_rows * dim < SMALL_PRODUCT
        return num_rows >= min(dim, COLUMNS) and is_small

    def write_product(self, result: Array, a: Array, b: Array) -> None:
        """Put the product of stacks in its place in a result."""
        if self.call.group_size == 1 and self._suits_blas(result):
            self.multiply(a, b, result)
            return
        product = self.take("product", *a.shape[:3], b.shape[3])
        self.multiply(a, b, product)
        result[...] = product.reshape(result.shape)


def _rows_are_apart(matrices: Array) -> bool:
    """Whether elements of a row are neighbours, and rows do not overlap."""
    row_stride, stride = matrices.strides[2:]
    return stride == matrices.itemsize and row_stride >= matrices.shape[3] * stride


# ---- scores ----------------------------------------------------------------------------------------------------------


def _scores(stack: _Stack, q: Array, k: Array, keep_tanh: bool) -> tuple[Array, Array, Array | None]:
    """Scores times `Call.unit`, hidden ones included, and as a product; with softcap their tanh, if it is wanted."""
    call, problem = stack.call, stack.call.problem
    scores, tanh = stack.take_scores("scores"), None
    product = stack.as_product(scores)
    stack.multiply_rows(k, q, product)
    if problem.softcap is None:
        scores *= problem.scale * call.unit
    else:
        scores *= problem.scale / problem.softcap
        tanh = np.tanh(scores, out=stack.take_scores("tanh") if keep_tanh else scores)
        np.multiply(tanh, problem.softcap * call.unit, out=scores)
    if call.slopes is not None:
        slopes = np.broadcast_to(call.slopes, (problem.batch, problem.num_heads))[stack.of_queries]
        term = stack.take_scores("term")
        np.multiply(_distances(call), slopes[:, :, None], out=stack.as_terms(term))
        scores -= term
    if call.bias is not None:
        terms = stack.as_terms(scores)
        terms += _part(call.bias, stack).transpose(3, 0, 1, 2)
    return scores, product, tanh


def _part(term: Array, stack: _Stack) -> Array:
    """What a stack meets of a bias, of its gradient or of a mask: four axes, of length 1 where it is broadcast."""
    term = term[(None,) * (4 - term.ndim)]
    return term[tuple(x if n > 1 else slice(None) for x, n in zip(stack.of_queries, term.shape, strict=False))]


def _by_diagonal(values: Array, num_keys: int, num_queries: int) -> Array:
    """Values of i - j, from ``1 - num_keys`` on, as a view (keys, 1, 1, queries)."""
    stride = values.itemsize
    shape, strides = (num_keys, 1, 1, num_queries), (-stride, 0, 0, stride)
    return np.ndarray(shape, values.dtype, values, (num_keys - 1) * stride, strides)


def _distances(call: Call) -> Array:
    """``abs(i + d - j)`` as (keys, 1, 1, queries)."""
    n, m = call.problem.seqlen_k, call.problem.seqlen_q
    return _by_diagonal(np.abs(np.arange(1 - n, m) + call.problem.diagonal).astype(call.dtype), n, m)


def _hide(stack: _Stack, scores: Array, value: float) -> None:
    """Put `value` in the place of hidden scores, whatever they are."""
    call, problem = stack.call, stack.call.problem
    terms = stack.as_terms(scores)
    # Of a number and NaN np.fmin takes the number, and of two NaN it takes NaN: this leaves alone what is visible.
    if call.has_window:
        left, right, here = problem.window_left, problem.window_right, problem.seqlen_k - 1 - problem.diagonal
        first = 0 if right is None else max(here - right, 0)
        stop = problem.seqlen_k + problem.seqlen_q if left is None else max(here + left + 1, 0)
        np.fmin(terms, _window(problem.seqlen_k, problem.seqlen_q, first, stop, value, call.dtype), out=terms)
    masks = []
    if call.kv_lengths is not None:
        masks.append(stack.existing_keys(call.kv_lengths).T[:, :, None, None])
    if call.mask is not None:
        masks.append(_part(call.mask, stack).transpose(3, 0, 1, 2))
    for visible in masks:
        np.fmin(terms, np.where(visible, call.dtype.type(math.nan), call.dtype.type(value)), out=terms)


@lru_cache(maxsize=16)
def _window(num_keys: int, num_queries: int, first: int, stop: int, value: float, dtype: np.dtype[Any]) -> Array:
    """NaN where ``num_keys - 1 + i - j`` is in ``range(first, stop)``, else `value`: (keys, 1, 1, queries).

    Made of few numbers, kept for later calls, and read-only.
    """
    values = np.full(num_keys + num_queries - 1, value, dtype)
    values[first:stop] = math.nan
    values.flags.writeable = False
    return _by_diagonal(values, num_keys, num_queries)


def _kept(stack: _Stack) -> Array:
    """What dropout multiplies weights by, (keys, columns)."""
    call, problem = stack.call, stack.call.problem
    entries, heads = (np.arange(x.start, x.stop) for x in stack.of_queries)
    numbers = call.first_head + entries[:, None] * problem.num_heads + heads
    rows, columns = range(problem.seqlen_q), range(problem.seqlen_k)
    kept = kept_weights(problem.dropout, call.seed, call.offset, numbers, rows, columns)
    factor = stack.take_scores("kept")
    np.multiply(kept.transpose(3, 0, 1, 2), call.dtype.type(problem.kept_scale), out=stack.as_terms(factor))
    return factor


def _weights(stack: _Stack, scores: Array, shift: Array, hidden: bool) -> bool:
    """Put exponentials of scores less `shift`, a number for each column, in their place; whether none is zero.

    With `hidden` some of them are -inf, and no shift is.
    """
    scores -= shift
    unit = stack.call.unit
    small = not hidden and np.minimum.reduce(scores, None) >= LEAST[scores.dtype] * unit
    if not (small or hidden):
        empty = shift == -math.inf  # all scores of such a row are: it sees no key
        np.copyto(scores, -math.inf, where=empty)
        np.copyto(shift, 0, where=empty)
    exponential(scores, unit, small=small)
    return small


# ---- forward ---------------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def _forward_stack(stack: _Stack, out: Array, lse: Array) -> None:
    """out and lse of a stack."""
    call, unit = stack.call, stack.call.unit
    q, k, v = stack.queries("q", call.q), stack.keys("k", call.k), stack.keys("v", call.v)
    scores, product, _ = _scores(stack, q, k, False)
    if call.hides:
        _hide(stack, scores, -math.inf)
    m = np.maximum.reduce(scores, 0)
    if call.hides:
        np.maximum(m, LOWEST[m.dtype], out=m)  # of a row that sees no key
    if call.sinks is not None:
        m_of_rows, sinks = m.reshape(stack.rows_shape), (call.sinks[stack.of_queries[1]] * unit)[:, None]
        np.maximum(m_of_rows, sinks, out=m_of_rows)
    small = _weights(stack, scores, m, call.hides)
    l = np.add.reduce(scores, 0)  # noqa: E741 (the paper's letter)
    if call.sinks is not None:
        l_of_rows = l.reshape(stack.rows_shape)
        l_of_rows += np.exp((sinks - m_of_rows) / unit)
    row_lse = np.log(l)
    if unit != 1:
        m /= unit
    row_lse += m
    lse[stack.of_queries] = row_lse.reshape(stack.rows_shape)
    if not small:
        np.maximum(l, 1, out=l)  # the largest weight of a row is 1: sums are no smaller, or zero
    scores /= l
    if call.problem.dropout:
        scores *= _kept(stack)
    stack.write_product(out[stack.of_queries], product.swapaxes(2, 3), v)


# ---- backward --------------------------------------------------------------------------------------------------------


class _Sums:
    """Gradients that are sums over pairs or rows, those that are wanted, in the dtype of the computation.

    Attributes
    ----------
    dbias : (batch, heads of q, seqlen_q, seqlen_k), 1 where bias is broadcast
    of_heads : dict
        The others by name, (batch, heads of q): their sums over batch entries or over all heads remain to be made.
    """

    def __init__(self, call: Call, wanted: Mapping[str, Array]) -> None:
        self._wanted = {name: x for name, x in wanted.items() if name not in DEFAULT_NEED}
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
        with np.errstate(all="ignore"):
            for name, result in self._wanted.items():
                if name in self.of_heads:
                    result[...] = self.of_heads[name].sum(axis=tuple(range(2 - result.ndim)))
                elif self.dbias is not None:
                    result[...] = self.dbias.reshape(result.shape)


@np.errstate(all="ignore")
def _backward_stack(
    stack: _Stack,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    sums: _Sums | None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
) -> None:
    """Put dq, dk and dv of a stack in their places, and add what it has to the sums."""
    call, problem = stack.call, stack.call.problem
    q, k, v = stack.queries("q", call.q), stack.keys("k", call.k), stack.keys("v", call.v)
    dout, out, row_lse = stack.queries("dout", dout), stack.queries("out", out), lse[stack.of_queries]
    p, p_product, tanh = _scores(stack, q, k, True)
    _weights(stack, p, (row_lse * call.unit).reshape(-1), False)
    if call.hides:
        _hide(stack, p, 0)
    ds = stack.take_scores("ds")
    ds_product = stack.as_product(ds)
    kept = _kept(stack) if problem.dropout else None
    if dv is not None:
        if kept is not None:
            np.multiply(p, kept, out=ds)
        stack.write_product(dv[stack.of_keys], p_product if kept is None else ds_product, dout)
    if dq is not None or dk is not None or sums is not None:
        delta = np.vecdot(dout, out) if p.shape[1] < EINSUM_ROWS else np.einsum("...d,...d->...", dout, out)
        if dlse is not None:
            delta = delta.reshape(stack.rows_shape) - np.where(row_lse == -math.inf, 0, dlse[stack.of_queries])
        stack.multiply_rows(v, dout, ds_product)
        if kept is not None:
            ds *= kept
        ds -= delta.reshape(-1)
        ds *= p
        if sums is not None:
            _add_sums(stack, sums, q, k, ds, tanh, row_lse, delta.reshape(stack.rows_shape))
        if tanh is not None:
            ds *= _slope(tanh)
        ds *= problem.scale
        if dq is not None:
            stack.write_product(dq[stack.of_queries], ds_product.swapaxes(2, 3), k)
        if dk is not None:
            stack.write_product(dk[stack.of_keys], ds_product, q)
    if call.kv_lengths is not None:
        gone = ~stack.existing_keys(call.kv_lengths)[:, None, :, None]
        for of_keys in (dk, dv):
            if of_keys is not None:
                np.copyto(of_keys[stack.of_keys], 0, where=gone)


def _slope(tanh: Array) -> Array:
    """The derivative of the hyperbolic tangent."""
    slope = tanh * tanh
    return np.subtract(1, slope, out=slope)


def _add_sums(
    stack: _Stack, sums: _Sums, q: Array, k: Array, ds: Array, tanh: Array | None, row_lse: Array, delta: Array
) -> None:
    """What a stack has for gradients of what scores are made of beside q and k, and of sinks."""
    call, problem, of_heads = stack.call, stack.call.problem, sums.of_heads
    if sums.dbias is not None:
        pairs = stack.as_terms(ds).transpose(1, 2, 3, 0)
        summed = tuple(axis for axis, n in enumerate(sums.dbias.shape) if n == 1)
        sums.add_to_dbias(stack.number, _part(sums.dbias, stack), pairs.sum(axis=summed, keepdims=True))
    if "dalibi_slopes" in of_heads:
        of_heads["dalibi_slopes"][stack.of_queries] = -(stack.as_terms(ds) * _distances(call)).sum(axis=(0, 3))
    if "dsinks" in of_heads and call.sinks is not None:
        weights = np.exp(call.sinks[stack.of_queries[1], None] - row_lse)
        of_heads["dsinks"][stack.of_queries] = -(weights * delta).sum(axis=2, where=row_lse != -math.inf)
    if "dsoftcap" in of_heads and tanh is not None and problem.softcap is not None:
        x = stack.take_scores("x")
        stack.multiply_rows(k, q, stack.as_product(x))
        x *= problem.scale / problem.softcap
        parts = stack.as_terms(ds * derivative_by_softcap(x, tanh))
        of_heads["dsoftcap"][stack.of_queries] = parts.sum(axis=(0, 3))
    if "dscale" in of_heads:
        of_products = ds if tanh is None else ds * _slope(tanh)
        dq = stack.take("dq", *q.shape)
        stack.multiply(stack.as_product(of_products).swapaxes(2, 3), k, dq)
        parts = np.einsum("...d,...d->...", dq, q).reshape(stack.rows_shape)
        of_heads["dscale"][stack.of_queries] = parts.sum(axis=2)


def derivative_by_softcap(x: Array, tanh: Array) -> Array:
    """That of ``softcap * tanh(x)``, x = score / softcap: ``tanh(x) - x * (1 - tanh(x) ** 2)``.

    Near 0, where the terms cancel, ``(sinh(2 x) - 2 x) / 2 * (1 - tanh(x) ** 2)`` by the series of the first factor.
    """
    slope, near = 1 - tanh * tanh, np.abs(x) < 0.5
    x2 = np.where(near, x * x, 0)
    series = np.ones_like(x)
    for n in range(18, 3, -2):
        series = 1 + 4 / (n * (n + 1)) * x2 * series
    return np.where(near, 2 / 3 * x * x2 * series * slope, tanh - x * slope)
