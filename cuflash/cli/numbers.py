"""Numbers for people: bytes, rates and times with three digits and a prefix."""

from __future__ import annotations

import math


def in_bytes(count: float) -> str:
    return with_prefix(count, "B", "-kMGT")


def in_flops(per_second: float) -> str:
    return with_prefix(per_second / 1e9, "FLOP/s", "GTP")


def in_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def with_prefix(value: float, unit: str, prefixes: str) -> str:
    """Three digits and a decimal prefix; `prefixes` are those of 1, 1000, and so on, "-" for none."""
    steps = min(max(int(math.log10(value) // 3), 0), len(prefixes) - 1) if value else 0
    return f"{value / 1000**steps:.3g} {prefixes[steps].strip('-')}{unit}"
