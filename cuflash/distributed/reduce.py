"""Partial results are merged or added, and sent back to the ranks of their rows, before they are rounded."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.memory_ranges import Span, cut, slice_in
from cuflash.distributed.rank import Run, of_heads
from cuflash.distributed.schedule import Round, Tile, Traversal
from cuflash.gpu import merging
from cuflash.gpu.elementwise import WIDE, assign
from cuflash.spec.outputs import GRADIENTS, NUMBER_GRADIENTS, gradient_of, model_of
from cuflash.spec.row_sums import NUMBERS

Array = Any


class Pieces:
    """Keeps the partial results of a rank's pieces until those of some heads are complete."""

    def __init__(self, run: Run, traversal: Traversal) -> None:
        self.run, self.counts = run, traversal.partials[run.rank]
        self._partials: dict[int, dict[int, tuple[Span, dict[str, Array]]]] = defaultdict(dict)  # by piece and number

    def is_one(self, tile: Tile) -> bool:
        """Whether one call gives the whole results of its piece."""
        return self.counts[tile.piece] == 1

    def add(self, tile: Tile, heads: Span, arrays: Mapping[str, Array]) -> None:
        """Keep the results of a call, whose first axes are batch and heads."""
        self._partials[tile.piece][tile.partial] = heads, dict(arrays)

    def of(self, piece: int, heads: Span) -> list[dict[str, Array]]:
        """The results of all calls for some heads, in their order; an empty list while some are missing."""
        partials = self._partials[piece]
        if len(partials) < self.counts[piece]:
            return []
        results = []
        for _, (of_call, arrays) in sorted(partials.items()):
            results.append({name: self.run.some_heads(name, x, of_call, heads) for name, x in arrays.items()})
        for partial in [partial for partial, (of_call, _) in partials.items() if of_call[1] == heads[1]]:
            del partials[partial]
        return results

    def complete(self, heads: Span) -> Iterator[tuple[int, list[dict[str, Array]]]]:
        """The pieces for which the partial results of some heads are complete, and these results."""
        for piece in list(self._partials):
            partials = self.of(piece, heads)
            if partials:
                yield piece, partials


class SentPartials(NamedTuple):
    """Partial outputs and lse in the dtype of the softmax, in one array that is sent without copies."""

    memory: Array
    partials: list[dict[str, Array]]

    @classmethod
    def of(cls, run: Run, count: int, results: Mapping[str, Array]) -> SentPartials:
        """Memory for `count` partial results, each of which is aligned for wide accesses.

        They have what rounding leaves of lse, too: kernels store it with lse, and in host memory it is in row sums.
        """
        dtype, wide, of_rows = run.slices.softmax_dtype, np.dtype(np.float64), results["lse"].shape
        layout = {name: (x.shape, dtype) for name, x in results.items()}
        if run.slices.is_on_cpu:
            layout |= {"row_sums": ((*of_rows, NUMBERS), wide)}
        else:
            del layout["lse"]
            layout |= {"lse_pairs": ((*of_rows, 2), dtype)}
        sizes = [math.prod(shape) * entries.itemsize // dtype.itemsize for shape, entries in layout.values()]
        aligned = [-(-size * dtype.itemsize // WIDE) * WIDE // dtype.itemsize for size in sizes]
        memory = run.xp.empty((count, sum(aligned)), dtype)
        partials: list[dict[str, Array]] = [{} for _ in range(count)]
        firsts = itertools.accumulate(aligned, initial=0)
        for (name, (shape, entries)), size, first in zip(layout.items(), sizes, firsts, strict=False):
            for i, partial in enumerate(partials):
                x = memory[i, first : first + size]
                partial[name] = (x if entries == dtype else x.view(entries)).reshape(shape)
        return cls(memory, partials)


class PartialDq(NamedTuple):
    """A partial dq, for the rows of some spans."""

    spans: tuple[Span, ...]
    heads: Span
    dq: Array


class Returns:
    """Partial dq for queries that were received: they are sent back to the ranks of the queries, and added there.

    Partial results have the dtype of the softmax. A rank adds its own in the order of its calls, and then those of the
    others in the order of ranks. The partial results of a step are exchanged during the next step.
    """

    def __init__(self, run: Run, dq: Array) -> None:
        self.run, self.dq = run, dq
        self._earlier: list[PartialDq] = []  # partial results of earlier rounds
        self._under_way: Callable[[], None] | None = None

    def buffer(self, a_round: Round, tile: Tile, heads: Span) -> Array:
        """Memory for the partial dq of a call, from which it can be sent without a copy."""
        rows = tile.queries[1] - tile.queries[0]
        model = self.dq[:, self.run.q_heads(heads)]
        return self.run.buffer(a_round, self.run.rank, rows, model, self.run.slices.softmax_dtype)

    def send(self, a_round: Round, of_calls: Sequence[tuple[Tile, Array]], heads: Span, *, is_last: bool) -> None:
        """Send the partial results of a step to the ranks of their rows, after those of the step before have come.

        In the last round dq of these heads is complete once they have come; earlier rounds only keep their partial dq.
        """
        self.finish()
        run = self.run
        partial_dqs = [PartialDq(tile.needed, heads, dq) for tile, dq in of_calls]
        if not is_last:
            self._earlier += partial_dqs
            return
        sends, receives, received = [], [], []
        model, dtype = self.dq[:, run.q_heads(heads)], run.slices.softmax_dtype
        for transfer in a_round.transfers:
            if transfer.target == run.rank:
                sends.append((transfer.source, self._message(a_round, transfer.rows, partial_dqs, heads)))
            if transfer.source == run.rank:
                count = transfer.rows[1] - transfer.rows[0]
                into = run.buffer(a_round, transfer.target, count, model, dtype)
                receives.append((transfer.target, run.as_sent(a_round, transfer.target, into)))
                received.append(PartialDq((transfer.rows,), heads, into))
        pending = run.start(sends, receives)
        partial_dqs = [*self._earlier, *partial_dqs, *received]

        def arrive() -> None:
            run.finish(pending)
            for span in run.schedule.split_q.spans[run.rank]:
                for rows in _between_ends(span, partial_dqs):
                    at = run.schedule.split_q.local(run.rank, rows)
                    add_up(self.dq[:, run.q_heads(heads), at], self._partials(rows, partial_dqs, heads))

        self._under_way = arrive

    def finish(self) -> None:
        """Wait for the partial results that are exchanged, and add them."""
        if self._under_way is not None:
            self._under_way()
        self._under_way = None

    def _message(self, a_round: Round, span: Span, partial_dqs: Sequence[PartialDq], heads: Span) -> Array:
        """This rank's partial dq for rows of another rank: the memory of one call, or the sum of several calls."""
        run = self.run
        partials = self._partials(span, partial_dqs, heads) if _between_ends(span, partial_dqs) == [span] else []
        if len(partials) == 1:
            message = run.as_sent(a_round, run.rank, partials[0])
            if message.flags.c_contiguous:
                return message
        model = self.dq[:, run.q_heads(heads)]
        into = run.buffer(a_round, run.rank, span[1] - span[0], model, run.slices.softmax_dtype)
        for rows in _between_ends(span, partial_dqs):
            add_up(into[:, :, slice_in([rows], [span])], self._partials(rows, partial_dqs, heads))
        return run.as_sent(a_round, run.rank, into)

    def _partials(self, rows: Span, partial_dqs: Sequence[PartialDq], heads: Span) -> list[Array]:
        """The partial dq of calls for `rows`; each call has one for all of these rows or for none."""
        partials = []
        for partial_dq in partial_dqs:
            at = slice_in([rows], partial_dq.spans)
            if at is not None:
                partials.append(self.run.some_heads("dq", partial_dq.dq, partial_dq.heads, heads)[:, :, at])
        return partials


class Sums:
    """Gradients that are sums over the queries of several calls, or rows of dbias that one rank holds.

    Every rank adds the partial results of all pieces in the order of pieces, in the dtype of the softmax.
    """

    def __init__(self, run: Run, names: list[str]) -> None:
        self.run = run
        self.names = names
        self.pieces = len(run.schedule.by_queries.pieces[run.rank])
        self.partials = {name: self._zeros(name) for name in names}

    def _is_local(self, name: str) -> bool:
        """Whether the gradient belongs to this rank alone."""
        return gradient_of(name) == "dbias" and "bias" not in self.run.broadcasts_rows

    def _shape(self, name: str) -> tuple[int, ...]:
        array = self.run.arrays.get(model_of(name))
        return () if array is None else tuple(array.shape)

    def _zeros(self, name: str, pieces: int | None = None) -> Array:
        """Zeros for the partial sums of some pieces; for a gradient of this rank alone, zeros for all of it."""
        run = self.run
        dtype = run.slices.softmax_dtype
        if gradient_of(name) == "dbias" and not run.sums_bias:
            dtype = run.arrays["bias"].dtype
        count = (1,) if self._is_local(name) else (self.pieces if pieces is None else pieces,)
        return run.xp.zeros((*count, *self._shape(name)), dtype)

    def add_calls(self, of_calls: Sequence[tuple[Tile, Mapping[str, Array]]], heads: Span) -> None:
        """Add the results of calls, in the order of pieces."""
        for tile, gradients in sorted(of_calls, key=lambda x: (x[0].piece, x[0].partial)):
            for name in self.names:
                if name in gradients:
                    self._add(name, gradients[name], tile, heads)

    def _add(self, name: str, partial: Array, tile: Tile, heads: Span) -> None:
        """Add the result of a call."""
        run = self.run
        total = self.partials[name][0 if self._is_local(name) else tile.piece, ...]
        gradient = gradient_of(name)
        if gradient == "dbias":
            total = of_heads(total, run.q_heads(heads), run.problem.num_heads)
            if self._is_local(name):
                total = total[:, :, run.local(run.schedule.split_q, tile.own_queries)]
                partial = partial[:, :, tile.front[0] :]
            total = total if total.shape[3] == 1 else total[..., slice(*tile.keys)]
        elif gradient in GRADIENTS and gradient not in NUMBER_GRADIENTS:
            total = total[..., run.q_heads(heads)]
            if run.schedule.packing is not None:
                total = of_sequences(total, tile)
        total += partial

    def totals(self) -> Iterator[tuple[str, Array]]:
        """The whole gradients, by name."""
        run, shared = self.run, [name for name in self.names if not self._is_local(name)]
        pieces = run.schedule.by_queries.pieces
        of_rank = {run.rank: {name: self.partials[name] for name in shared}}
        of_rank |= {rank: {name: self._zeros(name, len(pieces[rank])) for name in shared} for rank in run.others}
        sends = [(rank, of_rank[run.rank][name]) for rank in run.others for name in shared]
        receives = [(rank, of_rank[rank][name]) for rank in run.others for name in shared]
        run.exchange(sends, receives)
        order = sorted((piece, rank, i) for rank, of_this in enumerate(pieces) for i, piece in enumerate(of_this))
        for name in self.names:
            total = self._zeros(name, 1)[0, ...]
            if self._is_local(name):
                total = self.partials[name][0, ...]
            else:
                for _, rank, i in order:
                    total += of_rank[rank][name][i, ...]
            yield name, total


def of_sequences(array: Array, tile: Tile) -> Array:
    """The entries of an array for the packed sequences of a tile; an array without an axis of sequences serves all."""
    if array.ndim == 1:
        return array
    return array[slice(*(tile.sequences or (0, 1)))]


def _between_ends(span: Span, partial_dqs: Sequence[PartialDq]) -> list[Span]:
    """A span, cut where a partial dq begins or ends, so that the rows of each piece are in the same ones."""
    ends = {*span, *(end for partial_dq in partial_dqs for piece in cut(span, partial_dq.spans) for end in piece)}
    ordered = sorted(ends)
    return list(itertools.pairwise(ordered))


def add_up(target: Array, partials: Sequence[Array]) -> None:
    """Write the sum of partial results, added in their order and dtype, and rounded once."""
    if not partials:
        assign(target, 0)
    elif isinstance(target, np.ndarray):
        total = partials[0]
        for partial in partials[1:]:
            total = total + partial
        target[...] = total
    else:
        merging.add(target, partials)


def minus_tdelta(arrays: Mapping[str, Array | None], dtype: Any) -> Array:
    """``tdlse - rowsum(dout * tout + tdout * out)``, all that a backward_jvp pass needs of out, tout and tdlse."""
    of_tout = minus_delta(arrays["tout"], arrays["dout"], arrays.get("tdlse"), dtype)
    tdout = arrays.get("tdout")
    return of_tout if tdout is None else minus_delta(arrays["out"], tdout, of_tout, dtype)


def minus_delta(out: Array, dout: Array, dlse: Array | None, dtype: Any) -> Array:
    """``dlse - rowsum(dout * out)``, which is all that a backward pass needs of out and dlse."""
    if isinstance(out, np.ndarray):
        negative_delta = -(out.astype(dtype) * dout.astype(dtype)).sum(axis=-1)
        return negative_delta if dlse is None else dlse + negative_delta
    negative_delta = dlpack.module_of(out).empty(out.shape[:-1], dtype)
    merging.minus_delta(negative_delta, out, dout, dlse)
    return negative_delta
