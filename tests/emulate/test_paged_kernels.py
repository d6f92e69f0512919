"""The forward kernels on keys and values in pages, run on the CPU against the oracle."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.plan.sm80.tiles import FORWARD_TILES
from cuflash.plan.sm90.decode_tiles import DECODE_SM90_TILES
from cuflash.plan.sm90.tiles import FORWARD_SM90_TILES
from cuflash.spec.problem import make_problem
from tests.emulate import attention
from tests.sampling import examples

pytestmark = pytest.mark.one_in(8)

H200 = DeviceSpec.for_arch("9.0")
DECODE = replace(DECODE_SM90_TILES[1], block_n=32, num_stages=2)
SM90 = replace(next(tile for tile in FORWARD_SM90_TILES if tile.max_dim == 128), block_m=128, block_n=48, num_stages=2)
SM80 = replace(FORWARD_TILES[0], max_dim=128, block_m=64, block_n=32)
WIDE = replace(next(tile for tile in FORWARD_TILES if tile.element_bytes == 4), max_dim=128, block_m=64, block_n=32)

CASE = ct.Case(
    seqlen_q=5,
    seqlen_k=256,
    batch=3,
    num_heads=4,
    num_heads_kv=2,
    head_dim=72,
    head_dim_v=40,
    dtype="float16",
    causal=True,
    kv_lengths=(203, 3, 130),
    page_size=16,
    seed=1,
)
LONG = replace(CASE, seqlen_q=150)
OPTIONS: dict[str, Any] = {
    "softcap": 3.0,
    "bias": (1, 4, 150, 256),
    "mask": (3, 1, 150, 256),
    "alibi_slopes": (4,),
    "window": (60, None),
}
# Name -> tile, case. Pages smaller and larger than tiles, tiles that are no whole pages, pages that are no whole tiles.
CASES = {
    "decode, 16 of 32": (DECODE, CASE),
    "decode, 64 for 32": (DECODE, replace(CASE, page_size=64, window=(60, 3), causal=False)),
    "decode, 32 for 128, sinks": (
        replace(DECODE, block_n=128),
        replace(CASE, page_size=32, layout="bshd", causal=False, sinks=True, kv_lengths_dtype="int64"),
    ),
    "sm90, 16 of 48": (SM90, LONG),
    "sm90, 64 for 48": (SM90, replace(LONG, page_size=64, layout="bshd", **OPTIONS)),
    "sm80, 16 of 32": (SM80, LONG),
    "sm80, 64 for 32, narrow": (SM80, replace(LONG, page_size=64, strides="padded", **OPTIONS)),
    "sm80, 32 of 32, float32": (WIDE, replace(LONG, page_size=32, dtype="float32", dropout=0.3, layout="bshd")),
}
every_case = pytest.mark.parametrize(("tile", "case"), CASES.values(), ids=CASES)
# Those that the other tests need no kernels for.
SOME = [(DECODE, CASE), (SM80, LONG)]
some_cases = pytest.mark.parametrize(("tile", "case"), SOME, ids=["decode", "sm80"])


def run(case, tile, *, arrays=None, device=H200, **options):
    """out and lse of the case, from a plan with the given tile."""
    arrays = arrays or case.arrays()
    problem = make_problem(case.options, *ct.qkv(arrays), **ct.optional(arrays))
    return attention.forward(problem, arrays, tiles=(tile,), arch=device, **options, **case.random)


@every_case
@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[-1]], ids=str)
def test_cases(tile, case, schedule):
    ct.assert_forward(case, *run(case, tile, schedule=schedule))


@st.composite
def cases(draw, like):
    """Cases that the same kernel serves."""
    batch, max_pages = draw(st.integers(1, 3)), draw(st.integers(2, 12))
    seqlen_k = max_pages * like.page_size
    return replace(
        like,
        seqlen_q=draw(st.sampled_from([2, 5, 16])),
        seqlen_k=seqlen_k,
        batch=batch,
        kv_lengths=tuple(draw(st.integers(0, seqlen_k)) for _ in range(batch)),
        layout=draw(st.sampled_from(["bhsd", "bshd"])),
        seed=draw(st.integers(0, 2**16)),
    )


@some_cases
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_case(tile, case, data):
    drawn, num_sms = data.draw(cases(case)), data.draw(st.sampled_from([1, 3, 7, 132]))
    schedule = data.draw(st.sampled_from(SCHEDULES))
    ct.assert_forward(drawn, *run(drawn, tile, schedule=schedule, device=replace(H200, num_sms=num_sms)))


@some_cases
def test_offsets_take_64_bits(tile, case):
    case = replace(case, head_dim=16, head_dim_v=16, seqlen_q=5, seqlen_k=64, batch=2, kv_lengths=(33, 64))
    ct.assert_forward(case, *run(case, tile, allocate=attention.far_apart))


def test_no_undefined_behaviour():
    for tile, case in SOME:
        ct.assert_forward(case, *run(case, tile, sanitizer="undefined"))
