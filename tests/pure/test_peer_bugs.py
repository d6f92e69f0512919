"""Mistakes that other attention libraries have made, each with a test that bears the mistake's name.

The tests run on NumPy arrays here; `tests/gpu/test_interface_gpu.py` runs the same ones on the GPU, by another `where`.
"""

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct

DIM = 64


@dataclass(frozen=True)
class Where:
    """Which arrays to give to cuflash."""

    dtype: str
    asarray: Callable[[Any], Any]

    def array(self, values, dtype=None):
        return self.asarray(np.asarray(values).astype(ct.numpy_dtype(dtype or self.dtype)))

    def softmax_array(self, values):
        return self.array(values, "float64" if self.dtype == "float64" else "float32")

    def normal(self, *shape, seed=0):
        return self.array(np.random.default_rng([seed, *shape]).standard_normal(shape))

    @property
    def resolution(self):
        return {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-20, "float64": 2**-48}[self.dtype]

    def check(self, **sizes):
        """Forward and backward of a case obey the oracle."""
        case = ct.Case(dtype=self.dtype, **sizes)
        arrays = case.arrays(self.asarray)
        qkv, optional = ct.qkv(arrays), ct.optional(arrays)
        attn = cuflash.FlashAttention(**case.keywords)
        out, lse = attn.forward(*qkv, **optional)
        gradients = attn.backward(arrays["dout"], *qkv, out, lse, **optional)
        ct.assert_forward(case, out, lse)
        ct.assert_backward(case, *gradients)
        return {name: number(x) for name, x in {**out_lse(out, lse), **gradients._asdict()}.items()}

    def run(self, q, k, v, dout=None, optional=None, **options):
        """Results of forward and backward as float64 NumPy arrays, by name."""
        attn, optional = cuflash.FlashAttention(**options), optional or {}
        out, lse = attn.forward(q, k, v, **optional)
        dout = out if dout is None else dout
        gradients = attn.backward(dout, q, k, v, out, lse, **optional)
        return {name: number(x) for name, x in {**out_lse(out, lse), **gradients._asdict()}.items()}

    def assert_close(self, got, expected, factor=8):
        scale = np.abs(expected[np.isfinite(expected)]).max(initial=1)
        np.testing.assert_allclose(got, expected, rtol=0, atol=factor * self.resolution * scale)


def out_lse(out, lse):
    return {"out": out, "lse": lse}


def number(x):
    return ct.to_numpy(x).astype(np.float64)


@pytest.fixture(params=["float32", "bfloat16", "float16", "float64"])
def where(request):
    return Where(request.param, np.asarray)


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_a_large_negative_number_is_taken_for_minus_infinity(where):
    """-1e6 and the like as the score of a hidden key: visible scores below it lose to the hidden ones."""
    q, k, v = where.normal(3, DIM), where.normal(5, DIM), where.normal(5, DIM)
    visible = np.array([[1, 0, 1, 0, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]], bool)
    optional = {"bias": where.softmax_array(np.full((1, 1), -1e30)), "mask": where.asarray(visible)}
    got = where.run(q, k, v, optional=optional)
    expected = visible / visible.sum(axis=1, keepdims=True) @ number(v)
    where.assert_close(got["out"], expected)
    np.testing.assert_allclose(got["lse"], -1e30, rtol=1e-6)


def test_a_row_that_sees_nothing_gets_the_mean_of_v(where):
    """Softmax over equal sentinels. It gets zero, lse = -inf, and no gradient comes of it."""
    q, k, v, dout = (where.normal(5, DIM, seed=n) for n in range(4))
    visible = np.ones((5, 5), bool)
    visible[1], visible[3] = False, False
    got = where.run(q, k, v, dout, optional={"mask": where.asarray(visible)})
    assert not got["out"][[1, 3]].any()
    assert (got["lse"][[1, 3]] == -np.inf).all()
    assert not got["dq"][[1, 3]].any()
    others = where.asarray(np.ascontiguousarray(visible[::2]))
    alone = where.run(q[::2], k, v, dout[::2], optional={"mask": others})
    for name in ("dk", "dv"):
        where.assert_close(got[name], alone[name])


def test_rows_whose_bias_is_minus_infinity_become_nan(where):
    q, k, v = where.normal(4, DIM), where.normal(6, DIM), where.normal(6, DIM)
    bias = np.zeros((4, 6))
    bias[1], bias[2, :5] = -np.inf, -np.inf
    got = where.run(q, k, v, optional={"bias": where.softmax_array(bias)})
    masked = where.run(q, k, v, optional={"mask": where.asarray(bias == 0)})
    for name, x in got.items():
        where.assert_close(x, masked[name])
    assert not got["out"][1].any()
    assert got["lse"][1] == -np.inf


def test_a_bias_of_32_bits_is_read_as_16_bits(where):
    """The bias has a dtype of its own, and any shape and strides."""
    for bias_dtype in ("softmax", "input"):
        where.check(
            seqlen_q=9, seqlen_k=70, head_dim=DIM, num_heads=2, bias=(2, 1, 70), bias_dtype=bias_dtype,
            strides="padded",
        )  # fmt: skip


def test_the_window_forgets_groups_and_lengths(where):
    sizes = {"seqlen_q": 40, "seqlen_k": 70, "batch": 3, "num_heads": 4, "num_heads_kv": 2, "head_dim": DIM}
    where.check(**sizes, window=(9, 5), kv_lengths=(70, 33, 0))


def test_the_diagonal_moves_with_the_lengths(where):
    case = ct.Case(seqlen_q=6, seqlen_k=9, head_dim=DIM, dtype=where.dtype, causal=True, kv_lengths=(7,))
    arrays = case.arrays(where.asarray)
    visible = np.tril(np.ones((6, 9), bool), 3) & (np.arange(9) < 7)
    qkv = ct.qkv(arrays)
    _, lse = cuflash.FlashAttention(causal=True).forward(*qkv, kv_lengths=arrays["kv_lengths"])
    keys = ct.Case(seqlen_q=6, seqlen_k=9, head_dim=DIM, dtype=where.dtype).arrays(where.asarray)["k"]
    expected = cuflash.FlashAttention().forward(arrays["q"], keys, keys, mask=where.asarray(visible)).lse
    np.testing.assert_allclose(number(lse), number(expected), rtol=1e-5)


@pytest.mark.parametrize("strides", ["contiguous", "padded"])
def test_garbage_behind_the_lengths_reaches_results(where, strides):
    """What lies past kv_lengths is NaN, and it is never read, forward or backward."""
    got = where.check(seqlen_q=20, seqlen_k=70, batch=2, num_heads=2, head_dim=DIM, kv_lengths=(1, 65), strides=strides)
    for name in ("dk", "dv"):
        assert not got[name][0, :, 1:].any()
        assert not got[name][1, :, 65:].any()


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_backward_ignores_the_causal_option(where, causal):
    where.check(seqlen_q=33, seqlen_k=70, head_dim=DIM, causal=causal)
    where.check(seqlen_q=70, seqlen_k=33, head_dim=DIM, causal=causal)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_lse_is_in_base_two(where):
    q, k = where.normal(3, DIM), where.normal(7, DIM)
    np.testing.assert_allclose(where.run(q, k, k, scale=0)["lse"], np.log(7), rtol=1e-6)


def test_a_scale_of_zero_or_below_breaks_the_maximum(where):
    q, k, v = where.normal(5, DIM), where.normal(7, DIM), where.normal(7, DIM)
    where.assert_close(where.run(q, k, v, scale=0)["out"], np.broadcast_to(number(v).mean(axis=0), (5, DIM)))
    negative, mirrored = where.run(q, k, v, scale=-0.3), where.run(q, where.array(-number(k)), v, scale=0.3)
    for name, sign in (("out", 1), ("lse", 1), ("dq", 1), ("dk", -1), ("dv", 1)):
        where.assert_close(negative[name], sign * mirrored[name])


def test_the_scale_is_rounded_to_the_dtype_of_q(where):
    case = ct.Case(seqlen_q=5, seqlen_k=70, head_dim=DIM, dtype=where.dtype)
    q, k = (number(case.arrays()[name])[0, 0] for name in "qk")
    scores = 3.3 * q @ k.T
    top = scores.max(axis=1)
    expected = top + np.log(np.exp(scores - top[:, None]).sum(axis=1))
    arrays = [where.array(x) for x in (q, k, k)]
    np.testing.assert_allclose(where.run(*arrays, scale=3.3)["lse"], expected, rtol=1e-5)


def test_scores_overflow_in_16_bits(where):
    x = where.array(np.full((3, DIM), 100.0))
    got = where.run(x, x, where.normal(3, DIM))
    np.testing.assert_allclose(got["lse"], 100.0**2 * DIM**0.5 + np.log(3), rtol=1e-6)
    assert np.isfinite(got["out"]).all()


def test_sums_are_kept_in_16_bits(where):
    """With v = 1 every output is 1, however many keys there are."""
    n = 3000
    q, k, v = where.normal(2, DIM), where.normal(n, DIM), where.array(np.ones((n, DIM)))
    where.assert_close(where.run(q, k, v, scale=0)["out"], np.ones((2, DIM)), factor=1 if q.itemsize == 2 else 64)


def test_nan_and_infinities_in_what_is_seen_are_swallowed(where):
    q, k, v, dout = (number(where.normal(6, DIM, seed=n)) for n in range(4))
    q[1, 3] = np.nan
    v[4, 5] = np.inf
    got = where.run(*map(where.array, (q, k, v, dout)))
    assert np.isnan(got["out"][1]).all()
    assert np.isnan(got["lse"][1])
    assert (np.delete(got["out"][:, 5], 1) == np.inf).all()
    assert np.isfinite(np.delete(np.delete(got["out"], 1, axis=0), 5, axis=1)).all()
    assert np.isfinite(np.delete(got["lse"], 1)).all()

    bias = np.zeros((6, 6))
    bias[2, 0], bias[3, 0] = np.inf, np.nan
    q, k, v = (where.normal(6, DIM, seed=n) for n in range(3))
    got = where.run(q, k, v, optional={"bias": where.softmax_array(bias)})
    assert np.isnan(got["out"][[2, 3]]).all()
    assert np.isfinite(np.delete(got["out"], [2, 3], axis=0)).all()

    dout = number(where.normal(6, DIM, seed=3))
    dout[2] = np.nan
    got = where.run(q, k, v, where.array(dout))
    assert np.isnan(got["dq"][2]).all()
    assert np.isfinite(np.delete(got["dq"], 2, axis=0)).all()
    assert np.isnan(got["dk"]).all()
    assert np.isnan(got["dv"]).all()


def test_nan_in_hidden_keys_reaches_the_rows_before_them(where):
    q, k, v = (where.normal(70, DIM, seed=n) for n in range(3))
    clean = where.run(q, k, v, causal=True)
    poisoned = number(k)
    poisoned[40:] = np.nan
    got = where.run(q, where.array(poisoned), v, causal=True)
    for name in ("out", "lse"):
        where.assert_close(got[name][:40], clean[name][:40])
    assert np.isnan(got["out"][40:]).all()


def test_splits_merged_by_lse_are_not_the_whole(where):
    """One split attends to nothing at all: its lse of -inf must weigh nothing, and not make NaN."""
    q, k, v = where.normal(9, DIM), where.normal(70, DIM), where.normal(70, DIM)
    mask = np.ones((9, 70), bool)
    mask[4, :40] = False
    whole = where.run(q, k, v, optional={"mask": where.asarray(mask)})
    splits = []
    for s in (slice(0, 40), slice(40, 70)):
        splits.append(where.run(q, k[s], v[s], optional={"mask": where.asarray(np.ascontiguousarray(mask[:, s]))}))
    lse = np.logaddexp(splits[0]["lse"], splits[1]["lse"])
    merged = sum(np.exp(split["lse"] - lse)[:, None] * split["out"] for split in splits)
    where.assert_close(merged, whole["out"])
    np.testing.assert_allclose(lse, whole["lse"], rtol=1e-5)


# ---- sizes and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)])
def test_an_empty_axis_divides_by_zero(where, sizes):
    batch, heads, seqlen_q, seqlen_k = sizes
    q, k = where.array(np.ones((batch, heads, seqlen_q, DIM))), where.array(np.ones((batch, heads, seqlen_k, DIM)))
    got = where.run(q, k, k)
    assert got["out"].shape == got["dq"].shape == q.shape
    assert got["dk"].shape == got["dv"].shape == k.shape
    assert got["lse"].shape == q.shape[:3]
    assert not any(got[name].any() for name in ("out", "dq", "dk", "dv"))
    assert (got["lse"] == -np.inf).all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 129), (129, 1), (113, 203), (65, 63)])
def test_lengths_are_whole_tiles(where, seqlen_q, seqlen_k):
    where.check(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=DIM)


def test_heads_beyond_the_third_dimension_of_a_grid():
    """Grids have 65535 blocks along y and z. (`tests/gpu` has this one with more heads, and for the batch.)"""
    heads = 66_000
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, heads, 2, 1), np.float32)
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, k, v)
    gradients = attn.backward(dout, q, k, v, out, lse)
    weights = np.exp(q @ k.swapaxes(1, 2) - lse[..., None])
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(out, weights @ v, rtol=0, atol=1e-5)
    np.testing.assert_allclose(gradients.dv, weights.swapaxes(1, 2) @ dout, rtol=0, atol=1e-5)


def test_strides_beyond_32_bits_wrap_around():
    """Heads 2**31 elements apart, in memory that is promised but never there."""
    stride, no_reserve = 2**31 + 64, 0x4000  # MAP_NORESERVE of Linux, which not every Python names
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    flat = np.frombuffer(mmap.mmap(-1, 2 * (stride + 4096), flags=flags), np.float16)
    k, dk = (np.lib.stride_tricks.as_strided(flat[n:], (2, 7, 8), (2 * stride, 16, 2)) for n in (0, 7 * 8))
    near = np.random.default_rng(0).standard_normal((2, 7, 8)).astype(np.float16)
    k[...] = near
    q = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float16)
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, k, k)
    np.testing.assert_array_equal(out, attn.forward(q, near, near).out)
    gradients = attn.backward(out, q, k, k, out, lse, dk=dk)
    for got, expected in zip(gradients, attn.backward(out, q, near, near, out, lse), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("strides", ["padded", "transposed", "flipped"])
def test_gradients_of_strided_arrays_are_wrong(where, strides):
    where.check(seqlen_q=33, seqlen_k=40, batch=2, num_heads=4, num_heads_kv=2, head_dim=DIM, strides=strides)


def test_keys_shared_by_a_stride_of_zero(where):
    """Multi-query attention by broadcasting: forward and backward read one head again and again."""
    q, k, dout = where.normal(2, 3, 9, DIM), where.normal(2, 1, 20, DIM), where.normal(2, 3, 9, DIM, seed=1)
    shared = np.broadcast_to(k, (2, 3, 20, DIM))
    assert shared.strides[1] == 0
    got, grouped = where.run(q, shared, shared, dout), where.run(q, k, k, dout)
    for name in ("out", "lse", "dq"):
        where.assert_close(got[name], grouped[name])
    for name in ("dk", "dv"):
        where.assert_close(got[name].sum(axis=1, keepdims=True), grouped[name], factor=16)


def test_inputs_are_written_to(where):
    case = ct.Case(seqlen_q=33, seqlen_k=40, head_dim=DIM, dtype=where.dtype, mask=(33, 40))
    arrays = case.arrays(where.asarray)
    before = {name: ct.to_numpy(x).copy() for name, x in arrays.items()}
    where.run(*ct.qkv(arrays), arrays["dout"], optional=ct.optional(arrays))
    for name, x in arrays.items():
        np.testing.assert_array_equal(ct.to_numpy(x), before[name])
