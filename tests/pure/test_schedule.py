"""The schedule of context parallel calls: every visible pair once, no transfer that nobody needs, even work."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash.distributed as cd
from cuflash.arrays.memory_ranges import Band, cut, cut_evenly, is_some, joined, slice_in
from cuflash.distributed.schedule import FEW, LARGEST_STEP, STEP_BYTES, make_schedule
from tests.sampling import examples

ANY: Any = cd  # for calls that a type checker refuses


@st.composite
def splits(draw, seqlen, ranks, multiple=1):
    """Any split: the sequence is cut anywhere, or at multiples of a number, and each piece goes to any rank."""
    cuts = sorted(multiple * x for x in draw(st.lists(st.integers(0, seqlen // multiple), max_size=2 * ranks + 2)))
    spans = zip([0, *cuts], [*cuts, seqlen], strict=True)
    owned: list[list] = [[] for _ in range(ranks)]
    for span in spans:
        owned[draw(st.integers(0, ranks - 1))].append(span)
    return cd.Split(owned)


@st.composite
def schedules(draw):
    ranks = draw(st.integers(1, 8))
    seqlen_q, seqlen_k = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    sides = st.none() | st.integers(0, 30)
    band = Band(draw(st.integers(-20, 20)), draw(sides), draw(sides))
    chunks = draw(st.none() | st.integers(1, 12))
    step = (draw(st.sampled_from((1, 4))), draw(st.sampled_from((1, 4, 6))))
    if chunks is None:
        split_q, split_k = draw(splits(seqlen_q, ranks)), draw(splits(seqlen_k, ranks))
    else:
        chunks *= ranks
        split_q, split_k = (draw(of_chunks(n, ranks, chunks)) for n in (seqlen_q, seqlen_k))
    heads, steps = draw(st.integers(0, 5)), draw(st.integers(1, 6))
    options = {"num_heads_kv": heads, "steps": steps, "step": step, "joins": step == (1, 1) and draw(st.booleans())}
    return make_schedule(
        split_q, split_k, band, chunks=chunks, **options, why_one_round=draw(st.none() | st.just("asked"))
    )


@st.composite
def splits_of_spans(draw, held):
    """Some spans, in order, each within one of those that are held, or not quite."""
    found = []
    for start, stop in held:
        ends = sorted(draw(st.lists(st.integers(start, stop + 1), min_size=2, max_size=2)))
        if ends[0] < ends[1] and draw(st.booleans()):
            found.append(tuple(ends))
    return joined(found)


@st.composite
def of_chunks(draw, seqlen, ranks, chunks):
    owned: list[list] = [[] for _ in range(ranks)]
    for chunk in cut_evenly(seqlen, chunks):
        owned[draw(st.integers(0, ranks - 1))].append(chunk)
    return cd.Split(owned)


def visible_pairs(schedule):
    """By the definition: query i attends to keys from i + d - left to i + d + right."""
    i, j = np.arange(schedule.split_q.seqlen)[:, None], np.arange(schedule.split_k.seqlen)
    diagonal, left, right = schedule.band
    visible = np.ones((len(i), len(j)), bool)
    if left is not None:
        visible &= j >= i + diagonal - left
    if right is not None:
        visible &= j <= i + diagonal + right
    return visible


def rows_of(traversal, tile):
    """The queries and the keys of a call, one by one, and the numbers that the call takes for theirs."""
    own = tile.own_queries if traversal.by == "queries" else tile.own_keys
    needed = np.concatenate([np.arange(*span) for span in tile.needed])
    numbered = np.arange(*(tile.keys if traversal.by == "queries" else tile.queries))
    sides = (np.arange(*own), needed), (np.arange(*own), numbered)
    return sides if traversal.by == "queries" else tuple(side[::-1] for side in sides)


@settings(max_examples=examples(200), deadline=None)
@given(schedules())
def test_every_visible_pair_is_computed_once_by_who_holds_it(schedule):
    visible, (diagonal, left, right) = visible_pairs(schedule), schedule.band
    for traversal in (schedule.by_queries, schedule.by_keys):
        computed = np.zeros(visible.shape, int)
        for tile in (tile for rank in range(schedule.split_q.ranks) for tile in traversal.calls_of(rank)):
            (queries, keys), (i, j) = rows_of(traversal, tile)
            pairs = np.ix_(queries, keys)
            assert visible[pairs].any() or traversal.partials[tile.rank][tile.piece] == 1, (
                f"{tile}: all pairs are hidden"
            )
            assert schedule.pairs_of(traversal.by, tile) == visible[pairs].sum()
            computed[pairs] += 1
            distance = j - i[:, None] - diagonal
            seen = np.ones(distance.shape, bool) if left is None else distance >= -left
            np.testing.assert_array_equal(seen if right is None else seen & (distance <= right), visible[pairs])
            own = schedule.split_q if traversal.by == "queries" else schedule.split_k
            assert traversal.pieces[tile.rank][tile.piece] == (
                tile.own_queries if traversal.by == "queries" else tile.own_keys
            )
            own.local(tile.rank, traversal.pieces[tile.rank][tile.piece])  # raises where the rank does not hold them
            for (start, _), step, front in zip((tile.queries, tile.keys), schedule.step, tile.front, strict=True):
                assert start % step == 0 or len(tile.needed) > 1 or schedule.joins
                assert 0 <= front < step
        assert (computed[visible] == 1).all()
        assert (computed <= 1).all()
        pieces = sorted(piece for own in traversal.pieces for piece in own)
        length = schedule.split_q.seqlen if traversal.by == "queries" else schedule.split_k.seqlen
        assert joined(pieces) == (((0, length),) if length else ())
        assert sum(stop - start for start, stop in pieces) == length


@settings(max_examples=examples(200), deadline=None)
@given(schedules())
def test_what_a_rank_needs_and_does_not_hold_comes_once(schedule):
    for traversal in (schedule.by_queries, schedule.by_keys):
        for a_round in traversal.rounds:
            for rank in range(a_round.split.ranks):
                here = np.zeros(a_round.split.seqlen, int)
                for span in a_round.split.spans[rank]:
                    here[slice(*span)] += 1
                needed = np.zeros(a_round.split.seqlen, bool)
                for span in a_round.needed_by(rank):
                    needed[slice(*span)] = True
                for transfer in a_round.transfers:
                    if transfer.target == rank:
                        assert needed[slice(*transfer.rows)].all()
                        assert transfer.source != rank
                        a_round.split.local(transfer.source, transfer.rows)  # raises where it does not hold them
                        here[slice(*transfer.rows)] += 1
                assert (here <= 1).all()
                assert (here[needed] == 1).all()
                if a_round.comes_whole(rank):
                    assert len({transfer.source for transfer in a_round.transfers if transfer.target == rank}) == 1


@settings(max_examples=examples(200), deadline=None)
@given(schedules())
def test_own_rows_come_first_and_received_ones_after_them(schedule):
    """Where there are two rounds; the partial results of a piece are numbered in their order."""
    for traversal in (schedule.by_queries, schedule.by_keys):
        assert len(traversal.rounds) in ((1, 2) if schedule.why_one_round is None else (1,))
        if len(traversal.rounds) == 2:
            own, received = traversal.rounds
            assert not own.transfers
            assert len(own.heads) <= 1
            for rank, spans in enumerate(own.split.spans):
                assert all(
                    cut(span, spans) == [span] for tile in own.calls_of(rank) for span in tile.needed if is_some(span)
                )
                assert not any(cut(span, spans) for tile in received.calls_of(rank) for span in tile.needed)
        for rank, counts in enumerate(traversal.partials):
            assert len(counts) == len(traversal.pieces[rank])
            found = [(tile.piece, tile.partial) for tile in traversal.calls_of(rank)]
            assert sorted(found) == [(piece, part) for piece, count in enumerate(counts) for part in range(count)]
            assert min(counts, default=1) > 0
            for a_round in traversal.rounds:
                parts = [(tile.piece, tile.partial) for tile in a_round.calls_of(rank)]
                assert parts == sorted(parts)


@given(schedules())
def test_steps_have_all_heads(schedule):
    for traversal in (schedule.by_queries, schedule.by_keys):
        for a_round in traversal.rounds:
            assert [head for step in a_round.heads for head in range(*step)] == list(range(schedule.num_heads_kv))
            assert all(start < stop for start, stop in a_round.heads)
            if a_round.transfers:
                assert len(a_round.heads) == min(schedule.steps, schedule.num_heads_kv)


@given(st.integers(1, 40), st.integers(0, 2**27), st.integers(1, 40), st.sampled_from((None, "asked")))
def test_rows_travel_in_more_steps_where_they_are_many(rows, row_bytes, heads, why_one_round):
    """By the rows of all ranks, so that the number of these does not matter."""
    for ranks in (2, 4):
        split = cd.contiguous(rows, ranks)
        options = {"num_heads_kv": heads, "steps": None, "row_bytes": (row_bytes, 2 * row_bytes)}
        schedule = make_schedule(split, split, Band(0, None, None), **options, why_one_round=why_one_round)
        least = 1 if why_one_round is None else min(2, heads)
        for traversal, of_row in ((schedule.by_queries, row_bytes), (schedule.by_keys, 2 * row_bytes)):
            of_steps = [stop - start for start, stop in traversal.rounds[-1].heads]
            count, total = len(of_steps), rows * heads * of_row
            assert least <= count
            assert count <= least or total > (count - 1) * STEP_BYTES
            if traversal.by == "keys" and total > FEW:  # a head is not divided
                assert (max(of_steps) - 1) * rows * of_row <= LARGEST_STEP
            else:
                assert count <= (3 if total > FEW else 2)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=8), st.integers(0, 30), st.integers(1, 6), st.data())
def test_spans_are_joined_only_where_the_same_pairs_stay_visible(lengths, first, count, data):
    """Whatever the bounds: numbers of keys, one after the other, for which each query attends to the same."""
    ends = np.cumsum([x + 1 for x in lengths]).tolist()
    spans = list(zip(ends[:-1:2], ends[1::2], strict=False)) or [(ends[0], ends[1])]
    sides = st.none() | st.integers(0, 30)
    band = Band(data.draw(st.integers(-20, 20)), data.draw(sides), data.draw(sides))
    queries = (first, first + count)
    joint = band.joint(queries, spans)
    if joint is not None:
        assert joint[1] - joint[0] == sum(stop - start for start, stop in spans)
        slice_in = [j for span in spans for j in range(*span)]
        for i in range(*queries):
            for number, j in zip(range(*joint), slice_in, strict=True):
                seen = [
                    (band.left is None or x >= i + band.diagonal - band.left)
                    and (band.right is None or x <= i + band.diagonal + band.right)
                    for x in (number, j)
                ]
                assert seen[0] == seen[1]


def test_own_rows_of_a_zigzag_split_are_a_call_for_each_piece():
    """Under a causal mask: of spans that all queries attend to, and of the one that the diagonal goes through."""
    split = cd.zigzag(64, 4)
    schedule = make_schedule(split, split, Band(0, None, 0), joins=True)
    for traversal in (schedule.by_queries, schedule.by_keys):
        own, received = traversal.rounds
        assert [len(own.calls_of(rank)) for rank in range(4)] == [2, 2, 2, 1]
        assert max(len(received.calls_of(rank)) for rank in range(4)) == 2
        assert (
            traversal.partials == ((1, 2), (2, 2), (2, 2), (2,))
            if traversal.by == "queries"
            else ((2, 1), (2, 2), (2, 2), (2,))
        )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=6), st.data())
def test_rows_are_found_where_they_are_held(pairs, data):
    """`slice_in` says where rows lie among those of spans, one after the other."""
    held, reached = [], 0
    for length, gap in pairs:
        held.append((reached + gap, reached + gap + length))
        reached += gap + length
    rows = [j for span in held for j in range(*span)]
    wanted = data.draw(splits_of_spans(held))
    assume(wanted)
    found = slice_in(wanted, held)
    expected = [j for span in wanted for j in range(*span)]
    if found is None:
        follows = any(rows[i : i + len(expected)] == expected for i in range(len(rows)))
        assert not follows or not all(any(a <= x and y <= b for a, b in held) for x, y in wanted)
    else:
        assert rows[found] == expected


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@given(st.integers(1, 6))
@settings(max_examples=examples(5))
def test_zigzag_is_even_under_a_causal_mask(ranks, rows):
    split = cd.zigzag(2 * ranks * rows, ranks)
    schedule = make_schedule(split, split, Band(0, None, 0))
    for traversal in (schedule.by_queries, schedule.by_keys):
        work = [
            sum(schedule.pairs_of(traversal.by, tile) for tile in traversal.calls_of(rank)) for rank in range(ranks)
        ]
        assert len(set(work)) == 1
        assert sum(work) == visible_pairs(schedule).sum()


def test_a_window_over_contiguous_rows_needs_neighbours_alone():
    split = cd.contiguous(64, 8)
    schedule = make_schedule(split, split, Band(0, 5, 0))
    assert [tuple(t) for t in schedule.by_queries.transfers] == [(r - 1, r, (8 * r - 5, 8 * r)) for r in range(1, 8)]
    assert [tuple(t) for t in schedule.by_keys.transfers] == [(r + 1, r, (8 * r + 8, 8 * r + 13)) for r in range(7)]


def test_pieces_do_not_depend_on_the_number_of_ranks():
    """So their calls are the same, and so are the bits of what they give."""
    expected = None
    for ranks in (1, 2, 4, 8):
        split = cd.zigzag(101, ranks)
        schedule = make_schedule(split, split, Band(0, None, 0), chunks=16)
        tiles = [
            sorted((tile.queries, tile.keys) for rank in range(ranks) for tile in traversal.calls_of(rank))
            for traversal in (schedule.by_queries, schedule.by_keys)
        ]
        expected = expected or tiles
        assert tiles == expected


def test_the_schedule_in_words():
    split = cd.zigzag(16, 2)
    options = {"num_heads_kv": 3, "steps": 2, "joins": True}
    schedule = make_schedule(split, split, Band(0, None, 0), **options)
    assert (
        schedule.describe()
        == """\
context parallel: 2 ranks, 16 queries, 16 keys, query i attends to keys up to i
  pieces    spans of the ranks
  by queries: out, lse, dq
    with own keys: key/value heads 0-2
      rank 0 computes queries x keys 0..3 x 0..3, 12..15 x 0..3 and 12..15
      rank 1 computes queries x keys 4..11 x 4..11
    with received keys: key/value heads 0-1, 2-2; a step's rows are exchanged during the step before
      rank 0 computes queries x keys 12..15 x 4..11
             receives keys 4..11 from 1
      rank 1 computes queries x keys 4..11 x 0..3
             receives keys 0..3 from 0
  by keys: dk, dv
    with own queries: key/value heads 0-2
      rank 0 computes queries x keys 0..3 and 12..15 x 0..3, 12..15 x 12..15
      rank 1 computes queries x keys 4..11 x 4..11
    with received queries: key/value heads 0-1, 2-2; a step's rows are exchanged during the step before
      rank 0 computes queries x keys 4..11 x 0..3
             receives queries 4..11 from 1
      rank 1 computes queries x keys 12..15 x 4..11
             receives queries 12..15 from 0"""
    )
    whole = make_schedule(split, split, Band(0, None, 0), **options, chunks=4)
    assert (
        whole.describe()
        == """\
context parallel: 2 ranks, 16 queries, 16 keys, query i attends to keys up to i
  pieces    spans cut at 4 chunks
  rounds    one, of calls that have all rows that a piece needs: deterministic=True
  by queries: out, lse, dq
    with all keys: key/value heads 0-0, 1-2; a step's rows are exchanged during the step before
      rank 0 computes queries x keys 0..3 x 0..3, 12..15 x 0..15
             receives keys 4..11 from 1
      rank 1 computes queries x keys 4..7 x 0..7, 8..11 x 0..11
             receives keys 0..3 from 0
  by keys: dk, dv
    with all queries: key/value heads 0-1, 2-2; a step's rows are exchanged during the step before
      rank 0 computes queries x keys 0..15 x 0..3, 12..15 x 12..15
             receives queries 4..11 from 1
      rank 1 computes queries x keys 4..15 x 4..7, 8..15 x 8..11
             receives queries 12..15 from 0"""
    )


@given(st.integers(0, 300), st.integers(1, 5), st.sampled_from((1, 7, 16)))
def test_pieces_begin_at_multiples_and_are_even(seqlen, ranks, multiple):
    for split in (cd.zigzag(seqlen, ranks, multiple=multiple), cd.contiguous(seqlen, ranks, multiple=multiple)):
        assert split.seqlen == seqlen
        assert all(start % multiple == 0 for own in split.spans for start, _ in own)
        rows = [split.rows(rank) for rank in range(ranks)]
        assert max(rows) - min(rows) <= 3 * multiple


@given(st.data(), st.integers(0, 30), st.integers(1, 5))
def test_shards_of_a_split_make_the_whole(data, seqlen, ranks):
    split = data.draw(splits(seqlen, ranks))
    array = np.arange(2 * seqlen * 3).reshape(2, seqlen, 3)
    parts = [split.part(array, rank) for rank in range(ranks)]
    assert [part.shape[1] for part in parts] == [split.rows(rank) for rank in range(ranks)]
    np.testing.assert_array_equal(split.whole(parts), array)
    assert sum(map(split.rows, range(ranks))) == split.seqlen == seqlen


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ANY.Split(((0, 3),)), TypeError, r"^spans\[0\]: got int 0, expected pairs"),
        (lambda: ANY.Split(3), TypeError, r"^spans: got int 3, expected for each rank a list"),
        (lambda: cd.Split([]), ValueError, r"^spans: got no rank, expected at least one$"),
        (lambda: cd.Split([[(0, 3)], [(4, 5)]]), ValueError, r"^spans: got rows from 4 on after rows up to 3, "),
        (lambda: cd.Split([[(0, 3)], [(2, 5)]]), ValueError, r"^spans: got rows from 2 on after rows up to 3, "),
        (lambda: cd.Split([[(4, 5), (0, 4)]]), ValueError, r"^spans\[0\]: got \(0, 4\) after \(4, 5\), "),
        (lambda: cd.Split([[(3, 0)]]), ValueError, r"^spans\[0\]: got \(3, 0\), expected 0 <= start <= stop$"),
        (lambda: cd.zigzag(-1, 2), ValueError, "^seqlen: got -1, "),
        (lambda: cd.contiguous(4, 0), ValueError, "^ranks: got 0, "),
        (lambda: ANY.zigzag(1.5, 2), TypeError, "^seqlen: got float 1.5, "),
        (lambda: cd.zigzag(4, 2).part(np.zeros((3, 1)), 0), ValueError, "^array: got 3 rows in axis -2, expected 4 "),
        (lambda: cd.zigzag(4, 2).whole([np.zeros((2, 1))]), ValueError, "^parts: got 1 array, expected 2, "),
        (lambda: cd.zigzag(4, 1).whole([np.zeros((2, 1))]), ValueError, r"^parts\[0\]: got 2 rows in axis -2, "),
        (
            lambda: make_schedule(cd.zigzag(4, 2), cd.zigzag(4, 1), Band(0, None, None)),
            ValueError,
            "^split_k: got 1 rank, expected 2 as split has$",
        ),
        (
            lambda: make_schedule(cd.zigzag(9, 2), cd.zigzag(9, 2), Band(0, None, None), chunks=3),
            ValueError,
            r"^split: got a span \(0, 2\), expected spans of whole chunks, 3 in 9 rows, with deterministic=True or "
            r"batch_invariant=True$",
        ),
        (lambda: cd.zigzag(4, 2, multiple=0), ValueError, "^multiple: got 0, expected an integer >= 1$"),
    ],
)  # fmt: skip
def test_bad_splits(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("heads", "steps", "up", "up_and_down"),
    [(32, 3, [2, 6, 24], [5, 22, 5]), (8, 3, [1, 1, 6], [1, 6, 1]), (32, 1, [32], [32]), (2, 3, [1, 1], [1, 1])],
)
def test_steps_grow_and_the_last_one_is_small_where_something_follows_it(heads, steps, up, up_and_down):
    split = cd.contiguous(4, 2)

    def lengths(**options):
        schedule = make_schedule(split, split, Band(0, None, None), num_heads_kv=heads, steps=steps, **options)
        rounds = [traversal.rounds for traversal in (schedule.by_queries, schedule.by_keys)]
        return [
            [[stop - start for start, stop in a_round.heads] for a_round in of_traversal] for of_traversal in rounds
        ]

    assert lengths(chunks=2) == [[up], [up_and_down]]
    assert lengths() == [[[heads], up_and_down]] * 2


def test_a_wrong_axis_of_the_sequence_is_named():
    split, lse = cd.zigzag(111, 2), np.zeros((4, 111))
    parts = [split.part(lse, rank, axis=-1) for rank in range(2)]
    np.testing.assert_array_equal(split.whole(parts, axis=-1), lse)
    remedy = ": axis is that of the sequence, -1 in lse, -3 in layout 'bshd'"
    with pytest.raises(ValueError, match=rf"^parts\[0\]: got 4 rows in axis -2, expected 55 as rank 0 has{remedy}$"):
        split.whole(parts)
    with pytest.raises(ValueError, match=rf"^array: got 4 rows in axis -2, expected 111 as the split has{remedy}$"):
        split.part(lse, 0)
