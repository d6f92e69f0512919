"""Reductions of the attention weights on compute capability 9.0, of 16-bit operands."""

from __future__ import annotations

from typing import ClassVar

from cuflash.plan.draft import Draft
from cuflash.plan.families import ReductionFamily
from cuflash.plan.sm80.reductions import add_columns, add_top, wants_many
from cuflash.plan.sm90.backward import OfWarpgroups
from cuflash.plan.sm90.forward import why_not_16_bit
from cuflash.plan.sm90.tiles import COLUMN_SM90_TILES, TOP_SM90_TILES, ColumnSm90Tile, TopSm90Tile
from cuflash.plan.tiles import FEW_CANDIDATES
from cuflash.plan.traffic import Model

_OPERANDS = ("q", "k")


class Columns(OfWarpgroups[ColumnSm90Tile], ReductionFamily[ColumnSm90Tile]):
    """Each tile of keys of a query head has a block."""

    kernel = "sm90/column_sums"
    model: ClassVar[Model | None] = "visible keys of query heads"
    serves_no_values = True
    rows = COLUMN_SM90_TILES
    unknown = ("softcap", "alibi_slopes", "bias", "mask")  # which take registers that two blocks an SM do not have

    def why_not(self, draft: Draft) -> str | None:
        if draft.problem.counts_as_packed:
            return "it clears no rows of other sequences"
        return self.why_unknown(draft.problem) or why_not_16_bit(draft, _OPERANDS, COLUMN_SM90_TILES)

    def draft(self, draft: Draft, tile: ColumnSm90Tile) -> None:
        draft.map_tensors({"q": tile.block_m, "k": tile.block_n})
        add_columns(draft, self.source, tile)


class Top(OfWarpgroups[TopSm90Tile], ReductionFamily[TopSm90Tile]):
    """Each tile of queries has a block, whose warps keep candidates of their rows."""

    kernel = "sm90/top_keys"
    serves_no_values = True
    rows = TOP_SM90_TILES

    def configured(self, tile: TopSm90Tile, draft: Draft) -> TopSm90Tile:
        return tile.changed(block_m=128, capacity=2 * FEW_CANDIDATES, min_blocks=1) if wants_many(draft) else tile

    def why_not(self, draft: Draft) -> str | None:
        return self.why_unknown(draft.problem) or why_not_16_bit(draft, _OPERANDS, TOP_SM90_TILES)

    def draft(self, draft: Draft, tile: TopSm90Tile) -> None:
        draft.map_tensors({"q": tile.block_m, "k": tile.block_n})
        add_top(draft, self.source, tile)
