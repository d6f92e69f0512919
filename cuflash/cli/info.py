"""``info``: devices and their limits, versions, the compiler and its cache."""

from __future__ import annotations

import argparse
import platform
import re
from importlib import metadata
from types import ModuleType

from cuflash import cpu
from cuflash.arrays.array_info import DTYPES, numpy_dtype
from cuflash.arrays.units import in_bytes
from cuflash.cli import here
from cuflash.cli.cache import cached_kernels
from cuflash.cli.here import print_rows
from cuflash.cpu import core
from cuflash.cpu.jobs import count_cores
from cuflash.gpu import compiler, kernel_cache
from cuflash.gpu.nvrtc import NvrtcNotFoundError
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.binding import Contiguous
from cuflash.spec.options import Options
from cuflash.spec.passes import PASSES_WITHOUT_TANGENTS
from cuflash.spec.problem import make_problem

PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings")


def info(args: argparse.Namespace) -> int:
    rows = [("cuflash", f"{version_of('cuflash')}, kernels in {compiler.kernel_directory()}")]
    rows.append(("Python", f"{platform.python_version()}, {platform.platform()}"))
    rows.extend((name, version) for name in PACKAGES if (version := version_of(name)))
    rows.append(("CPU", f"{count_cores()} threads, {cpu.describe()}"))
    if core.why_not() is None and core.build_note():
        rows.append(("", f"built {core.build_note()}"))
    try:
        found = f"{compiler.nvrtc_version()}, compiles for {' '.join(compiler.supported_archs())}"
    except NvrtcNotFoundError as error:
        found = f"none: {' '.join(str(error).split())}"
    rows.append(("NVRTC", found))
    rows.append(("cache", f"{kernel_cache.cache_directory()}, {cached_kernels()}"))
    cupy, reason = here.find_gpu()
    if cupy is None:
        rows.append(("GPU", f"none: {reason}"))
    else:
        runtime = cupy.cuda.runtime
        rows.append(("CUDA", f"driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}"))
        rows.extend((f"GPU {i}", describe_device(cupy, i)) for i in range(runtime.getDeviceCount()))
    print_rows(rows)
    return 0


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed" if package == "cuflash" else None


def describe_device(cupy: ModuleType, index: int) -> str:
    from cuflash.gpu import backend as gpu_backend

    p, spec = cupy.cuda.runtime.getDeviceProperties(index), gpu_backend.device_spec(index)
    return (
        f"{p['name'].decode()}, compute capability {p['major']}.{p['minor']} ({served(spec)}), "
        f"{in_bytes(p['totalGlobalMem'])}, {p['multiProcessorCount']} SMs, "
        f"{p['sharedMemPerBlockOptin']} bytes of shared memory a block and {p['sharedMemPerMultiprocessor']} a "
        f"SM, L2 {in_bytes(p['l2CacheSize'])}"
    )


def served(device: DeviceSpec) -> str:
    """Which kernels serve a plain problem of each dtype on a device."""
    dtypes: dict[str, list[str]] = {}
    for dtype in DTYPES:
        q = Contiguous((1, 16, 4096, 128), numpy_dtype(dtype))
        problem = make_problem(Options(), q, q, q)
        try:
            plans = [choose_plan(problem, device, pass_) for pass_ in PASSES_WITHOUT_TANGENTS]
        except NotImplementedError as error:
            dtypes.setdefault(f"not served: {error}", []).append(dtype)
            continue
        families = {name for plan in plans for x in plan.kernels for name in re.findall(r"^(sm\d+)/", x.source)}
        dtypes.setdefault(f"by {' and '.join(sorted(families))} kernels", []).append(dtype)
    return "; ".join(f"{', '.join(names)} {kernels}" for kernels, names in dtypes.items())
