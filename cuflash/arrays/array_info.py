"""Arrays as kernels read them: four axes, dtypes by name, strides in elements; and shapes as callers pass them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cuflash.arrays.checks import type_error, value_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

DTYPES = ("float16", "bfloat16", "float32", "float64")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")  # of k and v, or of q, k and v
ITEMSIZE = {
    "bool": 1,
    **dict.fromkeys(FLOAT8, 1),
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy dtype of a dtype name of cuflash, those of `ml_dtypes` included.

    Parameters
    ----------
    name : str
        "float16", "bfloat16", "float8_e4m3fn", "int32" and so on.

    Returns
    -------
    numpy.dtype
        With `ml_dtypes`, those of bfloat16 and fp8.

    Raises
    ------
    TypeError
        There is no such dtype.

    See Also
    --------
    Case : Its field `dtype` is such a name.
    """
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name) if name in ("bfloat16", *FLOAT8) else name)


def softmax_dtype_of(dtype: str) -> str:
    """The dtype of scores, lse and delta for inputs of a dtype: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


class Shaped(Protocol):
    """The attributes of an array that a problem is made from. It is of any library, or does not exist yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes."""

    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One array as kernels read it: four axes, strides in elements, stride 0 on broadcast axes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    in_k: bool = False  # it consists of the first columns of k; set for v only
    # Bytes that its address is a multiple of, up to 16; set for a bias, its gradient and the arrays of `Layout`.
    alignment: int = 16

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements: broadcast axes count once."""
        sizes = [n for n, stride in zip(self.shape, self.strides, strict=True) if stride or n <= 1]
        return math.prod(sizes) * ITEMSIZE[self.dtype]


def user_shape(batch: int, heads: int, seqlen: int, dim: int, ndim: int, layout: str) -> tuple[int, ...]:
    """Shape of an operand as the caller wrote it: without the axes that an `ndim`-dimensional array does not have."""
    if layout == "bshd" and ndim >= 3:
        return (batch, seqlen, heads, dim)[4 - ndim :]
    return (batch, heads, seqlen, dim)[4 - ndim :]


def view_4d(array: Any, layout: str) -> Any:
    """A 2-D to 4-D NumPy or CuPy operand as (batch, heads, seqlen, dim)."""
    ndim = array.ndim
    if layout == "bshd" and ndim >= 3:
        array = array.swapaxes(-3, -2)
    return array if ndim == 4 else array[(None,) * (4 - ndim)]


def view_rows(array: Any) -> Any:
    """An lse-shaped NumPy or CuPy array as (batch, heads, seqlen_q)."""
    return array if array.ndim == 3 else array[(None,) * (3 - array.ndim)]


def extent(array: Shaped, shape: Sequence[int] | None = None) -> tuple[int, int]:
    """Bytes from the address of an array to its lowest byte and past its highest, as it is or if it had a shape."""
    shape = array.shape if shape is None else shape
    if 0 in shape:
        return 0, 0
    reaches = [(n - 1) * stride for n, stride in zip(shape, array.strides, strict=True)]
    return sum(r for r in reaches if r < 0), sum(r for r in reaches if r > 0) + array.dtype.itemsize


def layout_of(array: Shaped, layout: str) -> Operand:
    """(batch, heads, seqlen, dim) shape and element strides of a 2-D to 4-D operand.

    An axis of length 1 gets stride 0: the stride that it came with is never used, and need not be aligned.
    """
    itemsize = array.dtype.itemsize
    shape = list(array.shape)
    strides = [s // itemsize if n > 1 else 0 for n, s in zip(shape, array.strides, strict=True)]
    while len(shape) < 4:
        at = 1 if layout == "bshd" and len(shape) == 2 else 0  # the head axis of a 2-D bshd array goes in the middle
        shape.insert(at, 1)
        strides.insert(at, 0)
    if layout == "bshd":
        shape[1], shape[2] = shape[2], shape[1]
        strides[1], strides[2] = strides[2], strides[1]
    return Operand(shape=tuple(shape), strides=tuple(strides), dtype=array.dtype.name)


def as_it_is(array: Shaped) -> Operand:
    """Shape and element strides of any array."""
    shape = tuple(array.shape)
    strides = tuple(0 if n == 1 else s // array.dtype.itemsize for n, s in zip(shape, array.strides, strict=True))
    return Operand(shape=shape, strides=strides, dtype=array.dtype.name)


def rows_of(array: Shaped) -> Operand:
    """(batch, heads, seqlen_q) shape and element strides of an lse-shaped array."""
    missing = 3 - len(array.shape)
    strides = tuple(s // array.dtype.itemsize for s in array.strides)
    return Operand(shape=(1,) * missing + tuple(array.shape), strides=(0,) * missing + strides, dtype=array.dtype.name)


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether NumPy broadcasts an array of this shape to the target."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, m) for n, m in pairs)


def broadcast_operand(
    name: str, array: Shaped, target: tuple[int, ...], axes: str = "(batch, num_heads, seqlen_q, seqlen_k)"
) -> Operand:
    """Shape and element strides of `array` broadcast to `target`, as NumPy broadcasts. `axes` are those of `target`."""
    if not broadcasts(array.shape, target):
        expected = f"a shape that broadcasts to {axes} = {target}{how_to_give_keys(name, array.shape, target)}"
        raise value_error(name, f"shape {tuple(array.shape)}", expected)
    missing = len(target) - len(array.shape)
    of_empty = int(0 in array.shape)  # whose strides are 0, though no axis is broadcast
    strides = [0] * missing + [
        0 if n == 1 else s // array.dtype.itemsize or of_empty for n, s in zip(array.shape, array.strides, strict=True)
    ]
    return Operand(shape=target, strides=tuple(strides), dtype=array.dtype.name)


def how_to_give_keys(name: str, shape: Sequence[int], target: tuple[int, ...]) -> str:
    """What a message on an array over scores adds if it has an axis for the batch and one for keys, and no others."""
    if tuple(shape) != (*target[:-3], target[-1]):
        return ""
    index = ", ".join([":"] * len(target[:-3]) + ["None, None, :"])
    return f": {name}[{index}], if it is one of keys"


def check_dtype(name: str, array: Shaped, expected: tuple[str, ...], why: str = "") -> None:
    if array.dtype.name not in expected:
        raise type_error(name, f"dtype {array.dtype}", " or ".join(expected) + why)


def check_byte_order(name: str, dtype: Any) -> None:
    if not dtype.isnative:
        raise type_error(name, f"dtype {dtype.str}", f"native byte order: {name}.astype({dtype.name!r})")


def check_array(name: str, array: Shaped, shape: tuple[int, ...], dtype: str, *, is_read: bool = True) -> None:
    """Check an array whose shape and dtype follow from the problem: dout, out, lse and the `out=`-style results."""
    if array.dtype.name != dtype:
        raise type_error(name, f"dtype {array.dtype}", dtype)
    check_shape(name, tuple(array.shape), shape, is_read=is_read)


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], *, is_read: bool = True) -> None:
    """Check the shape of such an array. Those that are read do not broadcast: an index too many would go unnoticed."""
    if shape != expected:
        may_broadcast = is_read and broadcasts(shape, expected)
        remedy = f": numpy.broadcast_to({name}, {expected}), if that is meant" if may_broadcast else ""
        raise value_error(name, f"shape {shape}", f"{expected}{remedy}")


def block_of_scales(count: int, keys: int) -> int:
    """The power of two whose blocks divide `keys` keys into `count` blocks, at least two; 0 if there is none.

    No other power of two makes as many blocks: half of it makes nearly twice as many.
    """
    block = 1
    while -(-keys // block) > max(count, 1):
        block *= 2
    return block if -(-keys // block) == count else 0
