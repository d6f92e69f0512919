"""The package as people get it: built wheels, of the checkout and editable ones."""

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parents[1]
# Where `.ci/run` keeps the objects of the core that it builds, of these sources: builds that tests make take them.
_SOURCES = sorted(path for path in (CHECKOUT / "cuflash/cpu/core").rglob("*") if path.suffix in (".h", ".cpp"))
_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()
KEPT = CHECKOUT / "build" / f"objects-{_DIGEST[:16]}"
# A compiler that keeps what it compiles, since many packages have the same core: by the sources and the arguments.
KEEPS_OBJECTS = """#!/bin/sh
case " $* " in *" -c "*) ;; *) exec c++ "$@" ;; esac
for word in "$@"; do
    [ "$last" = -o ] && object=$word
    last=$word
done
sources=$(find cuflash/cpu/core -name "*.[hc]*" -exec sha256sum {{}} + | sort)
key=$(echo "$sources" "$@" | sed "s|$object||" | sha256sum)
kept="{folder}/${{key%% *}}"
if [ -f "$kept" ]; then exec cp "$kept" "$object"; fi
c++ "$@" || exit
cp "$object" "$kept.$$" && mv "$kept.$$" "$kept"
"""


class Built(NamedTuple):
    """A built package: its source, the wheel, the directory with its content, and what the build has shown."""

    source: Path
    wheel: Path
    unpacked: Path
    shown: str


def run_backend(kind, source, built, **environment):
    """Build a wheel or an editable one, offline; returns what is shown."""
    code = f"import setuptools.build_meta as backend; backend.build_{kind}({str(built)!r})"
    quickly = {} if KEPT.exists() else {"CXXFLAGS": "-O0"}
    env = os.environ | quickly | environment
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, cwd=source, env=env, check=True, capture_output=True, text=True, timeout=300)
    return shown.stdout + shown.stderr


def compiler_of(tmp_path_factory):
    """A command that compiles as c++ does, for all processes of pytest-xdist together."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "objects"
    return compiler_that_keeps(KEPT if KEPT.exists() else folder)


def compiler_that_keeps(folder):
    """A command that compiles as c++ does, and keeps the objects in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / f"compiler-{os.getpid()}"
    command.write_text(KEEPS_OBJECTS.format(folder=folder))
    command.chmod(0o755)
    return shlex.quote(str(command))


def builder(tmp_path_factory):
    """Builds a wheel or an editable one of a copy of the checkout, once; the copy is gone where it is a wheel."""
    usual = compiler_of(tmp_path_factory)

    @functools.cache
    def build(kind, compiler=None):
        source, built, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "built", "unpacked"))
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(CHECKOUT / name, source)
        without = shutil.ignore_patterns("__pycache__", "*.so", "build.txt")
        for name in ("cuflash", "kernels"):
            shutil.copytree(CHECKOUT / name, source / name, ignore=without)
        shown = run_backend(kind, source, built, CXX=usual if compiler is None else compiler)
        (wheel,) = built.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        if kind == "wheel":
            shutil.rmtree(source)
        return Built(source, wheel, unpacked, shown)

    return build


if __name__ == "__main__":
    print(compiler_that_keeps(KEPT))
