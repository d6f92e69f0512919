"""Plans: pure functions of a problem and a device, within the device's limits, for every head dimension."""

import dataclasses
import itertools
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.arrays.array_info import Operand
from cuflash.arrays.units import WIDTH, in_bytes
from cuflash.gpu import compiler, merging
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.choose import MAX_HEAD_DIM
from cuflash.plan.launch_plan import SCRATCH_ALIGNMENT
from cuflash.plan.sm80.tiles import BACKWARD_TILES, DQ_TILES, FORWARD_TILES, MOST_CHUNKED
from cuflash.plan.sm90.backward import BACKWARD_HEAD_SECTION, GROUPED_REVERSED_ONE_IN
from cuflash.plan.sm90.tiles import (
    FORWARD_SM90_TILES,
)
from cuflash.plan.tiles import Tile, round_up
from cuflash.spec.binding import access_bytes
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.passes import (
    BACKWARD,
    BACKWARD_JVP,
    COLUMN_MAX,
    COLUMN_SUMS,
    FORWARD,
    JVP,
    PASSES,
    PASSES_WITHOUT_TANGENTS,
    TOP_KEYS,
)
from cuflash.spec.problem import make_problem
from tests.problems import ARCHS, SIZES_OF_SHARED, biased, blocks_of, contiguous, is_served, masked, problem_of
from tests.scored import of_functions


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", SIZES_OF_SHARED)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_head_dimension_is_served_within_the_limits(arch, deterministic, dtype):
    device = DeviceSpec.for_arch(arch)
    base = problem_of(dtype=dtype, deterministic=deterministic)
    for dim in (*range(1, 257), *range(257, MAX_HEAD_DIM + 1, 51), MAX_HEAD_DIM):
        for dim_v in {dim, 1, 64, 100, max(1, 257 - dim), 256}:
            problem = replace(base, head_dim=dim, head_dim_v=dim_v)
            for pass_ in PASSES_WITHOUT_TANGENTS:
                if not is_served(problem, arch, pass_):
                    continue
                plan = choose_plan(problem, device, pass_)
                for kernel in plan.kernels:
                    assert kernel.shared_bytes <= device.shared_bytes_per_block
                    assert kernel.grid > 0
                    assert kernel.threads <= 1024
                for tile in plan.tiles:
                    shared = tile.shared_bytes(*(round_up(d, tile.dim_multiple) for d in (dim, dim_v)))
                    assert tile.min_blocks * (shared + device.shared_bytes_reserved) <= device.shared_bytes_per_sm
                    assert max(dim, dim_v) <= tile.max_dim


@pytest.mark.parametrize("reductions", [("max",), ("entropy",), ("max", "entropy")], ids="-".join)
@pytest.mark.parametrize("arch", SIZES_OF_SHARED)
def test_gradients_of_row_reductions_fit_at_every_head_dimension(arch, reductions):
    """A tile that leaves little shared memory may have none for them."""
    device = DeviceSpec.for_arch(arch)
    for dtype, deterministic in itertools.product(("bfloat16", "float32"), (False, True)):
        base = replace(problem_of(dtype=dtype, deterministic=deterministic), row_reductions=reductions)
        for dim, dim_v in itertools.product(range(16, 257, 16), (None, 0, 64, 128, 256)):
            problem = replace(base, head_dim=dim, head_dim_v=dim if dim_v is None else dim_v)
            if is_served(problem, arch, BACKWARD):
                plan = choose_plan(problem, device, BACKWARD)
                assert all(kernel.shared_bytes <= device.shared_bytes_per_block for kernel in plan.kernels), plan


def test_a_plan_is_the_first_row_that_fits():
    problem = problem_of(dim=128, dim_v=128)
    for arch in ARCHS:
        device = DeviceSpec.for_arch(arch)
        table: tuple[Tile, ...] = FORWARD_SM90_TILES if arch == "9.0" else FORWARD_TILES
        fitting = [tile for tile in table if tile.element_bytes == 2 and tile.max_dim >= 128]
        plan = choose_plan(problem, device)
        (tile,) = plan.tiles
        for earlier in fitting[: fitting.index(tile)]:
            resident = earlier.min_blocks * (earlier.shared_bytes(128, 128) + device.shared_bytes_reserved)
            unsuited = bool(earlier.why_not(problem, device))
            assert resident > device.shared_bytes_per_sm or unsuited
            assert f"not {type(earlier).__name__} {earlier.block_m} x {earlier.block_n}" in plan.reason


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"causal": True, "window": (9, None), "softcap": 2.0}]
)
def test_plans_are_pure(pass_, options):
    device = DeviceSpec.for_arch("9.0")
    plan = choose_plan(problem_of(**options), device, pass_)
    again = choose_plan(problem_of.__wrapped__(**options), device, pass_)
    assert plan == again
    assert hash(plan.kernels) == hash(again.kernels)
    assert plan.tensor_maps
    assert hash(plan.tensor_maps) == hash(again.tensor_maps)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.reason = ""  # type: ignore[misc]  # what is tested


def test_grids_cover_the_problem():
    problem = problem_of(seqlen_q=1000, seqlen_k=333, batch=3, heads=6, heads_kv=2)
    device = replace(DeviceSpec.for_arch("8.0"), num_sms=1)
    forward = choose_plan(problem, device)
    assert forward.kernels[0].grid == 3 * 6 * -(-1000 // forward.tiles[0].block_m)
    for deterministic in (False, True):
        plan = choose_plan(replace(problem, deterministic=deterministic), device, BACKWARD)
        grids = {kernel.source: kernel.grid for kernel in plan.kernels}
        tile = plan.tiles[0]
        assert plan.run_time.group_splits == 1
        assert plan.run_time.stats_rows >= 1000
        assert grids["sm80/backward.cu"] == 3 * 2 * -(-333 // tile.block_n)
        if deterministic:
            assert grids["sm80/backward_dq.cu"] == 3 * 6 * -(-1000 // plan.tiles[1].block_m)
            assert plan.run_time.stats_rows % tile.block_m == plan.run_time.stats_rows % plan.tiles[1].block_m == 0
        else:
            assert (
                grids["helpers/backward_postprocess.cu"]
                == grids["helpers/backward_preprocess.cu"]
                == 3 * 6 * -(-1000 // tile.block_m)
            )


def test_blocks_add_in_order_where_sums_must_not_depend_on_luck():
    problem = problem_of(seqlen_q=1000, heads=6, heads_kv=2, batch=3, dim=128, dim_v=128)
    for arch, in_order in (("9.0", True), ("8.0", False), ("10.0", False)):
        device = DeviceSpec.for_arch(arch)
        for causal in (False, True):
            fast = choose_plan(replace(problem, window_right=0 if causal else None), device, BACKWARD)
            plan = choose_plan(replace(fast.problem, deterministic=True), device, BACKWARD)
            assert ("dq in order" in plan.reason) == in_order
            assert all(dict(kernel.defines)["CUFLASH_DQ_IN_ORDER"] == in_order for kernel in plan.kernels)
            assert "dq in order" not in fast.reason
            found = {dict(kernel.defines)["CUFLASH_REVERSED_ONE_IN"] for kernel in plan.kernels}
            assert found == {GROUPED_REVERSED_ONE_IN if in_order and causal else 0}
            if in_order:
                assert [kernel.source for kernel in plan.kernels] == [kernel.source for kernel in fast.kernels]
                turns = sum(plan.scratch_layout.sizes) - sum(fast.scratch_layout.sizes)
                assert turns == 4 * 3 * 6 * -(-1000 // plan.tiles[0].block_m)


def test_heads_side_by_side_fit_in_l2_under_a_causal_mask():
    device = DeviceSpec.for_arch("9.0")
    for deterministic in (False, True):
        problem = problem_of(4096, 4096, 128, 128, heads=64, heads_kv=64, batch=1, deterministic=deterministic)
        for seqlen, section in ((512, 16), (2048, 8), (4096, 4), (16384, 1)):
            plan = choose_plan(replace(problem, seqlen_q=seqlen, window_right=0), device, BACKWARD)
            assert plan.run_time.head_section == (section if deterministic else max(section, 2))
            plan = choose_plan(replace(problem, seqlen_q=seqlen), device, BACKWARD)
            assert plan.run_time.head_section == max(33 * 512 // seqlen if deterministic else 0, BACKWARD_HEAD_SECTION)


@pytest.mark.parametrize(
    ("seqlen", "dim", "heads", "splits", "section"),
    [(4096, 64, 32, 1, 2), (4096, 128, 32, 1, 1), (8192, 128, 32, 2, 1), (4096, 256, 16, 2, 1), (16384, 128, 32, 2, 1)],
)
def test_heads_of_a_group_that_are_under_way_fit_in_l2_in_order(seqlen, dim, heads, splits, section):
    device = DeviceSpec.for_arch("9.0")
    problem = problem_of(seqlen, seqlen, dim, dim, heads=heads, heads_kv=heads // 4, batch=4, window=(None, 0))
    assert choose_plan(problem, device, BACKWARD).run_time.group_splits == 1
    plan = choose_plan(replace(problem, deterministic=True), device, BACKWARD)
    assert (plan.run_time.group_splits, plan.run_time.head_section) == (splits, section)


@pytest.mark.parametrize("deterministic", [False, True])
def test_blocks_clear_accumulators_from_two_waves_on(deterministic):
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=17)
    problem = problem_of(500, 500, 64, 64, heads=8, heads_kv=8, deterministic=deterministic)
    clears = {}
    for batch in (1, 2):
        plan = choose_plan(replace(problem, batch=batch), device, BACKWARD)
        clears[batch] = plan.run_time.clear_ahead
        assert all(dict(kernel.defines)["CUFLASH_CLEARS_AHEAD"] == (batch > 1) for kernel in plan.kernels)
        assert ("clear the dq accumulator" in plan.reason) == (batch > 1)
        heads, counters = batch * 8, 8 * deterministic + (batch > 1)
        assert dict(plan.scratch)["dq_accumulator"] == heads * (512 * 64 + counters)
    assert clears == {1: 0, 2: BACKWARD_HEAD_SECTION}
    many = replace(problem, batch=2)
    assert choose_plan(many, device, BACKWARD, need=("dk",)).run_time.clear_ahead == 0
    assert choose_plan(many, replace(device, arch=80), BACKWARD).run_time.clear_ahead == 0
    # Heads that iterate backwards are 16 side by side.
    for batch, ahead in ((2, 0), (3, 16)):
        causal = problem_of(500, 500, 256, 256, heads=8, heads_kv=8, batch=batch, deterministic=True, window=(None, 0))
        assert choose_plan(causal, device, BACKWARD).run_time.clear_ahead == ahead


def test_empty_problems_have_plans():
    device = DeviceSpec.for_arch("9.0")
    for sizes in ({"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}, {"heads": 0, "heads_kv": 0}):
        for pass_ in PASSES_WITHOUT_TANGENTS:
            for deterministic in (False, True):
                problem = problem_of(**sizes, deterministic=deterministic)
                assert choose_plan(problem, device, pass_).describe(verbose=True, width=0)


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_blocks_share_a_group_only_where_tiles_are_few(heads_kv):
    device = DeviceSpec.for_arch("9.0")
    for seqlen in (64, 1024, 2**18):
        problem = problem_of(seqlen, seqlen, batch=1, heads=8, heads_kv=heads_kv)
        plan = choose_plan(problem, device, BACKWARD)
        assert 1 <= plan.run_time.group_splits <= problem.group_size
        assert ("share the query heads" in plan.reason) == (plan.run_time.group_splits > 1)
        assert ("share the queries" in plan.reason) == (plan.run_time.tail_splits > 1)
        if plan.run_time.group_splits > 1:
            assert (plan.run_time.whole_tiles, plan.run_time.tail_splits) == (0, 1)
        if seqlen == 64:
            assert plan.run_time.group_splits == problem.group_size
        if seqlen == 2**18:
            assert plan.run_time.group_splits == 1


@pytest.mark.parametrize(
    ("sizes", "causal", "blocks"),
    [
        ({"seqlen": 4096, "batch": 4, "heads": 16, "heads_kv": 1}, False, 2),
        ({"seqlen": 4096, "batch": 4, "heads": 16, "heads_kv": 1}, True, 8),
        ({"seqlen": 4096, "batch": 1, "heads": 32, "heads_kv": 8}, True, 1),
        ({"seqlen": 512, "batch": 1, "heads": 21, "heads_kv": 1}, True, 21),
        ({"seqlen": 4096, "batch": 4, "heads": 15, "heads_kv": 1}, False, 3),
    ],
)
def test_blocks_share_a_group_evenly(sizes, causal, blocks):
    seqlen = sizes.pop("seqlen")
    problem = problem_of(seqlen, seqlen, **sizes, dim=128, dim_v=128, window=(None, 0) if causal else None)
    plan = choose_plan(problem, DeviceSpec.for_arch("9.0"), BACKWARD)
    assert plan.run_time.group_splits == blocks
    assert problem.group_size % plan.run_time.group_splits == 0


@pytest.mark.parametrize(
    ("sizes", "causal", "tail"),
    [
        ({"seqlen": 4096, "batch": 4, "heads": 16}, False, (1980, 3)),
        ({"seqlen": 4096, "batch": 4, "heads": 16}, True, (0, 1)),
        ({"seqlen": 1024, "batch": 16, "heads": 16}, False, (0, 1)),
        ({"seqlen": 4096, "batch": 1, "heads": 33}, False, (0, 1)),  # eight waves
        ({"seqlen": 4096, "batch": 1, "heads": 2}, False, (0, 2)),
        ({"seqlen": 4096, "batch": 1, "heads": 2}, True, (0, 4)),
        ({"seqlen": 64, "batch": 1, "heads": 1}, False, (0, 1)),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_blocks_share_the_queries_of_the_last_tiles(sizes, causal, tail, deterministic):
    seqlen = sizes["seqlen"]
    sizes = {name: n for name, n in sizes.items() if name != "seqlen"} | {"heads_kv": sizes["heads"]}
    problem = problem_of(seqlen, seqlen, **sizes, dim=128, dim_v=128, window=(None, 0) if causal else None)
    problem = replace(problem, deterministic=deterministic)
    assert choose_plan(problem, DeviceSpec.for_arch("8.0"), BACKWARD).run_time.tail_splits == 1
    for need in (("dq", "dk", "dv"), ("dq", "dv")):
        plan = choose_plan(problem, DeviceSpec.for_arch("9.0"), BACKWARD, need=need)
        assert (plan.run_time.whole_tiles, plan.run_time.tail_splits) == tail
        grids = {kernel.source: kernel.grid for kernel in plan.kernels}
        n_blocks = sizes["batch"] * sizes["heads"] * -(-seqlen // plan.tiles[0].block_n)
        shared = n_blocks - plan.run_time.whole_tiles if plan.run_time.tail_splits > 1 else 0
        assert grids["sm90/backward.cu"] == n_blocks + shared * (plan.run_time.tail_splits - 1)
        m_blocks = plan.run_time.stats_rows // plan.tiles[0].block_m
        assert (
            grids["helpers/backward_postprocess.cu"]
            == sizes["batch"] * sizes["heads"] * m_blocks + 2 * (len(need) - 1) * shared
        )
        elements = shared * plan.run_time.tail_splits * plan.tiles[0].block_n * 256
        assert dict(plan.scratch).get("dkv_partials", 0) == elements


@pytest.mark.parametrize(
    ("heads", "tail", "options"),
    [
        (16, (1980, 7), {}),
        (16, (0, 1), {"dropout": 0.1}),
        (16, (0, 1), {"window": (None, 0)}),
        (16, (0, 1), {"bias": (1, 1, 1, 16384)}),
        (1, (0, 2), {}),
    ],
)
def test_with_a_block_mask_blocks_share_tiles_of_many_steps(heads, tail, options):
    shape = {"seqlen_q": 16384, "seqlen_k": 16384, "num_heads": heads, "head_dim": 128, "dtype": "bfloat16"}
    case = ct.Case(**shape, block_mask=(), block_size=(128, 128), **options)
    need = ("dq", "dk", "dv", *(("dbias",) if case.bias else ()))
    plan = choose_plan(case.problem, DeviceSpec.for_arch("9.0"), BACKWARD, need=need)
    assert (plan.run_time.whole_tiles, plan.run_time.tail_splits) == tail
    least = {dict(kernel.defines).get("CUFLASH_MIN_SHARED_STEPS", 0) for kernel in plan.kernels}
    assert least == ({64} if tail[0] else {0})


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_extra_memory_is_linear(arch, deterministic):
    device = DeviceSpec.for_arch(arch)

    def extra_bytes(seqlen, dtype="bfloat16"):
        sizes = {"dim": 128, "dim_v": 128, "heads_kv": 1}
        problem = problem_of(seqlen, seqlen, **sizes, dtype=dtype, deterministic=deterministic)
        forward = choose_plan(problem, device)
        split = 6 * problem.batch * (problem.num_heads + 2) * seqlen * 128  # of q, k and v of float32
        assert forward.extra_bytes == (split if (arch, dtype) == ("9.0", "float32") else 0)
        plan = choose_plan(problem, device, BACKWARD)
        size = np.dtype(problem.softmax_dtype).itemsize
        assert plan.scratch_layout.sizes == tuple(size * elements for _, elements in plan.scratch)
        assert 0 <= plan.extra_bytes - sum(plan.scratch_layout.sizes) < SCRATCH_ALIGNMENT * len(plan.scratch)
        assert plan.extra_bytes >= problem.batch * problem.num_heads * seqlen * 2 * size
        return plan.extra_bytes

    for seqlen in (2**8, 2**11 + 77, 2**14, 2**17, 2**20):
        # Rounded up to tiles: statistics, dq, and dk and dv of every query head, in float32.
        assert extra_bytes(seqlen) <= 2 * 4 * (seqlen + 256) * 4 * (4 + 128 + 128 + 128)
    # And the partial sums of the last tiles.
    partials = 2**27
    assert extra_bytes(2**20) <= 2 * 4 * (2**20 + 256) * 4 * (4 + 128) + partials
    # And the bf16 terms of q, dout, k and v.
    split = 2 * (4 * 2 + 2) * 2**20 * 128 * 6 if arch == "9.0" and not deterministic else 0
    assert extra_bytes(2**20, "float32") <= 2 * 4 * (2**20 + 256) * 4 * (4 + 128) + split + partials
    if arch != "7.5":  # whose shared memory is too small for it
        assert extra_bytes(2**20, "float64") <= 2 * 4 * (2**20 + 256) * 8 * (4 + 128)


def test_tiles_of_the_caller_are_taken():
    device = DeviceSpec.for_arch("9.0")
    problem = problem_of(deterministic=True)
    for tile in (*FORWARD_TILES, *FORWARD_SM90_TILES):
        plan = choose_plan(problem, device, tiles=(tile,))
        assert plan.tiles == (tile,)
        assert "given by the caller" in plan.reason
    plan = choose_plan(problem, device, BACKWARD, tiles=(BACKWARD_TILES[-1], DQ_TILES[-1]))
    assert plan.tiles == (BACKWARD_TILES[-1], DQ_TILES[-1])


# ---- What is not served ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ({"dim": 1025}, "^q: got head dimension 1025, expected at most 1024 on the GPU; .* on the CPU$"),
        ({"dim_v": 2000}, "^v: got head dimension 2000, expected at most 1024 on the GPU; .* on the CPU$"),
        (
            {"dim": 1025, "dim_v": 0, "dtype": "float8_e4m3fn"},
            "^q: got head dimension 1025, expected at most 1024 on the GPU; .* on the CPU$",
        ),
    ],
)
def test_problems_that_no_kernel_serves(problem, words, pass_):
    with pytest.raises(NotImplementedError, match=words):
        choose_plan(problem_of(**problem), DeviceSpec.for_arch("9.0"), pass_)


@given(
    st.sampled_from(ARCHS),
    st.sampled_from(("float16", "bfloat16", "float32", "float64")),
    st.integers(MAX_HEAD_DIM + 1, 2 * MOST_CHUNKED),
    st.sampled_from(PASSES),
    st.sampled_from(((), ("max",), ("max", "entropy"))),
)
def test_lse_and_its_gradients_alone_have_long_heads(arch, dtype, dim, pass_, reductions):
    """Not so row reductions, tangents, and reductions of the attention weights, which the message says."""
    problem = replace(problem_of(dim=dim, dim_v=0, dtype=dtype), row_reductions=reductions)
    device = DeviceSpec.for_arch(arch)
    of_lse_alone = pass_ in (FORWARD, BACKWARD) and not reductions
    if of_lse_alone and dim <= MOST_CHUNKED:
        choose_plan(problem, device, pass_)
        return
    most = "16384 on the GPU" if of_lse_alone else r"1024 on the GPU( \(16384 for lse and its gradients alone\))?"
    with pytest.raises(NotImplementedError, match=rf"^q: got head dimension {dim}, expected at most {most}; NumPy"):
        choose_plan(problem, device, pass_)


@pytest.mark.parametrize("arch", ["7.0", "7.5", "8.0"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_a_plan_says_of_products_without_tensor_cores(dtype, arch):
    device = DeviceSpec.for_arch(arch)
    text = choose_plan(problem_of(dtype=dtype), device).describe(verbose=True, width=0)
    by_tensor_cores = float(arch) >= (7.5 if dtype == "float16" else 8.0)
    assert ("\n  slow: kernels use tensor cores for " + dtype in text) == (not by_tensor_cores)
    assert ("products at " in text) == (by_tensor_cores and dtype in ("float16", "bfloat16"))


def test_a_device_as_an_earlier_one():
    device = DeviceSpec.for_arch("9.0").as_arch("7.5")
    plan = choose_plan(problem_of(dtype="float16"), device)
    assert "on H200 (as if it had compute capability 7.5)" in plan.describe(verbose=True, width=0)
    for kernel in plan.kernels:
        assert (kernel.target, dict(kernel.defines)["CUFLASH_ARCH"]) == ("sm_90", 75)
        assert kernel.source == "sm80/forward.cu" and not kernel.overlaps_previous
    for arch in ("9.0", "90", "8.6", "7.0"):
        assert DeviceSpec.for_arch("9.0").as_arch(arch).target == "sm_90"
    for arch in ("6.1", "10.0", "turing", "sm_75a"):
        with pytest.raises(ValueError, match=f"^CUFLASH_ARCH: got '{arch}', expected 7.0 to 9.0, which H200 has$"):
            DeviceSpec.for_arch("9.0").as_arch(arch)


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
def test_devices_that_no_kernel_serves(pass_):
    old = replace(DeviceSpec.for_arch("8.0"), arch=61)
    with pytest.raises(NotImplementedError, match=r"^device: got compute capability 6.1, expected 7.0 or later.*CPU$"):
        choose_plan(problem_of(), old, pass_)
    small = replace(DeviceSpec.for_arch("8.0"), shared_bytes_per_block=2**12, name="tiny")
    words = (
        "^device: no tile of {} at head dimensions {} and {} fits {}, got {} bytes of .*, expected more; .* the CPU$"
    )
    with pytest.raises(NotImplementedError, match=words.format("bfloat16", 64, 64, "tiny", 4096)):
        choose_plan(problem_of(), small, pass_)
    large, small = problem_of(dim=161, dim_v=161, dtype="float64"), DeviceSpec.for_arch("8.6")
    assert choose_plan(large, small).kernels
    with pytest.raises(NotImplementedError, match=words.format("float64", 161, 161, small.name, 99 * 1024)):
        choose_plan(large, small, BACKWARD)


def test_arrays_that_are_not_aligned_to_their_elements():
    for dtype, size in (("float32", 4), ("float64", 8)):
        for load_bytes, store_bytes in ((size // 2, None), (None, size // 2)):
            words = f"^q: got arrays at multiples of {size // 2} bytes, expected .* the {size} bytes of a {dtype}$"
            with pytest.raises(ValueError, match=words):
                choose_plan(
                    problem_of(dtype=dtype),
                    DeviceSpec.for_arch("9.0"),
                    load_bytes=load_bytes,
                    store_bytes=store_bytes,
                )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_dropout_is_an_option_of_the_same_kernels(deterministic, arch, pass_, dtype):
    device = DeviceSpec.for_arch(arch)
    plain, dropping = (
        choose_plan(problem_of(dtype=dtype, deterministic=deterministic, dropout=rate), device, pass_)
        for rate in (0.0, 0.1)
    )
    assert dropping.tiles == plain.tiles
    assert dropping.scratch == plain.scratch
    for with_it, without in zip(dropping.kernels, plain.kernels, strict=True):
        assert with_it.source == without.source
        specialised = not with_it.source.startswith("helpers/") or with_it.source == "helpers/backward_postprocess.cu"
        assert [dict(kernel.defines)["CUFLASH_HAS_DROPOUT"] for kernel in (with_it, without)] == [int(specialised), 0]
        assert ("_dropout" in with_it.name) == specialised
        assert "_dropout" not in without.name
    assert "; dropout\n" in dropping.describe(verbose=True, width=0)
    # The rate is a parameter of the kernels, and no part of what is compiled.
    other = choose_plan(problem_of(dtype=dtype, deterministic=deterministic, dropout=0.7), device, pass_)
    assert other.kernels == dropping.kernels


@pytest.mark.parametrize("arch", ARCHS)
def test_a_plan_says_where_float64_is_slow(arch):
    for dtype in ("float32", "float64"):
        plan = choose_plan(problem_of(dtype=dtype), DeviceSpec.for_arch(arch))
        is_slow = dtype == "float64" and arch not in ("7.0", "8.0", "9.0", "10.0")
        assert ("float64 is slow here" in plan.reason) == is_slow


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
def test_more_tiles_than_one_launch_has(arch):
    problem = replace(problem_of(seqlen_q=2**30, seqlen_k=1), batch=2**10)
    with pytest.raises(
        NotImplementedError, match=r"^q: got \d+ tiles, expected at most 2\*\*31 - 1 .*; split the batch$"
    ):
        choose_plan(problem, DeviceSpec.for_arch(arch))


# ---- What a plan says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
def test_description(pass_):
    device = DeviceSpec.for_arch("8.6")
    problem = problem_of(dim=256, dim_v=192, causal=True, softcap=3.0, deterministic=True)
    plan = choose_plan(problem, device, pass_)
    text = plan.describe(verbose=True, width=0)
    assert f"{pass_} pass on {device.name} (compute capability 8.6)" in text
    assert "bfloat16, batch 2, heads 4/2, seqlen 1024 x 1024, head_dim 256/192; right_bound, softcap" in text
    for kernel in plan.kernels:
        how = f"grid {kernel.grid}, {kernel.threads} threads, {in_bytes(kernel.shared_bytes)} of shared memory"
        assert f"kernel {kernel.name}: {how}" in text
        assert kernel.name.startswith(kernel.source.removesuffix(".cu").replace("/", "_"))
    extra = in_bytes(plan.extra_bytes) if plan.extra_bytes else "no"
    assert re.search(rf"^{pass_} pass on .*: \d kernels?, at least .*s, {extra} extra memory$", text.splitlines()[0])
    wrapped = plan.describe(verbose=True).splitlines()
    assert max(map(len, wrapped)) <= WIDTH and " ".join(" ".join(wrapped).split()) == " ".join(text.split())
    short = plan.describe(width=0).splitlines()
    assert short == [line for line in text.splitlines() if not line.startswith("  not ")]
    for tile in plan.tiles:
        assert f"{type(tile).__name__} {tile.block_m} x {tile.block_n}" in plan.reason
    for line in plan.reason.splitlines():
        assert line in text
    assert "not " in plan.reason and "exceed the 102400 bytes of shared memory of an SM" in plan.reason
    assert "no options" in choose_plan(problem_of(), device, pass_).describe(verbose=True, width=0)
    with_resources = replace(plan, resources=tuple(f"{n} registers" for n in range(len(plan.kernels))))
    assert ", 0 registers\n" in with_resources.describe(verbose=True, width=0)


def test_a_symbol_spells_its_configuration():
    for arch, source in (("8.0", "sm80"), ("9.0", "sm90")):
        kernel = choose_plan(problem_of(dim=40, dim_v=72, causal=True), DeviceSpec.for_arch(arch)).kernels[0]
        assert re.fullmatch(rf"{source}_forward_bfloat16_d40x72_\d+x\d+_right_bound", kernel.name)
        assert dict(kernel.defines)["CUFLASH_KERNEL_NAME"] == kernel.name


def test_kernels_are_told_all_that_they_ask_for():
    """Every define that the sources read is given, and none that nobody reads."""
    folder = compiler.kernel_directory()
    text = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.cu*")}
    everything = "".join(text.values())
    own = set(re.findall(r"#define (CUFLASH_[A-Z0-9_]+)", everything)) | {"CUFLASH_EMULATION"}
    pasted = {name for name in re.findall(r"\b(CUFLASH_[A-Z0-9_]+)##", everything)}  # the front half of a macro's name
    read = set(re.findall(r"\bCUFLASH_[A-Z0-9_]+\b", everything)) - own - pasted
    given = set()
    float32 = problem_of(1024, 1024, dtype="float32")
    plain = (problem_of(), problem_of(deterministic=True), problem_of(1, 2**16), problem_of(16, 2**16))
    wide = (problem_of(dim=320), problem_of(1, 2**16, dim=320))
    functions = of_functions(("distance", "documents"), "float32", 64)
    of_bytes = problem_of(dtype=ml_dtypes.float8_e4m3fn)
    long = problem_of(dim=2048, dim_v=0)
    others = (blocks_of(1024), blocks_of(16384), masked(64), biased(64, "bfloat16"), functions, of_bytes, long)
    for problem in (*plain, *wide, float32, *others):
        for pass_ in PASSES_WITHOUT_TANGENTS if problem is not of_bytes else PASSES_WITHOUT_TANGENTS[:1]:
            for arch in ("8.0", "9.0") if problem is not of_bytes else ("9.0",):
                need: tuple[str, ...] = DEFAULT_NEED
                if pass_ is BACKWARD and (problem.dtype == "float32" or problem.bias is not None):
                    need = ("dk", "dscale") if problem.bias is None else ("dbias",)
                    need += problem.score_arg_gradients
                for kernel in choose_plan(problem, DeviceSpec.for_arch(arch), pass_, need=need).kernels:
                    given |= {name for name, _ in kernel.defines}
                    assert kernel.source in text
    with_tangents = (problem_of(), float32, problem_of(1024, 1024, dim=128, dtype="float32"))
    for problem, pass_, arch in itertools.product(with_tangents, (JVP, BACKWARD_JVP), ("8.0", "9.0")):
        of_tangents = choose_plan(replace(problem, moved=("q",)), DeviceSpec.for_arch(arch), pass_)
        given |= {name for kernel in of_tangents.kernels for name, _ in kernel.defines if name != "CUFLASH_TANGENTS"}
    for pass_, arch in itertools.product((COLUMN_SUMS, COLUMN_MAX, TOP_KEYS), ("8.0", "9.0")):
        reduced = choose_plan(problem_of(), DeviceSpec.for_arch(arch), pass_)
        given |= {name for kernel in reduced.kernels for name, _ in kernel.defines}
    layout = merging.layout_of((2, 64), ((256, 4),) * 2, (4, 4), (0, 0), by_row=False)
    merge = merging.kernel_spec(DeviceSpec.for_arch("9.0"), "add", layout, ("float32", "float32", 1))
    assert (given | {name for name, _ in merge.defines}) - own == read  # some have defaults


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
def test_kernels_of_diagonals_that_follow_lengths_have_names_of_their_own(arch, pass_):
    q, lengths = contiguous((2, 4, 1024, 64), np.dtype(ml_dtypes.bfloat16)), np.zeros(2, np.int32)
    problems = [make_problem(Options(causal=causal), q, q, q, kv_lengths=lengths) for causal in (True, "lengths")]
    fixed, following = (choose_plan(problem, DeviceSpec.for_arch(arch), pass_).kernels for problem in problems)
    for kernel, other in zip(fixed, following, strict=True):
        defines, others = dict(kernel.defines), dict(other.defines)
        assert (defines.pop("CUFLASH_FOLLOWS_LENGTHS"), others.pop("CUFLASH_FOLLOWS_LENGTHS")) == (0, 1)
        assert others.pop("CUFLASH_KERNEL_NAME") == other.name != kernel.name == defines.pop("CUFLASH_KERNEL_NAME")
        assert "lengths_diagonal" in other.name and others == defines


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_helper_kernels_are_compiled_once_for_many_options(arch, dtype):
    def helpers(problem):
        kernels = choose_plan(problem, DeviceSpec.for_arch(arch), BACKWARD).kernels
        of_work = {"CUFLASH_SPLITS_TAIL", "CUFLASH_CLEARS_AHEAD"}  # how blocks share the work
        return {
            (kernel.source, kernel.name, tuple(define for define in kernel.defines if define[0] not in of_work))
            for kernel in kernels
            if kernel.source.startswith("helpers/") and kernel.source not in make_scores
        }

    make_scores = (
        "helpers/mask_bits.cu",
        "helpers/mask_tiles.cu",
        "helpers/block_index.cu",
        "helpers/backward_preprocess.cu",
    )

    plain = problem_of(dtype=dtype)
    bias = biased(64, "float32").bias
    assert bias is not None
    mask = replace(bias, dtype="bool")
    assert helpers(plain)
    for changes in ({"softcap": 5.0}, {"bias": bias}, {"mask": mask}, {"softcap": 5.0, "bias": bias, "mask": mask}):
        assert helpers(replace(plain, **changes)) == helpers(plain)
    assert helpers(replace(plain, dropout=0.5)) != helpers(plain)  # dv is scaled


# ---- Widths of accesses ----------------------------------------------------------------------------------------------

operands = st.builds(
    lambda shape, strides: Operand(shape=(*shape, 64), strides=(*strides, 1), dtype="float16"),
    st.tuples(*[st.integers(0, 3)] * 3),
    st.tuples(*[st.integers(-600, 600)] * 3),
)


@given(st.lists(operands, max_size=3), st.integers(0, 2**20).map(lambda n: 2 * n))
def test_access_bytes_is_the_widest_that_is_aligned(arrays, pointer):
    width = access_bytes(tuple(arrays), pointer)
    assert width in (2, 4, 8, 16)

    def aligned(width):
        rows = [x for x in arrays if 0 not in x.shape]
        steps = [s * 2 for x in rows for n, s in zip(x.shape[:3], x.strides[:3], strict=True) if n > 1]
        return all(step % width == 0 for step in (pointer, *steps))

    assert aligned(width)
    assert width == 16 or not aligned(2 * width)


@given(st.lists(operands, min_size=1, max_size=4))
def test_more_operands_never_widen_an_access(arrays):
    for count in range(len(arrays)):
        assert access_bytes(tuple(arrays)) <= access_bytes(tuple(arrays[:count]))


@pytest.mark.parametrize(("dim", "width"), [(64, 16), (72, 16), (60, 8), (62, 4), (61, 2), (1, 2), (8, 16), (256, 16)])
def test_access_bytes_of_contiguous_rows(dim, width):
    problem = problem_of(dim=dim, dim_v=dim)
    assert access_bytes((problem.q, problem.k, problem.v)) == width
    defines = dict(choose_plan(problem, DeviceSpec.for_arch("9.0")).kernels[0].defines)
    assert defines["CUFLASH_LOAD_BYTES"] == defines["CUFLASH_STORE_BYTES"] == width
