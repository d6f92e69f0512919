"""Mistakes planted in the project's kernels, one at a time, and whether the emulator or the oracle notices.

    python tests/emulate/mutants.py [words]

runs those whose description holds the words, or all, and prints the score. A mutant replaces one place of one file: the
text has to occur there exactly once, so that the table follows the kernels.
"""

import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import attention
import emulator
import numpy as np

import cuflash.testing as ct
from cuflash import reference
from cuflash.plan import DeviceSpec
from cuflash.problem import DEFAULT_NEED, make_problem
from cuflash.tiles import (
    BackwardFloat32Sm90Tile,
    BackwardSm90Tile,
    BackwardTile,
    DecodeSm90Tile,
    DqTile,
    ForwardFloat32Sm90Tile,
    ForwardSm90Tile,
    ForwardTile,
    ScoresTile,
    Tile,
)

COPIES = emulator.CACHE / "mutants"


# ---- Trials: problems that mutants are run on ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One pass of one case with one plan."""

    case: ct.Case
    tiles: tuple[Tile | None, ...]
    place: attention.Place = attention.guarded
    num_sms: int = 132
    schedule: emulator.Schedule = emulator.SCHEDULES[0]
    in_turn: bool = False  # deterministic, without a kernel of its own for dq
    kv_lengths: tuple[int, ...] | None = None  # instead of those of the case, which they are clamped to
    wild_pages: bool = False  # the first entries of the table are outside of the pool; where they lead is what counts
    need: tuple[str, ...] | None = None  # gradients; by default dq, dk, dv, and dsinks where there are sinks
    cu_seqlens: tuple[int, ...] | None = None  # of queries and keys: nothing is expected of results
    shares: bool = False  # queries of tiles, however few, and not heads of a group

    def run(self, kernels: Path = emulator.KERNELS) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        if self.shares:
            names = ("SHARE_STEPS", "SUM_STEPS", "SUM_STEPS_OF_PART", "WAVES", "CAUSAL_WAVES")
            with mock.patch.multiple("cuflash.plan", **dict.fromkeys(names, 0)):
                self._run(kernels)
        else:
            self._run(kernels)

    def _run(self, kernels: Path) -> None:
        case, arrays = self.case, self.case.arrays()
        deterministic = self.in_turn or isinstance(self.tiles[-1], DqTile)
        two_pieces = getattr(self.tiles[0], "pieces", 3) == 2
        options = replace(case.options, deterministic=deterministic, precision="tf32" if two_pieces else "highest")
        problem = make_problem(options, *(arrays[name] for name in "qkv"), **ct.optional(arrays))
        out, lse = reference.forward(problem, *(arrays[name] for name in "qkv"), **ct.optional(arrays), **case.random)
        if self.kv_lengths:
            arrays["kv_lengths"][...] = self.kv_lengths
        if self.wild_pages:
            _make_wild(arrays)
        if self.cu_seqlens:
            arrays["cu_seqlens_q"][...] = arrays["cu_seqlens_k"][...] = self.cu_seqlens
        launches: list[emulator.Statistics] = []
        how = {
            "arch": replace(DeviceSpec.for_arch("9.0"), num_sms=self.num_sms),
            "tiles": self.tiles,
            "place": self.place,
            "kernels": kernels,
            "schedule": self.schedule,
            "statistics": launches,
            **case.random,
        }
        if isinstance(self.tiles[0], ForwardTile | ForwardSm90Tile | ForwardFloat32Sm90Tile | DecodeSm90Tile):
            names, results = ("out", "lse"), attention.forward(problem, arrays, **how)
        else:
            out, lse = out.astype(arrays["q"].dtype), lse.astype(problem.softmax_dtype)
            names = self.need or (*DEFAULT_NEED, *(("dsinks",) if case.sinks else ()))
            results = attention.backward(problem, arrays, out, lse, need=names, **how)
        if self.cu_seqlens:
            return
        found = dict(zip(names, results, strict=True))
        if two_pieces:
            attention.assert_two_pieces(problem, arrays, found)
        elif "out" in found:
            ct.assert_forward(case, **found)
        else:
            ct.assert_backward(case, **found)
        conflicts = sum(launch.matrix_load_conflicts for launch in launches)
        if conflicts:
            raise AssertionError(f"{conflicts} bank conflicts")


def _make_wild(arrays: dict[str, Any]) -> None:
    """Make the first two pages of the table the first and the last one of the pool, and name them by other numbers."""
    table, last = arrays["block_table"], len(arrays["k"]) - 1
    for place, page, name in ((0, 0, -7), (1, last, last + 1)):
        old = table[0, place]
        for pool in (arrays["k"], arrays["v"]):
            pool[[old, page]] = pool[[page, old]]
        table[...] = np.where(table == old, page, np.where(table == page, old, table))
        table[0, place] = name


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
        keep_before=True,
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
) -> tuple[BackwardTile, None]:
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
    return tile, None


_BACKWARD_SM90 = BackwardSm90Tile(
    max_dim=128,
    block_m=64,
    block_n=128,
    num_stages=2,
    dp_early=True,
    splits_roles=False,
    holds_k=True,
    dk_from_shared=False,
    origin="of a trial",
)
_DK_FROM_SHARED = replace(_BACKWARD_SM90, holds_k=False, dk_from_shared=True)
_SPLIT_ROLES = replace(_BACKWARD_SM90, block_n=64, splits_roles=True, holds_k=False)
_BACKWARD_PIECES = (
    BackwardFloat32Sm90Tile(max_dim=128, num_stages=1, num_rooms=1, dq_columns=64, dq_late=True, origin="of a trial"),
    None,
)
_BACKWARD_PIECES_RING = (
    BackwardFloat32Sm90Tile(max_dim=64, num_stages=2, num_rooms=2, dq_columns=64, dq_late=False, origin="of a trial"),
    None,
)
_DECODE_TILES = (DecodeSm90Tile(max_dim=128, block_n=32, num_stages=2, min_blocks=1, origin="of a trial"),)
_LONG_DECODE_TILES = (replace(_DECODE_TILES[0], block_n=64),)
_DQ = DqTile(max_dim=128, block_m=64, block_n=32, num_warps=4, min_blocks=1, origin="of a trial")
_SCORES = (
    ScoresTile(max_dim=128, block_m=64, block_n=32, num_warps=4, num_stages=2, min_blocks=1, origin="of a trial"),
)
_SUMS = ("dalibi_slopes", "dscale", "dsoftcap")
_GROUPED = ct.Case(
    seqlen_q=150, seqlen_k=77, batch=2, num_heads=4, num_heads_kv=2, head_dim=72, head_dim_v=24, dtype="float16"
)
_SMALL = replace(_GROUPED, seqlen_q=70, batch=1, num_heads_kv=1, num_heads=2)
_DECODE = ct.Case(
    seqlen_q=5, seqlen_k=300, batch=2, num_heads=8, num_heads_kv=2, head_dim=72, head_dim_v=40, dtype="float16"
)
# Bounds that cross one corner of a tile: the ends of the ranges of tiles matter.
_WINDOW = replace(_SMALL, seqlen_q=150, seqlen_k=183, causal=True, window=(34, None), head_dim=16, head_dim_v=16)
# The second sequence is empty on one side, the first and the last end within tiles, and rows are left.
_PACKED = ct.Case(
    seqlen_q=320, seqlen_k=340, num_heads=4, num_heads_kv=2, head_dim=72, head_dim_v=24, dtype="float16", causal=True,
    alibi_slopes=(4, 4), sinks=True, dlse=True, cu_seqlens_q=(0, 75, 75, 205, 300), cu_seqlens_k=(0, 90, 100, 250, 330),
)  # fmt: skip
_PACKED_MANY = ct.Case(
    seqlen_q=110, seqlen_k=110, num_heads=1, head_dim=64, dtype="float16",
    cu_seqlens_q=(0, *(3 * i + i % 2 for i in range(34))), cu_seqlens_k=(0, *(3 * i + i % 2 for i in range(34))),
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
_FAR = replace(_TERMS, seqlen_q=33, seqlen_k=18, batch=2, num_heads_kv=2, bias=(2, 2, 33, 18), mask=(2, 2, 33, 18))
_FLOAT32 = replace(_TERMS, dtype="float32", softcap=20.0)
_SINKS = replace(_LENGTHS, kv_lengths=(2, 0, 77), sinks=True, dlse=True, score_spread=4.0)
_PIECES = replace(_GROUPED, dtype="float32", seqlen_k=300)
_DROPOUT = replace(_GROUPED, dropout=0.3, seed=1)
_PAGES = replace(_SMALL, seqlen_k=128, batch=2, num_heads_kv=2, causal=True, kv_lengths=(101, 40), page_size=16)
_DROPOUT_FLOAT32 = replace(_DROPOUT, dtype="float32")
_BLOCKS = replace(
    _GROUPED, seqlen_k=300, head_dim=16, block_mask=(2, 4), block_size=(32, 48), kv_lengths=(300, 70), blocks_kept=0.25
)
_FLOAT64 = replace(
    _FLOAT32, dtype="float64", head_dim_v=40, num_heads=1, bias=(70, 77), mask=(70, 77), alibi_slopes=(1,)
)

TRIALS = {
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
    "forward far": Trial(case=_FAR, tiles=_forward(), place=attention.far_apart),
    "forward masked": Trial(case=replace(_SMALL, seqlen_k=150, mask=(150,)), tiles=_forward()),
    # One resident block takes all tiles of queries.
    "sm90": Trial(case=replace(_GROUPED, seqlen_k=300), tiles=_sm90(), num_sms=1),
    "sm90 parts": Trial(case=replace(_GROUPED, head_dim_v=136), tiles=_sm90(q_stages=1), num_sms=1),
    "sm90 spread": Trial(case=replace(_GROUPED, seqlen_k=300, score_spread=30.0), tiles=_sm90(), num_sms=1),
    "sm90 causal": Trial(case=replace(_GROUPED, seqlen_k=170, causal=True), tiles=_sm90(num_stages=3), num_sms=1),
    "sm90 whole tiles": Trial(case=replace(_SMALL, seqlen_k=128), tiles=_sm90(), num_sms=1),
    "sm90 window": Trial(case=replace(_WINDOW, head_dim=72, head_dim_v=24), tiles=_sm90(block_m=192), num_sms=1),
    "sm90 lengths": Trial(case=_LENGTHS, tiles=_sm90(ping_pong=False), num_sms=1),
    "sm90 wide lengths": Trial(case=replace(_LENGTHS, head_dim=24, head_dim_v=72), tiles=_sm90(block_n=80), num_sms=1),
    "sm90 slopes": Trial(
        case=replace(_GROUPED, seqlen_k=300, score_spread=30.0, alibi_slopes=(4,)), tiles=_sm90(), num_sms=1
    ),
    # Rows whose first key is the last of a tile: in the tile behind it, half of the rows of some lanes saw nothing.
    "sm90 diagonal": Trial(case=replace(_SMALL, seqlen_q=150, seqlen_k=213, causal=True), tiles=_sm90(), num_sms=1),
    "sm90 no keys": Trial(
        case=replace(_SMALL, seqlen_q=150, seqlen_k=48, batch=3, num_heads=4, causal=True, kv_lengths=(48, 0, 48)),
        tiles=_sm90(),
        num_sms=3,
        schedule=emulator.Schedule("random", seed=1),
    ),
    # Three tiles of queries in pairs, and blocks with different numbers of them.
    "sm90 pairs": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=100, num_heads=2, num_heads_kv=1, causal="top_left"),
        tiles=_sm90(),
        num_sms=3,
    ),
    "sm90 even pairs": Trial(case=replace(_SMALL, seqlen_q=400, causal="top_left"), tiles=_sm90(), num_sms=3),
    "float32 sm90": Trial(case=_PIECES, tiles=_float32_sm90(), num_sms=1),
    "float32 sm90 two pieces": Trial(case=_PIECES, tiles=(replace(_float32_sm90()[0], pieces=2),), num_sms=1),
    "float32 sm90 spread": Trial(case=replace(_PIECES, score_spread=30.0), tiles=_float32_sm90(), num_sms=1),
    "float32 sm90 window": Trial(case=replace(_WINDOW, dtype="float32"), tiles=_float32_sm90(), num_sms=1),
    "float32 sm90 wide window": Trial(case=replace(_WINDOW, dtype="float32"), tiles=_float32_sm90(block_m=192)),
    "float32 sm90 lengths": Trial(
        case=replace(_LENGTHS, dtype="float32"), tiles=_float32_sm90(ping_pong=False), num_sms=1
    ),
    "float32 sm90 narrow": Trial(case=replace(_NARROW, dtype="float32"), tiles=_float32_sm90()),
    "float32 sm90 no keys": Trial(
        case=replace(_SMALL, dtype="float32", seqlen_q=300, seqlen_k=5, causal=True), tiles=_float32_sm90(), num_sms=1
    ),
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
    "decode narrow": Trial(case=replace(_DECODE, head_dim_v=24), tiles=_DECODE_TILES),
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
        case=replace(_PAGES, head_dim=16, head_dim_v=16, seqlen_q=5), tiles=_forward(), place=attention.far_apart
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
    "backward sm90 sinks": Trial(case=_SINKS, tiles=(_BACKWARD_SM90, None)),
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
    "dbias in pairs of rows": Trial(
        case=replace(_TERMS_OF_SCORES, bias=(70, 77)), tiles=(_BACKWARD_SM90, *_SCORES), need=("dk", "dbias"), num_sms=1
    ),
    "sums": Trial(case=replace(_TERMS_OF_SCORES, alibi_slopes=(2, 4)), tiles=_SCORES, need=_SUMS),
    "sums of heads": Trial(
        case=replace(_TERMS_OF_SCORES, softcap=20.0, causal=True), tiles=_SCORES, need=_SUMS, num_sms=1
    ),
    "packed sums": Trial(case=replace(_PACKED, softcap=5.0), tiles=_SCORES, need=_SUMS),
    "only dk": Trial(case=_SMALL, tiles=_backward(), need=("dk",)),
    "only dv": Trial(case=_SMALL, tiles=_backward(), need=("dv",)),
    "sm90 only dv": Trial(case=replace(_GROUPED, seqlen_q=300), tiles=(_BACKWARD_SM90, None), num_sms=1, need=("dv",)),
    "pieces only dk": Trial(case=replace(_PIECES, seqlen_k=70), tiles=_BACKWARD_PIECES, need=("dk",)),
    "backward": Trial(case=replace(_GROUPED, num_heads=2), tiles=_backward()),
    "backward window": Trial(case=_WINDOW, tiles=_backward()),
    "backward shared": Trial(case=_GROUPED, tiles=_backward(num_warps=8, warps_d=2, block_m=64), num_sms=1),
    "backward one stage": Trial(case=_SMALL, tiles=_backward(num_stages=1), num_sms=1),
    "backward narrow": Trial(case=_NARROW, tiles=_backward()),
    "backward lengths": Trial(case=_LENGTHS, tiles=_backward()),
    "backward terms": Trial(case=_TERMS, tiles=_backward()),
    "backward far": Trial(case=_FAR, tiles=_backward(), place=attention.far_apart),
    "backward split": Trial(case=_SMALL, tiles=_backward()),
    "backward sm90": Trial(case=replace(_GROUPED, seqlen_q=300), tiles=(_BACKWARD_SM90, None), num_sms=1),
    "backward sm90 wide": Trial(
        case=replace(_GROUPED, seqlen_q=100, head_dim=184, head_dim_v=136),
        tiles=(replace(_SPLIT_ROLES, max_dim=256), None),
        num_sms=1,
    ),
    "backward sm90 lengths": Trial(case=replace(_LENGTHS, seqlen_q=100), tiles=(_BACKWARD_SM90, None), num_sms=1),
    "backward sm90 roles": Trial(case=replace(_GROUPED, seqlen_q=300), tiles=(_SPLIT_ROLES, None), num_sms=1),
    "backward sm90 shared": Trial(case=replace(_GROUPED, seqlen_q=300), tiles=(_DK_FROM_SHARED, None), num_sms=1),
    "backward sm90 in turn": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=290, causal=True), tiles=(_BACKWARD_SM90, None), in_turn=True
    ),
    "backward sm90 in turn shared": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=290), tiles=(_DK_FROM_SHARED, None), in_turn=True
    ),
    "backward sm90 in turn back": Trial(
        case=replace(_GROUPED, seqlen_k=140, causal=True, num_heads=8, num_heads_kv=8),
        tiles=(_SPLIT_ROLES, None),
        in_turn=True,
    ),
    "backward sm90 in turn window": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=400, window=(70, 40)), tiles=(_BACKWARD_SM90, None), in_turn=True
    ),
    "backward sm90 clears": Trial(
        case=replace(_GROUPED, seqlen_k=200, num_heads=16, num_heads_kv=8), tiles=(_BACKWARD_SM90, None), num_sms=1
    ),
    "backward sm90 clears back": Trial(
        case=replace(_GROUPED, seqlen_q=70, seqlen_k=140, batch=3, causal=True, num_heads=8, num_heads_kv=8),
        tiles=(_SPLIT_ROLES, None),
        in_turn=True,
        num_sms=1,
    ),
    "backward sm90 clears shared": Trial(
        case=replace(_GROUPED, batch=1, num_heads=40, num_heads_kv=40),
        tiles=(_BACKWARD_SM90, None),
        num_sms=16,
        shares=True,
    ),
    "backward sm90 tail": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=257), tiles=(_BACKWARD_SM90, None), num_sms=5, shares=True
    ),
    "backward sm90 tail back": Trial(
        case=replace(_GROUPED, seqlen_q=140, seqlen_k=140, causal=True, num_heads=8, num_heads_kv=8),
        tiles=(_SPLIT_ROLES, None),
        in_turn=True,
        shares=True,
    ),
    "backward sm90 tail blocks": Trial(
        case=replace(_GROUPED, seqlen_q=300, seqlen_k=257, block_mask=(4,), block_size=(64, 128)),
        tiles=(_BACKWARD_SM90, None),
        shares=True,
    ),
    "packed": Trial(case=_PACKED, tiles=_forward(block_m=64)),
    "packed top left": Trial(case=replace(_PACKED, causal="top_left"), tiles=_forward(block_m=64)),
    "packed sm90": Trial(case=_PACKED, tiles=_sm90(), num_sms=1),
    "packed sm90 full": Trial(case=replace(_PACKED, causal=False), tiles=_sm90(), num_sms=3),
    "packed backward": Trial(case=_PACKED, tiles=_backward(), num_sms=1),
    "packed backward split": Trial(case=_PACKED, tiles=_backward()),
    "packed deterministic": Trial(case=_PACKED, tiles=(*_backward()[:1], _DQ)),
    "packed backward sm90": Trial(case=_PACKED, tiles=(_BACKWARD_SM90, None), num_sms=1),
    "packed backward sm90 roles": Trial(case=_PACKED, tiles=(_SPLIT_ROLES, None), num_sms=1),
    "packed backward sm90 in turn": Trial(case=_PACKED, tiles=(_BACKWARD_SM90, None), in_turn=True),
    "packed backward sm90 in turn window": Trial(
        case=replace(_PACKED, causal=False, window=(40, 10)), tiles=(_BACKWARD_SM90, None), in_turn=True, num_sms=1
    ),
    "packed many": Trial(case=_PACKED_MANY, tiles=_forward(block_m=64)),
    "packed many sm90": Trial(case=replace(_PACKED_MANY, num_heads=18, num_heads_kv=1), tiles=_sm90(), num_sms=5),
    "packed negative": Trial(case=_PACKED, tiles=_forward(block_m=64), cu_seqlens=(0, -(2**30), 100, -(2**29), 200)),
    "packed wild": Trial(
        case=replace(_PACKED, causal=False),
        tiles=(_BACKWARD_SM90, None),
        in_turn=True,
        cu_seqlens=(0, 300, 0, 10, 2**30),
    ),
    "backward pieces": Trial(case=replace(_PIECES, seqlen_q=200, seqlen_k=100), tiles=_BACKWARD_PIECES, num_sms=1),
    "backward two pieces": Trial(
        case=replace(_PIECES, seqlen_q=200, seqlen_k=100),
        tiles=(replace(_BACKWARD_PIECES[0], pieces=2), None),
        num_sms=1,
    ),
    "backward pieces ring": Trial(
        case=replace(_PIECES, seqlen_q=300, seqlen_k=100, head_dim=40), tiles=_BACKWARD_PIECES_RING, num_sms=1
    ),
    "backward pieces split": Trial(case=replace(_PIECES, seqlen_k=70, head_dim_v=104), tiles=_BACKWARD_PIECES),
    "backward pieces narrow": Trial(
        case=replace(_NARROW, dtype="float32", seqlen_k=76, num_heads_kv=2), tiles=_BACKWARD_PIECES_RING
    ),
    "backward pieces lengths": Trial(case=replace(_LENGTHS, dtype="float32"), tiles=_BACKWARD_PIECES),
    "backward pieces window": Trial(
        case=replace(_WINDOW, dtype="float32", seqlen_k=250), tiles=_BACKWARD_PIECES_RING, num_sms=1
    ),
    "backward pieces terms": Trial(case=_FLOAT32, tiles=_BACKWARD_PIECES_RING),
    "forward float32": Trial(case=_FLOAT32, tiles=_forward(block_m=64, element_bytes=4)),
    "forward float64": Trial(case=_FLOAT64, tiles=_forward(block_m=32, warps_d=2, element_bytes=8)),
    "backward float32": Trial(case=_FLOAT32, tiles=_backward(element_bytes=4)),
    "backward float64": Trial(
        case=_FLOAT64,
        tiles=_backward(num_stages=1, warps_d=4, dq_warps_m=1, block_m=16, block_n=16, element_bytes=8),
    ),
    "deterministic": Trial(case=_SMALL, tiles=(_backward()[0], _DQ)),
    "deterministic window": Trial(case=_WINDOW, tiles=(_backward()[0], _DQ)),
    "dropout": Trial(case=_DROPOUT, tiles=_forward(block_m=64)),
    "dropout many rows": Trial(case=_DROPOUT, tiles=_forward()),
    "dropout sm90": Trial(case=_DROPOUT, tiles=_sm90(), num_sms=1),
    "dropout float32 sm90": Trial(case=_DROPOUT_FLOAT32, tiles=_float32_sm90(), num_sms=1),
    "dropout backward": Trial(case=_DROPOUT, tiles=_backward(), num_sms=1),
    "dropout backward split": Trial(case=_DROPOUT, tiles=_backward()),
    "dropout deterministic": Trial(case=_DROPOUT, tiles=(_backward()[0], _DQ)),
    "dropout backward sm90": Trial(case=_DROPOUT, tiles=(_BACKWARD_SM90, None), num_sms=1),
    "dropout backward sm90 roles": Trial(case=_DROPOUT, tiles=(_SPLIT_ROLES, None), num_sms=1),
    "dropout backward pieces": Trial(case=_DROPOUT_FLOAT32, tiles=_BACKWARD_PIECES, num_sms=1),
    "forward blocks": Trial(case=_BLOCKS, tiles=_forward(block_m=64)),
    "forward many blocks": Trial(
        case=replace(_SMALL, block_mask=(), seqlen_k=1100, blocks_kept=0.9), tiles=_forward(block_m=64)
    ),
    "sm90 blocks": Trial(case=_BLOCKS, tiles=_sm90(), num_sms=1),
    "backward blocks": Trial(case=_BLOCKS, tiles=_backward(), num_sms=1),
    "backward sm90 blocks": Trial(case=_BLOCKS, tiles=(_BACKWARD_SM90, None), num_sms=1),
}


# ---- Mutants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mistake: `old` becomes `new` in a file of kernels/. `escapes` is the reason why no trial can notice it."""

    what: str
    file: str
    old: str
    new: str
    trials: tuple[str, ...]
    escapes: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """The file with the mistake."""
        before = (emulator.KERNELS / self.file).read_text()
        if before.count(self.old) != 1:
            raise ValueError(f"{self.what}: {self.file} has the text {before.count(self.old)} times: {self.old!r}")
        return before.replace(self.old, self.new)

    def plant(self) -> Path:
        """A copy of kernels/ with the mistake; always the same folder, so that what was compiled is found again."""
        text = self.text
        folder = COPIES / "".join(c if c.isalnum() else "_" for c in f"{self.file} {self.what}")
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if not (emulator.KERNELS / path.name).exists():
                path.unlink()
        for path in emulator.KERNELS.iterdir():
            if path.suffix in (".cu", ".cuh"):
                shutil.copy(path, folder)
        (folder / self.file).write_text(text)
        return folder

    def caught(self) -> str | None:
        """What the first trial that fails says; None if none does."""
        folder = self.plant()
        for name in self.trials:
            try:
                TRIALS[name].run(folder)
            except (emulator.EmulationError, AssertionError) as error:
                return f"{name}: {error}"
        return None


def _mutant(what: str, file: str, old: str, new: str, *trials: str, escapes: str = "") -> Mutant:
    return Mutant(what=what, file=file, old=old, new=new, trials=trials, escapes=escapes)


_WAIT = "      ptx::copy_async_wait<0>();\n"
_SYNC = "      ptx::sync_block();\n"
_COMMIT = "      ptx::copy_async_commit();\n"

F, F90, F32, ROLES, PIECES, D90, COMBINE, B90, B32, WALK, TILES90, B, DQ, DELTA, SINKS, CONVERT, REDUCE, SEQUENCES = (
    "forward_sm80.cu",
    "forward_sm90.cu",
    "forward_float32_sm90.cu",
    "forward_roles.cuh",
    "pieces.cu",
    "decode_sm90.cu",
    "combine.cu",
    "backward_sm90.cu",
    "backward_float32_sm90.cu",
    "backward_walk.cuh",
    "tiles_sm90.cuh",
    "backward_sm80.cu",
    "backward_dq_sm80.cu",
    "backward_delta.cu",
    "backward_sinks.cu",
    "backward_convert.cu",
    "backward_reduce.cu",
    "sequences.cuh",
)
DROPOUT, LISTS, LIST_WALK, CLEARS = "dropout.cuh", "block_lists.cu", "list_walk.cuh", "backward_clears.cuh"
TURNS = "turns.cuh"
SCHEDULE, UNITS = "schedule.cuh", "sequence_walk.cuh"
PAGES, KEYS = "pages.cuh", "key_tile_sm90.cuh"
SCORES, SCORES_TILES, SCORES_REDUCE = "backward_scores_sm80.cu", "backward_scores.cuh", "backward_scores_reduce.cu"

# fmt: off
MUTANTS = (
    # ---- The ring of the forward pass
    _mutant("no barrier before the first use of K", F, _WAIT + _SYNC + "      load_v(n_block, 0);\n",
            _WAIT + "      load_v(n_block, 0);\n", "forward"),
    _mutant("no wait before the first use of K", F, _WAIT + _SYNC + "      load_v(n_block, 0);\n",
            _SYNC + "      load_v(n_block, 0);\n", "forward"),
    _mutant("the copy of V is not committed", F, "      load_v(n_block, 0);\n" + _COMMIT, "      load_v(n_block, 0);\n",
            "forward"),
    _mutant("no wait for V", F, _WAIT + _SYNC + "      if (n_block > tiles.start) load_k(n_block - 1, 0);\n",
            _SYNC + "      if (n_block > tiles.start) load_k(n_block - 1, 0);\n", "forward"),
    _mutant("no barrier between S and the next K", F,
            _WAIT + _SYNC + "      if (n_block > tiles.start) load_k(n_block - 1, 0);\n",
            _WAIT + "      if (n_block > tiles.start) load_k(n_block - 1, 0);\n", "forward"),
    _mutant("the same K is fetched again", F, "load_k(n_block - 1, 0);", "load_k(n_block, 0);", "forward"),
    _mutant("K before the first tile is fetched", F, "if (n_block > tiles.start) load_k", "if (true) load_k",
            "forward"),
    _mutant("one group too many may be in flight", F, "ptx::copy_async_wait<kNumStages - 2>();",
            "ptx::copy_async_wait<kNumStages - 1>();", "forward ring"),
    _mutant("no barrier before a stage is used again", F, "      ptx::copy_async_wait<kNumStages - 2>();\n" + _SYNC,
            "      ptx::copy_async_wait<kNumStages - 2>();\n", "forward ring"),
    _mutant("the next tile goes to the stage in use", F, "stage == 0 ? kNumStages - 1 : stage - 1;", "stage;",
            "forward ring"),
    _mutant("the last tile is not fetched", F, "if (next >= tiles.start) load_k", "if (next > tiles.start) load_k",
            "forward ring"),
    _mutant("a tile of the ring is not committed", F, "load_v(next, next_stage);\n" + _COMMIT,
            "load_v(next, next_stage);\n", "forward ring"),
    _mutant("the stage does not advance", F, "stage = stage == kNumStages - 1 ? 0 : stage + 1;", "", "forward ring"),
    _mutant("the ring is filled with tiles that do not exist", F, "if (i < num_tiles) load_k", "if (true) load_k",
            "forward short ring"),
    _mutant("the stage of K by the size of V", F, "operand_k, stage * kBytesK", "operand_k, stage * kBytesV",
            "forward ring"),
    # ---- Forward: fragments, sums, edges
    _mutant("V is not transposed", "fragments.cuh",
            "ptx::load_matrix_x4_transposed(b.word, along_row(lane, n * warps * 32)",
            "ptx::load_matrix_x4(b.word, along_row(lane, n * warps * 32)", "forward"),
    _mutant("S is not cleared", F, "    set_zero(s);\n", "", "forward"),
    _mutant("O is not cleared", F, "  set_zero(o);\n", "", "forward"),
    _mutant("columns of a fragment are taken for one", F, "key = lane_key + 8 * n + i % 2;", "key = lane_key + 8 * n;",
            "forward"),
    _mutant("rows of a fragment by the parity of the element", F, "row = lane_row + 16 * m + i / 2 * 8,",
            "row = lane_row + 16 * m + i % 2 * 8,", "forward window"),
    _mutant("warps share rows", F, "warp_index() / kWarpsD * 16 * kMTiles,", "warp_index() / kWarpsD * 16,",
            "forward"),
    _mutant("tiles at the right edge are taken for full", F,
            "n_block >= tiles.full_stop; --n_block) step(n_block, Constant<true>{});",
            "n_block >= tiles.full_stop; --n_block) step(n_block, Constant<false>{});", "forward", "forward window"),
    _mutant("tiles at the left edge are taken for full", F,
            "n_block >= tiles.start; --n_block) step(n_block, Constant<true>{});",
            "n_block >= tiles.start; --n_block) step(n_block, Constant<false>{});", "forward window"),
    _mutant("O takes the room of Q before all have read it", F,
            "  ptx::copy_async_wait<0>();\n  ptx::sync_block();\n  store_fragments",
            "  ptx::copy_async_wait<0>();\n  store_fragments", "forward ring"),
    _mutant("O is stored before all have written it", F, "(m, half) * kept_scale; });\n  ptx::sync_block();\n",
            "(m, half) * kept_scale; });\n", "forward"),
    _mutant("lanes do not add their sums", F, "  softmax.finish();\n", "", "forward"),
    _mutant("O is not divided by the sum", F, "return softmax.inverse_sum(m, half) * kept_scale;", "return 1.0f;",
            "forward"),
    _mutant("lse of rows that do not exist", F, "fragment_column() == 0 && row < seqlen_q",
            "fragment_column() == 0", "forward"),
    _mutant("lse without its stride", F, "g_lse[row * params.lse.row_stride]", "g_lse[row]", "forward far"),
    _mutant("rows of out up to seqlen_k", F,
            "                                 first_row, seqlen_q);",
            "                                 first_row, params.seqlen_k);", "forward"),
    _mutant("V is read past kv_lengths", F, "params.v.row_stride, tiles.at(n_block) * kBlockN, key_stop);",
            "params.v.row_stride, tiles.at(n_block) * kBlockN, params.seqlen_k);", "forward lengths"),
    _mutant("V by the stride of K", F, "g_v, params.v.row_stride", "g_v, params.k.row_stride", "forward"),
    _mutant("groups of heads are dealt in turns", F, "head / (params.num_heads / params.num_heads_kv);",
            "head % params.num_heads_kv;", "forward"),
    _mutant("the scale is forgotten", F, "softmax.update(s, o, exponent_scale);", "softmax.update(s, o, kLog2e);",
            "forward"),
    _mutant("short tiles start first", F, "params.num_heads, kHasRightBound);", "params.num_heads, false);",
            "forward window", escapes="the order of blocks is a matter of speed alone"),
    # ---- Online softmax
    _mutant("sums are not rescaled", "softmax.cuh", "    row_sum[m][half] *= factor;\n", "", "forward spread"),
    _mutant("half of O is not rescaled", "softmax.cuh", ", out[m][n][2 * half + 1] *= factor;", ";", "forward spread"),
    _mutant("the maximum misses two lanes", "softmax.cuh", "        max = max_of(max, ptx::shuffle_xor(max, 2));\n", "",
            "forward spread"),
    _mutant("infinity minus infinity in exponents", "softmax.cuh",
            "offset[m][half] == -ptx::infinity() ? 0 : offset[m][half];", "offset[m][half];", "forward window",
            "forward masked"),
    _mutant("infinity minus infinity in the factor", "softmax.cuh",
            "old == -ptx::infinity() ? 0 : exponential(old - offset[m][half]);",
            "exponential(old - offset[m][half]);", "forward window", "forward masked"),
    _mutant("sums are not cleared", "softmax.cuh", ", row_sum[m][half] = 0;", ";", "forward"),
    _mutant("lse in units of log2", "softmax.cuh", "ptx::log2_approx(row_sum[m][half])) * kLn2;",
            "ptx::log2_approx(row_sum[m][half]));", "forward"),
    _mutant("one divided by zero", "softmax.cuh", "row_sum[m][half] == 0 ? 0 : 1 / row_sum[m][half];",
            "1 / row_sum[m][half];", "forward lengths"),
    _mutant("the sum misses two lanes", "softmax.cuh",
            "        row_sum[m][half] += ptx::shuffle_xor(row_sum[m][half], 2);\n", "", "forward"),
    _mutant("weights outgrow float16", "softmax.cuh", "0.0f : 8.0f;", "0.0f : 40.0f;", "forward spread"),
    _mutant("the offset falls", "softmax.cuh", "offset[m][half] = max_of(old, exponent);",
            "offset[m][half] = exponent;", "forward window spread"),
    _mutant("a row grows for itself alone", "softmax.cuh", "if (!ptx::any_lane(grows))", "if (!grows)",
            "forward spread", escapes="the lanes of a row agree: the vote only keeps the warp together"),
    # ---- Masks
    _mutant("one key past the last is visible", "mask.cuh", "bool seen = key < key_stop;",
            "bool seen = key <= key_stop;", "forward"),
    _mutant("the diagonal is hidden", "mask.cuh", "key <= row + right_offset", "key < row + right_offset",
            "forward window"),
    _mutant("the last key of the window is hidden", "mask.cuh", "key >= row + left_offset", "key > row + left_offset",
            "forward window"),
    _mutant("the mask is transposed", "mask.cuh", "row * row_stride + key * key_stride",
            "row * key_stride + key * row_stride", "forward terms"),
    _mutant("all heads have the first mask", "mask.cuh", " + head * params.mask.head_stride;", ";", "forward terms"),
    _mutant("the mask is read past its last row", "mask.cuh", "seen && row < seqlen_q && bytes", "seen && bytes",
            "forward terms"),
    _mutant("32-bit offsets in the mask", "mask.cuh", "bytes[row * row_stride", "bytes[row * (int)row_stride",
            "forward far"),
    # ---- Ranges of tiles
    _mutant("the last tile of the diagonal is left out", "schedule.cuh",
            "last_row + right_offset + 1), kBlockN)", "last_row + right_offset), kBlockN)",
            "forward window", "deterministic window"),
    _mutant("tiles on the diagonal are taken for full", "schedule.cuh",
            "at_least_zero(first_row + right_offset + 1) / kBlockN",
            "at_least_zero(last_row + right_offset + 1) / kBlockN", "forward window"),
    _mutant("the first tile of the window is left out", "schedule.cuh",
            "start = at_least_zero(first_row + left_offset) / kBlockN;",
            "start = ceil_div(at_least_zero(first_row + left_offset), kBlockN);", "forward window"),
    _mutant("tiles at the window's edge are taken for full", "schedule.cuh",
            "full_start = ceil_div(at_least_zero(last_row + left_offset), kBlockN);",
            "full_start = ceil_div(at_least_zero(first_row + left_offset), kBlockN);", "forward window"),
    _mutant("the last tile of keys is taken for full", "schedule.cuh", "full_stop = key_stop / kBlockN,",
            "full_stop = ceil_div(key_stop, kBlockN),", "forward"),
    _mutant("the mask is not looked at in full tiles", "schedule.cuh",
            "  if constexpr (kHasMask) full_stop = full_start;\n", "", "forward terms"),
    _mutant("the first queries that see a key are left out", "schedule.cuh",
            "start = at_least_zero(first_key - right_offset) / kBlockM;",
            "start = ceil_div(at_least_zero(first_key - right_offset), kBlockM);", "backward window"),
    _mutant("queries on the diagonal are taken for full", "schedule.cuh",
            "full_start = ceil_div(at_least_zero(last_key - right_offset), kBlockM);",
            "full_start = ceil_div(at_least_zero(first_key - right_offset), kBlockM);", "backward window"),
    _mutant("the last queries of the window are left out", "schedule.cuh",
            "at_least_zero(last_key - left_offset + 1), kBlockM)",
            "at_least_zero(last_key - left_offset + 1) - 1, kBlockM)", "backward window"),
    _mutant("queries at the window's edge are taken for full", "schedule.cuh",
            "at_least_zero(first_key - left_offset + 1) / kBlockM",
            "at_least_zero(last_key - left_offset + 1) / kBlockM", "backward window"),
    _mutant("keys past kv_lengths get gradients", "schedule.cuh", "if (kHasMask || last_key >= key_stop)",
            "if (kHasMask)", "backward lengths"),
    _mutant("tiles of hidden keys are computed", "schedule.cuh", "  if (first_key >= key_stop) stop = 0;\n", "",
            "backward lengths", escapes="every weight in them is zero: time lost, nothing else"),
    _mutant("tiles in reverse start one too late", "schedule.cuh", "last_first ? num_blocks - 1 - block",
            "last_first ? num_blocks - block", "forward window"),
    _mutant("only the first batch entry has blocks", "schedule.cuh", "? num_heads : num_heads * params.batch;",
            "? num_heads : num_heads;", "forward"),
    _mutant("kv_lengths are not clamped", "sequences.cuh", "length < params.seqlen_k ? (int)length : params.seqlen_k;",
            "(int)length;", "forward wild lengths"),
    _mutant("64-bit lengths are read as 32-bit ones", "sequences.cuh", "((const i64*)params.kv_lengths)",
            "((const i32*)params.kv_lengths)", "forward lengths"),
    _mutant("kv_lengths without their stride", "sequences.cuh",
            "((const i32*)params.kv_lengths)[batch * params.kv_lengths_stride];",
            "((const i32*)params.kv_lengths)[batch];", "forward flipped"),
    # ---- Scores
    _mutant("softcap is not multiplied back", "score.cuh", "score = softcap * t;", "score = t;", "forward terms"),
    _mutant("the derivative of softcap without its square", "score.cuh", "derivative = 1 - t * t;",
            "derivative = 1 - t;", "backward terms"),
    _mutant("tanh of negative scores is positive", "score.cuh", "x < 0.0f ? -t : t;", "t;", "forward terms"),
    _mutant("distances have a sign", "score.cuh", "(distance < 0 ? -distance : distance)", "distance", "forward terms"),
    _mutant("distances from the wrong diagonal", "score.cuh", "row + diagonal - key", "row - key", "forward terms"),
    _mutant("slopes in natural units", "score.cuh", "*slope * kExponentOfE;", "*slope;",
            "forward terms"),
    _mutant("bias in natural units", "score.cuh", "bias_at(row, key) * kExponentOfE;", "bias_at(row, key);",
            "forward terms"),
    _mutant("bias is read past its end", "score.cuh", "if (row < seqlen_q && key < key_stop) score", "score",
            "forward terms"),
    _mutant("32-bit offsets in the bias", "score.cuh", "row * bias_row_stride", "row * (int)bias_row_stride",
            "forward far"),
    _mutant("the scale in natural units", "score.cuh", "scale * kExponentOfE : 1", "scale : 1", "forward"),
    # ---- Copies
    _mutant("rows past the end are read", "copy.cuh", "exists = row + i < row_stop - first_row;", "exists = true;",
            "forward"),
    _mutant("columns past the head dimension are read", "copy.cuh", "column + c < columns ? columns - column - c : 0;",
            "kVector;", "forward narrow"),
    _mutant("whole vectors of nothing are read", "copy.cuh", "source, elements * kElementBytes);",
            "source, kVector * kElementBytes);",
            "forward"),
    _mutant("narrow loads leave no zeros", "copy.cuh", "elements ? source[c] : (u16)0", "source[c]", "forward narrow"),
    _mutant("rows past the end are written", "copy.cuh", "    if (first_row + row >= row_stop) break;\n", "",
            "forward"),
    _mutant("32-bit offsets of heads", "copy.cuh", "head * tensor.head_stride;", "(int)(head * tensor.head_stride);",
            "forward far"),
    _mutant("32-bit offsets of rows", "copy.cuh", "(first_row + row) * row_stride + column;\n  else",
            "(first_row + row) * (int)row_stride + column;\n  else", "forward far"),
    _mutant("32-bit offsets of stored rows", "copy.cuh",
            "Storage* destination = head + (first_row + row) * row_stride + column;",
            "Storage* destination = head + (first_row + row) * (int)row_stride + column;", "forward far"),
    _mutant("stored rows are not unswizzled", "copy.cuh",
            "const u32 source = tile + row * kRow + ((column * kElementBytes) ^ row_swizzle<kRow>(row));",
            "const u32 source = tile + row * kRow + column * kElementBytes;", "forward"),
    _mutant("half of the banks are used", "config.cuh", "row >= 128 ? r % 8 :", "row >= 128 ? r % 4 :", "forward"),
    # ---- Products
    _mutant("rows of A repeat", "fragments.cuh", "(r + lane % 16) * row +", "(r + lane % 8) * row +", "forward"),
    _mutant("matrices of B in the order of A", "fragments.cuh", "(r + lane % 8 + lane / 16 * 8) * row +",
            "(r + lane % 16) * row +", "forward"),
    _mutant("a fragment of B is another's", "fragments.cuh", "d, a.word, b.word[2 * piece], b.word[2 * piece + 1]);",
            "d, a.word, b.word[2 * piece], b.word[piece + 2]);", "forward"),
    _mutant("P in the wrong fragment order", "fragments.cuh", "row[2 * k + i / 2][i % 2 * 2],",
            "row[2 * k + i % 2][i / 2 * 2],", "forward"),
    _mutant("the wrong fragment of those fetched ahead", "mma.cuh",
            "factor_of(b[i % (kFragmentsAhead + 1)], factor_b);",
            "factor_of(b[(i + 1) % (kFragmentsAhead + 1)], factor_b);", "forward"),
    _mutant("the last step of A is not fetched", "mma.cuh", "if (n == 0 && k + kStepsAhead < k_steps)",
            "if (n == 0 && k + kStepsAhead < k_steps - 1)", "forward"),
    _mutant("accumulators are cleared but for the last", "mma.cuh", "i < 4; ++i) tile[m][n][i] = 0;",
            "i < 3; ++i) tile[m][n][i] = 0;", "forward"),
    _mutant("halves of a fragment land on each other", "mma.cuh", "(16 * m + 8 * half) * row,", "16 * m * row,",
            "forward"),
    _mutant("warps share columns", "mma.cuh", "16 * (warp + n / 2 * warps)", "16 * (warp + n / 2)", "backward shared"),
    # ---- Statistics of rows
    _mutant("rows without keys have weights", DELTA, "if (value != -ptx::infinity()) {", "{",
            "backward terms"),
    _mutant("lse of the backward pass in natural units", DELTA, "exponent_lse = value * kExponentOfE;",
            "exponent_lse = value;",
            "backward"),
    _mutant("dq starts from what was there", CLEARS, "accumulator[i] = {0, 0, 0, 0};", ";", "backward"),
    _mutant("accumulators beforehand are not cleared", CLEARS,
            "    clear_accumulator(params, first + index % tiles_of_part, thread, kNumThreads);\n", ";\n",
            "backward sm90 clears"),
    _mutant("blocks clear no accumulators", CLEARS,
            "    clear_accumulator(params, first + i, thread, kClearThreads);\n", "    ;\n", "backward sm90 clears"),
    _mutant("nobody waits for accumulators to be cleared", B90,
            "  if constexpr (kClearsAhead) wait_for_clears(common, tile.num_m_blocks, tile.work);\n", "",
            "backward sm90 clears"),
    _mutant("clears are not counted", CLEARS, "  ptx::add_to_count(clears_of(params, num_m_blocks, place));\n", "",
            "backward sm90 clears"),
    _mutant("clears are not counted from zero", CLEARS, "clears_of_place(params) : 0;", "clears_of_place(params) : 1;",
            "backward sm90 clears"),
    _mutant("counts of clears in place of those of turns", CLEARS,
            "kDqInTurn ? (i64)params.batch * params.num_heads * num_m_blocks : 0;", "0;", "backward sm90 clears back"),
    _mutant("blocks clear what is not behind them", CLEARS, ")}) + params.clear_ahead;", ")}) + 1;",
            "backward sm90 clears"),
    _mutant("a block clears one tile of queries", CLEARS, "(i64)count * n_block / num_n_blocks", "n_block",
            "backward sm90 clears"),
    _mutant("one head of a group is cleared", CLEARS,
            "  return params.num_heads / num_parts_of(params) * num_m_blocks;", "  return num_m_blocks;",
            "backward sm90 clears"),
    _mutant("heads that walk back are those that do not", CLEARS, "{num_ahead + (int)(place % num_back),",
            "{(int)(place % num_back),", "backward sm90 clears back"),
    _mutant("heads that walk back are in their batch entry", CLEARS,
            "  return num_ahead * params.batch + part.batch * num_back + part.index - num_ahead;",
            "  return part.batch * num_parts + part.index;", "backward sm90 clears back"),
    _mutant("every block that shares a tile clears for it", WALK, "is_first = share.part == 0;", "is_first = true;",
            "backward sm90 clears shared"),
    _mutant("half of dq starts from what was there", CLEARS, "i < kBlockM * kDim * sizeof(Real) / 16;",
            "i < kBlockM * kDim * sizeof(Real) / 32;", "backward"),
    _mutant("delta misses a lane", DELTA, "mask > 0; mask /= 2", "mask > 1; mask /= 2", "backward"),
    _mutant("dout by the stride of out", DELTA, "dout + row * params.dout.row_stride",
            "dout + row * params.out.row_stride", "backward narrow"),
    _mutant("32-bit offsets of lse", DELTA, "lse[row * params.lse.row_stride]", "lse[row * (int)params.lse.row_stride]",
            "backward far"),
    # ---- Backward
    _mutant("no wait before the loop", B, "ptx::copy_async_wait<kNumStages - 1>();",
            "ptx::copy_async_wait<kNumStages>();", "backward"),
    _mutant("no barrier before the loop", B, "  ptx::copy_async_wait<kNumStages - 1>();\n  ptx::sync_block();\n",
            "  ptx::copy_async_wait<kNumStages - 1>();\n", "backward"),
    _mutant("no barrier at the end of a step", B, "ptx::copy_async_wait<0>();\n    ptx::sync_block();\n",
            "ptx::copy_async_wait<0>();\n", "backward"),
    _mutant("no wait at the end of a step", B, "    if constexpr (kNumStages == 2) ptx::copy_async_wait<0>();\n", "",
            "backward"),
    _mutant("no wait with one stage", B, "    if constexpr (kNumStages == 1) {\n" + _WAIT,
            "    if constexpr (kNumStages == 1) {\n", "backward one stage"),
    _mutant("no barrier with one stage", B, _WAIT + _SYNC, _WAIT, "backward one stage"),
    _mutant("dS has one buffer", B, "step % 2 * kBytesS", "0", "backward"),
    _mutant("no barrier before dS is read", B, "ds, one);\n      }\n" + _SYNC, "ds, one);\n      }\n",
            "backward shared"),
    _mutant("the walk stays with one head", B, "m_block = tiles.start, ++head;", "m_block = tiles.start;",
            "backward shared"),
    _mutant("a tile past the last is fetched", B, "if (step + kNumStages < num_steps)",
            "if (step + kNumStages <= num_steps)", "backward"),
    _mutant("the stage of queries does not advance", B, "const int stage = step % kNumStages;", "const int stage = 0;",
            "backward"),
    _mutant("statistics of another head", B, "stats_of(params, batch, at.head) + first_row",
            "stats_of(params, batch, head_kv) + first_row", "backward shared"),
    _mutant("half of the statistics", B, "if (thread < (int)kBytesStats / 16)",
            "if (thread < (int)kBytesStats / 32)", "backward"),
    _mutant("the gradient ignores softcap", B, "(dp * kept_scale - delta) * derivative;",
            "(dp * kept_scale - delta);",
            "backward terms"),
    _mutant("statistics of the other query", B, "exponent_lse = stats[i % 2 * 2],", "exponent_lse = stats[i / 2 * 2],",
            "backward"),
    _mutant("tiles of early queries are taken for full", B, "m_block < tiles.full_start ||", "",
            "backward window"),
    _mutant("dS of the first warp's rows", B, "a(s_ds_now, dq_warp_m * kDqMTiles);",
            "a(s_ds_now, 0);", "backward"),
    _mutant("columns of dq are not dealt", B, "RowMajorB<kRow, kDqWarpsD> b(", "RowMajorB<kRow, 1> b(", "backward"),
    _mutant("dq goes to the next tile of queries", B, "row_tile(current) * (kBlockM * kDim)",
            "row_tile(next) * (kBlockM * kDim)", "backward"),
    _mutant("dk is not cleared", B, "  set_zero(dk);\n", "", "backward"),
    _mutant("dk takes the room of K before all have read it", B,
            "  ptx::sync_block();\n  const Real scale", "  const Real scale",
            "backward"),
    _mutant("dk without the scale", B, "dk, [&](int, int) { return scale; });", "dk, [&](int, int) { return 1.0f; });",
            "backward"),
    _mutant("a part takes the heads of the next", B, "first_head = head_kv * group + group * split / splits;",
            "first_head = head_kv * group + group * (split + 1) / splits;", "backward split"),
    _mutant("parts overwrite each other", "backward.cuh", "return tile * params.group_splits;", "return tile;",
            "backward split"),
    _mutant("the last part is not added", REDUCE, "part < parts;", "part < parts - 1;", "backward split"),
    _mutant("dq without the scale", CONVERT, "return scale;", "return 1.0f;", "backward"),
    _mutant("dq is stored before all have written it", CONVERT, "  ptx::sync_block();\n", "", "backward"),
    _mutant("elements of dq in reverse", CONVERT, "accumulator_offset(m * kDqNTiles + n, i)",
            "accumulator_offset(m * kDqNTiles + n, 3 - i)", "backward"),
    # ---- dq in a fixed order
    _mutant("keys go to the stage in use", DQ, "load_keys(n_block - 1, 1 - stage);", "load_keys(n_block - 1, stage);",
            "deterministic"),
    _mutant("no barrier before keys are overwritten", DQ, "    ptx::copy_async_wait<0>();\n    ptx::sync_block();\n",
            "    ptx::copy_async_wait<0>();\n", "deterministic"),
    _mutant("the stage of keys does not advance", DQ, "    stage = 1 - stage;\n", "", "deterministic"),
    _mutant("delta of the other row", DQ, "- delta[m][i / 2]) * derivative;", "- delta[m][i % 2]) * derivative;",
            "deterministic"),
    _mutant("statistics of the upper half", DQ, "(lane_row + 16 * m + 8 * half) * 2;", "(lane_row + 16 * m) * 2;",
            "deterministic"),
    _mutant("hidden keys move dq", DQ, "if (masked.value && !mask.visible(row, key))", "if (false)",
            "deterministic window"),
    _mutant("dq is stored before the warp's neighbours have read Q", DQ,
            "  ptx::copy_async_wait<0>();\n  ptx::sync_block();\n  const Real scale",
            "  ptx::copy_async_wait<0>();\n  const Real scale", "deterministic",
            escapes="a warp writes over rows that it alone has read: the barrier is not needed"),
    # ---- The forward pass of compute capability 9.0
    _mutant("no wait for K", F90, "      shared.k_ring.full(key).wait(key.parity);\n      const u64 a",
            "      const u64 a", "sm90"),
    _mutant("no wait for V", F90, "      shared.v_ring.full(at).wait(at.parity);\n", "", "sm90"),
    _mutant("no wait for Q", F90, "    shared.q_ring.full(query).wait(query.parity);\n", "", "sm90"),
    _mutant("the producer does not wait for a free K", F90, "      shared.k_ring.empty(key).wait(key.parity ^ 1);\n",
            "",
            "sm90"),
    _mutant("the producer does not wait for a free V", F90, "      shared.v_ring.empty(key).wait(key.parity ^ 1);\n",
            "",
            "sm90"),
    _mutant("the producer does not wait for a free Q", F90,
            "      shared.q_ring.empty(query).wait(query.parity ^ 1);\n", "", "sm90 parts"),
    _mutant("the producer waits for the other phase", F90, "shared.k_ring.empty(key).wait(key.parity ^ 1);",
            "shared.k_ring.empty(key).wait(key.parity);", "sm90"),
    _mutant("bytes of a row too few announced", KEYS, "arrive_expect(chunked_bytes(kBlockN, columns));",
            "arrive_expect(chunked_bytes(kBlockN - 1, columns));", "sm90"),
    _mutant("bytes of a row too many announced", KEYS, "arrive_expect(chunked_bytes(kBlockN, columns));",
            "arrive_expect(chunked_bytes(kBlockN + 1, columns));", "sm90"),
    _mutant("K is free before it was read again", F90, "maximum_first = ptx::any_lane(sum",
            "release_by_warp(shared.k_ring.empty(key));\n        maximum_first = ptx::any_lane(sum",
            "sm90 spread"),
    _mutant("V is not given back", F90, "        release(shared.v_ring.empty(before));\n", "", "sm90"),
    _mutant("V is given back before O is done", F90,
            "        ptx::wait_products<0>();\n        ptx::renew_registers(o[0]);\n"
            "        release(shared.v_ring.empty(before));\n",
            "        release(shared.v_ring.empty(before));\n        ptx::wait_products<0>();\n"
            "        ptx::renew_registers(o[0]);\n", "sm90"),
    _mutant("Q is given back while warps may read it", F90,
            "      const auto step = [&](auto masked) {\n",
            "      release_by_warp(shared.q_ring.empty(query));\n      const auto step = [&](auto masked) {\n",
            "sm90 spread"),
    _mutant("S is read in flight", F90, "        ptx::wait_products<1>();\n", "        ptx::wait_products<2>();\n",
            "sm90"),
    _mutant("O is rescaled in flight", F90,
            "        ptx::wait_products<0>();\n        ptx::renew_registers(o[0]);\n"
            "        release(shared.v_ring.empty(before));\n        if (grows) softmax.rescale(o, factor);\n",
            "        if (grows) softmax.rescale(o, factor);\n        ptx::wait_products<0>();\n"
            "        ptx::renew_registers(o[0]);\n        release(shared.v_ring.empty(before));\n", "sm90 spread"),
    _mutant("weights change under the product", F90, "        ptx::wait_products<1>();\n",
            "        p[0].word[0] ^= 1;\n        ptx::wait_products<1>();\n", "sm90"),
    _mutant("no fence before S", F90, "      ptx::renew_registers(s[0]);\n      ptx::fence_products();\n",
            "      ptx::renew_registers(s[0]);\n", "sm90"),
    _mutant("no fence before O", F90, "      ptx::renew_registers(o[0]);\n      ptx::fence_products();\n",
            "      ptx::renew_registers(o[0]);\n", "sm90"),
    _mutant("the last turn is not taken", TURNS, "    if (on && index == 0) take();\n", "", "sm90",
            escapes="an arrival left at a barrier when the block ends does no harm"),
    _mutant("nobody goes first", TURNS, "    if (on && index == count - 1) give();\n", "",
            "sm90 window"),
    _mutant("turns are not taken where nothing is multiplied", F90, "      turns.take();\n      turns.give();\n", "",
            "sm90 causal"),
    _mutant("consumers run ahead of a phase that they skip", F90,
            "      sync_consumer(consumer);  // nobody may be left waiting for a phase that is long over\n", "",
            "sm90 causal",
            escapes="a warp would have to lag by two phases, which no order of the threads makes it do here"),
    _mutant("the output is not fenced", F90,
            "      ptx::fence_async_proxy();\n      sync_consumer(consumer);\n", "      sync_consumer(consumer);\n",
            "sm90"),
    _mutant("the output leaves before all have written it", F90,
            "      ptx::fence_async_proxy();\n      sync_consumer(consumer);\n",
            "      ptx::fence_async_proxy();\n", "sm90"),
    _mutant("the output before is overwritten", F90,
            "      if (elected) ptx::bulk_wait_read<0>();\n      sync_consumer(consumer);",
            "      sync_consumer(consumer);", "sm90", "sm90 parts"),
    _mutant("the second part of the output in place of the first", F90, "entry_of(batch), kFirst);",
            "entry_of(batch));",
            "sm90 parts"),
    _mutant("the block ends before the output has left", F90, "  if (elected) ptx::bulk_wait<0>();\n", "", "sm90"),
    _mutant("barriers unknown to the copy engine", "pipeline.cuh", "      ptx::fence_barrier_init();\n", "", "sm90"),
    _mutant("barriers used before they are made", "pipeline.cuh", "    ptx::sync_block();\n", "", "sm90"),
    _mutant("K given back by too many", F90, "make_barriers(4 * kConsumers, 4 * kConsumers,",
            "make_barriers(4 * kConsumers, 2 * kConsumers,",
            "sm90"),
    _mutant("more registers than there are", F90, "!kWalkWantsMore ? 24 :",
            "!kWalkWantsMore ? 40 :", "sm90"),
    _mutant("zeros of V unfenced", F90, "          ptx::fence_async_proxy();\n        }\n", "        }\n",
            "sm90 lengths"),
    _mutant("zeros of V seen by one consumer alone", F90, "        ptx::sync_named(kAll, 128 * kConsumers);\n", "",
            "sm90 lengths"),
    _mutant("V behind kv_lengths counts", F90, "if (tile.keys.start < tile.keys.stop && valid < kBlockN) {",
            "if (false) {", "sm90 lengths"),
    _mutant("the next chunk of K too early", TILES90, "return operand + (k / 4 * rows * kLineBytes + k % 4 * 32) / 16;",
            "return operand + (k / 4 * rows * kLineBytes / 2 + k % 4 * 32) / 16;", "sm90"),
    _mutant("8 rows of V too near", TILES90, "return operand + k * 16 * kLineBytes / 16;",
            "return operand + k * 8 * kLineBytes / 16;", "sm90"),
    _mutant("output not swizzled", TILES90, "((k % 4 * 32 + lane / 16 * 16) ^ swizzle), fragment.word);",
            "(k % 4 * 32 + lane / 16 * 16), fragment.word);", "sm90"),
    _mutant("the same columns of every chunk", TILES90, "map, full.address, c * kChunk, first_row",
            "map, full.address, 0, first_row",
            "sm90"),
    # ---- ... the producer
    _mutant("queries without keys get no Q", F90, "    if (tile.keys.start == tile.keys.stop) load_q();\n", "",
            "sm90 lengths"),
    _mutant("the producer's phase of Q never changes", F90,
            "walk.advance(), query.advance()) {\n    const QueryTile tile(params.common",
            "walk.advance()) {\n    const QueryTile tile(params.common", "sm90"),
    _mutant("the producer waits for the first Q to be done", F90,
            "shared.q_ring.empty(query).wait(query.parity ^ 1);", "shared.q_ring.empty(query).wait(query.parity);",
            "sm90"),
    _mutant("bytes of the output announced for Q", F90, "q_full.arrive_expect(kBytesQ);",
            "q_full.arrive_expect(kBytesOut);", "sm90"),
    _mutant("K of the query's head", F90, "keys(params.common, batch, head, tile.keys",
            "keys(params.common, batch, tile.work.head, tile.keys", "sm90"),
    _mutant("V by the size of K", F90, "shared.v + key.stage * kBytesV, params.v",
            "shared.v + key.stage * kBytesK, params.v",
            "sm90"),
    _mutant("groups of heads in turns", "schedule.cuh",
            "head_kv(work.head / (params.num_heads / params.num_heads_kv)),",
            "head_kv(work.head % params.num_heads_kv),", "sm90"),
    # ---- ... consumers
    _mutant("a consumer's phase of Q never changes", F90,
            "walk.advance(), query.advance()) {\n    const QueryTile tile(common",
            "walk.advance()) {\n    const QueryTile tile(common", "sm90"),
    _mutant("consumers share queries", F90, "kBytesQ + consumer * 64 * kLineBytes;", "kBytesQ;", "sm90"),
    _mutant("every tile reads the Q of the first stage", F90,
            "s_q = shared.q + query.stage * kBytesQ +", "s_q = shared.q +", "sm90"),
    _mutant("consumers share the room of the output", F90, "s_out = shared.out + consumer * 64 * kLineBytes;",
            "s_out = shared.out;", "sm90"),
    _mutant("consumers store to the same rows", F90, "array_row = query_start_of(batch) + first_row;",
            "array_row = query_start_of(batch) + tile.first_row;", "sm90"),
    _mutant("half of a consumer's queries decide", "schedule.cuh", "min_of(first + 64, seqlen_q) - 1",
            "min_of(first + 32, seqlen_q) - 1", "sm90 causal", "sm90 window"),
    _mutant("a turn is given to itself", TURNS, "ptx::arrive_named(first_barrier + (index + 1) % count, 256);",
            "ptx::arrive_named(first_barrier + index, 256);", "sm90"),
    _mutant("O of the tile of S", F90, "multiply_o(before);", "multiply_o(key);", "sm90"),
    _mutant("O is not rescaled", F90, "        if (grows) softmax.rescale(o, factor);\n", "", "sm90 spread"),
    _mutant("the first weights for ever", F90, "softmax.rescale(o, factor);\n        to_weights(n_block);\n",
            "softmax.rescale(o, factor);\n", "sm90"),
    _mutant("sums of a tile are left out", F90, "      softmax.row_sum[0][1] += sum[0][1];\n", "", "sm90"),
    _mutant("the last V is not given back", F90,
            "      release(shared.v_ring.empty(key));\n      key.advance();\n    } else {\n",
            "      key.advance();\n    } else {\n", "sm90"),
    _mutant("queries without keys do not give Q back", F90,
            "      arrive_as_warp(shared.q_ring.empty(query));\n", "", "sm90 lengths"),
    _mutant("Q is given back while lanes of the warp wait for it", F90, "arrive_as_warp(shared.q_ring.empty(query));",
            "release_by_warp(shared.q_ring.empty(query));", "sm90 no keys"),
    _mutant("K that is skipped is not given back", F90,
            "      release_by_warp(shared.k_ring.empty(key));\n      release(shared.v_ring.empty(key));\n",
            "      release(shared.v_ring.empty(key));\n", "sm90 causal"),
    _mutant("a skipped tile stays the next one", F90,
            "      release(shared.v_ring.empty(key));\n      key.advance();\n    };\n",
            "      release(shared.v_ring.empty(key));\n    };\n", "sm90 causal"),
    _mutant("tiles behind the window are not skipped", F90,
            "    for (int n_block = keys.start - 1; n_block >= tile.keys.start; --n_block) skip();\n", "",
            "sm90 window"),
    _mutant("the left edge of the window is not masked", F90,
            "n_block >= keys.start; --n_block) step(Constant<true>{});",
            "n_block >= keys.start; --n_block) step(Constant<false>{});", "sm90 window"),
    _mutant("lse of rows that are not there", ROLES, "fragment_column() == 0 && half_row < seqlen_q",
            "fragment_column() == 0", "sm90"),
    # ---- ... maxima that are found late
    _mutant("the product is done again on the first stage", F90,
            "line_k = shared.k + key.stage * kBytesK + (lane % 8", "line_k = shared.k + (lane % 8", "sm90 spread"),
    _mutant("the product done again adds", F90, "      set_zero(s);\n#pragma", "#pragma", "sm90 spread"),
    _mutant("the product done again on other columns of K", F90, "k / 4 * kBlockN * kLineBytes +\n",
            "k / 4 * kBlockM * kLineBytes +\n", "sm90 spread"),
    _mutant("the product done again on other queries", F90, "line_q = s_q + (warp_row + lane % 16) * kLineBytes;",
            "line_q = s_q + (lane % 16) * kLineBytes;", "sm90 spread"),
    _mutant("the sum of the first look stays", F90, "          sum[0][0] = sum[0][1] = 0.0f;\n", "", "sm90 spread"),
    _mutant("no terms at the second look", F90, "          to_scores(n_block, masked);\n          sum", "          sum",
            "sm90 slopes"),
    _mutant("sums outgrow float16", F90, "max_sum(Float16) { return 16384.0f; }",
            "max_sum(Float16) { return 4194304.0f; }",
            "sm90 spread"),
    _mutant("the second row of a lane is not looked at", F90,
            "ptx::any_lane(sum[0][0] > kMaxSum || sum[0][1] > kMaxSum);", "ptx::any_lane(sum[0][0] > kMaxSum);",
            "sm90 spread"),
    _mutant("rows that saw nothing are taken for started", F90, "bool all_started = false;", "bool all_started = true;",
            "sm90 whole tiles"),
    _mutant("half of the rows suffice to start", F90, "ptx::any_lane(fminf(softmax.offset",
            "ptx::any_lane(fmaxf(softmax.offset",
            "sm90 diagonal"),
    # ---- ... tiles in shared memory
    _mutant("zeros start one row too late", TILES90, "word = first * kLineBytes / 4 + thread;",
            "word = (first + 1) * kLineBytes / 4 + thread;", "sm90 lengths"),
    _mutant("zeros in the first columns alone", TILES90,
            "for (int c = 0; c < chunks_of(columns); ++c)\n    for (u32 word",
            "for (int c = 0; c < 1; ++c)\n    for (u32 word", "sm90 wide lengths"),
    _mutant("the second columns of V from other rows", TILES90,
            "ptx::descriptor(tile, rows * kLineBytes, 8 * kLineBytes);",
            "ptx::descriptor(tile, 64 * kLineBytes, 8 * kLineBytes);", "sm90 wide lengths"),
    _mutant("the second columns of the output from other rows", TILES90,
            "map, tile + c * rows * kLineBytes, first_column +",
            "map, tile + c * 64 * kLineBytes, first_column +", "sm90 wide lengths"),
    _mutant("the second columns of the output to other rows", TILES90,
            "store_matrix_x4(line + k / 4 * rows * kLineBytes +", "store_matrix_x4(line + k / 4 * 64 * kLineBytes +",
            "sm90 wide lengths"),
    _mutant("one factor for both halves of a fragment", TILES90, "i / 2 ? lower : upper;", "upper;", "sm90"),
    # ---- ... the walk over tiles of queries
    _mutant("the last pair of an even number has one tile", "schedule.cuh", "2 * from_start + 1 < num_m_blocks",
            "2 * from_start + 2 < num_m_blocks", "sm90 even pairs"),
    _mutant("the tile in the middle is left out", "schedule.cuh", "kPairs ? (num_m_blocks + 1) / 2",
            "kPairs ? num_m_blocks / 2",
            "sm90 pairs"),
    _mutant("the tile in the middle is done twice", "schedule.cuh", "2 * from_start + 1 < num_m_blocks",
            "2 * from_start < num_m_blocks", "sm90 pairs", escapes="the same numbers are written again: time lost"),
    _mutant("the second of a pair is another pair's", "schedule.cuh", "    if (!second) unit += step;\n",
            "    unit += step;\n",
            "sm90 pairs"),
    _mutant("pairs of the first batch entry alone", "schedule.cuh",
            "(int)(head % params.num_heads),\n            (int)(head / params.num_heads)};",
            "(int)(head % params.num_heads), 0};", "sm90 pairs"),
    _mutant("a block does the work of the next", "schedule.cuh", "step(params.resident_blocks),",
            "step(params.resident_blocks + 1),", "sm90 pairs"),
    _mutant("a tile is full when two said so", "pipeline.cuh", "full({i}).init(1);", "full({i}).init(2);", "sm90"),
    _mutant("a ring has a stage too many", "pipeline.cuh", "if (++stage == stages)", "if (++stage > stages)", "sm90"),
    _mutant("the ring's parity never changes", "pipeline.cuh", "stage = 0, parity ^= 1;", "stage = 0;", "sm90"),
    _mutant("full and empty share a barrier", "pipeline.cuh", "return {address + 8 * (stages + at.stage)};",
            "return {address + 8 * at.stage};", "sm90"),
    # ---- Few queries on compute capability 9.0
    _mutant("no wait for K", D90, "      shared.k_ring.full(at).wait(at.parity);\n", "", "decode"),
    _mutant("no wait for V", D90, "      shared.v_ring.full(at).wait(at.parity);\n", "", "decode"),
    _mutant("no wait for Q", D90,
            "    if (work.has_keys()) shared.q_ring.full(q_at).wait(q_at.parity);\n", "", "decode"),
    _mutant("the producer does not wait for a free K", D90, "      shared.k_ring.empty(at).wait(at.parity ^ 1);\n", "",
            "decode whole"),
    _mutant("the producer does not wait for a free V", D90, "      shared.v_ring.empty(at).wait(at.parity ^ 1);\n", "",
            "decode whole"),
    _mutant("Q of the next head comes too early", D90,
            "        shared.q_ring.empty(q_at).wait(q_at.parity ^ 1);\n", "",
            "decode whole"),
    _mutant("Q is given back by too few", D90, "make_barriers(kConsumerWarps,", "make_barriers(5,", "decode whole"),
    _mutant("Q is given back where none came", D90, "    if (work.has_keys()) {\n      release_by_warp",
            "    if (true) {\n      release_by_warp", "decode lengths"),
    _mutant("Q of every head in the same phase", D90, "      q_at.advance();\n    }\n    softmax", "    }\n    softmax",
            "decode whole"),
    _mutant("a row of Q too many announced", D90, "arrive_expect(chunked_bytes(work.rows, kDim));",
            "arrive_expect(chunked_bytes(work.rows + 1, kDim));", "decode"),
    _mutant("queries of the next group", D90, "q_full, 0, work.first_head(),",
            "q_full, 0, work.head_kv,", "decode"),
    _mutant("S is read in flight", D90, "      ptx::wait_products<0>();\n      ptx::renew_registers(s[0]);\n",
            "      ptx::renew_registers(s[0]);\n", "decode"),
    _mutant("O is read in flight", D90, "      ptx::wait_products<0>();\n      ptx::renew_registers(o[0]);\n",
            "      ptx::renew_registers(o[0]);\n", "decode"),
    _mutant("K is given back by too few", D90, "kConsumerWarps, kConsumerWarps);", "5, kConsumerWarps);",
            "decode whole"),
    _mutant("rows of no query are not cleared", D90,

                       "  zero_rows<kBlockM, kDim>(shared.q, common.num_heads",
            "  if (false) zero_rows<kBlockM, kDim>(shared.q, common.num_heads",
            "decode"),
    _mutant("a query is cleared", D90, "common.num_heads_kv * common.seqlen_q, thread);",
            "common.num_heads_kv * common.seqlen_q - 1, thread);", "decode"),
    _mutant("zeros of Q unfenced", D90, "  ptx::fence_async_proxy();\n  sync_consumer();\n", "  sync_consumer();\n",
            "decode"),
    _mutant("zeros of Q seen by some", D90, "  ptx::fence_async_proxy();\n  sync_consumer();\n",
            "  ptx::fence_async_proxy();\n", "decode"),
    _mutant("V behind kv_lengths counts", D90, "        if (valid < kBlockN) {", "        if (false) {",
            "decode lengths"),
    _mutant("zeros of V unfenced", D90, "          ptx::fence_async_proxy();\n", "", "decode lengths"),
    _mutant("zeros of V seen by some", D90, "          sync_consumer();\n        }\n", "        }\n", "decode lengths"),
    _mutant("rows taken for queries", D90, "{lane_row[0] % common.seqlen_q, lane_row[1] % common.seqlen_q}",
            "{lane_row[0], lane_row[1]}", "decode"),
    _mutant("the mask of all tiles is left out", D90, "n_block >= work.keys.full_stop;",
            "n_block > work.keys.full_stop;", "decode"),
    _mutant("shares overlap", D90, "keys.stop = first + tiles_in(to);",
            "keys.stop = first + tiles_in(to) + 1;", "decode"),
    _mutant("a share ends with its head", D90, "    if (to < blocks) keys.stop =", "    if (false) keys.stop =",
            "decode"),
    _mutant("a block has its first head only", D90, "return at < stop; }",
            "return at == shares.start_of_block(ptx::block_index()); }",
            "decode uneven"),
    _mutant("the last tile of a share is left out", D90,
            "n_block >= work.keys.start; --n_block, at.advance()) {\n      multiply_s",
            "n_block > work.keys.start; --n_block, at.advance()) {\n      multiply_s", "decode"),
    _mutant("partial results are not divided by their sum", D90, "factor = softmax.inverse_sum(0, half);",
            "factor = 1.0f;", "decode"),
    _mutant("rows of no query are stored", D90, "      if (row >= work.rows) continue;\n", "", "decode"),
    _mutant("columns past the head are stored", "splits.cuh", "  if (column < kHeadDimV) ", "  ", "decode narrow"),
    _mutant("whole heads are left to be combined", D90, "!kSplitsKeys || partials.count == 1;", "!kSplitsKeys;",
            "decode few"),
    _mutant("the first block of a head is the one behind", "splits.cuh",
            "first_block(shares.block_at(shares.start_of_head(head))),",
            "first_block(shares.block_at(shares.start_of_head(head) + shares.heads - 1)),", "decode uneven"),
    _mutant("a head has a block too few", "splits.cuh", "- first_block + 1),", "- first_block),", "decode uneven"),
    _mutant("blocks in the same room", "splits.cuh", "return g_out + ((i64)i * rows + row) * kDimV;",
            "return g_out + row * kDimV;", "decode"),
    _mutant("two heads in the same room", "splits.cuh", "return block + head; }", "return block; }", "decode uneven"),
    _mutant("two rows share an lse", "splits.cuh", "return g_lse + (i64)i * rows + row;",
            "return g_lse + (i64)i * rows + row / 2;", "decode"),
    _mutant("heads counted from the first group", COMBINE, "const int row = head % group *", "const int row = head *",
            "decode uneven"),
    _mutant("blocks with one weight", "splits.cuh", "exponential((*lse(i, row) - combined_lse) * kLog2e);",
            "1.0f / count;", "decode"),
    _mutant("the maximum of half the blocks", "splits.cuh", "    for (int mask = 16; mask > 0; mask /= 2) max",
            "    for (int mask = 16; mask > 8; mask /= 2) max", "decode"),
    _mutant("the sum of half the blocks", "splits.cuh", "    for (int mask = 16; mask > 0; mask /= 2) sum",
            "    for (int mask = 8; mask > 1; mask /= 2) sum", "decode"),
    _mutant("nothing minus nothing", "splits.cuh", "    if (max == -ptx::infinity()) max = 0.0f;\n", "",
            "decode lengths"),
    _mutant("sums are read before all are written", COMBINE, "    ptx::sync_block();\n", "", "decode uneven"),
    _mutant("the first of the results at once alone", COMBINE, "for (int i = 1; i < kAtOnce; ++i)",
            "for (int i = 2; i < kAtOnce; ++i)", "decode uneven"),
    _mutant("whole heads are combined", COMBINE, " && partials.count > 1;", ";", "decode few"),
    # ---- The backward pass of compute capability 9.0
    _mutant("no wait for K and V", B90, "    shared.kv_full.wait(0);\n    if constexpr", "    if constexpr",
            "backward sm90"),
    _mutant("no wait for Q", B90, "    shared.q_ring.full(at).wait(at.parity);\n", "", "backward sm90"),
    _mutant("no wait for dout", B90, "      shared.do_ring.full(at).wait(at.parity);\n      multiply_dp();",
            "      multiply_dp();", "backward sm90"),
    _mutant("no wait for dout that is late", B90,
            "    if constexpr (!dp_early) shared.do_ring.full(at).wait(at.parity);\n", "",
            "backward sm90 roles"),
    _mutant("the turn at a step is kept", B90, "        if (n == kQueryTiles - 1) turns.give();\n", "",
            "backward sm90"),
    _mutant("the turn at products is kept", B90, "    if constexpr (!makes_dk) turns.give();\n", "",
            "backward sm90 roles"),
    _mutant("the turn at a step is not taken", B90, "    turns.take();\n", "", "backward sm90"),
    _mutant("the producer does not wait for a free dout", B90,
            "    shared.do_ring.empty(at).wait(at.parity ^ 1);\n", "", "backward sm90",
            escapes="the producer waits for Q too, which is given back after dout"),
    _mutant("statistics are not announced", B90, "arrive_expect(kBytesQ + kBytesStats);", "arrive_expect(kBytesQ);",
            "backward sm90"),
    _mutant("dQ does not wait for dS", B90, "    shared.ds_ring.full(at).wait(at.parity);\n", "", "backward sm90"),
    _mutant("dS is overwritten under dQ", B90, "    shared.ds_ring.empty(ds_at).wait(ds_at.parity ^ 1);\n", "",
            "backward sm90"),
    _mutant("dS is not fenced", B90,
            "      if constexpr (kDkFromShared || !kDqHoldsDs) ptx::fence_async_proxy();\n", "",
            "backward sm90 shared"),
    _mutant("tiles are given back under the products", B90,
            "    ptx::wait_products<0>();\n    ptx::renew_registers(dv);\n", "    ptx::renew_registers(dv);\n",
            "backward sm90"),
    _mutant("every lane asks for tiles", B90, "    if (ptx::elect_lane()) load_next();\n", "    load_next();\n",
            "backward sm90"),
    _mutant("the block ends before dk and dv have left", B90, "    ptx::bulk_wait_read<0>();\n", "", "backward sm90"),
    _mutant("dk leaves over K in use", B90,
            "  if constexpr (!kSplitsGroup) ptx::sync_named(kEnd, kConsumerThreads + 128);\n", "", "backward sm90"),
    _mutant("gradients are not fenced", B90,
            "  ptx::fence_async_proxy();\n  ptx::sync_named(kConsumer + consumer, 128);",
            "  ptx::sync_named(kConsumer + consumer, 128);", "backward sm90"),
    _mutant("zeros of K and V unfenced", B90,
            "(shared.v, valid, thread);\n          ptx::fence_async_proxy();\n", "(shared.v, valid, thread);\n",
            "backward sm90 lengths"),
    _mutant("P is read before it is there", B90,
            "      if constexpr (!makes_dv) shared.p_ring.full(p_at).wait(p_at.parity);\n", "", "backward sm90 roles"),
    _mutant("P is overwritten before it is read", B90, "      shared.p_ring.empty(p_at).wait(p_at.parity ^ 1);\n", "",
            "backward sm90 roles"),
    _mutant("products of nothing are kept", B90, "index > 1, index == 0);", "true, index == 0);",
            "backward sm90 shared"),
    _mutant("products of nothing read what nobody wrote", B90, "index > 1, index == 0);", "index > 1, false);",
            "backward sm90 shared"),
    _mutant("products of nothing give tiles back", B90, "finish_products(stage_before, index > 0);",
            "finish_products(stage_before, true);", "backward sm90 roles"),
    _mutant("dK does not wait for dS of its warpgroup", B90,
            "    if constexpr (kDkFromShared) ptx::sync_named(kConsumer + consumer, 128);\n", "",
            "backward sm90 shared"),
    _mutant("dK does not give dS back", B90,
            "      if constexpr (kDkFromShared) shared.ds_ring.empty({ds_at.stage ^ 1}).arrive();\n", "",
            "backward sm90 shared"),
    _mutant("dK reads dS of other keys", B90, "* kBytesDs + first * kLineBytes);", "* kBytesDs);",
            "backward sm90 shared"),
    _mutant("dK reads dS of the step to come", B90, "shared.ds + (ds_at.stage ^ 1) * kBytesDs + first",
            "shared.ds + ds_at.stage * kBytesDs + first", "backward sm90 shared"),
    _mutant("wide gradients repeat their first columns", B90, "first * 8 / kChunk * (kBlockM",
            "first * 0 / kChunk * (kBlockM",
            "backward sm90 wide"),
    _mutant("dS in registers of other queries", B90, "(s_ds, thread / 32 * 16, ds)", "(s_ds, 0, ds)", "backward sm90"),
    _mutant("halves of keys change places", TILES90, "(lane / 16 * 8 + lane % 8) * kLineBytes",
            "((lane / 16 ^ 1) * 8 + lane % 8) * kLineBytes", "backward sm90"),
    _mutant("columns are added before they are made", B90,
            "      ptx::wait_products<0>();\n      ptx::renew_registers(dq);\n", "      ptx::renew_registers(dq);\n",
            "backward sm90"),
    _mutant("the turn of the one before", WALK, "work.block - keys.start;", "work.block - keys.start - 1;",
            "backward sm90 in turn back"),
    _mutant("turns from the last tile of all", WALK, "keys.stop - 1 - work.block", "num_n_blocks - 1 - work.block",
            "backward sm90 in turn window"),
    _mutant("no turn ends", B90, "      ptx::end_turn(turns);\n", "", "backward sm90 in turn"),
    _mutant("the turn ends under its additions", B90, "      added.wait(at.parity);\n", "", "backward sm90 in turn"),
    _mutant("additions do not wait for the turn", B90, "Barrier{shared.turn + 8 * turn_at.stage}.wait(turn_at.parity);",
            ";", "backward sm90 in turn shared"),
    _mutant("nobody waits for the turn", B90, "      ptx::wait_for_turn(turns, tile.turn(common, walk.m_block));\n", "",
            "backward sm90 in turn"),
    _mutant("turns run ahead of their ends", B90, "      ended.wait(at.parity ^ 1);\n", "", "backward sm90 in turn"),
    _mutant("the walk back starts late", WALK, "backwards ? stop - 1", "backwards ? stop - 2",
            "backward sm90 in turn back"),
    _mutant("turns from the first tile where the last is first", WALK, "kLastFirst && !walks_back ? keys.stop",
            "false ? keys.stop", "backward sm90 in turn"),
    _mutant("turns from the last tile of heads that walk back", WALK, "kLastFirst && !walks_back ? keys.stop",
            "kLastFirst ? keys.stop", "backward sm90 in turn back"),
    _mutant("heads that walk back are counted from the first", "backward.cuh", "  if (back) work.head += num_ahead;\n",
            "", "backward sm90 in turn back"),
    _mutant("dQ does not let tiles be asked for", B90, "      arrive_as_warp(shared.do_ring.empty(q_at));\n", "",
            "backward sm90 in turn"),
    _mutant("dQ leaves out keys that it does not hold", B90, "int k = kDqHeld;", "int k = kDqHeld + 1;",
            "backward sm90 in turn"),
    _mutant("turns are not counted from zero", "backward_delta.cu",
            "    if (kDqInTurn && thread == 0) *turns_of(params, num_m_blocks, tile) = 0;\n", "",
            "backward sm90 in turn"),
    _mutant("threads of a warp add to the same sums", "backward_warps.cuh",
            "(piece * kNumThreads + thread) * 4 + element", "(piece * kNumThreads + thread / 2) * 4 + element",
            "backward"),
    # ---- float32 by pieces of bfloat16
    _mutant("a middle piece is forgotten", "pieces.cuh", "{kMiddle, kMiddle}, ", "{kLow, kMiddle}, ", "float32 sm90"),
    _mutant("a low piece is forgotten", "pieces.cuh", "{kLow, kHigh}, ", "{kLow, kLow}, ", "float32 sm90"),
    _mutant("a middle piece of two is forgotten", "pieces.cuh", "{{kHigh, kMiddle}, {kMiddle, kHigh}, ",
            "{{kHigh, kMiddle}, {kMiddle, kMiddle}, ", "float32 sm90 two pieces", "backward two pieces"),
    _mutant("the largest product of two pieces is forgotten", "pieces.cuh", "kPieces * (kPieces + 1) / 2;",
            "kPieces == 2 ? 2 : 6;", "float32 sm90 two pieces", "backward two pieces"),
    _mutant("the last of two pieces is split like the first of three", "pieces.cuh", "if constexpr (kPieces == 3) {",
            "if constexpr (true) {", "float32 sm90 two pieces", "backward two pieces"),
    _mutant("the second of a pair keeps bits of the first", "pieces.cuh", "y -= ptx::float_of(piece[i] & 0xffff0000u);",
            "y -= ptx::float_of(piece[i] << 16);", "float32 sm90"),
    _mutant("the pair of pieces is swapped", "pieces.cuh",
            "piece[kMiddle] = ptx::pack(BFloat16{}, middle[0], middle[1]);",
            "piece[kMiddle] = ptx::pack(BFloat16{}, middle[1], middle[0]);", "float32 sm90"),
    _mutant("hidden keys are split too", PIECES, "of_keys ? key_stop_of(params, batch) : seqlen);", "seqlen);",
            "float32 sm90 lengths"),
    _mutant("pieces of one batch entry over those of another", PIECES,
            "head_elements * num_heads * params.batch, block", "head_elements * num_heads, block", "float32 sm90"),
    _mutant("rows past the last one are split", PIECES, "    if (row >= seqlen) break;\n", "", "float32 sm90"),
    _mutant("the next blocks begin with k again", PIECES, "index -= blocks_q;", "index -= 0;", "float32 sm90"),
    _mutant("rows are as wide as the head dimension", PIECES, "(i64)row * kWidth + column",
            "(i64)row * columns + column", "float32 sm90 narrow"),
    _mutant("columns past the last one are read", PIECES, "column + i + j < columns ? row[column + i + j] : 0.0f;",
            "row[column + i + j];", "float32 sm90 narrow"),
    # ---- ... the producer
    _mutant("pieces of float32 by the batch entry alone", F32,
            "tile.work.head,\n                                   i * all_batch + batch);",
            "tile.work.head,\n                                   batch);", "float32 sm90"),
    _mutant("the producer of float32 does not wait for the last S", F32,
            "      shared.q_ring.empty(query).wait(query.parity ^ 1);\n",
            "", "float32 sm90"),
    _mutant("the producer of float32 does not wait for S", F32,
            "        shared.k_ring.empty(at).wait(at.parity ^ 1);\n", "", "float32 sm90"),
    _mutant("the producer of float32 does not wait for O", F32,
            "        shared.v_ring.empty(at).wait(at.parity ^ 1);\n", "", "float32 sm90"),
    _mutant("a whole tile of K is announced with a piece", F32, "arrive_expect(kPieceK);", "arrive_expect(kBytesK);",
            "float32 sm90"),
    _mutant("the pieces of V arrive the other way round", F32,
            "first_key,\n                                    head, piece_of(n)",
            "first_key,\n                                    head, n", "float32 sm90"),
    _mutant("queries of float32 without keys get no Q", F32, "    if (tile.keys.start == tile.keys.stop) load_q();\n",
            "", "float32 sm90 no keys"),
    # ---- ... consumers
    _mutant("S of float32 without a wait for K", F32,
            "        shared.k_ring.full(at).wait(at.parity);\n", "", "float32 sm90"),
    _mutant("O of float32 without a wait for V", F32,
            "        shared.v_ring.full(at).wait(at.parity);\n", "", "float32 sm90"),
    _mutant("S of float32 without a wait for Q", F32,
            "    shared.q_ring.full(query).wait(query.parity);\n", "", "float32 sm90"),
    _mutant("pieces are given back one group too soon", F32, "ptx::wait_products<kPieces - 1 - kPiece>();",
            "ptx::wait_products<kPieces - kPiece>();", "float32 sm90"),
    _mutant("every piece given back is the first one", F32, "release(ring.empty(place_of(key, kPiece)));",
            "release(ring.empty(place_of(key, 0)));", "float32 sm90"),
    _mutant("pieces of the first stage only", F32, "{tile.stage * kPieces + n, tile.parity}", "{n, tile.parity}",
            "float32 sm90"),
    _mutant("Q of float32 is given back after every tile", F32,
            "if (n_block == keys.start) release(shared.q_ring.empty(query));",
            "release(shared.q_ring.empty(query));", "float32 sm90"),
    _mutant("Q of float32 is never given back where no key is seen", F32,
            "      sync_consumer(consumer);\n      release(shared.q_ring.empty(query));\n", "",
            "float32 sm90 no keys"),
    _mutant("what float32 summed up is not rescaled", F32, "o[0][n][i] * factor[0][i / 2] + sum[n][i];",
            "o[0][n][i] + sum[n][i];", "float32 sm90 spread"),
    _mutant("rows of float32 rescaled by the other half's factor", F32, "o[0][n][i] * factor[0][i / 2] + sum[n][i];",
            "o[0][n][i] * factor[0][i % 2] + sum[n][i];", "float32 sm90 spread"),
    _mutant("the left edge of a window of float32 is not masked", F32,
            "if (n_block >= keys.full_stop || n_block < keys.full_start)", "if (n_block >= keys.full_stop)",
            "float32 sm90 window", "float32 sm90 wide window"),
    _mutant("tiles that a consumer of float32 skips keep V", F32,
            "        release(shared.v_ring.empty(place_of(key, n)));\n", "", "float32 sm90 window",
            "float32 sm90 wide window"),
    _mutant("one turn for two products", F32, "product < 2; ++product", "product < 1; ++product",
            "float32 sm90 window"),
    _mutant("float32 keeps its turn", F32, "      multiply_s(s[0]);\n      turns.give();\n",
            "      multiply_s(s[0]);\n", "float32 sm90"),
    _mutant("pieces of P in the place of others", F32, "p[k][piece][i] = word[piece];",
            "p[k][piece][i] = word[kPieces - 1 - piece];", "float32 sm90"),
    _mutant("rows of float32 past the last one are stored", F32, "    if (row + 8 * half >= params.seqlen_q) break;\n",
            "", "float32 sm90"),
    _mutant("the column behind an odd number of them is stored", F32, "if (column + 1 < kHeadDimV)",
            "if (column < kHeadDimV)", "float32 sm90 narrow"),
    # ---- ... the backward pass
    _mutant("the walk stays with the first head", WALK, "m_block = tiles.first(), ++head;", "m_block = tiles.first();",
            "backward pieces"),
    _mutant("the walk begins each head at its first query", WALK, "m_block = tiles.first(), ++head;",
            "m_block = 0, ++head;", "backward pieces window"),
    _mutant("blocks behind whole tiles take one each", WALK, "params.whole_tiles + index / parts;",
            "params.whole_tiles + index;", "backward sm90 tail"),
    _mutant("every part of a tile begins with its first step", WALK, "first_step = step_of(share.part);",
            "first_step = 0;", "backward sm90 tail"),
    _mutant("the walk of a part begins with the first step", WALK,
            "    if (kSplitsTail && first_step > 0) walk.skip(queries, first_step);\n", "", "backward sm90 tail"),
    _mutant("the walk of a part begins with the first head", WALK, "    head += steps / length;\n", "",
            "backward sm90 tail"),
    _mutant("the walk of a part goes ahead before it goes back", WALK, "tiles.backwards ? -(steps % length) :", "",
            "backward sm90 tail back"),
    _mutant("whole tiles leave parts", WALK, "is_shared = share.parts > 1;", "is_shared = true;", "backward sm90 tail"),
    _mutant("parts of whole tiles are added", REDUCE, "(kSplitsTail ? params.whole_tiles : 0)", "0",
            "backward sm90 tail"),
    _mutant("parts of the last tiles have the room of whole ones", WALK,
            "ptx::block_index() - params.whole_tiles, thread", "ptx::block_index(), thread", "backward sm90 tail"),
    _mutant("a part begins behind the end of a list", LIST_WALK, "steps >= (length", "steps > (length",
            "backward sm90 tail blocks"),
    _mutant("parts of a group overlap", WALK, "head_kv * group + group * split / splits;", "head_kv * group;",
            "backward pieces split"),
    _mutant("keys of all batch entries", WALK, "key_stop = key_stop_of(params, work.batch);",
            "key_stop = params.seqlen_k;", "backward pieces lengths"),
    _mutant("K of the next head of queries", B32, "c, tile.first_key, tile.head_kv);",
            "c, tile.first_key, tile.first_head);", "backward pieces"),
    _mutant("one piece of a chunk", B32, "piece * common.batch + batch);", "batch);", "backward pieces"),
    _mutant("chunks are asked for before they are free", B32, "      ring.empty(at, c).wait(at.parity ^ 1);\n", "",
            "backward pieces"),
    _mutant("statistics come unannounced", B32, "kBytesChunk + (stats_too ? kBytesStats : 0)", "kBytesChunk",
            "backward pieces"),
    _mutant("statistics of the first stage for all", B32,
            "load_bulk(shared.stats + at.stage * kBytesStats,", "load_bulk(shared.stats,", "backward pieces ring"),
    _mutant("P' without a wait for Q", B32,
            "    for (int c = 0; c < kChunks; ++c) shared.q_ring.full(at, c).wait(at.parity);\n", ";\n",
            "backward pieces"),
    _mutant("P' without a wait for K", B32, "if (tile.num_steps > 0) shared.k_full.wait(0);", "",
            "backward pieces"),
    _mutant("P' is read in flight", B32, "    ptx::wait_products<0>();\n    ptx::renew_registers(p);\n",
            "    ptx::renew_registers(p);\n", "backward pieces"),
    _mutant("pieces meet the same pieces of the other factor", B32,
            "along_k<kPieces * kRows>(piece_of(rows_b, i.value), k), accumulate);",
            "along_k<kPieces * kRows>(piece_of(rows_b, j.value), k), accumulate);", "backward pieces"),
    _mutant("the second chunk behind the first piece", B32, "along_k<kPieces * kRows>(piece_of(rows_a",
            "along_k<kRows>(piece_of(rows_a", "backward pieces"),
    _mutant("P' over dS' in use", B32, "    shared.room.ds_empty(room).wait(room.parity ^ 1);\n", "",
            "backward pieces"),
    _mutant("P' is read before it is there", B32, "    shared.room.p_full(room).wait(room.parity);\n", "",
            "backward pieces"),
    _mutant("dS' over P' that is still read", B32, "    ptx::sync_named(kDkWarpgroup, 128);\n", "", "backward pieces"),
    _mutant("dS' of pieces is not fenced", B32, "          ptx::fence_async_proxy();\n", "", "backward pieces"),
    _mutant("dQ of pieces before dS' is there", B32, "    shared.room.ds_full(room).wait(room.parity);\n", "",
            "backward pieces"),
    _mutant("a room is given back before dQ is computed", B32,
            "      ptx::wait_products<0>();\n      ptx::renew_registers(dq);\n"
            "      if (first == kDim - kDqColumns && thread == 0) shared.room.ds_empty(room).arrive();\n",
            "      if (first == kDim - kDqColumns && thread == 0) shared.room.ds_empty(room).arrive();\n"
            "      ptx::wait_products<0>();\n      ptx::renew_registers(dq);\n", "backward pieces"),
    _mutant("a chunk is given back with the one before it", B32, "ptx::wait_products<chunks - 1 - c>();",
            "ptx::wait_products<chunks - 1>();", "backward pieces"),
    _mutant("dO is given back by one of two", B32, "shared.do_ring.barriers.init(2);",
            "shared.do_ring.barriers.init(1);", "backward pieces"),
    _mutant("dK takes Q before it is there", B32,
            "        dk, operand, shared.q_ring.tile(at), [&](int c) { shared.q_ring.full(at, c).wait(at.parity); },\n",
            "        dk, operand, shared.q_ring.tile(at), [&](int) {},\n", "backward pieces",
            escapes="P' waited for all of it"),
    _mutant("the chunks of dP' are not added up", B32, "ds[n][i] += part[c][n][i];",
            "ds[n][i] += part[0][n][i];", "backward pieces split"),
    _mutant("halves of a row change places", B32, "[n / 2][n % 2 * 2 + half] = word[piece];",
            "[n / 2][n % 2 + half * 2] = word[piece];", "backward pieces"),
    _mutant("delta of the neighbour", B32, "kept_scale, stats[2 * i + 1]);", "kept_scale, stats[3 - 2 * i]);",
            "backward pieces"),
    _mutant("no derivative of the softcap", B32, "kHasSoftcap ? p[n][i] * derivative : p[n][i];", "p[n][i];",
            "backward pieces terms"),
    _mutant("infinities among small numbers", B32, "if (rests - rests != 0.0f) {", "if (false) {", "backward pieces",
            escapes="no infinity is in it; tests/emulate/test_backward_float32.py has some"),
    _mutant("slices of dQ at the same place", B32, "accumulator + (first / 8 + n) * 128 * 4",
            "accumulator + n * 128 * 4", "backward pieces"),
    _mutant("slices of dQ of the same columns", B32, "keys + first / kChunk * (kBytesChunk / 16);", "keys;",
            "backward pieces"),
    _mutant("dK is not scaled", B32, "thread, dk, common.scale);", "thread, dk, 1.0f);", "backward pieces"),
    _mutant("keys past the last one are stored", B32, "    if (key >= params.seqlen_k) continue;\n", "",
            "backward pieces"),
    _mutant("the column behind an odd number of them is stored", B32,
            "if (column + 1 < head_dim) row", "if (column < head_dim) row", "backward pieces narrow"),
    _mutant("dV's part over that of dK", B32, "tile.partials(common, thread) + kRows * kDim;",
            "tile.partials(common, thread);", "backward pieces split"),
    _mutant("rows of pieces' dQ taken for pairs", CONVERT,
            "kPlainFragments ? Order::kPlain : Order::kPairedRowsColumns", "Order::kPairedRowsColumns",
            "backward pieces"),
    _mutant("rows of pieces' dK taken for pairs", REDUCE, "kPlainFragments ? Order::kPlain : Order::kPairedColumns",
            "Order::kPairedColumns", "backward pieces split"),
    # ---- Sinks, and the gradient of lse
    _mutant("the sink is forgotten", F, "if (kHasSinks && !is_left_over(params, batch))", "if (false)",
            "forward sinks"),
    _mutant("the sink in natural units", F, "sink_of(params, head) * kExponentOfE", "sink_of(params, head)",
            "forward sinks"),
    _mutant("the sink is forgotten", F90, "if (kHasSinks && !is_left_over(common, batch))", "if (false)",
            "sm90 sinks"),
    _mutant("the sink of the first head", F90, "sink_of(common, head)", "sink_of(common, 0)", "sm90 sinks"),
    _mutant("the sink of a key/value head", F32, "sink_of(common, head)", "sink_of(common, tile.head_kv)",
            "float32 sm90 sinks"),
    _mutant("every split adds the sink", D90, "if (kHasSinks && is_alone)", "if (kHasSinks)", "decode sinks"),
    _mutant("one sink for all heads of a group", D90, "work.first_head() + lane_row[half] / common.seqlen_q;",
            "work.first_head();",
            "decode whole sinks"),
    _mutant("sinks of rows that stand for no query", D90, "lane_row[half] < work.rows ? sink_of", "true ? sink_of",
            "decode whole sinks"),
    _mutant("every lane adds the sink", "splits.cuh", "if (kHasSinks && lane_index() == 0) sum", "if (kHasSinks) sum",
            "decode sinks"),
    _mutant("the sink of a key/value head", COMBINE, "sink_of(params, head)", "sink_of(params, head / group)",
            "decode sinks"),
    _mutant("O does not follow the sink", "softmax.cuh", "    rescale(out, factor);\n", "", "forward sinks"),
    _mutant("the offset does not follow the sink", "softmax.cuh", "raise_offset(m, half, exponent);", "1;",
            "forward sinks"),
    _mutant("the sink relative to zero", "softmax.cuh", "exponential(exponent - offset[m][half]);",
            "exponential(exponent);", "forward sinks"),
    _mutant("the gradient of lse is forgotten", DELTA, "= delta - row_dlse;", "= delta;", "backward sinks"),
    _mutant("the gradient of lse without its stride", DELTA, "dlse[row * params.dlse.row_stride]", "dlse[row]",
            "backward sinks"),
    _mutant("the gradient of a sink has the other sign", SINKS, "sum -= exponential", "sum += exponential",
            "backward sinks"),
    _mutant("rows of the first batch entry alone", SINKS, "(i64)(kIsPacked ? 1 : params.batch) * rows", "rows",
            "backward sinks"),
    _mutant("pairs of statistics taken for single ones", SINKS, "(kPairsStats ? row / 2 * 4 + row % 2 : row * 2)",
            "row * 2", "backward sm90 sinks"),
    _mutant("half of the lanes of a warp", SINKS, "int mask = 16;", "int mask = 8;", "backward sinks"),
    _mutant("the first warp alone", SINKS, "int warp = 1;", "int warp = kNumWarps;", "backward sinks"),
    _mutant("no barrier before the sums of warps are read", SINKS, "  ptx::sync_block();\n", "", "backward sinks"),
    # ---- Gradients of what makes scores, and only those that are asked for
    _mutant("no wait for tiles of pairs", SCORES, "    ptx::copy_async_wait<kNumStages - 1>();\n", "", "dbias shared"),
    _mutant("no barrier before tiles of pairs are read", SCORES,
            "    ptx::copy_async_wait<kNumStages - 1>();\n    ptx::sync_block();\n",
            "    ptx::copy_async_wait<kNumStages - 1>();\n", "dbias shared"),
    _mutant("no barrier before a stage of pairs is used again", SCORES,
            "    ptx::sync_block();\n    if (next.left > 0) load(stage);\n", "    if (next.left > 0) load(stage);\n",
            "dbias shared"),
    _mutant("dbias has the softcap's derivative", SCORES, "sums.dbias[m][n][i] += ds;",
            "sums.dbias[m][n][i] += ds * derivative;", "dbias"),
    _mutant("dbias of the last batch entry", SCORES, "sums.dbias[m][n][i] += ds;", "sums.dbias[m][n][i] = ds;",
            "dbias"),
    _mutant("a share goes to the place of the first", SCORES, "score_partials_of(params, index, split)[i]",
            "score_partials_of(params, index, 0)[i]", "dbias shared"),
    _mutant("rows are not summed", SCORES, "int row = 1; row < kBlockM;", "int row = kBlockM; row < kBlockM;",
            "dbias shared"),
    _mutant("columns of two lanes are not summed", SCORES, "        sum += ptx::shuffle_xor(sum, 2);\n", "",
            "dbias of queries"),
    _mutant("no barrier before a tile of dbias is read", SCORES,
            "  ptx::sync_block();\n#pragma unroll 1\n  for (int i =",
            "#pragma unroll 1\n  for (int i =", "dbias"),
    _mutant("dbias overwrites tiles that others read", SCORES,
            "  ptx::copy_async_wait<0>();\n  ptx::sync_block();\n  if constexpr (kNeedsDbias)",
            "  ptx::copy_async_wait<0>();\n  if constexpr (kNeedsDbias)", "dbias of queries",
            escapes="a barrier behind the products, in the loop, is the last that matters; this one is for copies"),
    _mutant("pairs of statistics taken for single ones", SCORES, "(kPairsStats ? row / 2 * 4 + row % 2 : row * 2)",
            "row * 2", "dbias in pairs of rows"),
    _mutant("statistics of rows that do not exist", SCORES, "exists ? stats[0] : ptx::infinity()", "stats[0]",
            "dbias in pairs of rows", escapes="with these tiles the row statistics reach as far"),
    _mutant("a slope pulls the other way", SCORES, "slope -= ds", "slope += ds", "sums"),
    _mutant("dscale without the softcap's derivative", SCORES, "ds * derivative * product", "ds * product", "sums"),
    _mutant("dsoftcap of the product", SCORES, "score.derivative_by_softcap(product)",
            "score.derivative_by_softcap(product * score.scale)", "sums"),
    _mutant("the series of dsoftcap is half of itself", "score.cuh", "(2 / (Real)3)", "(1 / (Real)3)", "sums of heads"),
    _mutant("sums of the first warp alone", SCORES, "for (int i = 0; i < kNumWarps; ++i)",
            "for (int i = 0; i < 1; ++i)", "sums"),
    _mutant("hidden tiles are not skipped", SCORES_TILES, "tiles.start <= n_block && n_block < tiles.stop", "true",
            "dbias shared", escapes="the mask makes zeros of them"),
    _mutant("tiles that a block mask leaves whole need no other mask", SCORES,
            "masked = now.n_block < tiles.full_start || now.n_block >= tiles.full_stop ||", "masked =", "dbias blocks"),
    _mutant("pairs of tiles that a block mask cuts all count", SCORES, "now.pairs_left(params) != Pairs::kAll",
            "now.pairs_left(params) == Pairs::kNone", "dbias blocks"),
    _mutant("tiles that a block mask cuts are skipped", SCORES_TILES, "pairs_left(params) != Pairs::kNone",
            "pairs_left(params) == Pairs::kAll", "dbias blocks"),
    _mutant("tiles of dbias have the blocks of the first head", SCORES_TILES, "BlockMask(params, batch, head)",
            "BlockMask(params, batch, 0)", "dbias blocks"),
    _mutant("a share starts at the first head", SCORES_TILES, "start(kSumsHeads, head, params.num_heads);", "",
            "dbias shared"),
    _mutant("every walk over heads starts a batch entry", SCORES_TILES,
            "if (!next(kSumsHeads, head, params.num_heads)) next", "next(kSumsHeads, head, params.num_heads); next",
            "dbias in pairs of rows"),
    _mutant("rows past the last are stored", SCORES_TILES, "(!kSumsQueries && row >= params.seqlen_q) || ", "",
            "dbias"),
    _mutant("dbias without the stride of heads", SCORES_TILES, "tile.head * dbias.head_stride + ", "", "dbias"),
    _mutant("parts of one batch entry after the other", SCORES_TILES,
            "i64 tile = (of_head * params.batch + batch) * num_m_blocks + m_block;",
            "i64 tile = ((i64)(quantity * params.batch + batch) * params.num_heads + head) * num_m_blocks + m_block;",
            "sums of heads"),
    _mutant("sums of one sequence over those of another", SCORES_TILES,
            "first_place_of_queries(batch, kBlockM) + m_block;", "m_block;", "packed sums"),
    _mutant("sums at places without a tile", SCORES_TILES, "num_n_blocks = has_queries(params, work) ? ",
            "num_n_blocks = true ? ", "packed sums", escapes="rows that do not exist have no weights"),
    _mutant("every sequence has the longest range of keys", SCORES_TILES, "left = num_n_blocks;\n      return;",
            "left = ceil_div(params.seqlen_k, kBlockN);\n      return;", "packed sums"),
    _mutant("slopes of the next sequence too", SCORES_REDUCE, "entry_at(params, batch + 1), 0) - parts",
            "entry_at(params, batch + 2), 0) - parts", "packed sums"),
    _mutant("the first share alone", SCORES_REDUCE, "split < params.score_splits", "split < 1", "dbias shared"),
    _mutant("slopes of the first batch entry", SCORES_REDUCE, "kSumsBatch ? of_head : of_entry", "of_entry",
            "sums of heads"),
    _mutant("dscale and dsoftcap change places", SCORES_REDUCE, "of_scale ? 1 : 2", "of_scale ? 2 : 1", "sums"),
    _mutant("dK is stored unasked", REDUCE, "  if constexpr (kNeedsDk)\n    store_tile", "  store_tile", "only dv"),
    _mutant("dP is left out with dV", B, "kNeedsDs = kNeedsDk || kDqByReduction;", "kNeedsDs = kDqByReduction;",
            "only dk"),
    _mutant("dK in the map of dV", B90, "params.dkv[kNeedsDk]", "params.dkv[kNeedsDk - 1]", "backward sm90"),
    _mutant("stages of dS are not given back", B90,
            "      arrive_as_warp(shared.ds_ring.empty(at));\n      if (produces)", "      if (produces)",
            "sm90 only dv"),
    _mutant("rooms of dS are not given back", B32,
            "      if (thread == 0) shared.room.ds_empty(room).arrive();\n      continue;", "      continue;",
            "pieces only dk"),
    # ---- Wide elements
    _mutant("pairs of A in the order of the manual", "fragments.cuh",
            "word[i][j] = row[k * (kStep / 8) + i][j / 2 + j % 2 * 2];",
            "word[i][j] = row[k * (kStep / 8) + i][j];", "forward float32"),
    _mutant("the next row without its swizzle", "fragments.cuh",
            "(address ^ row_swizzle<row>(0) ^ row_swizzle<row>(1)) + row;", "address + row;", "forward float64"),
    _mutant("the small part of A is forgotten", "fragments.cuh", "  multiply_add(sum, a.small, b.big, piece);\n", "",
            "forward float32"),
    _mutant("the small part of B is forgotten", "fragments.cuh", "  multiply_add(sum, a.big, b.small, piece);\n", "",
            "forward float32"),
    _mutant("the big part is cut off", "fragments.cuh", "ptx::bits_of(x) + 0x1000u)", "ptx::bits_of(x))",
            "forward float32", escapes="it costs two bits of twenty-four, less than luck decides in one case"),
    _mutant("paired columns stay apart", "mma.cuh", "Real pair[2] = {first[i] * f, second[kPaired ? i : i + 1] * f};",
            "Real pair[2] = {first[i] * f, second[i] * f};", "backward float32"),
    _mutant("paired rows stay apart", "mma.cuh", "2 * lane_row + half : lane_row + 8 * half;",
            "lane_row + 8 * half : lane_row + 8 * half;", "backward float32"),
    _mutant("every warp takes the first columns of O", F, "operand_v(s_v, warp_d);", "operand_v(s_v);",
            "forward float64"),
    _mutant("warps without queries store some", B, "if (has_queries) {\n        if", "if (true) {\n        if",
            "backward float64"),
    _mutant("the exponential to nine terms", "exponential.cuh", "double series = 2.5100424157005067e-08;",
            "double series = 0;", "forward float64"),
    _mutant("the exponent of two is off by one", "exponential.cuh", "ptx::bits_of(shifted) + 1023)",
            "ptx::bits_of(shifted) + 1022)", "backward float64"),
    _mutant("a lane's part of the steps counts twice", "exponential.cuh",
            "ptx::bits_of(root) - ((u64)(lane << kLaneShift) << 32)", "ptx::bits_of(root)", "forward float64"),
    _mutant("weights that vanish do not", "exponential.cuh", "is_vanishing(exponent) ? 0.0 : power + power * rest",
            "power + power * rest", "forward float64"),
    _mutant("the last columns' sum is added to the first", "mma.cuh", "d[m][2 * n + i / 4][i % 4] += sum",
            "d[m][i / 4][i % 4] += sum", "forward float64", "backward float64"),
    _mutant("natural exponents as powers of two", "exponential.cuh", "kWide ? exponent * kLog2e : exponent",
            "exponent", "forward float32"),
    _mutant("the logarithm is of a sum of two terms", "exponential.cuh", "n = 19; n >= 3;", "n = 5; n >= 3;",
            "forward float64"),
    _mutant("tanh near 0 by a difference from 1", "exponential.cuh", "const bool near = magnitude < (T)0.5;",
            "const bool near = false;", "forward float64",
            escapes="softcap times an error of 2^-53 is within the rule"),
    # ---- Dropout
    _mutant("nine rounds", DROPOUT, "round < 10;", "round < 9;", "dropout"),
    _mutant("half of the key stays", DROPOUT, "    key_high += 0xbb67ae85u;\n", "", "dropout"),
    _mutant("the words of the seed change places", DROPOUT, "philox(kept.word, seed_low, seed_high);",
            "philox(kept.word, seed_high, seed_low);", "dropout"),
    _mutant("all batch entries drop alike", DROPOUT, "head(batch * params.num_heads + head_),", "head(head_),",
            "dropout"),
    _mutant("the offset is forgotten", DROPOUT, "offset(params.offset),", "offset(0),", "dropout"),
    _mutant("the rate is halved", DROPOUT, "threshold(params.dropout_threshold << 16)",
            "threshold(params.dropout_threshold << 15)", "dropout"),
    _mutant("all pieces of columns drop alike", DROPOUT, "= of(query, key, first);", "= of(query, key);",
            "dropout"),
    _mutant("transposed weights by the halves of others", DROPOUT, "(transposed ? next_piece : down) == 0 ?",
            "down == 0 ?", "dropout backward"),
    _mutant("transposed weights by the words of others", DROPOUT, "(transposed ? down : next_piece)];",
            "next_piece];", "dropout backward"),
    _mutant("neighbours make the same call", DROPOUT, "rows_of(query) + odd + 4", "rows_of(query) + 4",
            "dropout backward"),
    _mutant("they swap with others", DROPOUT, "ptx::float_of(given), 4)", "ptx::float_of(given), 8)",
            "dropout backward"),
    _mutant("they keep what they have got", DROPOUT, "kept.word[2 + i] = odd ? own : got;", "kept.word[2 + i] = got;",
            "dropout backward"),
    # ---- Packed sequences
    _mutant("starts are not clamped", SEQUENCES, "sequence > 0 ? total : 0);",
            "sequence > 0 ? max_of(start, total) : 0);", "packed wild"),
    _mutant("negative starts are not clamped", SEQUENCES, "sequence > params.batch ? total : 0)",
            "sequence > params.batch ? total : start)", "packed negative"),
    _mutant("no rows are left", SEQUENCES, "sequence > params.batch ? total : 0)", "0)", "packed"),
    _mutant("a start behind the last one is read", SEQUENCES, "min_of(sequence, params.batch) * stride",
            "sequence * stride", "packed sm90"),
    _mutant("the rows that are left see keys", SEQUENCES,
            "is_left_over(params, batch) ? 0 : seqlen_k_of(params, batch);", "seqlen_k_of(params, batch);",
            "packed", "packed sm90"),
    _mutant("sequences have the diagonal of the last rows", SEQUENCES,
            "return seqlen_k_of(params, batch) - seqlen_q_of(params, batch);",
            "return params.seqlen_k - params.seqlen_q;", "packed"),
    _mutant("top left aligns the ends", SEQUENCES, "if constexpr (kAlignsEnds) return",
            "if constexpr (kIsPacked) return", "packed top left"),
    _mutant("all sequences have the first keys", SEQUENCES, "params.cu_seqlens_k_stride, params.seqlen_k, sequence);",
            "params.cu_seqlens_q_stride, params.seqlen_k, 0);", "packed"),
    _mutant("places for tiles meet", "schedule.cuh", "return query_start_of(batch) / rows + batch;",
            "return query_start_of(batch) / rows;", "packed", "packed backward"),
    _mutant("one place too few", "schedule.cuh", "seqlen / rows + params.batch + 1", "seqlen / rows + params.batch",
            "packed", "packed backward"),
    _mutant("the search ends a sequence too early", SCHEDULE, "last = (params.batch - first) >> shift;",
            "last = (params.batch - 1 - first) >> shift;", "packed"),
    _mutant("the search ends with the first 32 sequences", SCHEDULE,
            "  while (params.batch >> shift >= 32) shift += 5;\n", "", "packed many"),
    _mutant("the search starts over", SCHEDULE, "    first = found.index;\n", "", "packed many"),
    _mutant("a sequence is found by the place behind its first", SCHEDULE, "last_lane(first_place(own) <= place.block)",
            "last_lane(lane == 0 || first_place(own) < place.block)", "packed"),
    _mutant("all lanes hold the first sequence", SCHEDULE, "31 - ptx::leading_zeros(", "0 * ptx::leading_zeros(",
            "packed", "packed sm90"),
    _mutant("units that there are not", UNITS, "    count = count < places ? count : places;\n",
            "    count = places;\n", "packed sm90"),
    _mutant("units behind 32 sequences are not counted", UNITS,
            "    if (params.batch >= 32) count += count_behind(32);\n", "", "packed many sm90"),
    _mutant("units of the first 32 sequences alone", UNITS,
            "while (unit >= behind && first_sequence() + 32 <= params.batch)", "while (false)", "packed many sm90"),
    _mutant("units of other heads from the last sequences on", UNITS, "    if (unit < first) look_at(0, 0);\n", "",
            "packed many sm90"),
    _mutant("units of eight lanes are summed", UNITS, "distance < 32; distance", "distance < 8; distance",
            "packed many sm90"),
    _mutant("the second tile of a pair is left out", UNITS, "      if (from_start != from_end) put(work);\n", "",
            "packed sm90"),
    _mutant("pairs of the tiles of all sequences", UNITS,
            "from_end = ceil_div(seqlen_q_of(params, work.batch), kBlockM)",
            "from_end = ceil_div(params.seqlen_q, kBlockM)", "packed sm90"),
    _mutant("a tile is replaced before it is read", UNITS, "      ring.empty(at).wait(at.parity ^ 1);\n", "",
            "packed sm90"),
    _mutant("a tile is told of before it is there", UNITS, "      const Entry batch = work.batch;\n",
            "      const Entry batch = work.batch;\n      ring.full(at).arrive();\n", "packed sm90"),
    _mutant("a tile is read before it is there", UNITS, "    ring.full(at).wait(at.parity);\n", "", "packed sm90"),
    _mutant("a tile is given back before all lanes have read it", UNITS,
            "    const Bytes16 low = ", "    if (is_warp && ptx::thread_index() % 32 == 0) ring.empty(at).arrive();\n"
            "    const Bytes16 low = ", "packed sm90"),
    _mutant("nobody waits for the producer", F90, "shared.tiles.init(4 * kConsumers + 1);",
            "shared.tiles.init(4 * kConsumers);", "packed sm90"),
    _mutant("there is no end", UNITS, "  put({0, -1, {}});\n", "", "packed sm90"),
    _mutant("all blocks have the first keys", B90, "    found = KeyTile::find(params.common);\n", "",
            "packed backward sm90"),
    _mutant("turns of the wrong tile", "backward.cuh", "first_place_of_queries(batch, kBlockM) + m_block;",
            "query_start_of(batch) / kBlockM + m_block;", "packed backward", "packed backward sm90 in turn"),
    _mutant("statistics of the first sequence", "backward.cuh",
            "(i64)first_place_of_queries(batch, kStatsBlock) * kStatsBlock;", "0;", "packed deterministic"),
    _mutant("parts of the first sequence", "backward.cuh", "first_place_of_keys(batch, kBlockN) + n_block;",
            "n_block;", "packed backward split"),
    _mutant("overlap is not noticed", "backward.cuh", "return ptx::any_lane(decrease);", "return false;",
            "packed wild"),
    _mutant("overlap waits all the same", WALK, "if (*overlap_of(params, num_m_blocks)) num_steps = 0;", "",
            "packed wild"),
    _mutant("rows that are left have weights", DELTA, "is_left_over(params, batch) ? 0 : seqlen_q_of(params, batch);",
            "seqlen_q_of(params, batch);", "packed backward", escapes="they see no keys, and their lse is -inf"),
    _mutant("queries of the next sequence", F90, "zero_last_of_64<kBlockM, kDim>(s_q, row_stop, thread);", "",
            "packed sm90 full", escapes="only when sums are rescaled; test_neighbours_change_nothing has that"),
    _mutant("zeros of Q unfenced", F90, "(s_q, row_stop, thread);\n        ptx::fence_async_proxy();\n",
            "(s_q, row_stop, thread);\n", "packed sm90 full"),
    _mutant("Q from the start of the array", F90, "query_start_of(tile.work.batch) + tile.first_row,",
            "tile.first_row,", "packed sm90"),
    _mutant("the next sequence's rows are written", F90, "if (kIsPacked && row_stop < 64) {", "if (false) {",
            "packed sm90 full"),
    _mutant("one row too few is stored", TILES90, "i < count * kPieces; i += 128",
            "i + kPieces < count * kPieces; i += 128", "packed sm90 full"),
    _mutant("rows are stored without their swizzle", TILES90, "(piece % 8 * 16 ^ row % 8 * 16)", "piece % 8 * 16",
            "packed sm90 full"),
    _mutant("dO of the next sequence", B90, "          zero_last_of_64<kBlockM, kDimV>(s_do, valid, thread);\n", "",
            "packed backward sm90"),
    _mutant("Q of the next sequence", B90, "          zero_last_of_64<kBlockM, kDim>(s_q, valid, thread);\n", "",
            "packed backward sm90 roles"),
    _mutant("zeros of Q and dO unfenced", B90, "(s_do, valid, thread);\n          ptx::fence_async_proxy();\n",
            "(s_do, valid, thread);\n", "packed backward sm90"),
    _mutant("the other consumer does not wait for zeros", B90,
            "        ptx::sync_named(kAll, kConsumerThreads);\n      }\n    }\n    turns.take();",
            "      }\n    }\n    turns.take();", "packed backward sm90 roles"),
    _mutant("dk over the next sequence", B90,
            "const int rows = kIsPacked ? seqlen_k_of(common, batch) - first_key : 64;", "const int rows = 64;",
            "packed backward sm90 in turn window"),
    _mutant("weights are not marked", DROPOUT, "kept.keeps(n, i) ? weight[n][i] : -weight[n][i];", "weight[n][i];",
            "dropout backward sm90"),
    _mutant("marked weights are negative", DROPOUT, "return fabsf(weight) *", "return weight *",
            "dropout backward sm90 roles"),
    _mutant("dP is not dropped", DROPOUT, "(is_dropped(weight) ? 0.0f : dp)", "dp",
            "dropout backward pieces"),
    _mutant("sums are of what is kept", F, "    softmax.update(s, o, exponent_scale);\n",
            "    softmax.update(s, o, exponent_scale);\n    softmax.row_sum[0][0] *= 0.7f;\n", "dropout"),
    _mutant("rows of 16 drop alike", F, "dropout.drop(s[m], lane_row + 16 * m,", "dropout.drop(s[m], lane_row,",
            "dropout many rows"),
    _mutant("what is kept is not scaled", F90, "softmax.inverse_sum(0, 0) * kept_scale", "softmax.inverse_sum(0, 0)",
            "dropout sm90"),
    _mutant("nothing is dropped", F90, "      if constexpr (!kDropsLate) drop(n_block);\n", "", "dropout sm90"),
    _mutant("the weights of the next tile are dropped", F32, "lane_row, tile.keys.at(n_block) * kBlockN",
            "lane_row, (n_block + 1) * kBlockN", "dropout float32 sm90"),
    _mutant("dropped weights count in dV", B, "              p[m][n][i] = keeps ? p[m][n][i] : 0;\n", "",
            "dropout backward"),
    _mutant("dropped weights have a gradient", B, "dp = keeps ? ds[m][n][i] : 0;",
            "dp = ds[m][n][i];", "dropout backward"),
    _mutant("dV is not scaled", B, "dv, [&](int, int) { return kept_scale; });", "dv, [](int, int) { return 1.0f; });",
            "dropout backward"),
    _mutant("the sum of parts of dV is not scaled", REDUCE, "dv, [&](int, int) { return kept_scale; });",
            "dv, [](int, int) { return 1.0f; });", "dropout backward split"),
    _mutant("dq has weights of its own", DQ, "if (kHasDropout && n % 2 == 0) kept", "if (kHasDropout && n == 0) kept",
            "dropout deterministic"),
    _mutant("dropped weights are negative in dV", B90, "is_dropped(p[n][i]) ? 0.0f : p[n][i];", "p[n][i];",
            "dropout backward sm90"),
    _mutant("dV of two roles is not scaled", B90, "dv, kept_scale, kept_scale);", "dv, 1.0f, 1.0f);",
            "dropout backward sm90 roles"),
    _mutant("P' is handed over without marks", B32, "factor[i] = -factor[i], p[n][i] = 0.0f;", "p[n][i] = 0.0f;",
            "dropout backward pieces"),
    # ---- Block masks
    _mutant("a tile with some pairs has all", "mask.cuh",
            "return all ? Pairs::kAll : any ? Pairs::kSome : Pairs::kNone;", "return any ? Pairs::kAll : Pairs::kNone;",
            "forward blocks"),
    _mutant("lists of 32 tiles at most", LISTS, "+ (int)lane_index(); other += 32)",
            "+ (int)lane_index(); other += 320)", "forward many blocks"),
    _mutant("the last keys are visible wherever blocks are", LISTS,
            "left == Pairs::kAll && !full ? Pairs::kSome : left", "left", "forward many blocks"),
    _mutant("lanes are counted by their numbers", LISTS, "if (lane_index() & bit)", "if (lane_index() >= bit)",
            "forward blocks", "forward many blocks"),
    _mutant("blocks of the first head", LISTS, "const BlockMask blocks(params, batch, head);",
            "const BlockMask blocks(params, batch, 0);", "backward blocks"),
    _mutant("tiles past the range are listed", LISTS, "if (other >= range.stop) return Pairs::kNone;\n", "",
            "forward blocks"),
    _mutant("lists of the first head", "schedule.cuh", "(params.list_heads == 1 ? 0 : head);", "0;", "forward blocks"),
    _mutant("lists of the first batch entry", "schedule.cuh", "(params.list_batches == 1 ? 0 : (i64)batch",
            "(params.list_batches == 1 ? 0 : (i64)0", "sm90 blocks"),
    _mutant("a place is taken for a tile", "schedule.cuh",
            "    if constexpr (kHasBlockMask) return list[kListHeader + place];\n", "", "sm90 blocks"),
    _mutant("blocks of keys by rows", "mask.cuh", "blocks.has(row / kMaskBlockM, key / kMaskBlockN)",
            "blocks.has(row / kMaskBlockN, key / kMaskBlockM)", "forward blocks"),
    _mutant("empty lists are walked", LIST_WALK, "    while (head < stop_head && of(head)[0] == 0) ++head;\n", "",
            "backward sm90 blocks"),
    _mutant("every head has the steps of the first", LIST_WALK, "steps += queries.of(head)[0];",
            "steps += queries.of(first_head)[0];",
            "backward blocks"),
    _mutant("the first tile with hidden pairs is taken for full", LIST_WALK, "place >= queries.of(head)[1];",
            "place > queries.of(head)[1];", "backward sm90 blocks"),
    _mutant("the walk goes on where the list before ended", LIST_WALK, "place = 0, head = queries",
            "head = queries", "backward blocks"),
    _mutant("heads have the lists of the first", LIST_WALK, "lists + head * head_stride;", "lists;", "backward blocks"),
    _mutant("the last tile is looked for by its place", F90, "tile.keys.at(tile.keys.stop - 1) * kBlockN",
            "(tile.keys.stop - 1) * kBlockN", "sm90 blocks"),
    # ---- Pages
    _mutant("all entries have the first table", PAGES, " + batch * params.block_table.batch_stride),", "),",
            "forward pages"),
    _mutant("pages are looked up side by side", PAGES, "kKeysOfPage * stride];", "kKeysOfPage];",
            "forward strided pages"),
    _mutant("entries that are no page are followed", PAGES,
            "return page < 0 ? 0 : page < num_pages ? page : num_pages - 1;", "return page;", "forward wild pages"),
    _mutant("negative entries are followed", PAGES, "return page < 0 ? 0 : page < num_pages", "return page < num_pages",
            "forward wild pages"),
    _mutant("the page behind the last is taken for one", PAGES, "page < num_pages ? page : num_pages - 1;",
            "page <= num_pages ? page : num_pages - 1;", "forward wild pages"),
    _mutant("every row of a page is its first", PAGES, "Pages::row_in_page(key) * row_stride;", "0 * row_stride;",
            "forward pages"),
    _mutant("pages of the first head", PAGES, "+ head * tensor.head_stride),\n        page_stride",
            "),\n        page_stride", "forward pages"),
    _mutant("32-bit offsets of pages", PAGES, "pages.page_of(key) * page_stride",
            "pages.page_of(key) * (int)page_stride", "forward far pages"),
    _mutant("rows behind the last key are looked up", "copy.cuh", "if (exists) source = head.row",
            "source = head.row", "forward short table"),
    _mutant("columns of a looked up row from the first on", "copy.cuh", "first_row + row + i) + column;",
            "first_row + row + i);", "forward pages"),
    _mutant("the diagonal does not follow lengths", SEQUENCES,
            "return key_stop_of(params, batch) - params.seqlen_k;", "return 0;", "forward pages"),
    _mutant("the diagonal follows lengths that are aligned to the top left", SEQUENCES,
            "if constexpr (kFollowsLengths) return", "if constexpr (kPageSize != 0) return", "forward top left pages"),
    _mutant("tiles of the diagonal of all keys", "schedule.cuh",
            "const int right_offset = right_offset_of(params, batch);\n    stop =",
            "const int right_offset = params.right_offset;\n    stop =", "forward pages"),
    _mutant("the mask of the diagonal of all keys", "mask.cuh",
            "params.right_offset + own_diagonal", "params.right_offset", "forward pages"),
    _mutant("slopes from the diagonal of all keys", "score.cuh", "params.diagonal + own_diagonal",
            "params.diagonal", "forward top left pages", "forward strided pages"),
    _mutant("the page of the first box for all", KEYS, "key < key_stop ? pages.page_of(key)",
            "key < key_stop ? pages.page_of(n_block * kBlockN)", "decode pages"),
    _mutant("boxes without keys are looked up", KEYS,
            "page[i] = key < key_stop ? pages.page_of(key) : params.num_pages;",
            "page[i] = pages.page_of(key);", "decode short table"),
    _mutant("the last page where there are no keys", KEYS, ": params.num_pages;", ": params.num_pages - 1;",
            "decode pages", escapes="keys that do not exist are hidden whatever arrives"),
    _mutant("boxes in one place", KEYS, "(c * kBlockN + i * kBoxRows) * kLineBytes", "c * kBlockN * kLineBytes",
            "decode pages"),
    _mutant("every box from the start of its page", KEYS,
            "const int row = Pages::row_in_page(first_key + i * kBoxRows);",
            "const int row = 0;", "decode large pages"),
    _mutant("boxes of a page behind each other", KEYS, "(c * kBlockN + i * kBoxRows)", "(c * kBlockN + i * 16)",
            "decode pages"),
)
# fmt: on

SHARE_TO_CATCH = 0.9


def main() -> int:
    """Run the mutants that the command line asks for and print how each was caught, and the score."""
    words = " ".join(sys.argv[1:])
    chosen = [mutant for mutant in MUTANTS if words in f"{mutant.file} {mutant.what}"]
    if not chosen:
        print(f"no mutant's description holds {words!r}")
        return 1
    caught = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for mutant, report in zip(chosen, pool.map(Mutant.caught, chosen), strict=True):
            caught += report is not None
            verdict = "escaped" if report is None else " ".join(report.split())[:120]
            reason = f" ({mutant.escapes})" if mutant.escapes else ""
            print(f"{mutant.file:20} {mutant.what}: {verdict}{reason}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return int(caught < SHARE_TO_CATCH * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
