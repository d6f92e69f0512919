"""The pages of docs/examples, run as they stand, and the pictures that they show."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cuflash.gpu.progress import Bar

from . import environment
from .report import RC

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "examples"
ACCENT, OTHER, MUTED = "#d1495b", "#30638e", "#999999"
MOST_KEYS = 2**20

Names = dict[str, Any]


def blocks(text: str, languages: Collection[str] = ("python",)) -> list[str]:
    """The code of a page whose fence is of one of these languages, in order."""
    found = re.findall(r"^```([^\n]+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [code for language, code in found if language in languages]


def run_page(name: str, library: str = "numpy", languages: Collection[str] = ("python",)) -> Names:
    """What is defined once a page has run on the arrays of NumPy or CuPy."""
    names: Names = {"__name__": "example"}
    for code in blocks((FOLDER / f"{name}.md").read_text(), languages):
        exec(compile(code.replace("xp = np ", f"import {library} as xp "), f"{name}.md", "exec"), names)
    return names


def _kernel_regression(plt: Any, names: Names) -> Any:
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(6.5, 4), height_ratios=(3, 1))
    x, mean, error = names["points"][:, 0], names["mean"], names["error"]
    above.plot(names["places"][::10, 0], names["values"][::10], ".", color=MUTED, markersize=2, label="measured")
    above.fill_between(x, mean - 2 * error, mean + 2 * error, color=ACCENT, alpha=0.3, linewidth=0)
    above.plot(x, mean, color=ACCENT, label="estimate, two standard errors")
    above.plot(x, names["truth"](names["points"]), color=OTHER, linestyle="--", linewidth=1, label="truth")
    above.legend(frameon=False)
    below.plot(x, error, color=ACCENT)
    below.set(ylim=(0, None), ylabel="standard error", xlabel="place")
    return figure


def _particles(plt: Any, names: Names) -> Any:
    figure, axes = plt.subplots(1, 2, sharex=True, sharey=True, figsize=(6.5, 3.4))
    titles = ("from the star itself", "from where the descent leads")
    for axis, path, title in zip(axes, (names["before"], names["after"]), titles, strict=True):
        steps = np.stack(path)
        lines = np.concatenate([steps, np.full_like(steps[:1], np.nan)]).swapaxes(0, 1).reshape(-1, 2)
        axis.plot(*lines.T, color=MUTED, linewidth=0.5)  # one line with gaps, which keeps the file small
        axis.plot(*names["target"].T, color=OTHER, linestyle="--", linewidth=1)
        axis.plot(*steps[0].T, ".", color=MUTED, markersize=3)
        axis.plot(*steps[-1].T, ".", color=ACCENT, markersize=4)
        axis.set(title=title, aspect="equal")
    return figure


def _pair_bias(plt: Any, names: Names) -> Any:
    layout = [["teacher 0", "student 0", "loss"], ["teacher 1", "student 1", "loss"]]
    figure, axes = plt.subplot_mosaic(layout, figsize=(7, 4.2))
    weights = {"teacher": names["teacher"], "student": names["weight"]}
    for row, head in enumerate((0, names["heads"] - 1)):
        for who, weight in weights.items():
            bias = names["bias_of"](names["features"], weight)[0, head]
            axis, centred = axes[f"{who} {row}"], bias - bias.mean(axis=1, keepdims=True)
            axis.imshow(centred, cmap="RdBu_r", vmin=-4, vmax=4, interpolation="none")
            axis.set(title=f"{who}, head {head}", xticks=[], yticks=[])
    axes["loss"].semilogy(names["losses"], color=ACCENT)
    axes["loss"].set(xlabel="step", title="loss")
    return figure


def _field(plt: Any, names: Names) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(7, 2.4))
    shape = (len(names["grid"]),) * 2
    fields = {"truth": names["wave"](names["at"]), "estimate": names["picture"]}
    for axis, (title, values) in zip(axes, fields.items(), strict=False):
        image = {"origin": "lower", "extent": (0, 1, 0, 1), "interpolation": "none"}
        axis.imshow(values.reshape(shape), cmap="RdBu_r", vmin=-1, vmax=1, **image)
        axis.set(title=title, xticks=[], yticks=[])
    near = names["places"][abs(names["places"][:, 2] - 0.5) < 0.05]
    axes[1].plot(near[:, 0], near[:, 1], ".", color="black", markersize=2)
    axes[2].plot(np.sqrt(names["losses"]), color=ACCENT)
    axes[2].set(title="error, left out", xlabel="step", ylim=(0, None))
    return figure


def _status_bytes(field: str) -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


def _measured(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds of the second run of a call, and how far the memory of the process rose in the first.

    In a process of its own, which has not kept the memory of earlier calls.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def measure() -> None:
        before = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        call()
        risen = max(0, _status_bytes("VmHWM") - before)
        start = time.perf_counter()
        call()
        sender.send((time.perf_counter() - start, risen))

    process = context.Process(target=measure)
    process.start()
    seconds, nbytes = receiver.recv()
    process.join()
    return seconds, nbytes


def _machine() -> str:
    """What a picture was measured on."""
    facts = environment.describe(gpu=False)
    return f"{facts['cpu']}, {facts['cores']} cores, revision {facts['revision']}, {facts['time'][:10]}"


def _million_keys(plt: Any, names: Names) -> Any:
    attention, dim, asked = names["cuflash"].attention, names["DIM"], names["ASKED"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.5, 3))
    counts = [2**n for n in range(12, MOST_KEYS.bit_length(), 2)]
    rng = np.random.default_rng(0)
    keys = rng.choice(np.array([-1, 1], np.float32), (counts[-1], dim))
    queries = keys[:asked] * (rng.random((asked, dim)) > 1 / 3).astype(np.float32)

    def formula(keys: Any) -> Any:
        scores = 2 * queries @ keys.T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights @ keys / weights.sum(axis=1, keepdims=True)

    calls = {"cuflash": lambda keys: attention(queries, keys, keys, scale=2.0), "formula": formula}
    for (title, call), colour in zip(calls.items(), (ACCENT, MUTED), strict=True):
        found = [_measured(partial(call, keys[:n])) for n in counts]
        left.loglog(counts, [seconds for seconds, _ in found], "o-", base=2, color=colour, markersize=3, label=title)
        right.loglog(counts, [nbytes / 2**20 for _, nbytes in found], "o-", base=2, color=colour, markersize=3)
        for count, (seconds, nbytes) in zip(counts, found, strict=True):
            print(f"{title}, {count} keys: {seconds:.4f} s, {nbytes / 2**20:.1f} MiB")
    fraction = names["recall"](MOST_KEYS)
    left.set(xlabel="keys", ylabel="seconds")
    right.set(xlabel="keys", ylabel="MiB besides inputs")
    left.legend(frameon=False)
    figure.suptitle(f"{fraction:.0%} of {asked} patterns whole out of {MOST_KEYS}\n{_machine()}", fontsize=8)
    return figure


def _sinkhorn(plt: Any, names: Names) -> Any:
    figure, (left, right) = plt.subplots(1, 2, sharex=True, sharey=True, figsize=(6.5, 3.3))
    steps = np.stack(names["path"])
    lines = np.concatenate([steps, np.full_like(steps[:1], np.nan)]).swapaxes(0, 1).reshape(-1, 2)
    left.plot(*lines.T, color=MUTED, linewidth=0.4)  # one line with gaps, which keeps the file small
    left.plot(*steps[0].T, ".", color=OTHER, markersize=3)
    left.set(title="a disc, and the paths of its points", aspect="equal")
    right.plot(*names["target"].T, ".", color=MUTED, markersize=5, label="target")
    right.plot(*steps[-1].T, ".", color=ACCENT, markersize=2, label="end of the paths")
    right.set(title="where they end", aspect="equal")
    right.legend(frameon=False)
    return figure


def _density(plt: Any, names: Names) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.3), width_ratios=(3, 3, 2))
    samples = names["samples"]
    x, y = (np.linspace(low - 0.4, high + 0.4, 90) for low, high in zip(samples.min(0), samples.max(0), strict=True))
    grid = np.stack([a.ravel() for a in np.meshgrid(x, y)], axis=1)
    found = {"rule of thumb": np.exp(names["first"]), "leave-one-out": names["bandwidths"]}
    for axis, (title, bandwidths) in zip(axes, found.items(), strict=False):
        image = np.exp(names["log_density"](grid, samples, bandwidths)).reshape(90, 90)
        axis.imshow(image, origin="lower", extent=(x[0], x[-1], y[0], y[-1]), cmap="Reds", interpolation="none")
        axis.set(title=title, xticks=[], yticks=[])
    axes[0].plot(*samples[::4].T, ".", color="black", markersize=1)
    axes[2].plot(names["likelihoods"], color=ACCENT)
    axes[2].axhline(names["after"], color=OTHER, linestyle="--", linewidth=1, label="fresh")
    axes[2].set(title="log-likelihood", xlabel="step")
    axes[2].legend(frameon=False)
    return figure


def _contrastive(plt: Any, names: Names) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(7, 2.4))
    for axis, title, views in zip(axes, ("before", "after"), (names["at_first"], names["at_last"]), strict=False):
        u, v = (x[:40] for x in views)
        axis.imshow(u @ v.T, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="none")
        axis.set(title=f"40 pairs, {title}", xticks=[], yticks=[])
    axes[2].plot(names["losses"], color=ACCENT)
    axes[2].set(ylim=(0, None), title=f"loss of {names['PAIRS']} pairs", xlabel="step")
    return figure


def _cross_entropy(plt: Any, names: Names) -> Any:
    tokens, width, rng = 1024, 64, np.random.default_rng(0)
    counts = [2**n for n in range(10, 18)]
    hidden, every = (rng.standard_normal((n, width), dtype=np.float32) for n in (tokens, counts[-1]))
    labels, bias = rng.integers(counts[0], size=tokens), np.zeros(counts[-1], np.float32)

    def formula(classes: int) -> Any:
        weights = every[:classes]
        logits = hidden @ weights.T
        d = np.exp(logits - logits.max(axis=1, keepdims=True))
        d /= d.sum(axis=1, keepdims=True)
        d[np.arange(tokens), labels] -= 1
        d /= tokens
        return d @ weights, d.T @ hidden, d.sum(axis=0)

    calls = {
        "cuflash": lambda classes: names["cross_entropy"](hidden, every[:classes], bias[:classes], labels),
        "formula": formula,
    }
    figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.6))
    for (title, call), colour in zip(calls.items(), (ACCENT, MUTED), strict=True):
        found = [_measured(partial(call, n)) for n in counts]
        style = {"base": 2, "color": colour, "markersize": 3}
        axes[0].loglog(counts, [seconds for seconds, _ in found], "o-", label=title, **style)
        axes[1].loglog(counts, [nbytes / 2**20 for _, nbytes in found], "o-", **style)
        for count, (seconds, nbytes) in zip(counts, found, strict=True):
            print(f"{title}, {count} classes: {seconds:.4f} s, {nbytes / 2**20:.1f} MiB")
    axes[0].set(xlabel="classes", ylabel="seconds")
    axes[1].set(xlabel="classes", ylabel="MiB beside inputs")
    axes[2].plot(names["losses"], color=ACCENT)
    axes[2].set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes[0].legend(frameon=False)
    figure.suptitle(_machine(), fontsize=8)
    return figure


def _where(plt: Any, names: Names) -> Any:
    figure, axes = plt.subplots(2, 2, sharex=True, sharey="col", figsize=(6.5, 4))
    for n, ((left, right), (entropy, received)) in enumerate(zip(axes, names["trained"](400), strict=True)):
        positions = np.arange(1, entropy.shape[2] + 1)
        equal = np.cumsum(1 / positions[::-1])[::-1]  # of each query, 1 / its position
        left.plot(positions, entropy.mean(axis=0).T, color=ACCENT, linewidth=1)
        left.plot(positions, np.log(positions), color=MUTED, linestyle="--", linewidth=1)
        left.set(ylabel=f"block {n}")
        right.semilogy(positions, received.mean(axis=0).T, color=ACCENT, linewidth=1)
        right.semilogy(positions, equal, color=MUTED, linestyle="--", linewidth=1)
    axes[0, 0].set(title="entropy of each head")
    axes[0, 1].set(title="attention that a key receives")
    for axis in axes[1]:
        axis.set(xlabel="position")
    return figure


def _frameworks(plt: Any, names: Names) -> Any:
    figure, axis = plt.subplots(figsize=(5, 2.6))
    runs = {"by hand": ("by_hand", "-", 4), "PyTorch": ("by_torch", "-", 2), "JAX": ("by_jax", ":", 2)}
    for (title, (name, style, width)), colour in zip(runs.items(), (MUTED, ACCENT, OTHER), strict=True):
        axis.semilogy(names[name], style, linewidth=width, color=colour, label=title)
    axis.set(xlabel="step", ylabel="loss")
    axis.legend(frameon=False)
    return figure


# What draws the picture of each page. Lines for other libraries run only here and where these are installed.
PICTURES: dict[str, Callable[[Any, Names], Any]] = {
    "kernel_regression": _kernel_regression,
    "particles": _particles,
    "pair_bias": _pair_bias,
    "field": _field,
    "million_keys": _million_keys,
    "sinkhorn": _sinkhorn,
    "density": _density,
    "contrastive": _contrastive,
    "cross_entropy": _cross_entropy,
    "where": _where,
    "frameworks": _frameworks,
}
LANGUAGES = ("python", "python torch", "python jax")


def draw(pages: Collection[str]) -> None:
    """Run these pages, or all, and write the pictures next to them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    unknown = set(pages) - PICTURES.keys()
    if unknown:
        raise ValueError(f"page: got {sorted(unknown)}, expected names out of {sorted(PICTURES)}")
    with Bar("draw", total=len(pages or PICTURES)) as bar:
        for name in pages or PICTURES:
            with plt.rc_context(RC):
                figure = PICTURES[name](plt, run_page(name, languages=LANGUAGES))
                figure.set_layout_engine("constrained")
                figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
                plt.close(figure)
            bar.print(f"drew {FOLDER / name}.svg")
            bar.advance()
