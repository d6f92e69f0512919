"""Attention as arithmetic: what the pages in docs/examples compute, held to formulas and to differences."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from bench.examples import PICTURES, run_page
from tests.sampling import examples

LIBRARIES = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]
page = functools.cache(run_page)


def on(library):
    """A function that makes arrays of NumPy or CuPy."""
    return pytest.importorskip(library).asarray


@pytest.mark.gpu
@pytest.mark.parametrize("name", PICTURES)
def test_the_pages_run_on_a_device(name):
    page(name, "cupy")


# ---- A differentiable simulation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
def test_gradient_of_a_simulation_in_float64(library):
    """Against differences along a direction, and the device against the CPU."""
    x, target, direction = np.random.default_rng(0).standard_normal((3, 70, 2))
    here, host = page("particles", library), page("particles")
    value, gradient = here["loss_and_gradient"](on(library)(x), on(library)(target))
    value_host, gradient_host = host["loss_and_gradient"](x, target)
    gradient = ct.to_numpy(gradient)
    np.testing.assert_allclose(value, value_host, rtol=1e-13)
    np.testing.assert_allclose(gradient, gradient_host, rtol=1e-12, atol=1e-12)

    def loss(x):
        return float(((host["simulate"](x)[0][-1] - target) ** 2).sum())

    h = 1e-5
    slope = (loss(x + h * direction) - loss(x - h * direction)) / (2 * h)
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-8)


# ---- Kernel regression -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
def test_kernel_regression_in_float32(library):
    """As accurate as float32 lets the formula be, against float64."""
    rng = np.random.default_rng(0)
    samples = rng.uniform(-1, 1, (3000, 2))
    values = np.sin(3 * samples[:, 0]) * np.cos(2 * samples[:, 1])
    points = rng.uniform(-1, 1, (200, 2))
    width = 0.05
    distances = ((points[:, None] - samples) ** 2).sum(axis=2)
    weights = np.exp(-distances / (2 * width**2))
    exact = weights @ values / weights.sum(axis=1)

    def found(dtype):
        arrays = (on(library)(np.asarray(array, dtype)) for array in (points, samples, values))
        mean, error = page("kernel_regression", library)["regression"](*arrays, width)
        return ct.to_numpy(mean), ct.to_numpy(error)

    np.testing.assert_allclose(found(np.float64)[0], exact, atol=1e-12)
    variance = weights @ values**2 / weights.sum(axis=1) - exact**2
    standard_error = np.sqrt(variance * (weights**2).sum(axis=1)) / weights.sum(axis=1)
    np.testing.assert_allclose(found(np.float64)[1], standard_error, rtol=1e-9)
    error = np.abs(found(np.float32)[0] - exact).max()
    assert error < 1e-4  # scores of hundreds, off by their last bits: 2^-24 * 400, times what a score changes
    rms = np.sqrt(np.mean((exact - np.sin(3 * points[:, 0]) * np.cos(2 * points[:, 1])) ** 2))
    assert error < rms / 100  # next to nothing compared with what the regression itself is off by


# ---- Biases that are learnt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
def test_pair_bias_of_a_structure_model(library):
    """q, k and v are (rows, heads, residues, dim), and the bias has an axis of size 1 for the rows."""
    rng, here, host = np.random.default_rng(0), page("pair_bias", library), page("pair_bias")
    rows, heads, residues, dim, channels = 6, 4, 37, 8, 5
    *qkv, dout = rng.standard_normal((4, rows, heads, residues, dim))
    features, weight = rng.standard_normal((residues, residues, channels)), rng.standard_normal((channels, heads))

    def loss(weight):
        return float((host["attn"].forward(*qkv, bias=host["bias_of"](features, weight)).out * dout).sum())

    arrays = [on(library)(x) for x in qkv]
    pairs, bias = on(library)(features), here["bias_of"](on(library)(features), on(library)(weight))
    assert bias.shape == (1, heads, residues, residues)
    out, lse = here["attn"].forward(*arrays, bias=bias)
    dweight = ct.to_numpy(here["dweight_of"](on(library)(dout), *arrays, out, lse, pairs, bias))
    direction, h = rng.standard_normal(weight.shape), 1e-5
    slope = (loss(weight + h * direction) - loss(weight - h * direction)) / (2 * h)
    np.testing.assert_allclose((dweight * direction).sum(), slope, rtol=1e-7)


@pytest.mark.parametrize("library", LIBRARIES)
def test_field_with_a_distance_score(library):
    """Against the formula, and the gradient of both lengths against differences."""
    rng, here = np.random.default_rng(0), page("field", library)
    locations, points = on(library)(rng.uniform(0, 1, (50, 3))), on(library)(rng.uniform(0, 1, (40, 3)))
    values, dfield, sizes = rng.standard_normal(50), rng.standard_normal(40), np.array([0.2, 0.4])
    mask = rng.random((40, 50)) < 0.7
    distances = here["distances"](points, locations)
    difference = ct.to_numpy(points)[:, None] - ct.to_numpy(locations)
    in_space, in_time = np.linalg.norm(difference[..., :2], axis=2), np.abs(difference[..., 2])

    def formula(sizes):
        weights = np.exp(-in_space / sizes[0] - in_time / sizes[1]) * mask
        return weights @ values / weights.sum(axis=1)

    field, saved = here["interpolate"](distances, on(library)(values), on(library)(sizes), on(library)(mask))
    np.testing.assert_allclose(ct.to_numpy(field), formula(sizes), rtol=1e-10, atol=1e-12)
    found = ct.to_numpy(here["dsizes_of"](on(library)(dfield), saved, distances, on(library)(sizes)))
    steps = 1e-6 * np.eye(2)
    slopes = [dfield @ (formula(sizes + step) - formula(sizes - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(found, slopes, rtol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_table_of_relative_positions(library):
    """Each head has a number for each distance, up to the largest that it distinguishes; dbias is gathered back to it.

    Beside it the temperature of the softmax is learnt, and the soft cap of the scores.
    """
    rng, asarray = np.random.default_rng(1), on(library)
    heads, seqlen, dim, largest = 3, 50, 16, 8
    q, k, v, dout = rng.standard_normal((4, 2, heads, seqlen, dim))
    table = rng.standard_normal((heads, 2 * largest + 1))
    index = np.clip(np.arange(seqlen) - np.arange(seqlen)[:, None], -largest, largest) + largest

    def loss(table, scale, softcap):
        attn = cuflash.FlashAttention(causal=True, scale=scale, softcap=softcap)
        return float((attn.forward(q, k, v, bias=table[:, index]).out * dout).sum())

    attn = cuflash.FlashAttention(causal=True, scale=0.3, softcap=2.0)
    inputs, bias = (asarray(q), asarray(k), asarray(v)), asarray(table[:, index])
    out, lse = attn.forward(*inputs, bias=bias)
    need = ("dbias", "dscale", "dsoftcap")
    dbias, dscale, dsoftcap = attn.backward(asarray(dout), *inputs, out, lse, bias=bias, need=need)
    dtable = np.zeros_like(table)
    for row, of_head in zip(dtable, ct.to_numpy(dbias), strict=True):
        np.add.at(row, index, of_head)
    assert not dtable[:, largest + 1 :].any()  # of keys that come later, which no query attends to
    direction, h = rng.standard_normal(table.shape), 1e-5
    by_table = loss(table + h * direction, 0.3, 2.0) - loss(table - h * direction, 0.3, 2.0)
    by_scale, by_softcap = loss(table, 0.3 + h, 2.0) - loss(table, 0.3 - h, 2.0), loss(table, 0.3, 2 + h)
    by_softcap -= loss(table, 0.3, 2 - h)
    found = [(dtable * direction).sum(), float(dscale), float(dsoftcap)]
    np.testing.assert_allclose(found, np.array([by_table, by_scale, by_softcap]) / (2 * h), rtol=1e-6)


# ---- logsumexp -------------------------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 70), st.integers(2, 70), st.integers(1, 9), st.integers(0, 99))


def softmax(scores):
    """Of the rows, and the logarithm of their sums of exponentials."""
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - largest)
    sums = weights.sum(axis=1, keepdims=True)
    return weights / sums, (np.log(sums) + largest)[:, 0]


@pytest.mark.parametrize("library", LIBRARIES)
@settings(max_examples=examples(30), deadline=None)
@given(SIZES, st.sampled_from([0.01, 0.1, 1.0]))
def test_sinkhorn(library, sizes, eps):
    """Each step, and the gradient with respect to the points, are those of the matrix of all pairs."""
    here, (rows, columns, dim, seed) = page("sinkhorn", library), sizes
    rng, asarray = np.random.default_rng(seed), on(library)
    x, y, potential = rng.random((rows, dim)), rng.random((columns, dim)), rng.random(columns)
    costs = ((x[:, None] - y) ** 2).sum(axis=2) / 2
    plan, lse = softmax((potential - costs) / eps - np.log(columns))
    given = asarray(x), asarray(y), asarray(potential), eps
    np.testing.assert_allclose(ct.to_numpy(here["softmin"](*given)), -eps * lse, atol=1e-12)
    np.testing.assert_allclose(ct.to_numpy(here["gradient"](*given)), (x - plan @ y) / rows, atol=1e-11)


@pytest.mark.parametrize("library", LIBRARIES)
@settings(max_examples=examples(30), deadline=None)
@given(SIZES)
def test_density_and_its_bandwidths(library, sizes):
    """Density and leave-one-out likelihood are the formula's, and so is the gradient."""
    here, (rows, columns, dim, seed) = page("density", library), sizes
    rng, asarray = np.random.default_rng(seed), on(library)
    points, samples = rng.standard_normal((rows, dim)), rng.standard_normal((columns, dim))
    log_bandwidths = rng.uniform(-1, 1, dim)
    constant = log_bandwidths.sum() + dim / 2 * np.log(2 * np.pi)

    def squares(points):
        return ((points[:, None] - samples) / np.exp(log_bandwidths)) ** 2

    _, lse = softmax(-squares(points).sum(axis=2) / 2)
    found = here["log_density"](asarray(points), asarray(samples), asarray(np.exp(log_bandwidths)))
    np.testing.assert_allclose(ct.to_numpy(found), lse - np.log(columns) - constant, rtol=1e-11, atol=1e-11)
    each = squares(samples)
    weights, lse = softmax(np.where(np.eye(columns), -np.inf, -each.sum(axis=2) / 2))
    value, slope = here["likelihood_and_gradient"](asarray(samples), asarray(log_bandwidths))
    np.testing.assert_allclose(value, (lse - np.log(columns - 1)).mean() - constant, rtol=1e-11, atol=1e-11)
    right = (weights[:, :, None] * each).sum(axis=1).mean(axis=0) - 1
    np.testing.assert_allclose(ct.to_numpy(slope), right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("library", LIBRARIES)
@settings(max_examples=examples(30), deadline=None)
@given(SIZES)
def test_contrastive_loss(library, sizes):
    """Loss and gradients of all similarities."""
    here, (_, count, dim, seed) = page("contrastive", library), sizes
    rng, asarray = np.random.default_rng(seed), on(library)
    (u, v), scale = rng.standard_normal((2, count, dim)), rng.uniform(0.1, 2)
    (rows, of_rows), (columns, of_columns) = softmax(scale * u @ v.T), softmax(scale * v @ u.T)
    loss, *gradients = here["loss_and_gradients"](asarray(u), asarray(v), scale)
    np.testing.assert_allclose(loss, ((of_rows + of_columns) / 2 - scale * (u * v).sum(axis=1)).mean(), atol=1e-11)
    d = ((rows + columns.T) / 2 - np.eye(count)) / count
    *of_embeddings, dscale = gradients
    np.testing.assert_allclose(dscale, (d * (u @ v.T)).sum(), atol=1e-11)
    for found, right in zip(of_embeddings, (scale * d @ v, scale * d.T @ u), strict=True):
        np.testing.assert_allclose(ct.to_numpy(found), right, atol=1e-11)


@pytest.mark.parametrize("library", LIBRARIES)
@settings(max_examples=examples(30), deadline=None)
@given(SIZES, st.sampled_from([0.0, 0.3]))
def test_cross_entropy(library, sizes, z_loss):
    """Loss and gradients of all logits."""
    here, (count, classes, dim, seed) = page("cross_entropy", library), sizes
    rng, asarray = np.random.default_rng(seed), on(library)
    hidden, weights = rng.standard_normal((count, dim)), rng.standard_normal((classes, dim))
    bias, labels, rows = rng.standard_normal(classes), rng.integers(classes, size=count), np.arange(count)
    logits = hidden @ weights.T + bias
    d, lse = softmax(logits)
    loss, *gradients = here["cross_entropy"](*map(asarray, (hidden, weights, bias, labels)), z_loss)
    np.testing.assert_allclose(loss, (lse - logits[rows, labels] + z_loss * lse**2).mean(), atol=1e-11)
    d *= (1 + 2 * z_loss * lse)[:, None]
    d[rows, labels] -= 1
    for found, right in zip(gradients, (d @ weights, d.T @ hidden, d.sum(axis=0)), strict=True):
        np.testing.assert_allclose(ct.to_numpy(found), right / count, atol=1e-11)


@pytest.mark.parametrize("library", LIBRARIES)
def test_where_attention_goes(library):
    """Entropy and column sums of each block are those of the weights of all pairs."""
    here = page("where", library)
    gpt, heads = here["gpt"], here["HEADS"]
    p = gpt.new_parameters(0, width=32, blocks=2, length=40)
    p |= {name: 10 * x for name, x in p.items() if name.endswith(".qkv")}  # weights that differ
    tokens = gpt.draw(np.random.default_rng(0), gpt.training, 3, 30)
    x = p["token"][tokens] + p["place"][: tokens.shape[1]]
    _, (tape, _) = gpt.forward(p, x, gpt.Formula(), heads)
    for (entropy, received), (_, _, (_, _, _, weights), *_) in zip(here["reductions"](p, tokens), tape, strict=True):
        weights = ct.to_numpy(weights).astype(float)
        logs = np.log(np.where(weights > 0, weights, 1))
        np.testing.assert_allclose(ct.to_numpy(entropy), -(weights * logs).sum(axis=3), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ct.to_numpy(received), weights.sum(axis=2), rtol=1e-4, atol=1e-5)
