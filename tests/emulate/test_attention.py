"""The real kernels of both passes, run on the CPU against the oracle: every row of every table of tiles, every option.

A combination of tiles, dtype, head dimensions, options and alignment is a compilation of its own. So these come from a
fixed pseudo-random list, which a test below checks for completeness, and hypothesis draws sizes, values and schedules.
"""

import itertools
import random
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash import emulator
from cuflash.emulator import SCHEDULES, Statistics, find_compiler
from cuflash.planning import DeviceSpec
from cuflash.planning.sm80 import BACKWARD_TILES, DQ_TILES, FORWARD_TILES, BackwardTile, DqTile, ForwardTile
from cuflash.planning.sm90.tiles import (
    BACKWARD_SM90_TILES,
    FORWARD_FLOAT32_SM90_TILES,
    FORWARD_SM90_TILES,
    ForwardFloat32Sm90Tile,
    ForwardSm90Tile,
)
from cuflash.planning.tiles import Tile, round_up
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, problem_of

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: g++ is not on the path")

ARCHS = ("8.0", "8.6", "9.0", "12.0")
TABLES = (FORWARD_TILES, BACKWARD_TILES, DQ_TILES)
either_kernel = pytest.mark.parametrize("arch", ["8.0", "9.0"])  # of the forward pass, where arrays are aligned
MAX_SCORES = 2**15
schedules = st.sampled_from(SCHEDULES)


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
    # Of few multiprocessors, each takes several tiles of queries.
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


def _specialisations(table, *, with_options=3):
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

FORWARD = tuple(_specialisations((*FORWARD_TILES, *SEVERAL_STAGES), with_options=2))
FORWARD_SM90 = tuple(_specialisations(FORWARD_SM90_TILES))
# What that kernel has and no row may use: turns, two consumers of short rows, one stage and several.
FLOAT32_SM90_VARIANTS = (
    replace(FORWARD_FLOAT32_SM90_TILES[0], block_n=64, num_stages=3, ping_pong=True),
    replace(FORWARD_FLOAT32_SM90_TILES[0], block_m=192, block_n=64, num_stages=2, ping_pong=True),
    replace(FORWARD_FLOAT32_SM90_TILES[0], block_n=80, num_stages=2, ping_pong=False),
)
FORWARD_FLOAT32_SM90 = tuple(_specialisations((*FORWARD_FLOAT32_SM90_TILES, *FLOAT32_SM90_VARIANTS), with_options=5))
BACKWARD = tuple(_specialisations(BACKWARD_TILES, with_options=1))
DETERMINISTIC = tuple(_specialisations(DQ_TILES, with_options=1))


def _access_widths(specialisations):
    """Widths in bytes of the accesses that the specialisations load by."""
    widths = set()
    for what in specialisations:
        case = ct.Case(seqlen_q=3, seqlen_k=5, num_heads=2, head_dim=what.head_dim, head_dim_v=what.head_dim_v)
        case = replace(case, dtype=what.dtype, strides="contiguous" if what.strides in CONVERSIONS else what.strides)
        problem, arrays = what.arguments(case)
        arrays["out"] = np.empty(problem.out_shape, arrays["q"].dtype)
        plan = attention.plan_for(problem, "forward", arrays, "9.0", None)
        widths.add(dict(plan.kernels[0].defines)["CUFLASH_LOAD_BYTES"])
    return widths


@pytest.mark.parametrize(
    ("specialisations", "table"),
    [(FORWARD, FORWARD_TILES), (BACKWARD, BACKWARD_TILES), (DETERMINISTIC, DQ_TILES)],
    ids=["forward", "backward", "deterministic"],
)
def test_the_list_is_complete(specialisations, table):
    assert {what.tiles[-1] for what in specialisations} >= set(table)
    for field in ("right", "left", "mask", "alibi_slopes"):
        assert {getattr(what, field) for what in specialisations} == {True, False}
    assert {what.dtype for what in specialisations} == set(sum(DTYPES.values(), ()))
    assert {what.bias for what in specialisations} == {None, "softmax", "input"}
    assert {what.kv_lengths for what in specialisations} == {None, "int32", "int64"}
    assert {what.arch for what in specialisations} == set(ARCHS)
    assert {what.num_sms for what in specialisations} == {1, 132}
    assert {what.strides for what in specialisations} == set(STRIDES)
    assert any(what.softcap for what in specialisations)
    assert {what.dropout for what in specialisations} == {0.0, 0.1, 0.5, 0.9}
    assert {np.sign(what.scale) for what in specialisations if what.scale is not None} == {-1, 0, 1}
    assert {np.sign(what.head_dim_v - what.head_dim) for what in specialisations} == {-1, 0, 1}
    assert _access_widths(specialisations) == {2, 4, 8, 16}


def test_the_list_of_compute_capability_9_is_complete():
    assert {what.tiles for what in FORWARD_SM90} == {(tile,) for tile in FORWARD_SM90_TILES}
    for field in ("right", "left", "mask", "alibi_slopes"):
        assert {getattr(what, field) for what in FORWARD_SM90} == {True, False}
    assert {what.dtype for what in FORWARD_SM90} == {"float16", "bfloat16"}
    assert {what.bias for what in FORWARD_SM90} == {None, "softmax", "input"}
    assert {what.kv_lengths for what in FORWARD_SM90} == {None, "int32", "int64"}
    assert {what.num_sms for what in FORWARD_SM90} == {1, 2, 132}
    assert {what.strides for what in FORWARD_SM90} == set(STRIDES_SM90)
    assert any(what.softcap for what in FORWARD_SM90)
    assert {what.dropout for what in FORWARD_SM90} == {0.0, 0.1, 0.5, 0.9}
    assert {np.sign(what.scale) for what in FORWARD_SM90 if what.scale is not None} == {-1, 0, 1}
    assert {np.sign(what.head_dim_v - what.head_dim) for what in FORWARD_SM90} == {-1, 0, 1}
    assert any(what.right and not what.left and what.num_sms == 1 for what in FORWARD_SM90)  # pairs of tiles


def test_the_list_of_float32_on_compute_capability_9_is_complete():
    assert {what.tiles for what in FORWARD_FLOAT32_SM90} >= {(tile,) for tile in FORWARD_FLOAT32_SM90_TILES}
    for field in ("right", "left", "mask", "alibi_slopes"):
        assert {getattr(what, field) for what in FORWARD_FLOAT32_SM90} == {True, False}
    assert {what.bias for what in FORWARD_FLOAT32_SM90} == {None, "softmax", "input"}
    assert {what.kv_lengths for what in FORWARD_FLOAT32_SM90} == {None, "int32", "int64"}
    assert {what.num_sms for what in FORWARD_FLOAT32_SM90} == {1, 2, 132}
    assert {what.strides for what in FORWARD_FLOAT32_SM90} == set(STRIDES)
    assert any(what.softcap for what in FORWARD_FLOAT32_SM90)
    assert {what.dropout for what in FORWARD_FLOAT32_SM90} == {0.0, 0.1, 0.5, 0.9}
    assert {np.sign(what.scale) for what in FORWARD_FLOAT32_SM90 if what.scale is not None} == {-1, 0, 1}
    assert {np.sign(what.head_dim_v - what.head_dim) for what in FORWARD_FLOAT32_SM90} == {-1, 0, 1}
    assert _access_widths(FORWARD_FLOAT32_SM90) == {4, 8, 16}
    assert any(what.right and not what.left and what.num_sms == 1 for what in FORWARD_FLOAT32_SM90)  # pairs of tiles


# ---- Against the oracle ----------------------------------------------------------------------------------------------

FEW = settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("what", (*FORWARD, *FORWARD_SM90, *FORWARD_FLOAT32_SM90), ids=str)
@FEW
@given(data=st.data())
def test_forward(what, data):
    case, schedule = data.draw(what.cases()), data.draw(schedules)
    options: dict[str, Any] = {**case.random}
    if isinstance(what.tiles[0], ForwardSm90Tile):  # TMA writes rows that start at multiples of 16 bytes
        options["place"] = lambda array: attention.guarded(CONVERSIONS.get(what.strides, np.asarray)(array))
    results = attention.forward(*what.arguments(case), arch=what.device, tiles=what.tiles, schedule=schedule, **options)
    ct.assert_forward(case, *results)


@pytest.mark.parametrize("what", (*BACKWARD, *DETERMINISTIC), ids=str)
@FEW
@given(data=st.data())
def test_backward(what, data):
    case, schedule = data.draw(what.cases()), data.draw(schedules)
    problem, arrays = what.arguments(case)
    tiles = what.tiles if what.deterministic else (*what.tiles, None)
    forward = forward_by_oracle(problem, arrays, **case.random)
    options: dict[str, Any] = {"arch": what.device, "tiles": tiles, "schedule": schedule}
    ct.assert_backward(case, *attention.backward(problem, arrays, *forward, **options | case.random))


# ---- All results of a case -------------------------------------------------------------------------------------------

CASE = ct.Case(
    seqlen_q=70,
    seqlen_k=150,
    batch=2,
    num_heads=2,
    num_heads_kv=1,
    head_dim=48,
    head_dim_v=40,
    dtype="float16",
    causal=True,
    window=(40, None),
    kv_lengths=(150, 77),
    seed=1,
)


def all_results(case, *, deterministic=False, precision="highest", forward_tiles=None, backward_tiles=None, **options):
    """out, lse, dq, dk, dv, maybe dsinks, by name: the backward pass works on what the forward pass made."""
    arrays = case.arrays()
    problem = problem_of(case, arrays, deterministic=deterministic, precision=precision)
    options |= case.random
    out, lse = attention.forward(problem, arrays, tiles=forward_tiles, **options)
    gradients = attention.backward(problem, arrays, out, lse, tiles=backward_tiles, **options)
    names = ("out", "lse", "dq", "dk", "dv", *(("dsinks",) if case.sinks else ()))
    return dict(zip(names, (out, lse, *gradients), strict=True))


def assert_results(case, results):
    ct.assert_forward(case, results["out"], results["lse"])
    ct.assert_backward(case, **{name: x for name, x in results.items() if name[0] == "d"})


def bits(results):
    values = results.values() if isinstance(results, dict) else results
    return [np.ascontiguousarray(x).tobytes() for x in values]


# ---- What acts on the sums of rows, together -------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "arch"), [("bfloat16", "9.0"), ("float32", "9.0"), ("float64", "8.0")])
def test_sinks_gradients_of_lse_and_dropout(dtype, arch):
    """A sink is never dropped, and what dropout does to dP is done before delta and dlse join it."""
    sizes: dict[str, Any] = {
        "seqlen_q": 150,
        "seqlen_k": 140,
        "batch": 2,
        "num_heads": 4,
        "num_heads_kv": 2,
        "head_dim": 64,
    }
    options: dict[str, Any] = {"causal": True, "kv_lengths": (100, 0), "sinks": True, "dlse": True, "dropout": 0.3}
    case = ct.Case(**sizes, **options, dtype=dtype, score_spread=4.0)
    for deterministic in (False, True):
        assert_results(case, all_results(case, arch=arch, deterministic=deterministic))


# ---- Bit for bit -----------------------------------------------------------------------------------------------------

# One plan of one kernel after another, of several stages, of warps that share rows.
REPEATED = {
    "the first rows": {"forward_tiles": (FORWARD_TILES[0],), "backward_tiles": (BACKWARD_TILES[0], DQ_TILES[0])},
    "two stages, shared rows": {
        "forward_tiles": (SEVERAL_STAGES[0],),
        "backward_tiles": (
            max((tile for tile in BACKWARD_TILES if tile.element_bytes == 2), key=lambda tile: tile.warps_d),
            DQ_TILES[1],
        ),
    },
    "three stages, one stage back": {
        "forward_tiles": (SEVERAL_STAGES[1],),
        "backward_tiles": (
            min((tile for tile in BACKWARD_TILES if tile.element_bytes == 2), key=lambda tile: tile.num_stages),
            [tile for tile in DQ_TILES if tile.element_bytes == 2][-1],
        ),
    },
    "dq in turn": {"backward_tiles": (BACKWARD_SM90_TILES[0],)},
    "dq in turn, split roles": {"backward_tiles": (BACKWARD_SM90_TILES[-1],)},
    "three consumers": {"forward_tiles": (replace(FORWARD_SM90_TILES[1], ping_pong=True),)},
    "turns, output in the room of Q": {"forward_tiles": (FORWARD_SM90_TILES[-1],)},
}
REPEATED_FLOAT32 = {name_of(tile): tile for tile in (*FORWARD_FLOAT32_SM90_TILES, *FLOAT32_SM90_VARIANTS)}


@pytest.mark.parametrize("tiles", REPEATED.values(), ids=REPEATED)
def test_the_schedule_changes_no_bit(tiles):
    """The forward pass always, the backward pass where it is deterministic, give the same bits."""
    first = all_results(CASE, deterministic=True, **tiles)
    assert_results(CASE, first)
    for schedule in SCHEDULES[1:]:
        assert bits(all_results(CASE, deterministic=True, schedule=schedule, **tiles)) == bits(first)


@pytest.mark.parametrize("heads", [{"num_heads": 8}, {"num_heads": 8, "num_heads_kv": 4}], ids=str)
@pytest.mark.parametrize("tile", BACKWARD_SM90_TILES, ids=name_of)
def test_the_batch_changes_no_bit_of_gradients_in_turn(tile, heads):
    """Some heads walk back over the queries, after the others of all batch entries."""
    case = ct.Case(seqlen_q=200, seqlen_k=200, batch=2, head_dim=24, dtype="float16", causal=True, **heads)
    arrays = case.arrays()

    def gradients(batch):
        given = {name: x[batch] for name, x in arrays.items()}
        problem = problem_of(replace(case, batch=len(given["q"])), given, deterministic=True)
        out, lse = attention.forward(problem, given)
        return attention.backward(problem, given, out, lse, tiles=(tile,))

    together = gradients(slice(None))
    ct.assert_backward(case, *together)
    for batch in (slice(0, 1), slice(1, 2)):
        assert bits(gradients(batch)) == bits(x[batch] for x in together)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tiles", REPEATED.values(), ids=REPEATED)
def test_what_lies_in_memory_changes_no_bit(tiles, deterministic):
    """Results and scratch memory are written before they are read."""
    options: dict[str, Any] = {**tiles, "deterministic": deterministic}
    first = bits(all_results(CASE, **options, fill=0xFF))
    assert bits(all_results(CASE, **options, fill=0x00)) == first
    assert bits(all_results(CASE, **options, fill=0x3F)) == first


@pytest.mark.parametrize("tile", REPEATED_FLOAT32.values(), ids=REPEATED_FLOAT32)
def test_neither_schedule_nor_memory_change_a_bit_of_float32(tile):
    case = replace(CASE, dtype="float32")
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    first = attention.forward(problem, arrays, tiles=(tile,))
    ct.assert_forward(case, *first)
    for schedule, fill in itertools.product(SCHEDULES, (0xFF, 0x00, 0x3F)):
        again = attention.forward(problem, arrays, tiles=(tile,), schedule=schedule, fill=fill, arch=FEW_SMS)
        assert bits(again) == bits(first)


# ---- The edges of problems -------------------------------------------------------------------------------------------

EDGES: dict[str, dict[str, Any]] = {
    "one pair": {"seqlen_q": 1, "seqlen_k": 1},
    "one query": {"seqlen_q": 1, "seqlen_k": 201},
    "one key": {"seqlen_q": 201, "seqlen_k": 1},
    "no keys": {"seqlen_q": 70, "seqlen_k": 0},
    "no queries": {"seqlen_q": 0, "seqlen_k": 70},
    "nothing at all": {"seqlen_q": 0, "seqlen_k": 0},
    "no heads": {"seqlen_q": 20, "seqlen_k": 20, "num_heads": 0},
    "no batch": {"seqlen_q": 20, "seqlen_k": 20, "batch": 0},
    "no lengths": {"seqlen_q": 70, "seqlen_k": 140, "batch": 2, "kv_lengths": (0, 0)},
    "lengths of one": {"seqlen_q": 70, "seqlen_k": 140, "batch": 2, "kv_lengths": (1, 0)},
    "lengths at the edges of tiles": {
        "seqlen_q": 33,
        "seqlen_k": 140,
        "batch": 5,
        "kv_lengths": (63, 64, 65, 127, 129),
    },
    "blocks of queries before the first key": {"seqlen_q": 300, "seqlen_k": 5, "causal": True},
    "blocks of keys that no query sees": {"seqlen_q": 5, "seqlen_k": 300, "causal": "top_left"},
    "blocks of queries past the window": {"seqlen_q": 300, "seqlen_k": 9, "causal": "top_left", "window": (2, None)},
    "only the diagonal": {"seqlen_q": 150, "seqlen_k": 150, "window": (0, 0)},
    "many heads": {"seqlen_q": 3, "seqlen_k": 3, "batch": 3, "num_heads": 40},
    "many heads, longest tiles first": {"seqlen_q": 70, "seqlen_k": 70, "batch": 3, "num_heads": 13, "causal": True},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [13, 16])
@pytest.mark.parametrize("sizes", EDGES.values(), ids=EDGES)
def test_edges(sizes, head_dim, deterministic):
    case = ct.Case(head_dim=head_dim, dtype="float16", **sizes)
    results = all_results(case, arch="8.0", deterministic=deterministic)
    assert_results(case, results)


# A row with turns and one without, of two, three and four consumers; blocks take several tiles.
EDGES_SM90 = (FORWARD_SM90_TILES[0], FORWARD_SM90_TILES[1], FORWARD_SM90_TILES[2], FORWARD_SM90_TILES[-1])


@pytest.mark.parametrize("tile", EDGES_SM90, ids=name_of)
@pytest.mark.parametrize("sizes", EDGES.values(), ids=EDGES)
def test_edges_of_compute_capability_9(sizes, tile):
    case = ct.Case(head_dim=16, dtype="float16", **sizes)
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    # An empty array has no tensor map: then the other kernel runs.
    tiles = (tile,) if 0 not in (*arrays["q"].shape, *arrays["k"].shape) else None
    ct.assert_forward(case, *attention.forward(problem, arrays, tiles=tiles, arch=FEW_SMS))


@pytest.mark.parametrize("tile", FORWARD_FLOAT32_SM90_TILES, ids=name_of)
@pytest.mark.parametrize("sizes", EDGES.values(), ids=EDGES)
def test_edges_of_float32_on_compute_capability_9(sizes, tile):
    case = ct.Case(head_dim=13, dtype="float32", **sizes)
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    tiles = (tile,) if 0 not in (*arrays["q"].shape, *arrays["k"].shape) else None
    ct.assert_forward(case, *attention.forward(problem, arrays, tiles=tiles, arch=FEW_SMS))


def judge(problem, arrays, results):
    """Hold results by name against the oracle, for arrays that no `Case` makes."""
    yardsticks = ct.yardsticks(problem, arrays)
    measurements = [ct.measure(name, x, yardsticks[name]) for name, x in results.items()]
    assert not [str(measurement) for measurement in measurements if measurement.failure]


def run_both(problem, arrays, **options):
    out, lse = attention.forward(problem, arrays, **options)
    gradients = attention.backward(problem, arrays, out, lse, **options)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


@either_kernel
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("term", ["mask", "bias"])
def test_terms_that_hide_everything(term, deterministic, arch):
    sizes: dict[str, Any] = {"seqlen_q": 40, "seqlen_k": 70, "num_heads": 2, term: (2, 40, 70)}
    case = ct.Case(head_dim=16, dtype="bfloat16", **sizes)
    arrays = case.arrays()
    hidden = False if term == "mask" else -np.inf
    arrays[term][0] = hidden  # a whole head
    arrays[term][1, 16:] = hidden  # whole fragments, and whole tiles of rows
    arrays[term][1, :, :64] = hidden  # a whole tile of keys
    problem = problem_of(case, arrays, deterministic=deterministic)
    results = run_both(problem, arrays, arch=arch)
    judge(problem, arrays, results)
    assert not results["out"][0, 0].any()
    assert (results["lse"][0, 0] == -np.inf).all()


@either_kernel
def test_lengths_out_of_range_are_clamped(arch):
    case = ct.Case(seqlen_q=20, seqlen_k=50, batch=3, head_dim=16, dtype="float16", kv_lengths=(0, 50, 50))
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    tame = run_both(problem, arrays, arch=arch)
    arrays["kv_lengths"][...] = (-7, 51, 2**31 - 1)
    assert bits(run_both(problem, arrays, arch=arch)) == bits(tame)


# Both kernels of the forward pass of float32: short problems take the first by themselves.
either_float32 = pytest.mark.parametrize("float32_tiles", [None, FORWARD_FLOAT32_SM90_TILES[:1]], ids=["sm80", "sm90"])


@either_kernel
@either_float32
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_that_are_no_numbers(dtype, float32_tiles, arch):
    """NaN and infinities of visible inputs come out where the formula has them."""
    case = ct.Case(seqlen_q=40, seqlen_k=70, head_dim=16, dtype=dtype, causal=True)
    arrays = case.arrays()
    arrays["q"][0, 0, 7, 3] = np.nan
    arrays["k"][0, 0, 65, 0] = np.inf
    arrays["v"][0, 0, 2, 5] = np.inf
    arrays["v"][0, 0, 3, 6] = np.nan
    problem = problem_of(case, arrays)
    tiles = float32_tiles if (dtype, arch) == ("float32", "9.0") else None
    out, lse = attention.forward(problem, arrays, arch=arch, tiles=tiles)
    judge(problem, {name: arrays[name] for name in "qkv"}, {"out": out, "lse": lse})


@either_float32
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.finfo(np.float32).max, 0.99999 * np.finfo(np.float32).max])
def test_float32_at_the_end_of_its_range(value, float32_tiles):
    """What is split into parts comes out whole: infinities, and numbers that no TF32 or bfloat16 is as large as."""
    case = ct.Case(seqlen_q=17, seqlen_k=33, head_dim=16, dtype="float32", scale=2.0**-9)
    arrays = case.arrays()
    arrays["k"][...] = np.sign(arrays["k"])  # whose second part is zero
    arrays["v"][0, 0, 5, 2] = value
    arrays["q"][0, 0, 3, 4] = np.copysign(np.inf, value) if np.isinf(value) else 2.0**120
    arrays["q"][0, 0, 4, 4] = np.nan
    arrays["q"].view(np.uint32)[0, 0, 6, 4] = 0x7FFFFFFF  # the NaN that the device makes
    problem = problem_of(case, arrays)
    inputs = {name: arrays[name] for name in "qkv"}
    out, lse = attention.forward(problem, arrays, tiles=float32_tiles)
    expected = ct.yardsticks(problem, inputs)
    for got, right in ((out, expected["out"].expected), (lse, expected["lse"].expected)):
        np.testing.assert_allclose(got.astype(np.float64), right, rtol=1e-5, atol=1e-5)


@either_float32
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"head_dim": 48}, {"head_dim": 128}, {"softcap": 20.0}, {"score_spread": 30.0}],
    ids=str,
)
def test_float32_is_no_worse_than_the_plain_formula(options, float32_tiles):
    """On the average of several seeds, without the allowance for luck. The emulated tensor cores cut sums off too."""
    sizes: dict[str, Any] = {"seqlen_q": 65, "seqlen_k": 203, "head_dim": 64} | options
    ratios = []
    for seed in range(6):
        case = ct.Case(**sizes, dtype="float32", seed=seed)
        if float32_tiles:
            arrays, tiles = case.arrays(), FORWARD_FLOAT32_SM90_TILES[case.head_dim > 64 :][:1]
            report = (*ct.assert_forward(case, *attention.forward(problem_of(case, arrays), arrays, tiles=tiles)),)
        else:
            results = all_results(case)
            report = (*ct.assert_forward(case, results["out"], results["lse"]),)
            report += (*ct.assert_backward(case, results["dq"], results["dk"], results["dv"]),)
        ratios.append([measurement.strict_ratio for measurement in report])
    assert (np.mean(ratios, axis=0) <= 1).all(), np.round(np.mean(ratios, axis=0), 2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("score_spread", [0.05, 1.0, 10.0])
@pytest.mark.parametrize("sizes", [(40, 1300, 64), (1300, 40, 64), (30, 900, 128), (900, 30, 128)], ids=str)
def test_sums_of_float64_are_within_twice_the_plain_formula(sizes, score_spread, deterministic):
    """Without the allowance for luck, however long: sums run over the tiles of the other sequence."""
    seqlen_q, seqlen_k, head_dim = sizes
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    case = ct.Case(**lengths, head_dim=head_dim, dtype="float64", score_spread=score_spread)
    results = all_results(case, deterministic=deterministic)
    report = (*ct.assert_forward(case, results["out"], results["lse"]),)
    report += (*ct.assert_backward(case, results["dq"], results["dk"], results["dv"]),)
    assert all(measurement.error <= measurement.strict_tolerance for measurement in report), report


def rounded_to_tf32(x):
    """To nearest, ties away from zero, as the kernels round."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [40, 128])
def test_tf32(head_dim, deterministic):
    """Twice the error of the formula whose factors are rounded to TF32, the oracle rule with that unit of rounding."""
    case = ct.Case(seqlen_q=70, seqlen_k=150, head_dim=head_dim, dtype="float32", causal=True, seed=3)
    results = all_results(case, deterministic=deterministic, precision="tf32")
    arrays = case.arrays()
    expected = ct.yardsticks(case.problem, arrays)
    q, k, v, dout = (rounded_to_tf32(arrays[name])[0, 0].astype(np.float64) for name in ("q", "k", "v", "dout"))
    hidden = np.arange(150) > np.arange(70)[:, None] + 80
    scores = np.where(hidden, -np.inf, q @ k.T * head_dim**-0.5)
    weights = np.exp(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))
    rounded = rounded_to_tf32(weights.astype(np.float32)).astype(np.float64)
    delta = (arrays["dout"][0, 0] * expected["out"].expected[0, 0]).sum(axis=1, keepdims=True)
    ds = rounded_to_tf32((weights * (dout @ v.T - delta)).astype(np.float32)).astype(np.float64)
    plain = {"out": rounded @ v, "dv": rounded.T @ dout, "dq": ds @ k * head_dim**-0.5, "dk": ds.T @ q * head_dim**-0.5}
    for name, values in plain.items():
        right = expected[name].expected[0, 0]
        allowed = 2 * np.abs(values - right).max() + 2.0**-11 * expected[name].scale
        error = np.abs(results[name][0, 0] - right).max()
        assert expected[name].tolerance < error <= allowed, name  # as rough as it may be, and not the other precision


@either_kernel
@pytest.mark.parametrize("deterministic", [False, True])
def test_softcap_bounds_products_that_overflow(deterministic, arch):
    """A product of minus infinity is a capped score like others, also in a tile that has hidden keys."""
    case = ct.Case(seqlen_q=2, seqlen_k=2, head_dim=16, dtype="bfloat16", softcap=0.25, causal=True)
    arrays = case.arrays()
    arrays["q"][0, 0, 1], arrays["k"][0, 0, 0] = 1e19, -1e19
    problem = problem_of(case, arrays, deterministic=deterministic)
    results = run_both(problem, arrays, arch=arch)
    expected = ct.yardsticks(problem, arrays)
    for name in ("out", "dv"):  # the others are as large as the inputs
        np.testing.assert_allclose(results[name].astype(np.float64), expected[name].expected, atol=0.02)


# ---- Tiles of queries one after another, and maxima that are found late ----------------------------------------------

FEW_SMS = replace(DeviceSpec.for_arch("9.0"), num_sms=2)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("m_blocks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_sms", [1, 3])
def test_blocks_take_pairs_of_tiles(num_sms, m_blocks, schedule):
    """Every tile of queries once: an odd one out is alone, blocks end with different numbers of tiles."""
    tile = FORWARD_SM90_TILES[1]
    seqlen = tile.block_m * (m_blocks - 1) + 70
    case = ct.Case(seqlen_q=seqlen, seqlen_k=100, num_heads=3, head_dim=16, dtype="bfloat16", causal="top_left")
    arrays = case.arrays()
    device = replace(FEW_SMS, num_sms=num_sms)
    results = attention.forward(problem_of(case, arrays), arrays, tiles=(tile,), arch=device, schedule=schedule)
    ct.assert_forward(case, *results)


def rising(tile, dtype, **options):
    """A problem whose scores rise from tile to tile: keys come last first, the first ones are the most alike to q.

    From one tile to the next, scores of the even rows rise by `rise` units of log2, beyond what a tile may sum up to;
    those of the odd rows fall.
    """
    num_tiles, rise = 4, {"float16": 20.0, "bfloat16": 40.0}[dtype]
    seqlen_k = tile.block_n * num_tiles - 3
    case = ct.Case(seqlen_q=67, seqlen_k=seqlen_k, head_dim=16, dtype=dtype, scale=1.0, score_spread=0.5, **options)
    arrays = case.arrays()
    n_block = np.arange(seqlen_k) // tile.block_n
    # The first column carries the rise alone: +-1 in q, the size in k; both are exact.
    arrays["q"][..., 0] = np.where(np.arange(67) % 2, -1, 1)
    arrays["k"][..., 0] = np.round((num_tiles - 1 - 2 * n_block) / 2 * rise * np.log(2))
    if options.get("alibi_slopes"):
        arrays["alibi_slopes"][...] = 2**-6  # of what the rise does not hide
    return case, problem_of(case, arrays), arrays


@pytest.mark.parametrize("options", [{}, {"alibi_slopes": (1,)}, {"causal": True}], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", FORWARD_SM90_TILES, ids=name_of)
def test_maxima_that_are_found_late(tile, dtype, options):
    _, problem, arrays = rising(tile, dtype, **options)
    first = None
    for schedule in SCHEDULES[-2:] if options else SCHEDULES:
        launches: list[Statistics] = []
        out, lse = attention.forward(problem, arrays, tiles=(tile,), schedule=schedule, statistics=launches)
        judge(problem, arrays, {"out": out, "lse": lse})
        assert launches[0].matrix_loads > 0  # only the product that is done again has any
        first = first or bits((out, lse))
        assert bits((out, lse)) == first


@pytest.mark.parametrize("tile", FORWARD_SM90_TILES, ids=name_of)
def test_maxima_are_not_looked_for_in_vain(tile):
    """Scores of common spreads need no second product."""
    case = ct.Case(seqlen_q=67, seqlen_k=4 * tile.block_n, head_dim=16, dtype="float16", score_spread=1.0)
    arrays = case.arrays()
    launches: list[Statistics] = []
    results = attention.forward(problem_of(case, arrays), arrays, tiles=(tile,), statistics=launches)
    ct.assert_forward(case, *results)
    assert launches[0].matrix_loads == 0


# ---- Memory ----------------------------------------------------------------------------------------------------------


def framed(frames, *, aligned=False):
    """Places arrays within NaN; `frames` collects what surrounds them and where they are in it.

    With `aligned`, rows begin at multiples of 16 bytes.
    """

    def place(array):
        leads = [2] * (array.ndim - 1) + [8 if aligned else 2]
        shape = [n + 2 * lead for n, lead in zip(array.shape, leads, strict=True)]
        if aligned:
            shape[-1] = round_up(shape[-1], 8)
        frame = attention.guarded(np.full(shape, poison(array.dtype), array.dtype))
        inside = tuple(slice(lead, n + lead) for n, lead in zip(array.shape, leads, strict=True))
        frame[inside] = array
        frames.append((frame, inside))
        return frame[inside]

    return place


def assert_only_noise(frames, count):
    """Around each of `count` arrays everything is still NaN."""
    assert len(frames) == count
    for frame, inside in frames:
        frame[inside] = np.nan
        assert np.isnan(frame.astype(np.float32)).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_results_stay_inside_their_arrays(deterministic):
    case = ct.Case(seqlen_q=70, seqlen_k=81, batch=2, num_heads=2, num_heads_kv=1, head_dim=24, dtype="bfloat16")
    frames: list[np.ndarray] = []
    assert_results(case, all_results(case, deterministic=deterministic, place=framed(frames)))
    assert_only_noise(frames, 5 + 9)  # inputs and results of both passes


@pytest.mark.parametrize("tile", FORWARD_SM90_TILES[1:3], ids=name_of)
def test_results_of_the_tma_stay_inside_their_arrays(tile):
    """Whole boxes leave shared memory, and columns and rows that do not exist stay behind."""
    case = ct.Case(seqlen_q=70, seqlen_k=81, batch=2, num_heads=2, num_heads_kv=1, head_dim=24, dtype="bfloat16")
    case = replace(case, head_dim_v=16)
    arrays = case.arrays()
    frames: list[np.ndarray] = []
    place = framed(frames, aligned=True)
    results = attention.forward(problem_of(case, arrays), arrays, tiles=(tile,), place=place)
    ct.assert_forward(case, *results)
    assert_only_noise(frames, 3 + 2)


@either_kernel
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": (2, 2, 33, 18), "mask": (2, 2, 33, 18)}], ids=["plain", "terms"])
def test_offsets_take_64_bits(options, deterministic, arch):
    case = ct.Case(
        seqlen_q=33,
        seqlen_k=18,
        batch=2,
        num_heads=2,
        head_dim=16,
        dtype="float16",
        kv_lengths=(18, 11),
        kv_lengths_dtype="int64",
        alibi_slopes=(2, 2),
        **options,
    )
    assert_results(case, all_results(case, arch=arch, deterministic=deterministic, place=attention.far_apart))


# ---- Undefined behaviour ---------------------------------------------------------------------------------------------

# Every option and every kernel.
SANITIZED = replace(CASE, bias=(150,), mask=(70, 150), softcap=5.0, alibi_slopes=(2,), bias_dtype="input", dropout=0.2)


def run_sanitized(sanitizer):
    for deterministic, dtype in ((False, "float16"), (True, "float16"), (False, "float32"), (True, "float64")):
        case = replace(SANITIZED, dtype=dtype)
        arch = "8.0" if deterministic else "9.0"
        assert_results(case, all_results(case, arch=arch, deterministic=deterministic, sanitizer=sanitizer))
    case = replace(SANITIZED, dtype="float32")
    arrays, tiles = case.arrays(), FORWARD_FLOAT32_SM90_TILES[:1]
    results = attention.forward(problem_of(case, arrays), arrays, tiles=tiles, sanitizer=sanitizer, **case.random)
    ct.assert_forward(case, *results)


def test_no_undefined_behaviour():
    run_sanitized("undefined")


def test_no_address_errors():
    """Registers and the stack too, which the emulator does not watch."""
    code = "from test_attention import run_sanitized; run_sanitized('address')"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=HERE,
        env={**emulator.sanitizer_environment(), "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]


# ---- Shared memory ---------------------------------------------------------------------------------------------------


ROWS_WITH_MATRIX_LOADS = (
    *SEVERAL_STAGES,
    *(tile for table in TABLES for tile in table if tile.element_bytes == 2),
    *FORWARD_SM90_TILES,
)


@pytest.mark.parametrize("tile", ROWS_WITH_MATRIX_LOADS, ids=name_of)
def test_matrix_loads_have_no_bank_conflicts(tile):
    case = ct.Case(seqlen_q=33, seqlen_k=65, head_dim=tile.max_dim, dtype="bfloat16")
    arrays = case.arrays()
    problem = problem_of(case, arrays, deterministic=isinstance(tile, DqTile))
    launches: list[Statistics] = []
    if isinstance(tile, ForwardSm90Tile):
        case, problem, arrays = rising(tile, "bfloat16")  # matrix loads are those of products done again
    if isinstance(tile, ForwardTile | ForwardSm90Tile):
        attention.forward(problem, arrays, tiles=(tile,), statistics=launches)
    else:
        tiles = (next(main for main in BACKWARD_TILES if goes_with(main, tile)), tile)
        tiles = tiles if isinstance(tile, DqTile) else (tile, None)
        attention.backward(problem, arrays, *forward_by_oracle(problem, arrays), tiles=tiles, statistics=launches)
    assert sum(launch.matrix_loads for launch in launches) > 0
    assert [launch.matrix_load_conflicts for launch in launches] == [0] * len(launches)
