"""The tangents of gradients in float32 by the kernels of 9.0 in the emulator, by the oracle rule."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.emulator import SCHEDULES, passes
from cuflash.plan.sm90.tiles import (
    BACKWARD_JVP_FLOAT32_SM90_TILES,
    BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES,
    BACKWARD_JVP_TF32_SM90_TILES,
    BACKWARD_JVP_TF32_WIDE_SM90_TILES,
    BackwardJvpFloat32Sm90Tile,
    BackwardJvpFloat32WideSm90Tile,
)
from cuflash.spec.passes import BACKWARD_JVP
from cuflash.testing import Case, cases
from cuflash.testing.tangents import everything
from tests.emulate.tangents import check_float32, inputs_of_float32
from tests.sampling import examples, sample
from tests.second_derivatives import CASES, FEATURES, moved_by, moves_of

NEED = ("tdq", "tdk", "tdv")
OF_THREE_TERMS = (*BACKWARD_JVP_FLOAT32_SM90_TILES, *BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES)
TILES = (*OF_THREE_TERMS, *BACKWARD_JVP_TF32_SM90_TILES, *BACKWARD_JVP_TF32_WIDE_SM90_TILES)
# Packed sequences are served by another kernel.
OF_FLOAT32 = [
    replace(case, dtype="float32", head_dim=dims[0], head_dim_v=dims[1])
    for case in CASES
    for dims in ((64, 64), (24, 40), (128, 128), (96, 40), (40, 72))
    if case.cu_seqlens_q is None
]


def tile_of(case):
    return next(tile for tile in OF_THREE_TERMS if max(case.head_dim, case.head_dim_v) <= tile.max_dim)


@pytest.mark.parametrize("case", sample(OF_FLOAT32, 6), ids=str)
def test_every_option(case):
    check_float32(case, everything(case), tile_of(case))


@pytest.mark.parametrize(
    ("case", "moved"), sample([(case, moved) for case in OF_FLOAT32 for moved in moves_of(case)], 40), ids=str
)
def test_tangents_that_are_not_given(case, moved):
    check_float32(case, moved, tile_of(case))


@settings(max_examples=examples(8), deadline=None)
@given(
    cases(
        dtypes=("float32",),
        features=tuple(name for name in FEATURES if name != "packed"),
        max_seqlen=257,
        max_head_dim=64,
        max_scores=2**15,
    ),
    st.sampled_from([(terms, *own) for terms in (2, 3) for own in ((1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2))]),
    st.data(),
)
def test_drawn_cases(case, stages, data):
    terms, num_stages, do_stages, num_buffers = stages
    tile = BackwardJvpFloat32Sm90Tile(
        max_dim=64,
        num_stages=num_stages,
        do_stages=do_stages,
        num_buffers=num_buffers,
        bf16_terms=terms,
        origin="drawn",
    )
    check_float32(case, data.draw(moved_by(case)), tile, schedule=data.draw(st.sampled_from(SCHEDULES)))


@settings(max_examples=examples(8), deadline=None)
@given(
    cases(
        dtypes=("float32",),
        features=tuple(name for name in FEATURES if name != "packed"),
        max_seqlen=257,
        max_head_dim=128,
        max_scores=2**15,
    ),
    st.sampled_from([(3, 4, 2), (3, 4, 3), (3, 5, 2), (2, 4, 2), (2, 8, 6)]),
    st.data(),
)
def test_drawn_cases_of_boxes(case, boxes, data):
    terms, num_stages, tdk_boxes = boxes
    tile = BackwardJvpFloat32WideSm90Tile(
        max_dim=128, num_stages=num_stages, tdk_boxes=tdk_boxes, bf16_terms=terms, origin="drawn"
    )
    check_float32(case, data.draw(moved_by(case)), tile, schedule=data.draw(st.sampled_from(SCHEDULES)))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_rows_of_the_table(tile, spread):
    """Keys' tangents have a large part in common."""
    case = Case(seqlen_q=200, seqlen_k=270, head_dim=tile.max_dim, dtype="float32", causal=True, score_spread=spread)
    check_float32(case, replace(everything(case), common=10.0), tile)


@pytest.mark.parametrize("tile", OF_THREE_TERMS, ids=str)
@pytest.mark.parametrize("need", sample([("tdq",), ("tdk",), ("tdv",), ("tdk", "tdv")], 1), ids=str)
def test_results_that_are_not_needed(need, tile):
    """A result is the same, bit for bit, whatever else is made: tdq of one tile of keys, which no other adds to."""
    case = Case(seqlen_q=300, seqlen_k=60, head_dim=tile.max_dim, head_dim_v=40, dtype="float32", num_heads=2)
    problem, given = inputs_of_float32(case, everything(case), tile)
    options: dict[str, Any] = {"arch": "9.0", "tiles": (tile,)}
    every = dict(zip(NEED, passes.backward_jvp(problem, given, need=NEED, **options), strict=True))
    for name, x in zip(need, passes.backward_jvp(problem, given, need=need, **options), strict=True):
        np.testing.assert_array_equal(x, every[name], err_msg=name)


@pytest.mark.parametrize("tile", OF_THREE_TERMS, ids=str)
def test_infinite_numbers(tile):
    """An infinity in dout makes NaN and infinities where it belongs, and nowhere else."""
    case = Case(seqlen_q=100, seqlen_k=90, head_dim=tile.max_dim, head_dim_v=40, dtype="float32", num_heads=2)
    problem, given = inputs_of_float32(case, everything(case), tile)
    given["dout"] = given["dout"].copy()
    given["dout"][0, 0, 70, 3] = np.inf
    found = passes.backward_jvp(problem, given, need=NEED, arch="9.0", tiles=(tile,))
    tdq, tdk, tdv = (np.isfinite(x) for x in found)
    rows = np.ones(tdq.shape[:3], bool)
    rows[0, 0, 70] = False
    assert tdq[rows].all() and not tdq[~rows].any()
    assert not tdk[0, 0].any() and tdk[0, 1].all()
    assert not tdv[0, 0, :, 3].any() and np.delete(tdv[0, 0], 3, axis=-1).all()


@pytest.mark.parametrize("tile", OF_THREE_TERMS, ids=str)
def test_the_kernel_is_chosen(tile):
    case = Case(seqlen_q=300, seqlen_k=300, head_dim=tile.max_dim, dtype="float32")
    _, given = inputs_of_float32(case, everything(case), tile)
    plan = passes.plan_for(case.problem, BACKWARD_JVP, given, "9.0")
    assert plan.tiles == (tile,)
