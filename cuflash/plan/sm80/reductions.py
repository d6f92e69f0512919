"""Reductions of the attention weights on every device from compute capability 7.0 on."""

from __future__ import annotations

from typing import ClassVar

from cuflash.plan.block_index import add_block_index
from cuflash.plan.draft import Draft
from cuflash.plan.families import ReductionFamily
from cuflash.plan.sm80.tiles import COLUMN_TILES, TOP_TILES, ColumnTile, TopTile
from cuflash.plan.tiles import FEW_CANDIDATES, Tile
from cuflash.plan.traffic import Model
from cuflash.spec.passes import COLUMN_MAX


def wants_many(draft: Draft) -> bool:
    """Whether so many of the strongest keys are wanted that rows have many candidates."""
    return "key_weights" in draft.arrays and draft.arrays["key_weights"].shape[-1] > FEW_CANDIDATES // 4


def add_columns(draft: Draft, source: str, tile: Tile) -> None:
    """Add the kernel of a reduction over queries, after the one that finds row statistics."""
    add_block_index(draft, tile, "query_index")
    blocks = draft.heads * draft.tiles_of(draft.problem.seqlen_k, tile.block_n)
    is_max, has_factors = draft.pass_ is COLUMN_MAX, "dlse" in draft.arrays
    makes = ("max",) if is_max else ("weighted",) if has_factors else ()
    defines = {"CUFLASH_COLUMN_MAX": int(is_max), "CUFLASH_COLUMN_FACTORS": int(has_factors)}
    draft.add_main(source, tile, blocks, makes, **defines)


def add_top(draft: Draft, source: str, tile: Tile) -> None:
    """Add the kernel of the strongest keys, after the one that finds row statistics."""
    add_block_index(draft, tile, "key_index")
    draft.add_main(source, tile, draft.heads * draft.tiles_of(draft.problem.seqlen_q, tile.block_m))


class Columns(ReductionFamily[ColumnTile]):
    """Each tile of keys of a query head has a block."""

    kernel = "sm80/column_sums"
    model: ClassVar[Model | None] = "keys of query heads"
    has_functions = serves_no_values = True
    rows = COLUMN_TILES

    def draft(self, draft: Draft, tile: ColumnTile) -> None:
        add_columns(draft, self.source, tile)


class Top(ReductionFamily[TopTile]):
    """Each tile of queries has a block, whose warps keep candidates of their rows."""

    kernel = "sm80/top_keys"
    has_functions = serves_no_values = True
    rows = TOP_TILES

    def configured(self, tile: TopTile, draft: Draft) -> TopTile:
        return tile if wants_many(draft) else tile.changed(capacity=FEW_CANDIDATES)

    def draft(self, draft: Draft, tile: TopTile) -> None:
        add_top(draft, self.source, tile)
