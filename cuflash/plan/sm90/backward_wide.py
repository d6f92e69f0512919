"""The backward pass of wide heads on compute capability 9.0: a kernel for each of dv, dk and dq."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from cuflash.plan.draft import Draft
from cuflash.plan.families import BackwardFamily, DqFamily
from cuflash.plan.sm90.backward import OfWarpgroups
from cuflash.plan.sm90.forward import why_not_16_bit
from cuflash.plan.sm90.tiles import BACKWARD_SM90_TILES
from cuflash.plan.sm90.wide_tiles import (
    BACKWARD_WIDE_SM90_TILES,
    DQ_WIDE_SM90_TILES,
    BackwardWideSm90Tile,
    DqWideSm90Tile,
)
from cuflash.plan.tiles import Row, exceeds, tiles_at_once

GRADIENTS = ("dq", "dk", "dv")


class Wide(OfWarpgroups[Row]):
    """What the kernels of the three gradients have in common."""

    kernel = "sm90/backward_wide"
    unknown = ("packed sequences",)

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        if not exceeds(problem, BACKWARD_SM90_TILES):
            return ""
        if unknown := self.why_unknown(problem):
            return unknown
        mapped = ("q", "k", "v", "dout", *(name for name in GRADIENTS if name in draft.need))
        return why_not_16_bit(draft, mapped, BACKWARD_WIDE_SM90_TILES)


class BackwardWide(Wide[BackwardWideSm90Tile], BackwardFamily[BackwardWideSm90Tile]):
    """dv and dk, each by a kernel whose blocks, or clusters, own keys."""

    rows = BACKWARD_WIDE_SM90_TILES
    makes_dq = False
    splits_tail = True
    defines: ClassVar = {"CUFLASH_PAIRS_STATS": 1}

    def head_section(self, draft: Draft, main: BackwardWideSm90Tile) -> int:
        """Under a causal mask, as many heads as the device has blocks for half of their tiles.

        The half that attends to the most rows runs side by side; the other half follows. L2 does not hold the rows of
        more heads.
        """
        problem = draft.problem
        if problem.window_right is None or problem.window_left is not None:
            return super().head_section(draft, main)
        tiles = draft.tiles_of(problem.seqlen_k, main.block_n)
        return max(1, 2 * tiles_at_once(main, draft.device) // max(1, tiles))

    def prepare(self, draft: Draft, main: BackwardWideSm90Tile) -> None:
        _map_tensors(draft)
        draft.reasons.append(
            "each gradient has a kernel of its own, which makes scores again: registers hold the sums of one"
        )

    def add(
        self,
        draft: Draft,
        main: BackwardWideSm90Tile,
        blocks: int,
        makes: Collection[str],
        options: Mapping[str, int],
    ) -> None:
        for name, tile in (("dv", main.of_dv()), ("dk", main)):
            if name in draft.need:
                _add(draft, tile, blocks, (name, *makes), {**options, "CUFLASH_DQ_WIDE": 0})


class DqWide(Wide[DqWideSm90Tile], DqFamily[DqWideSm90Tile]):
    """dq, by a kernel whose blocks, or clusters, own queries."""

    rows = DQ_WIDE_SM90_TILES

    def add(
        self, draft: Draft, tile: DqWideSm90Tile, blocks: int, makes: Collection[str], options: Mapping[str, int]
    ) -> None:
        _map_tensors(draft)
        _add(draft, tile, blocks, ("dq", *makes), options)


def _map_tensors(draft: Draft) -> None:
    draft.map_tensors(dict.fromkeys(("q", "k", "v", "dout"), BackwardWideSm90Tile.block_m))


def _add(
    draft: Draft, tile: BackwardWideSm90Tile, clusters: int, makes: Collection[str], options: Mapping[str, int]
) -> None:
    draft.add_main(f"{Wide.kernel}.cu", tile, clusters * tile.cluster, makes, **options)
