"""Plans of decode on compute capability 9.0: when keys are split over blocks, and into how many."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.arrays.array_info import Operand
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.key_splits import (
    COMBINE_COLUMNS,
    COMBINE_KEY_BYTES,
    COMBINE_PIECES,
    COMBINE_TILES,
    COMBINE_WARPS,
    DECODE_MIN_SEQLEN_K,
    DECODE_ROWS,
    MIN_TILES_OF_BLOCK,
)
from cuflash.plan.sm90.decode_tiles import DECODE_SM90_TILES, DecodeSm90Tile
from cuflash.plan.tensor_map import tensor_map_spec
from cuflash.spec.binding import planned_length
from tests.problems import problem_of

H200 = DeviceSpec.for_arch("9.0")


def decode_problem(seqlen_q=1, seqlen_k=8192, **changes):
    """One entry of a batch: 32 query heads, 8 key/value heads, head dimension 128."""
    return problem_of(
        seqlen_q, seqlen_k, **{"dim": 128, "dim_v": 128, "batch": 1, "heads": 32, "heads_kv": 8} | changes
    )


def sources(plan):
    return [kernel.source for kernel in plan.kernels]


DECODE = ["sm90/decode.cu"]
DECODE_AND_COMBINE = ["sm90/decode.cu", "helpers/split_combine.cu"]
FORWARD = ["sm90/forward.cu"]


# ---- Rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"block_m": 128}, "the rows of one product"),
        ({"block_n": 72}, "a block_n that one product serves"),
        ({"block_n": 272}, "a block_n that one product serves"),
    ],
)
def test_a_row_checks_itself(change, rule):
    with pytest.raises(ValueError, match=rule):
        replace(DECODE_SM90_TILES[0], **change)


def test_rows_go_from_small_to_large_and_each_is_chosen():
    dims = [tile.max_dim for tile in DECODE_SM90_TILES]
    assert dims == sorted(set(dims))
    for dim in range(8, dims[-1] + 1, 8):
        plan = choose_plan(decode_problem(dim=dim, dim_v=8), H200)
        assert plan.tiles == (next(tile for tile in DECODE_SM90_TILES if tile.max_dim >= dim),)
        for kernel in plan.kernels:
            assert kernel.shared_bytes <= H200.shared_bytes_per_block


def test_enough_bytes_are_on_their_way():
    """64 KiB for every SM, with one tile of every block in use."""
    for tile in DECODE_SM90_TILES:
        stage = tile.block_n * 2 * tile.max_dim * 2
        assert tile.min_blocks * (tile.num_stages - 1) * stage >= 64 * 1024


@pytest.mark.parametrize(("batch", "seqlen_k", "blocks"), [(1, 8192, 1), (1, 65536, 1), (1, 131072, 2), (16, 8192, 2)])
def test_short_caches_of_bytes_have_one_block_on_a_multiprocessor(batch, seqlen_k, blocks):
    problem = decode_problem(batch=batch, seqlen_k=seqlen_k)
    k, v = (replace(x, dtype="float8_e4m3fn") for x in (problem.k, problem.v))
    (tile,) = choose_plan(replace(problem, k=k, v=v), H200).tiles
    assert (type(tile).__name__, tile.min_blocks) == ("DecodeFloat8Sm90Tile", blocks)


# ---- When ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, DECODE),
        ({"seqlen_q": 4}, DECODE_AND_COMBINE),
        ({"seqlen_q": 16}, DECODE_AND_COMBINE),
        ({"seqlen_q": 16, "seqlen_k": 131072}, DECODE_AND_COMBINE),
        ({"seqlen_k": 131072}, DECODE_AND_COMBINE),
        ({"heads_kv": 1, "seqlen_k": 131072}, DECODE_AND_COMBINE),
        ({"seqlen_q": 17}, FORWARD),  # 68 rows
        ({"seqlen_k": DECODE_MIN_SEQLEN_K}, DECODE),
        ({"seqlen_k": DECODE_MIN_SEQLEN_K - 128}, FORWARD),
        ({"causal": True, "seqlen_q": 4}, DECODE_AND_COMBINE),
        ({"window": (DECODE_MIN_SEQLEN_K, 0)}, DECODE),
        ({"window": (99, 0)}, FORWARD),  # 100 keys
        ({"window": (None, 99), "causal": "top_left", "seqlen_q": 4}, FORWARD),  # 4 keys
        ({"batch": 264}, DECODE),
        ({"heads_kv": 32}, DECODE_AND_COMBINE),  # of many bytes
        ({"heads_kv": 32, "seqlen_k": 2048}, DECODE),
        ({"heads_kv": 32, "batch": 8}, FORWARD),
        ({"heads": 4, "heads_kv": 4, "seqlen_q": 64}, DECODE_AND_COMBINE),
        ({"dtype": "float32"}, ["sm80/decode.cu"]),
        ({"dim": 60, "dim_v": 60}, ["sm80/decode.cu"]),
        ({"softcap": 3.0}, DECODE),
        ({"dropout": 0.1}, ["sm80/decode.cu"]),
    ],
    ids=str,
)
def test_kernels(changes, expected):
    assert sources(choose_plan(decode_problem(**changes), H200)) == expected


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("alibi_slopes", (1, 32), DECODE_AND_COMBINE),
        ("bias", (1, 32, 4, 8192), ["sm80/decode.cu", "helpers/split_combine.cu"]),
        ("mask", (1, 32, 4, 8192), ["sm80/decode.cu", "helpers/split_combine.cu"]),
    ],
)
def test_kernels_where_something_acts_on_scores(name, shape, expected):
    problem = decode_problem(4)
    optional = {name: Operand(shape=shape, strides=(0,) * len(shape), dtype="bool" if "mask" in name else "float32")}
    assert sources(choose_plan(replace(problem, **optional), H200)) == expected


@pytest.mark.parametrize("arch", ["8.0", "10.0", "12.0"])
def test_only_its_own_architecture_gets_the_kernel(arch):
    assert sources(choose_plan(decode_problem(), DeviceSpec.for_arch(arch))) == ["sm80/decode.cu"]


def test_the_plan_says_why():
    shared = choose_plan(decode_problem(1), H200).describe(verbose=True, width=0)
    assert "4 queries of the heads that share keys go through one product: keys are read once" in shared
    equal = "blocks take equal splits of the keys, up to"
    assert f"128 {equal} 16 of them those of one head: the last one combines their results\n" in shared + "\n"
    long = choose_plan(decode_problem(16, 131072), H200).describe(verbose=True, width=0)
    assert f"132 {equal} 18 of them those of one head: another kernel combines their results" in long
    assert (
        "128 blocks take whole heads\n"
        in choose_plan(decode_problem(batch=16), H200).describe(verbose=True, width=0) + "\n"
    )
    assert "DecodeSm90Tile 64 x 128, 5 warps, 2 stages, 1 resident block" in shared
    assert "not sm90/decode: it knows no dropout\n" in choose_plan(decode_problem(dropout=0.5), H200).reason
    full = choose_plan(decode_problem(heads_kv=32, batch=8), H200).reason
    assert "not sm90/decode: 256 heads fill the device, and no two share keys\n" in full
    assert "sm90/decode" not in choose_plan(problem_of(), H200).reason


# ---- Into how many ---------------------------------------------------------------------------------------------------


def splits_of(heads, blocks):
    """head -> the blocks that have keys of it, as kernels/common/schedule/key_splits.cuh counts them."""
    owners: dict[int, set[int]] = {head: set() for head in range(heads)}
    for block in range(blocks):
        for head in range(block * heads // blocks, -(-(block + 1) * heads // blocks)):
            owners[head].add(block)
    return owners


@given(
    num_sms=st.integers(1, 200),
    seqlen_q=st.integers(1, 16),
    seqlen_k=st.integers(DECODE_MIN_SEQLEN_K, 2**20),
    batch=st.integers(1, 300),
    heads_kv=st.sampled_from([1, 2, 8, 32]),
    dim=st.sampled_from([64, 128, 192, 256]),
)
def test_splits(num_sms, seqlen_q, seqlen_k, batch, heads_kv, dim):
    """Blocks fill the device as far as tiles of keys allow, in one wave, and each has as many tiles as the others."""
    problem = decode_problem(seqlen_q, seqlen_k, batch=batch, heads=4 * heads_kv, heads_kv=heads_kv, dim=dim, dim_v=dim)
    plan = choose_plan(problem, replace(H200, num_sms=num_sms))
    (tile,), blocks = plan.tiles, plan.run_time.resident_blocks
    assert isinstance(tile, DecodeSm90Tile)
    heads = batch * heads_kv
    num_tiles = heads * (planned_length(seqlen_k) // tile.block_n)
    most = max(1, min(num_sms * tile.min_blocks, num_tiles // MIN_TILES_OF_BLOCK))
    assert plan.kernels[0].grid == blocks <= most
    assert -(-num_tiles // blocks) <= -(-num_tiles // most) + COMBINE_TILES
    rows = 4 * seqlen_q
    assert rows <= DECODE_ROWS
    most_of_head = max(map(len, splits_of(heads, blocks).values()))
    assert most_of_head <= plan.key_splits <= most_of_head + 1
    defines = dict(plan.kernels[0].defines)
    assert defines["CUFLASH_SPLITS_KEYS"] == int(most_of_head > 1)
    if most_of_head == 1:
        assert (sources(plan), defines["CUFLASH_COMBINES"]) == (DECODE, 0)
        assert plan.scratch == ()
        return
    splits = heads + blocks
    scratch = {"partial_out": splits * rows * dim, "partial_sums": splits * rows * 2}
    key_bytes = heads * planned_length(seqlen_k) * 2 * dim * 2
    if rows * (dim // COMBINE_COLUMNS) <= COMBINE_PIECES and key_bytes <= COMBINE_KEY_BYTES:
        assert (sources(plan), defines["CUFLASH_COMBINES"]) == (DECODE, 1)
        assert dict(plan.scratch) == scratch | {"arrivals": 2 * heads}
        assert plan.key_splits < 2**16, "counts of calls would overlap"
        return
    assert (sources(plan), defines["CUFLASH_COMBINES"]) == (DECODE_AND_COMBINE, 0)
    combine = plan.kernels[1]
    assert combine.threads == 32 * COMBINE_WARPS
    assert combine.grid == -(-heads * rows * (dim // COMBINE_COLUMNS) // COMBINE_WARPS)
    assert dict(plan.scratch) == scratch


@pytest.mark.parametrize(
    ("changes", "blocks", "of_a_head"),
    [
        ({}, 128, 16),  # of 132 resident blocks; 4 tiles each, as it would be with all of them
        ({"seqlen_k": 131072}, 132, 18),  # 63 tiles each, not 64
        ({"batch": 16}, 128, 1),
        ({"batch": 20}, 132, 2),  # 78 tiles each, not 128
        ({"batch": 64}, 132, 2),
        ({"batch": 33}, 132, 1),  # two heads each
        ({"heads": 1, "heads_kv": 1}, 32, 32),  # 2 tiles each
        ({"heads": 1, "heads_kv": 1, "seqlen_k": 131072}, 132, 132),
    ],
    ids=str,
)
def test_shares_of_the_usual(changes, blocks, of_a_head):
    plan = choose_plan(decode_problem(**changes), H200)
    assert (plan.run_time.resident_blocks, plan.key_splits) == (blocks, of_a_head)


def test_boxes_hold_all_rows_of_a_group():
    problem = decode_problem(4)
    plan = choose_plan(problem, H200)
    assert [spec.name for spec in plan.tensor_maps] == ["q", "k", "v"]
    assert plan.tensor_maps[0] == tensor_map_spec("q", problem.q, 4, 4, read_once=True)
    assert plan.tensor_maps[1] == tensor_map_spec("k", problem.k, 128, read_once=True)
