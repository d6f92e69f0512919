"""Arrays that TMA cannot read or write as they lie, by the kernels of compute capability 9.0 all the same."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.plan.sm90.tiles import BACKWARD_SM90_TILES, FORWARD_SM90_TILES
from cuflash.plan.sm90.wide_tiles import FORWARD_WIDE_SM90_TILES
from tests.emulate import attention
from tests.emulate.attention import problem_of
from tests.emulate.checks import FEW, FEW_SMS, all_results, schedules
from tests.judging import assert_oracle, bits

CASE = ct.Case(seqlen_q=200, seqlen_k=150, batch=2, num_heads=2, num_heads_kv=1, head_dim=13, dtype="bfloat16")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"layout": "bshd", "kv_lengths": (150, 70)},
    {"num_heads_kv": 2, "bias": (200, 152), "seqlen_k": 152, "softcap": 4.0},
    {**attention.packed_sizes((70, 130), (40, 100), rest=9), "num_heads": 4},
)


def rows_for(case):
    """The rows of the tables for a case."""
    largest = max(case.head_dim, case.head_dim_v or case.head_dim)
    forward = next(x for x in FORWARD_SM90_TILES if x.max_dim >= largest and x.serves == "any")
    backward = next(x for x in BACKWARD_SM90_TILES if x.max_dim >= largest)
    return {"forward_tiles": (forward,), "backward_tiles": (backward,)}


@FEW
@given(
    st.integers(1, 140),
    st.sampled_from([None, 1, 3, 24, 66]),
    st.sampled_from(["contiguous", "padded", "transposed"]),
    st.sampled_from(["float16", "bfloat16"]),
    st.sampled_from(OPTIONS),
    st.booleans(),
    schedules,
)
def test_any_head_dimensions_and_strides(head_dim, head_dim_v, strides, dtype, options, deterministic, schedule):
    sizes: dict[str, Any] = {"head_dim": head_dim, "head_dim_v": head_dim_v, "strides": strides, "dtype": dtype}
    case = replace(CASE, **sizes | options)
    assume(any(x % 8 for x in (head_dim, head_dim_v or head_dim)) or strides != "contiguous")
    results = all_results(case, **rows_for(case), arch=FEW_SMS, deterministic=deterministic, schedule=schedule)
    assert_oracle(case, results)


@pytest.mark.parametrize("head_dim", [8, 40])
def test_bits_of_what_lies_well(head_dim):
    """What is copied, or stored row by row, is the same numbers: at odd addresses as at those that TMA takes."""
    case = replace(CASE, head_dim=head_dim)
    (forward,), (backward,) = rows_for(case).values()

    def shifted(x):
        """An element past an address that is aligned."""
        buffer = attention.guarded(np.zeros(x.size + 8, x.dtype))
        inside = buffer[1 : 1 + x.size].reshape(x.shape)
        inside[...] = x
        return inside

    arrays = case.arrays()
    problem = problem_of(case, arrays)
    found = []
    for allocate in (attention.guarded, shifted):
        options: dict[str, Any] = {"arch": FEW_SMS, "allocate": allocate}
        out, lse = attention.forward(problem, arrays, tiles=(forward,), **options)
        found.append([out, lse, *attention.backward(problem, arrays, out, lse, tiles=(backward,), **options)])
    assert bits(found[0]) == bits(found[1])


@pytest.mark.parametrize("sizes", [{"head_dim": 259, "head_dim_v": 521}, {"head_dim": 264, "head_dim_v": 258}], ids=str)
def test_wide_heads(sizes):
    case = replace(CASE, seqlen_q=100, **sizes, causal=True)
    (tile,) = (x for x in FORWARD_WIDE_SM90_TILES if x.cluster == 1 and x.max_dim == 576)
    arrays = case.arrays()
    ct.assert_forward(case, *attention.forward(problem_of(case, arrays), arrays, tiles=(tile,), arch=FEW_SMS))
