"""What one rank of the suite `ranks` does, and several of them at once: processes with NCCL, or threads of this one."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import cuflash.distributed as cd
from cuflash import FlashAttention
from cuflash.arrays.array_info import numpy_dtype

from .cases import SHORT, Case

Array = Any
TIMEOUT = 60.0  # seconds, after which a rank waits no more for others to begin


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A causal problem of which each rank has so many tokens; or decoding of a query over keys that ranks share."""

    tokens: int
    dtype: str = "bfloat16"
    num_heads: int = 32
    num_heads_kv: int = 32
    head_dim: int = 128
    causal: bool = True
    passes: tuple[str, ...] = ("forward", "both")
    compares_bits: bool = False  # of any number of ranks with those of one

    @property
    def name(self) -> str:
        heads = f"h{self.num_heads}" + (f"kv{self.num_heads_kv}" if self.num_heads_kv != self.num_heads else "")
        mask = "decode" if self.decodes else "causal" if self.causal else "full"
        return f"{SHORT[self.dtype]}-d{self.head_dim}-{heads}-t{self.tokens}-{mask}"

    @property
    def decodes(self) -> bool:
        return self.passes == ("decode",)

    def flops(self, pass_: str, ranks: int) -> int:
        """Of the products, as of one device; 0 for decoding."""
        if pass_ == "decode":
            return 0
        seqlen = self.tokens * ranks
        case = Case(head_dim=self.head_dim, seqlen_q=seqlen, batch=1, num_heads=self.num_heads, causal=self.causal)
        return sum(case.flops(x) for x in (("forward", "backward") if pass_ == "both" else (pass_,)))

    def key_bytes(self, ranks: int) -> int:
        """Of k and v of all ranks."""
        return 2 * self.num_heads_kv * self.tokens * ranks * self.head_dim * numpy_dtype(self.dtype).itemsize

    def split(self, ranks: int) -> cd.Split:
        """Which rows each rank has; of keys, to decode."""
        split = cd.contiguous if self.decodes or not self.causal else cd.zigzag
        return split(self.tokens * ranks, ranks)

    def arrays(self, xp: Any, ranks: int) -> dict[str, Array]:
        """Those of all ranks."""
        random, dtype, seqlen = xp.random.default_rng(0), numpy_dtype(self.dtype), self.tokens * ranks
        rows = 1 if self.decodes else seqlen
        sizes = {"q": (self.num_heads, rows), "dout": (self.num_heads, rows)}
        sizes |= {name: (self.num_heads_kv, seqlen) for name in ("k", "v")}
        return {
            name: random.standard_normal((*size, self.head_dim), dtype=np.float32).astype(dtype)
            for name, size in sizes.items()
        }


class Barrier(Protocol):
    """Of threads or of processes."""

    def wait(self, timeout: float) -> int: ...


class Rank:
    """A rank on its device; or, without a communicator, one device that has all rows."""

    def __init__(self, xp: Any, rank: int, ranks: int, comm: Any = None, start: Barrier | None = None) -> None:
        self.xp, self.rank, self.ranks, self.comm, self.start = xp, rank, ranks, comm, start
        self.on_device = xp is not np
        self.found: tuple[Array, ...] = ()
        self.graphs: dict[str, tuple[Any, ...]] = {}

    def _entered(self) -> AbstractContextManager[Any]:
        return self.xp.cuda.Device(self.rank) if self.on_device else contextlib.nullcontext()

    def begin(self, problem: Problem) -> None:
        """Make this rank's arrays, and what computes with them."""
        self.problem, self.split = problem, problem.split(self.ranks)
        options: Any = {"causal": problem.causal and not problem.decodes}
        with self._entered():
            whole = problem.arrays(self.xp, self.ranks)
            if self.comm is None:
                self.arrays: Mapping[str, Array] = whole
                self.attention: Any = FlashAttention(**options)
                return
            shared = ("q", "dout") if problem.decodes else ()
            self.arrays = {
                name: (x if name in shared else self.split.part(x, self.rank)).copy(order="C")
                for name, x in whole.items()
            }
            self.options = {"split": self.split, "split_k": self.split, **options}
            self.attention = cd.ContextParallel(self.comm, **self.options)

    def end(self) -> None:
        """Let go of all memory."""
        self.arrays = {}
        self.forget()

    def forget(self) -> None:
        """Let go of all memory but that of the arrays: ranks of several kinds share a device."""
        self.found = ()
        while self.graphs:
            _, (pool, *what_it_allocated) = self.graphs.popitem()
            what_it_allocated.clear()  # CuPy never frees the memory of a pool that goes before what it allocated
            pool.free_all_blocks()
        if self.on_device:
            with self._entered():
                self.xp.cuda.Device().synchronize()
                self.xp.get_default_memory_pool().free_all_blocks()

    def time_us(self, pass_: str, count: int) -> float:
        """Of so many calls that follow each other, each: from when all ranks begin with the first one."""

        def calls() -> None:
            for _ in range(count):
                self.found = ()  # so that results of two calls never take memory at once
                self.found = self._call(self.attention, pass_)

        return self._time_us(calls) / count

    def graph_us(self, pass_: str, count: int) -> float:
        """The same of a call that a CUDA graph holds."""
        cupy = self.xp
        with self._entered():
            if pass_ not in self.graphs:
                attn = cd.ContextParallel(self.comm, **self.options, check=False)
                stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
                cupy.cuda.Device().synchronize()
                with cupy.cuda.using_allocator(pool.malloc), stream:
                    self._call(attn, pass_)
                    stream.begin_capture()
                    results = self._call(attn, pass_)
                    self.graphs[pass_] = (pool, stream, stream.end_capture(), results, attn)  # what it needs to live
            _, stream, graph, self.found, _ = self.graphs[pass_]
            with stream:
                return self._time_us(lambda: [graph.launch(stream) for _ in range(count)]) / count

    def out(self) -> Array:
        """That of the last call, of every eighth head, in host memory."""
        return _to_host(self.found[0][::8])

    def deterministic(self, pass_: str) -> list[Array]:
        """The results of a call in deterministic mode, those of one device by one rank."""
        comm, split = self.comm, self.split
        if comm is None:
            (comm,), split = cd.threads(1), cd.contiguous(split.seqlen, 1)
        with self._entered():
            attn = cd.ContextParallel(comm, split=split, causal=self.problem.causal, deterministic=True)
            return [_to_host(x) for x in self._call(attn, pass_)]

    def _call(self, attn: Any, pass_: str) -> tuple[Array, ...]:
        q, k, v = (self.arrays[name] for name in "qkv")
        if pass_ == "decode":
            return tuple(attn.forward(q, k, v) if isinstance(attn, FlashAttention) else attn.decode(q, k, v))
        out, lse = attn.forward(q, k, v)
        if pass_ == "forward":
            return out, lse
        return (out, lse, *attn.backward(self.arrays["dout"], q, k, v, out, lse))

    def _time_us(self, work: Any) -> float:
        if not self.on_device:
            self._wait()
            begun = time.perf_counter()
            work()
            return (time.perf_counter() - begun) * 1e6
        with self._entered():
            begin, end = self.xp.cuda.Event(), self.xp.cuda.Event()
            self.xp.cuda.Device().synchronize()
            self._wait()
            begin.record()
            work()
            end.record()
            end.synchronize()
            return float(self.xp.cuda.get_elapsed_time(begin, end)) * 1e3

    def _wait(self) -> None:
        if self.start is not None:
            self.start.wait(TIMEOUT)


def _to_host(array: Array) -> Array:
    return array.get() if hasattr(array, "get") else array


class Ranks(Protocol):
    """All ranks."""

    size: int

    def call(self, method: str, *args: Any) -> list[Any]:
        """What a method of `Rank` gives on each of them, at the same time."""

    def close(self) -> None:
        """End them."""


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, size: int, xp: Any) -> None:
        self.size = size
        self._run(xp, cd.threads(size))

    def _run(self, xp: Any, comms: Sequence[Any]) -> None:
        start = threading.Barrier(len(comms))
        self._ranks = [Rank(xp, number, self.size, comm, start) for number, comm in enumerate(comms)]
        self._pool = ThreadPoolExecutor(len(comms))

    def call(self, method: str, *args: Any) -> list[Any]:
        return list(self._pool.map(lambda rank: getattr(rank, method)(*args), self._ranks))

    def close(self) -> None:
        self._pool.shutdown()


class Devices(Threads):
    """Each has all of the problem that so many ranks share, and no other rank: the same work at the same time.

    So a device is as warm as it is while ranks compute, and its neighbours take as much power.
    """

    def __init__(self, devices: int, xp: Any, ranks: int) -> None:
        self.size = ranks
        self._run(xp, [None] * devices)


class Processes:
    """Ranks that are processes, as those of NCCL are: the host work of one is not in the way of another's."""

    def __init__(self, size: int, make: Any, *args: Any) -> None:
        """`make(rank, size, *args)` gives the array module and the communicator of a rank, in its process."""
        self.size = size
        context = multiprocessing.get_context("spawn")
        self._start = start = context.Barrier(size)
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, size, start, make, args), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def call(self, method: str, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, args))
        answers = [pipe.recv() for pipe in self._pipes]
        for ok, answer in answers:
            if not ok:
                raise RuntimeError(f"{method} of a rank: {answer}")
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(10)
            process.kill()


def _serve(pipe: Any, rank: int, size: int, start: Any, make: Any, args: tuple[Any, ...]) -> None:
    xp, comm = make(rank, size, *args)
    worker = Rank(xp, rank, size, comm, start)
    while (message := pipe.recv()) is not None:
        method, given = message
        try:
            pipe.send((True, getattr(worker, method)(*given)))
        except Exception as error:  # which the process that measures raises
            pipe.send((False, f"{type(error).__name__}: {error}"))


def of_nccl(rank: int, size: int, unique_id: Any) -> tuple[Any, Any]:
    """CuPy, and a communicator of NCCL on a device of its own."""
    cupy: Any = importlib.import_module("cupy")
    nccl: Any = importlib.import_module("cupy.cuda.nccl")
    cupy.cuda.Device(rank).use()
    return cupy, nccl.NcclCommunicator(size, unique_id, rank)
