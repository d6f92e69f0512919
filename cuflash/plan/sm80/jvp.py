"""Attention and its gradients with tangents, on every device from compute capability 7.0 on."""

from __future__ import annotations

from cuflash.plan.draft import Draft
from cuflash.plan.families import BackwardJvpFamily, ForwardFamily, ScoresFamily
from cuflash.plan.sm80.tiles import (
    BACKWARD_JVP_TILES,
    DQ_JVP_TILES,
    JVP_TILES,
    SCORES_JVP_TILES,
    BackwardJvpTile,
    DqJvpTile,
    JvpTile,
    ScoresJvpTile,
)
from cuflash.spec.passes import BACKWARD_JVP, JVP


class Jvp(ForwardFamily[JvpTile]):
    """Each tile of queries has a block."""

    kernel = "sm80/jvp"
    has_functions = serves_no_values = True
    model = "queries"
    serves_all_tangents = True
    rows = JVP_TILES
    outputs = JVP.default


class BackwardJvp(BackwardJvpFamily[BackwardJvpTile]):
    """Each tile of keys has a block, which makes the tangents of dk and dv and, in most rows, adds to that of dq."""

    kernel = "sm80/backward_jvp"
    has_functions = serves_no_values = True
    model = "keys"
    serves_all_tangents = True
    rows = BACKWARD_JVP_TILES
    outputs = tuple(row.name for row in BACKWARD_JVP.rows)

    def adds_to_tdq(self, draft: Draft, main: BackwardJvpTile) -> bool:
        return main.shares and super().adds_to_tdq(draft, main)


class DqJvp(ForwardFamily[DqJvpTile]):
    """Each tile of queries has a block, which makes the tangent of dq."""

    kernel = "sm80/backward_jvp_dq"
    has_functions = serves_no_values = True
    model = "queries of dq"
    serves_all_tangents = True
    rows = DQ_JVP_TILES
    outputs = BackwardJvp.outputs


class ScoresJvp(ScoresFamily[ScoresJvpTile]):
    """The tangents of score gradients, by blocks like those of `sm80.backward.Scores`."""

    kernel = "sm80/backward_jvp_scores"
    has_functions = serves_no_values = True
    rows = SCORES_JVP_TILES
