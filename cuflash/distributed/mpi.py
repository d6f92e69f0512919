"""MPI between processes, by mpi4py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.distributed.transports import Array, Message, Transport, failed, out_of_time
from cuflash.interop import module_of
from cuflash.values import type_error


class Mpi(Transport):
    """A rank of MPI, by mpi4py.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        It is duplicated, which is collective: messages of others are never taken for ours.
    cuda_aware : bool, default False
        Whether the MPI takes addresses of device memory. Otherwise CuPy arrays go through pinned host memory.

    Raises
    ------
    TypeError
        Not a communicator of mpi4py.
    """

    def __init__(self, comm: Any, *, cuda_aware: bool = False) -> None:
        if not is_mpi(comm):
            raise type_error("comm", type(comm).__name__, "a communicator of mpi4py")
        self._comm, self._alarm = comm.Dup(), comm.Dup()  # of rows, and of what ranks that fail say
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._cuda_aware = cuda_aware
        self._told: list[Any] = []  # messages that this rank has failed, on their way

    def share(self, text: bytes, timeout: float) -> list[bytes]:
        deadline = time.monotonic() + timeout
        own, lengths = np.array([len(text)], np.int64), np.empty(self.size, np.int64)
        self._wait([self._comm.Iallgather(own, lengths)], "what other ranks say", deadline, timeout)
        longest = int(lengths.max(initial=0))
        padded = np.frombuffer(text.ljust(longest, b"\0"), np.uint8)
        said = np.empty((self.size, longest), np.uint8)
        self._wait([self._comm.Iallgather(padded, said)], "what other ranks say", deadline, timeout)
        return [row[:length].tobytes() for row, length in zip(said, lengths, strict=True)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        into = [(source, array, self._buffer(array)) for source, array in receives]
        requests = [self._comm.Irecv(buffer, source) for source, _, buffer in into]
        outgoing = [(target, self._buffer(array, is_sent=True)) for target, array in sends]
        if any(not isinstance(array, np.ndarray) for _, array in sends):
            module_of(sends[0][1]).cuda.get_current_stream().synchronize()  # MPI knows no streams
        requests += [self._comm.Isend(buffer, target) for target, buffer in outgoing]
        return requests, into, outgoing

    def finish(self, pending: Any, timeout: float) -> None:
        requests, into, _ = pending
        self._wait(requests, "rows of other ranks", time.monotonic() + timeout, timeout)
        for _, array, buffer in into:
            if not isinstance(array, np.ndarray) and not self._cuda_aware:
                array.view(np.uint8).reshape(-1).set(buffer)

    def fail(self, text: str) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._told += [self._alarm.isend(text, rank) for rank in others]

    def _buffer(self, array: Array, *, is_sent: bool = False) -> Any:
        """The bytes of an array, as MPI takes them: of a CuPy array those on the device, or pinned memory for them."""
        if isinstance(array, np.ndarray) or self._cuda_aware:
            return array.view(np.uint8).reshape(-1)
        cupy = module_of(array)
        memory = cupy.cuda.alloc_pinned_memory(array.nbytes)
        buffer = np.frombuffer(memory, np.uint8, array.nbytes)
        if is_sent:
            array.view(np.uint8).reshape(-1).get(out=buffer, blocking=False)
        return buffer

    def _wait(self, requests: list[Any], what: str, deadline: float, timeout: float) -> None:
        pause = 1e-6
        waiting = list(requests)
        while waiting:
            waiting = [request for request in waiting if not request.Test()]
            if waiting and time.monotonic() > deadline:
                raise out_of_time(what, timeout)
            for rank in range(self.size) if waiting else ():
                if self._alarm.iprobe(rank):
                    raise failed(rank, self._alarm.recv(source=rank))
            if waiting:
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)


def is_mpi(comm: object) -> bool:
    """Whether it is a communicator of mpi4py, which is not imported for that."""
    return any(cls.__module__.partition(".")[0] == "mpi4py" for cls in type(comm).__mro__)
