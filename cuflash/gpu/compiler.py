"""Kernels compiled to cubins: NVRTC, a cache on disk, and a report of the resources each kernel takes.

Neither a device nor CuPy is needed: the architecture is named, and NVRTC comes with a wheel. What NVRTC reads is a
snapshot of the kernels directory taken once per process. The key of the cache covers every byte of the source and of
the headers that it includes, and NVRTC is given these alone: a cubin always belongs to the sources that its key was
made from, even while somebody edits them, and an edited header compiles those kernels again that include it.

In the cache `<key>.entry` holds the report and names the cubin, and the cubin's name holds the hash of its bytes. Both
are written to a temporary file and renamed, and both are checked when read, so that no other process, no kill and no
damaged disk ever brings a wrong or partial kernel to a device: what fails a check is compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import posixpath
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from cuflash.arrays.checks import type_error, value_error
from cuflash.arrays.units import in_bytes
from cuflash.gpu.kernel_cache import (
    cache_directory,
    cache_limit,
    make_own_directory,
    marked_as_used,
    private_directory,
    read_own,
    trim_cache,
    warn_of_private_directory,
    write_atomically,
)
from cuflash.gpu.nvrtc import Nvrtc
from cuflash.plan import KernelSpec, LaunchPlan
from cuflash.score_mod import FIRST_LINE

# -v makes ptxas report registers and spills. Line info lets profilers and sanitizers name source lines and leaves the
# instructions as they are. No fast math, no flush-to-zero.
# NVRTC before 13.1 takes generic lambdas for host functions unless every function is a device function.
# With a driver, NVRTC keeps a cache of its own, and cubins from that cache come without ptxas's report.
OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--generate-line-info",
    "--ptxas-options=-v",
    "--no-cache",
)


class CompileError(RuntimeError):
    """NVRTC rejected a kernel. The message shows its log, the options and how to reproduce the error.

    Attributes
    ----------
    log : str
        What NVRTC and ptxas said, with the files and lines of the kernels directory.
    options : tuple of str
        The options NVRTC was given.
    """

    def __init__(self, message: str, log: str, options: tuple[str, ...]) -> None:
        super().__init__(message, log, options)
        self.log = log
        self.options = options

    def __str__(self) -> str:
        return str(self.args[0])


class ScoreSourceError(CompileError, ValueError):
    """NVRTC rejected a kernel with a score that a caller wrote in CUDA. The log counts the lines of that source."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What ptxas reports of one kernel. Bytes are per thread, except `static_shared_bytes` (per block).

    `spill_stores_bytes` and `spill_loads_bytes` include the functions that the kernel calls without inlining them.
    `seconds` is the time the compilation took, `log` everything NVRTC and ptxas said.
    """

    registers: int
    spill_stores_bytes: int
    spill_loads_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    barriers: int
    seconds: float
    log: str

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines of the log that warn, numbered performance advice of ptxas (C75xx) included."""
        return tuple(line for line in self.log.splitlines() if re.search(r"\bwarning( #|\s*:)|\(C7\d{3}\)", line))

    @classmethod
    def from_entry(cls, values: Mapping[str, Any]) -> Resources:
        """Those that an entry of the cache has. TypeError for other fields, or for values of other types."""
        resources = cls(**values)
        for field in fields(cls):
            value = getattr(resources, field.name)
            if type(value).__name__ != field.type:
                raise TypeError(f"{field.name}: got {value!r}, expected {field.type}")
        return resources

    @classmethod
    def from_log(cls, log: str, name: str, seconds: float) -> Resources:
        """Read the report of kernel `name` in a log of NVRTC; ValueError where there is none."""
        kernels = {}
        for section in log.split("Compiling entry function '")[1:]:
            kernel, _, report = section.partition("'")
            kernels[kernel] = report
        report = kernels.get(name, "")
        used = re.search(r"Used (\d+) registers.*", report)
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
        if not used or not frames:
            raise ValueError(f"ptxas reports no kernel {name!r}, only {sorted(kernels) or 'nothing'}")

        def used_number(pattern: str, default: str) -> int:
            match = re.search(pattern, used[0])
            return int(match[1] if match else default)

        return cls(
            registers=int(used[1]),
            spill_stores_bytes=sum(int(stores) for _, stores, _ in frames),
            spill_loads_bytes=sum(int(loads) for _, _, loads in frames),
            stack_bytes=used_number(r"(\d+) bytes cumulative stack size", default=frames[0][0]),
            static_shared_bytes=used_number(r"(\d+) bytes smem", default="0"),
            barriers=used_number(r"used (\d+) barriers", default="0"),
            seconds=seconds,
            log=log,
        )


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A cubin on disk (`path`) that holds the kernel `name` for `arch`, and the resources the kernel takes."""

    name: str
    arch: str
    path: Path
    resources: Resources


def kernel_directory() -> Path:
    """Directory of the CUDA sources: inside the package in a wheel, next to it in a checkout or an editable install."""
    package = Path(__file__).resolve().parents[1]
    folders = (package / "kernels", package.parent / "kernels")
    for folder in folders:
        if (folder / "ptx/base.cuh").is_file():
            return folder
    raise FileNotFoundError(f"the CUDA sources of cuflash are in none of {', '.join(map(str, folders))}; reinstall it")


def nvrtc_version() -> str:
    """Version of the NVRTC that compiles here: "13.0.88" of a wheel, "13.0" of a library from elsewhere."""
    return _nvrtc.version()


def supported_archs() -> tuple[str, ...]:
    """The architectures that this NVRTC compiles for ("sm_80", ...), without those that carry a suffix."""
    return tuple(f"sm_{number}" for number in _nvrtc.arch_numbers())


def compile_kernel(
    source: str,
    name: str,
    defines: Mapping[str, str | int],
    arch: str,
    *,
    headers: Mapping[str, str] | None = None,
    kernel_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> CompiledKernel:
    """Compile the kernel `name` of a file of the kernels directory to a cubin, or find it in the cache.

    Safe to call from many threads and processes. A cache that cannot be written costs a warning and a compilation per
    process, never an error. The sources are read once per process: an edit is seen by the next one.

    `defines` are macros by their full name, `headers` what the source includes besides the files of the directory.
    `arch` is that of the device, such as "sm_80" or "sm_90a". Raises CompileError with the log of NVRTC,
    NotImplementedError for an architecture that it does not know, NvrtcNotFoundError without it.
    """
    kernels = kernel_directory() if kernel_dir is None else Path(kernel_dir).resolve()
    cache = cache_directory() if cache_dir is None else Path(cache_dir).absolute()
    return _shared_compiler(kernels, cache).compile(source, name, defines, arch, headers or {})


def compile_spec(kernel: KernelSpec) -> CompiledKernel:
    """Compile a kernel of a plan, or find it in the cache; ScoreSourceError is about a score that a caller wrote."""
    defines, headers = dict(kernel.defines), dict(kernel.headers)
    try:
        return compile_kernel(kernel.source, kernel.name, defines, kernel.target, headers=headers)
    except CompileError as error:
        if not any(FIRST_LINE in source for source in headers.values()):
            raise
        message = f"score: got source that does not compile, expected a score in CUDA C++:\n\n{error.log}"
        raise ScoreSourceError(message, error.log, error.options) from None


def kernels_fingerprint() -> str:
    """Hash of every byte of the kernels directory."""
    return _shared_compiler(kernel_directory(), cache_directory()).files_hash


def with_resources(plan: LaunchPlan) -> LaunchPlan:
    """The plan with the registers and spills of each of its kernels, which are compiled for that. Needs no device."""
    reports = []
    for kernel in plan.kernels:
        resources = compile_spec(kernel).resources
        spills = resources.spill_stores_bytes + resources.spill_loads_bytes
        reports.append(f"{resources.registers} registers" + (f", {in_bytes(spills)} of spills" if spills else ""))
    return replace(plan, resources=tuple(reports))


class Toolchain(Protocol):
    """What `Compiler` needs of NVRTC."""

    def expected_version(self) -> str | None:
        """The version that `version` will most likely return, found at little cost; None where that is not possible."""

    def version(self) -> str:
        """The version that `compile` uses."""

    def compile(
        self, path: Path, program: bytes, headers: Mapping[str, bytes], arch: str, options: Sequence[str]
    ) -> tuple[bytes | None, str]:
        """The cubin (None after errors) and the log."""


class Compiler:
    """`compile_kernel` for one kernels directory and one cache directory; holds the snapshot of the sources."""

    def __init__(self, kernel_dir: Path, cache_dir: Path, toolchain: Toolchain) -> None:
        self._kernel_dir = kernel_dir
        self._cache_dir = cache_dir
        self._stores_privately = False  # because the cache cannot be written, or may be others' work
        self._toolchain = toolchain
        self._locks: dict[str, threading.Lock] = {}

    @functools.cached_property
    def _files(self) -> dict[str, bytes]:
        """Every file of the kernels directory by its relative name."""
        paths = sorted(path for path in self._kernel_dir.rglob("*") if path.is_file())
        return {path.relative_to(self._kernel_dir).as_posix(): path.read_bytes() for path in paths}

    @functools.cached_property
    def files_hash(self) -> str:
        """Hash of the names and contents of all these files."""
        return _hash_of_files(self._files)

    def _files_of(self, source: str, texts: Iterable[str]) -> dict[str, bytes]:
        """The source, what `texts` (macros and headers of its own) name or include, and what all these include."""
        names = [name for text in texts for name in (text.strip('"<>'), *_included(text.encode()))]
        pending, needed = {source, *names}, set()
        while pending:
            name = pending.pop()
            if name in self._files and name not in needed:
                needed.add(name)
                folder = posixpath.dirname(name)  # an include may start there, or from the kernels directory
                included = _included(self._files[name])
                pending |= {*included, *(posixpath.normpath(posixpath.join(folder, other)) for other in included)}
        return {name: content for name, content in self._files.items() if name in needed}

    def compile(
        self,
        source: str,
        name: str,
        defines: Mapping[str, str | int],
        arch: str,
        own_headers: Mapping[str, str] | None = None,
    ) -> CompiledKernel:
        """See `compile_kernel`; `own_headers` are those besides the kernels'."""
        if source not in self._files:
            sources = ", ".join(file for file in self._files if file.endswith(".cu"))
            raise value_error("source", repr(source), f"a file of {self._kernel_dir} ({sources})")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise value_error("name", repr(name), "a C identifier")
        if not re.fullmatch(r"sm_[1-9]\d+[af]?", arch, re.ASCII):
            raise value_error("arch", repr(arch), "an architecture such as 'sm_80' or 'sm_90a'")
        options = (*OPTIONS, f"--gpu-architecture={arch}", *_define_options(defines))
        request: dict[str, Any] = {"source": source, "name": name, "arch": arch, "options": options}
        files = self._files_of(source, [*map(str, defines.values()), *(own_headers or {}).values()])
        request["kernels"] = _hash_of_files(files)
        if own_headers:
            request["headers"] = sorted((file, _sha256(source.encode())) for file, source in own_headers.items())
        with self._locks.setdefault(_key(request), threading.Lock()):  # one of several threads compiles, others wait
            expected = self._toolchain.expected_version()
            cached = None if expected is None else self._find(request | {"nvrtc": expected})
            if cached is not None:
                return cached
            version = self._toolchain.version()
            request["nvrtc"] = version
            cached = None if version == expected else self._find(request)
            return cached or self._build(request, files, defines, options, own_headers or {})

    @property
    def _folders(self) -> list[Path]:
        """Where cubins are looked for; the last one is where they are stored."""
        return [self._cache_dir, *([private_directory()] if self._stores_privately else [])]

    def _find(self, request: Mapping[str, Any]) -> CompiledKernel | None:
        """The kernel from the cache; None where it is missing or fails a check."""
        for folder in self._folders:
            try:
                checksum, _, body = read_own(marked_as_used(folder / f"{_key(request)}.entry")).partition(b"\n")
                if checksum != _sha256(body).encode():
                    continue
                entry = json.loads(body)
                path = marked_as_used(folder / Path(entry["cubin"]).name)
                if _sha256(read_own(path)) != entry["cubin_sha256"]:
                    continue
                resources = Resources.from_entry(entry["resources"])
            except (OSError, KeyError, RecursionError, TypeError, ValueError):
                continue
            return CompiledKernel(name=request["name"], arch=request["arch"], path=path, resources=resources)
        return None

    def _build(
        self,
        request: Mapping[str, Any],
        files: Mapping[str, bytes],
        defines: Mapping[str, str | int],
        options: tuple[str, ...],
        own_headers: Mapping[str, str],
    ) -> CompiledKernel:
        """Compile the kernel of a request, and store it."""
        source, name, arch = request["source"], request["name"], request["arch"]
        # NVRTC would call a header in memory by its include name; #line gives it the path that an editor can open.
        headers = {
            file: b'#line 1 "%s"\n' % os.fsencode((self._kernel_dir / file).as_posix()) + content
            for file, content in files.items()
            if file != source
        }
        headers |= {file: source.encode() for file, source in own_headers.items()}
        start = time.perf_counter()
        cubin, log = self._toolchain.compile(self._kernel_dir / source, files[source], headers, arch, options)
        seconds = time.perf_counter() - start
        try:
            if cubin is None:
                raise ValueError("NVRTC reports errors")
            resources = Resources.from_log(log, name, seconds)
        except ValueError as error:
            arguments = f"{source!r}, {name!r}, {dict(sorted(defines.items()))!r}, {arch!r}"
            message = (
                f"kernel {name!r} of {source} for {arch}: {error}\n\n{log}\n\n"
                f"NVRTC {request['nvrtc']} with {' '.join(options)}\n"
                f"To reproduce in Python: cuflash.gpu.compiler.compile_kernel({arguments}, "
                f"{f'headers={dict(own_headers)!r}, ' if own_headers else ''}"
                f"kernel_dir={str(self._kernel_dir)!r})"
            )
            raise CompileError(message, log, options) from None
        try:
            return self._store(request, cubin, resources)
        except OSError as error:
            # Where files that are open cannot be replaced, another process may be reading the one it stored just now.
            return self._find(request) or self._store_privately(request, cubin, resources, error)

    def _store(self, request: Mapping[str, Any], cubin: bytes, resources: Resources) -> CompiledKernel:
        checksum = _sha256(cubin)
        path = self._folders[-1] / f"{request['name'][:100]}-{request['arch']}-{checksum[:32]}.cubin"
        entry = {"request": request, "cubin": path.name, "cubin_sha256": checksum, "resources": asdict(resources)}
        body = json.dumps(entry, indent=1).encode()
        make_own_directory(path.parent)
        write_atomically(path, cubin)
        write_atomically(path.with_name(f"{_key(request)}.entry"), _sha256(body).encode() + b"\n" + body)
        trim_cache(path.parent, cache_limit(), path.stat().st_mtime)
        return CompiledKernel(name=request["name"], arch=request["arch"], path=path, resources=resources)

    def _store_privately(
        self, request: Mapping[str, Any], cubin: bytes, resources: Resources, error: OSError
    ) -> CompiledKernel:
        if not self._stores_privately:
            warn_of_private_directory(self._cache_dir, error)
            self._stores_privately = True
        return self._store(request, cubin, resources)


_nvrtc = Nvrtc()


@functools.cache
def _shared_compiler(kernel_dir: Path, cache_dir: Path) -> Compiler:
    return Compiler(kernel_dir, cache_dir, _nvrtc)


@functools.cache
def _included(text: bytes) -> tuple[str, ...]:
    """What a file includes, as it is written there."""
    names = re.findall(rb'^\s*#\s*include\s*["<]([^">\n]+)[">]', text, re.MULTILINE)
    return tuple(os.fsdecode(name) for name in names)


def _hash_of_files(files: Mapping[str, bytes]) -> str:
    """Hash of their names and contents."""
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(b"%d %d " % (len(os.fsencode(name)), len(content)) + os.fsencode(name) + content)
    return digest.hexdigest()


def _define_options(defines: Mapping[str, str | int]) -> list[str]:
    options = []
    for macro, value in sorted(defines.items()):
        if not re.fullmatch(r"[A-Za-z_]\w*", macro, re.ASCII):
            raise value_error("defines", repr(macro), "the name of a macro")
        try:
            text = value if isinstance(value, str) else str(int(operator.index(value)))
        except TypeError:
            raise type_error("defines", f"{macro}={value!r}", "a string or an integer") from None
        options.append(f"-D{macro}={text}")
    return options


def _key(request: Mapping[str, Any]) -> str:
    layout = [field.name for field in fields(Resources)]  # an entry of another layout has another key
    return _sha256(json.dumps([layout, request], sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
