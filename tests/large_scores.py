"""Scores that are large: what both passes have to keep of them, on any backend.

A backend is a function `(options, arrays, need) -> (out, lse, gradients by name)` for NumPy arrays by name, `dout`
among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash import FlashAttention
from cuflash.arrays.array_info import numpy_dtype
from cuflash.spec.options import Options
from cuflash.spec.problem import make_problem
from tests.judging import assert_within

Backend = Callable[[Options, dict[str, Any], tuple[str, ...]], tuple[Any, Any, Mapping[str, Any]]]

# Values of a finite mask, up to the lowest number of float32.
MASKED = (-1e4, -1e6, -1e7, -1e9, -2.5e38, float(np.finfo(np.float32).min))
# How far a sum of weights may be from 1: rounding of weights and of dv to the dtype, and sums of exponentials.
ROUNDED = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-19, "float64": 2.0**-47}


def eps_of(dtype: str) -> float:
    return float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Large:
    """A problem with large scores.

    Parameters
    ----------
    bias : float
        Of all keys of every second query, or of the last query of the last head, or of every third key.
    spread : float
        Standard deviation of the scaled products.
    """

    dtype: str = "float32"
    seqlen_q: int = 70
    seqlen_k: int = 150
    heads: int = 2
    heads_kv: int = 1
    head_dim: int = 32
    bias: float | None = None
    of: str = "queries"
    spread: float = 1.0
    inputs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        return repr(self)

    @property
    def attention(self) -> FlashAttention:
        return FlashAttention(**self.options)

    def arrays(self) -> dict[str, Any]:
        random = np.random.default_rng(self.seed)
        dtype = numpy_dtype(self.dtype)
        wide = np.float64 if self.dtype == "float64" else np.float32
        factor = np.sqrt(self.spread)
        q = random.standard_normal((1, self.heads, self.seqlen_q, self.head_dim)) * factor
        k = random.standard_normal((1, self.heads_kv, self.seqlen_k, self.head_dim)) * factor
        v = random.standard_normal((1, self.heads_kv, self.seqlen_k, self.head_dim))
        arrays = {name: x.astype(dtype) for name, x in (("q", q), ("k", k), ("v", v))}
        if self.bias is not None:
            bias = random.standard_normal((1, self.heads, self.seqlen_q, self.seqlen_k))
            if self.of == "queries":
                bias[..., ::2, :] = self.bias
            elif self.of == "last query":
                bias[:, -1, -1] = self.bias
            else:
                bias[..., ::3] = self.bias
            arrays["bias"] = bias.astype(wide)
        if "bias of keys" in self.inputs:
            arrays["bias"] = np.full((1, 1, 1, self.seqlen_k), self.bias or 0.0, wide)
        if "mask of keys" in self.inputs:
            arrays["mask"] = random.random((1, 1, 1, self.seqlen_k)) < 0.8
        if "mask" in self.inputs:
            arrays["mask"] = random.random((1, 1, self.seqlen_q, self.seqlen_k)) < 0.8
        if "slopes" in self.inputs:
            arrays["alibi_slopes"] = np.geomspace(0.5, 100.0, self.heads).astype(wide)
        if "sinks" in self.inputs:
            arrays["sinks"] = np.full(self.heads, self.bias or 1.0, wide)
        if "lengths" in self.inputs:
            arrays["kv_lengths"] = np.array([self.seqlen_k * 2 // 3])
        arrays["dout"] = np.ones((1, self.heads, self.seqlen_q, self.head_dim), dtype)
        return arrays

    def judge(self, arrays: dict[str, Any], **results: Any) -> dict[str, ct.Yardstick]:
        """Hold results for these arrays to the oracle rule; returns what it says of each."""
        others = {name: x for name, x in arrays.items() if name not in ("q", "k", "v", "dout")}
        rule = ct.yardsticks(make_problem(self.attention.options, *ct.qkv(arrays), **others), arrays)
        assert_within(results, rule)
        return rule


def check_sums_of_weights(large: Large, backend: Backend) -> None:
    """The weights of a row sum to one in the backward pass: dv of dout = 1 has all of them."""
    arrays = large.arrays()
    _, lse, gradients = backend(large.attention.options, arrays, ("dv",))
    lse = np.asarray(lse, np.float64)
    attends = lse != -np.inf
    assert np.isfinite(lse[attends]).all()
    of_keys = np.asarray(gradients["dv"], np.float64)[..., 0].sum(axis=-1)
    rows = attends.sum(axis=-1).reshape(1, large.heads_kv, -1).sum(axis=-1)
    np.testing.assert_allclose(of_keys, rows, rtol=ROUNDED[large.dtype])


def check_sinks(dtype: str, sink: float, backend: Backend) -> None:
    """So do those of the row and of its sink, here one more key with the score that all keys have."""
    large = Large(dtype=dtype, bias=sink, inputs=("bias of keys", "sinks"))
    arrays = large.arrays()
    arrays["q"][...] = 0
    out, _, gradients = backend(large.attention.options, arrays, ("dv", "dsinks"))
    weight = 1 / (large.seqlen_k + 1)
    of_keys = np.asarray(gradients["dv"], np.float64)[..., 0].sum(axis=-1)
    np.testing.assert_allclose(of_keys, large.heads * large.seqlen_q * (1 - weight), rtol=ROUNDED[dtype])
    expected = -weight * np.asarray(out, np.float64).sum(axis=(0, 2, 3))
    # Rows whose lse is not large keep the rounding of lse as an error of their weights
    # (kernels/common/softmax/backward.cuh).
    rounded = 1e-5 if dtype in ("float32", "float64") else 2.0**-13
    np.testing.assert_allclose(np.asarray(gradients["dsinks"], np.float64), expected, rtol=rounded)


def check_mean(dtype: str, bias: float, backend: Backend) -> None:
    """A finite bias on all keys is no -inf, whatever it is: with equal products, out is the mean of v."""
    large = Large(dtype=dtype, bias=bias, inputs=("bias of keys",))
    arrays = large.arrays()
    arrays["q"][...] = 0
    out, lse, gradients = backend(large.attention.options, arrays, ("dv",))
    rule = large.judge(arrays, out=out, lse=lse, **gradients)
    v = np.asarray(arrays["v"], np.float64)
    np.testing.assert_allclose(rule["out"].expected - v.mean(axis=2, keepdims=True), 0, atol=1e-12)
    np.testing.assert_allclose(rule["dv"].expected, large.heads * large.seqlen_q / large.seqlen_k, rtol=1e-12)


def check_equal_scores(dtype: str, bias: float, seqlen_k: int, seed: int, backend: Backend) -> None:
    """Keys with equal scores have equal weights, in any tile: out is the fraction of each group of keys."""
    random = np.random.default_rng(seed)
    wide = np.float64 if dtype == "float64" else np.float32
    large = Large(dtype=dtype, seqlen_k=seqlen_k, heads=1)
    arrays = large.arrays()
    arrays["q"][...] = random.choice([0.5, 1.0, 2.0])
    arrays["k"][...] = 0.5
    groups = np.arange(seqlen_k) * 4 // seqlen_k  # so that each group has tiles of its own
    arrays["v"][...] = 0
    for group in range(4):
        arrays["v"][0, 0, groups == group, group] = 1
    arrays["bias"] = np.full((1, 1, large.seqlen_q, seqlen_k), bias, wide)
    out, _, _ = backend(large.attention.options, arrays, ())
    expected = large.judge(arrays, out=out)["out"].expected[0, 0, :, :4]
    fractions = np.bincount(groups, minlength=4) / seqlen_k
    np.testing.assert_allclose(expected, np.tile(fractions, (large.seqlen_q, 1)), atol=1e-12)


def check_large_products(dtype: str, seqlen_q: int, options: Mapping[str, Any], seed: int, backend: Backend) -> None:
    """Products of q and k may have any size, next to those of other rows: keys with equal ones share the weight."""
    random = np.random.default_rng(seed)
    large = Large(dtype=dtype, seqlen_q=seqlen_q, seqlen_k=300, options=options, seed=seed)
    arrays = large.arrays()
    of_rows = np.float64(2.0) ** random.choice([0, 10, 20, 24, 26, 28, 30, 33, 40, 60], seqlen_q)[:, None]
    arrays["q"] = np.where(np.abs(arrays["q"]) < 0.25, 0.25, arrays["q"])  # so that no product is subnormal
    arrays["k"] = arrays["k"][:, :, random.integers(0, 40, large.seqlen_k)]  # each about seven times, in several tiles
    if dtype == "float16":  # whose largest number is 2^16
        arrays["k"] = arrays["k"].astype(np.float64) * 2.0**12
        of_rows = np.minimum(of_rows, 2.0**12)
    for name, factor in (("q", of_rows), ("k", 1.0), ("v", 1.0)):
        arrays[name] = (arrays[name].astype(np.float64) * factor).astype(numpy_dtype(dtype))
    out, lse, _ = backend(large.attention.options, arrays, ())
    large.judge(arrays, out=out, lse=lse)


def check_hidden_nan(dtype: str, shape: tuple[int, ...], seed: int, backend: Backend, **inputs: Any) -> None:
    """A hidden pair is hidden whatever its score is: NaN and infinities of hidden keys change nothing."""
    random = np.random.default_rng(seed)
    seqlen_q = 64 if shape[2] == 1 else shape[2]
    large = Large(dtype=dtype, seqlen_q=seqlen_q, seqlen_k=shape[3], heads=shape[1], heads_kv=shape[1])
    arrays = large.arrays() | inputs
    keys = random.random(shape[3]) < 0.3  # hidden from all queries
    mask = random.random(shape) < 0.8
    mask[..., keys] = False
    arrays["mask"] = mask
    plain = backend(large.attention.options, dict(arrays), ())
    ends = random.choice([np.nan, np.inf, -np.inf], (int(keys.sum()), large.head_dim))
    arrays["k"] = arrays["k"].copy()
    arrays["k"][:, :, keys] = ends.astype(arrays["k"].dtype)
    hidden = backend(large.attention.options, arrays, ())
    for a, b in zip(plain[:2], hidden[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def check_ends_of_range(dtype: str, backend: Backend) -> None:
    """Powers of two pass through: up to where weighted sums overflow, and down to where partial sums are subnormal."""
    large = Large(dtype=dtype)
    arrays, limits = large.arrays(), ml_dtypes.finfo(numpy_dtype(dtype))
    weight = 2.0**32 if dtype == "bfloat16" else 1.0  # the largest sum of a tile before the division by their sum
    most = int(np.log2(float(limits.max) / weight / large.seqlen_k / np.abs(arrays["v"]).max().astype(np.float64)))
    least = -100 if dtype in ("float32", "bfloat16") else int(np.log2(float(limits.smallest_normal))) // 2
    smallest = float(limits.smallest_subnormal)
    plain, plain_lse, _ = backend(large.attention.options, arrays, ())
    for power in (most, least):
        factor = np.float64(2.0) ** power
        v = (arrays["v"].astype(np.float64) * factor).astype(arrays["v"].dtype)
        out, lse, _ = backend(large.attention.options, arrays | {"v": v}, ())
        expected = np.asarray(plain, np.float64) * factor
        np.testing.assert_allclose(
            np.asarray(out, np.float64), expected, rtol=2 * eps_of(dtype), atol=smallest * max(factor, 1)
        )
        np.testing.assert_array_equal(np.asarray(lse), np.asarray(plain_lse))
    factor = np.float64(2.0) ** (-least // 2)
    q = (arrays["q"].astype(np.float64) / factor).astype(arrays["q"].dtype)
    k = (arrays["k"].astype(np.float64) * factor).astype(arrays["k"].dtype)
    _, lse, _ = backend(large.attention.options, arrays | {"q": q, "k": k}, ())
    np.testing.assert_allclose(np.asarray(lse, np.float64), np.asarray(plain_lse, np.float64), rtol=2.0**-20)


larges = st.builds(
    Large,
    seqlen_q=st.integers(1, 140),
    seqlen_k=st.integers(1, 300),
    head_dim=st.sampled_from([8, 32, 40, 64]),
    bias=st.none() | st.sampled_from(MASKED),
    of=st.sampled_from(["queries", "last query", "keys"]),
    spread=st.sampled_from([1.0, 1.0, 1e3, 1e5]),
    inputs=st.lists(st.sampled_from(["mask of keys", "mask", "slopes", "lengths"]), max_size=2, unique=True)
    .filter(lambda inputs: len({"mask", "mask of keys"} & {*inputs}) < 2)
    .map(tuple),
    options=st.sampled_from(
        [{}, {"causal": True}, {"window": (30, None)}, {"softcap": 60.0}, {"softcap": 2.0**14}, {"deterministic": True}]
    ),
    seed=st.integers(0, 2**16),
)
