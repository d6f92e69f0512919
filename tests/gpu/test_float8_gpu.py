"""fp8 arrays on the device: quantised there, and in a cache that grows."""

from typing import Any

import numpy as np
import pytest

import cuflash

pytestmark = pytest.mark.gpu


def test_what_a_device_quantises_is_what_numpy_does():
    cupy = pytest.importorskip("cupy")
    k = np.random.default_rng(0).standard_normal((2, 3, 100, 96)).astype(np.float32)
    every: tuple[dict[str, Any], ...] = (
        {"per": "tensor"},
        {"per": "block", "block": 16, "rotate": True},
        {"per": "token", "dtype": "e5m2"},
    )
    for options in every:
        expected, expected_scale = cuflash.quantize(k, **options)
        k8, scale = cuflash.quantize(cupy.asarray(k), **options)
        np.testing.assert_allclose(scale.get(), expected_scale, rtol=1e-6)
        rotate = options.get("rotate", False)
        back = cuflash.dequantize(k8, scale, rotate=rotate).get()
        np.testing.assert_allclose(back, cuflash.dequantize(expected, expected_scale, rotate=rotate), atol=0.2)
        np.testing.assert_allclose(back, k, atol=0.4)


def test_a_cache_that_grows_is_read_to_its_end():
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 8, 1, 64)).astype(np.float16)
    k8, k_scale = cuflash.quantize(rng.standard_normal((1, 2, 1300, 64)).astype(np.float32))
    q_device, k_device = cupy.asarray(q), cuflash.fp8(cupy.asarray(k8.view(np.uint8)), "e4m3")
    for n in (600, 601, 640, 641, 1299, 1300):
        keys = k_device[:, :, :n]
        out = cuflash.attention(q_device, keys, keys, k_scale=cupy.asarray(k_scale), v_scale=1.0).get()
        expected = cuflash.attention(q, k8[:, :, :n], k8[:, :, :n], k_scale=k_scale, v_scale=1.0)
        np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), atol=2, rtol=4e-3)
