"""The gradient of a per-pair bias on compute capability 9.0."""

from __future__ import annotations

from collections.abc import Collection

from cuflash.plan.draft import Draft
from cuflash.plan.families import BiasFamily
from cuflash.plan.scores import add_stored
from cuflash.plan.sm90.bf16_split import add_bf16_split, why_not_split
from cuflash.plan.sm90.copies import add_copies
from cuflash.plan.sm90.forward import why_not_16_bit
from cuflash.plan.sm90.tiles import BIAS_FLOAT32_SM90_TILES, BIAS_SM90_TILES, BIAS_TF32_SM90_TILES, BiasSm90Tile
from cuflash.plan.tiles import Tile, choose_row
from cuflash.spec.problem import Problem

_OPERANDS = ("q", "k", "v", "dout")
_BOX = 64  # rows of a box of TMA, where no other kernel of the pass sets their number


class BiasGradient(BiasFamily[BiasSm90Tile]):
    """dbias of a bias that TMA can read, half precision or float32: persistent blocks own tiles of it."""

    kernel = "sm90/backward_bias"

    def table(self, problem: Problem) -> tuple[BiasSm90Tile, ...]:
        if problem.dtype != "float32":
            return BIAS_SM90_TILES
        return {"highest": BIAS_FLOAT32_SM90_TILES, "tf32": BIAS_TF32_SM90_TILES}[problem.precision]

    def alternatives(self, problem: Problem) -> tuple[BiasSm90Tile, ...]:
        return (*BIAS_SM90_TILES, *BIAS_FLOAT32_SM90_TILES, *BIAS_TF32_SM90_TILES)

    def configured(self, tile: BiasSm90Tile, problem: Problem) -> BiasSm90Tile:
        return tile.configured(problem)

    def choose(self, draft: Draft, main: Tile | None) -> BiasSm90Tile | None:
        problem, table = draft.problem, self.table(draft.problem)
        if draft.device.arch != 90 or problem.dtype == "float64" or problem.head_dim_v == 0 or problem.row_reductions:
            return None
        is_float32 = problem.dtype == "float32"
        why_not = why_not_split(draft, table) if is_float32 else why_not_16_bit(draft, _OPERANDS, table, copies=True)
        if main is not None and not main.maps_bias:
            why_not = "the main kernel does not load the bias by TMA"
        tile = None
        if why_not is None:
            rows = [row.configured(problem) for row in table]
            try:
                tile, reason = choose_row(rows, problem, draft.device)
            except NotImplementedError:
                why_not = "it serves a per-pair bias that TMA can read, and masks that hide keys or whole tiles"
        draft.reasons.append(reason if tile is not None else f"not {self.kernel}: {why_not}")
        return tile

    def add(self, draft: Draft, tile: BiasSm90Tile, main: Tile | None, stored: Collection[str]) -> None:
        """Add the kernel after the main one, whose tensor maps it shares."""
        if main is None:
            if tile.bf16_terms > 1:
                add_bf16_split(draft, tile, _OPERANDS)
            else:
                add_copies(draft, tile, _OPERANDS)
            draft.map_tensors(dict.fromkeys((*_OPERANDS, "bias"), _BOX))
        keys = _BOX if main is None else main.block_n
        add_stored(draft, tile, self.source, stored, persistent=True, CUFLASH_BOX_KEYS=keys)
