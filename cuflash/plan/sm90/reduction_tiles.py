"""Tiles of the reductions of the weights for compute capability 9.0, and their tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from cuflash.plan.tiles import ARITHMETIC, FEW_CANDIDATES, Tile, candidate_bytes, chunked_bytes, maker


@dataclass(frozen=True, kw_only=True)
class ColumnSm90Tile(Tile):
    """One way to cut a reduction over queries for compute capability 9.0. A consumer owns 64 of the block_n keys."""

    max_dim: int
    block_m: int
    block_n: int
    num_stages: int
    min_blocks: int
    origin: str = field(compare=False)

    variations: ClassVar = {"block_n": (64, 128, 192, 256), "num_stages": (2, 3)}

    element_bytes = 2
    dim_multiple = 16
    fragments_ahead = 0

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_n in (64, 128, 192, 256), "64 keys for each consumer"),
            (self.block_m in (64, 128), "whole groups of rows with row sums"),
        )

    @property
    def num_warps(self) -> int:
        """Four warps for each consumer, and the producer."""
        return 4 * self.block_n // 64 + 1

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        stage = chunked_bytes(self.block_m, dim) + self.block_m * 8
        return chunked_bytes(self.block_n, dim) + self.num_stages * (stage + 16) + 16


@dataclass(frozen=True, kw_only=True)
class TopSm90Tile(Tile):
    """One way to find the strongest keys on compute capability 9.0. A consumer owns 64 of the block_m queries."""

    max_dim: int
    block_m: int
    block_n: int
    num_stages: int
    min_blocks: int
    capacity: int = FEW_CANDIDATES  # candidates of a row
    origin: str = field(compare=False)

    defined = ("capacity",)
    variations: ClassVar = {"block_m": (64, 128, 192, 256), "block_n": (64, 128), "num_stages": (2, 3)}

    element_bytes = 2
    dim_multiple = 16
    fragments_ahead = 0

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return ((self.block_m in (64, 128, 192, 256), "64 queries for each consumer"),)

    @property
    def num_warps(self) -> int:
        """Four warps for each consumer, and the producer."""
        return 4 * self.block_m // 64 + 1

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        tiles = chunked_bytes(self.block_m, dim) + self.num_stages * (chunked_bytes(self.block_n, dim) + 16)
        return tiles + (self.num_warps - 1) * candidate_bytes(self.capacity, self.element_bytes) + 16


@dataclass(frozen=True, kw_only=True)
class MaximaSm90Tile(Tile):
    """One way to find the first key with the largest score of each row. A consumer owns 64 of the block_m queries."""

    max_dim: int
    block_m: int
    block_n: int
    num_stages: int
    origin: str = field(compare=False)

    role = "maxima"
    variations: ClassVar = {"block_m": (64, 128, 192, 256), "num_stages": (2, 3, 4)}

    element_bytes = 2
    dim_multiple = 16
    fragments_ahead = 0
    min_blocks = 1

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return ((self.block_m % 64 == 0 and self.block_n == 128, "64 queries for each consumer, and 128 keys"),)

    @property
    def num_warps(self) -> int:
        """Four warps for each consumer, and the producer."""
        return 4 * self.block_m // 64 + 1

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        queries = self.block_m // 64 * chunked_bytes(64, dim)
        return queries + self.num_stages * (chunked_bytes(self.block_n, dim) + 16) + 16


_columns_sm90 = maker(ColumnSm90Tile, "max_dim block_m block_n num_stages min_blocks origin")
_top_sm90 = maker(TopSm90Tile, "max_dim block_m block_n num_stages min_blocks origin")
_maxima_sm90 = maker(MaximaSm90Tile, "max_dim block_m block_n num_stages origin")

# On an H200, in times of the forward pass, full / causal (bfloat16, batch 4, seqlen 4096, heads x head_dim 2048).
COLUMN_SM90_TILES = (
    _columns_sm90(64, 128, 128, 3, 2, "0.85 / 0.84; 256 keys and one block an SM 0.85 / 0.88; 64 queries 0.93 / 0.93"),
    _columns_sm90(128, 128, 128, 2, 2, "0.64 / 0.62; 256 keys and one block an SM 0.63 / 0.64; 64 queries 0.79 / 0.74"),
)

# On an H200, as above, in times of the forward pass, full / causal, for the 16 strongest keys.
# fmt: off
TOP_SM90_TILES = (
    _top_sm90(64, 128, 64, 3, 2, "2.1 / 3.1; 2 stages 2.2 / 3.0, 64 queries in 3 or 4 blocks 2.4 / 3.5"),
    _top_sm90(128, 256, 64, 2, 1, "1.8 / 2.5; 192 x 128 2.1 / 2.8, 128 x 128 2.2 / 3.2, 192 x 64 2.3 / 2.9"),
)
# fmt: on

# The products of four warpgroups fill the tensor cores while each of them looks for maxima.
MAXIMA_SM90_TILES = (
    _maxima_sm90(64, 256, 128, 4, ARITHMETIC),
    _maxima_sm90(128, 256, 128, 3, ARITHMETIC),
    _maxima_sm90(256, 128, 128, 2, ARITHMETIC),
)
