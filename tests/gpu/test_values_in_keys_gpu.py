"""Values that are the first columns of the keys, on the device."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

import cuflash
import cuflash.testing as ct
from cuflash.plan.key_splits import DECODE_ROWS
from cuflash.spec.passes import FORWARD
from tests import wide_heads
from tests.gpu.planned import is_sm90, plan_of

pytestmark = pytest.mark.gpu

CASE = ct.Case(seqlen_q=1, seqlen_k=3000, num_heads=16, num_heads_kv=1, head_dim=576, head_dim_v=512, dtype="bfloat16")


@pytest.fixture(scope="module")
def cupy():
    cupy = pytest.importorskip("cupy")
    if not is_sm90():
        pytest.skip("for compute capability 9.0")
    return cupy


def loads_once(attn, q, k, v, **optional):
    return bool(dict(plan_of(FORWARD, attn, q, k, v, **optional).kernels[0].defines)["CUFLASH_V_IN_K"])


def check(cupy, case):
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(**case.keywords)
    is_one_block = case.seqlen_q * case.num_heads // case.num_heads_kv <= DECODE_ROWS
    assert loads_once(attn, *ct.qkv(arrays), **ct.optional(arrays)) == is_one_block
    ct.assert_forward(case, *attn.forward(*ct.qkv(arrays), **ct.optional(arrays)))


@pytest.mark.parametrize("head_dim", wide_heads.DIMS)
def test_any_problem(cupy, head_dim):
    @settings(max_examples=4)
    @given(wide_heads.decode_cases(4000, dims=(head_dim,)))
    def every_case(case):
        check(cupy, replace(case, head_dim_v=min(case.head_dim, case.head_dim_v), v_in_k=True))

    every_case()


def test_sums_of_many_columns(cupy):
    """Large scores: lse was outside the oracle rule where one sum was cut off 36 times."""
    few = replace(CASE, seqlen_q=8, seqlen_k=1142, num_heads=12, num_heads_kv=2, head_dim_v=64, v_in_k=True)
    check(cupy, replace(few, dtype="float16", kv_lengths=(115,), sinks=True, score_spread=3.0, seed=23))


def test_calls_that_differ_in_where_v_is(cupy):
    """Shapes and strides, by which a call remembers its launch, are the same here."""
    within = replace(CASE, v_in_k=True)
    arrays = within.arrays(cupy.asarray)
    q, k, v = ct.qkv(arrays)
    other = cupy.empty_like(k)[..., :512]
    other[...] = v
    attn = cuflash.FlashAttention()
    assert loads_once(attn, q, k, v) and not loads_once(attn, q, k, other)
    for _ in range(2):
        ct.assert_forward(within, *attn.forward(q, k, v))
        other[...] = v[..., ::-1]
        turned, _ = attn.forward(q, k, other)
        ct.assert_forward(within, cupy.ascontiguousarray(turned[..., ::-1]))
