"""Tiles of the kernels for every device from compute capability 7.0 on, and their tables.

The first row of a table that serves the head dimensions, and whose shared memory fits, is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from cuflash.plan.tiles import (
    ARITHMETIC,
    FEW_CANDIDATES,
    MEDIUM,
    MEDIUM_OR_SMALL,
    SMALL,
    TINY,
    Role,
    Tile,
    candidate_bytes,
    h200,
    h200_float64,
    maker,
    tile_bytes,
)
from cuflash.spec.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Sm80Tile(Tile):
    """The fields that the rows of all tables here have: see `Tile`."""

    element_bytes: int = 2
    max_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    min_blocks: int
    fragments_ahead: int = 0
    origin: str = field(compare=False)

    warps_d = 1  # warps along the columns of the products of a row

    @property
    def dim_multiple(self) -> int:
        """Head dimensions are padded so that every warp gets the same number of 16-wide fragments of their columns."""
        return 16 * self.warps_d

    def tiles_bytes(self, rows: int, *dims: int) -> int:
        """Shared memory of tiles of so many rows, one for each number of columns."""
        return sum(tile_bytes(rows, d, self.element_bytes) for d in dims)


@dataclass(frozen=True, kw_only=True)
class ForwardTile(Sm80Tile):
    """One way to cut the forward pass. A block owns block_m queries; warps_d warps share 16-row fragments of them."""

    warps_d: int = 1  # warps along the columns of the output
    key_bytes: int = 0  # bytes of an element of k and v, where they are not element_bytes

    defined = ("warps_d",)
    variations: ClassVar = {"block_n": (16, 32, 64, 128), "num_stages": (1, 2), "min_blocks": (1, 2, 3)}

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.num_warps % self.warps_d == 0, "warps_d divides num_warps"),
            (self.block_m * self.warps_d % (16 * self.num_warps) == 0, "whole fragments for every warp"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        size = self.element_bytes
        q = tile_bytes(self.block_m, max(dim, dim_v), size)
        keys = (tile_bytes(self.block_n, d, self.key_bytes or size) for d in (dim, dim_v))
        return q + self.num_stages * sum(keys)


@dataclass(frozen=True, kw_only=True)
class ChunkedTile(Sm80Tile):
    """One way to cut the forward pass without values where q and k arrive by chunks of `chunk_columns` columns."""

    chunk_columns: int
    chunk_warps: int  # warps that share rows, each with some of the keys of a tile

    defined: ClassVar[tuple[str, ...]] = ("chunk_columns", "chunk_warps")
    variations: ClassVar = {"block_n": (32, 64, 128), "num_stages": (2, 3), "min_blocks": (1, 2)}

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m * self.chunk_warps % (16 * self.num_warps) == 0, "whole fragments for every warp"),
            (self.block_n % (16 * self.chunk_warps) == 0, "16 keys for every warp"),
            (self.num_stages >= 2, "a stage for a chunk that arrives"),
        )

    @property
    def dim_multiple(self) -> int:
        """Head dimensions are padded to whole chunks."""
        return self.chunk_columns

    @property
    def stage_bytes(self) -> int:
        """A chunk of the rows of both operands."""
        rows = self.block_m + self.block_n
        return tile_bytes(rows, self.chunk_columns, self.element_bytes)

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        return self.num_stages * self.stage_bytes


@dataclass(frozen=True, kw_only=True)
class BackwardChunkedTile(ChunkedTile):
    """The same for dk: a block owns block_n keys, and slice_chunks chunks of the columns of their gradient.

    Warps that share rows, chunk_warps of them, each have some of the columns of a chunk, too.
    """

    slice_chunks: int

    defined = ("chunk_columns", "chunk_warps", "slice_chunks")
    variations: ClassVar = {"block_m": (32, 64), "num_stages": (2, 3), "slice_chunks": (2, 4, 8)}

    @property
    def own_rows(self) -> int:
        """Rows that a block owns, of the operand whose gradient it makes."""
        return self.block_n

    def rules(self) -> tuple[tuple[bool, str], ...]:
        streamed = self.block_m + self.block_n - self.own_rows
        return (
            (self.own_rows * self.chunk_warps % (16 * self.num_warps) == 0, "whole fragments for every warp"),
            (streamed % (16 * self.chunk_warps) == 0, "16 streamed rows for every warp"),
            (self.chunk_columns % (16 * self.chunk_warps) == 0, "16 columns of a chunk for every warp"),
            (self.num_stages >= 2, "a stage for a chunk that arrives"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        streamed = self.block_m + self.block_n - self.own_rows
        return tile_bytes(self.own_rows, streamed, self.element_bytes) + self.num_stages * self.stage_bytes

    def slices(self, problem: Problem) -> int:
        """How many blocks share a tile of rows."""
        dim, _ = self.padded_dims(problem)
        return -(-dim // (self.chunk_columns * self.slice_chunks))


@dataclass(frozen=True, kw_only=True)
class DqChunkedTile(BackwardChunkedTile):
    """The same for dq: a block owns block_m queries."""

    role = "dq"
    variations: ClassVar = {"block_n": (32, 64), "num_stages": (2, 3), "slice_chunks": (2, 4, 8)}

    @property
    def own_rows(self) -> int:
        return self.block_m


@dataclass(frozen=True, kw_only=True)
class JvpTile(Sm80Tile):
    """One way to cut attention with its tangent. A block owns block_m queries, 16 of which warps_d warps share."""

    warps_d: int = 1  # warps along the columns of the output
    num_stages: int = 1

    defined = ("warps_d",)
    variations: ClassVar = {"block_n": (16, 32, 64), "min_blocks": (1, 2)}

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return ((self.block_m * self.warps_d == 16 * self.num_warps, "one fragment of rows for every warp"),)

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        operands = self.tiles_bytes(self.block_m, max(dim, dim_v)) + self.tiles_bytes(self.block_n, dim, dim_v)
        # Warps of the same rows share the scores that each makes, where there are 16 keys for more than one of them.
        is_shared = min(self.warps_d, self.block_n // 16) > 1
        return 2 * (operands + self.block_m * self.block_n * max(self.element_bytes, 4) * is_shared)


@dataclass(frozen=True, kw_only=True)
class DqJvpTile(JvpTile):
    """One way to cut the kernel of the tangent of dq. A block owns block_m queries, 16 of which warps_d warps share."""

    role: ClassVar[Role] = "dq"

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        return 2 * (self.tiles_bytes(self.block_m, dim, dim_v) + self.tiles_bytes(self.block_n, dim, dim_v))


@dataclass(frozen=True, kw_only=True)
class BackwardTile(Sm80Tile):
    """One way to cut the backward pass. A block owns block_n keys; warps_d warps share the rows of 16-row fragments."""

    warps_d: int = field()  # warps along the columns of dk and dv
    dq_warps_m: int  # warps along the rows of dq; the others share its columns

    defined: ClassVar[tuple[str, ...]] = ("warps_d", "warps_q", "dq_warps_m")
    variations: ClassVar = {"block_m": (16, 32, 64), "block_n": (16, 32, 64, 128), "num_stages": (1, 2)}

    def rules(self) -> tuple[tuple[bool, str], ...]:
        warps_n = self.num_warps // self.warps_d
        return (
            (warps_n * self.warps_d == self.num_warps, "warps_d divides num_warps"),
            (self.block_n % (16 * warps_n) == 0, "whole fragments of keys for every warp"),
            (self.block_m % (16 * self.warps_q) == 0, "whole pairs of 8 queries for every warp"),
            (self.num_warps % self.dq_warps_m == 0, "dq_warps_m divides num_warps"),
            (self.block_m % (16 * self.dq_warps_m) == 0, "whole fragments of dq for every warp"),
        )

    @property
    def warps_q(self) -> int:
        """Warps along the queries of a fragment of keys: as many of the warps_d as there are 16 queries for each."""
        return min(self.warps_d, self.block_m // 16)

    @property
    def dim_multiple(self) -> int:
        """Head dimensions are padded so that every warp gets the same number of 16-wide fragments of their columns."""
        return 16 * max(self.warps_d, self.num_warps // self.dq_warps_m)

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        queries = self.tiles_bytes(self.block_m, dim, dim_v) + self.block_m * 2 * max(self.element_bytes, 4)
        return self.tiles_bytes(self.block_n, dim, dim_v, *[self.block_m] * 2) + self.num_stages * queries


@dataclass(frozen=True, kw_only=True)
class BackwardJvpTile(BackwardTile):
    """One way to cut the tangents of gradients. A block owns block_n keys, 16 of which warps_d warps share.

    Either these divide the products of scores, share what they make of them, and add to tdq. Or each makes all of them,
    for itself, and tdq has a kernel of its own: that takes less shared memory.
    """

    num_stages: int = 1
    shares: bool = True

    defined = (*BackwardTile.defined, "shares")
    variations: ClassVar = {"block_m": (16, 32, 64), "num_stages": (1, 2), "min_blocks": (1, 2)}

    def rules(self) -> tuple[tuple[bool, str], ...]:
        one_fragment = self.block_n * self.warps_d == 16 * self.num_warps
        return (*super().rules(), (one_fragment, "one fragment of keys for every warp"))

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        keys, queries = (self.tiles_bytes(n, dim, dim_v) for n in (self.block_n, self.block_m))
        tiles = 0 if not self.shares else 2 if self.warps_d == 1 else 4  # tdx and dx; P u and P
        return 2 * (keys + self.num_stages * queries) + tiles * self.tiles_bytes(self.block_n, self.block_m)


@dataclass(frozen=True, kw_only=True)
class DqTile(Sm80Tile):
    """One way to cut the kernel that computes dq in a fixed order. A block owns block_m queries."""

    num_stages: int = 2
    dq_warps_d: int = 1  # warps along the columns of dq

    role = "dq"
    defined = ("warps_d", "warps_q", "dq_warps_m")
    variations: ClassVar = {"block_n": (16, 32, 64), "num_stages": (1, 2)}
    warps_q = 1  # of dk and dv, which it does not make, as warps_d

    @property
    def dq_warps_m(self) -> int:
        """Warps along the rows of dq."""
        return self.num_warps // self.dq_warps_d

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.num_warps % self.dq_warps_d == 0, "dq_warps_d divides num_warps"),
            (self.block_m * self.dq_warps_d % (16 * self.num_warps) == 0, "whole fragments for every warp"),
        )

    @property
    def dim_multiple(self) -> int:
        """Head dimensions are padded so that every warp gets the same number of 16-wide fragments of their columns."""
        return 16 * self.dq_warps_d

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        return self.tiles_bytes(self.block_m, dim, dim_v) + self.num_stages * self.tiles_bytes(self.block_n, dim, dim_v)


@dataclass(frozen=True, kw_only=True)
class ColumnTile(Sm80Tile):
    """One way to cut a reduction over queries. A block owns block_n keys, of which each warp has its own."""

    variations: ClassVar = {"block_m": (16, 32, 64), "block_n": (32, 64, 128), "num_stages": (1, 2)}

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_n % (16 * self.num_warps) == 0, "whole fragments of keys for every warp"),
            (self.block_m <= 64, "rows of one group of row sums"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        size = self.element_bytes
        stage = tile_bytes(self.block_m, dim, size) + self.block_m * 2 * max(size, 4)
        return tile_bytes(self.block_n, dim, size) + self.num_stages * stage


@dataclass(frozen=True, kw_only=True)
class TopTile(Sm80Tile):
    """One way to cut the search for the strongest keys. A block owns block_m queries, of which each warp has 16."""

    capacity: int = 2 * FEW_CANDIDATES  # candidates of a row

    defined = ("capacity",)
    variations: ClassVar = {"block_n": (16, 32, 64), "num_stages": (1, 2)}

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return ((self.block_m == 16 * self.num_warps, "one fragment of rows for every warp"),)

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        size = self.element_bytes
        tiles = tile_bytes(self.block_m, dim, size) + self.num_stages * tile_bytes(self.block_n, dim, size)
        return tiles + self.num_warps * candidate_bytes(self.capacity, size)


@dataclass(frozen=True, kw_only=True)
class ScoresTile(Sm80Tile):
    """One way to cut `outputs.SCORE_GRADIENTS`. Blocks take tiles of block_m x block_n pairs, in num_stages."""

    role = "scores"
    variations: ClassVar = {"block_n": (16, 32, 64), "num_stages": (1, 2)}
    copies: ClassVar[int] = 1  # arrays for each operand

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return ((self.block_m % (16 * self.num_warps) == 0, "whole fragments for every warp"),)

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        stage = self.tiles_bytes(self.block_m, dim, dim_v) + self.tiles_bytes(self.block_n, dim, dim_v)
        result = self.block_m * (self.block_n + 8) * max(self.element_bytes, 4)
        return max(self.num_stages * self.copies * stage, result)


@dataclass(frozen=True, kw_only=True)
class ScoresChunkedTile(ScoresTile):
    """The same without values, where q and k arrive by chunks of `chunk_columns` columns."""

    chunk_columns: int

    defined = ("chunk_columns",)
    variations: ClassVar = {"block_n": (16, 32, 64)}

    @property
    def dim_multiple(self) -> int:
        """Head dimensions are padded to whole chunks."""
        return self.chunk_columns

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (*super().rules(), (self.num_stages == 2, "a stage for a chunk that arrives"))

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        return super().shared_bytes(self.chunk_columns, 0)


@dataclass(frozen=True, kw_only=True)
class ScoresJvpTile(ScoresTile):
    """The same for the tangents of these: each operand has a tangent."""

    copies = 2


_forward = maker(ForwardTile, "max_dim block_m block_n num_warps num_stages min_blocks fragments_ahead origin")
_chunked = maker(
    ChunkedTile, "max_dim block_m block_n num_warps num_stages min_blocks chunk_columns chunk_warps origin"
)
_OF_GRADIENTS = "max_dim block_m block_n num_warps num_stages min_blocks chunk_columns chunk_warps slice_chunks origin"
_backward_chunked = maker(BackwardChunkedTile, _OF_GRADIENTS)
_dq_chunked = maker(DqChunkedTile, _OF_GRADIENTS)
_jvp = maker(JvpTile, "max_dim block_m block_n num_warps min_blocks warps_d fragments_ahead origin")
_dq_jvp = maker(DqJvpTile, "max_dim block_m block_n num_warps min_blocks warps_d fragments_ahead origin")
_backward = maker(
    BackwardTile,
    "max_dim block_m block_n num_warps num_stages min_blocks warps_d dq_warps_m fragments_ahead origin",
)
_backward_jvp = maker(
    BackwardJvpTile,
    "max_dim block_m block_n num_warps num_stages min_blocks warps_d dq_warps_m fragments_ahead origin",
)
_dq = maker(DqTile, "max_dim block_m block_n num_warps min_blocks origin")
_columns = maker(ColumnTile, "max_dim block_m block_n num_warps num_stages min_blocks fragments_ahead origin")
_top = maker(TopTile, "max_dim block_m block_n num_warps num_stages min_blocks fragments_ahead origin")
_scores = maker(ScoresTile, "max_dim block_m block_n num_warps num_stages min_blocks origin")
_scores_chunked = maker(
    ScoresChunkedTile, "max_dim block_m block_n num_warps num_stages min_blocks chunk_columns origin"
)
_scores_jvp = maker(ScoresJvpTile, "max_dim block_m block_n num_warps num_stages min_blocks origin")


def _with_tangents(tflops: float, ratio: float, pass_name: str, other_rows: str, seqlen: int) -> str:
    """What was measured of a row for tangents, over 6 products of jvp or 10 of backward_jvp."""
    return (
        f"on an H200 {tflops} TFLOP/s, {ratio} times the {pass_name} pass's time, {other_rows} (batch 2, heads 16, "
        f"seqlen {seqlen}, head_dim max_dim)"
    )


# Rows serve elements of `element_bytes`: 2 unless they say otherwise. Registers hold half or a quarter as many wide
# elements, so these get smaller tiles, and at large head dimensions several warps to a row.
# fmt: off
FORWARD_TILES = (
    #        max_dim  m    n  warps stages blocks ahead
    _forward(64,  128, 64,  4, 1, 3, 2, h200("331 / 314, 320 / 253", "296 / 278, 287 / 215")),
    _forward(96,  128, 64,  4, 1, 2, 2, h200("379 / 342, 340 / 263", "344 / 310, 317 / 248")),
    _forward(128, 128, 64,  4, 1, 2, 2, h200("384 / 376, 372 / 291", "334 / 295, 328 / 249")),
    _forward(128, 128, 32,  4, 1, 2, 2, SMALL),
    _forward(128, 64,  32,  4, 1, 2, 2, TINY),
    _forward(192, 128, 128, 8, 1, 1, 0, h200("348 / 307, 317 / 245", "321 / 276, 293 / 227")),
    _forward(192, 64,  64,  4, 1, 1, 2, SMALL),
    _forward(256, 128, 128, 8, 1, 1, 0, h200("342 / 329, 318 / 258", "317 / 281, 307 / 249")),
    _forward(256, 128, 64,  8, 1, 1, 0, h200("323 / 279, 300 / 229", "326 / 284, 306 / 246")),
    _forward(256, 64,  32,  4, 1, 1, 2, SMALL),
    _forward(512, 64,  32,  8, 1, 1, 0, ARITHMETIC, warps_d=2),
    _forward(512, 32,  16,  4, 1, 1, 0, SMALL, warps_d=2),
    _forward(1024, 32, 16,  8, 1, 1, 0, ARITHMETIC, warps_d=4),
    _forward(1024, 16, 16,  4, 1, 1, 0, SMALL, warps_d=4),

    _forward(64,  128, 32,  4, 2, 2, 1, ARITHMETIC, element_bytes=4),
    _forward(64,  64,  64,  4, 1, 1, 1, SMALL, element_bytes=4),
    _forward(128, 128, 32,  4, 1, 2, 1, ARITHMETIC, element_bytes=4),
    _forward(128, 64,  32,  4, 1, 1, 1, MEDIUM_OR_SMALL, element_bytes=4),
    _forward(192, 64,  32,  4, 1, 1, 1, ARITHMETIC, element_bytes=4),
    _forward(256, 64,  16,  4, 1, 1, 1, ARITHMETIC, element_bytes=4),
    _forward(256, 32,  16,  2, 1, 1, 1, TINY, element_bytes=4),
    _forward(512, 32,  16,  4, 1, 1, 1, ARITHMETIC, element_bytes=4, warps_d=2),
    _forward(512, 16,  16,  2, 1, 1, 1, SMALL, element_bytes=4, warps_d=2),
    _forward(1024, 16, 16,  4, 1, 1, 1, ARITHMETIC, element_bytes=4, warps_d=4),

    _forward(64,  128, 48,  8, 1, 1, 0, h200_float64(38.5, 12.3), element_bytes=8),
    _forward(64,  64,  32,  4, 1, 1, 0, SMALL, element_bytes=8),
    _forward(128, 128, 32,  8, 1, 1, 0, h200_float64(42.2, 20.6), element_bytes=8),
    _forward(128, 64,  16,  4, 1, 1, 0, SMALL, element_bytes=8),
    _forward(192, 64,  16,  8, 1, 1, 0, ARITHMETIC, element_bytes=8, warps_d=2),
    _forward(192, 32,  16,  4, 1, 1, 0, SMALL, element_bytes=8, warps_d=2),
    _forward(256, 64,  16,  8, 1, 1, 0, ARITHMETIC, element_bytes=8, warps_d=2),
    _forward(256, 32,  16,  4, 1, 1, 0, MEDIUM, element_bytes=8, warps_d=2),
    _forward(256, 16,  16,  2, 1, 1, 0, SMALL, element_bytes=8, warps_d=2),
    _forward(512, 16,  16,  4, 1, 1, 0, ARITHMETIC, element_bytes=8, warps_d=4),
)

# For head dimensions whose rows do not fit into shared memory, without values.
MOST_CHUNKED = 16384  # columns: by arithmetic, more would round sums of products too far
FORWARD_CHUNKED_TILES = (
    #                      m   n  warps stages blocks chunk warps
    _chunked(MOST_CHUNKED, 64, 128, 8, 3, 2, 64, 4, ARITHMETIC),
    _chunked(MOST_CHUNKED, 64,  64, 4, 2, 1, 64, 1, SMALL),
    _chunked(MOST_CHUNKED, 64,  64, 8, 2, 1, 32, 2, ARITHMETIC, element_bytes=4),
    _chunked(MOST_CHUNKED, 64,  32, 4, 2, 1, 16, 1, ARITHMETIC, element_bytes=8),
)

JVP_TILES = (
    #    max_dim m   n  warps blocks warps_d ahead
    _jvp(64,  64, 64, 4, 2, 1, 0, ARITHMETIC),
    _jvp(128, 64, 32, 4, 2, 1, 0, ARITHMETIC),
    _jvp(128, 32, 16, 2, 1, 1, 0, TINY),
    _jvp(256, 32, 32, 8, 1, 4, 0, ARITHMETIC),
    _jvp(256, 32, 16, 4, 1, 2, 0, SMALL),
    _jvp(512, 32, 16, 8, 1, 4, 0, ARITHMETIC),
    _jvp(512, 16, 16, 4, 1, 4, 0, SMALL),
    _jvp(1024, 16, 16, 8, 1, 8, 0, ARITHMETIC),

    _jvp(64,  64, 16, 4, 1, 1, 0,
         _with_tangents(50.5, 6.1, "forward", "128 x 32 with 8 warps 50.9", 2048), element_bytes=4),
    _jvp(128, 64, 16, 4, 1, 1, 0,
         _with_tangents(48.3, 7.0, "forward", "128 x 16 with 8 warps 47.8, 64 x 32 with 8 warps, of which two share "
                        "rows, 46.5", 2048), element_bytes=4),
    _jvp(128, 32, 16, 4, 1, 2, 0, TINY, element_bytes=4),
    _jvp(256, 32, 16, 8, 1, 4, 0, ARITHMETIC, element_bytes=4),
    _jvp(256, 16, 16, 4, 1, 4, 0, SMALL, element_bytes=4),
    _jvp(512, 16, 16, 8, 1, 8, 0, ARITHMETIC, element_bytes=4),

    _jvp(64,  128, 32, 8, 1, 1, 0,
         _with_tangents(35.0, 2.9, "forward", "128 x 16 33.3, 64 x 32, where two warps share rows, 29.9", 1024),
         element_bytes=8),
    _jvp(64,  64, 16, 4, 1, 1, 0, SMALL, element_bytes=8),
    _jvp(128, 64, 16, 8, 1, 2, 0,
         _with_tangents(25.5, 4.7, "forward", "32 x 32, where four warps share rows, 23.9", 1024), element_bytes=8),
    _jvp(128, 32, 16, 4, 1, 2, 0, MEDIUM, element_bytes=8),
    _jvp(128, 16, 16, 2, 1, 2, 0, SMALL, element_bytes=8),
    _jvp(256, 16, 16, 4, 1, 4, 0, ARITHMETIC, element_bytes=8),
)

BACKWARD_JVP_TILES = (
    #             max_dim m   n  warps stages blocks warps_d dq_warps_m ahead
    _backward_jvp(64,  32, 64, 4, 1, 2, 1, 1, 0, ARITHMETIC),
    _backward_jvp(128, 32, 64, 8, 1, 1, 2, 2, 0, ARITHMETIC),
    _backward_jvp(128, 16, 32, 2, 1, 1, 1, 1, 0, TINY),
    _backward_jvp(256, 32, 32, 8, 1, 1, 4, 2, 0, ARITHMETIC),
    _backward_jvp(256, 16, 16, 4, 1, 1, 4, 1, 0, SMALL),
    _backward_jvp(512, 16, 32, 8, 1, 1, 4, 1, 0, ARITHMETIC),

    _backward_jvp(64,  32, 64, 4, 1, 1, 1, 2, 0,
                  _with_tangents(50.2, 4.1, "backward", "32 x 32 46.2, 16 x 64 45.5", 2048), element_bytes=4),
    _backward_jvp(64,  16, 32, 4, 1, 1, 2, 1, 0, TINY, element_bytes=4),
    _backward_jvp(128, 32, 64, 8, 1, 1, 2, 2, 0,
                  _with_tangents(48.5, 4.6, "backward", "32 x 32 with 4 warps 38.7", 2048), element_bytes=4),
    _backward_jvp(128, 16, 32, 4, 1, 1, 2, 1, 0, MEDIUM, element_bytes=4),
    _backward_jvp(128, 16, 16, 4, 1, 1, 4, 1, 0, SMALL, element_bytes=4),
    _backward_jvp(256, 16, 16, 4, 1, 1, 4, 1, 0, ARITHMETIC, element_bytes=4),
    _backward_jvp(256, 16, 16, 4, 1, 1, 4, 1, 0, SMALL, element_bytes=4, shares=False),

    _backward_jvp(64,  16, 32, 4, 1, 1, 2, 1, 0,
                  _with_tangents(27.4, 2.5, "backward", "32 x 32 24.5, 16 x 64, where each warp has keys of its own, "
                                 "23.0", 1024), element_bytes=8),
    _backward_jvp(64,  16, 16, 4, 1, 1, 4, 1, 0, SMALL, element_bytes=8),
    _backward_jvp(128, 32, 16, 4, 1, 1, 4, 2, 0,
                  _with_tangents(17.3, 4.0, "backward", "16 x 32 with 8 warps 16.9", 1024), element_bytes=8),
    _backward_jvp(128, 16, 16, 4, 1, 1, 4, 1, 0, MEDIUM, element_bytes=8),
    _backward_jvp(192, 16, 16, 4, 1, 1, 4, 1, 0, ARITHMETIC, element_bytes=8),
    _backward_jvp(192, 16, 16, 4, 1, 1, 4, 1, 0, SMALL, element_bytes=8, shares=False),
)

DQ_JVP_TILES = (
    #       max_dim m   n  warps blocks warps_d ahead
    _dq_jvp(64,  64, 32, 4, 2, 1, 0, ARITHMETIC),
    _dq_jvp(128, 64, 32, 4, 1, 1, 0, ARITHMETIC),
    _dq_jvp(128, 32, 16, 2, 1, 1, 0, TINY),
    _dq_jvp(256, 64, 16, 8, 1, 2, 0, ARITHMETIC),
    _dq_jvp(256, 32, 16, 4, 1, 2, 0, SMALL),
    _dq_jvp(512, 32, 16, 8, 1, 4, 0, ARITHMETIC),

    _dq_jvp(64,  64, 16, 4, 1, 1, 0, ARITHMETIC, element_bytes=4),
    _dq_jvp(64,  32, 16, 4, 1, 2, 0, TINY, element_bytes=4),
    _dq_jvp(128, 32, 16, 4, 1, 2, 0, ARITHMETIC, element_bytes=4),
    _dq_jvp(256, 16, 16, 4, 1, 4, 0, ARITHMETIC, element_bytes=4),

    _dq_jvp(64,  32, 16, 4, 1, 2, 0, ARITHMETIC, element_bytes=8),
    _dq_jvp(128, 16, 16, 4, 1, 4, 0, ARITHMETIC, element_bytes=8),
    _dq_jvp(192, 16, 16, 4, 1, 4, 0, ARITHMETIC, element_bytes=8),
)

BACKWARD_TILES = (
    #         max_dim m   n  warps stages blocks warps_d dq_warps_m ahead
    _backward(64,  32, 128, 4, 2, 2, 1, 1, 2, h200("329 / 313, 300 / 232", "271 / 243, 243 / 184")),
    _backward(64,  32, 128, 4, 2, 1, 1, 1, 2, SMALL),
    _backward(96,  64, 128, 8, 2, 1, 2, 4, 0, h200("285 / 261, 255 / 198", "291 / 241, 255 / 180")),
    _backward(96,  32, 64,  4, 2, 1, 1, 2, 0, SMALL),
    _backward(128, 64, 128, 8, 2, 1, 2, 2, 0, h200("323 / 301, 289 / 224", "297 / 271, 261 / 205")),
    _backward(128, 32, 64,  4, 2, 1, 1, 1, 0, SMALL),
    _backward(192, 64, 64,  8, 2, 1, 4, 2, 0, h200("246 / 231, 223 / 185", "254 / 245, 224 / 190")),
    _backward(192, 32, 64,  8, 2, 1, 2, 2, 0, MEDIUM),
    _backward(192, 32, 32,  4, 2, 1, 2, 2, 0, SMALL),
    _backward(256, 64, 64,  8, 2, 1, 4, 4, 0, h200("255 / 250, 231 / 201", "253 / 228, 225 / 180")),
    _backward(256, 32, 64,  8, 2, 1, 2, 1, 0, MEDIUM),
    _backward(256, 32, 32,  4, 1, 1, 2, 2, 0, SMALL),
    _backward(256, 16, 32,  4, 1, 1, 2, 1, 0, TINY),
    _backward(512, 32, 32,  8, 1, 1, 4, 2, 0, ARITHMETIC),
    _backward(512, 16, 16,  4, 1, 1, 4, 1, 0, SMALL),
    _backward(1024, 16, 16, 8, 1, 1, 8, 1, 0, ARITHMETIC),

    _backward(64,  32, 64,  4, 2, 2, 1, 2, 1, ARITHMETIC, element_bytes=4),
    _backward(64,  32, 64,  4, 2, 1, 1, 2, 1, SMALL, element_bytes=4),
    _backward(128, 32, 64,  8, 2, 1, 2, 2, 1, ARITHMETIC, element_bytes=4),
    _backward(128, 32, 32,  4, 1, 1, 2, 2, 1, SMALL, element_bytes=4),
    _backward(192, 32, 64,  8, 1, 1, 2, 2, 1, ARITHMETIC, element_bytes=4),
    _backward(192, 32, 16,  2, 1, 1, 2, 2, 1, SMALL, element_bytes=4),
    _backward(256, 32, 64,  8, 1, 1, 2, 2, 1, ARITHMETIC, element_bytes=4),
    _backward(256, 32, 32,  4, 1, 1, 2, 2, 1, MEDIUM, element_bytes=4),
    _backward(256, 16, 16,  2, 1, 1, 2, 1, 1, SMALL + "; for 64 KiB up to head_dim 224", element_bytes=4),
    _backward(512, 16, 16,  8, 1, 1, 8, 1, 1, ARITHMETIC, element_bytes=4),

    _backward(64,  16, 64,  4, 2, 1, 1, 1, 0, h200_float64(39.4, 28.5), element_bytes=8),
    _backward(64,  32, 32,  4, 1, 1, 2, 2, 0, SMALL, element_bytes=8),
    _backward(128, 32, 64,  8, 1, 1, 2, 2, 0, h200_float64(36.5, 41.4), element_bytes=8),
    _backward(128, 32, 32,  4, 1, 1, 2, 2, 0, MEDIUM, element_bytes=8),
    _backward(192, 16, 16,  4, 1, 1, 4, 1, 0, ARITHMETIC, element_bytes=8),
    _backward(192, 16, 16,  2, 1, 1, 2, 1, 0, SMALL + ", up to head_dim 160", element_bytes=8),
    _backward(256, 16, 32,  8, 1, 1, 4, 1, 0, ARITHMETIC, element_bytes=8),
    _backward(256, 16, 16,  4, 1, 1, 4, 1, 0, MEDIUM, element_bytes=8),
    _backward(384, 16, 16,  8, 1, 1, 8, 1, 0, ARITHMETIC, element_bytes=8),
)

BACKWARD_CHUNKED_TILES = (
    #                               m   n  warps stages blocks chunk warps slice
    _backward_chunked(MOST_CHUNKED, 64, 64, 8, 2, 1, 64, 2, 8, ARITHMETIC),
    _backward_chunked(MOST_CHUNKED, 64, 64, 8, 2, 1, 32, 2, 8, ARITHMETIC, element_bytes=4),
    _backward_chunked(MOST_CHUNKED, 32, 32, 4, 2, 1, 32, 2, 4, ARITHMETIC, element_bytes=8),
)

DQ_CHUNKED_TILES = (
    #                         m   n  warps stages blocks chunk warps slice
    _dq_chunked(MOST_CHUNKED, 64, 64, 8, 2, 1, 64, 2, 8, ARITHMETIC),
    _dq_chunked(MOST_CHUNKED, 64, 64, 8, 2, 1, 32, 2, 8, ARITHMETIC, element_bytes=4),
    _dq_chunked(MOST_CHUNKED, 32, 32, 4, 2, 1, 32, 2, 4, ARITHMETIC, element_bytes=8),
)

# The numbers are those of the whole deterministic backward pass.
DQ_TILES = (
    #   max_dim m    n  warps blocks
    _dq(64,  128, 64, 4, 2, h200("272 / 261, 259 / 204", "271 / 243, 243 / 184")),
    _dq(64,  64,  64, 4, 2, SMALL),
    _dq(128, 128, 32, 4, 1, h200("260 / 251, 246 / 197", "297 / 271, 261 / 205")),
    _dq(192, 64,  32, 4, 2, "two blocks of 96 KiB; by arithmetic, not measured"),
    _dq(192, 64,  32, 4, 1, SMALL),
    _dq(256, 128, 32, 8, 1, h200("213 / 208, 198 / 173", "253 / 228, 225 / 180")),
    _dq(256, 64,  32, 4, 1, MEDIUM),
    _dq(256, 32,  16, 2, 1, SMALL),
    _dq(512, 32,  32, 8, 1, ARITHMETIC, dq_warps_d=4, num_stages=1),
    _dq(512, 16,  16, 4, 1, SMALL, dq_warps_d=4, num_stages=1),
    _dq(1024, 16, 16, 8, 1, ARITHMETIC, dq_warps_d=8, num_stages=1),

    _dq(64,  64,  32, 4, 1, ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _dq(128, 64,  16, 4, 1, ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _dq(192, 64,  16, 4, 1, ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _dq(192, 32,  16, 2, 1, SMALL, element_bytes=4, fragments_ahead=1),
    _dq(256, 64,  16, 4, 1, ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _dq(256, 32,  16, 2, 1, MEDIUM, element_bytes=4, fragments_ahead=1),
    _dq(256, 32,  16, 2, 1, SMALL, element_bytes=4, fragments_ahead=1, num_stages=1),
    _dq(256, 16,  16, 2, 1, TINY, element_bytes=4, fragments_ahead=1, num_stages=1, dq_warps_d=2),
    _dq(512, 16,  16, 8, 1, ARITHMETIC, element_bytes=4, fragments_ahead=1, num_stages=1, dq_warps_d=8),

    _dq(64,  64,  16, 4, 1, ARITHMETIC, element_bytes=8),
    _dq(128, 64,  16, 4, 1, ARITHMETIC, element_bytes=8),
    _dq(128, 32,  16, 4, 1, MEDIUM, element_bytes=8, dq_warps_d=2),
    _dq(128, 16,  16, 2, 1, SMALL, element_bytes=8, dq_warps_d=2),
    _dq(192, 32,  16, 4, 1, ARITHMETIC, element_bytes=8, dq_warps_d=2),
    _dq(192, 16,  16, 2, 1, SMALL, element_bytes=8, dq_warps_d=2, num_stages=1),
    _dq(256, 16,  16, 4, 1, ARITHMETIC, element_bytes=8, dq_warps_d=4),
    _dq(256, 16,  16, 4, 1, MEDIUM, element_bytes=8, dq_warps_d=4, num_stages=1),
    _dq(384, 16,  16, 8, 1, ARITHMETIC, element_bytes=8, dq_warps_d=8, num_stages=1),
)

SCORES_TILES = (
    #       max_dim m    n  warps stages blocks
    _scores(64,  128, 64, 8, 2, 1, ARITHMETIC),
    _scores(128, 128, 64, 8, 2, 1, ARITHMETIC),
    _scores(128, 64,  32, 4, 2, 1, SMALL),
    _scores(256, 64,  32, 4, 2, 1, ARITHMETIC),
    _scores(256, 64,  32, 4, 1, 1, SMALL),
    _scores(256, 32,  32, 2, 1, 1, TINY),
    _scores(512, 32,  32, 2, 1, 1, ARITHMETIC),
    _scores(512, 16,  16, 1, 1, 1, SMALL),
    _scores(1024, 16, 16, 1, 1, 1, ARITHMETIC),

    _scores(64,  64,  32, 4, 2, 1, ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _scores(128, 64,  32, 4, 2, 1, ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _scores(128, 64,  32, 4, 1, 1, SMALL, element_bytes=4, fragments_ahead=1),
    _scores(256, 64,  32, 4, 1, 1, ARITHMETIC, element_bytes=4, fragments_ahead=1),
    _scores(256, 32,  16, 2, 1, 1, SMALL, element_bytes=4, fragments_ahead=1),
    _scores(256, 16,  16, 1, 1, 1, TINY, element_bytes=4, fragments_ahead=1),
    _scores(512, 16,  16, 1, 1, 1, ARITHMETIC, element_bytes=4, fragments_ahead=1),

    _scores(64,  64,  16, 4, 2, 1, ARITHMETIC, element_bytes=8),
    _scores(64,  64,  16, 4, 1, 1, SMALL, element_bytes=8),
    _scores(128, 64,  16, 4, 1, 1, ARITHMETIC, element_bytes=8),
    _scores(128, 32,  16, 2, 1, 1, SMALL, element_bytes=8),
    _scores(256, 32,  16, 2, 1, 1, ARITHMETIC, element_bytes=8),
    _scores(256, 16,  16, 1, 1, 1, MEDIUM, element_bytes=8),
    _scores(384, 16,  16, 1, 1, 1, ARITHMETIC, element_bytes=8),
)

SCORES_CHUNKED_TILES = (
    #                             m   n  warps stages blocks chunk
    _scores_chunked(MOST_CHUNKED, 64, 64, 4, 2, 1, 64, ARITHMETIC),
    _scores_chunked(MOST_CHUNKED, 64, 32, 4, 2, 1, 32, ARITHMETIC, element_bytes=4),
    _scores_chunked(MOST_CHUNKED, 64, 16, 4, 2, 1, 16, ARITHMETIC, element_bytes=8),
)

COLUMN_TILES = (
    #        max_dim  m   n  warps stages blocks ahead
    _columns(64,   64, 128, 4, 2, 3, 2, ARITHMETIC),
    _columns(128,  64, 128, 4, 2, 2, 2, ARITHMETIC),
    _columns(128,  32, 64,  4, 2, 1, 2, SMALL),
    _columns(256,  32, 128, 4, 2, 1, 0, ARITHMETIC),
    _columns(256,  32, 64,  4, 1, 1, 0, SMALL),
    _columns(512,  32, 64,  4, 1, 1, 0, ARITHMETIC),
    _columns(512,  16, 32,  2, 1, 1, 0, SMALL),
    _columns(1024, 16, 32,  2, 1, 1, 0, ARITHMETIC),

    _columns(64,   32, 64,  4, 2, 2, 1, ARITHMETIC, element_bytes=4),
    _columns(128,  32, 64,  4, 2, 1, 1, ARITHMETIC, element_bytes=4),
    _columns(128,  16, 32,  2, 1, 1, 1, SMALL, element_bytes=4),
    _columns(256,  32, 64,  4, 1, 1, 1, ARITHMETIC, element_bytes=4),
    _columns(256,  16, 32,  2, 1, 1, 1, SMALL, element_bytes=4),
    _columns(512,  16, 32,  2, 1, 1, 1, ARITHMETIC, element_bytes=4),
    _columns(512,  16, 16,  1, 1, 1, 1, SMALL, element_bytes=4),
    _columns(1024, 16, 16,  1, 1, 1, 1, ARITHMETIC, element_bytes=4),

    _columns(64,   16, 64,  4, 2, 1, 0, ARITHMETIC, element_bytes=8),
    _columns(64,   16, 32,  2, 1, 1, 0, SMALL, element_bytes=8),
    _columns(128,  16, 64,  4, 1, 1, 0, ARITHMETIC, element_bytes=8),
    _columns(128,  16, 16,  1, 1, 1, 0, SMALL, element_bytes=8),
    _columns(256,  16, 32,  2, 1, 1, 0, ARITHMETIC, element_bytes=8),
    _columns(256,  16, 16,  1, 1, 1, 0, SMALL, element_bytes=8),
    _columns(512,  16, 16,  1, 1, 1, 0, ARITHMETIC, element_bytes=8),
)

TOP_TILES = (
    #    max_dim  m   n  warps stages blocks ahead
    _top(64,   64, 64, 4, 2, 2, 2, ARITHMETIC),
    _top(128,  64, 64, 4, 2, 2, 2, ARITHMETIC),
    _top(128,  64, 64, 4, 2, 1, 2, ARITHMETIC),
    _top(128,  32, 32, 2, 1, 1, 2, SMALL),
    _top(256,  64, 64, 4, 1, 1, 0, ARITHMETIC),
    _top(256,  16, 32, 1, 1, 1, 0, SMALL),
    _top(512,  32, 32, 2, 1, 1, 0, ARITHMETIC),
    _top(512,  16, 16, 1, 1, 1, 0, SMALL),
    _top(1024, 16, 16, 1, 1, 1, 0, ARITHMETIC),

    _top(128,  64, 32, 4, 2, 1, 1, ARITHMETIC, element_bytes=4),
    _top(128,  16, 32, 1, 1, 1, 1, SMALL, element_bytes=4),
    _top(256,  32, 32, 2, 1, 1, 1, ARITHMETIC, element_bytes=4),
    _top(256,  16, 16, 1, 1, 1, 1, SMALL, element_bytes=4),
    _top(512,  16, 16, 1, 1, 1, 1, ARITHMETIC, element_bytes=4),
    _top(1024, 16, 16, 1, 1, 1, 1, ARITHMETIC, element_bytes=4),

    _top(64,   32, 32, 2, 1, 1, 0, ARITHMETIC, element_bytes=8),
    _top(128,  16, 16, 1, 1, 1, 0, ARITHMETIC, element_bytes=8),
    _top(256,  16, 16, 1, 1, 1, 0, ARITHMETIC, element_bytes=8),
    _top(384,  16, 16, 1, 1, 1, 0, ARITHMETIC, element_bytes=8),
)

SCORES_JVP_TILES = (
    #           max_dim m    n  warps stages blocks
    _scores_jvp(64,  128, 32, 8, 1, 2, ARITHMETIC),
    _scores_jvp(128, 64,  32, 4, 1, 2, ARITHMETIC),
    _scores_jvp(128, 64,  32, 4, 1, 1, SMALL),
    _scores_jvp(128, 32,  16, 2, 1, 1, TINY),
    _scores_jvp(256, 64,  32, 4, 1, 1, ARITHMETIC),
    _scores_jvp(256, 32,  16, 2, 1, 1, SMALL),
    _scores_jvp(512, 16,  16, 1, 1, 1, ARITHMETIC),

    _scores_jvp(64,  64,  16, 4, 1, 1, ARITHMETIC, element_bytes=4),
    _scores_jvp(64,  32,  16, 2, 1, 1, TINY, element_bytes=4),
    _scores_jvp(128, 64,  16, 4, 1, 1, ARITHMETIC, element_bytes=4),
    _scores_jvp(128, 32,  16, 2, 1, 1, SMALL, element_bytes=4),
    _scores_jvp(256, 16,  16, 1, 1, 1, ARITHMETIC, element_bytes=4),

    _scores_jvp(64,  32,  16, 2, 1, 1, ARITHMETIC, element_bytes=8),
    _scores_jvp(128, 16,  16, 1, 1, 1, ARITHMETIC, element_bytes=8),
    _scores_jvp(192, 16,  16, 1, 1, 1, ARITHMETIC, element_bytes=8),
)
# fmt: on


# With score_mod and mask_mod, tiles have fewer keys, because their numbers take registers: tests/compile counts
# spills.
FUNCTION_TILES = tuple(
    row.changed(block_n=32 if row.element_bytes == 2 else 16, origin="of fewer keys, for functions; not measured")
    for row in FORWARD_TILES
)


# With fp8 keys and values, tiles have fewer keys, because the scales take registers too.
FLOAT8_TILES = tuple(
    row.changed(
        key_bytes=1,
        block_n=min(row.block_n, 32 if row.element_bytes == 2 else 16),
        min_blocks=min(row.min_blocks, 2),
        fragments_ahead=0,
        origin="of fewer keys, for scales; not measured",
    )
    for row in FORWARD_TILES
)
