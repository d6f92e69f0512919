"""Single values that a caller gives: how they are checked and converted, and the messages if they are wrong."""

from __future__ import annotations

import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable
from decimal import Decimal
from types import FrameType
from typing import TypeVar

FINITE = "a finite number that float64 holds"
N = TypeVar("N", int, float)
LONGEST_VALUE = 200  # characters of a value in a message
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def type_error(name: str, got: object, expected: str) -> TypeError:
    return TypeError(f"{name}: got {_shown(got)}, expected {expected}")


def value_error(name: str, got: object, expected: str) -> ValueError:
    return ValueError(f"{name}: got {_shown(got)}, expected {expected}")


def typed(value: object) -> str:
    """A value with its type, as messages say it: ``float 1.5``, but ``None`` and ``Decimal('1.5')``."""
    name, text = type(value).__name__, _shown(value, repr)
    return text if value is None or f"{name}(" in text else f"{name} {text}"


def _shown(value: object, spell: Callable[[object], str] = str) -> str:
    """A value in one line that is not too long for a message."""
    try:
        text = " ".join(spell(value).split())
    except ValueError:  # Python prints no integers of more than 4300 digits
        return "of thousands of digits"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def counted(count: int, noun: str) -> str:
    """The number and the noun: 1 head, 2 heads."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _unwrapped(value: object) -> object:
    """The value in a NumPy scalar or in an array without axes; any other value as it is."""
    import numpy as np

    return value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value


def as_bool(name: str, value: object, expected: str = "a bool") -> bool:
    """A bool, of Python or NumPy, checked."""
    unwrapped = value if type(value) is bool else _unwrapped(value)
    if not isinstance(unwrapped, bool):
        raise type_error(name, typed(value), expected)
    return unwrapped


def as_integer(name: str, value: object, expected: str = "an integer") -> int:
    """An integer of any type that can hold one, checked: nothing is rounded, and a bool or a float is none."""
    return _converted(int, (numbers.Rational, Decimal), name, value, expected)


def as_real(name: str, value: object, expected: str = "a real number") -> float:
    """A finite real number of any type, checked and rounded to float64."""
    number = _converted(float, (numbers.Real, Decimal), name, value, expected)
    if not math.isfinite(number):
        raise value_error(name, value, FINITE)
    return number


def _converted(target: type[N], types: tuple[type, ...], name: str, value: object, expected: str) -> N:
    if type(value) is target:
        return value
    unwrapped = _unwrapped(value)
    if isinstance(unwrapped, bool) or not isinstance(unwrapped, types):
        raise type_error(name, typed(value), expected)
    try:
        converted = target(unwrapped)  # type: ignore[arg-type, call-overload]
    except (OverflowError, ValueError):  # too large for float64; or a Decimal that is no number, or infinite
        raise value_error(name, typed(value), FINITE if target is float else expected) from None
    if target is int and converted != unwrapped:
        raise value_error(name, typed(value), expected)
    return converted


def check_choice(name: str, value: object, choices: tuple[str, ...], expected: str | None = None) -> str:
    """The one of some words that a value is; a str of another type, such as NumPy's, becomes Python's."""
    expected = expected or " or ".join(map(repr, choices))
    if not isinstance(value, str):
        raise type_error(name, typed(value), expected)
    if value not in choices:
        raise value_error(name, repr(value), expected)
    return choices[choices.index(value)]


def callers_frame() -> tuple[FrameType, int]:
    """The innermost frame of a caller, outside of this package and of NumPy; and its `stacklevel` for a warning."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_inside(frame):
        frame, level = frame.f_back, level + 1
    return frame, level


def callers_line(error: BaseException) -> str:
    """File and line of a caller, likewise, where an exception comes from."""
    every = list(traceback.walk_tb(error.__traceback__))
    frame, line = next(((frame, line) for frame, line in reversed(every) if not _is_inside(frame)), every[-1])
    return f"{frame.f_code.co_filename}:{line}"


def _is_inside(frame: FrameType) -> bool:
    numpy = sys.modules.get("numpy")
    inside = PACKAGE if numpy is None else (PACKAGE, os.path.dirname(str(numpy.__file__)) + os.sep)
    return frame.f_code.co_filename.startswith(inside)
