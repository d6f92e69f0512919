"""What there is here: devices, and what they are called."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from types import ModuleType

import numpy as np

from cuflash.arrays.units import WIDTH
from cuflash.cpu.jobs import available_cores
from cuflash.plan import DeviceSpec

NO_GPU = "there is no GPU here"
NAME_ONE = "for one that is elsewhere give its compute capability, such as --arch 9.0"
INSTALL_CUPY = 'pip install "cupy-cuda13x[ctk]", or cupy-cuda12x for a driver of CUDA 12'


class Failure(Exception):
    """Why a command cannot do what it was asked to, in one line."""


def find_gpu() -> tuple[ModuleType | None, str]:
    """CuPy, if it is installed and finds a device, and else why not."""
    try:
        import cupy
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        return None, f"CuPy is not installed: {INSTALL_CUPY}" if is_missing else f"CuPy is not importable ({error})"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return None, f"CuPy finds no device ({error})"
    return cupy, ""


def array_module(backend: str | None) -> ModuleType:
    """CuPy or NumPy, as `--backend` says; without it CuPy where there is a device."""
    if backend == "cpu":
        return np
    cupy, reason = find_gpu()
    if cupy is None and backend == "gpu":
        raise Failure(f"{NO_GPU}: {reason}")
    return cupy or np


def local_device() -> DeviceSpec | None:
    """The current device of CuPy, None without one."""
    cupy, _ = find_gpu()
    if cupy is None:
        return None
    from cuflash.gpu.device import device_spec

    return device_spec(cupy.cuda.Device().id)


def devices(args: argparse.Namespace) -> list[DeviceSpec]:
    """The devices that `--arch` names, or the one here; none without either."""
    if args.arch:
        return [DeviceSpec.for_arch(arch) for arch in args.arch]
    device = local_device()
    return [] if device is None else [device]


def describe_here(xp: ModuleType) -> str:
    if xp is np:
        return f"the CPU, {available_cores()} cores, NumPy {np.__version__}"
    properties = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)
    return f"{properties['name'].decode()}, CuPy {xp.__version__}"


def columns() -> int:
    """Columns of the lines of plans: those of the terminal, if it has fewer than other outputs get."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if is_terminal else WIDTH


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Names and what there is to say about them, in two columns; wrapped on a terminal, and elsewhere a line a row."""
    width = max(len(name) for name, _ in rows) + 2
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    room = max(20, shutil.get_terminal_size().columns - width) if on_terminal else sys.maxsize
    for name, text in rows:
        first, *others = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        print("\n".join([f"{name:<{width}}{first}", *(f"{'':<{width}}{line}" for line in others)]))
