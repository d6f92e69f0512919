"""Gradients of what scores are made of beside q and k, by kernels that compute the gradients of the scores again."""

from __future__ import annotations

import math
from collections.abc import Collection

from cuflash.planning.draft import Draft
from cuflash.planning.sm80 import ScoresTile
from cuflash.terms import OF_SCORES, TERMS

SCORES_REDUCE_WARPS = 8
# The gradient whose kernel stores tiles of gradients of scores. The others are sums: one number, or one for each head.
_STORED = next(term.gradient for term in TERMS if term.part_of == "scores" and term.broadcasts)
_OF_HEADS = next(term.gradient for term in TERMS if term.part_of == "scores" and not term.broadcasts)
_AXES = ("BATCH", "HEADS", "QUERIES", "KEYS")
_AXES_WORDS = ("batch entries", "heads", "tiles of queries", "tiles of keys")


def score_gradients(draft: Draft) -> tuple[str, ...]:
    """Gradients that kernels of their own make, which compute the gradients of the scores again."""
    return tuple(name for name in draft.need if name in OF_SCORES)


def add_score_gradients(draft: Draft, tile: ScoresTile) -> None:
    """The kernels of gradients of parts of scores: one for that which is stored, and one for all that are sums."""
    problem, device = draft.problem, draft.device
    shared_bytes = tile.shared_bytes(*draft.padded_dims(tile))
    tiles_of = (draft.tiles_of(problem.seqlen_q, tile.block_m), -(-problem.mean_sequence.seqlen_k // tile.block_n))
    sizes = (problem.array_batch, problem.num_heads, *tiles_of)
    at_once = device.num_sms * tile.min_blocks
    reduce = {"CUFLASH_NUM_WARPS": SCORES_REDUCE_WARPS, "CUFLASH_MIN_BLOCKS": 1}
    reduce_bytes = 16 * SCORES_REDUCE_WARPS

    def defines(sums: tuple[bool, ...], need: Collection[str]) -> dict[str, int]:
        axes = {f"CUFLASH_SUMS_{x}": int(on) for x, on in zip(_AXES, sums, strict=True)}
        return axes | {f"CUFLASH_NEEDS_{name.upper()}": int(name in need) for name in OF_SCORES}

    def shares(owned: int, summed: int) -> int:
        return max(1, min(summed, at_once // max(owned, 1)))

    wanted = score_gradients(draft)
    if _STORED in wanted:
        operand = draft.arrays[_STORED]
        sums = tuple(stride == 0 for stride in operand.strides)
        owned = math.prod(n for n, summed in zip(sizes, sums, strict=True) if not summed)
        splits = shares(owned, math.prod(sizes) // max(owned, 1))
        draft.set(score_splits=splits)
        options = defines(sums, (_STORED,))
        draft.add("sm80/backward_scores.cu", tile, owned * splits, shared_bytes, (_STORED,), **options)
        axes = ", ".join(f"{n} {x}" for x, n, summed in zip(_AXES_WORDS, sizes, sums, strict=True) if summed and n > 1)
        draft.reasons.append(f"{_STORED}: {owned} tiles of pairs" + (f", each a sum over {axes}" if axes else ""))
        if splits > 1:
            rows, columns = (1 if sums[2] else tile.block_m), (1 if sums[3] else tile.block_n)
            draft.scratch["score_partials"] = owned * splits * rows * columns
            draft.add("around/scores_reduce.cu", tile, owned, reduce_bytes, (_STORED,), **options, **reduce)
            draft.reasons[-1] += f" that {splits} blocks share: tiles are few"
    sums_wanted = [name for name in wanted if name != _STORED]
    if sums_wanted:
        m_blocks = math.prod(sizes[:3])
        sums_splits = shares(m_blocks, sizes[3])
        draft.set(sums_splits=sums_splits)
        options = defines((False, False, False, True), sums_wanted)
        draft.add("sm80/backward_scores.cu", tile, m_blocks * sums_splits, shared_bytes, sums_wanted, **options)
        draft.scratch["sums_partials"] = (len(OF_SCORES) - 1) * m_blocks * sums_splits
        sums_batch = _OF_HEADS in draft.arrays and draft.arrays[_OF_HEADS].strides[0] == 0
        of_heads = problem.num_heads * (1 if sums_batch else problem.batch) if _OF_HEADS in wanted else 0
        options["CUFLASH_SUMS_BATCH"] = int(sums_batch)
        blocks = of_heads + len(set(sums_wanted) - {_OF_HEADS})
        draft.add("around/scores_reduce.cu", tile, blocks, reduce_bytes, sums_wanted, **options, **reduce)
        draft.reasons.append(
            f"{', '.join(sums_wanted)}: sums by {m_blocks * sums_splits} blocks, added in a fixed order"
        )
