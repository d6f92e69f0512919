"""Block masks in every kernel: the block-sparse index, the loops over it, and pairs that are looked up one by one."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm90.backward import Backward
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, inputs_of

pytestmark = pytest.mark.one_in(8)

FEW = settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])
schedules, SEEDS = st.sampled_from(SCHEDULES), st.integers(0, 2**16)

# None of these has more tiles than the warp that indexes them has lanes: `test_long_indices` has.
CASE = ct.Case(seqlen_q=200, seqlen_k=300, batch=2, num_heads=2, num_heads_kv=1, head_dim=24, block_mask=())
FEW_SMS = {arch: replace(DeviceSpec.for_arch(arch), num_sms=1) for arch in ("8.0", "9.0")}
WHOLE, SMALL = {"block_size": (128, 128)}, {"block_size": (16, 48)}
KERNELS: dict[str, tuple[str | DeviceSpec, dict[str, Any], dict[str, Any]]] = {
    "sm80": (FEW_SMS["8.0"], {"dtype": "float16", "kv_lengths": (300, 150), **WHOLE}, {}),
    "sm80 causal": (FEW_SMS["8.0"], {"dtype": "bfloat16", "causal": True, **SMALL}, {}),
    "sm80_dq": ("8.6", {"dtype": "float16", "layout": "bshd", **SMALL}, {"deterministic": True}),
    "sm80 float64": ("9.0", {"dtype": "float64", "window": (70, 40), "block_size": (64, 64)}, {}),
    "sm90": (FEW_SMS["9.0"], {"dtype": "bfloat16", "kv_lengths": (150, 300), "head_dim": 64, **WHOLE}, {}),
    "sm90 causal": ("9.0", {"dtype": "float16", "causal": True, "window": (90, None), **WHOLE}, {}),
    "sm90 terms": (FEW_SMS["9.0"], {"dtype": "float16", "softcap": 5.0, "mask": (200, 300), **SMALL}, {}),
    "sm90 deterministic": (FEW_SMS["9.0"], {"dtype": "float16", "causal": True, **WHOLE}, {"deterministic": True}),
    "sm80 bits": (FEW_SMS["9.0"], {"dtype": "bfloat16", **SMALL}, {"deterministic": True}),
    "sm90_fp32": (FEW_SMS["9.0"], {"causal": True, "block_size": (128, 64)}, {}),
}


def check(case, kernel, arch, options, schedule, arrays=None):
    """Both passes against the oracle, on `arrays` in place of those of the case."""
    problem, own = inputs_of(case, **options)
    arrays = own if arrays is None else arrays
    results = {"out": own["dout"], **{f"d{name}": own[name] for name in "qkv"}}
    for pass_ in PASSES_WITHOUT_TANGENTS:
        plan = attention.plan_for(problem, pass_, own | results, arch, None)
        sources = {kernel.source for kernel in plan.kernels}
        folder, _, suffix = kernel.split()[0].partition("_")
        if kernel == "sm80 bits" and pass_ is FORWARD:
            folder = "sm90"  # it is the order of dq that the kernels of 9.0 do not serve
        name = (
            f"{folder}/{pass_}.cu"
            if suffix == "" or (pass_, suffix) == (FORWARD, "dq")
            else (f"{folder}/{pass_}_{suffix}.cu")
        )
        assert {"helpers/block_index.cu", name} <= sources
    out, lse = attention.forward(problem, arrays, arch=arch, schedule=schedule)
    ct.assert_forward(case, out, lse)
    out, lse = forward_by_oracle(problem, own)
    ct.assert_backward(case, *attention.backward(problem, arrays, out, lse, arch=arch, schedule=schedule))


@pytest.mark.parametrize("kernel", KERNELS)
@FEW
@given(
    schedule=schedules,
    shape=st.sampled_from([(2, 2), (2,), (2, 1), ()]),
    kept=st.sampled_from([0.3, 0.7, 0.1, 1.0, 0.0]),
    seed=SEEDS,
)
def test_oracle(kernel, schedule, shape, kept, seed):
    arch, changes, options = KERNELS[kernel]
    case = replace(CASE, **changes, block_mask=shape, blocks_kept=kept, seed=seed)
    check(case, kernel, arch, options, schedule)


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules, kept=st.sampled_from([0.5, 0.3, 0.7, 1.0, 0.0]), heads=st.sampled_from([1, 2]), seed=SEEDS)
def test_blocks_share_the_last_tiles_with_many_steps(schedule, kept, heads, seed):
    """Of the last tile of keys, one block takes all steps where they are fewer than 14; otherwise several share it."""
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=2)
    case = replace(CASE, seqlen_q=1536 // heads, num_heads=heads, batch=3, head_dim=64, dtype="bfloat16")
    case = replace(case, block_size=(128, 128), block_mask=(heads,), blocks_kept=kept, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backward, "min_shared_steps", 14)
        plan = choose_plan(case.problem, device, BACKWARD)
        assert (plan.run_time.whole_tiles, plan.run_time.tail_splits) == (8, 2)
        check(case, "sm90", device, {}, schedule)


@pytest.mark.parametrize("kept", [0.5, 0.02])
def test_long_indices(kept):
    """More tiles than lanes: 63 of queries, 32 of keys and a smaller one."""
    case = ct.Case(
        seqlen_q=1000, seqlen_k=2060, head_dim=16, dtype="float16", block_mask=(), block_size=(16, 64), blocks_kept=kept
    )
    check(case, "sm80", "8.0", {}, SCHEDULES[0])
