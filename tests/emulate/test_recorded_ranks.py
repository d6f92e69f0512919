"""Calls of ranks that repeat what was recorded of a warm-up run, on a stand-in for a device, against the oracle."""

import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.arrays.array_info import FLOAT8
from cuflash.arrays.fp8 import Float8Array
from cuflash.distributed.streams import CudaStreams
from cuflash.gpu import replay
from cuflash.gpu.replay import Recording
from cuflash.testing.float8 import assert_float8
from cuflash.testing.tangents import everything
from tests.emulate import device
from tests.emulate.device import OnDevice, extend
from tests.emulate.launcher import launcher
from tests.interrupts import Interrupt, of_package
from tests.ranks import Ranks, Shards, Whole, compute, judge, on_ranks, on_threads
from tests.sampling import examples

pytestmark = pytest.mark.one_in(8)
SIZES: dict[str, Any] = {"seqlen_q": 128, "seqlen_k": 128, "num_heads": 2, "num_heads_kv": 1, "head_dim": 64}
ODD: dict[str, Any] = {**SIZES, "seqlen_q": 101, "seqlen_k": 101}
CASES = {
    "9.0": ct.Case(**SIZES, causal=True, dtype="bfloat16"),
    "9.0 odd": ct.Case(**ODD, causal=True, dtype="float16", sinks=True, dlse=True),
    "9.0 dropout": ct.Case(**SIZES, dtype="float16", dropout=0.3, layout="bshd"),
    "8.0 window": ct.Case(**ODD, causal=True, dtype="bfloat16", window=(20, 0), alibi_slopes=(2,)),
    "8.0 float32": ct.Case(**SIZES, causal=True, dtype="float32"),
    "8.0 lengths": ct.Case(**SIZES, dtype="float16", kv_lengths=(100,)),
    "9.0 axes": ct.Case(
        **{**SIZES, "seqlen_q": 64, "seqlen_k": 64},
        dtype="bfloat16",
        axes=(2, 1),
        batch_axes=(("k", (1, 1)), ("v", (1, 1))),
    ),
    "9.0 packed": ct.Case(**ODD, causal=True, dtype="bfloat16", cu_seqlens_q=(0, 30, 101), cu_seqlens_k=(0, 40, 99)),
}
# Some of what these do is not recorded: nothing is repeated then.
UNRECORDED = {
    "8.0 bias": ct.Case(**ODD, dtype="float16", bias=(101, 101)),
}
FEW: dict[str, Any] = {"seqlen_q": 2, "seqlen_k": 256, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
DECODING: dict[str, tuple[ct.Case, dict[str, Any]]] = {
    "9.0": (ct.Case(**FEW, causal=True, dtype="bfloat16"), {}),
    "9.0 lengths": (ct.Case(**FEW, dtype="float16", kv_lengths=(100,), layout="bshd"), {}),
    "9.0 chunks": (ct.Case(**FEW, dtype="bfloat16", sinks=True), {"deterministic": True, "chunks": 32}),
    "8.0 mask": (ct.Case(**{**FEW, "head_dim_v": 36}, dtype="float16", mask=(2, 256)), {}),
    "8.0 float32": (ct.Case(**FEW, dtype="float32", bias=(256,), dropout=0.2), {}),
}


@pytest.fixture
def repeated(monkeypatch):
    """The recordings that calls repeated; the stand-in launches one kernel at a time."""
    found, repeat = [], Recording.repeat

    def logged(replay, *args):
        found.append(replay)
        repeat(replay, *args)

    monkeypatch.setattr(Recording, "repeat", logged)
    return found


def on_device(x: Any) -> Any:
    if x.dtype.name in FLOAT8:
        return Float8Array(on_device(x.view(np.uint8)), x.dtype)
    array = OnDevice(x.shape, x.dtype)
    array[...] = x
    return array


def placed(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: on_device(x) for name, x in arrays.items()}


def placed_together(arrays: dict[str, Any]) -> dict[str, Any]:
    """Keys and values as columns of one array."""
    both, columns = on_device(np.concatenate([arrays["k"], arrays["v"]], axis=-1)), arrays["k"].shape[-1]
    return placed(arrays) | {"k": both[..., :columns], "v": both[..., columns:]}


def own_of(whole: Whole, split: cd.Split, rank: int) -> dict[str, Any]:
    """The arrays of a rank on the stand-in for a device."""
    return placed(Shards(whole, split, split).of(rank, whole.arrays))


def judge_calls(name, case, *, moved=None, place=placed, need=("dq", "dk", "dv"), **options):
    """Hold three calls of both passes, on other numbers and in other memory, against the oracle."""
    split, seeded = cd.zigzag(case.seqlen_q, 2, multiple=16 if case.dropout else 1), seeds_of(case)
    with launcher(name[:3], computes=True):
        extend(sys.modules["cupy"])
        ranks = Ranks(place, lambda x: x.get())
        found = ranks.each(seeded, split, split, moved=moved, need=need, steps=2, **options)
    for one, results in zip(seeded, found, strict=True):
        judge(one, results, moved)


def seeds_of(case):
    return [replace(case, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_repeated_calls_keep_the_oracle_rule(name, deterministic, repeated):
    judge_calls(name, CASES[name], deterministic=deterministic, chunks=4)
    assert len(repeated) == 12  # three calls of two passes on two ranks


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["9.0 odd", "8.0 window"])
def test_repeated_calls_with_tangents_keep_the_oracle_rule(name, deterministic, repeated):
    case, need = CASES[name], ("tdq", "tdk", "tdv")
    judge_calls(name, case, moved=everything(case), need=need, deterministic=deterministic, chunks=4)
    assert len(repeated) == 12  # three calls of two passes on two ranks


@pytest.mark.parametrize("name", ["9.0", "8.0 float32"])
def test_rows_of_large_scores_keep_the_oracle_rule(name, repeated):
    """The host takes part in their backward passes, which are not repeated."""
    dtype = "float32" if "float32" in name else "float16"
    judge_calls(name, ct.Case(**ODD, dtype=dtype, score_mean=-3e4))
    assert len(repeated) == 6


def test_keys_and_values_of_one_array_are_told_apart(repeated):
    judge_calls("9.0", CASES["9.0"], place=placed_together)
    assert len(repeated) == 12


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_recorded_holds_no_memory(deterministic, repeated, monkeypatch):
    case, allocate = CASES["9.0"], device._memory
    split, taken, attns = cd.zigzag(case.seqlen_q, 2), [], []

    def memory(nbytes):
        found = allocate(nbytes)
        taken.append((weakref.ref(found), nbytes))
        return found

    def work(comm):
        attn: Any = cd.ContextParallel(comm, split=split, steps=2, **case.keywords, deterministic=deterministic)
        attns.append(attn)
        arrays = own_of(Whole.of(case), split, comm.rank)
        for _ in range(2):
            compute(attn, case, arrays, ("dq", "dk", "dv"))

    monkeypatch.setattr(device, "_memory", memory)
    with launcher("9.0", computes=False):
        extend(sys.modules["cupy"])
        on_threads(2, work)
    gc.collect()
    zeros = case.head_dim * 2  # a row of them on each rank, which backward passes read
    assert sum(nbytes for is_alive, nbytes in taken if is_alive() is not None) == 2 * zeros
    assert len(repeated) == 8  # two calls of two passes on two ranks


def test_calls_are_planned_anew_once_launches_are_forgotten(repeated, monkeypatch):
    """As those of one device are, where tuning has found other kernels."""
    case, split, need = CASES["9.0"], cd.zigzag(128, 2), ("dq", "dk", "dv")
    whole, planned = Whole.of(case), []
    with launcher("9.0", computes=True) as launches:
        extend(sys.modules["cupy"])
        plan = launches.launch_cache.tuned_plan

        def logged(*args, **how):
            planned.append(args)
            return plan(*args, **how)

        monkeypatch.setattr(launches.launch_cache, "tuned_plan", logged)
        comms = cd.threads(2)
        attns: list[Any] = [cd.ContextParallel(comm, split=split, steps=2, **case.keywords) for comm in comms]
        counts, shards = [0], Shards(whole, split, split)
        for forgets in (False, False, True, False):
            if forgets:
                launches.launch_cache.forget_launches()
            found = on_ranks(comms, lambda rank: compute(attns[rank], case, own_of(whole, split, rank), need))
            judge(case, shards.whole([{name: x.get() for name, x in own.items()} for own in found]))
            counts.append(len(planned))
    first, second, third, fourth = np.diff(counts)
    assert min(first, third) > 0
    assert not (second or fourth)
    assert len(repeated) == 16  # four calls of two passes on two ranks


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_is_not_recorded_is_not_repeated(name, repeated):
    judge_calls(name, UNRECORDED[name])
    assert len(repeated) < 12


@pytest.mark.parametrize("name", DECODING)
def test_decoding_that_is_repeated_keeps_the_oracle_rule(name, repeated):
    case, options = DECODING[name]
    split, seeded = cd.zigzag(case.seqlen_k, 2, multiple=16 if case.dropout else 1), seeds_of(case)
    with launcher(name[:3], computes=True):
        extend(sys.modules["cupy"])
        found = Ranks(placed, lambda x: x.get()).decoded(seeded, split, **options)
    for one, results in zip(seeded, found, strict=True):
        judge(one, results)
    assert len(repeated) == 6  # three calls on two ranks


@pytest.mark.parametrize("q_float8", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("arch", ["8.0", "9.0"])
def test_float8_travels_as_bytes(arch, layout, q_float8, repeated):
    """Partial outputs are rounded to its dtype before they are merged, because kernels of float8 give no other."""
    sizes: dict[str, Any] = {**SIZES, "layout": layout, "dtype": "bfloat16", "causal": True}
    case = ct.Case(**sizes, kv_dtype="float8_e4m3fn", k_scale="head", v_scale="tensor", q_float8=q_float8)
    split, own = cd.zigzag(128, 2), Ranks(placed, lambda x: x.get())
    with launcher(arch, computes=True):
        extend(sys.modules["cupy"])
        found = own.each([case] * 2, split, split, need=(), steps=2) + own.decoded([case], split)
    judge_float8 = assert_float8 if q_float8 and arch == "9.0" else ct.assert_forward  # of fp8 products
    for results in found:
        judge_float8(case, results["out"], results["lse"])
    assert len(repeated) == 6  # three calls on two ranks


def test_all_gradients_that_are_sums_are_computed_anew(repeated):
    case = replace(CASES["9.0"], sinks=True, softcap=5.0)
    judge_calls("9.0", case, need=None)
    assert len(repeated) == 6  # of the forward pass


def test_memory_of_a_call_that_fails_comes_back_by_the_next_one():
    """What an error holds of a call is free once it is gone, and its pool is, too."""
    with launcher("9.0", computes=False):
        cupy = sys.modules["cupy"]
        extend(cupy)
        taken: list[Any] = []

        def allocate(nbytes):
            found = device._memory(nbytes)
            taken.append(weakref.ref(found))
            return found

        def fail():
            array = OnDevice((1000,), np.float32)
            raise MemoryError(f"after {array.shape}")

        with cupy.cuda.using_allocator(allocate):
            with pytest.raises(MemoryError) as error, Recording(cupy, (), ()):
                fail()
            assert [is_alive() is None for is_alive in taken] == [False]
            del error
            gc.collect()
            with Recording(cupy, (), ()):
                pass
        assert [is_alive() is None for is_alive in taken] == [True]
        assert not replay._pools


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_calls_come_after_what_puts_the_columns_of_their_keys_together(name, monkeypatch):
    """Each call of a rank comes after all columns that the rank has put together so far, on whichever stream."""
    pasts: dict[Any, set[int]] = defaultdict(set)  # by stream, the copies that its later work comes after
    of_rank: dict[int, set[int]] = defaultdict(set)  # by thread, the copies of columns so far
    calls, of_call = [], CudaStreams.of_call

    def record(event, stream=None):
        event.is_recorded, event.past = True, frozenset(pasts[stream or device.get_current_stream()])

    def wait_event(stream, event):
        pasts[stream] |= event.past

    def checked(streams, number):
        stream, copies = of_call(streams, number), of_rank[threading.get_ident()]
        calls.append((len(copies), copies <= pasts[stream]))
        return stream

    optional: dict[str, Any] = {name: (101, 101)}
    case = ct.Case(**ODD, dtype="float16", **optional)
    split = cd.zigzag(101, 2)

    def work(comm):
        attn: Any = cd.ContextParallel(comm, split=split, steps=2, **case.keywords)
        compute(attn, case, own_of(Whole.of(case), split, comm.rank), ("dq", "dk", "dv"))

    monkeypatch.setattr(device.Event, "record", record)
    monkeypatch.setattr(device.Stream, "wait_event", wait_event)
    monkeypatch.setattr(CudaStreams, "of_call", checked)
    with launcher("8.0", computes=False):
        cupy: Any = sys.modules["cupy"]
        extend(cupy)
        concatenate = cupy.concatenate

        def copied(*args, **keywords):
            copy = sum(map(len, of_rank.values()))
            of_rank[threading.get_ident()].add(copy)
            pasts[device.get_current_stream()].add(copy)
            return concatenate(*args, **keywords)

        cupy.concatenate = copied
        on_threads(2, work)
    assert any(copies for copies, _ in calls)
    assert all(is_after for _, is_after in calls)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from([("gpu/replay.py",), ("distributed/", "gpu/replay.py", "shards/slices.py", "gpu/elementwise.py")]),
    st.sampled_from(["9.0", "8.0 bias"]),
    st.booleans(),
    st.booleans(),
)
def test_an_interrupt_at_any_line_leaves_streams_and_pools_as_they_were(line, names, name, is_first, is_backward):
    """Later work of the caller's stream, which gets the memory of the call, comes after all that the call launched."""
    case = (CASES | UNRECORDED)[name]
    split = cd.zigzag(case.seqlen_q, 2)
    pasts: dict[Any, set[object]] = defaultdict(set)  # by stream, the work that its later work comes after
    counted, interrupt = Interrupt(of_package(*names)), Interrupt(of_package(*names))

    def record(event, stream=None):
        event.is_recorded, event.past = True, frozenset(pasts[stream or device.get_current_stream()])

    def launched(run):
        def launch(*args, **how):
            pasts[device.get_current_stream()].add(object())
            return run(*args, **how)

        return launch

    def work(comm, interrupt):
        main, device._of_thread.allocator = device.Stream(), None
        main.use()
        arrays = own_of(Whole.of(case), split, comm.rank)
        attn: Any = cd.ContextParallel(comm, split=split, steps=2, timeout=5, **case.keywords)
        inputs, optional = ct.qkv(arrays), ct.optional(arrays)
        out, lse = attn.forward(*inputs, **optional)

        def call():
            return (
                attn.backward(arrays["dout"], *inputs, out, lse, **optional)
                if is_backward
                else attn.forward(*inputs, **optional)
            )

        held: Any = None
        try:
            if not is_first:
                call()
            with contextlib.ExitStack() as stack:
                if comm.rank == 1:
                    stack.enter_context(interrupt())
                call()
        except (KeyboardInterrupt, RuntimeError, TimeoutError) as error:
            held = error  # with its traceback, and all that this refers to
        assert held or comm.rank == 0 or not interrupt.where
        assert device._of_thread.allocator is None
        assert replay.of_thread.recording is None
        assert device.get_current_stream() is main
        own = [stream for stream in pasts if stream in attn._calls.streams._of_device.get(0, main)._others]
        assert all(pasts[stream] <= pasts[main] for stream in own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.Event, "record", record)
        patch.setattr(device.Stream, "wait_event", lambda stream, event: pasts[stream].update(event.past))
        for one in (counted, interrupt):
            with launcher(name[:3], computes=False):
                cupy: Any = sys.modules["cupy"]
                extend(cupy)
                cupy.cuda.driver.launchKernel = launched(cupy.cuda.driver.launchKernel)
                on_threads(2, functools.partial(work, interrupt=one))
            interrupt.line = 1 + line % max(counted.lines, 1)
