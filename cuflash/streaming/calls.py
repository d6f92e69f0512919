"""Calls of `cuflash.FlashAttention` with streamed keys and values: how they are checked and computed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.array_info import numpy_dtype, view_4d, view_rows
from cuflash.arrays.checks import type_error, value_error
from cuflash.arrays.memory_ranges import Band
from cuflash.cpu import backend as cpu_backend
from cuflash.shards.cuda import Cuda
from cuflash.shards.slices import Parts, steps_of
from cuflash.spec import borrowing
from cuflash.spec.batch_axes import Calls, FirstCall, axes_of
from cuflash.spec.binding import PASSES, Pass
from cuflash.spec.inputs import BROADCAST, NAMES
from cuflash.spec.options import Options, diagonal_of, window_of
from cuflash.spec.problem import Problem
from cuflash.spec.rewrites import Equivalent, equivalent
from cuflash.streaming import memory
from cuflash.streaming.chunks import Chunk, StreamPlan, chunk_of, chunks_of
from cuflash.streaming.copy_pipeline import Host
from cuflash.streaming.execution import OF_KEYS, StreamedPass, sums_softmax
from cuflash.streaming.source import Streamed, borrowed_from_host

Array = Any
# Arrays beside the terms that a pass reads, in the memory where the queries are, and those that are required.
_READ: dict[Pass, tuple[str, ...]] = {"forward": ("q",), "backward": ("q", "dout", "out", "lse", "dlse")}
_REQUIRED: dict[Pass, tuple[str, ...]] = {"forward": ("q",), "backward": ("q", "dout", "out", "lse")}
# Options that are not supported, and what to pass instead.
_REMEDIES = {
    "block_table": "contiguous keys: the pages of each batch entry gathered into them",
    "cu_seqlens_q": "a call for each sequence, or sequences padded to one length as the entries of a batch",
    "cu_seqlens_k": "a call for each sequence, or sequences padded to one length as the entries of a batch",
    "q_scale": "q of 16 bits a number or more",
    "k_scale": "k of 16 bits a number or more",
    "v_scale": "v of 16 bits a number or more",
}


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call whose arguments are checked against each other."""

    options: Options
    equivalent: Equivalent | None  # the options and terms that functions spell out
    own: dlpack.Borrowed  # the arrays in the memory where the queries are
    hosts: Mapping[str, Host]  # arrays in host memory: k, v, and dk and dv if given
    problem: Problem
    band: Band
    length: int  # keys of a chunk
    is_explicit: bool  # whether the caller chose it
    chunks: tuple[Chunk, ...]

    @property
    def given(self) -> dict[str, Array]:
        return {name: x for name, x in self.own.arrays.items() if x is not None}

    def result(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """The array that a result is written to."""
        given = self.own.arrays.get(name)
        return dlpack.module_of(self.given["q"]).empty(shape, dtype) if given is None else given

    def host_result(self, name: str, device: Cuda | None) -> Host:
        """The array in host memory that a result is written to. A new one is pinned if its input (k or v) is."""
        return self.hosts[name] if name in self.hosts else _host_result(self.hosts[name[1:]], device)

    def run(self, pass_: Pass, random: tuple[int, int] = (0, 0)) -> StreamedPass:
        """The object that computes a pass."""
        device = device_of(self.own.kind)
        read = (*_READ[pass_], *NAMES, *self.options.score_args)
        arrays = {name: self.seen(name, x) for name, x in self.given.items() if name in read}
        parts = Parts(options=self.options, band=self.band, problem=self.problem, random=random, arrays=arrays)
        keys = {name: view_4d(self.hosts[name], self.options.layout) for name in ("k", "v")}
        run = StreamedPass(parts=parts, chunks=self.chunks, keys=keys, device=device)
        if pass_ == "backward" or device is None or self.is_explicit:
            return run
        whole = Chunk((0, self.problem.seqlen_q), (0, self.problem.seqlen_k))
        mapped = replace(run, chunks=(whole,), is_mapped=True)
        return mapped if memory.may_be_mapped(mapped, device) else run

    def seen(self, name: str, array: Array) -> Array:
        """A view with all axes, if the array has axes of rows; else the array itself."""
        if name in BROADCAST or name == "dbias":
            return array[(None,) * (4 - array.ndim)]
        if name in ("lse", "dlse"):
            return view_rows(array)
        return view_4d(array, self.options.layout) if name in ("q", "out", "dout", "dq", *OF_KEYS) else array


@np.errstate(all="ignore")
def forward(options: Options, arrays: Mapping[str, Any], random: tuple[int, int]) -> tuple[Array, ...]:
    """(out, lse) of arrays by name, as `FlashAttention.forward` gets them, where k or v is `Streamed`."""
    if axes := _over_axes("forward", options, arrays, ("out", "lse")):
        return axes.run(functools.partial(forward, random=random))
    call = _checked("forward", options, arrays, _REQUIRED["forward"], ("out", "lse"))
    problem = call.problem
    with _on_device(call.given["q"]):
        out = call.result("out", problem.out_shape, call.given["q"].dtype)
        lse = call.result("lse", problem.lse_shape, numpy_dtype(problem.softmax_dtype))
        call.run("forward", random).forward(view_4d(out, options.layout), view_rows(lse))
    return call.own.give_back(out, arrays["out"]), call.own.give_back(lse, arrays["lse"])


@np.errstate(all="ignore")
def backward(
    options: Options, arrays: Mapping[str, Any], need: tuple[str, ...], random: tuple[int, int]
) -> tuple[Array, ...]:
    """The gradients `need` of arrays by name, as `FlashAttention.backward` gets them, with the arrays to write to."""
    if axes := _over_axes("backward", options, arrays, need):
        return axes.run(functools.partial(backward, need=need, random=random))
    call = _checked("backward", options, arrays, _REQUIRED["backward"], need)
    own_need = need if call.equivalent is None else call.equivalent.need(need)
    with _on_device(call.given["q"]):
        run = call.run("backward", random)
        results = {}
        for name in own_need:
            if name in OF_KEYS:
                results[name] = call.host_result(name, run.device)
                continue
            like = call.given.get(name[1:])
            shape, dtype = ((), run.parts.softmax_dtype) if like is None else (like.shape, like.dtype)
            results[name] = call.result(name, shape, dtype)
        run.backward(own_need, {name: call.seen(name, x) for name, x in results.items()})
    if call.equivalent is not None:
        found = call.equivalent.gradients(list(results.values()), arrays, need)
        results = dict(zip(need, found, strict=True))
    wrapped = {f"d{name}": arrays[name].borrowed for name in ("k", "v")}
    return tuple(wrapped.get(name, call.own).give_back(results[name], arrays.get(name)) for name in need)


def plan(options: Options, arrays: Mapping[str, Any], need: tuple[str, ...]) -> StreamPlan:
    """The plan of both passes: the chunks, how they get to the device, and the memory that this takes."""
    given = {"out": None, "lse": None, **arrays}
    if axes := _over_axes("backward", options, given, need):
        first = axes.first()
        found = plan(first.options, first.arrays, need)
        return replace(found, note=f"{first.axes}\n{found.note}".strip())
    call = _checked("backward", options, given, ("q",), need)
    with _on_device(call.given["q"]):
        runs = {pass_: call.run(pass_) for pass_ in PASSES}
        own_need, note = need, ""
        if call.equivalent is not None:
            own_need, note = call.equivalent.need(need), call.equivalent.describe(options, given)
        elif call.problem.has_functions:
            note = call.problem.program.describe()
        return replace(memory.plan_of(call.length, runs, own_need, call.given), note=note)


def compile(options: Options, arrays: Mapping[str, Any], need: tuple[str, ...]) -> None:
    """Compile what both passes over these keys need, by running them once; of arrays in host memory only check them."""
    given = {**dict.fromkeys(("out", "lse", "dlse", *need)), **arrays}
    if set(plan(options, given, need).ways.values()) == {"views"}:  # nothing moves to a device
        return
    out, lse = forward(options, given, (0, 0))
    backward(options, {**given, "dout": out, "out": out, "lse": lse}, need, (0, 0))


@dataclass(frozen=True)
class _OverAxes:
    """A call with leading axes that are not one batch axis: several calls, or one on copies."""

    calls: Calls
    own: dlpack.Borrowed  # the arrays in the memory where the queries are
    given: Mapping[str, Any]  # those of the caller
    results: tuple[str, ...]

    def run(self, call: Callable[..., tuple[Array, ...]]) -> tuple[Array, ...]:
        """The results of all calls as arrays of the caller's libraries."""
        found = self.calls.run(lambda options, arrays: call(options, self._streamed(arrays)))
        wrapped = {f"d{name}": self.given[name].borrowed for name in ("k", "v")}
        results = zip(self.results, found, strict=True)
        return tuple(wrapped.get(name, self.own).give_back(x, self.given.get(name)) for name, x in results)

    def first(self) -> FirstCall:
        """The first call, for a plan."""
        arrays = self.calls.inputs((0,) * len(self.calls.axes.lengths))
        return FirstCall(self.calls.options, self._streamed(arrays), self.calls.describe())

    def _streamed(self, arrays: dict[str, Array]) -> dict[str, Any]:
        """The arrays of one call, with keys and values wrapped as the caller's are."""
        wrapped = {name: self.given[name] for name in ("k", "v")}
        return arrays | {name: Streamed(arrays[name], x.chunk, _of_numpy(arrays[name])) for name, x in wrapped.items()}


def _of_numpy(array: Host) -> dlpack.Borrowed:
    return dlpack.Borrowed("numpy", {"array": array}, None)


def _over_axes(pass_: Pass, options: Options, arrays: Mapping[str, Any], results: tuple[str, ...]) -> _OverAxes | None:
    """How a call goes through leading axes that are not one batch axis; None of any other call, and of a wrong one."""
    k, v = arrays["k"], arrays["v"]
    if not (isinstance(k, Streamed) and isinstance(v, Streamed)) or any(
        arrays.get(name) is not None for name in _REMEDIES
    ):
        return None
    own = _borrowed(arrays, ("q",), results)
    hosts = {"k": k.array, "v": v.array, **_written_to_host(arrays, results)}
    given = {**own.arrays, **hosts}
    axes = axes_of(options, given, results)
    if axes is None:
        return None
    device = device_of(own.kind)
    for name in OF_KEYS:
        if name in results and name not in hosts:  # pinned, if its input is
            given[name] = _host_result(hosts[name[1:]], device)
    calls = Calls(axes, options, given, results, dlpack.module_of(own.arrays["q"]), gives_parts=False)
    return _OverAxes(calls, own, arrays, results)


def _borrowed(arrays: Mapping[str, Any], required: tuple[str, ...], results: tuple[str, ...]) -> dlpack.Borrowed:
    """The arrays in the memory where the queries are."""
    return borrowing.borrow(
        {name: x for name, x in arrays.items() if name not in ("k", "v", *OF_KEYS)},
        required=required,
        written=[name for name in results if name not in OF_KEYS and arrays.get(name) is not None],
    )


def _written_to_host(arrays: Mapping[str, Any], results: tuple[str, ...]) -> dict[str, Host]:
    """The arrays in host memory that results are written to."""
    written = {name: arrays[name] for name in OF_KEYS if name in results and arrays.get(name) is not None}
    return dict(borrowed_from_host(written, written=tuple(written)).arrays) if written else {}


def _host_result(like: Host, device: Cuda | None) -> Host:
    """A new array in host memory for the gradient of another one: pinned, if that is."""
    return (device.pinned if device is not None and device.is_pinned(like) else np.empty)(like.shape, like.dtype)


def _checked(
    pass_: Pass,
    options: Options,
    arrays: Mapping[str, Any],
    required: tuple[str, ...],
    results: tuple[str, ...],
) -> _Call:
    """The arguments of a call, checked against each other."""
    k, v = arrays["k"], arrays["v"]
    for name, streamed, other in (("k", k, "v"), ("v", v, "k")):
        if not isinstance(streamed, Streamed):
            raise type_error(name, type(streamed).__name__, f"Streamed as {other} is: *cuflash.streamed(k, v)")
    if k.chunk != v.chunk:
        raise value_error("v", f"chunks of {v.chunk} keys", f"{k.chunk} as k: both of one cuflash.streamed(k, v)")
    for name, remedy in _REMEDIES.items():
        if arrays.get(name) is not None:
            got = type(arrays[name]).__name__
            raise NotImplementedError(f"{name}: got {got}, which streamed keys do not go with; expected {remedy}")
    own = _borrowed(arrays, required, results)
    if dlpack.is_captured(own.arrays["q"]):
        raise NotImplementedError(
            "k: got streamed keys while a CUDA graph is captured, expected keys on the device: the host takes part in "
            "every copy of a chunk, and a graph replays without it"
        )
    spelled_out = equivalent(options, own.arrays | {"k": k.array, "v": v.array})
    if spelled_out is not None:
        options, own = spelled_out.options, own._replace(arrays=spelled_out.arrays(own.arrays))
    written = _written_to_host(arrays, results)
    hosts = {"k": k.array, "v": v.array, **written}
    dlpack.check_apart(hosts, tuple(written))
    given = {name: x for name, x in own.arrays.items() if x is not None} | hosts
    if own.kind == "numpy":
        problem = cpu_backend.bound(pass_, options, given, results).problem
    else:
        likes = tuple((name, tuple(x.shape), tuple(x.strides), x.dtype) for name, x in given.items())
        problem = cpu_backend.bind_arrays_like(pass_, options, likes, results).problem
        dlpack.check_apart(own.arrays, results)
    sizes = problem.seqlen_q, problem.seqlen_k
    band = Band(diagonal_of(options, *sizes), *window_of(options, *sizes))
    rows, keys = steps_of(options, problem.block_mask is not None)
    length = chunk_of(problem, k.chunk, keys)
    chunks = chunks_of(band, *sizes, length, rows)
    if pass_ == "backward" and sums_softmax(results):  # the first call gives these, for all queries
        keys_of_first = chunks[0].keys if chunks else (0, 0)
        chunks = (Chunk((0, sizes[0]), keys_of_first), *chunks[1:])
    return _Call(
        options=options,
        equivalent=spelled_out,
        own=own,
        hosts=hosts,
        problem=problem,
        band=band,
        length=length,
        is_explicit=k.chunk is not None,
        chunks=chunks,
    )


def device_of(kind: dlpack.Kind) -> Cuda | None:
    """The device that chunks go to; None if they stay in host memory."""
    return Cuda() if kind == "cupy" else None


def _on_device(array: Array) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if isinstance(array, np.ndarray) else array.device
