"""What every pass of one call needs on a rank: the transport, the arrays, the streams, and the layout of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from cuflash.distributed.agreement import Pending
from cuflash.distributed.schedule import Round, Schedule, Tile
from cuflash.distributed.split import Split
from cuflash.distributed.streams import StreamsOfDevice
from cuflash.distributed.transports import Message, Transport
from cuflash.interop import is_captured, module_of
from cuflash.options import Options
from cuflash.parts import Parts
from cuflash.problem import Problem
from cuflash.recording import Recording, of_thread
from cuflash.spans import Span

Array = Any
ALIGNMENT = 16  # bytes; a call depends on an address only modulo this
OF_KEYS = ("dk", "dv")  # results that have key/value heads


@dataclass(frozen=True, kw_only=True)
class Run:
    """A call on one rank."""

    transport: Transport
    streams: StreamsOfDevice
    timeout: float
    schedule: Schedule
    options: Options  # those of the whole call
    problem: Problem  # the queries of this rank against all keys
    random: tuple[int, int]  # seed and offset of dropout
    arrays: Mapping[str, Array]  # by name, with four axes (lse and dlse: three); None for absent ones
    broadcasts_rows: frozenset[str]  # which of bias and mask are the same for all queries
    agreement: Pending | None = None  # of all ranks on this call; rows travel only after it
    # Recordings of such calls, by the alignment of their arrays; None for calls that cannot be repeated.
    recordings: dict[tuple[int, ...], Recording | None] = field(default_factory=dict)
    constants: dict[int | None, Array] = field(default_factory=dict)  # rows of zeros by device

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def is_on_host(self) -> bool:
        return isinstance(self.arrays["q"], np.ndarray)

    @property
    def is_fixed(self) -> bool:
        """Whether calls get arrays of the same memory layout for any number of ranks."""
        return self.schedule.chunks is not None

    @cached_property
    def xp(self) -> Any:
        return self.parts.xp

    @cached_property
    def parts(self) -> Parts:
        """The calls that compute tiles."""
        return Parts(
            options=self.options,
            band=self.schedule.band,
            problem=self.problem,
            random=self.random,
            arrays=self.arrays,
            is_fixed=self.is_fixed,
        )

    def parts_of(self, tile: Tile, heads: Span) -> Parts:
        """The calls that compute a tile; with packed sequences, those of one sequence or of several whole ones."""
        parts, packing = self.parts, self.schedule.packing
        if heads[0] and (self.options.dropout or self.problem.has_functions):
            parts = replace(parts, first_head=self.q_heads(heads).start)
        if packing is None or tile.sequences is None:
            return parts
        first, stop = tile.sequences
        if stop - first == 1:
            zeros = (packing.starts_q[first], packing.starts_k[first])
            return replace(parts, band=packing.band_of(first), zeros=zeros, first_entry=first)
        starts = (np.array(x[first : stop + 1], np.int32) - x[first] for x in (packing.starts_q, packing.starts_k))
        starts_q, starts_k = map(self.xp.asarray, starts)
        return replace(parts, starts=(starts_q, starts_k), first_entry=first)

    # ---- heads, rows and parts ---------------------------------------------------------------------------------------

    @property
    def sums_bias(self) -> bool:
        """Whether dbias is a sum over calls; then the calls give parts of it in the dtype of the softmax."""
        bias = self.arrays.get("bias")
        if bias is None:
            return False
        walk = self.schedule.by_queries
        adds_heads = bias.shape[1] == 1 and any(len(a_round.heads) > 1 for a_round in walk.rounds)
        adds_columns = bias.shape[3] == 1 and any(count > 1 for count in walk.parts[self.rank])
        return "bias" in self.broadcasts_rows or adds_heads or adds_columns

    def q_heads(self, heads: Span) -> slice:
        """The query heads of some key/value heads."""
        return slice(heads[0] * self.problem.group_size, heads[1] * self.problem.group_size)

    def heads_of(self, name: str, heads: Span) -> slice:
        """The heads of a result that belong to some key/value heads."""
        return slice(*heads) if name in OF_KEYS else self.q_heads(heads)

    def some_heads(self, name: str, array: Array, held: Span, heads: Span) -> Array:
        """The part of a result that belongs to `heads`, where the result has those of `held` (key/value heads)."""
        if held == heads:
            return array
        first, own = self.heads_of(name, held).start, self.heads_of(name, heads)
        return array[:, own.start - first : own.stop - first]

    def local(self, split: Split, span: Span) -> slice:
        return slice(0, 0) if span[0] == span[1] else split.local(self.rank, span)

    # ---- what travels ------------------------------------------------------------------------------------------------

    def room(self, a_round: Round, rank: int, rows: int, like: Array, dtype: Any) -> Array:
        """Memory for rows that a rank meets, or for their results on the way back: as `like`, but with `rows` rows."""
        if self._lies_as_it_is(a_round, rank):
            return self.xp.empty((*like.shape[:2], rows, *like.shape[3:]), dtype)
        return rows_third(self.xp.empty((rows, *like.shape[:2], *like.shape[3:]), dtype))

    def as_sent(self, a_round: Round, rank: int, array: Array) -> Array:
        """Rows in such memory, in the order of axes in which they travel."""
        return array if self._lies_as_it_is(a_round, rank) else rows_first(array)

    def _lies_as_it_is(self, a_round: Round, rank: int) -> bool:
        """Whether the rows that a rank meets travel in the layout (batch, heads, rows, ...)."""
        return self.options.layout == "bhsd" and a_round.comes_whole(rank)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.transport.size) if rank != self.rank]

    def exchange(self, sends: list[Message], receives: list[Message]) -> None:
        """Send and receive, leaving out arrays without elements."""
        self.finish(self.start(sends, receives))

    def is_waiting(self) -> bool:
        """Whether this rank does not know yet that all ranks make this call."""
        return self.agreement is not None and not self.agreement.is_over

    def start(self, sends: list[Message], receives: list[Message]) -> UnderWay:
        """Begin to exchange rows, after a wait until the ranks have agreed."""
        under_way = UnderWay()
        sends, receives = ([x for x in messages if x[1].size] for messages in (sends, receives))
        peers, arrays = ([x[i] for x in (*sends, *receives)] for i in (0, 1))
        count = len(sends)  # the recorded function keeps this number, and no arrays

        def begin(run: Run, *arrays: Array) -> None:
            if run.agreement is not None:
                run.agreement.hear()
            messages = list(zip(peers, arrays, strict=True))
            under_way.pending = run.transport.start(messages[:count], messages[count:])

        begin(self, *arrays)
        if of_thread.recording is not None:
            of_thread.recording.on_arrays(begin, arrays[:count], arrays[count:])
        return under_way

    def finish(self, under_way: UnderWay) -> None:
        """Wait for what `start` began."""

        def end(run: Run) -> None:
            run.transport.finish(under_way.pending, run.timeout)
            under_way.pending = None

        end(self)
        if of_thread.recording is not None:
            of_thread.recording.on_arrays(end, (), ())

    def fill(self, results: Sequence[Array], fill: Callable[[], None], *constants: Array) -> None:
        """Fill results; on a device, repeat an earlier call if its arrays lay in memory as those of this one do."""
        given = [x for x in (*self.arrays.values(), *constants) if x is not None]
        if self.is_on_host:
            fill()
            return
        arrays = (*given, *results)
        key = (given[0].data.device_id, *(x.data.ptr % ALIGNMENT for x in arrays))
        known = self.recordings.get(key)
        if known is not None and known.repeat(self, arrays):
            return
        if key in self.recordings and known is None:
            fill()
            return
        recording = Recording(module_of(given[0]), given, results)
        with recording:
            fill()
        self.recordings[key] = recording if recording.is_complete else None

    def zero_row(self) -> Array:
        """A row of zeros, as long as a row of out."""
        like = self.arrays["dout"]
        device = None if self.is_on_host else like.data.device_id
        if device in self.constants:
            return self.constants[device]
        row = self.xp.zeros(like.shape[3], like.dtype)
        if not is_captured(like):  # a graph that is captured writes the zeros only when it runs
            self.constants[device] = row
        return row


class UnderWay:
    """An exchange that a transport began."""

    pending: Any = None


def rows_first(array: Array) -> Array:
    """An array with its third axis first."""
    return array.transpose(2, 0, 1, *range(3, array.ndim))


def rows_third(array: Array) -> Array:
    """The inverse of `rows_first`: the first axis becomes the third."""
    return array.transpose(1, 2, 0, *range(3, array.ndim))


def of_heads(array: Array, heads: slice, num_heads: int) -> Array:
    """Some heads of an array over pairs; an array that is the same for all heads stays as it is."""
    return array if array.shape[1] == 1 and num_heads != 1 else array[:, heads]
