"""Streamed keys by the kernels: chunks through a stand-in for a device, calls by `cuflash.gpu.backend` on the emulator.

The stand-in copies as late as it may, or as early; partial results are merged by kernels/helpers/merge.cu.
"""

import contextlib
import functools
import gc
import sys
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.arrays import dlpack
from cuflash.arrays.array_info import numpy_dtype
from cuflash.arrays.units import in_bytes
from cuflash.gpu import tuning
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.passes import BACKWARD, FORWARD
from cuflash.streaming import calls, memory
from cuflash.testing.rule import gradients_of
from cuflash.testing.tangents import Moved, assert_tangents, movable
from tests.emulate.device import ElementwiseKernel
from tests.emulate.launcher import ALIGNMENT, DeviceArray, launcher
from tests.emulate.slices import CUPY, EmulatedSlices
from tests.fakes import FakeDevice
from tests.judging import assert_within
from tests.ranks import REQUIRED, Whole, judge
from tests.reductions import attention_of, inputs_of, lse_of
from tests.reductions import judge as judge_reductions
from tests.row_reductions import gap_is_clear
from tests.row_reductions import results_of as row_reductions_of
from tests.scored import MASKS, SCORES, Scored, score_args_of

pytestmark = pytest.mark.one_in(12)
SIZES: dict[str, Any] = {"seqlen_q": 70, "seqlen_k": 300, "num_heads": 2, "num_heads_kv": 1, "head_dim": 64}
CASES = {
    "9.0": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, dlse=True),
    "9.0 no values": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, dlse=True, has_values=False),
    "9.0 bshd": ct.Case(**SIZES, dtype="float16", layout="bshd", window=(150, 0), alibi_slopes=(2,)),
    "8.0": ct.Case(**SIZES, causal=True, dtype="float16", bias=(70, 300), kv_lengths=(170,)),
    "8.0 float32": ct.Case(**SIZES, dtype="float32", window=(40, 40)),
}


class EmulatedDevice(FakeDevice):
    def empty(self, shape, dtype):
        array = DeviceArray(shape, dtype)
        self.own.append(array)
        return array


@pytest.fixture
def emulated(monkeypatch):
    """Lets calls on NumPy arrays go by way of the emulator."""

    def use(module, **how):
        device = EmulatedDevice(**how)

        def slices(*, arrays, **fields):
            on_device = {name: x.view(DeviceArray) for name, x in arrays.items()}
            return EmulatedSlices(**fields, arrays=on_device, module=module)

        monkeypatch.setattr(calls, "device_of", lambda backend: device)
        monkeypatch.setattr(calls, "Slices", slices)
        monkeypatch.setattr(dlpack, "module_of", lambda array: CUPY)
        clear()
        return device

    def clear():
        memory._reads_keys_once.cache_clear()

    yield use
    clear()


@pytest.mark.parametrize("how", [{"late": True, "pinned": False}, {"late": False, "pinned": True}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_chunks_by_the_kernels_keep_the_oracle_rule(name, how, emulated, monkeypatch):
    case, arch = CASES[name], name[:3]
    arrays = case.arrays()
    q, k, v = ct.qkv(arrays)
    attn: Any = cuflash.FlashAttention(**case.keywords)
    with launcher(arch, computes=True) as found:
        emulated(found._module, **how)
        monkeypatch.setattr(dlpack.Imported, "export", lambda self, result, given: result.view(np.ndarray))
        keys = cuflash.streamed(k, v, chunk=128)
        attn.compile(q, *keys, **ct.optional(arrays))
        known = len(found._module._launches)
        out, lse = (x.view(np.ndarray) for x in attn.forward(q, *keys, **ct.optional(arrays)))
        need = ("dq", "dk", "dv", "dsinks") if case.sinks else DEFAULT_NEED
        gradients = attn.backward(arrays["dout"], q, *keys, out, lse, need=need, **ct.optional_backward(arrays))
        assert len(found._module._launches) == known  # nothing is planned or loaded anew
    ct.assert_forward(case, out, lse)
    ct.assert_backward(case, **{name: x.view(np.ndarray) for name, x in gradients._asdict().items()})


OF_TANGENTS = {
    "bfloat16": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, dlse=True, dropout=0.2),
    "float16 large": ct.Case(**SIZES, dtype="float16", layout="bshd", score_mean=4e3, alibi_slopes=(2,)),
    "float64": ct.Case(**{**SIZES, "head_dim": 32}, dtype="float64", window=(150, 0), bias=(70, 300)),
}


@pytest.mark.parametrize("name", OF_TANGENTS)
def test_chunks_with_tangents_by_the_kernels_keep_the_oracle_rule(name, emulated, monkeypatch):
    """Partial results are not rounded to the dtype of q before they are merged or added."""
    case = OF_TANGENTS[name]
    moved = Moved(names=tuple(movable(case)), cotangents=("tdout", "tdlse") if case.dlse else ("tdout",), common=10.0)
    arrays, tangents = case.arrays(), moved.arrays(case)
    q, k, v = ct.qkv(arrays)
    attn: Any = cuflash.FlashAttention(**case.keywords)
    of_inputs = {name: x for name, x in tangents.items() if name not in ("tdout", "tdlse")}
    need = ("tdq", "tdk", "tdv", "tdsinks") if case.sinks else ("tdq", "tdk", "tdv")
    with launcher("8.0", computes=True) as found:
        emulated(found._module, late=True, pinned=False)
        monkeypatch.setattr(dlpack.Imported, "export", lambda self, result, given: result.view(np.ndarray))
        keys = cuflash.streamed(k, v, chunk=128)
        results = attn.jvp(q, *keys, **ct.optional(arrays), **case.random, **of_inputs)
        results = type(results)(*(x.view(np.ndarray) for x in results))
        gradients = attn.backward_jvp(
            arrays["dout"], q, *keys, *results, need=need, **ct.optional_backward(arrays), **case.random, **tangents
        )
        kernels = [dict(spec.defines) for spec in found.launched if "jvp" in spec.source]
    wide = {name for own in kernels for name, value in own.items() if name.endswith("_WIDE") and value}
    assert wide == (set() if case.dtype == "float64" else {"CUFLASH_OUT_WIDE", "CUFLASH_DQ_WIDE"})
    ct.assert_forward(case, results.out, results.lse)
    tangents_of = {name: x.view(np.ndarray) for name, x in gradients._asdict().items()}
    assert_tangents(case, moved, {"tout": results.tout, "tlse": results.tlse} | tangents_of)


@pytest.mark.parametrize("chunk", [128, 512], ids=["chunks", "whole"])
@pytest.mark.parametrize("name", [*CASES, "9.0 functions"])
def test_what_is_tuned_is_what_runs_on_the_longest_chunk(name, chunk, emulated, monkeypatch):
    """The same kernels with the same defines, for problems of the same size: a call finds what tuning remembers."""

    def tune(plans, call_by, **how):
        tuned.append(plans[0])
        call_by(plans[0])()

    case = Whole.of(scored_case("9.0")) if name.endswith("functions") else Whole.of(CASES[name])
    arrays: dict[str, Any] = case.arrays
    tuned: list[Any] = []
    run: list[Any] = []
    q, k, v = ct.qkv(arrays)
    optional = {name: x for name, x in arrays.items() if name not in REQUIRED}
    attn: Any = cuflash.FlashAttention(**case.keywords)
    with launcher(name[:3], computes=False) as found:
        module = found._module
        monkeypatch.setattr(module, "_keep", lambda key, launch: run.append(launch.plan))
        monkeypatch.setattr(module, "Stopwatch", lambda call_by: call_by)
        monkeypatch.setattr(tuning, "tune", tune)
        monkeypatch.setattr(module.cupy.cuda, "Device", lambda number: contextlib.nullcontext(), raising=False)
        emulated(module, late=True, pinned=False)
        keys = cuflash.streamed(k, v, chunk=chunk)
        attn.tune(q, *keys, remember=False, **optional)
        run.clear()
        monkeypatch.setattr(dlpack.Imported, "export", lambda self, result, given: result.view(np.ndarray))
        out, lse = (x.view(np.ndarray) for x in attn.forward(q, *keys, **optional))
        attn.backward(arrays["dout"], q, *keys, out, lse, **optional)
    assert [plan.pass_ for plan in tuned] == [FORWARD, BACKWARD]
    assert {tuning._Key.of(plan) for plan in tuned} <= {tuning._Key.of(plan) for plan in run}


LARGE = {
    "9.0": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, bias=(300,)),
    "9.0 products": ct.Case(**SIZES, dtype="float16", score_mean=-3e4),
    "8.0": ct.Case(**SIZES, dtype="float16", bias=(70, 300), kv_lengths=(170,)),
    "8.0 float32": ct.Case(**SIZES, dtype="float32", window=(40, 40), bias=(300,)),
    "8.0 products": ct.Case(**SIZES, dtype="float32", score_mean=-3e4),
}


@pytest.mark.parametrize("name", LARGE)
def test_chunks_weigh_what_their_keys_do_where_scores_are_large(name, emulated):
    """A finite mask of all keys, or products around -3e4: lse, rounded, does not say what a chunk weighs."""
    case = LARGE[name]
    arrays: dict[str, Any] = case.arrays()
    q, k, v = ct.qkv(arrays)
    if case.bias is not None:
        arrays["bias"][...] = -1e9
    if case.sinks:
        arrays["sinks"][...] = -1e9
    attn: Any = cuflash.FlashAttention(**case.keywords)
    with launcher(name[:3], computes=True) as found:
        emulated(found._module, late=True, pinned=False)
        keys, optional = cuflash.streamed(k, v, chunk=128), ct.optional(arrays)
        out, lse = (x.view(np.ndarray) for x in attn.forward(q, *keys, **optional))
        need = ("dq", "dk", "dv", *(["dsinks"] if case.sinks else []))
        gradients = attn.backward(arrays["dout"], q, *keys, out, lse, need=need, **optional)
        dv = attn.backward(np.ones_like(out), q, *keys, out, lse, need=("dv",), **optional).dv.view(np.ndarray)
    judges = ct.yardsticks(case.problem, arrays, **case.random)
    results = {"out": out, "lse": lse, **gradients._asdict()}
    assert_within({n: x.view(np.ndarray) for n, x in results.items()}, judges)
    if not case.sinks:  # the weights of a row sum to 1
        close = 2.0**-8 if case.dtype == "float16" else 2.0**-14
        np.testing.assert_allclose(dv[..., 0].astype(np.float64).sum(), 140, rtol=close)


REDUCED = {
    "9.0": replace(CASES["9.0"], row_reductions=("max", "entropy")),
    "9.0 no values": replace(CASES["9.0 no values"], row_reductions=("entropy",)),
    "8.0": replace(CASES["8.0"], row_reductions=("max", "entropy")),
    "8.0 float32": replace(CASES["8.0 float32"], row_reductions=("max", "entropy")),
    "8.0 large": replace(LARGE["8.0 float32"], row_reductions=("max", "entropy")),
}


@pytest.mark.parametrize("how", [{"late": True, "pinned": False}, {"late": False, "pinned": True}], ids=str)
@pytest.mark.parametrize("name", REDUCED)
def test_row_reductions_of_chunks_by_the_kernels_keep_the_oracle_rule(name, how, emulated, monkeypatch):
    case = REDUCED[name]
    assert gap_is_clear(case) or "max" not in case.row_reductions
    with launcher(name[:3], computes=True) as found:
        sys.modules["cupy"].__dict__["ElementwiseKernel"] = ElementwiseKernel
        emulated(found._module, **how)
        monkeypatch.setattr(dlpack.Imported, "export", lambda self, result, given: result.view(np.ndarray))
        results = row_reductions_of(case, keys_of=functools.partial(cuflash.streamed, chunk=128))
    ct.assert_forward(case, **results.forward)
    ct.assert_backward(case, **results.gradients)


@pytest.mark.parametrize("name", [*CASES, *(f"{name} large" for name in LARGE)])
def test_reductions_of_weights_of_chunks_by_the_kernels_keep_the_oracle_rule(name, emulated, monkeypatch):
    case = LARGE[name.removesuffix(" large")] if name.endswith("large") else CASES[name]
    attn, arrays = attention_of(case), inputs_of(case)
    lse = lse_of(attn, arrays)
    q, k = arrays.pop("q"), cuflash.streamed(arrays.pop("k"), None, chunk=128)
    weights = np.random.default_rng(0).standard_normal(lse.shape).astype(lse.dtype)
    with launcher(name[:3], computes=True) as found:
        emulated(found._module, late=True, pinned=False)
        monkeypatch.setattr(dlpack.Imported, "export", lambda self, result, given: result.view(np.ndarray))
        sums = attn.column_sums(q, k, lse, weights, **arrays)
        largest = attn.column_max(q, k, lse, **arrays)
        top = attn.top_keys(q, k, lse, 3, **arrays)
    judge_reductions(case, weights, sums, largest, top)


SCORED = {
    "9.0": ("t5", None, "bfloat16"),
    "9.0 pairs": ("with_pairs", "documents", "float16"),
    "8.0": ("distance", "dilated", "float32"),
}


def scored_case(name):
    score, mask, dtype = SCORED[name]
    functions = (SCORES[score], MASKS[mask] if mask else None)
    random = np.random.default_rng(0)
    shapes = {"q": (2, 70, 64), "k": (1, 300, 64), "v": (1, 300, 64), "dout": (2, 70, 64)}
    arrays = {n: random.standard_normal((1, *shape)).astype(numpy_dtype(dtype)) for n, shape in shapes.items()}
    arrays |= score_args_of(functions, (1, 2, 70, 300), dtype, 0)
    attn = cuflash.FlashAttention(score=functions[0], mask=functions[1], window=(250, None))
    return Scored(attn, arrays, {}, name)


@pytest.mark.parametrize("name", SCORED)
def test_functions_of_chunks_by_the_kernels_keep_the_oracle_rule(name, emulated):
    """They count from the first key of all, in every chunk."""
    case = scored_case(name)
    q, k, v = case.inputs
    optional = {n: x for n, x in case.arrays.items() if n not in REQUIRED}
    need = gradients_of(case.problem)
    attn: Any = case.attention
    with launcher(name[:3], computes=True) as found:
        emulated(found._module, late=True, pinned=True)
        keys = cuflash.streamed(k, v, chunk=128)
        out, lse = (x.view(np.ndarray) for x in attn.forward(q, *keys, **optional))
        gradients = attn.backward(case.arrays["dout"], q, *keys, out, lse, need=need, **optional)
    results = {"out": out, "lse": lse, **gradients._asdict()}
    judge(case, {n: x.view(np.ndarray) for n, x in results.items()})


def test_gradients_of_arrays_of_16_bits_are_added_before_they_are_rounded(emulated):
    case, found = scored_case("9.0"), []
    q, k, v = case.inputs
    attn: Any = case.attention
    for dtype in (case.arrays["table"].dtype, np.float32):
        with launcher("9.0", computes=True) as launched:
            emulated(launched._module, late=True, pinned=True)
            keys, table = cuflash.streamed(k, v, chunk=128), case.arrays["table"].astype(dtype)
            out, lse = (x.view(np.ndarray) for x in attn.forward(q, *keys, table=table))
            results = attn.backward(case.arrays["dout"], q, *keys, out, lse, table=table, need=("dtable",))
            found.append(results.dtable.view(np.ndarray))
    np.testing.assert_array_equal(found[0], found[1].astype(found[0].dtype))


DECODING = {
    "sm90": (
        "9.0",
        ct.Case(seqlen_q=1, seqlen_k=700, num_heads=4, num_heads_kv=1, head_dim=64, dtype="bfloat16", sinks=True),
    ),
    "few keys": ("8.0", ct.Case(seqlen_q=2, seqlen_k=300, num_heads=2, head_dim=64, dtype="float32")),
    "sm80": ("8.0", ct.Case(seqlen_q=2, seqlen_k=700, num_heads=4, num_heads_kv=1, head_dim=32, dtype="float32")),
}


@pytest.mark.parametrize(("arch", "case"), DECODING.values(), ids=DECODING)
def test_decoding_reads_pinned_memory_where_it_is(arch, case, emulated):
    arrays = case.arrays()
    q, k, v = ct.qkv(arrays)
    attn: Any = cuflash.FlashAttention()
    with launcher(arch, computes=True) as found:
        for pinned, chunk, way in ((True, None, "mapped"), (True, 128, "pinned"), (False, None, "staged")):
            device = emulated(found._module, late=True, pinned=pinned)
            keys = cuflash.streamed(k, v, chunk=chunk)
            assert attn.plan(q, *keys, **ct.optional(arrays)).ways == {
                "forward": way,
                "backward": "pinned" if pinned else "staged",
            }
            out, lse = (x.view(np.ndarray) for x in attn.forward(q, *keys, **ct.optional(arrays)))
            ct.assert_forward(case, out, lse)
            assert bool(device.own) == (way != "mapped")
    shared = ct.Case(seqlen_q=2, seqlen_k=300, num_heads=2, num_heads_kv=1, head_dim=64, dtype="float32").arrays()
    with launcher("8.0", computes=False) as found:
        emulated(found._module, late=True, pinned=True)
        keys = cuflash.streamed(shared["k"], shared["v"])
        assert attn.plan(shared["q"], *keys).ways["forward"] == "pinned"  # each head would read keys by itself


class Meter:
    """The most memory of the stand-ins that is there at a time, in pieces of 512 bytes as CuPy's pool gives them."""

    def __init__(self):
        self.now = self.most = 0

    def allocated(self, nbytes):
        storage = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
        first = -storage.ctypes.data % ALIGNMENT
        size = -(-nbytes // 512) * 512
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, size)
        return storage[first : first + nbytes]

    def _freed(self, size):
        self.now -= size


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", [*CASES, *(f"{name} functions" for name in SCORED)])
def test_device_memory_is_what_the_plan_says(name, pinned, emulated, monkeypatch):
    arch, scored = name[:3], name.endswith("functions")
    case = Whole.of(scored_case(name.removesuffix(" functions")) if scored else CASES[name])
    arrays, need = case.arrays, gradients_of(case.problem) if scored else DEFAULT_NEED
    q, k, v = ct.qkv(arrays)
    optional = {name: x for name, x in arrays.items() if name not in REQUIRED}
    of_lse = {"dlse": arrays["dlse"]} if "dlse" in arrays else {}
    attn: Any = cuflash.FlashAttention(**case.keywords)
    meter = Meter()
    with launcher(arch, computes=False) as found:
        monkeypatch.setattr("tests.emulate.launcher.allocated", meter.allocated)
        keys = cuflash.streamed(k, v, chunk=128)
        emulated(found._module, late=True, pinned=pinned)
        plan = attn.plan(q, *keys, need=need, **optional)
        assert plan.ways["forward"] == ("pinned" if pinned else "staged")
        most = in_bytes(plan.device_bytes("backward"))
        assert f"{most} on the device at most: k and v " in plan.describe(width=0)
        out, lse = (arrays["dout"].copy(), np.zeros(case.problem.lse_shape, np.float32))
        for pass_ in ("forward", "backward"):
            emulated(found._module, late=True, pinned=pinned)
            gc.collect()
            meter.now = meter.most = 0
            if pass_ == "forward":
                results = attn.forward(q, *keys, **optional)
            else:
                results = attn.backward(arrays["dout"], q, *keys, out, lse, need=need, **optional, **of_lse)
            assert 0.9 * plan.device_bytes(pass_) < meter.most <= plan.device_bytes(pass_), pass_
            del results
