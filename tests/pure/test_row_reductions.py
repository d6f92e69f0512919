"""Row reductions: the maximum of the scores and the entropy of the weights, and their gradients, on the CPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.testing import reference
from tests.compiled import INSTRUCTION_SETS, NUMPY, way_taken
from tests.row_reductions import gap_is_clear, results_of
from tests.sampling import examples

SMALL: dict[str, Any] = {"max_seqlen": 129, "max_head_dim": 80, "max_scores": 2**13}
FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", "packed", "lengths")
WANTED = st.sampled_from([("max",), ("entropy",), ("max", "entropy")])


@settings(max_examples=examples(60))
@given(case=ct.with_axes(ct.cases(features=(*ct.FEATURES, "dropout"), ndims=(4,), **SMALL)), want=WANTED)
def test_batch_axes_keep_the_oracle_rule(case, want):
    case = replace(case, row_reductions=want)
    assume("max" not in want or gap_is_clear(case))
    found = results_of(case)
    ct.assert_forward(case, **found.forward)
    ct.assert_backward(case, **found.gradients)


@settings(max_examples=examples(40))
@given(case=ct.cases(features=("float8", "pages", "lengths", "sinks"), **SMALL), want=WANTED)
def test_pages_and_float8_keep_the_oracle_rule(case, want):
    case = replace(case, row_reductions=want)
    ct.assert_forward(case, **results_of(case).forward)


@settings(max_examples=examples(60))
@given(
    case=ct.cases(features=FEATURES, dtypes=("float64",), max_seqlen=20, max_head_dim=8, score_spreads=(1.0, 4.0)),
    want=WANTED,
)
def test_gradients_are_those_of_differences(case, want):
    """Of the oracle: the derivative of the results along a direction of q."""
    case = replace(case, row_reductions=want)
    arrays, problem = case.arrays(), case.problem
    assume("dout" in arrays and gap_is_clear(case, 1e-3))
    optional: dict[str, Any] = ct.optional(arrays) | case.random
    of_rows = {f"d{name}": arrays[f"d{name}"] for name in want}
    zeros = np.zeros(problem.out_shape)
    backward: Any = reference.backward
    (dq,) = backward(problem, zeros, *ct.qkv(arrays), need=("dq",), **of_rows, **optional)
    direction, step = np.random.default_rng(0).standard_normal(dq.shape), 1e-6

    def total(q):
        found = reference.forward(problem, q, arrays["k"], arrays["v"], want=want, **optional)
        finite = (np.where(np.isfinite(x), x, 0) * arrays[f"d{name}"] for name, x in zip(want, found[2:], strict=True))
        return sum(float(x.sum()) for x in finite)

    q = np.nan_to_num(arrays["q"])
    change = (total(q + step * direction) - total(q - step * direction)) / (2 * step)
    terms = dq * direction
    assert abs(change - terms.sum()) <= 1e-6 * (1 + np.abs(terms).sum())


# ---- Ties, rows without keys, and what is left out -------------------------------------------------------------------

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, 4, 70, 33), np.float32) for _ in range(3))
ATTENTION: Any = cuflash.FlashAttention(causal=True)


def doubled(s, i, j, *, pairs):
    """The scaled product, which it doubles first, so that NumPy multiplies q and k."""
    return s * 2 - s + pairs[i, j]


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 40),
    keys=st.integers(1, 300),
    head_dim=st.integers(1, 70),
    scale=st.sampled_from((0.5, -0.25, 0.3, -1.7)) | st.floats(0.01, 2),
    dtype=st.sampled_from(("float16", "float32", "float64")),
    heads=st.sampled_from(((1, 1), (4, 2))),
    way=st.sampled_from([way for _, way in (NUMPY, *INSTRUCTION_SETS)]),
    has_score=st.booleans(),
)
def test_the_first_of_equal_scores_gets_the_gradient_of_the_maximum(
    seed, rows, keys, head_dim, scale, dtype, heads, way, has_score
):
    """Integers, whose products are exact, so that many scores are equal in any order of sums, whatever the scale."""
    rng = np.random.default_rng(seed)
    q, k = (rng.integers(-2, 3, (1, h, n, head_dim)).astype(dtype) for h, n in zip(heads, (rows, keys), strict=True))
    products = q.astype(np.float64) @ np.repeat(k, heads[0] // heads[1], 1).astype(np.float64).swapaxes(2, 3)
    scores = scale * products
    attn: Any = cuflash.FlashAttention(scale=scale, score=doubled if has_score else None)
    pairs = np.zeros((rows, keys) if has_score else (1, heads[0], rows, keys), dtype)
    name = "pairs" if has_score else "bias"
    with way_taken(way):
        _, lse, largest = attn.forward(q, k, None, want=("max",), **{name: pairs})
        dmax = rng.integers(1, 5, lse.shape).astype(lse.dtype)
        (gradient,) = attn.backward(None, q, k, None, None, lse, dmax=dmax, need=(f"d{name}",), **{name: pairs})
    np.testing.assert_allclose(largest, scores.max(axis=-1), rtol=2 * np.finfo(lse.dtype).eps)
    expected = np.zeros(scores.shape, lse.dtype)
    np.put_along_axis(expected, scores.argmax(axis=-1)[..., None], dmax[..., None], axis=-1)
    np.testing.assert_array_equal(gradient, expected.sum(axis=(0, 1)) if has_score else expected)


def test_rows_without_keys():
    mask = np.ones((70, 70), bool)
    mask[3] = False
    sinks = np.full(4, 2.0, np.float32)
    dout, ones = np.zeros_like(Q), np.ones(Q.shape[:3], np.float32)
    for given_sinks in ({}, {"sinks": sinks}):
        found = ATTENTION.forward(Q, K, V, mask=mask, want=("max", "entropy"), **given_sinks)
        assert (found.max[:, :, 3] == -np.inf).all() and (found.entropy[:, :, 3] == 0).all()
        assert np.isfinite(found.max[:, :, 4:]).all() and (found.entropy[:, :, 4:] > 0).all()
        gradients = ATTENTION.backward(
            dout, Q, K, V, found.out, found.lse, mask=mask, dmax=ones, entropy=found.entropy, dentropy=ones,
            **given_sinks,
        )  # fmt: skip
        assert not gradients.dq[:, :, 3].any() and all(np.isfinite(x).all() for x in gradients)


def test_results_have_names():
    whole = ATTENTION.forward(Q, K, V, want={"entropy", "max"})
    assert whole._fields == ("out", "lse", "max", "entropy")
    assert ATTENTION.forward(Q, K, V, want=("entropy",))._fields == ("out", "lse", "entropy")
    assert type(ATTENTION.forward(Q, K, V)) is type(ATTENTION.forward(Q, K, V, want=()))
    into = np.empty_like(whole.max)
    found = ATTENTION.forward(Q, K, V, max=into)
    assert found.max is into and found._fields == ("out", "lse", "max")
    np.testing.assert_array_equal(into, whole.max)
    products = Q.astype(np.float64) @ K.swapaxes(2, 3).astype(np.float64)
    scores = np.where(np.tri(70, dtype=bool), products * 33**-0.5, -np.inf)
    weights = np.exp(scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True)))
    np.testing.assert_allclose(whole.max, scores.max(axis=-1), rtol=0, atol=2e-6)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=-1)
    np.testing.assert_allclose(whole.entropy, entropy, atol=2e-6)


def test_what_is_wrong_is_named():
    whole = ATTENTION.forward(Q, K, V, want=("entropy",))
    backward = (Q, Q, K, V, whole.out, whole.lse)
    with pytest.raises(TypeError, match=r"^want: got str"):
        ATTENTION.forward(Q, K, V, want="max")
    with pytest.raises(ValueError, match=r"^want: got 'lse', expected 'max' or 'entropy'; out and lse are given"):
        ATTENTION.forward(Q, K, V, want=("lse",))
    with pytest.raises(ValueError, match=r"^max: got shape"):
        ATTENTION.forward(Q, K, V, max=np.empty(3, np.float32))
    with pytest.raises(ValueError, match=r"^entropy: got None, expected the entropy that forward returned"):
        ATTENTION.backward(*backward, dentropy=whole.lse)
    with pytest.raises(ValueError, match=r"^entropy: got an array, expected None, or dentropy, the gradient"):
        ATTENTION.backward(*backward, entropy=whole.entropy)
    with pytest.raises(ValueError, match=r"^dmax: got shape"):
        ATTENTION.backward(*backward, dmax=whole.lse[0])
    with pytest.raises(ValueError, match=r"an array named entropy"):
        cuflash.FlashAttention(score=lambda s, i, j, *, entropy: s + entropy[i])
    with pytest.raises(NotImplementedError, match=r"^want: got it in jvp, expected in FlashAttention.forward"):
        ATTENTION.jvp(Q, K, V, tq=Q, want=("max",))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'want': forward takes it"):
        cuflash.logsumexp(Q, K, want=("max",))  # type: ignore[call-overload]
    ranks: Any = cd.ContextParallel(cd.threads(1)[0], split="contiguous")
    with pytest.raises(NotImplementedError, match=r"^max: got it in forward, .* ranks take want="):
        ranks.forward(Q, K, V, max=whole.entropy)
    with pytest.raises(ValueError, match=r"^dmax: got shape"):
        ranks.backward(*backward, dmax=whole.lse[0])


@settings(max_examples=examples(20))
@given(cut=st.integers(0, 70), scale=st.sampled_from((0.1, 1.0, 4.0)))
def test_reductions_of_merged_parts(cut, scale):
    """As docs/semantics.md says: of keys in two partials, one of which may be empty."""
    attn: Any = cuflash.FlashAttention(scale=scale)
    whole = attn.forward(Q, K, V, want=("max", "entropy"))
    partials = [
        attn.forward(Q, K[:, :, own], V[:, :, own], want=("max", "entropy")) for own in (slice(cut), slice(cut, 70))
    ]
    _, lse = cuflash.merge([x.out for x in partials], [x.lse for x in partials])
    with np.errstate(invalid="ignore"):
        terms = [np.exp(x.lse - lse) * (x.entropy + lse - x.lse) for x in partials]
    entropy = sum(np.where(np.isneginf(x.lse), 0, term) for x, term in zip(partials, terms, strict=True))
    np.testing.assert_allclose(entropy, whole.entropy, rtol=0, atol=2e-5)
    np.testing.assert_allclose(np.maximum(partials[0].max, partials[1].max), whole.max, rtol=0, atol=2e-5)
