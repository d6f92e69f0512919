"""fp8 keys and values on the device: against the oracle, in arrays of bytes that say what they are."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.arrays.fp8 import Float8Array
from cuflash.spec.passes import FORWARD
from cuflash.testing.arrays import lay_out, to_numpy
from cuflash.testing.float8 import assert_float8
from tests.gpu.planned import is_sm90, plan_of, plans_of

pytestmark = pytest.mark.gpu

CASE = ct.Case(
    batch=2,
    num_heads=8,
    num_heads_kv=2,
    seqlen_q=1,
    seqlen_k=1371,
    head_dim=128,
    dtype="bfloat16",
    causal=True,
    kv_dtype="float8_e4m3fn",
    k_scale="token",
    v_scale="token",
)
OF_BYTES: dict[str, Any] = {"q_float8": True, "q_scale": "token"}
CASES: dict[str, dict[str, Any]] = {
    "one query": {},
    "one query, float16": {"dtype": "float16", "v_scale": "block", "scale_block": 64},
    "one query, heads": {"k_scale": "head", "v_scale": "head", "kv_dtype": "float8_e5m2", "sinks": True},
    "one query, no scales": {"k_scale": None, "v_scale": None, "head_dim": 64},
    "16 queries": {"seqlen_q": 16, "head_dim": 192, "head_dim_v": 256, "softcap": 5.0},
    "pages": {"seqlen_k": 2048, "page_size": 16, "kv_lengths": (700, 2043), "dtype": "float16"},
    "pages of 256": {"seqlen_k": 2048, "page_size": 256, "kv_lengths": (700, 2043), "layout": "bshd"},
    "many queries": {"seqlen_q": 300, "dropout": 0.2},
    "many queries, float32": {"seqlen_q": 300, "dtype": "float32", "bias": (300, 1371), "head_dim": 72},
    "narrow": {"seqlen_q": 70, "strides": "padded", "head_dim": 31, "dtype": "float16"},
    "transposed": {"seqlen_q": 70, "strides": "transposed", "head_dim": 64},
    "packed": {"batch": 1, "seqlen_q": 300, "cu_seqlens_q": (0, 100, 290), "cu_seqlens_k": (0, 700, 1300)},
    # Of q, too, where bytes are not multiplied.
    "q, one query": {**OF_BYTES, "sinks": True},
    "q, pages": {**OF_BYTES, "seqlen_q": 7, "seqlen_k": 2048, "page_size": 16, "head_dim": 192},
    "q, many queries": {**OF_BYTES, "seqlen_q": 300, "dropout": 0.2, "bias": (300, 1371), "mask": (1371,)},
    "q, narrow": {**OF_BYTES, "seqlen_q": 70, "strides": "padded", "head_dim": 31, "q_scale": "block"},
    "q, packed": {
        **OF_BYTES,
        "batch": 1,
        "seqlen_q": 300,
        "cu_seqlens_q": (0, 100, 290),
        "cu_seqlens_k": (0, 700, 1300),
    },
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_oracle(changes):
    cupy = pytest.importorskip("cupy")
    case = replace(CASE, **changes)
    arrays = case.arrays(cupy.asarray)
    assert isinstance(arrays["k"], Float8Array)
    q, k, v = ct.qkv(arrays)
    attn = cuflash.FlashAttention(**case.keywords)
    out, lse = attn.forward(q, k, v, **ct.optional(arrays), **case.random)
    ct.assert_forward(case, out, lse)
    plans = plans_of(attn, q, k, v, **ct.optional(arrays))
    of_bytes = "fp8 q, k and v" if case.q_float8 else "fp8 k and v"
    why = "a block_table" if "block_table" in arrays else of_bytes
    assert plans.forward and plans.backward is None
    assert plans.describe(verbose=True, width=0).endswith(f"no backward pass with {why}")
    few = case.seqlen_q <= 16
    of_few = "sm90/decode_float8.cu" if is_sm90() else "sm80/decode.cu"
    main = of_few if few else "sm80/forward.cu"
    assert main in [kernel.source for kernel in plans.forward.kernels]


# Of q, too: head dimension, causal, and what else.
PRODUCTS = {
    "d 64": {"causal": True, "head_dim": 64, "q_scale": "token", "seqlen_q": 1000},
    "d 128": {"head_dim": 128, "window": (None, 90), "head_dim_v": 96, "layout": "bshd", "seqlen_q": 700},
    "d 128, causal": {"head_dim": 128, "causal": True, "kv_lengths": (900, 0), "sinks": True, "q_scale": "head"},
    "d 128, blocks": {"head_dim": 128, "kv_dtype": "float8_e5m2", "k_scale": "block", "v_scale": "block"},
    "d 256": {"head_dim": 256, "causal": True, "score_spread": 6.0, "seqlen_q": 300},
    "pages": {"head_dim": 128, "page_size": 128, "kv_lengths": (1500, 2048), "k_scale": "head", "causal": True},
    "small pages": {"head_dim": 64, "page_size": 16, "kv_lengths": (1500, 2048), "v_scale": "tensor"},
    "block mask": {"head_dim": 64, "block_mask": (1, 4), "block_size": (256, 64), "seqlen_q": 2048},
}


@pytest.mark.parametrize("changes", PRODUCTS.values(), ids=PRODUCTS)
def test_products(changes):
    cupy = pytest.importorskip("cupy")
    if not is_sm90():
        pytest.skip("fp8 products need compute capability 9.0")
    sizes = {"seqlen_q": 130, "seqlen_k": 2048, "batch": 2, "num_heads": 4, "num_heads_kv": 2, "scale_block": 64}
    case = ct.Case(**sizes | {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "q_float8": True} | changes)
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(**case.keywords)
    q, k, v = ct.qkv(arrays)
    assert_float8(case, *attn.forward(q, k, v, **ct.optional(arrays)))
    kernels = plan_of(FORWARD, attn, q, k, v, **ct.optional(arrays)).kernels
    assert kernels[-1].source == "sm90/forward_float8.cu"


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("name", ["q", "k"])
def test_rows_of_products_that_see_nan(name, code):
    """They have NaN, whatever its sign, and no others have."""
    cupy = pytest.importorskip("cupy")
    if not is_sm90():
        pytest.skip("fp8 products need compute capability 9.0")
    sizes: dict[str, Any] = {"seqlen_q": 1000, "seqlen_k": 1000, "num_heads": 2, "num_heads_kv": 2, "head_dim": 128}
    case = ct.Case(**sizes, **OF_BYTES, causal=True, dtype="bfloat16", kv_dtype="float8_e4m3fn", k_scale="head")
    arrays = case.arrays()
    arrays[name].view(np.uint8)[..., 700, 5] = code
    on_device = {name: lay_out(x, "contiguous", cupy.asarray) for name, x in arrays.items()}
    attn = cuflash.FlashAttention(**case.keywords)
    out = to_numpy(attn.forward(*ct.qkv(on_device), **ct.optional(on_device)).out).astype(np.float32)[0]
    is_nan = np.arange(1000) == 700 if name == "q" else np.arange(1000) >= 700
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(is_nan[:, None], out.shape))


def test_what_a_device_quantises_is_what_numpy_does():
    cupy = pytest.importorskip("cupy")
    k = np.random.default_rng(0).standard_normal((2, 3, 100, 96)).astype(np.float32)
    every: tuple[dict[str, Any], ...] = (
        {"per": "tensor"},
        {"per": "block", "block": 16, "rotate": True},
        {"per": "token", "dtype": "e5m2"},
    )
    for options in every:
        expected, expected_scale = cuflash.quantize(k, **options)
        k8, scale = cuflash.quantize(cupy.asarray(k), **options)
        np.testing.assert_allclose(scale.get(), expected_scale, rtol=1e-6)
        rotate = options.get("rotate", False)
        back = cuflash.dequantize(k8, scale, rotate=rotate).get()
        np.testing.assert_allclose(back, cuflash.dequantize(expected, expected_scale, rotate=rotate), atol=0.2)
        np.testing.assert_allclose(back, k, atol=0.4)


def test_a_cache_that_grows_is_read_to_its_end():
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 8, 1, 64)).astype(np.float16)
    k8, k_scale = cuflash.quantize(rng.standard_normal((1, 2, 1300, 64)).astype(np.float32))
    q_device, k_device = cupy.asarray(q), cuflash.fp8(cupy.asarray(k8.view(np.uint8)), "e4m3")
    for n in (600, 601, 640, 641, 1299, 1300):
        keys = k_device[:, :, :n]
        out = cuflash.attention(q_device, keys, keys, k_scale=cupy.asarray(k_scale), v_scale=1.0).get()
        expected = cuflash.attention(q, k8[:, :, :n], k8[:, :, :n], k_scale=k_scale, v_scale=1.0)
        np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), atol=2, rtol=4e-3)
