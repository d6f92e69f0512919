"""A bias, and a mask, that kernels of compute capability 9.0 load by tile: per-pair by TMA, and of keys. On the CPU.

What is compiled comes from a fixed list; hypothesis draws sizes, values and schedules.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm90.scored import ScoredTile, bias_by
from cuflash.plan.sm90.tiles import BACKWARD_FLOAT32_SM90_TILES, FORWARD_FLOAT32_SM90_TILES
from cuflash.plan.tiles import serves_dims
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS
from tests.emulate import attention
from tests.judging import bits

pytestmark = pytest.mark.one_in(16)
few = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))

FLOAT32 = {"dtype": "float32", "bias_dtype": "softmax"}
# Shapes by name of size, dtype, and what else the problem has.
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
    "float32 arrays": (("one", "heads", "q", "k"), FLOAT32 | {"head_dim": 32}),
    "float32 arrays, wide, causal": (("batch", "one", "q", "k"), FLOAT32 | {"head_dim": 128, "causal": True}),
    "float32 arrays, holes, soft cap, slopes, lengths": (
        ("batch", "heads", "q", "k"),
        FLOAT32 | {"bias_holes": True, "softcap": 5.0, "alibi_slopes": (2,), "kv_lengths": (1, 60)},
    ),
    "float32 arrays, window, dropout": (
        ("one", "one", "q", "k"),
        FLOAT32 | {"window": (70, 20), "dropout": 0.1, "num_heads_kv": 1},
    ),
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
    "float32 arrays, holes, window": (
        ("batch", "heads", "one", "k"),
        FLOAT32 | {"bias_holes": True, "window": (70, 20), "num_heads_kv": 1},
    ),
    "float32 arrays, wide, soft cap, slopes": (
        ("k",),
        FLOAT32 | {"head_dim": 72, "head_dim_v": 128, "softcap": 5.0, "alibi_slopes": (2,), "causal": True},
    ),
}


# The same of a mask, with a per-pair bias or without.
MASKS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "batch": (("batch", "one", "one", "k"), {}),
    "heads, bias, causal": (("one", "heads", "one", "k"), {"causal": True}),
    "lengths, bias": (("batch", "heads", "one", "k"), {"kv_lengths": (5, 60), "head_dim": 128}),
    "float32 arrays, bias": (("batch", "one", "one", "k"), FLOAT32 | {"head_dim": 32}),
    "float32 arrays, wide, window": (("one", "heads", "one", "k"), FLOAT32 | {"head_dim": 128, "window": (70, 20)}),
    "float32 arrays, lengths, bias, slopes": (
        ("batch", "heads", "one", "k"),
        FLOAT32 | {"kv_lengths": (5, 60), "alibi_slopes": (2,), "num_heads_kv": 1},
    ),
}


def multiple_of(options):
    """Keys in 16 bytes of a bias."""
    return 4 if options.get("bias_dtype") == "softmax" else 8


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


def tiles_of(problem, pass_):
    """The row for float32, which the planner takes for longer sequences only; None: the planner chooses."""
    if problem.dtype != "float32":
        return None
    table = {FORWARD: FORWARD_FLOAT32_SM90_TILES, BACKWARD: BACKWARD_FLOAT32_SM90_TILES}[pass_]
    return (next(row for row in table if row.serves == "any" and serves_dims(row, problem)),)


def check(case, schedule, num_sms, by):
    problem, arrays = attention.inputs_of(case)
    assert bias_by(problem) == by
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms)
    tiles = {pass_: tiles_of(problem, pass_) for pass_ in PASSES_WITHOUT_TANGENTS}
    for pass_ in PASSES_WITHOUT_TANGENTS:
        tile = choose_plan(problem, device, pass_, tiles=tiles[pass_]).tiles[0]
        assert isinstance(tile, ScoredTile)
        # Wide terms leave no space for a bias in the backward pass.
        looks_up = pass_ is BACKWARD and tile.element_bytes == 4 and tile.max_dim == 128
        assert (tile.bias_of_pairs > 0) == (by == "pairs" and not looks_up)
        assert tile.bias_of_keys == (by == "keys")
        assert tile.mask_of_keys == (case.mask is not None)
    how = {"arch": device, "schedule": schedule, **case.random}
    ct.assert_forward(case, *attention.forward(problem, arrays, tiles=tiles[FORWARD], **how))
    out, lse = attention.forward_by_oracle(problem, arrays, **case.random)
    gradients = attention.backward(problem, arrays, out, lse, tiles=tiles[BACKWARD], **how)
    ct.assert_backward(case, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


@pytest.mark.parametrize("name", PAIRS)
@given(data=st.data())
@few
def test_pairs(name, data):
    shape, options = PAIRS[name]
    case, schedule, num_sms = data.draw(cases(shape, options, multiple_of(options)))
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
    case, schedule, num_sms = data.draw(cases(("one", "heads", "q", "k"), options, multiple_of(options)))
    sizes = {"one": 1, "heads": 2, "batch": 2, "k": case.seqlen_k}
    with_bias = "bias" in name
    case = replace(case, mask=tuple(sizes[x] for x in shape), bias=case.bias if with_bias else None)
    check(case, schedule, num_sms, "pairs" if with_bias else "nothing")


@given(data=st.data(), value=st.sampled_from([np.nan, np.inf, -np.inf]))
@few
def test_hidden_keys_of_float32_may_hold_anything(data, value):
    """What a mask of keys hides has no weight, whatever its score is: it changes no bit."""
    case, schedule, num_sms = data.draw(cases(("one",), FLOAT32, 1))
    case = replace(case, bias=None, mask=(2, 1, 1, case.seqlen_k))
    problem, arrays = attention.inputs_of(case)
    how = {"arch": replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms), "schedule": schedule}
    first = attention.forward(problem, arrays, tiles=tiles_of(problem, FORWARD), **how)
    arrays["k"][~np.broadcast_to(arrays["mask"][:, :, 0], arrays["k"].shape[:3])] = value
    again = attention.forward(problem, arrays, tiles=tiles_of(problem, FORWARD), **how)
    assert bits(first) == bits(again)


@given(case=cases(("one", "heads", "q", "k"), {"head_dim": 64}, 1))
@few
def test_rows_that_are_no_multiples_of_16_bytes_are_looked_up(case):
    case, schedule, _ = case
    case = replace(case, seqlen_k=61, bias=(*case.bias[:3], 61))
    problem, arrays = attention.inputs_of(case)
    assert bias_by(problem) == "elements"
    ct.assert_forward(case, *attention.forward(problem, arrays, schedule=schedule))
