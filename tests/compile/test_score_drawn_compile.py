"""Random functions of a caller compile: each kernel of both passes, for any of the gradients; no device needed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.arrays.array_info import numpy_dtype
from cuflash.gpu.compiler import compile_spec
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.passes import PASSES_WITHOUT_TANGENTS
from cuflash.spec.problem import Problem
from tests import expressions, sampling
from tests.scored import MASKS, SCORES, Functions, Scored

EXAMPLES = 24 if sampling.exhaustive else 2  # some kernels each, which take a few seconds
BATCH, SEQLEN_Q, SEQLEN_K = 2, 200, 240


@st.composite
def functions(draw: st.DrawFn) -> Functions:
    """Scores of any kind, those with jumps and kinks too, and masks that compare anything."""
    drawn = st.one_of(expressions.scores(), expressions.smooth_scores(), expressions.hoistable_scores())
    score = draw(st.one_of(drawn.filter(_is_score), st.sampled_from([f for f in SCORES.values() if f]), st.none()))
    masks = st.one_of(expressions.masks(), st.sampled_from(list(MASKS.values())))
    return Functions(score, draw(masks if score is None else st.one_of(masks, st.none())))


def _is_score(function: Any) -> bool:
    """Whether a drawn function reads anything; one that does not is refused."""
    try:
        cuflash.FlashAttention(score=function)
    except ValueError:
        return False
    return True


@st.composite
def problems(draw: st.DrawFn, dtype: str) -> tuple[Problem, tuple[str, ...]]:
    """Problems with such functions, and some of their gradients."""
    own, heads = draw(functions()), draw(st.sampled_from([(1, 1), (3, 1), (4, 2)]))
    dims = st.sampled_from([64, 128, 8, 72, 256])
    head_dim = draw(dims)
    head_dim_v = draw(st.one_of(st.just(head_dim), dims))
    shapes = {"q": (heads[0], SEQLEN_Q, head_dim), "k": (heads[1], SEQLEN_K, head_dim)}
    shapes |= {"v": (heads[1], SEQLEN_K, head_dim_v)}
    arrays = {name: np.zeros((BATCH, *shape), numpy_dtype(dtype)) for name, shape in shapes.items()}
    arrays |= own.arrays((BATCH, heads[0], SEQLEN_Q, SEQLEN_K), dtype, 0)
    if draw(st.booleans()):
        arrays["kv_lengths"] = np.full(BATCH, SEQLEN_K, np.int32)
    if draw(st.booleans()):
        arrays["mask"] = np.ones((SEQLEN_Q, SEQLEN_K), bool)
    options: dict[str, Any] = {"causal": draw(st.booleans()), "dropout": draw(st.sampled_from([0.0, 0.0, 0.1]))}
    options["deterministic"] = draw(st.booleans())
    attn = cuflash.FlashAttention(score=own.score, mask=own.mask, **options)
    problem = Scored(attn, arrays, {}, str(own)).problem
    names = ("dq", "dk", "dv", *problem.score_arg_gradients)
    need = draw(st.one_of(st.just(names), st.lists(st.sampled_from(names), min_size=1, unique=True).map(tuple)))
    return problem, tuple(name for name in names if name in need)


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    "arch, dtype",
    [("9.0", "bfloat16"), ("9.0", "float16"), ("9.0", "float32"), ("8.0", "float16"), ("8.0", "float64")],
)
def test_random_functions_compile(arch, dtype):
    device = DeviceSpec.for_arch(arch)

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(problems(dtype))
    def compiles(drawn):
        problem, need = drawn
        for pass_ in PASSES_WITHOUT_TANGENTS:
            for kernel in choose_plan(problem, device, pass_, need=need).kernels:
                compile_spec(kernel)

    compiles()
