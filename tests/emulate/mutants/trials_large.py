"""Trials of large scores: what tests/large_scores.py checks, by the kernels with a mistake."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.emulate.attention import on_kernels
from tests.large_scores import (
    Backend,
    Large,
    check_equal_scores,
    check_hidden_nan,
    check_mean,
    check_sinks,
    check_sums_of_weights,
)


@dataclass(frozen=True, kw_only=True)
class LargeTrial:
    """A check of large scores, on a device."""

    check: Callable[[Backend], None]
    arch: str = "9.0"

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        self.check(on_kernels(self.arch, kernels))


_ROWS, _WIDE_ROWS = Large(dtype="bfloat16", bias=-1e9), Large(dtype="float32", spread=1e5)

TRIALS = {
    "large rows": LargeTrial(check=partial(check_sums_of_weights, _ROWS)),
    "large rows float32": LargeTrial(check=partial(check_sums_of_weights, _WIDE_ROWS)),
    "large rows sm80": LargeTrial(check=partial(check_sums_of_weights, _ROWS), arch="8.0"),
    "large rows sinks": LargeTrial(check=partial(check_sinks, "bfloat16", -1e9)),
    "equal scores": LargeTrial(check=partial(check_equal_scores, "bfloat16", -3e7, 400, 0)),
    "lowest bias": LargeTrial(check=partial(check_mean, "bfloat16", -2.5e38)),
    "NaN of hidden keys": LargeTrial(check=partial(check_hidden_nan, "bfloat16", (1, 1, 1, 200), 1)),
}
