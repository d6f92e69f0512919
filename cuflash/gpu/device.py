"""What CUDA says of a device, and kernels that are compiled and loaded on it."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy

from cuflash.gpu.compiler import compile_spec
from cuflash.plan import DeviceSpec, KernelSpec

MEMORY_CLOCK_AND_WIDTH = (36, 37)  # cudaDevAttrMemoryClockRate in kHz, cudaDevAttrGlobalMemoryBusWidth in bits
OVERLAP_IN_GRAPHS = 12030  # from this CUDA version of the driver on, graphs can hold launches that overlap


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
    earlier_arch = os.environ.get("CUFLASH_ARCH")
    return spec.as_arch(earlier_arch) if earlier_arch else spec


def _bytes_per_s(device_id: int) -> float:
    """The bandwidth of device memory: two transfers per clock, over the width of the bus."""
    clock_khz, bits = (cupy.cuda.runtime.deviceGetAttribute(x, device_id) for x in MEMORY_CLOCK_AND_WIDTH)
    return 2 * 1e3 * clock_khz * bits / 8


class Kernel(NamedTuple):
    """A kernel that is loaded on a device, and how it is launched."""

    function: Any  # cupy.cuda.Function, which keeps the module loaded
    handle: int  # of the function
    grid: int
    threads: int
    shared_bytes: int
    config_of: Callable[[int], Any] | None  # by stream, for a launch that overlaps the kernel before; or None


def load_kernel(kernel: KernelSpec, device_id: int) -> Kernel:
    """A kernel of a plan, compiled and loaded on the current device, which is `device_id`."""
    function = load_function(kernel, device_id)
    config_of = None
    if kernel.overlaps_previous and cupy.cuda.runtime.driverGetVersion() >= OVERLAP_IN_GRAPHS:
        sizes = kernel.grid, kernel.threads, kernel.shared_bytes
        config_of = functools.lru_cache(maxsize=64)(functools.partial(_overlapping_config, *sizes))
    return Kernel(function, function.ptr, kernel.grid, kernel.threads, kernel.shared_bytes, config_of)


def _overlapping_config(grid: int, threads: int, shared_bytes: int, stream: int) -> Any:
    """The configuration of a PDL launch: blocks may start before the previous kernel has ended, and wait for it."""
    driver = cuda_driver()
    attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    config.attrs, config.numAttrs = [attribute], 1
    return config


def cuda_driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


@functools.cache
def load_function(spec: KernelSpec, device_id: int) -> Any:
    """A kernel, compiled and loaded on the current device, which is `device_id`."""
    kernel = cupy.RawModule(path=str(compile_spec(spec).path)).get_function(spec.name)
    kernel.max_dynamic_shared_size_bytes = spec.shared_bytes
    return kernel.kernel
