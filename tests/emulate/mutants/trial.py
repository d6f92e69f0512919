"""One pass of one case with one plan, on which a mutant is run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import cuflash.testing as ct
from cuflash import emulator
from cuflash.emulator.memory import Scratch
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm80.decode import DecodeTile
from cuflash.plan.sm80.narrow import NarrowTile
from cuflash.plan.sm80.tiles import ChunkedTile, DqTile, ForwardTile
from cuflash.plan.sm90.chunked import ForwardChunkedSm90Tile
from cuflash.plan.sm90.decode_tiles import DecodeSm90Tile
from cuflash.plan.sm90.tiles import ForwardFloat8Sm90Tile, ForwardFloat32Sm90Tile, ForwardSm90Tile
from cuflash.plan.sm90.wide_tiles import (
    ForwardWideSm90Tile,
)
from cuflash.plan.tiles import Tile
from cuflash.spec.options import Origin
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.testing.float8 import assert_float8
from tests.emulate import attention, merges
from tests.emulate.checks import judge_both_passes, judge_functions
from tests.emulate.reduced import reduced
from tests.reductions import judge
from tests.row_reductions import BehindSink
from tests.scored import few_tiles


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One pass of one case with one plan."""

    case: ct.Case
    tiles: tuple[Tile, ...]
    allocate: attention.Allocate = attention.guarded
    arch: str = "9.0"
    num_sms: int = 132
    schedule: emulator.Schedule = emulator.SCHEDULES[0]
    dq_in_order: bool = False  # deterministic, without a kernel of its own for dq
    kv_lengths: tuple[int, ...] | None = None  # instead of those of the case, which they are clamped to
    wild_pages: bool = False  # the first entries of the table are outside of the pool; where they lead is what counts
    need: tuple[str, ...] | None = None  # gradients; by default dq, dk, dv, and dsinks where there are sinks
    cu_seqlens: tuple[int, ...] | None = None  # of queries and keys: nothing is expected of results
    splits: bool = False  # queries of tiles, however few, and not heads of a group
    combines: bool = True  # the last block of a head does; else a kernel of its own
    wide: tuple[str, ...] = ()  # gradients in the dtype of the softmax
    found_counts: tuple[int, ...] = ()  # of arrivals of blocks, in memory: the call runs once for each
    origin: Origin | None = None  # of a part of a longer problem
    hides: bool = False  # the bias is -inf in blocks of 64 x 64 pairs, and is looked at beforehand

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        names = ("SPLIT_STEPS", "SUM_STEPS", "SUM_STEPS_PER_PARTIAL", "WAVES", "CAUSAL_WAVES") if self.splits else ()
        with (
            mock.patch("cuflash.plan.key_splits.COMBINE_PIECES", 2**20 if self.combines else 0),
            mock.patch.dict("cuflash.plan.backward.__dict__", dict.fromkeys(names, 0)),
            mock.patch.dict("cuflash.plan.block_index.__dict__", {"LOOK_BIAS_FLOPS": 0} if self.hides else {}),
        ):
            self._run(kernels)

    def _run(self, kernels: Path | None) -> None:
        case, arrays = self.case, self.case.arrays()
        deterministic = self.dq_in_order or isinstance(self.tiles[-1], DqTile)
        two_terms = getattr(self.tiles[0], "bf16_terms", 3) == 2
        precision = "tf32" if two_terms else "highest"
        options: dict[str, Any] = {"deterministic": deterministic, "precision": precision, "wide": self.wide}
        if self.hides:
            _make_holes(arrays["bias"])
        problem = attention.problem_of(case, arrays, **options, origin=self.origin or Origin())
        out, lse = attention.forward_by_oracle(problem, arrays, **case.random)
        if self.kv_lengths:
            arrays["kv_lengths"][...] = self.kv_lengths
        if self.wild_pages:
            _make_wild(arrays)
        if self.cu_seqlens:
            arrays["cu_seqlens_q"][...] = arrays["cu_seqlens_k"][...] = self.cu_seqlens
        launches: list[emulator.Statistics] = []
        how: dict[str, Any] = {
            "arch": replace(DeviceSpec.for_arch(self.arch), num_sms=self.num_sms),
            "tiles": self.tiles,
            "allocate": self.allocate,
            "kernels": kernels,
            "schedule": self.schedule,
            "statistics": launches,
            **case.random,
        }
        of_forward = ForwardTile | ForwardSm90Tile | ForwardFloat32Sm90Tile | ForwardFloat8Sm90Tile | DecodeSm90Tile
        is_forward = isinstance(self.tiles[0], of_forward | DecodeTile | ForwardWideSm90Tile | ForwardChunkedSm90Tile)
        if is_forward or type(self.tiles[0]) in (ChunkedTile, NarrowTile):
            for count in self.found_counts:
                scratch = Scratch(choose_plan(problem, how["arch"], tiles=how["tiles"]).scratch_layout, 0xFF)
                scratch.array("arrivals", np.uint64)[...] = count
                for _ in "12":  # as a captured graph is replayed
                    ct.assert_forward(case, *attention.forward(problem, arrays, scratch=scratch, call=1, **how))
            names: tuple[str, ...] = ("out", "lse")
            results: tuple[np.ndarray, ...] = attention.forward(problem, arrays, **how)
        else:
            names = self.need or (*DEFAULT_NEED, *(("dsinks",) if case.sinks else ()))
            results = attention.backward(problem, arrays, out, lse, need=names, **how)
        if self.cu_seqlens:
            return
        found = dict(zip(names, results, strict=True))
        if two_terms:
            attention.assert_tf32_split(problem, arrays, found)
        elif isinstance(self.tiles[0], ForwardFloat8Sm90Tile):
            assert_float8(case, *results)
        elif self.origin is not None or self.hides:
            judges = ct.yardsticks(problem, arrays, **case.random)
            measured = [ct.measure(name, x, judges[name]) for name, x in found.items()]
            if any(measurement.failure for measurement in measured):
                raise AssertionError("\n".join(map(str, measured)))
        elif "out" in found:
            ct.assert_forward(case, **found)
        else:
            ct.assert_backward(case, **found)
        conflicts = sum(launch.matrix_load_conflicts for launch in launches)
        if conflicts:
            raise AssertionError(f"{conflicts} bank conflicts")


@dataclass(frozen=True, kw_only=True)
class RowReductionTrial:
    """Both passes of a case with row reductions."""

    case: ct.Case
    arch: str = "9.0"
    deterministic: bool = False

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        judge_both_passes(self.case, self.arch, self.deterministic, kernels=kernels)


@dataclass(frozen=True, kw_only=True)
class MaximaTrial:
    """Both passes of a problem whose sinks leave no weight to maxima that have gradients."""

    case: BehindSink
    dtype: str = "float32"
    arch: str = "8.0"

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        self.case.judge(self.dtype, attention.on_kernels(self.arch, kernels))


@dataclass(frozen=True, kw_only=True)
class FunctionTrial:
    """Both passes of a problem whose score or mask is one of the caller, by its name in tests/scored.py."""

    score: str | None = None
    mask: str | None = None
    dtype: str = "float32"
    arch: str = "8.0"
    score_args: bool = True  # gradients of arrays that the score reads are wanted
    num_sms: int | None = None  # few, and a block goes through several heads

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        case = few_tiles((self.score, self.mask), self.dtype)
        device = DeviceSpec.for_arch(self.arch)
        device = replace(device, num_sms=self.num_sms or device.num_sms)
        judge_functions(case, device, score_args=self.score_args, kernels=kernels)


@dataclass(frozen=True, kw_only=True)
class MergeTrial:
    """Operations on partial results."""

    columns: int

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        merges.check(self.columns, kernels)


@dataclass(frozen=True, kw_only=True)
class ReductionTrial:
    """Reductions of the attention weights: column sums, the column maximum and the strongest keys."""

    case: ct.Case
    arch: str = "8.0"
    count: int = 16

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        judge(self.case, *reduced(self.case, self.arch, self.count, kernels=kernels))


def _make_holes(bias: np.ndarray) -> None:
    """Let every head hide other blocks of pairs; in one of them a pair is visible."""
    heads, rows, keys = bias.shape
    for head, row, key in np.ndindex(heads, -(-rows // 64), -(-keys // 64)):
        if (head + row + key) % 2:
            bias[head, 64 * row : 64 * row + 64, 64 * key : 64 * key + 64] = -np.inf
    bias[0, 5, 127] = 0


def _make_wild(arrays: dict[str, Any]) -> None:
    """Make the first two pages of the table the first and the last one of the pool, and name them by other numbers."""
    table, last = arrays["block_table"], len(arrays["k"]) - 1
    for allocate, page, name in ((0, 0, -7), (1, last, last + 1)):
        old = table[0, allocate]
        for pool in (arrays["k"], arrays["v"]):
            pool[[old, page]] = pool[[page, old]]
        table[...] = np.where(table == old, page, np.where(table == page, old, table))
        table[0, allocate] = name
