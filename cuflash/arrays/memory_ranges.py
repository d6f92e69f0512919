"""Rows of sequences as spans, and which keys a query attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Span = tuple[int, int]  # rows from the first number up to the second, which is not included


class Band(NamedTuple):
    """Which keys a query attends to: i + diagonal - left to i + diagonal + right; None is no bound."""

    diagonal: int
    left: int | None
    right: int | None

    def keys_of(self, queries: Span, seqlen_k: int) -> Span:
        """The span from the first to the last key that any of some queries attends to."""
        first, last = queries[0] + self.diagonal, queries[1] - 1 + self.diagonal
        start = 0 if self.left is None else first - self.left
        stop = seqlen_k if self.right is None else last + self.right + 1
        return overlap((max(start, 0), max(stop, start, 0)), (0, seqlen_k)) if queries[0] < queries[1] else (0, 0)

    def queries_of(self, keys: Span, seqlen_q: int) -> Span:
        """The span from the first to the last query that attends to any of some keys."""
        return self.transposed.keys_of(keys, seqlen_q)

    @property
    def transposed(self) -> Band:
        """Which queries attend to a key."""
        return Band(-self.diagonal, self.right, self.left)

    def joint(self, queries: Span, spans: Sequence[Span]) -> Span | None:
        """New numbers for the keys of some spans, laid one after the other, so that the band shows the same pairs.

        None if there are none: all queries have to attend to all spans but one as a whole, before and after they are
        moved.
        """
        first, last = queries[0] + self.diagonal, queries[1] - 1 + self.diagonal

        def attend_to_all(keys: Span) -> bool:
            is_left = self.left is None or last - self.left <= keys[0]
            return not is_some(keys) or (is_left and (self.right is None or keys[1] <= first + self.right + 1))

        cuts = [i for i, span in enumerate(spans) if not attend_to_all(span)]
        fixed = cuts[0] if cuts else 0
        start = spans[fixed][0] - sum(b - a for a, b in spans[:fixed])
        stop = start + sum(b - a for a, b in spans)
        moved = ((start, spans[fixed][0]), (spans[fixed][1], stop))
        return (start, stop) if len(cuts) < 2 and all(map(attend_to_all, moved)) else None


def cut_evenly(length: int, pieces: int) -> list[Span]:
    """Spans as equal as they can be; some are empty where there are more pieces than rows."""
    return [(i * length // pieces, (i + 1) * length // pieces) for i in range(pieces)]


def joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans in increasing order, without empty ones; those that overlap or touch are one."""
    result: list[Span] = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], stop))
        else:
            result.append((start, stop))
    return tuple(result)


def overlap(a: Span, b: Span) -> Span:
    """The rows that two spans have in common; an empty span where there are none."""
    start = max(a[0], b[0])
    return start, max(min(a[1], b[1]), start)


def cut(span: Span, spans: Sequence[Span]) -> list[Span]:
    """The intersections of `span` with some spans, in their order."""
    return [common for other in spans if is_some(common := overlap(span, other))]


def slice_in(rows: Sequence[Span], held: Sequence[Span]) -> slice | None:
    """Where `rows` lie among the rows of `held`, laid one after the other; None if they are not one slice of these."""
    first = 0
    found: slice | None = None
    left = list(rows)
    for span in held:
        while left and span[0] <= left[0][0] and left[0][1] <= span[1]:
            start, stop = (first + end - span[0] for end in left.pop(0))
            if found is not None and found.stop != start:
                return None
            found = slice(start if found is None else found.start, stop)
        first += span[1] - span[0]
    return None if left else found


def is_some(span: Span) -> bool:
    """Whether there are rows in a span."""
    return span[0] < span[1]


def within(span: Span, held: Span) -> slice:
    """Where the rows of `span` lie among those of `held`, which has them all."""
    return slice(span[0] - held[0], span[1] - held[0])
