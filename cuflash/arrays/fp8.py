"""fp8 numbers: the two formats, rounding to them, and arrays of them where the library has no such dtype.

    format          sign, exponent, fraction bits   largest   smallest   beyond the largest
    float8_e4m3fn   1, 4, 3                         448       2**-9      NaN; there is no infinity
    float8_e5m2     1, 5, 2                         57344     2**-16     infinity

The same operations round on NumPy and on CuPy arrays: CuPy has neither dtype, so its arrays are bytes in a
`Float8Array`, which says what they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import FLOAT8, numpy_dtype
from cuflash.arrays.checks import type_error, value_error

SHORT = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
FRACTION_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2}
LEAST_EXPONENT = {"float8_e4m3fn": -6, "float8_e5m2": -14}  # of a normal number
LARGEST = {name: float(ml_dtypes.finfo(numpy_dtype(name)).max) for name in FLOAT8}  # type: ignore[no-untyped-call]
LARGEST_CODE = {"float8_e4m3fn": 0x7E, "float8_e5m2": 0x7B}  # the next code is NaN or infinity
NAN_CODE = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}


def float8_dtype(dtype: Any) -> np.dtype[Any]:
    """One of the two dtypes by its name, long or short, or by itself."""
    name = SHORT.get(dtype, dtype) if isinstance(dtype, str) else getattr(dtype, "name", None)
    name = getattr(dtype, "__name__", None) if name is None else name
    if name not in FLOAT8:
        raise value_error("dtype", repr(dtype), "'float8_e4m3fn' ('e4m3') or 'float8_e5m2' ('e5m2')")
    return numpy_dtype(name)


def encode(xp: Any, x: Any, dtype: np.dtype[Any]) -> Any:
    """The bytes of x rounded to nearest, ties to even; x is float32 or float64, an array of the module `xp`."""
    name = dtype.name
    magnitude = xp.abs(x)
    is_finite = magnitude < math.inf
    magnitude = xp.where(is_finite, magnitude, 0)
    _, exponent = xp.frexp(magnitude)  # magnitude = m * 2**exponent, with m from 1/2 to 1
    exponent = xp.where(magnitude > 0, exponent - 1, LEAST_EXPONENT[name])
    # Exponents beyond those of the format only have to give codes above its largest one.
    step = xp.clip(exponent, LEAST_EXPONENT[name], 16)
    units = xp.rint(xp.ldexp(magnitude, FRACTION_BITS[name] - step)).astype(x.dtype)
    codes = xp.ldexp((step - LEAST_EXPONENT[name]).astype(x.dtype), FRACTION_BITS[name]) + units
    codes = xp.minimum(codes, LARGEST_CODE[name] + 1)
    codes = xp.where(is_finite, codes, xp.where(x == x, LARGEST_CODE[name] + 1, NAN_CODE[name]))
    return codes.astype(np.uint8) | (xp.signbit(x).astype(np.uint8) << np.uint8(7))


def decode(xp: Any, codes: Any, dtype: np.dtype[Any]) -> Any:
    """The numbers of bytes, exactly, as float32."""
    return xp.take(xp.asarray(_numbers(dtype.name)), codes)


@functools.cache
def _numbers(name: str) -> NDArray[Any]:
    """The number of each byte."""
    return np.arange(256, dtype=np.uint8).view(numpy_dtype(name)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Float8Array:
    """A CuPy array of bytes that are fp8 numbers, as `cuflash.fp8` makes it. Slices are views.

    Attributes
    ----------
    bits : cupy.ndarray
        The bytes, uint8.
    dtype : numpy.dtype
        float8_e4m3fn or float8_e5m2.
    """

    bits: Any
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bits.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes."""
        return tuple(self.bits.strides)

    @property
    def ndim(self) -> int:
        return len(self.bits.shape)

    @property
    def itemsize(self) -> int:
        return 1

    @property
    def data(self) -> Any:
        """Where the bytes lie."""
        return self.bits.data

    def __getitem__(self, index: Any) -> Float8Array:
        return Float8Array(self.bits[index], self.dtype)

    def transpose(self, *axes: Any) -> Float8Array:
        """As `cupy.ndarray.transpose`: a view."""
        return Float8Array(self.bits.transpose(*axes), self.dtype)


def fp8(array: Any, dtype: Any) -> Any:
    """Bytes as the fp8 numbers that they are: a view, as attention takes it for k and v.

    Parameters
    ----------
    array : numpy.ndarray or cupy.ndarray
        uint8, of any shape and strides.
    dtype : {"e4m3", "e5m2"} or dtype
        Also by the names "float8_e4m3fn" and "float8_e5m2", or a dtype of `ml_dtypes`.

    Returns
    -------
    numpy.ndarray or cuflash.arrays.fp8.Float8Array
        An array of that dtype; of a CuPy array, since CuPy has no such dtype, an object with shape, strides, dtype and
        slices, whose attribute `bits` is the array.

    Raises
    ------
    TypeError
        Not a NumPy or CuPy array, or not of uint8.
    ValueError
        Another `dtype`.

    See Also
    --------
    quantize : Makes fp8 numbers and scales of other ones.
    FlashAttention.forward

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> cuflash.fp8(np.array([0x38, 0xB8, 0x7E], np.uint8), "e4m3").astype(np.float32)
    array([  1.,  -1., 448.], dtype=float32)
    """
    named = float8_dtype(dtype)
    is_numpy = isinstance(array, np.ndarray)
    if not is_numpy and (isinstance(array, Float8Array) or not hasattr(array, "__cuda_array_interface__")):
        raise type_error("array", type(array).__name__, "a NumPy or CuPy array of uint8")
    if array.dtype != np.uint8:
        raise type_error("array", f"dtype {array.dtype}", "uint8")
    return array.view(named) if is_numpy else Float8Array(array, named)


def bits_of(array: Any) -> Any:
    """The bytes of a `Float8Array`, or another array as it is."""
    return array.bits if isinstance(array, Float8Array) else array


def on_bits(function: Callable[[Any], Any], array: Any) -> Any:
    """Apply a function to the bytes of an array of such numbers, which it keeps, or to another array as it is."""
    if isinstance(array, Float8Array):
        return Float8Array(function(array.bits), array.dtype)
    if array.dtype.name in FLOAT8:
        return function(array.view(np.uint8)).view(array.dtype)
    return function(array)
