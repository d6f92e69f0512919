"""Packed sequences on the device: against the oracle, alone or packed, whatever lies around them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.spec.passes import BACKWARD
from tests.gpu.planned import plan_of

pytestmark = pytest.mark.gpu

LENGTHS_Q, LENGTHS_K = (300, 0, 65, 1, 128, 513), (300, 40, 129, 70, 0, 600)
OPTIONS = [
    {},
    {"causal": True},
    {"causal": "top_left", "layout": "bshd", "dlse": True},
    {"window": (100, 30), "softcap": 5.0},
    {"causal": True, "alibi_slopes": (6, 4), "sinks": True, "dlse": True},
    {"dropout": 0.3, "layout": "bshd"},
]


def starts_of(lengths):
    return tuple(np.cumsum([0, *lengths]).tolist())


def case_of(**options):
    """Some rows are left after the last sequence."""
    starts_q, starts_k = starts_of(LENGTHS_Q), starts_of(LENGTHS_K)
    sizes: dict[str, Any] = {"num_heads": 4, "num_heads_kv": 2, "head_dim": 64, "dtype": "bfloat16"} | options
    return ct.Case(
        seqlen_q=starts_q[-1] + 30, seqlen_k=starts_k[-1] + 77, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **sizes
    )


def run(cupy, case, *, deterministic=False, arrays=None, starts=None, need=None):
    """Results by name."""
    arrays = case.arrays(cupy.asarray) if arrays is None else arrays
    arrays = arrays | ({} if starts is None else starts)
    attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
    inputs = ct.qkv(arrays)
    out, lse = attn.forward(*inputs, **ct.optional(arrays) | case.random)
    need = need or ("dq", "dk", "dv", *(("dsinks",) if case.sinks else ()))
    optional = ct.optional_backward(arrays) | case.random
    gradients = attn.backward(arrays["dout"], *inputs, out, lse, **optional, need=need)
    return {"out": out, "lse": lse} | gradients._asdict()


def judge(case, results):
    results = dict(results)
    ct.assert_forward(case, results.pop("out"), results.pop("lse"))
    ct.assert_backward(case, **results)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_oracle(cupy, dtype, options, deterministic):
    case = case_of(dtype=dtype, **options)
    judge(case, run(cupy, case, deterministic=deterministic, need=ct.gradients_of(case.problem)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [24, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_head_dims(cupy, dtype, head_dim, causal):
    for deterministic in (False, True):
        case = case_of(dtype=dtype, head_dim=head_dim, causal=causal)
        judge(case, run(cupy, case, deterministic=deterministic))


# Warps look at 32 sequences at once, the rows after the last one among them.
MANY = {
    "31": tuple(i * 37 % 90 for i in range(31)),
    "32": tuple(i * 37 % 90 for i in range(32)),
    "100 with a long one": (*(i % 40 for i in range(60)), 1500, *(i * 53 % 130 for i in range(39))),
    "1100": (*(i % 3 for i in range(1000)), 300, *(0,) * 99),
    "empty": (0,) * 70,
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 30), "num_heads": 20}], ids=str)
@pytest.mark.parametrize("name", MANY)
def test_many_sequences(cupy, name, options, deterministic):
    starts = starts_of(MANY[name])
    if name == "1100":  # the oracle goes over heads and sequences one by one
        options = options | {"num_heads": 2, "num_heads_kv": 1}
    rows = {"seqlen_q": starts[-1] + 30, "seqlen_k": starts[-1] + 30, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    case = replace(case_of(**options), batch=len(MANY[name]), **rows)
    judge(case, run(cupy, case, deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_accumulators_that_blocks_clear(cupy, head_dim, causal, deterministic):
    case = case_of(num_heads=100, num_heads_kv=100, head_dim=head_dim, causal=causal)
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
    plan = plan_of(BACKWARD, attn, *ct.qkv(arrays), **ct.optional(arrays))
    assert (plan.run_time.clear_ahead > 0) == (plan.device.arch == 90)
    cupy.full(plan.extra_bytes // 4, cupy.nan, "float32")  # and so scratch memory holds NaN
    judge(case, run(cupy, case, deterministic=deterministic, arrays=arrays))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_equal_lengths_are_a_batch(cupy, head_dim, causal):
    """Bit for bit, where dq is summed in a fixed order; and so is a batch of one."""
    batch, heads, seqlen = 5, 8, 1000
    shape = (batch, seqlen, heads, head_dim)
    q, k, v, dout = (cupy.random.standard_normal((4, *shape)) / 2).astype(np.float16)
    attn = cuflash.FlashAttention(causal=causal, layout="bshd", deterministic=True)
    out, lse = attn.forward(q, k, v)
    gradients = attn.backward(dout, q, k, v, out, lse)
    starts = cupy.arange(batch + 1, dtype=np.int32) * seqlen
    flat_dout, flat_q, flat_k, flat_v = (x.reshape(batch * seqlen, heads, head_dim) for x in (dout, q, k, v))
    optional = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    packed_out, packed_lse = attn.forward(flat_q, flat_k, flat_v, **optional)
    packed_gradients = attn.backward(flat_dout, flat_q, flat_k, flat_v, packed_out, packed_lse, **optional)
    for x, y in zip((out, *gradients), (packed_out, *packed_gradients), strict=True):
        assert cupy.array_equal(x.reshape(y.shape), y)
    assert cupy.array_equal(lse.swapaxes(0, 1).reshape(packed_lse.shape), packed_lse)
    alone = attn.backward(*(x[2:3] for x in (dout, q, k, v, out, lse)))
    for x, y in zip(gradients, alone, strict=True):
        assert cupy.array_equal(x[2:3], y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_neighbours_change_nothing(cupy, head_dim, causal):
    """Not a bit, though they are NaN."""
    case = case_of(head_dim=head_dim, causal=causal, dtype="float16")
    clean = case.arrays(cupy.asarray)
    before = run(cupy, case, deterministic=True, arrays=clean)
    for at in range(len(LENGTHS_Q)):
        of_rows, of_keys = (slice(*starts[at : at + 2]) for starts in (case.cu_seqlens_q, case.cu_seqlens_k))
        poisoned = dict(clean)
        for name in ("q", "k", "v", "dout"):
            own = of_keys if name in "kv" else of_rows
            poisoned[name] = cupy.full_like(clean[name], np.nan)
            poisoned[name][:, own] = clean[name][:, own]
        after = run(cupy, case, deterministic=True, arrays=poisoned)
        for name, x in before.items():
            own = of_keys if name in ("dk", "dv") else of_rows
            assert cupy.array_equal(after[name][:, own], x[:, own]), (name, at)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wild_starts_end(cupy, dtype, causal, deterministic):
    """Starts that decrease, or that are outside: results are undefined, and a later call is as right as before."""
    case = replace(case_of(dtype=dtype, causal=causal), alibi_slopes=None)
    for wild in ([0, 500, 3, 900, 2**31 - 1, -5, 80], [-7, 1, 2, 3, 4, 5, 2**30], [900, 700, 500, 300, 100, 50, 0]):
        starts = {name: cupy.asarray(wild, np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        run(cupy, case, deterministic=deterministic, starts=starts)
    judge(case, run(cupy, case, deterministic=deterministic))


def test_no_sequences_and_no_rows(cupy):
    q = cupy.ones((2, 40, 64), np.float16)
    none = cupy.zeros(1, np.int32)
    out, lse = cuflash.FlashAttention().forward(q, q, q, cu_seqlens_q=none, cu_seqlens_k=none)
    assert not out.any()
    assert cupy.isneginf(lse).all()
    empty = q[:, :0]
    out, lse = cuflash.FlashAttention().forward(empty, empty, empty, cu_seqlens_q=none, cu_seqlens_k=none)
    assert out.shape == (2, 0, 64)


def test_graph(cupy):
    """Other lengths of the same total go through a captured graph: nothing of them is on the host."""
    case = case_of(causal=True)
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(causal=True)
    inputs, starts = ct.qkv(arrays), ct.optional(arrays)
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        attn.compile(*inputs, **starts)
        stream.begin_capture()
        out, lse = attn.forward(*inputs, **starts)
        graph = stream.end_capture()
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            starts[name][...] = cupy.asarray([0, 100, 200, 300, 400, 500, 600])
        graph.launch()
        stream.synchronize()
    expected, expected_lse = attn.forward(*inputs, **starts)
    assert cupy.array_equal(out, expected)
    assert cupy.array_equal(lse, expected_lse)
