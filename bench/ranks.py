"""Sequences over several devices (`cuflash.distributed`) beside one device that has all of the same problem."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cuflash.distributed as cd
from cuflash import FlashAttention
from cuflash.operands import numpy_dtype

from .cases import SHORT, Case
from .report import RC, Record
from .timing import HostClock, summarize


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
        mask = "decode" if self.passes == ("decode",) else "causal" if self.causal else "full"
        return f"{SHORT[self.dtype]}-d{self.head_dim}-{heads}-t{self.tokens}-{mask}"

    def flops(self, pass_: str, ranks: int) -> int:
        """Of the products, as of one device; 0 for decoding."""
        if pass_ == "decode":
            return 0
        seqlen = self.tokens * ranks
        case = Case(head_dim=self.head_dim, seqlen_q=seqlen, batch=1, num_heads=self.num_heads, causal=self.causal)
        return sum(case.flops(x) for x in (("forward", "backward") if pass_ == "both" else (pass_,)))


PROBLEMS = (
    Problem(tokens=2**13, compares_bits=True),
    Problem(tokens=2**15),
    Problem(tokens=2**16),
    Problem(tokens=2**15, causal=False),
    Problem(tokens=2**15, num_heads_kv=8),
    Problem(tokens=2**15, dtype="float32"),
    Problem(tokens=2**19, num_heads_kv=8, passes=("decode",)),
)


class EventClock:
    """Device time of a call on the current device, from the start of the host's call on."""

    def __init__(self) -> None:
        self.cupy: Any = importlib.import_module("cupy")

    def run(self, call: Callable[[], object]) -> tuple[Any, Any]:
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        start.record()
        call()
        end.record()
        return start, end

    def read_us(self, ticket: tuple[Any, Any]) -> float:
        start, end = ticket
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, end)) * 1e3


@dataclass(frozen=True)
class Machine:
    """Where ranks are: the array module, how to enter the device of one, communicators by name, and the clock."""

    xp: Any
    ranks: int
    enter: Callable[[int], AbstractContextManager[Any]]
    communicators: Mapping[str, Callable[[], Sequence[Any]]]
    clock: Any

    @classmethod
    def of_devices(cls) -> Machine:
        """All devices of this process, ranks of NCCL and threads that copy from peer to peer."""
        cupy: Any = importlib.import_module("cupy")
        nccl: Any = importlib.import_module("cupy.cuda.nccl")
        ranks = cupy.cuda.runtime.getDeviceCount()
        if ranks < 2:
            raise ValueError(f"backend: got {ranks} device, expected several")
        ways = {
            "NCCL": lambda: nccl.NcclCommunicator.initAll(list(range(ranks))),
            "threads": lambda: cd.threads(ranks),
        }
        return cls(cupy, ranks, cupy.cuda.Device, ways, EventClock())

    @classmethod
    def of_threads(cls, ranks: int) -> Machine:
        """Threads with NumPy arrays."""
        ways = {"threads": lambda: cd.threads(ranks)}
        return cls(np, ranks, lambda rank: contextlib.nullcontext(), ways, HostClock())


def measure(
    write: Callable[..., None], machine: Machine, problems: Iterable[Problem] = PROBLEMS, rounds: int = 5
) -> None:
    """Write a record for each pass of each problem and way of transport."""
    for problem in problems:
        with _Calls(problem, machine) as calls:
            for pass_ in problem.passes:
                times: dict[str, list[float]] = {name: [] for name in ("one device", *machine.communicators)}
                for number in range(rounds + 1):
                    for name, samples in times.items():
                        us = calls.one(pass_) if name == "one device" else calls.ranks(name, pass_)
                        samples += [us] * (number > 0)  # the first compiles
                write(
                    "ranks",
                    case=problem.name,
                    **{"pass": pass_},
                    ranks=machine.ranks,
                    flops=problem.flops(pass_, machine.ranks),
                    bytes=calls.key_bytes,
                    same_bits=calls.same_bits(pass_) if problem.compares_bits else None,
                    error=calls.error(pass_),
                    us={name: summarize(samples).median_us for name, samples in times.items()},
                )
        print(problem.name, flush=True)


class _Calls:
    """What is timed, of one problem. The whole problem is on the device of rank 0."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.problem, self.machine = problem, machine
        self.decodes = problem.passes == ("decode",)
        self.seqlen = problem.tokens * machine.ranks
        split = cd.contiguous if self.decodes or not problem.causal else cd.zigzag
        self.split = split(self.seqlen, machine.ranks)
        self.pool = ThreadPoolExecutor(machine.ranks)
        self.start = threading.Barrier(machine.ranks)
        self.comms = {name: make() for name, make in machine.communicators.items()}
        with machine.enter(0):
            self.whole = self._whole()
        self.parts = list(self.pool.map(self._part, range(machine.ranks)))
        self.found: dict[Any, Any] = {}

    def __enter__(self) -> _Calls:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.shutdown()

    @property
    def key_bytes(self) -> int:
        return int(self.whole["k"].nbytes + self.whole["v"].nbytes)

    def _whole(self) -> dict[str, Any]:
        problem, xp = self.problem, self.machine.xp
        random, dtype = xp.random.default_rng(0), numpy_dtype(problem.dtype)
        rows = 1 if self.decodes else self.seqlen
        sizes = {"q": (problem.num_heads, rows), "dout": (problem.num_heads, rows)}
        sizes |= {name: (problem.num_heads_kv, self.seqlen) for name in ("k", "v")}
        return {
            name: random.standard_normal((*size, problem.head_dim), dtype=np.float32).astype(dtype)
            for name, size in sizes.items()
        }

    def _part(self, rank: int) -> dict[str, Any]:
        shared = ("q", "dout") if self.decodes else ()
        with self.machine.enter(rank):
            return {
                name: (x if name in shared else self.split.part(x, rank)).copy(order="C")
                for name, x in self.whole.items()
            }

    def _attention(self, comm: Any, *, deterministic: bool = False) -> Any:
        options: Any = {"causal": self.problem.causal and not self.decodes, "deterministic": deterministic}
        if comm is None:
            return FlashAttention(**options)
        return cd.ContextParallel(comm, split=self.split, **options)

    def _call(self, attn: Any, arrays: Mapping[str, Any], pass_: str) -> tuple[Any, ...]:
        q, k, v = (arrays[name] for name in "qkv")
        if pass_ == "decode":
            run = attn.forward if isinstance(attn, FlashAttention) else attn.decode
            return tuple(run(q, k, v))
        out, lse = attn.forward(q, k, v)
        if pass_ == "forward":
            return out, lse
        return (out, lse, *attn.backward(arrays["dout"], q, k, v, out, lse))

    def one(self, pass_: str) -> float:
        """Microseconds of one device."""
        attn, clock = self._attention(None), self.machine.clock
        with self.machine.enter(0):
            return float(clock.read_us(clock.run(lambda: self._keep("one", self._call(attn, self.whole, pass_)))))

    def ranks(self, name: str, pass_: str) -> float:
        """Those of all ranks, which begin together: of the one that takes the longest."""

        def work(rank: int) -> float:
            clock = self.machine.clock
            with self.machine.enter(rank):
                attn = self._attention(self.comms[name][rank])
                call = functools.partial(self._call, attn, self.parts[rank], pass_)
                self.start.wait()
                return float(clock.read_us(clock.run(lambda: self._keep(rank, call()))))

        return max(self.pool.map(work, range(self.machine.ranks)))

    def _keep(self, who: Any, results: tuple[Any, ...]) -> None:
        self.found[who] = results

    def error(self, pass_: str) -> float:
        """The largest difference of out to that of one device, relative to its largest element."""
        found = [_to_host(self.found[rank][0]) for rank in range(self.machine.ranks)]
        whole = _to_host(self.found["one"][0]).astype(np.float32)
        parts = found if pass_ == "decode" else [self.split.whole(found)]
        return float(max(abs(part.astype(np.float32) - whole).max() for part in parts) / abs(whole).max())

    def same_bits(self, pass_: str) -> bool:
        """Whether all ranks give what one rank gives, bit for bit, in deterministic mode."""
        comms = next(iter(self.comms.values()))

        def work(rank: int) -> list[Any]:
            with self.machine.enter(rank):
                attn = self._attention(comms[rank], deterministic=True)
                return [_to_host(x) for x in self._call(attn, self.parts[rank], pass_)]

        found = list(self.pool.map(work, range(self.machine.ranks)))
        (alone,) = cd.threads(1)
        attn = cd.ContextParallel(alone, causal=self.problem.causal, deterministic=True)
        with self.machine.enter(0):
            whole = [_to_host(x) for x in self._call(attn, self.whole, pass_)]
        of_lse = 1  # its place; it has no columns
        return all(
            self.split.whole([parts[i] for parts in found], -1 if i == of_lse else -2).tobytes() == x.tobytes()
            for i, x in enumerate(whole)
        )


def _to_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


# ---- What is shown ---------------------------------------------------------------------------------------------------


def markdown(records: Sequence[Record]) -> str:
    """A row for each pass: times, speedups over one device, and rates."""
    rows = _rows(records)
    ways = [name for name in rows[0]["us"] if name != "one device"] if rows else []
    heads = ["case", "pass", "ms on one device", *(f"ms by {way}" for way in ways)]
    heads += [*(f"speedup by {way}" for way in ways), "rate", "same bits as one rank"]
    lines = ["A case has its tokens on each of the ranks; the rate is that of all ranks by the faster way.", ""]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        times = [f"{us / 1e3:.4g}" for us in row["us"].values()]
        speedups = [f"{row['us']['one device'] / row['us'][way]:.3f}" for way in ways]
        bits = "-" if row["same_bits"] is None else "yes" if row["same_bits"] else "NO"
        name = "forward and backward" if row["pass"] == "both" else row["pass"]
        lines.append(f"| {' | '.join((row['case'], name, *times, *speedups, _rate(row, ways), bits))} |")
    return "\n".join(lines)


def _rate(row: Record, ways: Sequence[str]) -> str:
    us = min(row["us"][way] for way in ways)
    return f"{row['flops'] / us / 1e6:.0f} TFLOP/s" if row["flops"] else f"{row['bytes'] / us / 1e6:.2f} TB/s"


def _rows(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["record"] == "ranks"]


def draw(plt: Any, records: Sequence[Record], path: Path) -> None:
    """Bars of the speedups, beside the number of ranks."""
    rows = _rows(records)
    with plt.rc_context(RC):
        figure, axis = plt.subplots(figsize=(7, 0.8 + 0.4 * len(rows)), layout="constrained")
        ways = [name for name in rows[0]["us"] if name != "one device"]
        for number, way in enumerate(ways):
            places = [i + (number - (len(ways) - 1) / 2) * 0.35 for i in range(len(rows))]
            axis.barh(places, [row["us"]["one device"] / row["us"][way] for row in rows], height=0.33, label=way)
        axis.set_yticks(range(len(rows)), [f"{row['case']}, {row['pass']}" for row in rows])
        axis.invert_yaxis()
        axis.axvline(rows[0]["ranks"], color="black", linewidth=0.8, linestyle=":")
        axis.set(xlabel="speedup over one device")
        axis.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=len(ways))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
