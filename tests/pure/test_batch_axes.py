"""Batch axes: any number of them, broadcasting as numpy.matmul does, on every way of the CPU path."""

import functools
import itertools
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.cpu import backend as cpu_backend
from cuflash.cpu import core
from cuflash.spec import batch_axes
from cuflash.spec.passes import BACKWARD
from tests.sampling import examples


def gradients_by_name(case, attn, arrays, **results):
    """out, lse and all gradients of a case, by the public interface."""
    inputs = ct.qkv(arrays)
    out, lse = attn.forward(*inputs, **ct.optional(arrays), **case.random)
    need = ct.gradients_of(case.problem)
    keywords = ct.optional_backward(arrays) | case.random | results
    found = attn.backward(arrays["dout"], *inputs, out, lse, need=need, **keywords)
    return out, lse, dict(zip(need, found, strict=True))


@settings(max_examples=examples(40))
@given(
    ct.with_axes(
        ct.cases(
            ndims=(4,), features=("bias", "mask", "gqa", "dropout"), max_seqlen=17, max_head_dim=9, max_scores=2**11
        )
    ),
    st.sampled_from(ct.STRIDES),
)
def test_results_are_written_where_the_caller_says(case, strides):
    arrays = case.arrays()
    attn: Any = cuflash.FlashAttention(**case.keywords)
    out, lse, gradients = gradients_by_name(case, attn, arrays)

    def empty_view(x):
        return ct.lay_out(np.full_like(x, 7), strides, np.asarray)

    into: Any = {"out": empty_view(out), "lse": empty_view(lse)}
    assert attn.forward(*ct.qkv(arrays), **ct.optional(arrays), **case.random, **into) == (into["out"], into["lse"])
    results = {name: empty_view(x) for name, x in gradients.items()}
    keywords = ct.optional_backward(arrays) | case.random | results
    again = attn.backward(arrays["dout"], *ct.qkv(arrays), out, lse, need=(), **keywords)
    assert all(x is y for x, y in zip(results.values(), again, strict=True))
    # Where results lie decides which axes merge, and so how many calls the gradients of numbers are sums over.
    ct.assert_backward(case, **results)
    for x, y in zip(gradients.values(), results.values(), strict=True) if strides == "contiguous" else ():
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(out, into["out"])
    np.testing.assert_array_equal(lse, into["lse"])


@pytest.mark.parametrize("kinds", list(itertools.product(("lacking", "expanded", "own"), repeat=2)), ids="-".join)
def test_gradients_of_inputs_that_are_expanded_along_some_axes(kinds):
    """Strides of 0 merge with axes that an array lacks, and its gradient has the entries of the others alone."""
    lengths, rng = (3, 2), np.random.default_rng(0)
    attn = cuflash.FlashAttention()
    q, k, v, dout = (rng.standard_normal((*lengths, 2, 4, 3)) for _ in range(4))
    shape = [1 if kind == "lacking" else n for kind, n in zip(kinds, lengths, strict=True)]
    stored = [n if kind == "own" else 1 for kind, n in zip(kinds, lengths, strict=True)]
    arrays = {
        name: np.broadcast_to(rng.standard_normal((*stored, *own)), (*shape, *own))
        for name, own in {"bias": (2, 4, 4), "alibi_slopes": (2,)}.items()
    }

    def gradients(arrays):
        tangents = {f"t{name}": x for name, x in arrays.items()}
        need = ("dbias", "dalibi_slopes")
        first = attn.backward(dout, q, k, v, *attn.forward(q, k, v, **arrays)[:2], need=need, **arrays)
        need = ("tdbias", "tdalibi_slopes")
        second = cuflash.hessian_vector_product(attn, dout, q, k, v, need=need, **arrays, **tangents)
        return (*first, *second)

    contiguous = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    for got, right in zip(gradients(arrays), gradients(contiguous), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-12)


def structures(dtype=np.float32):
    """A model of structures: the rows of each share a bias."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 3, 2, 5, 8), "k": (2, 3, 2, 5, 8), "v": (2, 3, 2, 5, 8), "bias": (2, 1, 2, 5, 5)}
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return arrays | {"mask": rng.random((2, 3, 1, 1, 5)) < 0.8}


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {}, "(2, 3): 2 calls with a batch of 3, because bias cannot step through all of them by one stride"),
        ({"bias": None}, {}, "(2, 3): 1 call with a batch of 6"),
        ({"bias": lambda x: x[0, 0]}, {}, "(2, 3): 1 call with a batch of 6"),
        ({}, {"dropout": 0.5}, "(2, 3): 1 call with a batch of 6; bias copied with all entries of the batch"),
        (
            {"bias": None, "mask": lambda x: x[:, :1]},
            {},
            "(2, 3): 1 call with a batch of 6; mask copied with all entries of the batch",
        ),
        ({"bias": None, "q": lambda x: x.swapaxes(0, 1)}, {}, None),
        (
            {"bias": None, "kv_lengths": np.array([[5], [3]])},
            {},
            "(2, 3): 1 call with a batch of 6; kv_lengths copied with all entries of the batch",
        ),
    ],
)
def test_plans_say_how_they_are_gone_through(changes, options, said):
    arrays = structures()
    for name, change in changes.items():
        arrays[name] = change(arrays[name]) if callable(change) else change
    attn = cuflash.FlashAttention(**options)
    arrays = {name: x for name, x in arrays.items() if x is not None}
    if said is None:
        with pytest.raises(ValueError, match=r"^k: got batch axes \(2, 3\) in shape .*, expected batch axes that"):
            attn.plan(**arrays)
    else:
        lines = [
            line.split(maxsplit=1)[1]
            for line in attn.plan(**arrays).describe(verbose=True, width=0).splitlines()
            if "axes" in line
        ]
        assert lines == [f"batch axes {said}"]
        attn.compile(**arrays)


def test_few_axes_meet_many():
    """k and v of one head against q of several, and q of fewer axes than k has, in both layouts."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 3, 4, 5, 8)), rng.standard_normal((6, 8))
    has_core = core.why_not() is None  # what BLAS rounds to depends on shapes
    assert_same: Any = (
        np.testing.assert_array_equal
        if has_core
        else functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)
    )
    assert_same(
        cuflash.attention(q, k, k),
        cuflash.attention(*(np.broadcast_to(x, (2, 3, 4, *x.shape[-2:])) for x in (q, k, k))),
    )
    for layout in ("bhsd", "bshd"):
        attn = cuflash.FlashAttention(layout=layout)
        k = rng.standard_normal((2, 1, 6, 8) if layout == "bhsd" else (2, 6, 1, 8))
        out, lse = attn.forward(q[0, 0, 0], k, k)
        assert out.shape == ((2, 1, 5, 8) if layout == "bhsd" else (2, 5, 1, 8)) and lse.shape == (2, 1, 5)
        dq, dk, dv = attn.backward(out, q[0, 0, 0], k, k, out, lse)
        each = [
            cuflash.FlashAttention().backward(rows, q[0, 0, 0], keys, keys, rows, lse[b, 0])
            for b, rows, keys in zip(range(2), out.reshape(2, 5, 8), k.reshape(2, 6, 8), strict=True)
        ]
        np.testing.assert_allclose(dq, each[0].dq + each[1].dq)
        assert_same(dk.reshape(2, 6, 8), np.stack([x.dk for x in each]))
        assert_same(dv.reshape(2, 6, 8), np.stack([x.dv for x in each]))


def test_functions_count_the_entries_of_all_axes():
    """A score that reads an array by batch entry, whose gradient it has too; k broadcasts along one of two axes."""
    arrays = structures()
    q, k, v, slopes = arrays["q"], arrays["k"][:, :1], arrays["v"], np.arange(6, dtype=np.float32) / 7
    attn: Any = cuflash.FlashAttention(score=lambda s, i, j, *, batch, slopes: s - slopes[batch] * abs(i - j))
    whole: Any = [np.broadcast_to(x, q.shape).reshape(6, 2, 5, 8) for x in (q, k, v)]
    out, lse = attn.forward(q, k, v, slopes=slopes)
    expected = attn.forward(*whole, slopes=slopes)
    np.testing.assert_array_equal(out.reshape(6, 2, 5, 8), expected.out)
    need = ("dq", "dk", "dslopes")
    got = attn.backward(out, q, k, v, out, lse, slopes=slopes, need=need)
    right = attn.backward(expected.out, *whole, *expected, slopes=slopes, need=need)
    np.testing.assert_allclose(got.dk, right.dk.reshape(q.shape).sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got.dslopes, right.dslopes)


@pytest.mark.parametrize("need", [("dk", "dv"), ("dbias",), ("dq", "dk", "dbias")], ids="-".join)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_sums_are_rounded_once(dtype, dropout, need):
    """Gradients that 16 calls of 16 entries, or 256 entries of one, add to are nearer than sums of rounded terms."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((16, 16, 1, 3, 8)).astype(dtype) for _ in range(3))
    k, v, bias = k[:1, :1], v[:1, :1], rng.standard_normal((1, 16, 1, 3, 3)).astype(dtype)
    attn: Any = cuflash.FlashAttention(dropout=dropout)
    random = {"seed": 5, "offset": 6} if dropout else {}
    out, lse = attn.forward(q, k, v, bias=bias, **random)
    dout = np.abs(out.astype(np.float32)).astype(dtype)
    got = attn.backward(dout, q, k, v, out, lse, bias=bias, need=need, **random)
    wide = [x.astype(np.float64) for x in (dout, q, k, v, out, lse)]
    exact = attn.backward(*wide, bias=bias.astype(np.float64), need=need, **random)
    ulp = float(ml_dtypes.finfo(dtype).eps)
    for name, x, y in zip(need, got, exact, strict=True):
        if name != "dq":  # which is no sum
            error, unit = np.abs(x.astype(np.float64) - y), ulp * np.abs(y)  # of the last place, or up to twice that
            assert (error <= 0.51 * unit + 1e-5 * np.abs(y).max()).all(), f"{name}: {(error / unit).max()}"


REFUSALS = [
    (
        "v",
        np.ones((5, 3, 2, 5, 8), np.float32),
        "batch axes (5, 3) in shape (5, 3, 2, 5, 8), expected batch axes that",
    ),
    (
        "bias",
        np.ones((2, 2, 5, 5), np.float32),
        "shape (2, 2, 5, 5), expected a shape that broadcasts to (2, 3, 2, 5, 5)",
    ),
    (
        "bias",
        np.ones((2, 1, 2, 5, 4), np.float32),
        "shape (2, 1, 2, 5, 4), expected a shape that broadcasts to (2, 3, 2, ",
    ),
    (
        "mask",
        np.ones((1, 2, 3, 2, 5, 5), bool),
        "shape (1, 2, 3, 2, 5, 5), expected a shape that broadcasts to (2, 3, 2, ",
    ),
    ("kv_lengths", np.ones(2, int), "shape (2,), expected (2, 3), of which batch axes may be 1 or missing"),
    (
        "alibi_slopes",
        np.ones((3, 1), np.float32),
        "shape (3, 1), expected (2, 3, 2), of which batch axes may be 1 or",
    ),
    (
        "sinks",
        np.ones((3, 2), np.float32),
        "shape (3, 2), expected (2,), and batch axes of size 1: a head has one sink",
    ),
    (
        "block_mask",
        np.ones((2, 2, 1, 1), bool),
        "shape (2, 2, 1, 1), expected a shape that broadcasts to (2, 3, 2, 1, 1)",
    ),
    ("out", np.ones((2, 3, 2, 5, 7), np.float32), "shape (2, 3, 2, 5, 7), expected (2, 3, 2, 5, 8)"),
    ("lse", np.broadcast_to(np.float32(0), (2, 3, 2, 5)), "a read-only array, expected a writable one"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSALS)
def test_refusals_say_what_the_caller_gave(name, value, message):
    with pytest.raises(ValueError) as raised:
        cuflash.FlashAttention().forward(**structures() | {name: value})
    assert str(raised.value).startswith(f"{name}: got {message}")


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_backward_takes_an_array_for_every_entry(name, layout):
    """An index too many is an error; who means it says so."""
    q = structures(np.float64)["q"]
    attn: Any = cuflash.FlashAttention(layout=layout)
    out, lse = attn.forward(q, q, q)
    arrays = {"dout": out + 1, "out": out, "lse": lse, "dlse": 2 * lse}
    one = arrays[name][:1, 1:2]
    whole = np.broadcast_to(one, arrays[name].shape)
    for few in (one, one[0, 0]):
        with pytest.raises(ValueError) as raised:
            attn.backward(q=q, k=q, v=q, **arrays | {name: few})
        assert str(raised.value) == (
            f"{name}: got shape {few.shape}, expected {whole.shape}: numpy.broadcast_to({name}, {whole.shape}), "
            "if that is meant"
        )
    got = attn.backward(q=q, k=q, v=q, **arrays | {name: whole})
    for x, y in zip(got, attn.backward(q=q, k=q, v=q, **arrays | {name: whole.copy()}), strict=True):
        np.testing.assert_array_equal(x, y)


def test_results_whose_elements_share_memory_are_refused():
    arrays = structures()
    shape, strides = (2, 3, 2, 5, 8), (3840, 1280, 32, 32, 4)  # rows of one head begin where those of the other do
    arrays["out"] = np.lib.stride_tricks.as_strided(np.zeros(2000, np.float32), shape, strides)
    with pytest.raises(ValueError, match=r"^out: got strides \(3840, .*, expected an array whose elements are"):
        cuflash.FlashAttention().forward(**arrays)


@pytest.mark.parametrize(("refused", "other"), [("out", "q"), ("out", "bias"), ("lse", "out")])
def test_results_share_no_memory_with_any_part_of_an_argument(refused, other):
    """The last structure of one array is that of the other: the first call alone would not see it."""
    arrays = structures() | {"out": np.empty((2, 3, 2, 5, 8), np.float32), "lse": np.empty((2, 3, 2, 5), np.float32)}
    storage = np.zeros(arrays[refused].size + arrays[other].size - 4, np.float32)
    first, second = storage[: arrays[other].size], storage[arrays[other].size - 4 :]
    arrays[other] = first.reshape(arrays[other].shape)
    arrays[refused] = second.reshape(arrays[refused].shape)
    with pytest.raises(ValueError, match=f"^{refused}: got memory shared with {other}, expected memory of its own$"):
        cuflash.FlashAttention().forward(**arrays)


@pytest.mark.parametrize(("name", "other"), [("cu_seqlens_q", "cu_seqlens_k"), ("block_table", "kv_lengths")])
def test_packed_sequences_and_pages_have_no_batch_axes(name, other):
    arrays = structures() | {name: np.zeros(2, np.int32), other: np.zeros(2, np.int32), "bias": None, "mask": None}
    with pytest.raises(NotImplementedError, match=f"^q: got 2 batch axes .* {name}, .* axis"):
        cuflash.FlashAttention().forward(**arrays)


@pytest.mark.parametrize("lengths", [(0, 3), (2, 0), (0,)])
def test_empty_axes_make_empty_results_and_gradients_of_zero(lengths):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((*lengths, 2, 5, 8)), rng.standard_normal((1, 2, 6, 8))
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, k, k)
    dq, dk, dscale = attn.backward(out, q, k, k, out, lse, need=("dq", "dk", "dscale"))
    assert out.shape == q.shape == dq.shape and lse.shape == q.shape[:-1]
    assert dk.shape == k.shape and not dk.any() and dscale == 0


class OnDevice(np.ndarray):
    """An array of another module than NumPy."""


def on_device(x):
    return np.ascontiguousarray(x).view(OnDevice)


DEVICE: Any = types.SimpleNamespace(
    empty=lambda shape, dtype: on_device(np.empty(shape, dtype)),
    zeros=lambda shape, dtype: on_device(np.zeros(shape, dtype)),
    broadcast_to=functools.partial(np.broadcast_to, subok=True),
    ascontiguousarray=on_device,
    lib=types.SimpleNamespace(
        stride_tricks=types.SimpleNamespace(as_strided=functools.partial(np.lib.stride_tricks.as_strided, subok=True))
    ),
)


@settings(max_examples=examples(25))
@given(ct.with_axes(ct.cases(ndims=(4,), features=("causal", "gqa", "dropout"), max_seqlen=17, max_scores=2**10)))
def test_keys_in_host_memory_beside_queries_on_a_device_stay_there(case):
    """As streamed keys do; and so do their gradients."""
    arrays, attn = case.arrays(), cuflash.FlashAttention(**case.keywords)
    out, lse = attn.forward(*ct.qkv(arrays), **case.random)
    names, given = ("dq", "dk", "dv"), {**arrays, "out": out, "lse": lse}
    given = {name: x if name in "kv" else on_device(x) for name, x in given.items() if name != "dlse"}
    axes = batch_axes.axes_of(attn.options, given, names)
    if axes is None:
        return
    calls = batch_axes.BatchCalls(axes, attn.options, given, names, DEVICE, gives_partials=False)

    def call(options, own):
        for name, x in own.items():
            assert x is None or (type(x) is np.ndarray) == (name in ("k", "v", "dk", "dv")), name
        of_host = {name: x.view(np.ndarray) for name, x in own.items() if x is not None}
        return cpu_backend.compute(BACKWARD, options, of_host, names, tuple(case.random.values()) or (0, 0))

    found = dict(zip(names, calls.run(call), strict=True))
    assert {name for name, x in found.items() if type(x) is np.ndarray} == {"dk", "dv"}
    ct.assert_backward(case, **{name: x.view(np.ndarray) for name, x in found.items()})
