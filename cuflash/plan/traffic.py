"""What a plan moves: tiles to SMs, and bytes through device memory. A model, without a device.

Its two numbers are easily confused. Blocks load tiles to shared memory, mostly from L2: for N keys and queries of head
dimension d, and M bytes of shared memory, that is the N^2 d^2 / M of the literature (`Traffic.tiles`). Less comes from
device memory (`Traffic.read`), because blocks that run side by side iterate over the same operands, and the first of
them brings these to L2 for all.

The first number is exact for problems whose visible tiles follow from shapes and windows. Pairs that masks, lengths in
an array and block masks hide are taken as visible, and packed sequences as equally long. The second number rests on a
model of L2 (`OperandLoop.read`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.arrays.units import in_bytes
from cuflash.plan.device import DeviceSpec
from cuflash.plan.tiles import Tile
from cuflash.spec.inputs import OPTIONAL_INPUTS
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, COLUMN_MAX, COLUMN_SUMS, FORWARD, JVP, Pass
from cuflash.spec.problem import Problem

# The fraction of L2 that holds what blocks share: each of its two halves keeps a copy of what its SMs read, as
# the vendor describes it for compute capability 8.0 and 9.0. The rest of a half holds what passes through; its size was
# fitted to the counters of an H200.
L2_FRACTION = 0.42
MASK_READERS = ("helpers/mask_bits.cu", "helpers/mask_tiles.cu")  # kernels that read a mask once, for all others
# What the blocks of a main kernel own: tiles of queries, equal splits of the keys of all heads (decode), tiles of keys,
# those of them that some query attends to, tiles of queries for dq alone, or tiles of keys of a query head
# (all of them, or those that some query attends to).
Model = Literal[
    "queries",
    "splits of keys",
    "keys",
    "visible keys",
    "queries of dq",
    "keys of query heads",
    "visible keys of query heads",
]


class Plan(Protocol):
    """What the model reads of a `LaunchPlan`."""

    @property
    def pass_(self) -> Pass: ...
    @property
    def problem(self) -> Problem: ...
    @property
    def device(self) -> DeviceSpec: ...
    @property
    def tiles(self) -> tuple[Tile, ...]: ...
    @property
    def kernels(self) -> tuple[Any, ...]: ...
    @property
    def models(self) -> tuple[Model | None, ...]: ...
    @property
    def run_time(self) -> Any: ...
    @property
    def need(self) -> tuple[str, ...]: ...
    @property
    def scratch_sizes(self) -> dict[str, int]: ...
    @property
    def extra_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a pass moves."""

    tiles: int  # of operands and row statistics, from L2 or memory to shared memory
    added: int = 0  # to the dq accumulator, in L2 or memory
    read: int  # from device memory
    written: int  # to device memory
    least: int  # from and to device memory, if only inputs and results are moved, each once
    flops: int

    @property
    def moved(self) -> int:
        """Bytes through device memory, both ways."""
        return self.read + self.written

    def describe(self, bytes_per_s: float, flops_per_s: float = 0) -> str:
        """A line for a plan, with the roofs that these rates of memory and products imply; 0 where one is not known."""
        intensity = self.flops / max(self.moved, 1)
        sums = f" and {in_bytes(self.added)} of dq atomics" if self.added else ""
        line = (
            f"memory model: {in_bytes(self.read)} read, {in_bytes(self.written)} written (at least "
            f"{in_bytes(self.least)}); {in_bytes(self.tiles)} of tile loads{sums} through L2; "
            f"{intensity:.0f} FLOP/byte"
        )
        if bytes_per_s:
            roofline = min(intensity * bytes_per_s, flops_per_s or math.inf)
            line += f", roofline {roofline / 1e12:.4g} TFLOP/s at {bytes_per_s / 1e12:.4g} TB/s"
        if bytes_per_s and flops_per_s:
            line += f"; matrix products at {flops_per_s / 1e12:.4g} TFLOP/s"
        return line

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The least time that memory and products take at such rates; 0 stands for a rate that is not known."""
        return max(self.moved / bytes_per_s if bytes_per_s else 0, self.flops / flops_per_s if flops_per_s else 0)


def predict(plan: Plan) -> Traffic | None:
    """The traffic of a plan; None if it has a kernel whose tiles are not modelled."""
    problem = plan.problem
    if not plan.models or None in plan.models or not problem.visible_pairs:
        return None
    if problem.has_float8 or "score_arg_sums" in plan.scratch_sizes:
        return None
    return _TRAFFIC[plan.pass_](plan)


# ---- Tiles that are visible ------------------------------------------------------------------------------------------


def key_rows(problem: Problem, block_m: int, block_n: int) -> list[int]:
    """Rows of keys that each tile of queries of a head loads."""
    rows = []
    for first in range(0, problem.seqlen_q, block_m):
        last = min(first + block_m, problem.seqlen_q) - 1
        # Not from `key_range`: it clips a start past the last key to the end of the keys, which may be within a tile.
        start = 0 if problem.window_left is None else max(0, first + problem.diagonal - problem.window_left)
        start = start // block_n * block_n
        stop = -(-problem.key_range(last)[1] // block_n) * block_n
        rows.append(max(0, min(stop, problem.seqlen_k) - start))
    return rows


def query_tiles(problem: Problem, block_m: int, block_n: int) -> list[range]:
    """Tiles of queries that attend to each tile of keys of a head."""
    ranges = []
    for first in range(0, problem.seqlen_k, block_n):
        start, stop = 0, -(-problem.seqlen_q // block_m)
        if problem.window_right is not None:
            start = max(0, first - problem.diagonal - problem.window_right) // block_m
        if problem.window_left is not None:
            last = first + block_n - 1
            stop = min(stop, -(-max(0, last - problem.diagonal + problem.window_left + 1) // block_m))
        ranges.append(range(min(start, stop), stop))
    return ranges


def _plain_row_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes of a row of q or k, and of a row of v or dout, without tangents."""
    return problem.head_dim * ITEMSIZE[problem.dtype], problem.head_dim_v * ITEMSIZE[problem.dtype]


@dataclass(frozen=True)
class _RowBytes:
    """Bytes of a row of inputs, with the tangents that there are: of q, of k and v together, and of dout."""

    q: int
    keys: int
    dout: int

    @classmethod
    def of(cls, problem: Problem) -> _RowBytes:
        of_q, of_v = _plain_row_bytes(problem)
        q, k, v = (1 + (name in (problem.moved or ())) for name in ("q", "k", "v"))
        return cls(q * of_q, k * of_q + v * of_v, of_v)


# ---- Device memory ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OperandLoop:
    """Blocks that iterate over the operands of their heads: `at_once` of them run side by side, then as many others.

    In launch order, the first tiles of `section` heads come first, then their second tiles, and so on. Each tile after
    the first `whole` ones is split among `splits` blocks.
    """

    heads: int
    tiles_of_head: int
    section: int
    at_once: int
    whole: int
    splits: int = 1

    @property
    def heads_at_once(self) -> int:
        """Heads under way."""
        return min(self.heads, max(self.section, -(-self.at_once // self.tiles_of_head)))

    @property
    def passes(self) -> int:
        """How many passes over a head there are, for all heads. Blocks of a head that run side by side are one pass.

        A wave may reach from one section of heads into the next sequence. All splits of a tile are one pass.
        """
        splits = (self.heads * self.tiles_of_head - self.whole) * self.splits
        passes = self.section * -(-splits // self.at_once)
        for start in range(0, self.whole, self.at_once):
            stop, of_section = min(start + self.at_once, self.whole), self.section * self.tiles_of_head
            first, last = start // of_section, (stop - 1) // of_section
            if first < last:
                passes += min((first + 1) * of_section - start, self.section) + (last - first - 1) * self.section
                start = last * of_section
            passes += min(stop - start, self.section, self.heads - last * self.section)
        return passes

    def read(self, once: float, tiles: float, head_bytes: float, l2_bytes: float) -> float:
        """Bytes of an operand that are read from device memory, if blocks load `tiles` bytes of it in all.

        `once` is the size of the operand. The heads under way need `head_bytes` each, and a fraction of that stays in
        L2. Each further pass reads the rest again. So does each half of L2: its blocks are too far from those of the
        other to share what is soon evicted.
        """
        evicted = max(0, 1 - L2_FRACTION * l2_bytes / (self.heads_at_once * head_bytes))
        loaded = tiles * self.passes / (self.heads * self.tiles_of_head)
        return max(once, min(tiles, once + evicted * (2 * loaded - once)))


def _repeated_pair_bytes(plan: Plan) -> float:
    """Bytes of per-pair inputs that are read again: each head reads what is broadcast to it.

    If a kernel has looked at a mask beforehand, the others do not read it in tiles that are visible as a whole.
    """
    problem, repeated = plan.problem, 0.0
    looked_at = any(
        kernel.source in MASK_READERS and dict(kernel.defines)["CUFLASH_HAS_MASK"] for kernel in plan.kernels
    )
    for row in OPTIONAL_INPUTS:
        operand = getattr(problem, row.name)
        if operand is None or (row.name == "mask" and looked_at):
            continue
        if row.broadcasts and operand.nbytes > L2_FRACTION * plan.device.l2_bytes:
            arrays = 1 + (row.name in (problem.moved or ()))
            repeated += arrays * max(0, problem.visible_pairs * ITEMSIZE[operand.dtype] - operand.nbytes)
    return repeated


def _blocks_at_once(plan: Plan, tile: Tile, blocks: int) -> int:
    return max(1, min(blocks, plan.device.num_sms * tile.min_blocks))


def _forward(plan: Plan) -> Traffic:
    """Blocks own tiles of queries, or splits of the keys of all heads (decode)."""
    problem, tile = plan.problem, plan.tiles[0]
    sequence, row_bytes = problem.mean_sequence, _RowBytes.of(problem)
    heads, heads_kv = problem.batch * problem.num_heads, problem.batch * problem.num_heads_kv
    if "splits of keys" in plan.models:
        tiles, keys = _decoding(plan)
    else:
        rows = key_rows(sequence, tile.block_m, tile.block_n)
        key_tiles = heads * sum(rows) * row_bytes.keys
        keys = _keys_read(plan, tile, rows, key_tiles, persistent=plan.run_time.resident_blocks > 0)
        tiles = key_tiles + heads * sequence.seqlen_q * row_bytes.q
    result_bytes = row_bytes.dout + ITEMSIZE[problem.softmax_dtype]
    results = heads * sequence.seqlen_q * result_bytes * (1 + plan.pass_.has_tangents)
    least = plan.pass_.least_bytes(problem)
    read_once = least - results - heads_kv * sequence.seqlen_k * row_bytes.keys
    scratch = plan.extra_bytes if plan.extra_bytes > L2_FRACTION * plan.device.l2_bytes else 0
    return Traffic(
        tiles=tiles,
        read=round(read_once + keys + scratch + _repeated_pair_bytes(plan)),
        written=results + scratch,
        least=least,
        flops=plan.pass_.flops(problem),
    )


def _decoding(plan: Plan) -> tuple[int, float]:
    """Bytes of tiles, and of keys and values read, where blocks take equal splits of the keys of all heads."""
    problem, tile, blocks = plan.problem, plan.tiles[0], plan.run_time.resident_blocks
    of_q, of_v = _plain_row_bytes(problem)
    heads = problem.batch * problem.num_heads_kv
    (rows,) = key_rows(problem, problem.seqlen_q, tile.block_n)
    tiles_of_head = -(-rows // tile.block_n)
    cuts = (block * heads * tiles_of_head // blocks for block in range(1, blocks))
    loads_of_q = heads + sum(cut % tiles_of_head != 0 for cut in cuts)
    keys = heads * rows * (of_q + of_v)
    return keys + loads_of_q * problem.group_size * problem.seqlen_q * of_q, keys


def _backward(plan: Plan) -> Traffic:
    """Blocks own tiles of keys, of queries for dq alone, or both in two kernels."""
    problem, sequence, row_bytes = plan.problem, plan.problem.mean_sequence, _RowBytes.of(plan.problem)
    of_q, of_v = _plain_row_bytes(problem)
    heads, heads_kv = problem.batch * problem.num_heads, problem.batch * problem.num_heads_kv
    stats = _stats_bytes(plan)
    added = _added_to_dq(plan) if "dq_accumulator" in plan.scratch_sizes else 0
    loops = []
    if "keys" in plan.models or "visible keys" in plan.models:
        loops.append(_by_keys(plan, added, every="keys" in plan.models))
    if "queries of dq" in plan.models:
        loops.append(_by_queries(plan))
    tiles, read, written = (sum(column) for column in zip(*loops, strict=True))

    gradients = {"dq": heads * sequence.seqlen_q * of_q, "dk": heads_kv * sequence.seqlen_k * of_q}
    gradients["dv"] = heads_kv * sequence.seqlen_k * of_v
    results = sum(gradients.get(name.removeprefix("t"), 0) for name in plan.need)
    inputs = plan.pass_.least_bytes(problem) - sum(gradients.values())
    if inputs + results + plan.extra_bytes <= L2_FRACTION * plan.device.l2_bytes:  # all of it stays in L2
        read, written = inputs, results
    else:
        # An earlier kernel reads out, dout and lse, and leaves the statistics of rows. `loops` counts q, k and v.
        read += inputs - heads * sequence.seqlen_q * row_bytes.q - heads_kv * sequence.seqlen_k * row_bytes.keys
        bits = plan.scratch_sizes.get("mask_words", 0)
        written += results + stats + (bits if bits > L2_FRACTION * plan.device.l2_bytes else 0)
    return Traffic(
        tiles=round(tiles),
        added=added,
        read=round(read + _repeated_pair_bytes(plan)),
        written=round(written),
        least=inputs + results,
        flops=plan.pass_.flops(problem),
    )


def _columns(plan: Plan) -> Traffic:
    """A reduction over queries: a block owns a tile of keys of a query head."""
    problem, tile = plan.problem, plan.tiles[0]
    sequence, row_bytes = problem.mean_sequence, _RowBytes.of(problem)
    heads = problem.batch * problem.num_heads
    stats_of_row = 2 * ITEMSIZE[problem.softmax_dtype]
    query_blocks, every = query_tiles(sequence, tile.block_m, tile.block_n), "keys of query heads" in plan.models
    rows = sum(min(r.stop * tile.block_m, sequence.seqlen_q) - r.start * tile.block_m for r in query_blocks if r)
    of_queries = heads * (rows * row_bytes.q + sum(map(len, query_blocks)) * tile.block_m * stats_of_row)
    keys = sum(
        min(tile.block_n, sequence.seqlen_k - n * tile.block_n) for n, r in enumerate(query_blocks) if every or r
    )
    blocks = heads * len(query_blocks)
    loop = OperandLoop(
        heads=heads,
        tiles_of_head=len(query_blocks),
        section=min(plan.run_time.head_section, heads),
        at_once=_blocks_at_once(plan, tile, blocks),
        whole=blocks,
    )
    stats = _stats_bytes(plan)
    head_bytes = sequence.seqlen_q * (row_bytes.q + stats_of_row)
    queries = loop.read(heads * sequence.seqlen_q * row_bytes.q + stats, of_queries, head_bytes, plan.device.l2_bytes)
    least = plan.pass_.least_bytes(problem)
    results = heads * sequence.seqlen_k * ITEMSIZE[problem.softmax_dtype]
    if least + plan.extra_bytes <= L2_FRACTION * plan.device.l2_bytes:  # all of it stays in L2
        read, written = float(least - results), results
    else:  # an earlier kernel reads lse, and leaves the statistics of rows
        read, written = least - results - heads * sequence.seqlen_q * row_bytes.q + queries, results + stats
    return Traffic(
        tiles=of_queries + heads * keys * row_bytes.keys,
        read=round(read + _repeated_pair_bytes(plan)),
        written=written,
        least=least,
        flops=plan.pass_.flops(problem),
    )


def _stats_bytes(plan: Plan) -> int:
    """Bytes of the statistics of rows that each loop reads: lse and delta, and the tangents of these."""
    return plan.scratch_sizes["row_stats"] + plan.scratch_sizes.get("row_tangents", 0)


def _added_to_dq(plan: Plan) -> int:
    """Bytes that blocks which own keys add to the dq accumulator: whole tiles of queries, for each tile of keys."""
    problem, tile = plan.problem, plan.tiles[0]
    steps = sum(map(len, query_tiles(problem.mean_sequence, tile.block_m, tile.block_n)))
    row_bytes = tile.padded_dims(problem)[0] * ITEMSIZE[problem.softmax_dtype]
    return problem.batch * problem.num_heads * steps * tile.block_m * row_bytes


def _by_keys(plan: Plan, added: int, *, every: bool) -> tuple[float, float, float]:
    """Bytes of tiles, bytes read and bytes written, where blocks own keys: those of some query, or `every` tile."""
    problem, device, run_time, tile = plan.problem, plan.device, plan.run_time, plan.tiles[0]
    sequence, row_bytes = problem.mean_sequence, _RowBytes.of(problem)
    stats_of_row = (4 if plan.pass_.has_tangents else 2) * ITEMSIZE[problem.softmax_dtype]
    heads, heads_kv = problem.batch * problem.num_heads, problem.batch * problem.num_heads_kv
    sizes = plan.scratch_sizes
    query_blocks = query_tiles(sequence, tile.block_m, tile.block_n)
    steps = sum(map(len, query_blocks))
    rows = sum(min(r.stop * tile.block_m, sequence.seqlen_q) - r.start * tile.block_m for r in query_blocks if r)
    of_queries = heads * (rows * (row_bytes.q + row_bytes.dout) + steps * tile.block_m * stats_of_row)
    n_blocks, splits = heads_kv * len(query_blocks), run_time.group_splits
    num_shared = n_blocks - run_time.whole_tiles if run_time.tail_splits > 1 else 0
    loop = OperandLoop(
        heads=heads_kv * splits,
        tiles_of_head=len(query_blocks),
        section=min(run_time.head_section, heads_kv) * splits,
        at_once=_blocks_at_once(plan, tile, n_blocks * splits),
        whole=n_blocks * splits - num_shared,
        splits=run_time.tail_splits,
    )
    accumulator, partials = sizes.get("dq_accumulator", 0), sizes.get("dkv_partials", 0)
    head_bytes = sequence.seqlen_q * (row_bytes.q + row_bytes.dout + stats_of_row) + accumulator / heads

    def loaded(once: float, in_all: float) -> float:
        return loop.read(once, in_all, head_bytes, device.l2_bytes)

    read = loaded(heads * sequence.seqlen_q * (row_bytes.q + row_bytes.dout) + _stats_bytes(plan), of_queries)
    read += heads_kv * sequence.seqlen_k * row_bytes.keys + partials
    written: float = partials
    if added:
        sums = loaded(accumulator, added)
        # An earlier kernel clears the sums, or blocks do so some heads ahead. Then the zeros may leave L2.
        cleared = 0 if run_time.clear_ahead and sums == accumulator else accumulator
        written += cleared + sums
        read += cleared + sums  # the last read is that of the kernel that makes dq of them
    keys = _key_rows_loaded(plan, query_blocks, every=every)
    return of_queries + keys * row_bytes.keys, read, written


def _key_rows_loaded(plan: Plan, query_blocks: list[range], *, every: bool) -> int:
    """Rows of keys that blocks load which own keys: those of some query, or `every` tile. Splits load them each."""
    problem, run_time, tile = plan.problem, plan.run_time, plan.tiles[0]
    heads_kv, seqlen_k = problem.batch * problem.num_heads_kv, problem.mean_sequence.seqlen_k

    def rows_of(block: int) -> int:
        return min(tile.block_n, seqlen_k - block * tile.block_n)

    of_head = sum(rows_of(block) for block, queries in enumerate(query_blocks) if every or queries)
    rows = heads_kv * run_time.group_splits * of_head
    if run_time.tail_splits > 1:
        for index in range(run_time.whole_tiles, heads_kv * len(query_blocks)):
            block = _block_at(index, len(query_blocks), heads_kv, run_time.head_section)
            splits = min(run_time.tail_splits, len(query_blocks[block]) * problem.group_size)
            rows += rows_of(block) * max(0, splits - 1)
    return rows


def _block_at(index: int, blocks_of_head: int, heads: int, section: int) -> int:
    """Which tile of its head is at a position in launch order; kernels/common/schedule/schedule.cuh has the same."""
    first = index // (blocks_of_head * section) * section
    return (index - first * blocks_of_head) // min(heads - first, section)


def _by_queries(plan: Plan) -> tuple[float, float, float]:
    """The same where blocks own queries, for dq alone."""
    problem, tile = plan.problem, plan.tiles[-1]
    sequence, row_bytes = problem.mean_sequence, _RowBytes.of(problem)
    heads = problem.batch * problem.num_heads
    rows = key_rows(sequence, tile.block_m, tile.block_n)
    key_tiles = heads * sum(rows) * row_bytes.keys
    of_queries = heads * sequence.seqlen_q * (row_bytes.q + row_bytes.dout)
    read = _keys_read(plan, tile, rows, key_tiles) + of_queries + _stats_bytes(plan)
    return key_tiles + of_queries, read, 0


def _keys_read(plan: Plan, tile: Tile, rows: list[int], key_tiles: float, *, persistent: bool = False) -> float:
    """Bytes of keys and values that are read where blocks own queries, and load `rows` of them for each tile.

    `key_tiles` are the bytes of all these loads.
    """
    problem = plan.problem
    head_bytes = problem.mean_sequence.seqlen_k * _RowBytes.of(problem).keys
    heads = problem.batch * problem.num_heads
    at_once = _blocks_at_once(plan, tile, heads * len(rows))
    # Blocks that take tiles in pairs, one from each end, take head by head. So do persistent blocks with tiles that
    # attend to the whole of a window, as most tiles do.
    in_pairs = any(("CUFLASH_PAIRS", 1) in kernel.defines for kernel in plan.kernels)
    section = 1 if in_pairs or (persistent and problem.has_window) else plan.run_time.head_section
    units = -(-len(rows) // 2) if in_pairs else len(rows)
    # Query heads that share keys are neighbours.
    loop = OperandLoop(
        heads=heads // problem.group_size,
        tiles_of_head=units * problem.group_size,
        section=max(1, min(section, heads) // problem.group_size),
        at_once=at_once,
        whole=heads * units,
    )
    return loop.read(problem.batch * problem.num_heads_kv * head_bytes, key_tiles, head_bytes, plan.device.l2_bytes)


_TRAFFIC = {
    FORWARD: _forward,
    BACKWARD: _backward,
    JVP: _forward,
    BACKWARD_JVP: _backward,
    COLUMN_SUMS: _columns,
    COLUMN_MAX: _columns,
}
