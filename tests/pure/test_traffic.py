"""The model of what a plan moves: its tiles by counting pairs, its bytes of device memory by a simulated cache."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.arrays.units import in_seconds
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.traffic import L2_FRACTION, OperandLoop, key_rows, query_tiles
from cuflash.spec.options import Options
from cuflash.spec.passes import (
    BACKWARD,
    BACKWARD_JVP,
    COLUMN_MAX,
    COLUMN_SUMS,
    FORWARD,
    JVP,
    PASSES,
    PASSES_WITHOUT_TANGENTS,
    REDUCTIONS,
)
from cuflash.spec.problem import make_problem
from tests.sampling import examples

H200 = DeviceSpec.for_arch("9.0")
HUGE, NONE = replace(H200, l2_bytes=2**60), replace(H200, l2_bytes=0)


def problem_of(seqlen_q, seqlen_k, *, batch=1, heads=2, heads_kv=0, dim=64, dtype="bfloat16", **options):
    """No memory is touched: operands are views of one element."""
    number = np.zeros((), ct.numpy_dtype(dtype))
    shapes = ((heads, seqlen_q), (heads_kv or heads, seqlen_k))
    q, k = (view(number, (batch, *shape, dim)) for shape in shapes)
    return make_problem(Options(**options), q, k, k)


def view(number, shape):
    """A contiguous array as far as its strides go."""
    strides = [number.itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    return np.lib.stride_tricks.as_strided(number, shape, strides)


bounds = st.none() | st.integers(0, 40)


@given(
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    blocks=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    window=st.tuples(bounds, bounds),
    causal=st.sampled_from([False, True, "top_left"]),
)
def test_tiles_are_those_with_visible_pairs(sizes, blocks, window, causal):
    """And those between two of them; where there are none, there may be a tile that shows it."""
    if causal:
        window = (window[0], None)
    problem = problem_of(*sizes, causal=causal, window=window if window != (None, None) else None)
    ranges = np.array([problem.key_range(row) for row in range(sizes[0])])
    keys = np.arange(sizes[1])
    visible = (keys >= ranges[:, :1]) & (keys < ranges[:, 1:])
    block_m, block_n = blocks
    tiles = np.array(
        [
            [visible[m : m + block_m, n : n + block_n].any() for n in range(0, sizes[1], block_n)]
            for m in range(0, sizes[0], block_m)
        ]
    )
    widths = np.minimum(block_n, sizes[1] - np.arange(0, sizes[1], block_n))
    for found, seen in zip(key_rows(problem, *blocks), tiles, strict=True):
        assert found >= (widths * seen).sum()
        if seen.any():
            assert found == widths[np.flatnonzero(seen)[0] : np.flatnonzero(seen)[-1] + 1].sum()
    for query_blocks, seen, width in zip(query_tiles(problem, *blocks), tiles.T, widths, strict=True):
        if seen.any():
            first, last = np.flatnonzero(seen)[[0, -1]]
            # Kernels take the last tile of keys as whole.
            assert query_blocks.start == first and (
                query_blocks.stop == last + 1 or (query_blocks.stop > last and width < block_n)
            )


def test_queries_behind_the_last_tile_of_keys_load_none():
    """Where a window has passed all of them; one that ends in the tile still shows it."""
    problem = problem_of(257, 1, causal="top_left", window=(90, None))
    assert key_rows(problem, 128, 64) == [1, 1, 0]


def tiles_missed(heads, m_blocks, n_blocks, resident, section, capacity, rng):
    """Tiles of keys that a cache of `capacity` of them, any of which may leave, does not have when a block asks.

    Blocks start in launch order, `resident` of them at a time, and iterate over the keys of their head, every other of
    them half a loop after its neighbours.
    """
    heads_in_order = [
        first + within
        for first in range(0, heads, section)
        for _ in range(m_blocks)
        for within in range(min(section, heads - first))
    ]
    cached: dict[tuple[int, int], int] = {}
    kept: list[tuple[int, int]] = []
    rests = [slot % 2 * (n_blocks // 2) for slot in range(resident)]
    running: list[tuple[int, int]] = [(0, n_blocks)] * resident  # the head, and how many of its tiles are done
    started = missed = 0
    while started < len(heads_in_order) or any(done < n_blocks for _, done in running):
        for slot in range(resident):
            if rests[slot] > 0:
                rests[slot] -= 1
                continue
            if running[slot][1] == n_blocks:
                if started == len(heads_in_order):
                    continue
                running[slot] = heads_in_order[started], 0
                started += 1
            tile = head, done = running[slot]
            running[slot] = head, done + 1
            if tile in cached:
                continue
            missed += 1
            if len(kept) < capacity:
                kept.append(tile)
                cached[tile] = len(kept) - 1
            else:
                leaving = int(rng.integers(capacity))
                del cached[kept[leaving]]
                kept[leaving] = tile
                cached[tile] = leaving
    return missed


def test_bytes_of_device_memory_are_those_that_a_cache_misses():
    """As they are where all fits; on average, and to a factor of 1.35 as a rule, where some of it does not."""
    rng = np.random.default_rng(0)
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(300):
        heads, m_blocks, n_blocks, resident = (int(rng.integers(1, most)) for most in (12, 40, 60, 40))
        capacity, section = int(rng.integers(resident + 1, 120)), int(min(heads, rng.choice([1, 2, 4, 8])))
        blocks = heads * m_blocks
        at_once = min(resident, blocks)
        loop = OperandLoop(heads=heads, tiles_of_head=m_blocks, section=section, at_once=at_once, whole=blocks)
        predicted = loop.read(heads * n_blocks, blocks * n_blocks, n_blocks, capacity / L2_FRACTION)
        ratio = predicted / tiles_missed(heads, m_blocks, n_blocks, resident, section, capacity, rng)
        ratios[loop.heads_at_once * n_blocks <= capacity].append(np.log(ratio))
    assert len(ratios[True]) > 100 and np.median(np.abs(ratios[True])) < 0.02
    assert len(ratios[False]) > 100 and abs(np.mean(ratios[False])) < np.log(1.15)
    assert np.std(ratios[False]) < np.log(1.35)


def traffic_of(problem, device, pass_=FORWARD):
    """That of the plan, which there has to be."""
    found = choose_plan(problem, device, pass_).traffic
    assert found is not None
    return found


EACH = pytest.mark.parametrize("pass_", (*PASSES, COLUMN_SUMS, COLUMN_MAX))


def moving(problem, pass_, names=("q", "k", "v")):
    """The problem with tangents, if the pass takes some; without values, if it has none."""
    if pass_ in REDUCTIONS:
        return problem.with_values(0)
    return replace(problem, moved=names) if pass_.has_tangents else problem


@EACH
@settings(max_examples=examples(25))
@given(
    sizes=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    heads=st.sampled_from([(1, 1), (4, 2), (8, 1), (16, 16)]),
    arch=st.sampled_from(["8.0", "9.0"]),
    options=st.fixed_dictionaries({"causal": st.booleans(), "deterministic": st.booleans()}),
    names=st.sets(st.sampled_from(("q", "k", "v", "scale"))),
)
def test_a_larger_cache_reads_less(pass_, sizes, heads, arch, options, names):
    """Down to each input once and each result once."""
    problem = moving(problem_of(*sizes, heads=heads[0], heads_kv=heads[1], **options), pass_, tuple(sorted(names)))
    device = DeviceSpec.for_arch(arch)
    sizes_of_l2 = (0, device.l2_bytes, 2**60)
    if not problem.visible_pairs:
        assert choose_plan(problem, device, pass_).traffic is None
        return
    none, own, huge = (traffic_of(problem, replace(device, l2_bytes=n), pass_) for n in sizes_of_l2)
    assert none.moved >= own.moved >= huge.moved == huge.least == pass_.least_bytes(problem)
    assert none.tiles == own.tiles == huge.tiles and own.flops == pass_.flops(problem)


@EACH
def test_what_a_plan_says(pass_):
    plan = choose_plan(moving(problem_of(4096, 4096, heads=16, batch=4), pass_), H200, pass_)
    traffic = traffic_of(plan.problem, H200, pass_)
    line = traffic.describe(H200.bytes_per_s, 989e12)
    assert f"  {line}\n" in plan.describe(verbose=True, width=0)
    least = max(traffic.flops / 989e12, traffic.moved / 4.8e12)
    assert traffic.seconds(4.8e12, 989e12) == least and traffic.seconds(0, 0) == 0
    assert f", at least {in_seconds(least)}, " in plan.describe().splitlines()[0]
    assert line.endswith("; matrix products at 989 TFLOP/s")
    intensity = traffic.flops / (traffic.read + traffic.written)
    assert f"{intensity:.0f} FLOP/byte, roofline {min(intensity * 4.8, 989):.4g} TFLOP/s at 4.8 TB/s" in line
    assert f"roofline {intensity * 4.8:.4g} TFLOP/s at 4.8 TB/s" in traffic.describe(H200.bytes_per_s)
    assert traffic.describe(0, 989e12) == traffic.describe(0) == line[: line.index(", roofline")]
    assert (" of dq atomics " in line) == (pass_ in (BACKWARD, BACKWARD_JVP))


@pytest.mark.parametrize("pass_", PASSES)
def test_no_model_is_no_number(pass_):
    plan = choose_plan(problem_of(4096, 4096, heads=16, dtype="float32"), H200, pass_)
    assert plan.traffic is None and "memory model" not in plan.describe(verbose=True, width=0)


@pytest.mark.parametrize("axes", ["qk", "bhqk"])
def test_a_bias_that_heads_share_is_read_by_each_of_them(axes):
    """Where it does not fit into L2."""
    shape = tuple(n if axis in axes else 1 for axis, n in zip("bhqk", (2, 16, 4096, 4096), strict=True))
    bias = view(np.zeros((), np.float32), shape)
    q = view(np.zeros((), ct.numpy_dtype("bfloat16")), (2, 16, 4096, 64))
    problem = make_problem(Options(), q, q, q, bias=bias)
    few, many = (traffic_of(problem, device).read for device in (HUGE, NONE))
    assert few == problem.forward_bytes - 2 * 16 * 4096 * (64 * 2 + 4)
    assert many - few >= (2 * 16 - 1) * 4096**2 * 4 if axes == "qk" else many >= few


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
def test_a_mask_is_read_once_where_a_kernel_looks_at_it(pass_, monkeypatch):
    """And by every head where none does, if it does not fit into L2."""
    mask = view(np.zeros((), bool), (1, 1, 8192, 8192))
    q = view(np.zeros((), ct.numpy_dtype("bfloat16")), (2, 16, 8192, 64))
    problem, device = make_problem(Options(), q, q, q, mask=mask), DeviceSpec.for_arch("8.0")
    looked_at = traffic_of(problem, device, pass_)
    monkeypatch.setattr("cuflash.plan.block_index.LOOK_FLOPS", 2**63)
    looked_up = traffic_of(problem, device, pass_)
    assert looked_up.read - looked_at.read == (2 * 16 - 1) * 8192**2
    assert (looked_up.tiles, looked_up.written) == (looked_at.tiles, looked_at.written)
    in_bits = traffic_of(problem, replace(H200, l2_bytes=2**20), pass_)
    assert in_bits.written - traffic_of(problem, HUGE, pass_).written >= 8192**2 / 8


@pytest.mark.parametrize("pass_", [JVP, BACKWARD_JVP])
def test_a_tangent_counts_as_the_array_that_it_is_of(pass_):
    """Where tiles are the same: bytes read from memory, bytes at least, and bytes of tiles."""
    problem, sizes = problem_of(1024, 2048, heads=4, heads_kv=2), {"q": 4 * 1024, "k": 2 * 2048, "v": 2 * 2048}
    none = traffic_of(moving(problem, pass_, ()), HUGE, pass_)
    for names in (("q",), ("k",), ("v",), ("q", "k", "v")):
        found = traffic_of(moving(problem, pass_, names), HUGE, pass_)
        more = sum(sizes[name] * 64 * 2 for name in names)
        assert found.read - none.read == found.least - none.least == more
        assert found.tiles - none.tiles >= more and found.written == none.written
    scales = replace(problem, softcap=3.0)
    of_numbers = traffic_of(moving(scales, pass_, ("scale", "softcap")), HUGE, pass_)
    assert of_numbers.least - traffic_of(moving(scales, pass_, ()), HUGE, pass_).least == 8


@pytest.mark.parametrize("pass_", [JVP, BACKWARD_JVP])
def test_the_tangent_of_a_bias_that_heads_share_is_read_by_each_of_them(pass_):
    bias = view(np.zeros((), np.float32), (1, 1, 4096, 4096))
    q = view(np.zeros((), ct.numpy_dtype("bfloat16")), (2, 16, 4096, 64))
    problem = make_problem(Options(), q, q, q, bias=bias)
    reads = [traffic_of(moving(problem, pass_, names), NONE, pass_).read for names in (("bias",), ())]
    assert reads[0] - reads[1] == 2 * 16 * 4096**2 * 4


def test_tiles_of_jvp_are_those_that_its_blocks_load():
    """64 rows of q and tq, and for each of these tiles all rows of k, tk, v and tv that it attends to."""
    problem = moving(problem_of(200, 300, causal=True), JVP)
    tile = choose_plan(problem, H200, JVP).tiles[0]
    keys = sum(key_rows(problem, tile.block_m, tile.block_n))
    assert traffic_of(problem, H200, JVP).tiles == 2 * 128 * (2 * 200 + 4 * keys)
