"""Tiles of the column reductions of compute capability 9.0 that no row of the table has, and that tuning may try."""

from dataclasses import replace

import pytest

import cuflash.testing as ct
from cuflash.plan.sm90.reduction_tiles import COLUMN_SM90_TILES
from tests.emulate.reduced import reduced
from tests.reductions import judge

CASE = ct.Case(
    seqlen_q=200, seqlen_k=290, num_heads=2, num_heads_kv=1, head_dim=64, dtype="bfloat16", window=(None, 90), seed=2
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("score_mean", [0.0, 3e3], ids=["plain", "large lse"])
@pytest.mark.parametrize("sizes", [{"block_m": 64}, {"block_m": 64, "block_n": 64, "num_stages": 2}], ids=str)
def test_tiles_of_64_queries(sizes, score_mean):
    case = replace(CASE, score_mean=score_mean)
    judge(case, *reduced(case, "9.0", 1, column_tiles=(replace(COLUMN_SM90_TILES[0], **sizes),)))
