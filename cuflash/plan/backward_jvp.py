"""The pass of tangents of gradients: which kernels compute it."""

from __future__ import annotations

from typing import Any

from cuflash.plan.architectures import BACKWARD_JVP_FAMILIES, DQ_JVP_FAMILIES
from cuflash.plan.argument import params_bytes
from cuflash.plan.backward import SOFTMAX_KERNELS, add_preprocess
from cuflash.plan.draft import Draft
from cuflash.plan.families import BACK_SECTION, ForwardFamily, choose_family, family_of
from cuflash.plan.jvp import check_score, tangent_bits
from cuflash.plan.scores import needs
from cuflash.plan.tiles import Tile
from cuflash.spec.outputs import DEFAULT_NEED

_SERVED = ("tdq", "tdk", "tdv", *(f"t{name}" for name in SOFTMAX_KERNELS))


def draft_backward_jvp(draft: Draft, tiles: tuple[Tile, ...] | None) -> None:
    """Add the kernels of the pass, with the tiles that are given, or those of the tables.

    tdk and tdv have a kernel whose blocks own keys, tdq one whose blocks own queries, so that nothing is added up in
    memory: results are the same, bit for bit, run after run.
    """
    problem, need = draft.problem, draft.need
    for name in need:
        if name not in _SERVED:
            raise NotImplementedError(
                f"need: got {name} of arrays on a GPU, expected names among {', '.join(_SERVED)}; NumPy arrays have all"
            )
    check_score(problem)
    given = {tile.role: tile for tile in tiles or ()}
    of_keys, of_queries = given.get("main"), given.get("dq")
    if given:
        draft.reasons.append(draft.origin)
    if of_keys is None and (set(need) & {"tdk", "tdv"} or not {"tdq"} & set(need)):
        _, of_keys, reason = choose_family(BACKWARD_JVP_FAMILIES, draft)
        draft.reasons.append(reason)
    if of_queries is None and "tdq" in need:
        _, of_queries, reason = choose_family(DQ_JVP_FAMILIES, draft)
        draft.reasons.append(reason)
    draft.tiles = tuple(tile for tile in (of_keys, of_queries) if tile is not None)
    draft.defines |= {"CUFLASH_TANGENTS": tangent_bits(problem), "CUFLASH_PARAMS_BYTES": params_bytes(problem)}
    off = ("PAIRS_STATS", "DQ_BY_REDUCTION", "DQ_IN_ORDER", "REVERSED_ONE_IN", "SPLITS_GROUP", "SPLITS_TAIL")
    draft.defines |= {f"CUFLASH_{name}": 0 for name in (*off, "CLEARS_AHEAD")} | {"CUFLASH_BACK_SECTION": BACK_SECTION}
    draft.defines |= {f"CUFLASH_NEEDS_D{x}": int(f"td{x.lower()}" in need) for x in "KV"} | needs(())
    draft.defines |= {f"CUFLASH_{name.upper()}_WIDE": int(_is_wide(draft, f"t{name}")) for name in DEFAULT_NEED}
    first = draft.tiles[0]
    delta = first.changed(block_m=max(tile.block_m for tile in draft.tiles))
    add_preprocess(draft, first, delta, [name[1:] for name in need])
    draft.scratch["row_tangents"] = draft.scratch["row_stats"]
    if of_keys is not None and set(need) & {"tdk", "tdv"}:
        _add(draft, family_of(BACKWARD_JVP_FAMILIES, of_keys), of_keys)
    if of_queries is not None:
        _add(draft, family_of(DQ_JVP_FAMILIES, of_queries), of_queries)


def _add(draft: Draft, family: ForwardFamily[Any], tile: Tile) -> None:
    family.draft(draft, tile)
    draft.models.append(family.model)


def _is_wide(draft: Draft, name: str) -> bool:
    """Whether a result is wanted in the dtype of sums, to be added to others, and not rounded to that of the inputs."""
    return name in draft.need and draft.arrays[name].dtype != draft.problem.dtype
