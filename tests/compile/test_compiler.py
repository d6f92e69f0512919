"""The compiler with the real NVRTC, on kernels of a few lines; no device."""

import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from cuflash.gpu import compiler, kernel_cache
from cuflash.gpu.compiler import CompileError, Compiler, compile_kernel, nvrtc_version, supported_archs
from cuflash.gpu.nvrtc import Nvrtc
from tests.compile.test_plans import SERIALIZED

SCALE = """\
#include "factor.cuh"
#include "twice.cuh"

extern "C" __global__ void scale(const float* x, float* y) {
  __shared__ float s[NUM_THREADS];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = divided(twice(s[NUM_THREADS - 1 - threadIdx.x]), x[0]);
}
"""
FACTOR = "#pragma once\n__device__ const float factor = 2;\n"
TWICE = """\
#pragma once
#include "factor.cuh"
__device__ __forceinline__ float twice(float x) { return factor * x; }
__device__ __forceinline__ float divided(float x, float y) { return sqrtf(x / y); }
"""

# 100 values live across the barrier: too many for the 64 registers that each of 1024 threads can have.
SPILL = """\
extern "C" __global__ void __launch_bounds__(NUM_THREADS) spill(const float* x, float* y, int n) {
  float r[100];
#pragma unroll
  for (int i = 0; i < 100; ++i) r[i] = x[i * n + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 100; ++i) y[i * n + threadIdx.x] = r[i] * r[99 - i];
}
"""


@pytest.fixture
def kernels(tmp_path):
    """compile(source, name, defines, arch) on a kernels directory and a cache of the test's own."""
    (tmp_path / "kernels").mkdir()
    return Kernels(tmp_path / "kernels", tmp_path / "cache")


@dataclass(frozen=True)
class Kernels:
    directory: Path
    cache: Path

    def __call__(self, source, name, defines, arch, **files):
        files = {"scale.cu": SCALE, "factor.cuh": FACTOR, "twice.cuh": TWICE, "spill.cu": SPILL, **files}
        for file, text in files.items():
            (self.directory / file).parent.mkdir(exist_ok=True)
            (self.directory / file).write_text(text)
        return Compiler(self.directory, self.cache, Nvrtc()).compile(source, name, defines, arch)


def elf_sections(cubin):
    """Name -> (size, sh_info, bytes) of the sections of a 64-bit ELF file."""
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + index * size) for index in range(number)]
    names_at = headers[names_index][4]
    sections = {}
    for name_at, kind, _, _, start, length, _, info, _, _ in headers:
        name = cubin[names_at + name_at : cubin.index(0, names_at + name_at)].decode()
        sections[name] = (length, info, b"" if kind == 8 else cubin[start : start + length])
    return sections


def instructions(cubin, name):
    return elf_sections(cubin)[f".text.{name}"][2]


def test_every_architecture_from_sm_70_on(kernels):
    archs = [arch for arch in supported_archs() if 70 <= int(arch[3:]) <= 121]
    assert {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90"} <= set(archs)
    for arch in (*archs, "sm_90a"):
        kernel = kernels("scale.cu", "scale", {"NUM_THREADS": 64}, arch)
        assert kernel.arch == arch
        assert f"for '{arch}'" in kernel.resources.log
        assert kernel.path.read_bytes()[:4] == b"\x7fELF"
        assert instructions(kernel.path.read_bytes(), "scale")


def test_an_architecture_that_does_not_exist(kernels):
    with pytest.raises(NotImplementedError, match=f"NVRTC {nvrtc_version()} does not compile for sm_999, only for sm_"):
        kernels("scale.cu", "scale", {"NUM_THREADS": 64}, "sm_999")
    with pytest.raises(CompileError, match="gpu-architecture"):
        kernels("scale.cu", "scale", {"NUM_THREADS": 64}, "sm_80a")


def test_resources_agree_with_the_cubin(kernels):
    plain = kernels("scale.cu", "scale", {"NUM_THREADS": 96}, "sm_80")
    spilling = kernels("spill.cu", "spill", {"NUM_THREADS": 1024}, "sm_80")
    fitting = kernels("spill.cu", "spill", {"NUM_THREADS": 64}, "sm_80")
    for kernel in (plain, spilling, fitting):
        sections = elf_sections(kernel.path.read_bytes())
        assert kernel.resources.registers == sections[f".text.{kernel.name}"][1] >> 24  # cuobjdump's REG
        assert kernel.resources.static_shared_bytes == sections.get(f".nv.shared.{kernel.name}", (0,))[0]
        assert kernel.resources.barriers == 1
        assert kernel.resources.seconds > 0
    assert plain.resources.static_shared_bytes == 96 * 4
    for kernel in (plain, fitting):
        assert kernel.resources.spill_stores_bytes == kernel.resources.spill_loads_bytes == 0
        assert kernel.resources.stack_bytes == 0
    assert fitting.resources.registers > 100
    assert spilling.resources.registers <= 64
    fewest = (100 - spilling.resources.registers) * 4  # bytes of the values that are left
    assert spilling.resources.spill_stores_bytes >= fewest
    assert spilling.resources.spill_loads_bytes >= fewest
    assert spilling.resources.stack_bytes >= fewest


def test_spills_of_called_functions_count(kernels):
    called = SPILL.replace('extern "C" __global__ void __launch_bounds__(NUM_THREADS)', "__noinline__ __device__ void")
    caller = 'extern "C" __global__ void __launch_bounds__(1024) f(const float* x, float* y, int n) { spill(x, y, n); }'
    resources = kernels("f.cu", "f", {}, "sm_80", **{"f.cu": f"{called}{caller}\n"}).resources
    assert resources.spill_stores_bytes > 0
    assert resources.spill_loads_bytes > 0


def test_warnings_are_kept(kernels):
    noisy = 'extern "C" __global__ void noisy(float* x) {\n  int unused;\n  *x = 1;\n}\n'
    for _ in ("compiled", "from the cache"):
        (warning,) = kernels("noisy.cu", "noisy", {}, "sm_80", **{"noisy.cu": noisy}).resources.warnings
        assert warning.startswith(f"{kernels.directory / 'noisy.cu'}(2): warning")
    assert kernels("scale.cu", "scale", {"NUM_THREADS": 64}, "sm_80").resources.warnings == ()
    unbounded = 'extern "C" __global__ void f() {\n  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");\n}\n'
    (advice,) = kernels("f.cu", "f", {}, "sm_90a", **{"f.cu": unbounded}).resources.warnings
    assert "(C7508)" in advice and "setmaxnreg" in advice


# A function is called while a product is running.
HASTY = """\
extern "C" __global__ void __launch_bounds__(128) hasty(float* x, void (*function)()) {
  float r[4] = {x[0], x[1], x[2], x[3]};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
      : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]) : "l"(16ull));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  function();
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) x[i] = r[i];
}
"""


def test_products_that_are_serialized_are_a_warning(kernels):
    """In the words by which `test_plans.py` looks for it in the logs of the project's kernels."""
    resources = kernels("hasty.cu", "hasty", {}, "sm_90a", **{"hasty.cu": HASTY}).resources
    (advice,) = resources.warnings
    assert "(C7510)" in advice and SERIALIZED in advice


def test_headers_are_named_by_their_folder(kernels):
    """From a source in a folder and from a header in another, also where both folders have a header of that name."""
    files = {
        "main/f.cu": '#include "one/size.cuh"\nextern "C" __global__ void f() {\n  __shared__ volatile char s[kSize];\n'
        "  s[0] = 0;\n}\n",
        "main/size.cuh": "#error not this one\n",
        "one/size.cuh": '#pragma once\n#include "two/size.cuh"\nconstexpr int kSize = 16 * kTwo;\n',
        "two/size.cuh": "#pragma once\nconstexpr int kTwo = 2;\n",
    }
    assert kernels("main/f.cu", "f", {}, "sm_80", **files).resources.static_shared_bytes == 32


def test_errors_name_file_and_line_of_the_header(kernels):
    broken = "#pragma once\n\ntemplate <int n> __device__ float broken(float x) {\n  return x + undefined_name;\n}\n"
    text = '#include "broken.cuh"\nextern "C" __global__ void f(float* x) { *x = broken<WIDTH>(*x); }\n'
    with pytest.raises(CompileError) as caught:
        kernels("f.cu", "f", {"WIDTH": 3}, "sm_80", **{"f.cu": text, "broken.cuh": broken})
    message = str(caught.value)
    assert f'{kernels.directory / "broken.cuh"}(4): error: identifier "undefined_name" is undefined' in message
    assert "-DWIDTH=3" in message and "--gpu-architecture=sm_80" in message
    assert f"NVRTC {nvrtc_version()}" in message

    checked = 'template <int n> __device__ void check() { static_assert(n > 3, "WIDTH is too small"); }\n'
    text = '#include "check.cuh"\nextern "C" __global__ void f() {\n  check<WIDTH>();\n}\n'
    with pytest.raises(CompileError) as caught:
        kernels("f.cu", "f", {"WIDTH": 3}, "sm_80", **{"f.cu": text, "check.cuh": checked})
    message = str(caught.value)
    assert f"{kernels.directory / 'check.cuh'}(1): error" in message and "WIDTH is too small" in message
    assert f"line 3 of {kernels.directory / 'f.cu'}" in message


def test_the_reproduction_reproduces(kernels):
    text = 'extern "C" __global__ void f() {\n  oops();\n}\n'
    with pytest.raises(CompileError) as caught:
        kernels("f.cu", "f", {"TEXT": "'a' + \"b\"", "WIDTH": 3}, "sm_80", **{"f.cu": text})
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("To reproduce")]
    with pytest.raises(CompileError) as again:
        exec(
            line[line.index("cuflash.gpu.compiler.") + len("cuflash.gpu.compiler.") :],
            {"compile_kernel": compile_kernel},
        )
    assert str(again.value) == str(caught.value)


def test_errors_of_ptxas_quote_the_ptx(kernels):
    text = 'extern "C" __global__ void f() {\n  asm volatile("bogus.instruction;");\n}\n'
    with pytest.raises(CompileError) as caught:
        kernels("f.cu", "f", {}, "sm_80", **{"f.cu": text})
    assert "'bogus'" in str(caught.value)
    assert ": bogus.instruction;" in str(caught.value)


def test_missing_includes_and_kernels(kernels):
    with pytest.raises(CompileError) as caught:
        kernels("f.cu", "f", {}, "sm_80", **{"f.cu": '\n#include "nowhere.cuh"\n'})
    assert f'{kernels.directory / "f.cu"}(2): catastrophic error: cannot open source file "nowhere.cuh"' in str(
        caught.value
    )
    with pytest.raises(CompileError, match=r"no kernel 'other', only \['scale'\]"):
        kernels("scale.cu", "other", {"NUM_THREADS": 64}, "sm_80")


def test_what_is_compiled_is_the_snapshot_that_the_key_was_made_of(kernels):
    first = kernels("scale.cu", "scale", {"NUM_THREADS": 64}, "sm_80")
    running = Compiler(kernels.directory, kernels.cache.with_name("other"), Nvrtc())
    running.compile("spill.cu", "spill", {"NUM_THREADS": 64}, "sm_80")
    for path in kernels.directory.iterdir():
        path.write_text("#error edited meanwhile\n")
    (kernels.directory / "factor.cuh").unlink()
    second = running.compile("scale.cu", "scale", {"NUM_THREADS": 64}, "sm_80")
    assert instructions(second.path.read_bytes(), "scale") == instructions(first.path.read_bytes(), "scale")


def test_no_fast_math_and_line_info_changes_no_instruction(kernels):
    kernel = kernels("scale.cu", "scale", {"NUM_THREADS": 64}, "sm_80")
    program = SCALE.encode()
    headers = {"factor.cuh": FACTOR.encode(), "twice.cuh": TWICE.encode()}
    base = ["--std=c++17", "--gpu-architecture=sm_80", "-DNUM_THREADS=64"]
    precise = ["--ftz=false", "--prec-div=true", "--prec-sqrt=true"]

    def compiled(*options):
        cubin, log = Nvrtc().compile(Path("scale.cu"), program, headers, "sm_80", [*base, *options])
        assert cubin is not None, log
        return instructions(cubin, "scale")

    ours = instructions(kernel.path.read_bytes(), "scale")
    assert ours == compiled(*precise)
    assert ours != compiled(*precise[1:], "--ftz=true")
    assert ours != compiled("--use_fast_math")
    _, _, lines = elf_sections(kernel.path.read_bytes())[".debug_line"]
    assert bytes(kernels.directory) in lines and b"twice.cuh" in lines


def test_a_warm_process_does_not_load_nvrtc(kernels):
    if Nvrtc().expected_version() is None:
        pytest.skip("NVRTC is not a wheel here: its version is known after loading it only")
    kernel = kernels("scale.cu", "scale", {"NUM_THREADS": 64}, "sm_80")
    program = (
        "import sys\nfrom cuflash.gpu.compiler import compile_kernel\n"
        "kernel = compile_kernel('scale.cu', 'scale', {'NUM_THREADS': 64}, 'sm_80', kernel_dir=sys.argv[1],"
        " cache_dir=sys.argv[2])\n"
        "print(kernel.path, 'cuda.bindings.nvrtc' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(kernels.directory), str(kernels.cache)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{kernel.path} False"


def test_the_version_from_directory_names_is_that_of_the_library():
    nvrtc = Nvrtc()
    assert nvrtc.expected_version() in (None, nvrtc.version())


def test_threads_compile_different_kernels(kernels):
    kernels("scale.cu", "scale", {"NUM_THREADS": 64}, "sm_80")
    results = {}

    def compile_one(num_threads):
        arguments = ("scale.cu", "scale", {"NUM_THREADS": num_threads}, "sm_80")
        results[num_threads] = compile_kernel(*arguments, kernel_dir=kernels.directory, cache_dir=kernels.cache)

    threads = [threading.Thread(target=compile_one, args=(32 * (1 + index % 3),)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: kernel.resources.static_shared_bytes for number, kernel in results.items()} == {
        32: 128,
        64: 256,
        96: 384,
    }


def test_default_directories(monkeypatch, tmp_path):
    """The project's own kernels directory, and the cache that the environment names."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(CompileError, match="no kernel 'anything'"):
        compile_kernel("ptx/base.cuh", "anything", {"CUFLASH_ARCH": 80}, "sm_80")
    assert compiler.kernel_directory().name == "kernels"
    assert kernel_cache.cache_directory() == tmp_path / "cache"
