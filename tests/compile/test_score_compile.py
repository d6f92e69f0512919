"""What the compiler makes of functions of a caller; no device needed."""

import pytest

from cuflash.binding import PASSES
from cuflash.compiler import compile_spec
from cuflash.planning import DeviceSpec, choose_plan
from tests.scored import of_functions

# Bytes that a thread spills at most, stores and loads: what NVRTC 13.0 reports for 8.0, and a little room.
SPILLS = {("backward", "sm80/backward.cu"): 32}


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_functions_spill_little(pass_):
    problem = of_functions(("alibi", "documents"), "bfloat16", 128)
    plan = choose_plan(problem, DeviceSpec.for_arch("8.0"), pass_, need=("dq", "dk", "dv", "dslopes"))
    for kernel in plan.kernels:
        resources = compile_spec(kernel).resources
        spills = resources.spill_stores_bytes + resources.spill_loads_bytes
        assert spills <= SPILLS.get((pass_, kernel.source), 0), f"{kernel.name}: {spills} bytes"


def test_new_lengths_and_arrays_compile_nothing():
    first, longer = (of_functions(("distance", "documents"), "bfloat16", 64, n) for n in (256, 1000))
    device = DeviceSpec.for_arch("9.0")

    def kernels(problem):
        plans = [choose_plan(problem, device, pass_, need=problem.captured_gradients) for pass_ in PASSES]
        return {(kernel.source, kernel.defines, kernel.headers) for plan in plans for kernel in plan.kernels}

    assert kernels(first) == kernels(longer)
