"""Trials of the mutants of the kernels of wide heads."""

from dataclasses import replace
from typing import Any

import cuflash.testing as ct
from cuflash.plan.sm90.wide_tiles import (
    BackwardWideSm90Tile,
    DecodeWideSm90Tile,
    DqWideSm90Tile,
    ForwardWideSm90Tile,
)
from tests.emulate.mutants.trial import Trial

_CASE = ct.Case(
    seqlen_q=300,
    seqlen_k=400,
    num_heads=2,
    num_heads_kv=1,
    head_dim=192,
    head_dim_v=256,
    dtype="bfloat16",
    causal=True,
    score_spread=4.0,
    sinks=True,
    seed=3,
)
_FEW = replace(_CASE, seqlen_q=2, seqlen_k=600, num_heads=44, score_spread=1.0)
_TILE: dict[str, Any] = {"max_dim": 256, "block_n": 64, "num_stages": 9, "origin": "of a trial"}
_FORWARD = ForwardWideSm90Tile(block_m=128, **_TILE)
_DECODE = DecodeWideSm90Tile(block_m=128, **_TILE)
_STAGES: dict[str, Any] = {"max_dim": 320, "num_stages": 5, "dv_stages": 5, "origin": "of a trial"}
_MAIN, _DQ = BackwardWideSm90Tile(**_STAGES), DqWideSm90Tile(**_STAGES)
# Several tiles of both kinds, and heads that share keys.
_BACKWARD = replace(
    _CASE,
    seqlen_q=200,
    seqlen_k=150,
    head_dim=192,
    head_dim_v=128,
    num_heads_kv=2,
    causal=False,
    window=(90, 20),
    sinks=False,
)
TRIALS = {
    "wide": Trial(case=_CASE, tiles=(_FORWARD,), num_sms=2),
    "wide short ring": Trial(case=_CASE, tiles=(_FORWARD.changed(num_stages=4),), num_sms=2),
    "wide lengths": Trial(case=replace(_CASE, causal=False, kv_lengths=(70,)), tiles=(_FORWARD,), num_sms=2),
    "wide passes": Trial(
        case=replace(_CASE, seqlen_q=100, seqlen_k=130, head_dim=64, head_dim_v=768),
        tiles=(_FORWARD.changed(max_dim=1024),),
        num_sms=2,
    ),
    "few wide v in k": Trial(
        case=replace(_FEW, head_dim=320, head_dim_v=200, v_in_k=True, batch=3, kv_lengths=(590, 80, 600)),
        tiles=(_DECODE.changed(max_dim=320, num_stages=10, v_in_k=True),),
        num_sms=4,
    ),
    "wide dk": Trial(case=_BACKWARD, tiles=(_MAIN,), need=("dk", "dv")),
    "wide dq": Trial(case=replace(_BACKWARD, head_dim=320, head_dim_v=64), tiles=(_DQ,), need=("dq",)),
    "wide dq causal": Trial(
        case=replace(_BACKWARD, window=None, causal=True, head_dim=320, head_dim_v=64), tiles=(_DQ,), need=("dq",)
    ),
    "wide dk of columns": Trial(case=_BACKWARD, tiles=(_MAIN.changed(column_blocks=2),), need=("dk", "dv")),
    "wide dq of columns": Trial(
        case=replace(_BACKWARD, head_dim=320, head_dim_v=64), tiles=(_DQ.changed(column_blocks=2),), need=("dq",)
    ),
    "wide cap": Trial(case=replace(_BACKWARD, softcap=1.0, dropout=0.4), tiles=(_MAIN, _DQ)),
    "wide key lengths": Trial(case=replace(_BACKWARD, window=None, kv_lengths=(100,)), tiles=(_MAIN, _DQ)),
    "wide shares": Trial(case=replace(_BACKWARD, num_heads_kv=1), tiles=(_MAIN,), need=("dk", "dv"), splits=True),
    "wide few": Trial(case=_FEW, tiles=(_DECODE,), num_sms=6),
    "wide few heads": Trial(case=replace(_FEW, batch=3, kv_lengths=(600, 0, 515)), tiles=(_DECODE,), num_sms=4),
}
