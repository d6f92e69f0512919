"""Keys and values in host memory (`cuflash.streamed`), compared with device memory and with the link alone."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cuflash import FlashAttention, streamed
from cuflash.arrays.array_info import numpy_dtype
from cuflash.gpu.progress import Bar

from .cases import SHORT
from .memory import DeviceMeter, Meter
from .report import RC, Record
from .timing import Clock, CudaClock, time_interleaved

BLOCK_ROWS = 4096  # of keys that are drawn; the others repeat them


@dataclass(frozen=True, kw_only=True)
class Case:
    """Queries on the device, keys in host memory."""

    what: str  # "prefill" or "decode": by what it is judged
    seqlen_q: int
    seqlen_k: int
    num_heads: int = 32
    num_heads_kv: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    way: str = "pinned"  # "pageable": of NumPy; "copied": pinned, in chunks
    passes: tuple[str, ...] = ("forward", "backward")
    chunk: int | None = None

    @property
    def name(self) -> str:
        heads = f"h{self.num_heads}kv{self.num_heads_kv}"
        return f"{self.what}-{SHORT[self.dtype]}-d{self.head_dim}-{heads}-s{self.seqlen_q}k{self.seqlen_k}-{self.way}"


CASES = (
    Case(what="prefill", seqlen_q=4096, seqlen_k=2**19),
    Case(what="prefill", seqlen_q=16384, seqlen_k=2**17, num_heads=8, head_dim=64, dtype="float32"),
    Case(what="prefill", seqlen_q=4096, seqlen_k=2**18, way="pageable", passes=("forward",)),
    Case(what="decode", seqlen_q=1, seqlen_k=2**19, passes=("forward",)),
    Case(what="decode", seqlen_q=1, seqlen_k=2**19, passes=("forward",), way="copied", chunk=2**14),
    Case(what="decode", seqlen_q=1, seqlen_k=2**19, num_heads=8, dtype="float32", passes=("forward",)),
)


@dataclass(frozen=True)
class Machine:
    """Where arrays are, and how calls are timed."""

    xp: Any
    pinned: Callable[..., Any]
    load: Callable[[Any, Any], None]  # copy to the device what is in host memory, in stream order
    clock: Clock
    meter: Meter

    @classmethod
    def of_device(cls) -> Machine:
        cupy: Any = importlib.import_module("cupy")
        cupyx: Any = importlib.import_module("cupyx")

        def load(target: Any, source: Any) -> None:
            stream = cupy.cuda.get_current_stream()
            target.data.copy_from_host_async(source.ctypes.data, source.nbytes, stream)

        return cls(cupy, cupyx.empty_pinned, load, CudaClock(), DeviceMeter())


def measure(write: Callable[..., None], machine: Machine, cases: Iterable[Case] = CASES, seconds: float = 2.0) -> None:
    """Write a record for each pass of each case."""
    cases = list(cases)
    with Bar("streamed", total=len(cases)) as bar:
        for case in cases:
            calls = _Calls(case, machine)
            for pass_ in case.passes:
                machine.meter.begin()
                calls.streamed(pass_)
                peak = machine.meter.taken()
                timed: dict[str, Callable[[], object]] = {
                    "streamed": functools.partial(calls.streamed, pass_),
                    "in memory": functools.partial(calls.in_memory, pass_),
                    "link": calls.link,
                }
                times = time_interleaved(timed, machine.clock, budget_s=0.3, limit_s=seconds)
                write(
                    "streamed",
                    case=case.name,
                    what=case.what,
                    way=case.way,
                    **{"pass": pass_},
                    bytes=calls.k.nbytes + calls.v.nbytes,
                    error=calls.error(),
                    peak_bytes=peak,
                    stated_bytes=calls.plan.device_bytes(pass_),
                    us={name: timing.median_us for name, timing in times.items()},
                )
            bar.print(case.name)
            bar.advance()


class _Calls:
    """What is timed, of one case."""

    def __init__(self, case: Case, machine: Machine) -> None:
        self.machine = machine
        self.attn: Any = FlashAttention()
        dtype = numpy_dtype(case.dtype)
        random = np.random.default_rng(0)

        def drawn(*shape: int) -> Any:
            return random.standard_normal(shape, np.float32).astype(dtype)

        rows = min(case.seqlen_k, BLOCK_ROWS)
        empty = np.empty if case.way == "pageable" else machine.pinned
        shape = (1, case.num_heads_kv, case.seqlen_k, case.head_dim)
        self.k, self.v, self.dk, self.dv = (empty(shape, dtype) for _ in range(4))
        for array in (self.k, self.v):
            block = drawn(1, case.num_heads_kv, rows, case.head_dim)
            bits, of_array = (x.view(f"u{x.itemsize}") for x in (block, array))  # NumPy copies these as they are
            for first in range(0, case.seqlen_k, rows):
                of_array[:, :, first : first + rows] = bits[:, :, : case.seqlen_k - first]
        self.q, self.dout = (
            machine.xp.asarray(drawn(1, case.num_heads, case.seqlen_q, case.head_dim)) for _ in range(2)
        )
        self.on_device = tuple(machine.xp.asarray(x) for x in (self.k, self.v))
        self.keys = streamed(self.k, self.v, chunk=case.chunk)
        self.results = {"in memory": self.attn.forward(self.q, *self.on_device)}
        self.plan: Any = self.attn.plan(self.q, *self.keys)

    def streamed(self, pass_: str) -> None:
        if pass_ == "forward":
            self.results["streamed"] = self.attn.forward(self.q, *self.keys)
        else:
            out, lse = self.results["in memory"]
            self.attn.backward(self.dout, self.q, *self.keys, out, lse, dk=self.dk, dv=self.dv)

    def in_memory(self, pass_: str) -> None:
        if pass_ == "forward":
            self.results["in memory"] = self.attn.forward(self.q, *self.on_device)
        else:
            out, lse = self.results["in memory"]
            self.attn.backward(self.dout, self.q, *self.on_device, out, lse)

    def link(self) -> None:
        for target, source in zip(self.on_device, (self.k, self.v), strict=True):
            self.machine.load(target, source)

    def error(self) -> float:
        """The largest difference of out to that in memory."""
        x, y = (self.results[name].out.astype(np.float32) for name in ("streamed", "in memory"))
        return float(abs(x - y).max())


# ---- What is shown ---------------------------------------------------------------------------------------------------


def markdown(records: Sequence[Record]) -> str:
    """A row for each pass: times, what they are of the time in memory and of the link, and device memory."""
    heads = ("case", "pass", "ms streamed", "ms in memory", "ms of the link", "speed", "MiB peak", "MiB stated")
    lines = ["Speed is that in memory for a prefill, and that of the link for decoding.", ""]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in _rows(records):
        times = [f"{row['us'][name] / 1e3:.4g}" for name in ("streamed", "in memory", "link")]
        memory = [f"{row[name] / 2**20:.4g}" for name in ("peak_bytes", "stated_bytes")]
        lines.append(f"| {' | '.join((row['case'], row['pass'], *times, f'{_speed(row):.0%}', *memory))} |")
    gbytes = [row["bytes"] / row["us"]["link"] / 1e3 for row in _rows(records) if row["way"] != "pageable"]
    if gbytes:
        lines += ["", f"The link copies {min(gbytes):.1f} to {max(gbytes):.1f} GB/s from pinned memory."]
    return "\n".join(lines)


def _rows(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["record"] == "streamed"]


def _speed(row: Record) -> float:
    other = "in memory" if row["what"] == "prefill" else "link"
    return float(row["us"][other] / row["us"]["streamed"])


def draw(plt: Any, records: Sequence[Record], path: Path) -> None:
    """Bars of the speed."""
    rows = _rows(records)
    with plt.rc_context(RC):
        figure, axis = plt.subplots(figsize=(7, 0.5 + 0.3 * len(rows)), layout="constrained")
        names = [f"{row['case']}, {row['pass']}" for row in rows]
        axis.barh(names[::-1], [100 * _speed(row) for row in rows][::-1], height=0.6)
        axis.set(xlabel="% of the speed in memory (prefill), or of the link (decode)")
        axis.grid(axis="x", alpha=0.3)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
