"""Plans for compute capability 9.0: rows and their problems, what TMA can read, tensor maps."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.arrays.array_info import Operand
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.argument import maps_offset
from cuflash.plan.sm90.conditions import FOUR_CONSUMERS, LONG_SEQLEN, THREE_CONSUMERS
from cuflash.plan.sm90.scored import CLAIMED_WAVES, MOST_CLAIMS, rounds
from cuflash.plan.tensor_map import TensorMapSpec, tensor_map_spec, why_not
from cuflash.spec.passes import BACKWARD, PASSES_WITHOUT_TANGENTS
from tests.problems import ARCHS, H200, problem_of
from tests.scored import of_functions


def sources(problem, device=H200, **options):
    return [kernel.source for kernel in choose_plan(problem, device, **options).kernels]


@pytest.mark.parametrize(
    ("sizes", "row"),
    [
        ({"dim": 64, "seqlen_q": 2**16}, (64, 256, 64)),
        ({"dim": 64, "seqlen_q": 2**16, "softcap": 2.0}, (64, 256, 64)),
        ({"dim": 64}, (64, 128, 128)),
        ({"dim": 64, "causal": True}, (64, 128, 64)),
        ({"dim": 72}, (128, 128, 128)),
        ({"dim": 128}, (128, 128, 128)),
        ({"dim": 128, "seqlen_q": 2**16, "seqlen_k": LONG_SEQLEN}, (128, 192, 80)),
        ({"dim": 128, "seqlen_q": 2**16, "seqlen_k": LONG_SEQLEN, "window": (9, None)}, (128, 192, 80)),
        ({"dim": 128, "seqlen_k": LONG_SEQLEN}, (128, 128, 128)),
        ({"dim": 128, "seqlen_q": 2**16, "seqlen_k": LONG_SEQLEN, "causal": True}, (128, 192, 80)),
        ({"dim": 128, "seqlen_q": 2**10, "seqlen_k": LONG_SEQLEN, "causal": True}, (128, 128, 128)),
        ({"dim": 128, "seqlen_q": 2**16, "seqlen_k": LONG_SEQLEN, "softcap": 2.0}, (128, 192, 80)),
        ({"dim": 192}, (192, 128, 96)),
        ({"dim": 256}, (256, 128, 64)),
    ],
)
def test_rows_of_the_problems_they_are_meant_for(sizes, row):
    (tile,) = choose_plan(problem_of(**sizes, dim_v=sizes["dim"]), H200).tiles
    assert (tile.max_dim, tile.block_m, tile.block_n) == row


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_gradients_of_wide_heads_have_rows_of_whole_16_bytes(name):
    """Else a row that is stored 16 bytes at a time would end past its last column."""
    problem = problem_of(512, 512, 300, 300)
    padded = {x: replace(getattr(problem, x), strides=(304 * 512 * 8, 304 * 512, 304, 1)) for x in "qkv"}
    problem = replace(problem, **padded)
    operands = {x: problem.q for x in ("out", "dout", "dq")} | {"dk": problem.k, "dv": problem.v}
    plan = choose_plan(problem, H200, BACKWARD, load_bytes=16, store_bytes=16, operands=operands, need=(name,))
    assert f"not sm90/backward_wide: a row of {name} is 600 bytes, not a multiple of the 16" in plan.reason


def test_only_its_own_architecture_gets_the_kernel():
    for arch in ARCHS:
        (kernel,) = choose_plan(problem_of(), DeviceSpec.for_arch(arch)).kernels
        digits = arch.replace(".", "")
        expected = ("sm90/forward.cu", "sm_90a") if arch == "9.0" else ("sm80/forward.cu", f"sm_{digits}")
        assert (kernel.source, kernel.target) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 60, "dim_v": 64}, "a stride of q is 120 bytes, not a positive multiple of 16"),
        ({"dim": 64, "dim_v": 60}, "a stride of v is 120 bytes, not a positive multiple of 16"),
        ({"seqlen_q": 0}, "q is empty"),
        ({"seqlen_k": 0}, "k is empty"),
        ({"batch": 0}, "q is empty"),
    ],
)
def test_what_the_tma_cannot_read(change, words):
    plan = choose_plan(problem_of(**change), H200)
    assert [kernel.source for kernel in plan.kernels] == ["sm80/forward.cu"]
    assert plan.tensor_maps == ()
    assert plan.run_time.resident_blocks == 0
    assert f"\nnot sm90/forward: {words}, which TMA cannot serve" in plan.describe(verbose=True, width=0).replace(
        "  ", ""
    )
    assert sources(problem_of()) == ["sm90/forward.cu"]


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_strides_that_the_tma_cannot_take(name):
    """Negative, zero, too long, of half a vector; along an axis that is not there, any."""
    problem = problem_of(heads_kv=4)
    good = problem.q if name == "out" else getattr(problem, name)
    for axis in range(3):
        for stride in (0, -64, 68, 2**39):
            strides = tuple(stride if i == axis else s for i, s in enumerate(good.strides))
            for shape in (good.shape, tuple(1 if i == axis else n for i, n in enumerate(good.shape))):
                operand = replace(good, strides=strides, shape=shape)
                changes: dict[str, Any] = {} if name == "out" else {name: operand}
                changed = replace(problem, **changes)
                operands = {"out": operand} if name == "out" else None
                plan = choose_plan(changed, H200, load_bytes=16, store_bytes=16, operands=operands)
                served = shape[axis] == 1
                # That many pairs are not worth a copy, but what is stored row by row needs none.
                assert plan.kernels[0].source == ("sm90/forward.cu" if served or name == "out" else "sm80/forward.cu")
                if not served:
                    assert f"a stride of {name} is {2 * stride} bytes" in plan.reason
                if not served and name == "out":
                    assert "out: stored row by row" in plan.reason


@pytest.mark.parametrize("columns", [56, 61, 64])
def test_rows_of_results_that_the_tma_cannot_write(columns):
    """Rows 128 bytes apart: it would write the 16 bytes in which a row ends, the last of which are not the row's."""
    problem = problem_of(dim_v=64, heads_kv=4)
    v = replace(problem.v, shape=(*problem.v.shape[:3], columns))
    out = replace(problem.q, shape=(*problem.q.shape[:3], columns))
    changed = replace(problem, v=v, head_dim_v=columns)
    plan = choose_plan(changed, H200, load_bytes=16, store_bytes=16, operands={"out": out})
    assert plan.kernels[0].source == "sm90/forward.cu"
    assert ("a row of out is 122 bytes, not a multiple of the 16 that are written at once" in plan.reason) == (
        columns == 61
    )
    assert [spec.name for spec in plan.tensor_maps] == ["q", "k", "v", "out"][: 3 if columns == 61 else 4]


@pytest.mark.parametrize("widths", [{"load_bytes": 8}, {"store_bytes": 2}, {"load_bytes": 4, "store_bytes": 16}])
def test_pointers_that_are_not_aligned(widths):
    plan = choose_plan(problem_of(), H200, **widths)
    is_read = "load_bytes" in widths
    assert plan.kernels[0].source == ("sm80/forward.cu" if is_read else "sm90/forward.cu")
    name = "q" if is_read else "out"
    assert f"{name} is aligned to {min(widths.values())} bytes only, not 16" in plan.reason


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_sms", [1, 2, 132])
@pytest.mark.parametrize("seqlen_q", [65, 256, 257, 900, 2**18])
def test_blocks_that_stay(seqlen_q, num_sms, causal):
    """As many as there are SMs, or units of work. Under a causal mask that is a pair of tiles of queries, unless both
    tiles of all pairs can start at once, or blocks claim one of many tiles after another."""
    problem = problem_of(seqlen_q, 2**18, batch=2, heads=3, heads_kv=3, causal=causal)
    plan = choose_plan(problem, replace(H200, num_sms=num_sms))
    (tile,), (kernel,) = plan.tiles, plan.kernels
    m_blocks = 2 * 3 * -(-seqlen_q // tile.block_m)
    claims = causal and CLAIMED_WAVES * num_sms <= m_blocks <= MOST_CLAIMS
    pairs = causal and not claims
    units = 2 * 3 * -(-seqlen_q // (2 * tile.block_m)) if pairs else m_blocks
    assert plan.run_time.resident_blocks == min(num_sms, units)
    assert kernel.grid == (2 * units if pairs and 2 * units <= num_sms else min(num_sms, units))
    defines = dict(kernel.defines)
    assert (defines["CUFLASH_PAIRS"], defines["CUFLASH_DYNAMIC_TILES"]) == (int(pairs), int(claims))
    assert dict(plan.scratch).get("arrivals", 0) == 2 * claims
    heads = plan.run_time.head_section
    how = ", both of a pair at once" if kernel.grid > plan.run_time.resident_blocks else ""
    what = f"over {m_blocks} query tiles{how}"
    if claims:
        what = f"claim one of {m_blocks} query tiles after another, the longest ones of {heads} heads first"
        assert heads == 6 or heads * m_blocks >= 6 * CLAIMED_WAVES * num_sms
    assert f"{kernel.grid} blocks, persistent, {what}" in plan.reason.splitlines()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [65, 900, 2**22])
def test_blocks_that_leave_on_a_device_that_computes_other_things(seqlen_q, causal):
    """Each has one tile of queries, or a pair of them where there are many."""
    problem = problem_of(seqlen_q, 2**18, batch=2, heads=3, heads_kv=3, causal=causal)  # few tiles, or too many
    plan = choose_plan(replace(problem, shares_device=True), H200)
    (tile,), (kernel,) = plan.tiles, plan.kernels
    m_blocks = 2 * 3 * -(-seqlen_q // tile.block_m)
    units = 2 * 3 * -(-seqlen_q // (2 * tile.block_m)) if causal else m_blocks
    divides_pairs = causal and seqlen_q < 2**22
    assert plan.run_time.resident_blocks == units
    assert kernel.grid == (2 * units if divides_pairs else units)
    each = "a pair" if causal and not divides_pairs else "one"
    assert f"{kernel.grid} blocks, not persistent, {each} each of {m_blocks} query tiles: " in plan.reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("arch", ["8.0", "9.0", "10.0"])
@pytest.mark.parametrize("sizes", [{}, {"seqlen_k": 0}, {"seqlen_q": 0}], ids=str)
def test_kernels_start_behind_those_that_are_launched(sizes, arch, dtype):
    """While these run, where the device can; the first waits for whatever there was before the call."""
    problem = problem_of(**{"seqlen_q": 300, "seqlen_k": 500, "heads": 4, "heads_kv": 2, "dtype": dtype} | sizes)
    for pass_ in PASSES_WITHOUT_TANGENTS:
        kernels = choose_plan(problem, DeviceSpec.for_arch(arch), pass_).kernels
        launched = [kernel.grid > 0 for kernel in kernels]
        expected = [arch != "8.0" and any(launched[:i]) for i in range(len(kernels))]
        assert [kernel.overlaps_previous for kernel in kernels] == expected
        assert [dict(kernel.defines)["CUFLASH_OVERLAPS_PREVIOUS"] for kernel in kernels] == list(map(int, expected))


@given(
    heads=st.integers(1, 300),
    seqlen=st.integers(129, 5000),  # fewer may be decoding
    dim=st.sampled_from([64, 128]),
    causal=st.booleans(),
    num_sms=st.sampled_from([16, 78, 132]),
)
def test_no_multiprocessor_idles_while_smaller_tiles_would_fill_it(heads, seqlen, dim, causal, num_sms):
    """Tiles of 128 queries have an SM each where there are enough; otherwise no choice of rows leaves more
    than a quarter of the time to fewer tiles than the best one does."""
    problem = problem_of(seqlen, seqlen, dim, dim, heads=heads, heads_kv=heads, batch=1, causal=causal)
    device = replace(H200, num_sms=num_sms)
    plan = choose_plan(problem, device)
    (tile,), (kernel,) = plan.tiles, plan.kernels
    smallest = 2 * heads * -(-seqlen // 256) if causal else heads * -(-seqlen // 128)
    if smallest <= num_sms:
        assert (tile.block_m, kernel.grid) == (128, smallest)
    per_tile = {128: 1.0, 192: THREE_CONSUMERS, 256: FOUR_CONSUMERS}
    took = {m: per_tile[m] * rounds(problem, device, m) for m in ((128, 192) if dim == 128 else (128, 256))}
    assert took[tile.block_m] == min(took.values()) or (dim == 128 and (causal or seqlen < LONG_SEQLEN))


@pytest.mark.parametrize(
    ("l2_mib", "window", "heads_kv", "section"),
    [
        (60, (1023, 0), 32, 128),
        (30, (1023, 0), 32, 64),
        (30, (1023, 0), 8, 128),
        (30, (511, 512), 32, 43),
        (0, (9, 0), 32, 1),
    ],
)
def test_heads_whose_short_tiles_start_side_by_side(l2_mib, window, heads_kv, section):
    """As many as have the keys of these tiles in L2: equal parts of all heads."""
    problem = problem_of(4096, 4096, 64, 64, batch=4, heads=32, heads_kv=heads_kv, window=window)
    plan = choose_plan(problem, replace(H200, l2_bytes=l2_mib << 20))
    assert plan.run_time.head_section == section
    assert plan.tiles[0].num_stages == 8


@pytest.mark.parametrize(("heads", "tile"), [(8, (128, 128)), (16, (192, 64))])
def test_windows_of_wide_heads_take_larger_tiles_that_are_done_first(heads, tile):
    """Tiles of 8 heads take 2 rounds of 1.3 in place of 2, of 16 heads 3 in place of 4."""
    plan = choose_plan(problem_of(4096, 4096, 128, 128, heads=heads, heads_kv=heads, batch=1, window=(1023, 0)), H200)
    (taken,) = plan.tiles
    assert (taken.block_m, taken.block_n) == tile


def test_a_window_with_a_left_side_has_no_pairs():
    for window, pairs in (((None, 0), 1), ((5, 0), 0), ((5, None), 0), (None, 0)):
        (kernel,) = choose_plan(problem_of(window=window), H200).kernels
        assert dict(kernel.defines)["CUFLASH_PAIRS"] == pairs


@pytest.mark.parametrize(
    ("functions", "options", "forward", "backward", "words"),
    [
        (("alibi", None), {}, (64, 128, 128), "sm90", "dslopes: summed by the main kernel: exact sums"),
        (("distance", "near"), {}, (64, 128, 128), "sm90", "dpos_q, dpos_k, dgamma, dtable: summed by the main kernel"),
        (("with_pairs", None), {}, (64, 192, 64), "sm90", "by sm80/backward_scores, which makes the weights again"),
        ((None, "documents"), {}, (64, 128, 128), "sm90", "block-sparse index of tiles of queries"),
        (("alibi", None), {"deterministic": True, "dropout": 0.1}, (64, 128, 128), "sm90", "add to dq in order"),
        ((None, "near"), {"deterministic": True}, (64, 128, 128), "sm90", "dq has a kernel of its own that adds"),
        (("capped", None), {"dropout": 0.1}, (64, 128, 128), "sm80", "dropout marks weights by their sign"),
    ],
)
def test_functions_and_what_of_them_other_kernels_serve(functions, options, forward, backward, words):
    problem = replace(of_functions(functions, "bfloat16", 64), **options)
    plan = choose_plan(problem, H200)
    (tile,) = plan.tiles
    assert plan.kernels[-1].source == "sm90/forward.cu"
    assert (tile.max_dim, tile.block_m, tile.block_n) == forward
    plan = choose_plan(problem, H200, BACKWARD, need=("dq", "dk", "dv", *problem.score_arg_gradients))
    assert f"{backward}/backward.cu" in [kernel.source for kernel in plan.kernels]
    assert words in plan.reason


@pytest.mark.parametrize(
    ("functions", "options", "dim", "tile"),
    [
        ((None, "documents"), {}, 64, (256, 64)),
        (("alibi", "documents"), {"window_right": 0}, 64, (256, 64)),
        ((None, "documents"), {"window_left": 9}, 64, (128, 128)),
        ((None, "documents"), {"dropout": 0.1}, 64, (128, 128)),
        ((None, "documents"), {}, 128, (128, 128)),
        (("plane", None), {}, 64, (256, 64)),
        (("plane", None), {"window_right": 0}, 64, (256, 64)),
        (("plane", None), {"dropout": 0.1}, 64, (192, 64)),
        (("gated", None), {}, 64, (256, 64)),
        (("plane", "documents"), {}, 64, (256, 64)),
        (("plane", "documents"), {"dropout": 0.1}, 64, (128, 128)),
        (("gathered", "documents"), {}, 64, (128, 128)),
        (("box", None), {}, 64, (256, 64)),
        (("distance", None), {}, 64, (192, 64)),
        (("gathered", None), {}, 64, (192, 64)),
        (("plane", None), {}, 128, (192, 80)),
        (("box", None), {}, 128, (192, 80)),
        (("box", None), {"window_right": 0}, 128, (128, 128)),
        (("plane", None), {"dropout": 0.1}, 128, (128, 128)),
        (("gated", None), {"window_right": 0}, 128, (128, 96)),
        (("box", "documents"), {}, 128, (128, 128)),
        (("gathered", "documents"), {}, 128, (128, 64)),
        (("distance", None), {}, 128, (128, 64)),
    ],
)
def test_tiles_of_functions_and_many_queries(functions, options, dim, tile):
    problem = replace(of_functions(functions, "bfloat16", dim, 2048), **options)
    (chosen,) = choose_plan(problem, replace(H200, num_sms=1)).tiles
    assert (chosen.block_m, chosen.block_n) == tile


@pytest.mark.parametrize("options", [{}, {"window_right": 0}, {"dropout": 0.1}])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_of_points_and_few_queries(options, dim):
    problem = replace(of_functions(("plane", None), "bfloat16", dim, 2048), **options)
    (chosen,) = choose_plan(problem, H200).tiles
    assert (chosen.block_m, chosen.block_n) == (128, 128)


def test_tensor_maps_of_a_plan():
    problem = problem_of(300, 500, dim=72, dim_v=128, batch=2, heads=4, heads_kv=2)
    plan = choose_plan(problem, H200)
    (tile,), (kernel,) = plan.tiles, plan.kernels
    shape, strides = (128, 300, 4, 2), (256, 76_800, 307_200)
    assert plan.tensor_maps == (
        tensor_map_spec("q", problem.q, tile.block_m),
        tensor_map_spec("k", problem.k, tile.block_n),
        tensor_map_spec("v", problem.v, tile.block_n),
        TensorMapSpec(name="out", dtype="bfloat16", shape=shape, strides_bytes=strides, rows=64),
    )
    assert plan.tensor_maps[1].shape == (72, 500, 2, 2)
    assert plan.tensor_maps[1].strides_bytes == (144, 72_000, 144_000)
    assert dict(kernel.defines)["CUFLASH_ARGUMENT_BYTES"] == maps_offset(problem) + 4 * 128


@given(st.tuples(*[st.integers(0, 3)] * 4), st.tuples(*[st.integers(-64, 2**40)] * 3))
def test_what_has_no_obstacle_meets_the_rules_of_tensor_maps(shape, strides):
    """Those of cuTensorMapEncodeTiled in the CUDA driver API."""
    operand = Operand(shape=shape, strides=(*strides, 1), dtype="float16")
    if why_not("q", operand) is None:
        spec = tensor_map_spec("q", operand, 64)
        assert all(1 <= n <= 2**32 for n in spec.shape)
        assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in spec.strides_bytes)
        assert spec.rows <= 256


@pytest.mark.parametrize(
    ("score", "head_dim", "why"),
    [
        ("distance", 64, None),
        ("tempered", 128, None),
        ("with_pairs", 64, "an entry of pairs belongs to a pair [i, j], each of which adds to memory"),
        ("gathered", 64, "an entry of table belongs to a pair [gather], each of which adds to memory"),
        ("distance", 192, None),  # with two stages of queries
        ("tempered", 256, "where roles are split the consumer that makes dS does not know s"),
        ("box", 256, "232608 bytes for each exceed the 233472 bytes of shared memory"),
    ],
)
def test_whose_kernel_makes_gradients_of_arrays(score, head_dim, why):
    problem = of_functions((score, None), "bfloat16", head_dim)
    names = problem.score_arg_gradients
    plan = choose_plan(problem, H200, BACKWARD, need=("dq", "dk", "dv", *names))
    sources = [kernel.source for kernel in plan.kernels]
    assert sources.count("helpers/score_args_gradients.cu") == 2  # before and after the sums
    assert sources.count("sm80/backward_scores.cu") == (0 if why is None else 2)
    (main,) = (kernel for kernel in plan.kernels if kernel.source == "sm90/backward.cu")
    assert dict(main.defines)["CUFLASH_NEEDS_SCORE_ARGS"] == (3 if why is None else 0)
    assert ("summed by the main kernel" in plan.reason) == (why is None)
    if why is not None:
        assert f"{', '.join(names)}: not by sm90/backward: " in plan.reason
        assert why in plan.reason
    assert plan.traffic is None  # sums of arrays have no model
    alone = choose_plan(problem, H200, BACKWARD, need=names)  # no main kernel is there to make them
    assert [kernel.source for kernel in alone.kernels].count("sm80/backward_scores.cu") == 2
