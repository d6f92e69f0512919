"""The kernels that `plan` names are those that a call launches and those that the emulator runs, on any arrays."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.binding import PASSES
from cuflash.emulator import Statistics, find_compiler, passes
from tests.calls import calls, results_of, shifted
from tests.emulate import attention
from tests.emulate.launcher import launcher

ARCHS = ("8.0", "9.0")
NO_DROPOUT = (0, 0)  # seed and offset, of which plans know nothing


def kernels_of_emulator(pass_, problem, arrays, arch, need):
    """(source, defines, headers, name) of what the emulator launches for a call that is given no results."""
    launched = []

    def build(source, defines, *, headers, **folders):
        def launch(name, params, **how):
            launched.append((str(source), tuple(defines.items()), tuple(headers.items()), name))
            return Statistics(*[0] * 10)

        return SimpleNamespace(launch=launch)

    with mock.patch.object(passes, "build", build):
        if pass_ == "forward":
            attention.forward(problem, arrays, arch=arch)
        else:
            inputs = {name: x for name, x in arrays.items() if name not in ("out", "lse")}
            attention.backward(problem, inputs, arrays["out"], arrays["lse"], arch=arch, need=need)
    return launched


@pytest.mark.parametrize("pass_", PASSES)
def test_the_kernels_of_a_plan_are_those_that_run(pass_):
    @settings(max_examples=60)
    @given(calls(pass_), st.sampled_from(ARCHS))
    def every_call(call, arch):
        case, options, arrays, need = call
        results = results_of(case, arrays, pass_, need)
        inputs = {name: x for name, x in arrays.items() if name not in results}
        with launcher(arch, computes=False) as launches:
            plan = launches.plan(pass_, options, arrays, need)
            launches.call(pass_, options, arrays, need, NO_DROPOUT)
            of_inputs = launches.plan(pass_, options, inputs, need)
        assert list(map(hash, launches.launched)) == [hash(kernel) for kernel in plan.kernels if kernel.grid]
        emulated = kernels_of_emulator(pass_, of_inputs.problem, inputs, arch, need)
        expected = [(x.source, x.defines, x.headers, x.name) for x in of_inputs.kernels if x.grid]
        assert emulated == expected

    every_call()


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: g++ is not on the path")
@pytest.mark.parametrize(("arch", "by"), [("8.0", 1), ("9.0", 8)])
def test_a_call_computes_on_arrays_that_it_copies(arch, by):
    case = ct.Case(seqlen_q=20, seqlen_k=30, head_dim=40, dtype="bfloat16", strides="transposed")
    arrays = case.arrays()
    results = {
        name: ct.lay_out(x, case.strides, np.array) for name, x in results_of(case, arrays, "forward", ()).items()
    }
    given_arrays = {name: arrays[name] for name in "kv"} | {"q": shifted(np.array(arrays["q"]), by)} | results
    with launcher(arch, computes=True) as launches:
        plan = launches.plan("forward", case.options, given_arrays, ())
        found = launches.call("forward", case.options, given_arrays, (), NO_DROPOUT)
    assert plan.kernels[0].source == f"sm{arch.replace('.', '')}/forward.cu"
    assert all(np.shares_memory(x, result) for x, result in zip(found, results.values(), strict=True))
    ct.assert_forward(case, *results.values())
