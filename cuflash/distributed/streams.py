"""Calls of a rank side by side: a call begins on the SMs that the last blocks of another one leave idle.

On a device each step has two streams, which its calls take in turns. Work of an earlier step has a higher priority than
work of a later one, so the small kernels after a long one do not wait for another long one. Two more streams have the
highest priority: on one, rows are made ready to be sent and are waited for; on the other, partial results are added
and are sent back. The pool may reuse memory that was freed on a stream only on the same stream. So the memory of a step
stays alive until all streams have waited for the work of the step: two steps later, when no stream has to wait long.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cuflash.arrays.dlpack import module_of
from cuflash.distributed.transports import HIGHEST_PRIORITY
from cuflash.gpu.elementwise import apply, assign, in_wide_elements
from cuflash.gpu.replay import of_thread

Array = Any
AT_ONCE = 8  # arrays that one kernel copies, because the arguments of a kernel take at most 4 KiB
STEPS_APART = 2  # how many steps one stream may be ahead of another
OF_STEPS = (-4, -3, -2)  # priorities of the first two steps, and of all later ones


class Streams:
    """A stand-in where there are no streams, as in host memory: all work runs in the order of the code."""

    goes_on = False  # whether a call runs while the host goes on

    def of_call(self, number: int) -> AbstractContextManager[Any]:
        """The stream on which the call of that number in a step is made."""
        return contextlib.nullcontext()

    def rows(self) -> AbstractContextManager[Any]:
        """The stream on which rows are made ready to be sent, and are waited for."""
        return contextlib.nullcontext()

    def arrived(self, *, in_turn: bool = False) -> None:
        """Order the calls of a step after the work of `rows` so far; `in_turn`, also after those of the step before."""

    def returns(self) -> AbstractContextManager[Any]:
        """The stream on which partial results are added and sent, after the calls made so far."""
        return contextlib.nullcontext()

    def keep(self, *held: Any) -> None:
        """Keep the memory of a step alive as long as any work of the step may run."""

    def next_step(self) -> None:
        """Say that all calls of a step are made, and that another step follows."""

    def end(self) -> None:
        """Order all later work of the current stream after all work so far."""


class CudaStreams(Streams):
    """Streams of the current device besides the current stream."""

    goes_on = True

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._calls = [[self._stream(priority) for _ in range(2)] for priority in OF_STEPS]
        # Their work is small and others wait for it, so it takes the first SMs that are free.
        self._rows, self._returns = (self._stream(HIGHEST_PRIORITY) for _ in range(2))
        self._others = (*(stream for pair in self._calls for stream in pair), self._rows, self._returns)
        self._main: Any = None
        self._step = 0
        self._kept: list[Any] = []  # memory of the step whose calls are made now
        self._used: deque[Any] = deque()  # memory of earlier steps, each with an event after its work

    def begin(self) -> CudaStreams:
        """Order all work on these streams after the earlier work of the current stream."""
        self._main = self._cupy.cuda.get_current_stream()
        self._step = 0
        self._wait(self._others, self._main)
        return self

    def of_call(self, number: int) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = self._of_step[number % 2]
        return stream

    def rows(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = self._rows
        return stream

    def arrived(self, *, in_turn: bool = False) -> None:
        self._wait(self._of_step, self._rows)
        if in_turn and self._step:
            self._wait(self._of_step, *self._streams_of(self._step - 1))

    def returns(self) -> AbstractContextManager[Any]:
        self._wait((self._returns,), *self._of_step)
        stream: AbstractContextManager[Any] = self._returns
        return stream

    def keep(self, *held: Any) -> None:
        self._kept += held

    def next_step(self) -> None:
        # One stream waits for all others; then each of them later waits for one event instead of four.
        self._wait((self._returns,), *self._of_step, self._rows)
        self._used.append((self._mark(self._returns), self._kept))
        self._step, self._kept = self._step + 1, []
        if len(self._used) >= STEPS_APART:
            mark, _ = self._used.popleft()
            self._wait_for((self._main, *self._others), mark)

    def end(self) -> None:
        self._wait((self._main,), *self._others)
        self._wait(self._others, self._main)
        self._kept = []
        self._used.clear()

    @property
    def _of_step(self) -> Sequence[Any]:
        return self._streams_of(self._step)

    def _streams_of(self, step: int) -> Sequence[Any]:
        """The streams of the calls of a step. All later steps share those of the last priority, and alternate them."""
        first, second = self._calls[min(step, len(OF_STEPS) - 1)]
        return (first, second) if step % 2 == 0 else (second, first)

    def _wait(self, streams: Sequence[Any], *others: Any) -> None:
        """Let streams wait for the work of others so far."""
        for mark in [self._mark(other) for other in others]:
            self._wait_for(streams, mark)

    def _wait_for(self, streams: Sequence[Any], mark: Any) -> None:
        for stream in streams:
            stream.wait_event(mark)
            if of_thread.recording is not None:
                of_thread.recording.wait(stream, mark)

    def _mark(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        if of_thread.recording is not None:
            of_thread.recording.mark(stream, event)
        return event

    def _stream(self, priority: int) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True, priority=priority)


class StreamsOfDevice:
    """Makes the streams of each device that a rank makes calls on, once."""

    def __init__(self) -> None:
        self._of_device: dict[int, CudaStreams] = {}

    def begin(self, array: Array) -> Streams:
        """Streams for a call on arrays like this one, whose device is the current one."""
        if isinstance(array, np.ndarray):
            return Streams()
        device = array.device.id
        if device not in self._of_device:
            self._of_device[device] = CudaStreams(module_of(array))
        return self._of_device[device].begin()


def copy_all(copies: Sequence[tuple[Array, Array]]) -> None:
    """Copy arrays to others of the same shapes and dtypes, given as pairs (target, source).

    On a device one kernel copies several arrays of one shape, 16 bytes at a time if the elements of a row are adjacent.
    CuPy starts a thread for each element; in half precision so many threads take several times as long as the
    memory does.
    """
    at_once: dict[tuple[int, ...], list[tuple[Array, Array]]] = {}
    for target, source in copies:
        wide = None, None
        if not isinstance(target, np.ndarray):
            wide = in_wide_elements(target), in_wide_elements(source)
        if wide[0] is None or wide[1] is None:
            assign(target, source)
        else:
            at_once.setdefault(wide[0].shape, []).append(wide)
    for pairs in at_once.values():
        for i in range(0, len(pairs), AT_ONCE):
            targets, sources = zip(*pairs[i : i + AT_ONCE], strict=True)
            apply(_copying(module_of(targets[0]), len(targets)), sources, targets)


@functools.lru_cache(maxsize=64)
def _copying(cupy: Any, count: int) -> Any:
    """A kernel that copies so many arrays of one shape."""
    sources, targets = ([f"complex128 {name}{i}" for i in range(count)] for name in ("source", "target"))
    code = "; ".join(f"target{i} = source{i}" for i in range(count))
    return cupy.ElementwiseKernel(", ".join(sources), ", ".join(targets), code, f"cuflash_copy_{count}")
