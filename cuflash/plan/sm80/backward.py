"""The backward pass on every device from compute capability 7.0 on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cuflash.plan.draft import Draft
from cuflash.plan.families import BackwardFamily, DqFamily, ScoresFamily
from cuflash.plan.sm80.chunked import why_not_chunked
from cuflash.plan.sm80.tiles import (
    BACKWARD_CHUNKED_TILES,
    BACKWARD_TILES,
    DQ_CHUNKED_TILES,
    DQ_TILES,
    SCORES_CHUNKED_TILES,
    SCORES_TILES,
    BackwardChunkedTile,
    BackwardTile,
    DqChunkedTile,
    DqTile,
    ScoresChunkedTile,
    ScoresTile,
)
from cuflash.spec.outputs import ROW_REDUCTIONS


class Backward(BackwardFamily[BackwardTile]):
    """Each tile of keys has a block, or several, each of which takes some of the query heads."""

    kernel = "sm80/backward"
    has_functions = serves_no_values = True
    row_reductions = ROW_REDUCTIONS
    rows = BACKWARD_TILES
    model = "keys"


class Dq(DqFamily[DqTile]):
    """dq alone: each tile of queries has a block."""

    kernel = "sm80/backward_dq"
    has_functions = serves_no_values = True
    row_reductions = ROW_REDUCTIONS
    rows = DQ_TILES
    model = "queries of dq"


class BackwardChunked(BackwardFamily[BackwardChunkedTile]):
    """dk of heads so long that no tile of whole rows fits. dq has a kernel of its own."""

    kernel = "sm80/backward_chunked"
    has_functions = serves_no_values = True
    makes_dq = shares_tiles = False
    rows = BACKWARD_CHUNKED_TILES

    def why_not(self, draft: Draft) -> str | None:
        return why_not_chunked(draft, BACKWARD_TILES)

    def add(
        self, draft: Draft, main: BackwardChunkedTile, blocks: int, makes: Collection[str], options: Mapping[str, int]
    ) -> None:
        is_wide = draft.has_wide("dk")
        makes = (*makes, "wide_dk") if is_wide else makes
        options = {**options, "CUFLASH_DK_WIDE": int(is_wide)}
        super().add(draft, main, blocks * main.slices(draft.problem), makes, options)


class DqChunked(DqFamily[DqChunkedTile]):
    """dq of heads so long that no tile of whole rows fits."""

    kernel = "sm80/backward_dq_chunked"
    has_functions = serves_no_values = True
    rows = DQ_CHUNKED_TILES

    def why_not(self, draft: Draft) -> str | None:
        return why_not_chunked(draft, DQ_TILES)

    def add(
        self, draft: Draft, tile: DqChunkedTile, blocks: int, makes: Collection[str], options: Mapping[str, int]
    ) -> None:
        super().add(draft, tile, blocks * tile.slices(draft.problem), makes, options)


class Scores(ScoresFamily[ScoresTile]):
    """Score gradients alone: each tile of dbias has a block, or each tile of queries where they are sums."""

    kernel = "sm80/backward_scores"
    has_functions = serves_no_values = True
    row_reductions = ROW_REDUCTIONS
    rows = SCORES_TILES


class ScoresChunked(ScoresFamily[ScoresChunkedTile]):
    """Score gradients of heads so long that no tile of whole rows fits, by the kernel of `Scores`."""

    kernel = "sm80/backward_scores"
    has_functions = serves_no_values = True
    rows = SCORES_CHUNKED_TILES

    def why_not(self, draft: Draft) -> str | None:
        return why_not_chunked(draft, SCORES_TILES)
