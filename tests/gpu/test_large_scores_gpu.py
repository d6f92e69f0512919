"""Scores that are large, on the device: weights that sum to one, equal weights of equal scores, and hidden NaN."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from tests.large_scores import (
    MASKED,
    Large,
    check_ends_of_range,
    check_equal_scores,
    check_hidden_nan,
    check_mean,
    check_sinks,
    check_sums_of_weights,
    larges,
)
from tests.sampling import examples

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16", "float32", "float64")
SOME = settings(max_examples=examples(200))


def backend(options, arrays, need):
    """Both passes on the device, results in host memory."""
    cupy = pytest.importorskip("cupy")
    attn: Any = cuflash.FlashAttention()
    attn.options = options
    own = {name: cupy.asarray(x) for name, x in arrays.items()}
    dout = own.pop("dout")
    inputs = [own.pop(name) for name in "qkv"]
    out, lse = attn.forward(*inputs, **own)
    gradients = attn.backward(dout, *inputs, out, lse, **own, need=need) if need else ()
    return cupy.asnumpy(out), cupy.asnumpy(lse), dict(zip(need, map(cupy.asnumpy, gradients), strict=True))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 288])
def test_masked_rows(dtype, masked, of, head_dim):
    for deterministic in (False, True):
        options = {"deterministic": deterministic}
        check_sums_of_weights(Large(dtype=dtype, bias=masked, of=of, head_dim=head_dim, options=options), backend)


@pytest.mark.parametrize("dtype", DTYPES)
@SOME
@given(large=larges)
def test_sums_of_weights(dtype, large):
    check_sums_of_weights(replace(large, dtype=dtype), backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", [1e3, *MASKED])
def test_sinks(dtype, sink):
    check_sinks(dtype, sink, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [1e9, *MASKED])
def test_the_mean_of_keys_with_one_bias(dtype, bias):
    check_mean(dtype, bias, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@SOME
@given(bias=st.sampled_from([-3.0, *MASKED]), seqlen_k=st.integers(1, 3000), seed=st.integers(0, 2**16))
def test_equal_scores_have_equal_weights(dtype, bias, seqlen_k, seed):
    check_equal_scores(dtype, bias, seqlen_k, seed, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 200), (1, 2, 1, 3000), (1, 1, 70, 200), (1, 2, 300, 1000)], ids=str)
def test_nan_of_hidden_keys(dtype, shape):
    check_hidden_nan(dtype, shape, 1, backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ends_of_range(dtype):
    check_ends_of_range(dtype, backend)
