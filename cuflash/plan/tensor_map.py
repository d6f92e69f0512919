"""Tensor maps, which describe arrays to the TMA unit of compute capability 9.0 (CUDA driver API, 6.29)."""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cuflash.arrays.array_info import FLOAT8, ITEMSIZE, Operand

BYTES = 128  # of a map
LINE_BYTES = 128  # bytes of a row of a box: the span of the swizzle
CHUNK = 64  # columns of a box of 16-bit elements
_MAX_STRIDE_BYTES = 2**40


@dataclass(frozen=True)
class TensorMapSpec:
    """A box of `heads` x `rows` x `columns` elements anywhere in an operand: all of a map but the operand's address."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # columns, rows, heads, batch
    strides_bytes: tuple[int, ...]  # of rows, heads, batch
    rows: int
    heads: int = 1
    read_once: bool = False  # one block reads each element: the cache need not fetch more than it asks for

    @property
    def columns(self) -> int:
        """Columns of a box: as many elements as `LINE_BYTES` hold."""
        return LINE_BYTES // ITEMSIZE[self.dtype]

    @property
    def of_any_rows(self) -> TensorMapSpec:
        """The spec with 0 in place of the operand's number of rows."""
        columns, _, heads, batch = self.shape
        return replace(self, shape=(columns, 0, heads, batch))


def tensor_map_spec(
    name: str, operand: Operand, rows: int, heads: int = 1, *, read_once: bool = False
) -> TensorMapSpec:
    """Boxes of `rows` rows of each of `heads` heads of `operand`, which has axes (batch, head, row, column).

    Axes along which it broadcasts have length 1 in the map.
    """
    itemsize = ITEMSIZE[operand.dtype]
    batch, num_heads, seqlen, columns = (
        size if stride else min(size, 1) for size, stride in zip(operand.shape, operand.strides, strict=True)
    )
    # An axis of length 1 is never stepped along, but its stride must be valid.
    strides = tuple(
        stride * itemsize if size > 1 else 16
        for size, stride in zip((seqlen, num_heads, batch), operand.strides[2::-1], strict=True)
    )
    return TensorMapSpec(name, operand.dtype, (columns, seqlen, num_heads, batch), strides, rows, heads, read_once)


def why_not(name: str, operand: Operand, *, written: bool = False, broadcasts: bool = False) -> str | None:
    """Why TMA cannot read the operand, or write it; None if it can.

    Where it `broadcasts`, the kernel leaves out the coordinates of axes of stride 0.
    """
    itemsize = ITEMSIZE[operand.dtype]
    if 0 in operand.shape:
        return f"{name} is empty"
    for size, stride in zip(operand.shape[:3], operand.strides[:3], strict=True):
        stride_bytes = stride * itemsize
        is_valid = 0 < stride_bytes < _MAX_STRIDE_BYTES and stride_bytes % 16 == 0
        if size > 1 and not is_valid and not (broadcasts and stride == 0):
            return f"a stride of {name} is {stride_bytes} bytes, not a positive multiple of 16"
    if operand.alignment < 16:
        return f"{name} is aligned to {operand.alignment} bytes only, not 16"
    row_bytes = operand.shape[3] * itemsize
    if written and row_bytes % 16:  # measured on an H200; reads end at the last element
        return f"a row of {name} is {row_bytes} bytes, not a multiple of the 16 that are written at once"
    return None


@functools.lru_cache(maxsize=512)
def encoder(spec: TensorMapSpec) -> Callable[[int, int], bytes]:
    """The function that makes the map of the array at an address, with so many rows, whatever the spec has.

    It remembers the latest maps. Numbers that do not change are converted once, because converting them takes longer
    than the rest.
    """
    driver, types, promotions, common = _driver()
    columns, _, *others = (driver.cuuint64_t(n) for n in spec.shape)
    strides = [driver.cuuint64_t(n) for n in spec.strides_bytes]
    box = [driver.cuuint32_t(n) for n in (spec.columns, spec.rows, spec.heads, 1)]
    steps = [driver.cuuint32_t(1)] * 4
    fill = driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    encode, row_count, dtype = driver.cuTensorMapEncodeTiled, driver.cuuint64_t, types[spec.dtype]
    rest = (strides, box, steps, *common, promotions[spec.read_once], fill)

    @functools.lru_cache(maxsize=64)
    def map_of(pointer: int, rows: int) -> bytes:
        error, tensor_map = encode(dtype, 4, pointer, [columns, row_count(rows), *others], *rest)
        if error.value:
            raise RuntimeError(f"cuTensorMapEncodeTiled returned {error.name} for {spec} with {rows} rows")
        return ctypes.string_at(tensor_map.getPtr(), BYTES)

    return map_of


@functools.cache
def _driver() -> tuple[Any, dict[str, Any], dict[bool, Any], tuple[Any, ...]]:
    driver = importlib.import_module("cuda.bindings.driver")  # plans are made without it
    data_type = driver.CUtensorMapDataType
    types = {
        "float16": data_type.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": data_type.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float32": data_type.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        **dict.fromkeys(FLOAT8, data_type.CU_TENSOR_MAP_DATA_TYPE_UINT8),
    }
    common = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    )
    # On an H200 the decode kernel takes 4 % less time with 128 bytes, all others 1 % less with 256.
    promotions = {
        False: driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        True: driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    }
    return driver, types, promotions, common
