"""Tiles of the kernels for many queries on compute capability 9.0, and their tables.

The first row of a table that serves the problem, and whose shared memory fits, is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan.device import DeviceSpec
from cuflash.plan.sm90.conditions import BACKWARD, FORWARD, FORWARD_FLOAT8, FORWARD_FLOAT32, ForwardFit
from cuflash.plan.sm90.scored import (
    BIAS_BY_TMA,
    ScoredTile,
    Sm90Tile,
    bias_by,
    bias_tile_bytes,
)
from cuflash.plan.tensor_map import CHUNK, LINE_BYTES
from cuflash.plan.tiles import (
    ARITHMETIC,
    chunked_bytes,
    h200,
    h200_float32,
    maker,
)
from cuflash.spec.problem import Problem

WGMMA_COLUMNS = tuple(range(32, 257, 16))  # columns of a product that are worth trying


class ForwardScoredTile(ScoredTile):
    """A row of the forward pass, of operands of 16 bits or of float32."""

    def fit(self, problem: Problem, device: DeviceSpec) -> ForwardFit:
        return ForwardFit(self, problem, device)


@dataclass(frozen=True, kw_only=True)
class ForwardSm90Tile(ForwardScoredTile):
    """One way to cut the forward pass for compute capability 9.0. A consumer owns 64 of the block_m queries."""

    block_m: int
    block_n: int
    ping_pong: bool  # consumers take turns to issue products, and the softmax overlaps a product
    q_stages: int  # tiles of queries in shared memory
    serves: str = "any"

    defined = ("ping_pong", "q_stages")
    conditions: ClassVar = FORWARD
    variations: ClassVar = {
        "block_m": (128, 192),
        "block_n": WGMMA_COLUMNS,
        "num_stages": (2, 3),
        "q_stages": (1, 2),
        "ping_pong": (False, True),
    }

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m in (128, 192, 256), "64 queries for each of two to four consumers"),
            (self.block_n % 16 == 0 and self.block_n <= 256, "a block_n that one product serves"),
            (self.block_n * self.bias_of_pairs % LINE_BYTES == 0, "whole lines of a per-pair bias"),
        )

    def configured(self, problem: Problem) -> ForwardSm90Tile:
        """The tile for bias, mask and score of a problem."""
        bias = problem.bias if self.serves == "bias" and bias_by(problem) == "pairs" else None
        tile = self.for_masks(problem, 0 if bias is None else ITEMSIZE[bias.dtype])
        if problem.score is None or problem.is_packed:  # packed: the warp that would read them finds tiles
            return tile
        return tile.changed(per_key_values=len(problem.hoisted.of_keys))

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        q, out = (chunked_bytes(self.block_m, d) for d in (dim, min(dim_v, 128)))
        k, v = (chunked_bytes(self.block_n, d) for d in (dim, dim_v))
        barriers = 8 * (2 * self.q_stages + 4 * self.num_stages) + 16
        next_tiles = 2 * (16 + 32)  # of packed sequences
        bias = bias_tile_bytes(self.block_m, self.block_n, self.bias_of_pairs)
        bias += 4 * self.block_n * self.num_per_key
        return self.q_stages * q + out + self.num_stages * (k + v + bias) + barriers + next_tiles


@dataclass(frozen=True, kw_only=True)
class ForwardFloat32Sm90Tile(ForwardScoredTile):
    """One way to cut the forward pass of float32 for compute capability 9.0, of operands as bf16 terms.

    A consumer owns 64 of the block_m queries.
    """

    packs_masks = False

    block_m: int
    block_n: int
    ping_pong: bool  # consumers take turns to issue products
    bf16_terms: int = 3  # bf16 terms of a float32; two are for TF32's precision
    splits_operands: bool = False  # the producer splits operands, not an earlier kernel
    serves: str = "any"

    defined = ("ping_pong", "bf16_terms", "splits_operands")
    conditions: ClassVar = FORWARD_FLOAT32
    variations: ClassVar = {
        "block_m": (128, 192),
        "block_n": WGMMA_COLUMNS,
        "num_stages": (1, 2),
        "ping_pong": (False, True),
    }

    element_bytes = 4

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m in (128, 192), "64 queries for each of two or three consumers"),
            (self.bf16_terms in (2, 3), "two or three bf16 terms"),
            (self.block_n % 16 == 0 and self.block_n <= 256, "a block_n that one product serves"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        q, k, v = (
            chunked_bytes(self.block_m, dim),
            chunked_bytes(self.block_n, dim),
            chunked_bytes(self.block_n, dim_v),
        )
        ring_bytes = self.bf16_terms * (q + self.num_stages * (k + v)) + 8 * (2 + 4 * self.bf16_terms * self.num_stages)
        bias_terms = (
            bias_tile_bytes(self.block_m, self.block_n, self.bias_of_pairs) + 4 * self.block_n * self.num_per_key
        )
        return ring_bytes + (bias_terms + 16 if bias_terms else 0)


@dataclass(frozen=True, kw_only=True)
class JvpFloat32Sm90Tile(Sm90Tile):
    """One way to cut attention with its tangent in float32 for compute capability 9.0, of operands as bf16 terms.

    A consumer owns 64 of the 128 queries.
    """

    block_m: int = 128
    block_n: int
    ping_pong: bool  # consumers take turns to issue products
    bf16_terms: int = 3  # bf16 terms of a float32; two are for TF32's precision

    defined = ("ping_pong", "bf16_terms")
    variations: ClassVar = {"block_n": (16, 32, 48, 64), "num_stages": (1, 2), "ping_pong": (False, True)}

    element_bytes = 4
    num_warps = 12  # four for each of two consumers, and four for the producer

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m == 128, "64 queries for each of two consumers"),
            (self.bf16_terms in (2, 3), "two or three bf16 terms"),
            (self.block_n % 16 == 0 and self.block_n <= 64, "a block_n whose weights fit into registers"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        q = chunked_bytes(self.block_m, dim)
        keys = chunked_bytes(self.block_n, dim) + chunked_bytes(self.block_n, dim_v)
        barriers = 8 * (2 + 4 * self.bf16_terms * self.num_stages)
        return 2 * self.bf16_terms * (q + self.num_stages * keys) + barriers


@dataclass(frozen=True, kw_only=True)
class JvpFloat32WideSm90Tile(Sm90Tile):
    """The same for head dimensions whose operands do not fit into shared memory together: boxes of them arrive in turn.

    A box is one bf16 term of 64 columns. Warpgroups have the same 64 queries.
    """

    block_m: int = 64
    block_n: int = 64
    num_stages: int  # boxes of k and its tangent
    value_boxes: int  # boxes of v and its tangent, for 64 columns
    bf16_terms: int = 3  # bf16 terms of a float32; two are for TF32's precision

    defined = ("value_boxes", "bf16_terms")
    variations: ClassVar = {"num_stages": (4, 5, 6), "value_boxes": (2, 3, 4)}

    element_bytes = 4
    num_warps = 16  # four each for weights, for each chunk of columns and for the producers

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m == 64 and self.block_n == 64, "64 keys and 64 queries for one product"),
            (self.max_dim <= 2 * CHUNK, "a head dimension of two chunks"),
            (self.num_stages >= 4 and self.value_boxes >= 2, "boxes for two groups of products in each ring"),
            (self.bf16_terms in (2, 3), "two or three bf16 terms"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        box, chunks = chunked_bytes(64, CHUNK), -(-dim_v // CHUNK)
        boxes = self.num_stages + chunks * self.value_boxes
        terms = 2 * chunked_bytes(64, dim) + 2 * box  # of q and its tangent, and of weights
        return self.bf16_terms * terms + boxes * box + 8 * self.block_m + 8 * (4 + 2 * boxes)


@dataclass(frozen=True, kw_only=True)
class ForwardFloat8Sm90Tile(Sm90Tile):
    """One way to cut the fp8 forward pass for compute capability 9.0. A consumer owns 64 of its queries."""

    block_m: int
    block_n: int
    num_stages: int  # stages of keys, and of transposed values
    value_stages: int  # stages of values as they are in memory
    q_stages: int  # tiles of queries
    overlaps: bool  # a consumer has the scores of a tile and the output of the one before in flight at once
    ping_pong: bool  # consumers take turns to make exponentials
    serves: str = "any"

    conditions: ClassVar = FORWARD_FLOAT8
    serves_nothing_else = True
    defined = ("q_stages", "value_stages", "overlaps", "ping_pong")
    variations: ClassVar = {"block_m": (128, 192), "num_stages": (2, 3), "value_stages": (1, 2), "q_stages": (1, 2)}

    element_bytes = 2  # of out

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m in (128, 192, 256), "64 queries for each of two to four consumers"),
            (self.block_n in (64, 96, 128), "a block_n that one product serves, and one line holds"),
        )

    @property
    def num_warps(self) -> int:
        """Four warps for each consumer, the producer, and the three transposers."""
        return super().num_warps

    @property
    def dim_multiple(self) -> int:
        """The k of a product, or the columns of one where several products in turn make the output."""
        return 32 if self.max_dim <= 128 else 64

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        q, k, v = (
            -(-d // LINE_BYTES) * rows * LINE_BYTES
            for rows, d in ((self.block_m, dim), (self.block_n, dim), (self.block_n, dim_v))
        )
        transposed = (dim_v + 8) * LINE_BYTES
        barriers = 16 * (self.q_stages + 2 * self.num_stages + self.value_stages)
        return self.q_stages * q + self.num_stages * (k + transposed) + self.value_stages * v + barriers

    def why_not(self, problem: Problem, device: DeviceSpec) -> str | None:
        whole = all(problem.scale_block(name) % self.block_n == 0 for name in ("k_scale", "v_scale"))
        return (
            super().why_not(problem, device)
            if whole
            else f"for scales of heads, or of multiples of {self.block_n} keys"
        )


@dataclass(frozen=True, kw_only=True)
class BackwardSm90Tile(ScoredTile):
    """One way to cut the backward pass for compute capability 9.0. A warpgroup, or two, own 64 of the block_n keys."""

    block_m: int
    block_n: int
    schedule: Literal["kHoldK", "kSharedDs", "kSplitRoles"]  # Schedule of kernels/sm90/backward_layout.cuh
    dq_in_order: bool = False  # blocks add to dq one after another, in a fixed order
    keeps_scores: bool = False  # shared memory keeps them for gradients of the cap, or of arrays that a function reads
    query_sums: int = 0  # reads of such arrays whose gradients are summed over the keys of a tile
    diagonal_sums: int = 0  # reads whose gradients are summed along the diagonals of a tile
    per_row_values: int = 0  # numbers that a function reads of each row, which warps keep in shared memory
    per_warp_key_values: int = 0  # the same of each key
    takes_dentropy: bool = False  # stages have the gradient of the entropy of each row, too
    takes_dmax: bool = False  # and that of its maximum, and the key that gets it
    # Columns of dq that one product makes. On an H100, 32 in place of 64 make the pass 28 % faster at head_dim 32, 17
    # to 20 % at 80 and 96, and 9 to 13 % at 160.
    dim_multiple: int = 32
    serves: str = "any"

    conditions: ClassVar = BACKWARD
    defined = ("schedule", "per_row_values", "per_warp_key_values")
    variations: ClassVar = {"num_stages": (2, 3, 4)}

    def rules(self) -> tuple[tuple[bool, str], ...]:
        keys = 64 if self.splits_roles else 128
        return (
            (self.block_n == keys, "64 keys for two consumers, or for each of them"),
            (self.block_m == 64, "64 queries for one product"),
        )

    @property
    def splits_roles(self) -> bool:
        """Whether, for the same keys, one consumer makes P and dv, and the other dS and dk."""
        return self.schedule == "kSplitRoles"

    @property
    def maps_bias(self) -> bool:
        return self.bias_of_pairs > 0

    @property
    def num_warps(self) -> int:
        """Four warps for each of two consumers, four for dq, and four that keep the order of dq if it has one."""
        return 16 if self.dq_in_order else 12

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        keys = chunked_bytes(self.block_n, dim) + chunked_bytes(self.block_n, dim_v)
        of_rows = self.block_m * (8 + 4 * self.takes_dentropy + 8 * self.takes_dmax)
        queries = chunked_bytes(self.block_m, dim) + chunked_bytes(self.block_m, dim_v) + of_rows
        ds = 2 * chunked_bytes(self.block_n, self.block_m)
        p = self.block_n * self.block_m * 4 if self.splits_roles else 0
        bias = bias_tile_bytes(self.block_m, self.block_n, self.bias_of_pairs)
        barriers = 8 * (2 + 4 * self.num_stages + 4 + 2 * self.splits_roles + 6 * self.dq_in_order)
        barriers += 8 * (self.num_stages + 2)  # and tiles that are handed over
        scores = self.block_n * self.block_m * 4 if self.keeps_scores else 0
        # Two stages of what each warp sums for its 16 keys.
        step = self.query_sums * self.block_m + self.diagonal_sums * (self.block_m + 16)
        sums = 2 * self.block_n // 16 * step * 4
        numbers = 8 * 4 * (self.block_m * self.per_row_values + 16 * self.per_warp_key_values)  # of 8 warps
        return keys + self.num_stages * (queries + bias) + ds + p + scores + sums + numbers + barriers


@dataclass(frozen=True, kw_only=True)
class BiasSm90Tile(ScoredTile):
    """One way to cut the gradient of a per-pair bias for compute capability 9.0. A warpgroup owns 64 queries."""

    block_m: int = 128
    block_n: int = 128
    bias_of_pairs: int  # bytes of an element of the bias that it serves
    num_stages: int  # stages of the operands of a product
    bias_stages: int  # stages of tiles of bias
    bf16_terms: int = 1  # bf16 terms of an element: three for float32, or two for TF32's precision

    role = "bias"
    defined = ("bias_stages", "bf16_terms")
    variations: ClassVar = {"num_stages": (2, 3, 4), "bias_stages": (1, 2)}

    num_warps = 12  # four for each of two consumers and for the producer

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m == 128 and self.block_n in (64, 128), "128 queries for two consumers, and 64 or 128 keys"),
            (self.bf16_terms in (1, 2, 3), "one bf16 term, two or three"),
        )

    @property
    def element_bytes(self) -> int:
        return 2 if self.bf16_terms == 1 else 4

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        operands = chunked_bytes(self.block_m, max(dim, dim_v)) + chunked_bytes(self.block_n, max(dim, dim_v))
        numbers = 4 * self.block_n * self.num_per_key
        bias = bias_tile_bytes(self.block_m, self.block_n, self.bias_of_pairs)
        barriers = 16 * (self.num_stages + self.bias_stages)
        return self.num_stages * (self.bf16_terms * operands + numbers) + self.bias_stages * bias + barriers

    def configured(self, problem: Problem) -> BiasSm90Tile:
        """The tile for the mask of a problem."""
        return self.changed(mask_of_keys=self.for_masks(problem, self.bias_of_pairs).mask_of_keys)

    def why_not(self, problem: Problem, device: DeviceSpec) -> str | None:
        if problem.bias is None or bias_by(problem) != "pairs" or ITEMSIZE[problem.bias.dtype] != self.bias_of_pairs:
            return f"for {BIAS_BY_TMA}, of {self.bias_of_pairs} bytes an element"
        return "masks that hide pairs one by one are looked up" if self.looks_up_pairs(problem) else None


@dataclass(frozen=True, kw_only=True)
class BackwardFloat32Sm90Tile(ScoredTile):
    """One way to cut the backward pass of float32 for compute capability 9.0. Warpgroups own the same 64 keys."""

    packs_masks = False

    block_m: int = 64
    block_n: int = 64
    num_buffers: int  # buffers in which weights and their gradients are handed from warpgroup to warpgroup
    dq_late: bool  # dq of a tile waits for the first columns of its dk, which the next queries wait for
    bf16_terms: int = 3  # bf16 terms of a float32; two are for TF32's precision
    writes_dbias: bool = False  # dS replaces the tile of a per-pair bias, and TMA writes it to dbias

    defined = ("num_buffers", "dq_late", "bf16_terms")
    variations: ClassVar = {"num_stages": (1, 2, 3), "num_buffers": (1, 2)}

    element_bytes = 4
    num_warps = 16  # four each for dv, dk, dq and the producers

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m == 64 and self.block_n == 64, "64 keys and 64 queries for one product"),
            (self.bf16_terms in (2, 3), "two or three bf16 terms"),
            (not self.dq_late or self.num_buffers <= self.num_stages, "late dq no later than dk"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        tile = self.bf16_terms * (chunked_bytes(64, dim) + chunked_bytes(64, dim_v))
        buffers = self.num_buffers * self.bf16_terms * chunked_bytes(64, CHUNK)
        chunks = -(-dim // CHUNK) - (-dim_v // CHUNK)
        barriers = 8 * (2 + 2 * self.num_stages * chunks + 3 * self.num_buffers + self.num_stages * self.writes_dbias)
        queries = self.block_m * 8 + bias_tile_bytes(self.block_m, self.block_n, self.bias_of_pairs)
        return (self.num_stages + 1) * tile + buffers + self.num_stages * queries + barriers

    @property
    def maps_bias(self) -> bool:
        return self.bias_of_pairs > 0


@dataclass(frozen=True, kw_only=True)
class BackwardJvpFloat32Sm90Tile(Sm90Tile):
    """One way to cut the tangents of gradients in float32 for compute capability 9.0, of operands as bf16 terms.

    Warpgroups own the same 64 keys.
    """

    block_m: int = 64
    block_n: int = 64
    num_stages: int  # of q and its tangent
    do_stages: int  # of dout
    num_buffers: int  # buffers in which weights and gradients of scores are handed from warpgroup to warpgroup
    bf16_terms: int = 3  # bf16 terms of a float32; two are for TF32's precision

    defined = ("do_stages", "num_buffers", "bf16_terms")
    variations: ClassVar = {"num_stages": (1, 2, 3), "do_stages": (1, 2), "num_buffers": (1, 2)}

    element_bytes = 4
    num_warps = 16  # four each for tdv, tdk, tdq and the producers

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m == 64 and self.block_n == 64, "64 keys and 64 queries for one product"),
            (self.max_dim <= CHUNK, "a head dimension of one chunk"),
            (self.bf16_terms in (2, 3), "two or three bf16 terms"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        tiles = 2 + 2 * self.num_stages + self.do_stages + 2 * self.num_buffers
        stats = 16 * self.block_m * self.do_stages
        barriers = 8 * (2 + 2 * self.num_stages + 2 * self.do_stages + 3 * self.num_buffers)
        return tiles * self.bf16_terms * chunked_bytes(64, CHUNK) + stats + barriers


@dataclass(frozen=True, kw_only=True)
class BackwardJvpFloat32WideSm90Tile(Sm90Tile):
    """The same for head dimensions whose operands do not fit into shared memory together: boxes of them arrive in turn.

    A box is one bf16 term of 64 columns.
    """

    block_m: int = 64
    block_n: int = 64
    num_stages: int  # boxes of q, v and their tangents, for the gradients of scores
    tdk_boxes: int  # boxes of q and its tangent, for tdk
    bf16_terms: int = 3  # bf16 terms of a float32; two are for TF32's precision

    defined = ("tdk_boxes", "bf16_terms")
    variations: ClassVar = {"num_stages": (4, 5, 6, 8, 10), "tdk_boxes": (2, 3, 4, 6)}

    element_bytes = 4
    num_warps = 16  # four each for dX and tdv, for tdk, for tdq and for the producers

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m == 64 and self.block_n == 64, "64 keys and 64 queries for one product"),
            (self.max_dim <= 2 * CHUNK, "a head dimension of two chunks"),
            (self.num_stages >= 4 and self.tdk_boxes >= 2, "boxes for two groups of products in each ring"),
            (self.bf16_terms in (2, 3), "two or three bf16 terms"),
        )

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        boxes, box = self.num_stages + self.tdk_boxes, chunked_bytes(64, CHUNK)
        terms = 2 * chunked_bytes(64, dim) + chunked_bytes(64, dim_v) + box  # of k and its tangent, dout and dX
        stats = 16 * self.block_m
        return self.bf16_terms * terms + boxes * box + stats + 8 * (1 + 4 + 2 * boxes)


_forward_sm90 = maker(ForwardSm90Tile, "max_dim block_m block_n num_stages ping_pong q_stages serves origin")
_forward_float32_sm90 = maker(ForwardFloat32Sm90Tile, "max_dim block_m block_n num_stages ping_pong origin")
_jvp_float32_sm90 = maker(JvpFloat32Sm90Tile, "max_dim block_n num_stages ping_pong origin")
_jvp_float32_wide_sm90 = maker(JvpFloat32WideSm90Tile, "max_dim num_stages value_boxes origin")
_forward_float8_sm90 = maker(
    ForwardFloat8Sm90Tile, "max_dim block_m block_n num_stages value_stages q_stages overlaps ping_pong serves origin"
)
_backward_sm90 = maker(BackwardSm90Tile, "max_dim block_m block_n num_stages schedule origin")
_bias_sm90 = maker(BiasSm90Tile, "max_dim bias_of_pairs num_stages bias_stages origin")
_backward_float32_sm90 = maker(BackwardFloat32Sm90Tile, "max_dim num_stages num_buffers dq_late origin")
_backward_jvp_float32_sm90 = maker(BackwardJvpFloat32Sm90Tile, "max_dim num_stages do_stages num_buffers origin")
_backward_jvp_float32_wide_sm90 = maker(BackwardJvpFloat32WideSm90Tile, "max_dim num_stages tdk_boxes origin")

# fmt: off
FORWARD_SM90_TILES = (
    #            max_dim  m    n   stages pingp  Q  serves
    # Without values, consumers have registers for more queries, and their softmax has no product of its own to overlap.
    _forward_sm90(64,     256, 64,  8,    True,  2, "no values",
                  "on an H200 719 us, 256 x 128 without ping-pong 725, 256 x 64 with 3 stages 764 (4 x 32 heads, "
                  "seqlen 4096)"),
    _forward_sm90(64,     256, 64,  6,    False, 2, "mask function",
                  "on an H100 443 / 267 TFLOP/s, with 3 stages 432 / 260, with 8 445 / 270 (8 documents of 512, 4 x 32 "
                  "heads), but 20 documents of other lengths causal 231 us with either, and 227 so"),
    _forward_sm90(64,     128, 128, 2,    True,  2, "few points",
                  "on an H100 27.9 / 27.6 us, 256 x 64: 36.2 / 34.5 (distance; 16 heads, seqlen 1024)"),
    _forward_sm90(64,     256, 64,  3,    False, 2, "space",
                  "on an H100 323 and 377 TFLOP/s, 192 x 96: 319 and 356 (distance, box; 4 x 32, 4096), "
                  "causal 304 and 350, 192 x 96: 292 and 332 with ping-pong; with 8 documents of 512 271 "
                  "and 297, 192 x 64 92 and 94"),
    _forward_sm90(64,     128, 128, 3,    True,  2, "lists",
                  "on an H200 497 TFLOP/s with 2 stages and all blocks of 128 x 128 kept, FlexAttention 270 (seqlen "
                  "16384); half of them on an H100 616 us, with 2 stages 624 (4 x 32 heads, seqlen 4096)"),
    _forward_sm90(64,     128, 128, 2,    True,  2, "few full",
                  "on an H200 12.4 and 17.3 us, 256 x 64: 14.9 and 22.3 (16 heads, seqlen 512 and 1024)"),
    _forward_sm90(64,     128, 64,  3,    True,  2, "few bounded",
                  "on an H200 12.5, 17.9 and 30.1 us, 256 x 64: 18.0, 24.8 and 39.4 (16 heads, seqlen 512, "
                  "1024 and 2048 causal)"),
    _forward_sm90(64,     256, 64,  8,    False, 2, "no pairs",
                  h200("584 / 563, 541 / 412", "289 / 280, 287 / 216") + " with 3 stages. With 8, consumers may be "
                  "tiles of keys apart: on an H100 sequences of 512 take 147 / 114 us where they took 151 / 119, of "
                  "1024 256 / 165 where they took 256 / 171, and windows of 1024 make 455 TFLOP/s in place of 428"),
    _forward_sm90(64,     256, 64,  2,    False, 2, "bias",
                  "on an H200 430 / 413 TFLOP/s, 192 x 64 with 3 stages: 386 / 374 (32 heads, seqlen 4096)"),
    _forward_sm90(64,     192, 64,  2,    False, 2, "bias", "for a bias of float32; " + ARITHMETIC),
    _forward_sm90(64,     192, 64,  3,    False, 2, "any", ARITHMETIC),
    _forward_sm90(128,    256, 128, 3,    True,  1, "no values",
                  "on an H200 453 us, causal 244; 256 x 64 461 and 253, 192 x 128 522 and 309, 192 x 80 or 128 x 128 "
                  "585 and 351 (4 x 16 heads, seqlen 4096)"),
    _forward_sm90(128,    128, 96,  2,    True,  1, "dropout",
                  "on an H200 503 TFLOP/s, 192 x 80: 427, 128 x 128 429 (16 heads, seqlen 4096, p = 0.1)"),
    _forward_sm90(128,    192, 64,  4,    False, 1, "long window",
                  "on an H100 555 TFLOP/s, 128 x 128: 518, on an H200 589 and 530 (64 heads, seqlen 4096, "
                  "1024 keys)"),
    _forward_sm90(128,    256, 64,  4,    False, 1, "long, narrow values",
                  "on an H200 573 us, causal 312, 192 x 80: 650 and 352 (values of 64, 4 x 16 heads, seqlen 4096)"),
    _forward_sm90(128,    192, 64,  4,    False, 1, "long, narrow",
                  "on an H200 1035 us, causal 557, 192 x 80: 1154 and 631 (head_dim 72, 4 x 28 heads, seqlen 4096); "
                  "96: 807 and 437, 824 and 447; 80: 886 and 476, 943 and 494, but 3632 and 1830, 3568 and 1775 at "
                  "16384"),
    _forward_sm90(128,    192, 80,  2,    True,  2, "long",
                  "on an H200 788 and 753 TFLOP/s, 128 x 128: 778 and 724 (seqlen 4096 and 16384 full), causal 615 "
                  "and 710, 580 and 664"),
    _forward_sm90(128,    128, 128, 2,    True,  2, "no pairs",
                  "on an H200 694 TFLOP/s causal at seqlen 4096, 674 / 495 full / causal at 1024, FlashAttention-2: "
                  "297, 332 / 247"),
    _forward_sm90(128,    192, 64,  2,    True,  1, "bias",
                  "on an H200 595 / 504 TFLOP/s, 128 x 64: 503 / 503 (16 heads, seqlen 4096)"),
    _forward_sm90(128,    128, 64,  2,    True,  1, "bias", "for a bias of float32; " + ARITHMETIC),
    _forward_sm90(128,    192, 80,  2,    True,  2, "many points",
                  "on an H100 511 and 553 TFLOP/s, 192 x 64: 489 and 529 (as above, 16 heads); with one stage "
                  "of queries as fast with two numbers of a key, 3 % faster with one, 12 % slower with three"),
    _forward_sm90(128,    128, 128, 2,    True,  2, "points",
                  "on an H100 436 and 506 TFLOP/s causal, 128 x 96: 397 and 465 (as above)"),
    _forward_sm90(128,    128, 96,  2,    True,  2, "points",
                  "for three numbers of a key: on an H100 311 TFLOP/s causal, 192 x 64: 292 (a box in space)"),
    _forward_sm90(128,    128, 64,  3,    True,  2, "any", ARITHMETIC),
    _forward_sm90(192,    256, 64,  4,    False, 1, "no values", ARITHMETIC),
    _forward_sm90(192,    128, 64,  2,    True,  1, "bias", ARITHMETIC),
    _forward_sm90(192,    128, 64,  2,    True,  1, "lists", ARITHMETIC),
    _forward_sm90(192,    128, 96,  2,    True,  1, "any",
                  "on an H200 817 / 728, 689 / 502 TFLOP/s, 128 x 112 with the output in the buffer of Q: "
                  "786 / 703, 620 / 461 (seqlen 4096 full / causal, 1024 full / causal; 10 heads)"),
    _forward_sm90(256,    256, 64,  2,    False, 1, "no values",
                  "on an H200 367 us, 192 x 64 416, 128 x 128 415, 128 x 64 480 (4 x 8 heads, seqlen 4096)"),
    _forward_sm90(256,    128, 64,  2,    True,  1, "any",
                  h200("798 / 745, 718 / 544", "296 / 271, 307 / 249")),
)

FORWARD_FLOAT32_SM90_TILES = (
    #                    max_dim m   n   stages ping_pong
    _forward_float32_sm90(64,  192, 128, 2,    True,
                          "on an H200 2.36 and 2.45 ms (50,000 x 50,000 points, without and with a per-key bias), "
                          "128 x 128 2.57 and 2.88", serves="no values"),
    _forward_float32_sm90(64,  128, 128, 1,    False, h200_float32("121 / 110", "33.2 / 30.2")),
    _forward_float32_sm90(128, 128, 64, 2,     True,
                          "on an H200 1.13 ms (32 heads, seqlen 4096), one stage 1.31, 128 keys 1.20",
                          serves="no values"),
    _forward_float32_sm90(128, 128, 64, 1,     True,  h200_float32("123 / 112", "44.0 / 42.1")),
)

# The same for precision="tf32".
FORWARD_TF32_SM90_TILES = (
    _forward_float32_sm90(64,  192, 160, 1,    False,
                          "on an H200 1.44 and 1.60 ms (as above), 192 x 128 in two stages 1.46 and 1.68, 128 x 192 "
                          "1.76 and 1.92", bf16_terms=2, serves="no values"),
    _forward_float32_sm90(64,  128, 192, 1,    False, h200_float32("209 / 183", "33.2 / 30.2"), bf16_terms=2),
    _forward_float32_sm90(128, 128, 128, 1,    True,
                          "on an H200 0.67 ms (as above), with 112 keys 0.70", bf16_terms=2, serves="no values"),
    _forward_float32_sm90(128, 128, 96, 1,     True,  ARITHMETIC, bf16_terms=2, serves="bias"),
    _forward_float32_sm90(128, 128, 112, 1,    True,  h200_float32("221 / 193", "44.0 / 42.1"), bf16_terms=2),
)

# Of jvp, for 128 queries.
JVP_FLOAT32_SM90_TILES = (
    #                max_dim n  stages ping_pong
    _jvp_float32_sm90(64, 64, 1, False,
                      "on an H200 116 / 112 TFLOP/s, 3.1 / 2.9 times the forward pass's time, sm80/jvp 53 / 51, with "
                      "48 keys 110 / 108, with 32 in two stages 106 / 94 (32 heads, seqlen 4096 full / causal)"),
)
JVP_FLOAT32_WIDE_SM90_TILES = (
    _jvp_float32_wide_sm90(128, 4, 3,
                           "on an H200 101 / 87 TFLOP/s, 3.48 / 3.43 times forward's time, sm80/jvp 48 / 46 (16 heads, "
                           "batch 2, seqlen 4096 full / causal); 6 boxes and 2 99 full"),
)
JVP_TF32_WIDE_SM90_TILES = (
    _jvp_float32_wide_sm90(128, 6, 4,
                           "on an H200 182 TFLOP/s, 3.45 times forward's time, sm80/jvp 99 (16 heads, batch 2, seqlen "
                           "4096)", bf16_terms=2),
)
JVP_TF32_SM90_TILES = (
    _jvp_float32_sm90(64, 64, 1, False,
                      "on an H200 220 / 202 TFLOP/s, sm80/jvp 97 / 86, in two stages 205 / 199, with 48 keys 199 / 186 "
                      "(as above)", bf16_terms=2),
)

FORWARD_FLOAT8_SM90_TILES = (
    #                    max_dim m   n   stages of v, Q  overl. pingp  serves
    _forward_float8_sm90(64,  192, 128, 3, 3, 2, False, False, "long full",
                         "on an H100 666, 694 and 760 TFLOP/s (seqlen 2048, 4096, 16384), 256 x 64 646, 669 and 690; "
                         "of 1024 570 and 612"),
    _forward_float8_sm90(64,  256, 64,  4, 4, 2, False, False, "any",
                         "on an H100 625 and 703 TFLOP/s causal (seqlen 4096, 16384), 192 x 128 597 and 693"),
    _forward_float8_sm90(128, 128, 128, 3, 2, 1, True,  False, "bounded",
                         "on an H100 806 and 954 TFLOP/s causal (seqlen 4096, 16384), with 2 stages of keys and of "
                         "queries 773 and 892, 192 x 96 760 and 859"),
    _forward_float8_sm90(128, 192, 128, 3, 2, 1, False, False, "any",
                         "on an H100 951 and 1008 TFLOP/s (seqlen 4096, 16384), with 2 stages of keys and of queries "
                         "946 and 1003, 192 x 96 933 and 984"),
    _forward_float8_sm90(128, 192, 64,  3, 3, 1, False, False, "any",
                         "for scales of blocks of keys; on an H200 778 TFLOP/s (16 heads, seqlen 4096)"),
    _forward_float8_sm90(256, 128, 128, 2, 1, 1, False, True,  "any",
                         "on an H200 1020 / 910 TFLOP/s, without turns 994 / 870 (8 heads, seqlen 4096)"),
    _forward_float8_sm90(256, 128, 64,  3, 1, 1, False, False, "any", "for scales of blocks of keys; " + ARITHMETIC),
)

BACKWARD_SM90_TILES = (
    #             max_dim m   n   stages schedule
    _backward_sm90(16,  64, 128, 3,     "kHoldK",
                   "on an H100 232 / 206 TFLOP/s, padded to 64 columns 160 / 142 (128 heads, seqlen 4096)",
                   dim_multiple=16),
    _backward_sm90(64,  64, 128, 4,     "kHoldK",
                   "on an H200 1952 us, causal 1079; 3 stages 2045 and 1108, 256 keys, 128 for each consumer, 1915 and "
                   "1100 (4 x 32 heads, seqlen 4096)", serves="no values"),
    _backward_sm90(64,  64, 128, 3,     "kHoldK",
                   h200("579 / 526, 478 / 348", "258 / 235, 243 / 186")),
    _backward_sm90(128, 64, 128, 4,     "kHoldK",
                   "on an H200 1630 us, causal 893; 3 stages 1717 and 926, kSharedDs 1739 and 963 (4 x 16 heads, "
                   "seqlen 4096)", serves="no values"),
    _backward_sm90(128, 64, 128, 3,     "kSharedDs",
                   h200("608 / 579, 512 / 371", "266 / 259, 255 / 208")),
    _backward_sm90(192, 64, 64,  3,     "kSplitRoles",
                   "on an H200 2592 us, causal 1405; 2 stages 2915 and 1499 (4 x 10 heads, seqlen 4096); with values "
                   "of 128 2492 and 1339; 2678 and 1407", serves="values"),
    _backward_sm90(192, 64, 128, 4,     "kSharedDs",
                   "on an H200 1417 us, causal 842; 3 stages 1447 and 838, 2 1582 and 886 (4 x 10 heads, seqlen 4096)",
                   serves="no values"),
    _backward_sm90(256, 64, 128, 3,     "kSharedDs",
                   "on an H200 1505 us, causal 865; 4 stages 1510 and 877, 2 1522 and 882 (4 x 8 heads, seqlen 4096)",
                   serves="no values"),
    _backward_sm90(256, 64, 128, 2,     "kSharedDs",
                   "on an H200 1636 us, split roles 2510 (4 x 8 heads, seqlen 4096): half as much dq is added",
                   serves="no values"),
    _backward_sm90(256, 64, 64,  2,     "kSplitRoles",
                   h200("466 / 450, 394 / 301", "239 / 224, 227 / 181")),
)

# Two to four tiles of operands hide the latency of L2 under products.
BIAS_SM90_TILES = (
    #          max_dim bytes stages of bias
    _bias_sm90(64,  2, 4, 2, "on an H100 0.84 ms against 2.35 for the other gradients (8 heads, 512 rows of 512)"),
    _bias_sm90(64,  4, 4, 1, ARITHMETIC),
    _bias_sm90(128, 2, 3, 1, ARITHMETIC),
    _bias_sm90(128, 4, 2, 1, ARITHMETIC),
    _bias_sm90(192, 2, 2, 1, ARITHMETIC),
)

# For float32, tiles have 64 keys, because the terms of larger ones leave no space for two stages.
BIAS_FLOAT32_SM90_TILES = (
    _bias_sm90(64, 4, 2, 1,
               "on an H100 0.81 ms, 1.42 for the other gradients, sm80/backward_scores 2.53 (batch 384, 4 heads, "
               "384 rows of 384, head_dim 32); 0.89 and 2.80 (256, 4, 512, head_dim 64)",
               block_n=64, bf16_terms=3),
)
BIAS_TF32_SM90_TILES = (_bias_sm90(64, 4, 3, 1, ARITHMETIC, block_n=64, bf16_terms=2),)

# Tiles have 64 keys and 64 queries. The products of terms count as one.
BACKWARD_FLOAT32_SM90_TILES = (
    #                     max_dim stages buffers late dq
    _backward_float32_sm90(64,  2, 2, False, h200_float32("114 / 111", "34.1 / 31.1")),
    _backward_float32_sm90(128, 1, 1, True,  h200_float32("121 / 114", "35.7 / 34.2")),
)

BACKWARD_TF32_SM90_TILES = (
    _backward_float32_sm90(64,  3, 2, False, h200_float32("175 / 162", "34.1 / 31.1"), bf16_terms=2),
    _backward_float32_sm90(128, 2, 2, True,  h200_float32("199 / 184", "35.7 / 34.2"), bf16_terms=2),
)

# Of backward_jvp. The products of terms count as one.
BACKWARD_JVP_FLOAT32_SM90_TILES = (
    #                         max_dim stages of q, dout, buffers
    _backward_jvp_float32_sm90(64,    2, 1, 1,
                               "on an H200 124 / 116 TFLOP/s, 1.9 times backward's time, by sm80/backward_jvp 53 / 49; "
                               "with one stage of q and two buffers 103, or three stages of dout 101 (32 heads, "
                               "seqlen 4096 full / causal)"),
)
BACKWARD_JVP_TF32_SM90_TILES = (
    _backward_jvp_float32_sm90(64,    2, 2, 2,
                               "on an H200 213 TFLOP/s, 1.5 times backward's time, by sm80/backward_jvp 98; with three "
                               "stages of q 194, one of dout 189, one buffer 186 (as above, full)", bf16_terms=2),
)
BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES = (
    _backward_jvp_float32_wide_sm90(128,  5, 2,
                                    "on an H200 100 / 93 TFLOP/s, 2.32 / 2.21 times backward's time, 4 boxes and 3 95 "
                                    "/ 85, sm80/backward_jvp 4.7 times (16 heads, batch 2, seqlen 4096 full / causal)"),
)
BACKWARD_JVP_TF32_WIDE_SM90_TILES = (
    _backward_jvp_float32_wide_sm90(128, 10, 4,
                                    "on an H200 173 TFLOP/s, 2.14 times backward's time, 11 boxes and 3 172, 8 and 6 "
                                    "159 (16 heads, batch 2, seqlen 4096)", bf16_terms=2),
)
# fmt: on
