"""jvp, backward_jvp and what is made of them, on NumPy arrays: by NumPy, and by the core on every instruction set."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.cpu import fallback
from cuflash.spec.inputs import INPUTS
from cuflash.testing import Case, cases, optional
from cuflash.testing.tangents import Moved, assert_tangents, movable
from tests.compiled import INSTRUCTION_SETS, NUMPY, way_taken
from tests.sampling import examples
from tests.scored import CONDITIONED, scored
from tests.second_derivatives import CASES, FEATURES, NAMES, has_gradient, judge_functions, moved_by

WAYS = [way for _, way in (NUMPY, *INSTRUCTION_SETS)]
TWO_WAYS = WAYS[:2]  # NumPy, and the best instruction set


def computed(case, moved, way):
    """out and lse, and all tangents that the interface gives, in a way."""
    with way_taken(way):
        return compute(case, moved)


def compute(case, moved):
    """The same by name."""
    attention, arrays, tangents = cuflash.FlashAttention(**case.keywords), case.arrays(), moved.arrays(case)
    given = optional(arrays) | case.random
    of_inputs = {name: x for name, x in tangents.items() if name not in ("tdout", "tdlse")}
    inputs = inputs_of(arrays)
    of_forward = attention.jvp(**inputs, **given, **of_inputs)
    need = [f"t{name}" for name in case.problem.gradients if has_gradient(case, name)]
    others = {"dlse": arrays["dlse"]} if "dlse" in arrays else {}
    found = attention.backward_jvp(
        arrays["dout"], **inputs, **of_forward._asdict(), need=need, **given, **tangents, **others
    )
    return of_forward._asdict() | found._asdict()


def judge(case, moved, results):
    """Hold tangents to the oracle rule, and out to what the forward pass gives."""
    arrays = case.arrays()
    out, _ = cuflash.FlashAttention(**case.keywords).forward(**inputs_of(arrays), **optional(arrays), **case.random)
    np.testing.assert_allclose(
        results["out"].astype(np.float64),
        out.astype(np.float64),
        rtol=0.02,
        atol=0.02 if out.dtype.itemsize == 2 else 1e-4,
    )
    assert_tangents(case, moved, {name: x for name, x in results.items() if name[0] == "t"})


def inputs_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arrays[name] for name in ("q", "k", "v")}


@pytest.mark.one_of("common")
@pytest.mark.parametrize("common", [0.0, 10.0])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_several_tiles_by_the_oracle_rule(case, common, monkeypatch):
    monkeypatch.setattr(fallback, "PAIRS", 2**11)
    cotangents = ("tdout", "tdlse") if case.dlse else ("tdout",)
    moved = Moved(names=tuple(movable(case)), cotangents=cotangents, common=common)
    for way in WAYS:
        judge(case, moved, computed(case, moved, way))


@settings(max_examples=examples(200))
@given(cases(features=FEATURES, max_seqlen=129, max_head_dim=64, max_scores=2**14, min_seqlen=0), st.data())
def test_every_option_by_the_oracle_rule(case, data):
    moved = data.draw(moved_by(case))
    for way in WAYS:
        judge(case, moved, computed(case, moved, way))


# ---- properties without an oracle ------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"max_seqlen": 33, "max_head_dim": 16, "max_scores": 2**12, "features": FEATURES}
EXACT = cases(dtypes=("float32", "float64"), strides=("contiguous",), **SMALL)
DOUBLE = cases(dtypes=("float64",), strides=("contiguous",), score_spreads=(1.0, 4.0), **SMALL)


def pair(x, y):
    return sum(float(np.nansum(a.astype(np.float64) * b)) for a, b in zip(x, y, strict=True))


@settings(max_examples=examples(60))
@given(EXACT, st.data())
def test_tangents_times_four_and_zero_tangents_are_exact(case, data):
    moved = data.draw(moved_by(case))
    for way in TWO_WAYS:
        with way_taken(way):
            check_exact(case, moved)


def check_exact(case, moved):
    attention, arrays = cuflash.FlashAttention(**case.keywords), case.arrays()
    inputs, given = inputs_of(arrays), optional(arrays) | case.random
    tangents = {name: x for name, x in moved.arrays(case).items() if name not in ("tdout", "tdlse")}
    results = {}
    for factor in (1, 4, 0):
        scaled = {name: (factor * x).astype(x.dtype) for name, x in tangents.items()}
        of_forward = attention.jvp(**inputs, **given, **scaled)
        found = attention.backward_jvp(arrays["dout"], **inputs, **of_forward._asdict(), **given, **scaled)
        results[factor] = (of_forward.tout, of_forward.tlse, *found)
    for one, four, zero in zip(*results.values(), strict=True):
        np.testing.assert_array_equal(four, 4 * one)
        assert not zero.any()


@settings(max_examples=examples(40))
@given(EXACT)
def test_the_tangent_of_values_alone(case):
    """With tv = v and nothing else tout is out, bit for bit, and tlse is 0."""
    attention, arrays = cuflash.FlashAttention(**case.keywords), case.arrays()
    inputs = inputs_of(arrays)
    for way in WAYS:
        with way_taken(way):
            out, _, tout, tlse = attention.jvp(**inputs, tv=arrays["v"], **optional(arrays), **case.random)
        np.testing.assert_array_equal(tout, out)
        assert not tlse.any()


@settings(max_examples=examples(60))
@given(DOUBLE, st.data())
def test_jvp_is_the_adjoint_of_backward(case, data):
    """<J t, w> = <t, J' w>."""
    moved = data.draw(moved_by(case))
    for way in TWO_WAYS:
        with way_taken(way):
            check_adjoint(case, moved)


def check_adjoint(case, moved):
    attention, arrays = cuflash.FlashAttention(**case.keywords), case.arrays()
    inputs, given = inputs_of(arrays), optional(arrays) | case.random
    tangents = {name: x for name, x in moved.arrays(case).items() if name not in ("tdout", "tdlse")}
    out, lse, tout, tlse = attention.jvp(**inputs, **given, **tangents)
    dlse = np.random.default_rng(0).standard_normal(lse.shape)
    need = [f"d{name[1:]}" for name in tangents] or ["dq"]
    gradients = attention.backward(arrays["dout"], **inputs, out=out, lse=lse, need=need, dlse=dlse, **given)._asdict()
    left = pair((np.nan_to_num(arrays["dout"]), dlse), (tout, tlse))
    right = pair([gradients[f"d{name[1:]}"] for name in tangents], tangents.values())
    size = pair((abs(np.nan_to_num(arrays["dout"])), abs(dlse)), (abs(tout), abs(tlse)))
    assert abs(left - right) <= 1e-10 * (1 + size)


@settings(max_examples=examples(60))
@given(DOUBLE, st.data())
def test_the_hessian_is_symmetric(case, data):
    """<H c, e> = <c, H e>."""
    names = data.draw(moved_by(case)).names or ("q",)
    for way in TWO_WAYS:
        with way_taken(way):
            check_symmetry(case, names)


def check_symmetry(case, names):
    arrays = case.arrays()
    inputs, given = inputs_of(arrays), optional(arrays) | case.random
    attention = cuflash.FlashAttention(**case.keywords)
    c, e = (Moved(names=names, seed=seed).arrays(case) for seed in (1, 2))
    need = tuple(f"td{name}" for name in names)
    dlse = {"dlse": arrays["dlse"]} if case.dlse else {}
    of_c, of_e = (
        cuflash.hessian_vector_product(attention, arrays["dout"], **inputs, need=need, **given, **dlse, **t)._asdict()
        for t in (c, e)
    )
    left = pair([of_c[f"td{name}"] for name in names], [e[f"t{name}"] for name in names])
    right = pair([of_e[f"td{name}"] for name in names], [c[f"t{name}"] for name in names])
    size = pair([abs(of_c[f"td{name}"]) for name in names], [abs(e[f"t{name}"]) for name in names])
    assert abs(left - right) <= 1e-9 * (1 + size)


@settings(max_examples=examples(40))
@given(DOUBLE)
def test_a_tangent_of_dout_adds_its_backward_pass(case):
    """backward_jvp is linear in dout and dlse, whose tangents add `backward` of them."""
    for way in TWO_WAYS:
        with way_taken(way):
            check_tangent_of_dout(case)


def check_tangent_of_dout(case):
    arrays, attention = case.arrays(), cuflash.FlashAttention(**case.keywords)
    inputs, given = inputs_of(arrays), optional(arrays) | case.random
    tangents = Moved(cotangents=("tdout",)).arrays(case)
    tdout = tangents.pop("tdout")
    of_forward = attention.jvp(**inputs, **given, **tangents)
    both = attention.backward_jvp(arrays["dout"], **inputs, **of_forward._asdict(), tdout=tdout, **given, **tangents)
    alone = attention.backward_jvp(arrays["dout"], **inputs, **of_forward._asdict(), **given, **tangents)
    added = attention.backward(tdout, **inputs, out=of_forward.out, lse=of_forward.lse, **given)
    for x, y, z in zip(both, alone, added, strict=True):
        np.testing.assert_allclose(x, y + z, rtol=1e-9, atol=1e-9 * (1 + np.abs(x).max(initial=0)))


def test_double_backward_and_the_gradient_of_a_jvp_are_those_of_differences():
    random = np.random.default_rng(3)
    q, k, v = (random.standard_normal(shape) for shape in ((2, 4, 9, 5), (2, 2, 12, 5), (2, 2, 12, 3)))
    bias, dout = random.standard_normal((4, 9, 12)), random.standard_normal((2, 4, 9, 3))
    attention = cuflash.FlashAttention(causal=True, softcap=2.0)
    point: dict[str, Any] = {"q": q, "k": k, "v": v, "bias": bias}
    c: dict[str, Any] = {f"d{name}": random.standard_normal(x.shape) for name, x in point.items()}
    a, b = (random.standard_normal(dout.shape) for _ in range(2))
    al, bl = (random.standard_normal((2, 4, 9)) for _ in range(2))
    need = tuple(f"td{name}" for name in point)

    def of_gradients(dout=dout, **moved):
        own = point | moved
        out, lse = attention.forward(**own)
        found = attention.backward(dout, **own, out=out, lse=lse, need=tuple(c))
        return pair(found, c.values())

    def of_jvp(tangents, **moved):
        out, lse, tout, tlse = attention.jvp(**point | moved, **tangents)
        return pair((a, b, al, bl), (out, tout, lse, tlse))

    t: dict[str, Any] = {f"t{name}": random.standard_normal(x.shape) for name, x in point.items()}
    ddout, _, gradients = cuflash.double_backward(attention, c, dout, **point, need=need)
    results = attention.jvp(**point, **t)
    of_both = cuflash.jvp_backward(
        attention, b, **point, **results._asdict(), dout=a, dlse=al, dtlse=bl, need=need, **t
    )
    h = 1e-5
    for name, x in point.items():
        e = random.standard_normal(x.shape)
        sides = [of_gradients(**{name: x + s * e}) for s in (h, -h)]
        np.testing.assert_allclose(
            pair([gradients._asdict()[f"td{name}"]], [e]), (sides[0] - sides[1]) / (2 * h), rtol=1e-6
        )
        sides = [of_jvp(t, **{name: x + s * e}) for s in (h, -h)]
        np.testing.assert_allclose(
            pair([of_both.gradients._asdict()[f"td{name}"]], [e]), (sides[0] - sides[1]) / (2 * h), rtol=1e-6
        )
        sides = [of_jvp(t | {f"t{name}": t[f"t{name}"] + s * e}) for s in (h, -h)]
        np.testing.assert_allclose(
            pair([of_both.of_tangents._asdict()[f"d{name}"]], [e]), (sides[0] - sides[1]) / (2 * h), rtol=1e-6
        )
    e = random.standard_normal(dout.shape)
    sides = [of_gradients(dout + s * e) for s in (h, -h)]
    np.testing.assert_allclose(pair([ddout], [e]), (sides[0] - sides[1]) / (2 * h), rtol=1e-6)


@settings(max_examples=examples(200))
@given(
    st.sampled_from((("float16", 48, 10), ("bfloat16", 48, 20), ("float32", 48, 20), ("float64", 384, 140))),
    st.lists(st.sampled_from(("q", "k", "v", "scale", "softcap")), unique=True, min_size=1),
    st.booleans(),
    st.integers(0, 99),
)
def test_where_tanh_is_1_the_scale_changes_nothing(dtype_and_exponents, names, is_large, seed):
    """Of the smallest cap and the largest scale, a score over the square of the cap is infinite, and of large products
    a score over the cap."""
    dtype, exponent, of_arrays = dtype_and_exponents
    case = Case(seqlen_q=9, seqlen_k=33, head_dim=8, dtype=dtype, softcap=1.0)
    arrays, tangents = case.arrays(), Moved(names=tuple(names), seed=seed).arrays(case)
    if is_large:
        arrays |= {name: arrays[name] * np.array(2.0**of_arrays, arrays[name].dtype) for name in ("q", "k")}
    need: Any = ("dq", "dk", "dv", "dscale", "dsoftcap")
    tneed: Any = tuple(f"t{name}" for name in need)
    for way in TWO_WAYS:
        results = []
        for scale in (2.0**exponent, 1.0):
            attention: Any = cuflash.FlashAttention(softcap=2.0**-exponent, scale=scale)
            with way_taken(way):
                of_forward = attention.jvp(**inputs_of(arrays), **tangents)
                given = {**inputs_of(arrays), **of_forward._asdict(), **tangents}
                found = attention.backward_jvp(arrays["dout"], **given, need=tneed)
                found += attention.backward(arrays["dout"], *inputs_of(arrays).values(), *of_forward[:2], need=need)
                results.append((*of_forward, *found))
        for x, y in zip(*results, strict=True):
            assert np.isfinite(x.astype(np.float64)).all()
            np.testing.assert_array_equal(x, y)


# ---- score functions -------------------------------------------------------------------------------------------------


def bent(s, i, j, *, gamma, x, head):
    return cuflash.where(x[i, 1] > 0, s * x[j, 1], cuflash.tanh(gamma[head] * s) * cuflash.exp(-(x[i, 0] ** 2)))


SCORES: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "nonlinear in s": (bent, {"gamma": (4,), "x": (33, 2)}),
    "softcap": (lambda s, i, j: 3.0 * cuflash.tanh(s / 3.0), {}),
    "alibi": (lambda s, i, j, *, slopes, head: s - slopes[head] * abs(i - j), {"slopes": (4,)}),
    "bias": (lambda s, i, j, *, pairs, head: s + pairs[head, i, j], {"pairs": (4, 33, 33)}),
    "distance": (lambda s, i, j, *, table: s + table[abs(i - j)], {"table": (33,)}),
}


@settings(max_examples=examples(80))
@given(scored(max_seqlen=60, scores=CONDITIONED, head_dims=(1, 8)), st.data())
def test_functions_by_the_oracle_rule(case, data):
    arrays, problem = dict(case.arrays), case.problem
    cotangents = {name: arrays.pop(name) for name in ("dout", "dlse") if name in arrays}
    names = [x for x in (*INPUTS, "scale", "bias", "alibi_slopes", "sinks") if x in arrays or x == "scale"]
    names += [name[1:] for name in problem.score_arg_gradients]
    random = np.random.default_rng(data.draw(st.integers(0, 99)))

    def tangent_of(name):
        model = case.arrays.get(name, np.zeros((), problem.softmax_dtype))
        return np.asarray(random.standard_normal(model.shape), model.dtype)

    moved = data.draw(st.lists(st.sampled_from(names), unique=True))
    of_inputs, of_cotangents = ({f"t{name}": tangent_of(name) for name in own} for own in (moved, cotangents))
    attention: Any = case.attention
    results = attention.jvp(**arrays, **of_inputs, **case.random)._asdict()
    tangents, need = of_inputs | of_cotangents, [f"td{name}" for name in names]
    found = attention.backward_jvp(**cotangents, **arrays, **results, **tangents, need=need, **case.random)
    judge_functions(case, tangents, results | found._asdict())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", SCORES)
def test_functions_by_differences(name, dtype):
    """Functions that are options, too, which calls compute as these."""
    function, shapes = SCORES[name]
    random = np.random.default_rng(7)
    q, dout = (random.standard_normal((2, 4, 33, 8)) for _ in range(2))
    k, v = (random.standard_normal((2, 2, 33, 8)) for _ in range(2))
    point: dict[str, Any] = {"q": q, "k": k, "v": v} | {
        name: random.standard_normal(shape) for name, shape in shapes.items()
    }
    t: dict[str, Any] = {f"t{name}": random.standard_normal(x.shape) for name, x in point.items()}
    attention = cuflash.FlashAttention(causal=True, score=function)
    need = tuple(f"d{name}" for name in point)

    def at(h):
        moved = {name: x + h * t[f"t{name}"] for name, x in point.items()}
        out, lse = attention.forward(**moved)
        return (out, lse, *attention.backward(dout, **moved, out=out, lse=lse, need=need))

    def cast(arrays):
        return {name: x.astype(dtype) for name, x in arrays.items()}

    results = attention.jvp(**cast(point), **cast(t))
    found = attention.backward_jvp(
        dout.astype(dtype), **cast(point), **results._asdict(), need=[f"t{name}" for name in need], **cast(t)
    )
    after, before = at(1e-5), at(-1e-5)
    for got, x, y in zip((*results[2:], *found), after, before, strict=True):
        expected, limit = (x - y) / 2e-5, 1e-7 if dtype == "float64" else 2e-4
        assert got.dtype == dtype
        np.testing.assert_allclose(got, expected, rtol=limit, atol=limit * np.abs(expected).max())


# ---- batch axes, results that are given, and errors ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_batch_axes_that_broadcast(dtype):
    """q (3, 1), k and v (2,): tangents broadcast as their arrays do, and tangents of gradients are summed alike."""
    random = np.random.default_rng(1)
    shapes = {"q": (3, 1, 2, 17, 8), "k": (2, 2, 19, 8), "v": (1, 2, 19, 4), "bias": (3, 2, 1, 17, 19)}
    made: list[dict[str, Any]] = [
        {f"{p}{n}": random.standard_normal(s).astype(dtype) for n, s in shapes.items()} for p in ("", "t")
    ]
    point, t = made
    dout = random.standard_normal((3, 2, 2, 17, 4)).astype(dtype)
    attention, need = cuflash.FlashAttention(), ("tdq", "tdk", "tdv", "tdbias", "tdscale")
    results = attention.jvp(**point, **t)
    found = attention.backward_jvp(dout, **point, **results._asdict(), need=need, **t)
    assert [x.shape for x in found] == [*shapes.values(), ()]

    def whole(arrays: dict[str, Any]) -> dict[str, Any]:
        lead = {"q": (3, 2), "k": (3, 2), "v": (3, 2), "bias": (3, 2)}
        return {
            name: np.broadcast_to(x, (*lead[name.removeprefix("t")], *x.shape[-3:]))
            .reshape(6, *x.shape[-3:])
            .astype(float)
            for name, x in arrays.items()
        }

    plain = attention.jvp(**whole(point), **whole(t))
    exact = attention.backward_jvp(
        dout.reshape(6, *dout.shape[2:]).astype(float), **whole(point), **plain._asdict(), need=need, **whole(t)
    )
    limit = 1e-12 if dtype == "float64" else 3e-2
    for x, y in zip(results, plain, strict=True):
        np.testing.assert_allclose(x.reshape(y.shape).astype(float), y, rtol=limit, atol=limit)
    for name, x, y in zip(need, found, exact, strict=True):
        if name != "tdscale":
            y = y.reshape(3, 2, *y.shape[1:])
            lead = (1,) * (y.ndim - x.ndim) + x.shape
            y = y.sum(axis=tuple(a for a, n in enumerate(lead) if n == 1 and y.shape[a] != 1), keepdims=True)
            y = y.reshape(x.shape)
        np.testing.assert_allclose(x.astype(float), y, rtol=limit, atol=limit * (1 + np.abs(y).max()))


def arrays_of(**others: Any) -> dict[str, Any]:
    random = np.random.default_rng(2)
    return {name: random.standard_normal((2, 5, 4)).astype(np.float32) for name in ("q", "k", "v", *others)}


def test_results_are_written_where_the_caller_says():
    attention, given = cuflash.FlashAttention(), arrays_of()
    expected = attention.jvp(**given, tq=given["k"])
    out, tlse = np.empty((2, 5, 4), np.float32), np.empty((2, 5), np.float32)
    got = attention.jvp(**given, tq=given["k"], tout=out, tlse=tlse)
    assert got.tout is out and got.tlse is tlse
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    tdk = np.empty_like(out)
    found = attention.backward_jvp(given["v"], **given, **expected._asdict(), tq=given["k"], tdk=tdk, need=())
    assert found._fields == ("tdk",) and found.tdk is tdk
    every = attention.backward_jvp(given["v"], **given, **expected._asdict(), tq=given["k"])
    np.testing.assert_array_equal(tdk, every.tdk)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tq": np.zeros((2, 5, 3), np.float32)}, ValueError, "tq: got shape (2, 5, 3)"),
    ({"tk": np.zeros((2, 5, 4))}, TypeError, "tk: got dtype float64"),
    ({"tbias": np.zeros((5, 5), np.float32)}, ValueError, "tbias: got an array, expected None, or bias"),
    ({"tsoftcap": np.float32(1)}, ValueError, "tsoftcap: got an array, expected None, or FlashAttention(softcap=...)"),
    ({"tmask": np.zeros((5, 5), bool)}, TypeError, "unexpected keyword argument 'tmask'"),
    ({"tout": np.zeros((2, 5, 3), np.float32)}, ValueError, "tout: got shape (2, 5, 3)"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error) as raised:
        cuflash.FlashAttention().jvp(**arrays_of(), **arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("method", "name"),
    [("jvp", x) for x in ("ttq", "ttscale", "ttout", "ttgamma")]
    + [("backward_jvp", x) for x in ("ttq", "ttdout", "ttdk", "ttgamma", "ttdgamma")],
)
def test_the_third_order_is_refused_with_a_remedy(method, name):
    attention: Any = cuflash.FlashAttention(score=lambda s, i, j, *, gamma: s * gamma[j])
    given = arrays_of() | {"gamma": np.ones(5, np.float32)}
    inputs = {"tq": given["q"], name: given["q"]}
    if method == "backward_jvp":
        results = attention.jvp(**given, tq=given["q"])._asdict()
        inputs |= results | {"dout": given["v"]}
    message = f"^{name}: got a tangent of {name[1:]}, expected .* second order.* difference of {method} at q .* float64"
    with pytest.raises(NotImplementedError, match=message):
        getattr(attention, method)(**given, **inputs)


def test_cotangents_of_second_derivatives_are_of_the_third_order():
    given = arrays_of()
    with pytest.raises(NotImplementedError, match="got a tangent of tdq, expected derivatives of at most the second"):
        cuflash.double_backward(cuflash.FlashAttention(), {"tdq": given["q"]}, given["v"], **given)


@given(st.sampled_from(("q", "z", "lse", "dlse", "dout", "dbiass", "dgamma")))
def test_cotangents_are_of_gradients(name):
    """None is taken for an array to write a result to."""
    given, cotangent = arrays_of(), np.ones((2, 5), np.float32)
    for attention in (cuflash.FlashAttention(), cuflash.FlashAttention(score=lambda s, i, j: s)):
        with pytest.raises(ValueError, match=f"^cotangents: got '{name}', expected 'dq', "):
            cuflash.double_backward(attention, {name: cotangent}, given["v"], **given)
    np.testing.assert_array_equal(cotangent, 1)
    with pytest.raises(TypeError, match=r"^cotangents: got list \['dq'\], expected a mapping of names of gradients"):
        cuflash.double_backward(cuflash.FlashAttention(), ["dq"], given["v"], **given)  # type: ignore[call-overload]


def _faulty(fault: str, x: Any) -> Any:
    """A cotangent like x, but for one fault."""
    if fault == "an axis too few":
        return x[0] if x.ndim else np.ones(1, x.dtype)
    faults: dict[str, Callable[[Any], Any]] = {
        "another shape": lambda x: np.ones((*x.shape, 3), x.dtype),
        "another dtype": lambda x: x.astype(np.float64),
        "no real numbers": lambda x: x.astype(complex),
        "byte order": lambda x: x.astype(x.dtype.newbyteorder()),
        "of torch": lambda x: pytest.importorskip("torch").tensor(x),
        "a subclass": np.ma.array,
        "a list": lambda x: [1.0],
        "a str": lambda x: "q",
    }
    return faults[fault](x)


@settings(max_examples=examples(200))
@given(
    st.sampled_from(("q", "k", "v", "bias", "alibi_slopes", "sinks", "scale", "softcap", "gamma", "o")),
    st.sampled_from(
        [
            *("an axis too few", "another shape", "another dtype", "no real numbers", "byte order", "of torch"),
            *("a subclass", "a list", "a str"),
        ]
    ),
)
def test_errors_name_a_cotangent_as_the_caller_does(name, fault):
    """They say what those of `jvp` say of the tangent, which no caller of `double_backward` gives."""
    given, one = arrays_of(), np.ones(2, np.float32)
    optional_inputs = {"bias": np.ones((5, 5), np.float32), "alibi_slopes": one, "sinks": one}
    score_args = {"gamma": np.ones(5, np.float32), "o": np.ones(5, np.float32)}
    if name in score_args:
        attention: Any = cuflash.FlashAttention(score=lambda s, i, j, *, gamma, o: s * gamma[j] + o[j])
        given |= score_args
    else:
        attention = cuflash.FlashAttention(scale=0.5, softcap=3.0)
        given |= {name: optional_inputs[name]} if name in optional_inputs else {}
    cotangent = _faulty(fault, given.get(name, np.array(0.5, np.float32)))
    with pytest.raises((TypeError, ValueError)) as of_jvp:
        attention.jvp(**given, **{f"t{name}": cotangent})
    with pytest.raises(of_jvp.type) as of_double_backward:
        cuflash.double_backward(attention, {f"d{name}": cotangent}, given["v"], **given)
    argument = f'cotangents["d{name}"]'
    front, text = f"t{name}: got ", str(of_jvp.value)
    assert text.startswith(front)
    in_code = (f"(t{name}", f"({argument}"), (f": t{name}.", f": {argument}.")
    for tangent, own in in_code:
        text = text.replace(tangent, own)
    assert str(of_double_backward.value) == f"{argument}: {text.removeprefix(f't{name}: ')}"


def test_cotangents_of_what_a_call_does_not_have():
    given, one = arrays_of(), np.ones((5, 5), np.float32)
    message = r'^cotangents\["dbias"\]: got an array, expected None, or bias together with it$'
    with pytest.raises(ValueError, match=message):
        cuflash.double_backward(cuflash.FlashAttention(), {"dbias": one}, given["v"], **given)
    with pytest.raises(ValueError, match=r'^cotangents\["dsoftcap"\]: .* expected None, or FlashAttention\(softcap='):
        cuflash.double_backward(cuflash.FlashAttention(), {"dsoftcap": 1.0}, given["v"], **given)


def test_cotangents_whose_elements_share_memory_are_read():
    """Nothing is written to them: they are as good as copies, and None is as good as zeros."""
    given = arrays_of()
    shared = np.broadcast_to(given["k"][:1, :1], given["q"].shape)
    found = [
        cuflash.double_backward(cuflash.FlashAttention(), {"dq": dq, "dv": dv}, given["v"], **given)
        for dq, dv in ((shared, None), (shared.copy(), np.zeros_like(given["v"])))
    ]
    for x, y in zip(*((*each[:2], *each.gradients) for each in found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_names_of_score_args_that_clash_with_tangents():
    given = arrays_of()
    two = cuflash.FlashAttention(score=lambda s, i, j, *, a, ta: s + a[i] * ta[j])
    extra: dict[str, Any] = {name: np.zeros(5, np.float32) for name in ("a", "ta")}
    assert two.forward(**given, **extra).out.shape == (2, 5, 4)
    with pytest.raises(ValueError, match="arrays named a and ta"):
        two.jvp(**given, **extra)
    with pytest.raises(ValueError, match="an array named tq"):
        cuflash.FlashAttention(score=lambda s, i, j, *, tq: s + tq[i])


def test_pages_and_fp8_have_no_tangents():
    random = np.random.default_rng(0)
    k = cuflash.quantize(random.standard_normal((1, 2, 5, 16)).astype(np.float32))
    q = random.standard_normal((1, 2, 5, 16)).astype(np.float32)
    with pytest.raises(NotImplementedError, match="k: got dtype float8"):
        cuflash.FlashAttention().jvp(q, k.array, k.array, k_scale=k.scale, v_scale=k.scale)
