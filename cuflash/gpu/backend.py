"""From CuPy arrays to kernel launches: pointers, scratch memory, stream, and the cache that makes a call cheap.

The first call of a problem binds its arrays, plans it and compiles or loads its kernels. The result is a `_Launch`. Its
key in the cache has everything that it depends on: options, shapes, strides, dtypes, pointer alignment, device. Later
calls look it up, fill in the pointers and launch, on CuPy's current stream of the arrays' device, without a
synchronisation.

The number of keys is an exception. A forward pass whose k and v grow by a row with each call, as they do in decoding,
finds the launch of the call before: the key has only those properties of the number of keys that a plan depends on, and
each call fills in the number itself. Most of the time for that goes into new tensor maps. Maps can stay the same if k
and v are slices of a longer cache, so that their memory continues after them, and if the kernel hides all keys past the
last one. Then the maps reach over as many keys as the launch serves.

A caller whose arrays are not CuPy's needs more time for views of them than a launch takes. So it may repeat the launch
of an earlier call by addresses alone (`RepeatedLaunch`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy
import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.array_info import FLOAT8, extent, numpy_dtype
from cuflash.arrays.checks import value_error
from cuflash.arrays.dlpack import check_no_overlap
from cuflash.arrays.units import WIDTH
from cuflash.gpu import progress, tuning
from cuflash.gpu.compiler import compile_spec, with_resources
from cuflash.gpu.params import Argument
from cuflash.gpu.replay import Recording, of_thread
from cuflash.gpu.timing import Stopwatch
from cuflash.gpu.tuning import PassTuning, Tuning, candidates, tuned_plan
from cuflash.plan import DeviceSpec, KernelSpec, LaunchPlan
from cuflash.plan.tensor_map import encoder
from cuflash.spec import row_sums as of_rows
from cuflash.spec.batch_axes import Axes, Calls, axes_of, first_call
from cuflash.spec.binding import FIXED, Binding, Contiguous, Growing, bind, growing_keys, of_pass, planned_length
from cuflash.spec.inputs import INPUTS, NAMES
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.passes import BACKWARD, FORWARD, JVP, PASSES_WITHOUT_TANGENTS, Pass

MEMORY_CLOCK_AND_WIDTH = (36, 37)  # cudaDevAttrMemoryClockRate in kHz, cudaDevAttrGlobalMemoryBusWidth in bits
MAX_LAUNCHES = 1024  # launches that are kept; each takes 10 KB
NO_RESULTS: Mapping[str, tuple[tuple[int, ...], Any]] = {}
OVERLAP_IN_GRAPHS = 12030  # from this CUDA version of the driver on, graphs can hold launches that overlap


class Plans(NamedTuple):
    """The plans of the passes of one problem; None of one that was not asked for, or that the problem does not have."""

    forward: LaunchPlan | None = None
    backward: LaunchPlan | None = None
    jvp: LaunchPlan | None = None
    backward_jvp: LaunchPlan | None = None
    column_sums: LaunchPlan | None = None
    column_max: LaunchPlan | None = None
    top_keys: LaunchPlan | None = None
    column_sums_backward: Plans | None = None  # a backward pass, and a forward pass for dlse and dweights

    def describe(self, verbose: bool = False, width: int = WIDTH) -> str:
        """The plans in words, as `LaunchPlan.describe` gives each."""
        found = [plan.describe(verbose, width) for plan in self if plan is not None]
        if self.forward is not None and self.forward.problem.why_no_gradients is not None:
            found.append(f"no backward pass with {self.forward.problem.why_no_gradients}")
        return "\n".join(found)

    def noted(self, note: str) -> Plans:
        """The plans with a note before their reasons."""
        return Plans(*(plan and plan.noted(note) for plan in self))

    def joined(self, other: Plans) -> Plans:
        """The plans of both."""
        return self._replace(**{name: plan for name, plan in other._asdict().items() if plan is not None})


class _Kernel(NamedTuple):
    function: Any  # cupy.cuda.Function, which keeps the module loaded
    handle: int  # of the function
    grid: int
    threads: int
    shared_bytes: int
    config_of: Callable[[int], Any] | None  # from a stream to a launch that overlaps the kernel before; or None


@dataclass(eq=False, slots=True)
class _Launch:
    """All that is known of a call except its pointers and, if the plan serves several, its number of keys."""

    plan: LaunchPlan
    names: tuple[str, ...]  # of the arrays that a call is given, results among them
    seqlen_k: int  # the number of keys of the plan
    any_length: bool  # whether it serves calls of another seqlen_k that have the same plan
    kernels: tuple[_Kernel, ...]
    run_overlapping: Callable[..., tuple[Any]]  # cuLaunchKernelEx
    argument: Argument  # with pointers of the arrays of the call, results that it allocates, and scratch arrays
    # For each tensor map: a function of address and number of rows, the index of the pointer, the rows (0: all keys).
    maps: tuple[tuple[Callable[[int, int], bytes], int, int], ...]
    results: tuple[str, ...]
    allocated: tuple[tuple[int, tuple[int, ...], Any], ...]  # index, shape and dtype of results that the call allocates
    copied: tuple[tuple[str, int], ...]  # arrays of which kernels get copies, and the indices of their pointers
    scratch: tuple[int, ...]  # first byte of each scratch array in one allocation
    scratch_bytes: int  # size of that allocation
    longest: int  # the most keys that it serves, if maps of k and v may have so many; else 0
    of_longest: tuple[tuple[str, int], ...]  # k and v, and the offset in bytes at which so many keys end
    extents: tuple[tuple[int, int], ...]  # first and end byte of each array of the call, relative to its pointer
    given: tuple[tuple[str, int, int], ...]  # results that the call is given, with indices of array and result
    last_call: int = 0  # the number of its last call


_launches: dict[tuple, _Launch] = {}
_repeated: dict[tuple, RepeatedLaunch] = {}  # by the signature of their arrays
# Every call has a number of its own, by which kernels tell what they have written from earlier contents of memory. The
# numbers start at a random one, so that memory holds one of them only by chance, and stay below 2**48.
_calls = itertools.count(secrets.randbits(47))


def compute(
    pass_: Pass, options: Options, arrays: dict[str, Any], need: tuple[str, ...], random: tuple[int, int] = (0, 0)
) -> tuple[Any, ...]:
    """The results `need` of a pass over CuPy arrays by name: its inputs and the results to write to, None for absent.

    `random` is the seed and the offset of dropout. `arrays` of a backward pass may have row sums
    (`cuflash.spec.row_sums`) where q, k and v are a slice of a problem.
    """
    if "row_sums" not in arrays:
        return _call(pass_, options, arrays, need, random)
    others = {name: x for name, x in arrays.items() if name != "row_sums"}
    return _call(pass_, options, others, need, random, PartialRowSums(arrays, arrays["row_sums"]))


def row_sums(options: Options, arrays: dict[str, Any]) -> Any:
    """Row max and row sum of rows whose lse is large, in host memory (`cuflash.spec.row_sums`), over the keys of a
    call.

    lse is that of these keys. There is one batch axis, and the layout "bhsd".
    """
    q, v = arrays["q"], arrays["v"]
    zeros = cupy.broadcast_to(cupy.zeros(v.shape[-1], q.dtype), (*q.shape[:-1], v.shape[-1]))
    sums = PartialRowSums(arrays)
    of_call = {**arrays, "out": zeros, "dout": zeros, "dlse": None, "dk": None, "dv": None}
    _call(BACKWARD, options, of_call, ("dk", "dv"), (0, 0), sums)
    return sums.found


def plan(
    options: Options,
    arrays: dict[str, Any],
    need: tuple[str, ...] = DEFAULT_NEED,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
) -> Plans:
    """The plans of passes; this compiles the kernels, to tell how many registers they take."""
    found: dict[str, Any] = {
        pass_.name: planned(pass_, options, of_pass(pass_, arrays, options), pass_.results_for(need))
        for pass_ in _served(passes, arrays)
    }
    return Plans(**found)


def planned(pass_: Pass, options: Options, arrays: Mapping[str, Any], results: tuple[str, ...]) -> LaunchPlan:
    """The plan of one pass on its arrays, with the registers of its kernels."""
    first = first_call(options, arrays, results, cupy, gives_partials=True)
    binding = _bind(pass_, first.options, first.arrays, results)
    device = device_spec(arrays["q"].data.device_id)
    plan = with_resources(tuned_plan(binding.problem, device, pass_, **binding.layout))
    return plan.noted(first.axes) if first.axes else plan


def _served(passes: tuple[Pass, ...], arrays: Mapping[str, Any]) -> tuple[Pass, ...]:
    """The passes without that of gradients, if it comes with the forward pass of a problem that has none."""
    has_gradients = arrays.get("block_table") is None and arrays["k"].dtype.name not in FLOAT8
    return tuple(pass_ for pass_ in passes if has_gradients or pass_ is not BACKWARD or FORWARD not in passes)


def compile(
    options: Options,
    arrays: dict[str, Any],
    need: tuple[str, ...] = DEFAULT_NEED,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
) -> None:
    """Compile and load the kernels of passes, and let CuPy's pool of the current stream grow to what they need.

    A later call on arrays of these shapes and strides compiles nothing and takes no new memory from the device. This
    runs the passes once on the given arrays, and those whose results they read.
    """
    made: dict[Pass, tuple[Any, ...]] = {}
    with cupy.cuda.Device(arrays["q"].data.device_id):
        for pass_ in _served(passes, arrays):
            own = _taken(pass_, options, arrays, made=made)
            made[pass_] = _call(pass_, options, own, pass_.results_for(need), (0, 0))


def _taken(
    pass_: Pass,
    options: Options,
    arrays: Mapping[str, Any],
    random: tuple[int, int] = (0, 0),
    made: Mapping[Pass, tuple[Any, ...]] | None = None,
) -> dict[str, Any]:
    """The arrays of a pass, among them results of the one before, `made` or made here; dout is out unless given."""
    own = of_pass(pass_, arrays, options)
    if not pass_.required:
        return own
    before = JVP if pass_.has_tangents else FORWARD
    results = (made or {}).get(before)
    if results is None:
        results = _call(before, options, of_pass(before, arrays, options), before.default, random)
    found = dict(zip(before.default, results, strict=True))
    return {"dout": found["out"]} | {name: x for name, x in own.items() if x is not None or name in NAMES} | found


def tune(
    options: Options,
    arrays: dict[str, Any],
    random: tuple[int, int] = (0, 0),
    *,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
    remember: bool = True,
    forget: bool = False,
) -> Tuning | None:
    """Tune the passes of a call, or forget what tuning found: what `FlashAttention.tune` does.

    `arrays` are those of `forward`, tangents, and dout, which may be None or absent.
    """
    found: dict[str, Any] = {}
    with cupy.cuda.Device(arrays["q"].data.device_id):
        for pass_ in passes:
            own = _taken(pass_, options, arrays, random)
            found[pass_.name] = tuned(pass_, options, own, random, remember=remember, forget=forget)
    return None if forget else Tuning(**found)


def tuned(
    pass_: Pass,
    options: Options,
    arrays: dict[str, Any],
    random: tuple[int, int] = (0, 0),
    *,
    results: Mapping[str, tuple[tuple[int, ...], Any]] = NO_RESULTS,
    remember: bool = True,
    forget: bool = False,
) -> PassTuning | None:
    """What tuning finds for one pass on its arrays, on the current device; `results` are as `trials` takes them."""
    if options.batch_invariant:
        raise NotImplementedError(
            "batch_invariant: got True, expected False in tune: tiles follow from no size of a problem, so none are "
            "tuned for one"
        )
    plans, call_by = trials(pass_, options, arrays, random, results)
    found = None
    if forget:
        tuning.forget(plans[0])
    else:
        with progress.Bar(f"tuning {pass_}", total=2 * len(plans)) as bar:
            found = tuning.tune(plans, Stopwatch(call_by), advance=bar.advance, remember=remember)
    forget_launches()
    return found


def trials(
    pass_: Pass,
    options: Options,
    arrays: dict[str, Any],
    random: tuple[int, int],
    results: Mapping[str, tuple[tuple[int, ...], Any]] = NO_RESULTS,
) -> tuple[tuple[LaunchPlan, ...], Callable[[LaunchPlan], Callable[[], tuple[Any, ...]]]]:
    """The plans that tuning tries for a call, and a function that turns a plan into a call that runs it.

    `arrays` are those of the pass, without results, of which `results` has shapes and dtypes that do not follow from
    the arrays; CuPy's current device is that of the arrays.
    """
    options, arrays, _ = first_call(options, arrays, pass_.default, cupy, gives_partials=True)

    def with_results() -> dict[str, Any]:
        return arrays | {name: cupy.empty(shape, dtype) for name, (shape, dtype) in results.items()}

    binding = _bind(pass_, options, with_results(), pass_.default)

    def call_by(plan: LaunchPlan) -> Callable[[], tuple[Any, ...]]:
        own = with_results()  # of each plan, so that results of two can be compared
        pointers = [array.data.ptr for array in own.values() if array is not None]
        launch = _launch_of(binding, plan, own)
        return lambda: _start(launch, own, list(pointers), random, plan.problem.seqlen_k)

    device = device_spec(arrays["q"].data.device_id)
    return candidates(binding.problem, device, pass_, **binding.layout), call_by


def forget_launches() -> None:
    """Forget all launches, so that later calls are planned again."""
    _launches.clear()
    _repeated.clear()


@functools.cache
def device_spec(device_id: int) -> DeviceSpec:
    """The device's limits, as CUDA reports them; `CUFLASH_ARCH` overrides the compute capability if it is set."""
    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    spec = DeviceSpec(
        name=properties["name"].decode(),
        arch=10 * properties["major"] + properties["minor"],
        num_sms=properties["multiProcessorCount"],
        shared_bytes_per_block=properties["sharedMemPerBlockOptin"],
        shared_bytes_per_sm=properties["sharedMemPerMultiprocessor"],
        l2_bytes=properties["l2CacheSize"],
        bytes_per_s=_bytes_per_s(device_id),
    )
    wanted = os.environ.get("CUFLASH_ARCH")
    return spec.as_arch(wanted) if wanted else spec


def _bytes_per_s(device_id: int) -> float:
    """The bandwidth of device memory: two transfers per clock, over the width of the bus."""
    clock_khz, bits = (cupy.cuda.runtime.deviceGetAttribute(x, device_id) for x in MEMORY_CLOCK_AND_WIDTH)
    return 2 * 1e3 * clock_khz * bits / 8


# ---- A call ----------------------------------------------------------------------------------------------------------


def _call(
    pass_: Pass,
    options: Options,
    arrays: dict[str, Any],
    results: tuple[str, ...],
    random: tuple[int, int],
    sums: PartialRowSums | None = None,
) -> tuple[Any, ...]:
    """Run one pass. This code takes as long on the host as a launch, so it is written for speed."""
    device_id = arrays["q"].data.device_id
    if device_id != cupy.cuda.runtime.getDevice():
        with cupy.cuda.Device(device_id):
            return _call(pass_, options, arrays, results, random, sums)
    found = _found(pass_, options, arrays, results)
    if isinstance(found, Axes):
        call = functools.partial(_call, pass_, results=results, random=random)
        return Calls(found, options, arrays, results, cupy, gives_partials=True).run(call)
    launch, pointers, seqlen_k = found
    return _start(launch, arrays, pointers, random, seqlen_k, sums)


def _found(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], results: tuple[str, ...]
) -> tuple[_Launch, list[int], int] | Axes:
    """The launch of a call, the pointers of its arrays, which are on the current device, and its number of keys.

    Or its batch axes, where these need several launches.
    """
    names, axis, seqlen_k, planned_for = growing = growing_keys(options, arrays) if pass_.any_length else FIXED
    key: list[Any] = [pass_, options, results, planned_for]
    pointers: list[int] = []
    for name, array in arrays.items():
        if array is not None:
            memory, shape = array.data, array.shape
            pointer = memory.ptr
            pointers.append(pointer)
            if name in names:
                key += (shape[:axis], shape[axis + 1 :])
            else:
                key.append(shape)
            key += (name, array.strides, array.dtype, pointer & 15, memory.device_id)
    key.append(arrays["k"].data.ptr == arrays["v"].data.ptr)  # then v may be the first columns of k
    of_any = tuple(key)
    launch = _launches.get(of_any) or _launches.get((of_any, seqlen_k))
    if launch is None:
        axes = axes_of(options, arrays, results)
        if axes is not None:
            return axes
        binding = _bind(pass_, options, arrays, results)
        plan = tuned_plan(binding.problem, device_spec(arrays["q"].data.device_id), pass_, **binding.layout)
        launch = _launch_of(binding, plan, arrays, growing)
        _keep(_launches, of_any if launch.any_length or not names else (of_any, seqlen_k), launch)
    return launch, pointers, seqlen_k or launch.seqlen_k


def _keep(kept: dict[tuple, Any], key: tuple, launch: _Launch | RepeatedLaunch) -> None:
    """Remember a launch. If there are too many, only the half that was used last is kept."""
    if len(kept) >= MAX_LAUNCHES:
        by_use = sorted(list(kept.items()), key=lambda item: item[1].last_call)
        for old, _ in by_use[: MAX_LAUNCHES // 2]:
            kept.pop(old, None)
    kept[key] = launch


def _start(
    launch: _Launch,
    arrays: Mapping[str, Any],
    pointers: list[int],
    random: tuple[int, int],
    seqlen_k: int,
    sums: PartialRowSums | None = None,
) -> tuple[Any, ...]:
    """Launch on the current device. `pointers` are those of the given arrays."""
    if not of_thread.has_context:  # memory of CuPy's pool is given to a thread without one, too
        cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
        of_thread.has_context = True
    results: list[Any] = [None] * len(launch.results)
    for name, index, result in launch.given:
        _check_overlap(index, launch, pointers, arrays)
        results[result] = arrays[name]

    copies = {}
    for name, index in launch.copied:
        array = arrays[name].bits if arrays[name].dtype.name in FLOAT8 else arrays[name]
        copies[name] = copy = cupy.empty(array.shape, array.dtype)
        pointers[index] = copy.data.ptr
        if name not in launch.results:
            copy[...] = array
    for index, shape, dtype in launch.allocated:
        results[index] = array = cupy.ndarray(shape, dtype)
        pointers.append(array.data.ptr)
    scratch = None
    if launch.scratch:
        scratch = cupy.cuda.alloc(launch.scratch_bytes)  # goes back to the pool in stream order
        first = scratch.ptr
        for offset in launch.scratch:
            pointers.append(first + offset)
    mapped = launch.longest or seqlen_k
    for name, end in launch.of_longest:
        memory = arrays[name].data
        if memory.ptr + end > memory.mem.ptr + memory.mem.size:
            mapped = seqlen_k
    if sums is None:
        _run(launch, pointers, _maps(launch, pointers, mapped), random, seqlen_k)
    else:
        sums.run(launch, pointers, _maps(launch, pointers, mapped), random, scratch)
    if of_thread.recording is not None:
        _record(of_thread.recording, launch, results, pointers, seqlen_k, sums)
    if of_thread.launches is not None:
        of_thread.launches.append((launch, arrays, seqlen_k, mapped, sums))
    for name, copy in copies.items():
        if name in launch.results:
            arrays[name][...] = copy
    return tuple(results)


def _maps(launch: _Launch, pointers: list[int], seqlen_k: int) -> list[bytes]:
    return [map_of(pointers[index], rows or seqlen_k) for map_of, index, rows in launch.maps]


def _run(
    launch: _Launch,
    pointers: list[int],
    maps: list[bytes],
    random: tuple[int, int],
    seqlen_k: int,
    stream: int | None = None,
) -> None:
    """Launch. `pointers` are those of the given arrays, of the results that the call allocates, and of scratch."""
    launch.last_call = call = next(_calls)
    frame = launch.argument.frame(pointers, maps, random, seqlen_k, call)
    _launch_kernels(launch, launch.kernels, frame.address, stream)
    launch.argument.give_back(frame)


def _launch_kernels(
    launch: _Launch, kernels: tuple[_Kernel, ...], kernel_params: int, stream: int | None = None
) -> None:
    """Launch kernels on a stream by its address, or else on CuPy's current one."""
    # On the host of an H200 this way of launching took 3.0 us, and cuda.bindings took 3.6 us; in another run that took
    # 3.9 us, and CuPy's kernel object 5.3 us.
    run = cupy.cuda.driver.launchKernel
    if stream is None:
        stream = cupy.cuda.get_current_stream().ptr
    for _, handle, grid, threads, shared_bytes, config_of in kernels:
        if config_of is None:
            run(handle, grid, 1, 1, threads, 1, 1, shared_bytes, stream, kernel_params, 0)
        else:
            (error,) = launch.run_overlapping(config_of(stream), handle, kernel_params, 0)
            if error.value:
                raise RuntimeError(f"cuLaunchKernelEx returned {error.name}")


class PartialRowSums:
    """The row sums of a backward pass over some keys of a problem (`cuflash.spec.row_sums`), which its first kernels
    find.

    They are read there; or those of all keys replace them, before the other kernels read them.
    """

    def __init__(self, arrays: Mapping[str, Any], given: Any = None) -> None:
        q, self.lse, self.given = arrays["q"], arrays["lse"], given
        self.starts = None if arrays.get("cu_seqlens_q") is None else dlpack.on_host(arrays["cu_seqlens_q"])
        self.is_large = of_rows.is_large(dlpack.on_host(self.lse), of_rows.bound_of(q.dtype, on_device=True))
        self.found = of_rows.full(self.lse.shape, of_rows.ABSENT)

    def run(
        self, launch: _Launch, pointers: list[int], maps: list[bytes], random: tuple[int, int], scratch: Any
    ) -> None:
        """Launch the kernels of a pass, or only those that find row sums."""
        kernels = [spec for spec in launch.plan.kernels if spec.grid]
        at = next((i for i, spec in enumerate(kernels) if spec.source == "helpers/backward_preprocess.cu"), None)
        first = 0 if at is None else at + 1
        launch.last_call = call = next(_calls)
        frame = launch.argument.frame(pointers, maps, random, launch.seqlen_k, call)
        _launch_kernels(launch, launch.kernels[:first], frame.address)
        if at is not None:
            self._exchange(launch.plan, dict(kernels[at].defines), scratch)
        if self.given is not None:
            _launch_kernels(launch, launch.kernels[first:], frame.address)
        launch.argument.give_back(frame)

    def _exchange(self, plan: LaunchPlan, defines: Mapping[str, Any], scratch: Any) -> None:
        layout, dtype = plan.scratch_layout, numpy_dtype(plan.problem.softmax_dtype)
        is_natural = plan.problem.dtype in ("float32", "float64") or defines["CUFLASH_NATURAL_SCORES"]
        unit = 1.0 if is_natural else math.log(2)
        shape = (*self.lse.shape[:-1], plan.run_time.stats_rows, 2)
        there = cupy.ndarray(shape, dtype, scratch + layout.offsets[layout.names.index("row_sums")])
        row_indices = self._row_indices(defines["CUFLASH_STATS_BLOCK"])
        large, at = self.is_large[..., : len(row_indices)], (..., cupy.asarray(row_indices), slice(None))
        if self.given is None:
            row_max, inverse = np.moveaxis(dlpack.on_host(there[at]).astype(np.float64), -1, 0)
            found = np.stack([row_max, 1 / inverse, np.full_like(row_max, unit)], axis=-1)
            self.found[..., : len(row_indices), :][large] = found[large]
        else:
            given = of_rows.in_units(dlpack.on_host(self.given), unit, dtype)[..., : len(row_indices), :]
            has_sum = cupy.asarray((large & (given[..., 1] >= 0))[..., None])
            there[at] = cupy.where(has_sum, cupy.asarray(given.astype(dtype)), there[at])

    def _row_indices(self, block: int) -> Any:
        """Where the kernels keep the rows: each packed sequence begins a block (common/schedule/schedule.cuh)."""
        if self.starts is None:
            return np.arange(self.lse.shape[-1])
        starts, counts = self.starts[:-1], np.diff(self.starts)
        firsts = (starts // block + np.arange(len(starts))) * block - starts
        return np.arange(self.starts[-1]) + np.repeat(firsts, counts)


def _record(
    recording: Recording,
    launch: _Launch,
    results: list[Any],
    pointers: list[int],
    seqlen_k: int,
    sums: PartialRowSums | None,
) -> None:
    """Record a launch, so that it can be repeated with other pointers."""

    def make(pointers: list[int]) -> Callable[[Any], None]:
        maps = _maps(launch, pointers, seqlen_k)
        return lambda call: _run(launch, pointers, maps, call.random, seqlen_k)

    if launch.copied or sums is not None:
        recording.spoil()
    reads = [pointer for name, pointer in zip(launch.names, pointers, strict=False) if name not in launch.results]
    recording.work(make, list(pointers), reads, results)


# ---- Calls without arrays of CuPy ------------------------------------------------------------------------------------


class RepeatedLaunch:
    """A launch that later calls repeat by the addresses of their arrays, without views of these as arrays of CuPy.

    It serves arrays with the signature of those of the first call: the same shapes, strides, dtypes and device, the
    same addresses modulo 16, and k and v that begin at one address, or do not, as before. Results share no memory with
    other arrays.
    """

    __slots__ = ("_device_id", "_launch", "_mapped", "_order", "_seqlen_k", "results")

    def __init__(
        self, launch: _Launch, order: Sequence[int], seqlen_k: int, mapped: int, device_id: int, results: Any
    ) -> None:
        self._launch, self._seqlen_k, self._mapped, self._device_id = launch, seqlen_k, mapped, device_id
        self._order = tuple(order)  # for each array of the launch, which of the caller's it is
        self.results = results  # what the caller needs to know to allocate its results

    @property
    def last_call(self) -> int:
        """The number of the last call of the launch."""
        return self._launch.last_call

    def run(
        self,
        addresses: Sequence[int],
        random: tuple[int, int],
        stream: int,
        allocate: Callable[[int, int], int],
        free: Callable[[int], object],
    ) -> None:
        """Launch on a stream. `addresses` are those of the arrays that the caller remembered, in its order.

        `allocate` gives scratch memory of so many bytes for a stream, and `free` takes it back in stream order.
        """
        launch, runtime, scratch = self._launch, cupy.cuda.runtime, 0
        pointers = [addresses[n] for n in self._order]
        before = runtime.getDevice()
        runtime.setDevice(self._device_id)  # also in a thread in which the device has no context yet
        try:
            if launch.scratch:
                scratch = allocate(launch.scratch_bytes, stream)
                pointers += [scratch + offset for offset in launch.scratch]
            _run(launch, pointers, _maps(launch, pointers, self._mapped), random, self._seqlen_k, stream)
        finally:
            if scratch:
                free(scratch)
            if before != self._device_id:
                runtime.setDevice(before)


def repeated(signature: tuple) -> RepeatedLaunch | None:
    """The launch that a call on arrays of a signature can repeat; None if it has to go the usual way."""
    return _repeated.get(signature) if of_thread.recording is None else None


@contextmanager
def remembered(signature: tuple, arrays: Sequence[Any], results: Any) -> Iterator[None]:
    """A context in which a call is made whose launch calls on arrays of the same signature repeat.

    `arrays` are all that the caller gives, those of results among them. A launch is remembered only if it does all of
    the work of the call: without copies, on these very arrays and no others.
    """
    launches: list[Any] = []
    before, of_thread.launches = of_thread.launches, launches
    try:
        yield
    finally:
        of_thread.launches = before
    if len(launches) != 1:  # calls for some of the batch axes each
        return
    launch, own, seqlen_k, mapped, sums = launches[0]
    given = [id(x) for x in own.values() if x is not None]
    numbers = {id(x): number for number, x in enumerate(arrays)}
    if launch.copied or launch.allocated or sums is not None or sorted(given) != sorted(numbers):
        return
    device_id = own["q"].data.device_id
    order = [numbers[x] for x in given]
    _keep(_repeated, signature, RepeatedLaunch(launch, order, seqlen_k, mapped, device_id, results))


# ---- What is prepared once -------------------------------------------------------------------------------------------


def _bind(pass_: Pass, options: Options, arrays: Mapping[str, Any], need: Collection[str]) -> Binding:
    """The binding of arrays that are all on one device, or of which only shape and dtype are known."""
    device_id = arrays["q"].data.device_id
    for name, array in arrays.items():
        if not (array is None or isinstance(array, Contiguous) or array.data.device_id == device_id):
            raise value_error(name, f"an array on device {array.data.device_id}", f"device {device_id}, where q is")
    return bind(pass_, options, arrays, need=need, address_of=_address_of)


def _address_of(array: Any) -> int:
    return 0 if isinstance(array, Contiguous) else array.data.ptr  # type: ignore[no-any-return]


def _launch_of(binding: Binding, plan: LaunchPlan, arrays: Mapping[str, Any], growing: Growing = FIXED) -> _Launch:
    """Compile and load the kernels of a plan, for calls on arrays like these, which are on the current device."""
    given = {name: array for name, array in arrays.items() if array is not None}
    layout = plan.scratch_layout
    pointers = (*given, *(name for name, _, _ in binding.allocated), *layout.names)
    any_length = plan.any_length and not binding.copied
    names, axis, seqlen_k, _ = growing
    keeps_maps = any_length and plan.hides_last_keys and names == INPUTS[1:]

    def extent_of(name: str) -> tuple[int, int]:
        shape = list(given[name].shape)
        if any_length and name in names:
            # The extent is that of the longest call that finds this launch.
            shape[axis] = -(-planned_length(seqlen_k) * shape[axis] // seqlen_k)
        return extent(given[name], shape)

    return _Launch(
        plan=plan,
        names=tuple(given),
        seqlen_k=plan.problem.seqlen_k,
        any_length=any_length,
        kernels=tuple(_load(kernel, arrays["q"].data.device_id) for kernel in plan.kernels if kernel.grid),
        run_overlapping=_driver().cuLaunchKernelEx,
        argument=Argument(plan, binding.operands, pointers),
        maps=tuple(
            (encoder(spec.of_any_rows), pointers.index(spec.name), 0 if spec.name in names else spec.shape[1])
            for spec in plan.tensor_maps
        ),
        results=binding.results,
        allocated=tuple((binding.results.index(name), shape, dtype) for name, shape, dtype in binding.allocated),
        copied=tuple((name, pointers.index(name)) for name in binding.copied),
        longest=planned_length(seqlen_k) if keeps_maps else 0,
        of_longest=tuple((name, extent_of(name)[1]) for name in names) if keeps_maps else (),
        scratch=layout.offsets,
        scratch_bytes=layout.nbytes,
        extents=tuple(map(extent_of, given)),
        given=tuple(
            (name, index, binding.results.index(name)) for index, name in enumerate(given) if name in binding.results
        ),
    )


def _load(kernel: KernelSpec, device_id: int) -> _Kernel:
    function = load_function(kernel, device_id)
    config_of = None
    if kernel.overlaps_previous and cupy.cuda.runtime.driverGetVersion() >= OVERLAP_IN_GRAPHS:
        sizes = kernel.grid, kernel.threads, kernel.shared_bytes
        config_of = functools.lru_cache(maxsize=64)(functools.partial(_overlapping_config, *sizes))
    return _Kernel(function, function.ptr, kernel.grid, kernel.threads, kernel.shared_bytes, config_of)


def _overlapping_config(grid: int, threads: int, shared_bytes: int, stream: int) -> Any:
    """The configuration of a PDL launch: blocks may start before the previous kernel has ended, and wait for it."""
    driver = _driver()
    attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


@functools.cache
def load_function(spec: KernelSpec, device_id: int) -> Any:
    """A kernel, compiled and loaded on the current device, which is `device_id`."""
    kernel = cupy.RawModule(path=str(compile_spec(spec).path)).get_function(spec.name)
    kernel.max_dynamic_shared_size_bytes = spec.shared_bytes
    return kernel.kernel


def _check_overlap(index: int, launch: _Launch, pointers: list[int], arrays: Mapping[str, Any]) -> None:
    """Refuse a result, the `index`-th array, that shares memory with another array of the call."""
    extents = launch.extents
    low, high = pointers[index] + extents[index][0], pointers[index] + extents[index][1]
    for other, (start, stop) in enumerate(extents):
        if other != index and low < pointers[other] + stop and pointers[other] + start < high:
            result = launch.names[index]
            check_no_overlap({name: arrays[name] for name in (result, launch.names[other])}, (result,))
