"""Profiles of hypothesis, a cache of the tests' own, and the reason for which tests that need a device are skipped."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests import sampling

# Of kernels that tests compile, from one run to the next. Processes that tests start find it by the environment.
CACHE = Path(__file__).parent / ".cache"

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="run all cases of long lists, not a share of them")
    parser.addoption("--random", action="store_true", help="draw new examples, not the fixed ones (profile 'random')")


def pytest_configure(config):
    os.environ.setdefault("CUFLASH_CACHE_DIR", str(CACHE))
    os.environ.setdefault("CUFLASH_NO_CORE_WARNING", "1")  # tests switch the core off on purpose
    # JAX would otherwise take three quarters of the device's memory in each process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # XLA compiles far longer than small arrays take
    if config.getoption("numprocesses", None):
        # NumPy's products in many processes, on as many threads each as there are cores, take several times as long.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if config.option.dist == "load":
            # Each gets tests that lie together, so that a module's imports and fixtures are those of one process.
            config.option.dist = "worksteal"
    sampling.exhaustive = config.getoption("--exhaustive")
    settings.load_profile("random" if config.getoption("--random") else "ci")
    settings.register_profile("sampled", max_examples=sampling.examples(100))
    settings.load_profile("sampled")


def pytest_collection_finish():
    gc.freeze()  # thousands of tests and what they import stay to the end; no collection looks at them again


@pytest.fixture
def backend(request, monkeypatch):
    """The backend that `tests.backends.on_backends` names."""
    from tests import backends  # with all that it imports, once the environment is set

    return backends.make(request.param, monkeypatch)


def why_no_device():
    """The reason why tests on a device cannot run here; None where they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not importable ({error})"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device ({error})"
    return None


def pytest_collection_modifyitems(config, items):
    out = sampling.left_out(items)
    if out:
        config.hook.pytest_deselected(items=out)
        gone = set(out)
        items[:] = [item for item in items if item not in gone]
    gpu_items = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("fuzz")]
    reason = why_no_device() if gpu_items else None
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))
