"""The package as people get it: built wheels, of the checkout and editable ones."""

import functools
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parents[1]


class Built(NamedTuple):
    """A built package: its source, the wheel, the directory with its content, and what the build has shown."""

    source: Path
    wheel: Path
    unpacked: Path
    shown: str


def run_backend(kind, source, built, **environment):
    """Build a wheel or an editable one, offline; returns what is shown."""
    code = f"import setuptools.build_meta as backend; backend.build_{kind}({str(built)!r})"
    env = os.environ | {"CXXFLAGS": "-O0"} | environment  # fast to compile
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, cwd=source, env=env, check=True, capture_output=True, text=True, timeout=300)
    return shown.stdout + shown.stderr


def builder(tmp_path_factory):
    """Builds a wheel or an editable one of a copy of the checkout, once; the copy is gone where it is a wheel."""

    @functools.cache
    def build(kind, compiler=None):
        source, built, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "built", "unpacked"))
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(CHECKOUT / name, source)
        without = shutil.ignore_patterns("__pycache__", "*.so", "build.txt")
        for name in ("cuflash", "kernels"):
            shutil.copytree(CHECKOUT / name, source / name, ignore=without)
        shown = run_backend(kind, source, built, **({} if compiler is None else {"CXX": compiler}))
        (wheel,) = built.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        if kind == "wheel":
            shutil.rmtree(source)
        return Built(source, wheel, unpacked, shown)

    return build
