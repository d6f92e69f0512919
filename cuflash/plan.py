"""Which kernels run for a problem, with which tiles, on which device: pure data and pure functions.

The first row of a table in tables.py that serves the head dimensions, and whose shared memory fits, is taken.
`LaunchPlan.reason` says which row was taken and why the ones before it were not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cuflash.binding import Pass, access_bytes, planned_length
from cuflash.problem import DEFAULT_NEED, GRADIENTS, ITEMSIZE, Operand, Problem
from cuflash.tables import (
    BACKWARD_FLOAT32_SM90_TILES,
    BACKWARD_SM90_TILES,
    BACKWARD_TF32_SM90_TILES,
    BACKWARD_TILES,
    DECODE_SM90_TILES,
    DQ_TILES,
    FORWARD_FLOAT32_SM90_TILES,
    FORWARD_SM90_TILES,
    FORWARD_TF32_SM90_TILES,
    FORWARD_TILES,
    SCORES_TILES,
)
from cuflash.tensor_map import BYTES as TENSOR_MAP_BYTES
from cuflash.tensor_map import TensorMapSpec, tensor_map_spec, why_not
from cuflash.tiles import (
    DECODE_ROWS,
    SERVES,
    BackwardFloat32Sm90Tile,
    BackwardSm90Tile,
    BackwardTile,
    DecodeSm90Tile,
    DqTile,
    ForwardFloat32Sm90Tile,
    ForwardSm90Tile,
    ScoresTile,
    Tile,
    helper_of,
    round_up,
    tile_bytes,
)

PARAMS_BYTES = 904  # of the kernels' only argument; cuflash/params.py lays it out, kernels/common/params.cuh checks it
MAPS_OFFSET = round_up(PARAMS_BYTES, 64)  # where tensor maps follow
MAX_HEAD_DIM = 256
# Under a causal mask tiles differ in length; the long ones of so many heads start first. On an H200 that is worth 9 %
# at head_dim 128 and seqlen 4096; without a mask, one head at a time serves L2 better.
CAUSAL_HEAD_SECTION = 16
# Heads whose blocks of the backward pass are side by side on compute capability 9.0; on an H200 eight are 1 % slower
# (head_dim 128, seqlen 4096). Where blocks add in order, each is a step behind the one before it of its head: so many
# heads are then side by side that, as blocks end, those of a head start two steps apart. In us by heads, head_dim 128,
# seqlen 1024: 4 779, 8 738, 16 723, 32 739; as a multiple of the fast mode, seqlen 4096: 2 1.11, 4 1.04, 8 1.05.
BACKWARD_HEAD_SECTION = 4
STEPS_APART = 2
# Heads of packed sequences are few and long, and nobody but a kernel before clears the accumulators of dq of those that
# start side by side. On an H200 two in place of 4 to 16 are up to 4 % faster at head_dim 256 and up to 2 % at 64; with
# dq in order under a causal mask four in place of 16 up to 1 %, and two 1 to 3 % slower than four at 256.
PACKED_HEAD_SECTION, PACKED_IN_ORDER_SECTION = 2, 4
# Under a causal mask blocks of a head are at different queries, and Q, dO and dQ of the heads under way should stay in
# L2. On an H200, in order at seqlen 16384, 128 MiB of them in place of 16 cost 21 % (head_dim 128), or in place of 32
# 44 % (head_dim 256). In order, blocks are the further apart the more heads of a group they have gone through: then
# all heads of a group count, and beyond two of them that fit blocks share a group, which is 5 to 7 % faster (4 heads of
# head_dim 128, seqlen 8192, or 256, 4096).
BACKWARD_L2_BYTES = 1 << 24
MIN_HEADS_IN_ORDER = 2
# Where blocks add in order under a causal mask, the longest run alone at the end unless one of so many heads starts
# with them. On an H200 one of 8 is 2 to 6 % faster than none at head_dim 256, and 1 to 5 % slower below. But groups of
# query heads make blocks longer: by arithmetic 20 % of the device waits for the last ones of 4 waves, 13 % of 8.
SPLIT_ROLES_BACK_SHARE, GROUPED_BACK_SHARE = 8, 4
BACK_SECTION = 16  # of these heads, which are side by side
# Waves of blocks from which on these clear accumulators of dq. On an H200 the pass takes 2 to 5 % less so at seqlen
# 1024, and up to 1 % at 4096 (batch x heads x seqlen x head_dim of 2**25); 1 % more of it for heads two sections ahead;
# and 3 % more than without in a single wave.
CLEAR_WAVES = 2
FAST_FLOAT64 = (80, 90, 100)  # compute capabilities whose FP64 units are as many as half of the others
# Of resident blocks that a grid should have where more blocks cost extra work: of equal ones, and under a causal mask.
# On an H200, one key/value head for 16 query heads, seqlen 4096, in TFLOP/s by blocks that share it: head_dim 64 full 2
# blocks 549, 4 542, 8 532, 3 516, 5 488; head_dim 128 causal 2 blocks 416, 4 468, 8 475, 16 451, 5 391. Eight of these
# heads have two waves of tiles: causal at head_dim 128 1 block 522, 2 492, 4 473.
WAVES, CAUSAL_WAVES = 1.9, 4.0
# What it costs to share a tile of keys, in steps from one tile of queries to the next: each block to begin and end, and
# the kernel that adds what they leave, in all and for each of them; and where the tiles are those behind whole waves,
# whose blocks do not end at once, twice as much. On an H200 what follows is within 1 % of the best of 2 to 16 blocks (2
# heads of head_dim 256, seqlen 1024: 6 %). With 4 of 4096 tiles shared (head_dim 64, seqlen 16384) the pass is 2.9 %
# faster than with none, with 68 of 2048 (128) 2.2 % and at seqlen 4096 0.8 %, with all of 64 (causal, seqlen 4096) 43 %
# at head_dim 64, 46 % at 128.
SHARE_STEPS, SUM_STEPS, SUM_STEPS_OF_PART = 3, 6, 1
DECODE_MIN_SEQLEN_K = 512  # from which on that pays
MIN_TILES_OF_BLOCK = 2  # of keys
COMBINE_TILES = 2  # of keys: what a block of many takes longer where several share a head
COMBINE_WARPS = 8
MAX_SHARE_STEPS = 2**31 - 1  # by which blocks count the keys of all heads: as many for each head as there are blocks
SINKS_WARPS = 16
LIST_WARPS = 4  # of a block that lists tiles, a list for each
LIST_HEADER = 2  # numbers in front of a list
SCORES_REDUCE_WARPS = 8
SPLIT_ROWS = 64  # that a block splits
SPLIT_WARPS = 8
# Of queries and keys, for each row that is split. On an H200 it catches up with the sm80 kernel at seqlen 192 in the
# forward pass (head_dim 64; sooner at 128), and are ahead of it from 128 on in the backward pass.
PIECES_MIN_PAIRS: dict[Pass, int] = {"forward": 64, "backward": 42}
SCRATCH_ALIGNMENT = 256  # bytes, of each scratch array: what an allocation of its own would have
SHARED_BYTES_RESERVED = 1024  # that a resident block takes of a multiprocessor's shared memory beside its own


# ---- devices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """What a plan needs to know of a device. Sizes in bytes."""

    name: str
    arch: int  # compute capability, major and minor digit: 90 is 9.0
    num_sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int

    @property
    def target(self) -> str:
        """The architecture as the compiler spells it."""
        return f"sm_{self.arch}"

    @staticmethod
    def for_arch(arch: str) -> DeviceSpec:
        """A device that need not be here, by its compute capability: "8.0", "80" or "sm_80"."""
        digits = str(arch).removeprefix("sm_").replace(".", "")
        if not digits.isdecimal() or int(digits) not in _DEVICES:
            known = ", ".join(f"{a // 10}.{a % 10}" for a in _DEVICES)
            raise ValueError(f"arch: got {arch!r}, expected one of {known}")
        return _DEVICES[int(digits)]


def _device(name: str, arch: int, num_sms: int, shared_kib_per_sm: int) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        arch=arch,
        num_sms=num_sms,
        shared_bytes_per_block=(shared_kib_per_sm - 1) * 1024,
        shared_bytes_per_sm=shared_kib_per_sm * 1024,
    )


# Representatives of the compute capabilities, from the CUDA C++ Programming Guide (technical specifications per compute
# capability) and the vendor's pages for the number of multiprocessors.
_DEVICES = {
    spec.arch: spec
    for spec in (
        _device("A100", 80, 108, 164),
        _device("RTX 3090", 86, 82, 100),
        _device("Jetson Orin", 87, 16, 164),
        _device("RTX 4090", 89, 128, 100),
        _device("H200", 90, 132, 228),
        _device("B200", 100, 148, 228),
        _device("B300", 103, 148, 228),
        _device("Jetson Thor", 110, 20, 228),
        _device("RTX 5090", 120, 170, 100),
        _device("DGX Spark", 121, 48, 100),
    )
}


# ---- plans -----------------------------------------------------------------------------------------------------------


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
    overlaps_previous: bool  # programmatic dependent launch: it may start early, and waits by itself


@dataclass(frozen=True)
class ScratchLayout:
    """Where the scratch arrays of a call lie in one allocation, in bytes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """One array behind the other, each aligned."""
        return tuple(itertools.accumulate(self._rounded[:-1], initial=0)) if self.sizes else ()

    @property
    def nbytes(self) -> int:
        """Of the allocation."""
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
    stats_rows: int  # rows of row_stats of one head, of all sequences where they are packed (backward)
    group_splits: int  # blocks that share the query heads of a key/value head (backward)
    clear_ahead: int  # heads in launch order from one to that whose accumulators its blocks clear (backward)
    whole_tiles: int  # of keys, before those whose queries blocks share (backward)
    tail_splits: int  # blocks that share the queries of each of these (backward)
    key_splits: int  # the most blocks that share the keys of a key/value head (forward, few queries)
    scratch: tuple[tuple[str, int], ...]  # arrays beside inputs and results, in elements of lse's dtype
    head_section: int  # heads whose tiles are interleaved in the launch order
    resident_blocks: int  # of a kernel whose blocks take one tile after another
    lists: tuple[int, int]  # batch entries and heads that have lists of tiles of their own, with a block mask
    tensor_maps: tuple[TensorMapSpec, ...]  # that follow the parameters
    reason: str
    need: tuple[str, ...] = ()  # gradients that are computed (backward)
    any_length: bool = False  # it serves all numbers of keys that have the same `planned_length`
    hides_last_keys: bool = False  # whatever lies behind the last key: tensor maps of k and v may reach over it
    score_splits: int = 1  # blocks that share what is summed to a tile of dbias
    sums_splits: int = 1  # blocks that share the keys of a tile of queries, for sums of gradients of scores
    resources: tuple[str, ...] = ()  # registers and spills of each kernel, once compiled

    @property
    def scratch_layout(self) -> ScratchLayout:
        """Where the scratch arrays lie."""
        size = ITEMSIZE[self.problem.softmax_dtype]
        return ScratchLayout(
            tuple(name for name, _ in self.scratch), tuple(size * elements for _, elements in self.scratch)
        )

    @property
    def extra_bytes(self) -> int:
        """Device memory taken for the duration of a call beside inputs and results."""
        return self.scratch_layout.nbytes

    def describe(self) -> str:
        """The plan in words, a line a fact."""
        p = self.problem
        wanted = "" if self.need in ((), DEFAULT_NEED) else f" for {', '.join(self.need)}"
        lines = [
            f"{self.pass_} pass{wanted} on {self.device.name} (compute capability {self.device.arch / 10:.1f})",
            f"  problem: {p.dtype}, batch {p.batch}, heads {p.num_heads}/{p.num_heads_kv}, seqlen {p.seqlen_q} x "
            f"{p.seqlen_k}, head_dim {p.head_dim}/{p.head_dim_v}; {', '.join(_options(p)) or 'no options'}",
        ]
        for i, kernel in enumerate(self.kernels):
            resources = f", {self.resources[i]}" if self.resources else ""
            lines.append(
                f"  kernel {kernel.name}: grid {kernel.grid}, {kernel.threads} threads, "
                f"{kernel.shared_bytes} bytes of shared memory{resources}"
            )
        lines.append(f"  extra memory: {self.extra_bytes} bytes")
        lines.extend(f"  {line}" for line in self.reason.splitlines())
        return "\n".join(lines)


def choose_plan(
    problem: Problem,
    device: DeviceSpec,
    pass_: Pass = "forward",
    *,
    load_bytes: int | None = None,
    store_bytes: int | None = None,
    operands: Mapping[str, Operand] | None = None,
    tiles: tuple[Tile, ...] | None = None,
    origin: str = "tiles given by the caller",
    need: Collection[str] | None = None,
) -> LaunchPlan:
    """The plan for one pass. Pure: the same arguments give the same plan.

    `load_bytes` and `store_bytes` are the widest aligned accesses that serve all operands; without them they follow
    from the strides, pointers taken as 16-byte aligned. Results and dout that are not in `operands` are contiguous;
    dbias then has the axes along which the bias has distinct elements.
    `need` has the gradients that the backward pass is for, names of `problem.GRADIENTS`; without it dq, dk, dv, and
    dsinks where there are sinks.
    `tiles` overrides the tables: a row of the forward pass, or one of the backward pass (and a DqTile: deterministic; a
    ScoresTile: gradients of bias, slopes, scale, softcap).
    `origin` says where they come from.

    Raises NotImplementedError for what no kernel serves, ValueError for arrays that are not aligned to their elements.
    """
    check_served(problem, device)
    if pass_ == "backward" and problem.block_table is not None:
        raise NotImplementedError(
            "block_table: got one for the backward pass, expected None: gradients are not given in pages; gather "
            "the pages of each batch entry into contiguous k and v"
        )
    if need is None:
        need = DEFAULT_NEED if problem.sinks is None else (*DEFAULT_NEED, "dsinks")
    if load_bytes is None:
        load_bytes = access_bytes((problem.q, problem.k, problem.v))
    if store_bytes is None:
        store_bytes = access_bytes((problem.q, problem.v))
    if min(load_bytes, store_bytes) < ITEMSIZE[problem.dtype]:
        raise ValueError(
            f"q: got arrays at multiples of {min(load_bytes, store_bytes)} bytes, expected all of them at multiples of "
            f"the {ITEMSIZE[problem.dtype]} bytes of a {problem.dtype}"
        )
    arrays = {name: _contiguous(problem, name) for name in ("out", "dout", "dk", "dv")} | dict(operands or {})
    arrays |= {name: getattr(problem, name) for name in "qkv"}
    for name, of in (("dbias", problem.bias), ("dalibi_slopes", problem.alibi_slopes)):
        if of is not None:
            arrays.setdefault(name, of)
    # The backward pass has in lse what sinks did: but for their gradients its kernels are those of a problem without.
    seen = replace(problem, sinks=None) if pass_ == "backward" else _of_planned_length(problem)
    draft = _Draft(
        problem=seen,
        device=device,
        pass_=pass_,
        arrays=arrays,
        access_bytes=min(load_bytes, store_bytes),
        defines=_common_defines(seen, device, load_bytes, store_bytes),
        need=tuple(name for name in GRADIENTS if name in need) if pass_ == "backward" else (),
        head_section=1 if problem.window_right is None else CAUSAL_HEAD_SECTION,
        origin=origin,
    )
    if pass_ == "forward":
        _draft_forward(draft, tiles)
    else:
        _draft_backward(draft, tiles)
    if problem.dtype == "float64" and device.arch not in FAST_FLOAT64:
        draft.reasons.append(f"float64 is slow here: compute capability {device.arch / 10:.1f} has few FP64 units")
    return LaunchPlan(
        pass_=pass_,
        problem=problem,
        device=device,
        tiles=draft.tiles,
        kernels=tuple(draft.kernels),
        stats_rows=draft.stats_rows,
        group_splits=draft.group_splits,
        clear_ahead=draft.clear_ahead,
        whole_tiles=draft.whole_tiles,
        tail_splits=draft.tail_splits,
        key_splits=draft.key_splits,
        scratch=tuple(draft.scratch.items()),
        head_section=draft.head_section,
        resident_blocks=draft.resident_blocks,
        lists=draft.lists,
        tensor_maps=draft.tensor_maps,
        reason="\n".join(draft.reasons),
        need=draft.need,
        any_length=pass_ == "forward" and not _has_keys_elsewhere(problem) and "k_split" not in draft.scratch,
        hides_last_keys=any(isinstance(tile, DecodeSm90Tile) for tile in draft.tiles),
        score_splits=draft.score_splits,
        sums_splits=draft.sums_splits,
    )


def _has_keys_elsewhere(problem: Problem) -> bool:
    """Whether another array than k, v and a block table has an axis of keys."""
    return any(term is not None for term in (problem.bias, problem.mask, problem.block_mask))


def _of_planned_length(problem: Problem) -> Problem:
    """The problem with as many keys as its forward pass is planned for: a few more than there are."""
    if _has_keys_elsewhere(problem):
        return problem
    return problem.of_length(planned_length(problem.seqlen_k))


# ---- a plan in the making --------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Draft:
    """A plan in the making."""

    problem: Problem
    device: DeviceSpec
    pass_: Pass
    arrays: dict[str, Operand]
    access_bytes: int  # widest aligned access that serves all arrays
    defines: dict[str, str | int]
    head_section: int
    need: tuple[str, ...]
    origin: str  # of tiles that no table was asked for
    tiles: tuple[Tile, ...] = ()
    kernels: list[KernelSpec] = field(default_factory=list)
    scratch: dict[str, int] = field(default_factory=dict)
    tensor_maps: tuple[TensorMapSpec, ...] = ()
    reasons: list[str] = field(default_factory=list)
    stats_rows: int = 0
    group_splits: int = 1
    clear_ahead: int = 0
    whole_tiles: int = 0
    tail_splits: int = 1
    key_splits: int = 1
    resident_blocks: int = 0
    score_splits: int = 1
    sums_splits: int = 1

    @property
    def heads(self) -> int:
        """Query heads of all entries of the arrays' batch axis."""
        return self.problem.array_batch * self.problem.num_heads

    def tiles_of(self, seqlen: int, rows: int) -> int:
        """Tiles of so many rows of the queries, or keys, of a head.

        Of packed sequences, places for them: those of sequence b are numbered from start[b] // rows + b on. That is one
        more than there are tiles at most for each sequence, and for the rows behind the last one.
        """
        if self.problem.is_packed:
            return seqlen // rows + self.problem.batch + 1
        return -(-seqlen // rows)

    def padded_dims(self, tile: Tile) -> tuple[int, int]:
        """Head dimensions as a kernel of this row sees them."""
        dim, dim_v = self.problem.head_dim, self.problem.head_dim_v
        return round_up(dim, tile.dim_multiple), round_up(dim_v, tile.dim_multiple)

    def map_tensors(
        self, rows: Mapping[str, int], heads: Mapping[str, int] | None = None, *, read_once: bool = False
    ) -> None:
        """Tensor maps of these arrays, in boxes of so many rows, and of one head or so many."""
        heads = heads or {}
        self.tensor_maps = tuple(
            tensor_map_spec(name, self.arrays[name], n, heads.get(name, 1), read_once=read_once)
            for name, n in rows.items()
        )
        self.defines["CUFLASH_ARGUMENT_BYTES"] = MAPS_OFFSET + len(rows) * TENSOR_MAP_BYTES

    def add_bf16_split(self, tile: ForwardFloat32Sm90Tile | BackwardFloat32Sm90Tile, names: tuple[str, ...]) -> None:
        """The kernel that splits these float32 arrays into scratch arrays of bfloat16, which tensor maps may describe.

        The array `name` becomes `name_split`, with the parts of all batch entries along its first axis.
        """
        blocks = 0
        for name in names:
            batch, heads, seqlen, columns = self.arrays[name].shape
            width = round_up(columns, 8)
            split = Operand(
                shape=(tile.bf16_parts * batch, heads, seqlen, columns),
                strides=(heads * seqlen * width, seqlen * width, width, 1),
                dtype="bfloat16",
            )
            self.arrays[f"{name}_split"] = split
            self.scratch[f"{name}_split"] = tile.bf16_parts * batch * heads * seqlen * width // 2
            blocks += batch * heads * -(-seqlen // SPLIT_ROWS)
        rows = {"CUFLASH_BLOCK_M": SPLIT_ROWS, "CUFLASH_NUM_WARPS": SPLIT_WARPS}
        self.add("around/split_fp32.cu", tile, blocks, 0, **rows)
        listed = ", ".join(names[:-1]) + " and " + names[-1]
        self.reasons.append(
            f"{listed} are split into {tile.bf16_parts} parts of bfloat16: "
            + (
                "the six largest products of parts count"
                if tile.bf16_parts == 3
                else "the three largest products of parts count, which are more accurate than one of TF32"
            )
        )

    @property
    def lists(self) -> tuple[int, int]:
        """How many batch entries, and heads, have lists of tiles of their own."""
        problem = self.problem
        if problem.block_mask is None:
            return 1, 1
        of_batch, of_head, _, _ = problem.block_mask.strides
        own = of_batch or problem.kv_lengths is not None
        return problem.batch if own else 1, problem.num_heads if of_head else 1

    def add_lists(self, tile: Tile, name: Literal["key_lists", "query_lists"]) -> None:
        """With a block mask, the kernel that lists the tiles of keys of each tile of queries, or vice versa."""
        problem = self.problem
        if problem.block_mask is None:
            return
        m_blocks, n_blocks = -(-problem.seqlen_q // tile.block_m), -(-problem.seqlen_k // tile.block_n)
        lists, length = (m_blocks, n_blocks) if name == "key_lists" else (n_blocks, m_blocks)
        lists *= math.prod(self.lists) if self.heads else 0
        elements = -(-lists * (LIST_HEADER + length) * ITEMSIZE["int32"] // ITEMSIZE[problem.softmax_dtype])
        self.scratch[name] = round_up(elements, 4)
        of_keys = name == "key_lists"
        warps = {"CUFLASH_NUM_WARPS": LIST_WARPS, "CUFLASH_MIN_BLOCKS": 1}
        self.add("around/lists.cu", tile, -(-lists // LIST_WARPS), 0, **warps, CUFLASH_LISTS_KEYS=int(of_keys))
        self.reasons.append(
            f"block_mask: tiles of {'keys' if of_keys else 'queries'} are listed beforehand, {tile.block_m} queries x "
            f"{tile.block_n} keys each; hidden ones are neither loaded nor computed"
        )

    def add(
        self, source: str, tile: Tile, blocks: int, shared_bytes: int, makes: Collection[str] = (), /, **defines: int
    ) -> None:
        """One more kernel: those of compute capability 9.0 need what only its own instruction set has.

        `makes` are results, for the name of one of several kernels of a source.
        """
        _check_blocks(blocks)
        name = "_".join((_symbol(source, self.problem, tile), *makes))
        # Launches overlap from compute capability 9.0 on; kernels without blocks are not launched.
        overlaps = self.device.arch >= 90 and any(kernel.grid for kernel in self.kernels)
        every = self.defines | tile.defines() | defines | {"CUFLASH_OVERLAPS_PREVIOUS": int(overlaps)}
        every |= {"CUFLASH_SHARED_BYTES": shared_bytes, "CUFLASH_KERNEL_NAME": name}
        self.kernels.append(
            KernelSpec(
                source=source,
                name=name,
                target=self.device.target + ("a" if source.startswith("sm90/") else ""),
                defines=tuple(sorted(every.items())),
                grid=blocks,
                threads=32 * int(every["CUFLASH_NUM_WARPS"]),
                shared_bytes=shared_bytes,
                overlaps_previous=overlaps,
            )
        )


# ---- forward ---------------------------------------------------------------------------------------------------------


_SCORE_GRADIENTS = ("dbias", "dalibi_slopes", "dscale", "dsoftcap")  # that kernels of their own make
_AXES = ("BATCH", "HEADS", "QUERIES", "KEYS")
_AXES_WORDS = ("batch entries", "heads", "tiles of queries", "tiles of keys")
_WRITTEN = ("out", "dk", "dv")  # results that kernels of compute capability 9.0 leave to TMA
# Rows for float32 in bfloat16 parts, by precision.
_FORWARD_SPLIT = {"highest": FORWARD_FLOAT32_SM90_TILES, "tf32": FORWARD_TF32_SM90_TILES}
_BACKWARD_SPLIT = {"highest": BACKWARD_FLOAT32_SM90_TILES, "tf32": BACKWARD_TF32_SM90_TILES}
_FORWARD_MAPPED = ("q", "k", "v", "out")  # arrays that sm90/forward leaves to TMA


def _draft_forward(draft: _Draft, tiles: tuple[Tile, ...] | None) -> None:
    problem = draft.problem
    split_rows = _FORWARD_SPLIT[problem.precision]
    if tiles:
        tile, reason = tiles[0], draft.origin
    elif (why_not_decode := _why_not_decode(draft)) is None:
        tile, reason = _choose(DECODE_SM90_TILES, problem, draft.device)
    elif (why_not_split := _why_not_split(draft, split_rows)) is None:
        tile, reason = _choose(split_rows, problem, draft.device)
    else:
        tables = (FORWARD_SM90_TILES, FORWARD_TILES)
        tile, reason = _choose_of(tables, draft, _FORWARD_MAPPED, "sm90/forward")
        reason += why_not_decode and f"\nnot sm90/decode: {why_not_decode}"
        reason += why_not_split and f"\nnot sm90/forward_fp32: {why_not_split}"
    draft.tiles = (tile,)
    draft.reasons.append(reason)
    if isinstance(tile, DecodeSm90Tile):
        _draft_decode(draft, tile)
        return
    m_blocks = draft.heads * draft.tiles_of(problem.seqlen_q, tile.block_m)
    shared_bytes = tile.shared_bytes(*draft.padded_dims(tile))
    draft.add_lists(tile, "key_lists")
    source = "sm90/forward.cu"
    if isinstance(tile, ForwardSm90Tile):
        box = _box_rows(problem, tile.block_n)
        draft.map_tensors({"q": tile.block_m, "k": box, "v": box, "out": 64})
    elif isinstance(tile, ForwardFloat32Sm90Tile):
        source = "sm90/forward_fp32.cu"
        draft.add_bf16_split(tile, ("q", "k", "v"))
        draft.map_tensors({"q_split": tile.block_m, "k_split": tile.block_n, "v_split": tile.block_n})
    else:
        draft.add("sm80/forward.cu", tile, m_blocks, shared_bytes)
        return
    _check_blocks(m_blocks)
    pairs = problem.window_right is not None and problem.window_left is None
    units = draft.heads * draft.tiles_of(problem.seqlen_q, 2 * tile.block_m) if pairs else m_blocks
    draft.resident_blocks = min(units, draft.device.num_sms * tile.min_blocks)
    what = f"{m_blocks} tiles of queries"
    if problem.is_packed:
        # Sequences of different lengths are then spread evenly over the blocks.
        draft.head_section = CAUSAL_HEAD_SECTION
        what = f"the tiles of queries of {problem.batch} packed sequences, at most {m_blocks},"
    draft.reasons.append(f"{draft.resident_blocks} blocks stay and take {what} one after another")
    draft.add(source, tile, draft.resident_blocks, shared_bytes, CUFLASH_PAIRS=int(pairs))


def _why_not_decode(draft: _Draft) -> str | None:
    """Why not to stream the keys past few queries: None if that is the way to go, "" where nobody would expect it."""
    problem, device = draft.problem, draft.device
    rows = problem.group_size * problem.mean_sequence.seqlen_q
    if device.arch != 90 or ITEMSIZE[problem.dtype] != 2 or not 0 < rows <= DECODE_ROWS:
        return ""
    if _visible_keys(problem.mean_sequence) < DECODE_MIN_SEQLEN_K or _why_not_mapped(draft, _FORWARD_MAPPED):
        return ""
    options = ("softcap", "alibi_slopes", "bias", "mask", "block_mask")
    terms = [name for name in options if getattr(problem, name) is not None]
    terms += ["dropout"] if problem.dropout else []
    terms += ["packed sequences"] if problem.is_packed else []
    if terms:
        return f"it knows no {' and no '.join(terms)}"
    if problem.group_size == 1 and 2 * draft.heads >= device.num_sms:
        return f"{draft.heads} heads fill the device, and no two share keys"
    return None


def _box_rows(problem: Problem, block_n: int) -> int:
    """Keys that TMA brings at once: a tile, or with pages as many as make whole pages and whole tiles."""
    return math.gcd(problem.page_size, block_n)


def _why_not_split(draft: _Draft, table: tuple) -> str | None:
    """Why not to split float32 into parts: None if that is the way to go, "" where nobody would expect it."""
    problem = draft.problem
    if draft.device.arch != 90 or problem.dtype != "float32":
        return ""
    if problem.block_table is not None:
        return "it would split all pages of the pool, whoever they belong to"
    if problem.is_packed:
        return "it knows no packed sequences"
    largest = max(row.max_dim for row in table)
    if max(problem.head_dim, problem.head_dim_v) > largest:
        return f"it serves head dimensions up to {largest}"
    rows = problem.num_heads * problem.seqlen_q + 2 * problem.num_heads_kv * problem.seqlen_k
    keys = problem.seqlen_k
    if problem.window_left is not None and problem.window_right is not None:
        keys = min(keys, max(0, problem.window_left + problem.window_right + 1))
    fewest = PIECES_MIN_PAIRS[draft.pass_]
    if problem.num_heads * problem.seqlen_q * keys < fewest * max(rows, 1):
        return f"for fewer than {fewest} scores to each row of q, k and v, splitting these takes too long"
    return None


def _visible_keys(problem: Problem) -> int:
    """The most keys that all queries of a head see together."""
    start, stop = 0, problem.seqlen_k
    if problem.window_left is not None:
        start = max(start, problem.diagonal - problem.window_left)
    if problem.window_right is not None:
        stop = min(stop, problem.seqlen_q + problem.diagonal + problem.window_right)
    return max(0, stop - start)


def _blocks_of_decode(problem: Problem, device: DeviceSpec, tile: DecodeSm90Tile) -> int:
    """The number of blocks to share all keys evenly, so that the device is done first; of equals, the smallest.

    As many as are resident leave no multiprocessor idle, but share heads, whose results have to be combined. A few less
    may leave every head whole, or shared by as few blocks as the others.
    """
    heads = problem.batch * problem.num_heads_kv
    _check_blocks(heads)
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


def _draft_decode(draft: _Draft, tile: DecodeSm90Tile) -> None:
    problem = draft.problem
    heads, rows = problem.batch * problem.num_heads_kv, problem.group_size * problem.seqlen_q
    draft.resident_blocks = blocks = _blocks_of_decode(problem, draft.device, tile)
    whole_heads = heads % blocks == 0
    draft.key_splits = blocks // heads if blocks % heads == 0 else 1 if whole_heads else blocks // heads + 2
    box = _box_rows(problem, tile.block_n)
    boxes = {"q": problem.seqlen_q, "k": box, "v": box}
    draft.map_tensors(boxes, {"q": problem.group_size}, read_once=True)
    draft.reasons.append(f"{rows} queries of the heads that share keys go through one product: keys are read once")
    dims = draft.padded_dims(tile)
    draft.add("sm90/decode.cu", tile, blocks, tile.shared_bytes(*dims), CUFLASH_SPLITS_KEYS=int(not whole_heads))
    if whole_heads:
        draft.reasons.append(f"{blocks} blocks take whole heads")
        return
    draft.scratch["partial_out"] = (heads + blocks) * rows * dims[1]
    draft.scratch["partial_lse"] = (heads + blocks) * rows
    _draft_combine(draft, tile, draft.key_splits)
    draft.reasons.append(
        f"{blocks} blocks take equal shares of the keys, up to {draft.key_splits} of them those of one head: results "
        "are combined by lse"
    )


def _draft_combine(draft: _Draft, tile: DecodeSm90Tile, splits: int) -> None:
    """The kernel that sums the results of splits: a block owns many rows where splits are few."""
    threads, (_, dim_v) = 32 * COMBINE_WARPS, draft.padded_dims(tile)
    lanes = dim_v // 4
    at_once = most = threads // lanes
    while at_once > 1 and at_once >= splits:  # a thread sums two of them at least
        at_once //= 2
    if most // at_once > 1:  # rows are made of whole warps
        at_once = min(most, round_up(at_once, 32 // math.gcd(32, lanes)))
    rows = most // at_once
    blocks = -(-draft.heads * draft.problem.seqlen_q // rows)
    shared_bytes = rows * at_once * lanes * 16 if at_once > 1 else 0
    defines = {"CUFLASH_BLOCK_ROWS": rows, "CUFLASH_SPLITS_AT_ONCE": at_once, "CUFLASH_NUM_WARPS": COMBINE_WARPS}
    draft.add("around/combine.cu", tile, blocks, shared_bytes, **defines)


# ---- backward --------------------------------------------------------------------------------------------------------


def _group_splits(draft: _Draft, main: MainTile, n_blocks: int) -> int:
    """Blocks that share the query heads of a key/value head, each as many, where tiles of keys are few."""
    problem, resident = draft.problem, draft.device.num_sms * main.min_blocks
    waves = WAVES if n_blocks >= WAVES * resident or problem.window_right is None else CAUSAL_WAVES
    most = problem.group_size
    if _dq_in_order(main) and problem.window_right is not None:
        most = max(BACKWARD_L2_BYTES // max(_head_bytes(draft, main), 1), MIN_HEADS_IN_ORDER)
    shares = (n for n in range(1, problem.group_size + 1) if problem.group_size % n == 0)
    enough = (n for n in shares if n * n_blocks >= waves * resident and n * most >= problem.group_size)
    return next(enough, problem.group_size)


def _steps_of_tile(draft: _Draft, main: MainTile) -> int:
    """The most tiles of queries, of all heads of a group, that a tile of keys meets; of packed sequences their mean."""
    problem = draft.problem.mean_sequence
    queries = problem.seqlen_q
    if problem.window_left is not None and problem.window_right is not None:
        queries = min(queries, problem.window_left + problem.window_right + main.block_n)
    return -(-queries // main.block_m) * problem.group_size


def _share_tail(draft: _Draft, main: MainTile, n_blocks: int) -> None:
    """Tiles of keys that the device is not full of, all or those of the last wave, are shared where that is faster."""
    problem, resident = draft.problem, draft.device.num_sms * main.min_blocks
    steps = _steps_of_tile(draft, main)
    tiles = problem.batch * problem.num_heads_kv * -(-problem.mean_sequence.seqlen_k // main.block_n)
    # Under a causal mask the longest start first, and what is left at the end is short.
    even = (problem.window_left is None) == (problem.window_right is None) and problem.block_mask is None
    rest = tiles % resident if even else tiles
    if rest == 0 or steps == 0:
        return

    def duration(splits: int) -> float:
        waves, longest = -(-rest * splits // resident), steps / splits
        walks = waves * longest if even else max(longest, rest * steps / 2 / resident)
        if splits == 1:
            return waves * SHARE_STEPS + walks
        sums = SUM_STEPS * (1 if rest == tiles else 2) + SUM_STEPS_OF_PART * splits
        return waves * SHARE_STEPS + walks + sums

    splits = min(range(1, min(steps, resident) + 1), key=duration)
    if splits > 1:
        # Of packed sequences, as large a part of their places.
        draft.whole_tiles, draft.tail_splits = n_blocks - n_blocks * rest // tiles, splits


def _dq_in_order(main: MainTile | None) -> bool:
    return isinstance(main, BackwardSm90Tile) and main.dq_in_order


def _head_bytes(draft: _Draft, main: MainTile) -> int:
    """Of Q, dO and dQ of a head; of packed sequences for their mean length: blocks under way reach over that."""
    dim, dim_v = draft.padded_dims(main)
    return draft.problem.mean_sequence.seqlen_q * (main.element_bytes * (dim + dim_v) + 4 * dim)


def _backward_head_section(draft: _Draft, main: BackwardSm90Tile) -> int:
    """Key/value heads side by side; or parts of them, where blocks share the heads of a group."""
    problem = draft.problem
    if main.dq_in_order and problem.window_right is None:
        resident, steps = draft.device.num_sms * main.min_blocks, _steps_of_tile(draft, main) // draft.group_splits
        return max(BACKWARD_HEAD_SECTION, STEPS_APART * resident // max(steps, 1))
    most = BACKWARD_HEAD_SECTION if problem.window_right is None else CAUSAL_HEAD_SECTION
    if problem.is_packed:
        most = PACKED_IN_ORDER_SECTION if main.dq_in_order else PACKED_HEAD_SECTION
    if problem.window_right is None:
        return most
    heads = problem.group_size // draft.group_splits if main.dq_in_order else 1
    section = min(BACKWARD_L2_BYTES // max(heads * _head_bytes(draft, main), 1), most)
    return max(section, 1 if main.dq_in_order else 2)


def _back_share(problem: Problem, main: MainTile | None) -> int:
    """Of how many heads one walks back from the last query, or 0; kernels/common/backward.cuh says what for."""
    if not isinstance(main, BackwardSm90Tile) or not main.dq_in_order:
        return 0
    if problem.window_right is None or problem.window_left is not None:
        return 0
    if problem.group_size > 1:
        return GROUPED_BACK_SHARE
    return SPLIT_ROLES_BACK_SHARE if main.splits_roles else 0


def _clear_ahead(draft: _Draft, main: MainTile | None) -> int:
    """Heads in launch order from one to that whose accumulators of dq its blocks clear, or 0: a kernel clears all.

    Those side by side, or parts of groups: the blocks of a head have then all started before those of the other.
    """
    problem = draft.problem
    if not isinstance(main, BackwardSm90Tile):
        return 0
    ahead = max(draft.head_section, BACK_SECTION if _back_share(problem, main) else 0)
    places = problem.array_batch * problem.num_heads_kv * draft.group_splits
    blocks = places * draft.tiles_of(problem.seqlen_k, main.block_n)
    is_large = blocks >= CLEAR_WAVES * draft.device.num_sms * main.min_blocks
    return ahead if ahead < places and is_large else 0


def _draft_backward(draft: _Draft, tiles: tuple[Tile, ...] | None) -> None:
    problem, device = draft.problem, draft.device
    main, dq, scores = _backward_rows(draft, tiles)
    draft.tiles = tuple(tile for tile in (main, dq, scores) if tile is not None)
    reduces_dq = "dq" in draft.need and dq is None
    in_order = _dq_in_order(main)
    n_blocks = 0
    if main is not None:
        n_blocks = problem.array_batch * problem.num_heads_kv * draft.tiles_of(problem.seqlen_k, main.block_n)
    if main is not None and n_blocks:
        draft.group_splits = _group_splits(draft, main, n_blocks)
        if draft.group_splits == 1 and not isinstance(main, BackwardTile):
            _share_tail(draft, main, n_blocks)
    draft.defines["CUFLASH_DQ_BY_REDUCTION"] = int(reduces_dq)
    draft.defines["CUFLASH_DQ_IN_ORDER"] = int(in_order)
    draft.defines["CUFLASH_BACK_SHARE"] = _back_share(problem, main)
    draft.defines["CUFLASH_BACK_SECTION"] = BACK_SECTION
    draft.defines["CUFLASH_NEEDS_DK"] = int("dk" in draft.need or main is None)
    draft.defines["CUFLASH_NEEDS_DV"] = int("dv" in draft.need or main is None)
    draft.defines["CUFLASH_SPLITS_GROUP"] = int(draft.group_splits > 1)
    draft.defines["CUFLASH_SPLITS_TAIL"] = int(draft.tail_splits > 1)
    draft.defines["CUFLASH_PAIRS_STATS"] = int(isinstance(main, BackwardSm90Tile))
    if not draft.tiles and "dsinks" not in draft.need:
        return

    # How the kernels around the main one see the fragments in memory.
    around = draft.tiles[0] if draft.tiles else _choose(SCORES_TILES, problem, device)[0]
    if isinstance(main, BackwardSm90Tile | BackwardFloat32Sm90Tile):
        around = helper_of(main)
    if isinstance(main, BackwardSm90Tile):
        draft.head_section = _backward_head_section(draft, main)
    elif isinstance(main, BackwardFloat32Sm90Tile):
        draft.defines["CUFLASH_PLAIN_FRAGMENTS"] = 1
    draft.clear_ahead = _clear_ahead(draft, main) if reduces_dq else 0
    draft.defines["CUFLASH_CLEARS_AHEAD"] = int(draft.clear_ahead > 0)
    dims = {"CUFLASH_DIM_MULTIPLE": (draft.tiles[0] if draft.tiles else around).dim_multiple}
    # delta runs over tiles of the kernels that read it, one block a tile.
    delta = around if dq is None else replace(around, block_m=max(around.block_m, dq.block_m))
    draft.stats_rows = draft.tiles_of(problem.seqlen_q, delta.block_m) * delta.block_m
    draft.defines["CUFLASH_STATS_BLOCK"] = delta.block_m
    draft.scratch["row_stats"] = draft.heads * draft.stats_rows * 2
    draft.add("around/delta.cu", delta, draft.heads * (draft.stats_rows // delta.block_m), 0, **dims)

    if "dsinks" in draft.need:
        warps = {"CUFLASH_NUM_WARPS": SINKS_WARPS, "CUFLASH_MIN_BLOCKS": 1}
        draft.add("around/sinks.cu", delta, problem.num_heads, 16 * SINKS_WARPS, **dims, **warps)
    if scores is not None:
        _draft_scores(draft, scores)
    if main is not None:
        _draft_main(draft, main, n_blocks)
    if dq is not None:
        m_blocks = draft.heads * draft.tiles_of(problem.seqlen_q, dq.block_m)
        draft.add_lists(dq, "key_lists")
        draft.add("sm80/backward_dq.cu", dq, m_blocks, dq.shared_bytes(*draft.padded_dims(dq)))
        if main is not None:
            draft.reasons.append(
                "deterministic: dq has a kernel of its own that adds in a fixed order and recomputes the weights"
            )
    if main is not None:
        _draft_convert(draft, main, around, n_blocks, reduces_dq)


def _draft_convert(draft: _Draft, main: MainTile, around: Tile, n_blocks: int, reduces_dq: bool) -> None:
    """The kernel that makes results of what blocks of `main` added up, or left in parts."""
    problem = draft.problem
    dim, dim_v = draft.padded_dims(main)
    blocks, shared_bytes = 0, 0
    parts = max(draft.group_splits, draft.tail_splits)
    results = len(set(draft.need) & {"dk", "dv"})
    # Warps that leave a part of dk, or of dv: those of 16 keys each, or all that divide both among them.
    part_warps = around.num_warps if around is main else main.block_n // 16
    if parts > 1 and results:
        shared = n_blocks - draft.whole_tiles
        shares = part_warps // around.num_warps
        blocks += shared * shares * results
        shared_bytes = tile_bytes(main.block_n // shares, max(dim, dim_v), main.element_bytes)
        draft.scratch["dkv_partials"] = shared * parts * main.block_n * (dim + dim_v)
        what = "query heads of a key/value head" if draft.group_splits > 1 else "queries of a tile of keys"
        last = "the last " if draft.whole_tiles else ""
        draft.reasons.append(f"{parts} blocks share the {what}: {last}{shared} tiles of keys are few")
    if reduces_dq:
        m_blocks = draft.heads * (draft.stats_rows // main.block_m)
        blocks += m_blocks
        shared_bytes = max(shared_bytes, tile_bytes(main.block_m, dim, main.element_bytes))
        in_order = _dq_in_order(main)
        draft.scratch["dq_accumulator"] = draft.heads * draft.stats_rows * dim + (m_blocks if in_order else 0)
        if draft.clear_ahead:
            draft.scratch["dq_accumulator"] += problem.array_batch * problem.num_heads_kv * draft.group_splits
            draft.reasons.append(f"blocks clear accumulators of dq, {draft.clear_ahead} heads in launch order ahead")
        if in_order and problem.is_packed:
            draft.scratch["dq_accumulator"] += 1  # whether sequences overlap
        if in_order:
            draft.reasons.append("deterministic: tiles of keys add to dq in order")
    if shared_bytes:
        defines = {"CUFLASH_DIM_MULTIPLE": main.dim_multiple, "CUFLASH_PART_WARPS": part_warps}
        draft.add("around/convert.cu", around, blocks, shared_bytes, **defines)


MainTile = BackwardTile | BackwardSm90Tile | BackwardFloat32Sm90Tile


def _backward_rows(
    draft: _Draft, tiles: tuple[Tile, ...] | None
) -> tuple[MainTile | None, DqTile | None, ScoresTile | None]:
    """Rows for the kernels of dk and dv (and mostly dq), of dq alone, and of the gradients of terms of scores."""
    problem, device, need = draft.problem, draft.device, draft.need
    given = tiles or ()
    main: MainTile | None = next((tile for tile in given if isinstance(tile, MainTile)), None)
    dq: DqTile | None = next((tile for tile in given if isinstance(tile, DqTile)), None)
    scores: ScoresTile | None = next((tile for tile in given if isinstance(tile, ScoresTile)), None)
    why_not_split: str | None = "tiles are given"
    split_rows = _BACKWARD_SPLIT[problem.precision]
    if tiles:
        draft.reasons.append(draft.origin)
    else:
        why_not_split = _why_not_split(draft, split_rows)
        if why_not_split is None and problem.deterministic and "dq" in need:
            why_not_split = "it adds to dq in no fixed order"

    if not set(need) & {"dk", "dv"} and not ("dq" in need and (why_not_split is None or main)):
        main = None
    elif not tiles:
        if why_not_split is None:
            main, reason = _choose(split_rows, problem, device)
        elif problem.deterministic and "dq" in need and problem.block_mask is not None:
            main, reason = _choose(BACKWARD_TILES, problem, device)
            if device.arch == 90 and ITEMSIZE[problem.dtype] == 2:
                reason += "\nnot sm90/backward: the order of dq counts tiles that block_mask hides"
            reason += why_not_split and f"\nnot sm90/backward_fp32: {why_not_split}"
        else:
            tables = (BACKWARD_SM90_TILES, BACKWARD_TILES)
            mapped = ("q", "k", "v", "dout", *(name for name in ("dk", "dv") if name in need))
            main, reason = _choose_of(tables, draft, mapped, "sm90/backward")
            reason += why_not_split and f"\nnot sm90/backward_fp32: {why_not_split}"
        draft.reasons.append(reason)
    missing = " and ".join(name for name in ("dk", "dv") if name not in need)
    if missing and isinstance(main, BackwardSm90Tile | BackwardFloat32Sm90Tile):
        draft.reasons.append(f"{missing}: not stored, but computed; that kernel makes the products of both")

    in_order = isinstance(main, BackwardSm90Tile) and problem.deterministic and "dq" in need
    if in_order and problem.block_mask is not None:
        raise NotImplementedError(
            "tiles: got a BackwardSm90Tile with deterministic=True and block_mask, expected a BackwardTile and a DqTile"
        )
    if isinstance(main, BackwardSm90Tile):
        main = replace(main, dq_in_order=in_order)
    if "dq" not in need or (main is not None and (in_order or not problem.deterministic)):
        dq = None
    elif dq is None:
        dq, reason = _choose(DQ_TILES, problem, device)
        draft.reasons.append(reason)
    if dq is not None and main is None:
        draft.reasons.append("dq alone has a kernel of its own, which makes three products and not five")
    if not _score_gradients(draft):
        scores = None
    elif scores is None:
        scores, reason = _choose(SCORES_TILES, problem, device)
        draft.reasons.append(reason)
    return main, dq, scores


def _score_gradients(draft: _Draft) -> tuple[str, ...]:
    """Those that kernels of their own make, which compute the gradients of the scores again."""
    return tuple(name for name in draft.need if name in _SCORE_GRADIENTS)


def _draft_main(draft: _Draft, main: MainTile, n_blocks: int) -> None:
    """The kernel whose blocks own keys."""
    source = "sm80/backward.cu"
    if isinstance(main, BackwardSm90Tile):
        source, m, n = "sm90/backward.cu", main.block_m, main.block_n
        results: dict[str, int] = {name: 64 for name in ("dk", "dv") if name in draft.need}
        draft.map_tensors({"q": m, "k": n, "v": n, "dout": m, **results})
    elif isinstance(main, BackwardFloat32Sm90Tile):
        source = "sm90/backward_fp32.cu"
        draft.add_bf16_split(main, ("q", "k", "v", "dout"))
        draft.map_tensors({f"{name}_split": 64 for name in ("q", "k", "v", "dout")})
    draft.add_lists(main, "query_lists")
    blocks = (n_blocks - draft.whole_tiles) * draft.group_splits * draft.tail_splits + draft.whole_tiles
    draft.add(source, main, blocks, main.shared_bytes(*draft.padded_dims(main)))


def _draft_scores(draft: _Draft, tile: ScoresTile) -> None:
    """The kernels of gradients of terms of scores: one for dbias, and one for all that are sums."""
    problem, device = draft.problem, draft.device
    shared_bytes = tile.shared_bytes(*draft.padded_dims(tile))
    tiles_of = (draft.tiles_of(problem.seqlen_q, tile.block_m), -(-problem.mean_sequence.seqlen_k // tile.block_n))
    sizes = (problem.array_batch, problem.num_heads, *tiles_of)
    at_once = device.num_sms * tile.min_blocks
    reduce = {"CUFLASH_NUM_WARPS": SCORES_REDUCE_WARPS, "CUFLASH_MIN_BLOCKS": 1}
    reduce_bytes = 16 * SCORES_REDUCE_WARPS

    def defines(sums: tuple[bool, ...], need: Collection[str]) -> dict[str, int]:
        axes = {f"CUFLASH_SUMS_{x}": int(on) for x, on in zip(_AXES, sums, strict=True)}
        return axes | {f"CUFLASH_NEEDS_{name.upper()}": int(name in need) for name in _SCORE_GRADIENTS}

    def shares(owned: int, summed: int) -> int:
        return max(1, min(summed, at_once // max(owned, 1)))

    wanted = _score_gradients(draft)
    if "dbias" in wanted:
        operand = draft.arrays["dbias"]
        sums = tuple(stride == 0 for stride in operand.strides)
        owned = math.prod(n for n, summed in zip(sizes, sums, strict=True) if not summed)
        draft.score_splits = shares(owned, math.prod(sizes) // max(owned, 1))
        options = defines(sums, ("dbias",))
        draft.add("sm80/backward_scores.cu", tile, owned * draft.score_splits, shared_bytes, ("dbias",), **options)
        axes = ", ".join(f"{n} {x}" for x, n, summed in zip(_AXES_WORDS, sizes, sums, strict=True) if summed and n > 1)
        draft.reasons.append(f"dbias: {owned} tiles of pairs" + (f", each a sum over {axes}" if axes else ""))
        if draft.score_splits > 1:
            rows, columns = (1 if sums[2] else tile.block_m), (1 if sums[3] else tile.block_n)
            draft.scratch["score_partials"] = owned * draft.score_splits * rows * columns
            draft.add("around/scores_reduce.cu", tile, owned, reduce_bytes, ("dbias",), **options, **reduce)
            draft.reasons[-1] += f" that {draft.score_splits} blocks share: tiles are few"
    sums_wanted = [name for name in wanted if name != "dbias"]
    if sums_wanted:
        m_blocks = math.prod(sizes[:3])
        draft.sums_splits = shares(m_blocks, sizes[3])
        options = defines((False, False, False, True), sums_wanted)
        draft.add("sm80/backward_scores.cu", tile, m_blocks * draft.sums_splits, shared_bytes, sums_wanted, **options)
        draft.scratch["sums_partials"] = 3 * m_blocks * draft.sums_splits
        sums_batch = problem.alibi_slopes is not None and draft.arrays["dalibi_slopes"].strides[0] == 0
        slopes = problem.num_heads * (1 if sums_batch else problem.batch) if "dalibi_slopes" in wanted else 0
        options["CUFLASH_SUMS_BATCH"] = int(sums_batch)
        blocks = slopes + len(set(sums_wanted) - {"dalibi_slopes"})
        draft.add("around/scores_reduce.cu", tile, blocks, reduce_bytes, sums_wanted, **options, **reduce)
        draft.reasons.append(
            f"{', '.join(sums_wanted)}: sums by {m_blocks * draft.sums_splits} blocks, added in a fixed order"
        )


# ---- what is served, and by which row --------------------------------------------------------------------------------


def check_served(problem: Problem, device: DeviceSpec) -> None:
    """Raise NotImplementedError, with the limit and the remedy, for a problem that no kernel serves on `device`."""
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        name, got = ("q", problem.head_dim) if problem.head_dim > MAX_HEAD_DIM else ("v", problem.head_dim_v)
        raise NotImplementedError(
            f"{name}: got head dimension {got}, expected at most {MAX_HEAD_DIM} on the GPU; NumPy arrays of any head "
            "dimension are served on the CPU"
        )
    if device.arch < 80:
        raise NotImplementedError(
            f"device: got compute capability {device.arch / 10:.1f}, expected 8.0 or later (mma.sync on bfloat16, "
            "TF32 and float64, cp.async); NumPy arrays are served on the CPU"
        )


def _check_blocks(blocks: int) -> None:
    if blocks > 2**31 - 1:
        raise NotImplementedError(f"q: got {blocks} tiles, expected at most 2**31 - 1 in one launch; split the batch")


def _contiguous(problem: Problem, name: str) -> Operand:
    """A result, or dout, in the layout of the problem."""
    batch = problem.array_batch
    heads, seqlen, dim = {
        "out": (problem.num_heads, problem.seqlen_q, problem.head_dim_v),
        "dout": (problem.num_heads, problem.seqlen_q, problem.head_dim_v),
        "dk": (problem.num_heads_kv, problem.seqlen_k, problem.head_dim),
        "dv": (problem.num_heads_kv, problem.seqlen_k, problem.head_dim_v),
    }[name]
    strides = (heads * seqlen * dim, seqlen * dim, dim, 1)
    if problem.layout == "bshd":
        strides = (heads * seqlen * dim, dim, heads * dim, 1)
    return Operand(shape=(batch, heads, seqlen, dim), strides=strides, dtype=problem.dtype)


def _choose_of(tables: tuple[tuple, tuple], draft: _Draft, mapped: tuple[str, ...], kernel: str) -> tuple[Any, str]:
    """A row for the kernel of compute capability 9.0 where it serves the problem, else one for the kernel for all."""
    sm90, every = tables
    problem, device = draft.problem, draft.device
    if device.arch != 90 or ITEMSIZE[problem.dtype] != 2:
        return _choose(every, problem, device)
    obstacle = _why_not_mapped(draft, mapped)
    if obstacle is not None:
        tile, reason = _choose(every, problem, device)
        return tile, f"{reason}\nnot {kernel}: {obstacle}, which TMA cannot serve"
    largest = max(row.max_dim for row in sm90)
    if max(problem.head_dim, problem.head_dim_v) > largest:
        tile, reason = _choose(every, problem, device)
        return tile, f"{reason}\nnot {kernel}: it serves head dimensions up to {largest}"
    return _choose(sm90, problem, device)


def _why_not_mapped(draft: _Draft, names: tuple[str, ...]) -> str | None:
    """Why TMA cannot read these arrays, or write those that are results; None if it can."""
    obstacles = (why_not(name, draft.arrays[name], written=name in _WRITTEN) for name in names)
    obstacle = next(filter(None, obstacles), None)
    if obstacle is None and draft.access_bytes < 16:
        return f"an array is aligned to {draft.access_bytes} bytes only, not 16"
    return obstacle


def _choose(table: tuple, problem: Problem, device: DeviceSpec) -> tuple[Any, str]:
    """The first row that serves the head dimensions and fits the device, and the story of the choice."""
    rejected = []
    for tile in table:
        if not serves_dims(tile, problem):
            continue
        if isinstance(tile, ForwardSm90Tile) and not tile.suits(problem):
            rejected.append(f"not {label_of(tile)}: for {SERVES[tile.serves]}")
            continue
        excess = why_too_large(tile, problem, device)
        if excess:
            rejected.append(f"not {label_of(tile)}: {excess}")
            continue
        return tile, "\n".join([f"{label_of(tile)}: {tile.origin}", *rejected])
    raise NotImplementedError(
        f"device: no tile of {problem.dtype} at head dimensions {problem.head_dim} and {problem.head_dim_v} fits "
        f"{device.name}, got {device.shared_bytes_per_block} bytes of shared memory a block, expected more; NumPy "
        "arrays are served on the CPU"
    )


def label_of(tile: Tile) -> str:
    """The tile in words."""
    return (
        f"{type(tile).__name__} {tile.block_m} x {tile.block_n}, {tile.num_warps} warps, "
        f"{tile.num_stages} stages, {tile.min_blocks} resident blocks"
    )


def serves_dims(tile: Tile, problem: Problem) -> bool:
    """Whether the tile is of elements of this size and large enough for the head dimensions."""
    dims = (round_up(dim, tile.dim_multiple) for dim in (problem.head_dim, problem.head_dim_v))
    return tile.element_bytes == ITEMSIZE[problem.dtype] and max(dims) <= tile.max_dim


def why_too_large(tile: Tile, problem: Problem, device: DeviceSpec) -> str:
    """Why as many blocks as the tile promises do not fit on a multiprocessor; "" where they do."""
    shared = tile.shared_bytes(*(round_up(dim, tile.dim_multiple) for dim in (problem.head_dim, problem.head_dim_v)))
    needed = tile.min_blocks * (shared + SHARED_BYTES_RESERVED)
    if shared <= device.shared_bytes_per_block and needed <= device.shared_bytes_per_sm:
        return ""
    return f"{shared} bytes for each exceed the {device.shared_bytes_per_sm} bytes of shared memory of a multiprocessor"


_DTYPE_TAGS = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32", "float64": "Float64"}


def _common_defines(problem: Problem, device: DeviceSpec, load_bytes: int, store_bytes: int) -> dict[str, str | int]:
    transforms = problem.softcap is not None or problem.alibi_slopes is not None or problem.bias is not None
    return {
        "CUFLASH_ARCH": device.arch,
        "CUFLASH_DTYPE": _DTYPE_TAGS[problem.dtype],
        "CUFLASH_ROUNDS_TO_TF32": int("tf32" in _options(problem)),
        "CUFLASH_HEAD_DIM": problem.head_dim,
        "CUFLASH_HEAD_DIM_V": problem.head_dim_v,
        "CUFLASH_LOAD_BYTES": load_bytes,
        "CUFLASH_STORE_BYTES": store_bytes,
        "CUFLASH_HAS_RIGHT_BOUND": int(problem.window_right is not None),
        "CUFLASH_HAS_LEFT_BOUND": int(problem.window_left is not None),
        "CUFLASH_HAS_SOFTCAP": int(problem.softcap is not None),
        "CUFLASH_HAS_ALIBI": int(problem.alibi_slopes is not None),
        "CUFLASH_HAS_MASK": int(problem.mask is not None),
        "CUFLASH_MASK_BLOCK_M": problem.block_size[0],
        "CUFLASH_MASK_BLOCK_N": problem.block_size[1],
        "CUFLASH_HAS_SINKS": int(problem.sinks is not None),
        "CUFLASH_HAS_DROPOUT": int(problem.dropout > 0),
        "CUFLASH_BIAS_BYTES": ITEMSIZE[problem.bias.dtype] if problem.bias is not None else 0,
        "CUFLASH_KV_LENGTHS_BYTES": ITEMSIZE[problem.kv_lengths.dtype] if problem.kv_lengths is not None else 0,
        "CUFLASH_PACKED": {"top_left": 1, "bottom_right": 2}[problem.alignment] if problem.is_packed else 0,
        "CUFLASH_SCALE_IN_EXPONENT": int(not transforms and problem.scale > 0),
        "CUFLASH_PAGE_SIZE": problem.page_size,
        "CUFLASH_FOLLOWS_LENGTHS": int(problem.follows_lengths),
        "CUFLASH_PARAMS_BYTES": PARAMS_BYTES,
        "CUFLASH_PAIRS": 0,
        "CUFLASH_PLAIN_FRAGMENTS": 0,
    }


def _options(problem: Problem) -> list[str]:
    """Names of what makes the kernels of this problem differ from plain attention."""
    return [
        name
        for name, on in (
            ("right_bound", problem.window_right is not None),
            ("left_bound", problem.window_left is not None),
            ("softcap", problem.softcap is not None),
            ("alibi_slopes", problem.alibi_slopes is not None),
            ("bias", problem.bias is not None),
            ("mask", problem.mask is not None),
            ("block_mask", problem.block_mask is not None),
            ("kv_lengths", problem.kv_lengths is not None),
            ("sinks", problem.sinks is not None),
            (f"pages{problem.page_size}", problem.page_size > 0),
            ("packed", problem.is_packed and problem.alignment == "bottom_right"),
            ("packed_top_left", problem.is_packed and problem.alignment == "top_left"),
            ("dropout", problem.dropout > 0),
            ("tf32", problem.dtype == "float32" and problem.precision == "tf32"),
        )
        if on
    ]


def _symbol(source: str, problem: Problem, tile: Tile) -> str:
    """The kernel's symbol spells its source and its configuration, for profilers."""
    dims = f"d{problem.head_dim}" + (f"x{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    file = source.removesuffix(".cu").replace("/", "_")
    parts = [file, problem.dtype, dims, f"{tile.block_m}x{tile.block_n}", *_options(problem)]
    return "_".join(parts)
