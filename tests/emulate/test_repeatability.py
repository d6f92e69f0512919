"""Neither the schedule of threads nor what lies in memory changes a bit, where sums have a fixed order."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan.sm80.tiles import BACKWARD_TILES, DQ_TILES, FORWARD_TILES
from cuflash.plan.sm90.tiles import (
    BACKWARD_SM90_TILES,
    FORWARD_FLOAT32_SM90_TILES,
    FORWARD_SM90_TILES,
)
from tests.emulate import attention
from tests.emulate.attention import problem_of
from tests.emulate.checks import CASE, FEW_SMS, all_results
from tests.emulate.specialisations import FLOAT32_SM90_VARIANTS, SEVERAL_STAGES, name_of
from tests.judging import assert_oracle, bits

pytestmark = pytest.mark.one_in(12)


# One plan of one kernel after another, of several stages, of warps that share rows.
REPEATED = {
    "the first rows": {"forward_tiles": (FORWARD_TILES[0],), "backward_tiles": (BACKWARD_TILES[0], DQ_TILES[0])},
    "two stages, shared rows": {
        "forward_tiles": (SEVERAL_STAGES[0],),
        "backward_tiles": (
            max((tile for tile in BACKWARD_TILES if tile.element_bytes == 2), key=lambda tile: tile.warps_d),
            DQ_TILES[1],
        ),
    },
    "three stages, one stage back": {
        "forward_tiles": (SEVERAL_STAGES[1],),
        "backward_tiles": (
            min((tile for tile in BACKWARD_TILES if tile.element_bytes == 2), key=lambda tile: tile.num_stages),
            [tile for tile in DQ_TILES if tile.element_bytes == 2][-1],
        ),
    },
    "dq in turn": {"backward_tiles": (BACKWARD_SM90_TILES[0],)},
    "dq in turn, split roles": {"backward_tiles": (BACKWARD_SM90_TILES[-1],)},
    "three consumers": {"forward_tiles": (replace(FORWARD_SM90_TILES[2], ping_pong=True),)},
    "turns, output in the memory of Q": {"forward_tiles": (FORWARD_SM90_TILES[-1],)},
}


REPEATED_FLOAT32 = {name_of(tile): tile for tile in (*FORWARD_FLOAT32_SM90_TILES, *FLOAT32_SM90_VARIANTS)}


@pytest.mark.parametrize("tiles", REPEATED.values(), ids=REPEATED)
def test_the_schedule_changes_no_bit(tiles):
    """The forward pass always, the backward pass where it is deterministic, give the same bits."""
    first = all_results(CASE, deterministic=True, **tiles)
    assert_oracle(CASE, first)
    for schedule in SCHEDULES[1:]:
        assert bits(all_results(CASE, deterministic=True, schedule=schedule, **tiles)) == bits(first)


@pytest.mark.parametrize("heads", [{"num_heads": 8}, {"num_heads": 8, "num_heads_kv": 4}], ids=str)
@pytest.mark.parametrize("tile", BACKWARD_SM90_TILES, ids=name_of)
def test_the_batch_changes_no_bit_of_gradients_in_turn(tile, heads):
    """Some heads iterate backwards over the queries, after the others of all batch entries."""
    case = ct.Case(seqlen_q=200, seqlen_k=200, batch=2, head_dim=24, dtype="float16", causal=True, **heads)
    arrays = case.arrays()

    def gradients(batch):
        given = {name: x[batch] for name, x in arrays.items()}
        problem = problem_of(replace(case, batch=len(given["q"])), given, deterministic=True)
        out, lse = attention.forward(problem, given)
        return attention.backward(problem, given, out, lse, tiles=(tile,))

    together = gradients(slice(None))
    ct.assert_backward(case, *together)
    for batch in (slice(0, 1), slice(1, 2)):
        assert bits(gradients(batch)) == bits(x[batch] for x in together)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tiles", REPEATED.values(), ids=REPEATED)
def test_what_lies_in_memory_changes_no_bit(tiles, deterministic):
    """Results and scratch memory are written before they are read."""
    options: dict[str, Any] = {**tiles, "deterministic": deterministic}
    first = bits(all_results(CASE, **options, fill=0xFF))
    assert bits(all_results(CASE, **options, fill=0x00)) == first
    assert bits(all_results(CASE, **options, fill=0x3F)) == first


@pytest.mark.parametrize("tile", REPEATED_FLOAT32.values(), ids=REPEATED_FLOAT32)
def test_neither_schedule_nor_memory_change_a_bit_of_float32(tile):
    case = replace(CASE, dtype="float32")
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    first = attention.forward(problem, arrays, tiles=(tile,))
    ct.assert_forward(case, *first)
    for schedule, fill in itertools.product(SCHEDULES, (0xFF, 0x00, 0x3F)):
        again = attention.forward(problem, arrays, tiles=(tile,), schedule=schedule, fill=fill, arch=FEW_SMS)
        assert bits(again) == bits(first)
