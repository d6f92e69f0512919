"""The forward pass: which family of kernels computes it."""

from __future__ import annotations

from typing import Any

from cuflash.plan.draft import Draft
from cuflash.plan.families import ForwardFamily, choose_family, family_of
from cuflash.plan.sm80 import decode as sm80_decode
from cuflash.plan.sm80 import forward as sm80_forward
from cuflash.plan.sm90.decode import Decode, DecodeFloat8, DecodeWide
from cuflash.plan.sm90.forward import Forward, ForwardFloat8, ForwardFloat32, ForwardWide
from cuflash.plan.tiles import Tile

FAMILIES: tuple[ForwardFamily[Any], ...] = (
    DecodeFloat8(),  # before Decode, because its tiles are tiles of Decode, too
    Decode(),
    DecodeWide(),  # before ForwardWide, because its tiles are tiles of ForwardWide, too
    sm80_decode.Decode(),
    ForwardFloat32(),
    ForwardFloat8(),
    ForwardWide(),
    Forward(),
    sm80_forward.Forward(),
)


def draft_forward(draft: Draft, tiles: tuple[Tile, ...] | None) -> None:
    """Add the kernels of the forward pass, with the tile that is given, or one of the tables."""
    if tiles:
        tile, reason = tiles[0], draft.origin
        family = family_of(FAMILIES, tile)
    else:
        family, tile, reason = choose_family(FAMILIES, draft)
    draft.tiles = (tile,)
    is_wide = draft.arrays["out"].dtype != draft.problem.dtype
    draft.defines["CUFLASH_OUT_WIDE"] = int(is_wide)
    draft.defines["CUFLASH_LSE_WIDE"] = int("lse" in draft.problem.wide)
    if is_wide:
        if draft.problem.has_float8:
            got = f"dtype {draft.problem.softmax_dtype} with fp8 k and v"
            raise NotImplementedError(f"out: got {got}, expected dtype {draft.problem.dtype}")
        draft.reasons.append("out is not rounded to the dtype of q: it is merged with other parts of it")
    draft.add_tables(tile)
    draft.reasons.append(reason)
    family.draft(draft, tile)
