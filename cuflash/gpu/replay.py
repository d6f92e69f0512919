"""Recordings of the work that a call gives a device, so that later calls repeat it on other memory without planning.

A call over ranks gives a device tens of kernels, messages and waits. The host needs more time to find out which ones
than the device needs to compute. So a call of each kind is recorded while it is made: each piece of work becomes a
function of the addresses of its arrays, and each address an offset in an argument, in a result, or in memory that the
call allocated. Later calls allocate the same amount of memory and do the same work.

A recording holds only what goes through `work`. So work can be repeated only if everything that is read was an argument
or was written by earlier work, and if work fills the results. A call that cannot be repeated is made anew, in memory of
the recorded sizes: in both cases all memory is there before the work begins.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from cuflash.arrays.array_info import extent

Array = Any
MOST_BOUND = 64  # sets of addresses that are kept, one for each layer of a model, for example
Act = Callable[[Any], object]  # a piece of work, which takes the call that it is done for


class _OfThread(threading.local):
    recording: Recording | None = None  # the one that this thread is making
    launches: list[Any] | None = None  # where a caller of this thread wants to know what a call launches
    has_context = False  # whether a context of CUDA is known to be current


of_thread = _OfThread()


class _OfProcess:
    launches: object = object()  # stands for all launches since they were last forgotten


_of_process = _OfProcess()


def current_launches() -> object:
    """What stands for all launches since they were last forgotten."""
    return _of_process.launches


def forget_recordings() -> None:
    """Let calls be recorded anew: the kernels of recordings so far are no longer those that a plan has."""
    _of_process.launches = object()


# Pools of recorded calls, with their device. Memory returned to a pool of CuPy stays allocated, even if nothing
# refers to the pool any more; after a call that failed, it is returned late.
_pools: list[tuple[int, Any]] = []


def _take_back(device: int) -> None:
    """Free the memory that was returned to pools of the current device, and forget pools without memory in use."""
    for entry in [entry for entry in _pools if entry[0] == device]:
        entry[1].free_all_blocks()
        if not entry[1].total_bytes():
            with contextlib.suppress(ValueError):  # another thread may have removed it
                _pools.remove(entry)


@contextlib.contextmanager
def _pool(cupy: Any, device: int, block: Callable[[int], Any]) -> Iterator[Any]:
    """A pool for one call on the current device, made of blocks; what nobody refers to is free at the end."""
    _take_back(device)
    pool = cupy.cuda.MemoryPool(block)
    try:
        yield pool
    finally:
        _pools.append((device, pool))
        _take_back(device)


class _Step(NamedTuple):
    """One action of a stream: work, a mark that other streams wait for, or a wait for a mark."""

    op: Literal["work", "mark", "wait"]
    stream: int
    event: Any = None
    locations: tuple[tuple[int, int], ...] = ()  # for each address, its block and its offset in the block
    make: Callable[[list[int]], Act] | None = None  # makes the work from addresses


class Recording:
    """A context in which a call is made that reads some arrays of CuPy and fills others."""

    def __init__(self, cupy: Any, given: Sequence[Array], results: Sequence[Array]) -> None:
        self._cupy, self._device, self._launches = cupy, cupy.cuda.Device().id, _of_process.launches
        self._streams = [cupy.cuda.get_current_stream()]  # first that of the call
        arrays = (*given, *results)
        # For each array, and then for each allocation: its address, and the addresses where its memory begins and ends.
        self._blocks = [(x.data.ptr, *reach(x)) for x in arrays]
        self._num_arrays = len(arrays)
        # Pairs of arrays that overlap in memory, and the distance of their addresses.
        self._overlaps = [
            (i, j, self._blocks[i][0] - self._blocks[j][0])
            for i in range(len(arrays))
            for j in range(i)
            if self._blocks[i][1] < self._blocks[j][2] and self._blocks[j][1] < self._blocks[i][2]
        ]
        self._steps: list[_Step] = []
        self._written: list[tuple[int, int]] = []  # ranges of allocated memory that work has written
        # Bytes of each result that no work has filled yet, by block.
        self._missing = {len(given) + i: x.size * x.itemsize for i, x in enumerate(results)}
        self._filled: set[tuple[int, int, tuple[int, ...]]] = set()
        self._is_covered = True  # whether all that was read is an argument, or was written by recorded work
        self._bound: dict[tuple[Any, ...], list[Act]] = {}  # the work of the latest calls, by addresses

    # ---- a call that is recorded -------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:  # so that an exception on the way in leaves nothing open
            self._allocate = self._cupy.cuda.get_allocator()
            self._pool = stack.enter_context(_pool(self._cupy, self._device, self._block))
            stack.enter_context(self._cupy.cuda.using_allocator(self._take))
            stack.callback(setattr, of_thread, "recording", None)
            of_thread.recording = self
            self._context = stack.pop_all()

    def __exit__(self, type_: Any, error: Any, trace: Any) -> None:
        with self._context:
            if error is not None:
                self._join(self._streams[0])
        del self._context, self._pool, self._allocate
        self._steps = _needed(self._steps) if self.is_complete else []

    @property
    def is_complete(self) -> bool:
        """Whether the recorded work computes the results from any other arrays."""
        return self._is_covered and not any(self._missing.values())

    def spoil(self) -> None:
        """Say that the call does something that is not recorded."""
        self._is_covered = False

    def mark(self, stream: Any, event: Any) -> None:
        """Record that a stream recorded an event."""
        self._steps.append(_Step("mark", self._number(stream), event))

    def wait(self, stream: Any, event: Any) -> None:
        """Record that a stream waits for an event."""
        self._steps.append(_Step("wait", self._number(stream), event))

    def work(
        self, make: Callable[[list[int]], Act], pointers: Sequence[int], reads: Sequence[int], writes: Sequence[Array]
    ) -> None:
        """Record work of the current stream on addresses. `make` gives the same work for other addresses."""
        for pointer in reads:
            block, _ = self._locate(pointer)
            if block >= self._num_arrays and not any(start <= pointer < stop for start, stop in self._written):
                self._is_covered = False
        for x in writes:
            block, offset = self._locate(x.data.ptr)
            if block >= self._num_arrays:
                self._written.append(reach(x))
            elif (block, offset, x.shape) not in self._filled:
                self._filled.add((block, offset, x.shape))
                self._missing[block] = self._missing.get(block, 0) - x.size * x.itemsize
        locations = tuple(map(self._locate, pointers))
        stream = self._number(self._cupy.cuda.get_current_stream())
        self._steps.append(_Step("work", stream, locations=locations, make=make))

    def on_arrays(self, do: Callable[..., object], reads: Sequence[Array], writes: Sequence[Array]) -> None:
        """Record work of the current stream on arrays. `do` takes a call, and arrays that replace these."""
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
        """Allocate memory for the call; from now on it counts as not written."""
        memory = self._pool.malloc(nbytes)
        start, stop = memory.ptr, memory.ptr + nbytes
        self._written = [x for x in self._written if x[1] <= start or stop <= x[0]]
        return memory

    def _block(self, nbytes: int) -> Any:
        """Memory for the call's pool, allocated on the call's stream, because this waits for all others at the end."""
        memory = _allocated(self._cupy.cuda, self._streams[0], self._allocate, nbytes)
        self._blocks.append((memory.ptr, memory.ptr, memory.ptr + nbytes))
        return memory

    def _locate(self, pointer: int) -> tuple[int, int]:
        for number in reversed(range(len(self._blocks))):
            address, start, stop = self._blocks[number]
            if start <= pointer < stop:
                return number, pointer - address
        self._is_covered = False
        return 0, 0

    def _number(self, stream: Any) -> int:
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)

    # ---- calls that follow -------------------------------------------------------------------------------------------

    def fits(self, arrays: Sequence[Array]) -> bool:
        """Whether arrays overlap in memory as those of the recorded call did, and its launches are not forgotten."""
        if self._launches is not _of_process.launches:
            return False
        addresses = [x.data.ptr for x in arrays]
        return not any(addresses[i] - addresses[j] != distance for i, j, distance in self._overlaps)

    def repeat(self, call: Any, arrays: Sequence[Array]) -> None:
        """Do the same work for a call on other arrays, which have to fit."""
        main, memory = self._cupy.cuda.get_current_stream(), self._memory()
        key = (main, *(x.data.ptr for x in arrays), *(x.ptr for x in memory))
        acts = self._bound.get(key)
        if acts is None:
            if len(self._bound) >= MOST_BOUND:
                del self._bound[next(iter(self._bound))]
            acts = self._bound[key] = self._acts(main, key[1:])
        try:
            for act in acts:
                act(call)
        except BaseException:
            self._join(main)
            raise
        finally:
            main.use()

    @contextlib.contextmanager
    def reused_memory(self) -> Iterator[None]:
        """A context in which a call like the recorded one is made anew, in memory that is there before it begins."""
        cuda, blocks = self._cupy.cuda, self._memory()
        main, allocate = cuda.get_current_stream(), cuda.get_allocator()
        free = defaultdict(list)
        for (_, start, stop), memory in zip(self._blocks[self._num_arrays :], blocks, strict=True):
            free[stop - start].append(memory)
        del blocks  # so that each goes back to the pool as soon as nobody uses it

        def block(nbytes: int) -> Any:
            return free[nbytes].pop() if free[nbytes] else _allocated(cuda, main, allocate, nbytes)

        with _pool(self._cupy, self._device, block) as pool, cuda.using_allocator(pool.malloc):
            try:
                yield
            except BaseException:
                self._join(main)
                raise

    def _memory(self) -> list[Any]:
        """As much memory as the recorded call took."""
        return [self._cupy.cuda.alloc(stop - start) for _, start, stop in self._blocks[self._num_arrays :]]

    def _join(self, main: Any) -> None:
        """Order later work of a stream after that of all others, which may still use memory of a call that failed."""
        for stream in self._streams[1:]:
            main.wait_event(stream.record())

    def _acts(self, main: Any, addresses: Sequence[int]) -> list[Act]:
        """The work, for blocks at some addresses."""
        streams, current = [main, *self._streams[1:]], None
        acts: list[Act] = []
        for step in self._steps:
            stream = streams[step.stream]
            if step.make is None:
                acts.append(functools.partial(_MARKS[step.op], stream, step.event))
                continue
            if step.stream != current:
                acts.append(functools.partial(_use, stream))
                current = step.stream
            acts.append(step.make([addresses[block] + offset for block, offset in step.locations]))
        return acts


def _allocated(cuda: Any, stream: Any, allocate: Callable[[int], Any], nbytes: int) -> Any:
    """Memory that is allocated on a stream, whichever is the current one."""
    current = cuda.get_current_stream()
    stream.use()
    try:
        return allocate(nbytes)
    finally:
        current.use()


def _use(stream: Any, call: Any) -> None:
    stream.use()


_MARKS: dict[str, Callable[[Any, Any, Any], None]] = {
    "mark": lambda stream, event, call: event.record(stream),
    "wait": lambda stream, event, call: stream.wait_event(event),
}


def _needed(steps: Sequence[_Step]) -> list[_Step]:
    """The steps that order all work as these do: without repeated waits, and waits and marks that order nothing."""
    return _without_unused(_without_repeated_waits(steps))


def _without_repeated_waits(steps: Sequence[_Step]) -> list[_Step]:
    """The steps, without waits for work that a stream has already waited for."""
    # By stream, and by event, the work that is ordered before it; -1 is what the caller gave the stream of the call.
    before_stream: dict[int, set[int]] = defaultdict(set, {0: {-1}})
    before_event: dict[int, frozenset[int]] = {}
    kept = []
    for number, step in enumerate(steps):
        before = before_stream[step.stream]
        if step.op == "work":
            before.add(number)
        elif step.op == "mark":
            before_event[id(step.event)] = frozenset(before)
        elif before_event[id(step.event)] <= before:
            continue
        else:
            before |= before_event[id(step.event)]
        kept.append(step)
    return kept


def _without_unused(steps: Sequence[_Step]) -> list[_Step]:
    """The steps, without waits of streams that do no more work, and without marks that no stream waits for."""
    working, awaited, kept = {0}, set(), []  # streams with later work, and events that are waited for
    for step in reversed(steps):
        if step.op == "wait":
            if step.stream not in working:
                continue
            awaited.add(id(step.event))
        elif step.op == "mark" and id(step.event) not in awaited:
            continue
        else:
            working.add(step.stream)
        kept.append(step)
    return kept[::-1]


def reach(array: Array) -> tuple[int, int]:
    """The address of the first byte of an array, and the address after its last byte."""
    low, high = extent(array)
    return array.data.ptr + low, array.data.ptr + high
