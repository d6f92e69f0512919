"""Bytes through device memory and L2, counted by the profiler, compared with the model of a plan, for tiles of many
sizes.

`python -m bench.traffic CASE PASS` runs every plan once while the profiler counts; `measure` starts it under ncu, whose
counters a machine may refuse: then the reason stands in the record, and the model alone.
"""

from __future__ import annotations

import csv
import glob
import importlib
import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cuflash.gpu.progress import Bar

from .cases import PASSES, Case
from .inputs import make_inputs
from .report import COLOURS, RC, Record

COUNTERS = {
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "by_l2": "lts__t_bytes.sum",
}
# The shape of the paper's second figure, in bfloat16, and one whose keys are long.
CASES = (
    Case(head_dim=64, seqlen_q=1024, batch=64, num_heads=16),
    Case(head_dim=128, seqlen_q=16384, batch=1, num_heads=16),
)
MOST_PLANS = 6  # of a case and pass
FORMULA = "plain formula"
SEPARATOR = "end_of_one"  # a kernel between two plans
NCU_PATHS = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")
OF_NCU = (
    "--csv",
    "--page",
    "raw",
    "--print-units",
    "base",
    "--profile-from-start",
    "off",
    "--cache-control",
    "none",
    "--clock-control",
    "none",
)
SECONDS = 50  # for the plans of one pass of a case
CLOSE = 1.15  # a factor by which the model may be off and is still called near


def parse(output: str) -> list[dict[str, float]]:
    """Of a CSV page of ncu, sums of the counters over the kernels before each separator; ValueError with its words
    where there are no counters."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    found, sums = [], {name: 0.0 for name in (*COUNTERS, "kernels")}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        values = [str(row.get(counter)).replace(",", "") for counter in COUNTERS.values()]
        if not all(value.replace(".", "").isdigit() for value in values):
            continue  # the row of units, or a kernel that was not counted
        if SEPARATOR in str(row.get("Kernel Name")):
            found.append(sums)
            sums = dict.fromkeys(sums, 0.0)
            continue
        sums = {name: sums[name] + float(value) for name, value in zip(COUNTERS, values, strict=True)} | {
            "kernels": sums["kernels"] + 1
        }
    if not found:
        errors = [line for line in output.splitlines() if "ERR" in line or "rror" in line]
        raise ValueError((errors or output.strip().splitlines() or ["no output"])[-1][:200])
    return found


def profiler() -> str | None:
    """Where ncu is."""
    others = (path for pattern in NCU_PATHS for path in sorted(glob.glob(pattern), reverse=True))
    return shutil.which("ncu") or next(others, None)


def counted(case: Case, pass_: str, count: int) -> list[Record]:
    """The counters of so many plans and of the formula, or why there are none."""
    ncu = profiler()
    if ncu is None:
        return [{"status": "absent", "reason": "ncu is not installed"}] * (count + 1)
    command = [ncu, *OF_NCU, "--metrics", ",".join(COUNTERS.values()), sys.executable, "-m", "bench.traffic"]
    try:
        done = subprocess.run(
            [*command, case.name, pass_], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        found: list[Record] = [{"status": "ok", **sums} for sums in parse(done.stdout + done.stderr)]
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        return [{"status": "absent", "reason": f"ncu: {error}"[:300]}] * (count + 1)
    missing = {"status": "absent", "reason": "ncu counted none of its kernels"}
    return [x if x.get("kernels") else missing for x in (found + [missing] * (count + 1))[: count + 1]]


def of_several_sizes(plans: Sequence[Any]) -> list[Any]:
    """The first plan, and of each further number of bytes that the model knows of tiles the first."""
    found = {plan.traffic.tiles: plan for plan in reversed(plans) if plan.traffic is not None}
    chosen = [plan for plan in plans if plan.traffic is not None and plan is found[plan.traffic.tiles]]
    return [plans[0], *(plan for plan in chosen if plan is not plans[0])][:MOST_PLANS]


def plans_of(case: Case, pass_: str) -> tuple[list[Any], Callable[[Any], Callable[[], object]], Any]:
    """Plans out of those that tuning would try, compiled; what makes calls of them, and the inputs."""
    from cuflash import FlashAttention
    from cuflash.gpu import backend as gpu_backend
    from cuflash.gpu.compiler import compile_spec
    from cuflash.spec.options import Options

    cupy = importlib.import_module("cupy")
    inputs = make_inputs(cupy, case)
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    options = Options(causal=case.causal)
    if pass_ == "backward":
        out, lse = FlashAttention(causal=case.causal).forward(**arrays)
        arrays |= {"dout": inputs.dout, "out": out, "lse": lse}
    plans, call_by = gpu_backend.trials(pass_, options, arrays, (0, 0))  # type: ignore[arg-type]
    chosen = of_several_sizes(plans)
    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_spec, [kernel for plan in chosen for kernel in plan.kernels]))
    return chosen, call_by, inputs


def measure(write: Callable[..., None], clock: Any, cases: Sequence[Case] = CASES) -> None:
    """Write a record for each plan: the model, the counters and the time; and one for the plain formula."""
    with Bar("traffic", total=len(cases) * len(PASSES)) as bar:
        for case in cases:
            for pass_ in PASSES:
                plans, call_by, inputs = plans_of(case, pass_)
                formula = formula_call(case, inputs, pass_)
                calls = {plan.tiles[0].label: call_by(plan) for plan in plans} | ({FORMULA: formula} if formula else {})
                times = {what: _times(clock, call) for what, call in calls.items()}
                del inputs, formula, calls, call_by
                _free()
                counts = counted(case, pass_, len(plans))
                models: list[Record | None] = []
                for traffic in (plan.traffic for plan in plans):
                    model = traffic and {"tiles": traffic.tiles, "read": traffic.read, "written": traffic.written}
                    models.append(model)
                whats = [*(plan.tiles[0].label for plan in plans), FORMULA]
                for what, model, found in zip(whats, [*models, None], counts, strict=True):
                    if what == FORMULA and what not in times:
                        found = {"status": "absent", "reason": "out of memory"}
                    fields = {"case": case.name, "pass": pass_, "what": what, "model": model}
                    write("traffic", **fields, median_us=times.get(what), least=case.ideal_bytes(pass_), **found)
                bar.print(f"{case.name} {pass_}: {counts[0]['status']} {counts[0].get('reason', '')}")
                bar.advance()


def _free() -> None:
    """Give device memory back: another process needs it."""
    if cupy := sys.modules.get("cupy"):
        cupy.get_default_memory_pool().free_all_blocks()


def formula_call(case: Case, inputs: Any, pass_: str) -> Callable[[], object] | None:
    """The plain formula on these inputs; None where it needs more memory than there is."""
    from .contender import Absent
    from .peers import ADAPTERS

    try:
        return ADAPTERS["naive"](case, inputs).calls[pass_]
    except Absent:
        return None


def _times(clock: Any, call: Callable[[], object]) -> float:
    found = sorted(clock.read_us(clock.run(call)) for _ in range(7))
    return float(found[3])


# ---- What is shown ---------------------------------------------------------------------------------------------------


def markdown(records: Sequence[Record]) -> str:
    """A table for all plans: megabytes by the counters and by the model, and microseconds."""
    rows = [r for r in records if r["record"] == "traffic"]
    lines = [
        "Megabytes through device memory, read / written, by the profiler's counters and by the model of the plan; "
        "tiles by L2, by both; the least that any implementation moves; microseconds.",
        "",
        "| problem | pass | tiles | counted | model | counted : model | by L2, counted / model | least | us |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        model, ok = r["model"], r["status"] == "ok"
        mine = f"{_mb(model['read'])} / {_mb(model['written'])}" if model else "-"
        theirs = f"{_mb(r['read'])} / {_mb(r['written'])}" if ok else "-"
        ratio = f"{_moved(r) / _moved(model):.2f}" if ok and model else "-"
        by_l2 = f"{_mb(r['by_l2']) if ok else '-'} / {_mb(model['tiles']) if model else '-'}"
        us = "-" if r["median_us"] is None else f"{r['median_us']:.0f}"
        cells = (r["case"], r["pass"], r["what"], theirs, mine, ratio, by_l2, _mb(r["least"]), us)
        lines.append("| " + " | ".join(cells) + " |")
    reasons = sorted({r["reason"] for r in rows if "reason" in r})
    notes = [*_agreement(rows), *(f"- no counters: {reason}" for reason in reasons)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _agreement(rows: Sequence[Record]) -> list[str]:
    """How far the model is from the counters: of the plans that run unless others are asked for, and of all."""
    ratios: list[float] = []
    chosen: list[float] = []
    before = None
    for r in rows:
        is_first, before = (r["case"], r["pass"]) != before, (r["case"], r["pass"])
        if r["status"] == "ok" and r["model"]:
            ratios.append(_moved(r) / _moved(r["model"]))
            chosen += ratios[-1:] if is_first else []
    if not chosen:
        return []
    near = sum(1 / CLOSE <= ratio <= CLOSE for ratio in ratios)
    return [
        f"- counted : model of the plans that run unless others are asked for: {min(chosen):.2f} to {max(chosen):.2f}; "
        f"within {CLOSE - 1:.0%} in {near} of {len(ratios)} plans."
    ]


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.4g}"


def draw(plt: Any, records: Sequence[Record], path: Path) -> None:
    """A panel for each case and pass: bytes by the model and by the counters, and microseconds, over sizes of tiles."""
    rows = [r for r in records if r["record"] == "traffic" and r["median_us"] is not None and r["model"]]
    keys = list(dict.fromkeys((r["case"], r["pass"]) for r in rows))
    with plt.rc_context(RC):
        shape = {"squeeze": False, "figsize": (3.6 * len(keys), 3.4), "layout": "constrained"}
        figure, axes = plt.subplots(1, len(keys), **shape)
        for axis, key in zip(axes[0], keys, strict=True):
            own = sorted((r for r in rows if (r["case"], r["pass"]) == key), key=lambda r: r["model"]["tiles"])
            times, at = axis.twinx(), range(len(own))
            counts = [(i, r) for i, r in enumerate(own) if r["status"] == "ok"]
            lines = (
                ("tiles by L2, model", "-", COLOURS["fa2"], [(i, r["model"]["tiles"]) for i, r in enumerate(own)]),
                ("tiles by L2, counted", "o", COLOURS["fa2"], [(i, r["by_l2"]) for i, r in counts]),
                ("device memory, model", "-", COLOURS["cudnn"], [(i, _moved(r["model"])) for i, r in enumerate(own)]),
                ("device memory, counted", "o", COLOURS["cudnn"], [(i, _moved(r)) for i, r in counts]),
            )
            for title, style, colour, points in lines:
                if points:
                    axis.semilogy(*zip(*points, strict=True), style, color=colour, markersize=4, label=title)
            times.semilogy(
                at, [r["median_us"] for r in own], "s--", color=COLOURS["cuflash"], markersize=4, label="time"
            )
            axis.set(title=f"{key[0]}\n{key[1]}", xlabel="tile")
            axis.set_xticks(at, [r["what"].split(",")[0] for r in own], rotation=30)
        if keys:
            axes[0][0].set_ylabel("bytes")
            times.set_ylabel("microseconds")
            handles = [x.get_legend_handles_labels() for x in (axes[0][-1], times)]
            figure.legend(*(a + b for a, b in zip(*handles, strict=True)), loc="outside upper center", ncols=5)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _moved(counts: Record) -> float:
    """Bytes through device memory, both ways."""
    return counts["read"] + counts["written"]


def main(name: str, pass_: str) -> None:
    """Run each plan, and the formula, once, counted, from an L2 cache full of other data."""
    from .timing import CudaClock

    (case,) = (case for case in CASES if case.name == name)
    cupy = importlib.import_module("cupy")
    plans, call_by, inputs = plans_of(case, pass_)
    calls = [call_by(plan) for plan in plans]
    if formula := formula_call(case, inputs, pass_):
        calls.append(formula)
    separate = cupy.RawKernel(f'extern "C" __global__ void {SEPARATOR}() {{}}', SEPARATOR)
    clock, stream = CudaClock(), cupy.cuda.get_current_stream()
    for call in calls:
        call()
        clock.flush()
        stream.synchronize()
        cupy.cuda.runtime.profilerStart()
        call()
        separate((1,), (1,), ())
        stream.synchronize()
        cupy.cuda.runtime.profilerStop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
