"""Bytes through device memory and L2, counted by the profiler, beside the model of a plan, for tiles of many sizes.

`python -m bench.traffic CASE PASS NUMBER` runs one of the plans once between the profiler's marks; `measure` starts it
under ncu, whose counters a machine may refuse: then the reason stands in the record, and the model alone.
"""

from __future__ import annotations

import csv
import importlib
import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .cases import PASSES, Case
from .formula import make_inputs
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
MOST_PLANS = 6  # of a case and pass: the first is that of the table
FORMULA = -1  # the number of the plain formula among the plans
NCU = (
    "ncu",
    "--csv",
    "--page",
    "raw",
    "--print-units",
    "base",
    "--profile-from-start",
    "off",
    "--cache-control",
    "none",
)
SECONDS = 120


def parse(output: str) -> dict[str, float]:
    """Sums of the counters over all kernels of a CSV page of ncu; ValueError with its words where there are none."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    found = {name: 0.0 for name in COUNTERS}
    kernels = 0
    for row in rows:
        values = [row.get(counter) for counter in COUNTERS.values()]
        if all(value and value.replace(",", "").replace(".", "").isdigit() for value in values):
            kernels += 1
            for name, value in zip(found, values, strict=True):
                found[name] += float(str(value).replace(",", ""))
    if not kernels:
        errors = [line for line in output.splitlines() if "ERR" in line or "rror" in line]
        raise ValueError((errors or output.strip().splitlines() or ["no output"])[-1][:200])
    return found | {"kernels": kernels}


def counted(case: Case, pass_: str, number: int) -> Record:
    """The counters of one plan, or why there are none."""
    if shutil.which(NCU[0]) is None:
        return {"status": "absent", "reason": "ncu is not on the path"}
    command = [*NCU, "--metrics", ",".join(COUNTERS.values()), sys.executable, "-m", "bench.traffic"]
    try:
        done = subprocess.run(
            [*command, case.name, pass_, str(number)], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        return {"status": "ok", **parse(done.stdout + done.stderr)}
    except (ValueError, subprocess.TimeoutExpired) as error:
        return {"status": "absent", "reason": f"ncu: {error}"}


def plans_of(case: Case, pass_: str) -> tuple[list[Any], Callable[[Any], Callable[[], object]], Any]:
    """The first plans that tuning would try, what makes calls of them, and the inputs."""
    from cuflash import launch
    from cuflash.options import Options

    cupy = importlib.import_module("cupy")
    inputs = make_inputs(cupy, case)
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    options = Options(causal=case.causal)
    if pass_ == "backward":
        out, lse = launch.forward(options, arrays)
        arrays |= {"dout": inputs.dout, "out": out, "lse": lse}
    plans, call_by = launch.trials(pass_, options, arrays, (0, 0))  # type: ignore[arg-type]
    return list(plans[:MOST_PLANS]), call_by, inputs


def measure(write: Callable[..., None], clock: Any, cases: Sequence[Case] = CASES) -> None:
    """Write a record for each plan: the model, the counters and the time; and one for the plain formula."""
    for case in cases:
        for pass_ in PASSES:
            plans, call_by, inputs = plans_of(case, pass_)
            for number, plan in enumerate(plans):
                traffic = plan.traffic
                model = (
                    None
                    if traffic is None
                    else {"tiles": traffic.tiles, "read": traffic.read, "written": traffic.written}
                )
                fields = {"case": case.name, "pass": pass_, "what": plan.tiles[0].label}
                times = _times(clock, call_by(plan))
                write(
                    "traffic",
                    **fields,
                    model=model,
                    median_us=times,
                    least=case.ideal_bytes(pass_),
                    **counted(case, pass_, number),
                )
            call = formula_call(case, inputs, pass_)
            fields = {"case": case.name, "pass": pass_, "what": "plain formula", "model": None}
            of_formula = None if call is None else _times(clock, call)
            found = counted(case, pass_, FORMULA) if call else {"status": "absent", "reason": "out of memory"}
            write("traffic", **fields, median_us=of_formula, least=case.ideal_bytes(pass_), **found)
            print(case.name, pass_, flush=True)


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
        ratio = f"{(r['read'] + r['written']) / (model['read'] + model['written']):.2f}" if ok and model else "-"
        by_l2 = f"{_mb(r['by_l2']) if ok else '-'} / {_mb(model['tiles']) if model else '-'}"
        us = "-" if r["median_us"] is None else f"{r['median_us']:.0f}"
        cells = (r["case"], r["pass"], r["what"], theirs, mine, ratio, by_l2, _mb(r["least"]), us)
        lines.append("| " + " | ".join(cells) + " |")
    reasons = sorted({r["reason"] for r in rows if "reason" in r})
    return "\n".join([*lines, *([""] if reasons else []), *(f"- no counters: {reason}" for reason in reasons)])


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.4g}"


def draw(plt: Any, records: Sequence[Record], path: Path) -> None:
    """A panel for each case and pass: bytes by counters and by the model over microseconds, a point for each plan."""
    rows = [r for r in records if r["record"] == "traffic" and r["median_us"] is not None and r["model"]]
    keys = list(dict.fromkeys((r["case"], r["pass"]) for r in rows))
    with plt.rc_context(RC):
        figure, axes = plt.subplots(1, len(keys), squeeze=False, figsize=(3.2 * len(keys), 3.2), layout="constrained")
        for axis, key in zip(axes[0], keys, strict=True):
            own = [r for r in rows if (r["case"], r["pass"]) == key]
            kinds = {
                "device memory, model": [(r["median_us"], r["model"]["read"] + r["model"]["written"]) for r in own],
                "device memory, counted": [
                    (r["median_us"], r["read"] + r["written"]) for r in own if r["status"] == "ok"
                ],
                "tiles by L2, model": [(r["median_us"], r["model"]["tiles"]) for r in own],
            }
            colours = (COLOURS["cuflash"], COLOURS["fa2"], COLOURS["naive"])
            for (title, points), colour in zip(kinds.items(), colours, strict=True):
                if points:
                    axis.loglog(*zip(*points, strict=True), "o", color=colour, markersize=4, label=title)
            axis.set(title=f"{key[0]}\n{key[1]}", xlabel="microseconds")
        axes[0][0].set_ylabel("bytes")
        axes[0][0].legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main(name: str, pass_: str, number: int) -> None:
    """Run one plan between the profiler's marks, from an L2 cache full of other data."""
    from .timing import CudaClock

    (case,) = (case for case in CASES if case.name == name)
    plans, call_by, inputs = plans_of(case, pass_)
    call = formula_call(case, inputs, pass_) if number == FORMULA else call_by(plans[number])
    if call is None:
        raise SystemExit("out of memory")
    cupy = importlib.import_module("cupy")
    call()
    CudaClock().flush()
    cupy.cuda.get_current_stream().synchronize()
    cupy.cuda.runtime.profilerStart()
    call()
    cupy.cuda.get_current_stream().synchronize()
    cupy.cuda.runtime.profilerStop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
