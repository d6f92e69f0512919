"""Tiles that masks and biases hide: kernels that find them, and what main kernels then leave out.

Most main kernels iterate over a block-sparse index: by tile of queries its visible tiles of keys, or by tile of keys
its visible tiles of queries (`add_block_index`). Decode reads tile classes instead (`add_tile_classes`), and kernels of
the gradients of scores those of a bias (`add_bias_tile_classes`). To find hidden tiles takes kernels of its own, which
pays for large problems only: elsewhere the main kernel computes these tiles, and the plan says why.
"""

from __future__ import annotations

import math
from typing import Literal

from cuflash.arrays.array_info import ITEMSIZE, Operand
from cuflash.plan.draft import Draft
from cuflash.plan.tiles import Tile, round_up

VECTOR_OF_MASK = 16  # keys that are read at once
INDEX_WARPS = 4  # warps of a block that makes the block-sparse index; each makes one row
INDEX_HEADER = 2  # integers in front of a row of the index
# Tiles with rows in a block-sparse index are put in order by one block of ORDER_WARPS warps, where there are at least
# ORDERED_WAVES for each block of the main kernel. The last SORTED_WAVES start in the order of their lengths.
ORDERED_WAVES, MOST_ORDERED, SORTED_WAVES, ORDER_WARPS, ORDER_BUCKETS = 2, 1 << 14, 3, 32, 32
# A kernel looks at a mask beforehand where the forward pass has at least this many operations: by arithmetic, they take
# a few times as long as two small kernels. Otherwise the main kernel reads the mask for each head, pair by pair.
LOOK_FLOPS = 1 << 31
# A mask of keys, as per-key values, costs only an instruction a score. So a look at it can only gain whole
# tiles, and the index replaces bounds that differ within a tile. It is looked at from this many keys on, where
# nothing else bounds tiles.
LOOK_KEYS = 2048
# A look at a bias that hides no tile gains nothing, and costs two small kernels and a launch. A bias is looked at where
# the forward pass has at least this many operations, 0.7 ms at 400 TFLOP/s: on an H100 the look makes such a pass 0.7
# to 2 % longer.
LOOK_BIAS_FLOPS = 1 << 38
# Tiles of a bias are counted in 32 bits, and have at least 256 pairs. Only expanded or overlapping views have more.
MOST_BIAS_PAIRS = 1 << 40
BIAS_HEADER_BYTES = 16  # in front of the tile classes of a bias: BiasBlocks of kernels/common/score/mask.cuh
# Lanes of a warp that look at one tile of a bias. So a warp has few tiles, since it looks at hidden ones one by one.
BIAS_LANES = 8
COUNTED_BY_DQ = "the order of dq counts them"  # why tiles that a mask hides are computed

IndexName = Literal["key_index", "query_index"]  # visible tiles of keys by tile of queries, or the transpose


# ---- the block-sparse index ------------------------------------------------------------------------------------------


def add_block_index(draft: Draft, tile: Tile, name: IndexName, *, why_not_for_bias: str | None = None) -> None:
    """With masks, or a bias, that hide tiles, add the kernel that makes the block-sparse index.

    `why_not_for_bias` says why the main kernel has no index for a bias alone. If it has one, it is launched twice, with
    and without it, and one of the two returns at once: a bias may hide nothing, and iterating over the block-sparse
    index takes time.
    """
    problem, of_keys = draft.problem, name == "key_index"
    _index_mask(draft, tile)
    looks_at_bias, has_index = _looks_at_bias(draft, why_not_for_bias), bool(draft.defines["CUFLASH_HAS_BLOCK_INDEX"])
    draft.chosen_by_bias = looks_at_bias and not has_index
    if not has_index and not looks_at_bias:
        _say_why_mask_is_computed(draft, tile)
        return
    m_blocks, n_blocks = -(-problem.seqlen_q // tile.block_m), -(-problem.seqlen_k // tile.block_n)
    rows, length = (m_blocks, n_blocks) if of_keys else (n_blocks, m_blocks)
    num_masks = _set_num_masks(draft, looks_at_bias)
    rows *= draft.run_time.index_batches * draft.run_time.index_heads if draft.heads else 0
    elements = -(-rows * (INDEX_HEADER + length) * ITEMSIZE["int32"] // ITEMSIZE[problem.softmax_dtype])
    draft.scratch[name] = round_up(elements, 4)
    if problem.mask_function is not None or (problem.mask is not None and not _has_mask_bits(draft)):
        _add_mask_tiles(draft, tile, num_masks * m_blocks * n_blocks)
    if looks_at_bias:
        _add_bias_tiles(draft, tile)
    options = {"CUFLASH_INDEXES_KEYS": int(of_keys), "CUFLASH_HAS_BIAS_TILE_CLASSES": int(looks_at_bias)}
    options |= {"CUFLASH_HAS_BLOCK_INDEX": 1, "CUFLASH_CHOSEN_BY_BIAS": int(draft.chosen_by_bias)}
    options |= {"CUFLASH_NUM_WARPS": INDEX_WARPS, "CUFLASH_MIN_BLOCKS": 1}
    draft.add("helpers/block_index.cu", tile, -(-rows // INDEX_WARPS), 0, **options)
    draft.reasons.append(
        f"{' and '.join(_hiding(draft, looks_at_bias))}: block-sparse index of tiles of "
        f"{'keys' if of_keys else 'queries'}, {tile.block_m} queries x {tile.block_n} keys each; hidden ones are "
        "neither loaded nor computed"
        + (", unless they are so few that the kernel without index takes less time" if draft.chosen_by_bias else "")
    )


def always_indexed(draft: Draft) -> bool:
    """Whether the main kernel iterates over a block-sparse index, whatever a bias hides."""
    return bool(draft.defines["CUFLASH_HAS_BLOCK_INDEX"]) and not draft.chosen_by_bias


def add_tile_order(draft: Draft, tile: Tile, name: IndexName) -> bool:
    """Add the kernel that puts tiles in the order of their rows in this block-sparse index, the longest first.

    Returns whether there is such an index, and not too many tiles for one block.
    """
    problem, of_keys = draft.problem, name == "key_index"
    rows, seqlen = (tile.block_m, problem.seqlen_q) if of_keys else (tile.block_n, problem.seqlen_k)
    tiles = problem.array_batch * (problem.num_heads if of_keys else problem.num_heads_kv) * -(-seqlen // rows)
    blocks = draft.device.num_sms * tile.min_blocks
    if not always_indexed(draft) or not ORDERED_WAVES * blocks <= tiles <= MOST_ORDERED:
        return False
    draft.defines["CUFLASH_HAS_TILE_ORDER"] = 1
    elements = -(-(tiles + 1) * ITEMSIZE["int32"] // ITEMSIZE[problem.softmax_dtype])
    draft.scratch[name] += round_up(elements, 4)
    options = {
        "CUFLASH_INDEXES_KEYS": int(of_keys),
        "CUFLASH_BLOCKS_AT_ONCE": blocks,
        "CUFLASH_TILES_SORTED_LAST": SORTED_WAVES * blocks,
        "CUFLASH_MOST_TILES": MOST_ORDERED,
        "CUFLASH_NUM_WARPS": ORDER_WARPS,
        "CUFLASH_MIN_BLOCKS": 1,
    }
    shared_bytes = (MOST_ORDERED + ORDER_BUCKETS * (ORDER_WARPS + 1) + ORDER_WARPS) * ITEMSIZE["int32"]
    draft.add("helpers/tile_order.cu", tile, 1, shared_bytes, **options)
    owned = "queries" if of_keys else "keys"
    draft.reasons.append(f"tiles of {owned} start in the order of the lengths of their rows, where these differ much")
    return True


# ---- tile classes ----------------------------------------------------------------------------------------------------


def add_tile_classes(draft: Draft, tile: Tile) -> None:
    """Add tile classes (empty, partial, full) of a mask or mask_mod: for main kernels without block-sparse index.

    Such a kernel finds the tiles that a block mask hides by itself.
    """
    problem = draft.problem
    draft.defines["CUFLASH_HAS_BLOCK_INDEX"] = 0
    num_masks = _set_num_masks(draft)
    looks = problem.mask is not None and _why_mask_is_not_looked_at(draft, tile) is None
    _say_why_mask_is_computed(draft, tile)
    if problem.mask_function is not None or looks:
        draft.defines["CUFLASH_HAS_TILE_CLASSES"] = 1
        tiles = -(-problem.seqlen_q // tile.block_m) * -(-problem.seqlen_k // tile.block_n)
        _add_mask_tiles(draft, tile, num_masks * tiles)
        draft.reasons.append(f"mask: a kernel classifies tiles of {tile.block_n} keys as empty, partial or full")
    if problem.mask_function is not None or looks or problem.block_mask is not None:
        draft.reasons.append(f"tiles of {tile.block_n} keys that no query attends to are not loaded")


def add_bias_tile_classes(draft: Draft, tile: Tile) -> dict[str, int]:
    """Add the tile classes of the bias, for a kernel of gradients without block-sparse index.

    Returns the macros that this kernel is to be compiled with.
    """
    looks = _bias_may_hide_tiles(draft) and _why_bias_is_not_looked_at(draft) is None
    if looks:
        _add_bias_tiles(draft, tile)
        note = f"bias: which tiles of {tile.block_m} queries x {tile.block_n} keys it hides is found by a kernel"
        draft.reasons += [note] if note not in draft.reasons else []
    return {"CUFLASH_HAS_BIAS_TILE_CLASSES": int(looks)}


def may_leave_out_tiles(draft: Draft) -> bool:
    """Whether main kernels may leave out tiles of pairs, because no pair of them is visible."""
    names = ("mask", "mask_function", "block_mask", "kv_lengths", "window_left", "window_right")
    hides = any(getattr(draft.problem, name) is not None for name in names)
    return hides or (_bias_may_hide_tiles(draft) and _why_bias_is_not_looked_at(draft) is None)


def _add_mask_tiles(draft: Draft, tile: Tile, tiles: int) -> None:
    """Add the kernel that classifies `tiles` tiles of a mask: empty, partial or full."""
    elements = -(-tiles // ITEMSIZE[draft.problem.softmax_dtype])
    draft.scratch["mask_blocks"] = max(draft.scratch.get("mask_blocks", 0), elements)
    lanes = _lanes_of_tile(draft, tile)
    warps = {"CUFLASH_NUM_WARPS": INDEX_WARPS, "CUFLASH_MIN_BLOCKS": 1, "CUFLASH_LANES_OF_TILE": lanes}
    draft.add("helpers/mask_tiles.cu", tile, -(-tiles * lanes // (32 * INDEX_WARPS)), 0, **warps)


def _add_bias_tiles(draft: Draft, tile: Tile) -> None:
    """Add the kernel that classifies tiles of the bias, unless it was added for tiles of this size.

    It classifies tiles of all keys of the arrays, so that batch entries of different lengths share the classes.
    """
    problem, size = draft.problem, (tile.block_m, tile.block_n)
    if draft.bias_class_tile == size:
        return
    draft.bias_class_tile = size
    tiles = -(-problem.seqlen_q // tile.block_m) * -(-problem.seqlen_k // tile.block_n)
    tiles *= math.prod(_num_biases(draft)) if draft.heads else 0
    elements = -(-(BIAS_HEADER_BYTES + tiles) // ITEMSIZE[problem.softmax_dtype])
    draft.scratch["bias_blocks"] = max(draft.scratch.get("bias_blocks", 0), elements)
    options = {"CUFLASH_NUM_WARPS": INDEX_WARPS, "CUFLASH_MIN_BLOCKS": 1, "CUFLASH_LANES_OF_TILE": BIAS_LANES}
    options["CUFLASH_KV_LENGTHS_BYTES"] = 0
    blocks = -(-tiles * BIAS_LANES // (32 * INDEX_WARPS))
    draft.add("helpers/mask_tiles.cu", tile, blocks, 0, (), ("bias",), **options)


def _lanes_of_tile(draft: Draft, tile: Tile) -> int:
    """How many lanes of a warp look at a tile: one for each vector, rounded up to a power of two, and at most 32.

    Only decode differs in this, so that kernels for all lengths are compiled a few times.
    """
    problem = draft.problem
    if problem.mask is None or problem.mask_function is not None:
        return 32  # a warp bounds a function over a tile
    rows = 1 if problem.mask.strides[2] == 0 else min(tile.block_m, problem.seqlen_q)
    vectors = max(1, rows * tile.block_n // VECTOR_OF_MASK)
    return int(min(32, 1 << (vectors - 1).bit_length()))


# ---- how many masks there are ----------------------------------------------------------------------------------------


def num_masks_of(draft: Draft, *masks: Operand | None) -> tuple[int, int]:
    """How many batch entries, and how many heads, have masks of their own, if these are the masks."""
    strides = [mask.strides for mask in masks if mask is not None]
    by_batch = draft.problem.kv_lengths is not None or any(of_batch for of_batch, *_ in strides)
    by_head = any(of_head for _, of_head, *_ in strides)
    return draft.problem.batch if by_batch else 1, draft.problem.num_heads if by_head else 1


def _set_num_masks(draft: Draft, looks_at_bias: bool = False) -> int:
    """Set how many batch entries and heads have their own rows of the index, and their own tile classes.

    Returns how many masks are classified in all.
    """
    problem, function = draft.problem, draft.problem.mask_function
    batches, heads = num_masks_of(draft, problem.block_mask, problem.mask)
    if function is not None and function.depends_on("batch"):
        batches = problem.batch
    if function is not None and function.depends_on("head"):
        heads = problem.num_heads
    bias_batches, bias_heads = _num_biases(draft) if looks_at_bias else (1, 1)
    draft.set(mask_batches=batches, mask_heads=heads)
    draft.set(index_batches=max(batches, bias_batches), index_heads=max(heads, bias_heads))
    return batches * heads if draft.heads else 0


def _num_biases(draft: Draft) -> tuple[int, int]:
    """How many batch entries, and how many heads, have a bias of their own."""
    problem, bias = draft.problem, draft.problem.bias
    of_batch, of_head, *_ = (0, 0) if bias is None else bias.strides
    return problem.batch if of_batch else 1, problem.num_heads if of_head else 1


# ---- whether it pays to look -----------------------------------------------------------------------------------------


def _has_mask_bits(draft: Draft) -> bool:
    """Whether a kernel packs the mask into bits, and classifies its tiles."""
    return "mask_words" in draft.scratch


def _index_mask(draft: Draft, tile: Tile) -> None:
    """Let the index hold the tiles of a mask if it pays to look at them."""
    has_index = draft.defines["CUFLASH_HAS_BLOCK_INDEX"] or _has_mask_bits(draft)
    if draft.problem.mask is not None and not has_index:
        draft.defines["CUFLASH_HAS_BLOCK_INDEX"] = int(_why_mask_is_not_looked_at(draft, tile) is None)


def _looks_at_bias(draft: Draft, why_not_for_bias: str | None) -> bool:
    """Whether the index leaves out the tiles that a bias hides. If it might and does not, the plan says why."""
    if not _bias_may_hide_tiles(draft):
        return False
    why_not = _why_bias_is_not_indexed(draft, why_not_for_bias)
    if why_not is not None:
        _say_computed(draft, "bias", why_not)
    return why_not is None


def _why_mask_is_not_looked_at(draft: Draft, tile: Tile) -> str | None:
    """Why no kernel looks beforehand at what a mask leaves of tiles; None if one does."""
    problem = draft.problem
    if draft.defines.get("CUFLASH_DQ_IN_ORDER"):
        return COUNTED_BY_DQ
    if problem.forward_flops < LOOK_FLOPS:
        return f"a look at it beforehand pays from {LOOK_FLOPS / 1e9:.3g} GFLOP on"
    has_bounds = (problem.window_left, problem.window_right) != (None, None)
    if tile.defines().get("CUFLASH_MASK_OF_KEYS") and (has_bounds or problem.seqlen_k < LOOK_KEYS):
        return f"a mask of keys is looked at beforehand from {LOOK_KEYS} keys on, without causal and window"
    return None


def _bias_may_hide_tiles(draft: Draft) -> bool:
    """Whether there is a per-pair bias, which may have tiles of -inf."""
    bias = draft.problem.bias
    return bias is not None and 0 not in bias.strides[2:]


def _why_bias_is_not_indexed(draft: Draft, why_not_for_bias: str | None) -> str | None:
    """Why the index has tiles that a per-pair bias hides; None if it has none of them."""
    if (why_not := _why_bias_is_not_looked_at(draft)) is not None:
        return why_not
    if draft.defines.get("CUFLASH_DQ_IN_ORDER"):
        return COUNTED_BY_DQ
    return None if draft.defines["CUFLASH_HAS_BLOCK_INDEX"] else why_not_for_bias


def _why_bias_is_not_looked_at(draft: Draft) -> str | None:
    """Why no kernel finds out which tiles a per-pair bias hides; None if one does."""
    problem = draft.problem
    if problem.page_size:
        return "with pages each entry has bounds of its own"
    if problem.forward_flops < LOOK_BIAS_FLOPS:
        return f"a look at it beforehand pays from {LOOK_BIAS_FLOPS / 1e9:.3g} GFLOP on"
    if math.prod(_num_biases(draft)) * problem.seqlen_q * problem.seqlen_k >= MOST_BIAS_PAIRS:
        return f"it has {MOST_BIAS_PAIRS} pairs or more, whose tiles are too many to count"
    return None


# ---- what the plan says ----------------------------------------------------------------------------------------------


def _hiding(draft: Draft, looks_at_bias: bool) -> list[str]:
    """What hides the tiles that the index leaves out."""
    problem = draft.problem
    has_mask = problem.mask is not None or problem.mask_function is not None
    hiding = {
        "mask": has_mask,
        "block_mask": problem.block_mask is not None and not has_mask,
        "bias": looks_at_bias,
    }
    return [name for name, hides in hiding.items() if hides]


def _say_why_mask_is_computed(draft: Draft, tile: Tile) -> None:
    """Say why tiles that a mask hides are computed, if there is a mask and they are."""
    if draft.problem.mask is not None and (why_not := _why_mask_is_not_looked_at(draft, tile)) is not None:
        _say_computed(draft, "mask", why_not)


def _say_computed(draft: Draft, name: str, why_not: str) -> None:
    """Say why tiles that a mask or a bias hides are computed, once for each plan."""
    if not any(reason.startswith(f"{name}: tiles") for reason in draft.reasons):
        draft.reasons.append(f"{name}: tiles that it hides are computed: {why_not}")
