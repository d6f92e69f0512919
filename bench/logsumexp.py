"""logsumexp without values: Sinkhorn's algorithm and kernel densities, by cuflash and by others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import cuflash
from cuflash.gpu.progress import Bar

from .contender import Absent
from .report import COLOURS, RC, Record
from .timing import LEAD_S, Clock, CudaClock, HostClock, time_interleaved

CHECKED_ROWS = 64  # against the formula in float64
BLOCK_BYTES = 2**28  # of scores that a dense contender has at a time
LARGEST_ERROR = {"highest": 0.02, "tf32": 0.5}  # of a score, absolute: more is a wrong result
# lse of (x, y, scale, bias): the logarithm of sum_j exp(scale * x_i . y_j + bias_j)
Lse = Callable[[Any, Any, float, Any], Any]
Call = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`rows` points x and `columns` points y, uniform in a cube of `dim` dimensions.

    sinkhorn: `steps` alternating steps between both clouds, each of which updates both potentials; the cost is
    ``|x - y|**2 / 2``, and `width` the square root of the regularisation. density: the logarithm of the density at all
    x, a mean of Gaussians of that width around all y.
    """

    what: str
    rows: int
    columns: int
    dim: int
    width: float
    dtype: str = "float32"
    steps: int = 10

    @property
    def name(self) -> str:
        short = {"float32": "fp32", "float64": "fp64"}[self.dtype]
        return f"{self.what}-{short}-d{self.dim}-n{self.rows}m{self.columns}"

    @property
    def pairs(self) -> int:
        """Scores that are computed."""
        return self.rows * self.columns * (2 * self.steps if self.what == "sinkhorn" else 1)


DENSITY = Case(what="density", rows=2**20, columns=2**17, dim=16, width=0.25)
CASES = {
    "gpu": (
        Case(what="sinkhorn", rows=50_000, columns=50_000, dim=64, width=0.3),
        Case(what="sinkhorn", rows=50_000, columns=50_000, dim=3, width=0.1),
        DENSITY,
    ),
    "cpu": (
        Case(what="sinkhorn", rows=2048, columns=2048, dim=3, width=0.1),
        replace(DENSITY, rows=2**9, columns=2**14),
        replace(DENSITY, rows=2**9, columns=2**14, dtype="float64"),
    ),
}


# ---- The problems ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """The points of a case, on the host and where they are computed."""

    case: Case
    xp: Any
    host: tuple[Any, Any]
    x: Any
    y: Any

    @classmethod
    def of(cls, case: Case, xp: Any) -> Points:
        rng = np.random.default_rng(0)
        host = tuple(rng.random((n, case.dim)).astype(case.dtype) for n in (case.rows, case.columns))
        x, y = (xp.asarray(points) for points in host)
        return cls(case, xp, (host[0], host[1]), x, y)


def sinkhorn(points: Points, lse: Lse) -> Call:
    """The call that computes both potentials, in the order f, g.

    f_i = -eps * logsumexp_j((g_j - cost_ij) / eps - log(columns)), and likewise g. With u = (f - |x|^2 / 2) / eps in
    place of f, and v of g, that is u = -lse(x . y / eps + v - log(columns)): a bias of the other points' potentials.
    """
    case, xp, x, y = points.case, points.xp, points.x, points.y
    eps = case.width**2
    half_x, half_y = ((p * p).sum(axis=1) / 2 for p in (x, y))
    log_rows, log_columns = (x.dtype.type(np.log(n)) for n in (case.rows, case.columns))

    def call() -> tuple[Any, Any]:
        u, v = xp.empty_like(half_x), -half_y / eps
        for _ in range(case.steps):
            u = -lse(x, y, 1 / eps, v - log_columns)
            v = -lse(y, x, 1 / eps, u - log_rows)
        return half_x + eps * u, half_y + eps * v

    return call


def density(points: Points, lse: Lse) -> Call:
    """The call that computes the logarithm of the density at each x."""
    case, x, y = points.case, points.x, points.y
    scale = case.width**-2
    half_x, half_y = ((p * p).sum(axis=1) / 2 for p in (x, y))
    constant = _log_norm(case)

    def call() -> tuple[Any]:
        return (lse(x, y, scale, -scale * half_y) - (scale * half_x + constant),)

    return call


def _log_norm(case: Case) -> float:
    return float(np.log(case.columns) + case.dim / 2 * np.log(2 * np.pi * case.width**2))


DRIVERS = {"sinkhorn": sinkhorn, "density": density}


def error(case: Case, host: tuple[Any, Any], results: Sequence[Any], first: Sequence[Any]) -> float:
    """The largest error of a score, of some rows: against the formula in float64, and of f against the first result."""
    x, y = (p.astype(np.float64) for p in host)
    if case.what == "density":
        exact = _logsumexp(np, -_costs(x[:CHECKED_ROWS], y) / case.width**2) - _log_norm(case)
        return float(abs(results[0][:CHECKED_ROWS] - exact).max())
    (f, g), eps = (p.astype(np.float64) for p in results), case.width**2
    exact = -eps * _logsumexp(np, (f - _costs(y[:CHECKED_ROWS], x)) / eps - np.log(case.rows))
    return float(max(abs(g[:CHECKED_ROWS] - exact).max(), abs(f - first[0]).max()) / eps)


def _costs(x: Any, y: Any) -> Any:
    """Half of the squared distances."""
    return ((x * x).sum(axis=1)[:, None] + (y * y).sum(axis=1)) / 2 - x @ y.T


def _logsumexp(xp: Any, scores: Any) -> Any:
    """In place."""
    largest = scores.max(axis=1)
    scores -= largest[:, None]
    return xp.log(xp.exp(scores, out=scores).sum(axis=1)) + largest


# ---- The contenders --------------------------------------------------------------------------------------------------


def _cuflash(points: Points, precision: Literal["highest", "tf32"] = "highest") -> Call:
    if precision == "tf32" and (points.xp is np or points.case.dtype != "float32"):
        raise Absent("is for float32 on a GPU")

    def lse(x: Any, y: Any, scale: float, bias: Any) -> Any:
        return cuflash.logsumexp(x, y, scale=scale, bias=bias[None], precision=precision)

    return DRIVERS[points.case.what](points, lse)


def _dense(points: Points) -> Call:
    """The scores of as many rows at a time as a block has, by a matrix product."""
    xp = points.xp

    def lse(x: Any, y: Any, scale: float, bias: Any) -> Any:
        rows = max(1, BLOCK_BYTES // (len(y) * x.dtype.itemsize))
        result = xp.empty(len(x), x.dtype)
        for first in range(0, len(x), rows):
            scores = x[first : first + rows] @ y.T
            scores *= x.dtype.type(scale)
            scores += bias
            result[first : first + rows] = _logsumexp(xp, scores)
        return result

    return DRIVERS[points.case.what](points, lse)


def _scipy(points: Points) -> Call:
    """logsumexp of cdist, as many rows at a time as a block has."""
    case = points.case
    if points.xp is not np or case.what != "density":
        raise Absent("is run for densities on a CPU")
    cdist = _module("scipy.spatial.distance").cdist
    logsumexp = _module("scipy.special").logsumexp
    rows, scale = max(1, BLOCK_BYTES // (8 * case.columns)), -0.5 * case.width**-2

    def call() -> tuple[Any]:
        blocks = (points.x[first : first + rows] for first in range(0, case.rows, rows))
        values = [logsumexp(scale * cdist(block, points.y, "sqeuclidean"), axis=1) for block in blocks]
        return (np.concatenate(values) - _log_norm(case),)

    return call


def _scikit_learn(points: Points) -> Call:
    """Exact by its defaults: both tolerances are 0. The tree is built beforehand."""
    case = points.case
    if points.xp is not np or case.what != "density":
        raise Absent("is run for densities on a CPU")
    fitted = _module("sklearn.neighbors").KernelDensity(bandwidth=case.width).fit(points.y)
    return lambda: (fitted.score_samples(points.x),)


def _keops(points: Points) -> Call:
    if points.xp is np:
        raise Absent("is run on a GPU")
    torch, lazy = _module("torch"), _module("pykeops.torch").LazyTensor

    def lse(x: Any, y: Any, scale: float, bias: Any) -> Any:
        x_i, y_j, bias_j = (torch.from_dlpack(a) for a in (x, y, bias))
        scores = (lazy(x_i[:, None]) * lazy(y_j[None])).sum(-1) * scale + lazy(bias_j[None, :, None])
        return points.xp.from_dlpack(scores.logsumexp(1)[:, 0])

    return DRIVERS[points.case.what](points, lse)


def _flash_sinkhorn(points: Points, allow_tf32: bool = False) -> Call:
    case = points.case
    if points.xp is np or case.what != "sinkhorn":
        raise Absent("is run for Sinkhorn's algorithm on a GPU")
    torch = _module("torch")
    solve = _module("flash_sinkhorn.sinkhorn_solvers").sinkhorn_flashstyle_alternating
    x, y = (torch.from_dlpack(p) for p in (points.x, points.y))
    a, b = (torch.full((n,), 1 / n, device="cuda") for n in (case.rows, case.columns))

    def call() -> tuple[Any, ...]:
        options = {"eps": case.width**2, "n_iters": case.steps, "cost_scale": 0.5, "allow_tf32": allow_tf32}
        return tuple(points.xp.from_dlpack(p) for p in solve(x, y, a, b, **options))

    return call


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise Absent(f"{name.partition('.')[0]} is not installed") from missing


CONTENDERS: dict[str, Callable[[Points], Call]] = {
    "cuflash": _cuflash,
    "cuflash, TF32": lambda points: _cuflash(points, "tf32"),
    "dense": _dense,
    "SciPy": _scipy,
    "scikit-learn": _scikit_learn,
    "KeOps": _keops,
    "flash-sinkhorn": _flash_sinkhorn,
    "flash-sinkhorn, TF32": lambda points: _flash_sinkhorn(points, allow_tf32=True),
}


# ---- Measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Where points are, and how calls are timed."""

    xp: Any
    to_numpy: Callable[[Any], Any]
    clock: Clock

    @classmethod
    def of(cls, backend: str) -> Machine:
        if backend == "cpu":
            return cls(np, np.asarray, HostClock(LEAD_S))
        cupy: Any = importlib.import_module("cupy")
        return cls(cupy, cupy.asnumpy, CudaClock())


def measure(
    write: Callable[..., None], machine: Machine, cases: Iterable[Case], budget_s: float = 0.5, limit_s: float = 10.0
) -> None:
    """Write a record for each contender of each case. Those with wrong results are not timed."""
    cases = list(cases)
    with Bar("logsumexp", total=len(cases)) as bar:
        for case in cases:
            points = Points.of(case, machine.xp)
            found, calls = _checked(points, machine)
            times = time_interleaved(calls, machine.clock, budget_s=budget_s, limit_s=limit_s, at_most=20)
            for name, fields in found.items():
                timed = {"us": times[name].median_us, "repeats": times[name].repeats} if name in times else {}
                write("logsumexp", case=case.name, pairs=case.pairs, contender=name, **fields, **timed)
            bar.print(case.name)
            bar.advance()


def _checked(points: Points, machine: Machine) -> tuple[dict[str, Record], dict[str, Call]]:
    """What is known of each contender before it is timed, and the calls of those that are right."""
    found: dict[str, Record] = {}
    calls: dict[str, Call] = {}
    first: list[Any] = []
    for name, make in CONTENDERS.items():
        try:
            call = make(points)
            results = [machine.to_numpy(x) for x in call()]
        except Absent as reason:
            found[name] = {"status": "absent", "reason": str(reason)}
            continue
        except Exception as failure:  # of another library: the others are measured all the same
            found[name] = {"status": "failed", "reason": f"{type(failure).__name__}: {failure}"[:200]}
            continue
        first = first or results
        largest = LARGEST_ERROR["tf32" if "TF32" in name else "highest"]
        of_scores = error(points.case, points.host, results, first)
        found[name] = {"status": "ok" if of_scores < largest else "wrong", "error": of_scores}
        if found[name]["status"] == "ok":
            calls[name] = call
    return found, calls


# ---- What is shown ---------------------------------------------------------------------------------------------------


def markdown(records: Sequence[Record]) -> str:
    """A row for each contender of each case, and why others are not there."""
    heads = ("case", "contender", "ms", "10^9 pairs/s", "time : cuflash's", "error of a score")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    own = {row["case"]: row["us"] for row in _timed(records) if row["contender"] == "cuflash"}
    for row in _timed(records):
        ratio = row["us"] / own[row["case"]] if row["case"] in own else float("nan")
        cells = (f"{row['us'] / 1e3:.4g}", f"{_rate(row):.4g}", f"{ratio:.3g}", f"{row['error']:.1e}")
        lines.append(f"| {row['case']} | {row['contender']} | {' | '.join(cells)} |")
    others = [row for row in _rows(records) if row["status"] in ("wrong", "failed")]
    lines += [""] * bool(others)
    lines += [f"- {r['contender']}, {r['case']}: {r['status']}, {r.get('reason', r.get('error'))}" for r in others]
    return "\n".join(lines)


def _rows(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["record"] == "logsumexp"]


def _timed(records: Sequence[Record]) -> list[Record]:
    return [r for r in _rows(records) if "us" in r]


def _rate(row: Record) -> float:
    """10^9 pairs a second."""
    return float(row["pairs"] / row["us"] / 1e3)


def draw(plt: Any, records: Sequence[Record], path: Path) -> None:
    """Bars of pairs per second."""
    rows = _timed(records)[::-1]
    with plt.rc_context(RC):
        figure, axis = plt.subplots(figsize=(7, 0.6 + 0.22 * len(rows)), layout="constrained")
        colours = [COLOURS["cuflash"] if row["contender"].startswith("cuflash") else "#999999" for row in rows]
        positions = np.arange(len(rows))
        axis.barh(positions, [_rate(row) for row in rows], height=0.7, color=colours)
        axis.set(xscale="log", xlabel="10^9 pairs/s")
        axis.set_yticks(positions, [f"{row['case']}, {row['contender']}" for row in rows])
        axis.grid(axis="x", alpha=0.3)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
