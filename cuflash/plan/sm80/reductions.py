"""Reductions of the attention weights on every device from compute capability 7.0 on."""

from __future__ import annotations

from cuflash.plan.draft import Draft
from cuflash.plan.families import ReductionFamily
from cuflash.plan.sm80.tiles import COLUMN_TILES, TOP_TILES, ColumnTile, TopTile
from cuflash.spec.passes import COLUMN_MAX
from cuflash.spec.problem import Problem


class Columns(ReductionFamily[ColumnTile]):
    """Each tile of keys of a query head has a block."""

    kernel = "sm80/column_sums"
    has_functions = True
    serves_no_values = True
    tile = ColumnTile

    def table(self, problem: Problem) -> tuple[ColumnTile, ...]:
        return COLUMN_TILES

    def draft(self, draft: Draft, tile: ColumnTile) -> None:
        """Add the kernel, after the one that finds row statistics."""
        draft.add_block_index(tile, "query_index")
        blocks = draft.heads * draft.tiles_of(draft.problem.seqlen_k, tile.block_n)
        is_max = {"CUFLASH_COLUMN_MAX": int(draft.pass_ is COLUMN_MAX), "CUFLASH_SERIES_ONE_IN": 0}
        makes = ("max",) if draft.pass_ is COLUMN_MAX else ()
        draft.add_main(self.source, tile, blocks, tile.shared_bytes(*draft.padded_dims(tile)), makes, **is_max)


class Top(ReductionFamily[TopTile]):
    """Each tile of queries has a block, whose warps sort the buffers of their rows."""

    kernel = "sm80/top_keys"
    has_functions = True
    serves_no_values = True
    tile = TopTile

    def table(self, problem: Problem) -> tuple[TopTile, ...]:
        return TOP_TILES

    def draft(self, draft: Draft, tile: TopTile) -> None:
        """Add the kernel, after the one that finds row statistics."""
        draft.add_block_index(tile, "key_index")
        blocks = draft.heads * draft.tiles_of(draft.problem.seqlen_q, tile.block_m)
        draft.add_main(self.source, tile, blocks, tile.shared_bytes(*draft.padded_dims(tile)))
