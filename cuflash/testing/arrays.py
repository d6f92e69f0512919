"""Arrays of any library and any strides, from NumPy arrays and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.arrays import dlpack
from cuflash.arrays.array_info import FLOAT8
from cuflash.arrays.fp8 import Float8Array, fp8
from cuflash.spec import array_imports

Array = NDArray[Any]

STRIDES = ("contiguous", "padded", "transposed", "flipped")


def lay_out(values: Array, strides: str, convert: Callable[[Array], Any]) -> Any:
    """The values as a view with the strides asked for, made of a contiguous buffer.

    fp8 numbers are converted as bytes: no library but NumPy takes them from it.

    Parameters
    ----------
    values : numpy.ndarray
        The values.
    strides : {"contiguous", "padded", "transposed", "flipped"}
        As `Case` takes them.
    convert : callable
        Makes another library's array of a C-contiguous NumPy array.

    Returns
    -------
    array
        A view of the library's array, with the shape and dtype of `values`.

    Raises
    ------
    ValueError
        Unknown `strides`.

    See Also
    --------
    Case.arrays : Lays all arrays out.
    through_dlpack
    """
    if values.dtype.name in FLOAT8:
        convert = _by_bytes(convert, values.dtype)
    if strides == "contiguous" or values.ndim == 0:
        return convert(values.copy())
    if strides == "padded":
        filler = True if values.dtype == bool else 0 if values.dtype.kind == "i" else np.nan
        buffer = np.full([n + 3 if n > 1 else n for n in values.shape], filler, values.dtype)
        inside = tuple(slice(1, n + 1) if n > 1 else slice(None) for n in values.shape)
        buffer[inside] = values
        return convert(buffer)[inside]
    if strides == "transposed":
        axes = tuple(reversed(range(values.ndim)))
        buffer = convert(np.ascontiguousarray(values.transpose(axes)))
        return buffer.permute(axes) if hasattr(buffer, "permute") else buffer.transpose(axes)
    if strides == "flipped":
        backwards = (slice(None, None, -1),) * values.ndim
        return convert(np.ascontiguousarray(values[backwards]))[backwards]
    raise ValueError(f"strides: got {strides!r}, expected one of {STRIDES}")


def _by_bytes(convert: Callable[[Any], Any], dtype: np.dtype[Any]) -> Callable[[Any], Any]:
    return lambda array: fp8(convert(array.view(np.uint8)), dtype)


def through_dlpack(from_dlpack: Callable[[Any], Any]) -> Callable[[Array], Any]:
    """The `convert` of another library by its ``from_dlpack``; bfloat16, which NumPy does not export, included.

    Parameters
    ----------
    from_dlpack : callable
        That of the library: ``torch.from_dlpack``.

    Returns
    -------
    callable
        Makes the library's array of a NumPy array, by a copy or a view.

    See Also
    --------
    check : Takes it as `convert`.
    to_numpy : The way back.
    """
    return lambda array: dlpack.Imported("numpy", {}, from_dlpack).export(array, None)


def to_numpy(array: Any) -> Array:
    """A NumPy array of any library's array, from host or device memory; bfloat16 stays bfloat16.

    Parameters
    ----------
    array : array
        With ``__dlpack__``; a tensor that needs gradients, too.

    Returns
    -------
    numpy.ndarray
        Of the same shape and dtype; a view where the memory is the host's.

    Raises
    ------
    TypeError
        Not an array, or of a dtype that cuflash does not take.

    See Also
    --------
    through_dlpack
    """
    if isinstance(array, Float8Array):
        return to_numpy(array.bits).view(array.dtype)
    array = array.detach() if hasattr(array, "detach") else array
    imported = array_imports.import_arguments({"array": array}, required=["array"])
    view = imported.arrays["array"]
    return np.asarray(view.get() if imported.backend == "cupy" else view)
