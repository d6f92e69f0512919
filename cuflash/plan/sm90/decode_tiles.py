"""Tiles of the decode kernels for compute capability 9.0, and their tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from cuflash.plan.key_splits import DECODE_ROWS
from cuflash.plan.tensor_map import LINE_BYTES
from cuflash.plan.tiles import ANY, ARITHMETIC, Condition, Fit, Tile, by_name, chunked_bytes, h200_decode, maker

SHORT_BYTES = 2**20  # of keys and values, for each SM


@dataclass(frozen=True, kw_only=True)
class DecodeSm90Tile(Tile):
    """One way to stream a KV cache past the queries, for compute capability 9.0. One warpgroup owns all rows."""

    max_dim: int
    block_m: int = DECODE_ROWS
    block_n: int
    num_stages: int
    min_blocks: int
    origin: str = field(compare=False)

    variations: ClassVar = {"block_n": (32, 64, 128), "num_stages": (2, 3, 4), "min_blocks": (1, 2)}

    element_bytes = 2
    dim_multiple = 16
    num_warps = 5  # four for the consumer, and the producer
    fragments_ahead = 0

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m == DECODE_ROWS, "the rows of one product"),
            (self.block_n % 16 == 0 and self.block_n <= 256, "a block_n that one product serves"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        keys = sum(chunked_bytes(self.block_n, d) for d in (dim, dim_v))
        return chunked_bytes(self.block_m, dim) + self.num_stages * keys + 8 * (2 + 4 * self.num_stages)


def _is_short(fit: Fit) -> bool:
    problem = fit.problem
    if problem.batch_invariant:
        return False
    row_bytes = problem.head_dim + problem.head_dim_v
    key_bytes = problem.batch * problem.num_heads_kv * problem.seqlen_k * row_bytes
    return bool(key_bytes <= SHORT_BYTES * fit.device.num_sms)


@dataclass(frozen=True, kw_only=True)
class DecodeFloat8Sm90Tile(DecodeSm90Tile):
    """The same with fp8 keys and values. Four warps divide the rows and keys, 16 rows and 32 keys at a time."""

    serves: str = "any"

    conditions: ClassVar = by_name(
        ANY, Condition("short", _is_short, f"at most {SHORT_BYTES >> 10} KiB of keys and values for each SM")
    )
    variations: ClassVar = {"block_n": (32, 64, 128), "num_stages": (2, 3, 4, 6), "min_blocks": (1, 2)}

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m == DECODE_ROWS, "16 rows for each warp"),
            (self.block_n % 32 == 0 and self.block_n <= 256, "32 keys, or a multiple, that one box holds"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        keys = sum(-(-d // LINE_BYTES) * self.block_n * LINE_BYTES for d in (dim, dim_v))
        out, statistics = -(-dim_v // 32) * 2048, 144  # what a warp hands over of 16 rows
        q = max(chunked_bytes(self.block_m, dim), 2 * out)
        return q + self.num_stages * keys + 8 * (2 + 4 * self.num_stages) + 2 * statistics


_decode = maker(DecodeSm90Tile, "max_dim block_n num_stages min_blocks origin")
_decode_float8 = maker(DecodeFloat8Sm90Tile, "max_dim block_n num_stages min_blocks origin")

# fmt: off
# Memory of an H200 brings an SM 36 bytes in a nanosecond, after a microsecond. So 36 KB must always be in
# flight, and stages have 64 KiB and more, with the tiles in use.
DECODE_SM90_TILES = (
    #       max_dim n   stages blocks
    _decode(64,  128, 2, 2, h200_decode(3.95, "32 x 32/8", 3.75, "2 x 32/8")),
    _decode(128, 128, 2, 1,
            "on an H200 4.33 TB/s (batch x heads 16 x 32/8, 8192 keys, one query), 4.05, 4.11 and 4.03 (1 x 32/8, "
            "131072 keys, 1, 4 and 16 queries); a copy 4.24"),
    _decode(192, 64,  4, 1, ARITHMETIC),
    _decode(256, 64,  2, 1, h200_decode(3.87, "8 x 32/8", 3.75, "1 x 16/4")),
)

# With fp8 keys and values, as many bytes must be in flight. Where two blocks fit on an SM they were
# faster than one for long caches, and slower for short ones.
DECODE_FLOAT8_SM90_TILES = (
    #              max_dim n   stages blocks
    _decode_float8(64,  128, 3, 2,
                   "on an H200 3.86 TB/s, one resident block 2.81 (batch x heads 16 x 32/8, 32768 keys)"),
    _decode_float8(128, 128, 3, 1,
                   "on an H100 20.4 and 42.8 us, two blocks 22.7 and 45.7 (1 x 32/8, 8192 and 32768 keys)",
                   serves="short"),
    _decode_float8(128, 128, 3, 2,
                   "on an H200 0.52 and 0.56 of the time of bfloat16 (batch x heads 16 x 32/8, 32768 keys; 1 x 32/8, "
                   "131072), one resident block 0.54 and 0.60"),
    _decode_float8(256, 128, 2, 1, "on an H200 3.76 TB/s (batch x heads 8 x 16/4, 32768 keys)"),
)
# fmt: on
