"""Scores and masks of a caller in the kernels, against the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.emulator import Schedule, Statistics
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.passes import BACKWARD, PASSES_WITHOUT_TANGENTS
from tests import sampling
from tests.cuda_scores import HEAD
from tests.emulate import attention
from tests.emulate.checks import judge_functions
from tests.scored import MASKS, SCORES, Scored, score_args_of, scored, steep

HOISTED = ("t5", "decay", "of_rows", "hoistable")


def by_own_kernels(case: Scored) -> bool:
    """Whether both passes have main kernels for compute capability 9.0."""
    plans = [choose_plan(case.problem, DeviceSpec.for_arch("9.0"), pass_) for pass_ in PASSES_WITHOUT_TANGENTS]
    return all(any(kernel.source.startswith("sm90/") for kernel in plan.kernels) for plan in plans)


def sums_arrays(case: Scored) -> bool:
    """Whether the main kernel of the backward pass makes gradients of arrays that the score reads."""
    need = ("dq", "dk", "dv", *case.problem.score_arg_gradients)
    plan = choose_plan(case.problem, DeviceSpec.for_arch("9.0"), BACKWARD, need=need)
    return any(kernel.source == "sm90/backward.cu" and "_score_args" in kernel.name for kernel in plan.kernels)


def of_9_0(head_dim: int, *scores: str) -> st.SearchStrategy[Scored]:
    """Problems for which compute capability 9.0 has kernels of its own."""
    sizes: dict[str, Any] = {"max_seqlen": 130, "min_seqlen": 40, "head_dims": (head_dim,)}
    cases = scored(dtypes=("float16", "bfloat16"), scores=scores, follows_lengths=True, **sizes)
    return cases.filter(by_own_kernels)


@pytest.mark.one_in(24)
@pytest.mark.parametrize(
    "arch, cases",
    [
        ("8.0", scored(max_seqlen=130, follows_lengths=True)),
        ("9.0", of_9_0(16, "drawn", "distance", "tempered").filter(sums_arrays)),
        ("9.0", of_9_0(72, "drawn", "distance", "box").filter(sums_arrays)),
        ("9.0", of_9_0(72, "with_pairs")),
        ("9.0", of_9_0(136, "capped", "drawn")),
        ("8.0", scored(max_seqlen=130, scores=HOISTED)),
        ("9.0", of_9_0(16, "t5", "decay", "of_rows")),
        ("9.0", of_9_0(16, "hoistable").filter(sums_arrays)),
        ("9.0", of_9_0(72, "hoistable").filter(sums_arrays)),
    ],
    ids=[
        *("8.0", "9.0-16-arrays", "9.0-72-arrays", "9.0-72", "9.0-136"),
        *("8.0-tables", "9.0-16-tables", "9.0-16-tables-arrays", "9.0-72-tables-arrays"),
    ],
)
def test_kernels_obey_the_oracle(arch, cases):
    @settings(max_examples=2)
    @given(cases)
    def judge(case):
        judge_functions(case, arch)

    judge()


@pytest.mark.parametrize(
    "score, mask, head_dim, tile",
    [
        (None, "documents", 16, (256, 64)),
        (None, "near", 16, (256, 64)),
        ("plane", None, 16, (256, 64)),
        ("box", None, 16, (256, 64)),
        ("box", "documents", 16, (256, 64)),
        ("plane", None, 72, (192, 80)),
        ("box", None, 72, (192, 80)),
    ][:: 1 if sampling.exhaustive else 2],
)
def test_larger_tiles_of_many_queries_obey_the_oracle(score, mask, head_dim, tile):
    functions = (SCORES[score] if score else None, MASKS[mask] if mask else None)
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=1)

    @settings(max_examples=2)
    @given(st.integers(1, 128), st.integers(1, 25), st.booleans(), st.integers(0, 99))
    def judge(more_queries, eighths, causal, seed):
        causal = causal and head_dim <= 64  # then two tiles of queries make one
        seqlen_q = more_queries + (128 if head_dim <= 64 else 256)
        sizes = (1, 2, seqlen_q + 256 * causal, 8 * eighths)
        random = np.random.default_rng(seed)
        lengths = {"q": sizes[2], "k": sizes[3], "v": sizes[3], "dout": sizes[2]}
        arrays = {name: random.standard_normal((1, 2, n, head_dim)).astype(np.float16) for name, n in lengths.items()}
        arrays |= score_args_of(functions, sizes, "float16", seed)
        attn = cuflash.FlashAttention(score=functions[0], mask=functions[1], causal=causal)
        case = Scored(attn, arrays, {}, "")
        (chosen,) = choose_plan(case.problem, device).tiles
        assert (chosen.block_m, chosen.block_n) == tile
        judge_functions(case, device)

    judge()


@pytest.mark.parametrize("arch, dtype", [("8.0", "float32"), ("9.0", "float16")])
def test_gradients_of_arrays_do_not_depend_on_the_order_of_blocks_and_threads(arch, dtype):
    functions = (SCORES["distance"], None)
    random = np.random.default_rng(5)
    arrays = {name: random.standard_normal((1, 2, 140, 16)).astype(dtype) for name in ("q", "k", "v", "dout")}
    arrays |= score_args_of(functions, (1, 2, 140, 140), dtype, 5)
    case = Scored(cuflash.FlashAttention(score=functions[0]), arrays, {}, "")
    out, lse = attention.forward(case.problem, arrays, arch=arch)
    names = case.problem.score_arg_gradients
    need = ("dk", *names) if arch == "9.0" else names
    assert sums_arrays(case) == (arch == "9.0")

    def gradients(arrays, **options):
        found = attention.backward(case.problem, arrays, out, lse, need=need, arch=arch, **options)
        return found[-len(names) :]

    results = [gradients(arrays, schedule=schedule) for schedule in (Schedule(), Schedule("random", seed=3))]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    power = 2.0**-60 if dtype == "float32" else 2.0**3
    scaled = arrays | {"dout": arrays["dout"] * np.dtype(dtype).type(power)}  # sums are as exact at any scale
    for one, other in zip(results[0], gradients(scaled), strict=True):
        np.testing.assert_array_equal(one * one.dtype.type(power), other)
    arrays["dout"][0, 1, 3, 2] = np.inf  # a term that is infinite leaves nothing to tell
    assert np.isnan(gradients(arrays)[names.index("dgamma")]).all()


def test_derivatives_of_pairs_without_weight_do_not_count():
    random = np.random.default_rng(5)
    arrays = {name: np.ones((1, 1, 70, 16), np.float32) for name in "qk"}
    arrays |= {name: random.standard_normal((1, 1, 70, 16)).astype(np.float32) for name in ("v", "dout")}
    arrays["q"] *= np.linspace(-1, 1, 70, dtype=np.float32)[:, None]
    arrays |= score_args_of((SCORES["barrier"], None), (1, 1, 70, 70), "float32", 5)
    judge_functions(Scored(cuflash.FlashAttention(score=SCORES["barrier"]), arrays, {}, ""))


STEEP = cuflash.Score(
    cuda=f"""
    {HEAD} {{
      const T x = given.pos(i, 0) - given.pos(j, 0), y = given.pos(i, 1) - given.pos(j, 1);
      return s - given.gamma(head) * sqrt(x * x + y * y) - T(0.1) * pow(T(i < j ? j - i : i - j), given.power(head));
    }}
    """,
    arrays=["pos", "power", "gamma"],
    python=steep,
)


@pytest.mark.one_of("score")
@pytest.mark.parametrize("score", [steep, STEEP], ids=["traced", "text"])
@pytest.mark.parametrize(("arch", "dtype"), [("8.0", "float32"), ("9.0", "float16")])
def test_gradients_where_the_chain_rule_meets_0_times_infinity(arch, dtype, score):
    random = np.random.default_rng(5)
    arrays = {name: random.standard_normal((1, 2, 70, 16)).astype(dtype) for name in ("q", "k", "v", "dout")}
    arrays["pos"] = random.standard_normal((70, 2)).astype(np.float32)
    arrays |= {"power": np.array([1.5, 0.75], np.float32), "gamma": np.array([0.5, 0.0], np.float32)}
    judge_functions(Scored(cuflash.FlashAttention(score=score), arrays, {}, ""), arch)


def test_tiles_that_a_mask_hides_are_not_multiplied():
    functions = (None, MASKS["documents"])
    random = np.random.default_rng(5)
    arrays = {name: random.standard_normal((1, 2, 256, 16)).astype(np.float32) for name in ("q", "k", "v", "dout")}
    documents = np.repeat([3, 1], 128)
    products = {}
    for name, kind in (("all", np.zeros(256, int)), ("documents", documents)):
        arrays |= {"kind_q": kind.astype(np.int32), "kind_k": kind}
        statistics: list[Statistics] = []
        judge_functions(Scored(cuflash.FlashAttention(mask=functions[1]), arrays, {}, ""), statistics=statistics)
        products[name] = sum(one.matrix_products for one in statistics)
    # The kernel of dscale multiplies all tiles.
    assert products["documents"] <= 0.7 * products["all"]
