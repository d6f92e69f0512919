"""Plans of the passes with tangents."""

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.architectures import BACKWARD_JVP_FAMILIES, DQ_JVP_FAMILIES, JVP_FAMILIES
from cuflash.plan.sm80.tiles import BACKWARD_JVP_TILES, DQ_JVP_TILES, JVP_TILES, SCORES_JVP_TILES
from cuflash.plan.sm90.backward_jvp import BACKWARD_JVP_SM90_TILES, BackwardJvpSm90Tile
from cuflash.plan.sm90.jvp import JVP_SM90_TILES, JVP_WIDE_SM90_TILES, JvpSm90Tile, JvpWideSm90Tile
from cuflash.plan.sm90.tiles import (
    BACKWARD_JVP_FLOAT32_SM90_TILES,
    BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES,
    BACKWARD_JVP_TF32_SM90_TILES,
    BACKWARD_JVP_TF32_WIDE_SM90_TILES,
    JVP_FLOAT32_SM90_TILES,
    JVP_FLOAT32_WIDE_SM90_TILES,
    JVP_TF32_SM90_TILES,
    JVP_TF32_WIDE_SM90_TILES,
    BackwardJvpFloat32Sm90Tile,
    BackwardJvpFloat32WideSm90Tile,
    JvpFloat32Sm90Tile,
    JvpFloat32WideSm90Tile,
)
from cuflash.spec.passes import BACKWARD_JVP, JVP
from cuflash.spec.problem import make_problem
from cuflash.testing import Case
from tests.cuda_scores import HEAD

if TYPE_CHECKING:
    from cuflash.plan.draft import Draft

ARCHS = ("7.5", "8.6", "8.0", "9.0")
LARGEST = {"bfloat16": (1024, 512), "float32": (512, 256), "float64": (256, 192)}  # of jvp, and of backward_jvp


def problem_of(dtype="bfloat16", head_dim=64, moved=("q", "k", "v"), **others):
    case = Case(**{"seqlen_q": 512, "seqlen_k": 512} | others, head_dim=head_dim, dtype=dtype)
    return replace(case.problem, moved=moved)


def plan_of(problem, pass_, arch="9.0", **options):
    return choose_plan(problem, DeviceSpec.for_arch(arch), pass_, **options)


def test_every_row_is_chosen_somewhere():
    chosen = set()
    for dtype, largest in LARGEST.items():
        for head_dim in (64, 96, 128, 192, 256, 512, 1024):
            for arch in ARCHS:
                for pass_, most in zip((JVP, BACKWARD_JVP), largest, strict=True):
                    if head_dim <= most:
                        try:
                            need = None if pass_ is JVP else ("tdq", "tdk", "tdv", "tdscale")
                            problem = problem_of(dtype, head_dim)
                            others: Any = ({}, {"deterministic": True}, {"precision": "tf32"})
                            for one in (replace(problem, **own) for own in others):
                                chosen |= set(plan_of(one, pass_, arch, need=need).tiles)
                        except NotImplementedError as error:
                            assert arch != "9.0", error
    for head_dim in (64, 128):
        for options in ({}, {"bias": (1, 1, 512, 512)}):
            for dtype in ("bfloat16", "float32"):
                problem = problem_of(dtype, head_dim, **options)
                chosen |= set(plan_of(problem, JVP).tiles) | set(plan_of(replace(problem, precision="tf32"), JVP).tiles)
    tables = (
        *JVP_TILES,
        *JVP_SM90_TILES,
        *JVP_WIDE_SM90_TILES,
        *JVP_FLOAT32_SM90_TILES,
        *JVP_TF32_SM90_TILES,
        *JVP_FLOAT32_WIDE_SM90_TILES,
        *JVP_TF32_WIDE_SM90_TILES,
        *BACKWARD_JVP_TILES,
        *BACKWARD_JVP_SM90_TILES,
        *BACKWARD_JVP_FLOAT32_SM90_TILES,
        *BACKWARD_JVP_TF32_SM90_TILES,
        *BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES,
        *BACKWARD_JVP_TF32_WIDE_SM90_TILES,
        *DQ_JVP_TILES,
        *SCORES_JVP_TILES,
    )
    assert not [tile for tile in tables if tile not in chosen]


@pytest.mark.parametrize("dtype", LARGEST)
def test_head_dimensions_without_a_tile(dtype):
    for pass_, most in zip((JVP, BACKWARD_JVP), LARGEST[dtype], strict=True):
        if most < 1024:
            with pytest.raises(NotImplementedError, match=f"device: no tile of {dtype} at head dimensions"):
                plan_of(problem_of(dtype, most + 1), pass_)


def test_kernels_make_what_is_needed():
    def sources(*need, arch="9.0", deterministic=False):
        problem = replace(problem_of(sinks=True), deterministic=deterministic)
        return [kernel.source for kernel in plan_of(problem, BACKWARD_JVP, arch, need=need).kernels]

    postprocess = ["helpers/backward_postprocess.cu"]
    preprocess, sinks = "helpers/backward_preprocess.cu", "helpers/sinks.cu"
    in_order = [preprocess, "sm90/backward_jvp.cu", *postprocess]
    assert sources("tdq", deterministic=True) == sources("tdq", "tdk", deterministic=True) == in_order
    assert sources("tdv", arch="8.0") == [preprocess, "sm80/backward_jvp.cu"]
    assert sources("tdq", arch="8.0") == [preprocess, "sm80/backward_jvp_dq.cu"]
    assert sources("tdq", "tdk", arch="8.0") == [preprocess, "sm80/backward_jvp.cu", *postprocess]
    both = ["sm80/backward_jvp.cu", "sm80/backward_jvp_dq.cu"]
    assert sources("tdq", "tdk", arch="8.0", deterministic=True) == [preprocess, *both]
    assert sources("tdsinks") == sources("tdsinks", arch="8.0") == [preprocess, sinks]
    assert sources("tdv") == sources("tdk", deterministic=True) == [preprocess, "sm90/backward_jvp.cu"]
    assert sources("tdq") == sources("tdq", "tdv") == [preprocess, "sm90/backward_jvp.cu", *postprocess]
    of_pairs, reduce = "sm80/backward_jvp_scores.cu", "helpers/scores_reduce.cu"
    assert sources("tdscale") == [preprocess, of_pairs, reduce]
    assert sources("tdq", "tdscale") == [preprocess, "sm90/backward_jvp.cu", *postprocess, of_pairs, reduce]
    assert [kernel.source for kernel in plan_of(problem_of(), JVP).kernels] == ["sm90/jvp.cu"]


@pytest.mark.parametrize(
    ("options", "why_not"),
    [
        ({}, None),
        ({"moved": ("scale",)}, None),
        ({"moved": ("q", "bias"), "bias": (1, 1, 512, 512)}, None),
        ({"dtype": "float64"}, ""),
        ({"dtype": "float32"}, None),
        ({"dtype": "float32", "head_dim": 20, "strides": "flipped"}, None),
        ({"dtype": "float32", "head_dim": 72}, None),
        ({"dtype": "float32", "head_dim": 8, "head_dim_v": 128}, None),
        ({"dtype": "float32", "head_dim": 132}, "not sm90/jvp_fp32_wide: it serves head dimensions up to 128"),
        (
            {"dtype": "float32", "cu_seqlens_q": (0, 512), "cu_seqlens_k": (0, 512)},
            "not sm90/jvp_fp32: it knows no packed sequences",
        ),
        ({"dtype": "float32", "window": (10, 10)}, "splitting these takes too long"),
        ({"head_dim": 160}, None),
        ({"head_dim": 128, "head_dim_v": 256, "bias": (512, 512)}, None),
        ({"head_dim": 264}, "not sm90/jvp_wide: it serves head dimensions up to 256"),
        ({"head_dim": 192, "cu_seqlens_q": (0, 512), "cu_seqlens_k": (0, 512)}, None),
        ({"head_dim": 140}, "not sm90/jvp_wide: a stride of q is 280 bytes"),
        ({"head_dim": 20}, "not sm90/jvp: a stride of q is 40 bytes, not a positive multiple of 16"),
        ({"strides": "flipped"}, "not sm90/jvp: a stride of q is"),
    ],
    ids=str,
)
def test_what_hopper_has_a_kernel_of_its_own_for(options, why_not):
    """Else the plan says why, and the kernel for all devices serves it."""
    plan = plan_of(problem_of(**options), JVP)
    of_float32 = JvpFloat32Sm90Tile | JvpFloat32WideSm90Tile
    assert isinstance(plan.tiles[0], JvpSm90Tile | JvpWideSm90Tile | of_float32) == (why_not is None)
    assert (why_not or "") in plan.reason


@given(st.sampled_from([64, 128, 192, 256]), st.integers(70, 400), st.booleans())
def test_long_causal_calls_take_single_tiles_the_longest_first(head_dim, seqlen, causal):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cuflash.plan.sm90.jvp.LONGEST_FIRST_KEYS", 200)
        patch.setattr("cuflash.plan.sm90.jvp.LONGEST_FIRST_KEYS_WIDE", 100)
        plan = plan_of(problem_of(head_dim=head_dim, seqlen_q=seqlen, seqlen_k=seqlen, causal=causal), JVP)
    (kernel,) = plan.kernels
    (tile,) = plan.tiles
    tiles = plan.problem.batch * plan.problem.num_heads * -(-seqlen // tile.block_m)
    is_single = causal and seqlen >= (200 if head_dim <= 128 else 100)
    assert ("the longest ones of 2 heads first" in plan.reason) == is_single
    assert (kernel.grid, plan.run_time.resident_blocks) == (tiles, tiles) or not is_single
    assert dict(kernel.defines)["CUFLASH_PAIRS"] == (causal and not is_single)


@pytest.mark.parametrize("moved", [(), ("q",), ("k", "v"), ("q", "k", "v")])
def test_tensor_maps_are_of_what_is_given(moved):
    plan = plan_of(problem_of(moved=moved), JVP)
    expected = ["q", "k", "v", *(f"t{name}" for name in moved), "out", "tout"]
    assert [spec.name for spec in plan.tensor_maps] == expected


@pytest.mark.parametrize("moved", [(), ("q",), ("k", "v"), ("q", "k", "v")])
@pytest.mark.parametrize("precision", ["highest", "tf32"])
def test_tangents_are_split_with_their_arrays(moved, precision):
    """The copy of an array has the terms of its tangent, too, and one tensor map."""
    plan = plan_of(replace(problem_of("float32", moved=moved), precision=precision), JVP)
    terms = 3 if precision == "highest" else 2
    assert [kernel.source for kernel in plan.kernels] == ["helpers/split_fp32.cu", "sm90/jvp_fp32.cu"]
    assert [spec.name for spec in plan.tensor_maps] == ["q_copy", "k_copy", "v_copy"]
    batch = plan.problem.batch
    assert [spec.shape[-1] for spec in plan.tensor_maps] == [
        terms * batch * (1 + (name in moved)) for name in ("q", "k", "v")
    ]
    listed = ", ".join(("q", "k", "v", *(f"t{name}" for name in moved))[:-1])
    assert f"{listed} and" in plan.reason and f"split into {terms} bf16 terms" in plan.reason


@pytest.mark.parametrize("moved", [(), ("q",), ("k", "v")])
@pytest.mark.parametrize("need", [("tdq", "tdk", "tdv"), ("tdq",), ("tdv",)])
@pytest.mark.parametrize(("head_dim", "kernel"), [(64, "backward_jvp_fp32"), (72, "backward_jvp_fp32_wide")])
def test_tangents_of_gradients_in_float32(moved, need, head_dim, kernel):
    """The copies of arrays have the terms of tangents, too, and there is one map for each; dout has no tangent."""
    plan = plan_of(problem_of("float32", head_dim, moved), BACKWARD_JVP, need=need)
    of_tdq = ["helpers/backward_postprocess.cu"] if "tdq" in need else []
    assert [kernel.source for kernel in plan.kernels] == [
        *("helpers/backward_preprocess.cu", "helpers/split_fp32.cu", f"sm90/{kernel}.cu"),
        *of_tdq,
    ]
    assert [spec.name for spec in plan.tensor_maps] == ["q_copy", "k_copy", "v_copy", "dout_copy"]
    batch = plan.problem.batch
    assert [spec.shape[-1] for spec in plan.tensor_maps] == [
        3 * batch * (1 + (name in moved)) for name in ("q", "k", "v", "dout")
    ]


@pytest.mark.parametrize(
    ("options", "why_not"),
    [
        ({}, None),
        ({"head_dim": 20, "strides": "flipped", "softcap": 3.0}, None),
        ({"deterministic": True}, "not sm90/backward_jvp_fp32: it adds to tdq in no fixed order"),
        ({"head_dim": 72}, None),
        ({"head_dim": 8, "head_dim_v": 128, "softcap": 3.0}, None),
        ({"head_dim": 72, "deterministic": True}, "not sm90/backward_jvp_fp32_wide: it adds to tdq in no fixed order"),
        ({"head_dim": 132}, "not sm90/backward_jvp_fp32_wide: it serves head dimensions up to 128"),
        ({"cu_seqlens_q": (0, 512), "cu_seqlens_k": (0, 512)}, "it knows no packed sequences"),
        ({"window": (10, 10)}, "splitting these takes too long"),
        ({"tdout": True}, "no stage of tdout fits into shared memory"),
    ],
    ids=str,
)
def test_why_not_the_float32_kernel_of_sm90(options, why_not):
    own = {name: x for name, x in options.items() if name not in ("tdout", "deterministic")}
    problem = replace(problem_of("float32", **own), deterministic="deterministic" in options)
    operands = {"tdout": problem.q} if "tdout" in options else None
    plan = plan_of(problem, BACKWARD_JVP, operands=operands)
    of_float32 = BackwardJvpFloat32Sm90Tile | BackwardJvpFloat32WideSm90Tile
    assert isinstance(plan.tiles[0], of_float32) == (why_not is None)
    if why_not is not None:
        assert "not sm90/backward_jvp_fp32" in plan.reason and why_not in plan.reason


@pytest.mark.parametrize("what", ["tdout", "packed sequences"])
def test_a_float32_tile_that_does_not_serve(what):
    packed = {"cu_seqlens_q": (0, 512), "cu_seqlens_k": (0, 512)} if what == "packed sequences" else {}
    problem = problem_of("float32", **packed)
    operands = {"tdout": problem.q} if what == "tdout" else None
    for (tile,) in (BACKWARD_JVP_FLOAT32_SM90_TILES, BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES):
        with pytest.raises(NotImplementedError, match=f"tiles: got a {type(tile).__name__} with {what}"):
            plan_of(problem, BACKWARD_JVP, operands=operands, tiles=(tile,))


@pytest.mark.parametrize(
    ("case", "why_not"),
    [
        ({"head_dim": 264}, "it serves head dimensions up to 256"),
        ({"head_dim": 60}, "a stride of q is 120 bytes"),
        ({}, None),
        (
            {"head_dim": 192, "cu_seqlens_q": (0, 512), "cu_seqlens_k": (0, 512)},
            "of packed sequences it serves head dimensions up to 128",
        ),
    ],
)
def test_why_not_the_kernel_of_sm90(case, why_not):
    if why_not is None:  # a score whose derivative by s is not 1
        q = np.zeros((1, 2, 64, 32), np.float16)
        options = cuflash.FlashAttention(score=lambda s, i, j: cuflash.tanh(s), dropout=0.1).options
        problem, why_not = make_problem(options, q, q, q, score_args={}), "dropout marks weights by their sign"
        problem = replace(problem, moved=("q",))
    else:
        problem = problem_of(**case)
    plan = plan_of(problem, BACKWARD_JVP)
    assert f"not sm90/backward_jvp: {why_not}" in plan.reason
    assert "sm90/backward_jvp.cu" not in {kernel.source for kernel in plan.kernels}


@pytest.mark.parametrize(
    ("head_dim", "schedule", "stages"), [(64, "kOwnKeys", 2), (128, "kOneStageOfQ", 2), (256, "kHalfStages", 1)]
)
def test_stages_that_hold_tdout(head_dim, schedule, stages):
    """Where they do not fit, they are fewer or smaller."""
    problem = problem_of(head_dim=head_dim)
    plan = plan_of(problem, BACKWARD_JVP, operands={"tdout": problem.q})
    (tile,) = plan.tiles
    assert isinstance(tile, BackwardJvpSm90Tile)
    assert (tile.has_tdout, tile.schedule, tile.num_stages) == (True, schedule, stages)


def test_stages_of_fewer_queries_serve_no_packed_sequences():
    problem = problem_of(head_dim=128, cu_seqlens_q=(0, 512), cu_seqlens_k=(0, 512))
    plan = plan_of(problem, BACKWARD_JVP, operands={"tdout": problem.q})
    assert "not sm90/backward_jvp: of packed sequences with tdout it serves head dimensions up to 64" in plan.reason


def test_tiles_that_do_not_serve_packed_sequences():
    wide = next(tile for tile in BACKWARD_JVP_SM90_TILES if tile.schedule == "kHalfStages")
    problem = problem_of(head_dim=192, cu_seqlens_q=(0, 512), cu_seqlens_k=(0, 512))
    with pytest.raises(NotImplementedError, match="tiles: got a BackwardJvpSm90Tile for head dimensions up to 256"):
        plan_of(problem, BACKWARD_JVP, tiles=(wide,))


def test_tangents_that_are_not_given_are_no_part_of_a_kernel():
    def bits(*moved):
        (kernel,) = plan_of(problem_of(moved=moved, softcap=3.0), JVP).kernels
        return dict(kernel.defines)["CUFLASH_TANGENTS"]

    assert [bits(), bits("q"), bits("k"), bits("v"), bits("scale", "softcap")] == [1, 3, 5, 9, 1 + 128 + 256]


@pytest.mark.parametrize("bias", [(2, 512, 512), (512, 512), (1, 512), (512, 1), (2, 1, 1)])
def test_tangents_of_score_gradients(bias):
    """A bias and numbers have a kernel each; partial sums are added where blocks share an element of the bias."""
    problem = problem_of(bias=bias, alibi_slopes=(2,), softcap=3.0, num_heads=2)
    need = ("tdbias", "tdalibi_slopes", "tdscale", "tdsoftcap")
    plan = plan_of(problem, BACKWARD_JVP, need=need)
    kernels = [kernel for kernel in plan.kernels if kernel.source == "sm80/backward_jvp_scores.cu"]
    assert [kernel.name[-7:] for kernel in kernels] == ["_tdbias", "softcap"]
    for kernel in kernels:
        made = {name for name in need if dict(kernel.defines)[f"CUFLASH_NEEDS_{name[1:].upper()}"]}
        assert made == ({"tdbias"} if kernel is kernels[0] else set(need) - {"tdbias"})
    axes = [dict(kernels[0].defines)[f"CUFLASH_SUMS_{axis}"] for axis in ("BATCH", "HEADS", "QUERIES", "KEYS")]
    assert axes == [1, *(int(n == 1) for n in (1,) * (3 - len(bias)) + bias)]


@pytest.mark.parametrize("pass_", [JVP, BACKWARD_JVP])
def test_scores_in_cuda_need_no_python_function(pass_):
    q = np.zeros((1, 2, 64, 32), np.float16)
    score = cuflash.Score(cuda=f"{HEAD} {{ return s * given.gate(head); }}", arrays=["gate"])
    options = cuflash.FlashAttention(score=score).options
    problem = make_problem(options, q, q, q, score_args={"gate": np.ones(2, np.float32)})
    plan = plan_of(replace(problem, moved=("q", "gate")), pass_)
    ((_, source),) = {header for kernel in plan.kernels for header in kernel.headers}
    assert "MovedArray<T, float, 0, 1, false, true> gate;" in source
    assert "gate{arrays_[0], arrays_[1], reads_}" in source


@pytest.mark.parametrize("pass_", [JVP, BACKWARD_JVP])
def test_families_that_round_results_or_read_no_pages_do_not_serve_calls_that_need_these(pass_, monkeypatch):
    """What a family does not say that it serves, the one of every device does."""
    families = {JVP: (JVP_FAMILIES,), BACKWARD_JVP: (BACKWARD_JVP_FAMILIES, DQ_JVP_FAMILIES)}[pass_]
    wide = replace(problem_of(), wide=("out",) if pass_ is JVP else ("dq", "dk", "dv"))
    kernels = plan_of(wide, pass_).kernels
    found = {name for kernel in kernels for name, value in kernel.defines if name.endswith("_WIDE") and value}
    assert found == {f"CUFLASH_{name.upper()}_WIDE" for name in wide.wide}
    paged = problem_of(page_size=64, kv_lengths=(512,))
    for family in {family for of_pass in families for family in of_pass}:
        monkeypatch.setattr(type(family), "serves_all_tangents", False)
        for problem, why in ((wide, "it rounds results"), (paged, "it reads no pages")):
            draft = SimpleNamespace(problem=problem, need=pass_.default)
            assert (family.why_not_served(cast("Draft", draft)) or "").startswith(why)
