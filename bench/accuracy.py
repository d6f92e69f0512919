"""Errors of cuflash on many random problems, as a histogram: how far a dtype is from its bound, and how often.

Scores spread over four orders of magnitude, so that weights are everything from equal to zero and one.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import cuflash.testing as ct
from cuflash import FlashAttention
from cuflash.gpu.progress import Bar

from . import environment
from .report import ACCURACY, Record

RESULTS = ("out", "lse", "dq", "dk", "dv")
EDGES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, np.inf)  # of errors in units of the strict tolerance
BAR = 60  # characters of the longest one
# Few, since each makes kernels of its own.
HEAD_DIMS = (5, 32, 64, 96, 113, 128, 192, 256)

Measurements = Mapping[str, Sequence[ct.Measurement]]


def random_cases(dtype: str, count: int, seed: int = 0) -> Iterator[ct.Case]:
    """Problems of one dtype without options but `causal`."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        heads_kv = int(rng.integers(1, 3))
        yield ct.Case(
            seqlen_q=int(rng.integers(1, 300)),
            seqlen_k=int(rng.integers(1, 600)),
            head_dim=int(rng.choice(HEAD_DIMS)),
            num_heads=heads_kv * int(rng.integers(1, 3)),
            num_heads_kv=heads_kv,
            causal=bool(rng.integers(2)),
            dtype=dtype,
            score_spread=float(10.0 ** rng.uniform(-2, 2)),
            seed=number,
        )


def measure(xp: Any, cases: Sequence[ct.Case], precision: Any = "highest") -> Measurements:
    """Measurements of every result on every case, by the name of the result; `xp` is NumPy or CuPy."""
    with Bar("accuracy", total=3 * len(cases)) as bar:
        with ThreadPoolExecutor(environment.cores()) as pool:
            for _ in pool.map(lambda case: _prepare(xp, case, precision), cases):
                bar.advance()
        with _oracles() as pool:
            judged, found = [], []
            for case in cases:
                judged.append(pool.submit(_judge, case, _run(xp, case, precision)))
                bar.advance()
            for future in judged:
                found.append(future.result())
                bar.advance()
    return {name: [measurements[name] for measurements in found] for name in RESULTS}


def _prepare(xp: Any, case: ct.Case, precision: Any) -> tuple[FlashAttention, dict[str, Any]]:
    """What computes a case, its kernels compiled, and the arrays."""
    arrays = case.arrays(xp.asarray)
    attn = FlashAttention(**case.keywords, precision=precision)
    attn.compile(*ct.qkv(arrays))
    return attn, arrays


def _run(xp: Any, case: ct.Case, precision: Any) -> dict[str, Any]:
    """Results of both passes as NumPy arrays, by name."""
    attn, arrays = _prepare(xp, case, precision)
    q, k, v = ct.qkv(arrays)
    out, lse = attn.forward(q, k, v)
    results = (out, lse, *attn.backward(arrays["dout"], q, k, v, out, lse))
    return {name: ct.to_numpy(x) for name, x in zip(RESULTS, results, strict=True)}


def _judge(case: ct.Case, results: Mapping[str, Any]) -> dict[str, ct.Measurement]:
    yardsticks = ct.yardsticks(case.problem, case.arrays())
    return {name: ct.measure(name, x, yardsticks[name]) for name, x in results.items()}


@contextmanager
def _oracles() -> Iterator[ProcessPoolExecutor]:
    """A process for every core, which work side by side: the BLAS of each has one thread."""
    before = dict(os.environ)
    os.environ.update({f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL")})
    try:
        with ProcessPoolExecutor(environment.cores(), multiprocessing.get_context("spawn")) as pool:
            yield pool
    finally:
        os.environ.clear()
        os.environ.update(before)


def record(measurements: Measurements, *, gpu: bool, dtype: str, precision: str, revision: str | None) -> Record:
    """The histogram as JSON fields, and what it was measured on."""
    results = {}
    for name, found in measurements.items():
        ratios = _ratios(found)
        results[name] = {
            "median": float(np.median(ratios)),
            "largest": float(ratios.max()),
            "outside": sum(m.failure is not None for m in found),
            "counts": _counts(ratios),
        }
    what = {"dtype": dtype, "precision": precision, "problems": len(ratios), "kind": "gpu" if gpu else "cpu"}
    facts = environment.describe(gpu=gpu, revision_given=revision)
    return {"record": "accuracy", **what, "edges": EDGES[:-1], "results": results, **facts}


def append(folder: Path, row: Record) -> None:
    """Add a record to the file that the report reads."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ACCURACY).open("a") as file:
        file.write(json.dumps(row) + "\n")


def _ratios(found: Sequence[ct.Measurement]) -> Any:
    return np.array([m.strict_ratio for m in found])


def _counts(ratios: Any) -> list[int]:
    """How many errors there are in each range of EDGES; the last holds NaN too."""
    counts = Counter(np.minimum(np.digitize(ratios, EDGES), len(EDGES) - 1).tolist())
    return [counts[number] for number in range(1, len(EDGES))]


def histogram(row: Record) -> str:
    """A line for every range of errors, in units of the strict tolerance of the oracle rule (`cuflash.testing`)."""
    lines = []
    for name, found in row["results"].items():
        lines.append(
            f"{name}: {row['problems']} problems, median {found['median']:.2f}, largest {found['largest']:.2f} of the "
            f"strict tolerance; {found['outside']} outside the rule"
        )
        longest = max(found["counts"])
        for (low, high), count in zip(itertools.pairwise(EDGES), found["counts"], strict=True):
            bar = "#" * -(-BAR * count // longest)
            lines.append(f"  {low:>5g} to {high:<5g} {count:>5} {bar}".rstrip())
    return "\n".join(lines)
