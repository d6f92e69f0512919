"""`cuflash.jax` on arrays in CUDA memory: the passes, with values and within jit, and derivatives."""

from typing import Any

import numpy as np
import pytest

import cuflash

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
jax = pytest.importorskip("jax", reason="JAX is not installed")

from cuflash.jax import attention, logsumexp  # noqa: E402

jnp = jax.numpy
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def device_of_jax():
    """JAX's first use of its devices leaves the last one current: the device of the other tests is set again."""
    current = cupy.cuda.Device()
    backend = jax.default_backend()
    current.use()
    if backend != "gpu":
        pytest.skip("JAX sees no CUDA device")


@pytest.fixture(autouse=True)
def float64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def normal(*shape, dtype="float64", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("compiled", [False, True], ids=["with values", "jit"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_and_gradients_are_those_of_the_passes(dtype, compiled):
    q, dout = (normal(2, 4, 130, 64, dtype=dtype, seed=n) for n in (0, 5))
    k, v = (normal(2, 2, 150, 64, dtype=dtype, seed=n) for n in (1, 2))
    sinks = normal(4, dtype="float64" if dtype == "float64" else "float32", seed=3)
    mask = normal(130, 150, seed=4) > -1
    how: dict[str, Any] = {"seed": 1, "offset": 2}
    attn = cuflash.FlashAttention(causal=True, dropout=0.25, deterministic=True)

    def both(q, k, v, sinks, dout):
        out, back = jax.vjp(lambda q, k, v, s: attention(q, k, v, sinks=s, mask=mask, attn=attn, **how), q, k, v, sinks)
        return out, back(dout)

    out, found = (jax.jit(both) if compiled else both)(q, k, v, sinks, dout)
    right = attn.forward(q, k, v, sinks=sinks, mask=mask, **how)
    need = ("dq", "dk", "dv", "dsinks")
    gradients = attn.backward(dout, q, k, v, *right, sinks=sinks, mask=mask, need=need, **how)
    for got, expected in zip((out, *found), (right.out, *gradients), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("compiled", [False, True], ids=["with values", "jit"])
def test_second_derivatives(compiled):
    xs = normal(4, 5, 4), normal(2, 6, 4, seed=1), normal(2, 6, 4, seed=2)
    t = tuple(normal(*x.shape, seed=9) for x in xs)

    def f(*xs):
        return (attention(*xs, causal=True, softcap=2.0, deterministic=True) ** 3).sum()

    def several(*xs):
        gradient = jax.grad(f, (0, 1, 2))
        over_reverse = jax.jvp(gradient, xs, t)[1]
        reverse_twice = jax.vjp(gradient, *xs)[1](t)
        return over_reverse, reverse_twice, jax.grad(lambda *xs: jax.jvp(f, xs, t)[1], (0, 1, 2))(*xs)

    found = (jax.jit(several) if compiled else several)(*xs)
    step = 1e-5
    after, before = (jax.grad(f, (0, 1, 2))(*(x + h * u for x, u in zip(xs, t, strict=True))) for h in (step, -step))
    for product in found:
        for got, a, b in zip(product, after, before, strict=True):
            np.testing.assert_allclose(got, (a - b) / (2 * step), rtol=1e-6, atol=1e-6)


def test_a_loop_within_jit_waits_for_itself():
    """Each pass reads what the one before wrote, among kernels of XLA, on one stream."""
    q = normal(2, 4, 512, 64, dtype="float32")

    @jax.jit
    def loop(q):
        return jax.lax.fori_loop(0, 20, lambda _, x: attention(x * 1.01, q, q) + 0.01 * x, q)

    right = q
    for _ in range(20):
        right = attention(right * 1.01, q, q) + 0.01 * right
    np.testing.assert_allclose(loop(q), right, rtol=1e-4, atol=1e-5)


def test_a_seed_may_change_within_jit():
    q = normal(2, 4, 65, 64, dtype="float32")
    f = jax.jit(lambda q, seed: attention(q, q, q, dropout=0.5, seed=seed, offset=0))
    for seed in (1, 2):
        right = attention(q, q, q, dropout=0.5, seed=seed, offset=0)
        np.testing.assert_array_equal(f(q, jnp.uint32(seed)), right)


def test_vmap_is_a_loop():
    q, k = normal(3, 4, 17, 8), normal(4, 19, 8)
    right = jnp.stack([attention(x, k, k) for x in q])
    np.testing.assert_array_equal(jax.vmap(lambda q: attention(q, k, k))(q), right)


@pytest.mark.parametrize("compiled", [False, True], ids=["with values", "jit"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_lse_and_its_gradients_are_those_of_the_passes_without_values(dtype, compiled):
    q, k = normal(2, 4, 130, 64, dtype=dtype), normal(2, 2, 150, 64, dtype=dtype, seed=1)
    dlse = normal(2, 4, 130, dtype="float64" if dtype == "float64" else "float32", seed=2)
    attn = cuflash.FlashAttention(causal=True, deterministic=True)

    def both(q, k, dlse):
        lse, back = jax.vjp(lambda q, k: logsumexp(q, k, attn=attn), q, k)
        return lse, *back(dlse)

    found = (jax.jit(both) if compiled else both)(q, k, dlse)
    right = attn.forward(q, k, None).lse
    expected = attn.backward(None, q, k, None, None, right, dlse=dlse, need=("dq", "dk"))
    for got, x in zip(found, (right, expected.dq, expected.dk), strict=True):
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("compiled", [False, True], ids=["with values", "jit"])
def test_second_derivatives_of_lse(compiled):
    """Forward mode over reverse mode, against the formula."""
    q, k, t = normal(4, 5, 3), normal(4, 6, 3, seed=1), normal(4, 5, 3, seed=2)

    def product(f):
        of = lambda q: jax.jvp(jax.grad(lambda q: jnp.sin(f(q)).sum()), (q,), (t,))[1]  # noqa: E731
        return (jax.jit(of) if compiled else of)(q)

    found = product(lambda q: logsumexp(q, k, scale=1.0))
    right = product(lambda q: jax.nn.logsumexp(q @ k.mT, axis=-1))
    np.testing.assert_allclose(found, right, rtol=1e-10, atol=1e-12)
