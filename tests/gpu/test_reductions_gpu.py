"""Reductions of the attention weights of CuPy arrays: by the oracle rule, against NumPy, and in any layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from tests.reductions import attention_of, gradient_problem, inputs_of, judge, judge_gradients, lse_of
from tests.sampling import examples

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

FEATURES = (*ct.FEATURES, "sinks", "block_mask", "packed", "lengths", "float8")


def on_device(x):
    return (
        cuflash.fp8(cupy.asarray(x.view(np.uint8)), x.dtype) if x.dtype.name.startswith("float8") else cupy.asarray(x)
    )


@settings(max_examples=examples(200), deadline=None)
@given(
    case=ct.cases(features=FEATURES, max_seqlen=513, max_scores=2**15, max_head_dim=256),
    count=st.sampled_from((1, 7, 16, 33, 64)),
)
def test_reductions_keep_the_oracle_rule(case, count):
    attn, arrays = attention_of(case), inputs_of(case)
    lse = lse_of(attn, arrays)
    weights = np.random.default_rng(case.seed).standard_normal(lse.shape).astype(lse.dtype)
    given_arrays = {name: on_device(x) for name, x in (arrays | {"lse": lse}).items()}
    inputs = [given_arrays.pop(name) for name in ("q", "k", "lse")]
    sums = attn.column_sums(*inputs, cupy.asarray(weights), **given_arrays)
    largest = attn.column_max(*inputs, **given_arrays)
    indices, of_top = attn.top_keys(*inputs, count, **given_arrays)
    judge(case, weights, sums.get(), largest.get(), (indices.get(), of_top.get()))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_keep_the_oracle_rule(dtype):
    case, (dsums, q, k, lse, weights), need = gradient_problem(dtype)
    attn = attention_of(case)
    found = attn.column_sums_backward(*map(cupy.asarray, (dsums, q, k, lse, weights)), need=need)
    judge_gradients(case, weights, dsums, {name: x.get() for name, x in found._asdict().items()})


def test_sums_are_the_same_run_after_run():
    q, k = cupy.random.default_rng(0).standard_normal((2, 3, 8, 700, 64), dtype=np.float32).astype(np.float16)
    attn = cuflash.FlashAttention(causal=True)
    lse = attn.forward(q, k, None).lse
    first, *others = (attn.column_sums(q, k, lse).get() for _ in range(4))
    for x in others:
        np.testing.assert_array_equal(x, first)


def test_pages_are_refused_by_name():
    pool, table = cupy.zeros((4, 2, 16, 64), np.float16), cupy.zeros((1, 4), np.int32)
    q, lse, lengths = (
        cupy.zeros((1, 2, 3, 64), np.float16),
        cupy.zeros((1, 2, 3), np.float32),
        cupy.full(1, 64, np.int32),
    )
    with pytest.raises(NotImplementedError, match=r"^block_table: got one for column_sums on the GPU, expected None"):
        cuflash.FlashAttention().column_sums(q, pool, lse, block_table=table, kv_lengths=lengths)
