"""Every row of the tables of tiles, compiled for every kind of device that it fits; no device needed.

That the parameter struct and the plan of shared memory agree between Python and the kernels is asserted in the kernels:
they would not compile.
"""

import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

import cuflash.testing as ct
from cuflash.gpu.compiler import compile_spec, supported_archs
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm80.tiles import BACKWARD_TILES, DQ_TILES, FLOAT8_TILES, FORWARD_TILES, DqTile, ForwardTile
from cuflash.plan.sm90.conditions import NARROW_VALUES
from cuflash.plan.sm90.decode_tiles import DECODE_FLOAT8_SM90_TILES, DECODE_SM90_TILES, DecodeSm90Tile
from cuflash.plan.sm90.tiles import (
    BACKWARD_FLOAT32_SM90_TILES,
    BACKWARD_SM90_TILES,
    BACKWARD_TF32_SM90_TILES,
    FORWARD_FLOAT8_SM90_TILES,
    FORWARD_FLOAT32_SM90_TILES,
    FORWARD_SM90_TILES,
    FORWARD_TF32_SM90_TILES,
    BackwardFloat32Sm90Tile,
    BackwardSm90Tile,
    ForwardFloat8Sm90Tile,
    ForwardFloat32Sm90Tile,
    ForwardSm90Tile,
)
from cuflash.plan.sm90.wide_tiles import (
    BACKWARD_WIDE_SM90_TILES,
    DECODE_WIDE_SM90_TILES,
    DQ_WIDE_SM90_TILES,
    FORWARD_WIDE_SM90_TILES,
    BackwardWideSm90Tile,
    DecodeWideSm90Tile,
    ForwardWideSm90Tile,
)
from cuflash.plan.tiles import Tile, round_up, serves_dims, why_too_large
from cuflash.spec.passes import BACKWARD, FORWARD
from cuflash.spec.problem import make_problem
from tests import sampling
from tests.compile.spills import (
    SPILLS,
    SPILLS_OF_ADDENDS,
    SPILLS_OF_BLOCKS,
    SPILLS_OF_DROPOUT,
    SPILLS_OF_FLOAT8,
    SPILLS_OF_LATER_ARCHS,
    SPILLS_OF_OPTIONS,
    SPILLS_OF_PACKED,
    SPILLS_OF_PAGES,
    SPILLS_OF_ROW_SUMS,
)
from tests.sampling import sample

REGISTERS_OF_SM = 65536
# What ptxas says of a kernel of 9.0 in which it puts a wait after every product.
SERIALIZED = "wgmma.mma_async instructions are serialized"
# Shared memory of 64, 100, 164 and 228 KiB, for which rows are made.
ARCHS = ("7.5", "8.6", "8.0", "9.0")
OTHER_ARCHS = ("8.7", "8.9", "10.0", "10.3", "11.0", "12.0", "12.1")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A row of a table on a device of `arch`, for one variant of the problem."""

    tile: Tile
    arch: str
    variant: str = "causal"

    def __str__(self) -> str:
        tile = self.tile
        sizes = f"{tile.max_dim}-{tile.block_m}x{tile.block_n}-w{tile.num_warps}b{tile.min_blocks}"
        name = f"{type(tile).__name__}-{tile.element_bytes}B-{sizes}"
        if bf16_terms_of(tile):
            name += f"-{bf16_terms_of(tile)}parts"
        return f"{self.arch}-{name}-{self.variant}"

    @property
    def device(self) -> DeviceSpec:
        return DeviceSpec.for_arch(self.arch)

    def plan(self):
        """The plan in which the row has its largest head dimensions."""
        tile = self.tile
        variant = VARIANTS[self.variant]
        dtype = {2: variant["dtype"], 4: "float32", 8: "float64"}[tile.element_bytes]
        seqlen_q, seqlen_k = (9, 2048) if isinstance(tile, DecodeSm90Tile | DecodeWideSm90Tile) else (64, 64)
        dim = tile.max_dim - 3 * (self.variant == "odd rows")
        sizes: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": dim}
        if getattr(tile, "serves", "any") == "long, narrow values":
            sizes["head_dim_v"] = NARROW_VALUES
        sizes["has_values"] = takes_values(tile)
        case = ct.Case(**sizes | variant | {"dtype": dtype})
        arrays = case.arrays()
        is_tf32 = bf16_terms_of(tile) == 2 if bf16_terms_of(tile) else self.variant == "full"
        options = replace(
            case.options,
            deterministic=isinstance(tile, DqTile) or self.variant == "turns",
            precision="tf32" if is_tf32 else "highest",
        )
        if isinstance(tile, DecodeWideSm90Tile) and tile.v_in_k:
            arrays["v"] = arrays["k"][..., :512]
        problem = make_problem(options, *ct.qkv(arrays), **ct.optional(arrays))
        if isinstance(tile, DecodeWideSm90Tile) and tile.v_in_k:
            problem = replace(problem, v=replace(problem.v, in_k=True))
        of_forward = ForwardTile | ForwardSm90Tile | ForwardFloat32Sm90Tile | ForwardFloat8Sm90Tile | DecodeSm90Tile
        if isinstance(tile, of_forward | ForwardWideSm90Tile):
            return choose_plan(problem, self.device, FORWARD, tiles=(tile,))
        if isinstance(tile, DqTile):
            main = next(row for row in BACKWARD_TILES if goes_with(row, tile))
            return choose_plan(problem, self.device, BACKWARD, tiles=(main, tile))
        if isinstance(tile, BackwardWideSm90Tile):
            dq = next(row for row in DQ_WIDE_SM90_TILES if row.max_dim == tile.max_dim)
            return choose_plan(problem, self.device, BACKWARD, tiles=(tile, dq))
        return choose_plan(problem, self.device, BACKWARD, tiles=(tile, DQ_TILES[0]))

    def kernels(self):
        """Those whose resources depend on the row."""
        kernels = self.plan().kernels
        if isinstance(self.tile, DqTile):
            return [kernel for kernel in kernels if kernel.source == "sm80/backward_dq.cu"]
        # Helper kernels take as many whatever the row, but for the bytes of an element.
        is_first = self.tile is first_of_its_type(self.tile)
        return [kernel for kernel in kernels if is_first or not kernel.source.startswith("helpers/")]


VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"dtype": "bfloat16", "causal": True},
    "full": {"dtype": "float16"},
    "groups": {"dtype": "float16", "num_heads": 2, "num_heads_kv": 1, "causal": True},
    # Tiles enough for blocks to clear accumulators of dq, as packed sequences have below; then also some whose queries
    # blocks share.
    "turns": {"dtype": "bfloat16", "causal": True, "batch": 33, "num_heads": 8},
    "splits": {"dtype": "bfloat16", "seqlen_q": 2048, "seqlen_k": 2048, "num_heads": 17},
    "narrow": {"dtype": "bfloat16", "causal": True, "strides": "padded"},
    "odd rows": {"dtype": "bfloat16"},  # as many columns are no multiple of 16 bytes
    "whole": {"dtype": "bfloat16", "window": (9, 20), "scale": -1.0, "sinks": True},
    "bounds": {"dtype": "float16", "window": (9, None), "kv_lengths": (60,), "sinks": True},
    # Few queries: the last block of a head combines results, with sinks; or these are too many for a block.
    "combined": {"dtype": "bfloat16", "causal": True, "seqlen_q": 1, "kv_lengths": (1060,), "sinks": True},
    "afterwards": {"dtype": "float16", "causal": True, "seqlen_q": 64, "seqlen_k": 8192},
    "packed": {
        "dtype": "bfloat16",
        "causal": True,
        "num_heads": 100,
        "cu_seqlens_q": (0, 30, 64),
        "cu_seqlens_k": (0, 30, 64),
    },
    "no values": {"dtype": "bfloat16", "causal": True, "has_values": False},
    # What compute capability 9.0 adds to the scores of a tile at once.
    "softcap": {"dtype": "float16", "softcap": 5.0},
    "slopes": {"dtype": "bfloat16", "causal": True, "alibi_slopes": (1,)},
    "bias": {"dtype": "bfloat16", "bias": (64, 64), "bias_dtype": "input"},
    "wide bias": {"dtype": "float16", "bias": (64, 64)},
    "bias of few": {"dtype": "bfloat16", "causal": True, "bias": (9, 2048), "bias_dtype": "input"},
    "wide bias of few": {"dtype": "float16", "bias": (2048,), "alibi_slopes": (1,), "softcap": 5.0},
    "keys": {"dtype": "bfloat16", "bias": (64,), "mask": (1, 64), "bias_dtype": "input"},
    "bias and keys": {"dtype": "bfloat16", "bias": (64, 64), "mask": (1, 64), "bias_dtype": "input"},
    # Operands of float32 that are split as they are loaded.
    "few columns": {"dtype": "float32", "head_dim": 32, "causal": True},
    "few columns, bias and keys": {"dtype": "float32", "head_dim": 20, "bias": (64, 64), "mask": (1, 64)},
    "mask": {"dtype": "bfloat16", "mask": (64, 64), "causal": True},
    "dropout": {"dtype": "bfloat16", "causal": True, "dropout": 0.1},
    "blocks": {"dtype": "bfloat16", "block_mask": (), "causal": True},
    "dropout of all": {"dtype": "float16", "dropout": 0.1},
    "pages of 16": {"dtype": "bfloat16", "causal": True, "kv_lengths": (60,), "page_size": 16},
    "pages": {"dtype": "float16", "window": (9, None), "kv_lengths": (60,), "page_size": 64, "sinks": True},
    "float8": {
        "dtype": "float16",
        "causal": True,
        "kv_dtype": "float8_e4m3fn",
        "k_scale": "token",
        "v_scale": "token",
        "kv_lengths": (60,),
        "page_size": 16,
    },
    "float8 queries": {
        "dtype": "bfloat16",
        "causal": True,
        "kv_dtype": "float8_e4m3fn",
        "q_float8": True,
        "q_scale": "token",
        "k_scale": "token",
        "v_scale": "token",
        "sinks": True,
    },
    "float8 products": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "q_float8": True, "causal": True},
    "float8 products, full": {"dtype": "float16", "kv_dtype": "float8_e4m3fn", "q_float8": True},
    "float8 products of heads": {
        "dtype": "bfloat16",
        "kv_dtype": "float8_e5m2",
        "q_float8": True,
        "k_scale": "head",
        "v_scale": "head",
    },
    "float8 products, 192": {
        "dtype": "bfloat16",
        "kv_dtype": "float8_e5m2",
        "q_float8": True,
        "head_dim": 192,
        "causal": True,
        "kv_lengths": (60,),
    },
    "float8 products, bounds": {
        "dtype": "bfloat16",
        "kv_dtype": "float8_e5m2",
        "q_float8": True,
        "q_scale": "token",
        "k_scale": "head",
        "v_scale": "head",
        "window": (9, 20),
        "kv_lengths": (60,),
        "sinks": True,
    },
    "float8 of heads": {"dtype": "bfloat16", "kv_dtype": "float8_e5m2", "k_scale": "head", "v_scale": "head"},
    "options": {
        "dtype": "float16",
        "causal": True,
        "window": (9, None),
        "softcap": 5.0,
        "bias": (64, 64),
        "mask": (64, 64),
        "kv_lengths": (60,),
        "kv_lengths_dtype": "int64",
        "alibi_slopes": (1,),
        "sinks": True,
    },
}


def is_sm90(tile):
    """Whether the row is of kernels for compute capability 9.0 alone."""
    types = ForwardSm90Tile | DecodeSm90Tile | BackwardSm90Tile | ForwardFloat32Sm90Tile | BackwardFloat32Sm90Tile
    return isinstance(tile, types | ForwardFloat8Sm90Tile | ForwardWideSm90Tile | BackwardWideSm90Tile)


def takes_values(tile):
    """Whether the row serves calls with values, which take shared memory."""
    return getattr(tile, "serves", "") != "no values"


def fits(tile, arch):
    """Whether the blocks that the row wants resident fit on an SM, at its largest head dimensions."""
    if is_sm90(tile) and arch != "9.0":
        return False
    device = DeviceSpec.for_arch(arch)
    dim = round_up(tile.max_dim, tile.dim_multiple)
    shared_bytes = tile.shared_bytes(dim, dim if takes_values(tile) else 0)
    resident = tile.min_blocks * (shared_bytes + device.shared_bytes_reserved)
    return shared_bytes <= device.shared_bytes_per_block and resident <= device.shared_bytes_per_sm


def bf16_terms_of(tile: Tile) -> int:
    """How many bf16 terms float32 is split into: three for the highest precision, two for TF32; 0 if it has none."""
    return tile.bf16_terms if isinstance(tile, ForwardFloat32Sm90Tile | BackwardFloat32Sm90Tile) else 0


def goes_with(main, tile):
    """Whether a row of BACKWARD_TILES serves what the row `tile` serves."""
    return main.element_bytes == tile.element_bytes and main.max_dim >= tile.max_dim


def first_of_its_type(tile):
    same = (
        row
        for table in TABLES
        for row in table
        if type(row) is type(tile)
        and (row.element_bytes, bf16_terms_of(row)) == (tile.element_bytes, bf16_terms_of(tile))
    )
    return next(same, None)


def first_that_fits(table, arch, element_bytes):
    return next(tile for tile in table if tile.element_bytes == element_bytes and fits(tile, arch))


TABLES = (
    *(FORWARD_TILES, BACKWARD_TILES, DQ_TILES),
    *(FORWARD_SM90_TILES, DECODE_SM90_TILES, BACKWARD_SM90_TILES),
    *(FORWARD_FLOAT32_SM90_TILES, BACKWARD_FLOAT32_SM90_TILES),
    *(FORWARD_TF32_SM90_TILES, BACKWARD_TF32_SM90_TILES),
    FORWARD_WIDE_SM90_TILES,
    DECODE_WIDE_SM90_TILES,
    BACKWARD_WIDE_SM90_TILES,
)


@functools.cache
def rows_taken(table, arch):
    """The rows of a table that the planner gives for some head dimension."""
    device, taken = DeviceSpec.for_arch(arch), set()
    for dim, dtype in itertools.product(
        (*range(16, 257, 16), *range(320, 1025, 64)), ("float16", "float32", "float64")
    ):
        problem = ct.Case(seqlen_q=1, seqlen_k=1, head_dim=dim, dtype=dtype).problem
        serve = (row for row in table if serves_dims(row, problem) and not why_too_large(row, problem, device))
        taken |= {next(serve, None)}
    return taken


def archs_of(tile, table):
    """The devices that the row is compiled for: those where the planner takes it and it fits at its largest.

    One for each size of shared memory. Wide elements take long to compile: the device with the most.
    """
    known = ARCHS if tile.element_bytes == 2 else ("8.6", "9.0")
    archs = [arch for arch in known if fits(tile, arch)]
    taken = [arch for arch in archs if tile in rows_taken(table, arch)] or archs[:1]
    return taken if tile.element_bytes == 2 else taken[-1:]


# What may differ between rows. On 7.5 tensor cores take float16 alone.
EVERY_ROW = [
    Target(tile=tile, arch=arch, variant="full" if arch == "7.5" else "causal")
    for table in TABLES
    for tile in table
    for arch in archs_of(tile, table)
]
FLOAT32_NARROW = next(tile for tile in FORWARD_FLOAT32_SM90_TILES if tile.serves == "any")
# What may differ between problems and devices.
OTHERS = [
    *(
        Target(tile=first_that_fits(table, arch, element_bytes), arch=arch, variant=variant)
        for table in TABLES[:3]
        for element_bytes, archs in ((2, ("8.0", "12.0")), (4, ("9.0",)), (8, ("9.0",)))
        for arch in archs
        for variant in ("full", "groups", "narrow", "options")
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in FORWARD_SM90_TILES
        for variant in ("full", "options" if tile.serves == "any" else "bounds")
    ),
    *(
        Target(tile=first_that_fits(table, "9.0", element_bytes), arch="9.0", variant="no values")
        for table in TABLES[:3]
        for element_bytes in (2, 4, 8)
    ),
    *(
        Target(tile=tile, arch="9.0", variant="no values")
        for table in (FORWARD_SM90_TILES, BACKWARD_SM90_TILES, FORWARD_FLOAT32_SM90_TILES, BACKWARD_FLOAT32_SM90_TILES)
        for tile in table
    ),
    *(
        Target(tile=tile, arch="9.0", variant="odd rows")
        for tile in (*FORWARD_SM90_TILES, *FORWARD_WIDE_SM90_TILES[::2], *BACKWARD_SM90_TILES)
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in (*FORWARD_FLOAT32_SM90_TILES, *FORWARD_TF32_SM90_TILES)
        for variant in (("full", "narrow", "options") if tile.bf16_terms == 3 else ("bounds",))
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in DECODE_SM90_TILES
        for variant in (
            "full",
            "groups",
            "bounds",
            "whole",
            "combined",
            "afterwards",
            "softcap",
            "slopes",
            "bias of few",
            "wide bias of few",
        )
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in (*BACKWARD_SM90_TILES, *BACKWARD_FLOAT32_SM90_TILES, *BACKWARD_TF32_SM90_TILES)
        for variant in ("full", "groups", "turns", "splits", "options")
        if variant != "turns" or isinstance(tile, BackwardSm90Tile)
        if bf16_terms_of(tile) != 2 or variant == "groups"
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in FORWARD_SM90_TILES
        if tile.serves in ("no pairs", "long", "long window", "few full", "few bounded", "bias")
        for variant in (
            ("softcap", "slopes", "keys")
            if tile.serves != "bias"
            else ("wide bias",)
            if "float32" in tile.origin
            else ("bias",)
        )
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in BACKWARD_SM90_TILES
        for variant in ("softcap", "slopes", "bias", "keys", "mask")
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for table in (FORWARD_FLOAT32_SM90_TILES, BACKWARD_FLOAT32_SM90_TILES)
        for tile in table
        for variant in ("softcap", "slopes", "bias", "keys", "bias and keys")
        if getattr(tile, "serves", "") != "no values" or variant in ("softcap", "slopes", "keys")
    ),
    *(
        Target(tile=tile, arch="9.0", variant="bias and keys" if tile.serves == "bias" else "keys")
        for tile in FORWARD_TF32_SM90_TILES
    ),
    *(Target(tile=tile, arch="9.0", variant="bias and keys") for tile in BACKWARD_TF32_SM90_TILES),
    *(
        Target(tile=FLOAT32_NARROW, arch="9.0", variant=variant)
        for variant in ("few columns", "few columns, bias and keys")
    ),
    *(
        Target(tile=tile, arch="9.0", variant="mask")
        for tile in FORWARD_SM90_TILES
        if tile.serves in ("lists", "no pairs", "few full", "few bounded") and tile.block_n % 64 == 0
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in FORWARD_WIDE_SM90_TILES
        for variant in ("full", "groups", "bounds", "softcap", "slopes", "bias", "mask", "blocks", "options")
        if tile.cluster == 1 or variant in ("bounds", "options")
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in BACKWARD_WIDE_SM90_TILES
        for variant in ("full", "groups", "bounds", "splits", "softcap", "slopes", "bias", "mask", "blocks", "options")
        if tile.max_dim in (320, 512, 1024) or variant in ("full", "bounds", "options")
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in DECODE_WIDE_SM90_TILES
        for variant in ("full", "groups", "bounds", "softcap", "slopes", "bias of few")
    ),
    *(
        Target(tile=tile, arch="9.0", variant="blocks")
        for tile in (
            *(first_that_fits(table, "9.0", 2) for table in TABLES[:3]),
            *(tile for tile in FORWARD_SM90_TILES if tile.max_dim <= 128 and tile.block_n == 128),
            *BACKWARD_SM90_TILES,
            *(FLOAT32_NARROW, BACKWARD_FLOAT32_SM90_TILES[0]),
        )
    ),
    *(
        Target(tile=first_that_fits(table, arch, element_bytes), arch=arch, variant="dropout")
        for table in TABLES[:3]
        for element_bytes, arch in ((2, "8.0"), (2, "9.0"), (4, "9.0"), (8, "9.0"))
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for table in TABLES[3:]
        for tile in table
        for variant in ("dropout", "dropout of all")
        if not isinstance(tile, DecodeSm90Tile | DecodeWideSm90Tile)
        if variant == "dropout" or (tile.element_bytes == 2 and tile.max_dim in (64, 128))
    ),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in (*DECODE_SM90_TILES, *(tile for tile in FORWARD_SM90_TILES if tile.serves == "any"))
        for variant in ("pages of 16", "pages")
        if variant == "pages" or tile.max_dim in (64, 128)
    ),
    *(
        Target(tile=first_that_fits(FORWARD_TILES, arch, element_bytes), arch=arch, variant=variant)
        for arch, element_bytes, variant in (("8.0", 2, "pages"), ("12.0", 2, "pages of 16"), ("9.0", 4, "pages"))
    ),
    *(
        Target(tile=tile, arch="9.0", variant="packed")
        for tile in (
            *(first_that_fits(table, "9.0", 2) for table in TABLES[:3]),
            *FORWARD_SM90_TILES,
            *BACKWARD_SM90_TILES,
        )
    ),
    *(
        Target(tile=first_that_fits(table, arch, element_bytes), arch=arch)
        for table in TABLES[:3]
        for element_bytes, archs in (
            (2, (*OTHER_ARCHS, "7.5")),
            (4, ("10.0", "12.1")),
            (8, ("10.0", "12.1")),
        )
        for arch in archs
    ),
    *(Target(tile=first_that_fits(table, "7.5", 2), arch="7.5", variant="options") for table in TABLES[:3]),
    Target(tile=first_that_fits(FORWARD_TILES, "7.5", 4), arch="7.5"),
]
FLOAT8 = [
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for tile in DECODE_FLOAT8_SM90_TILES
        for variant in ("float8", "float8 of heads", "float8 queries")
    ),
    *(
        Target(tile=tile, arch=arch, variant=variant)
        for tile in FLOAT8_TILES
        for arch, variant in (("8.0", "float8"), ("8.9", "float8"), ("9.0", "float8 queries"))
        if tile.element_bytes == 2 and fits(tile, arch)
    ),
    Target(tile=first_that_fits(FLOAT8_TILES, "9.0", 4), arch="9.0", variant="float8 of heads"),
]
FLOAT8_PRODUCTS = [
    Target(tile=tile, arch="9.0", variant=f"float8 products{variant}")
    for tile in FORWARD_FLOAT8_SM90_TILES
    for variant in (", bounds", " of heads", ", 192")
    if tile.max_dim > 128 or variant != ", 192"
]
# Kernels of float32 and float64 are products of threads, unrolled: each takes seconds to compile.
ROWS = [target for target in EVERY_ROW if target.tile.element_bytes == 2 or is_sm90(target.tile)]
TARGETS = [
    *sample(ROWS, 40),
    *sample([target for target in EVERY_ROW if target not in ROWS], 72),
    *sample(OTHERS, 160),
    *sample(FLOAT8, 24),
    *(
        Target(tile=tile, arch="9.0", variant=variant)
        for number, tile in enumerate(FORWARD_FLOAT8_SM90_TILES)
        for of, variant in enumerate(("float8 products", "float8 products, full"))
        if sampling.exhaustive or number % 2 == of
    ),
    *sample(FLOAT8_PRODUCTS, 8),
]


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    """Fills the cache of compiled kernels for the tests that were selected, on as many threads as there are cores.

    Where the tests themselves are spread over processes, each compiles what it comes to.
    """
    if hasattr(request.config, "workerinput"):
        return
    selected = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    targets = {item.callspec.params["target"] for item in selected if "target" in item.callspec.params}
    known = supported_archs()
    kernels = {kernel for target in targets if target.device.target in known for kernel in target.kernels()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_spec, kernels))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_row(target):
    if target.device.target not in supported_archs():
        pytest.skip(f"this NVRTC does not know {target.device.target}")
    tile, device = target.tile, target.device
    kernels = target.kernels()
    assert kernels
    defines = [dict(kernel.defines) for kernel in kernels]
    assert any(of.get("CUFLASH_SPLITS_TAIL") for of in defines) == (target.variant == "splits")
    clears = isinstance(tile, BackwardSm90Tile) and target.variant in ("turns", "splits", "packed")
    assert any(of.get("CUFLASH_CLEARS_AHEAD") for of in defines) == clears
    for kernel in kernels:
        resources = compile_spec(kernel).resources
        assert resources.registers <= 255
        assert round_up(resources.registers, 8) * kernel.threads * tile.min_blocks <= REGISTERS_OF_SM
        assert resources.static_shared_bytes == 0
        assert kernel.shared_bytes <= device.shared_bytes_per_block
        assert resources.warnings == ()
        assert SERIALIZED not in resources.log
        ceilings = SPILLS_OF_LATER_ARCHS if device.arch >= 100 else SPILLS
        if target.variant in ("options", "bounds", "narrow", "turns"):
            ceilings = SPILLS_OF_OPTIONS
        of_bias_terms = ("softcap", "slopes", "bias", "wide bias", "bias of few", "wide bias of few", "keys")
        if target.variant in (*of_bias_terms, "bias and keys"):
            ceilings = SPILLS_OF_ADDENDS
        if target.variant in ("blocks", "mask"):
            ceilings = SPILLS_OF_BLOCKS
        if target.variant == "packed":
            ceilings = SPILLS_OF_PACKED
        if target.variant.startswith("dropout"):
            ceilings = SPILLS_OF_DROPOUT
        if target.variant.startswith("pages"):
            ceilings = SPILLS_OF_PAGES
        if target.variant.startswith("float8"):
            ceilings = SPILLS_OF_FLOAT8
        row = (kernel.source, tile.element_bytes, tile.max_dim, f"{tile.block_m}x{tile.block_n}", tile.min_blocks)
        otherwise = SPILLS_OF_ROW_SUMS if kernel.source == "helpers/backward_preprocess.cu" else 0
        assert resources.spill_stores_bytes <= ceilings.get(row, otherwise), row
        # What lies in local memory is spilled: no array is, as it would be if a loop over registers were not unrolled.
        assert resources.stack_bytes <= resources.spill_stores_bytes + 16, row


def test_few_queries_are_compiled_in_every_way():
    """Blocks have whole heads, combine results of a head themselves, or leave that to another kernel."""
    ways = {
        variant: tuple(
            dict(kernel.defines).get(f"CUFLASH_{name}")
            for kernel in Target(tile=DECODE_SM90_TILES[0], arch="9.0", variant=variant).kernels()
            for name in ("SPLITS_KEYS", "COMBINES")
        )
        for variant in ("whole", "combined", "afterwards")
    }
    assert ways == {"whole": (0, 0), "combined": (1, 1), "afterwards": (1, 0, None, None)}


def test_every_row_fits_somewhere():
    assert {target.tile for target in EVERY_ROW} == {tile for table in TABLES for tile in table}


def test_rows_that_may_spill_exist():
    """No ceiling outlives its row."""
    rows = {
        (tile.element_bytes, tile.max_dim, f"{tile.block_m}x{tile.block_n}", tile.min_blocks)
        for table in TABLES
        for tile in table
    }
    later = SPILLS_OF_LATER_ARCHS | SPILLS_OF_BLOCKS | SPILLS_OF_PAGES | SPILLS_OF_PACKED | SPILLS_OF_DROPOUT
    assert {row[1:] for row in later} <= rows


@pytest.mark.parametrize(
    ("dtype", "arch"), sample(itertools.product(("bfloat16", "float16", "float32", "float64"), ARCHS), 4), ids=str
)
def test_chunks_of_columns_compile(dtype, arch):
    """The kernels of long heads without values, without spills."""
    case = ct.Case(seqlen_q=64, seqlen_k=64, head_dim=2048, dtype=dtype, causal=True, has_values=False)
    for pass_, need in ((FORWARD, None), (BACKWARD, ("dq", "dk", "dscale"))):
        plan = choose_plan(case.problem, DeviceSpec.for_arch(arch), pass_, need=need)
        kernels = [kernel for kernel in plan.kernels if not kernel.source.startswith("helpers/")]
        assert len(kernels) == (1 if need is None else 3)
        for kernel in kernels:
            resources = compile_spec(kernel).resources
            assert resources.spill_stores_bytes == resources.spill_loads_bytes == 0, kernel.name


@pytest.mark.parametrize(("head_dim", "bytes_of_producer"), sample([(256, 40), (192, 0), (128, 0), (64, 0)], 4))
def test_kernels_that_claim_tiles_spill_in_the_producer_alone(head_dim, bytes_of_producer):
    """Where consumers spare no registers for it, the thread that loads tiles keeps some numbers in memory."""
    sizes: dict[str, Any] = {"seqlen_q": 4096, "seqlen_k": 4096, "batch": 4, "num_heads": 8, "num_heads_kv": 8}
    case = ct.Case(**sizes, head_dim=head_dim, dtype="bfloat16", causal=True)
    (kernel,) = choose_plan(case.problem, DeviceSpec.for_arch("9.0"), FORWARD).kernels
    assert ("CUFLASH_DYNAMIC_TILES", 1) in kernel.defines
    resources = compile_spec(kernel).resources
    assert resources.spill_stores_bytes <= bytes_of_producer
    assert SERIALIZED not in resources.log
