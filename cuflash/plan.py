"""Which kernels run for a problem, with which tiles, on which device: pure data and pure functions.

Tiles are rows of a table. A row serves head dimensions up to its `max_dim`; the first row of its table whose shared
memory fits the device is taken. `LaunchPlan.reason` says which row was taken and why the ones before it were not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cuflash.problem import ITEMSIZE, Operand, Problem
from cuflash.tensor_map import BYTES as TENSOR_MAP_BYTES
from cuflash.tensor_map import CHUNK, TensorMapSpec, tensor_map_spec, why_not

Pass = Literal["forward", "backward"]

PARAMS_BYTES = 536  # of the kernels' only argument; cuflash/params.py lays it out, kernels/params.cuh checks it
MAPS_OFFSET = 576  # where tensor maps follow, aligned to 64 bytes
MAX_HEAD_DIM = 256
# Under a causal mask tiles differ in length; the long ones of so many heads start first. On an H200 that is worth 9 %
# at head_dim 128 and seqlen 4096, 4 % in the backward pass; without a mask, one head at a time serves L2 better.
CAUSAL_HEAD_SECTION = 16
LONG_SEQLEN = 2048  # from which on larger tiles of keys, or of queries, pay
FAST_FLOAT64 = (80, 90, 100)  # compute capabilities whose FP64 units are as many as half of the others
WAVES = 4  # of resident blocks that a grid should have, where more blocks cost extra work
# Few queries: a block reads keys and values for all query heads of a group, if these rows fit into one product.
DECODE_ROWS = 64
DECODE_MIN_SEQLEN_K = 512  # from which on that pays
MAX_KEY_SPLITS = 128  # what combine reads for each row
MIN_TILES_OF_SPLIT = 2  # of keys
SPLIT_OVERHEAD_TILES = 2  # of keys: what a block takes beside its own, to wait for the first and to store its result
COMBINE_WARPS = 8
SHARED_BYTES_RESERVED = 1024  # that a resident block takes of a multiprocessor's shared memory beside its own


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """What a plan needs to know of a device. Sizes in bytes."""

    name: str
    arch: int  # compute capability, major and minor digit: 90 is 9.0
    num_sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int

    @property
    def target(self) -> str:
        """The architecture as the compiler spells it."""
        return f"sm_{self.arch}"

    @staticmethod
    def for_arch(arch: str) -> DeviceSpec:
        """A device that need not be here, by its compute capability: "8.0", "80" or "sm_80"."""
        digits = str(arch).removeprefix("sm_").replace(".", "")
        if not digits.isdecimal() or int(digits) not in _DEVICES:
            known = ", ".join(f"{a // 10}.{a % 10}" for a in _DEVICES)
            raise ValueError(f"arch: got {arch!r}, expected one of {known}")
        return _DEVICES[int(digits)]


def _device(name: str, arch: int, num_sms: int, shared_kib_per_sm: int) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        arch=arch,
        num_sms=num_sms,
        shared_bytes_per_block=(shared_kib_per_sm - 1) * 1024,
        shared_bytes_per_sm=shared_kib_per_sm * 1024,
    )


# Representatives of the compute capabilities, from the CUDA C++ Programming Guide (technical specifications per compute
# capability) and the vendor's pages for the number of multiprocessors.
_DEVICES = {
    spec.arch: spec
    for spec in (
        _device("A100", 80, 108, 164),
        _device("RTX 3090", 86, 82, 100),
        _device("Jetson Orin", 87, 16, 164),
        _device("RTX 4090", 89, 128, 100),
        _device("H200", 90, 132, 228),
        _device("B200", 100, 148, 228),
        _device("B300", 103, 148, 228),
        _device("Jetson Thor", 110, 20, 228),
        _device("RTX 5090", 120, 170, 100),
        _device("DGX Spark", 121, 48, 100),
    )
}


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
    dp_early: bool  # dP is issued together with P
    splits_roles: bool  # one warpgroup makes dv and another dk, of the same keys
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
        barriers = 8 * (2 + 4 * self.num_stages + 4)
        return keys + self.num_stages * queries + 2 * _chunked_bytes(self.block_n, self.block_m) + barriers

    def defines(self) -> dict[str, int]:
        return _tile_defines(self) | {
            "CUFLASH_DP_EARLY": int(self.dp_early),
            "CUFLASH_SPLITS_ROLES": int(self.splits_roles),
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


Tile = ForwardTile | BackwardTile | DqTile | ForwardSm90Tile | DecodeSm90Tile | BackwardSm90Tile


def _chunked_bytes(rows: int, columns: int) -> int:
    """Shared memory of a tile in chunks of `CHUNK` columns; kernels/tiles_sm90.cuh has the same."""
    return -(-columns // CHUNK) * rows * CHUNK * 2


# What `ForwardSm90Tile.serves` means, in words.
_SERVES = {
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


def _forward(
    max_dim: int,
    m: int,
    n: int,
    warps: int,
    stages: int,
    blocks: int,
    ahead: int,
    origin: str,
    *,
    element_bytes: int = 2,
    warps_d: int = 1,
) -> ForwardTile:
    return ForwardTile(
        element_bytes=element_bytes,
        warps_d=warps_d,
        max_dim=max_dim,
        block_m=m,
        block_n=n,
        num_warps=warps,
        num_stages=stages,
        min_blocks=blocks,
        fragments_ahead=ahead,
        origin=origin,
    )


def _forward_sm90(
    max_dim: int,
    m: int,
    n: int,
    stages: int,
    ping_pong: bool,
    keep_before: bool,
    lazy_maximum: bool,
    out_takes_q: bool,
    serves: Literal["any", "no terms", "long full", "short"],
    origin: str,
) -> ForwardSm90Tile:
    return ForwardSm90Tile(
        max_dim=max_dim,
        block_m=m,
        block_n=n,
        num_stages=stages,
        ping_pong=ping_pong,
        keep_before=keep_before,
        lazy_maximum=lazy_maximum,
        out_takes_q=out_takes_q,
        serves=serves,
        origin=origin,
    )


def _backward(
    max_dim: int,
    m: int,
    n: int,
    warps: int,
    stages: int,
    blocks: int,
    warps_d: int,
    dq_warps_m: int,
    ahead: int,
    origin: str,
    *,
    element_bytes: int = 2,
) -> BackwardTile:
    return BackwardTile(
        element_bytes=element_bytes,
        max_dim=max_dim,
        block_m=m,
        block_n=n,
        num_warps=warps,
        num_stages=stages,
        min_blocks=blocks,
        warps_d=warps_d,
        dq_warps_m=dq_warps_m,
        fragments_ahead=ahead,
        origin=origin,
    )


def _backward_sm90(
    max_dim: int, m: int, n: int, stages: int, dp_early: bool, splits_roles: bool, origin: str
) -> BackwardSm90Tile:
    return BackwardSm90Tile(
        max_dim=max_dim,
        block_m=m,
        block_n=n,
        num_stages=stages,
        dp_early=dp_early,
        splits_roles=splits_roles,
        origin=origin,
    )


def _dq(
    max_dim: int,
    m: int,
    n: int,
    warps: int,
    blocks: int,
    origin: str,
    *,
    element_bytes: int = 2,
    warps_d: int = 1,
    stages: int = 2,
    ahead: int = 0,
) -> DqTile:
    return DqTile(
        element_bytes=element_bytes,
        max_dim=max_dim,
        block_m=m,
        block_n=n,
        num_warps=warps,
        num_stages=stages,
        min_blocks=blocks,
        warps_d=warps_d,
        fragments_ahead=ahead,
        origin=origin,
    )


def _h200(here: str, flash_attention_2: str) -> str:
    return (
        f"on an H200 {here} TFLOP/s, FlashAttention-2 beside it {flash_attention_2} (seqlen 4096 full / causal, 1024 "
        "full / causal; bfloat16, batch x seqlen 16384, heads x head_dim 2048)"
    )


def _decode(kib: int) -> str:
    return f"{kib} KiB of tiles on a multiprocessor, in use or on their way; by arithmetic, not measured"


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

    _forward(64,  64,  32,  4, 1, 1, 0, _ARITHMETIC, element_bytes=8),
    _forward(128, 64,  16,  4, 1, 1, 0, _ARITHMETIC, element_bytes=8),
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

# Memory of an H200 brings a multiprocessor 36 bytes in a nanosecond, after a microsecond: 64 KiB and more must be on
# their way, beside the tiles in use.
DECODE_SM90_TILES = (
    DecodeSm90Tile(max_dim=64, block_n=128, num_stages=3, min_blocks=2, origin=_decode(192)),
    DecodeSm90Tile(max_dim=128, block_n=64, num_stages=3, min_blocks=2, origin=_decode(192)),
    DecodeSm90Tile(max_dim=192, block_n=64, num_stages=4, min_blocks=1, origin=_decode(192)),
    DecodeSm90Tile(max_dim=256, block_n=64, num_stages=3, min_blocks=1, origin=_decode(192)),
)

BACKWARD_SM90_TILES = (
    #             max_dim m   n   stages early  split
    _backward_sm90(64,  64, 128, 3,     True,  False, _h200("489 / 461, 407 / 305", "269 / 245, 243 / 184")),
    _backward_sm90(128, 64, 128, 3,     False, False, _h200("526 / 504, 443 / 338", "277 / 263, 253 / 206")),
    _backward_sm90(256, 64, 64,  2,     False, True,
                   "on an H200 351 / 327, 297 / 241 TFLOP/s, cuDNN beside it 399 / 372, 300 / 255 (seqlen 4096 full / "
                   "causal, 1024 full / causal)"),
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

    _backward(64,  32, 64,  8, 1, 1, 2, 2, 0, _ARITHMETIC, element_bytes=8),
    _backward(64,  32, 32,  4, 1, 1, 2, 2, 0, _SMALL, element_bytes=8),
    _backward(128, 32, 32,  4, 1, 1, 2, 2, 0, _ARITHMETIC, element_bytes=8),
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

    _dq(64,  64,  32, 4, 1, _ARITHMETIC, element_bytes=4, ahead=1),
    _dq(128, 64,  16, 4, 1, _ARITHMETIC, element_bytes=4, ahead=1),
    _dq(192, 64,  16, 4, 1, _ARITHMETIC, element_bytes=4, ahead=1),
    _dq(192, 32,  16, 2, 1, _SMALL, element_bytes=4, ahead=1),
    _dq(256, 64,  16, 4, 1, _ARITHMETIC, element_bytes=4, ahead=1),
    _dq(256, 32,  16, 2, 1, _MEDIUM, element_bytes=4, ahead=1),
    _dq(256, 32,  16, 2, 1, _SMALL, element_bytes=4, ahead=1, stages=1),

    _dq(64,  64,  16, 4, 1, _ARITHMETIC, element_bytes=8),
    _dq(128, 64,  16, 4, 1, _ARITHMETIC, element_bytes=8),
    _dq(128, 32,  16, 4, 1, _MEDIUM, element_bytes=8, warps_d=2),
    _dq(128, 16,  16, 2, 1, _SMALL, element_bytes=8, warps_d=2),
    _dq(192, 32,  16, 4, 1, _ARITHMETIC, element_bytes=8, warps_d=2),
    _dq(192, 16,  16, 2, 1, _SMALL, element_bytes=8, warps_d=2, stages=1),
    _dq(256, 16,  16, 4, 1, _ARITHMETIC, element_bytes=8, warps_d=4),
    _dq(256, 16,  16, 4, 1, _MEDIUM, element_bytes=8, warps_d=4, stages=1),
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One compilation of one kernel source, and how to launch it. Hashable."""

    source: str
    name: str
    target: str
    defines: tuple[tuple[str, str | int], ...]
    grid: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What runs for one pass of one problem: kernels in order, scratch memory, and why."""

    pass_: Pass
    problem: Problem
    device: DeviceSpec
    tiles: tuple[Tile, ...]
    kernels: tuple[KernelSpec, ...]
    stats_rows: int  # rows of row_stats of one head (backward)
    group_splits: int  # blocks that share the query heads of a key/value head (backward)
    key_splits: int  # blocks that share the keys of a key/value head (forward, few queries)
    scratch: tuple[
        tuple[str, int], ...
    ]  # arrays that a call needs beside inputs and results, in elements of lse's dtype
    head_section: int  # heads whose tiles are interleaved in the launch order
    resident_blocks: int  # of a kernel whose blocks take one tile after another
    tensor_maps: tuple[TensorMapSpec, ...]  # that follow the parameters
    reason: str
    resources: tuple[str, ...] = ()  # registers and spills of each kernel, once compiled

    @property
    def extra_bytes(self) -> int:
        """Device memory taken for the duration of a call beside inputs and results."""
        return ITEMSIZE[self.problem.softmax_dtype] * sum(elements for _, elements in self.scratch)

    def describe(self) -> str:
        """The plan in words, a line a fact."""
        p = self.problem
        lines = [
            f"{self.pass_} pass on {self.device.name} (compute capability {self.device.arch / 10:.1f})",
            f"  problem: {p.dtype}, batch {p.batch}, heads {p.num_heads}/{p.num_heads_kv}, seqlen {p.seqlen_q} x "
            f"{p.seqlen_k}, head_dim {p.head_dim}/{p.head_dim_v}; {', '.join(_options(p)) or 'no options'}",
        ]
        for i, kernel in enumerate(self.kernels):
            resources = f", {self.resources[i]}" if self.resources else ""
            lines.append(
                f"  kernel {kernel.name}: grid {kernel.grid}, {kernel.threads} threads, "
                f"{kernel.shared_bytes} bytes of shared memory{resources}"
            )
        lines.append(f"  extra memory: {self.extra_bytes} bytes")
        lines.extend(f"  {line}" for line in self.reason.splitlines())
        return "\n".join(lines)


def choose_plan(
    problem: Problem,
    device: DeviceSpec,
    pass_: Pass = "forward",
    *,
    load_bytes: int | None = None,
    store_bytes: int | None = None,
    operands: Mapping[str, Operand] | None = None,
    tiles: tuple[Tile, ...] | None = None,
) -> LaunchPlan:
    """The plan for one pass. Pure: the same arguments give the same plan.

    `load_bytes` and `store_bytes` are the widest aligned accesses that serve all operands; without them they follow
    from the strides, pointers taken as 16-byte aligned. Results and dout that are not in `operands` are contiguous.
    `tiles` overrides the tables: a row of the forward pass, or one of the backward pass (and a DqTile: deterministic).

    Raises NotImplementedError for what no kernel serves, ValueError for arrays that are not aligned to their elements.
    """
    check_served(problem, device)
    if load_bytes is None:
        load_bytes = access_bytes((problem.q, problem.k, problem.v))
    if store_bytes is None:
        store_bytes = access_bytes((problem.q, problem.v))
    if min(load_bytes, store_bytes) < ITEMSIZE[problem.dtype]:
        raise ValueError(
            f"q: got arrays at multiples of {min(load_bytes, store_bytes)} bytes, expected all of them at multiples of "
            f"the {ITEMSIZE[problem.dtype]} bytes of a {problem.dtype}"
        )
    arrays = {name: _contiguous(problem, name) for name in ("out", "dout", "dk", "dv")} | dict(operands or {})
    arrays |= {name: getattr(problem, name) for name in "qkv"}
    draft = _Draft(
        problem=problem,
        device=device,
        pass_=pass_,
        arrays=arrays,
        access_bytes=min(load_bytes, store_bytes),
        defines=_common_defines(problem, device, load_bytes, store_bytes),
    )
    if pass_ == "forward":
        _draft_forward(draft, tiles)
    else:
        _draft_backward(draft, tiles)
    if problem.dtype == "float64" and device.arch not in FAST_FLOAT64:
        draft.reasons.append(f"float64 is slow here: compute capability {device.arch / 10:.1f} has few FP64 units")
    return LaunchPlan(
        pass_=pass_,
        problem=problem,
        device=device,
        tiles=draft.tiles,
        kernels=tuple(draft.kernels),
        stats_rows=draft.stats_rows,
        group_splits=draft.group_splits,
        key_splits=draft.key_splits,
        scratch=tuple(draft.scratch.items()),
        head_section=1 if problem.window_right is None else CAUSAL_HEAD_SECTION,
        resident_blocks=draft.resident_blocks,
        tensor_maps=draft.tensor_maps,
        reason="\n".join(draft.reasons),
    )


@dataclass(kw_only=True)
class _Draft:
    """A plan in the making."""

    problem: Problem
    device: DeviceSpec
    pass_: Pass
    arrays: dict[str, Operand]
    access_bytes: int  # widest aligned access that serves all arrays
    defines: dict[str, str | int]
    tiles: tuple[Tile, ...] = ()
    kernels: list[KernelSpec] = field(default_factory=list)
    scratch: dict[str, int] = field(default_factory=dict)
    tensor_maps: tuple[TensorMapSpec, ...] = ()
    reasons: list[str] = field(default_factory=list)
    stats_rows: int = 0
    group_splits: int = 1
    key_splits: int = 1
    resident_blocks: int = 0

    @property
    def heads(self) -> int:
        return self.problem.batch * self.problem.num_heads

    def padded_dims(self, tile: Tile) -> tuple[int, int]:
        """Head dimensions as a kernel of this row sees them."""
        dim, dim_v = self.problem.head_dim, self.problem.head_dim_v
        return round_up(dim, tile.dim_multiple), round_up(dim_v, tile.dim_multiple)

    def map_tensors(self, rows: Mapping[str, int], heads: Mapping[str, int] | None = None) -> None:
        """Tensor maps of these arrays, in boxes of so many rows, and of one head or so many."""
        heads = heads or {}
        self.tensor_maps = tuple(
            tensor_map_spec(name, self.arrays[name], n, heads.get(name, 1)) for name, n in rows.items()
        )
        self.defines["CUFLASH_ARGUMENT_BYTES"] = MAPS_OFFSET + len(rows) * TENSOR_MAP_BYTES

    def add(self, source: str, tile: Tile, blocks: int, shared_bytes: int, **defines: int) -> None:
        """One more kernel: those of compute capability 9.0 need what only its own instruction set has."""
        _check_blocks(blocks)
        name = _symbol(source, self.problem, tile)
        every = self.defines | tile.defines() | defines
        every |= {"CUFLASH_SHARED_BYTES": shared_bytes, "CUFLASH_KERNEL_NAME": name}
        self.kernels.append(
            KernelSpec(
                source=source,
                name=name,
                target=self.device.target + ("a" if source.endswith("_sm90.cu") else ""),
                defines=tuple(sorted(every.items())),
                grid=blocks,
                threads=32 * int(every["CUFLASH_NUM_WARPS"]),
                shared_bytes=shared_bytes,
            )
        )


_FORWARD_MAPPED = ("q", "k", "v", "out")  # arrays that forward_sm90 and decode_sm90 leave to the copy engine


def _draft_forward(draft: _Draft, tiles: tuple[Tile, ...] | None) -> None:
    problem = draft.problem
    if tiles:
        tile, reason = tiles[0], "tile given by the caller"
    elif (why_not_decode := _why_not_decode(draft)) is None:
        tile, reason = _choose(DECODE_SM90_TILES, problem, draft.device)
    else:
        tables = (FORWARD_SM90_TILES, FORWARD_TILES)
        tile, reason = _choose_of(tables, draft, _FORWARD_MAPPED, "forward_sm90")
        reason += why_not_decode and f"\nnot decode_sm90: {why_not_decode}"
    draft.tiles = (tile,)
    draft.reasons.append(reason)
    if isinstance(tile, DecodeSm90Tile):
        _draft_decode(draft, tile)
        return
    m_blocks = draft.heads * -(-problem.seqlen_q // tile.block_m)
    shared_bytes = tile.shared_bytes(*draft.padded_dims(tile))
    if not isinstance(tile, ForwardSm90Tile):
        draft.add("forward_sm80.cu", tile, m_blocks, shared_bytes)
        return
    _check_blocks(m_blocks)
    draft.map_tensors({"q": tile.block_m, "k": tile.block_n, "v": tile.block_n, "out": 64})
    pairs = problem.window_right is not None and problem.window_left is None
    units = draft.heads * -(-problem.seqlen_q // (2 * tile.block_m)) if pairs else m_blocks
    draft.resident_blocks = min(units, draft.device.num_sms * tile.min_blocks)
    draft.reasons.append(f"{draft.resident_blocks} blocks stay and take {m_blocks} tiles of queries one after another")
    draft.add("forward_sm90.cu", tile, draft.resident_blocks, shared_bytes, CUFLASH_PAIRS=int(pairs))


def _why_not_decode(draft: _Draft) -> str | None:
    """Why not to stream the keys past few queries: None if that is the way to go, "" where nobody would expect it."""
    problem, device = draft.problem, draft.device
    rows = problem.group_size * problem.seqlen_q
    if device.arch != 90 or ITEMSIZE[problem.dtype] != 2 or not 0 < rows <= DECODE_ROWS:
        return ""
    if _visible_keys(problem) < DECODE_MIN_SEQLEN_K or _why_not_mapped(draft, _FORWARD_MAPPED):
        return ""
    terms = [name for name in ("softcap", "alibi_slopes", "bias", "mask") if getattr(problem, name) is not None]
    if terms:
        return f"it knows no {' and no '.join(terms)}"
    if problem.group_size == 1 and 2 * draft.heads >= device.num_sms:
        return f"{draft.heads} heads fill the device, and no two share keys"
    return None


def _visible_keys(problem: Problem) -> int:
    """The most keys that all queries of a head see together."""
    start, stop = 0, problem.seqlen_k
    if problem.window_left is not None:
        start = max(start, problem.diagonal - problem.window_left)
    if problem.window_right is not None:
        stop = min(stop, problem.seqlen_q + problem.diagonal + problem.window_right)
    return max(0, stop - start)


def _key_splits(problem: Problem, device: DeviceSpec, tile: DecodeSm90Tile) -> int:
    """The number of blocks to share the keys of a head, so that the device is done first; of equals, the smallest.

    Blocks of one size run in waves. Many short waves, or one that is full, leave no multiprocessor idle at the end; but
    each block costs something beside its tiles.
    """
    heads = problem.batch * problem.num_heads_kv
    num_tiles = -(-_visible_keys(problem) // tile.block_n)

    def duration(splits: int) -> int:
        waves = -(-heads * splits // (device.num_sms * tile.min_blocks))
        return waves * (-(-num_tiles // splits) + SPLIT_OVERHEAD_TILES)

    most = max(1, min(MAX_KEY_SPLITS, num_tiles // MIN_TILES_OF_SPLIT))
    return min(range(1, most + 1), key=duration)


def _draft_decode(draft: _Draft, tile: DecodeSm90Tile) -> None:
    problem = draft.problem
    rows = problem.group_size * problem.seqlen_q
    draft.key_splits = splits = _key_splits(problem, draft.device, tile)
    blocks = problem.batch * problem.num_heads_kv * splits
    group = {"q": problem.group_size, "out": problem.group_size}
    draft.map_tensors({"q": problem.seqlen_q, "k": tile.block_n, "v": tile.block_n, "out": problem.seqlen_q}, group)
    draft.reasons.append(f"{rows} queries of the heads that share keys go through one product: keys are read once")
    dims = draft.padded_dims(tile)
    draft.add("decode_sm90.cu", tile, blocks, tile.shared_bytes(*dims), CUFLASH_SPLITS_KEYS=int(splits > 1))
    if splits > 1:
        draft.scratch["partial_out"] = blocks * rows * dims[1]
        draft.scratch["partial_lse"] = blocks * rows
        threads = 32 * COMBINE_WARPS
        shared_bytes = threads // (dims[1] // 4) * dims[1] * 4
        combined = draft.heads * problem.seqlen_q
        draft.add("combine.cu", tile, combined, shared_bytes, CUFLASH_NUM_WARPS=COMBINE_WARPS)
        draft.reasons.append(
            f"{splits} blocks share the keys of a head: {blocks} blocks, their results combined by lse"
        )


def _draft_backward(draft: _Draft, tiles: tuple[Tile, ...] | None) -> None:
    problem, device = draft.problem, draft.device
    if tiles:
        main, reason = tiles[0], "tiles given by the caller"
    elif problem.deterministic:
        main, reason = _choose(BACKWARD_TILES, problem, device)
    else:
        tables = (BACKWARD_SM90_TILES, BACKWARD_TILES)
        main, reason = _choose_of(tables, draft, ("q", "k", "v", "dout", "dk", "dv"), "backward_sm90")
    draft.reasons.append(reason)
    dq: Tile | None = None
    if problem.deterministic:
        dq, reason = (tiles[1], "") if tiles else _choose(DQ_TILES, problem, device)
        draft.reasons += filter(None, [reason])
    draft.tiles = (main,) if dq is None else (main, dq)

    dim, dim_v = draft.padded_dims(main)
    dims = {"CUFLASH_DIM_MULTIPLE": main.dim_multiple}
    n_blocks = problem.batch * problem.num_heads_kv * -(-problem.seqlen_k // main.block_n)
    if n_blocks:
        wanted = WAVES * device.num_sms * main.min_blocks
        draft.group_splits = min(problem.group_size, -(-wanted // n_blocks))
    draft.defines["CUFLASH_DQ_BY_REDUCTION"] = int(dq is None)
    draft.defines["CUFLASH_SPLITS_GROUP"] = int(draft.group_splits > 1)

    # How the kernels around the main one see the fragments in memory: of dq, and of dk and dv.
    of_dq = of_keys = main
    if isinstance(main, BackwardSm90Tile):
        of_dq, of_keys = main.helper(4), main.helper(main.block_n // 16)
    # delta runs over tiles of the kernels that read it, one block a tile.
    delta = of_dq if dq is None else replace(of_dq, block_m=max(main.block_m, dq.block_m))
    draft.stats_rows = round_up(problem.seqlen_q, delta.block_m)
    draft.scratch["row_stats"] = draft.heads * draft.stats_rows * 2
    draft.add("backward_delta.cu", delta, draft.heads * (draft.stats_rows // delta.block_m), 0, **dims)

    source = "backward_sm80.cu"
    if isinstance(main, BackwardSm90Tile):
        source, m, n = "backward_sm90.cu", main.block_m, main.block_n
        draft.map_tensors({"q": m, "k": n, "v": n, "dout": m, "dk": 64, "dv": 64})
    draft.add(source, main, n_blocks * draft.group_splits, main.shared_bytes(dim, dim_v))
    if draft.group_splits > 1:
        draft.scratch["dkv_partials"] = n_blocks * draft.group_splits * main.block_n * (dim + dim_v)
        shared_bytes = sum(tile_bytes(main.block_n, d, main.element_bytes) for d in (dim, dim_v))
        draft.add("backward_reduce.cu", of_keys, n_blocks, shared_bytes, **dims)
        draft.reasons.append(
            f"{draft.group_splits} blocks share the query heads of a key/value head: {n_blocks} tiles of keys are few"
        )
    if dq is not None:
        m_blocks = draft.heads * -(-problem.seqlen_q // dq.block_m)
        draft.add("backward_dq_sm80.cu", dq, m_blocks, dq.shared_bytes(*draft.padded_dims(dq)))
        draft.reasons.append(
            "deterministic: dq has a kernel of its own that adds in a fixed order and recomputes the weights"
        )
    else:
        draft.scratch["dq_accumulator"] = draft.heads * draft.stats_rows * dim
        m_blocks = draft.heads * (draft.stats_rows // main.block_m)
        shared_bytes = tile_bytes(main.block_m, dim, main.element_bytes)
        draft.add("backward_convert.cu", of_dq, m_blocks, shared_bytes, **dims)


def check_served(problem: Problem, device: DeviceSpec) -> None:
    """Raise NotImplementedError, with the limit and the remedy, for a problem that no kernel serves on `device`."""
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        name, got = ("q", problem.head_dim) if problem.head_dim > MAX_HEAD_DIM else ("v", problem.head_dim_v)
        raise NotImplementedError(
            f"{name}: got head dimension {got}, expected at most {MAX_HEAD_DIM} on the GPU; NumPy arrays of any head "
            "dimension are served on the CPU"
        )
    if device.arch < 80:
        raise NotImplementedError(
            f"device: got compute capability {device.arch / 10:.1f}, expected 8.0 or later (mma.sync on bfloat16, "
            "TF32 and float64, cp.async); NumPy arrays are served on the CPU"
        )


def _check_blocks(blocks: int) -> None:
    if blocks > 2**31 - 1:
        raise NotImplementedError(f"q: got {blocks} tiles, expected at most 2**31 - 1 in one launch; split the batch")


def access_bytes(operands: tuple[Operand, ...], pointer_alignment: int = 16) -> int:
    """Widest access of 16, 8, 4 or 2 bytes that is aligned at every row of every operand."""
    alignment = math.gcd(pointer_alignment, 16)
    for operand in operands:
        for size, stride in zip(operand.shape[:3], operand.strides[:3], strict=True):
            if size > 1:
                alignment = math.gcd(alignment, abs(stride) * ITEMSIZE[operand.dtype])
    return alignment


def _contiguous(problem: Problem, name: str) -> Operand:
    """A result, or dout, in the layout of the problem."""
    batch, heads, seqlen, dim = {
        "out": (problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v),
        "dout": (problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v),
        "dk": (problem.batch, problem.num_heads_kv, problem.seqlen_k, problem.head_dim),
        "dv": (problem.batch, problem.num_heads_kv, problem.seqlen_k, problem.head_dim_v),
    }[name]
    strides = (heads * seqlen * dim, seqlen * dim, dim, 1)
    if problem.layout == "bshd":
        strides = (heads * seqlen * dim, dim, heads * dim, 1)
    return Operand(shape=(batch, heads, seqlen, dim), strides=strides, dtype=problem.dtype)


def _choose_of(tables: tuple[tuple, tuple], draft: _Draft, mapped: tuple[str, ...], kernel: str) -> tuple[Tile, str]:
    """A row for the kernel of compute capability 9.0 where it serves the problem, else one for the kernel for all."""
    sm90, every = tables
    problem, device = draft.problem, draft.device
    if device.arch != 90 or ITEMSIZE[problem.dtype] != 2:
        return _choose(every, problem, device)
    obstacle = _why_not_mapped(draft, mapped)
    if obstacle is not None:
        tile, reason = _choose(every, problem, device)
        return tile, f"{reason}\nnot {kernel}: {obstacle}, and the copy engine cannot read it"
    largest = max(row.max_dim for row in sm90)
    if max(problem.head_dim, problem.head_dim_v) > largest:
        tile, reason = _choose(every, problem, device)
        return tile, f"{reason}\nnot {kernel}: it serves head dimensions up to {largest}"
    return _choose(sm90, problem, device)


def _why_not_mapped(draft: _Draft, names: tuple[str, ...]) -> str | None:
    """Why the copy engine cannot read these arrays; None if it can."""
    obstacle = next(filter(None, (why_not(name, draft.arrays[name]) for name in names)), None)
    if obstacle is None and draft.access_bytes < 16:
        return f"an array is aligned to {draft.access_bytes} bytes only, not 16"
    return obstacle


def _choose(table: tuple, problem: Problem, device: DeviceSpec) -> tuple[Tile, str]:
    """The first row that serves the head dimensions and fits the device, and the story of the choice."""
    rejected = []
    for tile in table:
        dim, dim_v = round_up(problem.head_dim, tile.dim_multiple), round_up(problem.head_dim_v, tile.dim_multiple)
        if tile.element_bytes != ITEMSIZE[problem.dtype] or max(dim, dim_v) > tile.max_dim:
            continue
        shared = tile.shared_bytes(dim, dim_v)
        needed = tile.min_blocks * (shared + SHARED_BYTES_RESERVED)
        label = (
            f"{type(tile).__name__} {tile.block_m} x {tile.block_n}, {tile.num_warps} warps, "
            f"{tile.num_stages} stages, {tile.min_blocks} resident blocks"
        )
        if isinstance(tile, ForwardSm90Tile) and not tile.suits(problem):
            rejected.append(f"not {label}: for {_SERVES[tile.serves]}")
            continue
        if shared > device.shared_bytes_per_block or needed > device.shared_bytes_per_sm:
            rejected.append(
                f"not {label}: {shared} bytes for each exceed the {device.shared_bytes_per_sm} bytes of shared memory "
                "of a multiprocessor"
            )
            continue
        return tile, "\n".join([f"{label}: {tile.origin}", *rejected])
    raise NotImplementedError(
        f"device: no tile of {problem.dtype} at head dimensions {problem.head_dim} and {problem.head_dim_v} fits "
        f"{device.name}, got {device.shared_bytes_per_block} bytes of shared memory a block, expected more; NumPy "
        "arrays are served on the CPU"
    )


_DTYPE_TAGS = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32", "float64": "Float64"}


def _common_defines(problem: Problem, device: DeviceSpec, load_bytes: int, store_bytes: int) -> dict[str, str | int]:
    transforms = problem.softcap is not None or problem.alibi_slopes is not None or problem.bias is not None
    return {
        "CUFLASH_ARCH": device.arch,
        "CUFLASH_DTYPE": _DTYPE_TAGS[problem.dtype],
        "CUFLASH_ROUNDS_TO_TF32": int("tf32" in _options(problem)),
        "CUFLASH_HEAD_DIM": problem.head_dim,
        "CUFLASH_HEAD_DIM_V": problem.head_dim_v,
        "CUFLASH_LOAD_BYTES": load_bytes,
        "CUFLASH_STORE_BYTES": store_bytes,
        "CUFLASH_HAS_RIGHT_BOUND": int(problem.window_right is not None),
        "CUFLASH_HAS_LEFT_BOUND": int(problem.window_left is not None),
        "CUFLASH_HAS_SOFTCAP": int(problem.softcap is not None),
        "CUFLASH_HAS_ALIBI": int(problem.alibi_slopes is not None),
        "CUFLASH_HAS_MASK": int(problem.mask is not None),
        "CUFLASH_BIAS_BYTES": ITEMSIZE[problem.bias.dtype] if problem.bias is not None else 0,
        "CUFLASH_KV_LENGTHS_BYTES": ITEMSIZE[problem.kv_lengths.dtype] if problem.kv_lengths is not None else 0,
        "CUFLASH_SCALE_IN_EXPONENT": int(not transforms and problem.scale > 0),
        "CUFLASH_PARAMS_BYTES": PARAMS_BYTES,
        "CUFLASH_PAIRS": 0,
    }


def _options(problem: Problem) -> list[str]:
    """Names of what makes the kernels of this problem differ from plain attention."""
    return [
        name
        for name, on in (
            ("right_bound", problem.window_right is not None),
            ("left_bound", problem.window_left is not None),
            ("softcap", problem.softcap is not None),
            ("alibi_slopes", problem.alibi_slopes is not None),
            ("bias", problem.bias is not None),
            ("mask", problem.mask is not None),
            ("kv_lengths", problem.kv_lengths is not None),
            ("tf32", problem.dtype == "float32" and problem.precision == "tf32"),
        )
        if on
    ]


def _symbol(source: str, problem: Problem, tile: Tile) -> str:
    """The kernel's symbol spells its configuration, for profilers."""
    dims = f"d{problem.head_dim}" + (f"x{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    parts = [source.removesuffix(".cu"), problem.dtype, dims, f"{tile.block_m}x{tile.block_n}", *_options(problem)]
    return "_".join(parts)
