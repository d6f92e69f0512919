"""Time calls side by side: device time with events and a cache full of other data, or host time."""

from __future__ import annotations

import gc
import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

ROUNDS_BETWEEN_SYNCS = 16  # keeps the launch queue (about 1000 entries) from filling, which would stall the host
FLUSH_BYTES = 640 * 2**20  # about 150 us of reading on an H200: the host enqueues the timed call meanwhile
FLUSH_ROWS = 4096  # reduced side by side, so that the whole device reads
LEAD_S = 0.1  # until the threads of another library are at rest
CALLS_IN_A_ROW = 20  # where events cannot see a call


@dataclass(frozen=True)
class Timing:
    """Statistics of repeated runs of one call, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int


def summarize(samples_us: list[float]) -> Timing:
    """Median and the 10th and 90th percentile."""
    p10, median, p90 = (float(x) for x in np.percentile(samples_us, (10, 50, 90)))
    return Timing(median, p10, p90, len(samples_us))


class Clock(Protocol):
    """Runs one call and reads its time, at once or later."""

    def run(self, call: Callable[[], object]) -> Any:
        """Run `call` and return a ticket."""

    def read_us(self, ticket: Any) -> float:
        """Microseconds of the call of a ticket; waits for it."""


class HostClock:
    """Wall time of calls that finish before they return.

    With a lead, after calls for so many seconds, one at least. Threads of some libraries wait actively for the next
    call: those of PyTorch kept both cores of a host from whatever followed for 10 ms, which took 1.9 times as long.
    """

    def __init__(self, lead_s: float = 0.0) -> None:
        self.lead_s = lead_s

    def run(self, call: Callable[[], object]) -> float:
        if self.lead_s:
            timed_from = time.perf_counter() + self.lead_s
            call()
            while time.perf_counter() < timed_from:
                call()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def read_us(self, ticket: float) -> float:
        return ticket


class CudaClock:
    """Device time between two events on CuPy's current stream, from an L2 cache full of other data."""

    def __init__(self) -> None:
        self.cupy: Any = importlib.import_module("cupy")
        device = self.cupy.cuda.runtime.getDeviceProperties(self.cupy.cuda.Device().id)
        nbytes = max(FLUSH_BYTES, 4 * device["l2CacheSize"])
        self.flush_buffer = self.cupy.zeros((FLUSH_ROWS, nbytes // (4 * FLUSH_ROWS)), dtype=self.cupy.uint32)
        self.flush_result = self.cupy.zeros(FLUSH_ROWS, dtype=self.cupy.uint32)

    def flush(self) -> None:
        """Put other data in place of all that the L2 cache holds.

        By reading: what was written would stay in the cache until the timed call needs the room, and be brought to
        memory in its time. On an H200 that is up to 60 MB, or 13 us.
        """
        self.flush_buffer.max(axis=1, out=self.flush_result)

    def run(self, call: Callable[[], object]) -> tuple[Any, Any]:
        self.flush()
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        start.record()
        call()
        end.record()
        return start, end

    def read_us(self, ticket: tuple[Any, Any]) -> float:
        start, end = ticket
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, end)) * 1e3


class RowClock:
    """Wall time of one of `CALLS_IN_A_ROW` calls of a library whose stream is its own, where CuPy's events see nothing.

    From an idle device and an L2 cache full of other data until `wait` has seen the last result. Nothing is subtracted:
    the host's time to launch the first call counts, as far as the device waits for it. Later calls find in the cache
    what those before left, where other contenders find other data.
    """

    def __init__(self, clock: CudaClock, wait: Callable[[Any], object]) -> None:
        self.clock = clock
        self.wait = wait

    def run(self, call: Callable[[], object]) -> float:
        self.clock.flush()
        self.clock.cupy.cuda.get_current_stream().synchronize()
        start = time.perf_counter()
        for _ in range(CALLS_IN_A_ROW):
            result = call()
        self.wait(result)
        return (time.perf_counter() - start) * 1e6 / CALLS_IN_A_ROW

    def read_us(self, ticket: float) -> float:
        return ticket


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def choose_repeats(
    estimates_us: Mapping[str, float], *, budget_s: float, limit_s: float, at_least: int = 10, at_most: int = 100
) -> dict[str, int]:
    """Runs of each call: `budget_s` seconds of each, within `at_least`..`at_most`; fewer (3 or more) where all of them
    together would pass `limit_s`."""
    repeats = {
        name: min(max(int(budget_s * 1e6 / max(us, 1e-3)), at_least), at_most) for name, us in estimates_us.items()
    }
    total_us = sum(repeats[name] * us for name, us in estimates_us.items())
    shrink = min(1.0, limit_s * 1e6 / total_us) if total_us else 1.0
    return {name: max(min(3, n), math.floor(n * shrink)) for name, n in repeats.items()}


def schedule(repeats: Mapping[str, int]) -> list[list[str]]:
    """Rounds of calls: each call spread evenly over all rounds, and a different one first in each round."""
    names = list(repeats)
    rounds = max(repeats.values(), default=0)
    plan = []
    for r in range(rounds):
        first = r % len(names)
        turn = names[first:] + names[:first]
        plan.append([x for x in turn if (r + 1) * repeats[x] // rounds > r * repeats[x] // rounds])
    return plan


def time_interleaved(
    calls: Mapping[str, Callable[[], object]],
    clock: Clock,
    *,
    clocks: Mapping[str, Clock] | None = None,
    budget_s: float = 0.15,
    limit_s: float = 3.0,
    at_most: int = 100,
) -> dict[str, Timing]:
    """Time several calls in turns, up to so many, so that a drifting clock or temperature meets all of them alike.

    Those named in `clocks` have a clock of their own, and take turns after all others: it leaves the device idle, and
    the next call would wait for its launch, which others hide behind the calls before them.
    """
    clock_of = {name: (clocks or {}).get(name, clock) for name in calls}
    estimates = {}
    for name, call in calls.items():
        clock_of[name].read_us(clock_of[name].run(call))
        estimates[name] = min(clock_of[name].read_us(clock_of[name].run(call)) for _ in range(2))
    repeats = choose_repeats(estimates, budget_s=budget_s, limit_s=limit_s, at_most=at_most)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    usual = {name: n for name, n in repeats.items() if clock_of[name] is clock}
    own = {name: n for name, n in repeats.items() if name not in usual}
    with _no_garbage_collection():
        for plan in (schedule(usual), schedule(own)):
            for first in range(0, len(plan), ROUNDS_BETWEEN_SYNCS):
                rounds = plan[first : first + ROUNDS_BETWEEN_SYNCS]
                tickets = [(name, clock_of[name].run(calls[name])) for names in rounds for name in names]
                for name, ticket in tickets:
                    samples[name].append(clock_of[name].read_us(ticket))
    return {name: summarize(values) for name, values in samples.items()}


def time_host(
    calls: Mapping[str, Callable[[], object]],
    synchronize: Callable[[], object],
    *,
    calls_per_sample: int = 50,
    samples: int = 30,
) -> dict[str, Timing]:
    """Host time of one call, not waiting for the device: means of `calls_per_sample` calls from an empty queue on."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with _no_garbage_collection():
        for sample in range(-2, samples):  # the first two warm up
            for name, call in calls.items():
                synchronize()
                start = time.perf_counter()
                for _ in range(calls_per_sample):
                    call()
                elapsed_us = (time.perf_counter() - start) * 1e6
                if sample >= 0:
                    times[name].append(elapsed_us / calls_per_sample)
    synchronize()
    return {name: summarize(values) for name, values in times.items()}
