"""Tiles of the kernels for wide heads on compute capability 9.0, and their tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from cuflash.plan.device import DeviceSpec
from cuflash.plan.key_splits import DECODE_ROWS
from cuflash.plan.sm90.scored import Sm90Tile
from cuflash.plan.tensor_map import CHUNK
from cuflash.plan.tiles import ARITHMETIC, chunked_bytes, maker
from cuflash.spec.problem import Problem

ONE_PASS_COLUMNS = 512  # columns of the output whose sums registers hold


@dataclass(frozen=True, kw_only=True)
class ForwardWideSm90Tile(Sm90Tile):
    """One way to cut the forward pass of wide heads for compute capability 9.0. A block owns 64 of the block_m queries.

    Blocks that share a tile of queries are a cluster.
    """

    block_m: int
    block_n: int
    num_stages: int  # boxes of block_n keys and 64 columns of k or v

    defined: ClassVar[tuple[str, ...]] = ("wide_sum", "column_blocks")
    num_warps = 16  # four each for the two halves of the output, for scores and for the producer
    wide_sum = "kOut"
    column_blocks = 1

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m in (64, 128), "64 queries for each of one or two blocks"),
            (self.block_n % 16 == 0 and self.block_n <= 128, "a block_n whose weights registers hold"),
        )

    @property
    def cluster(self) -> int:
        return self.block_m // 64

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        boxes = self.num_stages * chunked_bytes(self.block_n, CHUNK)
        weights = self.block_n * CHUNK * 2 + 128 * 8  # with the factors of the rows of 128 threads
        return chunked_bytes(64, dim) + boxes + weights + 16 + 32 * self.num_stages + 24

    def why_not(self, problem: Problem, device: DeviceSpec) -> str | None:
        # If queries attend to equally many keys, blocks read them at the same time, so L2 has them without a cluster.
        needs_cluster = problem.window_right is not None and problem.seqlen_q > 64
        if (self.cluster == 2) == needs_cluster:
            return None
        return (
            "for more than 64 queries, under a causal mask"
            if self.cluster == 2
            else "for up to 64 queries, or without a causal mask"
        )


@dataclass(frozen=True, kw_only=True)
class DecodeWideSm90Tile(ForwardWideSm90Tile):
    """The decode tile: 64 queries of all heads that share a KV head in a block, 128 in a cluster of two."""

    v_in_k: bool = False  # tiles of keys hold the values, too: they are loaded once, and stay

    defined = (*ForwardWideSm90Tile.defined, "v_in_k")
    serves_nothing_else = True

    def why_not(self, problem: Problem, device: DeviceSpec) -> str | None:
        if self.v_in_k and (not problem.v.in_k or problem.head_dim_v > ONE_PASS_COLUMNS):
            return f"for values that are the first columns of the keys, up to {ONE_PASS_COLUMNS} of them"
        rows = problem.group_size * problem.seqlen_q
        suits = (self.cluster == 2) == (rows > DECODE_ROWS)
        return None if suits else f"for {'more' if self.cluster == 2 else 'no more'} than {DECODE_ROWS} rows"


@dataclass(frozen=True, kw_only=True)
class BackwardWideSm90Tile(Sm90Tile):
    """One way to cut dv and dk of wide heads for compute capability 9.0, each of which has its own kernel.

    A block owns block_n keys, and its share of their columns; blocks that share keys are a cluster.
    """

    num_stages: int  # boxes of 64 queries and 64 columns of q or dout, besides 64 rows of k and v
    dv_stages: int  # the same with rows of k alone
    column_blocks: int = 1
    wide_sum: str = "kDk"

    defined = ("wide_sum", "column_blocks")
    block_m = 64
    block_n = 64
    num_warps = 16  # four each for the two halves of the sums, for scores and for the producer

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return ((self.column_blocks in (1, 2), "columns of one or two blocks"),)

    @property
    def cluster(self) -> int:
        return self.column_blocks

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        owned = self._owned_bytes(dim) + (0 if self.wide_sum == "kDv" else self._owned_bytes(dim_v))
        of_keys = self.wide_sum != "kDq"
        statistics = (2 * 64 * 8 + 32) * of_keys
        partial = (64 * 64 * 4 + 16) * (self.column_blocks - 1)  # of the scores, from the other block
        return owned + self.num_stages * (chunked_bytes(64, CHUNK) + 32) + 64 * 64 * 2 + statistics + partial + 16 + 24

    def _owned_bytes(self, dim: int) -> int:
        """Bytes of the rows of a block, of which it has whole chunks of columns."""
        return -(-chunked_bytes(1, dim) // chunked_bytes(1, CHUNK) // self.column_blocks) * chunked_bytes(64, CHUNK)

    def of_dv(self) -> BackwardWideSm90Tile:
        """The row of the kernel that makes dv."""
        return replace(self, num_stages=self.dv_stages, wide_sum="kDv")


@dataclass(frozen=True, kw_only=True)
class DqWideSm90Tile(BackwardWideSm90Tile):
    """The same for dq. A block owns block_m queries."""

    wide_sum: str = "kDq"

    role = "dq"


_forward_wide = maker(ForwardWideSm90Tile, "max_dim block_m block_n num_stages origin")


def _h100(case: str, rates: str) -> str:
    return f"on an H100 {rates} (bfloat16, {case})"


def _h200(case: str, rates: str) -> str:
    return f"on an H200 {rates} (bfloat16, {case})"


# fmt: off
# A row has as many boxes as fit with the queries.
FORWARD_WIDE_SM90_TILES = (
    #            max_dim  m   n    boxes
    _forward_wide(320,  64,  128, 10, _h200("batch x heads 4 x 6, seqlen 4096", "623 TFLOP/s")),
    _forward_wide(320,  128, 128, 10, _h200("4 x 6, 4096 causal", "577 TFLOP/s, 550 without clusters")),
    _forward_wide(512,  64,  128, 9,  _h200("4 x 4, 4096; 1 x 4, 16384", "690 and 714 TFLOP/s, by mma.sync 177")),
    _forward_wide(512,  128, 128, 9,  _h200("the same, causal", "638 and 689 TFLOP/s, 568 and 611 without clusters")),
    _forward_wide(576,  64,  128, 8,  _h200("4 x 3, 4096, head_dim_v 512", "703 TFLOP/s")),
    _forward_wide(576,  128, 128, 8,  _h200("the same, causal", "650 TFLOP/s, 568 without clusters")),
    _forward_wide(768,  64,  128, 7,  _h200("4 x 2, 4096", "456 TFLOP/s")),
    _forward_wide(768,  128, 128, 7,  ARITHMETIC),
    _forward_wide(1024, 64,  128, 5,  _h200("4 x 2, 4096", "415 TFLOP/s")),
    _forward_wide(1024, 128, 128, 5,  ARITHMETIC),
)
# fmt: on
_DECODE_ORIGINS = {
    (576, 64): _h200("batch 32, 16 heads over 1, 8192 keys, head_dim_v 512", "3.92 TB/s, a copy 4.24"),
    (576, 128): _h200("8, 128 over 1, 16384; 1, 65536; head_dim_v 512", "2.92 and 2.62 TB/s, a copy 4.24"),
}
_decode_wide = maker(DecodeWideSm90Tile, "max_dim block_m block_n num_stages origin")
DECODE_WIDE_SM90_TILES = (
    # Two tiles of keys fit with the queries. A row for two blocks gained nothing (8, 128 over 1, 16384: 102 us, with
    # values that are loaded again, from L2, 100).
    _decode_wide(
        576, 64, 64, 18, _h100("batch 32, 16 heads over 1, 8192 keys", "123 us, from two arrays 174"), v_in_k=True
    ),
    *(
        _decode_wide(
            *(tile.max_dim, tile.block_m, tile.block_n, tile.num_stages),
            _DECODE_ORIGINS.get((tile.max_dim, tile.block_m), ARITHMETIC),
        )
        for tile in FORWARD_WIDE_SM90_TILES
    ),
)

_backward_wide = maker(BackwardWideSm90Tile, "max_dim column_blocks num_stages dv_stages origin")


# A row has as many boxes as fit with the rows of a block. Where registers do not hold the sums of all columns, two
# blocks divide them.
BACKWARD_WIDE_SM90_TILES = (
    #              max_dim blocks boxes of dv
    _backward_wide(320, 1, 16, 21, _h100("batch x heads 4 x 6, seqlen 4096, full / causal", "357 / 310 TFLOP/s")),
    _backward_wide(512, 1, 10, 18, _h100("4 x 4, 4096", "377 / 338 TFLOP/s")),
    _backward_wide(576, 1, 9, 17, _h100("4 x 3, 4096, head_dim_v 512", "373 / 341 TFLOP/s, by two blocks 211 / 198")),
    _backward_wide(640, 2, 15, 20, ARITHMETIC),
    _backward_wide(768, 2, 13, 19, _h100("4 x 2, 4096", "258 / 253 TFLOP/s")),
    _backward_wide(896, 2, 11, 18, ARITHMETIC),
    _backward_wide(1024, 2, 9, 17, _h100("4 x 2, 4096", "286 / 255 TFLOP/s")),
)
DQ_WIDE_SM90_TILES = tuple(
    DqWideSm90Tile(
        max_dim=tile.max_dim,
        column_blocks=tile.column_blocks,
        num_stages=tile.num_stages,
        dv_stages=tile.dv_stages,
        origin=tile.origin,
    )
    for tile in BACKWARD_WIDE_SM90_TILES
)
