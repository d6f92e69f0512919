"""How much of a long command is done, on standard error: a bar on a terminal, and elsewhere a line a minute."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field

WIDEST, NARROWEST = 40, 10  # characters of a bar
AFTER, EVERY = 1.0, 0.1  # seconds until the bar is shown on a terminal, and until it is drawn again
LINE_EVERY = 60.0  # seconds between lines elsewhere


@dataclass
class Bar:
    """How much of what is to be done is done. On a terminal the bar goes away at the end of a `with` block.

    Nothing is shown of what takes less than a second, on a terminal, or less than a minute elsewhere. Only `advance`
    writes, so that nothing runs next to what is measured.
    """

    label: str
    total: int
    done: int = 0
    start: float = field(default_factory=time.perf_counter)
    _written: float = 0.0  # when something was, in seconds after the start
    _columns: int = 0  # of the line that is on the terminal

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def advance(self) -> None:
        """One more is done."""
        self.done += 1
        seconds = time.perf_counter() - self.start
        if sys.stderr is None or not sys.stderr.isatty():
            if sys.stderr is not None and seconds - self._written >= LINE_EVERY:
                self._written = seconds
                print(f"{self.label}: {self._state(seconds)}", file=sys.stderr, flush=True)
        elif seconds > AFTER and seconds - self._written >= EVERY:
            self._written = seconds
            self._draw(seconds)

    def print(self, text: str) -> None:
        """Print a line of results, above the bar where both are on one terminal."""
        is_shown = self._columns > 0
        self._clear()
        print(text, flush=True)
        if is_shown:
            self._draw(time.perf_counter() - self.start)

    def _state(self, seconds: float) -> str:
        return f"{100 * self.done // self.total:>3} %, {_in_words(seconds * (self.total / self.done - 1))} left"

    def _draw(self, seconds: float) -> None:
        state, columns = self._state(seconds), _columns_of_terminal()
        width = min(WIDEST, columns - len(f"{self.label} [] {state}"))
        filled = width * self.done // self.total
        bar = f"[{'#' * filled}{'.' * (width - filled)}] " if width >= NARROWEST else ""
        line = f"{self.label} {bar}{state}"[:columns]
        before, self._columns = self._columns, len(line)  # before it is drawn: an interruption may come next
        print(f"\r{line:<{before}}", end="", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._columns:
            width = min(self._columns + len("^C"), _columns_of_terminal())  # terminals show what interrupted
            print(f"\r{' ' * width}\r", end="", file=sys.stderr, flush=True)
        self._columns = 0


def _columns_of_terminal() -> int:
    """Columns that a line may have without the next one being begun."""
    try:
        return max(1, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
    except (OSError, ValueError):
        return 79


def _in_words(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"
