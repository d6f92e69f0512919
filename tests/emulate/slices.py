"""Slices of problems whose calls are those of devices: by `cuflash.gpu.backend` on the emulator."""

import functools
import importlib
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuflash.shards.slices import Slices
from tests.emulate.launcher import DeviceArray

_one_at_a_time = threading.Lock()  # the stand-in for the driver knows one launch


def filled(shape, value, dtype):
    array = DeviceArray(shape, dtype)
    array[...] = value
    return array


CUPY = SimpleNamespace(
    **{
        name: getattr(np, name)
        for name in (
            *("argsort", "asarray", "ascontiguousarray", "broadcast_to", "clip", "concatenate", "divide", "log"),
            *("maximum", "take_along_axis", "where"),
        )
    },
    empty=DeviceArray,
    empty_like=lambda x: DeviceArray(x.shape, x.dtype),
    full=filled,
    zeros=lambda shape, dtype: filled(shape, 0, dtype),
    ones=lambda shape, dtype: filled(shape, 1, dtype),
)


@dataclass(frozen=True, kw_only=True)
class EmulatedSlices(Slices):
    module: Any = None  # cuflash.gpu.backend

    @property
    def xp(self) -> Any:
        return CUPY

    def _address_of(self, array: Any) -> int:
        return int(array.ctypes.data)

    @property
    def backend(self) -> Any:
        def call(name: str, options: Any, arrays: Any, *others: Any, pass_: Any = (), **keywords: Any) -> Any:
            with _one_at_a_time:
                importlib.import_module("cuflash.gpu.launch_cache").forget_launches()
                given = {of: x if x is None or of == "row_sums" else x.view(DeviceArray) for of, x in arrays.items()}
                return getattr(self.module, name)(*pass_, options, given, *others, **keywords)

        return SimpleNamespace(
            compute=lambda pass_, *given: call("compute", *given, pass_=(pass_,)),
            row_sums=functools.partial(call, "row_sums"),
            tune=functools.partial(call, "tune"),
        )

    @property
    def reductions(self) -> Any:
        module = importlib.import_module("cuflash.gpu.reductions")

        def compute(pass_: Any, options: Any, arrays: Any, *count: int) -> Any:
            with _one_at_a_time:
                importlib.import_module("cuflash.gpu.launch_cache").forget_launches()
                given = {of: x if of == "row_sums" else x.view(DeviceArray) for of, x in arrays.items()}
                return module.compute(pass_, options, given, *count)

        return SimpleNamespace(compute=compute)
