"""Gradients of what scores are made of besides q and k: the main kernel sums them, or kernels of their own do."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan.block_index import add_bias_tile_classes
from cuflash.plan.draft import ADDS_SCORE_ARGS, FINDS_LARGEST, SUMS_SCORE_ARGS, Draft, check_blocks
from cuflash.plan.tiles import Tile
from cuflash.spec.inputs import OPTIONAL_INPUTS
from cuflash.spec.outputs import SCORE_GRADIENTS

SCORES_REDUCE_WARPS = 8
# What it costs to share a tile of dbias, in units of the time of one summed tile of pairs, which is 1.4 us on an H100
# (head dimension 32, float16). Each block takes SPLIT_STEPS to begin and to end. To add what blocks leave takes
# ADD_STEPS, and ADD_STEPS_PER_SPLIT for each split of all tiles. By arithmetic: a launch takes 4 us, and 128 KiB that
# are written and read 0.04 us.
SPLIT_STEPS, ADD_STEPS, ADD_STEPS_PER_SPLIT = 2, 3, 0.03
EXACT_WORDS = 12  # kSumWords of kernels/common/softmax/exact_sums.cuh
# Score gradients are stored, pair by pair (dbias), or are sums: a number for each head, or one number.
STORED = tuple(row.gradient for row in OPTIONAL_INPUTS if row.gradient_via == "scores" and row.broadcasts)
PER_HEAD = tuple(row.gradient for row in OPTIONAL_INPUTS if row.gradient_via == "scores" and not row.broadcasts)
_AXES = ("BATCH", "HEADS", "QUERIES", "KEYS")
_AXES_WORDS = ("batch entries", "heads", "tiles of queries", "tiles of keys")


def score_gradients(draft: Draft) -> tuple[str, ...]:
    """The score gradients that are wanted, or whose tangents are."""
    return tuple(name for name in draft.gradients if name in SCORE_GRADIENTS)


def stored_and_sums(names: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """These gradients, split into the one that is stored and those that are sums: one kernel each."""
    return tuple(x for x in names if x in STORED), tuple(x for x in names if x not in STORED)


class ScoreGradients(NamedTuple):
    """Score gradients, or those whose tangents are wanted, that have kernels of their own: by kernel."""

    stored: tuple[str, ...]  # the one over pairs, if any
    sums: tuple[str, ...]
    of_args: tuple[str, ...]  # of arrays that the score reads

    @classmethod
    def of(cls, draft: Draft, made: Collection[str] = (), *, of_args: bool = True) -> ScoreGradients:
        """All that are wanted and not `made` by the main kernel; `of_args` says whether it leaves those of arrays."""
        names = [name for name in score_gradients(draft) if name not in made]
        return cls(*stored_and_sums(names), draft.score_arg_gradients if of_args else ())


def is_per_key(draft: Draft) -> bool:
    """Whether the gradient that is stored is per-key: the same for all queries."""
    *_, of_row, of_key = draft.arrays[draft.result_of("dbias")].strides
    return of_row == 0 and of_key != 0


def num_summed(draft: Draft) -> int:
    """How many pairs add to each element of the gradient that is stored."""
    problem = draft.problem
    lengths = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    return math.prod(n for n, summed in zip(lengths, _summed_axes_of_stored(draft), strict=True) if summed)


def needs(names: Collection[str]) -> dict[str, int]:
    """The macros that tell a kernel which score gradients it makes."""
    return {f"CUFLASH_NEEDS_{name.upper()}": int(name in names) for name in SCORE_GRADIENTS}


def add_scores(draft: Draft, tile: Tile, source: str, gradients: ScoreGradients) -> None:
    """Add the kernels of these gradients."""
    if gradients.stored:
        add_stored(draft, tile, source, gradients.stored)
    if gradients.sums:
        add_sums(draft, tile, source, gradients.sums)
    if gradients.of_args:
        add_score_args(draft, tile, source)


def add_stored(
    draft: Draft, tile: Tile, source: str, stored: Collection[str], *, persistent: bool = False, **defines: int
) -> None:
    """Add the kernel of the gradient that is stored. Each block owns a tile of it or, if `persistent`, several."""
    sizes, axes = _sizes(draft, tile), _summed_axes_of_stored(draft)
    owned = math.prod(n for n, summed in zip(sizes, axes, strict=True) if not summed)
    summed_tiles, resident = math.prod(sizes) // max(owned, 1), draft.device.num_sms * tile.min_blocks
    shared = owned % resident if persistent else owned
    splits = (_num_tail_splits if persistent else _num_splits)(draft, tile, shared, summed_tiles)
    blocks = owned + shared * (splits - 1)
    draft.set(score_splits=splits)
    if persistent:
        check_blocks(blocks)
        blocks = min(blocks, resident)
        draft.set(resident_blocks=blocks)
    options = needs(stored) | _sum_defines(axes) | add_bias_tile_classes(draft, tile) | defines
    shared_bytes, makes = tile.shared_bytes(*draft.padded_dims(tile)), tuple(map(draft.result_of, stored))
    draft.add(source, tile, blocks, shared_bytes, makes, **options)
    summed = ", ".join(f"{n} {x}" for x, n, is_sum in zip(_AXES_WORDS, sizes, axes, strict=True) if is_sum and n > 1)
    draft.reasons.append(f"{makes[0]}: {owned} tiles of pairs" + (f", each a sum over {summed}" if summed else ""))
    if splits > 1:
        rows, columns = (1 if axes[2] else tile.block_m), (1 if axes[3] else tile.block_n)
        draft.scratch["score_partials"] = shared * splits * rows * columns
        adders = shared * -(-rows * columns // (32 * SCORES_REDUCE_WARPS))
        _add_reduce(draft, tile, adders, stored, axes, by_keys=False)
        last = f", of the last {shared} tiles" if shared < owned else ""
        draft.reasons[-1] += f" that {splits} blocks share{last}: tiles are few"


def add_sums(draft: Draft, tile: Tile, source: str, sums: Collection[str]) -> None:
    """Add the kernels of all gradients that are sums. Their blocks own tiles of queries."""
    sizes = _sizes(draft, tile)
    m_blocks = math.prod(sizes[:3])
    splits = _num_splits(draft, tile, m_blocks, sizes[3])
    draft.set(sums_splits=splits)
    options = needs(sums) | _sum_defines((False, False, False, True)) | add_bias_tile_classes(draft, tile)
    shared_bytes, makes = tile.shared_bytes(*draft.padded_dims(tile)), tuple(map(draft.result_of, sums))
    draft.add(source, tile, m_blocks * splits, shared_bytes, makes, **options)
    draft.scratch["sums_partials"] = (len(SCORE_GRADIENTS) - 1) * m_blocks * splits
    _add_reduce(draft, tile, _count_of_sums(draft, sums), sums, _summed_axes_per_head(draft), by_keys=False)
    draft.reasons.append(f"{', '.join(makes)}: sums by {m_blocks * splits} blocks, added in a fixed order")


def add_score_args(draft: Draft, tile: Tile, source: str) -> None:
    """Add the kernels of the gradients of arrays that the score reads: sums in any order, scaled by largest terms."""
    names, sizes = map(draft.result_of, draft.score_arg_gradients), _sizes(draft, tile)
    m_blocks = math.prod(sizes[:3])
    splits = _num_splits(draft, tile, m_blocks, sizes[3])
    draft.set(sums_splits=splits)
    add_score_arg_helpers(draft, tile, ADDS_SCORE_ARGS, stores=False)
    shared_bytes = tile.shared_bytes(*draft.padded_dims(tile))
    options = needs(()) | _sum_defines((False, False, False, True))
    for step, name in ((FINDS_LARGEST, "largest"), (ADDS_SCORE_ARGS, "added")):
        draft.add(source, tile, m_blocks * splits, shared_bytes, (name,), **options, CUFLASH_NEEDS_SCORE_ARGS=step)
    add_score_arg_helpers(draft, tile, ADDS_SCORE_ARGS, stores=True)
    draft.reasons.append(
        f"{', '.join(names)}: by {source.removesuffix('.cu')}, which makes the weights again: sums in fixed point, "
        f"whose order does not matter, in {8 * _words(draft, ADDS_SCORE_ARGS)} bytes"
    )


def add_score_arg_helpers(draft: Draft, tile: Tile, step: int, *, stores: bool) -> None:
    """Add the kernel that clears the sums of such gradients, or the one that makes results of them."""
    arrays = dict(draft.problem.score_args)
    elements = sum(math.prod(arrays[name[1:]].shape) for name in draft.score_arg_gradients)
    if step == SUMS_SCORE_ARGS:
        summed = draft.summed_score_args
        elements += sum(math.prod(filled.shape) for filled in draft.tables if filled.table.name in summed)
    of_64_bits = 8 // ITEMSIZE[draft.problem.softmax_dtype]
    draft.scratch["score_arg_sums"] = of_64_bits * elements * _words(draft, step)
    draft.scratch["score_arg_largest"] = of_64_bits * (len(draft.program.arrays) + 1)
    blocks = draft.device.num_sms  # the same for all arrays, so that no array needs another compilation
    options = {"CUFLASH_NUM_WARPS": SCORES_REDUCE_WARPS, "CUFLASH_MIN_BLOCKS": 1, "CUFLASH_NEEDS_SCORE_ARGS": step}
    options |= {"CUFLASH_SCORE_ARG_BLOCKS": blocks, "CUFLASH_STORES_SCORE_ARGS": int(stores)}
    draft.add("helpers/score_args_gradients.cu", tile, blocks, 0, ("stored",) if stores else ("cleared",), **options)


def _words(draft: Draft, step: int) -> int:
    """How many numbers of 64 bits a sum of such a gradient takes."""
    if step == SUMS_SCORE_ARGS:
        return EXACT_WORDS
    return 2 if draft.problem.softmax_dtype == "float64" else 1


def _sizes(draft: Draft, tile: Tile) -> tuple[int, ...]:
    """Batch entries, heads, tiles of queries and tiles of keys of a sequence."""
    problem = draft.problem
    n_blocks = -(-problem.mean_sequence.seqlen_k // tile.block_n)
    return problem.array_batch, problem.num_heads, draft.tiles_of(problem.seqlen_q, tile.block_m), n_blocks


def _num_splits(draft: Draft, tile: Tile, owned: int, summed: int) -> int:
    """How many blocks split each of the `owned` sums over `summed` tiles, so that each SM has blocks."""
    return max(1, min(summed, draft.device.num_sms * tile.min_blocks // max(owned, 1)))


def _num_tail_splits(draft: Draft, tile: Tile, shared: int, summed: int) -> int:
    """How many persistent blocks split each of the `shared` sums over `summed` tiles: the number that is fastest.

    The time is that of the rounds of blocks, and of adding what the blocks leave.
    """
    resident = draft.device.num_sms * tile.min_blocks

    def duration(splits: int) -> float:
        steps = -(-shared * splits // resident) * (-(-summed // splits) + SPLIT_STEPS)
        return steps + (ADD_STEPS + ADD_STEPS_PER_SPLIT * shared * splits if splits > 1 else 0)

    return min(range(1, min(summed, resident) + 1), key=duration)


def add_key_sums(draft: Draft, tile: Tile, blocks: int, made: Collection[str]) -> None:
    """Add the kernels that add up what `blocks` of the main kernel, which own tiles of keys, have summed."""
    problem = draft.problem
    key_splits = draft.heads * draft.tiles_of(problem.seqlen_k, tile.block_n) * draft.run_time.tail_splits
    warps = tile.block_n // 16
    stored, sums = stored_and_sums(made)
    if stored:
        axes = _summed_axes_of_stored(draft)
        owners = math.prod(n for n, summed in zip((problem.batch, problem.num_heads), axes, strict=False) if not summed)
        grid = owners * -(-problem.seqlen_k // (32 * SCORES_REDUCE_WARPS))
        draft.scratch["score_partials"] = key_splits * tile.block_n
        _add_reduce(draft, tile, grid, stored, axes, by_keys=True)
    if sums:
        of_heads = len(set(sums) & set(PER_HEAD))
        draft.scratch["sums_partials"] = warps * (key_splits * of_heads + blocks * (len(sums) - of_heads))
        _add_reduce(draft, tile, _count_of_sums(draft, sums), sums, _summed_axes_per_head(draft), by_keys=True)
    draft.reasons.append(f"{', '.join(made)}: summed by the main kernel, by tiles of keys, and added in a fixed order")


def _add_reduce(
    draft: Draft, tile: Tile, blocks: int, names: Collection[str], axes: Sequence[bool], *, by_keys: bool
) -> None:
    """Add the kernel that adds up partial sums."""
    options = needs(names) | _sum_defines(axes) | {"CUFLASH_SUMS_BY_KEYS": int(by_keys)}
    warps = {"CUFLASH_NUM_WARPS": SCORES_REDUCE_WARPS, "CUFLASH_MIN_BLOCKS": 1}
    makes = tuple(map(draft.result_of, names))
    draft.add("helpers/scores_reduce.cu", tile, blocks, 16 * SCORES_REDUCE_WARPS, makes, **options, **warps)


def _sum_defines(axes: Sequence[bool]) -> dict[str, int]:
    """The macros that tell a kernel which axes it sums over."""
    return {f"CUFLASH_SUMS_{x}": int(on) for x, on in zip(_AXES, axes, strict=True)}


def _summed_axes_of_stored(draft: Draft) -> tuple[bool, ...]:
    """Which axes the gradient that is stored is summed over."""
    return tuple(stride == 0 for stride in draft.arrays[draft.result_of("dbias")].strides)


def _summed_axes_per_head(draft: Draft) -> tuple[bool, ...]:
    """Which axes the gradient that is a number for each head is summed over, if it is wanted."""
    names = [name for name in map(draft.result_of, PER_HEAD) if name in draft.arrays]
    lack_batch = any(draft.arrays[name].strides[0] == 0 for name in names)
    return (lack_batch, False, False, True)


def _count_of_sums(draft: Draft, sums: Collection[str]) -> int:
    """How many elements these gradients have together, each of which is a sum."""
    problem = draft.problem
    per_head = len(set(sums) & set(PER_HEAD))
    heads = problem.num_heads * (1 if _summed_axes_per_head(draft)[0] else problem.batch)
    return per_head * heads + len(sums) - per_head
