"""The rows of gradients of bias, slopes, scale and softcap, and kernels that are asked for some gradients only."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

import cuflash.testing as ct
from cuflash.gpu.compiler import compile_spec, supported_archs
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm80.tiles import BACKWARD_TILES, SCORES_TILES
from cuflash.plan.sm90.tiles import (
    BACKWARD_FLOAT32_SM90_TILES,
    BACKWARD_SM90_TILES,
    BACKWARD_TF32_SM90_TILES,
    BIAS_FLOAT32_SM90_TILES,
    BIAS_SM90_TILES,
    BIAS_TF32_SM90_TILES,
)
from cuflash.plan.tiles import round_up
from cuflash.spec.passes import BACKWARD
from cuflash.spec.problem import make_problem
from tests import sampling
from tests.compile.test_plans import REGISTERS_OF_SM, SERIALIZED, fits
from tests.sampling import sample

DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}
SUMS = ("dalibi_slopes", "dscale", "dsoftcap")
# Bytes that a thread spills at most, by bytes of an element, max_dim and tile: loads of the bias that run ahead. All
# others spill nothing.
SPILLS = {
    (2, 64, "128x64"): 96,
    (2, 128, "128x64"): 32,
    (2, 128, "64x32"): 32,
    (2, 256, "64x32"): 64,
    (2, 256, "32x32"): 32,
    (4, 64, "64x32"): 16,
    (4, 128, "64x32"): 64,
    (4, 256, "64x32"): 16,
    (4, 256, "32x16"): 16,
    (4, 256, "16x16"): 16,
    (8, 64, "64x16"): 16,
    (8, 256, "32x16"): 144,
}


def arch_of(tile):
    """The first device that fits the row: of 100, 164 and 228 KiB of shared memory."""
    return next(arch for arch in ("8.6", "8.0", "9.0") if fits(tile, arch))


def first_of(element_bytes):
    return next(tile for tile in SCORES_TILES if tile.element_bytes == element_bytes)


def resources_of(tile, arch, need, **options):
    """Each kernel of the gradients of scores with its resources."""
    dim = tile.max_dim
    case = ct.Case(seqlen_q=64, seqlen_k=64, head_dim=dim, **{"dtype": DTYPES[tile.element_bytes]} | options)
    plan = choose_plan(case.problem, DeviceSpec.for_arch(arch), BACKWARD, tiles=(tile,), need=need)
    assert tile in plan.tiles
    kernels = [kernel for kernel in plan.kernels if "scores" in kernel.source]
    return [(kernel, compile_spec(kernel).resources) for kernel in kernels]


PACKED = {"cu_seqlens_q": (0, 30, 64), "cu_seqlens_k": (0, 30, 64)}
OTHERS = [
    *((first_of(size), "9.0", SUMS, {"alibi_slopes": (1,), "softcap": 5.0, "causal": True}) for size in DTYPES),
    (first_of(2), "9.0", ("dbias",), {"bias": (1, 64), "softcap": 5.0, "dropout": 0.1, "mask": (64, 64)}),
    (first_of(2), "9.0", ("dbias",), {"bias": (64, 64), "block_mask": (), "block_size": (16, 48)}),
    (first_of(2), "9.0", SUMS, {"alibi_slopes": (1,), "softcap": 5.0, "causal": True} | PACKED),
    (first_of(2), "12.0", ("dbias",), {"bias": (64, 1), "bias_dtype": "input", "window": (9, None)}),
]
TARGETS = [
    *((tile, arch_of(tile), ("dbias",), {"bias": (64, 64)}) for tile in sample(SCORES_TILES, 8)),
    *OTHERS[:: 1 if sampling.exhaustive else 2],
]


@pytest.mark.parametrize(
    ("tile", "arch", "need", "options"), TARGETS, ids=lambda x: f"{x.max_dim}" if hasattr(x, "max_dim") else str(x)
)
def test_row(tile, arch, need, options):
    if DeviceSpec.for_arch(arch).target not in supported_archs():
        pytest.skip(f"this NVRTC does not know {arch}")
    for kernel, resources in resources_of(tile, arch, need, **options):
        assert resources.registers <= 255
        assert round_up(resources.registers, 8) * kernel.threads * tile.min_blocks <= REGISTERS_OF_SM
        assert resources.warnings == ()
        row = (tile.element_bytes, tile.max_dim, f"{tile.block_m}x{tile.block_n}")
        assert resources.spill_stores_bytes <= SPILLS.get(row, 0), (kernel.source, row)
        assert resources.stack_bytes <= resources.spill_stores_bytes + 16, (kernel.source, row)


def compiled(tile, need, arch="9.0"):
    """The kernel that owns keys, for some of the gradients."""
    dtype = "float32" if tile in BACKWARD_FLOAT32_SM90_TILES else "bfloat16"
    case = ct.Case(seqlen_q=64, seqlen_k=64, head_dim=64, dtype=dtype, causal=True)
    problem = make_problem(case.options, *ct.qkv(case.arrays()))
    plan = choose_plan(problem, DeviceSpec.for_arch(arch), BACKWARD, tiles=(replace(tile),), need=need)
    sources = ("sm80/backward.cu", "sm90/backward.cu", "sm90/backward_fp32.cu")
    (kernel,) = [kernel for kernel in plan.kernels if kernel.source in sources]
    return compile_spec(kernel)


# The same of the main kernel of compute capability 9.0 where it sums by keys: what it spills without them, a few bytes
# more where consumers have no register left, and tanh of scores that comes back from shared memory.
KEY_SUMS_SPILLS = {
    (128, "dscale"): 16,
    (128, "dalibi_slopes"): 44,
    (128, "dbias"): 72,
    (128, "dsoftcap"): 96,
}
SUMMED: dict[str, dict[str, Any]] = {
    "dscale": {},
    "dalibi_slopes": {"alibi_slopes": (4,), "causal": True},
    "dsoftcap": {"softcap": 20.0},
    "dbias": {"bias": (1, 4, 1, 4096), "bias_dtype": "input"},
}


@pytest.mark.parametrize(
    ("dim", "name", "deterministic"), sample(itertools.product((64, 128, 256), SUMMED, (False, True)), 4)
)
def test_sums_by_keys(dim, name, deterministic):
    case = ct.Case(seqlen_q=4096, seqlen_k=4096, num_heads=4, head_dim=dim, dtype="bfloat16", **SUMMED[name])
    problem = replace(case.problem, deterministic=deterministic)
    plan = choose_plan(problem, DeviceSpec.for_arch("9.0"), BACKWARD, need=("dq", "dk", "dv", name))
    assert ("sm80/backward_scores.cu" in {x.source for x in plan.kernels}) == (dim == 256 and name == "dsoftcap")
    for kernel in (x for x in plan.kernels if x.source in ("sm90/backward.cu", "helpers/scores_reduce.cu")):
        resources = compile_spec(kernel).resources
        assert resources.warnings == ()
        assert SERIALIZED not in resources.log
        assert round_up(resources.registers, 8) * kernel.threads <= REGISTERS_OF_SM
        ceiling = KEY_SUMS_SPILLS.get((dim, name), 0) if kernel.source.startswith("sm90/") else 0
        assert resources.spill_stores_bytes <= ceiling, kernel.source


# The gradient of a per-pair bias spills a little with per-key values, and where every option acts at once. `of_half` is
# what it spills where operands and the bias have 16 bits (docs/notes/backward.md has its times).
@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "tile",
    sample((*BIAS_SM90_TILES, *BIAS_FLOAT32_SM90_TILES, *BIAS_TF32_SM90_TILES), 2),
    ids=lambda tile: f"{tile.max_dim}-{tile.bias_of_pairs}-{tile.bf16_terms}",
)
@pytest.mark.parametrize(
    ("options", "ceiling", "of_half"),
    [
        ({}, 0, 12),
        ({"causal": True, "mask": (1, 128)}, 44, 100),
        ({"softcap": 5.0}, 8, 12),
        ({"causal": True, "mask": (1, 128), "softcap": 5.0, "dropout": 0.1, "alibi_slopes": (1,)}, 112, 112),
    ],
    ids=["plain", "keys", "softcap", "options"],
)
def test_a_bias_of_pairs(tile, options, ceiling, of_half):
    dtype = {2: "input", 4: "softmax"}[tile.bias_of_pairs]
    sizes = {"seqlen_q": 128, "seqlen_k": 128, "head_dim": tile.max_dim, "bias": (128, 128), "bias_dtype": dtype}
    dtype = "bfloat16" if tile.bf16_terms == 1 else "float32"
    problem = ct.Case(**{"dtype": dtype} | sizes | options).problem
    problem = replace(problem, precision="tf32" if tile.bf16_terms == 2 else "highest")
    plan = choose_plan(problem, DeviceSpec.for_arch("9.0"), BACKWARD, need=("dbias",))
    assert plan.tiles[0].label == tile.label
    (kernel,) = [kernel for kernel in plan.kernels if kernel.source == "sm90/backward_bias.cu"]
    resources = compile_spec(kernel).resources
    assert resources.warnings == ()
    assert SERIALIZED not in resources.log
    assert round_up(resources.registers, 8) * kernel.threads <= REGISTERS_OF_SM
    assert resources.spill_stores_bytes <= (of_half if tile.bias_of_pairs == 2 else ceiling)


# Bytes that the main kernel of float32 spills where it writes dbias, by max_dim: what NVRTC 13.0 reports; 13.5 has 0
# and 8.
WRITTEN_SPILLS = {64: 4, 128: 12}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "mask": (1, 1, 256)}, {"dropout": 0.1, "alibi_slopes": (4,), "mask": (1, 256, 256)}],
    ids=["plain", "keys", "options"],
)
@pytest.mark.parametrize("axes", [(1, 4), (2, 4)], ids=["added", "stored"])
@pytest.mark.parametrize(
    "tile",
    (*BACKWARD_FLOAT32_SM90_TILES, *BACKWARD_TF32_SM90_TILES),
    ids=lambda tile: f"{tile.max_dim}-{tile.bf16_terms}",
)
def test_a_bias_of_pairs_by_the_main_kernel(tile, axes, options):
    sizes: dict[str, Any] = {"batch": 2, "num_heads": 4, "seqlen_q": 256, "seqlen_k": 256, "head_dim": tile.max_dim}
    case = ct.Case(**sizes, head_dim_v=64, dtype="float32", bias=(*axes, 256, 256), **options)
    problem = replace(case.problem, precision="tf32" if tile.bf16_terms == 2 else "highest")
    plan = choose_plan(problem, DeviceSpec.for_arch("9.0"), BACKWARD, need=("dq", "dk", "dv", "dbias"))
    assert plan.tiles[0].label == tile.label
    (kernel,) = [kernel for kernel in plan.kernels if kernel.source == "sm90/backward_fp32.cu"]
    assert dict(kernel.defines)["CUFLASH_ADDS_DBIAS"] == (axes == (1, 4))
    resources = compile_spec(kernel).resources
    assert resources.warnings == ()
    assert SERIALIZED not in resources.log
    assert round_up(resources.registers, 8) * kernel.threads <= REGISTERS_OF_SM
    assert resources.spill_stores_bytes <= WRITTEN_SPILLS[tile.max_dim]


@pytest.mark.parametrize("tile", [BACKWARD_TILES[0], BACKWARD_SM90_TILES[0], BACKWARD_FLOAT32_SM90_TILES[0]], ids=str)
def test_what_is_not_needed_leaves_no_instructions(tile):
    every, without_dq, dv = (compiled(tile, need) for need in (("dq", "dk", "dv"), ("dk", "dv"), ("dv",)))
    sizes = [kernel.path.stat().st_size for kernel in (every, without_dq, dv)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    for kernel in (without_dq, dv):
        assert kernel.resources.spill_stores_bytes <= 8
        assert kernel.resources.warnings == ()
        assert SERIALIZED not in kernel.resources.log
