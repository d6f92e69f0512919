"""The arrays of a call: those of NumPy and CuPy as they are, others by DLPack, scalars as arrays without axes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cuflash.arrays.checks import type_error, value_error
from cuflash.arrays.dlpack import BFLOAT16, Imported, import_arrays
from cuflash.arrays.fp8 import Float8Array
from cuflash.spec.inputs import NAMES, NARROWED
from cuflash.spec.outputs import PassArrays
from cuflash.spec.scalars import array_of, is_scalar

_ARRAYS_ONLY = PassArrays.__annotations__.keys() - set(NAMES)  # results, and arrays that have those's shapes


def is_cupy(x: object) -> bool:
    """Whether an array is CuPy's."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and type(x) is cupy.ndarray


def are_cupy(arrays: Mapping[str, Any], required: Iterable[str]) -> bool:
    """Whether `import_arguments` would take all arguments as they are, as CuPy arrays or fp8 arrays on the GPU.

    Arguments that are not `required` may be absent. This is the common case, decided first and fast.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return False
    array = cupy.ndarray
    for name, x in arrays.items():  # any() of a generator doubles the time, and this runs before every launch
        if x is not None and type(x) is not array and type(x) is not Float8Array:
            return False
        if name in NARROWED and x is not None and x.dtype == np.int64:
            return False
    for name in required:  # noqa: SIM110 (as above)
        if arrays[name] is None:
            return False
    return True


def numpy_arrays(
    arrays: Mapping[str, object], required: Iterable[str], written: Iterable[str] = ()
) -> dict[str, Any] | None:
    """The arguments that are given, if these are plain NumPy arrays that `import_arguments` would take as they are.

    This is the common case on the host. None in any other case, even if an argument is to be refused.
    """
    array = np.ndarray
    given: dict[str, Any] = {}
    for name, x in arrays.items():
        if x is not None:
            if type(x) is not array or (name in NARROWED and x.dtype == np.int64):
                return None
            given[name] = x
    for name in required:
        if name not in given:
            return None
    for name in written:
        if name in given and not given[name].flags.writeable:
            return None
    return given


def import_arguments(arrays: Mapping[str, Any], *, required: Iterable[str], written: Iterable[str] = ()) -> Imported:
    """View every argument of a call as a NumPy array, or every one as a CuPy array; None stays None.

    Scalars become arrays without axes, and `NARROWED` arrays of int64 become int32, where q is.

    Raises, naming the argument, TypeError for anything that is no array, for arguments of more than one library or on
    both sides of the bus, for an array that its library does not export, and for one whose memory holds other numbers;
    ValueError for a read-only one among the `written`, and for a scalar or an integer that is too large; ImportError
    for CUDA memory where CuPy is missing.
    """
    for name in required:
        if arrays[name] is None:
            raise type_error(name, "None", "an array")
    given = {name: x for name, x in arrays.items() if x is not None}
    arrays_only = {*required, *written, *_ARRAYS_ONLY} if "q" in given else given.keys()
    scalars = {name: x for name, x in given.items() if name not in arrays_only and is_scalar(x)}
    imported = import_arrays({name: x for name, x in given.items() if name not in scalars}, written)
    views = {**arrays, **imported.arrays}
    for name, x in scalars.items():
        array = array_of(name, x, views["q"].dtype.name)
        views[name] = array if imported.backend == "numpy" else _on_device_of(views["q"], array)
    narrowed: dict[int, Any] = {}  # one for each array: equal starts of queries and keys stay one object
    for name in NARROWED:
        if (x := views.get(name)) is not None and x.dtype == np.int64:
            views[name] = narrowed.setdefault(id(x), _as_int32(name, x))
    return imported._replace(arrays=views)


def _on_device_of(q: Any, array: np.ndarray[Any, Any]) -> Any:
    """A CuPy array of the element of an array without axes.

    A kernel writes it: no copy from host memory is waited for, and a CUDA graph repeats it.
    """
    cupy = importlib.import_module("cupy")
    with cupy.cuda.Device(q.data.device_id):
        if array.dtype == BFLOAT16:  # which CuPy may not fill an array with
            return cupy.full((), array.view(np.uint16).item(), np.uint16).view(BFLOAT16)
        return cupy.full((), array.item(), array.dtype)


def _as_int32(name: str, array: Any) -> Any:
    """A copy of integers as kernels read them. On a GPU, where looking would be a synchronisation, none is checked."""
    narrow = array.astype(np.int32)
    if type(array) is np.ndarray and (wrong := narrow != array).any():
        raise value_error(name, f"an entry {array[wrong][0]}", "integers of 32 bits")
    return narrow
