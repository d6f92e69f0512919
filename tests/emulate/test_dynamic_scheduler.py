"""Blocks that claim tiles of queries, the longest ones first: every option of the forward kernel of Hopper."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import passes
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm90 import scored
from cuflash.spec.passes import FORWARD
from tests.sampling import examples

DEVICE = replace(DeviceSpec.for_arch("9.0"), num_sms=2)
OPTIONS = {
    "64": {"head_dim": 64},
    "128": {"head_dim": 128, "head_dim_v": 104, "alibi_slopes": (2, 6), "dtype": "float16"},
    "256": {"head_dim": 200, "softcap": 20.0, "sinks": True},
    "dropout": {"head_dim": 72, "dropout": 0.2},
    "blocks": {"head_dim": 32, "block_mask": (2, 6), "block_size": (128, 128), "kv_lengths": (300, 512)},
}


@pytest.fixture(autouse=True)
def from_few_keys_on(monkeypatch):
    monkeypatch.setattr(scored, "CLAIMED_KEYS", 1)
    monkeypatch.setattr(scored, "CLAIMED_KEYS_64", 1)


def case_of(seqlen_q, seqlen_k, options):
    sizes = {"batch": 2, "num_heads": 6, "num_heads_kv": 3, "dtype": "bfloat16", "causal": True}
    if "kv_lengths" in options:
        options = options | {"kv_lengths": tuple(min(seqlen_k, n) for n in options["kv_lengths"])}
    return ct.Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **(sizes | options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_claimed_tiles_keep_the_oracle_rule(options):
    @settings(max_examples=examples(60))
    @given(seqlen_q=st.integers(130, 500), seqlen_k=st.integers(1, 512))  # fewer are decode, which has another kernel
    def check(seqlen_q, seqlen_k):
        case = case_of(seqlen_q, seqlen_k, options)
        plan = choose_plan(case.problem, DEVICE, FORWARD)
        assert ("CUFLASH_DYNAMIC_TILES", 1) in plan.kernels[-1].defines
        arrays = {name: x for name, x in case.arrays().items() if name != "dout"}
        results = passes.forward(case.problem, arrays, arch=DEVICE, **case.random)
        ct.assert_forward(case, *results)

    check()


def test_bits_are_those_of_tiles_that_blocks_know_beforehand(monkeypatch):
    case = case_of(450, 500, OPTIONS["64"])
    arrays = {name: x for name, x in case.arrays().items() if name != "dout"}
    claimed = passes.forward(case.problem, arrays, arch=DEVICE)
    monkeypatch.setattr(scored, "CLAIMED_KEYS_64", 1 << 40)
    assert ("CUFLASH_DYNAMIC_TILES", 0) in choose_plan(case.problem, DEVICE, FORWARD).kernels[-1].defines
    for x, y in zip(claimed, passes.forward(case.problem, arrays, arch=DEVICE), strict=True):
        np.testing.assert_array_equal(x, y)
