"""Calls without values by the kernels in the emulator: lse alone and its derivatives, by the oracle rule."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.arrays.array_info import ITEMSIZE
from cuflash.emulator import passes
from cuflash.emulator.launching import SCHEDULES, Schedule
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm80.tiles import (
    BACKWARD_CHUNKED_TILES,
    DQ_CHUNKED_TILES,
    FORWARD_CHUNKED_TILES,
    SCORES_CHUNKED_TILES,
    BackwardChunkedTile,
)
from cuflash.plan.sm90.chunked import BACKWARD_CHUNKED_SM90_TILES, FORWARD_CHUNKED_SM90_TILES
from cuflash.plan.sm90.tiles import FORWARD_FLOAT32_SM90_TILES, FORWARD_SM90_TILES, FORWARD_TF32_SM90_TILES
from cuflash.plan.tiles import Tile
from cuflash.spec.passes import BACKWARD, FORWARD
from cuflash.testing.tangents import everything
from tests.emulate import merges
from tests.emulate.attention import assert_tf32_split
from tests.emulate.tangents import check as check_tangents
from tests.sampling import examples, sample

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", "packed", "lengths")
SIZES: dict[str, Any] = {"seqlen_q": 113, "seqlen_k": 203, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}


def of(**options: Any) -> ct.Case:
    return ct.Case(**SIZES | options, has_values=False, dlse=True)


def check(
    case: ct.Case,
    arch: str | DeviceSpec,
    deterministic: bool = False,
    forward: Sequence[Tile] | None = None,
    backward: Sequence[Tile] | None = None,
) -> None:
    arrays, problem = case.arrays(), replace(case.problem, deterministic=deterministic)
    given = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
    out, lse = passes.forward(problem, given, arch=arch, tiles=forward, **case.random)
    ct.assert_forward(case, out, lse)
    if "dout" not in arrays:
        return
    need = ct.gradients_of(problem)
    found = passes.backward(problem, arrays, out, lse, need=need, arch=arch, tiles=backward, **case.random)
    ct.assert_backward(case, **dict(zip(need, found, strict=True)))


@settings(max_examples=examples(8))
@given(ct.cases(features=FEATURES, max_seqlen=65, max_head_dim=64, max_scores=2**12), st.sampled_from(("8.0", "9.0")))
def test_tangents(case, arch):
    case = replace(case, has_values=False, dlse=True)
    check_tangents(case, everything(case), arch)


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD], ids=str)
def test_products_over_the_columns_of_v_are_not_planned(pass_, arch):
    case = ct.Case(seqlen_q=256, seqlen_k=256, head_dim=64, dtype="bfloat16", has_values=False)
    plan = choose_plan(case.problem, DeviceSpec.for_arch(arch), pass_)
    assert "dv" not in plan.need
    assert pass_.flops(case.problem) == {FORWARD: 1, BACKWARD: 3}[pass_] * 2 * 256**2 * 64


OF_SM90: tuple[dict[str, Any], ...] = (
    {"causal": True, "sinks": True},  # kHoldK
    {"head_dim": 128, "window": (60, 20), "alibi_slopes": (4,)},  # kSharedDs
    {"head_dim": 192, "dropout": 0.2},  # kSplitRoles
    {"bias": (1, 4, 200, 260), "mask": (1, 1, 260), "head_dim": 128},
    {"cu_seqlens_q": (0, 40, 200), "cu_seqlens_k": (0, 90, 250), "causal": True},
    {"softcap": 5.0, "block_mask": (4,), "block_size": (64, 64), "dtype": "float16"},
    {"dtype": "float32", "causal": True, "sinks": True, "seqlen_k": 200},  # blocks skip tiles of keys
    {"bias": (4, 200, 1), "softcap": 5.0, "window": (60, 20)},
    {"dtype": "float32", "bias": (1, 4, 200, 1)},
    {"dtype": "float32", "head_dim": 12, "bias": (1, 1, 1, 260)},  # the producer splits operands
    {"dtype": "float32", "head_dim": 128, "bias": (1, 4, 200, 260), "dropout": 0.2},
)


@pytest.mark.parametrize(
    ("options", "deterministic"), sample([(x, fixed) for x in OF_SM90 for fixed in (False, True)], 2), ids=str
)
def test_wgmma_kernels(options, deterministic):
    case = of(**{"dtype": "bfloat16", "seqlen_q": 200, "seqlen_k": 260} | options)
    problem = replace(case.problem, deterministic=deterministic)
    for pass_ in (FORWARD, BACKWARD):
        main = [kernel.source for kernel in choose_plan(problem, DeviceSpec.for_arch("9.0"), pass_).kernels]
        assert deterministic or any(f"sm90/{pass_}" in source for source in main), main
    check(case, "9.0", deterministic=deterministic)


ROWS = tuple(
    (row, precision)
    for table, precision in (
        (FORWARD_SM90_TILES, "highest"),
        (FORWARD_FLOAT32_SM90_TILES, "highest"),
        (FORWARD_TF32_SM90_TILES, "tf32"),
    )
    for row in table
    if row.serves == "no values"
)


@pytest.mark.parametrize(
    ("row", "precision"), ROWS, ids=[f"{row.max_dim}-{row.block_m}x{row.block_n}-{name}" for row, name in ROWS]
)
@settings(max_examples=examples(16))
@given(data=st.data())
def test_rows_for_lse_alone(row, precision, data):
    """Which the planner takes for longer problems only; where one has no space for a bias it serves none."""
    features = ("causal", "window", "scale", "softcap", "bias", "mask", "alibi_slopes", "gqa", "sinks", "kv_lengths")
    dtypes = ("float32",) if row.element_bytes == 4 else ("float16", "bfloat16")
    case = data.draw(
        ct.cases(features=features, dtypes=dtypes, max_seqlen=400, max_head_dim=row.max_dim, max_scores=2**16)
    )
    bias = None if case.bias is not None and 1 not in case.bias[-2:] else case.bias
    dim = case.head_dim if row.element_bytes == 4 else -(-case.head_dim // 8) * 8
    case = replace(case, head_dim=dim, bias=bias, has_values=False, dlse=True)
    given = {name: x for name, x in case.arrays().items() if name not in ("dout", "dlse")}
    problem = replace(case.problem, precision=precision)
    try:
        plan = passes.plan_for(problem, FORWARD, given, "9.0", [row])
    except NotImplementedError:  # arrays that TMA cannot read
        assume(False)
    assert plan.tiles[0].block_m == row.block_m
    results = passes.forward(problem, given, arch="9.0", tiles=[row], **case.random)
    if precision == "tf32":
        assert_tf32_split(problem, given, {"lse": results[1]})
    else:
        ct.assert_forward(case, *results)


# ---- Narrow heads ----------------------------------------------------------------------------------------------------

OF_POINTS: tuple[dict[str, Any], ...] = (
    {"bias": (1, 1, 1, 203)},  # one more column of k
    {"bias": (1, 4, 1, 203), "causal": True, "sinks": True, "alibi_slopes": (4,)},
    {"bias": (1, 4, 113, 203), "softcap": 5.0},
    {"bias": (4, 113, 1), "window": (40, 9)},
    {"mask": (113, 203), "dropout": 0.2},
    {"cu_seqlens_q": (0, 40, 113), "cu_seqlens_k": (0, 90, 200)},
    {"page_size": 16, "seqlen_k": 208},
    {"seqlen_q": 300, "seqlen_k": 700, "bias": (1, 4, 1, 700), "causal": True},
)


@pytest.mark.parametrize(
    ("case", "arch"),
    sample(
        [
            (of(dtype="float32", head_dim=head_dim, **options), arch)
            for options in OF_POINTS
            for head_dim in (1, 3, 8)
            for arch in ("7.5", "8.0", "9.0")
        ],
        8,
    ),
    ids=str,
)
def test_narrow_heads(case, arch):
    plan = choose_plan(case.problem, DeviceSpec.for_arch(arch), FORWARD)
    assert plan.kernels[-1].source == "sm80/forward_narrow.cu"
    check(case, arch)


@settings(max_examples=examples(32))
@given(
    ct.cases(features=FEATURES, dtypes=("float32",), max_seqlen=300, max_head_dim=8, max_scores=2**13),
    st.sampled_from(("7.5", "8.0", "9.0")),
)
def test_options_of_narrow_heads(case, arch):
    check(replace(case, has_values=False, dlse=True), arch)


# ---- Chunks of columns -----------------------------------------------------------------------------------------------

CHUNKED = (FORWARD_CHUNKED_TILES, BACKWARD_CHUNKED_TILES, DQ_CHUNKED_TILES, SCORES_CHUNKED_TILES)
SHORT = {"seqlen_q": 40, "seqlen_k": 70, "num_heads": 2, "num_heads_kv": 1}
LONG: tuple[dict[str, Any], ...] = (
    {"head_dim": 2048, "causal": True, "sinks": True, "dtype": "bfloat16"},
    {"head_dim": 1100, "dtype": "float32", "bias": (1, 2, 40, 70)},
    {"head_dim": 1025, "dtype": "float64", "softcap": 5.0},
    {"head_dim": 4096, "dtype": "float16", "seqlen_q": 20, "seqlen_k": 70},
)


@pytest.mark.parametrize("case", sample([of(**SHORT | options) for options in LONG], 20), ids=str)
def test_long_heads(case):
    sources = [choose_plan(case.problem, DeviceSpec.for_arch("9.0"), pass_).kernels for pass_ in (FORWARD, BACKWARD)]
    expected = {"sm80/forward_chunked.cu", "sm80/backward_chunked.cu", "sm80/backward_dq_chunked.cu"}
    if ITEMSIZE[case.dtype] == 2:
        expected = {f"sm90/{name}.cu" for name in ("forward_chunked", "backward_chunked_ds", "backward_chunked")}
    assert expected <= {kernel.source for kernels in sources for kernel in kernels}
    check(case, "9.0")


OF_HOPPER: tuple[dict[str, Any], ...] = (
    {"causal": True, "sinks": True},
    {"bias": (1, 1, 1, 600), "softcap": 5.0, "alibi_slopes": (4,)},
    {"bias": (1, 4, 300, 600), "window": (60, 20)},
    {"mask": (300, 600), "kv_lengths": (41, 600), "batch": 2},
    {"block_mask": (4,), "block_size": (128, 256), "sinks": True},
    {"head_dim": 321},  # rows that TMA cannot read are copied
    {"seqlen_k": 200},  # whose keys are not split
)


@pytest.mark.parametrize(
    ("options", "row_blocks"), sample([(x, blocks) for x in OF_HOPPER for blocks in (1, 2)], 4), ids=str
)
def test_long_heads_by_wgmma(options, row_blocks):
    case = of(**{"dtype": "bfloat16", "head_dim": 272, "seqlen_q": 300, "seqlen_k": 600} | options)
    tile = FORWARD_CHUNKED_SM90_TILES[0]
    check_lse(case, tile.changed(row_blocks=row_blocks, block_m=tile.rows * row_blocks))


@settings(max_examples=examples(16))
@given(
    ct.cases(features=FEATURES, dtypes=("float16", "bfloat16"), max_seqlen=600, max_head_dim=200, max_scores=2**17),
    st.sampled_from((128, 192)),
    st.sampled_from((1, 2)),
    st.sampled_from((64, 256)),
)
def test_options_of_long_heads_by_wgmma(case, rows, row_blocks, block_n):
    """Of heads of any length, by the kernel of long ones."""
    case = replace(case, has_values=False, dlse=True)
    assume(not (case.kv_dtype or case.page_size or case.cu_seqlens_q))
    tile = FORWARD_CHUNKED_SM90_TILES[0].changed(block_m=rows * row_blocks, row_blocks=row_blocks, block_n=block_n)
    check_lse(case, tile)


def check_lse(case: ct.Case, tile: Tile) -> None:
    given = {name: x for name, x in case.arrays().items() if name not in ("dout", "dlse")}
    plan = passes.plan_for(case.problem, FORWARD, given, "9.0", [tile])
    assert plan.kernels[-1].source == "sm90/forward_chunked.cu"
    ct.assert_forward(case, *passes.forward(case.problem, given, arch="9.0", tiles=[tile], **case.random))


OF_GEMMS_FEATURES = ("causal", "window", "scale", "softcap", "bias", "alibi_slopes", "gqa", "sinks")
OF_GEMMS: tuple[dict[str, Any], ...] = (
    {"bias": (1, 1, 1, 330), "softcap": 5.0, "alibi_slopes": (2,), "sinks": True},
    {"bias": (1, 2, 150, 1), "causal": True},
    {"window": (30, 20), "batch": 2, "dtype": "float16", "seqlen_k": 400},
    {"head_dim": 1032, "seqlen_k": 200},
)


@pytest.mark.parametrize(
    ("options", "block_m", "need"),
    sample(
        [(x, m, need) for x in OF_GEMMS for m in (128, 192) for need in (("dq", "dk"), ("dq",), ("dk",))],
        4,
    ),
    ids=str,
)
def test_gradients_of_long_heads_by_wgmma(options, block_m, need):
    case = of(**{"dtype": "bfloat16", "num_heads": 2, "num_heads_kv": 1, "seqlen_q": 150, "seqlen_k": 330} | options)
    check_gradients(case, need, of_gemms(block_m=block_m, block_n=64, chunk_tiles=6, key_tiles=2))


@settings(max_examples=examples(16))
@given(
    ct.cases(
        features=OF_GEMMS_FEATURES, dtypes=("float16", "bfloat16"), max_seqlen=600, max_head_dim=300, max_scores=2**17
    ),
    st.sampled_from((128, 192)),
    st.sampled_from((64, 256)),
    st.sampled_from((0, 6, 12)),
    st.sampled_from((1, 2)),
    st.sampled_from(SCHEDULES),
)
def test_options_of_gradients_by_wgmma(case, block_m, block_n, chunk_tiles, key_tiles, schedule):
    """Of heads of any length, by the kernels of long ones."""
    per_pair = case.bias is not None and 1 not in case.bias[-2:]
    bias = None if per_pair else case.bias
    case = replace(case, head_dim=-(-case.head_dim // 8) * 8, bias=bias, has_values=False, dlse=True)
    tile = of_gemms(block_m=block_m, block_n=block_n, chunk_tiles=chunk_tiles, key_tiles=key_tiles)
    check_gradients(case, ("dq", "dk"), tile, schedule)


def of_gemms(**changes: int) -> Tile:
    boxes = 1 if changes["block_n"] == 64 else 2
    return BACKWARD_CHUNKED_SM90_TILES[0].changed(num_stages=3, result_boxes=boxes, **changes)


def check_gradients(case: ct.Case, need: tuple[str, ...], tile: Tile, schedule: Schedule = SCHEDULES[0]) -> None:
    arrays, problem = case.arrays(), replace(case.problem, deterministic=True)
    try:
        plan = passes.plan_for(problem, BACKWARD, arrays, "9.0", [tile], need=need)
    except NotImplementedError:  # arrays that TMA cannot read
        assume(False)
    assert plan.kernels[-1].source == "sm90/backward_chunked.cu"
    out, lse = passes.forward(problem, {name: x for name, x in arrays.items() if name != "dlse"}, arch="9.0")
    found = passes.backward(problem, arrays, out, lse, need=need, arch="9.0", tiles=[tile], schedule=schedule)
    ct.assert_backward(case, **dict(zip(need, found, strict=True)))


def test_splits_of_the_keys_of_long_heads():
    """Few query tiles have as many splits as fill the device; a call that is batch_invariant has none."""
    problem = of(dtype="bfloat16", seqlen_q=130, seqlen_k=1 << 16, head_dim=2048, num_heads=1, num_heads_kv=1).problem
    kernel = choose_plan(problem, DeviceSpec.for_arch("9.0"), FORWARD).kernels[-1]
    assert kernel.source == "sm90/forward_chunked.cu"
    assert 0.9 * 132 <= kernel.grid <= 132
    plan = choose_plan(replace(problem, batch_invariant=True), DeviceSpec.for_arch("9.0"), FORWARD)
    assert plan.kernels[-1].source == "sm80/forward_chunked.cu"


@settings(max_examples=examples(32))
@given(
    ct.cases(features=FEATURES, max_seqlen=129, max_head_dim=200, max_scores=2**13),
    st.sampled_from(("8.0", "7.5")),
    st.sampled_from((1, 2, 8)),
)
def test_chunks_of_columns(case, arch, slice_chunks):
    """Of heads of any length, by the kernels of long ones: the last chunk has a few columns or all of them."""
    case = replace(case, has_values=False, dlse=True)
    assume(not case.kv_dtype)
    tiles = [next(row for row in table if row.element_bytes == ITEMSIZE[case.dtype]) for table in CHUNKED]
    tiles = [
        tile.changed(slice_chunks=slice_chunks) if isinstance(tile, BackwardChunkedTile) else tile for tile in tiles
    ]
    check(case, arch, forward=tiles[:1], backward=tiles[1:])


def test_partial_gradients_of_long_heads_are_not_rounded():
    case = of(**SHORT, head_dim=1100, dtype="bfloat16")
    arrays = case.arrays()
    given = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
    out, lse = passes.forward(case.problem, given, arch="9.0")
    rounded = passes.backward(case.problem, arrays, out, lse, need=("dq", "dk"), arch="9.0")
    wide = replace(case.problem, wide=("dq", "dk"))
    for sums, x in zip(passes.backward(wide, arrays, out, lse, need=("dq", "dk"), arch="9.0"), rounded, strict=True):
        assert sums.dtype == np.float32
        np.testing.assert_array_equal(sums.astype(x.dtype), x)


def test_partial_results_merge():
    """Of lse alone: by a thread for each row, since there are no columns."""
    merges.check(0)
