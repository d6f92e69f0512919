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
from cuflash.arrays.units import in_bytes
from cuflash.gpu import tuning
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.passes import BACKWARD, FORWARD
from cuflash.testing.rule import gradients_of
from tests import streams
from tests.backends import DEVICE
from tests.emulate.device import ElementwiseKernel
from tests.emulate.launcher import ALIGNMENT, launcher
from tests.judging import assert_within
from tests.ranks import REQUIRED, Whole
from tests.reductions import attention_of, inputs_of, lse_of
from tests.reductions import judge as judge_reductions
from tests.row_reductions import gap_is_clear
from tests.row_reductions import results_of as row_reductions_of
from tests.streams import HOWS, SMALL, scored_case

pytestmark = pytest.mark.one_in(12)
CASES = {
    f"{name.removeprefix('emulated ')} {of}": case
    for name, cases in streams.CASES.items()
    if name != DEVICE
    for of, case in cases.items()
}


@pytest.fixture
def emulated():
    """Lets calls on NumPy arrays go by way of the emulator, to the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda module, **how: stack.enter_context(streams.emulated(module, **how))


@pytest.mark.parametrize("chunk", [128, 512], ids=["chunks", "whole"])
@pytest.mark.parametrize("name", [*CASES, "9.0 t5 functions"])
def test_what_is_tuned_is_what_runs_on_the_longest_chunk(name, chunk, emulated, monkeypatch):
    """The same kernels with the same defines, for problems of the same size: a call finds what tuning remembers."""

    def tune(plans, call_by, **how):
        tuned.append(plans[0])
        call_by(plans[0])()

    case = Whole.of(scored_case("t5")) if name.endswith("functions") else Whole.of(CASES[name])
    arrays: dict[str, Any] = case.arrays
    tuned: list[Any] = []
    run: list[Any] = []
    q, k, v = ct.qkv(arrays)
    optional = {name: x for name, x in arrays.items() if name not in REQUIRED}
    attn: Any = cuflash.FlashAttention(**case.keywords)
    with launcher(name[:3], computes=False) as found:
        module = found.backend
        monkeypatch.setattr(found.launch_cache, "keep", lambda cache, key, launch: run.append(launch.plan))
        monkeypatch.setattr(module, "Stopwatch", lambda call_by: call_by)
        monkeypatch.setattr(tuning, "tune", tune)
        monkeypatch.setattr(module.cupy.cuda, "Device", lambda number: contextlib.nullcontext(), raising=False)
        emulated(module, late=True, pinned=False)
        keys = cuflash.streamed(k, v, chunk=chunk)
        attn.tune(q, *keys, remember=False, **optional)
        run.clear()
        out, lse = (x.view(np.ndarray) for x in attn.forward(q, *keys, **optional))
        attn.backward(arrays["dout"], q, *keys, out, lse, **optional)
    assert [plan.pass_ for plan in tuned] == [FORWARD, BACKWARD]
    assert {tuning._Key.of(plan) for plan in tuned} <= {tuning._Key.of(plan) for plan in run}


LARGE = {
    "9.0": ct.Case(**SMALL, causal=True, dtype="bfloat16", sinks=True, bias=(300,)),
    "9.0 products": ct.Case(**SMALL, dtype="float16", score_mean=-3e4),
    "8.0": ct.Case(**SMALL, dtype="float16", bias=(70, 300), kv_lengths=(170,)),
    "8.0 float32": ct.Case(**SMALL, dtype="float32", window=(40, 40), bias=(300,)),
    "8.0 products": ct.Case(**SMALL, dtype="float32", score_mean=-3e4),
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
        emulated(found.backend, late=True, pinned=False)
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
    "9.0": replace(CASES["9.0 sinks"], row_reductions=("max", "entropy")),
    "9.0 no values": replace(CASES["9.0 no values"], row_reductions=("entropy",)),
    "8.0": replace(CASES["8.0 lengths"], row_reductions=("max", "entropy")),
    "8.0 float32": replace(CASES["8.0 float32"], row_reductions=("max", "entropy")),
    "8.0 large": replace(LARGE["8.0 float32"], row_reductions=("max", "entropy")),
}


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("name", REDUCED)
def test_row_reductions_of_chunks_by_the_kernels_keep_the_oracle_rule(name, how, emulated):
    case = REDUCED[name]
    assert gap_is_clear(case) or "max" not in case.row_reductions
    with launcher(name[:3], computes=True) as found:
        sys.modules["cupy"].__dict__["ElementwiseKernel"] = ElementwiseKernel
        emulated(found.backend, **how)
        results = row_reductions_of(case, keys_of=functools.partial(cuflash.streamed, chunk=128))
    ct.assert_forward(case, **results.forward)
    ct.assert_backward(case, **results.gradients)


@pytest.mark.parametrize("name", [*CASES, *(f"{name} large" for name in LARGE)])
def test_reductions_of_weights_of_chunks_by_the_kernels_keep_the_oracle_rule(name, emulated):
    case = LARGE[name.removesuffix(" large")] if name.endswith("large") else CASES[name]
    attn, arrays = attention_of(case), inputs_of(case)
    lse = lse_of(attn, arrays)
    q, k = arrays.pop("q"), cuflash.streamed(arrays.pop("k"), None, chunk=128)
    weights = np.random.default_rng(0).standard_normal(lse.shape).astype(lse.dtype)
    with launcher(name[:3], computes=True) as found:
        emulated(found.backend, late=True, pinned=False)
        sums = attn.column_sums(q, k, lse, weights, **arrays)
        largest = attn.column_max(q, k, lse, **arrays)
        top = attn.top_keys(q, k, lse, 3, **arrays)
    judge_reductions(case, weights, sums, largest, top)


def test_gradients_of_arrays_of_16_bits_are_added_before_they_are_rounded(emulated):
    case, found = scored_case("t5"), []
    q, k, v = case.inputs
    attn: Any = case.attention
    for dtype in (case.arrays["table"].dtype, np.float32):
        with launcher("9.0", computes=True) as launched:
            emulated(launched.backend, late=True, pinned=True)
            keys, table = cuflash.streamed(k, v, chunk=128), case.arrays["table"].astype(dtype)
            out, lse = (x.view(np.ndarray) for x in attn.forward(q, *keys, table=table))
            results = attn.backward(case.arrays["dout"], q, *keys, out, lse, table=table, need=("dtable",))
            found.append(results.dtable.view(np.ndarray))
    np.testing.assert_array_equal(found[0], found[1].astype(found[0].dtype))


def test_keys_that_heads_share_are_not_read_where_they_are(emulated):
    """Each head would read them by itself, over the bus."""
    case = ct.Case(seqlen_q=2, seqlen_k=300, num_heads=2, num_heads_kv=1, head_dim=64, dtype="float32")
    q, k, v = ct.qkv(case.arrays())
    attn: Any = cuflash.FlashAttention()
    with launcher("8.0", computes=False) as found:
        emulated(found.backend, late=True, pinned=True)
        assert attn.plan(q, *cuflash.streamed(k, v)).ways["forward"] == "pinned"


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
@pytest.mark.parametrize("name", [*CASES, *(f"{name} functions" for name in ("9.0 t5", "9.0 pairs", "8.0 distance"))])
def test_device_memory_is_what_the_plan_says(name, pinned, emulated, monkeypatch):
    arch, scored = name[:3], name.endswith("functions")
    case = Whole.of(scored_case(name.split()[1]) if scored else CASES[name])
    arrays, need = case.arrays, gradients_of(case.problem) if scored else DEFAULT_NEED
    q, k, v = ct.qkv(arrays)
    optional = {name: x for name, x in arrays.items() if name not in REQUIRED}
    of_lse = {"dlse": arrays["dlse"]} if "dlse" in arrays else {}
    attn: Any = cuflash.FlashAttention(**case.keywords)
    meter = Meter()
    with launcher(arch, computes=False) as found:
        monkeypatch.setattr("tests.emulate.launcher.allocated", meter.allocated)
        keys = cuflash.streamed(k, v, chunk=128)
        emulated(found.backend, late=True, pinned=pinned)
        plan = attn.plan(q, *keys, need=need, **optional)
        assert plan.ways["forward"] == ("pinned" if pinned else "staged")
        most = in_bytes(plan.device_bytes("backward"))
        assert f"{most} on the device at most: k and v " in plan.describe(width=0)
        out, lse = (arrays["dout"].copy(), np.zeros(case.problem.lse_shape, np.float32))
        for pass_ in ("forward", "backward"):
            emulated(found.backend, late=True, pinned=pinned)
            gc.collect()
            meter.now = meter.most = 0
            if pass_ == "forward":
                results = attn.forward(q, *keys, **optional)
            else:
                results = attn.backward(arrays["dout"], q, *keys, out, lse, need=need, **optional, **of_lse)
            assert 0.9 * plan.device_bytes(pass_) < meter.most <= plan.device_bytes(pass_), pass_
            del results
