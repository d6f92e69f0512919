"""Arrays that TMA cannot read or write as they lie, on the device."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.spec.passes import FORWARD
from tests.gpu.planned import is_sm90, plan_of
from tests.sampling import examples

pytestmark = pytest.mark.gpu

# Pairs enough for copies to pay.
SIZES: dict[str, Any] = {"seqlen_q": 1030, "seqlen_k": 2100, "batch": 2, "num_heads": 8, "num_heads_kv": 4}


@pytest.fixture(scope="module")
def cupy():
    cupy = pytest.importorskip("cupy")
    if not is_sm90():
        pytest.skip("for compute capability 9.0")
    return cupy


@settings(max_examples=examples(80))
@given(
    st.sampled_from([1, 2, 3, 7, 8, 13, 60, 64, 66, 125, 130, 255]),
    st.sampled_from([None, 3, 64, 70]),
    st.sampled_from(["contiguous", "padded", "transposed", "flipped"]),
    st.sampled_from(["float16", "bfloat16"]),
    st.sampled_from([{}, {"causal": True}, {"layout": "bshd", "kv_lengths": (2100, 700)}]),
    st.integers(0, 1),
)
def test_any_head_dimensions_strides_and_addresses(cupy, head_dim, head_dim_v, strides, dtype, options, offset):
    case = ct.Case(**SIZES, head_dim=head_dim, head_dim_v=head_dim_v, strides=strides, dtype=dtype, **options)

    def shifted(x):
        """So many elements past an address that is aligned."""
        inside = cupy.empty(x.size + offset, x.dtype)[offset:].reshape(x.shape)
        inside[...] = cupy.asarray(x)
        return inside

    arrays = case.arrays(shifted)
    attn = cuflash.FlashAttention(**case.keywords)
    optional = ct.optional(arrays)
    assert plan_of(FORWARD, attn, *ct.qkv(arrays), **optional).kernels[-1].source == "sm90/forward.cu"
    out, lse = attn.forward(*ct.qkv(arrays), **optional)
    ct.assert_forward(case, out, lse)
    ct.assert_backward(case, *attn.backward(arrays["dout"], *ct.qkv(arrays), out, lse, **optional))


@pytest.mark.parametrize("head_dim", [3, 258])
def test_calls_of_other_lengths(cupy, head_dim):
    """A copy is as long as the keys of its call."""
    attn = cuflash.FlashAttention()
    for seqlen_k in (2100, 2101, 2047):
        case = ct.Case(**SIZES | {"seqlen_k": seqlen_k}, head_dim=head_dim, dtype="bfloat16")
        arrays = case.arrays(cupy.asarray)
        ct.assert_forward(case, *attn.forward(*ct.qkv(arrays)))
