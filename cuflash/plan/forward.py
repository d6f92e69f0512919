"""The forward pass, and that of attention and its tangent: which family of kernels computes it."""

from __future__ import annotations

from cuflash.plan.architectures import FORWARD_FAMILIES, JVP_FAMILIES
from cuflash.plan.argument import bytes_without_functions
from cuflash.plan.draft import Draft
from cuflash.plan.families import given_or_chosen
from cuflash.plan.tiles import Tile
from cuflash.spec.outputs import MOVABLE
from cuflash.spec.problem import Problem


def draft_forward(draft: Draft, tiles: tuple[Tile, ...] | None) -> None:
    """Add the kernels of the pass, with the tile that is given, or one of the tables."""
    problem, has_tangents = draft.problem, draft.pass_.has_tangents
    family, tile, reason = given_or_chosen(JVP_FAMILIES if has_tangents else FORWARD_FAMILIES, draft, tiles)
    draft.tiles = (tile,)
    is_wide = draft.arrays["out"].dtype != problem.dtype  # and so tout
    draft.defines |= {"CUFLASH_OUT_WIDE": int(is_wide), "CUFLASH_LSE_WIDE": int("lse" in problem.wide)}
    if is_wide:
        if problem.has_float8:
            got = f"dtype {problem.softmax_dtype} with fp8 k and v"
            raise NotImplementedError(f"out: got {got}, expected dtype {problem.dtype}")
        draft.reasons.append(
            "out and tout are not rounded to the dtype of q: they are partial results, which are merged with others"
            if has_tangents
            else "out is not rounded to the dtype of q: it is a partial result, which is merged with others"
        )
    if has_tangents:
        draft.defines |= tangent_defines(problem)
    else:
        draft.add_tables(tile)
    draft.reasons.append(reason)
    family.draft(draft, tile)
    draft.models.append(family.model)


def tangent_defines(problem: Problem) -> dict[str, int]:
    """The defines for tangents: 1, a bit for each of `outputs.MOVABLE`, and one for all score_mod args.

    Their argument has the tangents, too.
    """
    moved = problem.moved or ()
    bits = sum(2 << n for n, name in enumerate(MOVABLE) if name in moved)
    bits |= 1 | (2 << len(MOVABLE) if problem.moved_score_args else 0)
    return {"CUFLASH_TANGENTS": bits, "CUFLASH_PARAMS_BYTES": bytes_without_functions(problem)}
