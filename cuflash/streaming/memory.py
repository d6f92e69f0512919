"""How keys get to the device in each pass, and how much memory this takes."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cuflash.cpu import backend as cpu_backend
from cuflash.score_mod import ORIGIN
from cuflash.shards.cuda import Cuda
from cuflash.spec.binding import Contiguous, bind
from cuflash.spec.options import Options
from cuflash.spec.outputs import OUTPUTS
from cuflash.spec.passes import BACKWARD, FORWARD, REDUCTIONS, Pass
from cuflash.spec.problem import Problem
from cuflash.spec.streamed import OF_KEYS
from cuflash.streaming.chunks import Chunk, StreamPlan, Way
from cuflash.streaming.copy_pipeline import is_direct
from cuflash.streaming.execution import ChunkStep, StreamedPass, sums_softmax

if TYPE_CHECKING:
    from cuflash.plan import LaunchPlan

Array = Any
ROUNDING = 512  # bytes to which CuPy's pool rounds
MAPPED_ROWS = 16  # up to so many queries of a head, every kernel reads a key of its head once


def may_be_mapped(run: StreamedPass, device: Cuda) -> bool:
    """Whether a forward pass of one chunk reads the keys in host memory, which it does if it reads each key once."""
    arrays = list(run.keys.values())
    if not all(x.size and x.strides[3] == x.itemsize and min(x.strides) > 0 and device.is_pinned(x) for x in arrays):
        return False
    problem = run.slices.problem
    if problem.group_size == 1 and problem.seqlen_q <= MAPPED_ROWS:
        return True
    chunk = run.chunks[0]
    options, given = (
        run.slices.options_of(*chunk),
        run.arrays_of(ChunkStep(0, chunk, dict(run.keys), {}), of_softmax=True),
    )
    given |= run.slices.score_args(options, *chunk, given["q"])
    signature = tuple((name, tuple(x.shape), tuple(x.strides), x.dtype) for name, x in given.items())
    return _reads_keys_once(options, signature, run.arrays["q"].data.device_id)


@functools.lru_cache(maxsize=256)
def _reads_keys_once(options: Options, signature: tuple[Any, ...], device_id: int) -> bool:
    """Whether the kernels of a forward pass read each key once; cached, so that decoding does not wait for a plan."""
    gpu_backend = importlib.import_module("cuflash.gpu.backend")
    binding = cpu_backend.bind_signature(FORWARD, options, signature, OUTPUTS)
    plan = gpu_backend.tuned_plan(binding.problem, gpu_backend.device_spec(device_id), FORWARD, **binding.layout)
    families = importlib.import_module("cuflash.plan.architectures").FAMILIES
    return bool(families[type(plan.tiles[0])].reads_keys_once)


def plan_of(
    length: int, runs: Mapping[Pass, StreamedPass], need: Collection[str], given: Mapping[str, Array], *count: int
) -> StreamPlan:
    """The plan of the passes that run; `count` is that of `top_keys`."""
    ways: dict[str, Way] = {}
    memory: dict[str, dict[str, int]] = {}
    pinned: dict[str, int] = {}
    of_reduction = functools.partial(_reduction_memory, count=count)
    memory_of = {FORWARD: _forward_memory, BACKWARD: _backward_memory} | dict.fromkeys(REDUCTIONS, of_reduction)
    for pass_, run in runs.items():
        name = pass_.name
        ways[name] = _way(run)
        if run.device is not None:
            wanted = [result for result in pass_.results_of(run.slices.options) if result in (*OUTPUTS, *need)]
            takes = memory_of[pass_](run, wanted, given)
            memory[name] = {what: size for what, size in takes.items() if size}
            pinned[name] = _pinned_bytes(run, wanted)
    *_, run = runs.values()
    return StreamPlan(
        problem=run.slices.problem, chunk=length, chunks=run.chunks, ways=ways, memory=memory, pinned_bytes=pinned
    )


def _way(run: StreamedPass) -> Way:
    if run.device is None:
        return "views"
    if run.is_mapped:
        return "mapped"
    return "pinned" if all(is_direct(run.device, x) for x in run.keys.values()) else "staged"


def _pinned_bytes(run: StreamedPass, need: Collection[str]) -> int:
    """Bytes of staging buffers, and of results that are pinned because their keys or values are."""
    if run.is_mapped or run.device is None:
        return 0
    total = 0
    for name, array in run.keys.items():
        count = 1 + (f"d{name}" in need)
        total += 0 if is_direct(run.device, array) else 2 * count * _chunk_bytes(run, array)
        total += array.nbytes if f"d{name}" in need and run.device.is_pinned(array) else 0
    return total


def _chunk_bytes(run: StreamedPass, array: Array) -> int:
    longest = max((stop - start for _, (start, stop) in run.chunks), default=0)
    return _rounded(math.prod(array.shape[:2]) * longest * array.shape[3] * array.itemsize)


def _forward_memory(run: StreamedPass, need: Collection[str], given: Mapping[str, Array]) -> dict[str, int]:
    problem, size = run.slices.problem, run.slices.softmax_dtype.itemsize
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    lse, wide = _rounded(rows * size), _rounded(rows * problem.head_dim_v * size)
    out = _rounded(rows * problem.head_dim_v * run.arrays["q"].itemsize)
    is_narrow = _is_narrow(problem)
    memory = {} if run.is_mapped else {"k and v": sum(2 * _chunk_bytes(run, x) for x in run.keys.values())}
    memory["results"] = (out if "out" not in given else 0) + (lse if "lse" not in given else 0)
    if not run.is_whole:
        memory["sums"] = is_narrow * wide + 2 * lse
        memory["a partial result"] = wide + 3 * lse
    return memory | {"scratch": _scratch(FORWARD, run, need)}


def _backward_memory(run: StreamedPass, need: Collection[str], given: Mapping[str, Array]) -> dict[str, int]:
    score_args = {name: run.arrays[name[1:]] for name in need if name in run.slices.options.score_gradients}
    own = [name for name in need if name not in OF_KEYS and name not in score_args and name != "dq"]
    results = {name: _sum_bytes(run, name) for name in own}
    results |= {name: _rounded(x.nbytes) for name, x in score_args.items()}
    results |= {"dq": _rounded(run.arrays["q"].nbytes)} if "dq" in need else {}
    memory = {
        "k and v": sum(2 * _chunk_bytes(run, x) for x in run.keys.values()),
        "dk and dv": sum(2 * _chunk_bytes(run, x) for name, x in run.keys.items() if f"d{name}" in need),
        "results": sum(size for name, size in results.items() if name not in given),
    }
    if not run.is_whole:
        memory |= _memory_of_sums(run, own, score_args, has_dq="dq" in need)
    return memory | {"scratch": _scratch(BACKWARD, run, need)}


def _memory_of_sums(
    run: StreamedPass, own: Collection[str], score_args: Mapping[str, Array], *, has_dq: bool
) -> dict[str, int]:
    """What a backward pass of several chunks takes to add up gradients: these, of score_mod args, and dq."""
    dtype = run.slices.softmax_dtype
    of_dq = has_dq * _rounded(run.arrays["q"].size * dtype.itemsize)
    others = sum(_sum_bytes(run, name) for name in own)
    narrow = sum(_sum_bytes(run, name) for name, x in score_args.items() if x.dtype != dtype)
    widened = [x for name, x in run.slices.wide_score_args.items() if x is not run.arrays[name]]
    return {
        "sums": _is_narrow(run.slices.problem) * of_dq + others + narrow,
        "a partial result": of_dq + 2 * others + sum(_sum_bytes(run, name) for name in score_args),
        "what functions read": sum(_rounded(x.nbytes) for x in widened),
    }


def _reduction_memory(
    run: StreamedPass, need: Collection[str], given: Mapping[str, Array], count: tuple[int, ...]
) -> dict[str, int]:
    problem, size = run.slices.problem, run.slices.softmax_dtype.itemsize
    memory = {"k": sum(2 * _chunk_bytes(run, x) for x in run.keys.values())}
    if count:
        found = _rounded(math.prod((*problem.lse_shape, *count)) * (size + 4))
        memory |= {"results": found, "results of a chunk": found}
    else:
        keys = max((stop - start for _, (start, stop) in run.chunks), default=0)
        memory["columns"] = 3 * _rounded(problem.array_batch * problem.num_heads * keys * size)
    return memory | {"scratch": _scratch(run.pass_, run, need)}


def _sum_bytes(run: StreamedPass, name: str) -> int:
    """Bytes of the gradient of an optional input or a number, in the dtype of sums."""
    array = run.arrays.get(name[1:])
    return _rounded((1 if array is None else array.size) * run.slices.softmax_dtype.itemsize)


def _scratch(pass_: Pass, run: StreamedPass, need: Collection[str]) -> int:
    """The most memory that one call takes while it runs, including copies of arrays."""
    if run.is_mapped:
        return _takes(pass_, run, run.chunks[0], need, run.keys)
    shapes = {}
    for chunk in run.chunks:
        shapes[tuple(stop - start for start, stop in chunk)] = chunk
    return max((_takes(pass_, run, chunk, need, _chunk_like(run, chunk)) for chunk in shapes.values()), default=0)


def _chunk_like(run: StreamedPass, chunk: Chunk) -> dict[str, Contiguous]:
    rows = chunk.keys[1] - chunk.keys[0]
    return {name: Contiguous((*x.shape[:2], rows, x.shape[3]), x.dtype) for name, x in run.keys.items()}


def _takes(pass_: Pass, run: StreamedPass, chunk: Chunk, need: Collection[str], keys: Mapping[str, Any]) -> int:
    plan, copied = _launch_plan(pass_, run, chunk, need, keys)
    lengths = run.arrays.get("kv_lengths")
    small = 0 if lengths is None else 2 * _rounded(lengths.nbytes)
    small += ROUNDING * (ORIGIN in run.slices.options_of(*chunk).score_args)
    return _rounded(plan.extra_bytes) + copied + small


def call_on(
    run: StreamedPass, chunk: Chunk, need: Collection[str], keys: Mapping[str, Any]
) -> tuple[Options, dict[str, Any]]:
    """Options and arrays of the call on a chunk with these keys that gives the results `need` of a pass."""
    of_softmax = sums_softmax(need) or (run.is_whole and "out" in need)
    arrays = run.arrays_of(ChunkStep(0, chunk, dict(keys), {}), of_softmax=of_softmax)
    options = run.slices.options_of(*chunk)
    arrays |= run.slices.score_args(options, *chunk, arrays["q"])
    if not run.is_whole:
        arrays |= run.slices.summed_score_args(need)
    if not run.is_whole and _is_narrow(run.slices.problem):
        options = replace(options, wide=tuple(name for name in ("out", "dq") if name in need))
    return options, arrays


def _launch_plan(
    pass_: Pass, run: StreamedPass, chunk: Chunk, need: Collection[str], keys: Mapping[str, Any]
) -> tuple[LaunchPlan, int]:
    """The plan of a call on a chunk, and the bytes of arrays that it copies."""
    options, arrays = call_on(run, chunk, need, keys)
    binding = bind(pass_, options, arrays, need=need)
    gpu_backend = importlib.import_module("cuflash.gpu.backend")
    device = gpu_backend.device_spec(run.arrays["q"].data.device_id)
    plan: LaunchPlan = gpu_backend.tuned_plan(binding.problem, device, pass_, **binding.layout)
    return plan, sum(_rounded(arrays[name].nbytes) for name in binding.copied)


def _is_narrow(problem: Problem) -> bool:
    """Whether results have another dtype than that of their sums, so that they are rounded."""
    return problem.dtype != problem.softmax_dtype


def _rounded(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING
