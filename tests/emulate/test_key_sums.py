"""Gradients of bias, slopes, scale and softcap that the main backward kernel of compute capability 9.0 sums by keys."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec, backward
from cuflash.spec.outputs import GRADIENTS
from cuflash.spec.passes import BACKWARD
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, inputs_of

pytestmark = pytest.mark.one_in(24)

SUMS = ("dbias", "dalibi_slopes", "dscale", "dsoftcap")
# How blocks share the work: a tile of keys is one's, or the heads of a group are shared, or the last tiles' queries.
SPLITS = {"nothing": 1, "heads": 132, "queries": 7}


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What kernels are compiled for; shapes are drawn."""

    head_dim: int
    need: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    bias: tuple[bool, bool] | None = None  # whether it has an axis of batch entries, and of heads
    packed: bool = False
    deterministic: bool = False

    def __str__(self):
        on = [name for name in ("packed", "deterministic") if getattr(self, name)]
        return "-".join((f"d{self.head_dim}", *self.options, *on, *self.need))


CONFIGURATIONS = [
    Kernels(head_dim=64, need=("dv", "dscale")),
    Kernels(head_dim=64, need=("dq", "dk", "dalibi_slopes"), options={"alibi_slopes": True, "causal": True}),
    Kernels(head_dim=40, need=("dk", "dsoftcap"), options={"softcap": 1.0, "dtype": "float16"}),
    Kernels(head_dim=64, need=("dk", *SUMS), options={"softcap": 3.0, "alibi_slopes": True}, bias=(True, True)),
    Kernels(
        head_dim=64,
        need=("dq", "dv", "dbias", "dscale"),
        options={"dropout": 0.3, "dtype": "float16", "kv_lengths": True},
        bias=(True, False),
        deterministic=True,
    ),
    Kernels(
        head_dim=64,
        need=("dk", "dbias", "dalibi_slopes", "dscale"),
        options={"alibi_slopes": True, "block_mask": True},
        bias=(False, True),
    ),
    Kernels(
        head_dim=128,
        need=("dq", "dk", "dalibi_slopes", "dscale", "dsoftcap"),
        options={"softcap": 2.0, "alibi_slopes": True, "causal": True},
        packed=True,
        deterministic=True,
    ),
    Kernels(head_dim=128, need=("dk", "dv", "dbias"), options={"window": (40, 20), "dlse": True}, bias=(False, False)),
    Kernels(
        head_dim=128,
        need=("dk", "dbias", "dalibi_slopes", "dscale"),
        options={"alibi_slopes": True, "mask": True},
        bias=(True, True),
    ),
    Kernels(head_dim=96, need=("dv", "dalibi_slopes", "dscale"), options={"alibi_slopes": True}, packed=True),
    Kernels(head_dim=160, need=("dv", "dscale"), options={"softcap": 5.0}, deterministic=True),
    Kernels(
        head_dim=256,
        need=("dk", "dbias", "dalibi_slopes", "dscale"),
        options={"alibi_slopes": True, "causal": True},
        bias=(True, True),
    ),
]


@st.composite
def cases(draw, what):
    """Cases that these kernels serve: lengths around the ends of tiles, groups of heads, a bias that broadcasts."""
    num_heads_kv, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    batch, num_heads = draw(st.sampled_from([1, 2])), num_heads_kv * group
    seqlen_q, seqlen_k = draw(st.sampled_from([17, 63, 64, 130, 200])), draw(st.sampled_from([65, 128, 140, 257]))
    options: dict[str, Any] = dict(what.options)
    if what.packed:
        of_queries, of_keys = (tuple(draw(st.sampled_from([0, 1, 30, 64, 70])) for _ in range(3)) for _ in range(2))
        options |= attention.packed_sizes(of_queries, of_keys, rest=draw(st.sampled_from([1, 9])))
        batch, entries = 1, 3
    else:
        options |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        entries = batch
    if what.bias is not None:
        of_entry, of_head = what.bias
        options["bias"] = (batch if of_entry else 1, num_heads if of_head else 1, 1, options["seqlen_k"])
        options["bias_dtype"] = draw(st.sampled_from(["input", "softmax"]))
    if "alibi_slopes" in options:
        options["alibi_slopes"] = draw(st.sampled_from([(num_heads,), (entries, num_heads)]))
    if "kv_lengths" in options:
        options["kv_lengths"] = tuple(draw(st.integers(0, options["seqlen_k"])) for _ in range(batch))
    if "mask" in options:
        options["mask"] = (batch, draw(st.sampled_from([1, num_heads])), options["seqlen_q"], options["seqlen_k"])
    if "block_mask" in options:
        options |= {"block_mask": draw(st.sampled_from([(), (batch, num_heads)])), "block_size": (64, 48)}
    return ct.Case(
        **{"dtype": "bfloat16"} | options,
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        head_dim=what.head_dim,
        score_spread=draw(st.sampled_from([1.0, 8.0])),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.parametrize("what", CONFIGURATIONS, ids=str)
@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_sums_by_keys(what, data):
    """They are within the oracle rule, come from no kernel of their own, and are the same in any order of threads."""
    case, splits = data.draw(cases(what)), data.draw(st.sampled_from(sorted(SPLITS)))
    problem, arrays = inputs_of(case, deterministic=what.deterministic)
    out, lse = forward_by_oracle(problem, arrays, **case.random)
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=SPLITS[splits])
    with pytest.MonkeyPatch.context() as patch:
        if splits == "queries":
            for name in ("SPLIT_STEPS", "SUM_STEPS", "SUM_STEPS_PER_PARTIAL", "WAVES", "CAUSAL_WAVES"):
                patch.setattr(backward, name, 0)
        plan = attention.plan_for(problem, BACKWARD, arrays | {"out": out}, device, None, what.need)
        sources = [kernel.source for kernel in plan.kernels]
        assert "sm90/backward.cu" in sources
        assert "helpers/scores_reduce.cu" in sources
        assert "sm80/backward_scores.cu" not in sources
        event(f"{plan.run_time.group_splits > 1} {plan.run_time.tail_splits > 1} {plan.run_time.whole_tiles > 0}")
        runs = [
            dict(zip(what.need, attention.backward(problem, arrays, out, lse, need=what.need, arch=device,
                                                   schedule=schedule, **case.random), strict=True))
            for schedule in data.draw(st.permutations(SCHEDULES))[:2]
        ]  # fmt: skip
    ct.assert_backward(case, **runs[0])
    for name in set(what.need) & set(SUMS):
        np.testing.assert_array_equal(runs[0][name], runs[1][name], err_msg=name)


@pytest.mark.parametrize(
    ("changes", "need", "why"),
    [
        ({"bias": (2, 4, 70, 141), "seqlen_k": 141}, "dbias", "only what differs from key to key"),
        ({"bias": (2, 4, 1, 1)}, "dbias", "only what differs from key to key"),
        ({"softcap": 5.0, "head_dim": 160}, "dsoftcap", "where roles are split"),
        ({"softcap": 5.0, "head_dim": 160, "bias": (140,)}, "dbias", "where roles are split"),
        ({"softcap": 5.0, "bias": (2, 4, 70, 144), "seqlen_k": 144, "head_dim": 128}, "dsoftcap", "shared memory"),
    ],
)
def test_what_the_main_kernel_does_not_sum_has_a_kernel_of_its_own(changes, need, why):
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 70, "seqlen_k": 140, "head_dim": 64}
    case = ct.Case(**sizes | changes, dtype="bfloat16")
    problem, arrays = inputs_of(case)
    out, lse = forward_by_oracle(problem, arrays, **case.random)
    need = ("dk", need)
    plan = attention.plan_for(problem, BACKWARD, arrays | {"out": out}, DeviceSpec.for_arch("9.0"), None, need)
    (reason,) = [line for line in plan.reason.splitlines() if line.startswith(f"{need[1]}: not by sm90/backward: ")]
    assert why in reason
    assert "sm80/backward_scores.cu" in [kernel.source for kernel in plan.kernels]
    found = attention.backward(problem, arrays, out, lse, need=need)
    ct.assert_backward(case, **dict(zip(need, found, strict=True)))


def test_sums_do_not_depend_on_what_else_is_needed():
    case = ct.Case(
        batch=2, num_heads=4, num_heads_kv=2, seqlen_q=150, seqlen_k=140, head_dim=40, dtype="float16", causal=True,
        bias=(4, 1, 140), alibi_slopes=(4,), sinks=True, dlse=True,
    )  # fmt: skip
    problem, arrays = inputs_of(case)
    out, lse = forward_by_oracle(problem, arrays, **case.random)

    def run(*need):
        found = attention.backward(problem, arrays, out, lse, need=need, arch="9.0")
        return dict(zip(need, found, strict=True))

    every = run(*(name for name in GRADIENTS if name in ct.gradients_of(problem)))
    ct.assert_backward(case, **every)
    for need in (("dk", "dbias"), ("dv", "dalibi_slopes", "dscale"), ("dk", "dv", "dscale", "dsinks")):
        for name, x in run(*need).items():
            np.testing.assert_array_equal(x, every[name], err_msg=name)
