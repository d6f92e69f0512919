"""The model of docs/training.md: loss curves by both attentions, and how long a step takes at several lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.gpu.progress import Bar

from .examples import Names, run_page
from .report import COLOURS, RC, Record, where_of

PAGE = "../training"  # from the folder of examples
WARM_UP, REPEATS = 2, 5


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained, and at which lengths a step is timed, with as many tokens each as `tokens` or one sequence."""

    curve: dict[str, Any]  # arguments of `train`
    model: dict[str, Any]  # sizes of the model whose steps are timed
    heads: int
    lengths: tuple[int, ...]
    tokens: int
    dtypes: tuple[str, ...] = field(default=("float32",))


STUDIES = {
    "cpu": Study(
        curve={"steps": 150, "batch": 8, "length": 128, "width": 64, "blocks": 2, "heads": 4},
        model={"width": 64, "blocks": 2},
        heads=4,
        lengths=(),  # times of a processor that others may share say little
        tokens=1024,
        dtypes=("float32", "bfloat16"),
    ),
    "gpu": Study(
        curve={"steps": 400, "batch": 8, "length": 1024, "width": 256, "blocks": 4, "heads": 4, "rate": 1e-3},
        model={"width": 512, "blocks": 4},
        heads=8,
        lengths=(1024, 4096, 16384, 65536),
        tokens=16384,
        dtypes=("float32", "bfloat16"),
    ),
}


def attentions(names: Names, dtypes: Iterable[str]) -> dict[str, Any]:
    """What is compared: the formula, and cuflash in each dtype."""
    rounded = {"float32": None, "bfloat16": ml_dtypes.bfloat16}
    return {"formula": names["Formula"]()} | {f"cuflash, {x}": names["Cuflash"](rounded[x]) for x in dtypes}


def measure(backend: str, write: Callable[..., None], study: Study | None = None) -> None:
    """Write a record for each curve and for each time of a step."""
    study = study or STUDIES[backend]
    names = run_page(PAGE, "cupy" if backend == "gpu" else "numpy")
    compared = attentions(names, study.dtypes)
    curves = [(title, seed) for title in compared for seed in ((0, 1) if title == "formula" else (0,))]
    with Bar("training", total=len(curves) + len(study.lengths) * len(compared)) as bar:
        for title, seed in curves:
            losses, p = names["train"](compared[title], seed=seed, **study.curve)
            held_out = _held_out(names, p, compared[title], study)
            write("curve", attention=title, seed=seed, losses=losses, held_out=held_out, sizes=study.curve)
            bar.print(f"{title}, seed {seed}: loss {losses[0]:.3f}, then {losses[-1]:.3f}, {held_out:.3f}")
            bar.advance()
        for length in study.lengths:
            batch = max(1, study.tokens // length)
            for title, attention in compared.items():
                found = _of_length(names, attention, study, batch, length)
                write(
                    "step", attention=title, length=length, batch=batch, heads=study.heads, sizes=study.model, **found
                )
                bar.print(f"{length} tokens, {title}: {found}")
                bar.advance()


def _held_out(names: Names, p: Any, attention: Any, study: Study) -> float:
    """The loss on text that was held out."""
    sizes = 4 * study.curve["batch"], study.curve["length"]
    tokens = names["draw"](np.random.default_rng(1), names["held_out"], *sizes)
    return float(names["loss_and_gradients"](p, tokens, attention, study.curve["heads"])[0])


def _of_length(names: Names, attention: Any, study: Study, batch: int, length: int) -> Record:
    """Milliseconds of a step and of its attention, or why there are none."""
    xp, rng = names["xp"], np.random.default_rng(0)
    try:
        p = names["new_parameters"](0, length=length, **study.model)
        state = names["zeros_of"](p)
        tokens = names["draw"](rng, names["training"], batch, length)
        shape = (batch, length, study.heads, study.model["width"] // study.heads)
        q, k, v, dout = (xp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(4))

        def step() -> None:
            _, g = names["loss_and_gradients"](p, tokens, attention, study.heads)
            names["update"](p, g, state, 1, 1e-3)

        def attend() -> None:
            _, saved = attention.forward(q, k, v)
            attention.backward(dout, saved)

        step_ms, attention_ms = (milliseconds(xp, call) for call in (step, attend))
    except MemoryError as error:  # CuPy's is one, too
        return {"status": "out of memory", "reason": str(error).splitlines()[0]}
    finally:
        if xp.__name__ == "cupy":
            xp.get_default_memory_pool().free_all_blocks()
    per_s = 1e3 * batch * length / step_ms
    return {"status": "ok", "step_ms": step_ms, "attention_ms": attention_ms, "tokens_per_s": per_s}


def milliseconds(xp: Any, call: Callable[[], None]) -> float:
    """The median of some calls, each to its end."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if xp.__name__ == "cupy":
            xp.cuda.get_current_stream().synchronize()
        return 1e3 * (time.perf_counter() - start)

    return float(np.median([once() for _ in range(WARM_UP + REPEATS)][WARM_UP:]))


# ---- What is shown ---------------------------------------------------------------------------------------------------


def differences(records: Sequence[Record]) -> dict[str, float]:
    """The largest difference to the first curve, of each other one."""
    own, *others = [r for r in records if r["record"] == "curve"]
    return {_title(r): float(np.abs(np.subtract(r["losses"], own["losses"])).max()) for r in others}


def summary(records: Sequence[Record]) -> str:
    """A line: how far the curves are apart, and how much faster the longest step became that the formula takes."""
    head, found = next(r for r in records if r["record"] == "run"), differences(records)
    apart = "; ".join(f"{title} {x:.1e}" for title, x in found.items())
    command = f"`python -m bench run --suite training --backend {head['kind']}`"
    text = f"- {where_of(head)}, by {command}: largest difference of losses to the curve of the formula: {apart}."
    steps = {(r["length"], r["attention"]): r for r in records if r["record"] == "step" and r["status"] == "ok"}
    for name in dict.fromkeys(name for _, name in steps if name != "formula"):
        both = [n for n, x in steps if x == name and (n, "formula") in steps]
        if both:
            ratios = [f"{_speedup(steps[n, 'formula'], steps[n, name])} at {n} tokens" for n in both]
            text += f" {name}, speedup of a step / of attention: {', '.join(ratios)}."
        longest = max(n for n, x in steps if x == name)
        text += f" {name} at {longest} tokens: {steps[longest, name]['tokens_per_s']:,.0f} tokens a second."
    return text


def _title(curve: Record) -> str:
    return f"{curve['attention']}, seed {curve['seed']}"


def markdown(records: Sequence[Record]) -> str:
    """Differences of curves, and the table of steps."""
    curves, found = [r for r in records if r["record"] == "curve"], differences(records)
    sizes = ", ".join(f"{name} {x}" for name, x in curves[0]["sizes"].items())
    first, last = (curves[0]["losses"][index] for index in (0, -1))
    lines = [
        f"Loss curves ({sizes}), from {first:.2f} to {last:.2f} nats a character; the loss on the text that was kept "
        "apart; and the largest difference of any step to the first curve:",
        "",
        "| attention | loss, kept apart | largest difference |",
        "|---|---|---|",
        *(f"| {_title(r)} | {r['held_out']:.4f} | {found.get(_title(r), 0):.1e} |" for r in curves),
    ]
    steps = [r for r in records if r["record"] == "step"]
    if steps:
        sizes = ", ".join(f"{name} {x}" for name, x in {**steps[0]["sizes"], "heads": steps[0]["heads"]}.items())
        titles = list(dict.fromkeys(r["attention"] for r in steps))
        lines += ["", f"Milliseconds of a step / of one attention, both passes, and tokens a second ({sizes}):", ""]
        others = [title for title in titles if title != "formula"]
        heads = ["length", "batch", *titles, *(f"formula : {title}" for title in others)]
        lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        for length in dict.fromkeys(r["length"] for r in steps):
            row = {r["attention"]: r for r in steps if r["length"] == length}
            cells = [_cell(row[title]) if title in row else "-" for title in titles]
            cells += [_speedup(row.get("formula"), row.get(title)) for title in others]
            lines.append(f"| {length} | {next(iter(row.values()))['batch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(record: Record) -> str:
    if record["status"] != "ok":
        return record["status"]
    return f"{record['step_ms']:.3g} / {record['attention_ms']:.3g}, {record['tokens_per_s']:,.0f}"


def _speedup(slow: Record | None, fast: Record | None) -> str:
    """Of a step / of attention."""
    if not slow or not fast or "ok" not in {slow["status"]} & {fast["status"]}:
        return "-"
    return " / ".join(f"{slow[name] / fast[name]:.3g}" for name in ("step_ms", "attention_ms"))


def draw(plt: Any, records: Sequence[Record], path: Path) -> None:
    """Curves above, their differences to the formula's below."""
    curves = [r for r in records if r["record"] == "curve"]
    own = np.array(curves[0]["losses"])
    with plt.rc_context(RC):
        figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(6.5, 4.5), layout="constrained")
        colours = ["#999999", "#30638e", COLOURS["cuflash"], "#edae49"]
        for record, colour in zip(curves, colours, strict=False):
            losses, is_own = np.array(record["losses"]), record is curves[0]
            above.plot(losses, color=colour, linewidth=4 if is_own else 1.2, label=_title(record))
            if not is_own:
                below.semilogy(np.maximum(abs(losses - own), 1e-9), color=colour, linewidth=1.2)
        above.set(ylabel="loss")
        above.legend(frameon=False)
        below.set(ylabel="difference to the first", xlabel="step")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
