"""Attention with scores and masks of a caller, on NumPy arrays, against the oracle."""

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.cpu import core, fallback
from cuflash.plan.argument import ARRAYS, ROW_REDUCTION_ARRAYS, TANGENT_ARRAYS
from cuflash.spec.problem import make_problem
from cuflash.testing import check_gradients
from cuflash.testing.rule import measure, yardsticks
from tests.compiled import INSTRUCTION_SETS, NUMPY, way_taken
from tests.sampling import examples
from tests.scored import steep


def problem_of(seqlen=40, heads=2, dim=8, dtype=np.float64, **options):
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, heads, seqlen, dim)).astype(dtype)
    return cuflash.FlashAttention(**options), q, k, v, dout


def weighted(s, i, j, *, head, gamma, table, count):
    return s * gamma[head] + table[cuflash.clip(i - j, -3, 3) + 3] * count[j]


def arrays_of(heads=2, seqlen=40, dtype=np.float64):
    random = np.random.default_rng(1)
    return {
        "gamma": random.uniform(0.5, 1.5, heads).astype(dtype),
        "table": random.standard_normal(7).astype(dtype),
        "count": random.integers(0, 4, seqlen),
    }


def test_gradients_are_those_of_differences():
    attn, q, k, v, dout = problem_of(score=weighted, mask=lambda i, j, *, count: count[j] > 0)
    arrays = arrays_of()
    out, lse = attn.forward(q, k, v, **arrays)
    need = ("dtable", "dq", "dgamma")
    dq, dgamma, dtable = attn.backward(dout, q, k, v, out, lse, need=need, **arrays)

    def loss(**moved):
        given = arrays | {name: x for name, x in moved.items() if name != "q"}
        return float((dout * attn.forward(moved.get("q", q), k, v, **given).out).sum())

    for name, x, gradient in (("q", q, dq), ("gamma", arrays["gamma"], dgamma), ("table", arrays["table"], dtable)):
        direction = np.random.default_rng(2).standard_normal(x.shape)
        change = (loss(**{name: x + 1e-5 * direction}) - loss(**{name: x - 1e-5 * direction})) / 2e-5
        assert change == pytest.approx((gradient * direction).sum(), rel=1e-6)


def test_memory_is_linear_and_hidden_tiles_cost_nothing(monkeypatch):
    seqlen = 4096
    attn, q, k, v, dout = problem_of(
        seqlen, 1, dtype=np.float32, score=lambda s, i, j, *, a: s + a[j], mask=lambda i, j, *, doc: doc[i] == doc[j]
    )
    arrays = {"a": np.zeros(seqlen, np.float32), "doc": np.arange(seqlen) // 512}
    tiles = []
    scores = fallback.Job.scores

    def counted(job, tile):
        tiles.append((len(job.rows), len(tile.keys)))
        return scores(job, tile)

    monkeypatch.setattr(fallback.Job, "scores", counted)
    tracemalloc.start()
    out, lse = attn.forward(q, k, v, **arrays)
    gradients = attn.backward(dout, q, k, v, out, lse, need=("dq", "dk", "dv", "da"), **arrays)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    passes = 1 + (core.why_not() is not None)  # the core makes no gradient of a bias with a mask function
    assert len(tiles) == passes * seqlen // fallback.ROWS and set(tiles) == {(fallback.ROWS, 512)}
    assert most < seqlen * seqlen and gradients.da.shape == (seqlen,)
    packed = np.arange(0, seqlen + 1, 512, dtype=np.int32)
    expected = cuflash.FlashAttention().forward(q, k, v, cu_seqlens_q=packed, cu_seqlens_k=packed)
    np.testing.assert_allclose(out, expected.out, atol=1e-5)


def test_objects_with_functions_pickle_print_and_compare():
    attn = cuflash.FlashAttention(score=lambda s, i, j, *, a: s * a[j], mask=lambda i, j: i - j < 3, causal=True)
    again = pickle.loads(pickle.dumps(attn))
    assert again == attn and hash(again) == hash(attn)
    assert repr(attn).endswith("score=<score 's * a[j]'>, mask=<mask '(i - j) < 3'>)")
    assert attn != cuflash.FlashAttention(
        score=lambda s, i, j, *, a: s * a[i], mask=lambda i, j: i - j < 3, causal=True
    )
    _, q, k, v, _ = problem_of()
    a = np.linspace(0, 1, 40)
    np.testing.assert_array_equal(again.forward(q, k, v, a=a).out, attn.forward(q, k, v, a=a).out)
    described = attn.plan(q, k, v, a=a).describe(verbose=True, width=0)
    for line in ("score = s * a[j]", "d score / d s = a[j]", "d score / d a[j] [j] = s", "mask = (i - j) < 3"):
        assert line in described
    assert ", and NumPy for functions" in described or core.why_not() is not None


def test_results_may_be_given():
    attn, q, k, v, dout = problem_of(score=weighted)
    arrays, dgamma = arrays_of(), np.full(4, np.nan)[::2]
    out, lse = attn.forward(q, k, v, **arrays)
    found = attn.backward(dout, q, k, v, out, lse, dgamma=dgamma, **arrays)
    assert found.dgamma is dgamma and found._fields == ("dq", "dk", "dv", "dgamma") and np.isfinite(dgamma).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f, x: f(gamma=x["gamma"], table=x["table"]), TypeError, "missing keyword argument 'count'"),
        (lambda f, x: f(**x, other=1), TypeError, "unexpected keyword argument 'other'"),
        (lambda f, x: f(**x | {"gamma": x["gamma"].astype("f2")}), TypeError, "gamma: got dtype float16"),
        (lambda f, x: f(**x | {"gamma": x["gamma"][:, None]}), ValueError, "gamma: got an array of 2 axes, expected 1"),
        (lambda f, x: f(**x | {"gamma": x["gamma"][:0]}), ValueError, r"gamma: got shape \(0,\)"),
        (lambda f, x: f(**x, bias=np.zeros((40, 40))), NotImplementedError, "bias: got it together with score"),
        (
            lambda f, x: f(**x, alibi_slopes=np.zeros(2)),
            NotImplementedError,
            "alibi_slopes: got it together with score",
        ),
    ],
)
def test_calls_that_do_not_fit_are_refused(call, error, message):
    attn, q, k, v, _ = problem_of(score=weighted)
    with pytest.raises(error, match=message):
        call(lambda **arrays: attn.forward(q, k, v, **arrays), arrays_of())


def test_gradients_are_those_of_arrays_that_the_score_reads():
    attn, q, k, v, dout = problem_of(score=lambda s, i, j, *, unread: s * 2, mask=lambda i, j, *, ends: j <= ends[i])
    arrays: dict[str, Any] = {"unread": np.ones(3), "ends": np.arange(40.0)}
    out, lse = attn.forward(q, k, v, **arrays)
    for name in ("dunread", "dends"):
        with pytest.raises(ValueError, match=f"need: got '{name}', expected 'dq', 'dk', 'dv'"):
            attn.backward(dout, q, k, v, out, lse, **arrays, need=("dq", name))
    assert check_gradients(attn, q, k, v, **arrays).keys() == {"dq", "dk", "dv"}


OF_KERNELS = [name for name, _ in (*ARRAYS, *ROW_REDUCTION_ARRAYS, *TANGENT_ARRAYS)]
OF_SLICES = ["row_sums", "first_maxima", "lse_pairs", "key_indices", "tmax", "tentropy", "tkv_lengths", "tmask"]


@pytest.mark.parametrize("name", ["self", "tq", "tout", "tdlse", *OF_KERNELS, *OF_SLICES])
def test_names_of_other_arrays_are_refused(name):
    """Those of arguments of passes, and those by which kernels and slices of a problem know arrays of their own."""
    with pytest.raises(ValueError, match=f"score: got an array named {name}, expected another name"):
        cuflash.FlashAttention(score=eval(f"lambda s, i, j, *, {name}: s * {name}[j]"))


@settings(max_examples=examples(80), deadline=None)
@given(name=st.sampled_from(["problem", "pass_", "options", "random", "arrays", "delta", "given", "sums", "weights"]))
def test_names_within_the_package_are_free(name):
    """They are those of parameters of functions that the arrays pass through."""
    q, k, v, dout, x = np.random.default_rng(0).standard_normal((5, 2, 12, 4))
    found = []
    for used in (name, "gamma"):
        attn: Any = cuflash.FlashAttention(score=eval(f"lambda s, i, j, *, {used}: cuflash.tanh(s) * {used}[0, j, 0]"))
        out, lse = attn.forward(q, k, v, **{used: x})
        gradients = attn.backward(dout, q, k, v, out, lse, need=("dq", f"d{used}"), **{used: x})
        found.append((out, *gradients, *attn.jvp(q, k, v, tq=q, **{used: x})))
    for own, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(own, expected)


def test_objects_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"score: got an array named bias, expected another name"):
        cuflash.FlashAttention(score=lambda s, i, j, *, bias: s + bias[i])
    with pytest.raises(ValueError, match=r"score: got an array named k, expected another name"):
        cuflash.FlashAttention(mask=lambda i, j, *, k: k[i] > 0)
    with pytest.raises(NotImplementedError, match="softcap: got it together with score"):
        cuflash.FlashAttention(score=lambda s, i, j: s, softcap=3.0)
    attn, q, k, v, dout = problem_of(score=weighted)
    out, lse = attn.forward(q, k, v, **arrays_of())
    with pytest.raises(ValueError, match="need: got dcount of an array of int64, expected gradients of real numbers"):
        attn.backward(dout, q, k, v, out, lse, need=("dcount",), **arrays_of())
    with pytest.raises(ValueError, match=r"need: got 'dother', expected 'dq', .* or 'dcount'"):
        attn.backward(dout, q, k, v, out, lse, need=("dother",), **arrays_of())


def test_infinite_scores_and_derivatives_behind_them_are_no_trouble():
    def score(s, i, j, *, a):
        return cuflash.where(j < 20, s + cuflash.log(a[j]), s - float("inf")) + cuflash.sqrt(cuflash.maximum(a[i], 0.0))

    attn, q, k, v, dout = problem_of(score=score)
    a = np.where(np.arange(40) % 5 == 0, 0.0, 1.5)
    out, lse = attn.forward(q, k, v, a=a)
    weights = q @ k.swapaxes(1, 2) / 8**0.5 + np.where(a > 0, np.log(np.maximum(a, 1e-300)), -np.inf)
    weights[:, :, 20:] = -np.inf
    weights = np.exp(weights - weights.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(out, weights / weights.sum(axis=-1, keepdims=True) @ v, atol=1e-12)
    gradients = attn.backward(dout, q, k, v, out, lse, a=a)
    assert all(np.isfinite(x).all() for x in gradients)


def test_gradients_where_the_chain_rule_meets_0_times_infinity():
    """They are those of differences, also of points that coincide, and of a head whose gamma is 0."""
    attn, q, k, v, _ = problem_of(seqlen=30, score=steep)
    arrays: dict[str, Any] = {"pos": np.random.default_rng(1).standard_normal((30, 2)), "power": np.array([1.5, 0.75])}
    found = check_gradients(attn, q[None], k[None], v[None], **arrays, gamma=np.array([0.5, 0.0]))
    assert {"dpos", "dpower", "dgamma"} < found.keys()


@pytest.mark.parametrize("packed", [False, True])
def test_options_make_scores_beside_a_mask_that_is_a_function(packed):
    """The same as with the mask as an array, in both passes."""
    random = np.random.default_rng(0)
    q, k, v, dout = random.standard_normal((4, 2, 40, 8))
    i, j = np.indices((40, 40))
    starts = np.array([0, 17, 40], np.int32)
    optional: Any = {"alibi_slopes": random.uniform(0, 1, (2, 2) if packed else (2,))}
    optional |= (
        {"cu_seqlens_q": starts, "cu_seqlens_k": starts} if packed else {"bias": random.standard_normal((2, 40, 1))}
    )
    need = ("dq", "dk", "dv", "dalibi_slopes", "dscale", "dsoftcap", *(() if packed else ("dbias",)))
    attn: Any = cuflash.FlashAttention(mask=lambda i, j: (i * j) % 3 != 1, softcap=2.0, causal=True)
    out, lse = attn.forward(q, k, v, **optional)
    found = attn.backward(dout, q, k, v, out, lse, need=need, **optional)._asdict() | {"out": out, "lse": lse}
    judges = yardsticks(
        make_problem(attn.options, q, k, v, **optional), {"q": q, "k": k, "v": v, "dout": dout, **optional}
    )
    assert not any(measure(name, x, judges[name]).failure for name, x in found.items())
    if not packed:
        options = cuflash.FlashAttention(softcap=2.0, causal=True)
        np.testing.assert_allclose(out, options.forward(q, k, v, mask=(i * j) % 3 != 1, **optional).out, atol=1e-12)


def test_the_gradient_of_a_soft_cap_is_exact_where_its_terms_cancel():
    """Scores are small compared with it."""
    random = np.random.default_rng(0)
    q, k, v, dout = random.standard_normal((4, 2, 40, 8), np.float32)
    attn: Any = cuflash.FlashAttention(mask=lambda i, j: (i * j) % 3 != 1, softcap=50.0, scale=0.01)
    out, lse = attn.forward(q, k, v)
    (found,) = attn.backward(dout, q, k, v, out, lse, need=("dsoftcap",))
    i, j = np.indices((40, 40))
    options: Any = cuflash.FlashAttention(softcap=50.0, scale=0.01)
    wide = [x.astype(np.float64) for x in (dout, q, k, v)]
    exact = options.forward(*wide[1:], mask=(i * j) % 3 != 1)
    (expected,) = options.backward(*wide, *exact, mask=(i * j) % 3 != 1, need=("dsoftcap",))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


INFINITE: dict[str, Any] = {  # scores whose derivatives are infinite where the product is 0, or the array
    "by the product": lambda s, i, j, *, gamma: cuflash.sqrt(cuflash.maximum(s, gamma[j] * 0)),
    "by an array": lambda s, i, j, *, gamma: s + cuflash.sqrt(gamma[j]),
    "by both": lambda s, i, j, *, gamma: s * cuflash.sqrt(gamma[j]),
    "along diagonals": lambda s, i, j, *, gamma: s + cuflash.sqrt(gamma[cuflash.abs(i - j)]),
}


@settings(max_examples=examples(200), deadline=None)
@given(
    score=st.sampled_from([*INFINITE]),
    options=st.sampled_from([{}, {"causal": True}, {"window": (20, 3)}, {"dropout": 0.5}]),
    others=st.sampled_from(["mask", "packed", "lengths", "sinks", "no values", ""]),
    zeros=st.lists(st.integers(0, 99), max_size=4),
    rows=st.lists(st.integers(0, 99), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_zero_times_an_infinite_derivative_is_nan_for_pairs_with_weight(score, options, others, zeros, rows, seed):
    """By the core, as by NumPy: what is not finite is so in the same places. Hidden pairs contribute nothing."""
    rng = np.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal((2, 100, 8)).astype(np.float32) for _ in range(4))
    gamma = rng.uniform(0.5, 2, 100).astype(np.float32)
    gamma[zeros], q[:, rows], dout[:, 50:] = 0, 0, 0  # dS is 0 where dout is
    attn: Any = cuflash.FlashAttention(score=INFINITE[score], **options)
    how: dict[str, Any] = {"gamma": gamma} | ({"seed": 1, "offset": 2} if options.get("dropout") else {})
    starts = np.array([0, 37, 100], np.int32)
    arrays_of_others: dict[str, dict[str, Any]] = {
        "mask": {"mask": rng.random((100, 100)) < 0.5},
        "packed": {"cu_seqlens_q": starts, "cu_seqlens_k": starts},
        "lengths": {"kv_lengths": np.array(80)},
        "sinks": {"sinks": np.ones(2, np.float32)},
    }
    how |= arrays_of_others.get(others, {})
    values, upstream = (v, {}) if others != "no values" else (None, {"dlse": dout[..., 0]})
    found = []
    for _, way in (NUMPY, INSTRUCTION_SETS[0]):
        with way_taken(way):
            out, lse = attn.forward(q, k, values, **how)
            need = ("dq", "dk", "dgamma")
            own_dout = None if values is None else dout
            of_way = attn.backward(own_dout, q, k, values, out, lse, need=need, **upstream, **how)
            found.append(of_way._asdict())
    by_numpy, by_core = found
    for name, x in by_numpy.items():
        np.testing.assert_array_equal(np.isfinite(by_core[name]), np.isfinite(x), err_msg=name)
