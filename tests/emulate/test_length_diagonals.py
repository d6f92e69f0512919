"""``causal="lengths"``: the diagonal of each batch entry ends at its last existing key, in kernels of all families."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.plan.sm90.tiles import BACKWARD_FLOAT32_SM90_TILES, FORWARD_FLOAT32_SM90_TILES
from cuflash.spec.passes import BACKWARD, FORWARD
from cuflash.testing.float8 import assert_float8
from tests.emulate import attention
from tests.emulate.checks import all_results, judge_functions
from tests.judging import assert_oracle, assert_within, bits
from tests.scored import MASKS, SCORES, Scored, score_args_of

pytestmark = pytest.mark.one_in(3)

# Lengths within tiles and at their edges, fewer than there are queries, and none.
CASE = ct.Case(
    seqlen_q=75,
    seqlen_k=260,
    batch=4,
    num_heads=2,
    num_heads_kv=1,
    head_dim=64,
    dtype="bfloat16",
    causal="lengths",
    kv_lengths=(260, 131, 40, 0),
    seed=1,
)
FEW = replace(CASE, seqlen_q=3, seqlen_k=1100, num_heads=4, kv_lengths=(1100, 517, 2, 0))
PAIR_OPTIONS: dict[str, Any] = {"mask": (4, 1, 75, 260), "bias": (2, 75, 260), "softcap": 5.0}
# Name -> compute capability, the main kernels of both passes ("" where a pass is not run), case.
CASES: dict[str, tuple[str, str, str, ct.Case]] = {
    "8.0": ("8.0", "sm80/forward.cu", "sm80/backward.cu", CASE),
    "8.0, window": ("8.0", "sm80/forward.cu", "sm80/backward.cu", replace(CASE, window=(50, None), dtype="float32")),
    "8.0, pairs": ("8.0", "sm80/forward.cu", "sm80/backward.cu", replace(CASE, dtype="float16", **PAIR_OPTIONS)),
    "8.0, slopes": ("8.0", "sm80/forward.cu", "sm80/backward.cu", replace(CASE, alibi_slopes=(2,), dlse=True)),
    "8.0, few": ("8.0", "sm80/decode.cu", "", FEW),
    "8.0, few, window": ("8.0", "sm80/decode.cu", "", replace(FEW, window=(700, None), dtype="float32")),
    "9.0": ("9.0", "sm90/forward.cu", "sm90/backward.cu", CASE),
    "9.0, window": ("9.0", "sm90/forward.cu", "sm90/backward.cu", replace(CASE, window=(90, None), head_dim=128)),
    "9.0, pairs": ("9.0", "sm90/forward.cu", "sm90/backward.cu", replace(CASE, dtype="float16", **PAIR_OPTIONS)),
    "9.0, slopes": ("9.0", "sm90/forward.cu", "sm90/backward.cu", replace(CASE, alibi_slopes=(4, 2))),
    "9.0, blocks": (
        *("9.0", "sm90/forward.cu", "sm90/backward.cu"),
        replace(CASE, block_mask=(4, 1), block_size=(64, 64), layout="bshd", kv_lengths_dtype="int64"),
    ),
    "9.0, dropout": ("9.0", "sm90/forward.cu", "sm90/backward.cu", replace(CASE, dropout=0.3, sinks=True)),
    "9.0, few": ("9.0", "sm90/decode.cu", "", FEW),
    "9.0, few, window": ("9.0", "sm90/decode.cu", "", replace(FEW, window=(600, None), alibi_slopes=(4,))),
    "9.0, wide": ("9.0", "sm90/forward_wide.cu", "sm90/backward_wide.cu", replace(CASE, head_dim=320)),
    "9.0, float8": (
        *("9.0", "sm90/forward_float8.cu", ""),
        replace(CASE, kv_dtype="float8_e4m3fn", q_float8=True, seqlen_q=140, head_dim=128),
    ),
}
every_case = pytest.mark.parametrize(("arch", "forward", "backward", "case"), CASES.values(), ids=CASES)


def sources(problem, pass_, arrays, arch, **options):
    return {kernel.source for kernel in attention.plan_for(problem, pass_, arrays, arch, **options).kernels}


def judge(case, problem, arrays, results):
    expected = ct.yardsticks(problem, arrays, **case.random)
    assert_within(results, expected)


@every_case
def test_kernels_obey_the_oracle(arch, forward, backward, case):
    problem, arrays = attention.inputs_of(case)
    assert problem.follows_lengths and forward in sources(problem, FORWARD, arrays, arch)
    results = dict(zip(("out", "lse"), attention.forward(problem, arrays, arch=arch, **case.random), strict=True))
    if case.q_float8:
        assert_float8(case, *results.values())
        return
    if backward:
        need = ct.gradients_of(problem)
        found = attention.backward(problem, arrays, *results.values(), arch=arch, need=need, **case.random)
        results |= zip(need, found, strict=True)
        assert backward in sources(problem, BACKWARD, arrays, arch)
    judge(case, problem, arrays, results)


def test_float32_on_9_0():
    """By tiles that a plan takes for longer problems."""
    case = replace(CASE, dtype="float32", window=(100, None))
    tiles: dict[str, Any] = {
        "forward_tiles": FORWARD_FLOAT32_SM90_TILES[:1],
        "backward_tiles": BACKWARD_FLOAT32_SM90_TILES[:1],
    }
    assert_oracle(case, all_results(case, arch="9.0", **tiles))


@pytest.mark.parametrize(("arch", "dtype"), [("8.0", "float32"), ("9.0", "bfloat16")])
@pytest.mark.parametrize(("score", "mask"), [("distance", None), (None, "near")])
def test_functions(arch, dtype, score, mask):
    """They index queries and keys by their numbers, whatever the lengths are."""
    functions = (SCORES[score] if score else None, MASKS[mask] if mask else None)
    random = np.random.default_rng(3)
    arrays: dict[str, Any] = {
        name: random.standard_normal((3, 2, n, 16)).astype(ct.numpy_dtype(dtype))
        for name, n in (("q", 70), ("k", 200), ("v", 200), ("dout", 70))
    }
    arrays |= {"kv_lengths": np.array([200, 90, 30]), **score_args_of(functions, (3, 2, 70, 200), dtype, 3)}
    attn = cuflash.FlashAttention(score=functions[0], mask=functions[1], causal="lengths", window=(80, None))
    judge_functions(Scored(attn, arrays, {}, ""), arch)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ["8.0", "9.0"])
def test_bits_are_those_of_the_diagonal_of_all_keys_where_all_exist(arch, deterministic):
    case = replace(CASE, kv_lengths=(260,) * 4, batch=4, sinks=True)
    others = replace(case, causal=True)
    assert bits(all_results(case, arch=arch, deterministic=deterministic)) == bits(
        all_results(others, arch=arch, deterministic=deterministic)
    )
