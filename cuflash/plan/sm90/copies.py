"""Copies of arrays that TMA cannot read itself, and what it costs to make them."""

from __future__ import annotations

import math
from collections.abc import Collection

from cuflash.arrays.array_info import Operand
from cuflash.plan.draft import WRITTEN, Draft
from cuflash.plan.tiles import Tile, round_up
from cuflash.spec.passes import BACKWARD, FORWARD

COPIED = ("q", "k", "v", "dout")  # in the order of the bits of CUFLASH_COPIED
TANGENTS_COPIED = ("tq", "tk", "tv")  # the bits after these
COPY_WARPS = 8
# Vectors of eight columns that a block copies. Each of its threads has four of them in flight at once.
COPY_VECTORS = 4 * 32 * COPY_WARPS
# The fewest pairs of a query and a key, for each row that is copied, and in all, for which copying pays. By arithmetic:
# the sm80 kernels lose 0.1 ps (head_dim 2) to 0.6 ps (128) a pair of the forward pass, and 1.2 to 2.1 ps of the
# backward pass; a row of as many columns takes 8 to 200 ps, and a launch 2 us.
COPY_MIN_PAIRS = {FORWARD: 341, BACKWARD: 96}
COPY_MIN_PAIRS_IN_ALL = 1 << 24


def not_mapped(draft: Draft, names: Collection[str]) -> tuple[str, ...]:
    """Those of these arrays that TMA cannot read, or write, as they lie."""
    return tuple(name for name in names if draft.why_not_mapped((name,)) is not None)


def why_not_copied(draft: Draft, names: Collection[str]) -> str | None:
    """Why not to copy those of these arrays that TMA cannot read; None if that is the way to go.

    Results that it cannot write are stored row by row.
    """
    problem = draft.problem
    empty = [name for name in names if 0 in draft.arrays[name].shape]
    copied = [name for name in not_mapped(draft, names) if name not in WRITTEN]
    if empty or not copied:
        return "there is nothing to compute" if empty else None
    if problem.block_table is not None:
        return "a copy would be of all pages of the pool, whoever they belong to"
    rows = sum(math.prod(draft.arrays[name].shape[:3]) for name in copied)
    fewest = max(COPY_MIN_PAIRS[draft.pass_] * rows, COPY_MIN_PAIRS_IN_ALL)
    if problem.visible_pairs < fewest:
        return f"for fewer than {fewest} pairs of queries and keys, copies take too long"
    return None


def add_copies(draft: Draft, tile: Tile, names: Collection[str]) -> None:
    """Have those of these arrays copied that TMA cannot read, and results stored row by row that it cannot write."""
    unmapped = not_mapped(draft, names)
    copied = [name for name in unmapped if name not in WRITTEN]
    if copied:
        draft.reasons.append(
            f"{_listed(copied)}: copied to rows that begin at multiples of 16 bytes: {draft.why_not_mapped(copied)}"
        )
        add_copying_kernel(draft, tile, "helpers/copy_rows.cu", copied, draft.problem.dtype)
    results = [name for name in unmapped if name in WRITTEN]
    if results:
        draft.defines["CUFLASH_STORES_BY_ROWS"] = 1
        draft.reasons.append(f"{_listed(results)}: stored row by row: {draft.why_not_mapped(results)}")


def add_copying_kernel(
    draft: Draft,
    tile: Tile,
    source: str,
    names: Collection[str],
    dtype: str,
    bf16_terms: int = 1,
    tangents: Collection[str] = (),
) -> None:
    """Add a kernel that makes scratch arrays of these, which tensor maps then describe: kernels/common/io/copies.cuh.

    The copy of the array `name` is `name_copy`, with the bf16 terms of all batch entries along its first axis, and
    after them those of its tangent if `tangents` has this.
    """
    widths = {name: round_up(draft.arrays[name].shape[3], 8) for name in names}
    # Blocks have more rows where these are narrow, so that they have as much to do as with wide ones.
    block_m = max(64, COPY_VECTORS * 8 // max(widths.values()) // 64 * 64)
    blocks = 0
    for name, width in widths.items():
        batch, heads, seqlen, columns = draft.arrays[name].shape
        copied = 1 + (f"t{name}" in tangents)
        terms = bf16_terms * copied
        draft.copies[name] = Operand(
            shape=(terms * batch, heads, seqlen, columns),
            strides=(heads * seqlen * width, seqlen * width, width, 1),
            dtype=dtype,
        )
        draft.scratch[f"{name}_copy"] = terms * batch * heads * seqlen * width // 2
        blocks += copied * batch * heads * -(-seqlen // block_m)
    bits = sum(1 << (*COPIED, *TANGENTS_COPIED).index(name) for name in (*names, *tangents))
    options = {"CUFLASH_BLOCK_M": block_m, "CUFLASH_NUM_WARPS": COPY_WARPS, "CUFLASH_COPIED": bits}
    draft.add(source, tile, blocks, 0, **options)


def _listed(names: Collection[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
