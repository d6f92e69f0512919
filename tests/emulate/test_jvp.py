"""jvp and backward_jvp by the kernels in the emulator, by the oracle rule."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.emulator import passes
from cuflash.spec.batch_axes import BatchCalls, axes_of
from cuflash.spec.inputs import NAMES
from cuflash.spec.problem import make_problem
from cuflash.testing import Case, cases
from cuflash.testing.tangents import Moved, assert_tangents, everything
from tests.calls import shifted
from tests.cuda_scores import CUDA_SCORES
from tests.emulate import attention
from tests.emulate.tangents import check, check_functions, check_jvp, check_partials, movable_of
from tests.sampling import examples, sample
from tests.scored import CONDITIONED, SCORES, STEEP, Scored, few_tiles, scored, steep
from tests.second_derivatives import CASES, FEATURES, moved_by, moves_of

LARGEST = {"bfloat16": 512, "float32": 256, "float64": 192}  # head dimensions of backward_jvp


@settings(max_examples=examples(12))
@given(cases(features=FEATURES, max_seqlen=129, max_head_dim=96, max_scores=2**14), st.data())
def test_options_together(case, data):
    archs = ("8.0", "9.0", "7.5")[: 2 if case.dtype == "float64" else 3]
    check(case, data.draw(moved_by(case)), data.draw(st.sampled_from(archs)), data.draw(st.booleans()))


@settings(max_examples=examples(12))
@example(dropout=0.75, seqlens=(22, 54), softcap=None, arch="9.0", tdout=False, seed=21)
@example(dropout=0.9, seqlens=(10, 45), softcap=None, arch="8.0", tdout=True, seed=29)
@given(
    dropout=st.sampled_from((0.5, 0.75, 0.9)),
    seqlens=st.tuples(*[st.integers(1, 70)] * 2),
    softcap=st.sampled_from((None, 5.0)),
    arch=st.sampled_from(("8.0", "9.0")),
    tdout=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_subnormal_weights_have_the_factor_of_dropout(dropout, seqlens, softcap, arch, tdout, seed):
    """What is left of a row whose largest weight is dropped may be subnormal in float16: all of it is rounded once."""
    sizes: dict[str, Any] = {"seqlen_q": seqlens[0], "seqlen_k": seqlens[1], "head_dim": 64, "score_spread": 8.0}
    case = Case(**sizes, dtype="float16", dropout=dropout, softcap=softcap, seed=seed)
    check(case, Moved(cotangents=("tdout",) if tdout else (), seed=seed), arch)


@pytest.mark.parametrize(
    ("own", "names", "common"),
    [
        ({"seqlen_q": 9, "head_dim": 8, "causal": True, "score_spread": 8.0, "seed": 41}, ("sinks", "v"), 0.0),
        ({"seqlen_q": 9, "head_dim": 1, "seed": 361}, ("k",), 100.0),
    ],
    ids=["with tsinks", "keys in common"],
)
def test_sinks_that_outweigh_the_first_keys(own, names, common):
    """Next to the first keys alone a sink weighs more than next to all of them: a shift to its tangent is far off."""
    case = Case(**own, seqlen_k=70, num_heads=4, batch=1, dtype="bfloat16", sinks=True)
    check_jvp(case, Moved(names=names, common=common, seed=case.seed), arch="8.0")


@pytest.mark.parametrize(
    ("case", "moved"),
    [
        *sample([(replace(case, dtype="float32"), moved) for case in CASES[:6] for moved in moves_of(case)], 12),
        # Rows of one key that counts, whose tlse is that of its bias: the others add what is left of the mean.
        (replace(CASES[7], dtype="bfloat16", head_dim=64), Moved(names=("bias",))),
    ],
    ids=str,
)
def test_tangents_that_are_not_given(case, moved):
    check(case, moved, "8.0")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "arch"),
    [
        ("float32", 192, "8.6"),  # there each warp makes all products of scores
        *sample(
            [(dtype, d, "9.0") for dtype, largest in LARGEST.items() for d in (64, 96, 160, 256, 512) if d <= largest],
            5,
        ),
    ],
)
def test_head_dimensions(dtype, head_dim, arch):
    case = replace(CASES[0], dtype=dtype, head_dim=head_dim, head_dim_v=head_dim // 2, seqlen_k=70, batch=1)
    check(case, Moved(names=("q", "k", "v")), arch)


@pytest.mark.parametrize("case", sample([case for case in CASES if case.dtype in ("bfloat16", "float16")], 2), ids=str)
def test_partial_results_are_not_rounded(case):
    check_partials(case, everything(case), "8.0")


@settings(max_examples=examples(5))
@given(scored(max_seqlen=130, scores=(*CONDITIONED, *CUDA_SCORES), head_dims=(8,)), st.data())
def test_functions_with_other_options(case, data):
    moved = data.draw(st.lists(st.sampled_from(movable_of(case)), unique=True))
    check_functions(case, moved, data.draw(st.sampled_from(("8.0", "9.0"))))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("score", [steep, STEEP], ids=["python", "cuda"])
def test_functions_where_the_chain_rule_meets_0_times_infinity(score):
    """The root of a distance of 0, and a factor of 0 that has a tangent."""
    random = np.random.default_rng(5)
    arrays = {name: random.standard_normal((1, 2, 70, 16)) for name in ("q", "k", "v", "dout")}
    arrays |= {"pos": random.standard_normal((70, 2)), "power": np.array([1.5, 0.75]), "gamma": np.array([0.5, 0.0])}
    case = Scored(cuflash.FlashAttention(score=score), arrays, {}, "")
    check_functions(case, movable_of(case))


@pytest.mark.parametrize(
    "lay_out",
    [lambda x: np.ascontiguousarray(x[::-1])[::-1], attention.far_apart],
    ids=["reversed", "far apart"],
)
def test_tangents_of_what_functions_read_lie_anyhow(lay_out):
    """Offsets in the arrays themselves are never negative, and take 32 bits."""
    case = few_tiles(("distance", None), "float32")
    dout, point = case.arrays["dout"], {name: x for name, x in case.arrays.items() if name != "dout"}
    score_args = case.problem.score_arg_gradients

    def results(lay_out):
        given = point | {f"t{name[1:]}": lay_out(np.cos(point[name[1:]])) for name in score_args}
        found = passes.jvp(case.problem, given, arch="8.0", allocate=lambda x: x)
        given |= dict(zip(("out", "lse", "tout", "tlse"), found, strict=True)) | {"dout": dout}
        need = ("tdq", *(f"t{name}" for name in score_args))
        return (*found, *passes.backward_jvp(case.problem, given, need=need, arch="8.0", allocate=lambda x: x))

    for x, y in zip(results(lay_out), results(np.asarray), strict=True):
        np.testing.assert_array_equal(x, y)


@settings(max_examples=examples(6))
@example(steps={"tq": 0, "tout": 1, "tdout": 0}, dtype="float16", arch="9.0")
@example(steps={"tq": 0, "tout": 0, "tdout": 1}, dtype="float32", arch="8.0")
@given(
    steps=st.fixed_dictionaries({name: st.sampled_from((0, 1, 2, 4)) for name in ("tq", "tout", "tdout")}),
    dtype=st.sampled_from(("float16", "float32")),
    arch=st.sampled_from(("8.0", "9.0")),
)
def test_tangents_at_any_address(steps, dtype, arch):
    """They begin so many elements past a multiple of 64 bytes; kernels load as much at once as all of them allow."""
    case, moved = Case(seqlen_q=40, seqlen_k=50, num_heads=2, head_dim=32, dtype=dtype), Moved(cotangents=("tdout",))

    def placed(arrays):
        return {name: shifted(x, steps[name]) if name in steps else x for name, x in arrays.items()}

    arrays, tangents = case.arrays(), placed(moved.arrays(case))
    given = {name: x for name, x in (arrays | tangents).items() if name not in ("dout", "tdout")}
    of_forward = dict(zip(("out", "lse", "tout", "tlse"), passes.jvp(case.problem, given, arch=arch), strict=True))
    need = ("tdq", "tdk", "tdv")
    found = passes.backward_jvp(case.problem, arrays | tangents | placed(of_forward), need=need, arch=arch)
    results = {name: of_forward[name] for name in ("tout", "tlse")} | dict(zip(need, found, strict=True))
    assert_tangents(case, moved, results)


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_offsets_take_64_bits(dtype, arch):
    """Of arrays of which rows, heads and batch entries are far apart."""
    sizes: dict[str, Any] = {"seqlen_q": 18, "seqlen_k": 20, "batch": 2, "num_heads": 2, "head_dim": 16, "dtype": dtype}
    case = Case(**sizes, bias=(2, 2, 18, 20), alibi_slopes=(2, 2), kv_lengths=(20, 11), sinks=True, dlse=True)
    check(case, everything(case), arch, allocate=attention.far_apart)


def test_sinks_with_functions():
    """The kernel of sinks has no functions."""
    case = few_tiles(("distance", None), "float32")
    attention: Any = cuflash.FlashAttention(score=SCORES["distance"], causal=True)
    point = case.arrays | {"sinks": np.array([0.3, -1.0], np.float32)}
    tangents = {f"t{name}": np.cos(point[name]) for name in ("q", "sinks", "gamma")}
    dout = point.pop("dout")
    expected = attention.jvp(**point, **tangents)
    need = ("tdq", "tdscale", "tdsinks", "tdgamma")
    gradients = attention.backward_jvp(dout, **point, **expected._asdict(), **tangents, need=need)
    score_args = {name: point[name] for name in attention.options.score.arrays}
    three = [point[name] for name in ("q", "k", "v")]
    problem = make_problem(attention.options, *three, sinks=point["sinks"], score_args=score_args)
    results = passes.jvp(problem, point | tangents, arch="8.0")
    given = point | tangents | {"dout": dout} | dict(zip(("out", "lse", "tout", "tlse"), results, strict=True))
    found = passes.backward_jvp(problem, given, need=need, arch="8.0")
    for x, y in zip((*results, *found), (*expected, *gradients), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * np.abs(y).max())


def by_calls(options, arrays, results, compute):
    """Results by name, of the calls that a call on CuPy arrays with batch axes is made of."""

    def call(own, given):
        present = {name: x for name, x in given.items() if x is not None and name not in results}
        found = compute(make_problem(own, *(present[name] for name in "qkv"), bias=present["bias"]), present)
        for name, x in zip(results, found, strict=True):
            if given.get(name) is not None:
                given[name][...] = x
        return found

    given = dict.fromkeys((*NAMES, *results)) | arrays
    axes = axes_of(options, given, results)
    assert axes is not None
    calls = BatchCalls(axes, options, given, results, np, gives_partials=True)
    return dict(zip(results, calls.run(call), strict=True))


@pytest.mark.parametrize(
    ("dtype", "bias"),
    sample(itertools.product(("float16", "float64"), [(3, 2, 1, 9, 19), (2, 2, 9, 19), (2, 1, 1, 19)]), 2),
)
def test_batch_axes_that_broadcast(dtype, bias):
    """Tangents of gradients are summed over axes that broadcast."""
    random = np.random.default_rng(1)
    shapes = {"q": (3, 1, 2, 9, 8), "k": (2, 2, 19, 8), "v": (1, 2, 19, 4), "bias": bias}
    point, tangents = (
        {f"{prefix}{name}": random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        for prefix in ("", "t")
    )
    dout = random.standard_normal((3, 2, 2, 9, 4)).astype(dtype)
    need = ("tdq", "tdk", "tdv", "tdbias", "tdscale")
    attention: Any = cuflash.FlashAttention()
    results: dict[str, Any] = attention.jvp(**point, **tangents)._asdict()
    results |= attention.backward_jvp(dout, **point, **results, **tangents, need=need)._asdict()
    found = by_calls(
        attention.options, point | tangents, ("out", "lse", "tout", "tlse"), partial(passes.jvp, arch="8.0")
    )
    given = point | tangents | found | {"dout": dout}
    found |= by_calls(attention.options, given, need, partial(passes.backward_jvp, need=need, arch="8.0"))
    limit = 1e-11 if dtype == "float64" else 1e-2
    for name, y in results.items():
        assert found[name].dtype == y.dtype
        np.testing.assert_allclose(found[name], y, rtol=limit, atol=limit * np.abs(y).max(), err_msg=name)
