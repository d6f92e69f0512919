"""Tests of the compiled core on an emulated 64-bit ARM processor: ``python -m tests.arm64 FOLDER [words of pytest]``.

Needs `aarch64-linux-gnu-g++`, `qemu-aarch64` and, to fill FOLDER the first time, `apt-get`, `dpkg` and a network: on
Debian, the packages g++-aarch64-linux-gnu and qemu-user. FOLDER gets Python for ARM from Debian, and NumPy and what the
tests import from the package index; a copy of the checkout in it is built by `setup.py`, as a user builds it.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64", "apt-get", "dpkg")
FROM_DEBIAN = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
FROM_INDEX = ("numpy>=2", "ml_dtypes", "hypothesis", "pytest", "setuptools", "array-api-strict")
FILES = (
    *("test_core.py", "test_core_threads.py", "test_core_tangents.py", "test_core_large_scores.py"),
    *("test_core_packed_tiles.py", "test_core_row_reductions.py", "test_cpu.py", "test_no_elements.py"),
    "test_without_values.py",
)
# Those that ask how much memory, or how many threads, a process has: an emulator has its own. And those that fork a
# process with threads, where QEMU ends with an assertion of its own.
OF_THE_PROCESS = "not (beside_inputs or stay_for_the_next or use_the_cores or forked_process)"


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def run(command: list[str], **options) -> None:
    subprocess.run(command, check=True, **options)


def fill_root(folder: Path) -> Path:
    """Unpack Python of Debian for ARM, without installing anything here."""
    root, apt = folder / "root", folder / "apt"
    if root.exists():
        return root
    for name in ("lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    own = {"State::status": apt / "status", "State::lists": apt / "lists", "Cache": apt / "cache"}
    options = [word for name, path in own.items() for word in ("-o", f"Dir::{name}={path}")]
    options += ["-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64", "-o", "APT::Sandbox::User=root"]
    run(["apt-get", "-q", *options, "update"])
    run(["apt-get", "-qy", *options, "--no-install-recommends", "--download-only", "install", *FROM_DEBIAN])
    unfinished = folder / "unfinished"
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        run(["dpkg", "-x", str(package), str(unfinished)])
    return unfinished.rename(root)


def fill_packages(folder: Path, version: str) -> Path:
    """Install what the tests import, for ARM."""
    packages = folder / "packages"
    if not packages.exists():
        platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]
        where = ["--quiet", "--only-binary=:all:", f"--python-version={version}", f"--target={folder / 'unfinished'}"]
        run([sys.executable, "-m", "pip", "install", *where, *platforms, *FROM_INDEX])
        (folder / "unfinished").rename(packages)
    return packages


def emulated(python: Path) -> Path:
    """A command of this processor that runs Python for ARM, and is what `sys.executable` names in it.

    So tests can start further processes.
    """
    command = python.with_name("emulated-python")
    command.write_text(f'#!/bin/sh\nexec qemu-aarch64 -0 "$0" {shlex.quote(str(python))} "$@"\n')
    command.chmod(0o755)
    return command


def main(folder: Path, words: list[str]) -> None:
    if missing := missing_tools():
        raise SystemExit(f"not found: {', '.join(missing)}")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    root = fill_root(folder)
    python = max((root / "usr" / "bin").glob("python3.[0-9]*"), key=lambda path: int(path.name.split(".")[1]))
    packages = fill_packages(folder, python.name.removeprefix("python"))

    checkout = folder / "checkout"
    shutil.rmtree(checkout, ignore_errors=True)
    without = shutil.ignore_patterns("__pycache__", "*.so", "build.txt", ".cache")
    for name in ("cuflash", "kernels", "tests", "bench"):
        shutil.copytree(CHECKOUT / name, checkout / name, ignore=without)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, checkout)
    environment = {
        "PYTHONPATH": f"{checkout}:{packages}",
        "OPENBLAS_NUM_THREADS": "1",
        "QEMU_LD_PREFIX": str(root),
        "CXX": "aarch64-linux-gnu-g++",
        "CXXFLAGS": "-Wall -Wextra -Werror",
    }
    command = str(emulated(python))
    options = {"cwd": checkout, "env": os.environ | environment}
    run([command, "setup.py", "-q", "build_ext", "--inplace"], **options)
    run([command, "-c", "from cuflash.cpu import core; assert core.why_not() is None, core.why_not()"], **options)
    chosen = words or ["-k", OF_THE_PROCESS, *(str(Path("tests", "pure", name)) for name in FILES)]
    run([command, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen], **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
