"""MPI between processes, by mpi4py.

MPI knows no streams, and it moves rows only while it is called. So a thread of its own waits until rows are computed,
sends and receives them, and copies those that have to pass through host memory. Meanwhile the calling thread computes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from cuflash.arrays.cached import cached_property
from cuflash.arrays.checks import type_error
from cuflash.distributed.transports import Array, Message, Progress, RankFailed, Transport, out_of_time
from cuflash.shards.cuda import Cuda

_PAYLOAD, _ROWS = 1, 2  # tags of messages
Request = tuple[int, Any]  # the rank at the other end, and a request of MPI
Move = Callable[["float | None"], None]
_abandoned: list[Request] = []


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

    See Also
    --------
    threads : Ranks in one process.
    Transport : The protocol.
    ContextParallel : Takes a communicator of mpi4py, too.
    """

    def __init__(self, comm: Any, *, cuda_aware: bool = False) -> None:
        if not is_mpi(comm):
            raise type_error("comm", type(comm).__name__, "a communicator of mpi4py")
        self._mpi = mpi = importlib.import_module("mpi4py.MPI")
        self._comm, self._alarm = comm.Dup(), comm.Dup()  # for payloads and rows, and for messages of ranks that fail
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._cuda_aware = cuda_aware
        self._reports: list[Any] = []  # requests of sent messages that say which rank has failed
        self._failure: tuple[int, str] | None = None  # the rank that failed, and its error
        self._progress = Progress()
        # If only one thread may call MPI, the caller's thread moves the rows, when it needs them.
        self._has_threads = mpi.Query_thread() == mpi.THREAD_MULTIPLE

    def all_gather(self, payload: bytes, timeout: float) -> list[bytes]:
        self._check()
        self._progress.check()
        own, others = np.frombuffer(payload, np.uint8), [rank for rank in range(self.size) if rank != self.rank]
        requests = [(rank, self._comm.Isend(own, rank, _PAYLOAD)) for rank in others]
        said, unheard = {self.rank: own}, set(others)

        def silent() -> set[int]:
            status = self._mpi.Status()
            for rank in list(unheard):
                message = self._comm.Improbe(rank, _PAYLOAD, status)
                if message is not None:
                    said[rank] = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
                    requests.append((rank, message.Irecv(said[rank])))
                    unheard.discard(rank)
            return unheard | _unfinished(requests)

        with _keeping(requests):
            self._wait(silent, "what other ranks say", timeout)
        return [said[rank].tobytes() for rank in range(self.size)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        move, requests = self._prepared(sends, receives)
        return (self._progress.run(move, None) if self._has_threads else move), requests

    def finish(self, pending: Any, timeout: float) -> None:
        moving, requests = pending
        try:
            if self._has_threads:
                self._progress.result(moving, "rows of other ranks", timeout, lambda: [rank for rank, _ in requests])
            else:
                moving(timeout)
        except TimeoutError:
            self._end()
            raise

    def fail(self, rank: int, message: str) -> None:
        self._failure = self._failure or (rank, message)
        self._end()
        others = [other for other in range(self.size) if other != self.rank]
        self._reports += [self._alarm.isend((rank, message), other) for other in others]

    def _end(self) -> None:
        """Give up what is under way: after that no thread moves rows, and no device copies them."""
        self._progress.stop()
        if "_staging" in self.__dict__:
            device, stream = self._staging
            device.wait(device.mark(stream))

    def _prepared(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[Move, list[Request]]:
        """A function that moves rows, and a list of the messages that it waits for.

        Any thread may call the function, and once it returns, all streams may use the rows.
        """
        requests: list[Request] = []
        outgoing, incoming = ([(rank, _bytes(x)) for rank, x in messages] for messages in (sends, receives))
        others = [x for _, x in (*sends, *receives) if not isinstance(x, np.ndarray)]
        if not others:
            return functools.partial(self._move, outgoing, incoming, requests), requests
        device, stream = self._staging
        ready = device.mark(None)  # the arrays to send are written, and those to receive into are free
        if self._cuda_aware:
            return functools.partial(
                self._move_when, ready, others[0].device, outgoing, incoming, (), requests
            ), requests
        device.follow(stream, ready)
        to_send, to_receive = (
            [(rank, device.pinned(x.shape, x.dtype)) for rank, x in messages] for messages in (outgoing, incoming)
        )
        for (_, buffer), (_, x) in zip(to_send, outgoing, strict=True):
            device.copy(buffer, x, stream)
        arriving = [(x, buffer) for (_, buffer), (_, x) in zip(to_receive, incoming, strict=True)]
        copied = device.mark(stream)
        move = functools.partial(self._move_when, copied, others[0].device, to_send, to_receive, arriving, requests)
        return move, requests

    @cached_property
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
        requests: list[Request],
        timeout: float | None,
    ) -> None:
        """Move bytes once an event has come, and copy those that are `arriving` from host memory to the device."""
        device, stream = self._staging
        with of_arrays:
            device.wait(ready)
            self._move(sends, receives, requests, timeout)
            for target, buffer in arriving:
                device.copy(target, buffer, stream)
            device.wait(device.mark(stream))

    def _move(
        self, sends: list[Message], receives: list[Message], requests: list[Request], timeout: float | None
    ) -> None:
        """Send and receive bytes in memory that MPI takes."""
        requests += [(source, self._comm.Irecv(buffer, source, _ROWS)) for source, buffer in receives]
        requests += [(target, self._comm.Isend(buffer, target, _ROWS)) for target, buffer in sends]
        with _keeping(requests):
            self._wait(functools.partial(_unfinished, requests), "rows of other ranks", timeout)

    def _wait(self, silent: Callable[[], Collection[int]], what: str, timeout: float | None) -> None:
        """Wait until no rank is silent; without a timeout, until the caller gives up."""
        start, pause = time.monotonic(), 1e-6
        while ranks := silent():
            self._check()
            if self._progress.is_over.is_set() or (timeout is not None and time.monotonic() > start + timeout):
                raise out_of_time(what, timeout or 0, ranks)
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        self._check()

    def _check(self) -> None:
        """Raise RankFailed if a rank has failed."""
        alarm = None if self._failure else self._alarm.improbe(self._mpi.ANY_SOURCE)
        if alarm is not None:
            self._failure = alarm.recv()
        if self._failure:
            raise RankFailed(*self._failure)


def _unfinished(requests: list[Request]) -> set[int]:
    """The ranks of messages that are still under way; the others leave the list."""
    requests[:] = [(rank, request) for rank, request in requests if not request.Test()]
    return {rank for rank, _ in requests}


@contextlib.contextmanager
def _keeping(requests: list[Request]) -> Iterator[None]:
    """Keep the memory of messages that are still under way after a failure: MPI may read and write it at any time."""
    try:
        yield
    except BaseException:
        _abandoned.extend(requests)
        raise


def _bytes(array: Array) -> Array:
    return array.view(np.uint8).reshape(-1)


def is_mpi(comm: object) -> bool:
    """Whether `comm` is a communicator of mpi4py; the check does not import mpi4py."""
    return any(cls.__module__.partition(".")[0] == "mpi4py" for cls in type(comm).__mro__)
