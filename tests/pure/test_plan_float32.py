"""Plans for float32 on compute capability 9.0, whose products are sums of products of bf16 terms."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.arrays.array_info import Operand
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm90.forward import FEW_READERS, SPLIT_MAX_DIM
from cuflash.plan.sm90.tiles import (
    BACKWARD_FLOAT32_SM90_TILES,
    BackwardFloat32Sm90Tile,
    ForwardFloat32Sm90Tile,
)
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS
from tests.problems import problem_of


def test_tf32_is_another_kernel_for_float32_alone():
    device = DeviceSpec.for_arch("9.0")
    for dtype in ("bfloat16", "float32", "float64"):
        one, other = (choose_plan(problem_of(dtype=dtype, precision=x), device) for x in ("highest", "tf32"))
        assert (one.kernels != other.kernels) == (dtype == "float32")
        assert ("tf32" in other.describe()) == (dtype == "float32")


def test_float32_is_split_into_pieces_where_that_pays():
    device = DeviceSpec.for_arch("9.0")

    def sources(device=device, dim=128, dim_v=128, seqlen_q=1024, seqlen_k=1024, **options):
        problem = problem_of(seqlen_q, seqlen_k, dim, dim_v, dtype="float32", **options)
        plan = choose_plan(problem, device)
        return [kernel.source for kernel in plan.kernels], plan

    both = ["helpers/split_fp32.cu", "sm90/forward_fp32.cu"]
    for options in ({}, {"causal": True}, {"dim": 61, "dim_v": 7}, {"dim_v": 64}, {"softcap": 3.0}):
        found, plan = sources(**options)
        assert found == both
        assert "split into 3 bf16 terms" in plan.reason
        assert [spec.name for spec in plan.tensor_maps] == ["q_copy", "k_copy", "v_copy"]
        assert {spec.dtype for spec in plan.tensor_maps} == {"bfloat16"}
        assert not {kernel.target for kernel in plan.kernels} - {"sm_90", "sm_90a"}
    whys: tuple[tuple[dict[str, Any], str], ...] = (
        ({"dim_v": 129}, "not sm90/forward_fp32: it serves head dimensions up to 128"),
        ({"seqlen_q": 1, "seqlen_k": 200}, "splitting these takes too long"),
        ({"seqlen_q": 100, "seqlen_k": 100}, "splitting these takes too long"),
        ({"window": (10, 10)}, "splitting these takes too long"),
        ({"seqlen_k": 0}, "splitting these takes too long"),
        ({"precision": "tf32", "dim": 129}, "not sm90/forward_fp32: it serves head dimensions up to 128"),
        ({"device": DeviceSpec.for_arch("10.0")}, ""),
        ({"device": DeviceSpec.for_arch("10.0"), "precision": "tf32"}, ""),
    )
    for options, why in whys:
        found, plan = sources(**options)
        assert found == ["sm80/forward.cu"]
        assert why in plan.reason
        assert why or "bf16 terms" not in plan.reason


def test_pieces_lie_below_each_other():
    """Boxes of any term, whatever the strides of the arrays; columns up to the head dimension, rows 16 bytes apart."""
    problem = problem_of(seqlen_q=300, seqlen_k=500, dim=61, dim_v=40, dtype="float32", batch=2, heads=4, heads_kv=2)
    plan = choose_plan(problem, DeviceSpec.for_arch("9.0"))
    tile = plan.tiles[0]
    assert dict(plan.scratch) == {
        "q_copy": 3 * 2 * 4 * 300 * 64 // 2,
        "k_copy": 3 * 2 * 2 * 500 * 64 // 2,
        "v_copy": 3 * 2 * 2 * 500 * 40 // 2,
    }
    q, k, v = plan.tensor_maps
    assert (q.shape, q.strides_bytes, q.rows) == ((61, 300, 4, 6), (128, 300 * 128, 4 * 300 * 128), tile.block_m)
    assert (k.shape, k.strides_bytes, k.rows) == ((61, 500, 2, 6), (128, 500 * 128, 2 * 500 * 128), tile.block_n)
    assert (v.shape, v.strides_bytes, v.rows) == ((40, 500, 2, 6), (80, 500 * 80, 2 * 500 * 80), tile.block_n)
    blocks = 2 * (4 * 3 + 2 * 2 * 4)  # of 128 rows
    assert [kernel.grid for kernel in plan.kernels] == [blocks, 2 * 4 * -(-300 // tile.block_m)]


@given(
    seqlen_q=st.integers(200, 3000),
    group=st.sampled_from((1, 2, 4)),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    precise=st.booleans(),
)
def test_float32_is_split_by_the_kernel_that_multiplies_it_where_few_tiles_read_keys(seqlen_q, group, dims, precise):
    """Then no bf16 terms go through memory, and TMA reads a bias alone."""
    precision = "highest" if precise else "tf32"
    problem = problem_of(seqlen_q, 1000, *dims, dtype="float32", heads=4, heads_kv=4 // group, precision=precision)
    plan = choose_plan(problem, DeviceSpec.for_arch("9.0"))
    (tile,) = plan.tiles
    assert isinstance(tile, ForwardFloat32Sm90Tile)
    few = precise and max(dims) <= SPLIT_MAX_DIM and group * -(-seqlen_q // tile.block_m) <= FEW_READERS
    assert tile.splits_operands == few
    before = [] if few else ["helpers/split_fp32.cu"]
    assert [kernel.source for kernel in plan.kernels] == [*before, "sm90/forward_fp32.cu"]
    assert len(plan.scratch) == len(plan.tensor_maps) == (0 if few else 3)
    assert ("as they are loaded" in plan.reason) == few


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_tf32_is_two_bf16_terms(dim, pass_):
    """The kernels of three terms, with two thirds of their memory."""
    device = DeviceSpec.for_arch("9.0")
    highest, tf32 = (
        choose_plan(problem_of(1024, 1024, dim, dim, dtype="float32", precision=precision), device, pass_)
        for precision in ("highest", "tf32")
    )
    assert [kernel.source for kernel in tf32.kernels] == [kernel.source for kernel in highest.kernels]
    assert f"sm90/{pass_}_fp32.cu" in [kernel.source for kernel in tf32.kernels]
    assert "split into 2 bf16 terms" in tf32.reason
    assert "more accurate than one of TF32" in tf32.reason
    assert "TF32" not in highest.reason
    for plan, count in ((highest, 3), (tf32, 2)):
        (tile,) = plan.tiles
        assert isinstance(tile, ForwardFloat32Sm90Tile | BackwardFloat32Sm90Tile) and tile.bf16_terms == count
        counts = [dict(kernel.defines).get("CUFLASH_BF16_TERMS") for kernel in plan.kernels if "sm90/" in kernel.source]
        assert counts == [count]
        assert {spec.shape[3] for spec in plan.tensor_maps} == {count * plan.problem.batch}
    thirds = {name: size * 2 for name, size in highest.scratch if name.endswith("_copy")}
    assert {name: size * 3 for name, size in tf32.scratch if name.endswith("_copy")} == thirds


@given(
    dims=st.tuples(st.integers(1, 128), st.integers(1, 128)),
    precision=st.sampled_from(("highest", "tf32")),
    row_stride=st.sampled_from((0, 1024, 1026)),
    masks_keys=st.booleans(),
)
def test_what_is_added_to_scores_of_float32(dims, precision, row_stride, masks_keys):
    """By tile where TMA can read it and it fits; else the plan says that pairs are looked up."""
    bias = Operand(shape=(2, 4, 1024, 1024), strides=(0, 1024 * 1026, row_stride, 1), dtype="float32")
    mask = Operand(shape=(2, 4, 1024, 1024), strides=(1024, 0, 0, 1), dtype="bool")
    problem = problem_of(1024, 1024, *dims, dtype="float32", precision=precision)
    problem = replace(problem, bias=bias, mask=mask if masks_keys else None)
    for pass_ in PASSES_WITHOUT_TANGENTS:
        plan = choose_plan(problem, DeviceSpec.for_arch("9.0"), pass_)
        tile = plan.tiles[0]
        assert isinstance(tile, ForwardFloat32Sm90Tile | BackwardFloat32Sm90Tile)
        fits = pass_ is FORWARD or min(dims) <= 64
        loads = row_stride == 1024 and fits
        assert tile.bias_of_pairs == 4 * loads
        assert tile.bias_of_keys == (row_stride == 0)
        assert tile.mask_of_keys == (masks_keys and (loads or row_stride == 0))
        assert ("bias" in {spec.name for spec in plan.tensor_maps}) == loads
        assert ("looked up pair by pair" in plan.reason) == (not loads and row_stride > 0)
        defines = dict(next(kernel for kernel in plan.kernels if kernel.source.endswith("ward_fp32.cu")).defines)
        assert defines["CUFLASH_BATCH_FIRST"] == int(loads and pass_ is FORWARD)


def test_gradients_of_float32_by_bf16_terms():
    device = DeviceSpec.for_arch("9.0")

    def plan_of(device=device, dim=128, dim_v=128, seqlen_q=1024, seqlen_k=1024, **options):
        problem = problem_of(seqlen_q, seqlen_k, dim, dim_v, dtype="float32", **options)
        return choose_plan(problem, device, BACKWARD)

    sources = [
        "helpers/backward_preprocess.cu",
        "helpers/split_fp32.cu",
        "sm90/backward_fp32.cu",
        "helpers/backward_postprocess.cu",
    ]
    for options in ({}, {"causal": True}, {"dim": 61, "dim_v": 7}, {"dim": 64, "dim_v": 65}, {"softcap": 3.0}):
        plan = plan_of(**options)
        assert [kernel.source for kernel in plan.kernels] == sources
        assert {spec.name for spec in plan.tensor_maps} == {f"{name}_copy" for name in ("q", "k", "v", "dout")}
        assert {(spec.rows, spec.dtype) for spec in plan.tensor_maps} == {(64, "bfloat16")}
        assert {dict(kernel.defines)["CUFLASH_PLAIN_FRAGMENTS"] for kernel in plan.kernels} == {1}
        assert {kernel.target for kernel in plan.kernels} == {"sm_90", "sm_90a"}
        largest = max(plan.problem.head_dim, plan.problem.head_dim_v)
        assert plan.tiles[0] == next(tile for tile in BACKWARD_FLOAT32_SM90_TILES if tile.max_dim >= largest)
    whys: tuple[tuple[dict[str, Any], str], ...] = (
        ({"dim_v": 129}, "not sm90/backward_fp32: it serves head dimensions up to 128"),
        ({"seqlen_q": 60, "seqlen_k": 60}, "not sm90/backward_fp32: for fewer than"),
        ({"seqlen_k": 0}, "not sm90/backward_fp32: for fewer than"),
        ({"deterministic": True}, "not sm90/backward_fp32: it adds to dq in no fixed order"),
        ({"deterministic": True, "precision": "tf32"}, "not sm90/backward_fp32: it adds to dq in no fixed order"),
        ({"precision": "tf32", "dim": 129}, "not sm90/backward_fp32: it serves head dimensions up to 128"),
        ({"device": DeviceSpec.for_arch("10.0")}, ""),
        ({"device": DeviceSpec.for_arch("10.0"), "precision": "tf32"}, ""),
    )
    for options, why in whys:
        plan = plan_of(**options)
        assert "sm80/backward.cu" in [kernel.source for kernel in plan.kernels]
        assert {dict(kernel.defines)["CUFLASH_PLAIN_FRAGMENTS"] for kernel in plan.kernels} == {0}
        assert why in plan.reason
        assert why or "_fp32" not in plan.reason


@pytest.mark.parametrize("axes", [(0, 1), (1, 1), (1, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"deterministic": True}], ids=str)
def test_dbias_of_float32_by_the_main_kernel(axes, options):
    """It adds tiles to dbias, or stores them; an earlier kernel clears what is added to, or may be left out."""
    plain = problem_of(1024, 1024, 64, 64, dtype="float32", **options)
    sizes = (plain.batch, plain.num_heads)
    strides = tuple(stride * on for stride, on in zip((sizes[1] << 20, 1 << 20), axes, strict=True))
    bias = Operand(shape=(*sizes, 1024, 1024), strides=(*strides, 1024, 1), dtype="float32")
    plan = choose_plan(replace(plain, bias=bias), DeviceSpec.for_arch("9.0"), BACKWARD, need=("dk", "dv", "dbias"))
    defines = {kernel.source: dict(kernel.defines) for kernel in plan.kernels}
    summed = math.prod(n for n, on in zip(sizes, axes, strict=True) if not on)
    is_written = summed <= 2 or not plain.deterministic
    assert ("sm90/backward_bias.cu" in defines) == (not is_written)
    main, preprocess = defines["sm90/backward_fp32.cu"], defines["helpers/backward_preprocess.cu"]
    assert main["CUFLASH_NEEDS_DBIAS"] == is_written
    assert [spec.name for spec in plan.tensor_maps][4:] == ["bias", "dbias"][: 1 + is_written]
    if is_written:
        assert main["CUFLASH_ADDS_DBIAS"] == (summed > 1)
        assert preprocess.get("CUFLASH_CLEARS_DBIAS", 0) == (summed > 1 or plain.window_right is not None)
        assert "dbias: the main kernel " + ("adds" if summed > 1 else "stores") in plan.reason
