"""Builds the compiled core of the CPU path beside the package, where there is a C++ compiler.

Everything else is said in pyproject.toml. Without a compiler, or where it fails, the install goes on without the core,
and NumPy arrays are computed by NumPy; where it fails for a target, only the kernels for that one are missing.
The core has no interface of Python's: one wheel serves all of its versions.
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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCES = "cuflash/cpu/core"
KERNELS = Path("kernels")
NOTE = "build.txt"  # beside the library: why there is none, or what it lacks
MOST_SAID = 500  # characters of what a compiler said
FLAGS = ["-std=c++17", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-ffp-contract=fast"]
FAST = ["-O3"]
QUICKLY_BUILT = ["-O2"]  # for processors that hardly exist
# GCC for x86-64 makes loops as fast as those of -O3 of it, whose registers and unrolling are spelled out, in two thirds
# of the time. Without the passes that the baseline goes without, calls would take 2 to 4 % longer.
BY_GCC = [*QUICKLY_BUILT, "-fvect-cost-model=dynamic"]
QUICKLY_BUILT_BY_GCC = [*BY_GCC, "-fno-tree-pta", "-fno-gcse", "-fno-tree-vrp", "-fno-thread-jumps"]


class System(NamedTuple):
    """What the compilers of an operating system need."""

    suffix: str  # of a library
    compilers: list[str]  # the first one that there is, without CXX
    flags: list[str]
    link: list[str]
    strip: list[str]


SYSTEMS = {
    "linux": System(".so", ["c++"], ["-fPIC"], ["-shared", "-pthread", "-Wl,--gc-sections"], ["-s"]),
    "macos": System(
        ".dylib",
        ["c++"],
        ["-fPIC"],
        ["-dynamiclib", "-Wl,-dead_strip", "-Wl,-install_name,@rpath/libcuflash.dylib"],
        ["-Wl,-x"],
    ),
    "windows": System(".dll", ["c++", "g++", "clang++"], [], ["-shared", "-Wl,--gc-sections"], ["-s"]),
    "msvc": System(".dll", ["clang++"], [], ["-shared", "-fuse-ld=lld", "-Wl,/OPT:REF"], []),  # Clang for its libraries
}
# GCC for Windows keeps vectors of 32 bytes where only 16 are aligned (its bug 54412): these moves do not mind.
MINGW_GCC = ["-Wa,-muse-unaligned-vector-move"]
# Libraries of GCC go into the core, because other machines do not have them. It needs none of Clang's, with which zig
# would make an archive.
MINGW_GCC_LINK = ["-static"]
# Kernels are compiled once for each target, and chosen from where they run.
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"]
BFLOAT16 = [*AVX512, "-mavx512bf16", "-DONLY_BFLOAT16"]
TARGETS = {
    "x86_64": {
        "baseline": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": AVX512,
        "avx512_bfloat16": BFLOAT16,
        "amx": [*BFLOAT16, "-mamx-tile", "-mamx-bf16"],
    },
    "other": {"baseline": []},
}
# For tests, with -DMODEL_OF_TILES in CXXFLAGS: AVX2 computes what AMX does.
MODEL_OF_AMX = ["-mavx2", "-mfma", "-mf16c", "-DONLY_BFLOAT16"]
# As `cuflash_processor` of the core says them.
NAMES = {"avx2": "AVX2", "avx512": "AVX-512", "avx512_bfloat16": "AVX-512 with bfloat16", "amx": "AMX"}


def hash_of_sources() -> str:
    """As `cuflash.cpu.core` computes it, to tell whether the library was built of the sources beside it."""
    files = sorted(path for path in Path(SOURCES).rglob("*") if path.suffix in (".h", ".cpp"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class NotBuiltError(Exception):
    """Why there is no compiled core."""


def _words_of(variable: str) -> list[str]:
    """The words of an environment variable, as a shell splits them."""
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise NotBuiltError(f"{variable}: got {text!r}, expected words of a command ({error})") from None


def _compiler() -> list[str]:
    """The command of the compiler: CXX, or the first one that is found, for the processor that ARCHFLAGS names."""
    usual = next((one for one in _system(_triple_of_machine()).compilers if shutil.which(one)), "c++")
    return [*(_words_of("CXX") or [usual]), *_words_of("ARCHFLAGS")]


def _said_by_compiler(option: str) -> str:
    """What the compiler prints for an option; an empty text if it cannot be run."""
    try:
        command = [*_compiler(), option, "-o", os.devnull]  # else zig leaves an empty a.o
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except (OSError, NotBuiltError):
        return ""
    return process.stdout


def _triple() -> str:
    """What the compiler compiles for, such as x86_64-linux-gnu; this machine where it does not say."""
    words = _said_by_compiler("-dumpmachine").split()
    return words[0].lower() if len(words) == 1 else _triple_of_machine()


def _triple_of_machine() -> str:
    return f"{platform.machine()}-{sys.platform}".lower()


def _system(triple: str) -> System:
    if "msvc" in triple:
        return SYSTEMS["msvc"]
    if any(word in triple for word in ("mingw", "windows", "win32")):
        return SYSTEMS["windows"]
    return SYSTEMS["macos" if any(word in triple for word in ("darwin", "macos", "apple")) else "linux"]


def _failure_of(command: list[str]) -> str:
    """Run a compiler; returns its command and what it said if it fails, and an empty text otherwise."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return f"{command[0]} cannot be run: {error}"
    sys.stderr.write(process.stderr)
    if process.returncode == 0:
        return ""
    lines = [line.strip() for line in (process.stderr + process.stdout).splitlines() if line.strip()]
    said = [line for line in lines if "error" in line.lower()] or lines or ["it said nothing"]
    return f"{command[0]} failed ({process.returncode}): {' | '.join(said[:3])[:MOST_SAID]}"


class Toolchain(NamedTuple):
    """A compiler, and what it is given for what it compiles for."""

    command: list[str]
    triple: str
    system: System
    is_gcc: bool
    flags_of_user: list[str]

    @classmethod
    def found(cls) -> Toolchain:
        command = _compiler()
        if shutil.which(command[0]) is None:
            raise NotBuiltError(f"there was no C++ compiler ({command[0]})")
        triple = _triple()
        is_gcc = "Free Software Foundation" in _said_by_compiler("--version")
        return cls(command, triple, _system(triple), is_gcc, _words_of("CXXFLAGS"))

    @property
    def is_x86_64(self) -> bool:
        return self.triple.partition("-")[0] in ("x86_64", "amd64")

    @property
    def is_mingw_gcc(self) -> bool:
        return self.is_gcc and "mingw" in self.triple

    @property
    def targets(self) -> dict[str, list[str]]:
        """The flags of what kernels are compiled for, by name."""
        if not self.is_x86_64:
            return TARGETS["other"]
        models = {"amx": MODEL_OF_AMX} if "-DMODEL_OF_TILES" in self.flags_of_user else {}
        return TARGETS["x86_64"] | models

    def level(self, name: str) -> list[str]:
        """How far a unit is optimised."""
        if not self.is_x86_64 or name == "core":
            return FAST
        if name == "baseline":
            return QUICKLY_BUILT_BY_GCC if self.is_gcc else QUICKLY_BUILT
        return BY_GCC if self.is_gcc else FAST

    def failure_of_unit(self, source: str, name: str, to: Path, *own: str) -> str:
        """Compile a unit; returns what the compiler said if it fails."""
        flags = [*FLAGS, *self.system.flags, *(MINGW_GCC if self.is_mingw_gcc else [])]
        flags += [*self.level(name), *self.flags_of_user, *own]  # the user may change the level
        return _failure_of([*self.command, *flags, "-c", f"{SOURCES}/{source}", "-o", str(to)])

    def failure_of_link(self, objects: list[Path], to: Path) -> str:
        """Link a library; returns what the compiler said if it fails."""
        strip = [] if any(word.startswith("-g") for word in self.flags_of_user) else self.system.strip
        # The core needs none of it, and zig would compile it for minutes. GCC has no such option before version 13.
        without_cpp_library = [] if self.is_gcc or "msvc" in self.triple else ["-nostdlib++"]
        static = MINGW_GCC_LINK if self.is_mingw_gcc else []
        link = [*self.system.link, *static, *without_cpp_library, *strip]
        return _failure_of([*self.command, *link, *map(str, objects), "-o", str(to)])


class BuildCore(build_ext):
    """Compiles the sources with CXX, or c++, and CXXFLAGS, and never fails.

    What is missing, and why, is shown, as by ``pip install --verbose``, and written to a note beside the library, from
    which ``python -m cuflash info`` has it.
    """

    def run(self) -> None:
        """As the original does, but without a compiler object, which fails where CXX is no command."""
        in_place, self.inplace = self.inplace, False
        for extension in self.extensions:
            self.build_extension(extension)
        self.inplace = in_place
        if in_place:
            self.copy_extensions_to_source()

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name))
        note = target.with_name(NOTE)
        for path in (target, note):
            path.unlink(missing_ok=True)
        try:
            with tempfile.TemporaryDirectory() as directory:
                missing = self._compile(Path(directory), target)
        except (OSError, NotBuiltError) as error:
            missing = [str(error)]
            self.warn(f"no compiled core, NumPy arrays will be computed by NumPy: {error}")
        if missing:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text("\n".join(missing) + "\n", encoding="utf-8")

    def _compile(self, directory: Path, target: Path) -> list[str]:
        """Build the library; returns what is left out of it."""
        toolchain = Toolchain.found()
        command, targets = toolchain.command[0], toolchain.targets
        begun = time.monotonic()
        print(
            f"cuflash: {command} compiles the core of the CPU path for {toolchain.triple}, {len(targets)} times",
            flush=True,
        )
        objects = {name: directory / f"{name}.o" for name in (*targets, "core")}

        def failure_of_target(name: str) -> str:
            return toolchain.failure_of_unit("target.cpp", name, objects[name], f"-DTARGET={name}", *targets[name])

        # The texts of compilers that run side by side do not mix, and each of these is waited for.
        with ThreadPoolExecutor(len(targets)) as pool:
            failures = dict(zip(targets, pool.map(failure_of_target, targets), strict=True))
        if failures["baseline"]:
            raise NotBuiltError(failures["baseline"])
        missing = [f"without {NAMES[name]}: {failure}" for name, failure in failures.items() if failure]
        for words in missing:
            self.warn(f"the compiled core is built {words}")
        built = [name for name, failure in failures.items() if not failure]
        left_out = " ".join(f"IS_LEFT_OUT({name})" for name in NAMES if name not in built)
        definitions = f'-DSOURCES="{hash_of_sources()}"', f"-DLEFT_OUT={left_out}"
        library = directory / f"built{toolchain.system.suffix}"
        failure = toolchain.failure_of_unit("core.cpp", "core", objects["core"], *definitions)
        failure = failure or toolchain.failure_of_link([objects[name] for name in (*built, "core")], library)
        if failure:
            raise NotBuiltError(failure)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
        names = ", ".join(NAMES[name] for name in built if name in NAMES) or "the baseline alone"
        print(f"cuflash: built {target.name} with {names} in {time.monotonic() - begun:.0f} s", flush=True)
        return missing

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of a version of Python."""
        return f"{fullname.replace('.', '/')}{_system(_triple()).suffix}"

    def get_outputs(self) -> list[str]:
        outputs = [one for path in super().get_outputs() for one in (path, str(Path(path).with_name(NOTE)))]
        return [path for path in outputs if Path(path).exists()]

    def copy_extensions_to_source(self) -> None:
        """For an editable install: the library, or the note, goes beside its sources, if there is one."""
        for extension in self.extensions:
            library = Path(self.get_ext_filename(extension.name))
            for beside in (library, library.with_name(NOTE)):
                beside.unlink(missing_ok=True)
                if Path(self.build_lib, beside).exists():
                    shutil.copy(Path(self.build_lib, beside), beside)


class BuildWithKernels(build_py):
    """Copies the kernels into the package; an editable install reads those of the checkout.

    As a package in another folder they would make an editable install an import hook, which type checkers and editors
    do not follow; so it is a path.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._kernels().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *({} if self.editable_mode else self._kernels()).values()]

    def get_output_mapping(self) -> dict[str, str]:
        """Of copies to their sources, to which a strict editable install makes links."""
        return super().get_output_mapping() | {target: source for source, target in self._kernels().items()}

    def _kernels(self) -> dict[str, str]:
        return {str(path): str(Path(self.build_lib, "cuflash", path)) for path in sorted(KERNELS.rglob("*.cu*"))}


class Wheel(bdist_wheel):
    """Of any version of Python 3, for one platform if the core is inside."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2] if _has_core(self.bdist_dir) else "any"


def _has_core(directory: str) -> bool:
    return any(Path(directory).glob(f"{SOURCES}/libcuflash.*"))


class WithCore(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=WithCore,
    ext_modules=[Extension("cuflash.cpu.core.libcuflash", sources=[])],
    cmdclass={"build_ext": BuildCore, "build_py": BuildWithKernels, "bdist_wheel": Wheel},
)
