"""Ways to cut the passes into tiles: tables of rows that check themselves, each with the measurement behind it.

A row serves head dimensions up to its `max_dim`, of elements of its size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from cuflash.problem import Problem
from cuflash.tensor_map import CHUNK

LONG_SEQLEN = 2048  # from which on larger tiles of keys, or of queries, pay
DECODE_ROWS = 64  # of one product, which hold the few queries of all heads that share keys


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tile_bytes(rows: int, columns: int, element_bytes: int) -> int:
    """Shared memory of a tile, in lines of 128 bytes or parts of one; kernels/config.cuh has the same."""
    row = columns * element_bytes
    if element_bytes > 2 or row > 64:
        return rows * round_up(row, 128)
    return rows * (64 if row > 32 else 32)


@dataclass(frozen=True, kw_only=True)
class ForwardTile:
    """One way to cut the forward pass. A block owns block_m queries; warps_d warps share a piece of them."""

    element_bytes: int = 2
    max_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    min_blocks: int  # blocks that must be resident on one multiprocessor
    warps_d: int = 1  # warps along the columns of the output
    fragments_ahead: int  # fragments of B that are loaded ahead of the product that needs them
    origin: str = field(compare=False)  # the measurement or the arithmetic that put the row here

    def __post_init__(self) -> None:
        _check_row(self, self.num_warps % self.warps_d == 0, "warps_d divides num_warps")
        _check_row(self, self.block_m * self.warps_d % (16 * self.num_warps) == 0, "whole fragments for every warp")

    @property
    def dim_multiple(self) -> int:
        """Head dimensions are padded so that every warp gets the same number of 16-wide pieces of their columns."""
        return 16 * self.warps_d

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        size = self.element_bytes
        q = tile_bytes(self.block_m, max(dim, dim_v), size)
        return q + self.num_stages * (tile_bytes(self.block_n, dim, size) + tile_bytes(self.block_n, dim_v, size))

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {"CUFLASH_WARPS_D": self.warps_d}


@dataclass(frozen=True, kw_only=True)
class BackwardTile:
    """One way to cut the backward pass. A block owns block_n keys; warps_d warps share the rows of a piece of them."""

    element_bytes: int = 2
    max_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    min_blocks: int
    warps_d: int  # warps along the columns of dk and dv
    dq_warps_m: int  # warps along the rows of dq; the others share its columns
    fragments_ahead: int
    origin: str = field(compare=False)

    def __post_init__(self) -> None:
        warps_n = self.num_warps // self.warps_d
        _check_row(self, warps_n * self.warps_d == self.num_warps, "warps_d divides num_warps")
        _check_row(self, self.block_n % (16 * warps_n) == 0, "whole fragments of keys for every warp")
        _check_row(self, self.block_m % (16 * self.warps_q) == 0, "whole pairs of pieces of queries for every warp")
        _check_row(self, self.num_warps % self.dq_warps_m == 0, "dq_warps_m divides num_warps")
        _check_row(self, self.block_m % (16 * self.dq_warps_m) == 0, "whole fragments of dq for every warp")

    @property
    def warps_q(self) -> int:
        """Warps along the queries of a piece of keys: of the warps_d, as many as there are queries for."""
        return min(self.warps_d, self.block_m // 16)

    @property
    def dim_multiple(self) -> int:
        """Head dimensions are padded so that every warp gets the same number of 16-wide pieces of their columns."""
        return 16 * max(self.warps_d, self.num_warps // self.dq_warps_m)

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        size = self.element_bytes
        keys = tile_bytes(self.block_n, dim, size) + tile_bytes(self.block_n, dim_v, size)
        stats = self.block_m * 2 * max(size, 4)
        queries = tile_bytes(self.block_m, dim, size) + tile_bytes(self.block_m, dim_v, size) + stats
        return keys + self.num_stages * queries + 2 * tile_bytes(self.block_n, self.block_m, size)

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {
            "CUFLASH_WARPS_D": self.warps_d,
            "CUFLASH_WARPS_Q": self.warps_q,
            "CUFLASH_DQ_WARPS_M": self.dq_warps_m,
        }


@dataclass(frozen=True, kw_only=True)
class DqTile:
    """One way to cut the kernel that computes dq in a fixed order. A block owns block_m queries."""

    element_bytes: int = 2
    max_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 2
    min_blocks: int
    warps_d: int = 1  # warps along the columns of dq
    fragments_ahead: int = 0
    origin: str = field(compare=False)

    def __post_init__(self) -> None:
        _check_row(self, self.num_warps % self.warps_d == 0, "warps_d divides num_warps")
        _check_row(self, self.block_m * self.warps_d % (16 * self.num_warps) == 0, "whole fragments for every warp")

    @property
    def dim_multiple(self) -> int:
        """Head dimensions are padded so that every warp gets the same number of 16-wide pieces of their columns."""
        return 16 * self.warps_d

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        size = self.element_bytes
        keys = tile_bytes(self.block_n, dim, size) + tile_bytes(self.block_n, dim_v, size)
        queries = tile_bytes(self.block_m, dim, size) + tile_bytes(self.block_m, dim_v, size)
        return queries + self.num_stages * keys

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {
            "CUFLASH_WARPS_D": 1,
            "CUFLASH_WARPS_Q": 1,
            "CUFLASH_DQ_WARPS_M": self.num_warps // self.warps_d,
        }


@dataclass(frozen=True, kw_only=True)
class ForwardSm90Tile:
    """One way to cut the forward pass for compute capability 9.0. A warpgroup owns 64 of the block_m queries."""

    max_dim: int
    block_m: int
    block_n: int
    num_stages: int
    ping_pong: bool  # consumers take turns at issuing products
    keep_before: bool  # the softmax is kept in front of the wait for the product before it
    lazy_maximum: bool  # the maximum of a row is looked for only where a sum became too large
    out_takes_q: bool  # the output leaves through the shared memory of Q
    serves: Literal["any", "no terms", "long full", "short"] = "any"
    origin: str = field(compare=False)

    element_bytes = 2
    dim_multiple = 16
    min_blocks = 1
    fragments_ahead = 0

    def __post_init__(self) -> None:
        _check_row(self, self.block_m in (128, 192, 256), "64 queries for each of two to four consumers")
        _check_row(self, self.block_n % 16 == 0 and self.block_n <= 256, "a block_n that one product serves")

    @property
    def num_warps(self) -> int:
        """Those of the consumers and of the producer."""
        return self.block_m // 16 + 4

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        q, out = (_chunked_bytes(self.block_m, d) for d in (dim, dim_v))
        k, v = (_chunked_bytes(self.block_n, d) for d in (dim, dim_v))
        barriers = 8 * (2 + 4 * self.num_stages) + 16
        return (max(q, out) if self.out_takes_q else q + out) + self.num_stages * (k + v) + barriers

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {
            "CUFLASH_PING_PONG": int(self.ping_pong),
            "CUFLASH_KEEP_BEFORE": int(self.keep_before),
            "CUFLASH_LAZY_MAXIMUM": int(self.lazy_maximum),
            "CUFLASH_OUT_TAKES_Q": int(self.out_takes_q),
        }

    def suits(self, problem: Problem) -> bool:
        """Whether the row is meant for a problem of this length and mask."""
        terms = (problem.softcap, problem.alibi_slopes, problem.bias, problem.mask)
        no_terms = all(term is None for term in terms)
        is_long = problem.seqlen_k >= LONG_SEQLEN
        return {
            "any": True,
            "no terms": no_terms,
            "long full": no_terms and is_long and problem.window_right is None,
            "short": not is_long,
        }[self.serves]


@dataclass(frozen=True, kw_only=True)
class ForwardFloat32Sm90Tile:
    """One way to cut the forward pass of float32 for compute capability 9.0, of operands in pieces of bfloat16.

    A warpgroup owns 64 of the block_m queries.
    """

    max_dim: int
    block_m: int
    block_n: int
    num_stages: int
    ping_pong: bool  # consumers take turns at issuing products
    pieces: int = 3  # of a float32; two are for TF32's precision
    origin: str = field(compare=False)

    element_bytes = 4
    dim_multiple = 16
    min_blocks = 1
    fragments_ahead = 0

    def __post_init__(self) -> None:
        _check_row(self, self.block_m in (128, 192), "64 queries for each of two or three consumers")
        _check_row(self, self.pieces in (2, 3), "two or three pieces")
        _check_row(self, self.block_n % 16 == 0 and self.block_n <= 256, "a block_n that one product serves")

    @property
    def num_warps(self) -> int:
        """Those of the consumers and of the producer."""
        return self.block_m // 16 + 4

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        q, k, v = (
            _chunked_bytes(self.block_m, dim),
            _chunked_bytes(self.block_n, dim),
            _chunked_bytes(self.block_n, dim_v),
        )
        return self.pieces * (q + self.num_stages * (k + v)) + 8 * (2 + 4 * self.pieces * self.num_stages)

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {"CUFLASH_PING_PONG": int(self.ping_pong), "CUFLASH_PIECES": self.pieces}


@dataclass(frozen=True, kw_only=True)
class DecodeSm90Tile:
    """One way to stream the keys past few queries, for compute capability 9.0. One warpgroup owns all rows."""

    max_dim: int
    block_m: int = DECODE_ROWS
    block_n: int
    num_stages: int
    min_blocks: int
    origin: str = field(compare=False)

    element_bytes = 2
    dim_multiple = 16
    num_warps = 5  # those of the consumer, and the producer
    fragments_ahead = 0

    def __post_init__(self) -> None:
        _check_row(self, self.block_m == DECODE_ROWS, "the rows of one product")
        _check_row(self, self.block_n % 16 == 0 and self.block_n <= 256, "a block_n that one product serves")

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        q_out = _chunked_bytes(self.block_m, max(dim, dim_v))
        k, v = (_chunked_bytes(self.block_n, d) for d in (dim, dim_v))
        return q_out + self.num_stages * (k + v) + 8 * (1 + 4 * self.num_stages)

    def defines(self) -> dict[str, int]:
        return _tile_defines(self)


@dataclass(frozen=True, kw_only=True)
class BackwardSm90Tile:
    """One way to cut the backward pass for compute capability 9.0. A warpgroup, or two, own 64 of the block_n keys."""

    max_dim: int
    block_m: int
    block_n: int
    num_stages: int
    dp_early: bool  # dP is issued at the start of a step, not behind the products of the step before
    splits_roles: bool  # one warpgroup makes P and dv, another dS and dk, of the same keys
    holds_k: bool  # consumers keep K in registers
    origin: str = field(compare=False)

    element_bytes = 2
    num_warps = 12  # those of two consumers and of dq
    dim_multiple = 64
    min_blocks = 1
    fragments_ahead = 0

    def __post_init__(self) -> None:
        keys = 64 if self.splits_roles else 128
        _check_row(self, self.block_n == keys, "64 keys for two consumers, or for each of them")
        _check_row(self, self.block_m == 64, "64 queries for one product")

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        keys = _chunked_bytes(self.block_n, dim) + _chunked_bytes(self.block_n, dim_v)
        queries = _chunked_bytes(self.block_m, dim) + _chunked_bytes(self.block_m, dim_v) + self.block_m * 8
        ds = 2 * _chunked_bytes(self.block_n, self.block_m)
        p = self.block_n * self.block_m * 4 if self.splits_roles else 0
        barriers = 8 * (2 + 4 * self.num_stages + 4 + 2 * self.splits_roles)
        return keys + self.num_stages * queries + ds + p + barriers

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {
            "CUFLASH_DP_EARLY": int(self.dp_early),
            "CUFLASH_SPLITS_ROLES": int(self.splits_roles),
            "CUFLASH_HOLDS_K": int(self.holds_k),
        }

    def helper(self, num_warps: int) -> BackwardTile:
        """How the kernels around it see its accumulators: fragments of `num_warps` warps below each other."""
        return BackwardTile(
            max_dim=self.max_dim,
            block_m=self.block_m,
            block_n=self.block_n,
            num_warps=num_warps,
            num_stages=1,
            min_blocks=1,
            warps_d=1,
            dq_warps_m=4,
            fragments_ahead=0,
            origin=self.origin,
        )


@dataclass(frozen=True, kw_only=True)
class BackwardFloat32Sm90Tile:
    """One way to cut the backward pass of float32 for compute capability 9.0. Warpgroups own the same 64 keys."""

    max_dim: int
    block_m: int = 64
    block_n: int = 64
    num_stages: int
    num_rooms: int  # in which weights and their gradients are handed from warpgroup to warpgroup
    dq_columns: int  # of dq in one product
    dq_late: bool  # dq of a tile waits for the first columns of its dk, which the next queries wait for
    pieces: int = 3  # of a float32; two are for TF32's precision
    origin: str = field(compare=False)

    element_bytes = 4
    num_warps = 16  # those of dv, of dk, of dq and of the producers
    dim_multiple = 64
    min_blocks = 1
    fragments_ahead = 0

    def __post_init__(self) -> None:
        _check_row(self, self.block_m == 64 and self.block_n == 64, "64 keys and 64 queries for one product")
        _check_row(self, self.dq_columns in (64, 128), "whole chunks of dq")
        _check_row(self, self.pieces in (2, 3), "two or three pieces")
        _check_row(self, not self.dq_late or self.num_rooms <= self.num_stages, "late dq no further behind than dk")

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        tile = self.pieces * (_chunked_bytes(64, dim) + _chunked_bytes(64, dim_v))
        rooms = self.num_rooms * self.pieces * _chunked_bytes(64, CHUNK)
        barriers = 8 * (2 + 2 * self.num_stages * (dim + dim_v) // CHUNK + 3 * self.num_rooms)
        return (self.num_stages + 1) * tile + rooms + self.num_stages * self.block_m * 8 + barriers

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {
            "CUFLASH_NUM_ROOMS": self.num_rooms,
            "CUFLASH_DQ_COLUMNS": self.dq_columns,
            "CUFLASH_DQ_LATE": int(self.dq_late),
            "CUFLASH_PIECES": self.pieces,
        }

    def helper(self) -> BackwardTile:
        """How the kernels around it see its accumulators: fragments of the warps of one warpgroup below each other."""
        return BackwardTile(
            element_bytes=self.element_bytes,
            max_dim=self.max_dim,
            block_m=self.block_m,
            block_n=self.block_n,
            num_warps=4,
            num_stages=1,
            min_blocks=1,
            warps_d=1,
            dq_warps_m=4,
            fragments_ahead=0,
            origin=self.origin,
        )


Tile = (
    ForwardTile
    | BackwardTile
    | DqTile
    | ForwardSm90Tile
    | ForwardFloat32Sm90Tile
    | DecodeSm90Tile
    | BackwardSm90Tile
    | BackwardFloat32Sm90Tile
)


def _chunked_bytes(rows: int, columns: int) -> int:
    """Shared memory of a tile in chunks of `CHUNK` columns; kernels/tiles_sm90.cuh has the same."""
    return -(-columns // CHUNK) * rows * CHUNK * 2


# What `ForwardSm90Tile.serves` means, in words.
SERVES = {
    "any": "any problem",
    "no terms": "problems without softcap, slopes, bias and mask",
    "long full": f"{LONG_SEQLEN} keys or more, without a right bound, softcap, slopes, bias and mask",
    "short": f"fewer than {LONG_SEQLEN} keys",
}


def _check_row(row: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{row}: expected {rule}")


def _tile_defines(tile: Tile) -> dict[str, int]:
    return {
        "CUFLASH_BLOCK_M": tile.block_m,
        "CUFLASH_BLOCK_N": tile.block_n,
        "CUFLASH_NUM_WARPS": tile.num_warps,
        "CUFLASH_NUM_STAGES": tile.num_stages,
        "CUFLASH_MIN_BLOCKS": tile.min_blocks,
        "CUFLASH_DIM_MULTIPLE": tile.dim_multiple,
        "CUFLASH_FRAGMENTS_AHEAD": tile.fragments_ahead,
    }


Row = TypeVar("Row")


def _maker(kind: type[Row], fields: str) -> Callable[..., Row]:
    """Makes rows of which these fields are given by position, so that a table of them can be read."""

    def make(*values: Any, **others: Any) -> Row:
        return kind(**dict(zip(fields.split(), values, strict=True)), **others)

    return make


_forward = _maker(ForwardTile, "max_dim block_m block_n num_warps num_stages min_blocks fragments_ahead origin")
_forward_sm90 = _maker(
    ForwardSm90Tile,
    "max_dim block_m block_n num_stages ping_pong keep_before lazy_maximum out_takes_q serves origin",
)
_forward_float32_sm90 = _maker(ForwardFloat32Sm90Tile, "max_dim block_m block_n num_stages ping_pong origin")
_backward = _maker(
    BackwardTile,
    "max_dim block_m block_n num_warps num_stages min_blocks warps_d dq_warps_m fragments_ahead origin",
)
_backward_sm90 = _maker(BackwardSm90Tile, "max_dim block_m block_n num_stages dp_early splits_roles holds_k origin")
_backward_float32_sm90 = _maker(BackwardFloat32Sm90Tile, "max_dim num_stages num_rooms dq_columns dq_late origin")
_dq = _maker(DqTile, "max_dim block_m block_n num_warps min_blocks origin")
_decode = _maker(DecodeSm90Tile, "max_dim block_n num_stages min_blocks origin")


def _h200(here: str, flash_attention_2: str) -> str:
    return (
        f"on an H200 {here} TFLOP/s, FlashAttention-2 beside it {flash_attention_2} (seqlen 4096 full / causal, 1024 "
        "full / causal; bfloat16, batch x seqlen 16384, heads x head_dim 2048)"
    )


def _reads(one_query: float, heads: str, many: float, heads_of_many: str) -> str:
    return (
        f"on an H200 {one_query} TB/s (batch x heads {heads}, 8192 keys, one query) and {many} ({heads_of_many}, "
        "131072 keys, 16 queries), a copy beside it 4.22"
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

    _forward(64,  128, 64,  8, 1, 1, 0, _float64(36.6, 12.3), element_bytes=8),
    _forward(64,  64,  32,  4, 1, 1, 0, _SMALL, element_bytes=8),
    _forward(128, 128, 32,  8, 1, 1, 0, _float64(41.3, 20.4), element_bytes=8),
    _forward(128, 64,  16,  4, 1, 1, 0, _SMALL, element_bytes=8),
    _forward(192, 64,  16,  8, 1, 1, 0, _ARITHMETIC, element_bytes=8, warps_d=2),
    _forward(192, 32,  16,  4, 1, 1, 0, _SMALL, element_bytes=8, warps_d=2),
    _forward(256, 64,  16,  8, 1, 1, 0, _ARITHMETIC, element_bytes=8, warps_d=2),
    _forward(256, 32,  16,  4, 1, 1, 0, _MEDIUM, element_bytes=8, warps_d=2),
    _forward(256, 16,  16,  2, 1, 1, 0, _SMALL, element_bytes=8, warps_d=2),
)

FORWARD_SM90_TILES = (
    #            max_dim  m    n   stages turns  keep   lazy   out in Q serves
    _forward_sm90(64,     256, 64,  3,    False, False, True,  False, "no terms",
                  _h200("578 / 543, 519 / 398", "291 / 274, 287 / 214")),
    _forward_sm90(64,     192, 64,  3,    False, False, True,  False, "any", _ARITHMETIC),
    _forward_sm90(128,    192, 80,  2,    True,  True,  True,  False, "long full",
                  "on an H200 751 and 779 TFLOP/s (seqlen 4096 and 16384), 128 x 128 in another run 774 and 741"),
    _forward_sm90(128,    128, 128, 2,    True,  True,  True,  False, "no terms",
                  "on an H200 677 TFLOP/s causal at seqlen 4096, 619 / 464 full / causal at 1024, FlashAttention-2 "
                  "beside it 291, 313 / 248"),
    _forward_sm90(128,    128, 64,  3,    True,  True,  True,  False, "any", _ARITHMETIC),
    _forward_sm90(192,    128, 112, 2,    True,  True,  False, True,  "any", _ARITHMETIC),
    _forward_sm90(256,    128, 64,  2,    True,  True,  False, True,  "short",
                  "on an H200 671 / 510 TFLOP/s, FlashAttention-2 beside it 299 / 251 (seqlen 1024 full / causal)"),
    _forward_sm90(256,    128, 80,  2,    True,  True,  False, True,  "any",
                  "on an H200 766 / 724 TFLOP/s, FlashAttention-2 beside it 290 / 277 (seqlen 4096 full / causal)"),
)

FORWARD_FLOAT32_SM90_TILES = (
    #                    max_dim m   n   stages turns
    _forward_float32_sm90(64,  128, 128, 1,    False, _float32("119 / 107", "33.2 / 30.0")),
    _forward_float32_sm90(128, 128, 64, 1,     True,  _float32("121 / 110", "45.1 / 42.3")),
)

# The same for precision="tf32".
FORWARD_TF32_SM90_TILES = (
    _forward_float32_sm90(64,  128, 128, 1,    False, _float32("201 / 176", "33.2 / 30.0"), pieces=2),
    _forward_float32_sm90(128, 128, 64, 1,     True,  _float32("213 / 189", "45.1 / 42.3"), pieces=2),
)

# Memory of an H200 brings a multiprocessor 36 bytes in a nanosecond, after a microsecond: 64 KiB and more must be on
# their way, beside the tiles in use.
DECODE_SM90_TILES = (
    #       max_dim n   stages blocks
    _decode(64,  128, 2, 2, _reads(3.95, "32 x 32/8", 3.75, "2 x 32/8")),
    _decode(128, 128, 2, 1, _reads(3.96, "16 x 32/8", 3.77, "1 x 32/8")),
    _decode(192, 64,  4, 1, _ARITHMETIC),
    _decode(256, 64,  2, 1, _reads(3.87, "8 x 32/8", 3.75, "1 x 16/4")),
)

BACKWARD_SM90_TILES = (
    #             max_dim m   n   stages early split  hold K
    _backward_sm90(64,  64, 128, 3,     True,  False, True,  _h200("502 / 465, 417 / 307", "264 / 240, 241 / 184")),
    _backward_sm90(128, 64, 128, 3,     False, False, False, _h200("545 / 509, 453 / 337", "283 / 261, 257 / 206")),
    _backward_sm90(256, 64, 64,  2,     True,  True,  False, _h200("418 / 388, 357 / 280", "243 / 220, 225 / 179")),
)

# Tiles of 64 keys and 64 queries; the products of pieces count as one.
BACKWARD_FLOAT32_SM90_TILES = (
    #                     max_dim stages rooms columns of dq, late
    _backward_float32_sm90(64,  2, 2, 64, False, _float32("112 / 109", "34.1 / 31.1")),
    _backward_float32_sm90(128, 1, 1, 64, True,  _float32("118 / 112", "36.4 / 34.0")),
)

BACKWARD_TF32_SM90_TILES = (
    _backward_float32_sm90(64,  2, 2, 64, False, _float32("172 / 159", "34.1 / 31.1"), pieces=2),
    _backward_float32_sm90(128, 1, 1, 64, True,  _float32("196 / 177", "36.4 / 34.0"), pieces=2),
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

    _backward(64,  16, 64,  4, 2, 1, 1, 1, 0, _float64(41.4, 28.0), element_bytes=8),
    _backward(64,  32, 32,  4, 1, 1, 2, 2, 0, _SMALL, element_bytes=8),
    _backward(128, 32, 64,  8, 1, 1, 2, 2, 0, _float64(39.1, 40.6), element_bytes=8),
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
# fmt: on
