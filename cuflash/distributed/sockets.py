"""TCP between processes, for NumPy arrays where there is no MPI: workers of Dask and Ray, or what else starts them."""

from __future__ import annotations

import contextlib
import functools
import json
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuflash.distributed.transports import Array, Message, Progress, RankFailed, Transport, out_of_time
from cuflash.values import as_integer, type_error, typed, value_error

Address = tuple[str, int]
_HEAD = struct.Struct("!cQ")  # of a message: its kind, and how many bytes follow
_ROWS, _FAILED = b"+", b"!"
_PAUSE = 0.1  # seconds, after which a thread that waits looks whether anybody waits for it


class Sockets(Transport):
    """A rank that is a process, joined to all others by TCP; made once all of them are there.

    Parameters
    ----------
    address : (str, int)
        Host and port at which rank 0 listens, as the others reach it. What travels is neither encrypted nor signed.
    rank, size : int
        Which rank this process is, and how many there are.
    timeout : float, default 60.0
        Seconds after which a rank raises TimeoutError where others are missing.

    Raises
    ------
    TypeError, ValueError
        No address; a rank that there is not, or that is there already.
    TimeoutError
        Not all ranks came.

    Examples
    --------
    >>> import cuflash.distributed as cd
    >>> comm = cd.Sockets(("localhost", 0), rank=0, size=1)
    >>> comm.rank, comm.size
    (0, 1)
    """

    def __init__(self, address: Address, rank: int, size: int, *, timeout: float = 60.0) -> None:
        if not isinstance(address, (tuple, list)) or len(address) != 2 or not isinstance(address[0], str):
            raise type_error("address", typed(address), "(host, port)")
        where = address[0], as_integer("port", address[1])
        self.rank, self.size = as_integer("rank", rank), as_integer("size", size)
        if not 0 <= self.rank < self.size:
            raise value_error("rank", rank, f"0 to size - 1 = {self.size - 1}")
        self._peers = _Meeting(self.rank, self.size, timeout).peers(where) if self.size > 1 else {}
        # Each goes through its messages in the order of ranks: so no two ranks wait for one another.
        self._sending, self._receiving = Progress(), Progress()

    def share(self, text: bytes, timeout: float) -> list[bytes]:
        others = list(self._peers)
        sent = self._sending.run(self._send, [(rank, np.frombuffer(text, np.uint8)) for rank in others])
        heard = self._receiving.run(lambda: {rank: self._next(rank) for rank in others})
        said = self._receiving.result(heard, "what other ranks say", timeout)
        self._sending.result(sent, "what other ranks say", timeout)
        return [text if rank == self.rank else said[rank] for rank in range(self.size)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        for _, array in (*sends, *receives):
            if not isinstance(array, np.ndarray):
                remedy = "NumPy arrays: those of devices need a communicator of NCCL"
                raise NotImplementedError(
                    f"comm: got Sockets for {type(array).__name__} of a device, expected {remedy}"
                )
        return self._sending.run(self._send, sends), self._receiving.run(self._receive, receives)

    def finish(self, pending: Any, timeout: float) -> None:
        sent, received = pending
        self._receiving.result(received, "rows of other ranks", timeout)
        self._sending.result(sent, "a receiver", timeout)

    def fail(self, rank: int, text: str) -> None:
        said = np.frombuffer(json.dumps([rank, text]).encode(), np.uint8)
        told = self._sending.run(self._send, [(other, said) for other in self._peers], _FAILED)
        with contextlib.suppress(RankFailed, TimeoutError):
            self._sending.result(told, "a receiver", 1.0)
        self._receiving.is_over.set()

    def _send(self, messages: Sequence[Message], kind: bytes = _ROWS) -> None:
        """Send all that can be sent: that one rank is gone must not keep others waiting."""
        failure = None
        for rank, array in messages:
            try:
                with _taken_for_failures(rank):
                    for data in (_HEAD.pack(kind, array.nbytes), _bytes(array)):
                        _write(self._peers[rank], data, self._sending.is_over.is_set)
            except RankFailed as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _receive(self, messages: Sequence[Message]) -> None:
        for rank, array in messages:
            self._next(rank, _bytes(array))

    def _next(self, rank: int, into: Array | None = None) -> bytes:
        """The next message of a rank, which may say that it failed; in an array, if there is one."""
        read = functools.partial(_read, self._peers[rank], is_over=self._receiving.is_over.is_set)
        with _taken_for_failures(rank):
            kind, size = _HEAD.unpack(read(bytearray(_HEAD.size)))
            if kind == _FAILED:
                raise RankFailed(*json.loads(read(bytearray(size))))
            return bytes(read(bytearray(size) if into is None else into))


class _Meeting:
    """How ranks find one another: rank 0 is where all know, and tells where the others are."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.deadline = time.monotonic() + timeout

    def peers(self, address: Address) -> dict[int, socket.socket]:
        """A connection to each other rank."""
        peers: dict[int, socket.socket] = {}
        if self.rank == 0:
            with socket.create_server(("", address[1])) as server:
                places = self.meet(server, peers, range(1, self.size))
            for peer in peers.values():
                self.say(peer, places)
        else:
            first = peers[0] = self.reach(address)
            host = first.getsockname()[0]
            with socket.create_server((host, 0)) as server:
                self.say(first, [self.rank, [host, server.getsockname()[1]]])
                places = self.hear(first)
                for other in range(1, self.rank):
                    peers[other] = self.reach(tuple(places[str(other)]))
                    self.say(peers[other], [self.rank, None])
                self.meet(server, peers, range(self.rank + 1, self.size))
        for peer in peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return dict(sorted(peers.items()))

    def meet(self, server: socket.socket, peers: dict[int, socket.socket], expected: range) -> dict[int, Any]:
        """Wait for ranks that come here; what each of them says."""
        said: dict[int, Any] = {}
        while said.keys() < set(expected):
            while not _is_ready(server, select.POLLIN):
                if self.is_late():
                    raise out_of_time(f"ranks {sorted(set(expected) - said.keys())}", self.timeout)
            peer = server.accept()[0]
            peer.setblocking(False)
            rank, place = self.hear(peer)
            if rank not in expected or rank in said:
                raise value_error("rank", rank, f"each of {expected[0]} to {expected[-1]} once")
            peers[rank], said[rank] = peer, place
        return said

    def reach(self, address: Any) -> socket.socket:
        """Connect to a rank, which may not be there yet."""
        while True:
            try:
                peer = socket.create_connection(address, max(self.deadline - time.monotonic(), _PAUSE))
            except OSError as error:
                if self.is_late():
                    raise out_of_time(f"the rank at {address[0]}:{address[1]} ({error})", self.timeout) from None
                time.sleep(_PAUSE)
            else:
                peer.setblocking(False)
                return peer

    def say(self, peer: socket.socket, what: Any) -> None:
        text = json.dumps(what).encode()
        _write(peer, _HEAD.pack(_ROWS, len(text)) + text, self.is_late)

    def hear(self, peer: socket.socket) -> Any:
        _, size = _HEAD.unpack(_read(peer, bytearray(_HEAD.size), self.is_late))
        return json.loads(_read(peer, bytearray(size), self.is_late))

    def is_late(self) -> bool:
        return time.monotonic() > self.deadline


def _bytes(array: Array) -> Array:
    return array.view(np.uint8).reshape(-1)


def _is_ready(peer: socket.socket, what: int) -> bool:
    """Whether a socket can be read from, or written to, soon."""
    poll = select.poll()
    poll.register(peer, what)
    return bool(poll.poll(1000 * _PAUSE))


def _write(peer: socket.socket, data: Any, is_over: Callable[[], bool]) -> None:
    """Send all bytes, unless nobody waits for that any more."""
    view = memoryview(data)
    while len(view):
        if _is_ready(peer, select.POLLOUT):
            view = view[peer.send(view) :]
        elif is_over():
            raise out_of_time("a receiver", 0)


def _read(peer: socket.socket, into: Any, is_over: Callable[[], bool]) -> Any:
    """Fill an array with the bytes that come, unless nobody waits for them any more."""
    view = memoryview(into)
    while len(view):
        if _is_ready(peer, select.POLLIN):
            count = peer.recv_into(view)
            if not count:
                raise ConnectionError("it closed its connection")
            view = view[count:]
        elif is_over():
            raise out_of_time("rows of other ranks", 0)
    return into


@contextlib.contextmanager
def _taken_for_failures(rank: int) -> Any:
    """Take a connection that is closed for a rank that failed."""
    try:
        yield
    except ConnectionError as error:
        raise RankFailed(rank, str(error)) from None
