"""Memory that kernels run on in the emulator: arrays between inaccessible pages, scratch arrays, and tensor maps."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from cuflash.emulator.launching import EmulationError
from cuflash.plan import ScratchLayout

_GUARD_ALIGNMENT = 16


def guarded_array(shape: int | Sequence[int], dtype: DTypeLike, fill: int = 0xFF) -> np.ndarray:
    """A NumPy array between two inaccessible pages.

    The page after it starts at its last byte, rounded up to 16 bytes; the page before it where its first page starts.
    Every byte is `fill`: 0xFF is NaN in all floating-point types.
    """
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = int(np.prod(shape, dtype=np.int64))
    page = mmap.PAGESIZE
    array_bytes = count * dtype.itemsize
    aligned_bytes = -(-array_bytes // _GUARD_ALIGNMENT) * _GUARD_ALIGNMENT
    usable_bytes = -(-aligned_bytes // page) * page
    mapping = mmap.mmap(-1, usable_bytes + 2 * page)
    storage = np.frombuffer(mapping, np.uint8)
    for offset in (0, page + usable_bytes):
        _make_inaccessible(storage.ctypes.data + offset, page)
    end = page + usable_bytes
    storage[page:end] = fill
    start = end - aligned_bytes
    return storage[start : start + array_bytes].view(dtype).reshape(shape)


def _make_inaccessible(address: int, size: int) -> None:
    no_access = 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), no_access):
        raise OSError(ctypes.get_errno(), "mprotect")


class Scratch:
    """Scratch arrays, whose bytes all have one value, at addresses of one allocation but for multiples of 256 bytes.

    By these multiples each is moved to the end of pages of its own, between two that are inaccessible.
    """

    MODULUS = 256  # an allocation on a device starts at a multiple of this

    def __init__(self, layout: ScratchLayout, fill: int) -> None:
        page = mmap.PAGESIZE
        capacities = [-(-(size + self.MODULUS) // page) * page for size in layout.sizes]
        memory = np.frombuffer(mmap.mmap(-1, page + sum(capacity + page for capacity in capacities)), np.uint8)
        start = memory.ctypes.data
        self.layout = layout
        self.addresses: list[int] = []
        self._fill = fill
        # Bytes between each array and the inaccessible pages around it.
        self._gaps: list[tuple[np.ndarray, np.ndarray]] = []
        _make_inaccessible(start, page)
        first = page
        for offset, size, capacity in zip(layout.offsets, layout.sizes, capacities, strict=True):
            stop = first + capacity
            at = stop - size - (stop - size - offset) % self.MODULUS
            memory[first:stop] = fill
            self.addresses.append(start + at)
            self._gaps.append((memory[first:at], memory[at + size : stop]))
            _make_inaccessible(start + stop, page)
            first = stop + page

    def array(self, name: str, dtype: DTypeLike) -> np.ndarray:
        """A view of one of the arrays."""
        index = self.layout.names.index(name)
        content = (ctypes.c_uint8 * self.layout.sizes[index]).from_address(self.addresses[index])
        return np.ctypeslib.as_array(content).view(dtype)

    def check(self, kernel: str) -> None:
        """Raise EmulationError if the kernel that ran last wrote before or after one of the arrays."""
        for name, (before, after) in zip(self.layout.names, self._gaps, strict=True):
            if np.any(before != self._fill):
                raise EmulationError(kernel, f"wrote before the start of scratch array {name}")
            if np.any(after != self._fill):
                first = int(np.flatnonzero(after != self._fill)[0])
                raise EmulationError(kernel, f"wrote {first} bytes past the end of scratch array {name}")


_TENSOR_MAP = np.dtype(
    [
        ("magic", np.uint64),
        ("base", np.uint64),
        ("strides", np.uint64, 3),
        ("dims", np.uint32, 4),
        ("box", np.uint32, 4),
        ("element_bytes", np.uint32),
        ("padding", np.uint8, 52),
    ]
)
_TENSOR_MAP_MAGIC = int.from_bytes(b"TNSORMAP", "little")


def tensor_map(
    address: int, element_bytes: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> np.ndarray:
    """What stands in the emulator for a CUtensorMap of rank 4 with the 128-byte swizzle: 16 words.

    It goes where the launch puts the result of cuTensorMapEncodeTiled, and refuses what that refuses. `dims` are
    elements along each axis, that of neighbours first: columns, rows, heads, batch; `strides` bytes from one row, head
    and batch entry to the next; `box` the elements along each axis that one copy moves.
    """
    row_bytes = box[0] * element_bytes
    for wrong, problem in (
        (len(dims) != 4 or len(strides) != 3 or len(box) != 4, "4 dims, 3 strides and 4 box sizes are needed"),
        (address % 16, "the address must be a multiple of 16"),
        (any(not 0 < size <= 2**32 for size in dims), "dims must lie between 1 and 2**32"),
        (
            any(stride % 16 or not 0 < stride < 2**40 for stride in strides),
            "strides must be positive multiples of 16 under 2**40",
        ),
        (any(not 0 < size <= 256 for size in box), "box sizes must lie between 1 and 256"),
        (row_bytes != 128, "a row of the box must have 128 bytes: others are not emulated"),
        (np.prod(box) * element_bytes % 128, "the box must be a multiple of 128 bytes: else not emulated"),
    ):
        if wrong:
            raise ValueError(
                f"tensor map of dims {tuple(dims)}, strides {tuple(strides)}, box {tuple(box)}, {element_bytes} bytes "
                f"an element, at {address:#x}: {problem}"
            )
    content = np.zeros((), _TENSOR_MAP)
    content["magic"], content["base"], content["element_bytes"] = _TENSOR_MAP_MAGIC, address, element_bytes
    content["strides"], content["dims"], content["box"] = strides, dims, box
    return np.frombuffer(content.tobytes(), np.uint64)


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy of `array`, strides and alignment kept, that ends at an inaccessible page; NaN between its elements.

    Of an array without elements no byte is accessible: on a device its address is 0.
    """
    if array.size == 0:
        return np.ndarray(array.shape, array.dtype, guarded_array(0, np.uint8), 0, array.strides)
    low = high = 0
    for size, stride in zip(array.shape, array.strides, strict=True):
        extent = (size - 1) * stride if size else 0
        low, high = low + min(extent, 0), high + max(extent, 0)
    lead = (array.ctypes.data + low) % 16
    storage = guarded_array((lead + high - low + array.itemsize,), np.uint8)
    copy = np.ndarray(array.shape, array.dtype, storage, lead - low, array.strides)
    copy[...] = array
    return copy
