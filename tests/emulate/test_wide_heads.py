"""The forward kernels of wide heads for compute capability 9.0, run on the CPU, against the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.plan.sm90.wide_tiles import (
    FORWARD_WIDE_SM90_TILES,
    DecodeWideSm90Tile,
    ForwardWideSm90Tile,
)
from cuflash.spec.passes import FORWARD
from tests import wide_heads
from tests.emulate import attention
from tests.sampling import examples

pytestmark = pytest.mark.one_in(12)

CASE = ct.Case(
    seqlen_q=150, seqlen_k=300, num_heads=2, num_heads_kv=1, head_dim=320, dtype="bfloat16", causal=True, seed=2
)
WIDEST = replace(CASE, head_dim=576, head_dim_v=512, num_heads=1)
CASES = {
    "d 320": CASE,
    "d 512": replace(WIDEST, head_dim=512, causal=False, dtype="float16", layout="bshd"),
    "d 576, 512": replace(WIDEST, sinks=True),
    "narrow values": replace(WIDEST, head_dim_v=64, causal=False),
    "wide values": replace(CASE, head_dim=64, head_dim_v=448),
    "odd": replace(CASE, head_dim=344, head_dim_v=264, window=(90, 20)),
    "decode": replace(WIDEST, seqlen_q=7, num_heads=4),
    "two passes": replace(WIDEST, head_dim=1024, head_dim_v=776),
    "lengths": replace(CASE, batch=3, kv_lengths=(130, 0, 299), sinks=True),
    "no keys": replace(CASE, seqlen_k=5, sinks=True),
    "block mask": replace(CASE, seqlen_k=600, block_mask=(1, 2), block_size=(128, 128)),
    "terms": replace(
        CASE, alibi_slopes=(2,), softcap=5.0, bias=(2, 150, 300), mask=(300,), kv_lengths=(250,), scale=-0.3
    ),
    "dropout": replace(CASE, dropout=0.3),
}
# The decode kernel: rows of one block, and of two.
FEW = replace(CASE, seqlen_q=1, seqlen_k=700, num_heads=128, head_dim_v=512, causal=False)
CASES_OF_FEW = {
    "one block": replace(FEW, seqlen_q=3, num_heads=5, head_dim=576, causal=True),
    "two blocks": FEW,
    "two blocks of several queries": replace(
        FEW, seqlen_q=4, num_heads=24, causal=True, batch=2, kv_lengths=(600, 130), sinks=True
    ),
    "part of a block": replace(FEW, num_heads=100, sinks=True, dtype="float16"),
    "two passes": replace(FEW, num_heads=3, head_dim=64, head_dim_v=800, softcap=5.0),
    "slopes, bias": replace(FEW, num_heads=6, seqlen_q=2, alibi_slopes=(6,), bias=(6, 2, 700)),
    "whole heads": replace(FEW, seqlen_k=520, num_heads=8, num_heads_kv=4, batch=33, head_dim_v=64, sinks=True),
}
TILES = {tile.max_dim: tile for tile in FORWARD_WIDE_SM90_TILES}


def assert_right(case, tile=None, types=(ForwardWideSm90Tile,), **options):
    arrays = case.arrays()
    problem = attention.problem_of(case, arrays)
    how: dict[str, Any] = {"arch": "9.0"} | options
    assert type(attention.plan_for(problem, FORWARD, arrays, how["arch"]).tiles[0]) in types
    results = attention.forward(problem, arrays, tiles=None if tile is None else (tile,), **case.random, **how)
    ct.assert_forward(case, *results)
    return results


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_oracle(case):
    assert_right(case)


@pytest.mark.parametrize("case", CASES_OF_FEW.values(), ids=CASES_OF_FEW)
def test_decode(case):
    assert_right(case, types=(DecodeWideSm90Tile,))


@settings(max_examples=examples(8))
@given(wide_heads.decode_cases(), st.sampled_from((2, 6, 132)))
def test_decode_of_any_problem(case, num_sms):
    assert_right(case, types=(DecodeWideSm90Tile,), arch=replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms))


@settings(max_examples=examples(12))
@given(wide_heads.cases())
def test_any_problem(case):
    """Some have few queries and many keys."""
    assert_right(case, types=(ForwardWideSm90Tile, DecodeWideSm90Tile))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("max_dim", TILES)
def test_every_tile(max_dim, block_m, schedule):
    """With one block, or cluster, for all tiles of queries: boxes of one follow those of another in every order."""
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=block_m // 64)
    tile = TILES[max_dim].changed(block_m=block_m)
    case = replace(CASE, head_dim=max_dim, seqlen_q=200, seqlen_k=200, dtype="float16")
    assert_right(case, tile, arch=device, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules_agree(schedule):
    case = replace(CASE, head_dim_v=200)
    for got, x in zip(assert_right(case, schedule=schedule), assert_right(case), strict=True):
        np.testing.assert_array_equal(got, x)


def test_what_lies_behind_the_last_key_is_not_seen():
    case = replace(CASE, kv_lengths=(131,), seqlen_k=256)
    arrays = case.arrays()
    problem = attention.problem_of(case, arrays)
    expected = attention.forward(problem, arrays, arch="9.0")
    arrays["k"][:, :, 131:] = arrays["v"][:, :, 131:] = np.nan
    for got, x in zip(attention.forward(problem, arrays, arch="9.0"), expected, strict=True):
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 64, "seqlen_k": 320, "kv_lengths": (200,)}, "not sm90/forward_wide: it knows no pages"),
        ({"head_dim": 330}, "not sm90/forward_wide: a stride of q is 99000 bytes"),
    ],
)
def test_what_it_does_not_serve(changes, reason):
    case = replace(CASE, **changes)
    plan = attention.plan_for(attention.problem_of(case, arrays := case.arrays()), FORWARD, arrays, "9.0")
    assert plan.kernels[-1].source == "sm80/forward.cu"
    assert reason in plan.reason
