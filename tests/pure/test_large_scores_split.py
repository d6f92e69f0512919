"""Rows of large lse over ranks and over streamed keys: a rounded lse does not say what a shard of the keys weighs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.arrays.array_info import numpy_dtype
from cuflash.spec import row_sums
from tests import ranks as of_ranks
from tests.features.test_ranks_on_backends import DRAWN
from tests.pure.test_streamed import chunks_for
from tests.ranks import Whole, judge
from tests.sampling import examples
from tests.scored import Scored
from tests.streams import ON_CPU, through
from tests.ways import every_way

pytestmark = [every_way, pytest.mark.usefixtures("way")]

MASKED = (-1e4, -1e9, float(np.finfo(np.float32).min))
# Of the sum of weights of a row whose scores are equal: rounding of weights and of results.
ROUNDED = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-18, "float64": 2.0**-46}
dtypes = pytest.mark.parametrize("dtype", ROUNDED)


@settings(max_examples=examples(15), deadline=None)
@given(st.data(), DRAWN["large batch axes"].cases)
def test_batch_axes_keep_the_oracle_rule(data, case):
    judge(case, ON_CPU.results(case, chunks_for(data, case)))


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), case=DRAWN["large"].cases, has_device=st.booleans())
def test_streamed_keys_keep_the_oracle_rule(data, case, has_device):
    with through({"late": True, "pinned": False} if has_device else None):
        judge(case, ON_CPU.results(case, chunks_for(data, case)))


def equal_scores(dtype: str, level: float, sinks: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of rows whose scores are all equal, and their bias and sinks."""
    random, wide = np.random.default_rng(0), np.float64 if dtype == "float64" else np.float32
    arrays = {
        name: random.standard_normal((1, heads, length, 16)).astype(numpy_dtype(dtype))
        for name, heads, length in (("q", 2, 50), ("k", 1, 130), ("v", 1, 130))
    }
    arrays["q"][...] = 0
    optional: dict[str, Any] = {"bias": np.full((1, 1, 1, 130), level, wide)}
    if sinks:
        optional["sinks"] = np.full(2, level, wide)
    return arrays, optional


def check_equal_scores(dtype: str, arrays: dict[str, Any], results: dict[str, Any], keys: int) -> None:
    """out is the mean of v over so many keys, of which a sink has no value, and weights of backward are alike."""
    close = ROUNDED[dtype]
    expected = arrays["v"].astype(np.float64).sum(axis=2, keepdims=True) / keys
    np.testing.assert_allclose(results["out"].astype(np.float64), np.broadcast_to(expected, (1, 2, 50, 16)), atol=close)
    np.testing.assert_allclose(results["dv"].astype(np.float64), 100 / keys, rtol=close)


@dtypes
@pytest.mark.one_of("ranks")
@pytest.mark.parametrize("level", MASKED)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_scores_have_equal_weights_on_all_ranks(dtype, level, sinks, ranks):
    arrays, optional = equal_scores(dtype, level, sinks)
    arrays |= {"dout": np.ones_like(arrays["q"])}
    case = ct.Case(seqlen_q=50, seqlen_k=130, num_heads=2, num_heads_kv=1, head_dim=16, dtype=dtype)
    whole = Whole(case.problem, arrays | optional, {}, {})
    need = ("dq", "dk", "dv", *(["dsinks"] if sinks else []))
    results = of_ranks.results_of(whole, cd.zigzag(50, ranks), cd.zigzag(130, ranks), need=need)
    check_equal_scores(dtype, arrays, results, 130 + sinks)
    if sinks:
        expected = -results["out"].astype(np.float64).sum(axis=(0, 2, 3)) / 131
        np.testing.assert_allclose(results["dsinks"].astype(np.float64), expected, rtol=max(ROUNDED[dtype], 1e-5))


@dtypes
@pytest.mark.parametrize("level", MASKED)
@pytest.mark.parametrize("sinks", [False, True])
def test_equal_scores_have_equal_weights_in_all_chunks(dtype, level, sinks):
    arrays, optional = equal_scores(dtype, level, sinks)
    q, k, v = ct.qkv(arrays)
    keys, attn = cuflash.streamed(k, v, chunk=40), cuflash.FlashAttention()
    out, lse = attn.forward(q, *keys, **optional)
    dv = attn.backward(np.ones_like(out), q, *keys, out, lse, **optional, need=("dv",)).dv
    check_equal_scores(dtype, arrays, {"out": out, "dv": dv}, 130 + sinks)


@dtypes
@pytest.mark.parametrize("level", MASKED)
def test_equal_scores_have_equal_weights_in_decode(dtype, level):
    arrays, optional = equal_scores(dtype, level)
    case = ct.Case(seqlen_q=50, seqlen_k=130, num_heads=2, num_heads_kv=1, head_dim=16, dtype=dtype)
    whole = Whole(case.problem, arrays | optional, {}, {})
    (found,) = of_ranks.ON_CPU.decoded([whole], cd.contiguous(130, 3))
    expected = arrays["v"].astype(np.float64).mean(axis=2, keepdims=True)
    out = found["out"].astype(np.float64)
    np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), atol=ROUNDED[dtype])
    np.testing.assert_allclose(found["lse"], level + np.log(130), rtol=2.0**-22)


@settings(max_examples=examples(20), deadline=None)
@given(
    level=st.sampled_from([-5e3, -130.0, 200.0, 3e3]),
    cut=st.integers(1, 63),
    chunk=st.sampled_from([16, 48]),
    seed=st.integers(0, 2**16),
)
def test_gradients_of_some_keys_by_the_lse_of_all(level, cut, chunk, seed):
    """Gradients of slices of the keys, which add up to those of all: out and lse are merged, of more keys than a call
    has."""
    rng = np.random.default_rng(seed)
    q, k, v, dout = rng.standard_normal((4, 2, 64, 8))
    bias, dsums, attn = rng.standard_normal((1, 64)) + level, rng.standard_normal((2, 64)), cuflash.FlashAttention()
    out, lse = attn.forward(q, k, v, bias=bias)
    expected = attn.backward(dout, q, k, v, out, lse, bias=bias)
    of_sums = attn.column_sums_backward(dsums, q, k, lse, bias=bias)
    slices = [slice(0, cut), slice(cut, 64)]

    def streamed(keys):
        own = cuflash.streamed(k[:, keys], v[:, keys], chunk=chunk)
        found = attn.backward(dout, q, *own, out, lse, bias=bias[:, keys])
        return found, attn.column_sums_backward(dsums[:, keys], q, own, lse, bias=bias[:, keys])

    def over_ranks(keys):
        split_q, split_k = cd.zigzag(64, 2), cd.contiguous(keys.stop - keys.start, 2)

        def work(comm):
            own_q, own_dout, own_out = (split_q.part(x, comm.rank) for x in (q, dout, out))
            own_k, own_v = (split_k.part(x[:, keys], comm.rank) for x in (k, v))
            own_lse, own = split_q.part(lse, comm.rank, -1), split_k.part(dsums[:, keys], comm.rank, -1)
            ranks = cd.ContextParallel(comm, split=split_q, split_k=split_k)
            found = ranks.backward(own_dout, own_q, own_k, own_v, own_out, own_lse, bias=bias[:, keys])
            return found, ranks.column_sums_backward(own, own_q, own_k, own_lse, bias=bias[:, keys])

        found, sums = zip(*of_ranks.on_threads(2, work), strict=True)
        return [
            [split.whole(x) for split, x in zip((split_q, split_k, split_k), zip(*by_rank, strict=True), strict=False)]
            for by_rank in (found, sums)
        ]

    for compute in (streamed, over_ranks):
        for parts, whole in zip(zip(*map(compute, slices), strict=True), (expected, of_sums), strict=True):
            dq, *of_keys = zip(*parts, strict=True)
            np.testing.assert_allclose(sum(dq), whole[0], rtol=0, atol=1e-9)
            for own, x in zip(of_keys, whole[1:], strict=True):
                np.testing.assert_allclose(np.concatenate(own, axis=1), x, rtol=0, atol=1e-9)


def with_level(s, i, j, *, level):
    return s + level[i, j]


@pytest.mark.parametrize("rows", [8, 200])  # few pairs are computed otherwise
def test_functions_give_equal_weights_over_ranks(rows):
    arrays, _ = equal_scores("float32", 0)
    arrays = {name: np.resize(x, (1, x.shape[1], rows, 16)) for name, x in arrays.items()}
    arrays["level"] = np.full((rows, rows), -1e9, np.float32)
    arrays["dout"] = np.ones_like(arrays["q"])
    case = Scored(cuflash.FlashAttention(score=with_level), arrays, {}, "")
    found = of_ranks.results_of(case, *[cd.contiguous(rows, 2)] * 2, need=("dv",))
    expected = np.broadcast_to(arrays["v"].mean(axis=2, keepdims=True), found["out"].shape)
    np.testing.assert_allclose(found["out"], expected, atol=1e-6)
    np.testing.assert_allclose(found["dv"], 2, rtol=ROUNDED["float32"])


def test_a_large_row_leaves_the_bits_of_others_alone():
    found = []
    for level in (0.0, -1e9):
        random = np.random.default_rng(0)
        q, k, v, dout = random.standard_normal((4, 1, 40, 16)).astype(np.float32)
        bias = np.zeros((40, 40), np.float32)
        bias[7] = level
        keys, attn = cuflash.streamed(k, v, chunk=16), cuflash.FlashAttention()
        out, lse = attn.forward(q, *keys, bias=bias)
        dq = attn.backward(dout, q, *keys, out, lse, bias=bias, need=("dq",)).dq
        found.append([x[:, np.arange(40) != 7] for x in (out, lse, dq)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


rows = st.lists(
    st.tuples(st.sampled_from([-1e9, -3e4, -200.0, 0.0, 1e6, 3e38]), st.floats(0, 30), st.sampled_from([1.0, 0.125])),
    min_size=1, max_size=5,
)  # fmt: skip


@given(rows)
def test_row_sums_merge_to_those_of_all_keys(splits):
    """Whatever units maxima have, which differ where different backends compute the splits."""
    arrays = [np.array([[top / unit - less, 1.0 + less, unit]]) for top, less, unit in splits]
    found, weights = row_sums.merged(arrays)
    maxima = [x[0, 0] * x[0, 2] for x in arrays]
    sums = [x[0, 1] * np.exp(own - max(maxima)) for x, own in zip(arrays, maxima, strict=True)]
    np.testing.assert_allclose(row_sums.lse_of(found), max(maxima) + np.log(sum(sums)), rtol=1e-14)
    noise = np.spacing(max(abs(own) for own in maxima))  # of a conversion of units
    expected = np.array(sums) / sum(sums)
    np.testing.assert_allclose([w[0] for w in weights], expected, rtol=min(8 * noise, 1) + 1e-12, atol=min(noise, 1))
