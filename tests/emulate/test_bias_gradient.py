"""The gradient of a per-pair bias on compute capability 9.0, by the kernel that makes nothing else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.spec.passes import BACKWARD
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, inputs_of
from tests.emulate.checks import FEW
from tests.judging import bits

pytestmark = pytest.mark.one_in(3)

DEVICE = DeviceSpec.for_arch("9.0")
SIZES: dict[str, Any] = {
    "batch": 2,
    "num_heads": 4,
    "num_heads_kv": 2,
    "seqlen_q": 150,
    "seqlen_k": 152,
    "head_dim": 40,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "of each head": {"bias": (4, 150, 152), "causal": True, "sinks": True},
    "of each batch entry": {"bias": (2, 1, 150, 152), "window": (30, 10), "bias_dtype": "input"},
    "of all": {"bias": (2, 4, 150, 152), "bias_dtype": "input", "dtype": "float16", "dropout": 0.3},
    "of none": {"bias": (150, 152), "mask": (2, 1, 1, 152), "softcap": 5.0, "alibi_slopes": (4,)},
    "lengths": {"bias": (1, 1, 150, 152), "kv_lengths": (100, 0), "bias_holes": True, "head_dim_v": 72},
    "wide": {
        "bias": (4, 150, 152),
        "mask": (1, 152),
        "bias_dtype": "input",
        "head_dim": 128,
        "dropout": 0.2,
        "dlse": True,
    },
    "wider": {"bias": (1, 150, 152), "bias_dtype": "input", "head_dim": 192, "head_dim_v": 16, "causal": "top_left"},
    "float32": {"bias": (4, 150, 152), "mask": (2, 1, 1, 152), "dtype": "float32", "causal": True, "sinks": True},
    "float32 of none": {"bias": (150, 152), "dtype": "float32", "dropout": 0.3, "softcap": 5.0, "head_dim_v": 64},
    "float32 lengths": {"bias": (2, 1, 150, 152), "dtype": "float32", "kv_lengths": (100, 0), "head_dim": 33},
    "blocks": {"bias": (4, 150, 256), "seqlen_k": 256, "block_mask": (4,), "block_size": (128, 128)},
}


@pytest.fixture(autouse=True)
def blocks_split_short_loops(monkeypatch):
    for name in ("SPLIT_STEPS", "ADD_STEPS", "ADD_STEPS_PER_SPLIT"):
        monkeypatch.setattr(f"cuflash.plan.scores.{name}", 0)


def case_of(kind, **changes):
    return ct.Case(**{"dtype": "bfloat16"} | SIZES | OPTIONS[kind] | changes)


def run(case, need, num_sms, **options):
    """Gradients by name, and the plan; where the order of additions is fixed, no main kernel of float32 adds dbias."""
    device = replace(DEVICE, num_sms=num_sms)
    problem, arrays = inputs_of(case, deterministic=case.dtype == "float32")
    out, lse = forward_by_oracle(problem, arrays, **case.random)
    plan = attention.plan_for(problem, BACKWARD, arrays | {"out": out}, device, None, need)
    assert "sm90/backward_bias.cu" in {kernel.source for kernel in plan.kernels}
    found = attention.backward(problem, arrays, out, lse, need=need, arch=device, **case.random, **options)
    return dict(zip(need, found, strict=True)), plan


@pytest.mark.parametrize("kind", OPTIONS)
@FEW
@given(
    schedule=st.sampled_from(SCHEDULES),
    num_sms=st.sampled_from((3, 132)),  # one whose blocks take several tiles and share the rest, and one for few tiles
    with_main=st.booleans(),
    spread=st.sampled_from((1.0, 8.0)),
    seed=st.integers(0, 2**16),
)
def test_against_the_oracle(kind, schedule, num_sms, with_main, spread, seed):
    case = case_of(kind, score_spread=spread, seed=seed)
    of_main = ("dk", "dv") if case.dtype == "float32" else ("dq", "dk", "dv")  # which float32 makes in a fixed order
    need = (*of_main, "dbias") if with_main else ("dbias",)
    results, plan = run(case, need, num_sms, schedule=schedule)
    ct.assert_backward(case, **results)
    heads = int(np.prod(case.bias[:-2]))
    tiles = 6 if case.dtype == "float32" else 4  # of 128 x 64 each, or of 128 x 128
    summed, left = case.batch * case.num_heads // heads, heads * tiles % num_sms
    if summed == 1 or left == 0:
        assert plan.run_time.score_splits == 1
    elif num_sms > 3 or left == 1:
        assert plan.run_time.score_splits > 1
        assert (f"of the last {left} tiles" in plan.reason) == (num_sms == 3)


@FEW
@given(num_sms=st.sampled_from((3, 132)), need=st.sampled_from((("dbias",), ("dk", "dbias"))), seed=st.integers(0, 99))
def test_tf32_split_of_float32(num_sms, need, seed):
    """With the precision of TF32."""
    case = case_of("float32", seed=seed)
    problem, arrays = inputs_of(case, precision="tf32", deterministic=True)
    out, lse = forward_by_oracle(problem, arrays)
    device = replace(DEVICE, num_sms=num_sms)
    plan = attention.plan_for(problem, BACKWARD, arrays | {"out": out}, device, None, need)
    assert "sm90/backward_bias.cu" in {kernel.source for kernel in plan.kernels}
    found = attention.backward(problem, arrays, out, lse, need=need, arch=device)
    attention.assert_tf32_split(problem, arrays, dict(zip(need, found, strict=True)))


@pytest.mark.parametrize("num_sms", [3, 132])
@pytest.mark.parametrize("kind", ["of none", "of all", "float32 of none"])
def test_neither_schedule_nor_memory_change_a_bit(kind, num_sms):
    case = case_of(kind)
    first, _ = run(case, ("dbias",), num_sms)
    for schedule in SCHEDULES[1:]:
        other, _ = run(case, ("dbias",), num_sms, schedule=schedule, fill=0x3F)
        assert bits(other) == bits(first)


@pytest.mark.parametrize("num_sms", [3, 132])
def test_what_is_hidden_may_be_no_number(num_sms):
    """Keys past a length, and tiles that nothing attends to: dbias is zero there, and finite elsewhere."""
    case = case_of("lengths", kv_lengths=(70, 0), bias_holes=False)
    problem, arrays = inputs_of(case)
    out, lse = forward_by_oracle(problem, arrays)
    for name in ("k", "v"):
        arrays[name][0, :, 70:] = np.nan
        arrays[name][1] = np.nan
    device = replace(DEVICE, num_sms=num_sms)
    (dbias,) = attention.backward(problem, arrays, out, lse, need=("dbias",), arch=device)
    assert np.isfinite(dbias).all()
    assert not dbias[..., 70:].any()
    assert dbias[..., :70].any()


def test_results_stay_inside_an_array_of_odd_rows():
    """Rows of dbias that begin at odd places, and end before a pair does, are stored element by element."""
    case = case_of("of each head", seqlen_k=151, bias=(4, 150, 151))
    arrays = case.arrays()
    wide = np.zeros((4, 150, 152), arrays["bias"].dtype)
    wide[..., :151] = arrays["bias"].reshape(4, 150, 151)
    arrays["bias"] = wide[..., :151]
    problem = attention.problem_of(case, arrays)
    out, lse = forward_by_oracle(problem, arrays)
    plan = attention.plan_for(problem, BACKWARD, arrays | {"out": out}, DEVICE, None, ("dbias",))
    assert "sm90/backward_bias.cu" in {kernel.source for kernel in plan.kernels}
    (dbias,) = attention.backward(problem, arrays, out, lse, need=("dbias",), arch=DEVICE)
    ct.assert_backward(case, dbias=dbias)
