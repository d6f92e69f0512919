"""``cache``: where compiled kernels are kept and what they take, and to clear it."""

from __future__ import annotations

import argparse

from cuflash.arrays.checks import counted
from cuflash.arrays.units import in_bytes
from cuflash.cli.here import Failure, print_rows
from cuflash.emulator import building
from cuflash.gpu import kernel_cache, tuning


def add_cache_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--clear", action="store_true", help="remove the compiled kernels")
    command.add_argument("--tuned", action="store_true", help="with --clear: also what tuning remembers")


def cache(args: argparse.Namespace) -> int:
    if args.tuned and not args.clear:
        raise Failure("--tuned goes with --clear")
    if args.clear:
        removed = kernel_cache.clear_cache(kernel_cache.cache_directory())
        emulated = building.clear_cache()
        forgotten = f", and {counted(tuning.forget_all(), 'tuned problem')}" if args.tuned else ""
        others = f", and {counted(emulated, 'kernel')} of the emulator" if emulated else ""
        print(f"removed {kernels_among(removed)}{others}{forgotten}")
        return 0
    rows = [("directory", str(kernel_cache.cache_directory())), ("kernels", cached_kernels())]
    modules = building.cached_modules()
    if modules:
        size = in_bytes(sum(path.stat().st_size for path in modules))
        rows.append(("emulator", f"{counted(len(modules), 'kernel')}, {size}, not counted above"))
    print_rows([*rows, ("tuning", f"{counted(len(tuning.remembered()), 'tuned problem')}, not counted above")])
    return 0


def cached_kernels() -> str:
    """How many there are, what they take, and what they may take."""
    files = kernel_cache.cached_files(kernel_cache.cache_directory())
    return f"{kernels_among(files)} of at most {in_bytes(kernel_cache.cache_limit())}"


def kernels_among(files: list[kernel_cache.CachedFile]) -> str:
    kernels = sum(file.path.suffix == ".cubin" for file in files)
    return f"{counted(kernels, 'kernel')}, {in_bytes(sum(file.size_bytes for file in files))}"
