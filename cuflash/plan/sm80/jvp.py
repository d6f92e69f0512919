"""Attention and its tangent on every device from compute capability 7.0 on."""

from __future__ import annotations

from cuflash.plan.draft import Draft
from cuflash.plan.families import ForwardFamily
from cuflash.plan.sm80.tiles import JVP_TILES, JvpTile
from cuflash.spec.passes import JVP
from cuflash.spec.problem import Problem


class Jvp(ForwardFamily[JvpTile]):
    """Each tile of queries has a block."""

    kernel = "sm80/jvp"
    has_functions = True
    tile = JvpTile
    outputs = JVP.default

    def table(self, problem: Problem) -> tuple[JvpTile, ...]:
        return JVP_TILES

    def draft(self, draft: Draft, tile: JvpTile) -> None:
        draft.add_lists(tile, "key_lists")
        blocks = draft.heads * draft.tiles_of(draft.problem.seqlen_q, tile.block_m)
        draft.add_main(self.source, tile, blocks, tile.shared_bytes(*draft.padded_dims(tile)))
