"""Every function of ``kernels/ptx*.cuh`` on the device, under the checks that its emulation passes."""

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest

from cuflash.gpu.compiler import compile_kernel, kernel_directory
from tests.emulate import conformance, conformance_arithmetic, conformance_sm90

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The conformance kernels next to the headers that they include."""
    directory = tmp_path_factory.mktemp("kernels")
    shutil.copytree(kernel_directory() / "ptx", directory / "ptx")
    for name in ("conformance.cu", "conformance_sm90.cu"):
        shutil.copy(Path(__file__).parents[1] / "emulate" / name, directory)
    return directory


@pytest.fixture(scope="module", params=[None, 75, 70], ids=["", "as 7.5", "as 7.0"])
def run(directory, request):
    """`run` as the checks expect it, on the current device, by all of its instructions or by those of earlier ones."""
    import cupy

    number = cupy.cuda.Device().compute_capability
    arch = request.param or int(number)

    @functools.cache
    def load(element):
        defines = {"ELEMENT": element, "CUFLASH_ARCH": arch}
        compiled = compile_kernel("conformance.cu", "indices", defines, f"sm_{number}", kernel_dir=directory)
        return cupy.RawModule(path=str(compiled.path))

    def run(kernel, *, count=0, grid=1, element="Float16", in_turn=False, **arrays_and_sizes):
        # `in_turn` asks for blocks that start in the order of their index: these do.
        params = np.zeros(1, conformance.PARAMS)
        params["count"] = count
        return launch(load(element).get_function(kernel), params, grid=grid, **arrays_and_sizes)

    return run


def launch(
    function, params, *, destination, source=None, second_source=None, tensor=None, grid=1, threads=128, shared_bytes=0
):
    """Run a kernel on copies of the arrays; returns what it made of `destination`."""
    import cupy

    given = {"source": source, "second_source": second_source, "destination": destination}
    device = {
        name: cupy.asarray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        for name, array in given.items()
        if array is not None
    }
    for name, array in device.items():
        params[name] = array.data.ptr
    if tensor is not None:
        params["map"] = encode(device[tensor.array].data.ptr, given[tensor.array].dtype, tensor)
    argument = np.frombuffer(params.tobytes(), np.dtype((np.void, params.itemsize)))[0]
    function.max_dynamic_shared_size_bytes = shared_bytes
    function((grid,), (threads,), (argument,), shared_mem=shared_bytes)
    return cupy.asnumpy(device["destination"]).view(destination.dtype).reshape(destination.shape)


CHECKS = conformance.CHECKS + conformance_arithmetic.CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(check, run):
    check(run)


# ---- Compute capability 9.0 ------------------------------------------------------------------------------------------


def encode(address, dtype, tensor):
    """The 16 words of the tensor map that the driver makes."""
    from cuda.bindings import driver

    data_type = driver.CUtensorMapDataType
    result, tensor_map = driver.cuTensorMapEncodeTiled(
        getattr(data_type, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.name.upper()}"),
        4,
        address,
        [driver.cuuint64_t(size) for size in tensor.dims],
        [driver.cuuint64_t(stride) for stride in tensor.strides],
        [driver.cuuint32_t(size) for size in tensor.box],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert result.value == 0, f"cuTensorMapEncodeTiled returned {result.name} for {tensor}"
    return [int(word) for word in tensor_map.opaque]


@pytest.fixture(scope="module")
def run_sm90(directory):
    """`run` as the checks of compute capability 9.0 expect it, on the current device."""
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("not a device of compute capability 9.0")

    @functools.cache
    def load(element):
        defines = {"ELEMENT": element, "CUFLASH_ARCH": 90}
        compiled = compile_kernel("conformance_sm90.cu", "barrier_ring", defines, "sm_90a", kernel_dir=directory)
        return cupy.RawModule(path=str(compiled.path))

    def run(kernel, *, count=0, coordinates=(0, 0, 0, 0), element="Float16", **arrays_and_sizes):
        params = np.zeros(1, conformance_sm90.PARAMS)
        params["count"], params["coordinates"] = count, coordinates
        return launch(load(element).get_function(kernel), params, **arrays_and_sizes)

    return run


@pytest.mark.parametrize("check", conformance_sm90.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance_sm90(check, run_sm90):
    check(run_sm90)


def test_a_kernel_compiled_twice_is_reported_twice(directory, tmp_path):
    """NVRTC's own cache, which works where there is a driver, would leave the second report empty."""
    reports = [
        compile_kernel(
            "conformance.cu", "indices", {"CUFLASH_ARCH": 80}, "sm_80", kernel_dir=directory, cache_dir=folder
        ).resources
        for folder in (tmp_path / "first", tmp_path / "second")
    ]
    assert reports[0].registers == reports[1].registers > 0
