"""Repeated calls on a device launch what a first call launches, with the same arguments, and look nothing up."""

import gc
import itertools
import struct
import sys
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.gpu.params import kept_frames
from cuflash.spec.passes import BACKWARD, FORWARD
from tests.calls import calls, results_of, shifted
from tests.emulate.launcher import DeviceArray, arguments_of, device
from tests.sampling import examples

ARCHS = ("8.0", "9.0")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def first_call(launches, call):
    """What a call launches that finds nothing of those before."""
    launches.launch_cache.forget_launches()
    kept_frames.clear()
    found = arguments_of(launches, call)
    assert found[2]
    return found[:2]


def like(array, by=0):
    return shifted(array.view(np.ndarray), by).view(DeviceArray) if by else array.copy().view(DeviceArray)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD], ids=str)
@settings(max_examples=examples(150))
@given(data=st.data(), arch=st.sampled_from(ARCHS))
def test_calls_that_alternate(pass_, data, arch):
    """Arrays of one problem: the same again, elsewhere, with other strides or another alignment."""
    case, options, arrays, need = data.draw(calls(pass_))
    arrays |= results_of(case, arrays, pass_, need)
    keywords: dict[str, Any] = {"seed": case.seed, "offset": 5} if options.dropout else {}
    if pass_ is BACKWARD:
        keywords["need"] = need
    attn = cuflash.FlashAttention()
    attn.options = options
    original = {name: x.view(DeviceArray) for name, x in arrays.items()}
    elsewhere = {name: like(x) for name, x in original.items()}
    name = data.draw(st.sampled_from([name for name, x in original.items() if x.size]))
    aside = original | {name: like(original[name], data.draw(st.sampled_from((1, 2, 4, 8))))}
    with device(arch) as launches:

        def call(given):
            return lambda: getattr(attn, str(pass_))(**given, **keywords)

        choices = [original, elsewhere, aside]
        expected = [first_call(launches, call(given)) for given in choices]
        launches.launch_cache.forget_launches()
        is_copied = any(launch.copied for launch in launches.launch_cache._launches.values())
        for number in data.draw(st.lists(st.sampled_from(range(3)), min_size=4, max_size=8)):
            kernels, words, _ = arguments_of(launches, call(choices[number]))
            is_copied |= any(launch.copied for launch in launches.launch_cache._launches.values())
            assert kernels == expected[number][0]
            assert words == expected[number][1] or is_copied  # kernels read copies elsewhere


def arrays_of(shape=(2, 4, 40, 32), count=3, dtype=BFLOAT16):
    return [np.ones(shape, dtype).view(DeviceArray) for _ in range(count)]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_is_looked_up(arch):
    q, k, v, out, dout, dq, dk, dv = arrays_of(count=8)
    lse, bias = (np.ones(shape, np.float32).view(DeviceArray) for shape in ((2, 4, 40), (4, 40, 40)))
    attn: Any = cuflash.FlashAttention(causal=True)
    saved = {"out": out, "lse": lse}
    with device(arch) as launches:
        for call in (
            lambda: attn.forward(q, k, v),
            lambda: attn.forward(q, k, v, **saved),
            lambda: attn.forward(q, k, v, bias=bias, **saved),
            lambda: attn.forward(q, k, v, want=("max",)),
            lambda: attn.backward(dout, q, k, v, **saved),
            lambda: attn.backward(dout, q, k, v, **saved, dq=dq, dk=dk, dv=dv, bias=bias, need=("dbias",)),
            lambda: attn.jvp(q, k, v, tk=dout),
        ):
            kernels, _, is_prepared = arguments_of(launches, call)
            assert is_prepared
            for _ in range(2):
                found, _, is_prepared = arguments_of(launches, call)
                assert found == kernels
                assert not is_prepared
        launches.launch_cache.forget_launches()
        assert arguments_of(launches, call)[2]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 0)}], ids=str)
def test_caches_grow(arch, options):
    attn = cuflash.FlashAttention(**options)
    q, k, v = arrays_of((2, 3, 300, 32))
    q, (out,) = q[:, :, :1], arrays_of((2, 3, 1, 32), 1)
    lse = np.ones((2, 3, 1), np.float32).view(DeviceArray)
    with device(arch) as launches:

        def call(length):
            return lambda: attn.forward(q, k[:, :, :length], v[:, :, :length], out=out, lse=lse)

        lengths = (100, 101, 101, 127, 128, 129, 250, 130, 300, 100, 2, 1, 0, 300, 2, 1, 0, 100)
        expected = [first_call(launches, call(length)) for length in lengths]
        launches.launch_cache.forget_launches()
        for number, length in enumerate(lengths):
            kernels, words, is_prepared = arguments_of(launches, call(length))
            assert (kernels, words) == expected[number]
            if length in (101, 127, 130, *lengths[:number]):
                assert not is_prepared


def test_maps_reach_over_no_more_than_the_memory_of_the_call():
    """Slices of a cache, and arrays that end where their memory does, in one form and at one address."""
    (q, out), (k, v) = arrays_of((1, 8, 1, 64), 2), arrays_of((1, 2, 700, 64), 2)
    lse = np.ones((1, 8, 1), np.float32).view(DeviceArray)
    attn = cuflash.FlashAttention()
    ends: dict[int, int] = {}

    def data(x):
        ptr = x.ctypes.data
        memory = SimpleNamespace(ptr=ptr, size=ends.get(ptr, ptr) - ptr)
        return SimpleNamespace(ptr=ptr, device_id=0, mem=memory)

    with mock.patch.object(DeviceArray, "data", property(data)), device("9.0") as launches:
        bound = attn.bind(q, k[:, :, :600], v[:, :, :600])

        def call(forward, length, *caches):
            ends.clear()
            ends.update({x.ctypes.data: x.ctypes.data + x.nbytes for x in caches})
            return lambda: forward(q, k[:, :, :length], v[:, :, :length], out=out, lse=lse)

        choices = [(length, *caches) for length in (600, 620) for caches in ((k, v), (k,), ())]
        expected = [first_call(launches, call(attn.forward, *own)) for own in choices]
        assert len({words[0] for _, words in expected}) == 4  # both reach over 640 keys, or none
        launches.launch_cache.forget_launches()
        for number in (0, 2, 0, 1, 5, 3, 5, 2, 4, 0):
            for forward in (attn.forward, bound):
                assert arguments_of(launches, call(forward, *choices[number]))[:2] == expected[number]


@pytest.mark.parametrize("arch", ARCHS)
def test_results_that_grow_into_caches_are_refused(arch):
    """However often a call on the same addresses was served: it reached over fewer keys."""
    memory, q = np.ones((1, 2, 200, 32), BFLOAT16).view(DeviceArray), np.ones((1, 2, 1, 32), BFLOAT16).view(DeviceArray)
    out, attn = memory[:, :, 150:151], cuflash.FlashAttention()
    (v,) = arrays_of(memory.shape, 1)
    with device(arch):
        bound = attn.bind(q, memory[:, :, :140], v[:, :, :140])
        for forward in (attn.forward, bound):
            for length in (140, 141, 140, 150):
                forward(q, memory[:, :, :length], v[:, :, :length], out=out)
            for length in (151, 160):
                with pytest.raises(ValueError, match=r"^out: .*k"):
                    forward(q, memory[:, :, :length], v[:, :, :length], out=out)
        (wide,) = arrays_of((1, 2, 1, 64), 1)
        copied = wide[..., ::2]  # its rows are not contiguous
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^out: "):
                attn.forward(q, memory, v, out=q)
            attn.forward(copied, memory, v)
            with pytest.raises(ValueError, match=r"^out: "):
                attn.forward(copied, memory, v, out=wide[..., :32])


@pytest.mark.parametrize("arch", ARCHS)
def test_launches_by_addresses_check_no_addresses_for_other_calls(arch):
    """A launch that is repeated by addresses is served without a look at these; a longer call on them is refused."""
    (memory, v), (q,) = arrays_of((1, 2, 200, 32), 2), arrays_of((1, 2, 1, 32), 1)
    out = memory[:, :, 150:151]
    lse = np.ones((1, 2, 1), np.float32).view(DeviceArray)
    attn, arrays = cuflash.FlashAttention(), [q, memory[:, :, :140], v[:, :, :140], out, lse]
    with device(arch) as launches:
        repeated_launches = launches.repeated_launches
        with repeated_launches.remembered(("signature",), arrays, None):
            _, expected, _ = arguments_of(launches, lambda: attn.forward(*arrays[:3], out=out, lse=lse))
        repeated = repeated_launches.repeated_launch(("signature",))

        def allocate(nbytes, stream):
            return repeated_launches.cupy.cuda.alloc(nbytes).ptr

        for _ in range(2):
            launches.arguments.clear()
            repeated.run([x.ctypes.data for x in arrays], (0, 0), 0, allocate, lambda pointer: None)
            assert launches.arguments == expected
            with pytest.raises(ValueError, match=r"^out: .*k"):
                attn.forward(q, memory[:, :, :151], v[:, :, :151], out=out, lse=lse)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("arch", ARCHS)
def test_results_between_each_other_are_looked_at_once(arch):
    """Gradients as slices of one array, with axes that interleave them: no later call on these addresses differs."""
    (qkv, gradients), (dout, out) = arrays_of((2, 40, 3, 4, 32), 2), arrays_of((2, 40, 4, 32), 2)
    lse = np.ones((2, 4, 40), np.float32).view(DeviceArray)
    q, k, v = (qkv[:, :, i] for i in range(3))
    dq, dk, dv = (gradients[:, :, i] for i in range(3))
    attn = cuflash.FlashAttention(layout="bshd")
    with device(arch) as launches:

        def call(dq=dq):
            return attn.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)

        expected = first_call(launches, call)
        with mock.patch.object(launches.launch.Launch, "_check_overlap", side_effect=AssertionError):
            assert arguments_of(launches, call) == (*expected, False)
        for shared in (gradients[:, :, 1], dk[::-1]):
            with pytest.raises(ValueError, match=r"^d[qk]: "):
                call(shared)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("arch", ARCHS)
def test_values_that_are_the_first_columns_of_keys(arch):
    q, out = arrays_of((1, 16, 1, 576), 2)
    k, other = arrays_of((1, 1, 700, 576), 2)
    v, out = k[..., :512], out[..., :512]
    lse = np.ones((1, 16, 1), np.float32).view(DeviceArray)
    attn = cuflash.FlashAttention()
    with device(arch) as launches:

        def call(v):
            return lambda: attn.forward(q, k, v, out=out, lse=lse)

        choices = [v, other[..., :512]]
        expected = [first_call(launches, call(x)) for x in choices]
        assert arch == "8.0" or expected[0][0] != expected[1][0]
        launches.launch_cache.forget_launches()
        for number in (0, 1, 0, 0, 1, 1):
            assert arguments_of(launches, call(choices[number]))[:2] == expected[number]


def test_what_is_wrong_is_said():
    q, k, v = arrays_of(dtype=np.dtype(np.float32))
    attn: Any = cuflash.FlashAttention()
    with device("9.0") as launches:
        for _ in range(2):
            attn.forward(q, k, v)
            attn.forward(q, k, v, bias=q[0, :, :, :1])
        launches.launched.clear()
        for arrays, keywords, error, text in (
            ((q, k[:, :, :7], v), {}, ValueError, r"^v: got seqlen_k 40, expected seqlen_k 7"),
            ((q, k, v[:, :3]), {}, ValueError, r"^v: got "),
            ((q, k.astype(np.float16).view(DeviceArray), v), {}, TypeError, r"^k: got .*float16"),
            ((q, k, v), {"bias": q[:, :, :7]}, ValueError, r"^bias: got shape"),
            ((q, k, v), {"bias": "x"}, TypeError, r"^bias: got "),
            ((q, k, v), {"out": q}, ValueError, r"^out: "),
            ((q, k, v), {"seed": -1}, ValueError, r"^seed: "),
        ):
            with pytest.raises(error, match=text):
                attn.forward(*arrays, **keywords)
        assert not launches.launched


def test_functions_of_packed_sequences_become_options_where_starts_are_one_array():
    q, k, v = arrays_of((4, 40, 32))
    starts = np.array([0, 10, 40], np.int32).view(DeviceArray)
    attn = cuflash.FlashAttention(causal=True, mask=lambda i, j: i - j < 5)
    others = starts.copy().view(DeviceArray)
    with device("9.0") as launches:
        choices = [(starts, starts), (starts, others)]
        calls = [lambda own=own: attn.forward(q, k, v, cu_seqlens_q=own[0], cu_seqlens_k=own[1]) for own in choices]
        expected = [first_call(launches, call)[0] for call in calls]
        assert expected[0] != expected[1]
        for number in (1, 0, 1, 1, 0):
            assert arguments_of(launches, calls[number])[0] == expected[number]


def test_known_calls_are_bounded(monkeypatch):
    q, k, v = arrays_of()
    with device("8.0") as launches:
        monkeypatch.setattr(launches.launch_cache, "MOST_KNOWN", 6)
        for n in range(1, 12):
            cuflash.FlashAttention(scale=float(n)).forward(q, k, v)
            cuflash.FlashAttention().forward(q[:, :, :n], k, v)
            assert len(launches.launch_cache._known) <= 7


@settings(max_examples=examples(40), deadline=None)
@given(scales=st.lists(st.integers(1, 9), min_size=10, max_size=30))
def test_launches_in_memory_are_bounded(scales):
    """However calls find them; one that has been used since half of the others is still found."""
    q, k, v = arrays_of()
    with device("8.0") as launches, mock.patch.object(launches.launch_cache, "MAX_LAUNCHES", 4):
        cache, recent = launches.launch_cache, list[int]()
        launches.launch._call_numbers = itertools.count(1)
        for scale in scales:
            attn = cuflash.FlashAttention(scale=float(scale))
            with mock.patch.object(cache, "tuned_plan", wraps=cache.tuned_plan) as planned:
                attn.forward(q, k, v)
            assert not (planned.called and scale in recent)
            recent = [scale, *(x for x in recent if x != scale)][:2]
            alive = {x for x in gc.get_objects() if type(x) is launches.launch.Launch}
            assert alive <= {*cache._launches.values()}
            assert len(alive) <= 4
            del alive


@pytest.mark.parametrize("arch", ARCHS)
def test_a_plan_under_way_while_launches_are_forgotten_is_made_again(arch):
    """As tuning in another thread forgets them: the plan may be that of before."""
    q, k, v = arrays_of()
    attn, plans = cuflash.FlashAttention(), []
    with device(arch) as launches:
        cache = launches.launch_cache
        tuned_plan = cache.tuned_plan

        def planned(*problem, **layout):
            plans.append(tuned_plan(*problem, **layout))
            if len(plans) == 1:
                cache.forget_launches()
            return plans[-1]

        with mock.patch.object(cache, "tuned_plan", planned):
            attn.forward(q, k, v)
            attn.forward(q, k, v)
        assert len(plans) == 2
        (launch,) = cache._launches.values()
        assert launch.plan is plans[1]


def test_calls_keep_no_arrays():
    """What is kept of calls are properties of arrays and addresses."""
    attn: Any = cuflash.FlashAttention(causal=True)
    with device("9.0"):
        q, k, v, out, dout, dq, dk, dv = arrays = arrays_of(count=8)
        lse = np.ones((2, 4, 40), np.float32).view(DeviceArray)
        bound = attn.bind(q, k, v)
        for _ in range(3):
            attn.forward(q, k, v, out=out, lse=lse)
            bound(q, k, v, out=out, lse=lse)
            attn.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
        alive = [weakref.ref(x) for x in (*arrays, lse)]
        del q, k, v, out, dout, dq, dk, dv, arrays, lse
        gc.collect()
        assert not any(x() is not None for x in alive)
        assert bound.options == attn.options


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_calls_after_one_that_failed(error):
    """Wherever it failed: at its scratch memory, in its argument, or between its kernels."""
    q, k, v, out, dout, dq, dk, dv = arrays_of(count=8)
    lse = np.ones((2, 4, 40), np.float32).view(DeviceArray)
    attn: Any = cuflash.FlashAttention(dropout=0.5)
    with device("9.0") as launches:

        def run(seed):
            return attn.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, seed=seed, offset=0)

        def words(seed):
            return arguments_of(launches, lambda: run(seed))[1]

        expected = [words(seed) for seed in (2, 1, 0)][::-1]
        cuda: Any = sys.modules["cupy"].cuda  # type: ignore[attr-defined]
        places = [(cuda, "alloc", 0), (struct, "pack_into", 0)]
        places += [(cuda.driver, "launchKernel", n) for n in range(len(expected[0]))]
        for owner, name, calls_before in places:
            effects = [mock.DEFAULT] * calls_before + [error]
            with mock.patch.object(owner, name, wraps=getattr(owner, name), side_effect=effects) as failing:
                with pytest.raises(error):
                    run(2)
                assert failing.call_count == calls_before + 1
            assert [words(seed) for seed in (2, 1, 0)] == expected[::-1]


def test_threads_have_arguments_of_their_own():
    """A thread calls while another one launches, on the same arrays: a launch reads what its own call has written."""
    q, k, v, out = arrays_of(count=4)
    lse = np.ones((2, 4, 40), np.float32).view(DeviceArray)
    attn = cuflash.FlashAttention(dropout=0.5)
    with device("9.0") as launches:

        def run(seed):
            return attn.forward(q, k, v, out=out, lse=lse, seed=seed, offset=0)

        expected = [arguments_of(launches, lambda seed=seed: run(seed))[1] for seed in range(2)]
        assert expected[0] != expected[1]
        found = []

        def launch(handle, *how):
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=run, args=(1,))
                other.start()
                other.join()
            launches.arguments.clear()
            launches.run(handle, *how)
            found.append(list(launches.arguments))

        cuda: Any = sys.modules["cupy"].cuda  # type: ignore[attr-defined]
        cuda.driver.launchKernel = launch
        for _ in range(3):
            found.clear()
            run(0)
            assert found == [expected[1], expected[0]]


def test_the_device_of_the_arrays_is_current():
    """While a call launches, and after it the one that was."""
    q, k, v = arrays_of()
    attn = cuflash.FlashAttention()
    current, launched = [0], []

    @contextmanager
    def on(device_id):
        before, current[0] = current[0], device_id
        yield
        current[0] = before

    with device("9.0"):
        bound = attn.bind(q, k, v)
        cuda: Any = sys.modules["cupy"].cuda  # type: ignore[attr-defined]
        cuda.Device, cuda.runtime.getDevice = on, lambda: current[0]
        cuda.driver.launchKernel = lambda *how: launched.append(current[0])
        for current[0] in (0, 1, 1, 0):
            before = current[0]
            for forward in (attn.forward, bound):
                launched.clear()
                forward(q, k, v)
                assert launched == [0]
                assert current == [before]
