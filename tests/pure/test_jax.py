"""`cuflash.jax` on arrays in host memory: the passes, derivatives up to second order, jit, vmap and messages."""

import doctest
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.testing.tangents import assert_tangents, movable
from tests import sampling
from tests.compiled import run_python
from tests.pure.test_docstrings import documented_parameters, parameters
from tests.sampling import examples
from tests.second_derivatives import CONSTANT, FEATURES, moved_by

jax = pytest.importorskip("jax", reason="JAX is not installed")

from jax.test_util import check_grads  # noqa: E402

from cuflash.jax import attention, logsumexp  # noqa: E402

jnp = jax.numpy


@pytest.fixture(autouse=True)
def float64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)  # in all threads, as callbacks need it
    yield
    jax.config.update("jax_enable_x64", before)


SMALL: dict[str, Any] = {
    "strides": ("contiguous",),
    "features": FEATURES,
    "max_seqlen": 33,
    "max_head_dim": 16,
    "max_scores": 2**12,
}


def of_case(case):
    """The arrays of a case, those of a call, the names of those with gradients, and the other keywords of a call."""
    arrays = case.arrays(jnp.asarray)
    inputs = {name: arrays[name] for name in ("q", "k", "v")} | ct.optional(arrays)
    names = [name for name in movable(case) if name in inputs]
    return arrays, inputs, names, {"attn": cuflash.FlashAttention(**case.keywords), "return_lse": True} | case.random


@settings(max_examples=examples(40), deadline=None)
@given(ct.cases(**SMALL), st.booleans())
def test_results_and_gradients_are_those_of_the_passes(case, compiled):
    """To the bit, of every option, with values and within jit."""
    arrays, inputs, names, how = of_case(case)
    cotangents = (arrays["dout"], *([arrays["dlse"]] if case.dlse else []))

    def both(own, cotangents):
        found, back = jax.vjp(lambda own: attention(**inputs | own, **how)[: len(cotangents)], own)
        return found, back(cotangents)[0]

    results, found = (jax.jit(both) if compiled else both)({name: inputs[name] for name in names}, cotangents)
    plain, attn = case.arrays(), how["attn"]
    given: dict[str, Any] = {name: plain[name] for name in ("q", "k", "v")} | ct.optional(plain) | case.random
    right = attn.forward(**given)
    for got, expected in zip(results, right, strict=False):
        np.testing.assert_array_equal(got, expected)
    dlse = {"dlse": plain["dlse"]} if case.dlse else {}
    need = tuple(f"d{name}" for name in names)
    gradients = attn.backward(plain["dout"], **given, **right._asdict(), need=need, **dlse)._asdict()
    for name in names:
        np.testing.assert_array_equal(found[name], gradients[f"d{name}"], err_msg=name)


@settings(max_examples=examples(30), deadline=None)
@given(ct.cases(**SMALL), st.data())
def test_tangents_by_the_oracle_rule(case, data):
    """Forward mode, and forward mode over reverse mode."""
    arrays, inputs, leaves, how = of_case(case)
    drawn = data.draw(moved_by(case))
    names = [name for name in drawn.names if name in leaves] or ["q"]  # numbers have no arrays
    moved = replace(drawn, names=tuple(names))
    tangents = moved.arrays(case, jnp.asarray)
    point = tuple(inputs[name] for name in names)
    direction = tuple(tangents[f"t{name}"] for name in names)
    cotangents = (arrays["dout"], *([arrays["dlse"]] if case.dlse else []))
    of_cotangents = tuple(
        tangents.get(name, jnp.zeros_like(x)) for name, x in zip(("tdout", "tdlse"), cotangents, strict=False)
    )

    def f(*xs):
        return attention(**inputs | dict(zip(names, xs, strict=True)), **how)[: 1 + case.dlse]

    def gradients(cotangents, *xs):
        return jax.vjp(f, *xs)[1](cotangents)

    _, tangent = jax.jvp(f, point, direction)
    _, of_gradients = jax.jvp(gradients, (cotangents, *point), (of_cotangents, *direction))
    results = {"tout": tangent[0]} | ({"tlse": tangent[1]} if case.dlse else {})
    results |= {f"td{name}": x for name, x in zip(names, of_gradients, strict=True)}
    assert_tangents(case, moved, {name: np.asarray(x) for name, x in results.items()})


# ---- derivatives by differences --------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "causal, softcap": {"causal": True, "softcap": 2.0},
    "mask, bias, sinks, GQA, dropout": {"mask": True, "bias": True, "sinks": True, "dropout": 0.25},
    "window, slopes, layout": {"window": (3, 1), "alibi_slopes": True, "layout": "bshd"},
    "varlen": {"cu_seqlens": True, "causal": True},
    "score": {"score": True},
}


def problem(options):
    """A function of arrays in float64, and these."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape))

    given, heads = dict(options), (4, 2)
    own = {"q": normal(2, 4, 5, 3), "k": normal(2, 2, 6, 3), "v": normal(1, 2, 6, 2)}
    if given.pop("cu_seqlens", False):
        starts = jnp.array([0, 2, 2, 5], jnp.int32)
        given |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        own = {"q": normal(4, 5, 3), "k": normal(2, 5, 3), "v": normal(2, 5, 2)}
    if given.get("layout") == "bshd":
        own = {name: x.swapaxes(-2, -3) for name, x in own.items()}
    own |= {"bias": normal(4, 5, 6)} if given.pop("bias", False) else {}
    own |= {name: normal(heads[0]) for name in ("sinks", "alibi_slopes") if given.pop(name, False)}
    given |= {"mask": normal(5, 6) > -1} if given.get("mask") else {}
    given |= {"seed": 3, "offset": 1} if "dropout" in given else {}
    if given.pop("score", False):
        given["score"] = lambda s, i, j, *, head, gamma, shift: s + gamma[head] * cuflash.tanh(s * shift[i] + j)
        own |= {"gamma": normal(heads[0]), "shift": normal(5)}

    def f(*xs):
        out, lse = attention(**dict(zip(own, xs, strict=True)), **given, return_lse=True)
        return (out**3).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()

    return f, tuple(own.values())


CHECKED = [(name, name in ("mask, bias, sinks, GQA, dropout", "varlen")) for name in OPTIONS]


@pytest.mark.parametrize(("name", "compiled"), CHECKED if sampling.exhaustive else [CHECKED[1], CHECKED[-1]])
def test_first_and_second_derivatives(name, compiled):
    """Reverse and forward mode, reverse over reverse, forward over reverse and reverse over forward."""
    f, xs = problem(OPTIONS[name])
    f, every = jax.jit(f) if compiled else f, tuple(range(len(xs)))
    check_grads(f, xs, order=1, modes=["fwd"])
    check_grads(f, xs, order=2, modes=["rev"])  # of first order, too
    check_grads(jax.grad(f, every), xs, order=1, modes=["fwd"])
    direction = tuple(jnp.cos(jnp.arange(x.size, dtype=float)).reshape(x.shape) for x in xs)
    check_grads(lambda *xs: jax.jvp(f, xs, direction)[1], xs, order=1, modes=["rev"])


def test_second_derivatives_in_any_order():
    f, xs = problem(OPTIONS["mask, bias, sinks, GQA, dropout"])
    every, u = tuple(range(len(xs))), tuple(jnp.ones_like(x) for x in xs)
    t = tuple(jnp.cos(jnp.arange(x.size, dtype=float)).reshape(x.shape) for x in xs)
    gradient = jax.grad(f, every)
    right = jax.jvp(gradient, xs, t)[1]
    linear = jax.linearize(gradient, *xs)[1]
    found = {
        "reverse over forward": jax.grad(lambda *xs: jax.jvp(f, xs, t)[1], every)(*xs),
        "reverse over reverse": jax.vjp(gradient, *xs)[1](t),
        "linearized": linear(*t),
        "and transposed": jax.linear_transpose(linear, *xs)(t),
        "a derivative of what is linear": jax.jvp(lambda *u: jax.jvp(gradient, xs, u)[1], u, t)[1],
    }
    for name, of in found.items():
        for got, expected in zip(of, right, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12, err_msg=name)
    of_both = jax.grad(lambda xs, t: jax.jvp(f, xs, t)[1], (0, 1))(xs, t)  # of a point and of a direction
    for got, expected in zip((*of_both[0], *of_both[1]), (*right, *gradient(*xs)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)

    def two(*xs):
        return attention(*xs[:3], causal=True, return_lse=True)

    def of_cotangents(tangents):
        """<t, the tangent of the gradients>, of which tangents of out and lse in the direction t are the gradient."""
        ones = jax.tree.map(jnp.ones_like, tangents)
        moved = jax.jvp(lambda d, xs: jax.vjp(two, *xs)[1](d), (ones, xs[:3]), (tangents, u[:3]))[1]
        return sum((x * y).sum() for x, y in zip(moved, t[:3], strict=True))

    right = jax.jvp(two, xs[:3], t[:3])[1]
    for got, expected in zip(jax.grad(of_cotangents)(right), right, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    by_columns = jax.hessian(lambda q: f(q, *xs[1:]))(xs[0]).reshape(xs[0].size, -1)
    np.testing.assert_allclose(by_columns, by_columns.T, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True], ids=["with values", "jit"])
@pytest.mark.parametrize(
    ("derivative", "words"),
    [
        (lambda f: jax.grad(lambda x: jax.hessian(f)(x).sum()), "third derivative.* h, in float64"),
        (lambda f: lambda x: jax.grad(lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1].sum())(x), "third derivative"),
        (lambda f: jax.jacfwd(jax.jacfwd(f)), r"forward mode over forward.* jacfwd\(jacrev\(f\)\)"),
    ],
    ids=["of a Hessian", "of a product", "forward twice"],
)
def test_what_no_pass_gives_is_refused(derivative, words, compiled):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 2)))
    of = derivative(lambda x: (attention(x, x, x) ** 2).sum())
    with pytest.raises(NotImplementedError, match=f"^attention: got .*{words}"):
        (jax.jit(of) if compiled else of)(x)


@pytest.mark.parametrize("name", CONSTANT)
def test_arrays_that_move_nothing_have_no_derivatives(name):
    """Those that functions only compare, or do not read: as what a comparison of JAX compares."""
    q, x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 8))), jnp.linspace(0, 1, 4)

    def f(q, x):
        return jnp.sin(attention(q, q, q, x=x, **CONSTANT[name])).sum()

    of_q, of_x = jax.grad(f, (0, 1))(q, x)
    np.testing.assert_allclose(of_q, jax.grad(f)(q, x))
    assert not of_x.any()
    of_both = jax.hessian(f, (0, 1))(q, x)
    np.testing.assert_allclose(of_both[0][0], jax.hessian(f)(q, x))
    assert not of_both[0][1].any() and not of_both[1][1].any()
    np.testing.assert_allclose(jax.jvp(f, (q, x), (q, x))[1], jax.jvp(lambda q: f(q, x), (q,), (q,))[1])


def test_derivatives_of_scales_of_fp8_are_refused():
    k, one = jnp.asarray(X, jnp.float8_e4m3fn), jnp.float32(1)
    with pytest.raises(NotImplementedError, match=r"^k_scale: got a derivative .* give cuflash\.dequantize"):
        jax.grad(lambda scale: attention(jnp.asarray(X, "float32"), k, k, k_scale=scale, v_scale=one).sum())(one)


# ---- jit, vmap -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "compiled"), [("mask, bias, sinks, GQA, dropout", True), ("window, slopes, layout", False)]
)
def test_vmap_is_a_loop(name, compiled):
    """Entry by entry, or in one pass."""
    f, xs = problem(OPTIONS[name])
    many = tuple(jnp.stack([x, x + 1, 2 * x]) for x in xs)
    both = jax.value_and_grad(f, tuple(range(len(xs))))
    mapped = jax.vmap(both, in_axes=(-1, *(0,) * (len(xs) - 1)))
    found = (jax.jit(mapped) if compiled else mapped)(jnp.moveaxis(many[0], 0, -1), *many[1:])
    for entry in range(3):
        right = both(*(x[entry] for x in many))
        for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(got[entry], expected, rtol=1e-12, atol=1e-13)


def test_a_step_of_training_within_jit():
    """Forward and backward in one compiled function, in a loop of JAX, with a seed that changes."""
    attn = cuflash.FlashAttention(causal=True, dropout=0.5)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 4)), np.float32)

    def loss(w, step):
        return (attention(x @ w, x, x, attn=attn, seed=step, offset=step) ** 2).mean()

    @jax.jit
    def train(w):
        return jax.lax.fori_loop(0, 3, lambda step, w: w - jax.grad(loss)(w, step), w)

    w = right = jnp.eye(4, dtype=np.float32)
    for step in range(3):
        right = right - jax.grad(loss)(right, step)
    np.testing.assert_allclose(train(w), right, rtol=1e-5)


def test_a_large_array_passes_through_a_callback():
    """Of some megabytes, which callbacks of JAX wait for."""
    q = jnp.ones((4, 4096, 64), np.float32)
    out = jax.jit(lambda q: attention(q * 2, q, q, window=(8, 8)) + 1)(q)
    np.testing.assert_allclose(out, 2.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_jit_gives_the_dtypes_that_it_promised(dtype):
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 8)), dtype)
    out, lse = jax.jit(lambda q: attention(q, q, q, return_lse=True))(q)
    right = attention(q, q, q, return_lse=True)
    assert (out.dtype, lse.dtype) == (q.dtype, right[1].dtype)
    np.testing.assert_array_equal(out, right[0])


X = np.ones((2, 4, 8), np.float32)


@pytest.mark.parametrize("compiled", [False, True], ids=["with values", "jit"])
@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"k": [1.0]}, TypeError, r"k: got list, expected a jax\.Array"),
        ({"mask": [[True]]}, TypeError, "mask: got list, expected an array of the library of q"),
        ({"is_causal": True}, TypeError, r"attention\(\) got an unexpected keyword argument 'is_causal'"),
        ({"gamma": X}, TypeError, r"attention\(\) got an unexpected keyword argument 'gamma'"),
        ({"attn": cuflash.FlashAttention(), "causal": True}, TypeError, "causal: got it together with attn"),
        ({"causal": "yes"}, ValueError, "causal: got 'yes'"),
        ({"k": X[:, :2]}, ValueError, "v: got seqlen_k 4, expected seqlen_k 2 as k has"),
        ({"dropout": 0.5}, TypeError, "seed: got None"),
        ({"dropout": 0.5, "offset": 0, "seed": jnp.ones(())}, TypeError, "seed: got an array of float32 and shape"),
        ({"dropout": 0.5, "offset": 0, "seed": jax.random.key(0)}, TypeError, r"seed: .*jax\.random\.bits\(key"),
        ({"dropout": 0.5, "offset": jnp.zeros(3, int), "seed": 0}, TypeError, r"offset: got .* shape \(3,\)"),
        ({"dropout": 0.5, "offset": jnp.zeros((), int), "seed": -1}, ValueError, "seed: got -1, expected 0 to"),
    ],
)
def test_wrong_arguments_are_named(keywords, error, words, compiled):
    def f(q):
        return attention(**{"q": q, "k": X, "v": X} | keywords)

    with pytest.raises(error, match=f"^{words}"):
        (jax.jit(f) if compiled else f)(jnp.asarray(X))


@pytest.mark.parametrize("seed", [3, 2**32, 2**63 - 1])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_a_seed_in_an_array_has_all_its_bits(seed, dtype):
    right = attention(X, X, X, dropout=0.5, seed=seed, offset=2)
    with jax.enable_x64(True):
        found = jax.jit(lambda seed: attention(X, X, X, dropout=0.5, seed=seed, offset=2))(jnp.array(seed, dtype))
    assert jnp.array_equal(found, right)


@pytest.mark.parametrize("seed", [3, 2**40 + 3])
def test_a_seed_next_to_an_offset_in_an_array(seed):
    """Which has all of its bits, as next to an offset that is a number."""
    attn = cuflash.FlashAttention(dropout=0.5)
    right = attention(X, X, X, attn=attn, seed=seed, offset=2)
    for jit in (jax.jit, lambda f: f):
        found = jit(lambda offset: attention(X, X, X, attn=attn, seed=seed, offset=offset))(jnp.array(2))
        np.testing.assert_array_equal(found, right)


FACTOR = 1.0


def by_factor(s, i, j):
    return s * FACTOR


def test_a_function_is_traced_by_each_call(monkeypatch):
    for factor in (2.0, 3.0, 2.0):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        right = attention(X, X, X, scale=factor * X.shape[-1] ** -0.5)
        np.testing.assert_allclose(attention(X, X, X, score=by_factor), right, rtol=1e-6)


def test_an_array_of_a_score_may_be_named_random():
    x, attn = np.linspace(0, 1, X.shape[-2], dtype=np.float32), cuflash.FlashAttention(dropout=0.5, score=by_random)
    right = attn.forward(np.asarray(X), np.asarray(X), np.asarray(X), random=x, seed=1, offset=2).out
    np.testing.assert_allclose(attention(X, X, X, attn=attn, random=x, seed=1, offset=2), right, rtol=1e-6)


def by_random(s, i, j, *, random):
    return s + random[i] * random[j]


# ---- several devices -------------------------------------------------------------------------------------------------

ON_TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, cuflash
from cuflash.jax import attention
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_enable_x64", True)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
q, k, v, bias = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(4, 2, 6, 4)] * 3 + [(6,)]))

def damped(s, i, j, *, x):
    return s * (1 + x[j])

CASES = {
    "score": lambda q, k, v, x: attention(q, k, v, score=damped, x=x),
    "dropout, lengths": lambda q, k, v, x: attention(
        q, k, v, bias=x, kv_lengths=jnp.array([3, 5]), dropout=0.3, seed=1, offset=2
    ),
    "vmap": lambda q, k, v, x: jax.vmap(lambda q, k: attention(q, k, v[0], bias=x))(q, k),
}

def compared(found, right, name):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-9, atol=1e-12, err_msg=name)

def loss(x):
    return jnp.sin(x).sum()

for name, f in CASES.items():
    for is_shared in (False, True):  # keys and values, by both devices
        own = (q, k[:2], v[:2], bias) if is_shared else (q, k, v, bias)
        def whole(*xs):
            halves = (slice(0, 2), slice(2, 4))
            return sum(loss(f(xs[0][n], *(x if is_shared else x[n] for x in xs[1:3]), xs[3])) for n in halves)
        for check in (True, False) if is_shared else (True,):
            specs = (P("x"), *(P() if is_shared else P("x"),) * 2, P())
            def of_shard(*xs):
                return jax.lax.psum(loss(f(*xs)), "x")
            sharded = jax.shard_map(of_shard, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)
            every = (0, 1, 2, 3)
            compared(jax.jit(jax.value_and_grad(sharded, every))(*own), jax.value_and_grad(whole, every)(*own), name)
            if check and is_shared and name == "score":
                compared(jax.grad(sharded, every)(*own), jax.grad(whole, every)(*own), name)
                product = lambda f: jax.jvp(jax.grad(f, every), own, own)[1]
                compared(jax.jit(lambda: product(sharded))(), product(whole), name)
try:
    jax.shard_map(lambda q: attention(q, q, q), mesh=mesh, in_specs=P("x"), out_specs=P())(q)
except ValueError as error:
    assert "require replication" in str(error), error
else:
    raise AssertionError("a result that differs between devices passed as one that does not")

second = jax.devices()[1]
on_second = [jax.device_put(x, second) for x in (q, k, v)]
gradient = jax.grad(lambda q: loss(attention(q, *on_second[1:])))(on_second[0])
assert gradient.devices() == attention(*on_second).devices() == {second}
try:
    attention(*(jax.device_put(x, NamedSharding(mesh, P("x"))) for x in (q, k, v)))
except NotImplementedError as error:
    assert str(error).startswith("q: got an array over 2 devices, expected one on a single device"), error
else:
    raise AssertionError("an array over two devices was taken")
"""


def test_shards_of_arrays_on_several_devices():
    run_python(ON_TWO_DEVICES, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")


# ---- logsumexp -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(30), deadline=None)
@given(ct.cases(**SMALL | {"features": [x for x in FEATURES if x != "dropout"]}), st.booleans())
def test_lse_and_its_gradients_are_those_of_the_passes_without_values(case, compiled):
    """To the bit: of every option, with values of the arrays and within jit."""
    case = replace(case, has_values=False, dlse=True)
    arrays, plain = case.arrays(jnp.asarray), case.arrays()
    attn: Any = cuflash.FlashAttention(**case.keywords)
    inputs = {name: arrays[name] for name in ("q", "k")} | ct.optional(arrays)
    names = [name for name in movable(case) if name in inputs]

    def both(own, dlse):
        lse, back = jax.vjp(lambda own: logsumexp(**inputs | own, attn=attn), own)
        return lse, back(dlse)[0]

    lse, found = (jax.jit(both) if compiled else both)({name: inputs[name] for name in names}, arrays["dlse"])
    right = attn.forward(plain["q"], plain["k"], None, **ct.optional(plain)).lse
    np.testing.assert_array_equal(lse, right)
    need, optional = tuple(f"d{name}" for name in names), ct.optional(plain) | {"dlse": plain["dlse"]}
    expected = attn.backward(None, plain["q"], plain["k"], None, None, right, need=need, **optional)
    for name in names:
        np.testing.assert_array_equal(found[name], getattr(expected, f"d{name}"), err_msg=name)


@pytest.mark.parametrize("compiled", [False, True], ids=["with values", "jit"])
def test_derivatives_of_lse(compiled):
    rng = np.random.default_rng(0)
    xs = tuple(jnp.asarray(rng.standard_normal(shape)) for shape in ((2, 4, 5, 3), (2, 2, 6, 3), (4, 5, 6)))

    def f(q, k, bias):
        return jnp.sin(logsumexp(q, k, bias=bias, causal=True)).sum()

    f, direction = jax.jit(f) if compiled else f, tuple(jnp.cos(x) for x in xs)
    check_grads(f, xs, order=1)
    check_grads(f, xs, order=2, modes=["rev"])
    check_grads(jax.grad(f, (0, 1, 2)), xs, order=1, modes=["fwd"])
    check_grads(lambda *xs: jax.jvp(f, xs, direction)[1], xs, order=1, modes=["rev"])
    many = tuple(jnp.stack([x, 2 * x]) for x in xs)
    mapped = jax.vmap(jax.grad(f, (0, 1, 2)))(*many)
    for found, right in zip(mapped, jax.grad(f, (0, 1, 2))(*(x[1] for x in many)), strict=True):
        np.testing.assert_allclose(found[1], right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"k": [1.0]}, r"k: got list, expected a jax\.Array"),
        ({"v": X}, r"logsumexp\(\) got an unexpected keyword argument 'v'"),
        ({"dropout": 0.5}, r"logsumexp\(\) got an unexpected keyword argument 'dropout'"),
        ({"gamma": X}, r"logsumexp\(\) got an unexpected keyword argument 'gamma'"),
        ({"attn": cuflash.FlashAttention(dropout=0.5)}, "attn: got dropout=0.5, expected one without dropout, which"),
    ],
)
def test_wrong_arguments_of_logsumexp_are_named(keywords, words):
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        logsumexp(**{"q": X, "k": X} | keywords)


def test_keys_in_pages_have_no_gradient():
    pages, q = jnp.ones((3, 2, 16, 8)), jnp.ones((1, 2, 4, 8))
    paged = {"block_table": jnp.array([[2, 0]], jnp.int32), "kv_lengths": jnp.array([20], jnp.int32)}
    out = jax.jit(lambda q: attention(q, pages, pages, **paged))(q)
    np.testing.assert_allclose(out, 1.0)
    with pytest.raises(NotImplementedError, match=r"^block_table: .* gather the pages"):
        jax.grad(lambda q: attention(q, pages, pages, **paged).sum())(q)


def test_the_documentation_is_right():
    """Its parameters are those that there are, and its example runs."""
    for function in (attention, logsumexp):
        assert documented_parameters(function) == parameters(function)
    assert doctest.testmod(sys.modules[attention.__module__]).failed == 0
