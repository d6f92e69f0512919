"""Small heads on the CPU, a stack of them at a time: whatever is in a stack, and whoever computes it."""

import dataclasses
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash import cpu
from cuflash.cpu import core, jobs, stacked, stacks
from cuflash.cpu.stacked_scores import weigh
from cuflash.options import Options
from cuflash.problem import make_problem

FEATURES = (*ct.FEATURES, "sinks", "dlse", "dropout")


@pytest.fixture(autouse=True)
def without_the_core(monkeypatch):
    monkeypatch.setattr(core, "why_not", lambda problem=None: "a test of stacks")


def small(**options):
    """Cases that stacks are for."""
    keywords: dict[str, Any] = {"features": FEATURES, "max_head_dim": 64}
    return ct.cases(**keywords | options).filter(lambda case: stacks.serves(case.problem))


def run(case, **replaced):
    """out, lse and every gradient that there is, by name."""
    arrays, problem = case.arrays() | replaced, case.problem
    inputs, need = ct.qkv(arrays), ct.gradients_of(problem)
    out, lse = cpu.forward(problem, *inputs, **ct.optional(arrays) | case.random)
    terms = {**ct.optional_backward(arrays), **case.random, "need": need}
    gradients = cpu.backward(problem, arrays["dout"], *inputs, out, lse, **terms)
    return dict(zip(("out", "lse", *need), (out, lse, *gradients), strict=True))


def judge(case, results):
    ct.assert_forward(case, results["out"], results["lse"])
    ct.assert_backward(case, **{name: x for name, x in results.items() if name[0] == "d"})


def assert_same_bits(results, expected):
    for name, x in expected.items():
        x, y = (np.ascontiguousarray(value).reshape(-1) for value in (results[name], x))
        assert np.array_equal(x.view(np.uint8), y.view(np.uint8)), name


def little_is_much(patch, threads):
    """Work of any size is for so many threads, in stacks of one head, by products of few rows."""
    patch.setattr(stacks, "TINY", 0)
    patch.setattr(stacks, "SERIAL_NS", (0, 0))
    patch.setattr(stacks, "STACK_NS", 1)
    patch.setattr(stacks, "PRODUCT_LIMIT", 2000)
    patch.setattr(stacks, "_count_threads", lambda work: threads)


# ---- against the oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_option_of_small_problems(dtype):
    @given(small(dtypes=[dtype]))
    def every_case(case):
        judge(case, run(case))

    every_case()


@settings(max_examples=60)
@given(small(max_scores=2**13), st.integers(1, 2**12), st.integers(1, 2**14), st.sampled_from([1, 10**6]))
def test_any_stacks_do(case, stack, stack_rows, many):
    """However many heads are in one, and however operands are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacks, "serves", lambda problem: True)
        patch.setattr(stacks, "STACK", stack)
        patch.setattr(stacks, "STACK_ROWS", stack_rows)
        patch.setattr(stacks, "MANY", many)
        patch.setattr(stacks, "EINSUM_ROWS", many)
        judge(case, run(case))


@settings(max_examples=40)
@given(small(max_scores=2**13, dtypes=["float32", "bfloat16"]))
def test_any_number_of_threads_does(case):
    with pytest.MonkeyPatch.context() as patch:
        little_is_much(patch, 3)
        judge(case, run(case))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3000), (3000, 1), (2, 900), (900, 2), (64, 64), (128, 128)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_queries_and_few_keys(sizes, dtype):
    """Neighbours in memory are scores of one row, or of one key."""
    alignments: tuple[tuple[int, Literal[False, "top_left"]], ...] = ((1, False), (6, "top_left"))
    for num_heads, causal in alignments:
        case = ct.Case(
            seqlen_q=sizes[0], seqlen_k=sizes[1], head_dim=16, num_heads=num_heads, num_heads_kv=num_heads // 3 or 1,
            batch=2, dtype=dtype, causal=causal, alibi_slopes=(num_heads,), bias=(1, num_heads, 1, sizes[1]), dlse=True,
        )  # fmt: skip
        assert stacks.serves(case.problem)
        judge(case, run(case))


# ---- what a result depends on ----------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(small(max_scores=2**13))
def test_the_number_of_threads_changes_no_bit(case):
    with pytest.MonkeyPatch.context() as patch:
        little_is_much(patch, 1)
        expected = run(case)
        for threads in (2, 5):
            little_is_much(patch, threads)
            assert_same_bits(run(case), expected)


def test_sums_over_heads_are_made_in_one_order(monkeypatch):
    """By many stacks that are done in any order: the gradient of a bias that all heads share."""
    case = ct.Case(batch=8, num_heads=8, seqlen_q=20, seqlen_k=30, head_dim=8, bias=(20, 1))
    little_is_much(monkeypatch, 4)
    expected = run(case)
    judge(case, expected)
    finished = stacked._Sums.add_to_dbias
    order = []

    def add_late(sums, number, *part):
        """Every other stack waits until the one behind it is there."""
        order.append(number)
        if number % 2 == 0:
            threading.Event().wait(0.001)
        finished(sums, number, *part)

    monkeypatch.setattr(stacked._Sums, "add_to_dbias", add_late)
    for _ in range(3):
        assert_same_bits(run(case), expected)
    assert len(order) == 3 * 64


@settings(max_examples=60)
@given(small(ndims=[4], features=["causal", "window", "softcap", "bias", "mask", "gqa", "alibi_slopes", "sinks"]))
def test_what_other_heads_hold_changes_no_bit(case):
    """Large scores beside small ones: exponentials of small ones alone take a shorter way."""
    case = dataclasses.replace(case, batch=case.batch + 1, score_spread=1.0, bias=None, mask=None, alibi_slopes=None)
    arrays = case.arrays()
    expected = run(case)
    for factor in (1000.0, np.nan):
        others = {name: arrays[name].copy() for name in ("q", "k", "v", "dout")}
        for x in others.values():
            x[1:] *= np.asarray(factor, x.dtype)
        changed = run(case, **others)
        of_operands = ("out", "lse", "dq", "dk", "dv")
        assert_same_bits(
            {name: changed[name][0] for name in of_operands}, {name: expected[name][0] for name in of_operands}
        )


def every_second_element(buffer):
    """A view of them, the last one first; a view also of an array that has no axis."""
    index = (..., *(slice(n - 2, None, -2) for n in buffer.shape))
    return buffer[index]


@settings(max_examples=30)
@given(small(ndims=[4], strides=["contiguous"], layouts=["bhsd"], dtypes=["float32", "bfloat16"]))
def test_results_go_where_they_are_asked_for(case):
    arrays, problem, expected = case.arrays(), case.problem, run(case)
    need = ct.gradients_of(problem)
    buffers = {name: np.full([2 * n + 1 for n in x.shape], 7, x.dtype) for name, x in expected.items()}
    views = {name: every_second_element(x) for name, x in buffers.items()}
    inputs = ct.qkv(arrays)
    cpu.forward(problem, *inputs, **ct.optional(arrays) | case.random, out=views["out"], lse=views["lse"])
    terms = ct.optional_backward(arrays) | case.random | {name: views[name] for name in need}
    cpu.backward(problem, arrays["dout"], *inputs, expected["out"], expected["lse"], **terms, need=need)
    assert_same_bits(views, expected)
    for name, x in views.items():
        x[...] = 7
        assert np.all(buffers[name] == 7)
    for name, x in case.arrays().items():
        assert np.array_equal(arrays[name], x, equal_nan=x.dtype.kind != "b")


@pytest.mark.parametrize(
    "need", [("dv",), ("dq",), ("dk", "dsinks"), ("dbias",), ("dscale", "dsoftcap"), ("dalibi_slopes",)]
)
def test_each_gradient_alone_is_the_same(need):
    case = ct.Case(
        batch=2, num_heads=4, num_heads_kv=2, seqlen_q=20, seqlen_k=33, head_dim=8, causal=True, softcap=3.0,
        sinks=True, bias=(4, 1, 33), alibi_slopes=(2, 4), dropout=0.3, dlse=True, kv_lengths=(33, 20),
    )  # fmt: skip
    arrays, expected = case.arrays(), run(case)
    inputs, terms = ct.qkv(arrays), {**ct.optional_backward(arrays), **case.random, "need": need}
    gradients = cpu.backward(case.problem, arrays["dout"], *inputs, expected["out"], expected["lse"], **terms)
    assert len(gradients) == len(need)
    assert_same_bits(dict(zip(need, gradients, strict=True)), {name: expected[name] for name in need})


# ---- which problems, how many heads, how many threads ----------------------------------------------------------------


def problem_of(batch=1, num_heads=1, seqlen_q=1, seqlen_k=0, head_dim=16, num_heads_kv=0, dtype="float32"):
    """Of arrays that are views of nothing."""
    q = np.broadcast_to(np.zeros((), dtype), (batch, num_heads, seqlen_q, head_dim))
    k = np.broadcast_to(np.zeros((), dtype), (batch, num_heads_kv or num_heads, seqlen_k or seqlen_q, head_dim))
    return make_problem(Options(), q, k, k)


@pytest.mark.parametrize(
    "served, sizes",
    [
        (True, {"seqlen_q": 128, "head_dim": 128, "num_heads": 128, "batch": 128}),
        (False, {"seqlen_q": 129, "head_dim": 128}),
        (True, {"seqlen_q": 181, "head_dim": 64}),
        (False, {"seqlen_q": 182, "head_dim": 64}),
        (True, {"seqlen_q": 1, "seqlen_k": 10_000, "head_dim": 64}),
        (True, {"seqlen_q": 128, "head_dim": 64, "num_heads": 16, "num_heads_kv": 1}),
        (False, {"seqlen_q": 128, "head_dim": 64, "num_heads": 17, "num_heads_kv": 1}),
        (False, {"seqlen_q": 1, "seqlen_k": 16_000, "head_dim": 128}),
        (False, {"batch": 0}),
    ],
)
def test_small_heads_are_served(served, sizes):
    assert stacks.serves(problem_of(**sizes)) == served


def test_blocks_and_pages_go_by_tiles():
    blocks = ct.Case(seqlen_q=40, seqlen_k=40, head_dim=8, block_mask=())
    pages = ct.Case(seqlen_q=1, seqlen_k=32, head_dim=8, page_size=16)
    assert not any(stacks.serves(case.problem) for case in (blocks, pages))
    assert stacks.serves(dataclasses.replace(blocks, block_mask=None).problem)


def heads_of_stacks(monkeypatch, problem):
    """How many heads are in the stacks of a forward and of a backward pass, all of which are counted."""
    counts = []
    for name in ("_forward_stack", "_backward_stack"):
        monkeypatch.setattr(stacked, name, lambda call, stack, *args, **keywords: counts.append(stack.rows_shape[:2]))
    q, k, out, lse = (
        np.empty(shape, np.float32)
        for shape in (problem.q.shape, problem.k.shape, problem.out_shape, problem.lse_shape)
    )
    cpu.forward(problem, q, k, k)
    forward = [batch * heads for batch, heads in counts]
    counts.clear()
    cpu.backward(problem, out, q, k, k, out, lse)
    return forward, [batch * heads for batch, heads in counts]


def test_a_few_small_heads_are_one_stack(monkeypatch):
    for sizes in ({"batch": 64, "num_heads": 16, "seqlen_q": 16}, {"batch": 128, "seqlen_q": 1, "num_heads": 128}):
        problem = problem_of(**sizes)
        assert heads_of_stacks(monkeypatch, problem) == ([problem.batch * problem.num_heads],) * 2


@pytest.mark.parametrize("num_heads_kv", [1, 4, 12])
def test_stacks_are_bounded_and_have_every_head(num_heads_kv, monkeypatch):
    monkeypatch.setattr(stacks, "_count_threads", lambda work: 1)
    problem = problem_of(batch=7, num_heads=12, num_heads_kv=num_heads_kv, seqlen_q=100)
    for counts in heads_of_stacks(monkeypatch, problem):
        assert sum(counts) == 84
        assert all(count * 100 * 100 <= stacks.STACK for count in counts)
        assert len(counts) > 84 * 100 * 100 / stacks.STACK


def test_memory_is_that_of_a_stack(monkeypatch):
    """Results aside, whatever the number of heads."""
    monkeypatch.setattr(stacks, "_count_threads", lambda work: 1)

    def peak(batch):
        case = ct.Case(batch=batch, num_heads=16, seqlen_q=64, seqlen_k=64, head_dim=8, causal=True)
        arrays, problem = case.arrays(), case.problem
        inputs, results = ct.qkv(arrays), {"d" + name: np.empty_like(arrays[name]) for name in "qkv"}
        out, lse = cpu.forward(problem, *inputs)
        tracemalloc.start()
        cpu.forward(problem, *inputs, out=out, lse=lse)
        cpu.backward(problem, arrays["dout"], *inputs, out, lse, **results)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, problem.naive_bytes

    few, many = peak(64), peak(128)
    assert many[0] < 2 * few[0]
    assert many[0] < 4 * 4 * stacks.STACK < many[1] / 4


def test_threads_are_for_much_work(monkeypatch):
    started = []

    def start(count):
        started.append(count)
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(jobs, "ThreadPoolExecutor", start)
    monkeypatch.setattr(stacks, "count_cores", lambda: 3)
    run(ct.Case(batch=8, num_heads=8, seqlen_q=32, seqlen_k=32, head_dim=16))
    assert not started
    run(ct.Case(batch=64, num_heads=16, seqlen_q=64, seqlen_k=64, head_dim=16))
    assert started == [2, 2]


def test_an_exception_in_a_thread_reaches_the_caller(monkeypatch):
    little_is_much(monkeypatch, 4)
    main, threads = threading.get_ident(), threading.active_count()

    def fail(*args):
        if threading.get_ident() != main:
            raise MemoryError("in a thread")
        return weigh(*args)

    monkeypatch.setattr(stacked, "weigh", fail)
    with pytest.raises(MemoryError, match="in a thread"):
        for _ in range(100):  # a thread that starts late finds nothing to do
            run(ct.Case(batch=64, num_heads=4, seqlen_q=60, seqlen_k=60, head_dim=8))
    assert threading.active_count() == threads


def test_products_of_threads_are_small(monkeypatch):
    """Too small for a BLAS to start threads of its own."""
    sizes, matmul = [], np.matmul
    case = ct.Case(batch=4, num_heads=16, seqlen_q=128, seqlen_k=128, head_dim=128)

    def measured(a, b, out):
        sizes.append(a.shape[-2] * a.shape[-1] * b.shape[-1])
        return matmul(a, b, out)

    monkeypatch.setattr(np, "matmul", measured)
    run(case)
    assert sizes and max(sizes) <= jobs.PRODUCT_LIMIT
    sizes.clear()
    run(dataclasses.replace(case, batch=1, num_heads=1, num_heads_kv=1))
    assert max(sizes) == 128**3


def test_a_thread_keeps_a_little_memory_between_calls(monkeypatch):
    """What one call used serves the next; more than KEPT_BYTES is given back; a call within a call has its own."""
    monkeypatch.setattr(jobs, "_kept", threading.local())
    first, within = (jobs.take_workspace(np.dtype("f4")) for _ in range(2))
    assert within is not first
    first.take("a", 10)
    jobs.keep_workspace(within)
    jobs.keep_workspace(first)
    other = jobs.take_workspace(np.dtype("f8"))
    assert other is not first and other.take("a", 10).dtype == np.float64
    jobs.keep_workspace(other)
    again = jobs.take_workspace(np.dtype("f4"))
    assert again is first
    again.take("b", jobs.KEPT_BYTES // 4)
    jobs.keep_workspace(again)
    assert jobs.take_workspace(np.dtype("f4")) is not first


def test_a_small_problem_keeps_its_stack(monkeypatch):
    """The next call uses the same one; a call within a call, as from a signal handler, has its own."""
    case = ct.Case(batch=2, num_heads=2, seqlen_q=9, seqlen_k=17, head_dim=8, causal=True, softcap=3.0)
    arrays, problem = case.arrays(), case.problem
    qkv, others = [arrays[name] for name in "qkv"], [2 * arrays[name] for name in "qkv"]
    expected, of_others = ([x.copy() for x in cpu.forward(problem, *inputs)] for inputs in (qkv, others))
    used, within = [], []

    def interrupted(stack, *args):
        used.append(stack)
        if len(used) == 2:
            within.append(cpu.forward(problem, *others))
        return weigh(stack, *args)

    monkeypatch.setattr(stacked, "weigh", interrupted)
    results = [cpu.forward(problem, *qkv) for _ in range(3)]
    assert used[0] is used[1] is not used[2] and used[3] in (used[1], used[2])
    for got, wanted in (*((x, expected) for x in results), (within[0], of_others)):
        for x, y in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_thread_keeps_few_stacks(monkeypatch):
    """Those of the last small problems, and of no large one."""
    monkeypatch.setattr(stacks, "_kept", threading.local())
    sizes = [*range(1, 3 * stacks.KEPT_STACKS), 300]
    for n in sizes:
        case = ct.Case(seqlen_q=n, seqlen_k=n, head_dim=8, causal=True)
        arrays, problem = case.arrays(), case.problem
        cpu.forward(problem, *(arrays[name] for name in "qkv"))
        plan = stacks.plan_of(problem, False, True)
        assert plan is not None and plan.is_one_stack
        kept = list(stacks._kept.stacks)
        assert len(kept) <= stacks.KEPT_STACKS
        assert (kept[-1].problem is problem) == (n < 300)
        assert all(stack.nbytes <= stacks.KEPT_BYTES for stack in stacks._kept.stacks.values())
