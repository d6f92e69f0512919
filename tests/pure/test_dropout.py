"""Dropout on the CPU: the random numbers, which weights they drop, and the passes against the oracle."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.spec.dropout import kept_weights, philox
from cuflash.spec.options import Options, rounded_rate
from cuflash.spec.problem import make_problem
from cuflash.testing import reference
from tests.sampling import examples

WORDS = st.integers(0, 2**32 - 1)


# ---- Random numbers --------------------------------------------------------------------------------------------------


# The vectors that Random123, the library of the paper's authors, is tested by.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_known_answers(counter, key, expected):
    a, b, c, d = (np.array([word], np.uint64) for word in counter)
    words = philox((a, b, c, d), key)
    assert " ".join(f"{word[0]:08x}" for word in words) == expected


def philox_of_integers(counter, key):
    """The generator as the paper writes it, in integers of any size."""
    c, k = list(counter), list(key)
    for _ in range(7):
        high_0, low_0 = divmod(0xD2511F53 * c[0], 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@given(st.tuples(*4 * [WORDS]), st.tuples(*2 * [WORDS]))
def test_arrays_as_integers(counter, key):
    a, b, c, d = (np.array(word, np.uint64) for word in counter)
    words = philox((a, b, c, d), key)
    assert [int(word) for word in words] == philox_of_integers(counter, key)


@given(st.data())
def test_the_position_of_a_weight_as_documented(data):
    seed, offset = data.draw(st.integers(0, 2**64 - 1)), data.draw(WORDS)
    b, h, i, j = (data.draw(st.integers(0, n)) for n in (1, 2, 40, 70))
    threshold = data.draw(st.integers(0, 65535))
    counter = (4 * (j // 16) + j % 8 // 2, 8 * (i // 16) + i % 8, 3 * b + h, offset)
    word = philox_of_integers(counter, (seed % 2**32, seed >> 32))[2 * (j % 2) + j % 16 // 8]
    bits = word % 2**16 if i % 16 < 8 else word >> 16
    mask = cuflash.dropout_mask(seed, offset, 2, 3, 41, 71, threshold / 65536)
    assert mask[b, h, i, j] == (bits >= threshold)


@given(st.data())
def test_slices_are_slices_of_the_whole(data):
    sizes = (100, 90)
    whole = cuflash.dropout_mask(7, 8, 2, 3, *sizes, 0.3)
    b, h = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
    starts = [data.draw(st.integers(0, n)) for n in sizes]
    rows, columns = (range(start, data.draw(st.integers(start, n))) for start, n in zip(starts, sizes, strict=True))
    own = kept_weights(rounded_rate(0.3), 7, 8, 3 * b + h, rows, columns)
    np.testing.assert_array_equal(own, whole[b, h, rows.start : rows.stop, columns.start : columns.stop])


def test_far_positions_need_no_others():
    position = (range(2**30 - 5, 2**30), range(2**30 - 7, 2**30))
    own = kept_weights(0.5, 1, 2, 2**31 - 1, *position)
    assert own.shape == (5, 7)
    assert not np.array_equal(own, kept_weights(0.5, 1, 2, 2**31 - 2, *position))


# ---- Statistics ------------------------------------------------------------------------------------------------------

SIGMAS = 5  # of a normal distribution: one in two million


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.25, 0.5, 0.9])
def test_the_share_that_is_dropped(rate):
    mask = cuflash.dropout_mask(3, 4, 2, 2, 600, 500, rate)
    p = rounded_rate(rate)
    sigma = math.sqrt(p * (1 - p))
    assert abs(mask.mean() - (1 - p)) < SIGMAS * sigma / math.sqrt(mask.size)
    # Of each position within a call: of each word and each half of it.
    positions = mask[..., :592, :496].reshape(2, 2, 37, 16, 31, 16).transpose(3, 5, 0, 1, 2, 4).reshape(256, -1)
    deviations = (positions.mean(axis=1) - (1 - p)) * math.sqrt(positions.shape[1]) / sigma
    assert np.abs(deviations).max() < SIGMAS
    assert 0.7 < (deviations**2).mean() < 1.4


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("distance", [1, 2, 8, 9, 16])
def test_neighbours_are_independent(axis, distance):
    batch, heads, rows, columns = (max(n, 40) if i == axis else n for i, n in enumerate((3, 3, 200, 200)))
    signs = np.where(cuflash.dropout_mask(5, 6, batch, heads, rows, columns, 0.5), 1, -1)
    one, other = np.moveaxis(signs, axis, 0)[:-distance], np.moveaxis(signs, axis, 0)[distance:]
    assert abs((one * other).mean()) < SIGMAS / math.sqrt(one.size)


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (2**32, 0), (2**63, 0), (0, 2**31)])
def test_seeds_and_offsets_are_independent(other):
    signs, others = (
        np.where(cuflash.dropout_mask(seed, offset, 1, 2, 300, 300, 0.5), 1, -1) for seed, offset in ((0, 0), other)
    )
    assert abs((signs * others).mean()) < SIGMAS / math.sqrt(signs.size)


# ---- Rates -----------------------------------------------------------------------------------------------------------


def test_rates_are_rounded():
    assert rounded_rate(0.0) == 0
    assert rounded_rate(0.1) == 6554 / 65536
    assert rounded_rate(0.5) == 0.5
    assert rounded_rate(65535.49 / 65536) == 65535 / 65536
    assert cuflash.dropout_mask(0, 0, 1, 1, 50, 50, 1e-9).all()
    q = np.ones((8, 4))
    assert make_problem(Options(dropout=0.1), q, q, q).kept_scale == 65536 / (65536 - 6554)


def test_without_dropout_the_numbers_do_not_matter():
    q, k, v = np.random.default_rng(0).standard_normal((3, 20, 8))
    plain = cuflash.FlashAttention().forward(q, k, v)
    for attn in (cuflash.FlashAttention(dropout=0.0), cuflash.FlashAttention(dropout=0)):
        given = attn.forward(q, k, v, seed=1, offset=2)
        np.testing.assert_array_equal(given.out, plain.out)


# ---- Against the oracle ----------------------------------------------------------------------------------------------


@settings(max_examples=examples(20))
@given(st.integers(0, 2**64 - 1), WORDS, st.sampled_from([0.1, 0.5, 0.9]))
def test_the_weights_themselves(seed, offset, rate):
    """V is the identity, so the output is the weights: those that the mask keeps, over the fraction that is kept."""
    q, k = np.random.default_rng(1).standard_normal((2, 2, 3, 40, 8))
    v = np.broadcast_to(np.eye(40), (2, 3, 40, 40))
    weights, _ = cuflash.FlashAttention().forward(q, k, v)
    dropped, _ = cuflash.FlashAttention(dropout=rate).forward(q, k, v, seed=seed, offset=offset)
    mask = cuflash.dropout_mask(seed, offset, 2, 3, 40, 40, rate)
    np.testing.assert_array_equal(dropped != 0, mask)
    np.testing.assert_allclose(dropped, mask * weights / (1 - rounded_rate(rate)), rtol=1e-13)


def test_the_oracle_by_hand():
    """The oracle on one head, in the words of FlashAttention's Algorithms 2 and 4."""
    q, k, v, dout = np.random.default_rng(2).standard_normal((4, 30, 5))
    problem = make_problem(Options(dropout=0.5), q, k, v)
    Z = cuflash.dropout_mask(3, 4, 1, 1, 30, 30, 0.5)[0, 0] * 2.0
    P = np.exp(q @ k.T / math.sqrt(5))
    P /= P.sum(axis=1, keepdims=True)
    out, _ = reference.forward(problem, q, k, v, seed=3, offset=4)
    np.testing.assert_allclose(out, (P * Z) @ v, rtol=1e-12, atol=1e-13)
    dP = (dout @ v.T) * Z
    dS = P * (dP - (P * dP).sum(axis=1, keepdims=True)) / math.sqrt(5)
    gradients = reference.backward(problem, dout, q, k, v, seed=3, offset=4)
    for got, expected in zip(gradients, (dS @ k, dS.T @ q, (P * Z).T @ dout), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)


def test_check_hands_over_seed_and_offset():
    """What other people's implementations are held to."""
    case = ct.Case(seqlen_q=30, seqlen_k=40, head_dim=8, num_heads=2, dropout=0.5, dtype="float64", seed=1)

    def plain(q, k, v, *, dropout, seed, offset):
        weights = np.exp(q @ k.swapaxes(2, 3) / math.sqrt(8))
        kept = cuflash.dropout_mask(seed, offset, 1, 2, 30, 40, dropout)
        return kept / (1 - dropout) * weights / weights.sum(axis=3, keepdims=True) @ v

    assert ct.check(plain, case).passed
    with pytest.raises(AssertionError, match="outside the oracle rule"):
        ct.check(lambda *qkv, offset, **keywords: plain(*qkv, offset=offset + 1, **keywords), case)


def test_gradients_by_finite_differences():
    """Of a sum over out and lse, with a sink, which is never dropped."""
    rng = np.random.default_rng(3)
    q, k, v, dout = rng.standard_normal((4, 20, 6))
    sinks, dlse = rng.standard_normal(1), rng.standard_normal(20)
    attn, random = cuflash.FlashAttention(dropout=0.3, causal=True), {"seed": 2**40 + 1, "offset": 9}
    inputs = {"q": q, "k": k, "v": v, "sinks": sinks}

    def loss(**inputs):
        out, lse = attn.forward(**inputs, **random)
        return (dout * out).sum() + (dlse * lse).sum()

    out, lse = attn.forward(**inputs, **random)
    need = [f"d{name}" for name in inputs]
    gradients = attn.backward(dout, **inputs, out=out, lse=lse, dlse=dlse, need=need, **random)
    for name, gradient in zip(inputs, gradients, strict=True):
        step = 1e-6 * rng.standard_normal(gradient.shape)
        ends = [loss(**inputs | {name: inputs[name] + sign * step}) for sign in (1, -1)]
        np.testing.assert_allclose((ends[0] - ends[1]) / 2, (gradient * step).sum(), rtol=1e-6, atol=1e-12)


def test_other_layouts_and_groups_drop_the_same_weights():
    q = np.random.default_rng(4).standard_normal((2, 4, 50, 8))
    k, v = np.random.default_rng(5).standard_normal((2, 2, 2, 60, 8))
    out, _ = cuflash.FlashAttention(dropout=0.2).forward(q, k, v, seed=1, offset=1)
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    other, _ = cuflash.FlashAttention(dropout=0.2, layout="bshd").forward(*turned, seed=1, offset=1)
    np.testing.assert_array_equal(out, other.swapaxes(1, 2))
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    np.testing.assert_allclose(out, cuflash.FlashAttention(dropout=0.2).forward(q, k, v, seed=1, offset=1)[0])


# ---- Bad arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "error", "message"),
    [
        (1, ValueError, "dropout: got 1, expected a number from 0 up to, but not, 1"),
        (1.0, ValueError, "dropout: got 1.0"),
        (-0.1, ValueError, "dropout: got -0.1"),
        (math.nan, ValueError, "dropout: got nan"),
        (math.inf, ValueError, "dropout: got inf"),
        (True, TypeError, "dropout: got bool True, expected a real number"),
        ("0.1", TypeError, "dropout: got str '0.1'"),
        (None, TypeError, "dropout: got None"),
        (
            0.9999999,
            ValueError,
            r"dropout: got 0.9999999, expected .* in steps of 1 / 65536: the step nearest to it is 1$",
        ),
        (65535.5 / 65536, ValueError, "dropout: got 0.99999237.*: the step nearest to it is 1$"),
    ],
)
def test_bad_rates(rate, error, message):
    with pytest.raises(error, match=message):
        cuflash.FlashAttention(dropout=rate)
    with pytest.raises(error, match=message.replace("dropout", "rate")):
        cuflash.dropout_mask(0, 0, 1, 1, 2, 2, rate)


@pytest.mark.parametrize(
    ("random", "error", "message"),
    [
        ({}, TypeError, "seed: got None, expected an integer, which dropout needs"),
        ({"seed": 1}, TypeError, "offset: got None, expected an integer, which dropout needs"),
        ({"offset": 1}, TypeError, "seed: got None"),
        ({"seed": 1.0, "offset": 0}, TypeError, "seed: got float 1.0"),
        ({"seed": True, "offset": 0}, TypeError, "seed: got bool True"),
        ({"seed": -1, "offset": 0}, ValueError, r"seed: got -1, expected 0 to 2\*\*64 - 1"),
        ({"seed": 2**64, "offset": 0}, ValueError, "seed: got 18446744073709551616"),
        ({"seed": 0, "offset": 2**32}, ValueError, r"offset: got 4294967296, expected 0 to 2\*\*32 - 1"),
    ],
)
def test_bad_random_numbers(random, error, message):
    q = np.ones((4, 8))
    attn = cuflash.FlashAttention(dropout=0.5)
    out, lse = attn.forward(q, q, q, seed=0, offset=0)
    with pytest.raises(error, match=message):
        attn.forward(q, q, q, **random)
    with pytest.raises(error, match=message):
        attn.backward(out, q, q, q, out, lse, **random)


@pytest.mark.parametrize("sizes", [(1.0, 1, 2, 2), (1, 1, -2, 2), (1, True, 2, 2)])
def test_bad_sizes(sizes):
    batch, heads, rows, columns = sizes
    with pytest.raises((TypeError, ValueError), match=r"^(batch|num_heads|seqlen_q): got "):
        cuflash.dropout_mask(0, 0, batch, heads, rows, columns, 0.5)


def test_empty_masks():
    assert cuflash.dropout_mask(0, 0, 0, 3, 5, 7, 0.5).shape == (0, 3, 5, 7)
    assert cuflash.dropout_mask(0, 0, 1, 3, 0, 7, 0.5).shape == (1, 3, 0, 7)
    assert cuflash.dropout_mask(0, 0, 1, 3, 5, 0, 0.5).shape == (1, 3, 5, 0)
