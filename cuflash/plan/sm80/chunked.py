"""Long heads without values: where kernels whose operands arrive by chunks of columns serve."""

from __future__ import annotations

from collections.abc import Iterable

from cuflash.plan.draft import Draft
from cuflash.plan.tiles import Tile, serves_dims, why_too_large


def why_not_chunked(draft: Draft, whole_rows: Iterable[Tile]) -> str | None:
    """Why kernels that read chunks of columns do not serve a problem: None if they do, "" if the plan need not tell.

    `whole_rows` are the rows of the table that is preferred: their shared memory holds whole rows of q and k.
    """
    problem = draft.problem
    if problem.head_dim_v > 0 or problem.has_float8:
        return ""
    fits = (serves_dims(tile, problem) and not why_too_large(tile, problem, draft.device) for tile in whole_rows)
    return "" if any(fits) else None
