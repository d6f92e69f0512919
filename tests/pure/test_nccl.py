"""Ranks of NCCL, with a stand-in for CuPy and for its communicators: what is sent, when, and in which groups."""

import collections
import contextlib
import ctypes
import functools
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cuflash.distributed as cd
from cuflash import interop
from cuflash.distributed.nccl import Nccl, is_nccl


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


entered: list[Any] = []  # streams that were made current


class Wires:
    """What devices exchange: bytes by sender and receiver."""

    def __init__(self):
        self.changed = threading.Condition()
        self.messages = collections.defaultdict(collections.deque)
        self.group = threading.local()


class NcclCommunicator:
    """As CuPy's: what is asked for within a group happens at its end."""

    __module__ = "cupy_backends.cuda.libs.nccl"

    def __init__(self, rank, size, wires):
        self.rank, self.ranks, self.wires, self.aborted = rank, size, wires, False

    def rank_id(self):
        return self.rank

    def size(self):
        return self.ranks

    def abort(self):
        self.aborted = True

    def send(self, pointer, count, datatype, peer, stream):
        assert (datatype, stream) == ("uint8", 7)
        self.wires.group.calls.append(("send", self, pointer, count, peer))

    def recv(self, pointer, count, datatype, peer, stream):
        assert (datatype, stream) == ("uint8", 7)
        self.wires.group.calls.append(("recv", self, pointer, count, peer))


@pytest.fixture
def nccl(monkeypatch):
    """Makes communicators for so many ranks; CuPy's arrays are NumPy's whose `data.ptr` is their address."""
    wires = Wires()

    class Array(np.ndarray):
        @property
        def data(self):  # type: ignore[override]
            return types.SimpleNamespace(ptr=self.ctypes.data)

    def memory(pointer, count):
        return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(pointer))

    def start():
        wires.group.calls = []

    def end():
        calls, wires.group.calls = wires.group.calls, None
        with wires.changed:
            for what, comm, pointer, count, peer in calls:
                if what == "send":
                    wires.messages[comm.rank, peer].append(memory(pointer, count).copy())
            wires.changed.notify_all()
            for what, comm, pointer, count, peer in calls:
                if what == "recv":
                    queue = wires.messages[peer, comm.rank]
                    assert wires.changed.wait_for(functools.partial(bool, queue), timeout=10)
                    memory(pointer, count)[...] = queue.popleft()

    fake: Any = types.ModuleType("cupy")
    fake.empty = lambda shape, dtype: np.empty(shape, dtype).view(Array)

    def copy(target, source, nbytes, kind, stream):
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
    groups: Any = types.ModuleType("cupy.cuda.nccl")
    groups.groupStart, groups.groupEnd, groups.NCCL_UINT8 = start, end, "uint8"
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake.cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", groups)
    return lambda size: [NcclCommunicator(rank, size, wires) for rank in range(size)]


def on_ranks(comms, work):
    with ThreadPoolExecutor(len(comms)) as pool:
        return list(pool.map(work, comms))


@pytest.mark.parametrize(("length", "rounds"), [(45, 1), (8184, 1), (8185, 2), (30000, 2)])
@pytest.mark.parametrize("size", [1, 3])
def test_ranks_hear_what_each_of_them_says(nccl, size, length, rounds):
    texts = [(b"long " * length)[:length], b"", b"short"][:size]
    entered.clear()
    heard = on_ranks(nccl(size), lambda comm: Nccl(comm).share(texts[comm.rank], 5.0))
    assert heard == [texts] * size
    assert len([stream for stream in entered if stream is not None]) == rounds * size  # of their own


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
        Nccl(comm).share(b"", 0.05)
    assert comm.aborted


def test_communicators_are_known_by_their_classes(nccl):
    (comm,) = nccl(1)
    backend = type("NCCLBackend", (), {"__module__": "cupyx.distributed._nccl_comm", "_comm": comm})()
    other = type("Communicator", (), {"__module__": "nccl.core.communicator"})()
    assert all(map(is_nccl, (comm, backend, other)))
    assert not any(map(is_nccl, (3, cd.threads(1)[0])))
    for given in (comm, backend):
        attn = cd.ContextParallel(given)
        assert (attn.rank, attn.size) == (0, 1)


@pytest.fixture
def captured(monkeypatch):
    """Arrays whose calls are recorded in a graph."""
    monkeypatch.setattr(interop, "are_cupy", lambda arrays, required: True)
    monkeypatch.setattr(interop, "is_captured", lambda array: True)


STARTS = np.array([0, 4], np.int32)


@pytest.mark.parametrize(
    ("options", "terms", "kind", "message"),
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
def test_what_a_graph_does_not_replay_is_refused(options, terms, kind, message, nccl, captured):
    (comm,) = nccl(1)
    x = np.zeros((1, 4, 8))
    with pytest.raises(kind, match=message):
        cd.ContextParallel(comm, split=cd.zigzag(4, 1), **options).forward(x, x, x, **terms)


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
