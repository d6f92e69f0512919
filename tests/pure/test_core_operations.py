"""The C++ tests of the compiled core (`tests/core/`): its operations, its threads, and whole calls.

By default they are compiled once, for the best instruction set of this machine, and whole calls are those of the
library that is installed. With --exhaustive they are compiled for every instruction set that the machine has, by every
compiler that it has, with and without sanitizers, and take dense samples. AMX is computed by a model of its registers.
"""

import functools
import os
import platform
import runpy
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cuflash.cpu import core
from tests import sampling
from tests.compiled import CHECKOUT

if core.why_not() is not None:
    pytest.skip(f"no compiled core: {core.why_not()}", allow_module_level=True)

SOURCES, TESTS = core.LIBRARY.parent, CHECKOUT / "tests" / "core"
# How sanitizers are compiled in, and what lets allocations fail and processes fork under them.
SANITIZERS = {
    "": "",
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
    "thread": "-fsanitize=thread",
}
OPTIONS = {
    "ASAN_OPTIONS": "allocator_may_return_null=1",
    "TSAN_OPTIONS": "allocator_may_return_null=1:die_after_fork=0",
}
MODEL = "-DMODEL_OF_TILES"
OPTIMIZED = ["-O1", "-fexpensive-optimizations"]  # with which GCC fuses products and sums, as it does in the core


@functools.cache
def of_setup() -> dict[str, Any]:
    """What setup.py defines: flags of the compiler, and the targets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **arguments: None)
        return runpy.run_path(str(CHECKOUT / "setup.py"))


def targets() -> dict[str, list[str]]:
    """The targets that run here, the best one last, with their flags."""
    machine = "x86_64" if platform.machine().lower() in ("x86_64", "amd64") else "other"
    names, here = of_setup()["NAMES"], set(core.instruction_sets())
    found = {
        name: flags for name, flags in of_setup()["TARGETS"][machine].items() if names.get(name, "") in (*here, "")
    }
    if sampling.exhaustive and "avx2" in found:
        found["amx"] = [*of_setup()["MODEL_OF_AMX"], MODEL]
    return found


def compilers() -> list[str]:
    found = [name for name in ("g++", "clang++") if shutil.which(name)] if sampling.exhaustive else []
    return found or [name for name in ("c++",) if shutil.which(name)]


def sanitizers() -> list[str]:
    return list(SANITIZERS) if sampling.exhaustive else [""]


COMPILERS, TARGETS = compilers(), targets()
if not COMPILERS:
    pytest.skip("no C++ compiler", allow_module_level=True)
CHOSEN = list(TARGETS) if sampling.exhaustive else list(TARGETS)[-1:]


def compile(
    compiler: str, sanitizer: str, target: str, sources: Sequence[Path | str], program: Path, *more: str
) -> None:
    flags = [flag for flag in of_setup()["FLAGS"] if flag != "-fvisibility=hidden"]
    gcc = "clang" not in subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    flags += [*(OPTIMIZED if gcc else OPTIMIZED[:1]), "-pthread", f"-I{SOURCES}", f"-I{TESTS}"]
    flags += [*TARGETS[target], *SANITIZERS[sanitizer].split(), *(["-DSANITIZED", "-g1"] if sanitizer else [])]
    flags += ["-DDENSE"] if sampling.exhaustive else []
    ended = subprocess.run(
        [compiler, *flags, *more, *map(str, sources), "-o", str(program)], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-10_000:]


def run(program: Path) -> None:
    ended = subprocess.run([program], env=os.environ | OPTIONS, capture_output=True, text=True, timeout=3600)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-20_000:]
    assert "Sanitizer: " not in said and "runtime error" not in said, said[-20_000:]


@pytest.mark.parametrize("target", CHOSEN)
@pytest.mark.parametrize("sanitizer", [name for name in sanitizers() if name != "thread"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_operations(tmp_path, compiler, sanitizer, target):
    compile(compiler, sanitizer, target, [TESTS / "operations.cpp"], tmp_path / "operations")
    run(tmp_path / "operations")


@pytest.mark.parametrize("sanitizer", sanitizers())
@pytest.mark.parametrize("compiler", COMPILERS)
def test_threads(tmp_path, compiler, sanitizer):
    compile(compiler, sanitizer, "baseline", [TESTS / "threads.cpp"], tmp_path / "threads")
    run(tmp_path / "threads")


@pytest.mark.parametrize("sanitizer", sanitizers())
@pytest.mark.parametrize("compiler", COMPILERS)
def test_calls(tmp_path, compiler, sanitizer):
    """Of the library that is installed, or of all targets that run here, compiled for sanitizers."""
    program, tests = tmp_path / "calls", TESTS / "calls.cpp"
    if not sampling.exhaustive:
        compile(compiler, "", "baseline", [tests, core.LIBRARY], program, f"-Wl,-rpath,{core.LIBRARY.parent}")
    else:
        units: dict[str, list[Path | str]] = {
            target: [SOURCES / "target.cpp", f"-DTARGET={target}"] for target in TARGETS
        }
        objects = [tmp_path / f"{target}.o" for target in units]
        with ThreadPoolExecutor() as pool:
            jobs = [
                pool.submit(compile, compiler, sanitizer, target, unit, tmp_path / f"{target}.o", "-c")
                for target, unit in units.items()
            ]
        for job in jobs:
            job.result()
        left_out = " ".join(f"IS_LEFT_OUT({name})" for name in of_setup()["NAMES"] if name not in TARGETS)
        definitions = ['-DSOURCES=""', f"-DLEFT_OUT={left_out}", *([MODEL] if "amx" in TARGETS else [])]
        compile(compiler, sanitizer, "baseline", [tests, SOURCES / "core.cpp", *objects], program, *definitions)
    run(program)
