"""Plans of some of the gradients: only the kernels and the memory of what is needed."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.arrays.array_info import Operand
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.draft import CAUSAL_HEAD_SECTION
from cuflash.spec.outputs import DEFAULT_NEED, SCORE_GRADIENTS
from cuflash.spec.passes import BACKWARD
from tests.problems import problem_of

# ---- Some of the gradients -------------------------------------------------------------------------------------------


def sources_of(plan):
    return [kernel.source.removesuffix(".cu") for kernel in plan.kernels]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_only_the_kernels_and_the_memory_of_what_is_needed(dtype, arch, deterministic):
    device, problem = DeviceSpec.for_arch(arch), problem_of(1024, 1024, dtype=dtype, deterministic=deterministic)
    every = choose_plan(problem, device, BACKWARD)
    assert choose_plan(problem, device, BACKWARD, need=["dv", "dq", "dk"]) == every
    for need in (("dk", "dv"), ("dk",), ("dv",)):
        plan = choose_plan(problem, device, BACKWARD, need=need)
        assert set(sources_of(plan)) <= set(sources_of(every)) | {"helpers/split_fp32", "sm90/backward_fp32"}
        splits = max(plan.run_time.group_splits, plan.run_time.tail_splits)
        assert ("helpers/backward_postprocess" in sources_of(plan)) == (splits > 1)
        assert "sm80/backward_dq" not in sources_of(plan)
        assert "dq_accumulator" not in dict(plan.scratch)
        (main,) = [kernel for kernel in plan.kernels if kernel.source.endswith(("/backward.cu", "/backward_fp32.cu"))]
        assert {"CUFLASH_NEEDS_DK": int("dk" in need), "CUFLASH_NEEDS_DV": int("dv" in need)}.items() <= dict(
            main.defines
        ).items()
        only_one = len(need) == 1 and main.source.startswith("sm90/")
        assert ("not stored, but computed" in plan.reason) == only_one
    plan = choose_plan(problem, device, BACKWARD, need=("dq",))
    if dtype != "float32" or arch == "8.0" or deterministic:
        assert sources_of(plan) == ["helpers/backward_preprocess", "sm80/backward_dq"]
        assert [name for name, _ in plan.scratch] == ["row_stats", "row_sums"]
    assert "dkv_partials" not in dict(plan.scratch)
    assert choose_plan(problem, device, BACKWARD, need=()).kernels == ()


@pytest.mark.parametrize(
    ("dims", "seqlen", "options", "blocks", "section"),
    [
        ((320, 320), 4096, {"causal": True}, 1, 4),
        ((576, 512), 4096, {"causal": True}, 1, 4),
        ((584, 512), 4096, {"causal": True}, 2, 2),
        ((768, 768), 4096, {"causal": True}, 2, 2),
        ((512, 512), 500, {"causal": True}, 1, 33),
        ((512, 512), 65536, {"causal": True}, 1, 1),
        ((512, 512), 4096, {}, 1, 1),
        ((512, 512), 4096, {"window": (None, 9)}, 1, 4),
        ((512, 512), 4096, {"window": (9, 0)}, 1, CAUSAL_HEAD_SECTION),
    ],
)
def test_wide_gradients_of_heads_side_by_side(dims, seqlen, options, blocks, section):
    """Under a causal mask half of the tiles of so many heads fill the device."""
    plan = choose_plan(problem_of(seqlen, seqlen, *dims, **options), DeviceSpec.for_arch("9.0"), BACKWARD)
    wide = [kernel for kernel in plan.kernels if kernel.source == "sm90/backward_wide.cu"]
    assert len(wide) == 3
    assert all(dict(kernel.defines)["CUFLASH_COLUMN_BLOCKS"] == blocks for kernel in wide)
    assert plan.run_time.head_section == section


@pytest.mark.parametrize(
    ("axes", "tiles", "summed"),
    [
        ((1, 1, 1, 1), 2 * 4 * 8 * 16, ""),
        ((0, 1, 1, 1), 4 * 8 * 16, "2 batch entries"),
        ((0, 0, 1, 1), 8 * 16, "2 batch entries, 4 heads"),
        ((0, 0, 0, 1), 16, "2 batch entries, 4 heads, 8 tiles of queries"),
        ((1, 1, 1, 0), 2 * 4 * 8, "16 tiles of keys"),
        ((0, 0, 0, 0), 1, "2 batch entries, 4 heads, 8 tiles of queries, 16 tiles of keys"),
    ],
)
@pytest.mark.parametrize("arch", ["8.0", "9.0"])
def test_memory_of_dbias_is_that_of_the_bias_and_of_the_device(axes, tiles, summed, arch):
    device, plain = DeviceSpec.for_arch(arch), problem_of(1024, 1024, causal=True)
    shape = (plain.batch, plain.num_heads, 1024, 1024)
    assert shape[:2] == (2, 4)
    strides = tuple(stride * on for stride, on in zip((4 << 20, 1 << 20, 1024, 1), axes, strict=True))
    bias = Operand(shape=shape, strides=strides, dtype="float32")
    problem = replace(plain, bias=bias)
    plan = choose_plan(problem, device, BACKWARD, need=("dbias",))
    kernel, splits = plan.kernels[1], plan.run_time.score_splits
    resident = device.num_sms * plan.tiles[0].min_blocks
    if arch == "9.0" and axes[2:] == (1, 1):  # tiles of 128 x 128 and not of 128 x 64, that blocks take in turn
        tiles, columns = tiles // 2, 128
        shared = tiles % device.num_sms
        blocks = tiles + shared * (splits - 1)
        assert (kernel.source, kernel.grid) == ("sm90/backward_bias.cu", min(blocks, device.num_sms))
    else:
        columns, shared, blocks = 64, tiles, tiles * splits
        assert (kernel.source, kernel.grid) == ("sm80/backward_scores.cu", blocks)
        assert splits == 1 or resident / 2 < blocks <= resident
    assert f"dbias: {tiles} tiles of pairs" + (f", each a sum over {summed}" if summed else "") in plan.reason
    assert sources_of(plan)[2:] == (["helpers/scores_reduce"] if splits > 1 else [])
    tile = math.prod(n if on else 1 for n, on in zip((128, columns), axes[2:], strict=True))
    assert dict(plan.scratch).get("score_partials", 0) == (splits > 1) * shared * splits * tile
    sums = choose_plan(replace(problem, softcap=5.0), device, BACKWARD, need=("dscale", "dsoftcap", "dbias", "dq"))
    assert kernel.grid in [other.grid for other in sums.kernels if other.source == kernel.source]
    assert sources_of(sums).count("sm80/backward_scores") == (1 if kernel.source.startswith("sm90") else 2)
    assert dict(sums.scratch)["sums_partials"] == 3 * 2 * 4 * 8 * sums.run_time.sums_splits
    assert len({kernel.name for kernel in sums.kernels}) == len(sums.kernels)
    assert "for dq, dbias, dscale, dsoftcap on" in sums.describe(verbose=True, width=0)


@given(
    num_sms=st.integers(1, 150), batch=st.integers(1, 300), heads=st.integers(1, 12), seqlen=st.sampled_from((128, 640))
)
def test_blocks_share_the_last_tiles_of_dbias_where_that_ends_sooner(num_sms, batch, heads, seqlen):
    """Whole rounds of tiles belong to a block each: only what would keep some blocks waiting is shared."""
    problem = replace(problem_of(seqlen, seqlen), batch=batch, num_heads=heads, num_heads_kv=heads)
    shape = (batch, heads, seqlen, seqlen)
    bias = Operand(shape=shape, strides=(0, seqlen * seqlen, seqlen, 1), dtype="float32")
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms)
    plan = choose_plan(replace(problem, bias=bias), device, BACKWARD, need=("dbias",))
    (kernel,) = [kernel for kernel in plan.kernels if kernel.source == "sm90/backward_bias.cu"]
    tiles, splits = heads * (seqlen // 128) ** 2, plan.run_time.score_splits
    rest = tiles % num_sms
    assert kernel.grid == plan.run_time.resident_blocks == min(num_sms, tiles + rest * (splits - 1))
    assert 1 <= splits <= batch
    if splits > 1:  # by more steps than the launch takes that adds the partial sums
        assert -(-rest * splits // num_sms) * -(-batch // splits) < batch - 3
        (adds,) = [kernel for kernel in plan.kernels if kernel.source == "helpers/scores_reduce.cu"]
        assert adds.grid == rest * 128 * 128 // 256
        assert (f"share, of the last {rest} tiles" in plan.reason) == (tiles > num_sms)
    elif rest:  # two blocks, or as many as there are, would not end much sooner
        assert rest * 2 > num_sms or batch < 2 * (10 + rest / 10)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "need", [("dscale",), ("dsoftcap", "dscale"), ("dalibi_slopes",), ("dbias",), ("dbias", "dalibi_slopes", "dscale")]
)
def test_memory_of_sums_by_keys_is_that_of_tiles_of_keys(dim, need):
    """On compute capability 9.0 the main kernel makes them, where it runs for dk or dv."""
    plain = problem_of(1024, 1024, dim=dim, dim_v=dim)
    shape = (plain.batch, plain.num_heads, 1024, 1024)
    bias = Operand(shape=shape, strides=(1024, 0, 0, 1), dtype="bfloat16")
    slopes = Operand(shape=shape[:2], strides=(0, 1), dtype="float32")
    problem = replace(plain, bias=bias, alibi_slopes=slopes, softcap=5.0)
    plan = choose_plan(problem, DeviceSpec.for_arch("9.0"), BACKWARD, need=("dk", *need))
    (main,) = [kernel for kernel in plan.kernels if kernel.source == "sm90/backward.cu"]
    assert "sm80/backward_scores" not in sources_of(plan)
    assert {f"CUFLASH_NEEDS_{name.upper()}": int(name in need) for name in SCORE_GRADIENTS}.items() <= dict(
        main.defines
    ).items()
    splits = plain.batch * plain.num_heads * 1024 // 128 * plan.run_time.tail_splits
    numbers = len(set(need) & {"dscale", "dsoftcap"})
    scratch, grids = dict(plan.scratch), [x.grid for x in plan.kernels if x.source == "helpers/scores_reduce.cu"]
    assert scratch.get("score_partials", 0) == (128 * splits if "dbias" in need else 0)
    assert scratch.get("sums_partials", 0) == 8 * (numbers * main.grid + ("dalibi_slopes" in need) * splits)
    of_sums = numbers + plain.num_heads * ("dalibi_slopes" in need)
    assert grids == [plain.batch * 1024 // 256] * ("dbias" in need) + [of_sums] * (of_sums > 0)
    assert "summed by the main kernel, by tiles of keys" in plan.reason


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_sinks(dtype, arch):
    """Another specialisation of the forward pass; one kernel more in the backward pass, if it is wanted."""
    device, plain = DeviceSpec.for_arch(arch), problem_of(dtype=dtype)
    sinks = Operand(shape=(plain.num_heads,), strides=(1,), dtype=plain.softmax_dtype)
    problem = replace(plain, sinks=sinks)
    forward, expected = (choose_plan(p, device).kernels for p in (problem, plain))
    assert [kernel.source for kernel in forward] == [kernel.source for kernel in expected]
    for kernel, other in zip(forward, expected, strict=True):
        differing = dict(set(kernel.defines) - set(other.defines))
        assert differing.pop("CUFLASH_HAS_SINKS") == 1
        assert differing.pop("CUFLASH_KERNEL_NAME") == kernel.name == f"{other.name}_sinks"
        assert not differing
    without = choose_plan(plain, device, BACKWARD)
    delta, *others = choose_plan(problem, device, BACKWARD, need=DEFAULT_NEED).kernels
    assert others == [*without.kernels[1:]]
    # The sink is one of the scores that the kernel of delta makes again.
    assert dict(set(delta.defines) - set(without.kernels[0].defines)) == {"CUFLASH_LSE_HAS_SINKS": 1}
    backward = choose_plan(problem, device, BACKWARD, need=("dsinks", "dq", "dk", "dv"))
    sinks_kernel = backward.kernels[1]
    assert (sinks_kernel.source, sinks_kernel.grid) == ("helpers/sinks.cu", plain.num_heads)
    assert [*backward.kernels[2:]] == others
    assert backward.scratch == without.scratch
    assert "for dq, dk, dv, dsinks" in backward.describe(verbose=True, width=0)
