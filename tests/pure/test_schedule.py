"""The schedule of context parallel calls: every visible pair once, no transfer that nobody needs, even work."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.distributed as cd
from cuflash.distributed.schedule import make_schedule
from cuflash.spans import Band, cut_evenly, joined

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
    return make_schedule(split_q, split_k, band, chunks=chunks, num_heads_kv=heads, steps=steps, step=step)


@st.composite
def of_chunks(draw, seqlen, ranks, chunks):
    owned: list[list] = [[] for _ in range(ranks)]
    for chunk in cut_evenly(seqlen, chunks):
        owned[draw(st.integers(0, ranks - 1))].append(chunk)
    return cd.Split(owned)


def visible_pairs(schedule):
    """By the definition: query i sees keys from i + d - left to i + d + right."""
    i, j = np.arange(schedule.split_q.seqlen)[:, None], np.arange(schedule.split_k.seqlen)
    diagonal, left, right = schedule.band
    visible = np.ones((len(i), len(j)), bool)
    if left is not None:
        visible &= j >= i + diagonal - left
    if right is not None:
        visible &= j <= i + diagonal + right
    return visible


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_every_visible_pair_is_computed_once_by_who_holds_it(schedule):
    visible = visible_pairs(schedule)
    for walk in (schedule.by_queries, schedule.by_keys):
        computed = np.zeros(visible.shape, int)
        for tile in walk.tiles:
            pairs = (slice(*tile.own_queries), slice(*tile.own_keys))
            assert visible[pairs].any(), f"{tile}: all pairs are hidden"
            assert schedule.pairs_of(tile) == visible[pairs].sum()
            computed[pairs] += 1
            own = schedule.split_q if walk.by == "queries" else schedule.split_k
            own.local(tile.rank, walk.own(tile))  # raises where the rank does not hold them
            for (start, _), step, front in zip((tile.queries, tile.keys), schedule.step, tile.front, strict=True):
                assert start % step == 0
                assert 0 <= front < step
        assert (computed[visible] == 1).all()
        assert (computed <= 1).all()
        pieces = sorted(piece for own in walk.pieces for piece in own)
        length = schedule.split_q.seqlen if walk.by == "queries" else schedule.split_k.seqlen
        assert joined(pieces) == (((0, length),) if length else ())
        assert sum(stop - start for start, stop in pieces) == length


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_what_a_rank_needs_and_does_not_hold_comes_once(schedule):
    for walk in (schedule.by_queries, schedule.by_keys):
        for rank in range(walk.split.ranks):
            here = np.zeros(walk.split.seqlen, int)
            for span in walk.split.spans[rank]:
                here[slice(*span)] += 1
            needed = np.zeros(walk.split.seqlen, bool)
            for span in walk.held(rank):
                needed[slice(*span)] = True
            for transfer in walk.transfers:
                if transfer.target == rank:
                    assert needed[slice(*transfer.rows)].all()
                    assert transfer.source != rank
                    walk.split.local(transfer.source, transfer.rows)  # raises where the source does not hold them
                    here[slice(*transfer.rows)] += 1
            assert (here <= 1).all()
            assert (here[needed] == 1).all()


@given(schedules())
def test_steps_have_all_heads(schedule):
    for walk in (schedule.by_queries, schedule.by_keys):
        assert [head for step in walk.heads for head in range(*step)] == list(range(schedule.num_heads_kv))
        assert len(walk.heads) == min(schedule.steps, schedule.num_heads_kv)
        assert all(start < stop for start, stop in walk.heads)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@given(st.integers(1, 6))
@settings(max_examples=5)
def test_zigzag_is_even_under_a_causal_mask(ranks, rows):
    split = cd.zigzag(2 * ranks * rows, ranks)
    schedule = make_schedule(split, split, Band(0, None, 0))
    for walk in (schedule.by_queries, schedule.by_keys):
        work = [sum(schedule.pairs_of(tile) for tile in walk.tiles if tile.rank == rank) for rank in range(ranks)]
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
            sorted((tile.queries, tile.keys) for tile in walk.tiles) for walk in (schedule.by_queries, schedule.by_keys)
        ]
        expected = expected or tiles
        assert tiles == expected


def test_the_schedule_in_words():
    split = cd.zigzag(16, 2)
    schedule = make_schedule(split, split, Band(0, None, 0), num_heads_kv=3, steps=2)
    assert (
        schedule.describe()
        == """\
context parallel: 2 ranks, 16 queries, 16 keys, query i sees keys from the first key to i + 0
  pieces    spans of the ranks
  by queries: out, lse, dq
    steps of key/value heads 0-0, 1-2; a step's rows travel during the step before
    rank 0 computes queries x keys 0..3 x 0..3, 12..15 x 0..15
           receives keys 4..11 from 1
    rank 1 computes queries x keys 4..11 x 0..11
           receives keys 0..3 from 0
  by keys: dk, dv
    steps of key/value heads 0-1, 2-2; a step's rows travel during the step before
    rank 0 computes queries x keys 0..15 x 0..3, 12..15 x 12..15
           receives queries 4..11 from 1
    rank 1 computes queries x keys 4..15 x 4..11
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
def test_parts_of_a_split_make_the_whole(data, seqlen, ranks):
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
        (lambda: cd.Split([[(0, 3)], [(4, 5)]]), ValueError, r"^spans: got rows from 4 on behind rows up to 3, "),
        (lambda: cd.Split([[(0, 3)], [(2, 5)]]), ValueError, r"^spans: got rows from 2 on behind rows up to 3, "),
        (lambda: cd.Split([[(4, 5), (0, 4)]]), ValueError, r"^spans\[0\]: got \(0, 4\) behind \(4, 5\), "),
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
            r"^split: got a span \(0, 2\), expected spans of whole chunks, 3 in 9 rows, with deterministic=True$",
        ),
        (lambda: cd.zigzag(4, 2, multiple=0), ValueError, "^multiple: got 0, expected an integer >= 1$"),
    ],
)  # fmt: skip
def test_bad_splits(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("heads", "steps", "by_queries", "by_keys"),
    [(32, 3, [2, 6, 24], [5, 22, 5]), (8, 3, [1, 1, 6], [1, 6, 1]), (32, 1, [32], [32]), (2, 3, [1, 1], [1, 1])],
)
def test_steps_grow_and_the_last_one_of_returns_is_small(heads, steps, by_queries, by_keys):
    split = cd.contiguous(4, 1)
    schedule = make_schedule(split, split, Band(0, None, None), num_heads_kv=heads, steps=steps)
    found = [[stop - start for start, stop in walk.heads] for walk in (schedule.by_queries, schedule.by_keys)]
    assert found == [by_queries, by_keys]
