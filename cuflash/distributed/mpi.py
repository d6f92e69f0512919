"""MPI between processes, by mpi4py.

MPI knows no streams, and it moves rows only while it is called. So a thread of its own waits until rows are computed,
sends and receives them, and copies those that have to pass through host memory. Meanwhile the calling thread computes.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuflash.distributed.transports import Array, Message, Progress, RankFailed, Transport, out_of_time
from cuflash.streaming.cuda import Cuda
from cuflash.values import type_error


class Mpi(Transport):
    """A rank of MPI, by mpi4py.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        It is duplicated, so that messages of other users are never taken for ours. Duplication is a collective call.
    cuda_aware : bool, default False
        Whether this MPI takes addresses of device memory. Otherwise CuPy arrays go through pinned host memory.

    Raises
    ------
    TypeError
        Not a communicator of mpi4py.
    """

    def __init__(self, comm: Any, *, cuda_aware: bool = False) -> None:
        if not is_mpi(comm):
            raise type_error("comm", type(comm).__name__, "a communicator of mpi4py")
        mpi = importlib.import_module("mpi4py.MPI")
        self._comm, self._alarm = comm.Dup(), comm.Dup()  # for rows, and for messages of ranks that fail
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._cuda_aware = cuda_aware
        self._told: list[Any] = []  # requests of messages that a rank has failed
        self._progress = Progress()
        # If only one thread may call MPI, the caller's thread moves the rows, when it needs them.
        self._has_threads = mpi.Query_thread() == mpi.THREAD_MULTIPLE

    def share(self, text: bytes, timeout: float) -> list[bytes]:
        own, lengths = np.array([len(text)], np.int64), np.empty(self.size, np.int64)
        self._wait([self._comm.Iallgather(own, lengths)], "what other ranks say", timeout)
        longest = int(lengths.max(initial=0))
        padded = np.frombuffer(text.ljust(longest, b"\0"), np.uint8)
        said = np.empty((self.size, longest), np.uint8)
        self._wait([self._comm.Iallgather(padded, said)], "what other ranks say", timeout)
        return [row[:length].tobytes() for row, length in zip(said, lengths, strict=True)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        move = self._prepared(sends, receives)
        return self._progress.run(move, None) if self._has_threads else move

    def finish(self, pending: Any, timeout: float) -> None:
        if self._has_threads:
            self._progress.result(pending, "rows of other ranks", timeout)
        else:
            pending(timeout)

    def fail(self, rank: int, text: str) -> None:
        self._progress.is_over.set()
        others = [other for other in range(self.size) if other != self.rank]
        self._told += [self._alarm.isend((rank, text), other) for other in others]

    def _prepared(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[float | None], None]:
        """A function that moves rows; any thread may call it, and once it returns, all streams may use the rows."""
        outgoing, incoming = ([(rank, _bytes(x)) for rank, x in messages] for messages in (sends, receives))
        others = [x for _, x in (*sends, *receives) if not isinstance(x, np.ndarray)]
        if not others:
            return functools.partial(self._move, outgoing, incoming)
        device, stream = self._staging
        ready = device.mark(None)  # the arrays to send are written, and those to receive into are free
        if self._cuda_aware:
            return functools.partial(self._move_when, ready, others[0].device, outgoing, incoming, ())
        device.follow(stream, ready)
        to_send, to_receive = (
            [(rank, device.pinned(x.shape, x.dtype)) for rank, x in messages] for messages in (outgoing, incoming)
        )
        for (_, buffer), (_, x) in zip(to_send, outgoing, strict=True):
            device.copy(buffer, x, stream)
        arriving = [(x, buffer) for (_, buffer), (_, x) in zip(to_receive, incoming, strict=True)]
        copied = device.mark(stream)
        return functools.partial(self._move_when, copied, others[0].device, to_send, to_receive, arriving)

    @functools.cached_property
    def _staging(self) -> tuple[Cuda, Any]:
        """The device, and the stream for copies to and from pinned memory."""
        device = Cuda()
        return device, device.stream()

    def _move_when(
        self,
        ready: Any,
        of_arrays: Any,
        sends: list[Message],
        receives: list[Message],
        arriving: Sequence[tuple[Array, Array]],
        timeout: float | None,
    ) -> None:
        """Move bytes once an event has come, and copy those that are `arriving` from host memory to the device."""
        device, stream = self._staging
        with of_arrays:
            device.wait(ready)
            self._move(sends, receives, timeout)
            for target, buffer in arriving:
                device.copy(target, buffer, stream)
            device.wait(device.mark(stream))

    def _move(self, sends: list[Message], receives: list[Message], timeout: float | None) -> None:
        """Send and receive bytes in memory that MPI takes."""
        requests = [self._comm.Irecv(buffer, source) for source, buffer in receives]
        requests += [self._comm.Isend(buffer, target) for target, buffer in sends]
        self._wait(requests, "rows of other ranks", timeout)

    def _wait(self, requests: list[Any], what: str, timeout: float | None) -> None:
        """Wait for messages; without a timeout, until they come or the caller gives up."""
        start, pause = time.monotonic(), 1e-6
        waiting = list(requests)
        while True:
            waiting = [request for request in waiting if not request.Test()]
            if not waiting:
                return
            if self._progress.is_over.is_set() or (timeout is not None and time.monotonic() > start + timeout):
                raise out_of_time(what, timeout or 0)
            for rank in range(self.size):
                if self._alarm.iprobe(rank):
                    raise RankFailed(*self._alarm.recv(source=rank))
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)


def _bytes(array: Array) -> Array:
    return array.view(np.uint8).reshape(-1)


def is_mpi(comm: object) -> bool:
    """Whether `comm` is a communicator of mpi4py; the check does not import mpi4py."""
    return any(cls.__module__.partition(".")[0] == "mpi4py" for cls in type(comm).__mro__)
