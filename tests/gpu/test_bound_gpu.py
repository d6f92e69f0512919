"""Bound and repeated calls on a device: the bits of a first call of `forward`, on other arrays and streams; graphs."""

import ml_dtypes
import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from tests.judging import assert_same_bits

pytestmark = pytest.mark.gpu

CASES = {
    "plain": ct.Case(seqlen_q=70, seqlen_k=90, head_dim=64, num_heads=4, num_heads_kv=2, dtype="bfloat16"),
    "packed": ct.Case(
        head_dim=64,
        seqlen_q=70,
        seqlen_k=90,
        ndim=3,
        dtype="float16",
        cu_seqlens_q=(0, 41, 70),
        cu_seqlens_k=(0, 41, 90),
    ),
    "options": ct.Case(
        head_dim=64,
        seqlen_q=70,
        seqlen_k=90,
        num_heads=4,
        dtype="float32",
        causal=True,
        bias=(4, 70, 90),
        sinks=True,
        mask=(70, 90),
    ),
    "decode": ct.Case(seqlen_q=1, seqlen_k=900, num_heads=4, num_heads_kv=1, head_dim=128, dtype="float16"),
    "copied": ct.Case(seqlen_q=70, seqlen_k=90, head_dim=64, dtype="bfloat16", strides="transposed"),
    "float64": ct.Case(seqlen_q=70, seqlen_k=90, head_dim=32, dtype="float64"),
    "dropout": ct.Case(seqlen_q=70, seqlen_k=90, head_dim=64, dtype="bfloat16", dropout=0.2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits_are_those_of_forward(cupy, case):
    of_seeds = []
    for seed in (1, 2):
        arrays = ct.Case(**{**vars(case), "seed": seed}).arrays(cupy.asarray)
        of_seeds.append({name: x for name, x in arrays.items() if name not in ("dout", "dlse")})
    attn = cuflash.FlashAttention()
    attn.options = case.options
    call = attn.bind(**of_seeds[0])
    random = {"seed": 3, "offset": 5} if case.dropout else {}
    for arrays in (*of_seeds, of_seeds[0]):
        expected = attn.forward(**arrays, **random)
        assert_same_bits(call(**arrays, **random), expected)
        out, lse = (cupy.empty_like(x) for x in expected)
        found = call(**arrays, **random, out=out, lse=lse)
        assert found.out is out
        assert found.lse is lse
        assert_same_bits(found, expected)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            found = call(**arrays, **random)
            stream.synchronize()
        assert_same_bits(found, expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_repeated_calls_have_the_bits_of_the_first(cupy, case):
    """On the same arrays, on others, on another stream, and with other numbers at the same addresses."""
    from cuflash.gpu import launch_cache

    def arrays_of(seed):
        arrays = ct.Case(**{**vars(case), "seed": seed}).arrays(cupy.asarray)
        return {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}

    attn = cuflash.FlashAttention()
    attn.options = case.options
    random = {"seed": 3, "offset": 5} if case.dropout else {}
    arrays, same, others = arrays_of(1), arrays_of(1), arrays_of(2)
    expected = []
    for given in (arrays, others):
        launch_cache.forget_launches()
        expected.append(attn.forward(**given, **random))
    for given, bits in ((arrays, 0), (arrays, 0), (others, 1), (same, 0), (others, 1)):
        assert_same_bits(attn.forward(**given, **random), expected[bits])
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        found = attn.forward(**same, **random)
        stream.synchronize()
    assert_same_bits(found, expected[0])
    for name, x in same.items():
        x[...] = others[name]
    assert_same_bits(attn.forward(**same, **random), expected[1])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_caches_grow(cupy, layout):
    rng = cupy.random.default_rng(0)
    attn = cuflash.FlashAttention(causal=True, layout=layout)
    shape = (2, 4, 400, 64) if layout == "bhsd" else (2, 400, 4, 64)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16) for _ in range(3))

    def first(x, length):
        return x[:, :, :length] if layout == "bhsd" else x[:, :length]

    q = first(q, 2)
    call = attn.bind(q, first(k, 90), first(v, 90))
    for length in (90, 91, 128, 129, 300, 400, 91):
        caches = first(k, length), first(v, length)
        assert_same_bits(call(q, *caches), attn.forward(q, *caches))


def test_a_graph_repeats_a_bound_call(cupy):
    rng = cupy.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, 100, 64), dtype=np.float32).astype(np.float16) for _ in range(3))
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, k, v)
    call = attn.bind(q, k, v)
    call(q, k, v, out=out, lse=lse)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        call(q, k, v, out=out, lse=lse)
        graph = stream.end_capture()
        q[...] = rng.standard_normal(q.shape, dtype=np.float32)
        graph.launch()
    stream.synchronize()
    assert_same_bits((out, lse), attn.forward(q, k, v))


def test_another_current_device_and_other_arrays(cupy):
    q, k, v = (cupy.ones((1, 2, 30, 16), np.float16) for _ in range(3))
    call = cuflash.FlashAttention().bind(q, k, v)
    with pytest.raises(ValueError, match=r"^q: got shape \(1, 2, 30, 16\) and dtype float16 in numpy"):
        call(*(x.get() for x in (q, k, v)))
    with pytest.raises(ValueError, match=r"^out: "):
        call(q, k, v, out=k)
    with pytest.raises(ValueError, match=r"^q: got shape \(1, 2, 7, 16\)"):
        call(q[:, :, :7], k, v)
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with cupy.cuda.Device(1):
            assert_same_bits(call(q, k, v), cuflash.FlashAttention().forward(q, k, v))
            other = [cupy.ones((1, 2, 30, 16), np.float16) for _ in range(3)]
            assert_same_bits(call(*other), cuflash.FlashAttention().forward(*other))
