"""Packed sequences of different lengths: each is what it would be alone, in the oracle and on the CPU."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given

import cuflash
import cuflash.testing as ct
from cuflash.cpu.packed import sequences
from cuflash.spec.problem import make_problem
from cuflash.testing import reference

FEATURES = ("causal", "window", "softcap", "scale", "alibi_slopes", "gqa", "head_dim_v", "sinks", "dlse", "packed")
packed = ct.cases(features=FEATURES, ndims=(3,), max_scores=2**14, min_seqlen=0).filter(lambda c: c.cu_seqlens_q)
SMALL = ct.Case(
    seqlen_q=9, seqlen_k=11, head_dim=4, num_heads=2, cu_seqlens_q=(0, 3, 3, 8), cu_seqlens_k=(0, 4, 6, 10), causal=True
)


def alone(problem, arrays, one):
    """The problem and the arrays of one sequence by itself."""
    own = {name: one.of_rows(arrays[name], name) for name in ("q", "k", "v", "dout", "dlse") if name in arrays}
    return own | one.optional_inputs_of({name: arrays[name] for name in ("sinks", "alibi_slopes") if name in arrays})


@given(packed)
def test_the_oracle_is_that_of_each_sequence(case):
    """Against the oracle of plain problems, with the options that the caller gave."""
    arrays = case.arrays()
    keywords = ct.optional(arrays)
    out, lse = reference.forward(case.problem, *ct.qkv(arrays), **keywords)
    need = ct.gradients_of(case.problem)
    operands = [arrays[name] for name in ("dout", "q", "k", "v")]
    gradients = reference.backward(case.problem, *operands, **ct.optional_backward(arrays), need=need)
    sums = dict(zip(need, gradients, strict=True))
    results = {name: sums.pop(name) for name in ("dq", "dk", "dv")} | {"out": out, "lse": lse}
    by_sequence = {name: [np.zeros(x.shape[-1:])] for name, x in sums.items()}
    rows, keys = np.ones(case.seqlen_q, bool), np.ones(case.seqlen_k, bool)
    for one in sequences(case.problem, arrays["cu_seqlens_q"], arrays["cu_seqlens_k"]):
        own = alone(case.problem, arrays, one)
        problem = make_problem(case.options, *ct.qkv(own), **ct.optional(own))
        expected = dict(zip(("out", "lse"), reference.forward(problem, **_without(own, "dout", "dlse")), strict=True))
        expected |= zip(need, reference.backward(problem, **own, need=need), strict=True)
        for name in sums:
            by_sequence[name].append(expected.pop(name))
        for name, x in expected.items():
            np.testing.assert_array_equal(one.of_rows(results[name], name), x)
        rows[one.rows] = keys[one.keys] = False
    for name, x in sums.items():
        total = by_sequence[name][1:] if x.ndim == 2 else np.sum(by_sequence[name], axis=0)
        np.testing.assert_allclose(x, np.reshape(total, x.shape), rtol=1e-11, atol=1e-11)
    left = {name: keys if name in ("dk", "dv") else rows for name in results}
    for name, x in results.items():
        axis = 0 if x.ndim == 3 and case.layout == "bshd" else 1
        assert np.all(np.compress(left[name], x, axis=axis) == (-np.inf if name == "lse" else 0))


def _without(arrays, *names):
    return {name: x for name, x in arrays.items() if name not in names}


STARTS = np.array([0, 3, 8], np.int32)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k: got None"),
    ({"cu_seqlens_q": None}, ValueError, "cu_seqlens_q: got None"),
    ({"cu_seqlens_q": STARTS.astype(np.uint64)}, TypeError, "cu_seqlens_q: got dtype uint64, expected int32 or int64"),
    ({"cu_seqlens_q": np.array([0, 2**32, 8])}, ValueError, "cu_seqlens_q: got an entry 4294967296, expected integers"),
    ({"cu_seqlens_q": 3}, ValueError, "cu_seqlens_q: got shape (), expected (sequences + 1,)"),
    ({"cu_seqlens_k": STARTS[:0]}, ValueError, "cu_seqlens_k: got shape (0,)"),
    ({"cu_seqlens_k": STARTS[None]}, ValueError, "cu_seqlens_k: got shape (1, 3)"),
    ({"cu_seqlens_k": STARTS[:2]}, ValueError, "cu_seqlens_k: got shape (2,), expected (3,)"),
    ({"cu_seqlens_q": STARTS + 1}, ValueError, "cu_seqlens_q: got a first entry 1, expected 0"),
    ({"cu_seqlens_q": np.array([0, 4, 2], np.int32)}, ValueError, "cu_seqlens_q: got an entry 2 after 4"),
    ({"cu_seqlens_k": np.array([0, 4, 9], np.int32)}, ValueError, "cu_seqlens_k: got a last entry 9, expected at most"),
    ({"cu_seqlens_q": [0, 3, 8]}, TypeError, "cu_seqlens_q: got list"),
    ({"alibi_slopes": np.ones((3, 2), np.float32)}, ValueError, "(batch, num_heads) = (2, 2)"),
    ({"bias": np.zeros((8, 8), np.float32)}, NotImplementedError, "bias: got it together with cu_seqlens_q"),
    ({"mask": np.zeros((8, 8), bool)}, NotImplementedError, "mask: got it together with cu_seqlens_q"),
    ({"block_mask": np.ones((1, 1), bool)}, NotImplementedError, "block_mask: got it together with cu_seqlens_q"),
    ({"block_table": np.zeros((2, 1))}, NotImplementedError, "block_table: got it together with cu_seqlens_q"),
    ({"kv_lengths": STARTS[1:]}, NotImplementedError, "kv_lengths: got it together with cu_seqlens_q"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "error", "words"), BAD, ids=[f"{next(iter(changed))}{i}" for i, (changed, *_) in enumerate(BAD)]
)
@pytest.mark.parametrize("method", ["forward", "plan", "compile"])
def test_bad_inputs(changed, error, words, method):
    q = np.ones((2, 8, 4), np.float32)
    keywords = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS} | changed
    with pytest.raises(error) as raised:
        getattr(cuflash.FlashAttention(), method)(q, q, q, **keywords)
    assert words in str(raised.value)


@pytest.mark.parametrize("shape", [(8, 4), (1, 2, 8, 4)])
def test_packed_arrays_have_three_axes(shape):
    q = np.ones(shape, np.float32)
    with pytest.raises(ValueError, match=r"q: got a .-D array, expected a 3-D one"):
        cuflash.attention(q, q, q, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS)
