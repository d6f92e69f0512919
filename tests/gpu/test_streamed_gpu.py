"""Streamed keys and values on a device: every way by which they get there, held to the oracle, and device memory."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.spec.outputs import DEFAULT_NEED
from tests import streams
from tests.backends import DEVICE
from tests.ranks import judge
from tests.streams import Streams, pinned_copy, untouched

pytestmark = pytest.mark.gpu
CASES = tuple(streams.CASES[DEVICE].values())
WAYS = ("pinned", "pageable", "memory map", "strided")


def in_host_memory(way, array, path):
    if way == "pinned":
        return pinned_copy(array)
    if way == "memory map":
        found = np.memmap(path, array.dtype, "w+", shape=array.shape)
        found[...] = array
        return found
    if way == "strided":  # the last axis is not contiguous
        return pinned_copy(array.swapaxes(-1, -2)).swapaxes(-1, -2)
    return array


def results_of(case, chunk, way="pinned", path=None, need=None, **options):
    """Results of both passes, of keys and values that lie so in host memory."""
    import cupy

    names = itertools.count()
    on = Streams(cupy.asarray, lambda x: in_host_memory(way, x, f"{path}.{next(names)}"), untouched, cupy.asnumpy)
    return on.results(case, chunk, need=need, **options)


def bfloat16_case(causal):
    """One of which keys take more memory than the device is to have."""
    sizes: dict[str, Any] = {"seqlen_q": 2048, "seqlen_k": 16384, "num_heads": 4, "num_heads_kv": 2, "head_dim": 128}
    return ct.Case(**sizes, dtype="bfloat16", causal=causal)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile what the tests launch, on as many threads as there are cores."""
    calls = [(case, 192, {"deterministic": deterministic}) for case in CASES[:2] for deterministic in (False, True)]
    calls += [(case, 1000, {}) for case in CASES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = [pool.submit(results_of, case, chunk, **options) for case, chunk, options in calls]
        pending += [pool.submit(results_of, bfloat16_case(causal), 2048, need=DEFAULT_NEED) for causal in (False, True)]
        for call in pending:
            call.exception()  # which the tests will meet


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_bits_do_not_depend_on_where_keys_are(case, way, tmp_path):
    expected = results_of(case, 192, deterministic=True)
    judge(case, expected)
    for name, x in results_of(case, 192, way, tmp_path / "keys", deterministic=True).items():
        assert x.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_chunk_is_the_call_in_memory(case):
    import cupy

    arrays = {name: cupy.asarray(x) for name, x in case.arrays().items()}
    attn: Any = cuflash.FlashAttention(**case.keywords)
    expected = attn.forward(*ct.qkv(arrays), **ct.optional(arrays), **case.random)
    found = results_of(case, 1000)
    for name, x in expected._asdict().items():
        assert found[name].tobytes() == cupy.asnumpy(x).tobytes(), name


@pytest.mark.parametrize("way", ["pinned", "pageable"])
@pytest.mark.parametrize("causal", [False, True])
def test_device_memory_is_what_the_plan_says(way, causal):
    import cupy

    case = bfloat16_case(causal)
    arrays = case.arrays()
    k, v = (in_host_memory(way, arrays[name], None) for name in "kv")
    q, dout = (cupy.asarray(arrays[name]) for name in ("q", "dout"))
    keys = cuflash.streamed(k, v, chunk=2048)
    attn: Any = cuflash.FlashAttention(causal=causal)
    plan = attn.plan(q, *keys)
    out, lse = attn.forward(q, *keys)  # kernels are loaded
    attn.backward(dout, q, *keys, out, lse)
    for pass_ in ("forward", "backward"):
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            results = attn.forward(q, *keys) if pass_ == "forward" else attn.backward(dout, q, *keys, out, lse)
            cupy.cuda.get_current_stream().synchronize()
        assert pool.total_bytes() <= plan.device_bytes(pass_), pass_
        assert pool.total_bytes() > 0.8 * plan.device_bytes(pass_), pass_
        del results
    assert plan.device_bytes("forward") < k.nbytes + v.nbytes


def test_results_go_where_the_caller_wants_them(tmp_path):
    case = replace(CASES[0], batch=1)
    import cupy

    arrays = case.arrays()
    k, v = arrays.pop("k"), arrays.pop("v")
    keys = cuflash.streamed(k, v, chunk=256)
    dk, dv = pinned_copy(k), np.memmap(tmp_path / "dv", v.dtype, "w+", shape=v.shape)
    arrays = {name: cupy.asarray(x) for name, x in arrays.items()}
    attn: Any = cuflash.FlashAttention(**case.keywords)
    q, dout = arrays["q"], arrays["dout"]
    out, lse = attn.forward(q, *keys, **ct.optional(arrays))
    dq, *others = attn.backward(dout, q, *keys, out, lse, dk=dk, dv=dv, **ct.optional_backward(arrays))
    assert others[0] is dk
    assert others[1] is dv
    ct.assert_backward(case, dq=cupy.asnumpy(dq), dk=dk, dv=np.asarray(dv))


def test_streams_of_the_caller_are_kept_in_order():
    """Queries that are written late on a stream are read after that, and a result is there for what comes next."""
    import cupy

    case = CASES[0]
    arrays = case.arrays()
    keys = cuflash.streamed(pinned_copy(arrays["k"]), pinned_copy(arrays["v"]), chunk=128)
    attn: Any = cuflash.FlashAttention(**case.keywords)
    q = cupy.asarray(arrays["q"])
    expected = attn.forward(q, *keys)
    large = cupy.ones((4096, 4096), cupy.float32)
    with cupy.cuda.Stream(non_blocking=True):
        late = cupy.zeros_like(q)
        for _ in range(20):
            large @ large
        late[...] = q
        out, lse = attn.forward(late, *keys)
        late[...] = 0
        copies = [cupy.asnumpy(x) for x in (out, lse)]
    for x, y in zip(copies, expected, strict=True):
        assert x.tobytes() == cupy.asnumpy(y).tobytes()


def test_a_call_cannot_be_captured():
    import cupy

    arrays = CASES[0].arrays()
    keys = cuflash.streamed(pinned_copy(arrays["k"]), pinned_copy(arrays["v"]), chunk=128)
    attn: Any = cuflash.FlashAttention(**CASES[0].keywords)
    q, stream = cupy.asarray(arrays["q"]), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(NotImplementedError, match=r"^k: got streamed keys while a CUDA graph is captured"):
            attn.forward(q, *keys)
        stream.end_capture()


def test_keys_and_queries_on_the_wrong_sides():
    import cupy

    arrays = CASES[0].arrays()
    q, k, v = ct.qkv(arrays)
    with pytest.raises(TypeError, match=r"^k: got an array in device memory, expected one in host memory"):
        cuflash.streamed(cupy.asarray(k), cupy.asarray(v))
    with pytest.raises(TypeError, match=r"^v: got "):
        cuflash.streamed(k, cupy.asarray(v))
    with pytest.raises(TypeError, match=r"^v: got cupy.ndarray|^v: got ndarray"):
        cuflash.FlashAttention().forward(cupy.asarray(q), cuflash.streamed(k, v).k, cupy.asarray(v))
