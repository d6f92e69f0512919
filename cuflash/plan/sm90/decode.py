"""Decode on compute capability 9.0: the KV cache is streamed past all queries that share a KV head."""

from __future__ import annotations

from typing import ClassVar

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan.draft import Draft
from cuflash.plan.families import ForwardFamily
from cuflash.plan.key_splits import DECODE_MIN_SEQLEN_K, DECODE_ROWS, add_split_kernel, is_decode, rows_of, visible_keys
from cuflash.plan.sm80 import decode as sm80_decode
from cuflash.plan.sm90.decode_tiles import (
    DECODE_FLOAT8_SM90_TILES,
    DECODE_SM90_TILES,
    DecodeFloat8Sm90Tile,
    DecodeSm90Tile,
)
from cuflash.plan.sm90.forward import MAPPED, box_rows, why_not_16_bit
from cuflash.plan.sm90.tiles import FORWARD_SM90_TILES
from cuflash.plan.sm90.wide_tiles import DECODE_WIDE_SM90_TILES, FORWARD_WIDE_SM90_TILES, DecodeWideSm90Tile
from cuflash.plan.tiles import Tile, exceeds, why_too_wide
from cuflash.plan.traffic import Model
from cuflash.spec.inputs import MASKS
from cuflash.spec.problem import Problem


class Decode(ForwardFamily[DecodeSm90Tile]):
    """Half precision: blocks take equal splits of the keys of all heads."""

    kernel = "sm90/decode"
    rows = DECODE_SM90_TILES
    model: ClassVar[Model | None] = "splits of keys"
    reads_keys_once = True
    unknown = (*MASKS, "dropout", "packed sequences")

    def alternatives(self, problem: Problem) -> tuple[Tile, ...]:
        return (*DECODE_SM90_TILES, *FORWARD_SM90_TILES)

    def why_not_served(self, draft: Draft) -> str | None:
        return super().why_not_served(draft) if draft.problem.has_float8 == self.has_float8 else ""

    def why_not(self, draft: Draft) -> str | None:
        problem, device = draft.problem, draft.device
        if device.arch != 90 or ITEMSIZE[problem.dtype] != 2 or not is_decode(problem) or draft.why_not_mapped(MAPPED):
            return ""
        if too_wide := why_too_wide(problem, self.table(problem)):
            return too_wide
        if unknown := self.why_unknown(problem):
            return unknown
        # An SM has one block of this kernel, which waits while the threads that add a bias load it. On an
        # H100, where a copy makes 3.02 TB/s, it made 1.52 and 1.26 with a bias of keys and of pairs, and sm80/decode
        # made 2.67 and 2.58.
        if problem.bias is not None and not problem.has_float8 and sm80_decode.Decode().why_not(draft) is None:
            return "sm80/decode reads a bias faster"
        fills = 2 * draft.heads >= device.num_sms and not problem.batch_invariant
        if problem.group_size == 1 and fills and not problem.has_float8:
            return f"{draft.heads} heads fill the device, and no two share keys"
        return None

    def draft(self, draft: Draft, tile: DecodeSm90Tile) -> None:
        problem = draft.problem
        box = box_rows(problem, tile.block_n)
        draft.hides_last_keys = True
        boxes = {"q": problem.seqlen_q, "k": box, "v": box}
        draft.map_tensors(boxes, {"q": problem.group_size}, read_once=True)
        add_split_kernel(draft, self.source, tile, block_n=tile.block_n)


class DecodeFloat8(Decode):
    """fp8 keys and values, for queries in half precision."""

    kernel = "sm90/decode_float8"
    tile = DecodeFloat8Sm90Tile
    rows = DECODE_FLOAT8_SM90_TILES
    has_float8 = True
    model = None

    def alternatives(self, problem: Problem) -> tuple[Tile, ...]:
        return DECODE_FLOAT8_SM90_TILES


class DecodeWide(ForwardFamily[DecodeWideSm90Tile]):
    """Wide heads."""

    kernel = "sm90/decode_wide"
    rows = DECODE_WIDE_SM90_TILES
    reads_keys_once = True
    unknown = (*MASKS, "dropout", "packed sequences", "pages")

    def alternatives(self, problem: Problem) -> tuple[Tile, ...]:
        return (*DECODE_WIDE_SM90_TILES, *FORWARD_WIDE_SM90_TILES)

    def why_not(self, draft: Draft) -> str | None:
        problem = draft.problem
        rows = rows_of(problem)
        if not exceeds(problem, DECODE_SM90_TILES):
            return ""
        if why_not_16_bit(draft, MAPPED, DECODE_WIDE_SM90_TILES) is not None or not 0 < rows <= 2 * DECODE_ROWS:
            return ""
        if visible_keys(problem.mean_sequence) < DECODE_MIN_SEQLEN_K:
            return ""
        if rows > DECODE_ROWS and (problem.seqlen_q > DECODE_ROWS or DECODE_ROWS % problem.seqlen_q):
            return f"{problem.seqlen_q} queries of whole heads do not make {DECODE_ROWS} rows"
        if unknown := self.why_unknown(problem):
            return unknown
        if problem.group_size == 1 and 2 * draft.heads >= draft.device.num_sms:
            return f"{draft.heads} heads fill the device, and no two share keys"
        return None

    def draft(self, draft: Draft, tile: DecodeWideSm90Tile) -> None:
        problem = draft.problem
        box = tile.block_n // tile.cluster
        draft.hides_last_keys = True
        boxes = {"q": problem.seqlen_q, "k": box, "v": box}
        draft.map_tensors(boxes, {"q": min(problem.group_size, DECODE_ROWS // problem.seqlen_q)}, read_once=True)
        if tile.v_in_k:
            if not problem.v.in_k:
                raise NotImplementedError(
                    "tiles: got a row for values in keys, expected v to be the first columns of k"
                )
            draft.reasons.append("v is the first columns of k, and not loaded again")
        add_split_kernel(draft, self.source, tile, block_n=tile.block_n, cluster=tile.cluster, combines=False)
