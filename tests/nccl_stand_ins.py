"""Stand-ins for communicators of NCCL: what ranks exchange are bytes in host memory."""

import collections
import contextlib
import ctypes
import threading
import types
from typing import Any

import numpy as np


def memory(pointer: int, count: int) -> np.ndarray:
    """The bytes at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(pointer))


class Group:
    """What a rank asked for at once, as a kernel of NCCL does it: it is over once all of its messages have come."""

    def __init__(self, rank: int, stream: int) -> None:
        self.rank, self.stream, self.missing = rank, stream, 0

    @property
    def is_over(self) -> bool:
        return self.missing == 0


class Wires:
    """What devices exchange: bytes by sender and receiver, which are in a group each."""

    def __init__(self, *, waits: bool = True) -> None:
        """If it `waits`, the host waits at the end of a group until all of its messages have come."""
        self.waits = waits
        self.changed = threading.Condition()
        self.messages: dict[Any, Any] = collections.defaultdict(collections.deque)
        self.wanted: dict[Any, Any] = collections.defaultdict(collections.deque)
        self.groups: dict[int, list[Group]] = collections.defaultdict(list)  # by rank
        self.of_thread = threading.local()

    def module(self) -> Any:
        """`cupy.cuda.nccl`."""
        found: Any = types.ModuleType("cupy.cuda.nccl")
        found.groupStart, found.groupEnd, found.NCCL_UINT8 = self.start, self.end, "uint8"
        return found

    def launching(self, rank: int) -> Any:
        """A context in which the kernel of a group is launched."""
        return contextlib.nullcontext()

    def start(self) -> None:
        self.of_thread.calls = []

    def end(self) -> None:
        calls, self.of_thread.calls = self.of_thread.calls, None
        if not calls:
            return
        group = Group(calls[0][1].rank, calls[0][-1])
        with self.launching(group.rank), self.changed:
            self.groups[group.rank].append(group)
            for what, comm, pointer, count, peer, _ in calls:
                here, there = (self.messages, self.wanted) if what == "send" else (self.wanted, self.messages)
                pair = (comm.rank, peer) if what == "send" else (peer, comm.rank)
                if there[pair]:
                    of_other, other, length = there[pair].popleft()
                    assert length == count
                    target, source = (other, pointer) if what == "send" else (pointer, other)
                    memory(target, count)[...] = memory(source, count)
                    of_other.missing -= 1
                else:
                    group.missing += 1
                    here[pair].append((group, pointer, count))
            self.changed.notify_all()
            if self.waits:
                assert self.changed.wait_for(lambda: group.is_over, timeout=10)

    def under_way(self, rank: int) -> list[Group]:
        """The groups of a rank that are not over."""
        return [group for group in self.groups[rank] if not group.is_over]


class NcclCommunicator:
    """As CuPy's: what is asked for within a group happens at its end."""

    __module__ = "cupy_backends.cuda.libs.nccl"

    def __init__(self, rank: int, size: int, wires: Wires) -> None:
        self.rank, self.ranks, self.wires, self.aborted = rank, size, wires, False

    def rank_id(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.ranks

    def abort(self) -> None:
        assert not self.aborted
        self.aborted = True

    def send(self, *what: Any) -> None:
        self._ask("send", *what)

    def recv(self, *what: Any) -> None:
        self._ask("recv", *what)

    def _ask(self, what: str, pointer: int, count: int, datatype: str, peer: int, stream: int) -> None:
        assert datatype == "uint8"
        self.wires.of_thread.calls.append((what, self, pointer, count, peer, stream))


def communicators(ranks: int, wires: Wires) -> list[NcclCommunicator]:
    """One for each rank, as `NcclCommunicator.initAll` makes them."""
    return [NcclCommunicator(rank, ranks, wires) for rank in range(ranks)]
