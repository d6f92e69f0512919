"""What the compiler says: of arguments, failures, reports, and what is missing to compile."""

import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from cuflash.arrays import packages
from cuflash.gpu.compiler import CompileError, Resources
from cuflash.gpu.nvrtc import Nvrtc, NvrtcNotFoundError
from tests.toolchain import LOG, CountingToolchain, compile_once

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"source": "b.cu"}, ValueError, "source: got 'b.cu'"),
        ({"source": "../kernels/a.cu"}, ValueError, "source: got"),
        ({"name": "a b"}, ValueError, "name: got 'a b'"),
        ({"name": ""}, ValueError, "name: got ''"),
        ({"arch": "8.0"}, ValueError, "arch: got '8.0'"),
        ({"arch": "compute_80"}, ValueError, "arch: got 'compute_80'"),
        ({"arch": "sm_80\n"}, ValueError, "arch: got"),
        ({"defines": {"A=1 -DB": 1}}, ValueError, "defines: got 'A=1 -DB'"),
        ({"defines": {"A": 1.5}}, TypeError, "defines: got A=1.5"),
        ({"defines": {"A": None}}, TypeError, "defines: got A=None"),
    ],
)
def test_malformed_arguments(kernel_dir, tmp_path, change, error, words):
    with pytest.raises(error) as caught:
        compile_once(kernel_dir, tmp_path / "cache", CountingToolchain(), **change)
    assert words in str(caught.value)


def test_booleans_and_integer_types_become_numbers(kernel_dir, tmp_path):
    numpy = pytest.importorskip("numpy")
    toolchain = CountingToolchain()
    for value in (1, True, numpy.int64(1), "1"):
        compile_once(kernel_dir, tmp_path / "cache", toolchain, defines={"ON": value})
    assert toolchain.calls == 1


def test_a_failure_shows_log_options_and_how_to_reproduce_and_is_not_cached(kernel_dir, tmp_path):
    class Failing(CountingToolchain):
        def compile(self, path, *rest):
            self.calls += 1
            return None, f"{path}(7): error: no"

    toolchain = Failing()
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            compile_once(kernel_dir, tmp_path / "cache", toolchain, defines={"B": 2, "A": "x"})
    assert toolchain.calls == 2
    assert not (tmp_path / "cache").exists()
    message = str(caught.value)
    assert f"{kernel_dir / 'a.cu'}(7): error: no" in message
    assert "NVRTC 13.0.1 with --std=c++17" in message
    assert "-DA=x -DB=2" in message
    assert f"compile_kernel('a.cu', 'kernel', {{'A': 'x', 'B': 2}}, 'sm_80', kernel_dir={str(kernel_dir)!r})" in message
    copy = pickle.loads(pickle.dumps(caught.value))  # from a pool of processes
    assert (str(copy), copy.log, copy.options) == (message, caught.value.log, caught.value.options)


def test_report_of_one_kernel_among_several():
    log = """\
/k/a.cu(3): warning #177-D: variable "x" was declared but never referenced
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'one'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one_more' for 'sm_90a'
ptxas info    : Function properties for one_more
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 308 bytes smem, 364 bytes cmem[0]
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
ptxas         .     400 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 416 bytes cumulative stack size, 8 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 43.471 ms
ptxas info    : Function properties for _Z6calleePKfi
ptxas         .     16 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads"""
    resources = Resources.from_log(log, "one", 0.5)
    assert resources == Resources(
        registers=168,
        spill_stores_bytes=20,
        spill_loads_bytes=40,
        stack_bytes=416,
        static_shared_bytes=8,
        barriers=16,
        seconds=0.5,
        log=log,
    )
    assert [line.partition(":")[0] for line in resources.warnings] == ["/k/a.cu(3)", "ptxas info    "]
    assert Resources.from_log(log, "one_more", 0.5).static_shared_bytes == 308
    with pytest.raises(ValueError, match=r"no kernel 'two', only \['one', 'one_more'\]"):
        Resources.from_log(log, "two", 0.5)


def test_a_report_without_barriers_and_shared_memory():
    resources = Resources.from_log(LOG.format(name="f").partition(", used")[0], "f", 0.0)
    assert (resources.registers, resources.stack_bytes) == (40, 16)
    assert (resources.barriers, resources.static_shared_bytes) == (0, 0)


def stand_in(**functions):
    module = types.ModuleType("cuda.bindings.nvrtc")
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def result(value=0):
    return types.SimpleNamespace(value=value, name=f"NVRTC_{value}")


@pytest.mark.parametrize(
    ("has_bindings", "missing", "command"),
    [
        (
            False,
            "needs cuda-bindings, which is missing here",
            "pip install cuda-bindings nvidia-cuda-nvrtc; to run kernels, too: pip install ",
        ),
        (
            True,
            "needs the library NVRTC, which cuda-bindings does not find here",
            "pip install nvidia-cuda-nvrtc (for CUDA 12",
        ),
    ],
    ids=["no bindings", "no library"],
)
def test_what_is_missing_to_compile_is_named(monkeypatch, kernel_dir, tmp_path, has_bindings, missing, command):
    def not_found():
        raise RuntimeError("Failure finding libnvrtc.so.13")

    module = stand_in(nvrtcVersion=not_found) if has_bindings else None
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", module)
    with pytest.raises(NvrtcNotFoundError) as caught:
        compile_once(kernel_dir, tmp_path / "cache", Nvrtc())
    assert isinstance(caught.value, ImportError)
    for words in (missing, command, *(("libnvrtc.so.13",) if has_bindings else ())):
        assert words in str(caught.value)


def test_messages_install_what_the_extras_do():
    """Without the name of cuflash, which is on no index."""
    metadata = (ROOT / "pyproject.toml").read_text()
    (extra,) = re.findall(r"^compile = \[(.*)\]$", metadata, re.MULTILINE)
    assert re.findall(r'"([\w-]+)[^"]*"', extra) == [packages.BINDINGS, packages.NVRTC]
    for name, installed in (("cuda13", packages.CUDA13), ("cuda12", packages.CUDA12)):
        assert f"{name} = [{installed.replace(chr(32), ', ')}]" in metadata and installed in packages.INSTALL_CUPY


def test_no_message_asks_pip_for_cuflash():
    asked = re.compile(r"cuflash\[|install (-\w+ )*[\"']?cuflash")
    texts = {path: path.read_text() for path in (ROOT / "cuflash").rglob("*.py")}
    assert [path for path, text in texts.items() if asked.search(text)] == []


@pytest.mark.parametrize(("arch", "remedy"), [("sm_120", "pip install -U"), ("sm_35", "an older NVRTC")])
def test_an_architecture_that_nvrtc_does_not_know(monkeypatch, kernel_dir, tmp_path, arch, remedy):
    module = stand_in(nvrtcVersion=lambda: (result(), 12, 4), nvrtcGetSupportedArchs=lambda: (result(), [50, 80, 90]))
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", module)
    with pytest.raises(NotImplementedError) as caught:
        compile_once(kernel_dir, tmp_path / "cache", Nvrtc(), arch=arch)
    assert f"NVRTC 12.4 does not compile for {arch}, only for sm_50, sm_80, sm_90" in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("distributions", "expected"),
    [
        (["cuda_bindings-13.0.3.dist-info", "nvidia_cuda_nvrtc-13.0.88.dist-info"], "13.0.88"),
        (["cuda_bindings-12.9.0.dist-info", "nvidia_cuda_nvrtc_cu12-12.9.86.dist-info"], "12.9.86"),
        (
            [
                "nvidia_cuda_nvrtc_cu12-12.9.86.dist-info",
                "nvidia_cuda_nvrtc-13.0.88.dist-info",
                "cuda_bindings-13.0.3.dist-info",
            ],
            "13.0.88",
        ),
        (["cuda_bindings-13.0.3.dist-info"], None),
        (["nvidia_cuda_nvrtc-13.0.88.dist-info"], None),
        (["cuda_bindings-13.0.3.dist-info", "nvidia_cuda_nvrtc_cu12-12.9.86.dist-info"], None),
        ([], None),
    ],
)
def test_expected_version_of_nvrtc(monkeypatch, tmp_path, distributions, expected):
    for name in distributions:
        (tmp_path / "site" / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), str(tmp_path / "absent.zip")])
    assert Nvrtc().expected_version() == expected


def test_importing_the_compiler_imports_no_cuda():
    program = (
        "import sys, cuflash.gpu.compiler; print([name for name in ('cuda.bindings', 'cupy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
