"""Jobs on NumPy arrays, dealt to threads: how many threads there are, and what each of them keeps."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.values import as_integer, value_error

Array = NDArray[Any]

KEPT_BYTES = 2**22  # of a workspace between calls, in each thread
PRODUCT_LIMIT = 400_000  # multiplications in one product of a job: OpenBLAS takes a second thread from 2**19 on


_threads: ContextVar[int | None] = ContextVar("cuflash_cpu_threads", default=None)


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let calls on NumPy arrays use `count` threads, or one where that is all that the work is worth.

    It holds for calls within the ``with`` statement, in this thread or task. Without it they use as many threads as
    there are cores that the process may use, or as the environment variable OMP_NUM_THREADS says, if that is less. No
    result depends on it.

    Parameters
    ----------
    count : int
        At least 1.

    Raises
    ------
    TypeError, ValueError
        `count` is no integer, or less than 1.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.ones((2, 5, 4))
    >>> with cuflash.cpu_threads(1):
    ...     out = cuflash.attention(q, q, q)
    """
    count = as_integer("count", count)
    if count < 1:
        raise value_error("count", count, "an integer >= 1")
    token = _threads.set(count)
    try:
        yield
    finally:
        _threads.reset(token)


def count_cores() -> int:
    """Cores that a call may use."""
    count = _threads.get()
    if count is not None:
        return count
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # OpenMP takes a list, too, a number for each level.
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, min(cores, int(wanted))) if wanted.isdecimal() else cores


class Workspace:
    """Memory for the arrays of a job, kept from job to job by one thread."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._memory: dict[str, Array] = {}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._memory.values())

    def take(self, name: str, *shape: int) -> Array:
        memory = self._memory.get(name)
        if memory is None:
            memory = self._memory[name] = np.empty(shape, self.dtype)
        if memory.shape == shape:
            return memory
        size = math.prod(shape)
        if memory.size < size:
            memory = self._memory[name] = np.empty(size, self.dtype)
        return memory.reshape(-1)[:size].reshape(shape)


_kept = threading.local()


def take_workspace(dtype: np.dtype[Any]) -> Workspace:
    """The workspace that this thread keeps for its next call, or a new one.

    Fresh memory has to be mapped page by page, which takes as long as a small call. A call within the call, as from a
    signal handler, finds no workspace kept and makes its own.
    """
    return vars(_kept).pop(dtype.char, None) or Workspace(dtype)


def keep_workspace(workspace: Workspace) -> None:
    """Keep it for the next call of this thread, if it is small."""
    if workspace.nbytes <= KEPT_BYTES:
        vars(_kept)[workspace.dtype.char] = workspace


def run(work: Callable[..., None], jobs: list[tuple[Any, ...]], threads: int, dtype: np.dtype[Any]) -> None:
    """Call ``work(workspace, *job)`` for the jobs in order, on this thread and on others."""
    remaining = deque(jobs)

    def work_off() -> None:
        workspace = Workspace(dtype)
        with np.errstate(all="ignore"):  # each thread has its own; infinities and NaN are results like others here
            while remaining:
                try:
                    job = remaining.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    work(workspace, *job)
                except BaseException:
                    remaining.clear()
                    raise

    others = min(threads, len(jobs)) - 1
    if others < 1:
        work_off()
        return
    with ThreadPoolExecutor(others) as pool:
        futures = [pool.submit(work_off) for _ in range(others)]
        work_off()
    for future in futures:
        future.result()
