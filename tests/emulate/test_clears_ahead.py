"""Accumulators of dq that blocks of other heads clear, against the oracle."""

from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import backward, choose, sm90
from cuflash.plan.sm90.tiles import BACKWARD_SM90_TILES
from cuflash.plan.tiles import Tile
from tests.emulate import attention

pytestmark = pytest.mark.one_in(8)


@pytest.fixture(autouse=True, scope="module")
def _few_heads_side_by_side():
    """So that most problems have heads after them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90.backward, "BACKWARD_HEAD_SECTION", 1)
        for module in (choose, sm90.backward):
            patch.setattr(module, "CAUSAL_HEAD_SECTION", 3)
        for name in ("SPLIT_STEPS", "SUM_STEPS", "SUM_STEPS_PER_PARTIAL"):
            patch.setattr(backward, name, 0)
        yield


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which kernels run, and what they are compiled for."""

    tile: Tile
    causal: bool = False
    window: tuple[int, int] | None = None
    deterministic: bool = False
    packed: bool = False
    num_heads_kv: tuple[int, ...] = (1, 2, 3)
    num_sms: tuple[int, ...] = (1, 3, 5)
    need: tuple[str, ...] = ("dq", "dk", "dv")

    def __str__(self):
        on = [x for x in ("causal", "window", "deterministic", "packed") if getattr(self, x)]
        return "-".join((f"d{self.tile.max_dim}", *on, *(self.need if len(self.need) < 3 else ())))


SMALL, *_, LARGE = BACKWARD_SM90_TILES
CONFIGURATIONS = [
    Kernels(tile=SMALL),
    Kernels(tile=SMALL, deterministic=True, num_sms=(1, 2)),
    Kernels(tile=SMALL, causal=True, deterministic=True),
    Kernels(tile=SMALL, window=(30, 20), deterministic=True),
    Kernels(tile=SMALL, causal=True, need=("dq",)),
    Kernels(tile=SMALL, packed=True, num_heads_kv=(2, 3, 5)),
    Kernels(tile=SMALL, causal=True, deterministic=True, packed=True, num_heads_kv=(2, 3, 5)),
    Kernels(tile=LARGE, causal=True),
    # One of eight heads iterates backwards, and sixteen of these are side by side.
    Kernels(tile=LARGE, causal=True, deterministic=True, num_heads_kv=(8, 9)),
]


@settings(max_examples=3)
@pytest.mark.parametrize("what", CONFIGURATIONS, ids=str)
@given(data=st.data())
def test_against_the_oracle(what, data):
    lengths = st.sampled_from((1, 64, 65, 130, 200))
    num_heads_kv = data.draw(st.sampled_from(what.num_heads_kv))
    if what.packed:
        of_queries, of_keys = (data.draw(st.lists(lengths, min_size=3, max_size=3)) for _ in range(2))
        sizes = attention.packed_sizes(of_queries, of_keys)
    else:
        sizes = {"seqlen_q": data.draw(lengths), "seqlen_k": data.draw(lengths), "batch": data.draw(st.integers(2, 4))}
    case = ct.Case(
        **sizes,
        num_heads=num_heads_kv * data.draw(st.sampled_from((1, 2) if num_heads_kv < 8 else (1,))),
        num_heads_kv=num_heads_kv,
        head_dim=24,
        dtype="bfloat16",
        causal=what.causal,
        window=what.window,
        seed=data.draw(st.integers(0, 2**16)),
    )
    num_sms, schedule = data.draw(st.sampled_from(what.num_sms)), data.draw(st.sampled_from(SCHEDULES))
    plan, gradients = attention.gradients_of(case, what.tile, num_sms, schedule, what.deterministic, what.need)
    ct.assert_backward(case, *(gradients.get(name) for name in ("dq", "dk", "dv")))
    run_time = plan.run_time
    event(f"ahead {run_time.clear_ahead > 0}")
    event(f"group shared {run_time.group_splits > 1}, tiles shared {run_time.tail_splits > 1}")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_block_clears(deterministic, schedule):
    case = ct.Case(seqlen_q=130, seqlen_k=200, batch=2, num_heads=6, num_heads_kv=3, head_dim=24, dtype="bfloat16")
    plan, gradients = attention.gradients_of(case, SMALL, 1, schedule, deterministic)
    assert plan.run_time.clear_ahead == 1
    ct.assert_backward(case, **gradients)
