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
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import exponentials
from cuflash.cpu.calls import Call
from cuflash.cpu.cap import factor_of
from cuflash.cpu.exponentials import LOWEST_WEIGHT
from cuflash.cpu.jobs import PRODUCT_LIMIT, Workspace, count_cores, keep_workspace, run, take_workspace
from cuflash.problem import Problem

Array = NDArray[Any]

_kept = threading.local()

STACK = 2**18  # scores in a stack: one MiB in float32, as in a tile of `cuflash.cpu.tiles`
STACK_ROWS = 2**21  # numbers in the rows of its operands
HEAD_PRODUCT = 2**21  # multiplications in a product of a head: tiles are faster beyond
TINY = 2**16  # scores and such numbers: surely too little work for threads
KEPT = 2**17  # numbers, about, in the arrays of a stack that is kept for the next call
KEPT_STACKS = 4  # in each thread
KEPT_BYTES = 2**20  # of each
STACK_NS = 1_000_000  # the work of a stack, where there are threads to share stacks
# Work too small to be worth a second thread, and the time to start one and to wait for it and for the interpreter's
# lock. The first number is for short operations, the second for products large enough for BLAS to share them among its
# own threads.
SERIAL_NS = (8_000_000, 5_000_000)
THREAD_NS = (250_000, 100_000)
MANY = 2**12  # numbers in rows, at least, that a copy as columns is considered for
COLUMNS = 40  # rows of a head, at least, for which a copy as columns pays; fewer if the rows are shorter
SMALL_PRODUCT = 10**6  # multiplications: larger products are fast without a copy
EINSUM_ROWS = 128  # rows of a stack, at least, for which np.einsum pays, although its call takes longer
# Exponentials of scores above this have the same bits with `small` and without.
LEAST = {dtype: math.log(weight) / 2 for dtype, weight in LOWEST_WEIGHT.items()}


def serves(problem: Problem) -> bool:
    """Whether stacks are for this problem: small heads, all of their keys in one piece, and something to compute.

    Heads are small if their products have at most HEAD_PRODUCT multiplications, and if those that share keys fit into a
    stack. Block masks, block tables, diagonals of batch entries, and scales of k and v are left to tiles.
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
        and not problem.follows_lengths
        and not problem.has_float8
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


class Plan:
    """What calls of one problem have in common in one pass: numbers, and how its heads are put into stacks.

    What is in a stack, and whether products are cut, follows from the problem, and not from the machine. Where there is
    work for several threads, products are too small for BLAS to start threads of its own. Otherwise they are whole, as
    in the formula, and BLAS may start threads.

    Attributes
    ----------
    factor : Array
        The factor of products of q and k. It is an array because NumPy takes longer to convert a number than to
        multiply few scores by it.
    product_limit : int or None
        Multiplications in one product, where others are computed at the same time: too few for BLAS to start threads.
    work : float
        About how many times as long as starting a thread the pass takes; 0 where it is for one thread.
    most : int
        Heads of k and v in a stack.
    """

    def __init__(self, problem: Problem, is_backward: bool, is_alone: bool) -> None:
        self.problem = problem
        self.dtype = np.dtype(problem.softmax_dtype)
        self.group_size = problem.group_size
        self.has_window = problem.window_left is not None or problem.window_right is not None
        self.hides = self.has_window or problem.mask is not None or problem.kv_lengths is not None
        self.unit = 1.0 if problem.has_added_terms else exponentials.UNIT
        self.least = LEAST[self.dtype] * self.unit
        factor = factor_of(problem, problem.scale, self.unit)
        self.factor, self.scale, self.units = (np.array(x, self.dtype) for x in (factor, problem.scale, self.unit))
        num_rows = self.group_size * problem.seqlen_q
        scores = num_rows * problem.seqlen_k
        numbers = (num_rows + problem.seqlen_k) * (problem.head_dim + problem.head_dim_v)
        num_heads = problem.batch * problem.num_heads_kv
        self.product_limit, self.work = None if is_alone else PRODUCT_LIMIT, 0.0
        self.most = min(STACK // scores, STACK_ROWS // numbers)
        if num_heads * (scores + numbers) > TINY:
            nanoseconds, are_large = _nanoseconds(problem, 5 if is_backward else 2), _has_large_products(problem)
            if nanoseconds > SERIAL_NS[are_large]:
                self.product_limit = PRODUCT_LIMIT
                self.most = min(self.most, int(num_heads * STACK_NS / nanoseconds))
                self.work = nanoseconds / THREAD_NS[are_large]
        self.is_one_stack = num_heads <= self.most
        self.keeps_stacks = self.is_one_stack and num_heads * (5 * scores + numbers) <= KEPT
        self.is_plain = self.product_limit is None and problem.seqlen_k > 1 < num_rows

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Slices of the batch and of the heads of k and v, a pair for each stack."""
        batch, num_heads = self.problem.batch, self.problem.num_heads_kv
        if self.is_one_stack:
            yield slice(0, batch), slice(0, num_heads)
            return
        for entries in _slices(batch, self.most // num_heads):
            for heads in _slices(num_heads, self.most):
                yield entries, heads

    def copies_columns(self, num_rows: int, num_columns: int, dim: int) -> bool:
        """Whether a copy of rows as columns pays, for products of so many rows with so many columns."""
        is_small = self.product_limit is not None or num_rows * num_columns * dim < SMALL_PRODUCT
        return num_columns >= min(dim, COLUMNS) and is_small


def plan_of(problem: Problem, is_backward: bool, is_alone: bool) -> Plan | None:
    """The plan of a pass, kept with the problem; None where stacks are not for it.

    `is_alone` says that no other problem is computed at the same time.
    """
    kept: dict[tuple[bool, bool], Plan | None] = vars(problem).setdefault("_plans_of_stacks", {})
    try:
        return kept[is_backward, is_alone]
    except KeyError:
        plan = Plan(problem, is_backward, is_alone) if serves(problem) else None
        return kept.setdefault((is_backward, is_alone), plan)


def for_each_stack(call: Call, plan: Plan, work: Callable[[Call, Stack], None]) -> None:
    """Call ``work(call, stack)`` for every stack."""
    if plan.keeps_stacks:
        kept: dict[Plan, Stack] = _kept.__dict__.setdefault("stacks", {})
        # A call within the call, as from a signal handler, finds none and makes its own.
        stack = kept.pop(plan, None) or Stack(plan, Workspace(plan.dtype), 0, *next(plan.parts()))
        work(call, stack)
        if len(kept) >= KEPT_STACKS:
            kept.clear()
        if stack.nbytes <= KEPT_BYTES:
            kept[plan] = stack
    elif plan.is_one_stack:
        workspace = take_workspace(plan.dtype)
        work(call, Stack(plan, workspace, 0, *next(plan.parts())))
        keep_workspace(workspace)
    else:
        parts = [(number, *part) for number, part in enumerate(plan.parts())]
        threads = _count_threads(plan.work) if plan.work else 1
        run(lambda workspace, *part: work(call, Stack(plan, workspace, *part)), parts, threads, plan.dtype)


def _count_threads(work: float) -> int:
    """So many that starting them takes about as long as the work of each, or as many as there are cores."""
    return min(math.isqrt(int(work)), count_cores())


def _slices(length: int, at_most: int) -> list[slice]:
    """Slices of an axis, about equally long."""
    count = -(-length // max(at_most, 1))
    return [slice(i * length // count, (i + 1) * length // count) for i in range(count)]


class Stack:
    """Some heads of k and v of some batch entries, with the heads of q that share them, and memory for their scores.

    Their scores are an array of two axes, (keys, columns), a column for every row of q. Two other views of it have the
    axes of terms and masks, and the axes of products.
    """

    def __init__(self, plan: Plan, workspace: Workspace, number: int, entries: slice, heads: slice) -> None:
        problem, group = plan.problem, plan.group_size
        num_entries, num_heads = entries.stop - entries.start, heads.stop - heads.start
        self.plan = plan
        self.number = number
        self.workspace, self.take = workspace, workspace.take
        self.windows: dict[float, Array] = {}
        self.of_keys = self.of_queries = (entries, heads)
        if group > 1:
            self.of_queries = (entries, slice(group * heads.start, group * heads.stop))
        self.rows_shape = (num_entries, group * num_heads, problem.seqlen_q)
        self.product_shape = (problem.seqlen_k, num_entries, num_heads, group * problem.seqlen_q)
        self.num_columns = num_entries * num_heads * group * problem.seqlen_q
        self.multiply = np.matmul if plan.is_plain else self._multiply
        self._scores: dict[str, Array] = {}
        self._products: dict[str, Array] = {}

    @property
    def nbytes(self) -> int:
        return self.workspace.nbytes + sum(window.nbytes for window in self.windows.values())

    def scores(self, name: str) -> Array:
        """Memory for scores, (keys, columns). Neighbours lie along the longer axis."""
        scores = self._scores.get(name)
        if scores is None:
            num_keys, num_columns = self.product_shape[0], self.num_columns
            if num_keys > num_columns:
                scores = self.take(name, num_columns, num_keys).T
            else:
                scores = self.take(name, num_keys, num_columns)
            self._scores[name] = scores
        return scores

    def product(self, name: str) -> Array:
        """The same memory as (batch entries, heads of k and v, keys, columns of a head)."""
        product = self._products.get(name)
        if product is None:
            product = self._products[name] = self.as_product(self.scores(name))
        return product

    def as_product(self, scores: Array) -> Array:
        """Scores as (batch entries, heads of k and v, keys, columns of a head)."""
        return scores.reshape(self.product_shape).transpose(1, 2, 0, 3)

    def as_terms(self, scores: Array) -> Array:
        """Scores as (keys, batch entries, heads of q, queries)."""
        return scores.reshape(len(scores), *self.rows_shape)

    def keys(self, name: str, operand: Array, lengths: Array | None) -> Array:
        """The part of k or v, zero where `kv_lengths` say that there are no keys."""
        part = operand if self.plan.is_one_stack else operand[self.of_keys]
        if lengths is None:
            return part if self._suits_blas(part) else self._staged(name, part)
        staged = self.take(name, *part.shape)
        staged[...] = 0
        np.copyto(staged, part, where=self.existing_keys(lengths)[:, None, :, None], casting="unsafe")
        return staged

    def existing_keys(self, lengths: Array) -> Array:
        """Whether keys are within `kv_lengths`: (batch entries, keys)."""
        return np.arange(self.plan.problem.seqlen_k) < lengths[self.of_keys[0], None]

    def queries(self, name: str, operand: Array) -> Array:
        """The part of q, out or dout as (batch entries, heads of k and v, rows, dim)."""
        part = operand if self.plan.is_one_stack else operand[self.of_queries]
        if not self._suits_blas(part):
            part = self._staged(name, part)
        return part if self.plan.group_size == 1 else part.reshape(*self.product_shape[1:], part.shape[3])

    def _suits_blas(self, matrices: Array) -> bool:
        return matrices.dtype == self.plan.dtype and (matrices.flags.c_contiguous or _rows_are_apart(matrices))

    def _staged(self, name: str, part: Array) -> Array:
        staged = self.take(name, *part.shape)
        staged[...] = part
        return staged

    def _multiply(self, a: Array, b: Array, out: Array) -> None:
        """The matrix product of stacks, a few rows at a time where there is a limit."""
        if a.shape[3] == 1:  # BLAS takes five times as long
            np.multiply(a, b, out)
            return
        limit, num_rows = self.plan.product_limit, a.shape[2]
        step = num_rows if limit is None else max(1, limit // (a.shape[3] * b.shape[3]))
        for i in range(0, num_rows, step):
            np.matmul(a[:, :, i : i + step], b, out[:, :, i : i + step])

    def multiply_rows(self, a: Array, b: Array, out: Array) -> None:
        """The product of rows with rows: of k with q, or of v with dout."""
        columns = b.swapaxes(2, 3)
        if b.size >= MANY and self.plan.copies_columns(a.shape[2], *b.shape[2:]):
            columns = self._staged("columns", columns)
        self.multiply(a, columns, out)

    def write_product(self, result: Array, a: Array, b: Array) -> None:
        """Put the product of stacks in its place in a result."""
        if self.plan.group_size == 1 and self._suits_blas(result):
            self.multiply(a, b, result)
            return
        product = self.take("product", *a.shape[:3], b.shape[3])
        self.multiply(a, b, product)
        result[...] = product.reshape(result.shape)


def _rows_are_apart(matrices: Array) -> bool:
    """Whether elements of a row are neighbours, and rows do not overlap."""
    row_stride, stride = matrices.strides[2:]
    return stride == matrices.itemsize and row_stride >= matrices.shape[3] * stride
