"""The backward pass on every device from compute capability 7.0 on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cuflash.plan.draft import Draft
from cuflash.plan.families import BackwardFamily, DqFamily, ScoresFamily
from cuflash.plan.sm80.tiles import BACKWARD_TILES, DQ_TILES, SCORES_TILES, BackwardTile, DqTile, ScoresTile
from cuflash.spec.outputs import REDUCTIONS
from cuflash.spec.problem import Problem


class Backward(BackwardFamily[BackwardTile]):
    """Each tile of keys has a block, or several, each of which takes some of the query heads."""

    kernel = "sm80/backward"
    has_functions = True
    serves_no_values = True
    reductions = REDUCTIONS
    tile = BackwardTile
    model = "keys"

    def table(self, problem: Problem) -> tuple[BackwardTile, ...]:
        return BACKWARD_TILES


class Dq(DqFamily[DqTile]):
    kernel = "sm80/backward_dq"
    has_functions = True
    serves_no_values = True
    reductions = REDUCTIONS
    tile = DqTile
    model = "queries of dq"

    def table(self, problem: Problem) -> tuple[DqTile, ...]:
        return DQ_TILES

    def add(self, draft: Draft, tile: DqTile, blocks: int, makes: Collection[str], options: Mapping[str, int]) -> None:
        draft.add_main(self.source, tile, blocks, tile.shared_bytes(*draft.padded_dims(tile)), makes, **options)


class Scores(ScoresFamily[ScoresTile]):
    kernel = "sm80/backward_scores"
    has_functions = True
    serves_no_values = True
    reductions = REDUCTIONS
    tile = ScoresTile

    def table(self, problem: Problem) -> tuple[ScoresTile, ...]:
        return SCORES_TILES
