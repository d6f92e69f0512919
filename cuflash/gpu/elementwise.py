"""Elementwise kernels of CuPy: one array of several, in one pass over memory.

Parts have the dtype of the softmax, and the result any dtype, to which it is rounded once. Where rows allow, a thread
has four numbers, because a thread for each number takes several times as long as memory does. bfloat16 is passed as its
bits, because not every version of CuPy has a type for it in such kernels.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.arrays.memory_ranges import Span
from cuflash.gpu.replay import of_thread
from cuflash.spec.row_sums import LARGE_LSE

Array = Any
LANES = 4  # float32 numbers of 16 bytes
WIDE = 16  # bytes of the largest element that CuPy copies
_TYPES = {8: np.complex64, WIDE: np.complex128}
_NARROW = ("float16", "bfloat16")
_HEADER = "#include <cuda_fp16.h>\n"  # CuPy includes it only where an argument is of float16
# Functions for the numbers in an element of 8 or 16 bytes, for which CuPy has complex dtypes.
_HELPERS = """
__device__ inline float cuflash_lane(const complex<double>& x, int i) {
  const unsigned long long bits = __double_as_longlong(i < 2 ? x.real() : x.imag());
  return __uint_as_float(i % 2 ? bits >> 32 : bits & 0xffffffffu);
}
__device__ inline unsigned cuflash_bfloat16(float x) {  // the bits of the nearest one, ties to even
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}
__device__ inline unsigned cuflash_float16(float x) {
  return __half_as_ushort(__float2half_rn(x));
}
__device__ inline float cuflash_of_bfloat16(unsigned bits) { return __uint_as_float(bits << 16); }
__device__ inline float cuflash_of_float16(unsigned bits) { return __half2float(__ushort_as_half(bits)); }
__device__ inline complex<float> cuflash_pack(unsigned a, unsigned b, unsigned c, unsigned d) {
  return complex<float>(__uint_as_float(a | b << 16), __uint_as_float(c | d << 16));
}
__device__ inline double cuflash_two(float a, float b) {
  return __longlong_as_double(__float_as_uint(a) | (unsigned long long)__float_as_uint(b) << 32);
}
"""


class Text(NamedTuple):
    """The source of such a kernel."""

    inputs: str
    output: str
    code: str
    preamble: str = _HELPERS


class Formula(NamedTuple):
    """How numbers of parts make one: `{T}` stands for their type, `{x0}` for that of the first part, and so on."""

    name: str
    value: str
    prepare: str = ""  # code for a row, whose numbers are `r0` and so on
    rows: int = 0  # how many numbers a row has
    has_pairs: bool = False  # whether these are pairs, as complex numbers

    def text(self, parts: int, dtype: str, *, is_wide: bool) -> Text:
        """The kernel for so many parts and a result of a dtype."""
        of_part = "complex128" if is_wide else "T"
        of_row = "C" if self.has_pairs else "T"
        inputs = [*(f"{of_part} x{i}" for i in range(parts)), *(f"{of_row} r{i}" for i in range(self.rows))]
        if is_wide:
            inputs = [x.replace("T ", "float32 ").replace("C ", "complex64 ") for x in inputs]
        prepare = self.prepare.format(T="T")
        if not is_wide:
            value = self.value.format(T="T", **{f"x{i}": f"x{i}" for i in range(parts)})
            if dtype == "bfloat16":
                return Text(", ".join(inputs), "uint16 y", f"{prepare} y = cuflash_bfloat16({value});")
            return Text(", ".join(inputs), f"{dtype} y", f"{prepare} y = {value};")
        code = [self.prepare.format(T="float")]
        for lane in range(LANES):
            numbers = {f"x{i}": f"cuflash_lane(x{i}, {lane})" for i in range(parts)}
            code.append(f"const float y{lane} = {self.value.format(T='float', **numbers)};")
        if dtype in _NARROW:
            output = "complex64 y"
            code.append(f"y = cuflash_pack({', '.join(f'cuflash_{dtype}(y{i})' for i in range(LANES))});")
        else:
            output = "complex128 y"
            code.append("y = complex<double>(cuflash_two(y0, y1), cuflash_two(y2, y3));")
        return Text(", ".join(inputs), output, " ".join(code))

    def run(self, parts: Sequence[Array], rows: Sequence[Array], target: Array) -> None:
        """Fill an array on a device from parts of its shape, and from numbers of rows."""
        dtype = target.dtype.name
        width = WIDE * target.itemsize // parts[0].itemsize if parts and parts[0].dtype == np.float32 else 0
        into = in_wide_elements(target, width) if width in _TYPES else None
        views = [] if into is None else [in_wide_elements(x, WIDE) for x in parts]
        is_wide = into is not None and all(view is not None for view in views)
        if not is_wide:
            views, into = list(parts), target.view(np.uint16) if dtype == "bfloat16" else target
        of_rows = [x[..., None] for x in rows] if parts else rows
        apply(_kernel(self, len(parts), dtype, is_wide), (*views, *of_rows), (into,))


@functools.lru_cache(maxsize=256)
def _kernel(formula: Formula, parts: int, dtype: str, is_wide: bool) -> Any:
    inputs, output, code, preamble = formula.text(parts, dtype, is_wide=is_wide)
    name = f"cuflash_{formula.name}_{parts}_{dtype}{'_wide' if is_wide else ''}"
    return importlib.import_module("cupy").ElementwiseKernel(inputs, output, code, name, preamble=_HEADER + preamble)


@functools.lru_cache(maxsize=64)
def sum_of(parts: int) -> Formula:
    """The sum of parts, in their order."""
    return Formula("add", " + ".join(f"{{x{i}}}" for i in range(parts)))


@functools.lru_cache(maxsize=64)
def merged_of(parts: int) -> Formula:
    """Parts of attention weighted by their lse, which rows have: those of weight zero count for nothing."""
    every = range(parts)
    value = " + ".join(f"(w{i} == 0 ? {{T}}(0) : w{i} * {{x{i}}})" for i in every)
    weights = [f"const {{T}} w{i} = exp(r{i} - offset) / total;" for i in every]
    return Formula("merge", value, " ".join([_exponentials(parts), "if (total == 0) total = 1;", *weights]), parts)


@functools.lru_cache(maxsize=64)
def lse_of(parts: int) -> Formula:
    """The lse of all parts."""
    return Formula("lse", "offset + log(total)", _exponentials(parts), parts)


def _exponentials(parts: int) -> str:
    """Code for the largest lse of a row, or 0 if all are -inf, and for the sum of exponentials of lse less that."""
    every = range(parts)
    code = ["{T} offset = r0;", *(f"if (r{i} > offset || r{i} != r{i}) offset = r{i};" for i in every[1:])]
    code += ["if (isinf(offset) && offset < 0) offset = 0;"]
    return " ".join([*code, f"{{T}} total = {' + '.join(f'exp(r{i} - offset)' for i in every)};"])


# The same of pairs of lse and what its rounding leaves of it, which rows have as complex numbers. Where lse is large,
# the weight of a part depends on the latter; elsewhere it is 0.


@functools.lru_cache(maxsize=64)
def merged_of_pairs(parts: int) -> Formula:
    """Parts of attention weighted by their lse."""
    plain, prepare = merged_of(parts), _exponentials_of_pairs(parts)
    weights = [f"const auto w{i} = exp({_relative(i)}) / total;" for i in range(parts)]
    prepare = " ".join([prepare, "if (total == 0) total = 1;", *weights])
    return Formula("merge_pairs", plain.value, prepare, parts, has_pairs=True)


@functools.lru_cache(maxsize=64)
def lse_of_pairs(parts: int) -> Formula:
    """The lse of all parts."""
    return Formula("lse_of_pairs", "offset + log(total)", _exponentials_of_pairs(parts), parts, has_pairs=True)


@functools.lru_cache(maxsize=64)
def pairs_of(parts: int) -> Formula:
    """The lse of all parts, and what its rounding leaves."""
    prepare = f"{_exponentials_of_pairs(parts)} const auto lse = offset + log(total);"
    prepare += f" const auto rest = abs(lse) >= {LARGE_LSE} && !isinf(lse) ? (offset - lse) + log(total) : lse - lse;"
    return Formula("pairs", "C(lse, isinf(lse) ? 0 : rest)", prepare, parts, has_pairs=True)


def as_pairs(array: Array) -> Array:
    """Pairs of numbers, on the last axis, as complex numbers."""
    return array.view(np.complex64 if array.dtype == np.float32 else np.complex128)[..., 0]


def _relative(part: int) -> str:
    return f"(r{part}.real() - offset) + r{part}.imag()"


def _exponentials_of_pairs(parts: int) -> str:
    """As `_exponentials`; the sum is relative to the largest lse."""
    every = range(parts)
    code = ["auto offset = r0.real();"]
    code += [f"if (r{i}.real() > offset || r{i}.real() != r{i}.real()) offset = r{i}.real();" for i in every[1:]]
    code += ["if (isinf(offset) && offset < 0) offset = 0;"]
    return " ".join([*code, f"auto total = {' + '.join(f'exp({_relative(i)})' for i in every)};"])


def minus_row_products(x: Array, y: Array, dtype: Any) -> Array:
    """Minus the sum of the products of each row of two arrays on a device, in the dtype of the softmax."""
    views = [in_wide_elements(array, WIDE) for array in (x, y)] if x.dtype.name != "float64" else [None]
    if any(view is None for view in views):
        return -(x.astype(dtype) * y.astype(dtype)).sum(axis=-1)
    found = importlib.import_module("cupy").empty(x.shape[:-1], dtype)
    apply(_row_products(x.dtype.name), views, (found,), axis=-1)
    return found


@functools.lru_cache(maxsize=8)
def _row_products(dtype: str) -> Any:
    kernel = importlib.import_module("cupy").ReductionKernel
    code = ("complex128 x, complex128 y", "float32 z", "cuflash_products(x, y)", "a + b", "z = -a", "0")
    return kernel(*code, f"cuflash_row_products_{dtype}", preamble=_HEADER + _HELPERS + products_text(dtype))


def products_text(dtype: str) -> str:
    """The source of a function that adds the products of the numbers in two elements."""
    lanes = [f"cuflash_lane({{0}}, {i})" for i in range(LANES)]
    if dtype in _NARROW:
        bits = [f"__float_as_uint({lane})" for lane in lanes]
        lanes = [f"cuflash_of_{dtype}({half})" for x in bits for half in (f"{x} & 0xffffu", f"{x} >> 16")]
    terms = " + ".join(f"{lane.format('x')} * {lane.format('y')}" for lane in lanes)
    return (
        "__device__ inline float cuflash_products(const complex<double>& x, const complex<double>& y) "
        f"{{ return {terms}; }}\n"
    )


def lengths_in(span: Span, lengths: Array) -> Array:
    """How many rows of a span are within each of some lengths."""
    start, stop = span
    if isinstance(lengths, np.ndarray):
        return np.clip(lengths - start, 0, stop - start)
    found = importlib.import_module("cupy").empty(lengths.shape, lengths.dtype)
    apply(_lengths_in(start, stop - start, lengths.dtype.name), (lengths,), (found,))
    return found


@functools.lru_cache(maxsize=64)
def _lengths_in(start: int, count: int, dtype: str) -> Any:
    code = f"y = x < {start} ? 0 : x - {start} < {count} ? x - {start} : {count};"
    return importlib.import_module("cupy").ElementwiseKernel(f"{dtype} x", f"{dtype} y", code, "cuflash_lengths")


def apply(kernel: Any, reads: Sequence[Array], writes: Sequence[Array], **how: Any) -> None:
    """Run a kernel of CuPy, in a way that can be recorded."""
    kernel(*reads, *writes, **how)
    if of_thread.recording is not None:
        of_thread.recording.on_arrays(lambda _, *arrays: kernel(*arrays, **how), reads, writes)


def assign(target: Array, source: Array | float) -> None:
    """Fill an array, in a way that can be recorded."""
    if isinstance(source, (int, float)):
        apply(lambda target: target.__setitem__(..., source), (), (target,))
    else:
        apply(lambda source, target: target.__setitem__(..., source), (source,), (target,))


def in_wide_elements(array: Array, width: int) -> Array | None:
    """An array on a device as elements of 8 or 16 bytes; None where its layout does not allow that."""
    layout = wide_layout(array.shape, array.strides, array.itemsize, array.data.ptr % width, width)
    if layout is None:
        return None
    return importlib.import_module("cupy").ndarray(layout[0], _TYPES[width], memptr=array.data, strides=layout[1])


@functools.lru_cache(maxsize=1024)
def wide_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int, width: int = WIDE
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of the same memory in elements of `width` bytes; None where the layout does not allow that."""
    if not shape or 0 in shape or strides[-1] != itemsize:
        return None
    *others, last = shape
    places = (address, last * itemsize, *(step for step, n in zip(strides, others, strict=False) if n > 1))
    if any(place % width for place in places):
        return None
    return (*others, last * itemsize // width), (*strides[:-1], width)
