"""Scores that are large, on every backend: weights that sum to one, equal weights of equal scores, and hidden NaN."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from tests.backends import DEVICE, on_backends
from tests.large_scores import (
    MASKED,
    Large,
    check_ends_of_range,
    check_equal_scores,
    check_hidden_nan,
    check_large_products,
    check_mean,
    check_sinks,
    check_sums_of_weights,
    larges,
)

DTYPES = ("bfloat16", "float16", "float32", "float64")
BACKENDS = {
    "core": DTYPES,
    "fallback": DTYPES,
    "emulated 9.0": ("bfloat16", "float16", "float32"),
    "emulated 8.0": ("bfloat16", "float32", "float64"),
    "emulated 7.5": ("float16",),
    "device": DTYPES,
}
every_backend = on_backends(BACKENDS)
HEAD_DIMS = (64, 128, 256, 288)


@on_backends(BACKENDS, device=12)
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("of", ["queries", "keys"])
def test_masked_rows(backend, dtype, masked, of):
    sizes = itertools.product(HEAD_DIMS, (False, True)) if backend.name == DEVICE else [(32, False)]
    for head_dim, deterministic in sizes:
        options = {"deterministic": deterministic}
        check_sums_of_weights(Large(dtype=dtype, bias=masked, of=of, head_dim=head_dim, options=options), backend)


@every_backend
def test_sums_of_weights(backend, dtype):
    backend.draw(200, lambda large: check_sums_of_weights(replace(large, dtype=dtype), backend), large=larges)


@on_backends({"emulated 9.0": ("bfloat16", "float16")})
@pytest.mark.parametrize("head_dim", HEAD_DIMS[1:])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_each_schedule_of_the_backward_pass(backend, dtype, head_dim, deterministic, spread):
    options = {"deterministic": deterministic}
    bias = -1e9 if spread == 1 else None
    check_sums_of_weights(Large(dtype=dtype, head_dim=head_dim, bias=bias, spread=spread, options=options), backend)


@every_backend
@pytest.mark.parametrize("sink", [1e3, *MASKED])
def test_sinks(backend, dtype, sink):
    check_sinks(dtype, sink, backend)


@every_backend
@pytest.mark.parametrize("bias", [1e9, *MASKED])
def test_the_mean_of_keys_with_one_bias(backend, dtype, bias):
    check_mean(dtype, bias, backend)


@every_backend
def test_equal_scores_have_equal_weights(backend, dtype):
    backend.draw(
        200,
        lambda bias, seqlen_k, seed: check_equal_scores(dtype, bias, seqlen_k, seed, backend),
        bias=st.sampled_from([-3.0, *MASKED]),
        seqlen_k=st.integers(1, 3000 if backend.name == DEVICE else 400),
        seed=st.integers(0, 2**16),
    )


@every_backend
def test_large_products(backend, dtype):
    """Row maxima beyond what exponents may fold (kLargestFused of kernels/common/softmax/softmax.cuh)."""
    options = [{"scale": 0.3}, {"causal": True}, {"scale": 0.3, "window": (100, 20)}, {"scale": 1.7}]
    backend.draw(
        30,
        lambda seqlen_q, options, seed: check_large_products(dtype, seqlen_q, options, seed, backend),
        seqlen_q=st.sampled_from([70, 1, 140]),
        options=st.sampled_from(options),
        seed=st.integers(0, 2**16),
    )


@every_backend
@pytest.mark.parametrize("shape", [(1, 1, 1, 200), (1, 2, 1, 200), (1, 1, 70, 200)], ids=str)
def test_nan_of_hidden_keys(backend, dtype, shape):
    check_hidden_nan(dtype, shape, 1, backend)


@on_backends({"device": DTYPES})
@pytest.mark.parametrize("shape", [(1, 2, 1, 3000), (1, 2, 300, 1000)], ids=str)
def test_nan_of_many_hidden_keys(backend, dtype, shape):
    check_hidden_nan(dtype, shape, 1, backend)


@every_backend
def test_ends_of_range(backend, dtype):
    check_ends_of_range(dtype, backend)
