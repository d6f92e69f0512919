"""Strategies of problems with wide heads, for the emulator and for devices."""

from typing import Any

from hypothesis import strategies as st

import cuflash.testing as ct

DIMS = (320, 512, 576)


@st.composite
def cases(draw, longest: int = 400, dims: tuple[int, ...] = DIMS) -> ct.Case:
    """Many queries. Scores of a large spread let weights outgrow their offsets."""
    num_heads_kv = draw(st.integers(1, 2))
    seqlen_k = draw(st.one_of(st.integers(1, longest), st.sampled_from((128, 129, 256))))
    return ct.Case(
        **_dims(draw, dims),
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(st.one_of(st.integers(1, longest), st.sampled_from((64, 65, 128, 129)))),
        seqlen_k=seqlen_k,
        num_heads=num_heads_kv * draw(st.integers(1, 2)),
        num_heads_kv=num_heads_kv,
        sinks=draw(st.booleans()),
    )


@st.composite
def decode_cases(draw, longest: int = 1000, dims: tuple[int, ...] = DIMS) -> ct.Case:
    """Few queries, as rows of one block, or of two."""
    seqlen_q = draw(st.sampled_from((1, 2, 4, 8)))
    seqlen_k = draw(st.integers(512, longest))
    batch = draw(st.integers(1, 2))
    return ct.Case(
        **_dims(draw, dims),
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=2 * draw(st.integers(2, 128 // seqlen_q)),
        num_heads_kv=2,
        kv_lengths=draw(st.one_of(st.none(), st.tuples(*[st.integers(0, seqlen_k)] * batch))),
        sinks=draw(st.booleans()),
    )


def _dims(draw, dims: tuple[int, ...]) -> dict[str, Any]:
    return {
        "head_dim": draw(st.sampled_from(dims)),
        "head_dim_v": draw(st.sampled_from((64, 72, 192, 256, 320, 512))),
        "dtype": draw(st.sampled_from(("float16", "bfloat16"))),
        "causal": draw(st.booleans()),
        "score_spread": draw(st.sampled_from((1.0, 3.0))),
        "seed": draw(st.integers(0, 99)),
    }
