"""Gradients on the device against the oracle, and what must hold whatever the numbers are."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.spec.passes import BACKWARD, PASSES_WITHOUT_TANGENTS, Pass
from tests import bias_terms, wide_heads
from tests.gpu.planned import is_sm90, plan_of
from tests.sampling import examples

pytestmark = pytest.mark.gpu

DIM = 64


def arguments_of(cupy, case):
    """The attention of a case, the arguments of its backward, and the keyword arguments."""
    arrays = case.arrays(cupy.asarray)
    qkv, optional = ct.qkv(arrays), ct.optional(arrays)
    forward = cuflash.FlashAttention(**case.keywords).forward(*qkv, **optional)
    return (arrays["dout"], *qkv, forward.out, forward.lse), optional


def same_bits(xs, ys):
    pairs = [[np.ascontiguousarray(ct.to_numpy(a)).tobytes() for a in pair] for pair in zip(xs, ys, strict=True)]
    return all(x == y for x, y in pairs)


def check_gradients(case, attn, arguments):
    """Against the oracle, and where they are deterministic for the same bits every time."""
    gradients = attn.backward(*arguments)
    ct.assert_backward(case, *gradients)
    if attn.options.deterministic:
        for _ in range(20):
            assert same_bits(gradients, attn.backward(*arguments))


@pytest.mark.one_in(1)
@settings(max_examples=examples(100))
@given(data=st.data())
def test_oracle(cupy, specialisation, data):
    case = data.draw(specialisation.cases())
    arguments, optional = arguments_of(cupy, case)
    gradients = cuflash.FlashAttention(**case.keywords).backward(*arguments, **optional)
    assert all(type(x) is cupy.ndarray for x in gradients)
    ct.assert_backward(case, *gradients)


@pytest.mark.one_in(1)
@settings(max_examples=examples(80))
@given(data=st.data())
def test_deterministic(cupy, deterministic_specialisation, data):
    case = data.draw(deterministic_specialisation.cases())
    arguments, optional = arguments_of(cupy, case)
    attn = cuflash.FlashAttention(**case.keywords, deterministic=True)
    gradients = attn.backward(*arguments, **optional)
    ct.assert_backward(case, *gradients)
    nan = [cupy.asarray(np.full(x.shape, np.nan, x.dtype)) for x in arguments[1:4]]
    for given_results in ({}, dict(zip(("dq", "dk", "dv"), nan, strict=True))):
        assert same_bits(gradients, attn.backward(*arguments, **optional | given_results))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype"),
    [
        (320, 512, "bfloat16"),
        (576, 512, "float16"),
        (1000, 1024, "bfloat16"),
        (512, 300, "float32"),
        (384, 70, "float64"),
    ],
)
def test_heads_wider_than_256(cupy, head_dim, head_dim_v, dtype, deterministic):
    sizes: dict[str, Any] = {"seqlen_q": 203, "seqlen_k": 300, "num_heads": 2, "num_heads_kv": 1}
    case = ct.Case(**sizes, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, causal=True)
    arguments, _ = arguments_of(cupy, case)
    ct.assert_forward(case, *arguments[-2:])
    check_gradients(case, cuflash.FlashAttention(causal=True, deterministic=deterministic), arguments)


@pytest.mark.parametrize("head_dim", [320, 512, 576, 704, 768, 1024])
def test_wide_heads(cupy, head_dim):
    """Right, the same bits again, and by kernels that are meant for them."""

    @settings(max_examples=examples(80))
    @given(wide_heads.cases(longest=1500, dims=(head_dim,)))
    def every_case(case):
        arguments, optional = arguments_of(cupy, case)
        attn = cuflash.FlashAttention(**case.keywords)
        plan = plan_of(BACKWARD, attn, *arguments[1:4], **optional)
        by_wgmma = sum(kernel.source == "sm90/backward_wide.cu" for kernel in plan.kernels)
        assert by_wgmma == (3 if plan.device.arch == 90 else 0)
        gradients = attn.backward(*arguments, **optional)
        ct.assert_backward(case, *gradients)
        for _ in range(3):
            assert by_wgmma == 0 or same_bits(gradients, attn.backward(*arguments, **optional))

    every_case()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype", "causal"),
    [
        (2, 64, "float16", False),
        (2, 128, "bfloat16", True),
        (2, 256, "float16", True),
        (9, 64, "bfloat16", False),  # the last wave
        (9, 128, "float16", False),
        (2, 64, "float32", True),
    ],
)
def test_tiles_whose_queries_blocks_share(cupy, num_heads, head_dim, dtype, causal, deterministic):
    case = ct.Case(seqlen_q=2100, seqlen_k=2049, num_heads=num_heads, head_dim=head_dim, dtype=dtype, causal=causal)
    arguments, _ = arguments_of(cupy, case)
    attn = cuflash.FlashAttention(causal=causal, deterministic=deterministic)
    plan = plan_of(BACKWARD, attn, *arguments[1:4])
    if plan.device.arch == 90 and not (deterministic and dtype == "float32"):
        assert plan.run_time.tail_splits > 1
        assert (plan.run_time.whole_tiles > 0) == (num_heads > 2)
    check_gradients(case, attn, arguments)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_heads_kv", "head_dim", "dtype"),
    [(24, 64, "float16"), (24, 128, "bfloat16"), (24, 256, "float16"), (8, 64, "bfloat16")],
)
def test_accumulators_that_blocks_clear(cupy, num_heads_kv, head_dim, dtype, causal, deterministic):
    sizes: dict[str, Any] = {
        "seqlen_q": 230,
        "seqlen_k": 300,
        "batch": 12,
        "num_heads": 24,
        "num_heads_kv": num_heads_kv,
    }
    case = ct.Case(**sizes, head_dim=head_dim, dtype=dtype, causal=causal)
    arguments, _ = arguments_of(cupy, case)
    attn = cuflash.FlashAttention(causal=causal, deterministic=deterministic)
    plan = plan_of(BACKWARD, attn, *arguments[1:4])
    assert (plan.run_time.clear_ahead > 0) == (plan.device.arch == 90)
    cupy.full(plan.extra_bytes // 4, cupy.nan, "float32")  # and so scratch memory holds NaN
    check_gradients(case, attn, arguments)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("score_spread", [0.05, 1.0, 10.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_of_float64_are_within_twice_the_plain_formula(cupy, head_dim, causal, score_spread, deterministic):
    """Without the allowance for luck, however long."""
    sizes: dict[str, Any] = {"seqlen_q": 1100, "seqlen_k": 1300, "head_dim": head_dim, "dtype": "float64"}
    case = ct.Case(**sizes, causal=causal, score_spread=score_spread)
    arguments, _ = arguments_of(cupy, case)
    gradients = cuflash.FlashAttention(causal=causal, deterministic=deterministic).backward(*arguments)
    report = (*ct.assert_forward(case, *arguments[-2:]), *ct.assert_backward(case, *gradients))
    assert all(measurement.strict_ratio <= 1 for measurement in report), report


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"kv_lengths": (200, 700)},
        {"causal": "lengths", "kv_lengths": (200, 700)},
        {"softcap": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("strides", ["contiguous", "padded"])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
def test_both_kernels_of_float32(cupy, head_dim, strides, options):
    """By bf16 terms where sequences are long, whatever the strides; not in a fixed order."""
    sizes: dict[str, Any] = {"seqlen_q": 500, "seqlen_k": 700, "batch": 2, "num_heads": 4, "num_heads_kv": 2}
    case = ct.Case(**sizes, head_dim=head_dim, dtype="float32", strides=strides, **options)
    arguments, optional = arguments_of(cupy, case)
    for deterministic in (False, True):
        attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
        sources = [kernel.source for kernel in plan_of(BACKWARD, attn, *arguments[1:4], **optional).kernels]
        by_parts = is_sm90() and not deterministic
        assert ("sm90/backward_fp32.cu" in sources) == by_parts
        ct.assert_backward(case, *attn.backward(*arguments, **optional))


@given(case=bias_terms.cases_of_float32())
@settings(max_examples=examples(200))
def test_what_is_added_to_scores_of_float32(cupy, case):
    """As in the forward pass."""
    arguments, optional = arguments_of(cupy, case)
    attn = cuflash.FlashAttention(**case.keywords)
    if is_sm90():
        kernels = plan_of(BACKWARD, attn, *arguments[1:4], **optional).kernels
        assert "sm90/backward_fp32.cu" in [kernel.source for kernel in kernels]
    ct.assert_backward(case, *attn.backward(*arguments, **optional))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"strides": "padded"}, {"head_dim_v": 40}], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 160])
def test_tf32(cupy, head_dim, deterministic, options):
    """11 bits of the 24 that the tolerance is for, or the 16 of two bf16 terms; both passes."""
    sizes: dict[str, Any] = {"seqlen_q": 500, "seqlen_k": 700, "batch": 2, "num_heads": 4, "num_heads_kv": 2}
    case = ct.Case(**sizes, head_dim=head_dim, dtype="float32", **options)
    (dout, q, k, v, *_), optional = arguments_of(cupy, case)
    attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic, precision="tf32")
    out, lse = attn.forward(q, k, v, **optional)
    results = {"out": out, "lse": lse}
    results |= zip(("dq", "dk", "dv"), attn.backward(dout, q, k, v, out, lse, **optional), strict=True)
    yardsticks = ct.yardsticks(case.problem, case.arrays())
    names_of: dict[Pass, tuple[str, ...]] = {pass_: pass_.default for pass_ in PASSES_WITHOUT_TANGENTS}
    for pass_, names in names_of.items():
        plan = plan_of(pass_, attn, q, k, v, **optional)
        bits = 16 if "2 bf16 terms" in plan.reason else 11
        by_parts = is_sm90() and head_dim <= 128
        assert bits == (16 if by_parts and not (deterministic and pass_ is BACKWARD) else 11)
        for name in names:
            measurement = ct.measure(name, results[name], yardsticks[name].looser(2.0 ** (24 - bits)))
            assert not measurement.failure, str(measurement)


def test_deterministic_means_the_same_bits_under_load(cupy):
    """Many blocks add to the same gradients: with deterministic=True, in a fixed order."""
    case = ct.Case(
        seqlen_q=2048, seqlen_k=2048, batch=2, num_heads=8, num_heads_kv=2, head_dim=DIM, dtype="float16", causal=True
    )
    arguments, _ = arguments_of(cupy, case)
    attn = cuflash.FlashAttention(causal=True, deterministic=True)
    first = attn.backward(*arguments)
    for _ in range(20):
        assert same_bits(first, attn.backward(*arguments))


CASE = ct.Case(seqlen_q=150, seqlen_k=260, batch=2, num_heads=4, num_heads_kv=2, head_dim=DIM, dtype="float16")


def test_linear_in_dout(cupy):
    (dout, *others), _ = arguments_of(cupy, CASE)
    attn = cuflash.FlashAttention(deterministic=True)
    dq, dk, dv = attn.backward(dout, *others)
    twice = attn.backward(2 * dout, *others)
    for x, y in zip(twice, (dq, dk, dv), strict=True):
        x, y = ct.to_numpy(x).astype(np.float32), ct.to_numpy(y).astype(np.float32)
        np.testing.assert_allclose(x, 2 * y, rtol=0, atol=2**-10 * np.abs(y).max())


def test_groups_sum_over_their_heads(cupy):
    (dout, q, k, v, out, lse), _ = arguments_of(cupy, CASE)
    attn = cuflash.FlashAttention(deterministic=True)
    grouped = attn.backward(dout, q, k, v, out, lse)
    repeated = attn.backward(dout, q, cupy.repeat(k, 2, axis=1), cupy.repeat(v, 2, axis=1), out, lse)
    assert same_bits([grouped.dq], [repeated.dq])
    for x, y in zip(grouped[1:], repeated[1:], strict=True):
        x, y = ct.to_numpy(x).astype(np.float64), ct.to_numpy(y).astype(np.float64)
        summed = y.reshape(2, 2, 2, *y.shape[2:]).sum(axis=2)
        np.testing.assert_allclose(x, summed, rtol=0, atol=2**-9 * np.abs(summed).max())


@pytest.mark.parametrize("deterministic", [False, True])
def test_results_stay_inside_their_array(cupy, deterministic):
    """Poison around the gradients is still there afterwards, and none of it comes in."""
    arguments, _ = arguments_of(cupy, CASE)
    attn = cuflash.FlashAttention(deterministic=deterministic)
    frames = [cupy.asarray(np.full([n + 6 for n in x.shape], np.nan, x.dtype)) for x in arguments[1:4]]
    inside = [tuple(slice(3, n + 3) for n in x.shape) for x in arguments[1:4]]
    given_results = {f"d{x}": frame[index] for x, frame, index in zip("qkv", frames, inside, strict=True)}
    ct.assert_backward(CASE, *attn.backward(*arguments, **given_results))
    for frame, index in zip(frames, inside, strict=True):
        assert not cupy.isnan(frame[index].astype(np.float32)).any()
        frame[index] = np.nan
        assert cupy.isnan(frame.astype(np.float32)).all()
