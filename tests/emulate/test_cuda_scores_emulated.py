"""Scores that a caller writes in CUDA, in the kernels, against the oracle, which computes the same in Python."""

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.arrays.array_info import DTYPES
from cuflash.emulator import Schedule
from tests.cuda_scores import CUDA_SCORES, HEAD
from tests.emulate import attention
from tests.emulate.checks import judge_functions
from tests.emulate.test_scored import by_own_kernels
from tests.sampling import examples
from tests.scored import Scored, few_tiles, scored


@pytest.mark.one_in(48)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", CUDA_SCORES)
def test_kernels_obey_the_oracle(source, dtype):
    judge_functions(few_tiles((source, None), dtype))


@pytest.mark.parametrize(
    "source, head_dim", [("softcapped", 64), ("polynomial", 72), ("branching", 16), ("counted", 136)]
)
def test_kernels_of_9_0_obey_the_oracle(source, head_dim):
    case = few_tiles((source, None), "bfloat16", head_dim)
    assert by_own_kernels(case)
    judge_functions(case, "9.0")


@settings(max_examples=examples(40))
@given(
    scored(max_seqlen=130, min_seqlen=40, scores=(*CUDA_SCORES,)).filter(lambda case: case.problem.score is not None)
)
def test_kernels_obey_the_oracle_with_other_options(case):
    judge_functions(case, "9.0" if case.problem.head_dim == 16 else "8.0")


def test_a_mask_in_python_goes_with_a_text():
    judge_functions(few_tiles(("branching", "documents"), "float16"), "9.0")


@pytest.mark.parametrize("source", ["counted", "interpolated"])
def test_gradients_of_arrays_do_not_depend_on_the_order_of_blocks_and_threads(source):
    case = few_tiles((source, None), "float32")
    out, lse = attention.forward(case.problem, case.arrays, arch="8.0")
    need = case.problem.score_arg_gradients
    found = [
        attention.backward(case.problem, case.arrays, out, lse, need=need, arch="8.0", schedule=schedule)
        for schedule in (Schedule(), Schedule("random", seed=3))
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sums_have_space_for_every_read():
    """Of CUDA source that reads one entry many times, where all terms are equal, so that none cancel."""
    reads = 100
    source = f"{HEAD} {{\n  T sum = 0;\n  for (int n = 0; n < {reads}; ++n) sum += given.a(-n);\n  return s + sum;\n}}"
    score = cuflash.Score(cuda=source, arrays=["a"], python=lambda s, i, j, *, a: s + reads * a[0] * 1.0)
    arrays = {name: np.zeros((1, 1, 40, 8)) for name in ("q", "k")} | {"a": np.array([0.5, 3.0])}
    arrays["v"] = arrays["dout"] = np.ones((1, 1, 40, 8))
    arrays["dlse"] = np.ones((1, 1, 40))
    judge_functions(Scored(cuflash.FlashAttention(score=score), arrays, {}, ""))
