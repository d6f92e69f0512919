"""What rounding q, k and v to fp8 does to attention: over lengths, outliers, scales and rotations.

Numbers are drawn in bfloat16, by NumPy on every backend. An error is the root mean square of what a result of a head is
off, over that of the result: from float64 attention of the numbers as they were drawn, and from that of what the
rounded ones stand for, which is all that the kernels themselves add.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash import attention, dequantize, quantize, rotate
from cuflash.arrays.array_info import numpy_dtype
from cuflash.arrays.dlpack import on_host
from cuflash.gpu.progress import Bar
from cuflash.spec.options import Options
from cuflash.spec.problem import make_problem
from cuflash.spec.quantization import PER
from cuflash.testing import reference

from .report import RC, Record

Array = NDArray[Any]

HEAD_DIM, HEADS, QUERIES = 128, 2, 64
LENGTHS = (1, 16, 256, 4096, 131072)
QUIET = (
    2.0**-16
)  # how large keys and values of the second head are compared with those of the first, where heads differ
LOUD_ENTRIES, LOUD_SIGMA = 0.001, 10.0  # how many there are, and their standard deviation, where others have 1
LOUD_CHANNELS, LOUDER = (5, 77), 4.0


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to round: which of q, k and v, what has a scale of its own, and whether q and k are rotated before."""

    names: str = ""
    per: Any = "head"
    rotates: bool = False

    @property
    def title(self) -> str:
        if not self.names:
            return "bfloat16"
        what = "q, k, v" if "q" in self.names else "k, v"
        return f"{what}; a scale per {self.per}{', rotated' if self.rotates else ''}"


WAYS = (
    Way(),
    *(Way(names="kv", per=per, rotates=rotates) for rotates in (False, True) for per in PER),
    # An fp8 product takes blocks of 64 keys or more.
    *(Way(names="qkv", per=per, rotates=rotates) for rotates in (False, True) for per in ("tensor", "head", "block")),
)


# ---- What is rounded -------------------------------------------------------------------------------------------------


def _with_loud_entries(random: np.random.Generator, numbers: Array, name: str) -> Array:
    loud = random.random(numbers.shape, np.float32) < LOUD_ENTRIES
    return numbers + np.float32(LOUD_SIGMA) * loud * random.standard_normal(numbers.shape, np.float32)


def _with_loud_channels(random: np.random.Generator, numbers: Array, name: str) -> Array:
    numbers[..., LOUD_CHANNELS] *= np.float32(LOUDER)
    return numbers


def _with_a_quiet_head(random: np.random.Generator, numbers: Array, name: str) -> Array:
    numbers[1] *= np.float32(1 / QUIET if name == "q" else QUIET)  # so that scores are as they were
    return numbers


Change = Callable[[np.random.Generator, Array, str], Array]
DATA: dict[str, Change] = {
    "normal": lambda random, numbers, name: numbers,
    "loud entries": _with_loud_entries,
    "loud channels": _with_loud_channels,
    "a quiet head": _with_a_quiet_head,
}
ABOUT_DATA = {
    "normal": "N(0, 1)",
    "loud entries": f"N(0, 1), and {LOUD_ENTRIES:.1%} of all entries with N(0, {LOUD_SIGMA**2:g}) added, as "
    "FlashAttention-3 was tested with",
    "loud channels": f"N(0, 1), {len(LOUD_CHANNELS)} of {HEAD_DIM} channels {LOUDER:g} times as large, in q, k and v",
    "a quiet head": f"N(0, 1), keys and values of the second head divided by {1 / QUIET:g}, and its queries multiplied",
}


def draw_operands(data: str, seqlen: int) -> tuple[Array, Array, Array]:
    """q, k and v in bfloat16, (heads, rows, channels)."""
    random = np.random.default_rng(seqlen)

    def drawn(name: str, rows: int) -> Array:
        numbers = random.standard_normal((HEADS, rows, HEAD_DIM), np.float32)
        return DATA[data](random, numbers, name).astype(numpy_dtype("bfloat16"))

    return drawn("q", QUERIES), drawn("k", seqlen), drawn("v", seqlen)


# ---- Errors ----------------------------------------------------------------------------------------------------------


def exact(q: Array, k: Array, v: Array) -> Array:
    """Attention in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    return reference.forward(make_problem(Options(), q, k, v), q, k, v)[0]


def relative(got: Array, expected: Array) -> float:
    """The root mean square of the difference over that of what is expected, of each head; the mean square of both."""
    of_heads = ((got - expected) ** 2).mean(axis=(1, 2)) / (expected**2).mean(axis=(1, 2))
    return float(np.sqrt(of_heads.mean()))


def errors(xp: Any, way: Way, operands: Sequence[Array]) -> tuple[float, float]:
    """How far a result is from attention of the numbers as they were, and of what the rounded ones stand for."""
    given, stands_for, scales = {}, {}, {}
    for name, numbers in zip("qkv", operands, strict=True):
        turns = way.rotates and name != "v"
        if name not in way.names:
            given[name] = rotate(xp.asarray(numbers)) if turns else xp.asarray(numbers)
            stands_for[name] = on_host(given[name].astype(np.float32))
            continue
        given[name], scales[f"{name}_scale"] = quantize(xp.asarray(numbers), per=way.per, rotate=turns)
        stands_for[name] = on_host(dequantize(given[name], scales[f"{name}_scale"], dtype="float64"))
    out = on_host(attention(**given, **scales).astype(np.float32)).astype(np.float64)
    return relative(out, exact(*operands)), relative(out, exact(**stands_for))


def measure(
    write: Callable[..., None],
    backend: str,
    *,
    lengths: Iterable[int] = LENGTHS,
    ways: Sequence[Way] = WAYS,
) -> None:
    """Write a record for each kind of numbers, length and way."""
    xp = importlib.import_module("cupy" if backend == "gpu" else "numpy")
    lengths = list(lengths)
    with Bar("rounding", total=len(DATA) * len(lengths)) as bar:
        for data in DATA:
            for seqlen in lengths:
                operands = draw_operands(data, seqlen)
                for way in ways:
                    original, own = errors(xp, way, operands)
                    fields = {"data": data, "seqlen": seqlen, "way": way.title, "of_bytes": "q" in way.names}
                    write("rounding", **fields, original=original, own=own)
                bar.print(f"{data} {seqlen}")
                bar.advance()


# ---- What is shown ---------------------------------------------------------------------------------------------------


def markdown(records: Sequence[Record]) -> str:
    """A table for each kind of numbers: ways over lengths, and the largest error of the kernels' own."""
    rows = [r for r in records if r["record"] == "rounding"]
    lengths = list(dict.fromkeys(r["seqlen"] for r in rows))
    tables = []
    for data in dict.fromkeys(r["data"] for r in rows):
        lines = [
            f"{ABOUT_DATA[data]}:",
            "",
            f"| error of out, by keys | {' | '.join(map(str, lengths))} | largest that computing adds |",
            "|" + "---|" * (2 + len(lengths)),
        ]
        for way in dict.fromkeys(r["way"] for r in rows):
            found = {r["seqlen"]: r for r in rows if (r["data"], r["way"]) == (data, way)}
            cells = [f"{found[n]['original']:.2%}" for n in lengths]
            lines.append(f"| {way} | {' | '.join(cells)} | {max(r['own'] for r in found.values()):.2%} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def draw(plt: Any, records: Sequence[Record], path: Path) -> None:
    """Errors over lengths, a panel for each kind of numbers, of scales of heads."""
    rows = [r for r in records if r["record"] == "rounding"]
    with plt.rc_context(RC):
        figure, axes = plt.subplots(1, len(DATA), sharey=True, figsize=(9, 3), squeeze=False)
        for axis, data in zip(axes[0], DATA, strict=True):
            for way in dict.fromkeys(r["way"] for r in rows):
                if way != "bfloat16" and "per head" not in way:
                    continue
                found = [r for r in rows if (r["data"], r["way"]) == (data, way)]
                axis.plot(
                    [r["seqlen"] for r in found], [r["original"] for r in found], marker="o", markersize=3, label=way
                )
            axis.set(xscale="log", yscale="log", xlabel="keys", title=data)
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("error of out")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        figure.set_layout_engine("constrained")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
