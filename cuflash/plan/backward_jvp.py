"""The pass of tangents of gradients: which kernels compute it."""

from __future__ import annotations

from typing import Any, NamedTuple

from cuflash.plan.architectures import BACKWARD_JVP_FAMILIES, DQ_JVP_FAMILIES, SCORES_JVP_FAMILIES
from cuflash.plan.backward import WITHOUT_MAIN, add_postprocess, add_preprocess, set_order
from cuflash.plan.draft import Draft
from cuflash.plan.families import BackwardJvpFamily, ForwardFamily, choose_family, family_of, may_make_dq_alone
from cuflash.plan.forward import tangent_defines
from cuflash.plan.scores import ScoreGradients, add_scores
from cuflash.plan.tiles import Tile
from cuflash.spec.outputs import DEFAULT_NEED

_OF_KEYS = {"tdk", "tdv"}


class _Rows(NamedTuple):
    """The rows of the kernels, by what their blocks own; None where there is no such kernel."""

    family: BackwardJvpFamily[Any] | None  # of the row of keys
    of_keys: Any
    of_queries: Any
    of_pairs: Any
    adds_to_tdq: bool  # whether the blocks that own keys make tdq

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The rows that there are."""
        return tuple(tile for tile in (self.of_keys, self.of_queries, self.of_pairs) if tile is not None)


def draft_backward_jvp(draft: Draft, tiles: tuple[Tile, ...] | None) -> None:
    """Add the kernels of the pass, with the tiles that are given, or those of the tables.

    tdk and tdv have a kernel whose blocks own keys, and with most tiles add to tdq as well. Where results have to be
    the same, bit for bit, run after run, they add in a fixed order, if the family can; otherwise, and where tdq alone
    is wanted, tdq has a kernel whose blocks own queries. Tangents of score gradients have one of their own.
    """
    need, gradients = draft.need, ScoreGradients.of(draft)
    rows = _rows(draft, tiles, gradients)
    family, of_keys, makes_tdq = rows.family, rows.of_keys, rows.adds_to_tdq
    draft.tiles = rows.tiles
    draft.defines |= {**WITHOUT_MAIN, **tangent_defines(draft.problem)}
    draft.defines |= {f"CUFLASH_NEEDS_D{x}": int(f"td{x.lower()}" in need) for x in "KV"}
    draft.defines |= {f"CUFLASH_{name.upper()}_WIDE": int(draft.has_wide(name)) for name in DEFAULT_NEED}
    if family is not None:
        set_order(draft, family, of_keys, reduces_dq=makes_tdq)
    first = draft.tiles[0]
    helper = first if family is None else family.accumulator_layout(first)
    # Where there is a dq accumulator, the tiles that are cleared are its own. Kernels that own keys, or queries alone,
    # read what a row needs up to the end of a tile.
    delta = helper if makes_tdq else max(draft.tiles, key=lambda tile: tile.block_m)
    add_preprocess(draft, first, delta, draft.gradients)
    draft.scratch["row_tangents"] = draft.scratch["row_stats"]
    if family is not None and (makes_tdq or set(need) & _OF_KEYS):
        _add(draft, family, of_keys)
    if family is not None and makes_tdq:
        add_postprocess(draft, family, of_keys, helper, 0, reduces_dq=True)
    if rows.of_queries is not None:
        _add(draft, family_of(DQ_JVP_FAMILIES, rows.of_queries), rows.of_queries)
    if rows.of_pairs is not None:
        add_scores(draft, rows.of_pairs, family_of(SCORES_JVP_FAMILIES, rows.of_pairs).source, gradients)


def _rows(draft: Draft, tiles: tuple[Tile, ...] | None, gradients: ScoreGradients) -> _Rows:
    """Choose the rows."""
    by_role = {tile.role: tile for tile in tiles or ()}
    of_keys, of_queries, of_pairs = (by_role.get(role) for role in ("main", "dq", "scores"))
    if tiles:
        draft.reasons.append(draft.origin)
    family, of_keys = _keys_row(draft, of_keys, gradients)
    adds_to_tdq = family is not None and family.adds_to_tdq(draft, of_keys) and "tdq" in draft.need
    of_queries = None if adds_to_tdq else _queries_row(draft, family, of_queries)
    if of_pairs is None and any(gradients):
        _, of_pairs, reason = choose_family(SCORES_JVP_FAMILIES, draft)
        draft.reasons.append(reason)
    return _Rows(family, of_keys, of_queries, of_pairs, adds_to_tdq)


def _keys_row(draft: Draft, of_keys: Any, gradients: ScoreGradients) -> tuple[BackwardJvpFamily[Any] | None, Any]:
    """The family and the row of the kernel whose blocks own keys, if there is one: the given row, or a chosen one."""
    need, family = set(draft.need), None
    if of_keys is not None:
        family = family_of(BACKWARD_JVP_FAMILIES, of_keys)
    elif (
        need & _OF_KEYS
        or ("tdq" in need and may_make_dq_alone(BACKWARD_JVP_FAMILIES, draft))
        or not ("tdq" in need or any(gradients))  # nothing is wanted: its tile is that of the preprocess kernel
    ):
        family, of_keys, reason = choose_family(BACKWARD_JVP_FAMILIES, draft)
        draft.reasons.append(reason)
    return family, of_keys if family is None else family.configured(of_keys, draft)


def _queries_row(draft: Draft, family: BackwardJvpFamily[Any] | None, of_queries: Any) -> Any:
    """The row of the kernel that makes tdq alone, if there is one: the given row, or the one that this chooses."""
    if of_queries is None and "tdq" in draft.need:
        _, of_queries, reason = choose_family(DQ_JVP_FAMILIES, draft)
        draft.reasons.append(reason)
        if family is not None and draft.problem.deterministic:
            draft.reasons.append(
                "deterministic: tdq has a kernel of its own that adds in a fixed order and recomputes the weights"
            )
    return of_queries


def _add(draft: Draft, family: ForwardFamily[Any], tile: Tile) -> None:
    family.draft(draft, tile)
    draft.models.append(family.model)
