"""What the compiler makes of functions of a caller; no device needed."""

from dataclasses import replace

import pytest

from cuflash.gpu.compiler import compile_spec
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.passes import BACKWARD, PASSES_WITHOUT_TANGENTS
from tests.compile.test_plans import SERIALIZED
from tests.scored import of_functions

# Bytes that a thread spills at most, stores and loads, by score and mask: what NVRTC 13.0 and 13.5 report, and a
# small margin.
SPILLS = {
    ("sm80/forward.cu", "alibi", "documents", 128): 16,
    # Larger tiles leave fewer registers, and are faster.
    ("sm90/forward.cu", "plane", None, 64): 8,
    ("sm90/forward.cu", "plane", None, 128): 16,
    ("sm90/forward.cu", "box", None, 64): 16,
    ("sm90/forward.cu", "box", None, 128): 8,
    ("sm90/forward.cu", "plane", "documents", 64): 276,
    ("sm80/backward.cu", "alibi", "documents", 128): 16,
    # The consumers hold weights, and row sums of rows with a large lse, next to products with derivatives.
    ("sm90/backward.cu", "capped", None, 128): 276,
    ("sm90/backward.cu", "plane", None, 128): 64,
    ("sm90/backward.cu", "box", None, 128): 32,
    # Lists of tiles take registers of the warpgroup of dQ.
    ("sm90/backward.cu", "alibi", "documents", 128): 320,
    ("sm90/backward.cu", None, "documents", 128): 216,
    ("sm90/backward.cu", "plane", "documents", 64): 120,
    ("sm90/backward.cu", "plane", "documents", 128): 280,
}
# The same of the backward kernel where it makes gradients of arrays, too: derivatives take registers next to dS, dK and
# dV.
SPILLS_OF_ARRAYS = {
    ("alibi", None, 128): 24,
    ("alibi", "documents", 128): 208,
    ("distance", None, 64): 368,
    ("distance", None, 128): 808,
    ("tempered", None, 128): 24,
    ("t5", None, 128): 128,
}


@pytest.mark.one_in(20)
@pytest.mark.parametrize(
    "arch, score, mask, head_dim",
    [
        ("8.0", "alibi", "documents", 128),
        ("9.0", "alibi", None, 64),
        ("9.0", "alibi", "documents", 128),
        *(("9.0", None, "documents", head_dim) for head_dim in (64, 128)),
        *(("9.0", "plane", None, head_dim) for head_dim in (64, 128)),
        *(("9.0", "box", None, head_dim) for head_dim in (64, 128)),
        *(("9.0", "plane", "documents", head_dim) for head_dim in (64, 128)),
        ("9.0", "capped", None, 64),
        ("9.0", "capped", None, 128),
        ("8.0", "t5", None, 128),
        *(("9.0", "t5", None, head_dim) for head_dim in (64, 128, 256)),
    ],
)
def test_functions_spill_little_and_let_products_run_on(arch, score, mask, head_dim):
    problem = of_functions((score, mask), "bfloat16", head_dim, 2048)
    need = ("dq", "dk", "dv") if arch == "9.0" else ("dq", "dk", "dv", problem.score_arg_gradients[0])
    for pass_ in PASSES_WITHOUT_TANGENTS:
        device = replace(DeviceSpec.for_arch(arch), num_sms=1)  # for which these queries are many
        for kernel in choose_plan(problem, device, pass_, need=need).kernels:
            if arch == "9.0" and not kernel.source.startswith("sm90/"):
                continue  # as for 8.0
            assert_spills(kernel, SPILLS.get((kernel.source, score, mask, head_dim), 0))


@pytest.mark.parametrize(
    "score, mask, head_dim",
    [
        ("alibi", "documents", 128),
        ("distance", None, 64),
        ("tempered", None, 64),
        ("t5", None, 64),
        ("t5", None, 128),
        *((score, None, 128) for score in ("alibi", "distance", "tempered")),
    ],
)
def test_gradients_of_arrays_spill_little_and_let_products_run_on(score, mask, head_dim):
    problem = of_functions((score, mask), "bfloat16", head_dim)
    need = ("dq", "dk", "dv", *problem.score_arg_gradients)
    kernels = choose_plan(problem, DeviceSpec.for_arch("9.0"), BACKWARD, need=need).kernels
    (main,) = (kernel for kernel in kernels if kernel.source == "sm90/backward.cu")
    assert dict(main.defines)["CUFLASH_NEEDS_SCORE_ARGS"] == 3
    assert_spills(main, SPILLS_OF_ARRAYS.get((score, mask, head_dim), 0))


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "arch, dtype, head_dim",
    [("8.0", "float32", 64), ("9.0", "float16", 72), ("9.0", "bfloat16", 128), ("9.0", "bfloat16", 256)],
)
@pytest.mark.parametrize("mask", [None, "near"])
def test_gradients_of_arrays_without_a_derivative_compile(arch, dtype, head_dim, mask):
    """On 9.0 kernels that sum the gradients of arrays have none to sum for these, which are zero."""
    problem, device = of_functions(("steps", mask), dtype, head_dim), DeviceSpec.for_arch(arch)
    for need in (("dq", "dk", "dv", *problem.score_arg_gradients), ("dk", problem.score_arg_gradients[0])):
        kernels = choose_plan(problem, device, BACKWARD, need=need).kernels
        assert not [kernel.name for kernel in kernels if compile_spec(kernel).resources.warnings]


def assert_spills(kernel, most):
    resources = compile_spec(kernel).resources
    spills = resources.spill_stores_bytes + resources.spill_loads_bytes
    assert spills <= most, f"{kernel.name}: {spills} bytes"
    assert SERIALIZED not in resources.log


@pytest.mark.parametrize("score", ["distance", "t5"])
def test_new_lengths_and_arrays_compile_nothing(score):
    first, longer = (of_functions((score, "documents"), "bfloat16", 64, n) for n in (256, 1000))
    device = DeviceSpec.for_arch("9.0")

    def kernels(problem):
        plans = [
            choose_plan(problem, device, pass_, need=problem.score_arg_gradients) for pass_ in PASSES_WITHOUT_TANGENTS
        ]
        return {(kernel.source, kernel.defines, kernel.headers) for plan in plans for kernel in plan.kernels}

    assert kernels(first) == kernels(longer)


@pytest.mark.parametrize("arch", ["7.5", "8.0", "9.0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_kernels_of_tables_spill_nothing(arch, dtype):
    problem = of_functions(("t5", None), "float16" if arch == "7.5" and dtype == "bfloat16" else dtype, 64)
    device = DeviceSpec.for_arch(arch)
    need = ("dq", "dk", "dv", *problem.score_arg_gradients)
    plans = [choose_plan(problem, device, pass_, need=need) for pass_ in PASSES_WITHOUT_TANGENTS]
    kernels = [kernel for plan in plans for kernel in plan.kernels]
    of_tables = [kernel for kernel in kernels if kernel.source == "helpers/hoisted.cu"]
    assert len(of_tables) == (3 if arch == "9.0" and dtype == "bfloat16" else 2)
    for kernel in of_tables:
        assert_spills(kernel, 0)
        assert not compile_spec(kernel).resources.warnings
