"""`cuflash.torch` on tensors in host memory: the oracle, derivatives up to second order, compilers and messages."""

import doctest
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.frameworks import call
from cuflash.testing.tangents import assert_tangents, movable
from tests.pure.test_docstrings import documented_parameters, parameters
from tests.sampling import examples
from tests.second_derivatives import CONSTANT, FEATURES, moved_by

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cuflash.torch import attention, logsumexp  # noqa: E402
from cuflash.torch.tensors import numpy_view  # noqa: E402

from_numpy = ct.through_dlpack(torch.from_dlpack)
X = torch.randn(2, 4, 8)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of_case(case):
    """The tensors of a case, those with gradients as leaves, and the other keywords of a call."""
    arrays = case.arrays(from_numpy)
    inputs = {name: arrays[name] for name in ("q", "k", "v")} | ct.optional(arrays)
    leaves = {name: inputs[name].requires_grad_() for name in movable(case) if name in inputs}
    attn = cuflash.FlashAttention(**case.keywords)
    return arrays, inputs, leaves, {"attn": attn, "return_lse": True} | case.random


def to_numpy(x):
    x = x.detach()
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()


# ---- the oracle ------------------------------------------------------------------------------------------------------

STRIDES = ("contiguous", "padded", "transposed")  # PyTorch has no negative ones
SMALL: dict[str, Any] = {
    "strides": STRIDES,
    "features": FEATURES,
    "max_seqlen": 33,
    "max_head_dim": 16,
    "max_scores": 2**12,
}


@settings(max_examples=examples(100))
@given(ct.cases(**SMALL))
def test_results_and_gradients_are_those_of_the_passes(case):
    """To the bit: of every option, and of those alone that are asked for."""
    arrays, inputs, leaves, how = of_case(case)
    out, lse = attention(**inputs, **how)
    plain = case.arrays()
    attn, given = how["attn"], {**ct.optional(plain), **case.random}
    right = attn.forward(plain["q"], plain["k"], plain["v"], **given)
    np.testing.assert_array_equal(to_numpy(out), right.out.astype(to_numpy(out).dtype))
    np.testing.assert_array_equal(to_numpy(lse), right.lse)
    cotangents = [arrays["dout"], arrays.get("dlse")]
    found = torch.autograd.grad([out, lse][: 1 + case.dlse], list(leaves.values()), cotangents[: 1 + case.dlse])
    dlse = {"dlse": plain["dlse"]} if case.dlse else {}
    need = tuple(f"d{name}" for name in leaves)
    expected = attn.backward(
        plain["dout"], plain["q"], plain["k"], plain["v"], *right, need=need, **given, **dlse
    )._asdict()
    for name, x in zip(leaves, found, strict=True):
        assert (x.shape, x.dtype) == (leaves[name].shape, leaves[name].dtype)
        np.testing.assert_array_equal(to_numpy(x), expected[f"d{name}"].astype(to_numpy(x).dtype))


@settings(max_examples=examples(60))
@given(ct.cases(**SMALL), st.data())
def test_tangents_by_the_oracle_rule(case, data):
    """Forward mode, and forward mode over reverse mode."""
    arrays, inputs, leaves, how = of_case(case)
    drawn = data.draw(moved_by(case))
    names = [name for name in drawn.names if name in leaves] or ["q"]  # numbers have no tensors
    moved = replace(drawn, names=tuple(names))
    fixed, tangents = {name: x.detach() for name, x in inputs.items()}, moved.arrays(case, from_numpy)
    point = tuple(fixed[name] for name in names)
    direction = tuple(tangents[f"t{name}"] for name in names)
    cotangents = (arrays["dout"], *([arrays["dlse"]] if case.dlse else []))
    of_cotangents = tuple(
        tangents.get(name, torch.zeros_like(x)) for name, x in zip(("tdout", "tdlse"), cotangents, strict=False)
    )

    def f(*xs):
        return attention(**(fixed | dict(zip(names, xs, strict=True))), **how)[: 1 + case.dlse]

    def gradients(cotangents, *xs):
        _, back = torch.func.vjp(f, *xs)
        return back(cotangents)

    (_, *_), tangent = torch.func.jvp(f, point, direction)
    _, of_gradients = torch.func.jvp(gradients, (cotangents, *point), (of_cotangents, *direction))
    results = {"tout": tangent[0]} | ({"tlse": tangent[1]} if case.dlse else {})
    results |= {f"td{name}": x for name, x in zip(names, of_gradients, strict=True)}
    assert_tangents(case, moved, {name: numpy_view(x) for name, x in results.items()})


# ---- derivatives by differences --------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "causal, softcap": {"causal": True, "softcap": 2.0},
    "mask, bias, sinks, GQA, dropout": {
        "mask": True,
        "bias": True,
        "sinks": True,
        "dropout": 0.25,
        "seed": 3,
        "offset": 1,
    },
    "window, slopes, layout": {"window": (3, 1), "alibi_slopes": True, "layout": "bshd"},
    "lengths": {"kv_lengths": True},
    "block mask": {"block_mask": True, "block_size": 16},
    "varlen": {"cu_seqlens": True, "causal": True},
    "score": {"score": True},
}


def problem(options):
    """Leaves by name and what else a call takes, in float64."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=random)

    given = dict(options)
    heads = 4, 2
    if given.pop("cu_seqlens", False):
        starts = torch.tensor([0, 2, 2, 5])
        given |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        leaves = {"q": normal(4, 5, 3), "k": normal(2, 5, 3), "v": normal(2, 5, 2)}
    else:
        leaves = {"q": normal(2, 4, 5, 3), "k": normal(2, 2, 6, 3), "v": normal(1, 2, 6, 2)}
    if given.get("layout") == "bshd":
        leaves = {name: x.transpose(-2, -3) for name, x in leaves.items()}
    leaves |= {"bias": normal(4, 5, 6)} if given.pop("bias", False) else {}
    leaves |= {"sinks": normal(heads[0])} if given.pop("sinks", False) else {}
    leaves |= {"alibi_slopes": normal(heads[0])} if given.pop("alibi_slopes", False) else {}
    if given.pop("mask", False):
        given["mask"] = normal(5, 6) > -1
    if given.pop("kv_lengths", False):
        given["kv_lengths"] = torch.tensor([6, 3])
    if given.pop("block_mask", False):
        given["block_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    if given.get("score") is True:
        given["score"] = lambda s, i, j, *, head, gamma, shift: s + gamma[head] * cuflash.tanh(s * shift[i] + j)
        leaves |= {"gamma": normal(heads[0]), "shift": normal(5)}
    return {name: x.requires_grad_() for name, x in leaves.items()}, given


def function_of(leaves, given):
    def f(*xs):
        return attention(**dict(zip(leaves, xs, strict=True)), **given, return_lse=True)

    return f, tuple(leaves.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_first_and_second_derivatives(name):
    """Reverse and forward mode, reverse over reverse and forward over reverse, of out and of lse."""
    f, xs = function_of(*problem(OPTIONS[name]))
    how = {"fast_mode": True}
    assert torch.autograd.gradcheck(f, xs, check_forward_ad=True, **how)
    assert torch.autograd.gradgradcheck(f, xs, check_fwd_over_rev=True, **how)


def test_second_derivatives_in_any_order():
    """Reverse over forward, of which the pass is `jvp_backward`, is the Hessian; and the Hessian is its own transpose,
    which `torch.autograd.functional.hvp` takes."""
    f, xs = function_of(*problem(OPTIONS["mask, bias, sinks, GQA, dropout"]))
    xs = tuple(x.detach() for x in xs)

    def loss(*xs):
        out, lse = f(*xs)
        return (out**3).sum() + lse.sin().sum()

    every = tuple(range(len(xs)))
    direction = tuple(torch.randn_like(x) for x in xs)
    gradient = torch.func.grad(loss, every)
    right = torch.func.jvp(gradient, xs, direction)[1]
    over_forward = torch.func.grad(lambda *xs: torch.func.jvp(loss, xs, direction)[1], every)(*xs)
    of_tangents = torch.func.grad(lambda *t: torch.func.jvp(loss, xs, t)[1], every)(*direction)
    by_vjp = torch.func.vjp(gradient, *xs)[1](direction)
    for found, expected in (
        (over_forward, right),
        (of_tangents, gradient(*xs)),
        (by_vjp, right),
        (torch.autograd.functional.hvp(loss, xs, direction)[1], right),
        (torch.autograd.functional.vhp(loss, xs, direction)[1], right),
    ):
        for got, x in zip(found, expected, strict=True):
            torch.testing.assert_close(got, x, rtol=1e-10, atol=1e-12)
    columns = torch.func.hessian(lambda q: loss(q, *xs[1:]))(xs[0])
    torch.testing.assert_close(columns, columns.flatten(4).flatten(0, 3).T.reshape(columns.shape))


def test_linear_parts_of_second_derivatives():
    """Tangents of dout alone, and tangents of tangents alone."""
    f, xs = function_of(*problem(OPTIONS["causal, softcap"]))
    xs = tuple(x.detach() for x in xs)
    t, u = (tuple(torch.randn_like(x) for x in xs) for _ in range(2))
    out, back = torch.func.vjp(f, *xs)
    dout, tdout = (tuple(torch.randn_like(x) for x in out) for _ in range(2))
    torch.testing.assert_close(torch.func.jvp(lambda *d: back(d), dout, tdout)[1], back(tdout))
    found = torch.func.jvp(lambda *t: torch.func.jvp(f, xs, t)[1], t, u)
    torch.testing.assert_close(found[1], torch.func.jvp(f, xs, u)[1])

    def product(t):
        return torch.func.vjp(lambda *xs: torch.func.vjp(f, *xs)[1](dout), *xs)[1](t)

    torch.testing.assert_close(torch.func.jvp(product, (t,), (u,)), (product(t), product(u)))

    def of_cotangents(*tangents):
        """<u, the tangent of the gradients>, of which tangents of out and lse in the direction u are the gradient."""
        moved = torch.func.jvp(lambda d, xs: torch.func.vjp(f, *xs)[1](d), (dout, xs), (tangents, t))[1]
        return sum((x * y).sum() for x, y in zip(moved, u, strict=True))

    right = torch.func.jvp(f, xs, u)[1]
    torch.testing.assert_close(torch.func.grad(of_cotangents, (0, 1))(*tdout), right)


def product(dout, x):
    """The Hessian of <dout, attention>, times ones, by reverse mode twice."""

    def gradient(x):
        return torch.func.vjp(lambda x: attention(x, x, x), x)[1](dout)[0]

    return torch.func.vjp(gradient, x)[1](torch.ones_like(x))[0]


@pytest.mark.parametrize(
    ("derivative", "words"),
    [
        (lambda f, x: torch.func.grad(lambda x: torch.func.hessian(f)(x).sum())(x), "third derivative.* h, in float64"),
        (lambda f, x: torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(f)))(x), "third derivative"),
        (lambda f, x: torch.func.jvp(lambda d: product(d, x), (x,), (x,)), "third derivative"),
        (lambda f, x: torch.func.jacfwd(torch.func.jacfwd(f))(x), r"forward mode over forward.* jacfwd\(jacrev\(f\)\)"),
        (
            lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
            r"vectorize=True.* torch\.func\.jacrev",
        ),
    ],
)
def test_what_no_pass_gives_is_refused(derivative, words):
    x = torch.randn(2, 3, 2, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=f"^attention: got .*{words}"):
        derivative(lambda x: (attention(x, x, x) ** 2).sum(), x)


def test_batched_gradients_of_bfloat16_are_refused_as_others_are():
    x = torch.randn(2, 3, 4).bfloat16()
    with pytest.raises(NotImplementedError, match=r"^attention: got .*vectorize=True.* torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(lambda x: attention(x, x, x).sum(), x, vectorize=True)


@pytest.mark.parametrize("name", CONSTANT)
def test_arrays_that_move_nothing_have_no_derivatives(name):
    """Those that functions only compare, or do not read: as what a comparison of PyTorch compares."""
    q = torch.randn(2, 4, 8, dtype=torch.float64)
    x = torch.linspace(0, 1, 4, dtype=torch.float64)

    def f(q, x):
        return attention(q, q, q, x=x, **CONSTANT[name]).sin().sum()

    alone = {of: getattr(torch.func, of)(lambda q: f(q, x))(q) for of in ("grad", "hessian")}
    for of, right in alone.items():
        found = getattr(torch.func, of)(f, (0, 1))(q, x)
        of_q, of_x = (found[0][0], found[1][1]) if of == "hessian" else found
        torch.testing.assert_close(of_q, right)
        assert not of_x.any()
    tangents = torch.func.jvp(f, (q, x), (q, x))[1], torch.func.jvp(lambda q: f(q, x), (q,), (q,))[1]
    torch.testing.assert_close(*tangents)
    assert not torch.func.jvp(lambda x: f(q, x), (x,), (x,))[1]
    (of_x,) = torch.autograd.grad(f(q, x.requires_grad_()), x, allow_unused=True)
    assert of_x is None or not of_x.any()


def test_derivatives_of_scales_of_fp8_are_refused():
    q, k, scale = X, X.to(torch.float8_e4m3fn), torch.ones((), requires_grad=True)

    def f(scale):
        return attention(q, k, k, k_scale=scale, v_scale=torch.ones(())).sum()

    for derivative in (lambda: f(scale).backward(), lambda: torch.func.jvp(f, (scale.detach(),), (scale.detach(),))):
        with pytest.raises(NotImplementedError, match=r"^k_scale: got a derivative .* give cuflash\.dequantize"):
            derivative()


# ---- vmap ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *(OPTIONS[name] for name in ("mask, bias, sinks, GQA, dropout", "varlen", "score", "window, slopes, layout")),
        {"sinks": True},
        {"score": lambda s, i, j, *, batch: s * (1 + batch)},
        {"dropout": 0.5, "seed": 1, "offset": 2},
    ],
)
def test_vmap_is_a_loop(options):
    leaves, given = problem(options)
    f, xs = function_of(leaves, given)
    many = tuple(torch.randn(3, *x.shape, dtype=x.dtype) for x in xs)
    moved = tuple(x.movedim(0, -1) if n == 0 else x for n, x in enumerate(many))
    found = torch.func.vmap(f, in_dims=(-1, *(0,) * (len(xs) - 1)))(*moved)
    for entry in range(3):
        right = f(*(x[entry] for x in many))
        torch.testing.assert_close(tuple(x[entry] for x in found), right, rtol=1e-13, atol=1e-13)
    every = tuple(range(len(xs)))

    def gradients(q):
        return torch.func.grad(lambda *xs: f(*xs)[0].square().sum(), every)(q, *(x[0] for x in many[1:]))

    of_each = torch.func.vmap(gradients)(many[0])
    torch.testing.assert_close(tuple(x[1] for x in of_each), gradients(many[0][1]))


@settings(max_examples=examples(60))
@given(ct.cases(dtypes=("float64",), **SMALL), st.data())
def test_vmap_of_any_option_and_derivative_is_a_loop(case, data):
    """Of any of the arrays; forward, backward, and forward over reverse."""
    arrays, inputs, leaves, how = of_case(case)
    names = data.draw(st.lists(st.sampled_from(list(leaves)), min_size=1, unique=True))
    fixed = {name: x.detach() for name, x in inputs.items()}
    dims = [data.draw(st.integers(0, fixed[name].ndim)) for name in names]
    many = tuple(
        torch.stack([fixed[name], 2 * fixed[name], -fixed[name]]).movedim(0, d)
        for name, d in zip(names, dims, strict=True)
    )
    every, how = tuple(range(len(names))), how | {"return_lse": False}
    dout = torch.nan_to_num(arrays["dout"])

    def f(*xs):
        return (attention(**(fixed | dict(zip(names, xs, strict=True))), **how) * dout).sum()

    def several(*xs):
        return f(*xs), *torch.func.jvp(torch.func.grad(f, every), xs, tuple(torch.ones_like(x) for x in xs))

    found = torch.func.vmap(several, in_dims=tuple(dims))(*many)
    for entry in range(3):
        right = several(*(x.select(d, entry) for x, d in zip(many, dims, strict=True)))
        for got, expected in zip(flat(found), flat(right), strict=True):
            torch.testing.assert_close(got[entry], expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def flat(xs):
    return [y for x in xs for y in (x if isinstance(x, tuple) else (x,))]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_vmap_of_matrices(layout):
    """Of arrays without an axis of heads, in one pass."""
    q, k, bias = torch.randn(3, 5, 4), torch.randn(6, 4), torch.randn(5, 6)

    def several(q):
        out, back = torch.func.vjp(lambda q: attention(q, k, k, bias=bias, layout=layout, return_lse=True), q)
        return *out, *back(out)

    found = torch.func.vmap(several)(q)
    for entry in range(3):
        torch.testing.assert_close(tuple(x[entry] for x in found), several(q[entry]))


def test_vmap_is_one_pass(monkeypatch):
    """Where the axis can be one of the batch; of a Jacobian, too."""
    calls = []

    def counted(which):
        method = getattr(cuflash.FlashAttention, which)

        def call_it(self, **arrays):
            calls.append(which)
            return method(self, **arrays)

        monkeypatch.setattr(cuflash.FlashAttention, which, call_it)

    counted("forward")
    counted("backward")
    x, bias = torch.randn(2, 4, 4), torch.randn(4, 4)
    found = torch.func.jacrev(lambda x: attention(x, x, x, bias=bias))(x)
    assert calls == ["forward", "backward"]
    assert found.shape == (2, 4, 4, 2, 4, 4)
    torch.func.vmap(lambda q: attention(q, x[0], x[0], bias=bias))(x)
    assert calls == ["forward", "backward", "forward"]


def test_vmap_does_not_draw_other_numbers():
    x = torch.randn(3, 2, 4, 4)
    with pytest.raises(NotImplementedError, match=r"^dropout: got randomness='different'.* batch axis of q"):
        torch.func.vmap(lambda x: attention(x, x, x, dropout=0.5, seed=1), randomness="different")(x)


# ---- compilers -------------------------------------------------------------------------------------------------------


def compiled_and_not(f, xs, backend, **how):
    """Results and gradients of a function, compiled and not."""
    torch.compiler.reset()
    for g in (torch.compile(f, backend=backend, fullgraph=True, **how), f):
        out = g(*xs)
        yield (out, *torch.autograd.grad(out.sin().sum(), xs))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_compiled_function_is_one_graph(name):
    leaves, given = problem(OPTIONS[name])
    if "score" in given:  # a function is traced once, outside
        given["attn"] = cuflash.FlashAttention(score=given.pop("score"))
    xs = tuple(leaves.values())

    def f(*xs):
        return attention(**dict(zip(leaves, xs, strict=True)), **given) * 2

    compiled, right = compiled_and_not(f, xs, "aot_eager")
    torch.testing.assert_close(compiled, right, rtol=1e-12, atol=1e-12)


def test_options_may_follow_from_sizes():
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(q):
        return attention(q, q, q, scale=2 * q.shape[-1] ** -0.5, window=(2, None))

    for length, dim in ((7, 8), (9, 8), (9, 16), (12, 32)):
        q = torch.randn(2, length, dim, dtype=torch.float64)
        right = attention(q, q, q, scale=2 * dim**-0.5, window=(2, None))
        torch.testing.assert_close(compiled(q), right, rtol=1e-14, atol=1e-14)


def test_numbers_in_options_may_change():
    """The compiler makes symbols of them when they do."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, scale, left, rows):
        return attention(
            q,
            q,
            q,
            scale=scale,
            window=(left, 0),
            block_mask=torch.ones((1, 1), dtype=torch.bool),
            block_size=(rows, 16),
        )

    for scale, left, rows in ((1.0, 1, 16), (2.0, 2, 32), (0.5, 3, 64)):
        q = torch.randn(2, 16, 4, dtype=torch.float64)
        right = attention(q, q, q, scale=scale, window=(left, 0))
        torch.testing.assert_close(compiled(q, scale, left, rows), right, rtol=1e-14, atol=1e-14)


TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, x, t: torch.func.grad(f)(x),
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,)),
    "jvp of grad": lambda f, x, t: torch.func.jvp(torch.func.grad(f), (x,), (t,)),
    "grad of a loss of grad": lambda f, x, t: torch.func.grad(lambda x: (torch.func.grad(f)(x) * t).sum())(x),
    "vmap": lambda f, x, t: torch.func.vmap(f)(torch.stack([x, t])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_compiled_with_the_function(name):
    x, t = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    attn = cuflash.FlashAttention(causal=True)

    def f(x):
        return (attention(x, x, x.sin(), attn=attn) ** 3).sum()

    torch.compiler.reset()
    compiled = torch.compile(lambda x, t: TRANSFORMS[name](f, x, t), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, t), TRANSFORMS[name](f, x, t))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_traced_function_takes_other_tensors(recorded):
    """`torch.jit.trace` keeps results of what it does not see as constants."""
    traced = torch.jit.trace(lambda x: attention(x, X, X), X.clone().requires_grad_(recorded), check_trace=False)
    x, other = (y.requires_grad_(recorded) for y in (X + 1, X + 1))
    found, right = traced(x), attention(other, X, X)
    torch.testing.assert_close(found, right)
    if recorded:
        torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), z)[0] for y, z in ((found, x), (right, other))))


def test_an_exported_program_has_the_operator(tmp_path):
    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]  # PyTorch's types are left out
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True) * 2

    xs = tuple(torch.randn(3, 2, 7, 8))
    torch.export.save(torch.export.export(Model(), xs), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    assert "cuflash.forward.default" in [str(node.target) for node in program.graph.nodes]
    assert torch.equal(program.module()(*xs), Model()(*xs))


def test_a_compiled_function_takes_other_lengths_and_seeds():
    attn = cuflash.FlashAttention(dropout=0.5, causal=True)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def f(q, k, v, seed):
        return attention(q, k, v, attn=attn, seed=seed, offset=1)

    for length, seed in ((5, 1), (9, 2), (12, 2**63 - 1)):
        q, k, v = torch.randn(3, 2, length, 8)
        right = attention(q, k, v, attn=attn, seed=seed, offset=1)
        torch.testing.assert_close(f(q, k, v, seed), right, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_compiles_the_operators(dtype):
    xs = tuple(x.to(dtype).requires_grad_() for x in torch.randn(3, 2, 7, 8))
    compiled, right = compiled_and_not(lambda q, k, v: attention(q, k, v, causal=True), xs, "inductor")
    torch.testing.assert_close(compiled, right)


@pytest.mark.parametrize("which", ["forward", "backward", "jvp", "backward_jvp"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_operators_keep_their_promises(which, layout):
    """`torch.library.opcheck`: what they say about shapes, aliases and derivatives is so."""
    attn = cuflash.FlashAttention(layout=layout)
    q, k, v, tk = (torch.randn(2, 3, 3, 4) for _ in range(4))
    given = {"q": q, "k": k[0], "v": v}
    out, lse = attn.forward(**given)
    results = attn.jvp(**given, tk=tk[0])._asdict()
    arrays = {
        "forward": given,
        "backward": given | {"dout": q, "out": out, "lse": lse},
        "jvp": given | {"tk": tk[0]},
        "backward_jvp": given | {"tk": tk[0], "dout": q} | results,
    }[which]
    need = {"backward": ("dq", "dk"), "backward_jvp": ("tdq", "tdv")}.get(which, ())
    operator = getattr(torch.ops.cuflash, which).default
    arguments = list(arrays.values()), call(attn, tuple(arrays), need).token, None, None
    found = torch.library.opcheck(operator, arguments)
    assert set(found.values()) == {"SUCCESS"}


SHAPES = [((5, 4), (6, 4)), ((1, 5, 4), (6, 4)), ((5, 4), (1, 6, 4)), ((7, 1, 2, 5, 4), (3, 2, 6, 4))]


@pytest.mark.parametrize(("q", "k"), SHAPES)
def test_a_compiler_knows_the_shapes(q, k):
    q, k = torch.randn(q), torch.randn(k)
    out, lse = torch.compile(lambda q, k: attention(q, k, k, return_lse=True), backend="aot_eager")(q, k)
    right = attention(q, k, k, return_lse=True)
    torch.testing.assert_close((out, lse), right)


OF_ANOTHER_PROCESS = """
import sys
from cuflash.frameworks import call_of
print(call_of(sys.argv[1]).attn)
call_of(sys.argv[2])
"""


def test_a_graph_of_another_process_has_its_options():
    attn = cuflash.FlashAttention(causal="top_left", window=(3, None), scale=0.1, block_size=(16, 32))
    scored = cuflash.FlashAttention(score=lambda s, i, j: s + i)
    tokens = [call(x, ("q", "k", "v")).token for x in (attn, scored)]
    command = [sys.executable, "-c", OF_ANOTHER_PROCESS, *tokens]
    other = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert other.stdout.strip() == repr(attn)
    assert "RuntimeError: score: got a graph that another process compiled" in other.stderr


# ---- logsumexp -------------------------------------------------------------------------------------------------------

OF_VALUES = ("v", "v_scale", "dropout", "seed", "offset")


def without_values(leaves, given):
    """As `function_of`, for lse alone."""
    leaves, given = ({name: x for name, x in own.items() if name not in OF_VALUES} for own in (leaves, given))

    def f(*xs):
        return logsumexp(**dict(zip(leaves, xs, strict=True)), **given)

    return f, tuple(leaves.values())


@settings(max_examples=examples(60))
@given(ct.cases(**SMALL | {"features": [x for x in FEATURES if x != "dropout"]}))
def test_lse_and_its_gradients_are_those_of_the_passes_without_values(case):
    """To the bit: of every option."""
    case = replace(case, has_values=False, dlse=True)
    arrays, plain = case.arrays(from_numpy), case.arrays()
    attn: Any = cuflash.FlashAttention(**case.keywords)
    inputs = {name: arrays[name] for name in ("q", "k")} | ct.optional(arrays)
    leaves = {name: inputs[name].requires_grad_() for name in movable(case) if name in inputs}
    lse = logsumexp(**inputs, attn=attn)
    right = attn.forward(plain["q"], plain["k"], None, **ct.optional(plain)).lse
    np.testing.assert_array_equal(to_numpy(lse), right)
    found = torch.autograd.grad(lse, list(leaves.values()), arrays["dlse"])
    need, optional = tuple(f"d{name}" for name in leaves), ct.optional(plain) | {"dlse": plain["dlse"]}
    expected = attn.backward(None, plain["q"], plain["k"], None, None, right, need=need, **optional)
    for name, x in zip(leaves, found, strict=True):
        assert (x.shape, x.dtype) == (leaves[name].shape, leaves[name].dtype)
        gradient = getattr(expected, f"d{name}")
        np.testing.assert_array_equal(to_numpy(x), gradient.astype(to_numpy(x).dtype), err_msg=name)


@pytest.mark.parametrize("name", OPTIONS)
def test_derivatives_of_lse(name):
    f, xs = without_values(*problem(OPTIONS[name]))
    how = {"fast_mode": True}
    assert torch.autograd.gradcheck(f, xs, check_forward_ad=True, **how)
    assert torch.autograd.gradgradcheck(f, xs, check_fwd_over_rev=True, **how)


def test_second_derivatives_of_lse_in_any_order():
    f, xs = without_values(*problem(OPTIONS["causal, softcap"]))
    xs = tuple(x.detach() for x in xs)
    every, direction = tuple(range(len(xs))), tuple(torch.randn_like(x) for x in xs)

    def loss(*xs):
        return f(*xs).sin().sum()

    gradient = torch.func.grad(loss, every)
    right = torch.func.jvp(gradient, xs, direction)[1]
    over_forward = torch.func.grad(lambda *xs: torch.func.jvp(loss, xs, direction)[1], every)(*xs)
    for found in (over_forward, torch.func.vjp(gradient, *xs)[1](direction)):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["causal, softcap", "mask, bias, sinks, GQA, dropout", "window, slopes, layout"])
def test_lse_is_compiled_as_one_graph_and_mapped(name):
    f, xs = without_values(*problem(OPTIONS[name]))
    found = compiled_and_not(lambda *xs: f(*xs) * 2, xs, "aot_eager")
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    many = tuple(torch.stack([x, 2 * x, -x]) for x in xs)
    mapped = torch.func.vmap(lambda *xs: (f(*xs), *torch.func.grad(lambda *xs: f(*xs).sum(), (0, 1))(*xs)))(*many)
    for entry in range(3):
        own = tuple(x[entry].detach().requires_grad_() for x in many)
        right = (lse := f(*own), *torch.autograd.grad(lse.sum(), own[:2]))
        torch.testing.assert_close(tuple(x[entry] for x in mapped), right, rtol=1e-12, atol=1e-12)


def test_lse_of_fp8_of_pages_and_in_autocast():
    k8, scale = X.to(torch.float8_e4m3fn), torch.tensor(0.5)
    right = logsumexp(X, 0.5 * k8.float())
    torch.testing.assert_close(logsumexp(X.bfloat16(), k8, k_scale=scale), right, atol=0.05, rtol=0)
    pages = torch.randn(3, 2, 16, 8)
    paged = {"block_table": torch.tensor([[2, 0]]), "kv_lengths": torch.tensor([20])}
    keys = pages[[2, 0]].transpose(0, 1).reshape(1, 2, 32, 8)
    expected = logsumexp(X[None], keys, kv_lengths=paged["kv_lengths"])
    torch.testing.assert_close(logsumexp(X[None], pages, **paged), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logsumexp(X, X), logsumexp(X.bfloat16(), X.bfloat16()))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"k": X.numpy()}, r"k: got ndarray, expected a torch\.Tensor"),
        ({"v": X}, r"logsumexp\(\) got an unexpected keyword argument 'v'"),
        ({"v_scale": X}, r"logsumexp\(\) got an unexpected keyword argument 'v_scale'"),
        ({"dropout": 0.5}, r"logsumexp\(\) got an unexpected keyword argument 'dropout'"),
        ({"gamma": X}, r"logsumexp\(\) got an unexpected keyword argument 'gamma'"),
        ({"is_causal": True}, r"logsumexp\(\) got an unexpected keyword argument 'is_causal'"),
        ({"attn": cuflash.FlashAttention(dropout=0.5)}, "attn: got dropout=0.5, expected one without dropout, which"),
    ],
)
def test_wrong_arguments_of_logsumexp_are_named(keywords, words):
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        logsumexp(**{"q": X, "k": X} | keywords)


# ---- autocast, arguments ---------------------------------------------------------------------------------------------


def test_autocast_casts_as_pytorch_does():
    q, k, v, bias = torch.randn(2, 5, 8), torch.randn(2, 5, 8).half(), torch.randn(2, 5, 8), torch.randn(2, 5, 5)
    sinks = torch.randn(2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q.requires_grad_(), k, v, bias=bias, sinks=sinks)
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert out.dtype == right.dtype == torch.bfloat16
    expected = attention(*(x.bfloat16() for x in (q, k, v)), bias=bias, sinks=sinks)
    assert torch.equal(out, expected)
    out.float().sum().backward()
    assert q.grad.dtype == sinks.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q.double(), k.double(), v.double()).dtype == torch.float64


def test_no_copy_is_made_of_arguments(monkeypatch):
    seen = {}

    def forward(self, *, seed, offset, **arrays):
        seen.update(arrays)
        return np.zeros(1), np.zeros(1)

    monkeypatch.setattr(cuflash.FlashAttention, "forward", forward)
    q, k, v = (torch.randn(2, 4, 8).mT.to(torch.bfloat16) for _ in range(3))
    attention(q, k, v)
    for name, x in {"q": q, "k": k, "v": v}.items():
        assert seen[name].ctypes.data == x.data_ptr() and seen[name].dtype.name == "bfloat16"


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"k": X.numpy()}, TypeError, r"k: got ndarray, expected a torch\.Tensor"),
        ({"q": X.to("meta")}, TypeError, "q: got a tensor on meta, expected one in host or CUDA memory"),
        ({"k": X.to_sparse()}, TypeError, r"k: got a tensor of layout torch\.sparse_coo, expected .*torch\.strided"),
        ({"v": torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)}, TypeError, "v: got a nested tensor"),
        ({"scale": torch.tensor(0.5)}, TypeError, "scale: got an array, expected a Python value"),
        ({"k": X.to("meta")}, TypeError, "k: got a tensor on meta, expected one on cpu as q is"),
        ({"mask": np.ones((4, 4), bool)}, TypeError, "mask: got ndarray, expected an array of the library of q"),
        ({"is_causal": True}, TypeError, r"attention\(\) got an unexpected keyword argument 'is_causal'"),
        ({"gamma": X}, TypeError, r"attention\(\) got an unexpected keyword argument 'gamma'"),
        ({"out": X}, TypeError, r"attention\(\) got an unexpected keyword argument 'out'"),
        ({"attn": cuflash.FlashAttention(), "causal": True}, TypeError, "causal: got it together with attn"),
        ({"causal": "yes"}, ValueError, "causal: got 'yes'"),
        ({"k": X.double()}, TypeError, "k: got dtype float64"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks: got shape"),
    ],
)
def test_wrong_arguments_are_named(keywords, error, words):
    with pytest.raises(error, match=f"^{words}"):
        attention(**{"q": X, "k": X, "v": X} | keywords)


def test_lazy_tensors_are_made_plain():
    negative = torch.complex(X, X).conj().imag
    assert negative.is_neg()
    assert torch.equal(attention(X, negative, X), attention(X, -X, X))


def test_fp8_and_pages():
    k8 = X.to(torch.float8_e4m3fn)
    scale = torch.ones(())
    out = attention(X.bfloat16(), k8, k8, k_scale=scale, v_scale=scale)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attention(X, k8.float(), k8.float()), atol=0.1, rtol=0.1)
    pages = torch.randn(3, 2, 16, 8)
    table, lengths = torch.tensor([[2, 0]]), torch.tensor([20])
    keys = pages[[2, 0]].transpose(0, 1).reshape(1, 2, 32, 8)
    paged = {"block_table": table, "kv_lengths": lengths}
    compiled = torch.compile(lambda q: attention(q, pages, pages, **paged), backend="aot_eager", fullgraph=True)
    right = attention(X[None], keys, keys, kv_lengths=lengths)
    torch.testing.assert_close(attention(X[None], pages, pages, **paged), right)
    torch.testing.assert_close(compiled(X[None]), right)
    with pytest.raises(NotImplementedError, match=r"^block_table: .* gather the pages"):
        attention(X[None].clone().requires_grad_(), pages, pages, **paged).sum().backward()


def test_the_documentation_is_right():
    """Its parameters are those that there are, and its example runs."""
    for function in (attention, logsumexp):
        assert documented_parameters(function) == parameters(function)
    assert doctest.testmod(sys.modules[attention.__module__]).failed == 0
