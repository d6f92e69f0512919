"""How chunks get to the device and back: through two buffers for each array, on streams for copies only.

A chunk is copied while the device computes with the one before it. Pinned host memory is copied directly. CUDA copies
no other host memory asynchronously: threads copy it into two pinned buffers first, and results out of two such buffers.
If the queries are in host memory, too, chunks are views.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash.arrays.memory_ranges import Span, cut_evenly
from cuflash.cpu.jobs import available_cores
from cuflash.shards.cuda import Cuda

if TYPE_CHECKING:
    from typing import Self

Array = Any
Host = np.ndarray[Any, Any]
SMALLEST_BLOCK = 2**14  # bytes of contiguous host memory that are worth a copy of their own; smaller pieces are staged
MAX_THREADS = 8  # threads that copy within host memory


class Lane:
    """One array in host memory, and two buffers for its chunks on the device, with the same order of axes in memory."""

    def __init__(self, device: Cuda, array: Host, longest: int) -> None:
        self.array = array  # (batch, heads, rows, dim)
        self.order = lying(array)
        self.is_direct = is_direct(device, array)
        shape = self._shape(longest)
        self.buffers = [device.empty(shape, array.dtype) for _ in range(2)]
        self.staging = [] if self.is_direct else [device.pinned(shape, array.dtype) for _ in range(2)]

    def in_buffer(self, number: int, span: Span) -> Array:
        """The view of a chunk on the device, as (batch, heads, rows, dim)."""
        return self._lying(self.buffers[number % 2], span).transpose(*np.argsort(self.order).tolist())

    def copy(self, device: Cuda, number: int, span: Span, stream: Any, *, to_device: bool) -> None:
        """Copy a chunk between the device and host memory, or the staging buffer if there is one."""
        for pair in self._blocks(number, span):
            target, source = pair if to_device else pair[::-1]
            device.copy(target, source, stream)

    def staged(self, number: int, span: Span) -> tuple[Host, Host]:
        """A chunk in host memory and its staging buffer, both as integers, which NumPy copies as they are."""
        bits = f"u{self.array.dtype.itemsize}"
        there = self.array[:, :, slice(*span)].transpose(self.order)
        return there.view(bits), self._lying(self.staging[number % 2], span).view(bits)

    @property
    def rows_axis(self) -> int:
        """The position of the axis of rows in memory order."""
        return self.order.index(2)

    def _blocks(self, number: int, span: Span) -> Iterator[tuple[Array, Host]]:
        """The contiguous pieces of a chunk, as pairs of views on the device and in host memory."""
        on_device = self._lying(self.buffers[number % 2], span)
        if on_device.size == 0:  # batch axes of length 0
            return
        if not self.is_direct:
            yield on_device, self._lying(self.staging[number % 2], span)
            return
        there = self.array[:, :, slice(*span)].transpose(self.order)
        outer = there.ndim - contiguous_axes(there)
        for index in np.ndindex(there.shape[:outer]):
            yield on_device[index], there[index]

    def _shape(self, rows: int) -> tuple[int, ...]:
        """The shape of a chunk, its axes in the order of memory."""
        shape = (*self.array.shape[:2], rows, self.array.shape[3])
        return tuple(shape[axis] for axis in self.order)

    def _lying(self, buffer: Array, span: Span) -> Array:
        """The part of a buffer that a chunk takes, contiguous."""
        shape = self._shape(span[1] - span[0])
        return buffer.reshape(-1)[: int(np.prod(shape))].reshape(shape)


class Workers:
    """Threads that copy within host memory."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        count = min(MAX_THREADS, available_cores())
        is_needed = any(not lane.is_direct for lane in lanes)
        self.pool = concurrent.futures.ThreadPoolExecutor(count) if is_needed else None
        self.count = count

    def copy(self, device: Cuda, pairs: Sequence[tuple[Lane, Host, Host]], after: Any) -> list[Any]:
        """Begin to copy the first array of each pair to the second one, after an event."""
        assert self.pool is not None

        def work(lane: Lane, source: Host, target: Host, rows: Span) -> None:
            if after is not None:
                device.wait(after)
            at = (slice(None),) * lane.rows_axis + (slice(*rows),)
            np.copyto(target[at], source[at])

        return [
            self.pool.submit(work, lane, source, target, rows)
            for lane, source, target in pairs
            for rows in cut_evenly(source.shape[lane.rows_axis], self.count)
        ]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


class Transfer:
    """Chunks of arrays between the host and two buffers on the device, on a stream of its own."""

    def __init__(self, device: Cuda, arrays: Mapping[str, Host], spans: Sequence[Span]) -> None:
        longest = max((stop - start for start, stop in spans), default=0)
        self.device, self.spans = device, spans
        self.lanes = {name: Lane(device, array, longest) for name, array in arrays.items()}
        self.staged = [lane for lane in self.lanes.values() if not lane.is_direct]
        self.workers = Workers(self.staged)
        self.stream = device.stream()

    def __enter__(self) -> Self:
        return self


class Feed(Transfer):
    """Gives chunks of arrays on the device, one after the other, while the next chunk is being copied.

    When this context is left, all copies from host memory are done.
    """

    def __init__(self, device: Cuda, arrays: Mapping[str, Host], spans: Sequence[Span]) -> None:
        super().__init__(device, arrays, spans)
        self.arrived: list[Any] = [None, None]  # for each buffer, an event after the copy of its chunk
        self.used = [device.mark(None)] * 2  # for each buffer, an event after its last use, by earlier owners, too
        self.filled: list[list[Any]] = [[], []]  # for each staging buffer, the copies to it that are under way

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.workers.close()
        finally:
            self.device.wait(self.device.mark(self.stream))

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for number in range(min(2, len(self.spans))):
            self._fill(number, None)
        self._begin(0)
        for number, span in enumerate(self.spans):
            self.device.follow(None, self.arrived[number % 2])
            yield {name: lane.in_buffer(number, span) for name, lane in self.lanes.items()}
            self.used[number % 2] = self.device.mark(None)
            self._begin(number + 1)

    def _fill(self, number: int, after: Any) -> None:
        """Begin to stage a chunk, after the chunk before it has left the staging buffer."""
        if self.staged and number < len(self.spans):
            pairs = [(lane, *lane.staged(number, self.spans[number])) for lane in self.staged]
            self.filled[number % 2] = self.workers.copy(self.device, pairs, after)

    def _begin(self, number: int) -> None:
        """Let a chunk be copied to the device, after the last use of the chunk before it in the buffer."""
        if number >= len(self.spans):
            return
        self.device.follow(self.stream, self.used[number % 2])
        for done in self.filled[number % 2]:
            done.result()
        for lane in self.lanes.values():
            lane.copy(self.device, number, self.spans[number], self.stream, to_device=True)
        self.arrived[number % 2] = self.device.mark(self.stream)
        self._fill(number + 2, self.arrived[number % 2])


class Drain(Transfer):
    """Copies chunks of results to the host while the next are computed. When it is left, all copies are done."""

    def __init__(self, device: Cuda, arrays: Mapping[str, Host], spans: Sequence[Span]) -> None:
        super().__init__(device, arrays, spans)
        self.left: list[Any] = [None, None]  # for each buffer, an event after its chunk was copied out
        self.emptied: list[list[Any]] = [[], []]  # for each staging buffer, the copies out of it that are under way

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                for copies in self.emptied:
                    for done in copies:
                        done.result()
        finally:
            try:
                self.device.wait(self.device.mark(self.stream))
            finally:
                self.workers.close()

    def buffers(self, number: int) -> dict[str, Array]:
        """The device buffers for the results of a chunk."""
        if self.left[number % 2] is not None:
            self.device.follow(None, self.left[number % 2])
        return {name: lane.in_buffer(number, self.spans[number]) for name, lane in self.lanes.items()}

    def send(self, number: int) -> None:
        """Begin to copy the results of a chunk, after the work that computes them and that is already launched."""
        span = self.spans[number]
        self.device.follow(self.stream, self.device.mark(None))
        for done in self.emptied[number % 2]:
            done.result()
        for lane in self.lanes.values():
            lane.copy(self.device, number, span, self.stream, to_device=False)
        self.left[number % 2] = self.device.mark(self.stream)
        if self.staged:
            pairs = [(lane, *lane.staged(number, span)[::-1]) for lane in self.staged]
            self.emptied[number % 2] = self.workers.copy(self.device, pairs, self.left[number % 2])


def lying(array: Host) -> list[int]:
    """The axes of an array, ordered as they lie in memory; the last axis stays last."""
    return [*sorted(range(3), key=lambda axis: -abs(array.strides[axis]) if array.shape[axis] > 1 else 0), 3]


def contiguous_axes(array: Host) -> int:
    """How many of the last axes of an array form one contiguous piece of memory."""
    expected = array.itemsize
    for count, (size, stride) in enumerate(zip(reversed(array.shape), reversed(array.strides), strict=True)):
        if size > 1 and stride != expected:
            return count
        expected *= size
    return array.ndim


def is_direct(device: Cuda, array: Host) -> bool:
    """Whether an array is copied without staging: it is pinned, and its contiguous pieces are worth a copy each."""
    there = array.transpose(lying(array))
    pieces = there.shape[there.ndim - contiguous_axes(there) :]
    block = int(np.prod(pieces)) * array.itemsize
    return block >= min(SMALLEST_BLOCK, array.nbytes) and device.is_pinned(array)
