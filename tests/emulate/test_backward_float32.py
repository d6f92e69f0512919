"""The backward pass of float32 by bf16 terms, run on the CPU: every row and option against the oracle."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.plan.sm90.tiles import BACKWARD_FLOAT32_SM90_TILES, FORWARD_FLOAT32_SM90_TILES
from tests.emulate import attention, checks
from tests.emulate.attention import forward_by_oracle, problem_of
from tests.emulate.checks import EDGES, FEW
from tests.emulate.specialisations import Specialisation
from tests.judging import bits

WITH_VALUES = tuple(tile for tile in FORWARD_FLOAT32_SM90_TILES if tile.serves != "no values")

pytestmark = pytest.mark.one_in(20)

NARROW, WIDE = BACKWARD_FLOAT32_SM90_TILES
# What no row of the table may use: other numbers of stages and buffers, dq at other times.
OTHERS = {
    "narrow, one stage": replace(NARROW, num_stages=1, num_buffers=1),
    "narrow, late dq": replace(NARROW, dq_late=not NARROW.dq_late),
    "narrow, three stages": replace(NARROW, num_stages=3, num_buffers=1),
    "wide, early dq": replace(WIDE, dq_late=not WIDE.dq_late),
}
ROWS = (*BACKWARD_FLOAT32_SM90_TILES, *OTHERS.values())
rows = pytest.mark.parametrize("tile", ROWS, ids=["narrow", "wide", *OTHERS])


def row_for(head_dim, table):
    return next(tile for tile in table if head_dim <= tile.max_dim)


def backward(problem, arrays, out, lse, tile, **options):
    return attention.backward(problem, arrays, out, lse, tiles=(tile,), **options)


def what(tile, head_dim, head_dim_v=None, **options):
    dims = {"head_dim": head_dim, "head_dim_v": head_dim if head_dim_v is None else head_dim_v}
    return Specialisation(tiles=(tile,), dtype="float32", arch="9.0", **dims, **options)


SPECIALISATIONS = (
    *(what(tile, tile.max_dim, right=right) for tile in ROWS for right in (False, True)),
    what(NARROW, 64, num_sms=1, right=True),
    what(WIDE, 128, num_sms=1, right=True, left=True),
    what(NARROW, 40, 17, strides="padded", left=True, mask=True),
    what(WIDE, 72, 128, strides="flipped", kv_lengths="int32"),
    what(WIDE, 96, 33, strides="transposed", bias="softmax", scale=-0.25),
    what(NARROW, 1, 64, strides="shifted", alibi_slopes=True, right=True, num_sms=1),
    what(WIDE, 5, 125, strides="widened", softcap=5.0, kv_lengths="int64", mask=True),
    what(NARROW, 33, 63, softcap=0.5, bias="input", mask=True, kv_lengths="int64", alibi_slopes=True, left=True),
    what(WIDE, 113, 64, softcap=50.0, bias="softmax", mask=True, right=True, left=True, scale=1.0, num_sms=1),
    what(NARROW, 16, 8, scale=0.0, kv_lengths="int32", right=True),
    what(WIDE, 128, dropout=0.1),
    what(NARROW, 64, dropout=0.5, right=True, num_sms=1),
    what(WIDE, 72, 40, dropout=0.9, softcap=5.0, mask=True, kv_lengths="int64"),
)


@pytest.mark.parametrize("what", SPECIALISATIONS, ids=str)
@FEW
@given(data=st.data())
def test_backward(what, data):
    case, schedule = data.draw(what.cases()), data.draw(st.sampled_from(SCHEDULES))
    problem, arrays = what.arguments(case)
    forward = forward_by_oracle(problem, arrays, **case.random)
    options = {"arch": what.device, "schedule": schedule, **case.random}
    ct.assert_backward(case, *backward(problem, arrays, *forward, what.tiles[0], **options))


# An empty array has no tensor map: then another kernel runs.
NOT_EMPTY = {name: sizes for name, sizes in EDGES.items() if 0 not in sizes.values()}


@pytest.mark.parametrize("tile", BACKWARD_FLOAT32_SM90_TILES, ids=["narrow", "wide"])
@pytest.mark.parametrize("edge", NOT_EMPTY)
def test_edges(edge, tile):
    case = ct.Case(head_dim=13, dtype="float32", **NOT_EMPTY[edge])
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    ct.assert_backward(case, *backward(problem, arrays, *forward_by_oracle(problem, arrays), tile))


CASE = replace(checks.CASE, dtype="float32", seqlen_q=150, kv_lengths=(150, 70))


@rows
def test_the_schedule_changes_no_bit_of_dk_and_dv(tile):
    """They are summed up in a fixed order; that of the sums of dq is free."""
    arrays = CASE.arrays()
    problem = problem_of(CASE, arrays)
    forward = forward_by_oracle(problem, arrays)
    first = None
    for schedule in SCHEDULES:
        results = backward(problem, arrays, *forward, tile, schedule=schedule)
        ct.assert_backward(CASE, *results)
        first = first or bits(results[1:])
        assert bits(results[1:]) == first


@pytest.mark.parametrize("num_sms", [1, 132])
@rows
def test_what_lies_in_memory_changes_no_bit(tile, num_sms):
    arrays = CASE.arrays()
    problem = problem_of(CASE, arrays)
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms)
    run = functools.partial(backward, problem, arrays, *forward_by_oracle(problem, arrays), tile, arch=device)
    assert bits(run(fill=0xFF)) == bits(run(fill=0x3F))


@pytest.mark.parametrize("tile", BACKWARD_FLOAT32_SM90_TILES, ids=["narrow", "wide"])
@pytest.mark.parametrize("head_dim", [24, 23])
def test_results_stay_inside_their_arrays(tile, head_dim):
    case = ct.Case(seqlen_q=70, seqlen_k=81, batch=2, num_heads=2, num_heads_kv=1, head_dim=head_dim, dtype="float32")
    arrays = case.arrays()
    frames: list[np.ndarray] = []
    problem = problem_of(case, arrays)
    forward = forward_by_oracle(problem, arrays)
    results = backward(problem, arrays, *forward, tile, allocate=checks.framed(frames))
    ct.assert_backward(case, *results)
    checks.assert_only_noise(frames, 6 + 3)


@pytest.mark.parametrize("tile", BACKWARD_FLOAT32_SM90_TILES, ids=["narrow", "wide"])
def test_offsets_take_64_bits(tile):
    sizes: dict[str, Any] = {"seqlen_q": 33, "seqlen_k": 18, "batch": 2, "num_heads": 2, "head_dim": 16}
    case = ct.Case(**sizes, dtype="float32", bias=(2, 2, 33, 18), mask=(2, 2, 33, 18), kv_lengths=(18, 11))
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    results = backward(problem, arrays, *forward_by_oracle(problem, arrays), tile, allocate=attention.far_apart)
    ct.assert_backward(case, *results)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"causal": True}, {"head_dim": 48}, {"head_dim": 128}, {"softcap": 20.0}),
        *({"score_spread": 30.0}, {"score_spread": 30.0, "head_dim": 128}),
    ],
    ids=str,
)
def test_no_worse_than_the_plain_formula(options):
    """On the average of several seeds, without the allowance for luck; lse is that of the forward pass by parts."""
    sizes: dict[str, Any] = {"seqlen_q": 65, "seqlen_k": 203, "head_dim": 64} | options
    ratios = []
    for seed in range(6):
        case = ct.Case(**sizes, dtype="float32", seed=seed)
        arrays = case.arrays()
        problem = problem_of(case, arrays)
        out, lse = attention.forward(problem, arrays, tiles=(row_for(case.head_dim, WITH_VALUES),))
        results = backward(problem, arrays, out, lse, row_for(case.head_dim, BACKWARD_FLOAT32_SM90_TILES))
        ratios.append([measurement.strict_ratio for measurement in ct.assert_backward(case, *results)])
    assert (np.mean(ratios, axis=0) <= 1).all(), np.round(np.mean(ratios, axis=0), 2)


@pytest.mark.parametrize("tile", BACKWARD_FLOAT32_SM90_TILES, ids=["narrow", "wide"])
def test_infinities(tile):
    """An infinite gradient of the output comes out where the formula has it, next to finite ones."""
    case = ct.Case(seqlen_q=40, seqlen_k=70, head_dim=16, dtype="float32", causal=True)
    arrays = case.arrays()
    arrays["dout"][0, 0, 7, 3] = np.inf
    arrays["dout"][0, 0, 30, 2] = np.nan
    problem = problem_of(case, arrays)
    results = backward(problem, arrays, *forward_by_oracle(problem, arrays), tile)
    checks.judge(problem, arrays, dict(zip(("dq", "dk", "dv"), results, strict=True)))


@pytest.mark.parametrize("tile", BACKWARD_FLOAT32_SM90_TILES, ids=["narrow", "wide"])
def test_no_undefined_behaviour(tile):
    case = replace(checks.SANITIZED, dtype="float32")
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    results = backward(
        problem, arrays, *forward_by_oracle(problem, arrays, **case.random), tile, sanitizer="undefined", **case.random
    )
    ct.assert_backward(case, *results)
