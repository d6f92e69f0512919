"""What every pass of one call needs on a rank: the transport, the arrays, the streams, and the slices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from cuflash.arrays.cached import cached_property
from cuflash.arrays.dlpack import is_captured, module_of
from cuflash.arrays.memory_ranges import Span
from cuflash.distributed.agreement import Pending
from cuflash.distributed.schedule import Round, Schedule, Tile
from cuflash.distributed.split import Split
from cuflash.distributed.streams import StreamsOfDevice
from cuflash.distributed.transports import Message, NoTransfers, Transport
from cuflash.gpu.replay import Recording, of_thread
from cuflash.shards.slices import Slices
from cuflash.spec.options import Options
from cuflash.spec.problem import Problem

Array = Any
R = TypeVar("R", bound="Run")
ALIGNMENT = 16  # bytes; a call depends on an address only modulo this
OF_KEYS = ("dk", "dv", "tdk", "tdv")  # results that have key/value heads


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
    has_large_rows: bool = False  # whether lse of some row of some rank is large (`cuflash.spec.row_sums`), in backward
    agreement: Pending | None = None  # of all ranks on this call; rows are exchanged only after it
    # Warm-up runs of such calls, by the alignment of their arrays.
    recordings: dict[tuple[int, ...], Recording] = field(default_factory=dict)
    constants: dict[Any, Array] = field(default_factory=dict)  # arrays that all such calls read, by device and content

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
        return self.slices.xp

    @cached_property
    def slices(self) -> Slices:
        """The calls that compute tiles."""
        return Slices(
            options=self.options,
            band=self.schedule.band,
            problem=self.problem,
            random=self.random,
            arrays=self.arrays,
            is_fixed=self.is_fixed,
        )

    def slices_of(self, tile: Tile, heads: Span) -> Slices:
        """The calls that compute a tile; with packed sequences, those of one sequence or of several whole ones."""
        slices, packing = self.slices, self.schedule.packing
        if heads[0] and (self.options.dropout or self.problem.has_functions):
            slices = replace(slices, first_head=self.q_heads(heads).start)
        if packing is None or tile.sequences is None:
            return slices
        first, starts = tile.sequences[0], self._starts_of(tile)
        if starts is None:
            zeros = (packing.starts_q[first], packing.starts_k[first])
            return replace(slices, band=packing.band_of(first), zeros=zeros, first_entry=first)
        return replace(slices, starts=starts, first_entry=first)

    # ---- heads, rows and slices --------------------------------------------------------------------------------------

    @property
    def sums_bias(self) -> bool:
        """Whether dbias is a sum over calls; then the calls give partial sums of it in the dtype of the softmax."""
        bias = self.arrays.get("bias")
        if bias is None:
            return False
        traversal = self.schedule.by_queries
        adds_heads = bias.shape[1] == 1 and any(len(a_round.heads) > 1 for a_round in traversal.rounds)
        adds_columns = bias.shape[3] == 1 and any(count > 1 for count in traversal.partials[self.rank])
        return "bias" in self.broadcasts_rows or adds_heads or adds_columns

    def q_heads(self, heads: Span) -> slice:
        """The query heads of some key/value heads."""
        return slice(heads[0] * self.problem.group_size, heads[1] * self.problem.group_size)

    def heads_of(self, name: str, heads: Span) -> slice:
        """The heads of a result that belong to some key/value heads."""
        return slice(*heads) if name in OF_KEYS else self.q_heads(heads)

    def some_heads(self, name: str, array: Array, held: Span, heads: Span) -> Array:
        """The slice of a result that belongs to `heads`, where the result has those of `held` (key/value heads)."""
        if held == heads:
            return array
        first, wanted = self.heads_of(name, held).start, self.heads_of(name, heads)
        return array[:, wanted.start - first : wanted.stop - first]

    def local(self, split: Split, span: Span) -> slice:
        return slice(0, 0) if span[0] == span[1] else split.local(self.rank, span)

    # ---- what is exchanged -------------------------------------------------------------------------------------------

    def buffer(self, a_round: Round, rank: int, rows: int, like: Array, dtype: Any) -> Array:
        """Memory for rows that a rank receives, or for their results to send back: as `like`, but with `rows` rows."""
        if self._lies_as_it_is(a_round, rank):
            return self.xp.empty((*like.shape[:2], rows, *like.shape[3:]), dtype)
        rows_first = self.xp.empty((rows, *like.shape[:2], *like.shape[3:]), dtype)
        return rows_first.transpose(1, 2, 0, *range(3, like.ndim))

    def as_sent(self, a_round: Round, rank: int, array: Array) -> Array:
        """Rows in such memory, in the order of axes in which they are sent."""
        return array if self._lies_as_it_is(a_round, rank) else rows_first(array)

    def _lies_as_it_is(self, a_round: Round, rank: int) -> bool:
        """Whether the rows that a rank needs are exchanged in the layout (batch, heads, rows, ...)."""
        return self.options.layout == "bhsd" and a_round.comes_whole(rank)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.transport.size) if rank != self.rank]

    def exchange(self, sends: list[Message], receives: list[Message]) -> None:
        """Send and receive, leaving out arrays without elements."""
        self.finish(self.start(sends, receives))

    def is_waiting(self) -> bool:
        """Whether this rank does not know yet that all ranks make this call."""
        return self.agreement is not None and self.agreement.is_waiting

    def start(self, sends: list[Message], receives: list[Message]) -> UnderWay:
        """Begin to exchange rows, after a wait until the ranks have agreed, and are ready."""
        under_way = UnderWay()
        sends, receives = ([x for x in messages if x[1].size] for messages in (sends, receives))
        peers, arrays = ([x[i] for x in (*sends, *receives)] for i in (0, 1))
        count = len(sends)  # the recorded function keeps this number, and no arrays

        def begin(run: Run, *arrays: Array) -> None:
            if run.agreement is not None:
                run.agreement.before_rows()
            messages = list(zip(peers, arrays, strict=True))
            under_way.pending = run.transport.start(messages[:count], messages[count:])

        begin(self, *arrays)
        if of_thread.recording is not None:
            of_thread.recording.on_arrays(begin, arrays[:count], arrays[count:])
        return under_way

    def finish(self, under_way: UnderWay) -> None:
        """Wait for what `start` began."""

        def end(run: Run) -> None:
            pending, under_way.pending = under_way.pending, None
            run.transport.finish(pending, run.timeout)

        end(self)
        if of_thread.recording is not None:
            of_thread.recording.on_arrays(end, (), ())

    # ---- what is done before rows are exchanged ----------------------------------------------------------------------

    @property
    def is_warm(self) -> bool:
        """Whether all that a device needs for this call is there: kernels are loaded, and pools have the memory."""
        if self.is_on_host:
            return True
        known = self.recordings.get(self._alignments)
        return known is not None and known.fits(self._given)

    def without_transfers(self: R) -> R:
        """The warm-up run of this call: the same kernels and allocations, but no rows are exchanged."""
        return replace(self, transport=NoTransfers(self.rank, self.transport.size), agreement=None)

    def fill(self: R, results: Sequence[Array], fill: Callable[[R], None]) -> None:
        """Fill results. On a device, a warm-up run is recorded, and calls repeat what was recorded."""
        if self.is_on_host:
            fill(self)
        elif isinstance(self.transport, NoTransfers):
            recording = Recording(module_of(self._given[0]), self._given, results)
            with recording:
                fill(self)
            self.recordings[self._alignments] = recording
        elif not self.is_warm:  # in a graph that is captured without an earlier call
            fill(self)
        elif (known := self.recordings[self._alignments]).is_complete:
            known.repeat(self, (*self._given, *results))
        else:
            with known.reused_memory():
                fill(self)
        if self.agreement is not None:
            self.agreement.after_rows()

    @cached_property
    def _given(self) -> tuple[Array, ...]:
        """The arrays that a call on a device reads."""
        return (*(x for x in self.arrays.values() if x is not None), *self._constants())

    @cached_property
    def _alignments(self) -> tuple[int, ...]:
        """What of the addresses a call depends on, and of which device they are."""
        return (self._given[0].data.device_id, *(x.data.ptr % ALIGNMENT for x in self._given))

    def _constants(self) -> list[Array]:
        """Arrays that a call reads besides those that it is given; they are there before rows are exchanged."""
        tiles = [*self.schedule.by_queries.calls_of(self.rank), *self.schedule.by_keys.calls_of(self.rank)]
        starts = [x for tile in tiles for x in self._starts_of(tile) or ()] if self.schedule.packing else []
        return starts + ([self.zero_row()] if "dout" in self.arrays else [])

    def zero_row(self) -> Array:
        """A row of zeros, as long as a row of out."""
        like = self.arrays["dout"]
        return self._constant("zeros", lambda: self.xp.zeros(like.shape[3], like.dtype))

    def _starts_of(self, tile: Tile) -> tuple[Array, Array] | None:
        """cu_seqlens_q and cu_seqlens_k of the whole packed sequences of a tile; None if it has one sequence, or none.

        They come from the host, by memory that CuPy allocates for that: so they are kept.
        """
        packing = self.schedule.packing
        if packing is None or tile.sequences is None or tile.sequences[1] - tile.sequences[0] < 2:
            return None
        first, stop = tile.sequences
        starts = (np.array(x[first : stop + 1], np.int32) - x[first] for x in (packing.starts_q, packing.starts_k))
        starts_q, starts_k = (
            self._constant((side, *tile.sequences), functools.partial(self.xp.asarray, x))
            for side, x in enumerate(starts)
        )
        return starts_q, starts_k

    def _constant(self, content: Any, make: Callable[[], Array]) -> Array:
        """An array that is made once for all such calls."""
        key = (None if self.is_on_host else self.arrays["q"].data.device_id, content)
        if key not in self.constants:
            made = make()
            if is_captured(made):  # a graph that is captured fills it only when it runs
                return made
            self.constants[key] = made
        return self.constants[key]


class UnderWay:
    """An exchange that a transport began."""

    pending: Any = None


def rows_first(array: Array) -> Array:
    """An array with its third axis first."""
    return array.transpose(2, 0, 1, *range(3, array.ndim))


def of_heads(array: Array, heads: slice, num_heads: int) -> Array:
    """Some heads of an array over pairs; an array that is the same for all heads stays as it is."""
    return array if array.shape[1] == 1 and num_heads != 1 else array[:, heads]
