"""`FlashAttention.bind` on NumPy arrays and on those of other libraries: what calls give, and what they refuse."""

import concurrent.futures
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.spec.binding import growing_keys, same_plan
from cuflash.spec.passes import FORWARD
from tests.calls import calls, results_of
from tests.compiled import NUMPY, way_taken
from tests.sampling import examples


@settings(max_examples=examples(400))
@given(calls(FORWARD), st.booleans(), st.sampled_from([(), ("max",), ("entropy", "max")]))
def test_a_bound_call_gives_what_forward_gives(call, is_into, want):
    case, options, arrays, _ = call
    inputs = {name: x for name, x in arrays.items() if name not in ("out", "lse")}
    attn = cuflash.FlashAttention()
    attn.options = options
    random = {"seed": case.seed, "offset": 5} if options.dropout else {}
    bound = attn.bind(**inputs, want=want)
    given_results = results_of(case, arrays, FORWARD, ()) if is_into else {}
    expected = attn.forward(**inputs, **random, want=want)
    for x in (inputs, {name: x.copy() for name, x in inputs.items()}):
        found = bound(**x, **given_results, **random)
        assert type(found)._fields == type(expected)._fields
        for name, result in found._asdict().items():
            np.testing.assert_array_equal(result, getattr(expected, name))
            assert name not in given_results or result is given_results[name]


@settings(max_examples=examples(200))
@given(
    st.sampled_from([{}, {"causal": True}, {"causal": "top_left"}]),
    st.none() | st.tuples(st.none() | st.integers(0, 300), st.none() | st.integers(0, 300)),
    st.none() | st.integers(-300, 300),
    st.integers(1, 300),
    st.integers(2, 2500),
)
def test_lengths_of_one_plan(options, window, diagonal, seqlen_q, seqlen_k):
    options = replace(cuflash.FlashAttention(**options, window=window).options, diagonal=diagonal)

    def planned_for(length):
        arrays = dict.fromkeys("kv", np.empty((1, length, 8)))
        return growing_keys(options, {"q": np.empty((1, seqlen_q, 8)), **arrays})[3]

    first, last = same_plan(options, seqlen_q, seqlen_k)
    assert first <= seqlen_k <= last
    own = planned_for(seqlen_k)
    assert {planned_for(length) for length in range(first, last + 1)} == {own}
    assert first == 2 or planned_for(first - 1) != own
    assert planned_for(last + 1) != own


def arrays_of(shape=(2, 4, 50, 16), dtype=np.float32, count=3):
    return np.random.default_rng(0).standard_normal((count, *shape)).astype(dtype)


def test_keys_may_have_another_length():
    q, k, v = arrays_of()
    mask = np.random.default_rng(1).random((4, 50, 50)) < 0.7
    attn = cuflash.FlashAttention(causal=True)
    bound = attn.bind(q, k, v, mask=mask)
    for length in (50, 49, 0, 1):
        own = k[:, :, :length], v[:, :, :length]
        found = bound(q, *own, mask=mask[..., :length])
        for x, y in zip(found, attn.forward(q, *own, mask=mask[..., :length]), strict=True):
            np.testing.assert_array_equal(x, y)


def test_without_values():
    q, k, _ = arrays_of()
    found = cuflash.FlashAttention().bind(q, k, None)(q, k, None)
    assert found.out is None
    np.testing.assert_array_equal(found.lse, cuflash.logsumexp(q, k))


def test_functions_and_numbers():
    q, k, v = arrays_of()

    def score(s, i, j, *, gamma):
        return s - gamma * cuflash.abs(i - j)

    attn = cuflash.FlashAttention(score=score)
    bound = attn.bind(q, k, v, gamma=0.5)
    expected = attn.forward(q, k, v, gamma=0.5)
    np.testing.assert_array_equal(bound(q, k, v, gamma=0.5).out, expected.out)
    with pytest.raises(TypeError, match="gamma"):
        bound(q, k, v)


def test_arrays_of_pytorch():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, arrays_of(dtype=np.float16))
    found = cuflash.FlashAttention().bind(q, k, v)(q, k, v)
    assert all(type(x) is torch.Tensor for x in found)
    np.testing.assert_array_equal(found.out, cuflash.FlashAttention().forward(q, k, v).out)


def test_what_is_wrong_is_said():
    q, k, v = arrays_of()
    attn: Any = cuflash.FlashAttention()
    bound = attn.bind(q, k, v)
    for arrays, error, text in (
        (
            (q[:1], k[:1], v[:1]),
            ValueError,
            r"^q: got shape \(1, 4, 50, 16\) and .*, expected shape \(2, 4, 50, 16\) and",
        ),
        ((q, k[..., :8], v), ValueError, r"^k: got shape \(2, 4, keys, 8\)"),
        ((q.astype(np.float64), k, v), ValueError, r"^q: got .* dtype float64"),
        ((q.tolist(), k, v), ValueError, r"^q: got a list"),
        ((memoryview(q), k, v), ValueError, r"^q: got a memoryview"),
        ((q, k, v[:, :, :9]), ValueError, r"^v: "),
        ((q, k, None), TypeError, r"^v: got None, expected an array, as in bind"),
    ):
        with pytest.raises(error, match=text):
            bound(*arrays)
    with pytest.raises(TypeError, match=r"^mask: got an array, expected none, as in bind"):
        bound(q, k, v, mask=q > 0)
    for name, text in (("baas", r"'baas': did you mean bias\?$"), ("want", "'want': forward takes it$")):
        with pytest.raises(TypeError, match=rf"^call\(\) got an unexpected keyword argument {text}"):
            bound(q, k, v, **{name: q})
    with pytest.raises(TypeError, match="baas"):
        attn.bind(q, k, v, baas=q)
    with pytest.raises(ValueError, match=r"^want: "):
        attn.bind(q, k, v, want=("mox",))
    with pytest.raises(ValueError, match=r"^out: "):
        bound(q, k, v, out=q[:1])
    with pytest.raises(NotImplementedError, match=r"^k: got keys of cuflash.streamed, .* call forward"):
        attn.bind(q, *cuflash.streamed(k, v))


def error_of(call: Callable[[], Any]) -> str:
    """The type and the text of what a call raises."""
    try:
        call()
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


FORMS: dict[str, tuple[tuple[int, ...], Any]] = {
    "q": ((2, 1, 4, 5, 16), np.float32),
    "k": ((2, 3, 2, 6, 16), np.float32),
    "v": ((3, 2, 6, 8), np.float32),
    "bias": ((2, 1, 4, 5, 6), np.float32),
    "mask": ((3, 1, 1, 6), np.bool_),
    "block_mask": ((2, 3, 4, 1, 1), np.bool_),
    "alibi_slopes": ((3, 4), np.float32),
    "kv_lengths": ((2, 3), np.int32),
    "sinks": ((4,), np.float32),
}


@settings(max_examples=examples(300))
@given(
    st.sampled_from(["batch axes", "one batch axis", "no batch axes"]),
    st.sets(st.sampled_from([*FORMS])),
    st.sampled_from([*FORMS]),
    st.sampled_from(["longer", "shorter", "an axis more", "an axis less", "float64", "int64"]),
    st.integers(0, 4),
    st.sampled_from(["numpy", "without the core", "torch"]),
    st.sampled_from([(), ("max",)]),
)
def test_bind_finds_what_does_not_fit_as_a_call_does(axes, optional, wrong, fault, axis, kind, want):
    """With batch axes, in any library, and where there is no compiled core."""
    arrays = {name: np.ones(*FORMS[name]) for name in ("q", "k", "v", *sorted(optional | {wrong} - set("qkv")))}
    if axes != "batch axes":
        keeps = {"one batch axis": 1, "no batch axes": 0}[axes]
        own = {"alibi_slopes": 1, "kv_lengths": 0, "sinks": 1}
        arrays = {name: x[(0,) * max(x.ndim - own.get(name, 3) - keeps, 0)] for name, x in arrays.items()}
        if axes == "one batch axis":  # all of 3
            arrays |= {"q": np.ones((3, 4, 5, 16), np.float32)}
    x = arrays[wrong]
    if fault in ("longer", "shorter") and x.ndim:
        axis %= x.ndim
        sizes = [n + {"longer": 2, "shorter": -1}[fault] * (i == axis) for i, n in enumerate(x.shape)]
        arrays[wrong] = np.ones(sizes, x.dtype)
    elif fault == "an axis more":
        arrays[wrong] = np.ones((2, *x.shape), x.dtype)
    elif fault == "an axis less" and x.ndim:
        arrays[wrong] = x[0]
    elif fault in ("float64", "int64"):
        arrays[wrong] = x.astype(fault)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        arrays = {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}
    attn: Any = cuflash.FlashAttention()
    with way_taken(NUMPY[1]) if kind == "without the core" else contextlib.nullcontext():
        of_call = error_of(lambda: attn.forward(**arrays, want=want))
        assert error_of(lambda: attn.bind(**arrays, want=want)) == of_call


def test_threads_share_a_bound_call():
    q, k, v = arrays_of()
    attn = cuflash.FlashAttention()
    bound, expected = attn.bind(q, k, v), {n: attn.forward(q, k[:, :, :n], v[:, :, :n]).out for n in (20, 50)}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: (n, bound(q, k[:, :, :n], v[:, :, :n]).out), [20, 50] * 50))
    for n, out in found:
        np.testing.assert_array_equal(out, expected[n])
