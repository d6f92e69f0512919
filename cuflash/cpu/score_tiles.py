"""Slices of a call with score_mod or mask_mod, and tiles of their scores."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu.packed import OF_KEYS
from cuflash.spec.problem import Problem

Array = NDArray[Any]

BLOCK = 128  # queries, and keys, that a mask may hide as a whole
KEYS = 8 * BLOCK  # at most, of which one job evaluates functions, for BLOCK queries


class CallSlice(NamedTuple):
    """Some queries of some batch entries and heads."""

    batches: slice
    heads: slice
    heads_kv: slice
    rows: slice

    def index_of(self, name: str) -> tuple[slice, ...]:
        """The index of the slice in an array (batch, heads, seqlen, ...) of a call, by the name of this."""
        return (self.batches, self.heads_kv) if name in OF_KEYS else (self.batches, self.heads, self.rows)

    def view_of(self, array: Array, axes: int) -> Array:
        """The view of an optional input that is broadcast to the first axes of the scores."""
        along = (self.batches, self.heads, self.rows, slice(None))[axes - array.ndim : axes]
        index = tuple(of_axis if n > 1 else slice(None) for n, of_axis in zip(array.shape, along, strict=True))
        return array[index] if index else array  # an array without axes stays one: the core reads no NumPy scalars


def slices(count: int, size: int) -> list[slice]:
    """All of `count`, at most `size` at a time."""
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def call_slices(
    problem: Problem, distinguished: Collection[str], most: int, per_row_values: int | None = None
) -> Iterator[CallSlice]:
    """The slices of a call, in a fixed order.

    Batch entries and heads that functions do not distinguish share all numbers; `distinguished` names what they do. A
    slice has at most `most` numbers, or as many as belong to a block of rows and the heads of one key/value head. With
    `per_row_values`, so many belong to all rows of a head, in place of one to each pair: rows stay together.
    """
    of_head = max(per_row_values or problem.seqlen_q * problem.seqlen_k, 1)  # numbers
    group, every = problem.group_size, slice(None)
    batches, heads, num_matrices = [every], [(every, every)], problem.num_heads if "head" in distinguished else 1
    if "batch" in distinguished:
        size = min(max(most // (num_matrices * of_head), 1), max(problem.batch, 1))
        batches, num_matrices = slices(problem.batch, size), num_matrices * size
    if "head" in distinguished and num_matrices * of_head > most:
        size = min(max(most // (group * of_head), 1), problem.num_heads_kv)
        heads = [(slice(h.start * group, h.stop * group), h) for h in slices(problem.num_heads_kv, size)]
        num_matrices = group * size
    num_rows = max(1, most // max(num_matrices * BLOCK * problem.seqlen_k, 1)) * BLOCK
    if per_row_values:
        num_rows = max(1, problem.seqlen_q)
    for batch in batches:
        for of_q, of_kv in heads:
            for rows in slices(problem.seqlen_q, num_rows):
                yield CallSlice(batch, of_q, of_kv, rows)


class Pairs:
    """The pairs of a slice, as functions read them.

    `of_all` has the batch entries and heads that functions distinguish, as axes 0 and 1 of four, and zero for the
    products: functions that depend on them are given others.
    """

    def __init__(
        self, problem: Problem, call_slice: CallSlice, distinguished: Collection[str], first_entry: int
    ) -> None:
        self._problem = problem
        batches, heads = np.arange(problem.batch)[call_slice.batches], np.arange(problem.num_heads)[call_slice.heads]
        batches, heads = (
            every if name in distinguished else every[:1] for name, every in (("batch", batches), ("head", heads))
        )
        self.rows = range(call_slice.rows.start, call_slice.rows.stop)
        self.of_all = {
            "batch": first_entry + batches[:, None, None, None],
            "head": heads[:, None, None],
            "s": np.zeros(1, problem.softmax_dtype),
        }
        self.shape = (len(batches), len(heads), len(self.rows), problem.seqlen_k)

    def tiles(self) -> list[Tile]:
        """Tiles of at most `BLOCK` rows and `KEYS` keys, which hold all blocks of pairs that bounds show."""
        tiles = []
        for block in slices(len(self.rows), BLOCK):
            rows = self.rows[block]
            first, stop = self._problem.key_range(rows[0])[0], self._problem.key_range(rows[-1])[1]
            stop = min(-(-stop // BLOCK) * BLOCK, self.shape[3])
            keys = range(first // BLOCK * BLOCK, stop)
            tiles += [Tile(self, rows, keys[some]) for some in slices(len(keys), KEYS)]
        return tiles

    def of_diagonals(self, differences: Array) -> dict[str, Array]:
        """The inputs of functions that follow from these differences i - j alone."""
        return {"i": differences, "j": np.zeros(1, np.int64), **self.of_all}


class Tile:
    """Some rows and keys of a slice.

    `own_rows` count from the first row of the slice. `index` is that in an array with a number for each pair of the
    slice, `blocks` that in one with a number for each block of `BLOCK` rows and keys.
    """

    def __init__(self, pairs: Pairs, rows: range, keys: range) -> None:
        self._pairs, self.rows, self.keys = pairs, rows, keys
        begin = pairs.rows.start
        self.own_rows, self.own_keys = slice(rows.start - begin, rows.stop - begin), slice(keys.start, keys.stop)
        self.index: tuple[Any, ...] = (..., self.own_rows, self.own_keys)
        blocks = slice(keys.start // BLOCK, -(-keys.stop // BLOCK))
        self.blocks: tuple[Any, ...] = (..., self.own_rows.start // BLOCK, blocks)

    def inputs(self, *, are_diagonals: bool = False) -> dict[str, Array]:
        """The inputs of functions of each pair, or of each diagonal, from that of the first row and the last key on."""
        if are_diagonals:
            first, stop = self.rows.start - self.keys.stop + 1, self.rows.stop - self.keys.start
            return self._pairs.of_diagonals(np.arange(first, stop))
        i, j = np.arange(self.rows.start, self.rows.stop)[:, None], np.arange(self.keys.start, self.keys.stop)
        return {"i": i, "j": j, **self._pairs.of_all}


def sums_of_diagonals(x: Array) -> Array:
    """The sum of each diagonal of matrices (rows, keys), in float64, as (1, diagonals), in the order of `Tile`."""
    *outer, rows, keys = x.shape
    # In rows that are one number longer than there are diagonals, which a view of them forgets, each begins one later.
    shifted = np.zeros((*outer, rows, rows + keys), x.dtype)
    shifted[..., :keys] = x[..., ::-1]
    shifted = shifted.reshape(*outer, -1)[..., : rows * (rows + keys - 1)].reshape(*outer, rows, rows + keys - 1)
    return cast("Array", shifted.sum(axis=-2, keepdims=True, dtype=np.float64))
