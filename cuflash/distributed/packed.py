"""Packed sequences over ranks: which queries attend to which keys, and how spans are cut into pieces of one call each.

Each sequence is a problem of its own. A piece holds whole sequences, which one packed call computes, or rows of one
sequence, which one call with the diagonal of that sequence computes, or rows that belong to no sequence.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from cuflash.arrays.memory_ranges import Band, Span, is_some, overlap
from cuflash.spec.options import Options

By = Literal["queries", "keys"]


@dataclass(frozen=True)
class Packing:
    """Where packed sequences start, where the last one ends, and the bounds that `causal` and `window` set in each."""

    starts_q: tuple[int, ...]
    starts_k: tuple[int, ...]
    left: int | None
    right: int | None
    is_top_left: bool

    @classmethod
    def of(cls, options: Options, starts_q: tuple[int, ...], starts_k: tuple[int, ...]) -> Packing:
        left, right = options.window or (None, None)
        if options.causal:
            right = 0 if right is None else min(right, 0)
        # A given diagonal is the line i = j of each sequence.
        return cls(starts_q, starts_k, left, right, options.causal == "top_left" or options.diagonal is not None)

    def starts(self, by: By) -> tuple[int, ...]:
        return self.starts_q if by == "queries" else self.starts_k

    def sequences_of(self, span: Span, by: By) -> Span:
        """The sequences that have rows in a span: the first, and the one after the last."""
        starts = self.starts(by)
        start, stop = overlap(span, (0, starts[-1]))
        return (bisect_right(starts, start) - 1, bisect_left(starts, stop)) if start < stop else (0, 0)

    def cut(self, span: Span, by: By) -> list[Span]:
        """The pieces of a span: parts of sequences, whole ones between them, and rows of no sequence at the end."""
        starts = self.starts(by)
        in_sequences = overlap(span, (0, starts[-1]))
        cuts = {*span, in_sequences[1]}
        if is_some(in_sequences):
            first, stop = self.sequences_of(in_sequences, by)
            if starts[first] < in_sequences[0]:
                cuts.add(min(starts[first + 1], in_sequences[1]))
            if starts[stop] > in_sequences[1]:
                cuts.add(max(starts[stop - 1], in_sequences[0]))
        ends = sorted(cuts)
        return [(a, b) for a, b in pairwise(ends) if span[0] <= a < b <= span[1]]

    def is_left_over(self, piece: Span, by: By) -> bool:
        """Whether the rows of a piece belong to no sequence."""
        return piece[0] >= self.starts(by)[-1]

    def band_of(self, sequence: int) -> Band:
        """Which keys a query of a sequence attends to; rows are numbered over all sequences."""
        q, k = (x[sequence : sequence + 2] for x in (self.starts_q, self.starts_k))
        diagonal = 0 if self.is_top_left else (k[1] - k[0]) - (q[1] - q[0])
        return Band(k[0] - q[0] + diagonal, self.left, self.right)

    def needed(self, piece: Span, by: By) -> Span:
        """The span of keys that queries of a piece attend to, or of the queries that attend to the keys of a piece."""
        first, stop = self.sequences_of(piece, by)
        starts = self.starts("keys" if by == "queries" else "queries")
        needed = (starts[first], starts[stop])
        if stop - first == 1:
            band = self.band_of(first)
            visible = band.keys_of(piece, needed[1]) if by == "queries" else band.queries_of(piece, needed[1])
            needed = overlap(visible, needed) if is_some(visible) else (0, 0)
        return needed if is_some(needed) else (0, 0)
