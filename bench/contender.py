"""What a contender is, and how it says that it takes no part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .cases import OPTIONS, Case

Calls = dict[str, Callable[[], tuple[Any, ...]]]


class Absent(Exception):
    """This contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """`calls["forward"]` returns (out,), `calls["backward"]` (dq, dk, dv), whole arrays that `to_array` turns into
    NumPy or CuPy ones; `plans` describes what runs, where the library tells; `coarser` is how much larger its unit of
    rounding is than the dtype's, where it was asked for less accuracy; `wait` returns when a result is there, where the
    library works on a stream of its own."""

    calls: Calls
    to_array: Callable[[Any], Any] = lambda x: x
    plans: Mapping[str, str] = field(default_factory=dict)
    coarser: float = 1.0
    wait: Callable[[Any], object] | None = None


def refuse(case: Case, *allowed: str) -> None:
    """Raise Absent for a case with other options (of `cases.OPTIONS`) than the allowed ones."""
    others = [OPTIONS[name] for name in case.options if name not in allowed]
    if others:
        raise Absent(f"is run without {' and '.join(others)}")


def without_results(calls: Calls) -> Calls:
    """The same calls, whose results are not checked."""

    def silent(call: Callable[[], object]) -> Callable[[], tuple[Any, ...]]:
        def run() -> tuple[Any, ...]:
            call()
            return ()

        return run

    return {name: silent(call) for name, call in calls.items()}
