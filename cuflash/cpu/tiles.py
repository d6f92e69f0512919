"""Attention and its gradients by NumPy, where there is no compiled core: by tiles, in linear memory, on every core.

Letters as in `cuflash.reference`. What is done differently here, and why; the numbers are nanoseconds per score on one
core with AVX-512, float32, head_dim 64, of 2.2 in all:

Small products. A tile of scores lies in memory as (heads, key blocks, query blocks, keys, queries), and one `np.matmul`
multiplies stacks of blocks, 64 x 64 scores each. A product so small is below the size at which a BLAS starts threads of
its own: threads of this module run side by side without oversubscription, and nobody's settings are touched. It is also
faster (0.9) than a large product (1.0), which BLAS repacks first. Sums over key blocks are a pass of their own (0.1).

Few passes. Behind V stands a column of ones, so that the sums of weights are part of P V; behind K another, and below
Q^T a row of -m, so that S - m is one product, and likewise dP - D. The exponential (0.2) is all that remains.

A lazy maximum. Online softmax needs an m near the maximum of the row, not the maximum. It is taken from the first keys
that a row sees (0.5) and moves only where a sum of weights says that it is too small; that tile is then computed again.
Where norms of q and k prove that all scores are small, m is zero.

No subnormal numbers. They cost a hundred times what others do, in exponentials and in products. Here exp(S - m) is
exp(max(S - m, c)) - exp(c), zero for weights under 2^-100 (0.2 for the passes; none where scores are small).

Base 2. `np.exp2` takes half the time of `np.exp`, where NumPy has it in AVX-512.

Dropout. The random bits of a weight take longer (13) than all the rest.

Runs of blocks. With a block mask, a tile of rows is a row of blocks, or a part or a few of one, and of a tile of keys
the blocks that some of its rows see are computed, a run of neighbours at a time.

Hiding by bits. Scores behind a mask are cleared by an integer "and" (0.3 with the conversion of the mask); `np.where`
takes ten times as long where a mask is random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cuflash.cpu import exponentials, stacks
from cuflash.cpu.exponentials import exponential
from cuflash.cpu.jobs import PRODUCT_LIMIT, Workspace, count_cores, run
from cuflash.cpu.packed import Sequence, clear_rows_of_no_sequence, for_each, sequences
from cuflash.cpu.stacks import derivative_by_softcap
from cuflash.dropout import kept_weights
from cuflash.operands import view_4d, view_rows
from cuflash.problem import Problem
from cuflash.terms import DEFAULT_NEED, GRADIENTS

Array = NDArray[Any]

KEY_BLOCK = 64
TILE = 2**18  # scores in a tile: one MiB in float32, to stay in the L2 cache or near it
QUERY_TILE = 512  # rows
QUERY_BLOCK = 64  # rows of a tile at least, where blocks of a block mask are smaller
KEY_TILE = 4096  # keys, where rows are few
OUT_OF_TILE = 2**14  # more than rows and keys of a tile together
TILES_PER_JOB = 4  # query tiles that share the conversion of a key tile
SERIAL_FLOPS = 1e8  # work too small to be worth a thread
MAX_RANGES = 16  # of keys of a head, for as many threads; each takes the memory of a dq
SUM_LIMIT = 2.0  # mean weight of the keys of a tile: more says that the maximum has risen
SMALL_SCORE = 48.0  # in base 2: weights between 2**-48 and 2**48, and their quotients, are normal numbers


def forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    kv_lengths: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    block_mask: Array | None = None,
    block_table: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    seed: int | None = None,
    offset: int | None = None,
    sequence: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
) -> tuple[Array, Array]:
    """Attention by tiles with online softmax (FlashAttention-2, algorithm 1); bitwise repeatable.

    Parameters
    ----------
    problem : Problem
        From `cuflash.problem.make_problem` on the same arrays.
    q, k, v, bias, mask, kv_lengths, alibi_slopes, sinks, block_mask, block_table : numpy.ndarray
        As `cuflash.attention` takes them, validated, of any strides. `kv_lengths` is clamped to 0..seqlen_k.
    cu_seqlens_q, cu_seqlens_k : numpy.ndarray
        Likewise.
    seed, offset : int, optional
        With dropout: which weights are dropped, as `cuflash.dropout_mask` says.
    sequence : int, optional
        Which of packed sequences this is: it is computed beside others, and dropout counts them.
    out, lse : numpy.ndarray, optional
        Written to and returned: shape `problem.out_shape` and dtype of q, shape `problem.lse_shape` and
        `problem.softmax_dtype`; any strides.

    Returns
    -------
    out, lse : numpy.ndarray
        lse is the natural logarithm of the sum of exponentials. In a row that sees no key, out is 0, and lse is -inf or
        the sink.
    """
    out = np.empty(problem.out_shape, q.dtype) if out is None else out
    lse = np.empty(problem.lse_shape, problem.softmax_dtype) if lse is None else lse
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}

        def forward_of(one: Sequence) -> None:
            own = {name: one.of_rows(x, name) for name, x in arrays.items()}
            slopes = one.slopes(alibi_slopes)
            forward(one.problem, **own, alibi_slopes=slopes, sinks=sinks, seed=seed, offset=offset, sequence=one.index)

        clear_rows_of_no_sequence(problem, out, lse, cu_seqlens_q)
        _for_each_sequence(problem, cu_seqlens_q, cu_seqlens_k, forward_of, 2, lambda p: p.forward_flops)
        return out, lse
    if stacks.serves(problem):
        options = (bias, mask, kv_lengths, alibi_slopes, sinks, seed, offset, sequence)
        stacks.forward(stacks.Call(problem, q, k, v, *options), out, lse)
        return out, lse
    call = _Call(problem, q, k, v, bias, mask, alibi_slopes, sinks, block_mask, block_table, seed, offset, sequence)
    out_4d, lse_3d = view_4d(out, problem.layout), view_rows(lse)
    threads = _count_threads(problem.forward_flops)
    num_tiles = problem.batch * problem.num_heads * _ceil_div(problem.seqlen_q, call.query_tile)
    rows_per_job = call.query_tile * _clamp(num_tiles // (4 * threads), 1, TILES_PER_JOB)
    jobs = [
        (heads, range(i, min(i + rows_per_job, problem.seqlen_q)))
        for all_heads in _heads_by_length(problem, problem.num_heads, kv_lengths)
        for heads in all_heads.split(call.tile // max(1, problem.seqlen_q * all_heads.num_keys), 4 * threads)
        for i in range(0, problem.seqlen_q, rows_per_job)
    ]

    def seen(job: tuple[_Heads, range]) -> int:
        heads, rows = job
        aligned = problem.aligned_to(heads.num_keys)
        return heads.count * (min(heads.num_keys, aligned.key_range(rows[-1])[1]) - aligned.key_range(rows[0])[0])

    jobs.sort(key=seen, reverse=True)  # no long job starts last
    run(lambda *job: _forward_job(call, out_4d, lse_3d, *job), jobs, threads, call.dtype)
    return out, lse


def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    kv_lengths: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    block_mask: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    dlse: Array | None = None,
    need: Collection[str] = DEFAULT_NEED,
    seed: int | None = None,
    offset: int | None = None,
    sequence: int | None = None,
    **results: Array | None,
) -> tuple[Array, ...]:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` by tiles (FlashAttention-2, algorithm 2); bitwise repeatable.

    Parameters
    ----------
    problem, q, k, v, bias, mask, kv_lengths, alibi_slopes, sinks, block_mask, seed, offset :
        As `forward` takes them.
    cu_seqlens_q, cu_seqlens_k, sequence :
        As `forward` takes them.
    dout, out, lse : numpy.ndarray
        The gradient with respect to out, and what `forward` returned.
    dlse : numpy.ndarray, optional
        The gradient with respect to lse.
    need : collection of str, optional
        The gradients that are wanted, names of `terms.GRADIENTS`; without it dq, dk, dv, and dsinks with `sinks`.
    dq, dk, dv, dbias, dalibi_slopes, dscale, dsoftcap, dsinks : numpy.ndarray, optional
        Written to and returned if wanted: shapes and dtypes of q, k, v, bias and so on, shape () and dtype of lse of
        dscale and dsoftcap; any strides.

    Returns
    -------
    tuple of numpy.ndarray
        The gradients that are wanted, in the order of `terms.GRADIENTS`. In dk and dv, keys that no query sees, those
        past `kv_lengths` and those of no sequence among them, get zero.
    """
    models = {"q": q, "k": k, "v": v, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    wanted = gradients_for(problem, need, models, results)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        arrays |= {} if dlse is None else {"dlse": dlse}
        arrays |= {name: wanted[name] for name in DEFAULT_NEED if name in wanted}
        heads = (problem.batch, problem.num_heads)
        parts = {
            name: np.zeros(heads[: 1 if name in ("dscale", "dsoftcap") else 2], problem.softmax_dtype)
            for name in wanted.keys() - set(DEFAULT_NEED)
        }

        def backward_of(one: Sequence) -> None:
            own: dict[str, Any] = {name: one.of_rows(x, name) for name, x in arrays.items()}
            own |= {"alibi_slopes": one.slopes(alibi_slopes), "sinks": sinks, "sequence": one.index}
            gradients = backward(one.problem, **own, need=tuple(wanted), seed=seed, offset=offset)
            for name, gradient in zip(wanted, gradients, strict=True):
                if name in parts:
                    parts[name][one.index] = gradient

        ends = {"dq": cu_seqlens_q[-1], "dk": cu_seqlens_k[-1], "dv": cu_seqlens_k[-1]}
        for name in ends.keys() & wanted.keys():
            view_4d(wanted[name], problem.layout)[:, :, int(ends[name]) :] = 0
        _for_each_sequence(problem, cu_seqlens_q, cu_seqlens_k, backward_of, 5, lambda p: p.backward_flops)
        with np.errstate(all="ignore"):
            for name, part in parts.items():
                wanted[name][...] = part if wanted[name].shape == part.shape == heads else part.sum(axis=0)
        return tuple(wanted.values())
    if stacks.serves(problem):
        options = (bias, mask, kv_lengths, alibi_slopes, sinks, seed, offset, sequence)
        stacks.backward(stacks.Call(problem, q, k, v, *options), dout, out, lse, dlse, wanted)
        return tuple(wanted.values())
    call = _Call(problem, q, k, v, bias, mask, alibi_slopes, sinks, block_mask, None, seed, offset, sequence)
    dout, out, lse = view_4d(dout, problem.layout), view_4d(out, problem.layout), view_rows(lse)
    dlse = None if dlse is None else view_rows(dlse)
    rows = (dout, out, lse, dlse)
    threads = _count_threads(problem.backward_flops)
    if wanted.keys() & set(DEFAULT_NEED):
        of_operands = {name: view_4d(wanted[name], problem.layout) for name in DEFAULT_NEED if name in wanted}
        _write_operand_gradients(call, kv_lengths, threads, rows, **of_operands)
    if wanted.keys() & {"dbias", "dalibi_slopes", "dscale", "dsoftcap"}:
        _write_score_gradients(call, kv_lengths, threads, rows, wanted)
    if "dsinks" in wanted:
        _write_sink_gradients(cast(Array, sinks), *rows, wanted["dsinks"])
    return tuple(wanted.values())


def gradients_for(
    problem: Problem,
    need: Collection[str],
    models: Mapping[str, Array | None],
    given: Mapping[str, Array | None],
) -> dict[str, Array]:
    """Arrays for the gradients that are wanted, in order: those given, and new ones like what they are gradients of."""
    wanted: dict[str, Array] = {}
    for name in GRADIENTS:
        if name in need:
            result, model = given.get(name), models.get(name[1:])
            if result is None:
                result = np.empty((), problem.softmax_dtype) if model is None else np.empty(model.shape, model.dtype)
            wanted[name] = result
    return wanted


def _write_operand_gradients(
    call: _Call,
    kv_lengths: Array | None,
    threads: int,
    rows: _Rows,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
) -> None:
    """dq, dk and dv, those that there are arrays for."""
    problem = call.problem
    groups = _heads_by_length(problem, problem.num_heads_kv, kv_lengths)
    # A job is a range of keys of some heads: all keys, unless that leaves threads idle. Every range makes a dq of its
    # own, and these are added in order: repeatable, and linear in memory.
    bounds = _equal_key_ranges(problem, _count_ranges(threads, problem.batch * problem.num_heads_kv))
    partial_dqs: list[Array | None] = [dq] * (len(bounds) - 1)
    if dq is not None and len(bounds) > 2:
        partial_dqs = list(np.zeros((len(bounds) - 1, *dq.shape), call.dtype))
    jobs = [
        (heads, range(min(j0, group.num_keys), min(j1, group.num_keys)), partial_dq)
        for group in groups
        for heads in group.split(call.tile // max(1, problem.seqlen_q * group.num_keys), 4 * threads)
        for j0, j1, partial_dq in zip(bounds[:-1], bounds[1:], partial_dqs, strict=True)
    ]
    for group in groups:
        for of_keys in (dk, dv):
            if of_keys is not None:
                of_keys[group.batch, group.head, group.num_keys :] = 0
    run(lambda *job: _backward_job(call, rows, dk, dv, *job), jobs, threads, call.dtype)
    if dq is not None and len(bounds) > 2:
        with np.errstate(all="ignore"):
            for head in np.ndindex(dq.shape[:2]):
                dq[head] = sum(partial_dq[head] for partial_dq in partial_dqs if partial_dq is not None)


# ---- work and threads ------------------------------------------------------------------------------------------------


def _count_threads(flops: int) -> int:
    return 1 if flops < SERIAL_FLOPS else count_cores()


def _for_each_sequence(
    problem: Problem,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    work: Callable[[Sequence], None],
    num_products: int,
    flops: Callable[[Problem], int],
) -> None:
    def is_short(own: Problem) -> bool:
        return stacks.is_short(own, num_products) if stacks.serves(own) else flops(own) < SERIAL_FLOPS

    for_each(list(sequences(problem, cu_seqlens_q, cu_seqlens_k)), work, is_short, _count_threads(flops(problem)))


def _count_ranges(threads: int, num_heads: int) -> int:
    """Into how many ranges to cut the keys of every head, so that all threads have the same number of them."""
    if num_heads >= 4 * threads or num_heads == 0:
        return 1
    return min(threads // math.gcd(threads, num_heads), MAX_RANGES)


def _equal_key_ranges(problem: Problem, count: int) -> list[int]:
    """Bounds of ranges of keys that are seen by about equally many rows."""
    last = problem.seqlen_k
    if count == 1 or last == 0:
        return [0, last]
    beyond = problem.seqlen_q + problem.seqlen_k
    left, right = (beyond if x is None else x for x in (problem.window_left, problem.window_right))
    keys = np.arange(last) - problem.diagonal
    first_row, stop_row = (np.clip(x, 0, problem.seqlen_q) for x in (keys - right, keys + left + 1))
    seen = np.cumsum(np.maximum(stop_row - first_row, 0))
    inner = np.searchsorted(seen, seen[-1] * np.arange(1, count) / count)
    inner = (inner + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK
    return [0, *np.unique(inner[(inner > 0) & (inner < last)]).tolist(), last]


@dataclass(frozen=True)
class _Heads:
    """Some heads of q, or of k and v, that have the same number of keys: index arrays."""

    batch: Array
    head: Array
    num_keys: int

    @property
    def count(self) -> int:
        return len(self.batch)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.batch.tolist(), self.head.tolist(), strict=True)

    def split(self, at_most: int, parts: int) -> Iterator[_Heads]:
        """Pieces of `at_most` heads, or of fewer if that would make less than `parts`."""
        size = _clamp(_ceil_div(self.count, parts), 1, max(at_most, 1))
        for x in range(0, self.count, size):
            yield _Heads(self.batch[x : x + size], self.head[x : x + size], self.num_keys)


def _heads_by_length(problem: Problem, num_heads: int, kv_lengths: Array | None) -> list[_Heads]:
    """All heads of all batch entries, by number of keys."""
    lengths = np.full(problem.batch, problem.seqlen_k)
    if kv_lengths is not None:
        lengths = np.clip(kv_lengths, 0, problem.seqlen_k)
    by_length = np.argsort(lengths, kind="stable")
    values, starts = np.unique(lengths[by_length], return_index=True)
    return [
        _Heads(np.repeat(batch, num_heads), np.tile(np.arange(num_heads), len(batch)), int(n))
        for n, batch in zip(values, np.split(by_length, starts[1:]), strict=False)
    ]


def _ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def _clamp(x: int, low: int, high: int) -> int:
    return max(low, min(x, high))


# ---- tiles -----------------------------------------------------------------------------------------------------------


class _Call:
    """The operands of one call as (batch, heads, seqlen, dim), and how their tiles are cut and converted."""

    def __init__(
        self,
        problem: Problem,
        q: Array,
        k: Array,
        v: Array,
        bias: Array | None,
        mask: Array | None,
        alibi_slopes: Array | None,
        sinks: Array | None,
        block_mask: Array | None,
        block_table: Array | None,
        seed: int | None,
        offset: int | None,
        sequence: int | None,
    ) -> None:
        self.problem = problem
        self.block_table = block_table
        self.seed, self.offset = seed, offset
        self.first_head = 0 if sequence is None else sequence * problem.num_heads  # for dropout
        self.dtype = np.dtype(problem.softmax_dtype)
        self.q, self.k, self.v = (view_4d(x, problem.layout) for x in (q, k, v))
        self.bias, self.mask = (None if x is None else x[(None,) * (4 - x.ndim)] for x in (bias, mask))
        slopes_shape = (problem.batch, problem.num_heads)
        self.slopes = None if alibi_slopes is None else np.broadcast_to(alibi_slopes, slopes_shape)
        self.sinks = sinks
        dim = max(problem.head_dim, problem.head_dim_v)
        self.query_block = next(n for n in (64, 32, 16) if KEY_BLOCK * n * (dim + 1) <= PRODUCT_LIMIT or n == 16)
        # What options do to q k^T comes before the shift. Added terms may be large and nearly cancel, so that they come
        # before a multiplication by UNIT too.
        self.has_added_terms = bias is not None or alibi_slopes is not None
        self.has_terms = self.has_added_terms or problem.softcap is not None
        self.unit = 1.0 if self.has_added_terms else exponentials.UNIT
        self.tile = TILE * KEY_BLOCK // max(KEY_BLOCK, dim)
        self.query_tile = QUERY_TILE
        if problem.window_left is not None and problem.window_right is not None:
            window = problem.window_left + problem.window_right + 1
            self.query_tile = _clamp(_ceil_div(window, 2 * KEY_BLOCK) * KEY_BLOCK, KEY_BLOCK, QUERY_TILE)
        self.block_mask: Array | None = None
        if block_mask is not None:
            self.block_mask = np.broadcast_to(block_mask, (*slopes_shape, *block_mask.shape[-2:]))
            block_rows = problem.block_size[0]
            whole = block_rows * _ceil_div(QUERY_BLOCK, block_rows)  # rows of blocks
            self.query_tile = _ceil_div(whole, _ceil_div(whole, QUERY_TILE))
        self._largest_keys: dict[tuple[int, int, int], float] = {}

    def sharing(self, heads: _Heads) -> _Heads:
        """The heads of k and v that some heads of q share."""
        return _Heads(heads.batch, heads.head // self.problem.group_size, heads.num_keys)

    def aligned_to(self, length: int) -> _Call:
        """The call with the diagonal of heads that have so many keys."""
        if not self.problem.follows_lengths:
            return self
        aligned = copy(self)
        aligned.problem = self.problem.aligned_to(length)
        return aligned

    def rows_of(self, operand: Array, batch: Any, head: Any, rows: range) -> Array:
        """Rows of an operand, of one head or of index arrays of heads: ([heads,] rows, dim)."""
        if self.block_table is None or operand is self.q:
            return operand[batch, head, rows.start : rows.stop]
        size = self.problem.page_size
        first = rows.start // size
        pages = self.block_table[batch, first : _ceil_div(rows.stop, size)]
        gathered = operand[pages, np.expand_dims(head, -1)]
        gathered = gathered.reshape(*pages.shape[:-1], pages.shape[-1] * size, operand.shape[3])
        return gathered[..., rows.start - first * size : rows.stop - first * size, :]

    def stage(self, operand: Array, heads: _Heads, rows: range, *, padded: int = 0, ones: int = 0) -> Array:
        """Rows of some heads in the dtype of the computation: a new array (heads, rows, dim).

        Zero rows fill it up to `padded`; with ``ones=1`` there is a column of ones behind the last.
        """
        dim = operand.shape[3]
        staged = np.empty((heads.count, max(padded, len(rows)), dim + ones), self.dtype)
        part = self.rows_of(operand, heads.batch, heads.head, rows)
        np.copyto(staged[:, : len(rows), :dim], part, casting="unsafe")
        staged[:, len(rows) :, :dim] = 0
        staged[:, :, dim:] = 1
        return staged

    def scores_are_small(self, rows: Array, heads: _Heads) -> bool:
        """Whether no score of staged and scaled rows of q can pass SMALL_SCORE, by the Cauchy-Schwarz inequality.

        False if a norm is NaN, and where finding out does not pay. Sinks are scores too.
        """
        if self.has_added_terms:
            return False
        if self.sinks is not None and not np.all(np.abs(self.sinks) * math.log2(math.e) <= SMALL_SCORE):
            return False
        if self.problem.softcap is not None:
            return self.problem.softcap * math.log2(math.e) <= SMALL_SCORE
        if self.problem.seqlen_q < KEY_BLOCK:
            return False
        largest_keys = [self._largest_key(*head, heads.num_keys) for head in self.sharing(heads)]
        return _largest_norm(rows) * float(np.max(largest_keys)) * math.log2(math.e) <= SMALL_SCORE

    def _largest_key(self, b: int, h: int, n: int) -> float:
        if (b, h, n) not in self._largest_keys:
            ranges = (range(j, min(j + KEY_TILE, n)) for j in range(0, n, KEY_TILE))
            chunks = (self.rows_of(self.k, b, h, keys).astype(self.dtype) for keys in ranges)
            self._largest_keys[b, h, n] = float(np.max([_largest_norm(x) for x in chunks], initial=0))
        return self._largest_keys[b, h, n]


class _Queries:
    """A tile of rows of q, of several heads: what the products with tiles of keys need of it.

    Attributes
    ----------
    rows : (heads, blocks, queries, head_dim)
        ``scale * q``. The last block ends with rows of zeros where the rows do not fill it.
    q_t : (heads, blocks, head_dim + 1, queries)
        The same, transposed, times `_Call.unit`, or over softcap. Its last row, that meets the column of ones behind
        K, is for `shift`.
    shift : (heads, blocks, queries)
        What is added to scores times `_Call.unit`: minus m in the forward pass, minus L in the backward pass.
    small : bool
        All scores are known to be small, and `shift` stays zero.
    restless : bool
        The maximum is looked for in every tile: it has risen once, or terms make that likely.
    """

    def __init__(self, call: _Call, heads: _Heads, rows: range) -> None:
        problem = call.problem
        self.heads = heads
        self.start, self.num_rows = rows.start, len(rows)
        self.num_blocks = _ceil_div(len(rows), call.query_block)
        self.block = _ceil_div(len(rows), self.num_blocks)
        self.padded = self.num_blocks * self.block
        self.first_key, self.stop_complete = problem.key_range(rows[0])
        self.first_complete, self.stop_key = problem.key_range(rows[-1])
        scaled = call.stage(call.q, heads, rows, padded=self.padded)
        scaled *= problem.scale
        self.small = call.scores_are_small(scaled, heads)
        self.restless = call.has_added_terms
        self.rows = self.blocks(scaled)
        self.q_t = np.zeros((heads.count, self.num_blocks, problem.head_dim + 1, self.block), call.dtype)
        factor = call.unit if problem.softcap is None else 1 / problem.softcap
        np.multiply(self.rows.swapaxes(2, 3), factor, out=self.q_t[:, :, :-1])
        self.shift = np.zeros((heads.count, self.num_blocks, self.block), call.dtype)

    def blocks(self, staged: Array) -> Array:
        """(heads, padded rows, ...) as (heads, blocks, queries, ...)."""
        return staged.reshape(self.heads.count, self.num_blocks, self.block, *staged.shape[2:])

    def write(self, result: Array, values: Array) -> None:
        """Put (heads, blocks, queries, ...) in its place in a result (batch, heads, seqlen_q, ...)."""
        values = values.reshape(self.heads.count, self.padded, *values.shape[3:])
        rows = slice(self.start, self.start + self.num_rows)
        result[self.heads.batch, self.heads.head, rows] = values[:, : self.num_rows]


@dataclass(frozen=True)
class _Keys:
    """A range of keys in blocks of one length, part of a tile."""

    start: int
    stop: int
    block: int

    @property
    def num_blocks(self) -> int:
        return (self.stop - self.start) // self.block

    def seen_by(self, queries: _Queries) -> _Keys:
        """The blocks between the first and the last key that any of the queries sees."""
        first = _clamp(queries.first_key - self.start, 0, self.stop - self.start) // self.block
        stop = _ceil_div(_clamp(queries.stop_key - self.start, 0, self.stop - self.start), self.block)
        return _Keys(self.start + first * self.block, self.start + max(first, stop) * self.block, self.block)

    def runs(self, call: _Call, queries: _Queries) -> Iterator[_Keys]:
        """The parts of them, neighbours together, in which a block mask leaves something to any of the queries."""
        if self.num_blocks == 0:
            return
        if call.block_mask is None:
            yield self
            return
        heads, (rows, keys) = queries.heads, call.problem.block_size
        first, last = queries.start // rows, (queries.start + queries.num_rows - 1) // rows
        kept = np.any(call.block_mask[heads.batch, heads.head, first : last + 1], axis=(0, 1))
        kept = kept[np.arange(self.start, self.stop) // keys].reshape(-1, self.block).any(axis=1)
        edges = np.flatnonzero(np.diff(kept, prepend=False, append=False)) * self.block + self.start
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield _Keys(start, stop, self.block)

    def blocks(self, staged: Array, start: int) -> Array:
        """These keys of an array (heads, keys, dim) that begins with key `start`, as (heads, blocks, 1, keys, dim)."""
        heads, _, dim = staged.shape
        here = staged[:, self.start - start : self.stop - start]
        return here.reshape(heads, self.num_blocks, 1, self.block, dim)


def _key_tiles(start: int, stop: int, tile: int) -> Iterator[_Keys]:
    """Tiles of whole blocks, and one for the keys that are left."""
    whole = stop - (stop - start) % KEY_BLOCK
    for j in range(start, whole, tile):
        yield _Keys(j, min(j + tile, whole), KEY_BLOCK)
    if whole < stop:
        yield _Keys(whole, stop, stop - whole)


def _largest_norm(rows: Array) -> float:
    return math.sqrt(float(np.max(np.einsum("...d,...d->...", rows, rows), initial=0)))


def _part(term: Array, queries: _Queries, keys: _Keys, head: tuple[int, int]) -> Array:
    """What a tile meets of a bias or mask: (rows, keys), or 1 in their place where it is broadcast."""
    b, h = (0 if n == 1 else x for x, n in zip(head, term.shape, strict=False))
    rows = slice(queries.start, queries.start + queries.num_rows) if term.shape[2] > 1 else slice(None)
    columns = slice(keys.start, keys.stop) if term.shape[3] > 1 else slice(None)
    return term[b, h, rows, columns]


def _as_scores(part: Array, queries: _Queries, keys: _Keys, fill: Any) -> Array:
    """A view of such a part as (key blocks, query blocks, keys, queries); `fill` is for rows that are padding."""
    part = np.broadcast_to(part, (queries.num_rows, keys.stop - keys.start))
    if queries.padded > queries.num_rows:
        padded = np.full((queries.padded, part.shape[1]), fill, part.dtype)
        padded[: queries.num_rows] = part
        part = padded
    row_stride, key_stride = part.strides
    return as_strided(
        part,
        (keys.num_blocks, queries.num_blocks, keys.block, queries.block),
        (keys.block * key_stride, queries.block * row_stride, key_stride, row_stride),
        writeable=False,
    )


def _visible(call: _Call, queries: _Queries, keys: _Keys) -> Array | bool:
    """Which scores of a tile are visible: all, none, or integers for an "and" with scores, -1 (visible) or 0."""
    problem = call.problem
    visible: Array | None = None
    if keys.start < queries.first_complete or keys.stop > queries.stop_complete:
        i = np.arange(queries.padded, dtype=np.int16).reshape(-1, 1, queries.block)
        j = np.arange(keys.stop - keys.start, dtype=np.int16).reshape(-1, 1, keys.block, 1)
        diagonal = queries.start + problem.diagonal - keys.start
        if problem.window_right is not None:
            visible = j <= i + np.int16(_clamp(diagonal + problem.window_right, -OUT_OF_TILE, OUT_OF_TILE))
        if problem.window_left is not None:
            after = j >= i + np.int16(_clamp(diagonal - problem.window_left, -OUT_OF_TILE, OUT_OF_TILE))
            visible = after if visible is None else np.logical_and(visible, after, out=visible)
    if call.mask is not None:
        parts = [_part(call.mask, queries, keys, head) for head in queries.heads]
        if not any(part.any() for part in parts):
            return False
        if not all(part.all() for part in parts):
            masks = np.array([_as_scores(part, queries, keys, True) for part in parts])
            visible = masks if visible is None else np.logical_and(visible, masks, out=masks)
    if call.block_mask is not None:
        rows, columns = call.problem.block_size
        at_rows = (queries.start + np.arange(queries.num_rows)) // rows
        at_keys = np.arange(keys.start, keys.stop) // columns
        here = (slice(at_rows[0], at_rows[-1] + 1), slice(at_keys[0], at_keys[-1] + 1))
        parts = [call.block_mask[head][here] for head in queries.heads]
        if not all(part.all() for part in parts):
            pairs = [part[(at_rows - at_rows[0])[:, None], at_keys - at_keys[0]] for part in parts]
            blocks = np.array([_as_scores(x, queries, keys, True) for x in pairs])
            visible = blocks if visible is None else np.logical_and(visible, blocks, out=blocks)
    if visible is None:
        return True
    integer = np.int32 if call.dtype.itemsize == 4 else np.int64
    return np.negative(visible.view(np.int8), dtype=integer)


def _hide(scores: Array, visible: Array | bool, value: float) -> None:
    """Put 0 or -inf in the place of hidden scores, whatever they are."""
    if isinstance(visible, bool):
        return
    bits = scores.view(visible.dtype)
    bits &= visible
    if value != 0:
        bits |= ~visible & np.array(value, scores.dtype).view(visible.dtype)


def _kept(call: _Call, queries: _Queries, keys: _Keys, workspace: Workspace, shape: tuple[int, ...]) -> Array:
    """What dropout multiplies the weights of a tile by."""
    problem = call.problem
    factor = workspace.take("kept", *shape)
    rows, columns = range(queries.start, queries.start + queries.num_rows), range(keys.start, keys.stop)
    for x, (b, h) in zip(factor, queries.heads, strict=True):
        head = call.first_head + b * problem.num_heads + h
        kept = kept_weights(problem.dropout, call.seed, call.offset, head, rows, columns)
        np.multiply(_as_scores(kept, queries, keys, False), call.dtype.type(problem.kept_scale), out=x)
    return factor


def _scores(
    call: _Call,
    queries: _Queries,
    keys: _Keys,
    k: Array,
    workspace: Workspace,
    *,
    out: Array,
    tanh: Array | None = None,
    shifted: bool = True,
) -> None:
    """Scores of a tile, hidden ones included; with softcap its tanh too, where that is wanted."""
    shift_in_product = shifted and not call.has_terms
    queries.q_t[:, :, -1] = queries.shift if shift_in_product else 0
    np.matmul(k, queries.q_t[:, None], out=out)
    softcap = call.problem.softcap
    if softcap is not None:
        np.tanh(out, out=out)
        if tanh is not None:
            np.copyto(tanh, out)
        out *= softcap * call.unit
    if call.slopes is not None:
        start = keys.start - queries.start - call.problem.diagonal
        j = np.arange(start, start + keys.stop - keys.start).astype(call.dtype).reshape(-1, 1, keys.block, 1)
        i = np.arange(queries.padded).astype(call.dtype).reshape(-1, 1, queries.block)
        distance = np.subtract(j, i, out=workspace.take("distance", *out.shape[1:]))
        np.abs(distance, out=distance)
        term = workspace.take("term", *out.shape[1:])
        for x, head in zip(out, queries.heads, strict=True):
            x -= np.multiply(distance, call.slopes[head], out=term)
    if call.bias is not None:
        term = workspace.take("term", *out.shape[1:])
        for x, head in zip(out, queries.heads, strict=True):
            np.copyto(term, _as_scores(_part(call.bias, queries, keys, head), queries, keys, 0), casting="unsafe")
            x += term
    if shifted and call.has_terms:
        out += queries.shift[:, None, :, None]


# ---- forward ---------------------------------------------------------------------------------------------------------


def _forward_job(call: _Call, out: Array, lse: Array, workspace: Workspace, heads: _Heads, rows: range) -> None:
    """out and lse of some rows of some heads."""
    call = call.aligned_to(heads.num_keys)
    head_dim_v = call.problem.head_dim_v
    starts = rows[:: call.query_tile]
    tiles = [_Queries(call, heads, range(i, min(i + call.query_tile, rows.stop))) for i in starts]
    # The transposed, not yet normalised output O of every tile, and below it l, the sums of weights.
    sums = [np.zeros((heads.count, x.num_blocks, head_dim_v + 1, x.block), call.dtype) for x in tiles]
    start = min(x.first_key for x in tiles) // KEY_BLOCK * KEY_BLOCK
    stop = min(heads.num_keys, _ceil_div(max(x.stop_key for x in tiles), KEY_BLOCK) * KEY_BLOCK)
    key_tile = call.tile // (heads.count * tiles[0].padded) // KEY_BLOCK * KEY_BLOCK
    for tile in _key_tiles(start, max(start, stop), _clamp(key_tile, KEY_BLOCK, KEY_TILE)):
        k = v = None
        for queries, total in zip(tiles, sums, strict=True):
            for keys in tile.seen_by(queries).runs(call, queries):
                visible = _visible(call, queries, keys)
                if visible is False:
                    continue
                if k is None or v is None:
                    of_keys = call.sharing(heads)
                    k, v = (call.stage(x, of_keys, range(tile.start, tile.stop), ones=1) for x in (call.k, call.v))
                k_blocks, v_blocks = (keys.blocks(x, tile.start) for x in (k, v))
                _forward_tile(call, queries, keys, k_blocks, v_blocks, visible, total, workspace)
    for queries, total in zip(tiles, sums, strict=True):
        if call.sinks is not None:
            _add_sinks(call, call.sinks[heads.head], queries, total)
        l = total[:, :, head_dim_v]  # noqa: E741 (the paper's letter)
        o = total[:, :, :head_dim_v] / np.where(l == 0, 1, l)[:, :, None]
        queries.write(out, o.swapaxes(2, 3))
        queries.write(lse, np.log(l) - queries.shift / call.unit)


def _forward_tile(
    call: _Call,
    queries: _Queries,
    keys: _Keys,
    k: Array,
    v: Array,
    visible: Array | bool,
    total: Array,
    workspace: Workspace,
) -> None:
    """Add O and l of a tile to `total`."""
    num_heads = queries.heads.count
    scores = workspace.take("scores", num_heads, keys.num_blocks, queries.num_blocks, keys.block, queries.block)
    parts = workspace.take("parts", num_heads, keys.num_blocks, *total.shape[1:])
    l = total[:, :, -1].reshape(num_heads, queries.padded)[:, : queries.num_rows]  # noqa: E741
    careful = queries.restless or (not queries.small and bool((l == 0).any()))
    while True:
        _scores(call, queries, keys, k, workspace, out=scores, shifted=not careful)
        if careful:
            _hide(scores, visible, -np.inf)
            _raise_maximum(call, queries, scores, total)
        exponential(scores, call.unit, small=queries.small)
        _hide(scores, visible, 0)
        sums = None
        if call.problem.dropout:
            sums = scores.sum(axis=(1, 3))
            scores *= _kept(call, queries, keys, workspace, scores.shape)
        np.matmul(v.swapaxes(3, 4), scores, out=parts)
        added = parts[:, 0] if keys.num_blocks == 1 else np.add.reduce(parts, axis=1)
        if sums is not None:
            added[:, :, -1] = sums
        if careful or queries.small or not (added[:, :, -1] > SUM_LIMIT * (keys.stop - keys.start)).any():
            break
        careful = queries.restless = True
    total += added


def _raise_maximum(call: _Call, queries: _Queries, scores: Array, total: Array) -> None:
    """Subtract m after moving it up to the largest score of the tile, or to wherever that is in rows that are new."""
    largest = scores.max(axis=(1, 3))
    unseen = total[:, :, -1] == 0
    m = np.where(unseen, largest, np.maximum(largest, -queries.shift))
    m[m == -np.inf] = 0
    scores -= m[:, None, :, None]
    total *= np.where(unseen, 1, np.exp((-queries.shift - m) / call.unit))[:, :, None]
    queries.shift = -m


def _add_sinks(call: _Call, sinks: Array, queries: _Queries, total: Array) -> None:
    """Add to l the weight of one more score, and nothing to O: m moves up to it first."""
    sink = sinks.astype(call.dtype)[:, None, None]
    old = np.where(total[:, :, -1] == 0, -np.inf, -queries.shift / call.unit)
    m = np.maximum(old, sink)
    m[m == -np.inf] = 0
    total *= np.exp(old - m)[:, :, None]
    total[:, :, -1] += np.exp(sink - m)
    queries.shift = -m * call.unit


# ---- backward --------------------------------------------------------------------------------------------------------


_Rows = tuple[Array, Array, Array, Array | None]  # dout and out as (batch, heads, seqlen_q, dim), lse, dlse


def _backward_job(
    call: _Call,
    of_rows: _Rows,
    dk: Array | None,
    dv: Array | None,
    workspace: Workspace,
    heads: _Heads,
    span: range,
    dq: Array | None,
) -> None:
    """dk and dv of a span of the keys of some heads of k and v, and what that span contributes to dq."""
    problem = call.problem
    k, v = (call.stage(x, heads, span, ones=1) for x in (call.k, call.v))
    dk_sum = None if dk is None else np.zeros_like(k[:, :, :-1])
    dv_sum = None if dv is None else np.zeros_like(v[:, :, :-1])
    for member in range(problem.group_size):
        group = _Heads(heads.batch, heads.head * problem.group_size + member, heads.num_keys)
        for i in range(0, problem.seqlen_q, call.query_tile):
            rows = range(i, min(i + call.query_tile, problem.seqlen_q))
            queries = _BackwardQueries(call, group, rows, *of_rows)
            key_tile = call.tile // (heads.count * queries.padded) // KEY_BLOCK * KEY_BLOCK
            for tile in _key_tiles(span.start, span.stop, _clamp(key_tile, KEY_BLOCK, KEY_TILE)):
                for keys in tile.seen_by(queries).runs(call, queries):
                    visible = _visible(call, queries, keys)
                    if visible is False:
                        continue
                    k_blocks, v_blocks = (keys.blocks(x, span.start) for x in (k, v))
                    dk_blocks, dv_blocks = (None if x is None else keys.blocks(x, span.start) for x in (dk_sum, dv_sum))
                    _backward_tile(
                        call,
                        queries,
                        keys,
                        k_blocks,
                        v_blocks,
                        visible,
                        workspace,
                        dq is not None,
                        dk_blocks,
                        dv_blocks,
                    )
            if dq is not None:
                queries.write(dq, problem.scale * queries.dq_t.swapaxes(2, 3))
    for result, total in ((dk, dk_sum), (dv, dv_sum)):
        if result is not None:
            result[heads.batch, heads.head, span.start : span.stop] = total


class _BackwardQueries(_Queries):
    """A tile of rows of q and of what belongs to them.

    Attributes
    ----------
    dout : (heads, blocks, queries, head_dim_v)
        Where scores are small, times exp(-L), as dL is: weights and their gradients are linear in these, and S is more
        exact than S - L.
    dout_t : (heads, blocks, head_dim_v + 1, queries)
        Transposed; the last row, that meets the column of ones behind V, is ``dL - D``, D = rowsum(dO o O), or 0 with
        dropout, that comes between.
    minus_delta : (heads, blocks, queries)
        ``dL - D``.
    dq_t : (heads, blocks, head_dim, queries)
        The sum of dS K so far, transposed.
    """

    def __init__(
        self, call: _Call, heads: _Heads, rows: range, dout: Array, out: Array, lse: Array, dlse: Array | None
    ) -> None:
        super().__init__(call, heads, rows)
        staged_dout = call.stage(dout, heads, rows, padded=self.padded)
        row_lse, row_dlse = np.zeros((2, heads.count, self.padded), call.dtype)
        row_lse[:, : len(rows)] = lse[heads.batch, heads.head, rows.start : rows.stop]
        if dlse is not None:
            row_dlse[:, : len(rows)] = dlse[heads.batch, heads.head, rows.start : rows.stop]
            row_dlse[row_lse == -np.inf] = 0
        row_lse[row_lse == -np.inf] = np.inf  # a row that sees no key: its weights are exp(-inf)
        if self.small:
            staged_dout *= np.exp(-row_lse)[:, :, None]
            row_dlse *= np.exp(-row_lse)
        else:
            self.shift = self.blocks(row_lse * -call.unit)
        self.dout = self.blocks(staged_dout)
        self.dout_t = np.empty((*self.dout.shape[:2], self.dout.shape[3] + 1, self.block), call.dtype)
        np.copyto(self.dout_t[:, :, :-1], self.dout.swapaxes(2, 3))
        delta = np.einsum("...d,...d->...", self.dout, self.blocks(call.stage(out, heads, rows, padded=self.padded)))
        self.minus_delta = np.subtract(self.blocks(row_dlse), delta)
        self.dout_t[:, :, -1] = 0 if call.problem.dropout else self.minus_delta
        self.dq_t = np.zeros((*self.q_t.shape[:2], call.problem.head_dim, self.block), call.dtype)


def _backward_tile(
    call: _Call,
    queries: _BackwardQueries,
    keys: _Keys,
    k: Array,
    v: Array,
    visible: Array | bool,
    workspace: Workspace,
    needs_dq: bool,
    dk: Array | None = None,
    dv: Array | None = None,
    take_scores: Callable[[Array, Array | None], None] | None = None,
) -> None:
    """Add what a tile contributes to dk and dv, where these are wanted, and to `queries.dq_t`.

    `take_scores` gets the gradient of the scores as (heads, key blocks, query blocks, keys, queries), and their tanh.
    """
    problem = call.problem
    num_heads, across = queries.heads.count, (keys.num_blocks, queries.num_blocks)
    tile_shape = (num_heads, *across, keys.block, queries.block)
    p, ds = (workspace.take(name, *tile_shape) for name in ("p", "ds"))
    tanh = None if problem.softcap is None else workspace.take("tanh", *tile_shape)
    _scores(call, queries, keys, k, workspace, out=p, tanh=tanh)
    exponential(p, call.unit, small=queries.small)
    _hide(p, visible, 0)
    kept = _kept(call, queries, keys, workspace, tile_shape) if problem.dropout else None
    if dv is not None:
        weights = p if kept is None else np.multiply(p, kept, out=ds)
        parts = workspace.take("parts", num_heads, *across, keys.block, problem.head_dim_v)
        dv += np.matmul(weights, queries.dout[:, None], out=parts).sum(axis=2, keepdims=True)
    if dk is None and not needs_dq and take_scores is None:
        return
    np.matmul(v, queries.dout_t[:, None], out=ds)
    if kept is not None:
        ds *= kept
        ds += queries.minus_delta[:, None, :, None]
    ds *= p
    if take_scores is not None:
        take_scores(ds, tanh)
    if tanh is not None:
        tanh *= tanh
        np.subtract(1, tanh, out=tanh)
        ds *= tanh
    if dk is not None:
        parts = workspace.take("parts", num_heads, *across, keys.block, problem.head_dim)
        dk += np.matmul(ds, queries.rows[:, None], out=parts).sum(axis=2, keepdims=True)
    if needs_dq:
        parts = workspace.take("parts", num_heads, *across, problem.head_dim, queries.block)
        queries.dq_t += np.matmul(k[..., :-1].swapaxes(3, 4), ds, out=parts).sum(axis=1)


# ---- gradients of what scores are made of ----------------------------------------------------------------------------


def _write_score_gradients(
    call: _Call, kv_lengths: Array | None, threads: int, of_rows: _Rows, wanted: Mapping[str, Array]
) -> None:
    """dbias, dalibi_slopes, dscale and dsoftcap, those that are wanted.

    A job is a tile of rows of one head. What it has for things that other jobs share is added in the order of the jobs,
    by this thread, while few are under way.
    """
    problem = call.problem
    sums = {name: np.zeros(x.shape, call.dtype) for name, x in wanted.items()}
    dbias = sums["dbias"][(None,) * (4 - sums["dbias"].ndim)] if "dbias" in sums else None
    jobs = [
        (heads, range(i, min(i + call.query_tile, problem.seqlen_q)))
        for group in _heads_by_length(problem, problem.num_heads, kv_lengths)
        for heads in group.split(1, group.count)
        for i in range(0, problem.seqlen_q, call.query_tile)
    ]
    for first in range(0, len(jobs), threads):
        parts: list[dict[str, Array]] = [{} for _ in jobs[first : first + threads]]
        work = [(*job, part) for job, part in zip(jobs[first : first + threads], parts, strict=True)]
        run(lambda *job: _score_gradients_job(call, of_rows, wanted, *job), work, threads, call.dtype)
        for (heads, rows), part in zip(jobs[first : first + threads], parts, strict=True):
            ((b, h),) = heads
            with np.errstate(all="ignore"):
                if dbias is not None:
                    its_rows = slice(rows.start, rows.stop) if dbias.shape[2] > 1 else slice(None)
                    columns = slice(heads.num_keys) if dbias.shape[3] > 1 else slice(None)
                    dbias[b % dbias.shape[0], h % dbias.shape[1], its_rows, columns] += part["dbias"]
                if "dalibi_slopes" in sums:
                    sums["dalibi_slopes"][(b, h)[-sums["dalibi_slopes"].ndim :]] += part["dalibi_slopes"]
                for name in ("dscale", "dsoftcap"):
                    if name in sums:
                        sums[name] += part[name]
    with np.errstate(all="ignore"):
        for name in ("dbias", "dalibi_slopes", "dscale", "dsoftcap"):
            if name in sums:
                wanted[name][...] = sums[name]


def _score_gradients_job(
    call: _Call,
    of_rows: _Rows,
    wanted: Collection[str],
    workspace: Workspace,
    heads: _Heads,
    rows: range,
    part: dict[str, Array],
) -> None:
    """What some rows of one head have for these gradients, summed over the axes that the bias has not."""
    problem = call.problem
    queries = _BackwardQueries(call, heads, rows, *of_rows)
    shape = (len(rows), heads.num_keys)
    bias_shape = call.bias.shape[2:] if call.bias is not None and "dbias" in wanted else (1, 1)
    part["dbias"] = dbias = np.zeros(
        tuple(n if m > 1 else 1 for n, m in zip(shape, bias_shape, strict=True)), call.dtype
    )
    part |= {name: np.zeros((), call.dtype) for name in ("dalibi_slopes", "dscale", "dsoftcap")}
    key_tile = _clamp(call.tile // queries.padded // KEY_BLOCK * KEY_BLOCK, KEY_BLOCK, KEY_TILE)
    for tile in _key_tiles(0, heads.num_keys, key_tile):
        for keys in tile.seen_by(queries).runs(call, queries):
            visible = _visible(call, queries, keys)
            if visible is False:
                continue
            of_keys, span = call.sharing(heads), range(keys.start, keys.stop)
            k, v = (keys.blocks(call.stage(x, of_keys, span, ones=1), keys.start) for x in (call.k, call.v))

            def take_scores(ds: Array, tanh: Array | None, keys: _Keys = keys, k: Array = k) -> None:
                pairs = ds[0].transpose(1, 3, 0, 2).reshape(queries.padded, keys.stop - keys.start)[: len(rows)]
                if "dbias" in wanted:
                    summed = tuple(axis for axis, n in enumerate(bias_shape) if n == 1)
                    columns = slice(keys.start, keys.stop) if bias_shape[1] > 1 else slice(None)
                    dbias[:, columns] += pairs.sum(axis=summed, keepdims=True) if summed else pairs
                if "dalibi_slopes" in wanted:
                    i = np.arange(rows.start, rows.stop)[:, None] + problem.diagonal
                    distance = np.abs(i - np.arange(keys.start, keys.stop)).astype(call.dtype)
                    part["dalibi_slopes"] -= (pairs * distance).sum()
                if "dsoftcap" in wanted and tanh is not None:
                    x = np.matmul(k, queries.q_t[:, None])
                    part["dsoftcap"] += (ds * derivative_by_softcap(x, tanh)).sum()

            _backward_tile(call, queries, keys, k, v, visible, workspace, "dscale" in wanted, take_scores=take_scores)
    if "dscale" in wanted:
        q = queries.blocks(call.stage(call.q, heads, rows, padded=queries.padded))
        part["dscale"] += (queries.dq_t.swapaxes(2, 3) * q).sum()


def _write_sink_gradients(sinks: Array, dout: Array, out: Array, lse: Array, dlse: Array | None, dsinks: Array) -> None:
    """dsinks, the sum of exp(sink - L) (dL - D) over all rows of a head."""
    for head in range(len(sinks)):
        dsinks[head] = 0
        for batch in range(len(lse)):
            dO, O, L = (x[batch, head].astype(dsinks.dtype) for x in (dout, out, lse))  # noqa: E741
            with np.errstate(all="ignore"):
                dL_minus_D = (0 if dlse is None else dlse[batch, head]) - np.einsum("...d,...d->...", dO, O)
                dsinks[head] += np.sum(np.exp(sinks[head] - L) * dL_minus_D, where=~np.isneginf(L))
