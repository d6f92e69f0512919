"""The pass of tangents of gradients: which kernels compute it."""

from __future__ import annotations

from typing import Any

from cuflash.plan.architectures import BACKWARD_JVP_FAMILIES, DQ_JVP_FAMILIES, SCORES_JVP_FAMILIES
from cuflash.plan.backward import add_convert, add_preprocess
from cuflash.plan.draft import Draft
from cuflash.plan.families import (
    BACK_SECTION,
    BackwardJvpFamily,
    ForwardFamily,
    choose_family,
    family_of,
    may_make_dq_alone,
)
from cuflash.plan.forward import tangent_defines
from cuflash.plan.scores import add_score_args, add_stored, add_sums, needs, score_gradients, stored_and_sums
from cuflash.plan.tiles import Tile
from cuflash.spec.outputs import DEFAULT_NEED


def draft_backward_jvp(draft: Draft, tiles: tuple[Tile, ...] | None) -> None:
    """Add the kernels of the pass, with the tiles that are given, or those of the tables.

    tdk and tdv have a kernel whose blocks own keys, and with most tiles add to tdq as well. Where results have to be
    the same, bit for bit, run after run, they add in a fixed order, if the family can; otherwise, and where tdq alone
    is wanted, tdq has a kernel whose blocks own queries. Tangents of score gradients have one of their own.
    """
    problem, need = draft.problem, draft.need
    of_scores = (*score_gradients(draft), *draft.score_arg_gradients)
    given = {tile.role: tile for tile in tiles or ()}
    of_keys, of_queries, of_pairs = (given.get(role) for role in ("main", "dq", "scores"))
    if given:
        draft.reasons.append(draft.origin)
    family = None if of_keys is None else family_of(BACKWARD_JVP_FAMILIES, of_keys)
    makes_keys = set(need) & {"tdk", "tdv"} or not ("tdq" in need or of_scores)
    if of_keys is None and (makes_keys or ("tdq" in need and may_make_dq_alone(BACKWARD_JVP_FAMILIES, draft))):
        family, of_keys, reason = choose_family(BACKWARD_JVP_FAMILIES, draft)
        draft.reasons.append(reason)
    if family is not None:
        of_keys = family.configured(of_keys, draft)
    makes_tdq = family is not None and family.adds_to_tdq(draft, of_keys) and "tdq" in need
    if makes_tdq:
        of_queries = None
    elif of_queries is None and "tdq" in need:
        _, of_queries, reason = choose_family(DQ_JVP_FAMILIES, draft)
        draft.reasons.append(reason)
        if family is not None and draft.problem.deterministic:
            draft.reasons.append(
                "deterministic: tdq has a kernel of its own that adds in a fixed order and recomputes the weights"
            )
    if of_pairs is None and of_scores:
        _, of_pairs, reason = choose_family(SCORES_JVP_FAMILIES, draft)
        draft.reasons.append(reason)
    draft.tiles = tuple(tile for tile in (of_keys, of_queries, of_pairs) if tile is not None)
    draft.defines |= tangent_defines(problem)
    off = ("PAIRS_STATS", "DQ_IN_ORDER", "REVERSED_ONE_IN", "SPLITS_GROUP", "SPLITS_TAIL", "CLEARS_AHEAD")
    draft.defines |= {f"CUFLASH_{name}": 0 for name in off} | {"CUFLASH_BACK_SECTION": BACK_SECTION}
    if family is not None:
        _set_order(draft, family, of_keys, makes_tdq)
    draft.defines |= {f"CUFLASH_NEEDS_D{x}": int(f"td{x.lower()}" in need) for x in "KV"} | needs(())
    draft.defines |= {f"CUFLASH_{name.upper()}_WIDE": int(_is_wide(draft, f"t{name}")) for name in DEFAULT_NEED}
    draft.defines |= {"CUFLASH_DQ_BY_REDUCTION": int(makes_tdq)} | ({} if family is None else family.defines)
    first = draft.tiles[0]
    helper = first if family is None else family.accumulator_layout(first)
    # Where there is a dq accumulator, the tiles that are cleared are its own. Kernels that own keys, or queries alone,
    # read what a row needs up to the end of a tile.
    delta = helper if makes_tdq else max(draft.tiles, key=lambda tile: tile.block_m)
    add_preprocess(draft, first, delta, draft.gradients)
    draft.scratch["row_tangents"] = draft.scratch["row_stats"]
    if family is not None and of_keys is not None and (makes_tdq or set(need) & {"tdk", "tdv"}):
        _add(draft, family, of_keys)
        if makes_tdq:
            add_convert(draft, family, of_keys, helper, 0, reduces_dq=True)
    if of_queries is not None:
        _add(draft, family_of(DQ_JVP_FAMILIES, of_queries), of_queries)
    if of_pairs is not None:
        _add_scores(draft, of_pairs)


def _set_order(draft: Draft, family: BackwardJvpFamily[Any], of_keys: Any, makes_tdq: bool) -> None:
    """In which order the blocks that own keys start, and add to tdq."""
    draft.set(head_section=family.head_section(draft, of_keys))
    draft.set(clear_ahead=family.clear_ahead(draft, of_keys) if makes_tdq else 0)
    draft.defines |= {
        "CUFLASH_DQ_IN_ORDER": int(family.dq_in_order(of_keys)),
        "CUFLASH_REVERSED_ONE_IN": family.reversed_one_in(draft.problem, of_keys),
        "CUFLASH_CLEARS_AHEAD": int(draft.run_time.clear_ahead > 0),
    }


def _add(draft: Draft, family: ForwardFamily[Any], tile: Tile) -> None:
    family.draft(draft, tile)
    draft.models.append(family.model)


def _add_scores(draft: Draft, tile: Tile) -> None:
    """Add the kernels of tangents of score gradients."""
    source = family_of(SCORES_JVP_FAMILIES, tile).source
    stored, sums = stored_and_sums(score_gradients(draft))
    if stored:
        add_stored(draft, tile, source, stored)
    if sums:
        add_sums(draft, tile, source, sums)
    if draft.score_arg_gradients:
        add_score_args(draft, tile, source)


def _is_wide(draft: Draft, name: str) -> bool:
    """Whether a result is wanted in the dtype of sums, to be added to others, and not rounded to that of the inputs."""
    return name in draft.need and draft.arrays[name].dtype != draft.problem.dtype
