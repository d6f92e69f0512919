"""A stand-in for NVRTC that counts its calls and hashes what it is given, and kernels for it."""

import hashlib
import time
from pathlib import Path

from cuflash.gpu.compiler import Compiler

FILES = {"a.cu": b'#include "b.cuh"\n', "b.cuh": b"#pragma once\n", "sub/c.cuh": b""}


LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}' for 'sm_80'
ptxas info    : Function properties for {name}
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers, 308 bytes smem, 364 bytes cmem[0]"""


class CountingToolchain:
    def __init__(self, version="13.0.1", expected=None, cubin_bytes=64, delay=0.0):
        self.calls = 0
        self.loaded = False
        self._version = version
        self._expected = expected
        self._cubin_bytes = cubin_bytes
        self._delay = delay

    def expected_version(self):
        return self._expected

    def version(self):
        self.loaded = True
        return self._version

    def compile(self, path, program, headers, arch, options):
        self.calls += 1
        time.sleep(self._delay)
        name = next((option.partition("=")[2] for option in options if option.startswith("-DNAME=")), "kernel")
        seen = repr((path.name, program, sorted(headers.items()), arch, options, self._version)).encode()
        return hashlib.sha256(seen).digest() * (self._cubin_bytes // 32), LOG.format(name=name)


def write_files(directory, files):
    for name, content in files.items():
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def compile_once(kernel_dir, cache_dir, toolchain, source="a.cu", name="kernel", defines=None, arch="sm_80"):
    """As a process that starts now would: the sources are read anew."""
    return Compiler(Path(kernel_dir), Path(cache_dir), toolchain).compile(source, name, defines or {}, arch)


def store(kernel_dir, cache, number, toolchain=None):
    toolchain = toolchain or CountingToolchain(cubin_bytes=32_000)
    return compile_once(kernel_dir, cache, toolchain, defines={"NUMBER": number})
