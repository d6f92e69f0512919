"""One call on one rank: it follows the schedule and uses the functions that compute calls on one device.

All arrays here are views of the layout (batch, heads, rows, ...).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.memory_ranges import Span, is_some, slice_in
from cuflash.distributed.exchange import Held, Rows
from cuflash.distributed.rank import OF_KEYS, Run, of_heads
from cuflash.distributed.reduce import (
    Pieces,
    Returns,
    SentPartials,
    Sums,
    add_up,
    minus_delta,
    minus_tdelta,
    of_sequences,
)
from cuflash.distributed.schedule import Round, Tile, Traversal
from cuflash.distributed.streams import Streams
from cuflash.gpu.elementwise import assign
from cuflash.gpu.merging import Tangents
from cuflash.gpu.replay import of_thread
from cuflash.shards.partial_results import merge_into, merge_large_entropies
from cuflash.shards.reductions import RunningReductions, indices_in, merge_top_keys, reduce_columns
from cuflash.shards.slices import Slices
from cuflash.spec import row_sums
from cuflash.spec.inputs import BROADCAST, INPUTS, MOVABLE_BROADCAST, NAMES
from cuflash.spec.outputs import (
    DEFAULT_NEED,
    MOVABLE_OF_KEYS,
    OF_QUERIES,
    SOFTMAX_GRADIENTS,
    TAKEN_BY_BACKWARD,
    gradient_of,
)
from cuflash.spec.passes import BACKWARD, COLUMN_MAX, FORWARD, TOP_KEYS, Pass

Array = Any
# What a backward pass by keys needs of rows only in its row sums.
_IN_DELTA = ("out", "dlse", "tout", "tdlse")
CACHE_BYTES = 3 * 2**23  # half of the L2 cache of an H100
FULL_ROWS = 2**17  # keys over all heads of a call: the blocks of so many fill an H100 several times


class Execution(Run):
    """A call on one rank, pass by pass."""

    def _is_left_over(self, tile: Tile) -> bool:
        """Whether the queries of a tile belong to no packed sequence."""
        packing = self.schedule.packing
        return packing is not None and packing.is_left_over(tile.own_queries, "queries")

    # ---- passes ------------------------------------------------------------------------------------------------------

    def forward(self, results: Mapping[str, Array], pass_: Pass = FORWARD) -> None:
        """Fill out, with four axes, and the results of rows, with three: lse, and tangents or reductions."""
        self.fill(tuple(results.values()), lambda run: run._forward(results, pass_))

    def _forward(self, results: Mapping[str, Array], pass_: Pass) -> None:
        traversal, names = self.schedule.by_queries, self._of_keys_given
        pieces, split = Pieces(self, traversal), self.schedule.split_q
        for a_round, heads, held, streams in Rows(self, traversal, names, names).steps():
            q_heads = self.q_heads(heads)
            for number, tile in a_round.longest_first(self.rank):
                at, is_one = self.local(split, tile.own_queries), pieces.is_one(tile)
                rows = {name: x[:, q_heads, at] for name, x in results.items()}
                targets, pairs = (rows, {}) if is_one else self._partial_results(rows)
                with streams.of_call(number):
                    if self._is_left_over(tile):
                        for name, x in (targets | pairs).items():
                            assign(x, -np.inf if name in ("lse", "lse_pairs", "max") else 0)
                        continue
                    arrays, calls = self._of_tile(a_round, tile, heads, held), self.slices_of(tile, heads)
                    call = functools.partial(
                        calls.forward, tile.queries, tile.keys, pass_=pass_, reductions=tuple(results)
                    )
                    is_wide = not is_one and calls.is_on_cpu
                    calls.into(targets, arrays | pairs, call, front=tile.front[0], is_wide=is_wide)
                    if is_wide and row_sums.has_large(targets["lse"]):
                        of_rows = calls.with_queries_before({"lse": targets["lse"]}, tile.front[0])
                        sums = self._row_sums_of(calls, tile, arrays | of_rows)
                        targets["row_sums"] = sums[:, :, tile.front[0] :]
                if not is_one:
                    pieces.add(tile, heads, targets | pairs)
            with streams.returns():
                for piece, partials in pieces.complete(heads):
                    at = self.local(split, traversal.pieces[self.rank][piece])
                    _merge(partials, {name: x[:, q_heads, at] for name, x in results.items()})
                    streams.keep(partials)

    @property
    def _of_keys_given(self) -> tuple[str, ...]:
        """Keys and values, and those of their tangents that there are: they are exchanged in passes by queries."""
        return tuple(name for name in MOVABLE_OF_KEYS if self.arrays.get(name) is not None)

    def _partial_results(self, rows: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Arrays for the results of a call; kernels say more than lse, whose rounding changes weights."""
        shapes, dtype = {name: x.shape for name, x in rows.items()}, self.slices.softmax_dtype
        if self.slices.is_on_cpu:
            return self._wide_like(rows), {}
        pairs = self.xp.empty((*shapes.pop("lse"), 2), dtype)
        return {name: self.xp.empty(shape, dtype) for name, shape in shapes.items()}, {"lse_pairs": pairs}

    def _wide_like(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays for partial results of such shapes, in the dtype of the softmax."""
        return {name: self.xp.empty(x.shape, self.slices.softmax_dtype) for name, x in arrays.items()}

    def _targets(self, results: Mapping[str, Array], heads: Span, at: slice, *, is_one: bool) -> dict[str, Array]:
        """What a call fills: these rows of the results, or partial results of them if the call is not the only one."""
        rows = {name: x[:, self.heads_of(name, heads), at] for name, x in results.items()}
        return rows if is_one else self._wide_like(rows)

    def backward(self, need: tuple[str, ...], results: dict[str, Array], pass_: Pass = BACKWARD) -> None:
        """Fill dq, dk and dv, which have four axes, and the other gradients, which have the axes of their arrays.

        Or their tangents, if the pass makes these.
        """
        self.fill(tuple(results.values()), lambda run: run._backward(need, results, pass_))

    def _backward(self, need: tuple[str, ...], results: dict[str, Array], pass_: Pass) -> None:
        if self.arrays.get("dmax") is not None and "first_maxima" not in self.arrays:
            arrays = {**self.arrays, "first_maxima": self._first_maxima()}
            replace(self, arrays=arrays)._backward(need, results, pass_)
            return
        if self.has_large_rows:
            taken = (*INPUTS, *NAMES, *TAKEN_BY_BACKWARD, *self.options.score_args)
            without_tangents = replace(self, arrays={name: x for name, x in self.arrays.items() if name in taken})
            arrays = {**self.arrays, "row_sums": without_tangents._row_sums(need)}
            replace(self, arrays=arrays, has_large_rows=False)._backward(need, results, pass_)
            return
        of_keys = need if self._sums_dq(need) else tuple(name for name in need if name in OF_KEYS)
        of_queries = tuple(name for name in need if name not in of_keys)
        if of_queries:
            self._backward_by_queries(of_queries, results, pass_)
        if of_keys:
            self._backward_by_keys(of_keys, results, pass_)

    def _first_maxima(self) -> Array:
        """Of this rank's queries the key of all ranks that gets the gradient of the maximum: the first that has it.

        The weight of this key is 1 relative to the maximum, whatever a sink leaves of it: it is the strongest one.
        """
        inputs = {name: self.arrays.get(name) for name in (*INPUTS, *NAMES, *self.options.score_args)}
        inputs["v"] = self.arrays["v"][..., :0]
        options = replace(self.options, dropout=0.0)
        run = replace(self, arrays=inputs, options=options, has_large_rows=False)
        shape, dtype = self.arrays["lse"].shape, self.slices.softmax_dtype
        of_rows = {name: self.xp.empty(shape, dtype) for name in ("lse", "max")}
        run._forward({"out": self.xp.empty((*shape, 0), self.arrays["q"].dtype), **of_rows}, FORWARD)
        strongest = {
            "key_indices": self.xp.empty((*shape, 1), np.int32),
            "key_weights": self.xp.empty((*shape, 1), dtype),
        }
        replace(run, arrays={**inputs, "lse": of_rows["max"]})._top_keys(strongest)
        return strongest["key_indices"][..., 0]

    def _row_sums(self, need: tuple[str, ...], *, is_wide: bool = False) -> Array:
        """The row sums of this rank's queries over the keys of all ranks, where lse is large and that of these keys.

        Calls are those that make dk and dv, because sums of weights are 1 only if these have the very same scores.
        """
        traversal, split, lse = self.schedule.by_keys, self.schedule.split_q, self.arrays["lse"]
        of_all = (*lse.shape[:2], split.seqlen)
        sums_here = row_sums.full((len(traversal.pieces[self.rank]), *of_all), row_sums.EMPTY)
        of_pairs = (name for name in BROADCAST if name not in self.broadcasts_rows)
        names = tuple(name for name in ("q", "lse", *of_pairs) if self.arrays.get(name) is not None)
        pieces = Pieces(self, traversal)
        for a_round, heads, held, streams in Rows(self, traversal, names, names).steps():
            for number, tile in a_round.longest_first(self.rank):
                if not is_some(tile.queries):
                    continue
                arrays, calls = self._of_tile(a_round, tile, heads, held), self.slices_of(tile, heads)
                widens = is_wide or self._sums_dq(need) or not pieces.is_one(tile)
                with streams.of_call(number):
                    if not calls.is_on_cpu:
                        arrays |= {"lse": self._lse_of(calls, tile, arrays)}
                    sums = self._row_sums_of(calls, tile, arrays, is_wide=widens and calls.is_on_cpu)
                for span in tile.needed:
                    sums_here[tile.piece][:, self.q_heads(heads), slice(*span)] = sums[
                        :, :, slice_in([span], tile.needed)
                    ]
        merged = row_sums.merged(self._partials_of_all(sums_here, traversal))[0]
        if self.arrays.get("sinks") is not None:
            merged = row_sums.with_score(merged, dlpack.on_host(self.arrays["sinks"]))
        of_queries = dlpack.on_host(lse)
        merged[~row_sums.is_large(of_queries, self.slices.large_lse)] = row_sums.ABSENT
        return self.xp.asarray(row_sums.explaining(merged, of_queries))

    def _partials_of_all(self, sums_here: Array, traversal: Traversal) -> list[Array]:
        """The row sums of this rank's queries over the keys of each piece, in the order of pieces; at least one array.

        `sums_here` are those of all queries over the keys of this rank.
        """
        shape = (*self.arrays["lse"].shape, row_sums.NUMBERS)
        of_ranks = [self.xp.empty((len(of_rank), *shape), np.float64) for of_rank in traversal.pieces]
        sends = [(rank, self.xp.asarray(self._of_queries(sums_here, rank))) for rank in self.others]
        self.exchange(sends, [(rank, of_ranks[rank]) for rank in self.others])
        partials = [dlpack.on_host(x) for x in of_ranks]
        partials[self.rank] = self._of_queries(sums_here, self.rank)
        order = sorted(
            (piece, rank, i) for rank, of_rank in enumerate(traversal.pieces) for i, piece in enumerate(of_rank)
        )
        # No rank has a key where seqlen_k is 0: there a sink alone makes lse large.
        return [partials[rank][i] for _, rank, i in order] or [row_sums.full(shape[:-1], row_sums.EMPTY)]

    def _lse_of(self, calls: Slices, tile: Tile, arrays: Mapping[str, Array]) -> Array:
        """The lse of the keys of a tile."""
        shape = (*arrays["q"].shape[:3], arrays["v"].shape[3])
        results = {"out": self.xp.empty(shape, arrays["q"].dtype), "lse": self.xp.empty(shape[:3], calls.softmax_dtype)}
        inputs = {name: x for name, x in arrays.items() if name in (*INPUTS, *NAMES)}
        call = functools.partial(calls.forward, tile.queries, tile.keys)
        return calls.into({}, inputs | results, call)["lse"]

    def _of_queries(self, sums: Array, rank: int) -> Array:
        """The row sums of the queries of a rank, of those of all queries."""
        spans = self.schedule.split_q.spans[rank]
        return np.concatenate([sums[..., slice(*span), :] for span in (*spans, (0, 0))], axis=-2)

    def _row_sums_of(self, calls: Slices, tile: Tile, arrays: dict[str, Array], is_wide: bool = True) -> Array:
        """The row sums over the keys of a tile, of rows whose lse is large; on a device, with the own lse of a tile."""
        call = functools.partial(calls.row_sums, tile.queries, tile.keys)
        inputs = {name: x for name, x in arrays.items() if name in (*INPUTS, *NAMES, "lse")}
        sums = calls.into({}, inputs, call, is_wide=is_wide)["row_sums"]
        return sums if calls.is_on_cpu else row_sums.of_partial(sums, dlpack.on_host(arrays["lse"]))

    def _backward_by_queries(self, need: tuple[str, ...], results: dict[str, Array], pass_: Pass) -> None:
        traversal, split, names = self.schedule.by_queries, self.schedule.split_q, self._of_keys_given
        of_queries = {name: results[name] for name in pass_.default[:1] if name in need}  # dq, or tdq
        pieces, sums = Pieces(self, traversal), Sums(self, [name for name in need if name not in of_queries])
        wide = self.slices.summed_score_args(need)
        for a_round, heads, held, streams in Rows(self, traversal, names, names).steps():
            of_calls: list[tuple[Tile, dict[str, Array]]] = []
            for number, tile in a_round.longest_first(self.rank):
                is_one, need_of_call = pieces.is_one(tile), _need_of_call(need, tile)
                targets = self._targets(of_queries, heads, self.local(split, tile.own_queries), is_one=is_one)
                with streams.of_call(number):
                    if self._is_left_over(tile):
                        _clear(targets)
                        continue
                    if not need_of_call:
                        continue
                    arrays, calls = self._of_tile(a_round, tile, heads, held) | wide, self.slices_of(tile, heads)
                    call = functools.partial(calls.backward, tile.queries, tile.keys, need_of_call, pass_=pass_)
                    is_wide = bool(targets) and not is_one and calls.is_on_cpu
                    of_calls.append((tile, calls.into(targets, arrays, call, front=tile.front[0], is_wide=is_wide)))
                if targets and not is_one:
                    pieces.add(tile, heads, targets)
            streams.keep(of_calls)
            with streams.returns():  # on one stream, because calls of several steps add to one sum
                sums.add_calls(of_calls, heads)
                self._add_complete(pieces, traversal, heads, of_queries, streams)
        for name, total in sums.totals():
            results[name][...] = total

    def _add_complete(
        self, pieces: Pieces, traversal: Traversal, heads: Span, results: Mapping[str, Array], streams: Streams
    ) -> None:
        """Add the partial results of some heads, for pieces that have all of theirs."""
        split = self.schedule.split_q if traversal.by == "queries" else self.schedule.split_k
        for piece, partials in pieces.complete(heads):
            at = self.local(split, traversal.pieces[self.rank][piece])
            for name, into in results.items():
                add_up(into[:, self.heads_of(name, heads), at], [partial[name] for partial in partials])
            streams.keep(partials)

    def _sums_dq(self, need: tuple[str, ...]) -> bool:
        """Whether calls by keys also give partial dq in the dtype of the softmax, which saves two of seven products.

        The order in which these partial results are added depends on the ranks, so `is_fixed` excludes it.
        """
        gradients = set(map(gradient_of, need))
        return not self.is_fixed and "dq" in gradients and len(need) > 1 and gradients <= set(DEFAULT_NEED)

    def _backward_by_keys(self, need: tuple[str, ...], results: dict[str, Array], pass_: Pass) -> None:
        traversal, split, dq = self.schedule.by_keys, self.schedule.split_k, pass_.default[0]
        of_keys = {name: results[name] for name in OF_KEYS if name in need}
        pieces, returns = Pieces(self, traversal), Returns(self, results[dq]) if dq in need else None
        of_calls: list[tuple[Tile, Array]] = []
        in_turn = self._is_beyond_cache(traversal)
        for a_round, heads, held, streams in self._rows_by_keys(pass_).steps(in_turn=in_turn):
            streams.keep(of_calls)  # they are sent while the calls of this step run
            of_calls = []
            for number, tile in a_round.longest_first(self.rank):
                is_one = pieces.is_one(tile)
                targets = self._targets(of_keys, heads, self.local(split, tile.own_keys), is_one=is_one)
                is_wide, buffers = self.slices.is_on_cpu and not (returns is None and is_one), {}
                if returns is not None and not self.slices.is_on_cpu:
                    buffers[dq] = returns.buffer(a_round, tile, heads)  # kernels write dq in the dtype of this array
                with streams.of_call(0 if in_turn and self._is_full(tile, heads) else number):
                    if tile.queries[0] == tile.queries[1]:
                        _clear(targets)
                        continue
                    arrays = self._of_tile(a_round, tile, heads, held) | buffers
                    calls = self.slices_of(tile, heads)
                    call = functools.partial(calls.backward, tile.queries, tile.keys, need, pass_=pass_)
                    gradients = self.slices.into(targets, arrays, call, front=tile.front[1], is_wide=is_wide)
                    if returns is not None:
                        of_calls.append((tile, gradients[dq]))
                if not is_one:
                    pieces.add(tile, heads, targets)
            streams.keep(of_calls)
            is_last = a_round is traversal.rounds[-1]
            with streams.returns():
                if returns is not None:
                    returns.send(a_round, of_calls, heads, is_last=is_last)
                self._add_complete(pieces, traversal, heads, of_keys, streams)
                if returns is not None and is_last and heads == a_round.heads[-1]:
                    returns.finish()

    def _rows_by_keys(self, pass_: Pass) -> Rows:
        """The rows of queries that calls by keys read: those of this rank, and those that are exchanged."""
        of_pairs = (name for name in MOVABLE_BROADCAST if name not in self.broadcasts_rows)
        held_here = tuple(x for x in (*OF_QUERIES, *of_pairs) if self.arrays.get(x) is not None)
        # With `is_fixed` a call gets the same arrays on every rank, so that it gives the same bits.
        makes = {"minus_delta": self._minus_delta}
        if pass_.has_tangents:
            makes["minus_tdelta"] = lambda: minus_tdelta(self.arrays, self.slices.softmax_dtype)
        names = held_here if self.is_fixed else (*(name for name in held_here if name not in _IN_DELTA), *makes)
        return Rows(self, self.schedule.by_keys, held_here, names, makes)

    def _minus_delta(self) -> Array:
        """The one number for each row that a backward pass needs of out and dlse."""
        out, dout, dlse = (self.arrays.get(name) for name in ("out", "dout", "dlse"))
        return minus_delta(out, dout, dlse, self.slices.softmax_dtype)

    # ---- reductions of the weights -----------------------------------------------------------------------------------

    def columns(self, results: Mapping[str, Array], pass_: Pass) -> None:
        """Fill what a reduction over queries gives, (batch, num_heads, rows of keys)."""
        self.fill(tuple(results.values()), lambda run: run._with_row_sums()._columns(results, pass_))

    def _columns(self, results: Mapping[str, Array], pass_: Pass) -> None:
        traversal, split, ((name, result),) = self.schedule.by_keys, self.schedule.split_k, results.items()
        of_pairs = (x for x in BROADCAST if x not in self.broadcasts_rows)
        rows = tuple(x for x in ("q", "lse", "dlse", "row_sums", *of_pairs) if self.arrays.get(x) is not None)
        pieces = Pieces(self, traversal)
        for a_round, heads, held, streams in Rows(self, traversal, rows, rows).steps():
            for number, tile in a_round.longest_first(self.rank):
                target = result[:, self.q_heads(heads), self.local(split, tile.own_keys)]
                if not pieces.is_one(tile):
                    target = self.xp.empty(target.shape, target.dtype)
                with streams.of_call(number):
                    if tile.queries[0] == tile.queries[1]:
                        assign(target, 0)
                    else:
                        arrays, calls = self._of_tile(a_round, tile, heads, held), self.slices_of(tile, heads)
                        call = functools.partial(calls.reduce, tile.queries, tile.keys, pass_=pass_)
                        calls.into({name: target}, arrays, call, front=tile.front[1])
                if not pieces.is_one(tile):
                    pieces.add(tile, heads, {name: target})
            with streams.returns():
                for piece, partials in pieces.complete(heads):
                    into = result[:, self.q_heads(heads), self.local(split, traversal.pieces[self.rank][piece])]
                    reduce_columns(into, [partial[name] for partial in partials], is_max=pass_ is COLUMN_MAX)
                    streams.keep(partials)

    def top_keys(self, results: Mapping[str, Array]) -> None:
        """Fill indices and weights of the strongest keys, (batch, num_heads, rows of queries, count) each."""
        self.fill(tuple(results.values()), lambda run: run._with_row_sums()._top_keys(results))

    def _top_keys(self, results: Mapping[str, Array]) -> None:
        if of_thread.recording is not None:
            of_thread.recording.spoil()  # sorting is not recorded
        traversal, names, split = self.schedule.by_queries, self._of_keys_given, self.schedule.split_q
        pieces, count = Pieces(self, traversal), results["key_indices"].shape[3]
        for a_round, heads, held, streams in Rows(self, traversal, names, names).steps():
            q_heads = self.q_heads(heads)
            for number, tile in a_round.longest_first(self.rank):
                targets = {name: x[:, q_heads, self.local(split, tile.own_queries)] for name, x in results.items()}
                if not pieces.is_one(tile):
                    targets = {name: self.xp.empty(x.shape, x.dtype) for name, x in targets.items()}
                with streams.of_call(number):
                    if self._is_left_over(tile):
                        assign(targets["key_indices"], -1)
                        assign(targets["key_weights"], 0)
                    else:
                        arrays, calls = self._of_tile(a_round, tile, heads, held), self.slices_of(tile, heads)
                        call = functools.partial(calls.reduce, tile.queries, tile.keys, pass_=TOP_KEYS, count=(count,))
                        calls.into(targets, arrays, call, front=tile.front[0])
                        targets["key_indices"][...] = indices_in(targets["key_indices"], tile.needed, self.xp)
                if not pieces.is_one(tile):
                    pieces.add(tile, heads, targets)
            with streams.returns():
                for piece, partials in pieces.complete(heads):
                    at = self.local(split, traversal.pieces[self.rank][piece])
                    into = [x[:, q_heads, at] for x in results.values()]
                    into[0][...], into[1][...] = -1, 0
                    for partial in partials:
                        merge_top_keys(*into, *partial.values())
                    streams.keep(partials)

    def _with_row_sums(self) -> Execution:
        """The same with the row sums of rows whose lse is large."""
        if not self.has_large_rows:
            return self
        others = {name: x for name, x in self.arrays.items() if name != "dlse"}
        sums = replace(self, arrays=others)._row_sums((), is_wide=True)
        return replace(self, arrays={**self.arrays, "row_sums": sums}, has_large_rows=False)

    def decode(self, results: Mapping[str, Array]) -> None:
        """Fill out, with four axes, and lse and reductions, with three, for queries that all ranks have."""
        self.fill(tuple(results.values()), lambda run: run._decode(results))

    def _decode(self, results: Mapping[str, Array]) -> None:
        """Each rank sends its partial results to all others, and all ranks merge them in the order of keys."""
        traversal, others, queries = self.schedule.by_keys, self.others, (0, results["out"].shape[2])
        tiles_of = [
            [tile for tile in traversal.calls_of(rank) if is_some(tile.queries)] for rank in range(self.transport.size)
        ]
        order = sorted((tile.keys, rank, i) for rank, tiles in enumerate(tiles_of) for i, tile in enumerate(tiles))
        if not order:
            tiles_of[0], order = [Tile(0, 0, 0, queries, (0, 0), (queries,))], [((0, 0), 0, 0)]
        partials_of = [SentPartials.of(self, len(tiles), results) for tiles in tiles_of]
        for own_tile, partial in zip(tiles_of[self.rank], partials_of[self.rank].partials, strict=True):
            tile = own_tile._replace(queries=queries)  # of all, also those that attend to none of these keys
            arrays = self._of_keys(tile, is_first=tile.keys == order[0][0])
            call = functools.partial(self.slices.forward, tile.queries, tile.keys, reductions=tuple(results))
            pairs = {name: x for name, x in partial.items() if name == "lse_pairs"}
            own_results = {name: x for name, x in partial.items() if name in results}
            self.slices.into(own_results, arrays | pairs, call, is_wide=self.slices.is_on_cpu)
            if "row_sums" in partial:
                partial["row_sums"][...] = self._row_sums_of(self.slices, tile, arrays | {"lse": partial["lse"]})
        sent = partials_of[self.rank].memory
        self.exchange([(rank, sent) for rank in others], [(rank, partials_of[rank].memory) for rank in others])
        _merge([partials_of[rank].partials[i] for _, rank, i in order], results)

    def _of_keys(self, tile: Tile, *, is_first: bool) -> dict[str, Array]:
        """The arrays of a call on all queries, those of the tile, and some of this rank's keys.

        Only the first call gets the inputs of the softmax, such as sinks.
        """
        at = self.local(self.schedule.split_k, tile.own_keys)
        arrays = {name: self.arrays[name][:, :, at] for name in ("k", "v")} | {"q": self.arrays["q"]}
        for name in BROADCAST:
            if self.arrays.get(name) is not None:
                arrays[name] = self.arrays[name] if self.arrays[name].shape[3] == 1 else self.arrays[name][..., at]
        optional_inputs = self.slices.of_heads(slice(None), of_softmax=is_first)
        optional_inputs |= self.slices.of_blocks(tile.queries, tile.keys)
        optional_inputs |= self.slices.scales(slice(None), slice(None))
        return self.slices.with_keys_before(arrays, tile.front[1]) | optional_inputs | self.slices.lengths(tile.keys)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _of_tile(self, a_round: Round, tile: Tile, heads: Span, held: Held) -> dict[str, Array]:
        """The arrays of a call: a piece of this rank's rows, and the received rows that this piece needs."""
        by_keys = a_round.by == "keys"
        split = self.schedule.split_k if by_keys else self.schedule.split_q
        names = MOVABLE_OF_KEYS if by_keys else OF_QUERIES
        at, q_heads = self.local(split, a_round.piece_of(tile)), self.q_heads(heads)
        arrays = {}
        for name in names:
            if self.arrays.get(name) is not None:
                arrays[name] = self.arrays[name][:, slice(*heads) if by_keys else q_heads, at]
        arrays |= held.rows(tile.needed)
        if "minus_delta" in arrays:  # it stands for out and dlse, which were not sent
            arrays["dlse"] = arrays.pop("minus_delta")
            arrays["out"] = self.xp.broadcast_to(self.zero_row(), arrays["dout"].shape)
        if "minus_tdelta" in arrays:  # it stands for tout and tdlse, with an out of zeros
            arrays["tdlse"] = arrays.pop("minus_tdelta")
            arrays["tout"] = self.xp.broadcast_to(self.zero_row(), arrays["dout"].shape)
        if "first_maxima" in arrays:
            first, spans = arrays.pop("first_maxima"), [tile.own_keys] if by_keys else tile.needed
            is_here = functools.reduce(self.xp.logical_or, [(first >= start) & (first < stop) for start, stop in spans])
            arrays["dmax"] = self.xp.where(is_here, arrays["dmax"], 0)
        arrays |= self._of_pairs(tile, q_heads, arrays, by_keys=by_keys)
        if by_keys:
            arrays = self.slices.with_keys_before(arrays, tile.front[1])
        else:
            arrays = self.slices.with_queries_before(arrays, tile.front[0], self.broadcasts_rows)
        return arrays | self._optional_inputs(
            tile, q_heads, slice(*heads), of_softmax=not by_keys and tile.partial == 0
        )

    def _of_pairs(self, tile: Tile, q_heads: slice, arrays: Mapping[str, Array], *, by_keys: bool) -> dict[str, Array]:
        """Bias and mask of a tile, without the rows and columns in front of its piece."""
        optional_inputs = {}
        for name in MOVABLE_BROADCAST:
            array = self.arrays.get(name)
            if array is None:
                continue
            columns = slice(*tile.own_keys)
            if name in arrays:  # of queries that were received, with the columns of this rank's keys
                array, columns = arrays[name], self.local(self.schedule.split_k, tile.own_keys)
            else:
                array = of_heads(array, q_heads, self.problem.num_heads)
                if name not in self.broadcasts_rows:
                    array = array[:, :, self.local(self.schedule.split_q, tile.own_queries)]
            optional_inputs[name] = array if self.arrays[name].shape[3] == 1 else array[..., columns]
        if not by_keys and self.sums_bias:
            of_bias = [name for name in ("bias", "tbias") if name in optional_inputs]
            optional_inputs |= {name: self.slices.widened(optional_inputs[name]) for name in of_bias}
        return optional_inputs

    def _optional_inputs(self, tile: Tile, q_heads: slice, heads: slice, *, of_softmax: bool) -> dict[str, Array]:
        """The other optional inputs of a call on a tile, for some query heads and key/value heads."""
        numbers = self.slices.of_heads(q_heads, of_softmax=of_softmax)
        if self.schedule.packing is not None:
            numbers = {name: of_sequences(x, tile) for name, x in numbers.items()}
        blocks = self.slices.of_blocks(tile.queries, tile.keys)
        blocks = {name: of_heads(x, q_heads, self.problem.num_heads) for name, x in blocks.items()}
        return numbers | blocks | self.slices.scales(q_heads, heads) | self.slices.lengths(tile.keys)

    # ---- what is exchanged -------------------------------------------------------------------------------------------

    def _is_beyond_cache(self, traversal: Traversal) -> bool:
        """Whether a call by keys reads more queries of a head, with dout and dq, than the device's cache holds.

        The blocks of one call read the same queries and add to their dq at the same time. The blocks of another call,
        which would fill the gaps of this one, work on other queries: without a mask that took half as long again on two
        H100, with 64k queries of 128 columns.
        """
        rows = max((tile.queries[1] - tile.queries[0] for tile in traversal.calls_of(self.rank)), default=0)
        of_row = 2 * self.problem.head_dim * self.arrays["q"].dtype.itemsize
        of_row += self.problem.head_dim * self.slices.softmax_dtype.itemsize
        return rows * of_row > CACHE_BYTES

    def _is_full(self, tile: Tile, heads: Span) -> bool:
        """Whether a call by keys fills the device until shortly before its end, so that no other should overlap."""
        count = self.arrays["k"].shape[0] * (heads[1] - heads[0])
        return count * (tile.keys[1] - tile.keys[0]) >= FULL_ROWS


def _need_of_call(need: tuple[str, ...], tile: Tile) -> tuple[str, ...]:
    """The gradients that a call makes.

    Those of softmax inputs depend on no key: of several calls for the same queries only the first makes them.
    """
    return tuple(name for name in need if tile.partial == 0 or gradient_of(name) not in SOFTMAX_GRADIENTS)


def _clear(arrays: Mapping[str, Array]) -> None:
    for array in arrays.values():
        assign(array, 0)


def _merge(partials: Sequence[Mapping[str, Array]], results: Mapping[str, Array]) -> None:
    """Merge the results of calls."""
    outs = [partial["out"] for partial in partials]
    lses = [partial["lse_pairs"] if "lse_pairs" in partial else partial["lse"] for partial in partials]
    sums = [partial.get("row_sums") for partial in partials]
    has_sums = any(x is not None and (x[..., 1] >= 0).any() for x in sums)
    reductions, tangents = RunningReductions(results), None
    for partial in partials:
        reductions.add(partial)
    reductions.finish()
    if "tout" in results:
        of_partials = ([partial[name] for partial in partials] for name in ("tout", "tlse"))
        tangents = Tangents(results["tout"], results["tlse"], *of_partials)
    merge_into(outs, lses, results["out"], results["lse"], sums if has_sums else (), tangents)
    if has_sums and "entropy" in results:
        entropies = [partial["entropy"] for partial in partials]
        merge_large_entropies(entropies, lses, sums, results["entropy"])
