"""The backward pass on compute capability 9.0: 16-bit operands as they are, float32 as bf16 terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan.draft import CAUSAL_HEAD_SECTION, Draft
from cuflash.plan.families import BACK_SECTION, BackwardFamily, Family, KeysFamily
from cuflash.plan.scores import is_per_key, num_summed
from cuflash.plan.sm80.tiles import BACKWARD_TILES, BackwardTile
from cuflash.plan.sm90.bf16_split import add_bf16_split, note_bias_lookup, why_not_split
from cuflash.plan.sm90.copies import add_copies
from cuflash.plan.sm90.forward import why_not_16_bit
from cuflash.plan.sm90.mask_bits import add_mask_bits
from cuflash.plan.sm90.tiles import (
    BACKWARD_FLOAT32_SM90_TILES,
    BACKWARD_SM90_TILES,
    BACKWARD_TF32_SM90_TILES,
    BackwardFloat32Sm90Tile,
    BackwardSm90Tile,
)
from cuflash.plan.tensor_map import why_not
from cuflash.plan.tiles import Row, Tile, choose_row, why_too_large
from cuflash.score_mod import READ_CLASSES
from cuflash.spec.inputs import CAPS
from cuflash.spec.outputs import ROW_REDUCTIONS
from cuflash.spec.problem import Problem

# How many heads have their blocks side by side in launch order on compute capability 9.0. On an H200 eight are 1 %
# slower than four (head_dim 128, seqlen 4096), and so they are with a window of 1024 keys at head_dim 64. Where
# blocks add to dq in order, each block is one step later than the block before it of the same head. Then the number of
# heads side by side is such that, as blocks end, the blocks of a head start two steps apart. Measured at head_dim 128,
# in us by number of heads: seqlen 1024: 4 779, 8 738, 16 723, 32 739; and as a multiple of the time of dq in no order:
# seqlen 4096: 2 1.11, 4 1.04, 8 1.05.
BACKWARD_HEAD_SECTION = 4
STEPS_APART = 2
# Packed sequences have few and long heads, and an earlier kernel must clear the accumulators of dq of those heads that
# start side by side. On an H200 two heads in place of 4 to 16 are up to 4 % faster at head_dim 256 and up to 2 % at 64.
# With dq in order under a causal mask four in place of 16 are up to 1 % faster, and two are 1 to 3 % slower than four
# at head_dim 256.
PACKED_HEAD_SECTION, PACKED_IN_ORDER_SECTION = 2, 4
# Under a causal mask the blocks of a head are at different queries, so Q, dO and dQ of all heads that blocks work on
# should stay in L2. On an H200, with dq in order at seqlen 16384, 128 MiB of them cost 21 % more time than 16 MiB
# (head_dim 128), and 44 % more than 32 MiB (head_dim 256). With dq in order, blocks are further apart the more heads of
# a group they have gone through. So all heads of a group count. Blocks share a group that has more than two heads
# and more than fit, which is 5 to 7 % faster (4 heads of head_dim 128, seqlen 8192, or head_dim 256, seqlen 4096).
BACKWARD_L2_BYTES = 1 << 24
MIN_HEADS_IN_ORDER = 2
# Where blocks add to dq in order under a causal mask, the longest blocks run alone at the end, unless one of this many
# heads starts with its longest blocks. On an H200 one head of 8 is 2 to 6 % faster than none at head_dim 256, and 1 to
# 5 % slower at smaller ones. But groups of query heads make blocks longer: by arithmetic 20 % of the device waits for
# the last blocks of 4 waves, and 13 % for those of 8.
SPLIT_ROLES_REVERSED_ONE_IN, GROUPED_REVERSED_ONE_IN = 8, 4
# From this many waves on, blocks clear accumulators of dq for later blocks. On an H200 this makes the pass 2 to 5 %
# shorter at seqlen 1024, and up to 1 % at 4096 (batch x heads x seqlen x head_dim of 2**25). Clearing for heads two
# sections ahead in place of one makes it 1 % longer. In a single wave, clearing makes it 3 % longer.
CLEAR_WAVES = 2
TERMS_IN_ANY_ORDER = 2  # so many terms that blocks add to zero have the same sum in any order
_CAP_GRADIENTS = frozenset(f"d{name}" for name in CAPS)


class OfWarpgroups(Family[Row]):
    """A family whose accumulators lie in memory as fragments of the four warps of a warpgroup, one below the other."""

    def accumulator_layout(self, main: Row) -> BackwardTile:
        return BackwardTile(
            element_bytes=main.element_bytes,
            max_dim=main.max_dim,
            block_m=main.block_m,
            block_n=main.block_n,
            num_warps=4,
            num_stages=1,
            min_blocks=1,
            warps_d=1,
            dq_warps_m=4,
            fragments_ahead=0,
            origin=main.origin,
        )


class InOrder(OfWarpgroups[Row], KeysFamily[Row]):
    """A family whose blocks add to dq, or to tdq, in a fixed order where the row has `dq_in_order`."""

    def dq_in_order(self, main: Any) -> bool:
        return bool(main.dq_in_order)

    def reversed_one_in(self, problem: Problem, main: Any) -> int:
        if not main.dq_in_order or problem.batch_invariant:  # which heads go back depends on how many there are
            return 0
        if problem.window_right is None or problem.window_left is not None:
            return 0
        if problem.group_size > 1:
            return GROUPED_REVERSED_ONE_IN
        return SPLIT_ROLES_REVERSED_ONE_IN if main.splits_roles else 0

    def clear_ahead(self, draft: Draft, main: Any) -> int:
        problem, run_time = draft.problem, draft.run_time
        ahead = max(run_time.head_section, BACK_SECTION if self.reversed_one_in(problem, main) else 0)
        heads = problem.array_batch * problem.num_heads_kv * run_time.group_splits
        blocks = heads * draft.tiles_of(problem.seqlen_k, main.block_n)
        is_large = blocks >= CLEAR_WAVES * draft.device.num_sms * main.min_blocks
        return ahead if ahead < heads and is_large else 0

    def head_section(self, draft: Draft, main: Any) -> int:
        """That of blocks that add in order, so that those of a head start `STEPS_APART`."""
        problem, group_splits = draft.problem, draft.run_time.group_splits
        if problem.window_right is None:
            resident, steps = draft.device.num_sms * main.min_blocks, draft.steps_of_tile(main) // group_splits
            return max(BACKWARD_HEAD_SECTION, STEPS_APART * resident // max(steps, 1))
        most = PACKED_IN_ORDER_SECTION if problem.is_packed else CAUSAL_HEAD_SECTION
        heads = problem.group_size // group_splits
        return max(min(BACKWARD_L2_BYTES // max(heads * _head_bytes(draft, main), 1), most), 1)


class Backward(InOrder[BackwardSm90Tile], BackwardFamily[BackwardSm90Tile]):
    """Half precision. Blocks own keys: two consumers make dv and dk, and another warpgroup adds to dq."""

    kernel = "sm90/backward"
    has_functions = True
    rows = BACKWARD_SM90_TILES
    makes_both = splits_tail = orders_tiles = True
    min_shared_steps = 64  # measured with random block masks of 5 to 100 % of 16384 keys
    serves_no_values = True
    row_reductions = ROW_REDUCTIONS
    model = "visible keys"
    defines: ClassVar = {"CUFLASH_PAIRS_STATS": 1}

    def table(self, problem: Problem) -> tuple[BackwardSm90Tile, ...]:
        return tuple(_with_row_reductions(row, problem) for row in BACKWARD_SM90_TILES)

    def alternatives(self, problem: Problem) -> tuple[Tile, ...]:
        return (*self.table(problem), *BACKWARD_TILES)

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        if draft.device.arch != 90 or ITEMSIZE[problem.dtype] != 2:
            return ""
        if problem.dropout and problem.score is not None and problem.program.changes_slope:
            return "dropout marks weights by their sign, which they lose with the derivatives of the score by s"
        if problem.row_reductions and (problem.given(CAPS) or problem.score is not None):
            return (
                "weights are multiplied by the derivatives of scores, and the gradient of entropy needs their logarithm"
            )
        why_not = why_not_16_bit(draft, _mapped(draft), BACKWARD_SM90_TILES, copies=True)
        if why_not is None and has_separate_dq(draft):
            tile, _ = choose_row(self.table(problem), problem, draft.device)
            if _with_masks(tile, draft).mask_by_bits:
                return "the order of dq counts tiles that block_mask hides, and no kernel of dq alone reads its bits"
        return why_not

    def configured(self, main: BackwardSm90Tile, draft: Draft) -> BackwardSm90Tile:
        has_order = draft.problem.deterministic and "dq" in draft.need and not has_separate_dq(draft)
        main = replace(_with_row_reductions(main, draft.problem), dq_in_order=has_order)
        tile = _with_masks(main, draft)
        if tile.mask_by_bits and has_separate_dq(draft):
            raise NotImplementedError(
                "tiles: got a BackwardSm90Tile with deterministic=True and pairs that block_mask hides one by one, "
                "expected a BackwardTile and a DqTile"
            )
        return _with_score_values(tile, draft)

    def heads_of_block(self, draft: Draft, main: BackwardSm90Tile) -> int:
        if not main.dq_in_order or draft.problem.window_right is None:
            return draft.problem.group_size
        return max(BACKWARD_L2_BYTES // max(_head_bytes(draft, main), 1), MIN_HEADS_IN_ORDER)

    def head_section(self, draft: Draft, main: BackwardSm90Tile) -> int:
        if main.dq_in_order:
            return super().head_section(draft, main)
        problem = draft.problem
        most = CAUSAL_HEAD_SECTION
        if problem.window_right is None or problem.has_window:
            most = BACKWARD_HEAD_SECTION
        if problem.is_packed:
            most = PACKED_HEAD_SECTION
        if problem.window_right is None:
            return most
        return max(min(BACKWARD_L2_BYTES // max(_head_bytes(draft, main), 1), most), 2)

    def why_not_summed(self, draft: Draft, main: BackwardSm90Tile, name: str) -> str | None:
        if name == "dscale":
            return None
        if main.splits_roles and (names := draft.problem.given(CAPS)):
            return f"where roles are split the derivative of {names[0]} is in the weights that are handed over"
        if name in _CAP_GRADIENTS:
            return why_too_large(self.summing(main, (name,)), draft.problem, draft.device)
        if name == "dbias" and not is_per_key(draft):
            return "only what differs from key to key, and not from query to query, is summed by keys"
        return None

    def summing(self, main: BackwardSm90Tile, names: tuple[str, ...]) -> BackwardSm90Tile:
        return replace(main, keeps_scores=not _CAP_GRADIENTS.isdisjoint(names))

    def why_not_score_args(self, draft: Draft, main: BackwardSm90Tile) -> str | None:
        program, summed = draft.program, draft.summed_score_args
        for name in summed:
            for access in program.classes((name,)):
                if access not in READ_CLASSES:
                    return f"an entry of {name} belongs to a pair [{access}], each of which adds to memory"
        if main.splits_roles and program.derivatives_read_s(summed):
            return "where roles are split the consumer that makes dS does not know s, which derivatives are made of"
        return why_too_large(self.summing_score_args(draft, main), draft.problem, draft.device)

    def summing_score_args(self, draft: Draft, main: BackwardSm90Tile) -> BackwardSm90Tile:
        summed = draft.summed_score_args
        classes = draft.program.classes(summed)
        summing = replace(
            main,
            keeps_scores=draft.program.derivatives_read_s(summed),
            query_sums=classes.count("i"),
            diagonal_sums=classes.count("i - j"),
        )
        return _with_score_values(summing, draft)

    def prepare(self, draft: Draft, main: BackwardSm90Tile) -> None:
        m, n = main.block_m, main.block_n
        add_copies(draft, main, _mapped(draft))
        by_rows = draft.defines["CUFLASH_STORES_BY_ROWS"]
        results: dict[str, int] = {name: 64 for name in ("dk", "dv") if name in draft.need and not by_rows}
        bias = {"bias": m} if main.bias_of_pairs else {}
        boxes = {"q": m, "k": n, "v": n, "dout": m, **results}
        draft.map_tensors({name: boxes[name] for name in _mapped(draft) if name in boxes} | bias)
        if main.mask_by_bits:
            add_mask_bits(draft, main, transposed=True)


class BackwardFloat32(OfWarpgroups[BackwardFloat32Sm90Tile], BackwardFamily[BackwardFloat32Sm90Tile]):
    """float32, of operands as bf16 terms. Blocks own keys: a warpgroup each makes dv, makes dk and adds to dq."""

    kernel = "sm90/backward_fp32"
    rows = BACKWARD_FLOAT32_SM90_TILES
    tf32_rows = BACKWARD_TF32_SM90_TILES
    makes_dq_alone = makes_both = splits_tail = True
    serves_no_values = True
    writes_dbias = True
    defines: ClassVar = {"CUFLASH_PLAIN_FRAGMENTS": 1}

    def why_not(self, draft: Draft) -> str | None:
        why_not = why_not_split(draft, self.table(draft.problem))
        if why_not is None and draft.problem.deterministic and "dq" in draft.need:
            return "it adds to dq in no fixed order"
        return why_not

    def configured(self, main: BackwardFloat32Sm90Tile, draft: Draft) -> BackwardFloat32Sm90Tile:
        return main.loading_bias(draft.problem, draft.device)

    def why_not_summed(self, draft: Draft, main: BackwardFloat32Sm90Tile, name: str) -> str | None:
        if name != "dbias":
            return ""
        if not main.bias_of_pairs:
            return "tiles of dbias take the place of tiles of bias, which it does not load here"
        if names := draft.problem.given(CAPS):
            return f"its dS has the derivative of {names[0]}, too"
        if draft.problem.deterministic and num_summed(draft) > TERMS_IN_ANY_ORDER:
            return "it adds to dbias in no fixed order"
        dbias = draft.arrays["dbias"]
        if dbias.strides[3] != 1:
            return "dbias is not contiguous along the keys"
        summing = self.summing(main, (name,))
        return why_not("dbias", dbias, written=True, broadcasts=True) or why_too_large(
            summing, draft.problem, draft.device
        )

    def summing(self, main: BackwardFloat32Sm90Tile, names: tuple[str, ...]) -> BackwardFloat32Sm90Tile:
        return replace(main, writes_dbias="dbias" in names)

    def prepare(self, draft: Draft, main: BackwardFloat32Sm90Tile) -> None:
        operands = _operands(draft)
        add_bf16_split(draft, main, operands)
        per_pair = ("bias", "dbias")[: bool(main.bias_of_pairs) + main.writes_dbias]
        draft.map_tensors(dict.fromkeys(operands, 64) | dict.fromkeys(per_pair, main.block_m))
        note_bias_lookup(draft, main)


def _operands(draft: Draft) -> tuple[str, ...]:
    """The arrays that TMA reads."""
    return ("q", "k", "v", "dout") if draft.problem.head_dim_v else ("q", "k")


def _mapped(draft: Draft) -> tuple[str, ...]:
    """The arrays that TMA reads or writes."""
    return (*_operands(draft), *(name for name in ("dk", "dv") if name in draft.need))


def has_separate_dq(draft: Draft) -> bool:
    """Whether dq, or tdq, has a kernel of its own: its order would count the tiles that a block-sparse index lacks."""
    return draft.problem.deterministic and "dq" in draft.gradients and bool(draft.defines["CUFLASH_HAS_BLOCK_INDEX"])


def _with_row_reductions(row: BackwardSm90Tile, problem: Problem) -> BackwardSm90Tile:
    """The row with shared memory for the gradients of row reductions that a problem has."""
    reductions = problem.row_reductions
    return replace(row, takes_dmax="max" in reductions, takes_dentropy="entropy" in reductions)


def _with_masks(main: BackwardSm90Tile, draft: Draft) -> BackwardSm90Tile:
    """The tile for the bias and the masks of a problem.

    A per-pair bias is loaded by tile if that fits into shared memory, if need be with fewer stages.
    """
    for stages in range(main.num_stages, 1, -1):
        staged = replace(main, num_stages=stages).loading_bias(draft.problem, draft.device)
        if staged.bias_of_pairs:
            return staged
    return main.for_masks(draft.problem, 0)


def _with_score_values(main: BackwardSm90Tile, draft: Draft) -> BackwardSm90Tile:
    """The tile with shared memory for the per-row and per-key values that score_mod reads, if it fits."""
    if draft.problem.score is None:
        return main
    rows, keys = len(draft.program.of_rows), len(draft.program.of_keys)
    with_values = replace(main, per_row_values=rows, per_warp_key_values=keys)
    too_large = why_too_large(with_values, draft.problem, draft.device)
    return replace(main, per_row_values=0, per_warp_key_values=0) if too_large else with_values


def _head_bytes(draft: Draft, main: Tile) -> int:
    """Bytes of Q, dO and dQ of one head. Packed: for the mean length, since blocks work on few sequences at once."""
    dim, dim_v = draft.padded_dims(main)
    return draft.problem.mean_sequence.seqlen_q * (main.element_bytes * (dim + dim_v) + 4 * dim)
