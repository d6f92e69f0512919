"""Problems of each feature, drawn with what goes with it: both passes and all gradients by the oracle rule."""

from dataclasses import replace

import pytest
from hypothesis import strategies as st

import cuflash.testing as ct
from tests.backends import CORE, FALLBACK, on_backends

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES)
OF_PACKED = ("causal", "window", "softcap", "scale", "alibi_slopes", "gqa", "head_dim_v", "sinks", "dlse")
OF_PAGES = ("causal", "window", "softcap", "bias", "mask", "alibi_slopes", "gqa", "head_dim_v", "sinks", "dropout")


def float8_cases(**options):
    """With fp8 k and v, and q too where out is of bfloat16."""

    def of_bytes(case, q_float8, q_scale):
        case = replace(case, kv_dtype=case.kv_dtype or "float8_e4m3fn", dlse=False)
        is_half = q_float8 and case.dtype == "bfloat16"
        return replace(case, q_float8=True, q_scale=q_scale) if is_half else case

    drawn = ct.cases(
        features=(*FEATURES, "dropout", "pages", "packed", "float8"), max_head_dim=80, min_seqlen=0, **options
    )
    is_half = st.just(True) if options else st.booleans()
    cases = st.builds(of_bytes, drawn, is_half, st.sampled_from((None, "tensor", "head", "block", "token")))
    return cases.filter(lambda case: not (case.page_size and case.block_mask is not None))


DRAWN = {
    "block masks": ct.cases(features=(*ct.FEATURES, "block_mask"), min_seqlen=0, max_head_dim=32).map(
        lambda case: replace(case, block_mask=case.block_mask or ())
    ),
    "diagonals that follow lengths": ct.cases(min_seqlen=0, features=(*FEATURES, "dropout", "lengths")),
    "dropout": ct.cases(features=(*FEATURES, "dropout"), min_seqlen=0).filter(lambda case: case.dropout > 0),
    "float8": float8_cases(),
    "float8 queries": float8_cases(dtypes=["bfloat16"]),
    "longer sequences": ct.cases(dtypes=["float32"], max_seqlen=1200, max_scores=2**19, max_head_dim=8),
    "packed": ct.cases(
        features=(*OF_PACKED, "packed", "dropout"), ndims=(3,), max_scores=2**14, min_seqlen=0
    ).filter(lambda case: case.cu_seqlens_q),
    "pages": ct.cases(features=(*OF_PAGES, "pages"), ndims=[4], max_head_dim=40).filter(lambda case: case.page_size),
}  # fmt: skip


@on_backends((CORE, FALLBACK))
@pytest.mark.parametrize("feature", DRAWN)
def test_each_feature(backend, feature):
    backend.draw(100, backend.judge, case=DRAWN[feature])
