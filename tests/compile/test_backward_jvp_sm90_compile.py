"""The kernels of backward_jvp on 9.0 compile without products that wait for each other, and spill what is known."""

from dataclasses import replace
from typing import Any

import pytest

from cuflash.gpu.compiler import compile_spec, supported_archs
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm90.backward_jvp import BACKWARD_JVP_SM90_TILES
from cuflash.plan.sm90.tiles import (
    BACKWARD_JVP_FLOAT32_SM90_TILES,
    BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES,
    BACKWARD_JVP_TF32_SM90_TILES,
    BACKWARD_JVP_TF32_WIDE_SM90_TILES,
)
from cuflash.spec.passes import BACKWARD_JVP
from cuflash.testing import Case
from tests.compile.test_plans import SERIALIZED
from tests.sampling import sample

pytestmark = pytest.mark.skipif("sm_90" not in supported_archs(), reason="this NVRTC does not know sm_90")

# Bytes that a thread spills, by max_dim: mostly descriptors. Two versions of the compiler differ by 24.
SPILLS = {64: 0, 128: 4, 256: 76}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "dtype": "float16"},
    {"window": (100, 20)},
    {"kv_lengths": (512,)},
    {"cu_seqlens_q": (0, 200, 512), "cu_seqlens_k": (0, 300, 512)},
)
# What makes weights pair by pair, or marks them, needs more registers.
MORE: tuple[dict[str, Any], ...] = (
    {"alibi_slopes": (2,)},
    {"softcap": 3.0},
    {"dropout": 0.2},
    {"bias": (2, 512, 512)},
    {"mask": (512, 512)},
)
MORE_BYTES = 400


def resources_of(tile, moved=("q", "k", "v"), *, deterministic=False, tdout=False, **options):
    options = {"dtype": "bfloat16"} | options
    case = Case(**{"seqlen_q": 512, "seqlen_k": 512, "head_dim": tile.max_dim, "num_heads": 2, **options})
    device = DeviceSpec.for_arch("9.0")
    problem = replace(case.problem, moved=moved, deterministic=deterministic)
    operands = {"tdout": problem.q} if tdout else None
    plan = choose_plan(problem, device, BACKWARD_JVP, tiles=(tile,), operands=operands)
    (kernel,) = (kernel for kernel in plan.kernels if kernel.source.startswith("sm90/backward_jvp"))
    return compile_spec(kernel).resources


@pytest.mark.parametrize(
    ("tile", "options"), sample([(tile, own) for tile in BACKWARD_JVP_SM90_TILES for own in OPTIONS], 4), ids=str
)
def test_every_row(tile, options):
    if tile.schedule == "kHalfStages" and "cu_seqlens_q" in options:
        return  # served by another family
    resources = resources_of(tile, **options)
    assert SERIALIZED not in resources.log
    assert resources.spill_stores_bytes <= SPILLS[tile.max_dim] + 32


@pytest.mark.parametrize("options", sample(OPTIONS, 3), ids=str)
@pytest.mark.parametrize("tile", sample(BACKWARD_JVP_SM90_TILES, 3), ids=str)
def test_every_row_in_order(tile, options):
    """The warpgroup of tdq has as many registers less as those that keep the order have."""
    if tile.schedule == "kHalfStages" and "cu_seqlens_q" in options:
        return
    resources = resources_of(tile, deterministic=True, **options)
    assert SERIALIZED not in resources.log
    assert resources.spill_stores_bytes <= SPILLS[tile.max_dim] + 32


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tile", sample(BACKWARD_JVP_SM90_TILES, 2), ids=str)
def test_products_of_tdout(tile, deterministic):
    resources = resources_of(tile, deterministic=deterministic, tdout=True, causal=True)
    assert SERIALIZED not in resources.log
    assert resources.spill_stores_bytes <= SPILLS[tile.max_dim] + 32


@pytest.mark.parametrize(
    ("tile", "options"), sample([(tile, own) for tile in BACKWARD_JVP_SM90_TILES for own in MORE], 6), ids=str
)
def test_options_that_take_registers(tile, options):
    assert resources_of(tile, **options).spill_stores_bytes <= MORE_BYTES


@pytest.mark.parametrize("moved", sample([(), ("q",), ("k",), ("v",), ("q", "k"), ("sinks",)], 4), ids=str)
def test_tangents_that_are_not_given(moved):
    for tile in BACKWARD_JVP_SM90_TILES[:2]:
        resources = resources_of(tile, moved, sinks="sinks" in moved)
        assert SERIALIZED not in resources.log
        assert resources.spill_stores_bytes <= SPILLS[tile.max_dim] + 32


# Bytes that a thread spills, by max_dim and bf16 terms: registers that hold addresses for a whole block.
FLOAT32_SPILLS = {(64, 3): 52, (64, 2): 36, (128, 3): 188, (128, 2): 92}
FLOAT32_TILES = (
    *BACKWARD_JVP_FLOAT32_SM90_TILES,
    *BACKWARD_JVP_TF32_SM90_TILES,
    *BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES,
    *BACKWARD_JVP_TF32_WIDE_SM90_TILES,
)


@pytest.mark.parametrize("options", sample((*OPTIONS[:2], *OPTIONS[3:5], *MORE), 9), ids=str)
@pytest.mark.parametrize("tile", FLOAT32_TILES, ids=str)
def test_float32_rows(tile, options):
    resources = resources_of(tile, dtype="float32", **options)
    assert SERIALIZED not in resources.log
    assert resources.spill_stores_bytes <= FLOAT32_SPILLS[tile.max_dim, tile.bf16_terms] + (
        MORE_BYTES if options in MORE else 32
    )
