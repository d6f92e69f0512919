"""Long heads without values on compute capability 9.0: operands arrive by chunks of columns, as those of a GEMM do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan.draft import Draft
from cuflash.plan.families import ForwardFamily
from cuflash.plan.sm80.tiles import MOST_CHUNKED
from cuflash.plan.sm90.copies import add_copies
from cuflash.plan.sm90.forward import MAPPED_WITHOUT_VALUES, why_not_16_bit
from cuflash.plan.sm90.scored import Sm90Tile, bias_by
from cuflash.plan.sm90.tiles import FORWARD_SM90_TILES
from cuflash.plan.tensor_map import CHUNK
from cuflash.plan.tiles import ARITHMETIC, chunked_bytes, maker, tiles_at_once

MOST_SPLITS = 256  # of the keys of a query tile
SPLIT_COST = 0.25  # what a split costs, in tiles of keys: loads that nothing overlaps, and statistics in memory


@dataclass(frozen=True, kw_only=True)
class ForwardChunkedSm90Tile(Sm90Tile):
    """One way to cut the forward pass of long heads without values. A consumer owns 64 of the block_m queries.

    Blocks that share a tile of queries are a cluster.
    """

    block_m: int
    block_n: int
    num_stages: int  # chunks of block_m queries and block_n keys
    row_blocks: int = 1
    bias_of_keys: bool = False  # the bias differs from key to key only

    defined: ClassVar[tuple[str, ...]] = ("row_blocks", "bias_of_keys")
    dim_multiple = CHUNK

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.rows in (128, 192) and self.block_m == self.row_blocks * self.rows, "two or three consumers"),
            (self.block_n % (8 * self.row_blocks) == 0 and self.block_n <= 256, "a block_n that wgmma serves"),
            (self.row_blocks in (1, 2), "one or two blocks"),
        )

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return self.block_m // self.row_blocks

    @property
    def num_warps(self) -> int:
        """Four warps for each consumer, and four for the producer."""
        return self.rows // 16 + 4

    @property
    def cluster(self) -> int:
        return self.row_blocks

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        return self.num_stages * (chunked_bytes(self.rows + self.block_n, CHUNK) + 16)


_forward_chunked = maker(ForwardChunkedSm90Tile, "max_dim block_m block_n num_stages origin")

FORWARD_CHUNKED_SM90_TILES = (_forward_chunked(MOST_CHUNKED, 128, 256, 4, ARITHMETIC),)


class ForwardChunked(ForwardFamily[ForwardChunkedSm90Tile]):
    """lse of long heads: the GEMM of the scores, whose epilogue is the softmax."""

    kernel = "sm90/forward_chunked"
    serves_no_values = True
    rows = FORWARD_CHUNKED_SM90_TILES
    unknown = ("packed sequences", "pages")

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        if problem.head_dim_v > 0 or problem.head_dim <= max(row.max_dim for row in FORWARD_SM90_TILES):
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
        draft.add_block_index(tile, "key_index")
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
