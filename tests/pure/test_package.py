"""The package as people get it: importable without CuPy and quickly, with its kernels however it was installed."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuflash

CHECKOUT = Path(__file__).parents[2]
DEPENDENCIES = sorted({str(Path(module.__path__[0]).parent) for module in (np, ml_dtypes)})
FOLDER = CHECKOUT / "kernels"
KERNELS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.cu*"))

PROCESSORS = ("AMX", "AVX-512 with bfloat16", "AVX-512", "AVX2", "SSE2", "NEON", "generic")

USE_IT = """
import cuflash, cuflash.compiler, numpy
q, k, v = numpy.ones((3, 2, 5, 4), numpy.float32)
assert abs(cuflash.attention(q, k, v) - 1).max() < 1e-6
directory = cuflash.compiler.kernel_directory()
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


WHICH_CORE = """
import cuflash.cpu.core as core, numpy, cuflash
q = numpy.ones((2, 50, 8), numpy.float32)
assert abs(cuflash.attention(q, q, q) - 1).max() < 1e-6
print(core.why_not() or core.processor())
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Builds a wheel or an editable one of a copy of the checkout, offline; gives the copy, the wheel, its content."""
    pytest.importorskip("setuptools", minversion="77", reason="the wheel is built with setuptools 77 or later")

    def build(kind, **environment):
        source, built, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "built", "unpacked"))
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(CHECKOUT / name, source)
        for name in ("cuflash", "kernels"):
            shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        code = f"import setuptools.build_meta as backend; backend.build_{kind}({str(built)!r})"
        env = os.environ | {"CXXFLAGS": "-O0"} | environment  # fast to compile
        subprocess.run([sys.executable, "-c", code], cwd=source, env=env, check=True, capture_output=True, timeout=300)
        (wheel,) = built.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        return source, wheel, unpacked

    return build


def test_a_checkout_works_as_it_is(tmp_path):
    package, directory, *names = run_python(USE_IT, tmp_path, str(CHECKOUT)).splitlines()
    assert Path(package).parent == CHECKOUT / "cuflash"
    assert Path(directory) == CHECKOUT / "kernels"
    assert names == KERNELS


def test_a_wheel_works_elsewhere(build, tmp_path):
    source, wheel, unpacked = build("wheel")
    shutil.rmtree(source)
    package, directory, *names = run_python(USE_IT, tmp_path, str(unpacked)).splitlines()
    assert Path(package).parent == unpacked / "cuflash"
    assert Path(directory) == unpacked / "cuflash" / "kernels"
    assert names == KERNELS
    assert (unpacked / "cuflash" / "py.typed").exists()
    assert files_of(unpacked / "cuflash" / "emulator") == files_of(CHECKOUT / "cuflash" / "emulator")
    assert run_python("import cuflash.emulator, cuflash.cli.main", tmp_path, str(unpacked)) == ""
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == {"cuflash"}
    assert wheel.stat().st_size < 1_500_000
    assert wheel.name.startswith(f"cuflash-{cuflash.__version__}-")


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_wheel_has_the_core_and_serves_every_version_of_python(build, tmp_path):
    source, wheel, unpacked = build("wheel")
    shutil.rmtree(source)
    *_, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none") and platform != "any"
    names = {path.name for path in (unpacked / "cuflash" / "cpu" / "core").iterdir()}
    assert names == {"libcuflash.so"}
    assert run_python(WHICH_CORE, tmp_path, str(unpacked)).strip() in PROCESSORS


@pytest.mark.parametrize("compiler", ["false", "/no/such/compiler"])
def test_a_wheel_without_a_compiler(build, tmp_path, compiler):
    """An install goes on without the core, and says so."""
    source, wheel, unpacked = build("wheel", CXX=compiler)
    shutil.rmtree(source)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not (unpacked / "cuflash" / "cpu" / "core").exists()
    assert "no C++ compiler" in run_python(WHICH_CORE, tmp_path, str(unpacked))


def test_an_editable_install_reads_the_checkout(build, tmp_path):
    source, _, unpacked = build("editable")
    package, directory, *names = run_python(USE_IT, tmp_path, str(unpacked)).splitlines()
    assert Path(package).parent == source / "cuflash"
    assert Path(directory) == source / "kernels"
    assert names == KERNELS


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_an_editable_install_builds_the_core_in_place(build, tmp_path):
    source, _, unpacked = build("editable")
    assert run_python(WHICH_CORE, tmp_path, str(unpacked)).strip() in PROCESSORS
    (source / "cuflash" / "cpu" / "core" / "vectors.h").write_text("")
    assert "other sources" in run_python(WHICH_CORE, tmp_path, str(unpacked))


def test_import_brings_neither_a_framework_nor_a_test_library():
    code = "import sys, cuflash; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    modules = run_python(code, CHECKOUT, str(CHECKOUT)).split()
    assert "numpy" in modules
    assert not {"cupy", "cuda", "torch", "jax", "hypothesis", "matplotlib", "scipy"} & set(modules)


def test_tab_completion_has_what_is_public():
    code = "import cuflash; print(*(name for name in dir(cuflash) if not name.startswith('_')))"
    names = run_python(code, CHECKOUT, str(CHECKOUT)).split()
    assert names == run_python("import cuflash; print(*cuflash.__all__)", CHECKOUT, str(CHECKOUT)).split()
    assert "block_masks" in names
    import cuflash.testing

    assert "testing" in dir(cuflash) and "__version__" in dir(cuflash)
    assert all(hasattr(cuflash, name) for name in dir(cuflash))


def test_import_is_quick():
    code = "import numpy, time; start = time.perf_counter(); import cuflash; print(time.perf_counter() - start)"
    seconds = min(float(run_python(code, CHECKOUT, str(CHECKOUT))) for _ in range(3))
    assert seconds < 0.5


def test_the_version_is_the_newest_one_everywhere():
    changelog, citation = ((CHECKOUT / name).read_text() for name in ("docs/changelog.md", "CITATION.cff"))
    newest = re.search(r"^## (.*)$", changelog, re.MULTILINE)
    assert newest is not None and newest[1] in (cuflash.__version__, "Unreleased")
    assert f"\n## {cuflash.__version__}\n" in changelog
    assert f"\nversion: {cuflash.__version__}\n" in citation


def test_ci_script_is_executable():
    assert os.access(CHECKOUT / ".ci" / "run", os.X_OK)
