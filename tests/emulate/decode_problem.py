"""A decode problem, whose keys blocks split, and which kernel combines the partial results."""

from unittest import mock

import cuflash.testing as ct

CASE = ct.Case(
    seqlen_q=3,
    seqlen_k=300,
    batch=2,
    num_heads=8,
    num_heads_kv=2,
    head_dim=72,
    head_dim_v=40,
    dtype="float16",
    causal=True,
    kv_lengths=(299, 130),
    seed=1,
)


def combined(*, by_blocks):
    """Plans let the last block of a head combine results, however many, or helpers/split_combine.cu, however few."""
    return mock.patch("cuflash.plan.key_splits.COMBINE_PIECES", 2**20 if by_blocks else 0)
