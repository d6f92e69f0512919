"""NCCL between devices, by communicators of CuPy, of `cupyx.distributed` or of nccl4py."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.distributed.transports import HIGHEST_PRIORITY, Array, Message, Transport, out_of_time
from cuflash.streaming.cuda import Cuda

_LENGTH = 8  # bytes of the number that says how many bytes follow
_SHORT = 1e-3  # seconds for which the host polls without sleep, because a thread that sleeps wakes up late
_AT_ONCE = 8192  # bytes that ranks exchange first; most calls need no more


class _Room(NamedTuple):
    """Memory for equally many bytes of each rank: pinned, on the device, and the rows of the latter by rank."""

    host: Any
    on_device: Array
    rows: list[Array]


def is_nccl(comm: object) -> bool:
    """Whether `comm` is a communicator of NCCL; the check imports nothing."""
    names = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(comm).__mro__}
    known = {("nccl", "Communicator"), ("cupyx", "NCCLBackend")}
    known |= {(module, "NcclCommunicator") for module in ("cupy", "cupy_backends")}
    return bool(names & known)


class Nccl(Transport):
    """A rank of NCCL, for CuPy arrays of the device that is current when it is made.

    Rows travel on a stream of their own: after the earlier work of the current stream, and beside its later work, until
    it waits for them. The host waits only for what ranks say of their calls; if that does not come in time, it aborts
    the communicator.
    """

    goes_into_graphs = True
    shares_meanwhile = True

    def __init__(self, comm: Any) -> None:
        self._cupy = cupy = importlib.import_module("cupy")
        self.rank, self.size, self._send, self._receive, self._group, self._abort = _functions(comm)
        self._device, self._cuda = cupy.cuda.Device(), Cuda()
        # NCCL moves rows by blocks on multiprocessors. The highest priority gives a free multiprocessor to these blocks
        # before those of the next attention.
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=HIGHEST_PRIORITY)
        # This stream copies what a rank says to the device while rows of an earlier call still travel. So it is sent
        # right after them, and before an attention that takes all multiprocessors until its end.
        self._words = cupy.cuda.Stream(non_blocking=True)
        self._room = self._room_for(_AT_ONCE)

    def share(self, text: bytes, timeout: float) -> list[bytes]:
        return self.begin_sharing(text, timeout)()

    def begin_sharing(self, text: bytes, timeout: float) -> Callable[[], list[bytes]]:
        said = len(text).to_bytes(_LENGTH, "little") + text
        first = self._begin_gathering(said[:_AT_ONCE].ljust(_AT_ONCE, b"\0"), self._room)

        def heard() -> list[bytes]:
            rows = self._gathered(first, timeout)
            ends = [_LENGTH + int.from_bytes(row[:_LENGTH], "little") for row in rows]
            if max(ends) > _AT_ONCE:
                length = max(ends) - _AT_ONCE
                rest = self._begin_gathering(said[_AT_ONCE:].ljust(length, b"\0"), self._room_for(length))
                rows = [row + more for row, more in zip(rows, self._gathered(rest, timeout), strict=True)]
            return [row[_LENGTH:end] for row, end in zip(rows, ends, strict=True)]

        return heard

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        cupy, ready = self._cupy, self._cupy.cuda.Event(disable_timing=True)
        ready.record()
        self._stream.wait_event(ready)
        self._exchange([(target, _bytes(x)) for target, x in sends], [(source, _bytes(x)) for source, x in receives])
        arrived = cupy.cuda.Event(disable_timing=True)
        arrived.record(self._stream)
        return arrived, sends, receives  # the arrays live until the current stream has waited

    def finish(self, pending: Any, timeout: float) -> None:
        self._cupy.cuda.get_current_stream().wait_event(pending[0])

    def fail(self, rank: int, text: str) -> None:
        self._abort()

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive arrays of bytes on the stream of the rows."""
        with self._group():
            for target, array in sends:
                self._send(array, target, self._stream)
            for source, array in receives:
                self._receive(array, source, self._stream)

    def _room_for(self, length: int) -> _Room:
        """Room for so many bytes of each rank."""
        host, on_device = (make((self.size, length), np.uint8) for make in (self._cuda.pinned, self._cupy.empty))
        return _Room(host, on_device, [on_device[rank] for rank in range(self.size)])

    def _begin_gathering(self, own: bytes, room: _Room) -> tuple[Any, _Room]:
        """Begin to exchange equally many bytes of each rank: an event after that, and the room, which must stay alive.

        Neither the device nor the host waits for what is computed meanwhile. The host waits for each exchange before
        the next one begins, so nothing else uses the memory on the device, and it can be written to at once.
        """
        host, on_device, rows = room
        with self._device, self._stream:
            host[self.rank] = np.frombuffer(own, np.uint8)
            self._cuda.copy(rows[self.rank], host[self.rank], self._words)
            self._stream.wait_event(self._cuda.mark(self._words))
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._exchange([(rank, rows[self.rank]) for rank in others], [(rank, rows[rank]) for rank in others])
            self._cuda.copy(host, on_device, self._stream)
            return self._cuda.mark(self._stream), room

    def _gathered(self, gathering: tuple[Any, _Room], timeout: float) -> list[bytes]:
        """The bytes of each rank, by rank; this waits for them."""
        arrived, room = gathering
        begun = time.monotonic()
        while not arrived.done:
            waited = time.monotonic() - begun
            if waited > timeout:
                self._abort()
                raise out_of_time("what other ranks say", timeout)
            time.sleep(0 if waited < _SHORT else 1e-5)
        return [row.tobytes() for row in room.host]


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _functions(comm: Any) -> tuple[int, int, Callable, Callable, Callable, Callable]:
    """Rank, size, and functions that send, receive, group several of both, and abort."""
    if type(comm).__module__.partition(".")[0] == "nccl":
        group = importlib.import_module("nccl.core").group

        def send_by_nccl4py(array: Array, peer: int, stream: Any) -> None:
            comm.send(array, peer, stream=stream)

        def receive_by_nccl4py(array: Array, peer: int, stream: Any) -> None:
            comm.recv(array, peer, stream=stream)

        return comm.rank, comm.nranks, send_by_nccl4py, receive_by_nccl4py, group, comm.abort

    nccl = importlib.import_module("cupy.cuda.nccl")
    comm = getattr(comm, "_comm", comm)  # cupyx.distributed wraps a communicator of CuPy

    def send(array: Array, peer: int, stream: Any) -> None:
        comm.send(array.data.ptr, array.size, nccl.NCCL_UINT8, peer, stream.ptr)

    def receive(array: Array, peer: int, stream: Any) -> None:
        comm.recv(array.data.ptr, array.size, nccl.NCCL_UINT8, peer, stream.ptr)

    return comm.rank_id(), comm.size(), send, receive, functools.partial(_grouped, nccl), comm.abort


@contextlib.contextmanager
def _grouped(nccl: Any) -> Any:
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()
