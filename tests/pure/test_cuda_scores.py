"""Scores in CUDA: the interface, plans, and dual numbers against the derivatives of traced functions."""

import ctypes
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.emulator import find_compiler
from cuflash.gpu.compiler import kernel_directory
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.score_mod import Score, Traced, program_of
from cuflash.score_mod.nodes import INFIX, Node, in_order
from cuflash.spec.passes import BACKWARD
from cuflash.testing import check_gradients
from tests import expressions
from tests.cuda_scores import CUDA_SCORES, HEAD, SOFTCAPPED
from tests.expressions import SEQLEN_K, SEQLEN_Q, hoistable_scores, scores
from tests.pure.test_score_expressions import (
    AT_POINTS,
    PRELUDE,
    S,
    compiled,
    derivatives_along,
    inputs,
    of_two,
    program,
    score_args,
)
from tests.sampling import examples
from tests.scored import Scored, score_args_of

PLAIN = f"{HEAD} {{ return s; }}"


def case_of(source, dtype="float64", seqlen=40, **options):
    """A problem with this score, and its arrays."""
    arrays = dict(zip("qkv", np.random.default_rng(0).standard_normal((3, 1, 2, seqlen, 16)), strict=True))
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    arrays |= score_args_of((source,), (1, 2, seqlen, seqlen), dtype, 0)
    return Scored(cuflash.FlashAttention(score=source, **options), arrays, {}, "")


# ---- the interface ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cuda": 3}, TypeError, "cuda: got int 3, expected the source of a score in CUDA C"),
        ({"cuda": "T scores(T s) {}"}, ValueError, "cuda: got source without a function score, expected template"),
        ({"cuda": PLAIN, "arrays": "a"}, TypeError, "arrays: got str 'a', expected a sequence of names"),
        ({"cuda": PLAIN, "arrays": 3}, TypeError, "arrays: got int 3, expected a sequence of names"),
        ({"cuda": PLAIN, "arrays": [3]}, TypeError, "arrays: got int 3, expected names of arrays"),
        ({"cuda": PLAIN, "arrays": ["a b"]}, ValueError, "arrays: got 'a b', expected identifiers"),
        ({"cuda": PLAIN, "arrays": ["T"]}, ValueError, "arrays: got 'T', expected identifiers that differ, other than"),
        ({"cuda": PLAIN, "arrays": ["a", "a"]}, ValueError, "arrays: got 'a', expected identifiers that differ"),
        ({"cuda": PLAIN, "python": 3}, TypeError, "python: got int 3, expected None or a function"),
        (
            {"cuda": PLAIN, "arrays": ["a"], "python": lambda s, i, j, *, b: s + b[i]},
            ValueError,
            "python: got a function of b, expected one of a as arrays",
        ),
    ],
)
def test_cuda_scores_that_do_not_fit_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Score(**arguments)


def test_a_text_is_no_mask_and_its_arrays_have_names_of_their_own():
    with pytest.raises(TypeError, match="mask: got Score"):
        cuflash.FlashAttention(mask=Score(cuda=PLAIN))  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="score: got an array named bias, expected another name"):
        cuflash.FlashAttention(score=Score(cuda=PLAIN, arrays=["bias"]))


def test_objects_with_texts_pickle_print_and_compare():
    attn = cuflash.FlashAttention(score=CUDA_SCORES["softcapped"], causal=True)
    again = pickle.loads(pickle.dumps(attn))
    assert again == attn and hash(again) == hash(attn)
    source, (name,) = CUDA_SCORES["softcapped"].cuda, CUDA_SCORES["softcapped"].arrays
    own = Score(cuda=source, arrays=[name], python=CUDA_SCORES["softcapped"].python)
    assert own == CUDA_SCORES["softcapped"] and hash(own) == hash(CUDA_SCORES["softcapped"])
    assert own != Score(cuda=source + "\n", arrays=[name], python=CUDA_SCORES["softcapped"].python)
    assert own != Score(cuda=source, arrays=[name])
    assert f"score=Score(cuda={source!r}, arrays=('temperature',), python=<score" in repr(attn)


# ---- NumPy arrays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CUDA_SCORES)
def test_numpy_arrays_are_computed_by_the_function_in_python(name):
    case, source = case_of(CUDA_SCORES[name]), CUDA_SCORES[name]
    traced = cuflash.FlashAttention(score=source.python)
    out, lse = case.attention.forward(*case.inputs, **case.optional)
    np.testing.assert_array_equal(out, traced.forward(*case.inputs, **case.optional).out)
    need = ("dq", *case.problem.score_arg_gradients)
    q, k, v = case.inputs
    found = [x.backward(out, q, k, v, out, lse, need=need, **case.optional) for x in (case.attention, traced)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    described = case.attention.plan(*case.inputs, **case.optional).describe(verbose=True, width=0)
    assert "score in CUDA" not in described and "d score / d s" in described


@pytest.mark.parametrize("name", ["polynomial", "branching", "of_functions"])
def test_gradients_are_those_of_differences(name):
    case = case_of(CUDA_SCORES[name])
    found = check_gradients(case.attention, *case.inputs, **case.optional)
    reals = {x for x in CUDA_SCORES[name].arrays if case.arrays[x].dtype.kind == "f"}
    assert {gradient[1:] for gradient in found} == {"q", "k", "v"} | reals


def test_numpy_arrays_need_a_function_in_python():
    case = case_of(Score(cuda=SOFTCAPPED, arrays=["temperature"]))
    for method in (case.attention.forward, case.attention.plan, case.attention.compile):
        with pytest.raises(NotImplementedError, match=r"score: got NumPy arrays for a Score of CUDA alone.*python="):
            method(*case.inputs, **case.optional)


def test_an_array_that_is_not_read_has_a_gradient_of_0():
    source = Score(cuda=PLAIN, arrays=["a"], python=lambda s, i, j, *, a: s)
    case = Scored(cuflash.FlashAttention(score=source), case_of(source).arrays | {"a": np.ones(3)}, {}, "")
    out, lse = case.attention.forward(*case.inputs, a=np.ones(3))
    q, k, v = case.inputs
    (da,) = case.attention.backward(out, q, k, v, out, lse, a=np.ones(3), need=("da",))
    np.testing.assert_array_equal(da, np.zeros(3))


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CUDA_SCORES)
@pytest.mark.parametrize("arch", ["7.5", "8.0", "9.0"])
def test_plans_show_texts_and_look_into_none(name, arch):
    problem = case_of(CUDA_SCORES[name], "float16").problem
    device, need = DeviceSpec.for_arch(arch), ("dq", "dk", "dv", *problem.score_arg_gradients)
    forward, backward = choose_plan(problem, device), choose_plan(problem, device, BACKWARD, need=need)
    family = "sm90/" if arch == "9.0" else "sm80/"
    for plan in (forward, backward):
        described = plan.describe(verbose=True, width=0)
        assert "score in CUDA:" in described and "hoisted" not in described and not plan.tables
        assert all(f"  {line}" in described for line in CUDA_SCORES[name].cuda.splitlines() if line)
        assert any(kernel.source.startswith(family) for kernel in plan.kernels)
        assert all(kernel.source.startswith((family, "helpers/", "sm80/backward_scores")) for kernel in plan.kernels)
    if arch == "9.0":
        assert "belongs to a pair [known by running the source]" in backward.reason
    assert problem.hoisted == problem.program


def test_a_text_is_no_option():
    """CUDA source is computed as it is, with a mask that is a window."""
    source = Score(cuda=PLAIN, python=lambda s, i, j: 30 * cuflash.tanh(s / 30))
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 30, 8))
    attn = cuflash.FlashAttention(score=source, mask=lambda i, j: (i >= j) & (i - j < 5))
    described = attn.plan(q, k, v).describe(verbose=True, width=0)
    assert "functions computed as the options that they spell out: window = (4, 0)" in described
    assert "softcap" not in described.split("spell out")[1].splitlines()[0]
    expected = cuflash.FlashAttention(softcap=30.0, window=(4, 0)).forward(q, k, v).out
    np.testing.assert_allclose(attn.forward(q, k, v).out, expected, atol=1e-12)


def test_new_lengths_and_arrays_change_no_kernel():
    short, long = (case_of(CUDA_SCORES["interpolated"], "float32", seqlen).problem for seqlen in (64, 1000))
    need, device = ("dq", *short.score_arg_gradients), DeviceSpec.for_arch("8.0")
    ours, theirs = (choose_plan(x, device, BACKWARD, need=need).kernels for x in (short, long))
    assert {(x.source, x.defines, x.headers) for x in ours} == {(x.source, x.defines, x.headers) for x in theirs}


# ---- dual numbers ----------------------------------------------------------------------------------------------------


def source_of(root):
    """CUDA source that computes a typed expression."""
    names: dict[Node, str] = {}
    lines: list[str] = []
    for at in in_order([root]):
        args = [names[arg] for arg in at.args]
        names[at] = f"t{len(lines)}"
        lines.append(f"  const auto {names[at]} = {_spelled(at, args)};\n")
    return f"{HEAD} {{\n{''.join(lines)}  return {names[root]};\n}}\n"


def _spelled(at, args):
    if at.op == "constant":
        return {"float": "T({})", "int": "{}ll", "bool": "bool({})"}[at.type].format(repr(at.payload).lower())
    if at.op == "input":
        return at.payload
    if at.op == "load":
        return f"given.{at.payload}({', '.join(args)})"
    if at.op == "cast":
        return {"float": "T({})", "int": "(long long)({})", "bool": "{} != 0"}[at.type].format(*args)
    if at.op in ("floordiv", "mod"):
        if at.type == "int":
            return f"score_{at.op}({args[0]}, {args[1]})"
        whole = f"floor({args[0]} / {args[1]})"
        return f"T({whole})" if at.op == "floordiv" else f"{args[0]} - {args[1]} * {whole}"
    if at.op in INFIX and at.op != "pow":
        return f"{args[0]} {INFIX[at.op]} {args[1]}"
    if at.op in ("neg", "not"):
        return f"{'-' if at.op == 'neg' else '!'}{args[0]}"
    return f"{at.op}({', '.join(args)})"


LOOP = """
extern "C" void FUNCTION(const ScoreArg* a, const Real* s, int head, int batch, const Real* const* directions,
                         Real* value, Real* slope, Real* along) {
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < KEYS; ++j) {
      const int at = i * KEYS + j;
      Unused unused;
      Real by_s;
      value[at] = NAME::score_function({}, {}, {}, a, s[at], i, j, head, batch, slope[at]);
      if (NAME::score_function({}, {}, {}, a, s[at], i, j, head, batch, unused) != value[at]) value[at] = NAN;
      along[at] = 0;
      const auto visit = [&](auto read, i64 place, Real derivative) {
        along[at] += derivative * directions[NAME::array_of_read(read.value)][place];
      };
      NAME::score_derivatives({}, {}, {}, a, s[at], i, j, head, batch, by_s, visit);
      if (by_s != slope[at]) slope[at] = NAN;
    }
}
"""
UNUSED = "struct Unused { template <class X> void operator=(X) {} };\n"


def functions_of(programs, arrays, dtype, rows, keys, directory):
    """The functions f0, f1, … of `LOOP` for the scores of programs."""
    types = tuple((name, x.ndim, x.dtype.name) for name, x in arrays.items())
    duals = (kernel_directory() / "common/score/dual.cuh").read_text()  # in the namespace of each score
    duals = re.sub(r"^#(pragma once|include .*)$", "", duals, flags=re.MULTILINE)
    real = "float" if dtype == np.float32 else "double"
    source = PRELUDE.replace("REAL", real).replace("NARROW\n", "0\n").replace("static inline", "inline") + UNUSED
    source = source.replace("i64 = int64_t", "i64 = long long")  # as the kernels have it
    source += '#include "common/score/score_functions.cuh"\n'
    for index, one in enumerate(programs):
        own = program_of(Score(cuda=source_of(one.score), arrays=[*arrays]), None, types)
        header = re.sub(r"^#line .*$", "", own.header(own.differentiable), flags=re.MULTILINE)
        source += f"namespace n{index} {{\n{duals}{header}}}\n"
        loop = LOOP.replace("FUNCTION", f"f{index}").replace("NAME", f"n{index}")
        source += loop.replace("ROWS", str(rows)).replace("KEYS", str(keys))
    return compiled(source, directory)


@pytest.mark.skipif(find_compiler() is None, reason="no g++")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dual_numbers_at_points_where_a_factor_is_infinite(dtype, tmp_path):
    most = max(len(points) for _, points in AT_POINTS)
    made = [program(of_two(function), given=dict.fromkeys("ab", np.zeros(most, dtype))) for function, _ in AT_POINTS]
    functions = functions_of(made, dict.fromkeys("ab", np.zeros(most, dtype)), dtype, most, 1, tmp_path)
    for index, (_, points) in enumerate(AT_POINTS):
        points = [*points, *[points[-1]] * (most - len(points))]
        arrays = {name: np.array([point[n] for point, _ in points], dtype) for n, name in enumerate("ab")}
        for n in range(2):
            directions = [np.full(most, float(m == n), dtype) for m in range(2)]
            pointers = (ctypes.c_void_p * 2)(*(x.ctypes.data for x in directions))
            s, *found = (np.zeros(most, dtype) for _ in range(4))
            every = [ctypes.c_void_p(x.ctypes.data) for x in (s, *found)]
            getattr(functions, f"f{index}")(score_args(arrays, []), every[0], 0, 0, pointers, *every[1:])
            expected = [derivatives[n] for _, derivatives in points]
            np.testing.assert_allclose(found[2], expected, rtol=1e-5, atol=1e-30, err_msg=made[index].describe())


@pytest.mark.skipif(find_compiler() is None, reason="no g++")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dual_numbers_have_the_derivatives_of_traced_functions(dtype, tmp_path):
    drawn = []

    @settings(max_examples=examples(40), database=None)
    @given(st.one_of(scores(), hoistable_scores()))
    def draw(score):
        drawn.append(score)

    draw()
    arrays = expressions.arrays(dtype=dtype)
    made = [program(score, given=arrays) for score in drawn]
    functions = functions_of(made, arrays, dtype, SEQLEN_Q, SEQLEN_K, tmp_path)
    random, rounding = np.random.default_rng(3), {np.float32: 1e-3, np.float64: 1e-10}[dtype]
    s = S.astype(dtype)
    directions = {name: np.asarray(random.standard_normal(x.shape), dtype) for name, x in arrays.items()}
    pointers = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in directions.values()))
    for index, one in enumerate(made):
        found = [np.empty(S.shape, dtype) for _ in range(3)]
        results = [ctypes.c_void_p(x.ctypes.data) for x in found]
        of_s = ctypes.c_void_p(s.ctypes.data)
        getattr(functions, f"f{index}")(score_args(arrays, []), of_s, 1, 1, pointers, *results)
        by_name = [derivatives_along(one, arrays, name, directions[name]) for name in one.loads]
        value = Traced.of(drawn[index], "score")(inputs(s), arrays, dtype)
        slope = by_name[0][0] if by_name else derivatives_along(one, arrays, "", None)[0]
        for got, wanted in zip(found, (value, slope, sum(along for _, along in by_name) + 0 * S), strict=True):
            wanted = np.broadcast_to(wanted, S.shape)
            ordinary = np.isfinite(wanted) & (np.abs(wanted) < 1e4)
            size = 1 + np.abs(wanted[ordinary])
            # A number next to a step of the expression may fall to its other side.
            assert np.mean(np.abs(got[ordinary] - wanted[ordinary]) <= rounding * size) >= 0.97, one.describe()
