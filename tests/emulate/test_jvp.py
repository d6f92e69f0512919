"""jvp and backward_jvp by the kernels in the emulator, by the oracle rule."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.emulator import passes
from cuflash.spec.problem import make_problem
from cuflash.testing import cases
from cuflash.testing.tangents import Moved, everything
from tests.emulate.tangents import check
from tests.sampling import examples, sample
from tests.second_derivatives import CASES, FEATURES, moved_by, moves_of

LARGEST = {"bfloat16": 512, "float32": 256, "float64": 192}  # head dimensions of backward_jvp


@pytest.mark.parametrize(
    ("case", "arch"),
    sample(
        [(case, arch) for case in CASES for arch in ("8.0", "7.5", "9.0") if case.dtype != "float64" or arch != "7.5"],
        9,
    ),
    ids=str,
)
def test_every_option(case, arch):
    check(case, everything(case), arch)


@settings(max_examples=examples(12))
@given(cases(features=FEATURES, max_seqlen=129, max_head_dim=96, max_scores=2**14), st.data())
def test_options_together(case, data):
    archs = ("8.0", "9.0", "7.5")[: 2 if case.dtype == "float64" else 3]
    check(case, data.draw(moved_by(case)), data.draw(st.sampled_from(archs)))


@pytest.mark.parametrize(
    ("case", "moved"),
    sample([(replace(case, dtype="float32"), moved) for case in CASES[:6] for moved in moves_of(case)], 12),
    ids=str,
)
def test_tangents_that_are_not_given(case, moved):
    check(case, moved, "8.0")


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    sample([(dtype, d) for dtype, largest in LARGEST.items() for d in (64, 96, 160, 256, 512) if d <= largest], 5),
)
def test_head_dimensions(dtype, head_dim):
    case = replace(CASES[0], dtype=dtype, head_dim=head_dim, head_dim_v=head_dim // 2, seqlen_k=70, batch=1)
    check(case, Moved(names=("q", "k", "v")), "9.0")


def bent(s, i, j, *, gamma, x, head):
    return cuflash.where(x[i, 1] > 0, s * x[j, 1], cuflash.tanh(gamma[head] * s) * cuflash.exp(-(x[i, 0] ** 2)))


@pytest.mark.parametrize("moved", [("q", "k", "v", "gamma", "x"), ("x",), ("q",)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions(dtype, moved):
    """A score that is nonlinear in s and in two arrays, with a mask function, by the NumPy path."""
    random = np.random.default_rng(7)
    shapes = {"q": (1, 4, 33, 8), "k": (1, 2, 70, 8), "v": (1, 2, 70, 8), "gamma": (4,), "x": (70, 2)}
    point: dict[str, Any] = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    tangents: dict[str, Any] = {f"t{name}": random.standard_normal(shapes[name]).astype(dtype) for name in moved}
    dout = random.standard_normal((1, 4, 33, 8)).astype(dtype)
    attention = cuflash.FlashAttention(score=bent, mask=lambda i, j: (i + j) % 3 != 0)
    expected = attention.jvp(**point, **tangents)
    gradients = attention.backward_jvp(dout, **point, **expected._asdict(), **tangents)
    three = [point[name] for name in ("q", "k", "v")]
    problem = make_problem(attention.options, *three, score_args={name: point[name] for name in ("gamma", "x")})
    results = passes.jvp(problem, point | tangents, arch="8.0")
    given = point | tangents | {"dout": dout} | dict(zip(("out", "lse", "tout", "tlse"), results, strict=True))
    found = passes.backward_jvp(problem, given, arch="8.0")
    limit = 1e-11 if dtype == "float64" else 2e-4
    for x, y in zip((*results, *found), (*expected, *gradients), strict=True):
        np.testing.assert_allclose(x, y, rtol=limit, atol=limit * np.abs(y).max())
