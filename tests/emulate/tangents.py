"""jvp and backward_jvp of a case by the kernels in the emulator, and what they are held to."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.emulator import passes
from cuflash.plan import DeviceSpec
from cuflash.plan.sm90.tiles import (
    JVP_FLOAT32_SM90_TILES,
    JVP_FLOAT32_WIDE_SM90_TILES,
    JVP_TF32_SM90_TILES,
    JVP_TF32_WIDE_SM90_TILES,
    BackwardJvpFloat32Sm90Tile,
    BackwardJvpFloat32WideSm90Tile,
)
from cuflash.spec.inputs import NUMBERS
from cuflash.spec.outputs import DEFAULT_NEED, DEFAULT_NEED_TANGENTS
from cuflash.spec.problem import Problem
from cuflash.testing import Case
from cuflash.testing.rule import measure
from cuflash.testing.tangents import Moved, assert_tangents, yardsticks_of
from tests.scored import Scored
from tests.second_derivatives import has_gradient, judge_functions

Float32Tile = BackwardJvpFloat32Sm90Tile | BackwardJvpFloat32WideSm90Tile


def check(case: Case, moved: Moved, arch: str | DeviceSpec, deterministic: bool = False, **options: Any) -> None:
    """Hold the results of both passes to the oracle rule, and out and lse to those of the forward pass."""
    arrays, tangents, problem = case.arrays(), moved.arrays(case), replace(case.problem, deterministic=deterministic)
    of_inputs = {name: x for name, x in tangents.items() if name not in ("tdout", "tdlse")}
    given = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
    options = {"arch": arch, **case.random, **options}
    names = ("out", "lse", "tout", "tlse")
    of_forward = dict(zip(names, passes.jvp(problem, given | of_inputs, **options), strict=True))
    need = tuple(f"t{name}" for name in problem.gradients if has_gradient(case, name))
    found = passes.backward_jvp(problem, arrays | tangents | of_forward, need=need, **options)
    results = {name: of_forward[name] for name in ("tout", "tlse")} | dict(zip(need, found, strict=True))
    assert_tangents(case, moved, results)
    check_forward(case, given, of_forward, arch)


def check_jvp(case: Case, moved: Moved, **options: Any) -> None:
    """The same of jvp alone."""
    arrays = case.arrays()
    given = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
    of_inputs = {name: x for name, x in moved.arrays(case).items() if name not in ("tdout", "tdlse")}
    names = ("out", "lse", "tout", "tlse")
    results = dict(zip(names, passes.jvp(case.problem, given | of_inputs, **case.random, **options), strict=True))
    assert_tangents(case, moved, {name: results[name] for name in ("tout", "tlse")})
    check_forward(case, given, results, "9.0")


def without_tdout(moved: Moved) -> Moved:
    """The other tangents: with tdout the kernels of float32 do not serve a call."""
    return replace(moved, cotangents=tuple(name for name in moved.cotangents if name != "tdout"))


def inputs_of_float32(case: Case, moved: Moved, tile: Float32Tile) -> tuple[Problem, dict[str, Any]]:
    """The problem of a kernel of float32, and all that the pass takes: scores are split alike in both passes."""
    of_jvp = (JVP_FLOAT32_SM90_TILES, JVP_FLOAT32_WIDE_SM90_TILES)
    problem = replace(case.problem, precision="highest")
    if tile.bf16_terms == 2:
        problem, of_jvp = replace(problem, precision="tf32"), (JVP_TF32_SM90_TILES, JVP_TF32_WIDE_SM90_TILES)
    every = case.arrays() | without_tdout(moved).arrays(case)
    given = {name: x for name, x in every.items() if name not in ("dout", "dlse", "tdlse")}
    tiles = of_jvp[isinstance(tile, BackwardJvpFloat32WideSm90Tile)]
    results = passes.jvp(problem, given, arch="9.0", tiles=tiles, **case.random)
    return problem, every | dict(zip(("out", "lse", "tout", "tlse"), results, strict=True))


def check_float32(case: Case, moved: Moved, tile: Float32Tile, **options: Any) -> None:
    """Hold its results to the oracle rule.

    Two terms, which are for precision="tf32", have 16 bits of the 24 that the tolerance is for.
    """
    problem, every = inputs_of_float32(case, moved, tile)
    need = DEFAULT_NEED_TANGENTS
    found = passes.backward_jvp(problem, every, need=need, arch="9.0", tiles=(tile,), **case.random, **options)
    judges = yardsticks_of(case, without_tdout(moved))
    for name, x in zip(need, found, strict=True):
        measurement = measure(name, x, judges[name].looser(2.0 ** (24 - 8 * tile.bf16_terms)))
        assert not measurement.failure, str(measurement)


def check_forward(case: Case, given: Mapping[str, Any], results: Mapping[str, Any], arch: str | DeviceSpec) -> None:
    """Hold out and lse to those of the forward pass."""
    out, lse = passes.forward(case.problem, given, arch=arch, **case.random)
    limit = {"float64": 1e-12, "float32": 1e-5}.get(case.dtype, 2e-2)
    for x, y in ((results["out"], out), (results["lse"], lse)):
        np.testing.assert_allclose(
            x.astype(float), y.astype(float), rtol=limit, atol=limit * (1 + abs(case.score_mean))
        )


def movable_of(case: Scored) -> tuple[str, ...]:
    """All that may have a tangent in a problem whose scores or masks are functions."""
    problem = case.problem
    arrays = (name for name in ("q", "k", "v", "bias", "alibi_slopes") if name in case.arrays)
    return (*arrays, *problem.given(NUMBERS), *(name[1:] for name in problem.score_arg_gradients))


def check_functions(case: Scored, moved: Collection[str], arch: str = "8.0", seed: int = 0, **options: Any) -> None:
    """Hold both passes of a problem whose scores or masks are functions to the oracle rule."""
    problem, point = replace(case.problem, moved=None), case.arrays
    random = np.random.default_rng(seed)

    def tangent_of(name: str) -> Any:
        of = point.get(name, np.zeros((), problem.softmax_dtype))
        return np.asarray(random.standard_normal(of.shape), of.dtype)

    tangents, tdout = {f"t{name}": tangent_of(name) for name in moved}, tangent_of("dout")
    need = tuple(f"t{name}" for name in problem.gradients if name[1:] in movable_of(case))
    given: dict[str, Any] = {name: x for name, x in point.items() if name not in ("dout", "dlse")} | tangents
    options = {"arch": arch, **case.random, **options}
    names = ("out", "lse", "tout", "tlse")
    found = dict(zip(names, passes.jvp(problem, given, **options), strict=True))
    given |= {"dlse": point.get("dlse"), "tdout": tdout, **found, "dout": point["dout"]}
    found |= zip(need, passes.backward_jvp(problem, given, need=need, **options), strict=True)
    judge_functions(case, tangents | {"tdout": tdout}, found)


def check_partials(
    case: Case, moved: Moved, arch: str | DeviceSpec, deterministic: bool = False, **options: Any
) -> None:
    """Results in the dtype of sums, which are merged with others or added to them, are those that are rounded."""
    arrays, tangents, problem = case.arrays(), moved.arrays(case), replace(case.problem, deterministic=deterministic)
    given = {name: x for name, x in (arrays | tangents).items() if name not in ("dout", "dlse", "tdout", "tdlse")}
    options = {"arch": arch, **case.random, **options}
    names = ("out", "lse", "tout", "tlse")
    narrow = dict(zip(names, passes.jvp(problem, given, **options), strict=True))
    wide = dict(zip(names, passes.jvp(replace(problem, wide=("out",)), given, **options), strict=True))
    every = arrays | tangents | narrow
    narrow |= zip(
        DEFAULT_NEED_TANGENTS, passes.backward_jvp(problem, every, need=DEFAULT_NEED_TANGENTS, **options), strict=True
    )
    of_sums = replace(problem, wide=DEFAULT_NEED)
    wide |= zip(
        DEFAULT_NEED_TANGENTS, passes.backward_jvp(of_sums, every, need=DEFAULT_NEED_TANGENTS, **options), strict=True
    )
    for name, x in wide.items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x.astype(narrow[name].dtype), narrow[name], err_msg=name)
