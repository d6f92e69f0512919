"""Jobs on NumPy arrays, dealt to threads, and how many threads there are."""

from __future__ import annotations

import _thread
import contextlib
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from cuflash.arrays.checks import as_integer, value_error

_threads: ContextVar[int | None] = ContextVar("cuflash_cpu_threads", default=None)


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let calls on NumPy arrays use `count` threads, or one where that is all that the work is worth.

    It holds for calls within the ``with`` statement, in this thread or task. Without it they use as many threads as
    there are cores that the process may use, as the quota of its cgroup keeps busy, or as the environment variable
    OMP_NUM_THREADS says, whichever is least. No result depends on it.

    Parameters
    ----------
    count : int
        At least 1.

    Returns
    -------
    context manager
        For a ``with`` statement.

    Raises
    ------
    TypeError, ValueError
        `count` is no integer, or less than 1.

    See Also
    --------
    attention, FlashAttention : The calls that it holds for.

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
    cores = available_cores()
    # A quota may change while a process runs. To read it takes as long as a small call.
    cores = int(min(cores, _cores_of_quota(int(time.monotonic()))))
    # OpenMP takes a list, too, a number for each level.
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not wanted.isdecimal() or len(wanted.lstrip("0")) > 9:  # Python converts no text of thousands of digits
        return cores
    return max(1, min(cores, int(wanted[-9:])))


def available_cores() -> int:
    """Cores that this process may use, where the system says so (Linux), or that the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.lru_cache(maxsize=1)
def _cores_of_quota(second: int) -> float:
    """How many threads the quota of this process keeps busy; `second` says when it was read."""
    cores = quota(Path("/proc/self"))
    return cores if cores == math.inf else max(1, math.ceil(cores))


def quota(process: Path) -> float:
    """How many cores the cgroups of a process may use, by its directory in /proc; inf without a quota.

    A process of a container has one, as from ``docker --cpus`` or a limit of Kubernetes. Groups around its own count,
    too: the smallest quota holds.
    """
    least = math.inf
    with contextlib.suppress(OSError, ValueError):
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = (process / "mountinfo").read_text().splitlines()
        for _, controllers, path in groups:
            if controllers and "cpu" not in controllers.split(","):
                continue
            for mount in mounts:
                paths = _paths_of_group(mount, path, is_first_version=bool(controllers))
                if paths is not None:
                    least = min(least, *map(_quota_of_group, paths))
    return least


def _paths_of_group(mount: str, path: str, *, is_first_version: bool) -> list[Path] | None:
    """The directories of a group and of those around it, if a line of mountinfo mounts groups of this version."""
    of_paths, _, of_type = mount.partition(" - ")
    root, mounted = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), x) for x in of_paths.split()[3:5])
    fs_type, _, options = of_type.split(" ", 2)
    if fs_type != ("cgroup" if is_first_version else "cgroup2"):
        return None
    if is_first_version and "cpu" not in options.split(","):
        return None
    below = PurePosixPath()
    if PurePosixPath(path).is_relative_to(root) and ".." not in path:  # else nothing below the mount is to be seen
        below = PurePosixPath(path).relative_to(root)
    return [Path(mounted, *below.parts[:count]) for count in range(len(below.parts) + 1)]


def _quota_of_group(group: Path) -> float:
    """The quota of one group, in cores; inf without one."""
    texts = []
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError):
            texts = " ".join((group / name).read_text() for name in names).split()
    if len(texts) != 2 or not all(text.isdecimal() for text in texts) or int(texts[1]) == 0:
        return math.inf  # "max" and -1 stand for none
    return int(texts[0]) / int(texts[1])


Job = TypeVar("Job")
Result = TypeVar("Result")


def run(
    work: Callable[[Job], Result],
    jobs: Iterable[Job],
    threads: int,
    take: Callable[[Result], object] = lambda result: None,
) -> None:
    """Compute jobs as `results` does; this thread takes the results."""
    with np.errstate(all="ignore"):
        for result in results(work, jobs, threads):
            take(result)


def results(work: Callable[[Job], Result], jobs: Iterable[Job], threads: int) -> Iterator[Result]:
    """The results of jobs in their order, computed on so many threads, or on this one if that is one.

    Jobs are made as they are needed, and few results wait. When this ends, by an exception too, no thread computes.

    Threads are told of jobs by queues that have no code in Python: a handler of a signal may raise in the midst of such
    code, as that of the conditions of `threading` and `concurrent.futures`, and leave a lock that all others wait for.
    """
    if threads == 1:
        yield from map(work, jobs)
        return
    todo: SimpleQueue[tuple[int, Job] | None] = SimpleQueue()
    done: SimpleQueue[tuple[int, Any, BaseException | None] | None] = SimpleQueue()
    arrived: dict[int, tuple[Any, BaseException | None]] = {}
    entered, is_over = list[bool](), list[bool]()  # a thread enters before it takes a job, and computes none once over

    def compute() -> None:
        entered.append(True)
        try:
            with np.errstate(all="ignore"):  # each thread has its own; infinities and NaN are results like others here
                while (numbered := todo.get()) is not None:
                    number, job = numbered
                    if is_over:
                        continue
                    try:
                        done.put((number, work(job), None))
                    except BaseException as error:
                        done.put((number, None, error))
        finally:
            done.put(None)

    def result_of(number: int) -> Result:
        while number not in arrived:
            if (found := done.get()) is not None:
                arrived[found[0]] = found[1:]
        value, error = arrived.pop(number)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    given = taken = 0
    try:
        for job in jobs:
            todo.put((given, job))
            if given < threads:
                _thread.start_new_thread(compute, ())
            given += 1
            if given - taken > 2 * threads:
                yield result_of(taken)
                taken += 1
        while taken < given:
            yield result_of(taken)
            taken += 1
    finally:
        is_over.append(True)
        for _ in range(min(threads, given + 1)):  # as many as may have begun
            todo.put(None)
        ended = 0
        while ended < len(entered):
            ended += done.get() is None


def on_cores(work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
    """The results of jobs in their order, computed on as many threads as a call may use."""
    return results(work, jobs, count_cores())
