"""The passes of attention by the project's kernels in the emulator: the plan and the parameters are those of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cuflash.arrays.array_info import ITEMSIZE, numpy_dtype
from cuflash.emulator.building import build
from cuflash.emulator.launching import SCHEDULES, Schedule, Statistics
from cuflash.emulator.memory import Scratch, guarded, tensor_map
from cuflash.gpu.params import parameters, pointer_words
from cuflash.plan import DeviceSpec, LaunchPlan, choose_plan
from cuflash.plan.argument import maps_offset
from cuflash.plan.tensor_map import TensorMapSpec
from cuflash.plan.tiles import Tile
from cuflash.spec.binding import Binding, bind, expected, is_in_k
from cuflash.spec.outputs import DEFAULT_NEED, OUTPUTS, ROW_REDUCTIONS, SOFTMAX_GRADIENTS, TAKEN_BY_BACKWARD
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Pass
from cuflash.spec.problem import Problem

Allocate = Callable[[np.ndarray], np.ndarray]


def plan_for(
    problem: Problem,
    pass_: Pass,
    arrays: Mapping[str, np.ndarray],
    arch: str | DeviceSpec,
    tiles: Sequence[Tile] | None = None,
    need: Sequence[str] | None = None,
) -> LaunchPlan:
    """The plan for arrays as they lie."""
    return _plan_of(_bind(pass_, problem, arrays, need), arch, tiles)


def _bind(pass_: Pass, problem: Problem, arrays: Mapping[str, Any], need: Sequence[str] | None) -> Binding:
    return bind(pass_, problem.options, arrays, need=need, address_of=lambda array: array.ctypes.data)


def _plan_of(binding: Binding, arch: str | DeviceSpec, tiles: Sequence[Tile] | None) -> LaunchPlan:
    device = DeviceSpec.for_arch(arch) if isinstance(arch, str) else arch
    given = None if tiles is None else tuple(tiles)
    return choose_plan(binding.problem, device, binding.pass_, **binding.layout, tiles=given)


def run(
    plan: LaunchPlan,
    binding: Binding,
    arrays: Mapping[str, np.ndarray],
    schedule: Schedule,
    *,
    fill: int = 0xFF,
    sanitizer: str | None = None,
    kernels: Path | None = None,
    seed: int = 0,
    offset: int = 0,
    call: int = 1,
    mapped_keys: int = 0,
    scratch: Scratch | None = None,
) -> list[Statistics]:
    """Run the kernels of `plan` on `arrays` by name; results are written in place.

    Scratch arrays are as aligned as they are in their one allocation on a device, with guards between them.

    `fill` is the byte that scratch memory is full of, `kernels` the folder of the sources, `seed` and
    `offset` say what dropout drops, `call` is the number of the call. Tensor maps of k and v are of `mapped_keys` rows,
    or of those that there are. `scratch` is memory that an earlier run may have used, in place of fresh memory.
    """
    params = parameters(plan, binding.operands, seed, offset, call)
    words = params.view(np.uint64)
    scratch = scratch or Scratch(plan.scratch_layout, fill)
    word_of = pointer_words(plan.problem)
    # CuPy's arrays without elements have no address.
    pointers = {name: array.ctypes.data if array.size else 0 for name, array in arrays.items()}
    pointers |= zip(scratch.layout.names, scratch.addresses, strict=True)
    for name, pointer in pointers.items():
        words[word_of[name]] = pointer
    argument = params
    if plan.tensor_maps:
        maps = [
            _tensor_map(spec, pointers[spec.name], mapped_keys if spec.name in ("k", "v") else 0)
            for spec in plan.tensor_maps
        ]
        argument = np.frombuffer(params.tobytes().ljust(maps_offset(plan.problem), b"\0") + b"".join(maps), np.uint8)
    statistics = []
    for kernel in plan.kernels:
        if kernel.grid == 0:
            continue
        defines = dict(kernel.defines)
        module = build(Path(kernel.source), defines, headers=dict(kernel.headers), sanitizer=sanitizer, kernels=kernels)
        statistics.append(
            module.launch(
                kernel.name,
                argument if kernel.target.endswith("a") else params.tobytes()[: int(defines["CUFLASH_PARAMS_BYTES"])],
                grid=kernel.grid,
                threads=kernel.threads,
                shared_bytes=kernel.shared_bytes,
                schedule=schedule,
                trap_unwritten=True,
                in_turn=bool(defines.get("CUFLASH_DQ_IN_ORDER")),
                counted=bool(defines.get("CUFLASH_CLEARS_AHEAD")),
            )
        )
        scratch.check(kernel.name)
    return statistics


def _tensor_map(spec: TensorMapSpec, pointer: int, rows: int) -> bytes:
    """What `cuflash.plan.tensor_map.encoder` makes for a device; 0 rows are those of the spec."""
    columns, of_spec, heads, batch = spec.shape
    shape, box = (columns, rows or of_spec, heads, batch), (spec.columns, spec.rows, spec.heads, 1)
    return tensor_map(pointer, ITEMSIZE[spec.dtype], shape, spec.strides_bytes, box).tobytes()


def _call(
    pass_: Pass,
    problem: Problem,
    inputs: Mapping[str, Any],
    need: Sequence[str],
    *,
    arch: str | DeviceSpec = "9.0",
    tiles: Sequence[Tile] | None = None,
    schedule: Schedule = SCHEDULES[0],
    allocate: Allocate = guarded,
    fill: int = 0xFF,
    statistics: list[Statistics] | None = None,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """Results of one pass. What a call copies first is copied here, too."""
    given = {name: array for name, array in inputs.items() if array is not None}
    copied = _bind(pass_, problem, given, need).copied
    every = {name: allocate(np.ascontiguousarray(x) if name in copied else x) for name, x in given.items()}
    k, v = given["k"], given["v"]
    if not {"k", "v"} & set(copied) and is_in_k(k, v, k.ctypes.data, v.ctypes.data):
        every["v"] = every["k"][..., : v.shape[-1]]  # as one lies in the other
    for name in need:
        shape, dtype = expected(name, problem, given)
        result = np.empty(shape, numpy_dtype(dtype))
        result.reshape(-1).view(np.uint8)[:] = fill
        every[name] = allocate(result)
    binding = _bind(pass_, problem, every, need)
    launches = run(_plan_of(binding, arch, tiles), binding, every, schedule, fill=fill, **options)
    if statistics is not None:
        statistics += launches
    return tuple(every[name] for name in need)


def forward(
    problem: Problem, arrays: Mapping[str, Any], *, want: Sequence[str] = (), **options: Any
) -> tuple[np.ndarray, ...]:
    """(out, lse) of the forward kernels, and the reductions that are wanted; `arrays` are the inputs by name.

    The pass is planned for `arch`, by its table or by `tiles`. `allocate` copies each array, results included, to where
    kernels find it; `fill` is the byte that results and scratch memory are full of before the launch, 0xFF for NaN;
    `statistics` gets those of each launch. All other options are those of `run`.
    """
    inputs = {name: array for name, array in arrays.items() if name not in TAKEN_BY_BACKWARD}
    need = (*OUTPUTS, *(name for name in ROW_REDUCTIONS if name in want))
    return _call(FORWARD, problem, inputs, need, **options)


def backward(
    problem: Problem,
    arrays: Mapping[str, Any],
    out: np.ndarray,
    lse: np.ndarray,
    *,
    need: Sequence[str] | None = None,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """The gradients `need` by the backward kernels; without it (dq, dk, dv), and that of sinks.

    `arrays` holds dout too, and maybe dlse. Other parameters are those of `forward`.
    """
    if need is None:
        need = (*DEFAULT_NEED, *(name for name in SOFTMAX_GRADIENTS if arrays.get(name[1:]) is not None))
    need = tuple(name for name in problem.gradients if name in need)
    return _call(BACKWARD, problem, {**arrays, "out": out, "lse": lse}, need, **options)


def jvp(problem: Problem, arrays: Mapping[str, Any], **options: Any) -> tuple[np.ndarray, ...]:
    """(out, lse, tout, tlse) of the kernels with tangents.

    `arrays` has q, k, v, the optional inputs that there are, and the tangents. Other parameters are those of `forward`.
    """
    inputs = {name: x for name, x in arrays.items() if name not in JVP.default}
    return _call(JVP, problem, inputs, JVP.default, **options)


def backward_jvp(
    problem: Problem, arrays: Mapping[str, Any], *, need: Sequence[str] = ("tdq", "tdk", "tdv"), **options: Any
) -> tuple[np.ndarray, ...]:
    """The tangents of gradients `need` of the kernels.

    `arrays` has also dout, out, lse, tout and tlse, and what there is of dlse, tdout and tdlse.
    """
    return _call(BACKWARD_JVP, problem, arrays, tuple(need), **options)
