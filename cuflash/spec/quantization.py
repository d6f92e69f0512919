"""Keys and values in fp8, with scales; and the rotation that spreads large channels over a head.

`quantize` makes what attention takes as k and `k_scale`, or as v and `v_scale`; `dequantize` goes back. Both, and
`rotate`, are plain operations on NumPy or CuPy arrays.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, NamedTuple

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.array_info import DTYPES, FLOAT8, block_of_scales, numpy_dtype
from cuflash.arrays.checks import as_bool, as_integer, check_choice, type_error, typed, value_error
from cuflash.arrays.fp8 import LARGEST, Float8Array, decode, encode, float8_dtype
from cuflash.spec import array_imports
from cuflash.spec.options import LAYOUTS
from cuflash.spec.scalars import array_of, is_scalar

Array = Any  # a NumPy or CuPy array, or a `Float8Array`

PER = ("tensor", "head", "block", "token")
SMALLEST_SCALE = 2.0**-126  # a normal number of float32, so that quotients by it are right


class Quantized(NamedTuple):
    """What `quantize` returns.

    Attributes
    ----------
    array : numpy.ndarray or cuflash.arrays.fp8.Float8Array
        The fp8 numbers, of the shape of x.
    scale : array
        float32: the numbers times this are about x. `quantize` says which shapes there are.

    See Also
    --------
    quantize
    dequantize
    """

    array: Array
    scale: Array


@np.errstate(all="ignore")
def quantize(
    x: Array,
    dtype: Any = "float8_e4m3fn",
    *,
    per: Literal["tensor", "head", "block", "token"] = "head",
    block: int = 64,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    rotate: bool = False,
) -> Quantized:
    """Keys or values in fp8, times scales.

    Parameters
    ----------
    x : array
        NumPy or CuPy: k or v as attention takes them, 2-D to 4-D, float16, bfloat16, float32 or float64.
    dtype : {"float8_e4m3fn", "float8_e5m2"}
        Or "e4m3", "e5m2", or a dtype of `ml_dtypes`. The first has 4 significant bits, the second 3 and a larger
        range, which scales make needless for most arrays.
    per : {"tensor", "head", "block", "token"}
        What has a scale of its own: the array, each head, each block of keys of a head, or each key of a head.
    block : int, default 64
        Keys of a block, a power of two, for ``per="block"``.
    layout : {"bhsd", "bshd"}, default "bhsd"
        Order of the axes of x.
    rotate : bool, default False
        Whether rows are rotated first, as `rotate` does: for k, if q is rotated too. Scores stay the same.

    Returns
    -------
    Quantized
        ``array``: shape of x; of CuPy arrays a `cuflash.arrays.fp8.Float8Array`. ``scale``: float32, () per tensor,
        or (..., heads, 1), (..., heads, ceil(keys / block)) or (..., heads, keys) in every layout. The largest finite
        number of what has a scale becomes the largest number of the dtype; a scale is at least 2 ** -126, and 1 where
        all numbers are 0. NaN stays NaN; an infinity becomes NaN in float8_e4m3fn, which has none.

    Raises
    ------
    TypeError
        x is neither of NumPy nor of CuPy, or has another dtype; `block` is no integer, or `rotate` no bool.
    ValueError
        An unknown `dtype`, `per` or `layout`; a `block` that is no power of two; x with less than two axes; float64
        numbers whose scale is above the range of float32: of magnitude 1.5e41 and more in float8_e4m3fn, 2e43 in
        float8_e5m2. To find these, a call with float64 CuPy arrays waits for the device.

    See Also
    --------
    dequantize : Its inverse, but for rounding.
    rotate : Spreads large channels.
    fp8 : A view of fp8 numbers that are there already.
    FlashAttention.forward : Takes the result as k and `k_scale`, or v and `v_scale`.

    References
    ----------
    Micikevicius and others: FP8 formats for deep learning (2022), https://arxiv.org/abs/2209.05433.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 300, 64), np.float32)
    >>> (k8, k_scale), (v8, v_scale) = cuflash.quantize(k), cuflash.quantize(v, per="block")
    >>> out = cuflash.attention(q, k8, v8, k_scale=k_scale, v_scale=v_scale)
    >>> k_scale.shape, v_scale.shape, bool(abs(out - cuflash.attention(q, k, v)).max() < 0.1)
    ((2, 1), (2, 5), True)
    """
    named = float8_dtype(dtype)
    if not isinstance(per, str) or per not in PER:
        raise value_error("per", repr(per), " or ".join(map(repr, PER)))
    size = as_integer("block", block)
    if size < 1 or size & (size - 1):
        raise value_error("block", size, "a power of two")
    xp, x = _taken("x", x, layout)
    wide = _by_heads(_rotated(xp, x) if as_bool("rotate", rotate) else _wide(x), layout)
    magnitude = xp.abs(wide)
    magnitude = xp.where(magnitude < np.inf, magnitude, 0)
    largest = _largest(xp, magnitude, per, size)
    scale = (largest / LARGEST[named.name]).astype(np.float32)
    if largest.dtype == np.float64 and not bool(xp.isfinite(scale).all()):
        limit = LARGEST[named.name] * float(np.finfo(np.float32).max)
        raise value_error(
            "x",
            f"a number of magnitude {float(largest.max()):.4g}",
            f"at most {limit:.4g}, the largest scale of float32 times the largest number of {named.name}: "
            "divide x by a power of two first",
        )
    scale = xp.where(largest == 0, np.float32(1), xp.maximum(scale, np.float32(SMALLEST_SCALE))).astype(np.float32)
    codes = encode(xp, wide / _of_keys(scale, wide.shape[-2]).astype(wide.dtype), named)
    codes = xp.ascontiguousarray(_by_heads(codes, layout))
    return Quantized(codes.view(named) if xp is np else Float8Array(codes, named), scale)


@np.errstate(all="ignore")
def dequantize(
    x: Array,
    scale: Array | None = None,
    *,
    dtype: Any = "float32",
    layout: Literal["bhsd", "bshd"] = "bhsd",
    rotate: bool = False,
) -> Array:
    """The numbers that k with `k_scale`, or v with `v_scale`, stand for; the inverse of `quantize`, but for rounding.

    Parameters
    ----------
    x : array
        NumPy, of dtype float8_e4m3fn or float8_e5m2; or what `cuflash.fp8` makes of a CuPy array.
    scale : array or float, optional
        As attention takes `k_scale`; without it, 1.
    dtype : dtype, default float32
        Of the result: float16, bfloat16, float32 or float64.
    layout : {"bhsd", "bshd"}, default "bhsd"
        Order of the axes of x.
    rotate : bool, default False
        Whether rows were rotated: they are rotated back.

    Returns
    -------
    array
        NumPy or CuPy, shape of x. Products and rotations are computed in float32, or in float64 for that dtype.

    Raises
    ------
    TypeError
        x is not fp8, or `scale` not float32; `rotate` is no bool.
    ValueError
        An unknown `dtype` or `layout`, or a `scale` that does not broadcast to heads and blocks of keys.

    See Also
    --------
    quantize : Its inverse.
    rotate
    """
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError as error:
        raise type_error("dtype", typed(dtype), " or ".join(DTYPES)) from error
    if name not in DTYPES:
        raise value_error("dtype", repr(dtype), " or ".join(DTYPES))
    xp, x = _taken("x", x, layout, FLOAT8)
    if is_scalar(scale):
        scale = xp.asarray(array_of("k_scale", scale, x.dtype.name))
    numbers = decode(xp, x.view(np.uint8) if xp is np else x.bits, x.dtype)
    wide = _by_heads(numbers.astype(np.float64 if name == "float64" else np.float32), layout)
    if scale is not None:
        if not hasattr(scale, "dtype"):
            raise type_error("scale", typed(scale), "a number or an array of float32")
        if scale.dtype != np.float32:
            raise type_error("scale", f"dtype {scale.dtype}", "float32")
        wide = wide * _broadcast_to_keys(scale, wide.shape).astype(wide.dtype)
    wide = _by_heads(wide, layout)
    return (_rotated(xp, wide) if as_bool("rotate", rotate) else wide).astype(numpy_dtype(name))


@np.errstate(all="ignore")
def rotate(x: Array) -> Array:
    """Rows of q or k times an orthogonal matrix, that of Walsh and Hadamard, which is its own inverse.

    ``rotate(q) @ rotate(k).T`` is ``q @ k.T``, but what is large in few channels is spread over all. Rounding k to
    fp8 numbers gives a score an error of about ``e * sqrt(sum((q[i] * k[j]) ** 2))``, with e = 2 ** -5 or
    2 ** -4; of rotated rows it is about ``e * norm(q[i]) * norm(k[j]) / sqrt(head_dim)``, which is less where a channel
    is large in both. Where head_dim is no power of two, 2 ** n is the largest that divides it, and each 2 ** n
    neighbouring channels are rotated among themselves.

    Parameters
    ----------
    x : array
        NumPy or CuPy, (..., head_dim), float16, bfloat16, float32 or float64.

    Returns
    -------
    array
        Shape and dtype of x; computed in float32 (float64 for float64), and rounded once.

    Raises
    ------
    TypeError
        x is neither of NumPy nor of CuPy, or has another dtype.
    ValueError
        x has no axis.

    See Also
    --------
    quantize : Rotates by itself with ``rotate=True``.
    dequantize : Rotates back.

    References
    ----------
    Shah and others: FlashAttention-3 (2024), https://arxiv.org/abs/2407.08608, section 3.3 (incoherent processing).
    """
    xp, x = _taken("x", x)
    return _rotated(xp, x).astype(x.dtype)


def _taken(name: str, x: Array, layout: str | None = None, dtypes: tuple[str, ...] = DTYPES) -> tuple[Any, Array]:
    """The module of a NumPy or CuPy array, and the array, checked."""
    if layout is not None:
        check_choice("layout", layout, LAYOUTS)
    if isinstance(x, Float8Array):
        backend: dlpack.Backend = "cupy"
    else:
        imported = array_imports.import_arguments({name: x}, required=[name])
        if imported.from_dlpack is not None:
            raise type_error(name, f"{type(x).__module__}.{type(x).__name__}", "a NumPy or CuPy array")
        backend, x = imported.backend, imported.arrays[name]
    if x.dtype.name not in dtypes:
        raise type_error(name, f"dtype {x.dtype}", " or ".join(dtypes))
    if layout is not None and x.ndim < 2:
        raise value_error(
            name, f"{x.ndim}-D shape {tuple(x.shape)}", "an array (..., heads, keys, dim) of two axes or more"
        )
    if x.ndim < 1:
        raise value_error(name, "0-D shape ()", "an array with an axis of channels")
    return importlib.import_module(backend), x


def _wide(x: Array) -> Array:
    return x.astype(np.float64 if x.dtype == np.float64 else np.float32)


def _by_heads(x: Array, layout: str) -> Array:
    """The axes in the order (..., heads, keys, dim), or back."""
    return x.swapaxes(-3, -2) if layout == "bshd" and x.ndim >= 3 else x


def _largest(xp: Any, magnitude: Array, per: str, size: int) -> Array:
    """The largest number of what has a scale, in the shape of the scales."""
    if per == "tensor":
        return _max(magnitude)
    if per == "head":
        return _max(magnitude, (-2, -1))[..., None]
    of_keys = _max(magnitude, -1)
    if per == "token":
        return of_keys
    *heads, keys = of_keys.shape
    size = min(size, 1 << max(keys - 1, 0).bit_length())  # a longer block has no more keys
    blocks = -(-keys // size)
    padded = xp.zeros((*heads, blocks * size), of_keys.dtype)
    padded[..., :keys] = of_keys
    return padded.reshape(*heads, blocks, size).max(axis=-1)


def _max(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """The maximum of numbers that are not negative, 0 of none. CuPy's maximum takes no initial value."""
    return x.max(axis=axis) if x.size else x.sum(axis=axis)


def _of_keys(scale: Array, keys: int) -> Array:
    """Scales of heads or of blocks, as (..., keys or 1, 1)."""
    if scale.ndim == 0:
        return scale
    count = scale.shape[-1]
    if count not in (1, keys):
        scale = scale.repeat(block_of_scales(count, keys), axis=-1)[..., :keys]
    return scale[..., None]


def _broadcast_to_keys(scale: Array, shape: tuple[int, ...]) -> Array:
    """Scales of a caller, checked, in a shape that broadcasts to keys of this shape."""
    count, (*heads, keys, _) = (scale.shape[-1] if scale.ndim else 1), shape
    by_heads = zip(reversed(scale.shape[:-1]), reversed(heads), strict=False)
    fits = scale.ndim < len(shape) and all(n in (1, m) for n, m in by_heads)
    if not fits or not (count in (1, keys) or block_of_scales(count, keys)):
        expected = f"a shape that broadcasts to {(*heads, keys)}, or with blocks of keys, a power of two long"
        raise value_error("scale", f"shape {tuple(scale.shape)}", expected)
    return _of_keys(scale, keys)


def _rotated(xp: Any, x: Array) -> Array:
    """Rows times the matrix, in float32 or float64: sums and differences of channels that are 1, 2, 4, … apart."""
    wide, dim = _wide(x), x.shape[-1]
    size = dim & -dim
    shape = wide.shape
    wide = wide.reshape(*shape[:-1], dim // max(size, 1), size) if size else wide
    step = 1
    while step < size:
        pairs = wide.reshape(*wide.shape[: len(shape)], size // (2 * step), 2, step)
        wide = xp.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), axis=-2)
        wide = wide.reshape(*shape[:-1], dim // size, size)
        step *= 2
    return (wide.reshape(shape) * wide.dtype.type(max(size, 1) ** -0.5)).astype(wide.dtype)
