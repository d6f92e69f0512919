"""Strategies of problems with biases and ALiBi slopes, for devices."""

from hypothesis import strategies as st

import cuflash.testing as ct


@st.composite
def cases_of_float32(draw, longest: int = 700) -> ct.Case:
    """float32 that is split into bf16 terms on compute capability 9.0.

    A per-pair bias that TMA can read, or cannot, a bias of keys, a mask of keys, slopes.
    """
    sizes = {"batch": draw(st.integers(1, 2)), "num_heads": 2}
    seqlen_q, seqlen_k = (draw(st.integers(256, longest)) for _ in "qk")
    some = {
        "batch": draw(st.sampled_from((1, sizes["batch"]))),
        "heads": draw(st.sampled_from((1, sizes["num_heads"]))),
    }
    if draw(st.integers(0, 3)):
        seqlen_k = seqlen_k // 4 * 4  # rows of a bias are then multiples of 16 bytes
    head_dim = draw(st.sampled_from((16, 32, 64, 72, 128)))
    return ct.Case(
        **sizes,
        num_heads_kv=draw(st.integers(1, 2)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from((head_dim, 32, 128))),
        dtype="float32",
        causal=draw(st.booleans()),
        softcap=draw(st.sampled_from((None, None, 5.0))),
        bias=draw(st.sampled_from((None, (*some.values(), seqlen_q, seqlen_k), (*some.values(), 1, seqlen_k)))),
        bias_holes=draw(st.booleans()),
        mask=draw(st.sampled_from((None, (*some.values(), 1, seqlen_k)))),
        alibi_slopes=draw(st.sampled_from((None, None, (sizes["num_heads"],)))),
        kv_lengths=draw(st.one_of(st.none(), st.tuples(*[st.integers(0, seqlen_k)] * sizes["batch"]))),
        score_spread=draw(st.sampled_from((1.0, 8.0))),
        seed=draw(st.integers(0, 99)),
    )
