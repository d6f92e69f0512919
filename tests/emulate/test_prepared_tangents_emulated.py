"""plan, compile and tuning of passes with tangents, on a device that is the emulator: what runs is what is planned."""

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import dispatch
from cuflash.spec.binding import of_pass
from cuflash.spec.inputs import NAMES
from cuflash.spec.passes import BACKWARD_JVP, JVP, PASSES_WITH_TANGENTS
from cuflash.testing import cases, optional
from cuflash.testing.tangents import COTANGENTS, Moved, assert_tangents, tangents_by
from tests.emulate.launcher import DeviceArray, launcher
from tests.sampling import examples
from tests.second_derivatives import CASES, FEATURES, moved_by

PASSES = tuple(pass_.name for pass_ in PASSES_WITH_TANGENTS)


def on_device(array: np.ndarray) -> DeviceArray:
    return array.view(DeviceArray)


@contextlib.contextmanager
def device(arch, monkeypatch, *, computes):
    """The launcher, which the interface takes for that of CuPy's arrays."""
    with launcher(arch, computes=computes) as launches, monkeypatch.context() as patch:
        patch.setattr(dispatch, "backend_of", {"cupy": launches.backend}.__getitem__)
        yield launches


def call_of(case, moved) -> dict[str, Any]:
    """The arguments of jvp, and of what prepares it."""
    arrays, tangents = case.arrays(on_device), moved.arrays(case, on_device)
    given = {name: arrays[name] for name in ("q", "k", "v")} | optional(arrays)
    return given | {name: x for name, x in tangents.items() if name not in COTANGENTS}


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
def test_the_kernels_of_a_plan_are_those_that_run(arch, monkeypatch):
    @settings(max_examples=examples(30))
    @given(cases(features=FEATURES, max_seqlen=129, max_head_dim=96, max_scores=2**14, dtypes=("bfloat16",)), st.data())
    def every_call(case, data):
        moved = data.draw(moved_by(case))
        call, attn = call_of(case, moved), cuflash.FlashAttention(**case.keywords)
        if not any(name.startswith("t") for name in call):
            return
        with device(arch, monkeypatch, computes=False) as launches:
            plans: Any = attn.plan(**call, passes=PASSES)
            assert plans.forward is plans.backward is None
            planned = [kernel for plan in (plans.jvp, plans.backward_jvp) for kernel in plan.kernels if kernel.grid]
            attn.compile(**call, passes=PASSES)
            assert launches.launched == planned
            del launches.launched[:]
            results = attn.jvp(**call, **case.random)
            dout = case.arrays(on_device)["dout"]
            attn.backward_jvp(dout, **call, **results._asdict(), **case.random)
            assert launches.launched == planned

    every_call()


def result_of(launches, plan, call_by):
    """The results of a plan that tuning tries, whose launch the launcher knows as those of calls."""

    def launch_of(*arguments):
        launch = known["tried"] = original(*arguments)
        return launch

    known, original = launches.launch_cache._launches, launches.launch.Launch.of
    known.clear()
    try:
        with mock.patch.object(launches.launch.Launch, "of", launch_of):
            return call_by(plan)()
    finally:
        known.clear()


@pytest.mark.parametrize(("case", "arch"), [(replace(CASES[0], dlse=False), "8.0"), (CASES[3], "9.0")], ids=["a", "b"])
def test_results_of_calls_and_of_candidates(case, arch, monkeypatch):
    """Through the launcher: pointers of tangents and of row_tangents; and tuning runs its plans on the same arrays."""
    moved = Moved(names=("q", "k", "v"))
    with device(arch, monkeypatch, computes=True) as launches:
        found = tangents_by(cuflash.FlashAttention(**case.keywords), case, moved, convert=on_device)
        assert_tangents(case, moved, {name: np.asarray(x) for name, x in found.items()})
        arrays = dict.fromkeys(NAMES) | call_of(case, moved) | {"dout": case.arrays(on_device)["dout"]}
        random = tuple(case.random.values()) or (0, 0)
        for pass_, expected in ((JVP, ("tout", "tlse")), (BACKWARD_JVP, ("tdq", "tdk", "tdv"))):
            own = launches.backend._arrays_of(pass_, case.options, arrays, random)
            assert {*own} >= {*of_pass(pass_, arrays, case.options)}
            plans, call_by = launches.backend.trials(pass_, case.options, own, random)
            results = dict(zip(pass_.default, result_of(launches, plans[-1], call_by), strict=True))
            assert_tangents(case, moved, {name: np.asarray(results[name]) for name in expected})
