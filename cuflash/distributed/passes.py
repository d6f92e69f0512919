"""The passes over ranks, as methods of `ContextParallel` and gradients of column sums call them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cuflash.arrays.array_info import numpy_dtype, view_4d, view_rows
from cuflash.distributed.calls import Call, Calls, of_pairs
from cuflash.distributed.execution import Execution
from cuflash.spec.inputs import INPUTS
from cuflash.spec.outputs import DEFAULT_NEED, GRADIENTS, REQUIRED_BY_BACKWARD
from cuflash.spec.results import named_tuple_of, named_tuple_of_results, needed

_BACKWARD_INPUTS = (*INPUTS, *REQUIRED_BY_BACKWARD)
Random = tuple[int | None, int | None]


def forward(
    calls: Calls,
    method: str,
    arrays: dict[str, Any],
    optional_inputs: dict[str, Any],
    random: Random,
    names: tuple[str, ...],
) -> Any:
    """The results of this name of `forward` or `decode`."""

    def compute(call: Call, run: Execution) -> Any:
        problem, dtype = run.problem, numpy_dtype(run.problem.softmax_dtype)
        results = {"out": run.xp.empty(problem.out_shape, numpy_dtype(problem.dtype))}
        results |= {name: run.xp.empty(problem.lse_shape, dtype) for name in names[1:]}
        views = {"out": view_4d(results["out"], calls.options.layout)}
        views |= {name: view_rows(results[name]) for name in names[1:]}
        if method == "decode":
            run.decode(views)
        else:
            run.forward(views)
        return named_tuple_of_results(names)(*call.exported(list(results.values())))

    return calls.carry_out(method, arrays, optional_inputs, INPUTS, random, compute, lambda given: names)


def backward(
    calls: Calls, arrays: dict[str, Any], optional_inputs: dict[str, Any], random: Random, need: Collection[str]
) -> Any:
    """The gradients that are wanted."""
    of_functions = calls.options.score_gradients

    def names(given: Mapping[str, Any]) -> tuple[str, ...]:
        absent = dict.fromkeys((*GRADIENTS, *of_functions))
        return needed(need, {**given, **calls.options.numbers}, absent, of_functions)

    def compute(call: Call, run: Execution) -> Any:
        results = {name: call.empty(name, run.problem) for name in call.need}
        views = {name: view_4d(x, calls.options.layout) if name in DEFAULT_NEED else x for name, x in results.items()}
        if "dbias" in views:
            views["dbias"] = of_pairs(views["dbias"])
        run.backward(call.need, views)
        return named_tuple_of(call.own.wanted)(*call.exported(list(results.values())))

    return calls.carry_out("backward", arrays, optional_inputs, _BACKWARD_INPUTS, random, compute, names)
