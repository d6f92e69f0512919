"""Narrow float32 heads without values, such as points in space: lanes multiply their columns, not tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cuflash.plan.sm80.tiles import Sm80Tile
from cuflash.plan.tiles import ARITHMETIC, exceeds
from cuflash.spec.problem import Problem


@dataclass(frozen=True, kw_only=True)
class NarrowTile(Sm80Tile):
    """One way to cut the forward pass without values of narrow heads. Warps share block_m queries."""

    bias_of_keys: bool = False  # the bias differs from key to key only, and is one more column of k

    defined: ClassVar[tuple[str, ...]] = ("bias_of_keys",)
    variations: ClassVar = {"block_m": (16, 32), "block_n": (128, 256, 512), "min_blocks": (2, 3, 4)}

    dim_multiple = 16  # of fragments: there is no column past the head dimension

    def rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.block_n % (8 * self.num_warps) == 0, "8 keys for every warp"),
            (self.num_stages == 2, "a stage for a tile that arrives"),
        )

    def padded_dims(self, problem: Problem) -> tuple[int, int]:
        return problem.head_dim, problem.head_dim_v

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        ring = self.num_stages * (dim + self.bias_of_keys) * self.block_n
        return self.element_bytes * max(ring, 2 * self.num_warps * self.block_m)


# Tensor cores would multiply 16 columns, half of them or more zeros.
FORWARD_NARROW_TILES = (
    NarrowTile(
        element_bytes=4, max_dim=8, block_m=32, block_n=256, num_warps=4, num_stages=2, min_blocks=3, origin=ARITHMETIC
    ),
)


def is_narrow(problem: Problem) -> bool:
    """Whether the kernel of narrow heads serves a problem."""
    return problem.dtype == "float32" and problem.head_dim_v == 0 and not exceeds(problem, FORWARD_NARROW_TILES)
