"""The functions of ``kernels/ptx.cuh`` compute on a device what the checks of the emulator say."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest

from cuflash import compiler

pytestmark = pytest.mark.gpu
EMULATE = Path(__file__).resolve().parents[1] / "emulate"


def _load_conformance():
    spec = importlib.util.spec_from_file_location("conformance", EMULATE / "conformance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


conformance = _load_conformance()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a conformance kernel on the device, in the words of ``conformance.py``."""
    cupy = pytest.importorskip("cupy")
    sources = tmp_path_factory.mktemp("kernels")
    shutil.copy(EMULATE / "conformance.cu", sources)
    shutil.copy(compiler.kernel_directory() / "ptx.cuh", sources)
    major_minor = cupy.cuda.Device().compute_capability

    def run_on_device(
        kernel,
        *,
        destination,
        source=None,
        second_source=None,
        count=0,
        grid=1,
        threads=128,
        shared_bytes=0,
        element="Float16",
    ):
        # As bytes: CuPy need not know the dtypes.
        arrays = [
            None if array is None else cupy.asarray(np.frombuffer(array.tobytes(), np.uint8))
            for array in (source, second_source, destination)
        ]
        addresses = [0 if array is None else array.data.ptr for array in arrays]
        cubin = compiler.compile_kernel(
            "conformance.cu", kernel, {"ELEMENT": element}, f"sm_{major_minor}", kernel_dir=sources
        )
        function = cupy.RawModule(path=str(cubin.path)).get_function(kernel)
        params = np.array((*addresses, count, 0), conformance.PARAMS)
        function((grid,), (threads,), (params[()],), shared_mem=shared_bytes)
        return arrays[2].get().view(destination.dtype).reshape(destination.shape)

    return run_on_device


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(check, run):
    check(run)
