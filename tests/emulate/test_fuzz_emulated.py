"""One in a hundred of the problems of `pytest -m fuzz`, by the real kernels in the emulator, each for one device."""

import itertools
from dataclasses import replace

import pytest

import cuflash.testing as ct
from cuflash.emulator import find_compiler
from cuflash.problem import make_problem
from tests import fuzz
from tests.emulate import attention
from tests.pairs import judge

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: g++ is not on the path")


SUBNORMAL = next(trial for trial in fuzz.trials_of_group(139) if trial.name == "139-3")  # weights of out
TRIALS = list(zip((SUBNORMAL, *fuzz.sample(of=250)), itertools.cycle(("9.0", "8.0"))))


@pytest.mark.parametrize(("trial", "arch"), TRIALS, ids=lambda x: getattr(x, "name", x))
def test_drawn_problems_agree_with_the_oracle(trial, arch):
    case, arrays = trial.case, trial.case.arrays()
    static = {"deterministic": trial.deterministic, "precision": trial.precision}
    if case.axes is not None:
        results = attention.by_calls(case, arrays, "forward", arch=arch, **static)
        if trial.need:
            results |= attention.by_calls(case, arrays, "backward", arch=arch, need=trial.need, **static)
        judge(trial, results)
        return
    options = replace(case.options, **static)
    problem = make_problem(options, *ct.qkv(arrays), **ct.optional(arrays))
    out, lse = attention.forward(problem, arrays, arch=arch, **case.random)
    results = {"out": out, "lse": lse}
    if trial.need:
        gradients = attention.backward(problem, arrays, out, lse, need=trial.need, arch=arch, **case.random)
        results |= zip(trial.need, gradients, strict=True)
    judge(trial, results)
