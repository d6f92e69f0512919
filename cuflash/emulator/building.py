"""Kernels compiled for the CPU with g++, and kept in a folder next to those that are compiled for a GPU."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cuflash.emulator.launching import EmulationError, Module
from cuflash.gpu import kernel_cache
from cuflash.gpu.compiler import kernel_directory

HERE = Path(__file__).resolve().parent
RUNTIME = HERE / "runtime"
OTHER_SYSTEMS = ("darwin", "win32")  # whose g++ is another compiler, or whose memory has other functions
NO_COMPILER = "it is g++, on Linux alone, where it is not on the path: apt-get install g++"

_COMMON_FLAGS = (
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-g1",  # lines of faults
    "-fvisibility=hidden",
    "-fno-gnu-unique",  # modules must not share variables
    "-ffp-contract=off",
    "-fno-strict-aliasing",  # CUDA code reinterprets what pointers point to
)
_RUNTIME_FLAGS = ("-O2",)  # kernels run as fast as with -O3, which takes a quarter longer to compile
# The trap becomes a signal, and the signal an EmulationError. "address" works only in a process that was started with
# the environment of sanitizer_environment().
_SANITIZER_FLAGS = {
    None: ("-Og",),  # most kernels run for less time than they take to compile
    "undefined": ("-Og", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"),
    "address": ("-Og", "-fsanitize=address", "-fno-omit-frame-pointer"),
}


def find_compiler() -> str | None:
    """The path of g++ of Linux, or None."""
    return None if sys.platform in OTHER_SYSTEMS else shutil.which("g++")


def build(
    source: Path,
    defines: Mapping[str, object] | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    sanitizer: str | None = None,
    kernels: Path | None = None,
    cache: Path | None = None,
) -> Module:
    """Compile a file of `kernels` for the CPU, or take it from the cache.

    `headers` are those that it includes besides the files of `kernels`, by unique names; `kernels` and `cache` stand in
    for `cuflash.gpu.compiler.kernel_directory()` and `cache_directory()`. EmulationError has the compiler's output.
    """
    kernels = kernel_directory() if kernels is None else kernels
    cache = cache_directory() if cache is None else cache
    try:
        return _built_in(_private.get(cache, cache), source, defines, headers or {}, sanitizer, kernels)
    except _UnusableError as error:
        kernel_cache.warn_of_private_directory(cache, error.reason)
        _private[cache] = kernel_cache.private_directory() / "emulated"
    return _built_in(_private[cache], source, defines, headers or {}, sanitizer, kernels)


class _UnusableError(Exception):
    """Nothing can be stored in a directory of modules, or looked up there."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


# Directories of modules that cannot be used, and those of this process that are used instead.
_private: dict[Path, Path] = {}


@contextlib.contextmanager
def _in_cache() -> Iterator[None]:
    """Tells errors of the directory of modules from those of other files."""
    try:
        yield
    except OSError as error:
        raise _UnusableError(error) from error


def _built_in(
    cache: Path,
    source: Path,
    defines: Mapping[str, object] | None,
    headers: Mapping[str, str],
    sanitizer: str | None,
    kernels: Path,
) -> Module:
    """The module, compiled into a directory or taken from it."""
    folder = cache / "headers"
    for name, text in headers.items():
        with _in_cache():
            kernel_cache.make_own_directory(folder)
            if not (folder / name).exists():
                kernel_cache.write_atomically(folder / name, text.encode())
    request = (kernels / source, tuple(sorted((defines or {}).items())), sanitizer, kernels, cache)
    key = (find_compiler(), *request)
    module, of_files = _built.get(key, (None, {}))
    if module is None or not module.library.exists() or _status(of_files) != of_files:
        module, files = _build(*request)
        _built[key] = module, _status(files)
    return module


# What this process has built, with the size and the time of every file that it was made of: each launch asks for its
# module, and to read and to hash all files takes longer than many a launch.
_built: dict[tuple[Any, ...], tuple[Module, dict[Path, tuple[int, int]]]] = {}


def _status(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    found = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found[path] = (status.st_size, status.st_mtime_ns)
    return found


def _build(
    source: Path, defines: Sequence[tuple[str, object]], sanitizer: str | None, kernels: Path, cache: Path
) -> tuple[Module, list[Path]]:
    """The module, and the files that it is made of."""
    definitions = [f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in defines]
    runtime = _build_runtime(sanitizer, cache)
    # The runtime's name stands for what it is made of: a module stays linked to the one that it was built for.
    flags = [*_COMMON_FLAGS, *_SANITIZER_FLAGS[sanitizer], *definitions, f"-DCUFLASH_RUNTIME={runtime.stem}"]
    header = HERE / "ptx_emulated.h"
    files = _included_files([source, header], [kernels, HERE])
    arguments = [
        f'-DCUFLASH_EMULATION="{header}"',
        f"-I{kernels}",
        f"-I{cache / 'headers'}",
        *("-x", "c++", str(source), "-x", "none", str(runtime)),
    ]
    module = Module(_compile(f"{source.parent.name}_{source.stem}", flags, files, arguments, cache))
    return module, [*files, *_included_files(sorted(RUNTIME.glob("*.cc")), [RUNTIME])]


def _build_runtime(sanitizer: str | None, cache: Path) -> Path:
    # Undefined behaviour is looked for in kernels alone; address errors only show if every store is instrumented.
    flags = [*_COMMON_FLAGS, *_RUNTIME_FLAGS, *(_SANITIZER_FLAGS["address"] if sanitizer == "address" else ())]
    sources = sorted(RUNTIME.glob("*.cc"))
    # As one file: half of the time goes into the headers of the standard library, which then are read once.
    arguments = [*(f"-include{source}" for source in sources), "-x", "c++", os.devnull]
    return _compile("runtime", flags, _included_files(sources, [RUNTIME]), arguments, cache)


def _included_files(sources: Sequence[Path], folders: Sequence[Path]) -> list[Path]:
    """`sources` and the files that they include from `folders`, directly or not."""
    found: dict[Path, None] = {}
    pending = list(sources)
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found[path] = None
        status = path.stat()
        pending += _includes(path, tuple(folders), status.st_size, status.st_mtime_ns)
    return sorted(found)


@functools.cache
def _includes(path: Path, folders: tuple[Path, ...], _size: int, _time: int) -> list[Path]:
    """The files that a file, of this size and time, includes itself: each build asks for those of all its headers."""
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text("utf-8"), re.MULTILINE)
    return [folder / name for name in names for folder in (path.parent, *folders) if (folder / name).is_file()]


def _compile(name: str, flags: Sequence[str], files: Sequence[Path], arguments: Sequence[str], cache: Path) -> Path:
    """The shared library made of `files`; its file name is the hash of all that went into it, wherever that lay.

    `arguments` say where: they name files and folders. So kernels that a change does not touch are found again in a
    copy of the folder.
    """
    compiler = find_compiler()
    if compiler is None:
        raise EmulationError(name, f"no C++ compiler: {NO_COMPILER}")
    key = hashlib.sha256("\0".join([_compiler_version(compiler), *flags]).encode())
    for shown, path in sorted(("/".join(path.parts[-2:]), path) for path in files):
        key.update(shown.encode() + path.read_bytes())
    library = cache / f"{name}-{key.hexdigest()[:24]}.so"
    with contextlib.ExitStack() as stack:
        with _in_cache():
            kernel_cache.make_own_directory(cache)
            with contextlib.suppress(FileNotFoundError):
                kernel_cache.check_own(library, library.stat())
                return library
            scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=cache))
        unfinished = Path(scratch) / library.name
        result = _run([compiler, *flags, *arguments, "-o", str(unfinished)])
        if result.returncode:
            raise EmulationError(name, f"does not compile:\n{result.stderr[:8000]}")
        unfinished.chmod(0o700)
        os.replace(unfinished, library)
    return library


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """What a command prints, which need not be text in the encoding of the locale."""
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")


@functools.cache
def _compiler_version(compiler: str) -> str:
    return _run([compiler, "--version"]).stdout


def sanitizer_environment() -> dict[str, str]:
    """The environment of a process that can load modules built with ``sanitizer="address"``."""
    compiler = find_compiler() or "g++"
    library = _run([compiler, "-print-file-name=libasan.so"]).stdout.strip()
    settings = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    return {**os.environ, **settings}


def cache_directory() -> Path:
    """Directory of kernels that are compiled for the CPU."""
    return kernel_cache.cache_directory() / "emulated"


def cached_modules() -> list[Path]:
    """What is kept there."""
    return sorted(cache_directory().glob("*.so"))


def clear_cache() -> int:
    """Remove all of it; how many files that were."""
    modules = cached_modules()
    for path in modules:
        path.unlink(missing_ok=True)
    return len(modules)
