"""Scores of large size: the weights that a backward pass uses sum to 1, as those of the forward pass do.

One float for lse = row_max + log(row_sum) loses log(row_sum) where row_max is large, as where a finite mask of -1e9
stands on all keys of a row.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.arrays.array_info import numpy_dtype
from tests.sampling import examples
from tests.ways import FALLBACK

PATHS = (FALLBACK,)  # the ways in which NumPy arrays are computed that hold to this, of those in tests/ways.py
every_path = pytest.mark.parametrize("way", PATHS, indirect=True)
pytestmark = pytest.mark.usefixtures("way")

LEVELS = (-1e4, -1e5, -1e6, -1e7, -1e8, -1e9, -1e30, float(np.finfo(np.float32).min), 1e6, 1e9)
# Of the sum of the weights of a row: of lse below 128 and of the weights, and of what 16-bit results round.
TOLERANCE = {"float32": 2.0**-16, "float64": 2.0**-44, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def with_level(s, i, j, *, level):
    return s + level[i, j]


@st.composite
def problems(draw):
    """(FlashAttention, arrays by name, arrays of scores, seed and offset, rows with keys): large scores."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    dtype, random = pick(*TOLERANCE), np.random.default_rng(draw(st.integers(0, 2**16)))
    real = "float64" if dtype == "float64" else "float32"
    way = pick("bias", "function", "size", "slopes", "cap")
    is_packed = way not in ("bias", "function") and draw(st.booleans())
    batch, group, heads_kv = 1 if is_packed else pick(1, 2), pick(1, 3), pick(1, 2)
    rows, keys, dim = pick(1, 5, 40, 150), pick(1, 2, 7, 64, 300), pick(4, 16)
    heads = group * heads_kv
    size = 100.0 if way in ("size", "cap") else 1.0
    arrays = {
        name: (size * random.standard_normal((batch, n, length, dim))).astype(numpy_dtype(dtype))
        for name, n, length in (("q", heads, rows), ("k", heads_kv, keys), ("v", heads_kv, keys))
    }
    arrays["q"][..., 0] = 1  # so that the sum of dk over keys is a sum of weights
    options: dict[str, Any] = {"scale": 1.0} if way in ("size", "cap") else {}
    optional: dict[str, Any] = {}
    level = np.where(random.random((rows, keys)) < pick(1.0, 0.5), pick(*LEVELS), 0).astype(real)
    if way == "bias":
        optional["bias"] = level if draw(st.booleans()) else level[:1]
    elif way == "function":
        options["score"], optional["level"] = with_level, level
    elif way == "slopes":
        optional["alibi_slopes"] = random.choice([1e3, -1e6, 1e9], heads).astype(real)
    elif way == "cap":
        options["softcap"] = pick(500.0, 60000.0)
    if draw(st.booleans()):
        optional["sinks"] = (random.standard_normal(heads) + pick(0.0, *LEVELS)).astype(real)
    options["causal"] = pick(False, "top_left")
    options["dropout"] = pick(0.0, 0.5)
    rows_that_see = batch * rows
    if is_packed:
        starts = np.array([0, rows // 2, rows], np.int32), np.array([0, keys // 3, keys], np.int32)
        optional |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
        arrays = {name: x[0] for name, x in arrays.items()}
        rows_that_see = rows if keys // 3 else rows - rows // 2
    elif way != "function" and draw(st.booleans()):
        lengths = optional["kv_lengths"] = random.integers(0, keys + 1, batch)
        rows_that_see = rows * int((lengths > 0).sum())
    attn = cuflash.FlashAttention(**options)
    return attn, arrays, optional, {"seed": 3, "offset": 4} if options["dropout"] else {}, rows_that_see


@every_path
@settings(max_examples=examples(150))
@given(problems())
def test_weights_of_a_row_sum_to_one(problem):
    attn, arrays, optional, random, rows = problem
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    dtype, group = q.dtype.name, q.shape[-3] // k.shape[-3]
    out, lse = attn.forward(q, k, v, **optional, **random)
    sinks = 0 if "sinks" not in optional else 1

    def gradients(dout, need, **more):
        need = (*need, *("dsinks",) * sinks)
        return attn.backward(dout, q, k, v, out, lse, **optional, **random, **more, need=need)._asdict()

    # The derivative of lse by a score is the weight: sums over the rows of each key/value head.
    of_lse = gradients(np.zeros_like(out), ("dk", "dv"), dlse=np.ones_like(lse))
    of_sinks = of_lse["dsinks"].reshape(-1, group).sum(axis=1) if sinks else 0
    if sinks:  # a row that attends to no key has the sink
        rows = lse.size // q.shape[-3]
    slope_is_one, found = attn.options.softcap is None, {}
    if slope_is_one:
        scale = attn.options.scale or q.shape[-1] ** -0.5
        found["dk"] = of_lse["dk"][..., 0].astype(float).sum(axis=-1) / scale
    if not random:
        found["dv"] = gradients(np.ones_like(out), ("dv",))["dv"][..., 0].astype(float).sum(axis=-1)
    for name, x in found.items():
        sums = (x.sum(axis=0) if x.ndim == 2 else x) + of_sinks
        assert np.abs(sums / max(group * rows, 1) - bool(rows)).max() <= TOLERANCE[dtype], name


@every_path
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_large_row_leaves_the_bits_of_others_alone(dtype):
    random = np.random.default_rng(0)
    q, k, v, dout = random.standard_normal((4, 2, 150, 8)).astype(dtype)
    attn = cuflash.FlashAttention()
    dqs = []
    for level in (0.0, -1e9):
        bias = np.zeros((150, 150), dtype)
        bias[7] = level
        out, lse = attn.forward(q, k, v, bias=bias)
        dqs.append(attn.backward(dout, q, k, v, out, lse, bias=bias, need=("dq",)).dq)
    others = np.arange(150) != 7
    np.testing.assert_array_equal(dqs[0][:, others], dqs[1][:, others])
    assert np.abs(lse[:, 7]).min() > 1e8 > np.abs(lse[:, others]).max()


@every_path
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_some_of_the_keys_do_not_stand_for_all(dtype):
    """The lse of all keys goes to backward passes over some of them; then weights sum to their fraction."""
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, 1, 60, 8)).astype(dtype)
    bias = np.full((60, 60), -1e4, dtype)
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, k, v, bias=bias)
    sums = []
    for keys in (slice(0, 20), slice(20, 60)):
        own = (q, k[:, keys], v[:, keys], out, lse)
        (dv,) = attn.backward(np.ones_like(out), *own, bias=bias[:, keys], need=("dv",))
        sums.append(dv[0, :, 0].sum() / 60)
    assert abs(sum(sums) - 1) < np.spacing(np.array(1e4, dtype)) and 0.2 < sums[0] < 0.5
