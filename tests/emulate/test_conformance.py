"""The emulated functions of ``kernels/ptx`` compute what the checks say, under every schedule."""

from pathlib import Path

import numpy as np
import pytest

from cuflash.emulator import SCHEDULES, build
from tests.emulate import conformance_arithmetic
from tests.emulate.attention import guarded
from tests.emulate.conformance import CHECKS, PARAMS

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
        count=0,
        grid=1,
        threads=128,
        shared_bytes=0,
        element="Float16",
        in_turn=False,
    ):
        arrays = [None if array is None else guarded(array) for array in (source, second_source, destination)]
        addresses = [0 if array is None else array.ctypes.data for array in arrays]
        build(HERE / "conformance.cu", {"ELEMENT": element}).launch(
            kernel,
            np.array((*addresses, count, 0), PARAMS),
            grid=grid,
            threads=threads,
            shared_bytes=shared_bytes,
            schedule=request.param,
            trap_unwritten=True,
            in_turn=in_turn,
        )
        return np.array(arrays[2])

    return run_emulated


@pytest.mark.one_of("run")
@pytest.mark.parametrize(
    "check", CHECKS + conformance_arithmetic.CHECKS, ids=lambda check: check.__name__.removeprefix("check_")
)
def test_conformance(check, run):
    check(run)
