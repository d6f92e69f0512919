"""The public interface on NumPy arrays, and its dispatch to the GPU with stand-ins for CuPy and the launcher."""

import doctest
import inspect
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash import compiler, flash_attention, functional, host, interop, merging, operands, planning, reference
from cuflash.host import CpuPlan
from cuflash.terms import GRADIENTS, NAMES, PassArrays, Terms, checked

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


# ---- what it computes ------------------------------------------------------------------------------------------------


def test_plain_matrices_are_the_formula():
    q, k, v = normal(5, 4), normal(7, 4), normal(7, 3)
    np.testing.assert_allclose(cuflash.attention(q, k, v), softmax(q @ k.T / 2) @ v, rtol=1e-12)


@settings(max_examples=150)
@given(ct.cases(max_seqlen=65, max_head_dim=40, max_scores=2**13, features=(*ct.FEATURES, *ct.MORE_FEATURES)))
def test_forward_and_backward_obey_the_oracle(case):
    attn = cuflash.FlashAttention(**case.keywords)
    arrays = case.arrays()
    q, k, v, dout, terms = arrays["q"], arrays["k"], arrays["v"], arrays["dout"], ct.optional(arrays)
    out, lse = attn.forward(q, k, v, **terms)
    ct.assert_forward(case, out, lse)
    need = ct.gradients_of(case.problem)
    gradients = attn.backward(dout, q, k, v, out, lse, **ct.optional_backward(arrays), need=need)
    ct.assert_backward(case, **gradients._asdict())
    np.testing.assert_array_equal(cuflash.attention(q, k, v, **case.keywords, **terms), out)


def test_order_of_scale_softcap_slopes_bias_and_masks():
    q, k, v = normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 3)
    slopes, bias, mask = np.array([0.3, 0.1]), normal(3, 5), normal(2, 3, 5) > -0.5
    mask[..., 2] = True  # every row sees something
    i, j, d = np.arange(3)[:, None], np.arange(5), 5 - 3
    scores = 1.5 * q @ k.swapaxes(1, 2)
    scores = 2 * np.tanh(scores / 2)
    scores = scores - slopes[:, None, None] * np.abs(i + d - j)
    scores = scores + bias
    scores[~(mask & (j <= i + d) & (j >= i + d - 2) & (j < 4))] = -np.inf
    out = cuflash.attention(
        q, k, v, scale=1.5, softcap=2, alibi_slopes=slopes, bias=bias, mask=mask, causal=True, window=(2, None),
        kv_lengths=np.array([4]),
    )  # fmt: skip
    np.testing.assert_allclose(out, softmax(scores) @ v, rtol=1e-12)


def test_mask_and_lengths_do_not_move_the_diagonal():
    q = k = v = np.eye(4)
    _, lse = cuflash.FlashAttention(causal=True, scale=0).forward(q, k, v, kv_lengths=np.array([2]))
    np.testing.assert_allclose(np.exp(lse), [1, 2, 2, 2])


def test_lse_is_the_natural_logarithm():
    q, k = normal(3, 4), normal(5, 4)
    lse = cuflash.FlashAttention(scale=1).forward(q, k, k).lse
    np.testing.assert_allclose(lse, np.log(np.exp(q @ k.T).sum(axis=1)))


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (0, 0, 0, 4)])
@pytest.mark.parametrize("keys", [0, 5])
def test_axes_of_length_zero(shape, keys, causal):
    batch, heads, seqlen_q, head_dim = shape
    q, k, v = np.ones(shape), np.ones((batch, heads, keys, head_dim)), np.ones((batch, heads, keys, 2))
    attn = cuflash.FlashAttention(causal=causal)
    out, lse = attn.forward(q, k, v)
    assert out.shape == (batch, heads, seqlen_q, 2)
    assert lse.shape == (batch, heads, seqlen_q)
    gradients = attn.backward(np.ones_like(out), q, k, v, out, lse)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    if keys == 0:
        assert not out.any()
        assert (lse == -np.inf).all()
        assert not gradients.dq.any()
    if seqlen_q == 0:
        assert not gradients.dk.any()
        assert not gradients.dv.any()


def test_sinks_are_one_more_key_without_a_value():
    q, k, v, dout, sinks = normal(2, 5, 4), normal(2, 7, 4), normal(2, 7, 3), normal(2, 5, 3), np.array([0.7, -1.1])
    attn, mask = cuflash.FlashAttention(scale=1), normal(5, 7) > 0
    mask[3] = False
    out, lse = attn.forward(q, k, v, mask=mask, sinks=sinks)
    # The same by a key that only the bias gives a score.
    k8, v8 = (np.concatenate([x, np.zeros_like(x[:, :1])], axis=1) for x in (k, v))
    bias = np.zeros((2, 5, 8))
    bias[:, :, 7] = sinks[:, None]
    mask8 = np.concatenate([mask, np.ones((5, 1), bool)], axis=1)
    expected = attn.forward(q, k8, v8, mask=mask8, bias=bias)
    np.testing.assert_allclose(out, expected.out, rtol=1e-12)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-12)
    np.testing.assert_array_equal(out[:, 3], 0)
    np.testing.assert_allclose(lse[:, 3], sinks)
    gradients = attn.backward(dout, q, k, v, out, lse, mask=mask, sinks=sinks)
    others = attn.backward(dout, q, k8, v8, *expected, mask=mask8, bias=bias)
    np.testing.assert_allclose(gradients.dq, others.dq, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradients.dk, others.dk[:, :7], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradients.dv, others.dv[:, :7], rtol=1e-10, atol=1e-12)


@given(st.sets(st.sampled_from(GRADIENTS)), st.permutations(GRADIENTS), st.sets(st.sampled_from(GRADIENTS)))
def test_exactly_the_gradients_that_are_needed(need, order, given_too):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 5, 4))
    terms: Terms = {"bias": rng.standard_normal((5, 1)), "sinks": np.zeros(2), "alibi_slopes": np.ones(2)}
    attn = cuflash.FlashAttention(softcap=2.0)
    out, lse = attn.forward(q, q, q, **terms)
    every = attn.backward(out, q, q, q, out, lse, **terms, need=GRADIENTS)
    assert every._fields == GRADIENTS
    assert [x.shape for x in every[3:]] == [(5, 1), (2,), (), (), (2,)]
    results = {name: np.full_like(getattr(every, name), np.nan) for name in given_too}
    need_in_order = [name for name in order if name in need]
    gradients = attn.backward(out, q, q, q, out, lse, **terms, need=need_in_order, **results)
    assert gradients._fields == tuple(name for name in GRADIENTS if name in need | given_too)
    for name, x in gradients._asdict().items():
        np.testing.assert_array_equal(x, getattr(every, name))
        assert name not in results or x is results[name]


def test_gradients_without_need_are_three():
    q, dbias, bias = normal(2, 5, 4), np.full((10, 5), np.nan)[::2], normal(5, 5)
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, q, q, bias=bias)
    dq, dk, dv = gradients = attn.backward(out, q, q, q, out, lse, bias=bias)
    assert type(gradients) is cuflash.Gradients
    assert gradients == (dq, dk, dv)
    assert attn.backward(out, q, q, q, out, lse, bias=bias, dbias=dbias).dbias is dbias
    # Weights sum to one whatever the bias of their row is.
    np.testing.assert_allclose(dbias.sum(axis=1), 0, atol=1e-14)


def test_rows_that_see_nothing():
    q, k, v = normal(5, 4), normal(2, 4), normal(2, 3)
    attn = cuflash.FlashAttention(causal=True)
    out, lse = attn.forward(q, k, v)
    assert not out[:3].any()
    assert (lse[:3] == -np.inf).all()
    assert np.isfinite(lse[3:]).all()
    dout = np.ones_like(out)
    gradients = attn.backward(dout, q, k, v, out, lse)
    assert not gradients.dq[:3].any()
    dout[:3] = 1000  # nothing may come of it
    for x, y in zip(gradients, attn.backward(dout, q, k, v, out, lse), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    dtype = ct.numpy_dtype(dtype)
    q, k, v = normal(2, 5, 4, dtype=dtype), normal(1, 6, 4, dtype=dtype), normal(1, 6, 3, dtype=dtype)
    out, lse = cuflash.FlashAttention().forward(q, k, v)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert {x.dtype for x in cuflash.FlashAttention().backward(out, q, k, v, out, lse)} == {dtype}


@pytest.mark.parametrize("ndim", [2, 3, 4])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_and_missing_axes(layout, ndim):
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 3)
    expected, expected_lse = cuflash.FlashAttention().forward(q, k, v)
    arrays = [q, k, v, expected]
    if layout == "bshd":
        arrays = [x.swapaxes(1, 2) for x in arrays]
    if ndim == 3:
        arrays, expected_lse = [x[1] for x in arrays], expected_lse[1]
    if ndim == 2:  # the last head of q reads the last head of k and v
        arrays = [x[1, -1] if layout == "bhsd" else x[1, :, -1] for x in arrays]
        expected_lse = expected_lse[1, -1]
    *qkv, expected = arrays
    out, lse = cuflash.FlashAttention(layout=layout).forward(*qkv)
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


# ---- what it takes and gives back ------------------------------------------------------------------------------------


def test_results_have_names():
    q = normal(5, 4)
    attn = cuflash.FlashAttention()
    result = attn.forward(q, q, q)
    assert isinstance(result, cuflash.ForwardResult)
    assert result._fields == ("out", "lse")
    gradients = attn.backward(result.out, q, q, q, *result)
    assert isinstance(gradients, cuflash.Gradients)
    assert gradients._fields == ("dq", "dk", "dv")


def scattered(x):
    """An array of x's shape and dtype, full of NaN, whose elements lie far apart and in descending order."""
    buffer = np.full([3 * n + 1 for n in x.shape], np.nan, x.dtype)
    return buffer[(slice(None, 0, -3),) * x.ndim]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prepare", [lambda x: np.full_like(x, np.nan), scattered])
def test_given_results_are_written_and_returned(prepare, dtype):
    q, k, v, dout = (normal(2, 5, 4, seed=n, dtype=ct.numpy_dtype(dtype)) for n in range(4))
    attn = cuflash.FlashAttention(causal=True)
    expected = attn.forward(q, k, v)
    expected_gradients = attn.backward(dout, q, k, v, *expected)
    given_results = {name: prepare(x) for name, x in expected._asdict().items()}
    result = attn.forward(q, k, v, **given_results)
    given_gradients = {name: prepare(x) for name, x in expected_gradients._asdict().items()}
    gradients = attn.backward(dout, q, k, v, *result, **given_gradients)
    for got, given_array, right in zip(
        result + gradients, [*given_results.values(), *given_gradients.values()], expected + expected_gradients,
        strict=True,
    ):  # fmt: skip
        assert got is given_array
        np.testing.assert_array_equal(got, right)
    out = prepare(expected.out)
    assert cuflash.attention(q, k, v, causal=True, out=out) is out
    np.testing.assert_array_equal(out, expected.out)


def test_results_inside_one_packed_array():
    packed, gradients = normal(2, 5, 3, 4, 8), np.full((2, 5, 3, 4, 8), np.nan)
    q, k, v = (packed[:, :, n] for n in range(3))
    dq, dk, dv = (gradients[:, :, n] for n in range(3))
    attn = cuflash.FlashAttention(layout="bshd")
    out, lse = attn.forward(q, k, v)
    attn.backward(out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
    np.testing.assert_array_equal(gradients, np.stack(attn.backward(out, q, k, v, out, lse), axis=2))


def test_read_only_inputs_are_taken_and_left_alone():
    q, k, v = normal(2, 5, 4), normal(2, 6, 4), normal(2, 6, 4)
    copies = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    out, lse = cuflash.FlashAttention().forward(q, k, v)
    cuflash.FlashAttention().backward(out, q, k, v, out, lse)
    for x, copy in zip((q, k, v), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_memory_mapped_files(tmp_path):
    path = tmp_path / "q.npy"
    np.save(path, normal(5, 4))
    q = np.load(path, mmap_mode="r")
    out = cuflash.attention(q, q, q)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, cuflash.attention(normal(5, 4), normal(5, 4), normal(5, 4)))
    given_out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", out.dtype, out.shape)
    assert cuflash.attention(q, q, q, out=given_out) is given_out
    np.testing.assert_array_equal(given_out, out)


def test_elements_that_are_not_aligned():
    records = np.zeros((5, 4), np.dtype([("flag", np.uint8), ("value", np.float32)]))
    records["value"] = normal(5, 4)
    q = records["value"]
    assert not q.flags.aligned
    np.testing.assert_array_equal(cuflash.attention(q, q, q), cuflash.attention(q.copy(), q.copy(), q.copy()))


def test_one_object_serves_many_threads():
    attn = cuflash.FlashAttention(causal=True)
    inputs = [normal(2, n, 4) for n in range(1, 40)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda q: attn.forward(q, q, q).out, inputs))
    for q, out in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(out, attn.forward(q, q, q).out)


def test_same_bits_every_time():
    q, k, v = (normal(2, 3, 70, 16, seed=n, dtype=np.float32) for n in range(3))
    attn = cuflash.FlashAttention(deterministic=True)
    first = attn.forward(q, k, v)
    gradients = attn.backward(first.out, q, k, v, *first)
    for _ in range(5):
        for x, y in zip(first, attn.forward(q, k, v), strict=True):
            np.testing.assert_array_equal(x, y)
        for x, y in zip(gradients, attn.backward(first.out, q, k, v, *first), strict=True):
            np.testing.assert_array_equal(x, y)


def test_an_object_prints_and_pickles():
    attn = cuflash.FlashAttention(causal="top_left", window=(3, None))
    options = "causal='top_left', scale=None, window=(3, None), softcap=None, layout='bhsd', deterministic=False"
    options += ", precision='highest', dropout=0.0, block_size=(128, 128)"
    text = f"FlashAttention({options})"
    assert repr(attn) == text
    assert repr(pickle.loads(pickle.dumps(attn))) == text
    assert eval(text, {"FlashAttention": cuflash.FlashAttention}).options == attn.options


def test_plan_and_compile_of_host_arrays():
    q, k = np.empty((2, 8, 100, 64), np.float32), np.empty((2, 2, 200, 64), np.float32)
    attn = cuflash.FlashAttention(causal=True)
    cpu_plan = attn.plan(q, k, k, kv_lengths=np.array([3, 4]))
    assert isinstance(cpu_plan, CpuPlan)
    assert cpu_plan.problem.diagonal == 100
    text = cpu_plan.describe()
    for words in ("CPU", "host memory", "batch 2", "8 heads over 2 key/value heads", "seqlen 100 x 200", "float32"):
        assert words in text
    attn.compile(q, k, k)


# ---- dispatch to the GPU, with stand-ins -----------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for the modules cupy and cuflash.launch, and a record of what was asked of them."""

    class DeviceArray:
        def __dlpack__(self, **how):
            raise AssertionError("CuPy arrays are taken as they are")

        __dlpack_device__ = __dlpack__

    calls = []

    def record(name, result):
        def call(options, arrays, *others):
            calls.append((name, options, arrays, *others))
            return result(arrays) if callable(result) else result

        return call

    cupy: Any = ModuleType("cupy")
    launch: Any = ModuleType("cuflash.launch")
    cupy.ndarray = DeviceArray
    cupy.from_dlpack = lambda x: (x.__dlpack__(stream=7), DeviceArray())[1]
    launch.forward = record("forward", lambda arrays: (arrays["out"] or "out", arrays["lse"] or "lse"))
    launch.backward = record("backward", ("dq", "dk", "dv"))
    launch.plan = record("plan", "plans")
    launch.compile = record("compile", "nothing")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cuflash.launch", launch)
    monkeypatch.setattr(cuflash, "launch", launch, raising=False)
    backends = {"cupy": launch, "numpy": host}
    monkeypatch.setattr(flash_attention, "_backend", backends.__getitem__)
    return SimpleNamespace(calls=calls, Array=DeviceArray, launch=launch)


def without_none(arrays):
    return {name: x for name, x in arrays.items() if x is not None}


def test_cupy_arrays_go_to_the_launcher_untouched(gpu):
    attn = cuflash.FlashAttention(causal=True)
    q, k, v, bias, mask, out, lse, dout, dk = (gpu.Array() for _ in range(9))
    assert attn.forward(q, k, v, bias=bias, lse=lse) == cuflash.ForwardResult("out", lse)
    assert cuflash.attention(q, k, v, mask=mask, out=out) is out
    assert attn.backward(dout, q, k, v, out, lse, mask=mask, dk=dk) == cuflash.Gradients("dq", "dk", "dv")
    dropping = cuflash.FlashAttention(dropout=0.5)
    dropping.forward(q, k, v, seed=2**40, offset=3)
    dropping.backward(dout, q, k, v, out, lse, seed=4, offset=5)
    plans: object = attn.plan(q, k, v, bias=bias)
    assert plans == "plans"
    attn.compile(q, k, v, mask=mask)
    passes = ["forward", "forward", "backward", "forward", "backward"]
    assert [name for name, *_ in gpu.calls] == [*passes, "plan", "compile"]
    plain = cuflash.FlashAttention().options
    expected = [attn.options, plain, attn.options, dropping.options, dropping.options, attn.options, attn.options]
    assert [options for _, options, *_ in gpu.calls] == expected
    given = [without_none(arrays) for _, _, arrays, *_ in gpu.calls]
    qkv = {"q": q, "k": k, "v": v}
    results = {"dout": dout, "out": out, "lse": lse}
    assert given == [
        qkv | {"bias": bias, "lse": lse},
        qkv | {"mask": mask, "out": out},
        qkv | results | {"mask": mask, "dk": dk},
        qkv,
        qkv | results,
        qkv | {"bias": bias},
        qkv | {"mask": mask},
    ]
    need = ("dq", "dk", "dv")
    others = [others for _, _, _, *others in gpu.calls]
    assert others == [[(0, 0)], [(0, 0)], [need, (0, 0)], [(2**40, 3)], [need, (4, 5)], [need], [need]]


def test_the_launcher_learns_that_gradients_of_sinks_are_needed(gpu):
    gpu.launch.backward = lambda options, arrays, need, random: gpu.calls.append((arrays, need)) or need
    q, sinks, dlse, dsinks = (gpu.Array() for _ in range(4))
    attn = cuflash.FlashAttention()
    right = ("dq", "dk", "dv", "dsinks")
    assert attn.backward(q, q, q, q, q, q, sinks=sinks, dlse=dlse, need=["dsinks", "dv", "dq", "dk"]) == right
    assert attn.backward(q, q, q, q, q, q, sinks=sinks, dsinks=dsinks) == right
    assert [arrays["sinks"] for arrays, _ in gpu.calls] == [sinks, sinks]
    assert [arrays["dlse"] for arrays, _ in gpu.calls] == [dlse, None]
    assert [arrays["dsinks"] for arrays, _ in gpu.calls] == [None, dsinks]
    assert [need for _, need in gpu.calls] == [right, right]


FORWARD_ARRAYS = ("q", "k", "v", "bias", "mask", "kv_lengths", "alibi_slopes", "sinks", "block_mask", "out", "lse")


@pytest.mark.parametrize("wrong", FORWARD_ARRAYS)
def test_host_and_device_arrays_do_not_mix(gpu, wrong):
    arrays = {name: gpu.Array() for name in FORWARD_ARRAYS}
    arrays[wrong] = normal(3, 4)
    message = f"{wrong}: got numpy.ndarray, expected an array of cupy as q is"
    if wrong == "q":
        message = r"k: got \w+.DeviceArray, expected an array of numpy as q is"
    with pytest.raises(TypeError, match=f"^{message}$"):
        cuflash.FlashAttention().forward(**arrays)
    assert not gpu.calls


@pytest.mark.parametrize("missing", ["dout", "q", "k", "v", "out", "lse"])
def test_backward_needs_all_of_its_device_arrays(gpu, missing):
    arrays = {name: gpu.Array() for name in ("dout", "q", "k", "v", "out", "lse")} | {missing: None}
    with pytest.raises(TypeError, match=f"^{missing}: got None, expected an array"):
        cuflash.FlashAttention().backward(**arrays)
    assert not gpu.calls


def test_device_arrays_of_another_library_are_borrowed_and_given_back(gpu, monkeypatch):
    streams, exported = [], []

    class Tensor:
        __module__ = "anothertorch.core"

        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, *, stream=None, **how):
            streams.append(stream)
            return "capsule"

    def from_dlpack(x):
        exported.append(x)
        return f"tensor of {x}"

    library: Any = ModuleType("anothertorch")
    library.from_dlpack = from_dlpack
    monkeypatch.setitem(sys.modules, "anothertorch", library)
    q, out = Tensor(), Tensor()
    assert cuflash.FlashAttention().forward(q, q, q, out=out) == (out, "tensor of lse")
    assert streams == [7] * 4, "every argument, and the result to be written, waits for its producer"
    assert len(exported) == 2, "the given result crosses back too, so that its library's stream waits for CuPy's"
    assert all(isinstance(x, gpu.Array) for name, x in gpu.calls[0][2].items() if name in ("q", "k", "v", "out"))
    assert cuflash.FlashAttention().backward(q, q, q, q, q, q) == ("tensor of dq", "tensor of dk", "tensor of dv")


def test_subclasses_of_cupy_arrays_are_refused(gpu):
    masked_array = type("Masked", (gpu.Array,), {})
    q = gpu.Array()
    with pytest.raises(TypeError, match=r"^v: got \w+\.Masked, expected a plain cupy.ndarray"):
        cuflash.attention(q, q, masked_array())


def test_cuda_memory_without_cupy_says_what_to_install(monkeypatch):
    class Tensor:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **how):
            return "capsule"

    monkeypatch.setitem(sys.modules, "cupy", None)
    x = Tensor()
    with pytest.raises(ImportError, match=r"^q: got \w+\.Tensor in CUDA memory, expected CuPy .*cuflash\[cuda1"):
        cuflash.attention(x, x, x)


# ---- documentation against the code ----------------------------------------------------------------------------------

METHODS = ("forward", "backward", "plan", "compile")
CALLABLES = {
    "attention": cuflash.attention,
    "FlashAttention": cuflash.FlashAttention,
    "merge": cuflash.merge,
    "merge_backward": cuflash.merge_backward,
    **{f"FlashAttention.{name}": getattr(cuflash.FlashAttention, name) for name in METHODS},
}


def documented_parameters(function):
    """Names in the Parameters section of a numpydoc docstring, in order."""
    section = re.search(r"\nParameters\n-+\n(.*?)(?:\n\n?\w[\w ]*\n-+\n|\Z)", inspect.getdoc(function) or "", re.DOTALL)
    lines = section.group(1).splitlines() if section else []
    return [
        name
        for line in lines
        if (m := re.match(r"(?:\*\*)?(\w+(?:, \w+)*) :", line))
        for name in m.group(1).split(", ")
    ]


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", CALLABLES)
def test_every_parameter_is_documented_and_the_reverse(name):
    assert documented_parameters(CALLABLES[name]) == parameters(CALLABLES[name])


@pytest.mark.parametrize("name", CALLABLES)
def test_docstrings_say_what_is_returned_and_raised(name):
    doc = inspect.getdoc(CALLABLES[name]) or ""
    assert "\nRaises\n------\n" in doc
    assert ("\nReturns\n-------\n" in doc) == (name not in ("FlashAttention", "FlashAttention.compile"))


def test_docstrings_elsewhere_name_no_parameter_that_does_not_exist():
    checked = 0
    for module in (compiler, interop, operands, planning.choose, reference, ct):
        for name, function in inspect.getmembers(module, callable):
            if function.__module__.startswith(module.__name__) and documented_parameters(function):
                assert set(documented_parameters(function)) <= set(parameters(function)), f"{module.__name__}.{name}"
                checked += 1
    assert checked >= 5


def test_static_options_are_keywords_and_arrays_come_first():
    for function in CALLABLES.values():
        kinds = [p.kind.name for name, p in inspect.signature(function).parameters.items() if name != "self"]
        arrays = kinds.count("POSITIONAL_OR_KEYWORD")
        expected = {"FlashAttention": 0, "backward": 6, "merge": 2, "merge_backward": 5}
        assert arrays == expected.get(function.__name__, 3)
        others = kinds[arrays:]
        assert kinds[:arrays] == ["POSITIONAL_OR_KEYWORD"] * arrays
        assert others == ["KEYWORD_ONLY"] * (len(others) - 1) + [others[-1]] and others[-1] in (
            "KEYWORD_ONLY",
            "VAR_KEYWORD",
        )


def test_examples_in_docstrings_run():
    for module in (cuflash, flash_attention, functional, merging):
        assert doctest.testmod(module).failed == 0
    assert doctest.testmod(flash_attention).attempted + doctest.testmod(functional).attempted >= 5


def pictures():
    """The 0/1 pictures of the docstring of FlashAttention: (title of the column, rows)."""
    lines = (inspect.getdoc(cuflash.FlashAttention) or "").splitlines()
    found: dict[str, list[list[list[int]]]] = {}
    for at, line in enumerate(lines):
        for m in re.finditer(r'True:|"top_left":|window=\(\S+ \S+\), seqlen_q', line):
            start = m.start()
            rows: list[list[int]] = []
            for below in lines[at + 1 :]:
                (text, *_) = re.findall(r"^[01 ]*", below[start : start + 14])
                numbers = [int(x) for x in text.split()]
                if rows and not numbers:
                    break
                rows += [numbers] if numbers else []
            found.setdefault(m.group(), []).append(rows)
    return found


def test_pictures_of_masks_are_true():
    drawn = pictures()
    sizes = [(2, 5), (5, 2)]
    expected = [(causal, None, *size) for causal in ("True:", '"top_left":') for size in sizes]
    checked = 0
    for title, rows in [(t, p) for t, ps in drawn.items() for p in ps]:
        seqlen_q, seqlen_k = len(rows), len(rows[0])
        options: dict[str, Any] = {"causal": title == "True:" or "top_left"}
        if title.startswith("window"):
            ((left, right),) = re.findall(r"^window=\((\S+), (\S+)\)", title)
            options = {"window": tuple(None if x == "None" else int(x) for x in (left, right))}
        else:
            assert (title, None, seqlen_q, seqlen_k) in expected
        q, k = np.ones((seqlen_q, 1)), np.ones((seqlen_k, 1))
        plan = cuflash.FlashAttention(**options).plan(q, k, k)
        assert isinstance(plan, CpuPlan)
        for row, visible in enumerate(rows):
            first, stop = plan.problem.key_range(row)
            assert visible == [int(first <= j < stop) for j in range(seqlen_k)], (title, row)
        checked += 1
    assert checked == len(expected) + 2


@pytest.mark.parametrize("method", ["plan", "compile", "tune"])
def test_an_unknown_keyword_is_refused_as_python_does(method):
    x = np.ones((3, 4))
    with pytest.raises(TypeError, match=rf"{method}\(\) got an unexpected keyword argument 'biass'"):
        getattr(cuflash.FlashAttention(), method)(x, x, x, biass=x)


@pytest.mark.parametrize("kind", [Terms, PassArrays])
def test_arrays_that_are_not_given_are_none(kind):
    """A launch looks every term up by its name."""
    got = checked("plan", kind, {"bias": 1})
    assert got.keys() >= set(NAMES) and got.pop("bias") == 1
    assert all(x is None for x in got.values())
