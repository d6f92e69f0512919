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
from cuflash.cli.documents import Document, print_document
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
    found = facts()
    if args.json:
        print_document("info", found)
    else:
        print_rows(rows_of(found))
    return 0


def facts() -> Document:
    """What there is to know, by name."""
    files = kernel_cache.cached_files(kernel_cache.cache_directory())
    cupy, why_no_gpu = here.find_gpu()
    found: Document = {
        "kernels": str(compiler.kernel_directory()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "cpu": {
            "threads": count_cores(),
            "core": cpu.describe(),
            "built": core.build_note() or None if core.why_not() is None else None,
            "why_no_core": core.why_not(),
        },
        "nvrtc": {"version": None, "archs": [], "why_not": None},
        "cache": {
            "directory": str(kernel_cache.cache_directory()),
            "kernels": sum(file.path.suffix == ".cubin" for file in files),
            "bytes": sum(file.size_bytes for file in files),
            "limit_bytes": kernel_cache.cache_limit(),
        },
        "cuda": None,
        "gpus": [],
        "why_no_gpu": why_no_gpu or None,
    }
    try:
        found["nvrtc"] |= {"version": compiler.nvrtc_version(), "archs": list(compiler.supported_archs())}
    except NvrtcNotFoundError as error:
        found["nvrtc"]["why_not"] = " ".join(str(error).split())
    if cupy is not None:
        runtime = cupy.cuda.runtime
        found["cuda"] = {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}
        found["gpus"] = [facts_of_device(cupy, i) for i in range(runtime.getDeviceCount())]
    return found


def rows_of(found: Document) -> list[tuple[str, str]]:
    """The facts in words."""
    rows = [("cuflash", f"{version_of('cuflash')}, kernels in {found['kernels']}")]
    rows.append(("Python", f"{found['python']}, {found['platform']}"))
    rows.extend(found["packages"].items())
    rows.append(("CPU", f"{found['cpu']['threads']} threads, {found['cpu']['core']}"))
    if found["cpu"]["built"]:
        rows.append(("", f"built {found['cpu']['built']}"))
    nvrtc = found["nvrtc"]
    compiles = f"{nvrtc['version']}, compiles for {' '.join(nvrtc['archs'])}"
    rows.append(("NVRTC", f"none: {nvrtc['why_not']}" if nvrtc["why_not"] else compiles))
    rows.append(("cache", f"{found['cache']['directory']}, {cached_kernels()}"))
    if found["why_no_gpu"]:
        rows.append(("GPU", f"none: {found['why_no_gpu']}"))
    if found["cuda"]:
        rows.append(("CUDA", f"driver {found['cuda']['driver']}, runtime {found['cuda']['runtime']}"))
    return rows + [(f"GPU {i}", device_in_words(device)) for i, device in enumerate(found["gpus"])]


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed" if package == "cuflash" else None


def facts_of_device(cupy: ModuleType, index: int) -> Document:
    from cuflash.gpu.device import device_spec

    p = cupy.cuda.runtime.getDeviceProperties(index)
    return {
        "name": p["name"].decode(),
        "capability": f"{p['major']}.{p['minor']}",
        "dtypes": served(device_spec(index)),
        "memory_bytes": p["totalGlobalMem"],
        "sms": p["multiProcessorCount"],
        "shared_bytes_per_block": p["sharedMemPerBlockOptin"],
        "shared_bytes_per_sm": p["sharedMemPerMultiprocessor"],
        "l2_bytes": p["l2CacheSize"],
    }


def device_in_words(device: Document) -> str:
    by_kernels: dict[str, list[str]] = {}
    for dtype, kernels in device["dtypes"].items():
        by_kernels.setdefault(kernels, []).append(dtype)
    dtypes = "; ".join(f"{', '.join(names)} {kernels}" for kernels, names in by_kernels.items())
    return (
        f"{device['name']}, compute capability {device['capability']} ({dtypes}), {in_bytes(device['memory_bytes'])}, "
        f"{device['sms']} SMs, {in_bytes(device['shared_bytes_per_block'])} of shared memory a block and "
        f"{in_bytes(device['shared_bytes_per_sm'])} an SM, L2 {in_bytes(device['l2_bytes'])}"
    )


def served(device: DeviceSpec) -> dict[str, str]:
    """Which kernels serve a plain problem on a device, or why none do, by dtype."""
    found = {}
    for dtype in DTYPES:
        q = Contiguous((1, 16, 4096, 128), numpy_dtype(dtype))
        problem = make_problem(Options(), q, q, q)
        try:
            plans = [choose_plan(problem, device, pass_) for pass_ in PASSES_WITHOUT_TANGENTS]
        except NotImplementedError as error:
            found[dtype] = f"not served: {error}"
            continue
        families = {name for plan in plans for x in plan.kernels for name in re.findall(r"^(sm\d+)/", x.source)}
        found[dtype] = f"by {' and '.join(sorted(families))} kernels"
    return found
