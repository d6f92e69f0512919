"""Scores and masks that are functions, in the words of cuflash and of FlexAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cuflash

Arrays = Mapping[str, Any]
DOCUMENTS = 8  # of a sequence, equally long
BUCKETS, NEAR, FAR = 32, 8, 128  # of T5: half of them for each side; from which distance on they grow, and end
ROOM = 1e-3  # so that rounding does not decide about the bucket of a distance at which one begins


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function. `shapes` are those of the arrays that it reads, of ("heads", "seqlen", or a number) each.

    `flex` makes FlexAttention's function of PyTorch and the arrays.
    """

    about: str
    traced: Callable[..., Any]
    flex: Callable[[Any, Arrays], Callable[..., Any]]
    shapes: Mapping[str, tuple[str | int, ...]]
    is_mask: bool = False

    def sized(self, heads: int, seqlen: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays of a problem."""
        lengths: dict[str | int, int] = {"heads": heads, "seqlen": seqlen}
        return {name: tuple(lengths.get(n) or int(n) for n in axes) for name, axes in self.shapes.items()}

    @property
    def gradients(self) -> tuple[str, ...]:
        """Those of arrays of real numbers."""
        return () if self.is_mask else tuple(f"d{name}" for name in self.shapes)


def _distance(s: Any, i: Any, j: Any, *, head: Any, pos: Any, slopes: Any) -> Any:
    r2 = (pos[i, 0] - pos[j, 0]) ** 2 + (pos[i, 1] - pos[j, 1]) ** 2
    return s - slopes[head] * cuflash.sqrt(r2 + 1e-6)


def _distance_flex(torch: Any, x: Arrays) -> Callable[..., Any]:
    pos, slopes = x["pos"], x["slopes"]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        dx, dy = pos[i, 0] - pos[j, 0], pos[i, 1] - pos[j, 1]
        return s - slopes[h] * torch.sqrt(dx * dx + dy * dy + 1e-6)

    return score


def _box(s: Any, i: Any, j: Any, *, place: Any) -> Any:
    d = place[i] - place[j]
    return s - (d - cuflash.floor(d + 0.5)) ** 2


def _box_flex(torch: Any, x: Arrays) -> Callable[..., Any]:
    place = x["place"]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        d = place[i] - place[j]
        nearest = d - torch.floor(d + 0.5)
        return s - nearest * nearest

    return score


def _t5(s: Any, i: Any, j: Any, *, head: Any, table: Any) -> Any:
    n, half = cuflash.abs(i - j), BUCKETS // 2
    far = NEAR + cuflash.floor(cuflash.log(cuflash.maximum(n, 1) / NEAR) / math.log(FAR / NEAR) * (half - NEAR) + ROOM)
    return s + table[head, cuflash.where(n < NEAR, n, cuflash.minimum(far, half - 1)) + cuflash.where(j > i, half, 0)]


def _t5_flex(torch: Any, x: Arrays) -> Callable[..., Any]:
    table, half = x["table"], BUCKETS // 2

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        n = (i - j).abs()
        far = NEAR + (torch.log(n.clamp(min=1) / NEAR) / math.log(FAR / NEAR) * (half - NEAR) + ROOM).to(torch.int32)
        return s + table[h, torch.where(n < NEAR, n, far.clamp(max=half - 1)) + torch.where(j > i, half, 0)]

    return score


def _documents(i: Any, j: Any, *, document: Any) -> Any:
    return document[i] == document[j]


def _documents_flex(torch: Any, x: Arrays) -> Callable[..., Any]:
    document = x["document"]
    return lambda b, h, i, j: document[i] == document[j]


FUNCTIONS: Mapping[str, Function] = {
    "distance": Function(
        about="a slope times the distance of two points in the plane",
        traced=_distance,
        flex=_distance_flex,
        shapes={"pos": ("seqlen", 2), "slopes": ("heads",)},
    ),
    "box": Function(
        about="the squared distance in a periodic box",
        traced=_box,
        flex=_box_flex,
        shapes={"place": ("seqlen",)},
    ),
    "t5": Function(
        about="a table of T5's buckets of distances",
        traced=_t5,
        flex=_t5_flex,
        shapes={"table": ("heads", BUCKETS)},
    ),
    "documents": Function(
        about=f"{DOCUMENTS} documents, each of which sees itself alone",
        traced=_documents,
        flex=_documents_flex,
        shapes={"document": ("seqlen",)},
        is_mask=True,
    ),
}
