"""Context parallel calls on threads: what they send when, their plans, and what ranks hear of each other.

Results are in tests/features/test_ranks_on_backends.py.
"""

import contextlib
import re
import threading
from pathlib import Path
from typing import Any

import array_api_strict
import numpy as np
import pytest

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.distributed.execution import Execution
from cuflash.distributed.streams import Streams
from cuflash.shards import slices as slices_of_problems
from tests.ranks import Shards, Whole, judge, on_threads, results_of

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "distributed.md"
CASE = ct.Case(seqlen_q=13, seqlen_k=17, num_heads=4, num_heads_kv=2, head_dim=8, causal=True)
SPLITS: dict[str, Any] = {"split_q": cd.zigzag(13, 2), "split_k": cd.zigzag(17, 2)}


@pytest.mark.parametrize("full_rows", [0, 2**40])
@pytest.mark.parametrize("cache_bytes", [0, 2**40])
def test_steps_of_more_queries_than_a_cache_holds_go_in_turn(monkeypatch, cache_bytes, full_rows):
    """Of the backward pass, as long as partial dq are sent; and so do their calls, if each of them fills a device."""
    in_turns: list[bool] = []
    numbers: dict[str, set[int]] = {"forward": set(), "backward": set()}
    now = threading.local()

    def arrived(self, *, in_turn=False):
        in_turns.append(in_turn)

    def of_call(self, number):
        numbers[now.method].add(number)
        return contextlib.nullcontext()

    def logged(method, call):
        def new(self, *args):
            now.method = method
            return call(self, *args)

        return new

    for method in numbers:
        monkeypatch.setattr(Execution, method, logged(method, getattr(Execution, method)))
    monkeypatch.setattr(Streams, "arrived", arrived)
    monkeypatch.setattr(Streams, "of_call", of_call)
    monkeypatch.setattr("cuflash.distributed.execution.CACHE_BYTES", cache_bytes)
    monkeypatch.setattr("cuflash.distributed.execution.FULL_ROWS", full_rows)
    judge(CASE, results_of(CASE, **SPLITS, need=("dq", "dk", "dv")))
    of_traversals = 2 * (1 + CASE.num_heads_kv)  # both ranks: own rows, and those that come
    assert sorted(in_turns) == [False] * of_traversals + [cache_bytes == 0] * of_traversals
    assert numbers == {"forward": {0, 1}, "backward": {0} if cache_bytes == full_rows == 0 else {0, 1}}


def test_arrays_of_other_libraries_come_back_as_such():
    arrays = CASE.arrays()
    shards = Shards(Whole.of(CASE), **SPLITS)

    def work(comm):
        own = {name: array_api_strict.asarray(x) for name, x in shards.of(comm.rank, arrays).items()}
        attn = cd.ContextParallel(comm, split="zigzag", causal=True)
        out, lse = attn.forward(*ct.qkv(own))
        dq, dk, dv = attn.backward(own["dout"], *ct.qkv(own), out, lse)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    results = on_threads(2, work)
    assert all(isinstance(x, array_api_strict._array_object.Array) for result in results for x in result.values())
    judge(CASE, shards.whole(results))


def test_results_that_are_not_asked_for_are_not_computed():
    def work(comm):
        own = Shards(Whole.of(CASE), **SPLITS).of(comm.rank, CASE.arrays())
        attn = cd.ContextParallel(comm, split="zigzag", causal=True)
        results = attn.forward(*ct.qkv(own))
        return attn.backward(own["dout"], *ct.qkv(own), *results, need=("dv",))

    for result in on_threads(2, work):
        assert result._fields == ("dv",)


def test_the_plan_is_that_of_the_call():
    def work(comm):
        own = Shards(Whole.of(CASE), **SPLITS).of(comm.rank, CASE.arrays())
        return cd.ContextParallel(comm, split="zigzag", causal=True, steps=2).plan(*ct.qkv(own))

    first, second = on_threads(2, work)
    assert first == second
    assert "rank 1 computes queries x keys 3..8 x 4..11\n" in first.describe()
    assert "rank 1 computes queries x keys 3..8 x 0..3, 3..8 x 12..12\n" in first.describe()
    assert first.band == (4, None, 0)
    for traversal in (first.by_queries, first.by_keys):
        assert [heads for _, heads in traversal.steps] == [(0, 2), (0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("split", "options", "why"),
    [
        (cd.zigzag(64, 2), {}, None),
        (cd.zigzag(64, 2), {"deterministic": True}, "deterministic=True"),
        (cd.zigzag(64, 2), {"dropout": 0.1}, None),
        (cd.zigzag(60, 2), {"dropout": 0.1}, "calls begin at multiples of 16 queries and 16 keys, and spans do not"),
    ],
)
def test_the_plan_says_why_calls_have_all_rows(split, options, why):
    x = np.zeros((2, split.seqlen // 2, 8))
    first, _ = on_threads(2, lambda comm: cd.ContextParallel(comm, split=split, causal=True, **options).plan(x, x, x))
    rounds = len(first.by_queries.rounds), len(first.by_keys.rounds)
    assert (first.why_one_round, rounds) == (why, (2, 2) if why is None else (1, 1))
    assert (f"  rounds    one, of calls that have all rows that a piece needs: {why}" in first.describe()) == bool(why)


def test_the_plan_in_the_page_is_what_is_printed():
    (text,) = re.findall(r"^```text\n(context parallel.*?)\n```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    split, x = cd.zigzag(1000, 2), np.zeros((8, 500, 32))
    first, _ = on_threads(2, lambda comm: cd.ContextParallel(comm, causal=True, split=split).plan(x, x, x).describe())
    assert first == text


@pytest.mark.parametrize("goes_on", [False, True])
def test_ranks_begin_with_their_own_rows_before_they_hear_of_each_other(goes_on, monkeypatch):
    """In a call like one before, where the transport goes on meanwhile; rows are exchanged after that.

    Where calls lag behind the host, rows are not even made ready before.
    """
    monkeypatch.setattr(Streams, "goes_on", goes_on)
    split, random = cd.zigzag(16, 2), np.random.default_rng(0)
    whole = random.standard_normal((3, 2, 16, 8))
    expected = cuflash.attention(*whole, causal=True)
    log: dict[int, list[str]] = {0: [], 1: []}
    forward = slices_of_problems.Slices.forward

    def work(comm):
        comm.gathers_meanwhile = True

        def logs(what, call):
            def logged(*args):
                log[comm.rank].append(what)
                return call(*args)

            return logged

        comm.all_gather, comm.start = logs("heard", comm.all_gather), logs("rows", comm.start)
        attn, shards = (
            cd.ContextParallel(comm, split=split, causal=True, steps=1),
            [split.part(x, comm.rank) for x in whole],
        )
        outs = []
        for _ in range(3):
            log[comm.rank].append("call")
            outs.append(attn.forward(*shards).out)
        return outs

    def logged(self, queries, *args, **keywords):
        rank = 1 if queries == (4, 12) else 0
        log[rank].append("computed")
        return forward(self, queries, *args, **keywords)

    monkeypatch.setattr(slices_of_problems.Slices, "forward", logged)
    for outs in zip(*on_threads(2, work), strict=True):
        np.testing.assert_allclose(split.whole(outs), expected, rtol=1e-12)
    for rank, own in ((0, ["computed"] * 2), (1, ["computed"])):
        first = [*own, "rows"] if goes_on else ["rows", *own]
        later = ["call", *own, "heard", "rows", "computed"]
        assert log[rank] == ["call", "heard", "heard", *first, "computed", *later, *later]


@pytest.mark.parametrize("method", ["forward", "backward", "decode"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda optional: optional.update(seed=2), "^seed: got 2 on rank 1, expected 1 as on rank 0$"),
        (lambda optional: optional.update(sinks=np.zeros(3)), r"sinks: got shape \(3,\), expected "),
    ],
)
def test_what_ranks_hear_while_they_compute_stops_all_of_them(method, change, message):
    """And nothing else: the next call is one as any other."""

    def work(comm):
        comm.gathers_meanwhile = True
        attn, x, lse = cd.ContextParallel(comm, split="contiguous"), np.ones((2, 5, 4)), np.ones((2, 5))
        arrays = (x,) * 5 + (lse,) if method == "backward" else (x,) * 3
        getattr(attn, method)(*arrays, seed=1, offset=0)
        optional = {"seed": 1, "offset": 0}
        if comm.rank == 1:
            change(optional)
        with pytest.raises((ValueError, RuntimeError), match=message):
            getattr(attn, method)(*arrays, **optional)
        return getattr(attn, method)(*arrays, seed=1, offset=0)[0]

    for result in on_threads(2, work):
        assert np.isfinite(result).all()


def test_a_call_in_which_another_rank_has_other_rows_is_begun_again():
    random = np.random.default_rng(0)
    arrays = {n: random.standard_normal((3, 2, n, 8)) for n in (10, 9)}

    def work(comm):
        comm.gathers_meanwhile = True
        attn = cd.ContextParallel(comm, split="zigzag", causal=True)
        return [attn.forward(*(cd.zigzag(n, 2).part(x, comm.rank) for x in arrays[n])).out for n in (10, 10, 9, 10)]

    assert cd.zigzag(10, 2).rows(0) == cd.zigzag(9, 2).rows(0)
    for n, outs in zip((10, 10, 9, 10), zip(*on_threads(2, work), strict=True), strict=True):
        expected = cuflash.attention(*arrays[n], causal=True)
        np.testing.assert_allclose(cd.zigzag(n, 2).whole(outs), expected, rtol=1e-12)


def test_one_rank_is_one_device():
    arrays = CASE.arrays()
    (comm,) = cd.threads(1)
    for attn in (cd.ContextParallel(comm, split="zigzag", causal=True), cuflash.FlashAttention(causal=True)):
        judge(CASE, dict(zip(("out", "lse"), attn.forward(*ct.qkv(arrays)), strict=True)))
