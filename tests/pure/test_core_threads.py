"""Threads of the compiled core: how many, whose cores and rounding they have, interruptions, fork and spawn."""

import ctypes
import gc
import math
import multiprocessing
import os
import platform
import signal
import struct
import subprocess
import sys
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
from cuflash import cpu
from cuflash.cpu import backend as cpu_backend
from cuflash.cpu import core, jobs
from tests import sampling
from tests.compiled import functions, much_work, run, run_python
from tests.judging import assert_oracle, assert_same_bits
from tests.sampling import examples

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
    assert_oracle(case, expected)
    for threads in (2, 3, 8, 33):
        with cuflash.cpu_threads(threads):
            assert_same_bits(run(case), expected)


@settings(max_examples=examples(20))
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
    optional: Any = no_keys if is_packed else {"kv_lengths": np.zeros(1, np.int32)}
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, k, k, **optional)
    gradients: Any = {name: np.full_like(x, np.nan) for name, x in (("dq", q), ("dk", k), ("dv", k))}
    with pytest.MonkeyPatch.context() as patch:
        much_work(patch)
        patch.setattr(core, "PATIENCE_NS", -1)
        attn.backward(q, q, k, k, out, lse, **optional, **gradients)
    for name, x in gradients.items():
        assert not x.any(), name


def test_bits_while_other_processes_keep_all_cores_busy(monkeypatch):
    """Threads lose their cores in the middle of a job, and others go on without them."""
    case = ct.Case(num_heads=1, seqlen_q=1300, seqlen_k=1300, head_dim=8, causal=True)
    much_work(monkeypatch)
    with cuflash.cpu_threads(1):
        expected = run(case)
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(jobs.available_cores())]
    try:
        until = time.perf_counter() + 1  # the processes take some time to start
        while time.perf_counter() < until:
            for threads in (2, 3, 8):
                with cuflash.cpu_threads(threads):
                    assert_same_bits(run(case), expected)
    finally:
        for process in busy:
            process.kill()
            process.wait()


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
        eleven: Any = np.int64(11)
        with cuflash.cpu_threads(eleven):
            assert threads_of_large_call(monkeypatch) == 11
        assert threads_of_large_call(monkeypatch) == 5


@pytest.mark.parametrize("count, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError)])
def test_a_bad_number_of_threads(count, error):
    with pytest.raises(error, match="count: got"), cuflash.cpu_threads(count):
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


class Interrupted(Exception):
    """What handlers of signals raise here."""


def raise_interrupted(*args):
    raise Interrupted


@pytest.fixture
def handler():
    """A handler of SIGUSR1 that raises."""
    before = signal.signal(signal.SIGUSR1, raise_interrupted)
    yield
    signal.signal(signal.SIGUSR1, before)


def calls_of(heads, seqlen):
    """Both passes, as functions of nothing, and the arrays that they write."""
    q, attn = np.ones((heads, seqlen, 64), np.float32), cuflash.FlashAttention()
    out, lse, dq = np.empty_like(q), np.empty(q.shape[:2], np.float32), np.empty_like(q)
    lse_of_operands = np.zeros_like(lse)
    return (
        (lambda: attn.forward(q, q, q, out=out, lse=lse), (out, lse)),
        (lambda: attn.backward(q, q, q, q, q, lse_of_operands, dq=dq, need=("dq",)), (dq,)),
    )


def assert_nothing_is_written(results, seconds):
    for x in results:
        x[...] = 7
    time.sleep(seconds)
    assert all((x == 7).all() for x in results), "threads compute after the exception"


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal")
@pytest.mark.parametrize("name", ["cuflash_start", "cuflash_wait", "cuflash_finish"])
@pytest.mark.parametrize("number", [0, 1], ids=["forward", "backward"])
def test_a_signal_between_any_two_steps_of_a_long_call(name, number, monkeypatch, handler):
    """A handler that raises as soon as the core has come back: threads have ended before the exception is seen."""
    function = getattr(functions(), name)

    def interrupted(*args):
        found = function(*args)
        signal.raise_signal(signal.SIGUSR1)
        return found

    monkeypatch.setattr(functions(), name, interrupted)
    monkeypatch.setattr(core, "PATIENCE_NS", -1)
    call, results = calls_of(8, 1024)[number]
    with pytest.raises(Interrupted):
        call()
    assert_nothing_is_written(results, 0.3)


def test_a_second_exception_before_the_end_of_a_long_call(monkeypatch):
    """Another handler may run before the `finally` of the first exception does."""
    finish, calls = functions().cuflash_finish, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            raise Interrupted
        finish(*args)

    def wait(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(functions(), "cuflash_wait", wait)
    monkeypatch.setattr(functions(), "cuflash_finish", interrupted)
    monkeypatch.setattr(core, "PATIENCE_NS", -1)
    call, results = calls_of(8, 1024)[0]
    with pytest.raises(Interrupted):
        call()
    assert_nothing_is_written(results, 0.3)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that send signals")
@pytest.mark.parametrize("number", [0, 1], ids=["forward", "backward"])
def test_signals_at_any_moment_of_long_calls(number, monkeypatch):
    """Real ones, at times that are not chosen: before, within and after a call."""
    monkeypatch.setattr(core, "PATIENCE_NS", -1)
    call, results = calls_of(2, 256)[number]
    random, interrupted = np.random.default_rng(0), 0
    before = signal.signal(signal.SIGALRM, raise_interrupted)
    gc.collect()
    gc.disable()  # Python ignores what a handler raises in a finalizer of objects that other tests left
    try:
        for _ in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-3))
                call()
                time.sleep(1)
            except Interrupted:
                interrupted += 1
            assert_nothing_is_written(results, 2e-3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert interrupted == 150


TRACED = {str(Path(module.__file__ or "")) for module in (core, cpu_backend, jobs, cpu)}


def run_until(step, call):
    """Run a call until so many steps of the modules of the CPU path; returns whether it came so far.

    A step is an instruction of the interpreter, after which a handler of a signal may run.
    """
    left = step

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in TRACED:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Interrupted
        return trace

    before = sys.gettrace()
    # Python 3.12 reports no opcodes to a function that is set before any frame has asked for them.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.one_in(1)
@pytest.mark.parametrize("is_long", [True, False])
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "new"])
def test_an_exception_after_any_instruction(monkeypatch, is_long, is_known):
    """Nothing computes afterwards, and the next call is as if there had been none."""
    much_work(monkeypatch)
    monkeypatch.setattr(core, "PATIENCE_NS", -1 if is_long else 10**15)
    shape = (4, 400, 32) if is_known and is_long else (2, 60, 16)  # so that threads compute for a while, or not at all
    q, attn, kept = np.random.default_rng(0).standard_normal(shape), cuflash.FlashAttention(), []
    expected = attn.forward(q, q, q)
    gradients = attn.backward(q, q, q, q, *expected, need=("dq",))
    step, stride = 0, 1 if sampling.exhaustive else 2 if is_known and is_long else 7
    with cuflash.cpu_threads(2):
        while True:
            out, lse, dq = np.empty_like(q), np.empty_like(expected.lse), np.empty_like(q)

            def calls(out=out, lse=lse, dq=dq):
                attn.forward(q, q, q, out=out, lse=lse)
                attn.backward(q, q, q, q, out, lse, dq=dq, need=("dq",))

            if is_known and step == 0:
                calls()
            elif not is_known:
                cpu_backend._known.clear()
                cpu_backend._repeatable.cache_clear()
                cpu_backend.bind_signature.cache_clear()
            if not run_until(step, calls):
                break
            for x in (out, lse, dq):
                x[...] = 7
            kept.append((out, lse, dq))
            for x, y in zip(attn.forward(q, q, q), expected, strict=True):
                np.testing.assert_array_equal(x, y)
            step += stride
    assert step > (300 if is_known else 1000)
    np.testing.assert_array_equal(dq, gradients.dq)
    time.sleep(0.1)
    assert all((x == 7).all() for of_call in kept for x in of_call), "threads compute after the exception"


def test_the_interpreter_exits_while_a_daemon_thread_computes():
    """What a call needs lives as long as the call, also where Python takes the thread's own memory away.

    The main thread's own memory goes last, and takes its time.
    """
    code = """
import threading, time, numpy as np, cuflash
from cuflash.cpu import core
core.SERIAL_NS = core.PATIENCE_NS = 10**15  # on the thread that calls
q = np.ones((1, 16384, 64), np.float32)
cuflash.attention(q[:, :300], q[:, :300], q[:, :300])
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)
local = threading.local()
local.slow = Slow()
threading.Thread(target=lambda: cuflash.attention(q, q, q), daemon=True).start()
time.sleep(0.2)
"""
    run_python(code, OPENBLAS_NUM_THREADS="1")


def test_the_interpreter_exits_while_daemon_threads_compute():
    """Short and long calls, at any moment."""
    code = """
import sys, threading, time
import numpy as np, cuflash
attn = cuflash.FlashAttention(causal=True)
q, k, v = np.random.default_rng(0).standard_normal((3, 4, 700, 64)).astype(np.float32)
out, lse = attn.forward(q, k, v)
n = int(sys.argv[1])
def work():
    while True:
        with cuflash.cpu_threads(n % 4 + 1):
            attn.forward(q, k, v); attn.backward(q, q, k, v, out, lse)
for _ in range(n % 3 + 1): threading.Thread(target=work, daemon=True).start()
time.sleep((n * 37 % 100) / 330)
"""
    for n in range(60 if sampling.exhaustive else 6):
        run_python(code, str(n))


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_waits_for_no_lock_of_another_thread():
    """Cached properties have one in Python 3.11, which threads hold while they compute such a property."""
    code = """
import functools, gc, os, signal, threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np, cuflash, cuflash.distributed as cd, cuflash.frameworks

locks = [x.lock for x in gc.get_objects() if isinstance(x, functools.cached_property) and hasattr(x, "lock")]
holds, ends = threading.Event(), threading.Event()

def hold():
    for lock in locks:
        lock.acquire()
    holds.set()
    ends.wait()

threading.Thread(target=hold, daemon=True).start()
holds.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends a child that waits
    q, x = np.random.default_rng(0).standard_normal((3, 40, 8)), np.linspace(0, 1, 40)
    attn = cuflash.FlashAttention(score=lambda s, i, j, *, x: cuflash.tanh(s) - x[i] * x[j])
    for keys in ((q, q), cuflash.streamed(q, q, chunk=16)):
        out, lse = attn.forward(q, *keys, x=x)
        attn.backward(out, q, *keys, out, lse, x=x)
        attn.jvp(q, *keys, tq=q, x=x)
    cuflash.frameworks.call(attn, ("q", "k", "v", "x")).movable
    def rank(comm):
        return cd.ContextParallel(comm, split="contiguous", causal=True).forward(*(q[:, 20 * comm.rank:][:, :20],) * 3)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, cd.threads(2)))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    run_python(code)


def test_a_spawned_process_computes_too():
    q = np.random.default_rng(0).standard_normal((4, 1024, 64), dtype=np.float32)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        results = pool.apply(cuflash.attention, (q, q, q))
    np.testing.assert_array_equal(results, cuflash.attention(q, q, q))


def _of_indices(kind):
    """Options, q, k and v, and the arrays of a kind of call that say where its rows lie, in two valid states."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((2, 16, 2, 32)).astype(np.float32) for _ in range(3))
    if kind == "packed":
        states = ([0, 5, 16], [0, 12, 14])
        x = {name: [np.array(s, np.int32) for s in states] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        return {"causal": True}, (q[0], k[0], v[0]), x
    if kind == "lengths":
        return {}, (q, k, v), {"kv_lengths": [np.array(s, np.int64) for s in ([3, 16], [16, 2])]}
    k, v = (rng.standard_normal((4, 16, 2, 32)).astype(np.float32) for _ in range(2))
    tables = [np.array(s, np.int32) for s in ([[0, 1], [2, 3]], [[3, 0], [1, 2]])]
    return {}, (q, k, v), {"block_table": tables, "kv_lengths": [np.array(s, np.int32) for s in ([19, 32], [1, 4])]}


WITHOUT_PAGES = ("backward", "column_sums", "column_max", "top_keys")  # calls that take no block_table


@pytest.mark.parametrize(
    ("kind", "call"),
    [(kind, call) for kind in ("packed", "lengths", "pages") for call in ("forward", "jvp")]
    + [(kind, call) for kind in ("packed", "lengths") for call in WITHOUT_PAGES],
)
def test_indices_are_those_that_were_checked(kind, call, monkeypatch):
    """Others would be read from outside the arrays, and end the process: a thread may change them during a call."""
    options, (q, k, v), states = _of_indices(kind)
    attn = cuflash.FlashAttention(layout="bshd", **options)
    first, second = ({name: both[index] for name, both in states.items()} for index in (0, 1))
    out, lse = attn.forward(q, k, v, **first)

    def compute(x):
        calls = {
            "forward": lambda: attn.forward(q, k, v, **x),
            "backward": lambda: attn.backward(out, q, k, v, out, lse, **x),
            "jvp": lambda: attn.jvp(q, k, v, tq=q, **x),
            "column_sums": lambda: (attn.column_sums(q, k, lse, **x),),
            "column_max": lambda: (attn.column_max(q, k, lse, **x),),
            "top_keys": lambda: attn.top_keys(q, k, lse, count=3, **x),
        }
        return tuple(calls[call]())

    expected = compute(first)
    given, bound = {name: x.copy() for name, x in first.items()}, cpu_backend.bound

    def bound_then_changed(*arguments):
        binding = bound(*arguments)
        for name, x in second.items():
            given[name][...] = x
        return binding

    monkeypatch.setattr(cpu_backend, "bound", bound_then_changed)
    assert_same_bits(compute(given), expected)
    assert all((given[name] == x).all() for name, x in second.items())
