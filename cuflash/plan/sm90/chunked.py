"""Long heads without values on compute capability 9.0: operands arrive by chunks of columns, as those of a GEMM do."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from cuflash.arrays.array_info import ITEMSIZE, Operand
from cuflash.arrays.checks import counted
from cuflash.plan.block_index import add_block_index
from cuflash.plan.device import DeviceSpec
from cuflash.plan.draft import Draft
from cuflash.plan.families import BackwardFamily, ForwardFamily
from cuflash.plan.sm80.tiles import MOST_CHUNKED
from cuflash.plan.sm90.backward import OfWarpgroups
from cuflash.plan.sm90.copies import add_copies
from cuflash.plan.sm90.forward import MAPPED_WITHOUT_VALUES, why_not_16_bit
from cuflash.plan.sm90.scored import Sm90Tile, bias_by
from cuflash.plan.sm90.tiles import BACKWARD_SM90_TILES, FORWARD_SM90_TILES
from cuflash.plan.tensor_map import CHUNK, LINE_BYTES
from cuflash.plan.tiles import chunked_bytes, largest_dim, maker, round_up, tiles_at_once
from cuflash.spec.problem import Problem

MOST_SPLITS = 256  # of the keys of a query tile
SPLIT_COST = 0.25  # what a split costs, in tiles of keys: loads that nothing overlaps, and statistics in memory
MIN_TILES = 8  # of queries, from which on a row with larger tiles is taken: rows of the last tile cost little then
CHUNK_BYTES, MIN_CHUNK = 1 << 27, 4  # most bytes of dS of a chunk, and the fewest tiles of keys that it has then
MOST_CHUNK = 64  # tiles of keys of a chunk
# What a block, and a chunk, cost by arithmetic, in the time in which a block multiplies a chunk of 64 columns.
BLOCK_COST, CHUNK_COST = 3, 16
TILES_OF_BLOCK = (1, 2, 3, 4, 6, 8)  # that a block of dS goes through


@dataclass(frozen=True, kw_only=True)
class ChunkedSm90Tile(Sm90Tile):
    """What tiles of long heads have in common. A consumer has 64 of the rows of a block."""

    block_m: int
    block_n: int
    num_stages: int  # chunks of the rows of a block and of block_n other rows, or columns

    row_blocks: ClassVar[int] = 1  # blocks of a cluster
    result_boxes: ClassVar[int] = 0  # of 64 x 64 rounded results, for each consumer

    dim_multiple = CHUNK

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.block_m // self.row_blocks

    @property
    def num_warps(self) -> int:
        """Four warps for each consumer, and four for the producer."""
        return self.rows // 16 + 4

    @property
    def cluster(self) -> int:
        return self.row_blocks

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.rows in (128, 192) and self.block_m == self.row_blocks * self.rows, "two or three consumers"),
            (self.block_n % (8 * self.row_blocks) == 0 and self.block_n <= 256, "a block_n that wgmma serves"),
            (self.row_blocks in (1, 2), "one or two blocks"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        results = self.rows * self.result_boxes * LINE_BYTES
        return self.num_stages * (chunked_bytes(self.rows + self.block_n, CHUNK) + 16) + results


@dataclass(frozen=True, kw_only=True)
class ForwardChunkedSm90Tile(ChunkedSm90Tile):
    """One way to cut the forward pass of long heads without values.

    Blocks that share a tile of queries are a cluster.
    """

    row_blocks: int = 1  # type: ignore[misc]
    bias_of_keys: bool = False  # the bias differs from key to key only

    defined: ClassVar[tuple[str, ...]] = ("row_blocks", "bias_of_keys", "result_boxes")

    def why_not(self, problem: Problem, device: DeviceSpec) -> str | None:
        if self.rows == 128:
            return None
        if set(problem.acting) - {"sinks"}:
            return "for scores that no option changes or hides: three consumers have few registers"
        fewest = MIN_TILES * self.block_m
        return f"for {fewest} queries and more" if problem.seqlen_q < fewest else None


@dataclass(frozen=True, kw_only=True)
class BackwardChunkedSm90Tile(ChunkedSm90Tile):
    """One way to cut the backward pass of long heads without values into tiles of three GEMMs.

    The tiles of dk have as many keys, and those of dq as many queries, as those of dS have queries; and as many columns
    as these have keys.
    """

    result_boxes: int = 2  # type: ignore[misc]
    chunk_tiles: int = 0  # of keys in a chunk; 0: chosen together with key_tiles
    key_tiles: int = 1  # that a block of dS goes through

    defined: ClassVar[tuple[str, ...]] = ("row_blocks", "result_boxes", "key_tiles")

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            *super().rules(),
            (self.block_n % (64 * self.result_boxes) == 0, "boxes of 64 columns that take turns"),
            (self.chunk_tiles % self.chunk_multiple == 0, "chunks of whole tiles of keys of dk"),
        )

    @property
    def chunk_multiple(self) -> int:
        """Tiles of keys that are whole tiles of keys of dk, too."""
        return math.lcm(self.rows, self.block_n) // self.block_n

    def cut(self, problem: Problem, device: DeviceSpec) -> BackwardChunkedSm90Tile:
        """The row with the chunks, and the tiles of a block of dS, that take the least time by arithmetic."""
        if self.chunk_tiles:
            return self
        heads, steps = problem.batch * problem.num_heads, -(-problem.head_dim // CHUNK)
        row_tiles, key_tiles = -(-problem.seqlen_q // self.block_m), -(-problem.seqlen_k // self.block_n)
        columns, resident = -(-problem.head_dim // self.block_n), tiles_at_once(self, device)
        bytes_of_tile = heads * problem.seqlen_q * self.block_n * self.element_bytes
        most = max(MIN_CHUNK, min(MOST_CHUNK, CHUNK_BYTES // max(bytes_of_tile, 1), key_tiles))
        most = round_up(most, self.chunk_multiple)

        def duration(chunk: int, tiles: int) -> float:
            ds = -(-heads * row_tiles * -(-chunk // tiles) // resident) * (tiles * steps + BLOCK_COST)
            of_keys = problem.batch * problem.num_heads_kv * columns * -(-chunk * self.block_n // self.rows)
            of_rows = heads * row_tiles * columns
            length = of_keys * problem.group_size * -(-problem.seqlen_q // 64) + of_rows * chunk * self.block_n // 64
            products = of_keys + of_rows
            waves = -(-products // resident)
            return -(-key_tiles // chunk) * (ds + waves * (length / max(products, 1) + BLOCK_COST) + CHUNK_COST)

        chunks = range(self.chunk_multiple, most + 1, self.chunk_multiple)
        best = min(((x, n) for x in chunks for n in TILES_OF_BLOCK if n <= x), key=lambda cut: duration(*cut))
        return self.changed(chunk_tiles=best[0], key_tiles=best[1])


_forward_chunked = maker(ForwardChunkedSm90Tile, "max_dim block_m block_n num_stages row_blocks origin")
_backward_chunked = maker(BackwardChunkedSm90Tile, "max_dim block_m block_n num_stages origin")


def _measured(milliseconds: str) -> str:
    return (
        f"on an H200 {milliseconds} ms for 8192 queries, 128256 keys and 2048 columns in bfloat16; three products of "
        "that size take 16.1 ms by cuBLAS"
    )


FORWARD_CHUNKED_SM90_TILES = (
    _forward_chunked(MOST_CHUNKED, 384, 256, 4, 2, _measured("5.33")),
    _forward_chunked(MOST_CHUNKED, 192, 256, 4, 1, _measured("5.52")),
    _forward_chunked(MOST_CHUNKED, 128, 256, 4, 1, _measured("5.73")),
)
BACKWARD_CHUNKED_SM90_TILES = (
    _backward_chunked(
        MOST_CHUNKED, 128, 256, 4,
        "on an H200 20.7 ms for 8192 queries, 128256 keys and 2048 columns in bfloat16, 192 x 256 with 3 stages 20.1; "
        "three products take 18.6 ms by cuBLAS",
    ),
)  # fmt: skip


class ForwardChunked(ForwardFamily[ForwardChunkedSm90Tile]):
    """lse of long heads: the GEMM of the scores, whose epilogue is the softmax."""

    kernel = "sm90/forward_chunked"
    serves_no_values = True
    rows = FORWARD_CHUNKED_SM90_TILES
    unknown = ("packed sequences", "pages")

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        if problem.head_dim_v > 0 or problem.head_dim <= largest_dim(FORWARD_SM90_TILES):
            return ""
        if draft.device.arch != 90 or ITEMSIZE[problem.dtype] != 2:
            return ""
        if unknown := self.why_unknown(problem):
            return unknown
        return why_not_16_bit(draft, MAPPED_WITHOUT_VALUES, FORWARD_CHUNKED_SM90_TILES, copies=True)

    def draft(self, draft: Draft, tile: ForwardChunkedSm90Tile) -> None:
        tile = tile.changed(bias_of_keys=bias_by(draft.problem) == "keys")
        draft.tiles = (tile,)
        add_copies(draft, tile, MAPPED_WITHOUT_VALUES)
        add_block_index(draft, tile, "key_index")
        draft.map_tensors({"q": tile.rows, "k": tile.block_n // tile.row_blocks})
        tiles = draft.heads * draft.tiles_of(draft.problem.seqlen_q, tile.block_m)
        splits = _splits(draft, tile, tiles)
        if splits > 1:
            draft.scratch["partial_sums"] = tiles * splits * tile.block_m * 2
            words = 8 // ITEMSIZE[draft.problem.softmax_dtype]  # of a counter
            draft.scratch["arrivals"] = tiles * words
            draft.reasons.append(f"{splits} splits of the keys of each query tile: the last one combines their results")
        draft.add_main(self.source, tile, tiles * splits * tile.cluster, CUFLASH_SPLITS_KEYS=int(splits > 1))


def _splits(draft: Draft, tile: ForwardChunkedSm90Tile, tiles: int) -> int:
    """How many blocks, or clusters, split the keys of a query tile: as many as finish first; of equals, the fewest."""
    resident, keys = tiles_at_once(tile, draft.device), -(-draft.problem.seqlen_k // tile.block_n)

    def duration(splits: int) -> float:
        return -(-tiles * splits // resident) * (-(-keys // splits) + (SPLIT_COST if splits > 1 else 0))

    return min(range(1, max(1, min(keys, MOST_SPLITS)) + 1), key=duration) if tiles else 1


class BackwardChunked(OfWarpgroups[BackwardChunkedSm90Tile], BackwardFamily[BackwardChunkedSm90Tile]):
    """dk and dq of long heads by three GEMMs: dS of a chunk of keys is stored, rounded, and multiplied."""

    kernel = "sm90/backward_chunked"
    serves_no_values = True
    makes_dq_alone = stores_dq = True
    shares_tiles = False
    rows = BACKWARD_CHUNKED_SM90_TILES
    unknown = ("packed sequences", "pages", "kv_lengths", "mask", "block_mask")

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        if problem.head_dim_v > 0 or problem.head_dim <= largest_dim(BACKWARD_SM90_TILES):
            return ""
        if draft.device.arch != 90 or ITEMSIZE[problem.dtype] != 2:
            return ""
        if unknown := self.why_unknown(problem):
            return unknown
        if bias_by(problem) in ("pairs", "elements"):
            return "it knows no bias that differs from pair to pair"
        if draft.has_wide("dq", "dk"):
            return "it stores gradients in the dtype of the inputs"
        return why_not_16_bit(draft, _mapped(draft), BACKWARD_CHUNKED_SM90_TILES)

    def configured(self, main: BackwardChunkedSm90Tile, draft: Draft) -> BackwardChunkedSm90Tile:
        if (why_not := draft.why_not_mapped(_mapped(draft))) is not None:  # of a row that was given
            raise NotImplementedError(f"tiles: got a BackwardChunkedSm90Tile, but {why_not}, which TMA cannot serve")
        return main.cut(draft.problem, draft.device)

    def prepare(self, draft: Draft, main: BackwardChunkedSm90Tile) -> None:
        problem = draft.problem
        shape = (problem.batch, problem.num_heads, problem.seqlen_q, _key_tiles(draft, main) * main.block_n)
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(4))
        ds = Operand(shape=shape, strides=strides, dtype=problem.dtype)
        draft.set(whole_tiles=main.chunk_tiles)
        q, k, *results = _mapped(draft)
        draft.map_tensors(dict.fromkeys((q, k, "dkv_partials", *results), 64), scratch={"dkv_partials": ds})
        draft.scratch["dkv_partials"] = ds.nbytes // ITEMSIZE[problem.softmax_dtype]
        draft.scratch["arrivals"] = 2 * 8 // ITEMSIZE[problem.softmax_dtype]

    def add(
        self,
        draft: Draft,
        main: BackwardChunkedSm90Tile,
        blocks: int,
        makes: Collection[str],
        options: Mapping[str, int],
    ) -> None:
        problem = draft.problem
        columns, chunk = -(-problem.head_dim // main.block_n), main.chunk_tiles * main.block_n
        chunks = -(-problem.seqlen_k // chunk)
        tiles = {
            "dk": problem.batch * problem.num_heads_kv * -(-min(chunk, problem.seqlen_k) // main.rows) * columns,
            "dq": draft.heads * -(-problem.seqlen_q // main.rows) * columns,
        }
        if chunks > 1 and "dq" in draft.need:
            draft.scratch["dq_accumulator"] = tiles["dq"] * main.rows * main.block_n
        blocks = sum(tiles[name] for name in draft.need if name in tiles)
        options = {**options, "CUFLASH_NEEDS_DQ": int("dq" in draft.need)}
        draft.reasons.append(f"{counted(chunks, 'chunk')} of {chunk} keys: dS of one is stored, then multiplied")
        for _ in range(chunks):
            draft.add_main("sm90/backward_chunked_ds.cu", main, _blocks_of_ds(draft, main), makes, **options)
            draft.add_main(self.source, main, blocks, makes, **options)


def _mapped(draft: Draft) -> tuple[str, ...]:
    """The arrays that TMA reads or writes."""
    return ("q", "k", *(name for name in ("dq", "dk") if name in draft.need))


def _key_tiles(draft: Draft, main: BackwardChunkedSm90Tile) -> int:
    """How many tiles of keys the largest chunk has."""
    return min(main.chunk_tiles, -(-draft.problem.seqlen_k // main.block_n))


def _blocks_of_ds(draft: Draft, main: BackwardChunkedSm90Tile) -> int:
    tiles = draft.heads * -(-draft.problem.seqlen_q // main.block_m)
    return tiles * -(-_key_tiles(draft, main) // main.key_tiles)
