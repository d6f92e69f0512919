"""Forward on the device against the oracle, and what must hold whatever the numbers are."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.spec.passes import FORWARD
from cuflash.spec.problem import make_problem
from tests import bias_terms, wide_heads
from tests.gpu.planned import is_sm90, plan_of
from tests.sampling import examples

pytestmark = pytest.mark.gpu

DIM = 64


def arrays_of(cupy, case):
    """q, k, v and the keyword arguments of a case."""
    arrays = case.arrays(cupy.asarray)
    return ct.qkv(arrays), ct.optional(arrays)


def full_of_nan(cupy, x):
    return cupy.asarray(np.full(x.shape, np.nan, x.dtype))


@pytest.mark.one_in(1)
@settings(max_examples=examples(100))
@given(data=st.data())
def test_oracle(cupy, specialisation, data):
    case = data.draw(specialisation.cases())
    qkv, optional = arrays_of(cupy, case)
    attn = cuflash.FlashAttention(**case.keywords)
    out, lse = attn.forward(*qkv, **optional)
    assert type(out) is type(lse) is cupy.ndarray
    ct.assert_forward(case, out, lse)
    again = attn.forward(*qkv, **optional, out=full_of_nan(cupy, out), lse=full_of_nan(cupy, lse))
    for x, y in zip((out, lse), again, strict=True):
        assert same_bits(x, y)


def same_bits(x, y):
    """Equal down to the sign of zero and the payload of NaN."""
    x, y = np.ascontiguousarray(ct.to_numpy(x)), np.ascontiguousarray(ct.to_numpy(y))
    return x.tobytes() == y.tobytes()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 1000.0}], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_that_rise_from_tile_to_tile(cupy, head_dim, dtype, options):
    """The first keys are the most alike to the even queries, the last ones to the odd: each order of tiles meets both.

    What was summed of the tiles before is nothing against the next one: maxima have to follow.
    """
    case = ct.Case(seqlen_q=200, seqlen_k=700, head_dim=head_dim, dtype=dtype, scale=1.0, score_spread=0.5, **options)
    arrays = case.arrays()
    arrays["q"][..., 0] = np.where(np.arange(200) % 2, -1, 1)
    arrays["k"][..., 0] = np.round(np.linspace(100, -100, 700))
    problem = make_problem(case.options, *ct.qkv(arrays))
    yardsticks = ct.yardsticks(problem, arrays)
    given = [cupy.asarray(arrays[name]) for name in "qkv"]
    out, lse = cuflash.FlashAttention(**case.keywords).forward(*given)
    for name, result in (("out", out), ("lse", lse)):
        assert ct.measure(name, ct.to_numpy(result), yardsticks[name]).failure is None


# ---- the kernels of compute capability 9.0 ---------------------------------------------------------------------------


def off_by_one(cupy, x):
    """The array one element past an address that is aligned."""
    inside = cupy.empty(x.size + 1, x.dtype)[1:].reshape(x.shape)
    inside[...] = x
    return inside


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_the_kernel_of_all_devices(cupy, head_dim, causal):
    """It takes arrays that TMA cannot, and is as right as the one that the aligned arrays get."""
    sizes: dict[str, Any] = {"seqlen_q": 300, "seqlen_k": 2100, "num_heads": 4, "num_heads_kv": 2}
    case = ct.Case(**sizes, head_dim=head_dim, dtype="bfloat16", causal=causal)
    qkv, _ = arrays_of(cupy, case)
    attn = cuflash.FlashAttention(causal=causal)
    for arrays, own in ((qkv, is_sm90()), ([off_by_one(cupy, x) for x in qkv], False)):
        (kernel,) = plan_of(FORWARD, attn, *arrays).kernels
        assert kernel.source == ("sm90/forward.cu" if own else "sm80/forward.cu")
        ct.assert_forward(case, *attn.forward(*arrays))


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"kv_lengths": (200, 2100)},
        {"causal": "lengths", "kv_lengths": (200, 2100)},
        {"softcap": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
@pytest.mark.parametrize("seqlen_q", [30, 700])
def test_both_kernels_of_float32(cupy, seqlen_q, head_dim, options):
    """Few queries are not worth splitting all keys into bf16 terms; any strides and alignment are."""
    sizes: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_k": 2100, "batch": 2, "num_heads": 4, "num_heads_kv": 2}
    case = ct.Case(**sizes, head_dim=head_dim, dtype="float32", **options)
    qkv, optional = arrays_of(cupy, case)
    attn = cuflash.FlashAttention(**case.keywords)
    many = ["helpers/split_fp32.cu", "sm90/forward_fp32.cu"] if is_sm90() else ["sm80/forward.cu"]
    for arrays in (qkv, [off_by_one(cupy, x) for x in qkv]):
        sources = [kernel.source for kernel in plan_of(FORWARD, attn, *arrays, **optional).kernels]
        assert sources == (many if seqlen_q > 64 else ["sm80/decode.cu", *sources[1:]])
        first, again = (attn.forward(*arrays, **optional) for _ in range(2))
        ct.assert_forward(case, *first)
        assert all(same_bits(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": (2, 1, 1, 700), "bias": (4, 300, 700)}], ids=str)
@pytest.mark.parametrize("head_dim", [7, 20, 32])
def test_float32_that_is_split_as_it_is_loaded(cupy, head_dim, options):
    """Where few tiles of queries read the keys, of any strides and alignment."""
    sizes: dict[str, Any] = {"seqlen_q": 300, "seqlen_k": 700, "batch": 2, "num_heads": 4, "num_heads_kv": 2}
    case = ct.Case(**sizes, head_dim=head_dim, head_dim_v=24, dtype="float32", **options)
    qkv, optional = arrays_of(cupy, case)
    attn = cuflash.FlashAttention(**case.keywords)
    first, shifted = attn.forward(*qkv, **optional), [off_by_one(cupy, x) for x in qkv]
    if is_sm90():
        assert [kernel.source for kernel in plan_of(FORWARD, attn, *shifted, **optional).kernels] == [
            "sm90/forward_fp32.cu"
        ]
    ct.assert_forward(case, *first)
    assert all(same_bits(x, y) for x, y in zip(first, attn.forward(*shifted, **optional), strict=True))


@given(case=bias_terms.cases_of_float32())
@settings(max_examples=examples(200))
def test_what_is_added_to_scores_of_float32(cupy, case):
    """Per-pair biases and of keys, masks of keys and slopes, as the kernels of bf16 terms load them."""
    qkv, optional = arrays_of(cupy, case)
    attn = cuflash.FlashAttention(**case.keywords)
    if is_sm90():
        assert "sm90/forward_fp32.cu" in [kernel.source for kernel in plan_of(FORWARD, attn, *qkv, **optional).kernels]
    first, again = (attn.forward(*qkv, **optional) for _ in range(2))
    ct.assert_forward(case, *first)
    assert all(same_bits(x, y) for x, y in zip(first, again, strict=True))


def test_infinities_and_the_end_of_the_range_of_float32(cupy):
    """bf16 terms of an infinity, of NaN and of the largest numbers come together again."""
    case = ct.Case(seqlen_q=300, seqlen_k=300, head_dim=64, dtype="float32", scale=2.0**-9)
    arrays = case.arrays()
    arrays["k"][...] = np.sign(arrays["k"])
    arrays["v"][0, 0, 5, :3] = np.inf, -np.inf, np.finfo(np.float32).max
    arrays["q"][0, 0, 3, 4] = np.inf
    arrays["q"][0, 0, 4, 4] = np.nan
    problem = make_problem(case.options, *ct.qkv(arrays))
    expected = ct.yardsticks(problem, arrays)
    out, lse = cuflash.FlashAttention(**case.keywords).forward(*(cupy.asarray(arrays[name]) for name in "qkv"))
    for got, right in ((out, expected["out"].expected), (lse, expected["lse"].expected)):
        np.testing.assert_allclose(ct.to_numpy(got).astype(np.float64), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_one_array_that_is_not_aligned(cupy, name):
    case = ct.Case(seqlen_q=150, seqlen_k=170, head_dim=DIM, dtype="float16")
    (q, k, v), _ = arrays_of(cupy, case)
    arrays = {"q": q, "k": k, "v": v, "out": cupy.empty_like(q)}
    arrays[name] = off_by_one(cupy, arrays[name])
    out = arrays.pop("out")
    results = cuflash.FlashAttention().forward(*arrays.values(), out=out)
    assert results.out is out
    ct.assert_forward(case, *results)


@pytest.mark.parametrize("head_dim_v", [64, 61])
def test_rows_further_apart_than_they_are_long(cupy, head_dim_v):
    """Columns that TMA must leave alone are NaN around q, k and v, and stay as they were around out."""
    case = ct.Case(seqlen_q=150, seqlen_k=170, num_heads=2, head_dim=60, head_dim_v=head_dim_v, dtype="bfloat16")
    arrays, _ = arrays_of(cupy, case)

    def spaced(x):
        rows = cupy.asarray(np.full((*x.shape[:-1], 80), np.nan, x.dtype))
        inside = rows[..., 8 : 8 + x.shape[-1]]
        inside[...] = x
        return rows, inside

    (_, q), (_, k), (_, v) = (spaced(x) for x in arrays)
    rows, out = spaced(cupy.zeros((1, 2, 150, head_dim_v), v.dtype))
    attn = cuflash.FlashAttention()
    if head_dim_v == 64:  # the plan takes out as contiguous
        (kernel,) = plan_of(FORWARD, attn, q, k, v).kernels
        assert kernel.source == ("sm90/forward.cu" if is_sm90() else "sm80/forward.cu")
    result = attn.forward(q, k, v, out=out)
    ct.assert_forward(case, *result)
    out[...] = np.nan
    assert np.isnan(ct.to_numpy(rows).astype(np.float32)).all()


def test_every_call_reads_its_own_arrays(cupy):
    """More arrays than a kernel's launch remembers the tensor maps of, and the first ones once more."""
    q = arrays_of(cupy, ct.Case(seqlen_q=65, seqlen_k=65, batch=300, head_dim=DIM, dtype="float16"))[0][0]
    attn = cuflash.FlashAttention()
    whole = attn.forward(q, q, q)
    for n in (*range(300), 0, 1, 299):
        alone = attn.forward(q[n], q[n], q[n])
        assert same_bits(alone.out, whole.out[n])
        assert same_bits(alone.lse, whole.lse[n])


def test_the_same_bits_every_time_and_for_every_neighbour(cupy):
    """A head's bits depend neither on the run nor on the batch around it."""
    case = ct.Case(seqlen_q=300, seqlen_k=500, batch=4, num_heads=6, head_dim=DIM, dtype="bfloat16", causal=True)
    (q, k, v), _ = arrays_of(cupy, case)
    attn = cuflash.FlashAttention(causal=True)
    first = attn.forward(q, k, v)
    for _ in range(20):
        assert all(same_bits(x, y) for x, y in zip(first, attn.forward(q, k, v), strict=True))
    alone = attn.forward(q[2:3, 4:5], k[2:3, 4:5], v[2:3, 4:5])
    assert same_bits(alone.out, first.out[2:3, 4:5])
    assert same_bits(alone.lse, first.lse[2:3, 4:5])


# ---- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen_q", [1, 16])
def test_decoding_again_and_again(cupy, seqlen_q):
    """Blocks end in another order each time."""
    case = ct.Case(seqlen_q=seqlen_q, seqlen_k=20000, num_heads=16, num_heads_kv=4, head_dim=128, dtype="bfloat16")
    qkv, _ = arrays_of(cupy, case)
    attn = cuflash.FlashAttention()
    first = attn.forward(*qkv)
    ct.assert_forward(case, *first)
    for _ in range(300):
        again = attn.forward(*qkv, out=full_of_nan(cupy, first.out), lse=full_of_nan(cupy, first.lse))
        assert same_bits(first.out, again.out)
        assert same_bits(first.lse, again.lse)


def test_decoding_on_several_streams_at_once(cupy):
    """Each call has scratch memory of its own."""
    case = ct.Case(seqlen_q=1, seqlen_k=5000, num_heads=16, num_heads_kv=4, head_dim=128, dtype="bfloat16")
    qkv, _ = arrays_of(cupy, case)
    attn = cuflash.FlashAttention()
    first = attn.forward(*qkv)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.get_current_stream().synchronize()
    results = []
    for _ in range(50):
        for stream in streams:
            with stream:
                results.append(attn.forward(*qkv))
    for stream in streams:
        stream.synchronize()
    for again in results:
        assert same_bits(first.out, again.out)
        assert same_bits(first.lse, again.lse)


@pytest.mark.parametrize("content", [0x00, 0xFF, 0x3F])
def test_decoding_where_memory_held_anything(cupy, content):
    """Blocks count in scratch memory that nothing clears."""
    case = ct.Case(seqlen_q=2, seqlen_k=5000, num_heads=16, num_heads_kv=4, head_dim=128, dtype="bfloat16")
    qkv, _ = arrays_of(cupy, case)
    attn = cuflash.FlashAttention()
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        first = attn.forward(*qkv)
        ct.assert_forward(case, *first)
        for _ in range(20):
            held = [cupy.full(nbytes, content, np.uint8) for nbytes in (512, 2**16, 2**20, 2**22)]
            del held
            again = attn.forward(*qkv)
            assert same_bits(first.out, again.out)
            assert same_bits(first.lse, again.lse)


@pytest.mark.parametrize("num_heads_kv", [1, 4, 16])
def test_decoding_in_captured_graphs(cupy, num_heads_kv):
    """Two graphs of two calls each, replayed while other calls run: each call counts in memory of its own."""
    sizes = {"seqlen_k": 5000, "num_heads": 16, "num_heads_kv": num_heads_kv, "head_dim": 128, "dtype": "bfloat16"}
    cases = [ct.Case(seqlen_q=n, seed=n, **sizes) for n in (1, 2)]
    inputs = [arrays_of(cupy, case)[0] for case in cases]
    attn = cuflash.FlashAttention()
    expected = [attn.forward(*qkv) for qkv in inputs]
    for case, results in zip(cases, expected, strict=True):
        ct.assert_forward(case, *results)
    cupy.cuda.Device().synchronize()
    replays = []
    for _ in range(2):
        stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc), stream:
            for qkv in inputs:
                attn.compile(*qkv)
            stream.begin_capture()
            captured = [attn.forward(*qkv) for qkv in inputs]
            replays.append((stream, stream.end_capture(), captured, pool))
    for _ in range(100):
        for stream, graph, captured, _ in replays:
            with stream:
                for x in itertools.chain(*captured):
                    x[...] = np.nan
                graph.launch(stream)
        eager = [attn.forward(*qkv) for qkv in inputs]
        cupy.cuda.Device().synchronize()
        for run in (eager, *(captured for _, _, captured, _ in replays)):
            for got, right in zip(run, expected, strict=True):
                assert same_bits(got[0], right.out)
                assert same_bits(got[1], right.lse)


def test_decoding_takes_its_own_kernel(cupy):
    """Where there is one, and no other: elsewhere the tests above are about the kernel for all."""
    case = ct.Case(seqlen_q=1, seqlen_k=8192, num_heads=32, num_heads_kv=8, head_dim=128, dtype="float16")
    (q, k, v), _ = arrays_of(cupy, case)
    plan = plan_of(FORWARD, cuflash.FlashAttention(), q, k, v)
    takes_it = [kernel.source for kernel in plan.kernels] == ["sm90/decode.cu"]
    assert takes_it == (plan.device.arch == 90)


# ---- wide heads ------------------------------------------------------------------------------------------------------

# Separate tests, whose kernels are compiled at the same time.
by_dims = pytest.mark.parametrize("head_dim", wide_heads.DIMS)


def check_wide(cupy, case, *own):
    """Right, the same bits again, and by the kernel that is meant for it."""
    qkv, optional = arrays_of(cupy, case)
    attn = cuflash.FlashAttention(**case.keywords)
    source = plan_of(FORWARD, attn, *qkv, **optional).kernels[0].source
    assert source in own or not is_sm90()
    out, lse = attn.forward(*qkv, **optional)
    ct.assert_forward(case, out, lse)
    for _ in range(3):
        assert all(same_bits(x, y) for x, y in zip(attn.forward(*qkv, **optional), (out, lse), strict=True))


@by_dims
def test_wide_heads(cupy, head_dim):
    @settings(max_examples=examples(120))
    @given(wide_heads.cases(longest=1500, dims=(head_dim,)))
    def every_case(case):
        check_wide(cupy, case, "sm90/forward_wide.cu", "sm90/decode_wide.cu")

    every_case()


@by_dims
def test_decode_with_wide_heads(cupy, head_dim):
    @settings(max_examples=examples(120))
    @given(wide_heads.decode_cases(longest=5000, dims=(head_dim,)))
    def every_case(case):
        check_wide(cupy, case, "sm90/decode_wide.cu")

    every_case()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(320, 320), (512, 512), (576, 512), (1024, 768)])
def test_more_tiles_of_wide_heads_than_clusters(cupy, head_dim, head_dim_v, causal):
    sizes: dict[str, Any] = {"seqlen_q": 700, "seqlen_k": 900, "batch": 3, "num_heads": 10, "num_heads_kv": 5}
    case = ct.Case(**sizes, head_dim=head_dim, head_dim_v=head_dim_v, dtype="bfloat16", causal=causal)
    check_wide(cupy, case, "sm90/forward_wide.cu")


# ---- properties ------------------------------------------------------------------------------------------------------


@pytest.fixture
def qkv(cupy):
    case = ct.Case(seqlen_q=150, seqlen_k=260, batch=2, num_heads=4, num_heads_kv=2, head_dim=DIM, dtype="float16")
    return arrays_of(cupy, case)[0]


def assert_close(x, y, ulps=4):
    x, y = (ct.to_numpy(a).astype(np.float64) for a in (x, y))
    np.testing.assert_allclose(x, y, rtol=0, atol=ulps * 2**-10 * max(np.abs(y).max(), 1))


def test_lengths_out_of_range_are_clamped(cupy, qkv):
    q, k, v = qkv
    wild = cuflash.attention(q, k, v, kv_lengths=cupy.asarray([-(2**40), 2**40]))
    tame = cuflash.attention(q, k, v, kv_lengths=cupy.asarray([0, k.shape[2]]))
    assert same_bits(wild, tame)
    assert not wild[0].any()


def test_results_stay_inside_their_array(cupy, qkv):
    """Poison around out and lse is still there afterwards."""
    q, k, v = qkv
    expected = cuflash.FlashAttention().forward(q, k, v)
    frames = [np.full([n + 6 for n in x.shape], 77, x.dtype) for x in expected]
    inside = [tuple(slice(3, n + 3) for n in x.shape) for x in expected]
    frames = [cupy.asarray(frame) for frame in frames]
    out, lse = (frame[index] for frame, index in zip(frames, inside, strict=True))
    cuflash.FlashAttention().forward(q, k, v, out=out, lse=lse)
    for frame, index, right in zip(frames, inside, expected, strict=True):
        assert_close(frame[index], right, ulps=1)
        frame[index] = 77
        assert (frame == 77).all()
