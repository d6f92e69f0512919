"""float32 as two bf16 terms, which is what precision="tf32" is on compute capability 9.0, run on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm90.scored import ScoredTile
from cuflash.plan.sm90.tiles import BACKWARD_TF32_SM90_TILES, FORWARD_TF32_SM90_TILES
from cuflash.spec import passes
from cuflash.spec.passes import PASSES_WITHOUT_TANGENTS
from tests.emulate import attention, checks
from tests.emulate.attention import forward_by_oracle, problem_of
from tests.emulate.checks import FEW
from tests.emulate.specialisations import Specialisation
from tests.judging import bits

pytestmark = pytest.mark.one_in(12)

FRACTION = 1 / 8  # of the error of a formula whose factors are rounded to TF32
judge = attention.assert_tf32_split

NARROW, WIDE = BACKWARD_TF32_SM90_TILES
FORWARD_NARROW, FORWARD_BIAS, FORWARD_WIDE = (x for x in FORWARD_TF32_SM90_TILES if x.serves != "no values")
# What the kernels have and no row may use.
FORWARD_ROWS = (
    *(FORWARD_NARROW, FORWARD_WIDE),
    replace(FORWARD_NARROW, block_m=192, block_n=64, num_stages=2, ping_pong=True),
    replace(FORWARD_WIDE, block_n=64, num_stages=2, ping_pong=False),
)
BACKWARD_ROWS = (
    *BACKWARD_TF32_SM90_TILES,
    replace(NARROW, num_buffers=3, dq_late=True),
    replace(WIDE, num_stages=1, num_buffers=2, dq_late=False),
)


def what(tile, head_dim, head_dim_v=None, **options):
    dims = {"head_dim": head_dim, "head_dim_v": head_dim if head_dim_v is None else head_dim_v}
    return Specialisation(tiles=(tile,), dtype="float32", precision="tf32", **dims, **options)


FORWARD = (
    *(what(tile, tile.max_dim, right=right) for tile in FORWARD_ROWS for right in (False, True)),
    what(FORWARD_ROWS[0], 61, 7, num_sms=1, right=True, strides="padded", kv_lengths="int32"),
    what(FORWARD_ROWS[1], 72, 128, num_sms=2, left=True, strides="shifted", mask=True, alibi_slopes=True),
    what(FORWARD_ROWS[2], 16, 64, num_sms=1, right=True, left=True, softcap=5.0, bias="softmax", scale=-0.25),
    what(FORWARD_ROWS[3], 125, 33, strides="flipped", scale=0.0, kv_lengths="int64", bias="input"),
    what(FORWARD_BIAS, 128, bias="softmax", num_sms=1),
)
BACKWARD = (
    *(what(tile, tile.max_dim, right=right) for tile in BACKWARD_ROWS for right in (False, True)),
    what(NARROW, 40, 17, strides="padded", left=True, mask=True, num_sms=1),
    what(WIDE, 72, 128, strides="flipped", kv_lengths="int32", softcap=5.0),
    what(BACKWARD_ROWS[2], 1, 64, strides="shifted", alibi_slopes=True, right=True, num_sms=1),
    what(BACKWARD_ROWS[3], 96, 33, bias="softmax", scale=-0.25, kv_lengths="int64", left=True),
)


def by_name(names, results):
    return dict(zip(names, results, strict=True))


def forward(problem, arrays, tile, **options):
    return by_name(("out", "lse"), attention.forward(problem, arrays, tiles=(tile,), **options))


def backward(problem, arrays, out, lse, tile, **options):
    return by_name(("dq", "dk", "dv"), attention.backward(problem, arrays, out, lse, tiles=(tile,), **options))


@pytest.mark.parametrize("what", FORWARD, ids=str)
@FEW
@given(data=st.data())
def test_forward(what, data):
    case, schedule = data.draw(what.cases()), data.draw(st.sampled_from(SCHEDULES))
    problem, arrays = what.arguments(case)
    judge(problem, arrays, forward(problem, arrays, what.tiles[0], arch=what.device, schedule=schedule))


@pytest.mark.parametrize("head_dim", [32, 128])
@FEW
@given(data=st.data())
def test_what_is_added_by_tile(head_dim, data):
    """A per-pair bias and a mask of keys, where the bias fits."""
    seqlen_q, seqlen_k = data.draw(st.integers(2, 150)), 4 * data.draw(st.integers(1, 60))
    case = ct.Case(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=2,
        num_heads=2,
        head_dim=head_dim,
        dtype="float32",
        bias=(1, 2, seqlen_q, seqlen_k),
        mask=(2, 1, 1, seqlen_k),
        alibi_slopes=data.draw(st.sampled_from([None, (2,)])),
        seed=data.draw(st.integers(0, 2**16)),
    )
    arrays, schedule = case.arrays(), data.draw(st.sampled_from(SCHEDULES))
    problem = problem_of(case, arrays, precision="tf32")
    narrow = head_dim <= 64
    of_forward, of_backward = (FORWARD_NARROW, NARROW) if narrow else (FORWARD_BIAS, WIDE)
    loads = {passes.FORWARD: True, passes.BACKWARD: narrow}
    for pass_, row in zip(PASSES_WITHOUT_TANGENTS, (of_forward, of_backward), strict=True):
        (tile,) = choose_plan(problem, DeviceSpec.for_arch("9.0"), pass_, tiles=(row,)).tiles
        assert isinstance(tile, ScoredTile)
        assert tile.mask_of_keys == loads[pass_] and (tile.bias_of_pairs > 0) == loads[pass_]
    out, lse = forward_by_oracle(problem, arrays)
    judge(problem, arrays, forward(problem, arrays, of_forward, schedule=schedule))
    judge(problem, arrays, backward(problem, arrays, out, lse, of_backward, schedule=schedule))


@pytest.mark.parametrize("what", BACKWARD, ids=str)
@FEW
@given(data=st.data())
def test_backward(what, data):
    case, schedule = data.draw(what.cases()), data.draw(st.sampled_from(SCHEDULES))
    problem, arrays = what.arguments(case)
    out, lse = forward_by_oracle(problem, arrays)
    judge(problem, arrays, backward(problem, arrays, out, lse, what.tiles[0], arch=what.device, schedule=schedule))


CASE = ct.Case(seqlen_q=150, seqlen_k=210, head_dim=64, num_heads=2, num_heads_kv=1, dtype="float32", causal=True)


@pytest.mark.parametrize("tiles", [*zip(FORWARD_ROWS, BACKWARD_ROWS, strict=True)], ids=["narrow", "wide", "a", "b"])
def test_neither_schedule_nor_memory_change_a_bit(tiles):
    """But of dq, which is summed up in no fixed order."""
    arrays = CASE.arrays()
    problem = problem_of(CASE, arrays, precision="tf32")
    out, lse = forward_by_oracle(problem, arrays)
    seen = set()
    for schedule, fill in zip(SCHEDULES, 2 * (0xFF, 0x00, 0x3F), strict=True):
        results = forward(problem, arrays, tiles[0], schedule=schedule, fill=fill)
        results |= backward(problem, arrays, out, lse, tiles[1], schedule=schedule, fill=fill)
        judge(problem, arrays, results)
        del results["dq"]
        seen.add(tuple(bits(results)))
    assert len(seen) == 1


def errors_of_tf32(case, arrays):
    """Of the formulas in float64 whose factors are rounded to TF32, one head without a mask."""
    q, k, v, dout = (checks.rounded_to_tf32(arrays[name])[0, 0].astype(np.float64) for name in ("q", "k", "v", "dout"))
    expected = {name: x.expected for name, x in ct.yardsticks(case.problem, arrays).items()}
    scale = case.head_dim**-0.5
    scores = q @ k.T * scale
    lse = np.log(np.exp(scores).sum(axis=1))
    weights = np.exp(scores - lse[:, None])
    rounded = checks.rounded_to_tf32(weights.astype(np.float32)).astype(np.float64)
    delta = (arrays["dout"][0, 0] * expected["out"][0, 0]).sum(axis=1, keepdims=True)
    ds = checks.rounded_to_tf32((weights * (dout @ v.T - delta)).astype(np.float32)).astype(np.float64)
    plain = {"out": rounded @ v, "lse": lse, "dq": ds @ k * scale, "dk": ds.T @ q * scale, "dv": rounded.T @ dout}
    return {name: np.abs(x - expected[name][0, 0]).max() for name, x in plain.items()}, expected


@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_an_eighth_of_the_error_of_tf32(head_dim):
    """On the average of several seeds; and not the precision of three terms."""
    row = int(head_dim > 64)
    ratios = []
    for seed in range(4):
        case = ct.Case(seqlen_q=65, seqlen_k=203, head_dim=head_dim, dtype="float32", seed=seed)
        arrays = case.arrays()
        problem = problem_of(case, arrays, precision="tf32")
        results = forward(problem, arrays, FORWARD_ROWS[row])
        results |= backward(problem, arrays, results["out"], results["lse"], BACKWARD_ROWS[row])
        allowed, expected = errors_of_tf32(case, arrays)
        ratios.append([np.abs(results[name] - expected[name]).max() / allowed[name] for name in allowed])
    means = np.mean(ratios, axis=0)
    assert (means <= FRACTION).all(), np.round(means, 4)
    assert (means > 2.0**-13).all(), np.round(means, 4)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.finfo(np.float32).max, 0.99999 * np.finfo(np.float32).max])
def test_the_end_of_the_range(value):
    """An infinity and NaN come out where the formula has them, numbers above the largest of bfloat16 as they are."""
    case = ct.Case(seqlen_q=17, seqlen_k=33, head_dim=16, dtype="float32", scale=2.0**-9)
    arrays = case.arrays()
    arrays["k"][...] = np.sign(arrays["k"])  # whose second term is zero
    arrays["v"][0, 0, 5, 2] = value
    arrays["q"][0, 0, 3, 4] = np.copysign(np.inf, value) if np.isinf(value) else 2.0**120
    arrays["q"][0, 0, 4, 4] = np.nan
    problem = problem_of(case, arrays, precision="tf32")
    results = forward(problem, arrays, FORWARD_ROWS[0])
    expected = ct.yardsticks(problem, {name: arrays[name] for name in "qkv"})
    for name, got in results.items():
        np.testing.assert_allclose(got.astype(np.float64), expected[name].expected, rtol=2.0**-13, atol=2.0**-13)


@pytest.mark.parametrize("tile", BACKWARD_TF32_SM90_TILES, ids=["narrow", "wide"])
def test_infinities(tile):
    """An infinite gradient of the output comes out where the formula has it, next to finite ones."""
    case = ct.Case(seqlen_q=40, seqlen_k=70, head_dim=16, dtype="float32", causal=True)
    arrays = case.arrays()
    arrays["dout"][0, 0, 7, 3] = np.inf
    arrays["dout"][0, 0, 30, 2] = np.nan
    problem = problem_of(case, arrays, precision="tf32")
    judge(problem, arrays, backward(problem, arrays, *forward_by_oracle(problem, arrays), tile))


@pytest.mark.parametrize("head_dim", [24, 23])
def test_results_stay_inside_their_arrays(head_dim):
    case = ct.Case(seqlen_q=70, seqlen_k=81, batch=2, num_heads=2, num_heads_kv=1, head_dim=head_dim, dtype="float32")
    arrays = case.arrays()
    frames: list[np.ndarray] = []
    problem = problem_of(case, arrays, precision="tf32")
    out, lse = forward_by_oracle(problem, arrays)
    judge(problem, arrays, forward(problem, arrays, FORWARD_ROWS[0], allocate=checks.framed(frames)))
    judge(problem, arrays, backward(problem, arrays, out, lse, NARROW, allocate=checks.framed(frames)))
    checks.assert_only_noise(frames, 5 + 9)


def test_no_undefined_behaviour():
    case = replace(checks.SANITIZED, dtype="float32", dropout=0.0)
    arrays = case.arrays()
    problem = problem_of(case, arrays, precision="tf32")
    out, lse = forward_by_oracle(problem, arrays)
    judge(problem, arrays, forward(problem, arrays, FORWARD_ROWS[0], sanitizer="undefined"))
    judge(problem, arrays, backward(problem, arrays, out, lse, NARROW, sanitizer="undefined"))
