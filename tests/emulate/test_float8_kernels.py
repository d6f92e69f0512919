"""The forward kernels on fp8 keys and values, run on the CPU against the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.arrays.array_info import FLOAT8, numpy_dtype
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm80.tiles import FLOAT8_TILES
from cuflash.plan.sm90.decode_tiles import DECODE_FLOAT8_SM90_TILES
from cuflash.spec.passes import FORWARD
from tests.emulate import attention
from tests.judging import assert_within
from tests.sampling import examples

pytestmark = pytest.mark.one_in(3)

DECODE = replace(DECODE_FLOAT8_SM90_TILES[2], block_n=64, num_stages=2)
SM80 = replace(FLOAT8_TILES[0], max_dim=128, block_m=64)
WIDE, WIDEST = (replace(next(x for x in FLOAT8_TILES if x.element_bytes == n), max_dim=128) for n in (4, 8))

CASE = ct.Case(
    seqlen_q=5,
    seqlen_k=256,
    batch=3,
    num_heads=4,
    num_heads_kv=2,
    head_dim=80,
    head_dim_v=48,
    dtype="float16",
    causal=True,
    kv_lengths=(203, 3, 130),
    kv_dtype="float8_e4m3fn",
    k_scale="block",
    v_scale="token",
    seed=1,
)
PAGES = replace(CASE, page_size=16)
LONG = replace(CASE, seqlen_q=150)
OPTIONS: dict[str, Any] = {
    "softcap": 3.0,
    "bias": (1, 4, 150, 256),
    "mask": (3, 1, 150, 256),
    "alibi_slopes": (4,),
    "window": (60, None),
}
PACKED: dict[str, Any] = {"kv_lengths": None, "batch": 1, "cu_seqlens_q": (0, 30, 140), "cu_seqlens_k": (0, 111, 250)}
OF_BYTES: dict[str, Any] = {"dtype": "bfloat16", "q_float8": True, "q_scale": "token", "scale_block": 16}
# Name -> architecture, tile, case. Both formats, every kind of scale, and every dtype of q. Devices before 8.9 have no
# instruction that converts, and those before 8.0 no products of bfloat16.
CASES = {
    "decode": ("9.0", DECODE, replace(CASE, v_scale="block", scale_block=64)),
    "decode, e5m2, head": (
        "9.0",
        DECODE,
        replace(CASE, dtype="bfloat16", kv_dtype="float8_e5m2", k_scale="head", v_scale="head", sinks=True),
    ),
    "decode, rows": ("9.0", DECODE, replace(CASE, seqlen_q=21, v_scale="block", scale_block=32)),
    "decode, parts": ("9.0", replace(DECODE, block_n=128), replace(CASE, seqlen_k=300, head_dim_v=128)),
    "decode, pages": ("9.0", DECODE, PAGES),
    "decode, pages, one scale": (
        "9.0",
        replace(DECODE, block_n=64),
        replace(PAGES, page_size=32, k_scale=None, v_scale="tensor", layout="bshd", softcap=2.0),
    ),
    "sm80": ("8.0", SM80, replace(LONG, v_scale="block", scale_block=32)),
    "sm80, pages, options": ("8.0", SM80, replace(LONG, page_size=64, dtype="bfloat16", scale_block=128, **OPTIONS)),
    "sm80, narrow": ("9.0", SM80, replace(LONG, strides="padded", head_dim=31, head_dim_v=17, dropout=0.2)),
    "sm80, packed": ("7.5", SM80, replace(LONG, dtype="bfloat16", kv_dtype="float8_e5m2", **PACKED)),
    "q, decode": ("9.0", DECODE, replace(CASE, **OF_BYTES, sinks=True)),
    "q, decode, pages": ("9.0", DECODE, replace(PAGES, **OF_BYTES | {"q_scale": "head", "head_dim": 144})),
    "q, sm80": ("8.0", SM80, replace(LONG, **OF_BYTES, head_dim=72, dropout=0.2, **OPTIONS)),
    "q, sm80, narrow": (
        "8.9",
        SM80,
        replace(LONG, **OF_BYTES | {"q_scale": "block", "head_dim": 31, "strides": "padded"}),
    ),
    "q, sm80, packed": ("7.5", SM80, replace(LONG, **OF_BYTES, **PACKED)),
    "float32": ("9.0", WIDE, replace(LONG, dtype="float32", v_scale="head")),
    "float64": ("8.0", WIDEST, replace(LONG, dtype="float64", seqlen_q=40, strides="flipped")),
}
every_case = pytest.mark.parametrize(("arch", "tile", "case"), CASES.values(), ids=CASES)


def run(case, tile, arch="9.0", *, arrays=None, **options):
    """out and lse of the case, from a plan with the given tile."""
    arrays = case.arrays() if arrays is None else arrays
    problem = attention.problem_of(case, arrays)
    return attention.forward(problem, arrays, tiles=(tile,), arch=arch, **options, **case.random)


@every_case
def test_cases(arch, tile, case):
    ct.assert_forward(case, *run(case, tile, arch, schedule=SCHEDULES[-1]))


@pytest.mark.parametrize(("tile", "case"), [(DECODE, PAGES), (SM80, LONG)], ids=["decode", "sm80"])
@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_case(tile, case, data):
    """That the same kernel serves, and of fp8 q."""
    if data.draw(st.booleans()):
        q_scale = data.draw(st.sampled_from(["token", "tensor", "head", "block"]))
        case = replace(case, dtype="bfloat16", q_float8=True, q_scale=q_scale)
    batch, pages = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 12))
    granularity = ("block", "token") if case.page_size else ("token",)
    drawn = replace(
        case,
        seqlen_q=data.draw(st.sampled_from([2, 5, 16])),
        seqlen_k=16 * pages,
        batch=batch,
        kv_lengths=tuple(data.draw(st.integers(0, 16 * pages)) for _ in range(batch)),
        layout=data.draw(st.sampled_from(["bhsd", "bshd"])),
        k_scale=data.draw(st.sampled_from(granularity)),
        v_scale=data.draw(st.sampled_from(granularity)),
        scale_block=data.draw(st.sampled_from([2, 4, 8])),
        seed=data.draw(st.integers(0, 2**16)),
    )
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=data.draw(st.sampled_from([1, 3, 132])))
    ct.assert_forward(drawn, *run(drawn, tile, device, schedule=data.draw(st.sampled_from(SCHEDULES))))


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("kv_dtype", FLOAT8)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_byte_is_the_number_that_it_stands_for(dtype, kv_dtype, arch):
    """As the value of the only key, NaN and infinities too."""
    case = ct.Case(seqlen_q=1, seqlen_k=1, head_dim=16, head_dim_v=256, dtype=dtype, kv_dtype=kv_dtype)
    arrays = case.arrays()
    arrays["v"][...] = np.arange(256, dtype=np.uint8).view(numpy_dtype(kv_dtype))
    wide = next(x for x in FLOAT8_TILES if x.max_dim == 256 and x.element_bytes == (4 if dtype == "float32" else 2))
    tiles = [wide] if arch == "8.0" or dtype == "float32" else [wide, DECODE_FLOAT8_SM90_TILES[3]]
    for tile in tiles:
        out, _ = run(case, tile, arch, arrays=arrays)
        np.testing.assert_array_equal(out.astype(np.float32)[0, 0, 0], arrays["v"].astype(np.float32)[0, 0, 0])


@pytest.mark.parametrize(("arch", "tile"), [("9.0", DECODE), ("8.0", SM80)], ids=["decode", "sm80"])
@pytest.mark.parametrize("scale", [2.0**-14, 2.0**-30, 2.0**10, 2.0**-140])
def test_scales_far_from_one_cost_no_digits_of_float16(arch, tile, scale):
    """Where one key has a scale so large, or so small, that weights times it are not half precision."""
    case = replace(CASE, kv_lengths=None, causal=False, k_scale="token")
    arrays = case.arrays()
    values = arrays["v"].astype(np.float32)
    arrays["v"] = (values / np.abs(values).max()).astype(arrays["v"].dtype)
    arrays["v_scale"] *= np.float32(scale) / 8
    arrays["v_scale"][..., 100] = scale * np.float32(30)
    results = dict(zip(("out", "lse"), run(case, tile, arch, arrays=arrays), strict=True))
    yardsticks = ct.yardsticks(attention.problem_of(case, arrays), arrays)
    assert_within(results, yardsticks)


@settings(max_examples=examples(12))
@given(data=st.data())
def test_queries_of_bfloat16_may_have_any_size(data):
    """Products are of float16, which has fewer exponents: rows, and channels in them, far from one cost no digits."""
    case = replace(CASE, dtype="bfloat16", kv_lengths=None, k_scale=data.draw(st.sampled_from(("token", "head"))))
    case = replace(case, seed=data.draw(st.integers(0, 99)))
    arrays = case.arrays()
    exponents = st.sampled_from((0, 3, -3, 40, -40, 100, -100, -120))
    q = arrays["q"].astype(np.float32)
    rows = data.draw(st.lists(exponents, min_size=q.shape[2], max_size=q.shape[2]))
    q *= np.float32(2) ** np.array(rows, np.float32)[:, None]
    for channel in data.draw(st.lists(st.integers(0, case.head_dim - 1), max_size=3)):
        q[..., channel] *= np.float32(2) ** data.draw(st.sampled_from((4, -20, -60)))
    arrays["q"] = q.astype(arrays["q"].dtype)
    yardsticks = ct.yardsticks(attention.problem_of(case, arrays), arrays)
    assert_within(dict(zip(("out", "lse"), run(case, DECODE, arrays=arrays), strict=True)), yardsticks)


def test_plans_say_what_is_served():
    """Few queries by the kernel for them, all else by the kernels for every device."""
    few, many = (
        replace(CASE, seqlen_k=4096, kv_lengths=None),
        replace(LONG, seqlen_q=1000, seqlen_k=1000, kv_lengths=None),
    )
    sources = [choose_plan(case.problem, DeviceSpec.for_arch("9.0"), FORWARD).kernels[0].source for case in (few, many)]
    assert sources == ["sm90/decode_float8.cu", "sm80/forward.cu"]
    plan = choose_plan(many.problem, DeviceSpec.for_arch("9.0"), FORWARD)
    assert "not sm90/forward: it knows no fp8 keys and values" in plan.reason
    assert "float8_e4m3fn" in plan.kernels[0].name
    # fp8 q, too: fp8 products where they have all options, and else the same two kernels.
    few, long = (replace(case, dtype="bfloat16", q_float8=True, q_scale="token") for case in (few, many))
    whole = replace(long, k_scale="head", v_scale="head")
    others: dict[str, tuple[dict[str, Any], str]] = {
        "bias": ({"bias": (1000,)}, "it knows no bias"),
        "pages": (
            {"page_size": 16, "seqlen_k": 1008, "kv_lengths": (1000,) * 3},  # whose scales differ
            "it knows no k_scale of 16 keys each",
        ),
        "dropout": ({"dropout": 0.1}, "it knows no dropout"),
        "packed": (PACKED, "it knows no packed sequences"),
        "blocks": ({"k_scale": "block"}, "it knows no k_scale of 16 keys each"),
        "keys": ({"v_scale": "token"}, "it knows no v_scale of 1 keys each"),
    }
    for changes, why in others.values():
        plan = choose_plan(replace(whole, **changes).problem, DeviceSpec.for_arch("9.0"), FORWARD)
        assert plan.kernels[-1].source == "sm80/forward.cu" and f"not sm90/forward_float8: {why}" in plan.reason
        assert "fp8 q, k and v become half precision" in plan.reason
    for case, arch, source in (
        (whole, "9.0", "sm90/forward_float8.cu"),
        (few, "9.0", "sm90/decode_float8.cu"),
        (whole, "8.9", "sm80/forward.cu"),
    ):
        plan = choose_plan(case.problem, DeviceSpec.for_arch(arch), FORWARD)
        assert plan.kernels[0].source == source
        assert ("become half precision" in plan.reason) == (source != "sm90/forward_float8.cu")
    few = replace(few, dtype="float16", q_float8=False, q_scale=None)
    # Rows that TMA does not reach, and heads that are too wide.
    for other in (replace(few, strides="padded"), replace(few, head_dim=320)):
        plan = choose_plan(other.problem, DeviceSpec.for_arch("9.0"), FORWARD)
        assert plan.kernels[0].source == "sm80/decode.cu"
