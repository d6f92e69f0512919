"""Batch axes, and arrays that broadcast along them, on every backend: by the oracle rule, with all gradients."""

from typing import Any

import pytest

import cuflash.testing as ct
from tests.backends import CORE, DEVICE, FALLBACK, on_backends

SIZES: dict[str, Any] = {"num_heads": 2, "num_heads_kv": 1, "seqlen_q": 70, "seqlen_k": 140, "head_dim": 32}
ROWS: dict[str, Any] = {"axes": (2, 3), "bias": (2, 1, 2, 70, 140), "mask": (2, 3, 1, 1, 140)}
STRUCTURES: dict[str, Any] = {"axes": (2, 1, 2), "mask": (2, 1, 1, 1, 1, 140)}
CASES: dict[str, dict[str, Any]] = {
    "rows share a bias": ROWS | {"layout": "bshd"},
    "and k and v": ROWS | {"bias_dtype": "input", "batch_axes": (("k", (2, 1)), ("v", (1, 1)))},
    "and q": ROWS | {"batch_axes": (("q", (3,)),)},
    "structures share q": STRUCTURES | {"batch_axes": (("q", (2,)),)},
}


@on_backends({"emulated 9.0": ("bfloat16",), "emulated 8.0": ("float16",), DEVICE: ("bfloat16", "float16")}, emulated=2)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_arrays_are_shared(backend, dtype, name, deterministic):
    for _ in range(2 if backend.name == DEVICE else 1):  # the second time launches are remembered
        backend.judge(ct.Case(**SIZES | CASES[name], dtype=dtype), deterministic=deterministic)


@on_backends((CORE, FALLBACK, DEVICE))
def test_options_together(backend):
    features = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", *(() if backend.name == DEVICE else ("lengths",)))
    small = {"max_seqlen": 40, "max_head_dim": 24, "max_scores": 2**13}
    drawn: dict[str, Any] = {"max_head_dim": 128, "max_scores": 2**16} if backend.name == DEVICE else small
    backend.draw(60, backend.judge, case=ct.with_axes(ct.cases(ndims=(4,), features=features, **drawn)))
