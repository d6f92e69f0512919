"""The package as people get it: importable without CuPy and quickly, with its kernels however it was installed."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuflash
from tests.packages import CHECKOUT, builder, compiler_of, run_backend

DEPENDENCIES = sorted({str(Path(module.__path__[0]).parent) for module in (np, ml_dtypes)})
FOLDER = CHECKOUT / "kernels"
KERNELS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cu*"))

PROCESSORS = ("AMX", "AVX-512 with bfloat16", "AVX-512", "AVX2", "SSE2", "NEON", "generic")

USE_IT = """
import cuflash, cuflash.gpu.compiler, numpy
q, k, v = numpy.ones((3, 2, 5, 4), numpy.float32)
assert abs(cuflash.attention(q, k, v) - 1).max() < 1e-6
directory = cuflash.gpu.compiler.kernel_directory()
kernels = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*.cu*"))
print(cuflash.__file__, directory, *kernels, sep="\\n")
"""


def run_python(code, cwd, *path_entries):
    """Run `code` in a fresh interpreter that sees `path_entries` (their .pth files too), NumPy and ml_dtypes, but no
    cuflash of this environment."""
    setup = f"import site, sys; [site.addsitedir(entry) for entry in {path_entries!r}]; sys.path += {DEPENDENCIES!r}\n"
    command = [sys.executable, "-I", "-S", "-c", setup + code]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=120).stdout


def files_of(folder):
    """Names of the files that are no bytecode."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*") if path.suffix != ".pyc")


def modules_of(folder):
    return [name for name in files_of(folder) if name.endswith(".py")]


WHICH_CORE = """
import cuflash.cpu.core as core, numpy, cuflash
q = numpy.ones((2, 50, 8), numpy.float32)
assert abs(cuflash.attention(q, q, q) - 1).max() < 1e-6
print(core.why_not() or core.processor())
"""
INFO = "import cuflash.cli.main as cli; cli.main(['info'])"


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """`tests.packages.builder`."""
    pytest.importorskip("setuptools", minversion="77", reason="the wheel is built with setuptools 77 or later")
    return builder(tmp_path_factory)


def test_a_checkout_works_as_it_is(tmp_path):
    package, directory, *names = run_python(USE_IT, tmp_path, str(CHECKOUT)).splitlines()
    assert Path(package).parent == CHECKOUT / "cuflash"
    assert Path(directory) == CHECKOUT / "kernels"
    assert names == KERNELS


def test_a_wheel_works_elsewhere(build, tmp_path):
    _, wheel, unpacked, _ = build("wheel")
    package, directory, *names = run_python(USE_IT, tmp_path, str(unpacked)).splitlines()
    assert Path(package).parent == unpacked / "cuflash"
    assert Path(directory) == unpacked / "cuflash" / "kernels"
    assert names == KERNELS
    assert (unpacked / "cuflash" / "py.typed").exists()
    assert modules_of(unpacked / "cuflash") == modules_of(CHECKOUT / "cuflash")
    assert files_of(unpacked / "cuflash" / "emulator") == files_of(CHECKOUT / "cuflash" / "emulator")
    assert run_python("import cuflash.emulator, cuflash.cli.main", tmp_path, str(unpacked)) == ""
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == {"cuflash"}
    assert wheel.stat().st_size < 2_000_000
    assert wheel.name.startswith(f"cuflash-{cuflash.__version__}-")


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_wheel_has_the_core_and_serves_every_version_of_python(build, tmp_path):
    _, wheel, unpacked, _ = build("wheel")
    *_, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none") and platform != "any"
    names = {path.name for path in (unpacked / "cuflash" / "cpu" / "core").iterdir()}
    assert names == {"libcuflash.so"}
    assert run_python(WHICH_CORE, tmp_path, str(unpacked)).strip() in PROCESSORS


FAILS = """#!/bin/sh
echo "in some file, fatal error: the disk is full" >&2
exit 3
"""
NOT_BUILT = {
    "/no/such/compiler": "there was no C++ compiler (/no/such/compiler)",
    "false": "false failed (1): it said nothing",
    FAILS: "compiler failed (3): in some file, fatal error: the disk is full",
    'c++ "-O0': "CXX: got 'c++ \"-O0', expected words of a command (No closing quotation)",
    '"': "CXX: got '\"', expected words of a command (No closing quotation)",
}


def script(directory, text):
    """A command that is such a script."""
    path = directory / "compiler"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("compiler", NOT_BUILT, ids=["none", "false", "fails", "quote", "only a quote"])
def test_a_wheel_without_a_core(build, tmp_path, compiler):
    """An install goes on without the core; it says why, and so does `info`."""
    command = script(tmp_path, compiler) if compiler.startswith("#!") else compiler
    _, wheel, unpacked, shown = build("wheel", command)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert files_of(unpacked / "cuflash" / "cpu" / "core") == ["build.txt"]
    why = run_python(WHICH_CORE, tmp_path, str(unpacked))
    assert why.startswith("it was not built when cuflash was installed: ")
    for said in (why, run_python(INFO, tmp_path, str(unpacked)), shown):
        assert NOT_BUILT[compiler] in " ".join(said.split()).replace(f"{tmp_path}/", "")


KNOWS_NO_AMX = """#!/bin/sh
for word in "$@"; do
    case "$word" in -mamx-tile|-mavx512bf16)
        echo "c++: error: unrecognized command-line option '$word'" >&2
        exit 1
    esac
done
exec {compiler} "$@"
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one kind of instructions")
def test_instructions_that_the_compiler_does_not_know_are_left_out(build, tmp_path, tmp_path_factory):
    """They alone, as by GCC 10; `info` says so."""
    text = KNOWS_NO_AMX.replace("{compiler}", compiler_of(tmp_path_factory))
    _, wheel, unpacked, shown = build("wheel", script(tmp_path, text))
    assert not wheel.name.endswith("-any.whl")
    assert files_of(unpacked / "cuflash" / "cpu" / "core") == ["build.txt", "libcuflash.so"]
    kind = run_python(WHICH_CORE, tmp_path, str(unpacked)).strip()
    assert kind in PROCESSORS and kind not in ("AMX", "AVX-512 with bfloat16")
    missing = "AMX: compiler failed (1): c++: error: unrecognized command-line option '-m"
    for said in (run_python(INFO, tmp_path, str(unpacked)), shown):
        assert missing in " ".join(said.split()).replace(f"{tmp_path}/", "")


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_build_forgets_what_an_earlier_one_left_out(build, tmp_path, tmp_path_factory):
    source, _, unpacked, _ = build("editable", "/no/such/compiler")
    assert "no C++ compiler" in run_python(WHICH_CORE, tmp_path, str(unpacked))
    run_backend("editable", source, tmp_path, CXX=compiler_of(tmp_path_factory))
    assert run_python(WHICH_CORE, tmp_path, str(unpacked)).strip() in PROCESSORS
    assert not (source / "cuflash" / "cpu" / "core" / "build.txt").exists()


def test_an_editable_install_reads_the_checkout(build, tmp_path):
    source, _, unpacked, _ = build("editable")
    package, directory, *names = run_python(USE_IT, tmp_path, str(unpacked)).splitlines()
    assert Path(package).parent == source / "cuflash"
    (path,) = unpacked.glob("*.pth")
    assert path.read_text().strip() == str(source)  # no import hook, which type checkers do not follow
    assert Path(directory) == source / "kernels"
    assert names == KERNELS


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_an_editable_install_builds_the_core_in_place(build, tmp_path):
    source, _, unpacked, _ = build("editable")
    assert run_python(WHICH_CORE, tmp_path, str(unpacked)).strip() in PROCESSORS
    (source / "cuflash" / "cpu" / "core" / "simd" / "vectors.h").write_text("")
    assert "other sources" in run_python(WHICH_CORE, tmp_path, str(unpacked))


# What nobody needs who computes on NumPy arrays: frameworks, tools, and the modules that are for devices or for ranks.
NOT_IMPORTED = {"cupy", "cuda", "torch", "jax", "mpi4py", "scipy", "sklearn", "matplotlib", "sphinx", "numpydoc"}
NOT_IMPORTED |= {"hypothesis", "pytest", "setuptools"}
NOT_IMPORTED |= {f"cuflash.{name}" for name in ("plan", "emulator", "cli", "distributed", "testing", "torch", "jax")}
NOT_IMPORTED |= {f"cuflash.gpu.{name}" for name in ("backend", "compiler", "nvrtc", "tuning", "timing")}


def test_import_brings_nothing_that_a_call_on_numpy_arrays_does_not_need():
    code = "import sys, cuflash; print(*sys.modules)"
    modules = set(run_python(code, CHECKOUT, str(CHECKOUT)).split())
    assert "numpy" in modules
    assert not NOT_IMPORTED & modules


def test_tab_completion_has_what_is_public():
    code = "import cuflash; print(*(name for name in dir(cuflash) if not name.startswith('_')))"
    names = run_python(code, CHECKOUT, str(CHECKOUT)).split()
    assert names == run_python("import cuflash; print(*cuflash.__all__)", CHECKOUT, str(CHECKOUT)).split()
    assert "block_masks" in names
    import cuflash.testing

    assert "testing" in dir(cuflash) and "__version__" in dir(cuflash)
    assert all(hasattr(cuflash, name) for name in dir(cuflash))


def test_import_is_quick():
    """Beyond the time of NumPy; in seconds of the processor, which other processes do not take."""
    code = "import numpy, time; start = time.process_time(); import cuflash; print(time.process_time() - start)"
    seconds = min(float(run_python(code, CHECKOUT, str(CHECKOUT))) for _ in range(3))
    assert seconds < 0.25


def test_ci_script_is_executable():
    assert os.access(CHECKOUT / ".ci" / "run", os.X_OK)
