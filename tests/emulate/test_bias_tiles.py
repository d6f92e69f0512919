"""A bias, and a mask, that kernels of compute capability 9.0 see by tile: of pairs by TMA, and of keys. On the CPU.

What is compiled comes from a fixed list; hypothesis draws sizes, values and schedules.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.binding import PASSES
from cuflash.emulator import SCHEDULES, find_compiler
from cuflash.planning import DeviceSpec, choose_plan
from cuflash.planning.sm90.scored import bias_by
from cuflash.planning.sm90.tiles import BackwardSm90Tile, ForwardSm90Tile
from tests.emulate import attention

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: g++ is not on the path"),
    pytest.mark.one_in(4),
]
few = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))

# Shapes by name of size, dtype, and what the problem has beside the bias.
PAIRS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "heads": (("one", "heads", "q", "k"), {}),
    "batch, two heads a key head, causal": (("batch", "one", "q", "k"), {"causal": True, "num_heads_kv": 1}),
    "holes, soft cap, slopes": (
        ("one", "one", "q", "k"),
        {"bias_holes": True, "softcap": 5.0, "alibi_slopes": (2,), "dtype": "float16"},
    ),
    "lengths, window": (("batch", "heads", "q", "k"), {"kv_lengths": (1, 60), "window": (70, 20)}),
    "float32": (("one", "heads", "q", "k"), {"bias_dtype": "softmax"}),
    "float32, wide": (("batch", "heads", "q", "k"), {"bias_dtype": "softmax", "head_dim": 128, "dtype": "float16"}),
    "wide, scale below 0": (("one", "heads", "q", "k"), {"head_dim": 128, "scale": -0.2}),
}
KEYS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "batch": (("batch", "one", "one", "k"), {}),
    "heads, two heads a key head, causal": (("one", "heads", "one", "k"), {"causal": True, "num_heads_kv": 1}),
    "float32, holes, lengths": (
        ("batch", "heads", "one", "k"),
        {"bias_dtype": "softmax", "bias_holes": True, "kv_lengths": (0, 33), "dtype": "float16"},
    ),
    "wide, soft cap, slopes": (("k",), {"head_dim": 128, "softcap": 5.0, "alibi_slopes": (2,)}),
    "three hundred": (("batch", "one", "one", "k"), {"head_dim": 72, "head_dim_v": 136}),
}


# The same of a mask, beside a bias of pairs or without.
MASKS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "batch": (("batch", "one", "one", "k"), {}),
    "heads, bias, causal": (("one", "heads", "one", "k"), {"causal": True}),
    "lengths, bias": (("batch", "heads", "one", "k"), {"kv_lengths": (5, 60), "head_dim": 128}),
}


@st.composite
def cases(draw, shape, options, multiple):
    sizes = {"one": 1, "heads": 2, "batch": 2}
    sizes |= {"q": draw(st.integers(2, 150)), "k": multiple * draw(st.integers(1, 200 // multiple))}
    lengths = {name: tuple(min(n, sizes["k"]) for n in options[name]) for name in options if name == "kv_lengths"}
    usual = {"batch": 2, "num_heads": 2, "head_dim": 64, "dtype": "bfloat16", "bias_dtype": "input"}
    case = ct.Case(
        seqlen_q=sizes["q"],
        seqlen_k=sizes["k"],
        bias=tuple(sizes[name] for name in shape),
        score_spread=draw(st.sampled_from([1.0, 10.0])),
        seed=draw(st.integers(0, 2**16)),
        **usual | options | lengths,
    )
    return case, draw(st.sampled_from(SCHEDULES)), draw(st.sampled_from([1, 132]))


def check(case, schedule, num_sms, by):
    problem, arrays = attention.inputs_of(case)
    assert bias_by(problem) == by
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms)
    for pass_ in PASSES:
        tile = choose_plan(problem, device, pass_).tiles[0]
        assert isinstance(tile, ForwardSm90Tile | BackwardSm90Tile)
        assert (tile.bias_of_pairs > 0) == (by == "pairs")
        assert tile.bias_of_keys == (by == "keys")
        assert tile.mask_of_keys == (case.mask is not None)
    how = {"arch": device, "schedule": schedule}
    ct.assert_forward(case, *attention.forward(problem, arrays, **how))
    out, lse = attention.forward_by_oracle(problem, arrays)
    gradients = attention.backward(problem, arrays, out, lse, **how)
    ct.assert_backward(case, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


@pytest.mark.parametrize("name", PAIRS)
@given(data=st.data())
@few
def test_pairs(name, data):
    shape, options = PAIRS[name]
    multiple = 4 if options.get("bias_dtype") == "softmax" else 8
    case, schedule, num_sms = data.draw(cases(shape, options, multiple))
    check(case, schedule, num_sms, "pairs")


@pytest.mark.parametrize("name", KEYS)
@given(data=st.data())
@few
def test_keys(name, data):
    case, schedule, num_sms = data.draw(cases(*KEYS[name], 1))
    check(case, schedule, num_sms, "keys")


@pytest.mark.parametrize("name", MASKS)
@given(data=st.data())
@few
def test_masks(name, data):
    shape, options = MASKS[name]
    case, schedule, num_sms = data.draw(cases(("one", "heads", "q", "k"), options, 8))
    sizes = {"one": 1, "heads": 2, "batch": 2, "k": case.seqlen_k}
    with_bias = "bias" in name
    case = replace(case, mask=tuple(sizes[x] for x in shape), bias=case.bias if with_bias else None)
    check(case, schedule, num_sms, "pairs" if with_bias else "nothing")


@given(case=cases(("one", "heads", "q", "k"), {"head_dim": 64}, 1))
@few
def test_rows_that_are_no_multiples_of_16_bytes_are_looked_up(case):
    case, schedule, _ = case
    case = replace(case, seqlen_k=61, bias=(*case.bias[:3], 61))
    problem, arrays = attention.inputs_of(case)
    assert bias_by(problem) == "elements"
    ct.assert_forward(case, *attention.forward(problem, arrays, schedule=schedule))
