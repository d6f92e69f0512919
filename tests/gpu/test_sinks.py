"""Sinks on the device against the oracle, in every kernel of the forward pass, and their gradients."""

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32", "float64")
NEED = ("dq", "dk", "dv", "dsinks")


def case_of(seqlen_q, seqlen_k, **options):
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
    return ct.Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, sinks=True, **sizes | options)


def run(cupy, case, *, deterministic=False, **results):
    """out, lse and the gradients of a case."""
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
    inputs = ct.qkv(arrays)
    out, lse = attn.forward(*inputs, **ct.optional(arrays))
    keywords = ct.optional_backward(arrays) | results
    gradients = attn.backward(arrays["dout"], *inputs, out, lse, **keywords, need=NEED)
    return out, lse, gradients


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_many_rows_are_repeatable(cupy, dtype):
    case = case_of(1000, 70, batch=7, dtype=dtype)
    _, _, first = run(cupy, case)
    ct.assert_backward(case, *first)
    softmax_dtype = np.float64 if dtype == "float64" else np.float32
    for _ in range(3):
        frame = cupy.asarray(np.full(9, np.nan, softmax_dtype))
        _, _, again = run(cupy, case, dsinks=frame[1:8:2])
        assert again.dsinks.data.ptr == frame[1:].data.ptr
        np.testing.assert_array_equal(ct.to_numpy(frame[1:8:2]), ct.to_numpy(first.dsinks))
        assert cupy.isnan(frame[::2]).all()


def test_a_sink_of_minus_infinity_is_none(cupy):
    case = case_of(113, 203, dtype="float16", causal=True)
    arrays = case.arrays(cupy.asarray)
    inputs, attn = ct.qkv(arrays), cuflash.FlashAttention(causal=True)
    with_sinks = attn.forward(*inputs, sinks=cupy.full_like(arrays["sinks"], -np.inf))
    for x, y in zip(with_sinks, attn.forward(*inputs), strict=True):
        np.testing.assert_array_equal(ct.to_numpy(x), ct.to_numpy(y))
