"""Attention over keys that were split anywhere and merged is that over all of them, and so are its gradients."""

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.shards import partial_results
from cuflash.testing.rule import yardsticks_of
from tests.row_reductions import gap_is_clear
from tests.sampling import examples

FEATURES = ("causal", "window", "softcap", "scale", "bias", "mask", "gqa", "head_dim_v", "dlse")
PLAIN: dict[str, Any] = {"ndims": [4], "layouts": ["bhsd"], "features": FEATURES, "max_seqlen": 70, "max_head_dim": 40}

PLURALS = {"max": "maxes", "entropy": "entropies"}
WANTS = st.sampled_from([("max", "entropy"), ("max",), ("entropy",)])


@st.composite
def splits(draw: st.DrawFn, /, **keywords: Any) -> tuple[ct.Case, list[np.ndarray]]:
    """A case, and splits of its keys, some of which may be empty."""
    case = draw(ct.cases(**keywords))
    count = draw(st.integers(1, 4))
    owner = np.random.default_rng(draw(st.integers(0, 2**16))).integers(0, count, case.seqlen_k)
    return case, [np.flatnonzero(owner == split) for split in range(count)]


def run(case, splits_of_keys):
    """(out, lse), and the inputs and results of the splits."""
    attn = cuflash.FlashAttention(scale=case.problem.scale, softcap=case.softcap)
    inputs = ct.split_keys(case, splits_of_keys)
    results = [attn.forward(**x) for x in inputs]
    return cuflash.merge(*zip(*results, strict=True)), inputs, results


def gradients(case, splits_of_keys, *, through_splits):
    """dq, dk, dv of the whole: by the results of each split, or by the merged ones."""
    attn = cuflash.FlashAttention(scale=case.problem.scale, softcap=case.softcap)
    (out, lse), inputs, results = run(case, splits_of_keys)
    arrays = case.arrays()
    dout, dlse = arrays["dout"], arrays.get("dlse")
    dq, dk, dv = (np.zeros(arrays[name].shape, lse.dtype) for name in "qkv")
    outs, lses = zip(*results, strict=True)
    douts, dlses = cuflash.merge_backward(dout, outs, lses, out, lse, dlse=dlse)
    for i, (keys, x) in enumerate(zip(splits_of_keys, inputs, strict=True)):
        q, k, v = (x.pop(name) for name in "qkv")
        if through_splits:
            of_split = attn.backward(douts[i], q, k, v, *results[i], dlse=dlses[i], **x)
        else:
            of_split = attn.backward(dout, q, k, v, out, lse, dlse=dlse, **x)
        dq += of_split.dq
        dk[:, :, keys], dv[:, :, keys] = of_split.dk, of_split.dv
    return dq, dk, dv


@settings(max_examples=examples(80))
@given(splits(**PLAIN))
def test_splits_are_the_whole(case_and_splits):
    case, splits_of_keys = case_and_splits
    (out, lse), _, _ = run(case, splits_of_keys)
    ct.assert_forward(case, out, lse)


@settings(max_examples=examples(80))
@given(splits(**PLAIN), WANTS, st.booleans())
def test_row_reductions_of_splits_are_those_of_the_whole(case_and_splits, want, has_values):
    """By the oracle rule, out and lse as without them; splits without keys among them count for nothing."""
    case, splits_of_keys = case_and_splits
    case = replace(case, row_reductions=want, has_values=has_values)
    attn = cuflash.FlashAttention(scale=case.problem.scale, softcap=case.softcap)
    inputs = [x if has_values else {**x, "v": None} for x in ct.split_keys(case, splits_of_keys)]
    results = [attn.forward(**x, want=want)._asdict() for x in inputs]
    given: Any = {plural: [x[name] for x in results] for name, plural in PLURALS.items() if name in want}
    outs, lses = ([x[name] for x in results] for name in ("out", "lse"))
    merged = cuflash.merge(outs, lses, **given)
    assert merged._fields == ("out", "lse", *want)
    expected = yardsticks_of(case)
    for name, x in merged._asdict().items():
        assert x is None or not (failure := ct.measure(name, x, expected[name]).failure), failure
    plain = cuflash.merge(outs, lses)
    assert merged.out is plain.out is None or np.array_equal(merged.out, plain.out, equal_nan=True)
    np.testing.assert_array_equal(merged.lse, plain.lse)


def test_the_sink_of_a_split_counts_for_the_entropy():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 50, 8))
    sinks, attn = rng.standard_normal(2), cuflash.FlashAttention()
    halves = [
        attn.forward(q, k[:, keys], v[:, keys], want=("entropy",), **given)
        for keys, given in ((slice(0, 20), {"sinks": sinks}), (slice(20, 50), {}))
    ]
    merged = cuflash.merge([x.out for x in halves], [x.lse for x in halves], entropies=[x.entropy for x in halves])
    whole = attn.forward(q, k, v, sinks=sinks, want=("entropy",))
    for name in merged._fields:
        np.testing.assert_allclose(getattr(merged, name), getattr(whole, name), atol=1e-13)


def test_gradients_of_merged_entropies_are_those_of_the_whole():
    """`backward` of each split with the merged out, lse and entropy."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 50, 8))
    dentropy, attn = np.random.default_rng(1).standard_normal((2, 50)), cuflash.FlashAttention()
    halves = (slice(0, 20), slice(20, 50))
    results = [attn.forward(q, k[:, x], v[:, x], want=("entropy",)) for x in halves]
    out, lse, entropy = cuflash.merge(
        [x.out for x in results], [x.lse for x in results], entropies=[x.entropy for x in results]
    )
    given: Any = {"entropy": entropy, "dentropy": dentropy}
    dqs, dks, _ = zip(*(attn.backward(dout, q, k[:, x], v[:, x], out, lse, **given) for x in halves), strict=True)
    whole = attn.forward(q, k, v, want=("entropy",))
    expected = attn.backward(dout, q, k, v, *whole[:2], entropy=whole.entropy, dentropy=dentropy)
    np.testing.assert_allclose(sum(dqs), expected.dq, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(dks, axis=1), expected.dk, atol=1e-12)


@settings(max_examples=examples(60))
@given(splits(dtypes=["float64"], **PLAIN), WANTS, st.booleans())
def test_gradients_of_row_reductions_of_splits(case_and_splits, want, has_values):
    """`backward` of each split by what `merge_backward` makes of dmax and dentropy gives the gradients of the whole."""
    case, splits_of_keys = case_and_splits
    case = replace(case, row_reductions=want, has_values=has_values)
    assume("max" not in want or gap_is_clear(case))
    attn: Any = cuflash.FlashAttention(scale=case.problem.scale, softcap=case.softcap)
    arrays = case.arrays()
    inputs: list[Any] = [x if has_values else {**x, "v": None} for x in ct.split_keys(case, splits_of_keys)]
    results = [attn.forward(**x, want=want)._asdict() for x in inputs]
    outs, lses = ([x[name] for x in results] for name in ("out", "lse"))
    of_splits: Any = {plural: [x[name] for x in results] for name, plural in PLURALS.items() if name in want}
    merged = cuflash.merge(outs, lses, **of_splits)._asdict()
    given: Any = of_splits | {f"d{name}": arrays[f"d{name}"] for name in want}
    given |= {name: merged[name] for name in want if name == "entropy"}
    dout = arrays["dout"] if has_values else None
    found: Any = cuflash.merge_backward(
        dout, outs, lses, merged["out"], merged["lse"], dlse=arrays.get("dlse"), **given
    )
    assert found._fields == ("douts", "dlses", *(f"d{plural}" for name, plural in PLURALS.items() if name in want))
    need = ("dq", "dk", "dv") if has_values else ("dq", "dk")
    gradients = {name: np.zeros(arrays[name[1:]].shape) for name in need}
    for i, (keys, x, own) in enumerate(zip(splits_of_keys, inputs, results, strict=True)):
        of_split = {f"d{name}": getattr(found, f"d{PLURALS[name]}")[i] for name in want}
        of_split |= {name: own[name] for name in want if name == "entropy"}
        dq, *others = attn.backward(
            found.douts[i], **x, out=own["out"], lse=own["lse"], dlse=found.dlses[i], **of_split, need=need
        )
        gradients["dq"] += dq
        for name, gradient in zip(need[1:], others, strict=True):
            gradients[name][:, :, keys] = gradient
    ct.assert_backward(case, **gradients)


def assert_differences(loss, *arrays_and_gradients):
    """Compare gradients with central differences of `loss()`; what is not finite has none."""
    for values, gradients in arrays_and_gradients:
        for x, dx in zip(values, gradients, strict=True):
            for at in np.ndindex(x.shape):
                if not np.isfinite(x[at]):
                    assert dx[at] == 0
                    continue
                losses, before = [], x[at]
                for step in (1e-5, -1e-5):
                    x[at] = before + step
                    losses.append(loss())
                x[at] = before
                np.testing.assert_allclose(dx[at], (losses[0] - losses[1]) / 2e-5, rtol=1e-6, atol=1e-8)


def test_gradients_of_row_reductions_equal_finite_differences():
    """Of equal maxima the first one has the gradient; splits without weight have none."""
    random = np.random.default_rng(0)
    outs, lses, entropies = (list(random.standard_normal((3, *shape))) for shape in ((2, 5, 4), (2, 5), (2, 5)))
    lses[1][0, 2] = lses[2][0, 2] = -np.inf
    entropies[1][0, 2] = np.nan
    maxes = [random.integers(0, 3, (2, 5)).astype(np.float64) for _ in range(3)]
    for own in maxes:
        own[1, 4] = -np.inf
    dmax, dentropy = random.standard_normal((2, 2, 5))
    merged = cuflash.merge(outs, lses, maxes=maxes, entropies=entropies)
    found = cuflash.merge_backward(
        np.zeros((2, 5, 4)), outs, lses, *merged[:2], maxes=maxes, dmax=dmax, entropies=entropies,
        entropy=merged.entropy, dentropy=dentropy,
    )  # fmt: skip

    def loss():
        return (dentropy * cuflash.merge(outs, lses, entropies=entropies).entropy).sum()

    assert_differences(loss, (lses, found.dlses), (entropies, found.dentropies))
    first = np.argmax(maxes, axis=0)
    for i, own in enumerate(found.dmaxes):
        np.testing.assert_array_equal(own, np.where((first == i) & np.isfinite(merged.max), dmax, 0))


def test_wrong_gradients_of_row_reductions():
    out, rows = np.zeros((2, 5, 4), np.float32), np.zeros((2, 5), np.float32)
    both, rows_of_both = [out, out], [rows, rows]
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"dmax": rows}, TypeError, "maxes: got None, expected that of the call that gave dmax"),
        ({"maxes": rows_of_both}, TypeError, "dmax: got None"),
        ({"entropies": rows_of_both, "dentropy": rows}, TypeError, "entropy: got None"),
        ({"maxes": [rows], "dmax": rows}, ValueError, "maxes: got 1 arrays, expected 2"),
        ({"maxes": rows_of_both, "dmax": rows[:1]}, ValueError, r"dmax: got shape \(1, 5\), expected \(2, 5\)"),
        (
            {"maxes": rows_of_both, "dmax": rows, "touts": both, "tlses": rows_of_both, "tout": out, "tlse": rows},
            TypeError,
            "maxes: got arrays together with tlses, expected None",
        ),
    ]
    for of_reductions, error, message in wrong:
        with pytest.raises(error, match=f"^{message}"):
            cuflash.merge_backward(out, both, rows_of_both, out, rows, **of_reductions)


def test_wrong_row_reductions_of_splits():
    out, rows = np.zeros((2, 5, 4), np.float32), np.zeros((2, 5), np.float32)
    for name in ("maxes", "entropies"):
        wrong: list[tuple[Any, type[Exception], str]] = [
            ([rows], ValueError, rf"{name}: got 1 arrays, expected 2"),
            ([rows, rows[:1]], ValueError, rf"{name}\[1\]: got shape \(1, 5\), expected"),
            ([rows, rows.astype(np.float64)], TypeError, rf"{name}\[1\]: got dtype float64"),
            ([rows, None], TypeError, rf"{name}\[1\]: got None"),
            (rows, TypeError, rf"{name}: got ndarray, expected a list or tuple"),
        ]
        for partials, error, message in wrong:
            with pytest.raises(error, match=message):
                cuflash.merge([out, out], [rows, rows], **{name: partials})
        own: Any = {name: [rows]}
        with pytest.raises(TypeError, match=f"{name}: got arrays together with tlses, expected None"):
            cuflash.merge([out], [rows], touts=[out], tlses=[rows], **own)


@pytest.mark.parametrize("through_splits", [True, False])
@settings(max_examples=examples(60))
@given(case_and_splits=splits(dtypes=["float64"], **PLAIN))
def test_gradients_of_splits_are_those_of_the_whole(through_splits, case_and_splits):
    case, splits_of_keys = case_and_splits
    expected = ct.yardsticks(case.problem, case.arrays())
    got = gradients(case, splits_of_keys, through_splits=through_splits)
    for name, x in zip(("dq", "dk", "dv"), got, strict=True):
        tolerance = 1e-13 * max(1, case.score_spread) * max(1, expected[name].scale.max())
        np.testing.assert_allclose(x, expected[name].expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_in_lower_precision(dtype):
    """By the merged results: each split rounds its gradients, a few such errors more than the whole has."""
    case = ct.Case(seqlen_q=60, seqlen_k=90, num_heads=4, num_heads_kv=2, head_dim=32, dtype=dtype, dlse=True)
    expected = ct.yardsticks(case.problem, case.arrays())
    splits_of_keys = np.array_split(np.random.default_rng(0).permutation(case.seqlen_k), 3)
    got = gradients(case, splits_of_keys, through_splits=False)
    for name, x in zip(("dq", "dk", "dv"), got, strict=True):
        assert ct.measure(name, x, expected[name].looser(3)).failure is None


def example(layout="bhsd", ndim=4, dtype="float64"):
    """dout and dlse, and outs and lses of three splits."""
    case = ct.Case(
        seqlen_q=6, seqlen_k=9, batch=2 if ndim == 4 else 1, num_heads=3 if ndim > 2 else 1, head_dim=4, head_dim_v=5,
        dtype=dtype, layout=layout, ndim=ndim, dlse=True,
    )  # fmt: skip
    arrays = case.arrays()
    axis = {"bhsd": -2, "bshd": -3}[layout] if ndim > 2 else -2
    attn = cuflash.FlashAttention(layout=layout)
    keys = [np.split(arrays[name], [2, 5], axis=axis) for name in "kv"]
    outs, lses = zip(*(attn.forward(arrays["q"], k, v) for k, v in zip(*keys, strict=True)), strict=True)
    return case, arrays, list(outs), list(lses)


@pytest.mark.parametrize("ndim", [2, 3, 4])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts(layout, ndim):
    case, arrays, outs, lses = example(layout, ndim)
    result = cuflash.merge(outs, lses, layout=layout)
    assert isinstance(result, cuflash.MergeResult)
    ct.assert_forward(case, *result)
    douts, dlses = cuflash.merge_backward(arrays["dout"], outs, lses, *result, dlse=arrays["dlse"], layout=layout)
    assert {x.shape for x in douts} == {outs[0].shape}
    assert {x.shape for x in dlses} == {lses[0].shape}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_equal_finite_differences(layout):
    _, arrays, outs, lses = example(layout)
    dout, dlse = arrays["dout"], arrays["dlse"]
    lses[1][0, 1, 2] = lses[2][0, 1, 2] = -np.inf
    outs[1][(0, 1, 2) if layout == "bhsd" else (0, 2, 1)] = np.nan
    result = cuflash.merge(outs, lses, layout=layout)
    douts, dlses = cuflash.merge_backward(dout, outs, lses, *result, dlse=dlse, layout=layout)

    def loss():
        out, lse = cuflash.merge(outs, lses, layout=layout)
        return (dout * out).sum() + (dlse * lse).sum()

    assert_differences(loss, (outs, douts), (lses, dlses))


def test_rows_that_attend_to_no_split():
    outs, lses = [np.full((3, 4), np.nan, np.float32)] * 2, [np.full(3, -np.inf, np.float32)] * 2
    out, lse = cuflash.merge(outs, lses)
    assert not out.any()
    assert (lse == -np.inf).all()
    douts, dlses = cuflash.merge_backward(np.ones_like(out), outs, lses, out, lse, dlse=np.ones_like(lse))
    assert not any(x.any() for x in (*douts, *dlses))


def test_one_split_is_itself():
    _, arrays, outs, lses = example(dtype="bfloat16")
    out, lse = cuflash.merge(outs[:1], lses[:1])
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_array_equal(lse, lses[0])
    (dout,), (dlse,) = cuflash.merge_backward(arrays["dout"], outs[:1], lses[:1], out, lse, dlse=arrays["dlse"])
    np.testing.assert_array_equal(dout, arrays["dout"])
    np.testing.assert_array_equal(dlse, arrays["dlse"])


def test_a_sink_goes_with_one_split():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 20, 8))
    sinks, attn = np.array([0.5, -1.0]), cuflash.FlashAttention()
    whole = attn.forward(q, k, v, sinks=sinks)
    first, second = attn.forward(q, k[:, :7], v[:, :7], sinks=sinks), attn.forward(q, k[:, 7:], v[:, 7:])
    for got, expected in zip(cuflash.merge(*zip(first, second, strict=True)), whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_large_scores_do_not_overflow():
    outs, lses = [np.full((1, 2), x, np.float32) for x in (1, 2)], [np.array([x], np.float32) for x in (1e4, 1e4 + 1)]
    out, lse = cuflash.merge(outs, lses)
    np.testing.assert_allclose(out, 1 + 1 / (1 + np.exp(-1)), rtol=1e-6)
    np.testing.assert_allclose(lse, 1e4 + np.log1p(np.e), rtol=1e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_of_another_library(dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    _, arrays, outs, lses = example(dtype=dtype)
    convert = ct.through_dlpack(torch.from_dlpack)
    outs, lses, dout = [convert(x) for x in outs], [convert(x) for x in lses], convert(arrays["dout"])
    out, lse = cuflash.merge(outs, lses)
    douts, dlses = cuflash.merge_backward(dout, outs, lses, out, lse)
    assert {type(x) for x in (out, lse, *douts, *dlses)} == {torch.Tensor}
    assert {x.dtype for x in (out, *douts)} == {outs[0].dtype}


DTYPES = "float16, bfloat16, float32 or float64"
BAD = [
    ("outs", lambda x: x[0], TypeError, "ndarray", "a list or tuple of arrays"),
    ("outs", lambda x: [], ValueError, "no array", "at least one"),
    ("lses", lambda x: x[:2], ValueError, "2 arrays", "3, one for each of outs"),
    ("outs[1]", lambda x: [x[0], x[1].tolist(), x[2]], TypeError, "list", "a NumPy or CuPy array"),
    ("outs[1]", lambda x: [x[0], x[1][:1], x[2]], ValueError, "shape (1, 3, 6, 5)", "(2, 3, 6, 5)"),
    ("outs[2]", lambda x: [*x[:2], x[2].astype(np.float32)], TypeError, "dtype float32", "float64"),
    ("outs[0]", lambda x: [y.astype(np.int32) for y in x], TypeError, "dtype int32", DTYPES),
    ("outs[0]", lambda x: [y[0, 0, 0] for y in x], ValueError, "1-D shape (5,)", "an array of two axes or more"),
    ("lses[0]", lambda x: [x[0].swapaxes(1, 2), *x[1:]], ValueError, "shape (2, 6, 3)", "(2, 3, 6)"),
    ("lses[1]", lambda x: [x[0], x[1].astype(np.float32), x[2]], TypeError, "dtype float32", "float64"),
    ("lses[1]", lambda x: [x[0], None, x[2]], TypeError, "None", "an array"),
]


@pytest.mark.parametrize(("name", "change", "error", "got", "expected"), BAD)
def test_wrong_splits(name, change, error, got, expected):
    _, arrays, outs, lses = example()
    out, lse = cuflash.merge(outs, lses)
    results = {"outs": outs, "lses": lses}
    results[name[:4]] = change(results[name[:4]])
    message = f"^{re.escape(f'{name}: got {got}, expected {expected}')}"
    with pytest.raises(error, match=message):
        cuflash.merge(**results)
    if "dtype int32" not in got and "1-D" not in got:
        with pytest.raises(error, match=message):
            cuflash.merge_backward(arrays["dout"], out=out, lse=lse, **results)


def test_wrong_layout_and_gradients():
    _, arrays, outs, lses = example()
    out, lse = cuflash.merge(outs, lses)
    for layout, error in (("sbhd", ValueError), (None, TypeError)):
        with pytest.raises(error, match=r"^layout: got .*bhsd"):
            cuflash.merge(outs, lses, layout=layout)  # type: ignore[call-overload]  # what is tested
    with pytest.raises(ValueError, match=r"^dout: got shape \(2, 3, 6, 4\), expected \(2, 3, 6, 5\)"):
        cuflash.merge_backward(arrays["dout"][..., :4], outs, lses, out, lse)
    with pytest.raises(TypeError, match=r"^dlse: got dtype float32, expected float64$"):
        cuflash.merge_backward(arrays["dout"], outs, lses, out, lse, dlse=lse.astype(np.float32))


@given(st.integers(0, 2**16), st.integers(1, 6), st.booleans())
def test_splits_merge_one_after_the_other(seed, count, has_scores):
    """To what `merge` makes of them, of rows each; where the lse of a split is -inf, its out may be anything."""
    random = np.random.default_rng(seed)
    outs: Any = random.standard_normal((count, 1, 2, 7, 3))
    lses: Any = 9 * random.standard_normal((count, 1, 2, 7))
    lses[random.random(lses.shape) < 0.4] = -np.inf
    scores = [(random.standard_normal(2), None)] if has_scores else []
    found, lse = np.empty((1, 2, 7, 3)), np.empty((1, 2, 7))
    running = partial_results.RunningMerge(found, scores)
    for partial_out, partial_lse in zip(outs, lses, strict=True):
        first = int(random.integers(0, 4))
        partial_lse[:, :, :first] = -np.inf
        partial_out = np.where(partial_lse[..., None] == -np.inf, np.nan, partial_out)
        running.add(partial_out[:, :, first:], partial_lse[:, :, first:], slice(first, None))
    running.finish(found, lse)
    for of_heads, _ in scores:
        outs = [*outs, np.zeros(found.shape)]
        lses = [*lses, np.broadcast_to(of_heads[:, None], lse.shape)]
    expected = cuflash.merge(list(outs), list(lses))
    np.testing.assert_allclose(found, expected.out, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-13, atol=1e-13)


@given(st.integers(0, 2**16), st.integers(1, 5), st.sampled_from(["bhsd", "bshd"]))
def test_lses_merge_without_values(seed, count, layout):
    """To what they merge to with values; so do their gradients, and tangents."""
    random = np.random.default_rng(seed)
    lses, tlses = 9 * random.standard_normal((count, 2, 3, 7)), random.standard_normal((count, 2, 3, 7))
    lses[random.random(lses.shape) < 0.3] = -np.inf
    dlse = random.standard_normal((2, 3, 7))
    shape = (count, 2, 3, 7, 1) if layout == "bhsd" else (count, 2, 7, 3, 1)
    none, zeros = [None] * count, [*np.zeros(shape)]
    groups: Any = {"touts": zeros, "tlses": [*tlses]}
    expected = cuflash.merge(zeros, [*lses], **groups, layout=layout)
    found = cuflash.merge(none, [*lses], touts=none, tlses=[*tlses], layout=layout)
    assert found.out is found.tout is None
    np.testing.assert_array_equal(found.lse, expected.lse)
    np.testing.assert_array_equal(found.tlse, expected.tlse)
    np.testing.assert_array_equal(cuflash.merge(none, [*lses], layout=layout).lse, expected.lse)
    of_splits: Any = {"dlse": dlse, "layout": layout}
    both = cuflash.merge_backward(zeros[0], zeros, [*lses], expected.out, expected.lse, **of_splits)
    own = cuflash.merge_backward(None, none, [*lses], None, found.lse, **of_splits)
    assert own.douts == (None,) * count
    np.testing.assert_array_equal(own.dlses, both.dlses)
