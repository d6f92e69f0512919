"""Which cases of a long list, and how many examples, run: a sample of them, or all with `pytest --exhaustive`."""

import zlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")

# Of samples, one case in so many runs: that keeps .ci/run within its 15 minutes.
KEPT_ONE_IN = 20
# Whether all of them do; conftest.py says so before test modules are imported.
exhaustive = False


def sample(cases: Iterable[Case], one_in: int) -> Sequence[Case]:
    """A twentieth of one in `one_in` of the cases, by their names: a case more does not change which others run."""
    cases = list(cases)
    chosen = [case for case in cases if exhaustive or is_chosen(str(case), one_in)] or cases[:1]
    assert chosen, "there are no cases to choose from"
    return chosen


def examples(count: int) -> int:
    """How many examples of hypothesis run of so many: a twentieth."""
    return count if exhaustive else -(-count // 20)


def is_chosen(name: str, one_in: int) -> bool:
    index, rest = divmod(zlib.crc32(name.encode()), one_in)
    return rest == 0 and index % KEPT_ONE_IN == 1


# Of functions that compile kernels, one in three runs; but for these files, whose kernels are few or small.
COMPILING = ("compile", "emulate")
SMALL = ("test_mutants", "test_emulator", "test_emulator_sm90", "test_conformance", "test_conformance_sm90")


def is_kept_back(item: pytest.Item) -> bool:
    """Whether a test is of the functions that compile kernels which `--exhaustive` alone runs: two of three."""
    compiles = item.path.parent.name in COMPILING and item.path.stem not in SMALL
    return compiles and not exhaustive and zlib.crc32(item.nodeid.partition("[")[0].encode()) % 6 not in (1, 3)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """What runs with `--exhaustive` alone.

    Of tests marked ``one_in(n)``, all cases but a twentieth of one in n, and at least one, of each function. And two of
    three functions that compile kernels.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in") and not exhaustive:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    out = [item for item in items if is_kept_back(item)]
    for of_function in cases.values():
        (one_in,) = of_function[0].get_closest_marker("one_in").args  # type: ignore[union-attr]
        chosen = [item for item in of_function if is_chosen(item.nodeid, one_in)] or of_function[:1]
        out += [item for item in of_function if item not in chosen and not is_kept_back(item)]
    return out
