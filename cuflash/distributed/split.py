"""Which rows of a sequence each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuflash.arrays.checks import as_integer, counted, type_error, typed, value_error
from cuflash.arrays.dlpack import module_of
from cuflash.arrays.memory_ranges import Span, cut_evenly, joined
from cuflash.spec.type_variables import ArrayT

Array = Any
_AXES = ": axis is that of the sequence, -1 in lse, -3 in layout 'bshd'"  # what messages about a wrong length add


@dataclass(frozen=True)
class Split:
    """The rows of a sequence that each rank holds, as spans of global indices.

    Parameters
    ----------
    spans : sequence of sequences of (start, stop)
        For each rank, its spans in increasing order. Every row is in exactly one span of one rank. A rank may have no
        rows, and spans may have any lengths. Adjacent spans of a rank are joined to one.

    Raises
    ------
    TypeError, ValueError
        Spans that are no pairs of integers, that overlap, or that leave a row out.

    See Also
    --------
    contiguous, zigzag : The usual splits.
    ContextParallel : Takes one as `split` and `split_k`.

    Examples
    --------
    >>> from cuflash.distributed import Split
    >>> split = Split([[(0, 3), (9, 10)], [(3, 9)]])
    >>> split.seqlen, split.rows(0), split.rows(1)
    (10, 4, 6)
    """

    spans: tuple[tuple[Span, ...], ...]

    def __init__(self, spans: Sequence[Sequence[Span]]) -> None:
        if not isinstance(spans, (list, tuple)) or not all(isinstance(own, (list, tuple)) for own in spans):
            raise type_error("spans", typed(spans), "for each rank a list of (start, stop)")
        if not spans:
            raise value_error("spans", "no rank", "at least one")
        by_rank = tuple(joined(_checked(f"spans[{rank}]", own)) for rank, own in enumerate(spans))
        reached = 0
        for start, stop in sorted(span for own in by_rank for span in own):
            if start != reached:
                got = f"rows from {start} on after rows up to {reached}"
                raise value_error("spans", got, "every row in one span of one rank")
            reached = stop
        object.__setattr__(self, "spans", by_rank)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.spans)

    @property
    def seqlen(self) -> int:
        """How many rows all ranks hold together."""
        return max((stop for own in self.spans for _, stop in own), default=0)

    def rows(self, rank: int) -> int:
        """How many rows a rank holds.

        Parameters
        ----------
        rank : int
            From 0 to ranks - 1.

        Returns
        -------
        int
            The sum of the lengths of its spans.

        Raises
        ------
        IndexError
            There is no such rank.

        See Also
        --------
        local
        part
        """
        return sum(stop - start for start, stop in self.spans[rank])

    def local(self, rank: int, span: Span) -> slice:
        """Where the rows of a span lie in the array of the rank that holds them.

        Parameters
        ----------
        rank : int
            The rank that holds the rows.
        span : (int, int)
            First row and the row after the last one, in the whole sequence.

        Returns
        -------
        slice
            The same rows along the axis of the rank's array.

        Raises
        ------
        ValueError
            The rank does not hold all of these rows as one span.

        See Also
        --------
        rows
        part
        """
        first = 0
        for start, stop in self.spans[rank]:
            if start <= span[0] and span[1] <= stop:
                return slice(first + span[0] - start, first + span[1] - start)
            first += stop - start
        raise value_error("span", span, f"rows of rank {rank}")

    def part(self, array: ArrayT, rank: int, axis: int = -2) -> ArrayT:
        """The rows of one rank, taken from an array with the rows of all ranks.

        Parameters
        ----------
        array : array
            NumPy's or CuPy's.
        rank : int
            The rank whose rows are wanted.
        axis : int, default -2
            The axis of the sequence: -2 for q, k, v and out in layout "bhsd", -3 in layout "bshd", -1 for lse.

        Returns
        -------
        array
            A copy, of the dtype and library of `array`, with ``rows(rank)`` rows.

        Raises
        ------
        ValueError
            The array has not as many rows as the split.

        See Also
        --------
        whole : Its inverse.
        """
        whole: Array = array
        rows = whole.shape[axis]
        if rows != self.seqlen:
            raise value_error(
                "array", f"{counted(rows, 'row')} in axis {axis}", f"{self.seqlen} as the split has{_AXES}"
            )
        moved = whole.swapaxes(0, axis)
        pieces = [moved[start:stop] for start, stop in self.spans[rank]] or [moved[:0]]
        return module_of(whole).concatenate(pieces).swapaxes(0, axis)

    def whole(self, parts: Sequence[ArrayT], axis: int = -2) -> ArrayT:
        """The array with the rows of all ranks, concatenated from the shards of the ranks: the inverse of `part`.

        Parameters
        ----------
        parts : sequence of array
            The arrays of all ranks, in their order.
        axis : int, default -2
            The axis of the sequence, as `part` takes it: ``split.whole(lses, axis=-1)``.

        Returns
        -------
        array
            Of the dtype and library of the parts, with `seqlen` rows.

        Raises
        ------
        ValueError
            Not one array for each rank, or one that has not the rows of its rank.

        See Also
        --------
        part : Its inverse.
        """
        if len(parts) != self.ranks:
            raise value_error("parts", counted(len(parts), "array"), f"{self.ranks}, one for each rank")
        pieces: dict[Span, Array] = {}
        shards: Sequence[Array] = parts
        for rank, array in enumerate(shards):
            if array.shape[axis] != self.rows(rank):
                expected = f"{self.rows(rank)} as rank {rank} has{_AXES}"
                raise value_error(f"parts[{rank}]", f"{counted(array.shape[axis], 'row')} in axis {axis}", expected)
            for span in self.spans[rank]:
                pieces[span] = array.swapaxes(0, axis)[self.local(rank, span)]
        pieces = pieces or {(0, 0): shards[0].swapaxes(0, axis)}
        return module_of(shards[0]).concatenate([pieces[span] for span in sorted(pieces)]).swapaxes(0, axis)


def zigzag(seqlen: int, ranks: int, *, multiple: int = 1) -> Split:
    """Two spans for each rank, one from the front and one from the back, so that a causal mask gives equal work.

    The sequence is cut into ``2 * ranks`` pieces of nearly equal length. Rank r holds the pieces r and
    ``2 * ranks - 1 - r``::

        4 ranks:   0 1 2 3 3 2 1 0

    Parameters
    ----------
    seqlen, ranks : int
        Rows of the sequence, and the number of ranks.
    multiple : int, default 1
        Pieces begin at multiples of this; 16 suits dropout.

    Returns
    -------
    Split
        Its spans have nearly equal lengths.

    Raises
    ------
    TypeError, ValueError
        An argument that is no integer, a negative `seqlen`, `ranks` below 1, or `multiple` below 1.

    See Also
    --------
    contiguous
    Split : Any other one.
    ContextParallel

    References
    ----------
    - Brandon and others: Striped attention (2023), https://arxiv.org/abs/2311.09431.
    - It cuts rows in turns, for the same purpose.

    Examples
    --------
    >>> from cuflash.distributed import zigzag
    >>> zigzag(16, 2).spans
    (((0, 4), (12, 16)), ((4, 12),))
    """
    cuts = _cuts(seqlen, ranks, 2, multiple)
    return Split([[cuts[r], cuts[2 * ranks - 1 - r]] for r in range(ranks)])


def contiguous(seqlen: int, ranks: int, *, multiple: int = 1) -> Split:
    """One span for each rank, in the order of ranks. With a window, a rank needs few keys from other ranks.

    Parameters
    ----------
    seqlen, ranks : int
        Rows of the sequence, and the number of ranks.
    multiple : int, default 1
        Spans begin at multiples of this; 16 suits dropout.

    Returns
    -------
    Split
        Its spans have nearly equal lengths.

    Raises
    ------
    TypeError, ValueError
        An argument that is no integer, a negative `seqlen`, `ranks` below 1, or `multiple` below 1.

    See Also
    --------
    zigzag
    Split : Any other one.
    ContextParallel

    Examples
    --------
    >>> from cuflash.distributed import contiguous
    >>> contiguous(10, 3).spans
    (((0, 3),), ((3, 6),), ((6, 10),))
    """
    return Split([[span] for span in _cuts(seqlen, ranks, 1, multiple)])


def _cuts(seqlen: int, ranks: int, pieces: int, multiple: int) -> list[Span]:
    seqlen, ranks, multiple = (
        as_integer(name, x) for name, x in (("seqlen", seqlen), ("ranks", ranks), ("multiple", multiple))
    )
    if seqlen < 0:
        raise value_error("seqlen", seqlen, "an integer >= 0")
    if ranks < 1:
        raise value_error("ranks", ranks, "an integer >= 1")
    if multiple < 1:
        raise value_error("multiple", multiple, "an integer >= 1")
    blocks = cut_evenly(-(-seqlen // multiple), pieces * ranks)
    return [(min(start * multiple, seqlen), min(stop * multiple, seqlen)) for start, stop in blocks]


def _checked(name: str, spans: Sequence[Any]) -> list[Span]:
    checked: list[Span] = []
    for span in spans:
        if not isinstance(span, (list, tuple)) or len(span) != 2:
            raise type_error(name, typed(span), "pairs (start, stop)")
        start, stop = (as_integer(name, x) for x in span)
        if not 0 <= start <= stop:
            raise value_error(name, (start, stop), "0 <= start <= stop")
        if checked and start < checked[-1][1]:
            raise value_error(name, f"{(start, stop)} after {checked[-1]}", "increasing spans that do not overlap")
        checked.append((start, stop))
    return checked
