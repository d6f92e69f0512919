"""What makes kernels differ, and cases that the same kernels serve: some of every row of a table."""

import random
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.plan import DeviceSpec
from cuflash.plan.sm80.tiles import BACKWARD_TILES, DQ_TILES, FORWARD_TILES, BackwardTile, DqTile, ForwardTile
from cuflash.plan.sm90.tiles import (
    FORWARD_FLOAT32_SM90_TILES,
    ForwardFloat32Sm90Tile,
    ForwardSm90Tile,
)
from cuflash.plan.tiles import Tile, round_up
from tests.emulate.attention import problem_of

ARCHS = ("7.0", "7.5", "8.0", "9.0", "12.0")


TABLES = (FORWARD_TILES, BACKWARD_TILES, DQ_TILES)
MAX_SCORES = 2**15


# ---- How arrays lie in memory ----------------------------------------------------------------------------------------


def poison(dtype):
    """What lies around the elements of an array."""
    return {"b": True, "i": -1}.get(dtype.kind, np.nan)


def widened(array):
    """Rows a multiple of 16 bytes apart: wide accesses, whatever the length of a row."""
    buffer = np.full((*array.shape[:-1], round_up(array.shape[-1], 8)), poison(array.dtype), array.dtype)
    inside = buffer[..., : array.shape[-1]]
    inside[...] = array
    return inside


def shifted(array):
    """Contiguous, from an address that is a multiple of 4, or of the element if that is wider, and of nothing more."""
    buffer = np.empty(array.nbytes + 32, np.uint8)
    start = -buffer.ctypes.data % 16 + max(4, array.itemsize)
    inside = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    inside[...] = array
    return inside


def spaced(array):
    """Within NaN on all sides, from an address that is a multiple of 16, every axis steps by multiples of 16 bytes."""
    columns = round_up(array.shape[-1], 8)
    buffer = np.full((*(n + 2 for n in array.shape[:-1]), columns + 16), poison(array.dtype), array.dtype)
    lead = (slice(1, -1),) * (array.ndim - 1)
    inside = buffer[lead][..., 8 : 8 + array.shape[-1]]
    inside[...] = array
    return inside


CONVERSIONS = {"widened": widened, "shifted": shifted, "spaced": spaced}


STRIDES = (*ct.STRIDES, "widened", "shifted")


STRIDES_SM90 = ("contiguous", "transposed", "widened", "spaced")  # transposed operands are copied


# ---- Specialisations -------------------------------------------------------------------------------------------------


def name_of(tile):
    """The tile in short, for the names of tests."""
    return f"{tile.element_bytes}B{tile.block_m}x{tile.block_n}x{tile.max_dim}w{tile.num_warps}s{tile.num_stages}"


@dataclass(frozen=True, kw_only=True)
class Specialisation:
    """What makes kernels differ. `cases` draws problems that the same kernels serve."""

    tiles: tuple[Tile, ...]
    dtype: str
    head_dim: int
    head_dim_v: int
    arch: str = "9.0"
    num_sms: int = 132  # with few, blocks do not share the query heads of a group
    strides: str = "contiguous"
    deterministic: bool = False
    precision: str = "highest"
    right: bool = False
    left: bool = False
    softcap: float | None = None
    scale: float | None = None
    bias: str | None = None  # its dtype: "softmax" or "input"
    mask: bool = False
    kv_lengths: str | None = None  # their dtype
    alibi_slopes: bool = False
    dropout: float = 0.0

    def __str__(self):
        tiles = "+".join(name_of(tile) for tile in self.tiles)
        named = [f for f in fields(self) if f.name not in ("tiles", "dtype", "head_dim", "head_dim_v", "arch")]
        on = [f"{f.name}={getattr(self, f.name)}" for f in named if getattr(self, f.name) != f.default]
        dims = f"d={self.head_dim}x{self.head_dim_v}"
        return ",".join((tiles, self.arch, self.dtype, dims, *(x.removesuffix("=True") for x in on)))

    @property
    def device(self):
        return replace(DeviceSpec.for_arch(self.arch), num_sms=self.num_sms)

    def cases(self):
        """Strategy for cases of this specialisation."""
        return _cases(self)

    def arguments(self, case):
        """The problem and the arrays of one of its cases."""
        arrays = case.arrays(CONVERSIONS.get(self.strides, np.asarray))
        return problem_of(case, arrays, deterministic=self.deterministic, precision=self.precision), arrays


def _lengths(tile):
    """Sequence lengths around the edges of fragments and of tiles."""
    m, n = tile.block_m, tile.block_n
    edges = {k * size + by for size in (m, n) for k in (1, 2) for by in (-1, 0, 1)}
    return sorted({2, 3, 7, 15, 16, 17, 31, 33, 113, 3 * n + 5, *edges})


@st.composite
def _cases(draw, what):
    # Hypothesis starts with the first of each choice, and here draws few: let that be another one each time.
    shuffled = random.Random(str(what))

    def pick(values):
        values = list(values)
        return draw(st.sampled_from(shuffled.sample(values, len(values))))

    ndim, layout = pick((4, 4, 3, 2)), pick(("bhsd", "bshd"))
    num_heads_kv = pick((1, 2)) if ndim > 2 else 1
    num_heads = num_heads_kv * (pick((1, 2, 3)) if ndim > 2 else 1)
    batch = pick((1, 2)) if ndim == 4 else 1
    lengths = _lengths(what.tiles[-1])
    longest = MAX_SCORES // (batch * num_heads)
    seqlen_q = pick(n for n in lengths if n * 2 <= longest)
    seqlen_k = pick(n for n in lengths if n * seqlen_q <= longest)
    # A bound that hides nothing would be another specialisation; a side of at most this hides something.
    side = st.integers(0, min(seqlen_q, seqlen_k) - 2)
    causal, window = False, (draw(side) if what.left else None, None)
    if what.right:
        causal = pick((True, "top_left", False))
        window = (window[0], None if causal else draw(side))
    scores_shape = (batch, num_heads, seqlen_q, seqlen_k)
    broadcast = st.tuples(*(st.sampled_from([1, n]) for n in scores_shape))
    block_n = what.tiles[-1].block_n
    counts = {0, 1, block_n - 1, block_n, block_n + 1, seqlen_k - 1, seqlen_k, seqlen_k // 2}
    key_counts = sorted(n for n in counts if n <= seqlen_k)
    return ct.Case(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=what.head_dim,
        head_dim_v=what.head_dim_v,
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        dtype=what.dtype,
        ndim=ndim,
        layout=layout,
        causal=causal,
        scale=what.scale,
        window=window if what.left or what.right else None,
        softcap=what.softcap,
        bias=draw(broadcast) if what.bias else None,
        bias_dtype=what.bias or "softmax",
        bias_holes=draw(st.booleans()),
        mask=draw(broadcast) if what.mask else None,
        kv_lengths=tuple(pick(key_counts) for _ in range(batch)) if what.kv_lengths else None,
        kv_lengths_dtype=what.kv_lengths or "int32",
        alibi_slopes=pick([(num_heads,), (batch, num_heads)]) if what.alibi_slopes else None,
        dropout=what.dropout,
        strides="contiguous" if what.strides in CONVERSIONS else what.strides,
        score_spread=pick((1.0, 1.0, 8.0, 30.0)),
        seed=draw(st.integers(0, 2**16)),
    )


def _fits(tiles, arch, head_dim, head_dim_v):
    """Whether the tiles serve these head dimensions on a device of `arch`."""
    limit = DeviceSpec.for_arch(arch).shared_bytes_per_block
    dims = [[round_up(d, tile.dim_multiple) for d in (head_dim, head_dim_v)] for tile in tiles]
    return all(tile.shared_bytes(*padded) <= limit for tile, padded in zip(tiles, dims, strict=True))


DTYPES = {2: ("float16", "bfloat16"), 4: ("float32",), 8: ("float64",)}


# How rows lie, head_dim and head_dim_v; those that are not positive are relative to the largest that the tiles serve.
ROWS_SM80 = (
    *(("contiguous", 0, 0), ("contiguous", -4, -4), ("contiguous", -6, -6), ("contiguous", 5, -7)),
    *(("widened", -3, -15), ("padded", 0, 12), ("transposed", -15, 0), ("flipped", -16, 0)),
    *(("shifted", 0, 0), ("contiguous", 0, 12)),
)


ROWS_SM90 = (
    *(("contiguous", 0, 0), ("contiguous", -8, -24), ("contiguous", 8, 0), ("contiguous", 0, 8)),
    *(("contiguous", 40, 64), ("widened", -3, -16), ("transposed", -8, 0), ("spaced", 0, -24), ("spaced", 33, 8)),
)


class _Dealer:
    """Deals the values of each option in a random order, each value before any comes again."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.decks = {}

    def __call__(self, name, *values):
        deck = self.decks.setdefault(name, [])
        if not deck:
            deck += self.rng.sample(values, len(values))
        return deck.pop()


def _specialisation(deal, tiles, *, plain):
    """One specialisation of these tiles; plain ones fill the tiles and have at most a right bound."""
    full = min(tile.max_dim for tile in tiles)
    rows = ("contiguous", full, full)
    options: dict[str, Any] = {}
    if not plain:
        rows = deal("rows", *(ROWS_SM90 if isinstance(tiles[0], ForwardSm90Tile) else ROWS_SM80))
        rows = (rows[0], *(d if d > 0 else full + d for d in rows[1:]))
        options = {
            "left": deal("left", False, True, False),
            "softcap": deal("softcap", None, 0.5, None, 5.0, None, 50.0),
            "scale": deal("scale", None, 0.0, None, -0.25, None, 1.0),
            "bias": deal("bias", None, "softmax", None, "input"),
            "mask": deal("mask", False, True, False),
            "kv_lengths": deal("kv_lengths", None, "int32", None, "int64"),
            "alibi_slopes": deal("alibi_slopes", False, True, False),
            "dropout": deal("dropout", 0.0, 0.1, 0.0, 0.5, 0.0, 0.9),
        }
    is_sm90 = isinstance(tiles[0], ForwardSm90Tile | ForwardFloat32Sm90Tile)
    arch = "9.0" if is_sm90 else deal("arch", *ARCHS)
    # Of few SMs, each takes several tiles of queries.
    num_sms = deal("num_sms", 1, 2, 132) if is_sm90 else 132 if plain else deal("num_sms", 1, 132)
    return Specialisation(
        tiles=tiles,
        dtype=deal(f"dtype of {tiles[-1].element_bytes} bytes", *DTYPES[tiles[-1].element_bytes]),
        head_dim=rows[1],
        head_dim_v=rows[2],
        arch=arch if _fits(tiles, arch, *rows[1:]) else "9.0",
        strides=rows[0],
        num_sms=num_sms,
        deterministic=len(tiles) == 2,
        right=deal("right", False, True),
        **options,
    )


def specialisations_of(table, *, with_options=3):
    """A few specialisations of every row of a table. A row of DQ_TILES comes with one of BACKWARD_TILES.

    Rows of wide elements in tables of several types get fewer: what they share with others is tested there.
    """
    deal = _Dealer(type(table[0]).__name__)
    for tile in table:
        tiles: tuple[Tile, ...] = (tile,)
        if isinstance(tile, DqTile):
            tiles = (deal.rng.choice([main for main in BACKWARD_TILES if goes_with(main, tile)]), tile)
        yield _specialisation(deal, tiles, plain=True)
        has_relatives = isinstance(tile, ForwardTile | BackwardTile | DqTile) and tile.element_bytes > 2
        for _ in range(1 if has_relatives else with_options):
            yield _specialisation(deal, tiles, plain=False)


def goes_with(main, tile):
    """Whether a row of BACKWARD_TILES serves what the row `tile` serves."""
    return main.element_bytes == tile.element_bytes and main.max_dim >= tile.max_dim


# What the forward kernel has and no row of the table may use: rings of several stages.
SEVERAL_STAGES = tuple(replace(FORWARD_TILES[0], num_stages=n) for n in (2, 3))


# What that kernel has and no row may use: turns, two consumers of short rows, one stage and several.
_NARROW = next(tile for tile in FORWARD_FLOAT32_SM90_TILES if tile.serves == "any")
FLOAT32_SM90_VARIANTS = (
    replace(_NARROW, block_n=64, num_stages=3, ping_pong=True),
    replace(_NARROW, block_m=192, block_n=64, num_stages=2, ping_pong=True),
    replace(_NARROW, block_n=80, num_stages=2, ping_pong=False),
    # The producer splits so few columns itself.
    replace(_NARROW, max_dim=32),
    replace(_NARROW, max_dim=32, block_n=48, num_stages=2, ping_pong=True),
)
