"""The compiled core for 64-bit ARM: it compiles without a warning, and its tests pass on an emulated processor."""

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


@pytest.mark.skipif(not sampling.exhaustive, reason="an emulator is slow: with --exhaustive")
def test_core_on_an_emulated_processor(tmp_path):
    if missing := arm64.missing_tools():
        pytest.skip(f"no {', '.join(missing)}")
    arm64.main(tmp_path, [])
