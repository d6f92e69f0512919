"""Masks of pairs, and cut blocks of block masks, that kernels of compute capability 9.0 read as bits. On the CPU.

What is compiled comes from a fixed list; hypothesis draws sizes, values and schedules.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.plan.sm90.scored import ScoredTile
from cuflash.spec.passes import FORWARD, PASSES_WITHOUT_TANGENTS
from tests.emulate import attention

pytestmark = pytest.mark.one_in(8)
few = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))

# Shapes of the mask by name of size, and what else the problem has.
CASES: dict[str, tuple[tuple[str, ...] | None, dict[str, Any]]] = {
    "pairs": (("one", "one", "q", "k"), {}),
    "every head, causal": (("batch", "heads", "q", "k"), {"causal": True, "num_heads_kv": 1}),
    "heads, lengths, window": (("one", "heads", "q", "k"), {"kv_lengths": (1, 150), "window": (90, 20)}),
    "batch, soft cap, slopes": (("batch", "one", "q", "k"), {"softcap": 5.0, "alibi_slopes": (2,), "dtype": "float16"}),
    "per-pair bias": (("one", "one", "q", "k"), {"bias": ("one", "heads", "q", "k")}),
    "bias of keys": (("one", "one", "q", "k"), {"bias": ("batch", "one", "one", "k")}),
    "queries": (("batch", "heads", "q", "one"), {}),
    "wide, scale below 0": (("one", "one", "q", "k"), {"head_dim": 128, "scale": -0.2, "causal": True}),
    "wider": (("one", "one", "q", "k"), {"head_dim": 136, "head_dim_v": 192}),
    "widest": (("one", "heads", "q", "k"), {"head_dim": 256, "dtype": "float16"}),
    "dropout, in order": (("one", "one", "q", "k"), {"dropout": 0.3}),
    "cut blocks": (None, {"block_mask": (2,), "block_size": (16, 48), "causal": True}),
    "cut blocks, keys": (("batch", "one", "one", "k"), {"block_mask": (2, 1), "block_size": (48, 64)}),
    "cut blocks, lengths": (
        ("one", "one", "q", "k"),
        {"block_mask": (), "block_size": (32, 32), "kv_lengths": (99, 7)},
    ),
}


@st.composite
def cases(draw, shape, options):
    sizes = {"one": 1, "heads": 2, "batch": 2}
    sizes |= {"q": draw(st.integers(2, 300)), "k": 8 * draw(st.integers(1, 40))}

    def sized(names):
        return None if names is None else tuple(sizes[name] for name in names)

    options = dict(options)
    if "kv_lengths" in options:
        options["kv_lengths"] = tuple(min(n, sizes["k"]) for n in options["kv_lengths"])
    case = ct.Case(
        seqlen_q=sizes["q"],
        seqlen_k=sizes["k"],
        mask=sized(shape),
        bias=sized(options.pop("bias", None)),
        score_spread=draw(st.sampled_from([1.0, 10.0])),
        seed=draw(st.integers(0, 2**16)),
        **{"batch": 2, "num_heads": 2, "head_dim": 64, "dtype": "bfloat16", "bias_dtype": "input"} | options,
    )
    return case, draw(st.sampled_from(SCHEDULES)), draw(st.sampled_from([1, 132]))


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
@few
def test_oracle(name, data):
    case, schedule, num_sms = data.draw(cases(*CASES[name]))
    problem, arrays = attention.inputs_of(case, deterministic="in order" in name)
    how: dict[str, Any] = {"arch": replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms), "schedule": schedule}
    how |= case.random
    results = {"out": arrays["dout"], **{f"d{name}": arrays[name] for name in "qkv"}}
    for pass_ in PASSES_WITHOUT_TANGENTS:
        plan = attention.plan_for(problem, pass_, arrays | results, how["arch"], None)
        assert isinstance(plan.tiles[0], ScoredTile) and plan.tiles[0].mask_by_bits
        listed = "helpers/block_index.cu" in {kernel.source for kernel in plan.kernels}
        assert listed == (pass_ is FORWARD or not problem.deterministic)
    seen = attention.with_true_as(data.draw(st.sampled_from([1, 2, 128, 255])), arrays)
    ct.assert_forward(case, *attention.forward(problem, seen, **how))
    out, lse = attention.forward_by_oracle(problem, arrays, **case.random)
    gradients = attention.backward(problem, seen, out, lse, **how)
    ct.assert_backward(case, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
