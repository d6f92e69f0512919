"""kernels/helpers/merge.cu: that it rounds, adds and merges as NumPy does, for any layout of the arrays."""

import functools
import itertools
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.distributed import reduce
from cuflash.gpu import merging
from cuflash.shards import partial_results, reductions
from tests.emulate.device import ElementwiseKernel, OnDevice
from tests.emulate.launcher import DeviceArray, launcher
from tests.sampling import examples

DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.sampled_from([4, 8, 5, 64, 68, 72]))
COUNTS = st.sampled_from([1, 2, 3, 16, 18])
LAYOUTS = st.sampled_from(["contiguous", "swapped", "sliced"])
NUMBERS = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-8, 1e-38, 1e-40, 65519.9, 65520.0, 1e38, 3.4e38)


@pytest.fixture(scope="module", autouse=True)
def device():
    with launcher("8.0", computes=True):
        yield


def on_device(array, layout="contiguous"):
    """A copy whose axes 1 and 2 are exchanged in memory, or with gaps between its rows."""
    shape = array.shape
    found: Any
    if layout == "swapped" and array.ndim > 2:
        found = DeviceArray((shape[0], shape[2], shape[1], *shape[3:]), array.dtype).swapaxes(1, 2)
    elif layout == "sliced":
        found = DeviceArray((*shape[:-1], shape[-1] + 3), array.dtype)[..., 1:-2]
    else:
        found = DeviceArray(shape, array.dtype)
    found[...] = array
    return found


def drawn(seed, count, shape, dtype):
    """Arrays, some of whose numbers are not usual ones."""
    random = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        found = [random.standard_normal(shape).astype(dtype) for _ in range(count)]
        for x in found:
            x.reshape(-1)[random.integers(0, x.size, 3)] = np.array(random.choice(NUMBERS, 3)).astype(dtype)
    return found


def stored(array):
    """A copy that is no array of NumPy, as elementwise kernels take it."""
    found = OnDevice(array.shape, array.dtype)
    found[...] = array
    return found


def assert_same(got, expected):
    """Bit for bit but for NaN, which is one."""
    got, expected = (np.asarray(x).astype(np.float64) for x in (got, expected))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.nan_to_num(got), np.nan_to_num(expected))


def softmax_dtype(dtype):
    return np.float64 if dtype == "float64" else np.float32


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 66]), SHAPES, st.sampled_from(list(DTYPES)), LAYOUTS)
def test_partial_results_are_added_in_order_and_rounded_once(seed, count, shape, dtype, layout):
    partials = drawn(seed, count, shape, softmax_dtype(dtype))
    with np.errstate(all="ignore"):
        expected = functools.reduce(np.add, partials).astype(DTYPES[dtype])
    found = on_device(np.zeros(shape, DTYPES[dtype]), layout)
    merging.add(found, [on_device(x, layout) for x in partials])
    assert_same(found, expected)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3, 16, 18]),
    SHAPES,
    st.sampled_from(list(DTYPES)),
    LAYOUTS,
    st.booleans(),
)
def test_partial_results_are_merged_as_numpy_does(seed, count, shape, dtype, layout, hides):
    """Rows that attend to no key of a split, or of none, have -inf there, and any numbers."""
    of_sums, random = softmax_dtype(dtype), np.random.default_rng(seed)
    outs = [random.standard_normal(shape).astype(of_sums) for _ in range(count)]
    lses = [(9 * random.standard_normal(shape[:3])).astype(of_sums) for _ in range(count)]
    if hides:
        for out, lse in zip(outs, lses, strict=True):
            hidden = random.integers(0, 2, shape[:3]).astype(bool)
            out[hidden], lse[hidden] = np.nan, -np.inf
    out, lse = np.empty(shape, of_sums), np.empty(shape[:3], of_sums)
    partial_results.merge_into(outs, lses, out, lse)
    got = on_device(np.zeros(shape, DTYPES[dtype]), layout), on_device(np.zeros(shape[:3], of_sums), layout)
    merging.merge(*got, [on_device(x, layout) for x in outs], [on_device(x, layout) for x in lses])
    np.testing.assert_allclose(np.asarray(got[1]), lse, rtol=1e-6)
    resolution = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    np.testing.assert_allclose(np.asarray(got[0]).astype(np.float64), out, rtol=2 * resolution, atol=1e-6)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.integers(0, 2**32), st.integers(2, 3), SHAPES, st.sampled_from(list(DTYPES)), st.sampled_from([0, -3e4, -1e9])
)
def test_pairs_say_what_partial_results_weigh_where_lse_is_large(seed, count, shape, dtype, level):
    """Pairs of lse and what its rounding leaves; also where they are merged to a pair first."""
    of_sums, random = softmax_dtype(dtype), np.random.default_rng(seed)
    outs = [random.standard_normal(shape).astype(of_sums) for _ in range(count)]
    exact = [level + np.log(random.integers(1, 50, shape[:3])) for _ in range(count)]
    pairs = [np.stack([x.astype(of_sums), x - x.astype(of_sums)], axis=-1).astype(of_sums) for x in exact]
    top = np.max(exact, axis=0)
    weights = [np.exp(x - top) for x in exact]
    total = sum(weights)
    expected = sum(w[..., None] * x for w, x in zip(weights, outs, strict=True)) / total[..., None]
    reads = [on_device(x) for x in outs], [on_device(x) for x in pairs]
    got, lse = on_device(np.zeros(shape, DTYPES[dtype])), on_device(np.zeros(shape[:3], of_sums))
    merging.merge(got, lse, *reads)
    close = max(2 * float(ml_dtypes.finfo(DTYPES[dtype]).eps), 2e-15 * abs(level))
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), expected, rtol=close, atol=max(1e-6, close))
    np.testing.assert_allclose(np.asarray(lse), top + np.log(total), rtol=1e-6)
    both = on_device(np.zeros((*shape[:3], 2), of_sums))
    merging.merge(got, both, *reads)
    got_lse = np.asarray(both).astype(np.float64).sum(axis=-1)
    np.testing.assert_allclose(got_lse, top + np.log(total), atol=1e-5 + 2e-15 * abs(level))


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32), SHAPES, st.sampled_from(list(DTYPES)), LAYOUTS, st.booleans())
def test_rows_of_products_are_added_in_one_order_for_any_layout(seed, shape, dtype, layout, has_dlse):
    of_sums, random = softmax_dtype(dtype), np.random.default_rng(seed)
    out, dout = (random.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2))
    dlse = random.standard_normal(shape[:3]).astype(of_sums) if has_dlse else None
    expected = reduce.minus_delta(out.astype(np.float64), dout.astype(np.float64), dlse, np.float64)
    found = []
    for own in ("contiguous", layout):
        into = on_device(np.zeros(shape[:3], of_sums), own)
        given_dlse = None if dlse is None else on_device(dlse, own)
        merging.minus_delta(into, on_device(out, own), on_device(dout, own), given_dlse)
        found.append(np.asarray(into))
    np.testing.assert_array_equal(found[0], found[1])
    bound = 1e-5 if of_sums == np.float32 else 1e-13
    np.testing.assert_allclose(found[0], expected, rtol=bound, atol=bound * shape[-1])


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32), SHAPES, st.sampled_from(list(DTYPES)), st.booleans(), st.booleans())
def test_gradients_of_a_merge_are_those_of_numpy(seed, shape, dtype, has_dlse, is_hidden):
    of_sums, random = softmax_dtype(dtype), np.random.default_rng(seed)
    outs = [random.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2)]
    lses = [random.standard_normal(shape[:3]).astype(of_sums) for _ in range(2)]
    if is_hidden:
        lses[0][..., 0] = -np.inf
    dout, dlse = random.standard_normal(shape).astype(DTYPES[dtype]), random.standard_normal(shape[:3]).astype(of_sums)
    out, lse = np.empty_like(outs[0]), np.empty_like(lses[0])
    partial_results.merge_into(outs, lses, out, lse)
    reads = (dout, outs[0], out, lses[0], lse, dlse if has_dlse else None)
    right = np.zeros(shape, DTYPES[dtype]), np.zeros(shape[:3], of_sums)
    with np.errstate(all="ignore"):
        partial_results.merge_backward_into(right[0], right[1], *reads)
    got = on_device(right[0]), on_device(right[1])
    merging.merge_backward(got[0], got[1], *(None if x is None else on_device(x) for x in reads))
    resolution = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    for x, y in zip(got, right, strict=True):
        x, y = (np.asarray(z).astype(np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=2 * resolution, atol=16 * float(np.finfo(of_sums).eps) * shape[-1])


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([np.float32, np.float64]), st.booleans())
def test_gradients_of_merged_row_reductions_are_those_of_numpy(seed, count, dtype, is_hidden):
    """Those of CuPy's elementwise kernels, compiled for the CPU."""
    random, rows = np.random.default_rng(seed), (2, 3, 5)
    maxes, entropies, lses = (list(random.integers(0, 4, (count, *rows)).astype(dtype)) for _ in range(3))
    lses = [x + random.standard_normal(rows).astype(dtype) for x in lses]
    if is_hidden:
        maxes[0][0], lses[0][0], entropies[0][0] = -np.inf, -np.inf, np.nan
    dlse, dmax, dentropy, lse, entropy = random.standard_normal((5, *rows)).astype(dtype)
    largest = np.max(maxes, axis=0)
    sys.modules["cupy"].__dict__["ElementwiseKernel"] = ElementwiseKernel
    results = []
    for convert in (np.copy, stored):
        left, found = convert(dmax), [[convert(x) for x in (dlse, dlse, dlse)] for _ in range(count)]
        with np.errstate(all="ignore"):
            for (of_max, of_entropy, of_lse), *own in zip(found, maxes, entropies, lses, strict=True):
                own_max, own_entropy, own_lse = map(convert, own)
                reductions.max_backward(of_max, left, own_max, convert(largest))
                of_all = map(convert, (entropy, lse, dentropy))
                reductions.entropy_backward(of_entropy, of_lse, own_entropy, own_lse, *of_all)
        results.append([np.asarray(getattr(x, "host", x)) for x in (left, *itertools.chain(*found))])
    for right, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5 if dtype == np.float32 else 1e-13)


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), SHAPES, st.sampled_from(["float32", "float64"]))
def test_steps_of_online_softmax_merge_one_after_the_other(seed, count, shape, dtype):
    random = np.random.default_rng(seed)
    outs = [random.standard_normal(shape).astype(dtype) for _ in range(count)]
    lses = [(9 * random.standard_normal(shape[:3])).astype(dtype) for _ in range(count)]
    out, lse = np.empty(shape, dtype), np.empty(shape[:3], dtype)
    partial_results.merge_into(outs, lses, out, lse)
    total, row_max, row_sum = (
        on_device(np.full(own, value, dtype)) for own, value in ((shape, 0), (shape[:3], -np.inf), (shape[:3], 0))
    )
    factor, weight = on_device(np.empty(shape[:3], dtype)), on_device(np.empty(shape[:3], dtype))
    for x, own_lse in zip(outs, lses, strict=True):
        merging.softmax_step(row_max, row_sum, factor, weight, on_device(own_lse))
        merging.rescale_and_add(total, on_device(x), factor, weight)
    got = on_device(np.empty(shape, dtype)), on_device(np.empty(shape[:3], dtype))
    merging.normalize(*got, total, row_max, row_sum)
    for x, y in zip(got, (out, lse), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=2e-5, atol=1e-5)


# ---- with tangents ---------------------------------------------------------------------------------------------------

PARTIALS = ("out", "lse", "tout", "tlse")


def partials_with_tangents(seed, count, shape, dtype, hides):
    """outs, lses, touts and tlses; of rows that attend to no key of a split, anything."""
    random, sums = np.random.default_rng(seed), softmax_dtype(dtype)
    found: dict[str, list[np.ndarray]] = {name: [] for name in PARTIALS}
    for _ in range(count):
        hidden = random.integers(0, 3, shape[:3]) == 0 if hides else np.zeros(shape[:3], bool)
        for name, own in found.items():
            x = (3 * random.standard_normal(shape if "out" in name else shape[:3])).astype(
                DTYPES[dtype] if "out" in name else sums
            )
            x[hidden] = -np.inf if name == "lse" else np.nan
            own.append(x)
    return found


def assert_near(found, expected, dtype, columns):
    """Within rounding of results, and of sums in the dtype of lse."""
    for name, x in found.items():
        y = np.asarray(expected[name]).astype(np.float64)
        sums = float(np.finfo(softmax_dtype(dtype)).eps)
        unit = 2 * float(ml_dtypes.finfo(DTYPES[dtype]).eps) if "out" in name else 32 * sums
        np.testing.assert_allclose(
            np.asarray(x).astype(np.float64), y, rtol=unit, atol=64 * sums * columns, err_msg=name
        )


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32), COUNTS, SHAPES, st.sampled_from(list(DTYPES)), LAYOUTS, st.booleans())
def test_tangents_are_merged_as_numpy_does(seed, count, shape, dtype, layout, hides):
    given_partials = partials_with_tangents(seed, count, shape, dtype, hides)
    outs, lses, touts, tlses = given_partials.values()
    zeros = {name: np.zeros_like(own[0]) for name, own in given_partials.items()}
    right = {name: x.copy() for name, x in zeros.items()}
    partial_results.merge_into(
        outs, lses, right["out"], right["lse"], (), merging.Tangents(right["tout"], right["tlse"], touts, tlses)
    )
    got = {name: on_device(x, layout) for name, x in zeros.items()}
    outs, lses, touts, tlses = ([on_device(x, layout) for x in own] for own in given_partials.values())
    merging.merge(got["out"], got["lse"], outs, lses, merging.Tangents(got["tout"], got["tlse"], touts, tlses))
    assert_near(got, right, dtype, 1)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32), SHAPES, st.sampled_from(list(DTYPES)), st.lists(st.booleans(), min_size=4, max_size=4))
def test_tangents_of_gradients_of_a_merge_are_those_of_numpy(seed, shape, dtype, has):
    *has, hides = has
    partials = partials_with_tangents(seed, 2, shape, dtype, hides)
    outs, lses, touts, tlses = partials.values()
    random, sums = np.random.default_rng(seed + 1), softmax_dtype(dtype)
    merged = {name: np.zeros_like(own[0]) for name, own in partials.items()}
    partial_results.merge_into(
        outs, lses, merged["out"], merged["lse"], (), merging.Tangents(merged["tout"], merged["tlse"], touts, tlses)
    )
    merged["dout"], tdout = (random.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2))
    dlse, tdlse = (random.standard_normal(shape[:3]).astype(sums) for _ in range(2))
    optional = dict(zip(("dlse", "tdlse", "tdout"), (dlse, tdlse, tdout), strict=True))
    merged |= {name: x for (name, x), is_given in zip(optional.items(), has, strict=True) if is_given}
    own = [partials[name][0] for name in PARTIALS]
    right = [np.zeros_like(partials[name][0]) for name in PARTIALS]
    with np.errstate(all="ignore"):
        partial_results.merge_backward_into(
            right[0], right[1], merged["dout"], own[0], merged["out"], own[1], merged["lse"], merged.get("dlse")
        )
        partial_results.merge_backward_tangents_into(right, own, merged)
    there = {name: on_device(x) for name, x in merged.items()}
    got = [on_device(np.zeros_like(x)) for x in right]
    both = ("out", "tout", "lse", "tlse")
    reads = (there["dout"], *(x for name in both for x in (on_device(partials[name][0]), there[name])))
    merging.merge_backward_tangents(got[2], got[3], reads, *(there.get(name) for name in optional))
    assert_near({"tout": got[2], "tlse": got[3]}, {"tout": right[2], "tlse": right[3]}, dtype, 8 * shape[-1])


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), SHAPES, st.sampled_from(["float32", "float64"]), st.booleans())
def test_steps_of_online_softmax_merge_tangents_one_after_the_other(seed, count, shape, dtype, hides):
    partials = partials_with_tangents(seed, count, shape, dtype, hides)
    right = {name: np.zeros_like(own[0]) for name, own in partials.items()}
    outs, lses, touts, tlses = partials.values()
    partial_results.merge_into(
        outs, lses, right["out"], right["lse"], (), merging.Tangents(right["tout"], right["tlse"], touts, tlses)
    )
    rows = {name: on_device(np.zeros(shape[:3], dtype)) for name in ("row_sum", "factor", "weight", "a", "b")}
    total, tangent, tlse = (on_device(np.zeros(own, dtype)) for own in (shape, shape, shape[:3]))
    row_max = on_device(np.full(shape[:3], -np.inf, dtype))
    for partial in zip(*partials.values(), strict=True):
        out, lse, tout, own_tlse = map(on_device, partial)
        shifts = rows["a"], rows["b"]
        state = (row_max, rows["row_sum"], rows["factor"], rows["weight"])
        merging.softmax_step(*state, lse, (tlse, *shifts, own_tlse))
        merging.rescale_and_add(total, out, rows["factor"], rows["weight"], (tangent, tout, *shifts))
    got = {name: on_device(x) for name, x in right.items()} | {"tlse": tlse}
    for name, sums in (("out", total), ("tout", tangent)):
        merging.normalize(got[name], got["lse"], sums, row_max, rows["row_sum"])
    assert_near(got, right, dtype, 4 * count)
