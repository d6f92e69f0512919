"""Every function of ``kernels/ptx.cuh`` on the device, under the checks that its emulation passes."""

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest

from cuflash.compiler import compile_kernel, kernel_directory
from tests.emulate import conformance

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The conformance kernels beside the headers that they include."""
    directory = tmp_path_factory.mktemp("kernels")
    for header in kernel_directory().glob("*.cuh"):
        shutil.copy(header, directory)
    shutil.copy(Path(conformance.__file__).with_name("conformance.cu"), directory)
    return directory


@pytest.fixture(scope="module")
def run(directory):
    """`run` as the checks expect it, on the current device."""
    import cupy

    target = f"sm_{cupy.cuda.Device().compute_capability}"

    @functools.cache
    def load(element):
        compiled = compile_kernel("conformance.cu", "indices", {"ELEMENT": element}, target, kernel_dir=directory)
        return cupy.RawModule(path=str(compiled.path))

    def run(
        kernel,
        *,
        source=None,
        second_source=None,
        destination,
        count=0,
        grid=1,
        threads=128,
        shared_bytes=0,
        element="Float16",
    ):
        device = {
            name: None if array is None else cupy.asarray(np.ascontiguousarray(array).view(np.uint8))
            for name, array in (("source", source), ("second_source", second_source), ("destination", destination))
        }
        params = np.zeros(1, conformance.PARAMS)
        for name, array in device.items():
            params[name] = 0 if array is None else array.data.ptr
        params["count"] = count
        argument = np.frombuffer(params.tobytes(), np.dtype((np.void, params.itemsize)))[0]
        load(element).get_function(kernel)((grid,), (threads,), (argument,), shared_mem=shared_bytes)
        return cupy.asnumpy(device["destination"]).view(destination.dtype).reshape(destination.shape)

    return run


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(check, run):
    check(run)


def test_a_kernel_compiled_twice_is_reported_twice(directory, tmp_path):
    """NVRTC's own cache, which works where there is a driver, would leave the second report empty."""
    reports = [
        compile_kernel("conformance.cu", "indices", {}, "sm_80", kernel_dir=directory, cache_dir=place).resources
        for place in (tmp_path / "first", tmp_path / "second")
    ]
    assert reports[0].registers == reports[1].registers > 0
