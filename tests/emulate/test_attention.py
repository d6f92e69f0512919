"""The real kernels of both passes, run on the CPU against the oracle: every row of every table of tiles, every option.

A combination of tiles, dtype, head dimensions, options and alignment is a compilation of its own. So these come from a
fixed pseudo-random list, which a test below checks for completeness, and hypothesis draws sizes, values and schedules.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES, Statistics
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm80.tiles import BACKWARD_TILES, DQ_TILES, FORWARD_TILES
from cuflash.plan.sm90.forward import SPLIT_MAX_DIM
from cuflash.plan.sm90.tiles import (
    FORWARD_FLOAT32_SM90_TILES,
    FORWARD_SM90_TILES,
    ForwardSm90Tile,
)
from cuflash.spec import passes
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, problem_of
from tests.emulate.checks import FEW, FEW_SMS, judge, rising, schedules
from tests.emulate.specialisations import (
    ARCHS,
    CONVERSIONS,
    DTYPES,
    FLOAT32_SM90_VARIANTS,
    SEVERAL_STAGES,
    STRIDES,
    STRIDES_SM90,
    name_of,
    specialisations_of,
)
from tests.judging import bits

pytestmark = pytest.mark.one_in(64)


FORWARD = tuple(specialisations_of((*FORWARD_TILES, *SEVERAL_STAGES), with_options=2))


FORWARD_SM90 = tuple(specialisations_of(FORWARD_SM90_TILES))


# test_without_values_emulated.py has the other rows.
WITH_VALUES = tuple(tile for tile in FORWARD_FLOAT32_SM90_TILES if tile.serves != "no values")
FORWARD_FLOAT32_SM90 = tuple(specialisations_of((*WITH_VALUES, *FLOAT32_SM90_VARIANTS), with_options=5))


BACKWARD = tuple(specialisations_of(BACKWARD_TILES, with_options=1))


DETERMINISTIC = tuple(specialisations_of(DQ_TILES, with_options=1))


def _access_widths(specialisations):
    """Widths in bytes of the accesses that the specialisations load by."""
    widths = set()
    for what in specialisations:
        case = ct.Case(seqlen_q=3, seqlen_k=5, num_heads=2, head_dim=what.head_dim, head_dim_v=what.head_dim_v)
        case = replace(case, dtype=what.dtype, strides="contiguous" if what.strides in CONVERSIONS else what.strides)
        problem, arrays = what.arguments(case)
        arrays["out"] = np.empty(problem.out_shape, arrays["q"].dtype)
        plan = attention.plan_for(problem, passes.FORWARD, arrays, "9.0", None)
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
    assert {what.tiles for what in FORWARD_FLOAT32_SM90} >= {(tile,) for tile in WITH_VALUES}
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
    assert any(max(what.head_dim, what.head_dim_v) <= SPLIT_MAX_DIM for what in FORWARD_FLOAT32_SM90)
    assert any(what.right and not what.left and what.num_sms == 1 for what in FORWARD_FLOAT32_SM90)  # pairs of tiles


@pytest.mark.parametrize("what", (*FORWARD, *FORWARD_SM90, *FORWARD_FLOAT32_SM90), ids=str)
@FEW
@given(data=st.data())
def test_forward(what, data):
    case, schedule = data.draw(what.cases()), data.draw(schedules)
    options: dict[str, Any] = {**case.random}
    if isinstance(what.tiles[0], ForwardSm90Tile):  # TMA writes rows that start at multiples of 16 bytes
        options["allocate"] = lambda array: attention.guarded(CONVERSIONS.get(what.strides, np.asarray)(array))
    results = attention.forward(*what.arguments(case), arch=what.device, tiles=what.tiles, schedule=schedule, **options)
    ct.assert_forward(case, *results)


@pytest.mark.parametrize("what", (*BACKWARD, *DETERMINISTIC), ids=str)
@FEW
@given(data=st.data())
def test_backward(what, data):
    case, schedule = data.draw(what.cases()), data.draw(schedules)
    problem, arrays = what.arguments(case)
    forward = forward_by_oracle(problem, arrays, **case.random)
    options: dict[str, Any] = {"arch": what.device, "tiles": what.tiles, "schedule": schedule}
    ct.assert_backward(case, *attention.backward(problem, arrays, *forward, **options | case.random))


@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 80, 96, 152, 160, 200])
@FEW
@given(data=st.data())
def test_columns_of_gradients_on_compute_capability_9(head_dim, data):
    """Heads are padded to what products of dq have; the columns beyond are neither read as numbers nor written."""
    narrower = [d for d in (8, 16, 32, 64, 96, 160) if d < head_dim]
    case = ct.Case(
        seqlen_q=data.draw(st.integers(1, 150)),
        seqlen_k=data.draw(st.integers(1, 150)),
        num_heads=2,
        num_heads_kv=data.draw(st.sampled_from((1, 2))),
        head_dim=head_dim,
        head_dim_v=data.draw(st.sampled_from((head_dim, *narrower))),
        dtype=data.draw(st.sampled_from(("float16", "bfloat16"))),
        causal=data.draw(st.booleans()),
    )
    deterministic, schedule = data.draw(st.booleans()), data.draw(schedules)
    problem, arrays = attention.inputs_of(case, deterministic=deterministic)
    plan = choose_plan(problem, DeviceSpec.for_arch("9.0"), passes.BACKWARD)
    assert "sm90/backward.cu" in [kernel.source for kernel in plan.kernels]
    forward, options = forward_by_oracle(problem, arrays), {"arch": "9.0", "schedule": schedule}
    ct.assert_backward(case, *attention.backward(problem, arrays, *forward, allocate=attention.guarded, **options))


# ---- What acts on the sums of rows, together -------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("m_blocks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("num_sms", "shares_device"), [(1, False), (3, False), (1, True)])
def test_blocks_take_pairs_of_tiles(num_sms, shares_device, m_blocks, schedule):
    """Every tile of queries once: an odd one out is alone, blocks end with different numbers of tiles.

    On a device that computes other things they leave after a tile or, of the most tiles, after a pair.
    """
    tile = FORWARD_SM90_TILES[2]
    seqlen = tile.block_m * (m_blocks - 1) + 70
    case = ct.Case(seqlen_q=seqlen, seqlen_k=100, num_heads=3, head_dim=16, dtype="bfloat16", causal="top_left")
    arrays = case.arrays()
    device = replace(FEW_SMS, num_sms=num_sms)
    problem = replace(problem_of(case, arrays), shares_device=shares_device)
    plan = attention.plan_for(problem, passes.FORWARD, arrays, device, (tile,))
    units = 3 * -(-m_blocks // 2)
    divides_pairs = shares_device and m_blocks < 5
    assert plan.kernels[-1].grid == ((2 if divides_pairs else 1) * units if shares_device else min(num_sms, units))
    results = attention.forward(problem, arrays, tiles=(tile,), arch=device, schedule=schedule)
    ct.assert_forward(case, *results)


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


@pytest.mark.parametrize("tile", FORWARD_SM90_TILES[1:5], ids=name_of)
def test_maxima_of_near_keys_come_first(tile):
    """With steep slopes a warp does at most one tile again: of all keys, the loop begins with the nearest."""
    sizes: dict[str, Any] = {"seqlen_q": 6 * tile.block_n, "seqlen_k": 6 * tile.block_n, "head_dim": 16}
    case = ct.Case(**sizes, dtype="bfloat16", alibi_slopes=(1,), score_spread=1.0)
    arrays = case.arrays()
    arrays["alibi_slopes"][...] = 0.7
    launches: list[Statistics] = []
    problem = problem_of(case, arrays)
    out, lse = attention.forward(problem, arrays, tiles=(tile,), statistics=launches)
    judge(problem, arrays, {"out": out, "lse": lse})
    loads_of_tile = 1 + tile.block_n // 16
    assert launches[0].matrix_loads <= case.seqlen_q // 16 * loads_of_tile
