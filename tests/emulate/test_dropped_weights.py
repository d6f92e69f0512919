"""What the kernels drop, weight by weight: the same on every device, in every tile and both passes as on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.plan.sm80.tiles import BACKWARD_TILES, DQ_TILES, FORWARD_TILES
from cuflash.plan.sm90.tiles import (
    BACKWARD_FLOAT32_SM90_TILES,
    BACKWARD_SM90_TILES,
    BACKWARD_TF32_SM90_TILES,
    FORWARD_FLOAT32_SM90_TILES,
    FORWARD_SM90_TILES,
    FORWARD_TF32_SM90_TILES,
)
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, problem_of
from tests.emulate.checks import CASE, all_results
from tests.emulate.specialisations import name_of
from tests.judging import assert_oracle, assert_within, bits

pytestmark = pytest.mark.one_in(8)

DTYPES = {2: "float16", 4: "float32", 8: "float64"}


def one_of_each_type(tiles):
    """Rows whose warps, or warpgroups, hold the weights in different ways."""

    def kind(tile):
        own = [
            getattr(tile, name, 0) for name in ("warps_d", "bf16_terms", "splits_roles", "dk_from_shared", "q_stages")
        ]
        return type(tile), tile.element_bytes, *own

    return tuple({kind(tile): tile for tile in tiles}.values())


FORWARD = one_of_each_type((*FORWARD_TILES, *FORWARD_SM90_TILES, *FORWARD_FLOAT32_SM90_TILES, *FORWARD_TF32_SM90_TILES))
BACKWARD = one_of_each_type(
    (*BACKWARD_TILES, *BACKWARD_SM90_TILES, *BACKWARD_FLOAT32_SM90_TILES, *BACKWARD_TF32_SM90_TILES)
)


def case_of(tile, **sizes):
    """Two batch entries of two heads, whose weights are all alike, and fit into the head dimension of a tile."""
    return ct.Case(
        batch=2,
        num_heads=2,
        head_dim=16,
        dtype=DTYPES[tile.element_bytes],
        scale=0.0,
        dropout=0.4,
        seed=tile.block_m + tile.num_warps,
        **sizes,
    )


def precision_of(tile):
    return "tf32" if getattr(tile, "bf16_terms", 3) == 2 else "highest"


def long_name_of(tile):
    return f"{type(tile).__name__}-{name_of(tile)}-{precision_of(tile)}"


@pytest.mark.parametrize("tile", FORWARD, ids=long_name_of)
def test_bits_of_the_forward_pass(tile):
    """V is the identity: the output is the weights."""
    n = min(tile.max_dim, 128)
    case = case_of(tile, seqlen_q=tile.block_m + 37, seqlen_k=n, head_dim_v=n)
    arrays = case.arrays()
    arrays["v"] = np.broadcast_to(np.eye(n), (2, 2, n, n)).astype(arrays["v"].dtype)
    problem = problem_of(case, arrays, precision=precision_of(tile))
    out, _ = attention.forward(problem, arrays, tiles=(tile,), **case.random)
    mask = cuflash.dropout_mask(**case.random, batch=2, num_heads=2, seqlen_q=case.seqlen_q, seqlen_k=n, rate=0.4)
    np.testing.assert_array_equal(out != 0, mask)


@pytest.mark.parametrize("tile", BACKWARD, ids=long_name_of)
def test_bits_of_the_backward_pass(tile):
    """dO is the identity: dV is the transposed weights. Query heads share keys, so it is of one head at a time."""
    n = min(tile.max_dim, 128)
    case = replace(case_of(tile, seqlen_q=n, seqlen_k=tile.block_n + 37, head_dim_v=n), num_heads_kv=1)
    arrays = case.arrays()
    mask = cuflash.dropout_mask(**case.random, batch=2, num_heads=2, seqlen_q=n, seqlen_k=case.seqlen_k, rate=0.4)
    # Of one SM, or of many, where blocks share the query heads.
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=1 + BACKWARD.index(tile) % 2 * 131)
    problem = problem_of(case, arrays, precision=precision_of(tile))
    out, lse = forward_by_oracle(problem, arrays, **case.random)
    for head in range(2):
        arrays["dout"][...] = 0
        arrays["dout"][:, head] = np.eye(n)
        _, _, dv = attention.backward(problem, arrays, out, lse, tiles=(tile,), arch=device, **case.random)
        np.testing.assert_array_equal(dv[:, 0] != 0, mask[:, head].swapaxes(1, 2))


# Where no result shows the weights one by one.
ROWS = {
    **{
        f"dq {name_of(tile)}": {"backward_tiles": (BACKWARD_TILES[0], tile), "deterministic": True}
        for tile in one_of_each_type(tile for tile in DQ_TILES if tile.element_bytes == 2)
    },
    **{
        f"in turn {name_of(tile)}": {"backward_tiles": (tile,), "deterministic": True}
        for tile in one_of_each_type(BACKWARD_SM90_TILES)
    },
}


@pytest.mark.parametrize("tiles", ROWS.values(), ids=ROWS)
@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_gradients_of_queries(tiles, data):
    case = replace(CASE, dropout=data.draw(st.sampled_from([0.1, 0.5, 0.9])), seed=data.draw(st.integers(0, 2**16)))
    schedule = data.draw(st.sampled_from(SCHEDULES))
    assert_oracle(case, all_results(case, schedule=schedule, **tiles))


def test_no_rate_is_no_dropout():
    """A rate that is rounded to zero needs a seed, and gives the bits of no dropout."""
    case = replace(CASE, dropout=1e-6)
    assert bits(all_results(case, deterministic=True)) == bits(all_results(CASE, deterministic=True))


def test_other_seeds_and_offsets_drop_other_weights():
    case = replace(CASE, dropout=0.5)
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    seen = set()
    for seed, offset in ((0, 0), (1, 0), (2**32, 0), (0, 1), (0, 2**31)):
        out, lse = attention.forward(problem, arrays, seed=seed, offset=offset)
        inputs = {name: x for name, x in arrays.items() if name != "dout"}
        yardsticks = ct.yardsticks(problem, inputs, seed=seed, offset=offset)
        assert_within({"out": out, "lse": lse}, yardsticks)
        seen.add(out.tobytes())
    assert len(seen) == 5
