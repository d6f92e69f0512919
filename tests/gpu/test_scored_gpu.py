"""Scores and masks of a caller on the device, against the oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.testing import check_gradients
from cuflash.testing.rule import gradients_of, measure, yardsticks
from tests.cuda_scores import CUDA_SCORES, HEAD
from tests.judging import assert_within
from tests.sampling import examples
from tests.scored import SCORES, SCORES_AND_TEXTS, Scored, few_tiles, score_args_of, scored

pytestmark = pytest.mark.gpu
# Separate tests, whose kernels are compiled at the same time.
by_dtype = pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])


@by_dtype
@settings(max_examples=examples(100))
@given(data=st.data())
def test_results_are_those_of_the_formula(cupy, dtype, data):
    judged(cupy, data.draw(scored((dtype,), max_seqlen=600)))


@by_dtype
@settings(max_examples=examples(100))
@given(data=st.data())
def test_results_of_texts_are_those_of_the_formula(cupy, dtype, data):
    judged(cupy, data.draw(scored((dtype,), max_seqlen=600, scores=(*CUDA_SCORES,))))


def judged(cupy, case):
    """Hold both passes against the oracle, and gradients of arrays against those of a second call."""
    arrays = {name: cupy.asarray(x) for name, x in case.arrays.items()}
    inputs = [arrays[name] for name in ("q", "k", "v")]
    optional = {name: arrays[name] for name in case.optional} | case.random
    out, lse = case.attention.forward(*inputs, **optional)
    need = gradients_of(case.problem)
    keywords = {**optional, "dlse": arrays["dlse"], "need": need}
    gradients = case.attention.backward(arrays["dout"], *inputs, out, lse, **keywords)
    judges = yardsticks(case.problem, case.arrays, **case.random)
    results = {"out": out, "lse": lse, **gradients._asdict()}
    assert_within(results, judges)
    again = case.attention.backward(arrays["dout"], *inputs, out, lse, **keywords)
    for name in case.problem.score_arg_gradients:  # in any order of additions
        np.testing.assert_array_equal(cupy.asnumpy(getattr(again, name)), cupy.asnumpy(getattr(gradients, name)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("score", ["alibi", "distance", "box", "tempered", "t5", "decay", *CUDA_SCORES])
def test_gradients_of_arrays_are_the_same_run_after_run(cupy, score, head_dim):
    """Of many blocks, which end in another order each time."""
    sizes = (2, 4, 700, 900)
    random = np.random.default_rng(3)
    shapes = {"q": sizes[2], "k": sizes[3], "v": sizes[3], "dout": sizes[2]}
    host = {name: random.standard_normal((*sizes[:2], n, head_dim)).astype(np.float16) for name, n in shapes.items()}
    host |= score_args_of((SCORES_AND_TEXTS[score],), sizes, "float16", 3)
    case = Scored(cuflash.FlashAttention(score=SCORES_AND_TEXTS[score]), host, {}, score)
    arrays = {name: cupy.asarray(x) for name, x in host.items()}
    q, k, v, dout = (arrays[name] for name in shapes)
    optional = {name: arrays[name] for name in case.optional}
    out, lse = case.attention.forward(q, k, v, **optional)
    names = case.problem.score_arg_gradients
    need = ("dq", "dk", "dv", *names)
    results = [case.attention.backward(dout, q, k, v, out, lse, need=need, **optional) for _ in range(5)]
    judges = yardsticks(case.problem, host)
    measured = [measure(name, getattr(results[0], name), judges[name]) for name in need]
    assert not any(m.failure for m in measured), "\n".join(map(str, measured))
    for name in names:
        for other in results[1:]:
            np.testing.assert_array_equal(cupy.asnumpy(getattr(other, name)), cupy.asnumpy(getattr(results[0], name)))


def test_tables_are_filled_within_a_graph(cupy):
    """Each launch reads the arrays as they are then."""
    sizes = (2, 4, 300, 300)
    random = np.random.default_rng(7)
    host = {name: random.standard_normal((*sizes[:2], 300, 64)).astype(np.float16) for name in ("q", "k", "v", "dout")}
    host |= score_args_of((SCORES["t5"],), sizes, "float16", 7)
    case = Scored(cuflash.FlashAttention(score=SCORES["t5"]), host, {}, "t5")
    arrays = {name: cupy.asarray(x) for name, x in host.items()}
    inputs, need = [arrays[name] for name in ("q", "k", "v")], ("dq", "dk", "dv", "dtable")

    def call():
        out, lse = case.attention.forward(*inputs, table=arrays["table"])
        q, k, v = inputs
        gradients = case.attention.backward(arrays["dout"], q, k, v, out, lse, table=arrays["table"], need=need)
        return {"out": out, "lse": lse, **gradients._asdict()}

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.begin_capture()
        results = call()
        graph = stream.end_capture()
        for _ in range(2):
            host["table"] = random.standard_normal(host["table"].shape).astype(host["table"].dtype)
            arrays["table"].set(host["table"])
            graph.launch(stream)
            stream.synchronize()
            judges = yardsticks(case.problem, host)
            assert_within(results, judges)


def test_new_lengths_compile_nothing(cupy, monkeypatch):
    from cuflash.gpu import backend as gpu_backend

    def score(s, i, j, *, a):
        return s + a[j] * cuflash.exp(-1.0 * cuflash.abs(i - j))

    attn = cuflash.FlashAttention(score=score, mask=lambda i, j, *, d: d[i] == d[j])
    loaded = []
    load = gpu_backend.load_function

    def counted(spec, device_id):
        loaded.append(spec.defines)
        return load(spec, device_id)

    monkeypatch.setattr(gpu_backend, "load_function", counted)
    for n in (100, 333, 1000):
        q = cupy.ones((2, n, 64), cupy.float16)
        attn.forward(q, q, q, a=cupy.zeros(n, cupy.float32), d=cupy.arange(n) // 50)
    assert len(set(loaded)) == len(loaded) / 3


@pytest.mark.parametrize("score", CUDA_SCORES)
def test_gradients_of_cuda_scores_are_those_of_differences(cupy, score):
    case = few_tiles((score, None), "float64")
    arrays = {name: cupy.asarray(x) for name, x in case.arrays.items() if name != "dout"}
    found = check_gradients(case.attention, **arrays)
    assert {f"d{name}" for name, x in arrays.items() if x.dtype.kind == "f"} == set(found)


def test_a_cuda_score_needs_no_python_on_the_device_and_says_what_does_not_compile(cupy):
    q = cupy.asarray(np.random.default_rng(0).standard_normal((2, 100, 64)).astype(np.float16))
    slopes = cupy.asarray([0.1, 0.2], cupy.float32)
    source = f"{HEAD} {{ return s - given.slopes(head) * abs(i - j); }}"
    attn = cuflash.FlashAttention(score=cuflash.Score(cuda=source, arrays=["slopes"]))
    expected = cuflash.FlashAttention().forward(q, q, q, alibi_slopes=slopes)
    for one, other in zip(attn.forward(q, q, q, slopes=slopes), expected, strict=True):
        cupy.testing.assert_allclose(one.astype(cupy.float32), other.astype(cupy.float32), atol=4e-3)
    wrong = cuflash.FlashAttention(score=cuflash.Score(cuda=f"\n{HEAD} {{ return s + slope; }}"))
    with pytest.raises(ValueError, match=r'score\(2\): error: identifier "slope" is undefined'):
        wrong.forward(q, q, q)
