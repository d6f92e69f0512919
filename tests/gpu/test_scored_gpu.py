"""Scores and masks of a caller on the device: in graphs, of other lengths, and in CUDA alone."""

import numpy as np
import pytest

import cuflash
from cuflash.testing import check_gradients
from cuflash.testing.rule import yardsticks
from tests.cuda_scores import CUDA_SCORES, HEAD
from tests.judging import assert_within
from tests.scored import SCORES, Scored, few_tiles, score_args_of

pytestmark = pytest.mark.gpu


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
    from cuflash.gpu import device as gpu_device

    def score(s, i, j, *, a):
        return s + a[j] * cuflash.exp(-1.0 * cuflash.abs(i - j))

    attn = cuflash.FlashAttention(score=score, mask=lambda i, j, *, d: d[i] == d[j])
    loaded = []
    load = gpu_device.load_function

    def counted(spec, device_id):
        loaded.append(spec.defines)
        return load(spec, device_id)

    monkeypatch.setattr(gpu_device, "load_function", counted)
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
