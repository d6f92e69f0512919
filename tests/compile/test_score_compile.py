"""What the compiler makes of functions of a caller; no device needed."""

import pytest

from cuflash.binding import PASSES
from cuflash.compiler import compile_spec
from cuflash.planning import DeviceSpec, choose_plan
from tests.compile.test_plans import SERIALIZED
from tests.scored import of_functions

# Bytes that a thread spills at most, stores and loads, by score and mask: what NVRTC 13.0 reports, and a little room.
SPILLS = {
    ("sm80/forward.cu", "alibi", "documents", 128): 24,
    ("sm80/backward.cu", "alibi", "documents", 128): 32,
    # The consumers hold weights beside their products with derivatives.
    ("sm90/backward.cu", "capped", None, 128): 300,
    # Lists of tiles take registers of the warpgroup of dQ.
    ("sm90/backward.cu", "alibi", "documents", 128): 96,
}


@pytest.mark.parametrize(
    "arch, score, mask, head_dim",
    [
        ("8.0", "alibi", "documents", 128),
        ("9.0", "alibi", None, 64),
        ("9.0", "alibi", "documents", 128),
        ("9.0", "capped", None, 64),
        ("9.0", "capped", None, 128),
    ],
)
def test_functions_spill_little_and_let_products_run_on(arch, score, mask, head_dim):
    problem = of_functions((score, mask), "bfloat16", head_dim)
    gradient = problem.captured_gradients[0]
    for pass_ in PASSES:
        for kernel in choose_plan(problem, DeviceSpec.for_arch(arch), pass_, need=("dq", "dk", "dv", gradient)).kernels:
            if arch == "9.0" and not kernel.source.startswith("sm90/"):
                continue  # as for 8.0
            resources = compile_spec(kernel).resources
            spills = resources.spill_stores_bytes + resources.spill_loads_bytes
            assert spills <= SPILLS.get((kernel.source, score, mask, head_dim), 0), f"{kernel.name}: {spills} bytes"
            assert SERIALIZED not in resources.log


def test_new_lengths_and_arrays_compile_nothing():
    first, longer = (of_functions(("distance", "documents"), "bfloat16", 64, n) for n in (256, 1000))
    device = DeviceSpec.for_arch("9.0")

    def kernels(problem):
        plans = [choose_plan(problem, device, pass_, need=problem.captured_gradients) for pass_ in PASSES]
        return {(kernel.source, kernel.defines, kernel.headers) for plan in plans for kernel in plan.kernels}

    assert kernels(first) == kernels(longer)
