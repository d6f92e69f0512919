"""The project's CUDA kernels on the CPU, with every access and every barrier checked.

``kernels/ptx/base.cuh`` is the seam: with ``CUFLASH_EMULATION`` defined it takes its functions from
``ptx_emulated.h``. The threads of a block become fibers of one CPU thread, so a launch is deterministic and a failure
names block and thread.

Blocks run one after another, each to its end: a kernel that waits for a later block of its launch never ends here. The
project's kernels do not.
"""

from cuflash.emulator.building import build, find_compiler, sanitizer_environment
from cuflash.emulator.launching import SCHEDULES, EmulationError, Module, Schedule, Statistics
from cuflash.emulator.memory import Scratch, guarded, guarded_array, tensor_map

__all__ = [
    "SCHEDULES",
    "EmulationError",
    "Module",
    "Schedule",
    "Scratch",
    "Statistics",
    "build",
    "find_compiler",
    "guarded",
    "guarded_array",
    "sanitizer_environment",
    "tensor_map",
]
