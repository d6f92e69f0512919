"""Builds the compiled core of the CPU path beside the package, where there is a C++ compiler.

Everything else is said in pyproject.toml. Without a compiler, or where it fails, the install goes on without the core,
and NumPy arrays are computed by NumPy. The core has no interface of Python's: one wheel serves all of its versions.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = "cuflash/cpu/core"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-ffp-contract=fast"]
LINK_FLAGS = ["-shared", "-pthread", "-Wl,--gc-sections", "-s"]
# Kernels are compiled once for each kind of processor, and chosen from where they run.
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"]
BFLOAT16 = [*AVX512, "-mavx512bf16", "-DONLY_BFLOAT16"]
KINDS = {
    "x86_64": {
        "baseline": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": AVX512,
        "avx512_bfloat16": BFLOAT16,
        "amx": [*BFLOAT16, "-mamx-tile", "-mamx-bf16"],
    },
    "other": {"baseline": []},
}


def hash_of_sources() -> str:
    """As `cuflash.cpu.core` computes it, to tell whether the library was built of the sources beside it."""
    files = sorted(path for path in Path(SOURCES).iterdir() if path.suffix in (".h", ".cpp"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class BuildCore(build_ext):
    """Compiles the sources with CXX, or c++, and CXXFLAGS, and never fails."""

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name))
        target.unlink(missing_ok=True)
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        if shutil.which(compiler[0]) is None:
            print(f"cuflash: no C++ compiler ({compiler[0]}): NumPy arrays will be computed by NumPy", file=sys.stderr)
            return
        try:
            with tempfile.TemporaryDirectory() as directory:
                self._compile(compiler, Path(directory), target)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"cuflash: no compiled core, NumPy arrays will be computed by NumPy: {error}", file=sys.stderr)

    def _compile(self, compiler: list[str], directory: Path, target: Path) -> None:
        kinds = KINDS.get("x86_64" if platform.machine().lower() in ("x86_64", "amd64") else "other", {})
        units = {f"{kind}.o": ["kernels.cpp", f"-DKIND={kind}", *flags] for kind, flags in kinds.items()}
        units["core.o"] = ["core.cpp", f'-DSOURCES="{hash_of_sources()}"']
        own_flags = shlex.split(os.environ.get("CXXFLAGS", ""))
        running = [
            subprocess.Popen(
                [*compiler, *FLAGS, *own_flags, *flags, "-c", f"{SOURCES}/{source}", "-o", str(directory / name)]
            )
            for name, (source, *flags) in units.items()
        ]
        # Every one of them is waited for: the directory goes when this function ends.
        failed = [process for process in running if process.wait() != 0]
        if failed:
            raise subprocess.CalledProcessError(failed[0].returncode, compiler)
        target.parent.mkdir(parents=True, exist_ok=True)
        objects = [str(directory / name) for name in units]
        built = directory / "built.so"
        subprocess.run([*compiler, *LINK_FLAGS, *objects, "-o", str(built)], check=True)
        shutil.copy(built, target)

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of a version of Python."""
        return f"{fullname.replace('.', '/')}.so"

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]

    def copy_extensions_to_source(self) -> None:
        """For an editable install: the library goes beside its sources, if there is one."""
        for extension in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(extension.name))
            beside = Path(self.get_ext_filename(extension.name))
            beside.unlink(missing_ok=True)
            if built.exists():
                shutil.copy(built, beside)


class Wheel(bdist_wheel):
    """Of any version of Python 3, for one platform if the core is inside."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2] if _has_core(self.bdist_dir) else "any"


def _has_core(directory: str) -> bool:
    return any(Path(directory).glob(f"{SOURCES}/*.so"))


class WithCore(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=WithCore,
    ext_modules=[Extension("cuflash.cpu.core.libcuflash", sources=[])],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": Wheel},
)
