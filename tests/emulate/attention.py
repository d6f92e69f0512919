"""Both passes of attention by the project's kernels in the emulator: the plan and the parameters are those of a GPU."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulator
import numpy as np

from cuflash.binding import Binding, Pass, bind
from cuflash.params import POINTER_WORD, parameters
from cuflash.planning import DeviceSpec, LaunchPlan, choose_plan
from cuflash.planning.draft import MAPS_OFFSET
from cuflash.planning.tiles import Tile
from cuflash.problem import DEFAULT_NEED, GRADIENTS, ITEMSIZE, Problem, make_problem
from cuflash.tensor_map import TensorMapSpec
from cuflash.testing import Case, measure, numpy_dtype, optional, yardsticks

Place = Callable[[np.ndarray], np.ndarray]


def plan_for(
    problem: Problem,
    pass_: Pass,
    arrays: Mapping[str, np.ndarray],
    arch: str | DeviceSpec,
    tiles: Sequence[Tile] | None = None,
    need: Sequence[str] = DEFAULT_NEED,
) -> LaunchPlan:
    """The plan for arrays as they lie."""
    return _plan_of(_bind(pass_, problem, arrays, need), arch, tiles)


def _bind(pass_: Pass, problem: Problem, arrays: Mapping[str, Any], need: Sequence[str]) -> Binding:
    return bind(pass_, problem.options, arrays, need=need, address_of=lambda array: array.ctypes.data)


def _plan_of(binding: Binding, arch: str | DeviceSpec, tiles: Sequence[Tile] | None) -> LaunchPlan:
    device = DeviceSpec.for_arch(arch) if isinstance(arch, str) else arch
    given = None if tiles is None else tuple(tiles)
    return choose_plan(binding.problem, device, binding.pass_, **binding.layout, tiles=given)


def run(
    plan: LaunchPlan,
    binding: Binding,
    arrays: Mapping[str, np.ndarray],
    schedule: emulator.Schedule,
    *,
    fill: int = 0xFF,
    sanitizer: str | None = None,
    kernels: Path = emulator.KERNELS,
    seed: int = 0,
    offset: int = 0,
    mapped_keys: int = 0,
) -> list[emulator.Statistics]:
    """Run the kernels of `plan` on `arrays` by name; results are written in place.

    Scratch arrays are as aligned as they are in their one allocation on a device, with guards between them.

    `fill` is the byte that scratch memory is full of, `kernels` the folder that the sources are taken from, `seed` and
    `offset` say what dropout drops. Tensor maps of k and v are of `mapped_keys` rows, or of those that there are.
    """
    params = parameters(plan, binding.operands, seed, offset)
    words = params.view(np.uint64)
    scratch = emulator.Scratch(plan.scratch_layout, fill)
    pointers = {name: array.ctypes.data for name, array in arrays.items()}
    pointers |= zip(scratch.layout.names, scratch.addresses, strict=True)
    for name, pointer in pointers.items():
        words[POINTER_WORD[name]] = pointer
    argument = params
    if plan.tensor_maps:
        maps = [
            _tensor_map(spec, pointers[spec.name], mapped_keys if spec.name in ("k", "v") else 0)
            for spec in plan.tensor_maps
        ]
        argument = np.frombuffer(params.tobytes().ljust(MAPS_OFFSET, b"\0") + b"".join(maps), np.uint8)
    statistics = []
    for kernel in plan.kernels:
        if kernel.grid == 0:
            continue
        module = emulator.build(kernels / kernel.source, dict(kernel.defines), sanitizer=sanitizer, include=(kernels,))
        statistics.append(
            module.launch(
                kernel.name,
                argument if kernel.target == "sm_90a" else params,
                grid=kernel.grid,
                threads=kernel.threads,
                shared_bytes=kernel.shared_bytes,
                schedule=schedule,
                trap_unwritten=True,
                in_turn=bool(dict(kernel.defines).get("CUFLASH_DQ_IN_ORDER")),
                counted=bool(dict(kernel.defines).get("CUFLASH_CLEARS_AHEAD")),
            )
        )
        scratch.check(kernel.name)
    return statistics


def _tensor_map(spec: TensorMapSpec, pointer: int, rows: int) -> bytes:
    """What `cuflash.tensor_map.encoder` makes for a device; 0 rows are those of the spec."""
    columns, of_spec, heads, batch = spec.shape
    shape, box = (columns, rows or of_spec, heads, batch), (spec.columns, spec.rows, spec.heads, 1)
    return emulator.tensor_map(pointer, ITEMSIZE[spec.dtype], shape, spec.strides_bytes, box).tobytes()


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy of `array`, strides and alignment kept, that ends at an inaccessible page; NaN between its elements."""
    low = high = 0
    for size, stride in zip(array.shape, array.strides, strict=True):
        extent = (size - 1) * stride if size else 0
        low, high = low + min(extent, 0), high + max(extent, 0)
    lead = (array.ctypes.data + low) % 16
    storage = emulator.guarded_array((lead + high - low + array.itemsize,), np.uint8)
    copy = np.ndarray(array.shape, array.dtype, storage, lead - low, array.strides)
    copy[...] = array
    return copy


FAR = 2**28  # elements: 16 rows this far apart, and offsets cut to 32 bits land somewhere else


def far_apart(array: np.ndarray) -> np.ndarray:
    """A copy whose rows, heads and batch entries lie so far apart that offsets take more than 32 bits.

    The last axis of 4-D arrays of up to 16 columns, which are operands, stays contiguous.
    """
    neighbours = 1 if array.ndim == 4 and array.shape[-1] <= 16 else 0
    far = array.ndim - neighbours
    strides = [array.itemsize] * array.ndim
    for axis in reversed(range(far)):
        inner = strides[axis + 1] * array.shape[axis + 1] if axis + 1 < far else 0
        strides[axis] = max(FAR * array.itemsize, inner)
    extent = sum((n - 1) * stride for n, stride in zip(array.shape, strides, strict=True)) + array.itemsize
    no_reserve = 0x4000  # MAP_NORESERVE: only the pages that are touched take memory
    storage = mmap.mmap(-1, max(extent, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    copy = np.ndarray(array.shape, array.dtype, storage, 0, strides)
    copy[...] = array
    return copy


def _call(
    pass_: Pass,
    problem: Problem,
    inputs: Mapping[str, Any],
    results: Mapping[str, tuple[tuple[int, ...], Any]],
    *,
    arch: str | DeviceSpec = "9.0",
    tiles: Sequence[Tile] | None = None,
    schedule: emulator.Schedule = emulator.SCHEDULES[0],
    place: Place = guarded,
    fill: int = 0xFF,
    statistics: list[emulator.Statistics] | None = None,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """Results of one pass, by shape and dtype. What a call copies first is copied here, too."""
    need = tuple(results) if pass_ == "backward" else ()
    given = {name: array for name, array in inputs.items() if array is not None}
    copied = _bind(pass_, problem, given, need).copied
    every = {name: place(np.ascontiguousarray(x) if name in copied else x) for name, x in given.items()}
    for name, (shape, dtype) in results.items():
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        every[name] = place(np.full(size, fill, np.uint8).view(dtype).reshape(shape))
    binding = _bind(pass_, problem, every, need)
    launches = run(_plan_of(binding, arch, tiles), binding, every, schedule, fill=fill, **options)
    if statistics is not None:
        statistics += launches
    return tuple(every[name] for name in results)


def forward(problem: Problem, arrays: Mapping[str, Any], **options: Any) -> tuple[Any, Any]:
    """(out, lse) of the forward kernels.

    Parameters
    ----------
    arrays : Mapping
        q, k, v, and bias, mask, kv_lengths, alibi_slopes, sinks, cu_seqlens_q and _k or None; others are ignored.
    arch : str or DeviceSpec
        What is planned for; default "9.0".
    tiles : sequence of Tile, optional
        Instead of those of the table.
    schedule : emulator.Schedule
    place : callable
        Copies each array, results included, to where the kernels find it.
    fill : int
        The byte that results and scratch memory are full of before the launch; 0xFF is NaN.
    statistics : list, optional
        Gets those of each launch.
    sanitizer, kernels, seed, offset, mapped_keys
        As `run`.
    """
    inputs = {name: array for name, array in arrays.items() if name not in ("dout", "dlse", "out", "lse")}
    results = {
        "out": (problem.out_shape, numpy_dtype(problem.dtype)),
        "lse": (problem.lse_shape, problem.softmax_dtype),
    }
    out, lse = _call("forward", problem, inputs, results, **options)
    return out, lse


def backward(
    problem: Problem,
    arrays: Mapping[str, Any],
    out: Any,
    lse: Any,
    *,
    need: Sequence[str] | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """The gradients `need` by the backward kernels: (dq, dk, dv) without it, and dsinks if there are sinks.

    `arrays` holds dout too, and maybe dlse. Other parameters are those of `forward`.
    """
    if need is None:
        need = DEFAULT_NEED if problem.sinks is None else (*DEFAULT_NEED, "dsinks")
    every: dict[str, Any] = {
        name: (arrays[name[1:]].shape, arrays[name[1:]].dtype) for name in need if name[1:] in arrays
    }
    every |= {name: ((), problem.softmax_dtype) for name in ("dscale", "dsoftcap")}
    results = {name: every[name] for name in GRADIENTS if name in need}
    return _call("backward", problem, {**arrays, "out": out, "lse": lse}, results, **options)


def packed_sizes(of_queries: Sequence[int], of_keys: Sequence[int], rest: int = 0) -> dict[str, Any]:
    """Of a case: packed sequences of such lengths, and so many rows behind the last one."""
    return {
        f"{name}_{x}": value
        for x, lengths in (("q", of_queries), ("k", of_keys))
        for name, value in (("seqlen", sum(lengths) + rest), ("cu_seqlens", tuple(np.cumsum([0, *lengths]).tolist())))
    }


def gradients_of(
    case: Case,
    tile: Tile,
    num_sms: int,
    schedule: emulator.Schedule,
    deterministic: bool = False,
    need: Sequence[str] = DEFAULT_NEED,
) -> tuple[LaunchPlan, dict[str, Any]]:
    """Both passes of a case on compute capability 9.0: the plan of the backward pass, and its results by name."""
    arrays = case.arrays()
    options = replace(case.options, deterministic=deterministic)
    problem = make_problem(options, *(arrays[name] for name in "qkv"), **optional(arrays))
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms)
    out, lse = forward(problem, arrays, arch=device)
    gradients = backward(problem, arrays, out, lse, arch=device, schedule=schedule, tiles=(tile,), need=need)
    plan = choose_plan(problem, device, "backward", tiles=(tile,), need=need)
    return plan, dict(zip(need, gradients, strict=True))


def assert_two_parts(problem: Problem, arrays: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Hold results of float32 in two parts against the oracle: 16 bits of the 24 that the tolerance is for."""
    expected = yardsticks(problem, arrays)
    for name, x in results.items():
        yardstick = replace(expected[name], tolerance=2.0 ** (24 - 16) * expected[name].tolerance)
        measurement = measure(name, x, yardstick)
        assert not measurement.failure, str(measurement)
