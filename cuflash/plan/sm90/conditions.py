"""What rows of the tables of compute capability 9.0 are meant for: each condition as a test, and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuflash.arrays.cached import cached_property
from cuflash.plan.sm90.scored import BIAS_BY_TMA, bias_by, claimed_waves, rounds
from cuflash.plan.tiles import ANY, Condition, Fit, by_name

if TYPE_CHECKING:
    from cuflash.plan.sm90.scored import ScoredTile

LONG_SEQLEN = 2048  # from this length on, larger tiles of keys, or of queries, pay
# How much longer a tile of queries takes than one of 128 x 128, measured on an H200 where all blocks had equally many.
FOUR_CONSUMERS = 1.57  # 256 x 64, at head dimension 64
THREE_CONSUMERS = 1.44  # 192 x 80, at head dimension 128
THREE_CONSUMERS_OF_LSE = 1.35  # 192 x 128, float32 without values: 1.25 where queries are many
# Under a causal mask, with so many tiles for each block, they end early enough; by arithmetic.
CLAIMED_WAVES_OF_THREE = 4
WINDOW_CONSUMERS = 1.3  # 192 x 64, at head dimension 128, with a window: by arithmetic from 1.11 of the speed
NARROW_VALUES = 64  # columns of V: up to so many, four consumers have registers for O
# Columns of Q, K and V: up to so many, 64 keys in four stages are faster than 80 in two. With values of 128 columns
# they are 1 to 9 % faster up to seqlen 4096 on an H200, and 3 to 7 % slower at 16384.
NARROW = 96
_PER_PAIR = "per-pair bias or mask"
_WOULD_IDLE = "larger tiles would leave SMs idle"
_UNLESS_EARLIER = "unless smaller query tiles finish earlier"
_LONG = f"{LONG_SEQLEN} keys or more; no {_PER_PAIR}, score_mod or mask_mod, no window; {_UNLESS_EARLIER}"


class ForwardFit(Fit):
    """A row of the forward pass with a problem. `row` is that row as it loads bias, masks and score of the problem."""

    @cached_property
    def row(self) -> ScoredTile:
        configured: ScoredTile = self.tile.configured(self.problem)
        return configured

    @cached_property
    def bias(self) -> str:
        return bias_by(self.problem)

    @cached_property
    def looks_nothing_up(self) -> bool:
        """Whether nothing is looked up pair by pair, neither what hides pairs nor what a score reads."""
        problem = self.problem
        reads_pairs = problem.score is not None and problem.hoisted.reads_pairs
        # Numbers that a function reads of rows and keys take registers, and smaller tiles leave more of them.
        return not self.row.looks_up_pairs(problem) and not reads_pairs

    @property
    def has_no_pairs(self) -> bool:
        """Whether there is no per-pair bias either."""
        return self.has_no_pair_bias and self.looks_nothing_up

    @property
    def has_no_pair_bias(self) -> bool:
        return self.bias in ("nothing", "keys", "rows")

    @property
    def has_block_index(self) -> bool:
        return self.problem.block_mask is not None or self.problem.mask_function is not None

    @property
    def reads_points(self) -> bool:
        """`ScoredTile.reads_points`: a score_mod of coordinates, say."""
        return self.row.reads_points(self.problem)

    @property
    def is_full(self) -> bool:
        return self.problem.window_right is None

    @property
    def has_dropout(self) -> bool:
        return self.problem.dropout > 0

    @property
    def claimed_waves(self) -> float:
        return claimed_waves(self.problem, self.device, self.row)

    @property
    def is_few(self) -> bool:
        """Whether tiles of twice the queries would take longer, because they are few."""
        rows = self.tile.block_m
        return self._rounds(rows) < FOUR_CONSUMERS * self._rounds(2 * rows)

    def pays(self, cost: float) -> bool:
        """Whether tiles that take `cost` times as long as those of 128 queries finish earlier."""
        return cost * self._rounds(self.tile.block_m) <= self._rounds(128)

    def _rounds(self, rows: int) -> int:
        return rounds(self.problem, self.device, rows)


def _is_long(fit: Fit) -> bool:
    return fit.problem.mean_sequence.seqlen_k >= LONG_SEQLEN


def _ends_early(fit: ForwardFit, cost: float) -> bool:
    """Whether a long problem takes no longer in tiles that take `cost` times as long as those of 128 queries."""
    if not (fit.has_no_pairs and not fit.problem.has_functions and _is_long(fit)):
        return False
    return fit.pays(cost) if fit.is_full else fit.claimed_waves >= CLAIMED_WAVES_OF_THREE


# Of `ForwardSm90Tile`.
FORWARD = by_name(
    ANY,
    Condition(
        "no pairs",
        lambda fit: fit.has_no_pairs,
        f"no {_PER_PAIR}, and no score_mod that reads rows or keys",
    ),
    Condition(
        "bias",
        lambda fit: fit.looks_nothing_up and fit.bias == "pairs",
        f"{BIAS_BY_TMA}, without masks that are looked up pair by pair",
    ),
    Condition("long", lambda fit: _ends_early(fit, THREE_CONSUMERS), _LONG),
    Condition(
        "long, narrow values",
        lambda fit: 0 < fit.problem.head_dim_v <= NARROW_VALUES and _ends_early(fit, FOUR_CONSUMERS),
        f"head_dim_v up to {NARROW_VALUES}, {_LONG}",
    ),
    Condition(
        "long, narrow",
        lambda fit: max(fit.problem.head_dim, fit.problem.head_dim_v) <= NARROW and _ends_early(fit, THREE_CONSUMERS),
        f"head dimensions up to {NARROW}, {_LONG}",
    ),
    Condition(
        "few full",
        lambda fit: fit.has_no_pairs and fit.is_full and fit.is_few,
        f"few query tiles, not causal; no {_PER_PAIR}: {_WOULD_IDLE}",
    ),
    Condition(
        "few bounded",
        lambda fit: fit.has_no_pairs and not fit.is_full and fit.is_few,
        f"few query tiles, causal; no {_PER_PAIR}: {_WOULD_IDLE}",
    ),
    Condition(
        "long window",
        lambda fit: fit.has_no_pairs and fit.problem.has_window and fit.pays(WINDOW_CONSUMERS),
        f"a sliding window; no {_PER_PAIR}, and no score_mod that reads rows or keys; {_UNLESS_EARLIER}",
    ),
    Condition(
        "mask function",
        lambda fit: (
            fit.has_no_pairs
            and not fit.has_dropout
            and fit.problem.window_left is None
            and fit.pays(FOUR_CONSUMERS)
            and fit.row.has_mask_mod_alone(fit.problem)
        ),
        f"a mask_mod without dropout, window_left, ALiBi, bias or key mask; {_UNLESS_EARLIER}",
    ),
    Condition(
        "lists",
        lambda fit: fit.has_no_pair_bias and (fit.has_block_index or fit.row.mask_by_bits),
        "block masks, per-pair masks and mask_mod, without a per-pair bias",
    ),
    Condition(
        "points",
        lambda fit: fit.reads_points,
        "a score_mod that reads per-row and per-key values alone; no block mask or per-pair mask",
    ),
    Condition(
        "few points",
        lambda fit: fit.reads_points and fit.is_few,
        f"a score_mod of per-row and per-key values, few query tiles: {_WOULD_IDLE}",
    ),
    Condition(
        "space",
        lambda fit: fit.reads_points and not fit.has_dropout and fit.row.per_key_values <= 3,
        "a score_mod of per-row values and up to three per-key values, without dropout",
    ),
    Condition(
        "many points",
        lambda fit: (
            fit.reads_points
            and fit.is_full
            and not fit.has_dropout
            and not fit.has_block_index
            and fit.pays(THREE_CONSUMERS)
        ),
        f"a score_mod of per-row and per-key values, not causal, no mask_mod or dropout; {_UNLESS_EARLIER}",
    ),
    Condition(
        "dropout",
        lambda fit: fit.has_no_pairs and fit.has_dropout,
        "dropout without a per-pair bias and per-pair masks",
    ),
    Condition(
        "no values",
        lambda fit: fit.problem.head_dim_v == 0 and fit.has_no_pairs and fit.pays(FOUR_CONSUMERS),
        f"lse alone; no {_PER_PAIR}, and no score_mod that reads rows or keys; {_UNLESS_EARLIER}",
    ),
)
# Of `ForwardFloat32Sm90Tile`.
FORWARD_FLOAT32 = by_name(
    ANY,
    Condition("bias", lambda fit: bias_by(fit.problem) == "pairs", BIAS_BY_TMA),
    Condition(
        "no values",
        lambda fit: (
            fit.problem.head_dim_v == 0
            and fit.has_no_pair_bias
            and (fit.tile.block_m == 128 or (_is_long(fit) and fit.pays(THREE_CONSUMERS_OF_LSE)))
        ),
        f"lse alone, without a per-pair bias; {_UNLESS_EARLIER}",
    ),
)
# Of `ForwardFloat8Sm90Tile`.
FORWARD_FLOAT8 = by_name(
    ANY,
    Condition("bounded", lambda fit: fit.problem.window_right is not None, "causal problems"),
    Condition(
        "long full",
        lambda fit: fit.problem.window_right is None and _is_long(fit),
        f"{LONG_SEQLEN} keys or more, not causal",
    ),
)


def _is_of_lse_alone(fit: Fit) -> bool:
    return fit.problem.head_dim_v == 0 and not fit.problem.has_functions and fit.problem.dropout == 0


# Of `BackwardSm90Tile`.
BACKWARD = by_name(
    ANY,
    Condition("no values", _is_of_lse_alone, "gradients of lse alone, without score_mod, mask_mod or dropout"),
    # Sums of gradients of arrays that functions read need the shared memory of a stage.
    Condition(
        "values",
        lambda fit: not _is_of_lse_alone(fit) and not fit.problem.score_arg_gradients,
        "values, mask_mod or dropout, and no score_mod or mask_mod that reads arrays with gradients",
    ),
)
