"""Bound calls on a device launch what `forward` launches, with the same arguments, and look nothing up."""

import gc
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.spec.passes import FORWARD
from tests.calls import calls, results_of
from tests.emulate.launcher import DeviceArray, arguments_of, device
from tests.sampling import examples

ARCHS = ("8.0", "9.0")


def is_one_launch(bound, arrays):
    launch = bound._launches.get(tuple(arrays))
    return launch is not None and launch.is_bound


@pytest.mark.one_in(1)
@settings(max_examples=examples(200))
@given(calls(FORWARD), st.sampled_from(ARCHS), st.booleans())
def test_a_bound_call_launches_what_forward_does(call, arch, is_other):
    case, options, arrays, _ = call
    arrays |= results_of(case, arrays, FORWARD, ())
    random = {"seed": case.seed, "offset": 5} if options.dropout else {}
    with device(arch) as launches:
        attn = cuflash.FlashAttention()
        attn.options = options
        on_device = {name: x.view(DeviceArray) for name, x in arrays.items()}
        inputs = {name: x for name, x in on_device.items() if name not in ("out", "lse")}
        bound = attn.bind(**inputs)
        assert not launches.launched
        expected, words, _ = arguments_of(launches, lambda: attn.forward(**on_device, **random))
        for number in range(3):  # the first call with results to write to binds these
            kernels, found, is_prepared = arguments_of(launches, lambda: bound(**on_device, **random))
            is_bound = is_one_launch(bound, on_device)
            assert kernels == expected
            assert found == words or not is_bound  # kernels read copies elsewhere
            assert is_prepared == (number == 0 or not is_bound)
        if is_other:  # arrays elsewhere, with other strides maybe
            others = {name: x.copy().view(DeviceArray) for name, x in on_device.items()}
            expected, words, _ = arguments_of(launches, lambda: attn.forward(**others, **random))
            for _ in range(2):
                kernels, found, _ = arguments_of(launches, lambda: bound(**others, **random))
                assert kernels == expected
                assert found == words or not is_one_launch(bound, others)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 0)}], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_caches_grow(arch, options, layout):
    """Slices of longer caches, which one launch serves for 128 lengths, and then another one."""
    attn = cuflash.FlashAttention(**options, layout=layout)
    axis = 2 if layout == "bhsd" else 1
    q, k, v = (np.ones((2, 3, 300, 32), ml_dtypes.bfloat16).swapaxes(1, 3 - axis).copy() for _ in range(3))
    q, k, v = (x.view(DeviceArray) for x in (q[:, :, :1] if axis == 2 else q[:, :1], k, v))

    def first(x, length):
        return x[:, :, :length] if axis == 2 else x[:, :length]

    with device(arch) as launches:
        bound = attn.bind(q, first(k, 100), first(v, 100))
        out, lse = attn.forward(q, k, v)
        for length in (100, 101, 101, 127, 128, 129, 250, 130, 300, 100):
            caches = first(k, length), first(v, length)
            (*expected, _) = arguments_of(launches, lambda own=caches: attn.forward(q, *own, out=out, lse=lse))
            (*found, is_prepared) = arguments_of(launches, lambda own=caches: bound(q, *own, out=out, lse=lse))
            assert found == expected
            if length in (101, 127, 130):
                assert not is_prepared


@pytest.mark.one_in(1)
@pytest.mark.parametrize("arch", ARCHS)
def test_block_tables_grow(arch):
    q, pool = (np.ones(shape, np.float16).view(DeviceArray) for shape in ((2, 4, 1, 32), (40, 2, 16, 32)))
    table = np.arange(80, dtype=np.int32).reshape(2, 40) % 40
    lengths = np.array([20, 25], np.int32).view(DeviceArray)
    attn = cuflash.FlashAttention()

    def optional(pages):
        return {"kv_lengths": lengths, "block_table": table[:, :pages].view(DeviceArray)}

    with device(arch) as launches:
        bound = attn.bind(q, pool, pool.copy(), **optional(4))
        out, lse = attn.forward(q, pool, pool.copy(), **optional(4))
        bound(q, pool, pool.copy(), **optional(4), out=out, lse=lse)
        for pages, plans in ((4, False), (5, False), (8, False), (9, True), (30, True), (31, False), (4, True)):
            arrays = {"q": q, "k": pool, "v": pool.copy(), **optional(pages), "out": out, "lse": lse}
            (*expected, _) = arguments_of(launches, lambda own=arrays: attn.forward(**own))
            (*found, is_prepared) = arguments_of(launches, lambda own=arrays: bound(**own))
            assert found == expected
            assert is_prepared == plans


@pytest.mark.parametrize("arch", ARCHS)
def test_forgotten_launches_are_planned_again(arch):
    """As tuning forgets them: calls that were bound before take the kernels that it chose."""
    q, k, v = (np.ones((2, 3, 30, 32), ml_dtypes.bfloat16).view(DeviceArray) for _ in range(3))
    attn = cuflash.FlashAttention()
    with device(arch) as launches:
        cache = launches.launch_cache
        bound = [attn.bind(q, k, v)]
        assert not arguments_of(launches, lambda: bound[0](q, k, v))[2]
        cache.forget_launches()
        with mock.patch.object(cache, "tuned_plan", wraps=cache.tuned_plan) as planned:
            for number in range(3):
                kernels, _, is_prepared = arguments_of(launches, lambda: bound[0](q, k, v))
                assert kernels
                assert is_prepared == (number == 0)
                assert planned.call_count == 1
        assert len(cache.bound_launches) == 1
        bound.clear()
        gc.collect()
        assert not cache.bound_launches
        cache.forget_launches()


@pytest.mark.one_in(1)
def test_calls_that_are_more_than_a_launch_are_looked_up_once():
    case = ct.Case(seqlen_q=20, seqlen_k=30, head_dim=40, dtype="bfloat16", strides="transposed")
    with device("9.0") as launches:
        q, k, v = (case.arrays()[name].view(DeviceArray) for name in "qkv")
        bound = cuflash.FlashAttention().bind(q, k, v)
        assert not is_one_launch(bound, {"q": q, "k": k, "v": v})
        with mock.patch.object(launches.launch_cache, "find_launch", wraps=launches.launch_cache.find_launch) as found:
            for number in (1, 2):
                bound(q, k, v)
                assert found.call_count == number


def test_what_is_wrong_is_said():
    q, k, v = (np.ones((2, 3, 30, 16), np.float32).view(DeviceArray) for _ in range(3))
    attn = cuflash.FlashAttention()
    with device("9.0") as launches:
        bound = attn.bind(q, k, v)
        for arrays, error, text in (
            ((q[:, :, :7], k, v), ValueError, r"^q: got shape \(2, 3, 7, 16\) .* as in bind"),
            ((q, k[:1], v[:1]), ValueError, r"^k: got shape \(1, 3, keys, 16\)"),
            ((q, k, v[:, :, :9]), ValueError, r"^v: "),
            ((q.astype(np.float16).view(DeviceArray), k, v), ValueError, r"^q: .* dtype float16"),
            ((q.view(np.ndarray), k.view(np.ndarray), v.view(np.ndarray)), ValueError, r"^q: .* in numpy"),
            ((q, k, None), TypeError, r"^v: got None"),
        ):
            with pytest.raises(error, match=text):
                bound(*arrays)
        with pytest.raises(TypeError, match=r"^bias: got an array, expected none"):
            bound(q, k, v, bias=q)
        with pytest.raises(ValueError, match=r"^out: "):
            bound(q, k, v, out=q)
            bound(q, k, v, out=q)
        with_axes = q[:, None].view(DeviceArray), k[None].view(DeviceArray), v[:, None].view(DeviceArray)
        for arrays, text in (
            ((*with_axes[:2], v[:, None, :, :9].view(DeviceArray)), r"^v: got .*shape \(2, 3, 9, 16\)"),
            ((with_axes[0], np.ones((2, 3, 3, 30, 16), np.float32).view(DeviceArray), with_axes[2]), "^k: got"),
        ):
            messages = []
            for call in (attn.bind, attn.forward):
                with pytest.raises(ValueError, match=text) as raised:
                    call(*arrays)
                messages.append(str(raised.value))
            assert messages[0] == messages[1]
        assert not launches.launched


@pytest.mark.parametrize("arch", ARCHS)
def test_results(arch):
    case = ct.Case(seqlen_q=20, seqlen_k=30, head_dim=40, dtype="bfloat16", causal=True)
    arrays = case.arrays()
    with device(arch, computes=True):
        q, k, v = (arrays[name].view(DeviceArray) for name in "qkv")
        bound = cuflash.FlashAttention(causal=True).bind(q, k, v)
        for _ in range(2):
            out, lse = bound(q, k, v)
            ct.assert_forward(case, out.view(np.ndarray), lse.view(np.ndarray))
