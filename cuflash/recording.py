"""Work that a device was given once, and gets again on other memory, without anything being planned again.

A call over ranks gives a device tens of kernels, messages and waits. To find out which takes the host longer than the
device computes. So the first call of a kind is recorded while it is made: every piece of work as a function of the
addresses of its arrays, and each address as a place in an argument, in a result, or in memory that the call took. Later
calls take as much memory and do the same.

What is done to arrays in other ways than by `work` is not recorded. So a recording counts only if all that is read was
given, or written by work before, and if work fills the results.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from cuflash.operands import extent

Array = Any
MOST_BOUND = 64  # layers of a model, say, whose arrays lie in other places
Act = Callable[[Any], object]  # something that is done for a call


class _OfThread(threading.local):
    recording: Recording | None = None  # the one that is made


of_thread = _OfThread()


# Pools of calls that were recorded, with their device: what comes back to a pool of CuPy stays there, even without the
# pool, and after a call that failed it comes back late.
_lent: list[tuple[int, Any]] = []


def _take_back(device: int) -> None:
    """Free what came back to pools of the current device, and let those go that lent nothing more."""
    for entry in [entry for entry in _lent if entry[0] == device]:
        entry[1].free_all_blocks()
        if not entry[1].total_bytes():
            with contextlib.suppress(ValueError):  # another thread was here
                _lent.remove(entry)


class _Step(NamedTuple):
    """What a stream does: work, or a mark that others wait for, or such a wait."""

    kind: Literal["work", "mark", "wait"]
    stream: int
    event: Any = None
    places: tuple[tuple[int, int], ...] = ()  # of each address, which block it is in, and how far behind its start
    make: Callable[[list[int]], Act] | None = None  # from addresses to what is done


class Recording:
    """Use it as a context while a call is made that reads and fills some arrays of CuPy."""

    def __init__(self, cupy: Any, given: Sequence[Array], results: Sequence[Array]) -> None:
        self._cupy, self._device = cupy, cupy.cuda.Device().id
        self._streams = [cupy.cuda.get_current_stream()]  # that of the call, and others
        self._pool, self._allocate = cupy.cuda.MemoryPool(self._block), cupy.cuda.get_allocator()
        arrays = (*given, *results)
        # Of arrays, and then of memory: the address, and those where it begins and ends.
        self._blocks = [(x.data.ptr, *reach(x)) for x in arrays]
        self._given, self._arrays = len(given), len(arrays)
        self._together = [
            (i, j, self._blocks[i][0] - self._blocks[j][0])
            for i in range(len(arrays))
            for j in range(i)
            if self._blocks[i][1] < self._blocks[j][2] and self._blocks[j][1] < self._blocks[i][2]
        ]
        self._steps: list[_Step] = []
        self._written: list[tuple[int, int]] = []  # of memory
        self._missing = {self._given + i: x.size * x.itemsize for i, x in enumerate(results)}  # bytes by block
        self._filled: set[tuple[int, int, tuple[int, ...]]] = set()
        self._is_known = True  # whether all that was read is known
        self._bound: dict[tuple[Any, ...], list[Act]] = {}  # by addresses, those of the last calls

    # ---- a call that is recorded -------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        _take_back(self._device)
        self._allocator = self._cupy.cuda.using_allocator(self._take)
        self._allocator.__enter__()
        of_thread.recording = self

    def __exit__(self, *error: Any) -> None:
        of_thread.recording = None
        self._allocator.__exit__(*error)
        _lent.append((self._device, self._pool))
        _take_back(self._device)
        del self._allocator, self._pool, self._allocate
        self._steps = _needed(self._steps)

    @property
    def is_complete(self) -> bool:
        """Whether the same work gives the same results of other arrays."""
        return self._is_known and not any(self._missing.values())

    def spoil(self) -> None:
        """Say that something is done that is not recorded."""
        self._is_known = False

    def mark(self, stream: Any, event: Any) -> None:
        """An event was recorded."""
        self._steps.append(_Step("mark", self._number(stream), event))

    def wait(self, stream: Any, event: Any) -> None:
        """A stream waits for such a one."""
        self._steps.append(_Step("wait", self._number(stream), event))

    def work(
        self, make: Callable[[list[int]], Act], pointers: Sequence[int], reads: Sequence[int], writes: Sequence[Array]
    ) -> None:
        """The current stream works with addresses: what it does with others `make` says; some of them it reads."""
        for pointer in reads:
            block, _ = self._place(pointer)
            if block >= self._arrays and not any(start <= pointer < stop for start, stop in self._written):
                self._is_known = False
        for x in writes:
            block, offset = self._place(x.data.ptr)
            if block >= self._arrays:
                self._written.append(reach(x))
            elif (block, offset, x.shape) not in self._filled:
                self._filled.add((block, offset, x.shape))
                self._missing[block] = self._missing.get(block, 0) - x.size * x.itemsize
        places = tuple(map(self._place, pointers))
        stream = self._number(self._cupy.cuda.get_current_stream())
        self._steps.append(_Step("work", stream, places=places, make=make))

    def on_arrays(self, do: Callable[..., object], reads: Sequence[Array], writes: Sequence[Array]) -> None:
        """The current stream works with arrays: `do` takes a call, and arrays in the place of these."""
        arrays = (*reads, *writes)
        layouts = [(x.shape, x.dtype, x.strides, x.size * x.itemsize) for x in arrays]
        make = functools.partial(self._on_arrays, do, layouts)
        self.work(make, [x.data.ptr for x in arrays], [x.data.ptr for x in reads], writes)

    def _on_arrays(self, do: Callable[..., object], layouts: Sequence[Any], pointers: Sequence[int]) -> Act:
        cuda, arrays = self._cupy.cuda, []
        for (shape, dtype, strides, nbytes), pointer in zip(layouts, pointers, strict=True):
            memory = cuda.MemoryPointer(cuda.UnownedMemory(pointer, nbytes, None, self._device), 0)
            arrays.append(self._cupy.ndarray(shape, dtype, memory, strides))
        return lambda call: do(call, *arrays)

    def _take(self, nbytes: int) -> Any:
        """Memory for the call, in which nothing is written yet."""
        memory = self._pool.malloc(nbytes)
        start, stop = memory.ptr, memory.ptr + nbytes
        self._written = [x for x in self._written if x[1] <= start or stop <= x[0]]
        return memory

    def _block(self, nbytes: int) -> Any:
        """Memory for the pool of the call, as that of the stream of the call, which waits for all others at the end."""
        current = self._cupy.cuda.get_current_stream()
        self._streams[0].use()
        try:
            memory = self._allocate(nbytes)
        finally:
            current.use()
        self._blocks.append((memory.ptr, memory.ptr, memory.ptr + nbytes))
        return memory

    def _place(self, pointer: int) -> tuple[int, int]:
        for number in reversed(range(len(self._blocks))):
            address, start, stop = self._blocks[number]
            if start <= pointer < stop:
                return number, pointer - address
        self._is_known = False
        return 0, 0

    def _number(self, stream: Any) -> int:
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)

    # ---- calls that follow -------------------------------------------------------------------------------------------

    def repeat(self, call: Any, arrays: Sequence[Array]) -> bool:
        """Do the same for a call on other arrays, if they lie in memory as those of the recorded call did."""
        addresses = [x.data.ptr for x in arrays]
        if any(addresses[i] - addresses[j] != apart for i, j, apart in self._together):
            return False
        cuda = self._cupy.cuda
        main = cuda.get_current_stream()
        memory = [cuda.alloc(stop - start) for _, start, stop in self._blocks[self._arrays :]]
        key = (main, *addresses, *(x.ptr for x in memory))
        acts = self._bound.get(key)
        if acts is None:
            if len(self._bound) >= MOST_BOUND:
                del self._bound[next(iter(self._bound))]
            acts = self._bound[key] = self._acts(main, key[1:])
        try:
            for act in acts:
                act(call)
        except BaseException:
            for stream in self._streams[1:]:  # which may still use the memory
                main.wait_event(stream.record())
            raise
        finally:
            main.use()
        return True

    def _acts(self, main: Any, addresses: Sequence[int]) -> list[Act]:
        """What is done with blocks at some addresses."""
        streams, current = [main, *self._streams[1:]], None
        found: list[Act] = []
        for step in self._steps:
            stream = streams[step.stream]
            if step.make is None:
                found.append(functools.partial(_MARKS[step.kind], stream, step.event))
                continue
            if step.stream != current:
                found.append(functools.partial(_use, stream))
                current = step.stream
            found.append(step.make([addresses[block] + offset for block, offset in step.places]))
        return found


def _use(stream: Any, call: Any) -> None:
    stream.use()


_MARKS: dict[str, Callable[[Any, Any, Any], None]] = {
    "mark": lambda stream, event, call: event.record(stream),
    "wait": lambda stream, event, call: stream.wait_event(event),
}


def _needed(steps: Sequence[_Step]) -> list[_Step]:
    """Steps without waits for what a stream has waited for, and without waits and marks that nothing comes of."""
    past: dict[int, set[int]] = defaultdict(set, {0: {-1}})  # by stream, which work comes before; -1 is the caller's
    at: dict[int, frozenset[int]] = {}  # the same by event
    found = []
    for number, step in enumerate(steps):
        own = past[step.stream]
        if step.kind == "work":
            own.add(number)
        elif step.kind == "mark":
            at[id(step.event)] = frozenset(own)
        elif at[id(step.event)] <= own:
            continue
        else:
            own |= at[id(step.event)]
        found.append(step)
    needed, awaited, kept = {0}, set(), []  # streams of which something follows, and events
    for step in reversed(found):
        if step.kind == "wait":
            if step.stream not in needed:
                continue
            awaited.add(id(step.event))
        elif step.kind == "mark" and id(step.event) not in awaited:
            continue
        else:
            needed.add(step.stream)
        kept.append(step)
    return kept[::-1]


def reach(array: Array) -> tuple[int, int]:
    """The address of the first byte of an array, and that after its last one."""
    low, high = extent(array)
    return array.data.ptr + low, array.data.ptr + high
