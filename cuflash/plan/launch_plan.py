"""What runs for a pass: kernels, what they are launched with, and scratch memory. Plain data."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.arrays.units import WIDTH, in_bytes, in_seconds, wrapped
from cuflash.plan.device import DeviceSpec, why_by_lanes
from cuflash.plan.tensor_map import TensorMapSpec
from cuflash.plan.tiles import Tile, round_up
from cuflash.plan.traffic import Model, Traffic, predict
from cuflash.score_mod import Table
from cuflash.spec.passes import Pass
from cuflash.spec.problem import Problem

SCRATCH_ALIGNMENT = 256  # bytes, of each scratch array: what an allocation of its own would have


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One compilation of one kernel source, and how to launch it. Hashable."""

    source: str
    name: str
    target: str
    defines: tuple[tuple[str, str | int], ...]
    grid: int
    threads: int
    shared_bytes: int
    overlaps_previous: bool  # programmatic dependent launch (PDL): it may start early, and waits by itself
    headers: tuple[tuple[str, str], ...] = ()  # names and sources of headers besides those of kernels


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Integers that kernels of one compilation get at run time.

    They are declared here once: `cuflash.gpu.params` puts these fields, in this order, into the kernels' argument.
    """

    head_section: int = 1  # heads whose tiles are interleaved in the launch order
    stats_rows: int = 0  # rows of row_stats of one head, of all sequences where they are packed (backward)
    group_splits: int = 1  # blocks that share the query heads of a key/value head (backward)
    whole_tiles: int = 0  # tiles of keys before those whose queries blocks share, or of a chunk (backward)
    tail_splits: int = 1  # blocks that share the queries of each tile of keys after `whole_tiles` (backward)
    resident_blocks: int = 0  # blocks of a kernel, where each takes one tile after another
    index_batches: int = 1  # batch entries that have rows of the block-sparse index of their own
    index_heads: int = 1  # query heads that have them
    score_splits: int = 1  # blocks that share the sum of a tile of dbias
    sums_splits: int = 1  # blocks that share the keys of a tile of queries, for sums of gradients of scores
    clear_ahead: int = 0  # how many heads ahead a block clears accumulators of dq; 0: no block does
    mask_batches: int = 1  # batch entries that have mask bits or tile classes of their own
    mask_heads: int = 1  # query heads that have them


@dataclass(frozen=True, kw_only=True)
class FilledTable:
    """A table that a kernel fills before those that compute scores."""

    table: Table
    shape: tuple[int, int, int]  # batch entries, heads and positions
    first: int  # the position of the first entry

    @property
    def strides(self) -> tuple[int, int, int]:
        """Strides in elements; 0 where all batch entries, or all heads, share one row."""
        batch, heads, positions = self.shape
        return heads * positions if batch > 1 else 0, positions if heads > 1 else 0, 1

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * ITEMSIZE[self.table.dtype]


@dataclass(frozen=True)
class ScratchLayout:
    """Where the scratch arrays of a call lie in one allocation, in bytes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """One array after the other, each aligned."""
        return tuple(itertools.accumulate(self._rounded[:-1], initial=0)) if self.sizes else ()

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return sum(self._rounded)

    @property
    def _rounded(self) -> list[int]:
        return [round_up(size, SCRATCH_ALIGNMENT) for size in self.sizes]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What runs for one pass of one problem: kernels in order, scratch memory, and why."""

    pass_: Pass
    problem: Problem
    device: DeviceSpec
    tiles: tuple[Tile, ...]
    kernels: tuple[KernelSpec, ...]
    key_splits: int  # split-KV: the most blocks that split the keys of a KV head (decode)
    run_time: RunTime
    scratch: tuple[tuple[str, int], ...]  # arrays besides inputs and results, in elements of lse's dtype
    tensor_maps: tuple[TensorMapSpec, ...]  # they follow the parameters
    reason: str
    tables: tuple[FilledTable, ...] = ()  # what kernels read in place of subexpressions of the score
    need: tuple[str, ...] = ()  # results that are computed
    any_length: bool = False  # it serves every seqlen_k that has the same `planned_length`
    models: tuple[Model | None, ...] = ()  # how `cuflash.plan.traffic` models each main kernel
    hides_last_keys: bool = False  # it hides all after the last key: tensor maps of k and v may reach over it
    resources: tuple[str, ...] = ()  # registers and spills of each kernel, once compiled
    tuned_flops_per_s: float = 0  # the rate that tuning measured on this device; 0 if it did not

    @property
    def scratch_layout(self) -> ScratchLayout:
        """Where the scratch arrays lie."""
        size = ITEMSIZE[self.problem.softmax_dtype]
        return ScratchLayout(
            tuple(name for name, _ in self.scratch), tuple(size * elements for _, elements in self.scratch)
        )

    @property
    def extra_bytes(self) -> int:
        """Device memory taken for the duration of a call besides inputs and results."""
        return self.scratch_layout.nbytes

    @property
    def scratch_sizes(self) -> dict[str, int]:
        """Bytes of each scratch array."""
        layout = self.scratch_layout
        return dict(zip(layout.names, layout.sizes, strict=True))

    @property
    def traffic(self) -> Traffic | None:
        """Bytes that the pass moves, by the model of `cuflash.plan.traffic`; None where it has none."""
        return predict(self)

    @property
    def least_seconds(self) -> float | None:
        """The least time that memory and matrix products take, by the model of `traffic`; None where it has none."""
        return self.traffic.seconds(self.device.bytes_per_s, self._flops_per_s) if self.traffic else None

    @property
    def about_seconds(self) -> float | None:
        """The time by the rate that tuning measured; None without one."""
        return self.pass_.flops(self.problem) / self.tuned_flops_per_s if self.tuned_flops_per_s else None

    def noted(self, note: str) -> LaunchPlan:
        """The plan with a note before its reasons."""
        return replace(self, reason=f"{note}\n{self.reason}")

    def describe(self, verbose: bool = False, width: int = WIDTH) -> str:
        """The plan in words: a line that says what runs, how long, and the extra memory, then a line a fact.

        Parameters
        ----------
        verbose : bool, default False
            Also the tiles and the families of kernels that were not taken, and why.
        width : int, default 100
            Columns at which lines are wrapped; 0 for none.
        """
        p = self.problem
        as_arch = "as if it had " if self.device.compiled_for else ""
        wanted = "" if self.need in ((), self.pass_.default) else f" for {', '.join(self.need)}"
        options = ", ".join(option_names(p)) or "no options"
        options += f"; tangents of {', '.join(p.moved)}" if p.moved else ""
        lines = [
            f"{self.pass_} pass{wanted} on {self.device.name} ({as_arch}compute capability "
            f"{self.device.arch / 10:.1f}): {self._in_short()}",
            f"  problem: {p.dtype}, batch {p.batch}, heads {p.num_heads}/{p.num_heads_kv}, seqlen {p.seqlen_q} x "
            f"{p.seqlen_k}, head_dim {p.head_dim}/{p.head_dim_v}; {options}",
        ]
        for kernel, launches in Counter(self.kernels).items():
            resources = f", {self.resources[self.kernels.index(kernel)]}" if self.resources else ""
            times = f", launched {launches} times" if launches > 1 else ""
            lines.append(
                f"  kernel {kernel.name}: grid {kernel.grid}, {kernel.threads} threads, "
                f"{in_bytes(kernel.shared_bytes)} of shared memory{resources}{times}"
            )
        if p.has_functions:
            tables = [filled.table for filled in self.tables]
            lines.extend(f"  {line}" for line in p.program.describe(tables).splitlines())
        for filled in self.tables:
            lines.append(f"  {filled.table.name}: a table of {in_bytes(filled.nbytes)}, which a kernel fills")
        if traffic := self.traffic:
            lines.append(f"  {traffic.describe(self.device.bytes_per_s, self._flops_per_s)}")
        lines.extend(f"  {line}" for line in self.reason.splitlines() if verbose or not line.startswith("not "))
        return wrapped(lines, width)

    @property
    def _flops_per_s(self) -> float:
        """The rate of matrix products in the problem's dtype; 0 where it is not known."""
        is_half = why_by_lanes(self.problem.dtype, self.device) is None and ITEMSIZE[self.problem.dtype] == 2
        return self.device.flops_16_bit if is_half else 0

    def _in_short(self) -> str:
        """What runs, the time as tuned or else the least, and the memory in addition to arguments and results."""
        count = sum(kernel.grid > 0 for kernel in self.kernels)
        found = [f"{count or 'no'} kernel{'' if count == 1 else 's'}"]
        seconds = self.least_seconds or 0
        if self.about_seconds:
            found.append(f"about {in_seconds(self.about_seconds)}")
        elif seconds >= 1e-6:  # launches take longer than that
            found.append(f"at least {in_seconds(seconds)}")
        found.append(f"{in_bytes(self.extra_bytes) if self.extra_bytes else 'no'} extra memory")
        return ", ".join(found)


def option_names(problem: Problem) -> list[str]:
    """Names of what makes the kernels of this problem differ from plain attention."""
    return [
        name
        for name, on in (
            ("right_bound", problem.window_right is not None),
            ("left_bound", problem.window_left is not None),
            *((name, True) for name in problem.acting),
            ("lengths_diagonal", problem.follows_lengths and problem.page_size == 0),
            (f"pages{problem.page_size}", problem.page_size > 0),
            ("packed", problem.is_packed and problem.alignment == "bottom_right"),
            ("packed_top_left", problem.is_packed and problem.alignment == "top_left"),
            (problem.k.dtype, problem.has_float8),
            ("fp8_matmul", problem.multiplies_float8),
            ("q_scale", problem.q_scale is not None),
            ("k_scale", problem.k_scale is not None),
            ("v_scale", problem.v_scale is not None),
            ("dropout", problem.dropout > 0),
            ("score", problem.score is not None),
            ("mask_function", problem.mask_function is not None),
            ("tf32", problem.dtype == "float32" and problem.precision == "tf32"),
        )
        if on
    ]
