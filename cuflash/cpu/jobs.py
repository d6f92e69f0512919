"""Jobs on NumPy arrays, dealt to threads, and how many threads there are."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import numpy as np

from cuflash.values import as_integer, value_error

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


Job = TypeVar("Job")
Result = TypeVar("Result")


def run(
    work: Callable[[Job], Result],
    jobs: Iterable[Job],
    threads: int,
    take: Callable[[Result], object] = lambda result: None,
) -> None:
    """Compute jobs on so many threads, or on this one if that is one; this one takes the results in their order.

    Jobs are made as they are needed, and few results wait. When this ends, by an exception too, all threads have ended.
    """

    def compute(job: Job) -> Result:
        with np.errstate(all="ignore"):  # each thread has its own; infinities and NaN are results like others here
            return work(job)

    with np.errstate(all="ignore"):
        if threads == 1:
            for job in jobs:
                take(work(job))
            return
        pool, waiting = ThreadPoolExecutor(threads), deque[Future[Result]]()
        try:
            for job in jobs:
                waiting.append(pool.submit(compute, job))
                if len(waiting) > 2 * threads:
                    take(waiting.popleft().result())
            while waiting:
                take(waiting.popleft().result())
        finally:
            pool.shutdown(cancel_futures=True)
