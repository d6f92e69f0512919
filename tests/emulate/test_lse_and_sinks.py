"""Gradients with respect to lse, splits that are merged by lse, and sinks: in every kernel."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.spec import passes
from cuflash.spec.problem import make_problem
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, inputs_of
from tests.judging import assert_within

pytestmark = pytest.mark.one_in(16)

FEW = settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])
schedules = st.sampled_from(SCHEDULES)

# Long enough for the kernel that splits float32, and with rows that attend to no key.
SIZES: dict[str, Any] = {"seqlen_q": 150, "seqlen_k": 140, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
CASE = ct.Case(**SIZES, causal=True, dlse=True)
BACKWARD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sm80/backward": ("8.0", {"dtype": "float16"}, {}),
    "sm80/backward_dq": ("8.6", {"dtype": "bfloat16", "layout": "bshd"}, {"deterministic": True}),
    "sm90/backward": ("9.0", {"dtype": "bfloat16"}, {}),
    "sm90/backward in order": ("9.0", {"dtype": "float16", "kv_lengths": (100,)}, {"deterministic": True}),
    "sm90/backward_fp32": ("9.0", {"num_heads_kv": 1}, {}),
    "sm80/backward float32": ("8.0", {"strides": "flipped"}, {}),
    "sm80/backward float64": ("9.0", {"dtype": "float64", "ndim": 3}, {}),
}


@pytest.mark.parametrize("kernel", BACKWARD)
@FEW
@given(schedule=schedules, spread=st.sampled_from([1.0, 8.0]), seed=st.integers(0, 2**16))
def test_gradient_of_lse(kernel, schedule, spread, seed):
    arch, changes, options = BACKWARD[kernel]
    case = replace(CASE, **changes, score_spread=spread, seed=seed)
    problem, arrays = inputs_of(case, **options)
    plan = attention.plan_for(
        problem, passes.BACKWARD, arrays | {"out": arrays["dout"]} | results_of(arrays), arch, None
    )
    assert kernel.split()[0] + ".cu" in {kernel.source for kernel in plan.kernels}
    out, lse = forward_by_oracle(problem, arrays)
    arrays["dlse"][np.isneginf(lse)] = np.nan  # of rows that attend to no key it counts for nothing
    ct.assert_backward(case, *attention.backward(problem, arrays, out, lse, arch=arch, schedule=schedule))


def results_of(arrays):
    return {f"d{name}": arrays[name] for name in "qkv"}


@pytest.mark.parametrize("kernel", BACKWARD)
def test_lse_alone(kernel):
    """With dout = 0, dv is 0 and dq, dk are gradients of lse."""
    arch, changes, options = BACKWARD[kernel]
    problem, arrays = inputs_of(replace(CASE, **changes), **options)
    arrays["dout"][...] = 0
    out, lse = forward_by_oracle(problem, arrays)
    dq, dk, dv = attention.backward(problem, arrays, out, lse, arch=arch)
    assert_within(dict(zip(("dq", "dk", "dv"), (dq, dk, dv), strict=True)), ct.yardsticks(problem, arrays))
    assert not dv.any()
    assert dq.any()


@pytest.mark.parametrize(("dtype", "arch"), [("bfloat16", "9.0"), ("float32", "8.0"), ("float64", "9.0")])
def test_splits_merged_are_the_whole(dtype, arch):
    """Forward, and gradients by the weights of the splits."""
    case = replace(CASE, dtype=dtype, score_spread=4.0)
    arrays = case.arrays()
    inputs = ct.split_keys(case, np.array_split(np.random.default_rng(0).permutation(case.seqlen_k), 3))
    problems = [make_problem(replace(case.options, causal=False), **x) for x in inputs]
    results = [attention.forward(problem, x, arch=arch) for problem, x in zip(problems, inputs, strict=True)]
    outs, lses = zip(*results, strict=True)
    out, lse = cuflash.merge(outs, lses)
    ct.assert_forward(case, out, lse)
    douts, dlses = cuflash.merge_backward(arrays["dout"], outs, lses, out, lse, dlse=arrays["dlse"])
    dq = np.zeros(out.shape, lse.dtype)
    for problem, x, result, dout, dlse in zip(problems, inputs, results, douts, dlses, strict=True):
        dq += attention.backward(problem, x | {"dout": dout, "dlse": dlse}, *result, arch=arch)[0]
    yardstick = ct.yardsticks(case.problem, arrays)["dq"]
    assert ct.measure("dq", dq, yardstick.looser(3)).failure is None  # the splits are rounded too


# ---- sinks -----------------------------------------------------------------------------------------------------------

ONE_SPLIT = replace(DeviceSpec.for_arch("9.0"), num_sms=1)
FORWARD: dict[str, tuple[str | DeviceSpec, dict[str, Any]]] = {
    "sm80/forward": ("8.0", {"dtype": "float16", "strides": "flipped"}),
    "sm80/forward float32": ("8.0", {"head_dim": 40}),
    "sm80/forward float64": ("9.0", {"dtype": "float64", "softcap": 5.0}),
    "sm90/forward": ("9.0", {"dtype": "bfloat16"}),
    "sm90/forward scores": ("9.0", {"dtype": "float16", "bias": (150, 140), "layout": "bshd"}),
    "sm90/forward_fp32": ("9.0", {"num_heads_kv": 1}),
    "sm90/decode": (ONE_SPLIT, {"dtype": "bfloat16", "seqlen_q": 3, "seqlen_k": 600, "batch": 2}),
    "sm90/decode shared": ("9.0", {"dtype": "float16", "seqlen_q": 3, "seqlen_k": 700, "kv_lengths": (40,)}),
    "sm80/decode": ("8.0", {"dtype": "float32", "seqlen_q": 3, "seqlen_k": 700, "kv_lengths": (40,)}),
    "sm80/decode float64": ("9.0", {"dtype": "float64", "seqlen_q": 1, "seqlen_k": 700, "batch": 2}),
    "helpers/split_combine": (
        "9.0",
        {"dtype": "float16", "seqlen_q": 16, "seqlen_k": 700, "num_heads_kv": 1, "head_dim_v": 256},
    ),
}


@pytest.mark.parametrize("kernel", FORWARD)
@FEW
@given(schedule=schedules, spread=st.sampled_from([1.0, 8.0, 30.0]), seed=st.integers(0, 2**16))
def test_sinks(kernel, schedule, spread, seed):
    arch, changes = FORWARD[kernel]
    case = replace(CASE, **changes, sinks=True, score_spread=spread, seed=seed)
    problem, arrays = inputs_of(case)
    out = np.empty(problem.out_shape, arrays["q"].dtype)
    plan = attention.plan_for(problem, passes.FORWARD, arrays | {"out": out}, arch, None)
    assert kernel.split()[0] + ".cu" in {kernel.source for kernel in plan.kernels}
    assert ("decode" not in kernel) or len(plan.kernels) == 1
    results = attention.forward(problem, arrays, arch=arch, schedule=schedule)
    ct.assert_forward(case, *results)


@pytest.mark.parametrize("kernel", FORWARD)
def test_sinks_far_above_and_far_below(kernel):
    """One that outweighs all keys, one that counts for nothing, and none at all."""
    arch, changes = FORWARD[kernel]
    case = replace(CASE, **changes, sinks=True)
    problem, arrays = inputs_of(case)
    arrays["sinks"][...] = [20.0, -300.0, -np.inf, 0.0]
    results = attention.forward(problem, arrays, arch=arch)
    assert_within(dict(zip(("out", "lse"), results, strict=True)), ct.yardsticks(problem, arrays))


@pytest.mark.parametrize("kernel", BACKWARD)
@FEW
@given(schedule=schedules, dlse=st.booleans(), spread=st.sampled_from([1.0, 8.0]), seed=st.integers(0, 2**16))
def test_gradients_of_sinks(kernel, schedule, dlse, spread, seed):
    arch, changes, options = BACKWARD[kernel]
    case = replace(CASE, **changes, sinks=True, dlse=dlse, batch=1 if changes.get("ndim") else 2)
    case = replace(case, kv_lengths=case.kv_lengths and (100, 0), score_spread=spread, seed=seed)
    problem, arrays = inputs_of(case, **options)
    out, lse = forward_by_oracle(problem, arrays)
    gradients = attention.backward(problem, arrays, out, lse, arch=arch, schedule=schedule)
    assert len(gradients) == 4
    ct.assert_backward(case, *gradients)
