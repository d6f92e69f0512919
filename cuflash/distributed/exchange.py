"""Rows are exchanged from rank to rank: those of a step while the rank computes with those of the step before.

Rows are exchanged in one of two layouts. If all rows that a rank needs come from one other rank, they have the layout
(batch, heads, rows, ...), and the sender may send them from its own array. Otherwise the axis of rows comes first: then
the rows of each sender are contiguous, and are received where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cuflash.arrays.memory_ranges import Span, cut, is_some, slice_in
from cuflash.distributed.rank import Run, of_heads
from cuflash.distributed.schedule import Round, Traversal
from cuflash.distributed.streams import Streams, copy_all
from cuflash.distributed.transports import Message
from cuflash.spec.inputs import MOVABLE_BROADCAST
from cuflash.spec.outputs import MOVABLE_OF_KEYS

Array = Any
STEPS_AHEAD = 2  # steps whose rows are under way at the same time


class SentArray(NamedTuple):
    """An array whose rows are exchanged."""

    array: Array
    has_columns: bool  # whether its last axis is keys; a rank needs the columns of its own keys


class Store(NamedTuple):
    """The rows of some spans, one after the other, for arrays by name."""

    spans: tuple[Span, ...]
    arrays: dict[str, Array]


class Held(NamedTuple):
    """The rows that the calls of a step need, once this rank holds them all."""

    stores: tuple[Store, ...]

    def rows(self, needed: Sequence[Span]) -> dict[str, Array]:
        """The rows of some spans, which have to lie one after the other in a store."""
        if not is_some(needed[0]):
            return {name: x[:, :, :0] for name, x in self.stores[0].arrays.items()}
        for store in self.stores:
            at = slice_in(needed, store.spans)
            if at is not None:
                return {name: x[:, :, at] for name, x in store.arrays.items()}
        raise AssertionError(f"rows {needed} of {[store.spans for store in self.stores]}")


@dataclass
class _Exchange:
    """The rows of a step that are ready to be sent, and memory for those that are received."""

    sends: list[Message]
    receives: list[Message]
    held: Held
    pending: Any = None  # the exchange, once it has begun


class Rows:
    """The rows that the calls of a traversal need, step by step."""

    def __init__(
        self,
        run: Run,
        traversal: Traversal,
        local_names: Sequence[str],
        sent_names: Sequence[str],
        makes: Mapping[str, Callable[[], Array]] | None = None,
    ) -> None:
        """Calls on this rank's rows get the arrays `local_names`; `sent_names` are exchanged, some made by `makes`."""
        self.run, self.traversal, self.local_names, self.sent_names = run, traversal, local_names, sent_names
        self._makes = makes or {}
        self._made: dict[str, Array] = {}
        self._exchanges: dict[int, _Exchange] = {}  # by step, those that are not over

    def steps(self, *, in_turn: bool = False) -> Iterator[tuple[Round, Span, Held, Streams]]:
        """The round and the key/value heads of each step, and the rows that its calls need."""
        run, steps, streams = self.run, self.traversal.steps, self.run.streams.begin(self.run.arrays["q"])
        exchanging = [number for number, (a_round, _) in enumerate(steps) if a_round.transfers]
        try:
            for number, (a_round, heads) in enumerate(steps):
                # If the host runs ahead of calls, it makes those on own rows before it makes rows ready to be sent.
                if exchanging and (a_round.transfers or not streams.goes_on):
                    with streams.rows():
                        self._send([i for i in exchanging if i >= number][:STEPS_AHEAD], number)
                        if number in self._exchanges:
                            exchange = self._exchanges.pop(number)
                            run.finish(exchange.pending)
                if a_round.transfers:
                    held = exchange.held
                else:
                    with streams.rows():  # calls wait for it, also where columns are put together
                        held = Held(self._local_rows(a_round, heads))
                streams.arrived(in_turn=in_turn)
                streams.keep(held)
                yield a_round, heads, held, streams
                if number < len(steps) - 1:
                    streams.next_step()
        finally:
            streams.end()

    def _send(self, upcoming: Sequence[int], step: int) -> None:
        """Let the rows of some steps start to be sent; while ranks have not agreed yet, only make them ready."""
        for number in upcoming:
            if number not in self._exchanges:
                self._exchanges[number] = self._exchange(*self.traversal.steps[number])
        if step in self._exchanges or not self.run.is_waiting():
            for exchange in self._exchanges.values():
                if exchange.pending is None:
                    exchange.pending = self.run.start(exchange.sends, exchange.receives)

    def _local_rows(self, a_round: Round, heads: Span) -> tuple[Store, ...]:
        """This rank's rows, where they are in memory."""
        arrays = {name: self._sent_array(name, heads) for name in self.local_names}
        rows = {name: self._columns(x, self.run.rank) for name, x in arrays.items()}
        return (Store(a_round.split.spans[self.run.rank], rows),)

    def _exchange(self, a_round: Round, heads: Span) -> _Exchange:
        """The rows of a step, made ready to be sent, and memory for those that come."""
        run, split, rank = self.run, a_round.split, self.run.rank
        sent = {name: self._sent_array(name, heads) for name in self.sent_names}
        sends, copies = self._departing(a_round, sent)
        stores, receives = [], []
        local_spans, spans = split.spans[rank], a_round.needed_by(rank)
        local_rows = {name: self._columns(x, rank) for name, x in sent.items()}
        as_one = not any(cut(span, local_spans) for span in spans)
        for of_store in [spans] if as_one else [(span,) for span in spans]:
            where = slice_in(of_store, local_spans)
            if where is not None:  # this rank holds all of it
                stores.append(Store(of_store, {name: x[:, :, where] for name, x in local_rows.items()}))
                continue
            count = sum(stop - start for start, stop in of_store)
            store = Store(
                of_store, {name: run.buffer(a_round, rank, count, x, x.dtype) for name, x in local_rows.items()}
            )
            stores.append(store)
            for common in (common for span in of_store for common in cut(span, local_spans)):
                at, local = slice_in([common], of_store), split.local(rank, common)
                copies += [(store.arrays[name][:, :, at], x[:, :, local]) for name, x in local_rows.items()]
            receives += self._arriving(a_round, store)
        copy_all(copies)
        return _Exchange(sends, receives, Held(tuple(stores or [Store((), local_rows)])))

    def _arriving(self, a_round: Round, store: Store) -> list[Message]:
        """The messages of other ranks, and the rows of a store that they fill."""
        run, receives = self.run, []
        for transfer in a_round.transfers:
            at = slice_in([transfer.rows], store.spans) if transfer.target == run.rank else None
            if at is not None:
                targets = (x[:, :, at] for x in store.arrays.values())
                receives += [(transfer.source, run.as_sent(a_round, run.rank, x)) for x in targets]
        return receives

    def _departing(self, a_round: Round, sent: dict[str, SentArray]) -> tuple[list[Message], list[tuple[Array, Array]]]:
        """The messages of this rank, and the copies that make rows contiguous for them."""
        run, sends, copies = self.run, [], []
        for transfer in a_round.transfers:
            if transfer.source == run.rank:
                local = a_round.split.local(run.rank, transfer.rows)
                for x in sent.values():
                    rows = self._columns(x, transfer.target)[:, :, local]
                    message = run.as_sent(a_round, transfer.target, rows)
                    if not message.flags.c_contiguous:
                        packed = run.buffer(a_round, transfer.target, rows.shape[2], rows, rows.dtype)
                        copies.append((packed, rows))
                        message = run.as_sent(a_round, transfer.target, packed)
                    sends.append((transfer.target, message))
        return sends, copies

    def _sent_array(self, name: str, heads: Span) -> SentArray:
        run = self.run
        if name in self._makes and name not in self._made:
            self._made[name] = self._makes[name]()
        array = self._made[name] if name in self._made else run.arrays[name]
        if name in MOVABLE_BROADCAST:
            return SentArray(of_heads(array, run.q_heads(heads), run.problem.num_heads), array.shape[3] != 1)
        return SentArray(array[:, slice(*heads) if name in MOVABLE_OF_KEYS else run.q_heads(heads)], False)

    def _columns(self, x: SentArray, target: int) -> Array:
        """The array; if its columns are keys, only those of a rank's keys, one span after the other."""
        if not x.has_columns:
            return x.array
        spans = self.run.schedule.split_k.spans[target]
        pieces = [x.array[..., slice(*span)] for span in spans] or [x.array[..., :0]]
        return self.run.xp.concatenate(pieces, axis=-1)
