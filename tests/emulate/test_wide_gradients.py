"""The backward kernels of wide heads for compute capability 9.0, run on the CPU, against the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.plan.sm90.wide_tiles import BACKWARD_WIDE_SM90_TILES, DQ_WIDE_SM90_TILES
from cuflash.spec.passes import BACKWARD
from tests import wide_heads
from tests.emulate import attention
from tests.judging import bits

pytestmark = pytest.mark.one_in(32)

NEED = ("dq", "dk", "dv")
CASE = ct.Case(
    seqlen_q=150, seqlen_k=200, num_heads=2, num_heads_kv=1, head_dim=320, dtype="bfloat16", causal=True, seed=2
)
WIDEST = replace(CASE, head_dim=1024, causal=False, num_heads=1)
CASES = {
    "d 320": CASE,
    "d 512": replace(WIDEST, head_dim=512, dtype="float16", layout="bshd"),
    "d 576, 512": replace(WIDEST, head_dim=576, head_dim_v=512, sinks=True, dlse=True),
    "d 704": replace(WIDEST, head_dim=704),
    "d 1024": WIDEST,
    "d 1024, 512, causal": replace(WIDEST, head_dim_v=512, causal=True, num_heads=2, dtype="float16"),
    "narrow values": replace(WIDEST, head_dim=384, head_dim_v=64),
    "wide values": replace(CASE, head_dim=64, head_dim_v=448),
    "values of two blocks": replace(CASE, head_dim=64, head_dim_v=768),
    "odd columns of two blocks": replace(CASE, head_dim=552, head_dim_v=776, window=(90, 20)),
    "terms of two blocks": replace(
        CASE, head_dim=640, alibi_slopes=(2,), softcap=5.0, bias=(2, 150, 200), kv_lengths=(190,), dropout=0.3
    ),
    "odd": replace(CASE, head_dim=344, head_dim_v=264, window=(90, 20)),
    "decode": replace(CASE, seqlen_q=7, num_heads=4),
    "lengths": replace(CASE, batch=3, kv_lengths=(130, 0, 199), sinks=True),
    "no keys": replace(CASE, seqlen_k=5),
    "block mask": replace(CASE, seqlen_k=600, block_mask=(2,), block_size=(128, 128), num_heads_kv=2),
    "terms": replace(
        CASE, alibi_slopes=(2,), softcap=5.0, bias=(2, 150, 200), mask=(200,), kv_lengths=(190,), scale=-0.3
    ),
    "mask of pairs": replace(CASE, mask=(2, 150, 200), softcap=2.0),
    "dropout": replace(CASE, dropout=0.3, softcap=3.0),
}


def run(case, need=NEED, *, arch: Any = "9.0", wide=(), **options):
    """Gradients by name, and the sources of the kernels that made them."""
    problem, arrays = attention.inputs_of(case)
    problem = replace(problem, wide=wide)
    out, lse = attention.forward_by_oracle(problem, arrays, **case.random)
    plan = attention.plan_for(problem, BACKWARD, arrays | {"out": out}, arch, options.get("tiles"), need)
    found = attention.backward(problem, arrays, out, lse, need=need, arch=arch, **case.random, **options)
    return dict(zip(need, found, strict=True)), plan


def assert_right(case, need=NEED, **options):
    found, plan = run(case, need, **options)
    assert sum(kernel.source == "sm90/backward_wide.cu" for kernel in plan.kernels) == len({*need} & {*NEED})
    ct.assert_backward(case, **found)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_oracle(case):
    assert_right(case)


@settings(max_examples=6)
@given(wide_heads.cases(dims=(320, 512, 576, 704, 768, 1024)), st.sampled_from((1, 5, 132)), st.sampled_from(SCHEDULES))
def test_any_problem(case, num_sms, schedule):
    """On devices of which few tiles fill some, so that blocks share others."""
    assert_right(case, arch=replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms), schedule=schedule)


@pytest.mark.parametrize(
    "need", [("dq",), ("dk",), ("dv",), ("dq", "dv"), ("dq", "dk", "dv", "dbias", "dscale")], ids="-".join
)
def test_each_gradient_alone(need):
    """The bits are those of all together."""
    case = replace(CASE, bias=(2, 150, 200)) if "dbias" in need else CASE
    every = assert_right(case)
    for name, x in assert_right(case, need).items():
        if name in every:
            np.testing.assert_array_equal(x, every[name])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("row", range(len(BACKWARD_WIDE_SM90_TILES)))
def test_every_tile(row, schedule):
    main, dq = BACKWARD_WIDE_SM90_TILES[row], DQ_WIDE_SM90_TILES[row]
    case = replace(CASE, head_dim=main.max_dim, seqlen_q=200, dtype="float16")
    assert_right(case, tiles=(main, dq), schedule=schedule)


@settings(max_examples=6)
@given(
    wide_heads.cases(dims=(320, 576, 640)).map(lambda case: replace(case, causal=True)),
    st.sampled_from((1, 6, 132)),
    st.sampled_from(SCHEDULES),
)
def test_any_causal_mask(case, num_sms, schedule):
    """Longer and shorter halves of tiles run in opposite directions, those of one head or of several side by side."""
    problem, arrays = attention.inputs_of(case)
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms)
    plan = attention.plan_for(problem, BACKWARD, arrays, device)
    clusters, tiles = max(1, num_sms // plan.tiles[0].cluster), -(-case.seqlen_k // 64)
    hides = plan.problem.window_right is not None
    assert plan.run_time.head_section == (max(1, 2 * clusters // tiles) if hides else 1)
    assert_right(case, arch=device, schedule=schedule)


def test_neither_schedule_nor_memory_change_a_bit():
    first, _ = run(CASE)
    for schedule in SCHEDULES[1:]:
        other, _ = run(CASE, schedule=schedule, fill=0x3F)
        assert bits(other) == bits(first)


def test_what_lies_behind_the_last_key_is_not_seen():
    case = replace(CASE, kv_lengths=(131,), head_dim_v=512)
    problem, arrays = attention.inputs_of(case)
    out, lse = attention.forward_by_oracle(problem, arrays)
    expected = attention.backward(problem, arrays, out, lse, arch="9.0")
    arrays["k"][:, :, 131:] = arrays["v"][:, :, 131:] = np.nan
    for got, x in zip(attention.backward(problem, arrays, out, lse, arch="9.0"), expected, strict=True):
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 330}, "not sm90/backward_wide: a stride of q is 99000 bytes"),
        ({"head_dim_v": 260}, "not sm90/backward_wide: a stride of v is 520 bytes"),
    ],
)
def test_what_it_does_not_serve(changes, reason):
    problem, arrays = attention.inputs_of(replace(CASE, **changes))
    plan = attention.plan_for(problem, BACKWARD, arrays, "9.0")
    assert {kernel.source.split("/")[0] for kernel in plan.kernels} == {"helpers", "sm80"}
    assert reason in plan.reason
