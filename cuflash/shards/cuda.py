"""The functions of a CUDA device that copy pipelines need, by CuPy."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from cuflash.arrays.array_info import extent

Array = Any
Host = np.ndarray[Any, Any]
MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: CUDA finds from the addresses whether memory is on the host or the device
HOST_MEMORY = 1  # cudaMemoryTypeHost: page-locked, by any library


class Cuda:
    """The current device of CuPy. The stream None is the one that computes."""

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        self._runtime = self._cupy.cuda.runtime

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Device memory."""
        return self._cupy.empty(shape, dtype)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Host:
        """Page-locked host memory, which the device can read and write by itself."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = self._cupy.cuda.alloc_pinned_memory(max(size, 1))
        return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)

    def is_pinned(self, array: Host) -> bool:
        """Whether an array is in page-locked host memory."""
        if array.size == 0:
            return True
        low, high = _bounds(array)
        memory_types = [self._runtime.pointerGetAttributes(address).type for address in (low, high - 1)]
        return memory_types == [HOST_MEMORY, HOST_MEMORY]

    def stream(self) -> Any:
        """A stream besides the one that computes."""
        return self._cupy.cuda.Stream(non_blocking=True)

    def copy(self, target: Array, source: Array, stream: Any) -> None:
        """Copy a contiguous array to another one, on a stream; one of the two is in host memory."""
        if target.nbytes:
            addresses = (_address(target), _address(source))
            self._runtime.memcpyAsync(*addresses, target.nbytes, MEMCPY_DEFAULT, stream.ptr)

    def mark(self, stream: Any) -> Any:
        """An event after all work that the stream has been given so far."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._stream(stream))
        return event

    def follow(self, stream: Any, event: Any) -> None:
        """Let a stream wait for an event."""
        self._stream(stream).wait_event(event)

    def wait(self, event: Any) -> None:
        """Let this thread wait for an event."""
        event.synchronize()

    def mapped(self, array: Host) -> Array:
        """Pinned memory as an array of the device."""
        cupy = self._cupy
        if array.size == 0:
            return cupy.empty(array.shape, array.dtype)
        low, high = _bounds(array)
        address = self._runtime.pointerGetAttributes(low).devicePointer
        memory = cupy.cuda.UnownedMemory(address, high - low, array, cupy.cuda.Device().id)
        first = _address(array) - low
        return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, first), array.strides)

    def _stream(self, stream: Any) -> Any:
        return self._cupy.cuda.get_current_stream() if stream is None else stream


def _bounds(array: Host) -> tuple[int, int]:
    """The address of the lowest byte of an array, and the address after its highest byte."""
    low, high = extent(array)
    return _address(array) + low, _address(array) + high


def _address(array: Array) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
