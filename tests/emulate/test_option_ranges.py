"""Options at the ends of their ranges: kernels give finite results of ordinary inputs, in float32 too."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES, passes
from cuflash.spec.options import Options
from cuflash.spec.problem import make_problem
from cuflash.testing.rule import measure
from cuflash.testing.tangents import Moved, tangent_yardsticks
from tests.emulate import attention
from tests.sampling import examples

ARRAYS = {"8.0": ct.Case(seqlen_q=70, seqlen_k=70, head_dim=16), "9.0": ct.Case(seqlen_q=70, seqlen_k=70, head_dim=64)}
LARGEST = 2.0**48
LARGEST_SOFTCAP = {"float32": LARGEST, "float16": 2.0**16, "bfloat16": 2.0**16}


def run(arch, dtype, **options):
    """The problem, and (out, lse) of standard normal inputs under a causal mask."""
    arrays = {name: x.astype(ct.numpy_dtype(dtype)) for name, x in ARRAYS[arch].arrays().items()}
    problem = make_problem(Options(causal=True, **options), *ct.qkv(arrays))
    out, lse = attention.forward(problem, arrays, arch=arch, schedule=SCHEDULES[0])
    return out.astype(np.float64), lse


@pytest.mark.parametrize(("arch", "dtype"), [("8.0", "float32"), ("9.0", "bfloat16")])
@pytest.mark.parametrize("scale", [1e-46, -1e-46, 5e-324, 1e-44])
def test_a_scale_that_float32_hardly_holds_is_like_0(arch, dtype, scale):
    """Hidden pairs stay hidden: -inf times a scale that was rounded to 0 would be NaN."""
    for got, expected in zip(run(arch, dtype, scale=scale), run(arch, dtype, scale=0.0), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("arch", "dtype"), [("8.0", "float32"), ("9.0", "bfloat16")])
@pytest.mark.parametrize("scale", [LARGEST, -LARGEST, None])
@pytest.mark.parametrize("softcap", ["largest", "smallest", None])
def test_the_largest_and_the_smallest_options_give_finite_results(arch, dtype, scale, softcap):
    number = {"largest": LARGEST_SOFTCAP[dtype], "smallest": 1 / LARGEST, None: None}[softcap]
    out, lse = run(arch, dtype, scale=scale, softcap=number)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize(("arch", "dtype"), [("8.0", "float16"), ("9.0", "bfloat16"), ("8.0", "float32")])
def test_a_softcap_far_above_the_scores_changes_nothing_that_weights_show(arch, dtype):
    case = replace(ARRAYS[arch], dtype=dtype, softcap=LARGEST_SOFTCAP[dtype])
    arrays = case.arrays()
    out, _ = attention.forward(case.problem, arrays, arch=arch, schedule=SCHEDULES[0])
    assert ct.measure("out", out, ct.yardsticks(case.problem, arrays)["out"]).failure is None


def tangents_of(problem, arrays, tangents, arch):
    """Tangents of out, lse and all gradients, by name."""
    given = {name: x for name, x in arrays.items() if name != "dout"} | tangents
    given |= dict(zip(("out", "lse", "tout", "tlse"), passes.jvp(problem, given, arch=arch), strict=True))
    need = ("tdq", "tdk", "tdv", "tdscale", *(("tdsoftcap",) if problem.softcap else ()))
    found = passes.backward_jvp(problem, given | {"dout": arrays["dout"]}, need=need, arch=arch)
    return {"tout": given["tout"], "tlse": given["tlse"], **dict(zip(need, found, strict=True))}


@pytest.mark.parametrize(("arch", "dtype"), [("8.0", "float16"), ("9.0", "float16"), ("8.0", "float32")])
@settings(max_examples=examples(60), deadline=None)
@given(exponent=st.sampled_from((-9, -20, -48, -100)), names=st.lists(st.sampled_from("qkv"), unique=True))
def test_a_tangent_of_the_scale_far_above_the_scale(arch, dtype, exponent, names):
    """dX tscale / scale, in units of the scale, would be infinite in float16."""
    case = replace(ARRAYS[arch], dtype=dtype)
    problem, arrays = replace(case.problem, scale=2.0**exponent), case.arrays()
    tangents = Moved(names=(*names, "scale")).arrays(case)
    judges = tangent_yardsticks(problem, arrays, tangents)
    for name, x in tangents_of(problem, arrays, tangents, arch).items():
        assert not (found := measure(name, x, judges[name])).failure, found


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@settings(max_examples=examples(60), deadline=None)
@given(names=st.lists(st.sampled_from(("q", "k", "v", "scale", "softcap")), unique=True, min_size=1))
def test_where_tanh_is_1_the_scale_changes_no_second_derivative(arch, names):
    """Of the smallest cap and the largest scale, a score over the square of the cap is infinite."""
    case = replace(ARRAYS[arch], dtype="bfloat16", softcap=1.0)
    arrays, tangents = case.arrays(), Moved(names=tuple(names)).arrays(case)
    of_scales = (replace(case.problem, scale=scale, softcap=1 / LARGEST) for scale in (LARGEST, 1.0))
    large, plain = (tangents_of(problem, arrays, tangents, arch) for problem in of_scales)
    for name, x in large.items():
        assert np.isfinite(x.astype(np.float64)).all()
        np.testing.assert_array_equal(x, plain[name])
