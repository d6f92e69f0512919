"""How rows get from rank to rank: thin layers with one protocol over libraries that move data.

All ranks call `all_gather`, and then `start` and `finish`, in the same order. Between two ranks, arrays arrive in the
order in which they were sent. A message that does not arrive in time raises TimeoutError, and one from a rank that
failed raises RuntimeError. After that nothing is known of the messages under way, and the communicator cannot be used
any more.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.arrays.checks import as_integer, value_error
from cuflash.arrays.dlpack import module_of

LONGEST_TIMEOUT = threading.TIMEOUT_MAX / 2  # in seconds, with room for what is added to a timeout
HIGHEST_PRIORITY = -100  # of a stream; CUDA replaces it by the highest priority that the device has
Array = Any
Message = tuple[int, Array]  # the rank at the other end, and a C-contiguous array


class Transport(ABC):
    """What `ContextParallel` needs of a communicator.

    Attributes
    ----------
    rank, size : int
        The number of this rank, and the number of ranks.
    goes_into_graphs : bool
        Whether a CUDA graph can hold what `start` and `finish` do.
    gathers_meanwhile : bool
        Whether what `begin_all_gather` began goes on while this rank computes.

    See Also
    --------
    Mpi, threads : Transports that are there.
    ContextParallel
    """

    rank: int
    size: int
    goes_into_graphs = False  # whether a CUDA graph can hold what `start` and `finish` do
    gathers_meanwhile = False  # whether what `begin_all_gather` began goes on while this rank computes

    @abstractmethod
    def all_gather(self, payload: bytes, timeout: float) -> list[bytes]:
        """What each rank says, by rank: a few bytes, through host memory.

        Parameters
        ----------
        payload : bytes
            What this rank says, of any length.
        timeout : float
            Seconds to wait for other ranks.

        Returns
        -------
        list of bytes
            That of rank r is at index r.

        Raises
        ------
        RuntimeError
            Another rank has failed; the message holds its error.
        TimeoutError
            A rank did not respond in time.

        See Also
        --------
        begin_all_gather
        start : For arrays.
        """

    def begin_all_gather(self, payload: bytes, timeout: float) -> Callable[[], list[bytes]]:
        """Begin to `all_gather`; returns a function that waits for the result.

        Parameters
        ----------
        payload : bytes
            What this rank says, of any length.
        timeout : float
            Seconds to wait for other ranks.

        Returns
        -------
        callable
            Without arguments; it waits, and returns what `all_gather` does.

        Raises
        ------
        RuntimeError
            Another rank has failed; the message holds its error.
        TimeoutError
            A rank did not respond in time. Both may come from the function that is returned.

        See Also
        --------
        all_gather
        """
        return functools.partial(self.all_gather, payload, timeout)

    @abstractmethod
    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        """Begin to send arrays, which must not change until `finish`, and to receive into others.

        Parameters
        ----------
        sends, receives : sequence of (int, array)
            The other rank, and a C-contiguous NumPy or CuPy array. Between two ranks the order is the same on both.

        Returns
        -------
        object
            What `finish` takes.

        Raises
        ------
        RuntimeError
            Another rank has failed; the message holds its error.

        See Also
        --------
        finish
        barrier
        """

    @abstractmethod
    def finish(self, pending: Any, timeout: float) -> None:
        """Wait for what `start` began; with CuPy arrays, the current stream waits instead of the host, if it can.

        Parameters
        ----------
        pending : object
            What `start` returned.
        timeout : float
            Seconds to wait for other ranks.

        Raises
        ------
        RuntimeError
            Another rank has failed; the message holds its error.
        TimeoutError
            A rank did not respond in time.

        See Also
        --------
        start
        """

    def barrier(self, timeout: float) -> None:  # noqa: B027 (most transports need no such wait)
        """Wait for the ranks of this process, if rows on their way may make CUDA wait in a call of another rank.

        Each rank calls this before its first `start` in a call, once it has loaded all kernels and allocated all
        memory, and after its last one. So no rank does such things while rows of another one wait for its own.

        Parameters
        ----------
        timeout : float
            Seconds to wait for other ranks.

        Raises
        ------
        RuntimeError
            Another rank has failed; the message holds its error.
        TimeoutError
            A rank did not respond in time.

        See Also
        --------
        start
        """

    def fail(self, rank: int, message: str) -> None:  # noqa: B027 (without it the others wait until their timeout)
        """Tell the others that this rank, or another one, has failed, so that they stop waiting.

        Parameters
        ----------
        rank : int
            The rank that has failed.
        message : str
            Its error.

        See Also
        --------
        all_gather
        """


def out_of_time(what: str, timeout: float, silent: Iterable[int] = ()) -> TimeoutError:
    """The error of a rank that waited in vain, with the silent ranks, if it knows them."""
    ranks = sorted(set(silent))
    named = f" from rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    who = "a rank" if not ranks else "it" if len(ranks) == 1 else "they"
    return TimeoutError(f"{what}: got nothing{named} within timeout={timeout:g} seconds; {who} may have failed or left")


class RankFailed(RuntimeError):
    """Raised on a rank after another rank has failed."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.rank, self.message = rank, message


class NoTransfers(Transport):
    """The transport of a warm-up run: no rows are exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, payload: bytes, timeout: float) -> list[bytes]:
        return [payload] * self.size

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        pass

    def finish(self, pending: Any, timeout: float) -> None:
        pass


class Progress:
    """A thread that runs jobs one after the other: it moves rows while the calling thread computes."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "cuflash")
        self.is_over = threading.Event()  # set once no thread waits for the jobs any more

    def run(self, job: Callable[..., Any], *args: Any) -> Any:
        """Run a job; a job that waits for other ranks has to look at `is_over`."""
        self.check()
        return self._pool.submit(job, *args)

    def check(self) -> None:
        """Raise RuntimeError after a failure."""
        if self.is_over.is_set():
            raise RuntimeError("comm: got a communicator after a call that failed, expected a new one")

    def result(self, pending: Any, what: str, timeout: float, silent: Callable[[], Iterable[int]]) -> Any:
        """Wait for a job, and return its result; `silent` tells which ranks it waits for."""
        try:
            return pending.result(timeout)
        except concurrent.futures.TimeoutError:
            ranks = list(silent())
            self.is_over.set()
            raise out_of_time(what, timeout, ranks) from None

    def stop(self) -> None:
        """Let all jobs end, and wait until they have."""
        self.is_over.set()
        self._pool.shutdown(cancel_futures=True)


@dataclass(eq=False)
class _Parcel:
    """An array under way, and a queue by which its receiver says that it has copied it."""

    target: int
    array: Array
    ready: Any  # an event on the sender's stream; None in host memory
    taken: deque[Any]
    is_taken_out: bool = False  # whether the receiver has begun to copy it


@dataclass(eq=False)
class _Arrivals:
    """Arrays that other ranks send, with events after their last use before, and events after the copies so far."""

    expected: list[tuple[int, Array, Any]]
    copied: list[Any]


class _Switchboard:
    """The state that the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()  # Ctrl-C may come within the methods of a condition, but not within these
        self.changed = threading.Condition(self.lock)
        self.said: dict[int, dict[int, bytes]] = {}  # by call and rank
        self.heard: dict[int, int] = {}  # by call, how many ranks have read all payloads
        self.failed: dict[int, str] = {}  # by rank
        self.under_way: dict[tuple[int, int], deque[_Parcel]] = {
            (source, target): deque() for source in range(size) for target in range(size)
        }

    def wait(self, silent: Callable[[], Collection[int]], what: str, timeout: float, over: threading.Event) -> None:
        """Wait, with the lock held, until no rank is `silent`, a rank has failed, or the wait is `over`."""
        self.changed.wait_for(lambda: not silent() or self.failed or over.is_set(), timeout)
        if ranks := silent():
            self.check()
            raise out_of_time(what, timeout, ranks)

    def check(self) -> None:
        """Raise RankFailed if a rank has failed."""
        if self.failed:
            raise RankFailed(*next(iter(self.failed.items())))


class Threads(Transport):
    """A rank that is a thread of this process, with NumPy arrays, or with CuPy arrays on a device of its own.

    CUDA copies between devices, directly if they are peers, on a stream for copies only. Events order the copies, so
    the host waits for the device of neither rank.
    """

    def __init__(self, rank: int, size: int, switchboard: _Switchboard) -> None:
        self.rank, self.size = rank, size
        self._board = switchboard
        self._calls = 0
        self._progress = Progress()
        self._stream: Any = None
        self._parcels: list[_Parcel] = []  # those that were sent since the last `finish`
        self._arrivals: list[_Arrivals] = []

    def all_gather(self, payload: bytes, timeout: float) -> list[bytes]:
        board, call = self._board, self._calls
        board.check()
        self._progress.check()
        self._calls += 1
        with board.lock:
            said = board.said.setdefault(call, {})
            said[self.rank] = payload
            board.changed.notify_all()
            board.wait(lambda: set(range(self.size)) - said.keys(), "what other ranks say", timeout, self._is_over)
            board.heard[call] = board.heard.get(call, 0) + 1
            if board.heard[call] == self.size:
                del board.heard[call], board.said[call]
            return [said[rank] for rank in range(self.size)]

    @property
    def _is_over(self) -> threading.Event:
        return self._progress.is_over

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        parcels = [_Parcel(target, array, _recorded(array), deque()) for target, array in sends]
        arrivals = _Arrivals([(source, array, _recorded(array)) for source, array in receives], [])
        self._parcels += parcels
        self._arrivals.append(arrivals)
        with self._board.lock:
            for parcel in parcels:
                self._board.under_way[self.rank, parcel.target].append(parcel)
            self._board.changed.notify_all()
        return parcels, arrivals, self._progress.run(self._receive, arrivals)

    def finish(self, pending: Any, timeout: float) -> None:
        parcels, arrivals, receiving = pending
        try:
            self._progress.result(receiving, "rows of other ranks", timeout, lambda: self._silent_in(arrivals))
            for arrived in arrivals.copied:
                _wait_for(arrived)
            with self._board.lock:
                self._board.wait(lambda: _waiting(parcels), "a receiver of rows", timeout, self._is_over)
        except TimeoutError:
            self._end()
            raise
        for parcel in parcels:
            _wait_for(parcel.taken[0])
            self._parcels.remove(parcel)
        self._arrivals.remove(arrivals)

    def fail(self, rank: int, message: str) -> None:
        with self._board.lock:
            self._board.failed.setdefault(rank, message)
            self._board.changed.notify_all()
        self._end()

    def _end(self) -> None:
        """Give up what is under way: after that no thread and no device uses the arrays of this rank."""
        with self._board.lock:
            self._is_over.set()
            for target in range(self.size):
                self._board.under_way[self.rank, target].clear()
            self._board.changed.notify_all()
        self._progress.stop()
        for parcel in self._parcels:
            with self._board.lock:
                if parcel.is_taken_out:
                    self._board.changed.wait_for(functools.partial(bool, parcel.taken))
            for event in parcel.taken:
                _wait_for(event)
        for arrivals in self._arrivals:
            for event in arrivals.copied:
                _wait_for(event)

    def _silent_in(self, arrivals: _Arrivals) -> list[int]:
        """The ranks that have not sent what this rank waits for."""
        missing = arrivals.expected[len(arrivals.copied) :]
        return [rank for source, *_ in missing for rank in _silent(source, self._board.under_way[source, self.rank])]

    def _receive(self, arrivals: _Arrivals) -> None:
        """Copy arrays as they are sent, and keep an event after each copy."""
        for source, array, is_free in arrivals.expected:
            queue = self._board.under_way[source, self.rank]
            silent = functools.partial(_silent, source, queue)
            with self._board.lock:
                self._board.wait(silent, "rows of other ranks", threading.TIMEOUT_MAX, self._is_over)
                parcel = queue.popleft()
                parcel.is_taken_out = True
            arrived = None
            try:
                arrived = self._copy(parcel, array, is_free)
                arrivals.copied.append(arrived)
            finally:  # the sender waits for it, also where this rank fails
                with self._board.lock:
                    parcel.taken.append(arrived)
                    self._board.changed.notify_all()

    def _copy(self, parcel: _Parcel, array: Array, is_free: Any) -> Any:
        """Copy between two ranks, on the device of the receiver; returns an event after the copy."""
        if isinstance(array, np.ndarray):
            array[...] = parcel.array
            return None
        cupy = module_of(array)
        with array.device:
            self._stream = self._stream or cupy.cuda.Stream(non_blocking=True)
            for event in (parcel.ready, is_free):
                self._stream.wait_event(event)
            array.data.copy_from_device_async(parcel.array.data, array.nbytes, self._stream)
            arrived = cupy.cuda.Event(disable_timing=True)
            arrived.record(self._stream)
        return arrived


def threads(ranks: int) -> list[Threads]:
    """Communicators for ranks that are threads of this process, one for each thread.

    Parameters
    ----------
    ranks : int
        How many, 1 or more.

    Returns
    -------
    list of Threads
        The communicator of rank r is at index r. Only one thread may use it.

    Raises
    ------
    TypeError, ValueError
        `ranks` is no integer, or below 1.

    See Also
    --------
    Mpi : Ranks that are processes.
    ContextParallel

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


def _silent(rank: int, queue: Collection[Any]) -> list[int]:
    """The rank, if nothing is in the queue of what it sends."""
    return [] if queue else [rank]


def _waiting(parcels: Iterable[_Parcel]) -> list[int]:
    """The ranks that have not copied what was sent to them."""
    return [parcel.target for parcel in parcels if not parcel.taken]


def _recorded(array: Array) -> Any:
    """An event after the work so far on the current stream of the array's device; None in host memory."""
    if isinstance(array, np.ndarray):
        return None
    cupy = module_of(array)
    with array.device:
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
    return event


def _wait_for(event: Any) -> None:
    """Let the current stream of the current device wait for an event of any device."""
    if event is not None:
        import cupy

        cupy.cuda.get_current_stream().wait_event(event)
