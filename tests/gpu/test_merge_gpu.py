"""Merging on the device, of tangents and subnormal numbers too, compared with that on the host."""

from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.testing.tangents import Moved, assert_tangents, yardsticks_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_merging_on_the_device_is_merging_on_the_host(cupy, layout):
    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((2, 3, 5, 4)).astype(np.float16) for _ in range(3)]
    lses = [rng.standard_normal((2, 3, 5) if layout == "bhsd" else (2, 5, 3), np.float32) for _ in range(3)]
    lses[0][0, 1] = -np.inf
    lses[1][:, 0] = lses[2][:, 0] = -np.inf
    own_outs, own_lses = ([cupy.asarray(x) for x in xs] for xs in (outs, lses))
    right, got = cuflash.merge(outs, lses, layout=layout), cuflash.merge(own_outs, own_lses, layout=layout)
    rights = cuflash.merge_backward(outs[0], outs, lses, *right, dlse=np.ones_like(lses[0]), layout=layout)
    dlse = cupy.ones_like(own_lses[0])
    gots = cuflash.merge_backward(own_outs[0], own_outs, own_lses, *got, dlse=dlse, layout=layout)
    expected: list[Any] = [*right, *rights.douts, *rights.dlses]
    for x, y in zip((*got, *gots.douts, *gots.dlses), expected, strict=True):
        assert type(x) is cupy.ndarray
        np.testing.assert_allclose(ct.to_numpy(x), y, rtol=1e-3 if y.dtype == np.float16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_of_row_reductions_on_the_device_are_those_on_the_host(cupy, layout):
    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((2, 3, 5, 4), np.float32) for _ in range(3)]
    rows = (2, 3, 5) if layout == "bhsd" else (2, 5, 3)
    lses, entropies = ([rng.standard_normal(rows, np.float32) for _ in range(3)] for _ in range(2))
    maxes = [rng.integers(0, 3, rows).astype(np.float32) for _ in range(3)]
    lses[0][0, 1] = maxes[0][0, 1] = -np.inf
    entropies[0][0, 1] = np.nan
    dmax, dentropy = rng.standard_normal((2, *rows), np.float32)

    def gradients(convert):
        own_outs, own_lses, own_maxes, own_entropies = (
            [convert(x) for x in own] for own in (outs, lses, maxes, entropies)
        )
        merged = cuflash.merge(own_outs, own_lses, maxes=own_maxes, entropies=own_entropies, layout=layout)
        found = cuflash.merge_backward(
            own_outs[0], own_outs, own_lses, *merged[:2], maxes=own_maxes, dmax=convert(dmax), entropies=own_entropies,
            entropy=merged.entropy, dentropy=convert(dentropy), layout=layout,
        )  # fmt: skip
        assert found._fields == ("douts", "dlses", "dmaxes", "dentropies")
        return [x for own in found for x in own]

    for x, y in zip(gradients(cupy.asarray), gradients(np.asarray), strict=True):
        assert type(x) is cupy.ndarray
        np.testing.assert_allclose(ct.to_numpy(x), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tangents_of_splits_merged_are_those_of_the_whole(cupy, dtype, causal):
    case = ct.Case(
        seqlen_q=113, seqlen_k=203, num_heads=4, num_heads_kv=2, head_dim=64, dtype=dtype, causal=causal, dlse=True
    )
    moved = Moved(cotangents=("tdout", "tdlse"))
    arrays, tangents = case.arrays(cupy.asarray), moved.arrays(case, cupy.asarray)
    keys = np.array_split(np.random.default_rng(0).permutation(case.seqlen_k), 3)
    inputs = ct.split_keys(case, keys, cupy.asarray)
    for own, some in zip(inputs, keys, strict=True):
        own |= {"tq": tangents["tq"], "tk": tangents["tk"][:, :, some], "tv": tangents["tv"][:, :, some]}
    attn = cuflash.FlashAttention()
    results = [attn.jvp(**x) for x in inputs]
    outs, lses, touts, tlses = zip(*results, strict=True)
    merged = cuflash.merge(outs, lses, touts=touts, tlses=tlses)
    ct.assert_forward(case, merged.out, merged.lse)
    assert_tangents(case, moved, {"tout": merged.tout, "tlse": merged.tlse})
    gradients = cuflash.merge_backward(
        arrays["dout"], outs, lses, *merged[:2], dlse=arrays["dlse"], touts=touts, tlses=tlses, tout=merged.tout,
        tlse=merged.tlse, tdout=tangents["tdout"], tdlse=tangents["tdlse"],
    )  # fmt: skip
    found = {name: np.zeros(arrays[name[2:]].shape) for name in ("tdq", "tdk", "tdv")}
    for some, x, own, dout, dlse, tdout, tdlse in zip(keys, inputs, results, *gradients, strict=True):
        got = attn.backward_jvp(dout, **x, **own._asdict(), dlse=dlse, tdout=tdout, tdlse=tdlse)
        tdq, tdk, tdv = map(ct.to_numpy, got)
        found["tdq"] += tdq
        found["tdk"][:, :, some], found["tdv"][:, :, some] = tdk, tdv
    expected = yardsticks_of(case, moved)
    for name, x in found.items():  # splits are rounded too
        assert ct.measure(name, x, expected[name].looser(4)).failure is None


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_merging_tangents_on_the_device_is_merging_on_the_host(cupy, layout, dtype):
    rng = np.random.default_rng(0)
    sums = np.float64 if dtype == "float64" else np.float32
    shape = (2, 3, 5) if layout == "bhsd" else (2, 5, 3)
    outs, touts = ([rng.standard_normal((2, 3, 5, 4)).astype(dtype) for _ in range(18)] for _ in range(2))
    lses, tlses = ([rng.standard_normal(shape).astype(sums) for _ in range(18)] for _ in range(2))
    lses[0][0, 1] = -np.inf
    for x in lses:
        x[:, 0] = -np.inf
    dout = outs[0] + outs[1]
    groups = [[cupy.asarray(x) for x in own] for own in (outs, lses, touts, tlses)]
    found = []
    for own, of_dout, of_dlse in (
        ((outs, lses, touts, tlses), dout, tlses[0]),
        (groups, *map(cupy.asarray, (dout, tlses[0]))),
    ):
        merged = cuflash.merge(own[0], own[1], touts=own[2], tlses=own[3], layout=layout)
        gradients = cuflash.merge_backward(
            of_dout, own[0], own[1], *merged[:2], dlse=of_dlse, touts=own[2], tlses=own[3], tout=merged.tout,
            tlse=merged.tlse, tdout=of_dout, tdlse=of_dlse, layout=layout,
        )  # fmt: skip
        found.append((*merged, *(x for of_kind in gradients for x in of_kind)))
    for right, got in zip(*found, strict=True):
        assert type(got) is cupy.ndarray
        bound = 2e-3 if dtype == "float16" else 1e-5  # gradients of lse take the rounded ones of out
        np.testing.assert_allclose(ct.to_numpy(got).astype(float), right.astype(float), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_subnormal_numbers_are_merged_as_on_the_host(cupy, dtype):
    """CuPy compiles its own kernels so that they count as zeros."""
    rng = np.random.default_rng(0)
    outs = [(rng.standard_normal((2, 3, 5, 64)) * 2.0**-129).astype(ct.numpy_dtype(dtype)) for _ in range(2)]
    lses = [rng.standard_normal((2, 3, 5)).astype(np.float32) for _ in range(2)]
    dout = (rng.standard_normal(outs[0].shape) * 2.0**60).astype(outs[0].dtype)
    right = cuflash.merge(outs, lses)
    rights = cuflash.merge_backward(dout, outs, lses, *right)
    own_dout, own_outs, own_lses = cupy.asarray(dout), *([cupy.asarray(x) for x in xs] for xs in (outs, lses))
    got = cuflash.merge(own_outs, own_lses)
    gots = cuflash.merge_backward(own_dout, own_outs, own_lses, *map(cupy.asarray, right))
    unit = 2.0**-133 if dtype == "bfloat16" else 2.0**-148
    np.testing.assert_allclose(ct.to_numpy(got.out).astype(float), right.out.astype(float), rtol=0, atol=unit)
    for x, y in zip(gots.dlses, rights.dlses, strict=True):
        np.testing.assert_allclose(ct.to_numpy(x), y, rtol=1e-4, atol=2.0**-80)
