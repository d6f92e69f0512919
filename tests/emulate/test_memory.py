"""Memory: results stay inside their arrays, offsets take 64 bits, nothing is undefined, no bank conflicts."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cuflash.testing as ct
from cuflash import emulator
from cuflash.emulator import Statistics
from cuflash.plan.sm80.tiles import BACKWARD_TILES, DqTile, ForwardTile
from cuflash.plan.sm90.tiles import (
    FORWARD_FLOAT32_SM90_TILES,
    FORWARD_SM90_TILES,
    ForwardSm90Tile,
)
from cuflash.plan.tiles import Tile
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, problem_of
from tests.emulate.checks import SANITIZED, all_results, assert_only_noise, either_kernel, framed, rising
from tests.emulate.specialisations import SEVERAL_STAGES, TABLES, goes_with, name_of
from tests.judging import assert_oracle

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.one_in(8)


@pytest.mark.parametrize("deterministic", [False, True])
def test_results_stay_inside_their_arrays(deterministic):
    case = ct.Case(seqlen_q=70, seqlen_k=81, batch=2, num_heads=2, num_heads_kv=1, head_dim=24, dtype="bfloat16")
    frames: list[np.ndarray] = []
    assert_oracle(case, all_results(case, deterministic=deterministic, allocate=framed(frames)))
    assert_only_noise(frames, 5 + 9)  # inputs and results of both passes


@pytest.mark.parametrize("tile", FORWARD_SM90_TILES[2:4], ids=name_of)
def test_results_of_the_tma_stay_inside_their_arrays(tile):
    """Whole boxes leave shared memory, and columns and rows that do not exist are not stored."""
    case = ct.Case(seqlen_q=70, seqlen_k=81, batch=2, num_heads=2, num_heads_kv=1, head_dim=24, dtype="bfloat16")
    case = replace(case, head_dim_v=16)
    arrays = case.arrays()
    frames: list[np.ndarray] = []
    allocate = framed(frames, aligned=True)
    results = attention.forward(problem_of(case, arrays), arrays, tiles=(tile,), allocate=allocate)
    ct.assert_forward(case, *results)
    assert_only_noise(frames, 3 + 2)


@either_kernel
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": (2, 2, 33, 18), "mask": (2, 2, 33, 18)}], ids=["plain", "terms"])
def test_offsets_take_64_bits(options, deterministic, arch):
    case = ct.Case(
        seqlen_q=33,
        seqlen_k=18,
        batch=2,
        num_heads=2,
        head_dim=16,
        dtype="float16",
        kv_lengths=(18, 11),
        kv_lengths_dtype="int64",
        alibi_slopes=(2, 2),
        **options,
    )
    assert_oracle(case, all_results(case, arch=arch, deterministic=deterministic, allocate=attention.far_apart))


def run_sanitized(sanitizer, configs=((False, "float16"), (True, "float16"), (False, "float32"), (True, "float64"))):
    for deterministic, dtype in configs:
        case = replace(SANITIZED, dtype=dtype)
        arch = "8.0" if deterministic else "9.0"
        assert_oracle(case, all_results(case, arch=arch, deterministic=deterministic, sanitizer=sanitizer))
    case = replace(SANITIZED, dtype="float32")
    arrays, tiles = case.arrays(), [next(row for row in FORWARD_FLOAT32_SM90_TILES if row.serves == "any")]
    results = attention.forward(problem_of(case, arrays), arrays, tiles=tiles, sanitizer=sanitizer, **case.random)
    ct.assert_forward(case, *results)


def test_no_undefined_behaviour():
    run_sanitized("undefined")


def test_no_address_errors():
    """Registers and the stack too, which the emulator does not watch."""
    configs = ((False, "float16"), (True, "float64"))  # a build takes long
    code = f"from tests.emulate.test_memory import run_sanitized; run_sanitized('address', {configs})"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=HERE,
        env={**emulator.sanitizer_environment(), "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]


# ---- Shared memory ---------------------------------------------------------------------------------------------------


ROWS_WITH_MATRIX_LOADS = (
    *SEVERAL_STAGES,
    *(tile for table in TABLES for tile in table if tile.element_bytes == 2),
    *FORWARD_SM90_TILES,
)


@pytest.mark.parametrize("tile", ROWS_WITH_MATRIX_LOADS, ids=name_of)
def test_matrix_loads_have_no_bank_conflicts(tile):
    case = ct.Case(seqlen_q=33, seqlen_k=65, head_dim=tile.max_dim, dtype="bfloat16")
    arrays = case.arrays()
    problem = problem_of(case, arrays, deterministic=isinstance(tile, DqTile))
    launches: list[Statistics] = []
    if isinstance(tile, ForwardSm90Tile):
        case, problem, arrays = rising(tile, "bfloat16")  # matrix loads are those of products done again
    if isinstance(tile, ForwardTile | ForwardSm90Tile):
        attention.forward(problem, arrays, tiles=(tile,), statistics=launches)
    else:
        tiles: tuple[Tile, ...] = (tile,)
        if isinstance(tile, DqTile):
            tiles = (next(main for main in BACKWARD_TILES if goes_with(main, tile)), tile)
        attention.backward(problem, arrays, *forward_by_oracle(problem, arrays), tiles=tiles, statistics=launches)
    assert sum(launch.matrix_loads for launch in launches) > 0
    assert [launch.matrix_load_conflicts for launch in launches] == [0] * len(launches)
