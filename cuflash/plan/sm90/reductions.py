"""Reductions of the attention weights on compute capability 9.0, of 16-bit operands."""

from __future__ import annotations

from typing import ClassVar

from cuflash.plan.draft import Draft
from cuflash.plan.families import MaximaFamily, ReductionFamily
from cuflash.plan.sm80.reductions import add_columns, add_top, wants_many
from cuflash.plan.sm90.backward import OfWarpgroups
from cuflash.plan.sm90.forward import why_not_16_bit
from cuflash.plan.sm90.reduction_tiles import (
    COLUMN_SM90_TILES,
    MAXIMA_SM90_TILES,
    TOP_SM90_TILES,
    ColumnSm90Tile,
    MaximaSm90Tile,
    TopSm90Tile,
)
from cuflash.plan.sm90.tiles import BackwardSm90Tile
from cuflash.plan.tiles import FEW_CANDIDATES, PAIR_BY_PAIR, Tile, choose_row
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


class FirstMaxima(MaximaFamily[MaximaSm90Tile]):
    """Each tile of queries has a block, which goes through the keys in their order."""

    kernel = "sm90/first_maxima"
    rows = MAXIMA_SM90_TILES

    def choose(self, draft: Draft, main: Tile | None) -> MaximaSm90Tile | None:
        if not isinstance(main, BackwardSm90Tile):
            return None
        tile, reason = choose_row(MAXIMA_SM90_TILES, draft.problem, draft.device)
        if draft.problem.given(("bias", "mask", "block_mask")):
            tile = tile.changed(block_m=128)  # more warps have no registers to look up pairs
        draft.reasons.append(f"first keys with the largest scores of rows: {reason}")
        return tile

    def add(self, draft: Draft, tile: MaximaSm90Tile, main: BackwardSm90Tile) -> None:
        blocks = draft.heads * draft.tiles_of(draft.problem.seqlen_q, tile.block_m)
        shared_bytes = tile.shared_bytes(*draft.padded_dims(tile))
        draft.models.append(None)
        draft.add(self.source, tile, blocks, shared_bytes, **PAIR_BY_PAIR, CUFLASH_BOX_KEYS=main.block_n)
