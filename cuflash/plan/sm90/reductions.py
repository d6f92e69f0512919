"""Reductions of the attention weights on compute capability 9.0, of 16-bit operands."""

from __future__ import annotations

from typing import ClassVar

from cuflash.plan.draft import Draft
from cuflash.plan.families import ReductionFamily
from cuflash.plan.sm80.reductions import reduced_columns, wants_many
from cuflash.plan.sm90.backward import fragments_of_a_warpgroup
from cuflash.plan.sm90.forward import why_not_16_bit
from cuflash.plan.sm90.tiles import COLUMN_SM90_TILES, TOP_SM90_TILES, ColumnSm90Tile, TopSm90Tile
from cuflash.plan.tiles import FEW_CANDIDATES, Tile
from cuflash.plan.traffic import Model

_OPERANDS = ("q", "k")


class Columns(ReductionFamily[ColumnSm90Tile]):
    """Each tile of keys of a query head has a block."""

    kernel = "sm90/column_sums"
    model: ClassVar[Model | None] = "visible keys of query heads"
    serves_no_values = True
    rows = COLUMN_SM90_TILES
    unknown = ("softcap", "alibi_slopes", "bias", "mask")  # which take registers that two blocks an SM do not have

    def accumulator_layout(self, main: ColumnSm90Tile) -> Tile:
        return fragments_of_a_warpgroup(main)

    def why_not(self, draft: Draft) -> str | None:
        if draft.problem.counts_as_packed:
            return "it clears no rows of other sequences"
        return self.why_unknown(draft.problem) or why_not_16_bit(draft, _OPERANDS, COLUMN_SM90_TILES)

    def draft(self, draft: Draft, tile: ColumnSm90Tile) -> None:
        """Add the kernel, after the one that finds row statistics."""
        draft.map_tensors({"q": tile.block_m, "k": tile.block_n})
        draft.add_block_index(tile, "query_index")
        blocks = draft.heads * draft.tiles_of(draft.problem.seqlen_k, tile.block_n)
        makes, defines = reduced_columns(draft)
        draft.add_main(self.source, tile, blocks, tile.shared_bytes(*draft.padded_dims(tile)), makes, **defines)


class Top(ReductionFamily[TopSm90Tile]):
    """Each tile of queries has a block, whose warps keep candidates of their rows."""

    kernel = "sm90/top_keys"
    serves_no_values = True
    rows = TOP_SM90_TILES
    unknown = ("softcap", "alibi_slopes", "bias", "mask")

    def configured(self, tile: TopSm90Tile, draft: Draft) -> TopSm90Tile:
        return tile.changed(block_m=128, capacity=2 * FEW_CANDIDATES, min_blocks=1) if wants_many(draft) else tile

    def why_not(self, draft: Draft) -> str | None:
        return self.why_unknown(draft.problem) or why_not_16_bit(draft, _OPERANDS, TOP_SM90_TILES)

    def accumulator_layout(self, main: TopSm90Tile) -> Tile:
        return fragments_of_a_warpgroup(main)

    def draft(self, draft: Draft, tile: TopSm90Tile) -> None:
        """Add the kernel, after the one that finds row statistics."""
        draft.map_tensors({"q": tile.block_m, "k": tile.block_n})
        draft.add_block_index(tile, "key_index")
        blocks = draft.heads * draft.tiles_of(draft.problem.seqlen_q, tile.block_m)
        draft.add_main(self.source, tile, blocks, tile.shared_bytes(*draft.padded_dims(tile)))
