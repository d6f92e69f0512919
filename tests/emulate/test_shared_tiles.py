"""Tiles of keys whose queries several blocks share, all of them or those of the last wave, against the oracle."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import backward
from cuflash.plan.sm90.tiles import BACKWARD_FLOAT32_SM90_TILES, BACKWARD_SM90_TILES
from cuflash.plan.tiles import Tile
from tests.emulate import attention

pytestmark = pytest.mark.one_in(12)


@pytest.fixture(autouse=True, scope="module")
def _sharing_is_free():
    """So that queries of tiles are shared, however few, and not heads of a group."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SPLIT_STEPS", "SUM_STEPS", "SUM_STEPS_PER_PARTIAL", "WAVES", "CAUSAL_WAVES"):
            patch.setattr(backward, name, 0)
        yield


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which kernels run, and what they are compiled for."""

    tile: Tile
    dtype: str = "bfloat16"
    causal: bool = False
    deterministic: bool = False
    packed: bool = False
    block_mask: tuple[int, ...] | None = None
    need: tuple[str, ...] = ("dq", "dk", "dv")

    def __str__(self):
        on = [x for x in ("causal", "deterministic", "packed", "block_mask") if getattr(self, x)]
        return "-".join((self.dtype, f"d{self.tile.max_dim}", *on, *(self.need if len(self.need) < 3 else ())))


SMALL, *_, LARGE = BACKWARD_SM90_TILES
CONFIGURATIONS = [
    Kernels(tile=SMALL),
    Kernels(tile=SMALL, causal=True, deterministic=True),
    Kernels(tile=SMALL, packed=True, deterministic=True),
    Kernels(tile=SMALL, block_mask=(2, 4)),
    Kernels(tile=SMALL, need=("dv",)),
    Kernels(tile=LARGE, deterministic=True),
    Kernels(tile=LARGE, causal=True, packed=True),
    Kernels(tile=BACKWARD_FLOAT32_SM90_TILES[0], dtype="float32"),
    Kernels(tile=BACKWARD_FLOAT32_SM90_TILES[0], dtype="float32", causal=True),
]


@settings(max_examples=3)
@pytest.mark.parametrize("what", CONFIGURATIONS, ids=str)
@given(data=st.data())
def test_against_the_oracle(what, data):
    lengths = st.sampled_from((1, 64, 65, 130, 200, 257))
    if what.packed:
        of_queries, of_keys = (data.draw(st.lists(lengths, min_size=2, max_size=2)) for _ in range(2))
        sizes = attention.packed_sizes(of_queries, of_keys)
    else:
        sizes = {"seqlen_q": data.draw(lengths), "seqlen_k": data.draw(lengths), "batch": 2}
    num_heads_kv = data.draw(st.sampled_from((2, 4)))
    case = ct.Case(
        **sizes,
        num_heads=4,
        num_heads_kv=num_heads_kv,
        head_dim=24,
        dtype=what.dtype,
        causal=what.causal,
        block_mask=what.block_mask,
        seed=data.draw(st.integers(0, 2**16)),
    )
    num_sms = data.draw(st.sampled_from((3, 5, 7, 132)))
    schedule = data.draw(st.sampled_from(SCHEDULES))
    plan, gradients = attention.gradients_of(case, what.tile, num_sms, schedule, what.deterministic, what.need)
    ct.assert_backward(case, *(gradients.get(name) for name in ("dq", "dk", "dv")))
    event(f"{plan.run_time.tail_splits} blocks share, whole tiles: {plan.run_time.whole_tiles > 0}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_sms", "whole", "splits"), [(5, 5, 5), (4, 4, 2), (24, 0, 4)])
def test_the_schedule_changes_no_bit(num_sms, whole, splits, causal):
    case = ct.Case(seqlen_q=300, seqlen_k=257, batch=2, head_dim=24, dtype="bfloat16", causal=causal)
    plan, first = attention.gradients_of(case, SMALL, num_sms, SCHEDULES[0], deterministic=True)
    assert plan.run_time.tail_splits > 1
    if not causal:
        assert (plan.run_time.whole_tiles, plan.run_time.tail_splits) == (whole, splits)
    ct.assert_backward(case, **first)
    for schedule in SCHEDULES[1:]:
        _, again = attention.gradients_of(case, SMALL, num_sms, schedule, deterministic=True)
        for name, gradient in first.items():
            np.testing.assert_array_equal(again[name], gradient)
