"""Batch axes on CuPy arrays, by the backend itself: stand-ins for CuPy and for what a launch does, on NumPy."""

import importlib
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.cpu import backend as cpu_backend
from cuflash.plan import DeviceSpec
from cuflash.spec.outputs import OUTPUTS
from cuflash.spec.passes import BACKWARD, FORWARD

# Modules of `cuflash.gpu` that import CuPy, each after those that it imports.
MODULES = tuple(f"cuflash.gpu.{name}" for name in ("device", "launch", "launch_cache", "backend"))
ROWS: dict[str, Any] = {"axes": (2, 3), "bias": (2, 1, 2, 20, 30), "mask": (2, 3, 1, 1, 30)}
CASE = ct.Case(
    **ROWS,
    num_heads=2,
    seqlen_q=20,
    seqlen_k=30,
    head_dim=16,
    dtype="bfloat16",
    batch_axes=(("k", (2, 1)), ("v", (1, 1))),
)


class DeviceArray(np.ndarray):
    """An array with as much of CuPy's interface as the backend looks at."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


def as_device_array(x):
    return np.ascontiguousarray(x).view(DeviceArray)


@pytest.fixture
def backend(monkeypatch):
    """`cuflash.gpu.backend`, whose launches are calls of the CPU path; and the problems that it launches."""

    def made(name):
        return lambda *args, **kwargs: getattr(np, name)(*args, **kwargs).view(DeviceArray)

    cupy: Any = ModuleType("cupy")
    cupy.ndarray = DeviceArray
    cupy.__dict__.update({name: made(name) for name in ("empty", "zeros", "zeros_like", "ascontiguousarray")})
    cupy.broadcast_to = lambda x, shape: np.broadcast_to(x, shape, subok=True)
    as_strided = lambda x, shape, strides: np.lib.stride_tricks.as_strided(x, shape, strides, subok=True)  # noqa: E731
    cupy.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided))

    class Device:
        def __init__(self, device_id=0):
            self.id = device_id

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    cupy.cuda = SimpleNamespace(Device=Device, runtime=SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    device: Any = importlib.import_module("cuflash.gpu.device")
    monkeypatch.setattr(device, "device_spec", lambda device_id: DeviceSpec.for_arch("9.0"))
    _, launch, _, module = [cast(Any, importlib.import_module(name)) for name in MODULES]
    module.launched = []

    def launch_of(binding, plan, arrays, growing=None):
        names = [name for name, x in arrays.items() if x is not None]

        def run(values, pointers, random, seqlen_k, sums=None):
            assert sums is None
            module.launched.append((plan.pass_, binding.problem, binding.results))
            plain = {name: x.view(np.ndarray) for name, x in zip(names, values, strict=True)}
            options = binding.problem.options
            if plan.pass_ is FORWARD:
                found = cpu_backend.compute(FORWARD, options, plain, OUTPUTS, random)
            else:
                narrow = {name: x for name, x in plain.items() if name not in binding.problem.wide}
                found = cpu_backend.compute(BACKWARD, replace(options, wide=()), narrow, binding.results, random)
                found = tuple(
                    x.astype(np.float32) if name in binding.problem.wide else x
                    for name, x in zip(binding.results, found, strict=True)
                )
            return tuple(as_device_array(x) for x in found)

        seqlen_k = binding.problem.seqlen_k
        return SimpleNamespace(run=run, plan=plan, any_length=False, seqlen_k=seqlen_k, copied=(), last_call=0)

    monkeypatch.setattr(launch.Launch, "of", launch_of)
    monkeypatch.setattr(module, "with_resources", lambda plan: plan)
    monkeypatch.setattr("cuflash.dispatch.backend_of", lambda kind: module)
    yield module
    for name in MODULES:
        sys.modules.pop(name, None)


def test_calls_are_launched_and_added_up(backend):
    arrays = CASE.arrays(as_device_array)
    attn = cuflash.FlashAttention()
    inputs, optional = ct.qkv(arrays), ct.optional(arrays)
    out, lse = attn.forward(*inputs, **optional)
    ct.assert_forward(CASE, np.asarray(out), np.asarray(lse))
    assert [(pass_, problem.batch, problem.k.strides[0]) for pass_, problem, _ in backend.launched] == [
        (FORWARD, 3, 0)
    ] * 2
    need = ("dq", "dk", "dv", "dbias", "dscale")
    into = np.full_like(arrays["v"], 3)
    found = attn.backward(arrays["dout"], *inputs, out, lse, **optional, need=need, dv=into)
    assert found.dv is into
    shapes = [((2, 3, 2, 20, 16), "bfloat16"), ((2, 1, 2, 30, 16), "bfloat16"), ((1, 1, 2, 30, 16), "bfloat16")]
    assert [(x.shape, x.dtype.name) for x in found] == [*shapes, ((2, 1, 2, 20, 30), "float32"), ((), "float32")]
    passes = [(pass_, problem.wide, results) for pass_, problem, results in backend.launched[2:]]
    assert passes == [(BACKWARD, ("dk", "dv"), need)] * 2
    # Partial dk and dv are those of the CPU path, in 16 bits, to which kernels do not round them.
    ct.assert_backward(CASE, **{name: np.asarray(x) for name, x in zip(need, found, strict=True)})


def test_plans_and_tuning_are_those_of_one_call(backend):
    arrays = CASE.arrays(as_device_array)
    options = cuflash.FlashAttention().options
    absent = ("kv_lengths", "alibi_slopes", "sinks", "block_mask", "block_table", "out", "lse")
    given = dict.fromkeys(absent) | {name: x for name, x in arrays.items() if name != "dout"}
    plans = backend.plan(options, given)
    said = "batch axes (2, 3): 2 calls with a batch of 3, because k, bias cannot step through all of them"
    for plan in (plans.forward, plans.backward):
        assert plan.problem.batch == 3 and plan.reason.startswith(said) and said in plan.describe(verbose=True, width=0)
    assert "; dk, dv added up over what broadcasts, in the dtype of lse\n" in plans.backward.reason
    assert "dk and dv leave blocks as sums" in plans.backward.reason
    backend.compile(options, given)
    assert [pass_ for pass_, *_ in backend.launched] == [FORWARD] * 2 + [BACKWARD] * 2
    del backend.launched[:]
    tried, call_by = backend.trials(FORWARD, options, given, (0, 0))
    out, lse = call_by(tried[0])()
    assert out.shape == (3, 2, 20, 16) and lse.shape == (3, 2, 20) and len(backend.launched) == 1
