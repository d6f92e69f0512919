"""Calls of a rank side by side: on the multiprocessors that the last blocks of one leave idle, another one begins.

Two streams of a device take the calls of a rank in turns: the caller's current one, and one beside it. Memory that was
let go on one of them may be given out again on the same one only. So what calls read lives until both streams have
waited for each other, two steps later, when neither has to wait long.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cuflash.interop import module_of

Array = Any
WIDE = 16  # bytes of the largest element that CuPy copies
STEPS_APART = 2  # how many steps one stream may be ahead of the other


class Streams:
    """What a call does where there are no streams: one thing after the other."""

    def of_call(self, number: int) -> AbstractContextManager[Any]:
        """Where the call of that number is made."""
        return contextlib.nullcontext()

    def mark(self) -> Any:
        """What the current stream did until now, which calls may have to come after."""

    def arrive(self, finish: Callable[[], None], mark: Any) -> None:
        """Let calls that are made from now on come after rows that are waited for, and after a mark."""
        finish()

    def keep(self, *held: Any) -> None:
        """Let memory of a step live for as long as calls of it may run."""

    def next_step(self) -> None:
        """Say that all calls of a step are made."""

    def meet(self) -> None:
        """Let what the current stream does from now on come after all calls."""

    def end(self) -> None:
        """The same, once all calls are made."""


class CudaStreams(Streams):
    """Two streams of the current device, and one on which rows are waited for."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._beside, self._arrivals = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self._main: Any = None
        self._kept: list[Any] = []  # by the step whose calls are made now
        self._used: deque[Any] = deque()  # by those before, with events after their calls

    def begin(self) -> CudaStreams:
        """Let all calls come after what the current stream did before."""
        self._main = self._cupy.cuda.get_current_stream()
        before = self.mark()
        for stream in (self._beside, self._arrivals):
            stream.wait_event(before)
        return self

    def of_call(self, number: int) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = (self._main, self._beside)[number % 2]
        return stream

    def mark(self) -> Any:
        return self._mark(self._main)

    def arrive(self, finish: Callable[[], None], mark: Any) -> None:
        self._arrivals.wait_event(mark)
        with self._arrivals:
            finish()
        there = self._mark(self._arrivals)
        for stream in (self._main, self._beside):
            stream.wait_event(there)

    def keep(self, *held: Any) -> None:
        self._kept += held

    def next_step(self) -> None:
        self._used.append((self.mark(), self._mark(self._beside), self._kept))
        self._kept = []
        if len(self._used) >= STEPS_APART:
            main, beside, _ = self._used.popleft()
            self._main.wait_event(beside)
            self._beside.wait_event(main)

    def meet(self) -> None:
        for stream in (self._beside, self._arrivals):
            self._main.wait_event(self._mark(stream))

    def end(self) -> None:
        self.meet()
        self._beside.wait_event(self.mark())
        self._kept = []
        self._used.clear()

    def _mark(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event


class StreamsOfDevice:
    """Makes the streams of the device of a rank, once."""

    def __init__(self) -> None:
        self._streams: CudaStreams | None = None

    def begin(self, array: Array) -> Streams:
        """Streams for a call on arrays like this one, whose device is the current one."""
        if isinstance(array, np.ndarray):
            return Streams()
        self._streams = self._streams or CudaStreams(module_of(array))
        return self._streams.begin()


def copy_rows(target: Array, source: Array) -> None:
    """Copy an array to one of its shape and dtype: on a device 16 bytes at a time, where those of a row lie together.

    CuPy has a thread for each element, and so many threads for numbers of 16 bits take several times as long as memory.
    """
    if not isinstance(target, np.ndarray):
        layouts = [wide_layout(x.shape, x.strides, x.itemsize, x.data.ptr) for x in (target, source)]
        if None not in layouts:
            ndarray = module_of(target).ndarray
            target, source = (
                ndarray(layout[0], np.complex128, memptr=x.data, strides=layout[1])
                for x, layout in zip((target, source), layouts, strict=True)
                if layout is not None
            )
    target[...] = source


def wide_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of the same memory in elements of 16 bytes; None where there are no such."""
    if not shape or 0 in shape or strides[-1] != itemsize:
        return None
    *others, last = shape
    places = (address, last * itemsize, *(step for step, n in zip(strides, others, strict=False) if n > 1))
    if any(place % WIDE for place in places):
        return None
    return (*others, last * itemsize // WIDE), (*strides[:-1], WIDE)
