"""Plans of decode by the kernel of every device: when it serves, and its tiles."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.arrays.array_info import ITEMSIZE, Operand
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.key_splits import (
    COMBINE_COLUMNS,
    COMBINE_KEY_BYTES,
    COMBINE_PIECES,
    COMBINE_TILES,
    DECODE_MIN_SEQLEN_K,
    DECODE_ROWS,
    MIN_TILES_OF_BLOCK,
)
from cuflash.plan.sm80.decode import DECODE_FLOAT8_TILES, DECODE_TILES, MOST_WARPS, DecodeTile
from cuflash.plan.tiles import why_too_large
from cuflash.spec.binding import planned_length
from tests.problems import ARCHS, is_served, problem_of
from tests.sampling import examples

LATENCY_S = 0.8e-6  # from asking memory for bytes until they are there
DTYPES = ("float16", "bfloat16", "float32", "float64")


def decode_problem(seqlen_q=1, seqlen_k=8192, **changes):
    """One entry of a batch: 32 query heads, 8 key/value heads, head dimension 128."""
    usual = {"dim": 128, "dim_v": 128, "batch": 1, "heads": 32, "heads_kv": 8, "dtype": "float32"}
    return problem_of(seqlen_q, seqlen_k, **usual | changes)


def plan_of(arch="8.0", **changes):
    return choose_plan(decode_problem(**changes), DeviceSpec.for_arch(arch))


def main_of(plan):
    """The kernel that makes scores."""
    return next(kernel.source for kernel in plan.kernels if not kernel.source.startswith("helpers/"))


DECODE, FORWARD = "sm80/decode.cu", "sm80/forward.cu"


# ---- Rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"block_m": 24}, "whole fragments"),
        ({"block_n": 24}, "whole fragments"),
        ({"warp_groups": MOST_WARPS + 1}, f"at most {MOST_WARPS} warps"),
        ({"block_m": 64, "warp_groups": 3}, f"at most {MOST_WARPS} warps"),
    ],
)
def test_a_row_checks_itself(change, rule):
    with pytest.raises(ValueError, match=rule):
        replace(DECODE_TILES[0], **change)


@pytest.mark.parametrize("table", [DECODE_TILES, DECODE_FLOAT8_TILES], ids=["elements", "bytes"])
def test_tables_go_from_small_to_large(table):
    keys = [(tile.element_bytes, tile.block_m, tile.max_dim) for tile in table]
    assert keys == sorted(keys, key=lambda key: key[:1])
    for tile in table:
        assert tile.num_warps == tile.warp_groups * tile.block_m // 16 * tile.warps_d <= MOST_WARPS
        assert tile.max_dim % tile.dim_multiple == 0
    assert {tile.block_m for tile in table} == {16, 32, DECODE_ROWS}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_enough_bytes_are_on_their_way(dtype, arch):
    """As many as memory brings while one of them takes its way, at the usual head dimensions."""
    device = DeviceSpec.for_arch(arch)
    for dim in (64, 96, 128, 256):
        if not is_served(decode_problem(dim=dim, dim_v=dim, dtype=dtype), arch, FORWARD):
            continue
        plan = plan_of(arch, dim=dim, dim_v=dim, dtype=dtype, dropout=0.1)
        (tile,) = plan.tiles
        if dim == 256 and not isinstance(tile, DecodeTile):  # no space besides one tile of keys
            assert device.shared_bytes_per_sm < 100 * 1024
            continue
        assert isinstance(tile, DecodeTile)
        half = tile.block_n * dim * ITEMSIZE[dtype]  # K, or V, of a tile
        on_their_way = tile.min_blocks * tile.warp_groups * (2 * tile.num_stages - 1) * half
        assert on_their_way >= LATENCY_S * device.bytes_per_s / device.num_sms
        assert tile.num_stages == 1 or device.arch >= 80, "copies are waited for before 8.0"


@settings(max_examples=examples(200))
@given(
    arch=st.sampled_from(ARCHS),
    dtype=st.sampled_from(DTYPES),
    dim=st.integers(1, 1024),
    dim_v=st.integers(1, 1024),
    rows=st.integers(1, 80),
    group=st.sampled_from([1, 2, 5, 8]),
)
def test_rows_that_are_taken_hold_all_queries_and_fit(arch, dtype, dim, dim_v, rows, group):
    """And where none does, the kernel for many queries serves."""
    seqlen_q, device = max(1, rows // group), DeviceSpec.for_arch(arch)
    problem = problem_of(seqlen_q, 4096, dim, dim_v, dtype=dtype, batch=1, heads=2 * group, dropout=0.1)
    if not is_served(problem, arch, FORWARD):
        return
    plan = choose_plan(problem, device)
    tile = plan.tiles[0]
    if isinstance(tile, DecodeTile):
        assert group * seqlen_q <= tile.block_m and max(tile.padded_dims(problem)) <= tile.max_dim
        assert not why_too_large(tile, problem, device) and not tile.why_not(problem, device)
    else:
        few = group * seqlen_q <= DECODE_ROWS and max(dim, dim_v) <= 64
        assert not few
        assert group * seqlen_q > DECODE_ROWS or "not sm80/decode: " in plan.reason


# ---- When ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, DECODE),
        ({"arch": "7.0"}, DECODE),
        ({"arch": "7.5", "dtype": "bfloat16"}, DECODE),
        ({"arch": "12.0", "dtype": "bfloat16"}, DECODE),
        ({"arch": "9.0"}, DECODE),
        ({"arch": "9.0", "precision": "tf32"}, DECODE),
        ({"dtype": "float64"}, DECODE),
        ({"seqlen_q": 16}, DECODE),
        ({"seqlen_q": 17}, FORWARD),  # 68 rows
        ({"seqlen_k": DECODE_MIN_SEQLEN_K}, DECODE),
        ({"seqlen_k": DECODE_MIN_SEQLEN_K - 128}, FORWARD),
        ({"window": (DECODE_MIN_SEQLEN_K, 0)}, DECODE),
        ({"window": (99, 0)}, FORWARD),  # 100 keys
        ({"heads_kv": 32, "batch": 64}, DECODE),
        ({"heads_kv": 32, "batch": 64, "seqlen_q": 16}, DECODE),
        ({"heads_kv": 32, "batch": 64, "seqlen_q": 17}, FORWARD),
        ({"heads_kv": 32, "seqlen_q": 64}, DECODE),
        ({"heads_kv": 16, "batch": 64, "seqlen_q": 17}, DECODE),
        ({"dtype": "bfloat16", "arch": "9.0", "dropout": 0.1}, DECODE),
        ({"dtype": "bfloat16", "arch": "9.0", "heads_kv": 32, "batch": 4, "dropout": 0.1}, "sm90/forward.cu"),
        ({"dim": 832, "dim_v": 832}, FORWARD),
        ({"dim": 1024, "dim_v": 1024, "dtype": "bfloat16"}, DECODE),
        ({"dim": 1024, "dim_v": 1024, "dtype": "bfloat16", "seqlen_q": 8}, FORWARD),
    ],
    ids=str,
)
def test_kernels(changes, expected):
    assert main_of(plan_of(**changes)) == expected


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("name", ["mask", "block_mask", "bias", "alibi_slopes"])
def test_kernels_where_something_acts_on_scores(name, arch):
    shape = {"alibi_slopes": (1, 32), "block_mask": (1, 32, 1, 64)}.get(name, (1, 32, 1, 8192))
    dtype = "bool" if "mask" in name else "float32"
    operand = Operand(shape=shape, strides=(0,) * (len(shape) - 1) + (1,), dtype=dtype)
    for of in ("bfloat16", "float32", "float64"):
        problem = replace(decode_problem(dtype=of), block_size=(128, 128) if name == "block_mask" else (0, 0))
        plan = choose_plan(replace(problem, **{name: operand}), DeviceSpec.for_arch(arch))
        by_tma = arch == "9.0" and of == "bfloat16" and name == "alibi_slopes"
        assert main_of(plan) == ("sm90/decode.cu" if by_tma else DECODE)
        if not by_tma:
            found = dict(next(k for k in plan.kernels if k.source == DECODE).defines)
            assert (found["CUFLASH_HAS_BLOCK_INDEX"], found["CUFLASH_HAS_TILE_CLASSES"]) == (0, 0)


def test_the_plan_says_why():
    plan = plan_of(seqlen_k=131072)
    assert "4 queries of the heads that share keys go through one product: keys are read once" in plan.reason
    assert "216 blocks take equal splits of the keys, up to 27 of them those of one head: another kernel" in plan.reason
    assert "DecodeTile 16 x 16, 4 warps, 1 stage, 2 resident blocks: by arithmetic" in plan.reason
    full = plan_of(heads_kv=32, batch=64, seqlen_q=20).reason
    assert "not sm80/decode: 2048 heads of 20 queries fill the device, and no two share keys\n" in full + "\n"
    wide = plan_of(dim=832, dim_v=832).reason
    assert (
        "not sm80/decode: 4 rows of such head dimensions do not fit into shared memory, nor does their output\n"
        in wide + "\n"
    )
    starts: dict[str, Any] = {"cu_seqlens_q": (0, 2, 4), "cu_seqlens_k": (0, 900, 2000)}
    packed = ct.Case(seqlen_q=4, seqlen_k=2000, head_dim=32, ndim=3, **starts).problem
    assert "not sm80/decode: it knows no packed sequences" in choose_plan(packed, DeviceSpec.for_arch("8.0")).reason
    assert "sm80/decode" not in choose_plan(problem_of(), DeviceSpec.for_arch("8.0")).reason


def test_a_block_mask_is_said_to_hide_tiles():
    operand = Operand(shape=(1, 32, 1, 64), strides=(0, 0, 64, 1), dtype="bool")
    plan = choose_plan(replace(decode_problem(), block_mask=operand, block_size=(128, 128)), DeviceSpec.for_arch("8.0"))
    assert "tiles of 16 keys that no query attends to are not loaded" in plan.reason
    assert plan.run_time.index_heads == 1, "all heads have one"


# ---- Into how many ---------------------------------------------------------------------------------------------------


@given(
    num_sms=st.integers(1, 200),
    seqlen_q=st.integers(1, 16),
    seqlen_k=st.integers(DECODE_MIN_SEQLEN_K, 2**20),
    batch=st.integers(1, 300),
    heads_kv=st.sampled_from([1, 2, 8, 32]),
    dtype=st.sampled_from(DTYPES),
    arch=st.sampled_from(["7.5", "8.0", "8.6", "10.0"]),
)
def test_splits(num_sms, seqlen_q, seqlen_k, batch, heads_kv, dtype, arch):
    """Blocks fill the device as far as tiles of keys allow, in one wave, and each has as many tiles as the others."""
    problem = decode_problem(seqlen_q, seqlen_k, batch=batch, heads=4 * heads_kv, heads_kv=heads_kv, dtype=dtype)
    plan = choose_plan(problem, replace(DeviceSpec.for_arch(arch), num_sms=num_sms))
    (tile,), blocks = plan.tiles, plan.run_time.resident_blocks
    if not isinstance(tile, DecodeTile):
        assert arch == "7.5" and dtype == "float64" and seqlen_q > 8
        return
    heads, at_once = batch * heads_kv, tile.warp_groups * tile.block_n
    num_tiles = heads * -(-planned_length(seqlen_k) // at_once)
    most = max(1, min(num_sms * tile.min_blocks, num_tiles // MIN_TILES_OF_BLOCK))
    assert plan.kernels[0].grid == blocks <= most
    assert -(-num_tiles // blocks) <= -(-num_tiles // most) + COMBINE_TILES
    if heads % blocks == 0:
        assert (len(plan.kernels), plan.scratch) == (1, ())
        return
    rows, splits, size = 4 * seqlen_q, heads + blocks, ITEMSIZE[problem.softmax_dtype]
    scratch = {"partial_out": splits * rows * 128, "partial_sums": splits * rows * 2}
    key_bytes = heads * planned_length(seqlen_k) * 2 * 128 * ITEMSIZE[dtype]
    combines = rows * (128 // COMBINE_COLUMNS) <= COMBINE_PIECES and key_bytes <= COMBINE_KEY_BYTES
    assert len(plan.kernels) == (1 if combines else 2)
    assert dict(plan.scratch) == scratch | ({"arrivals": 8 * heads // size} if combines else {})
    assert plan.key_splits < 2**16, "counts of calls would overlap"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_that_grows_is_planned_once_in_a_while(dtype):
    """Plans are of a length that many lengths share, whatever it is."""
    device = DeviceSpec.for_arch("8.0")
    plans = [choose_plan(decode_problem(seqlen_k=length, dtype=dtype), device) for length in (8100, 8101, 8192)]
    assert all(plan.any_length for plan in plans)
    assert len({(plan.kernels, plan.run_time, plan.scratch) for plan in plans}) == 1
