"""The gradient of a bias of pairs on compute capability 9.0."""

from __future__ import annotations

from collections.abc import Collection

from cuflash.operands import ITEMSIZE
from cuflash.planning.draft import Draft
from cuflash.planning.scores import add_stored
from cuflash.planning.sm90.copies import add_copies
from cuflash.planning.sm90.forward import why_not_16_bit
from cuflash.planning.sm90.tiles import BIAS_SM90_TILES, BiasSm90Tile
from cuflash.planning.tiles import Tile, choose_row

SOURCE = "sm90/backward_bias.cu"
_MAPPED = ("q", "k", "v", "dout", "bias")
_BOX = 64  # rows that TMA brings at once, where no other kernel of the pass says how many


def choose_bias_tile(draft: Draft, main: Tile | None) -> BiasSm90Tile | None:
    """The tile of the kernel beside the main one whose row this is, if it has one; None where it does not serve."""
    if draft.device.arch != 90 or ITEMSIZE[draft.problem.dtype] != 2:
        return None
    obstacle = why_not_16_bit(draft, _MAPPED[:-1], BIAS_SM90_TILES, copies=True)
    if main is not None and not main.maps_bias:
        obstacle = "the main kernel does not load the bias by TMA"
    tile = None
    if obstacle is None:
        rows = [row.configured(draft.problem) for row in BIAS_SM90_TILES]
        try:
            tile, reason = choose_row(rows, draft.problem, draft.device)
        except NotImplementedError:
            obstacle = "it serves a bias of pairs that TMA can read, and masks that hide keys or whole tiles"
    draft.reasons.append(reason if tile is not None else f"not {SOURCE.removesuffix('.cu')}: {obstacle}")
    return tile


def add_bias_gradient(draft: Draft, tile: BiasSm90Tile, main: Tile | None, stored: Collection[str]) -> None:
    """The kernel that makes it, after the main kernel, whose tensor maps it shares."""
    if main is None:
        add_copies(draft, tile, _MAPPED[:-1])
        draft.map_tensors(dict.fromkeys(_MAPPED, _BOX))
    add_stored(draft, tile, SOURCE, stored, persistent=True, CUFLASH_BOX_KEYS=_BOX if main is None else main.block_n)
