"""The backend of streamed keys and values, with the functions of `cuflash.cpu.backend` and `cuflash.gpu.backend`.

Arrays by name are NumPy arrays, or CuPy arrays; k and v are `Streamed`, and dk and dv NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.array_info import numpy_dtype, view_4d, view_rows
from cuflash.arrays.memory_ranges import Band
from cuflash.cpu import backend as cpu_backend
from cuflash.shards.cuda import Cuda
from cuflash.shards.slices import Slices, steps_of
from cuflash.spec.batch_axes import BatchCalls, axes_of
from cuflash.spec.inputs import MOVABLE_BROADCAST, NAMES
from cuflash.spec.options import Options, diagonal_of, window_of
from cuflash.spec.outputs import (
    DEFAULT_NEED,
    MOVABLE_OF_KEYS,
    MOVABLE_OVER_HEAD_DIM,
    MOVABLE_OVER_ROWS,
    OUTPUTS,
    Output,
    model_of,
)
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS, Pass
from cuflash.spec.problem import Problem
from cuflash.spec.streamed import OF_KEYS, TANGENTS
from cuflash.streaming import memory
from cuflash.streaming.chunks import Chunk, StreamPlan, chunk_of, chunks_of
from cuflash.streaming.copy_pipeline import Host
from cuflash.streaming.execution import StreamedPass, sums_softmax

Array = Any
# Options that are not supported, and what to pass instead.
_REMEDIES = {
    "block_table": "contiguous keys: the pages of each batch entry gathered into them",
    "cu_seqlens_q": "a call for each sequence, or sequences padded to one length as the entries of a batch",
    "cu_seqlens_k": "a call for each sequence, or sequences padded to one length as the entries of a batch",
    "q_scale": "q in half precision or wider",
    "k_scale": "k in half precision or wider",
    "v_scale": "v in half precision or wider",
}


@dataclass(frozen=True, kw_only=True)
class StreamedCall:
    """A call whose arguments are checked against each other."""

    options: Options
    backend: dlpack.Backend  # of the arrays in the memory where the queries are
    given: Mapping[str, Array]  # these
    hosts: Mapping[str, Host]  # arrays in host memory: k, v, and their tangents, dk and dv if given
    problem: Problem
    band: Band
    length: int  # keys of a chunk
    is_explicit: bool  # whether the caller chose it
    chunks: tuple[Chunk, ...]

    def result(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """The array that a result is written to."""
        given = self.given.get(name)
        return dlpack.module_of(self.given["q"]).empty(shape, dtype) if given is None else given

    def result_of_rows(self, row: Output) -> Array:
        """The array that a result of queries is written to."""
        if row.is_of_rows:
            return self.result(row.name, self.problem.lse_shape, numpy_dtype(self.problem.softmax_dtype))
        return self.result(row.name, self.problem.out_shape, self.given["q"].dtype)

    def gradient(self, name: str, run: StreamedPass) -> Array:
        """The array that a gradient is written to; that of keys is in host memory, pinned if its input (k or v) is."""
        model = model_of(name)
        if name in OF_KEYS:
            like = self.hosts[model]
            return self.hosts[name] if name in self.hosts else self.new_host(model, like.shape, like.dtype, run.device)
        own = self.given.get(model)
        if own is None:  # the gradient of a number
            return self.result(name, (), run.slices.softmax_dtype)
        return self.result(name, own.shape, own.dtype)

    def new_host(self, like: str, shape: tuple[int, ...], dtype: Any, device: Cuda | None) -> Host:
        """A new array in host memory, pinned if one that is given is."""
        return _new_host(self.hosts[like], shape, dtype, device)

    def run(self, pass_: Pass, random: tuple[int, int] = (0, 0)) -> StreamedPass:
        """The object that computes a pass."""
        device = device_of(self.backend)
        score_args = self.options.score_args
        read = ("q", *pass_.takes, *NAMES, *score_args, *(f"t{name}" for name in score_args))
        arrays = {name: self.seen(name, x) for name, x in self.given.items() if name in read}
        slices = Slices(options=self.options, band=self.band, problem=self.problem, random=random, arrays=arrays)
        names = [name for name in MOVABLE_OF_KEYS if name in self.hosts]
        keys = {name: view_4d(self.hosts[name], self.options.layout) for name in names}
        run = StreamedPass(pass_=pass_, slices=slices, chunks=self.chunks, keys=keys, device=device)
        if device is None or self.is_explicit or not pass_.reads_keys_once:
            return run
        whole = Chunk((0, self.problem.seqlen_q), (0, self.problem.seqlen_k))
        mapped = replace(run, chunks=(whole,), is_mapped=True)
        return mapped if memory.may_be_mapped(mapped, device) else run

    def seen(self, name: str, array: Array) -> Array:
        """A view with all axes, if the array has axes of rows; else the array itself."""
        if name in (*MOVABLE_BROADCAST, "dbias", "tdbias"):
            return array[(None,) * (4 - array.ndim)]
        if name in MOVABLE_OVER_ROWS:
            return view_rows(array)
        return view_4d(array, self.options.layout) if name in MOVABLE_OVER_HEAD_DIM else array


@np.errstate(all="ignore")
def compute(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...], random: tuple[int, int] = (0, 0)
) -> tuple[Array, ...]:
    """The results `need` of a pass over arrays by name: its inputs, and the results that are given."""
    if calls := _over_axes(options, arrays, need):
        return calls.run(lambda options, taken: compute(pass_, options, _streamed(taken, arrays), need, random))
    call = checked(pass_, options, arrays, need)
    with dlpack.on_device(call.given["q"]):
        if pass_.gives_gradients:
            run = call.run(pass_, random)
            results = {name: call.gradient(name, run) for name in need}
            run.backward(need, {name: call.seen(name, x) for name, x in results.items()})
        else:
            rows = [row for row in pass_.rows if row.is_default or row.name in need]
            results = {row.name: call.result_of_rows(row) for row in rows}
            call.run(pass_, random).forward({name: call.seen(name, x) for name, x in results.items()})
    return tuple(results.values())


def plan(
    options: Options,
    arrays: Mapping[str, Any],
    need: tuple[str, ...] = DEFAULT_NEED,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
) -> StreamPlan:
    """The plan of these passes: the chunks, how they get to the device, and the memory that this takes."""
    _check_passes(passes)
    if calls := _over_axes(options, arrays, need):
        first = calls.inputs((0,) * len(calls.axes.lengths))
        return plan(calls.options, _streamed(first, arrays), need, passes).noted(calls.describe())
    call = checked(BACKWARD, options, arrays, need)
    with dlpack.on_device(call.given["q"]):
        runs = {pass_: call.run(pass_) for pass_ in passes}
        note = call.problem.program.describe() if call.problem.has_functions else ""
        return memory.plan_of(call.length, runs, need, call.given).noted(note)


def compile(
    options: Options,
    arrays: Mapping[str, Any],
    need: tuple[str, ...] = DEFAULT_NEED,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
) -> None:
    """Compile what passes over these keys need, by running them once; of arrays in host memory only check them."""
    if set(plan(options, arrays, need, passes).ways.values()) == {"views"}:  # nothing moves to a device
        return
    out, lse = compute(FORWARD, options, arrays, OUTPUTS)
    if BACKWARD in passes:
        compute(BACKWARD, options, {**arrays, "dout": out, "out": out, "lse": lse}, need)


def tune(
    options: Options,
    arrays: Mapping[str, Any],
    random: tuple[int, int] = (0, 0),
    *,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
    remember: bool = True,
    forget: bool = False,
) -> Any:
    """Tune the problem of the longest chunk, on a copy of it on the device: what `FlashAttention.tune` does."""
    _check_passes(passes)
    if calls := _over_axes(options, arrays, DEFAULT_NEED):
        of_call = _streamed(calls.inputs((0,) * len(calls.axes.lengths)), arrays)
        return tune(calls.options, of_call, random, passes=passes, remember=remember, forget=forget)
    call, how = checked(BACKWARD, options, arrays, DEFAULT_NEED), {"remember": remember, "forget": forget}
    if device_of(call.backend) is None:
        return cpu_backend.tune(options, {**call.given, **call.hosts}, random, passes=passes, **how)
    tuning = None
    with dlpack.on_device(call.given["q"]):
        run = call.run(BACKWARD, random)
        chunk, keys = longest_chunk(run)
        for pass_ in passes:
            options_of_call, of_call = memory.call_on(run, chunk, pass_.default, keys)
            of_call = dict.fromkeys(NAMES) | of_call
            tuned = run.slices.backend.tune(options_of_call, of_call, random, passes=(pass_,), **how)
            tuning = tuned if tuning is None or forget else replace(tuning, **{pass_.name: getattr(tuned, pass_.name)})
    return tuning


def longest_chunk(run: StreamedPass) -> tuple[Chunk, dict[str, Array]]:
    """The chunk that tuning is about, and a copy of it on the device."""
    if not run.chunks:
        raise NotImplementedError("k: got keys that no query attends to, expected some that a kernel computes with")
    chunk = max(run.chunks, key=lambda chunk: [stop - start for start, stop in (chunk.keys, chunk.queries)])
    return chunk, {name: _copied(x[:, :, slice(*chunk.keys)], run.slices.xp) for name, x in run.keys.items()}


def _check_passes(passes: tuple[Pass, ...]) -> None:
    """Refuse passes that do not take streamed keys."""
    for pass_ in passes:
        if pass_.has_tangents:
            raise NotImplementedError(
                f"passes: got {pass_.name!r} with streamed keys, expected one without tangents; give the k and v that "
                "were passed to cuflash.streamed"
            )


def _copied(array: Host, xp: Any) -> Array:
    """A copy on the device, made of integers, because CuPy takes no bfloat16 from NumPy."""
    return xp.asarray(np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")).view(array.dtype)


def _over_axes(options: Options, arrays: Mapping[str, Any], results: tuple[str, ...]) -> BatchCalls | None:
    """The calls of one with batch axes that are not one batch axis; None of any other call."""
    _check_served(arrays)
    hosts = {name: arrays[name].array for name in ("k", "v")}
    given = {**arrays, **hosts}
    axes = axes_of(options, given, results)
    if axes is None:
        return None
    device = device_of(_backend_of(arrays))
    for name in OF_KEYS:
        if name in results and name not in given:  # pinned, if its input is
            like = hosts[model_of(name)]
            given[name] = _new_host(like, like.shape, like.dtype, device)
    return BatchCalls(axes, options, given, results, dlpack.module_of(arrays["q"]), gives_partials=False)


def _streamed(taken: Mapping[str, Array], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of one call, with keys and values wrapped as those of all calls are."""
    given = {name: x for name, x in taken.items() if x is not None}
    return given | {name: arrays[name].with_array(given[name]) for name in ("k", "v")}


def _backend_of(arrays: Mapping[str, Any]) -> dlpack.Backend:
    return "numpy" if isinstance(arrays["q"], np.ndarray) else "cupy"


def _new_host(like: Host, shape: tuple[int, ...], dtype: Any, device: Cuda | None) -> Host:
    return (device.pinned if device is not None and device.is_pinned(like) else np.empty)(shape, dtype)


def _check_served(arrays: Mapping[str, Any]) -> None:
    """Refuse what streamed keys do not go with."""
    for name, remedy in _REMEDIES.items():
        if arrays.get(name) is not None:
            got = type(arrays[name]).__name__
            raise NotImplementedError(f"{name}: got {got}, which streamed keys do not go with; expected {remedy}")
    if dlpack.is_captured(arrays["q"]):
        raise NotImplementedError(
            "k: got streamed keys while a CUDA graph is captured, expected keys on the device: the host takes part in "
            "every copy of a chunk, and a graph replays without it"
        )


def checked(pass_: Pass, options: Options, arrays: Mapping[str, Any], results: tuple[str, ...]) -> StreamedCall:
    """The arguments of a call, checked against each other."""
    _check_served(arrays)
    backend, chunk = _backend_of(arrays), arrays["k"].chunk
    hosts = {name: arrays[name].array for name in ("k", "v")}
    hosts |= {name: arrays[name] for name in (*TANGENTS, *OF_KEYS) if name in arrays}
    others = {name: x for name, x in arrays.items() if name not in hosts}
    dlpack.check_no_overlap(hosts, results)
    given = others | hosts
    if backend == "numpy":
        problem = cpu_backend.bound(pass_, options, given, results).problem
    else:
        signature = tuple((name, tuple(x.shape), tuple(x.strides), x.dtype) for name, x in given.items())
        problem = cpu_backend.bind_signature(pass_, options, signature, results).problem
        dlpack.check_no_overlap(others, results)
    sizes = problem.seqlen_q, problem.seqlen_k
    band = Band(diagonal_of(options, *sizes), *window_of(options, *sizes))
    rows, keys = steps_of(options, problem.block_mask is not None)
    length = chunk_of(problem, chunk, keys)
    chunks = chunks_of(band, *sizes, length, rows)
    if sums_softmax(results):  # the first call gives these, for all queries
        keys_of_first = chunks[0].keys if chunks else (0, 0)
        chunks = (Chunk((0, sizes[0]), keys_of_first), *chunks[1:])
    return StreamedCall(
        options=options,
        backend=backend,
        given=others,
        hosts=hosts,
        problem=problem,
        band=band,
        length=length,
        is_explicit=chunk is not None,
        chunks=chunks,
    )


def device_of(backend: dlpack.Backend) -> Cuda | None:
    """The device that chunks go to; None if they stay in host memory."""
    return Cuda() if backend == "cupy" else None
