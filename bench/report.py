"""Markdown tables and plots from the JSON lines of the runs."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .cases import ALL_PASSES, PASSES, SECOND, SHORT, SUFFIXES, THREADS, Case, suffixes
from .environment import is_unchanged_since

Record = dict[str, Any]
ACCURACY = "accuracy.jsonl"
REASON_LENGTH = 200  # of a message in a record, at most
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"  # around the generated part of a page
IN_TIME = ("runtime",)  # suites whose tables and plots have times, and no speeds; docs/evidence.md shows them
RC: Any = {"svg.fonttype": "none", "svg.hashsalt": "cuflash", "font.size": 9}  # of plots: the same bytes each time
# Suites about another contender than the first, and what it is held against besides the peers, by its name in the
# table.
ABOUT = {
    "float8": ("cuflash-fp8", "bfloat16", "cuflash"),
    "float8-decode": ("cuflash-fp8-cache", "bfloat16", "cuflash"),
    "architectures": ("cuflash-sm75", "8.0", "cuflash-sm80"),
}
# Suites of which times are shown: bytes differ from one contender to the next, or operations of as many pairs from one
# case to the next.
IN_TIME_TOO = ("float8-decode", "small-dims")
HEADLINE_SUITE, HEADLINE_SEQLEN = "targets", 4096  # what the README shows
TITLES = {
    "cuflash": "cuflash",
    "cuflash-alloc": "cuflash, allocating",
    "cuflash-deterministic": "cuflash, deterministic",
    "cuflash-dense": "cuflash, no mask",
    "cuflash-mask": "cuflash, as a mask of pairs",
    "cuflash-plain": "cuflash, without the function",
    "cuflash-gradients": "cuflash, with gradients of its arrays",
    "cuflash-tf32": "cuflash, TF32",
    "cuflash-pages16": "cuflash, pages of 16",
    "cuflash-pages64": "cuflash, pages of 64",
    "cuflash-pages256": "cuflash, pages of 256",
    "cuflash-dbias": "cuflash, with dbias",
    "cuflash-dscale": "cuflash, with dscale",
    "cuflash-packed": "cuflash, packed",
    "cuflash-sm75": "cuflash, kernels of 7.5",
    "cuflash-sm80": "cuflash, kernels of 8.0",
    **{f"cuflash-threads{n}": f"cuflash, {n} thread{'s' * (n > 1)}" for n in THREADS},
    "cuflash-avx2": "cuflash, AVX2",
    "cuflash-fp8": "cuflash, float8 q, k and v",
    "cuflash-fp8-cache": "cuflash, float8 k and v",
    "cudnn-fp8": "cuDNN, float8",
    "cuflash-bound": "cuflash, bound call",
    "cuflash-steps": "cuflash, a key more each time",
    "cuflash-bound-steps": "cuflash, bound, a key more each time",
    "cuflash-kv-lengths": "cuflash, kv_lengths",
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa3-jax": "FlashAttention-3, JAX",
    "fa4": "FlashAttention-4",
    "fold": "FoldAttention",
    "cudnn-flex": "cuDNN, flex_attention",
    "efficient": "torch efficient",
    "efficient-dbias": "torch efficient, with dbias",
    "math-dbias": "torch math, with dbias",
    "cuequivariance": "cuEquivariance, with dbias",
    "math": "torch math",
    "flex": "FlexAttention",
    "torch-cpu": "torch CPU",
    "torch-cpu-avx2": "torch CPU, AVX2",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "jax-pallas": "JAX Pallas",
    "naive": "plain formula",
    "cuflash-tangents": "cuflash",
    "naive-second": "dense formula",
    "math-second": "torch math",
    "jvp-flash-attention": "jvp_flash_attention",
    "empty-launch": "empty launch",
}
COLOURS = {
    "cuflash": "#d1495b",
    "cuflash-deterministic": "#edae49",
    "cuflash-tf32": "#edae49",
    "cuflash-dbias": "#edae49",
    "cuflash-dscale": "#edae49",
    "cuflash-packed": "#edae49",
    "cuflash-sm75": "#999999",
    "cuflash-sm80": "#edae49",
    "cuflash-plain": "#999999",
    "cuflash-gradients": "#edae49",
    "cuflash-fp8": "#edae49",
    "cuflash-fp8-cache": "#edae49",
    "cudnn-fp8": "#2e7d32",
    "cudnn": "#2e7d32",
    "fa2": "#30638e",
    "fa3": "#8d6a9f",
    "fa3-jax": "#b8a1c9",
    "fa4": "#9c6644",
    "fold": "#4f5d75",
    "cudnn-flex": "#2e7d32",
    "efficient": "#8d6a9f",
    "efficient-dbias": "#6a994e",
    "math-dbias": "#999999",
    "math": "#777777",
    "cuequivariance": "#6a994e",
    "flex": "#00798c",
    "torch-cpu": "#30638e",
    "cuflash-avx2": "#edae49",
    "torch-cpu-avx2": "#30638e",
    "onnxruntime": "#8d6a9f",
    "openvino": "#6a994e",
    "naive": "#999999",
    "cuflash-tangents": "#d1495b",
    "naive-second": "#999999",
    "math-second": "#777777",
    "jvp-flash-attention": "#00798c",
}


def load(path: Path) -> list[Record]:
    """Records of one file, a last line that was cut off left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def latest_run(records: Sequence[Record]) -> list[Record]:
    """Records of the last run that took the whole suite and reached its end, else of the last run."""
    finished = {r["run"] for r in records if r["record"] == "end"}
    starts = [r for r in records if r["record"] == "run"]
    if not starts:
        return []
    whole = [r for r in starts if r["run"] in finished and not r["filter"]]
    chosen = (whole or starts)[-1]["run"]
    return [r for r in records if r["run"] == chosen]


class Table:
    """One run's results by case, contender and pass."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.run = next(r for r in records if r["record"] == "run")
        self.kind: str = self.run["kind"]
        results = [r for r in records if r["record"] == "result"]
        self.cells = {(r["case"], r["contender"], r["pass"]): r for r in results}
        self.problems = {r["case"]: r["problem"] for r in results}
        timed = {r["contender"] for r in results if "median_us" in r}
        self.contenders = [x for x in self.run["contenders"] if x in timed]
        self.peers = [x for x in self.contenders if not x.startswith("cuflash") and x != "empty-launch"]
        self.passes = [x for x in PASSES if any(r["pass"] == x for r in results)]
        self.in_bytes = all(8 * p["seqlen_q"] <= p["seqlen_k"] for p in self.problems.values())  # decoding
        is_small = self.kind == "cpu" and all(p["seqlen_k"] <= 128 for p in self.problems.values())  # calls count
        is_sparse = not self.in_bytes and any(p.get("blocks_kept") for p in self.problems.values())
        self.in_time = self.kind == "host" or is_small or is_sparse
        self.in_time |= self.run["suite"] in (*IN_TIME, *IN_TIME_TOO)
        self.mine, self.compared, self.other = ABOUT.get(self.run["suite"], ("cuflash", "", ""))

    @property
    def unit(self) -> str:
        if self.in_time:
            return "microseconds"
        rate = "B/s" if self.in_bytes else "FLOP/s"
        return ("G" if self.kind == "cpu" else "T") + rate

    def value(self, case: str, contender: str, pass_: str) -> float | None:
        """The number of a cell in `unit`; None where there is no time."""
        cell = self.cells.get((case, contender, pass_))
        if cell is None or "median_us" not in cell:
            return None
        if self.in_time:
            return float(cell["median_us"])
        rate = float(cell["tflops"])
        if self.in_bytes:
            rate = Case.of_record(cell["problem"]).ideal_bytes(pass_) / cell["median_us"] / 1e6
        return rate * (1e3 if self.kind == "cpu" else 1)

    def ratio(self, case: str, pass_: str, peers: Iterable[str]) -> float | None:
        """Speed of `mine` over the best of `peers`."""
        mine = self.value(case, self.mine, pass_)
        theirs = [x for x in (self.value(case, peer, pass_) for peer in peers) if x is not None]
        if mine is None or not theirs:
            return None
        return min(theirs) / mine if self.in_time else mine / max(theirs)

    def mean_ratio(self, pass_: str, peers: Iterable[str]) -> float | None:
        """Geometric mean of `ratio` over the cases that have one."""
        peers = tuple(peers)
        ratios = [x for x in (self.ratio(case, pass_, peers) for case in self.problems) if x is not None]
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None

    def of_plain(self, case: str, pass_: str) -> float | None:
        """Rate of `mine` over that of the same problem without options; None where a suite lacks one of them."""

        def without_options(problem: Record) -> Record:
            return {key: value for key, value in problem.items() if key not in SUFFIXES}

        problem = self.problems[case]
        same = [x for x, p in self.problems.items() if without_options(p) == without_options(problem)]
        plain = next((x for x in same if not suffixes(self.problems[x], "")), case)
        mine, base = (self.value(x, self.mine, pass_) for x in (case, plain))
        return None if self.in_time or plain == case or mine is None or base is None else mine / base

    def error_ratio(self, case: str, pass_: str) -> float | None:
        """Largest error of results of `mine` in units of the plain formula's error; None where there is none."""
        errors = self.cells.get((case, self.mine, pass_), {}).get("errors", {}).values()
        ratios = [e["error"] / e["formula_error"] for e in errors if e["formula_error"] and e["error"] is not None]
        return max(ratios, default=None)


def label(problem: Record) -> list[str]:
    """The cells that say what a problem is."""
    p = problem
    dim = f"{p['head_dim']}" + (f"/{p['head_dim_v']}" if p["head_dim_v"] != p["head_dim"] else "")
    dim += ", v in k" if p.get("v_in_k") else ""
    seqlen = f"{p['seqlen_q']}" + (f"/{p['seqlen_k']}" if p["seqlen_k"] != p["seqlen_q"] else "")
    seqlen += " (mixed)" if p.get("lengths") else ""
    heads = f"{p['num_heads']}" + (f"/{p['num_heads_kv']}" if p["num_heads_kv"] != p["num_heads"] else "")
    mask = "causal" if p["causal"] else f"{100 * p['blocks_kept']:g} % of blocks" if p.get("blocks_kept") else "full"
    mask = ", ".join([mask, *suffixes(p, " ")])
    return [dim, seqlen, f"{p['batch']} x {heads}", mask, SHORT[p["dtype"]]]


def number(x: float | None, digits: int | None = None) -> str:
    if x is None:
        return "-"
    if digits is None:
        digits = 0 if x >= 100 else 1 if x >= 10 else 2
    return f"{x:.{digits}f}"


def _both(numbers: Iterable[float | None], digits: int | None = None) -> str:
    return " / ".join(number(x, digits) for x in numbers)


def markdown(records: Sequence[Record]) -> str:
    """The table of one run: forward / backward in each cell, then what did not run and why."""
    table = Table(records)
    if any(key[2] in SECOND for key in table.cells):
        return importlib.import_module("bench.second").markdown(records)
    against = {"best peer": table.peers} if table.peers else {}
    against |= {"FA2": ["fa2"]} if "fa2" in table.peers else {}
    against |= {table.compared: [table.other]} if table.compared else {}
    mine = TITLES[table.mine]
    heads = ["head_dim", "seqlen", "batch x heads", "mask", "dtype", *(TITLES.get(x, x) for x in table.contenders)]
    heads += [f"{mine} : {name}" for name in against]
    has_options = any(table.of_plain(case, p) for case in table.problems for p in table.passes)
    heads += ["of the plain call"] * has_options + ["error : formula's"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for case, problem in table.problems.items():
        cells = label(problem)
        cells += [_both(table.value(case, x, p) for p in table.passes) for x in table.contenders]
        if against:
            cells += [_both((table.ratio(case, p, peers) for p in table.passes), 2) for peers in against.values()]
        if has_options:
            cells += [_both((table.of_plain(case, p) for p in table.passes), 2)]
        cells += [_both((table.error_ratio(case, p) for p in table.passes), 2)]
        lines.append("| " + " | ".join(cells) + " |")
    if against and len(table.problems) > 1:
        means = [_both((table.mean_ratio(p, peers) for p in table.passes), 2) for peers in against.values()]
        blank = [""] * (4 + len(table.contenders))
        lines.append("| " + " | ".join(["geometric mean", *blank, *means, *[""] * has_options, ""]) + " |")
    return "\n".join(lines + notes(table) + _ahead(table))


def notes(table: Table) -> list[str]:
    """What did not run, one line a reason, and results outside the accuracy rule."""
    reasons: dict[tuple[str, str], int] = {}
    for cell in table.cells.values():
        if cell["status"] != "ok":
            what = cell["status"] + (f": {whole_sentences(cell['reason'])}" if "reason" in cell else "")
            key = (cell["contender"], what)
            reasons[key] = reasons.get(key, 0) + 1
        elif not cell.get("within_rule", True):
            key = (cell["contender"], "error above twice the plain formula's")
            reasons[key] = reasons.get(key, 0) + 1
    if not reasons:
        return []
    return ["", *(f"- {TITLES.get(x, x)}: {what} ({n} measurements)" for (x, what), n in sorted(reasons.items()))]


def _ahead(table: Table) -> list[str]:
    """For a suite of times with the plain formula, the length from which on cuflash takes less, for each mask."""
    if "naive" not in table.contenders or table.run["suite"] not in IN_TIME:
        return []
    kinds: dict[str, dict[int, str]] = {}
    for case, p in table.problems.items():
        kinds.setdefault(label(p)[3], {})[p["seqlen_q"]] = case
    found = []
    for kind, cases in kinds.items():
        for pass_ in table.passes:
            ratios = {n: table.ratio(case, pass_, ["naive"]) for n, case in sorted(cases.items())}
            known = {n: ratio for n, ratio in ratios.items() if ratio is not None}
            slower = [n for n, ratio in known.items() if ratio <= 1]
            ahead = [n for n in known if n > max(slower, default=0)]
            where = f"from {ahead[0]} on" if ahead else "nowhere"
            where = "at every length" if known and not slower else where
            if known:
                spread = f"{number(min(known.values()), 2)} to {number(max(known.values()), 2)} times as fast"
                found.append(f"- cuflash is ahead of the plain formula {where}, {spread}: {kind}, {pass_}.")
    return ["", *found]


def heading(records: Sequence[Record]) -> str:
    """One paragraph: what the numbers are and what they ran on."""
    table = Table(records)
    run = table.run
    passes = [x.replace("double_", "double ") for x in ALL_PASSES if any(key[2] == x for key in table.cells)]
    text = f"{table.unit}, {' / '.join(passes)}; {run['about']}. {where_of(run)}."
    if "ceiling" in run:
        c = run["ceiling"]
        rates = [f"matrix product ({c['product']}) {_rate(c['product_tflops'])} TFLOP/s"]
        rates += [f"{dtype} multiply-adds {_rate(rate)} TFLOP/s" for dtype, rate in c.get("fma_tflops", {}).items()]
        rates += [f"copy {_rate(c['copy_tbytes_per_s'], 2)} TB/s read plus write"]
        text += f" In the same run: {', '.join(rates)}."
    return text[0].upper() + text[1:]


def whole_sentences(reason: str) -> str:
    """Why something did not run, without a sentence that the record cuts off."""
    is_cut = len(reason.partition(": ")[2]) >= REASON_LENGTH
    return reason.rpartition(". ")[0] if is_cut and ". " in reason else reason


def _rate(x: float, digits: int = 0) -> str:
    """A rate with so many digits after the point, or three that count where it is below 10."""
    return f"{x:.{digits}f}" if x >= 10 else f"{x:.3g}"


def revision_of(run: Record) -> str:
    """The revision and the day of a run, and whether what computes results has changed since."""
    code, name = ("kernels", "kernels") if "device" in run else ("cuflash/cpu/core", "the core")
    changed = "" if is_unchanged_since(run["revision"], code) else f"; {name} changed since"
    return f"revision {run['revision']}, {run['time'][:10]}{changed}"


def where_of(run: Record) -> str:
    """What a run was measured on: the device, versions, the revision and the day."""
    versions = run["versions"]
    library = ", ".join(f"{k} {v}" for k, v in versions.items() if k not in ("cuflash", "ml_dtypes", "python"))
    where = f"{run['device']}, driver {run['driver']}, CUDA {run['cuda']}" if "device" in run else ""
    where = where or f"{run['cpu']}, {_cores(run)}"
    return f"{where}; {library}; {revision_of(run)}"


def _panels(table: Table) -> dict[tuple[bool, int], dict[int, str]]:
    """The cases of each plot's panels, by mask and head_dim and then by length; none where there is no such grid."""
    panels: dict[tuple[bool, int], dict[int, str]] = {}
    for case, p in table.problems.items():
        if p["num_heads_kv"] == p["num_heads"] and p["seqlen_k"] == p["seqlen_q"]:
            panels.setdefault((p["causal"], p["head_dim"]), {}).setdefault(p["seqlen_q"], case)
    return {} if table.kind == "host" else {key: cases for key, cases in panels.items() if len(cases) > 1}


def plots_of(records: Sequence[Record], folder: Path) -> list[Path]:
    """Where the plots of a run are: one SVG a pass; none for runs without such a grid."""
    table = Table(records)
    return (
        [folder / f"{_name(table.run['suite'], table.run)}_{pass_}.svg" for pass_ in table.passes]
        if _panels(table)
        else []
    )


def plot(records: Sequence[Record], folder: Path) -> None:
    """Draw them: a panel for each head_dim and mask, speed over seqlen."""
    table = Table(records)
    panels = _panels(table)
    if not panels:
        return

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, columns = (sorted({key[axis] for key in panels}) for axis in (0, 1))
    for pass_, path in zip(table.passes, plots_of(records, folder), strict=True):
        with plt.rc_context(RC):
            size = (3 * len(columns), 2.4 * len(rows) + 0.4)
            figure, axes = plt.subplots(len(rows), len(columns), sharey=True, squeeze=False, figsize=size)
            for (causal, head_dim), cases in panels.items():
                axis = axes[rows.index(causal)][columns.index(head_dim)]
                _draw(axis, table, dict(sorted(cases.items())), pass_)
                axis.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}", fontsize=9)
            if table.in_time:
                axes[0][0].set_yscale("log")
            else:
                axes[0][0].set_ylim(bottom=0)  # of all panels, whose limits are shared
            for row in axes:
                row[0].set_ylabel(table.unit)
            for axis in axes[-1]:
                axis.set_xlabel("seqlen")
            lines = {name: line for a in axes.flat for line, name in zip(*a.get_legend_handles_labels(), strict=True)}
            figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=len(lines), frameon=False)
            figure.set_layout_engine("constrained")
            figure.savefig(path, metadata={"Date": None})
            plt.close(figure)


def _draw(axis: Any, table: Table, cases: dict[int, str], pass_: str) -> None:
    """Lines of all contenders over the sequence lengths `cases`, equally spaced, with the 10th to 90th percentile."""
    for contender in table.contenders:
        found = [
            (at, cell)
            for at, case in enumerate(cases.values())
            if "median_us" in (cell := table.cells.get((case, contender, pass_), {}))
        ]
        if not found:
            continue
        positions = [at for at, _ in found]
        values = [table.value(cell["case"], contender, pass_) or 0.0 for _, cell in found]
        spread = [
            [v - v * c["median_us"] / c["p90_us"] for v, (_, c) in zip(values, found, strict=True)],
            [v * c["median_us"] / c["p10_us"] - v for v, (_, c) in zip(values, found, strict=True)],
        ]
        width = 2.2 if contender == "cuflash" else 1.2
        axis.errorbar(
            positions,
            values,
            yerr=spread,
            marker="o",
            markersize=3,
            linewidth=width,
            color=COLOURS.get(contender),
            label=TITLES.get(contender, contender),
        )
    axis.set_xticks(range(len(cases)), [str(n) for n in cases])
    axis.grid(alpha=0.3)


def accuracy(rows: Sequence[Record]) -> str:
    """The last histograms of each dtype in short, with what they were measured on."""
    latest = {(row["kind"], row["dtype"], row["precision"]): row for row in rows}
    names = list(rows[-1]["results"])
    lines = [
        "Errors on random problems in units of the strict tolerance (`cuflash.testing`), median / largest. Largest "
        "ones are a matter of luck, for which the rule makes an allowance. Up to 300 queries, 600 keys and head "
        "dimension 256, some causal; scores spread over four orders of magnitude.",
        "",
        f"| arrays | dtype | problems | {' | '.join(names)} | outside the rule | revision |",
        "|" + "---|" * (5 + len(names)),
    ]
    for (kind, dtype, precision), row in latest.items():
        where = f"CuPy, {row['device']}" if kind == "gpu" else "NumPy"
        shown = dtype if precision == "highest" else f"{dtype}, {precision}"
        cells = [_both((found["median"], found["largest"]), 2) for found in row["results"].values()]
        outside = sum(found["outside"] for found in row["results"].values())
        cells = [where, shown, str(row["problems"]), *cells, str(outside), row["revision"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def headline(records: Sequence[Record]) -> str:
    """The README's short table: rows of one length with as many heads of keys, and the mean over all rows."""
    table = Table(records)
    rows = {
        case: p
        for case, p in table.problems.items()
        if p["seqlen_q"] == p["seqlen_k"] == HEADLINE_SEQLEN and p["num_heads"] == p["num_heads_kv"]
    }
    shown = ["cuflash", *table.peers]
    lines = [
        f"| head_dim | mask | {' | '.join(TITLES.get(x, x) for x in shown)} | cuflash : fastest of the others |",
        "|" + "---|" * (3 + len(shown)),
    ]
    for case, p in rows.items():
        cells = [f"{p['head_dim']}", "causal" if p["causal"] else "full"]
        cells += [_both(table.value(case, x, pass_) for pass_ in table.passes) for x in shown]
        cells += [_both((table.ratio(case, pass_, table.peers) for pass_ in table.passes), 2)]
        lines.append(f"| {' | '.join(cells)} |")
    means = _both((table.mean_ratio(pass_, table.peers) for pass_ in table.passes), 2)
    run = table.run
    about = (
        f"{table.unit}, {' / '.join(table.passes)}, on one {run['device']}; bfloat16, sequences of {HEADLINE_SEQLEN}, "
        "batch * seqlen = 16384,\nnum_heads * head_dim = 2048:"
    )
    summary = (
        f"In all {len(table.problems)} problems of the suite `{HEADLINE_SUITE}`, with sequences of 1024 to 16384, some "
        f"with grouped heads (GQA),\ncuflash runs at {means} times the speed of the fastest other library (geometric "
        f"mean;\n{revision_of(run)})."
    )
    return "\n".join([about, "", *lines, "", summary])


def runs(results: Path) -> dict[str, list[Record]]:
    """The run to show of every suite that has one in `results`, in the order of `SUITES`; those of NumPy arrays with
    each number of cores. Their names are those of their plots."""
    from .suites import SUITES

    found: dict[str, list[Record]] = {}
    for suite in SUITES:
        path = results / f"{suite}.jsonl"
        records = load(path) if path.exists() else []
        name_of = {r["run"]: _name(suite, r) for r in records if r["record"] == "run"}
        for name in sorted(set(name_of.values()), key=lambda name: (len(name), name)):
            chosen = latest_run([r for r in records if name_of.get(r["run"]) == name])
            if any(r["record"] == "result" for r in chosen):
                found[name] = chosen
    return found


def _cores(run: Record) -> str:
    return f"{run['cores']} core{'s' if run['cores'] != 1 else ''}"


def _name(suite: str, run: Record) -> str:
    """What a run of a suite is called: of NumPy arrays it has the number of cores at its end."""
    return f"{suite}_{_cores(run)}".replace(" ", "_") if run["kind"] == "cpu" else suite


def readme_section(results: Path) -> str:
    """The generated part of the README; "" without a run of its suite. Its plots are in the page on performance."""
    records = runs(results).get(HEADLINE_SUITE)
    return "" if records is None else headline(records)


def of_suite(records: Sequence[Record], results: Path, page: Path) -> str:
    """What a run shows, its table and its plots, as they lie from `page`."""
    return "\n\n".join([heading(records), markdown(records), *pictures_of(records, results, page)])


def pictures_of(records: Sequence[Record], results: Path, page: Path) -> list[str]:
    """The plots of a run as pictures of a page."""
    plots = [Path(relative(path, page.parent)) for path in plots_of(records, results)]
    return [f"![{path.stem.replace('_', ', ')}]({path.as_posix()})" for path in plots]


def section(results: Path, page: Path) -> str:
    """The generated part of the page on performance: tables of every run, and the plots."""
    sections = []
    for name, records in runs(results).items():
        if name not in IN_TIME:
            sections.append(f"### {name.replace('_', ' ')}\n\n{of_suite(records, results, page)}")
    path = results / ACCURACY
    if path.exists():
        sections.append(f"### accuracy\n\n{accuracy(load(path))}")
    if not sections:
        raise ValueError(f"results: got {results}, expected a folder with the JSON lines of a run")
    return "\n\n".join(sections)


def relative(path: Path, start: Path) -> str:
    """The way to a file from a folder."""
    return os.path.relpath(path.resolve(), start.resolve())


def begin_of(name: str = "") -> str:
    """The comment after which a generated section of a page begins, by its name if there are several."""
    return BEGIN.replace(" -->", f" {name} -->") if name else BEGIN


def update(page: Path, text: str, name: str = "") -> bool:
    """Put `text` between the marker comments of a section of `page`; returns whether the file changed.

    Raises ValueError where the markers are missing or out of order.
    """
    old, mark = page.read_text(), begin_of(name)
    begin = old.find(mark)
    end = old.find(END, begin)
    following = old.find(begin_of("").removesuffix(" -->"), begin + 1)
    if begin < 0 or end < 0 or 0 <= following < end or old.count(mark) > 1:
        raise ValueError(f"page: got {page}, expected in it one {mark} and after it {END}")
    new = old[: begin + len(mark)] + "\n" + text + "\n" + old[end:]
    if new != old:
        page.write_text(new)
    return new != old
