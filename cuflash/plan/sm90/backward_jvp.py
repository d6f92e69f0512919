"""The tangents of gradients on compute capability 9.0: half precision, and float32 as bf16 terms.

One kernel adds to those of dq, dk and dv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

from cuflash.plan.draft import CAUSAL_HEAD_SECTION, Draft
from cuflash.plan.families import BackwardJvpFamily
from cuflash.plan.sm90.backward import BACKWARD_HEAD_SECTION, InOrder, OfWarpgroups, has_separate_dq
from cuflash.plan.sm90.bf16_split import SplitTile, add_bf16_split, why_not_split
from cuflash.plan.sm90.forward import why_not_16_bit
from cuflash.plan.sm90.scored import Sm90Tile
from cuflash.plan.sm90.tiles import (
    BACKWARD_JVP_FLOAT32_SM90_TILES,
    BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES,
    BACKWARD_JVP_TF32_SM90_TILES,
    BACKWARD_JVP_TF32_WIDE_SM90_TILES,
    BackwardJvpFloat32Sm90Tile,
    BackwardJvpFloat32WideSm90Tile,
)
from cuflash.plan.tiles import choose_row, chunked_bytes, exceeds, maker, why_too_large
from cuflash.spec.inputs import INPUTS
from cuflash.spec.passes import BACKWARD_JVP


@dataclass(frozen=True, kw_only=True)
class BackwardJvpSm90Tile(Sm90Tile):
    """One way to cut the tangents of gradients for compute capability 9.0. A warpgroup, or two, own 64 of the keys."""

    block_m: int = 64
    block_n: int
    num_stages: int  # stages of queries
    dx_stages: int  # stages of dX and tdX, on their way to the warpgroup of tdq
    schedule: Literal["kOwnKeys", "kSplitRoles", "kHalfStages", "kOneStageOfQ"]  # of sm90/backward_jvp_layout.cuh
    ping_pong: bool  # consumers take turns to issue products
    dq_in_order: bool = False  # blocks add to tdq one after another, in a fixed order
    has_tdout: bool = False  # stages of queries hold tdout, too

    defined = ("dx_stages", "schedule", "ping_pong", "has_tdout")
    variations: ClassVar = {"num_stages": (2, 3), "dx_stages": (1, 2), "ping_pong": (False, True)}

    dim_multiple = 32

    def rules(self) -> tuple[tuple[bool, str], ...]:
        keys = 64 if self.splits_roles else 128
        return (
            (self.block_n == keys, "64 keys for two consumers, or for each of them"),
            (self.block_m == 64, "64 queries for one product"),
        )

    @property
    def splits_roles(self) -> bool:
        """Whether, for the same keys, one consumer makes P and tdv, and the other tdX and tdk."""
        return self.schedule != "kOwnKeys"

    @property
    def sums_first(self) -> bool:
        """Whether sums are issued before the next products, with one stage of q and a producer of its own."""
        return self.schedule in ("kHalfStages", "kOneStageOfQ")

    @property
    def stage_rows(self) -> int:
        """Queries of a stage."""
        return self.block_m // 2 if self.schedule == "kHalfStages" else self.block_m

    @property
    def num_warps(self) -> int:
        """Four warps for each of two consumers, four for tdq, and four for the producer if it is not one of these.

        It is not where warps next to it keep the order of tdq.
        """
        return 16 if self.sums_first or self.dq_in_order else 12

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        keys = chunked_bytes(self.block_n, dim) + chunked_bytes(self.block_n, dim_v)
        rows, q_stages = self.stage_rows, 1 if self.sums_first else self.num_stages
        of_v = (1 + self.has_tdout) * chunked_bytes(rows, dim_v)
        queries = q_stages * 2 * chunked_bytes(rows, dim) + self.num_stages * (of_v + rows * 16)
        dx = 2 * chunked_bytes(self.block_n, self.block_m)
        p = self.block_n * rows * 8 if self.splits_roles else 0
        rings = q_stages + self.num_stages + self.dx_stages + self.splits_roles
        barriers = 8 * (2 + 2 * rings + 6 * self.dq_in_order)
        return 2 * keys + queries + self.dx_stages * dx + p + barriers


_backward_jvp_sm90 = maker(BackwardJvpSm90Tile, "max_dim block_n num_stages dx_stages schedule ping_pong origin")


def _measured(here: str, in_order: str, of_sm80: str, tdout: str) -> str:
    return (
        f"on an H200 {here} TFLOP/s of 10 products; adding to tdq in order {in_order}, sm80/backward_jvp with "
        f"sm80/backward_jvp_dq {of_sm80}; with tdout {tdout} of 12 (seqlen 4096 full / causal; bfloat16, "
        "batch x seqlen 16384, heads x head_dim 2048)"
    )


# fmt: off
BACKWARD_JVP_SM90_TILES = (
    #                  max_dim n    stages dX schedule       ping-pong
    _backward_jvp_sm90(64,     128, 2,     2, "kOwnKeys",    True,
                       _measured("562 / 508", "516 / 477", "179 / 169", "563 / 528")),
    _backward_jvp_sm90(128,    64,  2,     2, "kSplitRoles", True,
                       _measured("509 / 488", "496 / 492", "162 / 151", "417 / 420")),
    _backward_jvp_sm90(256,    64,  2,     1, "kHalfStages", False,
                       _measured("406 / 391", "396 / 401", "104 / 100", "407 / 414")),
)
# fmt: on


class BackwardJvp(InOrder[BackwardJvpSm90Tile], BackwardJvpFamily[BackwardJvpSm90Tile]):
    """Half precision. Blocks own keys, make tdk and tdv, and add to tdq."""

    kernel = "sm90/backward_jvp"
    rows = BACKWARD_JVP_SM90_TILES
    model = "keys"
    outputs = tuple(row.name for row in BACKWARD_JVP.rows)
    makes_dq_alone = True
    has_functions = True
    unknown = ("pages",)
    defines: ClassVar = {"CUFLASH_PAIRS_STATS": 1}

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        if draft.device.arch != 90 or problem.dtype not in ("float16", "bfloat16"):
            return ""
        if (unknown := self.why_unknown(problem)) is not None:
            return unknown
        if problem.dropout and problem.score is not None and problem.program.changes_slope:
            return "dropout marks weights by their sign, which they lose with the derivatives of the score by s"
        if has_separate_dq(draft) and not {"tdk", "tdv"} & set(draft.need):
            return "the order of tdq counts the tiles that the block-sparse index leaves out"
        why_not = why_not_16_bit(draft, _mapped(draft), BACKWARD_JVP_SM90_TILES)
        if why_not is None and problem.counts_as_packed:
            tile, _ = choose_row(BACKWARD_JVP_SM90_TILES, problem, draft.device)
            narrow, middle, _ = (row.max_dim for row in BACKWARD_JVP_SM90_TILES)
            if tile.sums_first:
                return f"of packed sequences it serves head dimensions up to {middle}"
            if _with_tdout(tile, draft).sums_first:
                return f"of packed sequences with tdout it serves head dimensions up to {narrow}"
        return why_not

    def configured(self, main: BackwardJvpSm90Tile, draft: Draft) -> BackwardJvpSm90Tile:
        has_order = draft.problem.deterministic and "tdq" in draft.need and not has_separate_dq(draft)
        return _with_tdout(replace(main, dq_in_order=has_order), draft)

    def head_section(self, draft: Draft, main: BackwardJvpSm90Tile) -> int:
        if main.dq_in_order:
            return super().head_section(draft, main)
        return BACKWARD_HEAD_SECTION if draft.problem.window_right is None else CAUSAL_HEAD_SECTION

    def draft(self, draft: Draft, tile: BackwardJvpSm90Tile) -> None:
        rows = {
            **dict.fromkeys(("q", "tq", "dout", "tdout"), tile.stage_rows),
            **dict.fromkeys(("k", "v", "tk", "tv"), tile.block_n),
            **dict.fromkeys(("tdk", "tdv"), 64),
        }
        problem = draft.problem
        if problem.is_packed and tile.sums_first:
            raise NotImplementedError(
                f"tiles: got a BackwardJvpSm90Tile for head dimensions up to {tile.max_dim} with packed sequences, "
                "expected a BackwardJvpTile and a DqJvpTile"
            )
        draft.map_tensors({name: rows[name] for name in _mapped(draft)})
        super().draft(draft, tile)


_Row = TypeVar("_Row", bound=SplitTile)


class _OfTerms(OfWarpgroups[_Row], BackwardJvpFamily[_Row]):
    """float32, of operands as bf16 terms."""

    outputs = BackwardJvp.outputs
    makes_dq_alone = True
    defines: ClassVar = {"CUFLASH_PAIRS_STATS": 1, "CUFLASH_PLAIN_FRAGMENTS": 1}
    is_wide: ClassVar[bool] = False  # whether its head dimensions are above those of `BackwardJvpFloat32`

    def why_not(self, draft: Draft) -> str | None:
        if self.is_wide != exceeds(draft.problem, BACKWARD_JVP_FLOAT32_SM90_TILES):
            return ""
        why_not = why_not_split(draft, self.table(draft.problem))
        if why_not is None and "tdout" in draft.arrays:
            return "no stage of tdout fits into shared memory"
        if why_not is None and draft.problem.deterministic and "tdq" in draft.need:
            return "it adds to tdq in no fixed order"
        return why_not

    def draft(self, draft: Draft, tile: _Row) -> None:
        problem, arrays = draft.problem, ("q", "k", "v", "dout")
        if "tdout" in draft.arrays or problem.is_packed:
            what = "packed sequences" if problem.is_packed else "tdout"
            raise NotImplementedError(f"tiles: got a {type(tile).__name__} with {what}, expected a BackwardJvpTile")
        tangents = tuple(f"t{name}" for name in INPUTS if name in (problem.moved or ()))
        add_bf16_split(draft, tile, arrays, tangents)
        draft.map_tensors(dict.fromkeys(arrays, tile.block_m))
        super().draft(draft, tile)


class BackwardJvpFloat32(_OfTerms[BackwardJvpFloat32Sm90Tile]):
    """Head dimensions whose operands fit into shared memory together."""

    kernel = "sm90/backward_jvp_fp32"
    rows = BACKWARD_JVP_FLOAT32_SM90_TILES
    tf32_rows = BACKWARD_JVP_TF32_SM90_TILES


class BackwardJvpFloat32Wide(_OfTerms[BackwardJvpFloat32WideSm90Tile]):
    """Larger ones."""

    kernel = "sm90/backward_jvp_fp32_wide"
    rows = BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES
    tf32_rows = BACKWARD_JVP_TF32_WIDE_SM90_TILES
    is_wide = True


def _with_tdout(main: BackwardJvpSm90Tile, draft: Draft) -> BackwardJvpSm90Tile:
    """The tile with tdout in its stages, if the problem has it; where these do not fit, with fewer or smaller ones."""
    if "tdout" not in draft.arrays:
        return main
    tile = replace(main, has_tdout=True)
    if why_too_large(tile, draft.problem, draft.device) is not None:
        tile = replace(tile, schedule="kOneStageOfQ", dx_stages=1, ping_pong=False)
    if why_too_large(tile, draft.problem, draft.device) is not None:
        tile = replace(tile, schedule="kHalfStages", num_stages=1)
    return tile


def _mapped(draft: Draft) -> tuple[str, ...]:
    """The arrays that TMA reads or writes, in the order of their maps."""
    tangents = (f"t{name}" for name in INPUTS if name in (draft.problem.moved or ()))
    tdout = ["tdout"] if "tdout" in draft.arrays else []
    return (*INPUTS, "dout", *tangents, *tdout, *(name for name in ("tdk", "tdv") if name in draft.need))
