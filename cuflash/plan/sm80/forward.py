"""The forward pass on every device from compute capability 7.0 on."""

from __future__ import annotations

from cuflash.plan.draft import Draft
from cuflash.plan.families import ForwardFamily
from cuflash.plan.sm80.chunked import why_not_chunked
from cuflash.plan.sm80.narrow import FORWARD_NARROW_TILES, NarrowTile, is_narrow
from cuflash.plan.sm80.tiles import (
    FLOAT8_TILES,
    FORWARD_CHUNKED_TILES,
    FORWARD_TILES,
    FUNCTION_TILES,
    ChunkedTile,
    ForwardTile,
)
from cuflash.spec.outputs import ROW_REDUCTIONS
from cuflash.spec.problem import Problem


class Forward(ForwardFamily[ForwardTile]):
    """Each tile of queries has a block."""

    kernel = "sm80/forward"
    has_functions = serves_no_values = True
    has_float8 = True
    row_reductions = ROW_REDUCTIONS
    model = "queries"

    def table(self, problem: Problem) -> tuple[ForwardTile, ...]:
        if problem.has_float8:
            return FLOAT8_TILES
        return FUNCTION_TILES if problem.has_functions else FORWARD_TILES

    def alternatives(self, problem: Problem) -> tuple[ForwardTile, ...]:
        return FLOAT8_TILES if problem.has_float8 else FORWARD_TILES


class ForwardChunked(ForwardFamily[ChunkedTile]):
    """lse of heads so long that no tile of whole rows fits: q and k arrive by chunks of columns."""

    kernel = "sm80/forward_chunked"
    has_functions = serves_no_values = True
    rows = FORWARD_CHUNKED_TILES

    def why_not(self, draft: Draft) -> str | None:
        return why_not_chunked(draft, FORWARD_TILES)


class ForwardNarrow(ForwardFamily[NarrowTile]):
    """lse of float32 heads so narrow that lanes multiply their columns in less time than tensor cores."""

    kernel = "sm80/forward_narrow"
    has_functions = serves_no_values = True
    rows = FORWARD_NARROW_TILES

    def why_not(self, draft: Draft) -> str | None:
        return None if is_narrow(draft.problem) else ""

    def draft(self, draft: Draft, tile: NarrowTile) -> None:
        bias = draft.problem.bias
        tile = tile.changed(bias_of_keys=bias is not None and bias.strides[2] == 0)
        draft.tiles = (tile,)
        super().draft(draft, tile)
