"""The compiled core for other systems and processors, by zig's Clang (`pip install ziglang`), which has their headers.

By default its interface is compiled for all six, and its kernels for two, without optimisation. With --exhaustive
setup.py builds whole libraries, and those that run here, by an emulator if need be, are compared with the formula.
"""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zlib

import pytest

from cuflash.cpu import core
from tests import sampling
from tests.compiled import CHECKOUT

CORE = CHECKOUT / "cuflash" / "cpu" / "core"
PROGRAM = CHECKOUT / "tests" / "core" / "library.cpp"
MOST_BYTES = 1_000_000  # compressed, as in a wheel of at most 2 MB, of which the other files are half
# Of each target: how its library is called, with which bytes it begins, and where its processor is named, how.
TARGETS = {
    "x86_64-linux-gnu.2.28": ("libcuflash.so", b"\x7fELF", 18, b"\x3e\x00"),
    "aarch64-linux-gnu.2.28": ("libcuflash.so", b"\x7fELF", 18, b"\xb7\x00"),
    "x86_64-macos": ("libcuflash.dylib", b"\xcf\xfa\xed\xfe", 4, b"\x07\x00\x00\x01"),
    "aarch64-macos": ("libcuflash.dylib", b"\xcf\xfa\xed\xfe", 4, b"\x0c\x00\x00\x01"),
    "x86_64-windows-gnu": ("libcuflash.dll", b"MZ", None, b"PE\x00\x00\x64\x86"),
    "aarch64-windows-gnu": ("libcuflash.dll", b"MZ", None, b"PE\x00\x00\x64\xaa"),
}
# What runs programs of some of them here.
RUNNERS = {
    "x86_64-windows-gnu": ["wine"],
    "aarch64-linux-gnu.2.28": ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"],
}
# GCC for Windows, with either of its layers of threads: the core uses neither.
MINGW = ("x86_64-w64-mingw32-g++-posix", "x86_64-w64-mingw32-g++")
needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no ziglang")


def zig(target):
    return [sys.executable, "-m", "ziglang", "c++", "-target", target]


def flags_of_setup():
    """`FLAGS` of setup.py, which cannot be imported."""
    tree = ast.parse((CHECKOUT / "setup.py").read_text("utf-8"))
    values = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLAGS"
    ]
    (value,) = values
    return ast.literal_eval(value)


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=1800, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def compile_unit(target, unit, tmp_path, *words):
    """Compile one file of the core, quickly; every warning but those about options is an error."""
    fast = ["-O0", "-g0", "-fno-sanitize=all", "-Werror", "-Wno-unused-command-line-argument"]
    run([*zig(target), *flags_of_setup(), *fast, *words, "-c", str(CORE / unit), "-o", str(tmp_path / "unit.o")])
    assert (tmp_path / "unit.o").stat().st_size > 1000


def test_no_number_of_the_core_has_another_size_on_windows():
    """`long` has 32 bits there: sizes and offsets are `int64_t`. A sum may be `long double`."""
    found = []
    for path in sorted(path for path in CORE.rglob("*") if path.suffix in (".h", ".cpp")):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if re.search(r"\blong\b(?!\s+double)|\d[uU]?[lL]\b", line.partition("//")[0]):
                found.append(f"{path.relative_to(CORE)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


# A compiler for a triple, which writes down how it is called, and what it is to make.
COMPILER = """#!/bin/sh
for word in "$@"; do
    case "$word" in
        -dumpmachine) echo {triple}; exit 0;;
        --version) echo "{version}"; exit 0;;
    esac
done
echo "$@" >> {log}
for word in "$@"; do
    if [ "$last" = -o ]; then echo made > "$word"; fi
    last=$word
done
"""
LINKED = {
    "x86_64-linux-gnu": (".so", "-shared -pthread -Wl,--gc-sections -s", "-fPIC", 5),
    "aarch64-unknown-linux-musl": (".so", "-shared -pthread -Wl,--gc-sections -s", "-fPIC", 1),
    "arm64-apple-darwin23.6.0": (
        ".dylib",
        "-dynamiclib -Wl,-dead_strip -Wl,-install_name,@rpath/libcuflash.dylib -Wl,-x",
        "-fPIC",
        1,
    ),
    "x86_64-apple-darwin23.6.0": (
        ".dylib",
        "-dynamiclib -Wl,-dead_strip -Wl,-install_name,@rpath/libcuflash.dylib -Wl,-x",
        "-fPIC",
        5,
    ),
    "x86_64-w64-mingw32": (".dll", "-shared -Wl,--gc-sections -static -s", "-Wa,-muse-unaligned-vector-move", 5),
    "x86_64-w64-windows-gnu": (".dll", "-shared -Wl,--gc-sections -s", "-std=c++17", 5),
    "aarch64-pc-windows-msvc": (".dll", "-shared -fuse-ld=lld -Wl,/OPT:REF", "-std=c++17", 1),
}


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
@pytest.mark.parametrize("triple", LINKED)
def test_setup_builds_as_the_system_of_the_compiler_does(triple, tmp_path):
    suffix, link, flag, count = LINKED[triple]
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    is_gcc = "w64-mingw32" in triple or triple == "x86_64-linux-gnu"
    version = "Copyright (C) Free Software Foundation, Inc." if is_gcc else "clang version 20"
    compiler.write_text(COMPILER.format(triple=triple, log=log, version=version))
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": f"{compiler} -one", "ARCHFLAGS": "-arch two", "CXXFLAGS": "-three"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "built")]
    shown = run(command, cwd=CHECKOUT, env=environment)
    (library,) = (tmp_path / "built").rglob("*.*")
    assert library.name == f"libcuflash{suffix}"
    *units, last = log.read_text().splitlines()
    assert len(units) == count + 1 and all(" -c " in unit and unit.startswith("-one -arch two ") for unit in units)
    assert all(flag in unit and ("-fPIC" in unit) == (suffix != ".dll") and "-three" in unit for unit in units)
    assert ("-nostdlib++" in last) == (not is_gcc and "msvc" not in triple)
    last = last.replace(" -nostdlib++", "")
    gcc_only = any("-fvect-cost-model" in unit or "-Wa," in unit for unit in units)
    assert gcc_only == is_gcc
    assert last.startswith(f"-one -arch two {link} ") and last.count(".o ") == count + 1
    left_out = units[-1].count("IS_LEFT_OUT(")
    assert "core.cpp" in units[-1] and left_out == 5 - count
    assert f"compiles the core of the CPU path for {triple}, {count} times" in shown
    assert f"built libcuflash{suffix} with" in shown


@needs_zig
@pytest.mark.parametrize("target", TARGETS)
def test_the_interface_compiles_for(target, tmp_path):
    compile_unit(target, "core.cpp", tmp_path, '-DSOURCES=""')


@needs_zig
@pytest.mark.parametrize("target", ["aarch64-macos", "x86_64-windows-gnu"])
def test_the_kernels_compile_for(target, tmp_path):
    compile_unit(target, "target.cpp", tmp_path, "-DTARGET=baseline")


def build_program(compiler, target, tmp_path):
    path = tmp_path / ("library.exe" if "windows" in target else "library")
    libraries = ["-static"] if "windows" in target else ["-ldl"]  # without libraries of the compiler
    run([*compiler, "-std=c++17", "-O1", f"-I{CORE}", str(PROGRAM), "-o", str(path), *libraries])
    return path


def check_library(program, library, *runner):
    """The program says how many checks there were, and fails if any of them does."""
    printed = run([*runner, str(program), str(library)], env=os.environ | {"WINEDEBUG": "-all"})
    found = re.search(r"(\d+) checks, 0 failures", printed)
    assert found and int(found[1]) > 100_000, printed


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.skipif(core.why_not() is not None, reason="no compiled core")
def test_the_library_of_this_system(tmp_path):
    check_library(build_program(["c++"], sys.platform, tmp_path), core.LIBRARY)


def build_library(compiler, tmp_path):
    """By setup.py, as a user builds it: the folder that it is in."""
    environment = os.environ | {"CXX": " ".join(compiler), "CXXFLAGS": ""}
    run([sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)], cwd=CHECKOUT, env=environment)
    assert not list(CHECKOUT.glob("*.o"))
    return tmp_path / CORE.relative_to(CHECKOUT)


needs_time = pytest.mark.skipif(not sampling.exhaustive, reason="compiles for minutes: with --exhaustive")


@needs_time
def test_mingw_builds_the_library_for_windows(tmp_path):
    """GCC, whose C library wine has; it runs by every instruction set of this processor."""
    compiler = next(filter(shutil.which, MINGW), None)
    if compiler is None or shutil.which("wine") is None:
        pytest.skip("no MinGW-w64 or no wine")
    folder = build_library([compiler], tmp_path)
    assert [path.name for path in folder.iterdir()] == ["libcuflash.dll"]
    assert len(zlib.compress((folder / "libcuflash.dll").read_bytes())) <= MOST_BYTES
    check_library(build_program([compiler], "windows", tmp_path), folder / "libcuflash.dll", "wine")


@needs_zig
@needs_time
@pytest.mark.parametrize("target", TARGETS)
def test_setup_builds_the_library_for(target, tmp_path):
    name, begin, at, machine = TARGETS[target]
    folder = build_library(zig(target), tmp_path)
    assert [path.name for path in folder.iterdir()] == [name]  # and no note of what is missing
    content = (folder / name).read_bytes()
    assert len(zlib.compress(content)) <= MOST_BYTES
    assert content.startswith(begin)
    assert content[at:].startswith(machine) if at else machine in content[:1024]
    if target.startswith("x86_64-linux") and sys.platform == "linux":
        check_library(build_program(zig(target), target, tmp_path), folder / name)
    runner = RUNNERS.get(target)
    if runner and shutil.which(runner[0]):
        check_library(build_program(zig(target), target, tmp_path), folder / name, *runner)
