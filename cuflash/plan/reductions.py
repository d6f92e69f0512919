"""Reductions of the attention weights: which family of kernels computes them."""

from __future__ import annotations

from cuflash.plan.architectures import COLUMN_FAMILIES, TOP_FAMILIES
from cuflash.plan.backward import add_preprocess
from cuflash.plan.draft import Draft
from cuflash.plan.families import BACK_SECTION, given_or_chosen
from cuflash.plan.scores import needs
from cuflash.plan.tiles import Tile
from cuflash.spec.passes import TOP_KEYS

# What kernels that recompute weights do in the backward pass, and these do not.
NO_GRADIENTS = {
    **dict.fromkeys(("CUFLASH_DQ_BY_REDUCTION", "CUFLASH_DQ_IN_ORDER"), 0),
    **dict.fromkeys(("CUFLASH_REVERSED_ONE_IN", "CUFLASH_NEEDS_DK", "CUFLASH_NEEDS_DV", "CUFLASH_CLEARS_AHEAD"), 0),
    **dict.fromkeys(("CUFLASH_SPLITS_GROUP", "CUFLASH_SPLITS_TAIL"), 0),
    **needs(()),
    "CUFLASH_BACK_SECTION": BACK_SECTION,
    "CUFLASH_PAIRS_STATS": 1,
}


def draft_reduction(draft: Draft, tiles: tuple[Tile, ...] | None) -> None:
    """Add the kernels of a reduction, with the tile that is given, or one of the tables."""
    families = TOP_FAMILIES if draft.pass_ is TOP_KEYS else COLUMN_FAMILIES
    family, tile, reason = given_or_chosen(families, draft, tiles)
    tile = family.configured(tile, draft)
    draft.tiles = (tile,)
    draft.defines |= NO_GRADIENTS
    draft.add_tables(tile)
    draft.reasons.append(reason)
    add_preprocess(draft, tile, family.accumulator_layout(tile), ())
    family.draft(draft, tile)
    draft.models.append(family.model)
