"""Scores that are large, by the kernels: weights that sum to one, equal weights of equal scores, and hidden NaN."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuflash.emulator import find_compiler
from tests.emulate.attention import on_kernels
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

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: g++ is not on the path"),
    pytest.mark.one_in(12),
]

KERNELS = [
    ("9.0", "bfloat16"),
    ("9.0", "float16"),
    ("9.0", "float32"),
    ("8.0", "bfloat16"),
    ("8.0", "float32"),
    ("8.0", "float64"),
    ("7.5", "float16"),
]
FEW = settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(("arch", "dtype"), KERNELS)
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("of", ["queries", "keys"])
def test_masked_rows(arch, dtype, masked, of):
    check_sums_of_weights(Large(dtype=dtype, bias=masked, of=of), on_kernels(arch))


@pytest.mark.parametrize(("arch", "dtype"), KERNELS)
@FEW
@given(large=larges)
def test_sums_of_weights(arch, dtype, large):
    check_sums_of_weights(replace(large, dtype=dtype), on_kernels(arch))


@pytest.mark.parametrize("head_dim", [128, 256, 288])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_each_schedule_of_the_backward_pass(dtype, head_dim, deterministic, spread):
    options = {"deterministic": deterministic}
    bias = -1e9 if spread == 1 else None
    large = Large(dtype=dtype, head_dim=head_dim, bias=bias, spread=spread, options=options)
    check_sums_of_weights(large, on_kernels("9.0"))


@pytest.mark.parametrize(("arch", "dtype"), KERNELS)
@pytest.mark.parametrize("sink", [1e3, *MASKED])
def test_sinks(arch, dtype, sink):
    check_sinks(dtype, sink, on_kernels(arch))


@pytest.mark.parametrize(("arch", "dtype"), KERNELS)
@pytest.mark.parametrize("bias", [1e9, *MASKED])
def test_the_mean_of_keys_with_one_bias(arch, dtype, bias):
    check_mean(dtype, bias, on_kernels(arch))


@pytest.mark.parametrize(("arch", "dtype"), KERNELS)
@FEW
@given(bias=st.sampled_from([-3.0, *MASKED]), seqlen_k=st.integers(1, 400), seed=st.integers(0, 2**16))
def test_equal_scores_have_equal_weights(arch, dtype, bias, seqlen_k, seed):
    check_equal_scores(dtype, bias, seqlen_k, seed, on_kernels(arch))


@pytest.mark.parametrize(("arch", "dtype"), KERNELS)
def test_ends_of_range(arch, dtype):
    check_ends_of_range(dtype, on_kernels(arch))


SHAPES = [(1, 1, 1, 200), (1, 2, 1, 200), (1, 1, 70, 200)]


@pytest.mark.parametrize(("arch", "dtype"), KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nan_of_hidden_keys(arch, dtype, shape):
    check_hidden_nan(dtype, shape, 1, on_kernels(arch))
