"""Ranks of NCCL, with a stand-in for CuPy and for its communicators: what is sent, when, and in which groups."""

import contextlib
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cuflash.distributed as cd
from cuflash.arrays import dlpack
from cuflash.distributed.nccl import Nccl, is_nccl
from cuflash.distributed.transports import RankFailed
from cuflash.spec import array_imports
from tests.nccl_stand_ins import Wires, communicators, memory


class Event:
    """Done at once: the stand-in for a device does everything at once."""

    done = True

    def __init__(self, disable_timing=False):
        pass

    def record(self, stream=None):
        pass


class Stream:
    ptr = 7

    def __init__(self, non_blocking=False, priority=0):
        pass

    def __enter__(self):
        entered.append(self)

    def __exit__(self, *error):
        entered.append(None)

    def wait_event(self, event):
        pass

    def is_capturing(self):
        return False


entered: list[Any] = []  # streams that were made current


@pytest.fixture
def nccl(monkeypatch):
    """Makes communicators for so many ranks; CuPy's arrays are NumPy's whose `data.ptr` is their address."""
    wires = Wires()

    class Array(np.ndarray):
        @property
        def data(self):  # type: ignore[override]
            return types.SimpleNamespace(ptr=self.ctypes.data)

    fake: Any = types.ModuleType("cupy")
    fake.empty = lambda shape, dtype: np.empty(shape, dtype).view(Array)

    def copy(target, source, nbytes, error, stream):
        assert stream == 7
        memory(target, nbytes)[...] = memory(source, nbytes)

    fake.cuda = types.SimpleNamespace(
        Event=Event,
        Stream=Stream,
        Device=contextlib.nullcontext,
        get_current_stream=Stream,
        alloc_pinned_memory=bytearray,
        runtime=types.SimpleNamespace(memcpyAsync=copy),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake.cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", wires.module())
    return lambda size: communicators(size, wires)


def on_ranks(comms, work):
    with ThreadPoolExecutor(len(comms)) as pool:
        return list(pool.map(work, comms))


@pytest.mark.parametrize(("length", "rounds"), [(45, 1), (8176, 1), (8177, 2), (30000, 4)])
@pytest.mark.parametrize("size", [1, 3])
def test_ranks_hear_what_each_of_them_says(nccl, size, length, rounds):
    """In rounds, none of which allocates memory; the first one of all is to find out which ranks are of one process."""
    import cupy

    payloads = [(b"long " * length)[:length], b"", b"short"][:size]
    transports = [Nccl(comm) for comm in nccl(size)]
    entered.clear()
    cupy.empty = cupy.cuda.alloc_pinned_memory = None
    for of_all in (1 + rounds, rounds):
        heard = on_ranks(transports, lambda transport: transport.all_gather(payloads[transport.rank], 5.0))
        assert heard == [payloads] * size
        assert len([stream for stream in entered if stream is not None]) == of_all * size  # of their own
        entered.clear()


def test_arrays_arrive_where_they_are_sent_to(nccl):
    import cupy

    def work(comm):
        transport = Nccl(comm)
        own = cupy.empty((2, 3), np.float32)
        own[...] = comm.rank
        into = [cupy.empty((2, 3), np.float32) for _ in range(3)]
        others = [rank for rank in range(3) if rank != comm.rank]
        pending = transport.start([(rank, own) for rank in others], [(rank, into[rank]) for rank in others])
        transport.finish(pending, 5.0)
        return [float(into[rank].mean()) for rank in others]

    assert on_ranks(nccl(3), work) == [[1, 2], [0, 2], [0, 1]]


def test_a_rank_that_says_nothing_in_time_ends_the_communicator(nccl, monkeypatch):
    (comm,) = nccl(1)
    monkeypatch.setattr(Event, "done", False)
    with pytest.raises(TimeoutError, match=r"^what other ranks say: got nothing within timeout=0.05 seconds; "):
        Nccl(comm).all_gather(b"", 0.05)
    assert comm.aborted


def transports_of(comms):
    """Those of ranks that know which of them are of one process."""
    transports = [Nccl(comm) for comm in comms]
    on_ranks(transports, lambda transport: transport.barrier(5.0))
    return transports


def test_ranks_of_one_process_wait_for_one_another(nccl):
    transports, log = transports_of(nccl(3)), []

    def work(transport):
        time.sleep(0.05 * transport.rank)
        log.append(f"{transport.rank} comes")
        transport.barrier(5.0)
        log.append(f"{transport.rank} goes")

    on_ranks(transports, work)
    assert log[:3] == ["0 comes", "1 comes", "2 comes"]
    assert not any(transport.gathers_meanwhile for transport in transports)


def test_ranks_of_other_processes_do_not(nccl, monkeypatch):
    ranks = threading.local()
    monkeypatch.setattr("cuflash.distributed.nccl.os", types.SimpleNamespace(getpid=lambda: ranks.own))

    def work(comm):
        ranks.own = comm.rank
        transport = Nccl(comm)
        transport.barrier(5.0)
        return transport

    for transport in on_ranks(nccl(3), work):
        transport.barrier(5.0)
        assert transport.gathers_meanwhile


def test_a_graph_that_is_captured_waits_for_no_rank(nccl, monkeypatch):
    first, _ = transports_of(nccl(2))
    monkeypatch.setattr(Stream, "is_capturing", lambda stream: True)
    first.barrier(0.1)


def test_a_rank_of_the_process_that_does_not_come_is_named(nccl):
    first, _, third = transports_of(nccl(3))

    def work(transport):
        with pytest.raises(TimeoutError, match=r"^ranks of this process: got nothing from rank 1 within timeout=0.3 "):
            transport.barrier(0.3)

    on_ranks([first, third], work)


@pytest.mark.parametrize("waits", ["in a meeting", "for what others say"])
def test_a_rank_that_fails_is_heard_of_by_those_of_its_process(waits, nccl, monkeypatch):
    first, second = transports_of(nccl(2))
    if waits == "for what others say":
        monkeypatch.setattr(Event, "done", False)
        first._near = [0]  # as if there were no meeting first

    def work(transport):
        if transport is second:
            time.sleep(0.1)
            transport.fail(1, "MemoryError: no memory")
            transport.fail(1, "MemoryError: no memory")  # as where an interrupt follows
            return
        with pytest.raises(RankFailed, match=r"^rank 1 failed: MemoryError: no memory$"):
            transport._gathered(Event(), 5.0) if waits == "for what others say" else transport.barrier(5.0)

    on_ranks([first, second], work)


def test_silent_ranks_are_named(nccl, monkeypatch):
    """Those of which the device has got nothing."""
    first, *_ = transports_of(nccl(3))
    comes = iter([False, True])
    monkeypatch.setattr(Nccl, "_comes", lambda *args: next(comes))
    first._exchanges += 1
    first._buffers.rows[1][:8] = np.frombuffer(first._exchanges.to_bytes(8, "little"), np.uint8)
    first._buffers.rows[0][:8] = first._buffers.rows[1][:8]
    with pytest.raises(TimeoutError, match=r"^what other ranks say: got nothing from rank 2 within timeout=5 sec"):
        first._gathered(Event(), 5.0)


def test_communicators_are_known_by_their_classes(nccl):
    (comm,) = nccl(1)
    backend = type("NCCLBackend", (), {"__module__": "cupyx.distributed._nccl_comm", "_comm": comm})()
    other = type("Communicator", (), {"__module__": "nccl.core.communicator"})()
    assert all(map(is_nccl, (comm, backend, other)))
    assert not any(map(is_nccl, (3, cd.threads(1)[0])))
    for given in (comm, backend):
        attn = cd.ContextParallel(given, split="zigzag")
        assert (attn.rank, attn.size) == (0, 1)


@pytest.fixture
def captured(monkeypatch):
    """Arrays whose calls are recorded in a graph."""
    monkeypatch.setattr(array_imports, "are_cupy", lambda arrays, required: True)
    monkeypatch.setattr(dlpack, "is_captured", lambda array: True)


STARTS = np.array([0, 4], np.int32)


@pytest.mark.parametrize(
    ("options", "optional", "error", "message"),
    [
        ({}, {}, ValueError, "^check: got True while a CUDA graph is captured, expected False, and two Split: ranks "),
        (
            {"check": False},
            {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS},
            NotImplementedError,
            "^cu_seqlens_q: got an array while a CUDA graph is captured, expected none: the host reads it$",
        ),
    ],
)
def test_what_a_graph_does_not_replay_is_refused(options, optional, error, message, nccl, captured):
    (comm,) = nccl(1)
    x = np.zeros((1, 4, 8))
    with pytest.raises(error, match=message):
        cd.ContextParallel(comm, split=cd.zigzag(4, 1), **options).forward(x, x, x, **optional)


def test_other_communicators_do_not_go_into_graphs(captured):
    (comm,) = cd.threads(1)
    x = np.zeros((1, 4, 8))
    with pytest.raises(NotImplementedError, match=r"^comm: got Threads while a CUDA graph is captured, expected a com"):
        cd.ContextParallel(comm, split=cd.zigzag(4, 1), check=False).forward(x, x, x)


def test_a_graph_holds_what_ranks_send(nccl):
    """Everything is asked of streams, in an order that joins that of rows to the one that is captured."""
    log: list[Any] = []

    class Logged(Stream):
        def __init__(self, name="rows", non_blocking=False, priority=0):
            self.name = name

        def wait_event(self, event):
            log.append((self.name, "waits for", event.of))

    class Recorded(Event):
        done = property(lambda self: pytest.fail("the host waits"))

        def record(self, stream=None):
            self.of = (stream or captured).name

    import cupy

    captured = Logged("captured")
    cupy.cuda.Event, cupy.cuda.Stream, cupy.cuda.get_current_stream = Recorded, Logged, lambda: captured
    (comm,) = nccl(1)
    transport = Nccl(comm)
    transport.finish(transport.start([], []), 1.0)
    assert log == [("rows", "waits for", "captured"), ("captured", "waits for", "rows")]
