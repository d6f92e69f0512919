"""The pass of attention and its tangent: which family of kernels computes it."""

from __future__ import annotations

from cuflash.plan.architectures import JVP_FAMILIES
from cuflash.plan.argument import bytes_without_functions
from cuflash.plan.draft import Draft
from cuflash.plan.families import choose_family, family_of
from cuflash.plan.tiles import Tile
from cuflash.spec.outputs import MOVABLE
from cuflash.spec.problem import Problem


def draft_jvp(draft: Draft, tiles: tuple[Tile, ...] | None) -> None:
    """Add the kernels of the pass, with the tile that is given, or one of the tables."""
    problem = draft.problem
    if tiles:
        tile, reason = tiles[0], draft.origin
        family = family_of(JVP_FAMILIES, tile)
    else:
        family, tile, reason = choose_family(JVP_FAMILIES, draft)
    draft.tiles = (tile,)
    draft.defines |= tangent_defines(problem)
    is_wide = draft.arrays["out"].dtype != problem.dtype  # and so tout
    draft.defines |= {"CUFLASH_OUT_WIDE": int(is_wide), "CUFLASH_LSE_WIDE": int("lse" in problem.wide)}
    if is_wide:
        draft.reasons.append(
            "out and tout are not rounded to the dtype of q: they are partial results, which are merged with others"
        )
    draft.reasons.append(reason)
    family.draft(draft, tile)
    draft.models.append(family.model)


def tangent_defines(problem: Problem) -> dict[str, int]:
    """What kernels are told of tangents: 1, a bit for each of `outputs.MOVABLE`, and one for all score_mod args.

    Their argument has the tangents, too.
    """
    moved = problem.moved or ()
    bits = sum(2 << n for n, name in enumerate(MOVABLE) if name in moved)
    bits |= 1 | (2 << len(MOVABLE) if problem.moved_score_args else 0)
    return {"CUFLASH_TANGENTS": bits, "CUFLASH_PARAMS_BYTES": bytes_without_functions(problem)}
