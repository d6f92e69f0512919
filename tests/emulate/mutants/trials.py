"""The trials that mutants name: cases, tiles, and what is special about each."""

from dataclasses import replace
from typing import Any

import cuflash.testing as ct
from cuflash import emulator
from cuflash.plan.sm80.narrow import FORWARD_NARROW_TILES
from cuflash.plan.sm80.tiles import (
    BACKWARD_CHUNKED_TILES,
    DQ_CHUNKED_TILES,
    FORWARD_CHUNKED_TILES,
    SCORES_CHUNKED_TILES,
    BackwardTile,
    DqTile,
    ForwardTile,
    ScoresTile,
)
from cuflash.plan.sm90.chunked import BACKWARD_CHUNKED_SM90_TILES, FORWARD_CHUNKED_SM90_TILES
from cuflash.plan.sm90.decode_tiles import DecodeSm90Tile
from cuflash.plan.sm90.scored import CLAIMED_KEYS, CLAIMED_KEYS_64
from cuflash.plan.sm90.tiles import (
    BackwardFloat32Sm90Tile,
    BackwardSm90Tile,
    ForwardFloat32Sm90Tile,
    ForwardSm90Tile,
)
from cuflash.spec.options import Origin
from tests.emulate import attention
from tests.emulate.mutants import (
    trials_bias,
    trials_decode,
    trials_float8,
    trials_large,
    trials_reductions,
    trials_tangents,
    trials_wide,
)
from tests.emulate.mutants.trial import FunctionTrial, MaximaTrial, MergeTrial, ReductionTrial, RowReductionTrial, Trial
from tests.row_reductions import BehindSink, rooted


def _bias_tile() -> tuple[ForwardSm90Tile]:
    (tile,) = _sm90(q_stages=1)
    return (replace(tile, serves="bias"),)


def _forward(
    block_m: int = 128,
    block_n: int = 32,
    num_warps: int = 4,
    num_stages: int = 1,
    warps_d: int = 1,
    element_bytes: int = 2,
) -> tuple[ForwardTile]:
    tile = ForwardTile(
        element_bytes=element_bytes,
        warps_d=warps_d,
        max_dim=128,
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        min_blocks=1,
        fragments_ahead=2,
        origin="of a trial",
    )
    return (tile,)


def _sm90(
    block_m: int = 128, block_n: int = 64, num_stages: int = 2, ping_pong: bool = True, q_stages: int = 2
) -> tuple[ForwardSm90Tile]:
    tile = ForwardSm90Tile(
        max_dim=256,
        block_m=block_m,
        block_n=block_n,
        num_stages=num_stages,
        ping_pong=ping_pong,
        q_stages=q_stages,
        origin="of a trial",
    )
    return (tile,)


def _float32_sm90(block_m: int = 128, ping_pong: bool = True) -> tuple[ForwardFloat32Sm90Tile]:
    tile = ForwardFloat32Sm90Tile(
        max_dim=128, block_m=block_m, block_n=32, num_stages=2, ping_pong=ping_pong, origin="of a trial"
    )
    return (tile,)


def _backward(
    num_warps: int = 4,
    num_stages: int = 2,
    warps_d: int = 1,
    dq_warps_m: int = 2,
    block_m: int = 32,
    block_n: int = 64,
    element_bytes: int = 2,
) -> tuple[BackwardTile]:
    tile = BackwardTile(
        element_bytes=element_bytes,
        max_dim=128,
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        min_blocks=1,
        warps_d=warps_d,
        dq_warps_m=dq_warps_m,
        fragments_ahead=1,
        origin="of a trial",
    )
    return (tile,)


_BACKWARD_SM90 = BackwardSm90Tile(
    max_dim=128,
    block_m=64,
    block_n=128,
    num_stages=2,
    schedule="kHoldK",
    origin="of a trial",
)
_DK_FROM_SHARED = replace(_BACKWARD_SM90, schedule="kSharedDs")
_SPLIT_ROLES = replace(_BACKWARD_SM90, block_n=64, schedule="kSplitRoles")
_BACKWARD_SPLIT = (
    BackwardFloat32Sm90Tile(max_dim=128, num_stages=1, num_buffers=1, dq_late=True, origin="of a trial"),
)
_BACKWARD_SPLIT_RING = (replace(_BACKWARD_SPLIT[0], max_dim=64, num_stages=2, num_buffers=2, dq_late=False),)
_WITH_DBIAS = ("dq", "dk", "dv", "dbias")
_DECODE_TILES = (DecodeSm90Tile(max_dim=128, block_n=32, num_stages=2, min_blocks=1, origin="of a trial"),)
_LONG_DECODE_TILES = (replace(_DECODE_TILES[0], block_n=64),)
_DQ = DqTile(max_dim=128, block_m=64, block_n=32, num_warps=4, min_blocks=1, origin="of a trial")
_SCORES = (
    ScoresTile(max_dim=128, block_m=64, block_n=32, num_warps=4, num_stages=2, min_blocks=1, origin="of a trial"),
)
_CHUNKED_GRADIENTS = tuple(table[0].changed(slice_chunks=2) for table in (BACKWARD_CHUNKED_TILES, DQ_CHUNKED_TILES))
_SUMS = ("dalibi_slopes", "dscale", "dsoftcap")
_GROUPED = ct.Case(
    seqlen_q=150, seqlen_k=77, batch=2, num_heads=4, num_heads_kv=2, head_dim=72, head_dim_v=24, dtype="float16"
)
_LONG = replace(_GROUPED, seqlen_k=150, head_dim=150, causal=True, has_values=False, dlse=True)
_LONG_SM90 = replace(_LONG, seqlen_q=300, seqlen_k=330, batch=1, head_dim=272)
_LONG_BIAS = replace(_LONG_SM90, bias=(1, 1, 1, 330))
_CLUSTER, _, _ROWS_OF_CHUNKS = (tile.changed(block_n=64) for tile in FORWARD_CHUNKED_SM90_TILES)
_PRODUCTS = BACKWARD_CHUNKED_SM90_TILES[0].changed(num_stages=3, result_boxes=1, block_n=64, chunk_tiles=4, key_tiles=2)
_POINTS = replace(
    _GROUPED, seqlen_q=70, seqlen_k=600, head_dim=3, dtype="float32", bias=(4, 1, 600), causal=True, has_values=False
)
_SMALL = replace(_GROUPED, seqlen_q=70, batch=1, num_heads_kv=1, num_heads=2)
_TOP_LEFT = replace(_GROUPED, seqlen_q=300, seqlen_k=100, num_heads=2, num_heads_kv=1, causal="top_left")
# A bias that tiles are loaded of; one whose elements are wide; and numbers of keys.
_BIAS = replace(_GROUPED, seqlen_q=230, seqlen_k=168, head_dim_v=72, bias=(1, 4, 230, 168), bias_dtype="input")
_WIDE_BIAS = replace(_BIAS, seqlen_k=132, bias=(2, 1, 230, 132), bias_dtype="softmax")
_BIAS_FLOAT32 = replace(_WIDE_BIAS, dtype="float32", bias=(4, 230, 132), mask=(2, 1, 1, 132), head_dim=40, head_dim_v=9)
_PLAIN_FLOAT32 = replace(_BIAS_FLOAT32, bias=None, mask=None, head_dim=24)
_NUMBERS = replace(_GROUPED, seqlen_k=177, bias=(2, 1, 1, 177), mask=(1, 4, 1, 177))
_DECODE = ct.Case(
    seqlen_q=5, seqlen_k=300, batch=2, num_heads=8, num_heads_kv=2, head_dim=72, head_dim_v=40, dtype="float16"
)
# Bounds that cross one corner of a tile: the ends of the ranges of tiles matter.
_WINDOW = replace(_SMALL, seqlen_q=150, seqlen_k=183, causal=True, window=(34, None), head_dim=16, head_dim_v=16)
_HIDING = ct.Case(
    seqlen_q=128, seqlen_k=192, num_heads=2, head_dim=32, dtype="float16", bias=(2, 128, 192), bias_dtype="input"
)
# The second sequence is empty on one side, the first and the last end within tiles, and rows are left.
_PACKED = ct.Case(
    seqlen_q=320, seqlen_k=340, num_heads=4, num_heads_kv=2, head_dim=72, head_dim_v=24, dtype="float16", causal=True,
    alibi_slopes=(4, 4), sinks=True, dlse=True, cu_seqlens_q=(0, 75, 75, 205, 300), cu_seqlens_k=(0, 90, 100, 250, 330),
)  # fmt: skip
_PACKED_MANY = ct.Case(
    seqlen_q=110, seqlen_k=110, num_heads=1, head_dim=64, dtype="float16",
    cu_seqlens_q=(0, *(3 * i + i % 2 for i in range(34))), cu_seqlens_k=(0, *(3 * i + i % 2 for i in range(34))),
)  # fmt: skip
_CLAIMS = ct.Case(
    seqlen_q=300, seqlen_k=CLAIMED_KEYS_64, num_heads=5, num_heads_kv=1, head_dim=16, dtype="float16", causal=True,
)  # fmt: skip
_NARROW = replace(_SMALL, seqlen_q=40, head_dim=13, head_dim_v=11, strides="padded")
_LENGTHS = replace(_SMALL, batch=3, kv_lengths=(33, 0, 77), kv_lengths_dtype="int64")
_FLIPPED = replace(_SMALL, batch=2, head_dim=16, kv_lengths=(77, 30), strides="flipped")
_TERMS = replace(
    _SMALL,
    head_dim=16,
    head_dim_v=16,
    softcap=2.0,
    score_spread=3.0,
    bias=(2, 70, 77),
    mask=(2, 70, 77),
    alibi_slopes=(2,),
)
_TERMS_OF_SCORES = replace(
    _GROUPED, seqlen_q=70, head_dim=16, head_dim_v=16, softcap=2.0, score_spread=3.0, alibi_slopes=(4,)
)
_KEY_SUMS = replace(
    _GROUPED, seqlen_k=140, head_dim=64, head_dim_v=40, alibi_slopes=(2, 4), bias=(2, 1, 1, 140), bias_dtype="input"
)
_FAR = replace(_TERMS, seqlen_q=33, seqlen_k=18, batch=2, num_heads_kv=2, bias=(2, 2, 33, 18), mask=(2, 2, 33, 18))
_FLOAT32 = replace(_TERMS, dtype="float32", softcap=20.0)
_SINKS = replace(_LENGTHS, kv_lengths=(2, 0, 77), sinks=True, dlse=True, score_spread=4.0)
_THREE_TERMS = replace(_GROUPED, dtype="float32", seqlen_k=300)
_DROPOUT = replace(_GROUPED, dropout=0.3, seed=1)
_PAGES = replace(_SMALL, seqlen_k=128, batch=2, num_heads_kv=2, causal=True, kv_lengths=(101, 40), page_size=16)
_DROPOUT_FLOAT32 = replace(_DROPOUT, dtype="float32")
_BLOCKS = replace(
    _GROUPED, seqlen_k=300, head_dim=16, block_mask=(2, 4), block_size=(32, 48), kv_lengths=(300, 70), blocks_kept=0.25
)
# Masks whose rows are vectors, and whose last block of keys is not whole; and one whose rows are not.
_BITS = replace(_GROUPED, seqlen_q=230, seqlen_k=176, mask=(1, 4, 230, 176), alibi_slopes=(4,))
_BITS_IN_A_WINDOW = replace(_GROUPED, seqlen_q=230, seqlen_k=201, mask=(2, 1, 230, 201), window=(60, 30))
_CUT_BLOCKS = replace(
    _GROUPED, seqlen_q=230, seqlen_k=400, block_mask=(4,), block_size=(32, 48), kv_lengths=(390, 90), blocks_kept=0.1
)
_ORDERED = replace(_GROUPED, seqlen_q=200, seqlen_k=640, block_mask=(), block_size=(128, 128), blocks_kept=0.5)
# Masks that a kernel looks at beforehand, because tiles are listed; of rows that are vectors, and of others.
_LOOKED_AT = replace(_GROUPED, seqlen_q=230, seqlen_k=176, mask=(2, 4, 230, 176), block_mask=(), blocks_kept=1.0)
_FLOAT64 = replace(
    _FLOAT32, dtype="float64", head_dim_v=40, num_heads=1, bias=(70, 77), mask=(70, 77), alibi_slopes=(1,)
)


def _many_queries(tile: BackwardSm90Tile, **changes: Any) -> Trial:
    return Trial(case=replace(_GROUPED, seqlen_q=300, **changes), tiles=(tile,), num_sms=1)


AnyTrial = (
    Trial
    | FunctionTrial
    | MaximaTrial
    | MergeTrial
    | ReductionTrial
    | RowReductionTrial
    | trials_large.LargeTrial
    | trials_large.PairTrial
    | trials_tangents.AnyTrial
)
_REDUCED = ct.Case(
    seqlen_q=70, seqlen_k=150, batch=1, num_heads=4, num_heads_kv=2, head_dim=64, dtype="bfloat16", causal=True,
    sinks=True, score_spread=6.0, row_reductions=("max", "entropy"), seed=2,
)  # fmt: skip
_BEHIND_SINK = BehindSink(
    seed=1, sizes=(40, 40), sink=5e4, score=rooted, softcap=None, has_bias=False, causal=False, deterministic=False,
    shown=1.0,
)  # fmt: skip
_FIRST = ct.Case(
    seqlen_q=150, seqlen_k=290, num_heads=2, num_heads_kv=1, head_dim=40, dtype="bfloat16",
    distinct_keys=150, row_reductions=("max",),
)  # fmt: skip

TRIALS: dict[str, AnyTrial] = {
    "forward": Trial(case=_GROUPED, tiles=_forward()),
    "forward window": Trial(case=_WINDOW, tiles=_forward(block_m=64)),
    "forward window spread": Trial(case=replace(_WINDOW, score_spread=30.0), tiles=_forward(block_m=64)),
    "forward spread": Trial(case=replace(_SMALL, score_spread=30.0), tiles=_forward()),
    "forward ring": Trial(case=_SMALL, tiles=_forward(num_stages=3, block_m=64)),
    "forward short ring": Trial(case=replace(_SMALL, seqlen_k=20), tiles=_forward(num_stages=3, block_m=64)),
    "forward narrow": Trial(case=_NARROW, tiles=_forward()),
    "forward lengths": Trial(case=_LENGTHS, tiles=_forward()),
    "forward flipped": Trial(case=_FLIPPED, tiles=_forward()),
    "forward wild lengths": Trial(
        case=replace(_LENGTHS, kv_lengths=(77, 0, 5)), tiles=_forward(), kv_lengths=(99, -9, 5)
    ),
    "forward terms": Trial(case=_TERMS, tiles=_forward()),
    "forward far": Trial(case=_FAR, tiles=_forward(), allocate=attention.far_apart),
    "forward masked": Trial(case=replace(_SMALL, seqlen_k=150, mask=(150,)), tiles=_forward()),
    # One resident block takes all tiles of queries.
    "sm90": Trial(case=replace(_GROUPED, seqlen_k=300), tiles=_sm90(), num_sms=1),
    "sm90 parts": Trial(case=replace(_GROUPED, head_dim_v=136), tiles=_sm90(q_stages=1), num_sms=1),
    "sm90 bias of rows": Trial(case=replace(_GROUPED, bias=(4, 150, 1)), tiles=_sm90(), num_sms=1),
    "sm90 without values": Trial(
        case=replace(_GROUPED, seqlen_k=300, causal=True, has_values=False), tiles=_sm90(), num_sms=1
    ),
    "sm90 spread": Trial(case=replace(_GROUPED, seqlen_k=300, score_spread=30.0), tiles=_sm90(), num_sms=1),
    "sm90 causal": Trial(case=replace(_GROUPED, seqlen_k=170, causal=True), tiles=_sm90(num_stages=3), num_sms=1),
    "sm90 window": Trial(case=replace(_WINDOW, head_dim=72, head_dim_v=24), tiles=_sm90(block_m=192), num_sms=1),
    "sm90 lengths": Trial(case=_LENGTHS, tiles=_sm90(ping_pong=False), num_sms=1),
    "sm90 wide lengths": Trial(case=replace(_LENGTHS, head_dim=24, head_dim_v=72), tiles=_sm90(block_n=80), num_sms=1),
    "sm90 slopes": Trial(
        case=replace(_GROUPED, seqlen_k=300, score_spread=30.0, alibi_slopes=(4,)), tiles=_sm90(), num_sms=1
    ),
    "sm90 slopes outward": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=300, alibi_slopes=(4,), kv_lengths=(300, 140)),
        tiles=_sm90(),
        num_sms=1,
    ),
    "sm90 softcap": Trial(
        case=replace(_GROUPED, seqlen_k=300, score_spread=8.0, softcap=5.0), tiles=_sm90(), num_sms=1
    ),
    "sm90 bias": Trial(case=_BIAS, tiles=_bias_tile(), num_sms=1),
    "sm90 wide bias": Trial(case=_WIDE_BIAS, tiles=_bias_tile(), num_sms=1),
    "sm90 keys": Trial(case=_NUMBERS, tiles=_sm90(block_m=192), num_sms=1),
    "backward sm90 bias": Trial(case=_BIAS, tiles=(_BACKWARD_SM90,), num_sms=1),
    "backward sm90 wide bias": Trial(case=_WIDE_BIAS, tiles=(_SPLIT_ROLES,), num_sms=1),
    "backward sm90 keys": Trial(case=_NUMBERS, tiles=(_BACKWARD_SM90,), num_sms=1),
    "sm90 small softcap": Trial(case=replace(_GROUPED, seqlen_k=300, softcap=8.0), tiles=_sm90(), num_sms=1),
    "sm90 near softcap": Trial(case=replace(_GROUPED, seqlen_k=300, softcap=30.0), tiles=_sm90(), num_sms=1),
    # Exponents of a later tile that exceed those of the first by more than sums may grow.
    "sm90 softcap spread": Trial(
        case=replace(_GROUPED, seqlen_k=300, score_spread=30.0, softcap=100.0), tiles=_sm90(), num_sms=1
    ),
    "sm90 no keys": Trial(
        case=replace(_SMALL, seqlen_q=150, seqlen_k=48, batch=3, num_heads=4, causal=True, kv_lengths=(48, 0, 48)),
        tiles=_sm90(),
        num_sms=3,
        schedule=emulator.Schedule("random", seed=1),
    ),
    # Three tiles of queries in pairs, and blocks with different numbers of them.
    "sm90 pairs": Trial(case=_TOP_LEFT, tiles=_sm90(), num_sms=3),
    "sm90 pairs apart": Trial(case=_TOP_LEFT, tiles=_sm90()),
    "sm90 whole windows": Trial(
        case=replace(_GROUPED, seqlen_q=900, seqlen_k=850, num_heads=2, num_heads_kv=1, window=(40, 300)),
        tiles=_sm90(),
        num_sms=3,
    ),
    "sm90 even pairs": Trial(case=replace(_SMALL, seqlen_q=400, causal="top_left"), tiles=_sm90(), num_sms=3),
    "float32 sm90": Trial(case=_THREE_TERMS, tiles=_float32_sm90(), num_sms=1),
    "float32 sm90 two parts": Trial(case=_THREE_TERMS, tiles=(replace(_float32_sm90()[0], bf16_terms=2),), num_sms=1),
    "float32 sm90 spread": Trial(case=replace(_THREE_TERMS, score_spread=30.0), tiles=_float32_sm90(), num_sms=1),
    "float32 sm90 window without values": Trial(
        case=replace(_WINDOW, dtype="float32", has_values=False), tiles=_float32_sm90(), num_sms=1
    ),
    "float32 sm90 window": Trial(case=replace(_WINDOW, dtype="float32"), tiles=_float32_sm90(), num_sms=1),
    "float32 sm90 wide window": Trial(case=replace(_WINDOW, dtype="float32"), tiles=_float32_sm90(block_m=192)),
    "float32 sm90 lengths": Trial(
        case=replace(_LENGTHS, dtype="float32"), tiles=_float32_sm90(ping_pong=False), num_sms=1
    ),
    "sm90 narrow": Trial(case=_NARROW, tiles=_sm90()),
    "sm90 narrow values": Trial(case=replace(_SMALL, head_dim=16, head_dim_v=147), tiles=_sm90(q_stages=1)),
    "sm90 narrow backward": Trial(case=replace(_NARROW, seqlen_k=200), tiles=(_BACKWARD_SM90,), num_sms=1),
    "float32 sm90 narrow": Trial(case=replace(_NARROW, dtype="float32"), tiles=_float32_sm90()),
    "float32 sm90 no keys": Trial(
        case=replace(_SMALL, dtype="float32", seqlen_q=300, seqlen_k=5, causal=True), tiles=_float32_sm90(), num_sms=1
    ),
    "float32 sm90 bias": Trial(case=_BIAS_FLOAT32, tiles=_float32_sm90(), num_sms=1),
    "float32 sm90 splits": Trial(case=replace(_BIAS_FLOAT32, head_dim=24), tiles=_float32_sm90(), num_sms=1),
    "float32 splits": Trial(case=_PLAIN_FLOAT32, tiles=_float32_sm90(), num_sms=1),
    "float32 sm90 bias window": Trial(case=replace(_BIAS_FLOAT32, window=(20, 30)), tiles=_float32_sm90(), num_sms=1),
    # Few queries: the keys of a head shared by blocks, or left to one.
    "decode": Trial(case=replace(_DECODE, causal=True), tiles=_DECODE_TILES),
    "decode whole": Trial(case=replace(_DECODE, causal=True), tiles=_DECODE_TILES, num_sms=1),
    "decode uneven": Trial(
        case=replace(_DECODE, causal=True),
        tiles=_DECODE_TILES,
        num_sms=7,
        schedule=emulator.Schedule("random", seed=1),
    ),
    # Blocks that share two of four heads, and have the others whole.
    "decode few": Trial(case=replace(_DECODE, causal=True), tiles=_DECODE_TILES, num_sms=3),
    # Memory that holds counts of other calls, and of none; blocks see at once, or late, what others have counted.
    "decode counts": Trial(
        case=replace(_DECODE, causal=True), tiles=_DECODE_TILES, num_sms=7, found_counts=(1, 2, 0x20003, 2**64 - 1)
    ),
    "decode eager counts": Trial(
        case=replace(_DECODE, causal=True),
        tiles=_DECODE_TILES,
        num_sms=7,
        schedule=emulator.Schedule("random", "eager", seed=2),
        found_counts=(1, 0x20003),
    ),
    "decode many": Trial(
        case=replace(_DECODE, batch=1, num_heads=1, num_heads_kv=1, seqlen_k=2600), tiles=_DECODE_TILES
    ),
    "decode afterwards": Trial(case=replace(_DECODE, causal=True), tiles=_DECODE_TILES, num_sms=3, combines=False),
    # 18 warps of the kernel that combines, in blocks of 4.
    "decode odd afterwards": Trial(
        case=replace(_DECODE, batch=1, num_heads=3, num_heads_kv=3, seqlen_q=3),
        tiles=_DECODE_TILES,
        num_sms=4,
        combines=False,
    ),
    "decode slopes": Trial(case=replace(_DECODE, causal=True, alibi_slopes=(2, 8)), tiles=_DECODE_TILES, num_sms=3),
    "decode bias": Trial(
        case=replace(_DECODE, bias=(2, 8, 5, 300), bias_dtype="input"), tiles=_DECODE_TILES, num_sms=3
    ),
    "decode softcap": Trial(
        case=replace(_DECODE, causal=True, softcap=2.0, score_spread=8.0), tiles=_DECODE_TILES, num_sms=3
    ),
    "decode narrow": Trial(case=replace(_DECODE, head_dim_v=24), tiles=_DECODE_TILES),
    "decode short lengths": Trial(case=replace(_DECODE, kv_lengths=(10, 100)), tiles=_DECODE_TILES),
    "decode lengths": Trial(case=replace(_DECODE, kv_lengths=(0, 230)), tiles=_DECODE_TILES, num_sms=3),
    # Sinks, some of them above the scores of their rows.
    "forward sinks": Trial(case=_SINKS, tiles=_forward()),
    "sm90 sinks": Trial(case=_SINKS, tiles=_sm90(), num_sms=1),
    "float32 sm90 sinks": Trial(case=replace(_SINKS, dtype="float32"), tiles=_float32_sm90(), num_sms=1),
    "decode sinks": Trial(case=replace(_DECODE, sinks=True), tiles=_DECODE_TILES),
    "decode whole sinks": Trial(case=replace(_DECODE, sinks=True), tiles=_DECODE_TILES, num_sms=1),
    # Keys in pages: smaller and larger than tiles, a table in a frame, and entries that are no pages.
    "forward pages": Trial(case=_PAGES, tiles=_forward(block_m=64)),
    "forward top left pages": Trial(case=replace(_PAGES, causal="top_left"), tiles=_forward(block_m=64)),
    "forward strided pages": Trial(
        case=replace(_PAGES, strides="transposed", alibi_slopes=(2,), kv_lengths=(100, 50)), tiles=_forward(block_m=64)
    ),
    "forward far pages": Trial(
        case=replace(_PAGES, head_dim=16, head_dim_v=16, seqlen_q=5), tiles=_forward(), allocate=attention.far_apart
    ),
    "forward wild pages": Trial(case=_PAGES, tiles=_forward(block_m=64), wild_pages=True),
    "forward short table": Trial(
        case=replace(_PAGES, batch=1, seqlen_k=64, kv_lengths=(60,)), tiles=_forward(block_m=64, block_n=48)
    ),
    "decode pages": Trial(case=replace(_PAGES, seqlen_q=5, page_size=32), tiles=_LONG_DECODE_TILES),
    "decode large pages": Trial(case=replace(_PAGES, seqlen_q=5, page_size=64), tiles=_DECODE_TILES),
    "decode short table": Trial(
        case=replace(_PAGES, seqlen_q=5, batch=1, seqlen_k=64, kv_lengths=(60,)),
        tiles=(replace(_DECODE_TILES[0], block_n=48),),
    ),
    "backward sinks": Trial(case=replace(_SINKS, strides="flipped"), tiles=_backward()),
    "backward sm90 sinks": Trial(case=_SINKS, tiles=(_BACKWARD_SM90,)),
    # Two stages and one; sums over every axis; blocks that share a sum, and tiles that nobody sees.
    "dbias": Trial(case=replace(_TERMS_OF_SCORES, bias=(4, 70, 77)), tiles=_SCORES, need=("dbias",), num_sms=1),
    "dbias shared": Trial(
        case=replace(_TERMS_OF_SCORES, bias=(2, 1, 1, 77), bias_dtype="input", kv_lengths=(77, 20), causal=True),
        tiles=_SCORES,
        need=("dbias",),
        num_sms=17,
    ),
    "dbias of queries": Trial(
        case=replace(_TERMS_OF_SCORES, bias=(2, 4, 70, 1), dropout=0.3, window=(20, 5)),
        tiles=(replace(_SCORES[0], num_stages=1),),
        need=("dbias",),
        num_sms=1,
    ),
    "dbias blocks": Trial(
        case=replace(_TERMS_OF_SCORES, bias=(4, 70, 1), block_mask=(2, 4), block_size=(16, 32), blocks_kept=0.6),
        tiles=_SCORES,
        need=("dbias",),
        num_sms=1,
    ),
    "dbias masked": Trial(
        case=replace(_TERMS_OF_SCORES, bias=(4, 70, 1), block_mask=(), blocks_kept=1.0, mask=(70, 77)),
        tiles=_SCORES,
        need=("dbias",),
    ),
    "dbias in pairs of rows": Trial(
        case=replace(_TERMS_OF_SCORES, bias=(70, 77)), tiles=(_BACKWARD_SM90, *_SCORES), need=("dk", "dbias"), num_sms=1
    ),
    "sums": Trial(case=replace(_TERMS_OF_SCORES, alibi_slopes=(2, 4)), tiles=_SCORES, need=_SUMS),
    "sums of heads": Trial(
        case=replace(_TERMS_OF_SCORES, softcap=20.0, causal=True), tiles=_SCORES, need=_SUMS, num_sms=1
    ),
    "packed sums": Trial(case=replace(_PACKED, softcap=5.0), tiles=_SCORES, need=_SUMS),
    # The same by tiles of keys: heads of a group one after another, the last tile shared by blocks, and hidden tiles.
    "key sums": Trial(
        case=replace(_KEY_SUMS, softcap=2.0, score_spread=3.0),
        tiles=(_BACKWARD_SM90,),
        num_sms=1,
        need=("dk", "dbias", *_SUMS),
    ),
    "key sums shared": Trial(
        case=replace(_KEY_SUMS, seqlen_k=350, bias=(1, 4, 1, 350)),
        tiles=(_DK_FROM_SHARED,),
        num_sms=11,
        splits=True,
        need=("dv", "dbias", "dalibi_slopes", "dscale"),
    ),
    "key sums blocks": Trial(
        case=replace(_KEY_SUMS, bias=(140,), block_mask=(2, 4), block_size=(64, 128), blocks_kept=0.4),
        tiles=(_BACKWARD_SM90,),
        num_sms=1,
        need=("dk", "dbias", "dalibi_slopes"),
    ),
    "key sums roles": Trial(
        case=_KEY_SUMS, tiles=(_SPLIT_ROLES,), num_sms=1, need=("dk", "dbias", "dalibi_slopes", "dscale")
    ),
    "key sums none": Trial(
        case=replace(_KEY_SUMS, kv_lengths=(140, 60)),
        tiles=(_BACKWARD_SM90,),
        num_sms=1,
        need=("dk", "dbias", "dalibi_slopes", "dscale"),
    ),
    "packed key sums": Trial(
        case=replace(_PACKED, softcap=5.0), tiles=(_BACKWARD_SM90,), num_sms=1, need=("dk", *_SUMS)
    ),
    "small softcap key sums": Trial(
        case=replace(_KEY_SUMS, softcap=4.0), tiles=(_BACKWARD_SM90,), num_sms=1, need=("dk", "dsoftcap")
    ),
    "only dk": Trial(case=_SMALL, tiles=_backward(), need=("dk",)),
    "only dv": Trial(case=_SMALL, tiles=_backward(), need=("dv",)),
    "sm90 only dv": Trial(case=replace(_GROUPED, seqlen_q=300), tiles=(_BACKWARD_SM90,), num_sms=1, need=("dv",)),
    "parts only dk": Trial(case=replace(_THREE_TERMS, seqlen_k=70), tiles=_BACKWARD_SPLIT, need=("dk",)),
    "backward": Trial(case=replace(_GROUPED, num_heads=2), tiles=_backward()),
    "backward sums of keys": Trial(case=_GROUPED, tiles=_backward(), wide=("dk",)),
    "backward window": Trial(case=_WINDOW, tiles=_backward()),
    "backward shared": Trial(case=_GROUPED, tiles=_backward(num_warps=8, warps_d=2, block_m=64), num_sms=1),
    "backward one stage": Trial(case=_SMALL, tiles=_backward(num_stages=1), num_sms=1),
    "backward narrow": Trial(case=_NARROW, tiles=_backward()),
    "backward narrow two values": Trial(case=replace(_NARROW, head_dim_v=43), tiles=_backward()),  # of a lane
    "backward lengths": Trial(case=_LENGTHS, tiles=_backward()),
    "backward terms": Trial(case=_TERMS, tiles=_backward()),
    "backward far": Trial(case=_FAR, tiles=_backward(), allocate=attention.far_apart),
    "backward split": Trial(case=_SMALL, tiles=_backward()),
    "backward sm90": _many_queries(_BACKWARD_SM90),
    "backward sm90 without values": _many_queries(_BACKWARD_SM90, has_values=False, dlse=True),
    "forward narrow heads": Trial(case=_POINTS, tiles=(replace(FORWARD_NARROW_TILES[0], block_n=128),), arch="8.0"),
    "sm90 chunked": Trial(case=_LONG_SM90, tiles=(_ROWS_OF_CHUNKS,), num_sms=1),
    "sm90 chunked cluster": Trial(case=_LONG_SM90, tiles=(_CLUSTER,), num_sms=1),
    "sm90 chunked splits": Trial(case=_LONG_SM90, tiles=(_CLUSTER,)),
    "sm90 chunked bias": Trial(case=_LONG_BIAS, tiles=(_ROWS_OF_CHUNKS,), num_sms=1),
    "backward sm90 chunked": Trial(case=_LONG_SM90, tiles=(_PRODUCTS,), need=("dq", "dk")),
    "forward chunked": Trial(case=_LONG, tiles=FORWARD_CHUNKED_TILES[:1], arch="8.0"),
    "backward chunked": Trial(case=_LONG, tiles=_CHUNKED_GRADIENTS, arch="8.0"),
    "scores chunked": Trial(case=_LONG, tiles=SCORES_CHUNKED_TILES[:1], arch="8.0", need=("dscale",)),
    # Keys of some lanes of a warp do not exist.
    "backward sm90 softcap": _many_queries(_DK_FROM_SHARED, seqlen_k=68, score_spread=4.0, softcap=3.0),
    "backward sm90 near softcap": _many_queries(_BACKWARD_SM90, softcap=30.0),
    "backward sm90 roles softcap": _many_queries(_SPLIT_ROLES, score_spread=4.0, softcap=3.0),
    "backward sm90 softcap slopes": _many_queries(_DK_FROM_SHARED, score_spread=4.0, softcap=3.0, alibi_slopes=(4,)),
    "backward sm90 slopes": _many_queries(_BACKWARD_SM90, alibi_slopes=(4,)),
    "backward sm90 wide": Trial(
        case=replace(_GROUPED, seqlen_q=100, head_dim=184, head_dim_v=136),
        tiles=(replace(_SPLIT_ROLES, max_dim=256),),
        num_sms=1,
    ),
    "backward sm90 lengths": Trial(case=replace(_LENGTHS, seqlen_q=100), tiles=(_BACKWARD_SM90,), num_sms=1),
    "backward sm90 roles": _many_queries(_SPLIT_ROLES),
    "backward sm90 shared": _many_queries(_DK_FROM_SHARED),
    "backward sm90 in order": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=290, causal=True), tiles=(_BACKWARD_SM90,), dq_in_order=True
    ),
    "backward sm90 in order shared": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=290), tiles=(_DK_FROM_SHARED,), dq_in_order=True
    ),
    "backward sm90 in order back": Trial(
        case=replace(_GROUPED, seqlen_k=140, causal=True, num_heads=8, num_heads_kv=8),
        tiles=(_SPLIT_ROLES,),
        dq_in_order=True,
    ),
    "backward sm90 in order window": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=400, window=(70, 40)),
        tiles=(_BACKWARD_SM90,),
        dq_in_order=True,
    ),
    "backward sm90 clears": Trial(
        case=replace(_GROUPED, seqlen_k=200, num_heads=16, num_heads_kv=8), tiles=(_BACKWARD_SM90,), num_sms=1
    ),
    "backward sm90 clears back": Trial(
        case=replace(_GROUPED, seqlen_q=70, seqlen_k=140, batch=3, causal=True, num_heads=8, num_heads_kv=8),
        tiles=(_SPLIT_ROLES,),
        dq_in_order=True,
        num_sms=1,
    ),
    "backward sm90 clears shared": Trial(
        case=replace(_GROUPED, batch=1, num_heads=40, num_heads_kv=40),
        tiles=(_BACKWARD_SM90,),
        num_sms=16,
        splits=True,
    ),
    "packed backward sm90 clears": Trial(
        case=replace(_PACKED, causal=False, num_heads=10, num_heads_kv=5, alibi_slopes=None),
        tiles=(_BACKWARD_SM90,),
        dq_in_order=True,
        num_sms=1,
    ),
    # Tiles of keys in the order of their steps: the last of many heads, and one head with most of the steps.
    "backward sm90 order": Trial(
        case=replace(_ORDERED, num_heads=16, num_heads_kv=8), tiles=(_BACKWARD_SM90,), num_sms=1
    ),
    "backward sm90 order last": Trial(
        case=replace(_ORDERED, num_heads=16, num_heads_kv=8, block_mask=(16,), blocks_kept=0.8),
        tiles=(_BACKWARD_SM90,),
        num_sms=10,
    ),
    "backward sm90 order far": Trial(
        case=replace(_ORDERED, num_heads=16, num_heads_kv=8, block_mask=(16,), blocks_kept=0.03),
        tiles=(_BACKWARD_SM90,),
        num_sms=2,
    ),
    "backward sm90 tail": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=380), tiles=(_BACKWARD_SM90,), num_sms=5, splits=True
    ),
    # The block mask leaves so little of the last tile of keys that one block takes it alone.
    "backward sm90 tail alone": Trial(
        case=ct.Case(
            seqlen_q=1000, seqlen_k=100, batch=5, head_dim=64, dtype="float16", block_mask=(), block_size=(128, 128)
        ),
        tiles=(_BACKWARD_SM90,),
        num_sms=2,
        splits=True,
    ),
    "backward sm90 tail back": Trial(
        case=replace(_GROUPED, seqlen_q=140, seqlen_k=140, causal=True, num_heads=8, num_heads_kv=8),
        tiles=(_SPLIT_ROLES,),
        dq_in_order=True,
        splits=True,
    ),
    "backward sm90 tail blocks": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=257, block_mask=(4,), block_size=(64, 128)),
        tiles=(_BACKWARD_SM90,),
        splits=True,
    ),
    "packed": Trial(case=_PACKED, tiles=_forward(block_m=64)),
    "packed top left": Trial(case=replace(_PACKED, causal="top_left"), tiles=_forward(block_m=64)),
    "packed sm90": Trial(case=_PACKED, tiles=_sm90(), num_sms=1),
    "packed sm90 full": Trial(case=replace(_PACKED, causal=False), tiles=_sm90(), num_sms=3),
    "claims sm90": Trial(case=_CLAIMS, tiles=(replace(_sm90()[0], max_dim=64),), num_sms=2),
    # Tiles without keys, and tiles of fewer steps than are left when the producer gives a tile back.
    "claims sm90 early": Trial(
        case=replace(_CLAIMS, head_dim=72, seqlen_k=CLAIMED_KEYS, batch=2, kv_lengths=(90, 0)), tiles=_sm90(), num_sms=2
    ),
    "packed backward": Trial(case=_PACKED, tiles=_backward(), num_sms=1),
    "packed backward split": Trial(case=_PACKED, tiles=_backward()),
    "packed deterministic": Trial(case=_PACKED, tiles=(*_backward(), _DQ)),
    "packed backward sm90": Trial(case=_PACKED, tiles=(_BACKWARD_SM90,), num_sms=1),
    "packed backward sm90 roles": Trial(case=_PACKED, tiles=(_SPLIT_ROLES,), num_sms=1),
    "packed backward sm90 in order": Trial(case=_PACKED, tiles=(_BACKWARD_SM90,), dq_in_order=True),
    "packed backward sm90 in order window": Trial(
        case=replace(_PACKED, causal=False, window=(40, 10)), tiles=(_BACKWARD_SM90,), dq_in_order=True, num_sms=1
    ),
    "packed many": Trial(case=_PACKED_MANY, tiles=_forward(block_m=64)),
    "packed many sm90": Trial(case=replace(_PACKED_MANY, num_heads=18, num_heads_kv=1), tiles=_sm90(), num_sms=5),
    "packed negative": Trial(case=_PACKED, tiles=_forward(block_m=64), cu_seqlens=(0, -(2**30), 100, -(2**29), 200)),
    "packed wild": Trial(
        case=replace(_PACKED, causal=False),
        tiles=(_BACKWARD_SM90,),
        dq_in_order=True,
        cu_seqlens=(0, 300, 0, 10, 2**30),
    ),
    "backward parts": Trial(case=replace(_THREE_TERMS, seqlen_q=200, seqlen_k=100), tiles=_BACKWARD_SPLIT, num_sms=1),
    "backward two parts": Trial(
        case=replace(_THREE_TERMS, seqlen_q=200, seqlen_k=100),
        tiles=(replace(_BACKWARD_SPLIT[0], bf16_terms=2),),
        num_sms=1,
    ),
    "backward parts ring": Trial(
        case=replace(_THREE_TERMS, seqlen_q=300, seqlen_k=100, head_dim=40), tiles=_BACKWARD_SPLIT_RING, num_sms=1
    ),
    "backward parts split": Trial(case=replace(_THREE_TERMS, seqlen_k=70, head_dim_v=104), tiles=_BACKWARD_SPLIT),
    "backward parts narrow": Trial(
        case=replace(_NARROW, dtype="float32", seqlen_k=76, num_heads_kv=2), tiles=_BACKWARD_SPLIT_RING
    ),
    "backward parts lengths": Trial(case=replace(_LENGTHS, dtype="float32"), tiles=_BACKWARD_SPLIT),
    "backward parts window": Trial(
        case=replace(_WINDOW, dtype="float32", seqlen_k=250), tiles=_BACKWARD_SPLIT_RING, num_sms=1
    ),
    "backward parts bias": Trial(
        case=replace(_BIAS_FLOAT32, head_dim=40, head_dim_v=24, softcap=5.0), tiles=_BACKWARD_SPLIT_RING, num_sms=1
    ),
    "backward parts dbias": Trial(
        case=replace(_BIAS_FLOAT32, head_dim=40, head_dim_v=24), tiles=_BACKWARD_SPLIT_RING, need=_WITH_DBIAS, num_sms=1
    ),
    "backward parts dbias of all": Trial(
        case=replace(_BIAS_FLOAT32, head_dim=24, bias=(2, 4, 230, 132), mask=None, kv_lengths=(132, 60)),
        tiles=_BACKWARD_SPLIT_RING,
        need=_WITH_DBIAS,
        num_sms=1,
    ),
    "backward parts terms": Trial(case=_FLOAT32, tiles=_BACKWARD_SPLIT_RING),
    "forward float32": Trial(case=_FLOAT32, tiles=_forward(block_m=64, element_bytes=4)),
    "forward wide": Trial(case=replace(_SMALL, head_dim=300), tiles=_forward(block_m=32, num_warps=2)),
    "lanes": Trial(case=replace(_GROUPED, dtype="bfloat16"), tiles=_forward(), arch="7.5"),
    "lanes float32": Trial(case=_FLOAT32, tiles=_forward(block_m=64, element_bytes=4), arch="7.5"),
    "forward float64": Trial(case=_FLOAT64, tiles=_forward(block_m=32, warps_d=2, element_bytes=8)),
    "backward float32": Trial(case=_FLOAT32, tiles=_backward(element_bytes=4)),
    "backward float64": Trial(
        case=_FLOAT64,
        tiles=_backward(num_stages=1, warps_d=4, dq_warps_m=1, block_m=16, block_n=16, element_bytes=8),
    ),
    "deterministic": Trial(case=_SMALL, tiles=(_backward()[0], _DQ)),
    "deterministic window": Trial(case=_WINDOW, tiles=(_backward()[0], _DQ)),
    "dropout": Trial(case=_DROPOUT, tiles=_forward(block_m=64)),
    "dropout part": Trial(case=_DROPOUT, tiles=_forward(block_m=64), origin=Origin(32, 48, 3, 7)),
    "dropout many rows": Trial(case=_DROPOUT, tiles=_forward()),
    "dropout sm90": Trial(case=_DROPOUT, tiles=_sm90(), num_sms=1),
    "dropout float32 sm90": Trial(case=_DROPOUT_FLOAT32, tiles=_float32_sm90(), num_sms=1),
    "dropout backward": Trial(case=_DROPOUT, tiles=_backward(), num_sms=1),
    "dropout backward split": Trial(case=_DROPOUT, tiles=_backward()),
    "dropout deterministic": Trial(case=_DROPOUT, tiles=(_backward()[0], _DQ)),
    "dropout backward sm90": Trial(case=_DROPOUT, tiles=(_BACKWARD_SM90,), num_sms=1),
    "dropout backward sm90 roles": Trial(case=_DROPOUT, tiles=(_SPLIT_ROLES,), num_sms=1),
    "dropout backward parts": Trial(case=_DROPOUT_FLOAT32, tiles=_BACKWARD_SPLIT, num_sms=1),
    "forward blocks": Trial(case=_BLOCKS, tiles=_forward(block_m=64)),
    "forward many blocks": Trial(
        case=replace(_SMALL, block_mask=(), seqlen_k=2100, blocks_kept=0.9), tiles=_forward(block_m=64, block_n=16)
    ),
    "sm90 blocks": Trial(case=replace(_BLOCKS, kv_lengths=(300, 100)), tiles=_sm90(), num_sms=1),
    "sm90 causal blocks": Trial(case=replace(_BLOCKS, causal=True), tiles=_sm90(block_n=32), num_sms=1),
    "backward blocks": Trial(case=_BLOCKS, tiles=_backward(), num_sms=1),
    "backward sm90 blocks": Trial(case=_BLOCKS, tiles=(_BACKWARD_SM90,), num_sms=1),
    "sm90 bits": Trial(case=_BITS, tiles=_sm90(), num_sms=1),
    "sm90 bits of pairs in a window": Trial(case=_BITS_IN_A_WINDOW, tiles=_sm90(), num_sms=1),
    "backward sm90 bits": Trial(case=_BITS, tiles=(_BACKWARD_SM90,), num_sms=1),
    "backward sm90 bits in order": Trial(case=_BITS, tiles=(_BACKWARD_SM90,), num_sms=1, dq_in_order=True),
    "sm90 cut blocks": Trial(case=_CUT_BLOCKS, tiles=_sm90(), num_sms=1),
    "looked at": Trial(case=_LOOKED_AT, tiles=_forward(block_m=64)),
    "looked at by bytes": Trial(
        case=replace(_LOOKED_AT, seqlen_k=171, mask=(4, 230, 171), num_heads_kv=1), tiles=_backward(), num_sms=1
    ),
    **trials_decode.TRIALS,
    **trials_bias.TRIALS,
    **trials_large.TRIALS,
    **trials_float8.TRIALS,
    **trials_wide.TRIALS,
    **trials_tangents.TRIALS,
    "row reductions": RowReductionTrial(case=_REDUCED, arch="8.0"),
    "row reductions deterministic": RowReductionTrial(
        case=replace(_REDUCED, bias=(4, 70, 150)), arch="8.0", deterministic=True
    ),
    "row reductions float32": RowReductionTrial(case=replace(_REDUCED, dtype="float32"), arch="8.0"),
    "row reductions sm90": RowReductionTrial(case=replace(_REDUCED, row_reductions=("entropy",), score_spread=1.0)),
    "row reductions sm90 dropout": RowReductionTrial(
        case=replace(_REDUCED, row_reductions=("entropy",), score_spread=1.0, dropout=0.2)
    ),
    "row reductions sm90 keys": RowReductionTrial(
        case=replace(_REDUCED, row_reductions=("entropy",), score_spread=1.0, mask=(150,), causal=False)
    ),
    "row reductions sm90 spread": RowReductionTrial(
        case=replace(_REDUCED, dtype="float16", seqlen_q=200, seqlen_k=900, causal=False, sinks=False, score_spread=6.0)
    ),
    "maxima behind sinks": MaximaTrial(case=_BEHIND_SINK),
    "maxima behind sinks deterministic": MaximaTrial(case=replace(_BEHIND_SINK, deterministic=True)),
    "first maxima": RowReductionTrial(case=_FIRST),
    "first maxima few": RowReductionTrial(case=replace(_FIRST, seqlen_q=5, score_mean=-30.0)),
    "first maxima ties": RowReductionTrial(case=replace(_FIRST, distinct_keys=37)),
    "first maxima boxes": RowReductionTrial(case=replace(_FIRST, seqlen_q=70, head_dim=136)),
    "first maxima blocks": RowReductionTrial(case=replace(_FIRST, block_mask=(2,), block_size=(32, 64))),
    "first maxima long": RowReductionTrial(case=replace(_FIRST, seqlen_k=700, distinct_keys=0, window=(400, 50))),
    **trials_reductions.TRIALS,
    "merge": MergeTrial(columns=68),
    "merge odd columns": MergeTrial(columns=5),
    "functions": FunctionTrial(score="distance", mask="near"),
    "hiding bias": Trial(case=_HIDING, tiles=_forward(block_m=64, block_n=64), hides=True),
    "hiding bias backward": Trial(case=_HIDING, tiles=(_BACKWARD_SM90,), need=("dq", "dk", "dv"), hides=True),
    "functions of pairs": FunctionTrial(score="with_pairs", mask="documents"),
    "functions float64": FunctionTrial(score="gathered", dtype="float64"),
    "functions in 16 bits": FunctionTrial(score="with_pairs", mask="prefix", dtype="float16"),
    "functions sm90": FunctionTrial(score="with_pairs", mask="near", dtype="float16", arch="9.0"),
    "functions sm90 without room": FunctionTrial(score="barrier", dtype="float16", arch="9.0", score_args=False),
    "functions sm90 arrays": FunctionTrial(score="distance", dtype="float16", arch="9.0", num_sms=1),
    "functions tables": FunctionTrial(score="of_rows"),
    "functions sm90 tables": FunctionTrial(score="t5", dtype="float16", arch="9.0"),
    "functions sm90 tables of entries": FunctionTrial(score="fade", dtype="float16", arch="9.0"),
    "cuda": FunctionTrial(score="of_functions"),
    "cuda of loops": FunctionTrial(score="counted"),
    "cuda of polynomials": FunctionTrial(score="polynomial", dtype="float64"),
    "cuda of tables": FunctionTrial(score="interpolated"),
    "cuda sm90": FunctionTrial(score="branching", dtype="float16", arch="9.0"),
    "functions sm90 floors": FunctionTrial(score="box", dtype="float16", arch="9.0"),
    "functions sm90 arrays of s": FunctionTrial(score="barrier", mask="prefix", dtype="float16", arch="9.0"),
}
