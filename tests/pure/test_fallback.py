"""The NumPy fallback: jobs and tiles of any size, threads, memory, and the warning that says why it computes."""

import dataclasses
import threading
import tracemalloc
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash import cpu
from cuflash.cpu import core, fallback, gemm, jobs
from tests.judging import assert_oracle, assert_same_bits
from tests.pure.test_cpu import NAMES, cut_small, run
from tests.sampling import examples
from tests.ways import CORE, FALLBACK

pytestmark = pytest.mark.usefixtures("way")


SOME_FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", "packed")


@settings(max_examples=examples(60))
@given(
    ct.cases(features=SOME_FEATURES, max_scores=2**13, max_head_dim=32),
    st.sampled_from((1, 2**8, 2**12)),
    st.sampled_from((1, 16, 48)),
    st.sampled_from((1, 40)),
)
def test_any_jobs_and_tiles_do(case, pairs, rows, keys):
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch, pairs, rows, keys)
        assert_oracle(case, run(case, every=True))


@settings(max_examples=examples(40))
@given(ct.cases(features=SOME_FEATURES, max_scores=2**13, max_head_dim=32))
def test_the_number_of_threads_changes_no_bit(case):
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        with jobs.cpu_threads(1):
            expected = run(case, every=True)
        for threads in (2, 5):
            with jobs.cpu_threads(threads):
                assert_same_bits(run(case, every=True), expected)


@settings(max_examples=examples(60))
@given(
    ct.cases(
        ndims=[4],
        features=["causal", "window", "softcap", "gqa", "sinks", "dropout"],
        max_scores=2**13,
        score_spreads=[1.0],
    )
)
def test_what_other_heads_hold_changes_no_bit(case):
    """Large scores, or none that is a number, next to ordinary ones; in the same jobs, since these heads are small."""
    case = dataclasses.replace(case, batch=case.batch + 1)
    arrays, expected = case.arrays(), run(case)
    for factor in (1000.0, np.nan):
        others = {name: arrays[name].copy() for name in ("q", "k", "v", "dout")}
        for x in others.values():
            x[1:] *= np.asarray(factor, x.dtype)
        changed = run(case, **others)
        assert_same_bits({name: changed[name][0] for name in NAMES}, {name: expected[name][0] for name in NAMES})


def test_large_problems_use_every_core_and_small_ones_none(monkeypatch):
    started, original = [], jobs.results

    def results(work, own, threads):
        if threads > 1:
            started.append(threads)
        return original(work, own, threads)

    monkeypatch.setattr(jobs, "results", results)
    with jobs.cpu_threads(3):
        run(ct.Case(batch=4, num_heads=4, seqlen_q=64, seqlen_k=64, head_dim=8))
        assert not started
        run(ct.Case(batch=64, num_heads=16, seqlen_q=64, seqlen_k=64, head_dim=16))
    assert started == [3, 3]


@pytest.mark.parametrize("is_in_thread", [True, False])
def test_an_exception_reaches_the_caller_when_all_threads_have_ended(is_in_thread, monkeypatch):
    """Of a job, or of this thread while it adds results up."""
    computed = []

    def fail(*args, **keywords):
        computed.append(args)
        if len(computed) > 5:
            raise MemoryError("for a test")
        return original(*args, **keywords)

    owner, name = (fallback.Job, "scores") if is_in_thread else (fallback.GradientSums, "add")
    case = ct.Case(num_heads=64, seqlen_q=600, seqlen_k=300, head_dim=8)
    threads, arrays = threading.active_count(), case.arrays()
    results = cpu.forward(case.problem, *ct.qkv(arrays))
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(MemoryError, match="for a test") as caught, jobs.cpu_threads(4):
        cpu.backward(case.problem, arrays["dout"], *ct.qkv(arrays), *results)
    assert threading.active_count() == threads and caught  # while the traceback, and so all frames, are still there


def test_products_are_small(monkeypatch):
    """Too small for a BLAS to start threads of its own besides those of the jobs."""
    sizes, matmul = [], np.matmul

    def measured(a, b, **keywords):
        sizes.append(a.shape[-2] * a.shape[-1] * b.shape[-1])
        return matmul(a, b, **keywords)

    monkeypatch.setattr(np, "matmul", measured)
    run(ct.Case(num_heads=2, seqlen_q=300, seqlen_k=300, head_dim=200))
    assert sizes and max(sizes) <= gemm.PRODUCT_LIMIT


def test_tiles_that_nobody_sees_are_skipped(monkeypatch):
    computed = []
    scores = fallback.Job.scores

    def counted(job, tile):
        computed.append(len(job.rows) * len(tile.keys))
        return scores(job, tile)

    monkeypatch.setattr(fallback.Job, "scores", counted)

    def sample(mask=None, **options):
        computed.clear()
        case = ct.Case(seqlen_q=2048, seqlen_k=2048, head_dim=8, mask=None if mask is None else mask.shape, **options)
        arrays = case.arrays()
        optional = ct.optional(arrays) | ({} if mask is None else {"mask": mask})
        cpu.forward(case.problem, *ct.qkv(arrays), **optional)
        return sum(computed) / 2048**2

    assert sample() == 1
    assert sample(causal=True) < 0.54
    assert sample(window=(100, 0)) < 0.12
    assert sample(kv_lengths=(512,)) == 0.25
    assert sample(kv_lengths=(0,)) == 0
    assert sample(mask=np.arange(2048) < 640) <= 0.5
    assert sample(mask=np.zeros((1, 1), bool)) == 0


def test_memory_is_linear_in_the_sequence_length():
    def peak(n, dtype):
        case = ct.Case(num_heads=2, seqlen_q=n, seqlen_k=n, head_dim=16, dtype=dtype, causal=True)
        arrays = case.arrays()
        problem, inputs = case.problem, ct.qkv(arrays)
        tracemalloc.start()
        with jobs.cpu_threads(2):  # each has tiles of its own
            out, lse = cpu.forward(problem, *inputs)
            cpu.backward(problem, arrays["dout"], *inputs, out, lse)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, problem.naive_bytes

    short, _ = peak(1024, "float16")
    long, naive = peak(4096, "float16")
    assert long < 4 * short
    assert long < naive / 10


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_weight_is_a_subnormal_number(dtype):
    """They would slow products down a hundredfold; the rule counts them as zeros."""
    x = np.concatenate([-np.linspace(0, 1000, 5000), [0, -np.inf, np.nan]]).astype(dtype)
    got = fallback._exponentials(x.copy(), np.zeros((), dtype))
    least = fallback.LEAST_WEIGHT[np.dtype(dtype)]
    np.testing.assert_array_equal(got, np.where(np.exp(x) < least, 0, np.exp(x)))
    assert np.isnan(got[-1]) and got[-2] == 0 and np.min(got[:-1], where=got[:-1] > 0, initial=1) < 2 * least


# ---- without the core ------------------------------------------------------------------------------------------------


def warnings_of(calls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cpu._warn_once.cache_clear()
        for call in calls:
            call()
    return caught


def test_the_first_call_without_the_core_warns(monkeypatch):
    """Once, and names the line of the caller; the variable of the environment silences it."""
    q = np.ones((2, 5, 4), np.float32)
    score = cuflash.FlashAttention(score=lambda s, i, j: s - abs(i - j))
    calls = [lambda: cuflash.attention(q, q, q), lambda: score.forward(q, q, q)]
    monkeypatch.delenv("CUFLASH_NO_CORE_WARNING", raising=False)
    for ordered in (calls, calls[::-1]):
        (warning,) = warnings_of(ordered)
        assert warning.category is RuntimeWarning and warning.filename == __file__
        assert f"slower: {core.why_not()}. Set CUFLASH_NO_CORE_WARNING=1" in str(warning.message)
    monkeypatch.setenv("CUFLASH_NO_CORE_WARNING", "1")
    assert not warnings_of(calls)


@pytest.mark.parametrize("way", [CORE], indirect=True)
def test_a_problem_that_the_core_leaves_out_is_no_reason_to_warn(monkeypatch):
    q = np.ones((2, 5, 4), np.float32)
    score, lengths = cuflash.FlashAttention(score=lambda s, i, j: s - abs(i - j)), np.array([3], np.int32)
    assert "NumPy, and not the compiled core" in score.plan(q, q, q, kv_lengths=lengths).describe(verbose=True, width=0)
    monkeypatch.delenv("CUFLASH_NO_CORE_WARNING", raising=False)
    assert not warnings_of([lambda: score.forward(q, q, q, kv_lengths=lengths)])


def lines_of(plan, first):
    """Those lines of a plan that begin with a word, without it."""
    lines = plan.describe(width=0).splitlines()
    return [line.split(maxsplit=1)[1] for line in lines if line.split()[0] == first]


@pytest.mark.parametrize("way", [CORE, FALLBACK], indirect=True)
def test_plans_say_which_path_computes_each_pass(way):
    """The fallback has one way for all options; of the core, gradients besides those of functions are not."""
    q = np.ones((1, 2, 100, 4), np.float32)
    mask: dict[str, Any] = {"mask": lambda i, j: (i + j) % 3 > 0}
    bias = np.ones((100, 100), np.float32)
    of_core, of_fallback = f"compiled core, {core.processor()}", "NumPy, and not the compiled core: "
    of_functions = f"{of_core}, and NumPy for functions"
    of_bias = f"{of_functions}; backward by {of_fallback}gradients besides those of score_mod args: dbias"
    for functions, need, expected in (
        ({}, ("dq", "dbias"), of_core),
        (mask, ("dq",), of_functions),
        (mask, ("dq", "dbias"), of_bias),
    ):
        plan = cuflash.FlashAttention(**functions).plan(q, q, q, bias=bias, need=need)
        expected = expected if way == CORE else f"{of_fallback}a test of the fallback"
        assert lines_of(plan, "path") == [f"{expected}; the arrays are in host memory"]


@pytest.mark.parametrize("way", [CORE, FALLBACK], indirect=True)
def test_plans_say_the_dtypes_of_fp8(way):
    q, k = (x.astype(ml_dtypes.float8_e4m3fn) for x in np.ones((2, 1, 20, 16), np.float32))
    one: Any = {"k_scale": np.float32(1), "v_scale": np.float32(1)}
    plan = cuflash.FlashAttention().plan(q, k, k, q_scale=np.float32(1), **one)
    assert lines_of(plan, "precision") == ["float8_e4m3fn in q, k and v, bfloat16 out, float32 inside"]
    plan = cuflash.FlashAttention().plan(q.astype(np.float16), k, k, **one)
    assert lines_of(plan, "precision") == ["float16 in and out, float8_e4m3fn in k and v, float32 inside"]
