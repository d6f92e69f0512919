"""Who computes which pairs of queries and keys, and which rows travel for it: pure data, from lengths and splits alone.

Results are computed whole by the rank that holds their rows, in one call for each piece of them. So nothing that was
rounded is ever added to anything that was rounded elsewhere:

- *By queries*: out, lse and dq of a piece of queries, from all keys that it sees. Keys and values travel.
- *By keys*: dk and dv of a piece of keys, from all queries that see it. Queries and what belongs to them travel. dq may
  come in parts from here instead, which travel back the same way.

Pieces are the spans of a rank, or, where results are to have the same bits whatever the number of ranks, these cut at
the ends of global chunks. What travels does so in steps of some key/value heads each, so that a step's rows are on
their way while those of the step before are computed with. The first step is small, since nothing is computed while
its rows travel; where parts of dq travel back, so is the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from cuflash.distributed.packed import By, Packing
from cuflash.distributed.split import Split
from cuflash.spans import Band, Span, cut_evenly, is_some, joined, overlap
from cuflash.values import counted, value_error

GROWTH = 4  # how many times as long as the step before a step is: to compute takes as much longer than to send, or more


class Tile(NamedTuple):
    """Queries and keys of one call. One of them is a piece of what the rank holds, the other all that it meets.

    Calls begin at multiples of some step, so that there may be queries, or keys, in front of the piece.
    """

    rank: int
    queries: Span
    keys: Span
    sequences: Span | None = None  # of packed ones, those that it computes with, from the first on
    front: tuple[int, int] = (0, 0)  # queries and keys before the piece; they are nobody's, and have no weight

    @property
    def own_queries(self) -> Span:
        """Without those in front."""
        return self.queries[0] + self.front[0], self.queries[1]

    @property
    def own_keys(self) -> Span:
        """Without those in front."""
        return self.keys[0] + self.front[1], self.keys[1]


class Transfer(NamedTuple):
    """Rows that one rank sends to another."""

    source: int
    target: int
    rows: Span


@dataclass(frozen=True)
class Walk:
    """One way to compute all pairs: by queries, whose keys travel, or by keys, whose queries do."""

    by: Literal["queries", "keys"]
    calls: tuple[Tile, ...]  # one for each piece of a rank, in increasing order
    split: Split  # of what travels
    heads: tuple[Span, ...]  # key/value heads of each step

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Those of pieces that meet anything."""
        return tuple(tile for tile in self.calls if is_some(self.met(tile)))

    @cached_property
    def pieces(self) -> tuple[tuple[Span, ...], ...]:
        """By rank."""
        return tuple(tuple(map(self.own, self.calls_of(rank))) for rank in range(self.split.ranks))

    def own(self, tile: Tile) -> Span:
        """The piece of a tile: rows that its rank holds, and that results belong to."""
        return tile.own_queries if self.by == "queries" else tile.own_keys

    def met(self, tile: Tile) -> Span:
        """The other side of a tile, rows that travel."""
        return tile.keys if self.by == "queries" else tile.queries

    def calls_of(self, rank: int) -> list[Tile]:
        """One for each piece of a rank; the other side of a piece that meets nothing is empty."""
        return [tile for tile in self.calls if tile.rank == rank]

    def longest_first(self, rank: int) -> list[tuple[int, Tile]]:
        """The same with their numbers, those of most pairs first."""
        return self._longest_first[rank]

    @cached_property
    def _longest_first(self) -> tuple[list[tuple[int, Tile]], ...]:
        numbered = (list(enumerate(self.calls_of(rank))) for rank in range(self.split.ranks))
        return tuple(sorted(own, key=lambda x: -_most_pairs(x[1])) for own in numbered)

    @cached_property
    def _held(self) -> tuple[tuple[Span, ...], ...]:
        ranks = range(self.split.ranks)
        return tuple(joined([self.met(tile) for tile in self.tiles if tile.rank == rank]) for rank in ranks)

    def held(self, rank: int) -> tuple[Span, ...]:
        """The rows, of what travels, that the tiles of a rank meet."""
        return self._held[rank]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Rows on their way to the ranks that need them and do not hold them: the same in every step."""
        found = []
        for target in range(self.split.ranks):
            for source in range(self.split.ranks):
                if source == target:
                    continue
                for span in self.split.spans[source]:
                    for needed in self.held(target):
                        rows = overlap(span, needed)
                        if rows[0] < rows[1]:
                            found.append(Transfer(source, target, rows))
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Both walks of one problem, and the key/value heads of each step."""

    split_q: Split
    split_k: Split
    band: Band
    chunks: int | None  # where pieces are cut, so that they are the same for any number of ranks; None: they are spans
    step: tuple[int, int]  # calls begin at multiples of these, in queries and in keys
    num_heads_kv: int
    steps: int  # at most
    packing: Packing | None = None  # of packed sequences, each of which has a band of its own

    @cached_property
    def by_queries(self) -> Walk:
        """Of the forward pass, of dq as a whole, and of gradients that are sums over pairs."""
        return self._walk("queries")

    @cached_property
    def by_keys(self) -> Walk:
        """Of dk and dv, and of parts of dq."""
        return self._walk("keys")

    def _walk(self, by: By) -> Walk:
        own, other = (self.split_q, self.split_k) if by == "queries" else (self.split_k, self.split_q)
        calls = [self._call(by, rank, piece) for rank, pieces in enumerate(self._pieces(own, by)) for piece in pieces]
        heads = _cut(self.num_heads_kv, _lengths_of_steps(by, min(self.steps, self.num_heads_kv)))
        return Walk(by, tuple(calls), other, heads)

    def _pieces(self, split: Split, by: By) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank, cut at the ends of chunks, and where packed sequences are."""
        pieces = _pieces(split, self.chunks)
        if self.packing is None:
            return pieces
        return tuple(tuple(part for piece in own for part in self.packing.cut(piece, by)) for own in pieces)

    def _call(self, by: By, rank: int, piece: Span) -> Tile:
        """The call for a piece."""
        if self.packing is not None:
            met, sequences = self.packing.met(piece, by), self.packing.sequences_of(piece, by)
        else:
            see = self.band.keys_of if by == "queries" else self.band.queries_of
            met, sequences = see(piece, (self.split_k if by == "queries" else self.split_q).seqlen), None
        sides = (piece, met) if by == "queries" else (met, piece)
        queries, keys = map(_from_step, sides, self.step, self.zeros_of(sequences))
        front = (piece[0] - queries[0], 0) if by == "queries" else (0, piece[0] - keys[0])
        return Tile(rank, queries, keys, sequences, front)

    def zeros_of(self, sequences: Span | None) -> tuple[int, int] | tuple[None, None]:
        """The query and the key that a call counts from; None for packed sequences that are whole, or none at all."""
        if self.packing is None or sequences is None:
            return 0, 0
        first, stop = sequences
        return (self.packing.starts_q[first], self.packing.starts_k[first]) if stop - first == 1 else (None, None)

    def pairs_of(self, tile: Tile) -> int:
        """How many pairs of a tile are visible, in one head."""
        total = 0
        for i in range(*tile.own_queries):
            seen = (
                self.band.keys_of((i, i + 1), self.split_k.seqlen)
                if self.packing is None
                else self.packing.met((i, i + 1), "queries")
            )
            start, stop = overlap(seen, tile.own_keys)
            total += stop - start
        return total

    def describe(self) -> str:
        """The schedule in words, a line for each rank and walk."""
        q, k = self.split_q, self.split_k
        lines = [
            f"context parallel: {q.ranks} ranks, {q.seqlen} queries, {k.seqlen} keys, "
            + (_bounds(self.band) if self.packing is None else f"{len(self.packing.starts_q) - 1} packed sequences"),
            f"  pieces    {'spans of the ranks' if self.chunks is None else f'spans cut at {self.chunks} chunks'}",
        ]
        for walk in (self.by_queries, self.by_keys):
            what, results = ("keys", "out, lse, dq") if walk.by == "queries" else ("queries", "dk, dv")
            steps = ", ".join(f"{start}-{stop - 1}" for start, stop in walk.heads) or "none"
            lines.append(f"  by {walk.by}: {results}")
            lines.append(f"    steps of key/value heads {steps}; a step's rows travel during the step before")
            for rank in range(q.ranks):
                tiles = [f"{_rows(t.own_queries)} x {_rows(t.own_keys)}" for t in walk.tiles if t.rank == rank]
                comes = [f"{_rows(t.rows)} from {t.source}" for t in walk.transfers if t.target == rank]
                lines.append(f"    rank {rank} computes queries x keys {', '.join(tiles) or 'nothing'}")
                lines.append(f"           receives {what} {', '.join(comes) or 'from nobody'}")
        return "\n".join(lines)


@lru_cache(maxsize=64)
def make_schedule(
    split_q: Split,
    split_k: Split,
    band: Band,
    *,
    chunks: int | None = None,
    num_heads_kv: int = 1,
    steps: int = 1,
    step: tuple[int, int] = (1, 1),
    packing: Packing | None = None,
) -> Schedule:
    """The schedule of a problem.

    Parameters
    ----------
    split_q, split_k : Split
        Of queries, and of keys and values, over the same ranks.
    band : Band
        What `causal` and `window` leave visible.
    chunks : int, optional
        Into how many global chunks pieces are cut.
    num_heads_kv, steps : int
        The key/value heads, and how many groups of them there are to be at most.
    step : (int, int)
        Calls begin at multiples of these, in queries and in keys; those within a packed sequence count from its start.
    packing : Packing, optional
        Of packed sequences, whose bands it has in the place of `band`.

    Raises
    ------
    ValueError
        Splits over different numbers of ranks, and spans that do not consist of whole chunks.
    """
    if split_q.ranks != split_k.ranks:
        raise value_error("split_k", counted(split_k.ranks, "rank"), f"{split_q.ranks} as split has")
    if chunks is not None:
        for name, split in (("split", split_q), ("split_k", split_k)):
            ends = {end for chunk in cut_evenly(split.seqlen, chunks) for end in chunk}
            for own in split.spans:
                for span in own:
                    if not ends.issuperset(span):
                        expected = f"spans of whole chunks, {chunks} in {split.seqlen} rows, with deterministic=True"
                        raise value_error(name, f"a span {span}", expected)
    return Schedule(
        split_q=split_q,
        split_k=split_k,
        band=band,
        chunks=chunks,
        step=step,
        num_heads_kv=num_heads_kv,
        steps=steps,
        packing=packing,
    )


def _pieces(split: Split, chunks: int | None) -> tuple[tuple[Span, ...], ...]:
    """The spans of each rank, cut at the ends of chunks."""
    if chunks is None:
        return split.spans

    def cut(own: Sequence[Span]) -> tuple[Span, ...]:
        pieces = (overlap(span, chunk) for span in own for chunk in cut_evenly(split.seqlen, chunks))
        return tuple(piece for piece in pieces if piece[0] < piece[1])

    return tuple(map(cut, split.spans))


def _lengths_of_steps(by: By, steps: int) -> list[int]:
    """How long steps are, relative to each other: up to the last one, or where dq travels back up to the middle."""
    return [GROWTH ** (i if by == "queries" else min(i, steps - 1 - i)) for i in range(steps)]


def _cut(count: int, lengths: Sequence[int]) -> tuple[Span, ...]:
    """Parts about as long as `lengths` say, relative to each other: 1 at least. There is one for each part."""
    ends = [0]
    for i, length in enumerate(lengths):
        left, later = count - ends[-1], len(lengths) - 1 - i
        ends.append(ends[-1] + max(1, min(round(left * length / sum(lengths[i:])), left - later)))
    return tuple(itertools.pairwise(ends))


def _from_step(span: Span, step: int, zero: int | None) -> Span:
    """A span with rows before it, so that it begins at a multiple of a step, counted from `zero`."""
    if zero is None:
        return span
    return (span[0] - (span[0] - zero) % step, span[1]) if is_some(span) else (zero, zero)


def _most_pairs(tile: Tile) -> int:
    (first_q, stop_q), (first_k, stop_k) = tile.queries, tile.keys
    return (stop_q - first_q) * (stop_k - first_k)


def _rows(span: Span) -> str:
    return f"{span[0]}..{span[1] - 1}"


def _bounds(band: Band) -> str:
    if band.left is None and band.right is None:
        return "every key visible"
    first = "the first key" if band.left is None else f"i + {band.diagonal - band.left}"
    last = "the last key" if band.right is None else f"i + {band.diagonal + band.right}"
    return f"query i sees keys from {first} to {last}"
