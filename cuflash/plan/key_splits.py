"""Split-KV for decode: how blocks split the keys of all heads, and what combines their results.

kernels/common/schedule/key_splits.cuh has the same for blocks.
"""

from __future__ import annotations

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan.draft import Draft, check_blocks
from cuflash.plan.tiles import Tile, tiles_at_once
from cuflash.spec.problem import Problem

DECODE_ROWS = 64  # decode has up to this many queries, of all heads that share keys
DECODE_MIN_SEQLEN_K = 512  # visible keys from which on splitting them pays
MIN_TILES_OF_BLOCK = 2  # tiles of keys that a block takes at least
COMBINE_TILES = 2  # to split the keys of a head costs each block as much time as this many tiles of keys
COMBINE_COLUMNS = 32  # columns of one row that a warp of helpers/split_combine.cu combines
# The block of a head that is done last combines its results if these have at most COMBINE_PIECES pieces, of one row and
# COMBINE_COLUMNS columns each, and keys and values at most COMBINE_KEY_BYTES bytes: that saves the host a launch, for
# which small problems wait. But its warps are few, so where rows or blocks of a head are many, a kernel of its own
# takes less of the device's time: on an H100 (bfloat16, 1 x 32/8 heads) 2.6 us less with 4 queries and 8192 keys, and
# 4 us less with one query and 131072 keys.
COMBINE_PIECES = 16
COMBINE_KEY_BYTES = 2**26
COMBINE_WARPS = 4
SPLIT_KEYS = 1024  # of a split that depends on its own sequence alone; by arithmetic, not measured
MAX_SPLIT_STEPS = 2**31 - 1  # of all heads: blocks count keys in steps, for each head as many as there are blocks


def rows_of(problem: Problem) -> int:
    """Queries of all query heads that share a key/value head: the rows of one product."""
    return problem.group_size * problem.mean_sequence.seqlen_q


def is_decode(problem: Problem) -> bool:
    """Whether keys are split: queries are few and keys many.

    With `batch_invariant` any number of keys will do, because other entries of the batch may have more.
    """
    heads, keys = problem.batch * problem.num_heads_kv, visible_keys(problem.mean_sequence)
    has_keys = keys >= DECODE_MIN_SEQLEN_K or problem.batch_invariant
    return heads > 0 and 0 < rows_of(problem) <= DECODE_ROWS and has_keys


def visible_keys(problem: Problem) -> int:
    """The most keys that all queries of a head attend to together."""
    start, stop = 0, problem.seqlen_k
    if problem.window_left is not None:
        start = max(start, problem.diagonal - problem.window_left)
    if problem.window_right is not None:
        stop = min(stop, problem.seqlen_q + problem.diagonal + problem.window_right)
    return max(0, stop - start)


def add_split_kernel(
    draft: Draft, source: str, tile: Tile, *, block_n: int, cluster: int = 1, combines: bool = True
) -> None:
    """Add a main kernel whose blocks take equal splits of the keys of all heads, and what combines their results.

    A block, or a cluster of blocks, takes `block_n` keys at a time. With `combines`, the last block of a head may
    combine the results; otherwise a kernel of its own always does.
    """
    problem = draft.problem
    heads, rows = problem.batch * problem.num_heads_kv, problem.group_size * problem.seqlen_q
    split_tiles = max(1, SPLIT_KEYS // tile.block_n) if problem.batch_invariant else 0
    if split_tiles:
        blocks = _blocks_of_equal_splits(problem, split_tiles * tile.block_n)
    else:
        blocks = _number_of_blocks(problem, tiles_at_once(tile, draft.device, cluster), block_n)
    draft.set(resident_blocks=blocks)
    whole_heads = heads % blocks == 0
    draft.key_splits = blocks // heads if blocks % heads == 0 else 1 if whole_heads else blocks // heads + 2
    draft.reasons.append(f"{rows} queries of the heads that share keys go through one product: keys are read once")
    dims = draft.padded_dims(tile)
    pieces = rows * max(-(-dims[1] // COMBINE_COLUMNS), 1)
    key_bytes = heads * visible_keys(problem) * sum(dims) * ITEMSIZE[problem.k.dtype]
    combines = combines and not whole_heads and pieces <= COMBINE_PIECES and key_bytes <= COMBINE_KEY_BYTES
    defines = {
        "CUFLASH_SPLITS_KEYS": int(not whole_heads),
        "CUFLASH_COMBINES": int(combines),
        "CUFLASH_SPLIT_TILES": split_tiles,
    }
    draft.add(source, tile, blocks * cluster, tile.shared_bytes(*dims), **defines)
    takers = f"{blocks} clusters of {cluster} blocks" if cluster > 1 else f"{blocks} blocks"
    if whole_heads:
        draft.reasons.append(f"{takers} take whole heads")
        return
    draft.scratch["partial_out"] = (heads + blocks) * rows * dims[1]
    draft.scratch["partial_sums"] = (heads + blocks) * rows * 2
    if combines:
        draft.scratch["arrivals"] = heads * 8 // ITEMSIZE[problem.softmax_dtype]  # words of 64 bits
    else:
        combine_blocks = -(-heads * pieces // COMBINE_WARPS)
        draft.add("helpers/split_combine.cu", tile, combine_blocks, 0, CUFLASH_NUM_WARPS=COMBINE_WARPS)
    draft.reasons.append(
        f"{takers} take "
        + (
            f"{split_tiles * tile.block_n} keys each, {draft.key_splits} those of one head: "
            if split_tiles
            else f"equal splits of the keys, up to {draft.key_splits} of them those of one head: "
        )
        + ("the last one combines their results" if combines else "another kernel combines their results")
    )


def _blocks_of_equal_splits(problem: Problem, split_keys: int) -> int:
    """The number of blocks that take so many keys each, whatever else there is.

    A head has two splits at least, because results of one are rounded otherwise than those of one and none.
    """
    heads = problem.batch * problem.num_heads_kv
    check_blocks(heads)
    keys = visible_keys(problem) + (split_keys if problem.window_left is not None else 0)  # a window begins anywhere
    blocks = heads * max(2, -(-keys // split_keys))
    if heads * blocks > MAX_SPLIT_STEPS:
        raise NotImplementedError(
            f"batch_invariant: got {heads} key/value heads of all batch entries, with splits of {split_keys} keys, "
            f"expected at most {MAX_SPLIT_STEPS // blocks}; compute fewer batch entries at a time"
        )
    return blocks


def _number_of_blocks(problem: Problem, resident: int, block_n: int) -> int:
    """The number of blocks that split all keys evenly in the least time; of equals, the smallest.

    As many blocks as are resident leave no SM idle, but they split heads, whose results must be combined.
    With a few blocks less, every head may be whole, or each may be split among the same number of blocks.
    """
    heads = problem.batch * problem.num_heads_kv
    check_blocks(heads)
    tiles_of_head = -(-visible_keys(problem) // block_n)
    num_tiles = heads * tiles_of_head
    most = max(1, min(resident, num_tiles // MIN_TILES_OF_BLOCK, MAX_SPLIT_STEPS // heads))
    candidates = {most}
    if heads <= most:
        candidates.add(most // heads * heads)
    elif heads % -(-heads // most) == 0:
        candidates.add(heads // -(-heads // most))

    def duration(blocks: int) -> int:
        return -(-num_tiles // blocks) + (COMBINE_TILES if heads % blocks else 0)

    return min(sorted(candidates), key=duration)
