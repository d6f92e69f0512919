"""The decode kernel of every device, sm80/decode.cu, run on the CPU against the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays.array_info import ITEMSIZE
from cuflash.emulator import SCHEDULES, Statistics
from cuflash.plan import DeviceSpec
from cuflash.plan.sm80.decode import DECODE_FLOAT8_TILES, DECODE_TILES, MOST_WARPS, DecodeTile
from cuflash.spec.passes import FORWARD
from tests.emulate import attention
from tests.emulate.attention import problem_of
from tests.emulate.checks import judge
from tests.emulate.decode_problem import CASE, combined
from tests.judging import bits
from tests.sampling import examples
from tests.scored import MASKS, SCORES, Scored, score_args_of

pytestmark = pytest.mark.one_in(32)

# By blocks of one of them, how the 4 heads of CASE fall to blocks.
DEVICES = {"shared": 16, "uneven": 7, "few": 3, "whole": 1}
every_device = pytest.mark.parametrize("num_sms", DEVICES.values(), ids=DEVICES)


def tile_of(dtype="float16", block_m=16, block_n=16, warp_groups=2, num_stages=2, **fields):
    return DecodeTile(
        element_bytes=ITEMSIZE[dtype],
        max_dim=1024,
        block_m=block_m,
        block_n=block_n,
        warp_groups=warp_groups,
        num_stages=num_stages,
        min_blocks=1,
        fragments_ahead=1,
        origin="of a test",
        **fields,
    )


def fitting(case, **fields):
    """The tile of so many warp_groups and so on whose rows are enough."""
    rows = case.num_heads // case.num_heads_kv * case.seqlen_q
    key_bytes = 1 if case.kv_dtype else 0
    return tile_of(case.dtype, **{"block_m": max(16, -(-rows // 16) * 16), "key_bytes": key_bytes} | fields)


def run(case, tile=None, *, arrays=None, arch="8.0", num_sms=16, **options):
    """out and lse of the case, from a plan with the given tile."""
    arrays = case.arrays() if arrays is None else arrays
    device = replace(DeviceSpec.for_arch(arch), num_sms=num_sms)
    tiles = (tile or fitting(case),)
    return attention.forward(problem_of(case, arrays), arrays, tiles=tiles, arch=device, **case.random, **options)


def plan_of(case, tile=None, *, arch="8.0", num_sms=16):
    arrays, device = case.arrays(), replace(DeviceSpec.for_arch(arch), num_sms=num_sms)
    return attention.plan_for(problem_of(case, arrays), FORWARD, arrays, device, (tile or fitting(case),))


# ---- Against the oracle ----------------------------------------------------------------------------------------------

FLOAT8: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "k_scale": "token", "v_scale": "token"}
# Name -> what differs from CASE.
CASES: dict[str, dict[str, Any]] = {
    "lengths": {},
    "one query": {"seqlen_q": 1, "kv_lengths": None},
    "one head to a group": {"num_heads_kv": 8},
    "rows of two warps": {"seqlen_q": 8},
    "rows of four warps": {"seqlen_q": 16, "dtype": "bfloat16"},
    "no bound": {"causal": False},
    "the last queries see no key": {"causal": "top_left", "kv_lengths": (1, 4)},
    "the first queries see no key": {"seqlen_q": 16, "seqlen_k": 5, "kv_lengths": None},
    "no keys in a batch entry": {"kv_lengths": (0, 300)},
    "no keys at all": {"kv_lengths": (0, 0), "sinks": True},
    "window and lengths": {"causal": False, "window": (200, 3)},
    "only the diagonal": {"window": (0, 0), "causal": False},
    "spread": {"score_spread": 30.0},
    "negative scale": {"scale": -0.3},
    "odd dimensions": {"head_dim": 5, "head_dim_v": 7},
    "wide V": {"head_dim": 24, "head_dim_v": 128},
    "rows of heads": {"layout": "bshd"},
    "padded": {"strides": "padded"},
    "flipped": {"strides": "flipped", "dtype": "float32"},
    "softcap": {"softcap": 2.0, "score_spread": 8.0},
    "slopes": {"alibi_slopes": (2, 8), "causal": False},
    "per-pair bias": {"bias": (8, 3, 300)},
    "bias of keys": {"bias": (300,), "bias_dtype": "input", "alibi_slopes": (2, 8)},
    "mask of pairs": {"mask": (2, 8, 3, 300)},
    "mask of keys": {"mask": (2, 1, 1, 300), "bias": (3, 1)},
    "sinks": {"sinks": True, "kv_lengths": (0, 230)},
    "dropout": {"dropout": 0.4, "seqlen_q": 13, "num_heads": 4},
    "blocks of heads": {"block_mask": (2, 8), "block_size": (16, 32), "blocks_kept": 0.2, "kv_lengths": None},
    "blocks of all heads": {"block_mask": (), "block_size": (128, 64), "causal": False},
    "float32": {"dtype": "float32"},
    "float64": {"dtype": "float64"},
    "pages": {"page_size": 16, "seqlen_k": 304},
    "large pages": {"page_size": 128, "seqlen_k": 384, "dtype": "bfloat16", "window": (60, None)},
    "bytes": FLOAT8,
    "bytes in pages": FLOAT8 | {"page_size": 16, "seqlen_k": 304, "k_scale": "block", "dtype": "float32"},
    "queries of bytes": FLOAT8 | {"q_float8": True, "q_scale": "token", "dtype": "bfloat16", "dropout": 0.2},
    "all that acts on scores": {
        "dtype": "float32",
        "bias": (2, 8, 3, 300),
        "mask": (8, 3, 300),
        "alibi_slopes": (8,),
        "softcap": 4.0,
        "sinks": True,
        "window": (150, None),
        "dropout": 0.2,
        "block_mask": (),
    },
}


@every_device
@pytest.mark.parametrize("name", CASES)
def test_cases(name, num_sms):
    case = replace(CASE, **CASES[name])
    with combined(by_blocks=num_sms % 2 == 1):
        ct.assert_forward(case, *run(case, num_sms=num_sms))


@pytest.mark.parametrize(("name", "blocks", "of_a_head"), [("shared", 16, 4), ("uneven", 7, 3), ("few", 3, 2)])
def test_how_the_cases_share_keys(name, blocks, of_a_head):
    plan = plan_of(CASE, num_sms=DEVICES[name])
    assert (plan.run_time.resident_blocks, plan.key_splits) == (blocks, of_a_head)
    assert [kernel.source for kernel in plan.kernels] == ["sm80/decode.cu", "helpers/split_combine.cu"]
    with combined(by_blocks=True):
        assert [kernel.source for kernel in plan_of(CASE, num_sms=DEVICES[name]).kernels] == ["sm80/decode.cu"]


SHAPES = [
    {"block_n": 32},
    {"warp_groups": 1},
    {"warp_groups": 3, "num_stages": 1},
    {"warp_groups": 4, "num_stages": 3},
    {"warps_d": 2},
]


@pytest.mark.parametrize("seqlen_q", [2, 8])
@pytest.mark.parametrize("fields", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_shapes(dtype, fields, seqlen_q):
    """Of blocks: their warp_groups, whose warps share rows or have others, and the rings of these."""
    case = replace(CASE, dtype=dtype, seqlen_q=seqlen_q, sinks=True)
    arch = "9.0" if seqlen_q == 2 else "8.0"
    ct.assert_forward(case, *run(case, fitting(case, **fields), num_sms=5, arch=arch))


# One row for each way in which registers are used.
ROWS = {
    (row.element_bytes, row.key_bytes, row.max_dim, row.block_m): row for row in (*DECODE_FLOAT8_TILES, *DECODE_TILES)
}


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: f"{row.element_bytes}B{row.max_dim}x{row.block_m}")
def test_rows_of_the_table(row):
    """At the largest head dimensions whose sums and keys the emulated SM has space for."""
    dtype = {2: "float16", 4: "float32", 8: "float64"}[row.element_bytes]
    kinds = FLOAT8 if row.key_bytes else {}
    case = replace(CASE, **kinds, dtype=dtype, head_dim=row.max_dim, head_dim_v=row.max_dim, seqlen_k=90, batch=1)
    case = replace(case, seqlen_q=row.block_m // 4, kv_lengths=(80,))
    ct.assert_forward(case, *run(case, row, arch="9.0", num_sms=2))


@st.composite
def cases(draw):
    """Of every kind of problem that the kernel serves."""
    group, num_heads_kv, batch = (draw(st.sampled_from(x)) for x in ([1, 4, 3, 8], [1, 2], [1, 2]))
    num_heads, seqlen_q = group * num_heads_kv, draw(st.integers(1, 16 // group))
    page_size = draw(st.sampled_from([0, 0, 16, 32, 64]))
    seqlen_k = draw(st.one_of(st.integers(1, 260), st.sampled_from([16, 31, 32, 33, 64, 127, 128, 129])))
    seqlen_k = -(-seqlen_k // max(page_size, 1)) * max(page_size, 1)
    side = st.one_of(st.none(), st.integers(0, seqlen_k))
    causal = draw(st.sampled_from([False, True, "top_left"]))
    window = (draw(side), None if causal else draw(side))
    lengths = st.tuples(*[st.integers(0, seqlen_k)] * batch)
    pairs = st.sampled_from([None, None, (num_heads, seqlen_q, seqlen_k), (batch, 1, 1, seqlen_k), (seqlen_q, 1)])
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
    of_bytes = draw(st.sampled_from([False, False, True]))
    scales = st.sampled_from([None, "head", "block", "token"]) if of_bytes else st.none()
    blocks = st.sampled_from([None, None, (), (num_heads,), (batch, 1)]) if not page_size else st.none()
    return ct.Case(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        head_dim=draw(st.sampled_from([8, 33, 64, 72])),
        head_dim_v=draw(st.sampled_from([8, 17, 64, 120])),
        dtype=dtype,
        layout=draw(st.sampled_from(["bhsd", "bshd"])),
        strides=draw(st.sampled_from(["contiguous", "contiguous", "padded", "transposed"])),
        causal=causal,
        window=None if window == (None, None) else window,
        kv_lengths=draw(lengths if page_size else st.one_of(st.none(), lengths)),
        kv_lengths_dtype=draw(st.sampled_from(["int32", "int64"])),
        page_size=page_size,
        kv_dtype=draw(st.sampled_from(["float8_e4m3fn", "float8_e5m2"])) if of_bytes else "",
        k_scale=draw(scales),
        v_scale=draw(scales),
        score_spread=draw(st.sampled_from([1.0, 8.0, 30.0])),
        softcap=draw(st.sampled_from([None, 3.0])),
        bias=draw(pairs),
        bias_dtype=draw(st.sampled_from(["softmax", "input"])),
        bias_holes=draw(st.booleans()),
        mask=draw(pairs),
        block_mask=draw(blocks),
        block_size=draw(st.sampled_from([(128, 128), (16, 16), (32, 48)])),
        blocks_kept=draw(st.sampled_from([0.1, 0.5])),
        alibi_slopes=draw(st.sampled_from([None, (num_heads,), (batch, num_heads)])),
        sinks=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def tiles(draw, case):
    warps_d = draw(st.sampled_from([1, 1, 2]))
    rows = draw(st.sampled_from([16, 32]))
    warp_groups = draw(st.integers(1, MOST_WARPS // (rows // 16 * warps_d)).filter(lambda n: n <= 4))
    stages, keys = draw(st.integers(1, 3)), draw(st.sampled_from([16, 32]))
    tile = fitting(case, block_m=rows, block_n=keys, warp_groups=warp_groups, num_stages=stages, warps_d=warps_d)
    assume(tile.shared_bytes(*tile.padded_dims(case.problem)) <= DeviceSpec.for_arch("9.0").shared_bytes_per_block)
    return tile


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), case=cases())
def test_any_case(data, case):
    tile = data.draw(tiles(case))
    arch, num_sms = data.draw(st.sampled_from(["7.0", "7.5", "8.0", "9.0"])), data.draw(st.sampled_from([1, 3, 5, 40]))
    schedule, by_blocks = data.draw(st.sampled_from(SCHEDULES)), data.draw(st.booleans())
    with combined(by_blocks=by_blocks):
        ct.assert_forward(case, *run(case, tile, arch=arch, num_sms=num_sms, schedule=schedule))


# ---- score_mod and mask_mod -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sms", [1, 5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("score", "mask"), [("distance", None), ("alibi", "documents"), (None, "near"), ("of_rows", "prefix")]
)
def test_functions(score, mask, dtype, num_sms):
    """Rows of the heads of a group ask for what is of their own head; tiles that a mask hides are not loaded."""
    functions = (SCORES[score] if score else None, MASKS[mask] if mask else None)
    sizes, random = (2, 6, 2, 200), np.random.default_rng(7)
    shapes = {"q": (2, 6, 2, 24), "k": (2, 2, 200, 24), "v": (2, 2, 200, 16)}
    arrays = {name: random.standard_normal(shape).astype(ct.numpy_dtype(dtype)) for name, shape in shapes.items()}
    arrays |= score_args_of(functions, sizes, dtype, 7)
    problem = Scored(cuflash.FlashAttention(score=functions[0], mask=functions[1]), arrays, {}, "").problem
    device = replace(DeviceSpec.for_arch("8.0"), num_sms=num_sms)
    out, lse = attention.forward(problem, arrays, tiles=(tile_of(dtype),), arch=device)
    judge(problem, arrays, {"out": out, "lse": lse})


# ---- Tiles that no row attends to
# ------------------------------------------------------------------------------------------


def loaded(case, **options):
    """Bytes of tiles that the main kernel loads."""
    launches: list[Statistics] = []
    ct.assert_forward(case, *run(case, statistics=launches, **options))
    return next(launch.bytes_loaded for launch in launches if launch.bytes_loaded)


@pytest.mark.parametrize("num_sms", [1, 7, 16])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 1.0])
def test_hidden_blocks_are_not_loaded(kept, num_sms):
    """And tiles that one of the rows attends to are, once."""
    case = replace(CASE, kv_lengths=None, causal=False, seqlen_k=640, block_mask=(2, 8), block_size=(16, 32))
    case = replace(case, blocks_kept=kept, dtype="float32")
    mask = case.arrays()["block_mask"]
    of_keys = mask.any(axis=2).reshape(2, 2, 4, -1).any(axis=2)  # of the heads of a group
    row_bytes = 4 * (case.head_dim + case.head_dim_v)
    blocks = plan_of(case, num_sms=num_sms).run_time.resident_blocks
    of_q = 4 * case.seqlen_q * case.head_dim * 4
    keys = loaded(case, num_sms=num_sms) - of_keys.sum() * 32 * row_bytes
    assert 4 * of_q <= keys <= (4 + blocks) * of_q and keys % of_q == 0


def test_blocks_share_visible_tiles_that_gather(monkeypatch):
    """Each of the blocks of a head has some of them, and not one all: then one waits for many loads."""
    case = replace(CASE, batch=1, num_heads=1, num_heads_kv=1, kv_lengths=None, causal=False, seqlen_k=2048)
    case = replace(case, block_mask=(), block_size=(16, 256), seqlen_q=1)
    arrays = case.arrays()
    arrays["block_mask"][...] = False
    arrays["block_mask"][..., -1] = True
    problem = problem_of(case, arrays)
    device = replace(DeviceSpec.for_arch("8.0"), num_sms=8)
    out, lse = attention.forward(problem, arrays, tiles=(fitting(case),), arch=device)
    judge(problem, arrays, {"out": out, "lse": lse})
    plan = attention.plan_for(problem, FORWARD, arrays, device, (fitting(case),))
    assert plan.run_time.resident_blocks == 8


@pytest.mark.parametrize(("rows", "keys"), [(1, 640), (3, 640), (3, 637)])
def test_a_mask_is_looked_at_where_that_pays(monkeypatch, rows, keys):
    """Tiles that it hides from all rows are not loaded then; a warp looks at several, by vectors or by bytes."""
    case = replace(CASE, kv_lengths=None, causal=False, seqlen_q=rows, seqlen_k=keys, mask=(2, 8, rows, keys))
    arrays = case.arrays()
    arrays["mask"][:, :4, :, 100:500] = False
    problem = problem_of(case, arrays)
    found = []
    for flops in (2**62, 0):
        monkeypatch.setattr("cuflash.plan.block_index.LOOK_FLOPS", flops)
        launches: list[Statistics] = []
        out, lse = attention.forward(problem, arrays, tiles=(fitting(case),), arch="8.0", statistics=launches)
        judge(problem, arrays, {"out": out, "lse": lse})
        found.append(max(launch.bytes_loaded for launch in launches))
    assert found[1] < 0.75 * found[0]


# ---- Bit for bit -----------------------------------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("change", [{}, {"dtype": "float64"}, {"dtype": "float32", "block_mask": ()}], ids=str)
def test_schedule_and_memory_change_no_bit(change, num_sms):
    case = replace(CASE, sinks=True, **change)
    first = run(case, num_sms=num_sms)
    ct.assert_forward(case, *first)
    for schedule in SCHEDULES[1:]:
        assert bits(run(case, num_sms=num_sms, schedule=schedule)) == bits(first)
    for fill in (0x00, 0x3F):
        assert bits(run(case, num_sms=num_sms, fill=fill)) == bits(first)
    with combined(by_blocks=True):
        assert bits(run(case, num_sms=num_sms, schedule=SCHEDULES[-1])) == bits(first)


@every_device
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_values_that_are_no_numbers(dtype, num_sms):
    """NaN and infinities of visible inputs come out where the formula has them."""
    case = replace(CASE, kv_lengths=None, batch=1, dtype=dtype)
    arrays = case.arrays()
    arrays["q"][0, 2, 1, 3] = np.nan
    arrays["k"][0, 0, 299, 0] = np.inf  # seen by the last query alone
    arrays["v"][0, 1, 2, 5] = np.inf
    arrays["v"][0, 1, 70, 6] = np.nan
    inputs = {name: arrays[name] for name in "qkv"}
    out, lse = run(case, arrays=arrays, num_sms=num_sms)
    judge(problem_of(case, arrays), inputs, {"out": out, "lse": lse})


# ---- Memory ----------------------------------------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_results_stay_inside_their_arrays(dtype, num_sms):
    frames = []

    def allocate(array):
        shape = [n + 4 for n in array.shape]
        poison = -1 if array.dtype.kind == "i" else np.nan
        frame = attention.guarded(np.full(shape, poison, array.dtype))
        inside = (slice(2, -2),) * array.ndim
        frame[inside] = array
        frames.append((frame, inside, poison))
        return frame[inside]

    case = replace(CASE, dtype=dtype)
    ct.assert_forward(case, *run(case, allocate=allocate, num_sms=num_sms))
    for frame, inside, poison in frames:
        frame[inside] = poison
        np.testing.assert_array_equal(frame, np.full_like(frame, poison))


@pytest.mark.parametrize("change", [{}, {"mask": (2, 4, 3, 150), "bias": (2, 4, 3, 150)}], ids=str)
def test_offsets_take_64_bits(change):
    case = replace(CASE, head_dim=16, head_dim_v=16, seqlen_k=150, num_heads=4, kv_lengths=(150, 33), **change)
    ct.assert_forward(case, *run(case, allocate=attention.far_apart, num_sms=5))


def test_lengths_out_of_range_are_clamped():
    case = replace(CASE, batch=3, kv_lengths=(0, 300, 300))
    arrays = case.arrays()
    tame = run(case, arrays=arrays)
    arrays["kv_lengths"][...] = (-7, 301, 2**31 - 1)
    assert bits(run(case, arrays=arrays)) == bits(tame)


def test_no_undefined_behaviour():
    for dtype in ("bfloat16", "float32", "float64"):
        case = replace(CASE, dtype=dtype, mask=(300,), block_mask=(), dropout=0.2, alibi_slopes=(8,))
        ct.assert_forward(case, *run(case, num_sms=5, sanitizer="undefined"))


@pytest.mark.parametrize("head_dim", [16, 64, 72, 128])
def test_matrix_loads_have_no_bank_conflicts(head_dim):
    launches: list[Statistics] = []
    run(replace(CASE, head_dim=head_dim, head_dim_v=head_dim), statistics=launches, num_sms=1)
    assert [launch.matrix_load_conflicts for launch in launches] == [0]
