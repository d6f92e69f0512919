"""Traced functions: values, derivatives, intervals and emitted text, of drawn expressions, against NumPy."""

import ctypes
import pickle
import subprocess
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.emulator import find_compiler
from cuflash.gpu.compiler import kernel_directory
from cuflash.score_mod import Traced, hoisted_program_of, index_class, program_of
from cuflash.score_mod.derivatives import loads_of
from cuflash.score_mod.evaluation import clamped, evaluate, fold
from cuflash.score_mod.factors import factored
from cuflash.score_mod.intervals import Tables, bounds_of
from tests import expressions
from tests.expressions import BATCH, HEADS, SEQLEN_K, SEQLEN_Q, hoistable_scores, masks, scores
from tests.sampling import examples

ROWS, KEYS = np.arange(SEQLEN_Q)[:, None], np.arange(SEQLEN_K)[None, :]
S = np.random.default_rng(1).standard_normal((SEQLEN_Q, SEQLEN_K)) * 2
STEP = 1e-6


def inputs(s=S, head=1, batch=1):
    return {"s": s, "i": ROWS, "j": KEYS, "head": head, "batch": batch}


def program(score=None, mask=None, given=None):
    given = expressions.arrays() if given is None else given
    arrays = tuple((name, x.ndim, x.dtype.name) for name, x in given.items())
    of_score = None if score is None else Traced.of(score, "score")
    return program_of(of_score, None if mask is None else Traced.of(mask, "mask"), arrays)


def hoisted(score, mask, given, dtype):
    """The program with tables."""
    arrays = tuple((name, x.ndim, x.dtype.name) for name, x in given.items())
    of_mask = None if mask is None else Traced.of(mask, "mask")
    return hoisted_program_of(Traced.of(score, "score"), of_mask, arrays, np.dtype(dtype).name, True)


def called(function, given, s=None, dtype=np.float64, **others):
    """What a function gives on NumPy arrays."""
    at = inputs(**({} if s is None else {"s": s}), **others)
    traced = Traced.of(function, "mask" if s is None else "score")
    return np.broadcast_to(traced(at, given, dtype), S.shape)


@settings(max_examples=examples(60))
@given(scores(), st.sets(st.sampled_from(["s", "i", "j", "head", "batch"])))
def test_folded_expressions_have_the_same_values(score, known):
    """Bit by bit, whatever inputs are known before."""
    given = expressions.arrays()
    own, at = program(score).on_numpy(), inputs()
    roots = [own.score, own.by_s, *(load.derivative for loads in own.loads.values() for load in loads)]
    before = {name: x for name, x in at.items() if name in known}
    folded = fold(roots, before, {name: x.shape for name, x in given.items()}, S.dtype)
    assert not any(step.op == "input" and step.payload in known for step in folded.steps)
    others = {name: x for name, x in at.items() if name not in known}
    found = evaluate(roots, others, given, S.dtype, folded)
    for x, expected in zip(found, evaluate(roots, at, given, S.dtype), strict=True):
        np.testing.assert_array_equal(x, expected)
        assert x.dtype == expected.dtype


@settings(max_examples=examples(60))
@given(scores())
def test_expression_is_the_function(score):
    given = expressions.arrays()
    expected = called(score, given, S)
    (got,) = evaluate([program(score).score], inputs(), given, np.float64)
    np.testing.assert_allclose(np.broadcast_to(got, S.shape), expected, rtol=1e-12, atol=1e-12)
    traced = Traced.of(score, "score")
    assert pickle.loads(pickle.dumps(traced)) == traced and hash(traced) == hash(Traced.of(score, "score"))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(traced))(inputs(), given, np.float64) + 0 * S, got + 0 * S)


@settings(max_examples=examples(60))
@given(scores(), st.sampled_from(["scalar", "of_head", "of_row", "of_key", "table", "pairs"]), st.integers(0, 99))
def test_derivatives_are_those_of_differences(score, name, seed):
    given, made = expressions.arrays(), program(score)
    direction = np.random.default_rng(seed).standard_normal(given[name].shape)
    by_s, along = (np.broadcast_to(x, S.shape) for x in derivatives_along(made, given, name, direction))

    def moved(h):
        return called(score, given | {name: given[name] + h * direction}, S)

    for got, at in ((by_s, lambda h: called(score, given, S + h)), (along, moved)):
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right, left = (at(STEP) - at(0.0)) / STEP, (at(0.0) - at(-STEP)) / STEP
            size = np.maximum(1, np.abs(right) + np.abs(at(0.0)))
            is_smooth = np.abs(right - left) <= 1e-4 * size  # no kink and no step between the two
            assert is_smooth.mean() > 0.2 or not np.isfinite(size).all()
            assert np.all((np.abs(got - (right + left) / 2) <= 1e-4 * size)[is_smooth])


# ---- where the chain rule meets 0 times infinity ---------------------------------------------------------------------


def of_two(function):
    """A score of two numbers."""
    return lambda s, i, j, *, a, b: s + function(a[i], b[i])


LOG2 = np.log(2)
# Functions of two numbers, with points and the derivatives there.
AT_POINTS: list[tuple[Any, list[tuple[tuple[float, float], tuple[float, float]]]]] = [
    (lambda a, b: a**b, [((0.0, 1.5), (0, 0)), ((0.0, 1.0), (1, 0)), ((0.0, 0.0), (0, 0)), ((2.0, 0.0), (0, LOG2))]),
    (lambda a, b: (a * a) ** b, [((0.0, 0.75), (0, 0)), ((-2.0, 1.0), (-4, 8 * LOG2))]),
    (lambda a, b: b * abs(a) ** b, [((0.0, 1.5), (0, 0)), ((-1.0, 2.0), (-4, 1))]),
    (lambda a, b: b * cuflash.sqrt(a), [((0.0, 0.0), (0, 0)), ((4.0, 2.0), (0.5, 2))]),
    (lambda a, b: cuflash.sqrt(a * a + b * b), [((0.0, 0.0), (0, 0)), ((3.0, -4.0), (0.6, -0.8))]),
    (lambda a, b: cuflash.sqrt((a - b) ** 2), [((1.0, 1.0), (0, 0)), ((1.0, 2.0), (-1, 1))]),
    (lambda a, b: b / (1 + cuflash.exp(-a)), [((-1000.0, 2.0), (0, 0)), ((0.0, 2.0), (0.5, 0.5))]),
    (lambda a, b: cuflash.log(1 + cuflash.exp(a)) * b, [((-1000.0, 2.0), (0, 0)), ((0.0, 2.0), (1, LOG2))]),
    (lambda a, b: cuflash.exp(-b / (a * a)), [((0.0, 2.0), (0, 0)), ((1.0, 0.0), (0, -1))]),
    (lambda a, b: cuflash.exp(-cuflash.exp(a)) * b, [((1000.0, 2.0), (0, 0)), ((0.0, 2.0), (-2 / np.e, 1 / np.e))]),
    (lambda a, b: cuflash.tanh(b / (a * a)), [((0.0, 2.0), (0, 0)), ((1.0, 0.0), (0, 1))]),
    (lambda a, b: cuflash.where(a > 0, a**b * cuflash.log(a), 0), [((0.0, 0.5), (0, 0)), ((1.0, 2.0), (1, 0))]),
    (lambda a, b: cuflash.maximum(a, 0) ** b, [((0.0, 1.5), (0, 0)), ((-1.0, 1.5), (0, 0)), ((1.0, 2.0), (2, 0))]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "points"), AT_POINTS)
def test_derivatives_at_points_where_a_factor_is_infinite(function, points):
    given = {name: np.array([point[n] for point, _ in points]) for n, name in enumerate("ab")}
    made = program_of(Traced.of(of_two(function), "score"), None, (("a", 1, "float64"), ("b", 1, "float64")))
    at = {"s": np.zeros((len(points), 1)), "i": np.arange(len(points))[:, None], "j": np.zeros((1, 1), int)}
    for n, name in enumerate("ab"):
        found = evaluate([load.derivative for load in made.loads[name]], at, given, np.float64)
        total = np.broadcast_to(sum(found), (len(points), 1))[:, 0]
        np.testing.assert_allclose(total, [derivatives[n] for _, derivatives in points], rtol=1e-12, atol=1e-300)


# Smooth functions and kinks, with values and slopes that are 0 or infinite somewhere, but no poles.
_STEEP = st.recursive(
    st.sampled_from([lambda a, b: a, lambda a, b: b, lambda a, b: a * 2, lambda a, b: 1.0]),
    lambda inner: st.one_of(
        st.builds(
            lambda f, x: lambda a, b: f(x(a, b)),
            st.sampled_from([
                lambda x: -x, abs, lambda x: x * x, cuflash.exp, cuflash.tanh, cuflash.sin,
                lambda x: cuflash.sqrt(abs(x)), lambda x: cuflash.sqrt(x * x), lambda x: 1 / (1 + cuflash.exp(-x)),
                lambda x: cuflash.log(1 + cuflash.exp(x)), lambda x: cuflash.exp(-1 / (x * x)), lambda x: abs(x) ** 1.5,
                lambda x: x / (1 + x * x), lambda x: cuflash.where(x > 0, cuflash.sqrt(x) * cuflash.log(x), 0.0),
            ]),
            inner,
        ),
        st.builds(
            lambda f, x, y: lambda a, b: f(x(a, b), y(a, b)),
            st.sampled_from([
                lambda x, y: x + y, lambda x, y: x * y, lambda x, y: cuflash.sqrt(x * x + y * y),
                lambda x, y: abs(x) ** (1 + y * y), lambda x, y: x * cuflash.sqrt(abs(y)),
                lambda x, y: x / (1 + cuflash.exp(y)),
            ]),
            inner, inner,
        ),
    ),
    max_leaves=5,
)  # fmt: skip
_VALUES = st.sampled_from((0.0, 0.0, 1.0, -1.0, 0.5, -3.0, 1000.0, -1000.0))


@settings(max_examples=examples(400))
@given(_STEEP, _VALUES, _VALUES)
def test_derivatives_are_no_nan_where_there_are_differences(function, a, b):
    """They are between those to the left and to the right."""
    traced = Traced.of(of_two(function), "score")
    made = program_of(traced, None, (("a", 1, "float64"), ("b", 1, "float64")))
    at = {"s": np.zeros((1, 1)), "i": np.zeros((1, 1), int), "j": np.zeros((1, 1), int)}
    for name in "ab":
        point = {"a": np.array([a]), "b": np.array([b])}

        def moved(step, name=name, point=point):
            return float(np.reshape(traced(at, point | {name: point[name] + step}, np.float64), ()))

        with np.errstate(all="ignore"):
            found = float(np.sum([evaluate([x.derivative], at, point, np.float64) for x in made.loads.get(name, ())]))
            here = moved(0.0)
            sides = [(moved(step) - here) / step for step in (1e-6, -1e-6, 1e-5, -1e-5)]
            change = np.ptp(sides[::2]) + np.ptp(sides[1::2])  # from step to step
        if np.isfinite([here, *sides]).all() and change < 1e-2 * (1 + abs(here)):
            margin = 2 * change + 1e-3 * (1 + abs(here) + np.abs(sides).max())
            assert min(sides) - margin <= found <= max(sides) + margin


def derivatives_along(made, given, name, direction):
    """The derivative by s, and that by an array in one direction."""
    loads = made.loads.get(name, ())
    values = evaluate([made.by_s, *(x.derivative for x in loads)], inputs(), given, np.float64)
    along = np.zeros(S.shape)
    for load, value in zip(loads, values[1:], strict=True):
        indices = evaluate(load.at.args, inputs(), given, np.float64)
        along = along + value * direction[clamped(indices, direction.shape)]
    return values[0], along


@settings(max_examples=examples(60))
@given(scores())
def test_factors_of_derivatives_are_the_same_for_all_pairs(score):
    given, made = expressions.arrays(), program(score)
    for load in (load for loads in made.loads.values() for load in loads):
        found = factored(load.derivative)
        whole, factor, rest = evaluate([load.derivative, found.factor, found.rest], inputs(), given, np.float64)
        assert np.ndim(factor) == 0 or factor.size == 1
        finite = np.isfinite(whole) & np.isfinite(factor) & np.isfinite(rest)
        size = 1 + np.abs(np.where(finite, whole, 0))
        assert np.all(np.abs(np.where(finite, factor * rest - whole, 0)) <= 1e-9 * size)


def test_a_difference_of_points_has_one_derivative_but_for_its_sign():
    def score(s, i, j, *, head, of_head, of_row, of_key):
        return s - of_head[head] * cuflash.sqrt((of_row[i, 0] - of_key[j, 0]) ** 2 + 1e-6)

    made = program(score)
    row, key = (factored(made.loads[name][0].derivative) for name in ("of_row", "of_key"))
    assert row.rest is key.rest and row.of_head == key.of_head != () and row.constant == -key.constant


@settings(max_examples=examples(60))
@given(masks(), st.integers(1, 4), st.integers(1, 5), st.integers(0, HEADS - 1))
def test_intervals_hold_for_every_pair(mask, rows, keys, head):
    given = expressions.arrays()
    made = program(mask=mask, given=given)
    shown = called(mask, given, head=head, batch=0)
    first_i, first_j = np.arange(0, SEQLEN_Q, rows)[:, None], np.arange(0, SEQLEN_K, keys)[None, :]
    last_i, last_j = np.minimum(first_i + rows, SEQLEN_Q) - 1, np.minimum(first_j + keys, SEQLEN_K) - 1
    ranges = {"i": (first_i, last_i), "j": (first_j, last_j), "head": (head, head), "batch": (0, 0)}
    always, sometimes = bounds_of(made.mask, ranges, Tables(given).load)
    shape = (first_i.size, first_j.size)
    always, sometimes = (np.broadcast_to(x, shape) for x in (always, sometimes))
    for m, n in np.ndindex(shape):
        tile = shown[first_i[m, 0] : last_i[m, 0] + 1, first_j[0, n] : last_j[0, n] + 1]
        assert tile.all() if always[m, n] else True
        assert sometimes[m, n] or not tile.any()


def test_intervals_find_what_documents_and_windows_hide():
    doc = np.repeat(np.arange(4), 16)
    made = program_of(
        None,
        Traced.of(lambda i, j, *, doc: (doc[i] == doc[j]) & (i >= j) & (i - j < 20), "mask"),
        (("doc", 1, "int64"),),
    )
    first = np.arange(0, 64, 8)
    ranges = {"i": (first[:, None], first[:, None] + 7), "j": (first, first + 7), "head": (0, 0), "batch": (0, 0)}
    assert made.mask is not None
    always, sometimes = bounds_of(made.mask, ranges, Tables({"doc": doc}).load)
    i, j = np.arange(64)[:, None], np.arange(64)
    tiles = ((doc[i] == doc[j]) & (i >= j) & (i - j < 20)).reshape(8, 8, 8, 8).swapaxes(1, 2)
    np.testing.assert_array_equal(always, tiles.all(axis=(2, 3)))
    np.testing.assert_array_equal(sometimes, tiles.any(axis=(2, 3)))


# ---- emitted text ----------------------------------------------------------------------------------------------------

PRELUDE = """
#include <cmath>
#include <cstdint>
#include <cstring>
using std::exp; using std::log; using std::sqrt; using std::tanh; using std::sin; using std::cos; using std::pow;
#define CUFLASH_DEVICE static inline
using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using i32 = int32_t; using i64 = int64_t;
using u64 = uint64_t;
#define CUFLASH_NARROW_SCORE_ARGS NARROW
using Real = REAL;
struct Float16 {}; struct BFloat16 {};
template <int n> struct Integer { static constexpr int value = n; };
template <int count, int first = 0, class Function> void repeat(Function f) {
  if constexpr (first < count) { f(Integer<first>{}); repeat<count, first + 1>(f); }
}
namespace ptx {
inline float infinity() { return INFINITY; }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float sqrt_approx(float x) { return std::sqrt(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline float floor_to_float(float x) { return std::floor(x); }
inline int floor_to_int(float x) {
  return x != x ? 0 : x < -2147483648.0f ? -2147483647 - 1 : x >= 2147483648.0f ? 2147483647 : (int)std::floor(x);
}
inline u32 bits_of(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
template <class E> u32 pack(E, float, float) { return 0; }
inline u32 thread_index() { return 0; }
template <class T> T shuffle(T x, u32) { return x; }
template <class T> T shuffle_xor(T x, u32) { return x; }
}
template <class E> Real to_real(u16 x) { return x; }
constexpr bool kWide = sizeof(Real) == 8;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
inline Real fast_tanh(Real x) { return tanh(x); }
"""
FILL = """
extern "C" void fill_FUNCTION(const ScoreArg* a) {
  repeat<NAME::kNumTables>([&](auto number) {
    const ScoreArg& table = a[NAME::array_of_table(decltype(number)::value)];
    for (i64 at = 0; at < table.size[0] * table.size[1] * table.size[2]; ++at)
      NAME::fill_table(number, (void*)table.data, at, a, at / (table.size[1] * table.size[2]),
                       at / table.size[2] % table.size[1], at % table.size[2] + table.first);
  });
}
"""
LOOP = """
extern "C" void FUNCTION(const ScoreArg* a, const Real* s, int head, int batch, Real* value, Real* slope, u8* shown) {
  const NAME::OfHead of_head = NAME::read_of_head(a, head, batch);
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < KEYS; ++j) {
      const int at = i * KEYS + j;
      const NAME::OfRow of_row = NAME::read_of_row(of_head, a, i, head, batch);
      const NAME::OfKey of_key = NAME::read_of_key(of_head, a, j, head, batch);
      value[at] = NAME::score_function(of_head, of_row, of_key, a, s[at], i, j, head, batch, slope[at]);
      shown[at] = NAME::mask_function(of_head, a, i, j, head, batch);
    }
}
"""


class ScoreArg(ctypes.Structure):
    _fields_ = (
        *(("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4), ("size", ctypes.c_int64 * 4)),
        ("first", ctypes.c_int64),
    )


def score_args(given, tables):
    """The arrays as CUDA source reads them, and tables, which come with memory."""
    every = (ScoreArg * (len(given) + len(tables)))()
    for own, (table, values) in zip(every[len(given) :], tables, strict=True):
        own.data = values.ctypes.data
        own.size[:] = (*values.shape, 1)
        own.stride[:3] = [
            stride // values.itemsize * (n > 1) for stride, n in zip(values.strides, values.shape, strict=True)
        ]
        own.first = table.first(SEQLEN_K)
    for own, x in zip(every, given.values(), strict=False):
        own.data = x.ctypes.data
        own.stride[: x.ndim] = [stride // x.itemsize for stride in x.strides]
        own.size[: x.ndim] = x.shape
    return every


def compiled(text, directory):
    """The functions of source that follows `PRELUDE`."""
    (directory / "common/softmax").mkdir(parents=True)
    for name in ("config", "softmax/exponential"):
        (directory / f"common/{name}.cuh").write_text("")
    source, library = directory / "text.cc", directory / "text.so"
    source.write_text(text)
    command = [find_compiler() or "g++", "-std=c++17", "-O0", "-shared", "-fPIC", "-ffp-contract=off", f"-I{directory}"]
    command += [f"-I{kernel_directory()}", str(source), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]
    return ctypes.CDLL(str(library))


QUOTIENTS = """
#include "common/score/score_functions.cuh"
extern "C" void quotients(const float* x, const float* y, float* quotient, int count) {
  for (int i = 0; i < count; ++i) quotient[i] = score_div(x[i], y[i], 1 / y[i]);
}
"""


@pytest.mark.skipif(find_compiler() is None, reason="no g++")
def test_quotients_by_a_known_reciprocal_are_rounded_correctly(tmp_path):
    functions = compiled(PRELUDE.replace("REAL", "float").replace("NARROW\n", "1\n") + QUOTIENTS, tmp_path)
    random = np.random.default_rng(3)
    special = np.array([0, 1, 3, 1 - 2.0**-24, 2 - 2.0**-23, 2.0**-100, 1e38, 3.4028235e38, np.inf, np.nan], np.float32)
    special = np.concatenate([special, -special])
    near = random.uniform(1, 2, (2, 10**6))
    far = random.uniform(1, 2, (2, 10**5)) * 2.0 ** random.integers(-100, 128, (2, 10**5))
    grid = np.stack([x.ravel() for x in np.meshgrid(special, special)])
    x, y = np.concatenate([near, far, grid], axis=1).astype(np.float32)
    got = np.empty_like(x)
    functions.quotients(*(ctypes.c_void_p(array.ctypes.data) for array in (x, y, got)), len(x))
    with np.errstate(all="ignore"):
        expected = x / y
    ordinary = (np.abs(expected) >= 2.0**-126) | (expected == 0) | ~np.isfinite(expected)
    np.testing.assert_array_equal(got[ordinary], expected[ordinary])
    np.testing.assert_allclose(got, expected, atol=2.0**-149)  # a unit of those that are not normal


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (lambda s, i, j, *, side: cuflash.floor(s / side), "score_div(s, of_head.x0, of_head.reciprocal0)"),
        (lambda s, i, j, *, side: s / side, "score_fast_div(s, of_head.x0, of_head.reciprocal0)"),
        (lambda s, i, j, *, side: s % side, "score_mod(s, of_head.x0, of_head.reciprocal0)"),
        (lambda s, i, j: s // 3.5, "score_floordiv(s, (Real)3.5, 1 / (Real)3.5)"),
        (lambda s, i, j: 1 / s, "score_fast_div((Real)1.0, s)"),
        (lambda s, i, j: cuflash.floor(1 / s), "(Real)1.0 / s"),
    ],
)
def test_reciprocals_of_numbers_of_the_head_are_known(of, text):
    arrays = {"side": np.array(2.0, np.float32)} if "side" in of.__code__.co_varnames else {}
    assert f"= {text};" in program(of, None, arrays).header()


@pytest.mark.parametrize("x", [0.5, -0.5, 3e9, -3e9, 1e20, np.inf, np.nan])
def test_a_floor_that_meets_a_real_number_is_that_of_numpy(x):
    made = program(lambda s, i, j: s - cuflash.floor(s * x), None, {})
    (got,) = evaluate([made.score], inputs(np.ones_like(S)), {}, np.float64)
    np.testing.assert_array_equal(got, 1 - np.floor(x))
    assert "score_floor(" in made.header()


@pytest.mark.skipif(find_compiler() is None, reason="no g++")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_emitted_text_is_the_expression(dtype, tmp_path):
    drawn = []

    @settings(max_examples=40, database=None)
    @given(st.one_of(scores(), hoistable_scores()), masks())
    def draw(score, mask):
        drawn.append((score, mask))

    draw()
    given_arrays = expressions.arrays(dtype=dtype)
    made = [program(score, mask, given_arrays) for score, mask in drawn]
    emitted = [hoisted(score, mask, given_arrays, dtype) for score, mask in drawn]
    assert sum(bool(one.tables) for one in emitted) >= 10
    real = "float" if dtype == np.float32 else "double"
    is_narrow = str(int(dtype == np.float32))  # each kind of offsets once
    text = (
        PRELUDE.replace("REAL", real).replace("NARROW\n", f"{is_narrow}\n")
        + '#include "common/score/tile_bounds.cuh"\n'
    )
    for index, one in enumerate(emitted):
        text += f"namespace n{index} {{\n{one.header()}}}\n"
        loop = ((FILL if one.tables else "") + LOOP).replace("FUNCTION", f"f{index}").replace("NAME", f"n{index}")
        text += loop.replace("ROWS", str(SEQLEN_Q)).replace("KEYS", str(SEQLEN_K))
    functions = compiled(text, tmp_path)
    s = S.astype(dtype)
    rounding = {np.float32: 2e-4, np.float64: 1e-11}[dtype]
    for index, one in enumerate(made):
        value, slope, shown = np.empty(S.shape, dtype), np.empty(S.shape, dtype), np.empty(S.shape, np.uint8)
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (s, value, slope, shown)]
        sizes = [(table, table.size(BATCH, HEADS, SEQLEN_Q, SEQLEN_K)) for table in emitted[index].tables]
        tables = [(table, np.zeros(size, table.dtype)) for table, size in sizes]
        every = score_args(given_arrays, tables)
        if emitted[index].tables:
            getattr(functions, f"fill_f{index}")(every)
        getattr(functions, f"f{index}")(every, pointers[0], 1, 1, *pointers[1:])
        at = inputs(s)
        expected = [np.broadcast_to(x, S.shape) for x in evaluate([one.score, one.by_s], at, given_arrays, dtype)]
        (visible,) = evaluate([one.mask], at, given_arrays, dtype)
        for got, wanted in zip((value, slope), expected, strict=True):
            ordinary = np.isfinite(wanted) & (np.abs(wanted) < 1e4)
            size = 1 + np.abs(wanted[ordinary])
            # A number next to a step of the expression may fall to its other side.
            assert np.mean(np.abs(got[ordinary] - wanted[ordinary]) <= rounding * size) >= 0.97, one.describe()
        assert np.mean(shown == visible) >= (1.0 if dtype == np.float64 else 0.97), one.describe()


# ---- indices and choices ---------------------------------------------------------------------------------------------


def test_classes_of_indices():
    def score(s, i, j, *, head, batch, a, b, c, d, e, f, g, h):
        clipped = cuflash.clip(i - j, -3, 3)
        return s * a + b[batch, head] + c[i, 0] + d[j // 2] + e[head, clipped] + f[i, j] + g[i, clipped] + h[i + j]

    shapes = {"a": 0, "b": 2, "c": 2, "d": 1, "e": 2, "f": 2, "g": 2, "h": 1}
    made = program_of(Traced.of(score, "score"), None, tuple((name, n, "float32") for name, n in shapes.items()))
    assert made.score is not None
    found = {name: index_class(loads_of(made.score, name)[0]) for name in shapes}
    assert found == dict(zip(shapes, ("head", "head", "i", "j", "i - j", "i, j", "gather", "gather"), strict=True))


def test_what_a_choice_leaves_out_has_no_part_in_derivatives():
    def score(s, i, j, *, a):
        return cuflash.where(a[j] > 0, s / a[j] + cuflash.log(a[j]), s) * 2

    a = np.array([0.0, -1.0, 4.0])
    made = program_of(Traced.of(score, "score"), None, (("a", 1, "float64"),))
    at = {"s": np.ones((1, 3)), "i": np.zeros((1, 1), int), "j": np.arange(3)[None], "head": 0, "batch": 0}
    assert made.by_s is not None
    by_s, *by_a = evaluate([made.by_s, *(x.derivative for x in made.loads["a"])], at, {"a": a}, np.float64)
    np.testing.assert_allclose(by_s, [[2, 2, 0.5]])
    np.testing.assert_allclose(np.broadcast_to(sum(by_a), (1, 3)), [[0, 0, 2 * (-1 / 16 + 1 / 4)]])


@settings(max_examples=examples(60))
@given(st.floats() | st.integers(-70, 70), st.floats(-4, 4, allow_subnormal=False).map(lambda x: x + 0.0))
def test_powers_by_any_number_are_those_of_numpy(exponent, x):
    attn = cuflash.FlashAttention(scale=1.0, score=lambda s, i, j: s**exponent)
    q, k = np.array([[x]]), np.array([[1.0]])
    with np.errstate(all="ignore"):
        expected = np.power([x], float(exponent))
    found = attn.forward(q, k, None, want=("max",))
    np.testing.assert_allclose(found.max, expected, rtol=1e-12)
    assert attn.backward(None, q, k, None, None, found.lse, dlse=np.ones(1)).dq.shape == (1, 1)
