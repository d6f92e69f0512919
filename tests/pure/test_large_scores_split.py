"""Rows of large lse over ranks and over streamed keys: a rounded lse does not say what a shard of the keys weighs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.arrays.array_info import numpy_dtype
from cuflash.spec import row_sums
from cuflash.testing.strategies import BIAS_MASKS, SCORE_MEANS
from tests.pure.test_distributed import is_clear
from tests.pure.test_schedule import splits
from tests.pure.test_streamed import chunks_for
from tests.ranks import Shards, Whole, compute, judge, on_threads, results_of
from tests.sampling import examples
from tests.streams import ON_CPU, through
from tests.ways import every_way

pytestmark = [every_way, pytest.mark.usefixtures("way")]

FEATURES = (*ct.FEATURES, "sinks", "dlse", "dropout", "block_mask")
SIZES: dict[str, Any] = {"features": FEATURES, "max_seqlen": 65, "max_head_dim": 24, "max_scores": 2**13}
MASKED = (-1e4, -1e9, float(np.finfo(np.float32).min))
# Of the sum of weights of a row whose scores are equal: rounding of weights and of results.
ROUNDED = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-18, "float64": 2.0**-46}
dtypes = pytest.mark.parametrize("dtype", ROUNDED)


@st.composite
def large(draw, /, **sizes):
    """A case with a finite mask of some rows and pairs, or with products around a large number."""
    case = draw(ct.cases(**{**SIZES, **sizes}))
    if case.bias is not None:
        return replace(case, bias_mask=draw(st.sampled_from(BIAS_MASKS)))
    return replace(case, score_mean=draw(st.sampled_from(SCORE_MEANS)), softcap=None)


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), large(), st.integers(2, 4), st.booleans())
def test_ranks_keep_the_oracle_rule(data, case, ranks, all_gradients):
    split_q, split_k = (data.draw(splits(n, ranks)) for n in (case.seqlen_q, case.seqlen_k))
    assume(is_clear(case, split_q))
    judge(case, results_of(case, split_q, split_k, need=None if all_gradients else ("dq", "dk", "dv"), calls=2))


@settings(max_examples=examples(15), deadline=None)
@given(st.data(), ct.with_axes(large(features=(*FEATURES, "gqa"), max_scores=2**11, ndims=(4,))), st.integers(2, 3))
def test_batch_axes_keep_the_oracle_rule(data, case, ranks):
    split_q, split_k = (data.draw(splits(n, ranks)) for n in (case.seqlen_q, case.seqlen_k))
    assume(is_clear(case, split_q))
    judge(case, results_of(case, split_q, split_k))
    judge(case, ON_CPU.results(case, chunks_for(data, case)))


@settings(max_examples=examples(15), deadline=None)
@given(st.data(), large(features=(*FEATURES, "packed")), st.integers(2, 4))
def test_packed_sequences_keep_the_oracle_rule(data, case, ranks):
    assume(case.cu_seqlens_q is not None)
    split_q, split_k = (data.draw(splits(n, ranks)) for n in (case.seqlen_q, case.seqlen_k))
    judge(case, results_of(case, split_q, split_k))


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), case=large(), has_device=st.booleans())
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
    shards = Shards(whole, cd.zigzag(50, ranks), cd.zigzag(130, ranks))
    need = ("dq", "dk", "dv", *(["dsinks"] if sinks else []))

    def work(comm: cd.Transport) -> dict[str, Any]:
        return compute(cd.ContextParallel(comm, split="zigzag", timeout=30), shards, whole.arrays, need)

    results = shards.whole(on_threads(ranks, work))
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
    split = cd.contiguous(130, 3)

    def work(comm: cd.Transport) -> Any:
        k, v = (split.part(arrays[name], comm.rank, -2) for name in "kv")
        bias = split.part(optional["bias"], comm.rank, -1)
        return cd.ContextParallel(comm, split=split, timeout=30).decode(arrays["q"], k, v, bias=bias)

    for out, lse in on_threads(3, work):
        expected = arrays["v"].astype(np.float64).mean(axis=2, keepdims=True)
        np.testing.assert_allclose(out.astype(np.float64), np.broadcast_to(expected, out.shape), atol=ROUNDED[dtype])
        np.testing.assert_allclose(lse, level + np.log(130), rtol=2.0**-22)


def with_level(s, i, j, *, level):
    return s + level[i, j]


@pytest.mark.parametrize("rows", [8, 200])  # few pairs are computed otherwise
def test_functions_give_equal_weights_over_ranks(rows):
    arrays, _ = equal_scores("float32", 0)
    arrays = {name: np.resize(x, (1, x.shape[1], rows, 16)) for name, x in arrays.items()}
    arrays["level"] = np.full((rows, rows), -1e9, np.float32)
    arrays["dout"] = np.ones_like(arrays["q"])
    split = cd.contiguous(rows, 2)

    def work(comm: cd.Transport) -> Any:
        attn = cd.ContextParallel(comm, split=split, timeout=30, score=with_level)
        own = {name: split.part(x, comm.rank, -2) if name != "level" else x for name, x in arrays.items()}
        out, lse = attn.forward(*ct.qkv(own), level=own["level"])
        return out, attn.backward(own["dout"], *ct.qkv(own), out, lse, level=own["level"]).dv

    for out, dv in on_threads(2, work):
        np.testing.assert_allclose(out, np.broadcast_to(arrays["v"].mean(axis=2, keepdims=True), out.shape), atol=1e-6)
        np.testing.assert_allclose(dv, 2, rtol=ROUNDED["float32"])


@settings(max_examples=examples(10), deadline=None)
@given(st.sampled_from(MASKED), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 9))
def test_deterministic_bits_do_not_depend_on_the_number_of_ranks(mask, dtype, seed):
    case = ct.Case(
        seqlen_q=48, seqlen_k=48, num_heads=2, num_heads_kv=1, head_dim=16, dtype=dtype, bias=(48, 48), bias_mask=mask,
        sinks=True, seed=seed,
    )  # fmt: skip
    found = [
        results_of(case, cd.contiguous(48, ranks), cd.contiguous(48, ranks), deterministic=True, chunks=6)
        for ranks in (1, 2, 3)
    ]
    judge(case, found[0])
    for others in found[1:]:
        for name, x in others.items():
            assert x.tobytes() == found[0][name].tobytes(), name


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
