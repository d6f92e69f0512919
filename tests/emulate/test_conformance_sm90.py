"""The emulated functions of ``ptx/tma.cuh`` and ``ptx/wgmma.cuh`` compute what the checks say, in every schedule."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from cuflash.emulator import SCHEDULES, EmulationError, build, tensor_map
from tests.emulate.attention import guarded
from tests.emulate.conformance_sm90 import CHECKS, PARAMS, Tensor

HERE = Path(__file__).resolve().parent


@pytest.fixture(params=SCHEDULES, ids=str)
def run(request):
    """Runs a conformance kernel on the CPU, on arrays between guard pages."""

    def run_emulated(
        kernel,
        *,
        destination,
        source=None,
        second_source=None,
        tensor=None,
        count=0,
        coordinates=(0, 0, 0, 0),
        grid=1,
        threads=128,
        shared_bytes=0,
        element="Float16",
    ):
        given = {"source": source, "second_source": second_source, "destination": destination}
        arrays = {name: guarded(array) for name, array in given.items() if array is not None}
        params = np.zeros((), PARAMS)
        for name, array in arrays.items():
            params[name] = array.ctypes.data
        if tensor is not None:
            array = arrays[tensor.array]
            params["map"] = tensor_map(array.ctypes.data, array.itemsize, tensor.dims, tensor.strides, tensor.box)
        params["count"], params["coordinates"] = count, coordinates
        defines = {"ELEMENT": element}
        build(HERE / "conformance_sm90.cu", defines).launch(
            kernel,
            params,
            grid=grid,
            threads=threads,
            shared_bytes=shared_bytes,
            schedule=request.param,
            trap_unwritten=True,
        )
        return np.array(arrays["destination"])

    return run_emulated


@pytest.mark.one_of("run")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(check, run):
    check(run)


def test_a_store_to_rows_that_end_within_16_bytes_is_refused(run):
    """An H200 writes the rest of these 16 bytes as well."""
    for columns in (61, 64):
        tensor = Tensor("destination", (columns, 8, 1, 1), (128, 1024, 1024), (64, 8, 1, 1))
        arrays = {"source": np.zeros(1024, np.uint8), "destination": np.zeros((8, 64), np.uint16)}
        with pytest.raises(EmulationError, match="rows of 122 bytes") if columns == 61 else contextlib.nullcontext():
            run("tensor_store", **arrays, tensor=tensor, count=1024, shared_bytes=1024)
