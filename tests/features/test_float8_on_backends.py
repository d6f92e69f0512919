"""fp8 k and v, and q, on every backend: by the oracle rule, or by the bounds of fp8 products, whatever their bytes."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays.array_info import FLOAT8, numpy_dtype
from cuflash.arrays.fp8 import Float8Array
from cuflash.plan.sm80.tiles import FLOAT8_TILES
from cuflash.plan.sm90.decode_tiles import DECODE_FLOAT8_SM90_TILES
from cuflash.plan.sm90.tiles import FORWARD_FLOAT8_SM90_TILES
from cuflash.plan.tiles import Tile
from cuflash.spec.passes import FORWARD
from cuflash.testing.float8 import ROUNDING_BY_LINE, assert_float8
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.gpu.planned import is_sm90, plan_of, plans_of
from tests.judging import assert_oracle, assert_within

DECODE = replace(DECODE_FLOAT8_SM90_TILES[2], block_n=64, num_stages=2)
SM80 = replace(FLOAT8_TILES[0], max_dim=128, block_m=64)
WIDE, WIDEST = (replace(next(x for x in FLOAT8_TILES if x.element_bytes == n), max_dim=128) for n in (4, 8))
OF_BYTES: dict[str, Any] = {"dtype": "bfloat16", "q_float8": True, "q_scale": "token"}


class Row(NamedTuple):
    """Options of a case, and the tile that the emulator takes."""

    options: dict[str, Any]
    tile: Tile | None = None

    def __str__(self):
        return ",".join(f"{name}={x}" for name, x in self.options.items()) or "usual"

    def results(self, backend, case, arrays=None, **how):
        own = {} if self.tile is None else {"tiles": (self.tile,)}
        return backend.results(case, arrays, need=(), **own | how)


# ---- fp8 in memory, which kernels convert ----------------------------------------------------------------------------

CASE = ct.Case(
    seqlen_q=5, seqlen_k=256, batch=3, num_heads=4, num_heads_kv=2, head_dim=80, head_dim_v=48, dtype="float16",
    causal=True, kv_lengths=(203, 3, 130), kv_dtype="float8_e4m3fn", k_scale="block", v_scale="token", seed=1,
)  # fmt: skip
LONG: dict[str, Any] = {"seqlen_q": 150}
OPTIONS: dict[str, Any] = {
    "softcap": 3.0, "bias": (1, 4, 150, 256), "mask": (3, 1, 150, 256), "alibi_slopes": (4,), "window": (60, None)
}  # fmt: skip
PACKED: dict[str, Any] = {"kv_lengths": None, "batch": 1, "cu_seqlens_q": (0, 30, 140), "cu_seqlens_k": (0, 111, 250)}
Q_BY_16 = OF_BYTES | {"scale_block": 16}
E5M2 = {"kv_dtype": "float8_e5m2"}
# Both formats, every kind of scale, and every dtype of q. Devices before 8.9 have no instruction that converts, and
# those before 8.0 no products of bfloat16.
EMULATED: dict[str, list[Row]] = {
    "emulated 9.0": [
        Row({"v_scale": "block", "scale_block": 64}, DECODE),
        Row({**E5M2, "dtype": "bfloat16", "k_scale": "head", "v_scale": "head", "sinks": True}, DECODE),
        Row({"seqlen_q": 21, "v_scale": "block", "scale_block": 32}, DECODE),
        Row({"seqlen_k": 300, "head_dim_v": 128}, replace(DECODE, block_n=128)),
        Row({"page_size": 16}, DECODE),
        Row({"page_size": 32, "k_scale": None, "v_scale": "tensor", "layout": "bshd", "softcap": 2.0}, DECODE),
        Row({**LONG, "strides": "padded", "head_dim": 31, "head_dim_v": 17, "dropout": 0.2}, SM80),
        Row({**Q_BY_16, "sinks": True}, DECODE),
        Row({**Q_BY_16, "page_size": 16, "q_scale": "head", "head_dim": 144}, DECODE),
        Row({**LONG, "dtype": "float32", "v_scale": "head"}, WIDE),
    ],
    "emulated 8.0": [
        Row({**LONG, "v_scale": "block", "scale_block": 32}, SM80),
        Row({**LONG, **OPTIONS, "page_size": 64, "dtype": "bfloat16", "scale_block": 128}, SM80),
        Row({**LONG, **OPTIONS, **Q_BY_16, "head_dim": 72, "dropout": 0.2}, SM80),
        Row({"dtype": "float64", "seqlen_q": 40, "strides": "flipped"}, WIDEST),
    ],
    "emulated 8.9": [Row({**LONG, **Q_BY_16, "q_scale": "block", "head_dim": 31, "strides": "padded"}, SM80)],
    "emulated 7.5": [
        Row({**LONG, **PACKED, **E5M2, "dtype": "bfloat16"}, SM80), Row({**LONG, **PACKED, **Q_BY_16}, SM80)
    ],
}  # fmt: skip
ON_DEVICE = ct.Case(
    batch=2, num_heads=8, num_heads_kv=2, seqlen_q=1, seqlen_k=1371, head_dim=128, dtype="bfloat16", causal=True,
    kv_dtype="float8_e4m3fn", k_scale="token", v_scale="token",
)  # fmt: skip
OF_TWO = {"batch": 1, "seqlen_q": 300, "cu_seqlens_q": (0, 100, 290), "cu_seqlens_k": (0, 700, 1300)}
PAGES = {"seqlen_k": 2048, "kv_lengths": (700, 2043)}
DEVICE_ROWS = [
    Row({}),
    Row({"dtype": "float16", "v_scale": "block", "scale_block": 64}),
    Row({"k_scale": "head", "v_scale": "head", **E5M2, "sinks": True}),
    Row({"k_scale": None, "v_scale": None, "head_dim": 64}),
    Row({"seqlen_q": 16, "head_dim": 192, "head_dim_v": 256, "softcap": 5.0}),
    Row({**PAGES, "page_size": 16, "dtype": "float16"}),
    Row({**PAGES, "page_size": 256, "layout": "bshd"}),
    Row({"seqlen_q": 300, "dropout": 0.2}),
    Row({"seqlen_q": 300, "dtype": "float32", "bias": (300, 1371), "head_dim": 72}),
    Row({"seqlen_q": 70, "strides": "padded", "head_dim": 31, "dtype": "float16"}),
    Row({"seqlen_q": 70, "strides": "transposed", "head_dim": 64}),
    Row(OF_TWO),
    # Of q, too, where bytes are not multiplied.
    Row({**OF_BYTES, "sinks": True}),
    Row({**OF_BYTES, "seqlen_q": 7, "seqlen_k": 2048, "page_size": 16, "head_dim": 192}),
    Row({**OF_BYTES, "seqlen_q": 300, "dropout": 0.2, "bias": (300, 1371), "mask": (1371,)}),
    Row({**OF_BYTES, "seqlen_q": 70, "strides": "padded", "head_dim": 31, "q_scale": "block"}),
    Row({**OF_BYTES, **OF_TWO}),
]


@on_backends({**EMULATED, DEVICE: DEVICE_ROWS}, of="row", emulated=3)
def test_oracle(backend, row):
    case = replace(ON_DEVICE if backend.name == DEVICE else CASE, **row.options)
    assert_oracle(case, row.results(backend, case, **backend.schedules[-1]))
    if backend.name == DEVICE:
        arrays, attn = case.arrays(backend.convert), cuflash.FlashAttention(**case.keywords)
        assert isinstance(arrays["k"], Float8Array)
        plans = plans_of(attn, *ct.qkv(arrays), **ct.optional(arrays))
        why = "a block_table" if "block_table" in arrays else "fp8 q, k and v" if case.q_float8 else "fp8 k and v"
        assert plans.forward and plans.backward is None
        assert plans.describe(verbose=True, width=0).endswith(f"no backward pass with {why}")
        of_few = "sm90/decode_float8.cu" if is_sm90() else "sm80/decode.cu"
        assert (of_few if case.seqlen_q <= 16 else "sm80/forward.cu") in [x.source for x in plans.forward.kernels]


DRAWN = [Row({"page_size": 16}, DECODE), Row(LONG, SM80)]


@on_backends(dict.fromkeys(("emulated 9.0 of 1 SMs", "emulated 9.0 of 3 SMs", "emulated 9.0"), DRAWN), of="row")
def test_drawn_lengths_and_scales(backend, row):
    def holds(case, data):
        if data.draw(st.booleans()):
            q_scale = data.draw(st.sampled_from(["token", "tensor", "head", "block"]))
            case = replace(case, **OF_BYTES | {"q_scale": q_scale})
        batch, pages = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 12))
        per = st.sampled_from(("block", "token") if case.page_size else ("token",))
        of_each: dict[str, Any] = {
            "seqlen_q": (2, 5, 16), "layout": ("bhsd", "bshd"), "scale_block": (2, 4, 8), "seed": range(99)
        }  # fmt: skip
        drawn: dict[str, Any] = {name: data.draw(st.sampled_from(own)) for name, own in of_each.items()}
        drawn |= {"seqlen_k": 16 * pages, "batch": batch, "k_scale": data.draw(per), "v_scale": data.draw(per)}
        lengths = tuple(data.draw(st.integers(0, 16 * pages)) for _ in range(batch))
        case = replace(case, **drawn, kv_lengths=lengths)
        assert_oracle(case, row.results(backend, case, **data.draw(st.sampled_from(backend.schedules))))

    backend.draw(12, holds, case=st.just(replace(CASE, **row.options)), data=st.data())


EVERY = (CORE, FALLBACK, "emulated 8.0", "emulated 9.0", DEVICE)


@on_backends(dict.fromkeys(EVERY, ("float16", "bfloat16", "float32")))
@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_every_byte_is_the_number_that_it_stands_for(backend, dtype, kv_dtype):
    """As the value of the only key, NaN and infinities too."""
    case = ct.Case(seqlen_q=1, seqlen_k=1, head_dim=16, head_dim_v=256, dtype=dtype, kv_dtype=kv_dtype)
    arrays = case.arrays()
    arrays["v"][...] = np.arange(256, dtype=np.uint8).view(numpy_dtype(kv_dtype))
    wide = next(x for x in FLOAT8_TILES if x.max_dim == 256 and x.element_bytes == (4 if dtype == "float32" else 2))
    decodes = backend.name == "emulated 9.0" and dtype != "float32"
    for tile in [wide, *[DECODE_FLOAT8_SM90_TILES[3]] * decodes] if backend.device else [None]:
        out = Row({}, tile).results(backend, case, arrays)["out"]
        np.testing.assert_array_equal(out.astype(np.float32)[0, 0, 0], arrays["v"].astype(np.float32)[0, 0, 0])


EVERYWHERE = {
    CORE: [Row({})], FALLBACK: [Row({})], "emulated 9.0": [Row({}, DECODE)], "emulated 8.0": [Row({}, SM80)]
}  # fmt: skip


@on_backends(EVERYWHERE, of="row")
@pytest.mark.parametrize("scale", [2.0**-14, 2.0**-30, 2.0**10, 2.0**-140])
def test_scales_far_from_one_cost_no_digits_of_float16(backend, row, scale):
    """Where one key has a scale so large, or so small, that weights times it are not half precision."""
    case = replace(CASE, kv_lengths=None, causal=False, k_scale="token")
    arrays = case.arrays()
    values = arrays["v"].astype(np.float32)
    arrays["v"] = (values / np.abs(values).max()).astype(arrays["v"].dtype)
    arrays["v_scale"] *= np.float32(scale) / 8
    arrays["v_scale"][..., 100] = scale * np.float32(30)
    assert_within(row.results(backend, case, arrays), ct.yardsticks(case.problem, arrays))


@on_backends({name: EVERYWHERE[name] for name in (CORE, FALLBACK, "emulated 9.0")}, of="row")
def test_queries_of_bfloat16_may_have_any_size(backend, row):
    """Products are of float16, which has fewer exponents: rows, and channels in them, far from one cost no digits."""

    def holds(data):
        k_scale, seed = data.draw(st.sampled_from(("token", "head"))), data.draw(st.integers(0, 99))
        case = replace(CASE, dtype="bfloat16", kv_lengths=None, k_scale=k_scale, seed=seed)
        arrays = case.arrays()
        exponents = st.sampled_from((0, 3, -3, -40, -100, -120, 20, 40, 100))
        q = arrays["q"].astype(np.float32)
        rows = data.draw(st.lists(exponents, min_size=q.shape[2], max_size=q.shape[2]))
        q *= np.float32(2) ** np.array(rows, np.float32)[:, None]
        for channel in data.draw(st.lists(st.integers(0, case.head_dim - 1), max_size=3)):
            q[..., channel] *= np.float32(2) ** data.draw(st.sampled_from((4, -20, -60)))
        arrays["q"] = q.astype(arrays["q"].dtype)
        assert_within(row.results(backend, case, arrays), ct.yardsticks(case.problem, arrays))

    backend.draw(12, holds, data=st.data())


# ---- fp8 products ----------------------------------------------------------------------------------------------------

PRODUCTS = ct.Case(
    seqlen_q=200, seqlen_k=300, num_heads=2, num_heads_kv=1, head_dim=64, kv_dtype="float8_e4m3fn", k_scale="head",
    v_scale="head", causal=True, seed=2, **OF_BYTES,
)  # fmt: skip
PLAIN: dict[str, Any] = {"causal": False, "head_dim": 128, "q_scale": "head"}
BY_64: dict[str, Any] = {"v_scale": "block", "scale_block": 64}
OF_POOL: dict[str, Any] = {"batch": 2, "k_scale": None, "v_scale": "tensor"}  # pages that a tile has several of
LENGTHS: dict[str, Any] = {"seqlen_k": 384, "kv_lengths": (300, 5)}
ROWS = FORWARD_FLOAT8_SM90_TILES
OF_PRODUCTS = [
    Row({"causal": False}, ROWS[0]),
    Row({}, ROWS[1]),
    Row({"head_dim": 128, "batch": 2, "kv_lengths": (130, 0), "sinks": True}, ROWS[2]),
    Row({**PLAIN, "head_dim_v": 96, "layout": "bshd", "window": (None, 90)}, ROWS[3]),
    Row({**PLAIN, **BY_64, **E5M2, "k_scale": "block"}, ROWS[4]),
    Row({"head_dim": 256, "seqlen_q": 130, "num_heads_kv": 2, "window": (140, 3)}, ROWS[5]),
    Row({**PLAIN, "head_dim": 192, "head_dim_v": 256, "v_scale": "block", "scale_block": 128}, ROWS[6]),
    Row({"head_dim": 48, "head_dim_v": 32, "scale": -0.3, "k_scale": None}, ROWS[1]),
    Row({"causal": False, "score_spread": 1e10, "distinct_keys": 2}, ROWS[0]),
    Row({**PLAIN, "k_scale": "head", "score_spread": 1e10, "distinct_keys": 2, "window": (None, 90)}, ROWS[3]),
    Row({**OF_POOL, "page_size": 16, "seqlen_k": 304, "kv_lengths": (200, 275), "head_dim": 48}, ROWS[1]),
    Row({**PLAIN, **BY_64, **LENGTHS, "batch": 2, "page_size": 128}, ROWS[4]),
    Row({**PLAIN, **OF_POOL, **LENGTHS, "page_size": 64, "causal": True}, ROWS[3]),
    Row({**PLAIN, "seqlen_k": 600, "block_mask": (1, 2), "block_size": (192, 128)}, ROWS[3]),
]
PRODUCTS_ON_DEVICE = ct.Case(
    seqlen_q=130, seqlen_k=2048, batch=2, num_heads=4, num_heads_kv=2, head_dim=128, scale_block=64,
    dtype="bfloat16", kv_dtype="float8_e4m3fn", q_float8=True,
)  # fmt: skip
POOL = {"kv_lengths": (1500, 2048)}
DEVICE_PRODUCTS = [
    Row({"causal": True, "head_dim": 64, "q_scale": "token", "seqlen_q": 1000}),
    Row({"window": (None, 90), "head_dim_v": 96, "layout": "bshd", "seqlen_q": 700}),
    Row({"causal": True, "kv_lengths": (900, 0), "sinks": True, "q_scale": "head"}),
    Row({**E5M2, "k_scale": "block", "v_scale": "block"}),
    Row({"head_dim": 256, "causal": True, "score_spread": 6.0, "seqlen_q": 300}),
    Row({**POOL, "page_size": 128, "k_scale": "head", "causal": True}),
    Row({**POOL, "head_dim": 64, "page_size": 16, "v_scale": "tensor"}),
    Row({"head_dim": 64, "q_scale": "token", "k_scale": "head", "score_spread": 1e10, "distinct_keys": 2}),
    Row({"head_dim": 64, "block_mask": (1, 4), "block_size": (256, 64), "seqlen_q": 2048}),
]


def needs_products(backend):
    if backend.name == DEVICE and not is_sm90():
        pytest.skip("fp8 products need compute capability 9.0")


@on_backends({"emulated 9.0": OF_PRODUCTS, DEVICE: DEVICE_PRODUCTS}, of="row")
def test_products(backend, row):
    needs_products(backend)
    case = replace(PRODUCTS_ON_DEVICE if backend.name == DEVICE else PRODUCTS, **row.options)
    found = row.results(backend, case)
    assert_float8(case, found["out"], found["lse"])
    if backend.name == DEVICE:
        arrays, attn = case.arrays(backend.convert), cuflash.FlashAttention(**case.keywords)
        plan = plan_of(FORWARD, attn, *ct.qkv(arrays), **ct.optional(arrays))
        assert plan.kernels[-1].source == "sm90/forward_float8.cu"


@on_backends(("emulated 9.0",))
def test_products_of_drawn_lengths(backend):
    """Scores of a large spread let weights outgrow their offsets."""

    def holds(tile, **drawn):
        case = replace(PRODUCTS, **drawn)
        found = Row({}, tile).results(backend, case)
        assert_float8(case, found["out"], found["lse"])

    backend.draw(
        10,
        holds,
        tile=st.sampled_from([tile for tile in ROWS if tile.max_dim <= 128]),
        seqlen_q=st.integers(1, 260),
        seqlen_k=st.integers(1, 400),
        score_spread=st.sampled_from((1.0, 6.0)),
        q_scale=st.sampled_from((None, "head", "token")),
        scale=st.sampled_from((None, 0.0, -0.25)),
        causal=st.booleans(),
        seed=st.integers(0, 99),
    )


@on_backends(("emulated 9.0",))
def test_schedules_agree(backend):
    case, row = replace(PRODUCTS, seqlen_q=150, seqlen_k=260), Row({}, ROWS[2].changed(max_dim=64))
    expected = row.results(backend, case)
    for how in backend.schedules:
        for name, x in row.results(backend, case, **how).items():
            np.testing.assert_array_equal(x, expected[name])


@on_backends(("emulated 9.0",))
@pytest.mark.parametrize(("first", "more"), [(4, 12), (2, 8), (0, 1)])
def test_out_of_any_alignment(backend, first, more):
    """Rows of out begin at column `first` of rows that are `more` columns wider."""
    case = replace(PRODUCTS, seqlen_q=65, seqlen_k=64)

    def allocate(array):
        if array.dtype.name != "bfloat16":
            return array.copy()
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + more), array.dtype)
        return wide[..., first : first + array.shape[-1]]

    found = Row({}, ROWS[1]).results(backend, case, allocate=allocate, sanitizer="undefined")
    assert_float8(case, found["out"], found["lse"])


BY_PRODUCTS = {CORE: [Row({})], FALLBACK: [Row({})], "emulated 9.0": [Row({}, ROWS[1])]}
BARE: dict[str, Any] = {"num_heads": 1, "q_scale": None, "k_scale": None, "v_scale": None, "causal": False}


@on_backends(BY_PRODUCTS | {"emulated 9.0": [Row({}, ROWS[3])]}, of="row")
def test_out_is_a_mean_of_values(backend, row):
    """Weights that round alike do not move it: where all values are equal, out is that value."""
    own = {"seqlen_q": 64, "seqlen_k": 1000, "score_spread": 0.1, "num_heads": 1, "v_scale": None}
    case = replace(PRODUCTS, **PLAIN | own)
    arrays = case.arrays()
    arrays["v"][...] = arrays["v"][..., :1, :]
    out = row.results(backend, case, arrays)["out"]
    value = np.broadcast_to(arrays["v"][..., :1, :].astype(np.float32), out.shape)
    np.testing.assert_allclose(out.astype(np.float32), value, rtol=1e-3 + 2.0**-8, atol=1e-6)


@on_backends(BY_PRODUCTS, of="row")
@pytest.mark.parametrize("distance", [24, 32, 44, 64, 448])
def test_scores_far_from_each_other(backend, row, distance):
    """Exponents from 9 000 to 160 000 below the largest are those of weights of 0."""
    case = replace(PRODUCTS, **BARE, seqlen_q=64, scale=0.125)
    arrays = case.arrays()
    arrays["q"][...] = 16
    arrays["k"][...] = distance * np.where(np.arange(case.seqlen_k) % 3 == 0, 1.0, -1.0)[:, None]
    out, values = row.results(backend, case, arrays)["out"], arrays["v"].astype(np.float32)
    expected = np.broadcast_to(values[..., ::3, :].mean(axis=-2, keepdims=True), out.shape)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=2.0**-8, atol=1e-3 * abs(values).max())


@on_backends(BY_PRODUCTS, of="row")
@pytest.mark.parametrize("scale", [0.2, -0.2])
def test_products_of_one_sign(backend, row, scale):
    """Below 0, a scale makes the smallest product the largest exponent; where all are positive, they are far apart."""
    case = replace(PRODUCTS, **BARE, seqlen_q=64, seqlen_k=256, scale=scale)
    arrays = case.arrays()
    arrays |= {name: np.abs(arrays[name]) for name in "qk"}
    found = row.results(backend, case, arrays)
    q, k, v = (arrays[name].astype(np.float64)[0, 0] for name in "qkv")
    scores = scale * q @ k.T
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    sums = weights.sum(axis=-1, keepdims=True)
    # An error of 1 / 12 of every weight moves the mean by that fraction of the values' sizes, and the sum, too.
    allowed = (2 * ROUNDING_BY_LINE * weights @ abs(v)) / sums + 2.0**-8 * abs(weights @ v) / sums
    assert (abs(found["out"][0, 0].astype(np.float64) - weights @ v / sums) <= allowed).all()
    np.testing.assert_allclose(found["lse"][0, 0], (largest + np.log(sums))[:, 0], atol=ROUNDING_BY_LINE)


OF_LONG = Row({"seqlen_q": 1000, "seqlen_k": 1000, "num_heads": 2, "head_dim": 128})


@on_backends({**BY_PRODUCTS, DEVICE: [OF_LONG]}, of="row")
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("name", ["q", "k"])
def test_rows_that_attend_to_nan(backend, row, name, code):
    """They are NaN, whatever its sign, and no others have any."""
    needs_products(backend)
    case = replace(PRODUCTS, **{"num_heads": 1, "seqlen_k": 200} | row.options, v_scale=None)
    arrays, at = case.arrays(), case.seqlen_q * 7 // 10
    arrays[name].view(np.uint8)[..., at, 5] = code
    out = row.results(backend, case, arrays)["out"].astype(np.float32)[0]
    rows = np.arange(case.seqlen_q)
    is_nan = rows == at if name == "q" else rows >= at
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(is_nan[:, None], out.shape))
