"""Scores that a caller writes in CUDA, in the kernels, against the oracle, which computes the same in Python."""

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.emulator import Schedule
from cuflash.operands import DTYPES, numpy_dtype
from tests.emulate import attention
from tests.emulate.checks import judge_functions
from tests.emulate.test_scored import by_own_kernels
from tests.scored import MASKS, Scored, captured_of, scored
from tests.texts import HEAD, TEXTS


def case_of(text, dtype="float32", head_dim=16, mask=None):
    """A problem of a few tiles, whose last ones are not whole, in two batch entries and heads."""
    random = np.random.default_rng(7)
    lengths, functions = {"q": 70, "k": 130, "v": 130, "dout": 70}, (TEXTS[text], MASKS[mask] if mask else None)
    shapes = {name: (2, 1 if name in ("k", "v") else 2, n, head_dim) for name, n in lengths.items()}
    arrays = {name: random.standard_normal(shape).astype(numpy_dtype(dtype)) for name, shape in shapes.items()}
    arrays |= captured_of(functions, (2, 2, 70, 130), dtype, 7)
    return Scored(cuflash.FlashAttention(score=functions[0], mask=functions[1]), arrays, {}, "")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", TEXTS)
def test_kernels_obey_the_oracle(text, dtype):
    judge_functions(case_of(text, dtype))


@pytest.mark.parametrize(
    "text, head_dim", [("softcapped", 64), ("polynomial", 72), ("branching", 16), ("counted", 136)]
)
def test_kernels_of_9_0_obey_the_oracle(text, head_dim):
    case = case_of(text, "bfloat16", head_dim)
    assert by_own_kernels(case)
    judge_functions(case, "9.0")


@settings(max_examples=12)
@given(scored(max_seqlen=130, min_seqlen=40, scores=(*TEXTS,)).filter(lambda case: case.problem.score is not None))
def test_kernels_obey_the_oracle_with_other_options(case):
    judge_functions(case, "9.0" if case.problem.head_dim == 16 else "8.0")


def test_a_mask_in_python_goes_with_a_text():
    judge_functions(case_of("branching", "float16", mask="documents"), "9.0")


@pytest.mark.parametrize("text", ["counted", "interpolated"])
def test_gradients_of_arrays_do_not_depend_on_the_order_of_blocks_and_threads(text):
    case = case_of(text)
    out, lse = attention.forward(case.problem, case.arrays, arch="8.0")
    need = case.problem.captured_gradients
    found = [
        attention.backward(case.problem, case.arrays, out, lse, need=need, arch="8.0", schedule=schedule)
        for schedule in (Schedule(), Schedule("random", seed=3))
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sums_have_room_for_every_read():
    """Of a text that reads one place many times, where all terms are equal, so that none cancel."""
    reads = 100
    text = f"{HEAD} {{\n  T sum = 0;\n  for (int n = 0; n < {reads}; ++n) sum += given.a(-n);\n  return s + sum;\n}}"
    score = cuflash.Score(cuda=text, arrays=["a"], python=lambda s, i, j, *, a: s + reads * a[0] * 1.0)
    arrays = {name: np.zeros((1, 1, 40, 8)) for name in ("q", "k")} | {"a": np.array([0.5, 3.0])}
    arrays["v"] = arrays["dout"] = np.ones((1, 1, 40, 8))
    arrays["dlse"] = np.ones((1, 1, 40))
    judge_functions(Scored(cuflash.FlashAttention(score=score), arrays, {}, ""))
