"""jvp on compute capability 9.0 in the emulator: every way to cut it, every schedule, whatever tangents are given."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.emulator import SCHEDULES, passes
from cuflash.plan.sm90.jvp import JVP_SM90_TILES, JVP_WIDE_SM90_TILES, JvpSm90Tile, JvpWideSm90Tile
from cuflash.plan.sm90.tiles import (
    JVP_FLOAT32_SM90_TILES,
    JVP_FLOAT32_WIDE_SM90_TILES,
    JVP_TF32_SM90_TILES,
    JVP_TF32_WIDE_SM90_TILES,
    JvpFloat32Sm90Tile,
    JvpFloat32WideSm90Tile,
)
from cuflash.plan.tiles import round_up
from cuflash.spec.passes import JVP
from cuflash.testing import Case, cases, yardsticks
from cuflash.testing.rule import measure
from cuflash.testing.tangents import Moved, everything, yardsticks_of
from tests.emulate.tangents import check_jvp
from tests.sampling import examples, sample
from tests.second_derivatives import CASES, FEATURES, moved_by, moves_of

FLOAT32_TILES = (*JVP_FLOAT32_SM90_TILES, *JVP_FLOAT32_WIDE_SM90_TILES)
TF32_TILES = (*JVP_TF32_SM90_TILES, *JVP_TF32_WIDE_SM90_TILES)
OF_FLOAT32 = [
    replace(case, dtype="float32", head_dim=dims[0], head_dim_v=dims[1])
    for case in CASES
    for dims in ((case.head_dim, case.head_dim_v), (128, 128), (40, 72), (96, 40))
]
OF_HALVES = [case for case in CASES if case.dtype in ("float16", "bfloat16")]


AnyTile = JvpSm90Tile | JvpWideSm90Tile | JvpFloat32Sm90Tile | JvpFloat32WideSm90Tile


def check(case: Case, moved: Moved, tile: AnyTile | None = None, **options: Any) -> None:
    """The tile is that of the table where TMA cannot read the arrays, and another kernel serves them."""
    given = {name: x for name, x in (case.arrays() | moved.arrays(case)).items() if not name.endswith(("dout", "dlse"))}
    is_served = isinstance(passes.plan_for(case.problem, JVP, given, "9.0").tiles[0], AnyTile)
    check_jvp(case, moved, tiles=None if tile is None or not is_served else (tile,), **options)


@st.composite
def tiles_for(draw, case):
    """A tile for the head dimensions of a case that leaves space in shared memory."""
    block_m = draw(st.sampled_from((128, 192)))
    is_wide = max(case.head_dim, case.head_dim_v) > 64
    return JvpSm90Tile(
        max_dim=128,
        block_m=block_m,
        block_n=draw(st.sampled_from((32, 48, 64) if is_wide or block_m > 128 else (32, 64, 96, 112))),
        num_stages=1 if is_wide and block_m > 128 else 2,
        ping_pong=draw(st.booleans()),
        q_stages=1 if is_wide else draw(st.sampled_from((1, 2))),
        overlaps_tiles=draw(st.booleans()),
        origin="drawn",
    )


@settings(max_examples=examples(20))
@given(cases(dtypes=("float16", "bfloat16"), features=FEATURES, max_seqlen=333, max_head_dim=72), st.data())
def test_drawn_cases_tiles_and_schedules(case, data):
    dims = round_up(case.head_dim, 8), round_up(case.head_dim_v, 8)
    case = replace(case, head_dim=dims[0], head_dim_v=dims[1], strides="contiguous")
    check(case, data.draw(moved_by(case)), data.draw(tiles_for(case)), schedule=data.draw(st.sampled_from(SCHEDULES)))


@pytest.mark.parametrize(
    ("case", "moved"), sample([(case, moved) for case in OF_HALVES for moved in moves_of(case)], 12), ids=str
)
def test_tangents_that_are_not_given(case, moved):
    check(case, moved)


@pytest.mark.parametrize("tile", sample(JVP_SM90_TILES, 3), ids=str)
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_rows_of_the_table(tile, spread):
    """Several tiles of queries, in sequences with a diagonal, whose keys' tangents have a large part in common."""
    case = Case(seqlen_q=270, seqlen_k=520, head_dim=tile.max_dim, dtype="bfloat16", causal=True, score_spread=spread)
    check(case, replace(everything(case), common=10.0), tile)


# ---- Head dimensions above 128


def of_wide(case: Case, head_dim: int, head_dim_v: int) -> Case:
    """The case with these head dimensions, and arrays that TMA can read."""
    return replace(case, head_dim=head_dim, head_dim_v=head_dim_v, strides="contiguous")


@settings(max_examples=examples(4))
@given(
    cases(
        dtypes=("float16", "bfloat16"),
        features=[name for name in FEATURES if name != "head_dim_v"],
        max_seqlen=333,
        max_head_dim=8,
    ),
    st.sampled_from((136, 192, 256)),
    st.sampled_from((8, 128, 200, 256)),
    st.sampled_from((2, 3, 4)),
    st.data(),
)
def test_drawn_wide_cases(case, head_dim, head_dim_v, stages, data):
    case = of_wide(case, head_dim, head_dim_v)
    tile = JvpWideSm90Tile(max_dim=256, num_stages=stages, origin="drawn")
    check(case, data.draw(moved_by(case)), tile, schedule=data.draw(st.sampled_from(SCHEDULES)))


@pytest.mark.parametrize(
    ("case", "moved"),
    sample([(case, moved) for case in OF_HALVES for moved in moves_of(case)], 4),
    ids=str,
)
def test_wide_tangents_that_are_not_given(case, moved):
    check(of_wide(case, 144, 136), moved)


@pytest.mark.parametrize("tile", JVP_WIDE_SM90_TILES, ids=str)
def test_wide_rows_of_the_table(tile):
    """The largest scores of rows are those of either consumer, and keys' tangents have a large part in common."""
    case = Case(seqlen_q=270, seqlen_k=520, head_dim=256, dtype="bfloat16", causal=True, score_spread=8.0)
    check(case, replace(everything(case), common=10.0), tile)


@pytest.mark.parametrize(
    "options", sample([{}, {"seqlen_k": 400}, {"block_mask": (2, 1)}, {"num_heads_kv": 3}], 2), ids=str
)
@pytest.mark.parametrize("head_dim", [40, 144])
def test_blocks_with_one_tile_each_the_longest_first(options, head_dim, monkeypatch):
    """What the plan of a causal mask is from some thousands of keys on."""
    for name in ("LONGEST_FIRST_KEYS", "LONGEST_FIRST_KEYS_WIDE"):
        monkeypatch.setattr(f"cuflash.plan.sm90.jvp.{name}", 1)
    sizes = {"seqlen_q": 150, "seqlen_k": 150, "head_dim": head_dim, "num_heads": 3, "batch": 2}
    case = Case(**sizes | options, dtype="bfloat16", causal=True)
    plan = passes.plan_for(case.problem, JVP, case.arrays(), "9.0")
    assert "one for each of" in plan.reason and plan.run_time.head_section == 2
    check(case, Moved(names=("q", "k", "v")))


# ---- float32, as bf16 terms


def check_float32(case: Case, moved: Moved, tile: JvpFloat32Sm90Tile | JvpFloat32WideSm90Tile, **options: Any) -> None:
    """Two terms, which are for precision="tf32", have 16 bits of the 24 that the tolerance is for."""
    if case.problem.is_packed:
        check(case, moved)  # another kernel serves it
    elif tile.bf16_terms == 3:
        check_jvp(case, moved, arch="9.0", tiles=(tile,), **options)
    else:
        problem, arrays = replace(case.problem, precision="tf32"), case.arrays()
        given = {name: x for name, x in (arrays | moved.arrays(case)).items() if not name.endswith(("dout", "dlse"))}
        results = passes.jvp(problem, given, arch="9.0", tiles=(tile,), **case.random, **options)
        judges = yardsticks(case.problem, arrays, **case.random) | yardsticks_of(case, moved)
        for name, x in zip(("out", "lse", "tout", "tlse"), results, strict=True):
            measurement = measure(name, x, judges[name].looser(2.0 ** (24 - 16)))
            assert not measurement.failure, str(measurement)


@settings(max_examples=examples(8))
@given(
    cases(dtypes=("float32",), features=FEATURES, max_seqlen=333, max_head_dim=64),
    st.sampled_from((16, 32, 48, 64)),
    st.sampled_from((1, 2)),
    st.sampled_from((2, 3)),
    st.booleans(),
    st.data(),
)
def test_drawn_float32_cases(case, block_n, stages, terms, ping_pong, data):
    tile = JvpFloat32Sm90Tile(
        max_dim=64,
        block_n=block_n,
        num_stages=stages if block_n * terms < 150 else 1,
        ping_pong=ping_pong,
        bf16_terms=terms,
        origin="drawn",
    )
    check_float32(case, data.draw(moved_by(case)), tile, schedule=data.draw(st.sampled_from(SCHEDULES)))


@settings(max_examples=examples(8))
@given(
    cases(dtypes=("float32",), features=FEATURES, max_seqlen=260, max_head_dim=128, max_scores=2**15),
    st.sampled_from([(3, 4, 2), (3, 4, 3), (2, 4, 2), (2, 6, 4)]),
    st.data(),
)
def test_drawn_float32_cases_of_boxes(case, boxes, data):
    terms, num_stages, value_boxes = boxes
    tile = JvpFloat32WideSm90Tile(
        max_dim=128, num_stages=num_stages, value_boxes=value_boxes, bf16_terms=terms, origin="drawn"
    )
    check_float32(case, data.draw(moved_by(case)), tile, schedule=data.draw(st.sampled_from(SCHEDULES)))


@pytest.mark.parametrize(
    ("case", "moved"), sample([(case, moved) for case in OF_FLOAT32 for moved in moves_of(case)], 20), ids=str
)
def test_float32_tangents_that_are_not_given(case, moved):
    check(case, moved)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("tile", (*FLOAT32_TILES, *TF32_TILES), ids=str)
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_float32_rows_of_the_table(tile, spread):
    """As `test_rows_of_the_table`."""
    case = Case(seqlen_q=270, seqlen_k=520, head_dim=tile.max_dim, dtype="float32", causal=True, score_spread=spread)
    check_float32(case, replace(everything(case), common=10.0), tile)
