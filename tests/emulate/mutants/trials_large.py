"""Trials of large scores: what tests/large_scores.py checks, by the kernels with a mistake, and lse of parts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from cuflash.emulator import SCHEDULES
from cuflash.emulator.passes import run
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.binding import bind
from cuflash.spec.options import Options
from cuflash.spec.passes import FORWARD
from tests.emulate.attention import on_kernels
from tests.large_scores import (
    Backend,
    Large,
    check_equal_scores,
    check_hidden_nan,
    check_large_products,
    check_mean,
    check_sinks,
    check_sums_of_weights,
)


@dataclass(frozen=True, kw_only=True)
class LargeTrial:
    """A check of large scores, on a device."""

    check: Callable[[Backend], None]
    arch: str | DeviceSpec = "9.0"

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        self.check(on_kernels(self.arch, kernels))


@dataclass(frozen=True, kw_only=True)
class PairTrial:
    """lse of a part, and what its rounding leaves, where each of 100 keys has the same score of about -2^23."""

    arch: str
    by_products: bool  # and not by a bias

    def run(self, kernels: Path | None = None) -> None:
        """Raise AssertionError where a kernel of the folder stores another number."""
        score, keys = -(2.0**23), 100
        q, k = (np.zeros((1, 1, rows, 64), ml_dtypes.bfloat16) for rows in (20, keys))
        out, pairs = np.full(q.shape, np.nan, q.dtype), np.full((1, 1, 20, 2), np.nan, np.float32)
        arrays = {"q": q, "k": k, "v": k, "out": out, "lse": pairs[..., 0]}
        if self.by_products:
            q[..., 0], k[..., 0] = 2.0**11, -(2.0**12)
            score *= math.log(2)
        else:
            arrays["bias"] = np.full((1, 1, 20, keys), score, np.float32)
        # Then a product is the exponent of base 2: no factor is rounded, by which lse would be off, too.
        options = Options(scale=math.log(2), wide=("lse",))
        binding = bind(FORWARD, options, arrays, need=(), address_of=lambda array: array.ctypes.data)
        plan = choose_plan(binding.problem, DeviceSpec.for_arch(self.arch), FORWARD, **binding.layout)
        run(plan, binding, arrays, SCHEDULES[0], kernels=kernels)
        found = pairs.astype(np.float64).sum(axis=-1) - score
        assert np.abs(found - np.log(keys)).max() < 1e-3, found


_ONE_SM = replace(DeviceSpec.for_arch("9.0"), num_sms=1)  # a block has all heads of its keys
_ROWS, _WIDE_ROWS = Large(dtype="bfloat16", bias=-1e9), Large(dtype="float32", spread=1e5)

TRIALS: dict[str, LargeTrial | PairTrial] = {
    "large rows": LargeTrial(check=partial(check_sums_of_weights, _ROWS)),
    "large row": LargeTrial(check=partial(check_sums_of_weights, replace(_ROWS, of="last query")), arch=_ONE_SM),
    "large rows float32": LargeTrial(check=partial(check_sums_of_weights, _WIDE_ROWS)),
    "large rows sm80": LargeTrial(check=partial(check_sums_of_weights, _ROWS), arch="8.0"),
    "large rows sinks": LargeTrial(check=partial(check_sinks, "bfloat16", -1e9)),
    "equal scores": LargeTrial(check=partial(check_equal_scores, "bfloat16", -3e7, 400, 0)),
    "large products": LargeTrial(check=partial(check_large_products, "bfloat16", 70, {"scale": 0.3}, 0)),
    "large products sm80": LargeTrial(
        check=partial(check_large_products, "float16", 70, {"scale": 0.3}, 0), arch="8.0"
    ),
    "lowest bias": LargeTrial(check=partial(check_mean, "bfloat16", -2.5e38)),
    "NaN of hidden keys": LargeTrial(check=partial(check_hidden_nan, "bfloat16", (1, 1, 1, 200), 1)),
    "large lse of parts": PairTrial(arch="9.0", by_products=False),
    "large lse of parts by products": PairTrial(arch="9.0", by_products=True),
    "large lse of parts sm80": PairTrial(arch="8.0", by_products=False),
}
