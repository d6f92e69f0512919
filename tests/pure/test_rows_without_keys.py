"""Rows without keys have no weights: an lse of -inf says so, whatever scores a function or a bias has there."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from tests.compiled import INSTRUCTION_SETS, NUMPY, way_taken
from tests.ranks import Whole, judge, reduce_weights, results_of
from tests.sampling import examples
from tests.scored import Scored

every_way = pytest.mark.parametrize(
    "way", [way for _, way in (*INSTRUCTION_SETS, NUMPY)], ids=[name for name, _ in (*INSTRUCTION_SETS, NUMPY)]
)
ROWS = [5, 6, 17]  # that attend to no key


@every_way
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("seqlen_k, bias", [(24, (2, 20, 24)), (24, (20, 1)), (300, (20, 300))], ids=str)
def test_biases_of_rows_that_see_no_key(seqlen_k, bias, value, dtype, way):
    """They are -inf for the forward pass. Gradients are the same with another bias in these rows."""
    case = ct.Case(
        seqlen_q=20, seqlen_k=seqlen_k, num_heads=2, head_dim=16, dtype=dtype, bias=bias, sinks=True, dlse=True
    )
    arrays = case.arrays()
    arrays["sinks"][...] = -np.inf
    arrays["bias"][..., ROWS, :] = -np.inf
    attn = cuflash.FlashAttention(**case.keywords)
    need = ("dq", "dk", "dv", "dbias", "dscale", "dsinks")
    inputs, optional = ct.qkv(arrays), ct.optional(arrays)
    with way_taken(way):
        out, lse = attn.forward(*inputs, **optional)
        assert np.isneginf(lse[..., ROWS]).all()
        expected = attn.backward(arrays["dout"], *inputs, out, lse, need=need, **ct.optional_backward(arrays))
        arrays["bias"][..., ROWS, :] = value
        found = attn.backward(arrays["dout"], *inputs, out, lse, need=need, **ct.optional_backward(arrays))
    for name, x, y in zip(need, found, expected, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)
    assert not found[0][..., ROWS, :].any()


@every_way
@pytest.mark.parametrize("seqlen_k", [9, 24])
def test_small_heads(seqlen_k, way):
    """NaN reaches no gradient of these rows, which are computed next to others; dk is 0 times NaN."""
    q, dout = np.random.default_rng(0).standard_normal((2, 3, 20, 8)).astype(np.float32)
    k = np.random.default_rng(1).standard_normal((3, seqlen_k, 8)).astype(np.float32)
    attn = cuflash.FlashAttention()
    with way_taken(way):
        out, lse = attn.forward(q, k, k)
        lse[:, ROWS], out[:, ROWS] = -np.inf, 0
        expected = attn.backward(dout, q, k, k, out, lse)
        q[:, ROWS] = np.nan
        dq, _, dv = attn.backward(dout, q, k, k, out, lse)
    assert not dq[:, ROWS].any()
    np.testing.assert_array_equal(dq, expected[0])
    np.testing.assert_array_equal(dv, expected[2])


@every_way
def test_rows_in_front_of_a_span(way):
    """Ranks compute them for the sake of dropout, with queries of zeros: this function makes their scores NaN."""

    def entropic(s, i, j):
        return s * cuflash.log(s * s)

    normal = np.random.default_rng(0).standard_normal
    arrays = {name: normal((1, 1, 40, 8)).astype(np.float32) for name in ("q", "k", "v", "dout")}
    case = Scored(cuflash.FlashAttention(score=entropic, dropout=0.5), arrays, {"seed": 1, "offset": 2}, "entropic")
    split = cd.Split([((0, 3), (38, 40)), ((3, 38),)])
    with way_taken(way):
        judge(case, results_of(case, split, split))


@settings(max_examples=examples(60))
@given(
    ranks=st.integers(1, 3),
    seqlen_k=st.integers(0, 3),
    sinks=st.lists(st.sampled_from([5432.1, -1e4, -128.0, 127.0, 0.5, -np.inf]), min_size=2, max_size=2),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_sinks_of_any_size_over_ranks(ranks, seqlen_k, sinks, dtype):
    """A sink makes lse large where all ranks together have no key, too: row max and row sum are then of no key."""
    case = ct.Case(seqlen_q=5, seqlen_k=seqlen_k, num_heads=2, head_dim=8, dtype=dtype, sinks=True, dlse=True)
    arrays = case.arrays()
    arrays["sinks"] = np.array(sinks, dtype)
    whole = Whole(case.problem, arrays, case.keywords, {})
    splits = cd.zigzag(5, ranks), cd.contiguous(seqlen_k, ranks)
    found = results_of(whole, *splits)
    judge(whole, found)
    of_weights = {name: arrays[name] for name in ("q", "k", "sinks")} | {"lse": found["lse"]}
    found = results_of(whole._replace(arrays=of_weights), *splits, call=reduce_weights, need=())
    assert (found["indices"][..., seqlen_k:] == -1).all() and not found["key_weights"][..., seqlen_k:].any()
