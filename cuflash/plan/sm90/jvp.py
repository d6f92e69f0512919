"""Attention and its tangent on compute capability 9.0: half precision, and float32 as bf16 terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from cuflash.plan.block_index import add_block_index
from cuflash.plan.draft import Draft
from cuflash.plan.families import ForwardFamily
from cuflash.plan.sm90.bf16_split import SplitTile, add_bf16_split, why_not_split
from cuflash.plan.sm90.forward import add_persistent, box_rows, why_not_16_bit
from cuflash.plan.sm90.scored import Sm90Tile, takes_pairs
from cuflash.plan.sm90.tiles import (
    JVP_FLOAT32_SM90_TILES,
    JVP_FLOAT32_WIDE_SM90_TILES,
    JVP_TF32_SM90_TILES,
    JVP_TF32_WIDE_SM90_TILES,
    WGMMA_COLUMNS,
    JvpFloat32Sm90Tile,
    JvpFloat32WideSm90Tile,
)
from cuflash.plan.tensor_map import CHUNK
from cuflash.plan.tiles import ANY, ARITHMETIC, Condition, Tile, by_name, chunked_bytes, exceeds, maker, round_up
from cuflash.spec.passes import JVP
from cuflash.spec.problem import Problem

# Of `JvpSm90Tile`. A bias and its tangent are looked up for each pair, by addresses that take registers.
CONDITIONS = by_name(
    ANY,
    Condition("no bias", lambda fit: fit.problem.bias is None, "problems without a bias"),
    Condition(
        "fixed lengths",
        lambda fit: fit.problem.bias is None and not fit.problem.counts_as_packed,
        "problems without a bias and packed sequences",
    ),
)


@dataclass(frozen=True, kw_only=True)
class JvpSm90Tile(Sm90Tile):
    """One way to cut attention with its tangent for compute capability 9.0. A consumer owns 64 of its queries."""

    block_m: int
    block_n: int
    ping_pong: bool  # consumers take turns to issue the products of scores
    q_stages: int  # tiles of queries in shared memory
    overlaps_tiles: bool  # the products of values of a tile are in flight with those of the scores of the next
    out_columns: int = 64  # columns of a result that are stored at a time
    serves: str = "any"

    defined = ("ping_pong", "q_stages", "overlaps_tiles", "out_columns")
    conditions: ClassVar = CONDITIONS
    variations: ClassVar = {
        "block_m": (128, 192),
        "block_n": WGMMA_COLUMNS,
        "num_stages": (2, 3),
        "q_stages": (1, 2),
        "overlaps_tiles": (False, True),
        "ping_pong": (False, True),
    }

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m in (128, 192), "64 queries for each of two or three consumers"),
            (self.block_n % 16 == 0 and self.block_n <= 256, "a block_n that one product serves"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        q, out = (chunked_bytes(self.block_m, d) for d in (dim, min(dim_v, self.out_columns)))
        k, v = (chunked_bytes(self.block_n, d) for d in (dim, dim_v))
        barriers = 8 * (2 * self.q_stages + 4 * self.num_stages) + 16
        next_tiles = 2 * (16 + 32)  # of packed sequences
        return 2 * (self.q_stages * q + self.num_stages * (k + v)) + out + barriers + next_tiles


@dataclass(frozen=True, kw_only=True)
class JvpWideSm90Tile(Sm90Tile):
    """The same for head dimensions whose two accumulators take the registers of two warpgroups.

    Two consumers have the same queries, and half of the keys of a tile each.
    """

    num_stages: int  # 64 columns of k and of its tangent, or 32 rows of v and of its tangent

    variations: ClassVar = {"num_stages": (3, 4)}

    block_m = 64
    block_n = 128

    num_warps = 12  # four for each of two consumers, and four for the producer
    value_rows = 32

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return ((self.num_stages >= 2, "a stage to load while another one is multiplied"),)

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        columns = round_up(dim_v, 2 * CHUNK)  # whole chunks for each consumer
        box = max(chunked_bytes(self.block_n, CHUNK), chunked_bytes(self.value_rows, columns))
        weights = chunked_bytes(64, self.block_n)
        sums = 2 * 64 * (4 + 8)  # row maxima and row sums, of each consumer
        barriers = 16 + 16 * self.num_stages + 16
        next_tiles = 2 * (16 + 32)  # of packed sequences
        return 2 * (chunked_bytes(64, dim) + self.num_stages * box + weights) + sums + barriers + next_tiles


_jvp = maker(JvpSm90Tile, "max_dim block_m block_n num_stages ping_pong q_stages overlaps_tiles serves origin")

# Under a causal mask persistent blocks take pairs of tiles, a long one and a short one, of which the last ones keep a
# few SMs busy. From so many keys on, the device hands out single tiles instead, the longest ones of so many heads
# first. TFLOP/s on an H200, pairs / single tiles of 2 heads (batch x seqlen 16384, heads x head_dim 2048):
#   head_dim 64, seqlen 2048: 513 / 487, 4096: 559 / 549, 8192: 584 / 594, 16384: 602 / 630
#   head_dim 128,       2048: 632 / 601, 4096: 674 / 627, 8192: 671 / 688, 16384: 681 / 687
#   head_dim 192,       2048: 507 / 487, 4096: 566 / 565, 8192: 559 / 565, 16384: 556 / 571
#   head_dim 256,       2048: 597 / 580, 4096: 646 / 665, 8192: 646 / 676, 16384: 606 / 629
LONGEST_FIRST_KEYS, LONGEST_FIRST_KEYS_WIDE, HEADS_TOGETHER = 8192, 4096, 2

# TFLOP/s over six products.
# fmt: off
JVP_SM90_TILES = (
    #    max_dim m    n   stages pingp Q  overlaps serves
    _jvp(64,  128, 96, 3,      True, 1, True,  "fixed lengths",
         "on an H200 613 TFLOP/s, 2.7 times the forward pass's time, without overlap 575, 128 x 80 578, 192 x 64 579, "
         "with Q and tQ in registers 580; 128 x 128 without overlap 622, but it spills (32 heads, seqlen 4096)"),
    _jvp(64,  128, 64, 3,      True, 1, True,  "any", ARITHMETIC),
    _jvp(96,  128, 64, 2,      True, 1, True,  "no bias",
         "on an H200 677 / 607 TFLOP/s, without overlap 649 / 582 (21 heads, seqlen 4096 full / causal)"),
    _jvp(128, 128, 64, 2,      True, 1, False, "no bias",
         "on an H200 707 / 691 TFLOP/s, 3.15 times the forward pass's time, with overlap, which spills, 680 / 652, "
         "without ping-pong 675 / 617, 128 x 48 689 (16 heads, seqlen 4096 full / causal)"),
    _jvp(128, 128, 32, 2,      True, 1, False, "any", ARITHMETIC),
)
_jvp_wide = maker(JvpWideSm90Tile, "max_dim num_stages origin")

JVP_WIDE_SM90_TILES = (
    #         max_dim stages
    _jvp_wide(256,    4,
         "on an H200 702 / 662 TFLOP/s, 3.5 / 3.4 times the forward pass's time, by sm80/jvp 188 / 181; at head_dim "
         "192 591 / 561, by sm80/jvp 182 / 166 (8 heads, seqlen 4096 full / causal)"),
)
# fmt: on


class Jvp(ForwardFamily[JvpSm90Tile]):
    """Half precision, head dimensions of which a consumer's registers hold the output and its tangent."""

    kernel = "sm90/jvp"
    has_functions = True
    rows = JVP_SM90_TILES
    outputs = JVP.default
    model = "queries"
    unknown = ("pages",)

    def why_not(self, draft: Draft) -> str | None:
        if unknown := self.why_unknown(draft.problem):
            return unknown
        return why_not_16_bit(draft, _mapped(draft), JVP_SM90_TILES)

    def draft(self, draft: Draft, tile: JvpSm90Tile) -> None:
        box = box_rows(draft.problem, tile.block_n)
        heads = _heads_together(draft.problem, LONGEST_FIRST_KEYS)
        boxes = {"q": tile.block_m, "k": box, "v": box}
        _add(draft, tile, self.source, boxes, heads_together=heads)


class JvpWide(ForwardFamily[JvpWideSm90Tile]):
    """Head dimensions above those of `Jvp`."""

    kernel = "sm90/jvp_wide"
    has_functions = True
    rows = JVP_WIDE_SM90_TILES
    outputs = JVP.default
    model = "queries"
    unknown = ("pages",)

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        if not exceeds(problem, JVP_SM90_TILES):
            return ""
        if unknown := self.why_unknown(problem):
            return unknown
        return why_not_16_bit(draft, _mapped(draft), JVP_WIDE_SM90_TILES)

    def draft(self, draft: Draft, tile: JvpWideSm90Tile) -> None:
        boxes = {"q": tile.block_m, "k": tile.block_n, "v": tile.value_rows}
        heads = _heads_together(draft.problem, LONGEST_FIRST_KEYS_WIDE)
        _add(draft, tile, self.source, boxes, heads_together=heads)


_Row = TypeVar("_Row", bound=SplitTile)


class _OfTerms(ForwardFamily[_Row]):
    """float32, of operands as bf16 terms."""

    outputs = JVP.default
    is_wide: ClassVar[bool] = False  # whether its head dimensions are above those of `JvpFloat32`

    def why_not(self, draft: Draft) -> str | None:
        if self.is_wide != exceeds(draft.problem, JVP_FLOAT32_SM90_TILES):
            return ""
        return why_not_split(draft, self.table(draft.problem))

    def draft(self, draft: Draft, tile: _Row) -> None:
        add_block_index(draft, tile, "key_index")
        moved = draft.problem.moved or ()
        arrays = ("q", "k", "v")
        add_bf16_split(draft, tile, arrays, tuple(f"t{name}" for name in arrays if name in moved))
        draft.map_tensors({"q": tile.block_m, "k": tile.block_n, "v": tile.block_n})
        add_persistent(draft, tile, self.source)


class JvpFloat32(_OfTerms[JvpFloat32Sm90Tile]):
    """Head dimensions whose operands fit into shared memory together."""

    kernel = "sm90/jvp_fp32"
    rows = JVP_FLOAT32_SM90_TILES
    tf32_rows = JVP_TF32_SM90_TILES


class JvpFloat32Wide(_OfTerms[JvpFloat32WideSm90Tile]):
    """Larger ones."""

    kernel = "sm90/jvp_fp32_wide"
    rows = JVP_FLOAT32_WIDE_SM90_TILES
    tf32_rows = JVP_TF32_WIDE_SM90_TILES
    is_wide = True


def _heads_together(problem: Problem, least_keys: int) -> int:
    """`HEADS_TOGETHER`, under a causal mask with so many keys that it pays; else 0."""
    pays = takes_pairs(problem) and not problem.is_packed and problem.seqlen_k >= least_keys
    return HEADS_TOGETHER if pays else 0


def _add(draft: Draft, tile: Tile, source: str, boxes: dict[str, int], *, heads_together: int) -> None:
    """Add a persistent kernel, with `boxes` of so many rows of the arrays and of their tangents."""
    add_block_index(draft, tile, "key_index")
    rows = boxes | {f"t{name}": n for name, n in boxes.items()} | {"out": 64, "tout": 64}
    draft.map_tensors({name: rows[name] for name in _mapped(draft)})
    add_persistent(draft, tile, source, heads_together=heads_together)


def _mapped(draft: Draft) -> tuple[str, ...]:
    """Arrays that TMA reads or writes."""
    moved = draft.problem.moved or ()
    return ("q", "k", "v", *(f"t{name}" for name in ("q", "k", "v") if name in moved), "out", "tout")
