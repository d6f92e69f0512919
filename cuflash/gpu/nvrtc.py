"""NVRTC, the library that compiles CUDA, through cuda.bindings: found, named and called."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cuflash.arrays.packages import BINDINGS, INSTALL_CUPY, NVRTC


class NvrtcNotFoundError(ImportError):
    """cuda-bindings or the NVRTC library is not installed."""


class Nvrtc:
    """NVRTC through cuda.bindings. The library is loaded when it is needed first."""

    @functools.cached_property
    def _api(self) -> Any:
        try:
            api = importlib.import_module("cuda.bindings.nvrtc")
        except ImportError as error:
            raise NvrtcNotFoundError(
                f"compiling a CUDA kernel needs cuda-bindings, which is missing here ({error}). Install it and NVRTC: "
                f"pip install {BINDINGS} {NVRTC}; to run kernels, too: {INSTALL_CUPY}"
            ) from error
        try:
            api.nvrtcVersion()  # the bindings look for the library at the first call, and raise RuntimeError
        except RuntimeError as error:
            raise NvrtcNotFoundError(
                f"compiling a CUDA kernel needs the library NVRTC, which cuda-bindings does not find here ({error}). "
                f"Install it: pip install {NVRTC} (for CUDA 12 {NVRTC}-cu12)"
            ) from error
        return api

    def _call(self, function: str, *arguments: Any) -> Any:
        """One result of an NVRTC function that must not fail, or None where it has none."""
        result, *values = getattr(self._api, function)(*arguments)
        if result.value:
            raise RuntimeError(f"{function} returned {result.name}")
        return values[0] if values else None

    @functools.cached_property
    def _wheel_version(self) -> str | None:
        """Version of the NVRTC wheel whose major version is that of cuda-bindings."""
        versions: dict[str, str] = {}
        for name in _installed_distributions():
            match = re.fullmatch(r"(cuda_bindings|nvidia_cuda_nvrtc(?:_cu\d+)?)-(\d+)(\.[^-]*)\.dist-info", name)
            if match:
                key = "bindings" if match[1] == "cuda_bindings" else match[2]
                versions.setdefault(key, match[2] if key == "bindings" else match[2] + match[3])
        return versions.get(versions.get("bindings", ""))

    def expected_version(self) -> str | None:
        """The version of the wheel, from a directory's name.

        Importing the bindings and loading the library (140 MB) costs a warm process 50 to 300 ms, more than all the
        rest. This costs 1 ms, and cannot lead to a wrong kernel: a kernel stored under a version was compiled by it.
        """
        return self._wheel_version

    def version(self) -> str:
        """The version of the library that is loaded, which may not be the wheel's."""
        result, major, minor = self._api.nvrtcVersion()
        if result.value:
            raise RuntimeError(f"nvrtcVersion returned {result.name}")
        loaded = f"{major}.{minor}"
        wheel = self._wheel_version
        return wheel if wheel is not None and wheel.split(".")[:2] == loaded.split(".") else loaded

    def arch_numbers(self) -> list[int]:
        """80 for sm_80, and so on."""
        return sorted(self._call("nvrtcGetSupportedArchs"))

    def compile(
        self, path: Path, program: bytes, headers: Mapping[str, bytes], arch: str, options: Sequence[str]
    ) -> tuple[bytes | None, str]:
        """The cubin (None after errors) and the log."""
        supported = self.arch_numbers()
        number = int(re.sub(r"\D", "", arch))
        if number not in supported:
            is_old = number < supported[0]
            remedy = "an older NVRTC may" if is_old else f"a newer one may: pip install -U {BINDINGS} {NVRTC}"
            raise NotImplementedError(
                f"arch: NVRTC {self.version()} does not compile for {arch}, only for "
                f"{', '.join(f'sm_{number}' for number in supported)}; {remedy}"
            )
        names = [name.encode() for name in headers]
        handle = self._call("nvrtcCreateProgram", program, os.fsencode(path), len(names), list(headers.values()), names)
        try:
            (result,) = self._api.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])
            log = self._output(handle, "ProgramLog").rstrip(b"\0 \n").decode(errors="replace")
            if result.value == 0:
                return self._output(handle, "CUBIN"), log
            # Errors of ptxas name lines of the PTX, which the caller does not get: the log quotes these lines.
            ptx = self._output(handle, "PTX").decode(errors="replace").splitlines()
            lines = dict.fromkeys(int(line) for line in re.findall(r"ptx input, line (\d+); error", log))
            quoted = [f"PTX line {line}: {ptx[line - 1].strip()}" for line in lines if line <= len(ptx)]
            return None, "\n".join([log or result.name, *quoted])
        finally:
            self._call("nvrtcDestroyProgram", handle)

    def _output(self, handle: Any, what: str) -> bytes:
        buffer = bytearray(self._call(f"nvrtcGet{what}Size", handle))
        self._call(f"nvrtcGet{what}", handle, buffer)
        return bytes(buffer)


def _installed_distributions() -> Iterator[str]:
    """Names of the directories that packages are imported from (importlib.metadata takes 20 ms to import)."""
    for directory in sys.path:
        try:
            yield from os.listdir(directory or os.curdir)
        except OSError:  # not a directory: the zip file of the standard library
            continue
