"""Where a call goes: arrays on a device to the launcher, with stand-ins for CuPy and the launcher."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch
from cuflash.cpu import backend as cpu_backend
from cuflash.spec.passes import BACKWARD, FORWARD, JVP


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for the modules cupy and cuflash.gpu.backend, and a record of what was asked of them."""

    class DeviceArray:
        def __dlpack__(self, **how):
            raise AssertionError("CuPy arrays are taken as they are")

        __dlpack_device__ = __dlpack__

    calls = []

    def record(name, result):
        def call(options, arrays, *others):
            calls.append((name, options, arrays, *others))
            return result(arrays) if callable(result) else result

        return call

    cupy: Any = ModuleType("cupy")
    launch: Any = ModuleType("cuflash.gpu.backend")
    launch.repeated = lambda *of_call: None  # no call is like an earlier one
    cupy.ndarray = DeviceArray
    cupy.from_dlpack = lambda x: (x.__dlpack__(stream=7), DeviceArray())[1]
    passes = {
        "forward": record("forward", lambda arrays: (arrays["out"] or "out", arrays["lse"] or "lse")),
        "backward": record("backward", ("dq", "dk", "dv")),
    }
    launch.compute = lambda pass_, *given: passes[pass_.name](*given)
    launch.plan = record("plan", "plans")
    launch.compile = record("compile", "nothing")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cuflash.gpu.backend", launch)
    monkeypatch.setattr(cuflash.gpu, "backend", launch, raising=False)
    backends = {"cupy": launch, "numpy": cpu_backend}
    monkeypatch.setattr(dispatch, "backend_of", backends.__getitem__)
    return SimpleNamespace(calls=calls, Array=DeviceArray, launch=launch)


def without_none(arrays):
    return {name: x for name, x in arrays.items() if x is not None}


def test_cupy_arrays_go_to_the_launcher_untouched(gpu):
    attn = cuflash.FlashAttention(causal=True)
    q, k, v, bias, mask, out, lse, dout, dk = (gpu.Array() for _ in range(9))
    assert attn.forward(q, k, v, bias=bias, lse=lse) == cuflash.ForwardResult("out", lse)
    assert cuflash.attention(q, k, v, mask=mask, out=out) is out
    assert attn.backward(dout, q, k, v, out, lse, mask=mask, dk=dk) == cuflash.Gradients("dq", "dk", "dv")
    dropping = cuflash.FlashAttention(dropout=0.5)
    dropping.forward(q, k, v, seed=2**40, offset=3)
    dropping.backward(dout, q, k, v, out, lse, seed=4, offset=5)
    plans: object = attn.plan(q, k, v, bias=bias)
    assert plans == "plans"
    attn.compile(q, k, v, mask=mask, tq=q, passes=["jvp", "forward"])
    passes = ["forward", "forward", "backward", "forward", "backward"]
    assert [name for name, *_ in gpu.calls] == [*passes, "plan", "compile"]
    plain = cuflash.FlashAttention().options
    expected = [attn.options, plain, attn.options, dropping.options, dropping.options, attn.options, attn.options]
    assert [options for _, options, *_ in gpu.calls] == expected
    given = [without_none(arrays) for _, _, arrays, *_ in gpu.calls]
    qkv = {"q": q, "k": k, "v": v}
    results = {"dout": dout, "out": out, "lse": lse}
    assert given == [
        qkv | {"bias": bias, "lse": lse},
        qkv | {"mask": mask, "out": out},
        qkv | results | {"mask": mask, "dk": dk},
        qkv,
        qkv | results,
        qkv | {"bias": bias},
        qkv | {"mask": mask, "tq": q},
    ]
    need = ("dq", "dk", "dv")
    others = [others for _, _, _, *others in gpu.calls]
    outputs = ("out", "lse")
    random = [[outputs, (0, 0)], [outputs, (0, 0)], [need, (0, 0)], [outputs, (2**40, 3)], [need, (4, 5)]]
    assert others == [*random, [need, (FORWARD, BACKWARD)], [need, (FORWARD, JVP)]]


def test_the_launcher_learns_that_gradients_of_sinks_are_needed(gpu):
    gpu.launch.compute = lambda pass_, options, arrays, need, random: gpu.calls.append((arrays, need)) or need
    q, sinks, dlse, dsinks = (gpu.Array() for _ in range(4))
    attn = cuflash.FlashAttention()
    right = ("dq", "dk", "dv", "dsinks")
    assert attn.backward(q, q, q, q, q, q, sinks=sinks, dlse=dlse, need=["dsinks", "dv", "dq", "dk"]) == right
    assert attn.backward(q, q, q, q, q, q, sinks=sinks, dsinks=dsinks) == right
    assert [arrays["sinks"] for arrays, _ in gpu.calls] == [sinks, sinks]
    assert [arrays["dlse"] for arrays, _ in gpu.calls] == [dlse, None]
    assert [arrays["dsinks"] for arrays, _ in gpu.calls] == [None, dsinks]
    assert [need for _, need in gpu.calls] == [right, right]


FORWARD_ARRAYS = ("q", "k", "v", "bias", "mask", "kv_lengths", "alibi_slopes", "sinks", "block_mask", "out", "lse")


@pytest.mark.parametrize("wrong", FORWARD_ARRAYS)
def test_host_and_device_arrays_do_not_mix(gpu, wrong):
    arrays = {name: gpu.Array() for name in FORWARD_ARRAYS}
    arrays[wrong] = np.zeros((3, 4))
    message = f"{wrong}: got numpy.ndarray, expected an array of cupy as q is"
    if wrong == "q":
        message = r"k: got \w+.DeviceArray, expected an array of numpy as q is"
    with pytest.raises(TypeError, match=f"^{message}$"):
        cuflash.FlashAttention().forward(**arrays)
    assert not gpu.calls


@pytest.mark.parametrize("missing", ["dout", "q", "k", "out", "lse"])
def test_backward_needs_all_of_its_device_arrays(gpu, missing):
    arrays = {name: gpu.Array() for name in ("dout", "q", "k", "v", "out", "lse")} | {missing: None}
    with pytest.raises(TypeError, match=f"^{missing}: got None, expected an array"):
        cuflash.FlashAttention().backward(**arrays)
    assert not gpu.calls


def test_device_arrays_of_another_library_are_imported_and_exported(gpu, monkeypatch):
    streams, exported = [], []

    class Tensor:
        __module__ = "anothertorch.core"

        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, *, stream=None, **how):
            streams.append(stream)
            return "capsule"

    def from_dlpack(x):
        exported.append(x)
        return f"tensor of {x}"

    library: Any = ModuleType("anothertorch")
    library.from_dlpack = from_dlpack
    monkeypatch.setitem(sys.modules, "anothertorch", library)
    q: Any = Tensor()
    out = Tensor()
    assert cuflash.FlashAttention().forward(q, q, q, out=out) == (out, "tensor of lse")
    assert streams == [7] * 4, "every argument, and the result to be written, waits for its producer"
    assert len(exported) == 2, "the given result crosses back too, so that its library's stream waits for CuPy's"
    assert all(isinstance(x, gpu.Array) for name, x in gpu.calls[0][2].items() if name in ("q", "k", "v", "out"))
    assert cuflash.FlashAttention().backward(q, q, q, q, q, q) == ("tensor of dq", "tensor of dk", "tensor of dv")


def test_subclasses_of_cupy_arrays_are_refused(gpu):
    masked_array = type("Masked", (gpu.Array,), {})
    q = gpu.Array()
    with pytest.raises(TypeError, match=r"^v: got \w+\.Masked, expected a plain cupy.ndarray"):
        cuflash.attention(q, q, masked_array())


def test_cuda_memory_without_cupy_says_what_to_install(monkeypatch):
    class Tensor:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **how):
            return "capsule"

    monkeypatch.setitem(sys.modules, "cupy", None)
    x = Tensor()
    with pytest.raises(
        ImportError, match=r"^q: got \w+\.Tensor in CUDA memory, expected CuPy: pip install \"cupy-cuda1"
    ):
        cuflash.attention(x, x, x)
