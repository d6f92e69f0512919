"""The forward pass on compute capability 9.0: 16-bit operands as they are, float32 as bf16 terms."""

from __future__ import annotations

import math

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan.block_index import add_block_index, add_tile_order, always_indexed
from cuflash.plan.draft import CAUSAL_HEAD_SECTION, Draft, check_blocks
from cuflash.plan.families import ForwardFamily
from cuflash.plan.sm80.narrow import is_narrow
from cuflash.plan.sm80.tiles import FORWARD_TILES
from cuflash.plan.sm90.bf16_split import add_bf16_split, describe_split, note_bias_lookup, why_not_split
from cuflash.plan.sm90.copies import add_copies, why_not_copied
from cuflash.plan.sm90.mask_bits import add_mask_bits
from cuflash.plan.sm90.scored import CLAIMED_WAVES, ScoredTile, claimed_waves, takes_pairs
from cuflash.plan.sm90.tiles import (
    FORWARD_FLOAT8_SM90_TILES,
    FORWARD_FLOAT32_SM90_TILES,
    FORWARD_SM90_TILES,
    FORWARD_TF32_SM90_TILES,
    ForwardFloat8Sm90Tile,
    ForwardFloat32Sm90Tile,
    ForwardSm90Tile,
)
from cuflash.plan.sm90.wide_tiles import FORWARD_WIDE_SM90_TILES, ForwardWideSm90Tile
from cuflash.plan.tiles import Tile, exceeds, why_too_wide
from cuflash.spec.inputs import PAIR_OPTIONS
from cuflash.spec.outputs import ROW_REDUCTIONS
from cuflash.spec.problem import Problem

MOST_ENTRIES_TOGETHER = 8  # batch entries that share a bias and are neighbours in launch order
# Blocks that take one tile in place of a pair are 2 % slower (691 and 675 TFLOP/s on an H100, with pairs and without).
# By arithmetic, up to this many blocks for each resident one, it gains more that the last ones end half a pair sooner.
DIVIDED_WAVES = 16
# Where at most FEW_READERS tiles of queries read the same keys, of at most SPLIT_MAX_DIM columns, blocks split float32
# themselves. On an H100 they take 449 us where an earlier kernel takes 196 and the products after it 426 (head_dim 32,
# 3 tiles), and 417 us in place of 89 and 357 (8 tiles), but 779 in place of 90 and 678 (16 tiles). With head_dim 64 the
# same tiles have twice as much to split: 1203 us in place of 360 and 716 (4 tiles), 601 in place of 94 and 281 (8
# tiles). The tiles of two terms have more keys, and no registers left for it.
FEW_READERS, SPLIT_MAX_DIM = 8, 32
_SPLIT = ("q", "k", "v")  # of float32
MAPPED = ("q", "k", "v", "out")  # arrays that TMA reads or writes
MAPPED_WITHOUT_VALUES = ("q", "k")


class Forward(ForwardFamily[ForwardSm90Tile]):
    """Half precision."""

    kernel = "sm90/forward"
    row_reductions = ROW_REDUCTIONS
    has_functions = True
    model = "queries"
    serves_no_values = True

    def table(self, problem: Problem) -> tuple[ForwardSm90Tile, ...]:
        return tuple(tile.configured(problem) for tile in FORWARD_SM90_TILES)

    def alternatives(self, problem: Problem) -> tuple[Tile, ...]:
        return (*FORWARD_SM90_TILES, *FORWARD_TILES)

    def why_not(self, draft: Draft) -> str | None:
        return why_not_16_bit(draft, _mapped(draft), FORWARD_SM90_TILES, copies=True)

    def draft(self, draft: Draft, tile: ForwardSm90Tile) -> None:
        tile = tile.configured(draft.problem)
        draft.tiles = (tile,)
        mapped = _mapped(draft)
        add_copies(draft, tile, mapped)
        if tile.mask_by_bits:
            add_mask_bits(draft, tile, transposed=False)
        add_block_index(draft, tile, "key_index")
        box = box_rows(draft.problem, tile.block_n)
        boxes = {"q": tile.block_m, "k": box, "v": box, "out": 64}
        stored = draft.defines["CUFLASH_STORES_BY_ROWS"]
        boxes = {name: boxes[name] for name in mapped if name != "out" or not stored}
        bias = {"bias": tile.block_m} if tile.bias_of_pairs else {}
        draft.map_tensors(boxes | bias)
        batch_first = _shares_bias(draft.problem, tile)
        claimed_heads = 0 if batch_first else _claimed_heads(draft, tile)
        is_ordered = claimed_heads > 0 and add_tile_order(draft, tile, "key_index")
        add_persistent(
            draft, tile, self.source, batch_first=batch_first, claimed_heads=claimed_heads, is_ordered=is_ordered
        )


def _claimed_heads(draft: Draft, tile: ForwardSm90Tile) -> int:
    """Of how many heads blocks claim the longest tiles first; 0: each block knows its tiles from the start.

    So few that the tiles of these heads, and of those that are left at the end, are CLAIMED_WAVES for each block. If
    only a block-sparse index says which tiles are long, they are those that are side by side anyway.
    """
    waves = claimed_waves(draft.problem, draft.device, tile, are_listed=always_indexed(draft))
    if waves == 0:
        return 0
    if not takes_pairs(draft.problem):
        return draft.run_time.head_section
    fewest = math.ceil(draft.heads * CLAIMED_WAVES / waves)
    enough = (heads for heads in range(fewest, draft.heads) if not 0 < draft.heads % heads < fewest)
    return next(enough, draft.heads)


def _mapped(draft: Draft) -> tuple[str, ...]:
    """The arrays of a problem that TMA reads or writes."""
    return MAPPED if draft.problem.head_dim_v else MAPPED_WITHOUT_VALUES


class ForwardFloat32(ForwardFamily[ForwardFloat32Sm90Tile]):
    """float32, of operands as bf16 terms."""

    kernel = "sm90/forward_fp32"
    rows = FORWARD_FLOAT32_SM90_TILES
    tf32_rows = FORWARD_TF32_SM90_TILES
    row_reductions = ROW_REDUCTIONS
    serves_no_values = True

    def why_not(self, draft: Draft) -> str | None:
        if draft.device.arch == 90 and is_narrow(draft.problem) and not draft.problem.row_reductions:
            return "tensor cores would multiply 16 columns, most of them zeros"
        return why_not_split(draft, self.table(draft.problem))

    def draft(self, draft: Draft, tile: ForwardFloat32Sm90Tile) -> None:
        tile = tile.loading_bias(draft.problem, draft.device)
        readers = draft.problem.group_size * draft.tiles_of(draft.problem.seqlen_q, tile.block_m)
        has_few_columns = max(draft.problem.head_dim, draft.problem.head_dim_v) <= SPLIT_MAX_DIM
        has_registers = tile.block_m == 128 and tile.bf16_terms == 3
        tile = tile.changed(splits_operands=readers <= FEW_READERS and has_few_columns and has_registers)
        draft.tiles = (tile,)
        add_block_index(draft, tile, "key_index")
        split = tuple(name for name in _SPLIT if name in _mapped(draft))
        boxes: dict[str, int] = {}
        if tile.splits_operands:
            describe_split(draft, tile, split, " as they are loaded")
        else:
            add_bf16_split(draft, tile, split)
            boxes = {name: tile.block_m if name == "q" else tile.block_n for name in split}
        draft.map_tensors(boxes | ({"bias": tile.block_m} if tile.bias_of_pairs else {}))
        note_bias_lookup(draft, tile)
        add_persistent(draft, tile, self.source, batch_first=_shares_bias(draft.problem, tile))


class ForwardFloat8(ForwardFamily[ForwardFloat8Sm90Tile]):
    """Products in fp8."""

    kernel = "sm90/forward_float8"
    multiplies_float8 = True
    rows = FORWARD_FLOAT8_SM90_TILES
    unknown = (*(name for name in PAIR_OPTIONS if name != "block_mask"), "dropout", "packed sequences")

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        if not problem.multiplies_float8:
            return ""
        if draft.device.arch != 90:
            return "fp8 products need compute capability 9.0"
        why_not = draft.why_not_mapped(("q", "k", "v"))
        if why_not is not None:
            return f"{why_not}, which TMA cannot serve"
        if unknown := self.why_unknown(problem):
            return unknown
        if problem.head_dim_v % 8:
            return f"a row of out has {problem.head_dim_v} elements, not a multiple of 8"
        if too_wide := why_too_wide(problem, FORWARD_FLOAT8_SM90_TILES):
            return too_wide
        for name in ("k_scale", "v_scale"):
            block = problem.scale_block(name)
            if block % min(row.block_n for row in FORWARD_FLOAT8_SM90_TILES):
                return f"it knows no {name} of {block} keys each, but of heads and of multiples of 64 keys"
        return None

    def draft(self, draft: Draft, tile: ForwardFloat8Sm90Tile) -> None:
        add_block_index(draft, tile, "key_index")
        box = box_rows(draft.problem, tile.block_n)
        draft.map_tensors({"q": tile.block_m, "k": box, "v": box})
        draft.reasons.append("sums of each tile of keys are added in float32, since tensor cores keep 14 bits of them")
        add_persistent(draft, tile, self.source)


class ForwardWide(ForwardFamily[ForwardWideSm90Tile]):
    """Wide heads of half precision."""

    kernel = "sm90/forward_wide"
    row_reductions = ROW_REDUCTIONS
    rows = FORWARD_WIDE_SM90_TILES
    unknown = ("packed sequences", "pages")

    def alternatives(self, problem: Problem) -> tuple[Tile, ...]:
        return (*FORWARD_WIDE_SM90_TILES, *FORWARD_TILES)

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        if not exceeds(problem, FORWARD_SM90_TILES):
            return ""
        if unknown := self.why_unknown(problem):
            return unknown
        return why_not_16_bit(draft, MAPPED, FORWARD_WIDE_SM90_TILES, copies=True)

    def draft(self, draft: Draft, tile: ForwardWideSm90Tile) -> None:
        add_copies(draft, tile, MAPPED)
        add_block_index(
            draft,
            tile,
            "key_index",
            why_not_for_bias="a block-sparse index next to it takes more registers than there are",
        )
        box = tile.block_n // tile.cluster
        draft.map_tensors({"q": 64, "k": box, "v": box})
        add_persistent(draft, tile, self.source)


def why_not_16_bit(
    draft: Draft, mapped: tuple[str, ...], table: tuple[Tile, ...], *, copies: bool = False
) -> str | None:
    """Why kernels of 16-bit operands, which read and write these arrays by TMA, do not serve a problem.

    With `copies`, they may read copies of these arrays, and store results row by row.
    """
    problem = draft.problem
    if draft.device.arch != 90 or ITEMSIZE[problem.dtype] != 2:
        return ""
    if (not_mapped := draft.why_not_mapped(mapped)) is not None:
        not_copied = why_not_copied(draft, mapped) if copies else ""
        if not_copied is not None:
            return f"{not_mapped}, which TMA cannot serve" + (f"; {not_copied}" if not_copied else "")
    return why_too_wide(problem, table)


def box_rows(problem: Problem, block_n: int) -> int:
    """Keys in one box of TMA: a tile or, with pages, the most that divide both a page and a tile."""
    return math.gcd(problem.page_size, block_n)


def _shares_bias(problem: Problem, tile: ScoredTile) -> bool:
    """Whether batch entries share a per-pair bias whose tiles are loaded."""
    return tile.bias_of_pairs > 0 and problem.bias is not None and problem.bias.strides[0] == 0


def add_persistent(
    draft: Draft,
    tile: Tile,
    source: str,
    *,
    batch_first: bool = False,
    heads_together: int = 0,
    claimed_heads: int = 0,
    is_ordered: bool = False,
) -> None:
    """Add a persistent kernel: as many blocks as are resident, each of which takes one tile of queries after another.

    On a device that computes other things, too, some blocks would begin late, and all would wait for them at the end.
    So there a block takes a pair of tiles, or one where they are few, and ends.
    Blocks of a cluster take a tile together, and count as one until they are launched.
    With a window, tiles that attend to the whole of it come first, head by head, and the shorter ones of many heads
    follow.

    - `batch_first`: the batch entries of a head are neighbours in launch order, because they share what it reads.
    - `heads_together`: each block takes one tile and ends, and the device hands tiles out, the longest ones of so many
      heads first.
    - `claimed_heads`: blocks stay, and claim tiles in that order or, if it `is_ordered`, in that of `add_tile_order`.
    """
    problem = draft.problem
    m_blocks = draft.heads * draft.tiles_of(problem.seqlen_q, tile.block_m)
    check_blocks(m_blocks)
    heads_together = heads_together or claimed_heads
    pairs = takes_pairs(problem) and not heads_together
    units = draft.heads * draft.tiles_of(problem.seqlen_q, 2 * tile.block_m) if pairs else m_blocks
    cluster = tile.cluster
    resident = draft.device.num_sms * tile.min_blocks // cluster
    may_divide = not problem.is_packed and not problem.page_size  # whether two blocks may divide a pair of tiles
    stays = claimed_heads > 0 or not ((problem.shares_device and may_divide) or heads_together)
    blocks = min(units, resident) if stays else units
    head_section = _head_section(draft, batch_first=batch_first, heads_together=heads_together)
    draft.set(resident_blocks=blocks, head_section=head_section)
    divides_pairs = pairs and may_divide and 2 * units <= resident * (1 if stays else DIVIDED_WAVES)
    blocks *= 2 if divides_pairs else 1
    tiles = f"{m_blocks} query tiles"
    if problem.is_packed:
        tiles = f"the query tiles of {problem.batch} packed sequences, at most {m_blocks}"
    if claimed_heads:
        draft.scratch["arrivals"] = 8 // ITEMSIZE[problem.softmax_dtype]  # a word of 64 bits
        first = "" if is_ordered else f" of {claimed_heads} heads"
        schedule = f"persistent, claim one of {tiles} after another, the longest ones{first} first"
    elif heads_together:
        schedule = f"one for each of {tiles}, the longest ones of {heads_together} heads first"
    elif stays:
        schedule = f"persistent, over {tiles}{', both of a pair at once' if divides_pairs else ''}"
    else:
        each = "a pair" if pairs and not divides_pairs else "one"
        schedule = f"not persistent, {each} each of {tiles}: other kernels run at the same time"
    takers = f"{blocks} blocks" if cluster == 1 else f"{blocks} clusters of {cluster} blocks"
    draft.reasons.append(f"{takers}, {schedule}")
    order = {
        "CUFLASH_PAIRS": int(pairs),
        "CUFLASH_BATCH_FIRST": int(batch_first),
        "CUFLASH_DYNAMIC_TILES": int(claimed_heads > 0),
    }
    draft.add_main(source, tile, blocks * cluster, **order)


def _head_section(draft: Draft, *, batch_first: bool, heads_together: int) -> int:
    """How many heads have their tiles of queries side by side in the order in which blocks take them."""
    problem = draft.problem
    if heads_together:
        return heads_together
    if batch_first:  # batch entries read a tile of a bias at the same time, so that all but one of them find it in L2
        return min(problem.batch, MOST_ENTRIES_TOGETHER)
    if problem.is_packed:  # sequences of different lengths are then spread evenly over the blocks
        return CAUSAL_HEAD_SECTION
    # With a window, tiles that attend to the whole of it come first, head by head.
    return _heads_of_short_tiles(draft) if problem.has_window else draft.run_time.head_section


def _heads_of_short_tiles(draft: Draft) -> int:
    """How many heads have their tiles of queries that attend to less than a whole window side by side.

    All heads are divided into equal groups, such that the keys that these tiles of a group attend to fit into L2.
    """
    problem = draft.problem
    left, right = problem.window_left or 0, problem.window_right or 0
    ends = (problem.diagonal < left) + (problem.diagonal + problem.seqlen_q + right > problem.seqlen_k)
    keys = min(problem.seqlen_k, ends * max(left + right + 1, 0))
    row_bytes = ITEMSIZE[draft.arrays["k"].dtype] * (problem.head_dim + problem.head_dim_v)
    most = draft.device.l2_bytes * problem.group_size // max(keys * row_bytes, 1)
    groups = -(-draft.heads // max(most, 1))
    return -(-draft.heads // max(groups, 1)) or 1
