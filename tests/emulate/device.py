"""A device whose memory is the host's and which does everything at once: as much of CuPy as ranks ask for."""

import ctypes
import functools
import hashlib
import operator
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash.emulator import find_compiler
from tests.emulate.launcher import allocated

_FOLDER = tempfile.TemporaryDirectory()
_one_at_a_time = threading.Lock()


class Memory:
    """An address, and what has to live for it."""

    def __init__(self, ptr: int, owner: Any) -> None:
        self.ptr, self.owner, self.device_id = ptr, owner, _of_thread.device
        self.mem = SimpleNamespace(ptr=ptr, size=0)

    def __add__(self, nbytes: int) -> "Memory":
        return Memory(self.ptr + nbytes, self)

    def copy_from_device_async(self, source: "Memory", nbytes: int, stream: Any) -> None:
        ctypes.memmove(self.ptr, source.ptr, nbytes)


class Device(nullcontext[None]):
    """The device of this thread."""

    @property
    def id(self) -> int:
        return _of_thread.device


class OnDevice:
    """CuPy's array. What NumPy's has, it has too, as arrays on the device."""

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        memory = memptr or alloc(int(np.prod(shape)) * dtype.itemsize)
        strides = np.empty(shape, dtype).strides if strides is None else strides
        nbytes = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
        buffer = (ctypes.c_char * max(nbytes, 0)).from_address(memory.ptr)
        self.host = np.ndarray(shape, dtype, buffer, strides=strides)
        self.owner = memory

    @property
    def data(self) -> Memory:
        return Memory(self.host.__array_interface__["data"][0], self.owner)

    @property
    def device(self) -> Any:
        return Device()

    def get(self) -> np.ndarray:
        return self.host.copy()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.host[_host(index)] = _host(value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.host, name)
        return functools.partial(_called, found, self.owner) if callable(found) else found


def as_strided(array: OnDevice, shape: Any, strides: Any) -> OnDevice:
    """A view of the same memory."""
    return OnDevice(shape, array.dtype, array.data, strides)


def _host(x: Any) -> Any:
    if isinstance(x, OnDevice):
        return x.host
    return type(x)(map(_host, x)) if isinstance(x, (list, tuple)) else x


def _called(function: Any, owner: Any, *args: Any, **keywords: Any) -> Any:
    """What a function of NumPy gives: memory of its own, or a view of its owner's."""
    with np.errstate(all="ignore"):
        found = function(*map(_host, args), **{name: _host(x) for name, x in keywords.items()})
    if not isinstance(found, (np.ndarray, np.generic)):
        return found
    array = OnDevice.__new__(OnDevice)
    array.host = np.asarray(found)
    is_view = owner is not None and array.host.base is not None
    if not is_view and array.host.nbytes:
        array = OnDevice(array.host.shape, array.host.dtype)
        array.host[...] = found
        return array
    array.owner = owner
    return array


def _operator(name: str) -> Any:
    function = getattr(operator, name)

    def method(self: OnDevice, *other: Any) -> Any:
        if name.startswith("__i"):
            self.host = function(self.host, *map(_host, other))
            return self
        return _called(function, self.owner, self, *other)

    return method


for _name in ("getitem", "add", "sub", "mul", "truediv", "neg", "abs", "eq", "ge", "lt", "and", "iadd", "imul"):
    setattr(OnDevice, f"__{_name}__", _operator(f"__{_name}__"))


class _OfThread(threading.local):
    allocator: Any = None
    stream: Any = None
    device = 0


_of_thread = _OfThread()
_came_back: list[list[Memory]] = []  # by pool


def _memory(nbytes: int) -> Memory:
    memory = allocated(max(nbytes, 1))
    return Memory(memory.ctypes.data, memory)


def alloc(nbytes: int) -> Memory:
    memory: Memory = (_of_thread.allocator or _memory)(nbytes)
    return memory


@contextmanager
def using_allocator(allocator: Any) -> Iterator[None]:
    before, _of_thread.allocator = _of_thread.allocator, allocator
    try:
        yield
    finally:
        _of_thread.allocator = before


class MemoryPool:
    """What came back stays there, even where the pool is gone, as long as nobody frees it."""

    def __init__(self, allocator: Any) -> None:
        self._allocate = allocator
        self._came_back: list[Memory] = []
        self._total = 0
        _came_back.append(self._came_back)

    def malloc(self, nbytes: int) -> Memory:
        memory = self._allocate(nbytes)
        self._total += 1
        allocated = Memory(memory.ptr, None)
        weakref.finalize(allocated, self._came_back.append, memory)
        return allocated

    def free_all_blocks(self) -> None:
        self._total -= len(self._came_back)
        self._came_back.clear()

    def total_bytes(self) -> int:
        return self._total  # a number that is 0 where theirs is


class Stream:
    ptr = 0

    def __init__(self, non_blocking: bool = False, priority: int = 0) -> None:
        self.before: list[Any] = []

    def use(self) -> None:
        _of_thread.stream = self

    def __enter__(self) -> None:
        self.before.append(get_current_stream())
        self.use()

    def __exit__(self, *error: Any) -> None:
        self.before.pop().use()

    def wait_event(self, event: Any) -> None:
        assert event.is_recorded

    def record(self) -> "Event":
        event = Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False


class Event:
    is_recorded = False

    def __init__(self, disable_timing: bool = True) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        self.is_recorded = True


_null = Stream()


def get_current_stream() -> Stream:
    return _of_thread.stream or _null


class ElementwiseKernel:
    """That of CuPy, compiled for the CPU."""

    def __init__(self, inputs: str, outputs: str, operation: str, name: str) -> None:
        self.params = [text.split() for text in (*inputs.split(", "), *outputs.split(", "))]
        self.count, self.operation = len(inputs.split(", ")), operation

    def __call__(self, *arrays: OnDevice) -> None:
        hosts = [getattr(x, "host", x) for x in arrays]
        flat = [np.ascontiguousarray(x) for x in hosts[: self.count]]
        flat += [np.array(x, order="C") for x in hosts[self.count :]]  # a kernel may read what it writes
        types = {ctype: x.dtype.name for (ctype, _), x in zip(self.params, hosts, strict=True) if ctype == "T"}
        generic = " ".join(f"using {name} = {ctype};" for name, ctype in types.items())
        bindings = [f"{ctype}& {name} = (({ctype}*)at[{i}])[n];" for i, (ctype, name) in enumerate(self.params)]
        text = f"""#include <cmath>
            using std::exp; using std::log; using float32 = float; using float64 = double;
            using int32 = int; using int64 = long; struct complex128 {{ double real, imag; }};
            {generic}
            extern "C" void run(void** at, long count) {{
              for (long n = 0; n < count; ++n) {{ {" ".join(bindings)} {self.operation}; }} }}"""
        with _one_at_a_time:
            run = _compiled(text)
        run((ctypes.c_void_p * len(flat))(*(x.ctypes.data for x in flat)), ctypes.c_long(flat[0].size))
        for x, result in zip(hosts[self.count :], flat[self.count :], strict=True):
            x[...] = result


@functools.cache
def _compiled(text: str) -> Any:
    path = f"{_FOLDER.name}/{hashlib.sha256(text.encode()).hexdigest()}.so"
    compiler = find_compiler() or pytest.skip("no C++ compiler: g++ is not on the path")
    command = [compiler, "-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", path, "-"]
    subprocess.run(command, input=text, text=True, check=True)
    return ctypes.CDLL(path).run


def extend(cupy: Any) -> None:
    """Make the stand-in for CuPy of `launcher` one that ranks can use."""
    cupy.ndarray, cupy.empty = OnDevice, OnDevice
    cupy.ElementwiseKernel = ElementwiseKernel
    for name in ("zeros", "ones", "full", "concatenate", "ascontiguousarray", "clip", "asarray", "where"):
        setattr(cupy, name, functools.partial(_called, getattr(np, name), None))
    cupy.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided))
    cupy.broadcast_to = lambda x, shape: _called(np.broadcast_to, x.owner, x, shape)
    names = (alloc, using_allocator, MemoryPool, Stream, Event, get_current_stream)
    cupy.cuda.__dict__.update({x.__name__: x for x in names})
    launch = cupy.cuda.driver.launchKernel

    def one_at_a_time(*args: Any) -> None:
        with _one_at_a_time:
            launch(*args)

    cupy.cuda.driver.launchKernel = one_at_a_time
    cupy.cuda.get_allocator = lambda: _of_thread.allocator or _memory
    cupy.cuda.Device = Device
    cupy.cuda.runtime.getDevice = lambda: _of_thread.device
    cupy.cuda.UnownedMemory = lambda pointer, nbytes, owner, device: Memory(pointer, owner)
    cupy.cuda.MemoryPointer = lambda memory, offset: Memory(memory.ptr + offset, memory)
