"""Soft caps on compute capability 9.0: from arguments near 0, where a short series serves, to caps that are reached."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from tests.emulate.checks import FEW_SMS, all_results
from tests.judging import assert_oracle, bits

pytestmark = pytest.mark.one_in(8)

# The softcap is so many standard deviations of the scores; series end at arguments of 0.215, 0.375 and 0.707.
DEVIATIONS = (0.05, 0.5, 2.0, 4.0, 5.0, 6.0, 8.0, 11.0, 15.0, 20.0, 500.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window": (70, 40)},
    "lengths": {"kv_lengths": (150, 77)},
    "slopes": {"alibi_slopes": (2,)},
    "bias": {"bias": (150,)},
    "per-pair bias": {"bias": (140, 150), "bias_dtype": "input"},
    "dropout": {"dropout": 0.3},
}


@st.composite
def cases(draw: st.DrawFn, options: str) -> ct.Case:
    spread = draw(st.sampled_from([0.1, 1.0, 8.0, 60.0]))
    return ct.Case(
        batch=2,
        seqlen_q=140,
        seqlen_k=150,
        num_heads=2,
        num_heads_kv=1,
        head_dim=draw(st.sampled_from([16, 64, 72, 128])),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        softcap=draw(st.sampled_from(DEVIATIONS)) * spread,
        score_spread=spread,
        scale=draw(st.sampled_from([None, -0.3])),
        seed=draw(st.integers(0, 2**16)),
        **OPTIONS[options],
    )


@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_range_of_arguments(options, data):
    case = data.draw(cases(options))
    schedule = data.draw(st.sampled_from(SCHEDULES))
    assert_oracle(case, all_results(case, arch="9.0", schedule=schedule))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deviations", [2.0, 20.0])
def test_shared_tiles_and_turns(head_dim, deviations):
    """Blocks that stay, or share tiles, and sums of dq in order: the same bits in every schedule."""
    case = ct.Case(seqlen_q=330, seqlen_k=300, num_heads=2, head_dim=head_dim, dtype="float16", softcap=deviations)
    results = [all_results(case, arch=FEW_SMS, deterministic=True, schedule=schedule) for schedule in SCHEDULES[:2]]
    assert_oracle(case, results[0])
    assert bits(results[0]) == bits(results[1])
