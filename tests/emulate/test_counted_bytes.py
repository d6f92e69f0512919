"""The model of what a plan moves, against the bytes that the kernels load, store and add in the emulator."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import Statistics, passes
from cuflash.plan import LaunchPlan, backward
from cuflash.plan.sm90.tiles import BACKWARD_SM90_TILES
from cuflash.spec.passes import BACKWARD, COLUMN_SUMS, FORWARD
from tests.emulate import attention
from tests.emulate.attention import problem_of
from tests.emulate.checks import FEW_SMS
from tests.emulate.test_decode import CASE, SHORT_TILES
from tests.emulate.test_decode_sm80 import fitting
from tests.sampling import examples

pytestmark = pytest.mark.one_in(3)

WINDOWED: dict[str, Any] = {"causal": "top_left", "window": (90, None)}


@dataclass(frozen=True)
class Kernels:
    """Those of a device; with `deterministic`, dq has a kernel of its own on compute capability 8.0."""

    arch: Any
    options: dict[str, Any]
    deterministic: bool = False

    def __str__(self):
        arch = self.arch if isinstance(self.arch, str) else "9.0"
        return "-".join((arch, *self.options, *(["deterministic"] if self.deterministic else [])))


KERNELS = [
    *(Kernels(arch, options) for arch in ("8.0", FEW_SMS) for options in ({}, WINDOWED, {"has_values": False})),
    Kernels("8.0", {}, deterministic=True),
]


@st.composite
def cases(draw, options):
    heads_kv = draw(st.integers(1, 2))
    return ct.Case(
        batch=draw(st.integers(1, 2)),
        num_heads=heads_kv * draw(st.integers(1, 2)),
        num_heads_kv=heads_kv,
        seqlen_q=draw(st.integers(1, 300)),
        seqlen_k=draw(st.integers(1, 300)),
        head_dim=16,
        dtype="float16",
        **options,
    )


def counted(plan: LaunchPlan, launches: list[Statistics]) -> tuple[int, int, int]:
    """Bytes that the main kernels have loaded, stored and added to."""
    launched = [kernel for kernel in plan.kernels if kernel.grid]
    of_main = [x for kernel, x in zip(launched, launches, strict=True) if not kernel.source.startswith("helpers/")]
    columns = zip(*((x.bytes_loaded, x.bytes_stored, x.bytes_added) for x in of_main), strict=True)
    return tuple(map(sum, columns))  # type: ignore[return-value]


@pytest.mark.parametrize("what", KERNELS, ids=str)
@settings(max_examples=5)
@given(data=st.data())
def test_tiles_are_those_that_kernels_load(what, data):
    case = data.draw(cases(what.options))
    arrays = case.arrays()
    problem = problem_of(case, arrays, deterministic=what.deterministic)
    of_forward: list[Statistics] = []
    of_backward: list[Statistics] = []
    out, lse = attention.forward(problem, arrays, arch=what.arch, statistics=of_forward)
    attention.backward(problem, arrays, out, lse, arch=what.arch, statistics=of_backward)

    plan = attention.plan_for(problem, FORWARD, arrays, what.arch)
    loaded, stored, added = counted(plan, of_forward)
    if problem.visible_pairs:
        assert plan.traffic is not None and plan.traffic.tiles == loaded
    assert stored == (out.nbytes if what.arch is FEW_SMS else 0)
    assert added == 0

    plan = attention.plan_for(problem, BACKWARD, {**arrays, "out": out, "lse": lse}, what.arch)
    loaded, stored, added = counted(plan, of_backward)
    if problem.visible_pairs:
        assert plan.traffic is not None and (plan.traffic.tiles, plan.traffic.added) == (loaded, added)


@pytest.mark.parametrize("what", KERNELS[:2] + KERNELS[3:5], ids=str)
@settings(max_examples=5)
@given(data=st.data())
def test_tiles_that_reductions_over_queries_load(what, data):
    case = replace(data.draw(cases(what.options)), has_values=False)
    arrays = {name: x for name, x in case.arrays().items() if name in ("q", "k", "v")}
    problem = problem_of(case, arrays)
    arrays["lse"] = np.zeros(problem.lse_shape, np.float32)
    launches: list[Statistics] = []
    passes._call(COLUMN_SUMS, problem, arrays, COLUMN_SUMS.default, arch=what.arch, statistics=launches)
    plan = attention.plan_for(problem, COLUMN_SUMS, arrays, what.arch)
    if problem.visible_pairs:
        assert plan.traffic is not None and plan.traffic.tiles == counted(plan, launches)[0]


@pytest.mark.parametrize(("num_sms", "whole", "splits"), [(5, 5, 5), (4, 4, 2), (24, 0, 4)])
def test_tiles_of_keys_that_blocks_share(monkeypatch, num_sms, whole, splits):
    """Each of the blocks loads them: of all tiles, or of those of the last wave."""
    for name in ("SPLIT_STEPS", "SUM_STEPS", "SUM_STEPS_PER_PARTIAL", "WAVES", "CAUSAL_WAVES"):
        monkeypatch.setattr(backward, name, 0)
    case = ct.Case(seqlen_q=300, seqlen_k=257, batch=2, head_dim=24, dtype="bfloat16")
    arrays, device = case.arrays(), replace(FEW_SMS, num_sms=num_sms)
    problem, launches = problem_of(case, arrays, deterministic=True), list[Statistics]()
    out, lse = attention.forward_by_oracle(problem, arrays)
    tiles = (BACKWARD_SM90_TILES[0],)
    attention.backward(problem, arrays, out, lse, arch=device, tiles=tiles, statistics=launches)
    plan = attention.plan_for(problem, BACKWARD, {**arrays, "out": out, "lse": lse}, device, tiles)
    assert (plan.run_time.whole_tiles, plan.run_time.tail_splits) == (whole, splits)
    loaded, _, added = counted(plan, launches)
    assert plan.traffic is not None and (plan.traffic.tiles, plan.traffic.added) == (loaded, added)


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
@settings(max_examples=examples(8))
@given(data=st.data(), num_sms=st.sampled_from([1, 3, 7, 132]))
def test_tiles_of_few_queries(kernel, data, num_sms):
    """Those of keys are loaded once, whoever asks; those of queries by each block that has keys of theirs."""
    heads_kv = data.draw(st.integers(1, 2))
    case = replace(CASE, num_heads_kv=heads_kv, kv_lengths=None, seqlen_q=data.draw(st.integers(1, 4)))
    case = replace(case, seqlen_k=data.draw(st.integers(1, 300)))
    if kernel == "sm80":
        window = data.draw(st.sampled_from([None, (20, None)]))
        case = replace(case, dtype=data.draw(st.sampled_from(["float16", "float32", "float64"])), window=window)
    tiles = (SHORT_TILES if kernel == "sm90" else fitting(case),)
    arrays = case.arrays()
    problem, device = problem_of(case, arrays), replace(FEW_SMS, num_sms=num_sms)
    launches: list[Statistics] = []
    attention.forward(problem, arrays, arch=device, tiles=tiles, statistics=launches)
    plan = attention.plan_for(problem, FORWARD, arrays, device, tiles)
    assert plan.kernels[0].source == f"{kernel}/decode.cu"
    assert plan.traffic is not None and plan.traffic.tiles == counted(plan, launches)[0]
