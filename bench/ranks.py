"""Sequences over several devices (`cuflash.distributed`) compared with one device that has all of the same problem."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cuflash.gpu.progress import Bar

from .rank import Devices, Problem, Processes, Ranks, Threads, of_nccl
from .report import RC, Record
from .timing import summarize

SAMPLE_FLOPS = 5e13  # about 0.1 s of one device; as many calls follow each other in a sample, at most MOST_CALLS
MOST_CALLS = 20
ONE = "one device"

PROBLEMS = (
    Problem(tokens=2**13, compares_bits=True),
    Problem(tokens=2**15),
    Problem(tokens=2**16),
    Problem(tokens=2**15, causal=False),
    Problem(tokens=2**15, num_heads_kv=8),
    Problem(tokens=2**13, dtype="float32", compares_bits=True),
    Problem(tokens=2**15, dtype="float32"),
    Problem(tokens=2**19, num_heads_kv=8, passes=("decode",)),
)


@dataclass(frozen=True)
class Machine:
    """One device, and by name the ways in which several are ranks."""

    alone: Ranks  # each device for itself, with all of a problem
    ways: Mapping[str, Ranks]
    in_graphs: str = ""  # the way whose calls CUDA graphs hold, too

    @classmethod
    @contextlib.contextmanager
    def of_devices(cls, size: int) -> Iterator[Machine]:
        """The first devices: processes with NCCL, and threads of this process, which copy from peer to peer."""
        cupy: Any = importlib.import_module("cupy")
        unique_id = importlib.import_module("cupy.cuda.nccl").get_unique_id()
        ways: dict[str, Ranks] = {"NCCL": Processes(size, of_nccl, unique_id), "threads": Threads(size, cupy)}
        with cls(Devices(size, cupy, size), ways, in_graphs="NCCL")._closing() as machine:
            yield machine

    @classmethod
    @contextlib.contextmanager
    def of_threads(cls, size: int) -> Iterator[Machine]:
        """Threads with NumPy arrays."""
        with cls(Devices(1, np, size), {"threads": Threads(size, np)})._closing() as machine:
            yield machine

    @property
    def ranks(self) -> int:
        return self.alone.size

    @property
    def all(self) -> tuple[Ranks, ...]:
        return self.alone, *self.ways.values()

    def forget(self) -> None:
        """Let go of all memory but that of the arrays."""
        for ranks in self.all:
            ranks.call("forget")

    @contextlib.contextmanager
    def _closing(self) -> Iterator[Machine]:
        try:
            yield self
        finally:
            for ranks in self.all:
                ranks.close()


def measure_devices(write: Callable[..., None]) -> None:
    """Measure on two devices of this host, and on all of them."""
    size = importlib.import_module("cupy").cuda.runtime.getDeviceCount()
    if size < 2:
        raise ValueError(f"backend: got {size} device, expected several")
    for ranks in sorted({2, size}):
        with Machine.of_devices(ranks) as machine:
            measure(write, machine)


def measure(
    write: Callable[..., None], machine: Machine, problems: Iterable[Problem] = PROBLEMS, rounds: int = 5
) -> None:
    """Write a record for each pass of each problem."""
    problems = list(problems)
    with Bar(f"{machine.ranks} ranks", total=len(problems)) as bar:
        for problem in problems:
            for ranks in machine.all:
                ranks.call("begin", problem)
            for pass_ in problem.passes:
                measured = _measured(problem, pass_, machine, rounds)
                write("ranks", case=problem.name, **{"pass": pass_}, ranks=machine.ranks, **measured)
            for ranks in machine.all:
                ranks.call("end")
            bar.print(problem.name)
            bar.advance()


def _measured(problem: Problem, pass_: str, machine: Machine, rounds: int) -> dict[str, Any]:
    flops = problem.flops(pass_, machine.ranks)
    count = max(1, min(MOST_CALLS, round(SAMPLE_FLOPS / flops))) if flops else MOST_CALLS
    ways = {name: (ranks, "time_us") for name, ranks in machine.ways.items()}
    if machine.in_graphs:
        ways[f"{machine.in_graphs} in a graph"] = (machine.ways[machine.in_graphs], "graph_us")
    times: dict[str, list[float]] = {ONE: [], **{name: [] for name in ways}}
    errors = []
    for name, (ranks, method) in ways.items():
        # Each way takes turns with one device, and with no other way: what all of them hold would not fit a device.
        machine.forget()
        for number in range(rounds + 1):
            for who, own, own_method in ((ONE, machine.alone, "time_us"), (name, ranks, method)):
                times[who] += [_slowest(own, own_method, pass_, count)] * (number > 0)  # the first compiles
        errors.append(_error(problem, pass_, machine.alone, ranks))
    machine.forget()
    return {
        "flops": flops,
        "bytes": problem.key_bytes(machine.ranks),
        "same_bits": _same_bits(problem, pass_, machine) if problem.compares_bits else None,
        "error": max(errors),
        "us": {name: summarize(samples).median_us for name, samples in times.items()},
    }


def _slowest(ranks: Ranks, method: str, pass_: str, count: int) -> float:
    return float(max(ranks.call(method, pass_, count)))


def _error(problem: Problem, pass_: str, alone: Ranks, ranks: Ranks) -> float:
    """The largest difference of out to that of one device, relative to its largest element."""
    whole, found = alone.call("out")[0].astype(np.float32), ranks.call("out")
    outs = found if pass_ == "decode" else [problem.split(ranks.size).whole(found)]
    return float(max(abs(out.astype(np.float32) - whole).max() for out in outs) / abs(whole).max())


def _same_bits(problem: Problem, pass_: str, machine: Machine) -> bool:
    """Whether all ranks give what one rank gives, bit for bit, in deterministic mode."""
    whole, split = machine.alone.call("deterministic", pass_)[0], problem.split(machine.ranks)
    of_lse = 1  # its place; it has no columns
    for ranks in machine.ways.values():
        found = ranks.call("deterministic", pass_)
        for i, x in enumerate(whole):
            if split.whole([own[i] for own in found], -1 if i == of_lse else -2).tobytes() != x.tobytes():
                return False
    return True


# ---- What is shown ---------------------------------------------------------------------------------------------------


def latest_rows(records: Sequence[Record]) -> list[Record]:
    """The latest record of each case, pass and number of ranks, and the runs they are of; the latest of these first.

    Several devices are seldom there for as long as all cases take, so no run has to have all of them. Runs count if
    they were made on such a device as the latest one.
    """
    runs = [r for r in records if r["record"] == "run"]
    runs = [r for r in reversed(runs) if r["device"] == runs[-1]["device"]]
    comparable = {run["run"] for run in runs}
    newest = {(row["ranks"], row["case"], row["pass"]): row for row in _rows(records) if row["run"] in comparable}
    used = {row["run"] for row in newest.values()}
    order = list(dict.fromkeys([problem.name for problem in PROBLEMS] + [row["case"] for row in newest.values()]))
    rows = sorted(newest.values(), key=lambda row: (-row["ranks"], order.index(row["case"])))
    return [run for run in runs if run["run"] in used] + rows


def markdown(records: Sequence[Record]) -> str:
    """A row for each pass: times, speedups over one device, and rates."""
    rows = _rows(records)
    revisions = {r["run"]: r["revision"] for r in records if r["record"] == "run"}
    ways = _ways(rows)
    heads = ["case", "pass", "ranks", "ms on one device", *(f"ms by {way}" for way in ways)]
    heads += [*(f"speedup by {way}" for way in ways), "rate", "same bits as one rank", "revision"]
    lines = [
        "A case has its tokens on each of the ranks; the rate is that of all ranks by the fastest way. One device has",
        "all of the problem, and so has each of the others at the same time: the slowest one is shown. Short calls are",
        f"timed in a row, up to {MOST_CALLS} of them. Ranks of NCCL are processes, `threads` are ranks of one process.",
        "The head tells of the latest run; each row is of the last run that had it.",
        "",
    ]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        times = [f"{row['us'][way] / 1e3:.4g}" if way in row["us"] else "-" for way in (ONE, *ways)]
        speedups = [f"{row['us'][ONE] / row['us'][way]:.3f}" if way in row["us"] else "-" for way in ways]
        bits = "-" if row["same_bits"] is None else "yes" if row["same_bits"] else "NO"
        name = "forward and backward" if row["pass"] == "both" else row["pass"]
        cells = (row["case"], name, str(row["ranks"]), *times, *speedups, _rate(row), bits, revisions[row["run"]])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _rate(row: Record) -> str:
    us = min(us for name, us in row["us"].items() if name != ONE)
    return f"{row['flops'] / us / 1e6:.0f} TFLOP/s" if row["flops"] else f"{row['bytes'] / us / 1e6:.2f} TB/s"


def _ways(rows: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["us"] if name != ONE))


def _rows(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["record"] == "ranks"]


def draw(plt: Any, records: Sequence[Record], path: Path) -> None:
    """Bars of the speedups, over the numbers of ranks."""
    rows = _rows(records)
    with plt.rc_context(RC):
        figure, axis = plt.subplots(figsize=(7, 0.8 + 0.4 * len(rows)), layout="constrained")
        ways = _ways(rows)
        for number, way in enumerate(ways):
            positions = [i + (number - (len(ways) - 1) / 2) * 0.8 / len(ways) for i in range(len(rows))]
            speedups = [row["us"][ONE] / row["us"].get(way, np.nan) for row in rows]
            axis.barh(positions, speedups, height=0.8 / len(ways), label=way)
        axis.set_yticks(range(len(rows)), [f"{row['case']}, {row['pass']}, {row['ranks']} ranks" for row in rows])
        axis.invert_yaxis()
        for count in {row["ranks"] for row in rows}:
            axis.axvline(count, color="black", linewidth=0.8, linestyle=":")
        axis.set(xlabel="speedup over one device")
        axis.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=len(ways))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
