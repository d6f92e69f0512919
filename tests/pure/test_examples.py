"""Attention as arithmetic: uses that have nothing to do with language models, and biases that are learnt."""

from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct


def on(name):
    """NumPy or CuPy."""
    return pytest.importorskip(name)


LIBRARIES = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]

# ---- A differentiable simulation ------------------------------------------------------------------------------------
#
# ---- A differentiable simulation -----------------------------------------------------------------------------------
# attention with a bias: exp(-|x - y|^2 / 2) = exp(x y - |y|^2 / 2) times a factor of x that the softmax divides out.

STEP, STEPS = 0.25, 6


def advance(attn, x):
    """Positions after one step, and what its gradient needs."""
    bias = -(x * x).sum(axis=1) / 2
    out, lse = attn.forward(x, x, x, bias=bias)
    return x + STEP * (out - x), (x, out, lse, bias)


def pull_back(attn, gradient, saved):
    """The gradient with respect to the positions before a step, given that with respect to those after it.

    The bias is held fixed: the weights depend on the particles as queries and on their places as keys.
    """
    x, out, lse, bias = saved
    dq, dk, dv = attn.backward(STEP * gradient, x, x, x, out, lse, bias=bias)
    return (1 - STEP) * gradient + dq + dk + dv


def final_energy(attn, x):
    """A number that depends on the last positions, and its gradient with respect to the first."""
    history = []
    for _ in range(STEPS):
        x, saved = advance(attn, x)
        history.append(saved)
    energy, gradient = (x**3).sum(), 3 * x**2
    for saved in reversed(history):
        gradient = pull_back(attn, gradient, saved)
    return float(energy), gradient


@pytest.mark.parametrize("library", LIBRARIES)
def test_gradient_of_a_simulation_in_float64(library):
    """Against differences along a direction, and the device against the CPU."""
    x = np.random.default_rng(0).standard_normal((70, 3))
    attn = cuflash.FlashAttention(scale=1.0, deterministic=True)
    biases: list[Any] = []

    def energy(positions):  # with the biases of the unperturbed run, which are held fixed
        for bias in biases:
            positions = positions + STEP * (attn.forward(positions, positions, positions, bias=bias).out - positions)
        return float((positions**3).sum())

    positions = x
    for _ in range(STEPS):
        positions, saved = advance(attn, positions)
        biases.append(saved[-1])
    value, gradient = final_energy(attn, on(library).asarray(x))
    gradient = ct.to_numpy(gradient)
    np.testing.assert_allclose(value, energy(x), rtol=1e-13)
    np.testing.assert_allclose(gradient, final_energy(attn, x)[1], rtol=1e-12, atol=1e-13)
    direction = np.random.default_rng(1).standard_normal(x.shape)
    h = 1e-5
    slope = (energy(x + h * direction) - energy(x - h * direction)) / (2 * h)
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-8)


# ---- Kernel regression -----------------------------------------------------------------------------------------------


def nadaraya_watson(points, samples, values, width):
    """The mean of the values, weighted by a Gaussian of the distances to the samples: one line of attention."""
    bias = -(samples * samples).sum(axis=1) / (2 * width**2)
    return cuflash.attention(points, samples, values[:, None], scale=width**-2, bias=bias)[:, 0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_kernel_regression_in_float32(library):
    """As accurate as float32 lets the formula be, against float64."""
    xp, rng = on(library), np.random.default_rng(0)
    samples = rng.uniform(-1, 1, (3000, 2))
    values = np.sin(3 * samples[:, 0]) * np.cos(2 * samples[:, 1])
    points = rng.uniform(-1, 1, (200, 2))
    width = 0.05
    distances = ((points[:, None] - samples) ** 2).sum(axis=2)
    weights = np.exp(-distances / (2 * width**2))
    exact = weights @ values / weights.sum(axis=1)

    def found(dtype):
        x, y, z = (xp.asarray(array, dtype) for array in (points, samples, values))
        return ct.to_numpy(nadaraya_watson(x, y, z, width))

    np.testing.assert_allclose(found(np.float64), exact, atol=1e-12)
    error = np.abs(found(np.float32) - exact).max()
    assert error < 1e-4  # scores of hundreds, off by their last bits: 2^-24 * 400, times what a score changes
    rms = np.sqrt(np.mean((exact - np.sin(3 * points[:, 0]) * np.cos(2 * points[:, 1])) ** 2))
    assert error < rms / 100  # next to nothing beside what the regression itself is off by


# ---- Biases that are learnt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
def test_pair_bias_of_a_structure_model(library):
    """Rows of an alignment attend within themselves; all share a bias made of pairs of residues, a projection of z.

    q, k and v are (rows, heads, residues, dim), pairs (residues, residues, channels), and the bias that is made of them
    has an axis of size 1 for the rows.
    """
    rng, xp = np.random.default_rng(0), on(library)
    rows, heads, residues, dim, channels = 6, 4, 37, 8, 5
    q, k, v, dout = rng.standard_normal((4, rows, heads, residues, dim))
    pairs, weight = rng.standard_normal((residues, residues, channels)), rng.standard_normal((channels, heads))
    attn = cuflash.FlashAttention()

    def bias_of(weight):
        return np.ascontiguousarray((pairs @ weight).transpose(2, 0, 1))[None]

    def loss(weight):
        return float((attn.forward(q, k, v, bias=bias_of(weight)).out * dout).sum())

    inputs, bias = (xp.asarray(q), xp.asarray(k), xp.asarray(v)), xp.asarray(bias_of(weight))
    out, lse = attn.forward(*inputs, bias=bias)
    (dbias,) = attn.backward(xp.asarray(dout), *inputs, out, lse, bias=bias, need=("dbias",))
    assert dbias.shape == (1, heads, residues, residues)
    dweight = np.einsum("ijc,hij->ch", pairs, ct.to_numpy(dbias)[0])
    direction, h = rng.standard_normal(weight.shape), 1e-5
    slope = (loss(weight + h * direction) - loss(weight - h * direction)) / (2 * h)
    np.testing.assert_allclose((dweight * direction).sum(), slope, rtol=1e-7)


@pytest.mark.parametrize("library", LIBRARIES)
def test_table_of_relative_positions(library):
    """Each head has a number for each distance, up to the largest that it tells apart; dbias is gathered back to it.

    Beside it the temperature of the softmax is learnt, and the soft cap of the scores.
    """
    rng, xp = np.random.default_rng(1), on(library)
    heads, seqlen, dim, largest = 3, 50, 16, 8
    q, k, v, dout = rng.standard_normal((4, 2, heads, seqlen, dim))
    table = rng.standard_normal((heads, 2 * largest + 1))
    index = np.clip(np.arange(seqlen) - np.arange(seqlen)[:, None], -largest, largest) + largest

    def loss(table, scale, softcap):
        attn = cuflash.FlashAttention(causal=True, scale=scale, softcap=softcap)
        return float((attn.forward(q, k, v, bias=table[:, index]).out * dout).sum())

    attn = cuflash.FlashAttention(causal=True, scale=0.3, softcap=2.0)
    inputs, bias = (xp.asarray(q), xp.asarray(k), xp.asarray(v)), xp.asarray(table[:, index])
    out, lse = attn.forward(*inputs, bias=bias)
    need = ("dbias", "dscale", "dsoftcap")
    dbias, dscale, dsoftcap = attn.backward(xp.asarray(dout), *inputs, out, lse, bias=bias, need=need)
    dtable = np.zeros_like(table)
    for row, of_head in zip(dtable, ct.to_numpy(dbias), strict=True):
        np.add.at(row, index, of_head)
    assert not dtable[:, largest + 1 :].any()  # of keys that come later, which no query sees
    direction, h = rng.standard_normal(table.shape), 1e-5
    by_table = loss(table + h * direction, 0.3, 2.0) - loss(table - h * direction, 0.3, 2.0)
    by_scale, by_softcap = loss(table, 0.3 + h, 2.0) - loss(table, 0.3 - h, 2.0), loss(table, 0.3, 2 + h)
    by_softcap -= loss(table, 0.3, 2 - h)
    found = [(dtable * direction).sum(), float(dscale), float(dsoftcap)]
    np.testing.assert_allclose(found, np.array([by_table, by_scale, by_softcap]) / (2 * h), rtol=1e-6)
