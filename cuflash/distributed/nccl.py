"""NCCL between devices: by the communicators of CuPy, of `cupyx.distributed` and of nccl4py, whichever the user has."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuflash.distributed.transports import HIGHEST_PRIORITY, Array, Message, Transport, out_of_time

_LENGTH = 8  # bytes that say how many follow
_AT_ONCE = 8192  # bytes that ranks exchange first; most calls take no more to tell of


def is_nccl(comm: object) -> bool:
    """Whether it is a communicator of NCCL; nothing is imported for that."""
    names = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(comm).__mro__}
    known = {("nccl", "Communicator"), ("cupyx", "NCCLBackend")}
    known |= {(module, "NcclCommunicator") for module in ("cupy", "cupy_backends")}
    return bool(names & known)


class Nccl(Transport):
    """A rank of NCCL: CuPy arrays of the device that is current when it is made.

    Rows travel on a stream of their own, after what the current stream did before and beside what it does until it
    waits for them. The host waits for what ranks say of their calls, and for nothing else; where that does not come in
    time the communicator is aborted.
    """

    goes_into_graphs = True

    def __init__(self, comm: Any) -> None:
        self._cupy = cupy = importlib.import_module("cupy")
        self.rank, self.size, self._send, self._receive, self._group, self._abort = _functions(comm)
        self._device = cupy.cuda.Device()
        # NCCL moves rows by blocks on multiprocessors. One that is free goes to them, and not to the next attention.
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=HIGHEST_PRIORITY)

    def share(self, text: bytes, timeout: float) -> list[bytes]:
        said = len(text).to_bytes(_LENGTH, "little") + text
        heard = self._gather(said[:_AT_ONCE].ljust(_AT_ONCE, b"\0"), timeout)
        ends = [_LENGTH + int.from_bytes(row[:_LENGTH], "little") for row in heard]
        if max(ends) > _AT_ONCE:
            rest = self._gather(said[_AT_ONCE:].ljust(max(ends) - _AT_ONCE, b"\0"), timeout)
            heard = [first + more for first, more in zip(heard, rest, strict=True)]
        return [row[_LENGTH:end] for row, end in zip(heard, ends, strict=True)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        cupy, ready = self._cupy, self._cupy.cuda.Event(disable_timing=True)
        ready.record()
        self._stream.wait_event(ready)
        with self._group():
            for target, array in sends:
                self._send(_bytes(array), target, self._stream)
            for source, array in receives:
                self._receive(_bytes(array), source, self._stream)
        arrived = cupy.cuda.Event(disable_timing=True)
        arrived.record(self._stream)
        return arrived, sends, receives  # the arrays live until the current stream has waited

    def finish(self, pending: Any, timeout: float) -> None:
        self._cupy.cuda.get_current_stream().wait_event(pending[0])

    def fail(self, rank: int, text: str) -> None:
        self._abort()

    def _gather(self, own: bytes, timeout: float) -> list[bytes]:
        """What each rank gives, as many bytes as this one."""
        cupy = self._cupy
        with self._device, self._stream:  # what is computed meanwhile is not waited for
            on_device = cupy.empty((self.size, len(own)), np.uint8)
            on_device[self.rank].set(np.frombuffer(own, np.uint8))
            others = [rank for rank in range(self.size) if rank != self.rank]
            sends, receives = [(r, on_device[self.rank]) for r in others], [(r, on_device[r]) for r in others]
            arrived, *_ = pending = self.start(sends, receives)
            deadline = time.monotonic() + timeout
            while not arrived.done:
                if time.monotonic() > deadline:
                    self._abort()
                    raise out_of_time("what other ranks say", timeout)
                time.sleep(1e-5)
            self.finish(pending, timeout)
            return [row.tobytes() for row in cupy.asnumpy(on_device)]


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _functions(comm: Any) -> tuple[int, int, Callable, Callable, Callable, Callable]:
    """Rank, size, and how to send, to receive, to do several of both at once, and to give up."""
    if type(comm).__module__.partition(".")[0] == "nccl":
        group = importlib.import_module("nccl.core").group

        def send_by_nccl4py(array: Array, peer: int, stream: Any) -> None:
            comm.send(array, peer, stream=stream)

        def receive_by_nccl4py(array: Array, peer: int, stream: Any) -> None:
            comm.recv(array, peer, stream=stream)

        return comm.rank, comm.nranks, send_by_nccl4py, receive_by_nccl4py, group, comm.abort

    nccl = importlib.import_module("cupy.cuda.nccl")
    comm = getattr(comm, "_comm", comm)  # that of cupyx.distributed has CuPy's

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
