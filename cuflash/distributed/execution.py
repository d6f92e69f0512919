"""One call on one rank: what its schedule says, by the functions that compute calls on one device.

Everything is seen as (batch, heads, rows, ...) here. Rows that travel do so with their own axis first: then the rows of
a span are one piece of memory, which is received where it is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cuflash import merging
from cuflash.distributed.schedule import Schedule, Tile, Walk
from cuflash.distributed.split import Split
from cuflash.distributed.streams import Streams, StreamsOfDevice, copy_all
from cuflash.distributed.transports import Message, Transport
from cuflash.options import Options
from cuflash.parts import Parts
from cuflash.problem import Problem
from cuflash.spans import Span, is_some, overlap, within
from cuflash.terms import BROADCAST, DEFAULT_NEED, GRADIENTS, OF_NUMBERS

Array = Any
CACHE_BYTES = 3 * 2**23  # half of the L2 cache of an H100


class Cargo(NamedTuple):
    """An array whose rows travel."""

    array: Array
    has_columns: bool  # whether its last axis is keys, of which a rank needs its own


class Held(NamedTuple):
    """Rows that a rank has for one step: its own, and those that it received."""

    spans: tuple[Span, ...]
    arrays: tuple[dict[str, Array], ...]  # by name, for each of these spans

    def rows(self, name: str, span: Span) -> Array:
        """Those of a span, which is in one of `spans` or empty."""
        if span[0] == span[1]:
            return self.arrays[0][name][:, :, :0]
        for held, arrays in zip(self.spans, self.arrays, strict=True):
            if held[0] <= span[0] and span[1] <= held[1]:
                return arrays[name][:, :, within(span, held)]
        raise AssertionError(f"{name}: rows {span} of {self.spans}")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """A call on one rank."""

    transport: Transport
    streams: StreamsOfDevice
    timeout: float
    schedule: Schedule
    options: Options  # those of the whole call
    problem: Problem  # the queries of this rank against all keys
    random: tuple[int, int]  # seed and offset of dropout
    arrays: Mapping[str, Array]  # by name, with four axes (of lse and dlse three), None where there is none
    broadcasts_rows: frozenset[str]  # which of bias and mask are the same for all queries

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def is_fixed(self) -> bool:
        """Whether calls get arrays that lie in memory in one way, however many ranks there are."""
        return self.schedule.chunks is not None

    @cached_property
    def xp(self) -> Any:
        return self.parts.xp

    @cached_property
    def parts(self) -> Parts:
        """The calls that tiles are computed by."""
        return Parts(
            options=self.options,
            band=self.schedule.band,
            problem=self.problem,
            random=self.random,
            arrays=self.arrays,
            is_fixed=self.is_fixed,
        )

    def _parts_of(self, tile: Tile, heads: Span) -> Parts:
        """The calls that a tile is computed by: of packed sequences those of one of them, or of some whole ones."""
        parts, packing = self.parts, self.schedule.packing
        if heads[0] and (self.options.dropout or self.problem.has_functions):
            parts = replace(parts, first_head=self._q_heads(heads).start)
        if packing is None or tile.sequences is None:
            return parts
        first, stop = tile.sequences
        if stop - first == 1:
            zeros = (packing.starts_q[first], packing.starts_k[first])
            return replace(parts, band=packing.band_of(first), zeros=zeros, first_entry=first)
        starts = (np.array(x[first : stop + 1], np.int32) - x[first] for x in (packing.starts_q, packing.starts_k))
        starts_q, starts_k = map(self.xp.asarray, starts)
        return replace(parts, starts=(starts_q, starts_k), first_entry=first)

    def _is_left_over(self, tile: Tile) -> bool:
        """Whether the queries of a tile belong to no packed sequence."""
        packing = self.schedule.packing
        return packing is not None and packing.is_left_over(tile.own_queries, "queries")

    # ---- passes ------------------------------------------------------------------------------------------------------

    def forward(self, out: Array, lse: Array) -> None:
        """Fill out, with four axes, and lse, with three."""
        walk = self.schedule.by_queries
        for heads, held, streams in self._steps(walk, ("k", "v")):
            for number, tile in walk.longest_first(self.rank):
                at = self._local(self.schedule.split_q, tile.own_queries)
                results = {"out": out[:, self._q_heads(heads), at], "lse": lse[:, self._q_heads(heads), at]}
                with streams.of_call(number):
                    if self._is_left_over(tile):
                        results["out"][...], results["lse"][...] = 0, -np.inf
                        continue
                    arrays, parts = self._of_tile(walk, tile, heads, held), self._parts_of(tile, heads)
                    call = functools.partial(parts.forward, tile.queries, tile.keys)
                    parts.into(results, arrays, call, front=tile.front[0])

    def backward(self, need: tuple[str, ...], results: dict[str, Array]) -> None:
        """Fill dq, dk and dv, with four axes, and all other gradients, as their arrays are."""
        of_keys = need if self._sums_dq(need) else tuple(name for name in ("dk", "dv") if name in need)
        of_queries = tuple(name for name in need if name not in of_keys)
        if of_queries:
            self._backward_by_queries(of_queries, results)
        if of_keys:
            self._backward_by_keys(of_keys, results)

    def _backward_by_queries(self, need: tuple[str, ...], results: dict[str, Array]) -> None:
        walk = self.schedule.by_queries
        sums = _Sums(self, [name for name in need if name != "dq"])
        wide = {name: x for name, x in self.parts.wide_captured.items() if f"d{name}" in need}
        for heads, held, streams in self._steps(walk, ("k", "v")):
            of_calls: list[tuple[int, Tile, dict[str, Array]]] = []
            for number, tile in walk.longest_first(self.rank):
                at = self._local(self.schedule.split_q, tile.own_queries)
                own = {"dq": results["dq"][:, self._q_heads(heads), at]} if "dq" in need else {}
                with streams.of_call(number):
                    if self._is_left_over(tile):
                        for array in own.values():
                            array[...] = 0
                        continue
                    arrays, parts = self._of_tile(walk, tile, heads, held) | wide, self._parts_of(tile, heads)
                    call = functools.partial(parts.backward, tile.queries, tile.keys, need)
                    of_calls.append((number, tile, parts.into(own, arrays, call, front=tile.front[0])))
            streams.keep(of_calls)
            with streams.returns():  # one after the other: calls of several steps add to one sum
                for number, tile, got in of_calls:
                    for name in sums.names:
                        sums.add(name, got[name], number, tile, heads)
        for name, total in sums.totals():
            results[name][...] = total

    def _sums_dq(self, need: tuple[str, ...]) -> bool:
        """Whether calls by keys give parts of dq too, in the dtype of the softmax, which saves two of seven products.

        The order in which parts are added follows from the ranks.
        """
        return not self.is_fixed and "dq" in need and len(need) > 1 and set(need) <= set(DEFAULT_NEED)

    def _backward_by_keys(self, need: tuple[str, ...], results: dict[str, Array]) -> None:
        walk = self.schedule.by_keys
        names = ("q", "dout", "out", "lse", "dlse", *(name for name in BROADCAST if name not in self.broadcasts_rows))
        given = tuple(name for name in names if self.arrays.get(name) is not None)
        returns = _Returns(self, results["dq"]) if "dq" in need else None
        of_calls: list[tuple[Tile, Array]] = []
        for heads, held, streams in self._steps(walk, given, in_turn=self._is_beyond_cache(walk)):
            streams.keep(of_calls)  # which are added up while the calls of this step run
            of_calls = []
            for number, tile in walk.longest_first(self.rank):
                at = self._local(self.schedule.split_k, tile.own_keys)
                into = {name: results[name][:, slice(*heads), at] for name in need if name != "dq"}
                is_wide, room = returns is not None and self.parts.is_on_cpu, {}
                if returns is not None and not is_wide:  # kernels give a part of dq in this dtype if it has room
                    room["dq"] = returns.room(tile.queries, heads)
                with streams.of_call(number):
                    if tile.queries[0] == tile.queries[1]:
                        for array in into.values():
                            array[...] = 0
                        continue
                    arrays = self._of_tile(walk, tile, heads, held) | room
                    call = functools.partial(self._parts_of(tile, heads).backward, tile.queries, tile.keys, need)
                    got = self.parts.into(into, arrays, call, front=tile.front[1], is_wide=is_wide)
                    if returns is not None:
                        of_calls.append((tile, got["dq"]))
            if returns is not None:
                streams.keep(of_calls)
                with streams.returns():
                    returns.send(of_calls, heads)
                    if heads == walk.heads[-1]:
                        returns.finish()

    def decode(self, out: Array, lse: Array) -> None:
        """Fill out, with four axes, and lse, with three, of queries that all ranks have.

        Each rank sends what it finds in its keys to all others, and all merge these parts in the order of the keys.
        """
        walk, others, queries = self.schedule.by_keys, self._others, (0, out.shape[2])
        seen = [[tile for tile in walk.calls_of(rank) if is_some(tile.queries)] for rank in range(walk.split.ranks)]
        order = sorted((tile.keys, rank, i) for rank, own in enumerate(seen) for i, tile in enumerate(own))
        if not order:
            seen[0], order = [Tile(0, queries, (0, 0))], [((0, 0), 0, 0)]
        dtype = self.parts.softmax_dtype
        parts = [tuple(self.xp.empty((len(own), *x.shape), dtype) for x in (out, lse)) for own in seen]
        is_rounded = self.parts.is_on_cpu or self.problem.has_float8  # to the dtype of q, which may be as precise
        for i, tile in enumerate(seen[self.rank]):
            arrays = self._of_keys(tile, queries, is_first=tile.keys == order[0][0])
            arrays = {name: self.xp.ascontiguousarray(x) for name, x in arrays.items()}
            room = {name: into[i] for into, name in zip(parts[self.rank], ("out", "lse"), strict=True)}
            got = self.parts.forward(queries, tile.keys, arrays if is_rounded else arrays | room)
            for name, into in room.items():
                if got[name] is not into:
                    into[...] = got[name]
        self._exchange(
            [(rank, x) for rank in others for x in parts[self.rank]],
            [(rank, x) for rank in others for x in parts[rank]],
        )
        found = ([parts[rank][what][i] for _, rank, i in order] for what in (0, 1))
        out[...], lse[...] = merging.merge(*found)

    def _of_keys(self, tile: Tile, queries: Span, *, is_first: bool) -> dict[str, Array]:
        """The arrays of a call on all queries and some of this rank's keys; parts of the softmax go with the first."""
        at = self._local(self.schedule.split_k, tile.own_keys)
        found = {name: self.arrays[name][:, :, at] for name in ("k", "v")} | {"q": self.arrays["q"]}
        if self.parts.is_on_cpu:
            found = {name: self.parts.widened(x) for name, x in found.items()}
        for name in BROADCAST:
            if self.arrays.get(name) is not None:
                found[name] = self.arrays[name] if self.arrays[name].shape[3] == 1 else self.arrays[name][..., at]
        if "bias" in found:
            found["bias"] = self.parts.widened(found["bias"])
        terms = self.parts.of_heads(slice(None), of_softmax=is_first) | self.parts.of_blocks(queries, tile.keys)
        return self.parts.behind_keys(found, tile.front[1]) | terms | self.parts.lengths(tile.keys)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _of_tile(self, walk: Walk, tile: Tile, heads: Span, held: Held) -> dict[str, Array]:
        """The arrays of a call: a piece of this rank's, and of what travels what it meets."""
        by_keys = walk.by == "keys"
        own_split = self.schedule.split_k if by_keys else self.schedule.split_q
        names = ("k", "v") if by_keys else ("q", "out", "dout", "lse", "dlse")
        at, q_heads = self._local(own_split, walk.own(tile)), self._q_heads(heads)
        found = {}
        for name in names:
            if self.arrays.get(name) is not None:
                mine = slice(*heads) if name in ("k", "v") else q_heads
                found[name] = self.arrays[name][:, mine, at]
        if held.spans:
            found |= {name: held.rows(name, walk.met(tile)) for name in held.arrays[0]}
        else:  # no piece of this rank meets anything
            found |= {name: self.arrays[name][:, slice(*heads), :0] for name in ("k", "v")}
        found |= self._of_pairs(tile, q_heads, found, by_keys=by_keys)
        if by_keys:
            found = self.parts.behind_keys(found, tile.front[1])
        else:
            found = self.parts.behind_queries(found, tile.front[0], self.broadcasts_rows)
        return found | self._terms(tile, q_heads, by_keys=by_keys)

    def _of_pairs(self, tile: Tile, q_heads: slice, found: Mapping[str, Array], *, by_keys: bool) -> dict[str, Array]:
        """Bias and mask of a tile, without what is in front of it."""
        terms = {}
        for name in BROADCAST:
            array = self.arrays.get(name)
            if array is None:
                continue
            columns = slice(*tile.own_keys)
            if name in found:  # of queries that travelled, with the columns of this rank's keys
                array, columns = found[name], self._local(self.schedule.split_k, tile.own_keys)
            else:
                array = _heads(array, q_heads, self.problem.num_heads)
                if name not in self.broadcasts_rows:
                    array = array[:, :, self._local(self.schedule.split_q, tile.own_queries)]
            terms[name] = array if self.arrays[name].shape[3] == 1 else array[..., columns]
        if "bias" in terms and not by_keys and self.sums_bias:
            terms["bias"] = self.parts.widened(terms["bias"])
        return terms

    def _terms(self, tile: Tile, q_heads: slice, *, by_keys: bool) -> dict[str, Array]:
        """The other terms of a call on a tile."""
        of_heads = self.parts.of_heads(q_heads, of_softmax=not by_keys)
        if self.schedule.packing is not None:
            of_heads = {name: _of_sequences(x, tile) for name, x in of_heads.items()}
        blocks = self.parts.of_blocks(tile.queries, tile.keys)
        blocks = {name: _heads(x, q_heads, self.problem.num_heads) for name, x in blocks.items()}
        return of_heads | blocks | self.parts.lengths(tile.keys)

    @property
    def sums_bias(self) -> bool:
        """Whether dbias is a sum over calls, so that these give parts of it in the dtype of the softmax."""
        bias = self.arrays.get("bias")
        if bias is None:
            return False
        return "bias" in self.broadcasts_rows or (bias.shape[1] == 1 and len(self.schedule.by_queries.heads) > 1)

    def _q_heads(self, heads: Span) -> slice:
        """The query heads of some key/value heads."""
        return slice(heads[0] * self.problem.group_size, heads[1] * self.problem.group_size)

    def _local(self, split: Split, span: Span) -> slice:
        return slice(0, 0) if span[0] == span[1] else split.local(self.rank, span)

    # ---- what travels ------------------------------------------------------------------------------------------------

    def _is_beyond_cache(self, walk: Walk) -> bool:
        """Whether a call by keys meets more queries of a head than the device's cache holds, with what goes with them.

        Blocks read them and add to their dq side by side. Those that the next step begins in the gaps of this one would
        be somewhere else: without a mask that took half as long again on two H100, with 64k queries of 128 columns.
        """
        rows = max((stop - start for start, stop in walk.held(self.rank)), default=0)
        of_row = 2 * self.problem.head_dim * self.arrays["q"].dtype.itemsize
        of_row += self.problem.head_dim * self.parts.softmax_dtype.itemsize
        return rows * of_row > CACHE_BYTES

    def _steps(
        self, walk: Walk, names: tuple[str, ...], *, in_turn: bool = False
    ) -> Iterator[tuple[Span, Held, Streams]]:
        """The key/value heads of each step, and the rows that its calls meet; those of the next are on their way."""
        steps, streams = walk.heads, self.streams.begin(self.arrays["q"])
        under_way: list[tuple[Any, Held]] = []
        try:
            for number, heads in enumerate(steps):
                with streams.rows():
                    while len(under_way) < 2 and number + len(under_way) < len(steps):
                        under_way.append(self._begin(walk, names, steps[number + len(under_way)]))
                    pending, held = under_way.pop(0)
                    self.transport.finish(pending, self.timeout)
                streams.arrived(in_turn=in_turn)
                streams.keep(held)
                yield heads, held, streams
                if number < len(steps) - 1:
                    streams.next_step()
        finally:
            streams.end()

    def _begin(self, walk: Walk, names: tuple[str, ...], heads: Span) -> tuple[Any, Held]:
        """Begin to send and receive the rows of a step."""
        cargo = {name: self._cargo(name, heads) for name in names}
        own, spans = walk.split.spans[self.rank], walk.held(self.rank)
        arrays: list[dict[str, Array]] = [{} for _ in spans]
        sends, receives, copies = [], [], []
        for transfer in walk.transfers:
            if transfer.source == self.rank:
                local = walk.split.local(self.rank, transfer.rows)
                for x in cargo.values():
                    mine = self._columns(x, transfer.target)[:, :, local]
                    rows = _rows_first(mine)
                    if not rows.flags.c_contiguous:
                        rows = self.xp.empty(rows.shape, rows.dtype)
                        copies.append((_rows_third(rows), mine))
                    sends.append((transfer.target, rows))
        for span, found in zip(spans, arrays, strict=True):
            parts = [(part, walk.split.local(self.rank, part)) for part in _cut(span, own)]
            for name, x in cargo.items():
                mine = self._columns(x, self.rank)
                if parts and parts[0][0] == span:  # nothing of it comes from others
                    found[name] = mine[:, :, parts[0][1]]
                    continue
                shape = (span[1] - span[0], *mine.shape[:2], *mine.shape[3:])
                found[name] = _rows_third(self.xp.empty(shape, mine.dtype))
                copies += [(found[name][:, :, within(part, span)], mine[:, :, local]) for part, local in parts]
        for transfer in walk.transfers:
            for span, found in zip(spans, arrays, strict=True):
                if transfer.target == self.rank and overlap(span, transfer.rows) == transfer.rows:
                    at = within(transfer.rows, span)
                    receives += [(transfer.source, _rows_first(found[name])[at]) for name in cargo]
        copy_all(copies)
        return self._start(sends, receives), Held(spans, tuple(arrays))

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.transport.size) if rank != self.rank]

    def _exchange(self, sends: list[Message], receives: list[Message]) -> None:
        """Send and receive, leaving out arrays without elements."""
        self.transport.finish(self._start(sends, receives), self.timeout)

    def _start(self, sends: list[Message], receives: list[Message]) -> Any:
        return self.transport.start(*([x for x in messages if x[1].size] for messages in (sends, receives)))

    def _cargo(self, name: str, heads: Span) -> Cargo:
        array = self.arrays[name]
        if name in BROADCAST:
            return Cargo(_heads(array, self._q_heads(heads), self.problem.num_heads), array.shape[3] != 1)
        return Cargo(array[:, slice(*heads) if name in ("k", "v") else self._q_heads(heads)], False)

    def _columns(self, x: Cargo, target: int) -> Array:
        """The array, of pairs with the columns of the keys of a rank, one span after the other."""
        if not x.has_columns:
            return x.array
        spans = self.schedule.split_k.spans[target]
        return self.xp.concatenate([x.array[..., slice(*span)] for span in spans] or [x.array[..., :0]], axis=-1)


class _Returns:
    """dq in parts, of queries that travelled: added where the keys are, and sent back to where the queries are.

    Parts are of the dtype of the softmax; a rank adds those of each rank in the order of ranks. They are on their way
    during the step after theirs.
    """

    def __init__(self, execution: Execution, dq: Array) -> None:
        self.run = execution
        self.dq = dq
        self.under_way: Callable[[], None] | None = None

    def room(self, span: Span, heads: Span) -> Array:
        """Room for the part of a call on some queries, which can travel as it is."""
        return _rows_third(self.run.xp.empty(self._shape(span, heads), self.run.parts.softmax_dtype))

    def _shape(self, span: Span, heads: Span) -> tuple[int, ...]:
        """Of a part, with the axis of rows first."""
        heads_q = self.run._q_heads(heads)
        return (span[1] - span[0], self.dq.shape[0], heads_q.stop - heads_q.start, self.dq.shape[3])

    def send(self, of_calls: list[tuple[Tile, Array]], heads: Span) -> None:
        """Let the parts of a step go to whom their rows belong, once those of the step before have come."""
        self.finish()
        run, walk = self.run, self.run.schedule.by_keys
        parts = [self._added(span, of_calls, heads) for span in walk.held(run.rank)]
        sends, receives = [], []
        into = {}
        for transfer in walk.transfers:
            if transfer.target == run.rank:
                sends.append((transfer.source, self._rows(parts, transfer.rows)))
            if transfer.source == run.rank:
                into[transfer] = run.xp.empty(self._shape(transfer.rows, heads), run.parts.softmax_dtype)
                receives.append((transfer.target, into[transfer]))
        pending = run._start(sends, receives)
        mine = walk.split.spans[run.rank]
        own = [(run.rank, rows, self._rows(parts, rows)) for held in walk.held(run.rank) for rows in _cut(held, mine)]
        came = [(transfer.target, transfer.rows, rows) for transfer, rows in into.items()]

        def arrive() -> None:
            run.transport.finish(pending, run.timeout)
            found = sorted(own + came, key=lambda part: part[:2])
            for span in mine:
                of_span = [(rows_of, rows) for _, rows_of, rows in found if overlap(rows_of, span) == rows_of]
                total = self._total(span, of_span, heads)
                self.dq[:, run._q_heads(heads), walk.split.local(run.rank, span)] = _rows_third(total)

        self.under_way = arrive

    def _added(self, span: Span, of_calls: list[tuple[Tile, Array]], heads: Span) -> Array:
        """What calls gave for a span that this rank holds."""
        found = [(t.queries, _rows_first(dq)) for t, dq in of_calls if overlap(t.queries, span) == t.queries]
        # One that is there for all rows is what others are added to. Their order follows from the spans alone.
        return self._total(span, sorted(found, key=lambda part: part[0] != span), heads)

    def _total(self, span: Span, parts: list[tuple[Span, Array]], heads: Span) -> Array:
        """The sum of parts of the rows of a span, in their order, with the axis of rows first."""
        xp = self.run.xp
        if parts and parts[0][0] == span:
            total = xp.ascontiguousarray(parts.pop(0)[1])
        else:
            total = xp.zeros(self._shape(span, heads), self.run.parts.softmax_dtype)
        for rows_of, rows in parts:
            total[within(rows_of, span)] += rows
        return total

    def finish(self) -> None:
        """Wait for what is on its way, and add it."""
        if self.under_way is not None:
            self.under_way()
        self.under_way = None

    def _rows(self, parts: list[Array], span: Span) -> Array:
        """The rows of a span, of those that this rank holds."""
        spans = self.run.schedule.by_keys.held(self.run.rank)
        for held, part in zip(spans, parts, strict=True):
            if held[0] <= span[0] and span[1] <= held[1]:
                return part[within(span, held)]
        raise AssertionError(f"dq: rows {span} of {spans}")


class _Sums:
    """Gradients that are sums over queries of several calls, or rows of dbias that one rank holds.

    Parts of all pieces are added in the order of pieces, in the dtype of the softmax, by every rank alike.
    """

    def __init__(self, execution: Execution, names: list[str]) -> None:
        self.run = execution
        self.names = names
        self.pieces = len(execution.schedule.by_queries.pieces[execution.rank])
        self.parts = {name: self._zeros(name) for name in names}

    def _is_own(self, name: str) -> bool:
        """Whether the gradient belongs to this rank alone."""
        return name == "dbias" and "bias" not in self.run.broadcasts_rows

    def _shape(self, name: str) -> tuple[int, ...]:
        array = self.run.arrays.get(name[1:])
        return () if array is None else tuple(array.shape)

    def _zeros(self, name: str, pieces: int | None = None) -> Array:
        """Room for the parts of some pieces; of a gradient of this rank alone, for the whole."""
        run = self.run
        dtype = run.parts.softmax_dtype
        if name == "dbias" and not run.sums_bias:
            dtype = run.arrays["bias"].dtype
        count = (1,) if self._is_own(name) else (self.pieces if pieces is None else pieces,)
        return run.xp.zeros((*count, *self._shape(name)), dtype)

    def add(self, name: str, part: Array, piece: int, tile: Tile, heads: Span) -> None:
        """Add what a call gave."""
        run = self.run
        total = self.parts[name][0 if self._is_own(name) else piece, ...]
        if name == "dbias":
            total = _heads(total, run._q_heads(heads), run.problem.num_heads)
            if self._is_own(name):
                total = total[:, :, run._local(run.schedule.split_q, tile.own_queries)]
                part = part[:, :, tile.front[0] :]
            total = total if total.shape[3] == 1 else total[..., slice(*tile.keys)]
        elif name in GRADIENTS and name not in OF_NUMBERS:
            total = total[..., run._q_heads(heads)]
            if run.schedule.packing is not None:
                total = _of_sequences(total, tile)
        total += part

    def totals(self) -> Iterator[tuple[str, Array]]:
        """The whole gradients, by name."""
        run, shared = self.run, [name for name in self.names if not self._is_own(name)]
        pieces = run.schedule.by_queries.pieces
        others = run._others
        of_rank = {run.rank: {name: self.parts[name] for name in shared}}
        of_rank |= {rank: {name: self._zeros(name, len(pieces[rank])) for name in shared} for rank in others}
        sends = [(rank, of_rank[run.rank][name]) for rank in others for name in shared]
        receives = [(rank, of_rank[rank][name]) for rank in others for name in shared]
        run._exchange(sends, receives)
        order = sorted((piece, rank, i) for rank, own in enumerate(pieces) for i, piece in enumerate(own))
        for name in self.names:
            total = self._zeros(name, 1)[0, ...]
            if self._is_own(name):
                total = self.parts[name][0, ...]
            else:
                for _, rank, i in order:
                    total += of_rank[rank][name][i, ...]
            yield name, total


def _of_sequences(array: Array, tile: Tile) -> Array:
    """What an array has for the packed sequences of a tile; one without an axis of sequences is that of all."""
    if array.ndim == 1:
        return array
    return array[slice(*(tile.sequences or (0, 1)))]


def _cut(span: Span, spans: Sequence[Span]) -> list[Span]:
    """What some spans have of one, in order."""
    return [part for other in spans if is_some(part := overlap(span, other))]


def _rows_first(array: Array) -> Array:
    """An array with its third axis first."""
    return array.transpose(2, 0, 1, *range(3, array.ndim))


def _rows_third(array: Array) -> Array:
    """What `_rows_first` was given."""
    return array.transpose(1, 2, 0, *range(3, array.ndim))


def _heads(array: Array, heads: slice, num_heads: int) -> Array:
    """Some heads of an array over pairs, which may be the same for all of them."""
    return array if array.shape[1] == 1 and num_heads != 1 else array[:, heads]
