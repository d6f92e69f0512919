"""The oracle on other arrays than NumPy's, on some heads, and on some rows at a time."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.arrays.array_info import view_4d, view_rows
from cuflash.testing import reference, reference_tangents
from cuflash.testing.rule import gradients_of
from cuflash.testing.tangents import COTANGENTS
from tests.device_arrays import DeviceArray, fake_cupy, on_device
from tests.sampling import examples
from tests.scored import scored
from tests.second_derivatives import FEATURES, moved_by

SMALL: dict[str, Any] = {"max_seqlen": 40, "max_head_dim": 9, "max_scores": 2000, "min_seqlen": 0}


@pytest.fixture(scope="module", autouse=True)
def cupy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", fake_cupy())
        yield


def results(problem, arrays, optional, random, convert=lambda x: x, **how):
    """All results of both passes, by name."""
    q, k, v = (convert(arrays[name]) for name in "qkv")
    given = {name: convert(x) for name, x in optional.items()} | random | how
    found = dict(zip(("out", "lse"), reference.forward(problem, q, k, v, **given), strict=True))
    if "dout" in arrays and problem.why_no_gradients is None:
        need = gradients_of(problem)
        given |= {"dlse": convert(arrays["dlse"])} if "dlse" in arrays else {}
        found |= zip(
            need, reference.backward(problem, convert(arrays["dout"]), q, k, v, need=need, **given), strict=True
        )
    return found


def results_with_tangents(case, moved, convert=lambda x: x, **how):
    """Tangents of all results, by name."""
    arrays, problem, tangents = case.arrays(), case.problem, moved.arrays(case)
    inputs = {name: convert(arrays[name]) for name in "qkv"}
    inputs |= {name: convert(x) for name, x in ct.optional(arrays).items()} | case.random | how
    of_inputs = {name[1:]: convert(x) for name, x in tangents.items() if name not in COTANGENTS}
    found = dict(zip(("tout", "tlse"), reference_tangents.jvp(problem, tangents=of_inputs, **inputs), strict=True))
    inputs |= {name: convert(x) for name, x in tangents.items() if name in COTANGENTS}
    inputs |= {"dlse": convert(arrays["dlse"])} if "dlse" in arrays else {}
    need = gradients_of(problem)
    gradients = reference_tangents.backward_jvp(
        problem, convert(arrays["dout"]), tangents=of_inputs, need=need, **inputs
    )
    return found | {f"t{name}": x for name, x in zip(need, gradients, strict=True)}


WITH_TANGENTS = ct.cases(**SMALL, features=FEATURES, score_spreads=(1.0,))


@settings(max_examples=examples(60))
@given(WITH_TANGENTS, st.data(), st.booleans())
def test_tangents_of_arrays_of_cupy_are_those_of_numpy(case, data, is_plain):
    moved = data.draw(moved_by(case))
    dtype = case.arrays()["q"].dtype if is_plain else "float64"
    expected = results_with_tangents(case, moved, dtype=dtype)
    for name, x in results_with_tangents(case, moved, on_device, dtype=dtype).items():
        assert isinstance(x, DeviceArray), name
        np.testing.assert_array_equal(x.values, expected[name], err_msg=name)


@settings(max_examples=examples(60))
@given(WITH_TANGENTS, st.data(), st.integers(1, 20))
def test_tangents_of_heads_and_rows_in_chunks_add_up_to_the_whole(case, data, rows):
    moved = data.draw(moved_by(case))
    heads = list(np.ndindex(case.problem.batch, case.problem.num_heads))
    partials = [results_with_tangents(case, moved, heads=[head], rows_at_once=rows) for head in heads]
    for name, x in results_with_tangents(case, moved).items():
        found = np.sum([partial[name] for partial in partials], axis=0) if partials else np.zeros_like(x)
        size = np.abs(x[np.isfinite(x)]).max(initial=1)
        np.testing.assert_allclose(found, x, rtol=1e-9, atol=1e-9 * size, err_msg=name)


def assert_same_on_device(problem, arrays, optional, random, dtype):
    expected = results(problem, arrays, optional, random, dtype=dtype)
    for name, x in results(problem, arrays, optional, random, on_device, dtype=dtype).items():
        assert isinstance(x, DeviceArray), name
        np.testing.assert_array_equal(x.values, expected[name], err_msg=name)


@given(ct.cases(**SMALL), st.booleans())
def test_arrays_of_cupy_have_the_results_of_numpy(case, is_plain):
    arrays = case.arrays()
    dtype = (
        arrays["q"].dtype if is_plain and arrays["q"].dtype.name not in ("float8_e4m3fn", "float8_e5m2") else "float64"
    )
    assert_same_on_device(case.problem, arrays, ct.optional(arrays), case.random, dtype)


@pytest.mark.parametrize("per", ["tensor", "head", "block", "token"])
def test_fp8_arrays_of_cupy(per):
    sizes: dict[str, Any] = {
        "batch": 2,
        "num_heads": 4,
        "num_heads_kv": 2,
        "seqlen_q": 9,
        "seqlen_k": 40,
        "head_dim": 8,
    }
    case = ct.Case(**sizes, dtype="bfloat16", kv_dtype="float8_e4m3fn", k_scale=per, v_scale=per)
    arrays = case.arrays()
    assert_same_on_device(case.problem, arrays, ct.optional(arrays), {}, np.dtype("float64"))


@settings(max_examples=examples(25))
@given(scored(follows_lengths=True))
def test_functions_on_arrays_of_cupy(case):
    assert_same_on_device(case.problem, case.arrays, case.optional, case.random, "float64")


def assert_partials_add_up(problem, arrays, optional, random, rows):
    """Rows in chunks, and heads one by one: results of heads and rows are partials of the whole, sums add up to it."""
    whole = results(problem, arrays, optional, random)
    heads = list(np.ndindex(problem.batch, problem.num_heads))
    partials = [results(problem, arrays, optional, random, heads=[head], rows_at_once=rows) for head in heads]
    for name, x in whole.items():
        if name == "lse":
            found = np.maximum.reduce([partial[name] for partial in partials], initial=-np.inf)
        else:
            found = np.sum([partial[name] for partial in partials], axis=0) if partials else np.zeros_like(x)
        size = np.abs(x[np.isfinite(x)]).max(initial=1)
        np.testing.assert_allclose(found, x, rtol=1e-9, atol=1e-9 * size, err_msg=name)


@given(ct.cases(**SMALL, score_spreads=(1.0,)), st.integers(1, 20))
def test_heads_and_rows_in_chunks_add_up_to_the_whole(case, rows):
    arrays = case.arrays()
    assert_partials_add_up(case.problem, arrays, ct.optional(arrays), case.random, rows)


@settings(max_examples=examples(25))
@given(scored(follows_lengths=True), st.integers(1, 20))
def test_functions_of_heads_and_rows_in_chunks(case, rows):
    assert_partials_add_up(case.problem, case.arrays, case.optional, case.random, rows)


def test_heads_that_are_not_computed():
    case = ct.Case(batch=2, num_heads=3, num_heads_kv=1, seqlen_q=5, seqlen_k=5, head_dim=4, causal=True)
    found = results(case.problem, case.arrays(), {}, {}, heads=[(1, 2)])
    computed = np.zeros((2, 3), bool)
    computed[1, 2] = True
    for name in ("out", "dq"):
        assert ((view_4d(found[name], case.layout) != 0).any(axis=(2, 3)) == computed).all()
    assert (np.isfinite(view_rows(found["lse"])).all(axis=2) == computed).all()
    assert not found["dk"][0].any() and found["dk"][1].any()


def test_the_stand_in_is_as_strict_as_cupy():
    """Else the tests above could not fail."""
    x = on_device(np.ones((2, 3)))
    for mix in (
        lambda: x + np.ones((2, 3)),
        lambda: np.asarray(x),
        lambda: np.where(x > 0, x, 0),
        lambda: x.max(axis=0, initial=0),
        lambda: x[np.arange(2)],
    ):
        with pytest.raises(TypeError):
            mix()
    assert isinstance(x[0, 0], DeviceArray) and isinstance(x.sum(), DeviceArray)
    x[0, 0] += 1.0
    assert x.values[0, 0] == 2
