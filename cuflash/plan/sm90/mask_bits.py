"""Masks of pairs as bits, packed by a kernel before those of compute capability 9.0 that read them by tile."""

from __future__ import annotations

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan.block_index import COUNTED_BY_DQ, num_masks_of
from cuflash.plan.draft import Draft
from cuflash.plan.sm90.scored import BITS_BLOCK, ScoredTile

WARPS = 4  # of a block of the kernel that packs; each takes one block of the mask at a time
BLOCK_BYTES = BITS_BLOCK * BITS_BLOCK // 8


def add_mask_bits(draft: Draft, tile: ScoredTile, *, transposed: bool) -> None:
    """Add the kernel that packs all that hides pairs into bits.

    The bits are in the order of accumulators whose lines are queries or, `transposed`, keys.
    """
    problem = draft.problem
    batches, heads = num_masks_of(draft, problem.block_mask, problem.mask)
    draft.set(index_batches=batches, index_heads=heads, mask_batches=batches, mask_heads=heads)
    # Where blocks add to dq in order, their turns count the tiles that the index would leave out.
    draft.defines["CUFLASH_HAS_BLOCK_INDEX"] = int(not draft.defines.get("CUFLASH_DQ_IN_ORDER"))
    blocks = batches * heads if draft.heads else 0
    for seqlen, rows in ((problem.seqlen_q, tile.block_m), (problem.seqlen_k, tile.block_n)):
        blocks *= -(-seqlen // rows) * rows // BITS_BLOCK
    itemsize = ITEMSIZE[problem.softmax_dtype]
    draft.scratch["mask_words"] = blocks * BLOCK_BYTES // itemsize
    draft.scratch["mask_blocks"] = -(-blocks // itemsize)
    warps = {"CUFLASH_NUM_WARPS": WARPS, "CUFLASH_MIN_BLOCKS": 1, "CUFLASH_TRANSPOSES_BITS": int(transposed)}
    draft.add("helpers/mask_bits.cu", tile, -(-blocks // WARPS), 0, **warps)
    draft.reasons.append("pairs that are hidden one by one are packed beforehand, a bit each")
    if not draft.defines["CUFLASH_HAS_BLOCK_INDEX"]:
        draft.reasons.append(f"mask: tiles that it hides are computed: {COUNTED_BY_DQ}")
