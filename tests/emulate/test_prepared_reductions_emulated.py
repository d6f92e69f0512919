"""plan, compile and tuning of reductions of the weights, on a device that is the emulator: what runs is planned."""

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash import dispatch, preparation
from cuflash.spec import reductions as spec
from cuflash.spec import without_values
from cuflash.spec.passes import COLUMN_MAX, COLUMN_SUMS, REDUCTIONS, TOP_KEYS
from tests.emulate.launcher import DeviceArray, filled, launcher
from tests.emulate.test_prepared_tangents_emulated import on_device, result_of
from tests.reductions import attention_of, inputs_of, judge, lse_of
from tests.sampling import examples

FEATURES = (
    "causal",
    "window",
    "scale",
    "softcap",
    "bias",
    "mask",
    "alibi_slopes",
    "kv_lengths",
    "gqa",
    "sinks",
    "layout",
)


class Xp(SimpleNamespace):
    """As much of CuPy as calls without values ask for, of which new arrays are `DeviceArray`."""

    def __getattr__(self, name):
        return getattr(np, name)


XP = Xp(
    empty=DeviceArray,
    zeros=lambda shape, dtype: filled(shape, 0, dtype),
    ones=lambda shape, dtype: filled(shape, 1, dtype),
    ascontiguousarray=lambda x: np.ascontiguousarray(x).view(DeviceArray),
)


@contextlib.contextmanager
def device(arch, monkeypatch, *, computes):
    """The launcher, which the interface takes for that of CuPy's arrays."""
    with launcher(arch, computes=computes) as launches, monkeypatch.context() as patch:
        reductions = pytest.importorskip("cuflash.gpu.reductions")
        patch.setattr(dispatch, "backend_of", {"cupy": launches.backend}.__getitem__)
        patch.setattr(dispatch, "reductions_of", {"cupy": reductions}.__getitem__)
        for module in (preparation, spec, without_values, reductions):
            patch.setattr(module, "module_of", lambda array: XP)
        yield launches, reductions


def calls_of(case, count):
    """Each reduction's name with its arguments besides q, k and optional inputs; and q, k and the optional inputs."""
    attn, arrays, rng = attention_of(case), inputs_of(case), np.random.default_rng(case.seed)
    lse = lse_of(attn, arrays)
    weights, shape = rng.standard_normal(lse.shape).astype(lse.dtype), (*lse.shape[:-1], case.seqlen_k)
    dsums = rng.standard_normal(shape).astype(lse.dtype)
    own: dict[str, dict[str, Any]] = {
        "column_sums": {"lse": lse, "weights": weights},
        "column_max": {"lse": lse},
        "top_keys": {"lse": lse, "count": count},
        "column_sums_backward": {"lse": lse, "weights": weights, "dsums": dsums, "need": ("dq", "dk", "dlse")},
    }
    found = {
        method: {name: on_device(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        for method, given in own.items()
    }
    return attn, {name: on_device(x) for name, x in arrays.items()}, found


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
def test_the_kernels_of_a_plan_are_those_that_run(arch, monkeypatch):
    @settings(max_examples=examples(30))
    @given(
        ct.cases(features=FEATURES, max_seqlen=129, max_head_dim=96, max_scores=2**14, dtypes=("bfloat16",)),
        st.sampled_from((1, 16, 60)),
    )
    def every_call(case, count):
        attn, arrays, own = calls_of(case, count)
        with device(arch, monkeypatch, computes=False) as (launches, _):
            together: dict[str, Any] = {name: x for given in own.values() for name, x in given.items()}
            plans: Any = attn.plan(**arrays, v=None, passes=tuple(own), **together)
            assert plans.forward is plans.backward is None
            for method, given in own.items():
                found = getattr(plans, method)
                several = (found.backward, found.forward) if method == "column_sums_backward" else (found,)
                planned = [kernel for plan in several for kernel in plan.kernels if kernel.grid]
                del launches.launched[:]
                attn.compile(**arrays, v=None, passes=[method], **given)
                assert launches.launched == planned
                del launches.launched[:]
                getattr(attn, method)(**arrays, **given)
                assert launches.launched == planned

    every_call()


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
def test_results_of_candidates(arch, monkeypatch):
    """Each candidate writes to results of its own."""
    case = ct.Case(seqlen_q=70, seqlen_k=90, num_heads=2, head_dim=32, dtype="bfloat16", causal=True, batch=2)
    attn, arrays, own = calls_of(case, 16)
    weights = np.asarray(own["column_sums"]["weights"])
    with device(arch, monkeypatch, computes=True) as (launches, module):
        monkeypatch.setattr(launches.backend, "tuned", lambda *given, results, **how: (given, results))
        monkeypatch.setattr(module, "Tuning", lambda **found: found)
        found = {}
        for pass_ in REDUCTIONS[:3]:
            tuned: Any = attn.tune(**arrays, v=None, passes=[pass_.name], **own[pass_.name])
            given, results = tuned[pass_.name]
            plans, call_by = launches.backend.trials(*given, (0, 0), results)
            assert len(plans) > 1
            found[pass_] = [np.array(x) for x in result_of(launches, plans[-1], call_by)]
    judge(case, weights, found[COLUMN_SUMS][0], found[COLUMN_MAX][0], found[TOP_KEYS])
