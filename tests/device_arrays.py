"""A stand-in for CuPy, as strict as CuPy: NumPy arrays become arrays of it by `asarray` alone, and back by `get`.

It computes on NumPy, so results are NumPy's, bit for bit. It has the functions, methods and keywords that are named
here and that CuPy has, casts bfloat16 to float32 only, and its results without axes are arrays, not numbers.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash.arrays.array_info import FLOAT8
from cuflash.arrays.fp8 import Float8Array

NUMBERS = (bool, int, float, np.generic)


def _on_host(x: Any) -> Any:
    """What NumPy computes with, of what CuPy takes."""
    if isinstance(x, DeviceArray):
        return x.values
    if isinstance(x, tuple):
        return tuple(map(_on_host, x))
    if x is None or x is Ellipsis or isinstance(x, (*NUMBERS, slice, str, type, np.dtype)):
        return x
    raise TypeError(f"Unsupported type {type(x)}")


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """Instead of `cupy.ndarray`."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    shape = property(lambda self: self.values.shape)
    ndim = property(lambda self: self.values.ndim)
    size = property(lambda self: self.values.size)
    dtype = property(lambda self: self.values.dtype)
    T = property(lambda self: DeviceArray(self.values.T))

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise TypeError(f"{function} of NumPy")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        assert method == "__call__"
        out = keywords.pop("out", None)
        result = ufunc(*map(_on_host, inputs), **({"out": _on_host(out)} if out else {}), **keywords)
        return out[0] if out else DeviceArray(result)

    def __getitem__(self, index: Any) -> DeviceArray:
        index = _on_host(index if isinstance(index, tuple) else (index,))
        if Ellipsis not in index:
            index = (*index, ...)  # an array, also where one element is left, as every index of CuPy makes
        return DeviceArray(self.values[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[_on_host(index)] = _on_host(value)

    def __len__(self) -> int:
        return len(self.values)

    def __int__(self) -> int:
        return int(self.values)

    def get(self) -> Any:
        return self.values.copy()

    def copy(self) -> DeviceArray:
        return DeviceArray(self.values.copy())

    def astype(self, dtype: Any) -> DeviceArray:
        names = {self.dtype.name, np.dtype(dtype).name}
        assert "bfloat16" not in names or names <= {"bfloat16", "float32"}, f"no cast between {names}"
        assert not names & {*FLOAT8}, "CuPy has no fp8"
        return DeviceArray(self.values.astype(dtype))

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.values.reshape(*shape))

    def swapaxes(self, first: int, second: int) -> DeviceArray:
        return DeviceArray(self.values.swapaxes(first, second))

    def sum(self, axis: Any = None, keepdims: bool = False) -> DeviceArray:
        return DeviceArray(self.values.sum(axis=axis, keepdims=keepdims))

    def max(self, axis: Any = None, keepdims: bool = False) -> DeviceArray:
        return DeviceArray(self.values.max(axis=axis, keepdims=keepdims))


def _function(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def call(*args: Any, out: DeviceArray | None = None) -> DeviceArray:
        result = function(*map(_on_host, args), **({} if out is None else {"out": out.values}))
        return DeviceArray(result) if out is None else out

    return call


def _where(condition: DeviceArray, x: Any, y: Any) -> DeviceArray:
    return DeviceArray(np.where(condition.values, _on_host(x), _on_host(y)))


class _Add:
    @staticmethod
    def at(array: DeviceArray, index: DeviceArray, values: DeviceArray) -> None:
        np.add.at(array.values, index.values, values.values)


def fake_cupy() -> Any:
    """The module, for `sys.modules`."""
    made: Any = types.ModuleType("cupy")
    names = "zeros ones full arange broadcast_to ascontiguousarray exp log tanh abs maximum isneginf"
    made.__dict__.update({name: _function(name) for name in names.split()})
    made.asarray = lambda x, dtype=None: x if isinstance(x, DeviceArray) else DeviceArray(np.array(x, dtype))
    made.where, made.add, made.ndarray = _where, _Add, DeviceArray
    return made


def on_device(array: Any) -> Any:
    """A NumPy array as CuPy has it; fp8 numbers as bytes."""
    if array.dtype.name in FLOAT8:
        return Float8Array(DeviceArray(array.view(np.uint8)), array.dtype)
    return DeviceArray(array)
