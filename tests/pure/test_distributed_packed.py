"""Packed sequences over ranks: pieces that ranks compute, plans, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.distributed.packed import Packing
from cuflash.spec.options import Options
from tests.ranks import on_threads

CASE = ct.Case(
    seqlen_q=40,
    seqlen_k=44,
    num_heads=2,
    head_dim=8,
    causal=True,
    cu_seqlens_q=(0, 3, 3, 23, 36),
    cu_seqlens_k=(0, 6, 10, 30, 41),
)


@given(
    st.lists(st.integers(0, 9), max_size=8),
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
    st.tuples(st.integers(0, 80), st.integers(0, 80)).map(sorted),
)
def test_a_piece_has_whole_sequences_or_a_part_of_one(lengths_q, lengths_k, span):
    """Pieces tile the span, and what they need is what their rows need one by one."""
    starts = [tuple(int(x) for x in np.cumsum([0, *x])) for x in (lengths_q, lengths_k[: len(lengths_q)])]
    for options in (Options(), Options(causal=True), Options(causal="top_left", window=(2, None))):
        packing = Packing.of(options, *starts)
        pieces = packing.cut(tuple(span), "queries")
        assert [i for piece in pieces for i in range(*piece)] == list(range(*span))
        assert len(pieces) <= 4
        for piece in pieces:
            first, stop = packing.sequences_of(piece, "queries")
            whole = starts[0][first] >= piece[0] and starts[0][stop] <= piece[1]
            assert whole or stop - first == 1 or packing.is_left_over(piece, "queries")
            needed = set(range(*packing.needed(piece, "queries")))
            for i in range(*piece):
                assert set(range(*packing.needed((i, i + 1), "queries"))) <= needed


def test_the_plan_counts_sequences():
    arrays = CASE.arrays()
    (comm,) = cd.threads(1)
    attn = cd.ContextParallel(comm, split="contiguous", causal=True)
    starts = {name: arrays[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    out, _ = attn.forward(*ct.qkv(arrays), **starts)
    assert out.shape == CASE.problem.out_shape


@pytest.mark.parametrize(
    ("options", "changes", "method", "error", "message"),
    [
        ({}, {}, "decode", NotImplementedError, "^cu_seqlens_q: got packed sequences in decode, which is not served "),
        ({}, {"cu_seqlens_k": None}, "forward", ValueError, "^cu_seqlens_k: got None"),
        (
            {},
            {"cu_seqlens_q": np.array([0, 3, 3, 23, 41], np.int32)},
            "forward",
            ValueError,
            "^cu_seqlens_q: got .*41",
        ),
        (
            {},
            {"cu_seqlens_k": np.array([0, 9, 8, 20, 41], np.int32)},
            "forward",
            ValueError,
            "^cu_seqlens_k: got ",
        ),
        ({}, {"kv_lengths": np.ones(4, np.int32)}, "forward", NotImplementedError, "^kv_lengths: got it together with"),
        (
            {},
            {"block_table": np.ones((1, 1), np.int32)},
            "forward",
            NotImplementedError,
            "^block_table: got ndarray, w",
        ),
    ],
)
def test_what_packed_sequences_do_not_go_with(options, changes, method, error, message):
    arrays = CASE.arrays()
    (comm,) = cd.threads(1)
    given: dict[str, Any] = {name: arrays[name] for name in ("cu_seqlens_q", "cu_seqlens_k")} | changes
    with pytest.raises(error, match=message):
        getattr(cd.ContextParallel(comm, split="contiguous", causal=True, **options), method)(*ct.qkv(arrays), **given)


def test_ranks_that_have_other_sequences_raise():
    arrays = CASE.arrays()
    split_q, split_k = cd.contiguous(40, 2), cd.contiguous(44, 2)

    def work(comm):
        starts = {name: arrays[name].copy() for name in ("cu_seqlens_q", "cu_seqlens_k")}
        starts["cu_seqlens_q"][1] += comm.rank
        k, v = (split_k.part(arrays[name], comm.rank) for name in "kv")
        try:
            cd.ContextParallel(comm, split="contiguous").forward(split_q.part(arrays["q"], comm.rank), k, v, **starts)
        except ValueError as error:
            return str(error)

    for message in on_threads(2, work):
        assert message.startswith("cu_seqlens_q: got int32 (5,) with checksum ")


def test_long_runs_of_sequences_are_one_call():
    """A rank with many short sequences makes a call for those that are whole, and one for each end."""
    starts = tuple(range(0, 1001, 10))
    packing = Packing.of(Options(causal=True), starts, starts)
    assert packing.cut((3, 997), "queries") == [(3, 10), (10, 990), (990, 997)]
    assert packing.needed((10, 990), "queries") == (10, 990)
    assert packing.needed((3, 10), "queries") == (0, 10)
    assert packing.needed((3, 10), "keys") == (3, 10)
    assert replace(CASE, causal=False).problem.is_packed
