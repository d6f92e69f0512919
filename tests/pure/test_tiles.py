"""Devices, and tables of tiles: what a row promises, and that each is chosen for some problem."""

import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.arrays.array_info import Operand
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.choose import MAX_HEAD_DIM
from cuflash.plan.sm80.narrow import FORWARD_NARROW_TILES
from cuflash.plan.sm80.tiles import (
    BACKWARD_CHUNKED_TILES,
    BACKWARD_TILES,
    DQ_CHUNKED_TILES,
    DQ_TILES,
    FORWARD_CHUNKED_TILES,
    FORWARD_TILES,
    SCORES_CHUNKED_TILES,
    SCORES_TILES,
    BackwardTile,
    DqTile,
    ForwardTile,
    ScoresTile,
)
from cuflash.plan.sm90.chunked import ChunkedSm90Tile
from cuflash.plan.sm90.tiles import (
    BACKWARD_FLOAT32_SM90_TILES,
    BACKWARD_JVP_FLOAT32_SM90_TILES,
    BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES,
    BACKWARD_JVP_TF32_SM90_TILES,
    BACKWARD_SM90_TILES,
    BACKWARD_TF32_SM90_TILES,
    BIAS_FLOAT32_SM90_TILES,
    BIAS_SM90_TILES,
    BIAS_TF32_SM90_TILES,
    FORWARD_FLOAT32_SM90_TILES,
    FORWARD_SM90_TILES,
    FORWARD_TF32_SM90_TILES,
    JVP_FLOAT32_WIDE_SM90_TILES,
    BackwardFloat32Sm90Tile,
    BackwardSm90Tile,
    BiasSm90Tile,
    ForwardFloat32Sm90Tile,
    ForwardSm90Tile,
)
from cuflash.plan.tiles import round_up, tile_bytes
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS
from tests.problems import ARCHS, SIZES_OF_SHARED, biased, blocks_of, is_served, masked, problem_of
from tests.scored import of_functions

# ---- Devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_spellings_of_an_arch(arch):
    device = DeviceSpec.for_arch(arch)
    digits = arch.replace(".", "")
    assert device is DeviceSpec.for_arch(digits) is DeviceSpec.for_arch(f"sm_{digits}")
    assert device.arch == int(digits)
    assert device.target == f"sm_{digits}"
    assert device.shared_bytes_per_block + device.shared_bytes_reserved == device.shared_bytes_per_sm


@pytest.mark.parametrize("arch", ["6.1", "9", "sm_91", "", "ninety", "9.0a", "-8.0"])
def test_arch_that_is_not_known(arch):
    with pytest.raises(ValueError, match=rf"^arch: got {arch!r}, expected one of 7.0, 7.5, 8.0, .*12.1$"):
        DeviceSpec.for_arch(arch)


# ---- Rows ------------------------------------------------------------------------------------------------------------

TABLES = {
    "forward": FORWARD_TILES,
    "forward sm90": FORWARD_SM90_TILES,
    "forward float32 sm90": FORWARD_FLOAT32_SM90_TILES,
    "forward tf32 sm90": FORWARD_TF32_SM90_TILES,
    "backward": BACKWARD_TILES,
    "backward sm90": BACKWARD_SM90_TILES,
    "backward float32 sm90": BACKWARD_FLOAT32_SM90_TILES,
    "backward tf32 sm90": BACKWARD_TF32_SM90_TILES,
    "dq": DQ_TILES,
    "scores": SCORES_TILES,
    "bias": BIAS_SM90_TILES,
    "bias float32": BIAS_FLOAT32_SM90_TILES,
    "bias tf32": BIAS_TF32_SM90_TILES,
}
DIMS = sorted({tile.max_dim for table in TABLES.values() for tile in table})


@pytest.mark.parametrize(
    ("row", "change", "rule"),
    [
        (FORWARD_TILES[0], {"block_m": 100}, "whole fragments for every warp"),
        (FORWARD_TILES[0], {"block_m": 64, "num_warps": 8}, "whole fragments for every warp"),
        (BACKWARD_TILES[0], {"num_warps": 4, "warps_d": 3}, "warps_d divides num_warps"),
        (BACKWARD_TILES[0], {"num_warps": 4, "warps_d": 1, "block_n": 96}, "whole fragments of keys"),
        (BACKWARD_TILES[0], {"num_warps": 4, "warps_d": 2, "block_m": 40}, "whole pairs of 8 queries"),
        (BACKWARD_TILES[0], {"num_warps": 4, "dq_warps_m": 3, "block_m": 96}, "dq_warps_m divides num_warps"),
        (BACKWARD_TILES[0], {"num_warps": 4, "warps_d": 1, "dq_warps_m": 4, "block_m": 32}, "whole fragments of dq"),
        (DQ_TILES[0], {"block_m": 72}, "whole fragments for every warp"),
        (FORWARD_NARROW_TILES[0], {"block_n": 16}, "8 keys for every warp"),
        (FORWARD_NARROW_TILES[0], {"num_stages": 1}, "a stage for a tile that arrives"),
        (FORWARD_CHUNKED_TILES[0], {"num_stages": 1}, "a stage for a chunk that arrives"),
        (FORWARD_CHUNKED_TILES[0], {"block_n": 32}, "16 keys for every warp"),
        (BACKWARD_CHUNKED_TILES[0], {"block_m": 48}, "16 streamed rows for every warp"),
        (BACKWARD_CHUNKED_TILES[0], {"chunk_columns": 16}, "16 columns of a chunk for every warp"),
        (DQ_CHUNKED_TILES[0], {"block_m": 32}, "whole fragments for every warp"),
        (SCORES_CHUNKED_TILES[0], {"num_stages": 1}, "a stage for a chunk that arrives"),
        (SCORES_TILES[0], {"num_warps": 3}, "whole fragments for every warp"),
        (BIAS_SM90_TILES[0], {"block_n": 96}, "128 queries for two consumers, and 64 or 128 keys"),
        (BIAS_FLOAT32_SM90_TILES[0], {"bf16_terms": 4}, "one bf16 term, two or three"),
        (FORWARD_SM90_TILES[0], {"block_m": 64}, "64 queries for each of two to four consumers"),
        (FORWARD_SM90_TILES[0], {"block_m": 320}, "64 queries for each of two to four consumers"),
        (FORWARD_SM90_TILES[0], {"serves": "all"}, "one of any, no pairs, bias, .* in serves"),
        (FORWARD_SM90_TILES[0], {"block_n": 72}, "a block_n that one product serves"),
        (FORWARD_SM90_TILES[0], {"block_n": 272}, "a block_n that one product serves"),
        (FORWARD_FLOAT32_SM90_TILES[0], {"block_m": 256}, "64 queries for each of two or three consumers"),
        (FORWARD_FLOAT32_SM90_TILES[0], {"block_n": 72}, "a block_n that one product serves"),
        (FORWARD_FLOAT32_SM90_TILES[0], {"bf16_terms": 1}, "two or three bf16 terms"),
        (BACKWARD_TF32_SM90_TILES[0], {"bf16_terms": 4}, "two or three bf16 terms"),
        (BACKWARD_FLOAT32_SM90_TILES[0], {"block_m": 128}, "64 keys and 64 queries"),
        (BACKWARD_JVP_FLOAT32_SM90_TILES[0], {"block_m": 128}, "64 keys and 64 queries"),
        (BACKWARD_JVP_FLOAT32_SM90_TILES[0], {"max_dim": 128}, "a head dimension of one chunk"),
        (BACKWARD_JVP_TF32_SM90_TILES[0], {"bf16_terms": 4}, "two or three bf16 terms"),
        (BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES[0], {"block_n": 128}, "64 keys and 64 queries"),
        (JVP_FLOAT32_WIDE_SM90_TILES[0], {"block_m": 128}, "64 keys and 64 queries"),
        (JVP_FLOAT32_WIDE_SM90_TILES[0], {"max_dim": 192}, "a head dimension of two chunks"),
        (JVP_FLOAT32_WIDE_SM90_TILES[0], {"num_stages": 3}, "boxes for two groups of products"),
        (JVP_FLOAT32_WIDE_SM90_TILES[0], {"bf16_terms": 4}, "two or three bf16 terms"),
        (BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES[0], {"max_dim": 192}, "a head dimension of two chunks"),
        (BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES[0], {"num_stages": 3}, "boxes for two groups of products"),
        (BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES[0], {"tdk_boxes": 1}, "boxes for two groups of products"),
        (BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES[0], {"bf16_terms": 4}, "two or three bf16 terms"),
        (BACKWARD_FLOAT32_SM90_TILES[0], {"block_n": 128}, "64 keys and 64 queries"),
        (
            BACKWARD_FLOAT32_SM90_TILES[0],
            {"num_stages": 1, "num_buffers": 2, "dq_late": True},
            "late dq no later than dk",
        ),
    ],
)
def test_a_row_checks_itself(row, change, rule):
    with pytest.raises(ValueError, match=rule):
        replace(row, **change)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_goes_from_small_to_large(table):
    keys = [(tile.element_bytes, tile.max_dim) for tile in table]
    assert keys == sorted(keys)
    only_sm90 = isinstance(table[0], ForwardSm90Tile | BackwardSm90Tile)
    if not isinstance(table[0], ForwardFloat32Sm90Tile | BackwardFloat32Sm90Tile | BiasSm90Tile):
        assert {x.element_bytes for x in table if x.max_dim == 256} == ({2} if only_sm90 else {2, 4, 8})
        assert only_sm90 or table[[x.element_bytes for x in table].index(4) - 1].max_dim == MAX_HEAD_DIM
    for tile in table:
        assert tile.max_dim % tile.dim_multiple == 0
        assert tile.origin


def test_every_row_of_chunks_is_chosen_somewhere():
    chosen = set()
    for dtype, arch, dim in itertools.product(("bfloat16", "float32", "float64"), SIZES_OF_SHARED, (1025, 16384)):
        problem, device = problem_of(dim=dim, dim_v=0, dtype=dtype), DeviceSpec.for_arch(arch)
        for pass_ in PASSES_WITHOUT_TANGENTS:
            plan = choose_plan(problem, device, pass_, need=None if pass_ is FORWARD else ("dq", "dk", "dscale"))
            chosen |= set(plan.tiles)
            assert all(kernel.shared_bytes <= device.shared_bytes_per_block for kernel in plan.kernels)
    rows = (*FORWARD_CHUNKED_TILES, *BACKWARD_CHUNKED_TILES, *DQ_CHUNKED_TILES, *SCORES_CHUNKED_TILES)
    assert {tile for tile in chosen if not isinstance(tile, ChunkedSm90Tile)} == set(rows)


@functools.cache
def chosen_for_usual_problems(deterministic, need, precision):
    """Tiles that the planner takes for some of them, on some device."""
    chosen = set()
    for dtype in ("bfloat16", "float32", "float64"):
        for causal, seqlen, softcap in ((False, 65536, None), (False, 512, None), (True, 4096, 5.0)):
            base = problem_of(seqlen, seqlen, dtype=dtype, causal=causal, softcap=softcap, deterministic=deterministic)
            base = replace(base, precision=precision)
            for dim in DIMS:
                for dim_v in {dim, 128}:
                    problem = replace(base, head_dim=dim, head_dim_v=dim_v)
                    for arch in SIZES_OF_SHARED:
                        for pass_ in PASSES_WITHOUT_TANGENTS:
                            if is_served(problem, arch, pass_):
                                device = DeviceSpec.for_arch(arch)
                                chosen |= set(choose_plan(problem, device, pass_, need=need).tiles)
    return frozenset(chosen)


@functools.cache
def chosen_for_special_problems(precision):
    """Those for a bias, masks, windows, dropout, lse without values and functions of the caller, on an H100."""
    h100 = DeviceSpec.for_arch("9.0")
    chosen = set(choose_plan(blocks_of(1024), h100).tiles)
    for dim, dtype in itertools.product((64, 128, 192), ("bfloat16", "float32")):
        of_float32 = replace(biased(dim, "float32"), dtype="float32", precision=precision)
        tiles = choose_plan(biased(dim, dtype), h100).tiles + choose_plan(of_float32, h100).tiles
        types = ForwardSm90Tile | ForwardFloat32Sm90Tile
        chosen |= {replace(tile, bias_of_pairs=0) for tile in tiles if isinstance(tile, types)}
        for problem in (biased(dim, dtype), of_float32):
            chosen |= set(choose_plan(problem, h100, BACKWARD, need=("dbias",)).tiles)
    # A bias whose rows TMA cannot read is looked up; a mask of pairs where tiles are not of 64 keys.
    odd = Operand(shape=(2, 4, 1024, 1024), strides=(0, 0, 1025, 1), dtype="bfloat16", alignment=2)
    for dim in (64, 128, 192, 256):
        plain = problem_of(dim=dim, dim_v=dim)
        window = problem_of(16384, 16384, dim, dim, window=(500, 0))
        without = problem_of(16384, 16384, dim, 0)
        chosen |= set(choose_plan(without, h100, BACKWARD).tiles)
        with_bias = replace(biased(dim, "float32"), head_dim_v=0)
        chosen |= {tile.changed(bias_of_pairs=0) for tile in choose_plan(with_bias, h100, BACKWARD).tiles}
        many = problem_of(1 << 16, 1 << 16, dim, 0, dtype="float32")
        chosen |= set(choose_plan(replace(many, precision=precision), h100).tiles)
        narrow = problem_of(16384, 16384, dim, 64)
        for problem in (masked(dim), replace(plain, bias=odd), replace(plain, dropout=0.1), window, without, narrow):
            tiles = choose_plan(problem, h100).tiles
            chosen |= {tile.changed(mask_by_bits=False) for tile in tiles}
        for functions in ((None, "documents"), ("plane", None), ("gated", None)):
            of_caller = of_functions(functions, "bfloat16", dim, 2048)
            bounded = replace(of_caller, window_right=0)
            for problem, device in itertools.product((of_caller, bounded), (h100, replace(h100, num_sms=1))):
                tiles = choose_plan(problem, device).tiles
                chosen |= {tile.changed(per_key_values=0) for tile in tiles}
    return frozenset(chosen)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_is_chosen_somewhere(table):
    of_tf32 = (FORWARD_TF32_SM90_TILES, BACKWARD_TF32_SM90_TILES, BIAS_TF32_SM90_TILES)
    precision = "tf32" if table in of_tf32 else "highest"
    need = ("dscale",) if table is SCORES_TILES else DEFAULT_NEED
    chosen = chosen_for_usual_problems(table is DQ_TILES, need, precision) | chosen_for_special_problems(precision)
    assert not [tile for tile in table if tile not in chosen]


@given(st.integers(1, 300), st.integers(1, 256), st.sampled_from((2, 4, 8)))
def test_shared_tiles_hold_their_elements(rows, columns, size):
    assert rows * columns * size <= tile_bytes(rows, columns, size) <= rows * round_up(columns * size, 128)
    assert tile_bytes(16 * rows, columns, size) % 128 == 0


def test_rows_are_of_their_types():
    types = {
        "forward": ForwardTile,
        "forward sm90": ForwardSm90Tile,
        "forward float32 sm90": ForwardFloat32Sm90Tile,
        "forward tf32 sm90": ForwardFloat32Sm90Tile,
        "backward": BackwardTile,
        "backward sm90": BackwardSm90Tile,
        "backward float32 sm90": BackwardFloat32Sm90Tile,
        "backward tf32 sm90": BackwardFloat32Sm90Tile,
        "dq": DqTile,
        "scores": ScoresTile,
        "bias": BiasSm90Tile,
        "bias float32": BiasSm90Tile,
        "bias tf32": BiasSm90Tile,
    }
    for name, tiles in TABLES.items():
        assert all(type(tile) is types[name] for tile in tiles)
