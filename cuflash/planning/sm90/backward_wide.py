"""The backward pass of wide heads on compute capability 9.0: a kernel for each of dv, dk and dq."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from cuflash.planning.draft import Draft
from cuflash.planning.families import BackwardFamily, DqFamily, Family
from cuflash.planning.sm80 import BackwardTile
from cuflash.planning.sm90.backward import fragments_of_a_warpgroup
from cuflash.planning.sm90.forward import why_not_16_bit
from cuflash.planning.sm90.tiles import BACKWARD_SM90_TILES
from cuflash.planning.sm90.wide_tiles import (
    BACKWARD_WIDE_SM90_TILES,
    DQ_WIDE_SM90_TILES,
    BackwardWideSm90Tile,
    DqWideSm90Tile,
)
from cuflash.planning.tiles import Row
from cuflash.problem import Problem

GRADIENTS = ("dq", "dk", "dv")


class Wide(Family[Row]):
    """What the kernels of the three gradients have in common."""

    kernel = "sm90/backward_wide"

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        if max(problem.head_dim, problem.head_dim_v) <= max(row.max_dim for row in BACKWARD_SM90_TILES):
            return ""
        if problem.is_packed:
            return "it knows no packed sequences"
        mapped = ("q", "k", "v", "dout", *(name for name in GRADIENTS if name in draft.need))
        return why_not_16_bit(draft, mapped, BACKWARD_WIDE_SM90_TILES)

    def accumulator_layout(self, main: Row) -> BackwardTile:
        return fragments_of_a_warpgroup(main)


class BackwardWide(Wide[BackwardWideSm90Tile], BackwardFamily[BackwardWideSm90Tile]):
    tile = BackwardWideSm90Tile
    makes_dq = False
    shares_tail = True
    defines: ClassVar = {"CUFLASH_PAIRS_STATS": 1}

    def table(self, problem: Problem) -> tuple[BackwardWideSm90Tile, ...]:
        return BACKWARD_WIDE_SM90_TILES

    def prepare(self, draft: Draft, main: BackwardWideSm90Tile) -> None:
        _map_tensors(draft, main)
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
    tile = DqWideSm90Tile

    def table(self, problem: Problem) -> tuple[DqWideSm90Tile, ...]:
        return DQ_WIDE_SM90_TILES

    def add(
        self, draft: Draft, tile: DqWideSm90Tile, blocks: int, makes: Collection[str], options: Mapping[str, int]
    ) -> None:
        main = draft.tiles[0]
        if isinstance(main, BackwardWideSm90Tile) and main.row_blocks != tile.row_blocks:
            raise NotImplementedError(
                f"tiles: got the rows of {main.row_blocks} blocks for dk and dv and of {tile.row_blocks} for dq, "
                "expected the same: they read by the same tensor maps"
            )
        _map_tensors(draft, tile)
        _add(draft, tile, blocks, ("dq", *makes), options)


def _map_tensors(draft: Draft, tile: BackwardWideSm90Tile) -> None:
    """Boxes have as many rows as a block of a cluster brings of a tile."""
    draft.map_tensors(dict.fromkeys(("q", "k", "v", "dout"), 64 // tile.row_blocks))


def _add(
    draft: Draft, tile: BackwardWideSm90Tile, clusters: int, makes: Collection[str], options: Mapping[str, int]
) -> None:
    shared_bytes = tile.shared_bytes(*draft.padded_dims(tile))
    draft.add_main(f"{Wide.kernel}.cu", tile, clusters * tile.cluster, shared_bytes, makes, **options)
