"""float32 for compute capability 9.0: operands are split into bf16 terms, whose products tensor cores make."""

from __future__ import annotations

from cuflash.plan.draft import Draft
from cuflash.plan.families import ANY_CALL
from cuflash.plan.sm90.copies import add_copying_kernel
from cuflash.plan.sm90.scored import bias_by
from cuflash.plan.sm90.tiles import (
    BackwardFloat32Sm90Tile,
    BackwardJvpFloat32Sm90Tile,
    BackwardJvpFloat32WideSm90Tile,
    BiasSm90Tile,
    ForwardFloat32Sm90Tile,
    JvpFloat32Sm90Tile,
    JvpFloat32WideSm90Tile,
)
from cuflash.plan.tiles import Tile, why_too_wide
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP

SplitTile = (
    ForwardFloat32Sm90Tile
    | BackwardFloat32Sm90Tile
    | BiasSm90Tile
    | JvpFloat32Sm90Tile
    | JvpFloat32WideSm90Tile
    | BackwardJvpFloat32Sm90Tile
    | BackwardJvpFloat32WideSm90Tile
)

# The fewest pairs of a query and a key, for each row that is split, for which splitting pays. On an H200 it catches up
# with the sm80 kernels at seqlen 192 in the forward pass (head_dim 64; sooner at 128), and is ahead of them from seqlen
# 128 on in the backward pass. jvp takes 1.61 ms in place of 1.57 at seqlen 192, 1.62 in place of 2.10 at 256.
# backward_jvp has the number of jvp, by arithmetic: not measured.
SPLIT_MIN_PAIRS = {FORWARD: 64, BACKWARD: 42, JVP: 64, BACKWARD_JVP: 64}


def why_not_split(draft: Draft, table: tuple[Tile, ...]) -> str | None:
    """Why not to split float32 into bf16 terms: None if that is the way to go, "" if the plan need not tell."""
    problem = draft.problem
    if draft.device.arch != 90 or problem.dtype != "float32":
        return ""
    if problem.block_table is not None:
        return "it would split all pages of the pool, whoever they belong to"
    if problem.counts_as_packed:
        return f"it knows no packed sequences{'' if problem.is_packed else ANY_CALL}"
    if too_wide := why_too_wide(problem, table):
        return too_wide
    rows = problem.num_heads * problem.seqlen_q + 2 * problem.num_heads_kv * problem.seqlen_k
    keys = problem.seqlen_k
    if problem.window_left is not None and problem.window_right is not None:
        keys = min(keys, max(0, problem.window_left + problem.window_right + 1))
    fewest = SPLIT_MIN_PAIRS[draft.pass_]
    if problem.num_heads * problem.seqlen_q * keys < fewest * max(rows, 1):
        return f"for fewer than {fewest} scores to each row of q, k and v, splitting these takes too long"
    return "there is nothing to compute" if problem.batch == 0 else None


def note_bias_lookup(draft: Draft, tile: ForwardFloat32Sm90Tile | BackwardFloat32Sm90Tile) -> None:
    """Say why the pairs of a bias are looked up one by one, where they are."""
    loaded_by = bias_by(draft.problem)
    if loaded_by == "elements":
        draft.reasons.append("bias: looked up pair by pair: TMA cannot read tiles of it")
    elif loaded_by == "pairs" and not tile.bias_of_pairs:
        draft.reasons.append("bias: looked up pair by pair: no tile of it fits into shared memory")


def add_bf16_split(draft: Draft, tile: SplitTile, names: tuple[str, ...], tangents: tuple[str, ...] = ()) -> None:
    """Add the kernel that splits these float32 arrays into scratch arrays of bfloat16, which tensor maps describe.

    The terms of the tangents that there are of these follow them.
    """
    add_copying_kernel(draft, tile, "helpers/split_fp32.cu", names, "bfloat16", tile.bf16_terms, tangents)
    describe_split(draft, tile, (*names, *tangents))


def describe_split(draft: Draft, tile: SplitTile, names: tuple[str, ...], when: str = "") -> None:
    """Say which arrays are split into how many terms, and which products of these count."""
    listed = ", ".join(names[:-1]) + " and " + names[-1]
    draft.reasons.append(
        f"{listed} are split into {tile.bf16_terms} bf16 terms{when}: "
        + (
            "the six largest products of terms count"
            if tile.bf16_terms == 3
            else "the three largest products of terms count, which are more accurate than one of TF32"
        )
    )
