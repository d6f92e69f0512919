"""Both passes of attention by the project's kernels in the emulator: the plan and the parameters are those of a GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

import emulator
import numpy as np

from cuflash.params import POINTER_WORD, parameters
from cuflash.plan import DeviceSpec, LaunchPlan, Pass, Tile, access_bytes, choose_plan
from cuflash.problem import Operand, Problem, layout_of, rows_of
from cuflash.testing import numpy_dtype


def plan_for(problem: Problem, pass_: Pass, arrays: Mapping[str, Any], arch: str, tiles: Sequence[Tile] | None) -> LaunchPlan:
    """The plan for arrays as they lie: the same steps as `cuflash.launch` takes for CuPy arrays."""
    inputs = ("q", "k", "v") if pass_ == "forward" else ("q", "k", "v", "out", "dout")
    results = ("out",) if pass_ == "forward" else ("dq", "dk", "dv")
    return choose_plan(
        problem,
        DeviceSpec.for_arch(arch),
        pass_,
        load_bytes=_access_bytes(problem, [arrays[name] for name in inputs]),
        store_bytes=_access_bytes(problem, [arrays[name] for name in results]),
        tiles=None if tiles is None else tuple(tiles),
    )


def _access_bytes(problem: Problem, arrays: Sequence[np.ndarray]) -> int:
    pointers = np.bitwise_or.reduce([array.ctypes.data for array in arrays])
    return access_bytes(tuple(layout_of(array, problem.layout) for array in arrays), int(pointers))


def run(plan: LaunchPlan, arrays: Mapping[str, Any], schedule: emulator.Schedule, **options: Any) -> None:
    """Run the kernels of `plan` on `arrays` by name; results are written in place."""
    problem = plan.problem
    operands: dict[str, Operand] = {
        name: rows_of(array) if name == "lse" else layout_of(array, problem.layout)
        for name, array in arrays.items()
        if name in ("out", "lse", "dout", "dq", "dk", "dv")
    }
    params = parameters(plan, operands)
    words = params.view(np.uint64)
    scratch = {
        "row_stats": emulator.guarded_array((problem.batch * problem.num_heads * plan.stats_rows * 2,), np.float32),
        "dq_accumulator": emulator.guarded_array((plan.accumulator_elements,), np.float32),
    }
    for name, array in {**arrays, **scratch}.items():
        words[POINTER_WORD[name]] = array.ctypes.data
    for kernel in plan.kernels:
        if kernel.grid == 0:
            continue
        module = emulator.build(kernel.source, dict(kernel.defines), sanitizer=options.get("sanitizer"))
        module.launch(
            kernel.name,
            params,
            grid=kernel.grid,
            threads=kernel.threads,
            shared_bytes=kernel.shared_bytes,
            schedule=schedule,
        )


def guarded(array: Any) -> Any:
    """A copy of `array`, strides kept, that ends at an inaccessible page."""
    low = high = 0
    for size, stride in zip(array.shape, array.strides, strict=True):
        extent = (size - 1) * stride if size else 0
        low, high = low + min(extent, 0), high + max(extent, 0)
    storage = emulator.guarded_array((high - low + array.itemsize,), np.uint8)
    copy = np.ndarray(array.shape, array.dtype, storage, -low, array.strides)
    copy[...] = array
    return copy


def forward(
    problem: Problem,
    arrays: Mapping[str, Any],
    *,
    arch: str = "9.0",
    tiles: Sequence[Tile] | None = None,
    schedule: emulator.Schedule = emulator.SCHEDULES[0],
    **options: Any,
) -> tuple[Any, Any]:
    """(out, lse) of the forward kernels."""
    every = {name: guarded(array) for name, array in arrays.items() if array is not None and name != "dout"}
    every["out"] = emulator.guarded_array(problem.out_shape, numpy_dtype(problem.dtype))
    every["lse"] = emulator.guarded_array(problem.lse_shape, np.float32)
    run(plan_for(problem, "forward", every, arch, tiles), every, schedule, **options)
    return every["out"], every["lse"]


def backward(
    problem: Problem,
    arrays: Mapping[str, Any],
    out: Any,
    lse: Any,
    *,
    arch: str = "9.0",
    tiles: Sequence[Tile] | None = None,
    schedule: emulator.Schedule = emulator.SCHEDULES[0],
    **options: Any,
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) of the backward kernels."""
    every = {name: guarded(array) for name, array in {**arrays, "out": out, "lse": lse}.items() if array is not None}
    for name in ("q", "k", "v"):
        every[f"d{name}"] = emulator.guarded_array(arrays[name].shape, numpy_dtype(problem.dtype))
    run(plan_for(problem, "backward", every, arch, tiles), every, schedule, **options)
    return every["dq"], every["dk"], every["dv"]
