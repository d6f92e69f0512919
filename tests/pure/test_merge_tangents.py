"""Tangents of partial results merge to those of the whole, and `merge` with tangents is the adjoint of its backward."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.gpu.merging import Tangents
from cuflash.shards import partial_results
from cuflash.testing.tangents import assert_tangents
from tests.pure.test_merge import PLAIN, splits
from tests.sampling import examples
from tests.second_derivatives import moved_by


def of_splits(case, moved, splits_of_keys):
    """The inputs of attention over splits with their tangents."""
    tangents = moved.arrays(case)
    found = ct.split_keys(case, splits_of_keys)
    for own, keys in zip(found, splits_of_keys, strict=True):
        for name in moved.names:
            x = tangents[f"t{name}"]
            if name in ("k", "v"):
                x = x[:, :, keys]
            elif name == "bias" and x.shape[-1] != 1:
                x = x[..., keys]
            own[f"t{name}"] = x
    return found


def run(case, inputs):
    """The merge of attention over splits, and their results."""
    attn = cuflash.FlashAttention(scale=case.problem.scale, softcap=case.softcap)
    results: list[Any] = [attn.jvp(**x) for x in inputs]
    outs, lses, touts, tlses = zip(*results, strict=True)
    return cuflash.merge(outs, lses, touts=touts, tlses=tlses), results


@settings(max_examples=examples(60))
@given(splits(**PLAIN), st.data())
def test_tangents_of_splits_are_those_of_the_whole(case_and_splits, data):
    case, splits_of_keys = case_and_splits
    moved = data.draw(moved_by(case))
    merged, _ = run(case, of_splits(case, moved, splits_of_keys))
    assert isinstance(merged, cuflash.JvpResult)
    assert_tangents(case, moved, {"tout": merged.tout, "tlse": merged.tlse})
    ct.assert_forward(case, merged.out, merged.lse)


@pytest.mark.parametrize("through_splits", [True, False])
@settings(max_examples=examples(40))
@given(case_and_splits=splits(dtypes=["float64"], **PLAIN), data=st.data())
def test_tangents_of_gradients_of_splits_are_those_of_the_whole(through_splits, case_and_splits, data):
    """By `merge_backward` and the results of each split, or by the merged ones."""
    case, splits_of_keys = case_and_splits
    moved = data.draw(moved_by(case))
    inputs, arrays = of_splits(case, moved, splits_of_keys), case.arrays()
    merged, results = run(case, inputs)
    outs, lses, touts, tlses = map(list, zip(*results, strict=True))
    both: dict[str, Any] = {name: x for name, x in moved.arrays(case).items() if name in ("tdout", "tdlse")}
    both |= {"dlse": arrays["dlse"]} if case.dlse else {}
    gradients = cuflash.merge_backward(
        arrays["dout"], outs, lses, merged.out, merged.lse, touts=touts, tlses=tlses, tout=merged.tout,
        tlse=merged.tlse, **both,
    )  # fmt: skip
    attn = cuflash.FlashAttention(scale=case.problem.scale, softcap=case.softcap)
    found = {f"td{name}": np.zeros(arrays[name].shape) for name in "qkv"}
    for i, (keys, x) in enumerate(zip(splits_of_keys, inputs, strict=True)):
        if through_splits:
            dout, dlse, tdout, tdlse = (of_kind[i] for of_kind in gradients)
            got = attn.backward_jvp(dout, **x, **results[i]._asdict(), dlse=dlse, tdout=tdout, tdlse=tdlse)
        else:
            got = attn.backward_jvp(arrays["dout"], **x, **merged._asdict(), **both)
        found["tdq"] += got.tdq
        found["tdk"][:, :, keys], found["tdv"][:, :, keys] = got.tdk, got.tdv
    expected = attn.backward_jvp(
        arrays["dout"], **ct.split_keys(case, [np.arange(case.seqlen_k)])[0],
        **{name: x for name, x in moved.arrays(case).items() if name not in both}, **merged._asdict(), **both,
    )  # fmt: skip
    for name, x in expected._asdict().items():
        size = max(1, case.score_spread) ** 2 * max(1.0, np.abs(np.nan_to_num(x)).max(initial=0))
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-11 * size, err_msg=name)


def example(seed=0, dtype=np.float64, shape=(2, 3, 4, 5), count=3, hides=True):
    """Partial results with tangents; some rows attend to no key of a split, or of any, and hold NaN there."""
    random = np.random.default_rng(seed)
    sums = np.float64 if dtype == np.float64 else np.float32
    outs, touts = ([random.standard_normal(shape).astype(dtype) for _ in range(count)] for _ in range(2))
    lses, tlses = ([3 * random.standard_normal(shape[:-1]).astype(sums) for _ in range(count)] for _ in range(2))
    for i, arrays in enumerate(zip(outs, touts, lses, tlses, strict=True)):
        if hides:
            hidden = random.random(shape[:-1]) < 0.3
            hidden[(0,) * len(shape[:-2]) + (1,)] = True
            hidden[(0,) * len(shape[:-2]) + (2,)] = i != 0
            for x in arrays:
                x[hidden] = -np.inf if x is lses[i] else np.nan
    return outs, lses, touts, tlses


def pair(x, y):
    return sum(float(np.nansum(a.astype(np.float64) * b)) for a, b in zip(x, y, strict=True))


@settings(max_examples=examples(60))
@given(st.integers(0, 2**16), st.integers(1, 4), st.booleans())
def test_merge_with_tangents_is_the_adjoint_of_its_backward_pass(seed, count, hides):
    """<J t, w> = <t, J' w>."""
    outs, lses, touts, tlses = example(seed, count=count, hides=hides)
    merged = cuflash.merge(outs, lses, touts=touts, tlses=tlses)
    random = np.random.default_rng(seed + 1)
    dout, dlse = random.standard_normal(merged.out.shape), random.standard_normal(merged.lse.shape)
    douts, dlses = cuflash.merge_backward(dout, outs, lses, merged.out, merged.lse, dlse=dlse)
    left = pair((dout, dlse), (merged.tout, merged.tlse))
    right = pair((*touts, *tlses), (*douts, *dlses))
    assert abs(left - right) <= 1e-11 * (1 + abs(left))


@settings(max_examples=examples(30))
@given(st.integers(0, 2**16), st.integers(1, 4), st.sampled_from(["bhsd", "bshd"]))
def test_tangents_are_differences(seed, count, layout):
    """Those of the merge, and those of its gradients."""
    outs, lses, touts, tlses = example(seed, count=count)
    swap = (lambda x: x.swapaxes(1, 2)) if layout == "bshd" else (lambda x: x)
    outs, touts = ([swap(x) for x in own] for own in (outs, touts))
    random = np.random.default_rng(seed + 1)
    (dout, tdout), (dlse, tdlse) = (random.standard_normal((2, *x.shape)) for x in (outs[0], lses[0]))

    def at(h):
        own_outs = [x + h * t for x, t in zip(outs, touts, strict=True)]
        own_lses = [np.where(x == -np.inf, x, x + h * t) for x, t in zip(lses, tlses, strict=True)]
        out, lse = cuflash.merge(own_outs, own_lses, layout=layout)
        douts, dlses = cuflash.merge_backward(
            dout + h * tdout, own_outs, own_lses, out, lse, dlse=dlse + h * tdlse, layout=layout
        )
        return (out, np.where(lse == -np.inf, 0, lse), *douts, *dlses)

    merged = cuflash.merge(outs, lses, touts=touts, tlses=tlses, layout=layout)
    gradients = cuflash.merge_backward(
        dout, outs, lses, merged.out, merged.lse, dlse=dlse, touts=touts, tlses=tlses, tout=merged.tout,
        tlse=merged.tlse, tdout=tdout, tdlse=tdlse, layout=layout,
    )  # fmt: skip
    assert isinstance(gradients, cuflash.MergeGradientTangents)
    found = (merged.tout, merged.tlse, *gradients.tdouts, *gradients.tdlses)
    for got, after, before in zip(found, at(1e-5), at(-1e-5), strict=True):
        expected = (after - before) / 2e-5
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * (1 + np.abs(expected).max()))


@settings(max_examples=examples(30))
@given(st.integers(0, 2**16), st.integers(1, 4), st.sampled_from([np.float32, np.float64, ml_dtypes.bfloat16]))
def test_tangents_times_four_are_exact_and_those_of_values_alone_are_out(seed, count, dtype):
    outs, lses, touts, tlses = example(seed, dtype, count=count)
    one, four = (
        cuflash.merge(outs, lses, touts=[f * x for x in touts], tlses=[f * x for x in tlses])
        for f in (dtype(1), dtype(4))
    )
    np.testing.assert_array_equal(four.tout, dtype(4) * one.tout)
    np.testing.assert_array_equal(four.tlse, 4 * one.tlse)
    alone = cuflash.merge(outs, lses, touts=outs, tlses=[np.zeros_like(x) for x in tlses])
    np.testing.assert_array_equal(alone.tout, alone.out)
    assert not alone.tlse.any()


@given(st.integers(0, 2**16), st.integers(1, 6), st.booleans())
def test_splits_with_tangents_merge_one_after_the_other(seed, count, has_scores):
    """To what `merge` makes of them, of rows each; where the lse of a split is -inf, the others may be anything."""
    random = np.random.default_rng(seed)
    outs, lses, touts, tlses = example(seed, shape=(1, 2, 7, 3), count=count)
    scores = [(random.standard_normal(2), random.standard_normal(2))] if has_scores else []
    found: dict[str, Any] = {name: np.empty((1, 2, 7, 3) if "out" in name else (1, 2, 7)) for name in RESULTS}
    running = partial_results.RunningMerge(found["out"], scores, found["tout"])
    for partials in zip(outs, lses, touts, tlses, strict=True):
        first = int(random.integers(0, 4))
        partials[1][:, :, :first] = -np.inf
        out, lse, tout, tlse = (x[:, :, first:] for x in partials)
        running.add(out, lse, slice(first, None), tout, tlse)
    running.finish(**found)
    for score, tangent in scores:
        for own, x in ((lses, score), (tlses, tangent)):
            own.append(np.broadcast_to(x[:, None], lses[0].shape))
        for own in (outs, touts):
            own.append(np.zeros_like(outs[0]))
    expected = cuflash.merge(outs, lses, touts=touts, tlses=tlses)
    for name, x in found.items():
        np.testing.assert_allclose(x, getattr(expected, name), rtol=1e-12, atol=1e-12, err_msg=name)


RESULTS = ("out", "lse", "tout", "tlse")


@given(st.integers(0, 2**16), st.integers(1, 4))
def test_splits_of_large_rows_merge_by_row_sums(seed, count):
    """Where rounding leaves nothing of what an lse says: all at once, and one after the other."""
    outs, lses, touts, tlses = example(seed, np.float32, shape=(1, 2, 7, 3), count=count)
    exact = [np.where(x == -np.inf, x, x.astype(np.float64) - 1e9) for x in lses]
    lses = [x.astype(np.float32) for x in exact]
    sums = []
    for x in exact:
        own = np.stack([np.full(x.shape, -1e9), np.exp(np.maximum(x, -2e9) + 1e9), np.ones(x.shape)], axis=-1)
        own[x == -np.inf] = (-np.inf, 0, 1)
        sums.append(own)
    found = {name: np.empty((1, 2, 7, 3) if "out" in name else (1, 2, 7), np.float32) for name in RESULTS}
    tangents = Tangents(found["tout"], found["tlse"], touts, tlses)
    partial_results.merge_into(outs, lses, found["out"], found["lse"], sums, tangents)
    wide = [[x.astype(np.float64) for x in own] for own in (outs, [x + 1e9 for x in exact], touts, tlses)]
    expected = cuflash.merge(*wide[:2], touts=wide[2], tlses=wide[3])
    later = {name: x.copy() for name, x in found.items()}
    one_by_one = partial_results.LargeRows(found["lse"], 128.0, 3)
    for i in range(count):
        one_by_one.add(sums[i], slice(None), outs[i], touts[i], tlses[i])
    with np.errstate(all="ignore"):
        one_by_one.finish(**later)
    for name in ("out", "tout", "tlse"):
        for x in (found[name], later[name]):
            np.testing.assert_allclose(x, getattr(expected, name), rtol=1e-5, atol=1e-5, err_msg=name)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"touts": None}, TypeError, r"^touts: got None, expected that of the call that gave tlses$"),
    ({"tlses": None}, TypeError, r"^tlses: got None, expected that of the call that gave touts$"),
    ({"touts": np.zeros(3)}, TypeError, r"^touts: got ndarray, expected a list or tuple of arrays$"),
    ({"tlses": []}, ValueError, r"^tlses: got 0 arrays, expected 3, one for each of outs$"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_wrong_tangents(change, error, message):
    outs, lses, touts, tlses = example()
    with pytest.raises(error, match=message):
        cuflash.merge(outs, lses, **{"touts": touts, "tlses": tlses} | change)  # type: ignore[call-overload]


def test_wrong_shapes_and_cotangents_without_tangents():
    outs, lses, touts, tlses = example(hides=False)
    wrong = [touts[0], touts[1][:1], touts[2]]
    with pytest.raises(ValueError, match=r"^touts\[1\]: got shape \(1, 3, 4, 5\), expected \(2, 3, 4, 5\)"):
        cuflash.merge(outs, lses, touts=wrong, tlses=tlses)
    with pytest.raises(TypeError, match=r"^tlses\[0\]: got dtype float32, expected float64"):
        cuflash.merge(outs, lses, touts=touts, tlses=[x.astype(np.float32) for x in tlses])
    out, lse = cuflash.merge(outs, lses)
    with pytest.raises(
        TypeError, match=r"^tdout: got an array without other tangents, expected touts, tlses, tout and "
    ):
        cuflash.merge_backward(out, outs, lses, out, lse, tdout=out)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^tlse: got None, expected that of the call that gave touts, tlses, tout$"):
        cuflash.merge_backward(  # type: ignore[call-overload]
            out, outs, lses, out, lse, touts=touts, tlses=tlses, tout=out
        )
