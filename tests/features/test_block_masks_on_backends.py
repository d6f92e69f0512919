"""Block masks on every backend: all blocks, none, and what lies in rows and keys that no block shows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash.testing as ct
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.judging import assert_oracle, assert_within

BOTH = ("max", "entropy")
DTYPES = ("float16", "bfloat16", "float32", "float64")
SIZES: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64, "block_mask": ()}
every_backend = on_backends(
    {
        CORE: ("float32", "bfloat16"),
        FALLBACK: ("float32", "bfloat16"),
        "emulated 8.0 of 1 SMs": ("float16", "float32"),
        "emulated 9.0 of 1 SMs": ("bfloat16", "float32"),
        DEVICE: DTYPES,
    },
    emulated=8,
)


def case_of(backend, dtype, block):
    """On a device whole tiles of every kernel lie around what a block of 256 rows and keys hides."""
    on_device = {"seqlen_q": 700, "seqlen_k": 900, "block_size": (2 * block, 2 * block)}
    small = {"seqlen_q": 300, "seqlen_k": 400, "num_heads": 2, "num_heads_kv": 1, "block_size": (block, block)}
    return ct.Case(**SIZES | (on_device if backend.name == DEVICE else small), dtype=dtype, blocks_kept=1.0)


@every_backend
def test_all_blocks_are_all_pairs_and_no_block_is_none(backend, dtype):
    case = case_of(backend, dtype, 64)
    arrays = case.arrays()
    blocks = arrays["block_mask"]
    everything = backend.results(case, arrays | {"block_mask": np.ones_like(blocks)})
    assert_oracle(replace(case, block_mask=None), everything)
    nothing = backend.results(case, arrays | {"block_mask": np.zeros_like(blocks)})
    assert np.isneginf(nothing.pop("lse")).all()
    assert not any(x.any() for x in nothing.values())


@every_backend
def test_hidden_blocks_take_no_part(backend, dtype):
    """What lies in rows and keys that no block shows is NaN, and reaches nothing that a row attends to."""
    case = case_of(backend, dtype, 128)
    arrays = case.arrays()
    arrays["block_mask"][1], arrays["block_mask"][:, 1] = False, False
    yardsticks = ct.yardsticks(case.problem, arrays)
    for name in ("q", "k", "v", "dout"):
        arrays[name][:, :, slice(320, 448) if backend.name == DEVICE else slice(128, 256)] = np.nan
    assert_within(backend.results(case, arrays), yardsticks)


@every_backend
@pytest.mark.parametrize(
    "own", [{"bias": (4, 300, 330)}, {"softcap": 5.0, "sinks": True}, {"row_reductions": BOTH}], ids=str
)
def test_every_gradient_of_whole_blocks(backend, dtype, own):
    """Pairs of such blocks are looked up by no kernel, those that make other gradients than dq, dk and dv included."""
    sizes = {"seqlen_q": 300, "seqlen_k": 330, "block_mask": (4,), "block_size": (128, 128), "blocks_kept": 0.5}
    backend.judge(ct.Case(**SIZES | sizes | own, dtype=dtype))


@on_backends({DEVICE: DTYPES})
def test_results_are_repeatable(backend, dtype):
    sizes = {"seqlen_q": 1500, "seqlen_k": 1500, "causal": True, "block_mask": (2, 4)}
    case = ct.Case(**SIZES | sizes, dtype=dtype)
    first = backend.results(case, deterministic=True)
    for _ in range(3):
        for name, x in backend.results(case, deterministic=True).items():
            np.testing.assert_array_equal(x, first[name])
