"""Attention as arithmetic: two uses of float64 and float32 that have nothing to do with language models."""

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
    biases = []

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
    single = [xp.asarray(x.astype(np.float32)) for x in (points, samples, values)]
    double = [xp.asarray(x) for x in (points, samples, values)]
    np.testing.assert_allclose(ct.to_numpy(nadaraya_watson(*double, width)), exact, atol=1e-12)
    error = np.abs(ct.to_numpy(nadaraya_watson(*single, width)) - exact).max()
    assert error < 1e-4  # scores of hundreds, off by their last bits: 2^-24 * 400, times what a score changes
    rms = np.sqrt(np.mean((exact - np.sin(3 * points[:, 0]) * np.cos(2 * points[:, 1])) ** 2))
    assert error < rms / 100  # next to nothing beside what the regression itself is off by
