"""Reductions of the attention weights of CuPy arrays: by the oracle rule, against NumPy, and in any layout."""

import numpy as np
import pytest

import cuflash
from tests.reductions import attention_of, gradient_problem, judge_gradients

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


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
