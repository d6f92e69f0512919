"""Threads of the compiled core: how many, whose cores and rounding they have, interruptions, fork and spawn."""

import ctypes
import math
import multiprocessing
import os
import platform
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.cpu import core, jobs
from tests.compiled import assert_same_bits, judge, much_work, run, run_python

if core.why_not() is not None:
    pytest.skip(f"no compiled core: {core.why_not()}", allow_module_level=True)


@pytest.mark.parametrize(
    "case",
    [
        ct.Case(num_heads=3, seqlen_q=700, seqlen_k=900, head_dim=16, causal=True, sinks=True),
        ct.Case(num_heads=4, num_heads_kv=1, seqlen_q=1300, seqlen_k=1100, head_dim=8, window=(200, 70)),
        ct.Case(num_heads=1, seqlen_q=1300, seqlen_k=1300, head_dim=8, dtype="bfloat16", score_spread=30.0),
        ct.Case(batch=3, num_heads=2, seqlen_q=300, seqlen_k=400, head_dim=8, kv_lengths=(400, 0, 17), mask=(300, 1)),
        ct.Case(batch=2, num_heads=3, seqlen_q=300, seqlen_k=400, head_dim=8, bias=(3, 300, 400), alibi_slopes=(2, 3)),
        ct.Case(batch=2, num_heads=3, seqlen_q=300, seqlen_k=400, head_dim=8, bias=(1, 400), softcap=2.0),
        ct.Case(num_heads=2, seqlen_q=1, seqlen_k=9000, head_dim=24, dropout=0.5),
    ],
)
def test_bits_depend_on_nothing_but_the_problem(case, monkeypatch):
    much_work(monkeypatch)
    with cuflash.cpu_threads(1):
        expected = run(case)
    judge(case, expected)
    for threads in (2, 3, 8, 33):
        with cuflash.cpu_threads(threads):
            assert_same_bits(run(case), expected)


@settings(max_examples=20)
@given(
    st.sampled_from(("float16", "float32", "float64")),
    st.integers(1, 3),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from((16, 300)),
    st.booleans(),
)
@example("float32", 2, 300, 300, 300, False)
@example("float64", 2, 300, 300, 300, True)
def test_gradients_of_a_long_call_are_zeros_where_no_query_sees_a_key(dtype, heads, rows, keys, head_dim, is_packed):
    """There are no tiles of keys, but zeros have to be written."""
    q, k = (np.ones((1, heads, n, head_dim)[is_packed:], dtype) for n in (rows, keys))
    no_keys = {"cu_seqlens_q": np.array([0, rows], np.int32), "cu_seqlens_k": np.zeros(2, np.int32)}
    terms: Any = no_keys if is_packed else {"kv_lengths": np.zeros(1, np.int32)}
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, k, k, **terms)
    gradients: Any = {name: np.full_like(x, np.nan) for name, x in (("dq", q), ("dk", k), ("dv", k))}
    with pytest.MonkeyPatch.context() as patch:
        much_work(patch)
        patch.setattr(core, "PATIENCE_NS", -1)
        attn.backward(q, q, k, k, out, lse, **terms, **gradients)
    for name, x in gradients.items():
        assert not x.any(), name


def threads_of_large_call(monkeypatch):
    """How many threads a large call asks for."""
    asked = []

    def run_on_threads(functions, fixed, changing):
        asked.append(struct.unpack_from("@3q", changing)[2])
        return core.DONE

    monkeypatch.setattr(core, "_run_on_threads", run_on_threads)
    monkeypatch.setattr(core, "PATIENCE_NS", 0)
    q = np.zeros((8, 2048, 64), np.float32)
    cuflash.attention(q, q, q)
    return asked[-1]


def test_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(jobs, "_cores_of_quota", lambda second: math.inf)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of_large_call(monkeypatch) == 6
    for value, count in (("3", 3), ("4,2", 4), ("99", 6), ("0", 1), ("many", 6), ("", 6)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert threads_of_large_call(monkeypatch) == count
    with cuflash.cpu_threads(5):
        assert threads_of_large_call(monkeypatch) == 5
        with cuflash.cpu_threads(np.int64(11)):
            assert threads_of_large_call(monkeypatch) == 11
        assert threads_of_large_call(monkeypatch) == 5


@pytest.mark.parametrize("count, kind", [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError)])
def test_a_bad_number_of_threads(count, kind):
    with pytest.raises(kind, match="count: got"), cuflash.cpu_threads(count):
        pass


def test_threads_hold_for_one_thread_only():
    seen = []
    with cuflash.cpu_threads(17):
        other = threading.Thread(target=lambda: seen.append(jobs.count_cores()))
        other.start()
        other.join()
        assert jobs.count_cores() == 17
    assert seen != [17]


def test_small_problems_ask_for_no_thread(monkeypatch):
    monkeypatch.setattr(core, "count_cores", lambda: pytest.fail("a thread for nothing"))
    run(ct.Case(num_heads=2, seqlen_q=64, seqlen_k=64, head_dim=16))


def test_callers_threads_run_side_by_side(monkeypatch):
    """Each of them with threads of the core: idle ones, new ones, and some that wake when nothing is left to do."""
    cases = [
        ct.Case(num_heads=2, seqlen_q=300, seqlen_k=300, head_dim=32),
        ct.Case(num_heads=2, seqlen_q=1, seqlen_k=2000, head_dim=32),
    ]
    every, failures = [(case, run(case)) for case in cases], []
    much_work(monkeypatch)

    def work():
        try:
            for _ in range(30):
                for case, expected in every:
                    with cuflash.cpu_threads(4):
                        assert_same_bits(run(case), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def num_threads():
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux for the threads of the process")
@pytest.mark.parametrize("is_long", [False, True])
def test_threads_stay_for_the_next_call_and_end_without_one(is_long):
    """A long call leaves the thread of the caller to signals, and takes one more."""
    code = f"""
import os, time, numpy as np, cuflash
from cuflash.cpu import core
core.SERIAL_NS, core.THREAD_NS, core.PATIENCE_NS = -1, 1e-3, {-1 if is_long else 10**12}
def num_threads():
    return len(os.listdir("/proc/self/task"))
q = np.ones((8, 300, 32), np.float32)
counts = [num_threads()]
with cuflash.cpu_threads(6):
    for _ in range(50):
        cuflash.attention(q, q, q)
        counts.append(num_threads())
until = time.perf_counter() + 10
while num_threads() > 1 and time.perf_counter() < until:
    time.sleep(0.05)
counts.append(num_threads())
with cuflash.cpu_threads(3):
    cuflash.attention(q, q, q)
print(counts[0], max(counts[1:-1]), counts[-1], num_threads())
"""
    printed = run_python(code, OPENBLAS_NUM_THREADS="1").split()
    assert printed == (["1", "7", "1", "4"] if is_long else ["1", "6", "1", "3"])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no choice of cores")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_use_the_cores_of_the_caller():
    code = """
import os, numpy as np, cuflash
q = np.ones((8, 2048, 64), np.float32)
with cuflash.cpu_threads(3):
    cuflash.attention(q, q, q)
    threads = os.listdir("/proc/self/task")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    cuflash.attention(q, q, q)
assert os.listdir("/proc/self/task") == threads
print([len(os.sched_getaffinity(int(thread))) for thread in threads])
"""
    assert run_python(code, OPENBLAS_NUM_THREADS="1").split() == ["[1,", "1,", "1,", "1]"]  # a long call


def test_threads_round_as_the_caller_does(monkeypatch):
    library = ctypes.CDLL(None)
    upwards, nearest = 0x800, 0  # of the C library on x86-64
    if platform.machine() != "x86_64" or not hasattr(library, "fesetround"):
        pytest.skip("numbers of another processor, or no such function")
    case, results = ct.Case(num_heads=9, seqlen_q=200, seqlen_k=300, head_dim=16), []
    arrays = case.arrays()
    much_work(monkeypatch)
    for direction, threads in ((upwards, 1), (upwards, 4), (nearest, 4), (nearest, 1)):
        library.fesetround(direction)
        try:
            with cuflash.cpu_threads(threads):
                results.append(run(case, **arrays))
        finally:
            library.fesetround(nearest)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[2], results[3])
    assert (results[0]["out"] != results[2]["out"]).any()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that send signals")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_ctrl_c_ends_a_long_call(which, threads):
    q = np.zeros((8, 16384, 64), np.float32)
    attn, lse = cuflash.FlashAttention(), np.zeros((8, 16384), np.float32)
    sent = []

    def interrupt(*args):
        sent.append(time.perf_counter())
        raise KeyboardInterrupt

    before = num_threads()
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt), cuflash.cpu_threads(threads):
            start = time.perf_counter()
            attn.forward(q, q, q) if which == "forward" else attn.backward(q, q, q, q, q, lse)
        ended = time.perf_counter()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert ended - start < 0.3 + 0.2 + 0.2  # the last for machines that do something else as well
    assert ended - sent[0] < 0.2
    until = time.perf_counter() + 10
    while num_threads() > before and time.perf_counter() < until:  # threads of others may end, too
        time.sleep(0.05)
    assert num_threads() <= before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_computes_too():
    code = """
import os, numpy as np, cuflash
q = np.random.default_rng(0).standard_normal((4, 1024, 64), dtype=np.float32)
expected = cuflash.attention(q, q, q)
child = os.fork()
if child == 0:
    with cuflash.cpu_threads(3):
        os._exit(0 if np.array_equal(cuflash.attention(q, q, q), expected) else 3)
assert os.waitpid(child, 0)[1] == 0
assert np.array_equal(cuflash.attention(q, q, q), expected)
"""
    run_python(code)


def test_a_spawned_process_computes_too():
    q = np.random.default_rng(0).standard_normal((4, 1024, 64), dtype=np.float32)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        results = pool.apply(cuflash.attention, (q, q, q))
    np.testing.assert_array_equal(results, cuflash.attention(q, q, q))
