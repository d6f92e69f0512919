"""Streamed keys and values by the kernels, emulated and on a device, held to the oracle; tests/pure has the CPU path.

The stand-in for a device of the emulator copies as late as it may, or as early. Partial results are merged by
kernels/helpers/merge.cu.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import cuflash.testing as ct
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.testing.tangents import Moved, movable
from tests.backends import DEVICE, on_backends
from tests.ranks import judge
from tests.streams import CASES, DECODING, HOWS, SCORED, WITH_TANGENTS, judge_tangents, scored_case, streaming

CHUNKS_ON_DEVICE = (128, 320, 1000, None)


@functools.cache
def compile_ahead() -> None:
    """Compile what tests launch on the device, on as many threads as there are cores."""

    def run(case: ct.Case, chunk: int | None) -> None:
        with streaming(DEVICE) as on:
            on.results(case, chunk)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        calls: list[tuple[ct.Case, int | None]] = [(case, 320) for case in CASES[DEVICE].values()]
        calls += [(case, chunk) for case in DECODING[DEVICE].values() for chunk in (128, None)]
        for pending in [pool.submit(run, *call) for call in calls]:
            pending.exception()  # which the tests will meet


def names_of(cases: dict[str, dict[str, ct.Case]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(own) for name, own in cases.items()}


@on_backends(names_of(CASES), of="name")
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_any_chunks_keep_the_oracle_rule(backend, name, how):
    case = CASES[backend.name][name]
    with streaming(backend.name, **how) as on:
        if backend.device:
            attn, inputs, others = on.arguments(case, 128)
            attn.compile(*inputs, **ct.optional(others))
            known = len(on.launcher.launch_cache._launches)
            judge(case, on.results(case, 128, need=(*DEFAULT_NEED, *(["dsinks"] if case.sinks else []))))
            assert len(on.launcher.launch_cache._launches) == known  # nothing is planned or loaded anew
        else:
            compile_ahead()
            for chunk in CHUNKS_ON_DEVICE:
                judge(case, on.results(case, chunk))


@on_backends(names_of(WITH_TANGENTS), of="name")
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_chunks_with_tangents_keep_the_oracle_rule(backend, name, how):
    """Partial results are not rounded to the dtype of q before they are merged or added."""
    case = WITH_TANGENTS[backend.name][name]
    moved = Moved(names=tuple(movable(case)), cotangents=("tdout", "tdlse") if case.dlse else ("tdout",), common=10.0)
    with streaming(backend.name, **how) as on:
        need = ("tdq", "tdk", "tdv", *(["tdsinks"] if case.sinks else []))
        judge_tangents(case, moved, on.tangents(case, moved, 128 if backend.device else 320, need=need))
    if backend.device:
        kernels = [dict(spec.defines) for spec in on.launcher.launched if "jvp" in spec.source]
        wide = {name for own in kernels for name, value in own.items() if name.endswith("_WIDE") and value}
        assert wide == (set() if case.dtype == "float64" else {"CUFLASH_OUT_WIDE", "CUFLASH_DQ_WIDE"})


OF_SCORES = {"emulated 9.0": ("t5", "pairs"), "emulated 8.0": ("distance",), DEVICE: tuple(SCORED)}


@on_backends(OF_SCORES, of="name")
def test_functions_of_chunks_keep_the_oracle_rule(backend, name):
    """They count from the first key of all, in every chunk."""
    case = scored_case(name, on_device=not backend.device)
    with streaming(backend.name) as on:
        for chunk in (128,) if backend.device else CHUNKS_ON_DEVICE[:3]:
            judge(case, on.results(case, chunk))


@on_backends(names_of(DECODING), of="name")
@pytest.mark.parametrize(
    ("pinned", "chunk", "way"), [(True, None, "mapped"), (True, 128, "pinned"), (False, None, "staged")]
)
def test_decoding_reads_pinned_memory_where_it_is(backend, name, pinned, chunk, way):
    case = DECODING[backend.name][name]
    with streaming(backend.name, pinned=pinned) as on:
        attn, inputs, others = on.arguments(case, chunk)
        of_backward = "pinned" if pinned else "staged"
        assert attn.plan(*inputs, **ct.optional(others)).ways == {"forward": way, "backward": of_backward}
        results = attn.forward(*inputs, **ct.optional(others))
        ct.assert_forward(case, *map(on.to_numpy, results))
        assert on.device is None or bool(on.device.own) == (way != "mapped")
