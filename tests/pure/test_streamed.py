"""Streamed keys and values against the oracle: on the CPU, and by way of a stand-in for a device."""

import contextlib
import sys
import threading
import tracemalloc
import types
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import array_api_strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays import dlpack
from cuflash.arrays.memory_ranges import Band
from cuflash.gpu.tuning import Tuning
from cuflash.shards.slices import Slices
from cuflash.spec.passes import BACKWARD, FORWARD, PASS_NAMES
from cuflash.streaming import calls
from cuflash.streaming.chunks import Chunk, chunks_of
from tests.fake_cupy import FakeDevice, FakeStream
from tests.interrupts import Interrupt, of_package
from tests.ranks import judge
from tests.sampling import examples
from tests.streams import ON_CPU, through

FEATURES = (*(name for name in ct.FEATURES if name != "scale"), "sinks", "dlse", "dropout", "block_mask")
SMALL: dict[str, Any] = {
    "features": FEATURES,
    "max_seqlen": 100,
    "max_head_dim": 24,
    "max_scores": 2**13,
    "score_spreads": (1.0, 8.0),
}
CASE = ct.Case(seqlen_q=13, seqlen_k=50, num_heads=4, num_heads_kv=2, head_dim=8, causal=True)
DEVICES = st.sampled_from([None, *({"late": late, "pinned": pinned} for late in (0, 1) for pinned in (0, 1))])


def same(x, y):
    return all(x[name].tobytes() == y[name].tobytes() for name in x)


@pytest.fixture
def devices():
    """Lets calls on NumPy arrays go by way of a stand-in for a device, or of none, to the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda how: stack.enter_context(through(how))


def chunks_for(data, case):
    step = 16 if case.dropout else 1
    if case.block_mask is not None:
        step = max(step, case.block_size[1])
    return data.draw(st.sampled_from([step * n for n in (1, 2, 3, 5, 10, 100)]), "chunk")


AXES = ct.with_axes(ct.cases(**{**SMALL, "max_scores": 2**11}, ndims=(4,)))


@settings(max_examples=examples(90))
@given(data=st.data(), case=ct.cases(**SMALL) | AXES, how=DEVICES)
def test_any_chunks_of_any_case_keep_the_oracle_rule(data, case, how):
    with through(how):
        judge(case, ON_CPU.results(case, chunks_for(data, case)))


@settings(max_examples=examples(25))
@given(data=st.data(), case=AXES, how=DEVICES, strides=st.sampled_from(ct.STRIDES))
def test_results_with_leading_axes_are_written_where_the_caller_says(data, case, how, strides):
    arrays, chunk = case.arrays(), chunks_for(data, case)
    q, k, v = ct.qkv(arrays)
    attn: Any = cuflash.FlashAttention(**case.keywords)
    need = ct.gradients_of(case.problem)
    optional, of_backward = (x | case.random for x in (ct.optional(arrays), ct.optional_backward(arrays)))

    def empty_view(x):
        return ct.lay_out(np.full_like(x, 7), strides, np.asarray)

    with through(how):
        keys = cuflash.streamed(k, v, chunk=chunk)
        results = attn.forward(q, *keys, **optional)
        given = {name: empty_view(x) for name, x in results._asdict().items()}
        written = attn.forward(q, *keys, **optional, **given)
        gradients = attn.backward(arrays["dout"], q, *keys, *results, need=need, **of_backward)
        of_gradients = {name: empty_view(x) for name, x in gradients._asdict().items() if name in ("dq", "dk", "dv")}
        found = attn.backward(arrays["dout"], q, *keys, *results, need=need, **of_backward, **of_gradients)
    for name, x in (given | of_gradients).items():
        of_call, new = (written, results) if name in given else (found, gradients)
        assert getattr(of_call, name) is x
        np.testing.assert_array_equal(x, getattr(new, name), err_msg=name)


@settings(max_examples=examples(25))
@given(data=st.data(), case=ct.cases(**SMALL))
def test_bits_do_not_depend_on_how_chunks_travel(data, case):
    """By views, or through buffers, early or late, staged or not."""
    chunk, found = chunks_for(data, case), []
    for how in (None, *({"late": late, "pinned": pinned} for late in (False, True) for pinned in (False, True))):
        with through(how):
            found.append(ON_CPU.results(case, chunk))
    for others in found[1:]:
        for name, x in others.items():
            np.testing.assert_array_equal(x, found[0][name], err_msg=name, strict=True)


@settings(max_examples=examples(25))
@given(case=ct.cases(**SMALL))
def test_one_chunk_is_the_call_as_it_was(case):
    arrays = case.arrays()
    attn: Any = cuflash.FlashAttention(**case.keywords)
    expected = attn.forward(*ct.qkv(arrays), **ct.optional(arrays), **case.random)
    found = ON_CPU.results(case, case.seqlen_k)
    for name, x in expected._asdict().items():
        np.testing.assert_array_equal(found[name], x, err_msg=name, strict=True)


@pytest.mark.parametrize("need", [("dk",), ("dq",), ("dv", "dq"), ("dsinks",), ("dscale", "dbias")], ids=",".join)
@pytest.mark.parametrize("how", [None, {"late": True, "pinned": False}], ids=["views", "buffers"])
def test_gradients_that_are_not_asked_for_are_not_computed(need, how, devices):
    devices(how)
    case = replace(CASE, bias=(13, 1), sinks=True, dtype="float16")
    arrays = case.arrays()
    q, k, v = ct.qkv(arrays)
    attn: Any = cuflash.FlashAttention(**case.keywords)
    results = attn.forward(q, k, v, **ct.optional(arrays))
    keys = cuflash.streamed(k, v, chunk=16)
    found = attn.backward(arrays["dout"], q, *keys, *results, need=need, **ct.optional_backward(arrays))
    assert set(found._fields) == set(need)
    ct.assert_backward(case, **found._asdict())


@pytest.mark.parametrize("how", [None, {"late": True, "pinned": False}, {"late": True, "pinned": True}])
def test_results_go_where_the_caller_wants_them(how, devices, tmp_path):
    devices(how)
    arrays = CASE.arrays()
    q, k, v = ct.qkv(arrays)
    keys = cuflash.streamed(k, v, chunk=16)
    dk = np.memmap(tmp_path / "dk", k.dtype, "w+", shape=k.shape)
    dv = np.full(v.shape[::-1], np.nan, v.dtype).T
    out, dq = np.empty_like(q), np.empty_like(q)
    attn: Any = cuflash.FlashAttention(**CASE.keywords)
    forward = attn.forward(q, *keys, out=out)
    assert forward.out is out
    gradients = attn.backward(arrays["dout"], q, *keys, *forward, dq=dq, dk=dk, dv=dv)
    assert gradients.dq is dq
    assert gradients.dk is dk
    assert gradients.dv is dv
    judge(CASE, {**forward._asdict(), **gradients._asdict()})


def test_arrays_of_other_libraries_come_back_as_such():
    arrays = CASE.arrays()
    q, k, v, dout = (array_api_strict.asarray(arrays[name]) for name in ("q", "k", "v", "dout"))
    keys, attn = cuflash.streamed(k, v, chunk=16), cuflash.FlashAttention(causal=True)
    out, lse = attn.forward(q, *keys)
    dq, dk, dv = attn.backward(dout, q, *keys, out, lse)
    assert all(isinstance(x, array_api_strict._array_object.Array) for x in (out, lse, dq, dk, dv))
    judge(CASE, {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})


def test_memory_maps_are_read_chunk_by_chunk(tmp_path):
    """Of 64 MiB of keys and values, less than 8 are in memory of ours at a time."""
    k, v = (np.memmap(tmp_path / name, np.float16, "w+", shape=(4, 65536, 64)) for name in "kv")
    k[:], v[:] = 0, 1
    q = np.zeros((4, 8, 64), np.float16)
    attn = cuflash.FlashAttention()
    keys = cuflash.streamed(k, v, chunk=2048)
    tracemalloc.start()
    out, lse = attn.forward(q, *keys)
    attn.backward(np.zeros_like(q), q, *keys, out, lse, need=("dq",))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(out, np.ones_like(out))
    assert most < 2**23


def test_host_memory_has_been_read_when_a_call_returns(devices):
    device = devices({"late": True, "pinned": True})
    q, k, v = ct.qkv(CASE.arrays())
    cuflash.FlashAttention(**CASE.keywords).forward(q, *cuflash.streamed(k, v, chunk=16))  # type: ignore[misc]
    assert any(count == len(stream.to_do) > 0 for stream, count in device.waited)


def test_device_memory_does_not_grow_with_the_keys(devices):
    taken = []
    for seqlen_k in (1000, 4000):
        device = devices({"late": True, "pinned": False})
        case = replace(CASE, seqlen_k=seqlen_k, causal=False)
        judge(case, ON_CPU.results(case, 100))
        taken.append(device.allocated)
    assert taken[0] == taken[1] > 0


def test_chunks_are_those_that_queries_see():
    assert chunks_of(Band(0, None, None), 7, 10, 4, 1) == (
        Chunk((0, 7), (0, 4)), Chunk((0, 7), (4, 8)), Chunk((0, 7), (8, 10)),
    )  # fmt: skip
    assert chunks_of(Band(10, None, 0), 10, 20, 8, 1) == (
        Chunk((0, 10), (0, 8)), Chunk((0, 10), (8, 16)), Chunk((6, 10), (16, 20)),
    )  # fmt: skip
    assert chunks_of(Band(0, 2, 0), 20, 20, 8, 4) == (
        Chunk((0, 10), (0, 8)), Chunk((8, 18), (8, 16)), Chunk((16, 20), (16, 20)),
    )  # fmt: skip
    assert chunks_of(Band(-30, None, 0), 20, 20, 8, 1) == ()


def test_the_plan_says_what_is_done():
    x = np.zeros((2, 5000, 32), np.float32)
    plan: Any = cuflash.FlashAttention(causal=True).plan(x, *cuflash.streamed(x, x, chunk=2000))
    assert [chunk.keys for chunk in plan.chunks] == [(0, 2000), (2000, 4000), (4000, 5000)]
    assert plan.ways == {"forward": "views", "backward": "views"}
    assert plan.device_bytes("forward") == 0
    assert "3 chunks of up to 2000 keys, 1.02 MB of k and v each" in plan.describe(verbose=True, width=0)
    without_values: Any = cuflash.FlashAttention().plan(x, *cuflash.streamed(x, None, chunk=2000))
    assert "3 chunks of up to 2000 keys, 512 kB of k each" in without_values.describe(width=0)
    assert cuflash.FlashAttention().plan(x, *cuflash.streamed(x, x)).chunk == 5000  # type: ignore[union-attr]
    assert repr(cuflash.streamed(x, x, chunk=7).k) == "Streamed(float32 (2, 5000, 32), chunk=7)"


def test_a_chunk_is_as_long_as_128_mib_of_keys_and_values():
    k = np.broadcast_to(np.float16(0), (1, 8, 2**20, 128))
    plan: Any = cuflash.FlashAttention().plan(k[:, :, :16], *cuflash.streamed(k, k))
    assert plan.chunk == 2**27 // (8 * 256 * 2)


# ---- what goes wrong -------------------------------------------------------------------------------------------------

X = np.zeros((2, 48, 16), np.float32)
ONES = np.ones((1, 1), bool)
STARTS = np.array([0, 48], np.int32)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((X, 3), TypeError, "^v: got int 3, expected a NumPy or CuPy array, or one with __dlpack__$"),
        ((None, X), TypeError, "^k: got None, expected an array$"),
        ((cuflash.streamed(X, X).k, X), TypeError, "^k: got Streamed, expected an array in host memory$"),
        (
            (X.astype("float8_e4m3fn"),) * 2,
            NotImplementedError,
            "^k: got dtype float8_e4m3fn, expected numbers of the dtype of q",
        ),
    ],
)
def test_what_cannot_be_streamed(given, error, message):
    with pytest.raises(error, match=message):
        cuflash.streamed(*given)


@pytest.mark.parametrize(("chunk", "error"), [(0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_chunks(chunk, error):
    with pytest.raises(error, match=r"^chunk: got .*, expected an integer"):
        cuflash.streamed(X, X, chunk=chunk)


@pytest.mark.parametrize(
    ("options", "chunk", "optional", "error", "message"),
    [
        ({"score": lambda s, i, j, *, a: s + a[j]}, 16, {}, TypeError, "missing keyword argument 'a'"),
        (
            {"score": lambda s, i, j, *, a: s * a[j]},
            16,
            {"a": np.zeros((4, 4), "f4")},
            ValueError,
            "^a: got an array of 2 axes, expected 1 axes",
        ),
        ({}, 16, {"block_table": ONES}, NotImplementedError, "^block_table: got ndarray, which streamed keys do not "),
        ({}, 16, {"cu_seqlens_q": STARTS}, NotImplementedError, "^cu_seqlens_q: got ndarray, which streamed keys "),
        ({}, 16, {"k_scale": ONES}, NotImplementedError, "^k_scale: got ndarray, which streamed keys do not go "),
        ({"dropout": 0.5}, 17, {"seed": 1, "offset": 2}, ValueError, "^chunk: got 17, expected a multiple of 16, "),
        ({"dropout": 0.5}, 16, {}, TypeError, "^seed: got None, expected an integer, which dropout needs$"),
        ({}, 96, {"block_mask": ONES}, None, ""),  # one chunk, which begins where the block does
        ({}, 16, {"block_mask": ONES}, ValueError, "^chunk: got 16, expected a multiple of 128, "),
        ({}, 16, {"bias": np.zeros((4, 5), "f4")}, ValueError, r"^bias: got shape \(4, 5\), expected a shape that "),
        ({}, 16, {"kv_lengths": np.array([49])}, ValueError, "^kv_lengths: got an entry 49, expected 0 to seqlen_k"),
        ({}, 16, {"out": X[:1]}, ValueError, r"^out: got shape \(1, 48, 16\), expected \(2, 48, 16\)$"),
        ({}, 16, {"out": X}, ValueError, "^out: got memory shared with q, expected memory of its own$"),
    ],
)
def test_bad_calls(options, chunk, optional, error, message):
    attn: Any = cuflash.FlashAttention(**options)
    if error is None:
        attn.forward(X, *cuflash.streamed(X, X, chunk=chunk), **optional)
        return
    with pytest.raises(error, match=message):
        attn.forward(X, *cuflash.streamed(X, X, chunk=chunk), **optional)


@pytest.mark.parametrize("options", [{"window": (20, 0), "dropout": 0.25}, {"score": lambda s, i, j: s * (i - j)}])
@pytest.mark.parametrize("is_whole", [False, True])
def test_tuning_is_of_the_longest_chunk(options, is_whole, monkeypatch):
    """Each pass as a call on the chunk computes it: in the dtype of sums if there are several chunks."""
    tuned: list[Any] = []

    def tune(options, arrays, random, *, passes, remember, forget):
        tuned.append((*passes, options, arrays, random, remember))
        results: dict[str, Any] = dict.fromkeys(PASS_NAMES) | {pass_.name: len(tuned) for pass_ in passes}
        return None if forget else Tuning(**results)

    monkeypatch.setattr(calls, "device_of", lambda error: FakeDevice(late=0, pinned=1))
    monkeypatch.setattr(Slices, "backend", SimpleNamespace(tune=tune))
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 48, 16)).astype("f2")
    q = q[:, :, :40]
    attn: Any = cuflash.FlashAttention(**options)
    random = {"seed": 3, "offset": 1} if "dropout" in options else {}
    keys = cuflash.streamed(k, v, chunk=64 if is_whole else 32)
    found: Any = attn.tune(q, *keys, remember=False, **random)
    assert (found.forward, found.backward) == (1, 2)
    for (_, own, arrays, drawn, remember), wide in zip(tuned, ("out", "dq"), strict=True):
        first, rows = own.diagonal - (48 - 40), arrays["q"].shape[2]
        assert own.wide == (() if is_whole else (wide,))
        assert (drawn, remember) == ((3, 1) if random else (0, 0), False)
        np.testing.assert_array_equal(arrays["k"], k[:, :, : 48 if is_whole else 32])
        np.testing.assert_array_equal(arrays["v"], v[:, :, : 48 if is_whole else 32])
        np.testing.assert_array_equal(arrays["q"], q[:, :, first : first + rows])
    assert attn.tune(q, *keys, forget=True, passes=["backward"], **random) is None
    assert [pass_ for pass_, *_ in tuned] == [FORWARD, BACKWARD, BACKWARD]


def test_arguments_that_do_not_fit():
    attn: Any = cuflash.FlashAttention()
    keys = cuflash.streamed(X, X, chunk=16)
    with pytest.raises(TypeError, match=r"^v: got ndarray, expected Streamed as k is: \*cuflash.streamed\(k, v\)$"):
        attn.forward(X, keys.k, X)
    with pytest.raises(TypeError, match=r"^k: got ndarray, expected Streamed as v is: "):
        attn.forward(X, X, keys.v)
    with pytest.raises(ValueError, match=r"^v: got chunks of 7 keys, expected 16 as k: both of one cuflash.streamed"):
        attn.forward(X, keys.k, cuflash.streamed(X, X, chunk=7).v)
    with pytest.raises(ValueError, match=r"^k: got .*head_dim"):
        attn.forward(X, *cuflash.streamed(X[..., :8], X))
    with pytest.raises(TypeError, match=r"^k: got dtype float64, expected float32"):
        attn.forward(X, *cuflash.streamed(X.astype("f8"), X.astype("f8")))
    out, lse = attn.forward(X, *keys)
    with pytest.raises(ValueError, match=r"^dk: got memory shared with k, expected memory of its own$"):
        attn.backward(X, X, *keys, out, lse, dk=X)
    read_only = np.broadcast_to(np.float32(0), X.shape)
    with pytest.raises(ValueError, match=r"^dv: got a read-only array, expected a writable one$"):
        attn.backward(X, X, *keys, out, lse, dv=read_only)
    with pytest.raises(ValueError, match=r"^dk: got shape \(2, 47, 16\), expected \(2, 48, 16\)$"):
        attn.backward(X, X, *keys, out, lse, dk=np.empty((2, 47, 16), "f4"))
    with pytest.raises(TypeError, match=r"^q: got None, expected an array$"):
        attn.forward(None, *keys)
    with pytest.raises(NotImplementedError, match=r"^q: got an array in host memory, expected one on a GPU"):
        attn.tune(X, *keys)
    attn.compile(X, *keys)
    with pytest.raises(ValueError, match=r"^v: got "):
        attn.compile(X, *cuflash.streamed(X, X[:, 1:]))


def test_a_call_cannot_be_captured(monkeypatch):
    monkeypatch.setattr(dlpack, "is_captured", lambda array: True)
    with pytest.raises(NotImplementedError, match=r"^k: got streamed keys while a CUDA graph is captured, expected "):
        cuflash.FlashAttention().forward(X, *cuflash.streamed(X, X))


def test_what_a_copy_meets_is_raised(devices):
    """Not lost in a thread."""
    device = devices({"late": True, "pinned": False})
    keys = cuflash.streamed(X, X, chunk=16)

    def wait(event):
        raise OSError("out of order")

    def work():
        cuflash.FlashAttention().forward(X, *keys)

    work()
    device.wait = wait
    with pytest.raises(OSError, match="out of order"):
        work()


def test_a_device_that_overwrites_is_noticed(devices, monkeypatch):
    """The stand-in finds what it is for: a stream that does not wait."""
    for late in (False, True):
        device = devices({"late": late, "pinned": True})
        monkeypatch.setattr(device, "follow", lambda stream, event, device=device: stream or device.run(*event))
        with pytest.raises(AssertionError, match=r"overwritten|before they are computed"):
            ON_CPU.results(CASE, 16)


class OnDevice:
    """As much of CuPy's array as checks of arguments ask for."""

    def __init__(self, array):
        for name in ("shape", "strides", "dtype", "ndim", "size", "itemsize", "nbytes"):
            setattr(self, name, getattr(array, name))
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=0)
        self.device = contextlib.nullcontext()
        self.array = array  # keeps the memory


@pytest.mark.parametrize("chunk", [16, 48])
@pytest.mark.parametrize(
    ("result", "other"),
    [("out", "q"), ("lse", "q"), ("lse", "out"), ("dq", "q"), ("dq", "dout"), ("dsinks", "sinks"), ("dsinks", "dq")],
)
def test_results_on_the_device_have_memory_of_their_own(result, other, chunk, monkeypatch):
    stream = SimpleNamespace(is_capturing=lambda: False)
    cupy: Any = types.ModuleType("cupy")
    cupy.__dict__.update(ndarray=OnDevice, cuda=SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    of_rows, of_heads = ("lse",), ("sinks", "dsinks")
    shapes = dict.fromkeys(of_rows, (2, 48)) | dict.fromkeys(of_heads, (2,))
    names = {"q", "sinks", result, other}
    if result in ("dq", "dsinks"):
        names |= {"dout", "out", "lse"}
    hosts = {name: np.zeros(shapes.get(name, X.shape), "f4") for name in names}
    hosts[result] = hosts[other].reshape(-1)[: hosts[result].size].reshape(hosts[result].shape)
    arrays = {name: OnDevice(x) for name, x in hosts.items()}
    attn: Any = cuflash.FlashAttention()
    keys = cuflash.streamed(X, X, chunk=chunk)
    with pytest.raises(ValueError, match=rf"^({result}|{other}): got memory shared with ({result}|{other}), expected"):
        if result in ("out", "lse"):
            attn.forward(arrays.pop("q"), *keys, **arrays)
        else:
            inputs = [arrays.pop(name) for name in ("dout", "q")]
            attn.backward(*inputs, *keys, *(arrays.pop(n) for n in ("out", "lse")), need=("dq", "dsinks"), **arrays)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**20), st.booleans(), st.booleans(), st.sampled_from(["forward", "backward", "mapped"]))
def test_an_interrupt_at_any_line_leaves_no_copy_under_way(line, late, pinned, method):
    """As soon as it is raised, while its traceback still holds what the call made."""
    is_mapped = method == "mapped"
    arrays = replace(CASE, seqlen_q=1 if is_mapped else 13).arrays()
    attn: Any = cuflash.FlashAttention(causal=True)
    out, lse = attn.forward(*ct.qkv(arrays))
    keys = cuflash.streamed(arrays["k"], arrays["v"], chunk=None if is_mapped else 16)
    device, streams, log, held = FakeDevice(late=late, pinned=pinned), [], [], None
    wait, forward = device.wait, Slices.forward

    def stream():
        streams.append(FakeStream())
        return streams[-1]

    def logged(what, function):
        def call(*args):
            log.append(what)
            return function(*args)

        return call

    def call(interrupt):
        with interrupt():
            if method == "backward":
                attn.backward(arrays["dout"], arrays["q"], *keys, out, lse)
            else:
                attn.forward(arrays["q"], *keys)

    files, before = of_package("streaming/", "shards/"), set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "stream", stream)
        patch.setattr(device, "wait", logged("waits", wait))
        patch.setattr(Slices, "forward", logged("computes", forward))
        patch.setattr(calls, "device_of", lambda error: device)
        patch.setattr("cuflash.streaming.memory.may_be_mapped", lambda run, device: is_mapped)
        counted = Interrupt(files)
        call(counted)
        interrupt = Interrupt(files, 1 + line % counted.lines)
        del streams[:], log[:]
        try:
            call(interrupt)
        except KeyboardInterrupt as error:
            held = error  # with its traceback
        assert held is not None or not interrupt.where
    assert all(one.done == len(one.to_do) for one in streams), interrupt.where
    assert set(threading.enumerate()) <= before, interrupt.where
    if "computes" in log:  # kernels may read the caller's memory
        assert log[-1] == "waits", interrupt.where


def test_a_star_that_was_forgotten_is_named():
    x = np.ones((2, 8, 4))
    keys, attn, message = (
        cuflash.streamed(x, x),
        cuflash.FlashAttention(),
        r"^k: got a StreamedPair, expected \*cuflash",
    )
    calls_without: list[Any] = [
        lambda: cuflash.attention(x, keys),  # type: ignore[call-overload]
        lambda: cuflash.attention(x, k=keys),  # type: ignore[call-overload]
        lambda: cuflash.attention(x, keys, x),
        lambda: attn.forward(x, keys, x),
        lambda: attn.backward(x, x, keys, x, x, x),
        lambda: attn.plan(x, keys, x),
    ]
    for call in calls_without:
        with pytest.raises(TypeError, match=message) as error:
            call()
        assert error.value.__suppress_context__ or error.value.__context__ is None
    with pytest.raises(TypeError, match=r"^attention\(\) missing 1 required positional argument: 'v'$"):
        cuflash.attention(x, x)  # type: ignore[call-overload]
