"""The public interface on NumPy arrays: what it computes, what it takes and gives back."""

import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.cpu.backend import CpuPlan
from cuflash.spec.inputs import NAMES, OptionalArrays
from cuflash.spec.keywords import checked
from cuflash.spec.outputs import GRADIENTS, PassArrays
from tests.sampling import examples

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


# ---- what it computes ------------------------------------------------------------------------------------------------


def test_plain_matrices_are_the_formula():
    q, k, v = normal(5, 4), normal(7, 4), normal(7, 3)
    np.testing.assert_allclose(cuflash.attention(q, k, v), softmax(q @ k.T / 2) @ v, rtol=1e-12)


@settings(max_examples=examples(150))
@given(
    ct.cases(max_seqlen=65, max_head_dim=40, max_scores=2**13, features=(*ct.FEATURES, *ct.MORE_FEATURES, "lengths"))
)
def test_forward_and_backward_obey_the_oracle(case):
    attn = cuflash.FlashAttention(**case.keywords)
    arrays = case.arrays()
    q, k, v, dout, optional = arrays["q"], arrays["k"], arrays["v"], arrays["dout"], ct.optional(arrays)
    out, lse = attn.forward(q, k, v, **optional)
    ct.assert_forward(case, out, lse)
    need = ct.gradients_of(case.problem)
    gradients = attn.backward(dout, q, k, v, out, lse, **ct.optional_backward(arrays), need=need)
    ct.assert_backward(case, **gradients._asdict())
    np.testing.assert_array_equal(cuflash.attention(q, k, v, **case.keywords, **optional), out)


def test_order_of_scale_softcap_slopes_bias_and_masks():
    q, k, v = normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 3)
    slopes, bias, mask = np.array([0.3, 0.1]), normal(3, 5), normal(2, 3, 5) > -0.5
    mask[..., 2] = True  # every row attends to something
    i, j, d = np.arange(3)[:, None], np.arange(5), 5 - 3
    scores = 1.5 * q @ k.swapaxes(1, 2)
    scores = 2 * np.tanh(scores / 2)
    scores = scores - slopes[:, None, None] * np.abs(i + d - j)
    scores = scores + bias
    scores[~(mask & (j <= i + d) & (j >= i + d - 2) & (j < 4))] = -np.inf
    out = cuflash.attention(
        q, k, v, scale=1.5, softcap=2, alibi_slopes=slopes, bias=bias, mask=mask, causal=True, window=(2, None),
        kv_lengths=np.array([4]),
    )  # fmt: skip
    np.testing.assert_allclose(out, softmax(scores) @ v, rtol=1e-12)


def test_mask_and_lengths_do_not_move_the_diagonal():
    q = k = v = np.eye(4)
    _, lse = cuflash.FlashAttention(causal=True, scale=0).forward(q, k, v, kv_lengths=np.array([2]))
    np.testing.assert_allclose(np.exp(lse), [1, 2, 2, 2])


def test_lengths_move_the_diagonal_if_causal_says_so():
    """In a longer cache the last query attends to the last key that exists, and queries before the first to nothing."""
    q, k, v, dout = normal(5, 2, 3, 4), normal(5, 1, 9, 4), normal(5, 1, 9, 4, seed=1), normal(5, 2, 3, 4, seed=2)
    lengths, slopes = np.array([9, 5, 3, 2, 0]), np.array([0.5, 0.1])
    for window in (None, (2, None)):
        attn: Any = cuflash.FlashAttention(causal="lengths", window=window)
        causal: Any = cuflash.FlashAttention(causal=True, window=window)
        out, lse = attn.forward(q, k, v, kv_lengths=lengths, alibi_slopes=slopes)
        dq, dk, dv = attn.backward(dout, q, k, v, out, lse, kv_lengths=lengths, alibi_slopes=slopes)
        for b, n in enumerate(lengths):
            own = q[b], k[b, :, :n], v[b, :, :n]
            expected = causal.forward(*own, alibi_slopes=slopes)
            np.testing.assert_allclose(out[b], expected.out, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(lse[b], expected.lse, rtol=1e-12)
            gradients = causal.backward(dout[b], *own, *expected, alibi_slopes=slopes)
            for x, y in zip((dq[b], dk[b, :, :n], dv[b, :, :n]), gradients, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-14)
            assert not dk[b, :, n:].any() and not dv[b, :, n:].any()


def test_a_diagonal_that_follows_lengths_needs_them():
    q = normal(2, 5, 4)
    attn: Any = cuflash.FlashAttention(causal="lengths")
    for call in (attn.forward, attn.plan, attn.compile, lambda *x: attn.backward(q, *x, q, q[..., 0])):
        with pytest.raises(
            ValueError, match=r"^kv_lengths: got None, expected lengths of shape .* causal='lengths' needs"
        ):
            call(q, q, q)


def test_packed_sequences_have_no_keys_but_those_that_exist():
    q, starts = normal(2, 10, 4), np.array([0, 3, 10])
    both = cuflash.FlashAttention(causal="lengths"), cuflash.FlashAttention(causal=True)
    a, b = (attn.forward(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts // 2) for attn in both)
    np.testing.assert_array_equal(a.out, b.out)


@pytest.mark.parametrize("where", ["streamed", "ranks"])
def test_splits_of_keys_have_no_diagonal_that_follows_lengths(where):
    q, lengths = normal(1, 2, 5, 4), np.array([3])
    with pytest.raises(
        NotImplementedError, match=r"^causal: got 'lengths', which goes neither with ranks nor with str"
    ):
        if where == "streamed":
            cuflash.FlashAttention(causal="lengths").forward(q, *cuflash.streamed(q, q), kv_lengths=lengths)
        else:
            cd.ContextParallel(cd.threads(1)[0], split="contiguous", causal="lengths")  # type: ignore[call-overload]


def test_lse_is_the_natural_logarithm():
    q, k = normal(3, 4), normal(5, 4)
    lse = cuflash.FlashAttention(scale=1).forward(q, k, k).lse
    np.testing.assert_allclose(lse, np.log(np.exp(q @ k.T).sum(axis=1)))


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (0, 0, 0, 4)])
@pytest.mark.parametrize("keys", [0, 5])
def test_axes_of_length_zero(shape, keys, causal):
    batch, heads, seqlen_q, head_dim = shape
    q, k, v = np.ones(shape), np.ones((batch, heads, keys, head_dim)), np.ones((batch, heads, keys, 2))
    attn = cuflash.FlashAttention(causal=causal)
    out, lse = attn.forward(q, k, v)
    assert out.shape == (batch, heads, seqlen_q, 2)
    assert lse.shape == (batch, heads, seqlen_q)
    gradients = attn.backward(np.ones_like(out), q, k, v, out, lse)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    if keys == 0:
        assert not out.any()
        assert (lse == -np.inf).all()
        assert not gradients.dq.any()
    if seqlen_q == 0:
        assert not gradients.dk.any()
        assert not gradients.dv.any()


def test_sinks_are_one_more_key_without_a_value():
    q, k, v, dout, sinks = normal(2, 5, 4), normal(2, 7, 4), normal(2, 7, 3), normal(2, 5, 3), np.array([0.7, -1.1])
    attn, mask = cuflash.FlashAttention(scale=1), normal(5, 7) > 0
    mask[3] = False
    out, lse = attn.forward(q, k, v, mask=mask, sinks=sinks)
    # The same by a key that only the bias gives a score.
    k8, v8 = (np.concatenate([x, np.zeros_like(x[:, :1])], axis=1) for x in (k, v))
    bias = np.zeros((2, 5, 8))
    bias[:, :, 7] = sinks[:, None]
    mask8 = np.concatenate([mask, np.ones((5, 1), bool)], axis=1)
    expected = attn.forward(q, k8, v8, mask=mask8, bias=bias)
    np.testing.assert_allclose(out, expected.out, rtol=1e-12)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-12)
    np.testing.assert_array_equal(out[:, 3], 0)
    np.testing.assert_allclose(lse[:, 3], sinks)
    gradients = attn.backward(dout, q, k, v, out, lse, mask=mask, sinks=sinks)
    others = attn.backward(dout, q, k8, v8, *expected, mask=mask8, bias=bias)
    np.testing.assert_allclose(gradients.dq, others.dq, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradients.dk, others.dk[:, :7], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradients.dv, others.dv[:, :7], rtol=1e-10, atol=1e-12)


@given(st.sets(st.sampled_from(GRADIENTS)), st.permutations(GRADIENTS), st.sets(st.sampled_from(GRADIENTS)))
def test_exactly_the_gradients_that_are_needed(need, order, given_too):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 5, 4))
    optional: OptionalArrays = {"bias": rng.standard_normal((5, 1)), "sinks": np.zeros(2), "alibi_slopes": np.ones(2)}
    attn = cuflash.FlashAttention(softcap=2.0)
    out, lse = attn.forward(q, q, q, **optional)
    every = attn.backward(out, q, q, q, out, lse, **optional, need=GRADIENTS)
    assert every._fields == GRADIENTS
    assert [x.shape for x in every[3:]] == [(5, 1), (2,), (), (), (2,)]
    results = {name: np.full_like(getattr(every, name), np.nan) for name in given_too}
    need_in_order = [name for name in order if name in need]
    gradients = attn.backward(out, q, q, q, out, lse, **optional, need=need_in_order, **results)
    assert gradients._fields == tuple(name for name in GRADIENTS if name in need | given_too)
    for name, x in gradients._asdict().items():
        np.testing.assert_array_equal(x, getattr(every, name))
        assert name not in results or x is results[name]


def test_gradients_without_need_are_three():
    q, dbias, bias = normal(2, 5, 4), np.full((10, 5), np.nan)[::2], normal(5, 5)
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, q, q, bias=bias)
    dq, dk, dv = gradients = attn.backward(out, q, q, q, out, lse, bias=bias)
    assert type(gradients) is cuflash.Gradients
    assert gradients == (dq, dk, dv)
    assert attn.backward(out, q, q, q, out, lse, bias=bias, dbias=dbias).dbias is dbias
    # Weights sum to one whatever the bias of their row is.
    np.testing.assert_allclose(dbias.sum(axis=1), 0, atol=1e-14)


def test_rows_that_see_nothing():
    q, k, v = normal(5, 4), normal(2, 4), normal(2, 3)
    attn = cuflash.FlashAttention(causal=True)
    out, lse = attn.forward(q, k, v)
    assert not out[:3].any()
    assert (lse[:3] == -np.inf).all()
    assert np.isfinite(lse[3:]).all()
    dout = np.ones_like(out)
    gradients = attn.backward(dout, q, k, v, out, lse)
    assert not gradients.dq[:3].any()
    dout[:3] = 1000  # nothing may come of it
    for x, y in zip(gradients, attn.backward(dout, q, k, v, out, lse), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    dtype = ct.numpy_dtype(dtype)
    q, k, v = normal(2, 5, 4, dtype=dtype), normal(1, 6, 4, dtype=dtype), normal(1, 6, 3, dtype=dtype)
    out, lse = cuflash.FlashAttention().forward(q, k, v)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert {x.dtype for x in cuflash.FlashAttention().backward(out, q, k, v, out, lse)} == {dtype}


@pytest.mark.parametrize("ndim", [2, 3, 4])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_and_missing_axes(layout, ndim):
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 3)
    expected, expected_lse = cuflash.FlashAttention().forward(q, k, v)
    arrays = [q, k, v, expected]
    if layout == "bshd":
        arrays = [x.swapaxes(1, 2) for x in arrays]
    if ndim == 3:
        arrays, expected_lse = [x[1] for x in arrays], expected_lse[1]
    if ndim == 2:  # the last head of q reads the last head of k and v
        arrays = [x[1, -1] if layout == "bhsd" else x[1, :, -1] for x in arrays]
        expected_lse = expected_lse[1, -1]
    *qkv, expected = arrays
    out, lse = cuflash.FlashAttention(layout=layout).forward(*qkv)
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


# ---- what it takes and gives back ------------------------------------------------------------------------------------


def test_results_have_names():
    q = normal(5, 4)
    attn = cuflash.FlashAttention()
    result = attn.forward(q, q, q)
    assert isinstance(result, cuflash.ForwardResult)
    assert result._fields == ("out", "lse")
    gradients = attn.backward(result.out, q, q, q, *result)
    assert isinstance(gradients, cuflash.Gradients)
    assert gradients._fields == ("dq", "dk", "dv")


def scattered(x):
    """An array of x's shape and dtype, full of NaN, whose elements lie far apart and in descending order."""
    buffer = np.full([3 * n + 1 for n in x.shape], np.nan, x.dtype)
    return buffer[(slice(None, 0, -3),) * x.ndim]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prepare", [lambda x: np.full_like(x, np.nan), scattered])
def test_given_results_are_written_and_returned(prepare, dtype):
    q, k, v, dout = (normal(2, 5, 4, seed=n, dtype=ct.numpy_dtype(dtype)) for n in range(4))
    attn = cuflash.FlashAttention(causal=True)
    expected = attn.forward(q, k, v)
    expected_gradients = attn.backward(dout, q, k, v, *expected)
    given_results = {name: prepare(x) for name, x in expected._asdict().items()}
    result = attn.forward(q, k, v, **given_results)
    given_gradients = {name: prepare(x) for name, x in expected_gradients._asdict().items()}
    gradients = attn.backward(dout, q, k, v, *result, **given_gradients)
    for got, given_array, right in zip(
        result + gradients, [*given_results.values(), *given_gradients.values()], expected + expected_gradients,
        strict=True,
    ):  # fmt: skip
        assert got is given_array
        np.testing.assert_array_equal(got, right)
    out = prepare(expected.out)
    assert cuflash.attention(q, k, v, causal=True, out=out) is out
    np.testing.assert_array_equal(out, expected.out)


def test_results_inside_one_packed_array():
    packed, gradients = normal(2, 5, 3, 4, 8), np.full((2, 5, 3, 4, 8), np.nan)
    q, k, v = (packed[:, :, n] for n in range(3))
    dq, dk, dv = (gradients[:, :, n] for n in range(3))
    attn = cuflash.FlashAttention(layout="bshd")
    out, lse = attn.forward(q, k, v)
    attn.backward(out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
    np.testing.assert_array_equal(gradients, np.stack(attn.backward(out, q, k, v, out, lse), axis=2))


def test_read_only_inputs_are_taken_and_left_alone():
    q, k, v = normal(2, 5, 4), normal(2, 6, 4), normal(2, 6, 4)
    copies = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    out, lse = cuflash.FlashAttention().forward(q, k, v)
    cuflash.FlashAttention().backward(out, q, k, v, out, lse)
    for x, copy in zip((q, k, v), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_memory_mapped_files(tmp_path):
    path = tmp_path / "q.npy"
    np.save(path, normal(5, 4))
    q = np.load(path, mmap_mode="r")
    out = cuflash.attention(q, q, q)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, cuflash.attention(normal(5, 4), normal(5, 4), normal(5, 4)))
    given_out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", out.dtype, out.shape)
    assert cuflash.attention(q, q, q, out=given_out) is given_out
    np.testing.assert_array_equal(given_out, out)


def test_elements_that_are_not_aligned():
    records = np.zeros((5, 4), np.dtype([("flag", np.uint8), ("value", np.float32)]))
    records["value"] = normal(5, 4)
    q = records["value"]
    assert not q.flags.aligned
    np.testing.assert_array_equal(cuflash.attention(q, q, q), cuflash.attention(q.copy(), q.copy(), q.copy()))


@settings(max_examples=examples(60))
@given(
    ct.cases(max_seqlen=40, max_head_dim=20, max_scores=2**11, features=(*ct.FEATURES, *ct.MORE_FEATURES, "lengths"))
)
def test_repeated_calls(case):
    """A call on arrays that lie as those of an earlier call do takes nothing but this from it."""
    attn = cuflash.FlashAttention(**case.keywords)
    for seed in (case.seed, case.seed + 1):
        own = dataclasses.replace(case, seed=seed)
        arrays, need = own.arrays(), ct.gradients_of(own.problem)
        q, k, v, random = *ct.qkv(arrays), own.random
        out, lse = attn.forward(q, k, v, **ct.optional(arrays), **random)
        ct.assert_forward(own, out, lse)
        optional = {**ct.optional_backward(arrays), **random, "need": need}
        gradients = attn.backward(arrays["dout"], q, k, v, out, lse, **optional)
        ct.assert_backward(own, **gradients._asdict())
        given_out = np.full_like(out, np.nan)
        result = attn.forward(q, k, v, **ct.optional(arrays), **random, out=given_out)
        assert result.out is given_out
        np.testing.assert_array_equal(given_out, out)
        np.testing.assert_array_equal(result.lse, lse)


OTHERS = {
    "seqlen_q": st.integers(1, 9),
    "seqlen_k": st.integers(1, 9),
    "head_dim": st.integers(1, 9),
    "dtype": st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    "ndim": st.integers(2, 4),
    "strides": st.sampled_from(["contiguous", "padded", "transposed", "flipped"]),
}


@settings(max_examples=examples(60))
@given(
    st.builds(ct.Case, **OTHERS),
    st.lists(st.one_of([st.fixed_dictionaries({name: own}) for name, own in OTHERS.items()]), min_size=1, max_size=4),
    st.booleans(),
)
def test_calls_take_nothing_from_others_on_arrays_of_the_same_names(case, changes, are_unpickled):
    """Shapes, strides and dtypes are those of each call, be they objects of their own or not."""
    attn = cuflash.FlashAttention()
    for own in (case, *[dataclasses.replace(case, **change) for change in changes], case):
        arrays = own.arrays()
        if are_unpickled:
            arrays = pickle.loads(pickle.dumps(arrays))
        q, k, v = ct.qkv(arrays)
        out, lse = attn.forward(q, k, v)
        ct.assert_forward(own, out, lse)
        gradients = attn.backward(arrays["dout"], q, k, v, out, lse)
        ct.assert_backward(own, **gradients._asdict())


def test_axes_and_dtypes_of_repeated_calls_are_checked():
    attn = cuflash.FlashAttention()
    q = normal(5, 8, 1)
    attn.forward(q, q, q)  # whose axes begin as those of a matrix do
    np.testing.assert_array_equal(attn.forward(q[..., 0], q[..., 0], q[..., 0]).out.shape, (5, 8))
    for _ in range(3):
        q = pickle.loads(pickle.dumps(normal(5, 4, dtype=np.float32)))
        attn.forward(q, q, q)
        del q  # and its dtype, an object of its own
        q = pickle.loads(pickle.dumps(np.ones((5, 4), np.int32)))
        with pytest.raises(TypeError, match="q: got dtype int32"):
            attn.forward(q, q, q)
        swapped = np.ones((5, 4), np.dtype(np.float32).newbyteorder())
        with pytest.raises(TypeError, match="expected native byte order"):
            attn.forward(swapped, swapped, swapped)


def test_repeated_calls_are_checked():
    buffer = normal(4, 5, 8)
    q, k, v, free = buffer
    attn = cuflash.FlashAttention()
    attn.forward(q, k, v, out=free)
    with pytest.raises(ValueError, match="out: got memory shared with q"):
        attn.forward(q, k, v, out=q)
    with pytest.raises(ValueError, match="out: got a read-only array"):
        attn.forward(q, k, v, out=np.broadcast_to(free, free.shape))
    with pytest.raises(TypeError, match="k: got None"):
        attn.forward(q, None, v)
    lengths = np.array([5, 3], np.int32)
    batch = buffer.reshape(2, 2, 5, 8)
    attn.forward(batch, batch, batch, kv_lengths=lengths)
    with pytest.raises(ValueError, match="kv_lengths: got an entry 6"):
        attn.forward(batch, batch, batch, kv_lengths=lengths + 1)


@pytest.mark.parametrize("first, second", [({"causal": True}, {"causal": 1}), ({"scale": 1}, {"scale": True})])
def test_options_of_other_types_are_checked(first, second):
    q = normal(5, 4)
    cuflash.attention(q, q, q, **first)
    (name,) = second
    with pytest.raises(TypeError, match=f"{name}: got"):
        cuflash.attention(q, q, q, **second)


def test_one_object_serves_many_threads():
    attn = cuflash.FlashAttention(causal=True)
    inputs = [normal(2, n, 4) for n in range(1, 40)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda q: attn.forward(q, q, q).out, inputs))
    for q, out in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(out, attn.forward(q, q, q).out)


def test_same_bits_every_time():
    q, k, v = (normal(2, 3, 70, 16, seed=n, dtype=np.float32) for n in range(3))
    attn = cuflash.FlashAttention(deterministic=True)
    first = attn.forward(q, k, v)
    gradients = attn.backward(first.out, q, k, v, *first)
    for _ in range(5):
        for x, y in zip(first, attn.forward(q, k, v), strict=True):
            np.testing.assert_array_equal(x, y)
        for x, y in zip(gradients, attn.backward(first.out, q, k, v, *first), strict=True):
            np.testing.assert_array_equal(x, y)


def test_an_object_prints_and_pickles():
    attn = cuflash.FlashAttention(causal="top_left", window=(3, None))
    options = "causal='top_left', scale=None, window=(3, None), softcap=None, layout='bhsd', deterministic=False"
    options += ", batch_invariant=False, precision='highest', dropout=0.0, block_size=(128, 128)"
    text = f"FlashAttention({options})"
    assert repr(attn) == text
    assert repr(pickle.loads(pickle.dumps(attn))) == text
    assert eval(text, {"FlashAttention": cuflash.FlashAttention}).options == attn.options


def test_options_of_other_types_become_those_of_python():
    class Layout(StrEnum):
        BSHD = "bshd"

    plain: dict[str, Any] = {"causal": "top_left", "window": (3, 1), "scale": 0.5, "dropout": 0.25, "layout": "bshd"}
    others: dict[str, Any] = {
        "causal": np.str_("top_left"),
        "window": [np.int8(3), np.array(1)],
        "scale": np.array(0.5),
        "dropout": np.float16(0.25),
        "layout": Layout.BSHD,
        "precision": np.str_("highest"),
    }
    one, other = cuflash.FlashAttention(**plain), cuflash.FlashAttention(**others)
    assert one == other and hash(one) == hash(other) and repr(one) == repr(other)


RESULTS = {
    "forward": lambda attn, q, out, lse: attn.forward(q, q, q, want=("max", "entropy")),
    "backward": lambda attn, q, out, lse: attn.backward(q, q, q, q, out, lse, need=("dv", "dscale")),
    "backward_jvp": lambda attn, q, out, lse: attn.backward_jvp(q, q, q, q, out, lse, out, lse, tq=q, need=("tdv",)),
    "column_sums_backward": lambda attn, q, out, lse: attn.column_sums_backward(lse, q, q, lse, need=("dlse",)),
    "top_keys": lambda attn, q, out, lse: attn.top_keys(q, q, lse, 2),
    "merge": lambda attn, q, out, lse: cuflash.merge([out], [lse], maxes=[lse]),
    "double_backward": lambda attn, q, out, lse: cuflash.double_backward(attn, {"dq": q}, q, q, q, q).gradients,
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("copied", [deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_results_are_pickled_with_their_names(name, copied):
    """A pool of processes gives results so."""
    attn, q = cuflash.FlashAttention(), np.linspace(0, 1, 12).reshape(1, 3, 4)
    result = RESULTS[name](attn, q, *attn.forward(q, q, q))
    again = copied(result)
    assert type(again) is type(result) and again._fields == result._fields
    for x, y in zip(again, result, strict=True):
        np.testing.assert_array_equal(x, y)


def test_plans_and_bound_calls_are_pickled():
    attn, q = cuflash.FlashAttention(causal=True), np.linspace(0, 1, 12).reshape(1, 3, 4)
    plan = attn.plan(q, q, q, passes=["forward", "backward", "column_sums"])
    assert pickle.loads(pickle.dumps(plan)) == plan
    bound = attn.bind(q, q, q, want=("max",))
    for own in (pickle.loads(pickle.dumps(bound)), deepcopy(bound)):
        assert not own._launches  # which hold addresses of this process
        for _ in range(2):
            for x, y in zip(own(q, q, q), bound(q, q, q), strict=True):
                np.testing.assert_array_equal(x, y)


def test_plan_and_compile_of_host_arrays():
    q, k = np.empty((2, 8, 100, 64), np.float32), np.empty((2, 2, 200, 64), np.float32)
    attn = cuflash.FlashAttention(causal=True)
    cpu_plan = attn.plan(q, k, k, kv_lengths=np.array([3, 4]))
    assert isinstance(cpu_plan, CpuPlan)
    assert cpu_plan.problem.diagonal == 100
    text = cpu_plan.describe(verbose=True, width=0)
    for words in ("CPU", "host memory", "batch 2", "8 heads over 2 key/value heads", "seqlen 100 x 200", "float32"):
        assert words in text
    attn.compile(q, k, k)


@pytest.mark.parametrize("method", ["plan", "compile", "tune"])
def test_an_unknown_keyword_is_refused_as_python_does(method):
    x = np.ones((3, 4))
    with pytest.raises(TypeError, match=rf"{method}\(\) got an unexpected keyword argument 'biass'"):
        getattr(cuflash.FlashAttention(), method)(x, x, x, biass=x)


@pytest.mark.parametrize("kind", [OptionalArrays, PassArrays])
def test_arrays_that_are_not_given_are_none(kind):
    """A launch looks every optional input up by its name."""
    got = checked("plan", kind, {"bias": 1})
    assert got.keys() >= set(NAMES) and got.pop("bias") == 1
    assert all(x is None for x in got.values())
