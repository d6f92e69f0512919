"""The forward pass: which family of kernels computes it."""

from __future__ import annotations

from cuflash.plan.architectures import FORWARD_FAMILIES
from cuflash.plan.draft import Draft
from cuflash.plan.families import choose_family, family_of
from cuflash.plan.tiles import Tile


def draft_forward(draft: Draft, tiles: tuple[Tile, ...] | None) -> None:
    """Add the kernels of the forward pass, with the tile that is given, or one of the tables."""
    if tiles:
        tile, reason = tiles[0], draft.origin
        family = family_of(FORWARD_FAMILIES, tile)
    else:
        family, tile, reason = choose_family(FORWARD_FAMILIES, draft)
    draft.tiles = (tile,)
    is_wide = draft.arrays["out"].dtype != draft.problem.dtype
    draft.defines["CUFLASH_OUT_WIDE"] = int(is_wide)
    draft.defines["CUFLASH_LSE_WIDE"] = int("lse" in draft.problem.wide)
    if is_wide:
        if draft.problem.has_float8:
            got = f"dtype {draft.problem.softmax_dtype} with fp8 k and v"
            raise NotImplementedError(f"out: got {got}, expected dtype {draft.problem.dtype}")
        draft.reasons.append(
            "out is not rounded to the dtype of q: it is a partial result, which is merged with others"
        )
    draft.add_tables(tile)
    draft.reasons.append(reason)
    family.draft(draft, tile)
    draft.models.append(family.model)
