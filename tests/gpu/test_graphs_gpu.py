"""Captured graphs of each feature: replays read all arrays as they are then, and nothing of them is on the host."""

from dataclasses import replace
from typing import Any

import pytest

import cuflash
import cuflash.testing as ct
from tests.emulate.attention import packed_sizes
from tests.judging import assert_oracle

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64, "dtype": "bfloat16"}
SHORT = {"seqlen_q": 113, "seqlen_k": 203}
NEED = ("dq", "dk", "dv")
PACKED = packed_sizes((300, 0, 65, 1, 128, 513), (300, 40, 129, 70, 0, 600), 77)
PAGES: dict[str, Any] = {
    "batch": 3, "num_heads": 8, "seqlen_k": 2048, "kv_lengths": (1, 1371, 2048), "dtype": "float16", "causal": True,
    "page_size": 64,
}  # fmt: skip
STARTS = tuple(range(0, 700, 100))
# Options, the gradients that are captured, and what is another before the second replay; dropout keeps its numbers.
GRAPHS: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any] | None]] = {
    "sinks": (SHORT | {"sinks": True}, (*NEED, "dsinks"), {}),
    "some gradients": (SHORT | {"bias": (203,)}, ("dv", "dbias", "dscale"), {}),
    "block mask": ({"seqlen_q": 700, "seqlen_k": 900, "block_mask": ()}, NEED, {}),
    "dropout": (SHORT | {"dtype": "float16", "dropout": 0.5}, (), None),
    # Other lengths of the same total.
    "packed": (PACKED | {"batch": 6, "causal": True}, (), {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}),
    # As a cache grows.
    "pages, one query": (PAGES | {"seqlen_q": 1}, (), {"kv_lengths": (1, 1000, 2010)}),
    "pages": (PAGES | {"seqlen_q": 300}, (), {"kv_lengths": (1, 1000, 2010)}),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_each_feature(cupy, capture, name):
    options, need, changes = GRAPHS[name]
    case = ct.Case(**SIZES | options)
    arrays = case.arrays(cupy.asarray)
    attn: Any = cuflash.FlashAttention(**case.keywords)
    inputs, optional, wanted = ct.qkv(arrays), ct.optional(arrays), {"need": need} if need else {}

    def both_passes():
        out, lse = attn.forward(*inputs, **optional, **case.random)
        if not need:
            return {"out": out, "lse": lse}
        gradients = attn.backward(arrays["dout"], *inputs, out, lse, **optional, **case.random, need=need)
        return {"out": out, "lse": lse, **gradients._asdict()}

    results, replay = capture(both_passes, lambda: attn.compile(*inputs, **optional, **wanted))
    replay()
    assert_oracle(case, results)
    if changes is not None:
        other = replace(case, seed=1, **changes)
        for name, x in other.arrays().items():
            arrays[name][: len(x)] = cupy.asarray(x)  # pools may have fewer pages
        replay()
        assert_oracle(other, results)
