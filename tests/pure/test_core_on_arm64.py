"""The compiled core for 64-bit ARM: it compiles without a warning, and its tests pass on an emulated processor."""

import re
import shutil
import subprocess

import pytest

from tests import arm64, sampling

COMPILERS = {
    "g++": ["aarch64-linux-gnu-g++"],
    "clang++": ["clang++", "--target=aarch64-linux-gnu"],
}
CORE = arm64.CHECKOUT / "cuflash" / "cpu" / "core"


@pytest.mark.parametrize("name", COMPILERS)
def test_core_has_no_warnings_on_arm64(name):
    """Wherever there is a compiler for it."""
    compiler = COMPILERS[name]
    if shutil.which(compiler[0]) is None or shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip(f"no {name} for 64-bit ARM")
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-DTARGET=baseline", '-DSOURCES="none"']
    for source in ("target.cpp", "core.cpp"):
        done = subprocess.run([*compiler, *flags, str(CORE / source)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-5000:]


# Which sources of the core a program of tests/core needs besides its own.
PROGRAMS = {"operations": (), "calls": ("core.cpp", "target.cpp")}  # the emulator fails after fork, as in threads
LEFT_OUT = " ".join(f"IS_LEFT_OUT({name})" for name in ("avx2", "avx512", "avx512_bfloat16", "amx"))
needs_time = pytest.mark.skipif(not sampling.exhaustive, reason="an emulator is slow: with --exhaustive")


@needs_time
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_on_an_emulated_processor(program, tmp_path):
    """The C++ tests of the core, by NEON."""
    tools = ("aarch64-linux-gnu-g++", "qemu-aarch64")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"no {', '.join(missing)}")
    tests = arm64.CHECKOUT / "tests" / "core"
    sources = [tests / f"{program}.cpp", *(CORE / name for name in PROGRAMS[program])]
    flags = ["-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast", "-O1", "-pthread", "-static"]
    flags += [f"-I{CORE}", f"-I{tests}", "-DTARGET=baseline", '-DSOURCES=""', f"-DLEFT_OUT={LEFT_OUT}"]
    subprocess.run([tools[0], *flags, *map(str, sources), "-o", str(tmp_path / program)], check=True, timeout=1200)
    done = subprocess.run([tools[1], str(tmp_path / program)], capture_output=True, text=True, timeout=3600)
    said = done.stdout + done.stderr
    found = re.search(r"(\d+) checks, 0 failures", said)
    assert done.returncode == 0 and found and int(found[1]) > 0, said[-10_000:]


@needs_time
def test_core_on_an_emulated_processor(tmp_path):
    if missing := arm64.missing_tools():
        pytest.skip(f"no {', '.join(missing)}")
    arm64.main(tmp_path, [])
