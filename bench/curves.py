"""Images of the Pathfinder task: do two marked ends belong to one dashed curve?

The task is that of Linsley and others (2018), https://arxiv.org/abs/1805.08315, in the sizes of the Long Range Arena;
the generator is our own. An image has two long curves, and short ones that distract. All are dashed and end on dashes;
two ends of the long ones have marks. Pixels of one curve are linked over at most `reach` pixels, those of different
curves lie farther apart, so the answer is in the image. No statistic of the marks gives it away: both long curves have
one length, and an image is kept only where a linked pair of ends and one that is not linked are as far apart as each
other, within `tolerance`; a coin says which pair gets the marks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CANDIDATES = 12  # curves that are tried for each place
STEPS = 2  # points of a curve for each pixel of its length
BEND = 1.2  # standard deviation of both coefficients of the angle along a curve, in radians
LEAST = 4096  # candidates of images that are drawn at once have at least so many pixels in all

Array = NDArray[Any]


@dataclass(frozen=True)
class Drawing:
    """What is drawn: images of `side` pixels squared, long curves of so many dashes, and so many short ones besides.

    All lengths grow with `side`, but for the width of a line, which is one pixel.
    """

    side: int
    dashes: int = 4
    distractors: int = 2

    def __post_init__(self) -> None:
        if self.side < 16 or self.side & (self.side - 1):
            raise ValueError(f"side: got {self.side}, expected a power of two of at least 16")
        if self.length(self.dashes) <= self.least:
            raise ValueError(f"dashes: got {self.dashes}, expected more (the marks of a curve need a distance)")
        if self.length(self.dashes) > self.side - 1 - 2 * self.margin:
            raise ValueError(f"dashes: got {self.dashes}, expected fewer (a straight curve has to fit into the image)")
        if self.distractors < 0:
            raise ValueError(f"distractors: got {self.distractors}, expected at least 0")

    @property
    def dash(self) -> int:
        return max(2, 3 * self.side // 32)

    @property
    def gap(self) -> int:
        return 2 * self.side // 32

    @property
    def reach(self) -> int:
        """How far apart two pixels of one curve may be, along either axis, that are linked."""
        return self.gap + 1

    @property
    def mark(self) -> int:
        """Pixels of a mark on each side of its middle."""
        return max(1, self.side // 32)

    @property
    def margin(self) -> int:
        """Pixels at the edges of an image that no curve reaches."""
        return self.mark + 1

    @property
    def tolerance(self) -> float:
        return self.side / 16

    @property
    def least(self) -> float:
        """The distance of two ends from which on their marks are not linked across."""
        return math.sqrt(2) * (self.reach + 2 * self.mark)

    def outline(self) -> Array:
        """The pixels of a mark, a hollow square, as rows and columns from its middle: as many as a line would have."""
        around = np.arange(-self.mark, self.mark + 1)
        square = np.stack(np.meshgrid(around, around, indexing="ij"), axis=-1).reshape(-1, 2)
        return square[np.abs(square).max(axis=1) == self.mark]

    def length(self, dashes: int) -> int:
        """Of a curve, from its first pixel to its last."""
        return dashes * (self.dash + self.gap) - self.gap - 1


@dataclass(frozen=True)
class Images:
    """`pixels` (images, side, side) are 0 and 1, `linked` (images,) says whether one curve has both marks, `marked` is
    True on the curves that have a mark, and `ends` (images, 2, 2) are the rows and columns of both marks."""

    pixels: Array
    linked: Array
    marked: Array
    ends: Array

    def __getitem__(self, which: Any) -> Images:
        return Images(self.pixels[which], self.linked[which], self.marked[which], self.ends[which])


def make_images(drawing: Drawing, count: int, seed: int | tuple[int, ...]) -> Images:
    """So many images; the same ones for the same seed."""
    rng, found_images, found = np.random.default_rng(seed), [], 0
    at_once = max(2 * count, LEAST // drawing.side**2 + 1)
    while found < count:
        found_images.append(_candidates(drawing, at_once, rng))
        found += len(found_images[-1].linked)
    fields = (
        np.concatenate([getattr(images, name) for images in found_images])[:count] for name in Images.__annotations__
    )
    return Images(*fields)


def _candidates(drawing: Drawing, count: int, rng: np.random.Generator) -> Images:
    """Those of so many images for which both long curves found a place and two pairs of ends are alike."""
    blocked = np.zeros((count, drawing.side, drawing.side), bool)
    long = drawing.length(drawing.dashes)
    (first, one_free), (second, other_free) = (_place(drawing, blocked, long, rng) for _ in range(2))
    swapped = (rng.random(count) < 0.5)[:, None, None]  # which of both was drawn first is not to be told
    first, second = np.where(swapped, second, first), np.where(swapped, first, second)
    ends = [x[:, [0, -1]] for x in (first, second)]
    own = _distance(ends[0][:, 0], ends[0][:, 1])
    others = np.stack([_distance(ends[0][:, i], ends[1][:, j]) for i in (0, 1) for j in (0, 1)], axis=1)
    best = np.abs(others - own[:, None]).argmin(axis=1)
    rows = np.arange(count)
    apart = np.minimum(own, others[rows, best])
    alike = np.abs(others[rows, best] - own) <= drawing.tolerance
    keep = np.flatnonzero(one_free & other_free & alike & (apart > drawing.least))
    first, second, best, rows, blocked = (x[keep] for x in (first, second, best, rows, blocked))

    linked = rng.random(len(keep)) < 0.5
    rows = np.arange(len(keep))
    one = np.where(linked[:, None], first[:, 0], first[rows, -(best // 2)])
    other = np.where(linked[:, None], first[:, -1], second[rows, -(best % 2)])
    pixels, marked = (np.zeros((len(keep), drawing.side, drawing.side), bool) for _ in range(2))
    for points, shown in ((first, rows >= 0), (second, ~linked)):
        _draw(drawing, pixels, points, rows)
        _draw(drawing, marked, points[shown], rows[shown])
    for _ in range(drawing.distractors):
        short, is_free = _place(drawing, blocked, drawing.length(max(1, drawing.dashes // 3)), rng)
        _draw(drawing, pixels, short[is_free], rows[is_free])
    around = drawing.outline()
    for end in (one, other):
        at = rows[:, None], end[:, :1] + around[:, 0], end[:, 1:] + around[:, 1]
        pixels[at], marked[at] = True, True
    return Images(pixels.astype(np.uint8), linked, marked, np.stack([one, other], axis=1))


def _distance(a: Array, b: Array) -> Array:
    return np.sqrt(((a - b) ** 2).sum(axis=-1))


def _place(drawing: Drawing, blocked: Array, length: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """A curve of this length for each image, as points (images, points, 2), where `blocked` leaves it space, and
    whether
    it does; these are blocked from then on, with all that is too near."""
    count, side, margin = len(blocked), drawing.side, drawing.margin
    along = np.linspace(0, 1, STEPS * length + 1)
    angle, bend, turn = (rng.normal(0, x, (count, CANDIDATES, 1)) for x in (7.0, BEND, BEND))
    angle = angle + (bend + turn * along) * along
    step = np.stack([np.sin(angle), np.cos(angle)], axis=-1)[:, :, :-1] / STEPS
    points = np.concatenate([np.zeros_like(step[:, :, :1]), np.cumsum(step, axis=2)], axis=2)
    low, high = points.min(axis=2, keepdims=True), points.max(axis=2, keepdims=True)
    space = side - 1 - 2 * margin - (high - low)
    corner = margin + np.maximum(space, 0) * rng.random(space.shape)
    points = np.clip(np.rint(points - low + corner), 0, side - 1).astype(np.int64)
    fits = (space >= 0).all(axis=(2, 3))
    rows = np.arange(count)
    fits &= ~blocked[rows[:, None, None], points[..., 0], points[..., 1]].any(axis=2)
    points = points[rows, fits.argmax(axis=1)]
    taken = np.zeros_like(blocked)
    taken[rows[:, None], points[..., 0], points[..., 1]] = fits.any(axis=1)[:, None]
    blocked |= dilated(taken, drawing.reach + drawing.mark)
    return points, fits.any(axis=1)


def _draw(drawing: Drawing, onto: Array, points: Array, rows: Array) -> None:
    """The dashes of a curve in each of the images `rows`."""
    offset = np.arange(points.shape[1]) % (STEPS * (drawing.dash + drawing.gap))
    on = points[:, offset <= STEPS * (drawing.dash - 1)]
    onto[rows[:, None], on[..., 0], on[..., 1]] = True


def dilated(images: Array, radius: int) -> Array:
    """True within so many pixels, along either axis, of what is; a run doubles until it is as long as that."""
    for axis in (1, 2):
        images = np.moveaxis(images, axis, 2)
        size = images.shape[2]
        wide = np.zeros((*images.shape[:2], size + 2 * radius), bool)
        wide[..., :size], run = images, 1
        while run < 2 * radius + 1:
            shift = min(run, 2 * radius + 1 - run)
            wide[..., shift:] |= wide[..., :-shift].copy()
            run += shift
        images = np.moveaxis(wide[..., radius : radius + size], 2, axis)
    return images
