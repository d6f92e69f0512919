"""Row reductions by the kernels in the emulator, by the oracle rule."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from tests.emulate.checks import judge_row_reductions
from tests.row_reductions import gap_is_clear
from tests.sampling import examples, sample

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", "packed", "lengths")
BOTH = ("max", "entropy")
SIZES: dict[str, Any] = {"seqlen_q": 113, "seqlen_k": 203, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "dropout": 0.2, "sinks": True},
    {"softcap": 5.0, "alibi_slopes": (4,), "window": (40, 9)},
    {"bias": (1, 4, 113, 203), "bias_holes": True, "mask": (113, 203), "head_dim": 128},
    {"block_mask": (4,), "block_size": (32, 64), "head_dim": 192},
    {"cu_seqlens_q": (0, 40, 113), "cu_seqlens_k": (0, 90, 200), "head_dim": 16},
    {"seqlen_q": 1, "seqlen_k": 1300, "num_heads": 8, "num_heads_kv": 1, "scale": -0.2},
    {"kv_dtype": "float8_e4m3fn", "k_scale": "token", "seqlen_q": 3, "seqlen_k": 900},
    {"page_size": 16, "seqlen_k": 208},
    {"softcap": 5.0, "score_spread": 20.0, "has_values": False},
    {"score_spread": 40.0, "seqlen_k": 400},  # rows whose maxima rise late
)


@pytest.mark.parametrize(
    ("case", "arch"),
    sample(
        [
            (ct.Case(**SIZES | {"dtype": dtype, "row_reductions": BOTH} | options), arch)
            for options in OPTIONS
            for dtype in ("bfloat16", "float16", "float32", "float64")
            for arch in ("8.0", "7.5", "9.0")
            if (dtype, arch) != ("float64", "7.5") and ("kv_dtype" not in options or dtype == "bfloat16")
        ]
        + [(ct.Case(**SIZES | {"dtype": "bfloat16", "row_reductions": BOTH, "head_dim": 384, "causal": True}), "9.0")],
        24,
    ),
    ids=str,
)
def test_every_option(case, arch):
    judge_row_reductions(case, arch)


@settings(max_examples=examples(8))
@given(
    case=ct.cases(features=FEATURES, max_seqlen=129, max_head_dim=96, max_scores=2**13),
    want=st.sampled_from((BOTH, ("max",), ("entropy",))),
    arch=st.sampled_from(("8.0", "9.0")),
    deterministic=st.booleans(),
)
def test_options_together(case, want, arch, deterministic):
    case = replace(case, row_reductions=want)
    assume("max" not in want or gap_is_clear(case))
    judge_row_reductions(case, arch, deterministic)
