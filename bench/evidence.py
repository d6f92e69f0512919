"""Suites that measure something else than the time of a call: memory, traffic, and the training of models."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import (
    environment,
    first_call,
    frameworks,
    logsumexp,
    memory,
    pathfinder,
    ranks,
    reductions,
    report,
    rounding,
    streamed,
    traffic,
    training,
)
from .logsumexp import Machine
from .report import Record, latest_run, load, relative, where_of
from .run import Journal
from .timing import CudaClock

Write = Callable[..., None]
KINDS = ("gpu", "cpu")
PAGE_SECTIONS = ("memory", "runtime", "traffic", "training", "pathfinder")  # of the page of all evidence


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How it is measured on a backend, and shown; `page` is the page of docs that shows it. Where this is not the page
    of all evidence, `summary` is what stands there. `choose` takes the records to show of those of all runs."""

    about: str
    backends: tuple[str, ...]
    measure: Callable[[str, Write, float], None]
    markdown: Callable[[Sequence[Record]], str]
    draw: Callable[[Any, Sequence[Record], Path], None] | None
    page: str = "evidence.md"
    summary: Callable[[Sequence[Record]], str] = lambda records: ""
    choose: Callable[[Sequence[Record]], list[Record]] = latest_run


def _memory(backend: str, write: Write, scale: float) -> None:
    memory.measure(write, memory.DeviceMeter(), importlib.import_module("cupy"))


def _memory_second(backend: str, write: Write, scale: float) -> None:
    cupy, meter = importlib.import_module("cupy"), memory.DeviceMeter()
    memory.measure(write, meter, cupy, contenders=memory.SECOND, passes=memory.PASSES_OF_SECOND)


EVIDENCE = {
    "memory": Evidence(
        about="device memory besides inputs and results, as pools of CuPy and PyTorch grow; bfloat16, 16 heads of 64",
        backends=("gpu",),
        measure=_memory,
        markdown=memory.markdown,
        draw=memory.draw,
    ),
    "memory-second": Evidence(
        about="device memory of second derivatives besides inputs and results, as pools of CuPy and PyTorch grow; "
        "bfloat16, 16 heads of 64",
        backends=("gpu",),
        measure=_memory_second,
        markdown=memory.markdown,
        draw=memory.draw,
        page="second-derivatives.md",
    ),
    "traffic": Evidence(
        about="bytes through device memory and L2, by the profiler and by the model of a plan, for several tiles",
        backends=("gpu",),
        measure=lambda backend, write, scale: traffic.measure(write, CudaClock()),
        markdown=traffic.markdown,
        draw=traffic.draw,
    ),
    "training": Evidence(
        about="a small GPT, trained by the formula and by cuflash",
        backends=("gpu", "cpu"),
        measure=lambda backend, write, scale: training.measure(backend, write),
        markdown=training.markdown,
        draw=training.draw,
        page="training.md",
        summary=training.summary,
    ),
    "pathfinder": Evidence(
        about="whether two marks are on one dashed curve, learnt by an encoder whose tokens are pixels",
        backends=("gpu", "cpu"),
        measure=pathfinder.measure,
        markdown=pathfinder.markdown,
        draw=pathfinder.draw,
    ),
    "rounding": Evidence(
        about="errors of attention in fp8 (float8_e4m3fn), relative to out by root mean squares; 64 "
        "queries, two heads of 128",
        backends=("gpu", "cpu"),
        measure=lambda backend, write, scale: rounding.measure(write, backend),
        markdown=rounding.markdown,
        draw=rounding.draw,
        page="float8.md",
    ),
    "streamed": Evidence(
        about="keys and values in host memory, compared with the same in device memory, and with copies of them alone",
        backends=("gpu",),
        measure=lambda backend, write, scale: streamed.measure(write, streamed.Machine.of_device()),
        markdown=streamed.markdown,
        draw=streamed.draw,
        page="streamed.md",
    ),
    "frameworks": Evidence(
        about="what `cuflash.torch` and `cuflash.jax` add to a call; bfloat16, batch 1, 8 heads of 64, seqlen 256, "
        "causal",
        backends=("gpu", "cpu"),
        measure=lambda backend, write, scale: frameworks.measure(backend, write),
        markdown=frameworks.markdown,
        draw=None,
        page="performance.md",
    ),
    "first-call": Evidence(
        about="what a fresh process waits for; causal, batch 1, 8 heads of 64, float16 (on a CPU float32)",
        backends=("gpu", "cpu"),
        measure=lambda backend, write, scale: first_call.measure(backend, write),
        markdown=first_call.markdown,
        draw=None,
        page="performance.md",
    ),
    "logsumexp": Evidence(
        about="ten alternating steps of Sinkhorn's algorithm, and kernel densities, by logsumexp without values; "
        'precision="highest" unless said',
        backends=("gpu", "cpu"),
        measure=lambda backend, write, scale: logsumexp.measure(
            write, logsumexp.Machine.of(backend), logsumexp.CASES[backend]
        ),
        markdown=logsumexp.markdown,
        draw=logsumexp.draw,
        page="performance.md",
    ),
    "reductions": Evidence(
        about="logsumexp without values and reductions of the weights, in milliseconds and as multiples of the pass or "
        "of the matrix products that they belong to",
        backends=("gpu", "cpu"),
        measure=lambda backend, write, scale: reductions.measure(
            write, Machine.of(backend), reductions.CASES[backend], reductions.CLASSES[backend]
        ),
        markdown=reductions.markdown,
        draw=None,
        page="performance.md",
    ),
    "ranks": Evidence(
        about="sequences over devices of a host, compared with the whole problem on one of them",
        backends=("gpu",),
        measure=lambda backend, write, scale: ranks.measure_devices(write),
        markdown=ranks.markdown,
        draw=ranks.draw,
        page="distributed-measurements.md",
        choose=ranks.latest_rows,
    ),
}


def run(name: str, backend: str, *, out: Path, revision: str | None = None, scale: float = 1.0) -> list[Record]:
    """Measure, and append the records to `out`/`name`.jsonl; returns them. `scale` is that of `pathfinder.measure`.

    Raises ValueError for a backend that this cannot be measured on, ImportError where a library is missing.
    """
    evidence = EVIDENCE[name]
    if backend not in evidence.backends:
        raise ValueError(f"backend: got {backend!r}, expected {' or '.join(evidence.backends)} for {name}")
    facts = environment.describe(gpu=backend == "gpu", revision_given=revision)
    journal = Journal(out / f"{name}.jsonl", name)
    journal.write("run", kind=backend, about=evidence.about, filter="", contenders=[], scale=scale, **facts)
    evidence.measure(backend, journal.write, scale)
    journal.write("end")
    return journal.records


def runs(name: str, results: Path) -> dict[str, list[Record]]:
    """The records to show for each backend that has a run."""
    path = results / f"{name}.jsonl"
    records = load(path) if path.exists() else []
    found = {}
    for kind in KINDS:
        of_kind = {r["run"] for r in records if r["record"] == "run" and r["kind"] == kind}
        if chosen := EVIDENCE[name].choose([r for r in records if r["run"] in of_kind]):
            found[kind] = chosen
    return found


def shown(name: str, records: Sequence[Record]) -> str:
    """What a run shows, with what it was measured on."""
    head = next(r for r in records if r["record"] == "run")
    about = EVIDENCE[name].about
    scaled = f" --scale {head['scale']:g}" if head.get("scale", 1) != 1 else ""
    command = f"`python -m bench run --suite {name} --backend {head['kind']}{scaled}`"
    return f"{about[0].upper()}{about[1:]}. {where_of(head)}, by {command}.\n\n{EVIDENCE[name].markdown(records)}"


def picture(name: str, kind: str, results: Path) -> Path:
    """Where the plot of a run is."""
    return results / f"{name}_{kind}.svg"


def sections(name: str, results: Path, page: Path) -> str:
    """What the runs of a suite show, a section for each backend, as plots lie from `page`; "" without a run."""
    found = []
    for kind, records in runs(name, results).items():
        title = f"{name} on {'a GPU' if kind == 'gpu' else 'a CPU'}"
        found.append(f"### {title}\n\n{shown(name, records)}")
        if EVIDENCE[name].draw is not None:
            found.append(f"![{title}]({relative(picture(name, kind, results), page.parent)})")
    return "\n\n".join(found)


def page_sections(results: Path, page: Path) -> dict[str, str]:
    """The generated parts of the page of all evidence, by their names."""
    of_times = {name: report.of_suite(x, results, page) for name, x in report.runs(results).items()}
    found = {}
    for name in PAGE_SECTIONS:
        if name in EVIDENCE and EVIDENCE[name].page == page.name:
            found[name] = sections(name, results, page)
        elif name in EVIDENCE:
            found[name] = "\n".join(EVIDENCE[name].summary(x) for x in runs(name, results).values())
        elif name in of_times:
            found[name] = f"By `python -m bench run --suite {name}`. {of_times[name]}"
        found[name] = found.get(name) or f"No results yet; `python -m bench run --suite {name}` makes them."
    return found


def draw_all(results: Path) -> None:
    """The plots of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, evidence in EVIDENCE.items():
        if evidence.draw is None:
            continue
        for kind, records in runs(name, results).items():
            evidence.draw(plt, records, picture(name, kind, results))
