"""What a problem says of itself against brute force: mask, sizes, work, strides."""

import dataclasses
import inspect
import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.arrays.array_info import ITEMSIZE, Operand, check_array, user_shape, view_4d, view_rows
from cuflash.gpu.params import parameters
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.inputs import NUMBERS
from cuflash.spec.options import Options, Origin
from cuflash.spec.problem import make_problem


def problem_of(seqlen_q, seqlen_k, head_dim=4, head_dim_v=4, batch=1, heads=1, heads_kv=1, dtype=np.float32, **options):
    shapes = (heads, seqlen_q, head_dim), (heads_kv, seqlen_k, head_dim), (heads_kv, seqlen_k, head_dim_v)
    return make_problem(Options(**options), *(np.empty((batch, *shape), dtype) for shape in shapes))


def formula(seqlen_q, seqlen_k, causal, window):
    """The matrix of visible pairs, as the documentation defines it."""
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    d = 0 if causal == "top_left" else seqlen_k - seqlen_q
    visible = np.ones((seqlen_q, seqlen_k), bool)
    if causal:
        visible &= j <= i + d
    left, right = window or (None, None)
    if left is not None:
        visible &= j >= i + d - left
    if right is not None:
        visible &= j <= i + d + right
    return visible


sides = st.none() | st.integers(0, 20)


@given(
    st.integers(0, 15),
    st.integers(0, 15),
    st.sampled_from([False, True, "top_left"]),
    st.none() | st.tuples(sides, sides),
)
def test_every_description_of_the_window_agrees(seqlen_q, seqlen_k, causal, window):
    problem = problem_of(seqlen_q, seqlen_k, batch=2, heads=3, causal=causal, window=window)
    visible = formula(seqlen_q, seqlen_k, causal, window)
    for row in range(seqlen_q):
        first, stop = problem.key_range(row)
        assert 0 <= first <= stop <= seqlen_k
        assert visible[row].nonzero()[0].tolist() == list(range(first, stop))
    assert problem.visible_pairs == 6 * visible.sum()
    j_minus_i = np.arange(seqlen_k) - np.arange(seqlen_q)[:, None] - problem.diagonal
    left, right = problem.window_left, problem.window_right
    bounds = (True if left is None else j_minus_i >= -left) & (True if right is None else j_minus_i <= right)
    np.testing.assert_array_equal(np.broadcast_to(bounds, visible.shape), visible)


@pytest.mark.parametrize("causal", [True, "top_left"])
def test_square_problems_do_not_know_the_alignment(causal):
    problem = problem_of(7, 7, causal=causal)
    assert replace(problem, alignment="bottom_right") == problem_of(7, 7, window=(None, 0))


@pytest.mark.parametrize("window", [(9, 9), (None, 9), (6, 6), (None, None)])
def test_a_window_that_hides_nothing_is_none(window):
    assert problem_of(7, 7, window=window) == problem_of(7, 7)


def test_a_single_query_sees_all_keys_before_it():
    assert problem_of(1, 100, causal=True) == problem_of(1, 100)
    assert problem_of(1, 100, causal="top_left").visible_pairs == 1


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_shapes_and_views_of_layouts(layout, ndim):
    batch, heads, seqlen, dim = 2 if ndim == 4 else 1, 3 if ndim > 2 else 1, 5, 8
    shape = user_shape(batch, heads, seqlen, dim, ndim, layout)
    x = np.arange(batch * heads * seqlen * dim, dtype=np.float32).reshape(shape)
    view = view_4d(x, layout)
    assert view.shape == (batch, heads, seqlen, dim)
    assert np.shares_memory(view, x)
    problem = make_problem(Options(layout=layout), x, x, x)
    assert (problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim) == view.shape
    assert problem.out_shape == x.shape
    assert problem.lse_shape == ((batch, heads, seqlen)[4 - ndim :])
    assert view_rows(np.empty(problem.lse_shape)).shape == (batch, heads, seqlen)
    sizes = zip(problem.q.shape, problem.q.strides, [s // 4 for s in view.strides], strict=True)
    assert all(got == expected for n, got, expected in sizes if n > 1)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides_are_in_elements_and_may_be_anything(layout):
    x = np.empty((4, 6, 10, 16), ml_dtypes.bfloat16)[::2, ::-1, 1:, ::-2]
    operand = make_problem(Options(layout=layout), x, x, x).k
    expected = view_4d(x, layout)
    assert operand.shape == expected.shape
    assert operand.strides == tuple(s // 2 for s in expected.strides)
    assert operand.dtype == "bfloat16"


@pytest.mark.parametrize("shape", [(), (1,), (6,), (5, 1), (3, 5, 6), (2, 1, 5, 6), (2, 3, 5, 6), (1, 1, 1, 1)])
def test_broadcast_axes_have_stride_zero(shape):
    q, k = np.empty((2, 3, 5, 4)), np.empty((2, 3, 6, 4))
    bias, mask = np.empty(shape), np.empty(shape, bool)
    problem = make_problem(Options(), q, k, k, bias=bias, mask=mask)
    expected = np.broadcast_to(bias, (2, 3, 5, 6))
    for operand, itemsize in ((problem.bias, 8), (problem.mask, 1)):
        assert operand is not None
        assert operand.shape == (2, 3, 5, 6)
        assert operand.strides == tuple(s // 8 for s in expected.strides)
        assert operand.nbytes == bias.size * itemsize


@pytest.mark.parametrize(("shape", "strides"), [((3,), (0, 1)), ((2, 3), (3, 1))])
def test_slopes_broadcast_over_the_batch(shape, strides):
    q = np.empty((2, 3, 5, 4), np.float16)
    problem = make_problem(Options(), q, q, q, alibi_slopes=np.empty(shape, np.float32))
    assert problem.alibi_slopes == Operand(shape=(2, 3), strides=strides, dtype="float32")


def test_sinks_are_a_number_for_each_head():
    q = np.empty((2, 3, 5, 4), np.float16)
    sinks = np.empty(7, np.float32)[5::-2]
    problem = make_problem(Options(), q, q, q, sinks=sinks)
    assert problem.sinks == Operand(shape=(3,), strides=(-2,), dtype="float32")
    assert problem.forward_bytes == make_problem(Options(), q, q, q).forward_bytes + 12


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    problem = problem_of(3, 5, dtype=dtype)
    assert problem.dtype == dtype.name
    assert problem.softmax_dtype == ("float64" if dtype == np.float64 else "float32")
    q = np.empty((3, 4), dtype)
    for bias_dtype in (dtype, problem.softmax_dtype):
        bias = make_problem(Options(), q, q, q, bias=np.empty(3, bias_dtype)).bias
        assert bias is not None and bias.dtype == np.dtype(bias_dtype).name


def test_item_sizes_are_those_of_numpy():
    for name, size in ITEMSIZE.items():
        assert np.dtype(getattr(ml_dtypes, name, name)).itemsize == size


def test_defaults():
    problem = problem_of(3, 5, head_dim=64, heads=6, heads_kv=2)
    assert problem.scale == 0.125
    assert problem.group_size == 3
    assert problem.diagonal == 2
    assert (problem.window_left, problem.window_right, problem.softcap) == (None, None, None)
    assert problem_of(3, 5, scale=0).scale == 0
    assert problem_of(3, 5, scale=np.float32(-2)).scale == -2


def test_work_and_traffic():
    problem = problem_of(100, 200, head_dim=64, head_dim_v=32, batch=2, heads=6, heads_kv=3, dtype=np.float16)
    pairs = 2 * 6 * 100 * 200
    assert problem.forward_flops == 2 * pairs * (64 + 32)
    assert problem.backward_flops == 2 * pairs * (3 * 64 + 2 * 32)
    assert problem.naive_bytes == 4 * pairs
    q, k, v, out, lse = 2 * 6 * 100 * 64, 2 * 3 * 200 * 64, 2 * 3 * 200 * 32, 2 * 6 * 100 * 32, 2 * 6 * 100
    assert problem.forward_bytes == 2 * (q + k + v + out) + 4 * lse
    assert problem.backward_bytes == 2 * (q + k + v + out + out + q + k + v) + 4 * lse


def test_pairs_of_long_problems_are_counted_exactly_and_without_an_array_of_their_rows():
    n = 2**30
    assert problem_of(n, n, head_dim=1, head_dim_v=1, causal=True).visible_pairs == n * (n + 1) // 2
    assert problem_of(n, n, head_dim=1, head_dim_v=1, window=(2, 1)).visible_pairs == 4 * n - (2 + 1) - 1


def test_problems_and_options_are_keys():
    first, second = problem_of(3, 5, causal=True), problem_of(3, 5, causal=True)
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, problem_of(3, 5), problem_of(3, 5, deterministic=True)}) == 3
    assert len({Options(), Options(scale=None), Options(scale=1), Options(scale=1.0)}) == 2
    of_numpy: dict[str, Any] = {"window": [np.int64(1), 2], "causal": np.True_}
    assert hash(Options(**of_numpy)) == hash(Options(window=(1, 2), causal=True))
    for frozen in (first, Options()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.layout = "bshd"  # type: ignore[misc]  # what is tested


def test_instances_with_equal_options_are_equal():
    of_numpy: dict[str, Any] = {"causal": np.True_, "scale": np.float32(1)}
    first, second = cuflash.FlashAttention(causal=True, scale=1), cuflash.FlashAttention(**of_numpy)
    assert first == second and hash(first) == hash(second)
    assert len({first, second, cuflash.FlashAttention(), cuflash.FlashAttention(scale=1)}) == 3
    assert first != first.options and cuflash.FlashAttention() != None  # noqa: E711 (what is tested)


# ---- numbers and bools of other types --------------------------------------------------------------------------------

FLOATS = (float, np.float64, np.longdouble, np.array, Decimal, Fraction, lambda x: np.array(x, object))
INTEGERS = (int, np.int64, np.uint16, np.array, Decimal, Fraction)


@given(st.floats(2.0**-48, 2.0**48), st.sampled_from(FLOATS))
def test_numbers_of_any_type(value, convert):
    """Everything that goes on from there has Python's own numbers."""
    options = Options(scale=convert(-value), softcap=convert(value), dropout=convert(min(value, 0.9)))
    assert options == Options(scale=-value, softcap=value, dropout=min(value, 0.9))
    assert {type(x) for x in (options.scale, options.softcap, options.dropout)} == {float}


@given(st.sampled_from([np.float16, np.float32, ml_dtypes.bfloat16, np.int8, lambda x: Fraction(int(x), 3)]))
def test_numbers_are_rounded_to_float64_at_most(convert):
    assert Options(scale=convert(3)).scale == float(convert(3))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_options_keep_their_numbers(dtype):
    """The scale that follows from a head dimension is not that of later problems with the same options."""
    options = cuflash.FlashAttention().options
    for head_dim in (1, 16, 64, 16):
        x = np.empty((1, 4, head_dim), dtype)
        assert make_problem(options, x, x, x).scale == head_dim**-0.5
    assert options.numbers == dict.fromkeys(NUMBERS)


@given(st.integers(0, 2**16 - 1), st.integers(1, 64), st.sampled_from(INTEGERS))
def test_integers_of_any_type(value, blocks, convert):
    options = Options(window=(convert(value), None), block_size=(convert(16 * blocks), convert(128)))
    assert options == Options(window=(value, None), block_size=(16 * blocks, 128))
    assert options.window is not None and isinstance(options.block_size, tuple)
    assert {type(x) for x in (options.window[0], *options.block_size)} == {int}
    mask = cuflash.dropout_mask(convert(value), convert(1), convert(1), 1, 2, 3, 0.5)
    np.testing.assert_array_equal(mask, cuflash.dropout_mask(value, 1, 1, 1, 2, 3, 0.5))


@pytest.mark.parametrize("convert", [bool, np.bool_, np.array])
def test_bools_of_any_type(convert):
    for value in (False, True):
        options = Options(causal=convert(value), deterministic=convert(value))
        assert options == Options(causal=value, deterministic=value)
        assert type(options.causal) is type(options.deterministic) is bool


# ---- ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_scale_and_softcap_are_in_the_range_of_the_dtype(dtype):
    exponent = 384 if dtype == "float64" else 48
    highest = {"float32": 48, "float64": 384}.get(dtype, 16)  # of softcap
    largest, largest_softcap, array = 2.0**exponent, 2.0**highest, getattr(ml_dtypes, dtype, dtype)
    beyond, beyond_softcap = math.nextafter(largest, math.inf), math.nextafter(largest_softcap, math.inf)
    for scale in (largest, -largest, 0.0, 5e-324):
        assert problem_of(3, 5, dtype=array, scale=scale).scale in (scale, 0.0)
    for softcap in (largest_softcap, 1 / largest):
        assert problem_of(3, 5, dtype=array, softcap=softcap).softcap == softcap
    for scale in (beyond, -beyond, 1.7e308):
        with pytest.raises(
            ValueError, match=rf"^scale: got -?\d.*, expected -2\*\*{exponent} to .* for {dtype} arrays$"
        ):
            problem_of(3, 5, dtype=array, scale=scale)
    for softcap in (beyond_softcap, 1.7e308, math.nextafter(1 / largest, 0), 5e-324):
        with pytest.raises(
            ValueError, match=rf"^softcap: got \d.*, expected 2\*\*-{exponent} to .* for {dtype} arrays$"
        ):
            problem_of(3, 5, dtype=array, softcap=softcap)


@given(st.floats(-(2.0**48), 2.0**48), st.none() | st.floats(2.0**-48, 2.0**48), st.sampled_from(["f4", "f8"]))
def test_kernels_get_finite_numbers(scale, softcap, dtype):
    plan = choose_plan(problem_of(64, 64, dtype=dtype, scale=scale, softcap=softcap), DeviceSpec.for_arch("8.0"))
    params = parameters(plan, {})
    for name in ("scale", "softcap", "scale_float64", "softcap_float64"):
        assert np.isfinite(params[name]).all()
    # -inf, the score of a pair that is hidden, times 0 is NaN.
    if dict(plan.kernels[0].defines)["CUFLASH_SCALE_IN_EXPONENT"]:
        assert params["scale" if dtype == "f4" else "scale_float64"] > 0


def test_options_are_the_keywords_of_flash_attention():
    fields = {field.name: field.default for field in dataclasses.fields(Options)}
    of_slices = {"diagonal": None, "origin": Origin(), "wide": (), "shares_device": False}  # of longer problems
    assert {name: fields.pop(name) for name in of_slices} == of_slices
    keywords = inspect.signature(cuflash.FlashAttention).parameters
    fields["mask"] = fields.pop("mask_function")
    assert {name: p.default for name, p in keywords.items()} == fields


def test_check_array():
    check_array("out", np.empty((2, 3), np.float32), (2, 3), "float32")
    with pytest.raises(ValueError, match=r"^out: got shape \(3, 2\), expected \(2, 3\)$"):
        check_array("out", np.empty((3, 2), np.float32), (2, 3), "float32")
    with pytest.raises(TypeError, match=r"^lse: got dtype float16, expected float32$"):
        check_array("lse", np.empty((2, 3), np.float16), (2, 3), "float32")


SIDES = st.none() | st.integers(0, 12)


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from((False, True, "top_left")),
    st.none() | st.tuples(SIDES, SIDES),
    st.none() | st.integers(-12, 12),
)
def test_a_problem_has_options_that_make_it_again(lengths, causal, window, diagonal):
    """Slices of longer problems too, which have any diagonal."""
    problem = problem_of(*lengths, causal=causal, window=window, diagonal=diagonal)
    assert problem.diagonal == diagonal or diagonal is None
    options = {field.name: getattr(problem.options, field.name) for field in dataclasses.fields(Options)}
    assert problem_of(*lengths, **options) == problem


@given(st.integers(0, 9), st.integers(0, 9), st.none() | st.tuples(SIDES, SIDES), st.data())
def test_diagonals_that_follow_lengths(seqlen_q, seqlen_k, window, data):
    """Each batch entry is as the problem of its own keys; and options make the problem again."""
    arrays = [np.empty((2, 1, n, 4), np.float32) for n in (seqlen_q, seqlen_k, seqlen_k)]
    lengths = np.array(data.draw(st.lists(st.integers(0, seqlen_k), min_size=2, max_size=2)))
    problem = make_problem(Options(causal="lengths", window=window), *arrays, kv_lengths=lengths)
    assert problem.follows_lengths and problem.diagonal == seqlen_k - seqlen_q
    assert make_problem(problem.options, *arrays, kv_lengths=lengths) == problem
    for length in lengths:
        own = problem.aligned_to(int(length))
        visible = formula(seqlen_q, int(length), True, window)
        for row in range(seqlen_q):
            first, stop = own.key_range(row)
            stop = min(stop, int(length))
            assert visible[row].nonzero()[0].tolist() == list(range(first, max(first, stop)))
