"""The decode kernels, sm90/decode.cu and helpers/split_combine.cu, run on the CPU against the oracle."""

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash import emulator
from cuflash.emulator import SCHEDULES, Schedule, Statistics
from cuflash.emulator.memory import Scratch
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.key_splits import DECODE_ROWS
from cuflash.plan.sm90.decode_tiles import DECODE_SM90_TILES
from tests.emulate import attention, decode_problem
from tests.emulate.attention import problem_of
from tests.emulate.decode_problem import combined
from tests.judging import assert_within, bits
from tests.sampling import examples

pytestmark = pytest.mark.one_in(24)

H200 = DeviceSpec.for_arch("9.0")
# How the 4 heads of CASE, planned as 12 tiles each, fall to blocks.
DEVICES = {
    "shared": H200,  # 6 blocks each
    "uneven": replace(H200, num_sms=7),  # heads of 2 and 3 blocks, which have keys of one or two heads
    "few": replace(H200, num_sms=3),  # two of the heads are shared by 2 blocks
    "whole": replace(H200, num_sms=1),
}
every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
SHORT_TILES = replace(DECODE_SM90_TILES[1], block_n=32, num_stages=2)


def run(case, tile=SHORT_TILES, *, arrays=None, device=H200, **options):
    """out and lse of the case, from a plan with the given tile."""
    arrays = arrays or case.arrays()
    return attention.forward(problem_of(case, arrays), arrays, tiles=(tile,), arch=device, **options)


def plan_of(case, tile=SHORT_TILES, device=H200):
    return choose_plan(problem_of(case, case.arrays()), device, tiles=(tile,))


@pytest.fixture(autouse=True, scope="module")
def combined_by_blocks():
    with combined(by_blocks=True):
        yield


# ---- Against the oracle ----------------------------------------------------------------------------------------------

CASE = replace(decode_problem.CASE, seqlen_q=5)
# Name -> what differs from CASE.
CASES: dict[str, dict[str, Any]] = {
    "lengths": {},
    "no lengths": {"kv_lengths": None},
    "one query": {"seqlen_q": 1},
    "one head to a group": {"num_heads_kv": 8},
    "one key/value head": {"num_heads_kv": 1},
    "all rows": {"seqlen_q": 16},
    "no bound": {"causal": False},
    "the last queries see no key": {"causal": "top_left", "kv_lengths": (1, 4)},
    "the first queries see no key": {"seqlen_q": 16, "seqlen_k": 5, "kv_lengths": None},
    "no keys in a batch entry": {"kv_lengths": (0, 300)},
    "no keys at all": {"kv_lengths": (0, 0)},
    "splits without a tile": {"kv_lengths": (33, 65), "causal": False},
    "window": {"window": (70, None), "kv_lengths": None},
    "window and lengths": {"causal": False, "window": (200, 3)},
    "only the diagonal": {"window": (0, 0), "causal": False},
    "spread": {"score_spread": 30.0},
    "negative scale": {"scale": -0.3},
    "zero scale": {"scale": 0.0},
    "wide V": {"head_dim": 24, "head_dim_v": 128},
    "bfloat16": {"dtype": "bfloat16"},
    "rows of heads": {"layout": "bshd"},
    "softcap": {"softcap": 2.0, "score_spread": 8.0},
    "slopes": {"alibi_slopes": (8,)},
    "slopes of entries": {"alibi_slopes": (2, 8), "causal": False, "kv_lengths": (300, 77), "softcap": 4.0},
    "slopes of a head to itself": {"alibi_slopes": (2, 8), "num_heads_kv": 8, "window": (200, None)},
    "per-pair bias": {"bias": (8, 5, 300)},
    "bias of heads": {"bias": (2, 8, 1, 300), "bias_dtype": "input", "kv_lengths": (299, 0), "causal": False},
    "bias of keys": {"bias": (300,), "bias_dtype": "input", "alibi_slopes": (2, 8), "seqlen_q": 3},
    "bias of queries": {"bias": (5, 1), "num_heads_kv": 8, "softcap": 4.0, "window": (200, None)},
    "pages, and all that acts on scores": {
        "page_size": 32,
        "seqlen_k": 320,
        "bias": (2, 8, 5, 320),
        "alibi_slopes": (8,),
        "softcap": 4.0,
        "sinks": True,
        "window": (150, None),
    },
    "softcap, small scores": {"softcap": 60.0, "kv_lengths": (300, 0), "scale": -0.3},
}


@every_device
@pytest.mark.parametrize("name", CASES)
def test_cases(name, device):
    case = replace(CASE, **CASES[name])
    ct.assert_forward(case, *run(case, device=device))


@pytest.mark.parametrize("change", CASES.values(), ids=CASES)
def test_cases_that_are_combined_afterwards(change):
    case = replace(CASE, **change)
    with combined(by_blocks=False):
        ct.assert_forward(case, *run(case, device=DEVICES["uneven"]))


@pytest.mark.parametrize(
    ("name", "blocks", "of_a_head"), [("shared", 24, 6), ("uneven", 7, 3), ("few", 3, 2), ("whole", 1, 1)]
)
def test_how_the_cases_share_keys(name, blocks, of_a_head):
    device = DEVICES[name]
    plan = plan_of(CASE, device=device)
    assert (plan.run_time.resident_blocks, plan.key_splits) == (blocks, of_a_head)
    assert [kernel.source for kernel in plan.kernels] == ["sm90/decode.cu"]
    assert dict(plan.kernels[0].defines)["CUFLASH_COMBINES"] == int(of_a_head > 1)


@every_device
@pytest.mark.parametrize("tile", DECODE_SM90_TILES, ids=lambda tile: str(tile.max_dim))
def test_rows_of_the_table(tile, device):
    case = replace(CASE, head_dim=tile.max_dim, head_dim_v=tile.max_dim, seqlen_k=4 * tile.block_n + 3, kv_lengths=None)
    ct.assert_forward(case, *run(case, tile, device=device))


@st.composite
def cases(draw):
    group = draw(st.sampled_from([1, 4, 8, 3]))
    num_heads_kv, batch = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    num_heads = group * num_heads_kv
    seqlen_q = draw(st.integers(1, DECODE_ROWS // group))
    seqlen_k = draw(st.one_of(st.integers(1, 400), st.sampled_from([32, 63, 64, 65, 127, 128, 129, 320])))
    side = st.one_of(st.none(), st.integers(0, seqlen_k))
    causal = draw(st.sampled_from([False, True, "top_left"]))
    window = (draw(side), None if causal else draw(side))
    lengths = st.tuples(*[st.integers(0, seqlen_k)] * batch)
    return ct.Case(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        head_dim=draw(st.sampled_from([8, 64, 72])),
        head_dim_v=draw(st.sampled_from([8, 64, 120])),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        layout=draw(st.sampled_from(["bhsd", "bshd"])),
        causal=causal,
        window=None if window == (None, None) else window,
        kv_lengths=draw(st.one_of(st.none(), lengths)),
        kv_lengths_dtype=draw(st.sampled_from(["int32", "int64"])),
        score_spread=draw(st.sampled_from([1.0, 8.0, 30.0])),
        softcap=draw(st.sampled_from([None, 3.0])),
        bias=draw(st.sampled_from([None, (num_heads, seqlen_q, seqlen_k), (batch, 1, 1, seqlen_k), (seqlen_q, 1)])),
        bias_dtype=draw(st.sampled_from(["softmax", "input"])),
        alibi_slopes=draw(st.sampled_from([None, (num_heads,), (batch, num_heads)])),
        seed=draw(st.integers(0, 2**16)),
    )


few_or_many_sms = st.sampled_from([1, 3, 5, 7, 132])


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), schedule=st.sampled_from(SCHEDULES), num_sms=few_or_many_sms)
def test_any_case(case, schedule, num_sms):
    ct.assert_forward(case, *run(case, schedule=schedule, device=replace(H200, num_sms=num_sms)))


@pytest.mark.parametrize("head_dim_v", [40, 256])
@pytest.mark.parametrize("num_heads_kv", [1, 8])
def test_many_blocks_share_a_head(num_heads_kv, head_dim_v):
    """24 of them, or with 8 key/value heads 48, which is more than a lane loads at once; then two rows are combined."""
    group = 8 // num_heads_kv
    case = replace(
        CASE,
        num_heads=group,
        num_heads_kv=1,
        batch=1,
        seqlen_q=2,
        seqlen_k=1500 if group > 1 else 3000,
        head_dim_v=head_dim_v,
        kv_lengths=(1400,),
    )
    tile = replace(SHORT_TILES, max_dim=256)
    assert plan_of(case, tile).key_splits == (24 if group > 1 else 48)
    first = run(case, tile)
    ct.assert_forward(case, *first)
    for schedule in SCHEDULES[1:]:
        assert bits(run(case, tile, schedule=schedule)) == bits(first)
    with combined(by_blocks=False):
        assert bits(run(case, tile)) == bits(first)


@pytest.mark.parametrize(("seqlen_q", "launches"), [(1, 1), (5, 2)])
@mock.patch("cuflash.plan.key_splits.COMBINE_PIECES", 32)
def test_the_plan_takes_the_kernels_by_itself(seqlen_q, launches):
    """4 rows of 256 columns are 32 pieces, and as many as one block is left to combine."""
    case = replace(CASE, seqlen_q=seqlen_q, seqlen_k=1200, kv_lengths=(1200, 1199), head_dim_v=256)
    arrays = case.arrays()
    statistics: list[Statistics] = []
    ct.assert_forward(case, *attention.forward(problem_of(case, arrays), arrays, statistics=statistics))
    assert len(statistics) == launches


# ---- Bit for bit -----------------------------------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("change", [{}, {"causal": False, "kv_lengths": None}, {"seqlen_q": 16}], ids=str)
def test_schedule_and_memory_change_no_bit(change, device):
    case = replace(CASE, **change)
    first = run(case, device=device)
    ct.assert_forward(case, *first)
    for schedule in SCHEDULES[1:]:
        assert bits(run(case, device=device, schedule=schedule)) == bits(first)
    for fill in (0x00, 0x3F):
        assert bits(run(case, device=device, fill=fill)) == bits(first)


def test_values_that_are_no_numbers():
    """NaN and infinities of visible inputs come out where the formula has them."""
    case = replace(CASE, kv_lengths=None, batch=1)
    arrays = case.arrays()
    arrays["q"][0, 2, 3, 3] = np.nan
    arrays["k"][0, 0, 299, 0] = np.inf  # seen by the last query alone
    arrays["v"][0, 1, 2, 5] = np.inf
    arrays["v"][0, 1, 70, 6] = np.nan
    problem = problem_of(case, arrays)
    yardsticks = ct.yardsticks(problem, {name: arrays[name] for name in "qkv"})
    for device in DEVICES.values():
        assert_within(dict(zip(("out", "lse"), run(case, arrays=arrays, device=device), strict=True)), yardsticks)


# ---- Arrivals --------------------------------------------------------------------------------------------------------

CALL = 2**46 + 5
COUNTS = 2**16  # between the counts of one call and of the next


def first_count(call):
    return call * COUNTS


# What memory may hold of earlier calls, or of later ones where a graph is replayed after them; and anything else.
counts_of_other_calls = st.builds(
    lambda call, count: first_count(call) + count,
    st.one_of(st.integers(CALL - 3, CALL + 3), st.integers(0, 2**48 - 1)).filter(lambda call: call != CALL),
    st.one_of(st.integers(0, 8), st.integers(0, COUNTS - 1)),
)
found_counts = st.one_of(
    st.sampled_from([0, 1, 2**63, 2**64 - 1, first_count(CALL) - 1, first_count(CALL) + 25]),
    counts_of_other_calls,
    st.integers(0, 2**64 - 1).filter(lambda word: word // COUNTS != CALL),
)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), case=cases(), num_sms=few_or_many_sms, fill=st.sampled_from([0xFF, 0, 0x3F]))
def test_neither_order_of_blocks_nor_memory_changes_a_bit(data, case, num_sms, fill):
    """Blocks arrive in any order, and see late or at once that others have; counts lie where memory held anything."""
    sinks = data.draw(st.booleans())
    case, device = replace(case, sinks=sinks), replace(H200, num_sms=num_sms)
    first = run(case, device=device)
    ct.assert_forward(case, *first)
    plan = plan_of(case, device=device)
    scratch = Scratch(plan.scratch_layout, fill)
    found = None
    if "arrivals" in plan.scratch_layout.names:
        arrivals = scratch.array("arrivals", np.uint64)
        found = data.draw(st.lists(found_counts, min_size=arrivals.size, max_size=arrivals.size))
        arrivals[...] = found
    seed, asynchrony = data.draw(st.integers(0, 2**16)), data.draw(st.sampled_from(["late", "eager"]))
    schedule = Schedule("random", asynchrony, seed)
    assert bits(run(case, device=device, scratch=scratch, call=CALL, schedule=schedule)) == bits(first)
    if found is not None:
        blocks = blocks_of_heads(len(found), plan.run_time.resident_blocks)
        left = [first_count(CALL) + n if n > 1 else word for word, n in zip(found, blocks, strict=True)]
        np.testing.assert_array_equal(arrivals, np.array(left, np.uint64))


def blocks_of_heads(heads, blocks):
    """How many blocks have keys of each head."""
    return [((head + 1) * blocks - 1) // heads - head * blocks // heads + 1 for head in range(heads)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("device", ["shared", "uneven", "few"])
def test_a_call_that_is_replayed_with_its_number(device, schedule):
    """A captured graph has the same number and the same scratch memory whenever it is replayed."""
    device = DEVICES[device]
    scratch = Scratch(plan_of(CASE, device=device).scratch_layout, 0xFF)
    for seed in range(3):
        case = replace(CASE, seed=seed)
        ct.assert_forward(case, *run(case, device=device, schedule=schedule, scratch=scratch, call=CALL))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_call_in_memory_of_one_that_has_not_ended(schedule):
    """Some blocks of the call before have counted."""
    device = DEVICES["shared"]
    scratch = Scratch(plan_of(CASE, device=device).scratch_layout, 0xFF)
    for call in range(CALL, CALL + 6):
        scratch.array("arrivals", np.uint64)[...] = first_count(call - 1) + call % 6
        ct.assert_forward(CASE, *run(CASE, device=device, schedule=schedule, scratch=scratch, call=call))


# ---- Memory ----------------------------------------------------------------------------------------------------------


@every_device
def test_results_stay_inside_their_arrays(device):
    frames = []

    def allocate(array):
        margins = [8 if axis == array.ndim - 1 else 2 for axis in range(array.ndim)]  # 8: aligned rows
        shape = [n + 2 * margin for n, margin in zip(array.shape, margins, strict=True)]
        poison = -1 if array.dtype.kind == "i" else np.nan
        frame = attention.guarded(np.full(shape, poison, array.dtype))
        inside = tuple(slice(margin, margin + n) for n, margin in zip(array.shape, margins, strict=True))
        frame[inside] = array
        frames.append((frame, inside, poison))
        return frame[inside]

    ct.assert_forward(CASE, *run(CASE, allocate=allocate, device=device))
    for frame, inside, poison in frames:
        frame[inside] = poison
        np.testing.assert_array_equal(frame, np.full_like(frame, poison))


@every_device
def test_offsets_take_64_bits(device):
    case = replace(CASE, head_dim=16, head_dim_v=16, seqlen_k=150, num_heads=4, kv_lengths=(150, 33))
    ct.assert_forward(case, *run(case, allocate=attention.far_apart, device=device))


def test_lengths_out_of_range_are_clamped():
    case = replace(CASE, batch=3, kv_lengths=(0, 300, 300))
    arrays = case.arrays()
    tame = run(case, arrays=arrays)
    arrays["kv_lengths"][...] = (-7, 301, 2**31 - 1)
    assert bits(run(case, arrays=arrays)) == bits(tame)


def test_no_undefined_behaviour():
    for device in DEVICES.values():
        ct.assert_forward(CASE, *run(CASE, device=device, sanitizer="undefined"))


def test_matrix_stores_and_loads_have_no_bank_conflicts():
    launches: list[emulator.Statistics] = []
    run(CASE, statistics=launches, device=DEVICES["whole"])
    assert [launch.matrix_load_conflicts for launch in launches] == [0]


@every_device
@pytest.mark.parametrize("length", [290, 300, 320, 383])
@pytest.mark.parametrize("change", [{}, {"softcap": 3.0, "alibi_slopes": (8,)}], ids=str)
def test_maps_that_reach_over_more_keys_than_there_are(length, device, change):
    """k and v are slices of a longer cache; what lies past them, NaN, is loaded and hidden."""
    case = replace(CASE, seqlen_k=384, kv_lengths=None, causal=False, **change)
    cache = case.arrays()
    arrays = cache | {name: cache[name][:, :, :length] for name in "kv"}
    for name in "kv":
        cache[name][:, :, length:] = np.nan
    out, lse = run(case, arrays=arrays, device=device, allocate=lambda array: array, mapped_keys=384)
    yardsticks = ct.yardsticks(problem_of(case, arrays), {n: x for n, x in arrays.items() if n != "dout"})
    assert_within({"out": out, "lse": lse}, yardsticks)
    assert plan_of(case, device=device).hides_last_keys
