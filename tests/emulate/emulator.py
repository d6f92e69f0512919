"""Compile the project's CUDA kernels for the CPU and run them there, with every access and every barrier checked.

``kernels/ptx/base.cuh`` is the seam: with ``CUFLASH_EMULATION`` defined it takes its functions from
``ptx_emulated.h``. The threads of a block become fibers of one CPU thread, so a launch is deterministic and a failure
names block and thread.

Blocks run one after another, each to its end: a kernel that waits for another block of its launch never ends here. The
project's kernels do not.
"""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
CACHE = HERE / ".cache"
RUNTIME = HERE / "runtime"

_COMMON_FLAGS = (
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-g1",  # lines of faults
    "-fvisibility=hidden",
    "-fno-gnu-unique",  # modules must not share variables
    "-ffp-contract=off",
    "-fno-strict-aliasing",  # CUDA code reinterprets what pointers point to
)
_RUNTIME_FLAGS = ("-O3",)
# The trap becomes a signal, and the signal an EmulationError. "address" works only in a process that was started with
# the environment of sanitizer_environment().
_SANITIZER_FLAGS = {
    None: ("-Og",),  # most kernels run for less time than they take to compile
    "undefined": ("-Og", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"),
    "address": ("-Og", "-fsanitize=address", "-fno-omit-frame-pointer"),
}


class EmulationError(Exception):
    """A kernel broke a rule of the machine, or the launch one of the kernel.

    Attributes
    ----------
    kernel : str
    message : str
    file, line : str, int
        Where in the kernel's source; ``""`` and 0 if it is not about a place.
    block, thread : int or None
    """

    def __init__(self, kernel, message, file="", line=0, block=None, thread=None):
        self.kernel, self.message = kernel, message
        self.file, self.line = file, line
        self.block, self.thread = block, thread
        place = f"{Path(file).name}:{line}: " if file else ""
        who = f", block {block}, thread {thread}" if thread is not None else ""
        super().__init__(f"{place}kernel {kernel}{who}: {message}")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who runs next, wherever the GPU leaves it open.

    Attributes
    ----------
    order : {"fifo", "lifo", "reversed", "random"}
        Of the threads that can run. "reversed" also runs the blocks from the last to the first, "random" shuffles them.
    asynchrony : {"late", "eager"}
        Asynchronous copies write at their wait or at once.
    seed : int
        Of "random".
    """

    order: str = "fifo"
    asynchrony: str = "late"
    seed: int = 0

    def __post_init__(self):
        if self.order not in _ORDERS:
            raise ValueError(f"order must be one of {_ORDERS}, got {self.order!r}")
        if self.asynchrony not in _ASYNCHRONIES:
            raise ValueError(f"asynchrony must be one of {_ASYNCHRONIES}, got {self.asynchrony!r}")


_ORDERS = ("fifo", "lifo", "reversed", "random")
_ASYNCHRONIES = ("late", "eager")
SCHEDULES = (
    Schedule("fifo"),
    Schedule("lifo"),
    Schedule("reversed"),
    Schedule("fifo", "eager"),
    Schedule("random", seed=1),
    Schedule("random", "eager", seed=2),
)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a launch did. A conflict is one extra pass over the banks for one 8x8 matrix of a matrix load."""

    fiber_switches: int
    block_barriers: int
    matrix_loads: int
    matrix_load_conflicts: int
    matrix_products: int
    bulk_copies: int
    warpgroup_products: int


class _LaunchOptions(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("eager_copies", ctypes.c_uint32),
        ("trap_unwritten", ctypes.c_uint32),
        ("in_turn", ctypes.c_uint32),
        ("counted", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("watchdog_seconds", ctypes.c_double),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("message", ctypes.c_char * 4096),
        ("file", ctypes.c_char * 512),
        ("line", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("has_thread", ctypes.c_uint32),
        ("fault_module", ctypes.c_char * 512),
        ("fault_offset", ctypes.c_uint64),
        *((field.name, ctypes.c_uint64) for field in dataclasses.fields(Statistics)),
    ]


# One block runs at a time, in state that all modules share.
_launch_lock = threading.Lock()


class Module:
    """The kernels of one source file, compiled for one set of defines."""

    def __init__(self, library: Path):
        self.library = library
        self._functions = ctypes.CDLL(str(library))

    def launch(
        self,
        name: str,
        params,
        *,
        grid: int,
        threads: int,
        shared_bytes: int,
        schedule: Schedule = SCHEDULES[0],
        trap_unwritten: bool = False,
        in_turn: bool = False,
        counted: bool = False,
        watchdog_seconds: float = 30.0,
    ) -> Statistics:
        """Run kernel `name` to its end.

        Parameters
        ----------
        params : bytes or NumPy structured scalar
            The parameter struct.
        grid, threads : int
            Blocks, and threads of a block.
        shared_bytes : int
            Of dynamic shared memory.
        schedule : Schedule
        trap_unwritten : bool
            Report reads of shared memory that was never written. A kernel may read such bytes as long as they do not
            reach its results; they are NaN.
        in_turn : bool
            Run the blocks in the order of their index whatever the schedule says, as a kernel needs whose blocks wait
            for others. To wait for a block that has not run yet is an error then, and to add to global memory without
            having waited for the turn.
        counted : bool
            The same of threads that have not waited for a count.
        watchdog_seconds : float
            CPU time that one block may take.

        Raises
        ------
        EmulationError
        """
        try:
            function = getattr(self._functions, name)
        except AttributeError:
            raise EmulationError(name, f"no such kernel in {self.library.name}") from None
        params_bytes = params if isinstance(params, bytes) else params.tobytes()
        aligned = _aligned_copy(params_bytes)
        options = _LaunchOptions(
            grid=grid,
            threads=threads,
            shared_bytes=shared_bytes,
            order=_ORDERS.index(schedule.order),
            eager_copies=schedule.asynchrony == "eager",
            trap_unwritten=trap_unwritten,
            in_turn=in_turn,
            counted=counted,
            seed=schedule.seed,
            watchdog_seconds=watchdog_seconds,
        )
        report = _Report()
        with _launch_lock:
            failed = function(
                ctypes.c_void_p(aligned.ctypes.data),
                ctypes.c_uint64(len(params_bytes)),
                ctypes.byref(options),
                ctypes.byref(report),
            )
        if failed:
            raise _error(name, report)
        return Statistics(*(getattr(report, field.name) for field in dataclasses.fields(Statistics)))


def _aligned_copy(content: bytes, alignment: int = 128) -> np.ndarray:
    """`content` where a by-value kernel parameter may lie."""
    room = np.zeros(len(content) + alignment, np.uint8)
    start = -room.ctypes.data % alignment
    room[start : start + len(content)] = np.frombuffer(content, np.uint8)
    return room[start : start + len(content)]


def _error(kernel: str, report: _Report) -> EmulationError:
    message = report.message.decode()
    if not report.has_thread:
        return EmulationError(kernel, message)
    file, line = report.file.decode(), report.line
    if report.fault_module:
        found = _source_line(report.fault_module.decode(), report.fault_offset)
        if found:
            file, line = found
        elif file:
            message += " (after this place)"
    return EmulationError(kernel, message, file, line, report.block, report.thread)


def _source_line(module: str, offset: int) -> tuple[str, int] | None:
    """The source line of the instruction at `offset`, if binutils are there to say."""
    tool = shutil.which("addr2line")
    if tool is None:
        return None
    output = subprocess.run([tool, "-e", module, hex(offset)], capture_output=True, text=True).stdout
    match = re.match(r"(.+):(\d+)", output)
    return (match[1], int(match[2])) if match else None


# ---- Building --------------------------------------------------------------------------------------------------------


def find_compiler() -> str | None:
    """The path of g++, or None."""
    return shutil.which("g++")


def build(
    source: Path,
    defines: Mapping[str, object] | None = None,
    *,
    sanitizer: str | None = None,
    include: Sequence[Path] = (KERNELS,),
    cache: Path = CACHE,
) -> Module:
    """Compile `source` for the CPU, or take it from `cache`.

    Parameters
    ----------
    source : Path
        Relative to `kernels/` or absolute.
    defines : Mapping
        Preprocessor definitions; True and False become 1 and 0.
    sanitizer : {None, "undefined", "address"}

    Raises
    ------
    EmulationError
        With the compiler's output.
    """
    request = (source, tuple(sorted((defines or {}).items())), sanitizer, tuple(include), cache)
    key = (find_compiler(), *request)
    module, of_files = _built.get(key, (None, {}))
    if module is None or not module.library.exists() or _status(of_files) != of_files:
        module, files = _build(*request)
        _built[key] = module, _status(files)
    return module


# What this process has built, with the size and the time of every file that it was made of: each launch asks for its
# module, and to read and to hash all files takes longer than many a launch.
_built: dict[tuple[Any, ...], tuple[Module, dict[Path, tuple[int, int]]]] = {}


def _status(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    found = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            found[path] = (status.st_size, status.st_mtime_ns)
    return found


def _build(
    source: Path,
    defines: Sequence[tuple[str, object]],
    sanitizer: str | None,
    include: Sequence[Path],
    cache: Path,
) -> tuple[Module, list[Path]]:
    """The module, and the files that it is made of."""
    source = KERNELS / source
    definitions = [f"-D{name}={_as_text(value)}" for name, value in defines]
    runtime = _build_runtime(sanitizer, cache)
    # The runtime's name stands for what it is made of: a module stays linked to the one that it was built for.
    flags = [*_COMMON_FLAGS, *_SANITIZER_FLAGS[sanitizer], *definitions, f"-DCUFLASH_RUNTIME={runtime.stem}"]
    header = HERE / "ptx_emulated.h"
    files = _included_files([source, header], [*include, HERE])
    arguments = [
        f'-DCUFLASH_EMULATION="{header}"',
        *(f"-I{folder}" for folder in include),
        *("-x", "c++", str(source), "-x", "none", str(runtime)),
    ]
    module = Module(_compile(f"{source.parent.name}_{source.stem}", flags, files, arguments, cache))
    return module, [*files, *_included_files(sorted(RUNTIME.glob("*.cc")), [RUNTIME])]


def _as_text(value: object) -> str:
    return str(int(value) if isinstance(value, bool) else value)


def _build_runtime(sanitizer: str | None, cache: Path) -> Path:
    # Undefined behaviour is looked for in kernels alone; address errors only show if every store is instrumented.
    flags = [*_COMMON_FLAGS, *_RUNTIME_FLAGS, *(_SANITIZER_FLAGS["address"] if sanitizer == "address" else ())]
    sources = sorted(RUNTIME.glob("*.cc"))
    return _compile("runtime", flags, _included_files(sources, [RUNTIME]), [str(source) for source in sources], cache)


def _included_files(sources: Sequence[Path], folders: Sequence[Path]) -> list[Path]:
    """`sources` and the files that they include from `folders`, directly or not."""
    found: dict[Path, None] = {}
    pending = list(sources)
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found[path] = None
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            pending += [folder / name for folder in (path.parent, *folders) if (folder / name).is_file()]
    return sorted(found)


def _compile(name: str, flags: Sequence[str], files: Sequence[Path], arguments: Sequence[str], cache: Path) -> Path:
    """The shared library made of `files`; its file name is the hash of all that went into it, wherever that lay.

    `arguments` say where: they name files and folders. So kernels that a change does not touch are found again in a
    copy of the folder.
    """
    compiler = find_compiler()
    if compiler is None:
        raise EmulationError(name, "no C++ compiler: g++ is not on the path")
    key = hashlib.sha256("\0".join([_compiler_version(compiler), *flags]).encode())
    for place, path in sorted(("/".join(path.parts[-2:]), path) for path in files):
        key.update(place.encode() + path.read_bytes())
    library = cache / f"{name}-{key.hexdigest()[:24]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        unfinished = Path(scratch) / library.name
        command = [compiler, *flags, *arguments, "-o", str(unfinished)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise EmulationError(name, f"does not compile:\n{result.stderr[:8000]}")
        os.replace(unfinished, library)
    return library


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def sanitizer_environment() -> dict[str, str]:
    """The environment of a process that can load modules built with ``sanitizer="address"``."""
    compiler = find_compiler()
    library = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}


# ---- Memory ----------------------------------------------------------------------------------------------------------

_GUARD_ALIGNMENT = 16


def guarded_array(shape, dtype, fill: int = 0xFF) -> np.ndarray:
    """A NumPy array between two inaccessible pages.

    The page after it starts at its last byte, rounded up to 16 bytes; the page before it where its first page starts.
    Every byte is `fill`: 0xFF is NaN in all floating-point types.
    """
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = int(np.prod(shape, dtype=np.int64))
    page = mmap.PAGESIZE
    array_bytes = count * dtype.itemsize
    aligned_bytes = -(-array_bytes // _GUARD_ALIGNMENT) * _GUARD_ALIGNMENT
    usable_bytes = -(-aligned_bytes // page) * page
    mapping = mmap.mmap(-1, usable_bytes + 2 * page)
    storage = np.frombuffer(mapping, np.uint8)
    for offset in (0, page + usable_bytes):
        _make_inaccessible(storage.ctypes.data + offset, page)
    end = page + usable_bytes
    storage[page:end] = fill
    start = end - aligned_bytes
    return storage[start : start + array_bytes].view(dtype).reshape(shape)


def _make_inaccessible(address: int, size: int) -> None:
    no_access = 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), no_access):
        raise OSError(ctypes.get_errno(), "mprotect")


class Scratch:
    """Scratch arrays at the addresses that they have in one allocation, but for multiples of 256 bytes.

    By these multiples each is moved to the end of pages of its own, between two that are inaccessible.

    Parameters
    ----------
    layout : cuflash.planning.ScratchLayout
    fill : int
        The byte that all of them are full of.

    Attributes
    ----------
    layout : cuflash.planning.ScratchLayout
    addresses : list of int
    """

    MODULUS = 256  # an allocation on a device starts at a multiple of this

    def __init__(self, layout, fill: int):
        page = mmap.PAGESIZE
        rooms = [-(-(size + self.MODULUS) // page) * page for size in layout.sizes]
        memory = np.frombuffer(mmap.mmap(-1, page + sum(room + page for room in rooms)), np.uint8)
        start = memory.ctypes.data
        self.layout, self.addresses = layout, []
        self._fill = fill
        self._gaps = []  # bytes between each array and the inaccessible pages around it
        _make_inaccessible(start, page)
        first = page
        for offset, size, room in zip(layout.offsets, layout.sizes, rooms, strict=True):
            stop = first + room
            at = stop - size - (stop - size - offset) % self.MODULUS
            memory[first:stop] = fill
            self.addresses.append(start + at)
            self._gaps.append((memory[first:at], memory[at + size : stop]))
            _make_inaccessible(start + stop, page)
            first = stop + page

    def check(self, kernel: str) -> None:
        """Raise EmulationError if the kernel that ran last wrote before or behind one of the arrays."""
        for name, (before, behind) in zip(self.layout.names, self._gaps, strict=True):
            if np.any(before != self._fill):
                raise EmulationError(kernel, f"wrote before the start of scratch array {name}")
            if np.any(behind != self._fill):
                first = int(np.flatnonzero(behind != self._fill)[0])
                raise EmulationError(kernel, f"wrote {first} bytes behind the end of scratch array {name}")


# ---- Tensor maps -----------------------------------------------------------------------------------------------------

_TENSOR_MAP = np.dtype(
    [
        ("magic", np.uint64),
        ("base", np.uint64),
        ("strides", np.uint64, 3),
        ("dims", np.uint32, 4),
        ("box", np.uint32, 4),
        ("element_bytes", np.uint32),
        ("padding", np.uint8, 52),
    ]
)
_TENSOR_MAP_MAGIC = int.from_bytes(b"TNSORMAP", "little")


def tensor_map(
    address: int, element_bytes: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> np.ndarray:
    """What stands in the emulator for a CUtensorMap of rank 4 with the 128-byte swizzle: 16 words.

    It goes where the launch puts the result of cuTensorMapEncodeTiled, and refuses what that refuses.

    Parameters
    ----------
    address : int
        Of the first element.
    dims : sequence of 4 int
        Elements along each axis, that of neighbours first: columns, rows, heads, batch.
    strides : sequence of 3 int
        Bytes from one row, head and batch entry to the next.
    box : sequence of 4 int
        Elements along each axis that one copy moves.
    """
    row_bytes = box[0] * element_bytes
    for wrong, problem in (
        (len(dims) != 4 or len(strides) != 3 or len(box) != 4, "4 dims, 3 strides and 4 box sizes are needed"),
        (address % 16, "the address must be a multiple of 16"),
        (any(not 0 < size <= 2**32 for size in dims), "dims must lie between 1 and 2**32"),
        (
            any(stride % 16 or not 0 < stride < 2**40 for stride in strides),
            "strides must be positive multiples of 16 under 2**40",
        ),
        (any(not 0 < size <= 256 for size in box), "box sizes must lie between 1 and 256"),
        (row_bytes != 128, "a row of the box must have 128 bytes: others are not emulated"),
        (np.prod(box) * element_bytes % 128, "the box must be a multiple of 128 bytes: else not emulated"),
    ):
        if wrong:
            raise ValueError(
                f"tensor map of dims {tuple(dims)}, strides {tuple(strides)}, box {tuple(box)}, {element_bytes} bytes "
                f"an element, at {address:#x}: {problem}"
            )
    content = np.zeros((), _TENSOR_MAP)
    content["magic"], content["base"], content["element_bytes"] = _TENSOR_MAP_MAGIC, address, element_bytes
    content["strides"], content["dims"], content["box"] = strides, dims, box
    return np.frombuffer(content.tobytes(), np.uint64)
