"""A progress bar of one line on standard error: only on a terminal, and only for what takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

WIDTH = 40


@dataclass
class Bar:
    """How much of what is to be done is done."""

    total: int
    done: int = 0
    start: float = field(default_factory=time.perf_counter)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def advance(self) -> None:
        """One more is done."""
        self.done += 1
        if _is_on_terminal() and time.perf_counter() - self.start > 1:
            filled, percent = WIDTH * self.done // self.total, 100 * self.done // self.total
            line = f"\r[{'#' * filled}{'.' * (WIDTH - filled)}] {percent:>3} %"
            print(line, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if _is_on_terminal():
            print(f"\r{' ' * (WIDTH + len('[] 100 %'))}\r", end="", file=sys.stderr, flush=True)


def _is_on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def bar(total: int) -> Callable[[], None]:
    """A function to be called once for each of `total` things, which shows a bar until the last of them is done."""
    shown = Bar(total)

    def advance() -> None:
        shown.advance()
        if shown.done == total:
            shown.clear()

    return advance
