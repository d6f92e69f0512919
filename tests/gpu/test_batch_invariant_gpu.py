"""``batch_invariant=True`` on the device: a sequence has the same bits alone and among any others."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from tests.invariance import BATCHINGS, assert_invariant, by_calls, sequences

pytestmark = pytest.mark.gpu

# What kernels are compiled for; sizes and values are drawn. Decode of packed sequences has other kernels.
MANY: dict[str, Any] = {"queries": (70, 97, 130, 300, 1000), "keys": (40, 129, 600, 2500), "most_pairs": 2**23}
FEW: dict[str, Any] = {"queries": (1, 2, 5), "keys": (5, 300, 1030, 9000), "most_pairs": 2**20}
KERNELS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "causal": ("bfloat16", 128, {"causal": True}, MANY, ("backward",)),
    "full": ("float16", 64, {}, MANY, ("backward",)),
    "wider": ("bfloat16", 256, {"causal": True}, MANY, ("backward",)),
    "window": ("bfloat16", 128, {"causal": True, "window": (300, None)}, MANY, ("backward",)),
    "softcap": ("bfloat16", 64, {"softcap": 3.0}, MANY, ("want",)),
    "float32": ("float32", 64, {"causal": True}, MANY, ("backward",)),
    "tangents": ("bfloat16", 64, {"causal": True}, MANY, ("tangents",)),
    "column sums": ("bfloat16", 64, {}, MANY, ("column_sums",)),
    "decode": ("bfloat16", 128, {"causal": True}, FEW, ()),
    "decode of float16, full": ("float16", 64, {}, FEW, ()),
    "decode of float32": ("float32", 64, {"causal": True}, FEW, ()),
    "decode of a window": ("bfloat16", 128, {"causal": True, "window": (2000, None)}, FEW, ()),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_sequence_has_the_same_bits_among_others(name):
    cupy = pytest.importorskip("cupy")
    dtype, dim, options, sizes, passes = KERNELS[name]
    batchings = BATCHINGS if sizes is MANY else tuple(x for x in BATCHINGS if x != "packed")

    def on_device(options, arrays, passes):
        found = by_calls(options, {name: cupy.asarray(x) for name, x in arrays.items()}, passes)
        return {name: x.get() for name, x in found.items()}

    @settings(max_examples=30)
    @given(sequences(dtypes=(dtype,), **sizes))
    def holds(drawn):
        # Pages of one size, because each is a kernel of its own.
        fixed = {"sinks": False, "slopes": False, "page_size": 64, "head_dim": dim, "head_dim_v": dim}
        assert_invariant(replace(drawn, options=options, **fixed), passes, on_device, batchings)

    holds()
