"""What the tiles of kernels of compute capability 9.0 that load bias and masks by tile have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan.device import DeviceSpec
from cuflash.plan.tensor_map import LINE_BYTES, why_not
from cuflash.plan.tiles import Tile, why_too_large
from cuflash.spec.inputs import OPTIONAL_INPUTS
from cuflash.spec.problem import Problem

if TYPE_CHECKING:
    from typing import Self

BIAS_BY_TMA = "a per-pair bias that TMA can read"
BITS_BLOCK = 64  # queries, and keys, of a block of a mask of bits: kernels/common/score/mask_bits.cuh

# Under a causal mask tiles of queries differ in length. From so many keys on blocks claim them, the longest ones first,
# if there are CLAIMED_WAVES for each block; otherwise they take pairs of a long and a short one. TFLOP/s on an H200,
# pairs / claims (batch x seqlen 16384, heads x head_dim 2048):
#   head_dim 64,  seqlen 1024: 397 / 410,  4096: 508 / 519, 16384: 561 / 575
#   head_dim 128, seqlen 1024: 464 / 433,  2048: 524 / 542, 4096: 582 / 615, 16384: 652 / 710, with tiles of 192 x 80
#   from 2048 keys on; with 128 x 128 as in pairs 517, 580 and 664
#   head_dim 256, seqlen 2048: 568 / 573,  4096: 625 / 635, 16384: 699 / 717
CLAIMED_KEYS, CLAIMED_KEYS_64, CLAIMED_WAVES = 2048, 1024, 2
MOST_CLAIMS = (1 << 16) - 1  # what a counter of kernels/common/schedule/arrivals.cuh has room for


def bias_by(problem: Problem) -> Literal["nothing", "keys", "rows", "pairs", "elements"]:
    """How kernels of compute capability 9.0 may load the bias: see kernels/sm90/bias_terms.cuh."""
    bias = problem.bias
    if bias is None:
        return "nothing"
    *_, of_row, of_key = bias.strides
    if of_row == 0:
        return "keys"
    if of_key == 0:
        return "rows"
    by_tma = of_key == 1 and why_not("bias", bias, broadcasts=True) is None
    return "pairs" if by_tma else "elements"


def bias_tile_bytes(rows: int, keys: int, pair_bytes: int) -> int:
    """Shared memory of a tile of a per-pair bias, in lines of 128 bytes."""
    return -(-keys * pair_bytes // LINE_BYTES) * rows * LINE_BYTES


def takes_pairs(problem: Problem) -> bool:
    """Whether tiles of queries are taken in pairs: one has as many keys more as the other has fewer."""
    return problem.window_right is not None and problem.window_left is None


def rounds(problem: Problem, device: DeviceSpec, block_m: int) -> int:
    """How many tiles of queries, or pairs of them, a persistent block takes one after another."""
    heads, seqlen = problem.batch * problem.num_heads, problem.mean_sequence.seqlen_q
    units = heads * -(-seqlen // (2 * block_m if takes_pairs(problem) else block_m))
    return -(-units // device.num_sms)


def claimed_waves(problem: Problem, device: DeviceSpec, tile: ScoredTile, *, are_listed: bool = False) -> float:
    """How many tiles of queries a block claims on average, one after another; 0 where it knows its tiles beforehand.

    `are_listed` says that a block-sparse index lists the tiles of keys of each.
    """
    tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // tile.block_m)
    differ = (takes_pairs(problem) or are_listed) and not problem.is_packed and tile.num_per_key == 0
    fewest_keys = CLAIMED_KEYS_64 if tile.max_dim <= 64 else CLAIMED_KEYS
    pays = problem.seqlen_k >= fewest_keys and CLAIMED_WAVES * device.num_sms <= tiles <= MOST_CLAIMS
    return tiles / device.num_sms if differ and pays else 0


@dataclass(frozen=True, kw_only=True)
class Sm90Tile(Tile):
    """A tile of warpgroups: what their rows have where they do not say otherwise."""

    max_dim: int
    num_stages: int
    origin: str = field(compare=False)

    min_blocks = 1
    fragments_ahead = 0

    @property
    def element_bytes(self) -> int:
        return 2

    @property
    def dim_multiple(self) -> int:
        """The k of a product."""
        return 16

    @property
    def num_warps(self) -> int:
        """Four warps for each consumer of 64 queries, and four for the producer."""
        return self.block_m // 16 + 4


@dataclass(frozen=True, kw_only=True)
class ScoredTile(Sm90Tile):
    """A tile whose kernel loads bias and masks by tile."""

    bias_of_pairs: int = 0  # bytes of an element, where tiles of a per-pair bias are loaded; else 0
    bias_of_keys: bool = False  # the bias differs from key to key only
    mask_of_keys: bool = False  # the mask differs from key to key only
    mask_by_bits: bool = False  # an earlier kernel packs all that hides pairs into bits
    per_key_values: int = 0  # numbers that a score_mod or mask_mod reads of each key

    packs_masks: ClassVar[bool] = True  # whether the kernel reads per-pair masks as bits

    def for_masks(self, problem: Problem, bias_of_pairs: int) -> Self:
        """The tile for the masks of a problem, and for its bias, tiles of which it loads with such `bias_of_pairs`."""
        bias, hidden = bias_by(problem), self._hidden(problem)
        by_tile = bias in ("nothing", "keys") or bias_of_pairs > 0
        # Bits have no mask_mod, and are packed by whole blocks.
        may_pack = self.packs_masks and problem.mask_function is None
        may_pack = may_pack and self.block_m % BITS_BLOCK == 0 and self.block_n % BITS_BLOCK == 0
        changes = {
            "bias_of_pairs": bias_of_pairs,
            "bias_of_keys": bias == "keys",
            "mask_of_keys": by_tile and hidden == "keys",
            "mask_by_bits": by_tile and hidden == "pairs" and may_pack,
        }
        # Every plan does this for every row of a table, and most problems have neither.
        return self if all(getattr(self, name) == x for name, x in changes.items()) else self.changed(**changes)

    def loading_bias(self, problem: Problem, device: DeviceSpec) -> Self:
        """The tile for bias and masks of a problem: a per-pair bias is loaded by tile if that fits."""
        if bias_by(problem) == "pairs" and problem.bias is not None:
            itemsize = ITEMSIZE[problem.bias.dtype]
            if self.block_n * itemsize % LINE_BYTES == 0:
                loading = self.for_masks(problem, itemsize)
                if not why_too_large(loading, problem, device):
                    return loading
        return self.for_masks(problem, 0)

    def looks_up_pairs(self, problem: Problem) -> bool:
        """Whether the kernel looks up, pair by pair, what hides a pair."""
        hidden = self._hidden(problem)
        return hidden != "nothing" and not self.mask_of_keys and not self.mask_by_bits

    def has_mask_mod_alone(self, problem: Problem) -> bool:
        """Whether there is a mask_mod, but no mask of keys, and no array that is added to scores."""
        added = any(row.gradient_via == "scores" and getattr(problem, row.name) is not None for row in OPTIONAL_INPUTS)
        return problem.mask_function is not None and not self.mask_of_keys and not added

    def reads_points(self, problem: Problem) -> bool:
        """Whether a score_mod reads per-key values and none of pairs, and there is no block mask or per-pair mask."""
        has_mask = problem.block_mask is not None or self.looks_up_pairs(problem)
        return self.per_key_values > 0 and not has_mask and problem.hoisted.reads_points

    def _hidden(self, problem: Problem) -> Literal["nothing", "keys", "pairs"]:
        """What masks hide besides whole tiles."""
        rows, keys = problem.block_size
        if rows % self.block_m != 0 or keys % self.block_n != 0:
            return "pairs"
        if problem.mask is None:
            return "nothing"
        # A mask of keys is added to scores, but nothing is added to the score that a score_mod makes.
        return "keys" if problem.mask.strides[2] == 0 and problem.score is None else "pairs"

    @property
    def num_per_key(self) -> int:
        """How many values of each key lie in shared memory."""
        return self.per_key_values or int(self.bias_of_keys or self.mask_of_keys)

    def defines(self) -> dict[str, str | int]:
        return super().defines() | {
            "CUFLASH_BIAS_OF_PAIRS": int(self.bias_of_pairs > 0),
            "CUFLASH_BIAS_OF_KEYS": int(self.bias_of_keys),
            "CUFLASH_MASK_OF_KEYS": int(self.mask_of_keys),
            "CUFLASH_MASK_BY_BITS": int(self.mask_by_bits),
            "CUFLASH_PER_KEY_VALUES": self.per_key_values,
        }
