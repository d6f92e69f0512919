"""Attention and its gradients by NumPy, where there is no compiled core: by tiles, in linear memory, on every core.

Letters are those of `cuflash.reference`. This is what is done differently here, and why. The numbers are nanoseconds
per score on one core with AVX-512, float32, head_dim 64, out of 2.2 in all:

Small products. A tile of scores lies in memory as (heads, key blocks, query blocks, keys, queries), and one `np.matmul`
multiplies stacks of blocks, 64 x 64 scores each. A product so small is below the size at which a BLAS starts threads of
its own: threads of this module run side by side without oversubscription, and no settings of BLAS are touched. It is
also faster (0.9) than a large product (1.0), which BLAS repacks first. Sums over key blocks are a pass of their own
(0.1).

Few passes. A column of ones follows V, so that the sums of weights are part of P V. Another follows K, and a row of -m
is below Q^T, so that S - m is one product, and likewise dP - D. The exponential (0.2) is all that remains.

A lazy maximum. Online softmax needs an m near the maximum of the row, not the maximum. It is taken from the first keys
that a row sees (0.5) and moves only where a sum of weights says that it is too small; that tile is then computed again.
Where norms of q and k prove that all scores are small, m is zero.

No subnormal numbers. They cost a hundred times what others do, in exponentials and in products. Here exp(S - m) is
exp(max(S - m, c)) - exp(c), zero for weights under 2^-100 (0.2 for the passes; none where scores are small).

Base 2. `np.exp2` takes half the time of `np.exp`, where NumPy has it in AVX-512.

Dropout. The random bits of a weight take longer (13) than all the rest.

Runs of blocks. With a block mask, a tile of rows is a row of blocks, a part of one, or a few of them. Of a tile of
keys, only the blocks that some of these rows see are computed, a run of neighbours at a time.

Hiding by bits. Scores that a mask hides are cleared by an integer "and" (0.3 with the conversion of the mask);
`np.where` takes ten times as long where a mask is random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cuflash.cpu import calls
from cuflash.cpu.cap import apply_cap, factor_of, has_cap, largest_score
from cuflash.cpu.jobs import PRODUCT_LIMIT, Workspace, count_cores
from cuflash.dropout import kept_weights
from cuflash.problem import Problem

Array = NDArray[Any]

KEY_BLOCK = 64
TILE = 2**18  # scores in a tile: one MiB in float32, to stay in the L2 cache or near it
QUERY_TILE = 512  # rows
QUERY_BLOCK = 64  # rows of a tile at least, where blocks of a block mask are smaller
KEY_TILE = 4096  # keys, where rows are few
OUT_OF_TILE = 2**14  # more than rows and keys of a tile together
SERIAL_FLOPS = 1e8  # work too small to be worth a thread
SMALL_SCORE = 48.0  # in base 2: weights between 2**-48 and 2**48, and their quotients, are normal numbers


def count_threads(flops: int) -> int:
    """How many threads so much work is worth."""
    return 1 if flops < SERIAL_FLOPS else count_cores()


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(x, high))


@dataclass(frozen=True)
class Heads:
    """Some heads of q, or of k and v, that have the same number of keys: index arrays."""

    batch: Array
    head: Array
    num_keys: int

    @property
    def count(self) -> int:
        return len(self.batch)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.batch.tolist(), self.head.tolist(), strict=True)

    def split(self, at_most: int, parts: int) -> Iterator[Heads]:
        """Pieces of `at_most` heads, or of fewer if that would make less than `parts`."""
        size = clamp(ceil_div(self.count, parts), 1, max(at_most, 1))
        for x in range(0, self.count, size):
            yield Heads(self.batch[x : x + size], self.head[x : x + size], self.num_keys)


def heads_by_length(problem: Problem, num_heads: int, kv_lengths: Array | None) -> list[Heads]:
    """All heads of all batch entries, by number of keys."""
    lengths = np.full(problem.batch, problem.seqlen_k)
    if kv_lengths is not None:
        lengths = np.clip(kv_lengths, 0, problem.seqlen_k)
    by_length = np.argsort(lengths, kind="stable")
    values, starts = np.unique(lengths[by_length], return_index=True)
    return [
        Heads(np.repeat(batch, num_heads), np.tile(np.arange(num_heads), len(batch)), int(n))
        for n, batch in zip(values, np.split(by_length, starts[1:]), strict=False)
    ]


# ---- tiles -----------------------------------------------------------------------------------------------------------


class Call(calls.Call):
    """A call, and how its tiles are cut and converted."""

    def __init__(
        self,
        problem: Problem,
        arrays: Mapping[str, Array | None],
        seed: int | None,
        offset: int | None,
        sequence: int | None,
    ) -> None:
        super().__init__(problem, arrays, seed, offset, sequence)
        self.block_table, block_mask = arrays.get("block_table"), arrays.get("block_mask")
        self.bias, self.mask = (None if x is None else x[(None,) * (4 - x.ndim)] for x in (self.bias, self.mask))
        slopes_shape = (problem.batch, problem.num_heads)
        self.slopes = None if self.slopes is None else np.broadcast_to(self.slopes, slopes_shape)
        dim = max(problem.head_dim, problem.head_dim_v)
        self.query_block = next(n for n in (64, 32, 16) if KEY_BLOCK * n * (dim + 1) <= PRODUCT_LIMIT or n == 16)
        # Options change q k^T before the shift is added.
        self.has_terms = problem.has_added_terms or has_cap(problem)
        self.tile = TILE * KEY_BLOCK // max(KEY_BLOCK, dim)
        self.query_tile = QUERY_TILE
        if problem.window_left is not None and problem.window_right is not None:
            window = problem.window_left + problem.window_right + 1
            self.query_tile = clamp(ceil_div(window, 2 * KEY_BLOCK) * KEY_BLOCK, KEY_BLOCK, QUERY_TILE)
        self.block_mask: Array | None = None
        if block_mask is not None:
            self.block_mask = np.broadcast_to(block_mask, (*slopes_shape, *block_mask.shape[-2:]))
            block_rows = problem.block_size[0]
            whole = block_rows * ceil_div(QUERY_BLOCK, block_rows)  # whole rows of blocks
            self.query_tile = ceil_div(whole, ceil_div(whole, QUERY_TILE))
        self._largest_keys: dict[tuple[int, int, int], float] = {}

    def sharing(self, heads: Heads) -> Heads:
        """The heads of k and v that some heads of q share."""
        return Heads(heads.batch, heads.head // self.problem.group_size, heads.num_keys)

    def aligned_to(self, length: int) -> Call:
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
        pages = self.block_table[batch, first : ceil_div(rows.stop, size)]
        gathered = operand[pages, np.expand_dims(head, -1)]
        gathered = gathered.reshape(*pages.shape[:-1], pages.shape[-1] * size, operand.shape[3])
        return gathered[..., rows.start - first * size : rows.stop - first * size, :]

    def numbers_of(self, operand: Array, batch: Any, head: Any, rows: range) -> Array:
        """These rows as the numbers that they stand for: times their scales, if there are any."""
        part = self.rows_of(operand, batch, head, rows)
        scale = self.k_scale if operand is self.k else self.v_scale if operand is self.v else None
        if scale is None:
            return part
        return part.astype(self.dtype) * self.rows_of(scale[..., None], batch, head, rows)

    def stage(self, operand: Array, heads: Heads, rows: range, *, padded: int = 0, ones: int = 0) -> Array:
        """Rows of some heads in the dtype of the computation: a new array (heads, rows, dim).

        Zero rows fill it up to `padded`; with ``ones=1`` there is a column of ones after the last.
        """
        dim = operand.shape[3]
        staged = np.empty((heads.count, max(padded, len(rows)), dim + ones), self.dtype)
        part = self.numbers_of(operand, heads.batch, heads.head, rows)
        np.copyto(staged[:, : len(rows), :dim], part, casting="unsafe")
        staged[:, len(rows) :, :dim] = 0
        staged[:, :, dim:] = 1
        return staged

    def scores_are_small(self, rows: Array, heads: Heads) -> bool:
        """Whether no score of staged and scaled rows of q can pass SMALL_SCORE, by the Cauchy-Schwarz inequality.

        False if a norm is NaN, and where finding out does not pay. Sinks are scores too.
        """
        if self.problem.has_added_terms:
            return False
        if not self.sink.is_small(SMALL_SCORE):
            return False
        if has_cap(self.problem):
            return largest_score(self.problem) * math.log2(math.e) <= SMALL_SCORE
        if self.problem.seqlen_q < KEY_BLOCK:
            return False
        largest_keys = [self._largest_key(*head, heads.num_keys) for head in self.sharing(heads)]
        return _largest_norm(rows) * float(np.max(largest_keys)) * math.log2(math.e) <= SMALL_SCORE

    def _largest_key(self, b: int, h: int, n: int) -> float:
        if (b, h, n) not in self._largest_keys:
            ranges = (range(j, min(j + KEY_TILE, n)) for j in range(0, n, KEY_TILE))
            chunks = (self.numbers_of(self.k, b, h, keys).astype(self.dtype) for keys in ranges)
            self._largest_keys[b, h, n] = float(np.max([_largest_norm(x) for x in chunks], initial=0))
        return self._largest_keys[b, h, n]


class Queries:
    """A tile of rows of q, of several heads, as products with tiles of keys need it.

    Attributes
    ----------
    rows : (heads, blocks, queries, head_dim)
        ``scale * q``. The last block ends with rows of zeros where the rows do not fill it.
    q_t : (heads, blocks, head_dim + 1, queries)
        The same, transposed, times `Call.unit` or, with a cap, divided by the cap. Its last row, which meets the column
        of ones after K, is for `shift`.
    shift : (heads, blocks, queries)
        What is added to scores times `Call.unit`: minus m in the forward pass, minus L in the backward pass.
    small : bool
        All scores are known to be small, and `shift` stays zero.
    restless : bool
        The maximum is looked for in every tile: it has risen once, or terms make that likely.
    """

    def __init__(self, call: Call, heads: Heads, rows: range) -> None:
        problem = call.problem
        self.heads = heads
        self.start, self.num_rows = rows.start, len(rows)
        self.num_blocks = ceil_div(len(rows), call.query_block)
        self.block = ceil_div(len(rows), self.num_blocks)
        self.padded = self.num_blocks * self.block
        self.first_key, self.stop_complete = problem.key_range(rows[0])
        self.first_complete, self.stop_key = problem.key_range(rows[-1])
        scaled = call.stage(call.q, heads, rows, padded=self.padded)
        scaled *= problem.scale
        self.small = call.scores_are_small(scaled, heads)
        self.restless = call.problem.has_added_terms
        self.rows = self.blocks(scaled)
        self.q_t = np.zeros((heads.count, self.num_blocks, problem.head_dim + 1, self.block), call.dtype)
        np.multiply(self.rows.swapaxes(2, 3), factor_of(problem, 1, call.unit), out=self.q_t[:, :, :-1])
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
class Keys:
    """A range of keys in blocks of one length, part of a tile."""

    start: int
    stop: int
    block: int

    @property
    def num_blocks(self) -> int:
        return (self.stop - self.start) // self.block

    def seen_by(self, queries: Queries) -> Keys:
        """The blocks between the first and the last key that any of the queries sees."""
        first = clamp(queries.first_key - self.start, 0, self.stop - self.start) // self.block
        stop = ceil_div(clamp(queries.stop_key - self.start, 0, self.stop - self.start), self.block)
        return Keys(self.start + first * self.block, self.start + max(first, stop) * self.block, self.block)

    def runs(self, call: Call, queries: Queries) -> Iterator[Keys]:
        """Runs of neighbouring blocks in which a block mask leaves something to any of the queries."""
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
            yield Keys(start, stop, self.block)

    def blocks(self, staged: Array, start: int) -> Array:
        """These keys of an array (heads, keys, dim) that begins with key `start`, as (heads, blocks, 1, keys, dim)."""
        heads, _, dim = staged.shape
        here = staged[:, self.start - start : self.stop - start]
        return here.reshape(heads, self.num_blocks, 1, self.block, dim)


def key_tiles(start: int, stop: int, tile: int) -> Iterator[Keys]:
    """Tiles of whole blocks, and one for the keys that are left."""
    whole = stop - (stop - start) % KEY_BLOCK
    for j in range(start, whole, tile):
        yield Keys(j, min(j + tile, whole), KEY_BLOCK)
    if whole < stop:
        yield Keys(whole, stop, stop - whole)


def _largest_norm(rows: Array) -> float:
    return math.sqrt(float(np.max(np.einsum("...d,...d->...", rows, rows), initial=0)))


def _part(term: Array, queries: Queries, keys: Keys, head: tuple[int, int]) -> Array:
    """The part of a bias or mask for a tile: (rows, keys), or 1 in their place where it is broadcast."""
    b, h = (0 if n == 1 else x for x, n in zip(head, term.shape, strict=False))
    rows = slice(queries.start, queries.start + queries.num_rows) if term.shape[2] > 1 else slice(None)
    columns = slice(keys.start, keys.stop) if term.shape[3] > 1 else slice(None)
    return term[b, h, rows, columns]


def _as_scores(part: Array, queries: Queries, keys: Keys, fill: Any) -> Array:
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


def visible_scores(call: Call, queries: Queries, keys: Keys) -> Array | bool:
    """Which scores of a tile are visible: all, none, or integers for an "and" with scores, -1 (visible) or 0."""
    problem = call.problem
    visible: Array | None = None
    if keys.start < queries.first_complete or keys.stop > queries.stop_complete:
        i = np.arange(queries.padded, dtype=np.int16).reshape(-1, 1, queries.block)
        j = np.arange(keys.stop - keys.start, dtype=np.int16).reshape(-1, 1, keys.block, 1)
        diagonal = queries.start + problem.diagonal - keys.start
        if problem.window_right is not None:
            visible = j <= i + np.int16(clamp(diagonal + problem.window_right, -OUT_OF_TILE, OUT_OF_TILE))
        if problem.window_left is not None:
            after = j >= i + np.int16(clamp(diagonal - problem.window_left, -OUT_OF_TILE, OUT_OF_TILE))
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


def hide(scores: Array, visible: Array | bool, value: float) -> None:
    """Put 0 or -inf in the place of hidden scores, whatever they are."""
    if isinstance(visible, bool):
        return
    bits = scores.view(visible.dtype)
    bits &= visible
    if value != 0:
        bits |= ~visible & np.array(value, scores.dtype).view(visible.dtype)


def kept_scores(call: Call, queries: Queries, keys: Keys, workspace: Workspace, shape: tuple[int, ...]) -> Array:
    """The factors by which dropout multiplies the weights of a tile."""
    problem = call.problem
    factor = workspace.take("kept", *shape)
    i, j = problem.origin[:2]
    rows = range(i + queries.start, i + queries.start + queries.num_rows)
    columns = range(j + keys.start, j + keys.stop)
    for x, (b, h) in zip(factor, queries.heads, strict=True):
        head = call.first_head + b * problem.origin.num_heads + h
        kept = kept_weights(problem.dropout, call.seed, call.offset, head, rows, columns)
        np.multiply(_as_scores(kept, queries, keys, False), call.dtype.type(problem.kept_scale), out=x)
    return factor


def scores_of(
    call: Call,
    queries: Queries,
    keys: Keys,
    k: Array,
    workspace: Workspace,
    *,
    out: Array,
    tanh: Array | None = None,
    shifted: bool = True,
) -> None:
    """Compute scores of a tile, hidden ones included; with a cap, `tanh`, if given, gets the tanh."""
    shift_in_product = shifted and not call.has_terms
    queries.q_t[:, :, -1] = queries.shift if shift_in_product else 0
    np.matmul(k, queries.q_t[:, None], out=out)
    apply_cap(call.problem, out, call.unit, tanh)
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
