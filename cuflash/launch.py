"""From CuPy arrays to kernel launches: pointers, scratch memory, stream, and the cache that makes a call cheap.

The first call of a problem validates it, plans it and compiles or loads its kernels; the result is a `_Launch`, kept
under everything that it depends on: options, shapes, strides, dtypes, pointer alignment, device. Later calls look that
up, fill in the pointers and launch, on CuPy's current stream of the arrays' device, without a synchronisation.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import cupy
import numpy as np

from cuflash.compiler import compile_spec, with_resources
from cuflash.interop import overlap
from cuflash.params import Argument
from cuflash.plan import DeviceSpec, KernelSpec, LaunchPlan, Pass, access_bytes
from cuflash.problem import (
    DEFAULT_NEED,
    GRADIENTS,
    Operand,
    Options,
    Problem,
    check_array,
    gradient_operand,
    layout_of,
    make_problem,
    rows_of,
    value_error,
    vector_of,
)
from cuflash.tensor_map import encoder
from cuflash.tuning import candidates, tuned_plan

_OPTIONAL = (
    "bias",
    "mask",
    "kv_lengths",
    "alibi_slopes",
    "sinks",
    "block_mask",
    "block_table",
    "cu_seqlens_q",
    "cu_seqlens_k",
)
# Arrays over head dimensions that a pass reads, and what it returns.
_READ: dict[Pass, tuple[str, ...]] = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "out", "dout")}
_RESULTS: dict[Pass, tuple[str, ...]] = {"forward": ("out", "lse"), "backward": GRADIENTS}
# Results and gradients without an axis of head dimensions.
_NOT_OF_HEADS = ("lse", "dlse", "dbias", "dalibi_slopes", "dscale", "dsoftcap", "dsinks")


class Plans(NamedTuple):
    """The plans of both passes of one problem."""

    forward: LaunchPlan
    backward: LaunchPlan | None  # None with a block table, which it does not serve

    def describe(self) -> str:
        """Both plans in words."""
        if self.backward is None:
            return self.forward.describe() + "\nno backward pass with a block_table"
        return self.forward.describe() + "\n" + self.backward.describe()


class _Kernel(NamedTuple):
    function: Any  # cupy.cuda.Function, which keeps the module loaded
    handle: int  # of the same
    grid: int
    threads: int
    shared_bytes: int
    config_of: Callable[[int], Any] | None  # that of a launch on a stream, where it follows; None: it does not


@dataclass(frozen=True)
class _Launch:
    """Everything about a call but its pointers."""

    plan: LaunchPlan
    kernels: tuple[_Kernel, ...]
    run_behind: Callable[..., tuple[Any]]  # cuLaunchKernelEx
    argument: Argument  # with pointers of the arrays of the call, of the results it allocates, of scratch arrays
    maps: tuple[tuple[Callable[[int], bytes], int], ...]  # from an address to its map, and which of the pointers it is
    names: tuple[str, ...]  # of what it returns
    results: tuple[tuple[int, tuple[int, ...], Any], ...]  # index, shape and dtype of results that the call allocates
    scratch: tuple[int, ...]  # first byte of each scratch array in one allocation
    scratch_bytes: int  # of all of it
    extents: tuple[tuple[int, int], ...]  # bytes that each array of the call reaches, relative to its pointer
    given: tuple[int, ...]  # which of these arrays are results


class _Contiguous:
    """Shape, strides and dtype of a C-contiguous array that is not there yet."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.strides = tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))


@dataclass(frozen=True)
class _CopyFirst:
    """The call needs contiguous copies of these arrays: kernels read rows whose elements are neighbours."""

    names: tuple[str, ...]


GRAPHS_OF_FOLLOWERS = 12030  # the CUDA version of drivers from which on graphs hold launches that overlap
_launches: dict[tuple, _Launch | _CopyFirst] = {}


def forward(
    options: Options, q: Any, k: Any, v: Any, *, seed: int = 0, offset: int = 0, **arrays: Any
) -> tuple[Any, Any]:
    """(out, lse) of CuPy arrays. `arrays`: those of `_OPTIONAL`, out, lse, or None for each."""
    out, lse = _call("forward", options, {"q": q, "k": k, "v": v, **arrays}, (seed, offset))
    return out, lse


def backward(options: Options, *, seed: int = 0, offset: int = 0, **arrays: Any) -> tuple[Any, ...]:
    """The gradients, of CuPy arrays, that `arrays` has, be it None, in the order of `GRADIENTS`.

    `arrays`: dout, out, lse, those that `forward` reads, and dlse, or None for it; gradients that are wanted.
    """
    return _call("backward", options, arrays, (seed, offset))


def plan(options: Options, q: Any, k: Any, v: Any, *, need: Collection[str] = DEFAULT_NEED, **arrays: Any) -> Plans:
    """What `forward` and `backward` would run, compiled, with the registers that the kernels take."""
    problem = make_problem(options, q, k, v, **arrays)
    device = device_spec(q.data.device_id)
    pointers = q.data.ptr | k.data.ptr | v.data.ptr
    load_bytes = access_bytes((problem.q, problem.k, problem.v), pointers)
    operands = {
        name: gradient_operand(name, problem, _Contiguous(arrays[name[1:]].shape, arrays[name[1:]].dtype))
        for name in ("dbias", "dalibi_slopes")
        if arrays.get(name[1:]) is not None
    }
    forward = with_resources(tuned_plan(problem, device, "forward", load_bytes=load_bytes))
    if problem.block_table is not None:
        return Plans(forward, None)
    backward = tuned_plan(problem, device, "backward", load_bytes=load_bytes, operands=operands, need=need)
    return Plans(forward, with_resources(backward))


def compile(options: Options, q: Any, k: Any, v: Any, *, need: Collection[str] = DEFAULT_NEED, **arrays: Any) -> None:
    """Compile and load the kernels of both passes, and let CuPy's pool of the current stream grow to what they take.

    A later call on arrays of these shapes and strides compiles nothing and takes no new memory from the device. Runs
    both passes once on the given arrays, or, with a block table, the only one that there is.
    """
    given = {"q": q, "k": k, "v": v, **arrays}
    with cupy.cuda.Device(q.data.device_id):
        out, lse = _call("forward", options, given)
        if given.get("block_table") is not None:
            return
        dout = cupy.zeros_like(out)
        wanted = dict.fromkeys(need)
        _call("backward", options, {"dout": dout, "out": out, "lse": lse, **given, **wanted})


def trials(
    pass_: Pass, options: Options, arrays: dict[str, Any], random: tuple[int, int]
) -> tuple[tuple[LaunchPlan, ...], Callable[[LaunchPlan], Callable[[], tuple[Any, ...]]]]:
    """The plans that tuning tries for a call, and what makes of one of them the call that runs it.

    `arrays` are those of `forward` or `backward`, without results; CuPy's current device is that of the arrays.
    """
    found: tuple[LaunchPlan, ...] = ()
    if pass_ == "backward":
        arrays = arrays | dict.fromkeys(DEFAULT_NEED)

    def all_of(problem: Problem, device: DeviceSpec, pass_: Pass, **layout: Any) -> LaunchPlan:
        nonlocal found
        found = candidates(problem, device, pass_, **layout)
        return found[0]

    first = _prepare(pass_, options, arrays, all_of)
    if isinstance(first, _CopyFirst):
        arrays = arrays | {name: cupy.ascontiguousarray(arrays[name]) for name in first.names}
        _prepare(pass_, options, arrays, all_of)
    pointers = [array.data.ptr for array in arrays.values() if array is not None]

    def call_by(plan: LaunchPlan) -> Callable[[], tuple[Any, ...]]:
        launch = cast(_Launch, _prepare(pass_, options, arrays, lambda *args, **layout: plan))
        return lambda: _start(launch, arrays, list(pointers), random)

    return found, call_by


def forget_launches() -> None:
    """Later calls are planned again."""
    _launches.clear()


@functools.cache
def device_spec(device_id: int) -> DeviceSpec:
    """The device's limits, as CUDA reports them."""
    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    return DeviceSpec(
        name=properties["name"].decode(),
        arch=10 * properties["major"] + properties["minor"],
        num_sms=properties["multiProcessorCount"],
        shared_bytes_per_block=properties["sharedMemPerBlockOptin"],
        shared_bytes_per_sm=properties["sharedMemPerMultiprocessor"],
    )


def _call(pass_: Pass, options: Options, arrays: dict[str, Any], random: tuple[int, int] = (0, 0)) -> tuple[Any, ...]:
    """Run one pass. `arrays` holds the inputs by name, and results where the caller gives them.

    `random` is the seed and the offset of dropout, which are no part of the problem.
    """
    device_id = arrays["q"].data.device_id
    key: list[Any] = [pass_, options, *arrays]
    pointers: list[int] = []
    for name, array in arrays.items():
        if array is not None:
            memory = array.data
            pointer = memory.ptr
            pointers.append(pointer)
            key += (name, array.shape, array.strides, array.dtype, pointer & 15, memory.device_id)
    launch = _launches.get(tuple(key))
    if device_id != cupy.cuda.runtime.getDevice():
        with cupy.cuda.Device(device_id):
            return _call(pass_, options, arrays, random)
    if launch is None:
        launch = _launches[tuple(key)] = _prepare(pass_, options, arrays)
    if isinstance(launch, _CopyFirst):
        return _call_on_copies(pass_, options, arrays, random, launch.names)
    return _start(launch, arrays, pointers, random)


def _start(
    launch: _Launch,
    arrays: Mapping[str, Any],
    pointers: list[int],
    random: tuple[int, int],
) -> tuple[Any, ...]:
    """Launch on the current device. `pointers` are those of the arrays that are given."""
    for index in launch.given:
        _check_overlap(index, launch.extents, pointers, arrays)

    results = [arrays.get(name) for name in launch.names]
    for index, shape, dtype in launch.results:
        results[index] = array = cupy.ndarray(shape, dtype)
        pointers.append(array.data.ptr)
    if launch.scratch:
        scratch = cupy.cuda.alloc(launch.scratch_bytes)  # goes back to the pool in stream order
        first = scratch.ptr
        pointers += [first + offset for offset in launch.scratch]
    argument = launch.argument.of(pointers, [map_of(pointers[index]) for map_of, index in launch.maps], random)
    # Beside an H200 a launch took 3.0 us so and 3.6 us by cuda.bindings; in another run 3.9 by that and 5.3 by CuPy's
    # kernel object.
    run, kernel_params = cupy.cuda.driver.launchKernel, ctypes.addressof(argument)
    stream = cupy.cuda.get_current_stream().ptr
    for _, handle, grid, threads, shared_bytes, config_of in launch.kernels:
        if config_of is None:
            run(handle, grid, 1, 1, threads, 1, 1, shared_bytes, stream, kernel_params, 0)
        else:
            (error,) = launch.run_behind(config_of(stream), handle, kernel_params, 0)
            if error.value:
                raise RuntimeError(f"cuLaunchKernelEx returned {error.name}")
    return tuple(results)


def _results(pass_: Pass, arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of what a call returns."""
    return tuple(name for name in GRADIENTS if name in arrays) if pass_ == "backward" else _RESULTS[pass_]


def _prepare(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], choose: Callable[..., LaunchPlan] = tuned_plan
) -> _Launch | _CopyFirst:
    """Validate, plan, compile and load: once for each problem. `choose` has the parameters of `choose_plan`."""
    given = {name: array for name, array in arrays.items() if array is not None}
    names = _results(pass_, arrays)
    problem = make_problem(options, *(arrays[name] for name in "qkv"), **{name: arrays.get(name) for name in _OPTIONAL})
    device_id = arrays["q"].data.device_id
    for name, array in given.items():
        if array.data.device_id != device_id:
            raise value_error(name, f"an array on device {array.data.device_id}", f"device {device_id}, where q is")
    expected = _expected(problem, arrays)
    for name in given.keys() & expected.keys():
        check_array(name, arrays[name], *expected[name])
    for name in given.keys() & set(names):
        if any(n > 1 and stride == 0 for n, stride in zip(given[name].shape, given[name].strides, strict=True)):
            raise value_error(name, f"strides {given[name].strides}", "elements that do not share memory")

    scattered = tuple(
        name
        for name, array in given.items()
        if name not in (*_OPTIONAL, *_NOT_OF_HEADS)
        and array.size
        and array.shape[-1] > 1
        and array.strides[-1] != array.itemsize
    )
    if scattered:
        return _CopyFirst(scattered)

    results = tuple(
        (index, expected[name][0], _dtype(expected[name][1], arrays["q"].dtype))
        for index, name in enumerate(names)
        if name not in given
    )
    arrays_of = {name: x for name, x in given.items() if name not in _OPTIONAL}
    arrays_of |= {names[index]: _Contiguous(shape, dtype) for index, shape, dtype in results}
    operands = {name: _operand(name, x, problem) for name, x in arrays_of.items() if name not in ("dscale", "dsoftcap")}

    def aligned_bytes(names: tuple[str, ...]) -> int:
        pointers = [given[name].data.ptr for name in names if name in given]
        return access_bytes(tuple(operands[name] for name in names), functools.reduce(int.__or__, pointers, 16))

    written = tuple(name for name in names if name not in _NOT_OF_HEADS)
    plan = choose(
        problem,
        device_spec(device_id),
        pass_,
        load_bytes=aligned_bytes(_READ[pass_]),
        store_bytes=aligned_bytes(written),
        operands=operands,
        need=names,
    )
    pointers = (*given, *(names[index] for index, _, _ in results), *(name for name, _ in plan.scratch))
    sizes = [np.dtype(problem.softmax_dtype).itemsize * elements for _, elements in plan.scratch]
    return _Launch(
        plan=plan,
        kernels=tuple(_load(kernel, device_id) for kernel in plan.kernels if kernel.grid),
        run_behind=_driver().cuLaunchKernelEx,
        argument=Argument(plan, operands, pointers),
        maps=tuple((encoder(spec), pointers.index(spec.name)) for spec in plan.tensor_maps),
        names=names,
        results=results,
        scratch=tuple(sum(sizes[:i]) for i in range(len(sizes))),
        scratch_bytes=plan.extra_bytes,
        extents=tuple(_extent(array) for array in given.values()),
        given=tuple(i for i, name in enumerate(given) if name in names),
    )


def _load(kernel: KernelSpec, device_id: int) -> _Kernel:
    function = _function(str(compile_spec(kernel).path), kernel.name, kernel.shared_bytes, device_id)
    config_of = None
    if kernel.follows and cupy.cuda.runtime.driverGetVersion() >= GRAPHS_OF_FOLLOWERS:
        sizes = kernel.grid, kernel.threads, kernel.shared_bytes
        config_of = functools.lru_cache(maxsize=64)(functools.partial(_config_of_follower, *sizes))
    return _Kernel(function, function.ptr, kernel.grid, kernel.threads, kernel.shared_bytes, config_of)


def _config_of_follower(grid: int, threads: int, shared_bytes: int, stream: int) -> Any:
    """That of a kernel whose blocks may start before the kernel in front of it has ended: it waits for that itself."""
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
def _function(path: str, name: str, shared_bytes: int, device_id: int) -> Any:
    """The kernel of a cubin, loaded on the current device, which is `device_id`."""
    kernel = cupy.RawModule(path=path).get_function(name)
    kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel.kernel


def _expected(problem: Problem, arrays: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array that follows from the problem."""
    expected = {"out": (problem.out_shape, problem.dtype), "dout": (problem.out_shape, problem.dtype)}
    expected |= {f"d{name}": (tuple(arrays[name].shape), problem.dtype) for name in "qkv"}
    expected |= {name: (problem.lse_shape, problem.softmax_dtype) for name in ("lse", "dlse")}
    expected |= {name: ((), problem.softmax_dtype) for name in ("dscale", "dsoftcap")}
    for name in ("bias", "alibi_slopes", "sinks"):
        if arrays.get(name) is not None:
            expected[f"d{name}"] = (tuple(arrays[name].shape), arrays[name].dtype.name)
    return expected


def _dtype(name: str, of_inputs: np.dtype[Any]) -> np.dtype[Any]:
    """NumPy's dtype by its name, which for bfloat16 only an array of it has."""
    return of_inputs if name == of_inputs.name else np.dtype(name)


def _operand(name: str, array: Any, problem: Problem) -> Operand:
    """An array of the call that is not in the problem, as kernels see it."""
    if name in ("dbias", "dalibi_slopes"):
        return gradient_operand(name, problem, array)
    if name == "dsinks":
        return vector_of(array)
    return rows_of(array) if name in _NOT_OF_HEADS else layout_of(array, problem.layout)


def _call_on_copies(
    pass_: Pass, options: Options, arrays: dict[str, Any], random: tuple[int, int], names: tuple[str, ...]
) -> tuple[Any, ...]:
    """Run on contiguous copies of the arrays `names`; copy results among them back."""
    results = _results(pass_, arrays)
    copies = {name: None if name in results else cupy.ascontiguousarray(arrays[name]) for name in names}
    computed = _call(pass_, options, {**arrays, **copies}, random)
    for name, value in zip(results, computed, strict=True):
        if name in names:
            arrays[name][...] = value
    return tuple(arrays[name] if name in names else value for name, value in zip(results, computed, strict=True))


def _extent(array: Any) -> tuple[int, int]:
    """Bytes from the pointer of an array to its lowest byte and past its highest."""
    if not array.size:
        return 0, 0
    reaches = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    return sum(r for r in reaches if r < 0), sum(r for r in reaches if r > 0) + array.itemsize


def _check_overlap(
    index: int, extents: tuple[tuple[int, int], ...], pointers: list[int], arrays: Mapping[str, Any]
) -> None:
    """Refuse a result, the `index`-th array, that shares memory with another array of the call."""
    low, high = pointers[index] + extents[index][0], pointers[index] + extents[index][1]
    for other, (start, stop) in enumerate(extents):
        if other != index and low < pointers[other] + stop and pointers[other] + start < high:
            given = [(name, array) for name, array in arrays.items() if array is not None]
            if overlap(given[index][1], given[other][1]):
                raise value_error(given[index][0], f"memory shared with {given[other][0]}", "memory of its own")
