"""Scores and masks of a caller in the kernels: larger tiles of many queries, and tiles that a mask hides."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.emulator import Statistics
from cuflash.plan import DeviceSpec, choose_plan
from tests.emulate.checks import judge_functions
from tests.scored import MASKS, SCORES, Scored, score_args_of


@pytest.mark.one_in(1)
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
    ],
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


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_where_tanh_is_near_1_in_half_precision(arch, sign):
    """Of 1 - tanh(x)^2 nothing would be left there."""
    rng = np.random.default_rng(1)
    q, k = (scale * np.abs(rng.standard_normal((1, 2, n, 64))) for scale, n in ((3.0 * sign, 40), (0.5, 50)))
    v, dout = (rng.standard_normal((1, 2, n, 64)) for n in (50, 40))
    arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items()}
    attn = cuflash.FlashAttention(score=lambda s, i, j: 3 * cuflash.tanh(s) + 0.01 * cuflash.cos(j))
    judge_functions(Scored(attn, arrays, {}, ""), arch)
