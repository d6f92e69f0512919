"""The Pathfinder task (`curves`), learnt by an encoder made of the layers of docs/training.md, at growing lengths.

Every pixel is a token. Its embedding is a linear map of what is drawn around it and of its position; the answer is the
mean over the pixels that are drawn. In training a second output says of each drawn pixel whether its curve has a mark,
and a third whether it has both. Each length begins with the parameters that the one before has learnt.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.block_masks import BlockMask, global_blocks
from cuflash.gpu.progress import Bar

from .curves import Drawing, Images, make_images
from .environment import cores
from .examples import Names, run_page
from .report import COLOURS, RC, Record
from .training import PAGE, milliseconds

TILE = 8, 16  # rows and columns of pixels that are neighbours among tokens: a block of 128
AROUND = 3  # cells on each side of a token that it sees
PERIODS = 2.0 ** np.arange(2, 9)  # in units of 1 / 32 of the side, of the sines and cosines of a position
RANGES = 1.0, 2.0, 4.0, 8.0  # of the heads, standard deviations in units of 1 / 32 of the side
DRAWN = 8.0  # what is added to the scores of keys that are drawn
BATCH = 64
EMBEDDED = 10.0  # how much larger embeddings begin than those of docs/training.md: about 1, as few pixels are drawn
OUTPUTS = 3  # numbers of a token: for the answer, and whether its curve has a mark, and both
LESSONS = (0.2, 2, 1), (0.4, 1, 2)  # up to this part of the time: dashes that are missing, and distractors
AHEAD = 2  # pieces of work for each process that draws images
LONGEST = 0.5  # that a gradient of all parameters may be
WARM_UP = 60  # steps until the rate is what it is
LOGGED = 10  # steps between two looks at the loss


@dataclass(frozen=True, kw_only=True)
class Task:
    """How long images of a side are trained on, how many at once, and on how many others accuracy is counted."""

    side: int
    seconds: float
    batch: int
    trials: int
    masked: bool = False
    most_steps: int = 10**9
    dashes: int = 5
    distractors: int = 4

    @property
    def drawing(self) -> Drawing:
        return Drawing(self.side, self.dashes, self.distractors)

    def lesson(self, progress: float, is_first: bool) -> Drawing:
        """What is drawn when such a part of the time has gone: short curves and few at first, unless a task was learnt
        before."""
        for until, missing, distractors in LESSONS if is_first else ():
            if progress < until:
                return Drawing(self.side, max(3, self.dashes - missing), distractors)
        return self.drawing


@dataclass(frozen=True, kw_only=True)
class Study:
    """The sizes of the model, and what it learns one after another."""

    tasks: tuple[Task, ...]
    width: int = 128
    blocks: int = 5
    head_dim: int = 64
    rate: float = 1e-3  # of batches of `BATCH`; others have its root
    dtype: Any = None  # of attention; None: as all else
    timed: bool = True


STUDIES = {
    "gpu": Study(
        tasks=(
            Task(side=32, seconds=40, batch=64, trials=4000),
            Task(side=64, seconds=40, batch=16, trials=2000),
            Task(side=128, seconds=25, batch=4, trials=500),
            Task(side=256, seconds=15, batch=1, trials=150, masked=True),
        ),
        dtype=ml_dtypes.bfloat16,
    ),
    "cpu": Study(
        tasks=(Task(side=16, seconds=240, batch=32, trials=1000, dashes=4, distractors=2),),
        width=64,
        blocks=4,
        head_dim=16,
        rate=2e-3,
        timed=False,
    ),
}


# ---- The model -------------------------------------------------------------------------------------------------------


@functools.cache
def order(side: int) -> np.ndarray:
    """Rows and columns (tokens, 2) of pixels, tile by tile."""
    rows, columns = TILE
    position = np.arange(side * side).reshape(side // rows, rows, side // columns, columns).swapaxes(1, 2).ravel()
    return np.stack(np.divmod(position, side), axis=1)


def neighbourhoods(side: int) -> BlockMask:
    """Tiles that have pixels within a dash and a gap of each other, along either axis, and the first one for all."""
    drawing = Drawing(side)
    corners = order(side)[:: TILE[0] * TILE[1]]
    apart = np.abs(corners[:, None] - corners) - (np.array(TILE) - 1)
    near = (apart <= drawing.dash + drawing.gap).all(axis=2)
    return near | global_blocks(len(near), len(near), 1)


@functools.cache
def waves(xp: Any, side: int, dtype: Any) -> Any:
    """Sines and cosines of the positions of tokens, (tokens, numbers)."""
    angles = 2 * np.pi * order(side)[:, :, None] * 32 / side / PERIODS
    return xp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=2).reshape(side * side, -1), dtype)


def features(xp: Any, pixels: Any, dtype: Any = np.float32) -> Any:
    """What a token is embedded by (images, tokens, numbers): the cells around it, its waves, and its pixel.

    A cell is drawn where one of its pixels is. It has 1 / 32 of the side, so images of all sizes look alike.
    """
    count, side, _ = pixels.shape
    size = max(1, side // 32)
    rows, columns = (xp.asarray(x) for x in order(side).T)
    pixels, before, behind = xp.asarray(pixels, dtype), AROUND * size + size // 2, (AROUND + 1) * size - size // 2
    cells, run = xp.pad(pixels, ((0, 0), (before, behind), (before, behind))), 1
    while run < size:
        cells = xp.maximum(cells[:, run:], cells[:, :-run])
        cells = xp.maximum(cells[:, :, run:], cells[:, :, :-run])
        run *= 2
    shifts = range(0, (2 * AROUND + 1) * size, size)
    around = xp.stack([cells[:, y : y + side, x : x + side] for y in shifts for x in shifts], axis=-1)
    of_positions = waves(xp, side, np.dtype(dtype))
    features = [around[:, rows, columns], xp.broadcast_to(of_positions, (count, *of_positions.shape))]
    return xp.concatenate([*features, pixels[:, rows, columns, None]], axis=-1)


NUMBERS = (2 * AROUND + 1) ** 2 + 4 * len(PERIODS) + 1  # of the features of a token


class Near:
    """Attention whose weights fall off with the distance of two pixels as a Gaussian does, one for each head, and are
    larger by a factor of exp(`DRAWN`) for pixels that are drawn.

    Of the square of the distance, what the softmax does not see left out, remains the product of two positions and the
    square of one. With the factor these take five numbers of each query and key, which bfloat16 holds without rounding:
    positions are integers below 256, squares are two such numbers, and all factors are powers of two. `drawn` (images,
    tokens) has to be set before a call. What is learnt of queries and keys counts by 1 / head_dim, not by
    its root: with the root, training came off its way again and again.
    """

    def __init__(self, names: Names, side: int, head_dim: int, dtype: Any = None, masked: bool = False) -> None:
        xp = names["xp"]
        masks = {"block_mask": xp.asarray(neighbourhoods(side))} if masked else {}
        self.inner = names["Cuflash"](dtype, causal=False, **masks)
        self.q, self.k = (xp.asarray(x, np.float32) for x in self.positions(side, head_dim))
        self.scale = head_dim**-0.5  # besides that of attention
        self.drawn: Any = 0

    @staticmethod
    def positions(side: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """The last numbers of queries (tokens, heads, 5), and those of keys before `drawn`, (tokens, 1, 4)."""
        position = order(side) - side // 2
        high, low = np.divmod((position**2).sum(axis=1), 256)
        k = np.column_stack([position, -128 * high, -low / 2])
        factors = (32 / side / np.array(RANGES)) ** 2
        q = np.column_stack([position, np.ones_like(position)])[:, None] * factors[:, None]
        bonus = np.full((*q.shape[:2], 1), DRAWN)
        return head_dim**0.5 * np.concatenate([q, bonus], axis=2), k[:, None]

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        q *= self.scale
        q[..., -5:], k[..., -5:-1], k[..., -1] = self.q, self.k, self.drawn[..., None]
        return self.inner.forward(q, k, v)

    def backward(self, dout: Any, saved: Any) -> tuple[Any, Any, Any]:
        dq, dk, dv = self.inner.backward(dout, saved)
        dq *= self.scale
        dq[..., -5:] = dk[..., -5:] = 0
        return dq, dk, dv


def new_parameters(names: Names, study: Study, seed: int = 0, dtype: Any = np.float32) -> Names:
    around = {"embed": (NUMBERS, study.width), "head": (study.width, OUTPUTS)}
    inner = len(RANGES) * study.head_dim
    p = names["new_parameters"](seed, study.width, study.blocks, dtype=dtype, around=around, inner=inner)
    return p | {"embed": EMBEDDED * p["embed"]}


def answers(names: Names, p: Names, pixels: Any, attention: Any) -> tuple[Any, Any, Any]:
    """A number for each image, positive where the ends seem to be linked; numbers of pixels, and what gradients
    need."""
    xp = names["xp"]
    dtype = p["embed"].dtype
    at = features(xp, pixels, dtype)
    attention.drawn = drawn = at[..., -1]
    n, saved = names["forward"](p, at @ p["embed"], attention, len(RANGES))
    outputs = n @ p["head"]
    fraction = drawn / drawn.sum(axis=1, keepdims=True)
    return (outputs[..., 0] * fraction).sum(axis=1), outputs, (at, n, saved, fraction)


def loss_and_gradients(names: Names, p: Names, images: Images, attention: Any) -> tuple[Any, Any, Names]:
    """Cross entropies of the answers and of the outputs for pixels, how many answers are right, gradients."""
    xp = names["xp"]
    answer, outputs, (at, n, saved, fraction) = answers(names, p, images.pixels, attention)
    linked, positions = xp.asarray(images.linked), order(images.pixels.shape[1])
    marked = xp.asarray(images.marked[:, positions[:, 0], positions[:, 1]])
    outputs = xp.concatenate([xp.broadcast_to(answer[:, None, None], (*fraction.shape, 1)), outputs[..., 1:]], axis=-1)
    truth = xp.stack([xp.broadcast_to(linked[:, None], fraction.shape), marked, marked & linked[:, None]], axis=-1)
    weight = fraction[..., None] / len(answer)
    loss = (weight * (xp.logaddexp(0, outputs) - outputs * truth)).sum()
    slopes = weight * (1 / (1 + xp.exp(-outputs)) - truth)
    g: Names = {}
    dn = names["linear_gradient"](p, g, "head", slopes.astype(n.dtype), n)
    dx = names["backward"](p, g, dn, saved, attention, len(RANGES))
    names["linear_gradient"](p, g, "embed", dx, at)
    return loss, ((answer > 0) == linked).sum(), g


# ---- Learning --------------------------------------------------------------------------------------------------------


@dataclass
class Supply:
    """Images ahead of time, by processes that draw nothing else; without any, when they are asked for."""

    workers: int
    pool: ProcessPoolExecutor | None = field(init=False, default=None)

    def __enter__(self) -> Supply:
        if self.workers:
            self.pool = ProcessPoolExecutor(self.workers, mp_context=get_context("spawn"))
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def fresh(self, drawing: Drawing, count: int) -> Callable[[], Images]:
        """What waits for images that training does not see."""
        seed = (drawing.side, -1 % 2**32, count)
        if self.pool is None:
            return functools.cache(functools.partial(make_images, drawing, count, seed))
        return self.pool.submit(make_images, drawing, count, seed).result

    def batches(self, lesson: Callable[[], Drawing], batch: int) -> Iterator[Images]:
        """Batches without end, of the lesson at the time they were begun."""
        pending = list[Future[Images]]()
        try:
            for number in itertools.count():
                drawing = lesson()
                seed = (drawing.side, number)
                if self.pool is None:
                    images = make_images(drawing, batch, seed)
                else:
                    at_once = max(batch, 2**17 // drawing.side**2 // batch * batch)
                    pending.append(self.pool.submit(make_images, drawing, at_once, seed))
                    if len(pending) < AHEAD * self.workers:
                        continue
                    images = pending.pop(0).result()
                for first in range(0, len(images.linked), batch):
                    yield images[first : first + batch]
        finally:
            for future in pending:
                future.cancel()


def learn(
    names: Names, p: Names, task: Task, attention: Any, supply: Supply, rate: float, is_first: bool
) -> tuple[list[list[float]], int]:
    """Train `p` in place for the seconds of a task; (seconds, loss, part of answers that are right) now and then, and
    how many images were seen. The clock runs from the second step on: the first one compiles."""
    start, state, log, step = math.inf, names["zeros_of"](p), [], 0
    right, seen = names["xp"].zeros(()), 0

    def progress() -> float:
        return max((time.perf_counter() - start) / task.seconds, step / task.most_steps, 0.0)

    for images in supply.batches(lambda: task.lesson(progress(), is_first), task.batch):
        step += 1
        loss, count, g = loss_and_gradients(names, p, images, attention)
        now = rate * max(0.05, 1 - progress()) * min(1, step / WARM_UP)
        names["update"](p, clipped(names, g), state, step, now)
        right, seen = right + count, seen + task.batch
        if step % LOGGED == 0 or step == 1:
            shown = float(loss), float(right) / seen  # waits for the device
            if step == 1:
                start = time.perf_counter()
            log.append([time.perf_counter() - start, *shown])
            right, seen = 0 * right, 0
            if progress() >= 1:
                break
    return log, step * task.batch


def clipped(names: Names, g: Names) -> Names:
    """Gradients as short as `LONGEST` together."""
    xp = names["xp"]
    length = xp.sqrt(sum((x * x).sum() for x in g.values()))
    factor = xp.minimum(1, LONGEST / length)
    return {name: x * factor for name, x in g.items()}


def accuracy(names: Names, p: Names, task: Task, attention: Any, images: Images) -> int:
    """How many answers are right."""
    right = 0
    for first in range(0, len(images.linked), task.batch):
        some = images[first : first + task.batch]
        answer = answers(names, p, some.pixels, attention)[0]
        right += int(((answer > 0) == names["xp"].asarray(some.linked)).sum())
    return right


# ---- The suite -------------------------------------------------------------------------------------------------------


def measure(backend: str, write: Callable[..., None], scale: float = 1.0, study: Study | None = None) -> None:
    """Write a record for each length that was learnt, and two for the times of its steps.

    `scale` is what the seconds of learning and the numbers of fresh images are multiplied by.
    """
    study = study or STUDIES[backend]
    if backend == "gpu":
        os.environ.setdefault("CUPY_TF32", "1")  # of the products of the model, for those that CuPy starts from now on
    names = run_page(PAGE, "cupy" if backend == "gpu" else "numpy")
    p = new_parameters(names, study)
    with Supply(min(12, cores() - 2) if backend == "gpu" else 0) as supply:
        tasks = [
            replace(x, seconds=scale * x.seconds, trials=max(x.batch, round(scale * x.trials))) for x in study.tasks
        ]
        fresh = [supply.fresh(task.drawing, task.trials) for task in tasks]
        with Bar("pathfinder", total=len(tasks)) as bar:
            for task, images in zip(tasks, fresh, strict=True):
                attention = Near(names, task.side, study.head_dim, study.dtype, task.masked)
                is_first = task is tasks[0]
                before = None if is_first else accuracy(names, p, task, attention, images())
                log, seen = learn(
                    names, p, task, attention, supply, study.rate * math.sqrt(task.batch / BATCH), is_first
                )
                right = accuracy(names, p, task, attention, images())
                drawing = task.drawing
                of_curves = {"length": drawing.length(drawing.dashes), "dash": drawing.dash, "gap": drawing.gap}
                of_model = {
                    "width": study.width,
                    "blocks": study.blocks,
                    "heads": len(RANGES),
                    "head_dim": study.head_dim,
                }
                of_task = {"side": task.side, "tokens": task.side**2, "batch": task.batch}
                found = {"trials": task.trials, "right": right, "right_before": before, "images": seen, "log": log}
                sizes = of_model | {"dtype": np.dtype(study.dtype or np.float32).name}
                write("accuracy", **of_task, masked=task.masked, **found, sizes=sizes, curves=of_curves)
                bar.print(f"{task.side} x {task.side}: {seen} images, {right} of {task.trials} right")
                for masked in (True, False) if study.timed else ():
                    times = _times(names, p, task, study, supply, masked)
                    write("step", **of_task, masked=masked, sizes=sizes, **times)
                    bar.print(f"{task.side} x {task.side}: {times}")
                bar.advance()


def _times(names: Names, p: Names, task: Task, study: Study, supply: Supply, masked: bool) -> Record:
    """Milliseconds of a step on one batch, and of the attention in it."""
    xp, blocks = names["xp"], study.blocks
    attention, state = Near(names, task.side, study.head_dim, study.dtype, masked), names["zeros_of"](p)
    images, trial = next(supply.batches(lambda: task.drawing, task.batch)), dict(p)
    shape = (task.batch, task.side**2, len(RANGES), study.head_dim)
    q, k, v, dout = (xp.asarray(np.random.default_rng(i).standard_normal(shape, np.float32)) for i in range(4))
    answers(names, trial, images.pixels, attention)  # says what is drawn

    def step() -> None:
        _, _, g = loss_and_gradients(names, trial, images, attention)
        names["update"](trial, clipped(names, g), state, 1, 0.0)

    def attend() -> None:
        for _ in range(blocks):
            _, saved = attention.forward(q.copy(), k, v)  # it writes into q
            attention.backward(dout, saved)

    step_ms, attention_ms = (milliseconds(xp, call) for call in (step, attend))
    visible = float(neighbourhoods(task.side).mean()) if masked else 1.0
    return {"visible": visible, "step_ms": step_ms, "attention_ms": attention_ms}


def standard_error(right: int, trials: int) -> float:
    """Of the part of answers that are right, by the binomial distribution."""
    return math.sqrt(right / trials * (1 - right / trials) / trials)


def markdown(records: Sequence[Record]) -> str:
    """A table of accuracies, and one of times."""
    found = [r for r in records if r["record"] == "accuracy"]
    if not found:
        return "No length was learnt to its end."
    sizes = ", ".join(f"{name} {x}" for name, x in found[0]["sizes"].items())
    lines = [
        f"The part of answers that are right on fresh images, with its standard error; chance is 0.5 ({sizes}):",
        "",
        "| image | tokens | a long curve, pixels | images seen | seconds | as the length before left it | learnt |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found:
        image = f"{r['side']} x {r['side']}" + (", block mask" if r["masked"] else "")
        cells = (r["tokens"], r["curves"]["length"], r["images"], f"{r['log'][-1][0]:.0f}")
        shown = [_accuracy(r["right_before"], r["trials"]), _accuracy(r["right"], r["trials"])]
        lines.append(f"| {image} | {' | '.join(map(str, (*cells, *shown)))} |")
    steps = {(r["tokens"], r["masked"]): r for r in records if r["record"] == "step"}
    if steps:
        lines += [
            "",
            "Milliseconds of a step, and of the attention in it, with every pair of tokens and with the block mask:",
            "",
            "| tokens | batch | visible blocks | step, all pairs / mask | attention, all pairs / mask |",
            "|---|---|---|---|---|",
        ]
    for tokens in dict.fromkeys(tokens for tokens, _ in steps):
        pair = [steps.get((tokens, masked)) for masked in (False, True)]
        one = pair[1] or pair[0] or {}
        times = [" / ".join(f"{r[name]:.3g}" if r else "-" for r in pair) for name in ("step_ms", "attention_ms")]
        lines.append(f"| {tokens} | {one['batch']} | {one['visible']:.0%} | {' | '.join(times)} |")
    return "\n".join(lines)


def _accuracy(right: int | None, trials: int) -> str:
    return "-" if right is None else f"{right / trials:.3f} ± {standard_error(right, trials):.3f}"


def draw(plt: Any, records: Sequence[Record], path: Path) -> None:
    """What is right while the model learns, on fresh images, and what a step takes."""
    found = [r for r in records if r["record"] == "accuracy"]
    with plt.rc_context(RC):
        figure, (learning, fresh, times) = plt.subplots(1, 3, figsize=(9.5, 3), layout="constrained")
        for r, colour in zip(found, ("#30638e", "#edae49", "#2e7d32", "#8d6a9f"), strict=False):
            log = np.array(r["log"])
            width = max(1, len(log) // 40)
            ends = np.arange(width, len(log) + 1, width)
            means = [log[end - width : end, 2].mean() for end in ends]
            learning.plot(log[ends - 1, 0], means, color=colour, label=f"{r['side']} x {r['side']}")
        learning.set(xlabel="seconds", ylabel="right, on images of training", ylim=(0.4, 1.02))
        learning.legend(frameon=False)
        right = [r["right"] / r["trials"] for r in found]
        errors = [2 * standard_error(r["right"], r["trials"]) for r in found]
        fresh.errorbar([r["tokens"] for r in found], right, yerr=errors, fmt="o-", color=COLOURS["cuflash"], capsize=3)
        fresh.axhline(0.5, color=COLOURS["naive"], linestyle="--", linewidth=1)
        fresh.set(xscale="log", xlabel="tokens", ylabel="right, two standard errors", ylim=(0.4, 1.02))
        for masked, style, name in ((False, "o--", "all pairs"), (True, "o-", "block mask")):
            steps = [r for r in records if r["record"] == "step" and r["masked"] == masked]
            for what, colour in (("step", "#30638e"), ("attention", COLOURS["cuflash"])):
                points = [r["tokens"] for r in steps], [r[f"{what}_ms"] for r in steps]
                times.loglog(*points, style, color=colour, markersize=3, label=f"{what}, {name}")
        times.set(xlabel="tokens", ylabel="milliseconds")
        times.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
