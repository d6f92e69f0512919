"""Every row of the tables of kernels with tangents compiles, and spills no more than is known of it."""

from dataclasses import replace
from typing import Any

import pytest

from cuflash.gpu.compiler import compile_spec
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm80.tiles import (
    BACKWARD_JVP_TILES,
    DQ_JVP_TILES,
    JVP_TILES,
    SCORES_JVP_TILES,
    BackwardJvpTile,
    DqJvpTile,
    JvpTile,
    ScoresJvpTile,
)
from cuflash.plan.sm90.jvp import JVP_SM90_TILES, JVP_WIDE_SM90_TILES, JvpSm90Tile
from cuflash.plan.sm90.tiles import (
    JVP_FLOAT32_SM90_TILES,
    JVP_FLOAT32_WIDE_SM90_TILES,
    JVP_TF32_SM90_TILES,
    JVP_TF32_WIDE_SM90_TILES,
)
from cuflash.plan.tiles import why_too_large
from cuflash.spec.passes import BACKWARD_JVP, JVP
from cuflash.testing import Case
from tests.compile.test_plans import SERIALIZED
from tests.sampling import sample
from tests.scored import of_functions

DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}
# Bytes that a thread of a causal kernel of 9.0 spills, by type, bytes of an element, max_dim, block_m and block_n. Wide
# elements have the accumulators of both results, and fragments of both factors, in registers.
SPILLS = {
    ("JvpTile", 4, 128, 64, 16): 16,
    ("JvpTile", 4, 128, 32, 16): 8,
    ("JvpTile", 4, 256, 32, 16): 4,
    ("JvpTile", 4, 256, 16, 16): 4,
    ("JvpTile", 4, 512, 16, 16): 4,
    ("JvpTile", 8, 64, 128, 32): 852,
    ("JvpTile", 8, 64, 64, 16): 256,
    ("JvpTile", 8, 128, 64, 16): 88,
    ("JvpTile", 8, 128, 32, 16): 252,
    ("JvpTile", 8, 128, 16, 16): 224,
    ("JvpTile", 8, 256, 16, 16): 168,
    ("BackwardJvpTile", 2, 64, 32, 64): 4,
    ("BackwardJvpTile", 4, 64, 32, 64): 104,
    ("BackwardJvpTile", 8, 64, 16, 32): 20,
    ("BackwardJvpTile", 8, 128, 32, 16): 24,
    ("BackwardJvpTile", 8, 128, 16, 16): 144,
    ("BackwardJvpTile", 8, 192, 16, 16): 320,
    ("ScoresJvpTile", 2, 64, 128, 32): 24,
}
ROUNDING = 1.25  # other versions of the compiler allocate registers a little differently


WIDE = {JvpTile: ("out", "lse"), BackwardJvpTile: ("dk", "dv"), DqJvpTile: ("dq",)}


def problem_of(tile, **others):
    own: dict[str, Any] = {"bias": (512, 512)} if type(tile) is ScoresJvpTile else {}
    dtype = DTYPES[tile.element_bytes]
    case = Case(seqlen_q=512, seqlen_k=512, head_dim=tile.max_dim, dtype=dtype, causal=True, **others, **own)
    return replace(case.problem, moved=("q", "k", "v", *own))


def main_kernel(tile, arch, problem=None):
    pass_ = JVP if type(tile) in (JvpTile, JvpSm90Tile) else BACKWARD_JVP
    made = {JvpTile: None, JvpSm90Tile: None, DqJvpTile: ("tdq",), ScoresJvpTile: ("tdbias",)}
    need = made.get(type(tile), ("tdk", "tdv"))
    problem = problem_of(tile) if problem is None else problem
    plan = choose_plan(problem, DeviceSpec.for_arch(arch), pass_, tiles=(tile,), need=need)
    (kernel,) = (kernel for kernel in plan.kernels if "jvp" in kernel.source)
    return kernel


@pytest.mark.parametrize(
    "tile", sample((*JVP_TILES, *BACKWARD_JVP_TILES, *DQ_JVP_TILES, *SCORES_JVP_TILES), 8), ids=str
)
def test_every_row_compiles(tile):
    resources = compile_spec(main_kernel(tile, "9.0")).resources
    key = (type(tile).__name__, tile.element_bytes, tile.max_dim, tile.block_m, tile.block_n)
    known = SPILLS.get(key, 0)
    assert resources.spill_stores_bytes <= known * ROUNDING + 16
    assert resources.stack_bytes <= known + 32  # no accumulator lies in local memory


@pytest.mark.parametrize("table", [JVP_TILES, BACKWARD_JVP_TILES, DQ_JVP_TILES], ids=["jvp", "of keys", "of dq"])
def test_partial_results_and_pages_spill_next_to_nothing(table):
    """What is left are 12 bytes of backward_jvp: its rows have as many registers as a thread can have."""
    tile = next(tile for tile in table if tile.element_bytes == 2)
    problems = [replace(problem_of(tile), wide=WIDE[type(tile)])]
    if type(tile) is JvpTile:
        problems.append(problem_of(tile, page_size=64, kv_lengths=(512,)))
    for problem in problems:
        resources = compile_spec(main_kernel(tile, "9.0", problem)).resources
        assert resources.spill_stores_bytes <= 16 and resources.stack_bytes <= 16 and not resources.warnings


@pytest.mark.parametrize("arch", ["7.5", "8.0", "8.6", "12.0"])
def test_other_devices(arch):
    """The first row of each table that fits there."""
    device = DeviceSpec.for_arch(arch)
    for table in sample((JVP_TILES, BACKWARD_JVP_TILES, DQ_JVP_TILES, SCORES_JVP_TILES), 3):
        tile = next(row for row in table if why_too_large(row, problem_of(row), device) is None)
        assert compile_spec(main_kernel(tile, arch)).path.exists()


@pytest.mark.parametrize(
    ("tile", "options", "spilled"),
    sample(
        [
            (tile, options, spilled if tile.max_dim > 64 else 0)
            for tile in JVP_SM90_TILES
            for options, spilled in (
                ({}, 0),
                ({"causal": True}, 0),
                ({"window": (60, 20)}, 0),
                ({"dtype": "float16", "sinks": True}, 0),
                ({"softcap": 5.0}, 24),
                ({"alibi_slopes": (1,)}, 24),
                ({"dropout": 0.2}, 8),
                ({"mask": (512, 512)}, 72),
                ({"block_mask": (1,)}, 88),
                ({"cu_seqlens_q": (0, 100, 512), "cu_seqlens_k": (0, 100, 512)}, 72),
            )
            if not (tile.serves == "fixed lengths" and "cu_seqlens_q" in options)
        ],
        6,
    ),
    ids=str,
)
def test_rows_of_hopper(tile, options, spilled):
    """Products are in flight, and accumulators in registers, with the options that rows are taken for."""
    case = Case(**{"seqlen_q": 512, "seqlen_k": 512, "head_dim": tile.max_dim, "dtype": "bfloat16"} | options)
    moved = tuple(name for name in ("q", "k", "v", "softcap", "alibi_slopes") if name in ("q", "k", "v", *options))
    plan = choose_plan(replace(case.problem, moved=moved), DeviceSpec.for_arch("9.0"), JVP, tiles=(tile,))
    (kernel,) = (kernel for kernel in plan.kernels if "jvp" in kernel.source)
    resources = compile_spec(kernel).resources
    assert SERIALIZED not in resources.log
    assert resources.spill_stores_bytes <= spilled + 16


@pytest.mark.parametrize(
    ("options", "spilled"),
    sample(
        [
            ({}, 0),
            ({"causal": True}, 16),
            ({"window": (60, 20)}, 136),
            ({"head_dim": 136, "head_dim_v": 64, "dtype": "float16", "sinks": True}, 0),
            ({"alibi_slopes": (1,), "dropout": 0.2}, 240),
            ({"mask": (512, 512)}, 112),
            ({"block_mask": (1,)}, 88),
            ({"bias": (512, 512)}, 570),
            ({"cu_seqlens_q": (0, 100, 512), "cu_seqlens_k": (0, 100, 512)}, 184),
        ],
        2,
    ),
    ids=str,
)
def test_wide_rows_of_hopper(options, spilled):
    case = Case(**{"seqlen_q": 512, "seqlen_k": 512, "head_dim": 256, "dtype": "bfloat16"} | options)
    moved = tuple(name for name in ("q", "k", "v", "bias", "alibi_slopes") if name in ("q", "k", "v", *options))
    plan = choose_plan(replace(case.problem, moved=moved), DeviceSpec.for_arch("9.0"), JVP, tiles=JVP_WIDE_SM90_TILES)
    (kernel,) = (kernel for kernel in plan.kernels if "jvp" in kernel.source)
    resources = compile_spec(kernel).resources
    assert SERIALIZED not in resources.log
    assert resources.spill_stores_bytes <= spilled + 16


FLOAT32_TILES = (
    *JVP_FLOAT32_SM90_TILES,
    *JVP_TF32_SM90_TILES,
    *JVP_FLOAT32_WIDE_SM90_TILES,
    *JVP_TF32_WIDE_SM90_TILES,
)


@pytest.mark.parametrize("tile", FLOAT32_TILES, ids=str)
@pytest.mark.parametrize(
    "options",
    sample(
        [
            {},
            {"window": (60, 20), "sinks": True},
            {"softcap": 5.0},
            {"alibi_slopes": (1,), "dropout": 0.2},
            {"mask": (512, 512)},
            {"block_mask": (1,)},
            {"bias": (512, 512)},
        ],
        1,
    ),
    ids=str,
)
def test_float32_rows_of_hopper(tile, options):
    case = Case(**{"seqlen_q": 512, "seqlen_k": 512, "head_dim": tile.max_dim, "dtype": "float32"} | options)
    moved = tuple(
        name for name in ("q", "k", "v", "softcap", "bias", "alibi_slopes") if name in ("q", "k", "v", *options)
    )
    plan = choose_plan(replace(case.problem, moved=moved), DeviceSpec.for_arch("9.0"), JVP, tiles=(tile,))
    for kernel in plan.kernels:
        resources = compile_spec(kernel).resources
        assert SERIALIZED not in resources.log
        assert resources.spill_stores_bytes <= ((64 if tile.max_dim == 64 else 280) if "jvp" in kernel.source else 0)


@pytest.mark.parametrize(
    ("score", "dtype", "arch"),
    sample(
        [
            (score, dtype, arch)
            for score in ("capped", "with_pairs", "of_rows", "polynomial", "branching")
            for dtype in ("float16", "float32", "float64")
            for arch in ("7.5", "8.0", "9.0", "12.0")
        ],
        60,
    ),
)
def test_functions(score, dtype, arch):
    """The main kernels of both passes with scores in Python and in CUDA, where all that may have a tangent has one."""
    problem = of_functions((score, "documents"), dtype, 32)
    arrays = tuple(name[1:] for name in problem.score_arg_gradients)
    moved = replace(problem, moved=("q", "k", "v", "scale", *arrays))
    need = ("tdq", "tdk", "tdv", "tdscale", *(f"td{name}" for name in arrays))
    for pass_, results in ((JVP, None), (BACKWARD_JVP, need)):
        for kernel in choose_plan(moved, DeviceSpec.for_arch(arch), pass_, need=results).kernels:
            assert "jvp" not in kernel.source or not compile_spec(kernel).resources.warnings, kernel.name
