"""Few queries against many keys, on compute capability 9.0: the keys are streamed past all queries that share them."""

from __future__ import annotations

from dataclasses import replace

from cuflash.operands import ITEMSIZE
from cuflash.planning.device import DeviceSpec
from cuflash.planning.draft import Draft, check_blocks
from cuflash.planning.families import ForwardFamily
from cuflash.planning.sm90.forward import MAPPED, box_rows, why_not_16_bit
from cuflash.planning.sm90.tiles import (
    DECODE_FLOAT8_SM90_TILES,
    DECODE_ROWS,
    DECODE_SM90_TILES,
    DecodeFloat8Sm90Tile,
    DecodeSm90Tile,
)
from cuflash.planning.sm90.wide_tiles import (
    DECODE_WIDE_SM90_TILES,
    DecodeWideSm90Tile,
)
from cuflash.planning.tiles import Tile
from cuflash.problem import Problem
from cuflash.terms import MASKS

DECODE_MIN_SEQLEN_K = 512  # visible keys from which on this kernel pays
MIN_TILES_OF_BLOCK = 2  # tiles of keys that a block takes at least
COMBINE_TILES = 2  # where blocks share a head, each takes as much longer as so many tiles of keys take
COMBINE_COLUMNS = 32  # columns of one row that a warp combines
# Up to so many pieces of results of one head, a row and so many columns each, and so many bytes of keys and values, the
# block that is done last combines them: that saves the host a launch, for which small problems wait. Its four warps
# wait for L2 for each piece, so a kernel of its own takes less of the device's time: 8 us less with 131072 keys on an
# H200.
COMBINE_PIECES = 16
COMBINE_KEY_BYTES = 2**26
COMBINE_WARPS = 4
MAX_SHARE_STEPS = 2**31 - 1  # blocks count the keys of all heads in steps: for each head as many as there are blocks


class Decode(ForwardFamily[DecodeSm90Tile]):
    kernel = "sm90/decode"
    tile = DecodeSm90Tile

    def table(self, problem: Problem) -> tuple[DecodeSm90Tile, ...]:
        return DECODE_SM90_TILES

    def obstacle(self, draft: Draft) -> str | None:
        return super().obstacle(draft) if draft.problem.has_float8 == self.has_float8 else ""

    def why_not(self, draft: Draft) -> str | None:
        problem, device = draft.problem, draft.device
        rows = problem.group_size * problem.mean_sequence.seqlen_q
        if device.arch != 90 or ITEMSIZE[problem.dtype] != 2 or not 0 < rows <= DECODE_ROWS:
            return ""
        if _visible_keys(problem.mean_sequence) < DECODE_MIN_SEQLEN_K or draft.why_not_mapped(MAPPED):
            return ""
        largest = max(row.max_dim for row in self.table(problem))
        if max(problem.head_dim, problem.head_dim_v) > largest:
            return f"it serves head dimensions up to {largest}"
        terms = [*problem.given(MASKS)]
        terms += ["dropout"] if problem.dropout else []
        terms += ["packed sequences"] if problem.is_packed else []
        if terms:
            return f"it knows no {' and no '.join(terms)}"
        if problem.group_size == 1 and 2 * draft.heads >= device.num_sms and not problem.has_float8:
            return f"{draft.heads} heads fill the device, and no two share keys"
        return None

    def draft(self, draft: Draft, tile: DecodeSm90Tile) -> None:
        problem = draft.problem
        heads, rows = problem.batch * problem.num_heads_kv, problem.group_size * problem.seqlen_q
        blocks = _blocks_of_decode(problem, draft.device, tile)
        draft.set(resident_blocks=blocks)
        whole_heads = heads % blocks == 0
        draft.key_splits = blocks // heads if blocks % heads == 0 else 1 if whole_heads else blocks // heads + 2
        box = box_rows(problem, tile.block_n)
        draft.hides_last_keys = True
        boxes = {"q": problem.seqlen_q, "k": box, "v": box}
        draft.map_tensors(boxes, {"q": problem.group_size}, read_once=True)
        draft.reasons.append(f"{rows} queries of the heads that share keys go through one product: keys are read once")
        dims = draft.padded_dims(tile)
        pieces = rows * -(-dims[1] // COMBINE_COLUMNS)
        key_bytes = heads * _visible_keys(problem) * sum(dims) * ITEMSIZE[problem.k.dtype]
        combines = not whole_heads and pieces <= COMBINE_PIECES and key_bytes <= COMBINE_KEY_BYTES
        defines = {"CUFLASH_SPLITS_KEYS": int(not whole_heads), "CUFLASH_COMBINES": int(combines)}
        draft.add(self.source, tile, blocks, tile.shared_bytes(*dims), **defines)
        if whole_heads:
            draft.reasons.append(f"{blocks} blocks take whole heads")
            return
        draft.scratch["partial_out"] = (heads + blocks) * rows * dims[1]
        draft.scratch["partial_lse"] = (heads + blocks) * rows
        if combines:
            draft.scratch["arrivals"] = 2 * heads  # words of 64 bits
            combined = "the last one combines their results by lse"
        else:
            draft.add(
                "around/combine.cu", tile, -(-heads * pieces // COMBINE_WARPS), 0, CUFLASH_NUM_WARPS=COMBINE_WARPS
            )
            combined = "another kernel combines their results by lse"
        draft.reasons.append(
            f"{blocks} blocks take equal shares of the keys, up to {draft.key_splits} of them those of one head: "
            + combined
        )


class DecodeFloat8(Decode):
    kernel = "sm90/decode_float8"
    tile = DecodeFloat8Sm90Tile
    has_float8 = True

    def table(self, problem: Problem) -> tuple[DecodeSm90Tile, ...]:
        return DECODE_FLOAT8_SM90_TILES


class DecodeWide(ForwardFamily[DecodeWideSm90Tile]):
    """Wide heads."""

    kernel = "sm90/decode_wide"
    tile = DecodeWideSm90Tile

    def table(self, problem: Problem) -> tuple[DecodeWideSm90Tile, ...]:
        return DECODE_WIDE_SM90_TILES

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        rows = problem.group_size * problem.mean_sequence.seqlen_q
        if max(problem.head_dim, problem.head_dim_v) <= max(row.max_dim for row in DECODE_SM90_TILES):
            return ""
        if why_not_16_bit(draft, MAPPED, DECODE_WIDE_SM90_TILES) is not None or not 0 < rows <= 2 * DECODE_ROWS:
            return ""
        if _visible_keys(problem.mean_sequence) < DECODE_MIN_SEQLEN_K:
            return ""
        if rows > DECODE_ROWS and (problem.seqlen_q > DECODE_ROWS or DECODE_ROWS % problem.seqlen_q):
            return f"{problem.seqlen_q} queries of whole heads do not make {DECODE_ROWS} rows"
        terms = [*problem.given(MASKS)]
        terms += ["dropout"] if problem.dropout else []
        terms += ["packed sequences"] if problem.is_packed else []
        terms += ["pages"] if problem.page_size else []
        if terms:
            return f"it knows no {' and no '.join(terms)}"
        if problem.group_size == 1 and 2 * draft.heads >= draft.device.num_sms:
            return f"{draft.heads} heads fill the device, and no two share keys"
        return None

    def draft(self, draft: Draft, tile: DecodeWideSm90Tile) -> None:
        problem = draft.problem
        heads, rows = problem.batch * problem.num_heads_kv, problem.group_size * problem.seqlen_q
        clusters = replace(draft.device, num_sms=draft.device.num_sms // tile.cluster)
        blocks = _blocks_of_decode(problem, clusters, tile)
        draft.set(resident_blocks=blocks)
        whole_heads = heads % blocks == 0
        draft.key_splits = blocks // heads if blocks % heads == 0 else 1 if whole_heads else blocks // heads + 2
        box = tile.block_n // tile.cluster
        draft.hides_last_keys = True
        boxes = {"q": problem.seqlen_q, "k": box, "v": box}
        draft.map_tensors(boxes, {"q": min(problem.group_size, DECODE_ROWS // problem.seqlen_q)}, read_once=True)
        draft.reasons.append(f"{rows} queries of the heads that share keys go through one product: keys are read once")
        dims = draft.padded_dims(tile)
        defines = {"CUFLASH_SPLITS_KEYS": int(not whole_heads)}
        draft.add(self.source, tile, blocks * tile.cluster, tile.shared_bytes(*dims), **defines)
        who = f"{blocks} clusters of {tile.cluster} blocks" if tile.cluster > 1 else f"{blocks} blocks"
        if whole_heads:
            draft.reasons.append(f"{who} take whole heads")
            return
        draft.scratch["partial_out"] = (heads + blocks) * rows * dims[1]
        draft.scratch["partial_lse"] = (heads + blocks) * rows
        pieces = heads * rows * -(-dims[1] // COMBINE_COLUMNS)
        draft.add("around/combine.cu", tile, -(-pieces // COMBINE_WARPS), 0, CUFLASH_NUM_WARPS=COMBINE_WARPS)
        draft.reasons.append(
            f"{who} take equal shares of the keys, up to {draft.key_splits} of them those of one head: another kernel "
            "combines their results by lse"
        )


def _visible_keys(problem: Problem) -> int:
    """The most keys that all queries of a head see together."""
    start, stop = 0, problem.seqlen_k
    if problem.window_left is not None:
        start = max(start, problem.diagonal - problem.window_left)
    if problem.window_right is not None:
        stop = min(stop, problem.seqlen_q + problem.diagonal + problem.window_right)
    return max(0, stop - start)


def _blocks_of_decode(problem: Problem, device: DeviceSpec, tile: Tile) -> int:
    """The number of blocks to share all keys evenly, so that the device is done first; of equals, the smallest.

    As many as are resident leave no multiprocessor idle, but share heads, whose results have to be combined. A few less
    may leave every head whole, or shared by as few blocks as the others.
    """
    heads = problem.batch * problem.num_heads_kv
    check_blocks(heads)
    tiles_of_head = -(-_visible_keys(problem) // tile.block_n)
    num_tiles = heads * tiles_of_head
    most = max(1, min(device.num_sms * tile.min_blocks, num_tiles // MIN_TILES_OF_BLOCK, MAX_SHARE_STEPS // heads))
    even = {most}
    if heads <= most:
        even.add(most // heads * heads)
    elif heads % -(-heads // most) == 0:
        even.add(heads // -(-heads // most))

    def duration(blocks: int) -> int:
        return -(-num_tiles // blocks) + (COMBINE_TILES if heads % blocks else 0)

    return min(sorted(even), key=duration)
