"""NCCL between devices, by communicators of CuPy, of `cupyx.distributed` or of nccl4py."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.distributed.transports import HIGHEST_PRIORITY, Array, Message, RankFailed, Transport, out_of_time
from cuflash.shards.cuda import Cuda

_HEADER = 16  # bytes: the number of the exchange, and how many bytes a rank has
_SHORT = 1e-3  # seconds for which the host polls without sleep, because a thread that sleeps wakes up late
_AT_ONCE = 8192  # bytes that ranks exchange at a time; most calls need no more
_LOOK = 1.0  # seconds to find out which ranks are silent

_process = secrets.token_bytes(16)  # with its number, which a fork changes, it names this process
_boards: weakref.WeakValueDictionary[bytes, Neighbours] = weakref.WeakValueDictionary()
_boards_change = threading.Lock()
# Memory that a device may still write to, because the communicator of its rank was aborted meanwhile.
_abandoned: list[Any] = []


class _Buffers(NamedTuple):
    """Memory for equally many bytes of each rank: pinned, on the device, and the rows of the latter by rank."""

    host: Any
    on_device: Array
    rows: list[Array]


class Neighbours:
    """Ranks of one communicator that are threads of one process, and how often each has come to a meeting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Ctrl-C may come within the methods of a condition, but not within these
        self._changed = threading.Condition(self._lock)
        self._came: Counter[int] = Counter()
        self.failed: dict[int, str] = {}  # by rank

    def barrier(self, rank: int, ranks: Sequence[int], timeout: float) -> None:
        """Wait until all ranks have come as often as this one."""
        with self._lock:
            self._came[rank] += 1
            count = self._came[rank]
            self._changed.notify_all()

            def missing() -> list[int]:
                return [other for other in ranks if self._came[other] < count]

            self._changed.wait_for(lambda: not missing() or self.failed, timeout)
            self.check()
            if missing():
                raise out_of_time("ranks of this process", timeout, missing())

    def check(self) -> None:
        """Raise RankFailed if a rank has failed."""
        if self.failed:
            raise RankFailed(*next(iter(self.failed.items())))

    def fail(self, rank: int, message: str) -> None:
        """Let all ranks stop waiting."""
        with self._lock:
            self.failed[rank] = message
            self._changed.notify_all()


def is_nccl(comm: object) -> bool:
    """Whether `comm` is a communicator of NCCL; the check imports nothing."""
    names = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(comm).__mro__}
    known = {("nccl", "Communicator"), ("cupyx", "NCCLBackend")}
    known |= {(module, "NcclCommunicator") for module in ("cupy", "cupy_backends")}
    return bool(names & known)


class Nccl(Transport):
    """A rank of NCCL, for CuPy arrays of the device that is current when it is made.

    Rows are exchanged on a stream of their own: after the earlier work of the current stream, and concurrently with its
    later work, until it waits for them. The host waits only for what ranks say of their calls; if that does not come in
    time, it aborts the communicator.

    A kernel of NCCL runs until the other rank has launched its own. Where both are threads of one process, a call of
    CUDA that waits for the first kernel, such as loading a module or allocating memory, may hold a lock that the other
    thread needs to launch: then both wait for ever. So such ranks wait at a `barrier` before rows are exchanged, and
    once all of them have launched: between these points none of them loads or allocates. In processes of their own they
    have no lock in common.
    """

    goes_into_graphs = True

    def __init__(self, comm: Any) -> None:
        self._cupy = cupy = importlib.import_module("cupy")
        self.rank, self.size, self._send, self._receive, self._group, self._abort = _functions(comm)
        self._device, self._cuda = cupy.cuda.Device(), Cuda()
        # NCCL moves rows by blocks on SMs. The highest priority gives a free SM to these blocks
        # before those of the next attention.
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=HIGHEST_PRIORITY)
        # This stream copies what a rank says to the device while rows of an earlier call are still exchanged. So it is
        # sent right after them, and before an attention that takes all SMs until its end.
        self._words = cupy.cuda.Stream(non_blocking=True)
        # The same buffers serve all exchanges, because to allocate pinned memory may wait for the devices of other
        # ranks.
        host, on_device = (make((self.size, _AT_ONCE), np.uint8) for make in (self._cuda.pinned, cupy.empty))
        self._buffers = _Buffers(host, on_device, [on_device[rank] for rank in range(self.size)])
        self._exchanges, self._is_over = 0, False
        self._token = secrets.token_bytes(16)
        self._near: list[int] = []  # the ranks of this process, in order; unknown before the first exchange
        self._neighbours = Neighbours()

    def all_gather(self, payload: bytes, timeout: float) -> list[bytes]:
        return self.begin_all_gather(payload, timeout)()

    def begin_all_gather(self, payload: bytes, timeout: float) -> Callable[[], list[bytes]]:
        self.barrier(timeout)
        first = self._begin_gathering(payload, 0)

        def heard() -> list[bytes]:
            lengths, rows = self._gathered(first, timeout)
            for start in range(_AT_ONCE - _HEADER, max(lengths), _AT_ONCE - _HEADER):
                _, more = self._gathered(self._begin_gathering(payload, start), timeout)
                rows = [row + x for row, x in zip(rows, more, strict=True)]
            return [row[:length] for row, length in zip(rows, lengths, strict=True)]

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

    def barrier(self, timeout: float) -> None:
        if len(self._near) == 1 or self._cupy.cuda.get_current_stream().is_capturing():  # then nothing runs
            return
        if not self._near:
            self._find_neighbours(timeout)
        self._neighbours.barrier(self.rank, self._near, timeout)

    def fail(self, rank: int, message: str) -> None:
        self._neighbours.fail(rank, message)
        self._end()

    def _end(self) -> None:
        """Abort the communicator, if that is not done yet; what is on its way ends by that."""
        if self._is_over:
            return
        self._is_over = True
        _abandoned.append(self._buffers)
        self._abort()
        # Later work of this rank may get the memory of what was on its way.
        self._cupy.cuda.get_current_stream().wait_event(self._cuda.mark(self._stream))

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive arrays of bytes on the stream of the rows."""
        with self._group():
            for target, array in sends:
                self._send(array, target, self._stream)
            for source, array in receives:
                self._receive(array, source, self._stream)

    def _find_neighbours(self, timeout: float) -> None:
        """Find out which ranks are of this process; this first exchange also makes the connections of NCCL."""
        process = _process + os.getpid().to_bytes(8, "little")
        _, said = self._gathered(self._begin_gathering(process + self._token, 0), timeout)
        near = [rank for rank, payload in enumerate(said) if payload.startswith(process)]
        with _boards_change:
            self._neighbours = _boards.setdefault(said[near[0]][len(process) :][:16], self._neighbours)
        self._near = near
        self.gathers_meanwhile = len(near) == 1

    def _begin_gathering(self, payload: bytes, start: int) -> Any:
        """Begin to exchange a piece of a payload with all ranks: an event after that.

        Neither the device nor the host waits for what is computed meanwhile. The host waits for each exchange before
        the next one begins, so nothing else uses the memory on the device, and it can be written to at once.
        """
        host, on_device, rows = self._buffers
        self._exchanges += 1
        piece = payload[start : start + _AT_ONCE - _HEADER]
        own = b"".join(number.to_bytes(8, "little") for number in (self._exchanges, len(payload))) + piece
        with self._device, self._stream:
            host[self.rank] = np.frombuffer(own.ljust(_AT_ONCE, b"\0"), np.uint8)
            self._cuda.copy(rows[self.rank], host[self.rank], self._words)
            self._stream.wait_event(self._cuda.mark(self._words))
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._exchange([(rank, rows[self.rank]) for rank in others], [(rank, rows[rank]) for rank in others])
            self._cuda.copy(host, on_device, self._stream)
            return self._cuda.mark(self._stream)

    def _gathered(self, arrived: Any, timeout: float) -> tuple[list[int], list[bytes]]:
        """The length of the payload of each rank, and the piece of it that was exchanged; this waits for them."""
        if not self._comes(arrived, timeout):
            silent = self._silent()
            self._end()
            raise out_of_time("what other ranks say", timeout, silent)
        rows = [row.tobytes() for row in self._buffers.host]
        return [int.from_bytes(row[8:_HEADER], "little") for row in rows], [row[_HEADER:] for row in rows]

    def _comes(self, event: Any, timeout: float) -> bool:
        """Whether an event comes in time; this waits for it."""
        begun = time.monotonic()
        while not event.done:
            waited = time.monotonic() - begun
            if waited > timeout:
                return False
            self._neighbours.check()
            time.sleep(0 if waited < _SHORT else 1e-5)
        return True

    def _silent(self) -> list[int]:
        """The ranks of which nothing has come in an exchange that does not end, as far as the device can tell."""
        self._cuda.copy(self._buffers.host, self._buffers.on_device, self._words)
        if not self._comes(self._cuda.mark(self._words), _LOOK):
            return []
        numbers = [int.from_bytes(row[:8].tobytes(), "little") for row in self._buffers.host]
        return [rank for rank, number in enumerate(numbers) if number != self._exchanges]


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
