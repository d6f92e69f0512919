"""Which rank computes which pairs of queries and keys, and which rows are exchanged, from lengths and splits alone.

There are two traversals of all pairs:

- *By queries*: out, lse and dq of a piece of queries, from all keys that it attends to. Keys and values are exchanged.
- *By keys*: dk and dv of a piece of keys, from all queries that attend to it. Queries and the arrays that belong to
  them are exchanged. These calls may also give partial dq, which are then sent back the same way and replace the dq of
  the other traversal.

A piece belongs to the rank that holds its rows. A traversal has rounds. In the first round a rank computes with rows
that it holds, while other rows are exchanged; in the second round it computes with the rows that it received. Each call
gives a partial result of its piece. The call does not round it and does not add it to an earlier result. If results
must have the same bits for any number of ranks, there is one round, whose calls have all rows that a piece needs, and
pieces are cut at the ends of global chunks.

Rows are exchanged in steps of some key/value heads each, so that the rows of a step are exchanged while the rank
computes with those of the step before. A first step is small if nothing is computed before it; a last step is small if
its partial results are added or are sent back after it. Each step has calls, copies and transfers of its own, which the
host begins one by one. So there are few steps, unless there are many rows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cuflash.arrays.cached import cached_property
from cuflash.arrays.checks import counted, value_error
from cuflash.arrays.memory_ranges import Band, Span, cut, cut_evenly, is_some, joined
from cuflash.distributed.packed import By, Packing
from cuflash.distributed.split import Split

# Bytes of rows of all ranks in a step, if there are up to FEW bytes in all. On two H200 the forward pass of 2^28 bytes
# was 5 % faster in two steps than in one, and both passes 10 %.
STEP_BYTES = 2**27
FEW = 2**29
STEPS = 2, 3  # the most steps for up to FEW bytes, and for more; LARGEST_STEP allows more in backward passes
# Bytes of rows in a step of a backward pass. A step sends back twice as many, and both are in memory, with those of the
# steps next to it. On four H100 both passes of 2^31 bytes took 227 ms and 8.0 GB in ten steps, 265 ms and 13.5 GB in
# three.
LARGEST_STEP = 2**28
# A longer step is this many times as long as a shorter one next to it: to compute takes that much longer than to send,
# or more.
GROWTH = 4


class Tile(NamedTuple):
    """Queries and keys of one call. One side is a piece of the rank's own rows, the other side the rows that it needs.

    Calls begin at multiples of some step, so there may be queries or keys in front of the piece. The piece may need
    rows of several spans, which lie one after the other in memory. These rows are numbered as if they were adjacent in
    the whole, too, and in such a way that the bounds leave the same pairs visible.
    """

    rank: int
    piece: int  # its number among the pieces of the rank
    partial: int  # its number among the partial results of the piece
    queries: Span
    keys: Span
    needed: tuple[Span, ...]  # the rows that the piece is computed with, by their indices in the whole
    sequences: Span | None = None  # the packed sequences that it computes with
    front: tuple[int, int] = (0, 0)  # queries and keys in front of the piece; they have no results and no weight

    @property
    def own_queries(self) -> Span:
        """The queries without those in front of the piece."""
        return self.queries[0] + self.front[0], self.queries[1]

    @property
    def own_keys(self) -> Span:
        """The keys without those in front of the piece."""
        return self.keys[0] + self.front[1], self.keys[1]


class Transfer(NamedTuple):
    """Rows that one rank sends to another."""

    source: int
    target: int
    rows: Span


@dataclass(frozen=True)
class Round:
    """Calls on rows that ranks hold, on rows that they receive, or on both together."""

    by: By
    calls: tuple[Tile, ...]  # ordered by rank and piece
    split: Split  # of the rows that are exchanged
    heads: tuple[Span, ...]  # key/value heads of each step

    def piece_of(self, tile: Tile) -> Span:
        """The piece of a tile: rows that its rank holds and computes results for."""
        return tile.own_queries if self.by == "queries" else tile.own_keys

    def calls_of(self, rank: int) -> list[Tile]:
        """The calls of a rank."""
        return [tile for tile in self.calls if tile.rank == rank]

    def longest_first(self, rank: int) -> list[tuple[int, Tile]]:
        """The calls of a rank with their numbers, those with the most pairs first."""
        return self._longest_first[rank]

    @cached_property
    def _longest_first(self) -> tuple[list[tuple[int, Tile]], ...]:
        numbered = (list(enumerate(self.calls_of(rank))) for rank in range(self.split.ranks))
        return tuple(sorted(of_rank, key=lambda x: -_most_pairs(x[1])) for of_rank in numbered)

    @cached_property
    def _needed(self) -> tuple[tuple[Span, ...], ...]:
        return tuple(joined([x for t in self.calls_of(rank) for x in t.needed]) for rank in range(self.split.ranks))

    def needed_by(self, rank: int) -> tuple[Span, ...]:
        """The rows of the exchanged side that the tiles of a rank need, whichever rank holds them."""
        return self._needed[rank]

    def comes_whole(self, rank: int) -> bool:
        """Whether all rows that the tiles of a rank need come from one other rank, as one span."""
        return self._comes_whole[rank]

    @cached_property
    def _comes_whole(self) -> tuple[bool, ...]:
        received = [[x.rows for x in self.transfers if x.target == rank] for rank in range(self.split.ranks)]
        return tuple(len(rows) == 1 and tuple(rows) == self.needed_by(rank) for rank, rows in enumerate(received))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The rows that are exchanged to ranks that need them and do not hold them: the same in every step."""
        ranks = range(self.split.ranks)
        return tuple(
            Transfer(source, target, rows)
            for target, source in itertools.product(ranks, ranks)
            if source != target
            for span in self.split.spans[source]
            for rows in cut(span, self.needed_by(target))
        )


@dataclass(frozen=True)
class Traversal:
    """One way to compute all pairs: by queries, where keys are exchanged, or by keys, where queries are exchanged."""

    by: By
    pieces: tuple[tuple[Span, ...], ...]  # by rank
    rounds: tuple[Round, ...]

    @cached_property
    def steps(self) -> tuple[tuple[Round, Span], ...]:
        """All rounds with the key/value heads of each step."""
        return tuple((a_round, heads) for a_round in self.rounds for heads in a_round.heads)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfers of all rounds."""
        return tuple(transfer for a_round in self.rounds for transfer in a_round.transfers)

    def calls_of(self, rank: int) -> list[Tile]:
        """The calls of a rank in all rounds."""
        return [tile for a_round in self.rounds for tile in a_round.calls_of(rank)]

    @cached_property
    def partials(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the number of partial results of each piece."""
        calls = [Counter(tile.piece for tile in self.calls_of(rank)) for rank in range(len(self.pieces))]
        return tuple(
            tuple(calls_of_piece[i] for i in range(len(pieces)))
            for calls_of_piece, pieces in zip(calls, self.pieces, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Both traversals of one problem, and the key/value heads of each step.

    See Also
    --------
    ContextParallel.plan : Makes it.
    """

    split_q: Split
    split_k: Split
    band: Band
    chunks: int | None  # pieces are cut at their ends, the same for any number of ranks; None: pieces are spans
    step: tuple[int, int]  # calls begin at multiples of these, in queries and in keys
    num_heads_kv: int
    steps: int | None  # the most steps; None: the number depends on how many bytes are exchanged
    row_bytes: tuple[int, int]  # bytes that are exchanged for a row and a key/value head, by queries and by keys
    packing: Packing | None = None  # packed sequences, each of which has a band of its own
    joins: bool = False  # whether a call may have rows of several spans, because nothing depends on their numbers
    why_one_round: str | None = None  # the reason for one round instead of two

    @cached_property
    def by_queries(self) -> Traversal:
        """The traversal of the forward pass, of dq as a whole, and of gradients that are sums over pairs."""
        return self._traversal("queries")

    @cached_property
    def by_keys(self) -> Traversal:
        """The traversal of dk and dv, and of partial dq."""
        return self._traversal("keys")

    def _traversal(self, by: By) -> Traversal:
        split, exchanged = (self.split_q, self.split_k) if by == "queries" else (self.split_k, self.split_q)
        pieces = self._pieces(split, by)
        calls_by_round: tuple[list[Tile], list[Tile]] = ([], [])
        for rank, pieces_of_rank in enumerate(pieces):
            for i, piece in enumerate(pieces_of_rank):
                for partial, (number, tile) in enumerate(self._calls(by, rank, piece)):
                    calls_by_round[number].append(tile._replace(piece=i, partial=partial))
        steps = self._most_steps(by, exchanged.seqlen)
        rounds: list[Round] = []
        for number, calls in enumerate(calls_by_round):
            exchanges_nothing = self.why_one_round is None and number == 0
            lengths = [1] * min(steps, 1) if exchanges_nothing else self._lengths(by, steps)
            if calls or number > len(rounds):  # at least one round, even if nothing is computed
                rounds.append(Round(by, tuple(calls), exchanged, _split_heads(self.num_heads_kv, lengths)))
        return Traversal(by, pieces, tuple(rounds))

    def _most_steps(self, by: By, rows: int) -> int:
        """In how many steps the rows of all ranks are exchanged. It does not depend on the number of ranks."""
        if self.steps is not None:
            return min(self.steps, self.num_heads_kv)
        total = rows * self.num_heads_kv * self.row_bytes[by == "keys"]
        least = 1 if self.why_one_round is None else 2  # two, so that something is computed before all rows have come
        most = STEPS[total > FEW]
        if by == "keys" and total > FEW:
            most = 2 + -(-total // LARGEST_STEP)  # plus two, because the first and the last are small
        return min(max(-(-total // STEP_BYTES), least), most, self.num_heads_kv)

    def _lengths(self, by: By, steps: int) -> list[int]:
        """Relative lengths of the steps: the first is small, and so is the last unless lengths only grow."""
        only_up = by == "queries" and self.why_one_round is not None
        return [GROWTH ** (i if only_up else min(i, steps - 1 - i, 1)) for i in range(steps)]

    def _pieces(self, split: Split, by: By) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank, cut at the ends of chunks, and as packed sequences require."""
        pieces = _pieces(split, self.chunks)
        if self.packing is None:
            return pieces
        return tuple(
            tuple(smaller for piece in of_rank for smaller in self.packing.cut(piece, by)) for of_rank in pieces
        )

    def _calls(self, by: By, rank: int, piece: Span) -> Iterator[tuple[int, Tile]]:
        """The calls for a piece, each with its round."""
        split = self.split_k if by == "queries" else self.split_q
        if self.packing is not None:
            needed, sequences = self.packing.needed(piece, by), self.packing.sequences_of(piece, by)
        else:
            needed, sequences = self._band(by).keys_of(piece, split.seqlen), None

        def call(needed: Span, *spans: Span) -> Tile:
            sides = (piece, needed) if by == "queries" else (needed, piece)
            queries, keys = map(_from_step, sides, self.step, self.zeros_of(sequences))
            front = (piece[0] - queries[0], 0) if by == "queries" else (0, piece[0] - keys[0])
            spans = spans or ((keys if by == "queries" else queries),)
            return Tile(rank, 0, 0, queries, keys, spans, sequences, front)

        if self.why_one_round is not None or not is_some(needed):
            yield 0, call(needed)
            return
        held = cut(needed, split.spans[rank])
        received = cut(needed, joined([x for i, spans in enumerate(split.spans) if i != rank for x in spans]))
        if sequences is not None and sequences[1] - sequences[0] > 1 and (received or len(held) > 1):
            yield 1, call(needed)  # with all keys of each sequence, because diagonals depend on their number
            return
        for number, spans in enumerate((held, received)):
            for joint, spans_of_call in self._joined(by, piece, spans):
                yield number, call(joint, *spans_of_call) if len(spans_of_call) > 1 else call(joint)

    def _joined(self, by: By, piece: Span, spans: Sequence[Span]) -> list[tuple[Span, tuple[Span, ...]]]:
        """The spans that a piece needs, joined where one call can have several, and the numbers that their rows get."""
        calls: list[tuple[Span, tuple[Span, ...]]] = []
        for span in spans:
            together = (*calls[-1][1], span) if calls and self.joins else ()
            joint = self._band(by).joint(piece, together) if together else None
            if joint is None:
                calls.append((span, (span,)))
            else:
                calls[-1] = joint, together
        return calls

    def _band(self, by: By) -> Band:
        """Which rows a row of a piece needs."""
        return self.band if by == "queries" else self.band.transposed

    def zeros_of(self, sequences: Span | None) -> tuple[int, int] | tuple[None, None]:
        """The query and the key that a call counts from; None if it has several whole packed sequences, or none."""
        if self.packing is None or sequences is None:
            return 0, 0
        first, stop = sequences
        return (self.packing.starts_q[first], self.packing.starts_k[first]) if stop - first == 1 else (None, None)

    def pairs_of(self, by: By, tile: Tile) -> int:
        """How many pairs of a tile are visible, in one head."""
        total = 0
        split = self.split_k if by == "queries" else self.split_q
        for i in range(*(tile.own_queries if by == "queries" else tile.own_keys)):
            row = (i, i + 1)
            if self.packing is None:
                visible = self._band(by).keys_of(row, split.seqlen)
            else:
                visible = self.packing.needed(row, by)
            total += sum(stop - start for start, stop in cut(visible, tile.needed))
        return total

    def describe(self) -> str:
        """The schedule in words, a line for each rank and round.

        Returns
        -------
        str
            Several lines.

        See Also
        --------
        ContextParallel.plan
        """
        q, k = self.split_q, self.split_k
        lines = [
            f"context parallel: {q.ranks} ranks, {q.seqlen} queries, {k.seqlen} keys, "
            + (_band_text(self.band) if self.packing is None else f"{len(self.packing.starts_q) - 1} packed sequences"),
            f"  pieces    {'spans of the ranks' if self.chunks is None else f'spans cut at {self.chunks} chunks'}",
        ]
        if self.why_one_round is not None:
            lines.append(f"  rounds    one, of calls that have all rows that a piece needs: {self.why_one_round}")
        for traversal in (self.by_queries, self.by_keys):
            exchanged, results = ("keys", "out, lse, dq") if traversal.by == "queries" else ("queries", "dk, dv")
            lines.append(f"  by {traversal.by}: {results}")
            for a_round in traversal.rounds:
                lines += self._lines_of(a_round, exchanged)
        return "\n".join(lines)

    def _lines_of(self, a_round: Round, exchanged: str) -> Iterator[str]:
        """A round in words: its steps, and what each rank computes and receives."""
        steps = ", ".join(f"{start}-{stop - 1}" for start, stop in a_round.heads) or "none"
        if not a_round.transfers:
            rows, note = "own", ""
        else:
            rows = "received" if self.why_one_round is None else "all"
            note = "; a step's rows are exchanged during the step before"
        yield f"    with {rows} {exchanged}: key/value heads {steps}{note}"
        for rank in range(a_round.split.ranks):
            tiles = [_pairs_text(a_round.by, tile) for tile in a_round.calls_of(rank) if is_some(tile.needed[0])]
            received = [f"{_rows_text(x.rows)} from {x.source}" for x in a_round.transfers if x.target == rank]
            yield f"      rank {rank} computes queries x keys {', '.join(tiles) or 'nothing'}"
            if received:
                yield f"             receives {exchanged} {', '.join(received)}"


@lru_cache(maxsize=64)
def make_schedule(
    split_q: Split,
    split_k: Split,
    band: Band,
    *,
    chunks: int | None = None,
    num_heads_kv: int = 1,
    steps: int | None = 1,
    row_bytes: tuple[int, int] = (0, 0),
    step: tuple[int, int] = (1, 1),
    packing: Packing | None = None,
    joins: bool = False,
    why_one_round: str | None = None,
) -> Schedule:
    """The schedule of a problem, after a check that splits have the same ranks, and spans consist of whole chunks.

    The parameters are fields of `Schedule`. This function finds some reasons for one round (`why_one_round`) itself.
    """
    if split_q.ranks != split_k.ranks:
        raise value_error("split_k", counted(split_k.ranks, "rank"), f"{split_q.ranks} as split has")
    if chunks is not None:
        for name, split in (("split", split_q), ("split_k", split_k)):
            ends = {end for chunk in _chunks_of(split, chunks) for end in chunk}
            for spans in split.spans:
                for span in spans:
                    if not ends.issuperset(span):
                        expected = f"spans of whole chunks, {chunks} in {split.seqlen} rows, with deterministic=True"
                        expected += " or batch_invariant=True"
                        raise value_error(name, f"a span {span}", expected)
        why_one_round = "deterministic=True"
    elif why_one_round is None and step != (1, 1):
        starts = (
            (start, of_side)
            for split, of_side in zip((split_q, split_k), step, strict=True)
            for spans in split.spans
            for start, _ in spans
        )
        if packing is not None or any(start % of_side for start, of_side in starts):
            why_one_round = f"calls begin at multiples of {step[0]} queries and {step[1]} keys, and spans do not"
    return Schedule(
        split_q=split_q,
        split_k=split_k,
        band=band,
        chunks=chunks,
        step=step,
        num_heads_kv=num_heads_kv,
        steps=steps,
        row_bytes=row_bytes,
        packing=packing,
        joins=joins and packing is None,
        why_one_round=why_one_round,
    )


def _pieces(split: Split, chunks: int | None) -> tuple[tuple[Span, ...], ...]:
    """The spans of each rank, cut at the ends of chunks."""
    if chunks is None:
        return split.spans
    ends = _chunks_of(split, chunks)
    return tuple(tuple(piece for span in spans for piece in cut(span, ends)) for spans in split.spans)


def _chunks_of(split: Split, chunks: int) -> list[Span]:
    """The chunks of a sequence: one of each row if there are more chunks than rows."""
    return cut_evenly(split.seqlen, min(chunks, max(split.seqlen, 1)))


def _split_heads(count: int, lengths: Sequence[int]) -> tuple[Span, ...]:
    """`count` heads split about in the ratio of `lengths`, none of them empty: there are enough heads."""
    ends = [0]
    for i, length in enumerate(lengths):
        heads_left, steps_left = count - ends[-1], len(lengths) - 1 - i
        ends.append(ends[-1] + max(1, min(round(heads_left * length / sum(lengths[i:])), heads_left - steps_left)))
    return tuple(itertools.pairwise(ends))


def _from_step(span: Span, step: int, zero: int | None) -> Span:
    """A span that is extended to the front, so that it begins at a multiple of a step, counted from `zero`."""
    if zero is None:
        return span
    return (span[0] - (span[0] - zero) % step, span[1]) if is_some(span) else (zero, zero)


def _most_pairs(tile: Tile) -> int:
    (first_q, stop_q), (first_k, stop_k) = tile.queries, tile.keys
    return (stop_q - first_q) * (stop_k - first_k)


def _pairs_text(by: By, tile: Tile) -> str:
    needed = " and ".join(map(_rows_text, tile.needed))
    return (
        f"{_rows_text(tile.own_queries)} x {needed}" if by == "queries" else f"{needed} x {_rows_text(tile.own_keys)}"
    )


def _rows_text(span: Span) -> str:
    return f"{span[0]}..{span[1] - 1}"


def _band_text(band: Band) -> str:
    if band.left is None and band.right is None:
        return "every key visible"
    first = "" if band.left is None else f" from {_position_text(band.diagonal - band.left)}"
    last = (
        " on" if band.right is None else f" {'to' if first else 'up to'} {_position_text(band.diagonal + band.right)}"
    )
    return f"query i attends to keys{first}{last}"


def _position_text(offset: int) -> str:
    return "i" if offset == 0 else f"i {'+' if offset > 0 else '-'} {abs(offset)}"
