"""Fixtures of several modules."""

import sys
import types
from typing import Any

import numpy as np
import pytest

from bench import ceiling
from cuflash.cpu import core
from tests.fake_cupy import FakeEvent, FakeMemory, raw_memory
from tests.toolchain import FILES, write_files
from tests.ways import CORE, FALLBACK


@pytest.fixture
def way(request, monkeypatch):
    """The way in which calls on NumPy arrays go, the fallback unless a test asks for another one."""
    way = getattr(request, "param", FALLBACK)
    if way != CORE:
        monkeypatch.setattr(core, "why_not", lambda problem=None: "a test of the fallback")
    elif core.why_not() is not None:
        pytest.skip(f"no compiled core: {core.why_not()}")
    return way


@pytest.fixture
def kernel_dir(tmp_path):
    write_files(tmp_path / "kernels", FILES)
    return tmp_path / "kernels"


@pytest.fixture
def fake_cupy(monkeypatch):
    """NumPy under CuPy's names, as far as the bench calls them; time passes by half a millisecond an event."""
    fake: Any = types.ModuleType("cupy")
    fake.__dict__.update({name: getattr(np, name) for name in dir(np) if not name.startswith("__")})
    fake.ndarray = FakeMemory  # so that cuflash computes on what it is given as NumPy's
    fake.empty = lambda *args, **kwargs: raw_memory(np.empty(*args, **kwargs))
    fake.arange = lambda *args, **kwargs: raw_memory(np.arange(*args, **kwargs))
    fake.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
    fake.RawKernel = lambda source, name: lambda grid, block, args: None
    properties = {"name": b"Fake", "multiProcessorCount": 1, "l2CacheSize": 1024}
    fake.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(
            getDeviceProperties=lambda device: properties,
            memGetInfo=lambda: (10**9, 10**9),
            runtimeGetVersion=lambda: 13000,
            driverGetVersion=lambda: 13010,
        ),
        Device=lambda: types.SimpleNamespace(id=0),
        Event=FakeEvent,
        get_elapsed_time=lambda start, end: end.at - start.at,
        get_current_stream=lambda: types.SimpleNamespace(synchronize=lambda: None, ptr=0),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr("bench.timing.FLUSH_BYTES", 64)
    monkeypatch.setattr("bench.timing.FLUSH_ROWS", 4)
    monkeypatch.setattr(ceiling, "PRODUCT_SIZE", 8)
    monkeypatch.setattr(ceiling, "COPY_BYTES", 64)
    return fake
