"""kernels/helpers/merge.cu for every architecture: it compiles without spills, and keeps subnormal numbers."""

import re

import pytest

from cuflash.gpu import merging
from cuflash.gpu.compiler import compile_spec
from cuflash.plan import DeviceSpec
from tests.compile.test_sass import find_nvdisasm, instructions

OPERATIONS = {
    "add": (4, {}),
    "merge": (2 + 2 * 3, {"HAS_LSE_REST": 1, "STORES_LSE_REST": 1}),
    "merge with tangents": (4 + 4 * 3, {"HAS_LSE_REST": 1, "STORES_LSE_REST": 1, "HAS_TANGENTS": 1}),
    "softmax_step": (5, {}),
    "softmax_step with tangents": (9, {"HAS_TANGENTS": 1}),
    "rescale_and_add": (4, {}),
    "rescale_and_add with tangents": (8, {"HAS_TANGENTS": 1}),
    "normalize": (5, {}),
    "minus_delta": (4, {"HAS_DLSE": 1}),
    "merge_backward": (8, {"HAS_DLSE": 1}),
    "merge_backward_tangents": (14, {"HAS_DLSE": 1, "HAS_TDLSE": 1, "HAS_TDOUT": 1}),
}
DTYPES = [("float32", "bfloat16"), ("float64", "float64")]


def spec_of(operation, arch, partial, result, last=64):
    count, flags = OPERATIONS[operation]
    shape, itemsize = (2, 3, 5, last), 8 if partial == "float64" else 4
    strides = tuple((itemsize * last * 15, itemsize * last * 5, itemsize * last, itemsize) for _ in range(count))
    layout = merging.layout_of(
        shape, strides, (itemsize,) * count, (0,) * count, by_row="delta" in operation or "backward" in operation
    )
    device = DeviceSpec.for_arch(arch)
    return merging.kernel_spec(
        device, operation.removesuffix(" with tangents"), layout, (partial, result, 3), tuple(flags.items())
    )


@pytest.mark.one_of("arch")
@pytest.mark.parametrize("arch", ["7.5", "9.0"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_compile_without_spills(operation, dtypes, arch):
    if operation.startswith("rescale_and_add"):
        dtypes = (dtypes[0], dtypes[0])
    lasts: tuple[int, ...] = (64, 5)
    if "tangents" in operation:  # the same code is in all of them
        lasts = (5,) if arch == "9.0" else (64,)
    for last in lasts:
        resources = compile_spec(spec_of(operation, arch, dtypes[0], dtypes[1], last)).resources
        assert not resources.spill_stores_bytes and not resources.warnings


@pytest.mark.skipif(find_nvdisasm() is None, reason="no nvdisasm: nvidia-cuda-nvdisasm is not installed")
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name[:4] not in ("soft", "norm")])
def test_subnormal_numbers_count(operation):
    """Products and sums of values are rounded as they are; divisions scale their operands, and flush what they know."""
    found = instructions(spec_of(operation, "9.0", "float32", "float32"))
    opcode = "FADD" if operation == "add" else "FFMA"
    arithmetic = [x for x in found if re.match(rf"(@!?U?P\d+ )?{opcode}", x)]
    assert arithmetic and not [x for x in arithmetic if ".FTZ" in x]
