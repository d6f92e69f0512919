"""The kernels that `plan` names are those that a call launches and those that the emulator runs, on any arrays."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash import dispatch
from cuflash.emulator import Statistics, passes
from cuflash.spec.passes import FORWARD, PASSES_WITHOUT_TANGENTS
from cuflash.spec.problem import make_problem
from cuflash.spec.scalars import array_of
from tests.calls import calls, results_of, shifted
from tests.emulate import attention
from tests.emulate.launcher import DeviceArray, device, launcher
from tests.sampling import examples

ARCHS = ("8.0", "9.0")
CU = ("cu_seqlens_q", "cu_seqlens_k")
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
        if pass_ is FORWARD:
            attention.forward(problem, arrays, arch=arch)
        else:
            inputs = {name: x for name, x in arrays.items() if name not in ("out", "lse")}
            attention.backward(problem, inputs, arrays["out"], arrays["lse"], arch=arch, need=need)
    return launched


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
def test_the_kernels_of_a_plan_are_those_that_run(pass_):
    @settings(max_examples=examples(60))
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


@pytest.mark.parametrize(("arch", "by"), [("8.0", 1), ("9.0", 8)])
def test_a_call_computes_on_arrays_that_it_copies(arch, by):
    case = ct.Case(seqlen_q=20, seqlen_k=30, head_dim=40, dtype="bfloat16", strides="transposed")
    arrays = case.arrays()
    results = {name: ct.lay_out(x, case.strides, np.array) for name, x in results_of(case, arrays, FORWARD, ()).items()}
    given_arrays = {name: arrays[name] for name in "kv"} | {"q": shifted(np.array(arrays["q"]), by)} | results
    with launcher(arch, computes=True) as launches:
        plan = launches.plan(FORWARD, case.options, given_arrays, ())
        found = launches.call(FORWARD, case.options, given_arrays, (), NO_DROPOUT)
    assert plan.kernels[0].source == f"sm{arch.replace('.', '')}/forward.cu"
    assert all(np.shares_memory(x, result) for x, result in zip(found, results.values(), strict=True))
    ct.assert_forward(case, *results.values())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scalars_and_wide_integers_beside_arrays_on_a_device(monkeypatch, arch, dtype):
    """By the interface. Arrays of scalars are filled on the device, integers copied there: nothing waits for it."""

    def score(s, i, j, *, gamma, slope):
        return s - gamma * cuflash.abs(i - j) - slope * i

    starts = (0, 7, 20)
    case = ct.Case(seqlen_q=20, seqlen_k=20, head_dim=16, dtype=dtype, cu_seqlens_q=starts, cu_seqlens_k=starts)
    arrays = {name: x for name, x in case.arrays().items() if not name.startswith("cu")}
    slope = ml_dtypes.bfloat16(0.125) if dtype == "bfloat16" else np.float64(0.125)
    scalars = {"gamma": 0.25, "slope": slope}
    attn: Any = cuflash.FlashAttention(score=score)

    def results(arrays, starts):
        q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
        optional = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, **scalars}
        out, lse = attn.forward(q, k, v, **optional)
        need = ("dq", "dk", "dv", "dgamma", "dslope")
        attn.plan(q, k, v, **optional)
        return {"out": out, "lse": lse, **attn.backward(dout, q, k, v, out, lse, need=need, **optional)._asdict()}

    with launcher(arch, computes=True) as launches:
        monkeypatch.setattr(dispatch, "backend_of", {"cupy": launches.backend}.__getitem__)
        on_device = {name: x.view(DeviceArray) for name, x in arrays.items()}
        found = results(on_device, np.array(starts, np.int64).view(DeviceArray))
        assert all(type(x) is DeviceArray for x in found.values())
    given_arrays = {name: array_of(name, x, dtype) for name, x in scalars.items()}
    problem = make_problem(
        attn.options, *ct.qkv(arrays), score_args=given_arrays, **dict.fromkeys(CU, np.array(starts, np.int32))
    )
    judges = ct.yardsticks(problem, arrays | dict.fromkeys(CU, np.array(starts, np.int32)) | given_arrays)
    for name, x in found.items():
        assert (x.shape, x.dtype) == ((), given_arrays[name[1:]].dtype) if name[1:] in scalars else x.ndim
        measurement = ct.measure(name, x.view(np.ndarray), judges[name])
        assert not measurement.failure, measurement


@pytest.mark.parametrize("head_dim", [16, 64])
def test_arguments_that_are_compared_end_where_those_of_the_launch_do(head_dim):
    """Without tensor maps they are the struct alone: memory after it is somebody else's, and may hold anything."""
    case = ct.Case(seqlen_q=64, seqlen_k=700, num_heads=4, num_heads_kv=1, head_dim=head_dim)
    with device("9.0") as launches:
        cuflash.attention(*(x.view(DeviceArray) for x in ct.qkv(case.arrays())))
        (launch,) = launches.launch_cache._launches.values()
        assert {kernel.target for kernel in launch.plan.kernels} >= {"sm_90a"}
        assert bool(launch.plan.tensor_maps) is (head_dim == 64)
        arguments = [
            len(x) for kernel, x in zip(launches.launched, launches.arguments, strict=True) if kernel.target == "sm_90a"
        ]
        assert {*arguments} == {len(launch.argument._content)}
