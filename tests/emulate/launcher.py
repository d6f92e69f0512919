"""`cuflash.gpu.backend` on the emulator: as much of CuPy and of the driver as launches ask for."""

import ctypes
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from cuflash import bound, dispatch
from cuflash.arrays.array_info import ITEMSIZE
from cuflash.emulator.building import build
from cuflash.emulator.memory import tensor_map
from cuflash.gpu import elementwise, merging
from cuflash.plan import DeviceSpec, KernelSpec, LaunchPlan
from cuflash.plan.argument import maps_offset
from cuflash.plan.tensor_map import BYTES, TensorMapSpec
from cuflash.shards import reductions
from cuflash.spec.call import prepare
from cuflash.spec.inputs import NAMES
from cuflash.spec.options import Options
from cuflash.spec.outputs import GRADIENTS, OUTPUTS, TAKEN_BY_BACKWARD
from cuflash.spec.passes import BACKWARD, FORWARD, Pass

ALIGNMENT = 256  # bytes, of an allocation on a device
OF_PASS: dict[Pass, tuple[str, ...]] = {
    FORWARD: OUTPUTS,
    BACKWARD: (*TAKEN_BY_BACKWARD, *GRADIENTS),
}


def allocated(nbytes: int) -> np.ndarray:
    """Memory full of NaN."""
    storage = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
    first = -storage.ctypes.data % ALIGNMENT
    return storage[first : first + nbytes]


class Pointer(NamedTuple):
    """To memory of the device, as CuPy's are: sums with a number of bytes are pointers."""

    ptr: int
    memory: np.ndarray

    def __add__(self, nbytes: int) -> "Pointer":  # type: ignore[override]
        return Pointer(self.ptr + nbytes, self.memory)


class DeviceArray(np.ndarray):
    """An array with as much of the interface of CuPy's as launches look at; new memory unless it is given."""

    def __new__(cls, shape: tuple[int, ...], dtype: Any, at: "Pointer | None" = None) -> Any:
        if at is not None:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return np.ndarray(shape, dtype, (ctypes.c_char * nbytes).from_address(at.ptr))
        memory = allocated(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return memory.view(dtype).reshape(shape).view(cls)

    @property
    def data(self) -> Any:
        memory = SimpleNamespace(ptr=self.ctypes.data, size=0)  # nothing is known of what lies after an array
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0, mem=memory)


def filled(shape: tuple[int, ...], value: Any, dtype: Any) -> DeviceArray:
    array = DeviceArray(shape, dtype)
    array[...] = value
    return array


class Launcher:
    """What `cuflash.gpu.backend` plans and launches. Kernels that it `launched` have run only if it `computes`."""

    # Modules of `cuflash.gpu`, as they are imported with a stand-in for CuPy.
    backend: Any
    launch: Any
    launch_cache: Any
    repeated_launches: Any

    def __init__(self, computes: bool) -> None:
        self._computes = computes
        self.kernels: Path | None = None  # a folder other than that of the package
        self.launched: list[KernelSpec] = []
        self.keeps_arguments = False
        self.arguments: list[bytes] = []  # of kernels that are launched, where they are kept
        self._loaded: list[KernelSpec] = []

    def plan(self, pass_: Pass, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...]) -> LaunchPlan:
        found: LaunchPlan = getattr(self.backend.plan(options, self._given(BACKWARD, arrays), need), pass_.name)
        return found

    def call(
        self, pass_: Pass, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...], random: tuple[int, int]
    ) -> tuple[np.ndarray, ...]:
        given = self._given(pass_, arrays)
        found = self.backend.compute(pass_, options, given, need if pass_ is BACKWARD else pass_.default, random)
        return tuple(x.view(np.ndarray) for x in found)

    def _given(self, pass_: Pass, arrays: Mapping[str, Any]) -> dict[str, Any]:
        absent = dict.fromkeys((*NAMES, *OF_PASS[pass_]))
        return absent | {name: x.view(DeviceArray) for name, x in arrays.items()}

    def load(self, spec: KernelSpec, device_id: int) -> Any:
        self._loaded.append(spec)
        return SimpleNamespace(ptr=len(self._loaded) - 1)

    def run(self, handle: int, *how: int) -> None:
        """cuLaunchKernel."""
        grid, _, _, threads, _, _, shared_bytes, _stream, argument, _extra = how
        spec = self._loaded[handle]
        assert (threads, shared_bytes) == (spec.threads, spec.shared_bytes)
        if spec.source == merging.SOURCE:
            self._merge(spec, grid, argument)
            return
        assert grid == spec.grid
        self.launched.append(spec)
        if not (self._computes or self.keeps_arguments):
            return
        launches = self.launch_cache._launches.values()
        (launch,) = (x for x in launches if handle in [kernel.handle for kernel in x.kernels])
        nbytes = int(dict(spec.defines)["CUFLASH_PARAMS_BYTES"])
        if spec.target == "sm_90a" and launch.plan.tensor_maps:  # else there is no padding after the struct
            nbytes = maps_offset(launch.plan.problem) + BYTES * len(launch.plan.tensor_maps)
        content = ctypes.string_at(ctypes.c_uint64.from_address(argument).value, nbytes)
        self.arguments.append(content)
        if self._computes:
            module = build(Path(spec.source), dict(spec.defines), headers=dict(spec.headers), kernels=self.kernels)
            module.launch(spec.name, content, grid=grid, threads=threads, shared_bytes=shared_bytes)

    def _merge(self, spec: KernelSpec, grid: int, argument: int) -> None:
        """Merges compute also where other kernels only count."""
        nbytes = int(dict(spec.defines)["CUFLASH_PARAMS_BYTES"])
        content = ctypes.string_at(ctypes.c_uint64.from_address(argument).value, nbytes)
        build(Path(spec.source), dict(spec.defines), kernels=self.kernels).launch(
            spec.name, content, grid=grid, threads=spec.threads, shared_bytes=0
        )


def encoder(spec: TensorMapSpec) -> Callable[[int, int], bytes]:
    """As that of `cuflash.plan.tensor_map`."""
    columns, _, heads, batch = spec.shape
    size, box = ITEMSIZE[spec.dtype], (spec.columns, spec.rows, spec.heads, 1)
    return lambda address, rows: tensor_map(
        address, size, (columns, rows, heads, batch), spec.strides_bytes, box
    ).tobytes()


@contextmanager
def launcher(arch: str, *, computes: bool) -> Iterator[Launcher]:
    """`cuflash.gpu.backend`, which takes the emulator for a GPU of this compute capability."""
    cupy: Any = ModuleType("cupy")
    cupy.ndarray = cupy.empty = DeviceArray
    cupy.full = filled
    cupy.zeros = lambda shape, dtype: filled(shape if isinstance(shape, tuple) else (shape,), 0, dtype)
    cupy.broadcast_to = functools.partial(np.broadcast_to, subok=True)
    cupy.where, cupy.asarray = np.where, np.asarray
    cupy.cuda = SimpleNamespace(
        Device=lambda device_id: nullcontext(),
        runtime=SimpleNamespace(getDevice=lambda: 0, setDevice=lambda device_id: None, driverGetVersion=lambda: 0),
        alloc=lambda nbytes: Pointer((memory := allocated(nbytes)).ctypes.data, memory),
        get_current_stream=lambda: SimpleNamespace(ptr=0),
    )
    modules = ("device", "launch", "launch_cache", "repeated_launches", "backend", "bound", "timing", "reductions")
    replaced = ("cupy", *(f"cuflash.gpu.{name}" for name in modules))
    before = {name: sys.modules.pop(name, None) for name in replaced}
    sys.modules["cupy"] = cupy
    forget_kernels()
    try:
        gpu_device: Any = importlib.import_module("cuflash.gpu.device")
        found = Launcher(computes)
        cupy.cuda.driver = SimpleNamespace(launchKernel=found.run)
        _replace(
            gpu_device,
            device_spec=lambda device_id: DeviceSpec.for_arch(arch),
            load_function=found.load,
            cuda_driver=lambda: SimpleNamespace(cuLaunchKernelEx=None),
        )
        for name in ("launch", "launch_cache", "repeated_launches", "backend"):  # they import those of the device
            setattr(found, name, importlib.import_module(f"cuflash.gpu.{name}"))
        _replace(found.launch, encoder=encoder)
        _replace(found.backend, with_resources=lambda plan: plan)  # it compiles for a GPU
        yield found
    finally:
        for name, previous in before.items():
            replaced_by = sys.modules.pop(name, None)
            if previous is not None:
                sys.modules[name] = previous
            folder, _, own = name.rpartition(".")
            if folder and getattr(package := sys.modules[folder], own, None) is replaced_by is not None:
                delattr(package, own)
                if previous is not None:
                    setattr(package, own, previous)
        forget_kernels()


def _replace(module: ModuleType, **stand_ins: Any) -> None:
    assert set(stand_ins) <= set(module.__dict__), "what they stand in for is gone"
    module.__dict__.update(stand_ins)


@contextmanager
def device(arch: str, *, computes: bool = False) -> Iterator[Launcher]:
    """A launcher behind the interface. Calls have the same number, and the same scratch memory."""
    with launcher(arch, computes=computes) as launches:
        launches.launch._call_numbers = itertools.repeat(7)
        launches.keeps_arguments = True
        cuda = sys.modules["cupy"].cuda  # type: ignore[attr-defined]
        cuda.alloc = functools.cache(cuda.alloc)
        backend_of = {"cupy": launches.backend}.__getitem__
        with mock.patch.object(dispatch, "backend_of", backend_of):
            yield launches


def arguments_of(launches: Launcher, call: Any) -> tuple[list[int], list[bytes], bool]:
    """The kernels that a call launches, with their arguments; and whether its arrays were looked at anew."""
    launches.launched.clear()
    launches.arguments.clear()
    prepared = mock.Mock(wraps=prepare)
    with mock.patch.object(dispatch, "prepare", prepared), mock.patch.object(bound, "prepare", prepared):
        results = call()
    assert all(type(x) is DeviceArray for x in results)
    return list(map(hash, launches.launched)), list(launches.arguments), prepared.called


def forget_kernels() -> None:
    """Forget what CuPy compiled: another stand-in for it makes other kernels of the same sources."""
    for module in (elementwise, merging, reductions):
        for made in vars(module).values():
            if hasattr(made, "cache_clear"):
                made.cache_clear()
