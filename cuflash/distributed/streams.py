"""Calls of a rank side by side: on the multiprocessors that the last blocks of one leave idle, another one begins.

On a device each step has two streams, which its calls take in turns. What is of an earlier step goes before what is of
a later one: so the small kernels behind a long one do not wait for another long one. Two more streams go before all of
these: on one, rows are made ready to travel and are waited for, on the other, parts of results are added and travel
back. Memory that was let go on a stream may be given out again on the same one only. So what a step takes lives until
all streams have waited for what the step did, two steps later, when none has to wait long.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cuflash.distributed.transports import HIGHEST_PRIORITY
from cuflash.elementwise import WIDE, apply, assign, in_wide_elements
from cuflash.interop import module_of
from cuflash.recording import of_thread

Array = Any
AT_ONCE = 8  # arrays that a kernel copies: the argument of a kernel is of 4 KiB at most
STEPS_APART = 2  # how many steps one stream may be ahead of another
OF_STEPS = (-4, -3, -2)  # priorities of the first steps, and of all after them


class Streams:
    """What a call does where there are no streams: one thing after the other."""

    goes_on = False  # whether a call runs while the host goes on

    def of_call(self, number: int) -> AbstractContextManager[Any]:
        """Where the call of that number of a step is made."""
        return contextlib.nullcontext()

    def rows(self) -> AbstractContextManager[Any]:
        """Where rows are made ready to travel, and are waited for."""
        return contextlib.nullcontext()

    def arrived(self, *, in_turn: bool = False) -> None:
        """Let the calls of a step come after what `rows` did until now; `in_turn`, after those of the step before."""

    def returns(self) -> AbstractContextManager[Any]:
        """Where parts of results are added, after the calls that there were, and travel."""
        return contextlib.nullcontext()

    def keep(self, *held: Any) -> None:
        """Let memory of a step live for as long as anything of it may run."""

    def next_step(self) -> None:
        """Say that all calls of a step are made, and another step comes."""

    def end(self) -> None:
        """Let what the current stream does from now on come after everything."""


class CudaStreams(Streams):
    """Streams of the current device beside the current one."""

    goes_on = True

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._calls = [[self._stream(priority) for _ in range(2)] for priority in OF_STEPS]
        # What others wait for is little: it takes the first multiprocessors that are free.
        self._rows, self._returns = (self._stream(HIGHEST_PRIORITY) for _ in range(2))
        self._others = (*(stream for pair in self._calls for stream in pair), self._rows, self._returns)
        self._main: Any = None
        self._step = 0
        self._kept: list[Any] = []  # by the step whose calls are made now
        self._used: deque[Any] = deque()  # by those before, with an event after what they did

    def begin(self) -> CudaStreams:
        """Let everything come after what the current stream did before."""
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
        # One stream waits for all others, so that each of them waits for one event later, and not for four.
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
        """The streams of the calls of a step: those of the last priority are of all later steps, too, in turns."""
        first, second = self._calls[min(step, len(OF_STEPS) - 1)]
        return (first, second) if step % 2 == 0 else (second, first)

    def _wait(self, streams: Sequence[Any], *others: Any) -> None:
        """Let streams wait for what others did until now."""
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
    """Makes the streams of the device of a rank, once."""

    def __init__(self) -> None:
        self._streams: CudaStreams | None = None

    def begin(self, array: Array) -> Streams:
        """Streams for a call on arrays like this one, whose device is the current one."""
        if isinstance(array, np.ndarray):
            return Streams()
        self._streams = self._streams or CudaStreams(module_of(array))
        return self._streams.begin()


def copy_all(copies: Sequence[tuple[Array, Array]]) -> None:
    """Copy arrays to others of their shapes and dtypes: (target, source) of each.

    On a device those of one shape are copied at once, and 16 bytes at a time where those of a row lie together. CuPy
    has a thread for each element, and so many threads for numbers of 16 bits take several times as long as memory.
    """
    at_once: dict[tuple[int, ...], list[tuple[Array, Array]]] = {}
    for target, source in copies:
        wide = None, None
        if not isinstance(target, np.ndarray):
            wide = in_wide_elements(target, WIDE), in_wide_elements(source, WIDE)
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
