"""The edges of problems: empty and short ones, what hides everything, numbers at the end of their range."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.plan.sm90.tiles import (
    FORWARD_FLOAT32_SM90_TILES,
    FORWARD_SM90_TILES,
)
from tests.emulate import attention
from tests.emulate.attention import problem_of
from tests.emulate.checks import EDGES, FEW_SMS, all_results, either_kernel, judge, rounded_to_tf32, run_both
from tests.judging import assert_oracle, bits
from tests.sampling import examples

pytestmark = pytest.mark.one_in(32)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [13, 16])
@pytest.mark.parametrize("sizes", EDGES.values(), ids=EDGES)
def test_edges(sizes, head_dim, deterministic):
    case = ct.Case(head_dim=head_dim, dtype="float16", **sizes)
    results = all_results(case, arch="8.0", deterministic=deterministic)
    assert_oracle(case, results)


# A row with turns and one without, of two, three and four consumers; blocks take several tiles.
EDGES_SM90 = (*FORWARD_SM90_TILES[1:4], FORWARD_SM90_TILES[-1])


OF_TILES = [
    *((tile, 16, "float16") for tile in EDGES_SM90),
    *((tile, 13, "float32") for tile in FORWARD_FLOAT32_SM90_TILES),
]


@pytest.mark.parametrize(("tile", "head_dim", "dtype"), OF_TILES, ids=lambda x: x if isinstance(x, str) else None)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_compute_capability_9(edge, tile, head_dim, dtype):
    case = ct.Case(head_dim=head_dim, dtype=dtype, **EDGES[edge])
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    # An empty array has no tensor map: then the other kernel runs.
    tiles = (tile,) if 0 not in (*arrays["q"].shape, *arrays["k"].shape) else None
    ct.assert_forward(case, *attention.forward(problem, arrays, tiles=tiles, arch=FEW_SMS))


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"num_heads": 0, "num_heads_kv": 0}, {"num_heads": 0}], ids=str)
@pytest.mark.parametrize("options", [{}, {"page_size": 64, "kv_lengths": ()}], ids=["plain", "pages"])
def test_decode_of_no_head(options, sizes, arch):
    if "page_size" in options and sizes.get("batch") != 0:
        options = options | {"kv_lengths": (1024,)}
    case = ct.Case(seqlen_q=1, seqlen_k=1024, head_dim=16, dtype="float16", **sizes | options)
    arrays = case.arrays()
    ct.assert_forward(case, *attention.forward(problem_of(case, arrays), arrays, arch=arch))


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("sizes", [{"num_heads": 0}, {"seqlen_k": 0}, {"batch": 0}], ids=str)
def test_gradients_of_scores_without_elements(sizes, arch):
    """No block stores an element of them; those that have elements are zero."""
    case = ct.Case(**{"seqlen_q": 70, "seqlen_k": 40, "head_dim": 16, "dtype": "float16", "softcap": 5.0} | sizes)
    case = replace(case, bias=(case.batch, case.num_heads, 70, case.seqlen_k), alibi_slopes=(case.num_heads,))
    arrays = case.arrays()
    problem, need = problem_of(case, arrays), ct.gradients_of(case.problem)
    results = attention.forward(problem, arrays, arch=arch)
    gradients = attention.backward(problem, arrays, *results, need=need, arch=arch)
    ct.assert_backward(case, **dict(zip(need, gradients, strict=True)))


@either_kernel
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_masks_and_biases_that_hide_everything(name, deterministic, arch):
    sizes: dict[str, Any] = {"seqlen_q": 40, "seqlen_k": 70, "num_heads": 2, name: (2, 40, 70)}
    case = ct.Case(head_dim=16, dtype="bfloat16", **sizes)
    arrays = case.arrays()
    hidden = False if name == "mask" else -np.inf
    arrays[name][0] = hidden  # a whole head
    arrays[name][1, 16:] = hidden  # whole fragments, and whole tiles of rows
    arrays[name][1, :, :64] = hidden  # a whole tile of keys
    problem = problem_of(case, arrays, deterministic=deterministic)
    results = run_both(problem, arrays, arch=arch)
    judge(problem, arrays, results)
    assert not results["out"][0, 0].any()
    assert (results["lse"][0, 0] == -np.inf).all()


@either_kernel
def test_lengths_out_of_range_are_clamped(arch):
    case = ct.Case(seqlen_q=20, seqlen_k=50, batch=3, head_dim=16, dtype="float16", kv_lengths=(0, 50, 50))
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    tame = run_both(problem, arrays, arch=arch)
    arrays["kv_lengths"][...] = (-7, 51, 2**31 - 1)
    assert bits(run_both(problem, arrays, arch=arch)) == bits(tame)


# Both kernels of the forward pass of float32: short problems take the first by themselves.
either_float32 = pytest.mark.parametrize("float32_tiles", [None, FORWARD_FLOAT32_SM90_TILES[:1]], ids=["sm80", "sm90"])


@either_kernel
@either_float32
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_that_are_no_numbers(dtype, float32_tiles, arch):
    """NaN and infinities of visible inputs come out where the formula has them."""
    case = ct.Case(seqlen_q=40, seqlen_k=70, head_dim=16, dtype=dtype, causal=True)
    arrays = case.arrays()
    arrays["q"][0, 0, 7, 3] = np.nan
    arrays["k"][0, 0, 65, 0] = np.inf
    arrays["v"][0, 0, 2, 5] = np.inf
    arrays["v"][0, 0, 3, 6] = np.nan
    problem = problem_of(case, arrays)
    tiles = float32_tiles if (dtype, arch) == ("float32", "9.0") else None
    out, lse = attention.forward(problem, arrays, arch=arch, tiles=tiles)
    judge(problem, {name: arrays[name] for name in "qkv"}, {"out": out, "lse": lse})


@pytest.mark.parametrize(
    ("dtype", "arch"), [("bfloat16", "9.0"), ("float32", "9.0"), ("float16", "8.0"), ("float64", "8.0")]
)
@settings(max_examples=examples(12))
@given(pairs=st.lists(st.tuples(st.integers(0, 199), st.sampled_from((np.nan, np.inf))), min_size=32, max_size=32))
def test_maxima_of_scores_that_are_no_numbers(dtype, arch, pairs):
    """A row has a maximum of NaN or infinity where one of its scores is, whichever lane has it, and only there."""
    case = ct.Case(seqlen_q=64, seqlen_k=200, head_dim=64, dtype=dtype, bias=(64, 200))
    arrays = case.arrays()
    keys, values = map(list, zip(*pairs, strict=True))
    arrays["bias"][np.arange(0, 64, 2), keys] = values
    (largest,) = attention.forward(problem_of(case, arrays), arrays, arch=arch, want=("max",))[2]
    np.testing.assert_array_equal(largest[0, ::2], values)
    assert np.isfinite(largest[0, 1::2]).all()


@either_float32
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.finfo(np.float32).max, 0.99999 * np.finfo(np.float32).max])
def test_float32_at_the_end_of_its_range(value, float32_tiles):
    """What is split into bf16 terms comes out whole: infinities, and numbers larger than any TF32 or bfloat16."""
    case = ct.Case(seqlen_q=17, seqlen_k=33, head_dim=16, dtype="float32", scale=2.0**-9)
    arrays = case.arrays()
    arrays["k"][...] = np.sign(arrays["k"])  # whose second term is zero
    arrays["v"][0, 0, 5, 2] = value
    arrays["q"][0, 0, 3, 4] = np.copysign(np.inf, value) if np.isinf(value) else 2.0**120
    arrays["q"][0, 0, 4, 4] = np.nan
    arrays["q"].view(np.uint32)[0, 0, 6, 4] = 0x7FFFFFFF  # the NaN that the device makes
    problem = problem_of(case, arrays)
    inputs = {name: arrays[name] for name in "qkv"}
    out, lse = attention.forward(problem, arrays, tiles=float32_tiles)
    expected = ct.yardsticks(problem, inputs)
    for got, right in ((out, expected["out"].expected), (lse, expected["lse"].expected)):
        np.testing.assert_allclose(got.astype(np.float64), right, rtol=1e-5, atol=1e-5)


@either_float32
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"head_dim": 48}, {"head_dim": 128}, {"softcap": 20.0}, {"score_spread": 30.0}],
    ids=str,
)
def test_float32_is_no_worse_than_the_plain_formula(options, float32_tiles):
    """On the average of several seeds, without the allowance for luck. The emulated tensor cores cut sums off too."""
    sizes: dict[str, Any] = {"seqlen_q": 65, "seqlen_k": 203, "head_dim": 64} | options
    ratios = []
    for seed in range(6):
        case = ct.Case(**sizes, dtype="float32", seed=seed)
        if float32_tiles:
            arrays, tiles = case.arrays(), FORWARD_FLOAT32_SM90_TILES[case.head_dim > 64 :][:1]
            report = (*ct.assert_forward(case, *attention.forward(problem_of(case, arrays), arrays, tiles=tiles)),)
        else:
            results = all_results(case)
            report = (*ct.assert_forward(case, results["out"], results["lse"]),)
            report += (*ct.assert_backward(case, results["dq"], results["dk"], results["dv"]),)
        ratios.append([measurement.strict_ratio for measurement in report])
    assert (np.mean(ratios, axis=0) <= 1).all(), np.round(np.mean(ratios, axis=0), 2)


@pytest.mark.parametrize("arch", ["7.5", "8.0"])
@pytest.mark.parametrize("sizes", [(3000, 24), (24, 3000)], ids=str)
def test_long_sums_of_float32_are_no_worse_than_the_plain_formula(sizes, arch):
    """The same of the results that are sums over the longer sequence, by multiply-adds and by tensor cores."""
    names, ratios = ("dk", "dv") if sizes[0] > sizes[1] else ("out",), []
    for seed in range(4):
        case = ct.Case(seqlen_q=sizes[0], seqlen_k=sizes[1], head_dim=16, dtype="float32", seed=seed)
        results = all_results(case, arch=arch)
        report = (*ct.assert_forward(case, results["out"], results["lse"]),)
        report += (*ct.assert_backward(case, results["dq"], results["dk"], results["dv"]),)
        ratios.append([measurement.strict_ratio for measurement in report if measurement.name in names])
    assert (np.mean(ratios, axis=0) <= 1).all(), np.round(np.mean(ratios, axis=0), 2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("score_spread", [0.05, 1.0, 10.0])
@pytest.mark.parametrize("sizes", [(40, 1300, 64), (1300, 40, 64), (30, 900, 128), (900, 30, 128)], ids=str)
def test_sums_of_float64_are_within_twice_the_plain_formula(sizes, score_spread, deterministic):
    """Without the allowance for luck, however long: sums run over the tiles of the other sequence."""
    seqlen_q, seqlen_k, head_dim = sizes
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    case = ct.Case(**lengths, head_dim=head_dim, dtype="float64", score_spread=score_spread)
    results = all_results(case, deterministic=deterministic)
    report = (*ct.assert_forward(case, results["out"], results["lse"]),)
    report += (*ct.assert_backward(case, results["dq"], results["dk"], results["dv"]),)
    assert all(measurement.strict_ratio <= 1 for measurement in report), report


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [40, 128])
def test_tf32(head_dim, deterministic):
    """Twice the error of the formula whose factors are rounded to TF32, the oracle rule with that unit of rounding."""
    case = ct.Case(seqlen_q=70, seqlen_k=150, head_dim=head_dim, dtype="float32", causal=True, seed=3)
    results = all_results(case, deterministic=deterministic, precision="tf32")
    arrays = case.arrays()
    expected = ct.yardsticks(case.problem, arrays)
    q, k, v, dout = (rounded_to_tf32(arrays[name])[0, 0].astype(np.float64) for name in ("q", "k", "v", "dout"))
    hidden = np.arange(150) > np.arange(70)[:, None] + 80
    scores = np.where(hidden, -np.inf, q @ k.T * head_dim**-0.5)
    weights = np.exp(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))
    rounded = rounded_to_tf32(weights.astype(np.float32)).astype(np.float64)
    delta = (arrays["dout"][0, 0] * expected["out"].expected[0, 0]).sum(axis=1, keepdims=True)
    ds = rounded_to_tf32((weights * (dout @ v.T - delta)).astype(np.float32)).astype(np.float64)
    plain = {"out": rounded @ v, "dv": rounded.T @ dout, "dq": ds @ k * head_dim**-0.5, "dk": ds.T @ q * head_dim**-0.5}
    for name, values in plain.items():
        right = expected[name].expected[0, 0]
        allowed = 2 * np.abs(values - right).max() + 2.0**-11 * expected[name].scale.max()
        error = np.abs(results[name][0, 0] - right).max()
        assert error <= allowed, name  # as rough as it may be
        assert ct.measure(name, results[name], expected[name]).failure, name  # and not the other precision


@either_kernel
@pytest.mark.parametrize("deterministic", [False, True])
def test_softcap_bounds_products_that_overflow(deterministic, arch):
    """A product of minus infinity is a capped score like others, also in a tile that has hidden keys."""
    case = ct.Case(seqlen_q=2, seqlen_k=2, head_dim=16, dtype="bfloat16", softcap=0.25, causal=True)
    arrays = case.arrays()
    arrays["q"][0, 0, 1], arrays["k"][0, 0, 0] = 1e19, -1e19
    problem = problem_of(case, arrays, deterministic=deterministic)
    results = run_both(problem, arrays, arch=arch)
    expected = ct.yardsticks(problem, arrays)
    for name in ("out", "dv"):  # the others are as large as the inputs
        np.testing.assert_allclose(results[name].astype(np.float64), expected[name].expected, atol=0.02)
