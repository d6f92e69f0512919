"""What each rank of MPI does in tests/pure/test_mpi.py:

mpiexec -n 3 python -m tests.mpi_ranks right_results disagreement
"""

import signal
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import cuflash.distributed as cd
from cuflash.shards.slices import Slices as Calls
from tests.backends import CORE
from tests.features.test_ranks_on_backends import CASES
from tests.ranks import Shards, Whole, compute, judge


def right_results(comm: MPI.Comm) -> None:
    """All ranks compute cases; the first puts the results together and judges them."""
    for number, case in enumerate(CASES[CORE].values()):
        whole = Whole.of(case)
        split_q = cd.zigzag(whole.problem.seqlen_q, comm.size)
        split_k = cd.Split([[(0, 5), (80, 83)], [(5, 80)], *[[] for _ in range(comm.size - 2)]])
        shards = Shards(whole, split_q, split_k)
        attn = cd.ContextParallel(comm, split=split_q, split_k=split_k, timeout=20, **whole.keywords)
        results = comm.gather(compute(attn, case, shards.of(comm.rank, whole.arrays)))
        if results is not None:
            judge(case, shards.whole(results))
            print(f"case {number} is right on {comm.size} ranks", flush=True)


def disagreement(comm: MPI.Comm) -> None:
    """One rank has another option; all of them hear of it."""
    x = np.zeros((2, 4, 8))
    try:
        cd.ContextParallel(comm, split="zigzag", causal=comm.rank == 1, timeout=20).forward(x, x, x)
    except ValueError as error:
        print(f"rank {comm.rank}: {error}", flush=True)


def absence(comm: MPI.Comm) -> None:
    """One rank does not come; the others stop waiting, and end all."""
    attn, x = cd.ContextParallel(comm, split="zigzag", timeout=0.5), np.zeros((2, 4, 8))
    if comm.rank == 1:
        time.sleep(30)
    start = time.monotonic()
    try:
        attn.forward(x, x, x)
    except TimeoutError as error:
        print(f"rank {comm.rank} after {time.monotonic() - start:.0f} s: {error}", flush=True)
        time.sleep(1)  # so that all of them can say so
        comm.Abort()


def progress(comm: MPI.Comm) -> None:
    """Rows come while a rank computes, and calls nothing of MPI."""
    transport, own, into = cd.Mpi(comm), np.full(2**24, comm.rank, np.uint8), np.empty(2**24, np.uint8)
    moving, _ = pending = transport.start([(1 - comm.rank, own)], [(1 - comm.rank, into)])
    time.sleep(2)
    print(f"rank {comm.rank}: rows are there is {moving.done()}", flush=True)
    transport.finish(pending, 10)
    assert (into == 1 - comm.rank).all()


def failure(comm: MPI.Comm) -> None:
    """One rank fails on its way; the others hear of it at once."""
    attn: Any = cd.ContextParallel(comm, split="zigzag", timeout=60)
    x = np.zeros((2, 4, 8))
    if comm.rank == 1:
        attn._calls.transport.start = no_memory
    start = time.monotonic()
    try:
        attn.forward(x, x, x)
    except (MemoryError, RuntimeError) as error:
        print(f"rank {comm.rank} soon {time.monotonic() - start < 10}: {error!r}", flush=True)
        time.sleep(1)  # so that all of them can say so
        comm.Abort()


def interruption(comm: MPI.Comm) -> None:
    """One rank is interrupted while rows are exchanged, and reuses its arrays; the others hear of it."""
    attn: Any = cd.ContextParallel(comm, split="contiguous", timeout=60)
    x, forward = np.ones((2, 1000, 16)), Calls.forward
    calls: list[int] = []

    def interrupted(self: Any, *args: Any, **keywords: Any) -> Any:
        calls.append(1)
        if comm.rank == 1 and len(calls) == 3:  # of the second call
            signal.raise_signal(signal.SIGINT)
        return forward(self, *args, **keywords)

    Calls.forward = interrupted  # type: ignore[method-assign, assignment]
    start = time.monotonic()
    try:
        for _ in range(3):  # a rank that had all rows hears of it in the next call
            attn.forward(x, x, x)
    except (KeyboardInterrupt, RuntimeError) as error:
        x[...] = np.nan
        moving = [thread for thread in attn._calls.transport._progress._pool._threads if thread.is_alive()]
        soon = time.monotonic() - start < 30
        print(f"rank {comm.rank} soon {soon}, {len(moving)} threads: {error!r}", flush=True)
        time.sleep(5)  # so that all of them can say so
        comm.Abort()


def no_memory(sends: Any, receives: Any) -> None:
    raise MemoryError("no memory")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name](MPI.COMM_WORLD)
