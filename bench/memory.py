"""Device memory of both passes besides inputs and results, over growing lengths: what the formula runs out of."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from cuflash.gpu.progress import Bar

from .cases import ITEMSIZE, PASSES, Case
from .contender import Absent
from .inputs import Inputs, make_inputs
from .peers import ADAPTERS
from .report import COLOURS, RC, REASON_LENGTH, TITLES, Record, whole_sentences

CONTENDERS = ("cuflash", "naive", "math", "fa2", "cudnn")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SECOND = ("cuflash-tangents", "naive-second", "math-second")  # of passes of second order
PASSES_OF_SECOND = ("jvp", "double_backward")
TITLES_OF_PASSES = {"backward": "forward and backward", "double_backward": "double backward"}
CASES = tuple(Case(head_dim=64, seqlen_q=n, batch=1, num_heads=16) for n in LENGTHS)


class Meter(Protocol):
    """Counts memory between two calls."""

    def begin(self) -> None:
        """Forget what was taken before."""

    def taken(self) -> int:
        """The most bytes that were taken since."""


class DeviceMeter:
    """What the pools of CuPy and of PyTorch have grown to: neither gives back memory before it is asked to."""

    def __init__(self) -> None:
        self.cupy: Any = importlib.import_module("cupy")
        self.before = (0, 0)

    def begin(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()
        self.cupy.get_default_memory_pool().free_all_blocks()
        if torch := sys.modules.get("torch"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.before = self._pools()

    def taken(self) -> int:
        self.cupy.cuda.get_current_stream().synchronize()
        return sum(now - then for now, then in zip(self._pools(), self.before, strict=True))

    def _pools(self) -> tuple[int, int]:
        torch = sys.modules.get("torch")
        of_torch = torch.cuda.max_memory_allocated() if torch else 0
        return self.cupy.get_default_memory_pool().total_bytes(), of_torch


def results_bytes(case: Case, pass_: str) -> int:
    """Bytes of out and lse, and of the gradients for the backward pass; of jvp also of the tangents of the former.

    The double backward pass gives the gradients by dout, dlse, q, k and v.
    """
    rows = case.batch * case.num_heads * case.seqlen_q
    out = rows * (case.head_dim_v * ITEMSIZE[case.dtype] + ITEMSIZE[case.softmax_dtype])
    keys = case.batch * case.num_heads_kv * case.seqlen_k * (case.head_dim + case.head_dim_v)
    gradients = (rows * case.head_dim + keys) * ITEMSIZE[case.dtype]
    return {
        "forward": out,
        "backward": out + gradients,
        "jvp": 2 * out,
        "double_backward": out + gradients,
    }[pass_]


def extra_bytes(name: str, case: Case, inputs: Inputs, pass_: str, meter: Meter) -> int:
    """Bytes besides inputs and results: of the forward pass, or of both.

    The contender is made anew and runs twice: what it prepares for its calls counts, and what it keeps between them.
    That of cuflash has all its results from the start.
    """
    meter.begin()
    contender = ADAPTERS[name](case, inputs)
    if pass_ not in contender.calls:
        raise Absent(f"has no {pass_} pass")
    for _ in range(2):
        results = contender.calls[pass_]()
    taken = meter.taken()
    del results
    return max(0, taken - results_bytes(case, "backward" if name == "cuflash" else pass_))


def measure(
    write: Callable[..., None],
    meter: Meter,
    xp: Any,
    cases: Iterable[Case] = CASES,
    contenders: Sequence[str] = CONTENDERS,
    passes: Sequence[str] = PASSES,
) -> None:
    """Write a record for each case, pass and contender; one that failed is not tried at greater lengths."""
    lost: dict[tuple[str, str], Record] = {}
    cases = list(cases)
    with Bar("memory", total=len(cases)) as bar:
        for case in cases:
            inputs = make_inputs(xp, case, passes=passes)
            for pass_ in passes:
                for name in contenders:
                    found = lost.get((name, pass_)) or _try(name, case, inputs, pass_, meter)
                    if found["status"] != "ok":
                        lost[name, pass_] = found
                    fields = {"case": case.name, "seqlen": case.seqlen_q, "pass": pass_, "contender": name}
                    write("memory", **fields, least_bytes=case.ideal_bytes(pass_), **found)
            del inputs
            bar.print(case.name)
            bar.advance()


def _try(name: str, case: Case, inputs: Inputs, pass_: str, meter: Meter) -> Record:
    try:
        return {"status": "ok", "extra_bytes": extra_bytes(name, case, inputs, pass_, meter)}
    except Exception as error:  # a peer may refuse with any type; the reason goes into the record
        lines = str(error).strip().splitlines() or [""]
        return {"status": "absent", "reason": f"{type(error).__name__}: {lines[0][:REASON_LENGTH]}"}


# ---- What is shown ---------------------------------------------------------------------------------------------------


def markdown(records: Sequence[Record]) -> str:
    """MiB besides inputs and results, of each pass, and the formula's in units of cuflash's."""
    rows = [r for r in records if r["record"] == "memory"]
    passes = list(dict.fromkeys(r["pass"] for r in rows))
    said = " / ".join(TITLES_OF_PASSES.get(p, p) for p in passes)
    cells = {(r["seqlen"], r["contender"], r["pass"]): r.get("extra_bytes") for r in rows}
    names = list(dict.fromkeys(r["contender"] for r in rows))
    heads = ["seqlen", *(TITLES.get(x, x) for x in names), "formula : cuflash"]
    own, formula = (next((x for x in names if x.startswith(name)), name) for name in ("cuflash", "naive"))
    lines = [f"MiB besides inputs and results, {said}.", ""]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for seqlen in dict.fromkeys(r["seqlen"] for r in rows):
        row = [" / ".join(_mib(cells.get((seqlen, x, p))) for p in passes) for x in names]
        pairs = [(cells.get((seqlen, formula, p)), cells.get((seqlen, own, p))) for p in passes]
        row.append(" / ".join(_ratio(a, b) for a, b in pairs))
        lines.append(f"| {seqlen} | " + " | ".join(row) + " |")
    reasons = {(r["contender"], r["pass"]): (r["reason"], r["seqlen"]) for r in reversed(rows) if "reason" in r}
    growth = {
        x: [_growth([cells.get((n, x, p)) for n in sorted({r["seqlen"] for r in rows})]) for p in passes] for x in names
    }
    growth = {x: found for x, found in growth.items() if any(found)}
    lines.append("")
    if growth:
        shown = "; ".join(f"{TITLES.get(x, x)} {' / '.join(y or '-' for y in found)}" for x, found in growth.items())
        lines.append(f"- With the last doubling of the length that ran it grew, {said}: {shown}.")
    for (name, pass_), (reason, seqlen) in sorted(reasons.items()):
        lines.append(f"- {TITLES.get(name, name)}, {pass_}, from {seqlen} on: {whole_sentences(reason)}")
    return "\n".join(lines)


def _ratio(a: float | None, b: float | None) -> str:
    """a : b, where there are both; more than any number where b is 0."""
    if a is None or b is None:
        return "-"
    return f"{a / b:.3g}" if b else "inf" if a else "1"


def _growth(nbytes: Sequence[float | None]) -> str:
    """By what the last two numbers differ that there are, one after the other."""
    pairs = [(a, b) for a, b in itertools.pairwise(nbytes) if a and b]
    return f"x {pairs[-1][1] / pairs[-1][0]:.3g}" if pairs else ""


def _mib(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:.3g}"


def draw(plt: Any, records: Sequence[Record], path: Path) -> None:
    """A panel for each pass: memory over length, both logarithmic."""
    rows = [r for r in records if r["record"] == "memory" and r["status"] == "ok"]
    with plt.rc_context(RC):
        figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7, 3.2), layout="constrained")
        for axis, pass_ in zip(axes, dict.fromkeys(r["pass"] for r in rows), strict=True):
            for name in dict.fromkeys(r["contender"] for r in rows):
                found = [
                    (r["seqlen"], r["extra_bytes"] / 2**20)
                    for r in rows
                    if (r["contender"], r["pass"]) == (name, pass_)
                ]
                if found:
                    axis.plot(
                        *zip(*found, strict=True),
                        "o-",
                        markersize=3,
                        color=COLOURS.get(name),
                        label=TITLES.get(name, name),
                    )
            axis.set_xscale("log", base=2)
            axis.set_yscale("symlog", linthresh=1)
            axis.set(title=TITLES_OF_PASSES.get(pass_, pass_), xlabel="seqlen")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("MiB besides inputs and results")
        axes[0].legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
