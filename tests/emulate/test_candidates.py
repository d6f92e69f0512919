"""What tuning tries besides the rows of the tables is as right as these: some candidates of each kernel."""

import random
from dataclasses import replace

import pytest

import cuflash.testing as ct
from cuflash.cli.check import exact_results
from cuflash.emulator import passes
from cuflash.gpu.tuning import candidates
from cuflash.plan import DeviceSpec
from cuflash.plan.sm80.decode import DECODE_TILES
from cuflash.plan.sm80.tiles import (
    BACKWARD_JVP_TILES,
    BACKWARD_TILES,
    DQ_JVP_TILES,
    DQ_TILES,
    FORWARD_TILES,
    JVP_TILES,
)
from cuflash.plan.sm90.tiles import FORWARD_SM90_TILES
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP
from cuflash.testing.tangents import Moved, assert_tangents
from tests import sampling
from tests.emulate import attention
from tests.emulate.attention import forward_by_oracle, problem_of

CASE = ct.Case(seqlen_q=150, seqlen_k=170, num_heads=2, num_heads_kv=1, head_dim=64, dtype="bfloat16", causal=True)
# Cases, and how many of their candidates that are no rows of a table.
TRIED = {
    "forward": (CASE, FORWARD, "8.0", 1),
    "forward sm90": (replace(CASE, head_dim=128), FORWARD, "9.0", 3),
    "forward sm90 pages": (replace(CASE, seqlen_k=192, kv_lengths=(170,), page_size=64), FORWARD, "9.0", 2),
    "decode": (replace(CASE, seqlen_q=4, seqlen_k=700), FORWARD, "9.0", 2),
    "decode sm80": (replace(CASE, seqlen_q=4, seqlen_k=700), FORWARD, "8.0", 2),
    "float32 sm90": (replace(CASE, dtype="float32", seqlen_q=300), FORWARD, "9.0", 2),
    "backward": (CASE, BACKWARD, "8.0", 1),
    "backward sm90": (CASE, BACKWARD, "9.0", 1),
    "float32 backward sm90": (replace(CASE, dtype="float32", seqlen_q=300), BACKWARD, "9.0", 1),
    "jvp": (CASE, JVP, "8.0", 1),
    "backward_jvp": (CASE, BACKWARD_JVP, "8.0", 1),
}
ROWS = {*FORWARD_TILES, *DECODE_TILES, *FORWARD_SM90_TILES, *BACKWARD_TILES, *DQ_TILES}
ROWS |= {*JVP_TILES, *BACKWARD_JVP_TILES, *DQ_JVP_TILES}


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("case", "pass_", "arch", "count"), TRIED.values(), ids=TRIED)
def test_candidates_are_right(case, pass_, arch, count):
    arrays = case.arrays()
    problem, moved = problem_of(case, arrays), Moved(names=("q", "k", "v"))
    if pass_.has_tangents:
        problem = replace(problem, moved=moved.names)
    others = [plan for plan in candidates(problem, DeviceSpec.for_arch(arch), pass_)[1:] if {*plan.tiles} - ROWS]
    for plan in random.Random(0).sample(others, count if sampling.exhaustive else 1):
        if pass_.has_tangents:
            given = arrays | moved.arrays(case) | exact_results(JVP, case, problem, arrays)
            found = getattr(passes, pass_.name)(problem, given, arch=arch, tiles=plan.tiles)
            results = dict(zip(pass_.default, found, strict=True))
            assert_tangents(case, moved, {name: x for name, x in results.items() if name.startswith("t")})
        elif pass_ is FORWARD:
            ct.assert_forward(case, *attention.forward(problem, arrays, arch=arch, tiles=plan.tiles))
        else:
            forward = forward_by_oracle(problem, arrays)
            ct.assert_backward(case, *attention.backward(problem, arrays, *forward, arch=arch, tiles=plan.tiles))
