"""Tiles that start in the order of how many steps a block-sparse index lists for them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.emulator.memory import Scratch
from cuflash.plan import DeviceSpec, block_index
from cuflash.plan.sm90 import scored
from cuflash.spec.passes import BACKWARD, FORWARD
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, inputs_of
from tests.sampling import examples

SMS = 2
DEVICE = replace(DeviceSpec.for_arch("9.0"), num_sms=SMS)
SETTINGS = settings(max_examples=examples(20), suppress_health_check=[HealthCheck.too_slow])
FAR, KEEPS, FIRST_OF_LAST, BUCKETS = (0, 1, 2), 3, 4, 32
OPTIONS = {
    "blocks": {"head_dim": 64, "block_size": (128, 128)},
    "causal": {"head_dim": 128, "block_size": (64, 64), "causal": True},
    "lengths": {"head_dim": 32, "block_size": (128, 128), "kv_lengths": (1500, 0)},
    "dropout": {"head_dim": 72, "block_size": (128, 64), "dropout": 0.2, "dtype": "float16"},
    "softcap": {"head_dim": 128, "block_size": (128, 128), "softcap": 5.0, "sinks": True, "dlse": True},
    "wide values": {"head_dim": 40, "head_dim_v": 96, "block_size": (64, 128), "layout": "bshd"},
}


@pytest.fixture(autouse=True)
def from_few_keys_on(monkeypatch):
    monkeypatch.setattr(scored, "CLAIMED_KEYS", 1)
    monkeypatch.setattr(scored, "CLAIMED_KEYS_64", 1)


def bucket_of(steps, total, is_last, num_tiles):
    if steps * SMS > total:
        return 0
    if 2 * steps * SMS > total:
        return 1
    if 4 * steps * SMS > total:
        return 2
    return BUCKETS - 1 - min(7 * steps * num_tiles // max(total, 1), 27) if is_last else KEEPS


def expected_order(steps, tiles_of_section):
    """The launch indices of tiles in their order, and the first section of heads of which one starts elsewhere."""
    total, count = sum(steps), len(steps)
    last = count - block_index.SORTED_WAVES * SMS
    buckets = [bucket_of(n, total, index >= last, count) for index, n in enumerate(steps)]
    if any(bucket in FAR for bucket in buckets):
        section = 0
    elif len(set(buckets) - {KEEPS}) > 1:
        section = max(last, 0) // tiles_of_section
    else:
        section = None
    return sorted(range(count), key=lambda index: buckets[index]), section


def steps_in_launch_order(rows, group, section, *, last_first):
    """`rows` are the numbers of steps by batch entry, query head and tile."""
    batch, heads, tiles = rows.shape
    of_heads = rows.reshape(batch * heads // group, group, tiles).sum(axis=1)[:, :: -1 if last_first else 1]
    return [int(n) for first in range(0, len(of_heads), section) for n in of_heads[first : first + section].T.ravel()]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@SETTINGS
@given(
    heads=st.sampled_from([(2, 1), (4, 2), (3, 3)]),
    seqlens=st.sampled_from([(900, 1100), (1100, 700), (500, 1600)]),
    own_heads=st.booleans(),
    kept=st.sampled_from([0.2, 0.05, 0.5, 0.0, 1.0]),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 2**16),
)
def test_order_and_oracle(options, heads, seqlens, own_heads, kept, schedule, seed):
    sizes = {"seqlen_q": seqlens[0], "seqlen_k": seqlens[1], "num_heads": heads[0], "num_heads_kv": heads[1]}
    block_mask = (2, heads[0]) if own_heads else ()
    case = ct.Case(**{"batch": 2, "dtype": "bfloat16", **sizes, **options}, block_mask=block_mask, blocks_kept=kept)
    case = replace(case, seed=seed)
    problem, arrays = inputs_of(case)
    out, lse = forward_by_oracle(problem, arrays, **case.random)
    for pass_ in (FORWARD, BACKWARD):
        results = {"out": out, "lse": lse, **{f"d{name}": arrays[name] for name in "qkv"}}
        given = {n: x for n, x in arrays.items() if n != "dout"} if pass_ is FORWARD else arrays | results
        plan = attention.plan_for(problem, pass_, given, DEVICE, None)
        assert any(kernel.source == "helpers/tile_order.cu" for kernel in plan.kernels)
        scratch = Scratch(plan.scratch_layout, 0xFF)
        how = {"arch": DEVICE, "schedule": schedule, "scratch": scratch, **case.random}
        if pass_ is FORWARD:
            ct.assert_forward(case, *attention.forward(problem, given, **how))
            check_order(plan, scratch, problem, "key_index")
        else:
            ct.assert_backward(case, *attention.backward(problem, arrays, out, lse, **how))
            check_order(plan, scratch, problem, "query_index")


def check_order(plan, scratch, problem, name):
    """The order is the one that this file finds from the rows of the index."""
    tile, run_time, of_keys = plan.tiles[0], plan.run_time, name == "query_index"
    num_rows, length = -(-problem.seqlen_q // tile.block_m), -(-problem.seqlen_k // tile.block_n)
    num_rows, length = (length, num_rows) if of_keys else (num_rows, length)
    shape = (run_time.index_batches, run_time.index_heads, num_rows, block_index.INDEX_HEADER + length)
    words = scratch.array(name, np.uint32)
    rows = words[: np.prod(shape)].reshape(shape)[..., 0]
    rows = np.broadcast_to(rows, (problem.batch, problem.num_heads, num_rows))
    group = problem.group_size if of_keys else 1
    last_first = not of_keys and problem.window_right is not None
    steps = steps_in_launch_order(rows, group, run_time.head_section, last_first=last_first)
    order, section = expected_order(steps, run_time.head_section * num_rows)
    found = words[np.prod(shape) :]
    assert found[: len(order)].tolist() == order
    heads = len(order) // num_rows
    assert found[len(order)] == (heads if section is None else section * run_time.head_section)
