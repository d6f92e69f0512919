"""The trials of reductions of the attention weights."""

from dataclasses import replace

import cuflash.testing as ct
from tests.emulate.mutants.trial import ReductionTrial

_COLUMNS = ct.Case(
    seqlen_q=290, seqlen_k=200, num_heads=2, num_heads_kv=1, head_dim=40, dtype="bfloat16", window=(90, 20), seed=2
)
_SM90 = replace(_COLUMNS, seqlen_q=650, head_dim=64, window=(None, 460))
_TOP = ct.Case(seqlen_q=70, seqlen_k=300, num_heads=2, head_dim=40, dtype="bfloat16", seed=3)

TRIALS = {
    "columns": ReductionTrial(case=_COLUMNS, count=1),
    "columns large": ReductionTrial(case=replace(_COLUMNS, score_mean=3e3), count=1),
    "columns sm90": ReductionTrial(case=_SM90, arch="9.0", count=1),
    "top": ReductionTrial(case=_TOP),
    "top ties": ReductionTrial(case=replace(_TOP, distinct_keys=7)),
    "top equal": ReductionTrial(case=replace(_TOP, distinct_keys=1)),
    "top many": ReductionTrial(case=_TOP, count=60),
    # Of far more keys than there are places of maxima, the strongest ones are neighbours.
    "top near": ReductionTrial(case=replace(_TOP, seqlen_q=30, seqlen_k=700, alibi_slopes=(2,)), count=13),
    "top sm90": ReductionTrial(case=replace(_TOP, seqlen_q=290, head_dim=72), arch="9.0"),
    "top sm90 packed": ReductionTrial(
        case=replace(_TOP, batch=2, ndim=3, cu_seqlens_q=(0, 30, 70), cu_seqlens_k=(0, 100, 290)), arch="9.0"
    ),
    "top packed": ReductionTrial(
        case=replace(_TOP, batch=2, ndim=3, causal="top_left", cu_seqlens_q=(0, 30, 70), cu_seqlens_k=(0, 100, 290))
    ),
}
