"""Trials of the mutants of the gradient of a per-pair bias on compute capability 9.0."""

from dataclasses import replace
from typing import Any

import cuflash.testing as ct
from cuflash.plan.sm90.tiles import BiasSm90Tile
from tests.emulate.mutants.trial import Trial

_CASE = ct.Case(
    seqlen_q=230,
    seqlen_k=168,
    batch=2,
    num_heads=4,
    num_heads_kv=2,
    head_dim=72,
    dtype="float16",
    bias=(1, 4, 230, 168),
    bias_dtype="input",
    mask=(2, 1, 1, 168),
    dropout=0.3,
    seed=1,
)
_OF_ALL = replace(_CASE, bias=(230, 168))
_FLOAT32 = replace(
    _CASE,
    dtype="float32",
    seqlen_k=132,
    head_dim=40,
    head_dim_v=9,
    bias=(4, 230, 132),
    mask=(2, 1, 1, 132),
    dropout=0.0,
)
_TILE = BiasSm90Tile(max_dim=128, bias_of_pairs=2, num_stages=3, bias_stages=1, origin="of a trial")
_FLOAT32_TILE = replace(_TILE, block_n=64, bias_of_pairs=4, num_stages=2, bf16_terms=3)
_TRIAL: dict[str, Any] = {"tiles": (_TILE,), "need": ("dbias",)}

TRIALS = {
    "dbias sm90": Trial(case=_CASE, num_sms=5, **_TRIAL),
    "dbias sm90 shared": Trial(case=replace(_OF_ALL, mask=None, causal=True), **_TRIAL),
    "dbias sm90 rest": Trial(case=_OF_ALL, num_sms=3, **_TRIAL),
    "dbias float32": Trial(case=_FLOAT32, tiles=(_FLOAT32_TILE,), need=("dbias",), num_sms=5),
}
