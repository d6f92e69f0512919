"""What modules that compute with arrays of one backend have in common: their functions, as type checkers compare them.

`cuflash.dispatch.backend_of` and `reductions_of` give these modules.
"""

from __future__ import annotations

from typing import Any, Protocol

from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.passes import PASSES_WITHOUT_TANGENTS, Pass

Passes = tuple[Pass, ...]
Random = tuple[int, int]  # the seed and the offset of dropout


class Computes(Protocol):
    """Runs passes without dropout."""

    def compute(self, pass_: Pass, options: Options, arrays: dict[str, Any], need: tuple[str, ...], /) -> Any:
        """The results `need` of a pass over arrays by name."""


class PassBackend(Protocol):
    """Runs, plans, compiles and tunes passes: `cpu.backend`, `gpu.backend` and `streaming.calls` of cuflash."""

    def compute(
        self, pass_: Pass, options: Options, arrays: dict[str, Any], need: tuple[str, ...], random: Random = ..., /
    ) -> tuple[Any, ...]:
        """The results `need` of a pass over arrays by name."""

    def plan(
        self, options: Options, arrays: dict[str, Any], need: tuple[str, ...] = DEFAULT_NEED, passes: Passes = ..., /
    ) -> Any:
        """What would run."""

    def compile(
        self, options: Options, arrays: dict[str, Any], need: tuple[str, ...] = DEFAULT_NEED, passes: Passes = ..., /
    ) -> Any:
        """Make ready what runs."""

    def tune(
        self,
        options: Options,
        arrays: dict[str, Any],
        random: Random = (0, 0),
        /,
        *,
        passes: Passes = PASSES_WITHOUT_TANGENTS,
        remember: bool = True,
        forget: bool = False,
    ) -> Any:
        """Time tiles, or forget what tuning found."""


class PartBackend(PassBackend, Protocol):
    """Runs passes over a part of a problem, too: `cuflash.cpu.backend` and `cuflash.gpu.backend`."""

    def row_sums(self, options: Options, arrays: dict[str, Any], /) -> Any:
        """Row max and row sum of rows whose lse is large (`cuflash.spec.row_sums`)."""


class ReductionBackend(Protocol):
    """Reduces attention weights: modules `reductions` of `cuflash.cpu`, `cuflash.gpu` and `cuflash.streaming`."""

    def compute(self, pass_: Pass, options: Options, arrays: dict[str, Any], *count: int) -> tuple[Any, ...]:
        """The results of a reduction; `count` is how many keys `TOP_KEYS` finds of a row."""

    def plan(self, pass_: Pass, options: Options, arrays: dict[str, Any], *count: int) -> Any:
        """What would run."""

    def compile(self, pass_: Pass, options: Options, arrays: dict[str, Any], *count: int) -> Any:
        """Make ready what runs."""

    def tune(
        self,
        pass_: Pass,
        options: Options,
        arrays: dict[str, Any],
        *count: int,
        remember: bool = True,
        forget: bool = False,
    ) -> Any:
        """Time tiles, or forget what tuning found."""

    def plan_gradients(self, options: Options, arrays: dict[str, Any], need: tuple[str, ...], passes: Passes, /) -> Any:
        """The plan of the gradients of column sums."""

    def tune_gradients(
        self,
        options: Options,
        arrays: dict[str, Any],
        *,
        passes: Passes = ...,
        remember: bool = True,
        forget: bool = False,
    ) -> Any:
        """Tune the passes of these gradients."""
