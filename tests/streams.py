"""Streamed keys and values on the CPU, by emulated kernels and on a device.

with streaming(backend.name, late=True, pinned=False) as on:
    judge(case, on.results(case, chunk=128))
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.arrays import dlpack
from cuflash.arrays.array_info import numpy_dtype
from cuflash.streaming import calls, memory
from cuflash.testing.tangents import Moved, assert_tangents
from tests.backends import DEVICE
from tests.emulate.launcher import DeviceArray, launcher
from tests.emulate.slices import CUPY, EmulatedSlices
from tests.fake_cupy import FakeDevice
from tests.ranks import REQUIRED, Whole
from tests.scored import MASKS, SCORES, Scored, score_args_of
from tests.second_derivatives import has_gradient

HOWS = ({"late": True, "pinned": False}, {"late": False, "pinned": True})
SMALL: dict[str, Any] = {"seqlen_q": 70, "seqlen_k": 300, "num_heads": 2, "num_heads_kv": 1, "head_dim": 64}
SIZES: dict[str, Any] = {
    "batch": 2,
    "seqlen_q": 300,
    "seqlen_k": 1000,
    "num_heads": 4,
    "num_heads_kv": 2,
    "head_dim": 64,
    "causal": True,
}
CASES: dict[str, dict[str, ct.Case]] = {
    "emulated 9.0": {
        "sinks": ct.Case(**SMALL, causal=True, dtype="bfloat16", sinks=True, dlse=True),
        "no values": ct.Case(**SMALL, causal=True, dtype="bfloat16", sinks=True, dlse=True, has_values=False),
        "bshd": ct.Case(**SMALL, dtype="float16", layout="bshd", window=(150, 0), alibi_slopes=(2,)),
    },
    "emulated 8.0": {
        "lengths": ct.Case(**SMALL, causal=True, dtype="float16", bias=(70, 300), kv_lengths=(170,)),
        "float32": ct.Case(**SMALL, dtype="float32", window=(40, 40)),
    },
    DEVICE: {  # kernels take long to compile: so cases have many options each
        "sinks": ct.Case(**SIZES, dtype="bfloat16", sinks=True, dlse=True),
        "float32": ct.Case(**SIZES, dtype="float32", window=(100, None), layout="bshd"),
        "bias": ct.Case(
            **SIZES, dtype="bfloat16", bias=(300, 1), bias_dtype="input", kv_lengths=(1000, 300), alibi_slopes=(4,)
        ),
        "dropout": ct.Case(**SIZES, dtype="float16", mask=(1000,), dropout=0.25),
        "blocks": ct.Case(**SIZES, dtype="float16", block_mask=(), block_size=(64, 64)),
    },
}
WITH_TANGENTS: dict[str, dict[str, ct.Case]] = {
    "emulated 8.0": {
        "bfloat16": ct.Case(**SMALL, causal=True, dtype="bfloat16", sinks=True, dlse=True, dropout=0.2),
        "float16 large": ct.Case(**SMALL, dtype="float16", layout="bshd", score_mean=4e3, alibi_slopes=(2,)),
        "float64": ct.Case(**{**SMALL, "head_dim": 32}, dtype="float64", window=(150, 0), bias=(70, 300)),
    },
    DEVICE: {
        "bfloat16": ct.Case(**SIZES, dtype="bfloat16", sinks=True, dlse=True, dropout=0.25),
        "float16": ct.Case(
            **SIZES, dtype="float16", window=(500, None), layout="bshd", alibi_slopes=(4,), softcap=20.0
        ),
        "float32": ct.Case(**SIZES, dtype="float32", bias=(300, 1), kv_lengths=(1000, 300)),
        "float64": ct.Case(**{**SIZES, "head_dim": 32}, dtype="float64", score_mean=3e3),
    },
}
DECODING: dict[str, dict[str, ct.Case]] = {
    "emulated 9.0": {
        "bfloat16": ct.Case(
            seqlen_q=1, seqlen_k=700, num_heads=4, num_heads_kv=1, head_dim=64, dtype="bfloat16", sinks=True
        )
    },
    "emulated 8.0": {
        "few keys": ct.Case(seqlen_q=2, seqlen_k=300, num_heads=2, head_dim=64, dtype="float32"),
        "float32": ct.Case(seqlen_q=2, seqlen_k=700, num_heads=4, num_heads_kv=1, head_dim=32, dtype="float32"),
    },
    DEVICE: {
        "bfloat16": ct.Case(seqlen_q=1, seqlen_k=5000, num_heads=8, num_heads_kv=2, head_dim=128, dtype="bfloat16"),
        "float32": ct.Case(
            seqlen_q=2, seqlen_k=5000, num_heads=2, head_dim=64, dtype="float32", batch=2, layout="bshd"
        ),
    },
}
SCORED = {
    "t5": ("t5", None, "bfloat16"),
    "pairs": ("with_pairs", "documents", "float16"),
    "distance": ("distance", "dilated", "float32"),
}
KEYS = ("dk", "dv", "tdk", "tdv")  # results that are where keys and values are


def scored_case(name: str, on_device: bool = False) -> Scored:
    score, mask, dtype = SCORED[name]
    functions = (SCORES[score], MASKS[mask] if mask else None)
    random = np.random.default_rng(0)
    heads, rows, keys = (4, 300, 1000) if on_device else (2, 70, 300)
    shapes = {"q": (heads, rows, 64), "k": (heads // 2, keys, 64), "v": (heads // 2, keys, 64)}
    shapes |= {"dout": shapes["q"]}
    arrays = {n: random.standard_normal((1, *shape)).astype(numpy_dtype(dtype)) for n, shape in shapes.items()}
    arrays |= score_args_of(functions, (1, heads, rows, keys), dtype, 0)
    attn = cuflash.FlashAttention(score=functions[0], mask=functions[1], window=(600 if on_device else 250, None))
    return Scored(attn, arrays, {}, name)


class EmulatedDevice(FakeDevice):
    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        array = DeviceArray(shape, dtype)
        self.own.append(array)
        return array


def untouched(x: Any) -> Any:
    return x


class Streams(NamedTuple):
    """Calls with streamed keys and values, of arrays in host memory; results come back there."""

    on_device: Callable[[Any], Any] = untouched
    in_host_memory: Callable[[Any], Any] = untouched  # keys and values
    again: Callable[[Any], Any] = np.asarray  # a result as an argument of the next call
    to_numpy: Callable[[Any], Any] = np.asarray
    launcher: Any = None  # of the emulator, and the stand-in for its device
    device: Any = None

    def arguments(self, case: ct.Case | Scored, chunk: int | None, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
        """The object of a case; q and streamed keys; all other arrays, and what dropout takes."""
        whole = Whole.of(case)
        q, *own = ct.qkv(whole.arrays)
        keys: Any = cuflash.streamed(*(None if x is None else self.in_host_memory(x) for x in own), chunk=chunk)
        others = {name: self.on_device(x) for name, x in whole.arrays.items() if name not in ("q", "k", "v")}
        attn = cuflash.FlashAttention(**(whole.keywords | options))
        return attn, (self.on_device(q), *keys), others | whole.random

    def results(
        self, case: ct.Case | Scored, chunk: int | None, *, need: Sequence[str] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Results of both passes, of all gradients or of those that are needed."""
        attn, inputs, others = self.arguments(case, chunk, **options)
        need = ct.gradients_of(case.problem) if need is None else need
        found = attn.forward(*inputs, **optional(others))._asdict()
        rows = [x if x is None else self.again(x) for x in found.values()]
        gradients = attn.backward(others["dout"], *inputs, *rows, need=need, **optional(others, "dlse"))
        return self._in_host_memory(found | dict(zip(need, gradients, strict=True)))

    def tangents(
        self, case: ct.Case, moved: Moved, chunk: int | None, *, need: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """out and lse, and tangents, of all gradients or of those that are needed."""
        attn, inputs, others = self.arguments(case, chunk)
        own = {
            name: (self.in_host_memory if name in ("tk", "tv") else self.on_device)(x)
            for name, x in moved.arrays(case).items()
        }
        of_inputs = {name: x for name, x in own.items() if name not in ("tdout", "tdlse")}
        found = attn.jvp(*inputs, **optional(others), **of_inputs)._asdict()
        rows = [x if x is None else self.again(x) for x in found.values()]
        every = (f"t{name}" for name in case.problem.gradients if has_gradient(case, name))
        need = tuple(every) if need is None else need
        own |= optional(others, "dlse")
        found |= attn.backward_jvp(others["dout"], *inputs, *rows, need=need, **own)._asdict()
        return self._in_host_memory(found)

    def _in_host_memory(self, found: dict[str, Any]) -> dict[str, Any]:
        assert all(found[name] is None or isinstance(found[name], np.ndarray) for name in KEYS if name in found)
        return {name: x if x is None else self.to_numpy(x) for name, x in found.items()}


ON_CPU = Streams()


def optional(others: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: x for name, x in others.items() if name not in REQUIRED or name in names}


def judge_tangents(case: ct.Case, moved: Moved, results: dict[str, Any]) -> None:
    ct.assert_forward(case, results["out"], results["lse"])
    assert_tangents(case, moved, {name: x for name, x in results.items() if name not in ("out", "lse")})


def pinned_copy(array: Any) -> Any:
    """Of an array, for copies to a device that overlap what it computes."""
    import cupyx

    found = cupyx.empty_pinned(array.shape, array.dtype)
    found[...] = array
    return found


@contextlib.contextmanager
def through(how: dict[str, Any] | None) -> Iterator[FakeDevice | None]:
    """Lets calls on NumPy arrays go by way of a stand-in for a device, or of none."""
    device = None if how is None else FakeDevice(**how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "device_of", lambda backend: device)
        yield device


@contextlib.contextmanager
def emulated(module: Any, *, late: bool, pinned: bool) -> Iterator[EmulatedDevice]:
    """Lets calls on NumPy arrays go by way of the emulator."""
    device = EmulatedDevice(late=late, pinned=pinned)

    def slices(*, arrays: dict[str, Any], **fields: Any) -> EmulatedSlices:
        on_device = {name: x.view(DeviceArray) for name, x in arrays.items()}
        return EmulatedSlices(**fields, arrays=on_device, module=module)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "device_of", lambda backend: device)
        patch.setattr(calls, "Slices", slices)
        patch.setattr(dlpack, "module_of", lambda array: CUPY)
        patch.setattr(dlpack.Imported, "export", lambda self, result, given: result.view(np.ndarray))
        memory._reads_keys_once.cache_clear()
        yield device
    memory._reads_keys_once.cache_clear()


@contextlib.contextmanager
def streaming(name: str, *, late: bool = True, pinned: bool = True) -> Iterator[Streams]:
    """The calls of a backend: of emulated kernels, with a device that copies late or early, or on a device."""
    if name == DEVICE:
        import cupy

        yield Streams(cupy.asarray, pinned_copy if pinned else untouched, untouched, cupy.asnumpy)
    else:
        arch = name.removeprefix("emulated ")
        with launcher(arch, computes=True) as found, emulated(found.backend, late=late, pinned=pinned) as device:
            yield ON_CPU._replace(launcher=found, device=device)
