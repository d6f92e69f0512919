"""A plan in the making, to which families add their kernels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from cuflash.arrays.array_info import ITEMSIZE, Operand
from cuflash.plan.argument import maps_offset, params_bytes
from cuflash.plan.defines import defines_without, ignored_options
from cuflash.plan.device import DeviceSpec
from cuflash.plan.launch_plan import FilledTable, KernelSpec, RunTime, option_names
from cuflash.plan.tensor_map import BYTES as TENSOR_MAP_BYTES
from cuflash.plan.tensor_map import TensorMapSpec, tensor_map_spec, why_not
from cuflash.plan.tiles import Tile
from cuflash.plan.traffic import Model
from cuflash.score_mod import Program
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, FORWARD, Pass
from cuflash.spec.problem import Problem

TABLE_WARPS = 8  # warps of a block that fills tables
# What a kernel does for gradients of arrays that the score reads: CUFLASH_NEEDS_SCORE_ARGS of
# kernels/common/score/score_args_gradients.cuh.
FINDS_LARGEST, ADDS_SCORE_ARGS, SUMS_SCORE_ARGS = 1, 2, 3
# Under a causal mask tiles differ in length, so the long ones of this many heads start first. On an H200 that gains 9 %
# at head_dim 128 and seqlen 4096. Without a mask, one head at a time makes better use of L2.
CAUSAL_HEAD_SECTION = 16
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
    origin: str  # where tiles come from that the caller gives, in place of the tables
    program: Program  # what kernels compute of score_mod and mask_mod
    tables: tuple[FilledTable, ...] = ()  # tables of the program, which a kernel fills
    tiles: tuple[Tile, ...] = ()
    kernels: list[KernelSpec] = field(default_factory=list)
    models: list[Model | None] = field(default_factory=list)  # of what each main kernel moves
    scratch: dict[str, int] = field(default_factory=dict)
    tensor_maps: tuple[TensorMapSpec, ...] = ()
    # By the name of an array, the scratch array with its copy, which TMA reads in its place.
    copies: dict[str, Operand] = field(default_factory=dict)
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
        mapped = {
            name: (f"{name}_copy", self.copies[name]) if name in self.copies else (name, arrays[name]) for name in rows
        }
        self.tensor_maps = tuple(
            tensor_map_spec(*mapped[name], n, heads.get(name, 1), read_once=read_once) for name, n in rows.items()
        )
        self.defines["CUFLASH_ARGUMENT_BYTES"] = maps_offset(self.problem) + len(rows) * TENSOR_MAP_BYTES

    def set(self, **integers: int) -> None:
        """Set fields of `run_time`."""
        self.run_time = replace(self.run_time, **integers)

    def add_main(self, source: str, tile: Tile, blocks: int, makes: Collection[str] = (), /, **defines: int) -> None:
        """Add a kernel that iterates over the block-sparse index if there is one.

        If the bias decides that, two kernels are added, and the name of one says that it is the one with the index.
        """
        shared_bytes = tile.shared_bytes(*self.padded_dims(tile))
        if not self.chosen_by_bias:
            self.add(source, tile, blocks, shared_bytes, makes, **defines)
            return
        for has_index, suffix in ((0, ()), (1, ("listed",))):
            chosen = defines | {"CUFLASH_HAS_BLOCK_INDEX": has_index, "CUFLASH_CHOSEN_BY_BIAS": 1}
            self.add(source, tile, blocks, shared_bytes, (*makes, *suffix), **chosen)

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

        `needed` are the options that it needs, of those that most helper kernels ignore (`ignored_options`).
        """
        check_blocks(blocks)
        ignored = ignored_options(source, needed)
        name = "_".join((_symbol(source, self.problem, tile, ignored), *makes))
        # Kernels without blocks are not launched.
        overlaps = self.device.overlaps_launches and any(kernel.grid for kernel in self.kernels)
        all_defines = self.defines | tile.defines() | defines | {"CUFLASH_OVERLAPS_PREVIOUS": int(overlaps)}
        all_defines |= defines_without(ignored)
        if source.startswith("helpers/"):
            all_defines.pop("CUFLASH_ARGUMENT_BYTES", None)  # they have no tensor maps
        all_defines |= {"CUFLASH_SHARED_BYTES": shared_bytes, "CUFLASH_KERNEL_NAME": name}
        headers: tuple[tuple[str, str], ...] = ()
        if all_defines["CUFLASH_HAS_SCORE_FUNCTION"] or all_defines["CUFLASH_HAS_MASK_FUNCTION"]:
            header = self._functions_header(all_defines["CUFLASH_NEEDS_SCORE_ARGS"])
            headers = (header,)
            all_defines |= {"CUFLASH_FUNCTIONS": f'"{header[0]}"', "CUFLASH_PARAMS_BYTES": params_bytes(self.problem)}
            all_defines["CUFLASH_NARROW_SCORE_ARGS"] = int(all(map(_is_narrow, self._read_by_score)))
        self.kernels.append(
            KernelSpec(
                source=source,
                name=name,
                target=self.device.target_for(source),
                defines=tuple(sorted(all_defines.items())),
                grid=blocks,
                threads=32 * int(all_defines["CUFLASH_NUM_WARPS"]),
                shared_bytes=shared_bytes,
                overlaps_previous=overlaps,
                headers=headers,
            )
        )

    def _functions_header(self, needs_score_args: int | str) -> tuple[str, str]:
        """The header of a kernel with such a CUFLASH_NEEDS_SCORE_ARGS."""
        # Kernels that add the gradients of arrays pair by pair index the arrays themselves, without tables.
        by_pairs = needs_score_args in (FINDS_LARGEST, ADDS_SCORE_ARGS)
        program = self.problem.unhoisted if by_pairs else self.program
        return functions_header(program, self.score_arg_gradients if needs_score_args else ())

    @property
    def _read_by_score(self) -> list[Operand]:
        """The arrays that score_mod and mask_mod read, and the tangents of these that are given."""
        moved = (f"t{name}" for name in self.problem.moved_score_args)
        return [*dict(self.problem.score_args).values(), *(self.arrays[name] for name in moved if name in self.arrays)]


def functions_header(program: Program, gradients: Collection[str] = ()) -> tuple[str, str]:
    """The name and the source of the header with score_mod and mask_mod. Equal sources have one name."""
    source = program.header([name[1:] for name in gradients])
    return f"functions_{hashlib.sha256(source.encode()).hexdigest()[:32]}.cuh", source


def _is_narrow(operand: Operand) -> bool:
    """Whether 32 bits hold the offset of each element of an array from the first one."""
    axes = list(zip(operand.shape, operand.strides, strict=True))
    return all(stride >= 0 for _, stride in axes) and sum((n - 1) * stride for n, stride in axes) < 2**31


def check_blocks(blocks: int) -> None:
    """Refuse a launch of more blocks than a grid may have."""
    if blocks > 2**31 - 1:
        raise NotImplementedError(f"q: got {blocks} tiles, expected at most 2**31 - 1 in one launch; split the batch")


def _symbol(source: str, problem: Problem, tile: Tile, ignored: Collection[str]) -> str:
    """The kernel's symbol spells its source and its configuration, for profilers."""
    dims = f"d{problem.head_dim}" + (f"x{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    file = source.removesuffix(".cu").replace("/", "_")
    options = [name for name in option_names(problem) if name not in ignored]
    return "_".join([file, problem.dtype, dims, f"{tile.block_m}x{tile.block_n}", *options])
