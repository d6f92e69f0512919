"""Reductions of the attention weights by the kernels in the emulator, by the oracle rule."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from tests.emulate.reduced import reduced
from tests.reductions import judge
from tests.sampling import examples, sample

FEATURES = (*ct.FEATURES, "sinks", "block_mask", "packed", "lengths")
SIZES: dict[str, Any] = {"seqlen_q": 113, "seqlen_k": 203, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "sinks": True},
    {"softcap": 5.0, "alibi_slopes": (4,), "window": (40, 9)},
    {"bias": (1, 4, 113, 203), "mask": (113, 203), "head_dim": 3},
    {"block_mask": (4,), "block_size": (32, 64), "head_dim": 192},
    {"cu_seqlens_q": (0, 40, 113), "cu_seqlens_k": (0, 90, 200), "head_dim": 1},
    {"score_mean": 3e3, "causal": True},
    {"seqlen_q": 1},
    {"kv_lengths": (77,), "layout": "bshd", "strides": "padded"},
)


@pytest.mark.parametrize(
    ("case", "arch"),
    sample(
        [
            (ct.Case(**SIZES | {"dtype": dtype} | options), arch)
            for options in OPTIONS
            for dtype in ("bfloat16", "float32", "float64")
            for arch in ("8.0", "7.5", "9.0")
            if (dtype, arch) != ("float64", "7.5")
        ],
        24,
    ),
    ids=str,
)
def test_every_option(case, arch):
    judge(case, *reduced(case, arch, 16 if case.dtype == "bfloat16" else 60))


@settings(max_examples=examples(16))
@given(
    ct.cases(features=FEATURES, max_seqlen=129, max_head_dim=96, max_scores=2**13),
    st.sampled_from(("8.0", "9.0")),
    st.sampled_from((1, 8, 33, 64)),
)
def test_options_together(case, arch, count):
    judge(case, *reduced(case, arch, count))
