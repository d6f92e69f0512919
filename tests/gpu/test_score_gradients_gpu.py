"""Gradients of bias, slopes, scale and softcap on the device, and calls that ask for some gradients only."""

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.spec.outputs import GRADIENTS

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32", "float64")
SCORES = ("dbias", "dalibi_slopes", "dscale", "dsoftcap")
# A bias of every axis, and of few of them; with what else acts on scores.
OPTIONS = [
    {"bias": (2, 4, 1, 1), "causal": True},
    {"bias": (4, "m", "n"), "window": (40, 3), "alibi_slopes": (4,), "softcap": 5.0, "dlse": True},
    {"bias": (2, 1, "m", "n"), "bias_holes": True, "mask": (2, 4, 1, "n"), "alibi_slopes": (2, 4), "strides": "padded"},
    {"bias": ("n",), "kv_lengths": (0, 7), "layout": "bshd", "softcap": 50.0, "bias_dtype": "input"},
    {"bias": ("m", 1), "dropout": 0.3, "causal": "top_left", "softcap": 0.5, "sinks": True},
    {"bias": (1, 1), "scale": -0.25, "strides": "flipped", "alibi_slopes": (4,)},
    {"bias": (4, "m", 1), "block_mask": (2, 4), "block_size": (48, 80), "alibi_slopes": (4,), "softcap": 5.0},
]


def case_of(seqlen_q, seqlen_k, **options):
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
    lengths = {"m": seqlen_q, "n": seqlen_k}
    for name in {"bias", "mask"} & options.keys():
        options[name] = tuple(lengths.get(n, n) for n in options[name])
    return ct.Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes | options)


def run(cupy, case, need, *, deterministic=False, **results):
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
    inputs = ct.qkv(arrays)
    out, lse = attn.forward(*inputs, **ct.optional(arrays) | case.random)
    keywords = ct.optional_backward(arrays) | case.random | results
    return attn.backward(arrays["dout"], *inputs, out, lse, **keywords, need=need)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(5, 9), (113, 203), (300, 1000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle(cupy, dtype, sizes, options):
    case = case_of(*sizes, dtype=dtype, **options)
    need = ct.gradients_of(case.problem)
    gradients = run(cupy, case, need)
    assert gradients._fields == need
    assert {type(x) for x in gradients} == {cupy.ndarray}
    arrays = case.arrays()
    assert (gradients.dbias.shape, gradients.dbias.dtype) == (arrays["bias"].shape, arrays["bias"].dtype)
    ct.assert_backward(case, **gradients._asdict())


@pytest.mark.parametrize("head_dim", [24, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(cupy, dtype, head_dim):
    case = case_of(200, 333, dtype=dtype, head_dim=head_dim, bias=(4, "m", "n"), softcap=5.0, alibi_slopes=(4,))
    ct.assert_backward(case, **run(cupy, case, SCORES)._asdict())


@pytest.mark.parametrize("bias", [(4, 700, 900), (2, 1, 1, 900), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeatable_bit_by_bit(cupy, dtype, bias):
    """Whatever else is computed, and wherever the results go."""
    case = case_of(700, 900, dtype=dtype, bias=bias, softcap=5.0, alibi_slopes=(2, 4), causal=True)
    first = run(cupy, case, SCORES)
    ct.assert_backward(case, **first._asdict())
    frame = cupy.full((*first.dbias.shape[:-1], 2 * first.dbias.shape[-1]), np.nan, first.dbias.dtype)
    again = run(cupy, case, ("dq", *SCORES), dbias=frame[..., ::2])
    for name in SCORES:
        np.testing.assert_array_equal(ct.to_numpy(getattr(again, name)), ct.to_numpy(getattr(first, name)))
    assert again.dbias.data.ptr == frame.data.ptr
    assert cupy.isnan(frame[..., 1::2].astype(np.float32)).all()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("need", [("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dv"), ("dq", "dk"), ("dsinks",), ()])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_only_what_is_needed(cupy, dtype, need, deterministic, head_dim):
    case = case_of(300, 500, dtype=dtype, head_dim=head_dim, causal=True, sinks=True)
    gradients = run(cupy, case, need, deterministic=deterministic)
    assert gradients._fields == tuple(name for name in GRADIENTS if name in need)
    ct.assert_backward(case, **gradients._asdict())


def test_many_heads_and_keys(cupy):
    """Sums over more tiles than the device has blocks."""
    case = case_of(1000, 3000, batch=3, dtype="bfloat16", bias=(1, 1, 1, "n"), alibi_slopes=(4,), window=(500, 0))
    ct.assert_backward(case, **run(cupy, case, SCORES[:3])._asdict())


def test_a_captured_graph(cupy):
    case = case_of(113, 203, dtype="bfloat16", bias=("n",))
    arrays = case.arrays(cupy.asarray)
    inputs, bias, need = ct.qkv(arrays), arrays["bias"], ("dv", "dbias", "dscale")
    attn = cuflash.FlashAttention()
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        attn.compile(*inputs, bias=bias, need=need)
        assert "for dv, dbias, dscale" in attn.plan(*inputs, bias=bias, need=need).describe(verbose=True, width=0)
        stream.begin_capture()
        out, lse = attn.forward(*inputs, bias=bias)
        gradients = attn.backward(arrays["dout"], *inputs, out, lse, bias=bias, need=need)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        ct.assert_backward(case, **gradients._asdict())
