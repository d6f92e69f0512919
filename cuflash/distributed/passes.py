"""The passes over ranks, as methods of `ContextParallel` and gradients of column sums call them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cuflash.arrays.array_info import numpy_dtype, view_4d, view_rows
from cuflash.distributed.calls import RankCall, RankCalls, of_pairs
from cuflash.distributed.execution import Execution
from cuflash.spec.inputs import INPUTS
from cuflash.spec.outputs import BY_NAME, GRADIENTS
from cuflash.spec.passes import BACKWARD, FORWARD, Pass
from cuflash.spec.results import ForwardResult, Gradients, GradientTangents, JvpResult, named_tuple, needed

Random = tuple[int | None, int | None]


def forward(
    calls: RankCalls,
    method: str,
    arrays: dict[str, Any],
    optional_inputs: dict[str, Any],
    random: Random,
    names: tuple[str, ...],
    pass_: Pass = FORWARD,
) -> Any:
    """The results of these names of `forward`, `decode` or `jvp`."""

    def compute(call: RankCall, run: Execution) -> Any:
        problem, results, views = run.problem, {}, {}
        for name in names:
            if BY_NAME[name].is_of_rows:
                results[name] = x = run.xp.empty(problem.lse_shape, numpy_dtype(problem.softmax_dtype))
                views[name] = view_rows(x)
            else:
                results[name] = x = run.xp.empty(problem.out_shape, numpy_dtype(problem.dtype))
                views[name] = view_4d(x, calls.options.layout)
        if method == "decode":
            run.decode(views)
        else:
            run.forward(views, pass_)
        result_type = JvpResult if pass_.has_tangents else ForwardResult
        return named_tuple(result_type, names)(*call.exported(list(results.values())))

    return calls.carry_out(method, arrays, optional_inputs, INPUTS, random, compute, lambda arrays: names)


def backward(
    calls: RankCalls,
    arrays: dict[str, Any],
    optional_inputs: dict[str, Any],
    random: Random,
    need: Collection[str],
    pass_: Pass = BACKWARD,
) -> Any:
    """The gradients, or tangents of gradients, that are wanted."""
    score_gradients, prefix = calls.options.score_gradients, "t" if pass_.has_tangents else ""

    def need_of(arrays: Mapping[str, Any]) -> tuple[str, ...]:
        absent = dict.fromkeys(f"{prefix}{name}" for name in (*GRADIENTS, *score_gradients))
        return needed(need, {**arrays, **calls.options.numbers}, absent, score_gradients, prefix)

    def compute(call: RankCall, run: Execution) -> Any:
        results = {name: call.empty(name, run.problem) for name in call.need}
        views = {name: view_4d(x, calls.options.layout) if name in pass_.default else x for name, x in results.items()}
        if (bias := f"{prefix}dbias") in views:
            views[bias] = of_pairs(views[bias])
        run.backward(call.need, views, pass_)
        result_type = GradientTangents if pass_.has_tangents else Gradients
        return named_tuple(result_type, call.local.wanted)(*call.exported(list(results.values())))

    required = (*INPUTS, *pass_.required)
    return calls.carry_out(pass_.name, arrays, optional_inputs, required, random, compute, need_of)
