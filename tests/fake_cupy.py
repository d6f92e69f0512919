"""Arrays and events of a stand-in for CuPy, which the fixture `fake_cupy` makes on NumPy."""

import threading
import types

import numpy as np


class FakeMemory(np.ndarray):
    """An array that can be copied as CuPy's memory can."""

    @property
    def data(self):
        return types.SimpleNamespace(copy_from_device_async=lambda source, size: None)


def raw_memory(array):
    return array.view(FakeMemory) if array.dtype.kind == "u" else array


class FakeEvent:
    now_ms = 0.0

    def record(self):
        FakeEvent.now_ms += 0.5
        self.at = FakeEvent.now_ms

    def synchronize(self):
        pass


class FakeStream:
    """Copies in the order in which they were asked for."""

    def __init__(self):
        self.to_do = []
        self.done = 0
        self.waited_for = 0  # how many copies the stream that computes has waited for
        self.known = 0  # up to which time it has waited for the stream that computes


class FakeDevice:
    """A `cuflash.shards.cuda.Cuda` in host memory, which computes at once.

    Copies are made as late as they may be, or as early. It refuses copies into memory that may still be computed with,
    and those of results before they are computed.
    """

    def __init__(self, *, late, pinned):
        self.late, self.pins_all = late, pinned
        self.lock = threading.RLock()
        self.now = 1
        self.used = {}  # by address of a buffer: when what was copied there was last waited for
        self.own = []  # its memory
        self.allocated = 0
        self.waited = []  # streams that the host has waited for, with how many of their copies

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.view(np.uint8).reshape(-1)[:] = 255
        self.own.append(array)
        self.allocated += array.nbytes
        return array

    def pinned(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.view(np.uint8).reshape(-1)[:] = 255
        return array

    def is_pinned(self, array):
        return self.pins_all

    def stream(self):
        return FakeStream()

    def copy(self, target, source, stream):
        assert target.shape == source.shape
        assert target.flags.c_contiguous
        assert source.flags.c_contiguous
        buffer = self.buffer_of(target)
        with self.lock:
            if buffer is not None:
                assert stream.known > self.used.get(buffer, 0), "a buffer that is computed with is overwritten"
            else:
                assert self.buffer_of(source) is not None
                assert stream.known == self.now, "results are copied before they are computed"
            stream.to_do.append((buffer, target, source))
            if not self.late:
                self.run(stream, len(stream.to_do))

    def mark(self, stream):
        with self.lock:
            if stream is None:
                self.now += 1
                return None, self.now
            return stream, len(stream.to_do)

    def follow(self, stream, event):
        of, count = event
        with self.lock:
            if stream is not None:
                assert of is None
                stream.known = max(stream.known, count)
                return
            self.run(of, count)
            self.used |= {buffer: self.now for buffer, _, _ in of.to_do[of.waited_for : count] if buffer is not None}
            of.waited_for = max(of.waited_for, count)

    def wait(self, event):
        of, count = event
        if of is not None:
            with self.lock:
                self.waited.append((of, count))
                self.run(of, count)

    def mapped(self, array):
        return array

    def run(self, stream, count):
        for _, target, source in stream.to_do[stream.done : count]:
            np.copyto(target, source)
        stream.done = max(stream.done, count)

    def buffer_of(self, array):
        for buffer in self.own:
            if np.may_share_memory(array, buffer):
                return buffer.ctypes.data
        return None
