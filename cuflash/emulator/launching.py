"""Kernels that were compiled for the CPU, launched: how, and what comes of it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np


class EmulationError(Exception):
    """A kernel broke a rule of the machine, or the launch one of the kernel.

    Attributes
    ----------
    kernel : str
    message : str
    file, line : str, int
        Where in the kernel's source; ``""`` and 0 if it is about no line.
    block, thread : int or None
    """

    def __init__(
        self,
        kernel: str,
        message: str,
        file: str = "",
        line: int = 0,
        block: int | None = None,
        thread: int | None = None,
    ) -> None:
        super().__init__(kernel, message, file, line, block, thread)
        self.kernel, self.message = kernel, message
        self.file, self.line = file, line
        self.block, self.thread = block, thread

    def __str__(self) -> str:
        location = f"{Path(self.file).name}:{self.line}: " if self.file else ""
        who = f", block {self.block}, thread {self.thread}" if self.thread is not None else ""
        return f"{location}kernel {self.kernel}{who}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who runs next, wherever the GPU leaves it open.

    Attributes
    ----------
    order : {"fifo", "lifo", "reversed", "random"}
        Of the threads that can run. "reversed" also runs the blocks from the last to the first, "random" shuffles them.
    asynchrony : {"late", "eager"}
        Asynchronous copies write at their wait or at once. A block reads late what others have counted, after its own
        first count, or at once.
    seed : int
        Of "random".
    """

    order: str = "fifo"
    asynchrony: str = "late"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {self.order!r}")
        if self.asynchrony not in _ASYNCHRONIES:
            raise ValueError(f"asynchrony must be one of {_ASYNCHRONIES}, got {self.asynchrony!r}")


ORDERS = ("fifo", "lifo", "reversed", "random")
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
    """What a launch did. A conflict is one extra pass over the banks for one 8x8 matrix of a matrix load.

    Bytes are those of arrays in global memory that asynchronous copies load and store, and that reductions add to.
    """

    fiber_switches: int
    block_barriers: int
    matrix_loads: int
    matrix_load_conflicts: int
    matrix_products: int
    bulk_copies: int
    warpgroup_products: int
    bytes_loaded: int
    bytes_stored: int
    bytes_added: int


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
        params: bytes | np.ndarray,
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
        """Run kernel `name` to its end; EmulationError says which rule it broke.

        `trap_unwritten` reports reads of shared memory that was never written. A kernel may read such bytes as long as
        they do not reach its results; they are NaN. `in_turn` runs the blocks in the order of their index whatever the
        schedule says, as a kernel needs whose blocks wait for others. To wait for a block that has not run yet is an
        error then, and to add to global memory without having waited for the turn; `counted` is the same of threads
        that have not waited for a count. `watchdog_seconds` are the CPU time that one block may take.
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
            order=ORDERS.index(schedule.order),
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
    buffer = np.zeros(len(content) + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    buffer[start : start + len(content)] = np.frombuffer(content, np.uint8)
    return buffer[start : start + len(content)]


def _error(kernel: str, report: _Report) -> EmulationError:
    message = os.fsdecode(report.message)
    if not report.has_thread:
        return EmulationError(kernel, message)
    file, line = os.fsdecode(report.file), report.line
    if report.fault_module:
        found = _source_line(os.fsdecode(report.fault_module), report.fault_offset)
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
    output = os.fsdecode(subprocess.run([tool, "-e", module, hex(offset)], capture_output=True).stdout)
    match = re.match(r"(.+):(\d+)", output)
    return (match[1], int(match[2])) if match else None
