"""A plan in the making, to which families add their kernels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cuflash.arrays.array_info import ITEMSIZE, Operand
from cuflash.plan.argument import bytes_without_functions, maps_offset, params_bytes
from cuflash.plan.device import DeviceSpec
from cuflash.plan.launch_plan import FilledTable, KernelSpec, RunTime, option_names
from cuflash.plan.tensor_map import BYTES as TENSOR_MAP_BYTES
from cuflash.plan.tensor_map import TensorMapSpec, tensor_map_spec, why_not
from cuflash.plan.tiles import Tile, round_up
from cuflash.plan.traffic import Model
from cuflash.score_mod import Program
from cuflash.spec.inputs import CAPS, DEFINES, FP8_SCALES, MASKS, OPTIONAL_INPUTS, PAIR_OPTIONS, OptionalInput
from cuflash.spec.outputs import SCORE_GRADIENTS
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, FORWARD, Pass
from cuflash.spec.problem import Problem

TABLE_WARPS = 8  # warps of a block that fills tables
# What a kernel does for gradients of arrays that the score reads: CUFLASH_NEEDS_SCORE_ARGS of
# kernels/common/score/score_args_gradients.cuh.
FINDS_LARGEST, ADDS_SCORE_ARGS, SUMS_SCORE_ARGS = 1, 2, 3
VECTOR_OF_MASK = 16  # keys that are read at once
INDEX_WARPS = 4  # warps of a block that makes the block-sparse index; each makes one row
INDEX_HEADER = 2  # integers in front of a row of the index
# Tiles with rows in a block-sparse index are put in order by one block of ORDER_WARPS warps, where there are at least
# ORDERED_WAVES for each block of the main kernel. The last SORTED_WAVES start in the order of their lengths.
ORDERED_WAVES, MOST_ORDERED, SORTED_WAVES, ORDER_WARPS, ORDER_BUCKETS = 2, 1 << 14, 3, 32, 32
# Under a causal mask tiles differ in length, so the long ones of this many heads start first. On an H200 that gains 9 %
# at head_dim 128 and seqlen 4096. Without a mask, one head at a time makes better use of L2.
CAUSAL_HEAD_SECTION = 16
# The largest soft cap that is folded into exponents, and only without sinks. Rows have an lse below 1024 then, so that
# none of them is large in the sense of kernels/common/softmax/backward.cuh.
MOST_FOLDED_SOFTCAP = 512.0
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
WRITTEN = (*FORWARD.written, *BACKWARD.written, *BACKWARD_JVP.written)  # results that TMA may write, 16 bytes at a time


@dataclass(kw_only=True)
class Draft:
    """A plan in the making."""

    problem: Problem
    device: DeviceSpec
    pass_: Pass
    arrays: dict[str, Operand]
    defines: dict[str, str | int]
    need: tuple[str, ...]
    origin: str  # where tiles come from that no table was asked for
    program: Program  # what kernels compute of score_mod and mask_mod
    tables: tuple[FilledTable, ...] = ()  # tables of the program, which a kernel fills
    tiles: tuple[Tile, ...] = ()
    kernels: list[KernelSpec] = field(default_factory=list)
    models: list[Model | None] = field(default_factory=list)  # of what each main kernel moves
    scratch: dict[str, int] = field(default_factory=dict)
    tensor_maps: tuple[TensorMapSpec, ...] = ()
    copies: dict[str, Operand] = field(default_factory=dict)  # scratch arrays that TMA reads in place of these
    reasons: list[str] = field(default_factory=list)
    key_splits: int = 1
    hides_last_keys: bool = False
    has_sinks: bool = False  # which the problem itself lacks in the backward pass
    bias_class_tile: tuple[int, int] = (0, 0)  # (queries, keys) of tiles that are classified under the bias
    chosen_by_bias: bool = False  # whether main kernels use the index only if the bias hides enough tiles
    run_time: RunTime = field(default_factory=RunTime)

    @property
    def gradients(self) -> tuple[str, ...]:
        """The wanted gradients, or those whose tangents are wanted."""
        return tuple(name[1:] for name in self.need) if self.pass_.has_tangents else self.need

    def result_of(self, gradient: str) -> str:
        """The name of the result: the gradient, or its tangent in a pass with tangents."""
        return f"t{gradient}" if self.pass_.has_tangents else gradient

    @property
    def score_arg_gradients(self) -> tuple[str, ...]:
        """Of these, the gradients of arrays that the score reads."""
        return tuple(name for name in self.gradients if name in self.problem.score_arg_gradients)

    @property
    def summed_score_args(self) -> tuple[str, ...]:
        """The arrays and tables whose gradients a kernel sums for these."""
        return self.program.summed([name[1:] for name in self.score_arg_gradients])

    def has_wide(self, *names: str) -> bool:
        """Whether one of these gradients, or its tangent, is wanted in the dtype of sums, not in that of the inputs."""
        wanted = (self.result_of(name) for name in names)
        return any(name in self.need and self.arrays[name].dtype != self.problem.dtype for name in wanted)

    @property
    def heads(self) -> int:
        """Query heads of all entries of the arrays' batch axis."""
        return self.problem.array_batch * self.problem.num_heads

    def tiles_of(self, seqlen: int, rows: int) -> int:
        """How many tiles of `rows` rows the queries, or keys, of a head have.

        Packed: tile t of sequence b has index start[b] // rows + b + t. At most one index is unused for each sequence,
        and one for the rows after the last sequence.
        """
        if self.problem.is_packed:
            return seqlen // rows + self.problem.batch + 1
        return -(-seqlen // rows)

    def steps_of_tile(self, main: Tile) -> int:
        """The most tiles of queries, of all heads of a group, that attend to a tile of keys; packed: of mean length."""
        problem = self.problem.mean_sequence
        queries = problem.seqlen_q
        if problem.window_left is not None and problem.window_right is not None:
            queries = min(queries, problem.window_left + problem.window_right + main.block_n)
        return -(-queries // main.block_m) * problem.group_size

    def padded_dims(self, tile: Tile) -> tuple[int, int]:
        """Head dimensions as a kernel of this row has them."""
        return tile.padded_dims(self.problem)

    def why_not_mapped(self, names: Iterable[str]) -> str | None:
        """Why TMA cannot read these arrays, or write those that are results; None if it can."""
        reasons_against = (why_not(name, self.arrays[name], written=name in WRITTEN) for name in names)
        return next(filter(None, reasons_against), None)

    def map_tensors(
        self,
        rows: Mapping[str, int],
        heads: Mapping[str, int] | None = None,
        *,
        read_once: bool = False,
        scratch: Mapping[str, Operand] | None = None,
    ) -> None:
        """Make tensor maps of these arrays, or of their copies. A box has `rows` rows of one head, or of `heads`.

        `scratch` describes those that are scratch arrays.
        """
        heads = heads or {}
        arrays = {**self.arrays, **(scratch or {})}
        seen = {
            name: (f"{name}_copy", self.copies[name]) if name in self.copies else (name, arrays[name]) for name in rows
        }
        self.tensor_maps = tuple(
            tensor_map_spec(*seen[name], n, heads.get(name, 1), read_once=read_once) for name, n in rows.items()
        )
        self.defines["CUFLASH_ARGUMENT_BYTES"] = maps_offset(self.problem) + len(rows) * TENSOR_MAP_BYTES

    def own_masks(self, *masks: Operand | None) -> tuple[int, int]:
        """How many batch entries and heads have their own row of the index, or bits, if these masks make them."""
        strides = [mask.strides for mask in masks if mask is not None]
        of_batch = self.problem.kv_lengths is not None or any(of_batch for of_batch, *_ in strides)
        of_head = any(of_head for _, of_head, *_ in strides)
        return self.problem.batch if of_batch else 1, self.problem.num_heads if of_head else 1

    def set(self, **integers: int) -> None:
        """Set fields of `run_time`."""
        self.run_time = replace(self.run_time, **integers)

    def add_block_index(
        self, tile: Tile, name: Literal["key_index", "query_index"], *, why_not_for_bias: str | None = None
    ) -> None:
        """With masks, or a bias, that hide tiles, add the kernel that makes the block-sparse index.

        "key_index" has visible tiles of keys by tiles of queries, "query_index" the transpose. `why_not_for_bias` says
        why the main kernel has no index for a bias alone. If it has one, it is launched twice, with and without it, and
        one of the two returns at once: a bias may hide nothing, and iterating over the block-sparse index takes time.
        """
        problem, of_keys = self.problem, name == "key_index"
        self._index_mask(tile)
        looks_at_bias, has_index = self._looks_at_bias(why_not_for_bias), bool(self.defines["CUFLASH_HAS_BLOCK_INDEX"])
        self.chosen_by_bias = looks_at_bias and not has_index
        if not has_index and not looks_at_bias:
            self._say_why_mask_is_computed(tile)
            return
        m_blocks, n_blocks = -(-problem.seqlen_q // tile.block_m), -(-problem.seqlen_k // tile.block_n)
        rows, length = (m_blocks, n_blocks) if of_keys else (n_blocks, m_blocks)
        of_masks = self._set_matrices(looks_at_bias)
        rows *= self.run_time.index_batches * self.run_time.index_heads if self.heads else 0
        elements = -(-rows * (INDEX_HEADER + length) * ITEMSIZE["int32"] // ITEMSIZE[problem.softmax_dtype])
        self.scratch[name] = round_up(elements, 4)
        if problem.mask_function is not None or (problem.mask is not None and not self._has_mask_bits):
            self._add_mask_tiles(tile, of_masks * m_blocks * n_blocks)
        if looks_at_bias:
            self._add_bias_tiles(tile)
        options = {"CUFLASH_INDEXES_KEYS": int(of_keys), "CUFLASH_HAS_BIAS_TILE_CLASSES": int(looks_at_bias)}
        options |= {"CUFLASH_HAS_BLOCK_INDEX": 1, "CUFLASH_CHOSEN_BY_BIAS": int(self.chosen_by_bias)}
        options |= {"CUFLASH_NUM_WARPS": INDEX_WARPS, "CUFLASH_MIN_BLOCKS": 1}
        self.add("helpers/block_index.cu", tile, -(-rows // INDEX_WARPS), 0, **options)
        self.reasons.append(
            f"{' and '.join(self._hiding(looks_at_bias))}: block-sparse index of tiles of "
            f"{'keys' if of_keys else 'queries'}, {tile.block_m} queries x {tile.block_n} keys each; hidden ones are "
            "neither loaded nor computed"
            + (", unless they are so few that the kernel without index takes less time" if self.chosen_by_bias else "")
        )

    @property
    def lists_tiles(self) -> bool:
        """Whether the main kernel iterates over a block-sparse index, whatever a bias hides."""
        return bool(self.defines["CUFLASH_HAS_BLOCK_INDEX"]) and not self.chosen_by_bias

    def add_tile_order(self, tile: Tile, name: Literal["key_index", "query_index"]) -> bool:
        """Add the kernel that puts tiles in the order of their rows in this block-sparse index, the longest first.

        Returns whether there is such an index, and not too many tiles for one block.
        """
        problem, of_keys = self.problem, name == "key_index"
        rows, seqlen = (tile.block_m, problem.seqlen_q) if of_keys else (tile.block_n, problem.seqlen_k)
        tiles = problem.array_batch * (problem.num_heads if of_keys else problem.num_heads_kv) * -(-seqlen // rows)
        blocks = self.device.num_sms * tile.min_blocks
        if not self.lists_tiles or not ORDERED_WAVES * blocks <= tiles <= MOST_ORDERED:
            return False
        self.defines["CUFLASH_HAS_TILE_ORDER"] = 1
        elements = -(-(tiles + 1) * ITEMSIZE["int32"] // ITEMSIZE[problem.softmax_dtype])
        self.scratch[name] += round_up(elements, 4)
        last = SORTED_WAVES * blocks
        options = {
            "CUFLASH_INDEXES_KEYS": int(of_keys),
            "CUFLASH_BLOCKS_AT_ONCE": blocks,
            "CUFLASH_TILES_SORTED_LAST": last,
            "CUFLASH_MOST_TILES": MOST_ORDERED,
            "CUFLASH_NUM_WARPS": ORDER_WARPS,
            "CUFLASH_MIN_BLOCKS": 1,
        }
        shared_bytes = (MOST_ORDERED + ORDER_BUCKETS * (ORDER_WARPS + 1) + ORDER_WARPS) * ITEMSIZE["int32"]
        self.add("helpers/tile_order.cu", tile, 1, shared_bytes, **options)
        what = "queries" if of_keys else "keys"
        self.reasons.append(f"tiles of {what} start in the order of the lengths of their rows, where these differ much")
        return True

    @property
    def _has_mask_bits(self) -> bool:
        """Whether a kernel packs the mask into bits, and classifies its tiles."""
        return "mask_words" in self.scratch

    def _index_mask(self, tile: Tile) -> None:
        """Let the index hold the tiles of a mask if it pays to look at them."""
        has_index = self.defines["CUFLASH_HAS_BLOCK_INDEX"] or self._has_mask_bits
        if self.problem.mask is not None and not has_index:
            self.defines["CUFLASH_HAS_BLOCK_INDEX"] = int(self._why_not_looked_at(tile) is None)

    def _looks_at_bias(self, why_not_for_bias: str | None) -> bool:
        """Whether the index holds the tiles that a bias hides. If it might and does not, the plan says why."""
        if not self._bias_hides_tiles:
            return False
        why_not = self._why_bias_is_not_indexed(why_not_for_bias)
        if why_not is not None:
            self._say_computed("bias", why_not)
        return why_not is None

    def _say_why_mask_is_computed(self, tile: Tile) -> None:
        """Say why tiles that a mask hides are computed, if there is a mask and they are."""
        if self.problem.mask is not None and (why_not := self._why_not_looked_at(tile)) is not None:
            self._say_computed("mask", why_not)

    def _hiding(self, looks_at_bias: bool) -> list[str]:
        """What hides the tiles that the index leaves out."""
        problem = self.problem
        has_mask = problem.mask is not None or problem.mask_function is not None
        hiding = {
            "mask": has_mask,
            "block_mask": problem.block_mask is not None and not has_mask,
            "bias": looks_at_bias,
        }
        return [name for name, hides in hiding.items() if hides]

    def add_main(self, source: str, tile: Tile, blocks: int, makes: Collection[str] = (), /, **defines: int) -> None:
        """Add a kernel that iterates over the block-sparse index if there is one.

        If the bias decides that, two kernels are added, and the name of one says that it is the one with the index.
        """
        shared_bytes = tile.shared_bytes(*self.padded_dims(tile))
        if not self.chosen_by_bias:
            self.add(source, tile, blocks, shared_bytes, makes, **defines)
            return
        for has_index in (0, 1):
            chosen = defines | {"CUFLASH_HAS_BLOCK_INDEX": has_index, "CUFLASH_CHOSEN_BY_BIAS": 1}
            self.add(source, tile, blocks, shared_bytes, (*makes, *["listed"] * has_index), **chosen)

    def add_tile_classes(self, tile: Tile) -> None:
        """Add tile classes (empty, partial, full) of a mask or mask_mod: for main kernels without block-sparse index.

        Such a kernel finds the tiles that a block mask hides by itself.
        """
        problem = self.problem
        self.defines["CUFLASH_HAS_BLOCK_INDEX"] = 0
        matrices = self._set_matrices()
        looks = problem.mask is not None and self._why_not_looked_at(tile) is None
        self._say_why_mask_is_computed(tile)
        if problem.mask_function is not None or looks:
            self.defines["CUFLASH_HAS_TILE_CLASSES"] = 1
            tiles = -(-problem.seqlen_q // tile.block_m) * -(-problem.seqlen_k // tile.block_n)
            self._add_mask_tiles(tile, matrices * tiles)
            self.reasons.append(f"mask: a kernel classifies tiles of {tile.block_n} keys as empty, partial or full")
        if problem.mask_function is not None or looks or problem.block_mask is not None:
            self.reasons.append(f"tiles of {tile.block_n} keys that no query attends to are not loaded")

    def add_bias_tile_classes(self, tile: Tile) -> dict[str, int]:
        """Add the tile classes of the bias, for a kernel of gradients without block-sparse index.

        Returns the macros that this kernel is to be compiled with.
        """
        looks = self._bias_hides_tiles and self._why_bias_is_not_looked_at() is None
        if looks:
            self._add_bias_tiles(tile)
            note = f"bias: which tiles of {tile.block_m} queries x {tile.block_n} keys it hides is found by a kernel"
            self.reasons += [note] if note not in self.reasons else []
        return {"CUFLASH_HAS_BIAS_TILE_CLASSES": int(looks)}

    def _set_matrices(self, looks_at_bias: bool = False) -> int:
        """Set how many batch entries and heads have their own rows of the index, and their own tile classes.

        Returns how many matrices of tile classes there are in all.
        """
        problem, function = self.problem, self.problem.mask_function
        own = self.own_masks(problem.block_mask, problem.mask)
        if function is not None:
            own = (
                problem.batch if function.depends_on("batch") else own[0],
                problem.num_heads if function.depends_on("head") else own[1],
            )
        self.set(mask_batches=own[0], mask_heads=own[1])
        of_bias = self._own_biases if looks_at_bias else (1, 1)
        self.set(index_batches=max(own[0], of_bias[0]), index_heads=max(own[1], of_bias[1]))
        return math.prod(own) if self.heads else 0

    @property
    def _own_biases(self) -> tuple[int, int]:
        """How many batch entries and heads have a bias of their own."""
        problem, bias = self.problem, self.problem.bias
        of_batch, of_head, *_ = (0, 0) if bias is None else bias.strides
        return problem.batch if of_batch else 1, problem.num_heads if of_head else 1

    def _add_mask_tiles(self, tile: Tile, tiles: int) -> None:
        """Add the kernel that classifies `tiles` tiles of a mask: empty, partial or full."""
        elements = -(-tiles // ITEMSIZE[self.problem.softmax_dtype])
        self.scratch["mask_blocks"] = max(self.scratch.get("mask_blocks", 0), elements)
        lanes = self._lanes_of_tile(tile)
        warps = {"CUFLASH_NUM_WARPS": INDEX_WARPS, "CUFLASH_MIN_BLOCKS": 1, "CUFLASH_LANES_OF_TILE": lanes}
        self.add("helpers/mask_tiles.cu", tile, -(-tiles * lanes // (32 * INDEX_WARPS)), 0, **warps)

    def _add_bias_tiles(self, tile: Tile) -> None:
        """Add the kernel that classifies tiles of the bias.

        It classifies tiles of all keys of the arrays, so that batch entries of different lengths share the classes.
        """
        problem, size = self.problem, (tile.block_m, tile.block_n)
        if self.bias_class_tile == size:
            return
        self.bias_class_tile = size
        tiles = -(-problem.seqlen_q // tile.block_m) * -(-problem.seqlen_k // tile.block_n)
        tiles *= math.prod(self._own_biases) if self.heads else 0
        elements = -(-(BIAS_HEADER_BYTES + tiles) // ITEMSIZE[problem.softmax_dtype])
        self.scratch["bias_blocks"] = max(self.scratch.get("bias_blocks", 0), elements)
        options = {"CUFLASH_NUM_WARPS": INDEX_WARPS, "CUFLASH_MIN_BLOCKS": 1, "CUFLASH_LANES_OF_TILE": BIAS_LANES}
        options["CUFLASH_KV_LENGTHS_BYTES"] = 0
        self.add(
            "helpers/mask_tiles.cu", tile, -(-tiles * BIAS_LANES // (32 * INDEX_WARPS)), 0, (), ("bias",), **options
        )

    @property
    def _bias_hides_tiles(self) -> bool:
        """Whether there is a per-pair bias, which may."""
        bias = self.problem.bias
        return bias is not None and 0 not in bias.strides[2:]

    @property
    def may_leave_out_tiles(self) -> bool:
        """Whether main kernels may leave out tiles of pairs, because no pair of them is visible."""
        names = ("mask", "mask_function", "block_mask", "kv_lengths", "window_left", "window_right")
        hides = any(getattr(self.problem, name) is not None for name in names)
        return hides or (self._bias_hides_tiles and self._why_bias_is_not_looked_at() is None)

    def _why_bias_is_not_indexed(self, why_not_for_bias: str | None) -> str | None:
        """Why the index has tiles that a per-pair bias hides; None if it has none of them."""
        if (why_not := self._why_bias_is_not_looked_at()) is not None:
            return why_not
        if self.defines.get("CUFLASH_DQ_IN_ORDER"):
            return COUNTED_BY_DQ
        return None if self.defines["CUFLASH_HAS_BLOCK_INDEX"] else why_not_for_bias

    def _why_bias_is_not_looked_at(self) -> str | None:
        """Why no kernel finds out which tiles a per-pair bias hides; None if one does."""
        problem = self.problem
        if problem.page_size:
            return "with pages each entry has bounds of its own"
        if problem.forward_flops < LOOK_BIAS_FLOPS:
            return f"a look at it beforehand pays from {LOOK_BIAS_FLOPS / 1e9:.3g} GFLOP on"
        if math.prod(self._own_biases) * problem.seqlen_q * problem.seqlen_k >= MOST_BIAS_PAIRS:
            return f"it has {MOST_BIAS_PAIRS} pairs or more, whose tiles are too many to count"
        return None

    def _lanes_of_tile(self, tile: Tile) -> int:
        """How many lanes of a warp look at a tile: one for each vector, rounded up to a power of two, and at most 32.

        Only decode differs in this, so that kernels for all lengths are compiled a few times.
        """
        problem = self.problem
        if problem.mask is None or problem.mask_function is not None:
            return 32  # a warp bounds a function over a tile
        rows = 1 if problem.mask.strides[2] == 0 else min(tile.block_m, problem.seqlen_q)
        vectors = max(1, rows * tile.block_n // VECTOR_OF_MASK)
        return int(min(32, 1 << (vectors - 1).bit_length()))

    def _say_computed(self, name: str, why_not: str) -> None:
        """Say why tiles that a mask hides are computed, once for each plan."""
        if not any(reason.startswith(f"{name}: tiles") for reason in self.reasons):
            self.reasons.append(f"{name}: tiles that it hides are computed: {why_not}")

    def _why_not_looked_at(self, tile: Tile) -> str | None:
        """Why no kernel looks beforehand at what a mask leaves of tiles; None if one does."""
        problem = self.problem
        if self.defines.get("CUFLASH_DQ_IN_ORDER"):
            return COUNTED_BY_DQ
        if problem.forward_flops < LOOK_FLOPS:
            return f"a look at it beforehand pays from {LOOK_FLOPS / 1e9:.3g} GFLOP on"
        bounds = (problem.window_left, problem.window_right) != (None, None)
        if tile.defines().get("CUFLASH_MASK_OF_KEYS") and (bounds or problem.seqlen_k < LOOK_KEYS):
            return f"a mask of keys is looked at beforehand from {LOOK_KEYS} keys on, without causal and window"
        return None

    def add_tables(self, tile: Tile) -> None:
        """Add the kernel that fills the tables of the program, before all kernels that compute scores."""
        problem = self.problem
        sizes = (problem.array_batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
        self.tables = tuple(
            FilledTable(table=table, shape=table.size(*sizes), first=table.first(problem.seqlen_k))
            for table in self.program.tables
        )
        for filled in self.tables:
            elements = -(-filled.nbytes // ITEMSIZE[problem.softmax_dtype])
            self.scratch[filled.table.name] = elements if self.heads else 0
        if self.tables:
            self.add_table_helper(tile, "filled")
            tables = ", ".join(filled.table.spelled for filled in self.tables)
            self.reasons.append(f"score: subexpressions that take few values are hoisted: kernels read {tables}")

    def add_table_helper(self, tile: Tile, makes: str, **defines: int) -> None:
        """Add a kernel that has a thread for each entry of the tables.

        It has no blocks where there are no pairs: the arrays that entries are made of may then have no elements.
        """
        entries = sum(math.prod(filled.shape) for filled in self.tables) if self.problem.has_pairs else 0
        warps = {"CUFLASH_NUM_WARPS": TABLE_WARPS, "CUFLASH_MIN_BLOCKS": 1}
        self.add("helpers/hoisted.cu", tile, -(-entries // (32 * TABLE_WARPS)), 0, (makes,), **warps, **defines)

    def add(
        self,
        source: str,
        tile: Tile,
        blocks: int,
        shared_bytes: int,
        makes: Collection[str] = (),
        needed: Collection[str] | None = None,
        /,
        **defines: int | str,
    ) -> None:
        """Add a kernel. `makes` are the results that it makes; they are in its name where a source makes several.

        `needed` are the options that it needs, of those that most helper kernels do not need.
        """
        check_blocks(blocks)
        ignored = _ignored(source, needed)
        name = "_".join((_symbol(source, self.problem, tile, ignored), *makes))
        # Kernels without blocks are not launched.
        overlaps = self.device.overlaps_launches and any(kernel.grid for kernel in self.kernels)
        every = self.defines | tile.defines() | defines | {"CUFLASH_OVERLAPS_PREVIOUS": int(overlaps)}
        every |= dict.fromkeys((define for option in ignored for define in _IGNORED[option]), 0)
        if source.startswith("helpers/"):
            every.pop("CUFLASH_ARGUMENT_BYTES", None)  # they have no tensor maps
        every |= {"CUFLASH_SHARED_BYTES": shared_bytes, "CUFLASH_KERNEL_NAME": name}
        headers: tuple[tuple[str, str], ...] = ()
        if every["CUFLASH_HAS_SCORE_FUNCTION"] or every["CUFLASH_HAS_MASK_FUNCTION"]:
            # Kernels that add the gradients of arrays pair by pair index the arrays themselves, without tables.
            by_pairs = every["CUFLASH_NEEDS_SCORE_ARGS"] in (FINDS_LARGEST, ADDS_SCORE_ARGS)
            program = self.problem.unhoisted if by_pairs else self.program
            header = functions_header(program, self.score_arg_gradients if every["CUFLASH_NEEDS_SCORE_ARGS"] else ())
            headers = (header,)
            every |= {"CUFLASH_FUNCTIONS": f'"{header[0]}"', "CUFLASH_PARAMS_BYTES": params_bytes(self.problem)}
            every["CUFLASH_NARROW_SCORE_ARGS"] = int(all(map(_is_narrow, self._read_by_score)))
        self.kernels.append(
            KernelSpec(
                source=source,
                name=name,
                target=self.device.target_for(source),
                defines=tuple(sorted(every.items())),
                grid=blocks,
                threads=32 * int(every["CUFLASH_NUM_WARPS"]),
                shared_bytes=shared_bytes,
                overlaps_previous=overlaps,
                headers=headers,
            )
        )

    @property
    def _read_by_score(self) -> list[Operand]:
        """The arrays that score_mod and mask_mod read, and the tangents of these that are given."""
        moved = (f"t{name}" for name in self.problem.moved_score_args)
        return [*dict(self.problem.score_args).values(), *(self.arrays[name] for name in moved if name in self.arrays)]


# Options that make no difference to the helper kernels, and the macros that tell of them. Those kernels
# are compiled without these options, so that one compilation serves all combinations.
_IGNORED: dict[str, tuple[str, ...]] = {
    **{name: (DEFINES[name],) for name in PAIR_OPTIONS if name in DEFINES},
    "bias": (DEFINES["bias"], "CUFLASH_BIAS_OF_ROWS", "CUFLASH_BIAS_OF_PAIRS", "CUFLASH_BIAS_OF_KEYS"),
    "mask": (DEFINES["mask"], "CUFLASH_MASK_OF_KEYS", "CUFLASH_MASK_BY_BITS"),
    "block_mask": (
        "CUFLASH_MASK_BLOCK_M",
        "CUFLASH_MASK_BLOCK_N",
        "CUFLASH_HAS_BLOCK_INDEX",
        "CUFLASH_HAS_TILE_CLASSES",
    ),
    "dropout": ("CUFLASH_HAS_DROPOUT",),
    "scale": ("CUFLASH_SCALE_IN_EXPONENT", "CUFLASH_NATURAL_SCORES"),
    "q_scale": ("CUFLASH_Q_SCALE", "CUFLASH_FLOAT8_QUERIES"),
    "k_scale": ("CUFLASH_K_SCALE",),
    "v_scale": ("CUFLASH_V_SCALE",),
    "score": ("CUFLASH_HAS_SCORE_FUNCTION", "CUFLASH_SCORE_CHANGES_SLOPE"),
    "mask_function": ("CUFLASH_HAS_MASK_FUNCTION",),
}
# Which of these options a helper kernel needs all the same.
_NEEDED = {
    "block_index.cu": (*MASKS, "mask_function"),
    "tile_order.cu": (),
    "mask_bits.cu": MASKS,
    "scores_reduce.cu": ("bias",),
    "split_combine.cu": ("scale",),
    "sinks.cu": ("scale",),
    "backward_preprocess.cu": tuple(name for name in _IGNORED if name != "dropout" and name not in FP8_SCALES),
    "backward_postprocess.cu": ("dropout",),
    "score_args_gradients.cu": ("score",),
    "hoisted.cu": ("score",),
    "mask_tiles.cu": ("mask", "mask_function"),
}


def _ignored(source: str, needed: Collection[str] | None) -> tuple[str, ...]:
    """Options that a source does not need."""
    folder, _, file = source.rpartition("/")
    needed = _NEEDED.get(file, ()) if needed is None else needed
    return tuple(name for name in _IGNORED if name not in needed) if folder == "helpers" else ()


def functions_header(program: Program, gradients: Collection[str] = ()) -> tuple[str, str]:
    """The name and the source of the header with score_mod and mask_mod. Equal sources have one name."""
    source = program.header([name[1:] for name in gradients])
    return f"functions_{hashlib.sha256(source.encode()).hexdigest()[:32]}.cuh", source


def _is_narrow(operand: Operand) -> bool:
    """Whether 32 bits hold how far after the first one each element of an array is."""
    axes = list(zip(operand.shape, operand.strides, strict=True))
    return all(stride >= 0 for _, stride in axes) and sum((n - 1) * stride for n, stride in axes) < 2**31


def check_blocks(blocks: int) -> None:
    if blocks > 2**31 - 1:
        raise NotImplementedError(f"q: got {blocks} tiles, expected at most 2**31 - 1 in one launch; split the batch")


DTYPE_TAGS = {
    **{"float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32", "float64": "Float64"},
    **{"float8_e4m3fn": "Float8E4M3", "float8_e5m2": "Float8E5M2"},
}


def common_defines(
    problem: Problem, device: DeviceSpec, load_bytes: int, store_bytes: int, *, natural: bool
) -> dict[str, str | int]:
    changes_scores = any(name in CAPS or f"d{name}" in SCORE_GRADIENTS for name in problem.acting)
    changes_scores = changes_scores or problem.score is not None
    indexes_function = problem.mask_function is not None and not problem.is_packed
    inputs = {row.define: _define_of(getattr(problem, row.name), row) for row in OPTIONAL_INPUTS if row.define}
    numbers = {DEFINES[name]: int(getattr(problem, name) is not None) for name in CAPS}
    return {
        **inputs,
        **numbers,
        "CUFLASH_BIAS_OF_ROWS": int(problem.bias is not None and problem.bias.strides[2:] == (1, 0)),
        "CUFLASH_ARCH": device.arch,
        "CUFLASH_DTYPE": DTYPE_TAGS[problem.dtype],
        "CUFLASH_KV_DTYPE": DTYPE_TAGS[problem.k.dtype],
        "CUFLASH_FLOAT8_QUERIES": int(problem.multiplies_float8),
        "CUFLASH_Q_SCALE": int(problem.q_scale is not None),
        "CUFLASH_K_SCALE": _scale_class(problem, "k_scale"),
        "CUFLASH_V_SCALE": _scale_class(problem, "v_scale"),
        "CUFLASH_ROUNDS_TO_TF32": int("tf32" in option_names(problem)),
        "CUFLASH_HEAD_DIM": problem.head_dim,
        "CUFLASH_HEAD_DIM_V": problem.head_dim_v,
        "CUFLASH_LOAD_BYTES": load_bytes,
        "CUFLASH_STORE_BYTES": store_bytes,
        "CUFLASH_STORES_BY_ROWS": 0,
        "CUFLASH_V_IN_K": 0,
        "CUFLASH_HAS_RIGHT_BOUND": int(problem.window_right is not None),
        "CUFLASH_HAS_LEFT_BOUND": int(problem.window_left is not None),
        "CUFLASH_MASK_BLOCK_M": problem.block_size[0],
        "CUFLASH_MASK_BLOCK_N": problem.block_size[1],
        "CUFLASH_HAS_DROPOUT": int(problem.dropout > 0),
        "CUFLASH_PACKED": {"top_left": 1, "bottom_right": 2}[problem.alignment] if problem.is_packed else 0,
        "CUFLASH_SCALE_IN_EXPONENT": int(not changes_scores and problem.scale > 0),
        "CUFLASH_NATURAL_SCORES": int(natural),
        "CUFLASH_LSE_HAS_SINKS": 0,
        "CUFLASH_HAS_SCORE_FUNCTION": int(problem.score is not None),
        "CUFLASH_SCORE_CHANGES_SLOPE": int(problem.score is not None and problem.program.changes_slope),
        "CUFLASH_HAS_MASK_FUNCTION": int(problem.mask_function is not None),
        "CUFLASH_NEEDS_SCORE_ARGS": 0,
        "CUFLASH_PAGE_SIZE": problem.page_size,
        "CUFLASH_FOLLOWS_LENGTHS": int(problem.follows_lengths),
        "CUFLASH_PARAMS_BYTES": bytes_without_functions(problem),
        "CUFLASH_PAIRS": 0,
        "CUFLASH_DYNAMIC_TILES": 0,
        "CUFLASH_BATCH_FIRST": 0,
        "CUFLASH_MASK_OF_KEYS": 0,
        "CUFLASH_MASK_BY_BITS": 0,
        "CUFLASH_HAS_BLOCK_INDEX": int(problem.block_mask is not None or indexes_function),
        "CUFLASH_HAS_TILE_ORDER": 0,
        "CUFLASH_HAS_TILE_CLASSES": 0,
        "CUFLASH_HAS_BIAS_TILE_CLASSES": 0,
        "CUFLASH_CHOSEN_BY_BIAS": 0,
        "CUFLASH_PLAIN_FRAGMENTS": 0,
    }


def has_natural_scores(problem: Problem) -> bool:
    """Whether kernels multiply products, or their tanh, by their factor before the softmax (common/config.cuh)."""
    if problem.has_added_terms or problem.score is not None:
        return True
    if not (caps := problem.given(CAPS)):
        return problem.scale <= 0
    is_folded = caps == ("softcap",) and problem.softcap is not None and problem.softcap <= MOST_FOLDED_SOFTCAP
    return not is_folded or problem.sinks is not None


def _scale_class(problem: Problem, name: Literal["k_scale", "v_scale"]) -> int:
    """How kernels read a scale of keys or values: 0 (there is none), 1 (all keys of a head share it), 2 (others)."""
    operand: Operand | None = getattr(problem, name)
    if operand is None:
        return 0
    of_page, _, of_keys = operand.strides
    return 1 if of_keys == 0 and (problem.block_table is None or of_page == 0) else 2


def _define_of(operand: Operand | None, row: OptionalInput) -> int:
    """What the macro of an optional input is defined as."""
    if operand is None:
        return 0
    return ITEMSIZE[operand.dtype] if row.define.endswith("_BYTES") else 1


def _symbol(source: str, problem: Problem, tile: Tile, ignored: Collection[str]) -> str:
    """The kernel's symbol spells its source and its configuration, for profilers."""
    dims = f"d{problem.head_dim}" + (f"x{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    file = source.removesuffix(".cu").replace("/", "_")
    options = [name for name in option_names(problem) if name not in ignored]
    return "_".join([file, problem.dtype, dims, f"{tile.block_m}x{tile.block_n}", *options])
