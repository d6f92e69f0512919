"""The forward kernel of fp8 q, k and v, run on the CPU, against the oracle of what the numbers are."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan.sm90.tiles import FORWARD_FLOAT8_SM90_TILES
from cuflash.testing.float8 import ROUNDING_BY_LINE, assert_float8
from tests.emulate import attention
from tests.sampling import examples

CASE = ct.Case(
    seqlen_q=200,
    seqlen_k=300,
    num_heads=2,
    num_heads_kv=1,
    head_dim=64,
    dtype="bfloat16",
    kv_dtype="float8_e4m3fn",
    q_float8=True,
    q_scale="token",
    k_scale="head",
    v_scale="head",
    causal=True,
    seed=2,
)
PLAIN = replace(CASE, causal=False, head_dim=128, q_scale="head")
OF_POOL: dict[str, Any] = {"batch": 2, "k_scale": None, "v_scale": "tensor"}  # pages that a tile has several of
# Name -> tile, case.
CASES = {
    "d 64, full": (0, replace(CASE, causal=False)),
    "d 64": (1, CASE),
    "d 128, causal": (2, replace(CASE, head_dim=128, batch=2, kv_lengths=(130, 0), sinks=True)),
    "d 128": (3, replace(PLAIN, head_dim_v=96, layout="bshd", window=(None, 90))),
    "d 128, blocks": (4, replace(PLAIN, kv_dtype="float8_e5m2", k_scale="block", v_scale="block", scale_block=64)),
    "d 256": (5, replace(CASE, head_dim=256, seqlen_q=130, num_heads_kv=2, window=(140, 3))),
    "d 256, blocks": (6, replace(PLAIN, head_dim=192, head_dim_v=256, v_scale="block", scale_block=128)),
    "narrow": (1, replace(CASE, head_dim=48, head_dim_v=32, scale=-0.3, k_scale=None)),
    "pages": (1, replace(CASE, **OF_POOL, page_size=16, seqlen_k=304, kv_lengths=(200, 275), head_dim=48)),
    "pages, blocks": (
        4,
        replace(PLAIN, batch=2, page_size=128, seqlen_k=384, kv_lengths=(300, 5), v_scale="block", scale_block=64),
    ),
    "pages, many to a tile": (
        3,
        replace(PLAIN, **OF_POOL, page_size=64, seqlen_k=384, kv_lengths=(300, 5), causal=True),
    ),
    "block mask": (3, replace(PLAIN, seqlen_k=600, block_mask=(1, 2), block_size=(192, 128))),
}


def run(case, tile, **options):
    arrays = case.arrays()
    problem = attention.problem_of(case, arrays)
    return attention.forward(problem, arrays, tiles=(tile,), arch="9.0", **options)


@pytest.mark.parametrize(("row", "case"), CASES.values(), ids=CASES)
def test_oracle(row, case):
    assert_float8(case, *run(case, FORWARD_FLOAT8_SM90_TILES[row]))


@settings(max_examples=examples(10))
@given(
    st.sampled_from([tile for tile in FORWARD_FLOAT8_SM90_TILES if tile.max_dim <= 128]),
    st.integers(1, 260),
    st.integers(1, 400),
    st.sampled_from((1.0, 6.0)),
    st.sampled_from((None, "head", "token")),
    st.sampled_from((None, 0.0, -0.25)),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_lengths(tile, seqlen_q, seqlen_k, spread, q_scale, scale, causal, seed):
    """Scores of a large spread let weights outgrow their offsets."""
    of_scores: dict[str, Any] = {"score_spread": spread, "q_scale": q_scale, "scale": scale, "causal": causal}
    case = replace(CASE, seqlen_q=seqlen_q, seqlen_k=seqlen_k, seed=seed, **of_scores)
    assert_float8(case, *run(case, tile))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules_agree(schedule):
    case = replace(CASE, seqlen_q=150, seqlen_k=260)
    tile = FORWARD_FLOAT8_SM90_TILES[2].changed(max_dim=64)
    expected = run(case, tile)
    for got, x in zip(run(case, tile, schedule=schedule), expected, strict=True):
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize(("first", "more"), [(4, 12), (2, 8), (0, 1)])
def test_out_of_any_alignment(first, more):
    """Rows of out begin at column `first` of rows that are `more` columns wider."""
    case = replace(CASE, seqlen_q=65, seqlen_k=64)

    def allocate(array):
        if array.dtype.name != "bfloat16":
            return array.copy()
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + more), array.dtype)
        return wide[..., first : first + array.shape[-1]]

    assert_float8(case, *run(case, FORWARD_FLOAT8_SM90_TILES[1], allocate=allocate, sanitizer="undefined"))


def test_out_is_a_mean_of_values():
    """Weights that round alike do not move it: where all values are equal, out is that value."""
    case = replace(PLAIN, seqlen_q=64, seqlen_k=1000, score_spread=0.1, num_heads=1, v_scale=None)
    arrays = case.arrays()
    arrays["v"][...] = arrays["v"][..., :1, :]
    arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    problem = attention.problem_of(case, arrays)
    out, _ = attention.forward(problem, arrays, tiles=(FORWARD_FLOAT8_SM90_TILES[3],), arch="9.0")
    value = arrays["v"][..., :1, :].astype(np.float32)
    np.testing.assert_allclose(
        out.astype(np.float32), np.broadcast_to(value, out.shape), rtol=1e-3 + 2.0**-8, atol=1e-6
    )


def forward_of_codes(case, codes):
    """The forward pass of a case with other fp8 numbers: of the arrays' names, what `codes` makes of each."""
    arrays = case.arrays()
    for name, array in codes.items():
        arrays[name] = array(arrays[name])
    problem = attention.problem_of(case, arrays)
    return arrays, *attention.forward(problem, arrays, tiles=(FORWARD_FLOAT8_SM90_TILES[1],), arch="9.0")


@pytest.mark.parametrize("distance", [24, 32, 44, 64, 448])
def test_scores_far_from_each_other(distance):
    """Exponents from 9 000 to 160 000 below the largest are those of weights of 0."""
    case = replace(CASE, seqlen_q=64, num_heads=1, q_scale=None, k_scale=None, v_scale=None, causal=False, scale=0.125)

    def of_one_sign(k):
        signs = np.where(np.arange(k.shape[-2]) % 3 == 0, 1.0, -1.0)[:, None]
        return np.broadcast_to(distance * signs, k.shape).astype(k.dtype)

    codes = {"q": lambda q: np.full_like(q, 16), "k": of_one_sign}
    arrays, out, _ = forward_of_codes(case, codes)
    values = arrays["v"].astype(np.float32)
    expected = np.broadcast_to(values[..., ::3, :].mean(axis=-2, keepdims=True), out.shape)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=2.0**-8, atol=1e-3 * abs(values).max())


@pytest.mark.parametrize("scale", [0.2, -0.2])
def test_products_of_one_sign(scale):
    """Below 0, a scale makes the smallest product the largest exponent; where all are positive, they are far apart."""
    case = replace(CASE, seqlen_q=64, seqlen_k=256, num_heads=1, q_scale=None, k_scale=None, v_scale=None)
    case = replace(case, causal=False, scale=scale)
    arrays, out, lse = forward_of_codes(case, {"q": np.abs, "k": np.abs})
    q, k, v = (arrays[name].astype(np.float64)[0, 0] for name in "qkv")
    scores = scale * q @ k.T
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    sums = weights.sum(axis=-1, keepdims=True)
    # An error of 1 / 12 of every weight moves the mean by that fraction of the values' sizes, and the sum, too.
    allowed = (2 * ROUNDING_BY_LINE * weights @ abs(v)) / sums + 2.0**-8 * abs(weights @ v) / sums
    assert (abs(out[0, 0].astype(np.float64) - weights @ v / sums) <= allowed).all()
    np.testing.assert_allclose(lse[0, 0], (largest + np.log(sums))[:, 0], atol=ROUNDING_BY_LINE)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("name", ["q", "k"])
def test_rows_of_nan(name, code):
    """A row attends to a NaN: so it is NaN, whatever its sign, and no other row has."""

    def with_nan(x):
        x.view(np.uint8)[..., 70, 5] = code
        return x

    case = replace(CASE, num_heads=1, causal=True, seqlen_k=200)
    _, out, _ = forward_of_codes(case, {name: with_nan})
    rows = np.arange(200)
    is_nan = rows == 70 if name == "q" else rows >= 70
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)).all(axis=-1)[0, 0], is_nan)
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)).any(axis=-1)[0, 0], is_nan)
