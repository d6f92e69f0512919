"""Arrays and events of a stand-in for CuPy, which the fixture `fake_cupy` makes on NumPy."""

import types

import numpy as np


class FakeMemory(np.ndarray):
    """An array that can be copied as CuPy's memory can."""

    @property
    def data(self):
        return types.SimpleNamespace(copy_from_device_async=lambda source, size: None)


def raw_memory(array):
    return array.view(FakeMemory) if array.dtype.kind == "u" else array


class FakeEvent:
    now_ms = 0.0

    def record(self):
        FakeEvent.now_ms += 0.5
        self.at = FakeEvent.now_ms

    def synchronize(self):
        pass
