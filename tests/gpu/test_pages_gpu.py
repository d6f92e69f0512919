"""Keys and values in pages on the device: against the oracle, and against the same keys in one piece."""

from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.spec.problem import PAGE_SIZES
from tests.gpu.planned import plans_of

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"batch": 3, "num_heads": 8, "num_heads_kv": 2, "seqlen_k": 2048, "kv_lengths": (1, 1371, 2048)}


def full_of_nan(cupy, x):
    return cupy.asarray(np.full(x.shape, np.nan, x.dtype))


def run(cupy, case, arrays=None, **options):
    arrays = {name: cupy.asarray(x) for name, x in arrays.items()} if arrays else case.arrays(cupy.asarray)
    optional = ct.optional(arrays) | case.random
    return cuflash.FlashAttention(**case.keywords).forward(*ct.qkv(arrays), **optional | options)


def assert_oracle(cupy, case):
    """The oracle, and the same bits once more, in arrays of the caller."""
    out, lse = run(cupy, case)
    ct.assert_forward(case, out, lse)
    assert_same_bits((out, lse), run(cupy, case, out=full_of_nan(cupy, out), lse=full_of_nan(cupy, lse)))


def assert_same_bits(results, others):
    for one, other in zip(results, others, strict=True):
        assert ct.to_numpy(one).tobytes() == ct.to_numpy(other).tobytes()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seqlen_q", [1, 5, 300])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_oracle(cupy, head_dim, seqlen_q, page_size):
    layout = "bshd" if page_size in (32, 128) else "bhsd"
    assert_oracle(
        cupy,
        ct.Case(
            **SIZES,
            seqlen_q=seqlen_q,
            head_dim=head_dim,
            dtype="bfloat16",
            causal=True,
            page_size=page_size,
            layout=layout,
        ),
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": "top_left"},
        {"window": (300, 0), "layout": "bshd"},
        {"softcap": 3.0, "alibi_slopes": (3, 8), "bias": (1, 8, 70, 2048), "mask": (3, 1, 1, 2048), "causal": True},
        {"sinks": True, "causal": True, "dropout": 0.2},
        {"strides": "padded", "causal": True},
        {"strides": "transposed"},
        {"kv_lengths_dtype": "int64", "head_dim": 40, "head_dim_v": 72},
    ],
    ids=str,
)
def test_options(cupy, options, dtype):
    sizes = SIZES | {"head_dim": 64, "seqlen_q": 70, "page_size": 32}
    assert_oracle(cupy, ct.Case(**sizes | options, dtype=dtype))


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("seqlen_q", [2, 300])
@pytest.mark.parametrize("head_dim", [128, 124])  # rows of 124 are no multiples of 16 bytes: other kernels
def test_bits_are_those_of_keys_in_one_piece(cupy, head_dim, seqlen_q, page_size):
    case = ct.Case(**SIZES, seqlen_q=seqlen_q, head_dim=head_dim, dtype="bfloat16", page_size=page_size)
    arrays = case.arrays()
    assert_same_bits(run(cupy, case, arrays), run(cupy, case, ct.gather_pages(arrays)))


@pytest.mark.parametrize("seqlen_q", [2, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_entries_that_are_no_page_are_moved_to_one(cupy, dtype, seqlen_q):
    """Looking at them would synchronise."""
    case = ct.Case(**SIZES, seqlen_q=seqlen_q, head_dim=64, dtype=dtype, page_size=64)
    arrays = case.arrays()
    for name in "kv":
        arrays[name] = np.where(np.isnan(arrays[name]), arrays[name].dtype.type(1), arrays[name])
    last, table = len(arrays["k"]) - 1, arrays["block_table"]
    table[1, :3] = (-1, last + 1, 2**31 - 1)
    table[2, 1:3] = (-(2**31), last)
    wild = run(cupy, case, arrays)
    table[1, :3] = (0, last, last)
    table[2, 1:3] = (0, last)
    assert_same_bits(wild, run(cupy, case, arrays))


def test_lengths_out_of_range_are_clamped(cupy):
    case = ct.Case(**SIZES | {"kv_lengths": (0, 2048, 2048)}, seqlen_q=3, head_dim=64, dtype="float16", page_size=16)
    arrays = case.arrays()
    tame = run(cupy, case, arrays)
    arrays["kv_lengths"][...] = (-7, 2049, 2**31 - 1)
    assert_same_bits(run(cupy, case, arrays), tame)


@pytest.mark.parametrize("seqlen_q", [1, 300])
def test_graphs(cupy, seqlen_q):
    """The table and the lengths may change between replays, as a cache grows."""
    sizes = SIZES | {"seqlen_q": seqlen_q, "head_dim": 64, "dtype": "float16", "causal": True, "page_size": 64}
    case, other = ct.Case(**sizes), ct.Case(**sizes | {"kv_lengths": (1, 1000, 2010)}, seed=1)
    arrays, changed = case.arrays(cupy.asarray), other.arrays()
    rows = min(len(arrays["k"]), len(changed["k"]))
    attn = cuflash.FlashAttention(causal=True)
    inputs, optional = ct.qkv(arrays), ct.optional(arrays)
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        attn.compile(*inputs, **optional)
        stream.begin_capture()
        out, lse = attn.forward(*inputs, **optional)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
        ct.assert_forward(case, out, lse)
        assert changed["block_table"].max() < rows
        for name in ("q", "kv_lengths", "block_table"):
            arrays[name].set(changed[name])
        for name in "kv":
            arrays[name][:rows].set(changed[name][:rows])
        graph.launch()
        stream.synchronize()
        ct.assert_forward(other, out, lse)


def test_plans(cupy):
    case = ct.Case(**SIZES, seqlen_q=1, head_dim=64, dtype="float16", page_size=64)
    arrays = case.arrays(cupy.asarray)
    plans = plans_of(cuflash.FlashAttention(), *ct.qkv(arrays), **ct.optional(arrays))
    assert plans.backward is None
    assert "pages64" in plans.describe(
        verbose=True, width=0
    ) and "no backward pass with a block_table" in plans.describe(verbose=True, width=0)


def test_backward_is_refused(cupy):
    case = ct.Case(**SIZES, seqlen_q=1, head_dim=64, dtype="float16", page_size=64)
    arrays = case.arrays(cupy.asarray)
    out, lse = run(cupy, case)
    with pytest.raises(NotImplementedError, match=r"^block_table: .*gather the pages"):
        inputs = ct.qkv(arrays)
        cuflash.FlashAttention().backward(out, *inputs, out, lse, **ct.optional(arrays))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_tangents_are_those_of_the_cpu(cupy, dtype):
    case = ct.Case(**SIZES, seqlen_q=70, head_dim=64, dtype=dtype, page_size=64, causal=True, sinks=True)
    arrays, random = case.arrays(), np.random.default_rng(0)
    given = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
    given |= {
        f"t{x}": random.standard_normal(arrays[x].shape).astype(arrays[x].dtype) for x in ("q", "k", "v", "sinks")
    }
    attn = cuflash.FlashAttention(causal=True)
    expected = attn.jvp(**given)
    found = attn.jvp(**{name: cupy.asarray(x) for name, x in given.items()})
    bound = {"bfloat16": 4e-2, "float32": 1e-4, "float64": 1e-11}[dtype]
    for got, x in zip(found, expected, strict=True):
        wide = x.astype(float)
        np.testing.assert_allclose(ct.to_numpy(got).astype(float), wide, rtol=bound, atol=bound * np.abs(wide).max())
