"""Values that are the first columns of the keys, as those of latent attention are: loaded once, by decode."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES, Statistics
from cuflash.plan import DeviceSpec
from cuflash.plan.key_splits import DECODE_ROWS, rows_of
from cuflash.plan.sm90.wide_tiles import DECODE_WIDE_SM90_TILES
from cuflash.spec.passes import FORWARD
from tests import wide_heads
from tests.emulate import attention
from tests.sampling import examples

(ROW,) = (tile for tile in DECODE_WIDE_SM90_TILES if tile.v_in_k)
CASE = ct.Case(
    seqlen_q=1,
    seqlen_k=700,
    num_heads=16,
    num_heads_kv=1,
    head_dim=576,
    head_dim_v=512,
    v_in_k=True,
    dtype="bfloat16",
    seed=2,
)


def assert_right(case, num_sms=132, schedule=SCHEDULES[0]):
    """What the main kernel did."""
    problem, arrays = attention.inputs_of(case)
    how: dict[str, Any] = {"arch": replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms)}
    tile = attention.plan_for(problem, FORWARD, arrays, how["arch"]).tiles[0]
    assert (tile == ROW) == (rows_of(problem) <= DECODE_ROWS)
    statistics: list[Statistics] = []
    results = attention.forward(problem, arrays, schedule=schedule, statistics=statistics, **case.random, **how)
    ct.assert_forward(case, *results)
    return statistics[0]


@settings(max_examples=examples(8))
@given(wide_heads.decode_cases(), st.sampled_from((2, 6, 132)), st.sampled_from(SCHEDULES))
def test_any_problem(case, num_sms, schedule):
    assert_right(replace(case, head_dim_v=min(case.head_dim, case.head_dim_v), v_in_k=True), num_sms, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_one_block_has_all_keys(schedule):
    """Tiles follow each other through the ring in every order."""
    assert_right(CASE, 1, schedule)


def test_what_lies_behind_the_last_key_is_not_seen():
    """There are NaN."""
    assert_right(replace(CASE, batch=3, kv_lengths=(600, 0, 131)))


def test_long_sums_are_halved():
    """Tensor cores cut a sum of 576 columns off 36 times: on a device lse was outside the oracle rule with one sum."""
    case = replace(CASE, dtype="float16", seqlen_q=4, seqlen_k=520, head_dim_v=64, score_spread=3.0, seed=1)
    report = ct.assert_forward(case, *attention.forward(*attention.inputs_of(case), arch="9.0"))
    (lse,) = (m for m in report if m.name == "lse")
    assert lse.ratio < 0.6  # of a single sum 0.75


def test_keys_are_loaded_once():
    found = assert_right(replace(CASE, seqlen_k=640), num_sms=1)
    assert found.bytes_loaded == (640 + 16) * 576 * 2


def test_the_row_that_serves():
    """Only where v is in k, one pass makes all columns of the output, and one block has all rows."""
    arrays = replace(CASE, v_in_k=False).arrays()
    del arrays["dout"]
    separate = attention.plan_for(attention.problem_of(CASE, arrays), FORWARD, arrays, "9.0")
    assert separate.tiles[0].label != ROW.label and "for values that are the first columns" in separate.reason
    within = arrays | {"v": arrays["k"][..., :512]}
    plan = attention.plan_for(attention.problem_of(CASE, within), FORWARD, within, "9.0")
    assert plan.tiles == (ROW,) and "v is the first columns of k, and not loaded again" in plan.reason
    assert dict(plan.kernels[0].defines)["CUFLASH_V_IN_K"]
    for v in (arrays["k"][..., 64:], np.broadcast_to(arrays["k"][:, :, :1, :512], (1, 1, 700, 512)), arrays["k"]):
        other = arrays | {"v": v}
        problem = attention.problem_of(replace(CASE, head_dim_v=v.shape[-1]), other)
        assert not dict(attention.plan_for(problem, FORWARD, other, "9.0").kernels[0].defines)["CUFLASH_V_IN_K"]
    with pytest.raises(NotImplementedError, match=r"^tiles: got a row for values in keys"):
        attention.plan_for(attention.problem_of(CASE, arrays), FORWARD, arrays, "9.0", tiles=(ROW,))
