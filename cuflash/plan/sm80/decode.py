"""Decode on every device: the KV cache is streamed past all queries that share a KV head.

Tiles follow from arithmetic. An SM must have as many bytes in flight as its share of the bandwidth brings
within the latency of memory, 0.8 us: 26 KB on an H200, 15 KB on an A100, 6 KB on an RTX 4090. In every row below, the
rings of its warp_groups hold more than that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan.block_index import add_tile_classes
from cuflash.plan.device import DeviceSpec
from cuflash.plan.draft import Draft
from cuflash.plan.families import ForwardFamily
from cuflash.plan.key_splits import DECODE_ROWS, add_split_kernel, is_decode, rows_of
from cuflash.plan.sm80.tiles import FLOAT8_TILES, FORWARD_TILES, Sm80Tile
from cuflash.plan.tiles import ARITHMETIC, Tile, maker, round_up, serves_dims, tile_bytes, why_too_large
from cuflash.spec.problem import Problem

MOST_WARPS = 8  # of a block: more would leave each too few registers


@dataclass(frozen=True, kw_only=True)
class DecodeTile(Sm80Tile):
    """One way to stream the keys past block_m queries. Groups of warps take tiles of block_n keys of their own."""

    warp_groups: int
    warps_d: int = 1  # warps along the columns of the output
    key_bytes: int = 0  # bytes of an element of k and v, where they are not element_bytes
    num_warps: int = field(init=False)

    defined = ("warps_d",)
    serves_nothing_else = True
    variations: ClassVar = {"block_n": (16, 32, 64), "num_stages": (1, 2, 3, 4), "warp_groups": (1, 2, 3, 4, 6, 8)}

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_warps", self.warp_groups * self.warps_per_group)
        super().__post_init__()

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_m % 16 == 0 and self.block_n % 16 == 0, "whole fragments"),
            (self.num_warps <= MOST_WARPS, f"at most {MOST_WARPS} warps"),
        )

    @property
    def warps_per_group(self) -> int:
        """Warps of a warp_group: each has 16 rows, or a share of the columns of the output of 16 rows."""
        return self.block_m // 16 * self.warps_d

    def why_not(self, problem: Problem, device: DeviceSpec) -> str | None:
        if rows_of(problem) > self.block_m:
            return f"for up to {self.block_m} queries of the heads that share keys"
        return None if device.arch >= 80 or self.num_stages == 1 else "before 8.0 a warp waits for what it copies"

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        size = self.element_bytes
        keys = sum(tile_bytes(self.block_n, d, self.key_bytes or size) for d in (dim, dim_v))
        sum_size = max(size, 4)
        sums = max(16 * dim_v // self.warps_d, 256) * sum_size + 32 * sum_size + 16  # that a warp hands over
        warp_group = max(self.num_stages * keys, self.warps_per_group * sums if self.warp_groups > 1 else 0)
        return tile_bytes(self.block_m, dim, size) + self.warp_groups * round_up(warp_group, 128)


_decode = maker(DecodeTile, "max_dim block_m block_n warp_groups num_stages min_blocks warps_d fragments_ahead")

# How many warp_groups a block has, how many stages a warp_group has, and how many blocks an SM has: the first that fits
# is taken. Two blocks come first, because one then loads while the other merges its sums. After them, 16-bit elements
# get as many stages as fit. Products of wide elements take so long that warps come first, two for each
# scheduler.
_LAST_SIZES = ((2, 2, 1), (3, 1, 1), (2, 1, 1), (1, 3, 1), (1, 2, 1), (1, 1, 1))
_SIZES = ((4, 3, 2), (4, 2, 2), (4, 3, 1), (4, 2, 1), (2, 3, 1), (8, 1, 1), (6, 1, 1), (4, 1, 1), *_LAST_SIZES)
_WIDE_SIZES = ((4, 3, 2), (4, 2, 2), (4, 1, 2), (8, 1, 1), (4, 3, 1), (4, 2, 1), (4, 1, 1), (2, 3, 1), *_LAST_SIZES)
# max_dim, block_m, block_n, warps_d, fragments ahead: what a warp has in registers follows from these.
_SHAPES = {
    2: (
        *((64, 16, 32, 1, 2), (128, 16, 16, 1, 2), (256, 16, 16, 1, 1), (512, 16, 16, 2, 1), (1024, 16, 16, 4, 1)),
        *((64, 32, 32, 1, 2), (128, 32, 32, 1, 2), (256, 32, 16, 1, 1), (512, 32, 16, 2, 1)),
        *((64, 64, 32, 1, 2), (128, 64, 32, 1, 2), (256, 64, 16, 1, 1)),
    ),
    4: (
        *((64, 16, 16, 1, 1), (128, 16, 16, 1, 1), (256, 16, 16, 2, 1), (512, 16, 16, 4, 1), (1024, 16, 16, 8, 1)),
        *((64, 32, 16, 1, 1), (128, 32, 16, 1, 1), (256, 32, 16, 2, 1)),
        *((64, 64, 16, 1, 1), (128, 64, 16, 1, 1), (256, 64, 16, 2, 1)),
    ),
    8: (
        *((64, 16, 16, 1, 0), (128, 16, 16, 2, 0), (256, 16, 16, 4, 0), (512, 16, 16, 8, 0)),
        *((64, 32, 16, 1, 0), (128, 32, 16, 2, 0), (64, 64, 16, 1, 0), (128, 64, 16, 2, 0)),
    ),
}


def _table(key_bytes: int = 0) -> tuple[DecodeTile, ...]:
    return tuple(
        _decode(
            *(max_dim, block_m, block_n, warp_groups, stages, blocks, warps_d, ahead),
            element_bytes=element_bytes,
            key_bytes=key_bytes,
            origin=ARITHMETIC,
        )
        for element_bytes, shapes in _SHAPES.items()
        for max_dim, block_m, block_n, warps_d, ahead in shapes
        for warp_groups, stages, blocks in (_SIZES if element_bytes == 2 else _WIDE_SIZES)
        if warp_groups * block_m // 16 * warps_d * blocks <= MOST_WARPS
    )


DECODE_TILES = _table()
DECODE_FLOAT8_TILES = _table(key_bytes=1)


class Decode(ForwardFamily[DecodeTile]):
    """Blocks take equal splits of the keys of all heads."""

    kernel = "sm80/decode"
    has_functions = serves_no_values = True
    has_float8 = True
    model = "splits of keys"
    reads_keys_once = True
    unknown = ("packed sequences",)

    def table(self, problem: Problem) -> tuple[DecodeTile, ...]:
        rows = DECODE_FLOAT8_TILES if problem.has_float8 else DECODE_TILES
        serving = [row for row in rows if row.block_m >= rows_of(problem) and serves_dims(row, problem)]
        smallest = min(((row.block_m, row.max_dim) for row in serving), default=(0, 0))
        return tuple(row for row in serving if (row.block_m, row.max_dim) == smallest)

    def alternatives(self, problem: Problem) -> tuple[Tile, ...]:
        return (*self.table(problem), *(FLOAT8_TILES if problem.has_float8 else FORWARD_TILES))

    def why_not(self, draft: Draft) -> str | None:
        problem, device = draft.problem, draft.device
        if not is_decode(problem):
            return ""
        if unknown := self.why_unknown(problem):
            return unknown
        if all(row.why_not(problem, device) or why_too_large(row, problem, device) for row in self.table(problem)):
            return (
                f"{rows_of(problem)} rows of such head dimensions do not fit into shared memory, nor does their output"
            )
        # Where each head has its own block on the device, and no two heads share keys, others read keys once as well.
        shares_keys = problem.group_size > 1 or problem.batch_invariant
        if device.arch == 90 and ITEMSIZE[problem.dtype] == 2 and not shares_keys and 2 * draft.heads >= device.num_sms:
            return f"{draft.heads} heads fill the device, and no two share keys"
        if rows_of(problem) > DECODE_ROWS // 4 and not shares_keys and draft.heads >= device.num_sms:
            return f"{draft.heads} heads of {problem.seqlen_q} queries fill the device, and no two share keys"
        return None

    def draft(self, draft: Draft, tile: DecodeTile) -> None:
        add_tile_classes(draft, tile)
        add_split_kernel(draft, self.source, tile, block_n=tile.warp_groups * tile.block_n)
