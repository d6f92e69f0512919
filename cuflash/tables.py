"""The tables of tiles, each row with the measurement behind it. The first row that serves a problem is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
)

Row = TypeVar("Row")


def _maker(kind: type[Row], fields: str) -> Callable[..., Row]:
    """Makes rows of which these fields are given by position, so that a table of them can be read."""

    def make(*values: Any, **others: Any) -> Row:
        return kind(**dict(zip(fields.split(), values, strict=True)), **others)

    return make


_forward = _maker(ForwardTile, "max_dim block_m block_n num_warps num_stages min_blocks fragments_ahead origin")
_forward_sm90 = _maker(
    ForwardSm90Tile,
    "max_dim block_m block_n num_stages ping_pong keep_before q_stages serves origin",
)
_forward_float32_sm90 = _maker(ForwardFloat32Sm90Tile, "max_dim block_m block_n num_stages ping_pong origin")
_backward = _maker(
    BackwardTile,
    "max_dim block_m block_n num_warps num_stages min_blocks warps_d dq_warps_m fragments_ahead origin",
)
_backward_sm90 = _maker(
    BackwardSm90Tile,
    "max_dim block_m block_n num_stages schedule origin",
)
_backward_float32_sm90 = _maker(BackwardFloat32Sm90Tile, "max_dim num_stages num_buffers dq_columns dq_late origin")
_dq = _maker(DqTile, "max_dim block_m block_n num_warps min_blocks origin")
_scores = _maker(ScoresTile, "max_dim block_m block_n num_warps num_stages min_blocks origin")
_decode = _maker(DecodeSm90Tile, "max_dim block_n num_stages min_blocks origin")


def _h200(here: str, flash_attention_2: str) -> str:
    return (
        f"on an H200 {here} TFLOP/s, FlashAttention-2 beside it {flash_attention_2} (seqlen 4096 full / causal, 1024 "
        "full / causal; bfloat16, batch x seqlen 16384, heads x head_dim 2048)"
    )


def _reads(one_query: float, heads: str, many: float, heads_of_many: str) -> str:
    return (
        f"on an H200 {one_query} TB/s (batch x heads {heads}, 8192 keys, one query) and {many} ({heads_of_many}, "
        "131072 keys, 16 queries), while the L2 cache wrote back what others had left"
    )


def _float32(here: str, torch: str) -> str:
    return (
        f"on an H200 {here} TFLOP/s, PyTorch's efficient attention {torch} (batch 2, heads 16, seqlen 4096, full / "
        "causal)"
    )


def _float64(here: float, torch: float) -> str:
    return (
        f"on an H200 {here} TFLOP/s, PyTorch's N x N formula {torch} (batch 2, heads 16, seqlen 2048, head_dim max_dim)"
    )


_SMALL = "for 100 KiB of shared memory; by arithmetic, not measured"
_MEDIUM = "for 164 KiB of shared memory; by arithmetic, not measured"
_MEDIUM_OR_SMALL = "for 164 or 100 KiB of shared memory; by arithmetic, not measured"
_ARITHMETIC = "by arithmetic, not measured"

# Rows serve elements of `element_bytes`: 2 unless they say otherwise. Registers hold half or a quarter as many wide
# elements, so these get smaller tiles, and at large head dimensions several warps to a row.
# fmt: off
FORWARD_TILES = (
    #        max_dim  m    n  warps stages blocks ahead
    _forward(64,  128, 64,  4, 1, 3, 2, _h200("331 / 314, 320 / 253", "296 / 278, 287 / 215")),
    _forward(96,  128, 64,  4, 1, 2, 2, _h200("379 / 342, 340 / 263", "344 / 310, 317 / 248")),
    _forward(128, 128, 64,  4, 1, 2, 2, _h200("384 / 376, 372 / 291", "334 / 295, 328 / 249")),
    _forward(128, 128, 32,  4, 1, 2, 2, _SMALL),
    _forward(192, 128, 128, 8, 1, 1, 0, _h200("348 / 307, 317 / 245", "321 / 276, 293 / 227")),
    _forward(192, 64,  64,  4, 1, 1, 2, _SMALL),
    _forward(256, 128, 128, 8, 1, 1, 0, _h200("342 / 329, 318 / 258", "317 / 281, 307 / 249")),
    _forward(256, 128, 64,  8, 1, 1, 0, _h200("323 / 279, 300 / 229", "326 / 284, 306 / 246")),
    _forward(256, 64,  32,  4, 1, 1, 2, _SMALL),

    _forward(64,  128, 32,  4, 2, 2, 1, _ARITHMETIC, element_bytes=4),
    _forward(64,  64,  64,  4, 1, 1, 1, _SMALL, element_bytes=4),
    _forward(128, 128, 32,  4, 1, 2, 1, _ARITHMETIC, element_bytes=4),
    _forward(128, 64,  32,  4, 1, 1, 1, _MEDIUM_OR_SMALL, element_bytes=4),
    _forward(192, 64,  32,  4, 1, 1, 1, _ARITHMETIC, element_bytes=4),
    _forward(256, 64,  16,  4, 1, 1, 1, _ARITHMETIC, element_bytes=4),

    _forward(64,  128, 48,  8, 1, 1, 0, _float64(38.5, 12.3), element_bytes=8),
    _forward(64,  64,  32,  4, 1, 1, 0, _SMALL, element_bytes=8),
    _forward(128, 128, 32,  8, 1, 1, 0, _float64(42.2, 20.6), element_bytes=8),
    _forward(128, 64,  16,  4, 1, 1, 0, _SMALL, element_bytes=8),
    _forward(192, 64,  16,  8, 1, 1, 0, _ARITHMETIC, element_bytes=8, warps_d=2),
    _forward(192, 32,  16,  4, 1, 1, 0, _SMALL, element_bytes=8, warps_d=2),
    _forward(256, 64,  16,  8, 1, 1, 0, _ARITHMETIC, element_bytes=8, warps_d=2),
    _forward(256, 32,  16,  4, 1, 1, 0, _MEDIUM, element_bytes=8, warps_d=2),
    _forward(256, 16,  16,  2, 1, 1, 0, _SMALL, element_bytes=8, warps_d=2),
)

FORWARD_SM90_TILES = (
    #            max_dim  m    n   stages pingp  keep  Q  serves
    _forward_sm90(64,     128, 128, 2,    True,  True,  2, "whole blocks",
                  "on an H200 497 TFLOP/s with all blocks of 128 x 128 kept, FlexAttention 270 (seqlen 16384)"),
    _forward_sm90(64,     256, 64,  3,    False, False, 2, "no terms",
                  _h200("584 / 563, 541 / 412", "289 / 280, 287 / 216")),
    _forward_sm90(64,     192, 64,  3,    False, False, 2, "any", _ARITHMETIC),
    _forward_sm90(128,    192, 80,  2,    True,  True,  2, "long full",
                  "on an H200 788 and 753 TFLOP/s, 128 x 128 beside it 778 and 724 (seqlen 4096 and 16384 full)"),
    _forward_sm90(128,    128, 128, 2,    True,  True,  2, "no terms",
                  "on an H200 694 TFLOP/s causal at seqlen 4096, 674 / 495 full / causal at 1024, FlashAttention-2 "
                  "beside it 297, 332 / 247"),
    _forward_sm90(128,    128, 64,  3,    True,  True,  2, "any", _ARITHMETIC),
    _forward_sm90(192,    128, 96,  2,    True,  True,  1, "any",
                  "on an H200 817 / 728, 689 / 502 TFLOP/s, 128 x 112 with the output in the buffer of Q beside it "
                  "786 / 703, 620 / 461 (seqlen 4096 full / causal, 1024 full / causal; 10 heads)"),
    _forward_sm90(256,    128, 64,  2,    True,  True,  1, "any",
                  _h200("798 / 745, 718 / 544", "296 / 271, 307 / 249")),
)

FORWARD_FLOAT32_SM90_TILES = (
    #                    max_dim m   n   stages ping_pong
    _forward_float32_sm90(64,  128, 128, 1,    False, _float32("121 / 110", "33.2 / 30.2")),
    _forward_float32_sm90(128, 128, 64, 1,     True,  _float32("123 / 112", "44.0 / 42.1")),
)

# The same for precision="tf32".
FORWARD_TF32_SM90_TILES = (
    _forward_float32_sm90(64,  128, 192, 1,    False, _float32("209 / 183", "33.2 / 30.2"), bf16_parts=2),
    _forward_float32_sm90(128, 128, 112, 1,    True,  _float32("221 / 193", "44.0 / 42.1"), bf16_parts=2),
)

# Memory of an H200 brings a multiprocessor 36 bytes in a nanosecond, after a microsecond: 64 KiB and more must be on
# their way, beside the tiles in use.
DECODE_SM90_TILES = (
    #       max_dim n   stages blocks
    _decode(64,  128, 2, 2, _reads(3.95, "32 x 32/8", 3.75, "2 x 32/8")),
    _decode(128, 128, 2, 1,
            "on an H200 4.33 TB/s (batch x heads 16 x 32/8, 8192 keys, one query), 4.05, 4.11 and 4.03 (1 x 32/8, "
            "131072 keys, 1, 4 and 16 queries); a copy 4.24"),
    _decode(192, 64,  4, 1, _ARITHMETIC),
    _decode(256, 64,  2, 1, _reads(3.87, "8 x 32/8", 3.75, "1 x 16/4")),
)

BACKWARD_SM90_TILES = (
    #             max_dim m   n   stages schedule
    _backward_sm90(64,  64, 128, 3,     "kHoldK",
                   _h200("579 / 526, 478 / 348", "258 / 235, 243 / 186")),
    _backward_sm90(128, 64, 128, 3,     "kSharedDs",
                   _h200("608 / 579, 512 / 371", "266 / 259, 255 / 208")),
    _backward_sm90(256, 64, 64,  2,     "kSplitRoles",
                   _h200("466 / 450, 394 / 301", "239 / 224, 227 / 181")),
)

# Tiles of 64 keys and 64 queries; the products of parts count as one.
BACKWARD_FLOAT32_SM90_TILES = (
    #                     max_dim stages buffers columns of dq, late
    _backward_float32_sm90(64,  2, 2, 64, False, _float32("114 / 111", "34.1 / 31.1")),
    _backward_float32_sm90(128, 1, 1, 64, True,  _float32("121 / 114", "35.7 / 34.2")),
)

BACKWARD_TF32_SM90_TILES = (
    _backward_float32_sm90(64,  3, 2, 64, False, _float32("175 / 162", "34.1 / 31.1"), bf16_parts=2),
    _backward_float32_sm90(128, 2, 2, 64, True,  _float32("199 / 184", "35.7 / 34.2"), bf16_parts=2),
)

BACKWARD_TILES = (
    #         max_dim m   n  warps stages blocks warps_d dq_warps_m ahead
    _backward(64,  32, 128, 4, 2, 2, 1, 1, 2, _h200("329 / 313, 300 / 232", "271 / 243, 243 / 184")),
    _backward(64,  32, 128, 4, 2, 1, 1, 1, 2, _SMALL),
    _backward(96,  64, 128, 8, 2, 1, 2, 4, 0, _h200("285 / 261, 255 / 198", "291 / 241, 255 / 180")),
    _backward(96,  32, 64,  4, 2, 1, 1, 2, 0, _SMALL),
    _backward(128, 64, 128, 8, 2, 1, 2, 2, 0, _h200("323 / 301, 289 / 224", "297 / 271, 261 / 205")),
    _backward(128, 32, 64,  4, 2, 1, 1, 1, 0, _SMALL),
    _backward(192, 64, 64,  8, 2, 1, 4, 2, 0, _h200("246 / 231, 223 / 185", "254 / 245, 224 / 190")),
    _backward(192, 32, 64,  8, 2, 1, 2, 2, 0, _MEDIUM),
    _backward(192, 32, 32,  4, 2, 1, 2, 2, 0, _SMALL),
    _backward(256, 64, 64,  8, 2, 1, 4, 4, 0, _h200("255 / 250, 231 / 201", "253 / 228, 225 / 180")),
    _backward(256, 32, 64,  8, 2, 1, 2, 1, 0, _MEDIUM),
    _backward(256, 32, 32,  4, 1, 1, 2, 2, 0, _SMALL),

    _backward(64,  32, 64,  4, 2, 2, 1, 2, 1, _ARITHMETIC, element_bytes=4),
    _backward(64,  32, 64,  4, 2, 1, 1, 2, 1, _SMALL, element_bytes=4),
    _backward(128, 32, 64,  8, 2, 1, 2, 2, 1, _ARITHMETIC, element_bytes=4),
    _backward(128, 32, 32,  4, 1, 1, 2, 2, 1, _SMALL, element_bytes=4),
    _backward(192, 32, 64,  8, 1, 1, 2, 2, 1, _ARITHMETIC, element_bytes=4),
    _backward(192, 32, 16,  2, 1, 1, 2, 2, 1, _SMALL, element_bytes=4),
    _backward(256, 32, 64,  8, 1, 1, 2, 2, 1, _ARITHMETIC, element_bytes=4),
    _backward(256, 32, 32,  4, 1, 1, 2, 2, 1, _MEDIUM, element_bytes=4),
    _backward(256, 16, 16,  2, 1, 1, 2, 1, 1, _SMALL, element_bytes=4),

    _backward(64,  16, 64,  4, 2, 1, 1, 1, 0, _float64(39.4, 28.5), element_bytes=8),
    _backward(64,  32, 32,  4, 1, 1, 2, 2, 0, _SMALL, element_bytes=8),
    _backward(128, 32, 64,  8, 1, 1, 2, 2, 0, _float64(36.5, 41.4), element_bytes=8),
    _backward(128, 32, 32,  4, 1, 1, 2, 2, 0, _MEDIUM, element_bytes=8),
    _backward(192, 16, 16,  4, 1, 1, 4, 1, 0, _ARITHMETIC, element_bytes=8),
    _backward(192, 16, 16,  2, 1, 1, 2, 1, 0, _SMALL + ", up to head_dim 160", element_bytes=8),
    _backward(256, 16, 32,  8, 1, 1, 4, 1, 0, _ARITHMETIC, element_bytes=8),
    _backward(256, 16, 16,  4, 1, 1, 4, 1, 0, _MEDIUM, element_bytes=8),
)

# The numbers are those of the whole deterministic backward pass.
DQ_TILES = (
    #   max_dim m    n  warps blocks
    _dq(64,  128, 64, 4, 2, _h200("272 / 261, 259 / 204", "271 / 243, 243 / 184")),
    _dq(64,  64,  64, 4, 2, _SMALL),
    _dq(128, 128, 32, 4, 1, _h200("260 / 251, 246 / 197", "297 / 271, 261 / 205")),
    _dq(192, 64,  32, 4, 2, "two blocks of 96 KiB; by arithmetic, not measured"),
    _dq(192, 64,  32, 4, 1, _SMALL),
    _dq(256, 128, 32, 8, 1, _h200("213 / 208, 198 / 173", "253 / 228, 225 / 180")),
    _dq(256, 64,  32, 4, 1, _MEDIUM),
    _dq(256, 32,  16, 2, 1, _SMALL),

    _dq(64,  64,  32, 4, 1, _ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _dq(128, 64,  16, 4, 1, _ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _dq(192, 64,  16, 4, 1, _ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _dq(192, 32,  16, 2, 1, _SMALL, element_bytes=4, fragments_ahead=1),
    _dq(256, 64,  16, 4, 1, _ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _dq(256, 32,  16, 2, 1, _MEDIUM, element_bytes=4, fragments_ahead=1),
    _dq(256, 32,  16, 2, 1, _SMALL, element_bytes=4, fragments_ahead=1, num_stages=1),

    _dq(64,  64,  16, 4, 1, _ARITHMETIC, element_bytes=8),
    _dq(128, 64,  16, 4, 1, _ARITHMETIC, element_bytes=8),
    _dq(128, 32,  16, 4, 1, _MEDIUM, element_bytes=8, warps_d=2),
    _dq(128, 16,  16, 2, 1, _SMALL, element_bytes=8, warps_d=2),
    _dq(192, 32,  16, 4, 1, _ARITHMETIC, element_bytes=8, warps_d=2),
    _dq(192, 16,  16, 2, 1, _SMALL, element_bytes=8, warps_d=2, num_stages=1),
    _dq(256, 16,  16, 4, 1, _ARITHMETIC, element_bytes=8, warps_d=4),
    _dq(256, 16,  16, 4, 1, _MEDIUM, element_bytes=8, warps_d=4, num_stages=1),
)

SCORES_TILES = (
    #       max_dim m    n  warps stages blocks
    _scores(64,  128, 64, 8, 2, 1, _ARITHMETIC),
    _scores(128, 128, 64, 8, 2, 1, _ARITHMETIC),
    _scores(128, 64,  32, 4, 2, 1, _SMALL),
    _scores(256, 64,  32, 4, 2, 1, _ARITHMETIC),
    _scores(256, 64,  32, 4, 1, 1, _SMALL),

    _scores(64,  64,  32, 4, 2, 1, _ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _scores(128, 64,  32, 4, 2, 1, _ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _scores(128, 64,  32, 4, 1, 1, _SMALL, element_bytes=4, fragments_ahead=1),
    _scores(256, 64,  32, 4, 1, 1, _ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _scores(256, 32,  16, 2, 1, 1, _SMALL, element_bytes=4, fragments_ahead=1),

    _scores(64,  64,  16, 4, 2, 1, _ARITHMETIC, element_bytes=8),
    _scores(64,  64,  16, 4, 1, 1, _SMALL, element_bytes=8),
    _scores(128, 64,  16, 4, 1, 1, _ARITHMETIC, element_bytes=8),
    _scores(128, 32,  16, 2, 1, 1, _SMALL, element_bytes=8),
    _scores(256, 32,  16, 2, 1, 1, _ARITHMETIC, element_bytes=8),
    _scores(256, 16,  16, 1, 1, 1, _MEDIUM, element_bytes=8),
)
# fmt: on
