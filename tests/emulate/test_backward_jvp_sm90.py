"""The tangents of gradients by sm90/backward_jvp.cu in the emulator, by the oracle rule."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.emulator import SCHEDULES, passes
from cuflash.plan import DeviceSpec, LaunchPlan, choose_plan
from cuflash.spec.passes import BACKWARD_JVP
from cuflash.spec.problem import make_problem
from cuflash.testing import Case, cases
from cuflash.testing.tangents import Moved, assert_tangents, movable
from tests.sampling import examples, sample
from tests.second_derivatives import CASES, FEATURES, moved_by, moves_of

HALF = ("bfloat16", "float16")
# Up to 64 each consumer has keys of its own; above, both have the same keys, and each makes one of tdk and tdv;
# above 128, stages hold half a tile of queries.
DIMS = ((64, 64), (40, 24), (128, 128), (72, 80), (256, 256), (136, 160))


def in_half(case: Case, dims: tuple[int, int]) -> Case:
    """The case in half precision, with rows that TMA can read."""
    dtype = case.dtype if case.dtype in HALF else "bfloat16"
    strides = "contiguous" if case.strides == "flipped" else case.strides
    return replace(case, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], strides=strides)


def everything(case: Case, *, numbers: bool = True, tdout: bool = False) -> Moved:
    """Tangents of all that a case has; without those of numbers and arrays that act on scores, whole tiles of weights
    are made at once."""
    names = [name for name in movable(case) if numbers or name in ("q", "k", "v", "sinks")]
    return Moved(names=tuple(names), cotangents=(*["tdout"] * tdout, *["tdlse"] * case.dlse))


def is_sm90(plan: LaunchPlan) -> bool:
    return any(kernel.source == "sm90/backward_jvp.cu" for kernel in plan.kernels)


def results_of_jvp(case: Case, tangents: dict[str, Any]) -> dict[str, Any]:
    """All that the pass takes."""
    arrays = case.arrays()
    inputs = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
    moved = {name: x for name, x in tangents.items() if name != "tdlse"}
    results = passes.jvp(case.problem, inputs | moved, arch="9.0", **case.random)
    return arrays | tangents | dict(zip(("out", "lse", "tout", "tlse"), results, strict=True))


def check(
    case: Case, moved: Moved, deterministic: bool = False, device: str | DeviceSpec = "9.0", **options: Any
) -> None:
    """Hold the tangents of gradients to the oracle rule."""
    given = results_of_jvp(case, moved.arrays(case))
    need = ("tdq", "tdk", "tdv", *(["tdsinks"] if case.sinks else []))
    problem = replace(case.problem, deterministic=deterministic)
    found = passes.backward_jvp(problem, given, need=need, arch=device, **case.random, **options)
    assert_tangents(case, moved, dict(zip(need, found, strict=True)))


@pytest.fixture(autouse=True)
def plans(monkeypatch):
    """The plans of the pass that the test has run."""
    made: list[LaunchPlan] = []
    choose = choose_plan

    def keep(*args, **options):
        plan = choose(*args, **options)
        if plan.pass_ is BACKWARD_JVP:
            made.append(plan)
        return plan

    monkeypatch.setattr(passes, "choose_plan", keep)
    return made


@pytest.mark.parametrize(
    ("case", "dims", "numbers"),
    sample([(in_half(case, dims), dims, numbers) for case in CASES for dims in DIMS for numbers in (True, False)], 40),
    ids=str,
)
def test_every_option(case, dims, numbers, plans):
    check(case, everything(case, numbers=numbers))
    is_served = dims[0] <= 128 or case.cu_seqlens_q is None
    assert all(is_sm90(plan) == (is_served and case.strides != "padded") for plan in plans)


@pytest.mark.parametrize(
    ("case", "dims", "numbers"),
    sample([(in_half(case, dims), dims, numbers) for case in CASES for dims in DIMS for numbers in (True, False)], 40),
    ids=str,
)
def test_tdout(case, dims, numbers, plans):
    """Where its stages do not fit, stages hold half a tile, of which packed sequences know nothing."""
    check(case, everything(case, numbers=numbers, tdout=True))
    is_served = dims[0] <= 64 or case.cu_seqlens_q is None
    assert all(is_sm90(plan) == (is_served and case.strides != "padded") for plan in plans)


@pytest.mark.parametrize(
    ("case", "dims"), sample([(in_half(case, dims), dims) for case in CASES for dims in DIMS], 24), ids=str
)
def test_blocks_add_to_tdq_in_order(case, dims, plans):
    """With a block-sparse index, of which their order knows nothing, tdq has a kernel of its own."""
    check(case, everything(case), deterministic=True)
    is_served = (dims[0] <= 128 or case.cu_seqlens_q is None) and case.strides != "padded"
    for plan in plans:
        (main,) = (kernel for kernel in plan.kernels if kernel.source.endswith("backward_jvp.cu"))
        assert is_sm90(plan) == is_served
        defines = dict(main.defines)
        in_order = is_served and not defines["CUFLASH_HAS_BLOCK_INDEX"]
        assert defines["CUFLASH_DQ_IN_ORDER"] == in_order
        assert in_order != any(kernel.source == "sm80/backward_jvp_dq.cu" for kernel in plan.kernels)


@pytest.mark.parametrize(
    ("dims", "deterministic", "options"),
    sample(
        [
            (dims, deterministic, options)
            for dims in DIMS
            for deterministic in (False, True)
            for options in (
                {},
                {"causal": True},
                {"cu_seqlens_q": (0, 40, 40, 100), "cu_seqlens_k": (0, 0, 90, 110), "batch": 3},
            )
        ],
        20,
    ),
    ids=str,
)
def test_blocks_clear_accumulators_ahead(dims, deterministic, options, plans):
    """On a device with so few SMs that most blocks start later than the first ones end."""
    sizes = {"seqlen_q": 100, "seqlen_k": 110, "num_heads": 18, "num_heads_kv": 18, "batch": 1, "dtype": "bfloat16"}
    case = Case(**sizes | {"head_dim": dims[0], "head_dim_v": dims[1]} | options)
    check(case, everything(case), deterministic, device=replace(DeviceSpec.for_arch("9.0"), num_sms=1))
    for plan in plans:
        is_served = dims[0] <= 128 or case.cu_seqlens_q is None
        assert (plan.run_time.clear_ahead > 0) == is_served


@settings(max_examples=examples(10), deadline=None)
@given(
    cases(
        dtypes=HALF,
        layouts=("bhsd", "bshd"),
        ndims=(4,),
        strides=("contiguous",),
        features=FEATURES,
        max_seqlen=257,
        max_head_dim=256,
        max_scores=2**15,
    ),
    st.booleans(),
    st.data(),
)
def test_options_together(case, deterministic, data):
    case = replace(case, head_dim=-(-case.head_dim // 8) * 8, head_dim_v=-(-case.head_dim_v // 8) * 8)
    moved, schedule = data.draw(moved_by(case)), data.draw(st.sampled_from(SCHEDULES))
    check(case, moved, deterministic=deterministic, schedule=schedule)


@pytest.mark.parametrize(
    ("case", "moved"),
    sample(
        [
            (case, own)
            for x in CASES
            for dims in ((64, 64), (128, 72))
            for case in [in_half(x, dims)]
            for own in moves_of(case)
        ],
        90,
    ),
    ids=str,
)
def test_tangents_that_are_not_given(case, moved):
    check(case, moved)


@pytest.mark.parametrize(
    ("need", "dims"),
    sample([(need, dims) for need in [("tdq",), ("tdk",), ("tdv",), ("tdk", "tdv")] for dims in DIMS[::2]], 6),
    ids=str,
)
def test_results_that_are_not_needed(need, dims, plans):
    """A result is the same, bit for bit, whatever else is made: tdq of one tile of keys, which no other adds to."""
    case = Case(seqlen_q=100, seqlen_k=50, head_dim=dims[0], dtype="bfloat16", num_heads=2)
    given = results_of_jvp(case, everything(case).arrays(case))
    every = dict(zip(("tdq", "tdk", "tdv"), passes.backward_jvp(case.problem, given), strict=True))
    for name, x in zip(need, passes.backward_jvp(case.problem, given, need=need), strict=True):
        assert (x == every[name]).all(), name
    assert all(map(is_sm90, plans))


@pytest.mark.parametrize(
    ("dims", "moved"),
    sample([(dims, moved) for dims in DIMS[::2] for moved in (("q", "k", "v", "gamma", "x"), ("x",), ("q",))], 6),
    ids=str,
)
def test_functions(dims, moved, plans):
    """A score that is nonlinear in s and in two arrays, with a mask function, by the NumPy path in float32."""
    random = np.random.default_rng(7)
    shapes = {"q": (1, 4, 70, dims[0]), "k": (1, 2, 140, dims[0]), "v": (1, 2, 140, dims[1]), "gamma": (4,)}
    shapes |= {"x": (140, 2)}
    dtypes = {name: np.float16 if name in ("q", "k", "v") else np.float32 for name in shapes}
    point: dict[str, Any] = {name: random.standard_normal(shape).astype(dtypes[name]) for name, shape in shapes.items()}
    tangents: dict[str, Any] = {f"t{name}": random.standard_normal(shapes[name]).astype(dtypes[name]) for name in moved}
    dout = random.standard_normal((1, 4, 70, dims[1])).astype(np.float16)
    attention = cuflash.FlashAttention(score=bent, mask=lambda i, j: (i + j) % 3 != 0)
    expected = attention.jvp(**point, **tangents)
    wide = [{name: x.astype(np.float32) for name, x in own.items()} for own in (point, tangents)]
    of_wide = attention.jvp(**wide[0], **wide[1])
    right = attention.backward_jvp(dout.astype(np.float32), **wide[0], **of_wide._asdict(), **wide[1])
    three = [point[name] for name in ("q", "k", "v")]
    problem = make_problem(attention.options, *three, score_args={name: point[name] for name in ("gamma", "x")})
    found = passes.backward_jvp(problem, point | tangents | {"dout": dout} | expected._asdict(), arch="9.0")
    for x, y in zip(found, right, strict=True):
        np.testing.assert_allclose(x.astype(np.float32), y, rtol=0, atol=6e-3 * max(np.abs(y).max(), 1e-3))
    assert all(map(is_sm90, plans))


def bent(s, i, j, *, gamma, x, head):
    return cuflash.where(x[i, 1] > 0, s * x[j, 1], cuflash.tanh(gamma[head] * s) * cuflash.exp(-(x[i, 0] ** 2)))
