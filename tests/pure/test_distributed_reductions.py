"""Reductions of attention weights over ranks that are threads, against the oracle, and bit for bit."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from tests.features.test_ranks_on_backends import DRAWN, SMALL, is_clear
from tests.pure.test_schedule import of_chunks, splits
from tests.ranks import Whole, on_threads, reduce_weights, results_of
from tests.reductions import attention_of, given_of, inputs_of, judge, lse_of
from tests.row_reductions import BEHIND_SINKS, maxima_are_clear
from tests.sampling import examples

PACKED, AXES = DRAWN["packed"].cases, DRAWN["batch axes"].cases
CASES = DRAWN["options"].cases | PACKED


def weights_of(case, split_q, split_k, arrays, count=3, need=(), **options):
    """The reductions of weights that ranks give, and gradients of column sums if some are needed."""
    reduce, whole = functools.partial(reduce_weights, count=count), Whole.of(case)._replace(arrays=arrays)
    return results_of(whole, split_q, split_k, need=need, call=reduce, steps=2, **options)


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), CASES, st.integers(1, 6), st.sampled_from((1, 3, 64)))
def test_any_split_keeps_the_oracle_rule(data, case, ranks, count):
    split_q, split_k = (data.draw(splits(n, ranks)) for n in (case.seqlen_q, case.seqlen_k))
    assume(is_clear(case, split_q))
    arrays = given_of(case)
    found = weights_of(case, split_q, split_k, arrays, count)
    top = found["indices"], found["key_weights"]
    judge(case, arrays["weights"], found["column_sums"], found["column_max"], top)


@settings(max_examples=examples(20), deadline=None)
@given(st.data(), AXES | PACKED | ct.cases(**SMALL | {"dtypes": ("float64",)}), st.integers(1, 4))
def test_all_results_are_those_of_one_device(data, case, ranks):
    """Gradients, and batch axes of any shape."""
    split_q, split_k = (data.draw(splits(n, ranks)) for n in (case.seqlen_q, case.seqlen_k))
    assume(is_clear(case, split_q))
    arrays, rng = given_of(case), np.random.default_rng(case.seed + 1)
    arrays["dsums"] = rng.standard_normal((*arrays["lse"].shape[:-1], case.seqlen_k)).astype(arrays["lse"].dtype)
    own = [name for name in ct.gradients_of(case.problem) if name not in ("dv", "dsinks")]
    need = data.draw(st.sampled_from((("dq", "dk"), (*own, "dlse", "dweights"), ("dweights",))))
    found = weights_of(case, split_q, split_k, arrays, need=need)
    attn, others = attention_of(case), dict(arrays)
    q, k, lse, weights, dsums = (others.pop(name) for name in ("q", "k", "lse", "weights", "dsums"))
    expected = {
        "column_sums": attn.column_sums(q, k, lse, weights, **others),
        "column_max": attn.column_max(q, k, lse, **others),
        **dict(zip(("indices", "key_weights"), attn.top_keys(q, k, lse, 3, **others), strict=True)),
        **attn.column_sums_backward(dsums, q, k, lse, weights, need=need, **others)._asdict(),
    }
    tolerance = {"float64": 1e-11, "float32": 1e-3}.get(case.dtype, 0.05)
    for name, x in expected.items():
        assert (x.shape, x.dtype) == (found[name].shape, found[name].dtype), name
        if name != "indices" or case.dtype == "float64":
            size = float(np.abs(x).max(initial=1))
            np.testing.assert_allclose(found[name].astype(float), x.astype(float), 0, tolerance * size, err_msg=name)


@settings(max_examples=examples(10), deadline=None)
@given(st.data(), CASES, st.integers(1, 6))
def test_bits_do_not_depend_on_the_number_of_ranks(data, case, ranks):
    dealt = [data.draw(of_chunks(n, ranks, 16)) for n in (case.seqlen_q, case.seqlen_k)]
    pairs = [[cd.zigzag(n, ranks) for n in (case.seqlen_q, case.seqlen_k)] for ranks in (1, 2, 4)]
    assume(all(is_clear(case, split_q) for split_q, _ in (*pairs, dealt)))
    arrays = given_of(case)
    expected, *others = (weights_of(case, own[0], own[1], arrays, deterministic=True) for own in (*pairs, dealt))
    for found in others:
        for name, x in found.items():
            assert x.tobytes() == expected[name].tobytes(), name


LARGE = ({"bias": -1e9}, {"bias": 3e8, "sinks": 3e8})


@pytest.mark.parametrize("numbers", LARGE, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_keys_weigh_what_they_do_where_scores_are_large(dtype, numbers):
    """A finite mask of all keys; all have the same weight, also for rows of which other ranks have keys."""
    case = ct.Case(seqlen_q=70, seqlen_k=96, head_dim=16, num_heads=4, dtype=dtype, bias=(96,))
    case = replace(case, sinks="sinks" in numbers, ndim=3)
    arrays = inputs_of(case)
    for name, number in numbers.items():
        arrays[name][...] = number * (1e9 if dtype == "float64" else 1)  # products are rounded off
    lse = lse_of(attention_of(case), arrays)
    split_q, split_k, keys = cd.zigzag(70, 2), cd.zigzag(96, 2), 96 + ("sinks" in numbers)
    found = weights_of(case, split_q, split_k, arrays | {"lse": lse})
    units = 64 * float(np.finfo(lse.dtype).eps)
    np.testing.assert_allclose(found["column_sums"], 70 / keys, rtol=units)
    np.testing.assert_allclose(found["column_max"], 1 / keys, rtol=units)
    np.testing.assert_allclose(found["key_weights"], 1 / keys, rtol=units)
    whole = Whole.of(case)._replace(arrays=arrays | {"v": arrays["k"], "dentropy": lse})  # which asks for entropy
    rows = results_of(whole, split_q, split_k, need=())
    np.testing.assert_allclose(rows["entropy"], np.log(keys), rtol=units)


# ---- Maxima and entropies of rows ------------------------------------------------------------------------------------


def test_the_first_of_equal_maxima_has_the_gradient():
    """Whichever rank has it, and whatever a sink leaves of its weight."""
    scores = np.random.default_rng(0).integers(0, 4, (2, 40, 60)).astype(np.float64)
    case = replace(ct.Case(seqlen_q=40, seqlen_k=60, head_dim=8, num_heads=2, dtype="float64", ndim=3), sinks=True)
    case = replace(case, bias=(2, 40, 60), row_reductions=("max",), score_spread=1e-30)
    arrays = case.arrays()
    arrays["bias"][...], arrays["sinks"][...] = scores, 2000
    whole = Whole.of(case)._replace(arrays=arrays)
    found = results_of(whole, cd.zigzag(40, 2), cd.zigzag(60, 2), need=("dbias",))
    expected = np.zeros(scores.shape)
    np.put_along_axis(expected, scores.argmax(axis=-1)[..., None], arrays["dmax"][..., None], axis=-1)
    np.testing.assert_allclose(found["dbias"], expected, rtol=0, atol=1e-13)


@settings(max_examples=examples(12), deadline=None)
@given(st.data(), BEHIND_SINKS, st.sampled_from(("float32", "float64")), st.integers(1, 4))
def test_maxima_of_any_split_have_gradients_whatever_a_sink_leaves_of_their_weight(data, case, dtype, ranks):
    assume(maxima_are_clear(case.problem(dtype), case.arrays(dtype)))
    split_q, split_k = (data.draw(splits(n, ranks)) for n in case.sizes)

    def run(_, arrays, need):
        whole = Whole(case.problem(dtype), arrays, case.keywords, {})
        found = results_of(whole, split_q, split_k, need=need)
        return found["out"], found["lse"], {name: found[name] for name in need}

    case.judge(dtype, run)


def test_decode_gives_reductions_to_all_ranks():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 4, rows, 16)) for rows in (3, 64, 64))
    attn, split = cuflash.FlashAttention(causal=True), cd.zigzag(64, 2)
    expected = attn.forward(q, k, v, want=("max", "entropy"))

    def work(comm):
        ranks = cd.ContextParallel(comm, split=split, causal=True)
        return ranks.decode(q, *(split.part(x, comm.rank) for x in (k, v)), want=("max", "entropy"))

    for found in on_threads(2, work):
        assert found._fields == expected._fields
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-14)


# ---- Refusals --------------------------------------------------------------------------------------------------------

Q, K = np.random.default_rng(0).standard_normal((2, 4, 50, 8))
LSE = cuflash.FlashAttention().forward(Q, K, None).lse


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda attn: attn.top_keys(Q, K, LSE, 65), ValueError, "count: got 65, expected 1 to 64"),
        (lambda attn: attn.column_sums(Q, K, None), TypeError, "lse: got None, expected an array"),
        (lambda attn: attn.column_sums(Q, K, LSE, LSE[0]), ValueError, "weights: got shape"),
        (lambda attn: attn.column_sums(Q, K, LSE, bais=K), TypeError, r"column_sums\(\) got an unexpected keyword"),
        (
            lambda attn: attn.column_max(Q, cuflash.streamed(K, None).k, LSE),
            NotImplementedError,
            "k: got Streamed, which is not served over ranks",
        ),
        (
            lambda attn: attn.column_sums_backward(LSE, Q, cuflash.streamed(K, None).k, LSE),
            (NotImplementedError, TypeError),
            "k: got Streamed|dsums",
        ),
        (lambda attn: attn.column_sums_backward(LSE, Q, K, LSE, need=("dv",)), ValueError, "need: got 'dv'"),
        (lambda attn: attn.column_sums_backward(LSE[0], Q, K, LSE), ValueError, "dsums: got shape"),
    ],
)
def test_what_is_refused(call, error, message):
    attn: Any = cd.ContextParallel(cd.threads(1)[0], split="contiguous")
    with pytest.raises(error, match=f"^{message}"):
        call(attn)
