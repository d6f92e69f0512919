"""Run a suite: check every contender's results, time the right ones side by side, append JSON lines."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import multiprocessing
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuflash import FlashAttention
from cuflash.gpu.compiler import CompileError, compile_spec
from cuflash.gpu.progress import Bar
from cuflash.plan import KernelSpec
from cuflash.spec.passes import PASS_NAMES

from . import ceiling, environment
from .cases import ALL_PASSES, Case
from .check import Check, Errors
from .contender import Absent, Contender
from .inputs import Inputs, keywords_of, make_inputs
from .peers import ADAPTERS
from .report import REASON_LENGTH
from .suites import Suite
from .timing import LEAD_S, CudaClock, HostClock, RowClock, Timing, time_host, time_interleaved

Record = dict[str, Any]
Task = tuple[Case, list[str], list[str]]  # a case, who takes it, and which passes
MOST_REPEATS = {"cpu": 20, "gpu": 100}
LIMIT_S = {"cpu": 30.0, "gpu": 3.0}  # for all contenders together, one pass of one case


@dataclass
class Journal:
    """JSON lines of one run, written at once: a run that is cut off keeps what it measured."""

    path: Path
    suite: str
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    records: list[Record] = field(default_factory=list)

    def write(self, record: str, **fields: Any) -> None:
        line = {"record": record, "run": self.run, "suite": self.suite, **fields}
        self.records.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Bench:
    """Where a suite runs and how it is timed."""

    kind: str
    xp: Any
    seconds: float
    clock: Any

    @classmethod
    def make(cls, kind: str, seconds: float) -> Bench:
        if kind == "cpu":
            return cls(kind, importlib.import_module("numpy"), seconds, HostClock(min(LEAD_S, seconds)))
        return cls(kind, importlib.import_module("cupy"), seconds, CudaClock())

    def time(
        self, calls: Mapping[str, Callable[[], object]], waits: Mapping[str, Callable[[Any], object]]
    ) -> dict[str, Timing]:
        """`waits` has those whose calls events cannot see."""
        if self.kind == "host":
            return time_host(calls, self.xp.cuda.get_current_stream().synchronize)
        clocks = {name: RowClock(self.clock, wait) for name, wait in waits.items()}
        limit_s, at_most = LIMIT_S[self.kind], MOST_REPEATS[self.kind]
        return time_interleaved(
            calls, self.clock, clocks=clocks, budget_s=self.seconds, limit_s=limit_s, at_most=at_most
        )

    def ceiling(self) -> Record:
        if self.kind == "cpu":
            return {"ceiling": ceiling.measure_host(self.clock)}
        if self.kind != "gpu":
            return {}
        measured = ceiling.measure(self.clock)
        self.free_memory()
        return {"ceiling": measured}

    def free_memory(self) -> None:
        """Give cached device memory back, so that CuPy's pool and torch's do not starve each other."""
        if self.kind == "cpu":
            return
        self.xp.cuda.get_current_stream().synchronize()
        self.xp.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()


def choose_contenders(suite: Suite, peers: Iterable[str] | None) -> list[str]:
    """cuflash and the peers, the suite's own unless some are named."""
    names = ["cuflash", *(x for x in (suite.peers if peers is None else peers) if x != "cuflash")]
    unknown = [x for x in names if x not in ADAPTERS]
    if unknown:
        raise ValueError(f"peers: got {unknown}, expected names out of {sorted(ADAPTERS)}")
    return names


def choose_cases(suite: Suite, match: str) -> list[Case]:
    """The cases whose name contains `match`."""
    cases = [case for case in suite.cases if match in case.name]
    if not cases:
        raise ValueError(f"case: got {match!r}, expected a part of one of {[case.name for case in suite.cases]}")
    return cases


def failure_of(error: Exception) -> Record:
    """Status and reason of a contender that did not run, the reason short enough for a table."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, Absent):
        return {"status": "absent", "reason": lines[0]}
    missing = isinstance(error, (ImportError, NotImplementedError))
    return {
        "status": "absent" if missing else "failed",
        "reason": f"{type(error).__name__}: {lines[0][:REASON_LENGTH]}",
    }


def _accuracy(errors: Mapping[str, Errors]) -> Record:
    """Errors as JSON fields; null is NaN or infinite."""

    def number(x: float) -> float | None:
        return x if math.isfinite(x) else None

    return {
        "status": "wrong" if any(e.wrong for e in errors.values()) else "ok",
        "within_rule": all(e.within_rule for e in errors.values()),
        "errors": {
            name: {"error": number(e.error), "formula_error": e.formula_error, "ulp": e.ulp}
            for name, e in errors.items()
        },
    }


def _speed(case: Case, pass_: str, timing: Timing) -> Record:
    return {
        **asdict(timing),
        "tflops": case.flops(pass_) / timing.median_us / 1e6,
        "gbytes_per_s": case.ideal_bytes(pass_) / timing.median_us / 1e3,
    }


def _check(contender: Contender, pass_: str, check: Check) -> Record:
    results = contender.calls[pass_]()
    arrays = tuple(contender.to_array(x) for x in results)
    return _accuracy(check.errors(pass_, arrays, contender.coarser)) if arrays else {"status": "ok"}


def _set_up(names: Iterable[str], case: Case, inputs: Inputs) -> tuple[dict[str, Contender], dict[str, Record]]:
    """The contenders that take this case, and why the others do not."""
    contenders, refusals = {}, {}
    for name in names:
        try:
            contenders[name] = ADAPTERS[name](case, inputs)
        except Exception as error:  # a peer may refuse with any type; the reason goes into the record
            refusals[name] = failure_of(error)
    return contenders, refusals


def run_case(case: Case, names: Sequence[str], passes: Iterable[str], bench: Bench) -> Iterator[Record]:
    """Check and time one case; gives a record for each pass and contender."""
    passes = tuple(passes)
    inputs = make_inputs(bench.xp, case, passes=passes)
    problem = {**asdict(case), "lengths": list(case.lengths)}
    check = Check(case, inputs, passes)
    contenders, refusals = _set_up(names, case, inputs)
    for pass_ in passes:
        found = dict(refusals)
        calls = {}
        for name, contender in contenders.items():
            if pass_ not in contender.calls:
                continue
            try:
                found[name] = _check(contender, pass_, check)
            except Exception as error:
                found[name] = failure_of(error)
            if found[name]["status"] == "ok":
                calls[name] = contender.calls[pass_]
        waits = {name: wait for name, contender in contenders.items() if (wait := contender.wait)}
        for name, timing in bench.time(calls, waits).items():
            found[name] |= _speed(case, pass_, timing)
        for name in (x for x in names if x in found):
            plan = contenders[name].plans.get(pass_) if name in contenders else None
            extra = {"plan": plan} if plan else {}
            fields = {"case": case.name, "pass": pass_, "contender": name, "problem": problem}
            yield {**fields, **found[name], **extra}


def compile_ahead(bench: Bench, cases: Iterable[Case], passes: Iterable[str]) -> None:
    """Compile the kernels of cuflash's calls on all cores. One after another, they would take most of a run.

    What fails here fails again as a contender, which is recorded.
    """
    passes = tuple(passes)
    wanted = [name for name in PASS_NAMES if name in passes]
    kernels = set()
    for case in cases:
        inputs = make_inputs(bench.xp, case, passes=passes)
        arrays = dict(inputs.terms) | dict(inputs.tangents)
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            plans = FlashAttention(**keywords_of(case)).plan(inputs.q, inputs.k, inputs.v, passes=wanted, **arrays)
            found = [getattr(plans, name, None) for name in wanted]
            kernels |= {kernel for plan in found if plan is not None for kernel in plan.kernels}

    def compile_one(kernel: KernelSpec) -> None:
        with contextlib.suppress(CompileError):
            compile_spec(kernel)

    with ThreadPoolExecutor(environment.cores()) as pool:
        list(pool.map(compile_one, kernels))
    bench.free_memory()


def run_suite(
    name: str,
    suite: Suite,
    *,
    out: Path,
    peers: Iterable[str] | None = None,
    passes: Iterable[str] = ALL_PASSES,
    match: str = "",
    seconds: float = 0.15,
    revision: str | None = None,
    devices: int = 1,
) -> list[Record]:
    """Run a suite and append its records to `out`/`name`.jsonl; returns them. Several `devices` share the cases: all
    contenders of a case run on one of them.

    Raises ValueError for a peer, a case or devices that do not exist, ImportError where a GPU suite finds no CuPy.
    """
    names = choose_contenders(suite, peers)
    cases = choose_cases(suite, match)
    passes = sorted(set(suite.passes) & set(passes), key=suite.passes.index)
    bench = Bench.make(suite.kind, seconds)
    if devices != 1:
        most = 1 if suite.kind == "cpu" else int(bench.xp.cuda.runtime.getDeviceCount())
        if not 1 <= devices <= most:
            raise ValueError(f"devices: got {devices}, expected 1 to {most} for this suite here")
    journal = Journal(out / f"{name}.jsonl", name)
    facts = environment.describe(gpu=suite.kind != "cpu", revision_given=revision)
    facts |= {"contenders": names, "devices": devices}
    journal.write("run", kind=suite.kind, about=suite.about, filter=match, **facts, **bench.ceiling())
    if suite.kind == "gpu":
        compile_ahead(bench, cases, passes)
    tasks = [
        (case, [x for x in names if peers is not None or case in suite.only.get(x, (case,))], passes) for case in cases
    ]
    measured = (
        distribute(tasks, suite.kind, seconds, devices) if devices > 1 else (_measure(bench, *task) for task in tasks)
    )
    with Bar(name, total=len(cases)) as bar:
        for number, (case, results) in enumerate(zip(cases, measured, strict=True), 1):
            bar.print(f"[{number}/{len(cases)}] {case.name}")
            for fields in results:
                journal.write("result", **fields)
            bar.advance()
    journal.write("end", **bench.ceiling())
    return journal.records


def _measure(bench: Bench, case: Case, names: Sequence[str], passes: Sequence[str]) -> Iterator[Record]:
    yield from run_case(case, names, passes, bench)
    bench.free_memory()


def distribute(tasks: Sequence[Task], kind: str, seconds: float, devices: int) -> Iterator[list[Record]]:
    """The results of each case, in order, by processes that have a device each."""
    context = multiprocessing.get_context("spawn")
    numbers = context.SimpleQueue()
    for number in range(devices):
        numbers.put(number)
    with context.Pool(devices, _take_device, (numbers, kind, seconds)) as pool:
        yield from pool.imap(_measure_here, tasks)


_of_this_process: list[Bench] = []


def _take_device(numbers: Any, kind: str, seconds: float) -> None:
    """Before anything of CUDA begins in this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    number = numbers.get()
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    _of_this_process[:] = [Bench.make(kind, seconds)]


def _measure_here(task: Task) -> list[Record]:
    (bench,) = _of_this_process
    return list(_measure(bench, *task))


def failures(records: Iterable[Record]) -> list[str]:
    """What went wrong with cuflash itself: a wrong result, or an error other than a missing feature."""
    return [
        f"{r['contender']} {r['case']} {r['pass']}: {r['status']} {r.get('reason') or r.get('errors')}"
        for r in records
        if r["record"] == "result" and r["contender"].startswith("cuflash") and r["status"] in ("wrong", "failed")
    ]
