"""Reductions of the attention weights on every device from compute capability 7.0 on."""

from __future__ import annotations

from cuflash.plan.draft import Draft
from cuflash.plan.families import ReductionFamily
from cuflash.plan.sm80.tiles import COLUMN_TILES, ColumnTile
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
        is_max = {"CUFLASH_COLUMN_MAX": int(draft.pass_ is COLUMN_MAX)}
        makes = ("max",) if draft.pass_ is COLUMN_MAX else ()
        draft.add_main(self.source, tile, blocks, tile.shared_bytes(*draft.padded_dims(tile)), makes, **is_max)
