"""jvp and backward_jvp of a case by the kernels in the emulator, and what they are held to."""

from typing import Any

import numpy as np

from cuflash.emulator import passes
from cuflash.testing import Case
from cuflash.testing.tangents import Moved, assert_tangents

NEED = ("tdq", "tdk", "tdv")


def check(case: Case, moved: Moved, arch: str, **options: Any) -> None:
    """Hold the results of both passes to the oracle rule, and out and lse to those of the forward pass."""
    arrays, tangents, problem = case.arrays(), moved.arrays(case), case.problem
    of_inputs = {name: x for name, x in tangents.items() if name not in ("tdout", "tdlse")}
    given = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
    options = {"arch": arch, **case.random, **options}
    names = ("out", "lse", "tout", "tlse")
    of_forward = dict(zip(names, passes.jvp(problem, given | of_inputs, **options), strict=True))
    need = (*NEED, "tdsinks") if case.sinks else NEED
    found = passes.backward_jvp(problem, arrays | tangents | of_forward, need=need, **options)
    results = {name: of_forward[name] for name in ("tout", "tlse")} | dict(zip(need, found, strict=True))
    assert_tangents(case, moved, results)
    out, lse = passes.forward(problem, given, arch=arch, **case.random)
    limit = {"float64": 1e-12, "float32": 1e-5}.get(case.dtype, 2e-2)
    for x, y in ((of_forward["out"], out), (of_forward["lse"], lse)):
        np.testing.assert_allclose(
            x.astype(float), y.astype(float), rtol=limit, atol=limit * (1 + abs(case.score_mean))
        )
