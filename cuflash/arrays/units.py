"""Numbers and lines for people: bytes, rates and times with three digits and a decimal prefix, wrapped text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from typing import Any

WIDTH = 100  # columns of the lines of a plan


def in_bytes(count: float) -> str:
    return with_prefix(count, "B", "-kMGT")


def in_flops(per_second: float) -> str:
    return with_prefix(per_second / 1e9, "FLOP/s", "GTP")


def in_seconds(seconds: float) -> str:
    seconds = _rounded(seconds)
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def with_prefix(value: float, unit: str, prefixes: str) -> str:
    """Three digits and a decimal prefix; `prefixes` are those of 1, 1000, and so on, "-" for none."""
    value = _rounded(value)
    steps = min(max(int(math.log10(value) // 3), 0), len(prefixes) - 1) if value else 0
    return f"{value / 1000**steps:.3g} {prefixes[steps].strip('-')}{unit}"


def _rounded(value: float) -> float:
    """To three digits, before the unit is chosen: 999.9 is 1 of the next."""
    return float(f"{value:.3g}")


def wrapped(lines: Iterable[str], width: int) -> str:
    """Lines of at most `width` columns (0: of any), whose continuations are indented more than their beginnings."""
    if not width:
        return "\n".join(lines)
    found: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "drop_whitespace": True}
        found += textwrap.wrap(line, width, subsequent_indent=indent, **how) or [""]
    return "\n".join(found)
