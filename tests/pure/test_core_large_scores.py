"""Rows of large lse: rounded, it does not say how many keys share the weights, which have to sum to 1 all the same."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash import cpu
from cuflash.cpu import core
from tests.compiled import INSTRUCTION_SETS, much_work, take_way, way_taken
from tests.judging import assert_same_bits
from tests.sampling import examples

if core.why_not() is not None:
    pytest.skip(f"no compiled core: {core.why_not()}", allow_module_level=True)

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", "packed")
# What the sum of the weights of a row may be off by, up to an lse of 128 by its rounding alone.
CLOSE = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-16, "float64": 2.0**-45}
BIASES = (0.0, -1e4, -1e6, -1e7, -1e9, -1e30, float(np.finfo(np.float32).min))


WAYS = st.sampled_from([way for _, way in INSTRUCTION_SETS])


@pytest.fixture(params=[way for _, way in INSTRUCTION_SETS], ids=[name for name, _ in INSTRUCTION_SETS])
def way(request, monkeypatch):
    take_way(monkeypatch, request.param)
    return request.param


def largest(dtype):
    return float(ml_dtypes.finfo(dtype).max)


@st.composite
def large(draw, dtype):
    """A case, its arrays with large scores, and a first column of k that is 1."""
    case = draw(ct.cases(features=FEATURES, max_seqlen=260, max_scores=2**14, max_head_dim=64, dtypes=[dtype]))
    # A finite mask of all keys or of some, a summand that the scores of a row have in common, or scores of any size.
    of = draw(st.sampled_from(("mask", "mask of some", "rows", "products")))
    if of.startswith("mask") and case.cu_seqlens_q is None and case.bias is None:
        case = replace(case, bias=(case.seqlen_k,))
    arrays: dict[str, Any] = case.arrays()
    size = draw(st.sampled_from((1e9, 1e7, 1e6, 1e4, 1e2, 3e38)))
    if of.startswith("mask") and "bias" in arrays:
        bias = arrays["bias"]
        some = np.random.default_rng(case.seed).random(bias.shape) < 0.5 if of == "mask of some" else ...
        bias[some] -= np.array(min(size, largest(bias.dtype)), bias.dtype)
    if "alibi_slopes" in arrays and draw(st.booleans()):
        arrays["alibi_slopes"] *= min(size, 1e9)
    if of == "products":
        arrays["q"] *= np.array(min(size, 100), arrays["q"].dtype)
        arrays["k"] *= np.array(draw(st.sampled_from((1, 10, 100))), arrays["k"].dtype)
    if of == "rows":
        arrays["q"][..., 0] = draw(st.sampled_from((-1, 1))) * min(size, 1e4)
    arrays["k"][..., 0] = 1
    return case, arrays


def sums_of_weights(case, arrays):
    """For each row the sum of its weights, by dq; that of all rows, by dbias; and how many rows there are.

    Of lse alone, the gradient of a score is its weight. The weights of sinks are added.
    """
    problem, inputs, optional = case.problem, ct.qkv(arrays), ct.optional(arrays) | case.random
    out, lse = cpu.forward(problem, *inputs, **optional)
    others = [name for name in ("dbias", "dsinks") if name in ct.gradients_of(problem)]
    optional |= {"dlse": np.ones_like(lse), "need": ("dq", *others)}
    gradients = cpu.backward(problem, np.zeros_like(out), *inputs, out, lse, **optional)
    found = dict(zip(("dq", *others), gradients, strict=True))
    found = {name: x.astype(np.float64) for name, x in found.items()}
    rows = found["dq"][..., 0] / (problem.scale or 1)
    if case.layout == "bshd" and rows.ndim > 1:
        rows = rows.swapaxes(-1, -2)
    of_sinks = found["dsinks"].sum() if "dsinks" in found else 0.0
    return rows, of_sinks, found.get("dbias"), np.isfinite(lse)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_weights_sum_to_one(dtype, way):
    @settings(max_examples=examples(40 if way else 120))
    @given(large(dtype))
    def every_case(drawn):
        case, arrays = drawn
        rows, of_sinks, dbias, counts = sums_of_weights(case, arrays)
        if case.softcap is None and case.scale != 0:
            np.testing.assert_allclose((rows * counts).sum() + of_sinks, counts.sum(), rtol=CLOSE[dtype])
            if not case.sinks:
                np.testing.assert_allclose(rows, counts, rtol=CLOSE[dtype])
        if dbias is not None and case.bias_dtype == "softmax":
            close = CLOSE["float64" if dtype == "float64" else "float32"]
            np.testing.assert_allclose(dbias.sum() + of_sinks, counts.sum(), rtol=4 * close)

    every_case()


@settings(max_examples=examples(100))
@given(
    WAYS, st.sampled_from(("float32", "float64")), st.sampled_from(((40, 40), (100, 100), (130, 200), (20, 250))),
    st.sampled_from(((1, 1), (2, 1))), st.sampled_from((None, *BIASES)), st.sampled_from((1.0, 30.0)), st.booleans(),
    st.sampled_from((None, 1e-3, -1e4)),
)  # fmt: skip
@example(0, "float32", (100, 100), (1, 1), None, 100.0, True, None)
def test_weights_are_those_of_the_forward_pass(way, dtype, lengths, heads, bias, size, causal, sink):
    """Values of a unit matrix give the weights of both passes."""
    rows, keys = lengths
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((2, h, n, 16)).astype(dtype) * size for h, n in zip(heads, lengths, strict=True))
    v, unit = (
        np.broadcast_to(np.eye(n, keys, dtype=dtype), (2, h, n, keys)) for h, n in ((heads[1], keys), (heads[0], rows))
    )
    optional: dict[str, Any] = {} if bias is None else {"bias": np.full(lengths, bias, dtype)}
    if sink is not None:
        optional["sinks"] = np.full(heads[0], sink, dtype)
    attn = cuflash.FlashAttention(causal=causal, scale=1.0)
    with way_taken(way):
        out, lse = attn.forward(q, k, v, **optional)
        dv = attn.backward(unit, q, k, v, out, lse, **optional, need=("dv",)).dv
    expected = out.reshape(2, heads[1], -1, rows, keys).sum(axis=2).swapaxes(-1, -2)
    np.testing.assert_allclose(dv[..., :rows], expected, rtol=0, atol=2e-6 if dtype == "float32" else 1e-14)


@settings(max_examples=examples(100))
@given(
    WAYS, st.sampled_from(("float32", "float64", "bfloat16")), st.sampled_from(((8, 8), (40, 40), (130, 200))),
    st.booleans(), st.booleans(), st.integers(0, 2**16),
)  # fmt: skip
def test_other_rows_stay_as_they_are(way, dtype, lengths, has_bias, sinks, seed):
    """Bit for bit, whatever other rows are."""
    case = ct.Case(
        batch=2, num_heads=2, num_heads_kv=1, seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=24, dtype=dtype,
        bias=(lengths[1],) if has_bias else None, sinks=sinks, dlse=True, seed=seed,
    )  # fmt: skip
    arrays = case.arrays()
    is_large = np.random.default_rng(seed).random(lengths[0]) < 0.3
    larger = np.where(is_large[:, None], arrays["q"] * np.array(300, arrays["q"].dtype), arrays["q"])
    attn, optional, results = cuflash.FlashAttention(), ct.optional(arrays), []
    for q in (arrays["q"], larger):
        with way_taken(way):
            out, lse = attn.forward(q, *ct.qkv(arrays)[1:], **optional)
            optional_backward = {"dlse": arrays["dlse"], **optional, "need": ("dq",)}
            dq = attn.backward(arrays["dout"], q, *ct.qkv(arrays)[1:], out, lse, **optional_backward).dq
        results.append({"dq": dq[:, :, ~is_large], "lse": lse[:, :, ~is_large]})
    assert_same_bits(*results)


@settings(max_examples=examples(100))
@given(
    WAYS, st.sampled_from(("float32", "float64")), st.sampled_from((30, 150)), st.sampled_from((40, 300)),
    st.sampled_from((0.1, 0.5, 0.9)), st.sampled_from((200.0, 1e3, 1e4)),
)  # fmt: skip
def test_splits_of_the_keys_have_their_fraction_of_the_weights(way, dtype, rows, keys, fraction, size):
    """lse of all keys says what the keys of a split weigh: their weights do not sum to 1."""
    random, cut = np.random.default_rng(0), max(1, int(keys * fraction))
    q, k, v = (random.standard_normal((2, n, 16)).astype(dtype) for n in (rows, keys, keys))
    q[..., 0], k[..., 0] = size, 1
    attn: Any = cuflash.FlashAttention(scale=1.0)
    splits = [(x[:, :cut], x[:, cut:]) for x in (k, v)]
    with way_taken(way):
        whole = attn.forward(q, k, v)
        of_splits = [attn.forward(q, *split) for split in zip(*splits, strict=True)]
        out, lse = cuflash.merge(*zip(*of_splits, strict=True))
        of_lse = {"dlse": np.ones_like(lse), "need": ("dq",)}
        weights = [
            attn.backward(np.zeros_like(q), q, *split, out, lse, **of_lse).dq[..., 0]
            for split in zip(*splits, strict=True)
        ]
    assert (np.abs(whole.lse) >= 128).all()
    close = 10 * np.finfo(dtype).eps * size
    for got, split in zip(weights, of_splits, strict=True):
        np.testing.assert_allclose(got, np.exp(split.lse - whole.lse), rtol=close, atol=close)
    np.testing.assert_allclose(sum(weights), 1, rtol=close)


@settings(max_examples=examples(20))
@given(
    st.sampled_from(("float32", "bfloat16")), st.sampled_from(((1, 300, 300), (3, 130, 700), (4, 20, 500))),
    st.sampled_from(((), ("dbias",), ("dsinks", "dscale"))), st.sampled_from(BIASES),
)  # fmt: skip
def test_bits_do_not_depend_on_threads(dtype, sizes, more, bias):
    heads, rows, keys = sizes
    random = np.random.default_rng(0)
    q, k, v, dout = (
        random.standard_normal((2, heads, n, 16)).astype(ct.numpy_dtype(dtype)) for n in (rows, keys, keys, rows)
    )
    optional: Any = {"bias": np.full((1, 1, 1, keys), bias, np.float32), "sinks": np.full(heads, bias, np.float32)}
    attn, need, results = cuflash.FlashAttention(causal=True), ("dq", "dk", "dv", *more), []
    with pytest.MonkeyPatch.context() as patch:
        much_work(patch)
        for threads in (1, 3):
            with cuflash.cpu_threads(threads):
                out, lse = attn.forward(q, k, v, **optional)
                results.append(attn.backward(dout, q, k, v, out, lse, **optional, need=need)._asdict())
    assert_same_bits(*results)


def test_dq_of_16_bits_without_space_for_its_sums(way):
    """Jobs of its own compute it."""
    rows, keys = 140_000, 24
    q, k = np.zeros((1, rows, 64), ml_dtypes.bfloat16), np.zeros((1, keys, 64), ml_dtypes.bfloat16)
    assert q.size * 4 > 32 << 20
    k[..., 0], v = 1, k[..., :8]
    optional: Any = {"bias": np.full(keys, -1e9, np.float32)}
    attn = cuflash.FlashAttention(scale=1.0)
    out, lse = attn.forward(q, k, v, **optional)
    (dq,) = attn.backward(np.zeros_like(out), q, k, v, out, lse, **optional, dlse=np.ones_like(lse), need=("dq",))
    np.testing.assert_allclose(dq[..., 0].astype("f4"), 1, rtol=CLOSE["bfloat16"])


@settings(max_examples=examples(30))
@given(WAYS, st.sampled_from((60, 200)), st.sampled_from((200, 300)), st.sampled_from(BIASES[1:]), st.integers(0, 2))
def test_scores_of_functions(way, rows, keys, low, which):
    """The core computes what the functions of a caller make of many pairs."""
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((1, n, 16)).astype(np.float32) for n in (rows, keys))
    k[..., 0] = 1
    scores = (
        lambda s, i, j: s + low,
        lambda s, i, j: s + low - (i - j) % 7,
        lambda s, i, j: s + low / (1 + i % 2),
    )
    attn = cuflash.FlashAttention(score=scores[which], scale=1.0)
    with way_taken(way):
        out, lse = attn.forward(q, k, k)
        (dq,) = attn.backward(np.zeros_like(out), q, k, k, out, lse, dlse=np.ones_like(lse), need=("dq",))
    np.testing.assert_allclose(dq[..., 0], 1, rtol=2.0**-16)
