"""The public interface on CuPy arrays: errors, streams, devices, graphs, huge strides, other libraries' device arrays.

The mistakes of other libraries in `tests/pure/test_peer_bugs.py` are tested here once more, on the device.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.spec.scalars import array_of
from tests.pure import test_peer_bugs as peer_bugs

pytestmark = pytest.mark.gpu

DIM = 64


@pytest.fixture(params=["float16", "bfloat16"])
def where(cupy, request):
    return peer_bugs.Where(request.param, cupy.asarray)


ON_THE_HOST_ONLY = {"test_heads_beyond_the_third_dimension_of_a_grid", "test_strides_beyond_32_bits_wrap_around"}
for _name, _test in vars(peer_bugs).items():
    if _name.startswith("test_") and _name not in ON_THE_HOST_ONLY:
        globals()[_name] = _test


def normal(cupy, *shape, seed=0, dtype="float16"):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return cupy.asarray(values.astype(ct.numpy_dtype(dtype)))


def host(x):
    return ct.to_numpy(x).astype(np.float64)


def formula(q, k, v):
    """out and lse of float64 NumPy arrays, all heads at once."""
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total @ v, (top + np.log(total))[..., 0]


def assert_close(got, expected, atol=2**-9):
    np.testing.assert_allclose(host(got), expected, rtol=0, atol=atol * max(1, np.abs(expected).max()))


# ---- results and errors ----------------------------------------------------------------------------------------------


def test_results_have_names_and_given_ones_come_back(cupy):
    q, k, v = (normal(cupy, 2, 4, 65, DIM, seed=n) for n in range(3))
    attn = cuflash.FlashAttention(causal=True)
    result = attn.forward(q, k, v)
    assert isinstance(result, cuflash.ForwardResult)
    assert (result.out.shape, result.lse.shape) == (q.shape, q.shape[:3])
    assert (result.out.dtype, result.lse.dtype) == (np.float16, np.float32)
    given_results = {name: cupy.empty_like(x) for name, x in result._asdict().items()}
    again = attn.forward(q, k, v, **given_results)
    assert again.out is given_results["out"]
    assert again.lse is given_results["lse"]
    gradients = attn.backward(q, q, k, v, *result)
    assert isinstance(gradients, cuflash.Gradients)
    given_gradients = {name: cupy.empty_like(x) for name, x in gradients._asdict().items()}
    gradients = attn.backward(q, q, k, v, *result, **given_gradients)
    assert all(x is y for x, y in zip(gradients, given_gradients.values(), strict=True))
    out = cupy.empty_like(q)
    assert cuflash.attention(q, k, v, causal=True, out=out) is out


def test_scalars_stand_for_arrays_without_axes(cupy):
    """Also bfloat16, with which an array is filled by its bits; and in a graph, which keeps the number."""
    q = normal(cupy, 2, 4, 65, DIM, dtype="bfloat16")
    attn = cuflash.FlashAttention(
        score=lambda s, i, j, *, gamma, shift, far: s - gamma * cuflash.abs(i - j) + shift * far
    )
    scalars = {"gamma": 0.25, "shift": ct.numpy_dtype("bfloat16").type(0.5), "far": 3}
    arrays = {name: cupy.asarray(array_of(name, x, "bfloat16").reshape(1))[0] for name, x in scalars.items()}
    need = ("dq", "dgamma", "dshift")
    found = []
    for optional in (scalars, arrays):
        out, lse = attn.forward(q, q, q, **optional)
        found.append((out, lse, *attn.backward(out, q, q, q, out, lse, need=need, **optional)))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(host(x), host(y))
    assert [x.shape for x in found[0][3:]] == [(), ()] and found[0][4].dtype == q.dtype
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        attn.compile(q, q, q, **scalars, need=need)
        stream.begin_capture()
        out = attn.forward(q, q, q, **scalars).out
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
        np.testing.assert_array_equal(host(out), host(found[0][0]))


def test_integers_of_64_bits_are_taken(cupy):
    q, starts = normal(cupy, 4, 65, DIM), cupy.asarray([0, 20, 65])
    attn = cuflash.FlashAttention(causal=True)
    found = [attn.forward(q, q, q, cu_seqlens_q=x, cu_seqlens_k=x).out for x in (starts, starts.astype(np.int32))]
    np.testing.assert_array_equal(*map(host, found))
    pools, table = normal(cupy, 8, 4, 16, DIM), cupy.asarray([[5, 2, 7], [1, 0, 3]])
    optional = {"kv_lengths": cupy.asarray([40, 33]), "causal": True}
    queries = normal(cupy, 2, 4, 3, DIM)
    found = [
        cuflash.attention(queries, pools, pools, block_table=x, **optional) for x in (table, table.astype(np.int32))
    ]
    np.testing.assert_array_equal(*map(host, found))


def test_results_of_any_strides(cupy):
    q, k, v = (normal(cupy, 2, 4, 65, DIM, seed=n) for n in range(3))
    attn = cuflash.FlashAttention()
    expected = attn.forward(q, k, v)
    gradients = attn.backward(q, q, k, v, *expected)

    def scattered(x):
        return cupy.zeros([3 * n for n in x.shape], x.dtype)[(slice(None, None, -3),) * x.ndim]

    out, lse = attn.forward(q, k, v, out=scattered(expected.out), lse=scattered(expected.lse))
    assert_close(out, host(expected.out), atol=2**-11)
    assert_close(lse, host(expected.lse), atol=1e-6)
    given_gradients = {name: scattered(x) for name, x in gradients._asdict().items()}
    for got, right in zip(attn.backward(q, q, k, v, out, lse, **given_gradients), gradients, strict=True):
        assert_close(got, host(right))


def test_results_inside_one_packed_array(cupy):
    packed = normal(cupy, 2, 65, 3, 4, DIM)
    gradients = cupy.zeros_like(packed)
    q, k, v = (packed[:, :, n] for n in range(3))
    attn = cuflash.FlashAttention(layout="bshd", deterministic=True)
    out, lse = attn.forward(q, k, v)
    attn.backward(out, q, k, v, out, lse, dq=gradients[:, :, 0], dk=gradients[:, :, 1], dv=gradients[:, :, 2])
    for n, x in enumerate(attn.backward(out, q, k, v, out, lse)):
        np.testing.assert_array_equal(host(gradients[:, :, n]), host(x))


BAD = {
    "head_dim": (NotImplementedError, "q: got .*1200, expected at most 1024", lambda x: 3 * [x.repeat(4, 1)]),
    "head_dim_v": (NotImplementedError, "v: got .*1200, expected at most 1024", lambda x: [x, x, x.repeat(4, 1)]),
    "integers": (TypeError, "q: got dtype int32", lambda x: 3 * [x.astype("i4")]),
    "dtypes": (TypeError, "k: got dtype float32, expected float16 as q has", lambda x: [x, x.astype("f4"), x]),
    "shapes": (ValueError, "v: got seqlen_k 5, expected seqlen_k 300 as k has", lambda x: [x, x, x[:5]]),
    "axes": (ValueError, "q: got 1-D shape", lambda x: [x[0], x, x]),
    "host": (TypeError, "k: got numpy.ndarray, expected an array of cupy", lambda x: [x, x.get(), x]),
    "lists": (TypeError, "v: got list, expected", lambda x: [x, x, [1]]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs(cupy, name):
    error, words, make = BAD[name]
    with pytest.raises(error, match=f"^{words}"):
        cuflash.attention(*make(normal(cupy, 300, 300)))


@pytest.mark.parametrize(
    ("name", "make", "error", "words"),
    [
        ("out", lambda q, out: out[:5], ValueError, r"shape \(5, 64\), expected \(65, 64\)"),
        ("out", lambda q, out: out.astype("f4"), TypeError, "dtype float32, expected float16"),
        ("out", lambda q, out: q, ValueError, "memory"),
        ("out", lambda q, out: q[::-1], ValueError, "memory"),
        ("lse", lambda q, out: out[:, 0], TypeError, "dtype float16, expected float32"),
    ],
)
def test_bad_results(cupy, name, make, error, words):
    q, k, out = (normal(cupy, 65, DIM, seed=n) for n in range(3))
    with pytest.raises(error, match=f"^{name}: got {words}"):
        cuflash.FlashAttention().forward(q, k, k, **{name: make(q, out)})


def test_a_result_whose_elements_share_memory_is_refused(cupy):
    q = normal(cupy, 65, DIM)
    with pytest.raises(ValueError, match=r"^out: got"):
        cuflash.attention(q, q, q, out=cupy.broadcast_to(cupy.zeros(DIM, q.dtype), q.shape))


def test_plan_says_what_runs(cupy):
    q = normal(cupy, 2, 4, 65, DIM)
    plans = cuflash.FlashAttention(causal=True).plan(q, q, q)
    text = plans.describe(verbose=True, width=0)
    for words in ("forward", "backward", "kernel", "registers", "shared memory"):
        assert words in text


# ---- streams, devices, graphs ----------------------------------------------------------------------------------------


def test_runs_on_the_current_stream_and_does_not_wait(cupy):
    """q is written late on a stream of its own: who launches elsewhere reads NaN, who waits takes long."""
    q, k, v = (normal(cupy, 2, 4, 129, DIM, seed=n) for n in range(3))
    attn = cuflash.FlashAttention(causal=True)
    expected = attn.forward(q, k, v)
    expected_gradients = attn.backward(q, q, k, v, *expected)
    late = cupy.full_like(q, np.nan)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attn.compile(q, k, v)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.launch_host_func(lambda seconds: time.sleep(seconds), 0.5)
        late[...] = q
        start = time.perf_counter()
        result = attn.forward(late, k, v)
        gradients = attn.backward(late, late, k, v, *result)
        seconds = time.perf_counter() - start
        assert not stream.done
        stream.synchronize()
    assert seconds < 0.25
    for got, right in zip(result, expected, strict=True):
        np.testing.assert_array_equal(host(got), host(right))
    for got, right in zip(gradients, expected_gradients, strict=True):
        assert_close(got, host(right))


def second_device(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one CUDA device only")
    return cupy.cuda.Device(1)


def test_runs_on_the_device_of_the_arrays(cupy):
    with second_device(cupy):
        q, k, v = (normal(cupy, 2, 4, 129, DIM, seed=n) for n in range(3))
    attn = cuflash.FlashAttention()
    assert cupy.cuda.Device().id == 0
    out, lse = attn.forward(q, k, v)
    gradients = attn.backward(out, q, k, v, out, lse)
    assert cupy.cuda.Device().id == 0
    assert {x.device.id for x in (out, lse, *gradients)} == {1}
    right, right_lse = formula(*map(host, (q, k, v)))
    assert_close(out, right)
    assert_close(lse, right_lse, atol=1e-5)


@pytest.mark.parametrize("binds", [False, True])
def test_a_thread_without_a_context(cupy, binds):
    """Its results have memory of CuPy's pool, which asks CUDA for none; tensor maps of new addresses are made in it."""
    first, second = ([normal(cupy, 2, 4, 129, DIM, seed=10 * m + n) for n in range(3)] for m in range(2))
    attn = cuflash.FlashAttention()
    call: Any = attn.bind(*first) if binds else attn.forward
    expected = [host(x) for x in attn.forward(*second)[:2]]
    for warm in (call, attn.forward):
        warm(*first)
    copies = [x.copy() for x in second]
    cupy.cuda.get_current_stream().synchronize()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(call, *copies).result()
    cupy.cuda.get_current_stream().synchronize()
    for x, own in zip(found[:2], expected, strict=True):
        np.testing.assert_array_equal(host(x), own)


def test_arrays_on_two_devices_are_refused(cupy):
    q = normal(cupy, 65, DIM)
    with second_device(cupy):
        k = normal(cupy, 65, DIM)
    with pytest.raises(ValueError, match=r"^k: got .*device 1, expected .*device 0"):
        cuflash.attention(q, k, k)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_graph_replays_on_new_contents(cupy, deterministic):
    old, new = ([normal(cupy, 2, 4, 129, DIM, seed=10 * m + n) for n in range(4)] for m in range(2))
    attn = cuflash.FlashAttention(causal=True, deterministic=deterministic)

    def both_passes(q, k, v, dout):
        out, lse = attn.forward(q, k, v)
        return (out, lse), attn.backward(dout, q, k, v, out, lse)

    expected, expected_gradients = both_passes(*new)
    inputs = [x.copy() for x in old]
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()  # what the score_args calls take from it stays theirs
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        attn.compile(*inputs[:3])
        stream.begin_capture()
        result, gradients = both_passes(*inputs)
        graph = stream.end_capture()
        for x, y in zip(inputs, new, strict=True):
            x[...] = y
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        for got, right in zip(result, expected, strict=True):
            np.testing.assert_array_equal(host(got), host(right))
        for got, right in zip(gradients, expected_gradients, strict=True):
            assert_close(got, host(right), atol=0 if deterministic else 2**-9)
        stream.synchronize()


def test_a_captured_graph_of_several_arrays(cupy):
    """Every score_args call keeps the addresses that it was given."""
    attn = cuflash.FlashAttention(causal=True)
    inputs = [[normal(cupy, 2, 4, 129, DIM, seed=10 * m + n) for n in range(3)] for m in range(3)]
    results = [cupy.full_like(q, np.nan) for q, _, _ in inputs]
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        attn.compile(*inputs[0])
        stream.begin_capture()
        for arrays, out in zip(inputs, results, strict=True):
            attn.forward(*arrays, out=out)
        graph = stream.end_capture()
        for m, arrays in enumerate(inputs):
            for n, x in enumerate(arrays):
                x[...] = normal(cupy, 2, 4, 129, DIM, seed=100 + 10 * m + n)
        graph.launch(stream)
        stream.synchronize()
        for arrays, out in zip(inputs, results, strict=True):
            np.testing.assert_array_equal(host(out), host(attn.forward(*arrays).out))
        stream.synchronize()


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "heads"), [(1, 140_000), (70_000, 2)])
def test_more_heads_and_batch_entries_than_a_grid_has_blocks_along_y(cupy, batch, heads):
    q, k, v, dout = (normal(cupy, batch, heads, 2, DIM, seed=n) for n in range(4))
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, k, v)
    gradients = attn.backward(dout, q, k, v, out, lse)
    flat = np.array([0, 1, 65_534, 65_535, 65_536, 131_071, 131_072, batch * heads - 1])
    at = tuple(map(cupy.asarray, np.unravel_index(flat, (batch, heads))))
    sample = q[at], k[at], v[at]
    right, right_lse = formula(*map(host, sample))
    assert_close(out[at], right)
    assert_close(lse[at], right_lse, atol=1e-5)
    alone = attn.backward(dout[at], *sample, out[at], lse[at])
    for got, expected in zip(gradients, alone, strict=True):
        assert_close(got[at], host(expected))
    assert not cupy.isnan(out).any()


@pytest.mark.parametrize("axis", ["rows", "heads", "batch"])
def test_offsets_beyond_32_bits(cupy, axis):
    """All arrays of a call lie side by side in one allocation, in which steps along one axis are huge."""
    shape = {"rows": (1, 2, 70, DIM), "heads": (1, 3, 70, DIM), "batch": (3, 1, 70, DIM)}[axis]
    huge = {"rows": 2**26, "heads": 2**31 + 8, "batch": 2**31 + 8}[axis]
    batch, heads, seqlen, _ = shape
    block = batch * heads * seqlen * DIM if axis != "rows" else heads * DIM
    strides = {"rows": (0, DIM, huge, 1), "heads": (0, huge, DIM, 1), "batch": (huge, 0, DIM, 1)}[axis]
    names = ["q", "k", "v", "dout", "out", "dq", "dk", "dv"]
    steps = {"rows": seqlen, "heads": heads, "batch": batch}[axis] - 1
    elements = steps * huge + (len(names) + 1) * block
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 2 * elements + 2**30:
        pytest.skip(f"{2 * elements / 2**30:.0f} GiB of device memory wanted, {free / 2**30:.0f} free")
    memory = cupy.cuda.Memory(2 * elements)  # not of the pool: it goes back at once
    pointer = cupy.cuda.MemoryPointer(memory, 0)

    def view(n):
        return cupy.ndarray(shape, np.float16, pointer + 2 * n * block, strides=tuple(2 * s for s in strides))

    far = {name: view(n) for n, name in enumerate(names)}
    near = {name: normal(cupy, *shape, seed=n) for n, name in enumerate(names[:4])}
    for name, x in near.items():
        far[name][...] = x
    attn = cuflash.FlashAttention(deterministic=True)
    expected = attn.forward(near["q"], near["k"], near["v"])
    out, lse = attn.forward(far["q"], far["k"], far["v"], out=far["out"])
    assert_close(out, host(expected.out), atol=2**-11)
    assert_close(lse, host(expected.lse), atol=1e-6)
    gradients = attn.backward(near["dout"], near["q"], near["k"], near["v"], *expected)
    results = {name: far[name] for name in ("dq", "dk", "dv")}
    got = attn.backward(far["dout"], far["q"], far["k"], far["v"], out, lse, **results)
    for x, right in zip(got, gradients, strict=True):
        assert_close(x, host(right))


def test_memory_is_linear_in_the_sequence_length(cupy):
    """The scores of this problem would take 64 GiB."""
    q = normal(cupy, 1, 131_072, DIM)
    attn = cuflash.FlashAttention(causal=True)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        out, lse = attn.forward(q, q, q)
        attn.backward(q, q, q, q, out, lse)
        assert pool.total_bytes() < 12 * q.nbytes
        del out, lse


# ---- other libraries' arrays -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device")
    return torch


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_tensors_give_torch_tensors(torch, dtype):
    q, k, v, dout = (torch.randn(2, 4, 129, DIM, device="cuda").to(getattr(torch, dtype)) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in leaves), is_causal=True)
    expected.backward(dout.float())
    attn = cuflash.FlashAttention(causal=True)
    result = attn.forward(q, k, v)
    gradients = attn.backward(dout, q, k, v, *result)
    assert {type(x) for x in (*result, *gradients)} == {torch.Tensor}
    assert {x.device.type for x in (*result, *gradients)} == {"cuda"}
    assert {x.dtype for x in (result.out, *gradients)} == {q.dtype}
    for got, right in zip((result.out, *gradients), (expected, *(x.grad for x in leaves)), strict=True):
        torch.testing.assert_close(got.float(), right.float(), atol=3e-2, rtol=3e-2)
    mask = torch.ones(129, 129, dtype=torch.bool, device="cuda").tril()
    torch.testing.assert_close(cuflash.attention(q, k, v, mask=mask), result.out, atol=1e-2, rtol=1e-2)


def test_torch_streams_and_cupy_streams_wait_for_each_other(cupy, torch):
    """Tensors are written late on a stream of PyTorch and read there at once; cuflash runs on a stream of CuPy."""
    q, k, v = (torch.randn(2, 4, 129, DIM, device="cuda", dtype=torch.float16) for _ in range(3))
    attn = cuflash.FlashAttention()
    expected = attn.forward(q, k, v).out
    torch.cuda.synchronize()
    for give_result in (False, True):
        torch_stream, cupy_stream = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
        with torch.cuda.stream(torch_stream), cupy_stream:
            late, out = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
            torch.cuda._sleep(200_000_000)  # clock cycles: a tenth of a second
            late.copy_(q)
            got = attn.forward(late, k, v, out=out if give_result else None).out
            assert (got is out) == give_result
            copied = got.clone()
        torch.cuda.synchronize()
        torch.testing.assert_close(copied, expected)


def test_torch_results_are_written_in_place(torch):
    q, k, v = (torch.randn(2, 4, 65, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.full_like(q, torch.nan)
    assert cuflash.attention(q, k, v, out=out) is out
    torch.testing.assert_close(out, cuflash.attention(q, k, v))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.requires_grad_(), r"k: got torch\.Tensor .*, expected .*k\.detach\(\)"),
        (lambda x: x.cpu(), r"k: got an array in host memory, expected one in CUDA memory as q is"),
        (lambda x: x.cpu().numpy(), r"k: got numpy\.ndarray, expected an array of torch as q is"),
    ],
)
def test_torch_tensors_that_do_not_go_together(torch, change, words):
    q, k = (torch.randn(65, DIM, device="cuda", dtype=torch.float16) for _ in range(2))
    with pytest.raises(TypeError, match=f"^{words}"):
        cuflash.attention(q, change(k), q)


def test_torch_and_cupy_do_not_mix(cupy, torch):
    q = torch.randn(65, DIM, device="cuda", dtype=torch.float16)
    with pytest.raises(TypeError, match=r"^v: got cupy\.ndarray, expected an array of torch as q is"):
        cuflash.attention(q, q, normal(cupy, 65, DIM))
