"""The CPU path against the oracle, by NumPy and by the core. `test_fallback.py` has more on the first."""

import dataclasses
import warnings
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash import cpu
from cuflash.arrays.array_info import user_shape
from cuflash.cpu import fallback, gemm, jobs
from cuflash.spec.problem import make_problem
from tests.judging import assert_oracle, assert_same_bits, assert_within
from tests.sampling import examples
from tests.ways import CORE, FALLBACK, every_way

NAMES = ("out", "lse", "dq", "dk", "dv")


pytestmark = pytest.mark.usefixtures("way")


def run(case, every=False, **replaced):
    """Results of the CPU path by name; with `every`, of all gradients that there are."""
    arrays, problem = case.arrays() | replaced, case.problem
    inputs = ct.qkv(arrays)
    need = ct.gradients_of(problem) if every else ("dq", "dk", "dv", *(("dsinks",) if case.sinks else ()))
    out, lse = cpu.forward(problem, *inputs, **ct.optional(arrays) | case.random)
    optional = {**ct.optional_backward(arrays), **case.random, "need": need}
    gradients = cpu.backward(problem, arrays["dout"], *inputs, out, lse, **optional)
    return dict(zip(("out", "lse", *need), (out, lse, *gradients), strict=True))


# ---- against the oracle ----------------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 20.0}, {"bias": (1, 257)}])
def test_no_worse_than_the_plain_formula(options):
    ratios = []
    for seed in range(24):
        case = ct.Case(seqlen_q=135, seqlen_k=257, head_dim=64, seed=seed, **options)
        ratios.append([measurement.strict_ratio for measurement in assert_oracle(case, run(case))])
    # The formula's own errors are those of the products of NumPy, which are other ones on other processors.
    deviation = np.std(ratios, axis=0, ddof=1) / np.sqrt(len(ratios))
    assert np.all(np.mean(ratios, axis=0) - 2 * deviation <= 1)


@every_way
@pytest.mark.parametrize("head_dim", [1, 40, 64, 96, 97, 128, 200, 256])
def test_head_dims_around_the_blocks_of_a_product(head_dim):
    case = ct.Case(seqlen_q=200, seqlen_k=150, head_dim=head_dim, head_dim_v=257 - head_dim, causal=True)
    assert_oracle(case, run(case))


@every_way
@pytest.mark.parametrize("head", [(8, 1), (6, 2), (4, 4)])
def test_grouped_heads_in_many_batches(head):
    case = ct.Case(batch=5, num_heads=head[0], num_heads_kv=head[1], seqlen_q=20, seqlen_k=30, head_dim=8, seed=1)
    assert_oracle(case, run(case))
    lengths = dataclasses.replace(case, kv_lengths=(30, 7, 30, 0, 7))
    assert_oracle(lengths, run(lengths))


# ---- results given, inputs kept --------------------------------------------------------------------------------------


@every_way
@settings(max_examples=examples(50))
@given(ct.cases(dtypes=["float32", "bfloat16"]))
def test_results_are_written_where_they_are_asked_for(case):
    arrays, problem = case.arrays(), case.problem
    before = case.arrays()
    inputs, optional = ct.qkv(arrays), ct.optional(arrays)
    expected = run(case)
    buffers = {name: np.full([2 * n + 1 for n in x.shape], 7, x.dtype) for name, x in expected.items()}
    views = {name: buffers[name][tuple(slice(2 * n - 1, None, -2) for n in x.shape)] for name, x in expected.items()}
    out, lse = cpu.forward(problem, *inputs, **optional, out=views["out"], lse=views["lse"])
    results = {name: views[name] for name in ("dq", "dk", "dv")}
    gradients = cpu.backward(problem, arrays["dout"], *inputs, out, lse, **optional | results)
    for got, name in zip((out, lse, *gradients), NAMES, strict=True):
        assert got is views[name]
        assert np.array_equal(got.astype("f8"), expected[name].astype("f8"))
        got[...] = 7
        assert np.all(buffers[name] == 7)
    for name, x in before.items():
        assert np.array_equal(arrays[name].astype("f8"), x.astype("f8"), equal_nan=True)


@every_way
@pytest.mark.parametrize("ndim, layout", [(2, "bhsd"), (3, "bhsd"), (3, "bshd"), (4, "bshd")])
def test_results_have_the_layout_of_the_caller(ndim, layout):
    heads = 1 if ndim == 2 else 3
    case = ct.Case(num_heads=heads, seqlen_q=5, seqlen_k=7, head_dim=4, head_dim_v=6, ndim=ndim, layout=layout)
    results = run(case)
    assert results["out"].shape == user_shape(1, case.num_heads, 5, 6, ndim, layout)
    assert results["lse"].shape == (1, case.num_heads, 5)[4 - ndim :]
    assert results["dv"].shape == case.arrays()["v"].shape
    assert_oracle(case, results)


# ---- jobs, tiles and threads -----------------------------------------------------------------------------------------


def cut_small(patch, pairs=2**10, rows=16, keys=32):
    """Have small tiles, several jobs and small products."""
    patch.setattr(fallback, "SERIAL_FLOPS", -1)
    patch.setattr(fallback, "PAIRS", pairs)
    patch.setattr(fallback, "ROWS", rows)
    patch.setattr(fallback, "LEAST_KEYS", keys)
    patch.setattr(fallback, "BLOCK", keys)
    patch.setattr(gemm, "PRODUCT_BLOCK", 24)
    patch.setattr(gemm, "PRODUCT_DEPTH", 5)


CASES_OF_SEVERAL_JOBS = [
    ct.Case(num_heads=3, seqlen_q=700, seqlen_k=900, head_dim=16, causal=True),
    ct.Case(num_heads=4, num_heads_kv=1, seqlen_q=1300, seqlen_k=1100, head_dim=8, window=(200, 70)),
    ct.Case(num_heads=1, seqlen_q=1300, seqlen_k=1300, head_dim=8, dtype="bfloat16", score_spread=30.0),
    ct.Case(batch=3, num_heads=2, seqlen_q=300, seqlen_k=400, head_dim=8, kv_lengths=(400, 0, 17), mask=(300, 1)),
]


@every_way
@pytest.mark.parametrize("case", CASES_OF_SEVERAL_JOBS)
def test_results_are_bitwise_the_same_run_after_run(case, monkeypatch):
    with jobs.cpu_threads(4):
        expected = run(case)
        assert_oracle(case, expected)
        for _ in range(3):
            assert_same_bits(run(case), expected)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3000), (3000, 1), (2, 900), (900, 2), (64, 64), (128, 128)])
@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_way
def test_few_queries_and_few_keys(sizes, dtype):
    alignments: tuple[tuple[int, Literal[False, "top_left"]], ...] = ((1, False), (6, "top_left"))
    for num_heads, causal in alignments:
        case = ct.Case(
            seqlen_q=sizes[0], seqlen_k=sizes[1], head_dim=16, num_heads=num_heads, num_heads_kv=num_heads // 3 or 1,
            batch=2, dtype=dtype, causal=causal, alibi_slopes=(num_heads,), bias=(1, num_heads, 1, sizes[1]), dlse=True,
        )  # fmt: skip
        assert_oracle(case, run(case, every=True))


@every_way
@pytest.mark.parametrize(
    "need", [("dv",), ("dq",), ("dk", "dsinks"), ("dbias",), ("dscale", "dsoftcap"), ("dalibi_slopes",)]
)
def test_each_gradient_alone_is_the_same(need):
    case = ct.Case(
        batch=2, num_heads=4, num_heads_kv=2, seqlen_q=20, seqlen_k=33, head_dim=8, causal=True, softcap=3.0,
        sinks=True, bias=(4, 1, 33), alibi_slopes=(2, 4), dropout=0.3, dlse=True, kv_lengths=(33, 20),
    )  # fmt: skip
    arrays, expected = case.arrays(), run(case, every=True)
    inputs, optional = ct.qkv(arrays), {**ct.optional_backward(arrays), **case.random, "need": need}
    gradients = cpu.backward(case.problem, arrays["dout"], *inputs, expected["out"], expected["lse"], **optional)
    assert len(gradients) == len(need)
    assert_same_bits(dict(zip(need, gradients, strict=True)), {name: expected[name] for name in need})


@every_way
def test_more_than_65535_heads():
    case = ct.Case(batch=2, num_heads=35_000, seqlen_q=2, seqlen_k=3, head_dim=1)
    results = run(case)
    arrays = case.arrays()
    scores = arrays["q"] @ arrays["k"].swapaxes(2, 3)
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(results["out"], weights @ arrays["v"], rtol=1e-5, atol=1e-5)


# ---- online softmax --------------------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("order", ["rising", "falling", "one at the end", "one at the start"])
@pytest.mark.parametrize("size", [3.0, 30.0, 3000.0])
def test_a_maximum_that_moves(order, size, monkeypatch):
    cut_small(monkeypatch, 2**12)
    case = ct.Case(seqlen_q=100, seqlen_k=1000, head_dim=2, scale=1.0, seed=5)
    arrays = case.arrays()
    course = {
        "rising": np.linspace(-1, 1, 1000),
        "falling": np.linspace(1, -1, 1000),
        "one at the end": np.arange(1000) == 999,
        "one at the start": np.arange(1000) == 0,
    }[order]
    arrays["q"][..., 1] = size * np.linspace(0, 1, 100)
    arrays["k"][0, 0, :, 1] = course
    problem = case.problem
    out, lse = cpu.forward(problem, *ct.qkv(arrays))
    gradients = cpu.backward(problem, arrays["dout"], *ct.qkv(arrays), out, lse)
    judges = ct.yardsticks(problem, arrays)
    assert_within(dict(zip(NAMES, (out, lse, *gradients), strict=True)), judges)


@every_way
@pytest.mark.parametrize("level", [-1000.0, -100.0, 100.0])
def test_rows_that_see_their_first_key_late(level, monkeypatch):
    """Their m comes from another tile than that of their neighbours; it is not zero until then."""
    cut_small(monkeypatch, 2**12)
    case = ct.Case(seqlen_q=500, seqlen_k=500, head_dim=1, scale=1.0, window=(30, 0))
    arrays = case.arrays()
    arrays["q"][:] = 1
    arrays["k"] += np.float32(level)
    out, lse = cpu.forward(case.problem, *ct.qkv(arrays))
    judges = ct.yardsticks(case.problem, arrays)
    assert ct.measure("out", out, judges["out"]).failure is None
    assert ct.measure("lse", lse, judges["lse"]).failure is None


@every_way
def test_scores_far_from_zero_keep_their_precision():
    case = ct.Case(seqlen_q=300, seqlen_k=700, head_dim=16, seed=2)
    arrays = case.arrays()
    expected = run(case)["out"]
    arrays["bias"] = np.full((1, 1), -500.0, np.float32)
    problem = dataclasses.replace(case, bias=(1, 1)).problem
    out, lse = cpu.forward(problem, *ct.qkv(arrays), bias=arrays["bias"])
    np.testing.assert_allclose(out, expected, atol=2e-4)  # scores near -500 are rounded to 3e-5
    assert -500 < lse.min() < lse.max() < -490


@every_way
@pytest.mark.parametrize("seed", [157, 234, 371])
def test_where_a_soft_cap_is_reached_its_slope_has_few_digits(way, seed):
    case = ct.Case(seqlen_q=7, seqlen_k=3, head_dim=17, dtype="float16", softcap=0.5, score_spread=8.0, seed=seed)
    case = dataclasses.replace(case, dropout=0.9)
    assert_oracle(case, run(case, every=True))


@every_way
def test_values_that_overflow_only_in_the_weights_do_not():
    """exp(200) is no float32; the maximum of the first tile says nothing of the second."""
    case = ct.Case(seqlen_q=64, seqlen_k=4096, head_dim=1, scale=1.0)
    arrays = case.arrays()
    arrays["q"][:] = 1
    arrays["k"][:] = -100
    arrays["k"][0, 0, 4000] = 100
    out, lse = cpu.forward(case.problem, *ct.qkv(arrays))
    np.testing.assert_array_equal(out[0, 0], np.broadcast_to(arrays["v"][0, 0, 4000], (64, 1)))
    np.testing.assert_array_equal(lse, np.float32(100))


# ---- edges -----------------------------------------------------------------------------------------------------------


@every_way
def test_no_warnings_and_no_change_of_settings():
    case = ct.Case(seqlen_q=40, seqlen_k=70, head_dim=4, mask=(40, 70), dtype="float16", score_spread=30.0)
    arrays = case.arrays()
    arrays["q"][0, 0, 3] = np.inf
    arrays["v"][0, 0, 5] = np.nan
    settings_before = np.geterr()
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        run(case, q=arrays["q"], v=arrays["v"])
    assert np.geterr() == settings_before


@every_way
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_what_is_not_finite_reaches_the_output_as_in_the_formula(name, value):
    """Wherever it lies. In the formula a weight of zero meets every value that a row does not attend to; whether it
    meets one that is not finite is left open, but then the result is what it would be without that value.
    """
    case = ct.Case(seqlen_q=30, seqlen_k=30, head_dim=2, causal=True, bias=(30, 30))
    without = ct.yardsticks(case.problem, {n: x for n, x in case.arrays().items() if n != "dout"})

    @settings(max_examples=examples(20))
    @given(st.integers(0, 29), st.integers(0, 29))
    @example(20, 1)
    def at_any_position(row, column):
        arrays = {n: x for n, x in case.arrays().items() if n != "dout"}
        arrays[name][..., row, column % arrays[name].shape[-1]] = value
        inputs = (arrays[n] for n in ("q", "k", "v"))
        results = dict(zip(("out", "lse"), cpu.forward(case.problem, *inputs, bias=arrays["bias"]), strict=True))
        with np.errstate(invalid="ignore"):
            formula = {n: yardstick.expected for n, yardstick in ct.yardsticks(case.problem, arrays).items()}
        if name == "v":
            attends_to_none = np.broadcast_to(np.arange(30)[:, None] < row, case.problem.out_shape)
            is_left_out = attends_to_none & np.isfinite(results["out"])
            formula["out"] = np.where(is_left_out, without["out"].expected, formula["out"])
        for n, x in results.items():  # by the tolerance without the value, which is finite
            measurement = ct.measure(n, x, dataclasses.replace(without[n], expected=formula[n]))
            assert not measurement.failure, str(measurement)

    at_any_position()


@every_way
def test_nan_in_one_row_leaves_the_others_alone():
    case = ct.Case(seqlen_q=200, seqlen_k=3000, head_dim=4, score_spread=30.0)
    arrays = case.arrays()
    expected = run(case)["out"]
    arrays["q"][0, 0, 70, 2] = np.nan
    out = run(case, q=arrays["q"])["out"]
    others = np.arange(200) != 70
    assert np.isnan(out[0, 0, 70]).all()
    np.testing.assert_allclose(out[0, 0, others], expected[0, 0, others], rtol=1e-4, atol=1e-5)


@every_way
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 0, 0, 0)])
def test_empty_axes(shape):
    batch, heads, seqlen_q, seqlen_k = shape
    case = ct.Case(batch=batch, num_heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=5, head_dim_v=6)
    results = run(case)
    assert results["out"].shape == (batch, heads, seqlen_q, 6) and not results["out"].any()
    assert results["lse"].shape == (batch, heads, seqlen_q) and np.all(results["lse"] == -np.inf)
    for name in "qkv":
        assert results["d" + name].shape == case.arrays()[name].shape and not results["d" + name].any()


@every_way
def test_no_query_heads_for_some_key_heads():
    case = ct.Case(num_heads=0, num_heads_kv=2, seqlen_q=3, seqlen_k=4, head_dim=5)
    results = run(case)
    assert results["dk"].shape == (1, 2, 4, 5) and not results["dk"].any()


@st.composite
def empty_problems(draw):
    """Options and arrays of problems, most of which have an axis of length 0."""
    batch, heads_kv, rows, keys = (draw(st.sampled_from((0, 1, 2))) for _ in range(4))
    heads = heads_kv * draw(st.sampled_from((0, 1, 2)))
    random, dtype = np.random.default_rng(0), draw(st.sampled_from((np.float32, np.float64)))

    def normal(*shape):
        return random.standard_normal(shape).astype(dtype)

    arrays = {"q": normal(batch, heads, rows, 3), "k": normal(batch, heads_kv, keys, 3)}
    arrays |= {"v": normal(batch, heads_kv, keys, 2), "dout": normal(batch, heads, rows, 2)}
    options = draw(st.sampled_from(({}, {"softcap": 2.0}, {"causal": True})))
    if draw(st.booleans()):
        options = {"score": lambda s, i, j, *, head, gamma: s * gamma[head]}
        return options, arrays | {"gamma": normal(2)}
    given = {
        "bias": normal(*(n if draw(st.booleans()) else 1 for n in (batch, heads, rows, keys))),
        "alibi_slopes": normal(heads) if draw(st.booleans()) else normal(batch, heads),
        "sinks": normal(heads),
        "kv_lengths": random.integers(0, keys + 1, batch),
        "dlse": normal(batch, heads, rows),
    }
    return options, arrays | {name: x for name, x in given.items() if draw(st.booleans())}


@settings(max_examples=examples(300))
@given(empty_problems())
def test_every_result_of_empty_problems_is_written(problem):
    """Of whatever lengths are 0: results are NaN before, and as the formula has them after."""
    options, arrays = problem
    attn: Any = cuflash.FlashAttention(**options)
    optional = {name: x for name, x in arrays.items() if name not in ("q", "k", "v", "dout", "dlse")}
    score_args = {name: x for name, x in optional.items() if name == "gamma"}
    own = {name: x for name, x in optional.items() if name not in score_args}
    inputs = [arrays[name] for name in ("q", "k", "v")]
    of_problem = make_problem(attn.options, *inputs, score_args=score_args, **own)
    out, lse = (np.full(shape, np.nan, inputs[0].dtype) for shape in (of_problem.out_shape, of_problem.lse_shape))
    attn.forward(*inputs, **optional, out=out, lse=lse)
    need = ct.gradients_of(of_problem)
    results = {name: np.full_like(arrays.get(name[1:], np.zeros((), out.dtype)), np.nan) for name in need}
    dlse = {"dlse": arrays["dlse"]} if "dlse" in arrays else {}
    attn.backward(arrays["dout"], *inputs, out, lse, **optional, **dlse, **results, need=need)
    judges = ct.yardsticks(of_problem, arrays)
    assert_within({"out": out, "lse": lse, **results}, judges)


@pytest.mark.parametrize(
    ("way", "value"),
    [*((FALLBACK, x) for x in (0.0, 1000.0, np.inf, np.nan)), *((CORE, x) for x in (0.0, 1000.0))],
    indirect=["way"],
)
def test_rows_whose_lse_is_that_of_no_key_add_nothing(value):
    """As ranks put in front of theirs for dropout: whatever their scores are, with and without a mask."""
    case = ct.Case(seqlen_q=21, seqlen_k=30, num_heads=2, head_dim=8, softcap=3.0, sinks=True, alibi_slopes=(2,))
    case = dataclasses.replace(case, bias=(21, 30), dlse=True)
    for mask in (None, (1, 30)):
        case = dataclasses.replace(case, mask=mask)
        arrays, problem, need = case.arrays(), case.problem, ct.gradients_of(case.problem)
        arrays["bias"][:5] = value
        out, lse = cpu.forward(problem, *ct.qkv(arrays), **ct.optional(arrays))
        out[..., :5, :], lse[..., :5], arrays["dout"][..., :5, :] = 0, -np.inf, 0
        options = {**ct.optional_backward(arrays), "need": need}
        found = cpu.backward(problem, arrays["dout"], *ct.qkv(arrays), out, lse, **options)
        arrays["bias"][:5] = 0
        expected = cpu.backward(problem, arrays["dout"], *ct.qkv(arrays), out, lse, **options)
        for name, x, y in zip(need, found, expected, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)
            assert np.isfinite(x).all() and (name not in ("dq", "dbias") or not x[..., :5, :].any())


@every_way
def test_lengths_out_of_range_are_clamped():
    case = ct.Case(batch=2, seqlen_q=3, seqlen_k=5, head_dim=2, kv_lengths=(5, 0))
    assert_same_bits(run(case, kv_lengths=np.array([99, -7])), run(case))
