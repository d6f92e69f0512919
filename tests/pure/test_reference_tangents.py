"""The oracle of second order: against differences of the oracle of first order, in long doubles."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.spec.options import Options
from cuflash.spec.problem import make_problem
from cuflash.testing import cases, reference, reference_tangents
from cuflash.testing.case import qkv
from tests.sampling import examples

STEP = 1e-6
OF_NUMBERS = ("scale", "softcap")
FEATURES = (
    *("causal", "window", "scale", "softcap", "bias", "mask", "kv_lengths", "alibi_slopes", "gqa", "head_dim_v"),
    *("sinks", "dlse", "block_mask", "dropout", "packed", "lengths"),
)
SMALL: dict[str, Any] = {"max_seqlen": 17, "max_head_dim": 8, "max_scores": 2000, "min_seqlen": 0, "features": FEATURES}


def drawn(problem, arrays, names, seed):
    """Tangents of some arrays and numbers, by the names of these."""
    random = np.random.default_rng(seed)
    shapes = {name: arrays[name].shape for name in names if name in arrays}
    shapes |= {name: () for name in names if name in OF_NUMBERS}
    return {name: random.standard_normal(shape) for name, shape in shapes.items()}


def moved(problem, arrays, tangents, h):
    """The problem and the arrays a step along the tangents."""
    arrays = arrays | {name: arrays[name] + np.longdouble(h) * x for name, x in tangents.items() if name in arrays}
    numbers = {
        name: np.longdouble(getattr(problem, name)) + h * tangents[name] for name in OF_NUMBERS if name in tangents
    }
    return replace(problem, **numbers), arrays


def difference(of, problem, arrays, tangents):
    after, before = (of(*moved(problem, arrays, tangents, h)) for h in (STEP, -STEP))
    return [(x - y) / (2 * STEP) for x, y in zip(after, before, strict=True)]


def check(problem, arrays, random, tangents, cotangents):
    """jvp and backward_jvp of one problem; `cotangents` are dlse, tdout and tdlse."""
    need = problem.gradients
    inputs: dict[str, Any] = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
    inputs |= {"tangents": tangents, "dtype": np.longdouble, **random}
    got = reference_tangents.jvp(problem, **inputs)
    found = reference_tangents.backward_jvp(problem, arrays["dout"], need=need, **inputs, **cotangents)

    def forward(problem, arrays):
        others = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
        out, lse = reference.forward(problem, **others, dtype=np.longdouble, **random)
        return out, np.where(np.isneginf(lse), 0, lse)

    def backward(problem, arrays):
        return reference.backward(problem, **arrays, need=need, dtype=np.longdouble, **random)

    every = dict(tangents)
    every |= {name[1:]: cotangents[name] for name in ("tdout", "tdlse") if name in cotangents}
    given = arrays | {"dlse": cotangents.get("dlse", np.zeros(problem.lse_shape))}
    of_forward = {name: x for name, x in every.items() if name not in ("dout", "dlse")}
    for name, x, y in zip(("tout", "tlse"), got, difference(forward, problem, given, of_forward), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-7, err_msg=name)
    for name, x, y in zip(need, found, difference(backward, problem, given, every), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6 * (1 + np.abs(y).max(initial=0)), err_msg=f"t{name}")


@settings(max_examples=examples(80))
@given(cases(dtypes=("float64",), strides=("contiguous",), score_spreads=(1.0, 4.0), **SMALL), st.data())
def test_tangents_are_those_of_differences(case, data):
    problem, arrays = case.problem, {name: np.nan_to_num(x) for name, x in case.arrays().items()}
    arrays |= {name: x for name, x in case.arrays().items() if name == "bias"}  # with its holes
    names = [name for name in ("q", "k", "v", "bias", "alibi_slopes", "sinks") if name in arrays]
    names += [name for name in OF_NUMBERS if getattr(problem, name) is not None]
    names = data.draw(st.lists(st.sampled_from(names), unique=True))
    random = np.random.default_rng(1)
    cotangents = {
        name: random.standard_normal(problem.lse_shape if "lse" in name else arrays["dout"].shape)
        for name in data.draw(st.lists(st.sampled_from(["dlse", "tdout", "tdlse"]), unique=True))
    }
    if "tdlse" in cotangents:
        cotangents.setdefault("dlse", random.standard_normal(problem.lse_shape))
    check(problem, arrays, case.random, drawn(problem, arrays, names, 2), cotangents)


def score(s, i, j, *, gamma, x, head):
    """Nonlinear in s and in both arrays, and with a kink."""
    bent = cuflash.tanh(gamma[head] * s) * x[j, 0]
    return cuflash.where(x[i, 1] > 0, s * x[j, 1] + bent, bent * cuflash.exp(-(x[i, 0] ** 2)))


@settings(max_examples=examples(20))
@given(st.sets(st.sampled_from(["q", "k", "v", "gamma", "x"])), st.booleans())
def test_functions(names, causal):
    random = np.random.default_rng(5)
    arrays = {name: random.standard_normal((2, 2, 7, 5)) for name in ("q", "dout")}
    arrays |= {name: random.standard_normal((2, 1, 7, 5)) for name in ("k", "v")}
    arrays |= {"gamma": random.standard_normal(2), "x": random.standard_normal((7, 2))}
    options = Options(causal=causal, score=cuflash.FlashAttention(score=score).options.score)
    problem = make_problem(options, *qkv(arrays), score_args={name: arrays[name] for name in ("gamma", "x")})
    cotangents = {"tdout": random.standard_normal((2, 2, 7, 5))}
    check(problem, arrays, {}, drawn(problem, arrays, sorted(names), 3), cotangents)
