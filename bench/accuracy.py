"""Errors of cuflash on many random problems, as a histogram: how far a dtype is from its bound, and how often.

Scores spread over four orders of magnitude, so that weights are everything from equal to zero and one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import cuflash.testing as ct
from cuflash import FlashAttention

RESULTS = ("out", "lse", "dq", "dk", "dv")
EDGES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, np.inf)  # of errors in units of the strict tolerance
BAR = 60  # characters of the longest one


def random_cases(dtype: str, count: int, seed: int = 0) -> Iterator[ct.Case]:
    """Problems of one dtype without options but `causal`."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        heads_kv = int(rng.integers(1, 3))
        yield ct.Case(
            seqlen_q=int(rng.integers(1, 300)),
            seqlen_k=int(rng.integers(1, 600)),
            head_dim=int(rng.integers(1, 257)),
            num_heads=heads_kv * int(rng.integers(1, 3)),
            num_heads_kv=heads_kv,
            causal=bool(rng.integers(2)),
            dtype=dtype,
            score_spread=float(10.0 ** rng.uniform(-2, 2)),
            seed=number,
        )


def measure(xp: Any, cases: Iterable[ct.Case], precision: Any = "highest") -> dict[str, list[ct.Measurement]]:
    """Measurements of every result on every case, by the name of the result; `xp` is NumPy or CuPy."""
    measurements: dict[str, list[ct.Measurement]] = {name: [] for name in RESULTS}
    for case in cases:
        arrays = case.arrays(xp.asarray)
        q, k, v = (arrays[name] for name in "qkv")
        attn = FlashAttention(**case.keywords, precision=precision)
        out, lse = attn.forward(q, k, v)
        results = (out, lse, *attn.backward(arrays["dout"], q, k, v, out, lse))
        yardsticks = ct.yardsticks(case.problem, case.arrays())
        for name, result in zip(RESULTS, results, strict=True):
            measurements[name].append(ct.measure(name, result, yardsticks[name]))
    return measurements


def histogram(measurements: dict[str, list[ct.Measurement]]) -> str:
    """A line for every range of errors, in units of the strict tolerance of the oracle rule (`cuflash.testing`)."""
    lines = []
    for name, found in measurements.items():
        ratios = np.array([m.strict_ratio for m in found])
        beyond = sum(m.failure is not None for m in found)
        lines.append(
            f"{name}: {len(ratios)} problems, median {np.median(ratios):.2f}, largest {ratios.max():.2f} of the strict "
            f"tolerance; {beyond} outside the rule"
        )
        counts = Counter(np.digitize(ratios, EDGES).tolist())
        longest = max(counts.values())
        for number, (low, high) in enumerate(itertools.pairwise(EDGES), 1):
            bar = "#" * -(-BAR * counts[number] // longest)
            lines.append(f"  {low:>5g} to {high:<5g} {counts[number]:>5} {bar}".rstrip())
    return "\n".join(lines)
