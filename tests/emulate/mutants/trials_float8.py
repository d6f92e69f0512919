"""The trials of fp8 numbers: of keys and values in storage, and of products."""

from dataclasses import replace

import cuflash.testing as ct
from cuflash.plan.sm80.tiles import ForwardTile
from cuflash.plan.sm90.decode_tiles import DecodeFloat8Sm90Tile
from cuflash.plan.sm90.tiles import FORWARD_FLOAT8_SM90_TILES
from tests.emulate.mutants.trial import Trial

_FLOAT8_TILES = (
    ForwardTile(
        element_bytes=2,
        warps_d=1,
        max_dim=128,
        block_m=64,
        block_n=32,
        num_warps=4,
        num_stages=1,
        min_blocks=1,
        fragments_ahead=2,
        key_bytes=1,
        origin="of a trial",
    ),
)
_FLOAT8_DECODE_TILES = (DecodeFloat8Sm90Tile(max_dim=128, block_n=64, num_stages=2, min_blocks=1, origin="of a trial"),)
_FLOAT8 = ct.Case(
    seqlen_q=70,
    seqlen_k=300,
    batch=2,
    num_heads=4,
    num_heads_kv=2,
    head_dim=48,
    head_dim_v=80,
    dtype="float16",
    causal=True,
    kv_dtype="float8_e4m3fn",
    k_scale="block",
    v_scale="token",
)
_QUERIES = replace(_FLOAT8, head_dim=45, dtype="bfloat16", q_float8=True, q_scale="token")
_BYTES = ct.Case(
    seqlen_q=300,
    seqlen_k=330,
    batch=2,
    num_heads=2,
    num_heads_kv=1,
    head_dim=64,
    dtype="bfloat16",
    causal=True,
    kv_lengths=(301, 170),
    kv_dtype="float8_e4m3fn",
    q_float8=True,
    q_scale="token",
    k_scale="block",
    v_scale="head",
    scale_block=128,
    window=(150, None),
    seed=3,
)

TRIALS = {
    "forward float8": Trial(case=_FLOAT8, tiles=_FLOAT8_TILES),
    "forward float8 packed": Trial(
        case=replace(_FLOAT8, batch=1, v_scale="head", cu_seqlens_q=(0, 30, 70), cu_seqlens_k=(0, 35, 300)),
        tiles=_FLOAT8_TILES,
    ),
    "decode float8": Trial(case=replace(_FLOAT8, seqlen_q=5), tiles=_FLOAT8_DECODE_TILES, num_sms=3),
    "decode float8 parts": Trial(
        case=replace(_FLOAT8, seqlen_q=5, num_heads=2),
        tiles=(replace(_FLOAT8_DECODE_TILES[0], block_n=128),),
        num_sms=3,
    ),
    "decode float8 rows": Trial(case=replace(_FLOAT8, seqlen_q=20), tiles=_FLOAT8_DECODE_TILES, num_sms=3),
    "decode float8 narrowed": Trial(
        case=replace(_FLOAT8, seqlen_q=13, dtype="bfloat16", head_dim=80), tiles=_FLOAT8_DECODE_TILES, num_sms=3
    ),
    "decode float8 pages": Trial(
        case=replace(_FLOAT8, seqlen_q=5, page_size=16, seqlen_k=304), tiles=_FLOAT8_DECODE_TILES
    ),
    "decode float8 blocks": Trial(
        case=replace(_FLOAT8, seqlen_q=5, v_scale="block", scale_block=32), tiles=_FLOAT8_DECODE_TILES, num_sms=3
    ),
    "decode float8 lengths": Trial(
        case=replace(_FLOAT8, seqlen_q=5, kv_lengths=(0, 230), k_scale="token"), tiles=_FLOAT8_DECODE_TILES, num_sms=3
    ),
    "forward float8 queries": Trial(case=_QUERIES, tiles=_FLOAT8_TILES),
    "forward float8 queries packed": Trial(
        case=replace(_QUERIES, head_dim=44, batch=1, cu_seqlens_q=(0, 30, 70), cu_seqlens_k=(0, 35, 300)),
        tiles=_FLOAT8_TILES,
    ),
    "decode float8 queries": Trial(
        case=replace(_QUERIES, head_dim=80, seqlen_q=13), tiles=_FLOAT8_DECODE_TILES, num_sms=3
    ),
    "fp8 products": Trial(case=_BYTES, tiles=FORWARD_FLOAT8_SM90_TILES[1:2], num_sms=1),
    "fp8 products on a line": Trial(
        case=replace(_BYTES, score_spread=4.0, k_scale="head", v_scale="block"),
        tiles=FORWARD_FLOAT8_SM90_TILES[1:2],
        num_sms=1,
    ),
    "fp8 products in parts": Trial(
        case=replace(_BYTES, head_dim=48, head_dim_v=192, score_spread=8.0, seqlen_q=100, v_scale="block"),
        tiles=FORWARD_FLOAT8_SM90_TILES[6:],
        num_sms=1,
    ),
    "fp8 products in turn": Trial(
        case=replace(_BYTES, head_dim=48, head_dim_v=192, seqlen_q=200), tiles=FORWARD_FLOAT8_SM90_TILES[5:6], num_sms=1
    ),
    "fp8 products ahead": Trial(case=_BYTES, tiles=FORWARD_FLOAT8_SM90_TILES[2:3], num_sms=1),
}
