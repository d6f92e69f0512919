"""Scalars of Python and NumPy in place of arrays without axes, on every path; int64 where kernels read int32."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.arrays.array_info import DTYPES, softmax_dtype_of
from cuflash.spec.scalars import array_of
from tests.ranks import on_threads
from tests.sampling import examples

SEQLEN, DIM = 40, 8
BFLOAT16 = ml_dtypes.bfloat16
X = np.arange(SEQLEN) / 8


def score(s, i, j, *, x, gamma, shift):
    return s - gamma * cuflash.abs(x[i] - x[j]) + shift * s * s


def mask(i, j, *, reach, is_open):
    return (cuflash.abs(i - j) < reach) | is_open


NUMBERS = st.sampled_from([0.3, 1, np.float64(0.7), np.float32(0.3), np.float16(0.25), -0.5])
INTEGERS = st.sampled_from([7, np.int64(9), np.int32(20), np.int8(3), np.uint8(11)])
BOOLS = st.sampled_from([False, np.False_])


def arrays_of(dtype, seed=0):
    random = np.random.default_rng(seed)
    shape = (2, 2, SEQLEN, DIM)
    return [random.standard_normal(shape).astype(ct.numpy_dtype(dtype)) for _ in range(4)]


def results_of(attn, arrays, optional, need, wrap=lambda k, v: (k, v)):
    q, k, v, dout = arrays
    keys = wrap(k, v)
    out, lse = attn.forward(q, *keys, **optional)
    return {"out": out, "lse": lse, **attn.backward(dout, q, *keys, out, lse, **optional, need=need)._asdict()}


def as_arrays(optional, dtype):
    return {name: x if isinstance(x, np.ndarray) else array_of(name, x, dtype) for name, x in optional.items()}


WAYS: dict[str, Any] = {
    "as they are": (cuflash.FlashAttention, lambda k, v: (k, v)),
    "streamed": (cuflash.FlashAttention, lambda k, v: cuflash.streamed(k, v, chunk=16)),
    "ranks": (
        lambda **options: cd.ContextParallel(cd.threads(1)[0], split="contiguous", **options),
        lambda k, v: (k, v),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=examples(40))
@given(
    st.sampled_from(DTYPES),
    st.fixed_dictionaries({"gamma": NUMBERS, "shift": NUMBERS, "reach": INTEGERS, "is_open": BOOLS}),
)
def test_scalars_of_functions_are_arrays_without_axes(way, dtype, scalars):
    make, wrap = WAYS[way]
    attn, arrays = make(score=score, mask=mask), arrays_of(dtype)
    optional = {"x": X.astype(softmax_dtype_of(dtype)), **scalars}
    need = ("dq", "dk", "dv", "dx", *(f"d{name}" for name in ("gamma", "shift") if type(scalars[name]) is not int))
    got = results_of(attn, arrays, optional, need, wrap)
    expected = results_of(attn, arrays, as_arrays(optional, dtype), need, wrap)
    for name, x in got.items():
        np.testing.assert_array_equal(x, expected[name])
        assert type(x) is np.ndarray and (x.shape, x.dtype) == (expected[name].shape, expected[name].dtype)
    for name in ("gamma", "shift"):
        if f"d{name}" in got:
            assert got[f"d{name}"].shape == ()
            assert got[f"d{name}"].dtype == array_of(name, scalars[name], dtype).dtype
    attn.plan(arrays[0], *wrap(*arrays[1:3]), **optional).describe()


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=examples(30))
@given(
    st.sampled_from(DTYPES), NUMBERS, st.sampled_from([True, False, np.True_]), st.integers(0, SEQLEN), st.booleans()
)
def test_scalars_of_terms_are_arrays_without_axes(way, dtype, bias, visible, length, is_numpy):
    make, wrap = WAYS[way]
    attn, arrays = make(causal=True), arrays_of(dtype)
    optional = {"bias": bias, "mask": visible, "kv_lengths": np.int32(length) if is_numpy else length}
    if way != "as they are":  # one length does not stand for all entries there, as no batch axis does
        optional["kv_lengths"] = np.full(2, length)
    got = results_of(attn, arrays, optional, ("dq", "dk", "dv", "dbias"), wrap)
    expected = results_of(attn, arrays, as_arrays(optional, dtype), ("dq", "dk", "dv", "dbias"), wrap)
    for name, x in got.items():
        np.testing.assert_array_equal(x, expected[name])
    assert type(got["dbias"]) is np.ndarray and got["dbias"].shape == ()
    assert got["out"].any() == bool(visible and length)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=examples(30))
@given(st.sampled_from(DTYPES), *[st.sampled_from([1, 0.3, np.float32(0.3), np.float16(0.25)])] * 3)
def test_scalar_tangents_are_arrays_without_axes(way, dtype, tscale, tsoftcap, tbias):
    """Of numbers and of an array without axes: an int is a real number there, as a float is."""
    make, wrap = WAYS[way]
    attn, arrays = make(softcap=3.0), arrays_of(dtype)
    keys, real = wrap(*arrays[1:3]), np.dtype(softmax_dtype_of(dtype))
    tangents = {"tscale": tscale, "tsoftcap": tsoftcap, "tbias": tbias}

    def results(own):
        found = attn.jvp(arrays[0], *keys, bias=np.array(0.5, real), **own)
        how = {"bias": np.array(0.5, real), "need": ("tdq", "tdv", "tdscale"), **own}
        return *found, *attn.backward_jvp(arrays[3], arrays[0], *keys, *found, **how)

    expected = results({name: np.array(x, real) for name, x in tangents.items()})
    for x, y in zip(results(tangents), expected, strict=True):
        np.testing.assert_array_equal(x, y)


@settings(max_examples=examples(20))
@given(st.sampled_from(DTYPES), st.sampled_from([True, False, np.True_, np.False_]), st.sampled_from([1, SEQLEN]))
def test_a_mask_without_axes_acts_with_a_mask_function(dtype, visible, reach):
    """The function hides no pair, so that it gives no mask of pairs, or all but those of the diagonal."""
    attn, arrays = cuflash.FlashAttention(mask=mask), arrays_of(dtype)
    functions = {"reach": reach, "is_open": False}
    got = results_of(attn, arrays, {"mask": visible, **functions}, ("dq", "dk", "dv"))
    expected = results_of(attn, arrays, {"mask": np.full((SEQLEN, SEQLEN), visible), **functions}, ("dq", "dk", "dv"))
    for name, x in got.items():
        np.testing.assert_array_equal(x, expected[name])


def test_a_parameter_of_a_score_is_trained():
    """NumPy makes a scalar of an array without axes in the first step."""
    attn: Any = cuflash.FlashAttention(score=lambda s, i, j, *, gamma: s - gamma * cuflash.abs(i - j))
    q, k, v, _ = arrays_of("float64")
    target, _ = attn.forward(q, k, v, gamma=0.25)
    gamma = np.array(0.4)
    for _ in range(80):
        out, lse = attn.forward(q, k, v, gamma=gamma)
        gradients = attn.backward(2 * (out - target), q, k, v, out, lse, gamma=gamma, need=("dgamma",))
        gamma = gamma - 1e-3 * gradients.dgamma
    assert isinstance(gamma, np.float64)
    assert gamma == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "scalar", "q_dtype", "dtype"),
    [
        ("gamma", 0.5, "float32", "float32"),
        ("gamma", 0.5, "bfloat16", "float32"),
        ("gamma", 0.5, "float64", "float64"),
        ("gamma", 2, "float32", "int64"),
        ("gamma", True, "float32", "bool"),
        ("gamma", np.float64(0.1), "float64", "float64"),
        ("gamma", np.float64(0.1), "float32", "float32"),  # a float of Python
        ("gamma", np.float32(0.1), "float64", "float64"),  # which holds every float32
        ("gamma", np.float16(0.1), "float16", "float16"),
        ("gamma", BFLOAT16(0.1), "float16", "float32"),
        ("gamma", np.uint8(3), "float16", "int32"),
        ("gamma", np.longdouble(0.1), "float64", np.longdouble.__name__.replace("longdouble", np.dtype("g").name)),
        ("bias", 0, "bfloat16", "float32"),
        ("bias", BFLOAT16(0.5), "bfloat16", "bfloat16"),
        ("bias", -math.inf, "float16", "float32"),
        ("k_scale", 1, "float64", "float32"),
        ("k_scale", 1.0, "float8_e4m3fn", "float32"),
        ("k_scale", np.float64(0.1), "float64", "float32"),
        ("kv_lengths", 3, "float32", "int64"),
        ("kv_lengths", np.int16(3), "float32", "int32"),
        ("mask", np.True_, "float32", "bool"),
    ],
)
def test_dtypes(name, scalar, q_dtype, dtype):
    array = array_of(name, scalar, q_dtype)
    assert type(array) is np.ndarray and (array.shape, array.dtype.name) == ((), dtype)
    np.testing.assert_array_equal(array, np.asarray(scalar).astype(array.dtype))


def test_scales_of_float8():
    q, k, v, _ = arrays_of("float32")
    k, v = (x.astype(ml_dtypes.float8_e4m3fn) for x in (k, v))
    expected = cuflash.attention(q, k, v, k_scale=np.array(0.5, np.float32), v_scale=np.array(2, np.float32))
    for k_scale, v_scale in ((0.5, 2), (np.float64(0.5), np.float16(2))):
        np.testing.assert_array_equal(cuflash.attention(q, k, v, k_scale=k_scale, v_scale=v_scale), expected)


def test_scalars_with_leading_axes_and_in_plan_compile_and_tune():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 2, SEQLEN, DIM))
    attn: Any = cuflash.FlashAttention(score=score, mask=mask)
    optional = {"x": X, "gamma": 0.5, "shift": np.float32(0.25), "reach": 7, "is_open": False}
    out, _ = attn.forward(q, k, v, **optional)
    np.testing.assert_array_equal(out, attn.forward(q, k, v, **as_arrays(optional, "float64")).out)
    assert "gamma" in attn.plan(q, k, v, **optional).describe()
    attn.compile(q, k, v, **optional)
    with pytest.raises(NotImplementedError, match=r"^q: got an array in host memory"):
        attn.tune(q, k, v, **optional)


def test_scalars_over_several_ranks():
    q, k, v, dout = arrays_of("float64")
    split = cd.contiguous(SEQLEN, 3)
    optional = {"x": X, "gamma": 0.5, "shift": 0.25, "reach": 7, "is_open": False}
    need = ("dq", "dgamma", "dshift")

    def work(comm):
        own = [split.part(x, comm.rank) for x in (q, k, v, dout)]
        return results_of(cd.ContextParallel(comm, split=split, score=score, mask=mask), own, optional, need)

    found = on_threads(3, work)
    whole = results_of(cuflash.FlashAttention(score=score, mask=mask), (q, k, v, dout), optional, need)
    np.testing.assert_allclose(split.whole([x["dq"] for x in found]), whole["dq"], rtol=1e-9, atol=1e-12)
    for name in ("dgamma", "dshift"):
        np.testing.assert_allclose([x[name] for x in found], whole[name], rtol=1e-9)


# ---- Integers --------------------------------------------------------------------------------------------------------


def test_starts_of_packed_sequences_of_int64():
    """As `numpy.cumsum` makes them; equal ones stay equal, so that functions may be computed as options."""
    q, k, v, dout = (x[0] for x in arrays_of("float32"))
    starts = np.cumsum([0, 13, 0, 27])
    assert starts.dtype == np.int64
    for options in ({"causal": True}, {"mask": lambda i, j: i >= j}):
        attn: Any = cuflash.FlashAttention(**options)
        results = [
            results_of(attn, (q, k, v, dout), {"cu_seqlens_q": x, "cu_seqlens_k": x}, ("dq", "dk"))
            for x in (starts, starts.astype(np.int32))
        ]
        for x, y in zip(*(x.values() for x in results), strict=True):
            np.testing.assert_array_equal(x, y)
    text = attn.plan(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts).describe(verbose=True, width=0)
    assert "computed as the options that they spell out: window = (None, 0)" in text


def test_a_block_table_of_int64():
    case = ct.Case(
        batch=2, num_heads=2, seqlen_q=3, seqlen_k=48, head_dim=8, kv_lengths=(17, 48), page_size=16, causal=True
    )
    arrays, attn = case.arrays(), cuflash.FlashAttention(causal=True)
    expected = attn.forward(*ct.qkv(arrays), **ct.optional(arrays))
    arrays["block_table"] = arrays["block_table"].astype(np.int64)
    np.testing.assert_array_equal(attn.forward(*ct.qkv(arrays), **ct.optional(arrays)).out, expected.out)
    attn.plan(*ct.qkv(arrays), **ct.optional(arrays))
    attn.compile(*ct.qkv(arrays), **ct.optional(arrays))
