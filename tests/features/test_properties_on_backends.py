"""What attention must do whatever the numbers are, stated without an oracle, on every backend."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays.array_info import view_4d, view_rows
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.judging import assert_same_bits
from tests.sampling import examples

PROPERTIES = settings(max_examples=examples(60))
FLOAT32: dict[str, Any] = {"dtypes": ["float32"], "score_spreads": [1.0, 8.0]}
PLAIN: dict[str, Any] = {"ndims": [4], "layouts": ["bhsd"], "strides": ["contiguous"]}
ON_DEVICE = ct.Case(seqlen_q=150, seqlen_k=260, batch=2, num_heads=4, num_heads_kv=2, head_dim=64, dtype="float16")
on_cpu = on_backends((CORE, FALLBACK))
every_backend = on_backends((CORE, FALLBACK, DEVICE))  # on a device one problem, whose kernel is compiled once


def check(backend, holds, features=ct.FEATURES, of=FLOAT32, **strategies):
    """Draw problems with such features, and what else a property has as arguments."""
    cases = st.just(ON_DEVICE) if backend.name == DEVICE else ct.cases(**of, features=features)
    backend.draw(60, holds, case=cases, **strategies)


def attend(backend, case, arrays, **changed):
    """out and lse, with some options or arrays changed."""
    keywords = case.keywords | ct.optional(arrays) | changed
    names = keywords.keys() & {"causal", "scale", "window", "softcap", "layout"}
    options = cuflash.FlashAttention(**{name: keywords.pop(name) for name in names}).options
    out, lse, _ = backend.run(options, {name: arrays[name] for name in "qkv"} | keywords, ())
    return cuflash.ForwardResult(out, lse)


def differentiate(backend, case, arrays):
    return SimpleNamespace(**backend.results(case, arrays, need=("dq", "dk", "dv")))


def close(got, expected, case, slack=1.0):
    """Equal but for rounding: of a few units in the last place, more where scores are large."""
    tolerance = slack * (2**-10 if case.dtype == "float16" else 2**-18) * (4 + case.score_spread)
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    scale = np.abs(expected, where=np.isfinite(expected), out=np.zeros(expected.shape)).max(initial=1)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * scale)


@every_backend
def test_weights_of_a_row_sum_to_one(backend):
    def holds(case):
        arrays = case.arrays()
        out, lse = attend(backend, case, arrays, v=np.ones_like(arrays["v"]))
        ones = np.where(view_rows(lse)[..., None] == -np.inf, 0, 1)
        out = view_4d(out, case.layout)
        close = 2**-10 if case.dtype == "float16" else 1e-5
        np.testing.assert_allclose(out.astype(np.float64), np.broadcast_to(ones, out.shape), rtol=close)

    check(backend, holds)


@every_backend
def test_a_constant_added_to_a_row_moves_its_lse_only(backend):
    def holds(case, constant):
        arrays = case.arrays()
        out, lse = attend(backend, case, arrays)
        bias = np.float32(constant) + arrays.get("bias", np.zeros((1, 1), np.float32)).astype(np.float32)
        moved_out, moved_lse = attend(backend, case, arrays, bias=bias)
        close(moved_out, out, case, slack=4)
        close(moved_lse, lse + np.float32(constant), case)

    check(backend, holds, constant=st.floats(-20, 20))


@every_backend
def test_out_is_linear_in_v(backend):
    def holds(case, factor):
        arrays = case.arrays()
        other = np.flip(arrays["v"], axis=-1)
        mixed = (arrays["v"] + np.float32(factor) * other).astype(other.dtype)
        first, second = attend(backend, case, arrays)[0], attend(backend, case, arrays, v=other)[0]
        close(attend(backend, case, arrays, v=mixed)[0], first + np.float32(factor) * second, case)

    check(backend, holds, set(ct.FEATURES) - {"kv_lengths"}, factor=st.floats(-3, 3))


@every_backend
def test_the_order_of_keys_does_not_matter(backend):
    def holds(case):
        arrays = case.arrays()
        order = np.random.default_rng(case.seed).permutation(case.seqlen_k)
        permuted = {name: arrays[name][:, :, order] for name in "kv"}
        for name in ("bias", "mask"):
            if name in arrays and arrays[name].shape[-1] > 1:
                permuted[name] = arrays[name][..., order]
        for got, expected in zip(attend(backend, case, arrays, **permuted), attend(backend, case, arrays), strict=True):
            close(got, expected, case)
        gradients, of_permuted = differentiate(backend, case, arrays), differentiate(backend, case, arrays | permuted)
        close(of_permuted.dq, gradients.dq, case, slack=4)
        close(of_permuted.dk, gradients.dk[:, :, order], case, slack=4)
        close(of_permuted.dv, gradients.dv[:, :, order], case, slack=4)

    check(backend, holds, ["bias", "mask", "softcap", "scale", "gqa", "head_dim_v"], FLOAT32 | PLAIN)


@every_backend
def test_a_causal_prefix_is_the_causal_attention_of_the_prefix(backend):
    def holds(case, data):
        arrays = case.arrays()
        n = data.draw(st.integers(backend.name == DEVICE, min(case.seqlen_q, case.seqlen_k)))
        prefix = {name: arrays[name][:, :, :n] for name in "qkv"}
        whole = attend(backend, case, arrays, causal="top_left")
        for got, expected in zip(attend(backend, case, arrays, causal=True, **prefix), whole, strict=True):
            close(got, expected[:, :, :n], case)

    check(backend, holds, ["softcap", "gqa"], FLOAT32 | PLAIN, data=st.data())


@every_backend
def test_grouped_heads_equal_repeated_keys_and_values(backend):
    def holds(case):
        arrays = case.arrays()
        repeated = {name: np.repeat(arrays[name], case.num_heads // case.num_heads_kv, axis=1) for name in "kv"}
        for got, expected in zip(attend(backend, case, arrays), attend(backend, case, arrays, **repeated), strict=True):
            close(got, expected, case)

    check(backend, holds, ["causal", "window", "bias", "mask", "alibi_slopes", "gqa"], FLOAT32 | PLAIN)


@on_cpu
def test_splits_merged_by_their_lse_are_the_whole(backend):
    def holds(case, data):
        arrays = case.arrays()
        cut = data.draw(st.integers(0, case.seqlen_k))
        outs, lses = [], []
        for keys in (slice(0, cut), slice(cut, None)):
            optional = {name: x[..., keys] for name, x in ct.optional(arrays).items() if x.shape[-1] > 1}
            out, lse = attend(backend, case, arrays, k=arrays["k"][:, :, keys], v=arrays["v"][:, :, keys], **optional)
            outs.append(out)
            lses.append(lse)
        merged_lse = np.logaddexp(*lses)
        out, lse = attend(backend, case, arrays)
        close(merged_lse, lse, case)
        with np.errstate(invalid="ignore"):
            weights = [np.where(merged_lse == -np.inf, 0, np.exp(x - merged_lse))[..., None] for x in lses]
        close(outs[0] * weights[0] + outs[1] * weights[1], out, case)

    check(backend, holds, ["mask", "bias", "softcap", "scale", "gqa"], FLOAT32 | PLAIN, data=st.data())


@every_backend
def test_a_window_wide_enough_is_none(backend):
    def holds(case):
        arrays = case.arrays()
        widest = case.seqlen_q + case.seqlen_k
        assert_same_bits(attend(backend, case, arrays, window=(widest, widest)), attend(backend, case, arrays))

    check(backend, holds, ["causal", "softcap", "mask", "alibi_slopes", "kv_lengths"])


@every_backend
def test_a_mask_is_a_bias_of_minus_infinity(backend):
    def holds(case, seed):
        arrays = case.arrays()
        mask = np.random.default_rng(seed).random((case.seqlen_q, case.seqlen_k)) < 0.5
        bias = np.where(mask, 0, -np.inf).astype(np.float32)
        masked, biased = (attend(backend, case, arrays, **x) for x in ({"mask": mask}, {"bias": bias}))
        close(masked.out, biased.out, case)
        close(masked.lse, biased.lse, case)

    check(backend, holds, ["causal", "softcap", "gqa"], FLOAT32 | PLAIN, seed=st.integers(0, 99))


@on_cpu
def test_strides_and_layout_do_not_matter(backend):
    def holds(case):
        # The same tiles are made of the same values: even the bits agree.
        expected = attend(backend, dataclasses.replace(case, strides="contiguous"), case.arrays())
        for strides in ct.STRIDES:
            found = attend(backend, case, dataclasses.replace(case, strides=strides).arrays())
            for got, x in zip(found, expected, strict=True):
                assert np.array_equal(got.astype("f8"), x.astype("f8"))
        arrays = case.arrays()
        other = dataclasses.replace(case, layout="bhsd" if case.layout == "bshd" else "bshd")
        swapped = {name: arrays[name].swapaxes(-3, -2) for name in "qkv"}
        out, lse = attend(backend, other, arrays | swapped)
        assert np.array_equal(out.swapaxes(-3, -2).astype("f8"), expected.out.astype("f8"))
        assert np.array_equal(lse, expected.lse)

    check(backend, holds, of={"dtypes": ["float32", "bfloat16"], "ndims": [3, 4]})


@every_backend
def test_a_padded_problem_equals_the_short_ones(backend):
    def holds(case, data):
        lengths = [data.draw(st.integers(backend.name == DEVICE, case.seqlen_k)) for _ in range(case.batch)]
        arrays = dataclasses.replace(case, kv_lengths=tuple(lengths)).arrays()  # NaN in the padding
        padded = attend(backend, case, arrays, causal="top_left")
        assert np.isfinite(padded.out).all()
        for b, n in enumerate(lengths):
            short = {"q": arrays["q"][b], "k": arrays["k"][b, :, :n], "v": arrays["v"][b, :, :n]}
            optional = {}
            if case.alibi_slopes:
                optional["alibi_slopes"] = np.broadcast_to(arrays["alibi_slopes"], (case.batch, case.num_heads))[b]
            alone = attend(backend, case, short, causal="top_left", **optional)
            close(padded.out[b], alone.out, case)
            close(padded.lse[b], alone.lse, case)

    check(backend, holds, ["softcap", "gqa", "head_dim_v", "alibi_slopes", "window"], FLOAT32 | PLAIN, data=st.data())


@on_cpu
def test_the_gradient_along_v_is_the_change_of_out(backend):
    """out is linear in v, so that sum(dv * v) = sum(dout * out), exactly but for rounding."""

    def holds(case):
        arrays = case.arrays()
        out, _ = attend(backend, case, arrays)
        dv = differentiate(backend, case, arrays).dv
        left, right = np.sum(dv.astype("f8") * arrays["v"]), np.sum(arrays["dout"].astype("f8") * out)
        size = np.sum(np.abs(arrays["dout"] * out)) + 1
        assert abs(left - right) <= 1e-4 * size

    check(backend, holds, ["causal", "window", "softcap", "mask", "gqa", "bias"])


@on_cpu
def test_scaling_q_up_and_k_down_changes_nothing(backend):
    def holds(case):
        arrays = case.arrays()
        scaled = {"q": arrays["q"] * 4, "k": arrays["k"] / 4}
        for got, expected in zip(attend(backend, case, arrays, **scaled), attend(backend, case, arrays), strict=True):
            close(got, expected, case)
        gradients, of_scaled = differentiate(backend, case, arrays), differentiate(backend, case, arrays | scaled)
        close(of_scaled.dq * 4, gradients.dq, case, slack=4)
        close(of_scaled.dk / 4, gradients.dk, case, slack=4)

    check(backend, holds, ["causal", "softcap", "mask", "gqa"], FLOAT32 | PLAIN)


@on_cpu
def test_a_scale_of_zero_is_the_mean_of_what_is_visible(backend):
    def holds(case):
        arrays = case.arrays()
        out, lse = attend(backend, case, arrays, scale=0.0)
        attends_to_none = view_rows(lse)[..., None] == -np.inf
        counts = np.round(np.exp(view_rows(lse)))
        np.testing.assert_allclose(np.exp(view_rows(lse)), counts, rtol=1e-5)
        assert counts.max(initial=0) <= case.seqlen_k
        out = view_4d(out, case.layout)
        assert not np.any(out, where=np.broadcast_to(attends_to_none, out.shape))

    check(backend, holds, ["causal", "window", "mask", "gqa", "kv_lengths"])


def powers_of_2(lowest, highest):
    """Numbers of all sizes, the largest among them."""
    return (st.just(highest) | st.floats(lowest, highest)).map(lambda x: 2.0**x)


@on_cpu
def test_a_negative_scale_is_the_positive_one_of_negative_queries(backend):
    def holds(case):
        arrays = case.arrays()
        negative = attend(backend, case, arrays, scale=-0.3)
        for got, expected in zip(negative, attend(backend, case, arrays, scale=0.3, q=-arrays["q"]), strict=True):
            close(got, expected, case)

    check(backend, holds, ["causal", "softcap", "gqa"], FLOAT32 | PLAIN)


@PROPERTIES
@given(st.data(), st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
def test_any_scale_and_softcap_that_are_taken_give_finite_results(data, dtype):
    """Of ordinary inputs; gradients where the scores, and so the errors of their rounding, are ordinary too."""
    exponent = 384 if dtype == "float64" else 48
    highest = exponent if dtype in ("float32", "float64") else 16
    sign = data.draw(st.sampled_from([1, -1, 0]))
    scale = sign * data.draw(powers_of_2(-exponent, exponent) | st.floats(0, 2.0**exponent))
    softcap = data.draw(st.none() | powers_of_2(-exponent, highest))
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 80, 16)).astype(ct.numpy_dtype(dtype))
    attn = cuflash.FlashAttention(scale=scale, softcap=softcap, causal=data.draw(st.booleans()))
    out, lse = attn.forward(q, k, v)
    assert np.isfinite(out.astype(np.float64)).all()
    assert np.isfinite(lse).all()
    if min(abs(scale), softcap or math.inf) < 100:
        need = ("dq", "dk", "dv", "dscale", *(() if softcap is None else ("dsoftcap",)))
        gradients = attn.backward(v, q, k, v, out, lse, need=need)
        assert all(np.isfinite(x.astype(np.float64)).all() for x in gradients)


@PROPERTIES
@given(st.data(), st.sampled_from(["float32", "float64"]))
def test_options_of_any_size_obey_the_oracle_where_scores_are_ordinary(data, dtype):
    exponent = 384 if dtype == "float64" else 48
    scale = data.draw(st.sampled_from([1, -1])) * data.draw(powers_of_2(-20, exponent))
    softcap = data.draw(st.none() | powers_of_2(-1, exponent))
    options = {"scale": scale, "softcap": softcap, "seed": data.draw(st.integers(0, 9))}
    case = ct.Case(seqlen_q=40, seqlen_k=70, head_dim=16, dtype=dtype, **options)
    attn, arrays = cuflash.FlashAttention(**case.keywords), case.arrays()
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out, lse = attn.forward(q, k, v)
    ct.assert_forward(case, out, lse)
    ct.assert_backward(case, *attn.backward(dout, q, k, v, out, lse))
