"""Gradients of bias, slopes, scale and softcap, and kernels that are asked for some of the gradients only."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES, EmulationError
from cuflash.plan import DeviceSpec
from cuflash.spec.outputs import GRADIENTS
from cuflash.spec.passes import BACKWARD
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, inputs_of

pytestmark = pytest.mark.one_in(8)

FEW = settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])
schedules = st.sampled_from(SCHEDULES)

SIZES: dict[str, Any] = {
    "batch": 2,
    "num_heads": 4,
    "num_heads_kv": 2,
    "seqlen_q": 150,
    "seqlen_k": 140,
    "head_dim": 40,
}
CASE = ct.Case(**SIZES, dtype="bfloat16", softcap=5.0, alibi_slopes=(4,), dlse=True)
ONE_SM = replace(DeviceSpec.for_arch("9.0"), num_sms=1)
# Rows of the table, devices that share what is summed or do not, and every axis that a bias may be without.
SCORES: dict[str, tuple[str | DeviceSpec, dict[str, Any]]] = {
    "a bias of each head": ("9.0", {"bias": (4, 150, 140), "causal": True, "sinks": True}),
    "of each batch entry": (ONE_SM, {"bias": (2, 1, 150, 140), "window": (30, 10), "strides": "flipped"}),
    "of all": ("8.6", {"bias": (2, 4, 150, 140), "dtype": "float16", "bias_dtype": "input", "strides": "transposed"}),
    "of keys": ("9.0", {"bias": (140,), "kv_lengths": (100, 0), "bias_holes": True, "dropout": 0.3}),
    "of queries": (ONE_SM, {"bias": (1, 4, 150, 1), "alibi_slopes": (2, 4), "causal": "top_left", "head_dim_v": 72}),
    "of nothing": ("9.0", {"bias": (1, 1, 1, 1), "mask": (2, 1, 150, 140), "layout": "bshd"}),
    "float32": ("9.0", {"bias": (4, 70, 140), "dtype": "float32", "seqlen_q": 70, "scale": -0.25}),
    "of blocks": ("9.0", {"bias": (2, 1, 150, 140), "block_mask": (4,), "block_size": (64, 80), "window": (90, None)}),
    "of whole blocks": (ONE_SM, {"bias": (1, 1, 150, 1), "block_mask": (2, 1), "kv_lengths": (140, 70)}),
    "float64": ("8.0", {"bias": (2, 1, 1, 140), "dtype": "float64"}),
    "packed": (ONE_SM, {"cu_seqlens_q": (0, 70, 70, 140), "cu_seqlens_k": (0, 40, 90, 140), "dropout": 0.3}),
    "packed float32": (
        "9.0",
        {
            "cu_seqlens_q": (0, 70, 70, 140),
            "cu_seqlens_k": (0, 60, 60, 125),
            "alibi_slopes": (3, 4),
            "causal": True,
            "dtype": "float32",
        },
    ),
}
NEED = ("dbias", "dalibi_slopes", "dscale", "dsoftcap")


@pytest.mark.parametrize("kind", SCORES)
@FEW
@given(schedule=schedules, spread=st.sampled_from([1.0, 8.0]), seed=st.integers(0, 2**16))
def test_gradients_of_what_makes_scores(kind, schedule, spread, seed):
    arch, changes = SCORES[kind]
    case = replace(CASE, **changes, score_spread=spread, seed=seed)
    problem, arrays = inputs_of(case)
    out, lse = forward_by_oracle(problem, arrays, **case.random)
    need = [name for name in NEED if name in ct.gradients_of(problem)]
    found = attention.backward(problem, arrays, out, lse, need=need, arch=arch, schedule=schedule, **case.random)
    ct.assert_backward(case, **dict(zip(need, found, strict=True)))


def test_scale_in_the_exponent():
    """The score is the product, and only the exponent is scaled: dscale of a problem without optional inputs."""
    case = ct.Case(**SIZES, dtype="float16", causal=True)
    problem, arrays = inputs_of(case)
    (dscale,) = attention.backward(problem, arrays, *forward_by_oracle(problem, arrays), need=("dscale",))
    assert dscale.shape == ()
    ct.assert_backward(case, dscale=dscale)


@pytest.mark.parametrize("bias", [(1, 1, 1, 1), (2, 4, 150, 140)])
def test_one_visible_pair(bias):
    """Tiles that nothing attends to are written all the same."""
    case = replace(CASE, bias=bias, window=(0, 0), kv_lengths=(0, 1))
    problem, arrays = inputs_of(case)
    out, lse = forward_by_oracle(problem, arrays)
    found = attention.backward(problem, arrays, out, lse, need=NEED)
    ct.assert_backward(case, **dict(zip(NEED, found, strict=True)))


@pytest.mark.parametrize("num_sms", [1, 132])
def test_blocks_that_share_a_sum_change_no_more_than_its_rounding(num_sms):
    case = replace(CASE, bias=(1, 1, 1, 1))
    problem, arrays = inputs_of(case)
    out, lse = forward_by_oracle(problem, arrays)
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms)
    plan = attention.plan_for(problem, BACKWARD, arrays | {"out": out}, device, None, NEED)
    assert (plan.run_time.score_splits > 1, plan.run_time.sums_splits > 1) == (num_sms > 1, num_sms > 1)
    found = attention.backward(problem, arrays, out, lse, need=NEED, arch=device)
    ct.assert_backward(case, **dict(zip(NEED, found, strict=True)))


# ---- Some of the gradients -------------------------------------------------------------------------------------------

PLAIN = ct.Case(**SIZES | {"batch": 1, "head_dim": 64}, causal=True)
SUBSETS = [
    ("sm80/backward", "8.0", {"dtype": "float16"}, False, ("dk",)),
    ("sm80/backward", "8.0", {"dtype": "float16", "softcap": 5.0}, False, ("dv",)),
    ("sm80/backward", "8.0", {"dtype": "float16"}, True, ("dk", "dv")),
    ("sm80/backward", "8.0", {"dtype": "float16"}, False, ("dq", "dv")),
    ("sm80/backward", "8.0", {"dtype": "bfloat16", "head_dim": 128}, False, ("dv",)),
    ("sm80/backward_dq", "9.0", {"dtype": "bfloat16"}, False, ("dq",)),
    ("sm90/backward", "9.0", {"dtype": "bfloat16"}, True, ("dk", "dv")),
    ("sm90/backward", "9.0", {"dtype": "bfloat16", "num_heads_kv": 4}, False, ("dv",)),
    ("sm90/backward", "9.0", {"dtype": "float16"}, True, ("dq", "dk")),
    ("sm90/backward", "9.0", {"dtype": "float16", "head_dim": 160, "num_heads_kv": 4}, False, ("dk",)),
    ("sm90/backward_fp32", "9.0", {"num_heads_kv": 1}, False, ("dq",)),
    ("sm90/backward_fp32", "9.0", {}, False, ("dk",)),
    ("sm90/backward_fp32", "9.0", {"num_heads_kv": 1}, True, ("dv",)),
    ("sm80/backward_dq", "9.0", {"dtype": "bfloat16", "block_mask": (4,), "block_size": (32, 48)}, False, ("dq",)),
    ("sm90/backward", "9.0", {"dtype": "bfloat16", "block_mask": (4,), "block_size": (32, 48)}, True, ("dk", "dv")),
    ("helpers/sinks", "9.0", {"sinks": True, "dtype": "bfloat16"}, False, ("dsinks",)),
]


@pytest.mark.parametrize(
    ("kernel", "arch", "changes", "deterministic", "need"), SUBSETS, ids=lambda x: str(x).replace(" ", "")
)
def test_only_what_is_needed(kernel, arch, changes, deterministic, need):
    case = replace(PLAIN, **changes)
    problem, arrays = inputs_of(case, deterministic=deterministic)
    out, lse = forward_by_oracle(problem, arrays)
    plan = attention.plan_for(problem, BACKWARD, arrays | {"out": out}, arch, None, need)
    sources = {spec.source for spec in plan.kernels}
    assert f"{kernel}.cu" in sources
    assert plan.need == need
    scratch = dict(plan.scratch)
    assert bool({"dq_accumulator", "dkv_partials"} & scratch.keys()) == ("helpers/backward_postprocess.cu" in sources)
    assert "dq" in need or ("dq_accumulator" not in scratch and "sm80/backward_dq.cu" not in sources)
    assert set(need) & {"dk", "dv"} or "dkv_partials" not in scratch
    found = attention.backward(problem, arrays, out, lse, need=need, arch=arch)
    ct.assert_backward(case, **dict(zip(need, found, strict=True)))


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
def test_gradients_do_not_depend_on_what_else_is_needed(arch):
    """Those that kernels of their own make; on compute capability 9.0 there are such without dk and dv."""
    case = replace(CASE, bias=(4, 1, 140), causal=True, sinks=True, dtype="float16")
    problem, arrays = inputs_of(case, deterministic=True)
    out, lse = forward_by_oracle(problem, arrays)
    names = GRADIENTS if arch == "8.0" else [name for name in GRADIENTS if name not in ("dk", "dv")]
    every = dict(zip(names, attention.backward(problem, arrays, out, lse, need=names, arch=arch), strict=True))
    ct.assert_backward(case, **every)
    for need in (("dbias",), ("dscale", "dsinks"), ("dalibi_slopes", "dsoftcap")):
        for name, x in zip(need, attention.backward(problem, arrays, out, lse, need=need, arch=arch), strict=True):
            np.testing.assert_array_equal(x, every[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scratch_arrays_are_aligned_for_those_that_follow_an_odd_one(dtype, monkeypatch):
    """Sums of gradients of scores are odd in number; without alignment the emulator says what a device would."""
    head_dim = 64 if dtype == "float32" else 136  # where dsoftcap has a kernel of its own
    case = ct.Case(seqlen_q=70, seqlen_k=90, head_dim=head_dim, num_heads=3, dtype=dtype, softcap=3.0)
    arrays = case.arrays()
    out, lse = attention.forward(case.problem, arrays)
    need = ("dq", "dk", "dv", "dsoftcap")
    gradients = attention.backward(case.problem, arrays, out, lse, need=need)
    ct.assert_backward(case, **dict(zip(need, gradients, strict=True)))
    monkeypatch.setattr("cuflash.plan.launch_plan.SCRATCH_ALIGNMENT", 4)
    with pytest.raises(EmulationError, match="misaligned reduction"):
        attention.backward(case.problem, arrays, out, lse, need=need)
