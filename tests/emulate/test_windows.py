"""Windows on compute capability 9.0: what consumers pass over, the tests of each edge, and the order of tiles."""

from dataclasses import replace
from typing import Any

import pytest

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.plan.sm90.tiles import BACKWARD_SM90_TILES, FORWARD_SM90_TILES
from cuflash.spec.passes import BACKWARD
from tests.emulate import attention
from tests.emulate.attention import packed_sizes, problem_of
from tests.emulate.checks import FEW_SMS, all_results
from tests.emulate.specialisations import name_of
from tests.judging import assert_oracle, bits

pytestmark = pytest.mark.one_in(48)

SERVES = ("window", "long window", "no pairs", "few bounded", "lists")
FORWARD = tuple(tile for tile in FORWARD_SM90_TILES if tile.serves in SERVES)
# Wider and narrower than tiles, at their edges and between them, and of sequences that end within tiles.
WINDOWS: dict[str, dict[str, Any]] = {
    "a key": {"seqlen_q": 200, "seqlen_k": 200, "window": (0, 0)},
    "half a tile": {"seqlen_q": 330, "seqlen_k": 330, "window": (63, 0)},
    "a tile": {"seqlen_q": 390, "seqlen_k": 390, "window": (127, 0)},
    "more than a tile": {"seqlen_q": 400, "seqlen_k": 400, "window": (150, 0)},
    "two tiles": {"seqlen_q": 520, "seqlen_k": 520, "window": (255, 0)},
    "both sides": {"seqlen_q": 450, "seqlen_k": 450, "window": (70, 90)},
    "later keys": {"seqlen_q": 140, "seqlen_k": 470, "window": (130, 3)},
    "more queries": {"seqlen_q": 470, "seqlen_k": 140, "window": (100, 20)},
    "more queries, of the first keys": {"seqlen_q": 470, "seqlen_k": 190, "window": (100, 0), "causal": "top_left"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"num_heads": 6, "num_heads_kv": 2},
    "lengths": {"batch": 3, "kv_lengths": (70, 131, 0), "num_heads": 2, "num_heads_kv": 1},
    "slopes": {"num_heads": 2, "num_heads_kv": 1, "alibi_slopes": (2,)},
    "bias of keys": {"num_heads": 2, "num_heads_kv": 1, "bias": (1, 1, "seqlen_k")},
    "dropout": {"dropout": 0.2},
    "softcap": {"softcap": 3.0, "num_heads": 2, "num_heads_kv": 1},
}


def case_of(window: str, options: str, **others: Any) -> ct.Case:
    sizes = WINDOWS[window]
    given = dict(OPTIONS[options])
    if "bias" in given:
        given["bias"] = tuple(sizes.get(n, n) for n in given["bias"])
    return ct.Case(**{"head_dim": 16, "dtype": "bfloat16", **sizes, **given, **others})


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tile", FORWARD, ids=name_of)
def test_forward(tile, window, options):
    case = case_of(window, options, **{"head_dim": tile.max_dim} if options == "plain" else {})
    arrays = case.arrays()
    results = attention.forward(problem_of(case, arrays), arrays, tiles=(tile,), arch=FEW_SMS, **case.random)
    ct.assert_forward(case, *results)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tile", BACKWARD_SM90_TILES, ids=name_of)
def test_backward(tile, window, options, deterministic):
    case = case_of(window, options, **{"head_dim": tile.max_dim} if options == "plain" else {})
    results = all_results(case, arch=FEW_SMS, backward_tiles=(tile,), deterministic=deterministic)
    assert_oracle(case, results)


@pytest.mark.parametrize("window", [(63, 0), (100, 0), (30, 40)], ids=str)
@pytest.mark.parametrize("tile", BACKWARD_SM90_TILES[:2], ids=name_of)
def test_packed_sequences(tile, window):
    sizes = packed_sizes((130, 70, 0, 200), (130, 190, 40, 65), 10)
    case = ct.Case(**sizes, num_heads=2, num_heads_kv=1, head_dim=16, dtype="float16", window=window)
    assert_oracle(case, all_results(case, arch=FEW_SMS, backward_tiles=(tile,)))


@pytest.mark.parametrize("tile", BACKWARD_SM90_TILES[:2], ids=name_of)
def test_blocks_that_share_queries(tile):
    """A split may begin or end with a tile that a bound cuts."""
    case = ct.Case(seqlen_q=1500, seqlen_k=1500, head_dim=16, dtype="bfloat16", window=(1300, 0))
    arrays = case.arrays()
    device = DeviceSpec.for_arch("9.0")
    plan = attention.plan_for(problem_of(case, arrays), BACKWARD, arrays, device, (tile,))
    assert plan.run_time.tail_splits > 1
    assert_oracle(case, all_results(case, arch=device, backward_tiles=(tile,)))


@pytest.mark.parametrize("tile", BACKWARD_SM90_TILES[:2], ids=name_of)
def test_results_do_not_depend_on_the_order_of_blocks(tile):
    case = case_of("more than a tile", "groups")
    found = [
        bits(all_results(case, arch=FEW_SMS, backward_tiles=(tile,), deterministic=True, schedule=schedule))
        for schedule in SCHEDULES
    ]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("schedule", SCHEDULES[-2:], ids=str)
@pytest.mark.parametrize("num_sms", [1, 3, 4])
@pytest.mark.parametrize(
    ("window", "seqlen_k", "section"),
    [((130, 0), 630, 3), ((40, 100), 630, 2), ((200, 300), 400, 1), ((10, 150), 900, 3), ((600, 0), 630, 3)],
)
def test_blocks_take_whole_windows_first(window, seqlen_k, section, num_sms, schedule):
    """Every tile of queries once, also where no tile attends to a whole window, and however heads are grouped."""
    tile = FORWARD_SM90_TILES[2]
    sizes: dict[str, Any] = {"seqlen_q": 4 * tile.block_m + 118, "seqlen_k": seqlen_k, "num_heads": 3, "head_dim": 16}
    case = ct.Case(**sizes, dtype="bfloat16", causal="top_left" if window[1] == 0 else False, window=window)
    arrays = case.arrays()
    heads_in_l2 = seqlen_k * 2 * 32 * section  # an upper bound of what the keys of short tiles take
    device = replace(FEW_SMS, num_sms=num_sms, l2_bytes=heads_in_l2)
    results = attention.forward(problem_of(case, arrays), arrays, tiles=(tile,), arch=device, schedule=schedule)
    ct.assert_forward(case, *results)
