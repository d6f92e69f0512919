"""What the compiler makes of scores in CUDA; no device needed."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash.gpu.compiler import CompileError, ScoreSourceError, compile_spec
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, PASSES, PASSES_WITH_TANGENTS, PASSES_WITHOUT_TANGENTS, Pass
from tests.compile.test_plans import SERIALIZED
from tests.cuda_scores import HEAD
from tests.pure.test_cuda_scores import case_of
from tests.sampling import sample
from tests.scored import Scored, of_functions

# Bytes that a thread spills at most, stores and loads: what NVRTC 13.5 reports, and a small margin.
SPILLS = {
    ("8.0", "bfloat16", "branching", "sm80/backward.cu"): 32,
    ("8.0", "float32", "branching", "sm80/backward.cu"): 24,
    ("8.0", "float64", "branching", "sm80/backward.cu"): 40,
    ("8.0", "float64", "polynomial", "sm80/backward.cu"): 16,
    ("9.0", "bfloat16", "branching", "sm90/backward.cu"): 176,
    ("9.0", "bfloat16", "polynomial", "sm90/backward.cu"): 28,
    # Where it finds the row sums of a large lse, which is rare.
    ("7.5", "float16", "polynomial", "helpers/backward_preprocess.cu"): 120,
    ("8.0", "bfloat16", "polynomial", "helpers/backward_preprocess.cu"): 200,
    ("8.0", "float32", "polynomial", "helpers/backward_preprocess.cu"): 240,
    ("8.0", "float32", "branching", "helpers/backward_preprocess.cu"): 288,
    ("9.0", "bfloat16", "polynomial", "helpers/backward_preprocess.cu"): 136,
    ("9.0", "bfloat16", "branching", "helpers/backward_preprocess.cu"): 40,
}


@pytest.mark.one_in(24)
@pytest.mark.parametrize("source", ["polynomial", "branching"])
@pytest.mark.parametrize(
    "arch, dtype",
    [("7.5", "float16"), ("8.0", "bfloat16"), ("8.0", "float32"), ("8.0", "float64"), ("9.0", "bfloat16")],
)
def test_cuda_scores_spill_little_and_let_products_run_on(arch, dtype, source):
    problem, device = of_functions((source, None), dtype, 64), DeviceSpec.for_arch(arch)
    need = ("dq", "dk", "dv", *problem.score_arg_gradients)
    for pass_ in PASSES_WITHOUT_TANGENTS:
        for kernel in choose_plan(problem, device, pass_, need=need).kernels:
            resources = compile_spec(kernel).resources
            spills = resources.spill_stores_bytes + resources.spill_loads_bytes
            assert spills <= SPILLS.get((arch, dtype, source, kernel.source), 0), f"{kernel.name}: {spills} bytes"
            assert SERIALIZED not in resources.log and not resources.warnings


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("\n  return s + slope;\n", r'score\(2\): error: identifier "slope" is undefined\n    return s \+ slope;'),
        (
            "\n\n  float x = s;\n  return x;\n",
            r'score\(3\): error: no suitable conversion function from "score_text::D',
        ),
        (
            "return s + given.gate(i, j);",
            r"an array is read at one index for each of its axes(.|\n)*at line 1 of score",
        ),
        ("\n  return s + given.gate(s);", r"an index is an int or a long long(.|\n)*at line 2 of score"),
        (
            "\n\n  return s + given.b(i);",
            r'score\(3\): error: class "score_text::Given<score_text::Dual>" has no member "b"',
        ),
        ("\n  { return s;", r'expected a "}"(.|\n)*score\(1\)'),
    ],
)
def test_what_does_not_compile_is_said_with_the_lines_of_the_source(body, message):
    problem = case_of(cuflash.Score(cuda=f"{HEAD} {{{body}}}", arrays=["gate"]), "float16").problem
    (kernel,) = (x for x in choose_plan(problem, DeviceSpec.for_arch("9.0"), BACKWARD).kernels if "sm90/" in x.source)
    with pytest.raises(ScoreSourceError, match=message) as caught:
        compile_spec(kernel)
    assert str(caught.value).startswith("score: got source that does not compile, expected a score in CUDA C++:\n\n")
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, CompileError)
    assert "-DCUFLASH" not in str(caught.value)


def test_the_source_of_the_page_compiles():
    page = (Path(__file__).parents[2] / "docs/score.md").read_text()
    (source,) = re.findall(r'^source = """(.*?)"""', page, re.MULTILINE | re.DOTALL)
    attn = cuflash.FlashAttention(score=cuflash.Score(cuda=source, arrays=["width", "coefficients"]))
    inputs = case_of(None, "float16").arrays
    arrays = inputs | {"width": np.ones(2, np.float32), "coefficients": np.ones((2, 4), np.float32)}
    problem = Scored(attn, arrays, {}, "").problem
    moved = replace(problem, moved=("q", "coefficients"))
    need: dict[Pass, tuple[str, ...]] = {BACKWARD: ("dq", "dcoefficients"), BACKWARD_JVP: ("tdq", "tdcoefficients")}
    for pass_ in sample(PASSES, 1):
        of_pass = moved if pass_.has_tangents else problem
        for kernel in choose_plan(of_pass, DeviceSpec.for_arch("9.0"), pass_, need=need.get(pass_)).kernels:
            assert not compile_spec(kernel).resources.warnings


def test_second_derivatives_need_that_of_a_function_that_is_known_by_its_first():
    """The pass jvp needs only the first, and so has no use for the fourth argument of chain."""
    body = "\n  const auto of = value_of(s);\n  return chain(s, of * of, 2 * of{});\n"
    for fourth in ("", ", 2"):
        score = cuflash.Score(cuda=f"{HEAD} {{{body.format(fourth)}}}", arrays=["gate"])
        problem = replace(case_of(score, "float16").problem, moved=("q",))
        for pass_ in PASSES_WITH_TANGENTS:
            kernels = choose_plan(problem, DeviceSpec.for_arch("9.0"), pass_).kernels
            (kernel,) = (kernel for kernel in kernels if "jvp" in kernel.source)
            if pass_ is BACKWARD_JVP and not fourth:
                with pytest.raises(ScoreSourceError, match=r"expected the second derivative(.|\n)*at line 3 of score"):
                    compile_spec(kernel)
            else:
                assert not compile_spec(kernel).resources.warnings
