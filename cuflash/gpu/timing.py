"""Plans on a device, for `cuflash.gpu.tuning`: whether their results agree, and how long they take."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from cuflash.plan import LaunchPlan
from cuflash.plan.architectures import FAMILIES

REPEATS = 11  # of which the median counts
FLUSH_ROWS = 1024  # of the data that fill the L2 cache; one block or more reduces each
FLUSH_BYTES = 2**28
# In units in the last place of the largest result, by the size of an element: what is right differs by fewer, a mistake
# by more. Sums of wide elements are of rounded terms too, and cancel.
AGREEMENT = {2: 8, 4: 64, 8: 64}
# Between lse of two plans that multiply bytes: each rounds weights, which moves lse by less than half of it.
LSE_FP8 = 0.13


class Stopwatch:
    """Runs and times the plans of one call: `cuflash.gpu.tuning.Runner`."""

    def __init__(self, call_by: Callable[[LaunchPlan], Callable[[], tuple[Any, ...]]]) -> None:
        self._call_by = call_by
        self._first: tuple[Any, ...] | None = None
        l2_bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["l2CacheSize"]
        columns = max(FLUSH_BYTES, 4 * l2_bytes) // (4 * FLUSH_ROWS)
        # Read before each run, so that L2 holds nothing else.
        self._flushing = cupy.zeros((FLUSH_ROWS, columns), np.uint32)
        self._largest = cupy.zeros(FLUSH_ROWS, np.uint32)

    def why_wrong(self, plan: LaunchPlan) -> str | None:
        """How the results differ from those of the first plan; None if they agree."""
        results = self._call_by(plan)()
        if self._first is None:
            self._first = results
        for name, result, first in zip(plan.pass_.default, results, self._first, strict=True):
            if name == "key_indices":  # near ties come in another order; the weights tell
                continue
            is_fp8 = name == "lse" and FAMILIES[type(plan.tiles[0])].multiplies_float8
            difference = _difference(result, first, LSE_FP8 if is_fp8 else 0.0)
            if difference is not None:
                return f"{name} {difference}"
        return None

    def seconds(self, plan: LaunchPlan) -> float:
        """The median of several runs, each after the L2 cache was filled with other data by reading."""
        call = self._call_by(plan)
        call()
        times = []
        for _ in range(REPEATS):
            self._flushing.max(axis=1, out=self._largest)
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            call()
            end.record()
            times.append((start, end))
        end.synchronize()
        return statistics.median(cupy.cuda.get_elapsed_time(*pair) for pair in times) / 1e3


def _difference(result: Any, first: Any, allowed: float) -> str | None:
    """How a result differs from the first by more than rounding explains, and more than `allowed`; else None."""
    import ml_dtypes

    ulps = AGREEMENT[first.dtype.itemsize] * float(ml_dtypes.finfo(first.dtype).eps)
    wide = cupy.float64 if first.dtype.itemsize == 8 else cupy.float32
    result, first = result.astype(wide), first.astype(wide)
    finite = cupy.isfinite(first)
    if bool((cupy.isfinite(result) != finite).any()):
        return "has NaN or infinities where that of the table's row has none, or none where it has some"
    if not bool(finite.any()):
        return None
    scale = float(cupy.abs(cupy.where(finite, first, 0)).max())
    error = float(cupy.abs(cupy.where(finite, result - first, 0)).max())
    if error <= max(ulps * scale, allowed):
        return None
    return f"differs by {error:.3g} from that of the table's row, which is up to {scale:.3g}"
