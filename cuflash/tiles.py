"""Ways to cut the passes into tiles: what each is made of, checks of itself, and needs of shared memory.

A row of the tables (cuflash/tables.py) serves head dimensions up to its `max_dim`, of elements of its size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cuflash.problem import Problem
from cuflash.tensor_map import CHUNK

LONG_SEQLEN = 2048  # from which on larger tiles of keys, or of queries, pay
DECODE_ROWS = 64  # of one product, which hold the few queries of all heads that share keys


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tile_bytes(rows: int, columns: int, element_bytes: int) -> int:
    """Shared memory of a tile, in lines of 128 bytes or parts of one; kernels/common/config.cuh has the same."""
    row = columns * element_bytes
    if element_bytes > 2 or row > 64:
        return rows * round_up(row, 128)
    return rows * (64 if row > 32 else 32)


@dataclass(frozen=True, kw_only=True)
class ForwardTile:
    """One way to cut the forward pass. A block owns block_m queries; warps_d warps share 16-row fragments of them."""

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
        """Head dimensions are padded so that every warp gets the same number of 16-wide fragments of their columns."""
        return 16 * self.warps_d

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        size = self.element_bytes
        q = tile_bytes(self.block_m, max(dim, dim_v), size)
        return q + self.num_stages * (tile_bytes(self.block_n, dim, size) + tile_bytes(self.block_n, dim_v, size))

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {"CUFLASH_WARPS_D": self.warps_d}


@dataclass(frozen=True, kw_only=True)
class BackwardTile:
    """One way to cut the backward pass. A block owns block_n keys; warps_d warps share the rows of 16-row fragments."""

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
        _check_row(self, self.block_m % (16 * self.warps_q) == 0, "whole pairs of 8 queries for every warp")
        _check_row(self, self.num_warps % self.dq_warps_m == 0, "dq_warps_m divides num_warps")
        _check_row(self, self.block_m % (16 * self.dq_warps_m) == 0, "whole fragments of dq for every warp")

    @property
    def warps_q(self) -> int:
        """Warps along the queries of a fragment of keys: of the warps_d, as many as there are queries for."""
        return min(self.warps_d, self.block_m // 16)

    @property
    def dim_multiple(self) -> int:
        """Head dimensions are padded so that every warp gets the same number of 16-wide fragments of their columns."""
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
        """Head dimensions are padded so that every warp gets the same number of 16-wide fragments of their columns."""
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
class ScoresTile:
    """One way to cut the gradients of bias, slopes, scale and softcap. Blocks take tiles of block_m x block_n pairs."""

    element_bytes: int = 2
    max_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int  # tiles of queries and of keys
    min_blocks: int
    fragments_ahead: int = 0
    origin: str = field(compare=False)

    dim_multiple = 16

    def __post_init__(self) -> None:
        _check_row(self, self.block_m % (16 * self.num_warps) == 0, "whole fragments for every warp")

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        size, rows = self.element_bytes, (self.block_m, self.block_n)
        stage = sum(tile_bytes(n, d, size) for n in rows for d in (dim, dim_v))
        result = self.block_m * (self.block_n + 8) * max(size, 4)
        return max(self.num_stages * stage, result)

    def defines(self) -> dict[str, int]:
        return _tile_defines(self)


@dataclass(frozen=True, kw_only=True)
class ForwardSm90Tile:
    """One way to cut the forward pass for compute capability 9.0. A warpgroup owns 64 of the block_m queries."""

    max_dim: int
    block_m: int
    block_n: int
    num_stages: int
    ping_pong: bool  # consumers issue products one after another
    keep_before: bool  # the softmax is kept in front of the wait for the product before it
    q_stages: int  # tiles of queries in shared memory
    serves: Literal["any", "no terms", "long full", "whole blocks"] = "any"
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
        q, out = (_chunked_bytes(self.block_m, d) for d in (dim, min(dim_v, 128)))
        k, v = (_chunked_bytes(self.block_n, d) for d in (dim, dim_v))
        barriers = 8 * (2 * self.q_stages + 4 * self.num_stages) + 16
        next_tiles = 2 * (16 + 32)  # of packed sequences
        return self.q_stages * q + out + self.num_stages * (k + v) + barriers + next_tiles

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {
            "CUFLASH_PING_PONG": int(self.ping_pong),
            "CUFLASH_KEEP_BEFORE": int(self.keep_before),
            "CUFLASH_Q_STAGES": self.q_stages,
        }

    def suits(self, problem: Problem) -> bool:
        """Whether the row is meant for a problem of this length and mask."""
        terms = (problem.softcap, problem.alibi_slopes, problem.bias, problem.mask)
        rows, keys = problem.block_size
        cuts_blocks = rows % self.block_m != 0 or keys % self.block_n != 0  # pairs of a tile are then looked up
        no_terms = all(term is None for term in terms) and not cuts_blocks
        is_long = problem.mean_sequence.seqlen_k >= LONG_SEQLEN
        return {
            "any": True,
            "no terms": no_terms,
            "long full": no_terms and is_long and problem.window_right is None,
            "whole blocks": no_terms and problem.block_mask is not None,
        }[self.serves]


@dataclass(frozen=True, kw_only=True)
class ForwardFloat32Sm90Tile:
    """One way to cut the forward pass of float32 for compute capability 9.0, of operands split into bfloat16 parts.

    A warpgroup owns 64 of the block_m queries.
    """

    max_dim: int
    block_m: int
    block_n: int
    num_stages: int
    ping_pong: bool  # consumers issue products one after another
    bf16_parts: int = 3  # that a float32 is split into; two are for TF32's precision
    origin: str = field(compare=False)

    element_bytes = 4
    dim_multiple = 16
    min_blocks = 1
    fragments_ahead = 0

    def __post_init__(self) -> None:
        _check_row(self, self.block_m in (128, 192), "64 queries for each of two or three consumers")
        _check_row(self, self.bf16_parts in (2, 3), "two or three parts")
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
        return self.bf16_parts * (q + self.num_stages * (k + v)) + 8 * (2 + 4 * self.bf16_parts * self.num_stages)

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {"CUFLASH_PING_PONG": int(self.ping_pong), "CUFLASH_BF16_PARTS": self.bf16_parts}


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
        k, v = (_chunked_bytes(self.block_n, d) for d in (dim, dim_v))
        barriers = 8 * (2 + 4 * self.num_stages)
        return _chunked_bytes(self.block_m, dim) + self.num_stages * (k + v) + barriers

    def defines(self) -> dict[str, int]:
        return _tile_defines(self)


@dataclass(frozen=True, kw_only=True)
class BackwardSm90Tile:
    """One way to cut the backward pass for compute capability 9.0. A warpgroup, or two, own 64 of the block_n keys."""

    max_dim: int
    block_m: int
    block_n: int
    num_stages: int
    schedule: Literal["kHoldK", "kSharedDs", "kSplitRoles"]  # Schedule of kernels/sm90/backward_layout.cuh
    dq_in_order: bool = False  # blocks add to dq one after another, in a fixed order
    origin: str = field(compare=False)

    element_bytes = 2
    dim_multiple = 64
    min_blocks = 1
    fragments_ahead = 0

    def __post_init__(self) -> None:
        keys = 64 if self.splits_roles else 128
        _check_row(self, self.block_n == keys, "64 keys for two consumers, or for each of them")
        _check_row(self, self.block_m == 64, "64 queries for one product")

    @property
    def splits_roles(self) -> bool:
        """Whether one consumer makes P and dv, the other dS and dk, of the same keys."""
        return self.schedule == "kSplitRoles"

    @property
    def num_warps(self) -> int:
        """Those of two consumers, of dq, and of the warpgroup that keeps the order of dq."""
        return 16 if self.dq_in_order else 12

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        keys = _chunked_bytes(self.block_n, dim) + _chunked_bytes(self.block_n, dim_v)
        queries = _chunked_bytes(self.block_m, dim) + _chunked_bytes(self.block_m, dim_v) + self.block_m * 8
        ds = 2 * _chunked_bytes(self.block_n, self.block_m)
        p = self.block_n * self.block_m * 4 if self.splits_roles else 0
        barriers = 8 * (2 + 4 * self.num_stages + 4 + 2 * self.splits_roles + 6 * self.dq_in_order)
        return keys + self.num_stages * queries + ds + p + barriers

    def defines(self) -> dict[str, str | int]:
        return {**_tile_defines(self), "CUFLASH_SCHEDULE": self.schedule}


@dataclass(frozen=True, kw_only=True)
class BackwardFloat32Sm90Tile:
    """One way to cut the backward pass of float32 for compute capability 9.0. Warpgroups own the same 64 keys."""

    max_dim: int
    block_m: int = 64
    block_n: int = 64
    num_stages: int
    num_buffers: int  # in which weights and their gradients are handed from warpgroup to warpgroup
    dq_columns: int  # of dq in one product
    dq_late: bool  # dq of a tile waits for the first columns of its dk, which the next queries wait for
    bf16_parts: int = 3  # that a float32 is split into; two are for TF32's precision
    origin: str = field(compare=False)

    element_bytes = 4
    num_warps = 16  # those of dv, of dk, of dq and of the producers
    dim_multiple = 64
    min_blocks = 1
    fragments_ahead = 0

    def __post_init__(self) -> None:
        _check_row(self, self.block_m == 64 and self.block_n == 64, "64 keys and 64 queries for one product")
        _check_row(self, self.dq_columns in (64, 128), "whole chunks of dq")
        _check_row(self, self.bf16_parts in (2, 3), "two or three parts")
        _check_row(self, not self.dq_late or self.num_buffers <= self.num_stages, "late dq no further behind than dk")

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        tile = self.bf16_parts * (_chunked_bytes(64, dim) + _chunked_bytes(64, dim_v))
        buffers = self.num_buffers * self.bf16_parts * _chunked_bytes(64, CHUNK)
        barriers = 8 * (2 + 2 * self.num_stages * (dim + dim_v) // CHUNK + 3 * self.num_buffers)
        return (self.num_stages + 1) * tile + buffers + self.num_stages * self.block_m * 8 + barriers

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {
            "CUFLASH_NUM_BUFFERS": self.num_buffers,
            "CUFLASH_DQ_COLUMNS": self.dq_columns,
            "CUFLASH_DQ_LATE": int(self.dq_late),
            "CUFLASH_BF16_PARTS": self.bf16_parts,
        }


def helper_of(main: BackwardSm90Tile | BackwardFloat32Sm90Tile) -> BackwardTile:
    """How the kernels around it see its accumulators: fragments of the warps of one warpgroup below each other."""
    return BackwardTile(
        element_bytes=main.element_bytes,
        max_dim=main.max_dim,
        block_m=main.block_m,
        block_n=main.block_n,
        num_warps=4,
        num_stages=1,
        min_blocks=1,
        warps_d=1,
        dq_warps_m=4,
        fragments_ahead=0,
        origin=main.origin,
    )


Tile = (
    ForwardTile
    | BackwardTile
    | DqTile
    | ScoresTile
    | ForwardSm90Tile
    | ForwardFloat32Sm90Tile
    | DecodeSm90Tile
    | BackwardSm90Tile
    | BackwardFloat32Sm90Tile
)


def _chunked_bytes(rows: int, columns: int) -> int:
    """Shared memory of a tile in chunks of `CHUNK` columns; kernels/sm90/tiles.cuh has the same."""
    return -(-columns // CHUNK) * rows * CHUNK * 2


# What `ForwardSm90Tile.serves` means, in words.
SERVES = {
    "any": "any problem",
    "no terms": "problems without softcap, slopes, bias, mask and cut blocks",
    "long full": f"{LONG_SEQLEN} keys or more, without a right bound, softcap, slopes, bias, mask and cut blocks",
    "whole blocks": "block masks of whole tiles, without softcap, slopes, bias and mask",
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
