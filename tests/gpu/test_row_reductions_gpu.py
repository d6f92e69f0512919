"""Row reductions and their gradients on the device against the oracle."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from tests.row_reductions import gap_is_clear, results_of
from tests.sampling import examples

pytestmark = pytest.mark.gpu

BOTH = ("max", "entropy")
FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", "packed", "lengths")
OPTIONS = [
    {},
    {"causal": True, "sinks": True, "dropout": 0.2},
    {"softcap": 5.0, "window": (40, 9)},
    {"bias": (1, 4, 300, 1000), "bias_holes": True, "mask": (300, 1000)},
    {"head_dim": 128, "score_spread": 8.0},
    {"head_dim": 256, "has_values": False, "dlse": True},
    {"cu_seqlens_q": (0, 40, 300), "cu_seqlens_k": (0, 90, 950), "causal": True},
]


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def judge(case, cupy):
    found = results_of(case, cupy.asarray)
    ct.assert_forward(case, **found.forward)
    ct.assert_backward(case, **found.gradients)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_oracle(cupy, dtype, options):
    sizes = {"seqlen_q": 300, "seqlen_k": 1000, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
    judge(ct.Case(**sizes | {"dtype": dtype, "row_reductions": BOTH} | options), cupy)


@settings(max_examples=examples(40), deadline=None)
@given(
    case=ct.cases(features=FEATURES, max_seqlen=260, max_head_dim=130, max_scores=2**14),
    want=st.sampled_from((BOTH, ("max",), ("entropy",))),
)
def test_options_together(cupy, case, want):
    case = replace(case, row_reductions=want)
    assume("max" not in want or gap_is_clear(case))
    judge(case, cupy)
