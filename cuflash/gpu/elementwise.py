"""Work of CuPy on arrays that can be recorded: copies, fills, lengths; and arrays seen as elements of 16 bytes.

A kernel of CuPy that starts a thread for each element in half precision takes several times as long as memory does.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.arrays.memory_ranges import Span
from cuflash.gpu.replay import of_thread

Array = Any
WIDE = 16  # bytes of the largest element that CuPy copies


def lengths_in(span: Span, lengths: Array) -> Array:
    """How many rows of a span are within each of some lengths."""
    start, stop = span
    if isinstance(lengths, np.ndarray):
        return np.clip(lengths - start, 0, stop - start)
    clipped = importlib.import_module("cupy").empty(lengths.shape, lengths.dtype)
    apply(_lengths_in(start, stop - start, lengths.dtype.name), (lengths,), (clipped,))
    return clipped


@functools.lru_cache(maxsize=64)
def _lengths_in(start: int, count: int, dtype: str) -> Any:
    code = f"y = x < {start} ? 0 : x - {start} < {count} ? x - {start} : {count};"
    return importlib.import_module("cupy").ElementwiseKernel(f"{dtype} x", f"{dtype} y", code, "cuflash_lengths")


def apply(kernel: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
    """Run a kernel of CuPy, in a way that can be recorded."""
    kernel(*reads, *writes)
    if of_thread.recording is not None:
        of_thread.recording.on_arrays(lambda _, *arrays: kernel(*arrays), reads, writes)


def assign(target: Array, source: Array | float) -> None:
    """Fill an array, in a way that can be recorded."""
    if isinstance(source, (int, float)):
        apply(lambda target: target.__setitem__(..., source), (), (target,))
    else:
        apply(lambda source, target: target.__setitem__(..., source), (source,), (target,))


def in_wide_elements(array: Array) -> Array | None:
    """An array on a device as elements of 16 bytes; None where its layout does not allow that."""
    layout = wide_layout(array.shape, array.strides, array.itemsize, array.data.ptr % WIDE)
    if layout is None:
        return None
    return importlib.import_module("cupy").ndarray(layout[0], np.complex128, memptr=array.data, strides=layout[1])


@functools.lru_cache(maxsize=1024)
def wide_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of the same memory in elements of 16 bytes; None where the layout does not allow that."""
    if not shape or 0 in shape or strides[-1] != itemsize:
        return None
    *outer, last = shape
    steps_in_bytes = (address, last * itemsize, *(step for step, n in zip(strides, outer, strict=False) if n > 1))
    if any(step % WIDE for step in steps_in_bytes):
        return None
    return (*outer, last * itemsize // WIDE), (*strides[:-1], WIDE)
