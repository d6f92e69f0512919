"""How rows get from rank to rank: thin layers over engines that do it, with one protocol.

All ranks call `share`, and then `start` and `finish`, in the same order. Between two ranks, arrays arrive in the order
in which they were sent. Whatever does not arrive in time raises TimeoutError, and what a rank that failed was to send
RuntimeError: after that nothing is known of the messages that are under way, and the communicator is of no more use.
"""

from __future__ import annotations

import functools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.interop import module_of
from cuflash.values import as_integer, value_error

Array = Any
Message = tuple[int, Array]  # the rank at the other end, and a C-contiguous array


class Transport(ABC):
    """What `ContextParallel` asks of a communicator."""

    rank: int
    size: int

    @abstractmethod
    def share(self, text: bytes, timeout: float) -> list[bytes]:
        """What each rank says, by rank: a few bytes, through host memory."""

    @abstractmethod
    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        """Begin to send arrays, which stay as they are until `finish`, and to receive into others."""

    @abstractmethod
    def finish(self, pending: Any, timeout: float) -> None:
        """Wait for what `start` began: on CuPy arrays, let the current stream wait, and not the host, where it can."""

    def fail(self, text: str) -> None:  # noqa: B027 (others then wait until their time is over)
        """Say that this rank has failed, so that others wait no longer."""


def out_of_time(what: str, timeout: float) -> TimeoutError:
    return TimeoutError(f"{what}: got nothing within timeout={timeout:g} seconds; a rank may have failed or left")


def failed(rank: int, text: str) -> RuntimeError:
    return RuntimeError(f"rank {rank} failed: {text}")


class _Parcel(NamedTuple):
    """An array on its way, and how its receiver says that it was copied."""

    array: Array
    ready: Any  # an event on the sender's stream; None in host memory
    taken: deque[Any]


class _Switchboard:
    """What the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.said: dict[int, dict[int, bytes]] = {}  # by call and rank
        self.heard: dict[int, int] = {}  # how many ranks have heard it
        self.failed: dict[int, str] = {}  # by rank
        self.under_way: dict[tuple[int, int], deque[_Parcel]] = {
            (source, target): deque() for source in range(size) for target in range(size)
        }

    def wait(self, is_there: Callable[[], bool], what: str, deadline: float, timeout: float) -> None:
        """Wait, with the lock held."""
        if not self.changed.wait_for(lambda: is_there() or self.failed, deadline - time.monotonic()):
            raise out_of_time(what, timeout)
        if not is_there():
            raise failed(*next(iter(self.failed.items())))


class Threads(Transport):
    """A rank that is a thread of this process, with NumPy arrays, or with CuPy arrays on a device of its own.

    Copies between devices are those of CUDA, directly where the devices are peers. They are ordered by events: the
    device of neither rank is waited for.
    """

    def __init__(self, rank: int, size: int, switchboard: _Switchboard) -> None:
        self.rank, self.size = rank, size
        self._board = switchboard
        self._calls = 0

    def share(self, text: bytes, timeout: float) -> list[bytes]:
        board, call = self._board, self._calls
        self._calls += 1
        with board.changed:
            said = board.said.setdefault(call, {})
            said[self.rank] = text
            board.changed.notify_all()
            deadline = time.monotonic() + timeout
            board.wait(lambda: len(said) == self.size, "what other ranks say", deadline, timeout)
            board.heard[call] = board.heard.get(call, 0) + 1
            if board.heard[call] == self.size:
                del board.heard[call], board.said[call]
            return [said[rank] for rank in range(self.size)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        parcels = []
        for target, array in sends:
            parcel = _Parcel(array, _recorded(array), deque())
            parcels.append(parcel)
            with self._board.changed:
                self._board.under_way[self.rank, target].append(parcel)
                self._board.changed.notify_all()
        return parcels, receives

    def finish(self, pending: Any, timeout: float) -> None:
        parcels, receives = pending
        board, deadline = self._board, time.monotonic() + timeout
        for source, array in receives:
            queue = board.under_way[source, self.rank]
            with board.changed:
                board.wait(functools.partial(bool, queue), f"rows of rank {source}", deadline, timeout)
                parcel = queue.popleft()
            _copy(parcel, array)
            with board.changed:
                parcel.taken.append(_recorded(array))
                board.changed.notify_all()
        for parcel in parcels:
            with board.changed:
                board.wait(functools.partial(bool, parcel.taken), "a receiver", deadline, timeout)
            _wait_for(parcel.taken[0])

    def fail(self, text: str) -> None:
        with self._board.changed:
            self._board.failed[self.rank] = text
            self._board.changed.notify_all()


def threads(ranks: int) -> list[Threads]:
    """Communicators for so many threads of this process, one for each.

    Parameters
    ----------
    ranks : int

    Returns
    -------
    list of Threads
        That of rank r at place r. Each is used by one thread.

    Raises
    ------
    TypeError, ValueError
        No integer, or no rank.

    Examples
    --------
    >>> import cuflash.distributed as cd
    >>> [comm.rank for comm in cd.threads(2)]
    [0, 1]
    """
    size = as_integer("ranks", ranks)
    if size < 1:
        raise value_error("ranks", ranks, "an integer >= 1")
    board = _Switchboard(size)
    return [Threads(rank, size, board) for rank in range(size)]


def _recorded(array: Array) -> Any:
    """An event after what the current stream of the array's device does to it; None in host memory."""
    if isinstance(array, np.ndarray):
        return None
    cupy = module_of(array)
    with array.device:
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
    return event


def _wait_for(event: Any) -> None:
    """Let the current stream of the current device wait for an event, of whichever device."""
    if event is not None:
        import cupy

        cupy.cuda.get_current_stream().wait_event(event)


def _copy(parcel: _Parcel, array: Array) -> None:
    """Copy between two ranks, where the array lies that is written to."""
    if isinstance(array, np.ndarray):
        array[...] = parcel.array
        return
    cupy = module_of(array)
    with array.device:
        stream = cupy.cuda.get_current_stream()
        stream.wait_event(parcel.ready)
        array.data.copy_from_device_async(parcel.array.data, array.nbytes, stream)
