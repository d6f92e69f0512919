"""Ranks that are threads, with arrays on stand-ins for devices: what is copied by which stream, and after what."""

import contextlib
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash.distributed as cd

_numbers = itertools.count()


class Stream:
    """What it has to wait for, and what it copies, in order."""

    def __init__(self, non_blocking=False):
        self.name = f"stream {next(_numbers)}"
        self.log: list[Any] = []

    def wait_event(self, event):
        self.log.append(("wait", event.stream, event.after))


class Event:
    def __init__(self, disable_timing):
        assert disable_timing

    def record(self, stream=None):
        self.stream = stream or current()
        self.after = len(self.stream.log)


_local = threading.local()


def current():
    """The current stream of a thread."""
    if not hasattr(_local, "stream"):
        _local.stream = Stream()
    return _local.stream


class OnDevice:
    def __init__(self, own):
        self.own, self.nbytes, self.size = own, own.nbytes, own.size
        self.device = contextlib.nullcontext()
        self.data = self

    def copy_from_device_async(self, source, nbytes, stream):
        stream.log.append(("copy", source, self))
        np.copyto(self.own, source.own)


@pytest.fixture
def cupy(monkeypatch):
    fake = SimpleNamespace(cuda=SimpleNamespace(Event=Event, Stream=Stream, get_current_stream=current))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr("cuflash.distributed.transports.module_of", lambda array: fake)


def test_copies_of_devices_have_a_stream_of_their_own(cupy):
    """They follow what was done to both arrays; what comes next follows them, on both sides."""

    def work(comm):
        sent, received = OnDevice(np.full(3, float(comm.rank))), OnDevice(np.full(3, np.nan))
        current().log.append("before")
        pending = comm.start([(1 - comm.rank, sent)], [(1 - comm.rank, received)])
        current().log.append("computed meanwhile")
        comm.finish(pending, 10)
        return sent, received, current(), comm._stream

    with ThreadPoolExecutor(2) as pool:
        (sent, received, own, copies), (sent_1, received_1, own_1, copies_1) = pool.map(work, cd.threads(2))
    np.testing.assert_array_equal(received.own, 1)
    np.testing.assert_array_equal(received_1.own, 0)
    assert copies.log == [("wait", own_1, 1), ("wait", own, 1), ("copy", sent_1, received)]
    assert copies_1.log == [("wait", own, 1), ("wait", own_1, 1), ("copy", sent, received_1)]
    assert own.log == ["before", "computed meanwhile", ("wait", copies, 3), ("wait", copies_1, 3)]
    assert own_1.log == ["before", "computed meanwhile", ("wait", copies_1, 3), ("wait", copies, 3)]


def test_rows_in_host_memory_come_while_a_rank_computes():
    first, second = cd.threads(2)
    into = np.full(3, np.nan)
    receiving = first.start([], [(1, into)])
    sending = second.start([(0, np.arange(3.0))], [])
    deadline = time.monotonic() + 10
    while np.isnan(into).any() and time.monotonic() < deadline:
        time.sleep(1e-3)  # it calls nothing of the transport
    np.testing.assert_array_equal(into, np.arange(3))
    first.finish(receiving, 10)
    second.finish(sending, 10)


def test_a_thread_that_is_waited_for_no_more_ends():
    (comm,) = cd.threads(1)
    pending = comm.start([], [(0, np.empty(3))])
    with pytest.raises(
        TimeoutError, match=r"^rows of other ranks: got nothing from rank 0 within timeout=0.1 seconds; it may "
    ):
        comm.finish(pending, 0.1)
    *_, receiving = pending
    assert isinstance(receiving.exception(10), TimeoutError)
