"""What `cuflash.streaming` asks of CuPy, by a stand-in whose device memory is host memory."""

import ctypes
import sys
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash.shards.cuda import Cuda
from cuflash.streaming.copy_pipeline import Drain, Feed, is_direct
from tests.emulate.launcher import DeviceArray

MEMCPY_DEFAULT, UNREGISTERED, HOST = 4, 0, 1
SPANS = ((0, 7), (7, 14), (20, 23))


class Event:
    def __init__(self, disable_timing):
        assert disable_timing
        self.stream = None

    def record(self, stream):
        self.stream = stream

    def synchronize(self):
        assert self.stream is not None


class Stream:
    def __init__(self, non_blocking):
        assert non_blocking
        self.ptr, self.events = 7, []

    def wait_event(self, event):
        self.events.append(event)


@pytest.fixture
def cupy(monkeypatch):
    fake: Any = types.ModuleType("cupy")
    fake.pinned, fake.copies = [], []

    def attributes(address):
        is_pinned = any(first <= address < first + size for first, size in fake.pinned)
        return SimpleNamespace(type=HOST if is_pinned else UNREGISTERED, devicePointer=address)

    def copy(target, source, size, kind, stream):
        assert (kind, stream) == (MEMCPY_DEFAULT, 7)
        fake.copies.append(size)
        ctypes.memmove(target, source, size)

    def pinned(size):
        memory = (ctypes.c_uint8 * size)()
        fake.pinned.append((ctypes.addressof(memory), size))
        return memory

    def array(shape, dtype, pointer, strides):
        return np.ndarray(shape, dtype, pointer.memory.owner, pointer.offset, strides)

    fake.empty, fake.ndarray = DeviceArray, array
    fake.cuda = SimpleNamespace(
        runtime=SimpleNamespace(memcpyAsync=copy, pointerGetAttributes=attributes),
        alloc_pinned_memory=pinned,
        Event=Event,
        Stream=Stream,
        get_current_stream=lambda current=Stream(non_blocking=True): current,  # noqa: B008 (one for all calls)
        Device=lambda: SimpleNamespace(id=3),
        UnownedMemory=lambda address, size, owner, device: SimpleNamespace(owner=owner.base, device=device),
        MemoryPointer=lambda memory, offset: SimpleNamespace(memory=memory, offset=offset),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def host_array(how, device):
    """(batch, heads, rows, dim) in some kind of host memory, by (row, ...) or not."""
    values = np.arange(2 * 3 * 23 * 64, dtype=np.float32)
    shape = (2, 3, 23, 64) if how != "rows first" else (2, 23, 3, 64)
    array = np.empty(shape, np.float32) if how == "pageable" else device.pinned(shape, np.float32)
    array[...] = values.reshape(shape)
    return array.swapaxes(1, 2) if how == "rows first" else array


@pytest.mark.parametrize("how", ["pinned", "rows first", "pageable"])
def test_chunks_come_and_go(how, cupy, monkeypatch):
    monkeypatch.setattr("cuflash.streaming.copy_pipeline.SMALLEST_BLOCK", 512)
    device = Cuda()
    array, result = (host_array(how, device) for _ in range(2))
    assert device.is_pinned(array) == (how != "pageable")
    assert is_direct(device, array) == (how != "pageable")
    result[...] = -1
    seen = []
    with Drain(device, {"dk": result}, SPANS) as drain, Feed(device, {"k": array}, SPANS) as feed:
        for number, chunk in enumerate(feed):
            seen.append(np.array(chunk["k"]))
            drain.buffers(number)["dk"][...] = 2 * chunk["k"]
            drain.send(number)
    for span, x in zip(SPANS, seen, strict=True):
        np.testing.assert_array_equal(x, array[:, :, slice(*span)])
        np.testing.assert_array_equal(result[:, :, slice(*span)], 2 * x)
    assert (result[:, :, 14:20] == -1).all()
    # Of pinned rows of three heads there is a piece for each entry of the batch, of others one for each head.
    assert len(cupy.copies) == 2 * len(SPANS) * {"pinned": 6, "rows first": 2, "pageable": 1}[how]


def test_what_is_not_worth_a_copy_of_its_own_is_staged(cupy):
    device = Cuda()
    scattered = device.pinned((1, 2, 4096, 16), np.float32)[..., :8]
    assert device.is_pinned(scattered)
    assert not is_direct(device, scattered)
    assert is_direct(device, scattered[:, :, :0])
    assert not is_direct(device, np.broadcast_to(scattered[:, :, :1], scattered.shape))
    assert not is_direct(device, scattered[:, :, ::-1])
    long = device.pinned((1, 2, 4096, 16), np.float32)
    assert is_direct(device, long)
    assert is_direct(device, long[:, :, 100:4000])


@pytest.mark.parametrize("how", ["pinned", "rows first"])
def test_pinned_memory_is_an_array_of_the_device(how, cupy):
    device = Cuda()
    array = host_array(how, device)
    np.testing.assert_array_equal(device.mapped(array), array)
    part = array[:, 1:, 3:9]
    seen = device.mapped(part)
    assert seen.strides == part.strides
    assert seen.shape == part.shape
    assert device.mapped(array[:, :, :0]).shape == (2, 3, 0, 64)
