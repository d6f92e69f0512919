"""Rows whose scores are large: masked by finite numbers, by the lowest ones, or of large products.

What the oracle notices here: weights in the backward pass that do not sum to 1, because lse is rounded to one number; a
finite bias that becomes -inf, because it is multiplied by log2(e); equal scores that have unequal weights, because the
maximum is rounded in another way than the scores of other tiles of keys.
"""

from dataclasses import replace

import pytest

import cuflash.testing as ct
from cuflash.plan.sm80.tiles import BackwardTile, ForwardTile
from cuflash.plan.sm90.tiles import BackwardSm90Tile, ForwardSm90Tile
from tests.emulate.mutants.trial import Trial

pytestmark = pytest.mark.one_in(3)

_SM80 = ForwardTile(
    element_bytes=2,
    warps_d=1,
    max_dim=128,
    block_m=64,
    block_n=32,
    num_warps=4,
    num_stages=1,
    min_blocks=1,
    fragments_ahead=2,
    origin="of a trial",
)
_SM90 = ForwardSm90Tile(
    max_dim=256, block_m=128, block_n=64, num_stages=2, ping_pong=True, q_stages=1, serves="bias", origin="of a trial"
)
_BACKWARD = BackwardTile(
    element_bytes=2,
    max_dim=128,
    block_m=32,
    block_n=64,
    num_warps=4,
    num_stages=2,
    min_blocks=1,
    warps_d=1,
    dq_warps_m=2,
    fragments_ahead=1,
    origin="of a trial",
)
_BACKWARD_SM90 = BackwardSm90Tile(
    max_dim=128, block_m=64, block_n=128, num_stages=2, schedule="kHoldK", origin="of a trial"
)
# Several tiles of keys. Some rows are masked throughout, others in some of the keys.
MASKED = ct.Case(
    seqlen_q=70,
    seqlen_k=264,
    num_heads=2,
    num_heads_kv=1,
    head_dim=32,
    dtype="float16",
    bias=(1, 2, 70, 264),
    bias_mask=-1e9,
)
EQUAL = replace(MASKED, distinct_keys=1)
LOWEST = replace(MASKED, bias_mask=-1.7e308, distinct_keys=1)
LOWEST_OF_KEYS = replace(MASKED, bias=(1, 2, 1, 264), bias_mask=-1.7e308)  # all keys of the first head
LARGE_PRODUCTS = replace(MASKED, bias=None, bias_mask=0.0, score_mean=1e6)

TRIALS = {
    f"{pass_}{kind} {name}": Trial(case=case, tiles=(tile,))
    for pass_, kind, tile in (
        ("forward", "", _SM80),
        ("forward", " sm90", _SM90),
        ("backward", "", _BACKWARD),
        ("backward", " sm90", _BACKWARD_SM90),
    )
    for name, case in (
        ("masked", MASKED),
        ("masked alike", EQUAL),
        ("lowest bias", LOWEST),
        ("lowest bias of keys", LOWEST_OF_KEYS),
        ("large products", LARGE_PRODUCTS),
    )
    if pass_ == "backward" or case is not LARGE_PRODUCTS
}


@pytest.mark.parametrize("trial", TRIALS)
def test_rows_of_large_scores_agree_with_the_oracle(trial):
    TRIALS[trial].run()
